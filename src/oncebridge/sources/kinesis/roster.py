"""
The list of the workers of a group, in one record of the store.

Each worker renews its entry every few seconds; an entry that is not renewed expires. Each worker
calculates its share from the same list. If lists differ for a moment, shares are uneven, but no
shard is read twice: each is claimed by its reader.

The record also has the time from which the group reads, as its first worker decided, and a
counter that tells the other workers to list the shards again.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from oncebridge.base.clock import Dice
from oncebridge.sources.checkpoint import Checkpoint, CheckpointTaken
from oncebridge.stores.api import Store

_LEASE_MS: Final = 5000
_TRIES: Final = 10
_PAUSE_S: Final = 0.1


class _RosterRecord(Struct, frozen=True, array_like=True):
    start_ms: int
    seen_ms: dict[str, int]
    news: int = 0


_read = msgspec.json.Decoder(_RosterRecord).decode


class Roster:
    """The list of the workers that share *name*; this process is *worker*."""

    def __init__(
        self, store: Store, name: str, worker: str, *, dice: Dice, gone_ms: int, keep_ms: int
    ) -> None:
        self._worker = worker
        self._dice = dice
        self._gone_ms = gone_ms
        self._checkpoint = Checkpoint(
            store, "roster", name, dice=dice, lease_ms=_LEASE_MS, keep_ms=keep_ms
        )
        self.workers: tuple[str, ...] = (worker,)
        """The workers at the last renewal, in order."""
        self.start_ms: int | None = None
        """The time from which to read, as the first worker decided; None until it is known."""
        self.news = 0
        """A changed number means: list the shards again."""

    @property
    def now_ms(self) -> int:
        """The store's time at the last renewal."""
        return self._checkpoint.taken_ms

    async def renew(self, start_ms: int, *, has_news: bool = False) -> None:
        """Renew this worker's entry and read the others; *start_ms* is for a new group."""
        found = await self._take(start_ms)
        seen_ms = found.seen_ms | {self._worker: self._checkpoint.taken_ms}
        await self._put_back(_RosterRecord(found.start_ms, seen_ms, found.news + has_news))

    async def leave(self) -> None:
        """Remove this worker's entry."""
        found = await self._take(self.start_ms or 0)
        seen_ms = {one: at for one, at in found.seen_ms.items() if one != self._worker}
        await self._put_back(_RosterRecord(found.start_ms, seen_ms, found.news))

    async def _take(self, start_ms: int) -> _RosterRecord:
        """Claim the list and return it without expired entries."""
        memo = await self._memo()
        if not memo:
            return _RosterRecord(start_ms, {})
        try:
            found = _read(memo)
        except msgspec.MsgspecError:
            # Written by another version. Events that are read again are duplicates; none may be missed.
            return _RosterRecord(0, {})
        now_ms = self._checkpoint.taken_ms
        there = {one: at for one, at in found.seen_ms.items() if abs(now_ms - at) < self._gone_ms}
        return _RosterRecord(found.start_ms, there, found.news)

    async def _memo(self) -> bytes:
        for _ in range(_TRIES):
            try:
                return await self._checkpoint.take()
            except CheckpointTaken:  # by another worker, for a moment
                await asyncio.sleep(_PAUSE_S * (0.5 + self._dice.fraction()))
        return await self._checkpoint.take()

    async def _put_back(self, changed: _RosterRecord) -> None:
        await self._checkpoint.release(msgspec.json.encode(changed))
        self.workers = tuple(sorted(changed.seen_ms))
        self.start_ms = changed.start_ms
        self.news = changed.news


def share(workers: Sequence[str], worker: str, count: int) -> int:
    """Return how many of *count* are for *worker*; the first workers get the remainder."""
    each, left = divmod(count, len(workers))
    return each + (workers.index(worker) < left)
