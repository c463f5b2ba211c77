"""
Cut the files of a recording into pieces of work, in order.

A plain file of lines is cut into blocks at line ends, and each worker reads its own block, so a
large file is read by all workers at once. Other files (gzip, arrays, events over several lines,
pipes) are split here by `oncebridge.events.framing`, and sent to workers in batches. Memory is
bounded for files, lines and arrays of any size.
"""

import gzip
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO, Final, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from oncebridge.errors import ConfigError
from oncebridge.events.framing import BadGzip, RawRecord, RecordReader

_STDIN: Final = "-"
_BLOCK: Final = 2 << 20
_MOST_IN_BATCH: Final = 20_000
_TAIL: Final = 64 << 10
MOST_RECORD: Final = 16 << 20
_GZIP: Final = b"\x1f\x8b"
_BOM: Final = b"\xef\xbb\xbf"

_DUMP: Final = re.compile(rb'\s*\{\s*"(?:Messages|Records|events)"\s*:\s*(?=\[)')
"""The beginning of one object that contains the whole recording."""
_TRAILER: Final = re.compile(rb'(?:[\s}]|"[^"]*"(?:\s*:\s*(?:"[^"]*"|[\[\]\w.-]*))?)*')
"""What may follow its array: other members, its end."""


class File(Struct, frozen=True):
    """One file of a recording."""

    name: str
    """As shown in reports."""
    path: Path | None
    """None for standard input."""
    size: int


class Block(Struct, frozen=True, tag=True, array_like=True):
    """Whole lines of a plain file."""

    path: bytes
    """As bytes: not every name is text."""
    offset: int
    size: int


class RecordBatch(Struct, frozen=True, tag=True, array_like=True):
    """Records that were read from their file."""

    lines: list[int]
    """Where each begins, counted from the first line of the file, which is 0."""
    raws: list[bytes]
    too_long: list[int]
    """Indexes of the records that are truncated."""


class Piece(Struct, frozen=True):
    """A part of a file, as one unit of work."""

    file: int
    """Which of the files."""
    work: Block | RecordBatch
    read: int
    """The position in the file after this piece, in bytes on disk."""


class Damage(Struct, frozen=True):
    """Where a file could not be read further."""

    file: int
    line: int


Skipped = Callable[[Sequence[str]], None]
"""Called with the names of files that are skipped, because they are listed already."""


def find_files(paths: Sequence[Path], skipped: Skipped | None = None) -> list[File]:
    """
    Return the files under *paths*, those of directories sorted by name.

    Hidden files and links to directories are left out. A file with several names is read once, by
    its first name; *skipped* is called with the others.
    """
    files: list[File] = []
    again: list[str] = []
    known: set[tuple[int, int]] = set()
    for path in paths:
        if str(path) == _STDIN:
            if any(file.path is None for file in files):
                again.append(_STDIN)
            elif sys.stdin is None:
                raise ConfigError(_STDIN, "standard input is closed")
            else:
                files.append(File(_STDIN, None, 0))
            continue
        try:
            for each in sorted(_below(path)) if path.is_dir() else [path]:
                status = each.stat()
                same = status.st_dev, status.st_ino
                if status.st_ino and same in known:
                    again.append(spelt(each))
                    continue
                known.add(same)
                files.append(File(spelt(each), each, _size(status)))
        except OSError as error:
            raise ConfigError(spelt(path), _why(error)) from None
    if again and skipped is not None:
        skipped(again)
    return files


