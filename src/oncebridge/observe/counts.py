"""
The counts of a worker, in a form that can be added up.

`Counts` contains sums only, so the counts of several workers, or of one before and after a
restart, are added with `+`. Its size is bounded: there are few routes, rules, verdicts and causes,
and of topics and entities only those with the highest counts are kept.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Final, TypeVar

from msgspec import Struct, field

_Name = TypeVar("_Name")
_Sums = TypeVar("_Sums", "RouteCounts", "CallCounts")

SECONDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Upper bounds for durations, in seconds."""
LAGS: Final = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 21600.0, 86400.0)
"""Upper bounds for the age of events at delivery, in seconds."""
ITEMS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
"""Upper bounds for batch sizes."""
MINUTES: Final = 60
"""Verdicts are kept for so many minutes."""
NOISIEST: Final = 20
"""The most topics and entities in a report."""
_MOST: Final = 1 << 53
"""Higher than any real count, and low enough that sums can still be encoded."""
_MOST_AHEAD: Final = 24 * 60
"""By how many minutes a worker's clock may be ahead."""


class Histogram(Struct, omit_defaults=True):
    """Counts of values by upper bound; the last is for values above all bounds."""

    counts: list[int] = []
    """One more than there are bounds; empty before the first value."""
    sum: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, part: float, ends: Sequence[float]) -> float | None:
        """Return an estimate of a quantile, as Prometheus computes it."""
        total = self.count
        if not total:
            return None
        wanted, below = part * total, 0
        for at, count in enumerate(self.counts):
            if count and below + count >= wanted:
                if at >= len(ends):
                    return ends[-1]
                low = ends[at - 1] if at else 0.0
                return low + (ends[at] - low) * (wanted - below) / count
            below += count
        return ends[-1]

    def fitted(self, ends: Sequence[float]) -> list[int]:
        """Return the counts fitted to *ends*: another version may have more or fewer bounds."""
        places = len(ends)
        own = self.counts[:places] + [0] * (places - len(self.counts))
        return [*own, sum(self.counts[places:])]

    def mended(self, ends: Sequence[float]) -> "Histogram":
        """Return a valid histogram for *ends* from untrusted data."""
        if not self.counts:
            return Histogram()
        likely = Histogram([_mended(count) for count in self.counts]).fitted(ends)
        return Histogram(
            [_mended(count) for count in likely], self.sum if 0 <= self.sum <= _MOST else 0.0
        )

    def __add__(self, other: "Histogram") -> "Histogram":
        pairs = zip_longest(self.counts, other.counts, fillvalue=0)
        return Histogram([one + two for one, two in pairs], self.sum + other.sum)

    def __sub__(self, other: "Histogram") -> "Histogram":
        pairs = zip_longest(self.counts, other.counts, fillvalue=0)
        left = [one - two for one, two in pairs]
        return Histogram(left, self.sum - other.sum) if any(left) else Histogram()


class RouteCounts(Struct, omit_defaults=True):
    """The counts of one route."""

    books: dict[str, int] = {}
    """`Books.counts()` without `in_flight`, which is a state and not a sum."""
    rules: dict[str, dict[str, int]] = {}
    """By rule and verdict."""
    causes: dict[str, int] = {}
    """Arrivals that were not the first of their kind, by `oncebridge.engine.causes.Cause`."""
    took: Histogram = field(default_factory=Histogram)
    """Seconds from an arrival to its verdict (`SECONDS`)."""
    lag: Histogram = field(default_factory=Histogram)
    """Seconds from the time in the event to its delivery (`LAGS`)."""
    sends: Histogram = field(default_factory=Histogram)
    """Seconds of calls to the sink (`SECONDS`)."""
    sent_together: Histogram = field(default_factory=Histogram)
    """Events per call to the sink (`ITEMS`)."""
    failed_sends: int = 0
    """Calls to the sink in which not every event was accepted."""

    def __add__(self, other: "RouteCounts") -> "RouteCounts":
        names = {*self.rules, *other.rules}
        return RouteCounts(
            added(self.books, other.books),
            {n: added(self.rules.get(n, {}), other.rules.get(n, {})) for n in sorted(names)},
            added(self.causes, other.causes),
            self.took + other.took,
            self.lag + other.lag,
            self.sends + other.sends,
            self.sent_together + other.sent_together,
            self.failed_sends + other.failed_sends,
        )

    def __sub__(self, other: "RouteCounts") -> "RouteCounts":
        return RouteCounts(
            taken(self.books, other.books),
            {n: taken(rule, other.rules.get(n, {})) for n, rule in self.rules.items()},
            taken(self.causes, other.causes),
            self.took - other.took,
            self.lag - other.lag,
            self.sends - other.sends,
            self.sent_together - other.sent_together,
            self.failed_sends - other.failed_sends,
        )

    def mended(self) -> "RouteCounts":
        return RouteCounts(
            _mended_all(self.books),
            {name: _mended_all(rule) for name, rule in self.rules.items()},
            _mended_all(self.causes),
            self.took.mended(SECONDS),
            self.lag.mended(LAGS),
            self.sends.mended(SECONDS),
            self.sent_together.mended(ITEMS),
            _mended(self.failed_sends),
        )


