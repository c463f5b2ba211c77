"""
Who shares the work, written down in the store.

The workers of a group know each other by one record: each writes down every few seconds that
it is there, and an entry that is not renewed is gone. From the same list, each works out for
itself how much is its own. Lists that differ for a moment make the shares uneven, and nothing
worse: what keeps two from the same work is the claim on it.

The record also keeps what the first worker of the group decided for all that come after it:
from when on to read. And it counts the news that the others should look for.
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
    """The list of the workers that share *name*; this one's is *worker*."""

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
        """Those that were there at the last look, in order."""
        self.start_ms: int | None = None
        """From when on to read, as the first worker decided; None until it is known."""
        self.news = 0
        """Another number than before: somebody has news."""

    @property
    def now_ms(self) -> int:
        """The store's time at the last look."""
        return self._checkpoint.taken_ms

    async def renew(self, start_ms: int, *, has_news: bool = False) -> None:
        """Say that this worker is there, and see who else is; *start_ms* is for a new group."""
        found = await self._take(start_ms)
        seen_ms = found.seen_ms | {self._worker: self._checkpoint.taken_ms}
        await self._put_back(_RosterRecord(found.start_ms, seen_ms, found.news + has_news))

    async def leave(self) -> None:
        """Say that this worker is gone."""
        found = await self._take(self.start_ms or 0)
        seen_ms = {one: at for one, at in found.seen_ms.items() if one != self._worker}
        await self._put_back(_RosterRecord(found.start_ms, seen_ms, found.news))

    async def _take(self, start_ms: int) -> _RosterRecord:
        """Take hold of the list, and read those of it that are not gone."""
        memo = await self._memo()
        if not memo:
            return _RosterRecord(start_ms, {})
        try:
            found = _read(memo)
        except msgspec.MsgspecError:
            # Of another version. What was read before is a duplicate; nothing may be left out.
            return _RosterRecord(0, {})
        now_ms = self._checkpoint.taken_ms
        there = {one: at for one, at in found.seen_ms.items() if abs(now_ms - at) < self._gone_ms}
        return _RosterRecord(found.start_ms, there, found.news)

    async def _memo(self) -> bytes:
        for _ in range(_TRIES):
            try:
                return await self._checkpoint.take()
            except CheckpointTaken:  # by another worker, and for a moment only
                await asyncio.sleep(_PAUSE_S * (0.5 + self._dice.fraction()))
        return await self._checkpoint.take()

    async def _put_back(self, changed: _RosterRecord) -> None:
        await self._checkpoint.release(msgspec.json.encode(changed))
        self.workers = tuple(sorted(changed.seen_ms))
        self.start_ms = changed.start_ms
        self.news = changed.news


def share(workers: Sequence[str], worker: str, count: int) -> int:
    """Return how many of *count* are for *worker*; what cannot be shared goes to the first."""
    each, left = divmod(count, len(workers))
    return each + (workers.index(worker) < left)
