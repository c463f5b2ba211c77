"""
One round trip for what many callers ask at once.

While a call is on its way, further questions gather and go together with the next one:
at low load nobody waits, at high load batches grow by themselves.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


class _Asked(Generic[Q, A]):
    """One caller's questions, and where the answers go."""

    __slots__ = ("answers", "questions")

    def __init__(self, questions: Sequence[Q]) -> None:
        self.questions = questions
        self.answers: asyncio.Future[Sequence[A]] = asyncio.get_running_loop().create_future()


class Batcher(Generic[Q, A]):
    """
    Gather questions for *call*, which answers one for each, in order.

    At most *at_once* calls are on their way, with about *most* questions each. A store
    wants the keys of one call to be distinct, so questions that share one (*keys_of*) go
    in different calls. If a call raises, everybody whose question was in it hears of it.
    """

    def __init__(
        self,
        call: Callable[[Sequence[Q]], Awaitable[Sequence[A]]],
        *,
        keys_of: Callable[[Q], Iterable[bytes]],
        most: int = 500,
        at_once: int = 2,
    ) -> None:
        self._call = call
        self._keys_of = keys_of
        self._most = most
        self._free = at_once
        self._waiting: list[_Asked[Q, A]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, questions: Sequence[Q]) -> Sequence[A]:
        """Ask, alone or together with others."""
        if self._free:
            self._free -= 1
            try:
                return await self._call(questions)
            finally:
                self._free += 1
                self._send()
        asked: _Asked[Q, A] = _Asked(questions)
        self._waiting.append(asked)
        return await asked.answers

    def _send(self) -> None:
        while self._free and self._waiting:
            taken = self._gather()
            self._free -= 1
            task = asyncio.get_running_loop().create_task(self._answer(taken))
            self._tasks.add(task)  # the loop itself keeps only a weak reference
            task.add_done_callback(self._tasks.discard)

    def _gather(self) -> list[_Asked[Q, A]]:
        """Take who has waited longest, and as many more as fit."""
        taken: list[_Asked[Q, A]] = []
        left: list[_Asked[Q, A]] = []
        size = 0
        keys: set[bytes] = set()
        for asked in self._waiting:
            questions = asked.questions
            own = {key for question in questions for key in self._keys_of(question)}
            if taken and (size + len(questions) > self._most or not keys.isdisjoint(own)):
                left.append(asked)
                continue
            taken.append(asked)
            keys |= own
            size += len(questions)
        self._waiting = left
        return taken

    async def _answer(self, taken: list[_Asked[Q, A]]) -> None:
        try:
            answers = await self._call([one for asked in taken for one in asked.questions])
        except BaseException as error:  # noqa: BLE001 - handed on to everybody who asked
            for asked in taken:
                if not asked.answers.done():
                    asked.answers.set_exception(error)
        else:
            at = 0
            for asked in taken:
                after = at + len(asked.questions)
                if not asked.answers.done():
                    asked.answers.set_result(answers[at:after])
                at = after
        finally:
            self._free += 1
            self._send()
