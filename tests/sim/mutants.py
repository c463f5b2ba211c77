"""
The ways people do it, and the ways we might have got it wrong: each must be convicted.

A simulation that lets one of these pass would let our own mistakes pass too.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from oncebridge import Gateway, Verdict, Yes
from oncebridge.flight import Flight
from oncebridge.sink import Joint, JointAnswer
from oncebridge.store import (
    Claim,
    ClaimAnswer,
    Commit,
    CommitAnswer,
    ExtendAnswer,
    Extension,
    Fate,
    Held,
    Memory,
    Release,
    ReleaseAnswer,
    Reply,
    Want,
)
from oncebridge.stores.memory import _name

from ..contract.broken_stores import CommitByKeyAlone, Faulty, NoExpiryCondition
from .world import JointSinkClient, Violation, World

_FOR_EVER_MS = 10**12


class MarkBefore(Faulty):
    """The key is marked when it is first seen; whatever fails after that is lost."""

    async def claim_one(self, want: Want) -> ClaimAnswer:
        answer = await super().claim_one(want)
        if isinstance(answer, Claim):
            window = want.keep_ms
            await self.commit(
                [Commit(h.key, h.generation, Fate.DELIVERED, window) for h in answer.held]
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

    async def commit(self, commits: Sequence[Commit]) -> list[CommitAnswer]:
        await self.remember([Memory(c.key, c.generation, c.fate, c.window_ms) for c in commits])
        return [Reply.COMMITTED] * len(commits)


class NoLease(Faulty):
    """A claim lasts until it is given back; a dead worker never does."""

    async def claim_one(self, want: Want) -> ClaimAnswer:
        return await super().claim_one(replace(want, lease_ms=_FOR_EVER_MS))

    async def extend(self, extensions: Sequence[Extension]) -> list[ExtendAnswer]:
        return await super().extend([replace(e, lease_ms=_FOR_EVER_MS) for e in extensions])


class UnfencedRelease(Faulty):
    """Whoever releases frees the key, whoever holds it and whatever became of it."""

    async def release(self, releases: Sequence[Release]) -> list[ReleaseAnswer]:
        for asked in releases:
            record = await self.look(asked.key)
            if record is not None:
                until = self._clock() + asked.delay_ms
                self.put(replace(record, token=b"", fate=None, until_ms=until))
        return [Reply.RELEASED] * len(releases)


class CommitBeforeDeliver(Gateway):
    """The right operations in the wrong order."""

    async def _still_ours(self, flights: list[Flight]) -> list[Flight]:
        await self._commit(flights, Fate.DELIVERED)
        return await super()._still_ours(flights)


class CommitApart(JointSinkClient):
    """The event is written with the store's leave, and the commit a moment later."""

    async def write(self, joint: Joint) -> JointAnswer:
        later = replace(joint, commits=(), releases=())
        if isinstance(answer := await super().write(later), Yes):
            await asyncio.sleep(0.01)
            await self._world.store.commit(joint.commits)
            await self._world.store.release(joint.releases)
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
