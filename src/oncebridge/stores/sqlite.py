"""
The store in one SQLite file. The default.

**What survives a crash:** everything committed, power loss included (`synchronous=FULL`).
**Whose clock:** this host's; all processes that share the file must run on it.
**What an outage does:** a full disk or a file locked for longer than *busy_timeout* raises
`StoreUnavailable`; nothing is lost, events are handed back.
**What it costs:** one transaction with one fsync per batch of claims, one per batch of commits.

Several processes may use one file at the same time. It has to be on a local disk: over a
network file system, SQLite's locks are not to be trusted, and two workers would both win.
"""

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from msgspec import Struct

from oncebridge import record as table
from oncebridge.clock import Clock, system_clock
from oncebridge.errors import ConfigError
from oncebridge.options import Doc
from oncebridge.sqlite_file import SQLiteFile
from oncebridge.store import (
    ClaimAnswer,
    Commit,
    CommitAnswer,
    ExtendAnswer,
    Extension,
    Fate,
    Memory,
    NoAnswer,
    Record,
    Release,
    ReleaseAnswer,
    RememberAnswer,
    Reply,
    Want,
)

_T = TypeVar("_T")
_Item = TypeVar("_Item")
_Asked = TypeVar("_Asked", Commit, Release, Extension, Memory, Record)
_Answer = TypeVar("_Answer")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS oncebridge_records (
    key           BLOB PRIMARY KEY,
    token         BLOB    NOT NULL,
    generation    BLOB    NOT NULL,
    until_ms      INTEGER NOT NULL,
    attempts      INTEGER NOT NULL,
    hash          BLOB    NOT NULL,
    fate          INTEGER NOT NULL,
    memo          BLOB    NOT NULL,
    hard_until_ms INTEGER NOT NULL,
    keep_until_ms INTEGER NOT NULL
) WITHOUT ROWID
"""
_WRITE = "REPLACE INTO oncebridge_records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_COMMIT = """
UPDATE oncebridge_records
SET token = x'', until_ms = ?1, fate = ?2, memo = coalesce(?3, memo), hard_until_ms = ?4,
    keep_until_ms = ?1
