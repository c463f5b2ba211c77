"""
A function that runs where its caller stands, with a gateway beside it.

`BackgroundLoop` is one loop in a thread of its own: stores are bound to the loop they were opened on,
so all that share one share the loop. A `ProtectedCall` is made by its own caller, in the same thread or
on the same loop as without us, when the gateway says go. So a plain function keeps the context
of its thread, an `async def` its loop, and one protected function may call another. Heartbeats
go on meanwhile.
"""

import asyncio
import inspect
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, InvalidStateError, wait
from datetime import timedelta
from typing import Any, TypeVar

from oncebridge.engine.gateway import Gateway
from oncebridge.errors import ConfigError
from oncebridge.sinks.api import Delivery

_log = logging.getLogger("oncebridge")
_T = TypeVar("_T")


class BackgroundLoop:
    """A loop in a thread of its own, and its gateways; all made when they are first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread()
        self._pid = 0
        self._gateways: dict[Callable[[], Gateway], Gateway] = {}

    def start(
        self, make: Callable[[], Gateway], work: Callable[[Gateway], Coroutine[Any, Any, _T]]
    ) -> "Future[_T]":
        """Let *work* run over there, with the gateway that *make* gave, or gives now."""
        if self._is_forked:
            raise ConfigError(
                "fork",
                "this process was forked after a first call, and has no thread for the store; "
                "make the first call after the fork, or start processes with spawn",
            )
        with self._lock:
            if self._loop is None:
                self._pid = os.getpid()
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run, args=[self._loop], name="oncebridge-beside", daemon=True
                )
                self._thread.start()
            gateway = self._gateways.get(make) or self._gateways.setdefault(make, make())
            return asyncio.run_coroutine_threadsafe(work(gateway), self._loop)

    def close(self, grace: timedelta = timedelta(seconds=2)) -> None:
        """Finish what is under way and close all gateways; what is called later starts anew."""
        if self._is_forked:
            return
        with self._lock:
            loop, self._loop = self._loop, None
            thread, gateways = self._thread, list(self._gateways.values())
            self._gateways = {}
        if loop is not None:
            asyncio.run_coroutine_threadsafe(_finish(gateways, grace), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    @property
    def _is_forked(self) -> bool:
        # Of the process that we were made in there is everything but the thread.
        return self._loop is not None and self._pid != os.getpid()


class ProtectedCall:
    """One call of a protected function, and how it ended; *pack* makes its result into JSON."""

    def __init__(self, pack: Callable[[Any], bytes | None]) -> None:
        self.is_begun = False
        """The caller was let go: the call is under way, or has ended."""
        self.delivery: Delivery | None = None
        """What the gateway knows it as, once it has come so far."""
        self.value: Any = None
        self.packed: bytes | None = None
        self.error: BaseException | None = None
        self._pack = pack
        self._go: Future[bool] = Future()
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()  # who stops waiting does not stop the call

    def run(self, work: "Future[_T]", function: Callable[[], Any]) -> _T | None:
        """Make the call if *work* lets us, and wait for what comes of that."""
        work.add_done_callback(lambda _: self._decide(go=False))
        try:
            if self._go.result():
                try:
                    self._store_result(function())
                except BaseException as error:  # noqa: BLE001 - our caller raises it
                    self.error = error
                self._ended.set_result(None)
                wait([work])
        finally:
            self._cancel_if_not_made(work)
        return self._result_of(work)

    async def run_async(
        self, work: "Future[_T]", function: Callable[[], Awaitable[Any]]
    ) -> _T | None:
        """Do the same on a loop."""
        work.add_done_callback(lambda _: self._decide(go=False))
        try:
            if await asyncio.wrap_future(self._go):
                try:
                    self._store_result(await function())
                except BaseException as error:  # noqa: BLE001 - our caller raises it
                    self.error = error
                self._ended.set_result(None)
                await asyncio.wait([asyncio.wrap_future(work)])
        finally:
            self._cancel_if_not_made(work)
        return self._result_of(work)

    async def made(self) -> bool:
        """Let the caller make the call, and wait for its end; false: there is nobody any more."""
        self.is_begun = self._decide(go=True)
        if self.is_begun:
            await self.end()
        return self.is_begun

    async def end(self) -> None:
        """Wait until a call that is begun has ended."""
        await asyncio.wrap_future(self._ended)

    def _store_result(self, value: Any) -> None:
        if inspect.iscoroutine(value) or inspect.isgenerator(value):
            value.close()  # or Python complains that nobody ran it
        if inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value):
            raise TypeError(
                "the function gave an awaitable or a generator, which has done nothing yet; "
                "protect an async def itself, or a function that does the work"
            )
        # Here, where our caller stands: a serializer may call a protected function too.
        self.value, self.packed = value, self._pack(value)

    def _cancel_if_not_made(self, work: "Future[Any]") -> None:
        """Break off what was to let us make the call; once that has ended, it is recorded."""
        if not self._ended.done():
            work.cancel()

    def _result_of(self, work: "Future[_T]") -> _T | None:
        if not (self._ended.done() and work.cancelled()):
            return work.result()
        # Broken off by `close`; but the call was made, and our caller shall have its result.
        _log.warning("oncebridge.call_not_recorded", extra={"error": "closed"})
        return None

    def _decide(self, *, go: bool) -> bool:
        try:
            self._go.set_result(go)
        except InvalidStateError:
            return False
        return True


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _finish(gateways: list[Gateway], grace: timedelta) -> None:
    await asyncio.gather(*(gateway.drain(grace) for gateway in gateways))
    for gateway in gateways:
        await gateway.aclose()
    late = asyncio.all_tasks() - {asyncio.current_task()}
    for task in late:
        task.cancel()  # or its caller would wait for ever
    await asyncio.gather(*late, return_exceptions=True)
