"""
The SQLite store: records in one file. The default.

**Durability:** everything committed survives a crash, including power loss (`synchronous=FULL`).
**Clock:** this host's; all processes that share the file must run on this host.
**Outages:** if the disk is full, or the file is locked for longer than *busy_timeout*, calls raise
`StoreUnavailable`. No event is lost: events are returned to their source.
**Cost:** one transaction with one fsync per batch of claims, and one per batch of commits.

Several processes may use one file at the same time. It must be on a local disk: on a network file
system SQLite's locks are not reliable, and two workers could claim the same event.
"""

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar
from zlib import crc32

from msgspec import Struct
from msgspec.structs import asdict

from oncebridge.base.clock import Clock, system_clock
from oncebridge.base.options import Doc
from oncebridge.errors import ConfigError
from oncebridge.stores import transitions
from oncebridge.stores.api import (
    HELD,
    Claim,
    ClaimAnswer,
    ClaimAnswers,
    Column,
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
    Portable,
    Record,
    Release,
    ReleaseAnswer,
    Releases,
    RememberAnswer,
    Reply,
    Wants,
)
from oncebridge.stores.sqlite.database import SQLiteFile

_Batch = TypeVar("_Batch", Wants, Commits)
_Asked = TypeVar("_Asked", Commit, Release, Extension, Memory, Record)
_Answer = TypeVar("_Answer")

_PAGE_SIZE = 2048
# Keys are random. If the table were in their order, each write would change one page per key. So
# records are appended, and only the index is in random order: of a checksum of the key, as that
# is small. Keys with the same checksum are told apart by the record. Numbers come first, as a
# long memo is on further pages, and the sweep does not have to read those.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS oncebridge_records (
    id            INTEGER PRIMARY KEY,
    key_crc       INTEGER NOT NULL,
    until_ms      INTEGER NOT NULL,
    keep_until_ms INTEGER NOT NULL,
    hard_until_ms INTEGER NOT NULL,
    attempts      INTEGER NOT NULL,
    fate          INTEGER NOT NULL,
    key           BLOB    NOT NULL,
    token         BLOB    NOT NULL,
    generation    BLOB    NOT NULL,
    hash          BLOB    NOT NULL,
    memo          BLOB    NOT NULL
);
CREATE INDEX IF NOT EXISTS oncebridge_records_by_key ON oncebridge_records (key_crc)
"""
_FIELDS = ", ".join(Record.__struct_fields__)
_SCAN = f"SELECT id, {_FIELDS} FROM oncebridge_records WHERE id > ? ORDER BY id LIMIT ?"  # noqa: S608
_AHEAD = "SELECT id FROM oncebridge_records WHERE id > ? ORDER BY id LIMIT 1 OFFSET ?"
_SWEEP = "DELETE FROM oncebridge_records WHERE id > ? AND id <= ? AND keep_until_ms <= ?"
_LOOK = "SELECT 1 FROM oncebridge_records LIMIT 1"
_REMOVE = "DELETE FROM oncebridge_records WHERE key_crc = ? AND key = ?"

# Statements for many keys; `given` has a row for each of them, see `_execute`.
_READ = f"""
SELECT {", ".join(f"r.{name}" for name in Record.__struct_fields__)}
FROM {{given}} CROSS JOIN oncebridge_records AS r
    ON r.key_crc = given.key_crc AND r.key = given.key
"""  # noqa: S608
# FAIL, as SQLite would otherwise prepare to undo the statement alone; we roll back everything.
_START = f"""
INSERT OR FAIL INTO oncebridge_records (key_crc, {_FIELDS})
SELECT key_crc, key, token, generation, now_ms + lease_ms, 1, hash, 0, memo, 0,
    now_ms + lease_ms + keep_ms
FROM {{given}}
"""  # noqa: S608
_COMMIT = """
UPDATE OR FAIL oncebridge_records AS r
SET token = x'', until_ms = now_ms + window_ms, keep_until_ms = now_ms + window_ms,
    hard_until_ms = iif(hard_ms, now_ms + hard_ms, 0), fate = given.fate,
    memo = coalesce(given.memo, r.memo)
