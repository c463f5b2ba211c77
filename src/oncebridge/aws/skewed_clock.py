"""
The time at AWS, estimated from the `Date` of its responses.

Every response has a `Date` in whole seconds. Together with the local times of the request and
the response, it gives a range for the difference of the clocks, a little more than a second
wide. The ranges of several responses overlap in a narrower one; a range that contradicts the
others (a proxy, or a server with a wrong clock) is outvoted.

This host's time is counted from the start with a monotonic clock, so that setting the clock
later has no effect: otherwise every live claim could seem expired at once, and two workers
would hold it.
"""

from collections import deque
from email.utils import parsedate_to_datetime
from itertools import pairwise
from typing import Final

from msgspec import Struct

from oncebridge.base.clock import Clock, steady_clock
from oncebridge.errors import ConfigError

_KEPT: Final = 15
_MIN_APART_MS: Final = 200
"""Responses in quick succession add nearly no information."""
_MAX_AGE_MS: Final = 600_000
"""Clocks drift: an older range is not used any more."""
_MAX_PAUSE_MS: Final = 1000
"""A better estimate changes the time by less than this; more means that a clock was set."""


class _OffsetRange(Struct, frozen=True, gc=False):
    """The result of one response: the offset is at least *low* and less than *high*."""

    low: int
    high: int
    noted_ms: int


class SkewedClock:
    """
    The time of this host, corrected by the dates of a service's responses.

    Until the first response it is this host's time.
    """

    def __init__(self, local: Clock | None = None) -> None:
        self.local = local or steady_clock()
        self.offset_ms = 0
        """The correction that is added to this host's time."""
        self.error_ms: int | None = None
        """The maximum error of *offset_ms*; None before the first response."""
        self._ranges: deque[_OffsetRange] = deque(maxlen=_KEPT)
        self._last_returned_ms = 0

    def now_ms(self) -> int:
        """Return the time at the service; it pauses instead of going back a little."""
        now = self.local() + self.offset_ms
        if 0 < self._last_returned_ms - now < _MAX_PAUSE_MS:
            return self._last_returned_ms
        self._last_returned_ms = now
        return now

    def check(self, max_skew_ms: int) -> bool:
        """Raise `ConfigError` if this host's clock is further off; return True if that is known."""
        if abs(self.offset_ms) > max_skew_ms:
            side = "behind" if self.offset_ms > 0 else "ahead of"
            raise ConfigError(
                "",
                f"this host's clock is {abs(self.offset_ms) / 1000:.1f} s {side} AWS's, and "
                f"max_skew is {max_skew_ms / 1000:g} s: claims would expire too early or too "
                "late. Set the clock (chrony, systemd-timesyncd)",
            )
        return self.error_ms is not None

    def note(self, date: bytes, asked_ms: int, answered_ms: int) -> None:
        """Use the *date* of a response, with the local times of its request and arrival."""
        last = self._ranges[-1] if self._ranges else None
        if last is not None and 0 <= answered_ms - last.noted_ms < _MIN_APART_MS:
            return
        if answered_ms < asked_ms or (last is not None and answered_ms < last.noted_ms):
            self._ranges.clear()  # this host's clock was set back
            if answered_ms < asked_ms:
                return
        try:
            date_ms = int(parsedate_to_datetime(date.decode("ascii")).timestamp()) * 1000
        except (ValueError, OverflowError):
            return
        while self._ranges and answered_ms - self._ranges[0].noted_ms > _MAX_AGE_MS:
            self._ranges.popleft()
        self._ranges.append(
            _OffsetRange(date_ms - answered_ms, date_ms + 1000 - asked_ms, answered_ms)
        )
        self._drop_outdated()
        low, high = _most_agreed(self._ranges)
        # A clock that may be right is not corrected: synchronised hosts then agree to the
        # millisecond, and not just to the precision of a Date.
        self.offset_ms = 0 if low <= 0 < high else (low + high) // 2
        self.error_ms = max(high - self.offset_ms, self.offset_ms - low)

    def _drop_outdated(self) -> None:
        """Drop the older ranges if the last three contradict all of them: a clock was set."""
        if len(self._ranges) <= 3:
            return
        *older, a, b, c = self._ranges
        low, high = max(a.low, b.low, c.low), min(a.high, b.high, c.high)
        if low < high and not any(r.low < high and low < r.high for r in older):
            self._ranges = deque((a, b, c), maxlen=_KEPT)


def _most_agreed(ranges: deque[_OffsetRange]) -> tuple[int, int]:
    """Return the narrowest range that most ranges contain; of several, that of the newest."""
    edges = sorted([(r.high, 0, -1) for r in ranges] + [(r.low, 1, 1) for r in ranges])
    best: list[tuple[int, int]] = []
    most = agreed = 0
    for (at, _, step), (following, _, _) in pairwise(edges):
        agreed += step
        if at == following:
            continue
        if agreed > most:
            most, best = agreed, []
        if agreed == most:
            best.append((at, following))
    newest = ranges[-1]
    for low, high in best:
        if newest.low <= low and high <= newest.high:
            return low, high
    return best[0]
