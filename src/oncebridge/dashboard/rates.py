"""
How fast it goes right now: what was counted lately, by what was counted before.

Workers only tell sums. Whoever looks keeps the reports of about a minute, each with the time its
worker gave it, so a rate is what was counted between two reports and the time between them: exact,
however late a report is read. Nobody looks all the time, and what was seen long ago says nothing
of now; before there are two reports of the last minute, the verdicts by minute give a rate that
is nearly as good.
"""

from collections import deque
from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field

from oncebridge.engine.verdict import Verdict
from oncebridge.observe.counts import CallCounts, Counts, Histogram, RouteCounts
from oncebridge.observe.fleet import View, here_ms
from oncebridge.observe.report import Report

_WINDOW_MS: Final = 60_000
_OLDEST_MS: Final = 75_000
"""Others report every ten seconds: the oldest of a whole minute is up to so old."""
_SHORTEST_MS: Final = 5_000
"""A rate over less than this jumps about."""
_APART_MS: Final = 1_000
_LATELY_MS: Final = 15 * 60_000
MINUTE_MS: Final = 60_000

REPEATS: Final = (Verdict.DUPLICATE, Verdict.STALE, Verdict.UNCHANGED)
FAILING: Final = (Verdict.FAILED, Verdict.DEAD)
_PASSED_ON: Final = (Verdict.DELIVERED, Verdict.BYPASSED)


class Sums(Struct, frozen=True):
    """What goes in and out, in numbers or in numbers a second."""

    arrived: float = 0
    forwarded: float = 0
    repeats: float = 0
    failing: float = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
            self.arrived + other.arrived,
            self.forwarded + other.forwarded,
            self.repeats + other.repeats,
            self.failing + other.failing,
        )

    def __sub__(self, other: "Sums") -> "Sums":
        return self + other.times(-1)

    def times(self, factor: float) -> "Sums":
        """Return so many times as much."""
        return Sums(
            self.arrived * factor,
            self.forwarded * factor,
            self.repeats * factor,
            self.failing * factor,
        )


class Times(Struct):
    """How long everything took, all routes together."""

    took: Histogram = field(default_factory=Histogram)
    sends: Histogram = field(default_factory=Histogram)
    failed_sends: int = 0
    lag: Histogram = field(default_factory=Histogram)
    store: dict[str, CallCounts] = field(default_factory=dict)


def sums(counts: Counts) -> Sums:
    """Add up what went in and out on all routes."""
    total = Sums()
    for route in counts.routes.values():
        books = route.books
        total += Sums(
            books.get("arrived", 0),
            books.get("forwarded", 0),
            sum(books.get(verdict, 0) for verdict in REPEATS),
            sum(books.get(verdict, 0) for verdict in FAILING),
        )
    return total


def times(counts: Counts) -> Times:
    """Lay the times of all routes together."""
    routes = RouteCounts()
    for one in counts.routes.values():
        routes = routes + RouteCounts(
            took=one.took, lag=one.lag, sends=one.sends, failed_sends=one.failed_sends
        )
    return Times(routes.took, routes.sends, routes.failed_sends, routes.lag, dict(counts.store))


