"""
The time at AWS, as well as this host can know it.

Every answer carries a `Date`, cut to the second. Whoever asked between two readings of
its own clock learns a range that the difference of the clocks must lie in, a little more
than a second wide. The ranges of several answers overlap in a narrower one; a range that
the others contradict (a proxy, a host of the service with a clock of its own) is outvoted.

This host's own time is counted on from the start, so that setting its clock later moves
nothing: else every live claim would look over at once, and two workers would hold it.
"""

from collections import deque
from email.utils import parsedate_to_datetime
from itertools import pairwise
from typing import Final

from msgspec import Struct

from oncebridge.base.clock import Clock, steady_clock
from oncebridge.errors import ConfigError

_KEPT: Final = 15
_PACE_MS: Final = 200
"""Answers in quick succession say nearly the same."""
_LASTS_MS: Final = 600_000
"""Clocks drift: a range that old says nothing any more."""
_STANDS_STILL_MS: Final = 1000
"""A better estimate moves the time by less than this; more means that a clock was set."""


class _OffsetRange(Struct, frozen=True, gc=False):
    """What one answer says: the offset is at least *low* and less than *high*."""

    low: int
    high: int
    noted_ms: int


class SkewedClock:
    """
    Tell this host's time, put right by what a service's answers say.

    Until the first answer it is this host's time alone.
    """

    def __init__(self, local: Clock | None = None) -> None:
        self.local = local or steady_clock()
        self.offset_ms = 0
        """How much must be added to this host's time."""
        self.error_ms: int | None = None
        """By how much *offset_ms* may be wrong; None as long as nothing is known."""
        self._ranges: deque[_OffsetRange] = deque(maxlen=_KEPT)
        self._told_ms = 0

    def now_ms(self) -> int:
        """Tell the time at the service; it stands still rather than go back a little."""
        now = self.local() + self.offset_ms
        if 0 < self._told_ms - now < _STANDS_STILL_MS:
            return self._told_ms
        self._told_ms = now
        return now

    def check(self, max_skew_ms: int) -> bool:
        """Raise `ConfigError` if this host's clock is further off; tell whether that is known."""
        if abs(self.offset_ms) > max_skew_ms:
            side = "behind" if self.offset_ms > 0 else "ahead of"
            raise ConfigError(
                "",
                f"this host's clock is {abs(self.offset_ms) / 1000:.1f} s {side} AWS's, and "
                f"max_skew is {max_skew_ms / 1000:g} s: claims would end too early or too late. "
                "Set the clock (chrony, systemd-timesyncd)",
            )
        return self.error_ms is not None

    def note(self, date: bytes, asked_ms: int, answered_ms: int) -> None:
        """Learn from the *date* of an answer, and when by *local* it was asked for and came."""
        last = self._ranges[-1] if self._ranges else None
        if last is not None and 0 <= answered_ms - last.noted_ms < _PACE_MS:
            return
        if answered_ms < asked_ms or (last is not None and answered_ms < last.noted_ms):
            self._ranges.clear()  # this host's clock was set back
            if answered_ms < asked_ms:
                return
        try:
            told = int(parsedate_to_datetime(date.decode("ascii")).timestamp()) * 1000
        except (ValueError, OverflowError):
            return
        while self._ranges and answered_ms - self._ranges[0].noted_ms > _LASTS_MS:
            self._ranges.popleft()
        self._ranges.append(_OffsetRange(told - answered_ms, told + 1000 - asked_ms, answered_ms))
        self._drop_what_is_over()
        low, high = _most_agreed(self._ranges)
        # A clock that may well be right is left alone: hosts that keep theirs then agree to the
        # millisecond, and not just to what a Date tells.
        self.offset_ms = 0 if low <= 0 < high else (low + high) // 2
        self.error_ms = max(high - self.offset_ms, self.offset_ms - low)

    def _drop_what_is_over(self) -> None:
        """Forget the rest where the last three agree on what no other says: a clock was set."""
        if len(self._ranges) <= 3:
            return
        *older, a, b, c = self._ranges
        low, high = max(a.low, b.low, c.low), min(a.high, b.high, c.high)
        if low < high and not any(r.low < high and low < r.high for r in older):
            self._ranges = deque((a, b, c), maxlen=_KEPT)


def _most_agreed(ranges: deque[_OffsetRange]) -> tuple[int, int]:
    """Return the narrowest range that as many as possible contain; of several, the latest's."""
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
