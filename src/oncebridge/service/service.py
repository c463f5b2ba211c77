"""
A gateway that runs by itself: sources, routes, a store, and somebody who looks after them.

`open` gets everything ready or says what is wrong. `run` lasts until every source has come
to its end, or until `stop`. `close` finishes what is under way within the grace there is: a
stop costs no duplicate. In between it purges what is past keeping, looks whether an operator
has paused a route, and writes a line about each second in which there was work.
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
from oncebridge.base.formatting import instant
from oncebridge.engine import pauses as control
from oncebridge.engine.counters import Books
from oncebridge.engine.gateway import Gateway
from oncebridge.engine.hooks import Decision, Hook, Tracer, TripHook
from oncebridge.engine.router import UNROUTED, Router, Way
from oncebridge.errors import ConfigError, OncebridgeError, StoreUnavailable
from oncebridge.observe.report import RouteState, State
from oncebridge.service.addresses import extension
from oncebridge.service.config import Setup
from oncebridge.service.epoch import Epoch
from oncebridge.service.monitor import Watch
from oncebridge.sources.api import Host, Inbox, Source
from oncebridge.sources.intake import Intake
from oncebridge.sources.spool import Spool
from oncebridge.stores.api import Store

if TYPE_CHECKING:
    from oncebridge.observe.health import Health

_log = logging.getLogger("oncebridge")
_PURGE_S, _LOOK_S, _LEAVE_S = 10.0, 1.0, 5.0
_PURGE_MOST = 5000
_RECORD_S, _MEASURE_S, _SHARE_S, _COMPARE_S = 2.0, 10.0, 1.0, 300.0
_PUT_UP_S = 30.0


def gateways(
    setup: Setup,
    *,
    hooks: Sequence[Hook] = (),
    trip_hooks: Sequence[TripHook] = (),
    tracer: Tracer | None = None,
    clock: Clock = system_clock,
) -> list[Gateway]:
    """Make a gateway for each route of *setup*; they share store and dead letters."""
    return [
        Gateway(
            store=setup.config.store.opened,
            sink=setup.sink_of(route, clock=clock),
            rules=route.rules,
            dead=setup.config.dead.opened,
            route=route.name,
            settings=route.settings,
            hooks=hooks,
            trip_hooks=trip_hooks,
            tracer=tracer,
            clock=clock,
        )
        for route in setup.routes
    ]


def make_router(
    setup: Setup,
    *,
    hooks: Sequence[Hook] = (),
    trip_hooks: Sequence[TripHook] = (),
    tracer: Tracer | None = None,
    clock: Clock = system_clock,
) -> Router:
    """Make the routes of *setup*."""
    made = gateways(setup, hooks=hooks, trip_hooks=trip_hooks, tracer=tracer, clock=clock)
    return Router(
        [Way(gateway, route.match) for gateway, route in zip(made, setup.routes, strict=True)],
        dead=setup.config.dead.opened,
        rules=setup.file_rules(),
        discard_unrouted=setup.config.unrouted == "discard",
        settings=setup.config.settings(),
        hooks=hooks,
        clock=clock,
    )


class Dashboard(Protocol):
    """The pages beside a service, from the entry point `oncebridge.dashboards`."""

    @property
    def url(self) -> str: ...

    async def open(self) -> None: ...

    async def aclose(self) -> None: ...


class Service:
    """Run what *setup* describes."""

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
        self.watch = Watch(
            config,
            self.store,
            look=self._state,
            books=self.books,
            rules={route.name: route.rules for route in setup.routes},
            clock=clock,
            dice=dice,
        )
        self._epoch = Epoch(self.store, clock=clock, dice=dice)
        debug = [_log_decision] if _log.isEnabledFor(logging.DEBUG) else []
        self.router = make_router(
            setup,
            hooks=[self.watch.decided, *hooks, *debug],
            trip_hooks=[self.watch.travelled],
            tracer=self.watch.tracer,
            clock=clock,
        )
        self._keys = {one.route: one.rules.key_fingerprint() for one in self.router.gateways}
        self.spool = Spool(config.spool, config.spool_max) if config.spool else None
        self._intake = Intake(self.router, batch=config.batch, is_open=lambda: self._is_open)
        inbox: Inbox = self.spool or self._intake
        self._is_open = False
        """Store, sinks and dead letters are there, and have checked themselves."""
        self._host = Host(
            self.router,
            inbox,
            self.store,
            config.batch,
            clock,
            dice,
            lambda: self._is_open,
            self.watch.context,
        )
        self._listeners = self._make_listeners() if config.health or config.metrics else []
        self._dashboard = self._make_dashboard() if config.dashboard else None
        self.sources: list[Source] = [place.opened for place in config.source]
        self.is_watched = False
        """Somebody looks at the counts already, on a status line."""
        self.gave_up = ""
        """Why it stopped by itself before its time."""
        self._stopping = asyncio.Event()
        self._closing = asyncio.Event()
        self._found_wrong = 0
        """How often a store that came late was found to be unfit."""
        self._counted: dict[str, Counter[str]] = {}
        self._down: dict[str, list[str]] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._runs: set[asyncio.Task[None]] = set()

    def _make_listeners(self) -> "list[Health]":
        from oncebridge.observe.health import listeners  # noqa: PLC0415 - most need no server here

        config = self._setup.config
        return listeners(config.health, config.metrics, self._not_ready, self.watch.report)

    def _make_dashboard(self) -> Dashboard:
        make = extension("oncebridge.dashboards", "pages", "dashboard")
        made: Dashboard = make(self._setup, self.store, self.router, self.watch)
        return made

    def _state(self, watch: Watch) -> State:
        """Return how this worker is right now."""
        return State(
            name=watch.name,
            host=platform.node(),
            pid=os.getpid(),
            version=__version__,
            started_ms=watch.started_ms,
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
                    round(gateway.away_s(), 1),
                    gateway.books.balance,
                    (*dict.fromkeys(rule.name for rule in gateway.rules.rules), "default"),
                    self._keys[gateway.route],
                )
                for gateway, route in zip(self.router.gateways, self._setup.routes, strict=True)
            },
            store=replace(watch.store_health, records_lost_ms=self._records_lost_ms()),
            spooled=self.spool.depth if self.spool is not None else None,
            not_ready=tuple(self._not_ready()),
            history=watch.recorder.pages if watch.recorder is not None else 0,
        )

    def _not_ready(self) -> list[str]:
        """Return what keeps events from being taken right now, as the HTTP source does."""
        stopping = ["shutting down"] if self._stopping.is_set() else []
        # Without the routes' names: anybody may ask.
        spool, intake = self.spool, self._intake
        found = spool.not_ready() if spool is not None else intake.not_ready(named=False)
        sources = [why for one in self.sources for why in getattr(one, "not_ready", list)()]
        return list(dict.fromkeys([*stopping, *found, *sources]))

    @property
    def health_port(self) -> int | None:
        """Where it is asked whether events can pass, once it is open."""
        return self._listeners[0].port if self._setup.config.health else None

    @property
    def dashboard_url(self) -> str | None:
        """Where people look, once it is open."""
        return self._dashboard.url if self._dashboard else None

    @property
    def _all_sources(self) -> list[Source]:
        return [*([self.spool] if self.spool else []), *self.sources]

    def books(self) -> dict[str, Books]:
        """Return the books of each route, and of what no route was for."""
        books = {gateway.route: gateway.books for gateway in self.router.gateways}
        if any(way.match is not None for way in self.router.ways):
            books[UNROUTED] = self.router.unrouted
        return books

    def counts(self) -> dict[str, int]:
        """Add up the counts of all routes."""
        total: Counter[str] = Counter()
        for books in self.books().values():
            total.update(books.counts())
        return dict(total)

    async def open(self) -> None:
        """Open routes, then sources; a store that is only away for now may come later."""
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
        self.watch.open()
        self._keepers = [
            asyncio.create_task(self._keep(every_s, work))
            for every_s, work in (
                (_LOOK_S, self._open_late),
                (_PURGE_S, self._purge),
                (_LOOK_S, self._look_for_pauses),
                (_MEASURE_S if self.watch.is_charged else _LOOK_S, self._look_at_epoch),
                (_LOOK_S, self._look_for_gone),
                (_LOOK_S, self._tell),
                (_RECORD_S, self._record),
                (_MEASURE_S, self._measure),
                (_SHARE_S, self._share),
                (_COMPARE_S, self._compare),
            )
        ]

    async def run(self) -> None:
        """Run until all sources are at their end, or until `stop`."""
        stopping = asyncio.create_task(self._stopping.wait())
        # A spool has no end of its own: it ends when nothing more can come into it.
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
        """Take nothing more; `run` returns, and `close` finishes what is under way."""
        self._stopping.set()

    async def close(self, grace: timedelta | None = None) -> bool:
        """Finish what is under way, close everything, and tell whether all was finished."""
        for source in self._all_sources:
            source.stop()
        drained = await self.router.drain(grace or self._setup.config.grace)
        # What no route is for is on its way to the dead letters, and no gateway knows of it.
        await self._intake.aclose(_LEAVE_S if drained else 0)
        runs = self._runs
        if runs:
            await asyncio.wait(runs, timeout=_LEAVE_S if drained else 0)
        for task in runs:
            task.cancel()
        failures = [*await asyncio.gather(*runs, return_exceptions=True)]
        await self._end_keepers(_LEAVE_S if drained else 0)
        for source in [*self.sources, *([self.spool] if self.spool else [])]:
            failures += await asyncio.gather(source.aclose(), return_exceptions=True)
        self._tell_now()
        self._is_closed = True
        await self._end_watch()
        if self._dashboard is not None:
            await self._dashboard.aclose()
        await self.router.aclose()
        self._tell_now()  # what was still looked up in shadow mode
        for listener in self._listeners:
            await listener.aclose()
        for failure in failures:
            if isinstance(failure, Exception):
                raise failure
        return drained

    async def _end_keepers(self, within_s: float) -> None:
        """Let each keeper end its round, or others would wait for what it holds in the store."""
        self._closing.set()
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=within_s)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _end_watch(self) -> None:
        try:
            # What never came to run has nothing to tell, and may have no store to tell it to.
            has_run = self._is_open and bool(self._keepers)
            async with asyncio.timeout(_LEAVE_S):
                await self.watch.aclose(has_run=has_run)
        except Exception as error:  # noqa: BLE001 - the rest has to be closed all the same
            # What it counted since it last told is only in the log now.
            _log.warning("oncebridge.not_told", extra={"error": type(error).__name__})

    # --- looking after it --------------------------------------------------------------

    async def _keep(self, every_s: float, work: Callable[[], Awaitable[None]]) -> None:
        """Do *work* again and again; a failure is told, and no reason to stop."""
        while True:
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - whatever it is, the next time may be better
                # Our own errors quote no payload; of others only the type is told.
                is_ours = isinstance(error, OncebridgeError)
                told = str(error) if is_ours else type(error).__name__
                fields = {"what": work.__name__.strip("_"), "error": told}
                _log.warning("oncebridge.keeper_failed", extra=fields)
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self._closing.wait()
                return

    async def _open_late(self) -> None:
        """Open a store that was away at the start; what is wrong with it ends the service."""
        if self._is_open or self.gave_up:
            return
        try:
            await self.router.open()
        except StoreUnavailable:
            return
        except ConfigError as error:
            # In the middle of a failover a replica may answer, and soon be the primary.
            self._found_wrong += 1
            _log.warning("oncebridge.store_is_away", extra={"error": str(error)})
            if self._found_wrong * _LOOK_S >= _PUT_UP_S:
                self._give_up(str(error))
        else:
            self._is_open = True
            _log.warning("oncebridge.store_is_there")

    async def _purge(self) -> None:
        if not self._is_open:
            return
        while await self.store.purge(_PURGE_MOST) >= _PURGE_MOST:  # noqa: ASYNC110 - takes turns
            await asyncio.sleep(0)

    async def _record(self) -> None:
        if self._is_open:
            await self.watch.record()

    async def _measure(self) -> None:
        await self.watch.measure(is_open=self._is_open)

    async def _share(self) -> None:
        if self._is_open:
            await self.watch.share()

    async def _look_at_epoch(self) -> None:
        """Notice that the store has lost its records, and count what is sent from then on."""
        if not self._is_open:
            return
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
            extra = {"noticed": instant(lost_ms), "what": what}
            _log.warning("oncebridge.store_lost_its_records", extra=extra)

    def _records_lost_ms(self) -> int:
        """Return when the store lost its records, if a window that began before still lasts."""
        lost_ms = self._epoch.lost_ms
        longest_ms = max(gateway.rules.longest_ms for gateway in self.router.gateways)
        return lost_ms if self._clock() - lost_ms < longest_ms else 0

    async def _compare(self) -> None:
        if self._is_open:
            await self.watch.compare()

    async def _look_for_pauses(self) -> None:
        if not self._is_open:
            return
        gateways = self.router.gateways
        states = await control.paused(self.store, [gateway.route for gateway in gateways])
        for gateway, is_paused in zip(gateways, states, strict=True):
            if is_paused and not gateway.is_paused:
                gateway.pause()
                _log.warning("oncebridge.paused", extra={"route": gateway.route})
            elif gateway.is_paused and not is_paused:
                gateway.resume()
                _log.warning("oncebridge.resumed", extra={"route": gateway.route})

    async def _look_for_gone(self) -> None:
        """Stop where there is no sink any more, and never will be."""
        for route in self._setup.routes:
            if getattr(route.sink.opened, "is_gone", False) and not self.gave_up:
                self._give_up(f"{route.name}: nobody takes events there any more")

    def _give_up(self, why: str) -> None:
        self.gave_up = why
        _log.error("oncebridge.gave_up", extra={"what": why})
        self.stop()

    async def _tell(self) -> None:
        self._tell_now()
        for gateway in self.router.gateways:
            before, now = self._down.get(gateway.route, []), gateway.down()
            self._down[gateway.route] = now
            lost = [what for what in now if what not in before]
            found = [what for what in before if what not in now]
            for line, changed in (("oncebridge.down", lost), ("oncebridge.up_again", found)):
                if changed:
                    fields = {"route": gateway.route, "what": ", ".join(changed)}
                    _log.warning(line, extra=fields)

    def _tell_now(self) -> None:
        """Write a line for each route in which something has changed, and for look-ups."""
        for route, books in self.books().items():
            now = Counter({name: n for name, n in books.counts().items() if name != "in_flight"})
            changed = self._changed(route, now)
            if changed and not self.is_watched:
                _log.info("oncebridge.batch", extra={"route": route, **changed})
        if self._setup.verifier is not None:
            changed = self._changed("", Counter(self._setup.verifier.counts))
            if changed and not self.is_watched:
                _log.info("oncebridge.verified", extra=changed)

    def _changed(self, whose: str, now: Counter[str]) -> dict[str, int]:
        """Return what has been counted since this was last asked."""
        before = self._counted.get(whose, Counter())
        self._counted[whose] = now
        return {name: n - before[name] for name, n in now.items() if n != before[name]}


def _log_decision(decision: Decision) -> None:
    outcome = decision.outcome
    _log.debug(
        "oncebridge.decision",
        extra={
            "route": decision.route,
            "verdict": outcome.verdict.value,
            "rule": outcome.rule,
            "key": outcome.key.hex(),
            "reason": outcome.reason,
        },
    )
