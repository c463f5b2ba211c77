"""
Several routes: each arrival goes to every route that matches it.

A route is a gateway of its own, with its own claims, so an event can be a duplicate on one route
and be delivered on another. An arrival is acknowledged when all of its routes acknowledge it. An
event that no route matches goes to the dead letters, unless a rule of the file or the setting
`unrouted` discards it.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.base.clock import Clock, system_clock
from oncebridge.base.formatting import raised_at
from oncebridge.dead_letters.api import DeadLetter, DeadLetters
from oncebridge.engine.batch import Arrival
from oncebridge.engine.counters import Books
from oncebridge.engine.cpu_turns import CpuTurns
from oncebridge.engine.gateway import Gateway
from oncebridge.engine.hooks import Decisions, Hook, call_hooks
from oncebridge.engine.settings import Settings
from oncebridge.engine.verdict import Outcome, Verdict
from oncebridge.errors import DeadLetterError, OncebridgeError
from oncebridge.events.envelopes import unwrap
from oncebridge.events.event import Event, Unreadable, read, set_context
from oncebridge.events.rules import RuleSet
from oncebridge.events.trace_context import BytesWithContext

if TYPE_CHECKING:
    from oncebridge.events.pattern import Pattern

_log = logging.getLogger("oncebridge")
_NO_ROUTE = "no route matches it"
UNROUTED = "unrouted"
"""The route's name in reports where no route matched an event."""


class RouterAnswer(Struct, frozen=True, gc=False):
    """The outcome of one arrival on all its routes together."""

    acknowledge: bool
    verdict: Verdict | None
    """None if the arrival was not processed: it is stored for later (a spool), or was not started."""
    retry_after_ms: int = 0
    reason: str = ""
    outcomes: tuple[tuple[str, Outcome], ...] = ()
    """By the names of the routes, in their order."""
    blamed: bool = False
    """It failed, and may itself be the cause; see `Outcome.blamed`."""


OnAnswer = Callable[[int, RouterAnswer], None]
"""Called with the index and the answer of each arrival of a batch."""


UNEXPECTED_ERROR: Final = RouterAnswer(
    acknowledge=False, verdict=Verdict.FAILED, reason="an unexpected error"
)


class RouteEntry(Struct, frozen=True):
    """One route: the gateway, and the pattern of its events."""

    gateway: Gateway
    match: "Pattern | None" = None


