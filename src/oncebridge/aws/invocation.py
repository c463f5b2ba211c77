"""
The event of a Lambda invocation: its trigger and its records.

The trigger is recognised by the shape of the event. It decides the name of each record that has to
be retried, and the form of the response. An unknown shape is refused: a response in the wrong form
would count as success, and the events would be lost.

| trigger                    | recognised by                                    | a record's name  |
| -------------------------- | ------------------------------------------------ | ---------------- |
| rule, Custom Event Bus     | `detail`; `Data` with `SystemMetadata`; a list   |                  |
|                            | with one of these in it, and no source           |                  |
| target with `InputPath`    | `topicName` with `eventBody`; any, if so set     |                  |
| destination of a function  | `requestPayload`                                 |                  |
| SNS                        | `Records` of `aws:sns`                           |                  |
| SQS, FIFO or not           | `Records` of `aws:sqs`                           | `messageId`      |
| Kinesis                    | `Records` of `aws:kinesis`                       | `sequenceNumber` |
| Pipes, from SQS            | a list of `aws:sqs`                              | `messageId`      |
| Pipes, from Kinesis        | a list of `aws:kinesis`                          | `eventID`        |
"""

import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from msgspec import UNSET, Struct

from oncebridge.errors import OncebridgeError
from oncebridge.events.event import Event, Unreadable

_Object = Mapping[str, Any]
Read = Callable[[bytes], Event | Unreadable]


class Trigger(StrEnum):
    """The kind of trigger, as far as it makes a difference."""

    DIRECT = "direct"
    """A rule, a Custom Event Bus, a destination: the whole event; a failure has to be raised."""
    SNS = "sns"
    SQS = "sqs"
    SQS_FIFO = "sqs-fifo"
    KINESIS = "kinesis"
    PIPES_SQS = "pipes-sqs"
    PIPES_SQS_FIFO = "pipes-sqs-fifo"
    PIPES_KINESIS = "pipes-kinesis"

    @property
    def names_failures(self) -> bool:
        """True if single records can be reported as failed."""
        return self not in (Trigger.DIRECT, Trigger.SNS)

    @property
    def is_ordered(self) -> bool:
        return self in _ORDERED

    @property
    def waits(self) -> bool:
        """
        True if a busy key is waited for, within the time there is.

        A queue redelivers the record later. A shard would be blocked, and a direct call is
        retried only twice.
        """
        return self not in _QUEUES


_ORDERED: Final = frozenset(
    {Trigger.SQS_FIFO, Trigger.PIPES_SQS_FIFO, Trigger.KINESIS, Trigger.PIPES_KINESIS}
)
_QUEUES: Final = frozenset(
    {Trigger.SQS, Trigger.SQS_FIFO, Trigger.PIPES_SQS, Trigger.PIPES_SQS_FIFO}
)
_FIFO: Final = {Trigger.SQS: Trigger.SQS_FIFO, Trigger.PIPES_SQS: Trigger.PIPES_SQS_FIFO}


class LambdaRecord(Struct, frozen=True):
    """One record of a batch: its payload, and its name in the response if it has to be retried."""

    held: bytes | Unreadable
    name: str = ""
    lane: str = ""
    """Records of the same lane stay in order, if the trigger keeps an order."""
    sequence: int = 0
    """Its sequence number in the shard."""


class Invocation(Struct, frozen=True):
    """One invocation: its trigger and its records."""

    trigger: Trigger
    records: tuple[LambdaRecord, ...]
    state: Any = UNSET
    """The state of a tumbling window, which is always returned."""


class NotRecognised(OncebridgeError):
    """
    The function was invoked with an event of an unknown trigger.

    It was not processed, and the trigger counts the call as failed. The message has the names of
    the fields, never their values.
    """


