"""One timer for many things that mostly end before they are due."""

import asyncio
from collections.abc import Callable
from math import inf


class LazyTimer:
    """
    Calls *due* with its event loop, at one time; another is set when that has come.

    It is not stopped when there is nothing to wait for any more: most leases and sends end soon,
    and a timer for each costs more than one that finds nothing to do. Nor is it a task: a loop that
    only runs during calls (`BlockingGateway`) can be left at any time, and be followed by another.
    """

    def __init__(self, due: Callable[[asyncio.AbstractEventLoop], None]) -> None:
        self._due = due
        self._handle: asyncio.TimerHandle | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.at_s = inf

    def start(self, loop: asyncio.AbstractEventLoop, at_s: float) -> None:
        """Wait until *at_s*, and for nothing else."""
        self.stop()
        self.loop, self.at_s = loop, at_s
        self._handle = loop.call_at(at_s, self._call, loop)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self.loop, self.at_s = None, None, inf

    def _call(self, loop: asyncio.AbstractEventLoop) -> None:
        self.stop()
        self._due(loop)
