"""
Split a body (`split_body`) or a file of any size (`RecordReader`) into its records.

    lines      NDJSON: one event on each line
    array      one JSON array, in any layout
    values     one event, or several after each other, on one line or on many

A record is not parsed: its bytes are kept unchanged, without the whitespace around them, and
whether they are an event is decided later, so that a bad record is refused alone. Text that is
not JSON becomes a record too: nothing is left out.
"""

import re
import sys
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import accumulate, chain, islice, takewhile
from operator import attrgetter
from typing import BinaryIO, Final

import msgspec
from msgspec import Raw, Struct

from oncebridge.errors import OncebridgeError

_BLANKS: Final = b" \t\r\n"
_BOM: Final = b"\xef\xbb\xbf"
_GZIP: Final = b"\x1f\x8b"
_MEMBER: Final = b"\x1f\x8b\x08"  # the start of a gzip member; rare in compressed data
_LINE_TYPES: Final = frozenset({"application/x-ndjson", "application/ndjson", "application/jsonl"})

_UNZIP_IN: Final = 16 * 1024  # small, because the data after a member is copied for each member
_UNZIP_OUT: Final = 256 * 1024
# Limits of a body, so that a few bytes cannot cost much time, or much space in the dead letters.
# JSON of many similar events is compressed 10 to 50 to 1; small bodies are cheap at any ratio.
_MOST_RATIO: Final = 200
_ANY_RATIO: Final = 64 * 1024
_MOST_MEMBERS: Final = 1000
_CHEAP_COMMAS: Final = 250_000  # with more, the elements are counted before they are created
_KEPT: Final = 64 * 1024
_MOST_BLANKS: Final = 1024 * 1024

_read_elements = msgspec.json.Decoder(list[Raw]).decode
_read_any = msgspec.json.Decoder(Raw).decode


class BadGzip(OncebridgeError):
    """The data is not gzip, or is damaged after *offset* unpacked bytes."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(f"{message} (after {offset} bytes, unpacked)")
        self.offset = offset


class TooLarge(OncebridgeError):
    """Unpacked, the data is larger than the limit; it was not unpacked further."""


class TooMany(OncebridgeError):
    """The body has more records than the limit; it was not split."""


# --- one body --------------------------------------------------------------------------


def split_body(body: bytes, *, content_type: str = "", most: int = sys.maxsize) -> list[bytes]:
    """
    Return the records of a body; raise `TooMany` if there are more than *most*.

    A body that is not JSON is one record, and so is an empty one; an empty array, and an empty
    body with the *content_type* of NDJSON, have no records.
    """
    if content_type.partition(";")[0].strip().lower() in _LINE_TYPES:
        return _at_most(most, _filled_lines(body))
    start = body.lstrip(_BLANKS)[:1]
    if start == b"[":
        return _elements(body, most)
    if start == b"{" and b"\n" in body:
        # In one JSON object, no line that ends with } is followed by one that begins with {.
        lines = _at_most(most, takewhile(_is_object, _filled_lines(body)))
        if len(lines) > 1 and all(map(_is_object, _filled_lines(body))):
            return lines
    return [body]


def as_line(raw: bytes) -> bytes:
    """Return one JSON text as one line, its line end included."""
    # In JSON, line breaks occur only between tokens, never in a string.
    return raw.replace(b"\n", b" ").replace(b"\r", b" ") + b"\n"


def gunzip(body: bytes, limit: int, *, cheap: bool = False) -> bytes:
    """
    Unpack a gzip body, also one of several members, to at most *limit* bytes.

    Raise `TooLarge` as soon as there would be more, and `BadGzip` if the body is not gzip, is
    truncated or damaged, or is followed by other data; with *cheap*, also if it costs far more
    than its size: more than 64 KiB compressed by over 200 to 1, or more than 1000 members.
    """
    if cheap and body.count(_MEMBER) > _MOST_MEMBERS:
        raise BadGzip(f"the gzip data has more than {_MOST_MEMBERS} members", 0)
    pieces = (body[at : at + _UNZIP_IN] for at in range(0, len(body), _UNZIP_IN))
    unpacked, size = [], 0
    for piece in _unzip(pieces):
        size += len(piece)
        if size > limit:
            raise TooLarge(f"the body unpacks to more than {limit} bytes")
        unpacked.append(piece)
    if cheap and size > max(_MOST_RATIO * len(body), _ANY_RATIO):
        raise BadGzip(f"the gzip data is compressed by more than {_MOST_RATIO} to 1", size)
    return b"".join(unpacked)


_filled = re.compile(rb"[^ \t\r\n][^\n]*+")


def _filled_lines(body: bytes) -> Iterator[bytes]:
    """Yield the lines that are not blank, without the whitespace around them."""
    for found in _filled.finditer(body):
        yield found[0].rstrip(_BLANKS)


def _is_object(line: bytes) -> bool:
    return line[:1] == b"{" and line[-1:] == b"}"


def _at_most(most: int, records: Iterator[bytes]) -> list[bytes]:
    """Return the *records*, or raise `TooMany`."""
    taken = [*islice(records, most)]
    if next(records, None) is not None:
        raise TooMany(f"the body has more than {most} records")
    return taken


def _elements(body: bytes, most: int) -> list[bytes]:
    """Return the elements of an array; a body that is not JSON is one record."""
    try:
        if body.count(b",") > _CHEAP_COMMAS:
            _read_any(body)
            _at_most(most, _found_elements(body))
        elements = _read_elements(body)
    except (msgspec.DecodeError, RecursionError):
        return [body]
    return _at_most(most, map(bytes, elements))


def _found_elements(body: bytes) -> Iterator[bytes]:
    """Yield the elements of a JSON array one by one, which is slower than decoding it."""
    finder = _ValueFinder(_Format.ARRAY)
    at = finder.skip_gap(body, body.index(b"[") + 1)
    while at < len(body):
        finder.begin(body[at])
        end = finder.find_end(body, at)
        yield body[at:end]
        at = finder.skip_gap(body, end)


# --- gzip ------------------------------------------------------------------------------


def _unzip(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the unpacked data of gzip members; raise `BadGzip` after the last readable byte."""
    offset = 0
    member, is_open = zlib.decompressobj(wbits=31), True
    for packed in pieces:
        piece, is_pending = packed, False
        while piece or is_pending:
            if not is_open:
                piece = piece.lstrip(b"\0")  # padding, as tapes and block devices leave it
                if not piece:
                    break
                member, is_open = zlib.decompressobj(wbits=31), True
            before = member.copy()
            try:
                out = member.decompress(piece, _UNZIP_OUT)
            except zlib.error:
                if out := _unzip_bytewise(before, piece):
                    offset += len(out)
                    yield out
                raise BadGzip("the data is not gzip, or is damaged", offset) from None
            offset += len(out)
            if out:
                yield out
            if member.eof:
                piece, is_pending, is_open = member.unused_data, False, False
            else:
                # A full buffer means that there may be more output, even without more input.
                piece, is_pending = member.unconsumed_tail, len(out) == _UNZIP_OUT
    if is_open:
        raise BadGzip("the gzip data is truncated", offset)


