"""Blocking work beside the event loop."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


async def run_in_thread(work: Callable[[], _T], name: str) -> _T:
    """
    Run blocking work in a daemon thread.

    A read from a terminal, a pipe or a connection ends when something is written there; a process
    that is stopped must not depend on that.
    """
    result: Future[_T] = Future()
    result.set_running_or_notify_cancel()  # so that it is not cancelled with the caller

    def body() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised to the caller
            result.set_exception(error)

    threading.Thread(target=body, name=name, daemon=True).start()
    return await asyncio.wrap_future(result)
