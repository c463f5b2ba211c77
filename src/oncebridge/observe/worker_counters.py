"""
The counters of one process, updated by hooks.

The hooks run for every event, so they do as little as possible: sums such as arrivals per minute
are computed when a report is made.

Counts by route, rule or verdict are bounded by the configuration. Topics and entities are chosen
by senders: of those, only the ones with the highest counts are kept (`TopCounts`).
"""

from bisect import bisect_left
from collections.abc import Mapping
from itertools import islice
from typing import Final

from oncebridge.base.clock import Clock
from oncebridge.engine.causes import Cause
from oncebridge.engine.counters import Books
from oncebridge.engine.hooks import Decision, RoundTrip
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
    """The counts of one verdict of one rule of one route."""

    __slots__ = ("before", "count", "is_delivery", "is_repeat", "lag", "lag_s", "took", "took_s")

    def __init__(self, verdict: Verdict) -> None:
        self.count = 0
        self.before = 0
        """The count at the beginning of the minute."""
        self.is_delivery = verdict is Verdict.DELIVERED
        self.is_repeat = verdict in _REPEATS
        self.took = [0] * (len(SECONDS) + 1)
        self.took_s = 0.0
        self.lag = [0] * (len(LAGS) + 1) if self.is_delivery else []
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
        self._tallies: dict[tuple[str, str, Verdict], _Tally] = {}
        self._causes: dict[str, dict[Cause, int]] = {}
        self._calls: dict[str, _Calls] = {}
        self._sends: dict[str, _Calls] = {}
        self._topics = TopCounts()
        self._entities = TopCounts()
        self._times: dict[str | None, int | None] = {}
        """Parsed times of events: EventBridge truncates them to seconds, so many are equal."""
        self._forwarded = 0
        """Events that the sink accepted in this minute with another verdict than delivered."""
        self._minutes: dict[int, dict[str, int]] = {}
        self._minute = clock() // _MINUTE_MS
        self._minute_ends_ms = (self._minute + 1) * _MINUTE_MS

    def decided(self, decision: Decision, cause: Cause | None) -> None:  # noqa: C901 - one function, as a call would double its cost
        """Count one arrival; *cause* is that of a duplicate."""
        outcome, event, took_s = decision.outcome, decision.event, decision.took_s
        if decision.arrived_ms >= self._minute_ends_ms:
            self._turn(decision.arrived_ms // _MINUTE_MS)
        try:
            tally = self._tallies[decision.route, outcome.rule, outcome.verdict]
        except KeyError:
            tally = self._add_tally(decision)
        tally.count += 1
        tally.took[bisect_left(SECONDS, took_s)] += 1
        tally.took_s += took_s
        if type(event) is not Event:
            return
        try:
            topic = self._topics.found[event.detail_type]
        except KeyError:
            topic = self._topics.add(topic_of(event))
        topic[0] += 1
        if tally.is_delivery:
            try:
                at_ms = self._times[event.time]
            except KeyError:
                at_ms = self._read_time(event.time)
            if at_ms is not None:
                lag_s = (decision.arrived_ms - at_ms) / 1000 + took_s
                if lag_s < 0:  # by another host's clock
                    lag_s = 0.0
                tally.lag[bisect_left(LAGS, lag_s)] += 1
                tally.lag_s += lag_s
            return
        if outcome.forwarded:
            self._forwarded += 1
        if tally.is_repeat:
            topic[1] += 1
            self._count_entity(entity_of(event))
        if cause is not None:
            causes = self._causes.setdefault(decision.route, {})
            causes[cause] = causes.get(cause, 0) + 1

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

    def _add_tally(self, decision: Decision) -> _Tally:
        outcome = decision.outcome
        name = decision.route, outcome.rule, outcome.verdict
        tally = self._tallies[name] = _Tally(outcome.verdict)
        return tally

    def _read_time(self, time: str | None) -> int | None:
        if time is None or len(time) > _LONGEST_NAME:
            return None
        if len(self._times) >= _MOST_TIMES:
            self._times.clear()
        at_ms = self._times[time] = parse_instant(time)
        return at_ms

    def _count_entity(self, entity: str) -> None:
        if entity:
            counts = self._entities.found.get(entity)
            if counts is None:
                counts = self._entities.add(entity)
            counts[0] += 1

    def _turn(self, minute: int) -> None:
        """Store the counts of the past minute, and begin the next."""
        verdicts: dict[str, int] = {}
        for (_, _, verdict), tally in self._tallies.items():
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
        for (route, rule, verdict), tally in self._tallies.items():
            counts = routes.setdefault(route, RouteCounts())
            counts.rules.setdefault(rule, {})[verdict.value] = tally.count
            counts.took += _histogram(tally.took, tally.took_s)
            if tally.is_delivery:
                counts.lag += _histogram(tally.lag, tally.lag_s)
        for route, causes in self._causes.items():
            routes.setdefault(route, RouteCounts()).causes = {
                cause.value: count for cause, count in causes.items()
            }
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
