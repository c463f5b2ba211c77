"""
The SQS sink: sends events to a queue, standard or FIFO.

**`Yes` means:** the queue has the message.
**What is sent:** the bytes as they were received. Message attributes: `Idempotency-Key`,
`oncebridge-route`, `oncebridge-version` with newest-wins rules, `oncebridge-unprotected` if the
store was unavailable, and `traceparent` if events are traced and there is room for it.
**FIFO queues** (`….fifo`) deduplicate for five minutes by themselves. The deduplication id is the
key with its generation: a second attempt at one delivery is dropped, the next delivery of the same
key, after its window, is not. The message group is the entity of the event, else the option
`group`, else the key; an event without any of them is a group of its own.

| result                                                     | answer      |
| ---------------------------------------------------------- | ----------- |
| it has an id                                               | `Yes`       |
| nothing could be sent                                      | `No`        |
| throttled                                                  | `Throttled` |
| `InternalError`, no answer                                 | `Unknown`   |
| access denied, no such queue, its key is disabled          | `Closed`    |
| too large, or a character that SQS does not accept         | `Never`     |
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Self

from oncebridge.aws.client import AwsError, NotSent, Unclear
from oncebridge.aws.queue import (
    MOST_BYTES,
    MOST_ENTRIES,
    Failure,
    Outgoing,
    QueueAddress,
    SqsQueue,
    TextAttribute,
    refused_character,
    size_of,
)
from oncebridge.base.clock import Dice, SystemDice
from oncebridge.base.options import Doc
from oncebridge.events.trace_context import NAME
from oncebridge.sinks.api import Delivery, Never, SinkAnswer, Yes
from oncebridge.sinks.aws.answers import answer_to_code
from oncebridge.sinks.aws.batches import CallLimits, Entry, send_all
from oncebridge.sinks.aws.fifo import checked_group, deduplication_id, fifo_id
from oncebridge.sinks.aws.target import AwsSinkOptions, raise_or_log


class SqsSinkOptions(AwsSinkOptions, frozen=True, kw_only=True):
    """Options of the SQS sink."""

    group: Annotated[
        str | None,
        Doc("FIFO queues: the message group of events whose rule names no entity.", "calls"),
    ] = None


class SqsSink:
    """Send events to the queue at *address*."""

    Options: ClassVar[type[SqsSinkOptions]] = SqsSinkOptions
    batch = MOST_ENTRIES
    by_entity = True

    def __init__(
        self,
        address: QueueAddress,
        options: SqsSinkOptions | None = None,
        *,
        dice: Dice | None = None,
    ) -> None:
        options = options or SqsSinkOptions()
        self.concurrency = options.concurrency
        self._is_fifo = address.is_fifo
        self._group = checked_group(options.group, "queues", is_fifo=address.is_fifo)
        self._dice = dice or SystemDice()
        self._queue = SqsQueue(address, options)
        self._limits = CallLimits(MOST_ENTRIES, MOST_BYTES, MOST_BYTES)

    @classmethod
    def from_url(cls, url: str, options: SqsSinkOptions | None = None) -> Self:
        """Send to `sqs://NAME`, `sqs:URL` or `sqs:ARN`."""
        return cls(QueueAddress.parse(url), options)

    async def open(self) -> None:
        """Check that the queue exists, and read how large its messages may be."""
        try:
            await self._queue.open()
            settings = await self._queue.settings()
        except (AwsError, NotSent, Unclear) as error:
            raise_or_log(error, f"SQS queue {self._queue.name}")
        else:
            self._limits = CallLimits(MOST_ENTRIES, MOST_BYTES, settings.max_bytes)

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        entries = [self._entry(str(at), delivery) for at, delivery in enumerate(deliveries)]
        return await send_all(entries, self._limits, self._send, in_order=self._is_fifo)

    async def aclose(self) -> None:
        await self._queue.aclose()

    # --- a message -----------------------------------------------------------------------

    def _entry(self, number: str, delivery: Delivery) -> Entry[Outgoing] | Never:
        raw = delivery.event.raw
        text = raw.decode()
        refused = refused_character(text)
        if refused:
            return Never(f"SQS does not accept the character {refused}")
        attributes = _attributes(delivery)
        size = size_of(raw, attributes)
        if size > self._limits.each and attributes.pop(NAME, None) is not None:
            size = size_of(raw, attributes)
        if not self._is_fifo:
            return Entry(Outgoing(number, text, attributes), size)
        unique = deduplication_id(delivery, self._dice)
        group = fifo_id(delivery.entity) or self._group or fifo_id(delivery.key) or unique
        return Entry(Outgoing(number, text, attributes, group, unique), size)

    # --- a call --------------------------------------------------------------------------

    async def _send(self, messages: Sequence[Outgoing]) -> Sequence[SinkAnswer]:
        return [answer_to_failure(failure) for failure in await self._queue.send(messages)]


def answer_to_failure(failure: Failure | None) -> SinkAnswer:
    """Return the answer for one message of a batch."""
    if failure is None:
        return Yes()
    status = 400 if failure.sender_fault else 500
    return answer_to_code(failure.code, failure.message, status=status)


def _attributes(delivery: Delivery) -> dict[str, TextAttribute]:
    values = {
        "Idempotency-Key": delivery.idempotency_key,
        "oncebridge-route": delivery.route,
        "oncebridge-version": "" if delivery.version is None else str(delivery.version),
        "oncebridge-unprotected": "true" if delivery.unprotected else "",
        NAME: delivery.trace,
    }
    return {name: TextAttribute.of(value) for name, value in values.items() if value}
