"""
Unwrap events from the envelopes of queues, topics, streams and failed functions.

Each service puts an envelope of its own around the event, nested in any order. The event's
bytes are returned as they are in the innermost one, so that an event has the same key
whichever way it arrived.

| envelope                       | recognised by                             | content             |
| ------------------------------ | ----------------------------------------- | ------------------- |
| SNS notification               | its `Type`, `TopicArn` or `MessageId`     | `Message`           |
| Lambda's record of one         | `aws:sns`                                 | `Message` in `Sns`  |
| SQS message, Lambda and Pipes  | `aws:sqs` or `receiptHandle`              | `body`              |
| SQS message, API               | `ReceiptHandle` or `MD5OfBody`            | `Body`              |
| Kinesis record, Lambda, Pipes  | `aws:kinesis`                             | `data`, from base64 |
| Kinesis record by itself       | a number or a key, and no foreign member  | `data`, `Data`      |
| destination of a function      | `requestContext`                          | `requestPayload`    |
| the same of a stream, in S3    | `KinesisBatchInfo`                        | `payload`           |
| Custom Event Bus with metadata | `SystemMetadata`                          | `Data`              |
| `Records`, `Messages`          | one element is one of these, or an event  | each element        |
| an array                       | an array cannot be an event               | each element        |

A Genesys detail (a target with `InputPath: $.detail`) is read as an event. An event is never
searched for envelopes, so most records cost no more than reading them. An object that only
resembles an envelope is not unwrapped either: it may be an event, and its other fields would
be lost. A failure record that does not contain the events (of a stream, or of a Custom Event
Bus) becomes an `Unreadable` that says so. Nothing is raised, whatever the bytes.
"""

import binascii
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
from msgspec import Raw

from oncebridge.events.event import Event, Unreadable

_MAX_LAYERS: Final = 8
_MOST_BYTES: Final = 16 << 20  # a Kinesis record may have 10 MiB
_MAX_RECORDS: Final = 10_000  # the largest batch of any trigger

_ABOUT_A_STREAM: Final = (
    "this is a failure record of a stream, and does not contain the failed records; read them "
    "from the stream again before it deletes them"
)
_ABOUT_A_BUS: Final = (
    "this is a failure record of a Custom Event Bus, and does not contain the events; send them "
    "from the bus again before it deletes them"
)


class EventReader(Protocol):
    """Reads one event; with *bare*, the whole text may be its detail, whatever the settings."""

    def __call__(self, raw: bytes, /, *, bare: bool | None = None) -> Event | Unreadable: ...


def unwrap(raw: bytes, read: EventReader) -> tuple[Event | Unreadable, ...]:
    """Return the events in *raw*, unwrapped; *raw* itself, as it was read, if it has no envelope."""
    found = read(raw)
    if (isinstance(found, Event) and not found.bare) or len(raw) > _MOST_BYTES:
        return (found,)
    try:
        return tuple(_Unwrapper(read).open(raw, found, _MAX_LAYERS))
    except _TooMany:
        return (Unreadable(raw, "too-large", f"it holds more than {_MAX_RECORDS} records"),)


class _TooMany(Exception):
    """There are more than `_MAX_RECORDS` records in one."""


class _Unwrapper:
    """Unwraps one record, and counts the events in it."""

    def __init__(self, read: EventReader) -> None:
        self._read = read
        self._left = _MAX_RECORDS

    def open(
        self, raw: bytes, found: Event | Unreadable, layers: int
    ) -> Sequence[Event | Unreadable]:
        """Unwrap *raw*, which was read as *found*: not an event, or a bare one."""
        held = _contents_of(raw)
        if held is None:
            return [found]
        if held is _BARE:
            return [found if isinstance(found, Event) else self._read(raw, bare=True)]
        if isinstance(held, Unreadable):
            return [held]
        if not layers:
            return [Unreadable(raw, "too-deep", f"it is wrapped more than {_MAX_LAYERS} times")]
        self._left -= len(held)
        if self._left < 0:
            raise _TooMany
        return [event for inner in held for event in self._unwrap_inner(inner, layers - 1)]

    def _unwrap_inner(self, raw: bytes, layers: int) -> Sequence[Event | Unreadable]:
        found = self._read(raw)
        is_event = isinstance(found, Event) and not found.bare
        return [found] if is_event else self.open(raw, found, layers)


_Members = Mapping[str, Raw]
_Contents = Sequence[bytes] | Unreadable | None
"""The content of an envelope; None if it is not a known envelope."""
_BARE: Final = ()
"""The content of a detail without its envelope."""


def _contents_of(raw: bytes) -> _Contents:
    members = _members(raw)
    if members is None:
        return _array(raw)
    if "detail" in members:
        return None
    if _is_bare(members):
        return _BARE
    return _of_function(raw, members) or _of_batch(members) or _of_record(members)


def _is_bare(members: _Members) -> bool:
    return "topicName" in members and "eventBody" in members


def _of_function(raw: bytes, members: _Members) -> _Contents:
    """Return the content of a failure record of a function or a bus."""
    if {"requestPayload", "requestContext"} <= members.keys():
        return _value(members["requestPayload"])
    if "KinesisBatchInfo" in members or "DDBStreamBatchInfo" in members:
        held = _value(members["payload"]) if "payload" in members else None  # S3 gets all of it
        return held or Unreadable(raw, "no-detail", _ABOUT_A_STREAM)
    if "busArn" in members and "version" in members:
        return Unreadable(raw, "no-detail", _ABOUT_A_BUS)
    return None


