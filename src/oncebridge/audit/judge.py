"""
Decide the verdict of each arrival as a gateway would, if every delivery succeeded at once.

A `Judge` has its own store, empty at first, and uses the same transitions as the stores
(`oncebridge.stores.transitions`), so that windows, tiers, conflicts and entities are the same as
in a gateway; `tests/audit/test_judge.py` compares the two. It is pure: arrivals go in, in their
order, each with its time.

Arrivals that share no key do not affect each other, so there is one judge for each group. Expired
records are removed, as a store does: one group may be the whole recording of months.
"""

from typing import Final

from msgspec import Struct

from oncebridge.audit.rows import ClaimedKey, ComplexPlan
from oncebridge.engine.memos import EntityState
from oncebridge.engine.verdict import Verdict
from oncebridge.events.key import Part, conflict_key
from oncebridge.events.rules import Plan, Rule, Span
from oncebridge.stores import transitions as table
from oncebridge.stores.api import (
    Claim,
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
_DROPPED: Final = {
    Verdict.STALE: Fate.STALE,
    Verdict.UNCHANGED: Fate.UNCHANGED,
    Verdict.CONFLICT: Fate.DEAD,
}


class Judgement(Struct, frozen=True, gc=False):
    """The verdict on one arrival."""

    verdict: Verdict
    first: int | None = None
    """The number of the arrival that it duplicates, or with which it conflicts."""
    delivered: bool = True


class _Entity(Struct, gc=False):
    """The state of an entity: its register, its expiry, and the arrival that wrote it."""

    register: EntityState
    keep_until_ms: int
    number: int | None


class Judge:
    """Decides the verdicts of one group."""

    def __init__(self) -> None:
        self._records: dict[bytes, Record] = {}
        self._entities: dict[bytes, _Entity] = {}
        self._most = _FEW

    def judge(self, number: int, at_ms: int, rule: Rule, plan: ComplexPlan) -> Judgement:
        """Return the verdict on the arrival *number*; numbers increase, and times never decrease."""
        if len(self._records) + len(self._entities) > self._most:
            self._forget(at_ms)
        keep_ms = max(part.window_ms for part in plan.parts)
        memo = number.to_bytes(16, signed=True)
        parts, clashed = plan.parts, False
        generation = memo
        while True:
            want = Want(
                tuple(Part(part.key, part.hash, part.slide_ms) for part in parts),
                _TOKEN,
                generation,
                _LEASE_MS,
                keep_ms,
                memo,
            )
            records = [self._records.get(part.key) for part in parts]
            answer, written = table.claim(records, want, at_ms)
            match answer:
                case Claim():
                    break
                case Duplicate():
                    self._write(written)
                    self._remember(parts, answer, at_ms)
                    return Judgement(Verdict.DUPLICATE, _number(answer.memo), delivered=False)
                case Mismatch():
                    clashed = True
                    known = _number(answer.memo)
                    parts = [_in_conflict(part, answer.key) for part in parts]
                case _:  # pragma: no cover - there is no other holder
                    raise AssertionError(answer)
        self._write(written)
        if clashed and rule.on_conflict != "deliver":
            fate = Fate.DEAD if rule.on_conflict == "dead" else Fate.DROPPED
            self._commit(parts, generation, fate, at_ms)
            return Judgement(Verdict.CONFLICT, known, delivered=False)
        if plan.entity:
            verdict, because = self._enter(plan, rule, number, at_ms, keep_ms)
            if verdict is not None:
                # A version that cannot be compared is a conflict.
                is_sent = verdict is Verdict.CONFLICT and rule.on_conflict == "deliver"
                fate = Fate.DELIVERED if is_sent else _DROPPED[verdict]
                self._commit(parts, generation, fate, at_ms)
                return Judgement(verdict, because, delivered=is_sent)
        self._commit(parts, generation, Fate.DELIVERED, at_ms)
        if clashed:
            return Judgement(Verdict.CONFLICT, known)
        return Judgement(Verdict.DELIVERED)

    def _forget(self, at_ms: int) -> None:
        """Remove expired records; only once there are twice as many, so that it costs little."""
        self._records = {
            key: record for key, record in self._records.items() if record.keep_until_ms > at_ms
        }
        self._entities = {
            key: known for key, known in self._entities.items() if known.keep_until_ms > at_ms
        }
        self._most = max(_FEW, 2 * (len(self._records) + len(self._entities)))

    def _write(self, records: list[Record]) -> None:
        for record in records:
            self._records[record.key] = record

    def _commit(self, parts: list[ClaimedKey], generation: bytes, fate: Fate, at_ms: int) -> None:
        for part in parts:
            asked = Commit(part.key, generation, fate, part.window_ms, part.hard_ms)
            _, after = table.commit(self._records.get(part.key), asked, at_ms)
            if after is not None:
                self._records[part.key] = after

    def _remember(self, parts: list[ClaimedKey], known: Duplicate, at_ms: int) -> None:
        """Mark the other tiers of a duplicate as done."""
        if len(parts) == 1 or known.key != parts[-1].key:
            return
        for part in parts[:-1]:
            asked = Memory(part.key, known.memo, known.fate, part.window_ms, part.hash, known.memo)
            reply, after = table.remember(self._records.get(part.key), asked, at_ms)
            if reply is Reply.REMEMBERED and after is not None:
                self._records[part.key] = after

    def _enter(
        self, plan: ComplexPlan, rule: Rule, number: int, at_ms: int, keep_ms: int
    ) -> tuple[Verdict | None, int | None]:
        """Compare with the entity's newest state, and record this one."""
        known = self._entities.get(plan.entity)
        if known is None or at_ms >= known.keep_until_ms:
            known = _Entity(EntityState(), 0, None)
        spans = (Span(keep_ms, 0),)
        asked = Plan(rule, "deduplicate", (), spans, version=plan.version, state=plan.state)
        verdict = known.register.judge(asked, at_ms)
        because = known.number
        if verdict is Verdict.UNCHANGED:
            register = known.register.after_unchanged(asked, at_ms)
            self._entities[plan.entity] = _Entity(register, at_ms + keep_ms, known.number)
        elif verdict is None:
            register = known.register.after_delivery(asked, at_ms)
            self._entities[plan.entity] = _Entity(register, at_ms + keep_ms, number)
        return verdict, because


def _in_conflict(part: ClaimedKey, key: bytes) -> ClaimedKey:
    if part.key != key:
        return part
    return ClaimedKey(
        conflict_key(key, part.hash), part.hash, part.slide_ms, part.window_ms, part.hard_ms
    )


def _number(memo: bytes) -> int:
    return int.from_bytes(memo, signed=True)
