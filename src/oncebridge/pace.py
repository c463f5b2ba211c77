"""A rate limit: so many a second, evenly, with a little room for bursts."""

_BURST_S = 0.1


class Pace:
    """
    Let *rate* events a second pass.

    Whoever asks is given the next free moment and waits for it, so waiting is fair and
    needs no queue. A tenth of a second's worth may go at once.
    """

    def __init__(self, rate: float) -> None:
        self._gap_s = 1 / rate
        self._next_s = 0.0

    def take(self, count: int, now_s: float) -> float:
        """Reserve places for *count* events, and tell how long to wait for the first."""
        earliest = max(self._next_s, now_s - _BURST_S)
        self._next_s = earliest + count * self._gap_s
        return max(earliest - now_s, 0.0)

    @staticmethod
    def is_past(moment_s: float, now_s: float) -> bool:
        """Tell whether a reserved moment is so long ago that it would make a burst."""
        return now_s - moment_s > _BURST_S

    def left_s(self, now_s: float) -> float:
        """Tell how long whoever asks now would have to wait, and reserve nothing."""
        return max(self._next_s - now_s, 0.0)
