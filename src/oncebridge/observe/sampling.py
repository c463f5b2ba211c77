"""Selects the arrivals to keep in the history under high load."""

import zlib
from typing import Final

from oncebridge.engine.verdict import Outcome, Verdict
from oncebridge.events.event import Event, Unreadable

MOST_A_SECOND: Final = 100
_URGENT: Final = frozenset({Verdict.DEAD, Verdict.CONFLICT, Verdict.FAILED})
_MOST_URGENT: Final = 50
_MOST_BITS: Final = 32
_LATEST: Final = 60
"""The longest time from arrival to verdict, in seconds."""


class Sampler:
    """
    Selects about 100 arrivals per second at most, by key: all copies of an event, or none.

    Above that rate, only keys that end in a number of zero bits are kept; each bit halves the rate.
    Failed and dead events are always kept, up to 50 more per second.
    """

    def __init__(self) -> None:
        self._second = 0
        self._bits = 0
        self._taken = 0
        self._room = 2 * MOST_A_SECOND
        self._urgent = _MOST_URGENT

    def takes(self, event: Event | Unreadable, outcome: Outcome, at_ms: int) -> bool:
        """Return True if the arrival at *at_ms* is to be kept; calls are nearly in order."""
        second = at_ms // 1000
        # Decisions may be out of order, and the clock may have been set back.
        if second > self._second or second < self._second - _LATEST:
            self._turn(second)
        if self._bits and _ending(event, outcome.key) & ((1 << self._bits) - 1):
            if outcome.verdict not in _URGENT or not self._urgent:
                return False
            self._urgent -= 1
            return True
        self._taken += 1
        if self._taken > self._room:
            self._bits = min(self._bits + 1, _MOST_BITS)
            self._room += MOST_A_SECOND
        return True

    def _turn(self, second: int) -> None:
        """Adjust the rate of the next second to the last."""
        if self._taken > MOST_A_SECOND:
            self._bits = min(self._bits + 1, _MOST_BITS)
        elif self._taken < 0.45 * MOST_A_SECOND:  # twice as many is within the limit
            self._bits = max(self._bits - max(second - self._second, 1), 0)
        self._second, self._taken = second, 0
        self._room, self._urgent = 2 * MOST_A_SECOND, _MOST_URGENT


def _ending(event: Event | Unreadable, key: bytes) -> int:
    """Return 32 bits that are equal for all copies of an event."""
    if key:
        return int.from_bytes(key[-4:])
    id_ = event.id if isinstance(event, Event) else None
    return zlib.crc32(id_.encode() if id_ else event.raw[:512])
