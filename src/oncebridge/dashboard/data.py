"""What the pages show, wherever the workers run: read here, and nowhere else."""

import asyncio
from typing import Final

from oncebridge.engine.router import Router
from oncebridge.observe import fleet
from oncebridge.observe.history import Found, Query
from oncebridge.observe.history_reader import Archive
from oncebridge.service.config import Setup
from oncebridge.service.monitor import Monitor
from oncebridge.service.service import make_router
from oncebridge.stores.api import Store

_FRESH_S: Final = 1.0
"""For so long what was read is shown to whoever asks next."""


class Desk:
    """
    All that can be seen and done.

    *monitor* is of the service in this process; without one, all is read from the store that
    workers elsewhere share. *router* is what dead letters are replayed through; without one, it is
    made when it is first asked for, and whoever replays opens it.
    """

    def __init__(
        self,
        setup: Setup,
        store: Store,
        router: Router | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        self.setup = setup
        self.store = store
        self.monitor = monitor
        self.archive = Archive(store, monitor.recorder if monitor else None)
        self._router = router
        self._made: Router | None = None
        self._reading: asyncio.Task[fleet.View] | None = None
        self._read_s = 0.0

    @property
    def router(self) -> Router:
        """The routes; beside workers elsewhere nothing of them is open yet."""
        if self._router is None:
            self._router = self._made = make_router(self.setup)
        return self._router

    async def view(self) -> fleet.View:
        """Tell of all workers; ten who ask at once cost one reading."""
        now_s = asyncio.get_running_loop().time()
        is_old = now_s - self._read_s > _FRESH_S
        if self._reading is None or (self._reading.done() and is_old):
            self._read_s = now_s
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(_hear)
        # Whoever leaves early does not end it for the others.
        return await asyncio.shield(self._reading)

    async def _read(self) -> fleet.View:
        return await fleet.read(self.store, self.monitor.report() if self.monitor else None)

    async def search(self, query: Query) -> Found:
        """Find recent arrivals."""
        view = await self.view()
        return await self.archive.search(query, [*view.reports, *view.gone])

    def known_without_store(self) -> list[str]:
        """Tell in a few lines what is known here while the store is away."""
        if self.monitor is None:
            return []
        state = self.monitor.report().state
        lines = [f"Not ready: {why}" for why in state.not_ready]
        for name, route in state.routes.items():
            lines += [f"{name}: {what} was down when it was last tried" for what in route.down]
            if route.owed:
                lines.append(f"{name}: {route.owed:,} delivered, and still to be recorded")
        if state.spooled:
            lines.append(f"{state.spooled:,} arrivals wait on disk")
        return lines

    async def aclose(self) -> None:
        """Let go of what was opened here; what was handed in is left to its owner."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._made is not None:
            await self._made.drain(self.setup.config.grace)
            await self._made.aclose()
        if self.monitor is None:
            await self.setup.config.dead.opened.aclose()


def _hear(reading: "asyncio.Task[fleet.View]") -> None:
    """Take note of a failure that nobody may be waiting for any more."""
    if not reading.cancelled():
        reading.exception()
