"""The data behind the pages: reports of all workers, history, store and routes."""

import asyncio
from typing import Final

from oncebridge.engine.router import Router
from oncebridge.observe import fleet
from oncebridge.observe.history_reader import HistoryReader
from oncebridge.service.config import Setup
from oncebridge.service.monitor import Monitor
from oncebridge.service.routes import make_router
from oncebridge.stores.api import Store

_FRESH_S: Final = 1.0
"""Reports that are younger than this are not read again."""


class DashboardData:
    """
    Everything that pages read and change.

    *monitor* belongs to the service in this process; without one, everything is read from the store
    that workers elsewhere share. Dead letters are replayed through *router*; without one, a router
    is made on first use, and the caller that replays opens it.
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
        self.history = HistoryReader(store, monitor.recorder if monitor else None)
        self._router = router
        self._own_router: Router | None = None
        self._reading: asyncio.Task[fleet.FleetView] | None = None
        self._read_s = 0.0

    @property
    def router(self) -> Router:
        """The routes; not open yet if the workers run elsewhere."""
        if self._router is None:
            self._router = self._own_router = make_router(self.setup)
        return self._router

    async def view(self) -> fleet.FleetView:
        """Return the reports of all workers; simultaneous callers share one read."""
        now_s = asyncio.get_running_loop().time()
        is_old = now_s - self._read_s > _FRESH_S
        if self._reading is None or (self._reading.done() and is_old):
            self._read_s = now_s
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(_retrieve_exception)
        # A caller that is cancelled must not cancel the read for the others.
        return await asyncio.shield(self._reading)

    async def _read(self) -> fleet.FleetView:
        return await fleet.read(self.store, self.monitor.report() if self.monitor else None)

    def known_without_store(self) -> list[str]:
        """Return in a few lines what this process knows while the store is unavailable."""
        if self.monitor is None:
            return []
        state = self.monitor.report().state
        lines = [f"Not ready: {why}" for why in state.not_ready]
        for name, route in state.routes.items():
            lines += [f"{name}: {what} was down when it was last tried" for what in route.down]
            if route.owed:
                lines.append(f"{name}: {route.owed:,} delivered, not recorded yet")
        if state.spooled:
            lines.append(f"{state.spooled:,} events wait on disk")
        return lines

    async def aclose(self) -> None:
        """Close what was opened here; what the caller passed in stays open."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._own_router is not None:
            await self._own_router.drain(self.setup.config.grace)
            await self._own_router.aclose()
        if self.monitor is None:
            await self.setup.config.dead.opened.aclose()


def _retrieve_exception(reading: "asyncio.Task[fleet.FleetView]") -> None:
    """Retrieve a failure that no caller is waiting for any more."""
    if not reading.cancelled():
        reading.exception()
