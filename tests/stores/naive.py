"""
Stores that are right as long as nobody else is there.

They share a SQLite file, as the real one does; what they lack is the one atomic step.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from oncebridge.stores import transitions
from oncebridge.stores.api import (
    Claim,
    ClaimAnswer,
    ClaimAnswers,
    CommitAnswer,
    Commits,
    Record,
    Want,
    Wants,
)
from oncebridge.stores.sqlite.store import SQLiteStore, _write


class GetThenPut(SQLiteStore):
    """It looks first and writes then, as `get_item` and `put_item` do."""

    async def claim(self, wants: Wants) -> ClaimAnswers:
        keys = [part.key for want in wants for part in want.parts]
        found = dict(zip(keys, await self.peek(keys), strict=True))
        answers: list[ClaimAnswer] = []
        changed: list[Record] = []
        for want in wants:
            before = [found[part.key] for part in want.parts]
            answer, after = transitions.claim(before, want, await self.now_ms())
            answers.append(answer)
            changed += after
        await self._put(changed)
        return ClaimAnswers.of(wants, answers)

    async def commit(self, commits: Commits) -> list[CommitAnswer]:
        found = await self.peek([commit.key for commit in commits])
        now = await self.now_ms()
        decided = [transitions.commit(r, c, now) for r, c in zip(found, commits, strict=True)]
        await self._put([after for _, after in decided if after is not None])
        return [answer for answer, _ in decided]

    async def _put(self, records: Sequence[Record]) -> None:
        await asyncio.sleep(0)
        await self.file.change(_writing(records))


class GetThenPutLocked(GetThenPut):
    """The same behind a lock, which other processes know nothing of."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._lock = asyncio.Lock()

    async def claim(self, wants: Wants) -> ClaimAnswers:
        async with self._lock:
            return await super().claim(wants)

    async def commit(self, commits: Commits) -> list[CommitAnswer]:
        async with self._lock:
            return await super().commit(commits)


class PartByPart(SQLiteStore):
    """It takes hold of one part after the other, and keeps what it got in vain."""

    async def claim(self, wants: Wants) -> ClaimAnswers:
        return ClaimAnswers.of(wants, [await self._claim_parts(want) for want in wants])

    async def _claim_parts(self, want: Want) -> ClaimAnswer:
        held = []
        for part in want.parts:
            (answer,) = await super().claim(Wants.of([replace(want, parts=(part,))]))
            if not isinstance(answer, Claim):
                return answer
            held += answer.held
        return Claim(want.token, tuple(held), await self.now_ms())


def _writing(records: Sequence[Record]) -> Callable[[sqlite3.Connection], Any]:
    return lambda db: _write(db, records)
