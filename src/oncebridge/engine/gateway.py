"""
Claim, deliver, commit: the only file that knows this order.

One batch goes through these steps:

    plan      apply the rules: the keys of each event, and the duplicates within the batch
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
from oncebridge.engine.backlog import PendingWrite
from oncebridge.engine.batch import (
    Arrival,
    Batch,
    BatchEntry,
    Settled,
    commits_of,
    first_arrival,
    now_s,
)
from oncebridge.engine.breaker import Blame, Breaker
from oncebridge.engine.claims import RetryingStore
from oncebridge.engine.counters import Books
from oncebridge.engine.entity_state import EntityStates
from oncebridge.engine.hooks import (
    Decision,
    Hook,
    RoundTrip,
    Tracer,
    TripHook,
    call_hooks,
    ended,
    start_trace,
)
from oncebridge.engine.leases import Lease, Leases
from oncebridge.engine.opening import Opening, share_of
from oncebridge.engine.ordering import EntityQueues, waves
from oncebridge.engine.rate_limit import RateLimit
from oncebridge.engine.sends import EntryAnswer, Sends, SendSlots
from oncebridge.engine.settings import DEFAULT_ROUTE, Settings
from oncebridge.engine.shared_rate_limit import RateShare
from oncebridge.engine.timed_store import TimedStore
from oncebridge.engine.verdict import HANDED_BACK, Outcome, Verdict
from oncebridge.errors import (
    ConfigError,
    DeadLetterError,
    DeadLetterRefused,
    StoreError,
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
_BUSY_POLL_S = 0.25  # most claims end well before their lease
_ENOUGH_QUEUED_S = 2.0  # enough events are queued if they keep the sink busy for so long
_LEAST_PAUSE_S = 0.1  # asking again sooner is not worth it
_SHARE_POLL_S = 0.5  # a share of the rate has to be renewed while events wait for it
_DROPPED = {Verdict.STALE: Fate.STALE, Verdict.UNCHANGED: Fate.UNCHANGED}
_FATES = {**_DROPPED, Verdict.DEAD: Fate.DEAD}
_ANY_OTHER_EVENT = b"any"  # a key that no event has
_NOT_RECORDED = "another event with the same key was delivered and is not recorded yet"
_UNKEYED_VERDICTS = {"dead": Verdict.DEAD, "discard": Verdict.DISCARDED}


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
        claims = TimedStore(store, route, self._trip_hooks) if trip_hooks else store
        self._leases = Leases(claims, self.books, lease_ms=self._lease_ms)
        self._claims = RetryingStore(claims, self.books, self._dice)
        self._entities = EntityStates(self._claims, self._leases, self.books, self._dice, settings)
        self._joint = as_joint_sink(self._sink, store)
        self._slots = SendSlots(self._sink.concurrency, self._report_send if trip_hooks else None)
        self._sends: dict[Sends, deque[list[BatchEntry]]] = {}
        """The sends under way, each with the entries that still wait to be sent."""
        self._is_shadow = settings.mode == "shadow"
        self._fails_open = self._is_shadow or settings.on_store_outage == "deliver"
        self.sink_breaker = Breaker(settings.breaker, self._dice)
        self.store_breaker = Breaker(settings.breaker, self._dice)
        self._blame = Blame(self.sink_breaker)
        self._rate_limit = RateLimit(settings.rate or inf)
        self._rate_share = self._make_rate_share(settings.rate, store) if settings.rate else None
        self._entity_queues = EntityQueues() if settings.order == "entity" else None
        self._paused = False
        self.records_lost_ms = 0
        """When the store lost its records, by its clock (see `Epoch`); 0 if it did not."""
        self._opening = Opening(self._open_all, self.store_breaker, self.books)
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
        batch = Batch(arrivals, within, patience, settled, in_place=in_place)
        self.books.arrive(len(arrivals))
        self._idle.clear()
        try:
            self._plan(batch)
            if not self._draining and await self._ensure_open(batch):
                await self._run(batch)
        finally:
            outcomes = self._settle_unfinished(batch)
            batch.entries.clear()  # one reference cycle less for the garbage collector
            batch.unkeyed.clear()
            if not self.books.in_flight:
                self._idle.set()
        return outcomes

    async def open(self, within_s: float | None = None) -> None:
        """Open and check the store, the sink and the dead letters, or raise."""
        await self._opening.finish(within_s)

    async def try_open(self, within_s: float | None = None) -> str:
        """Open, if that is due; return why the store is unavailable, or nothing if it is open."""
        return await self._opening.attempt(within_s)

    async def _open_all(self) -> None:
        await self._sink.open()
        if self._dead is not None:
            await self._dead.open()
        await self._store.open()

    async def _ensure_open(self, batch: Batch) -> bool:
        """
        Open on first use; True if events can be processed.

        A store that is unavailable at the start is an outage like any other.
        """
        if self._opening.is_done:
            return True
        left_s = None if batch.ends is None else batch.ends - now_s()
        if left_s is not None and self._fails_open:
            left_s = share_of(left_s)
        reason = await self.try_open(left_s)
        if reason and not self._fails_open:
            for entry in batch.entries:
                self._handle_store_outage(entry, reason, [])
        return self._fails_open or not reason

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
        waiting = sum([len(entries) for queue in self._sends.values() for entries in queue])
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

    # --- plan --------------------------------------------------------------------------

    async def _run(self, batch: Batch) -> None:
        if discarded := [e for e in batch.unkeyed if self._is_discarded(e.plan)]:
            self._settle(discarded, Verdict.DISCARDED)
        if not batch.undeliverable:
            await self._process_deliverable([e for e in batch.entries if not e.settled])
            return
        # At the same time: the dead letters may be slow.
        apart = {id(entry) for entry in batch.undeliverable}
        keyed = [e for e in batch.entries if not e.settled and id(e) not in apart]
        done = await asyncio.gather(
            self._process_undeliverable(batch.undeliverable),
            self._process_deliverable(keyed),
            return_exceptions=True,
        )
        for error in done:
            if error is not None:
                raise error

    def _is_discarded(self, plan: Plan) -> bool:
        return plan.action == "discard" and (plan.refused or not self._is_shadow)

    async def _process_undeliverable(self, entries: list[BatchEntry]) -> None:
        """Store events that can never be sent in the dead letters, once; this needs no sink."""
        for wave in waves(entries):
            await self._process_wave(wave)

    async def _process_deliverable(self, entries: list[BatchEntry]) -> None:
        for wave in waves(entries):
            await self._admit(wave)

    def _plan(self, batch: Batch) -> None:
        """Make an entry of each arrival: parse bytes, apply the rules."""
        limits, bare, apart = self._settings.limits, self._settings.bare, self.rules.apart
        now = self._clock()
        for index, arrival in enumerate(batch.arrivals):
            event: Event | Unreadable
            if isinstance(arrival, bytes):
                event = read(arrival, limits=limits, bare=bare, apart=apart)
            else:
                event = arrival
            plan = self.rules.plan_arrival(event, shadow=self._is_shadow)
            entry = BatchEntry(batch, index, event, plan, plan.parts, plan.entity, now)
            if self._tracer is not None:
                entry.trace = start_trace(self._tracer, self.route, event)
            batch.entries.append(entry)
            if not entry.parts:
                batch.unkeyed.append(entry)
            elif entry.is_undeliverable:
                batch.undeliverable.append(entry)
        if self._entity_queues is not None:
            batch.turns = self._entity_queues.enqueue([e.entity for e in batch.entries if e.entity])

    # --- admit -------------------------------------------------------------------------

    async def _admit(self, wave: Sequence[BatchEntry]) -> None:
        """Process a wave when the earlier events of its entities are done."""
        turns = wave[0].batch.turns if wave else {}
        if not turns:
            await self._hand_back_if_sink_down(wave)
            return
        behind = [e for e in wave if e.entity in turns and turns[e.entity].ahead is not None]
        waits = {id(entry) for entry in behind}
        await self._hand_back_if_overtaking([entry for entry in wave if id(entry) not in waits])
        for entity in dict.fromkeys([entry.entity for entry in behind]):
            await turns[entity].wait_for_previous(behind[0].batch.ends)
        await self._hand_back_if_overtaking(behind)

    async def _hand_back_if_overtaking(self, wave: Sequence[BatchEntry]) -> None:
        """Process a wave; hand back events that are queued after one that failed, of the same entity."""
        late = [e for e in wave if e.entity and e.batch.turns[e.entity].failed]
        why, wait = "an earlier event of the same entity is not delivered yet", self._backoff_ms(1)
        for entry in late:
            self._hand_back_unclaimed(entry, why, wait)
        await self._hand_back_if_sink_down([entry for entry in wave if not entry.settled])

    async def _hand_back_if_sink_down(self, wave: Sequence[BatchEntry]) -> None:
        """Process a wave; while the sink is down, hand it back, except one event that tries the sink."""
        breaker = self.sink_breaker
        while wave and breaker.is_open and not self._paused:
            now = now_s()
            at = next((at for at, e in enumerate(wave) if not breaker.left_s(now, e.key)), None)
            if at is None or not breaker.admits(now, wave[at].key):
                break
            wave[at].tries_sink = True
            try:
                await self._process_wave(wave[at : at + 1])
            finally:
                # If it was a duplicate, nothing is known about the sink.
                breaker.abandoned()
            wave = [*wave[:at], *wave[at + 1 :]]
        if not self._paused and not self.sink_breaker.is_open:
            await self._process_wave(wave)
            return
        why = "paused by an operator" if self._paused else "the sink is down"
        for entry in wave:
            wait_s = _PAUSED_S if self._paused else breaker.left_s(now_s(), entry.key)
            self._hand_back_unclaimed(entry, why, self._jittered_ms(int(wait_s * 1000)))

    def _hand_back_unclaimed(self, entry: BatchEntry, reason: str, wait_ms: int) -> None:
        """Return an event that was not claimed to the source, with its duplicates in the batch."""
        every = [entry, *entry.duplicates]
        self._settle(every, Verdict.FAILED, reason=reason, retry_after_ms=wait_ms)

    async def _process_wave(self, wave: Sequence[BatchEntry]) -> None:
        """Take events that share no key and no entity through all steps."""
        bypassed = [entry for entry in wave if not entry.parts]
        for entry in bypassed:
            entry.success_verdict = _UNKEYED_VERDICTS.get(entry.plan.action, Verdict.BYPASSED)
        ready, waiting = await self._claim([entry for entry in wave if entry.parts])
        await self._claim_entities_and_deliver(bypassed + ready)
        while waiting:
            await self._claims.pause(_BUSY_POLL_S)
            ready, waiting = await self._claim(waiting)
            await self._claim_entities_and_deliver(ready)
        await self._settle_duplicates_in_batch(wave)

    async def _claim_entities_and_deliver(self, entries: list[BatchEntry]) -> None:
        """
        Send; events whose entity is free do not wait for the others.

        A busy entity is waited for in place: returning its event would use up the source's
        receive counts.
        """
        entering = [entry for entry in entries if entry.entity and entry.claim is not None]
        if not entering:
            await self._deliver(entries)
            return
        ready = [entry for entry in entries if not entry.entity or entry.claim is None]
        patient_until = now_s() + self._settings.patience.total_seconds()
        sending: list[asyncio.Task[None]] = []
        try:
            while entering:
                claimed, entering, pause_s = await self._claim_entities(entering, patient_until)
                ready += claimed
                if entering:
                    sending.append(asyncio.create_task(self._deliver(ready)))
                    ready = []
                    await self._claims.pause(pause_s)
            await self._deliver(ready)
        except BaseException:
            for task in sending:
                task.cancel()
            raise
        finally:
            # All of them, even if one fails: none may keep running.
            errors = await asyncio.gather(*sending, return_exceptions=True) if sending else ()
        for error in errors:
            if error is not None:
                raise error

    # --- claim -------------------------------------------------------------------------

    async def _claim(self, entries: list[BatchEntry]) -> tuple[list[BatchEntry], list[BatchEntry]]:
        """Claim the events' keys; return the entries to send, and those to wait for."""
        ready: list[BatchEntry] = []
        waiting: list[BatchEntry] = []
        memories: list[Memory] = []
        while entries := self._settle_unrecorded_duplicates(entries, ready):
            again: list[BatchEntry] = []
            known: list[BatchEntry] = []
            held: list[Lease] = []
            batch = entries[0].batch
            lease_ms = batch.lease_ms(self._lease_ms)
            wants = self._wants(entries, lease_ms)
            sent = batch.now()
            answers = await self._ask_store(wants)
            heard = batch.now()
            ends, gives_up, latest = sent + lease_ms / 1000, sent + self._max_hold_s, batch.latest()
            lost_ms = self.records_lost_ms
            for entry, want, answer in zip(entries, wants, answers, strict=True):
                match answer:
                    case Claim():
                        lease = Lease(answer, ends, gives_up, latest)
                        entry.set_claim(answer, lease, heard, want.generation, lost_ms)
                        if entry.attempt > 1:
                            self.books.retried += 1
                        held.append(lease)
                        ready.append(entry)
                    case Duplicate():
                        entry.mark_duplicate(answer.key, first_arrival(answer.memo))
                        memories += self._memories_of_other_tiers(entry, answer)
                        (ready if self._forwards_anyway(entry) else known).append(entry)
                    case Busy() if entry.batch.is_patient() and not self._draining:
                        waiting.append(entry)
                    case Busy():
                        self._hand_back_busy(entry, answer, ready)
                    case Mismatch():
                        entry.mark_conflict(answer.key)
                        again.append(entry)
                    case NoAnswer():
                        self._handle_store_outage(entry, answer.reason, ready)
            self._leases.add(held)
            self._settle(known, _DUPLICATE)
            await self._count_copies(known)
            entries = again
        await self._claims.remember(memories)
        return await self._settle_unsendable(ready), waiting

    def _settle_unrecorded_duplicates(
        self, entries: list[BatchEntry], ready: list[BatchEntry]
    ) -> list[BatchEntry]:
        """
        Settle duplicates of events that are delivered but not recorded yet; return the rest.

        Only this process knows of them. Other content under the same key waits until the store
        can distinguish the two.
        """
        backlog = self._claims.backlog
        if not len(backlog):
            return entries
        now = now_s()
        rest: list[BatchEntry] = []
        for entry in entries:
            part = entry.parts[-1]
            # An event that was delivered as a conflict is known by the key it was sent with.
            found = backlog.delivered(entry.plan.sent_as, now)
            found = found or backlog.delivered(part.key, now)
            if found is None:
                rest.append(entry)
            elif found.hash and part.hash and found.hash != part.hash:
                if self._forwards_anyway(entry):
                    rest.append(entry)
                else:
                    self._hand_back_until_store_recovers(entry, _NOT_RECORDED)
            else:
                entry.mark_duplicate(part.key, found.first)
                if self._forwards_anyway(entry):
                    ready.append(entry)
                else:
                    self._settle([entry], _DUPLICATE)
        return rest

    def _forwards_anyway(self, entry: BatchEntry) -> bool:
        """Return True if the event is forwarded whatever the store says."""
        return self._is_shadow and not entry.is_undeliverable

    async def _count_copies(self, entries: Sequence[BatchEntry]) -> None:
        """Count further arrivals of events that went to the dead letters unsent."""
        again = Counter([entry.key for entry in entries if entry.is_undeliverable])
        if again:
            keep_ms = ms(self._settings.window)
            await count_copies(self._store, self._dice, again, keep_ms=keep_ms)

    def _wants(self, entries: list[BatchEntry], lease_ms: int) -> list[Want]:
        tokens = iter(self._dice.tokens(2 * len(entries)))
        explain = self._settings.explain
        return [
            Want(
                entry.parts,
                token,
                generation,
                lease_ms,
                entry.keep_ms,
                entry.first_memo() if explain else b"",
            )
            for entry, token, generation in zip(entries, tokens, tokens, strict=True)
        ]

    async def _ask_store(self, wants: list[Want]) -> Sequence[ClaimAnswer]:
        if self.store_breaker.is_open and not self.store_breaker.admits(now_s()):
            return [NoAnswer("it is down")] * len(wants)
        try:
            # Pending writes first: other workers then know what was delivered.
            if self.store_breaker.failures and not await self._claims.backlog.flush():
                self.store_breaker.failed(now_s())
                return [NoAnswer("earlier deliveries could not be recorded in it")] * len(wants)
            answers = await self._claims.claim(wants)
        except BaseException:
            self.store_breaker.abandoned()
            raise
        if all(type(answer) is NoAnswer for answer in answers):
            self.store_breaker.failed(now_s())
        else:
            self.store_breaker.succeeded()
        return answers

    def _memories_of_other_tiers(self, entry: BatchEntry, answer: Duplicate) -> list[Memory]:
        """Return the records to write for the other tiers of an event known by its last tier."""
        if len(entry.parts) == 1 or answer.key != entry.parts[-1].key:
            return []
        return entry.memories(entry.parts[:-1], answer.fate, self._dice)

    def _hand_back_busy(self, entry: BatchEntry, answer: Busy, ready: list[BatchEntry]) -> None:
        """Return an event that another worker holds to the source; in shadow mode, forward it."""
        entry.success_verdict = Verdict.BUSY
        if self._forwards_anyway(entry):
            ready.append(entry)
        else:
            wait = self._jittered_ms(answer.left_ms)
            self._settle([entry], Verdict.BUSY, retry_after_ms=wait)

    def _handle_store_outage(self, entry: BatchEntry, reason: str, ready: list[BatchEntry]) -> None:
        """Hand back an event that the store did not answer for, or send it unprotected, as configured."""
        if self._fails_open:
            entry.unprotected = True
            ready.append(entry)
        else:
            self._hand_back_until_store_recovers(entry, f"the store did not answer: {reason}")

    def _hand_back_until_store_recovers(self, entry: BatchEntry, reason: str) -> None:
        left_s = self.store_breaker.left_s(now_s())
        wait = max(self._backoff_ms(self.store_breaker.level), int(left_s * 1000))
        self._settle([entry], Verdict.FAILED, reason=reason, retry_after_ms=wait)

    async def _settle_unsendable(self, ready: list[BatchEntry]) -> list[BatchEntry]:
        """Settle events that were tried too often and conflicts that must not be sent; return the rest."""
        most = self._settings.max_attempts
        if undeliverable := [entry for entry in ready if entry.is_undeliverable]:
            await self._send_to_dead_letters(undeliverable, "unkeyable")
            ready = [entry for entry in ready if not entry.settled]
        if self._is_shadow or not any(entry.attempt > most or entry.is_conflict for entry in ready):
            return ready
        claimed = [entry for entry in ready if entry.claim is not None]
        if self._dead is not None:
            await self._send_to_dead_letters([e for e in claimed if e.attempt > most], "attempts")
        conflicts = [e for e in claimed if e.is_conflict and not e.settled]
        await self._send_to_dead_letters(
            [e for e in conflicts if e.on_conflict == "dead"], "conflict"
        )
        await self._drop([(e, Verdict.CONFLICT) for e in conflicts if e.on_conflict == "duplicate"])
        return [entry for entry in ready if not entry.settled]

    # --- entity ------------------------------------------------------------------------

    async def _claim_entities(
        self, entries: list[BatchEntry], patient_until: float
    ) -> tuple[list[BatchEntry], list[BatchEntry], float]:
        """
        Claim the entities of events under a newest-wins or quiet rule, and compare.

        Return the entries to send, those to wait for, and how many seconds to wait.
        """
        batch = entries[0].batch
        found = await self._entities.claim(entries, batch.lease_ms(self._lease_ms))
        await self._handle_incomparable_versions(
            [e for e, v in found.outdated if v is Verdict.CONFLICT]
        )
        if self._is_shadow:
            for entry, verdict in found.outdated:
                entry.success_verdict = verdict
            for entry, _ in found.busy:
                entry.success_verdict = Verdict.BUSY
            return entries, [], 0
        await self._drop([(e, v) for e, v in found.outdated if v is not Verdict.CONFLICT])
        pause = self._backoff_ms(1)
        await self._hand_back(
            [
                _HandBack(entry, "the store did not answer for the entity", pause, unsent=True)
                for entry in found.unanswered
            ]
        )
        waiting, pause_s = [entry for entry, _ in found.busy], 0.0
        if waiting and now_s() < patient_until and not self._draining and not batch.is_over():
            left_s = min(left for _, left in found.busy) / 1000
            pause_s = min(left_s, _BUSY_POLL_S)
        elif waiting:
            await self._hand_back(
                [
                    _HandBack(entry, "another worker holds the entity", left, unsent=True)
                    for entry, left in found.busy
                ],
                verdict=Verdict.BUSY,
            )
            waiting = []
        busy = {id(entry) for entry in waiting}
        ready = [entry for entry in entries if not entry.settled and id(entry) not in busy]
        return ready, waiting, pause_s

    async def _handle_incomparable_versions(self, entries: list[BatchEntry]) -> None:
        """Treat versions that cannot be compared as conflicts; the entity keeps its state."""
        if not entries:
            return
        await self._claims.release([r for e in entries for r in self._entities.release_of(e)])
        for entry in entries:
            entry.success_verdict = Verdict.CONFLICT
        if not self._is_shadow:
            await self._send_to_dead_letters(
                [e for e in entries if e.on_conflict != "deliver"], "version"
            )

    # --- deliver -----------------------------------------------------------------------

    async def _deliver(self, entries: list[BatchEntry]) -> None:
        """Send in batches of the sink's size, several at once; apply answers as they arrive."""
        if not entries:
            return
        size = self._sink.batch
        waiting = deque([entries[at : at + size] for at in range(0, len(entries), size)])
        sends = Sends(self._slots, entries[0].batch.loop)
        self._sends[sends] = waiting
        applying: list[asyncio.Task[None]] = []
        try:
            while waiting or sends.has_pending:
                await self._start_sends(waiting, sends)
                if not waiting and not sends.has_pending:
                    break
                answered = await sends.next()
                if not answered:
                    continue
                answers = self._sort_answers(answered)
                if waiting or sends.has_pending:
                    # The other sends need not wait for these commits.
                    applying.append(asyncio.create_task(self._apply_answers(answers)))
                else:
                    await self._apply_answers(answers)
        except BaseException:
            self._sort_answers(sends.take_answers())
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
                owing = [e for e in entries if e.forwarded and not e.settled]
                self._defer_commits(
                    owing, commits_of(owing, Fate.DELIVERED), entries[0].batch.now()
                )
        for error in errors:
            if error is not None:
                raise error

    async def _start_sends(self, waiting: deque[list[BatchEntry]], sends: Sends) -> None:
        """Start the sends that are due, as long as there is a slot and their claims are held."""
        if waiting:
            self._rate_limit.note(waiting[0][0].batch.now())
        while waiting:
            if back := self._find_unsendable(waiting):
                waiting.clear()
                await self._hand_back(back)
                sends.stop_waiting_for_slot()
                return
            if self._rate_limit.is_active and (pause := self._reserve_turn(waiting)) > 0:
                longest_s = _SHARE_POLL_S if self._rate_share is not None else self._sink_timeout_s
                sends.wake_in(min(pause, longest_s))
                return
            if not sends.take_slot():
                return
            try:
                entries = await self._confirm_claims(waiting.popleft())
                if entries:
                    self._call_sink(entries, sends)
                else:
                    sends.return_slot()
            except BaseException:
                sends.return_slot()
                raise

    def _reserve_turn(self, waiting: deque[list[BatchEntry]]) -> float:
        """Reserve a turn for the first in *waiting*; return the seconds until then."""
        limit, first = self._rate_limit, waiting[0][0]
        now = first.batch.now()
        if self._rate_share is not None:
            is_short = limit.left_s(now) > 0
            limit.allow(self._rate_share.current(limit.reserved, is_short=is_short), now)
        if first.turn is None or limit.is_missed(first.turn, now):
            entries = waiting[0]
            if len(entries) > (most := limit.most(now)):
                waiting[0] = entries[:most]
                waiting.insert(1, entries[most:])
            turn = limit.reserve(len(waiting[0]), now)
            for entry in waiting[0]:
                entry.turn = turn
        assert first.turn is not None  # noqa: S101 - set just now
        return limit.wait_s(first.turn, now)

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

    def _find_unsendable(self, waiting: deque[list[BatchEntry]]) -> "list[_HandBack]":
        """Return everything in *waiting* as hand-backs if it cannot be sent any more; else nothing."""
        first = waiting[0][0]
        back_after_ms = 0
        if self._draining:
            why = "this gateway is shutting down"
        elif self.sink_breaker.is_open and not first.tries_sink:
            # The sink went down after these were claimed.
            why, back_after_ms = "the sink is down", int(self.unavailable_s() * 1000) + 1
        elif first.batch.ends is not None and self._is_turn_after_deadline(first):
            why = "no time left to send"
        else:
            return []
        return [
            _HandBack(entry, why, back_after_ms, unsent=True)
            for entries in waiting
            for entry in entries
        ]

    def _is_turn_after_deadline(self, entry: BatchEntry) -> bool:
        """Return True if the event's turn comes only after the caller's time is over."""
        limit, now = self._rate_limit, entry.batch.now()
        if not limit.is_active:
            return False
        if not limit.rate(now):  # this worker has no share yet, but may get one at any moment
            return self._send_time([entry]) <= 0
        wait_s = limit.left_s(now) if entry.turn is None else limit.wait_s(entry.turn, now)
        return wait_s >= self._send_time([entry])

    def _sort_answers(self, answers: Sequence[EntryAnswer]) -> "_SortedAnswers":
        """Group the sink's answers: delivered, rejected for good, too old, to retry, lost races."""
        found = _SortedAnswers([], [], [], [], [])
        for entry, answer in answers:
            match answer:
                case Yes():
                    entry.forwarded = True
                    found.taken.append(entry)
                case Already() | Lost():
                    self.sink_breaker.succeeded()
                    found.lost_races.append((entry, answer))
                case Never():
                    if not answer.unsent:
                        self.sink_breaker.succeeded()
                    entry.error = answer.reason
                    found.refused.append(entry)
                case _:
                    back = self._plan_retry(entry, answer)
                    if isinstance(answer, No | Throttled) or not self._is_too_old(entry):
                        found.back.append(back)
                    else:
                        found.too_old.append(entry)
        self._rate_limit.delivered += len(found.taken)
        return found

    def _is_too_old(self, entry: BatchEntry) -> bool:
        """Return True if a failed event is to be given up for its age, and record why."""
        if self._dead is None or entry.claim is None or entry.is_lost:
            return False
        most_ms = entry.batch.give_up_ms(self._settings.give_up_after, entry.keep_ms)
        if entry.age_ms() < most_ms:
            return False
        most = format_duration(timedelta(milliseconds=most_ms))
        entry.error = f"{entry.error}; not delivered within {most} of the first attempt"
        return True

    async def _apply_answers(self, answers: "_SortedAnswers") -> None:
        if answers.taken:
            await self._record_success(answers.taken)
        if answers.refused:
            await self._send_to_dead_letters(answers.refused, "rejected")
        if answers.too_old:
            await self._send_to_dead_letters(answers.too_old, "too-old")
        if answers.back:
            await self._hand_back(answers.back)
        if answers.lost_races:
            await self._settle_lost_races(answers.lost_races)

    async def _settle_lost_races(
        self, lost_races: "list[tuple[BatchEntry, Already | Lost]]"
    ) -> None:
        """Settle events that another worker delivered first; nothing of them was written."""
        known = [entry for entry, answer in lost_races if isinstance(answer, Already)]
        await self._claims.release([r for entry in known for r in self._entities.release_of(entry)])
        self._settle(known, Verdict.DUPLICATE)
        lost = [entry for entry, answer in lost_races if isinstance(answer, Lost)]
        why, wait = "another worker took over", self._backoff_ms(1)
        await self._hand_back(
            [_HandBack(entry, why, wait, unsent=True) for entry in lost], verdict=Verdict.BUSY
        )
        # Some of their keys may have been held here until now.
        self.books.lease_lost += sum([not entry.is_lost for entry in lost])

    async def _confirm_claims(self, entries: list[BatchEntry]) -> list[BatchEntry]:
        """Return the entries that may be sent: there is time, and their claims outlast the send."""
        send_time = self._send_time(entries)
        if send_time <= self._least_send_time(entries[0].batch):
            await self._hand_back_unsent(entries, "no time left to send")
            return []
        needed = entries[0].batch.now() + send_time + self._margin_s
        short = [
            lease
            for entry in entries
            for lease in (entry.lease, entry.entity_lease)
            if lease is not None and (lease.lost or lease.ends < needed)
        ]
        if not short:
            return entries
        try:
            await self._leases.extend(short)
        except StoreError:
            self.books.store_errors += 1
        # Again: the store may have been slow.
        needed = entries[0].batch.now() + send_time + self._margin_s
        ours = [entry for entry in entries if entry.is_held_until(needed)]
        lost = [entry for entry in entries if not entry.is_held_until(needed)]
        await self._hand_back_unsent(lost, "the lease ended before the send")
        return ours

    def _call_sink(self, entries: list[BatchEntry], sends: Sends) -> None:
        """Call the sink; from now on the leases are extended for this attempt only."""
        timeout = self._send_time(entries)
        ends = entries[0].batch.now() + timeout
        gives_up = ends + self._commit_budget_s + self._margin_s
        leases = [
            lease for e in entries for lease in (e.lease, e.entity_lease) if lease is not None
        ]
        for lease in leases:
            lease.give_up = gives_up
        entries[0].batch.has_sent = True
        passed = self.sink_breaker.passed
        for entry in entries:
            entry.is_sent = True
            entry.passed_before = passed
        if self._joint is not None:
            for lease in leases:
                # The transaction itself checks the claims. It locks the rows until it ends, so
                # leases are not extended: they outlast the send.
                lease.ending = True
                lease.give_up = entries[0].batch.now()
            call = self._joint.deliver_jointly(
                [self._joint_delivery(entry, ends) for entry in entries]
            )
            sends.start(entries, call, timeout_s=timeout, leases=())
            return
        sends.start(
            entries,
            self._sink.deliver([entry.delivery(self.route, ends) for entry in entries]),
            timeout_s=timeout,
            # One lost lease must not cancel the sends of others.
            leases=leases if len(entries) == 1 else (),
        )

    def _joint_delivery(self, entry: BatchEntry, ends: float) -> Joint:
        """Return the delivery together with the commits that are written in the same transaction."""
        commits = commits_of([entry], Fate.DELIVERED) if entry.claim is not None else ()
        records_state = entry.entity_lease is not None and entry.success_verdict not in _DROPPED
        releases = (self._entities.delivered_release(entry),) if records_state else ()
        return Joint(entry.delivery(self.route, ends), tuple(commits), releases)

    def _send_time(self, entries: list[BatchEntry]) -> float:
        return entries[0].batch.send_time(self._sink_timeout_s, self._margin_s)

    def _least_send_time(self, batch: Batch) -> float:
        """
        Return how many seconds a send needs at least.

        The sink may take an event whose send is cut short by the end of the caller's time, and
        then it is sent twice. The first send of a batch gets the time there is: a later batch
        would not have more.
        """
        if batch.ends is None or not batch.has_sent:
            return 0.0
        return min(1.25 * self._slots.slowest_s, self._sink_timeout_s)

    def _plan_retry(
        self, entry: BatchEntry, answer: Unknown | No | Throttled | Unwell | Closed
    ) -> "_HandBack":
        """Decide when to retry an event the sink did not take, and whether the attempt counts."""
        asked = min(max(answer.retry_after_ms, 0), ms(self._settings.max_backoff))
        if isinstance(answer, Throttled):
            return self._plan_throttled_retry(entry, answer, asked)
        if isinstance(answer, No) and answer.too_early:
            return _HandBack(entry, answer.reason, max(self._backoff_ms(1), asked), unsent=True)
        is_blamed = False
        match answer:
            case Unknown():
                self.books.ambiguous += 1
                is_blamed = True
            case Unwell() | Closed():
                self.books.unwell += isinstance(answer, Unwell)
                is_blamed = self._blame.is_of(entry.key, entry.passed_before)
        if not isinstance(answer, No):
            entry.error = answer.reason
            entry.maybe_delivered = entry.maybe_delivered or not isinstance(answer, Closed)
        # The send of a lost claim was cancelled here, and a refusal that is the event's own fault
        # says nothing about the sink.
        if not entry.is_lost and (isinstance(answer, Unknown) or not is_blamed):
            event = b"" if isinstance(answer, No) else entry.key
            self.sink_breaker.failed(now_s(), event=event)
        if is_blamed:
            wait = max(self._backoff_ms(entry.attempt), asked)
            return _HandBack(entry, answer.reason, wait, unsent=False)
        # The sink's fault: the attempt does not count, and the pause grows with its refusals.
        left_s = self.sink_breaker.left_s(now_s(), entry.key)
        wait = max(self._backoff_ms(self.sink_breaker.level), asked, int(left_s * 1000))
        return _HandBack(entry, answer.reason, wait, unsent=True)

    def _plan_throttled_retry(
        self, entry: BatchEntry, answer: Throttled, asked_ms: int
    ) -> "_HandBack":
        """Lower the rate, and retry when the sink accepts events again."""
        now, limit = now_s(), self._rate_limit
        self.sink_breaker.answered()
        self.books.throttled += 1
        if answer.maybe:
            self.books.unwell += 1
            entry.maybe_delivered = True
            entry.error = answer.reason
        limit.throttled(entry.turn, asked_ms / 1000, now)
        wait = max(asked_ms, int(limit.left_s(now) * 1000)) + 1
        return _HandBack(entry, answer.reason, wait, unsent=True)

    def _backoff_ms(self, times: int) -> int:
        """Return a random pause: anything from 0 to 1 s, 2 s, 4 s … 5 min (full jitter)."""
        doubled = ms(self._settings.backoff) << min(max(times, 1) - 1, 20)
        return int(self._dice.fraction() * min(doubled, ms(self._settings.max_backoff))) + 1

    def _jittered_ms(self, left_ms: int) -> int:
        return left_ms + int(250 * self._dice.fraction()) + 1

    # --- commit ------------------------------------------------------------------------

    async def _record_success(self, entries: list[BatchEntry]) -> None:
        """Commit what the sink took. From here on the event is acknowledged, whatever happens."""
        self.sink_breaker.succeeded()
        self.books.forwarded += len(entries)
        for entry in [entry for entry in entries if entry.unprotected]:
            self.books.unprotected += 1
            if entry.claim is None:
                memories = entry.memories(entry.parts, Fate.DELIVERED, self._dice)
                self._claims.backlog.add(entry.pending_writes(memories, entry.batch.now()))
        if self._joint is None:
            await self._record_entity_states(entries)
            await self._commit(entries, Fate.DELIVERED)
        elif self._is_shadow:
            await self._release_entities(entries)
        for verdict, why in dict.fromkeys(
            [(entry.success_verdict, entry.why) for entry in entries]
        ):
            its = [e for e in entries if e.success_verdict is verdict and e.why == why]
            self._settle(its, verdict, reason=why)

    def _defer_commits(
        self, entries: Sequence[BatchEntry], commits: Sequence[Commit], since: float
    ) -> None:
        """Add *commits* that were not recorded in time to the backlog."""
        owed = {commit.key: commit for commit in commits}
        for entry in entries:
            its = [owed[part.key] for part in entry.parts if part.key in owed]
            self.books.acked_uncommitted += bool(its)
            self._claims.backlog.add(entry.pending_writes(its, since))

    async def _record_entity_states(self, entries: list[BatchEntry]) -> None:
        """Record the newest states; events that shadow mode would have dropped have none."""
        if not any([entry.entity_lease for entry in entries]):  # noqa: C419 - quicker
            return
        await self._release_entities(entries)
        delivered = [entry for entry in entries if entry.entity_lease is not None]
        await self._entities.record_delivered(delivered, self._lease_ms)

    async def _release_entities(self, entries: list[BatchEntry]) -> None:
        """Release the entities of events that shadow mode would have dropped."""
        await self._claims.release(
            [
                release
                for entry in entries
                if entry.success_verdict in _DROPPED
                for release in self._entities.release_of(entry, entry.success_verdict)
            ]
        )

    async def _commit(self, entries: Sequence[BatchEntry], fate: Fate) -> None:
        """Mark keys as done, within the commit budget or else after the acknowledgement."""
        claimed = [entry for entry in entries if entry.claim is not None]
        if not claimed:
            return
        for entry in claimed:
            if entry.lease is not None:
                entry.lease.ending = True
        batch = claimed[0].batch
        since = batch.now()
        ends = since + self._commit_budget_s
        late, before = await self._claims.commit(
            commits_of(claimed, fate), ends if batch.ends is None else min(ends, batch.ends)
        )
        if late:
            self._defer_commits(claimed, late, since)
        if before:
            self._count_lost_leases(claimed, {commit.key for commit in before})
        now = batch.now()
        self.books.late_commits += sum(
            [e.lease is not None and now > e.lease.ends for e in claimed]
        )

    def _count_lost_leases(self, entries: Iterable[BatchEntry], keys: Container[bytes]) -> None:
        """
        Count events that another worker took over, if the store refused *keys*.

        A store also refuses a request of ours that it applied before. So the lease has to be over,
        or the claim must have been a second attempt.
        """
        now = now_s()
        for entry in entries:
            lease = entry.lease
            if lease is None or not (entry.attempt > 1 or now > lease.ends):
                continue
            if any(key in keys for key in lease.keys):
                self._leases.mark_lost(lease)

    async def _drop(self, outdated: list[tuple[BatchEntry, Verdict]]) -> None:
        """Commit events that are not sent: stale, unchanged, or conflicts that the rule drops."""
        if not outdated:
            return
        await self._claims.release(
            [r for entry, verdict in outdated for r in self._entities.release_of(entry, verdict)]
        )
        for verdict in dict.fromkeys(verdict for _, verdict in outdated):
            entries = [entry for entry, own in outdated if own is verdict]
            await self._commit(entries, _DROPPED.get(verdict, Fate.DROPPED))
            self._settle(entries, verdict)

    async def _send_to_dead_letters(self, entries: list[BatchEntry], reason: str) -> None:
        """Store events in the dead letters, and only then mark them as done."""
        if not entries:
            return
        if self._dead is None:
            why, wait = "no dead letters are configured", ms(self._settings.max_backoff)
            await self._hand_back([_HandBack(entry, why, wait, unsent=False) for entry in entries])
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
            why, wait = f"dead letters: {error}", ms(self._settings.max_backoff)
            await self._hand_back([_HandBack(entry, why, wait, unsent=False) for entry in entries])
            return
        except DeadLetterError as error:
            why, wait = f"dead letters: {error}", self._backoff_ms(1)
            await self._hand_back([_HandBack(entry, why, wait, unsent=True) for entry in entries])
            return
        await self._claims.release(
            [r for entry in entries for r in self._entities.release_of(entry)]
        )
        await self._commit(entries, Fate.DEAD)
        for entry, letter in zip(entries, letters, strict=True):
            self._settle(
                [entry],
                Verdict.CONFLICT if entry.success_verdict is Verdict.CONFLICT else Verdict.DEAD,
                reason=f"{letter.reason}: {letter.message}" if letter.message else letter.reason,
            )

    # --- hand back and settle ----------------------------------------------------------

    async def _hand_back_unsent(self, entries: list[BatchEntry], reason: str) -> None:
        await self._hand_back([_HandBack(entry, reason, 0, unsent=True) for entry in entries])

    async def _hand_back(
        self, back: "list[_HandBack]", *, verdict: Verdict = Verdict.FAILED
    ) -> None:
        """Release the claims and return the events to the source, to be retried."""
        if not back:
            return
        releases: list[Release] = []
        for one in back:
            releases += self._entities.release_of(one.entry)
            releases += one.releases()
            if one.entry.lease is not None:
                one.entry.lease.ending = True
        answers = await self._claims.release(releases)
        fenced = {r.key for r, a in zip(releases, answers, strict=True) if a is Reply.FENCED}
        if fenced:
            self._count_lost_leases([one.entry for one in back], fenced)
        for one in back:
            if one.entry.is_lost:
                self._settle(
                    [one.entry],
                    Verdict.BUSY,
                    reason="another worker took over",
                    retry_after_ms=self._lease_ms,
                )
            else:
                # A little after the release, or the retry would find it busy.
                wait = self._jittered_ms(one.wait_ms) if one.wait_ms else 0
                self._settle(
                    [one.entry],
                    verdict,
                    reason=one.reason,
                    retry_after_ms=wait,
                    blamed=not one.unsent,
                )

    async def _settle_duplicates_in_batch(self, wave: Sequence[BatchEntry]) -> None:
        """Settle the duplicates within the batch like the event that went first."""
        leaders = [entry for entry in wave if entry.duplicates]
        if not leaders:
            return
        memories: list[Memory] = []
        forward: list[BatchEntry] = []
        apart: list[BatchEntry] = []
        for leader in leaders:
            outcome = leader.batch.outcomes[leader.index]
            for duplicate in leader.duplicates:
                if outcome is None or not outcome.acknowledge:
                    self._settle_like(duplicate, outcome)
                    continue
                if leader.matched_key and leader.matched_key not in duplicate.names():
                    # Known by a key that this one does not have, so not proven to be a duplicate.
                    apart.append(duplicate)
                    continue
                fate = _FATES.get(outcome.verdict, Fate.DELIVERED)
                memories += duplicate.memories(duplicate.parts_not_in(leader), fate, self._dice)
                duplicate.duplicate_of = outcome.first or leader.first
                if self._forwards_anyway(duplicate):
                    is_busy = outcome.verdict is Verdict.BUSY
                    duplicate.success_verdict = Verdict.BUSY if is_busy else Verdict.DUPLICATE
                    forward.append(duplicate)
                else:
                    self._settle([duplicate], Verdict.DUPLICATE)
        await self._claims.remember(memories)
        await self._count_copies([r for leader in leaders for r in leader.duplicates if r.settled])
        await self._deliver(forward)
        if apart:
            for turn in waves(apart):
                await self._process_wave(turn)

    def _settle_like(self, entry: BatchEntry, outcome: Outcome | None) -> None:
        if outcome is None:
            return  # `process` is about to raise
        self._settle(
            [entry],
            outcome.verdict,
            reason=outcome.reason,
            retry_after_ms=outcome.retry_after_ms,
            blamed=outcome.blamed,
        )

    def _settle(
        self,
        entries: Sequence[BatchEntry],
        verdict: Verdict,
        *,
        reason: str = "",
        retry_after_ms: int = 0,
        blamed: bool = False,
    ) -> None:
        """Set the verdict of *entries*; each arrival gets exactly one."""
        if not (entries := [entry for entry in entries if not entry.settled]):
            return
        self._leases.discard([entry.lease for entry in entries])
        self._leases.discard([entry.entity_lease for entry in entries if entry.entity_lease])
        batch = entries[0].batch
        is_final = verdict not in HANDED_BACK
        outcomes = [
            Outcome(
                verdict,
                is_final or entry.forwarded,
                entry.plan.rule.name,
                entry.parts[-1].key if entry.parts else b"",
                retry_after_ms,
                reason,
                entry.forwarded,
                entry.unprotected,
                entry.duplicate_of,
                blamed,
                entry.sent_as,
            )
            for entry in entries
        ]
        for entry, outcome in zip(entries, outcomes, strict=True):
            entry.settled = True
            batch.outcomes[entry.index] = outcome
        self.books.settle(verdict, len(entries))
        self._notify(batch, entries, outcomes)

    def _notify(
        self, batch: Batch, entries: Sequence[BatchEntry], outcomes: Sequence[Outcome]
    ) -> None:
        """Report outcomes to the entity queues, the caller, the tracer and the hooks."""
        if batch.turns:
            for entry, outcome in zip(entries, outcomes, strict=True):
                if entry.entity:
                    batch.turns[entry.entity].settled(acknowledged=outcome.acknowledge)
        if batch.settled is not None:
            for entry, outcome in zip(entries, outcomes, strict=True):
                batch.report(entry.index, outcome)
        if self._tracer is not None:
            for entry, outcome in zip(entries, outcomes, strict=True):
                if entry.trace is not None:
                    ended(entry.trace, outcome)
        if self._hooks:
            took_s = batch.now() - batch.began
            decisions = [
                Decision(self.route, entry.event, outcome, entry.arrived_ms, took_s, entry.attempt)
                for entry, outcome in zip(entries, outcomes, strict=True)
            ]
            call_hooks(self._hooks, *decisions)

    def _report_send(self, items: int, took_s: float, ok: bool) -> None:  # noqa: FBT001 - `CallListener`
        call_hooks(self._trip_hooks, RoundTrip(self.route, "sink", "deliver", items, took_s, ok))

    def _settle_unfinished(self, batch: Batch) -> list[Outcome]:
        """Return entries without a verdict to the source: after an error, or at a shutdown."""
        settled = [outcome for outcome in batch.outcomes if outcome is not None]
        if len(settled) == len(batch.outcomes):
            return settled
        reason = "this gateway is shutting down" if self._draining else "an unexpected error"
        left = [entry for entry in batch.entries if not entry.settled]
        # Claims of events that were not sent are released for the next worker.
        unsent = [_HandBack(entry, reason, 0, unsent=True) for entry in left if not entry.is_sent]
        self._claims.backlog.add(
            PendingWrite(release) for back in unsent for release in back.releases()
        )
        self._settle(left, Verdict.FAILED, reason=reason)
        unplanned = batch.outcomes.count(None)
        self.books.settle(Verdict.FAILED, unplanned)
        failed = Outcome(Verdict.FAILED, acknowledge=False, reason=reason)
        for index, outcome in enumerate(batch.outcomes):
            if outcome is None:
                batch.report(index, failed)
        return [failed if outcome is None else outcome for outcome in batch.outcomes]


class _SortedAnswers(Struct, frozen=True):
    """The sink's answers to several events, grouped by what happens next."""

    taken: list[BatchEntry]
    refused: list[BatchEntry]
    too_old: list[BatchEntry]
    back: "list[_HandBack]"
    lost_races: list[tuple[BatchEntry, Already | Lost]]


class _HandBack(Struct, frozen=True):
    """One event to return to the source: why, after what pause, and if the attempt counts."""

    entry: BatchEntry
    reason: str
    wait_ms: int
    unsent: bool

    def releases(self) -> list[Release]:
        entry = self.entry
        if entry.lease is None or entry.lease.lost:
            return []
        counted = entry.attempt - 1 if self.unsent else entry.attempt
        memo = entry.last_memo(entry.error or self.reason, counted)
        return [
            Release(key, entry.lease.token, self.wait_ms, entry.keep_ms, memo, self.unsent)
            for key in entry.lease.keys
        ]