def _unzip_bytewise(member: "zlib._Decompress", piece: bytes) -> bytes:
    """Return the data before the damage, which a failing call does not return."""
    out = bytearray()
    try:
        for at in range(len(piece)):
            out += member.decompress(piece[at : at + 1])
    except zlib.error:
        pass
    return bytes(out)


# --- files -----------------------------------------------------------------------------


class RawRecord(Struct, frozen=True, gc=False):
    """One record of a file, and its position."""

    raw: bytes
    line: int
    """The line it begins on, counted from 1."""
    end: int
    """The offset after it, in the unpacked file."""
    last_line: int
    """The line that *end* is on."""
    too_long: bool = False
    """*raw* is only the beginning: the record is longer than allowed."""


class _Format(Enum):
    LINES = "lines"
    ARRAY = "array"
    VALUES = "values"


class RecordReader:
    """
    Reads the records of *file*, which is open for reading bytes and at its beginning.

    The file may be compressed with gzip, which is detected by its first bytes. The format is
    detected by how the content begins:

    * `[`: an array, unless each of the first two lines is JSON in itself;
    * `{`: lines if the first or the second line is an object in itself, else values;
    * anything else: lines.

    Commas between values are skipped. An array is read to the end of the file, also if its
    closing bracket is missing. Memory use is bounded: of a record longer than *max_record*
    only the beginning is returned, marked `too_long`, and reading continues after it.

    To continue where another reader stopped, pass the `end` and the `last_line` of the last
    completed record as *start* and *line*: exactly the records after it follow.

    Reading blocks; call `read` from a thread, one call at a time. A damaged gzip file raises
    `BadGzip` after the records before the damage were returned.
    """

    def __init__(
        self,
        file: BinaryIO,
        *,
        start: int = 0,
        line: int = 1,
        max_record: int = 16 * 1024 * 1024,
        chunk: int = 128 * 1024,
    ) -> None:
        self._file = file
        self._start = start
        self._line = line
        self._most = max_record
        self._chunk = chunk
        self._batches = self._run()
        self._ready: list[RawRecord] = []
        self._next = 0  # index into the ready records
        self._end = start  # of the last returned record
        self._is_full = False  # the last read was complete, so more data is available at once
        self._damage: BadGzip | None = None  # found after the last readable byte
        self._fault: Exception | None = None  # why nothing more can be read

    def __iter__(self) -> Iterator[RawRecord]:
        while self._has_more(wait=True):
            while self._next < len(self._ready):
                record = self._ready[self._next]
                self._next += 1
                self._end = record.end
                yield record
        if self._fault is not None:
            raise self._fault

    def read(self, count: int, size: int) -> list[RawRecord]:
        """
        Return up to *count* records or about *size* bytes, at least one; none at the end.

        It waits for the first record only: from a pipe it returns the records that are available.
        """
        limit = self._end + size
        taken: list[RawRecord] = []
        while not taken or (len(taken) < count and self._end < limit):
            if not self._has_more(wait=not taken):
                break
            first, last = self._next, min(len(self._ready), self._next + count - len(taken))
            fitting = bisect_left(self._ready, limit, first, last, key=attrgetter("end"))
            self._next = max(first, min(fitting, last - 1)) + 1
            taken += self._ready[first : self._next]
            self._end = taken[-1].end
        if self._fault is not None and not taken:
            raise self._fault
        return taken

    def _has_more(self, *, wait: bool) -> bool:
        """Return True if a record is ready; False at the end, and after an error."""
        while self._next == len(self._ready):
            if self._fault is not None or not (wait or self._is_full):
                return False
            try:
                self._ready = next(self._batches)
            except StopIteration:
                self._fault = self._damage
                return False
            except (OSError, ValueError) as error:
                # Raised by every further call too: none must look like the end of the file.
                self._fault = error
                return False
            self._next = 0
        return True

    def _run(self) -> Iterator[list[RawRecord]]:
        pieces = self._pieces()
        opening = b""
        while len(opening) < len(_GZIP) and (piece := next(pieces, b"")):
            opening += piece
        pieces = chain([opening], pieces)
        is_packed = opening.startswith(_GZIP)
        if is_packed:
            pieces = self._unpacked(pieces)
        head = _Head(pieces, self._most)
        format_, body = head.detect_format()
        begin = max(self._start, body)
        line = self._line + head.text.count(b"\n", self._start, begin)
        chunks = self._from(begin, bytes(head.text), pieces, is_packed=is_packed)
        if format_ is _Format.LINES:
            yield from self._lines(chunks, begin, line)
        else:
            yield from self._scan(chunks, begin, line, _ValueFinder(format_))

    def _pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the file; from a pipe, as soon as some are available."""
        read = getattr(self._file, "read1", self._file.read)
        while True:
            piece: bytes | None = read(self._chunk)
            if piece is None:
                raise BlockingIOError("the file does not wait for data; open it in blocking mode")
            self._is_full = len(piece) == self._chunk
            if not piece:
                return
            yield piece

    def _unpacked(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        small = (
            piece[at : at + _UNZIP_IN] for piece in pieces for at in range(0, len(piece), _UNZIP_IN)
        )
        try:
            yield from _unzip(small)
        except BadGzip as error:
            self._damage = error  # raised after the last record

    def _from(
        self, begin: int, head: bytes, pieces: Iterator[bytes], *, is_packed: bool
    ) -> Iterator[bytes]:
        """Yield the content from the offset *begin* on."""
        for at in range(begin, len(head), self._chunk):
            yield head[at : at + self._chunk]
        skipped = len(head)
        if begin > skipped and not is_packed and self._file.seekable():
            self._file.seek(begin - skipped, 1)
            skipped = begin
        for piece in pieces:
            yield piece[max(begin - skipped, 0) :]
            skipped += len(piece)

    # --- lines -------------------------------------------------------------------------

    def _lines(self, chunks: Iterator[bytes], offset: int, line: int) -> Iterator[list[RawRecord]]:
        """Yield the records of lines; *offset* and *line* are where the first one begins."""
        buffer = _RecordBuffer(self._most)
        for chunk in chunks:
            last = chunk.rfind(b"\n")
            if last < 0:
                buffer.add(chunk)
                continue
            first, records = 0, []
            if buffer.size:
                first = chunk.find(b"\n") + 1
                buffer.add(chunk[: first - 1])
                offset += buffer.size + 1
                records = buffer.take_line(offset - 1, line)
                line += 1
            if first <= last:
                records += self._block(chunk[first:last], offset, line)
                offset += last + 1 - first
                line += chunk.count(b"\n", first)
            buffer.add(chunk[last + 1 :])
            yield records
        if buffer.size:
            yield buffer.take_line(offset + buffer.size, line)

    def _block(self, text: bytes, offset: int, line: int) -> list[RawRecord]:
        """Return the records of complete lines; this is the fast path."""
        lines = text.split(b"\n")
        numbers = range(line, line + len(lines))
        ends = [end + at for at, end in enumerate(accumulate(map(len, lines)), offset)]
        raws = [each.strip(_BLANKS) for each in lines]
        records = list(map(RawRecord, raws, numbers, ends, numbers))
        if len(text) > self._most:
            for at, each in enumerate(lines):
                if len(each) > self._most:
                    beginning = each[: min(self._most, _KEPT)]
                    records[at] = RawRecord(beginning, line + at, ends[at], line + at, True)
        return records if all(raws) else [record for record in records if record.raw]

    # --- an array, or values after each other ------------------------------------------

    def _scan(
        self, chunks: Iterator[bytes], offset: int, line: int, finder: "_ValueFinder"
    ) -> Iterator[list[RawRecord]]:
        """Yield the records of values; *line* is correct up to *counted*, an index into the chunk."""
        buffer = _RecordBuffer(self._most)
        is_inside, first_line = False, line
        begins = offset
        for chunk in chunks:
            records = []
            at = counted = 0
            while True:
                if not is_inside:
                    at = finder.skip_gap(chunk, at)
                    if at == len(chunk):
                        break
                    line += chunk.count(b"\n", counted, at)
                    is_inside, first_line, counted, begins = True, line, at, offset + at
                    finder.begin(chunk[at])
                first, at = at, finder.find_end(chunk, at)
                is_inside = at < 0
                if is_inside:
                    buffer.add(chunk[first:])
                    break
                buffer.add(chunk[first:at])
                line += chunk.count(b"\n", counted, at)
                counted = at
                records.append(buffer.take_value(begins, first_line, line))
            line += chunk.count(b"\n", counted)
            offset += len(chunk)
            yield records
        if is_inside:
            yield [buffer.take_value(begins, first_line, line)]


class _RecordBuffer:
    """The pieces of one record; above *most* bytes, only its beginning."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._pieces: list[bytes] = []
        self.size = 0

    def add(self, piece: bytes) -> None:
        was_long = self.size > self._most
        self.size += len(piece)
        if was_long or not piece:
            return
        self._pieces.append(piece)
        if self.size > self._most:
            self._pieces = [b"".join(self._pieces)[: min(self._most, _KEPT)]]

    def take_line(self, end: int, line: int) -> list[RawRecord]:
        """Return the content as the record of a line, unless it is blank; clear it."""
        raw, is_long = self._take()
        return [RawRecord(raw, line, end, line, is_long)] if raw else []

    def take_value(self, begins: int, first_line: int, last_line: int) -> RawRecord:
        """Return the content as the record of a value; clear it."""
        end = begins + self.size
        raw, is_long = self._take()
        if not is_long:
            end, last_line = begins + len(raw), first_line + raw.count(b"\n")
        return RawRecord(raw, first_line, end, last_line, is_long)

    def _take(self) -> tuple[bytes, bool]:
        raw, is_long = b"".join(self._pieces), self.size > self._most
        self._pieces, self.size = [], 0
        return raw if is_long else raw.strip(_BLANKS), is_long


