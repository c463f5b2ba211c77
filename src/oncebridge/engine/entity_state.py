"""
Newest-wins and quiet rules: the record of an entity.

The record of an entity is never done. Its memo has the version and state of the entity that was
delivered last. It is claimed from before the comparison until after the send, so that no older
state can reach the sink after a newer one: comparing first and sending later, or recording the
version at the claim, would both allow that.
"""

import asyncio
import logging
from collections.abc import Sequence

from msgspec import Struct

from oncebridge.base.clock import Dice
from oncebridge.engine.batch import BatchEntry
from oncebridge.engine.claims import RetryingStore
from oncebridge.engine.counters import Books
from oncebridge.engine.decide import Policy, Step, after_entity
from oncebridge.engine.leases import Lease, Leases
from oncebridge.engine.memos import EntityState, why_incomparable
from oncebridge.engine.settings import Settings
from oncebridge.engine.verdict import Verdict
from oncebridge.stores.api import Busy, Claim, Release, Reply, Wants, folded

_log = logging.getLogger("oncebridge")

_LONG_RUNS = frozenset(20 * 10**n for n in range(8))
_LOOK_AGAIN_S = 0.25
_TRY_AGAIN_S = 0.1


class ClaimedEntities(Struct):
    """The result of claiming entities."""

    claimed: list[tuple[BatchEntry, Step]]
    """What follows from the entity's newest state."""
    busy: list[tuple[BatchEntry, int]]
    """Another worker holds the entity, for so many more milliseconds."""
    unanswered: list[BatchEntry]


