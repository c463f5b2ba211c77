"""
A SQLite file, for the store, the dead letters and the spool.

SQLite blocks, so it runs in a thread: one, since SQLite has a single writer anyway. Everything
written is durable when the call returns (`synchronous=FULL`). Changes that are requested while the
thread is busy share its next transaction: one fsync for all of them.
"""

import asyncio
import os
import re
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, TypeVar
from weakref import finalize

from msgspec import Struct

from oncebridge.base.clock import ms
from oncebridge.base.private_files import create_private
from oncebridge.errors import StoreError, StoreUnavailable

_T = TypeVar("_T")
_Change = tuple[Callable[[sqlite3.Connection], Any], "asyncio.Future[Any]"]
_Answer = tuple["asyncio.Future[Any]", Any, BaseException | None]

_VERSIONS = """
CREATE TABLE IF NOT EXISTS oncebridge_schema (name TEXT PRIMARY KEY, version INTEGER NOT NULL)
"""
_VERSION_OF = "SELECT version FROM oncebridge_schema WHERE name = ?"
_creating = threading.Lock()
_PAUSE_MS = 10
_TOGETHER = 16  # changes per transaction, so that other processes can write in between
WAL_MOST = 16 * 1024 * 1024
_WAL_LEAST = 64 * 1024
_WAL_SHARE = 32
"""The part of the disk that one log may use; several files may be on it."""
_NETWORK_FILE_SYSTEMS = frozenset(
    [
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "glusterfs"),
        *("fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse"),
    ]
)
_TRANSIENT = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_PROTOCOL,
    }
)
_REASONS = {
    sqlite3.SQLITE_READONLY: "the file or its directory is read-only; make both writable, as "
    "SQLite also creates files next to it",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened or created; the directory must exist and be "
    "writable, and a symbolic link must point to a file",
    sqlite3.SQLITE_NOTADB: "is not a SQLite file; use another path",
}


