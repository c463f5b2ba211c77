"""
The list of the workers of a group, in one record of the store.

Each worker renews its entry every few seconds; an entry that is not renewed expires. Each worker
calculates its share from the same list. If lists differ for a moment, shares are uneven, but no
shard is read twice: each is claimed by its reader.

The record also has the time from which the group reads, as its first worker decided, and a
counter that tells the other workers to list the shards again.
"""

from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from oncebridge.base.clock import Dice
from oncebridge.events.key import make_key
from oncebridge.stores.api import Store
from oncebridge.stores.cell import Cells, Edit


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
        self._gone_ms = gone_ms
        self._keep_ms = keep_ms
        self._key = make_key("", b"roster", "kinesis", name, ())
        # An entry is renewed periodically, and may be renewed twice.
        self._cells = Cells(store, dice, waits_for_store=False, idempotent=True)
        self.workers: tuple[str, ...] = (worker,)
        """The workers at the last renewal, in order."""
        self.start_ms: int | None = None
        """The time from which to read, as the first worker decided; None until it is known."""
        self.news = 0
        """A changed number means: list the shards again."""
        self.now_ms = 0
        """The store's time at the last renewal."""

    async def renew(self, start_ms: int, *, has_news: bool = False) -> None:
        """Renew this worker's entry and read the others; *start_ms* is for a new group."""

        def renewed(found: _RosterRecord) -> _RosterRecord:
            seen_ms = found.seen_ms | {self._worker: self.now_ms}
            return _RosterRecord(found.start_ms, seen_ms, found.news + has_news)

        await self._edit(renewed, start_ms)

    async def leave(self) -> None:
        """Remove this worker's entry."""

        def left(found: _RosterRecord) -> _RosterRecord:
            seen_ms = {one: at for one, at in found.seen_ms.items() if one != self._worker}
            return _RosterRecord(found.start_ms, seen_ms, found.news)

        await self._edit(left, self.start_ms or 0)

    async def _edit(self, change: Callable[[_RosterRecord], _RosterRecord], start_ms: int) -> None:
        def changed(memo: bytes, now_ms: int) -> bytes:
            self.now_ms = now_ms
            return msgspec.json.encode(change(self._current(memo, start_ms)))

        after = _read(await self._cells.edit_one(self._key, Edit(changed, self._keep_ms)))
        self.workers = tuple(sorted(after.seen_ms))
        self.start_ms = after.start_ms
        self.news = after.news

    def _current(self, memo: bytes, start_ms: int) -> _RosterRecord:
        """Return the list without expired entries."""
        if not memo:
            return _RosterRecord(start_ms, {})
        try:
            found = _read(memo)
        except msgspec.MsgspecError:
            # Written by another version. Events that are read again are duplicates; none may be missed.
            return _RosterRecord(0, {})
        current = {
            one: at for one, at in found.seen_ms.items() if abs(self.now_ms - at) < self._gone_ms
        }
        return _RosterRecord(found.start_ms, current, found.news)


def share(workers: Sequence[str], worker: str, count: int) -> int:
    """Return how many of *count* are for *worker*; the first workers get the remainder."""
    each, left = divmod(count, len(workers))
    return each + (workers.index(worker) < left)