class Pulse:
    """
    What was seen of the workers before, by one dashboard.

    Give it every view by `observe`; what it then tells is as of the last one.
    """

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[int, Counts]]] = {}
        self._highest: dict[str, tuple[int, int | None]] = {}
        """Of each counter its value, and when it was last seen to rise."""
        self._since: dict[str, int] = {}
        self._view = View([], Counts(), 0)

    @property
    def now_ms(self) -> int:
        """The store's time, when it was last looked."""
        return self._view.now_ms

    def observe(self, view: View) -> None:
        """Take note of what the workers tell now."""
        self._view = view
        names = {report.state.name for report in view.reports}
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        for report in view.reports:
            self._keep(report)

    def _keep(self, report: Report) -> None:
        at_ms, name = report.state.at_ms, report.state.name
        seen = self._seen.setdefault(name, deque())
        if seen and (at_ms < seen[-1][0] or _arrived(report.counts) < _arrived(seen[-1][1])):
            seen.clear()  # its clock was set back, or part of it counts as the past now
        if not seen or at_ms - seen[-1][0] >= _APART_MS:
            seen.append((at_ms, report.counts))
        while len(seen) > 1 and seen[1][0] <= at_ms - _WINDOW_MS:
            seen.popleft()
        now_ms = max(at_ms, here_ms(report, self._view.now_ms))
        while seen and seen[0][0] < now_ms - _OLDEST_MS:
            seen.popleft()

    def rates(self) -> Sums:
        """Return how many a second, over about the last minute."""
        total = Sums()
        for report in self._view.reports:
            total += self._rates_of(report)
        return total

    def _rates_of(self, report: Report) -> Sums:
        now_ms = here_ms(report, self._view.now_ms)
        seen = self._seen.get(report.state.name)
        if report.state.ended or now_ms - report.state.at_ms > _WINDOW_MS:
            return Sums()  # it says nothing, and does nothing as far as we know
        if seen and seen[-1][0] - seen[0][0] >= _SHORTEST_MS:
            (first_ms, before), (last_ms, after) = seen[0], seen[-1]
            found = (sums(after) - sums(before)).times(1000 / (last_ms - first_ms))
            # Whoever looked for a few seconds only has not seen that nothing came in a minute.
            if found.arrived or last_ms - first_ms >= _WINDOW_MS:
                return found
        return by_minutes(report)

    def times(self) -> Times | None:
        """Return how long everything took in about the last minute; None before that is known."""
        pairs = [(seen[0], seen[-1]) for seen in self._seen.values() if seen]
        found = [_less(times(now), times(then)) for (t, then), (n, now) in pairs if n > t]
        if not found:
            return None
        total = Times()
        for one in found:
            total = _joined(total, one)
        return total

    def rose_lately(self, name: str, value: int) -> bool:
        """Take note of a counter, and tell whether it was seen to rise in the last minutes."""
        now_ms = self._view.now_ms
        before, rose_ms = self._highest.get(name, (value, None))
        if value > before:
            rose_ms = now_ms
        self._highest[name] = value, rose_ms
        return rose_ms is not None and now_ms - rose_ms < _LATELY_MS

    def since_ms(self, name: str, *, lasts: bool) -> int:
        """Tell since when something is seen to last, now included."""
        if not lasts:
            self._since.pop(name, None)
            return self._view.now_ms
        return self._since.setdefault(name, self._view.now_ms)


def by_minutes(report: Report) -> Sums:
    """Return how many a second by the verdicts of this minute and the one before."""
    at_ms = report.state.at_ms
    minute, into_ms = divmod(at_ms, MINUTE_MS)
    minutes = report.counts.minutes
    left = 1 - into_ms / MINUTE_MS
    counted = _of_verdicts(minutes.get(minute, {})) + _of_verdicts(
        minutes.get(minute - 1, {})
    ).times(left)
    over_ms = min(max(at_ms - report.state.started_ms, 1000), MINUTE_MS)
    return counted.times(1000 / over_ms)


def _arrived(counts: Counts) -> int:
    return sum(route.books.get("arrived", 0) for route in counts.routes.values())


def _of_verdicts(counted: Mapping[str, int]) -> Sums:
    return Sums(
        sum(counted.get(verdict, 0) for verdict in Verdict),
        # Not all versions tell how many were forwarded.
        counted.get("forwarded", sum(counted.get(verdict, 0) for verdict in _PASSED_ON)),
        sum(counted.get(verdict, 0) for verdict in REPEATS),
        sum(counted.get(verdict, 0) for verdict in FAILING),
    )


def _minus(now: Histogram, then: Histogram) -> Histogram:
    if not then.counts:
        return now
    pairs = zip(now.counts, then.counts, strict=False)
    return Histogram([max(one - two, 0) for one, two in pairs], max(now.sum - then.sum, 0.0))


def _less(now: Times, then: Times) -> Times:
    none = CallCounts()
    return Times(
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


def _joined(one: Times, other: Times) -> Times:
    none = CallCounts()
    return Times(
        one.took + other.took,
        one.sends + other.sends,
        one.failed_sends + other.failed_sends,
        one.lag + other.lag,
        {
            name: one.store.get(name, none) + other.store.get(name, none)
            for name in dict.fromkeys([*one.store, *other.store])
        },
    )
