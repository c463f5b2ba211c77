"""
Claims whose parts are on different servers of a cluster.

No script can read all of them. So this process decides, and writes part by part, on the condition
that each has not changed since it was read (`oncebridge.stores.conditional`).

The times of a record are by the clock of its server. They are converted to one common time when
the record is read, and back when it is written. So the time that a lease has left counts, not
what a clock shows.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec import Struct

from oncebridge.base.clock import Clock
from oncebridge.errors import StoreError
from oncebridge.stores.api import Column, NoAnswer, Record, spread
from oncebridge.stores.conditional import ConditionalBackend, Records, VersionedRecord
from oncebridge.stores.redis.scripts import (
    KeyBatch,
    decode_record,
    encode_record,
    encode_start,
    encode_swap,
)

RunScript = Callable[[str, KeyBatch], Awaitable[tuple[dict[int, Any], list[int]]]]
"""Run a script; return the outcomes that are not usual, and the times, as `RedisStore._run`."""


class _Version(Struct, frozen=True, gc=False):
    """The stored bytes, and the milliseconds to add to its server's time."""

    value: bytes
    shift_ms: int


class ClusterBackend(ConditionalBackend):
    """The records of a cluster, one by one; created for one call of the store."""

    def __init__(self, run_script: RunScript, clock: Clock) -> None:
        self._run_script = run_script
        self._clock = clock
        self._now_ms = 0

    def now_ms(self) -> int:
        self._now_ms = self._clock()
        return self._now_ms

    async def read(self, keys: Sequence[bytes]) -> list[VersionedRecord | NoAnswer | None]:
        values, times = await self._run_script("look", KeyBatch([*keys]))
        entries: list[VersionedRecord | NoAnswer | None] = [None] * len(keys)
        for at, value in values.items():
            if isinstance(value, StoreError):
                entries[at] = NoAnswer(str(value))
            else:
                shift = self._shift(times[at])
                record = decode_record(keys[at], value).shifted(shift)
                entries[at] = VersionedRecord(record, _Version(value, shift))
        return entries

    async def write(self, records: Records, before: Column[_Version | None]) -> list[Any]:
        items = [*zip(records, spread(before, len(records)), strict=True)]
        asked = [_swap_arguments(record, version, self._now_ms) for record, version in items]
        is_written, times = await self._swap(records.keys, asked)
        return [
            self._written(*item, time_ms) if done is True else done or None
            for item, done, time_ms in zip(items, is_written, times, strict=True)
        ]

    async def remove(
        self, keys: Sequence[bytes], before: Sequence[_Version]
    ) -> list[bool | NoAnswer]:
        asked = [encode_swap(version.value, b"", 0) for version in before]
        return (await self._swap(keys, asked))[0]

    async def _swap(
        self, keys: Sequence[bytes], asked: Sequence[bytes]
    ) -> tuple[list[bool | NoAnswer], list[int]]:
        unusual, times = await self._run_script("swap", KeyBatch([*keys], asked))
        answers: list[bool | NoAnswer] = [True] * len(keys)
        for at, one in unusual.items():
            answers[at] = NoAnswer(str(one)) if isinstance(one, StoreError) else False
        return answers, times

    def _written(self, record: Record, before: _Version | None, time_ms: int) -> _Version:
        """Return what the server has stored, exactly."""
        if before is not None:
            return _Version(_value(record, before), before.shift_ms)
        there = record.shifted(time_ms - self._now_ms)
        return _Version(encode_record(there), self._shift(time_ms))

    def _shift(self, time_ms: int) -> int:
        return self._clock() - time_ms


def _swap_arguments(record: Record, before: _Version | None, now_ms: int) -> bytes:
    if before is None:
        keep_ms = record.keep_until_ms - record.until_ms
        return encode_start(encode_record(record), record.until_ms - now_ms, keep_ms)
    value = _value(record, before)
    return encode_swap(before.value, value, decode_record(record.key, value).keep_until_ms)


def _value(record: Record, before: _Version) -> bytes:
    """Return the bytes to store for *record*, in its server's time."""
    return encode_record(record.shifted(-before.shift_ms))
