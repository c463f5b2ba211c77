"""Selects the arrivals to keep in the history under high load."""

import zlib
from collections.abc import Sequence
from typing import Final

from oncebridge.engine.hooks import Decisions
from oncebridge.engine.verdict import Verdict
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

    def select(self, decisions: Decisions) -> Sequence[int]:
        """Return the positions of the arrivals to keep; calls are nearly in order of arrival."""
        second = decisions.arrived_ms // 1000
        # Decisions may be out of order, and the clock may have been set back.
        if second > self._second or second < self._second - _LATEST:
            self._turn(second)
        if not self._bits and self._taken + len(decisions.events) <= self._room:
            self._taken += len(decisions.events)
            return range(len(decisions.events))
        is_urgent = decisions.verdict in _URGENT
        selected: list[int] = []
        mask = (1 << self._bits) - 1
        low = mask & 0xFF
        for at, outcome in enumerate(decisions.outcomes):
            key = outcome.key
            # Most are left out by the last byte of the key; the rest is slower.
            is_left_out = key and key[-1] & low
            if is_left_out or (mask and _ending(decisions.events[at], key) & mask):
                if is_urgent and self._urgent:
                    self._urgent -= 1
                    selected.append(at)
                continue
            selected.append(at)
            self._taken += 1
            if self._taken > self._room:
                self._bits = min(self._bits + 1, _MOST_BITS)
                self._room += MOST_A_SECOND
                mask = (1 << self._bits) - 1
                low = mask & 0xFF
        return selected

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