def _of_batch(members: _Members) -> _Contents:
    for name in ("Records", "Messages"):
        elements = _array(bytes(members[name])) if name in members else None
        if elements is not None and any(map(_is_known, elements)):
            return elements
    return None


def _is_known(element: bytes) -> bool:
    """Return True if this is certainly an event or a record: an event may have such lists too."""
    members = _members(element)
    return members is not None and (
        {"detail", "detail-type"} <= members.keys()
        or _is_bare(members)
        or _of_record(members) is not None
    )


# --- records --------------------------------------------------------------------------------


def _of_record(members: _Members) -> Sequence[bytes] | None:
    """Return the content of a record of a topic, a queue, a stream or a bus."""
    source = _source(members)
    if source == "aws:sns":
        return _string_in(_inner(members, "Sns"), "Message")
    if source == "aws:sqs":
        return _string_in(members, "body")
    if source == "aws:kinesis":
        return _base64_in(_inner(members, "kinesis") or members, "data")
    if source is not None:
        return None
    return _of_topic(members) or _of_queue(members) or _of_stream(members) or _of_bus(members)


def _source(members: _Members) -> str | None:
    """Return the source of a record, as Lambda or Pipes names it."""
    for name in ("eventSource", "EventSource"):
        if name in members:
            return _text(members[name]) or ""
    return None


def _of_topic(members: _Members) -> Sequence[bytes] | None:
    has = members.keys()
    if "Type" in has and has & {"TopicArn", "MessageId"}:
        return _string_in(members, "Message") if _text(members["Type"]) == "Notification" else None
    return None


def _of_queue(members: _Members) -> Sequence[bytes] | None:
    has = members.keys()
    if {"messageId", "receiptHandle"} <= has:
        return _string_in(members, "body")
    if "MessageId" in has and has & {"ReceiptHandle", "MD5OfBody"}:
        return _string_in(members, "Body")
    return None


_RECORD: Final = {
    *("data", "sequenceNumber", "partitionKey", "approximateArrivalTimestamp"),
    *("kinesisSchemaVersion", "encryptionType"),
}
_API_RECORD: Final = {
    *("Data", "SequenceNumber", "PartitionKey", "ApproximateArrivalTimestamp"),
    *("EncryptionType", "ExplicitHashKey"),
}


def _of_stream(members: _Members) -> Sequence[bytes] | None:
    # No name is specific to Kinesis, so an object with any other member is not a record.
    has = members.keys()
    marks = has & {"sequenceNumber", "partitionKey", "SequenceNumber", "PartitionKey"}
    if not marks or any(_text(members[mark]) is None for mark in marks):
        return None
    if has <= _RECORD:
        return _base64_in(members, "data")
    if has <= _API_RECORD:
        return _base64_in(members, "Data")
    return None


def _of_bus(members: _Members) -> Sequence[bytes] | None:
    if "Data" in members and _is_object(members.get("SystemMetadata")):
        return _value(members["Data"])
    return None


# --- pieces ---------------------------------------------------------------------------------


def _members(raw: bytes) -> dict[str, Raw] | None:
    """Return the members of an object with their bytes; None if it cannot be split safely."""
    try:
        members = _decode_object(raw)
        again = _encode(members)
    except (ValueError, RecursionError):
        return None
    # Of two members with the same name, the first would be lost silently. Each member has a
    # colon, and values keep their bytes, so the number of colons shows a loss.
    is_whole = raw.count(b":") == again.count(b":") and not any(":" in name for name in members)
    return members if is_whole else None


def _array(raw: bytes) -> Sequence[bytes] | None:
    """Return the elements of an array; None if all of them are plain values."""
    try:
        elements = [bytes(element) for element in _decode_array(raw)]
    except (ValueError, RecursionError):
        return None
    return elements if any(e.startswith((b"{", b"[")) for e in elements) else None


def _is_object(value: Raw | None) -> bool:
    return value is not None and bytes(value).startswith(b"{")


def _inner(members: _Members, name: str) -> _Members:
    return (name in members and _members(bytes(members[name]))) or {}


def _value(value: Raw) -> Sequence[bytes] | None:
    """Return an embedded value, or one that is embedded as a string."""
    raw = bytes(value)
    if raw.startswith((b"{", b"[")):
        return [raw]
    text = _text(value)
    return None if text is None else [text.encode()]


def _string_in(members: _Members, name: str) -> Sequence[bytes] | None:
    text = _text(members[name]) if name in members else None
    return None if text is None else [text.encode()]


def _base64_in(members: _Members, name: str) -> Sequence[bytes] | None:
    held = _string_in(members, name)
    try:
        return held and [binascii.a2b_base64(held[0], strict_mode=True)]
    except ValueError:
        return None


def _text(value: Raw) -> str | None:
    try:
        return _decode_string(value)
    except ValueError:
        return None


_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_array = msgspec.json.Decoder(list[Raw]).decode
_decode_string = msgspec.json.Decoder(str).decode
_encode: Any = msgspec.json.Encoder().encode
