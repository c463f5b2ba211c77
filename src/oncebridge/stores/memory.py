"""
The memory store: records in the memory of this process.

**Durability:** none; a restart forgets everything. **Clock:** this host's. **Outages:** none.
For tests, demos, and single processes that may forget on restart.

It is bounded: with *max_keys* records it refuses new keys. It never evicts, because an evicted
key would let a duplicate through without a trace.

Ten million done keys have to fit. So a done record is not an object with fields but 15 bytes
(`_pack`), stored under the first 120 bits of a hash of its key: two objects of 48 bytes each,
about 140 bytes per key in total. Records that are not done are few, and kept as they are.
"""

import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import repeat
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar

from msgspec import Struct
from msgspec.structs import astuple

from oncebridge.base.clock import Clock, system_clock
from oncebridge.base.options import Doc
from oncebridge.errors import ConfigError
from oncebridge.stores import transitions
from oncebridge.stores.api import (
    HELD,
    Claim,
    ClaimAnswer,
    ClaimAnswers,
    Columns,
    Commit,
    CommitAnswer,
    Commits,
    ExtendAnswer,
    Extension,
    Extensions,
    Fate,
    Memories,
    Memory,
    NoAnswer,
    Record,
    Release,
    ReleaseAnswer,
    Releases,
    RememberAnswer,
    Reply,
    Store,
    Want,
    Wants,
)

_Asked = TypeVar("_Asked", Commit, Release, Extension, Memory)
_Answer = TypeVar("_Answer")

_SHARDS = 256  # a dict of ten million keys blocks for half a second when it grows
_BUCKET_MS = 30_000
_STEP = 64
_COMMITTED: Final = Reply.COMMITTED


class MemoryOptions(Struct, frozen=True, kw_only=True):
    """Options of the memory store."""

    max_keys: Annotated[
        int, Doc("How many keys to keep at most; more are refused.", at_least=1)
    ] = 1_000_000


