"""
The Kinesis sink: puts events into a data stream.

**`Yes` means:** the record is in a shard of the stream, on several hosts, until its retention
ends.
**What is sent:** the bytes as they were received; a record has no room for anything else.
**Partition key:** the entity of the event, so that all records about it are in one shard, and in
order if the gateway sends them in order (`order = "entity"`). Without an entity it is the key, and
without a key it is random.

| result                                             | answer      |
| -------------------------------------------------- | ----------- |
| it has a sequence number                           | `Yes`       |
| nothing could be sent                              | `No`        |
| `ProvisionedThroughputExceededException`           | `Throttled` |
| `InternalFailure`, no answer                       | `Unknown`   |
| access denied, no such stream, its key is disabled | `Closed`    |
| the record is too large                            | `Never`     |
"""

from collections.abc import Sequence
from typing import ClassVar, Final, Self

import msgspec
from msgspec import Struct

from oncebridge.aws.client import AwsError, NotSent, Unclear
from oncebridge.base.clock import Dice, SystemDice
from oncebridge.sinks.api import Delivery, SinkAnswer, Unknown, Yes
from oncebridge.sinks.aws.answers import answer_to_code
from oncebridge.sinks.aws.batches import CallLimits, Entry, send_all
from oncebridge.sinks.aws.target import (
    AwsSinkOptions,
    TargetKind,
    client_for,
    decode_answer,
    raise_or_log,
)

_STREAM: Final = TargetKind("kinesis", "a Kinesis stream", "stream/", r"[A-Za-z0-9_.-]{1,128}")
_AT_ONCE: Final = 500
_MOST_BYTES: Final = 2 << 20
"""Kinesis accepts 10 MiB; a smaller call is sent in time even over a slow connection."""
_MOST_RECORD: Final = 1 << 20
_MOST_KEY: Final = 256


class KinesisSinkOptions(AwsSinkOptions, frozen=True, kw_only=True):
    """Options of the Kinesis sink."""


class _Record(Struct, frozen=True, rename="pascal"):
    data: bytes
    partition_key: str

    @property
    def size(self) -> int:
        """Size as AWS counts it."""
        return len(self.data) + len(self.partition_key)


class _PutResult(Struct, frozen=True, rename="pascal"):
    sequence_number: str | None = None
    error_code: str | None = None
    error_message: str | None = None

    @property
    def answer(self) -> SinkAnswer:
        if self.error_code:
            return answer_to_code(self.error_code, self.error_message or "")
        if self.sequence_number:
            return Yes()
        return Unknown("Kinesis returned neither a sequence number nor an error")


class _PutResults(Struct, frozen=True, rename="pascal"):
    records: list[_PutResult] = []


class _StreamSummary(Struct, frozen=True):
    most_kib: int | None = msgspec.field(default=None, name="MaxRecordSizeInKiB")


class _StreamDescription(Struct, frozen=True, rename="pascal"):
    stream_description_summary: _StreamSummary = _StreamSummary()


_encode = msgspec.json.Encoder().encode
_results = msgspec.json.Decoder(_PutResults).decode
_described = msgspec.json.Decoder(_StreamDescription).decode


class KinesisSink:
    """Put events into the stream at *url*: `kinesis://STREAM` or `kinesis:ARN`."""

    Options: ClassVar[type[KinesisSinkOptions]] = KinesisSinkOptions
    batch = _AT_ONCE
    by_entity = True

    def __init__(
        self, url: str, options: KinesisSinkOptions | None = None, *, dice: Dice | None = None
    ) -> None:
        options = options or KinesisSinkOptions()
        stream = _STREAM.from_url(url, options.region)
        self._name = stream.name
        self._named = {"StreamARN": stream.arn} if stream.arn else {"StreamName": stream.name}
        self._dice = dice or SystemDice()
        self._limits = CallLimits(_AT_ONCE, _MOST_BYTES, _MOST_RECORD)
        self._client = client_for(
            stream, options, "kinesis", "describe_stream_summary", StreamName=stream.name
        )
        self.concurrency = options.concurrency

    @classmethod
    def from_url(cls, url: str, options: KinesisSinkOptions | None = None) -> Self:
        """Use the stream of `kinesis://STREAM`, `kinesis://STREAM?region=REGION` or `kinesis:ARN`."""
        return cls(url, options)

    async def open(self) -> None:
        """Check that the stream exists, and read how large its records may be."""
        try:
            body = await self._client.call("DescribeStreamSummary", _encode(self._named))
            summary = decode_answer(_described, body).stream_description_summary
        except (AwsError, NotSent, Unclear) as error:
            raise_or_log(error, f"Kinesis stream {self._name}")
            return
        if summary.most_kib:
            most = summary.most_kib << 10
            self._limits = CallLimits(_AT_ONCE, max(_MOST_BYTES, most), most)

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        records = [_Record(one.event.raw, self._partition_key(one)) for one in deliveries]
        entries = [Entry(record, record.size) for record in records]
        return await send_all(entries, self._limits, self._put)

    async def aclose(self) -> None:
        await self._client.aclose()

    def _partition_key(self, delivery: Delivery) -> str:
        about = delivery.entity or delivery.key or self._dice.tokens(1)[0]
        return about.hex()[:_MOST_KEY]

    async def _put(self, records: Sequence[_Record]) -> Sequence[SinkAnswer]:
        body = await self._client.call("PutRecords", _encode({**self._named, "Records": records}))
        return [result.answer for result in decode_answer(_results, body).records]
