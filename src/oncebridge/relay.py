"""
From something that is read in order to the router, retrying in place.

A file, a spool, a shard: its records are numbered and stay where they are until they are
final. A few batches are under way at once. Records that were handed back are brought again
when it is time; meanwhile others pass them, as long as not too many wait, and unless the
order is to be kept. What comes before the earliest batch that is not final is final, and
that is what may be checkpointed. While no route takes anything, nothing more is read.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from oncebridge.flight import Arrival
from oncebridge.router import Answer, Router

_T = TypeVar("_T")

Item = tuple[int, Arrival]
"""A record's number, or the place just behind it, and what it holds."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 30.0
_LOOK_AGAIN_S = 1.0
_PATIENCE = timedelta(seconds=2)


class Relay:
    """
    Bring batches from *take* to *router*, and tell *final* which records are done.

    *take* gives the next batch, or nothing at the end. *passed* is told the place up to
    which everything is final, in order, whenever that moves.
    """

    def __init__(
        self,
        router: Router,
        *,
        take: Callable[[], Coroutine[Any, Any, Sequence[Item]]],
        final: Callable[[Sequence[int]], Awaitable[None]] | None = None,
        passed: Callable[[int], Awaitable[None]] | None = None,
        at_once: int = 4,
        most_waiting: int = 2000,
    ) -> None:
        self._router = router
        self._take = take
        self._final = final
        self._passed = passed
        # Two batches side by side would retry in any order.
        self._is_ordered = router.is_ordered
        self._free = asyncio.Semaphore(1 if self._is_ordered else at_once)
        self._most_waiting = most_waiting
        self._waiting = 0
        """Records that were handed back and are to be brought again."""
        self._under_way: dict[asyncio.Task[bool], int] = {}
        self._stopping = asyncio.Event()
        self._fell_short = False
        self._error: BaseException | None = None
        self.is_through = False
        """There is nothing more to take, and all that was taken is final."""

    def stop(self) -> None:
        """Take nothing more; what is handed back from now on stays where it is."""
        self._stopping.set()

    async def run(self) -> None:
        """
        Run until *take* has nothing more, or until `stop`.

        Where *take* raises, what it gave before is still brought to its end; any other
        error is raised as soon as what is under way is back.
        """
        at_end = False
        try:
            while not self._stopping.is_set():
                if not await self._unless_stopping(self._room()):
                    break
                items = await self._unless_stopping(self._take())
                if not items:
                    self._free.release()
                    at_end = items is not None
                    break
                task = asyncio.get_running_loop().create_task(self._bring(items))
                self._under_way[task] = items[-1][0]
                await self._advance()
        except asyncio.CancelledError:
            self.stop()
            raise
        finally:
            while self._under_way:
                await asyncio.wait([next(iter(self._under_way))])
                await self._advance()
        if self._error is not None:
            raise self._error
        self.is_through = at_end and not self._fell_short

    async def _room(self) -> bool:
        """Wait until there is room for another batch, and somebody who would take it."""
        while True:
            await self._free.acquire()
            if self._waiting < self._most_waiting and not self._router.away_s():
                return True
            self._free.release()
            await asyncio.sleep(min(max(self._router.away_s(), 0.1), _LOOK_AGAIN_S))

    async def _unless_stopping(self, work: Coroutine[Any, Any, _T]) -> _T | None:
        """Wait for *work*, but not beyond `stop`."""
        task = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({stopping, task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not task.done():
                task.cancel()
        return task.result() if task.done() else None

    async def _advance(self) -> None:
        """Pass what is final at the front of the line, in order."""
        passed = None
        while self._under_way:
            task = next(iter(self._under_way))
            if not task.done():
                break
            place = self._under_way.pop(task)
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if error is not None:
                self._fail(error)
            # Behind a batch that was left unfinished nothing may be passed either.
            self._fell_short = self._fell_short or error is not None or not task.result()
            passed = passed if self._fell_short else place
        if passed is not None and self._passed is not None:
            try:
                await self._passed(passed)
            except Exception as error:  # noqa: BLE001 - raised when all are back
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self.stop()

    async def _bring(self, items: Sequence[Item]) -> bool:
        """Bring a batch, in a slot that was taken, until it is final; tell whether it is."""
        has_slot, times = True, 0
        try:
            while True:
                items, again = await self._bring_once(items)
                if not items:
                    return True
                if not self._is_ordered:
                    has_slot = False
                    self._free.release()
                self._waiting += len(items)
                try:
                    if await self._stops_within(self._pause_s(again, times)):
                        return False
                    if not has_slot and not await self._unless_stopping(self._free.acquire()):
                        return False
                    has_slot = True
                finally:
                    self._waiting -= len(items)
                times += 1
        finally:
            if has_slot:
                self._free.release()

    async def _bring_once(self, items: Sequence[Item]) -> tuple[list[Item], list[Answer]]:
        """Bring records, and give those that have to be brought again, with their answers."""
        answers = await self._router.process([a for _, a in items], patience=_PATIENCE)
        done = [at for (at, _), a in zip(items, answers, strict=True) if a.acknowledge]
        if done and self._final is not None:
            await self._final(done)
        left = [item for item, a in zip(items, answers, strict=True) if not a.acknowledge]
        return left, [answer for answer in answers if not answer.acknowledge]

    def _pause_s(self, again: Sequence[Answer], times: int) -> float:
        asked = min(answer.retry_after_ms for answer in again) / 1000
        if not asked:  # nobody knows when; an error may be there for long
            asked = _SHORTEST_PAUSE_S * 2 ** min(times, 10)
        wished = max(asked, self._router.away_s(), _SHORTEST_PAUSE_S)
        return min(wished, _LONGEST_PAUSE_S)

    async def _stops_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True
