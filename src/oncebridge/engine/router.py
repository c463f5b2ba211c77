"""
Several routes: each arrival goes to every route that matches it.

A route is a gateway of its own, with its own claims, so an event can be a duplicate on one route
and be delivered on another. An arrival is acknowledged when all of its routes acknowledge it. An
event that no route matches goes to the dead letters, unless a rule of the file or the setting
`unrouted` discards it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.base.clock import Clock, system_clock
from oncebridge.dead_letters.api import DeadLetter, DeadLetters
from oncebridge.engine.batch import Arrival
from oncebridge.engine.counters import Books
from oncebridge.engine.cpu_turns import TURN_S, CpuTurns
from oncebridge.engine.gateway import Gateway
from oncebridge.engine.hooks import Decisions, Hook, call_hooks
from oncebridge.engine.settings import Settings
from oncebridge.engine.verdict import Outcome, Verdict
from oncebridge.errors import DeadLetterError, OncebridgeError
from oncebridge.events.envelopes import unwrap
from oncebridge.events.event import Event, Unreadable, read
from oncebridge.events.pattern import Pattern
from oncebridge.events.rules import RuleSet

_log = logging.getLogger("oncebridge")
UNROUTED = "unrouted"
"""The route's name in reports where no route matched an event."""
_UNEXPECTED_ERROR = "an unexpected error"


class RouterAnswer(Struct, frozen=True, gc=False):
    """The outcome of one arrival on all its routes together."""

    acknowledge: bool
    verdict: Verdict | None
    """None if the arrival is only stored for later (a spool)."""
    retry_after_ms: int = 0
    reason: str = ""
    outcomes: tuple[tuple[str, Outcome], ...] = ()
    """By the names of the routes, in their order."""
    blamed: bool = False
    """It failed, and may itself be the cause; see `Outcome.blamed`."""


OnAnswer = Callable[[int, RouterAnswer], None]
"""Called with the index and the answer of each arrival of a batch."""


