"""
The counters of one process, updated by hooks.

The hooks run for every batch, so they do as little as possible: what the events of a batch share
is counted once.

Counts by route, rule or verdict are bounded by the configuration. Topics and entities are chosen
by senders: of those, only the ones with the highest counts are kept (`TopCounts`).
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

from oncebridge.base.clock import Clock
from oncebridge.engine.causes import Cause
from oncebridge.engine.counters import Books
from oncebridge.engine.hooks import Decisions, RoundTrip
from oncebridge.engine.verdict import Verdict
from oncebridge.events.event import Event
from oncebridge.events.summary import entity_of, topic_of
from oncebridge.events.timestamps import parse_instant
from oncebridge.observe.counts import (
    ITEMS,
    LAGS,
    MINUTES,
    NOISIEST,
    SECONDS,
    CallCounts,
    Counts,
    Histogram,
    RouteCounts,
    added,
)

_MINUTE_MS: Final = 60_000
_MOST_TIMES: Final = 4096
_LONGEST_NAME: Final = 200
_REPEATS: Final = frozenset({Verdict.DUPLICATE, Verdict.STALE, Verdict.UNCHANGED})


class TopCounts:
    """
    Count names chosen by senders, and keep at most twice *most* of them.

    When the limit is reached, the half with the lower counts is removed, and new names rank as if
    they had the highest count that was removed: so names that are frequent from now on stay, and a
    flood of names that occur once replaces only other such names. Reported counts are real counts,
    and never too high.
    """

    def __init__(self, most: int = 200) -> None:
        self._most = most
        self._head_start = 0
        self.found: dict[str, list[int]] = {}
        """Count, duplicates, and the rank offset."""

    def add(self, name: str) -> list[int]:
        """Return the counts of *name* if it is not in `found`; make them if necessary."""
        name = name[:_LONGEST_NAME]
        counts = self.found.get(name)
        if counts is None:
            if len(self.found) >= 2 * self._most:
                self._make_room()
            counts = self.found[name] = [0, 0, self._head_start]
        return counts

    def _make_room(self) -> None:
        ranked = sorted(self.found.items(), key=lambda item: item[1][0] + item[1][2], reverse=True)
        self.found = dict(ranked[: self._most])
        loudest = ranked[self._most][1]
        self._head_start = max(self._head_start, loudest[0] + loudest[2])

    def top(self, most: int = NOISIEST) -> dict[str, list[int]]:
        """Return the names with the highest counts."""
        ranked = sorted(self.found.items(), key=lambda item: (-item[1][0], item[0]))
        return dict(islice(ranked, most))


class _Tally:
    """The counts of one verdict of one route."""

    __slots__ = (
        "before",
        "causes",
        "count",
        "is_delivery",
        "is_repeat",
        "lag",
        "lag_s",
        "rules",
        "took",
        "took_s",
    )

    def __init__(self, verdict: Verdict) -> None:
        self.is_delivery = verdict is Verdict.DELIVERED
        self.is_repeat = verdict in _REPEATS
        self.count = 0
        self.before = 0
        """The count at the beginning of the minute."""
        self.rules: dict[str, int] = {}
        self.causes: dict[Cause, int] = {}
        self.took = [0] * (len(SECONDS) + 1)
        self.took_s = 0.0
        self.lag = [0] * (len(LAGS) + 1)
        self.lag_s = 0.0


class _Calls:
    """The counts of one kind of call."""

    __slots__ = ("failed", "items", "items_sum", "took", "took_s")

    def __init__(self) -> None:
        self.took = [0] * (len(SECONDS) + 1)
        self.took_s = 0.0
        self.items = [0] * (len(ITEMS) + 1)
        self.items_sum = 0.0
        self.failed = 0


class WorkerCounters:
    """
    Count decisions and calls.

    Topics and entities are counted by name, unless they are masked.
    """

    def __init__(
        self, clock: Clock, *, names_topics: bool = True, names_entities: bool = True
    ) -> None:
        self._clock = clock
        self._names_topics = names_topics
        self._names_entities = names_entities
        self._tallies: dict[tuple[str, Verdict], _Tally] = {}
        self._calls: dict[str, _Calls] = {}
        self._sends: dict[str, _Calls] = {}
        self._topics = TopCounts()
        self._entities = TopCounts()
        self._times: dict[str | None, float | None] = {}
        """Parsed times of events: EventBridge truncates them to seconds, so many are equal."""
        self._forwarded = 0
        """Events that the sink accepted in this minute with another verdict than delivered."""
        self._minutes: dict[int, dict[str, int]] = {}
        self._minute = clock() // _MINUTE_MS
        self._minute_ends_ms = (self._minute + 1) * _MINUTE_MS

    def decided(self, decisions: Decisions, causes: Sequence[Cause | None]) -> None:  # noqa: C901 - one function, as calls would double the cost of a small batch
        """Count arrivals; *causes* are those of duplicates."""
        verdict, outcomes, took_s = decisions.verdict, decisions.outcomes, decisions.took_s
        if decisions.arrived_ms >= self._minute_ends_ms:
            self._turn(decisions.arrived_ms // _MINUTE_MS)
        try:
            tally = self._tallies[decisions.route, verdict]
        except KeyError:
            tally = self._tallies[decisions.route, verdict] = _Tally(verdict)
        count = len(outcomes)
        tally.count += count
        tally.took[bisect_left(SECONDS, took_s)] += count
        tally.took_s += took_s * count
        # Two loops: `zip` costs more than the work, as many batches are small.
        rules = tally.rules
        for outcome in outcomes:
            rule = outcome.rule
            rules[rule] = rules.get(rule, 0) + 1
        topics, entities, times, lag = self._topics, self._entities, self._times, tally.lag
        is_delivery, is_repeat = tally.is_delivery, tally.is_repeat
        until_s = decisions.arrived_ms / 1000 + took_s
        for event in decisions.events:
            if type(event) is not Event:
                continue
            name = event.detail_type or topic_of(event)
            topic = topics.found.get(name) or topics.add(name)
            topic[0] += 1
            if is_delivery:
                try:
                    at_s = times[event.time]
                except KeyError:
                    at_s = self._read_time(event.time)
                if at_s is not None:
                    lag_s = until_s - at_s
                    if lag_s < 0:  # by another host's clock
                        lag_s = 0.0
                    lag[bisect_left(LAGS, lag_s)] += 1
                    tally.lag_s += lag_s
            elif is_repeat:
                topic[1] += 1
                if entity := entity_of(event):
                    (entities.found.get(entity) or entities.add(entity))[0] += 1
        if not is_delivery:
            self._forwarded += sum([outcome.forwarded for outcome in outcomes])
            for cause in causes:
                if cause is not None:
                    tally.causes[cause] = tally.causes.get(cause, 0) + 1

    def travelled(self, trip: RoundTrip) -> None:
        """Count one call to the store or a sink."""
        at_store = trip.place == "store"
        of, name = (self._calls, trip.call) if at_store else (self._sends, trip.route)
        calls = of.get(name)
        if calls is None:
            calls = of[name] = _Calls()
        calls.took[bisect_left(SECONDS, trip.took_s)] += 1
        calls.took_s += trip.took_s
        calls.items[bisect_left(ITEMS, trip.items)] += 1
        calls.items_sum += trip.items
        if not trip.ok:
            calls.failed += 1

    def counts(self, books: Mapping[str, Books]) -> Counts:
        """Return all counts, with the books of each route."""
        self._turn(self._clock() // _MINUTE_MS)
        return Counts(
            self._routes(books),
            {
                name: CallCounts(_histogram(c.took, c.took_s), _items(c), c.failed)
                for name, c in self._calls.items()
            },
            {minute: dict(verdicts) for minute, verdicts in self._minutes.items()},
            {
                name: {"arrived": arrived, "repeats": repeats}
                for name, (arrived, repeats, _) in self._topics.top().items()
                if self._names_topics
            },
            {
                name: repeats
                for name, (repeats, _, _) in self._entities.top().items()
                if self._names_entities
            },
        )

    # --- counting -------------------------------------------------------------------------

    def _read_time(self, time: str | None) -> float | None:
        if time is None or len(time) > _LONGEST_NAME:
            return None
        if len(self._times) >= _MOST_TIMES:
            self._times.clear()
        at_ms = parse_instant(time)
        at_s = self._times[time] = None if at_ms is None else at_ms / 1000
        return at_s

    def _turn(self, minute: int) -> None:
        """Store the counts of the past minute, and begin the next."""
        verdicts: dict[str, int] = {}
        for (_, verdict), tally in self._tallies.items():
            if tally.count != tally.before:
                name = verdict.value
                verdicts[name] = verdicts.get(name, 0) + tally.count - tally.before
                tally.before = tally.count
        if verdicts:
            forwarded = verdicts.get(Verdict.DELIVERED, 0) + self._forwarded
            self._forwarded = 0
            if forwarded:
                verdicts["forwarded"] = forwarded
            counted = added(self._minutes.get(self._minute, {}), verdicts)
            self._minutes[self._minute] = counted
        self._minute = minute
        self._minute_ends_ms = (minute + 1) * _MINUTE_MS
        for old in [each for each in self._minutes if not minute - MINUTES < each <= minute]:
            del self._minutes[old]

    # --- reporting ------------------------------------------------------------------------

    def _routes(self, books: Mapping[str, Books]) -> dict[str, RouteCounts]:
        routes = {name: RouteCounts(_sums(its)) for name, its in books.items()}
        for (route, verdict), tally in self._tallies.items():
            counts = routes.setdefault(route, RouteCounts())
            for rule, count in tally.rules.items():
                counts.rules.setdefault(rule, {})[verdict.value] = count
            for cause, count in tally.causes.items():
                counts.causes[cause.value] = counts.causes.get(cause.value, 0) + count
            counts.took += _histogram(tally.took, tally.took_s)
            counts.lag += _histogram(tally.lag, tally.lag_s)
        for route, sends in self._sends.items():
            counts = routes.setdefault(route, RouteCounts())
            counts.sends = _histogram(sends.took, sends.took_s)
            counts.sent_together = _items(sends)
            counts.failed_sends = sends.failed
        return routes


def _sums(books: Books) -> dict[str, int]:
    return {name: count for name, count in books.counts().items() if name != "in_flight"}


def _histogram(counts: list[int], total: float) -> Histogram:
    return Histogram(list(counts), total) if any(counts) else Histogram()


def _items(calls: _Calls) -> Histogram:
    return _histogram(calls.items, calls.items_sum)
