"""
Decides which shards are read, and by which worker; makes no calls.

A shard that was split or merged is read to its end before its children, so that records with the
same partition key stay in order. A parent that is not listed any more has no records left.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from oncebridge.sources.checkpoint import CheckpointState
from oncebridge.sources.kinesis.stream import Position, Shard

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


def is_free(seen: CheckpointState, now_ms: int, lease_ms: int) -> bool:
    """
    Return True if no worker reads a shard, as far as its checkpoint shows.

    To save a position, a worker releases the checkpoint and claims it again: in between, the
    shard is not free for others, unless that worker died there.
    """
    if seen.is_held:
        return seen.until_ms <= now_ms
    return not ShardProgress.read(seen.place).by or seen.until_ms + lease_ms <= now_ms


def choose(free: Sequence[Shard], count: int, workers: Sequence[str], worker: str) -> list[Shard]:
    """Return *count* of *free*; each worker starts elsewhere, so that few want the same."""
    begin = len(free) * workers.index(worker) // len(workers)
    return [*free[begin:], *free[:begin]][:count]


def surplus(held: Mapping[Shard, object], count: int) -> list[Shard]:
    """Return the shards to release if more than *count* are *held*."""
    return sorted(held)[max(count, 0) :]