WHERE key = ?5 AND generation = ?6 AND fate = 0
"""
_REMOVE = "DELETE FROM oncebridge_records WHERE key = ?"
_NEXT = "SELECT key, keep_until_ms FROM oncebridge_records WHERE key > ? ORDER BY key LIMIT ?"
_SCAN = "SELECT * FROM oncebridge_records WHERE key > ? ORDER BY key LIMIT ?"
_FIRST = "SELECT key, keep_until_ms FROM oncebridge_records WHERE key <= ? ORDER BY key LIMIT ?"

_LOOK = "SELECT 1 FROM oncebridge_records LIMIT 1"

_READ_SIZES = (1, 4, 16, 64, 128)  # few texts, so that every statement is prepared once
_READS = {
    size: f"SELECT * FROM oncebridge_records WHERE key IN ({', '.join('?' * size)})"  # noqa: S608 - only question marks
    for size in _READ_SIZES
}
_CHUNK = 500  # wants or commits per transaction: other processes get their turn in between

_FATES = (None, *Fate)


class _NotAll(Exception):
    """Some of the commits need a closer look; rolls the transaction back."""


class SQLiteOptions(Struct, frozen=True, kw_only=True):
    """What can be set about the SQLite store."""

    busy_timeout: Annotated[
        timedelta, Doc("How long to wait while another process writes to the file.", "10s")
    ] = timedelta(seconds=10)


class SQLiteStore:
    """Keep records in the SQLite file at *path*."""

    Options: ClassVar = SQLiteOptions

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Clock = system_clock,
        busy_timeout: timedelta = timedelta(seconds=10),
    ) -> None:
        self._file = SQLiteFile(
            path, name="records", version=1, schema=_SCHEMA, busy_timeout=busy_timeout
        )
        self._clock = clock
        self._hand = b""

    @classmethod
    def from_url(cls, url: str, options: SQLiteOptions | None = None) -> Self:
        """Open `sqlite:PATH`."""
        path = url.removeprefix("sqlite:")
        if path == url or not path:
            raise ConfigError("", f"{url!r}: a SQLite store is sqlite:PATH")
        return cls(path, busy_timeout=(options or SQLiteOptions()).busy_timeout)

    @property
    def file(self) -> SQLiteFile:
        return self._file

    async def open(self) -> None:
        await self._file.run(lambda _: None)

    async def claim(self, wants: Sequence[Want]) -> list[ClaimAnswer]:
        return await self._chunks(self._claim, wants)

    async def commit(self, commits: Sequence[Commit]) -> list[CommitAnswer]:
        answers: list[CommitAnswer] = []
        for at in range(0, len(commits), _CHUNK):
            chunk = commits[at : at + _CHUNK]
            try:
                await self._file.change(partial(self._commit, items=chunk))
            except _NotAll:
                answers += await self._each(table.commit, chunk)
            else:
                answers += [Reply.COMMITTED] * len(chunk)
        return answers

    async def release(self, releases: Sequence[Release]) -> list[ReleaseAnswer]:
        return await self._each(table.release, releases)

    async def extend(self, extensions: Sequence[Extension]) -> list[ExtendAnswer]:
        return await self._each(table.extend, extensions)

    async def remember(self, memories: Sequence[Memory]) -> list[RememberAnswer]:
        return await self._each(table.remember, memories)

    async def scan(self, place: bytes = b"", limit: int = 1000) -> tuple[list[Record], bytes]:
        rows = await self._file.run(lambda db: db.execute(_SCAN, (place, limit)).fetchall())
        return [_record(row) for row in rows], rows[-1][0] if len(rows) == limit else b""

    async def load(self, records: Sequence[Record]) -> list[RememberAnswer]:
        return await self._each(table.load, records)

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        def read(db: sqlite3.Connection) -> list[Record | None]:
            found = _read(db, keys)
            return [found.get(key) for key in keys]

        return await self._file.run(read)

    async def forget(self, keys: Sequence[bytes]) -> list[bool]:
        def remove(db: sqlite3.Connection) -> list[bool]:
            now = self._clock()
            found = _read(db, keys)
            may = [table.may_forget(found.get(key), now) for key in keys]
            gone = [(key,) for key, yes in zip(keys, may, strict=True) if yes]
            db.executemany(_REMOVE, gone)
            return may

        return await self._file.change(remove)

    async def purge(self, limit: int = 1000) -> int:
        return await self._file.change(lambda db: self._sweep(db, self._clock(), limit))

    async def now_ms(self) -> int:
        return self._clock()

    async def vitals(self) -> Mapping[str, int]:
        """
        Tell how large the file is, with what waits beside it to be carried over.

        Not how many records there are: SQLite would have to read all of them.
        """
        return {"bytes": await self._file.run(self._size)}

    async def aclose(self) -> None:
        await self._file.aclose()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # --- in the thread -----------------------------------------------------------

    def _claim(self, db: sqlite3.Connection, items: Sequence[Want]) -> list[ClaimAnswer]:
        keys = [part.key for want in items for part in want.parts]
        now = self._clock()
        self._sweep(db, now, 2 * len(keys) + 16)
        found = _read(db, keys)
        answers: list[ClaimAnswer] = []
        changed: list[Record] = []
        for want in items:
            before = [found.get(part.key) for part in want.parts]
            answer, after = table.claim(before, want, now)
            answers.append(answer)
            changed += after
        _write(db, changed)
        return answers

    def _commit(self, db: sqlite3.Connection, items: Sequence[Commit]) -> None:
        """Commit all, if every one is a claim of its generation; otherwise none."""
        now = self._clock()
        rows = [
            (
                now + c.window_ms,
                c.fate.value,
                c.memo,
                now + c.hard_ms if c.hard_ms else 0,
                c.key,
                c.generation,
            )
            for c in items
        ]
        if db.executemany(_COMMIT, rows).rowcount != len(items):
            raise _NotAll  # which undoes the transaction

    async def _each(
        self,
        decide: Callable[[Record | None, _Asked, int], tuple[_Answer, Record | None]],
        items: Sequence[_Asked],
    ) -> list[_Answer | NoAnswer]:
        """Decide operations on one record each."""

        def apply(db: sqlite3.Connection, items: Sequence[_Asked]) -> list[_Answer | NoAnswer]:
            now = self._clock()
            found = _read(db, [asked.key for asked in items])
            decided = [decide(found.get(asked.key), asked, now) for asked in items]
            _write(db, [after for _, after in decided if after is not None])
            return [answer for answer, _ in decided]

        return await self._chunks(apply, items)

    def _sweep(self, db: sqlite3.Connection, now: int, looks: int) -> int:
        """
        Look at the next few records and remove those past keeping.

        The hand goes round the table like that of a clock. Each claim looks at twice as
        many records as it may add, so garbage never grows beyond half the table, and
        there is no index of dates to keep up with at every write.
        """
        rows = db.execute(_NEXT, (self._hand, looks)).fetchall()
        if len(rows) < looks:
            rows += db.execute(_FIRST, (self._hand, looks - len(rows))).fetchall()
        self._hand = rows[-1][0] if rows else b""
        gone = [(key,) for key, keep_until in rows if keep_until <= now]
        db.executemany(_REMOVE, gone)
        return len(gone)

    def _size(self, db: sqlite3.Connection) -> int:
        db.execute(_LOOK).fetchone()  # a file can be there and not be readable any more
        path = self._file.path
        size = path.stat().st_size
        with suppress(FileNotFoundError):
            size += path.with_name(f"{path.name}-wal").stat().st_size
        return size

    # --- to the thread and back --------------------------------------------------

    async def _chunks(
        self,
        work: Callable[..., list[_T]],
        items: Sequence[_Item],
    ) -> list[_T]:
        answers: list[_T] = []
        for at in range(0, len(items), _CHUNK):
            answers += await self._file.change(partial(work, items=items[at : at + _CHUNK]))
        return answers


def _read(db: sqlite3.Connection, keys: Sequence[bytes]) -> dict[bytes, Record]:
    found: dict[bytes, Record] = {}
    at = 0
    while at < len(keys):
        left = len(keys) - at
        size = next((s for s in _READ_SIZES if s >= left), _READ_SIZES[-1])
        asked = list(keys[at : at + size])
        asked += asked[:1] * (size - len(asked))
        for row in db.execute(_READS[size], asked).fetchall():
            found[row[0]] = _record(row)
        at += size
    return found


def _record(row: Sequence[Any]) -> Record:
    key, token, generation, until, attempts, hash_, fate, memo, hard_until, keep_until = row
    return Record(
        key,
        token,
        generation,
        until,
        attempts,
        hash_,
        _FATES[fate],
        memo,
        hard_until,
        keep_until,
    )


def _row(r: Record) -> tuple[object, ...]:
    return (
        r.key,
        r.token,
        r.generation,
        r.until_ms,
        r.attempts,
        r.hash,
        r.fate.value if r.fate else 0,
        r.memo,
        r.hard_until_ms,
        r.keep_until_ms,
    )


def _write(db: sqlite3.Connection, records: Sequence[Record]) -> None:
    if records:
        db.executemany(_WRITE, [_row(record) for record in records])