class _Head:
    """The beginning of a file, as much as is needed to detect the format."""

    def __init__(self, pieces: Iterator[bytes], most: int) -> None:
        self.text = bytearray()
        self._pieces = pieces
        self._most = most

    def detect_format(self) -> tuple[_Format, int]:
        """Return the format, and the offset at which the records begin."""
        while len(self.text) < len(_BOM) and self._more():
            pass
        bom = len(_BOM) if self.text.startswith(_BOM) else 0
        first = self._filled(bom)
        opening = self._byte(first)
        if opening == b"[":
            if self._is_json(first) and self._is_json(self._line_after(first)):
                return _Format.LINES, bom
            return _Format.ARRAY, first + 1
        if opening == b"{" and not self._is_json(first):
            second = self._line_after(first)
            if self._byte(second) != b"{" or not self._is_json(second):
                return _Format.VALUES, bom
        return _Format.LINES, bom

    def _more(self) -> bool:
        piece = next(self._pieces, b"")
        self.text += piece
        return bool(piece)

    def _byte(self, at: int) -> bytes:
        return bytes(self.text[at : at + 1]) if at >= 0 else b""

    def _find(self, byte: re.Pattern[bytes], at: int, most: int) -> int:
        """Return the offset of *byte* or of the end; -1 if it is not in the next *most* bytes."""
        limit = at + most
        while not (found := byte.search(self.text, at, limit)):
            at = len(self.text)
            if at >= limit:
                return -1
            if not self._more():
                return at
        return found.start()

    def _filled(self, at: int) -> int:
        return self._find(_filled_byte, at, _MOST_BLANKS)

    def _line_end(self, at: int) -> int:
        return self._find(_line_end, at, self._most + 1)

    def _line_after(self, at: int) -> int:
        end = self._line_end(at)
        return self._filled(end) if end >= 0 else -1

    def _is_json(self, at: int) -> bool:
        end = self._line_end(at) if at >= 0 else -1
        if end < 0:
            return False
        try:
            _read_any(self.text[at:end])
        except (msgspec.DecodeError, RecursionError):
            return False
        return True


