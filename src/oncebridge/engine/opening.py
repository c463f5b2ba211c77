"""Opens what a gateway uses: once, in limited time, and seldom while the store is down."""

import asyncio
from collections.abc import Sequence
from typing import Final

from oncebridge.dead_letters.api import DeadLetters
from oncebridge.engine.breaker import Breaker
from oncebridge.engine.counters import Books
from oncebridge.errors import StoreUnavailable
from oncebridge.sinks.api import Sink
from oncebridge.stores.api import Store

_SHARE: Final = 0.25
_MOST_S: Final = 2.0
_CANCEL_S: Final = 0.125
"""An opening has this long to end when it is cancelled; not everything can be cancelled."""


def share_of(left_s: float) -> float:
    """Return how much of the time left an opening may take, if events can be sent without it."""
    return min(left_s * _SHARE, _MOST_S)


class Opening:
    """Opens *parts*, in order, until that has succeeded once; *breaker* is that of the store."""

    def __init__(
        self, parts: Sequence[Store | Sink | DeadLetters | None], breaker: Breaker, books: Books
    ) -> None:
        self._parts = parts
        self._breaker = breaker
        self._books = books
        self._task: asyncio.Task[None] | None = None
        self.is_done = False

    async def finish(self, within_s: float | None = None) -> None:
        """
        Open, or raise; `TimeoutError` if it is not done *within_s*.

        An opening that is running and cannot be cancelled is waited for, and not begun again.
        """
        if self.is_done:
            return
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._open_parts())
        task = self._task
        try:
            await asyncio.wait({task}, timeout=within_s)
        finally:
            if not task.done():
                task.add_done_callback(_retrieve)
                task.cancel()
                await asyncio.wait({task}, timeout=_CANCEL_S)
        if not task.done() or task.cancelled():
            raise TimeoutError
        task.result()
        self.is_done = True
        self._breaker.succeeded()

    async def _open_parts(self) -> None:
        for part in self._parts:
            if part is not None:
                await part.open()

    async def attempt(self, within_s: float | None = None) -> str:
        """Open if that is due; return why the store is unavailable, or nothing if it is open."""
        if self.is_done:
            return ""
        now_s = asyncio.get_running_loop().time
        if not self._breaker.admits(now_s()):
            return "it is down"
        try:
            await self.finish(within_s)
        except (StoreUnavailable, TimeoutError) as error:
            self._books.store_errors += 1
            self._breaker.failed(now_s(), at_once=True)
            return str(error) or "it could not be opened in time"
        except BaseException:
            self._breaker.abandoned()
            raise
        return ""


def _retrieve(task: asyncio.Task[None]) -> None:
    """Retrieve the error of an opening that is not awaited, or asyncio would log it."""
    if not task.cancelled():
        task.exception()
