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
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from msgspec import Struct

from oncebridge.base.clock import Clock, system_clock
from oncebridge.base.options import Doc
from oncebridge.errors import ConfigError
from oncebridge.stores import transitions
from oncebridge.stores.api import (
    Claim,
    ClaimAnswer,
    ClaimAnswers,
    Commit,
    CommitAnswer,
    Commits,
    ExtendAnswer,
    Extension,
    Extensions,
    Fate,
    Held,
    Memories,
    Memory,
    NoAnswer,
    Record,
    Release,
    ReleaseAnswer,
    Releases,
    RememberAnswer,
    Reply,
    Want,
    Wants,
)
from oncebridge.stores.sqlite.database import SQLiteFile

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
_COMMIT_ONE = """
UPDATE oncebridge_records
SET token = x'', until_ms = ?, keep_until_ms = ?, hard_until_ms = ?, fate = ?, memo = ?
WHERE key = ? AND generation = ? AND fate = 0
"""
_REMOVE = "DELETE FROM oncebridge_records WHERE key = ?"
_SCAN = "SELECT * FROM oncebridge_records WHERE key > ? ORDER BY key LIMIT ?"
_AHEAD = "SELECT key FROM oncebridge_records WHERE key > ? ORDER BY key LIMIT 1 OFFSET ?"
_COUNT = "SELECT count(*) FROM oncebridge_records WHERE key > ?"
_SWEEP = "DELETE FROM oncebridge_records WHERE key > ? AND key <= ? AND keep_until_ms <= ?"
_SWEEP_REST = "DELETE FROM oncebridge_records WHERE key > ? AND keep_until_ms <= ?"
_LOOK = "SELECT 1 FROM oncebridge_records LIMIT 1"

# A statement handles many rows: between two statements the thread releases Python's lock, and may
# wait long to get it back. There are few sizes, so that each is prepared once.
_SIZES = (128, 64, 32, 16, 8, 4, 2, 1)
_READ = {
    size: f"SELECT r.* FROM (VALUES {', '.join(['(?)'] * size)}) AS v "  # noqa: S608 - only question marks
    "CROSS JOIN oncebridge_records AS r ON r.key = v.column1"
    for size in _SIZES
}
# FAIL, as SQLite would otherwise prepare to undo the statement alone; we roll back everything.
_START = {
    size: "INSERT OR FAIL INTO oncebridge_records VALUES "  # noqa: S608 - only question marks
    + ", ".join(["(?, ?, ?, ?, 1, ?, 0, ?, 0, ?)"] * size)
    for size in _SIZES
}
# The first IN finds the rows, the second checks the generation of each.
_COMMIT = {
    size: f"""
UPDATE OR FAIL oncebridge_records
SET token = x'', until_ms = ?, keep_until_ms = ?, hard_until_ms = ?, fate = ?
WHERE key IN ({", ".join("?" * size)}) AND fate = 0
    AND (key, generation) IN (VALUES {", ".join(["(?, ?)"] * size)})
"""  # noqa: S608 - only question marks
    for size in _SIZES
}
_CHUNK = 500  # wants or commits per transaction, so that other processes can write in between

_FATES = (None, *Fate)
_BEGINNING = 0  # for SQLite, every number comes before every BLOB
_blob = bytearray  # the driver takes it as it is; for bytes it looks for adapters first
_EMPTY = _blob()


class _NotAll(Exception):
    """Some commits have to be decided one by one; rolls the transaction back."""


