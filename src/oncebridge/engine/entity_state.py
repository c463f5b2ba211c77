"""
Newest wins, and unchanged within the quiet time: the register of an entity.

A register is a record that is never done. Its memo says which version and state of the
entity was delivered last. It is held from before the comparison until after the send, so
that no older state can reach the sink after a newer one: comparing first and sending
later, or writing the version down at the claim, both let that happen.
"""

import asyncio
import logging
from collections.abc import Sequence

from msgspec import Struct

from oncebridge.base.clock import Dice
from oncebridge.engine.batch import Flight, Register, why_no_version
from oncebridge.engine.claims import Ledger
from oncebridge.engine.counters import Books
from oncebridge.engine.leases import Hold, Holds
from oncebridge.engine.settings import Settings
from oncebridge.engine.verdict import Verdict
from oncebridge.events.key import Part
from oncebridge.stores.api import Busy, Claim, Release, Reply, Want

_log = logging.getLogger("oncebridge")

_LONG_RUNS = frozenset(20 * 10**n for n in range(8))
_LOOK_AGAIN_S = 0.25
_TRY_AGAIN_S = 0.1


class Entered(Struct):
    """How taking hold of the entities went."""

    outdated: list[tuple[Flight, Verdict]]
    """Stale or unchanged: not to be sent. In conflict: the version cannot be compared."""
    busy: list[tuple[Flight, int]]
    """Another worker holds the entity, for so many more milliseconds."""
    unanswered: list[Flight]


