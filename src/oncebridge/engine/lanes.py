"""
Several lines of work side by side, each in its order.

In a lane, the next one starts only when the one before it is done; where one is not done,
the rest of its lane is left alone. Lanes do not wait for each other, and what may start at
the same moment starts together, so that a batch stays a batch.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")

Tell = Callable[[int, bool], None]
"""Told of each item of a batch, by its place in it, whether it is done."""
Bring = Callable[[list[_T], Tell], Coroutine[Any, Any, None]]


class Lanes(Generic[_T]):
    """Take *lanes* through *bring*, which is given what may start now."""

    def __init__(self, lanes: Sequence[Sequence[_T]], bring: Bring[_T]) -> None:
        self._bring = bring
        self._rests = [iter(lane) for lane in lanes]
        self._ready: list[tuple[int, _T]] = []
        self._running: set[asyncio.Task[None]] = set()
        self._woken = asyncio.Event()
        for lane in range(len(lanes)):
            self._advance(lane)

    async def run(self) -> None:
        """Run until every lane is at its end, or stuck; an error ends all of them."""
        try:
            while self._ready or self._running:
                if self._ready:
                    self._start()
                self._woken.clear()
                await self._woken.wait()
                for task in [task for task in self._running if task.done()]:
                    self._running.remove(task)
                    task.result()
        finally:
            for task in self._running:
                task.cancel()
            # Not before they are back: each still tells what was done.
            await asyncio.gather(*self._running, return_exceptions=True)

    def _start(self) -> None:
        items, self._ready = self._ready, []

        def tell(at: int, is_done: bool) -> None:  # noqa: FBT001 - as `Tell` has it
            if is_done:
                self._advance(items[at][0])

        task = asyncio.get_running_loop().create_task(
            self._bring([item for _, item in items], tell)
        )
        task.add_done_callback(lambda _: self._woken.set())
        self._running.add(task)

    def _advance(self, lane: int) -> None:
        for item in self._rests[lane]:
            self._ready.append((lane, item))
            self._woken.set()
            break
