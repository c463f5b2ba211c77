"""
A SQLite file, as the store and the dead letters use it.

SQLite blocks, so it lives in a thread of its own: one, as there is one writer anyway.
Everything that is written is durable when the call returns (`synchronous=FULL`). Changes
that are asked for while the thread is busy go together in its next transaction: one fsync
for all of them.
"""

import asyncio
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, finalize

from msgspec import Struct

from oncebridge.base.clock import ms
from oncebridge.base.private_files import create_private
from oncebridge.errors import StoreError, StoreUnavailable

_T = TypeVar("_T")
_Work = Callable[[sqlite3.Connection], Any]
_Done = tuple[Any, Exception | None]

_VERSIONS = """
CREATE TABLE IF NOT EXISTS oncebridge_schema (name TEXT PRIMARY KEY, version INTEGER NOT NULL)
"""
_VERSION_OF = "SELECT version FROM oncebridge_schema WHERE name = ?"
_creating = threading.Lock()
_PAUSE_MS = 10
_TOGETHER = 16  # works in one transaction: other processes get their turn in between
_WAL_LEAST, _WAL_MOST = 64 * 1024, 16 * 1024 * 1024
_WAL_SHARE = 32
"""Of the disk: several files may be on it."""
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


class SQLiteFile:
    """
    The file at *path*, with the tables of *schema*.

    *name* and *version* say whose tables and which layout they are, so that a file
    written by another version is refused rather than misread.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        name: str,
        version: int,
        schema: str,
        busy_timeout: timedelta = timedelta(seconds=10),
    ) -> None:
        self._path = Path(path)
        self._name = name
        self._version = version
        self._schema = schema
        self._busy_timeout = busy_timeout
        self._thread = _Thread()
        self._connection: sqlite3.Connection | None = None
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _WriteQueue] = (
            WeakKeyDictionary()
        )
        self._closed = False

    @property
    def path(self) -> Path:
        return self._path

    def refusal(self, db: sqlite3.Connection) -> str:
        """Return why the file behind *db* would be refused; nothing if it would not."""
        has_versions = "SELECT 1 FROM sqlite_master WHERE name = 'oncebridge_schema'"
        if not db.execute(has_versions).fetchone():
            return ""
        found = db.execute(_VERSION_OF, (self._name,)).fetchone()
        return self._other_layout(found[0]) if found and found[0] != self._version else ""

    def _other_layout(self, version: int) -> str:
        return (
            f"the {self._name} were written by another version of oncebridge (layout {version}, "
            f"this one reads {self._version}); start a new file"
        )

    async def run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Do *work* in the thread; the file is opened, checked and set up on first use."""
        if self._closed:
            raise StoreError(f"{self._path}: has been closed")
        loop = asyncio.get_running_loop()
        return await self._thread.do(loop, lambda: self._guarded(work))

    async def change(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """
        Do *work* in the thread and in a transaction, perhaps together with others.

        It is done wholly or not at all, and may be done twice if another's work beside it
        fails; it must change nothing but the file.
        """
        if self._closed:
            raise StoreError(f"{self._path}: has been closed")
        loop = asyncio.get_running_loop()
        queue = self._queues.get(loop)
        if queue is None:
            queue = self._queues[loop] = _WriteQueue()
        if queue.is_free:
            queue.is_free = False
            try:
                ((value, error),) = await self._in_thread(loop, [work])
            finally:
                self._continue(loop, queue)
            if error is not None:
                raise error
            return cast("_T", value)
        result: asyncio.Future[_T] = loop.create_future()
        queue.waiting.append((work, result))
        return await result

    def _in_thread(
        self, loop: asyncio.AbstractEventLoop, works: Sequence[_Work]
    ) -> asyncio.Future[list[_Done]]:
        return self._thread.do(loop, lambda: self._together(works))

    def _continue(self, loop: asyncio.AbstractEventLoop, queue: "_WriteQueue") -> None:
        if queue.waiting:
            queue.task = loop.create_task(self._drain(queue))
        else:
            queue.is_free = True

    async def _drain(self, queue: "_WriteQueue") -> None:
        loop = asyncio.get_running_loop()
        try:
            while queue.waiting:
                group = queue.waiting[:_TOGETHER]
                del queue.waiting[:_TOGETHER]
                done = await self._in_thread(loop, [work for work, _ in group])
                for (_, result), (value, error) in zip(group, done, strict=True):
                    _set_result(result, value, error)
        except BaseException as error:
            for _, result in [*group, *queue.waiting]:
                if not result.done():
                    result.set_exception(StoreError(f"{self._path}: {error!r}"))
            queue.waiting.clear()
            raise
        finally:
            queue.is_free = True

    def _together(self, works: Sequence[_Work]) -> list[_Done]:
        """Do all in one transaction; if that fails, each in one of its own."""

        def all_of_them(db: sqlite3.Connection) -> list[_Done]:
            with transaction(db):
                return [(work(db), None) for work in works]

        try:
            return self._guarded(all_of_them)
        except StoreUnavailable as error:
            # It would be away for each of them too, and each would wait as long.
            return [(None, error)] * len(works)
        except Exception as error:  # noqa: BLE001 - handed to whoever asked for it
            if len(works) == 1:
                return [(None, error)]
        return [self._together([work])[0] for work in works]

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        queue = self._queues.get(asyncio.get_running_loop())
        if queue is not None and queue.task is not None:
            await asyncio.wait([queue.task])
        await self._thread.do(asyncio.get_running_loop(), self._close)
        self._thread.stop()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _guarded(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            if self._connection is None:
                if self._closed:
                    raise StoreError(f"{self._path}: has been closed")
                self._connection = self._connect()
            return work(self._connection)
        except sqlite3.Error as error:
            raise _translated(error, self._path) from error

    def _connect(self) -> sqlite3.Connection:
        if self._path.name == ":memory:":
            raise StoreError("sqlite: needs a file; to keep nothing, write memory: instead")
        _refuse_network_file_system(self._path)
        if not self._path.parent.is_dir():
            raise StoreError(
                f"{self._path}: the directory does not exist; create it, or name another path"
            )
        # First, as SQLite gives its log the mode of the file; SQLite reports what goes wrong. One
        # thread at a time: closing a file releases the locks of this process's connections to it.
        with _creating, suppress(OSError):
            os.close(create_private(self._path))
        db = sqlite3.connect(
            _uri(self._path, "mode=rw"),
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
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        db.execute(f"PRAGMA busy_timeout = {ms(self._busy_timeout)}")
        mode = self._switch_to_wal(db)
        if mode != "wal":
            raise StoreError(
                f"{self._path}: this file system gives SQLite no write-ahead log "
                f"(journal mode {mode!r}); put the file on a local disk"
            )
        db.execute("PRAGMA synchronous = FULL")
        # Keys are random, so every write touches pages all over the table: keep them at hand,
        # and carry them over to the main file less often than every 4 MB, where there is room.
        db.execute("PRAGMA cache_size = -65536")
        most = wal_limit(self._path)
        (page_size,) = db.execute("PRAGMA page_size").fetchone()
        db.execute(f"PRAGMA wal_autocheckpoint = {most // page_size}")
        db.execute(f"PRAGMA journal_size_limit = {most}")
        with transaction(db):
            db.execute(_VERSIONS)
            db.execute(
                "INSERT OR IGNORE INTO oncebridge_schema VALUES (?, ?)", (self._name, self._version)
            )
            (version,) = db.execute(_VERSION_OF, (self._name,)).fetchone()
            if version != self._version:
                raise StoreError(f"{self._path}: {self._other_layout(version)}")
            db.execute(self._schema)

    def _switch_to_wal(self, db: sqlite3.Connection) -> str:
        """Ask for a write-ahead log; SQLite itself does not wait when several ask at once."""
        left = ms(self._busy_timeout) // _PAUSE_MS
        while True:
            try:
                return str(db.execute("PRAGMA journal_mode = WAL").fetchone()[0])
            except sqlite3.OperationalError as error:
                left -= 1
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or left <= 0:
                    raise
            threading.Event().wait(_PAUSE_MS / 1000)


_Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class _Thread:
    """
    A thread that does one thing after the other, for any loop.

    An executor of one thread would do the same, at half as much again for each call. What has
    begun when the interpreter ends is still done.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_started = self._is_stopped = False

    def do(self, loop: asyncio.AbstractEventLoop, work: Callable[[], _T]) -> asyncio.Future[_T]:
        """Do *work*; whoever is cancelled while waiting leaves it to be done all the same."""
        result: asyncio.Future[_T] = loop.create_future()
        with self._lock:
            if self._is_stopped:
                raise RuntimeError("the thread has been stopped")
            if not self._is_started:
                self._start()
            self._jobs.put((work, loop, result))
        return result

    def _start(self) -> None:
        name = "oncebridge-sqlite"
        thread = threading.Thread(target=_run_jobs, args=[self._jobs], name=name, daemon=True)
        thread.start()
        finalize(self, _stop, self._jobs, thread)  # also at the end of the interpreter
        self._is_started = True

    def stop(self) -> None:
        """Let the thread end when it has done what it was asked to."""
        with self._lock:
            self._is_stopped = True
            self._jobs.put(None)


def _run_jobs(jobs: "SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        work, loop, result = job
        value, error = None, None
        try:
            value = work()
        except BaseException as raised:  # noqa: BLE001 - handed to whoever asked for it
            error = raised
        with suppress(RuntimeError):  # the loop has been closed, and nobody waits
            loop.call_soon_threadsafe(_set_result, result, value, error)
        del job, work, loop, result, value, error  # it may be long until the next one


def _set_result(result: "asyncio.Future[Any]", value: object, error: BaseException | None) -> None:
    if result.done():
        return  # whoever asked has been cancelled
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(value)


def _stop(jobs: "SimpleQueue[_Job | None]", thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()


class _WriteQueue:
    """What one loop is waiting for."""

    def __init__(self) -> None:
        self.waiting: list[tuple[_Work, asyncio.Future[Any]]] = []
        self.is_free = True
        self.task: asyncio.Task[None] | None = None
        """Kept, as the loop itself holds it weakly only."""


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Do all of the block or nothing, alone among all processes that share the file."""
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
    if code == sqlite3.SQLITE_READONLY:
        return StoreError(
            f"{path}: the file or its directory is read-only; SQLite has to write beside it too"
        )
    if code == sqlite3.SQLITE_CANTOPEN:
        return StoreError(
            f"{path}: cannot be opened or created; the directory must exist and be writable, and "
            "a symbolic link must lead to a file"
        )
    if code == sqlite3.SQLITE_NOTADB:
        return StoreError(f"{path}: is not a SQLite file; name another path")
    if code in _TRANSIENT:
        return StoreUnavailable(f"{path}: {error}")
    return StoreError(f"{path}: {error}")


@contextmanager
def open_unchanged(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file at *path* as it is: nothing is changed, and nothing made beside it."""
    beside = [path.with_name(f"{path.name}{end}") for end in ("-wal", "-shm")]
    # Where its helpers are not there, nobody has it open; SQLite would make them for us.
    how = "mode=ro" if all(file.exists() for file in beside) else "immutable=1"
    db = sqlite3.connect(
        _uri(path, how),
        uri=True,
        timeout=1,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        yield db
    finally:
        db.close()


def _uri(path: Path, how: str) -> str:
    return f"{path.absolute().as_uri()}?{how}"


class Disk(Struct, frozen=True):
    """The file system that a file is on, in bytes; zeros where the system does not tell."""

    size: int = 0
    free: int = 0
    """What this process may use."""

    @classmethod
    def of(cls, path: Path) -> "Disk":
        """Return the disk of *path*, which need not exist; its directory does."""
        try:
            found = os.statvfs(path.absolute().parent)
        except OSError:
            return cls()
        return cls(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def wal_limit(path: Path) -> int:
    """
    Return how large the write-ahead log of the file at *path* should become, in bytes.

    A log that is larger than the disk would never be carried over to the main file, and no
    write would succeed any more, not even a deletion.
    """
    size = Disk.of(path).size
    return max(min(size // _WAL_SHARE, _WAL_MOST), _WAL_LEAST) if size else _WAL_MOST


def network_file_system(path: Path) -> str:
    """Name the type of the file system that *path* is on if others share it, by the network."""
    kind = file_system(path)
    return kind if kind in _NETWORK_FILE_SYSTEMS else ""


def _refuse_network_file_system(path: Path) -> None:
    kind = network_file_system(path)
    if kind:
        raise StoreError(
            f"{path}: lies on a network file system ({kind}), where SQLite's locks do not hold "
            "and two workers would both win; put the file on a local disk, or use a store made "
            "for several hosts (redis, postgresql, dynamodb)"
        )


def file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Name the type of the file system that *path* is on; empty where the system does not tell."""
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
        # the kernel writes blanks in a path as octal escapes
        name = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8) & 0xFF]), fields[4])
        point = Path(os.fsdecode(name))
        depth = len(point.parts)
        if target.is_relative_to(point) and depth >= best:
            best, kind = depth, os.fsdecode(types[0])
    return kind
