"""
Unpack the events of one record of a recording, each with its arrival time.

The wrappings are those of `oncebridge.events.envelopes`, and those of logs:

| record                            | the event is in           | it arrived at          |
| --------------------------------- | ------------------------- | ---------------------- |
| a line of an export to S3         | the text after the time   | that time              |
| `{"events": [...]}` of the API    | each one's `message`      | each one's `timestamp` |
| `{"logEvents": [...]}`, filtered  | each one's `message`      | each one's `timestamp` |
| one of these by itself            | `message`                 | `timestamp`            |
| a result of Logs Insights         | `@message`                | `@timestamp`           |

With several wrappings, the outermost time counts: there it was recorded. SQS has the time of
the send, Kinesis that of the receipt, SNS that of the publication. No input raises an exception.
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final

import msgspec
from msgspec import Raw

from oncebridge.events.envelopes import unwrap
from oncebridge.events.event import Event, Limits, Unreadable, read
from oncebridge.events.timestamps import parse_instant, parse_timestamp

Unpacked = tuple[Event | Unreadable, int | None]
"""An event or an unreadable record, and its recorded arrival time, if any."""

_Members = Mapping[str, Raw]

_DEEPEST: Final = 8
_PREFIX: Final = re.compile(
    rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?)[ \t]+"
)
_OBJECT, _ARRAY = b"{["
_MARKS: Final = frozenset(
    {
        *("eventSource", "EventSource", "receiptHandle", "ReceiptHandle", "MD5OfBody"),
        *("detail-type", "topicName"),
    }
)
"""Every record that is an event or a wrapped event has one of these members."""
_LOGGED: Final = frozenset(
    {
        *("timestamp", "message", "ingestionTime", "eventId", "id", "logStreamName"),
        *("@timestamp", "@message", "@ptr", "@log", "@logStream", "@ingestionTime"),
    }
)
"""The members of a log entry; with any other member it may be an event."""


class Unpacker:
    """Unpacks the records of one recording; for *apart* see `oncebridge.events.event`."""

    def __init__(self, limits: Limits, *, bare: bool, apart: tuple[str, ...] = ()) -> None:
        self._limits = limits
        self._bare = bare
        self._apart = apart
        self.read = partial(read, limits=limits, bare=bare, apart=apart)

    def unpack(self, raw: bytes) -> Iterator[Unpacked]:
        """Yield the events in *raw*, which is not a plain event; at least one result."""
        yield from self._unpack(raw, None, _DEEPEST)

    def _unpack(self, raw: bytes, at_ms: int | None, layers: int) -> Iterator[Unpacked]:
        raw = raw.strip()
        if raw[:1] not in (b"{", b"["):
            yield from self._unpack_line(raw, at_ms, layers)
            return
        found = self.read(raw)
        if (isinstance(found, Event) and not found.bare) or not layers:
            yield found, at_ms
            return
        inner = list(_held(raw))
        if inner:
            for piece, its_ms in inner:
                yield from self._unpack(piece, at_ms or its_ms, layers - 1)
            return
        opened = unwrap(raw, self._read)
        if not (len(opened) == 1 and isinstance(opened[0], Unreadable)):
            at_ms = at_ms or _arrival(raw)
        for event in opened:
            yield event, at_ms

    def _unpack_line(self, raw: bytes, at_ms: int | None, layers: int) -> Iterator[Unpacked]:
        """Unpack a line of a log: a time, possibly some text, and the event."""
        begins = _PREFIX.match(raw)
        at = raw.find(b"{", begins.end() if begins else 0)
        if at < 0 or not layers or not (begins or at_ms):
            yield self.read(raw), at_ms
            return
        its_ms = parse_instant(begins[1].decode()) if begins else None
        yield from self._unpack(raw[at:], at_ms or its_ms, layers - 1)

    def _read(self, raw: bytes, /, *, bare: bool | None = None) -> Event | Unreadable:
        is_bare = self._bare if bare is None else bare
        return read(raw, limits=self._limits, bare=is_bare, apart=self._apart)


def _held(raw: bytes) -> Iterator[tuple[bytes, int | None]]:
    """Yield the records of a wrapping of many, each with its own time."""
    if raw[0] == _ARRAY:
        yield from ((bytes(element), None) for element in _elements(raw))
        return
    members = _members(raw)
    yield from _logged(members)
    for name in ("events", "logEvents"):
        for element in _elements(members.get(name)):
            yield from _logged(_members(element))
    for name in ("Records", "Messages"):
        records = _elements(members.get(name))
        if any(not _MARKS.isdisjoint(_members(record)) for record in records):
            yield from ((bytes(record), None) for record in records)


def _logged(members: _Members) -> Iterator[tuple[bytes, int | None]]:
    """Yield the message of one log entry."""
    for mark in ("", "@"):
        message, timestamp = members.get(f"{mark}message"), members.get(f"{mark}timestamp")
        if message is None or timestamp is None or not members.keys() <= _LOGGED:
            continue
        text = _text(message)
        yield bytes(message) if text is None else text.encode(), parse_timestamp(_scalar(timestamp))


def _arrival(raw: bytes) -> int | None:
    """Return when a wrapped event was recorded, by its wrapping."""
    members = _members(raw)
    for name in ("attributes", "Attributes"):
        sent = _scalar(_members(members.get(name)).get("SentTimestamp"))
        if sent is not None:
            return parse_timestamp(sent)
    for record in (_members(members.get("kinesis")), members):
        for name in ("approximateArrivalTimestamp", "ApproximateArrivalTimestamp"):
            if name in record:
                return parse_timestamp(_scalar(record[name]))
    for record in (_members(members.get("Sns")), members):
        if "Message" in record and "Timestamp" in record:
            return parse_timestamp(_scalar(record["Timestamp"]))
    if "requestPayload" in members or "requestContext" in members:
        return parse_timestamp(_scalar(members.get("timestamp")))
    return None


def _elements(value: Raw | bytes | None) -> list[Raw]:
    """Return the elements of an array of objects, or an empty list."""
    try:
        elements = _decode_array(value) if value is not None else []
    except (ValueError, RecursionError):
        return []
    return elements if all(memoryview(each)[0] == _OBJECT for each in elements) else []


def _members(value: Raw | bytes | None) -> _Members:
    try:
        return _decode_object(value) if value is not None else {}
    except (ValueError, RecursionError):
        return {}


def _scalar(value: Raw | None) -> str | float | None:
    try:
        return None if value is None else _decode_scalar(value)
    except ValueError:
        return None


def _text(value: Raw | None) -> str | None:
    scalar = _scalar(value)
    return scalar if isinstance(scalar, str) else None


_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_array = msgspec.json.Decoder(list[Raw]).decode
_decode_scalar = msgspec.json.Decoder(str | int | float | None).decode