class SQLiteFile:
    """
    The file at *path*, with the tables of *schema*, a list of statements separated by semicolons.

    *name* and *version* identify the tables and their layout, so that a file written by another
    version is refused rather than misread. *page_size* is that of a new file. The write-ahead log
    has at most *longest_log* bytes, and less on a small disk.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        name: str,
        version: int,
        schema: str,
        page_size: int = 4096,
        longest_log: int = WAL_MOST,
        busy_timeout: timedelta = timedelta(seconds=10),
    ) -> None:
        self.path: Final = Path(path)
        self._name = name
        self._version = version
        self._schema = schema
        self._page_size = page_size
        self._longest_log = longest_log
        self._busy_timeout = busy_timeout
        self._thread = _Thread()
        self._connection: sqlite3.Connection | None = None
        self._changes: deque[_Change] = deque()
        """Those that wait for the thread, with their results."""
        self._closed = False

    def refusal(self, db: sqlite3.Connection) -> str:
        """Return why the file of *db* would be refused; empty if it would not."""
        has_versions = "SELECT 1 FROM sqlite_master WHERE name = 'oncebridge_schema'"
        if not db.execute(has_versions).fetchone():
            return ""
        found = db.execute(_VERSION_OF, (self._name,)).fetchone()
        if not found or found[0] == self._version:
            return ""
        other = "a newer" if found[0] > self._version else "an older"
        return (
            f"the {self._name} were written by {other} version of oncebridge (layout {found[0]}, "
            f"this one reads {self._version})"
        )

    async def run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run *work* in the thread; the file is opened, checked and set up on first use."""
        self._check_open()
        return await self._thread.do(asyncio.get_running_loop(), lambda: self._guarded(work))

    async def change(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """
        Run *work* in the thread and in a transaction, which it may share with others.

        It is done completely or not at all. It may run twice, if another change in its transaction
        fails, so it must change nothing but the file.
        """
        self._check_open()
        result: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._changes.append((work, result))
        self._thread.put(self._run_changes)
        return await result

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self.path}: has been closed")

    def _run_changes(self) -> None:
        """Run the changes that wait, in the thread; none if an earlier call has run them."""
        group = [self._changes.popleft() for _ in range(min(len(self._changes), _TOGETHER))]
        if group:
            _answer(self._together(group))

    def _together(self, group: Sequence[_Change]) -> list[_Answer]:
        """Run all in one transaction; if that fails, each in its own transaction."""

        def all_of_them(db: sqlite3.Connection) -> list[_Answer]:
            with transaction(db):
                return [(result, work(db), None) for work, result in group]

        try:
            return self._guarded(all_of_them)
        except BaseException as error:  # noqa: BLE001 - passed to the caller
            # If the file is unavailable, it would be for each of them, and each would wait as long.
            if len(group) == 1 or isinstance(error, StoreUnavailable):
                return [(result, None, error) for _, result in group]
        return [self._together([change])[0] for change in group]

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._thread.do(asyncio.get_running_loop(), self._close)
        self._thread.stop()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _guarded(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            if self._connection is None:
                self._check_open()
                self._connection = self._connect()
            return work(self._connection)
        except sqlite3.Error as error:
            raise _translated(error, self.path) from error

    def _connect(self) -> sqlite3.Connection:
        if self.path.name == ":memory:":
            raise StoreError("sqlite: needs a file; to keep records in memory, use memory: instead")
        if kind := network_file_system(self.path):
            raise StoreError(
                f"{self.path}: is on a network file system ({kind}), where SQLite's locks are not "
                "reliable and two workers could deliver the same event; put the file on a local "
                "disk, or use a store for several hosts (redis, postgresql, dynamodb)"
            )
        if not self.path.parent.is_dir():
            raise StoreError(
                f"{self.path}: the directory does not exist; create it, or use another path"
            )
        # Created first, because SQLite gives its log the mode of the file; SQLite reports errors.
        # One thread at a time: closing a file releases all locks of this process on it.
        with _creating, suppress(OSError):
            os.close(create_private(self.path))
        db = sqlite3.connect(
            _uri(self.path, "mode=rw"),
            uri=True,
            timeout=self._busy_timeout.total_seconds(),
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            self._prepare(db)
        except BaseException:
            db.close()
            raise
        # A file that is never closed: Python 3.13 warns of a connection that is not. Not at the end
        # of the interpreter, when the thread may still be at work.
        finalize(self, db.close).atexit = False
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        db.execute(f"PRAGMA busy_timeout = {ms(self._busy_timeout)}")
        db.execute(f"PRAGMA page_size = {self._page_size}")  # without effect on an existing file
        mode = self._switch_to_wal(db)
        if mode != "wal":
            raise StoreError(
                f"{self.path}: this file system does not support SQLite's write-ahead log "
                f"(journal mode {mode!r}); put the file on a local disk"
            )
        db.execute("PRAGMA synchronous = FULL")
        # Small, as SQLite goes through all cached pages at each commit after a page was split, and
        # the system caches the file as well.
        db.execute("PRAGMA cache_size = -8192")
        # Keys are random, so claims change pages all over the index: write them to the main file
        # less often than every 4 MB, if the disk has room.
        most = wal_limit(self.path, self._longest_log)
        (page_size,) = db.execute("PRAGMA page_size").fetchone()
        db.execute(f"PRAGMA wal_autocheckpoint = {most // page_size}")
        db.execute(f"PRAGMA journal_size_limit = {most}")
        with transaction(db):
            db.execute(_VERSIONS)
            db.execute(
                "INSERT OR IGNORE INTO oncebridge_schema VALUES (?, ?)", (self._name, self._version)
            )
            if refusal := self.refusal(db):
                raise StoreError(f"{self.path}: {refusal}; use that version, or start a new file")
            for statement in self._schema.split(";"):
                db.execute(statement)

    def _switch_to_wal(self, db: sqlite3.Connection) -> str:
        """Switch to a write-ahead log; SQLite does not wait if several processes do so at once."""
        left = ms(self._busy_timeout) // _PAUSE_MS
        while True:
            try:
                return str(db.execute("PRAGMA journal_mode = WAL").fetchone()[0])
            except sqlite3.OperationalError as error:
                left -= 1
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or left <= 0:
                    raise
            threading.Event().wait(_PAUSE_MS / 1000)


class _Thread:
    """
    A thread that runs one job after the other, for any loop.

    An executor with one thread would do the same, with 50 % more overhead per call. A job that
    runs when the interpreter exits is finished.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_started = self._is_stopped = False

    def do(self, loop: asyncio.AbstractEventLoop, work: Callable[[], _T]) -> asyncio.Future[_T]:
        """Run *work*; it is run even if the caller is cancelled while it waits."""
        result: asyncio.Future[_T] = loop.create_future()

        def job() -> None:
            try:
                done: _Answer = result, work(), None
            except BaseException as error:  # noqa: BLE001 - passed to the caller
                done = result, None, error
            _answer([done])

        self.put(job)
        return result

    def put(self, job: Callable[[], None]) -> None:
        """Run *job*, which must not raise."""
        with self._lock:
            if self._is_stopped:
                raise RuntimeError("the thread has been stopped")
            if not self._is_started:
                self._start()
            self._jobs.put(job)

    def _start(self) -> None:
        name = "oncebridge-sqlite"
        thread = threading.Thread(target=_run_jobs, args=[self._jobs], name=name, daemon=True)
        thread.start()
        finalize(self, _stop, self._jobs, thread)  # also when the interpreter exits
        self._is_started = True

    def stop(self) -> None:
        """End the thread after its last job."""
        with self._lock:
            self._is_stopped = True
            self._jobs.put(None)


def _run_jobs(jobs: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # freed now: the next job may come late


def _answer(answers: Sequence[_Answer]) -> None:
    """Set results from the thread, with one call of each loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Answer]] = {}
    for answer in answers:
        by_loop.setdefault(answer[0].get_loop(), []).append(answer)
    for loop, some in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed, and no caller waits
            loop.call_soon_threadsafe(_set_results, some)