class EntityStates(Struct, eq=False):
    """Claims, compares and records the states of entities, for one gateway."""

    claims: RetryingStore
    leases: Leases
    books: Books
    dice: Dice
    settings: Settings
    policy: Policy

    async def claim(self, entries: Sequence[BatchEntry], lease_ms: int) -> ClaimedEntities:
        """Claim the entities of *entries*, as far as they are free, and compare."""
        found = ClaimedEntities([], [], [])
        sent = asyncio.get_running_loop().time()
        token, generation = self.dice.tokens(2)
        answers = await self.claims.claim(
            Wants(
                [entry.entity for entry in entries],
                token,
                generation,
                lease_ms,
                folded([entry.keep_ms for entry in entries]),
            )
        )
        heard = asyncio.get_running_loop().time()
        for entry, answer in zip(entries, answers, strict=True):
            match answer:
                case Claim():
                    # From the time of the answer: a slow claim must not move the store's time on.
                    entry.store_offset_ms = answer.now_ms - heard * 1000
                    found.claimed.append((entry, self._compare(entry, answer, sent, lease_ms)))
                case Busy():
                    found.busy.append((entry, answer.left_ms))
                case _:
                    found.unanswered.append(entry)
        return found

    def _compare(self, entry: BatchEntry, claim: Claim, sent: float, lease_ms: int) -> Step:
        held = claim.held[0]
        entry.entity_lease = Lease(
            {entry.entity: entry.row},
            claim.token,
            held.generation,
            sent + lease_ms / 1000,
            sent + self.settings.max_hold.total_seconds(),
            entry.batch.latest,
        )
        self.leases.add(entry.entity_lease, entry.batch.loop)
        entry.state_before = EntityState.read(held.memo)
        step = after_entity(
            entry.plan,
            entry.state_before,
            claim.now_ms,
            self.policy,
            is_conflict=entry.is_conflict,
        )
        if step.verdict is Verdict.CONFLICT:
            entry.why = why_incomparable(entry.state_before, entry.plan, claim.now_ms)
        return step

    def release_of(self, entry: BatchEntry, verdict: Verdict | None = None) -> list[Release]:
        """
        Return the release of the entity; the caller sends it.

        An unchanged state is the newest, too, so its version is recorded. A stale event does not
        prolong the record.
        """
        entity_lease, entry.entity_lease = entry.entity_lease, None
        if entity_lease is None:
            return []
        self.leases.discard([entity_lease])
        before, plan, now_ms = entry.state_before, entry.plan, self._now_ms(entry)
        memo, keep_ms = None, entry.keep_ms
        if verdict is Verdict.UNCHANGED:
            memo = before.after_unchanged(plan, now_ms).write()
        elif before.kind or before.state:
            keep_ms = before.left_ms(plan, now_ms)
        if verdict is Verdict.STALE:
            after = before.after_stale()
            memo = after.write()
            self._warn_of_stale_run(entry, after)
        return [Release(entry.entity, entity_lease.token, 0, keep_ms, memo, unsent=True)]

    def _warn_of_stale_run(self, entry: BatchEntry, state: EntityState) -> None:
        """Warn when one entity has many stale events in a row: at 20, 200 and so on."""
        if state.stale not in _LONG_RUNS:
            return
        self.books.stale_runs += 1
        _log.warning(
            "oncebridge.stale_run",
            extra={
                "rule": entry.plan.rule.name,
                "entity": entry.entity.hex(),
                "stale": state.stale,
                "hint": "the newest version may be wrong; "
                f"oncebridge forget {entry.entity.hex()} clears it",
            },
        )

    @staticmethod
    def _now_ms(entry: BatchEntry) -> int:
        """Return the store's time, reckoned from the claim of the entity."""
        return int(asyncio.get_running_loop().time() * 1000 + entry.store_offset_ms)

    async def record_delivered(self, entries: Sequence[BatchEntry], lease_ms: int) -> None:
        """
        Record the newest states, after the sink's yes and before the events' own commits.

        If the lease was lost meanwhile, the entity is claimed again: the worker that took it over
        may not know that this version was delivered. A state that cannot be recorded within the
        commit budget is given up: the delivery is safe, but an older state may be delivered later.
        """
        now_s = asyncio.get_running_loop().time
        ends = now_s() + self.settings.commit_budget.total_seconds()
        pending = [entry for entry in entries if entry.entity_lease is not None]
        if pending and pending[0].batch.ends is not None:
            ends = min(ends, pending[0].batch.ends)
        while pending:
            releases = [self.delivered_release(entry) for entry in pending]
            answers = await self.claims.release(releases, retry_later=False)
            fenced: list[BatchEntry] = []
            unanswered: list[BatchEntry] = []
            for entry, answer in zip(pending, answers, strict=True):
                if answer is Reply.RELEASED or answer is Reply.FENCED:
                    self.leases.discard([entry.entity_lease])
                    entry.entity_lease = None
                if answer is Reply.FENCED:
                    fenced.append(entry)
                elif answer is not Reply.RELEASED:
                    unanswered.append(entry)
            pending = fenced + unanswered
            if pending and now_s() >= ends:
                self.books.registers_behind += len(pending)
                await self.claims.release([self.delivered_release(entry) for entry in unanswered])
                return
            if fenced:
                missed = await self._claim_again(fenced, lease_ms, ends)
                self.books.registers_behind += len(missed)
                pending = [entry for entry in pending if entry not in missed]
            if unanswered:
                await self.claims.pause(_TRY_AGAIN_S)

    async def _claim_again(
        self, entries: list[BatchEntry], lease_ms: int, ends: float
    ) -> list[BatchEntry]:
        """Claim entities again, waiting until *ends*; return the entries that got no claim."""
        missed: list[BatchEntry] = []
        while True:
            found = await self.claim(entries, lease_ms)
            missed += found.unanswered
            entries = [entry for entry, _ in found.busy]
            if not entries or asyncio.get_running_loop().time() >= ends:
                return missed + entries
            left_s = min(left for _, left in found.busy) / 1000
            await self.claims.pause(min(left_s, _LOOK_AGAIN_S))

    def delivered_release(self, entry: BatchEntry) -> Release:
        """Return the release of the entity with the state that was delivered; the caller sends it."""
        assert entry.entity_lease is not None  # noqa: S101 - the caller checked
        after = entry.state_before.after_delivery(entry.plan, self._now_ms(entry))
        return Release(
            entry.entity,
            entry.entity_lease.token,
            keep_ms=entry.keep_ms,
            memo=after.write(),
            unsent=True,
        )
