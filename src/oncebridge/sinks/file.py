"""
The file sink: NDJSON, one line per event.

A batch is written at once and is on the disk (`fsync`) before it counts as delivered. Several
processes may write to the same file (`oncebridge.base.line_files`). An incomplete last line
belongs to an event that was never committed and is delivered again, so it is removed.
"""

import errno
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, ClassVar, Final, Self

from msgspec import Struct

from oncebridge.base.line_files import HalfWritten, LineFile, WriterThread, file_path
from oncebridge.base.options import Doc, Size
from oncebridge.base.private_files import explain_os_error, sync_directory
from oncebridge.errors import ConfigError, SinkError
from oncebridge.events.framing import as_line
from oncebridge.sinks.api import Closed, Delivery, No, SinkAnswer, Unknown, Yes

_NEEDS_OPERATOR: Final = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
        *(errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG),
    }
)


class FileSinkOptions(Struct, frozen=True, kw_only=True):
    """Options of the file sink."""

    max_size: Annotated[
        Size | None,
        Doc(
            "Start a new file when a batch would make this one larger: PATH becomes PATH.1.",
            example="100MiB",
            at_least=1,
        ),
    ] = None
    keep: Annotated[
        int,
        Doc(
            "How many old files to keep; PATH.1 is the newest. "
            "0 keeps all, and then PATH.1 is the oldest.",
            example="10",
            at_least=0,
        ),
    ] = 5
    fsync: Annotated[
        bool, Doc("Wait until a batch is on the disk. Without it, a power failure can lose events.")
    ] = True


class FileSink:
    """
    Append events to the file at *path*, as NDJSON.

    A batch is never split between two files, so a file is larger than *max_size* if a single batch
    is. If a batch cannot be written completely, the part that was written is removed.
    """

    Options: ClassVar[type[FileSinkOptions]] = FileSinkOptions
    batch = 500
    concurrency = 1

    def __init__(self, path: str | Path, options: FileSinkOptions | None = None) -> None:
        options = options or FileSinkOptions()
        if options.max_size is not None and options.max_size < 1:
            raise ConfigError("max_size", f"must be at least 1 byte, not {options.max_size}")
        if options.keep < 0:
            raise ConfigError("keep", f"must be 0 or more, not {options.keep}")
        self._path = Path(path)
        self._options = options
        self._file = LineFile(self._path, mode=0o640, fsync=options.fsync)
        self._thread = WriterThread()

    @classmethod
    def from_url(cls, url: str, options: FileSinkOptions | None = None) -> Self:
        """Write to the file of `file:PATH`."""
        return cls(file_path(url), options)

    async def open(self) -> None:
        def check(stop: threading.Event) -> None:
            with self._file.locked(stop):
                pass

        try:
            await self._thread.run(check)
        except OSError as error:
            raise SinkError(f"{self._path}: {explain_os_error(error)}") from error

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        if not deliveries:
            return []
        if self._thread.is_busy:
            answer: SinkAnswer = No(f"{self._path}: an earlier batch is still being written")
        else:
            text = b"".join([as_line(delivery.event.raw) for delivery in deliveries])
            answer = await self._thread.run(lambda stop: self._write(text, stop))
        return [answer] * len(deliveries)

    async def aclose(self) -> None:
        await self._thread.aclose(self._file.close)

    def _write(self, text: bytes, stop: threading.Event) -> SinkAnswer:
        try:
            while True:
                with self._file.locked(stop) as size:
                    if not self._is_full(size, len(text)):
                        self._file.append(text)
                        return Yes()
                    self._rotate()
        except HalfWritten as error:
            return Unknown(
                f"{self._path}: {explain_os_error(error)}; part of the batch may be written"
            )
        except OSError as error:
            reason = f"{self._path}: {explain_os_error(error)}"
            return Closed(reason) if error.errno in _NEEDS_OPERATOR else No(reason)

    def _is_full(self, size: int, more: int) -> bool:
        most = self._options.max_size
        return most is not None and size > 0 and size + more > most

    def _rotate(self) -> None:
        """Rename the file and the older ones; needs the lock."""
        keep = self._options.keep
        for number in range(keep - 1, 0, -1):
            with suppress(FileNotFoundError):
                self._numbered(number).rename(self._numbered(number + 1))
        self._path.rename(self._numbered(1 if keep else self._last_number() + 1))
        sync_directory(self._path.parent)

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _last_number(self) -> int:
        form = re.compile(re.escape(self._path.name) + r"\.([1-9][0-9]*)")
        names = (form.fullmatch(entry.name) for entry in self._path.parent.iterdir())
        return max((int(name[1]) for name in names if name), default=0)
