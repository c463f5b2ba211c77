"""A gateway for callers without an event loop: a Lambda handler, a script."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any, Self, TypeVar

from oncebridge.engine.batch import Arrival
from oncebridge.engine.counters import Books
from oncebridge.engine.gateway import Gateway
from oncebridge.engine.verdict import Outcome

_T = TypeVar("_T")


class OneLoop:
    """
    One event loop for the life of the process.

    Connections are bound to the loop they were opened on, so a new loop for every call would
    break them at the second call. Nothing runs between calls: work that a call started is
    finished, or continues with the next one. Threads take turns.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._turn = threading.Lock()
        self._closed = False

    def run(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run *work* when it is this thread's turn; return its result."""
        _refuse_inside_a_loop()
        with self._turn:
            if self._closed:
                raise RuntimeError("this gateway is closed; create a new one")
            return self._runner.run(work())

    def close(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T | None:
        """Run *work* and close the loop; a second call does nothing."""
        _refuse_inside_a_loop()
        with self._turn:
            if self._closed:
                return None
            self._closed = True
            with self._runner:
                return self._runner.run(work())


class BlockingGateway:
    """Runs *gateway* on one event loop for the life of the process; threads take turns."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._loop = OneLoop()

    @property
    def books(self) -> Books:
        """The gateway's counters."""
        return self._gateway.books

    def process(
        self,
        arrivals: Sequence[Arrival],
        *,
        within: timedelta | None = None,
        patience: timedelta = timedelta(0),
    ) -> list[Outcome]:
        """Process a batch of arrivals and return the outcome of each, in order."""
        return self._loop.run(
            lambda: self._gateway.process(arrivals, within=within, patience=patience)
        )

    def close(self, grace: timedelta = timedelta(seconds=25)) -> bool:
        """Drain and close; return True if all was finished within *grace*. Safe to repeat."""
        return self._loop.close(lambda: self._finish(grace)) is not False

    async def _finish(self, grace: timedelta) -> bool:
        finished = await self._gateway.drain(grace)
        await self._gateway.aclose()
        return finished

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _refuse_inside_a_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "an event loop is running in this thread, and a blocking call would stop it; "
        "await Gateway.process instead, or make the protected function an async def"
    )
