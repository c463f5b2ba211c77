"""
Rates and durations of about the last minute, from the workers' total counts.

Workers report totals only. The dashboard keeps their reports of about a minute with the worker's
own time of each, so a rate is the difference of two reports by the time between them, however late
a report is read. Until there are two reports of the last minute, the rate comes from the verdicts
by minute, which is nearly as exact.
"""

from collections import deque
from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field

from oncebridge.engine.verdict import Verdict
from oncebridge.observe.counts import CallCounts, Counts, Histogram, RouteCounts
from oncebridge.observe.fleet import FleetView, here_ms
from oncebridge.observe.report import Report

_WINDOW_MS: Final = 60_000
_OLDEST_MS: Final = 75_000
"""Other workers report every ten seconds: the oldest report of a full minute may be this old."""
_SHORTEST_MS: Final = 5_000
"""A rate over a shorter time is not stable."""
_APART_MS: Final = 1_000
_LATELY_MS: Final = 15 * 60_000
MINUTE_MS: Final = 60_000

DUPLICATES: Final = (Verdict.DUPLICATE, Verdict.STALE, Verdict.UNCHANGED)
FAILURES: Final = (Verdict.FAILED, Verdict.DEAD)
_DELIVERED: Final = (Verdict.DELIVERED, Verdict.BYPASSED)


class Totals(Struct, frozen=True):
    """Received, delivered, duplicates and failed: as counts or per second."""

    arrived: float = 0
    forwarded: float = 0
    repeats: float = 0
    failing: float = 0

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(
            self.arrived + other.arrived,
            self.forwarded + other.forwarded,
            self.repeats + other.repeats,
            self.failing + other.failing,
        )

    def __sub__(self, other: "Totals") -> "Totals":
        return self + other.scaled(-1)

    def scaled(self, factor: float) -> "Totals":
        """Return all values multiplied by *factor*."""
        return Totals(
            self.arrived * factor,
            self.forwarded * factor,
            self.repeats * factor,
            self.failing * factor,
        )


class Durations(Struct):
    """Durations of all routes together."""

    took: Histogram = field(default_factory=Histogram)
    sends: Histogram = field(default_factory=Histogram)
    failed_sends: int = 0
    lag: Histogram = field(default_factory=Histogram)
    store: dict[str, CallCounts] = field(default_factory=dict)


def totals(counts: Counts) -> Totals:
    """Return the totals of all routes."""
    total = Totals()
    for route in counts.routes.values():
        books = route.books
        total += Totals(
            books.get("arrived", 0),
            books.get("forwarded", 0),
            sum(books.get(verdict, 0) for verdict in DUPLICATES),
            sum(books.get(verdict, 0) for verdict in FAILURES),
        )
    return total


def durations(counts: Counts) -> Durations:
    """Return the durations of all routes."""
    routes = RouteCounts()
    for one in counts.routes.values():
        routes = routes + RouteCounts(
            took=one.took, lag=one.lag, sends=one.sends, failed_sends=one.failed_sends
        )
    return Durations(routes.took, routes.sends, routes.failed_sends, routes.lag, dict(counts.store))