def recognise(given: object, read: Read) -> Invocation:
    """Return the invocation, or raise `NotRecognised`; *read* decides what else is an event."""
    event = getattr(given, "raw_event", given)  # an event of Powertools' data classes
    if isinstance(event, Mapping):
        return _of_object(event, read)
    if isinstance(event, list):
        return _of_list(event, read)
    raise NotRecognised(f"the event is neither an object nor an array, but {type(event).__name__}")


def _of_object(event: _Object, read: Read) -> Invocation:
    if "requestPayload" in event or _is_about_a_stream(event) or _is_event(event, read):
        return _direct([event])
    if "Records" in event:
        return _of_records(event)
    if "records" in event and "deliveryStreamArn" in event:
        raise NotRecognised(
            "this is a Firehose transformation, which is not supported: Firehose delivers only what "
            "the function returns, so a retry after a lost response would be dropped as a "
            "duplicate, and the event with it. Let the stream or the rule call the function"
        )
    raise NotRecognised(
        f"this trigger is not supported: {_names(event)}. Use a rule, an SQS queue, a Kinesis "
        "stream, an SNS topic, a pipe or a destination of a function"
    )


_FOREIGN: Final = frozenset(
    {
        *("Records", "records", "requestContext", "requestPayload", "triggerSource", "awslogs"),
        *("tasks", "eventSource", "EventSource", "KinesisBatchInfo", "DDBStreamBatchInfo"),
    }
)
"""Fields of other triggers; an object with one of them is not a bare detail."""


def _is_event(event: _Object, read: Read) -> bool:
    """Return True for an event, with or without an envelope; other details only if *read* can."""
    return (
        "detail" in event
        or ("topicName" in event and "eventBody" in event)
        or ("Data" in event and "SystemMetadata" in event)
        or (not event.keys() & _FOREIGN and isinstance(read(_encoded(event)), Event))
    )


def _is_about_a_stream(event: _Object) -> bool:
    return "KinesisBatchInfo" in event or "DDBStreamBatchInfo" in event


def _direct(events: Sequence[object]) -> Invocation:
    # An element that is not an event is found on reading, and goes to the dead letters.
    return Invocation(Trigger.DIRECT, tuple(LambdaRecord(_encoded(event)) for event in events))


