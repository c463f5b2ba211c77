"""
The spool: arrivals are stored on disk, acknowledged, and forwarded later.

With a spool the sender is answered as soon as its event is durable on disk; the spool is the
source from then on, and deletes a record when its event is final. It is one SQLite file, used by
one process; a second process is refused.

If there is no room, or the file cannot be written, nothing is acknowledged: the sender gets 503.
The spool then tries to write until it can. It leaves some of the disk free, because deletions
need space, too.
"""

import asyncio
import fcntl
import logging
import os
import sqlite3
from collections import deque
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from typing import IO, Final

from msgspec import Struct

from oncebridge.base.private_files import open_private
from oncebridge.engine.router import OnAnswer, RouterAnswer
from oncebridge.errors import ConfigError, StoreError, StoreUnavailable
from oncebridge.sources.api import Host, Source
from oncebridge.sources.pump import Pump, SourceRecord, tell
from oncebridge.stores.sqlite.database import Disk, SQLiteFile, transaction, wal_limit

_log = logging.getLogger("oncebridge")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS oncebridge_spool (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    raw    BLOB NOT NULL
)
"""
_TAKE = "SELECT number, raw FROM oncebridge_spool WHERE number > ? ORDER BY number LIMIT ?"
_MOST_AT_ONCE, _MOST_WAITING = 1000, 20_000
_BATCH_BYTES = 4 * 1024 * 1024
_TRY_AGAIN_S = 1.0
_WARN_S = 60.0  # the least time between two warnings that nothing can be written
_LOGS_IN_RESERVE = 4  # how many write-ahead logs have to fit into the space that is left free

SPOOLED = RouterAnswer(acknowledge=True, verdict=None)
_FULL = RouterAnswer(
    acknowledge=False,
    verdict=None,
    retry_after_ms=1000,
    reason="spool: too many events are waiting to be written",
)


class _WriteProblem(Struct, frozen=True):
    """Why nothing can be written."""

    event: str
    what: str
    """Shown to senders, so without a path."""
    fix: str


_AT_LIMIT: Final = _WriteProblem(
    "oncebridge.spool_full",
    "the spool is full",
    "check why the sink does not accept events; if this is expected, raise spool_max",
)
_DISK_FULL: Final = _WriteProblem(
    "oncebridge.spool_full",
    "the disk of the spool is full",
    "free space on that disk, or move the spool to a larger one",
)
_FAILING: Final = _WriteProblem(
    "oncebridge.spool_failed",
    "the spool cannot be written",
    "check the disk, and the permissions of the file and its directory",
)


class _NoRoom(StoreUnavailable):
    """A write was not tried, because there is too little space for it."""

    def __init__(self, problem: _WriteProblem, message: str) -> None:
        super().__init__(message)
        self.problem = problem


class Spool(Source):
    """
    Stores records in the file at *path* until they are forwarded: an inbox and a source.

    They may use *max_bytes* on disk; by default, half of the disk.
    """

    def __init__(self, path: str | Path, max_bytes: int | None = None) -> None:
        self._path = Path(path)
        self._max_bytes = max_bytes
        self.file = SQLiteFile(path, name="spool", version=1, schema=_SCHEMA)
        self._lock: IO[bytes] | None = None
        self._waiting: deque[tuple[bytes, int, OnAnswer]] = deque()
        """Records to write, each with its number in the request and the callback of that."""
        self._writer: asyncio.Task[None] | None = None
        self._deleter: asyncio.Task[None] | None = None
        self._pump: Pump[int] | None = None
        self._batch = 0
        self._taken = 0
        self._filled = asyncio.Event()
        self._batch_bytes = _BATCH_BYTES
        self._reserve = 0
        """The space that is left free on the disk, so that records can still be deleted."""
        self._problem: _WriteProblem | None = None  # why the last write failed, if it did
        self._needed = 0  # the number of bytes of that write
        self._refused = 0  # records that were refused since the last warning
        self._warn_at_s = 0.0
        self._has_warned = False
        self._prober: asyncio.Task[None] | None = None
        self._undeleted: list[int] = []  # records that are final but not deleted yet
        self._is_closed = False
        self.depth = 0
        """The number of records in the spool."""

    # --- the inbox ---------------------------------------------------------------------

    def put(self, raws: Sequence[bytes], answered: OnAnswer) -> None:
        for at, raw in enumerate(raws):
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.append((raw, at, answered))
            else:
                answered(at, _FULL)
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())

    def not_ready(self) -> list[str]:
        return [self._problem.what] if self._problem else []

    async def _write(self) -> None:
        """Write the waiting records, many at a time, with one fsync each time."""
        try:
            while self._waiting:
                batch = self._next_batch()
                answer = await self._insert([raw for raw, _, _ in batch])
                for _, at, answered in batch:
                    tell(answered, at, answer)
        finally:
            self._writer = None

    def _next_batch(self) -> list[tuple[bytes, int, OnAnswer]]:
        batch = [self._waiting.popleft()]
        size = len(batch[0][0])
        while self._waiting and len(batch) < _MOST_AT_ONCE:
            size += len(self._waiting[0][0])
            if size > self._batch_bytes:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _insert(self, raws: Sequence[bytes]) -> RouterAnswer:
        size = sum(map(len, raws))

        def insert(db: sqlite3.Connection) -> None:
            self._check_room(db, size)
            with transaction(db):
                rows = [(raw,) for raw in raws]
                db.executemany("INSERT INTO oncebridge_spool (raw) VALUES (?)", rows)

        try:
            await self.file.run(insert)
        except StoreError as error:
            problem = self._note_failure(error, size, refused=len(raws))
            reason = f"spool: {problem.what}"
            return RouterAnswer(acknowledge=False, verdict=None, retry_after_ms=1000, reason=reason)
        self._note_success()
        self.depth += len(raws)
        self._filled.set()
        return SPOOLED

    # --- room --------------------------------------------------------------------------

    def _check_room(self, db: sqlite3.Connection, size: int) -> None:
        """Raise if *size* more bytes do not fit; runs in the thread of the file."""
        pages, unused, page_size = (
            db.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        disk = Disk.of(self._path)
        used = (pages - unused) * page_size
        most = self._max_bytes if self._max_bytes is not None else disk.size // 2 or inf
        # An event that is larger than the limit is accepted if the spool is empty.
        if self.depth and used + size > most:
            raise _NoRoom(_AT_LIMIT, f"{self._path}: {used} of {most} bytes are used (spool_max)")
        is_growing = size > unused * page_size
        # Twice, because it is written to the write-ahead log first.
        if disk.size and is_growing and disk.free < self._reserve + 2 * size:
            raise _NoRoom(_DISK_FULL, f"{self._path}: {disk.free} bytes are left on the disk")

    def _note_failure(self, error: StoreError, size: int, *, refused: int = 0) -> _WriteProblem:
        """Record and log that a write of *size* bytes failed, and keep trying."""
        self._problem = problem = _problem_of(error)
        self._needed = size
        self._refused += refused
        loop = asyncio.get_running_loop()
        if self._is_closed:
            return problem
        if loop.time() >= self._warn_at_s:
            self._warn_at_s = loop.time() + _WARN_S
            self._has_warned = True
            what = f"{problem.what}; senders get 503"
            fields = {"what": what, "error": str(error), "fix": problem.fix}
            _log.warning(problem.event, extra={**fields, "refused": self._refused})
            self._refused = 0
        if self._prober is None:
            self._prober = loop.create_task(self._probe())
        return problem

    def _note_success(self) -> None:
        if self._problem is None:
            return
        self._problem = None
        if self._has_warned:
            self._has_warned = False
            _log.warning("oncebridge.spool_available", extra={"refused": self._refused})
            self._refused = 0

    async def _probe(self) -> None:
        """Try to write until that succeeds: while it does not, senders may send nothing."""
        try:
            while self._problem is not None:
                await asyncio.sleep(_TRY_AGAIN_S)
                try:
                    await self._delete()
                    await self.file.run(self._try_to_write)
                except StoreError as error:
                    self._note_failure(error, self._needed)
                else:
                    self._note_success()
        finally:
            self._prober = None

    def _try_to_write(self, db: sqlite3.Connection) -> None:
        """Write as many bytes as failed before, and remove them; runs in the thread of the file."""
        size = self._needed
        self._check_room(db, size)
        with transaction(db):
            db.execute("DROP TABLE IF EXISTS oncebridge_probe")
            db.execute(f"CREATE TABLE oncebridge_probe AS SELECT zeroblob({size})")
        with transaction(db):
            db.execute("DROP TABLE oncebridge_probe")

    # --- the source --------------------------------------------------------------------

    async def open(self, host: Host) -> None:
        self._lock_exclusively()
        self._batch = host.batch
        log = wal_limit(self._path)
        self._batch_bytes, self._reserve = min(_BATCH_BYTES, log), _LOGS_IN_RESERVE * log
        self.depth = await self.file.run(
            lambda db: db.execute("SELECT count(*) FROM oncebridge_spool").fetchone()[0]
        )
        self._pump = Pump(host.router, self._on_answer, batch=host.batch)

    async def run(self) -> None:
        assert self._pump is not None  # noqa: S101 - open before
        await self._pump.run(self._take)

    def stop(self) -> None:
        if self._pump is not None:
            self._pump.stop()

    async def aclose(self) -> None:
        self._is_closed = True
        for task in (self._writer, self._deleter):
            if task is not None:
                await task
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.wait([self._prober])
        await self.file.aclose()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def _take(self) -> list[SourceRecord[int]]:
        """Return the next records, waiting until there are some."""
        most, after = self._batch, self._taken
        self._filled.clear()
        try:
            rows = await self.file.run(lambda db: _take_rows(db.execute(_TAKE, (after, most))))
        except StoreUnavailable as error:
            _log.warning("oncebridge.spool_is_away", extra={"error": str(error)})
            await asyncio.sleep(_TRY_AGAIN_S)
            return []
        if rows:
            self._taken = rows[-1].handle
        else:
            await self._filled.wait()
        return rows

    def _on_answer(self, number: int, answer: RouterAnswer) -> None:
        if answer.acknowledge:
            self._undeleted.append(number)
            if self._deleter is None:
                self._deleter = asyncio.get_running_loop().create_task(self._delete_final())

    async def _delete_final(self) -> None:
        """Delete the records that are final, as many as there are at a time."""
        try:
            while self._undeleted:
                await self._delete()
        except StoreError as error:
            # If that lasts, they are read again after a restart, and are duplicates then.
            self._note_failure(error, self._needed)
        finally:
            self._deleter = None

    async def _delete(self) -> None:
        numbers, self._undeleted = self._undeleted, []

        def delete(db: sqlite3.Connection) -> None:
            with transaction(db):
                rows = [(number,) for number in numbers]
                db.executemany("DELETE FROM oncebridge_spool WHERE number = ?", rows)

        try:
            await self.file.run(delete)
        except BaseException:
            self._undeleted += numbers
            raise
        self.depth -= len(numbers)

    def _lock_exclusively(self) -> None:
        """Raise if another process uses the spool: both would forward the same records."""
        if not self._path.parent.is_dir():
            raise ConfigError("spool", f"{self._path.parent}: directory not found; create it")
        try:
            fd, _ = open_private(Path(f"{self._path}.lock"), os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise ConfigError("spool", f"{self._path}.lock: {why}") from None
        self._lock = os.fdopen(fd, "rb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            self._lock = None
            raise ConfigError(
                "spool",
                f"{self._path}: another process uses this spool; give each process its own file",
            ) from None


def _problem_of(error: StoreError) -> _WriteProblem:
    if isinstance(error, _NoRoom):
        return error.problem
    code = getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF
    return _DISK_FULL if code == sqlite3.SQLITE_FULL else _FAILING


def _take_rows(rows: Iterable[tuple[int, bytes]]) -> list[SourceRecord[int]]:
    """Return rows up to the size of a batch."""
    taken: list[SourceRecord[int]] = []
    size = 0
    for number, raw in rows:
        taken.append(SourceRecord(number, raw))
        size += len(raw)
        if size >= _BATCH_BYTES:
            break
    return taken
