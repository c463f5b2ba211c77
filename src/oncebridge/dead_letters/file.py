"""
Dead letters in a file: NDJSON, one dead letter per line, readable with any tool.

A dead letter is on the disk before its event is acknowledged. The line has the event as text under
`raw`, or under `raw_base64` if it is not UTF-8. Several processes may share the file
(`oncebridge.base.line_files`). Numbers ascend from line to line. `drop` writes a new file next to
the old one and then replaces it. If the highest number was dropped, a separate line keeps it, so
that no number is assigned twice.
"""

import base64
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, ClassVar, Final, Self, TypeVar

import msgspec
from msgspec import Struct

from oncebridge.base.line_files import LineFile, WriterThread, file_path
from oncebridge.base.private_files import create_private, explain_os_error, sync_directory
from oncebridge.dead_letters.api import DeadLetter
from oncebridge.errors import DeadLetterError, StoreError, StoreUnavailable

_T = TypeVar("_T")

_NEAR: Final = 64 * 1024  # a shorter range is read, not searched


class FileDeadLettersOptions(Struct, frozen=True, kw_only=True):
    """Dead letters in a file have no options."""


class _LineHeader(Struct, frozen=True, gc=False):
    """The fields that every line has."""

    number: int
    dropped: bool = False
    """True if the line is not a dead letter: it keeps the highest number that was assigned."""


class _LetterLine(_LineHeader, frozen=True, gc=False, kw_only=True):
    """A dead letter as it is written to the file."""

    reason: str
    message: str
    route: str
    rule: str
    key: str
    attempts: int
    maybe_delivered: bool
    buried_ms: int
    raw: str | None = None
    raw_base64: str = ""


_read_header = msgspec.json.Decoder(_LineHeader).decode
_read_line = msgspec.json.Decoder(_LetterLine).decode


