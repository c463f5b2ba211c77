"""
The SNS sink: publishes events to a topic.

**`Yes` means:** SNS has accepted the message and assigned an id. Whether the topic's subscribers
accept it is not known here.
**What is sent:** the bytes as they were received. Message attributes: `Idempotency-Key`,
`oncebridge-route`, `oncebridge-unprotected` if the store was unavailable, and `traceparent` if
events are traced and there is room for it.
**FIFO topics** (`….fifo`) deduplicate for five minutes by themselves. The deduplication id is the
key with its generation: a second attempt at one delivery is dropped, the next delivery of the same
key, after its window, is not. The message group is the entity of the event, else the option
`group`, else the key; an event without any of them is a group of its own.

| result                                           | answer      |
| ------------------------------------------------ | ----------- |
| it has an id                                     | `Yes`       |
| nothing could be sent                            | `No`        |
| throttled                                        | `Throttled` |
| `InternalError`, no answer                       | `Unknown`   |
| access denied, no such topic, its key is disabled| `Closed`    |
| the message is invalid or too large              | `Never`     |
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Final, Self
from urllib.parse import urlencode
from xml.etree import ElementTree as ET

from msgspec import Struct

from oncebridge.aws.client import AwsError, NotSent, Unclear
from oncebridge.aws.xml import document
from oncebridge.base.clock import Dice, SystemDice
from oncebridge.base.options import Doc
from oncebridge.events.trace_context import NAME
from oncebridge.sinks.api import Delivery, SinkAnswer, Unknown, Yes
from oncebridge.sinks.aws.answers import answer_to_code
from oncebridge.sinks.aws.batches import CallLimits, Entry, send_all
from oncebridge.sinks.aws.fifo import checked_group, deduplication_id, fifo_id
from oncebridge.sinks.aws.target import AwsSinkOptions, TargetKind, client_for, raise_or_log

_TOPIC: Final = TargetKind("sns", "an SNS topic", "", r"[A-Za-z0-9_-]{1,256}(\.fifo)?")
_VERSION: Final = "2010-03-31"
_AT_ONCE: Final = 10
_MOST_BYTES: Final = 256 << 10
_FORM: Final = ("content-type", "application/x-www-form-urlencoded; charset=utf-8")

_Pairs = list[tuple[str, str | bytes]]


class SnsSinkOptions(AwsSinkOptions, frozen=True, kw_only=True):
    """Options of the SNS sink."""

    group: Annotated[
        str | None,
        Doc("FIFO topics: the message group of events whose rule names no entity.", "calls"),
    ] = None


class _Message(Struct, frozen=True):
    """One entry of PublishBatch."""

    text: bytes
    attributes: Sequence[tuple[str, str]]
    group: str = ""
    """FIFO topics only, as is the next."""
    deduplication_id: str = ""

    @property
    def size(self) -> int:
        """Size as AWS counts it: the text, and each attribute with its name and type."""
        sizes = [len(name) + len("String") + len(value.encode()) for name, value in self.attributes]
        return len(self.text) + sum(sizes)

    def fields(self, at: int) -> Iterator[tuple[str, str | bytes]]:
        """Return the parameters of a call in which this is entry *at*."""
        entry = f"PublishBatchRequestEntries.member.{at + 1}"
        yield f"{entry}.Id", str(at)
        yield f"{entry}.Message", self.text
        for number, (name, value) in enumerate(self.attributes, 1):
            attribute = f"{entry}.MessageAttributes.entry.{number}"
            yield f"{attribute}.Name", name
            yield f"{attribute}.Value.DataType", "String"
            yield f"{attribute}.Value.StringValue", value
        if self.group:
            yield f"{entry}.MessageGroupId", self.group
            yield f"{entry}.MessageDeduplicationId", self.deduplication_id


class SnsSink:
    """Publish events to the topic at *url*: `sns:ARN`."""

    Options: ClassVar[type[SnsSinkOptions]] = SnsSinkOptions
    batch = _AT_ONCE
    by_entity = True

    def __init__(
        self, url: str, options: SnsSinkOptions | None = None, *, dice: Dice | None = None
    ) -> None:
        options = options or SnsSinkOptions()
        topic = _TOPIC.from_arn(url.removeprefix("sns:"), options.region)
        self._arn = topic.arn
        self._is_fifo = topic.name.endswith(".fifo")
        self._group = checked_group(options.group, "topics", is_fifo=self._is_fifo)
        self._dice = dice or SystemDice()
        self._limits = CallLimits(_AT_ONCE, _MOST_BYTES, _MOST_BYTES)
        self._client = client_for(topic, options, "sns", "get_topic_attributes", TopicArn=topic.arn)
        self.concurrency = options.concurrency

    @classmethod
    def from_url(cls, url: str, options: SnsSinkOptions | None = None) -> Self:
        """Use the topic of `sns:arn:aws:sns:REGION:ACCOUNT:TOPIC`."""
        return cls(url, options)

    async def open(self) -> None:
        """Check that the topic exists, and read how large its messages may be."""
        try:
            answer = await self._call("GetTopicAttributes", [("TopicArn", self._arn)])
        except (AwsError, NotSent, Unclear) as error:
            raise_or_log(error, f"SNS topic {self._arn}")
            return
        most = _maximum(answer)
        if most is not None:
            self._limits = CallLimits(_AT_ONCE, most, most)

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        messages = [self._message(delivery) for delivery in deliveries]
        entries = [Entry(message, message.size) for message in messages]
        return await send_all(entries, self._limits, self._publish, in_order=self._is_fifo)

    async def aclose(self) -> None:
        await self._client.aclose()

    # --- a message -----------------------------------------------------------------------

    def _message(self, delivery: Delivery) -> _Message:
        message = self._written(delivery, delivery.trace)
        if delivery.trace and message.size > self._limits.each:
            return self._written(delivery, "")
        return message

    def _written(self, delivery: Delivery, trace: str) -> _Message:
        values = {
            "Idempotency-Key": delivery.idempotency_key,
            "oncebridge-route": delivery.route,
            "oncebridge-unprotected": "true" if delivery.unprotected else "",
            NAME: trace,
        }
        attributes = [(name, value) for name, value in values.items() if value]
        if not self._is_fifo:
            return _Message(delivery.event.raw, attributes)
        number = deduplication_id(delivery, self._dice)
        group = fifo_id(delivery.entity) or self._group or fifo_id(delivery.key) or number
        return _Message(delivery.event.raw, attributes, group, number)

    # --- a call --------------------------------------------------------------------------

    async def _publish(self, messages: Sequence[_Message]) -> Sequence[SinkAnswer]:
        pairs: _Pairs = [("TopicArn", self._arn)]
        for at, message in enumerate(messages):
            pairs += message.fields(at)
        answers = _read(await self._call("PublishBatch", pairs))
        missing = Unknown("SNS returned no result for the message")
        return [answers.get(str(at), missing) for at in range(len(messages))]

    async def _call(self, operation: str, pairs: _Pairs) -> ET.Element:
        body = urlencode([("Action", operation), ("Version", _VERSION), *pairs]).encode()
        answer = await self._client.request("POST", headers=[_FORM], body=body)
        return document(answer.body, f"{operation}Response")


def _maximum(answer: ET.Element) -> int | None:
    """Return how large a message may be; None if the topic does not say."""
    for entry in answer.iterfind(".//{*}Attributes/{*}entry"):
        value = _text(entry, "value")
        if _text(entry, "key") == "MaximumMessageSize" and value.isdecimal() and len(value) < 10:
            return int(value)
    return None


def _read(response: ET.Element) -> dict[str, SinkAnswer]:
    """Return the result of each entry, by its id."""
    answers: dict[str, SinkAnswer] = {}
    for member in response.iterfind(".//{*}Successful/{*}member"):
        if _text(member, "MessageId"):
            answers[_text(member, "Id")] = Yes()
    for member in response.iterfind(".//{*}Failed/{*}member"):
        failure = answer_to_code(_text(member, "Code"), _text(member, "Message"))
        answers[_text(member, "Id")] = failure
    return answers


def _text(element: ET.Element, name: str) -> str:
    return element.findtext(f"{{*}}{name}", "").strip()
