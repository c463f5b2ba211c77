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

from oncebridge.engine.batch import Flight
from oncebridge.engine.leases import Hold
from oncebridge.errors import SinkRejected
from oncebridge.sinks.api import JointAnswer, Never, Unknown, Yes

Answered = tuple[Flight, JointAnswer]

Noted = Callable[[int, float, bool], None]
"""Told of each call for how many it was, how long it took, and whether all were taken."""

_Call = asyncio.Future[Sequence[JointAnswer]]
_ANSWERS = frozenset(get_args(JointAnswer))
_TAKEN = {Yes}


class Slots:
    """How many calls of the sink may run at once, over all batches."""

    def __init__(self, count: int, told: Noted | None = None) -> None:
        self._free = count
        self._told = told
        self._wishes: deque[Callable[[], None]] = deque()
        self.slowest_s = 0.0
        """How long calls took lately, the slowest of them; forgotten little by little."""

    def note(self, items: int, took_s: float, *, ok: bool) -> None:
        """Remember how long a call took, and tell it to whoever wants to know."""
        self.slowest_s = max(took_s, self.slowest_s * 0.9)
        if self._told is not None:
            self._told(items, took_s, ok)

    def take(self) -> bool:
        """Take a slot, if there is one."""
        if self._free <= 0:
            return False
        self._free -= 1
        return True

    def give(self) -> None:
        self._free += 1
        self._offer()

    def wish(self, wake: Callable[[], None]) -> None:
        """Call *wake* once when there is a slot; it may be gone again by then."""
        self._wishes.append(wake)

    def give_up(self, wake: Callable[[], None]) -> None:
        """Wish no more, and let the next one have what was offered."""
        if self._wishes:
            with suppress(ValueError):
                self._wishes.remove(wake)
            self._offer()

    def _offer(self) -> None:
        if self._free > 0 and self._wishes:
            self._wishes.popleft()()


class Sends:
    """
    The calls of a sink for one batch.

    `start` one whenever there is a slot, and take what was answered from `next`. Whatever
    the sink does, every delivery gets one answer, in its time.
    """

    def __init__(self, slots: Slots, loop: asyncio.AbstractEventLoop) -> None:
        self._slots = slots
        self._loop = loop
        self._calls: dict[_Call, tuple[list[Flight], float, float]] = {}
        """With what each is for, when its time is up, and how much that was."""
        self._answered: list[Answered] = []
        self._timer: asyncio.TimerHandle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_woken = False
        self._wishes = False

    @property
    def are_under_way(self) -> bool:
        return bool(self._calls or self._answered)

    def take_slot(self) -> bool:
        """Take a slot for a call, or be woken when there may be one."""
        if self._slots.take():
            return True
        if not self._wishes:
            self._wishes = True
            self._slots.wish(self._has_slot)
        return False

    def return_slot(self) -> None:
        self._slots.give()

    def start(
        self,
        flights: list[Flight],
        call: Awaitable[Sequence[JointAnswer]],
        *,
        timeout_s: float,
        holds: Iterable[Hold],
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
        for hold in holds:
            hold.sending = task
        self._calls[task] = (flights, self._loop.time() + timeout_s, timeout_s)
        task.add_done_callback(self._ended)
        if self._timer is None:
            self._timer = self._loop.call_later(timeout_s, self._look_at_the_time)

    async def next(self) -> list[Answered]:
        """Wait for answers, or for whatever else wakes; give all answers there are."""
        if not self._answered and not self._is_woken:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_woken = False
        return self.answered()

    def answered(self) -> list[Answered]:
        """Return the answers that have come, without waiting."""
        if self._calls:
            for task in [task for task in self._calls if task.done()]:
                self._ended(task)
        answered, self._answered = self._answered, []
        return answered

    def wake_in(self, seconds: float) -> None:
        """Let `next` return after so long, answers or not."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_later(seconds, self.wake)

    def wish_no_more(self) -> None:
        """Let somebody else have the slot that was waited for."""
        self._wishes = False
        self._slots.give_up(self._has_slot)

    def close(self) -> None:
        """Break off what is under way; nobody will ask for its answers."""
        for timer in (self._timer, self._alarm):
            if timer is not None:
                timer.cancel()
        self.wish_no_more()
        for task in list(self._calls):
            self._give_up(task)

    def _ended(self, task: _Call) -> None:
        call = self._calls.pop(task, None)
        if call is None:
            # Given up before; what it ends in is retrieved, so that nobody complains.
            if not task.cancelled():
                task.exception()
            return
        self._slots.give()
        flights, ends, timeout_s = call
        answers = _answers(task, len(flights))
        took_s = self._loop.time() - ends + timeout_s
        self._slots.note(len(flights), took_s, ok=set(map(type, answers)) == _TAKEN)
        self._answered += zip(flights, answers, strict=True)
        self.wake()

    def _look_at_the_time(self) -> None:
        now, earliest = self._loop.time(), inf
        for task, (flights, ends, timeout_s) in list(self._calls.items()):
            if task.done():
                continue  # its answer is on its way to `_ended`
            if ends > now:
                earliest = min(earliest, ends)
                continue
            self._give_up(task)
            self._slots.note(len(flights), timeout_s, ok=False)
            reason = Unknown(f"no answer within {timeout_s:g} s")
            self._answered += [(flight, reason) for flight in flights]
            self.wake()
        self._timer = None
        if earliest < inf:
            self._timer = self._loop.call_at(earliest, self._look_at_the_time)

    def _give_up(self, task: _Call) -> None:
        # Not awaited: a sink that ignores its cancellation must not hold us up too.
        del self._calls[task]
        self._slots.give()
        task.cancel()

    def _has_slot(self) -> None:
        self._wishes = False
        self.wake()

    def wake(self) -> None:
        """Let `next` return, answers or not."""
        self._is_woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _answers(task: _Call, count: int) -> Sequence[JointAnswer]:
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