class Router:
    """
    Process each arrival on all *routes* that match it.

    Of the events that no route matches, those that *rules* discard are discarded.
    """

    def __init__(
        self,
        routes: Sequence[RouteEntry],
        *,
        dead: DeadLetters | None = None,
        rules: RuleSet | None = None,
        discard_unrouted: bool = False,
        settings: Settings = Settings(),  # noqa: B008 - frozen
        hooks: Sequence[Hook] = (),
        clock: Clock = system_clock,
    ) -> None:
        self.routes = tuple(routes)
        self.unrouted = Books()
        """Counts of the events that no route matched."""
        self._dead = dead
        self._rules = rules
        self._discard = discard_unrouted
        self._settings = settings
        self._hooks = tuple(hooks)
        self._clock = clock
        self._apart = routes[0].gateway.rules.apart
        self._only_route = routes[0] if len(routes) == 1 and routes[0].match is None else None
        self.cpu_turns = CpuTurns()

    @property
    def gateways(self) -> list[Gateway]:
        return [entry.gateway for entry in self.routes]

    @property
    def is_ordered(self) -> bool:
        """Return whether a route keeps events of one entity in order."""
        return any(gateway.is_ordered for gateway in self.gateways)

    def unavailable_s(self) -> float:
        """Return for how many seconds no route accepts events; 0 if one does."""
        return min(gateway.unavailable_s() for gateway in self.gateways)

    def has_enough(self, in_hand: int) -> bool:
        """
        Return True if the route is down, and *in_hand* records are enough to try it again.

        Of several routes, these records might be for another one than the one that is down.
        """
        return in_hand > 0 and self._only_route is not None and self._only_route.gateway.is_down()

    def rate_limited_s(self) -> float:
        """Return for how many seconds all routes are busy with events that wait for a rate limit."""
        return min(gateway.rate_limited_s() for gateway in self.gateways)

    def read(self, raw: bytes, *, bare: bool | None = None) -> Event | Unreadable:
        """Return one event as the routes will read it; *bare* overrides the setting."""
        settings = self._settings
        is_bare = settings.bare if bare is None else bare
        return read(raw, limits=settings.limits, bare=is_bare, apart=self._apart)

    def unwrap(self, raw: bytes) -> tuple[Event | Unreadable, ...]:
        """Return the events in a message of a queue or stream: one, rarely several."""
        if type(raw) is not BytesWithContext:
            return unwrap(raw, self.read)
        events = unwrap(raw.raw, self.read)
        for event in events:
            set_context(event, raw.context)
        return events

    async def process(
        self,
        arrivals: Sequence[Arrival],
        *,
        within: timedelta | None = None,
        patience: timedelta = timedelta(0),
    ) -> list[RouterAnswer]:
        """Process a batch of arrivals, and return an answer for each, in order."""
        answers = [UNEXPECTED_ERROR] * len(arrivals)
        await self.process_each(arrivals, answers.__setitem__, within=within, patience=patience)
        return answers

    async def process_each(
        self,
        arrivals: Sequence[Arrival],
        answered: OnAnswer,
        *,
        within: timedelta | None = None,
        patience: timedelta = timedelta(0),
        in_place: bool = False,
    ) -> None:
        """
        Process a batch of arrivals on their routes, and call *answered* once for each.

        It is called as soon as the answer is known. *in_place* says that the source retries in
        place. Nothing is raised: an unexpected error is logged, and its arrivals are returned to
        the source, as are those of a batch that is cancelled.
        """
        options: Mapping[str, Any] = {"within": within, "patience": patience, "in_place": in_place}
        is_answered = bytearray(len(arrivals))

        def answer(at: int, answer: RouterAnswer) -> None:
            is_answered[at] = True
            answered(at, answer)

        try:
            if self._only_route is None:
                await self._process_by_route(arrivals, answer, options)
                return
            gateway = self._only_route.gateway
            name = gateway.route

            def settled(at: int, outcome: Outcome) -> None:
                answer(at, _combine_outcomes(((name, outcome),)))

            await gateway.process(arrivals, settled=settled, **options)
        except Exception as error:  # noqa: BLE001 - an unexpected error is an answer
            _log_unexpected(error)
        finally:
            for at, is_done in enumerate(is_answered):
                if not is_done:
                    answered(at, UNEXPECTED_ERROR)

    async def _process_by_route(
        self, arrivals: Sequence[Arrival], answer: OnAnswer, options: Mapping[str, Any]
    ) -> None:
        """Process each arrival on all routes that match it; an error on one affects no other."""
        events = [self.read(one) if isinstance(one, bytes) else one for one in arrivals]
        # By route; None until the route has settled it.
        found: list[dict[str, Any]] = [dict.fromkeys(self._routes_of(event)) for event in events]
        places: dict[str, list[int]] = {gateway.route: [] for gateway in self.gateways}
        for at, outcomes in enumerate(found):
            for route in outcomes:
                places[route].append(at)

        def settle(route: str, index: int, outcome: Outcome) -> None:
            at = places[route][index]
            found[at][route] = outcome
            if None not in found[at].values():
                answer(at, _combine_outcomes((*found[at].items(),)))

        work: list[Coroutine[Any, Any, object]] = [
            gateway.process([events[at] for at in its], settled=partial(settle, route), **options)
            for gateway in self.gateways
            if (its := places[route := gateway.route])
        ]
        unrouted = [
            (at, event)
            for at, event in enumerate(events)
            if not found[at] and isinstance(event, Event)
        ]
        if unrouted:
            work.append(self._settle_unrouted(unrouted, answer))
        for error in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(error, Exception):
                _log_unexpected(error)
            elif isinstance(error, BaseException):
                raise error

    def _routes_of(self, event: Event | Unreadable) -> list[str]:
        if isinstance(event, Unreadable):
            return [self.routes[0].gateway.route]  # once is enough
        return [
            entry.gateway.route
            for entry in self.routes
            if entry.match is None or entry.match.matches(event.envelope)
        ]

    async def _settle_unrouted(
        self, unrouted: Sequence[tuple[int, Event]], answer: OnAnswer
    ) -> None:
        now_s, arrived_ms = asyncio.get_running_loop().time, self._clock()
        began_s = now_s()
        self.unrouted.arrive(len(unrouted))

        def settle(settled: Sequence[tuple[int, Event, Outcome]]) -> None:
            if not settled:
                return
            _, events, outcomes = zip(*settled, strict=True)
            self.unrouted.settle(outcomes[0].verdict, len(settled))
            for at, _, outcome in settled:
                wait, reason = outcome.retry_after_ms, outcome.reason
                answer(at, RouterAnswer(outcome.acknowledge, outcome.verdict, wait, reason))
            took_s, attempts = now_s() - began_s, [1] * len(settled)
            decided = Decisions(UNROUTED, events, outcomes, arrived_ms, took_s, attempts)
            call_hooks(self._hooks, decided)

        kept: list[tuple[int, Event]] = []
        discarded: list[tuple[int, Event, Outcome]] = []
        for at, event in unrouted:
            plan = self._rules.discard_plan(event) if self._rules is not None else None
            if plan is None and not self._discard:
                kept.append((at, event))
            else:
                rule = plan.rule.name if plan is not None else ""
                outcome = Outcome(Verdict.DISCARDED, acknowledge=True, rule=rule)
                discarded.append((at, event, outcome))
        settle(discarded)
        outcome = Outcome(Verdict.FAILED, acknowledge=False, reason=UNEXPECTED_ERROR.reason)
        try:
            if kept:
                await self._send_to_dead_letters([event for _, event in kept])
            reason = f"{UNROUTED}: {_NO_ROUTE}"
            outcome = Outcome(Verdict.DEAD, acknowledge=True, reason=reason)
        except OncebridgeError as error:
            outcome = replace(outcome, retry_after_ms=5000, reason=f"dead letters: {error}")
        finally:
            settle([(at, event, outcome) for at, event in kept])

    async def _send_to_dead_letters(self, events: Sequence[Event]) -> None:
        if self._dead is None:
            raise DeadLetterError("none are configured")
        await self._dead.open()
        now = self._clock()
        await self._dead.put(
            [
                DeadLetter(event.raw, UNROUTED, _NO_ROUTE, "", "", b"", 0, False, now)
                for event in events
            ]
        )

    async def open(self) -> None:
        """Open every route."""
        for gateway in self.gateways:
            await gateway.open()

    def pause(self, routes: Sequence[str] = ()) -> None:
        """Pause the named routes (all, if none is named), and no others."""
        for gateway in self.gateways:
            if not routes or gateway.route in routes:
                gateway.pause()

    async def drain(self, grace: timedelta) -> bool:
        """Accept nothing more and finish what was sent; True if that was in time."""
        return all(await asyncio.gather(*[g.drain(grace) for g in self.gateways]))

    async def aclose(self) -> None:
        for gateway in self.gateways:
            with suppress(Exception):  # the next one has to be closed, too
                await gateway.aclose()


def _log_unexpected(error: Exception) -> None:
    # Its type and place only: the text of an exception may quote the event.
    extra = {"error": type(error).__name__, "at": raised_at(error)}
    _log.error("oncebridge.batch_failed", extra=extra)


def _combine_outcomes(outcomes: tuple[tuple[str, Outcome], ...]) -> RouterAnswer:
    """Combine the outcomes on several routes: a failure decides, then a delivery."""
    outcome = outcomes[0][1]
    for _, other in outcomes[1:]:
        if (other.acknowledge, not other.forwarded) < (outcome.acknowledge, not outcome.forwarded):
            outcome = other
    wait = max([other.retry_after_ms for _, other in outcomes if not other.acknowledge], default=0)
    blamed = any([other.blamed for _, other in outcomes])  # noqa: C419 - quicker
    return RouterAnswer(
        outcome.acknowledge, outcome.verdict, wait, outcome.reason, outcomes, blamed
    )
