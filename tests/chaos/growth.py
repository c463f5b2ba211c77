"""
Whether something grows: a slope that a few odd samples cannot bend, and how sure it is.

The slope is Theil and Sen's, the median of the slopes between all pairs of points, and its spread
is the 95 % interval that Kendall's rank test gives. Points are medians of a minute each: samples
five seconds apart say the same thing twelve times, and would make the interval look narrower than
it is. What counts as growth is an interval that lies above what is allowed as a whole; one that
only reaches above it is too short a look, and says so by its width.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import inf, sqrt
from statistics import median
from typing import NamedTuple

Sample = tuple[float, float]
"""Seconds since the start, and what was measured then."""

_SURE = 1.96
_HOUR_S = 3600.0


class Trend(NamedTuple):
    """How something changes in an hour."""

    slope: float
    low: float
    high: float
    points: int

    def __str__(self) -> str:
        return f"{self.slope:+.2f}/h ({self.low:+.2f} to {self.high:+.2f})"


def by_step(samples: Sequence[Sample], step_s: float = 60.0) -> list[Sample]:
    """Give the median of each *step_s*, at the middle of its samples."""
    steps: dict[int, list[Sample]] = defaultdict(list)
    for at, value in samples:
        steps[int(at // step_s)].append((at, value))
    return [
        (median(at for at, _ in some), median(value for _, value in some))
        for _, some in sorted(steps.items())
    ]


def trend(samples: Sequence[Sample], step_s: float = 60.0) -> Trend:
    """Find the slope of *samples*; of fewer than three points nobody can be sure."""
    points = by_step(samples, step_s)
    slopes = sorted(
        (later - earlier) / (then - at) * _HOUR_S
        for n, (at, earlier) in enumerate(points)
        for then, later in points[n + 1 :]
    )
    if not slopes:
        return Trend(0.0, -inf, inf, len(points))
    count = len(points)
    off = _SURE * sqrt(count * (count - 1) * (2 * count + 5) / 18)
    below, above = int((len(slopes) - off) // 2), int((len(slopes) + off) // 2) + 1
    return Trend(
        median(slopes),
        slopes[below] if below >= 0 else -inf,
        slopes[above] if above < len(slopes) else inf,
        count,
    )
