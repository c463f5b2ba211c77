"""
Which shards are read, and by which worker.

A shard that was split or merged is read to its end before its children, so that records with the
same partition key stay in order. A parent that is not listed any more has no records left.

The workers of a group are listed in one record of the store. Each renews its entry every few
seconds; an entry that is not renewed expires. Each worker calculates its share from the same list.
If lists differ for a moment, shares are uneven, but no shard is read twice: each is claimed by its
reader. The record also has the time from which the group reads, as its first worker decided, and
a counter that tells the other workers to list the shards again.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from oncebridge.base.clock import Dice
from oncebridge.events.key import make_key
from oncebridge.sources.kinesis.stream import Position, Shard
from oncebridge.stores.api import Record, Store
from oncebridge.stores.cell import Cells, Edit

_END: Final = "end"


class ShardProgress(Struct, frozen=True, array_like=True, omit_defaults=True):
    """The position in a shard, as its checkpoint records it."""

    number: str = ""
    """The sequence number up to which everything is final; empty if there is none yet."""
    at_ms: int = 0
    """The time, by Kinesis's clock, up to which all records are final."""
    by: str = ""
    """The worker that reads the shard; empty if it released the shard."""

    @classmethod
    def read(cls, memo: bytes) -> "ShardProgress":
        """Return the position that was read; an empty one if another version wrote it."""
        try:
            return _read_place(memo) if memo else cls()
        except msgspec.MsgspecError:
            return cls()

    def write(self) -> bytes:
        return msgspec.json.encode(self)

    @property
    def is_end(self) -> bool:
        """True if the shard is read to its end and gets no more records."""
        return self.number == _END

    def position(self, start_ms: int) -> Position:
        """Return where to continue; a shard that was never read is read from *start_ms* on."""
        return Position(after=self.number) if self.number else Position(at_ms=start_ms)


_read_place = msgspec.json.Decoder(ShardProgress).decode

END: Final = ShardProgress(number=_END)


def readable(shards: Sequence[Shard], ended: Collection[Shard]) -> list[Shard]:
    """Return the shards that may be read now: not ended, and their parents have ended."""
    unread = {shard.id for shard in shards if shard not in ended}
    return [
        shard
        for shard in shards
        if shard not in ended and not any(parent in unread for parent in shard.parents)
    ]


def is_free(checkpoint: Record | None, now_ms: int, lease_ms: int) -> bool:
    """
    Return True if no worker reads a shard, as far as the record of its checkpoint shows.

    To save a position, a worker releases the checkpoint and claims it again: in between, the
    shard is not free for others, unless that worker died there.
    """
    if checkpoint is None:
        return True
    if checkpoint.token:
        return checkpoint.until_ms <= now_ms
    is_left = not ShardProgress.read(checkpoint.memo).by
    return is_left or checkpoint.until_ms + lease_ms <= now_ms


def choose(free: Sequence[Shard], count: int, workers: Sequence[str], worker: str) -> list[Shard]:
    """Return *count* of *free*; each worker starts elsewhere, so that few want the same."""
    begin = len(free) * workers.index(worker) // len(workers)
    return [*free[begin:], *free[:begin]][:count]


def surplus(held: Mapping[Shard, object], count: int) -> list[Shard]:
    """Return the shards to release if more than *count* are *held*."""
    return sorted(held)[max(count, 0) :]


class _RosterRecord(Struct, array_like=True):
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

    async def leave(self) -> None:
        """Remove this worker's entry."""
        await self.renew(self.start_ms or 0, stays=False)

    async def renew(self, start_ms: int, *, has_news: bool = False, stays: bool = True) -> None:
        """Renew this worker's entry and read the others; *start_ms* is for a new group."""

        def changed(memo: bytes, now_ms: int) -> bytes:
            self.now_ms = now_ms
            found = self._current(memo, start_ms)
            found.seen_ms[self._worker] = now_ms
            if not stays:
                del found.seen_ms[self._worker]
            found.news += has_news
            return msgspec.json.encode(found)

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
        found.seen_ms = {
            one: at for one, at in found.seen_ms.items() if abs(self.now_ms - at) < self._gone_ms
        }
        return found


def share(workers: Sequence[str], worker: str, count: int) -> int:
    """Return how many of *count* are for *worker*; the first workers get the remainder."""
    each, left = divmod(count, len(workers))
    return each + (workers.index(worker) < left)
