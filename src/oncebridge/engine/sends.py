"""
The sends of one batch: several at once, each bounded in time, never trusted.

There is one task for each call of the sink and nothing else, and answers that come
together are given together, so that their commits can be one round trip.
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
"""Told of each call for how many it was, how long it took, and whether all were taken."""

_Call = asyncio.Future[Sequence[JointAnswer]]
_ANSWERS = frozenset(get_args(JointAnswer))
_TAKEN = {Yes}


class SendSlots:
    """How many calls of the sink may run at once, over all batches."""

    def __init__(self, count: int, listener: CallListener | None = None) -> None:
        self._free = count
        self._listener = listener
        self._waiters: deque[Callable[[], None]] = deque()
        self.slowest_s = 0.0
        """How long calls took lately, the slowest of them; forgotten little by little."""

    def record_call(self, items: int, took_s: float, *, ok: bool) -> None:
        """Remember how long a call took, and tell it to whoever wants to know."""
        self.slowest_s = max(took_s, self.slowest_s * 0.9)
        if self._listener is not None:
            self._listener(items, took_s, ok)

    def acquire(self) -> bool:
        """Take a slot, if there is one."""
        if self._free <= 0:
            return False
        self._free -= 1
        return True

    def release(self) -> None:
        self._free += 1
        self._wake_next()

    def notify_when_free(self, wake: Callable[[], None]) -> None:
        """Call *wake* once when there is a slot; it may be gone again by then."""
        self._waiters.append(wake)

    def cancel_notification(self, wake: Callable[[], None]) -> None:
        """Wish no more, and let the next one have what was offered."""
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

    `start` one whenever there is a slot, and take what was answered from `next`. Whatever
    the sink does, every delivery gets one answer, in its time.
    """

    def __init__(self, slots: SendSlots, loop: asyncio.AbstractEventLoop) -> None:
        self._slots = slots
        self._loop = loop
        self._calls: dict[_Call, tuple[list[BatchEntry], float, float]] = {}
        """With what each is for, when its time is up, and how much that was."""
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
        """Take a slot for a call, or be woken when there may be one."""
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
        Let the sink take *flights* by *call*, in a slot that was taken.

        If one of *holds* is lost meanwhile, the call is broken off.
        """
        # By the loop itself: `ensure_future` looks for it, which is a system call in 3.11.
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
        """Wait for answers, or for whatever else wakes; give all answers there are."""
        if not self._answered and not self._is_woken:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_woken = False
        return self.take_answers()

    def take_answers(self) -> list[EntryAnswer]:
        """Return the answers that have come, without waiting."""
        if self._calls:
            for task in [task for task in self._calls if task.done()]:
                self._on_done(task)
        answered, self._answered = self._answered, []
        return answered

    def wake_in(self, seconds: float) -> None:
        """Let `next` return after so long, answers or not."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_later(seconds, self.wake)

    def stop_waiting_for_slot(self) -> None:
        """Let somebody else have the slot that was waited for."""
        self._waits_for_slot = False
        self._slots.cancel_notification(self._on_slot_free)

    def close(self) -> None:
        """Break off what is under way; nobody will ask for its answers."""
        for timer in (self._timer, self._alarm):
            if timer is not None:
                timer.cancel()
        self.stop_waiting_for_slot()
        for task in list(self._calls):
            self._cancel(task)

    def _on_done(self, task: _Call) -> None:
        call = self._calls.pop(task, None)
        if call is None:
            # Given up before; what it ends in is retrieved, so that nobody complains.
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
        # Not awaited: a sink that ignores its cancellation must not hold us up too.
        del self._calls[task]
        self._slots.release()
        task.cancel()

    def _on_slot_free(self) -> None:
        self._waits_for_slot = False
        self.wake()

    def wake(self) -> None:
        """Let `next` return, answers or not."""
        self._is_woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _answers_of(task: _Call, count: int) -> Sequence[JointAnswer]:
    """Take the sink's answers, or make some from the way it failed."""
    answer: JointAnswer
    if task.cancelled():
        answer = Unknown("the send was broken off")
    elif isinstance(error := task.exception(), SinkRejected):
        answer = Never(type(error).__name__)
    elif error is not None:
        # Its type only: the text of an exception may quote the event.
        answer = Unknown(type(error).__name__)
    elif not _are_answers(answers := task.result()):
        answer = Unknown("the sink gave something else than answers")
    elif len(answers) != count:
        answer = Unknown(f"the sink gave {len(answers)} answers for {count} events")
    else:
        return answers
    return [answer] * count


def _are_answers(answers: object) -> bool:
    # A list, mostly: to ask whether something is a sequence is slow.
    if type(answers) is not list and not isinstance(answers, Sequence):
        return False
    return _ANSWERS.issuperset(map(type, answers))
