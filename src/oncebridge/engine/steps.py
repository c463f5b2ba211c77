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

* acknowledged while busy, failed or before the yes: `Outcomes.settle` takes the acknowledgement
  from the verdict, which is known after its step, or from the sink's yes.
* committed before the yes: `_commit` is called by `_record_success`, by `_send_to_dead_letters` (after the dead
  letters are stored) and by `_drop` (there is nothing to send), and by no other; `_defer_commits`
  is for commits of these that could not be recorded in time. A sink in the store's own database
  gets the commits with the events (`_joint_delivery`) and writes both or neither.
* sent without a live claim: `Sender.start` runs `_confirm_claims` before every send.
* an error swallowed into an acknowledgement: an unexpected error raises out of
  `process`, and its arrivals count as failed.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from math import inf
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.base.clock import Clock, Dice, SystemDice, ms, system_clock
from oncebridge.dead_letters.api import DeadLetters
from oncebridge.dead_letters.copies import count_copies
from oncebridge.engine.backlog import PendingWrite
from oncebridge.engine.batch import Batch, BatchEntry, now_s
from oncebridge.engine.breaker import Blame, Breaker
from oncebridge.engine.claims import RetryingStore, timed
from oncebridge.engine.counters import Books
from oncebridge.engine.decide import DROPPED, Action, Policy, Step, after_claim, first_step
from oncebridge.engine.entity_state import EntityStates
from oncebridge.engine.hooks import Hook, Tracer, TripHook
from oncebridge.engine.leases import Lease, Leases
from oncebridge.engine.memos import first_arrival
from oncebridge.engine.opening import Opening
from oncebridge.engine.ordering import EntityQueues, waves
from oncebridge.engine.outcomes import Outcomes
from oncebridge.engine.rate_limit import RateLimit
from oncebridge.engine.sends import SINK_DOWN, Sender
from oncebridge.engine.settings import DEFAULT_ROUTE, Settings
from oncebridge.engine.sink_answers import Backoff, HandBack, SinkAnswers, SortedAnswers
from oncebridge.engine.verdict import First, Outcome, Verdict
from oncebridge.errors import DeadLetterError, DeadLetterRefused
from oncebridge.events.event import Event
from oncebridge.events.rules import Rule, RuleSet
from oncebridge.sinks.api import Already, Delivery, Joint, Lost, Sink, as_joint_sink
from oncebridge.sinks.function import FunctionSink
from oncebridge.stores.api import (
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
_OUTDATED: Final = frozenset({Verdict.STALE, Verdict.UNCHANGED})
_FATES: Final = {
    Verdict.STALE: Fate.STALE,
    Verdict.UNCHANGED: Fate.UNCHANGED,
    Verdict.DEAD: Fate.DEAD,
}
_ANY_OTHER_EVENT = b"any"  # a key that no event has
_TAKEN_OVER = "another worker took over"
_NOT_RECORDED = "another event with the same key was delivered and is not recorded yet"


class Steps:
    """The steps of a batch, for one route; the arguments are explained at `Gateway`."""

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
        self._sink = FunctionSink(sink) if callable(sink) else sink
        self.rules = RuleSet(
            rules,
            namespace=route,
            ordered=settings.order == "entity",
            about=getattr(self._sink, "by_entity", False),
            window=settings.window,
        )
        self._dead = dead
        self.settings = settings
        self._hooks = tuple(hooks)
        self._trip_hooks = tuple(trip_hooks)
        self._tracer = tracer
        self._clock = clock
        self._dice = dice or SystemDice()
        self._lease_ms = ms(settings.lease)
        self._max_hold_s = settings.max_hold.total_seconds()
        self._commit_budget_s = settings.commit_budget.total_seconds()
        self._policy = Policy.of(settings, has_dead_letters=dead is not None)
        self._is_shadow = self._policy.is_shadow
        self._fails_open = self._policy.sends_without_store
        claims = timed(store, route, self._trip_hooks) if trip_hooks else store
        self._leases = Leases(claims, self.books, lease_ms=self._lease_ms)
        self._claims = RetryingStore(claims, self.books, self._dice)
        self._entities = EntityStates(
            self._claims, self._leases, self.books, self._dice, settings, self._policy
        )
        self._settle = Outcomes(route, self.books, self._leases, self._hooks).settle
        self._joint = as_joint_sink(self._sink, store)
        self.sink_breaker = Breaker(settings.breaker, self._dice)
        self.store_breaker = Breaker(settings.breaker, self._dice)
        self._opening = Opening([self._sink, dead, store], self.store_breaker, self.books)
        self._entity_queues: EntityQueues | None = {} if settings.order == "entity" else None
        self._rate_limit = RateLimit(settings.rate or inf)
        self._sender = Sender(
            self._sink,
            self._joint,
            route=route,
            settings=settings,
            leases=self._leases,
            joint_delivery=self._joint_delivery,
            breaker=self.sink_breaker,
            rate_limit=self._rate_limit,
            books=self.books,
            trip_hooks=self._trip_hooks,
        )
        if settings.rate:
            from oncebridge.engine import shared_rate_limit  # noqa: PLC0415 - most have no rate

            self._sender.rate_share = shared_rate_limit.RateShare(
                store,
                route,
                settings.rate,
                clock=clock,
                dice=self._dice,
                changed=self._sender.wake_all,
                is_open=self._fails_open,
            )
        self._backoff = Backoff(settings, self._dice)
        self._answers = SinkAnswers(
            give_up_after=settings.give_up_after,
            books=self.books,
            breaker=self.sink_breaker,
            blame=Blame(self.sink_breaker),
            rate_limit=self._rate_limit,
            backoff=self._backoff,
            may_give_up=dead is not None,
        )
        self.is_paused = False
        self.records_lost_ms = 0
        """When the store lost its records, by its clock (see `Epoch`); 0 if it did not."""

    # --- is it worth the effort? ---------------------------------------------------------

    def unavailable_s(self) -> float:
        """Return for how many seconds more events would only be returned; 0 if they are accepted."""
        if self.is_paused or self._sender.is_draining:
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
        rate = limit.rate(now)
        busy_s = limit.pause_s(now) + (self._sender.waiting / rate if rate else 0.0)
        return max(busy_s - _ENOUGH_QUEUED_S, _LEAST_PAUSE_S) if busy_s > _ENOUGH_QUEUED_S else 0.0

    def _sink_unavailable_s(self, now: float) -> float:
        # While only one event has failed, any other may be tried, to find out which is at fault.
        return self.sink_breaker.left_s(now, _ANY_OTHER_EVENT)

    # --- claim, deliver, commit ----------------------------------------------------------

    async def _run(self, batch: Batch) -> None:
        settled, unsendable = [], []
        for row, entry in batch.entries.items():
            if first_step(entry.plan, self._policy).action is Action.SETTLE:
                settled.append(row)
            elif entry.is_undeliverable:
                unsendable.append(row)
        rows: Sequence[int] = range(len(batch.events))
        if settled or unsendable:
            self._settle(batch, settled, Verdict.DISCARDED)
            left_out = {*settled, *unsendable}
            rows = [row for row in rows if row not in left_out]
        if not unsendable:
            for wave in waves(batch, rows):
                if batch.turns or self.is_paused or self.sink_breaker.is_open:
                    await self._process_when_due(batch, wave)
                elif wave:
                    await self._process_wave(batch, wave)
            return
        # At the same time: the dead letters may be slow, and they need no sink.
        done = await asyncio.gather(
            self._process_waves(batch, unsendable, self._process_wave),
            self._process_waves(batch, rows, self._process_when_due),
            return_exceptions=True,
        )
        _raise_first(done)

    @staticmethod
    async def _process_waves(
        batch: Batch,
        rows: Sequence[int],
        process: Callable[[Batch, Sequence[int]], Awaitable[None]],
    ) -> None:
        for wave in waves(batch, rows):
            await process(batch, wave)

    async def _process_when_due(self, batch: Batch, wave: Sequence[int]) -> None:
        """
        Process a wave; if order is kept, events of an entity wait for earlier ones.

        Those that are queued after one that failed are handed back.
        """
        turns, entries = batch.turns, batch.entries
        own = {
            row: turns[entries[row].plan.entity]
            for row in wave
            if turns and row in entries and entries[row].plan.entity
        }
        behind = {row: turn for row, turn in own.items() if turn.ahead is not None}
        for rows in [row for row in wave if row not in behind], [*behind]:
            for turn in [behind[row] for row in rows if row in behind]:
                left_s = None if batch.ends is None else batch.ends - batch.now()
                await turn.wait_for_previous(left_s)
            failed = [row for row in rows if row in own and own[row].failed]
            for row in failed:
                why = "an earlier event of the same entity is not delivered yet"
                self._hand_back_unclaimed(batch, row, why, self._backoff.after_ms(1))
            await self._process_if_sink_up(batch, [r for r in rows if batch.outcomes[r] is None])

    async def _process_if_sink_up(self, batch: Batch, rows: Sequence[int]) -> None:
        """Process a wave; while the sink is down, hand it back, except one event that tries the sink."""
        breaker = self.sink_breaker
        while rows and breaker.is_open and not self.is_paused:
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
        if not self.is_paused and not breaker.is_open:
            if rows:
                await self._process_wave(batch, rows)
            return
        why = "paused by an operator" if self.is_paused else "the sink is down"
        for row in rows:
            wait_s = _PAUSED_S if self.is_paused else breaker.left_s(now_s(), batch.key_of(row))
            wait = self._backoff.jittered_ms(int(wait_s * 1000))
            self._hand_back_unclaimed(batch, row, why, wait)

    async def _process_wave(self, batch: Batch, rows: Sequence[int]) -> None:
        """Take events that share no key and no entity through all steps."""
        bypassed: list[int] = []
        if batch.entries:
            for row in rows:
                entry = batch.entries.get(row)
                if entry is not None and not entry.plan.parts:
                    entry.success_verdict = first_step(entry.plan, self._policy).verdict
                    bypassed.append(row)
            if bypassed:
                unkeyed = {*bypassed}
                rows = [row for row in rows if row not in unkeyed]
        ready, waiting = await self._claim(batch, rows)
        if batch.entries:
            await self._claim_entities_and_deliver(batch, bypassed + ready)
        else:
            await self._deliver(batch, ready)
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
        found = _Claimed()
        while rows:
            if self._claims.backlog.pending:
                rows = self._settle_unrecorded_duplicates(batch, rows, found.ready)
                if not rows:
                    break
            lease_ms = self._lease_ms
            if batch.ends is not None:
                lease_ms = self._leases.lease_ms(batch.latest, batch.now())
            token, generation = self._dice.tokens(2)
            wants = batch.wants(rows, token, generation, lease_ms, memos=self.settings.explain)
            sent = batch.now()
            ends, give_up = sent + lease_ms / 1000, sent + self._max_hold_s
            answers = await self._ask_store(wants)
            now_ms, heard = answers.now_ms, batch.now()
            lease = Lease(
                {}, token, generation, ends, give_up, batch.latest, now_ms, heard, batch.leases
            )
            rows = self._sort_claims(batch, rows, answers, lease, found)
            if known := found.known:
                found.known = {}
                self._settle(batch, known, Verdict.DUPLICATE, firsts=known)
                await self._count_copies(batch, known)
        ready = found.ready
        if batch.entries:
            await self._claims.remember(found.memories)
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
        entries, each = batch.entries, answers.each
        held: list[int] = []
        # If the store lost records, events may have been delivered before, and each is looked at.
        if not self.records_lost_ms:
            held = [
                r for r, a in zip(rows, each, strict=True) if type(a) is int and r not in entries
            ]
        if len(held) < len(rows):
            is_held = {*held}
            for at, row in enumerate(rows):
                if row in is_held:
                    continue
                answer = each[at]
                if type(answer) is Duplicate and row not in entries and not self._is_shadow:
                    found.known[row] = first_arrival(answer.memo)
                elif self._take_answer(batch.entry(row), answers[at], lease, found):
                    again.append(row)
        if held:
            keys = batch.keys
            lease.keys = dict(zip(map(keys.__getitem__, held), held, strict=True))
            leases = batch.leases
            for row in held:
                leases[row] = lease
            self._leases.add(lease, batch.loop)
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
                self._leases.add(own, batch.loop)
                self.books.retried += entry.attempt > 1
                if self.records_lost_ms:
                    lost_for_ms = answer.now_ms - self.records_lost_ms
                    entry.unprotected = lost_for_ms < entry.keep_ms
            case Duplicate():
                entry.mark_duplicate(answer.key, first_arrival(answer.memo))
                if len(entry.plan.parts) > 1 and answer.key == entry.key:
                    others = entry.memories(entry.plan.parts[:-1], answer.fate, self._dice)
                    found.memories.extend(others)
            case Busy() if batch.is_patient() and not self._sender.is_draining:
                found.waiting.append(row)
                return False
        step = after_claim(entry.plan, answer, self._policy, is_conflict=entry.is_conflict)
        match step.action:
            case Action.CLAIM:
                assert step.plan is not None  # noqa: S101 - this step has one
                entry.plan, entry.is_conflict = step.plan, True
                entry.success_verdict = Verdict.CONFLICT
                return True
            case Action.SETTLE:
                found.known[row] = None
            case Action.RETURN:
                self._hand_back_unanswered(batch, row, answer)
            case _:
                entry.next_step = step
                entry.unprotected = entry.unprotected or step.is_unprotected
                if not isinstance(answer, Claim | NoAnswer):
                    entry.success_verdict = step.verdict
                found.ready.append(row)
        return False

    def _hand_back_unanswered(self, batch: Batch, row: int, answer: ClaimAnswer) -> None:
        """Return an event whose claim was refused for now, or not answered."""
        if isinstance(answer, NoAnswer):
            reason = f"the store did not answer: {answer.reason}"
            self._hand_back_until_store_recovers(batch, row, reason)
        elif isinstance(answer, Busy):
            wait = self._backoff.jittered_ms(answer.left_ms)
            self._settle(batch, [row], Verdict.BUSY, retry_after_ms=wait)

    def _settle_unrecorded_duplicates(
        self, batch: Batch, rows: Sequence[int], ready: list[int]
    ) -> Sequence[int]:
        """
        Settle duplicates of events that are delivered but not recorded yet; return the rest.

        Only this process knows of them. Other content under the same key waits until the store
        can distinguish the two.
        """
        backlog = self._claims.backlog
        now = now_s()
        rest: list[int] = []
        for row in rows:
            (*_, part), _ = batch.parts_of(row)
            # An event that was delivered as a conflict is known by the key it was sent with.
            found = backlog.delivered(batch.sent_as(row), now) or backlog.delivered(part.key, now)
            is_same = found and not (found.hash and part.hash and found.hash != part.hash)
            if found and is_same:
                batch.entry(row).mark_duplicate(part.key, found.first)
            if not found or self._forwards_anyway(batch, row):
                (ready if is_same else rest).append(row)
            elif is_same:
                self._settle(batch, [row], Verdict.DUPLICATE)
            else:
                self._hand_back_until_store_recovers(batch, row, _NOT_RECORDED)
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
            keep_ms = ms(self.settings.window)
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
        if {*map(type, answers.each)} == {NoAnswer}:
            breaker.failed(now_s())
        elif breaker.failures:
            breaker.succeeded()
        return answers

    def _hand_back_until_store_recovers(self, batch: Batch, row: int, reason: str) -> None:
        left_s = self.store_breaker.left_s(now_s())
        wait = max(self._backoff.after_ms(self.store_breaker.level), int(left_s * 1000))
        self._settle(batch, [row], Verdict.FAILED, reason=reason, retry_after_ms=wait)

    async def _settle_unsendable(self, batch: Batch, ready: list[int]) -> list[int]:
        """Settle events that are not to be sent although they are claimed; return the rest."""
        buried: dict[str, list[BatchEntry]] = {}
        dropped: list[tuple[BatchEntry, Verdict]] = []
        for row in ready:
            entry = batch.entries.get(row)
            if entry is None or (step := entry.next_step) is None:
                continue
            if step.action is Action.BURY:
                buried.setdefault(step.reason, []).append(entry)
            elif step.action is Action.DROP:
                dropped.append((entry, step.verdict))
        for reason, entries in buried.items():
            await self._send_to_dead_letters(entries, reason)
        await self._drop(dropped)
        return [row for row in ready if batch.outcomes[row] is None]

    # --- entity ------------------------------------------------------------------------

    async def _claim_entities_and_deliver(self, batch: Batch, rows: list[int]) -> None:
        """
        Send; events whose entity is free do not wait for the others.

        A busy entity is waited for in place: returning its event would use up the source's
        receive counts.
        """
        entries = batch.entries
        entering = [entries[row] for row in rows if row in entries] if entries else []
        entering = [entry for entry in entering if entry.plan.entity and entry.held]
        if not entering:
            await self._deliver(batch, rows)
            return
        waits = {entry.row for entry in entering}
        ready = [row for row in rows if row not in waits]
        patient_until = batch.now() + self.settings.patience.total_seconds()
        if batch.ends is not None:
            patient_until = min(patient_until, batch.ends)
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
        lease_ms = self._leases.lease_ms(batch.latest, batch.now())
        found = await self._entities.claim(entries, lease_ms)
        await self._take_entities(found.claimed)
        if self._is_shadow:
            for entry, _ in found.busy:
                entry.success_verdict = Verdict.BUSY
            return [entry.row for entry in entries], [], 0
        ready = [entry.row for entry, step in found.claimed if step.action is Action.SEND]
        why, wait = "the store did not answer for the entity", self._backoff.after_ms(1)
        back = [HandBack(entry, why, wait) for entry in found.unanswered]
        if now_s() >= patient_until or self._sender.is_draining:
            why = "another worker holds the entity"
            back += [HandBack(entry, why, left, verdict=Verdict.BUSY) for entry, left in found.busy]
            found.busy = []
        await self._hand_back(back)
        left_s = min([left for _, left in found.busy], default=0) / 1000
        return ready, [entry for entry, _ in found.busy], min(left_s, _BUSY_POLL_S)

    async def _take_entities(self, claimed: Sequence[tuple[BatchEntry, Step]]) -> None:
        """Do what the decisions say for events whose entity is claimed, unless they are sent."""
        for entry, step in claimed:
            if step.action is not Action.DROP and step.verdict is not Verdict.DELIVERED:
                entry.success_verdict = step.verdict
        # If versions cannot be compared, the entity keeps its state, and need not be held.
        await self._claims.release(
            [r for entry, _ in claimed if entry.why for r in self._entities.release_of(entry)]
        )
        buried = [entry for entry, step in claimed if step.action is Action.BURY]
        await self._send_to_dead_letters(buried, "version")
        await self._drop([(e, step.verdict) for e, step in claimed if step.action is Action.DROP])

    # --- deliver -----------------------------------------------------------------------

    async def _deliver(self, batch: Batch, rows: Sequence[int]) -> None:
        """Send in batches of the sink's size, several at once; apply answers as they arrive."""
        if not rows:
            return
        sends = self._sender.open(batch, rows)
        applying: list[asyncio.Task[None]] = []
        is_last = False
        try:
            while not is_last:
                if sends.waiting and (unsent := await self._sender.start(sends)):
                    rows_left, why = unsent
                    wait = int(self.unavailable_s() * 1000) + 1 if why is SINK_DOWN else 0
                    await self._hand_back([HandBack(batch.entry(r), why, wait) for r in rows_left])
                    is_last = not (sends.waiting or sends.running or sends.answered)
                    continue
                if not (parcels := await sends.next()):
                    continue
                answers = self._answers.sort(batch, parcels)
                is_last = not (sends.waiting or sends.running or sends.answered)
                if is_last:
                    await self._apply_answers(answers)
                else:
                    # The other sends need not wait for these commits.
                    applying.append(asyncio.create_task(self._apply_answers(answers)))
        except BaseException:
            self._answers.sort(batch, self._sender.take_late_answers(sends))
            for task in applying:
                task.cancel()
            raise
        finally:
            self._sender.close(sends)
            try:
                # All of them, even if one fails: none may keep running.
                errors = await asyncio.gather(*applying, return_exceptions=True) if applying else ()
            finally:
                # If this task was cancelled, no caller waits for the answer, but the sink has
                # the event.
                outcomes = batch.outcomes
                if None in outcomes and (
                    owing := [r for r in rows if outcomes[r] is None and r in batch.forwarded]
                ):
                    self._defer_commits(batch, batch.commits(owing, Fate.DELIVERED), batch.now())
        if errors:
            _raise_first(errors)

    def _joint_delivery(self, batch: Batch, row: int, delivery: Delivery) -> Joint:
        """Return the delivery together with the commits that are written in the same transaction."""
        commits = tuple(batch.commits([row], Fate.DELIVERED))
        entry = batch.entries.get(row)
        if entry is None or entry.entity_lease is None or entry.success_verdict in _OUTDATED:
            return Joint(delivery, commits)
        return Joint(delivery, commits, (self._entities.delivered_release(entry),))

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
        wait = self._backoff.after_ms(1)
        await self._hand_back(
            [HandBack(entry, _TAKEN_OVER, wait, verdict=Verdict.BUSY) for entry in lost]
        )
        # Some of their keys may have been held here until now.
        self.books.lease_lost += sum([not entry.is_lost for entry in lost])

    # --- commit ------------------------------------------------------------------------

    async def _record_success(self, batch: Batch, rows: Sequence[int]) -> None:
        """Commit what the sink took. From here on the event is acknowledged, whatever happens."""
        self.sink_breaker.succeeded()
        self.books.forwarded += len(rows)
        entries = batch.entries
        special = [entries[row] for row in rows if row in entries] if entries else []
        if special:
            await self._record_unprotected_and_outdated(special)
        if self._joint is None:
            if with_state := [entry for entry in special if entry.entity_lease is not None]:
                await self._entities.record_delivered(with_state, self._lease_ms)
            await self._commit(batch, rows, Fate.DELIVERED)
        by_verdict: dict[tuple[Verdict, str], list[int]] = {}
        for entry in special:
            by_verdict.setdefault((entry.success_verdict, entry.why), []).append(entry.row)
        for (verdict, why), its in by_verdict.items():
            self._settle(batch, its, verdict, reason=why)
        if len(special) < len(rows):
            self._settle(batch, rows, Verdict.DELIVERED)

    async def _record_unprotected_and_outdated(self, entries: Sequence[BatchEntry]) -> None:
        """Record deliveries without a claim later, and those that shadow mode is to report now."""
        for entry in entries:
            if entry.unprotected:
                self.books.unprotected += 1
                if not entry.held:
                    memories = entry.memories(entry.plan.parts, Fate.DELIVERED, self._dice)
                    self._claims.backlog.add(entry.pending_writes(memories, entry.batch.now()))
        # Others have a state to record.
        outdated = [entry for entry in entries if entry.success_verdict in _OUTDATED]
        await self._claims.release(
            [
                r
                for entry in outdated
                for r in self._entities.release_of(entry, entry.success_verdict)
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
            its = [owed[part.key] for part in entry.plan.parts if part.key in owed]
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
        now = self._clock()
        letters = [entry.letter(reason, self.route, now) for entry in entries]
        try:
            if self._dead is None:
                raise DeadLetterRefused("none are configured")
            await self._dead.put(letters)
        except DeadLetterError as error:
            is_refused = isinstance(error, DeadLetterRefused)
            if is_refused and len(entries) > 1:
                for entry in entries:  # one at a time: the others may be accepted
                    await self._send_to_dead_letters([entry], reason)
                return
            wait = self._backoff.longest_ms if is_refused else self._backoff.after_ms(1)
            why = f"dead letters: {error}"
            await self._hand_back(
                [HandBack(entry, why, wait, unsent=not is_refused) for entry in entries]
            )
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

    async def _hand_back(self, back: Sequence[HandBack]) -> None:
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
                wait = self._lease_ms
                self._settle(batch, row, Verdict.BUSY, reason=_TAKEN_OVER, retry_after_ms=wait)
            else:
                # A little after the release, or the retry would find it busy.
                wait = self._backoff.jittered_ms(one.wait_ms) if one.wait_ms else 0
                self._settle(
                    batch,
                    row,
                    one.verdict,
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
            if outcome is None:
                continue  # `process` is about to raise
            if not outcome.acknowledge:
                self._settle(
                    batch,
                    leader.duplicates,
                    outcome.verdict,
                    reason=outcome.reason,
                    retry_after_ms=outcome.retry_after_ms,
                    blamed=outcome.blamed,
                )
                continue
            for row in leader.duplicates:
                duplicate = batch.entry(row)
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

    def _settle_unfinished(self, batch: Batch) -> list[Outcome]:
        """Return events without a verdict to the source: after an error, or at a shutdown."""
        reason = (
            "this gateway is shutting down" if self._sender.is_draining else "an unexpected error"
        )
        left = [
            row
            for row, outcome in enumerate(batch.outcomes)
            if outcome is None and (batch.terms[row] is not None or row in batch.entries)
        ]
        # Claims of events that were not sent are released for the next worker.
        unsent = [HandBack(batch.entry(row), reason, 0) for row in left if row not in batch.sent]
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

    ready: list[int] = []
    """Rows to send."""
    waiting: list[int] = []
    """Rows whose key another worker holds, and that are waited for."""
    known: dict[int, First | None] = {}
    """Rows of duplicates, and the arrivals that were delivered."""
    memories: list[Memory] = []
    """Further keys of known events."""


def _raise_first(errors: Iterable[object]) -> None:
    for error in errors:
        if isinstance(error, BaseException):
            raise error