class FileDeadLetters:
    """Keep dead letters in the file at *path*, readable by its owner only."""

    Options: ClassVar[type[FileDeadLettersOptions]] = FileDeadLettersOptions

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file = LineFile(self._path, mode=0o600)
        self._thread = WriterThread()
        self._closed = False

    @classmethod
    def from_url(
        cls,
        url: str,
        options: FileDeadLettersOptions | None = None,  # noqa: ARG003 - there are none
    ) -> Self:
        """Use the file of `file:PATH`."""
        return cls(file_path(url))

    async def open(self) -> None:
        def check(stop: threading.Event) -> None:
            with self._file.locked(stop) as size:
                self._last_number(size)

        await self._run(check)

    async def put(self, letters: Sequence[DeadLetter]) -> None:
        def append(stop: threading.Event) -> None:
            with self._file.locked(stop) as size:
                first = self._last_number(size) + 1
                lines = [_line_of(letter, number) for number, letter in enumerate(letters, first)]
                self._file.append(b"".join(lines))

        try:
            await self._run(append)
        except (StoreError, UnicodeEncodeError) as error:
            raise DeadLetterError(str(error)) from error

    async def list(self, *, after: int = 0, limit: int = 100) -> list[DeadLetter]:
        return await self._run(lambda _: _page(self._path, after, limit))

    async def drop(self, numbers: Sequence[int]) -> int:
        def rewrite(stop: threading.Event) -> int:
            with self._file.locked(stop):
                return self._drop(frozenset(numbers))

        return await self._run(rewrite)

    async def aclose(self) -> None:
        self._closed = True
        await self._thread.aclose(self._file.close)

    async def _run(self, work: Callable[[threading.Event], _T]) -> _T:
        if self._closed:
            raise StoreError(f"{self._path}: has been closed")
        try:
            return await self._thread.run(work)
        except BlockingIOError as error:
            raise StoreUnavailable(f"{self._path}: {explain_os_error(error)}") from error
        except OSError as error:
            raise StoreError(f"{self._path}: {explain_os_error(error)}") from error
        except UnicodeEncodeError:
            raise
        except (msgspec.MsgspecError, ValueError):
            # Without the error's text, which may quote the line.
            raise StoreError(
                f"{self._path}: a line is not a dead letter; use another path, or fix the file"
            ) from None

    # --- in the thread -------------------------------------------------------------------

    def _last_number(self, size: int) -> int:
        """Return the highest number that was ever assigned; it is in the last line."""
        return _read_header(self._file.read_last_line()).number if size else 0

    def _drop(self, numbers: AbstractSet[int]) -> int:
        path = self._path.resolve()  # a symbolic link stays one
        new = path.with_name(f"{path.name}.new")
        new.unlink(missing_ok=True)  # may be left by a process that was killed; we hold the lock
        fd = create_private(new)
        try:
            with os.fdopen(fd, "wb") as kept, path.open("rb") as file:
                _copy_owner_and_mode(os.fstat(file.fileno()), fd)
                dropped = _copy(file, kept, numbers)
                kept.flush()
                os.fsync(fd)
            if dropped:
                new.rename(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        if dropped:
            sync_directory(path.parent)
        else:
            new.unlink()
        return dropped


def _copy_owner_and_mode(old: os.stat_result, fd: int) -> None:
    """Set owner and mode of the file *fd* to those of the *old* file."""
    new = os.fstat(fd)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with suppress(PermissionError):  # only root may give a file away
            os.fchown(fd, old.st_uid, old.st_gid)
    os.fchmod(fd, stat.S_IMODE(old.st_mode))


def _page(path: Path, after: int, limit: int) -> list[DeadLetter]:
    found: list[DeadLetter] = []
    with suppress(FileNotFoundError), path.open("rb") as file:
        _seek(file, after)
        for text in _whole_lines(file):
            if len(found) >= limit:
                break
            heading = _read_header(text)
            if heading.number > after and not heading.dropped:
                found.append(_letter_of(_read_line(text)))
    return found


def _copy(file: BinaryIO, kept: BinaryIO, numbers: AbstractSet[int]) -> int:
    """Copy the dead letters that are not among *numbers*; return how many were left out."""
    dropped = last_kept = last = 0
    for text in _whole_lines(file):
        heading = _read_header(text)
        last = heading.number
        if heading.dropped:
            continue
        if last in numbers:
            dropped += 1
        else:
            kept.write(text)
            last_kept = last
    if last > last_kept:
        kept.write(_encoded({"number": last, "dropped": True}))
    return dropped


def _seek(file: BinaryIO, after: int) -> None:
    """Seek to the start of a line that is shortly before the first number above *after*."""
    low, high = 0, file.seek(0, os.SEEK_END)
    while high - low > _NEAR:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()
        begin = file.tell()
        text = file.readline()
        if begin < high and text.endswith(b"\n") and _read_header(text).number <= after:
            low = begin
        else:
            high = middle
    file.seek(low)


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Return the lines, without a last line that another process is writing."""
    return (text for text in file if text.endswith(b"\n"))


def _line_of(letter: DeadLetter, number: int) -> bytes:
    content: dict[str, str]
    try:
        content = {"raw": letter.raw.decode()}
    except UnicodeDecodeError:
        content = {"raw_base64": base64.b64encode(letter.raw).decode()}
    return _encoded(
        {
            "number": number,
            "reason": letter.reason,
            # Messages of the operating system may contain bytes that are not text.
            "message": letter.message.encode(errors="replace").decode(),
            "route": letter.route,
            "rule": letter.rule,
            "key": letter.key.hex(),
            "attempts": letter.attempts,
            "maybe_delivered": letter.maybe_delivered,
            "buried_ms": letter.buried_ms,
            **content,
        }
    )


def _encoded(members: dict[str, object]) -> bytes:
    return msgspec.json.encode(members) + b"\n"


def _letter_of(line: _LetterLine) -> DeadLetter:
    return DeadLetter(
        base64.b64decode(line.raw_base64, validate=True) if line.raw is None else line.raw.encode(),
        line.reason,
        line.message,
        line.route,
        line.rule,
        bytes.fromhex(line.key),
        line.attempts,
        line.maybe_delivered,
        line.buried_ms,
        line.number,
    )
