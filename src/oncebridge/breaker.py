"""
When something is down, stop knocking.

A breaker counts failures in a row. After so many it opens: nothing is let through for a
while. Then a single try may pass, and its result decides; each try that fails doubles the
wait, up to half a minute. Callers measure time with their loop and hand it in.
"""

from oncebridge.clock import Dice

_SHORTEST_S, _LONGEST_S = 1.0, 30.0


class Breaker:
    """Open after *limit* failures in a row."""

    def __init__(self, limit: int, dice: Dice) -> None:
        self._limit = limit
        self._dice = dice
        self.failures = 0
        """In a row, up to now."""
        self._wait_s = _SHORTEST_S
        self._until_s = 0.0
        self.level = 1
        """One, and one more for each try that has failed since it opened."""
        self._trying_since_s: float | None = None
        self.is_open = False
        self.opened = 0
        """How often it opened."""

    def left_s(self, now_s: float) -> float:
        """Tell how long to stay away; none if something may be tried now."""
        if not self.is_open:
            return 0.0
        if self._trying_since_s is None:
            return max(self._until_s - now_s, 0.0)
        # Somebody is trying, and may be through at any moment: ask again soon. If nothing is
        # heard of it for long, the next one may try.
        lost_s = self._trying_since_s + _LONGEST_S
        return max(min(lost_s - now_s, _SHORTEST_S), 0.0)

    def admits(self, now_s: float) -> bool:
        """Take leave to try; while it is open only one may, when its time has come."""
        if not self.is_open:
            return True
        if self.left_s(now_s) > 0:
            return False
        self._trying_since_s = now_s
        return True

    def succeeded(self) -> None:
        """Note that something went through."""
        self.failures = 0
        if self.is_open:
            self.is_open = False
            self._trying_since_s = None
            self._wait_s = _SHORTEST_S
            self.level = 1

    def failed(self, now_s: float, *, at_once: bool = False) -> None:
        """Note a failure; *at_once* opens it whatever came before."""
        self.failures += 1
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
        """Note that a try came to nothing: nothing was sent, so nothing is known."""
        self._trying_since_s = None

    def _shut(self, now_s: float) -> None:
        self._trying_since_s = None
        self._until_s = now_s + self._wait_s * (0.5 + self._dice.fraction() / 2)
