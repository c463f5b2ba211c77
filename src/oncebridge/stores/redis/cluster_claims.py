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
from msgspec.structs import replace

from oncebridge.base.clock import Clock
from oncebridge.errors import StoreError
from oncebridge.stores.api import NoAnswer, Record
from oncebridge.stores.conditional import (
    ChangeAnswer,
    RecordChange,
    RecordChanged,
    RecordDiffers,
    VersionedRecord,
    change_in_turn,
)
from oncebridge.stores.redis.scripts import (
    KeyBatch,
    decode_record,
    encode_record,
    encode_start,
    encode_swap,
)

RunScript = Callable[[str, KeyBatch], Awaitable[tuple[dict[int, Any], list[int]]]]
"""Run a script; return the outcomes that are not usual, and the time of the server of each key."""

_DIFFERS = RecordDiffers()


class _Version(Struct, frozen=True, gc=False):
    """The stored bytes, the milliseconds to add to its server's time, and what it replaced."""

    value: bytes
    shift_ms: int
    before: VersionedRecord | None = None


class ClusterBackend:
    """The records of a cluster, one by one; created for one call of the store."""

    def __init__(self, run_script: RunScript, clock: Clock, *, is_shared_clock: bool) -> None:
        self._run_script = run_script
        self._clock = clock
        self._is_shared_clock = is_shared_clock
        self._now_ms = 0

    def now_ms(self) -> int:
        self._now_ms = self._clock()
        return self._now_ms

    async def read(self, keys: Sequence[bytes]) -> list[VersionedRecord | NoAnswer | None]:
        values, times = await self._run_script("look", KeyBatch([*keys]))
        entries: list[VersionedRecord | NoAnswer | None] = []
        for at, key in enumerate(keys):
            value = values.get(at)
            if isinstance(value, StoreError):
                entries.append(NoAnswer(str(value)))
            elif value is None:
                entries.append(None)
            else:
                shift = self._shift(times[at])
                entries.append(
                    VersionedRecord(
                        _shifted(decode_record(key, value), shift), _Version(value, shift)
                    )
                )
        return entries

    async def change(self, changes: Sequence[RecordChange]) -> list[ChangeAnswer]:
        now = self._now_ms
        asked = [_swap_arguments(change, now) for change in changes]
        unusual, times = await self._run_script("swap", KeyBatch([c.key for c in changes], asked))
        answers: list[ChangeAnswer] = []
        for at, change in enumerate(changes):
            if isinstance(problem := unusual.get(at), StoreError):
                answers.append(NoAnswer(str(problem)))
            elif at in unusual:
                answers.append(_DIFFERS)
            else:
                answers.append(RecordChanged(self._written(change, times[at], now)))
        return answers

    async def change_together(
        self, groups: Sequence[Sequence[RecordChange]]
    ) -> list[list[RecordChanged] | RecordDiffers | NoAnswer]:
        return await change_in_turn(self, groups)

    def _written(self, change: RecordChange, time_ms: int, now_ms: int) -> VersionedRecord | None:
        """Return what the server has stored, exactly."""
        if change.after is None:
            return None
        if change.before is None:
            there = _shifted(change.after, time_ms - now_ms)
            return VersionedRecord(
                change.after, _Version(encode_record(there), self._shift(time_ms))
            )
        version: _Version = change.before.version
        value = _value(change.after, version)
        return VersionedRecord(change.after, _Version(value, version.shift_ms, change.before))

    def _shift(self, time_ms: int) -> int:
        return 0 if self._is_shared_clock else self._clock() - time_ms


def _swap_arguments(change: RecordChange, now_ms: int) -> bytes:
    after = change.after
    if change.before is None:
        assert after is not None  # noqa: S101 - a record that does not exist is not removed
        keep_ms = after.keep_until_ms - after.until_ms
        return encode_start(encode_record(after), after.until_ms - now_ms, keep_ms)
    version: _Version = change.before.version
    value = b"" if after is None else _value(after, version)
    keep_until_ms = decode_record(change.key, value).keep_until_ms if value else 0
    return encode_swap(version.value, value, keep_until_ms)


def _value(after: Record, version: _Version) -> bytes:
    """Return the bytes to store for *after*, in its server's time."""
    if version.before is not None and after is version.before.record:
        undone: _Version = version.before.version
        return undone.value  # exactly as it was
    return encode_record(_shifted(after, -version.shift_ms))


def _shifted(record: Record, by_ms: int) -> Record:
    if not by_ms:
        return record
    return replace(
        record,
        until_ms=record.until_ms + by_ms,
        keep_until_ms=record.keep_until_ms + by_ms,
        hard_until_ms=record.hard_until_ms + by_ms if record.hard_until_ms else 0,
    )