FROM {given}
WHERE r.key_crc = given.key_crc AND r.key = given.key AND r.fate = 0
    AND r.generation = given.generation
"""
_WRITE = f"""
REPLACE INTO oncebridge_records (id, key_crc, {_FIELDS})
SELECT r.id, given.* FROM {{given}} LEFT JOIN oncebridge_records AS r
    ON r.key_crc = given.key_crc AND r.key = given.key
"""  # noqa: S608

# A statement handles many keys: between two statements the thread releases Python's lock, and may
# wait long to get it back. There are few sizes, so that each is prepared once.
_SIZES = (128, 64, 32, 16, 8, 4, 2, 1)
_CHUNK = 500  # wants or commits per transaction, so that other processes can write in between
_LOOKS = 64  # one claim of many keys, or many claims of one key, per sweep

_FATES = (None, *Fate)
_LAST = 2**63 - 1
_LONGEST_LOG = 64 * 1024 * 1024
"""The longer the log, the fewer pages of the index are written to the main file twice."""
_blob = bytearray  # the driver takes it as it is; for bytes it looks for adapters first


class SQLiteOptions(Struct, frozen=True, kw_only=True):
    """Options of the SQLite store."""

    busy_timeout: Annotated[
        timedelta, Doc("How long to wait while another process writes to the file.", "10s")
    ] = timedelta(seconds=10)


class SQLiteStore(Portable):
    """Keep records in the SQLite file at *path*."""

    Options: ClassVar = SQLiteOptions

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Clock = system_clock,
        busy_timeout: timedelta = timedelta(seconds=10),
    ) -> None:
        self.file: Final = SQLiteFile(
            path,
            name="records",
            version=2,
            schema=_SCHEMA,
            page_size=_PAGE_SIZE,
            longest_log=_LONGEST_LOG,
            busy_timeout=busy_timeout,
        )
        self._clock = clock
        self._hand = 0
        """The id up to which the sweep has come."""
        self._looks_due = _LOOKS

    @classmethod
    def from_url(cls, url: str, options: SQLiteOptions | None = None) -> Self:
        """Open `sqlite:PATH`."""
        path = url.removeprefix("sqlite:")
        if path == url or not path:
            raise ConfigError("", f"{url!r}: the address of a SQLite store is sqlite:PATH")
        return cls(path, busy_timeout=(options or SQLiteOptions()).busy_timeout)

    async def open(self) -> None:
        await self.file.run(lambda _: None)

    async def claim(self, wants: Wants) -> ClaimAnswers:
        done = [await self.file.change(partial(self._claim, wants=p)) for p in _chunks(wants)]
        if len(done) == 1:
            return done[0]
        each = [answer for part in done for answer in part.each]
        return ClaimAnswers(wants, each, max([part.now_ms for part in done], default=0))

    async def commit(self, commits: Commits) -> list[CommitAnswer]:
        answers: list[CommitAnswer] = []
        for part in _chunks(commits):
            answers += await self.file.change(partial(self._commit, commits=part))
        return answers

    async def release(self, releases: Releases) -> list[ReleaseAnswer]:
        return await self._each(transitions.release, [*releases])

    async def extend(self, extensions: Extensions) -> list[ExtendAnswer]:
        return await self._each(transitions.extend, [*extensions])

    async def remember(self, memories: Memories) -> list[RememberAnswer]:
        return await self._each(transitions.remember, [*memories])

    async def scan(self, place: bytes = b"", limit: int = 1000) -> tuple[list[Record], bytes]:
        after = int.from_bytes(place)
        rows = await self.file.run(lambda db: db.execute(_SCAN, (after, limit)).fetchall())
        return [_record(row[1:]) for row in rows], (
            rows[-1][0].to_bytes(8) if len(rows) == limit else b""
        )

    async def load(self, records: Sequence[Record]) -> list[RememberAnswer]:
        return await self._each(transitions.load, records)

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        def read(db: sqlite3.Connection) -> list[Record | None]:
            found = _read(db, keys)
            return [found.get(key) for key in keys]

        return await self.file.run(read)

    async def forget(self, keys: Sequence[bytes]) -> list[bool]:
        def remove(db: sqlite3.Connection) -> list[bool]:
            now = self._clock()
            found = _read(db, keys)
            may = [transitions.may_forget(found.get(key), now) for key in keys]
            gone = [(crc32(key), key) for key, yes in zip(keys, may, strict=True) if yes]
            db.executemany(_REMOVE, gone)
            return may

        return await self.file.change(remove)

    async def purge(self, limit: int = 1000) -> int:
        return await self.file.change(lambda db: self._sweep(db, self._clock(), limit))

    async def now_ms(self) -> int:
        return self._clock()

    async def health(self) -> Mapping[str, int]:
        """
        Return the size of the file with its write-ahead log.

        The number of records is not known: SQLite would have to read all of them.
        """
        return {"bytes": await self.file.run(self._size)}

    async def aclose(self) -> None:
        await self.file.aclose()

    async def _each(
        self,
        decide: Callable[[Record | None, _Asked, int], tuple[_Answer, Record | None]],
        items: Sequence[_Asked],
    ) -> list[_Answer | NoAnswer]:
        """Decide operations on one record each."""
        answers: list[_Answer | NoAnswer] = []
        for at in range(0, len(items), _CHUNK):
            some = items[at : at + _CHUNK]
            answers += await self.file.change(partial(self._decide, decide=decide, items=some))
        return answers

    # --- in the thread -----------------------------------------------------------

    def _claim(self, db: sqlite3.Connection, wants: Wants) -> ClaimAnswers:
        now = self._clock()
        self._looks_due += 2 * len(wants.keys)
        if self._looks_due >= _LOOKS:
            self._sweep(db, now, self._looks_due)
            self._looks_due = 0
        found = _read(db, wants.keys)
        each: list[ClaimAnswer | int] = [HELD] * len(wants)
        fresh = wants
        if found:
            owners = wants.by_key([*range(len(wants))])
            known = {at for at, key in zip(owners, wants.keys, strict=True) if key in found}
            changed: list[Record] = []
            for at in known:
                want = wants[at]
                before = [found.get(part.key) for part in want.parts]
                answer, after = transitions.claim(before, want, now)
                if not isinstance(answer, Claim) or not answer.is_as_asked(want):
                    each[at] = answer
                changed += after
            _write(db, changed)
            fresh = wants.select([at for at in range(len(wants)) if at not in known])
        _start(db, fresh, now)
        return ClaimAnswers(wants, each, now)

    def _commit(self, db: sqlite3.Connection, commits: Commits) -> list[CommitAnswer]:
        """Update all if each is claimed with its generation, otherwise decide one by one."""
        before = db.total_changes
        db.execute("SAVEPOINT one_statement")
        _execute(db, _COMMIT, now_ms=self._clock(), **asdict(commits))
        answers: list[CommitAnswer] = [Reply.COMMITTED] * len(commits)
        if db.total_changes - before != len(commits):
            db.execute("ROLLBACK TO one_statement")
            answers = self._decide(db, transitions.commit, [*commits])
        db.execute("RELEASE one_statement")
        return answers

    def _decide(
        self,
        db: sqlite3.Connection,
        decide: Callable[[Record | None, _Asked, int], tuple[_Answer, Record | None]],
        items: Sequence[_Asked],
    ) -> list[_Answer]:
        now = self._clock()
        found = _read(db, [asked.key for asked in items])
        decided = [decide(found.get(asked.key), asked, now) for asked in items]
        _write(db, [after for _, after in decided if after is not None])
        return [answer for answer, _ in decided]

    def _sweep(self, db: sqlite3.Connection, now: int, looks: int) -> int:
        """
        Check the next *looks* records, and remove those past keeping.

        Each call continues where the last one stopped, and starts again after the end of the
        table. Claims check twice as many records as they may add, so expired records are never
        more than half of the table, and no write has to update an index of dates.
        """
        begins = self._hand
        ahead = db.execute(_AHEAD, (begins, looks - 1)).fetchone()
        self._hand, ends = (ahead[0], ahead[0]) if ahead else (0, _LAST)
        return db.execute(_SWEEP, (begins, ends, now)).rowcount

    def _size(self, db: sqlite3.Connection) -> int:
        db.execute(_LOOK).fetchone()  # a file may exist and not be readable any more
        path = self.file.path
        size = path.stat().st_size
        with suppress(FileNotFoundError):
            size += path.with_name(f"{path.name}-wal").stat().st_size
        return size


# --- records ---------------------------------------------------------------------


def _read(db: sqlite3.Connection, keys: Sequence[bytes]) -> dict[bytes, Record]:
    return {row[0]: _record(row) for row in _execute(db, _READ, keys)}


def _start(db: sqlite3.Connection, wants: Wants, now: int) -> None:
    """Insert the first attempts of *wants*; their keys have no records."""
    _execute(
        db,
        _START,
        wants.keys,
        token=wants.by_key(wants.token),
        generation=wants.by_key(wants.generation),
        now_ms=now,
        lease_ms=wants.by_key(wants.lease_ms),
        keep_ms=wants.by_key(wants.keep_ms),
        memo=wants.by_key(wants.memo),
        hash=wants.hash,
    )


def _write(db: sqlite3.Connection, records: Sequence[Record]) -> None:
    """Insert *records*, or replace those that have their keys."""
    columns = {name: [getattr(r, name) for r in records] for name in Record.__struct_fields__}
    columns["fate"] = [r.fate or 0 for r in records]
    _execute(db, _WRITE, columns.pop("key"), **columns)


def _record(row: Sequence[Any]) -> Record:
    key, token, generation, until, attempts, hash_, fate, memo, hard_until, keep_until = row
    return Record(
        key, token, generation, until, attempts, hash_, _FATES[fate], memo, hard_until, keep_until
    )


# --- columns ---------------------------------------------------------------------


def _execute(
    db: sqlite3.Connection, statement: str, keys: Sequence[bytes], **columns: Column[Any]
) -> list[tuple[Any, ...]]:
    """
    Execute *statement*, and return the rows that it selects.

    Its table `given` has a row per key, with *columns*, `key` and `key_crc`.
    """
    lists: list[list[Any]] = [[*map(crc32, keys)], [*map(_blob, keys)]]
    shared: list[Any] = []
    names = "column1 AS key_crc, column2 AS key"
    for name, column in columns.items():
        if not isinstance(column, list):
            shared.append(column)
            names += f", ? AS {name}"
            continue
        is_blobs = column and not isinstance(column[0], int)
        lists.append([value and _blob(value) for value in column] if is_blobs else column)
        names += f", column{len(lists)} AS {name}"
    values = [*chain.from_iterable(zip(*lists, strict=True))]
    width = len(lists)
    rows: list[tuple[Any, ...]] = []
    at = 0
    for size in _SIZES:
        while len(keys) - at >= size:
            some = shared + values[at * width : (at + size) * width]
            rows += db.execute(_sized(statement, names, width, size), some).fetchall()
            at += size
    return rows


@lru_cache(maxsize=256)
def _sized(statement: str, names: str, width: int, size: int) -> str:
    """Return *statement* with a table of *size* rows, *width* values each."""
    row = f"({', '.join('?' * width)})"
    rows = ", ".join([row] * size)
    return statement.replace("{given}", f"(SELECT {names} FROM (VALUES {rows})) AS given")  # noqa: S608


def _chunks(batch: _Batch) -> Iterator[_Batch]:
    """Split *batch* into parts of one transaction each."""
    if len(batch) <= _CHUNK:
        yield batch
    else:
        for at in range(0, len(batch), _CHUNK):
            yield batch.select(range(at, min(at + _CHUNK, len(batch))))