def _encoded(event: object) -> bytes:
    """Serialize what Lambda has parsed; text that is not valid UTF-8 is found on reading."""
    try:
        text = json.dumps(event, ensure_ascii=False, check_circular=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise NotRecognised(
            f"the event is not made of JSON values: {type(error).__name__}"
        ) from None
    return text.encode("utf-8", "surrogatepass")


# --- batches -------------------------------------------------------------------------------


def _of_records(event: _Object) -> Invocation:
    records = event["Records"]
    is_window = "window" in event or "state" in event
    state = event.get("state") if event.get("state") is not None else {}
    if is_window and records == []:  # the end of a window
        return Invocation(Trigger.KINESIS, (), state)
    invocation = _batch(_objects(records, "Records"), _TRIGGERS)
    if is_window and invocation.trigger is Trigger.KINESIS:
        return Invocation(invocation.trigger, invocation.records, state)
    return invocation


def _of_list(records: list[Any], read: Read) -> Invocation:
    objects = [record for record in records if isinstance(record, Mapping)]
    events = sum(_is_event(record, read) for record in objects)
    # A bus gets one response for all of them: one odd element would fail it for ever.
    if events and (events == len(records) or not any(map(_has_source, objects))):
        return _direct(records)
    return _batch(_objects(records, "the array"), _PIPES)


def _has_source(record: _Object) -> bool:
    return "eventSource" in record or "EventSource" in record


def _objects(records: object, where: str) -> list[_Object]:
    if not isinstance(records, list) or not records:
        raise NotRecognised(f"{where}: there are no records, so the trigger is unknown")
    if not all(isinstance(record, Mapping) for record in records):
        raise NotRecognised(f"{where}: not every record is an object")
    return records


_TRIGGERS: Final = {
    "aws:sqs": Trigger.SQS,
    "aws:kinesis": Trigger.KINESIS,
    "aws:sns": Trigger.SNS,
}
_PIPES: Final = {"aws:sqs": Trigger.PIPES_SQS, "aws:kinesis": Trigger.PIPES_KINESIS}


def _batch(objects: list[_Object], known: Mapping[str, Trigger]) -> Invocation:
    first, *others = [record.get("eventSource", record.get("EventSource")) for record in objects]
    if any(other != first for other in others):
        raise NotRecognised("the records are of different sources")
    trigger = known.get(first) if isinstance(first, str) else None
    if trigger is None:
        raise NotRecognised(f"the source of these records is not supported: {_names(objects[0])}")
    trigger = _FIFO[trigger] if trigger in _FIFO and any(map(_is_fifo, objects)) else trigger
    try:
        records = [_RECORDS[trigger](record) for record in objects]
    except (KeyError, TypeError, ValueError) as error:
        raise NotRecognised(
            f"a field is missing or wrong in a record of {trigger} ({type(error).__name__}): "
            f"{_names(objects[0])}"
        ) from None
    if trigger.names_failures:
        _check_names(trigger, records)
    return Invocation(trigger, tuple(records))


def _check_names(trigger: Trigger, records: Sequence[LambdaRecord]) -> None:
    names = {record.name for record in records}
    # A standard queue may deliver a message twice: then the name is for both.
    may_repeat = trigger in _QUEUES and not trigger.is_ordered
    if "" in names or (len(names) < len(records) and not may_repeat):
        raise NotRecognised(
            f"two records of {trigger} have the same name, or one has none, so failures could not "
            "be reported"
        )


def _is_fifo(record: _Object) -> bool:
    # A group alone is not enough: standard queues have them for fairness.
    attributes = record.get("attributes")
    return str(record.get("eventSourceARN", "")).endswith(".fifo") or (
        isinstance(attributes, Mapping) and "SequenceNumber" in attributes
    )


def _sqs(record: _Object) -> LambdaRecord:
    return LambdaRecord(_text(record["body"]), _name(record["messageId"]))


def _sqs_fifo(record: _Object) -> LambdaRecord:
    group = record["attributes"]["MessageGroupId"]
    return LambdaRecord(_text(record["body"]), _name(record["messageId"]), _name(group))


def _sns(record: _Object) -> LambdaRecord:
    return LambdaRecord(_text(record["Sns"]["Message"]))


def _kinesis(record: _Object) -> LambdaRecord:
    return _of_shard(record["kinesis"], record["kinesis"]["sequenceNumber"])


def _pipes_kinesis(record: _Object) -> LambdaRecord:
    return _of_shard(record, record["eventID"])


def _of_shard(record: _Object, name: str) -> LambdaRecord:
    number = _name(record["sequenceNumber"])
    if not (number.isascii() and number.isdigit()):
        raise ValueError
    return LambdaRecord(
        _data(record["data"]), _name(name), _name(record["partitionKey"]), int(number)
    )


_RECORDS: Final[Mapping[Trigger, Callable[[_Object], LambdaRecord]]] = {
    Trigger.SNS: _sns,
    Trigger.SQS: _sqs,
    Trigger.SQS_FIFO: _sqs_fifo,
    Trigger.KINESIS: _kinesis,
    Trigger.PIPES_SQS: _sqs,
    Trigger.PIPES_SQS_FIFO: _sqs_fifo,
    Trigger.PIPES_KINESIS: _pipes_kinesis,
}


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _text(value: object) -> bytes:
    return _name(value).encode("utf-8", "surrogatepass")


def _data(value: object) -> bytes | Unreadable:
    text = _text(value)
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error:
        return Unreadable(text, "not-json", "the data of the record is not base64")


def _names(event: _Object) -> str:
    """Return the names of the top-level fields, never a value."""
    names = [ascii(name)[:40] for name in event]
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"an object with {', '.join(names[:12])}{more}" if names else "an empty object"
