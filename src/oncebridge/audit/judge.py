"""
Decide the verdict of each arrival as a gateway would, if every delivery succeeded at once.

A `Judge` takes the steps of the gateway (`oncebridge.engine.decide`) with its own store, which is
empty at first and uses the same transitions as the stores (`oncebridge.stores.transitions`). So
windows, tiers, conflicts and entities are the same as in a gateway; `tests/audit/test_judge.py`
compares the two. It is pure: arrivals go in, in their order, each with its time.

Arrivals that share no key do not affect each other, so there is one judge for each group. Expired
records are removed, as a store does: one group may be the whole recording of months.
"""

from typing import Final

from msgspec import Struct

from oncebridge.engine.decide import (
    DROPPED,
    Action,
    Policy,
    Step,
    after_claim,
    after_entity,
    first_step,
)
from oncebridge.engine.memos import NO_STATE, EntityState
from oncebridge.engine.verdict import Verdict
from oncebridge.events.rules import Plan
from oncebridge.stores import transitions as table
from oncebridge.stores.api import (
    Commit,
    Duplicate,
    Fate,
    Memory,
    Mismatch,
    Record,
    Reply,
    Want,
)

_LEASE_MS: Final = 1
_FEW: Final = 1_000
_TOKEN: Final = b"t" * 16
_POLICY: Final = Policy()
# Looking up a member of an enum is slow.
_CLAIM: Final = Action.CLAIM
_CLAIM_ENTITY: Final = Action.CLAIM_ENTITY
_SEND: Final = Action.SEND
_SETTLE: Final = Action.SETTLE
_FATES: Final = {Action.SEND: Fate.DELIVERED, Action.BURY: Fate.DEAD}


class Judgement(Struct, frozen=True, gc=False):
    """The verdict on one arrival."""

    verdict: Verdict
    first: int | None = None
    """The number of the arrival that it duplicates, or with which it conflicts."""
    delivered: bool = True


class _Entity(Struct, gc=False):
    """What is known about an entity: its state, its expiry, and the arrival that wrote it."""

    state: EntityState
    keep_until_ms: int
    number: int | None


_UNKNOWN: Final = _Entity(NO_STATE, 0, None)


class Judge:
    """Decides the verdicts of one group."""

    def __init__(self) -> None:
        self._records: dict[bytes, Record] = {}
        self._entities: dict[bytes, _Entity] = {}
        self._most = _FEW

    def judge(self, number: int, at_ms: int, plan: Plan) -> Judgement:
        """Return the verdict on the arrival *number*; numbers increase, and times never decrease."""
        if len(self._records) + len(self._entities) > self._most:
            self._forget(at_ms)
        records, memo = self._records, number.to_bytes(16, signed=True)
        step, first = first_step(plan, _POLICY), None
        while step.action is _CLAIM:
            assert step.plan is not None  # noqa: S101 - this step has one
            plan = step.plan
            want = Want(plan.parts, _TOKEN, memo, _LEASE_MS, plan.keep_ms, memo)
            found = [records.get(part.key) for part in plan.parts]
            answer, written = table.claim(found, want, at_ms)
            for record in written:
                records[record.key] = record
            if isinstance(answer, Duplicate):
                first = _number(answer.memo)
                self._remember(plan, answer, at_ms)
            elif isinstance(answer, Mismatch):
                first = _number(answer.memo)
            step = after_claim(plan, answer, _POLICY, is_conflict=first is not None)
        if step.action is _CLAIM_ENTITY:
            step, first = self._enter(plan, number, at_ms, first)
        if step.action is not _SETTLE:
            self._commit(plan, memo, _FATES.get(step.action) or DROPPED[step.verdict], at_ms)
        return Judgement(step.verdict, first, delivered=step.action is _SEND)

    def _forget(self, at_ms: int) -> None:
        """Remove expired records; only once there are twice as many, so that it costs little."""
        self._records = {
            key: record for key, record in self._records.items() if record.keep_until_ms > at_ms
        }
        self._entities = {
            key: known for key, known in self._entities.items() if known.keep_until_ms > at_ms
        }
        self._most = max(_FEW, 2 * (len(self._records) + len(self._entities)))

    def _commit(self, plan: Plan, generation: bytes, fate: Fate, at_ms: int) -> None:
        for part, span in zip(plan.parts, plan.spans, strict=True):
            asked = Commit(part.key, generation, fate, span.window_ms, span.hard_ms)
            _, after = table.commit(self._records.get(part.key), asked, at_ms)
            if after is not None:
                self._records[part.key] = after

    def _remember(self, plan: Plan, known: Duplicate, at_ms: int) -> None:
        """Mark the other tiers of a duplicate as done."""
        if known.key != plan.key:
            return
        for part, span in zip(plan.parts[:-1], plan.spans, strict=False):
            asked = Memory(part.key, known.memo, known.fate, span.window_ms, part.hash, known.memo)
            reply, after = table.remember(self._records.get(part.key), asked, at_ms)
            if reply is Reply.REMEMBERED and after is not None:
                self._records[part.key] = after

    def _enter(
        self, plan: Plan, number: int, at_ms: int, clash: int | None
    ) -> tuple[Step, int | None]:
        """
        Compare with the entity's newest state, and record this one.

        Return what follows, and the arrival that is the reason: *clash* has other content.
        """
        known = self._entities.get(plan.entity, _UNKNOWN)
        if at_ms >= known.keep_until_ms:
            known = _UNKNOWN
        step = after_entity(plan, known.state, at_ms, _POLICY, is_conflict=clash is not None)
        keep_until_ms = at_ms + plan.keep_ms
        if step.action is _SEND and not step.reason:
            state = known.state.after_delivery(plan, at_ms)
            self._entities[plan.entity] = _Entity(state, keep_until_ms, number)
            return step, clash
        if step.verdict is Verdict.UNCHANGED:
            state = known.state.after_unchanged(plan, at_ms)
            self._entities[plan.entity] = _Entity(state, keep_until_ms, known.number)
        return step, known.number


def _number(memo: bytes) -> int:
    return int.from_bytes(memo, signed=True)
