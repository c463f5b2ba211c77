"""
Files of lines that several processes append to, and the thread that writes them.

A writer takes the file's lock (`flock`). It then checks that the path still names the same
file, which may have been rotated, and that the last line is complete, because another writer
may have been killed while writing it. The file sink and the file dead letters use this.
"""

import asyncio
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw

from oncebridge.base.private_files import open_private, sync_directory
from oncebridge.errors import ConfigError

_T = TypeVar("_T")

_PAUSE_S: Final = 0.01
_PAUSES: Final = 500  # less than a gateway waits, so that the answer can still be a clear no
_BLOCK: Final = 64 * 1024
_LONGEST_LINE: Final = 64 * 1024 * 1024

_read_any = msgspec.json.Decoder(Raw).decode


def file_path(url: str) -> str:
    """Return the path of a `file:PATH` or `file:///PATH` address, unchanged."""
    kind, _, path = url.partition(":")
    if path.startswith("//"):
        path = path.removeprefix("//")
        if not path.startswith("/"):
            raise ConfigError("", f"{url!r}: names a host; write file:PATH or file:///PATH")
    if kind != "file" or not path or "\0" in path:
        raise ConfigError("", f"{url!r}: is not a file; write file:PATH or file:///PATH")
    return path


class WriterThread:
    """One thread for writes that may block; they run in the order of their calls."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._calls: dict[Future[Any], threading.Event] = {}

    @property
    def is_busy(self) -> bool:
        """True while a write is running, also one whose caller was cancelled."""
        return any(not call.done() for call in self._calls)

    async def run(self, work: Callable[[threading.Event], _T]) -> _T:
        """Return the result of *work*; the event passed to it is set if the caller is cancelled."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="oncebridge-writer")
        stop = threading.Event()
        call = self._pool.submit(work, stop)
        self._calls = {call: stop} | {
            earlier: event for earlier, event in self._calls.items() if not earlier.done()
        }
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            stop.set()
            raise

    async def aclose(self, close: Callable[[], None]) -> None:
        """Run *close* after all writes; do not wait for it if a write is still running."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        for stop in self._calls.values():
            stop.set()
        closing = pool.submit(close)
        pool.shutdown(wait=False)
        if not self.is_busy:
            await asyncio.wrap_future(closing)


class HalfWritten(OSError):
    """A write failed part-way, and the written part could not be removed."""


class LineFile:
    """
    A file of lines at *path* that several processes append to. All methods block.

    They raise `OSError`; `explain_os_error` returns a message for one.
    """

    def __init__(self, path: Path, *, mode: int, fsync: bool = True) -> None:
        self._path = path
        self._mode = mode
        self._fsync = fsync
        self._fd = -1

    @contextmanager
    def locked(self, stop: threading.Event) -> Iterator[int]:
        """
        Lock the file, complete or remove an unfinished last line, and yield the size.

        The file is created if it does not exist. Waiting for the lock ends with an error after
        some seconds, and when *stop* is set.
        """
        try:
            while True:
                if self._fd < 0:
                    self._open()
                _lock(self._fd, stop)
                if self._is_current():
                    break
                self.close()  # while we waited it was renamed or removed
            _repair_last_line(self._fd)
            yield os.fstat(self._fd).st_size
        except OSError:
            self.close()
            raise
        finally:
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def append(self, text: bytes) -> None:
        """Write all of *text*, or nothing; only while the lock is held."""
        size = os.fstat(self._fd).st_size
        try:
            left = memoryview(text)
            while left:
                left = left[os.write(self._fd, left) :]
            if self._fsync:
                os.fsync(self._fd)
        except OSError as error:
            try:
                os.ftruncate(self._fd, size)
            except OSError:
                raise HalfWritten(error.errno, error.strerror) from error
            raise

    def read_last_line(self) -> bytes:
        """Read the last line, without its end; only while the lock is held."""
        size = os.fstat(self._fd).st_size
        begin = _line_start(self._fd, max(0, size - 1))
        return os.pread(self._fd, size - begin, begin).rstrip(b"\n")

    def close(self) -> None:
        """Close the file and release its lock; may be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_NOCTTY
        self._fd, is_new = open_private(self._path, flags, mode=self._mode)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if is_new:
            sync_directory(self._path.parent)

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), self._path.stat())
        except FileNotFoundError:
            return False


def _lock(fd: int, stop: threading.Event) -> None:
    for _ in range(_PAUSES):
        if stop.is_set():
            break
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stop.wait(_PAUSE_S)
        else:
            return
    raise BlockingIOError(errno.EAGAIN, "another process keeps it locked")


def _repair_last_line(fd: int) -> None:
    """Complete or remove a last line without a line end: its writer was killed."""
    size = os.fstat(fd).st_size
    if not size or os.pread(fd, 1, size - 1) == b"\n":
        return
    begin = _line_start(fd, size)
    line = os.pread(fd, size - begin, begin)
    if _is_json(line):
        os.write(fd, b"\n")
    elif line.lstrip(b" \t\r\0")[:1] in {b"{", b""}:  # a crash of the system leaves zeros
        os.ftruncate(fd, begin)
    else:
        raise OSError(
            errno.EINVAL, "its last line is not JSON and has no line end; choose another path"
        )


def _line_start(fd: int, end: int) -> int:
    """Return the offset at which the line that ends at *end* begins."""
    at = end
    while at > 0:
        if end - at > _LONGEST_LINE:
            raise OSError(errno.EINVAL, "it is not a file of JSON lines; choose another path")
        block = min(_BLOCK, at)
        found = os.pread(fd, block, at - block).rfind(b"\n")
        if found >= 0:
            return at - block + found + 1
        at -= block
    return 0


def _is_json(line: bytes) -> bool:
    try:
        _read_any(line)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