class RateTracker:
    """
    Remembers recent reports of the workers.

    Pass every view to `observe`; the results are as of the last one.
    """

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[int, Counts]]] = {}
        self._highest: dict[str, tuple[int, int | None]] = {}
        """Value and last time of increase, by counter."""
        self._since: dict[str, int] = {}
        self._view = FleetView([], Counts(), 0)

    @property
    def now_ms(self) -> int:
        """The store's time at the last view."""
        return self._view.now_ms

    def observe(self, view: FleetView) -> None:
        """Record the reports of *view*."""
        self._view = view
        names = {report.state.name for report in view.reports}
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        for report in view.reports:
            self._keep(report)

    def _keep(self, report: Report) -> None:
        at_ms, name = report.state.at_ms, report.state.name
        seen = self._seen.setdefault(name, deque())
        if seen and (at_ms < seen[-1][0] or _arrived(report.counts) < _arrived(seen[-1][1])):
            seen.clear()  # its clock was set back, or part of its counts moved to the past
        if not seen or at_ms - seen[-1][0] >= _APART_MS:
            seen.append((at_ms, report.counts))
        while len(seen) > 1 and seen[1][0] <= at_ms - _WINDOW_MS:
            seen.popleft()
        now_ms = max(at_ms, here_ms(report, self._view.now_ms))
        while seen and seen[0][0] < now_ms - _OLDEST_MS:
            seen.popleft()

    def rates(self) -> Totals:
        """Return rates per second over about the last minute."""
        total = Totals()
        for report in self._view.reports:
            total += self._rates_of(report)
        return total

    def _rates_of(self, report: Report) -> Totals:
        now_ms = here_ms(report, self._view.now_ms)
        seen = self._seen.get(report.state.name)
        if report.state.ended or now_ms - report.state.at_ms > _WINDOW_MS:
            return Totals()  # it does not report, so it does nothing as far as is known
        if seen and seen[-1][0] - seen[0][0] >= _SHORTEST_MS:
            (first_ms, before), (last_ms, after) = seen[0], seen[-1]
            found = (totals(after) - totals(before)).scaled(1000 / (last_ms - first_ms))
            # A few seconds without arrivals do not mean a minute without arrivals.
            if found.arrived or last_ms - first_ms >= _WINDOW_MS:
                return found
        return by_minutes(report)

    def durations(self) -> Durations | None:
        """Return the durations of about the last minute; None if not known yet."""
        pairs = [(seen[0], seen[-1]) for seen in self._seen.values() if seen]
        found = [_less(durations(now), durations(then)) for (t, then), (n, now) in pairs if n > t]
        if not found:
            return None
        total = Durations()
        for one in found:
            total = _joined(total, one)
        return total

    def rose_lately(self, name: str, value: int) -> bool:
        """Record a counter; True if it rose in the last 15 minutes."""
        now_ms = self._view.now_ms
        before, rose_ms = self._highest.get(name, (value, None))
        if value > before:
            rose_ms = now_ms
        self._highest[name] = value, rose_ms
        return rose_ms is not None and now_ms - rose_ms < _LATELY_MS

    def since_ms(self, name: str, *, lasts: bool) -> int:
        """Return since when a condition lasts; now if it does not."""
        if not lasts:
            self._since.pop(name, None)
            return self._view.now_ms
        return self._since.setdefault(name, self._view.now_ms)


def by_minutes(report: Report) -> Totals:
    """Return rates per second from the verdicts of this minute and the one before."""
    at_ms = report.state.at_ms
    minute, into_ms = divmod(at_ms, MINUTE_MS)
    minutes = report.counts.minutes
    left = 1 - into_ms / MINUTE_MS
    counted = _of_verdicts(minutes.get(minute, {})) + _of_verdicts(
        minutes.get(minute - 1, {})
    ).scaled(left)
    over_ms = min(max(at_ms - report.state.started_ms, 1000), MINUTE_MS)
    return counted.scaled(1000 / over_ms)


def _arrived(counts: Counts) -> int:
    return sum(route.books.get("arrived", 0) for route in counts.routes.values())


def _of_verdicts(counted: Mapping[str, int]) -> Totals:
    return Totals(
        sum(counted.get(verdict, 0) for verdict in Verdict),
        # Earlier versions do not report how many were forwarded.
        counted.get("forwarded", sum(counted.get(verdict, 0) for verdict in _DELIVERED)),
        sum(counted.get(verdict, 0) for verdict in DUPLICATES),
        sum(counted.get(verdict, 0) for verdict in FAILURES),
    )


def _minus(now: Histogram, then: Histogram) -> Histogram:
    if not then.counts:
        return now
    pairs = zip(now.counts, then.counts, strict=False)
    return Histogram([max(one - two, 0) for one, two in pairs], max(now.sum - then.sum, 0.0))


def _less(now: Durations, then: Durations) -> Durations:
    none = CallCounts()
    return Durations(
        _minus(now.took, then.took),
        _minus(now.sends, then.sends),
        max(now.failed_sends - then.failed_sends, 0),
        _minus(now.lag, then.lag),
        {
            name: CallCounts(
                _minus(calls.took, then.store.get(name, none).took),
                failed=max(calls.failed - then.store.get(name, none).failed, 0),
            )
            for name, calls in now.store.items()
        },
    )


def _joined(one: Durations, other: Durations) -> Durations:
    none = CallCounts()
    return Durations(
        one.took + other.took,
        one.sends + other.sends,
        one.failed_sends + other.failed_sends,
        one.lag + other.lag,
        {
            name: one.store.get(name, none) + other.store.get(name, none)
            for name in dict.fromkeys([*one.store, *other.store])
        },
    )