class Registers:
    """The registers of one gateway."""

    def __init__(
        self, ledger: Ledger, holds: Holds, books: Books, dice: Dice, settings: Settings
    ) -> None:
        self._ledger = ledger
        self._holds = holds
        self._books = books
        self._dice = dice
        self._settings = settings

    async def enter(self, flights: Sequence[Flight], lease_ms: int) -> Entered:
        """Take hold of the flights' entities, as far as they are free, and compare."""
        entered = Entered([], [], [])
        sent = asyncio.get_running_loop().time()
        answers = await self._ledger.claim(self._wants(flights, lease_ms))
        heard = asyncio.get_running_loop().time()
        for flight, answer in zip(flights, answers, strict=True):
            match answer:
                case Claim():
                    # From when it was heard: a slow claim must not move the store's time on.
                    flight.register_offset_ms = answer.now_ms - heard * 1000
                    verdict = self._compare(flight, answer, sent, lease_ms)
                    if verdict is not None:
                        entered.outdated.append((flight, verdict))
                case Busy():
                    entered.busy.append((flight, answer.left_ms))
                case _:
                    entered.unanswered.append(flight)
        return entered

    def _wants(self, flights: Sequence[Flight], lease_ms: int) -> list[Want]:
        tokens = iter(self._dice.tokens(2 * len(flights)))
        return [
            Want((Part(flight.entity),), next(tokens), next(tokens), lease_ms, flight.keep_ms)
            for flight in flights
        ]

    def _compare(self, flight: Flight, claim: Claim, sent: float, lease_ms: int) -> Verdict | None:
        gives_up = sent + self._settings.max_hold.total_seconds()
        register = Hold(claim, sent + lease_ms / 1000, gives_up, flight.batch.latest())
        flight.register = register
        self._holds.add([register])
        flight.state_before = Register.read(claim.held[0].memo)
        verdict = flight.state_before.judge(flight.plan, claim.now_ms)
        if verdict is Verdict.CONFLICT:
            flight.why = why_no_version(flight.state_before, flight.plan, claim.now_ms)
        return verdict

    def give_back(self, flight: Flight, verdict: Verdict | None = None) -> list[Release]:
        """
        Return the release of the entity; the caller sends it.

        An unchanged state is the newest all the same, so its version is recorded. A stale
        event leaves the end of the register where it was.
        """
        register, flight.register = flight.register, None
        if register is None:
            return []
        self._holds.discard([register])
        before, plan, now_ms = flight.state_before, flight.plan, self._now_ms(flight)
        memo, keep_ms = None, flight.keep_ms
        if verdict is Verdict.UNCHANGED:
            memo = before.noted(plan, now_ms).write()
        elif before.kind or before.state:
            keep_ms = before.left_ms(plan, now_ms)
        if verdict is Verdict.STALE:
            after = before.passed_over()
            memo = after.write()
            self._watch_stale(flight, after)
        return [Release(flight.entity, register.token, 0, keep_ms, memo, unsent=True)]

    def _watch_stale(self, flight: Flight, register: Register) -> None:
        """Warn when one entity has many stale events in a row: at 20, 200 and so on."""
        if register.stale not in _LONG_RUNS:
            return
        self._books.stale_runs += 1
        _log.warning(
            "oncebridge.stale_run",
            extra={
                "rule": flight.plan.rule.name,
                "entity": flight.entity.hex(),
                "stale": register.stale,
                "hint": "the newest version may be wrong; "
                f"oncebridge forget {flight.entity.hex()} clears it",
            },
        )

    @staticmethod
    def _now_ms(flight: Flight) -> int:
        """Return the store's time, as far as it is known since the register was claimed."""
        return int(asyncio.get_running_loop().time() * 1000 + flight.register_offset_ms)

    async def raise_all(self, flights: Sequence[Flight], lease_ms: int) -> None:
        """
        Write down the newest states, after the sink's yes and before the events' own commits.

        Where the hold was lost meanwhile, the register is claimed again: whoever took it may
        not know yet that this version was delivered. What cannot be written within the
        commit budget is given up: the delivery is safe, but an older state may pass later.
        """
        now_s = asyncio.get_running_loop().time
        ends = now_s() + self._settings.commit_budget.total_seconds()
        pending = [flight for flight in flights if flight.register is not None]
        if pending and pending[0].batch.ends is not None:
            ends = min(ends, pending[0].batch.ends)
        while pending:
            releases = [self.raised(flight) for flight in pending]
            answers = await self._ledger.release(releases, owe=False)
            fenced: list[Flight] = []
            unanswered: list[Flight] = []
            for flight, answer in zip(pending, answers, strict=True):
                if answer is Reply.RELEASED or answer is Reply.FENCED:
                    self._holds.discard([flight.register])
                    flight.register = None
                if answer is Reply.FENCED:
                    fenced.append(flight)
                elif answer is not Reply.RELEASED:
                    unanswered.append(flight)
            pending = fenced + unanswered
            if pending and now_s() >= ends:
                self._books.registers_behind += len(pending)
                await self._ledger.release([self.raised(flight) for flight in unanswered])
                return
            if fenced:
                missed = await self._retake(fenced, lease_ms, ends)
                self._books.registers_behind += len(missed)
                pending = [flight for flight in pending if flight not in missed]
            if unanswered:
                await self._ledger.pause(_TRY_AGAIN_S)

    async def _retake(self, flights: list[Flight], lease_ms: int, ends: float) -> list[Flight]:
        """Take hold of entities again, waiting until *ends*; give those that it came to nothing."""
        missed: list[Flight] = []
        while True:
            entered = await self.enter(flights, lease_ms)
            missed += entered.unanswered
            flights = [flight for flight, _ in entered.busy]
            if not flights or asyncio.get_running_loop().time() >= ends:
                return missed + flights
            left_s = min(left for _, left in entered.busy) / 1000
            await self._ledger.pause(min(left_s, _LOOK_AGAIN_S))

    def raised(self, flight: Flight) -> Release:
        """Return the entity back with the state that was delivered; the caller sends it."""
        assert flight.register is not None  # noqa: S101 - the caller checked
        after = flight.state_before.raised(flight.plan, self._now_ms(flight))
        return Release(
            flight.entity,
            flight.register.token,
            keep_ms=flight.keep_ms,
            memo=after.write(),
            unsent=True,
        )
