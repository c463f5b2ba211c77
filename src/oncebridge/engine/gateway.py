"""
The gateway: what callers see of it, and its life from `open` to `aclose`.

How it delivers an event once is in `oncebridge.engine.steps`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from oncebridge.base.clock import wait_until_set
from oncebridge.engine.batch import Arrival, Batch, Settled, now_s
from oncebridge.engine.hooks import Hook, Tracer, TripHook, start_traces
from oncebridge.engine.opening import share_of
from oncebridge.engine.ordering import enqueue
from oncebridge.engine.steps import Steps
from oncebridge.engine.verdict import Outcome
from oncebridge.errors import ConfigError
from oncebridge.events.event import Event
from oncebridge.sinks.api import Sink, replace_sink


class Gateway(Steps):
    """
    Deliver each event once.

    *store* remembers events, *sink* delivers them (a plain function will do), *rules* say
    which events are the same, *dead* keeps events that can never succeed. Without *dead*, such
    events are returned to the source for ever: nothing is lost, and nothing is given up.

    *route* separates several gateways in one store: the same event sent to two sinks has two
    records.
    """

    _idle: asyncio.Event | None = None
    """Set when no event is in progress; for `drain`."""

    @classmethod
    def from_config(
        cls,
        file: str | Path | None = None,
        *,
        sink: Sink | Callable[[Event], Any] | None = None,
        hooks: Sequence[Hook] = (),
        trip_hooks: Sequence[TripHook] = (),
        tracer: Tracer | None = None,
    ) -> Self:
        """
        Return the gateway that a configuration file describes, with *sink* instead of its own.

        Environment variables (`ONCEBRIDGE_…`) apply as they do for the command line. For a file
        with several routes, use `oncebridge.service.make_router`.
        """
        from oncebridge.service.config import load  # noqa: PLC0415 - most callers need none

        setup = load(file, with_source=False)
        if len(setup.routes) > 1:
            raise ConfigError("routes", "one gateway is one route; make a router of several")
        (route,) = setup.routes
        return cls(
            store=setup.config.store.opened,
            sink=setup.sink_of(route, sink),
            rules=route.rules,
            dead=setup.config.dead.opened,
            route=route.name,
            settings=route.settings,
            hooks=hooks,
            trip_hooks=trip_hooks,
            tracer=tracer,
        )

    def with_sink(self, sink: Sink | Callable[[Event], Any]) -> "Gateway":
        """
        Return the same gateway with another sink; do not use this one any more.

        If events are verified before they reach this gateway's sink, they are there, too.
        """
        return Gateway(
            store=self._store,
            sink=replace_sink(self._sink, sink),
            rules=self.rules.rules,
            dead=self._dead,
            route=self.route,
            settings=self.settings,
            hooks=self._hooks,
            trip_hooks=self._trip_hooks,
            tracer=self._tracer,
            clock=self._clock,
            dice=self._dice,
        )

    @property
    def verified(self) -> Mapping[str, int]:
        """The counts of `verify`, for all routes together; empty if nothing is verified."""
        counts: Mapping[str, int] = getattr(self._sink, "verified", {})
        return counts

    # --- from outside ------------------------------------------------------------------

    async def process(
        self,
        arrivals: Sequence[Arrival],
        *,
        within: timedelta | None = None,
        patience: timedelta = timedelta(0),
        settled: Settled | None = None,
        in_place: bool = False,
    ) -> list[Outcome]:
        """
        Process a batch of arrivals and return the outcome of each, in order.

        *within* is the time the caller has left: events that cannot be sent by then are
        returned to the source. *patience* is how long to wait in place for a key that another
        worker holds, for callers to whom returning it is costly. *settled* is called with the
        index and the outcome of each arrival as soon as it is known, so that one slow send
        does not delay the others. *in_place*: the source retries in place, and nothing queued
        after an event passes it until it is final.
        """
        batch = Batch(arrivals, within, patience, settled, in_place, self._clock(), self._leases)
        self.books.arrive(len(arrivals))
        try:
            batch.read(self.rules, self.settings)
            if self._tracer is not None:
                batch.traces = start_traces(self._tracer, self.route, batch.events)
            if self._entity_queues is not None:
                entities = [e.plan.entity for e in batch.entries.values() if e.plan.entity]
                batch.turns = enqueue(self._entity_queues, entities)
            if not self._sender.is_draining and (
                self._opening.is_done or await self._open_on_first_use(batch)
            ):
                await self._run(batch)
        finally:
            outcomes: list[Any] = batch.outcomes
            if None in outcomes:
                outcomes = self._settle_unfinished(batch)
            batch.entries.clear()  # fewer reference cycles for the garbage collector
            batch.leases.clear()
            if self._idle is not None and not self.books.in_flight:
                self._idle.set()
        return outcomes

    async def open(self, within_s: float | None = None) -> None:
        """Open and check the store, the sink and the dead letters, or raise."""
        await self._opening.finish(within_s)

    async def try_open(self, within_s: float | None = None) -> str:
        """Open, if that is due; return why the store is unavailable, or nothing if it is open."""
        return await self._opening.attempt(within_s)

    async def _open_on_first_use(self, batch: Batch) -> bool:
        """
        Open on first use; True if events can be processed.

        A store that is unavailable at the start is an outage like any other.
        """
        left_s = None if batch.ends is None else batch.ends - batch.now()
        if left_s is not None and self._fails_open:
            left_s = share_of(left_s)
        reason = await self.try_open(left_s)
        if reason and not self._fails_open:
            why = f"the store did not answer: {reason}"
            for row in range(len(batch.events)):
                self._hand_back_until_store_recovers(batch, row, why)
        return self._fails_open or not reason

    def pause(self) -> None:
        """Return every arrival to the source until `resume`; events in progress are finished."""
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    @property
    def is_ordered(self) -> bool:
        return self._entity_queues is not None

    @property
    def owed(self) -> int:
        """How many events are delivered but could not be recorded in the store yet."""
        return self._claims.backlog.deliveries

    def down(self) -> list[str]:
        """Return what was down when it was last tried."""
        found = {"the sink": self.sink_breaker, "the store": self.store_breaker}
        return [what for what, breaker in found.items() if breaker.is_open]

    def is_down(self) -> bool:
        """Return True if events cannot be delivered, also when it is time to try that again."""
        return self.sink_breaker.is_open or (not self._fails_open and self.store_breaker.is_open)

    def not_ready(self) -> list[str]:
        """
        Return the reasons why events are not processed right now.

        A sink or store that is down counts only until it is time to try it again: a caller
        that sends nothing while the gateway is not ready would prevent the try.
        """
        now = now_s()
        store_is_down = self.store_breaker.left_s(now) > 0 and not self._fails_open
        found = {
            "shutting down": self._sender.is_draining,
            "paused": self.is_paused,
            "the sink is down": self._sink_unavailable_s(now) > 0,
            "the store is down": store_is_down,
        }
        return [why for why, is_so in found.items() if is_so]

    async def drain(self, grace: timedelta = timedelta(seconds=25)) -> bool:
        """
        Accept nothing more, finish what was sent and return the rest to the source.

        Return True if everything was finished within *grace*. A graceful stop costs no duplicate.
        """
        self._sender.is_draining = True
        self._sender.wake_all()
        ends = now_s() + grace.total_seconds()
        self._idle = asyncio.Event()
        if self.books.in_flight and not await wait_until_set(self._idle, grace.total_seconds()):
            return False
        return await self.settle(timedelta(seconds=max(ends - now_s(), 0)))

    async def settle(self, within: timedelta) -> bool:
        """Wait for commits that could not be recorded yet; True if all of them are recorded."""
        await self._claims.backlog.settle(within.total_seconds())
        return not len(self._claims.backlog)

    async def aclose(self) -> None:
        """Close everything. Call `drain` first to finish events in progress."""
        self._sender.is_draining = True
        self._sender.timer.stop()
        await self._leases.aclose()
        await self._claims.backlog.aclose()
        if self._sender.rate_share is not None:
            await self._sender.rate_share.aclose()
        await self._sink.aclose()
        if self._dead is not None:
            await self._dead.aclose()
        await self._store.aclose()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.drain()
        await self.aclose()
