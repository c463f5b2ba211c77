"""
The counters of one process, turned by hooks.

They run for every event, so they do little: what can be found out later, such as how many there
were in a minute, is found out when somebody asks.

What is counted by route, rule or verdict is bounded by the configuration. Topics and entities
are the senders' to invent: of those, only the noisiest are kept (`Noisiest`).
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
from oncebridge.events.timestamps import instant
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
    Count what anybody may name, and keep at most twice *most* of it.

    When there is no more room, the quieter half goes, and what is new after that ranks as if it
    had been counted as often as the loudest of those: so whatever is loud from now on stays,
    and a flood of names that come once each only drives out others of its kind. What is told is
    what was really counted, and so never too much.
    """

    def __init__(self, most: int = 200) -> None:
        self._most = most
        self._head_start = 0
        self.found: dict[str, list[int]] = {}
        """Counted, repeats among them, and the head start."""

    def add(self, name: str) -> list[int]:
        """Find the counts of *name*, which are not in `found`, or make them."""
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
        """Return those that were counted most often."""
        ranked = sorted(self.found.items(), key=lambda item: (-item[1][0], item[0]))
        return dict(islice(ranked, most))


class _Tally:
    """What is counted of one verdict, by one rule of one route."""

    __slots__ = ("before", "count", "is_delivery", "is_repeat", "lag", "lag_s", "took", "took_s")

    def __init__(self, verdict: Verdict) -> None:
        self.count = 0
        self.before = 0
        """How many there were when the minute began."""
        self.is_delivery = verdict is Verdict.DELIVERED
        self.is_repeat = verdict in _REPEATS
        self.took = [0] * (len(SECONDS) + 1)
        self.took_s = 0.0
        self.lag = [0] * (len(LAGS) + 1) if self.is_delivery else []
        self.lag_s = 0.0


class _Calls:
    """What is counted of one kind of call."""

    __slots__ = ("failed", "items", "items_sum", "took", "took_s")

    def __init__(self) -> None:
        self.took = [0] * (len(SECONDS) + 1)
        self.took_s = 0.0
        self.items = [0] * (len(ITEMS) + 1)
        self.items_sum = 0.0
        self.failed = 0


class WorkerCounters:
    """
    Count what the hooks tell.

    What is noisy is named by topic and entity, unless these are hidden.
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
        """What time events bear: EventBridge cuts it to the second, so most agree."""
        self._forwarded = 0
        """What the sink took since the minute began, though its verdict is another."""
        self._minutes: dict[int, dict[str, int]] = {}
        self._minute = clock() // _MINUTE_MS
        self._minute_ends_ms = (self._minute + 1) * _MINUTE_MS

    def decided(self, decision: Decision, cause: Cause | None) -> None:  # noqa: C901 - in one piece, as a call would double its cost
        """Count one arrival; *cause* says why it came again, if it did."""
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
        """Count one call of the store or a sink."""
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
        """Return all sums, with the books of each route."""
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

    # --- on the way -----------------------------------------------------------------------

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
        at_ms = self._times[time] = instant(time)
        return at_ms

    def _count_entity(self, entity: str) -> None:
        if entity:
            counts = self._entities.found.get(entity)
            if counts is None:
                counts = self._entities.add(entity)
            counts[0] += 1

    def _turn(self, minute: int) -> None:
        """Write down what was counted in the minute that is over, and begin another."""
        verdicts: dict[str, int] = {}
        for (_, _, verdict), tally in self._tallies.items():
            if tally.count != tally.before:
                name = verdict.value
                verdicts[name] = verdicts.get(name, 0) + tally.count - tally.before
                tally.before = tally.count
        if verdicts:
            passed_on = verdicts.get(Verdict.DELIVERED, 0) + self._forwarded
            self._forwarded = 0
            if passed_on:
                verdicts["forwarded"] = passed_on
            counted = added(self._minutes.get(self._minute, {}), verdicts)
            self._minutes[self._minute] = counted
        self._minute = minute
        self._minute_ends_ms = (minute + 1) * _MINUTE_MS
        for old in [each for each in self._minutes if not minute - MINUTES < each <= minute]:
            del self._minutes[old]

    # --- when it is asked for -------------------------------------------------------------

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
