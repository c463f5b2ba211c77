"""
The order of things: claim, deliver, commit.

This is the only file that knows it. One batch goes through these steps:

    plan      what is each event the same as (rules), and which repeat each other here
    claim     take hold of the keys; what is known already ends here
    enter     newest-wins and quiet rules: take hold of the entity, compare
    deliver   send what we hold, while we hold it
    commit    after the sink's yes, and never before
    settle    one verdict per arrival, and the books balance

What must never happen, and where it is prevented:

* acknowledged while busy, failed or before the yes: `_settle` takes the acknowledgement
  from the verdict alone, and a verdict is given after its step.
* committed before the yes: `_commit` is called by `_took`, by `_bury` (after the dead
  letters are safe) and by `_drop` (there is nothing to send), by nobody else.
* sent without a live claim: `_still_ours` stands before every send.
* an error swallowed into an acknowledgement: what is unforeseen raises out of
  `process`, and its arrivals count as failed.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from msgspec import Struct

from oncebridge.books import Books
from oncebridge.clock import Clock, Dice, SystemDice, ms, system_clock
from oncebridge.dead import DeadLetters
from oncebridge.errors import DeadLetterError, StoreError, StoreUnavailable
from oncebridge.event import Event, Unreadable, read
from oncebridge.flight import Arrival, Batch, Flight, first_arrival, now_s, waves
from oncebridge.holds import Hold, Holds
from oncebridge.hooks import Decision, Hook, tell
from oncebridge.ledger import Ledger
from oncebridge.registers import Registers
from oncebridge.rules import Rule, RuleSet
from oncebridge.sender import send
from oncebridge.settings import Settings
from oncebridge.sink import Closed, Never, No, Sink, SinkAnswer, Unknown, Yes
from oncebridge.sinks.function import FunctionSink
from oncebridge.store import (
    Busy,
    Claim,
    ClaimAnswer,
    Duplicate,
    Fate,
    Memory,
    Mismatch,
    NoAnswer,
    Release,
    Store,
    Want,
)
from oncebridge.verdict import HANDED_BACK, Outcome, Verdict

_LOOK_AGAIN_S = 0.25  # most holds end well before their lease
_DROPPED = {Verdict.STALE: Fate.STALE, Verdict.UNCHANGED: Fate.UNCHANGED}
_FATES = {**_DROPPED, Verdict.DEAD: Fate.DEAD}


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
        route: str = "default",
        settings: Settings = Settings(),  # noqa: B008 - frozen
        hooks: Sequence[Hook] = (),
        clock: Clock = system_clock,
        dice: Dice | None = None,
    ) -> None:
        settings.check()
        self.books = Books()
        self.route = route
        self.rules = RuleSet(rules, namespace=route)
        self._store = store
        self._sink: Sink = FunctionSink(sink) if callable(sink) else sink
        self._dead = dead
        self._settings = settings
        self._hooks = tuple(hooks)
        self._clock = clock
        self._dice = dice or SystemDice()
        self._lease_ms = ms(settings.lease)
        self._holds = Holds(store, self.books, lease_ms=self._lease_ms)
        self._ledger = Ledger(store, self.books, self._dice)
        self._registers = Registers(self._ledger, self._holds, self.books, self._dice, settings)
        self._slots = asyncio.Semaphore(self._sink.concurrency)
        self._is_shadow = settings.mode == "shadow"
        self._fails_open = self._is_shadow or settings.on_store_outage == "deliver"
        self._refusals = 0  # sends in a row that the sink did not even take in
        self._outages = 0  # claims in a row that the store did not answer
        self._opened = False
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    # --- from outside ------------------------------------------------------------------

    async def process(
        self,
        arrivals: Sequence[Arrival],
        *,
        within: timedelta | None = None,
        patience: timedelta = timedelta(0),
    ) -> list[Outcome]:
        """
        Take a batch of arrivals and tell what became of each, in order.

        *within* is the time the caller has left: what cannot be sent by then is handed
        back. *patience* is how long to wait in place for a key that another worker
        holds, for callers to whom handing back is costly.
        """
        batch = Batch(arrivals, within, patience)
        self.books.arrive(len(arrivals))
        self._idle.clear()
        try:
            self._plan(batch)
            if not self._draining:
                await self._open_if_needed()
                await self._run(batch)
        finally:
            outcomes = self._settle_rest(batch)
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

    async def _open_if_needed(self) -> None:
        try:
            await self.open()
        except StoreUnavailable:
            if not self._fails_open:
                raise
            self.books.store_errors += 1

    async def drain(self, grace: timedelta = timedelta(seconds=25)) -> bool:
        """
        Stop taking work, finish what was sent, give the rest back.

        Tells whether all was finished within *grace*. A graceful stop costs no duplicate.
        """
        self._draining = True
        ends = now_s() + grace.total_seconds()
        try:
            async with asyncio.timeout_at(ends):
                await self._idle.wait()
        except TimeoutError:
            return False
        await self._ledger.backlog.settle(max(ends - now_s(), 0))
        return not len(self._ledger.backlog)

    async def aclose(self) -> None:
        """Close what was opened. Call `drain` first to finish what is under way."""
        self._draining = True
        await self._holds.aclose()
        await self._ledger.backlog.aclose()
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
        unkeyable = [f for f in batch.flights if f.plan is None or f.plan.action == "dead"]
        if self._is_shadow:
            # What is no event cannot be forwarded as one; all others are.
            unkeyable = [flight for flight in unkeyable if flight.plan is None]
        await self._bury(unkeyable, "unkeyable")
        for wave in waves([f for f in batch.flights if not f.settled]):
            await self._pass(wave)

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
            plan = None if isinstance(event, Unreadable) else self.rules.plan(event)
            batch.flights.append(Flight(batch, index, event, plan, now))

    async def _pass(self, wave: list[Flight]) -> None:
        """Take events that have nothing to do with each other through all steps."""
        bypassed = [flight for flight in wave if not flight.parts]
        for flight in bypassed:
            is_dead = flight.plan is not None and flight.plan.action == "dead"
            flight.on_yes = Verdict.DEAD if is_dead else Verdict.BYPASSED
        ready, waiting = await self._claim([flight for flight in wave if flight.parts])
        await self._deliver(bypassed + await self._enter(ready))
        while waiting:
            await self._ledger.pause(_LOOK_AGAIN_S)
            ready, waiting = await self._claim(waiting)
            await self._deliver(await self._enter(ready))
        await self._close_repeats(wave)

    # --- claim -------------------------------------------------------------------------

    async def _claim(self, flights: list[Flight]) -> tuple[list[Flight], list[Flight]]:
        """Take hold of the events' keys; give those to be sent, and those to wait for."""
        ready: list[Flight] = []
        waiting: list[Flight] = []
        known: list[Memory] = []
        while flights:
            again: list[Flight] = []
            lease_ms = flights[0].batch.lease_ms(self._lease_ms)
            sent = now_s()
            answers = await self._ask(flights, lease_ms)
            is_down = any(type(answer) is NoAnswer for answer in answers)
            self._outages = self._outages + 1 if is_down else 0
            for flight, answer in zip(flights, answers, strict=True):
                match answer:
                    case Claim():
                        self._hold(flight, answer, sent, lease_ms)
                        ready.append(flight)
                    case Duplicate():
                        flight.matched = answer.key
                        known += self._other_tiers(flight, answer)
                        self._would(flight, Verdict.DUPLICATE, ready, first=answer.memo)
                    case Busy() if flight.batch.is_patient() and not self._draining:
                        waiting.append(flight)
                    case Busy():
                        wait = self._jittered(answer.left_ms)
                        self._would(flight, Verdict.BUSY, ready, retry_after_ms=wait)
                    case Mismatch():
                        flight.clash(answer.key)
                        again.append(flight)
                    case NoAnswer():
                        self._outage(flight, answer.reason, ready)
            flights = again
        await self._ledger.remember(known)
        return await self._worth_sending(ready), waiting

    async def _ask(self, flights: list[Flight], lease_ms: int) -> Sequence[ClaimAnswer]:
        tokens = iter(self._dice.tokens(2 * len(flights)))
        explain = self._settings.explain
        return await self._ledger.claim(
            [
                Want(
                    flight.parts,
                    next(tokens),
                    next(tokens),
                    lease_ms,
                    flight.keep_ms,
                    flight.first_memo() if explain else b"",
                )
                for flight in flights
            ]
        )

    def _hold(self, flight: Flight, claim: Claim, sent: float, lease_ms: int) -> None:
        gives_up = sent + self._settings.max_hold.total_seconds()
        keys = tuple([held.key for held in claim.held])
        hold = Hold(keys, claim.token, sent + lease_ms / 1000, gives_up, flight.batch.latest())
        flight.take(claim, hold)
        self._holds.add(hold)
        if flight.attempt > 1:
            self.books.retried += 1

    def _other_tiers(self, flight: Flight, answer: Duplicate) -> list[Memory]:
        """Mark the further tiers of an event that its identifying key shows to be done."""
        if len(flight.parts) == 1 or answer.key != flight.parts[-1].key:
            return []
        return flight.memories(flight.parts[:-1], answer.fate, self._dice)

    def _would(
        self,
        flight: Flight,
        verdict: Verdict,
        ready: list[Flight],
        *,
        first: bytes = b"",
        retry_after_ms: int = 0,
    ) -> None:
        """End here with *verdict*; in shadow mode, forward all the same."""
        flight.known = first_arrival(first)
        if self._is_shadow:
            flight.on_yes = verdict
            ready.append(flight)
        else:
            self._settle(flight, verdict, retry_after_ms=retry_after_ms)

    def _outage(self, flight: Flight, reason: str, ready: list[Flight]) -> None:
        """Hold back what the store could not be asked about, or send it unprotected."""
        if self._fails_open:
            flight.unprotected = True
            ready.append(flight)
        else:
            reason = f"the store did not answer: {reason}"
            wait = self._backoff(self._outages)
            self._settle(flight, Verdict.FAILED, reason=reason, retry_after_ms=wait)

    async def _worth_sending(self, ready: list[Flight]) -> list[Flight]:
        """Take out what was tried too often, and conflicts that are not to be sent."""
        most = self._settings.max_attempts
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

    async def _enter(self, flights: list[Flight]) -> list[Flight]:
        """Take hold of the entities whose newest state the rules want to know."""
        entering = [f for f in flights if f.entity and f.claim is not None]
        if not entering:
            return flights
        batch = entering[0].batch
        entered = await self._registers.enter(
            entering,
            batch.lease_ms(self._lease_ms),
            lambda: self._is_shadow or self._draining or batch.is_over(),
        )
        if self._is_shadow:
            for flight, verdict in entered.outdated:
                flight.on_yes = verdict
            for flight, _ in entered.busy:
                flight.on_yes = Verdict.BUSY
            return flights
        await self._drop(entered.outdated)
        pause = self._backoff(1)
        await self._hand_back(
            [
                _Back(flight, "the store did not answer for the entity", pause, unsent=True)
                for flight in entered.unanswered
            ]
        )
        await self._hand_back(
            [
                _Back(flight, "another worker holds the entity", left, unsent=True)
                for flight, left in entered.busy
            ],
            verdict=Verdict.BUSY,
        )
        return [flight for flight in flights if not flight.settled]

    # --- deliver -----------------------------------------------------------------------

    async def _deliver(self, flights: list[Flight]) -> None:
        """Send in the sink's own batches, several at once."""
        size = self._sink.batch
        if len(flights) > size:
            sends = [self._send(flights[at : at + size]) for at in range(0, len(flights), size)]
            # All of them, also beside one that fails: none may run on behind our back.
            for error in await asyncio.gather(*sends, return_exceptions=True):
                if error is not None:
                    raise error
        elif flights:
            await self._send(flights)

    async def _send(self, flights: list[Flight]) -> None:
        """Send once, and deal with each answer."""
        async with self._slots:
            flights = await self._still_ours(flights)
            if not flights:
                return
            answers = await self._call(flights)
        taken: list[Flight] = []
        refused: list[Flight] = []
        back: list[_Back] = []
        for flight, answer in zip(flights, answers, strict=True):
            match answer:
                case Yes():
                    taken.append(flight)
                case Never():
                    flight.error = answer.reason
                    refused.append(flight)
                case _:
                    back.append(self._later(flight, answer))
        await self._took(taken)
        await self._bury(refused, "rejected")
        await self._hand_back(back)

    async def _still_ours(self, flights: list[Flight]) -> list[Flight]:
        """Keep what may be sent now: there is time, and the claim outlasts the send."""
        if self._draining:
            await self._hand_back_unsent(flights, "this gateway is shutting down")
            return []
        send_time = self._send_time(flights)
        if send_time <= 0:
            await self._hand_back_unsent(flights, "no time left to send")
            return []
        needed = now_s() + send_time + self._settings.margin.total_seconds()
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
        ours = [flight for flight in flights if flight.is_held_until(needed)]
        lost = [flight for flight in flights if not flight.is_held_until(needed)]
        await self._hand_back_unsent(lost, "the claim ran out before the send")
        return ours

    async def _call(self, flights: list[Flight]) -> Sequence[SinkAnswer]:
        """Call the sink; from now on the heartbeat ends with this attempt."""
        settings = self._settings
        timeout = self._send_time(flights)
        gives_up = now_s() + timeout + (settings.commit_budget + settings.margin).total_seconds()
        holds = [h for f in flights for h in (f.hold, f.register) if h is not None]
        for hold in holds:
            hold.give_up = gives_up
        return await send(
            self._sink,
            [flight.delivery(self.route) for flight in flights],
            timeout_s=timeout,
            # One lost hold must not break off the sends of others.
            holds=holds if len(flights) == 1 else (),
        )

    def _send_time(self, flights: list[Flight]) -> float:
        return flights[0].batch.send_time(self._settings.sink_timeout, self._settings.margin)

    def _later(self, flight: Flight, answer: Unknown | No | Closed) -> "_Back":
        """Decide when to try again what the sink did not take."""
        asked = min(max(answer.retry_after_ms, 0), ms(self._settings.max_backoff))
        if isinstance(answer, Unknown):
            self._refusals = 0
            self.books.ambiguous += 1
            flight.maybe = True
            flight.error = answer.reason
            wait = max(self._backoff(flight.attempt), asked)
            return _Back(flight, answer.reason, wait, unsent=False)
        # The sink's fault, not the event's: it does not count as an attempt, and the pause
        # grows with the sink's refusals.
        self._refusals += 1
        wait = max(self._backoff(self._refusals), asked)
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
        if not flights:
            return
        self._refusals = 0
        self.books.forwarded += len(flights)
        for flight in flights:
            flight.forwarded = True
            if flight.unprotected:
                self.books.unprotected += 1
                self._ledger.backlog.owe(
                    [*flight.memories(flight.parts, Fate.DELIVERED, self._dice)]
                )
        try:
            await self._raise_registers(flights)
            await self._commit(flights, Fate.DELIVERED)
        except asyncio.CancelledError:
            # Nobody waits for the answer any more, but the sink has the event.
            self._ledger.backlog.owe(
                [
                    commit
                    for flight in flights
                    if flight.claim
                    for commit in flight.commits(Fate.DELIVERED)
                ]
            )
            raise
        for flight in flights:
            self._settle(flight, flight.on_yes)

    async def _raise_registers(self, flights: list[Flight]) -> None:
        """Write down the newest states; what shadow mode would have dropped is none."""
        raised = [f for f in flights if f.register and f.on_yes not in _DROPPED]
        left = [f for f in flights if f.register and f.on_yes in _DROPPED]
        await self._ledger.release(
            [r for flight in left for r in self._registers.give_back(flight, flight.on_yes)]
        )
        await self._registers.raise_all(raised, self._lease_ms)

    async def _commit(self, flights: Iterable[Flight], fate: Fate) -> None:
        """Mark keys done, within the commit budget or else behind the acknowledgement."""
        claimed = [flight for flight in flights if flight.claim is not None]
        if not claimed:
            return
        ends = now_s() + self._settings.commit_budget.total_seconds()
        batch = claimed[0].batch
        await self._ledger.commit(
            [commit for flight in claimed for commit in flight.commits(fate)],
            ends if batch.ends is None else min(ends, batch.ends),
        )
        now = now_s()
        self.books.late_commits += sum([f.hold is not None and now > f.hold.ends for f in claimed])

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
            for flight in flights:
                self._settle(flight, verdict)

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
                flight,
                Verdict.CONFLICT if flight.clashed else Verdict.DEAD,
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
            releases += one.releases(remember=self._settings.explain)
        await self._ledger.release(releases)
        for one in back:
            if one.flight.is_lost:
                self._settle(
                    one.flight,
                    Verdict.BUSY,
                    reason="another worker took over",
                    retry_after_ms=self._lease_ms,
                )
            else:
                # A little later than the release, or the source would come too early.
                wait = self._jittered(one.wait_ms) if one.wait_ms else 0
                self._settle(one.flight, verdict, reason=one.reason, retry_after_ms=wait)

    async def _close_repeats(self, wave: list[Flight]) -> None:
        """Give the repeats within the batch the fate of the one that went first."""
        memories: list[Memory] = []
        forward: list[Flight] = []
        apart: list[Flight] = []
        for leader in wave:
            if not leader.repeats:
                continue
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
                if self._is_shadow:
                    is_busy = outcome.verdict is Verdict.BUSY
                    repeat.on_yes = Verdict.BUSY if is_busy else Verdict.DUPLICATE
                    forward.append(repeat)
                else:
                    self._settle(repeat, Verdict.DUPLICATE)
        await self._ledger.remember(memories)
        await self._deliver(forward)
        if apart:
            for turn in waves(apart):
                await self._pass(turn)

    def _settle_alike(self, flight: Flight, outcome: Outcome | None) -> None:
        if outcome is None:
            return  # an error is on its way out of `process`
        self._settle(
            flight,
            outcome.verdict,
            reason=outcome.reason,
            retry_after_ms=outcome.retry_after_ms,
        )

    def _settle(
        self,
        flight: Flight,
        verdict: Verdict,
        *,
        reason: str = "",
        retry_after_ms: int = 0,
    ) -> None:
        """Write the verdict down; each arrival gets exactly one."""
        if flight.settled:
            return
        if flight.hold is not None:
            self._holds.discard(flight.hold)
        if flight.register is not None:
            self._holds.discard(flight.register)
        plan = flight.plan
        outcome = Outcome(
            verdict,
            verdict not in HANDED_BACK or flight.forwarded,
            plan.rule.name if plan else "",
            plan.key if plan else b"",
            retry_after_ms,
            reason,
            flight.forwarded,
            flight.unprotected,
            flight.known,
        )
        flight.settled = True
        flight.batch.outcomes[flight.index] = outcome
        self.books.settle(verdict)
        if self._hooks:
            tell(self._hooks, Decision(self.route, flight.event, outcome))

    def _settle_rest(self, batch: Batch) -> list[Outcome]:
        """Hand back what has no verdict: there was an error, or we are shutting down."""
        if None not in batch.outcomes:
            return [outcome for outcome in batch.outcomes if outcome is not None]
        reason = "this gateway is shutting down" if self._draining else "an unforeseen error"
        for flight in batch.flights:
            if not flight.settled:
                self._settle(flight, Verdict.FAILED, reason=reason)
        unplanned = batch.outcomes.count(None)
        self.books.settle(Verdict.FAILED, unplanned)
        failed = Outcome(Verdict.FAILED, acknowledge=False, reason=reason)
        return [failed if outcome is None else outcome for outcome in batch.outcomes]


class _Back(Struct, frozen=True):
    """One event to hand back: why, after what pause, and whether the attempt counts."""

    flight: Flight
    reason: str
    wait_ms: int
    unsent: bool

    def releases(self, *, remember: bool) -> list[Release]:
        flight = self.flight
        if flight.hold is None or flight.hold.lost:
            return []
        counted = flight.attempt - 1 if self.unsent else flight.attempt
        error = flight.error or self.reason
        memo = flight.last_memo(error, counted) if remember or flight.maybe else None
        return [
            Release(key, flight.hold.token, self.wait_ms, flight.keep_ms, memo, self.unsent)
            for key in flight.hold.keys
        ]
