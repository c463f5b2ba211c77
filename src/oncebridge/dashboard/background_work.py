"""
Runs slow work in a thread, so that it does not delay events on the event loop.

The thread shares the interpreter with the event loop, which gets a turn every few milliseconds.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar, cast

from oncebridge.stores.api import Record, Store

_T = TypeVar("_T")
_ANSWER_S: Final = 10.0


async def run_in_thread(store: Store, work: Callable[[Store], Coroutine[Any, Any, _T]]) -> _T:
    """
    Run *work* in a thread with an event loop of its own.

    *work* gets a read-only store whose calls run on the calling loop. A call that takes longer
    than ten seconds raises `TimeoutError`.
    """
    far = cast("Store", _OtherLoopStore(store, asyncio.get_running_loop()))
    return await asyncio.to_thread(lambda: asyncio.run(work(far)))


class _OtherLoopStore:
    """The read methods of a store that belongs to another event loop."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._loop = loop

    async def now_ms(self) -> int:
        return await self._asked(self._store.now_ms)

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        return await self._asked(lambda: self._store.peek(keys))

    async def _asked(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        async def asked() -> _T:
            return await ask()

        answer = asyncio.run_coroutine_threadsafe(asked(), self._loop)
        async with asyncio.timeout(_ANSWER_S):
            return await asyncio.wrap_future(answer)