class SQLiteOptions(Struct, frozen=True, kw_only=True):
    """Options of the SQLite store."""

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
        self._hand: bytes | int = _BEGINNING

    @classmethod
    def from_url(cls, url: str, options: SQLiteOptions | None = None) -> Self:
        """Open `sqlite:PATH`."""
        path = url.removeprefix("sqlite:")
        if path == url or not path:
            raise ConfigError("", f"{url!r}: the address of a SQLite store is sqlite:PATH")
        return cls(path, busy_timeout=(options or SQLiteOptions()).busy_timeout)

    @property
    def file(self) -> SQLiteFile:
        return self._file

    async def open(self) -> None:
        await self._file.run(lambda _: None)

    async def claim(self, wants: Wants) -> ClaimAnswers:
        return ClaimAnswers.of(wants, await self._chunks(self._claim, [*wants]))

    async def commit(self, commits: Commits) -> list[CommitAnswer]:
        answers: list[CommitAnswer] = []
        rows = [*commits]
        for at in range(0, len(rows), _CHUNK):
            chunk = rows[at : at + _CHUNK]
            try:
                await self._file.change(partial(self._commit, items=chunk))
            except _NotAll:
                answers += await self._each(transitions.commit, chunk)
            else:
                answers += [Reply.COMMITTED] * len(chunk)
        return answers

    async def release(self, releases: Releases) -> list[ReleaseAnswer]:
        return await self._each(transitions.release, [*releases])

    async def extend(self, extensions: Extensions) -> list[ExtendAnswer]:
        return await self._each(transitions.extend, [*extensions])

    async def remember(self, memories: Memories) -> list[RememberAnswer]:
        return await self._each(transitions.remember, [*memories])

    async def scan(self, place: bytes = b"", limit: int = 1000) -> tuple[list[Record], bytes]:
        rows = await self._file.run(lambda db: db.execute(_SCAN, (place, limit)).fetchall())
        return [_record(row) for row in rows], rows[-1][0] if len(rows) == limit else b""

    async def load(self, records: Sequence[Record]) -> list[RememberAnswer]:
        return await self._each(transitions.load, records)

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        def read(db: sqlite3.Connection) -> list[Record | None]:
            found = _read(db, keys)
            return [found.get(key) for key in keys]

        return await self._file.run(read)

    async def forget(self, keys: Sequence[bytes]) -> list[bool]:
        def remove(db: sqlite3.Connection) -> list[bool]:
            now = self._clock()
            found = _read(db, keys)
            may = [transitions.may_forget(found.get(key), now) for key in keys]
            gone = [(key,) for key, yes in zip(keys, may, strict=True) if yes]
            db.executemany(_REMOVE, gone)
            return may

        return await self._file.change(remove)

    async def purge(self, limit: int = 1000) -> int:
        return await self._file.change(lambda db: self._sweep(db, self._clock(), limit))

    async def now_ms(self) -> int:
        return self._clock()

    async def health(self) -> Mapping[str, int]:
        """
        Return the size of the file with its write-ahead log.

        The number of records is not known: SQLite would have to read all of them.
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
        started: list[Want] = []
        changed: list[Record] = []
        for want in items:
            parts = want.parts
            if len(parts) == 1 and parts[0].key not in found:  # the common case by far
                held = Held(parts[0].key, want.generation, 1, want.memo)
                answers.append(Claim(want.token, (held,), now))
                started.append(want)
                continue
            before = [found.get(part.key) for part in parts]
            answer, after = transitions.claim(before, want, now)
            answers.append(answer)
            changed += after
        _start(db, started, now)
        _write(db, changed)
        return answers

    def _commit(self, db: sqlite3.Connection, items: Sequence[Commit]) -> None:
        """Commit all if each is claimed with its generation, otherwise raise `_NotAll`."""
        now = self._clock()
        done = 0
        alike: dict[tuple[int, int, int], list[Commit]] = {}
        for asked in items:
            terms = asked.window_ms, asked.hard_ms, int(asked.fate)
            if asked.memo is None:
                alike.setdefault(terms, []).append(asked)
            else:
                names = _blob(asked.key), _blob(asked.generation)
                row = (*_ends(terms, now), _blob(asked.memo), *names)
                done += db.execute(_COMMIT_ONE, row).rowcount
        for terms, several in alike.items():
            ends = _ends(terms, now)
            for some in _portions(several):
                keys = [_blob(asked.key) for asked in some]
                values: list[object] = [*ends, *keys]
                for key, asked in zip(keys, some, strict=True):
                    values += key, _blob(asked.generation)
                done += db.execute(_COMMIT[len(some)], values).rowcount
        if done != len(items):
            raise _NotAll  # rolls the transaction back

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
        Check the next *looks* records, and remove those past keeping.

        Each call continues where the last one stopped, and starts again at the end of the table.
        Each claim checks twice as many records as it may add, so expired records are never more
        than half of the table, and no write has to update an index of dates.
        """
        begins, gone = self._hand, 0
        ahead = db.execute(_AHEAD, (begins, looks - 1)).fetchone()
        if ahead is None:
            (left,) = db.execute(_COUNT, (begins,)).fetchone()
            gone = db.execute(_SWEEP_REST, (begins, now)).rowcount
            self._hand = _BEGINNING
            if begins == _BEGINNING:
                return gone
            begins = _BEGINNING
            ahead = db.execute(_AHEAD, (begins, looks - left - 1)).fetchone()
            if ahead is None:
                return gone + db.execute(_SWEEP_REST, (begins, now)).rowcount
        self._hand = ahead[0]
        return gone + db.execute(_SWEEP, (begins, self._hand, now)).rowcount

    def _size(self, db: sqlite3.Connection) -> int:
        db.execute(_LOOK).fetchone()  # a file may exist and not be readable any more
        path = self._file.path
        size = path.stat().st_size
        with suppress(FileNotFoundError):
            size += path.with_name(f"{path.name}-wal").stat().st_size
        return size

    # --- chunks --------------------------------------------------

    async def _chunks(
        self,
        work: Callable[..., list[_T]],
        items: Sequence[_Item],
    ) -> list[_T]:
        answers: list[_T] = []
        for at in range(0, len(items), _CHUNK):
            answers += await self._file.change(partial(work, items=items[at : at + _CHUNK]))
        return answers


