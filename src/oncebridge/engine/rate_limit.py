"""
How fast events may be sent to a sink: a configured rate, and a learned one.

A caller reserves a turn and waits for it. A turn is a place in a queue, and the queue moves at the
slower of two rates:

- the allowed rate: the setting, or this worker's share of it;
- the rate learned from a sink that throttles. There is none until it does.

A change of either moves all later turns.

A sink that throttles gets no events for as long as it asked. The number of events it took
recently shows its limit, and sending continues a little below that. Then the rate grows as in TCP
CUBIC (RFC 9438): quickly back to the known limit, slowly around it, and ever faster beyond it.
While the limit is not known yet, the rate doubles every second (slow start). A limit that was not
reached for five minutes is forgotten.
"""

from collections import deque
from math import inf
from typing import Final

from msgspec import Struct

_BURST_S: Final = 0.1
"""Turns missed by less may be used later, as timers can be late. One call takes at most this many
seconds' worth of events."""

_LEAST_MEASURED_S, _ENOUGH = 1.0, 10
"""A rate is measured over at least a second and this many events; a burst says nothing."""
_IDLE_S: Final = 2.0
_SAMPLE_S: Final = 0.1
_LAG_S: Final = 0.01
"""Answers that arrive together are counted one after another."""
_AIM: Final = 0.98
"""The limit is assumed to be this part of the measured rate; the new rate starts below it:"""
_DECREASE: Final = 0.05
_PLATEAU_S: Final = 30.0
"""How long it takes to get back to the known limit."""
_BEYOND_S: Final = 4.0
"""How long a twentieth more than the known limit takes; twice as much takes 11 s."""
_SLOWEST: Final = 1.0
_FORGET_S: Final = 300.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 30.0
_ROUNDING: Final = 1e-6
"""A shorter wait counts as none: the clock might not move."""