def _set_results(answers: Sequence[_Answer]) -> None:
    for result, value, error in answers:
        if result.done():
            continue  # the caller was cancelled
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)


def _stop(jobs: "SimpleQueue[Callable[[], None] | None]", thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Run the block in a transaction, exclusively among all processes that share the file."""
    # IMMEDIATE takes the write lock before the first read, so nothing that was read can change.
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def _translated(error: sqlite3.Error, path: Path) -> StoreError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    kind = StoreUnavailable if code in _TRANSIENT else StoreError
    return kind(f"{path}: {_REASONS.get(code, error)}")


@contextmanager
def open_unchanged(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file at *path* for reading, without creating files next to it."""
    companions = [path.with_name(f"{path.name}{end}") for end in ("-wal", "-shm")]
    # Without these files no process has it open; SQLite would create them for us.
    how = "mode=ro" if all(file.exists() for file in companions) else "immutable=1"
    db = sqlite3.connect(
        _uri(path, how), uri=True, timeout=1, isolation_level=None, check_same_thread=False
    )
    try:
        yield db
    finally:
        db.close()


def _uri(path: Path, how: str) -> str:
    return f"{path.absolute().as_uri()}?{how}"


class Disk(Struct, frozen=True):
    """Size and free space of a file system in bytes; zero if the system does not report them."""

    size: int = 0
    free: int = 0
    """Available to this process."""

    @classmethod
    def of(cls, path: Path) -> "Disk":
        """Return the disk of *path*; the file need not exist, its directory must."""
        try:
            found = os.statvfs(path.absolute().parent)
        except OSError:
            return cls()
        return cls(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def wal_limit(path: Path, most: int = WAL_MOST) -> int:
    """
    Return the maximum size of the write-ahead log of the file at *path*, in bytes; *most* or less.

    A log that fills the disk could not be written to the main file any more, and then no write
    would succeed, not even a deletion.
    """
    size = Disk.of(path).size
    return max(min(size // _WAL_SHARE, most), _WAL_LEAST) if size else most


def network_file_system(path: Path) -> str:
    """Return the type of the file system of *path* if it is a network one, otherwise empty."""
    kind = file_system(path)
    return kind if kind in _NETWORK_FILE_SYSTEMS else ""


def file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system of *path*; empty if the system does not report it."""
    try:
        lines = mounts.read_bytes().splitlines()
    except OSError:
        return ""
    target = path.absolute().resolve()
    best, kind = -1, ""
    for line in lines:
        left, _, right = line.partition(b" - ")
        fields, types = left.split(), right.split()
        if len(fields) < 5 or not types:
            continue
        # The kernel writes spaces in a path as octal escapes.
        name = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8) & 0xFF]), fields[4])
        point = Path(os.fsdecode(name))
        depth = len(point.parts)
        if target.is_relative_to(point) and depth >= best:
            best, kind = depth, os.fsdecode(types[0])
    return kind
