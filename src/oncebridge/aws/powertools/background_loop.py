"""
Runs a function in the thread of its caller, with the gateway in a background thread.

`BackgroundLoop` is one event loop in a thread of its own: stores are bound to the loop they were
opened on, so all functions share it. A `ProtectedCall` is made by its own caller, in its thread or
on its loop, when the gateway allows it. So a plain function keeps the context of its thread, an
`async def` its loop, and one protected function may call another. Leases are extended meanwhile.
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
    """An event loop in a thread of its own, and its gateways; created on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread()
        self._pid = 0
        self._gateways: dict[Callable[[], Gateway], Gateway] = {}

    def start(
        self, make: Callable[[], Gateway], work: Callable[[Gateway], Coroutine[Any, Any, _T]]
    ) -> "Future[_T]":
        """Run *work* on the background loop, with the gateway of *make*, which is called once."""
        if self._is_forked:
            raise ConfigError(
                "fork",
                "this process was forked after a first call, and does not have the background thread; "
                "make the first call after the fork, or start processes with spawn",
            )
        with self._lock:
            if self._loop is None:
                self._pid = os.getpid()
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run, args=[self._loop], name="oncebridge-background", daemon=True
                )
                self._thread.start()
            gateway = self._gateways.get(make) or self._gateways.setdefault(make, make())
            return asyncio.run_coroutine_threadsafe(work(gateway), self._loop)

    def close(self, grace: timedelta = timedelta(seconds=2)) -> None:
        """Finish running calls and close all gateways; a later call opens new ones."""
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
        # A fork copies everything but the thread.
        return self._loop is not None and self._pid != os.getpid()


class ProtectedCall:
    """One call of a protected function, and its result; *pack* makes JSON of the result."""

    def __init__(self, pack: Callable[[Any], bytes | None]) -> None:
        self.is_begun = False
        """The call was allowed: it is running, or has ended."""
        self.delivery: Delivery | None = None
        """The delivery of the call, once the gateway delivers it."""
        self.value: Any = None
        self.packed: bytes | None = None
        self.error: BaseException | None = None
        self._pack = pack
        self._go: Future[bool] = Future()
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()  # a cancelled waiter does not cancel the call

    def run(self, work: "Future[_T]", function: Callable[[], Any]) -> _T | None:
        """Make the call if *work* allows it; return the result of *work*."""
        work.add_done_callback(lambda _: self._decide(go=False))
        try:
            if self._go.result():
                try:
                    self._store_result(function())
                except BaseException as error:  # noqa: BLE001 - raised by the caller
                    self.error = error
                self._ended.set_result(None)
                wait([work])
        finally:
            self._cancel_if_not_made(work)
        return self._result_of(work)

    async def run_async(
        self, work: "Future[_T]", function: Callable[[], Awaitable[Any]]
    ) -> _T | None:
        """Do the same on an event loop."""
        work.add_done_callback(lambda _: self._decide(go=False))
        try:
            if await asyncio.wrap_future(self._go):
                try:
                    self._store_result(await function())
                except BaseException as error:  # noqa: BLE001 - raised by the caller
                    self.error = error
                self._ended.set_result(None)
                await asyncio.wait([asyncio.wrap_future(work)])
        finally:
            self._cancel_if_not_made(work)
        return self._result_of(work)

    async def made(self) -> bool:
        """Allow the call and wait for its end; return False if the caller does not wait any more."""
        self.is_begun = self._decide(go=True)
        if self.is_begun:
            await self.end()
        return self.is_begun

    async def end(self) -> None:
        """Wait until a call that was allowed has ended."""
        await asyncio.wrap_future(self._ended)

    def _store_result(self, value: Any) -> None:
        if inspect.iscoroutine(value) or inspect.isgenerator(value):
            value.close()  # or Python warns that it was never awaited
        if inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value):
            raise TypeError(
                "the function returned an awaitable or a generator, which has not run yet; protect "
                "an async def itself, or a function that does the work"
            )
        # In the caller's thread: a serializer may call a protected function, too.
        self.value, self.packed = value, self._pack(value)

    def _cancel_if_not_made(self, work: "Future[Any]") -> None:
        """Cancel *work* if the call was not made; a call that was made is recorded."""
        if not self._ended.done():
            work.cancel()

    def _result_of(self, work: "Future[_T]") -> _T | None:
        if not (self._ended.done() and work.cancelled()):
            return work.result()
        # Cancelled by `close`; but the call was made, and the caller gets its result.
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