class MemoryStore(Store):
    """Keep at most *max_keys* records in this process."""

    Options: ClassVar = MemoryOptions

    def __init__(self, *, max_keys: int = 1_000_000, clock: Clock = system_clock) -> None:
        if max_keys < 1:
            raise ConfigError("max_keys", f"must be at least 1, not {max_keys}")
        self._max_keys = max_keys
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[bytes, Record] = {}
        """Records that are not done, by name."""
        self._names: dict[bytes, bytes] = {}
        """Their names by key, so that each name is computed and stored once."""
        self._done: list[dict[bytes, bytes]] = [{} for _ in range(_SHARDS)]
        self._count = 0
        self._calendar = _Calendar()

    @classmethod
    def from_url(cls, url: str, options: MemoryOptions | None = None) -> Self:
        """Open `memory:`."""
        if url != "memory:":
            raise ConfigError("", f"{url!r}: the address of the memory store is 'memory:'")
        return cls(max_keys=(options or MemoryOptions()).max_keys)

    def __len__(self) -> int:
        return self._count

    async def open(self) -> None:
        """Do nothing: there is nothing to connect to."""

    async def claim(self, wants: Wants) -> ClaimAnswers:
        with self._lock:
            now = self._clock()
            self._sweep(now, 2 * len(wants.keys) + _STEP)
            if wants.sizes is not None:
                return ClaimAnswers.of(wants, [self._claim(want, now) for want in wants])
            return ClaimAnswers(wants, self._claim_each(wants, now), now)

    async def commit(self, commits: Commits) -> list[CommitAnswer]:
        with self._lock:
            return self._commit(commits, self._clock())

    async def release(self, releases: Releases) -> list[ReleaseAnswer]:
        return self._each(transitions.release, releases)

    async def extend(self, extensions: Extensions) -> list[ExtendAnswer]:
        return self._each(transitions.extend, extensions)

    async def remember(self, memories: Memories) -> list[RememberAnswer]:
        return self._each(transitions.remember, memories)

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        with self._lock:
            return [self._read(self._name_of(key), key) for key in keys]

    async def forget(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            now = self._clock()
            answers = []
            for key in keys:
                name = self._name_of(key)
                may = transitions.may_forget(self._read(name, key), now)
                if may:
                    self._remove(name)
                answers.append(may)
            return answers

    async def purge(self, limit: int = 1000) -> int:
        with self._lock:
            return self._sweep(self._clock(), limit)

    async def now_ms(self) -> int:
        return self._clock()

    async def health(self) -> Mapping[str, int]:
        """Return the number of records."""
        return {"records": self._count}

    async def aclose(self) -> None:
        """Do nothing: the memory is freed with the object."""

    # --- batches -----------------------------------------------------------------

    def _claim_each(self, wants: Wants, now: int) -> list[ClaimAnswer | int]:
        """Claim keys of one event each."""
        each: list[ClaimAnswer | int] = [HELD] * len(wants.keys)
        opened, done, names = self._open, self._done, self._names
        due_ms, fresh = -1, list[bytes]()
        unnamed = _UNNAMED.copy
        items = _rows(astuple(wants)[:7])
        for at, (key, token, generation, lease_ms, keep_ms, memo, hash_) in enumerate(items):
            # As `_name` does; each call costs, and this is done for every event.
            (hashed := unnamed()).update(key)
            name = hashed.digest()
            if name in opened or name in done[name[0]]:
                want = wants[at]
                answer = self._claim(want, now)
                if not isinstance(answer, Claim) or not answer.is_as_asked(want):
                    each[at] = answer
            elif self._count >= self._max_keys:
                each[at] = self._full()
            else:
                until = now + lease_ms
                keep_until = until + keep_ms
                opened[name] = Record(
                    key, token, generation, until, 1, hash_, None, memo, 0, keep_until
                )
                names[key] = name
                if keep_until != due_ms:
                    due_ms, fresh = keep_until, self._calendar.day(keep_until)
                fresh.append(name)
                self._count += 1
        return each

    def _commit(self, commits: Commits, now: int) -> list[CommitAnswer]:
        answers: list[CommitAnswer] = [_COMMITTED] * len(commits.keys)
        opened, done, names = self._open, self._done, self._names
        known_terms: tuple[Any, ...] = ()
        items = _rows(astuple(commits))
        for at, (key, generation, fate, window_ms, hard_ms, memo) in enumerate(items):
            name = names.get(key, b"")
            record = opened[name] if name in opened else None  # noqa: SIM401 - quicker than a call
            if record is None or record.generation != generation:
                answers[at] = self._decide(transitions.commit, commits[at], now)
                continue
            own = record.memo if memo is None else memo
            # All but the memo is the same for most records of a call.
            terms = generation, fate, window_ms, hard_ms, record.attempts, record.hash, not own
            if terms != known_terms:
                known_terms = terms
                hard_until = now + hard_ms if hard_ms else 0
                head = _pack(record, fate, now + window_ms, hard_until, own)
                head = head[: len(head) - len(own)]
            done[name[0]][name] = head + own
            del opened[name], names[key]
        return answers

    def _claim(self, want: Want, now: int) -> ClaimAnswer:
        found: dict[bytes, tuple[bytes, Record | None]] = {}
        before: list[Record | None] = []
        for part in want.parts:  # nearly always one: a loop is faster than a comprehension
            name = self._name_of(part.key)
            record = self._read(name, part.key)
            found[part.key] = name, record
            before.append(record)
        answer, after = transitions.claim(before, want, now)
        fresh = before.count(None)
        if fresh and type(answer) is Claim and self._count + fresh > self._max_keys:
            # Known keys are still answered; only claims that need room are refused.
            return self._full()
        for written in after:
            name, record = found[written.key]
            self._write(name, written, is_new=record is None)
        return answer

    def _each(
        self,
        decide: Callable[[Record | None, _Asked, int], tuple[_Answer, Record | None]],
        items: Columns[_Asked],
    ) -> list[_Answer | NoAnswer]:
        """Decide operations on one record each."""
        with self._lock:
            now = self._clock()
            return [self._decide(decide, asked, now) for asked in items]

    def _decide(
        self,
        decide: Callable[[Record | None, _Asked, int], tuple[_Answer, Record | None]],
        asked: _Asked,
        now: int,
    ) -> _Answer | NoAnswer:
        name = self._name_of(asked.key)
        before = self._read(name, asked.key)
        answer, after = decide(before, asked, now)
        if after is not None:
            if before is None and self._count >= self._max_keys:
                return self._full()
            self._write(name, after, is_new=before is None)
        return answer

    def _full(self) -> NoAnswer:
        return NoAnswer(
            f"the memory store is full ({self._max_keys} keys): raise max_keys, "
            "shorten the window, or use a store on disk (sqlite:PATH)"
        )

    # --- records by name ---------------------------------------------------------

    def _name_of(self, key: bytes) -> bytes:
        return self._names.get(key) or _name(key)

    def _read(self, name: bytes, key: bytes) -> Record | None:
        found = self._open.get(name)
        if found is not None:
            return found
        packed = self._done[name[0]].get(name)
        return _unpack(key, packed) if packed is not None else None

    def _write(self, name: bytes, record: Record, *, is_new: bool) -> None:
        done = self._done[name[0]]
        if record.fate is None:
            if not is_new:
                done.pop(name, None)
            self._open[name] = record
            self._names[record.key] = name
        else:
            if not is_new:
                self._open.pop(name, None)
                self._names.pop(record.key, None)
            hard_until = record.hard_until_ms
            done[name] = _pack(record, record.fate, record.until_ms, hard_until, record.memo)
        if is_new:
            self._count += 1
            self._calendar.day(record.keep_until_ms).append(name)

    def _remove(self, name: bytes) -> None:
        found = self._open.pop(name, None)
        if found is None:
            del self._done[name[0]][name]
        else:
            del self._names[found.key]
        self._count -= 1

    def _sweep(self, now: int, limit: int) -> int:
        """
        Remove records past keeping; inspect at most *limit* records.

        Every record is in the calendar once, under the date that it had when it was new. If it
        was prolonged since, it is moved to its current date when the old one comes.
        """
        removed = 0
        for name in self._calendar.due(now, limit):
            packed = self._done[name[0]].get(name)
            if packed is not None:
                keep_until = _until(packed)
            elif (found := self._open.get(name)) is not None:
                keep_until = found.keep_until_ms
            else:
                continue
            if keep_until > now:
                self._calendar.day(keep_until).append(name)
            else:
                self._remove(name)
                removed += 1
        return removed


def _rows(columns: Sequence[Any]) -> Iterable[Sequence[Any]]:
    """Return the rows of columns, the first of which is a list."""
    if len(columns[0]) == 1:  # takes a third of the time
        return ([column[0] if type(column) is list else column for column in columns],)
    return zip(*[c if type(c) is list else repeat(c) for c in columns], strict=False)


class _Calendar:
    """Names by the half minute in which they are due: eight bytes per name."""

    def __init__(self) -> None:
        self._days: dict[int, list[bytes]] = {}
        self._order: list[int] = []

    def day(self, at_ms: int) -> list[bytes]:
        """Return the names that are due at *at_ms*, to add one."""
        day = at_ms // _BUCKET_MS + 1
        if day not in self._days:
            self._days[day] = []
            heappush(self._order, day)
        return self._days[day]

    def due(self, now_ms: int, limit: int) -> list[bytes]:
        taken: list[bytes] = []
        while len(taken) < limit and self._order and self._order[0] <= now_ms // _BUCKET_MS:
            names, left = self._days[self._order[0]], limit - len(taken)
            taken += names[-left:]
            del names[-left:]
            if not names:
                del self._days[heappop(self._order)]
        return taken


def _name(key: bytes) -> bytes:
    """
    Return 15 bytes for a key of any length: as many as fit in the smallest object.

    With 120 bits of a strong hash, two of ten million keys collide once in 10^22 runs.
    """
    hashed = _UNNAMED.copy()
    hashed.update(key)
    return hashed.digest()


_UNNAMED = blake2b(digest_size=15)  # to be copied, never updated: faster than a new one


# A done record: flags, end of the window (48 bits), first 8 bytes of the generation. If it has a
# hard end, a hash or a memo, then also the whole generation and these three.
_HEAD = struct.Struct(">BHI8s")
_WHOLE = struct.Struct(">BHI8s16sQB")
_pack_head, _pack_whole = _HEAD.pack, _WHOLE.pack
_WITH_TAIL = 0b1000_0000
_ATTEMPTS_SHIFT = 3
_MOST_ATTEMPTS = 0b1111
_FATES = (None, *Fate)  # by number: looking up a member of an enum is slow


def _pack(record: Record, fate: Fate, until_ms: int, hard_until_ms: int, memo: bytes) -> bytes:
    """Return *record* as a done record with these values."""
    attempts, generation, hash_ = record.attempts, record.generation, record.hash
    flags = fate | min(attempts, _MOST_ATTEMPTS) << _ATTEMPTS_SHIFT
    high, low = until_ms >> 32, until_ms & 0xFFFF_FFFF
    if not (memo or hash_ or hard_until_ms):
        return _pack_head(flags, high, low, generation)
    flags |= _WITH_TAIL
    head = _pack_whole(flags, high, low, generation, generation, hard_until_ms, len(hash_))
    return head + hash_ + memo


def _unpack(key: bytes, packed: bytes) -> Record:
    flags, high, low, generation = _HEAD.unpack_from(packed)
    until = high << 32 | low
    fate = _FATES[flags & 0b111]
    attempts = flags >> _ATTEMPTS_SHIFT & _MOST_ATTEMPTS
    if not flags & _WITH_TAIL:
        return Record(key, b"", generation, until, attempts, b"", fate, b"", 0, until)
    *_, generation, hard_until, hash_length = _WHOLE.unpack_from(packed)
    at = _WHOLE.size
    hash_, memo = packed[at : at + hash_length], packed[at + hash_length :]
    return Record(key, b"", generation, until, attempts, hash_, fate, memo, hard_until, until)


def _until(packed: bytes) -> int:
    _, high, low, _ = _HEAD.unpack_from(packed)
    return int(high << 32 | low)
