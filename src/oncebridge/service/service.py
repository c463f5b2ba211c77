"""
The service: sources, routes and a store, with periodic tasks.

`open` prepares everything or raises. `run` returns when every source has ended, or after `stop`.
`close` finishes the work in progress within the grace period, so that a stop causes no
duplicates. Periodic tasks purge expired records, check whether an operator has paused a route,
and log the counts of each second with work.
"""

import asyncio
import logging
import os
import platform
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from oncebridge import __version__
from oncebridge.base.clock import Clock, Dice, SystemDice, system_clock
from oncebridge.base.formatting import format_instant
from oncebridge.engine import pauses
from oncebridge.engine.counters import Books
from oncebridge.engine.hooks import Decisions, Hook
from oncebridge.engine.router import UNROUTED
from oncebridge.errors import ConfigError, OncebridgeError, StoreUnavailable
from oncebridge.observe.report import RouteState, State
from oncebridge.service.addresses import extension
from oncebridge.service.config import Setup
from oncebridge.service.epoch import Epoch
from oncebridge.service.monitor import Monitor
from oncebridge.service.routes import make_router
from oncebridge.sources.api import Host, Inbox, Source
from oncebridge.sources.pump import PumpInbox
from oncebridge.sources.spool import Spool
from oncebridge.stores.api import Store

if TYPE_CHECKING:
    from oncebridge.observe.health import Health

_log = logging.getLogger("oncebridge")
_PURGE_S, _LOOK_S, _LEAVE_S = 10.0, 1.0, 5.0
_PURGE_MOST = 5000
_RECORD_S, _MEASURE_S, _SHARE_S, _COMPARE_S = 2.0, 10.0, 1.0, 300.0
_PUT_UP_S = 30.0


class DashboardPages(Protocol):
    """The dashboard of a service, from the entry point `oncebridge.dashboards`."""

    @property
    def url(self) -> str: ...

    async def open(self) -> None: ...

    async def aclose(self) -> None: ...


