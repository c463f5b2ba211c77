"""
The sends of one batch: several at once, each with a timeout, whatever the sink does.

There is one task for each call of the sink and no other. Answers that arrive together are
returned together, so that their commits are one round trip.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from math import inf
from types import CoroutineType
from typing import get_args

from oncebridge.engine.batch import BatchEntry
from oncebridge.engine.leases import Lease
from oncebridge.errors import SinkRejected
from oncebridge.sinks.api import JointAnswer, Never, Unknown, Yes

EntryAnswer = tuple[BatchEntry, JointAnswer]

CallListener = Callable[[int, float, bool], None]
"""Called with the number of events of a call, its seconds, and whether the sink took all."""

_Call = asyncio.Future[Sequence[JointAnswer]]
_ANSWERS = frozenset(get_args(JointAnswer))
_TAKEN = {Yes}


class SendSlots:
    """The calls of the sink that may run at once, over all batches."""

    def __init__(self, count: int, listener: CallListener | None = None) -> None:
        self._free = count
        self._listener = listener
        self._waiters: deque[Callable[[], None]] = deque()
        self.slowest_s = 0.0
        """How long the slowest recent call took; decays with each call."""

    def record_call(self, items: int, took_s: float, *, ok: bool) -> None:
        """Record how long a call took, and report it to the listener."""
        self.slowest_s = max(took_s, self.slowest_s * 0.9)
        if self._listener is not None:
            self._listener(items, took_s, ok)

    def acquire(self) -> bool:
        """Take a slot, if one is free."""
        if self._free <= 0:
            return False
        self._free -= 1
        return True

    def release(self) -> None:
        self._free += 1
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


class Sends:
    """
    The calls of a sink for one batch.

    `start` one whenever there is a slot, and take the answers from `next`. Whatever the sink
    does, every delivery gets one answer, within its timeout.
    """

    def __init__(self, slots: SendSlots, loop: asyncio.AbstractEventLoop) -> None:
        self._slots = slots
        self._loop = loop
        self._calls: dict[_Call, tuple[list[BatchEntry], float, float]] = {}
        """The entries of each call, when it times out, and its timeout."""
        self._answered: list[EntryAnswer] = []
        self._timer: asyncio.TimerHandle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_woken = False
        self._waits_for_slot = False

    @property
    def has_pending(self) -> bool:
        return bool(self._calls or self._answered)

    def take_slot(self) -> bool:
        """Take a slot for a call; if none is free, `next` returns when one may be."""
        if self._slots.acquire():
            return True
        if not self._waits_for_slot:
            self._waits_for_slot = True
            self._slots.notify_when_free(self._on_slot_free)
        return False

    def return_slot(self) -> None:
        self._slots.release()

    def start(
        self,
        entries: list[BatchEntry],
        call: Awaitable[Sequence[JointAnswer]],
        *,
        timeout_s: float,
        leases: Iterable[Lease],
    ) -> None:
        """
        Send *entries* by *call*, in a slot that was taken.

        If one of *leases* is lost meanwhile, the call is cancelled.
        """
        # Not `ensure_future`, which asks for the running loop: a system call in Python 3.11.
        if isinstance(call, CoroutineType):
            task = self._loop.create_task(call)
        else:
            task = asyncio.ensure_future(call)
        for lease in leases:
            lease.sending = task
        self._calls[task] = (entries, self._loop.time() + timeout_s, timeout_s)
        task.add_done_callback(self._on_done)
        if self._timer is None:
            self._timer = self._loop.call_later(timeout_s, self._check_timeouts)

    async def next(self) -> list[EntryAnswer]:
        """Wait for answers or a wake-up; return all answers there are."""
        if not self._answered and not self._is_woken:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_woken = False
        return self.take_answers()

    def take_answers(self) -> list[EntryAnswer]:
        """Return the answers that have arrived, without waiting."""
        if self._calls:
            for task in [task for task in self._calls if task.done()]:
                self._on_done(task)
        answered, self._answered = self._answered, []
        return answered

    def wake_in(self, seconds: float) -> None:
        """Let `next` return after *seconds*, with or without answers."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_later(seconds, self.wake)

    def stop_waiting_for_slot(self) -> None:
        """Stop waiting for a slot; another batch may have it."""
        self._waits_for_slot = False
        self._slots.cancel_notification(self._on_slot_free)

    def close(self) -> None:
        """Cancel the calls under way; their answers are not needed any more."""
        for timer in (self._timer, self._alarm):
            if timer is not None:
                timer.cancel()
        self.stop_waiting_for_slot()
        for task in list(self._calls):
            self._cancel(task)

    def _on_done(self, task: _Call) -> None:
        call = self._calls.pop(task, None)
        if call is None:
            # Cancelled before; its error is retrieved, or asyncio would log it.
            if not task.cancelled():
                task.exception()
            return
        self._slots.release()
        entries, ends, timeout_s = call
        answers = _answers_of(task, len(entries))
        took_s = self._loop.time() - ends + timeout_s
        self._slots.record_call(len(entries), took_s, ok=set(map(type, answers)) == _TAKEN)
        self._answered += zip(entries, answers, strict=True)
        self.wake()

    def _check_timeouts(self) -> None:
        now, earliest = self._loop.time(), inf
        for task, (entries, ends, timeout_s) in list(self._calls.items()):
            if task.done():
                continue  # its answer is on its way to `_on_done`
            if ends > now:
                earliest = min(earliest, ends)
                continue
            self._cancel(task)
            self._slots.record_call(len(entries), timeout_s, ok=False)
            reason = Unknown(f"no answer within {timeout_s:g} s")
            self._answered += [(entry, reason) for entry in entries]
            self.wake()
        self._timer = None
        if earliest < inf:
            self._timer = self._loop.call_at(earliest, self._check_timeouts)

    def _cancel(self, task: _Call) -> None:
        # Not awaited: a sink that ignores its cancellation must not delay the batch.
        del self._calls[task]
        self._slots.release()
        task.cancel()

    def _on_slot_free(self) -> None:
        self._waits_for_slot = False
        self.wake()

    def wake(self) -> None:
        """Let `next` return, with or without answers."""
        self._is_woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _answers_of(task: _Call, count: int) -> Sequence[JointAnswer]:
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