class RateLimit:
    """
    Spread events evenly: at most *rate* a second, and no more than the sink accepts.

    Times are those of the caller's event loop.
    """

    def __init__(self, rate: float = inf) -> None:
        self._allowed = rate
        self._learned: _Learned | None = None
        self._moved = 0.0
        """How far the queue has moved: turns up to here may be used."""
        self._moved_s = -inf
        """When that was calculated."""
        self._end = -inf
        """The place of the next turn."""
        self._resume_s = -inf
        """Until then nothing is sent, and the queue does not move."""
        self._lowered = 0.0
        """How far the queue had moved when the rate was last lowered."""
        self._fruitless = 0
        """How many times in a row the sink throttled and took nothing in between."""
        self._delivered_then = -1
        """How many events were delivered when it last throttled."""
        self.delivered = 0
        """How many events the sink has taken in total; the caller counts."""
        self._samples: deque[tuple[float, int]] = deque([(-inf, 0)])
        """Recent times, and how many events were delivered by then."""
        self.reserved = 0
        """How many events have reserved a turn in total."""
        self.is_active = rate < inf
        """False: there is no limit, and no need for turns."""

    def rate(self, now_s: float) -> float:
        """Return how many events a second may be sent now."""
        return min(self._allowed, self._learned.rate(now_s) if self._learned else inf)

    def allow(self, rate: float, now_s: float) -> None:
        """Change the allowed rate; with 0, everything waits until the next change."""
        if rate != self._allowed:
            self._move_on(now_s)
            if not self._allowed:
                # Turns of the time without a rate are not added later.
                self._end = max(self._end, self._moved)
            self._allowed = rate

    # --- turns ---------------------------------------------------------------------------

    def take(self, count: int, now_s: float) -> float:
        """Reserve a turn for *count* events, and return the seconds until then."""
        return self.wait_s(self.reserve(count, now_s), now_s)

    def reserve(self, count: int, now_s: float) -> float:
        """Reserve and return a turn for *count* events that are sent together."""
        self._move_on(now_s)
        turn = max(self._end, self._moved - _BURST_S * self.rate(now_s))
        self._end = turn + count
        self.reserved += count
        return turn

    def wait_s(self, turn: float, now_s: float) -> float:
        """Return the seconds until *turn*; they change with the rate."""
        self._move_on(now_s)
        ahead, rate = turn - self._moved, self.rate(now_s)
        if not rate:
            return inf
        if ahead <= _ROUNDING * max(rate, 1.0):
            return self.pause_s(now_s)
        return self.pause_s(now_s) + ahead / rate

    def pause_s(self, now_s: float) -> float:
        """Return for how many more seconds nothing is sent."""
        return max(self._resume_s - now_s, 0.0)

    def is_missed(self, turn: float, now_s: float) -> bool:
        """Return True if *turn* was so long ago that using it now would cause a burst."""
        self._move_on(now_s)
        return self._moved - turn > _BURST_S * self.rate(now_s) + _ROUNDING

    def left_s(self, now_s: float) -> float:
        """Return how many seconds a new caller would wait for its turn; reserve none."""
        return self.wait_s(max(self._end, self._moved), now_s) if self.rate(now_s) else 0.0

    def most(self, now_s: float) -> int:
        """Return how many events to send in one call."""
        rate = self.rate(now_s)
        return max(int(rate * _BURST_S), 1) if rate < inf else 1 << 30

    def _move_on(self, now_s: float) -> None:
        since_s = max(self._moved_s, min(self._resume_s, now_s))
        if -inf < since_s < now_s and (rate := self.rate(now_s)) < inf:
            self._moved += (now_s - since_s) * rate
        self._moved_s = now_s

    # --- learning ------------------------------------------------------------------------

    def note(self, now_s: float) -> None:
        """Record how many events the sink has taken up to now."""
        if self._learned is not None:
            self._learned.measure(self.delivered, now_s)
        samples = self._samples
        last_s, last = samples[-1]
        if now_s - last_s < _SAMPLE_S or now_s < self._resume_s:
            return
        is_first = len(samples) == 1 and last == self.delivered
        if is_first or last_s < max(self._resume_s, now_s - _IDLE_S):
            # Nothing was sent for a while, or nothing is answered yet.
            samples.clear()
        samples.append((now_s, self.delivered))
        while (
            len(samples) > 2
            and samples[1][0] <= now_s - _LEAST_MEASURED_S
            and samples[1][1] <= self.delivered - _ENOUGH
        ):
            samples.popleft()
        if self._learned is not None and now_s - self._resume_s > _FORGET_S:
            self._learned = None
            self.is_active = self._allowed < inf

    def throttled(self, turn: float | None, retry_after_s: float, now_s: float) -> None:
        """
        Send nothing for *retry_after_s*, then continue at a lower rate.

        *turn* is the turn of the throttled send, None if it had none. A send from before the rate
        was last lowered does not lower it again.
        """
        self._move_on(now_s)
        if self._learned is not None and (turn is None or turn < self._lowered):
            self._pause_until(now_s + retry_after_s)
            return
        since_s, before = self._samples[0]
        since_s = min(since_s, now_s)
        span_s = max(now_s - since_s, _LEAST_MEASURED_S)
        last = self._learned.goodput if self._learned else inf
        self._learned = _Learned(before, span_s, since_s + span_s + _LAG_S, last)
        self._learned.measure(self.delivered, now_s)
        self._fruitless = self._fruitless + 1 if self.delivered == self._delivered_then else 0
        self._delivered_then = self.delivered
        pause_s = min(_SHORTEST_PAUSE_S * 2.0 ** min(self._fruitless, 10), _LONGEST_PAUSE_S)
        self._pause_until(now_s + max(retry_after_s, pause_s))
        self._lowered = self._moved
        self._end = max(self._end, self._moved)
        self.is_active = True

    def _pause_until(self, until_s: float) -> None:
        if self._learned is not None and until_s > self._resume_s:
            self._resume_s = self._learned.since_s = until_s


class _Learned(Struct):
    """
    A rate that grows from `since_s` on.

    It starts at the rate that the sink took within *span_s* until *until_s*, when it had taken
    *before* events in total at their start. The limit is known unless a burst reached it, or the
    sink takes less than half of what it took before (*last*).
    """

    before: int
    span_s: float
    until_s: float
    last: float
    goodput: float = 0.0
    is_known: bool = False
    since_s: float = -inf

    def measure(self, delivered: int, now_s: float) -> None:
        """Record that *delivered* events were delivered up to now."""
        if now_s <= self.until_s:
            self.goodput = _AIM * (delivered - self.before) / self.span_s
            self.is_known = self.goodput > self.last / 2

    def rate(self, now_s: float) -> float:
        passed_s = min(max(now_s - self.since_s, 0.0), _FORGET_S)
        if not self.is_known:
            doubled: float = 2.0 ** min(passed_s, 30.0)
            return max(self.goodput * (1 - _DECREASE), _SLOWEST) * doubled
        beyond_s = passed_s - _PLATEAU_S
        part = beyond_s / (_PLATEAU_S if beyond_s < 0 else _BEYOND_S)
        growth: float = _DECREASE * part**3
        return max(self.goodput * (1 + growth), _SLOWEST)
