"""
The circuit breaker of a sink or a store.

A breaker counts failures in a row. After a number of them it opens: nothing is let through for a
while. Then a single try is allowed, and its result decides; each try that fails doubles the wait,
up to 30 seconds. Callers pass the time, that of their event loop.

A failure may be the fault of one event. As long as all failures in a row are of the same event,
another event is tried at once: if it succeeds, the first event is the cause (`Blame`).
"""

from typing import Final

from msgspec import Struct

from oncebridge.base.clock import Dice

_SHORTEST_S, _LONGEST_S = 1.0, 30.0
_MOST_REFUSED: Final = 10_000


class Breaker:
    """Open after *limit* failures in a row."""

    def __init__(self, limit: int, dice: Dice) -> None:
        self._limit = limit
        self._dice = dice
        self.failures = 0
        """In a row, up to now."""
        self.passed = 0
        """How many calls succeeded."""
        self._failed: set[bytes] = set()
        """The events that have failed in a row; empty stands for a failure of the sink itself."""
        self._wait_s = _SHORTEST_S
        self._until_s = 0.0
        self.level = 1
        """One, and one more for each try that has failed since it opened."""
        self._trying_since_s: float | None = None
        self.is_open = False
        self.opened = 0
        """How often it opened."""

    def left_s(self, now_s: float, event: bytes = b"") -> float:
        """Return the seconds until a try is allowed; 0 if one, or this *event*, may be tried now."""
        if not self.is_open:
            return 0.0
        if self._trying_since_s is None:
            return 0.0 if self.doubts(event) else max(self._until_s - now_s, 0.0)
        # A try is running, and may end at any moment: ask again soon. If it does not end for long,
        # the next one may try.
        lost_s = self._trying_since_s + _LONGEST_S
        return max(min(lost_s - now_s, _SHORTEST_S), 0.0)

    def doubts(self, event: bytes = b"") -> bool:
        """Return True if only one event has failed so far, and it is not *event*."""
        return len(self._failed) == 1 and not self._failed & {b"", event}

    def admits(self, now_s: float, event: bytes = b"") -> bool:
        """Return True if the caller may try; while it is open only one may, when it is due."""
        if not self.is_open:
            return True
        if self.left_s(now_s, event) > 0:
            return False
        self._trying_since_s = now_s
        return True

    def succeeded(self) -> None:
        """Record a success."""
        self.failures = 0
        self.passed += 1
        self._failed.clear()
        if self.is_open:
            self.is_open = False
            self._trying_since_s = None
            self._wait_s = _SHORTEST_S
            self.level = 1

    def answered(self) -> None:
        """Record an answer that is neither: it may be tried, but nothing succeeded."""
        self.is_open = False
        self._trying_since_s = None

    def failed(self, now_s: float, *, at_once: bool = False, event: bytes = b"") -> None:
        """Record a failure, perhaps that of one *event*; *at_once* opens whatever came before."""
        self.failures += 1
        if len(self._failed) < 2:  # no more needs to be known
            self._failed.add(event)
        if self.is_open:
            if self._trying_since_s is not None:
                self._wait_s = min(2 * self._wait_s, _LONGEST_S)
                self.level += 1
                self._shut(now_s)
        elif at_once or self.failures >= self._limit:
            self.is_open = True
            self.opened += 1
            self._shut(now_s)

    def abandoned(self) -> None:
        """Record that a try was not made: nothing was sent, so nothing is known."""
        self._trying_since_s = None

    def _shut(self, now_s: float) -> None:
        self._trying_since_s = None
        self._until_s = now_s + self._wait_s * (0.5 + self._dice.fraction() / 2)


class Blame(Struct, eq=False):
    """
    Decide whether an event or its sink is at fault for a refusal.

    It is the event if others succeeded since it was sent, or since it was refused before. The
    sink is at fault as long as no other event succeeds.
    """

    breaker: Breaker
    refused: dict[bytes, int] = {}
    """How many calls had succeeded when each event was last refused, the latest last."""

    def is_of(self, event: bytes, passed_before: int) -> bool:
        """Record that *event* was refused, and return True if it is to blame itself."""
        passed = self.breaker.passed
        before = self.refused.pop(event, passed_before)
        self.refused[event] = passed
        if len(self.refused) > _MOST_REFUSED:
            del self.refused[next(iter(self.refused))]
        return passed > before