def _portions(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """Split *items* into parts for which there are statements."""
    at = 0
    for size in _SIZES:
        while len(items) - at >= size:
            yield items[at : at + size]
            at += size


def _read(db: sqlite3.Connection, keys: Sequence[bytes]) -> dict[bytes, Record]:
    found: dict[bytes, Record] = {}
    for some in _portions(keys):
        for row in db.execute(_READ[len(some)], [*map(_blob, some)]).fetchall():
            found[row[0]] = _record(row)
    return found


def _start(db: sqlite3.Connection, wants: Sequence[Want], now: int) -> None:
    """Insert first attempts of one part each, for keys without a record."""
    for some in _portions(wants):
        values: list[object] = []
        for want in some:
            part, until = want.parts[0], now + want.lease_ms
            values += (
                _blob(part.key),
                _blob(want.token),
                _blob(want.generation),
                until,
                _blob(part.hash) if part.hash else _EMPTY,
                _blob(want.memo),
                until + want.keep_ms,
            )
        db.execute(_START[len(some)], values)


def _ends(terms: tuple[int, int, int], now: int) -> tuple[int, int, int, int]:
    """Return the times and the fate of a record that is done now."""
    window_ms, hard_ms, fate = terms
    until = now + window_ms
    return until, until, now + hard_ms if hard_ms else 0, fate


def _record(row: Sequence[Any]) -> Record:
    key, token, generation, until, attempts, hash_, fate, memo, hard_until, keep_until = row
    return Record(
        key, token, generation, until, attempts, hash_, _FATES[fate], memo, hard_until, keep_until
    )


def _row(r: Record) -> tuple[object, ...]:
    return (
        _blob(r.key),
        _blob(r.token),
        _blob(r.generation),
        r.until_ms,
        r.attempts,
        _blob(r.hash),
        int(r.fate or 0),
        _blob(r.memo),
        r.hard_until_ms,
        r.keep_until_ms,
    )


def _write(db: sqlite3.Connection, records: Sequence[Record]) -> None:
    if records:
        db.executemany(_WRITE, [_row(record) for record in records])