class RouteEntry(Struct, frozen=True):
    """One route: the gateway, and the pattern of its events."""

    gateway: Gateway
    match: Pattern | None = None


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
        return unwrap(raw, self.read)

    async def read_all(self, arrivals: Sequence[Arrival]) -> list[Arrival]:
        """Parse arrivals that are bytes, in turns; see `oncebridge.engine.cpu_turns`."""
        found: list[Arrival] = []
        while len(found) < len(arrivals):
            async with self.cpu_turns:
                while len(found) < len(arrivals) and self.cpu_turns.used_s < TURN_S:
                    found.append(self._read_if_bytes(arrivals[len(found)]))
        return found

    def _read_if_bytes(self, arrival: Arrival) -> Event | Unreadable:
        return self.read(arrival) if isinstance(arrival, bytes) else arrival

    async def process(
        self,
        arrivals: Sequence[Arrival],
        *,
        within: timedelta | None = None,
        patience: timedelta = timedelta(0),
        answered: OnAnswer | None = None,
        in_place: bool = False,
    ) -> list[RouterAnswer]:
        """
        Process a batch of arrivals on their routes, and return an answer for each, in order.

        *answered* is called with each answer as soon as it is known. *in_place* says that the
        source retries in place. Nothing is raised: an unexpected error is logged, and its
        arrivals are returned to the source.
        """
        collector = _AnswerCollector(len(arrivals), answered)
        batches = list(self._split_by_route(arrivals, collector))
        collector.expect(batches)
        try:
            done = await asyncio.gather(
                *[
                    entry.gateway.process(
                        [arrival for _, arrival in batch],
                        within=within,
                        patience=patience,
                        settled=collector.callback_for(
                            entry.gateway.route, [at for at, _ in batch]
                        ),
                        in_place=in_place,
                    )
                    for entry, batch in batches
                ],
                *([self._settle_unrouted(collector)] if collector.unrouted else []),
                return_exceptions=True,
            )
        finally:
            collector.close()
        for error in done:
            if isinstance(error, BaseException):
                # Its type only: the text of an exception may quote the event.
                _log.error("oncebridge.batch_failed", extra={"error": type(error).__name__})
                if not isinstance(error, Exception):
                    raise error
        return collector.answers()

    def _split_by_route(
        self, arrivals: Sequence[Arrival], collector: "_AnswerCollector"
    ) -> "Iterator[tuple[RouteEntry, _Batch]]":
        """Return the batch of each route; the first one gets what cannot be read."""
        if self._only_route is not None:
            yield self._only_route, list(enumerate(arrivals))
            return
        batches: list[_Batch] = [[] for _ in self.routes]
        for at, arrival in enumerate(arrivals):
            event = self._read_if_bytes(arrival)
            if isinstance(event, Unreadable):
                batches[0].append((at, event))
                continue
            is_routed = False
            for entry, batch in zip(self.routes, batches, strict=True):
                if entry.match is None or entry.match.matches(event.envelope):
                    batch.append((at, event))
                    is_routed = True
            if not is_routed:
                collector.unrouted.append((at, event))
        for entry, batch in zip(self.routes, batches, strict=True):
            if batch:
                yield entry, batch

    async def _settle_unrouted(self, collector: "_AnswerCollector") -> None:
        now_s, arrived_ms = asyncio.get_running_loop().time, self._clock()
        began_s = now_s()
        self.unrouted.arrive(len(collector.unrouted))

        def settle(arrivals: Sequence[tuple[int, Event]], outcomes: Sequence[Outcome]) -> None:
            if not arrivals:
                return
            self.unrouted.settle(outcomes[0].verdict, len(arrivals))
            for (at, _), outcome in zip(arrivals, outcomes, strict=True):
                wait, reason = outcome.retry_after_ms, outcome.reason
                answer = RouterAnswer(outcome.acknowledge, outcome.verdict, wait, reason)
                collector.answer(at, answer)
            if self._hooks:
                events, attempts = [event for _, event in arrivals], [1] * len(arrivals)
                took_s = now_s() - began_s
                decided = Decisions(UNROUTED, events, outcomes, arrived_ms, took_s, attempts)
                call_hooks(self._hooks, decided)

        kept: list[tuple[int, Event]] = []
        discarded: list[tuple[int, Event]] = []
        outcomes: list[Outcome] = []
        for at, event in collector.unrouted:
            plan = self._rules.discard_plan(event) if self._rules is not None else None
            if plan is None and not self._discard:
                kept.append((at, event))
                continue
            rule = plan.rule.name if plan is not None else ""
            discarded.append((at, event))
            outcomes.append(Outcome(Verdict.DISCARDED, acknowledge=True, rule=rule))
        settle(discarded, outcomes)
        buried = Outcome(Verdict.FAILED, acknowledge=False, reason=_UNEXPECTED_ERROR)
        try:
            if kept:
                await self._send_to_dead_letters([event for _, event in kept])
            reason = f"{UNROUTED}: no route matches it"
            buried = Outcome(Verdict.DEAD, acknowledge=True, reason=reason)
        except OncebridgeError as error:
            buried = replace(buried, retry_after_ms=5000, reason=f"dead letters: {error}")
        finally:
            settle(kept, [buried] * len(kept))

    async def _send_to_dead_letters(self, events: Sequence[Event]) -> None:
        if self._dead is None:
            raise DeadLetterError("none are configured")
        await self._dead.open()
        await self._dead.put(
            [
                DeadLetter(
                    raw=event.raw,
                    reason=UNROUTED,
                    message="no route matches it",
                    route="",
                    rule="",
                    key=b"",
                    attempts=0,
                    maybe_delivered=False,
                    buried_ms=self._clock(),
                )
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


_Batch = list[tuple[int, Arrival]]


class _AnswerCollector:
    """Collects the outcomes of one batch from its routes, and combines them to answers."""

    def __init__(self, count: int, answered: OnAnswer | None) -> None:
        self._answers: list[RouterAnswer | None] = [None] * count
        self._answered = answered
        self._has_several_routes = False
        self._order: dict[str, int] = {}
        self._waiting: list[int] = []
        self._outcomes: list[list[tuple[str, Outcome]]] = []
        self.unrouted: list[tuple[int, Event]] = []

    def expect(self, batches: Sequence[tuple[RouteEntry, _Batch]]) -> None:
        """Record how many routes each arrival takes."""
        self._has_several_routes = len(batches) > 1
        if self._has_several_routes:
            self._order = {entry.gateway.route: rank for rank, (entry, _) in enumerate(batches)}
            self._waiting = [0] * len(self._answers)
            self._outcomes = [[] for _ in self._answers]
            for _, batch in batches:
                for at, _ in batch:
                    self._waiting[at] += 1

    def callback_for(self, route: str, places: Sequence[int]) -> Callable[[int, Outcome], None]:
        """Return the callback that takes the outcomes of one route."""

        def settled(index: int, outcome: Outcome) -> None:
            at = places[index]
            if not self._has_several_routes:
                self.answer(at, _combine_outcomes(((route, outcome),)))
                return
            self._outcomes[at].append((route, outcome))
            self._waiting[at] -= 1
            if not self._waiting[at]:
                outcomes = sorted(self._outcomes[at], key=lambda pair: self._order[pair[0]])
                self.answer(at, _combine_outcomes(tuple(outcomes)))

        return settled

    def answer(self, at: int, answer: RouterAnswer) -> None:
        self._answers[at] = answer
        if self._answered is not None:
            self._answered(at, answer)

    def close(self) -> None:
        """Return arrivals that no route answered for to the source: they were cancelled."""
        for at, answer in enumerate(self._answers):
            if answer is None:
                failed = RouterAnswer(
                    acknowledge=False, verdict=Verdict.FAILED, reason=_UNEXPECTED_ERROR
                )
                self.answer(at, failed)

    def answers(self) -> list[RouterAnswer]:
        return [answer for answer in self._answers if answer is not None]


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
