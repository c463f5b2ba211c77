"""
The ways people do it, and the ways we might have got it wrong: each must be convicted.

A simulation that lets one of these pass would let our own mistakes pass too.
"""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from oncebridge import Gateway, Rule, Verdict, Yes
from oncebridge.base.clock import Dice
from oncebridge.engine.backlog import Backlog, PendingWrite
from oncebridge.engine.batch import Batch, BatchEntry
from oncebridge.engine.breaker import Blame
from oncebridge.engine.entity_state import EntityStates
from oncebridge.engine.sink_answers import SinkAnswers
from oncebridge.engine.verdict import First
from oncebridge.sinks.api import Delivery, Joint, JointAnswer, SinkAnswer, Unwell
from oncebridge.stores.api import (
    Claim,
    ClaimAnswer,
    Commit,
    CommitAnswer,
    Commits,
    ExtendAnswer,
    Extensions,
    Fate,
    Held,
    Memories,
    Memory,
    Release,
    ReleaseAnswer,
    Releases,
    Reply,
    Want,
)
from oncebridge.stores.memory import _name

from ..contract.broken_stores import CommitByKeyAlone, Faulty, NoExpiryCondition
from .world import JointSinkClient, SinkClient, Violation, World

_FOR_EVER_MS = 10**12


class MarkBefore(Faulty):
    """The key is marked when it is first seen; whatever fails after that is lost."""

    async def claim_one(self, want: Want) -> ClaimAnswer:
        answer = await super().claim_one(want)
        if isinstance(answer, Claim):
            window = want.keep_ms
            await self.commit(
                Commits.of(
                    [Commit(h.key, h.generation, Fate.DELIVERED, window) for h in answer.held]
                )
            )
        return answer


class GetThenPut(Faulty):
    """Look, and write a moment later: two that look together both win."""

    async def claim_one(self, want: Want) -> ClaimAnswer:
        probe = MemoryCopy(self, await self.records(want))
        answer = await probe.claim_one(want)
        if isinstance(answer, Claim):
            await asyncio.sleep(0.01)
            for record in await probe.records(want):
                self._write_any(record)
        return answer

    def _write_any(self, record: Any) -> None:
        name = _name(record.key)
        self._write(name, record, is_new=self._read(name, record.key) is None)


class MemoryCopy(Faulty):
    """A store of its own with what another one held at some moment."""

    def __init__(self, other: Faulty, records: Sequence[Any]) -> None:
        super().__init__(clock=other._clock)
        for record in records:
            GetThenPut._write_any(self, record)  # type: ignore[arg-type]


class MarkAfter(Faulty):
    """Nothing is written before the delivery; two copies in parallel both pass."""

    async def claim_one(self, want: Want) -> ClaimAnswer:
        known = await self.records(want)
        if any(r.fate is not None and r.until_ms > self._clock() for r in known):
            return await super().claim_one(want)
        held = tuple(Held(part.key, want.generation, 1, b"") for part in want.parts)
        return Claim(want.token, held, self._clock())

    async def commit(self, commits: Commits) -> list[CommitAnswer]:
        await self.remember(
            Memories.of([Memory(c.key, c.generation, c.fate, c.window_ms) for c in commits])
        )
        return [Reply.COMMITTED] * len(commits)


class NoLease(Faulty):
    """A claim lasts until it is given back; a dead worker never does."""

    async def claim_one(self, want: Want) -> ClaimAnswer:
        return await super().claim_one(replace(want, lease_ms=_FOR_EVER_MS))

    async def extend(self, extensions: Extensions) -> list[ExtendAnswer]:
        return await super().extend(
            Extensions.of([replace(e, lease_ms=_FOR_EVER_MS) for e in extensions])
        )


class UnfencedRelease(Faulty):
    """Whoever releases frees the key, whoever holds it and whatever became of it."""

    async def release(self, releases: Releases) -> list[ReleaseAnswer]:
        for asked in releases:
            record = await self.look(asked.key)
            if record is not None:
                until = self._clock() + asked.delay_ms
                self.put(replace(record, token=b"", fate=None, until_ms=until))
        return [Reply.RELEASED] * len(releases)


class CommitBeforeDeliver(Gateway):
    """The right operations in the wrong order."""

    async def _deliver(self, batch: Batch, rows: Sequence[int]) -> None:
        await self._commit(batch, rows, Fate.DELIVERED)
        await super()._deliver(batch, rows)


class BareHeader(Gateway):
    """The receiver is sent the key alone, whatever the content."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        assert isinstance(self._sink, SinkClient)
        self._deliver_as_asked, self._sink.deliver = self._sink.deliver, self._deliver_bare  # type: ignore[method-assign]

    async def _deliver_bare(self, deliveries: Sequence[Delivery]) -> list[SinkAnswer]:
        return await self._deliver_as_asked([replace(one, sent_as=b"") for one in deliveries])


class StaleRenews(Gateway):
    """A stale event proves that the entity lives, and so its newest version is kept longer."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._entities.__class__ = RenewedEntityStates


class RenewedEntityStates(EntityStates):
    def release_of(self, entry: BatchEntry, verdict: Verdict | None = None) -> list[Release]:
        if verdict is Verdict.STALE:
            entry.state_before = replace(entry.state_before, noted_ms=self._now_ms(entry))
        return super().release_of(entry, verdict)