class CallCounts(Struct, omit_defaults=True):
    """The counts of one kind of store call."""

    took: Histogram = field(default_factory=Histogram)
    """Seconds (`SECONDS`)."""
    together: Histogram = field(default_factory=Histogram)
    """Items per call (`ITEMS`)."""
    failed: int = 0
    """Calls without a response."""

    def __add__(self, other: "CallCounts") -> "CallCounts":
        return CallCounts(
            self.took + other.took, self.together + other.together, self.failed + other.failed
        )

    def __sub__(self, other: "CallCounts") -> "CallCounts":
        return CallCounts(
            self.took - other.took, self.together - other.together, self.failed - other.failed
        )

    def mended(self) -> "CallCounts":
        return CallCounts(
            self.took.mended(SECONDS), self.together.mended(ITEMS), _mended(self.failed)
        )


class Counts(Struct, omit_defaults=True):
    """All counts of one or more workers."""

    routes: dict[str, RouteCounts] = {}
    store: dict[str, CallCounts] = {}
    """By the name of the call: claim, commit, release, extend, remember."""
    minutes: dict[int, dict[str, int]] = {}
    """The verdicts of the last hour, and how many were `forwarded`, by the minute since 1970 (by
    the worker's clock)."""
    topics: dict[str, dict[str, int]] = {}
    """The topics with the highest counts: `arrived`, and `repeats` (duplicate, stale, unchanged)."""
    entities: dict[str, int] = {}
    """The entities with the most duplicates."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            _merged(self.routes, other.routes, RouteCounts()),
            _merged(self.store, other.store, CallCounts()),
            _added_each(self.minutes, other.minutes),
            _added_each(self.topics, other.topics),
            added(self.entities, other.entities),
        )

    def __sub__(self, other: "Counts") -> "Counts":
        """Subtract earlier counts of the same worker."""
        none, nothing = RouteCounts(), CallCounts()
        return Counts(
            {n: counts - other.routes.get(n, none) for n, counts in self.routes.items()},
            {n: counts - other.store.get(n, nothing) for n, counts in self.store.items()},
            _taken_each(self.minutes, other.minutes),
            _taken_each(self.topics, other.topics),
            {n: count for n, count in taken(self.entities, other.entities).items() if count > 0},
        )

    def trimmed(self, minute: int, noisiest: int | None = None) -> "Counts":
        """Remove minutes outside of the last hour, and topics and entities with low counts."""
        topics = sorted(self.topics.items(), key=lambda item: -item[1].get("arrived", 0))
        entities = sorted(self.entities.items(), key=lambda item: -item[1])
        return Counts(
            self.routes,
            self.store,
            {n: c for n, c in self.minutes.items() if -MINUTES < n - minute <= _MOST_AHEAD},
            dict(topics[:noisiest]),
            dict(entities[:noisiest]),
        )

    def mended(self) -> "Counts":
        """Return valid counts from untrusted data."""
        return Counts(
            {name: counts.mended() for name, counts in self.routes.items()},
            {name: counts.mended() for name, counts in self.store.items()},
            {minute: _mended_all(counts) for minute, counts in self.minutes.items()},
            {name: _mended_all(counts) for name, counts in self.topics.items()},
            _mended_all(self.entities),
        )


def added(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Add two mappings."""
    total = dict(one)
    for name, count in other.items():
        total[name] = total.get(name, 0) + count
    return total


def taken(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Subtract two mappings."""
    return {name: count - other.get(name, 0) for name, count in one.items()}


def _mended(count: int) -> int:
    return min(max(count, 0), _MOST)


def _mended_all(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: _mended(count) for name, count in counts.items()}


def _taken_each(
    one: Mapping[_Name, Mapping[str, int]], other: Mapping[_Name, Mapping[str, int]]
) -> dict[_Name, dict[str, int]]:
    """Subtract nested mappings; entries without counts are removed."""
    each = {name: taken(counts, other.get(name, {})) for name, counts in one.items()}
    return {
        name: {n: max(count, 0) for n, count in counts.items()}
        for name, counts in each.items()
        if any(count > 0 for count in counts.values())
    }


def _added_each(
    one: Mapping[_Name, Mapping[str, int]], other: Mapping[_Name, Mapping[str, int]]
) -> dict[_Name, dict[str, int]]:
    names = [*one, *(name for name in other if name not in one)]
    return {name: added(one.get(name, {}), other.get(name, {})) for name in names}


def _merged(one: Mapping[str, _Sums], other: Mapping[str, _Sums], none: _Sums) -> dict[str, _Sums]:
    return {
        name: one.get(name, none) + other.get(name, none) for name in dict.fromkeys([*one, *other])
    }
