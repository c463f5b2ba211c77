"""Taking bodies and files apart: nothing is left out, however they come, packed or not."""

import gzip
import sys
import zlib
from contextlib import suppress
from io import BytesIO

import atheris

with atheris.instrument_imports(include=["oncebridge"]):
    from oncebridge.events.framing import BadGzip, RecordReader, TooLarge, gunzip, split_body

LAYOUT = b" \t\r\n[],"
LIMIT = 64 * 1024


def without(body: bytes, records: list[bytes]) -> bytes:
    left, at = b"", 0
    for record in records:
        found = body.index(record, at)
        left += body[at:found]
        at = found + len(record)
    return left + body[at:]


def look(data: bytes) -> None:
    choice, body = data[:1], data[1:]
    chunk = 1 + (choice[0] if choice else 0)
    for kind in ("", "application/x-ndjson"):
        assert not without(body, split_body(body, content_type=kind)).strip(LAYOUT)
    unpack(body)
    if not body.startswith(b"\x1f\x8b"):
        read_file(body, chunk)


def read_file(body: bytes, chunk: int) -> None:
    whole = list(RecordReader(BytesIO(body)))
    for stored in (body, gzip.compress(body, 1)):
        assert list(RecordReader(BytesIO(stored), chunk=chunk)) == whole
    raws = [record.raw for record in whole]
    assert not without(body, raws).removeprefix(b"\xef\xbb\xbf").strip(LAYOUT)
    for at in {0, len(whole) // 2, len(whole) - 1} if whole else ():
        last = whole[at]
        again = RecordReader(BytesIO(body), start=last.end, line=last.last_line, chunk=chunk)
        assert list(again) == whole[at + 1 :]


def unpack(packed: bytes) -> None:
    try:
        found = gunzip(packed, LIMIT)
    except TooLarge:
        return
    except BadGzip:
        with suppress(BadGzip):
            list(RecordReader(BytesIO(packed)))
        return
    assert len(found) <= LIMIT
    with suppress(zlib.error, EOFError):
        assert found == gzip.decompress(packed)


if __name__ == "__main__":
    atheris.Setup(sys.argv, look)
    atheris.Fuzz()