class FarAheadIsNewest(Gateway):
    """An instant may be as far ahead of the clock as it likes."""

    def __init__(self, *, rules: Sequence[Rule], **parts: Any) -> None:
        latest = rules[0].latest and replace(rules[0].latest, ahead=timedelta(days=100_000))
        super().__init__(rules=[replace(rules[0], latest=latest)], **parts)


class BlindToDebts(Gateway):
    """What the store does not know was not delivered."""

    def _settle_unrecorded_duplicates(
        self, batch: Batch, rows: Sequence[int], ready: list[int]
    ) -> Sequence[int]:
        return rows


class ReleaseIsDelivery(Gateway):
    """Whatever is owed to the store is about an event that was delivered."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._claims.backlog.__class__ = CredulousBacklog


class CredulousBacklog(Backlog):
    def delivered(self, key: bytes, now: float) -> PendingWrite | None:
        for write in self.pending.values():
            if isinstance(write.asked, Release) and write.asked.key == key:
                return replace(write, first=First(None, 0))
        return super().delivered(key, now)


class EventIsToBlame(Gateway):
    """Each refusal counts as an attempt, also while the sink takes nothing at all."""

    is_blamed = True

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._answers.blame = FixedBlame(self.sink_breaker, is_blamed=self.is_blamed)


class SinkIsToBlame(EventIsToBlame):
    """No refusal counts, also while the sink takes all other events."""

    is_blamed = False


class FixedBlame(Blame, kw_only=True):
    is_blamed: bool

    def is_of(self, event: bytes, passed_before: int) -> bool:
        return self.is_blamed


class UnwellTookNothing(Gateway):
    """A sink in trouble has taken nothing, so the event was never delivered."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._answers.__class__ = UnwellIsNo


class UnwellIsNo(SinkAnswers):
    def plan_retry(self, entry: BatchEntry, answer: Any) -> Any:
        maybe = entry.maybe_delivered
        back = super().plan_retry(entry, answer)
        if isinstance(answer, Unwell):
            entry.maybe_delivered = maybe
        return back


class DrawReused(Gateway):
    """One token and one generation serve all claim calls of a batch."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._dice = DicePerTask(self._dice)


class DicePerTask:
    """The first pair of tokens of each task, again and again."""

    def __init__(self, dice: Dice) -> None:
        self._dice = dice
        self._drawn: WeakKeyDictionary[Any, list[bytes]] = WeakKeyDictionary()

    def tokens(self, count: int) -> list[bytes]:
        task = asyncio.current_task()
        if count != 2:
            return self._dice.tokens(count)
        if task not in self._drawn:
            self._drawn[task] = self._dice.tokens(2)
        return self._drawn[task]

    def fraction(self) -> float:
        return self._dice.fraction()


class CommitApart(JointSinkClient):
    """The event is written with the store's leave, and the commit a moment later."""

    async def write(self, joint: Joint) -> JointAnswer:
        later = replace(joint, commits=(), releases=())
        if isinstance(answer := await super().write(later), Yes):
            await asyncio.sleep(0.01)
            await self._world.store.commit(Commits.of(joint.commits))
            await self._world.store.release(Releases.of(joint.releases))
        return answer


MUTANTS: dict[str, dict[str, Any]] = {
    "mark before": {"make_store": MarkBefore},
    "get then put": {"make_store": GetThenPut},
    "no expiry condition": {"make_store": NoExpiryCondition},
    "commit before deliver": {"make_gateway": CommitBeforeDeliver},
    "mark after": {"make_store": MarkAfter},
    "no lease": {"make_store": NoLease},
    "failure swallowed": {
        "acknowledges": lambda outcome: outcome.acknowledge or outcome.verdict is Verdict.FAILED
    },
    "busy acknowledged": {
        "acknowledges": lambda outcome: outcome.acknowledge or outcome.verdict is Verdict.BUSY
    },
    "release unfenced": {"make_store": UnfencedRelease},
    "commit unfenced": {"make_store": CommitByKeyAlone},
    "joint sink that is not": {"make_joint_sink": CommitApart},
    "header without content": {"make_gateway": BareHeader},
    "stale renews the register": {"make_gateway": StaleRenews},
    "far ahead is newest": {"make_gateway": FarAheadIsNewest},
    "debts not looked at": {"make_gateway": BlindToDebts},
    "owed release is a delivery": {"make_gateway": ReleaseIsDelivery},
    "refusals always counted": {"make_gateway": EventIsToBlame},
    "refusals never counted": {"make_gateway": SinkIsToBlame},
    "unwell took nothing": {"make_gateway": UnwellTookNothing},
    "one draw for all claims of a batch": {"make_gateway": DrawReused},
}
"""One more, a worker's name as token, is convicted by a directed test of the store suite."""


def first_conviction(name: str, most: int, directory: Path) -> tuple[int, str] | None:
    """Run seeds until the mutant breaks a promise; tell which seed, and which promise."""
    for seed in range(most):
        try:
            World(seed, directory, **MUTANTS[name]).run()
        except Violation as violation:
            return seed, str(violation)
    return None
