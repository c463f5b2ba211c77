"""
Which shards are to be read, and by whom: decisions, without a call to anybody.

A shard that was split or merged is read to its end before those that came out of it, so
that what has the same partition key stays in order. A parent that is not listed any more has
no records left.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from oncebridge.sources.checkpoint import CheckpointState
from oncebridge.sources.kinesis.stream import Position, Shard

_END: Final = "end"


class ShardProgress(Struct, frozen=True, array_like=True, omit_defaults=True):
    """How far a shard is read, as its checkpoint keeps it."""

    number: str = ""
    """The last sequence number up to which everything is final; empty: none is yet."""
    at_ms: int = 0
    """Up to when, by Kinesis's clock, everything that was put is final."""
    by: str = ""
    """The worker that goes on from here; nobody, where it gave the shard back."""

    @classmethod
    def read(cls, memo: bytes) -> "ShardProgress":
        """Read a checkpoint; one that another version wrote says nothing."""
        try:
            return _read_place(memo) if memo else cls()
        except msgspec.MsgspecError:
            return cls()

    def write(self) -> bytes:
        return msgspec.json.encode(self)

    @property
    def is_end(self) -> bool:
        """There is nothing more in this shard, and never will be."""
        return self.number == _END

    def position(self, start_ms: int) -> Position:
        """Return where to go on; a shard that nobody has begun is read from *start_ms* on."""
        return Position(after=self.number) if self.number else Position(at_ms=start_ms)


_read_place = msgspec.json.Decoder(ShardProgress).decode

END: Final = ShardProgress(number=_END)


def readable(shards: Sequence[Shard], ended: Collection[Shard]) -> list[Shard]:
    """Choose the shards that may be read now: not at their end, and their parents are."""
    unread = {shard.id for shard in shards if shard not in ended}
    return [
        shard
        for shard in shards
        if shard not in ended and not any(parent in unread for parent in shard.parents)
    ]


def is_free(seen: CheckpointState, now_ms: int, lease_ms: int) -> bool:
    """
    Return whether a shard looks as if nobody read it, from what its checkpoint shows.

    To save a place, a worker gives its hold back and takes it again: in between, the shard
    is not free for others, unless that worker has died there.
    """
    if seen.is_held:
        return seen.until_ms <= now_ms
    return not ShardProgress.read(seen.place).by or seen.until_ms + lease_ms <= now_ms


def choose(free: Sequence[Shard], count: int, workers: Sequence[str], worker: str) -> list[Shard]:
    """Choose *count* of *free*; each worker begins elsewhere, so that few want the same."""
    begin = len(free) * workers.index(worker) // len(workers)
    return [*free[begin:], *free[:begin]][:count]


def surplus(held: Mapping[Shard, object], count: int) -> list[Shard]:
    """Choose what to give back of what is *held*, beyond *count*."""
    return sorted(held)[max(count, 0) :]
