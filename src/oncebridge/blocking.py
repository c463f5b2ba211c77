"""The same gateway for callers without an event loop: a Lambda handler, a script."""

import asyncio
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Self

from oncebridge.books import Books
from oncebridge.flight import Arrival
from oncebridge.gateway import Gateway
from oncebridge.verdict import Outcome


class BlockingGateway:
    """
    Run *gateway* on one loop for the life of the process.

    Connections are bound to the loop they were made on, so a new loop for every call
    would break them at the second one. Nothing runs between calls: whatever a call
    started is finished, or goes on with the next. Threads take turns.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._runner = asyncio.Runner()
        self._turn = threading.Lock()
        self._closed = False

    @property
    def books(self) -> Books:
        return self._gateway.books

    def process(
        self,
        arrivals: Sequence[Arrival],
        *,
        within: timedelta | None = None,
        patience: timedelta = timedelta(0),
    ) -> list[Outcome]:
        """Take a batch of arrivals and tell what became of each, in order."""
        _refuse_inside_a_loop()
        with self._turn:
            if self._closed:
                raise RuntimeError("this gateway has been closed")
            return self._runner.run(
                self._gateway.process(arrivals, within=within, patience=patience)
            )

    def close(self, grace: timedelta = timedelta(seconds=25)) -> bool:
        """Drain and close; tells whether all was finished within *grace*. Safe to repeat."""
        _refuse_inside_a_loop()
        with self._turn:
            if self._closed:
                return True
            self._closed = True
            finished = self._runner.run(self._gateway.drain(grace))
            self._runner.run(self._gateway.aclose())
            self._runner.close()
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
        "an event loop is running here, and blocking it would stop everything on it: "
        "await Gateway.process instead, or make the protected function an async def"
    )
