"""
The order of things: claim, deliver, commit.

This is the only file that knows it. One batch goes through these steps:

    plan      what is each event the same as (rules), and which repeat each other here
    admit     stay away while sink or store is down; keep entities in order where asked
    claim     take hold of the keys; what is known already ends here
    enter     newest-wins and quiet rules: take hold of the entity, compare
    deliver   send what we hold, while we hold it
    commit    after the sink's yes, and never before
    settle    one verdict per arrival, and the books balance

What must never happen, and where it is prevented:

* acknowledged while busy, failed or before the yes: `_settle` takes the acknowledgement
  from the verdict, which is given after its step, or from the sink's yes.
* committed before the yes: `_commit` is called by `_took`, by `_bury` (after the dead
  letters are safe) and by `_drop` (there is nothing to send), and by no other; `_owe` is for
  commits of these that could not be recorded. A sink in the store's own database gets the commits with the events
  (`_with_commit`) and writes both or neither.
* sent without a live claim: `_still_ours` stands before every send.
* an error swallowed into an acknowledgement: what is unforeseen raises out of
  `process`, and its arrivals count as failed.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from datetime import timedelta
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from msgspec import Struct

from oncebridge.base.clock import Clock, Dice, SystemDice, ms, system_clock
from oncebridge.base.durations import format_duration
from oncebridge.dead_letters.api import DeadLetters
from oncebridge.dead_letters.copies import count_copies
from oncebridge.engine.backlog import Debt
from oncebridge.engine.batch import (
    Arrival,
    Batch,
    Flight,
    Settled,
    commits_of,
    first_arrival,
    now_s,
    waves,
)
from oncebridge.engine.breaker import Blame, Breaker
from oncebridge.engine.claims import Ledger
from oncebridge.engine.counters import Books
from oncebridge.engine.entity_state import Registers
from oncebridge.engine.hooks import (
    Decision,
    Hook,
    RoundTrip,
    Tracer,
    TripHook,
    ended,
    follow,
    tell,
)
from oncebridge.engine.leases import Hold, Holds
from oncebridge.engine.rate_limit import RateLimit
from oncebridge.engine.sends import Answered, Sends, Slots
from oncebridge.engine.settings import DEFAULT_ROUTE, Settings
from oncebridge.engine.shared_rate_limit import RateShare
from oncebridge.engine.timed_store import TimedStore
from oncebridge.engine.turns import Turns
from oncebridge.engine.verdict import HANDED_BACK, Outcome, Verdict
from oncebridge.errors import (
    ConfigError,
    DeadLetterError,
    DeadLetterRefused,
    StoreError,
    StoreUnavailable,
)
from oncebridge.events.event import Event, Unreadable, read
from oncebridge.events.rules import Plan, Rule, RuleSet
from oncebridge.sinks.api import (
    Already,
    Closed,
    Joint,
    Lost,
    Never,
    No,
    Sink,
    Throttled,
    Unknown,
    Unwell,
    Yes,
    as_joint_sink,
    replace_sink,
)
from oncebridge.sinks.function import FunctionSink
from oncebridge.stores.api import (
    Busy,
    Claim,
    ClaimAnswer,
    Commit,
    Duplicate,
    Fate,
    Memory,
    Mismatch,
    NoAnswer,
    Release,
    Reply,
    Store,
    Want,
)

_DUPLICATE: Final = Verdict.DUPLICATE  # an enum's members are slow to find
_PAUSED_S = 5.0
_LOOK_AGAIN_S = 0.25  # most holds end well before their lease
_CROWDED_S = 2.0  # so long a sink is kept busy by what waits for its turn already
_LEAST_AWAY_S = 0.1  # it is not worth asking again sooner
_RENEW_S = 0.5  # a share of the rate has to be renewed while it is waited for
_DROPPED = {Verdict.STALE: Fate.STALE, Verdict.UNCHANGED: Fate.UNCHANGED}
_FATES = {**_DROPPED, Verdict.DEAD: Fate.DEAD}
_ANY_OTHER = b"any"  # a key that no event has
_NOT_RECORDED = "another event with the same key was delivered and is not recorded yet"
_UNKEYED = {"dead": Verdict.DEAD, "discard": Verdict.DISCARDED}


class Gateway:
    """
    Pass each event on once.

    *store* remembers, *sink* delivers (a plain function will do), *rules* say what is the
    same, *dead* keeps what can never succeed. Without *dead*, such events are handed
    back for ever: nothing is lost, and nothing gives up.

    *route* keeps several gateways apart in one store: the same event sent to two sinks
    has two records.
    """

    def __init__(
        self,
        *,
        store: Store,
        sink: Sink | Callable[[Event], Any],
        rules: Sequence[Rule] = (),
        dead: DeadLetters | None = None,
        route: str = DEFAULT_ROUTE,
        settings: Settings = Settings(),  # noqa: B008 - frozen
        hooks: Sequence[Hook] = (),
        trip_hooks: Sequence[TripHook] = (),
        tracer: Tracer | None = None,
        clock: Clock = system_clock,
        dice: Dice | None = None,
    ) -> None:
        settings.check()
        self.books = Books()
        self.route = route
        self._store = store
        self._sink: Sink = FunctionSink(sink) if callable(sink) else sink
        self.rules = RuleSet(
            rules,
            namespace=route,
            ordered=settings.order == "entity",
            about=getattr(self._sink, "by_entity", False),
            window=settings.window,
        )
        self._dead = dead
        self._settings = settings
        self._hooks = tuple(hooks)
        self._trip_hooks = tuple(trip_hooks)
        self._tracer = tracer
        self._clock = clock
        self._dice = dice or SystemDice()
        self._lease_ms = ms(settings.lease)
        self._max_hold_s = settings.max_hold.total_seconds()
        self._margin_s = settings.margin.total_seconds()
        self._sink_timeout_s = settings.sink_timeout.total_seconds()
        self._commit_budget_s = settings.commit_budget.total_seconds()
        claims = TimedStore(store, route, self._trip_hooks) if trip_hooks else store
        self._holds = Holds(claims, self.books, lease_ms=self._lease_ms)
        self._ledger = Ledger(claims, self.books, self._dice)
        self._registers = Registers(self._ledger, self._holds, self.books, self._dice, settings)
        self._joint = as_joint_sink(self._sink, store)
        self._slots = Slots(self._sink.concurrency, self._tell_send if trip_hooks else None)
        self._sends: dict[Sends, deque[list[Flight]]] = {}
        """What is sent, and what still waits to be."""
        self._is_shadow = settings.mode == "shadow"
        self._fails_open = self._is_shadow or settings.on_store_outage == "deliver"
        self.sink_breaker = Breaker(settings.breaker, self._dice)
        self.store_breaker = Breaker(settings.breaker, self._dice)
        self._blame = Blame(self.sink_breaker)
        self._rate_limit = RateLimit(settings.rate or inf)
        self._rate_share = self._shared_rate(settings.rate, store) if settings.rate else None
        self._turns = Turns() if settings.order == "entity" else None
        self._paused = False
        self.records_lost_ms = 0
        """When the store lost its records, by its clock (see `Epoch`); 0: it did not."""
        self._opened = False
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

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
        Make the gateway that a configuration file describes, with *sink* instead of its own.

        The environment (`ONCEBRIDGE_…`) counts as it does for the command line. A file with
        several routes is `oncebridge.service.service.make_router`'s.
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
        Make the same gateway for another sink; this one is not to be used any more.

        If events are verified before they reach this one's sink, so are the other's.
        """
        return Gateway(
            store=self._store,
            sink=replace_sink(self._sink, sink),
            rules=self.rules.rules,
            dead=self._dead,
            route=self.route,
            settings=self._settings,
            hooks=self._hooks,
            trip_hooks=self._trip_hooks,
            tracer=self._tracer,
            clock=self._clock,
            dice=self._dice,
        )

    @property
    def settings(self) -> Settings:
        return self._settings

    @property
    def verified(self) -> Mapping[str, int]:
        """What was counted of `verify`, by all routes together; empty where nothing is verified."""
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

        *within* is the time the caller has left: what cannot be sent by then is returned to
        the source. *patience* is how long to wait in place for a key that another worker
        holds, for callers to whom returning it is costly. *settled* is called with each
        outcome as soon as it is known, and its place in the batch: one slow send need not
        keep the others' sources waiting. *in_place* says that the source retries in place:
        nothing behind an event passes it until it is final.
        """
        batch = Batch(arrivals, within, patience, settled, in_place=in_place)
        self.books.arrive(len(arrivals))
        self._idle.clear()
        try:
            self._plan(batch)
            if not self._draining and await self._is_open(batch):
                await self._run(batch)
        finally:
            outcomes = self._settle_rest(batch)
            batch.flights.clear()  # a circle less for the garbage collector to find
            batch.unkeyed.clear()
            if not self.books.in_flight:
                self._idle.set()
        return outcomes

    async def open(self) -> None:
        """Open store, sink and dead letters, and let them check themselves."""
        if not self._opened:
            await self._sink.open()
            if self._dead is not None:
                await self._dead.open()
            await self._store.open()
            self._opened = True

    async def _is_open(self, batch: Batch) -> bool:
        """Open on first use; a store that is away at the start is an outage like any other."""
        if self._opened:
            return True
        reason = "it is down"
        if self.store_breaker.admits(now_s()):
            try:
                await self.open()
            except StoreUnavailable as error:
                reason = str(error)
                self.books.store_errors += 1
                self.store_breaker.failed(now_s(), at_once=True)
            except BaseException:
                self.store_breaker.abandoned()
                raise
            else:
                self.store_breaker.succeeded()
                return True
        if not self._fails_open:
            for flight in batch.flights:
                self._outage(flight, reason, [])
        return self._fails_open

    def pause(self) -> None:
        """Take nothing until `resume`: what arrives is handed back, what is under way ends."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    @property
    def is_paused(self) -> bool:
        return self._paused

    @property
    def is_ordered(self) -> bool:
        return self._turns is not None

    @property
    def owed(self) -> int:
        """How much is delivered, and could not be recorded in the store yet."""
        return self._ledger.backlog.deliveries

    def down(self) -> list[str]:
        """Name what was down when it was last tried."""
        found = {"the sink": self.sink_breaker, "the store": self.store_breaker}
        return [what for what, breaker in found.items() if breaker.is_open]

    def not_ready(self) -> list[str]:
        """
        Name what keeps events from passing right now.

        What is down counts until it is time to try it: somebody who sends nothing while we
        are not ready would else keep us from ever finding out.
        """
        now = now_s()
        store_is_down = self.store_breaker.left_s(now) > 0 and not self._fails_open
        found = {
            "shutting down": self._draining,
            "paused": self._paused,
            "the sink is down": self._sink_away_s(now) > 0,
            "the store is down": store_is_down,
        }
        return [why for why, is_so in found.items() if is_so]

    def away_s(self) -> float:
        """Return for how many seconds there is no point in bringing more events; 0: bring them."""
        if self._paused or self._draining:
            return _PAUSED_S
        now = now_s()
        store_s = 0.0 if self._fails_open else self.store_breaker.left_s(now)
        return max(self._sink_away_s(now), store_s, self.crowded_s())

    def crowded_s(self) -> float:
        """Return for how many seconds the rate limit keeps busy those that wait for their turn."""
        limit = self._rate_limit
        if not limit.is_active:
            return 0.0
        now = now_s()
        waiting = sum([len(flights) for queue in self._sends.values() for flights in queue])
        rate = limit.rate(now)
        busy_s = limit.pause_s(now) + (waiting / rate if rate else 0.0)
        return max(busy_s - _CROWDED_S, _LEAST_AWAY_S) if busy_s > _CROWDED_S else 0.0

    def _sink_away_s(self, now: float) -> float:
        # While only one event has failed, any other is welcome to show who is at fault.
        return self.sink_breaker.left_s(now, _ANY_OTHER)

    async def drain(self, grace: timedelta = timedelta(seconds=25)) -> bool:
        """
        Stop taking work, finish what was sent, give the rest back.

        Tells whether all was finished within *grace*. A graceful stop costs no duplicate.
        """
        self._draining = True
        self._wake_sends()
        ends = now_s() + grace.total_seconds()
        try:
            async with asyncio.timeout_at(ends):
                await self._idle.wait()
        except TimeoutError:
            return False
        return await self.settle(timedelta(seconds=max(ends - now_s(), 0)))

    async def settle(self, within: timedelta) -> bool:
        """Record what is delivered and could not be yet, and tell whether all of it is."""
        await self._ledger.backlog.settle(within.total_seconds())
        return not len(self._ledger.backlog)

    async def aclose(self) -> None:
        """Close what was opened. Call `drain` first to finish what is under way."""
        self._draining = True
        await self._holds.aclose()
        await self._ledger.backlog.aclose()
        if self._rate_share is not None:
            await self._rate_share.aclose()
        await self._sink.aclose()
        if self._dead is not None:
            await self._dead.aclose()
        await self._store.aclose()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.drain()
        await self.aclose()

    # --- plan --------------------------------------------------------------------------

    async def _run(self, batch: Batch) -> None:
        if discarded := [f for f in batch.unkeyed if self._is_discarded(f.plan)]:
            self._settle(discarded, Verdict.DISCARDED)
        if not batch.doomed:
            await self._let_pass([f for f in batch.flights if not f.settled])
            return
        # Beside the others: the dead letters may take their time.
        apart = {id(flight) for flight in batch.doomed}
        keyed = [f for f in batch.flights if not f.settled and id(f) not in apart]
        done = await asyncio.gather(
            self._let_die(batch.doomed), self._let_pass(keyed), return_exceptions=True
        )
        for error in done:
            if error is not None:
                raise error

    def _is_discarded(self, plan: Plan) -> bool:
        return plan.action == "discard" and (plan.refused or not self._is_shadow)

    async def _let_die(self, flights: list[Flight]) -> None:
        """Keep what can never be sent in the dead letters, once; no sink is needed for that."""
        for wave in waves(flights):
            await self._pass(wave)

    async def _let_pass(self, flights: list[Flight]) -> None:
        for wave in waves(flights):
            await self._admit(wave)

    def _plan(self, batch: Batch) -> None:
        """Turn arrivals into flights: read what comes as bytes, ask the rules."""
        limits, bare, apart = self._settings.limits, self._settings.bare, self.rules.apart
        now = self._clock()
        for index, arrival in enumerate(batch.arrivals):
            event: Event | Unreadable
            if isinstance(arrival, bytes):
                event = read(arrival, limits=limits, bare=bare, apart=apart)
            else:
                event = arrival
            plan = self.rules.plan_arrival(event, shadow=self._is_shadow)
            flight = Flight(batch, index, event, plan, plan.parts, plan.entity, now)
            if self._tracer is not None:
                flight.trace = follow(self._tracer, self.route, event)
            batch.flights.append(flight)
            if not flight.parts:
                batch.unkeyed.append(flight)
            elif flight.is_doomed:
                batch.doomed.append(flight)
        if self._turns is not None:
            batch.turns = self._turns.stand([f.entity for f in batch.flights if f.entity])

    # --- admit -------------------------------------------------------------------------

    async def _admit(self, wave: Sequence[Flight]) -> None:
        """Let events pass when it is their turn, and their sink is there."""
        turns = wave[0].batch.turns if wave else {}
        if not turns:
            await self._unless_shut(wave)
            return
        behind = [f for f in wave if f.entity in turns and turns[f.entity].ahead is not None]
        waits = {id(flight) for flight in behind}
        await self._unless_overtaking([flight for flight in wave if id(flight) not in waits])
        for entity in dict.fromkeys([flight.entity for flight in behind]):
            await turns[entity].come(behind[0].batch.ends)
        await self._unless_overtaking(behind)

    async def _unless_overtaking(self, wave: Sequence[Flight]) -> None:
        """Hand back what is behind an event of the same entity that was handed back."""
        late = [f for f in wave if f.entity and f.batch.turns[f.entity].failed]
        why, wait = "an earlier event of the same entity is not through", self._backoff(1)
        for flight in late:
            self._turn_away(flight, why, wait)
        await self._unless_shut([flight for flight in wave if not flight.settled])

    async def _unless_shut(self, wave: Sequence[Flight]) -> None:
        """Let a wave pass; while the sink is down, one event at most, to try it."""
        breaker = self.sink_breaker
        while wave and breaker.is_open and not self._paused:
            now = now_s()
            at = next((at for at, f in enumerate(wave) if not breaker.left_s(now, f.key)), None)
            if at is None or not breaker.admits(now, wave[at].key):
                break
            wave[at].tries_sink = True
            try:
                await self._pass(wave[at : at + 1])
            finally:
                # It may have been a duplicate, and then nothing is known about the sink.
                breaker.abandoned()
            wave = [*wave[:at], *wave[at + 1 :]]
        if not self._paused and not self.sink_breaker.is_open:
            await self._pass(wave)
            return
        why = "paused by an operator" if self._paused else "the sink is down"
        for flight in wave:
            wait_s = _PAUSED_S if self._paused else breaker.left_s(now_s(), flight.key)
            self._turn_away(flight, why, self._jittered(int(wait_s * 1000)))

    def _turn_away(self, flight: Flight, reason: str, wait_ms: int) -> None:
        """Hand back what was not even claimed, with its repeats."""
        every = [flight, *flight.repeats]
        self._settle(every, Verdict.FAILED, reason=reason, retry_after_ms=wait_ms)

    async def _pass(self, wave: Sequence[Flight]) -> None:
        """Take events that have nothing to do with each other through all steps."""
        bypassed = [flight for flight in wave if not flight.parts]
        for flight in bypassed:
            flight.on_yes = _UNKEYED.get(flight.plan.action, Verdict.BYPASSED)
        ready, waiting = await self._claim([flight for flight in wave if flight.parts])
        await self._enter_and_deliver(bypassed + ready)
        while waiting:
            await self._ledger.pause(_LOOK_AGAIN_S)
            ready, waiting = await self._claim(waiting)
            await self._enter_and_deliver(ready)
        await self._close_repeats(wave)

    async def _enter_and_deliver(self, flights: list[Flight]) -> None:
        """
        Send; what has to wait for its entity keeps nobody else waiting.

        A busy entity is waited for in place, since handing its event back would burn the
        source's receive counts.
        """
        entering = [flight for flight in flights if flight.entity and flight.claim is not None]
        if not entering:
            await self._deliver(flights)
            return
        ready = [flight for flight in flights if not flight.entity or flight.claim is None]
        patient_until = now_s() + self._settings.patience.total_seconds()
        sending: list[asyncio.Task[None]] = []
        try:
            while entering:
                entered, entering, pause_s = await self._enter(entering, patient_until)
                ready += entered
                if entering:
                    sending.append(asyncio.create_task(self._deliver(ready)))
                    ready = []
                    await self._ledger.pause(pause_s)
            await self._deliver(ready)
        except BaseException:
            for task in sending:
                task.cancel()
            raise
        finally:
            # All of them, also beside one that fails: none may run on behind our back.
            errors = await asyncio.gather(*sending, return_exceptions=True) if sending else ()
        for error in errors:
            if error is not None:
                raise error

    # --- claim -------------------------------------------------------------------------

    async def _claim(self, flights: list[Flight]) -> tuple[list[Flight], list[Flight]]:
        """Take hold of the events' keys; give those to be sent, and those to wait for."""
        ready: list[Flight] = []
        waiting: list[Flight] = []
        memories: list[Memory] = []
        while flights := self._not_owed(flights, ready):
            again: list[Flight] = []
            known: list[Flight] = []
            held: list[Hold] = []
            batch = flights[0].batch
            lease_ms = batch.lease_ms(self._lease_ms)
            wants = self._wants(flights, lease_ms)
            sent = batch.now()
            answers = await self._ask(wants)
            heard = batch.now()
            ends, gives_up, latest = sent + lease_ms / 1000, sent + self._max_hold_s, batch.latest()
            lost_ms = self.records_lost_ms
            for flight, want, answer in zip(flights, wants, answers, strict=True):
                match answer:
                    case Claim():
                        hold = Hold(answer, ends, gives_up, latest)
                        flight.take(answer, hold, heard, want.generation, lost_ms)
                        if flight.attempt > 1:
                            self.books.retried += 1
                        held.append(hold)
                        ready.append(flight)
                    case Duplicate():
                        flight.match(answer.key, first_arrival(answer.memo))
                        memories += self._other_tiers(flight, answer)
                        (ready if self._shadows(flight) else known).append(flight)
                    case Busy() if flight.batch.is_patient() and not self._draining:
                        waiting.append(flight)
                    case Busy():
                        self._stand_back(flight, answer, ready)
                    case Mismatch():
                        flight.clash(answer.key)
                        again.append(flight)
                    case NoAnswer():
                        self._outage(flight, answer.reason, ready)
            self._holds.add(held)
            self._settle(known, _DUPLICATE)
            await self._count_copies(known)
            flights = again
        await self._ledger.remember(memories)
        return await self._worth_sending(ready), waiting

    def _not_owed(self, flights: list[Flight], ready: list[Flight]) -> list[Flight]:
        """
        End copies of what was delivered and is not recorded yet; return the rest.

        Only this process knows of it. Other content under the same key waits until the store
        can tell the two apart.
        """
        backlog = self._ledger.backlog
        if not len(backlog):
            return flights
        now = now_s()
        rest: list[Flight] = []
        for flight in flights:
            part = flight.parts[-1]
            # What was delivered as a conflict stands under the key that it was sent with.
            found = backlog.delivered(flight.plan.sent_as, now)
            found = found or backlog.delivered(part.key, now)
            if found is None:
                rest.append(flight)
            elif found.hash and part.hash and found.hash != part.hash:
                if self._shadows(flight):
                    rest.append(flight)
                else:
                    self._wait_for_store(flight, _NOT_RECORDED)
            else:
                flight.match(part.key, found.first)
                if self._shadows(flight):
                    ready.append(flight)
                else:
                    self._settle([flight], _DUPLICATE)
        return rest

    def _shadows(self, flight: Flight) -> bool:
        """Return True if the event is forwarded whatever the store says."""
        return self._is_shadow and not flight.is_doomed

    async def _count_copies(self, flights: Sequence[Flight]) -> None:
        """Count what went to the dead letters unsent and has arrived again."""
        again = Counter([flight.key for flight in flights if flight.is_doomed])
        if again:
            keep_ms = ms(self._settings.window)
            await count_copies(self._store, self._dice, again, keep_ms=keep_ms)

    def _wants(self, flights: list[Flight], lease_ms: int) -> list[Want]:
        tokens = iter(self._dice.tokens(2 * len(flights)))
        explain = self._settings.explain
        return [
            Want(
                flight.parts,
                token,
                generation,
                lease_ms,
                flight.keep_ms,
                flight.first_memo() if explain else b"",
            )
            for flight, token, generation in zip(flights, tokens, tokens, strict=True)
        ]

    async def _ask(self, wants: list[Want]) -> Sequence[ClaimAnswer]:
        if self.store_breaker.is_open and not self.store_breaker.admits(now_s()):
            return [NoAnswer("it is down")] * len(wants)
        try:
            # Debts first: what was delivered is then known to other workers too.
            if self.store_breaker.failures and not await self._ledger.backlog.pay():
                self.store_breaker.failed(now_s())
                return [NoAnswer("what is owed to it could not be recorded")] * len(wants)
            answers = await self._ledger.claim(wants)
        except BaseException:
            self.store_breaker.abandoned()
            raise
        if all(type(answer) is NoAnswer for answer in answers):
            self.store_breaker.failed(now_s())
        else:
            self.store_breaker.succeeded()
        return answers

    def _other_tiers(self, flight: Flight, answer: Duplicate) -> list[Memory]:
        """Mark the further tiers of an event that its identifying key shows to be done."""
        if len(flight.parts) == 1 or answer.key != flight.parts[-1].key:
            return []
        return flight.memories(flight.parts[:-1], answer.fate, self._dice)

    def _stand_back(self, flight: Flight, answer: Busy, ready: list[Flight]) -> None:
        """Hand back what another worker holds; in shadow mode, forward it all the same."""
        flight.on_yes = Verdict.BUSY
        if self._shadows(flight):
            ready.append(flight)
        else:
            wait = self._jittered(answer.left_ms)
            self._settle([flight], Verdict.BUSY, retry_after_ms=wait)

    def _outage(self, flight: Flight, reason: str, ready: list[Flight]) -> None:
        """Hold back what the store could not be asked about, or send it unprotected."""
        if self._fails_open:
            flight.unprotected = True
            ready.append(flight)
        else:
            self._wait_for_store(flight, f"the store did not answer: {reason}")

    def _wait_for_store(self, flight: Flight, reason: str) -> None:
        left_s = self.store_breaker.left_s(now_s())
        wait = max(self._backoff(self.store_breaker.level), int(left_s * 1000))
        self._settle([flight], Verdict.FAILED, reason=reason, retry_after_ms=wait)

    async def _worth_sending(self, ready: list[Flight]) -> list[Flight]:
        """Take out what was tried too often, and conflicts that are not to be sent."""
        most = self._settings.max_attempts
        if doomed := [flight for flight in ready if flight.is_doomed]:
            await self._bury(doomed, "unkeyable")
            ready = [flight for flight in ready if not flight.settled]
        if self._is_shadow or not any(flight.attempt > most or flight.clashed for flight in ready):
            return ready
        claimed = [flight for flight in ready if flight.claim is not None]
        if self._dead is not None:
            await self._bury([f for f in claimed if f.attempt > most], "attempts")
        clashed = [f for f in claimed if f.clashed and not f.settled]
        await self._bury([f for f in clashed if f.on_conflict == "dead"], "conflict")
        await self._drop([(f, Verdict.CONFLICT) for f in clashed if f.on_conflict == "duplicate"])
        return [flight for flight in ready if not flight.settled]

    # --- enter -------------------------------------------------------------------------

    async def _enter(
        self, flights: list[Flight], patient_until: float
    ) -> tuple[list[Flight], list[Flight], float]:
        """
        Take hold of the entities whose newest state the rules want to know.

        Gives the flights to be sent, those to wait for, and how long.
        """
        batch = flights[0].batch
        entered = await self._registers.enter(flights, batch.lease_ms(self._lease_ms))
        await self._handle_unordered([f for f, v in entered.outdated if v is Verdict.CONFLICT])
        if self._is_shadow:
            for flight, verdict in entered.outdated:
                flight.on_yes = verdict
            for flight, _ in entered.busy:
                flight.on_yes = Verdict.BUSY
            return flights, [], 0
        await self._drop([(f, v) for f, v in entered.outdated if v is not Verdict.CONFLICT])
        pause = self._backoff(1)
        await self._hand_back(
            [
                _Back(flight, "the store did not answer for the entity", pause, unsent=True)
                for flight in entered.unanswered
            ]
        )
        waiting, pause_s = [flight for flight, _ in entered.busy], 0.0
        if waiting and now_s() < patient_until and not self._draining and not batch.is_over():
            left_s = min(left for _, left in entered.busy) / 1000
            pause_s = min(left_s, _LOOK_AGAIN_S)
        elif waiting:
            await self._hand_back(
                [
                    _Back(flight, "another worker holds the entity", left, unsent=True)
                    for flight, left in entered.busy
                ],
                verdict=Verdict.BUSY,
            )
            waiting = []
        busy = {id(flight) for flight in waiting}
        ready = [flight for flight in flights if not flight.settled and id(flight) not in busy]
        return ready, waiting, pause_s

    async def _handle_unordered(self, flights: list[Flight]) -> None:
        """Treat versions that cannot be compared as conflicts, and leave the entity as it is."""
        if not flights:
            return
        await self._ledger.release([r for f in flights for r in self._registers.give_back(f)])
        for flight in flights:
            flight.on_yes = Verdict.CONFLICT
        if not self._is_shadow:
            await self._bury([f for f in flights if f.on_conflict != "deliver"], "version")

    # --- deliver -----------------------------------------------------------------------

    async def _deliver(self, flights: list[Flight]) -> None:
        """Send in the sink's own batches, several at once, and deal with answers as they come."""
        if not flights:
            return
        size = self._sink.batch
        waiting = deque([flights[at : at + size] for at in range(0, len(flights), size)])
        sends = Sends(self._slots, flights[0].batch.loop)
        self._sends[sends] = waiting
        dealing: list[asyncio.Task[None]] = []
        try:
            while waiting or sends.are_under_way:
                await self._start(waiting, sends)
                if not waiting and not sends.are_under_way:
                    break
                answered = await sends.next()
                if not answered:
                    continue
                answers = self._sort(answered)
                if waiting or sends.are_under_way:
                    # What is still to be sent or answered need not wait for these commits.
                    dealing.append(asyncio.create_task(self._deal(answers)))
                else:
                    await self._deal(answers)
        except BaseException:
            self._sort(sends.answered())
            for task in dealing:
                task.cancel()
            raise
        finally:
            del self._sends[sends]
            sends.close()
            try:
                # All of them, also beside one that fails: none may run on behind our back.
                errors = await asyncio.gather(*dealing, return_exceptions=True) if dealing else ()
            finally:
                # Nobody waits for the answer any more where we were cancelled, but the sink
                # has the event.
                owing = [f for f in flights if f.forwarded and not f.settled]
                self._owe(owing, commits_of(owing, Fate.DELIVERED), flights[0].batch.now())
        for error in errors:
            if error is not None:
                raise error

    async def _start(self, waiting: deque[list[Flight]], sends: Sends) -> None:
        """Start what may be sent now: it is its time, there is a slot, and it is ours."""
        if waiting:
            self._rate_limit.note(waiting[0][0].batch.now())
        while waiting:
            if back := self._pointless(waiting):
                waiting.clear()
                await self._hand_back(back)
                sends.wish_no_more()
                return
            if self._rate_limit.is_active and (pause := self._turn_in(waiting)) > 0:
                longest_s = _RENEW_S if self._rate_share is not None else self._sink_timeout_s
                sends.wake_in(min(pause, longest_s))
                return
            if not sends.take_slot():
                return
            try:
                flights = await self._still_ours(waiting.popleft())
                if flights:
                    self._call(flights, sends)
                else:
                    sends.return_slot()
            except BaseException:
                sends.return_slot()
                raise

    def _turn_in(self, waiting: deque[list[Flight]]) -> float:
        """Return in how many seconds it is the turn of the first in *waiting*; give it a turn."""
        limit, first = self._rate_limit, waiting[0][0]
        now = first.batch.now()
        if self._rate_share is not None:
            is_short = limit.left_s(now) > 0
            limit.allow(self._rate_share.current(limit.reserved, is_short=is_short), now)
        if first.turn is None or limit.is_missed(first.turn, now):
            flights = waiting[0]
            if len(flights) > (most := limit.most(now)):
                waiting[0] = flights[:most]
                waiting.insert(1, flights[most:])
            turn = limit.reserve(len(waiting[0]), now)
            for flight in waiting[0]:
                flight.turn = turn
        assert first.turn is not None  # noqa: S101 - set just now
        return limit.wait_s(first.turn, now)

    def _shared_rate(self, rate: float, store: Store) -> RateShare:
        return RateShare(
            store,
            self.route,
            rate,
            clock=self._clock,
            dice=self._dice,
            changed=self._wake_sends,
            is_open=self._fails_open,
        )

    def _wake_sends(self) -> None:
        for sends in self._sends:
            sends.wake()

    def _pointless(self, waiting: deque[list[Flight]]) -> "list[_Back]":
        """Give all that waits to be handed back if it can't be sent in time, or nobody takes it."""
        first = waiting[0][0]
        back_after_ms = 0
        if self._draining:
            why = "this gateway is shutting down"
        elif self.sink_breaker.is_open and not first.tries_sink:
            # It went down after these were claimed.
            why, back_after_ms = "the sink is down", int(self.away_s() * 1000) + 1
        elif first.batch.ends is not None and self._comes_too_late(first):
            why = "no time left to send"
        else:
            return []
        return [
            _Back(flight, why, back_after_ms, unsent=True)
            for flights in waiting
            for flight in flights
        ]

    def _comes_too_late(self, flight: Flight) -> bool:
        """Return True if the rate limit lets the event pass only after its caller's time."""
        limit, now = self._rate_limit, flight.batch.now()
        if not limit.is_active:
            return False
        if not limit.rate(now):  # this worker has no share yet, and may get one any moment
            return self._send_time([flight]) <= 0
        wait_s = limit.left_s(now) if flight.turn is None else limit.wait_s(flight.turn, now)
        return wait_s >= self._send_time([flight])

    def _sort(self, answers: Sequence[Answered]) -> "_Answers":
        """Separate what was taken from what was refused for good and what has to be retried."""
        found = _Answers([], [], [], [], [])
        for flight, answer in answers:
            match answer:
                case Yes():
                    flight.forwarded = True
                    found.taken.append(flight)
                case Already() | Lost():
                    self.sink_breaker.succeeded()
                    found.beaten.append((flight, answer))
                case Never():
                    if not answer.unsent:
                        self.sink_breaker.succeeded()
                    flight.error = answer.reason
                    found.refused.append(flight)
                case _:
                    back = self._later(flight, answer)
                    if isinstance(answer, No | Throttled) or not self._is_too_old(flight):
                        found.back.append(back)
                    else:
                        found.aged.append(flight)
        self._rate_limit.delivered += len(found.taken)
        return found

    def _is_too_old(self, flight: Flight) -> bool:
        """Return True if a failed event is to be given up for its age, and record why."""
        if self._dead is None or flight.claim is None or flight.is_lost:
            return False
        most_ms = flight.batch.give_up_ms(self._settings.give_up_after, flight.keep_ms)
        if flight.age_ms() < most_ms:
            return False
        most = format_duration(timedelta(milliseconds=most_ms))
        flight.error = f"{flight.error}; not delivered within {most} of the first attempt"
        return True

    async def _deal(self, answers: "_Answers") -> None:
        if answers.taken:
            await self._took(answers.taken)
        if answers.refused:
            await self._bury(answers.refused, "rejected")
        if answers.aged:
            await self._bury(answers.aged, "too-old")
        if answers.back:
            await self._hand_back(answers.back)
        if answers.beaten:
            await self._yield(answers.beaten)

    async def _yield(self, beaten: "list[tuple[Flight, Already | Lost]]") -> None:
        """End what another worker was first with; nothing of it was written."""
        known = [flight for flight, answer in beaten if isinstance(answer, Already)]
        await self._ledger.release(
            [r for flight in known for r in self._registers.give_back(flight)]
        )
        self._settle(known, Verdict.DUPLICATE)
        lost = [flight for flight, answer in beaten if isinstance(answer, Lost)]
        why, wait = "another worker took over", self._backoff(1)
        await self._hand_back(
            [_Back(flight, why, wait, unsent=True) for flight in lost], verdict=Verdict.BUSY
        )
        # Some of its keys may still have been held here, and were released just now.
        self.books.lease_lost += sum([not flight.is_lost for flight in lost])

    async def _still_ours(self, flights: list[Flight]) -> list[Flight]:
        """Keep what may be sent now: there is time, and the claim outlasts the send."""
        send_time = self._send_time(flights)
        if send_time <= self._least_time(flights[0].batch):
            await self._hand_back_unsent(flights, "no time left to send")
            return []
        needed = flights[0].batch.now() + send_time + self._margin_s
        short = [
            hold
            for flight in flights
            for hold in (flight.hold, flight.register)
            if hold is not None and (hold.lost or hold.ends < needed)
        ]
        if not short:
            return flights
        try:
            await self._holds.extend(short)
        except StoreError:
            self.books.store_errors += 1
        # Anew: the store may have taken its time.
        needed = flights[0].batch.now() + send_time + self._margin_s
        ours = [flight for flight in flights if flight.is_held_until(needed)]
        lost = [flight for flight in flights if not flight.is_held_until(needed)]
        await self._hand_back_unsent(lost, "the claim ran out before the send")
        return ours

    def _call(self, flights: list[Flight], sends: Sends) -> None:
        """Call the sink; from now on the heartbeat ends with this attempt."""
        timeout = self._send_time(flights)
        ends = flights[0].batch.now() + timeout
        gives_up = ends + self._commit_budget_s + self._margin_s
        holds = [h for f in flights for h in (f.hold, f.register) if h is not None]
        for hold in holds:
            hold.give_up = gives_up
        flights[0].batch.has_sent = True
        passed = self.sink_breaker.passed
        for flight in flights:
            flight.is_sent = True
            flight.passed_before = passed
        if self._joint is not None:
            for hold in holds:
                # The transaction itself finds out whether it is still ours. Until it ends it has
                # the rows, so no heartbeat: the lease outlasts the send.
                hold.ending = True
                hold.give_up = flights[0].batch.now()
            call = self._joint.deliver_jointly(
                [self._with_commit(flight, ends) for flight in flights]
            )
            sends.start(flights, call, timeout_s=timeout, holds=())
            return
        sends.start(
            flights,
            self._sink.deliver([flight.delivery(self.route, ends) for flight in flights]),
            timeout_s=timeout,
            # One lost hold must not break off the sends of others.
            holds=holds if len(flights) == 1 else (),
        )

    def _with_commit(self, flight: Flight, ends: float) -> Joint:
        """Put into one step what is sent and what is written down about it."""
        commits = commits_of([flight], Fate.DELIVERED) if flight.claim is not None else ()
        raises = flight.register is not None and flight.on_yes not in _DROPPED
        releases = (self._registers.raised(flight),) if raises else ()
        return Joint(flight.delivery(self.route, ends), tuple(commits), releases)

    def _send_time(self, flights: list[Flight]) -> float:
        return flights[0].batch.send_time(self._sink_timeout_s, self._margin_s)

    def _least_time(self, batch: Batch) -> float:
        """
        Return how many seconds a send should have.

        One that is cut short by the end of the caller's time may be taken all the same, and
        come again. The first of a batch gets what there is: there will never be more.
        """
        if batch.ends is None or not batch.has_sent:
            return 0.0
        return min(1.25 * self._slots.slowest_s, self._sink_timeout_s)

    def _later(self, flight: Flight, answer: Unknown | No | Throttled | Unwell | Closed) -> "_Back":
        """Decide when to retry what the sink did not take, and whether the attempt counts."""
        asked = min(max(answer.retry_after_ms, 0), ms(self._settings.max_backoff))
        if isinstance(answer, Throttled):
            return self._throttled(flight, answer, asked)
        if isinstance(answer, No) and answer.too_early:
            return _Back(flight, answer.reason, max(self._backoff(1), asked), unsent=True)
        is_blamed = False
        match answer:
            case Unknown():
                self.books.ambiguous += 1
                is_blamed = True
            case Unwell() | Closed():
                self.books.unwell += isinstance(answer, Unwell)
                is_blamed = self._blame.is_of(flight.key, flight.passed_before)
        if not isinstance(answer, No):
            flight.error = answer.reason
            flight.maybe = flight.maybe or not isinstance(answer, Closed)
        # A lost claim was cancelled by us, and a refusal that is the event's own fault says
        # nothing about the sink.
        if not flight.is_lost and (isinstance(answer, Unknown) or not is_blamed):
            event = b"" if isinstance(answer, No) else flight.key
            self.sink_breaker.failed(now_s(), event=event)
        if is_blamed:
            wait = max(self._backoff(flight.attempt), asked)
            return _Back(flight, answer.reason, wait, unsent=False)
        # The sink's fault: the attempt does not count, and the pause grows with its refusals.
        left_s = self.sink_breaker.left_s(now_s(), flight.key)
        wait = max(self._backoff(self.sink_breaker.level), asked, int(left_s * 1000))
        return _Back(flight, answer.reason, wait, unsent=True)

    def _throttled(self, flight: Flight, answer: Throttled, asked_ms: int) -> "_Back":
        """Slow down, and try again when the sink takes events again."""
        now, limit = now_s(), self._rate_limit
        self.sink_breaker.answered()
        self.books.throttled += 1
        if answer.maybe:
            self.books.unwell += 1
            flight.maybe = True
            flight.error = answer.reason
        limit.throttled(flight.turn, asked_ms / 1000, now)
        wait = max(asked_ms, int(limit.left_s(now) * 1000)) + 1
        return _Back(flight, answer.reason, wait, unsent=True)

    def _backoff(self, times: int) -> int:
        """Draw a pause with full jitter: anything from none to 1 s, 2 s, 4 s … 5 min."""
        doubled = ms(self._settings.backoff) << min(max(times, 1) - 1, 20)
        return int(self._dice.fraction() * min(doubled, ms(self._settings.max_backoff))) + 1

    def _jittered(self, left_ms: int) -> int:
        return left_ms + int(250 * self._dice.fraction()) + 1

    # --- commit ------------------------------------------------------------------------

    async def _took(self, flights: list[Flight]) -> None:
        """Record the sink's yes. From here on the event is acknowledged, whatever happens."""
        self.sink_breaker.succeeded()
        self.books.forwarded += len(flights)
        for flight in [flight for flight in flights if flight.unprotected]:
            self.books.unprotected += 1
            if flight.claim is None:
                memories = flight.memories(flight.parts, Fate.DELIVERED, self._dice)
                self._ledger.backlog.owe(flight.debts(memories, flight.batch.now()))
        if self._joint is None:
            await self._raise_registers(flights)
            await self._commit(flights, Fate.DELIVERED)
        elif self._is_shadow:
            await self._leave_registers(flights)
        for verdict, why in dict.fromkeys([(flight.on_yes, flight.why) for flight in flights]):
            its = [f for f in flights if f.on_yes is verdict and f.why == why]
            self._settle(its, verdict, reason=why)

    def _owe(self, flights: Sequence[Flight], commits: Sequence[Commit], since: float) -> None:
        """Leave *commits* to the backlog that could not be waited for."""
        owed = {commit.key: commit for commit in commits}
        for flight in flights:
            its = [owed[part.key] for part in flight.parts if part.key in owed]
            self.books.acked_uncommitted += bool(its)
            self._ledger.backlog.owe(flight.debts(its, since))

    async def _raise_registers(self, flights: list[Flight]) -> None:
        """Write down the newest states; what shadow mode would have dropped is none."""
        if not any([flight.register for flight in flights]):  # noqa: C419 - quicker
            return
        await self._leave_registers(flights)
        raised = [flight for flight in flights if flight.register is not None]
        await self._registers.raise_all(raised, self._lease_ms)

    async def _leave_registers(self, flights: list[Flight]) -> None:
        """Give back the entities of what shadow mode would have dropped."""
        await self._ledger.release(
            [
                release
                for flight in flights
                if flight.on_yes in _DROPPED
                for release in self._registers.give_back(flight, flight.on_yes)
            ]
        )

    async def _commit(self, flights: Sequence[Flight], fate: Fate) -> None:
        """Mark keys done, within the commit budget or else behind the acknowledgement."""
        claimed = [flight for flight in flights if flight.claim is not None]
        if not claimed:
            return
        for flight in claimed:
            if flight.hold is not None:
                flight.hold.ending = True
        batch = claimed[0].batch
        since = batch.now()
        ends = since + self._commit_budget_s
        late, before = await self._ledger.commit(
            commits_of(claimed, fate), ends if batch.ends is None else min(ends, batch.ends)
        )
        if late:
            self._owe(claimed, late, since)
        if before:
            self._count_lost(claimed, {commit.key for commit in before})
        now = batch.now()
        self.books.late_commits += sum([f.hold is not None and now > f.hold.ends for f in claimed])

    def _count_lost(self, flights: Iterable[Flight], keys: Container[bytes]) -> None:
        """
        Count the events that another worker took over or had taken over, if the store ended *keys*.

        A store that repeats our own request says the same. So the lease has to be over, or the
        claim must have been a second one.
        """
        now = now_s()
        for flight in flights:
            hold = flight.hold
            if hold is None or not (flight.attempt > 1 or now > hold.ends):
                continue
            if any(key in keys for key in hold.keys):
                self._holds.lose(hold)

    async def _drop(self, outdated: list[tuple[Flight, Verdict]]) -> None:
        """Commit what is not to be sent: stale, unchanged, or a conflict to be dropped."""
        if not outdated:
            return
        await self._ledger.release(
            [r for flight, verdict in outdated for r in self._registers.give_back(flight, verdict)]
        )
        for verdict in dict.fromkeys(verdict for _, verdict in outdated):
            flights = [flight for flight, own in outdated if own is verdict]
            await self._commit(flights, _DROPPED.get(verdict, Fate.DROPPED))
            self._settle(flights, verdict)

    async def _bury(self, flights: list[Flight], reason: str) -> None:
        """Put events into the dead letters, and only then mark them done."""
        if not flights:
            return
        if self._dead is None:
            why, wait = "no dead letters are configured", ms(self._settings.max_backoff)
            await self._hand_back([_Back(flight, why, wait, unsent=False) for flight in flights])
            return
        now = self._clock()
        letters = [flight.letter(reason, self.route, now) for flight in flights]
        try:
            await self._dead.put(letters)
        except DeadLetterRefused as error:
            if len(flights) > 1:
                for flight in flights:  # the others are not to suffer for it
                    await self._bury([flight], reason)
                return
            why, wait = f"dead letters: {error}", ms(self._settings.max_backoff)
            await self._hand_back([_Back(flight, why, wait, unsent=False) for flight in flights])
            return
        except DeadLetterError as error:
            why, wait = f"dead letters: {error}", self._backoff(1)
            await self._hand_back([_Back(flight, why, wait, unsent=True) for flight in flights])
            return
        await self._ledger.release(
            [r for flight in flights for r in self._registers.give_back(flight)]
        )
        await self._commit(flights, Fate.DEAD)
        for flight, letter in zip(flights, letters, strict=True):
            self._settle(
                [flight],
                Verdict.CONFLICT if flight.on_yes is Verdict.CONFLICT else Verdict.DEAD,
                reason=f"{letter.reason}: {letter.message}" if letter.message else letter.reason,
            )

    # --- hand back and settle ----------------------------------------------------------

    async def _hand_back_unsent(self, flights: list[Flight], reason: str) -> None:
        await self._hand_back([_Back(flight, reason, 0, unsent=True) for flight in flights])

    async def _hand_back(self, back: "list[_Back]", *, verdict: Verdict = Verdict.FAILED) -> None:
        """Release what we hold and let the source bring it again."""
        if not back:
            return
        releases: list[Release] = []
        for one in back:
            releases += self._registers.give_back(one.flight)
            releases += one.releases()
            if one.flight.hold is not None:
                one.flight.hold.ending = True
        answers = await self._ledger.release(releases)
        fenced = {r.key for r, a in zip(releases, answers, strict=True) if a is Reply.FENCED}
        if fenced:
            self._count_lost([one.flight for one in back], fenced)
        for one in back:
            if one.flight.is_lost:
                self._settle(
                    [one.flight],
                    Verdict.BUSY,
                    reason="another worker took over",
                    retry_after_ms=self._lease_ms,
                )
            else:
                # A little later than the release, or the source would come too early.
                wait = self._jittered(one.wait_ms) if one.wait_ms else 0
                self._settle(
                    [one.flight],
                    verdict,
                    reason=one.reason,
                    retry_after_ms=wait,
                    blamed=not one.unsent,
                )

    async def _close_repeats(self, wave: Sequence[Flight]) -> None:
        """Give the repeats within the batch the fate of the one that went first."""
        leaders = [flight for flight in wave if flight.repeats]
        if not leaders:
            return
        memories: list[Memory] = []
        forward: list[Flight] = []
        apart: list[Flight] = []
        for leader in leaders:
            outcome = leader.batch.outcomes[leader.index]
            for repeat in leader.repeats:
                if outcome is None or not outcome.acknowledge:
                    self._settle_alike(repeat, outcome)
                    continue
                if leader.matched and leader.matched not in repeat.names():
                    # Known by a key that this one does not have: that says nothing about it.
                    apart.append(repeat)
                    continue
                fate = _FATES.get(outcome.verdict, Fate.DELIVERED)
                memories += repeat.memories(repeat.parts_beside(leader), fate, self._dice)
                repeat.known = outcome.first or leader.first
                if self._shadows(repeat):
                    is_busy = outcome.verdict is Verdict.BUSY
                    repeat.on_yes = Verdict.BUSY if is_busy else Verdict.DUPLICATE
                    forward.append(repeat)
                else:
                    self._settle([repeat], Verdict.DUPLICATE)
        await self._ledger.remember(memories)
        await self._count_copies([r for leader in leaders for r in leader.repeats if r.settled])
        await self._deliver(forward)
        if apart:
            for turn in waves(apart):
                await self._pass(turn)

    def _settle_alike(self, flight: Flight, outcome: Outcome | None) -> None:
        if outcome is None:
            return  # an error is on its way out of `process`
        self._settle(
            [flight],
            outcome.verdict,
            reason=outcome.reason,
            retry_after_ms=outcome.retry_after_ms,
            blamed=outcome.blamed,
        )

    def _settle(
        self,
        flights: Sequence[Flight],
        verdict: Verdict,
        *,
        reason: str = "",
        retry_after_ms: int = 0,
        blamed: bool = False,
    ) -> None:
        """Write the verdict of *flights* down; each arrival gets exactly one."""
        if not (flights := [flight for flight in flights if not flight.settled]):
            return
        self._holds.discard([flight.hold for flight in flights])
        self._holds.discard([flight.register for flight in flights if flight.register])
        batch = flights[0].batch
        is_final = verdict not in HANDED_BACK
        outcomes = [
            Outcome(
                verdict,
                is_final or flight.forwarded,
                flight.plan.rule.name,
                flight.parts[-1].key if flight.parts else b"",
                retry_after_ms,
                reason,
                flight.forwarded,
                flight.unprotected,
                flight.known,
                blamed,
                flight.sent_as,
            )
            for flight in flights
        ]
        for flight, outcome in zip(flights, outcomes, strict=True):
            flight.settled = True
            batch.outcomes[flight.index] = outcome
        self.books.settle(verdict, len(flights))
        self._tell(batch, flights, outcomes)

    def _tell(self, batch: Batch, flights: Sequence[Flight], outcomes: Sequence[Outcome]) -> None:
        """Tell whoever waits for it, and whoever wants to know."""
        if batch.turns:
            for flight, outcome in zip(flights, outcomes, strict=True):
                if flight.entity:
                    batch.turns[flight.entity].settled(acknowledged=outcome.acknowledge)
        if batch.settled is not None:
            for flight, outcome in zip(flights, outcomes, strict=True):
                batch.tell(flight.index, outcome)
        if self._tracer is not None:
            for flight, outcome in zip(flights, outcomes, strict=True):
                if flight.trace is not None:
                    ended(flight.trace, outcome)
        if self._hooks:
            took_s = batch.now() - batch.began
            decisions = [
                Decision(
                    self.route, flight.event, outcome, flight.arrived_ms, took_s, flight.attempt
                )
                for flight, outcome in zip(flights, outcomes, strict=True)
            ]
            tell(self._hooks, *decisions)

    def _tell_send(self, items: int, took_s: float, ok: bool) -> None:  # noqa: FBT001 - `Noted`
        tell(self._trip_hooks, RoundTrip(self.route, "sink", "deliver", items, took_s, ok))

    def _settle_rest(self, batch: Batch) -> list[Outcome]:
        """Hand back what has no verdict: there was an error, or we are shutting down."""
        settled = [outcome for outcome in batch.outcomes if outcome is not None]
        if len(settled) == len(batch.outcomes):
            return settled
        reason = "this gateway is shutting down" if self._draining else "an unforeseen error"
        left = [flight for flight in batch.flights if not flight.settled]
        # What was claimed and not sent is free for whoever comes next.
        unsent = [_Back(flight, reason, 0, unsent=True) for flight in left if not flight.is_sent]
        self._ledger.backlog.owe(Debt(release) for back in unsent for release in back.releases())
        self._settle(left, Verdict.FAILED, reason=reason)
        unplanned = batch.outcomes.count(None)
        self.books.settle(Verdict.FAILED, unplanned)
        failed = Outcome(Verdict.FAILED, acknowledge=False, reason=reason)
        for index, outcome in enumerate(batch.outcomes):
            if outcome is None:
                batch.tell(index, failed)
        return [failed if outcome is None else outcome for outcome in batch.outcomes]


class _Answers(Struct, frozen=True):
    """What the sink said about several events."""

    taken: list[Flight]
    refused: list[Flight]
    aged: list[Flight]
    back: "list[_Back]"
    beaten: list[tuple[Flight, Already | Lost]]


class _Back(Struct, frozen=True):
    """One event to hand back: why, after what pause, and whether the attempt counts."""

    flight: Flight
    reason: str
    wait_ms: int
    unsent: bool

    def releases(self) -> list[Release]:
        flight = self.flight
        if flight.hold is None or flight.hold.lost:
            return []
        counted = flight.attempt - 1 if self.unsent else flight.attempt
        memo = flight.last_memo(flight.error or self.reason, counted)
        return [
            Release(key, flight.hold.token, self.wait_ms, flight.keep_ms, memo, self.unsent)
            for key in flight.hold.keys
        ]