# Groups are repeated a bounded number of times, which bounds the memory of a match; where a
# match stops early, at a quote or a backslash, `_ValueFinder` continues. Only sets are
# possessive: Python before 3.11.5 gets possessive groups wrong.
_STRING_REST: Final = rb'[^"\\]*+(?:\\.[^"\\]*+){0,500}'
_string_rest = re.compile(_STRING_REST, re.DOTALL)
_nested = re.compile(rb'[^"\[\]{}]*+(?:"%b"[^"\[\]{}]*+){0,500}' % _STRING_REST, re.DOTALL)
_element = re.compile(rb'[^",\[\]{]*+(?:"%b"[^",\[\]{]*+){0,500}' % _STRING_REST, re.DOTALL)
_stray = re.compile(rb"[^\n\[{]*+")
_filled_byte = re.compile(rb"[^ \t\r\n]")
_line_end = re.compile(rb"\n")
_opening = re.compile(rb"[\[{]*+")
_closing = re.compile(rb"[\]}]*+")
_gaps = {
    _Format.ARRAY: re.compile(rb"[ \t\r\n,\]]*+"),
    _Format.VALUES: re.compile(rb"[ \t\r\n,]*+"),
}
_QUOTE, _BACKSLASH = b'"\\'


def _match_end(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


class _ValueFinder:
    """
    Finds the end of a value that arrives in chunks.

    An element of an array ends before the next comma or bracket that is not its own; a value
    ends with its last bracket; other text ends before the next value or at the end of the line.
    There is no state between two records, so reading can start after any of them.
    """

    def __init__(self, format_: _Format) -> None:
        self._is_array = format_ is _Format.ARRAY
        self._gap = _gaps[format_]
        self._outer = _element if self._is_array else _stray
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_stray = False

    def skip_gap(self, chunk: bytes, at: int) -> int:
        return _match_end(self._gap, chunk, at)

    def begin(self, byte: int) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._is_stray = byte not in b"[{"

    def find_end(self, chunk: bytes, at: int) -> int:
        """Return the index after the value that continues at *at*; -1 if it is not in this chunk."""
        while at < len(chunk):
            if self._in_string:
                at = self._leave_string(chunk, at)
                continue
            at = _match_end(_nested if self._depth else self._outer, chunk, at)
            if at == len(chunk):
                break
            if not self._depth and (chunk[at] in b",]" if self._is_array else self._is_stray):
                return at
            at = self._count_brackets(chunk, at)
            if not self._depth and not self._is_array:
                return at
        return -1

    def _count_brackets(self, chunk: bytes, at: int) -> int:
        """Process a quote, or adjacent brackets; return the index after them."""
        if chunk[at] == _QUOTE:
            self._in_string = True
            return at + 1
        end = _match_end(_opening, chunk, at)
        if end > at:
            self._depth += end - at
            return end
        closed = min(self._depth, _match_end(_closing, chunk, at) - at)
        self._depth -= closed
        return at + closed

    def _leave_string(self, chunk: bytes, at: int) -> int:
        """Return the index after the string, or the end of this chunk."""
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        at = _match_end(_string_rest, chunk, at)
        if at < len(chunk):
            if chunk[at] == _BACKSLASH:
                self._is_escaped = True
            else:
                self._in_string = False
            at += 1
        return at
