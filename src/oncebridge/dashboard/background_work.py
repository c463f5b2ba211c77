"""
Work that would hold the loop: done beside it, in a thread, so that events come first.

A thread shares the interpreter with the loop, and lets it go on every few milliseconds.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar, cast

from oncebridge.stores.api import Record, Store

_T = TypeVar("_T")
_ANSWER_S: Final = 10.0


async def beside(store: Store, work: Callable[[Store], Coroutine[Any, Any, _T]]) -> _T:
    """
    Do *work* in a thread with a loop of its own.

    It gets a store to look into, which is asked on the loop that it belongs to. One that takes
    longer than ten seconds to answer raises `TimeoutError` there.
    """
    far = cast("Store", _Far(store, asyncio.get_running_loop()))
    return await asyncio.to_thread(lambda: asyncio.run(work(far)))


class _Far:
    """A store that belongs to another loop; only what looks is there."""

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