class Service:
    """Runs the sources and routes of *setup*."""

    def __init__(
        self,
        setup: Setup,
        *,
        hooks: Sequence[Hook] = (),
        clock: Clock = system_clock,
        dice: Dice | None = None,
    ) -> None:
        config = setup.config
        self._setup = setup
        self._clock = clock
        self._is_closed = False
        self.store: Store = config.store.opened
        dice = dice or SystemDice()
        self.monitor = Monitor(
            config,
            self.store,
            look=self._state,
            books=self.books,
            rules={route.name: route.rules for route in setup.routes},
            clock=clock,
            dice=dice,
        )
        self._epoch = Epoch(self.store, clock=clock, dice=dice)
        debug = [_log_decisions] if _log.isEnabledFor(logging.DEBUG) else []
        self.router = make_router(
            setup,
            hooks=[self.monitor.decided, *hooks, *debug],
            trip_hooks=[self.monitor.travelled],
            tracer=self.monitor.tracer,
            clock=clock,
        )
        self._keys = {one.route: one.rules.key_fingerprint() for one in self.router.gateways}
        self.spool = Spool(config.spool, config.spool_max) if config.spool else None
        self._direct = PumpInbox(self.router, batch=config.batch, is_open=lambda: self._is_open)
        inbox: Inbox = self.spool or self._direct
        self._is_open = False
        """Store, sinks and dead letters are open."""
        self._host = Host(
            self.router,
            inbox,
            self.store,
            config.batch,
            clock,
            dice,
            lambda: self._is_open,
            self.monitor.context,
        )
        self._listeners = self._make_listeners() if config.health or config.metrics else []
        self._dashboard = self._make_dashboard() if config.dashboard else None
        self.sources: list[Source] = [place.opened for place in config.source]
        self.has_status_line = False
        """A status line shows the counts, so they are not logged."""
        self.gave_up = ""
        """Why the service stopped by itself; empty if it did not."""
        self._stopping = asyncio.Event()
        self._closing = asyncio.Event()
        self._found_wrong = 0
        """How often a store that was opened late was refused."""
        self._counted: dict[str, Counter[str]] = {}
        self._down: dict[str, list[str]] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._runs: set[asyncio.Task[None]] = set()

    def _make_listeners(self) -> "list[Health]":
        from oncebridge.observe.health import listeners  # noqa: PLC0415 - most need no server here

        config = self._setup.config
        return listeners(config.health, config.metrics, self._not_ready, self.monitor.report)

    def _make_dashboard(self) -> DashboardPages:
        make = extension("oncebridge.dashboards", "pages", "dashboard")
        made: DashboardPages = make(self._setup, self.store, self.router, self.monitor)
        return made

    def _state(self, monitor: Monitor) -> State:
        """Return the current state of this worker."""
        return State(
            name=monitor.name,
            host=platform.node(),
            pid=os.getpid(),
            version=__version__,
            started_ms=monitor.started_ms,
            at_ms=self._clock(),
            ended=self._is_closed,
            sources=tuple(map(str, self._setup.config.source)),
            routes={
                gateway.route: RouteState(
                    str(route.sink),
                    gateway.settings.mode,
                    gateway.is_paused,
                    gateway.books.in_flight,
                    gateway.owed,
                    tuple(gateway.down()),
                    round(gateway.unavailable_s(), 1),
                    gateway.books.balance,
                    (*dict.fromkeys(rule.name for rule in gateway.rules.rules), "default"),
                    self._keys[gateway.route],
                )
                for gateway, route in zip(self.router.gateways, self._setup.routes, strict=True)
            },
            store=replace(monitor.store_health, records_lost_ms=self._records_lost_ms()),
            spooled=self.spool.depth if self.spool is not None else None,
            not_ready=tuple(self._not_ready()),
            history=monitor.recorder.pages if monitor.recorder is not None else 0,
        )

    def _not_ready(self) -> list[str]:
        """Return why events cannot be accepted right now; empty if they can."""
        stopping = ["shutting down"] if self._stopping.is_set() else []
        # Without the names of routes: no authentication is needed here.
        spool, direct = self.spool, self._direct
        found = spool.not_ready() if spool is not None else direct.not_ready(named=False)
        sources = [why for one in self.sources for why in getattr(one, "not_ready", list)()]
        return list(dict.fromkeys([*stopping, *found, *sources]))

    @property
    def health_port(self) -> int | None:
        """The port of `health`, once it is open."""
        return self._listeners[0].port if self._setup.config.health else None

    @property
    def dashboard_url(self) -> str | None:
        """The address of the dashboard, once it is open."""
        return self._dashboard.url if self._dashboard else None

    @property
    def _all_sources(self) -> list[Source]:
        return [*([self.spool] if self.spool else []), *self.sources]

    def books(self) -> dict[str, Books]:
        """Return the counters of each route, and of unrouted events."""
        books = {gateway.route: gateway.books for gateway in self.router.gateways}
        if any(entry.match is not None for entry in self.router.routes):
            books[UNROUTED] = self.router.unrouted
        return books

    def counts(self) -> dict[str, int]:
        """Add up the counts of all routes."""
        total: Counter[str] = Counter()
        for books in self.books().values():
            total.update(books.counts())
        return dict(total)

    async def open(self) -> None:
        """Open routes, then sources; a store that is unavailable is opened later."""
        try:
            await self.router.open()
        except StoreUnavailable as error:
            _log.warning("oncebridge.store_is_away", extra={"error": str(error)})
        else:
            self._is_open = True
            with suppress(OncebridgeError):
                await self._look_for_pauses()
        for listener in self._listeners:
            await listener.open()
        if self._dashboard is not None:
            await self._dashboard.open()
        for source in self._all_sources:
            await source.open(self._host)
        self.monitor.open()
        monitor = self.monitor
        self._keepers = [
            asyncio.create_task(self._keep(every_s, work, with_store=with_store))
            for every_s, work, with_store in (
                (_LOOK_S, self._open_late, False),
                (_PURGE_S, self._purge, True),
                (_LOOK_S, self._look_for_pauses, True),
                (_MEASURE_S if monitor.is_charged else _LOOK_S, self._look_at_epoch, True),
                (_LOOK_S, self._look_for_gone, False),
                (_LOOK_S, self._tell, False),
                (_RECORD_S, monitor.record, True),
                (_MEASURE_S, self._measure, False),
                (_SHARE_S, monitor.share, True),
                (_COMPARE_S, monitor.compare, True),
            )
        ]

    async def run(self) -> None:
        """Run until all sources are at their end, or until `stop`."""
        stopping = asyncio.create_task(self._stopping.wait())
        # A spool ends when no source can add to it.
        runs = {asyncio.create_task(source.run()) for source in self.sources}
        behind = {asyncio.create_task(self.spool.run())} if self.spool else set()
        try:
            while runs:
                done, _ = await asyncio.wait(
                    {*runs, *behind, stopping}, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done - {stopping}:
                    task.result()
                runs -= done
                if stopping in done:
                    break
        finally:
            for source in self._all_sources:
                source.stop()
            stopping.cancel()
            self._runs = {*runs, *behind}

    def stop(self) -> None:
        """Accept no more events; `run` returns, and `close` finishes the work in progress."""
        self._stopping.set()

    async def close(self, grace: timedelta | None = None) -> bool:
        """Finish the work in progress, close everything, and return whether all was finished."""
        for source in self._all_sources:
            source.stop()
        drained = await self.router.drain(grace or self._setup.config.grace)
        # Unrouted events on their way to the dead letters are in no gateway.
        await self._direct.aclose(_LEAVE_S if drained else 0)
        runs = self._runs
        if runs:
            await asyncio.wait(runs, timeout=_LEAVE_S if drained else 0)
        for task in runs:
            task.cancel()
        failures = [*await asyncio.gather(*runs, return_exceptions=True)]
        await self._end_keepers(_LEAVE_S if drained else 0)
        for source in [*self.sources, *([self.spool] if self.spool else [])]:
            failures += await asyncio.gather(source.aclose(), return_exceptions=True)
        self._log_counts()
        self._is_closed = True
        await self._close_monitor()
        if self._dashboard is not None:
            await self._dashboard.aclose()
        await self.router.aclose()
        self._log_counts()  # for look-ups that ended late, in shadow mode
        for listener in self._listeners:
            await listener.aclose()
        for failure in failures:
            if isinstance(failure, Exception):
                raise failure
        return drained

    async def _end_keepers(self, within_s: float) -> None:
        """Wait for each periodic task, or other workers would wait for its claims."""
        self._closing.set()
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=within_s)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _close_monitor(self) -> None:
        try:
            # A service that has not run has no counts, and maybe no store.
            has_run = self._is_open and bool(self._keepers)
            async with asyncio.timeout(_LEAVE_S):
                await self.monitor.aclose(has_run=has_run)
        except Exception as error:  # noqa: BLE001 - the rest still has to be closed
            # The latest counts are only in the log now.
            _log.warning("oncebridge.not_told", extra={"error": type(error).__name__})

    # --- periodic tasks ----------------------------------------------------------------

    async def _keep(
        self, every_s: float, work: Callable[[], Awaitable[None]], *, with_store: bool
    ) -> None:
        """
        Run *work* periodically; a failure is logged, and does not stop it.

        Work *with_store* waits until the store is open.
        """
        while True:
            try:
                if self._is_open or not with_store:
                    await work()
            except Exception as error:  # noqa: BLE001 - the next run may succeed
                # Our own errors quote no payload; of others only the type is logged.
                is_ours = isinstance(error, OncebridgeError)
                message = str(error) if is_ours else type(error).__name__
                fields = {"what": work.__name__.strip("_"), "error": message}
                _log.warning("oncebridge.keeper_failed", extra=fields)
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self._closing.wait()
                return

    async def _open_late(self) -> None:
        """Open a store that was unavailable at the start; stop if it is unusable."""
        if self._is_open or self.gave_up:
            return
        try:
            await self.router.open()
        except StoreUnavailable:
            return
        except ConfigError as error:
            # During a failover a replica may answer that is about to become the primary.
            self._found_wrong += 1
            _log.warning("oncebridge.store_is_away", extra={"error": str(error)})
            if self._found_wrong * _LOOK_S >= _PUT_UP_S:
                self._give_up(str(error))
        else:
            self._is_open = True
            _log.warning("oncebridge.store_is_there")

    async def _purge(self) -> None:
        while await self.store.purge(_PURGE_MOST) >= _PURGE_MOST:  # noqa: ASYNC110 - takes turns
            await asyncio.sleep(0)

    async def _measure(self) -> None:
        await self.monitor.measure(is_open=self._is_open)

    async def _look_at_epoch(self) -> None:
        """Notice that the store has lost its records, and count deliveries from then on."""
        before_ms = self._epoch.lost_ms
        await self._epoch.look()
        for gateway in self.router.gateways:
            gateway.records_lost_ms = self._epoch.lost_ms
        lost_ms = self._records_lost_ms()
        if lost_ms and lost_ms != before_ms:
            what = (
                "events that were delivered before may be delivered once more; deliveries count "
                "as unprotected until the windows of their rules are over"
            )
            extra = {"noticed": format_instant(lost_ms), "what": what}
            _log.warning("oncebridge.store_lost_its_records", extra=extra)

    def _records_lost_ms(self) -> int:
        """Return when the store lost its records, if a window from before is still open."""
        lost_ms = self._epoch.lost_ms
        longest_ms = max(gateway.rules.longest_ms for gateway in self.router.gateways)
        return lost_ms if self._clock() - lost_ms < longest_ms else 0

    async def _look_for_pauses(self) -> None:
        gateways = self.router.gateways
        states = await pauses.paused(self.store, [gateway.route for gateway in gateways])
        for gateway, is_paused in zip(gateways, states, strict=True):
            if is_paused and not gateway.is_paused:
                gateway.pause()
                _log.warning("oncebridge.paused", extra={"route": gateway.route})
            elif gateway.is_paused and not is_paused:
                gateway.resume()
                _log.warning("oncebridge.resumed", extra={"route": gateway.route})

    async def _look_for_gone(self) -> None:
        """Stop if a sink is gone for good."""
        for route in self._setup.routes:
            if getattr(route.sink.opened, "is_gone", False) and not self.gave_up:
                self._give_up(f"{route.name}: the sink is closed and accepts no more events")

    def _give_up(self, why: str) -> None:
        self.gave_up = why
        _log.error("oncebridge.gave_up", extra={"what": why})
        self.stop()

    async def _tell(self) -> None:
        self._log_counts()
        for gateway in self.router.gateways:
            before, now = self._down.get(gateway.route, []), gateway.down()
            self._down[gateway.route] = now
            lost = [what for what in now if what not in before]
            found = [what for what in before if what not in now]
            for line, changed in (("oncebridge.down", lost), ("oncebridge.up_again", found)):
                if changed:
                    fields = {"route": gateway.route, "what": ", ".join(changed)}
                    _log.warning(line, extra=fields)

    def _log_counts(self) -> None:
        """Log a line for each route whose counts have changed, and for look-ups."""
        for route, books in self.books().items():
            now = Counter({name: n for name, n in books.counts().items() if name != "in_flight"})
            changed = self._changed(route, now)
            if changed and not self.has_status_line:
                _log.info("oncebridge.batch", extra={"route": route, **changed})
        if self._setup.verifier is not None:
            changed = self._changed("", Counter(self._setup.verifier.counts))
            if changed and not self.has_status_line:
                _log.info("oncebridge.verified", extra=changed)

    def _changed(self, whose: str, now: Counter[str]) -> dict[str, int]:
        """Return what has been counted since the last call."""
        before = self._counted.get(whose, Counter())
        self._counted[whose] = now
        return {name: n - before[name] for name, n in now.items() if n != before[name]}


def _log_decisions(decisions: Decisions) -> None:
    for outcome in decisions.outcomes:
        _log.debug(
            "oncebridge.decision",
            extra={
                "route": decisions.route,
                "verdict": outcome.verdict.value,
                "rule": outcome.rule,
                "key": outcome.key.hex(),
                "reason": outcome.reason,
            },
        )