def spelt(path: Path) -> str:
    """Return the name of a file with control characters spelt out."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(path))


def _below(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if not path.is_symlink():  # it may lead back here
                yield from _below(path)
        elif path.is_file():
            yield path


def _size(status: os.stat_result) -> int:
    return status.st_size if S_ISREG(status.st_mode) else 0


def _why(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


def read_pieces(files: Sequence[File], *, block: int | None = None) -> Iterator[Piece | Damage]:
    """Cut *files* into pieces of about *block* bytes, in order."""
    size = block or _BLOCK
    for number, file in enumerate(files):
        try:
            with _opened(file) as source:
                yield from _cut(number, file, source, size)
        except OSError as error:
            raise ConfigError(file.name, _why(error)) from None


@contextmanager
def _opened(file: File) -> Iterator[BinaryIO]:
    if file.path is None:
        yield sys.stdin.buffer
        return
    with file.path.open("rb") as source:
        yield source


def _cut(number: int, file: File, source: BinaryIO, block: int) -> Iterator[Piece | Damage]:
    if file.path is not None and file.size and _is_plain_lines(source):
        for work, end in _blocks(os.fsencode(file.path), source, file.size, block):
            yield Piece(number, work, end)
        return
    if file.path is not None and source.seekable():
        source.seek(0)
    yield from _batches(number, source, block)


# --- plain lines ----------------------------------------------------------------------------


def _is_plain_lines(source: BinaryIO) -> bool:
    """Return whether a file has one record per line, by its first line; False if unsure."""
    head = source.read(_TAIL)
    if head.startswith(_GZIP):
        return False
    head = head.removeprefix(_BOM).lstrip()
    first = head.partition(b"\n")[0]
    if not head or head.startswith(b"["):
        return False
    if not head.startswith(b"{"):
        return True
    try:
        _decode_raw(first)
    except (ValueError, RecursionError):
        return False
    return True


_decode_raw = msgspec.json.Decoder(msgspec.Raw).decode


def _blocks(path: bytes, source: BinaryIO, size: int, block: int) -> Iterator[tuple[Block, int]]:
    """Yield blocks of whole lines; a longer line is a block of its own."""
    offset = 0
    while offset < size:
        end = _last_line_end(source, offset, min(offset + block, size), size)
        yield Block(path, offset, end - offset), end
        offset = end


def _last_line_end(source: BinaryIO, begin: int, end: int, size: int) -> int:
    """Return the last line end before *end*, or the next one after it."""
    if end == size:
        return size
    at = end
    while at > begin:
        start = max(begin, at - _TAIL)
        source.seek(start)
        found = source.read(at - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        at = start
    source.seek(end)
    while piece := source.read(1 << 20):
        found = piece.find(b"\n")
        if found >= 0:
            return end + found + 1
        end += len(piece)
    return end


# --- everything else ------------------------------------------------------------------------


def _batches(number: int, source: BinaryIO, block: int) -> Iterator[Piece | Damage]:
    """Yield batches of records of *source*, about *block* bytes each."""
    line = 0
    try:
        for taken in _taken(source, block):
            if taken:
                line = taken[-1].last_line
                yield Piece(number, _batch(taken), _position(source))
    except (BadGzip, EOFError, zlib.error):
        yield Damage(number, line)


def _taken(source: BinaryIO, block: int) -> Iterator[list[RawRecord]]:
    records = RecordReader(source, max_record=MOST_RECORD)
    first = records.read(1, 1)
    if first and first[0].too_long and source.seekable() and _DUMP.match(first[0].raw):
        yield from _in_dump(source, block)
        return
    yield first
    while taken := records.read(_MOST_IN_BATCH, block):
        yield taken


def _in_dump(source: BinaryIO, block: int) -> Iterator[list[RawRecord]]:
    """Yield the records of one object that is too large to be read as a whole."""
    source.seek(0)
    is_packed = source.read(len(_GZIP)) == _GZIP
    source.seek(0)
    unpacked = gzip.GzipFile(fileobj=source) if is_packed else source
    head = unpacked.read(_TAIL)
    begins = _DUMP.match(head)
    assert begins is not None  # noqa: S101 - the caller has checked
    unpacked.seek(begins.end())
    skipped = head.count(b"\n", 0, begins.end())
    records = RecordReader(cast("BinaryIO", unpacked), line=1 + skipped, max_record=MOST_RECORD)
    while taken := records.read(_MOST_IN_BATCH, block):
        yield [one for record in taken for one in _untrailed(record)]


def _untrailed(record: RawRecord) -> Iterator[RawRecord]:
    """Remove the rest of the object after its array. Other objects may follow."""
    if record.raw.startswith(b"{"):
        yield record
        return
    begins = _past(_TRAILER, record.raw)
    line = record.line + record.raw.count(b"\n", 0, begins)
    for one in RecordReader(BytesIO(record.raw[begins:]), line=line):
        yield replace(one, too_long=one.too_long or record.too_long)


def _past(pattern: re.Pattern[bytes], text: bytes) -> int:
    found = pattern.match(text)
    return found.end() if found else 0


def _batch(records: Sequence[RawRecord]) -> RecordBatch:
    return RecordBatch(
        [record.line - 1 for record in records],
        [record.raw for record in records],
        [at for at, record in enumerate(records) if record.too_long],
    )


def _position(source: BinaryIO) -> int:
    try:
        return source.tell()
    except OSError:
        return 0


# --- the records of a piece ---------------------------------------------------------------------


class Content(Struct, frozen=True):
    """The records of a block or batch."""

    lines: int
    """Lines of the file in a block; 0 for a batch, whose records have lines of the file."""
    records: Sequence[tuple[int, bytes | None]]
    """Each with its line in the block or file; None for a record that is too long."""


def content_of(work: Block | RecordBatch) -> Content:
    """Return the records of *work*, without blank lines."""
    if isinstance(work, RecordBatch):
        too_long = set(work.too_long)
        raws = (None if at in too_long else raw for at, raw in enumerate(work.raws))
        return Content(0, list(zip(work.lines, raws, strict=True)))
    if work.size > 2 * MOST_RECORD:
        # Only a line that is longer than that makes such a block, and it is alone in it.
        return Content(1, [(0, None)])
    text = _read(work)
    if not work.offset:
        text = text.removeprefix(_BOM)
    lines = text.split(b"\n")
    filled = [(line, raw) for line, raw in enumerate(lines) if raw and not raw.isspace()]
    return Content(len(lines) - 1, filled)


def _read(block: Block) -> bytes:
    file = os.open(block.path, os.O_RDONLY)
    text = b""
    try:
        while len(text) < block.size:
            piece = os.pread(file, block.size - len(text), block.offset + len(text))
            if not piece:
                name = spelt(Path(os.fsdecode(block.path)))
                raise OSError(f"{name} became shorter while it was read")
            text += piece
    finally:
        os.close(file)
    return text
