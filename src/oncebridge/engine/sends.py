"""
The sends of one batch: several at once, each with a timeout, whatever the sink does.

There is one task for each call of the sink and no other, and one timer for all of them. Answers
that arrive together are returned together, so that their commits are one round trip.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from types import CoroutineType
from typing import get_args

from msgspec import Struct

from oncebridge.engine.leases import Lease
from oncebridge.engine.rate_limit import RateLimit
from oncebridge.engine.shared_rate_limit import RateShare
from oncebridge.errors import SinkRejected
from oncebridge.sinks.api import JointAnswer, Never, Unknown, Yes

CallListener = Callable[[int, float, bool], None]
"""Called with the number of events of a call, its seconds, and whether the sink took all."""

_ANSWERS = frozenset(get_args(JointAnswer))
_TAKEN = {Yes}


class Parcel(Struct, eq=False):
    """The events of one call of the sink."""

    rows: Sequence[int]
    turn: float | None = None
    """Its turn under a rate limit, once it is reserved."""
    passed_before: int = 0
    """How many sends had succeeded when it was sent."""
    answers: Sequence[JointAnswer] = ()

    @property
    def is_taken(self) -> bool:
        """True if the sink took all events."""
        return set(map(type, self.answers)) == _TAKEN


class SinkCalls:
    """The calls of the sink that may run at once, over all batches."""

    def __init__(self, count: int, listener: CallListener | None = None) -> None:
        self._free = count
        self._listener = listener
        self._waiters: deque[Callable[[], None]] = deque()
        self._running: dict[_Call, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.slowest_s = 0.0
        """How long the slowest recent call took; decays with each call."""

    def acquire(self) -> bool:
        """Take a slot, if one is free."""
        if self._free <= 0:
            return False
        self._free -= 1
        return True

    def release(self) -> None:
        self._free += 1
        if self._waiters:
            self._wake_next()

    def notify_when_free(self, wake: Callable[[], None]) -> None:
        """Call *wake* once when a slot is free; another batch may take it first."""
        self._waiters.append(wake)

    def cancel_notification(self, wake: Callable[[], None]) -> None:
        """Do not call *wake* any more; the next waiter gets the slot."""
        if self._waiters:
            with suppress(ValueError):
                self._waiters.remove(wake)
            self._wake_next()

    def _wake_next(self) -> None:
        if self._free > 0 and self._waiters:
            self._waiters.popleft()()

    def add(self, call: "_Call") -> None:
        """Time a call that was just started."""
        self._running[call] = None
        if self._timer is None:
            self._timer = call.loop.call_at(call.ends, self._check_timeouts)
        elif call.ends < self._timer.when():
            self._timer.cancel()
            self._timer = call.loop.call_at(call.ends, self._check_timeouts)

    def remove(self, call: "_Call") -> None:
        """Stop timing a call, and free its slot."""
        del self._running[call]
        if not self._running and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.release()

    def record_call(self, items: int, took_s: float, *, ok: bool) -> None:
        """Record how long a call took, and report it to the listener."""
        self.slowest_s = max(took_s, self.slowest_s * 0.9)
        if self._listener is not None:
            self._listener(items, took_s, ok)

    def _check_timeouts(self) -> None:
        self._timer = None
        calls = [*self._running]
        now = calls[0].loop.time()
        for call in calls:
            if call.ends <= now:
                call.time_out()
        if self._running:
            first = min(self._running, key=lambda call: call.ends)
            self._timer = first.loop.call_at(max(first.ends, now), self._check_timeouts)


class _Call:
    """One call of the sink under way."""

    __slots__ = ("began", "calls", "ends", "loop", "parcel", "sends", "task")

    def __init__(
        self,
        sends: "Sends",
        parcel: Parcel,
        awaitable: Awaitable[Sequence[JointAnswer]],
        timeout_s: float,
    ) -> None:
        self.sends = sends
        self.calls = sends.calls
        self.loop = loop = sends.loop
        self.parcel = parcel
        self.began = loop.time()
        self.ends = self.began + timeout_s
        # Not `ensure_future`, which asks for the running loop: a system call in Python 3.11.
        self.task: asyncio.Future[Sequence[JointAnswer]]
        if isinstance(awaitable, CoroutineType):
            self.task = loop.create_task(awaitable)
        else:
            self.task = asyncio.ensure_future(awaitable)
        self.task.add_done_callback(self.on_done)

    def on_done(self, task: "asyncio.Future[Sequence[JointAnswer]]") -> None:
        if self not in self.sends.running:
            # Cancelled before; its error is retrieved, or asyncio would log it.
            if not task.cancelled():
                task.exception()
            return
        count = len(self.parcel.rows)
        self._end(_answers_of(task, count), self.loop.time() - self.began)

    def time_out(self) -> None:
        """Answer for a call whose time is over; unless its answer is on its way to `on_done`."""
        if not self.task.done():
            timeout_s = self.ends - self.began
            unknown = Unknown(f"no answer within {timeout_s:g} s")
            self._end([unknown] * len(self.parcel.rows), timeout_s)
            # Not awaited: a sink that ignores its cancellation must not delay the batch.
            self.task.cancel()

    def _end(self, answers: Sequence[JointAnswer], took_s: float) -> None:
        self.parcel.answers = answers
        self.sends.take(self)
        self.calls.record_call(len(answers), took_s, ok=self.parcel.is_taken)


class Sends:
    """
    The calls of a sink for one batch.

    `start` one whenever there is a slot, and take the answers from `next`. Whatever the sink
    does, every event gets one answer, within its timeout.
    """

    def __init__(
        self,
        calls: SinkCalls,
        loop: asyncio.AbstractEventLoop,
        rows: Sequence[int],
        size: int,
    ) -> None:
        self.calls = calls
        self.loop = loop
        self.waiting = deque(
            [Parcel(rows)]
            if len(rows) <= size
            else [Parcel(rows[at : at + size]) for at in range(0, len(rows), size)]
        )
        """What is still to be sent."""
        self.running: dict[_Call, None] = {}
        self._answered: list[Parcel] = []
        self._alarm: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_woken = False
        self._waits_for_slot = False

    @property
    def has_pending(self) -> bool:
        """True if anything is to be sent or answered."""
        return bool(self.waiting or self.running or self._answered)

    def take_slot(self) -> bool:
        """Take a slot for a call; if none is free, `next` returns when one may be."""
        if self.calls.acquire():
            return True
        if not self._waits_for_slot:
            self._waits_for_slot = True
            self.calls.notify_when_free(self._on_slot_free)
        return False

    def start(
        self,
        parcel: Parcel,
        call: Awaitable[Sequence[JointAnswer]],
        *,
        timeout_s: float,
        leases: Iterable[Lease] = (),
    ) -> None:
        """
        Send *parcel* by *call*, in a slot that was taken.

        If one of *leases* is lost meanwhile, the call is cancelled.
        """
        started = _Call(self, parcel, call, timeout_s)
        for lease in leases:
            lease.sending = started.task  # type: ignore[assignment]
        self.running[started] = None
        self.calls.add(started)

    async def next(self) -> list[Parcel]:
        """Wait for answers or a wake-up; return what is answered."""
        if not self._answered and not self._is_woken:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_woken = False
        return self.take_answers()

    def take_answers(self) -> list[Parcel]:
        """Return what is answered, without waiting."""
        for call in [call for call in self.running if call.task.done()]:
            call.on_done(call.task)
        answered, self._answered = self._answered, []
        return answered

    def take(self, call: _Call) -> None:
        """Take the answers of a call that is over."""
        del self.running[call]
        self.calls.remove(call)
        self._answered.append(call.parcel)
        self.wake()

    def wake_in(self, seconds: float) -> None:
        """Let `next` return after *seconds*, with or without answers."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self.loop.call_later(seconds, self.wake)

    def stop_waiting_for_slot(self) -> None:
        """Stop waiting for a slot; another batch may have it."""
        self._waits_for_slot = False
        self.calls.cancel_notification(self._on_slot_free)

    def close(self) -> None:
        """Cancel the calls under way; their answers are not needed any more."""
        if self._alarm is not None:
            self._alarm.cancel()
        self.stop_waiting_for_slot()
        for call in [*self.running]:
            del self.running[call]
            self.calls.remove(call)
            call.task.cancel()

    def _on_slot_free(self) -> None:
        self._waits_for_slot = False
        self.wake()

    def wake(self) -> None:
        """Let `next` return, with or without answers."""
        self._is_woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def reserve_turn(self, limit: RateLimit, share: RateShare | None) -> float:
        """Reserve a turn for what is to be sent next; return the seconds until then."""
        first, now = self.waiting[0], self.loop.time()
        if share is not None:
            is_short = limit.left_s(now) > 0
            limit.allow(share.current(limit.reserved, is_short=is_short), now)
        if first.turn is None or limit.is_missed(first.turn, now):
            if len(first.rows) > (most := limit.most(now)):
                self.waiting.insert(1, Parcel(first.rows[most:]))
                first.rows = first.rows[:most]
            first.turn = limit.reserve(len(first.rows), now)
        return limit.wait_s(first.turn, now)


def _answers_of(task: "asyncio.Future[Sequence[JointAnswer]]", count: int) -> Sequence[JointAnswer]:
    """Return the sink's answers, or answers that describe how the call failed."""
    answer: JointAnswer
    if task.cancelled():
        answer = Unknown("the send was cancelled")
    elif isinstance(error := task.exception(), SinkRejected):
        answer = Never(type(error).__name__)
    elif error is not None:
        # Its type only: the text of an exception may quote the event.
        answer = Unknown(type(error).__name__)
    elif not _are_answers(answers := task.result()):
        answer = Unknown("the sink returned something other than answers")
    elif len(answers) != count:
        answer = Unknown(f"the sink returned {len(answers)} answers for {count} events")
    else:
        return answers
    return [answer] * count


def _are_answers(answers: object) -> bool:
    # Mostly a list: the check for a sequence is slow.
    if type(answers) is not list and not isinstance(answers, Sequence):
        return False
    return _ANSWERS.issuperset(map(type, answers))
