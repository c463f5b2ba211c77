"""
Claim, deliver, commit: the only file that knows this order.

One batch goes through these steps, as columns (`Batch`); events that need more than their row
in the columns have an object each (`BatchEntry`), and go the same way:

    read      parse, and apply the rules: the keys of each event
    admit     claim nothing while the sink or the store is down; keep entities in order if asked
    claim     claim the keys; events that are known already end here
    entity    newest-wins and quiet rules: claim the entity, compare with its last state
    deliver   send the events whose claims are held, while they are held
    commit    after the sink's yes, and never before
    settle    one verdict per arrival; the counters add up

What must never happen, and where it is prevented:

* acknowledged while busy, failed or before the yes: `_settle` takes the acknowledgement
  from the verdict, which is known after its step, or from the sink's yes.
* committed before the yes: `_commit` is called by `_record_success`, by `_send_to_dead_letters` (after the dead
  letters are stored) and by `_drop` (there is nothing to send), and by no other; `_defer_commits`
  is for commits of these that could not be recorded in time. A sink in the store's own database
  gets the commits with the events (`_joint_delivery`) and writes both or neither.
* sent without a live claim: `_confirm_claims` runs before every send.
* an error swallowed into an acknowledgement: an unexpected error raises out of
  `process`, and its arrivals count as failed.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from datetime import timedelta
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.base.clock import Clock, Dice, SystemDice, ms, system_clock
from oncebridge.dead_letters.api import DeadLetters
from oncebridge.dead_letters.copies import count_copies
from oncebridge.engine.backlog import PendingWrite
from oncebridge.engine.batch import Arrival, Batch, BatchEntry, Settled, now_s
from oncebridge.engine.breaker import Breaker
from oncebridge.engine.claims import RetryingStore
from oncebridge.engine.counters import Books
from oncebridge.engine.decide import DROPPED, Action, Policy, after_claim, first_step
from oncebridge.engine.entity_state import EntityStates
from oncebridge.engine.hooks import Hook, RoundTrip, Tracer, TripHook, call_hooks, start_trace
from oncebridge.engine.leases import Lease, Leases
from oncebridge.engine.memos import first_arrival
from oncebridge.engine.ordering import EntityQueues, waves
from oncebridge.engine.outcomes import Outcomes
from oncebridge.engine.rate_limit import RateLimit
from oncebridge.engine.sends import Parcel, Sends, SinkCalls
from oncebridge.engine.settings import DEFAULT_ROUTE, Settings
from oncebridge.engine.shared_rate_limit import RateShare
from oncebridge.engine.sink_answers import Backoff, HandBack, SinkAnswers, SortedAnswers
from oncebridge.engine.timed_store import TimedStore
from oncebridge.engine.verdict import First, Outcome, Verdict
from oncebridge.errors import (
    ConfigError,
    DeadLetterError,
    DeadLetterRefused,
    StoreError,
    StoreUnavailable,
)
from oncebridge.events.event import Event
from oncebridge.events.rules import Rule, RuleSet
from oncebridge.sinks.api import (
    Already,
    Delivery,
    Joint,
    Lost,
    Sink,
    as_joint_sink,
    replace_sink,
)
from oncebridge.sinks.function import FunctionSink
from oncebridge.stores.api import (
    HELD,
    Busy,
    Claim,
    ClaimAnswer,
    ClaimAnswers,
    Commits,
    Duplicate,
    Fate,
    Memory,
    NoAnswer,
    Release,
    Reply,
    Store,
    Wants,
)

_PAUSED_S = 5.0
_BUSY_POLL_S = 0.25  # most claims end well before their lease
_ENOUGH_QUEUED_S = 2.0  # enough events are queued if they keep the sink busy for so long
_LEAST_PAUSE_S = 0.1  # asking again sooner is not worth it
_SHARE_POLL_S = 0.5  # a share of the rate has to be renewed while events wait for it
_OUTDATED: Final = frozenset({Verdict.STALE, Verdict.UNCHANGED})
_FATES: Final = {
    Verdict.STALE: Fate.STALE,
    Verdict.UNCHANGED: Fate.UNCHANGED,
    Verdict.DEAD: Fate.DEAD,
}
_ANY_OTHER_EVENT = b"any"  # a key that no event has
_NOT_RECORDED = "another event with the same key was delivered and is not recorded yet"


class Gateway:
    """
    Deliver each event once.

    *store* remembers events, *sink* delivers them (a plain function will do), *rules* say
    which events are the same, *dead* keeps events that can never succeed. Without *dead*, such
    events are returned to the source for ever: nothing is lost, and nothing is given up.

    *route* separates several gateways in one store: the same event sent to two sinks has two
    records.
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
        self._is_shadow = settings.mode == "shadow"
        self._fails_open = self._is_shadow or settings.on_store_outage == "deliver"
        self._policy = Policy(
            self._is_shadow,
            None if dead is None else settings.max_attempts,
            self._fails_open,
        )
        claims = TimedStore(store, route, self._trip_hooks) if trip_hooks else store
        self._leases = Leases(claims, self.books, lease_ms=self._lease_ms)
        self._claims = RetryingStore(claims, self.books, self._dice)
        self._entities = EntityStates(
            self._claims, self._leases, self.books, self._dice, settings, self._policy
        )
        self._settle = Outcomes(route, self.books, self._leases, self._hooks).settle
        self._joint = as_joint_sink(self._sink, store)
        self._calls = SinkCalls(self._sink.concurrency, self._report_send if trip_hooks else None)
        self._sends: dict[Sends, None] = {}
        """The sends under way."""
        self.sink_breaker = Breaker(settings.breaker, self._dice)
        self.store_breaker = Breaker(settings.breaker, self._dice)
        self._rate_limit = RateLimit(settings.rate or inf)
        self._rate_share = self._make_rate_share(settings.rate, store) if settings.rate else None
        self._backoff = Backoff(settings, self._dice)
        self._answers = SinkAnswers(
            settings,
            self.books,
            self.sink_breaker,
            self._rate_limit,
            self._backoff,
            may_give_up=dead is not None,
        )
        self._entity_queues = EntityQueues() if settings.order == "entity" else None
        self._paused = False
        self.records_lost_ms = 0
        """When the store lost its records, by its clock (see `Epoch`); 0 if it did not."""
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
        batch = Batch(
            arrivals,
            within,
            patience,
            settled,
            self._leases,
            in_place=in_place,
            arrived_ms=self._clock(),
        )
        self.books.arrive(len(arrivals))
        self._idle.clear()
        try:
            batch.read(self.rules, self._settings)
            if self._tracer is not None:
                tracer, route = self._tracer, self.route
                batch.traces = [start_trace(tracer, route, event) for event in batch.events]
            if self._entity_queues is not None:
                batch.turns = self._entity_queues.enqueue(
                    [entry.entity for entry in batch.entries.values() if entry.entity]
                )
            if not self._draining and await self._ensure_open(batch):
                await self._run(batch)
        finally:
            outcomes = self._settle_unfinished(batch)
            batch.entries.clear()  # fewer reference cycles for the garbage collector
            batch.leases.clear()
            if not self.books.in_flight:
                self._idle.set()
        return outcomes

    async def open(self) -> None:
        """Open and check the store, the sink and the dead letters."""
        if not self._opened:
            await self._sink.open()
            if self._dead is not None:
                await self._dead.open()
            await self._store.open()
            self._opened = True

    async def _ensure_open(self, batch: Batch) -> bool:
        """
        Open on first use; True if events can be processed.

        A store that is unavailable at the start is an outage like any other.
        """
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
            for row in range(len(batch.events)):
                why = f"the store did not answer: {reason}"
                self._hand_back_until_store_recovers(batch, row, why)
        return self._fails_open

    def pause(self) -> None:
        """Return every arrival to the source until `resume`; events in progress are finished."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    @property
    def is_paused(self) -> bool:
        return self._paused

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

    def not_ready(self) -> list[str]:
        """
        Return the reasons why events are not processed right now.

        A sink or store that is down counts only until it is time to try it again: a caller
        that sends nothing while the gateway is not ready would prevent the try.
        """
        now = now_s()
        store_is_down = self.store_breaker.left_s(now) > 0 and not self._fails_open
        found = {
            "shutting down": self._draining,
            "paused": self._paused,
            "the sink is down": self._sink_unavailable_s(now) > 0,
            "the store is down": store_is_down,
        }
        return [why for why, is_so in found.items() if is_so]

    def unavailable_s(self) -> float:
        """Return for how many seconds more events would only be returned; 0 if they are accepted."""
        if self._paused or self._draining:
            return _PAUSED_S
        now = now_s()
        store_s = 0.0 if self._fails_open else self.store_breaker.left_s(now)
        return max(self._sink_unavailable_s(now), store_s, self.rate_limited_s())

    def rate_limited_s(self) -> float:
        """Return for how many seconds the events that wait for the rate limit are enough."""
        limit = self._rate_limit
        if not limit.is_active:
            return 0.0
        now = now_s()
        waiting = sum(len(parcel.rows) for sends in self._sends for parcel in sends.waiting)
        rate = limit.rate(now)
        busy_s = limit.pause_s(now) + (waiting / rate if rate else 0.0)
        return max(busy_s - _ENOUGH_QUEUED_S, _LEAST_PAUSE_S) if busy_s > _ENOUGH_QUEUED_S else 0.0

    def _sink_unavailable_s(self, now: float) -> float:
        # While only one event has failed, any other may be tried, to find out which is at fault.
        return self.sink_breaker.left_s(now, _ANY_OTHER_EVENT)

    async def drain(self, grace: timedelta = timedelta(seconds=25)) -> bool:
        """
        Accept nothing more, finish what was sent and return the rest to the source.

        Return True if everything was finished within *grace*. A graceful stop costs no duplicate.
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
        """Wait for commits that could not be recorded yet; True if all of them are recorded."""
        await self._claims.backlog.settle(within.total_seconds())
        return not len(self._claims.backlog)

    async def aclose(self) -> None:
        """Close everything. Call `drain` first to finish events in progress."""
        self._draining = True
        await self._leases.aclose()
        await self._claims.backlog.aclose()
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

    def _make_rate_share(self, rate: float, store: Store) -> RateShare:
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

    # --- claim, deliver, commit ----------------------------------------------------------

    async def _run(self, batch: Batch) -> None:
        settled, unsendable = [], []
        for row, entry in batch.entries.items():
            if first_step(entry.plan, self._policy).action is Action.SETTLE:
                settled.append(row)
            elif entry.is_undeliverable:
                unsendable.append(row)
        self._settle(batch, settled, Verdict.DISCARDED)
        rows: Sequence[int] = range(len(batch.events))
        if settled or unsendable:
            left_out = {*settled, *unsendable}
            rows = [row for row in rows if row not in left_out]
        if not unsendable:
            await self._process(batch, rows)
            return
        # At the same time: the dead letters may be slow, and they need no sink.
        done = await asyncio.gather(
            self._process_undeliverable(batch, unsendable),
            self._process(batch, rows),
            return_exceptions=True,
        )
        _raise_first(done)

    async def _process_undeliverable(self, batch: Batch, rows: Sequence[int]) -> None:
        for wave in waves(batch, rows):
            await self._process_wave(batch, wave)

    async def _process(self, batch: Batch, rows: Sequence[int]) -> None:
        """Process events in waves; those of an entity wait for earlier ones, if order is kept."""
        for wave in waves(batch, rows):
            if not batch.turns:
                await self._process_if_sink_up(batch, wave)
                continue
            turns, entries = batch.turns, batch.entries
            behind = [
                row
                for row in wave
                if row in entries
                and entries[row].entity in turns
                and turns[entries[row].entity].ahead is not None
            ]
            waits = {*behind}
            await self._process_in_order(batch, [row for row in wave if row not in waits])
            for entity in dict.fromkeys([entries[row].entity for row in behind]):
                await turns[entity].wait_for_previous(batch.ends)
            await self._process_in_order(batch, behind)

    async def _process_in_order(self, batch: Batch, rows: Sequence[int]) -> None:
        """Process a wave; hand back events that are queued after one of their entity that failed."""
        late = [
            row
            for row in rows
            if (entry := batch.entries.get(row)) is not None
            and entry.entity
            and batch.turns[entry.entity].failed
        ]
        why = "an earlier event of the same entity is not delivered yet"
        wait = self._backoff.after_ms(1)
        for row in late:
            self._hand_back_unclaimed(batch, row, why, wait)
        await self._process_if_sink_up(
            batch, [row for row in rows if batch.outcomes[row] is None] if late else rows
        )

    async def _process_if_sink_up(self, batch: Batch, rows: Sequence[int]) -> None:
        """Process a wave; while the sink is down, hand it back, except one event that tries the sink."""
        breaker = self.sink_breaker
        while rows and breaker.is_open and not self._paused:
            now = now_s()
            probe = next((r for r in rows if not breaker.left_s(now, batch.key_of(r))), None)
            if probe is None or not breaker.admits(now, batch.key_of(probe)):
                break
            batch.entry(probe).tries_sink = True
            try:
                await self._process_wave(batch, [probe])
            finally:
                # If it was a duplicate, nothing is known about the sink.
                breaker.abandoned()
            rows = [row for row in rows if row != probe]
        if not self._paused and not breaker.is_open:
            if rows:
                await self._process_wave(batch, rows)
            return
        why = "paused by an operator" if self._paused else "the sink is down"
        for row in rows:
            wait_s = _PAUSED_S if self._paused else breaker.left_s(now_s(), batch.key_of(row))
            wait = self._backoff.jittered_ms(int(wait_s * 1000))
            self._hand_back_unclaimed(batch, row, why, wait)

    async def _process_wave(self, batch: Batch, rows: Sequence[int]) -> None:
        """Take events that share no key and no entity through all steps."""
        bypassed: list[int] = []
        if batch.entries:
            for row in rows:
                entry = batch.entries.get(row)
                if entry is not None and not entry.parts:
                    entry.success_verdict = first_step(entry.plan, self._policy).verdict
                    bypassed.append(row)
            if bypassed:
                unkeyed = {*bypassed}
                rows = [row for row in rows if row not in unkeyed]
        ready, waiting = await self._claim(batch, rows)
        await self._claim_entities_and_deliver(batch, bypassed + ready if bypassed else ready)
        while waiting:
            await self._claims.pause(_BUSY_POLL_S)
            ready, waiting = await self._claim(batch, waiting)
            await self._claim_entities_and_deliver(batch, ready)
        if batch.entries:
            await self._settle_duplicates_in_batch(batch, rows)

    # --- claim -------------------------------------------------------------------------

    async def _claim(self, batch: Batch, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """
        Claim the events' keys; return the rows to send, and those to wait for.

        One call of the store has one token and one generation, for all of its keys. A further
        call (a conflict, a key that is waited for) draws new ones: a release or commit of this
        one must never apply to the next.
        """
        found = _Claimed([], [], {}, [])
        while rows := self._settle_unrecorded_duplicates(batch, rows, found.ready):
            lease_ms = batch.lease_ms(self._lease_ms)
            token, generation = self._dice.tokens(2)
            wants = batch.wants(rows, token, generation, lease_ms, memos=self._settings.explain)
            sent = batch.now()
            answers = await self._ask_store(wants)
            lease = Lease(
                {},
                token,
                generation,
                sent + lease_ms / 1000,
                sent + self._max_hold_s,
                batch.latest(),
                answers.now_ms,
                batch.now(),
                batch.leases,
            )
            rows = self._sort_claims(batch, rows, answers, lease, found)
            if known := found.known:
                found.known = {}
                self._settle(batch, known, Verdict.DUPLICATE, firsts=known)
                await self._count_copies(batch, known)
        await self._claims.remember(found.memories)
        ready = found.ready
        if batch.entries:
            ready = await self._settle_unsendable(batch, ready)
        return ready, found.waiting

    def _sort_claims(
        self,
        batch: Batch,
        rows: Sequence[int],
        answers: ClaimAnswers,
        lease: Lease,
        found: "_Claimed",
    ) -> list[int]:
        """Put each event where its answer sends it; return those to claim under other keys."""
        again: list[int] = []
        held: list[int] = []
        entries, each = batch.entries, answers.each
        # If the store lost records, events may have been delivered before, and each is looked at.
        is_plain = not self.records_lost_ms
        if is_plain and not entries and each.count(HELD) == len(each):
            held = [*rows]
        else:
            for at, row in enumerate(rows):
                answer = each[at]
                if is_plain and row not in entries:
                    if answer == HELD:
                        held.append(row)
                        continue
                    if type(answer) is Duplicate and not self._is_shadow:
                        found.known[row] = first_arrival(answer.memo)
                        continue
                entry = batch.entry(row)
                if self._take_answer(entry, answers[at], lease, found):
                    again.append(row)
        if held:
            keys = batch.keys
            lease.keys = {keys[row]: row for row in held}
            leases = batch.leases
            for row in held:
                leases[row] = lease
            self._leases.add(lease)
            found.ready += held
        return again

    def _take_answer(
        self, entry: BatchEntry, answer: ClaimAnswer, lease: Lease, found: "_Claimed"
    ) -> bool:
        """Do what the decision says for one event; True if it is to be claimed under other keys."""
        batch, row = entry.batch, entry.row
        match answer:
            case Claim():
                entry.set_claim(answer, lease.generation)
                keys = {held.key: row for held in answer.held}
                own = replace(lease, keys=keys, attempt=entry.attempt)
                batch.leases[row] = own
                self._leases.add(own)
                self.books.retried += entry.attempt > 1
                if self.records_lost_ms:
                    lost_for_ms = answer.now_ms - self.records_lost_ms
                    entry.unprotected = lost_for_ms < entry.keep_ms
            case Duplicate():
                entry.mark_duplicate(answer.key, first_arrival(answer.memo))
                if len(entry.parts) > 1 and answer.key == entry.key:
                    others = entry.memories(entry.parts[:-1], answer.fate, self._dice)
                    found.memories.extend(others)
            case Busy() if batch.is_patient() and not self._draining:
                found.waiting.append(row)
                return False
        step = after_claim(entry.plan, answer, self._policy, is_conflict=entry.is_conflict)
        match step.action:
            case Action.CLAIM:
                assert step.plan is not None  # noqa: S101 - this step has one
                entry.mark_conflict(step.plan)
                return True
            case Action.SETTLE:
                found.known[row] = None
            case Action.RETURN if isinstance(answer, Busy):
                wait = self._backoff.jittered_ms(answer.left_ms)
                self._settle(batch, [row], Verdict.BUSY, retry_after_ms=wait)
            case Action.RETURN:
                assert isinstance(answer, NoAnswer)  # noqa: S101 - the only other reason
                self._hand_back_until_store_recovers(
                    batch, row, f"the store did not answer: {answer.reason}"
                )
            case _:
                entry.next_step = step
                entry.unprotected = entry.unprotected or step.is_unprotected
                if not isinstance(answer, Claim | NoAnswer):
                    entry.success_verdict = step.verdict
                found.ready.append(row)
        return False

    def _settle_unrecorded_duplicates(
        self, batch: Batch, rows: Sequence[int], ready: list[int]
    ) -> Sequence[int]:
        """
        Settle duplicates of events that are delivered but not recorded yet; return the rest.

        Only this process knows of them. Other content under the same key waits until the store
        can distinguish the two.
        """
        backlog = self._claims.backlog
        if not len(backlog):
            return rows
        now = now_s()
        rest: list[int] = []
        for row in rows:
            part = batch.parts_of(row)[-1]
            # An event that was delivered as a conflict is known by the key it was sent with.
            sent_as = batch.sent_as(row)
            found = (backlog.delivered(sent_as, now) if sent_as else None) or backlog.delivered(
                part.key, now
            )
            if found is None:
                rest.append(row)
            elif found.hash and part.hash and found.hash != part.hash:
                if self._forwards_anyway(batch, row):
                    rest.append(row)
                else:
                    self._hand_back_until_store_recovers(batch, row, _NOT_RECORDED)
            else:
                batch.entry(row).mark_duplicate(part.key, found.first)
                if self._forwards_anyway(batch, row):
                    ready.append(row)
                else:
                    self._settle(batch, [row], Verdict.DUPLICATE)
        return rest

    def _forwards_anyway(self, batch: Batch, row: int) -> bool:
        """Return True if the event is forwarded whatever the store says."""
        return self._is_shadow and not batch.entry(row).is_undeliverable

    async def _count_copies(self, batch: Batch, rows: Iterable[int]) -> None:
        """Count further arrivals of events that went to the dead letters unsent."""
        if not batch.entries:
            return
        entries = [batch.entries[row] for row in rows if row in batch.entries]
        again = Counter([entry.key for entry in entries if entry.is_undeliverable])
        if again:
            keep_ms = ms(self._settings.window)
            await count_copies(self._store, self._dice, again, keep_ms=keep_ms)

    async def _ask_store(self, wants: Wants) -> ClaimAnswers:
        breaker = self.store_breaker
        if breaker.is_open and not breaker.admits(now_s()):
            return ClaimAnswers(wants, [NoAnswer("it is down")] * len(wants), 0)
        try:
            # Pending writes first: other workers then know what was delivered.
            if breaker.failures and not await self._claims.backlog.flush():
                breaker.failed(now_s())
                silent = NoAnswer("earlier deliveries could not be recorded in it")
                return ClaimAnswers(wants, [silent] * len(wants), 0)
            answers = await self._claims.claim(wants)
        except BaseException:
            breaker.abandoned()
            raise
        if all(type(answer) is NoAnswer for answer in answers.each):
            breaker.failed(now_s())
        else:
            breaker.succeeded()
        return answers

    def _hand_back_until_store_recovers(self, batch: Batch, row: int, reason: str) -> None:
        left_s = self.store_breaker.left_s(now_s())
        wait = max(self._backoff.after_ms(self.store_breaker.level), int(left_s * 1000))
        self._settle(batch, [row], Verdict.FAILED, reason=reason, retry_after_ms=wait)

    async def _settle_unsendable(self, batch: Batch, ready: list[int]) -> list[int]:
        """Settle events that are not to be sent although they are claimed; return the rest."""
        steps: dict[str, list[BatchEntry]] = {}
        dropped: list[tuple[BatchEntry, Verdict]] = []
        for row in ready:
            entry = batch.entries.get(row)
            if entry is None or entry.next_step is None:
                continue
            step, entry.next_step = entry.next_step, None
            if step.action is Action.BURY:
                steps.setdefault(step.reason, []).append(entry)
            elif step.action is Action.DROP:
                dropped.append((entry, step.verdict))
        if not steps and not dropped:
            return ready
        for reason, entries in steps.items():
            await self._send_to_dead_letters(entries, reason)
        await self._drop(dropped)
        gone = {e.row for entries in steps.values() for e in entries} | {e.row for e, _ in dropped}
        return [row for row in ready if row not in gone]

    # --- entity ------------------------------------------------------------------------

    async def _claim_entities_and_deliver(self, batch: Batch, rows: list[int]) -> None:
        """
        Send; events whose entity is free do not wait for the others.

        A busy entity is waited for in place: returning its event would use up the source's
        receive counts.
        """
        entries = batch.entries
        entering = [entries[row] for row in rows if row in entries] if entries else []
        entering = [entry for entry in entering if entry.entity and entry.held]
        if not entering:
            await self._deliver(batch, rows)
            return
        waits = {entry.row for entry in entering}
        ready = [row for row in rows if row not in waits]
        patient_until = now_s() + self._settings.patience.total_seconds()
        sending: list[asyncio.Task[None]] = []
        try:
            while entering:
                claimed, entering, pause_s = await self._claim_entities(entering, patient_until)
                ready += claimed
                if entering:
                    sending.append(asyncio.create_task(self._deliver(batch, ready)))
                    ready = []
                    await self._claims.pause(pause_s)
            await self._deliver(batch, ready)
        except BaseException:
            for task in sending:
                task.cancel()
            raise
        finally:
            # All of them, even if one fails: none may keep running.
            errors = await asyncio.gather(*sending, return_exceptions=True) if sending else ()
        _raise_first(errors)

    async def _claim_entities(
        self, entries: list[BatchEntry], patient_until: float
    ) -> tuple[list[int], list[BatchEntry], float]:
        """
        Claim the entities of events under a newest-wins or quiet rule, and compare.

        Return the rows to send, the events to wait for, and how many seconds to wait.
        """
        batch = entries[0].batch
        found = await self._entities.claim(entries, batch.lease_ms(self._lease_ms))
        ready: list[int] = []
        incomparable: list[BatchEntry] = []
        dropped: list[tuple[BatchEntry, Verdict]] = []
        for entry, step in found.claimed:
            if step.action is Action.DROP:
                dropped.append((entry, step.verdict))
                continue
            if step.verdict is not Verdict.DELIVERED:
                entry.success_verdict = step.verdict
            if entry.why:
                incomparable.append(entry)
            if step.action is Action.SEND:
                ready.append(entry.row)
        if incomparable:
            # The entity keeps its state, and need not be held.
            await self._claims.release(
                [r for entry in incomparable for r in self._entities.release_of(entry)]
            )
        if self._is_shadow:
            for entry, _ in found.busy:
                entry.success_verdict = Verdict.BUSY
            return [entry.row for entry in entries], [], 0
        buried = [entry for entry, step in found.claimed if step.action is Action.BURY]
        await self._send_to_dead_letters(buried, "version")
        await self._drop(dropped)
        pause = self._backoff.after_ms(1)
        why = "the store did not answer for the entity"
        await self._hand_back(
            [HandBack(entry, why, pause, unsent=True) for entry in found.unanswered]
        )
        waiting, pause_s = [entry for entry, _ in found.busy], 0.0
        if waiting and now_s() < patient_until and not self._draining and not batch.is_over():
            left_s = min(left for _, left in found.busy) / 1000
            pause_s = min(left_s, _BUSY_POLL_S)
        elif waiting:
            await self._hand_back(
                [
                    HandBack(entry, "another worker holds the entity", left, unsent=True)
                    for entry, left in found.busy
                ],
                verdict=Verdict.BUSY,
            )
            waiting = []
        return ready, waiting, pause_s

    # --- deliver -----------------------------------------------------------------------

    async def _deliver(self, batch: Batch, rows: Sequence[int]) -> None:
        """Send in batches of the sink's size, several at once; apply answers as they arrive."""
        if not rows:
            return
        sends = Sends(self._calls, batch.loop, rows, self._sink.batch)
        self._sends[sends] = None
        applying: list[asyncio.Task[None]] = []
        try:
            while sends.has_pending:
                if sends.waiting:
                    await self._start_sends(batch, sends)
                    if not sends.has_pending:
                        break
                if not (parcels := await sends.next()):
                    continue
                answers = self._answers.sort(batch, parcels)
                if sends.has_pending:
                    # The other sends need not wait for these commits.
                    applying.append(asyncio.create_task(self._apply_answers(answers)))
                else:
                    await self._apply_answers(answers)
        except BaseException:
            self._answers.sort(batch, sends.take_answers())
            for task in applying:
                task.cancel()
            raise
        finally:
            del self._sends[sends]
            sends.close()
            try:
                # All of them, even if one fails: none may keep running.
                errors = await asyncio.gather(*applying, return_exceptions=True) if applying else ()
            finally:
                # If this task was cancelled, no caller waits for the answer, but the sink has
                # the event.
                outcomes = batch.outcomes
                owing = [row for row in rows if outcomes[row] is None and row in batch.forwarded]
                self._defer_commits(batch, batch.commits(owing, Fate.DELIVERED), batch.now())
        _raise_first(errors)

    async def _start_sends(self, batch: Batch, sends: Sends) -> None:
        """Start the sends that are due, as long as there is a slot and their claims are held."""
        limit = self._rate_limit
        limit.note(batch.now())
        while sends.waiting:
            if refusal := self._why_unsendable(batch, sends.waiting[0]):
                why, wait_ms = refusal
                rows = [row for parcel in sends.waiting for row in parcel.rows]
                sends.waiting.clear()
                await self._hand_back_rows(batch, rows, why, wait_ms)
                sends.stop_waiting_for_slot()
                return
            if limit.is_active and (pause := sends.reserve_turn(limit, self._rate_share)) > 0:
                longest_s = _SHARE_POLL_S if self._rate_share is not None else self._sink_timeout_s
                sends.wake_in(min(pause, longest_s))
                return
            if not sends.take_slot():
                return
            parcel = sends.waiting.popleft()
            try:
                await self._confirm_claims(batch, parcel)
                if parcel.rows:
                    self._call_sink(batch, parcel, sends)
                else:
                    self._calls.release()
            except BaseException:
                self._calls.release()
                raise

    def _why_unsendable(self, batch: Batch, parcel: Parcel) -> tuple[str, int] | None:
        """Return why events cannot be sent any more, and how long to wait; None if they can."""
        if self._draining:
            return "this gateway is shutting down", 0
        if self.sink_breaker.is_open:
            entry = batch.entries.get(parcel.rows[0])
            if entry is None or not entry.tries_sink:
                # The sink went down after these were claimed.
                return "the sink is down", int(self.unavailable_s() * 1000) + 1
        if batch.ends is not None and self._is_turn_after_deadline(batch, parcel):
            return "no time left to send", 0
        return None

    def _is_turn_after_deadline(self, batch: Batch, parcel: Parcel) -> bool:
        """Return True if the turn comes only after the caller's time is over."""
        limit, now = self._rate_limit, batch.now()
        if not limit.is_active:
            return False
        if not limit.rate(now):  # this worker has no share yet, but may get one at any moment
            return self._send_time(batch) <= 0
        wait_s = limit.left_s(now) if parcel.turn is None else limit.wait_s(parcel.turn, now)
        return wait_s >= self._send_time(batch)

    async def _confirm_claims(self, batch: Batch, parcel: Parcel) -> None:
        """Leave those in *parcel* that may be sent: there is time, and their claims outlast the send."""
        send_time = self._send_time(batch)
        if send_time <= self._least_send_time(batch):
            rows, parcel.rows = parcel.rows, ()
            await self._hand_back_rows(batch, rows, "no time left to send")
            return
        needed = batch.now() + send_time + self._margin_s
        leases = self._leases_of(batch, parcel.rows)
        short = [lease for lease in leases if lease.lost or lease.ends < needed]
        if not short:
            return
        try:
            await self._leases.extend(short)
        except StoreError:
            self.books.store_errors += 1
        # Again: the store may have been slow.
        needed = batch.now() + send_time + self._margin_s
        late = [row for row in parcel.rows if not batch.entry(row).is_held_until(needed)]
        if late:
            gone = {*late}
            parcel.rows = [row for row in parcel.rows if row not in gone]
            await self._hand_back_rows(batch, late, "the lease ended before the send")

    def _leases_of(self, batch: Batch, rows: Sequence[int]) -> list[Lease]:
        """Return the leases of *rows*, shared with no other."""
        entries, by_row = batch.entries, batch.leases
        plain = [row for row in rows if row not in entries] if entries else rows
        if plain and (shared := by_row[plain[0]]) is not None and len(shared.keys) > len(plain):
            self._leases.split(shared, [batch.keys[row] for row in plain])
        leases = [*dict.fromkeys(map(by_row.__getitem__, rows))]
        if entries:
            leases += [entries[row].entity_lease for row in rows if row in entries]
        return [lease for lease in leases if lease is not None]

    def _call_sink(self, batch: Batch, parcel: Parcel, sends: Sends) -> None:
        """Call the sink; from now on the leases are extended for this attempt only."""
        timeout = self._send_time(batch)
        now = batch.now()
        ends = now + timeout
        leases = self._leases_of(batch, parcel.rows)
        for lease in leases:
            lease.give_up = ends + self._commit_budget_s + self._margin_s
        batch.has_sent = True
        batch.sent.update(parcel.rows)
        parcel.passed_before = self.sink_breaker.passed
        deliveries = batch.deliveries(parcel.rows, self.route, ends)
        if self._joint is None:
            call = self._sink.deliver(deliveries)
            # One lost lease must not cancel the sends of others.
            own = leases if len(parcel.rows) == 1 else ()
            sends.start(parcel, call, timeout_s=timeout, leases=own)
            return
        for lease in leases:
            # The transaction itself checks the claims. It locks the rows until it ends, so
            # leases are not extended: they outlast the send.
            lease.ending = True
            lease.give_up = now
        joint_call = self._joint.deliver_jointly(
            [
                self._joint_delivery(batch, row, delivery)
                for row, delivery in zip(parcel.rows, deliveries, strict=True)
            ]
        )
        sends.start(parcel, joint_call, timeout_s=timeout)

    def _joint_delivery(self, batch: Batch, row: int, delivery: Delivery) -> Joint:
        """Return the delivery together with the commits that are written in the same transaction."""
        commits = tuple(batch.commits([row], Fate.DELIVERED))
        entry = batch.entries.get(row)
        if entry is None or entry.entity_lease is None or entry.success_verdict in _OUTDATED:
            return Joint(delivery, commits)
        return Joint(delivery, commits, (self._entities.delivered_release(entry),))

    def _send_time(self, batch: Batch) -> float:
        return batch.send_time(self._sink_timeout_s, self._margin_s)

    def _least_send_time(self, batch: Batch) -> float:
        """
        Return how many seconds a send needs at least.

        The sink may take an event whose send is cut short by the end of the caller's time, and
        then it is sent twice. The first send of a batch gets the time there is: a later batch
        would not have more.
        """
        if batch.ends is None or not batch.has_sent:
            return 0.0
        return min(1.25 * self._calls.slowest_s, self._sink_timeout_s)

    async def _apply_answers(self, answers: SortedAnswers) -> None:
        if answers.taken:
            await self._record_success(answers.batch, answers.taken)
        if answers.refused:
            await self._send_to_dead_letters(answers.refused, "rejected")
        if answers.too_old:
            await self._send_to_dead_letters(answers.too_old, "too-old")
        if answers.back:
            await self._hand_back(answers.back)
        if answers.lost_races:
            await self._settle_lost_races(answers.batch, answers.lost_races)

    async def _settle_lost_races(
        self, batch: Batch, lost_races: list[tuple[BatchEntry, Already | Lost]]
    ) -> None:
        """Settle events that another worker delivered first; nothing of them was written."""
        known = [entry for entry, answer in lost_races if isinstance(answer, Already)]
        await self._claims.release([r for entry in known for r in self._entities.release_of(entry)])
        self._settle(batch, [entry.row for entry in known], Verdict.DUPLICATE)
        lost = [entry for entry, answer in lost_races if isinstance(answer, Lost)]
        why, wait = "another worker took over", self._backoff.after_ms(1)
        await self._hand_back(
            [HandBack(entry, why, wait, unsent=True) for entry in lost], verdict=Verdict.BUSY
        )
        # Some of their keys may have been held here until now.
        self.books.lease_lost += sum([not entry.is_lost for entry in lost])

    # --- commit ------------------------------------------------------------------------

    async def _record_success(self, batch: Batch, rows: Sequence[int]) -> None:
        """Commit what the sink took. From here on the event is acknowledged, whatever happens."""
        self.sink_breaker.succeeded()
        self.books.forwarded += len(rows)
        special = (
            [entry for row in rows if (entry := batch.entries.get(row))] if batch.entries else []
        )
        for entry in special:
            if entry.unprotected:
                self.books.unprotected += 1
                if not entry.held:
                    memories = entry.memories(entry.parts, Fate.DELIVERED, self._dice)
                    self._claims.backlog.add(entry.pending_writes(memories, batch.now()))
        if self._joint is None:
            if special:
                await self._record_entity_states(special)
            await self._commit(batch, rows, Fate.DELIVERED)
        elif self._is_shadow:
            await self._release_entities(special)
        for verdict, why in dict.fromkeys([(e.success_verdict, e.why) for e in special]):
            its = [e.row for e in special if e.success_verdict is verdict and e.why == why]
            self._settle(batch, its, verdict, reason=why)
        if len(special) < len(rows):
            self._settle(batch, rows, Verdict.DELIVERED)

    async def _record_entity_states(self, entries: list[BatchEntry]) -> None:
        """Record the newest states; events that shadow mode would have dropped have none."""
        if any(entry.entity_lease for entry in entries):
            await self._release_entities(entries)
            delivered = [entry for entry in entries if entry.entity_lease is not None]
            await self._entities.record_delivered(delivered, self._lease_ms)

    async def _release_entities(self, entries: list[BatchEntry]) -> None:
        """Release the entities of events that shadow mode would have dropped."""
        await self._claims.release(
            [
                release
                for entry in entries
                if entry.success_verdict in _OUTDATED
                for release in self._entities.release_of(entry, entry.success_verdict)
            ]
        )

    async def _commit(self, batch: Batch, rows: Sequence[int], fate: Fate) -> None:
        """Mark keys as done, within the commit budget or else after the acknowledgement."""
        commits = batch.commits(rows, fate)
        if not commits.keys:
            return
        leases = [*filter(None, dict.fromkeys(map(batch.leases.__getitem__, rows)))]
        for lease in leases:
            lease.ending = True
        since = batch.now()
        ends = since + self._commit_budget_s
        late, before = await self._claims.commit(
            commits, ends if batch.ends is None else min(ends, batch.ends)
        )
        if late is not None:
            self._defer_commits(batch, late, since)
        if before:
            self._count_lost_leases(leases, before)
        now = batch.now()
        for lease in leases:
            if now > lease.ends:
                self.books.late_commits += len({*lease.keys.values()})

    def _defer_commits(self, batch: Batch, commits: Commits, since: float) -> None:
        """Add commits that were not recorded in time to the backlog."""
        if not commits.keys:
            return
        owed = {commit.key: commit for commit in commits}
        rows = {
            row for lease in batch.leases if lease for key, row in lease.keys.items() if key in owed
        }
        for row in sorted(rows):
            entry = batch.entry(row)
            its = [owed[part.key] for part in entry.parts if part.key in owed]
            self.books.acked_uncommitted += bool(its)
            self._claims.backlog.add(entry.pending_writes(its, since))

    def _count_lost_leases(self, leases: Iterable[Lease], keys: Container[bytes]) -> None:
        """
        Count events that another worker took over, if the store refused *keys*.

        A store also refuses a request of ours that it applied before. So the lease has to be over,
        or the claim must have been a second attempt.
        """
        now = now_s()
        for lease in leases:
            for key, row in [*lease.keys.items()]:
                if key in keys and (now > lease.ends or lease.attempt > 1):
                    self._leases.mark_lost(lease, row)

    async def _drop(self, outdated: Sequence[tuple[BatchEntry, Verdict]]) -> None:
        """Commit events that are not sent: stale, unchanged, or conflicts that the rule drops."""
        if not outdated:
            return
        batch = outdated[0][0].batch
        await self._claims.release(
            [r for entry, verdict in outdated for r in self._entities.release_of(entry, verdict)]
        )
        for verdict in dict.fromkeys(verdict for _, verdict in outdated):
            rows = [entry.row for entry, own in outdated if own is verdict]
            await self._commit(batch, rows, DROPPED[verdict])
            self._settle(batch, rows, verdict)

    async def _send_to_dead_letters(self, entries: Sequence[BatchEntry], reason: str) -> None:
        """Store events in the dead letters, and only then mark them as done."""
        if not entries:
            return
        batch = entries[0].batch
        if self._dead is None:
            why = "no dead letters are configured"
            wait = self._backoff.longest_ms
            await self._hand_back([HandBack(entry, why, wait, unsent=False) for entry in entries])
            return
        now = self._clock()
        letters = [entry.letter(reason, self.route, now) for entry in entries]
        try:
            await self._dead.put(letters)
        except DeadLetterRefused as error:
            if len(entries) > 1:
                for entry in entries:  # one at a time: the others may be accepted
                    await self._send_to_dead_letters([entry], reason)
                return
            why, wait = f"dead letters: {error}", self._backoff.longest_ms
            await self._hand_back([HandBack(entry, why, wait, unsent=False) for entry in entries])
            return
        except DeadLetterError as error:
            why, wait = f"dead letters: {error}", self._backoff.after_ms(1)
            await self._hand_back([HandBack(entry, why, wait, unsent=True) for entry in entries])
            return
        await self._claims.release(
            [r for entry in entries for r in self._entities.release_of(entry)]
        )
        await self._commit(batch, [entry.row for entry in entries], Fate.DEAD)
        for entry, letter in zip(entries, letters, strict=True):
            self._settle(
                batch,
                [entry.row],
                Verdict.CONFLICT if entry.success_verdict is Verdict.CONFLICT else Verdict.DEAD,
                reason=f"{letter.reason}: {letter.message}" if letter.message else letter.reason,
            )

    # --- hand back and settle ----------------------------------------------------------

    def _hand_back_unclaimed(self, batch: Batch, row: int, reason: str, wait_ms: int) -> None:
        """Return an event that was not claimed to the source, with its duplicates in the batch."""
        entry = batch.entries.get(row)
        rows = [row, *entry.duplicates] if entry is not None else [row]
        self._settle(batch, rows, Verdict.FAILED, reason=reason, retry_after_ms=wait_ms)

    async def _hand_back_rows(
        self, batch: Batch, rows: Iterable[int], reason: str, wait_ms: int = 0
    ) -> None:
        """Return claimed events that were not sent to the source."""
        await self._hand_back(
            [HandBack(batch.entry(row), reason, wait_ms, unsent=True) for row in rows]
        )

    async def _hand_back(
        self, back: Sequence[HandBack], *, verdict: Verdict = Verdict.FAILED
    ) -> None:
        """Release the claims and return the events to the source, to be retried."""
        if not back:
            return
        batch = back[0].entry.batch
        releases: list[Release] = []
        for one in back:
            releases += self._entities.release_of(one.entry)
            releases += one.releases()
            if one.entry.lease is not None:
                one.entry.lease.ending = True
        answers = await self._claims.release(releases)
        fenced = {r.key for r, a in zip(releases, answers, strict=True) if a is Reply.FENCED}
        if fenced:
            leases = [one.entry.lease for one in back]
            self._count_lost_leases([lease for lease in leases if lease], fenced)
        for one in back:
            row = [one.entry.row]
            if one.entry.is_lost:
                why, wait = "another worker took over", self._lease_ms
                self._settle(batch, row, Verdict.BUSY, reason=why, retry_after_ms=wait)
            else:
                # A little after the release, or the retry would find it busy.
                wait = self._backoff.jittered_ms(one.wait_ms) if one.wait_ms else 0
                self._settle(
                    batch,
                    row,
                    verdict,
                    reason=one.reason,
                    retry_after_ms=wait,
                    blamed=not one.unsent,
                )

    async def _settle_duplicates_in_batch(self, batch: Batch, rows: Sequence[int]) -> None:
        """Settle the duplicates within the batch like the event that went first."""
        entries = batch.entries
        leaders = [e for row in rows if (e := entries.get(row)) is not None and e.duplicates]
        if not leaders:
            return
        memories: list[Memory] = []
        forward: list[int] = []
        apart: list[int] = []
        for leader in leaders:
            outcome = batch.outcomes[leader.row]
            for row in leader.duplicates:
                duplicate = batch.entry(row)
                if outcome is None:
                    continue  # `process` is about to raise
                if not outcome.acknowledge:
                    self._settle_like(batch, row, outcome)
                    continue
                if leader.matched_key and leader.matched_key not in duplicate.names():
                    # Known by a key that this one does not have, so not proven to be a duplicate.
                    apart.append(row)
                    continue
                fate = _FATES.get(outcome.verdict, Fate.DELIVERED)
                memories += duplicate.memories(duplicate.parts_not_in(leader), fate, self._dice)
                duplicate.duplicate_of = outcome.first or batch.first_arrival(leader.row)
                if self._forwards_anyway(batch, row):
                    is_busy = outcome.verdict is Verdict.BUSY
                    duplicate.success_verdict = Verdict.BUSY if is_busy else Verdict.DUPLICATE
                    forward.append(row)
                else:
                    self._settle(batch, [row], Verdict.DUPLICATE)
        await self._claims.remember(memories)
        again = [row for leader in leaders for row in leader.duplicates if batch.outcomes[row]]
        await self._count_copies(batch, again)
        await self._deliver(batch, forward)
        if apart:
            for wave in waves(batch, apart):
                await self._process_wave(batch, wave)

    def _settle_like(self, batch: Batch, row: int, outcome: Outcome) -> None:
        self._settle(
            batch,
            [row],
            outcome.verdict,
            reason=outcome.reason,
            retry_after_ms=outcome.retry_after_ms,
            blamed=outcome.blamed,
        )

    def _report_send(self, items: int, took_s: float, ok: bool) -> None:  # noqa: FBT001 - `CallListener`
        call_hooks(self._trip_hooks, RoundTrip(self.route, "sink", "deliver", items, took_s, ok))

    def _settle_unfinished(self, batch: Batch) -> list[Outcome]:
        """Return events without a verdict to the source: after an error, or at a shutdown."""
        settled = [outcome for outcome in batch.outcomes if outcome is not None]
        if len(settled) == len(batch.outcomes):
            return settled
        reason = "this gateway is shutting down" if self._draining else "an unexpected error"
        left = [row for row in range(len(batch.keys)) if batch.outcomes[row] is None]
        # Claims of events that were not sent are released for the next worker.
        unsent = [
            HandBack(batch.entry(row), reason, 0, unsent=True)
            for row in left
            if row not in batch.sent
        ]
        self._claims.backlog.add(
            PendingWrite(release) for back in unsent for release in back.releases()
        )
        self._settle(batch, left, Verdict.FAILED, reason=reason)
        unplanned = batch.outcomes.count(None)
        self.books.settle(Verdict.FAILED, unplanned)
        failed = Outcome(Verdict.FAILED, acknowledge=False, reason=reason)
        for index, outcome in enumerate(batch.outcomes):
            if outcome is None:
                batch.report(index, failed)
        return [failed if outcome is None else outcome for outcome in batch.outcomes]


class _Claimed(Struct):
    """What the answers to a claim lead to."""

    ready: list[int]
    """Rows to send."""
    waiting: list[int]
    """Rows whose key another worker holds, and that are waited for."""
    known: dict[int, First | None]
    """Rows of duplicates, and the arrivals that were delivered."""
    memories: list[Memory]
    """Further keys of known events."""


def _raise_first(errors: Iterable[object]) -> None:
    for error in errors:
        if isinstance(error, BaseException):
            raise error
