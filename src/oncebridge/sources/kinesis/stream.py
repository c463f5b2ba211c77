"""
One Kinesis stream: its shards, their records, and its registered consumers.

Calls are as in `oncebridge.aws.client`: nothing is retried here, and errors are raised.
"""

import re
from datetime import datetime, timedelta
from typing import Any, Final, Self, TypeVar

import msgspec
from msgspec import Struct

from oncebridge.aws.addresses import name_and_region
from oncebridge.aws.client import AwsClient, SampleCall, Unclear
from oncebridge.aws.options import AwsOptions
from oncebridge.aws.skewed_clock import SkewedClock
from oncebridge.errors import ConfigError

_T = TypeVar("_T")

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_ARN = re.compile(
    r"arn:aws[a-z-]*:kinesis:(?P<region>[a-z0-9-]+):(?P<account>\d{12}):stream/(?P<name>[^/]+)"
)
_PAGE: Final = 1000
_PAGE_TIMEOUT: Final = timedelta(seconds=30)  # a response may have up to 14 MB


class Shard(Struct, frozen=True, order=True):
    """A shard of a stream; *first* is its first sequence number, which no other shard has."""

    id: str
    first: str
    parents: tuple[str, ...] = ()
    """Their ids: one shard that was split, or two that were merged."""


class KinesisRecord(Struct, frozen=True, rename="pascal", gc=False):
    """A record that a producer put."""

    sequence_number: str
    partition_key: str
    data: bytes
    approximate_arrival_timestamp: float = 0.0


class RecordPage(
    Struct,
    frozen=True,
    rename={"records": "Records", "next": "NextShardIterator", "behind_ms": "MillisBehindLatest"},
):
    """Some records; *next* is the iterator of the next page, None at the end of a shard."""

    records: list[KinesisRecord]
    next: str | None = None
    behind_ms: int = 0


class Position(Struct, frozen=True):
    """Where to start reading a shard: after a record, from a time on, or at its beginning."""

    after: str = ""
    at_ms: int = 0

    def asked(self, kind: str, number: str) -> dict[str, Any]:
        """Return the fields of a request, in which *kind* and *number* have these names."""
        if self.after:
            return {kind: "AFTER_SEQUENCE_NUMBER", number: self.after}
        if self.at_ms:
            return {kind: "AT_TIMESTAMP", "Timestamp": self.at_ms / 1000}
        return {kind: "TRIM_HORIZON"}


class StreamSummary(
    Struct, frozen=True, rename={"arn": "StreamARN", "retention_hours": "RetentionPeriodHours"}
):
    """The ARN of a stream, and how long it keeps records."""

    arn: str
    retention_hours: int = 24

    @property
    def retention(self) -> timedelta:
        return timedelta(hours=self.retention_hours)


class ConsumerInfo(Struct, frozen=True, rename={"arn": "ConsumerARN", "status": "ConsumerStatus"}):
    """A registered consumer of a stream (enhanced fan-out)."""

    arn: str
    status: str = ""


class KinesisStream:
    """The stream *stream*, given by its name or its ARN."""

    def __init__(self, stream: str, options: AwsOptions | None = None) -> None:
        options = options or AwsOptions()
        found = _ARN.fullmatch(stream)
        name = found["name"] if found else stream
        if not _NAME.fullmatch(name):
            raise ConfigError("", f"{stream!r} is neither the name nor the ARN of a Kinesis stream")
        if found and options.region not in (None, found["region"]):
            raise ConfigError(
                "region", f"the ARN of the stream has {found['region']}; use that, or none"
            )
        self.name = name
        self.region = found["region"] if found else options.region
        self.clock = SkewedClock()
        # By its ARN, so that a stream of another account can be read.
        self._by_arn = {"StreamARN": stream} if found else {}
        self._named = self._by_arn or {"StreamName": name}
        self._page_timeout = max(_PAGE_TIMEOUT, options.timeout)
        self._client = AwsClient(
            SampleCall("kinesis", "describe_stream_summary", {"StreamName": name}),
            options,
            region=self.region,
            clock=self.clock,
        )

    @classmethod
    def from_url(cls, url: str, options: AwsOptions | None = None) -> Self:
        """Open `kinesis://STREAM`, `kinesis://STREAM?region=REGION` or `kinesis:ARN`."""
        options = options or AwsOptions()
        rest = url.removeprefix("kinesis:")
        if rest == url or not rest.strip("/"):
            raise ConfigError("", f"{url!r}: write kinesis://STREAM or kinesis:ARN")
        if not rest.startswith("//"):
            return cls(rest, options)
        found = name_and_region(rest, options.region)
        if found is None:
            raise ConfigError("", f"{url!r}: only ?region=REGION may follow the stream")
        name, region = found
        return cls(name, msgspec.structs.replace(options, region=region))

    async def describe(self) -> StreamSummary:
        """Return the stream's ARN, and how long it keeps its records."""
        return await self._call(
            "DescribeStreamSummary", {}, StreamSummary, "StreamDescriptionSummary"
        )

    async def shards(self) -> list[Shard]:
        """Return all shards that have or accept records, in the order of their ids."""
        found: list[Shard] = []
        token = None
        while True:
            asked: dict[str, Any] = {"MaxResults": _PAGE}
            if token is not None:  # it names the stream, and the name must not be sent with it
                asked |= {"NextToken": token} | self._by_arn
            page = await self._call("ListShards", asked, _Listed, named=token is None)
            found += [shard.plain() for shard in page.shards]
            token = page.next_token
            if not token:
                return sorted(found)

    async def iterator(self, shard: str, position: Position) -> str:
        """Return an iterator to read a shard from *position*."""
        start = position.asked("ShardIteratorType", "StartingSequenceNumber")
        return await self._call(
            "GetShardIterator", {"ShardId": shard, **start}, str, "ShardIterator"
        )

    async def read(self, iterator: str, limit: int) -> RecordPage:
        """Return up to *limit* records; an empty page is not the end."""
        asked = {"ShardIterator": iterator, "Limit": limit} | self._by_arn
        return await self._call(
            "GetRecords", asked, RecordPage, named=False, within=self._page_timeout
        )

    async def consumer(self, arn: str, name: str) -> ConsumerInfo:
        """Return the registered consumer *name* of the stream *arn*."""
        asked = {"StreamARN": arn, "ConsumerName": name}
        return await self._call(
            "DescribeStreamConsumer", asked, ConsumerInfo, "ConsumerDescription", named=False
        )

    async def register(self, arn: str, name: str) -> None:
        """Register a consumer; it takes a moment until it is active."""
        asked = {"StreamARN": arn, "ConsumerName": name}
        await self._call("RegisterStreamConsumer", asked, ConsumerInfo, "Consumer", named=False)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _call(
        self,
        operation: str,
        asked: dict[str, Any],
        answer: type[_T],
        field: str = "",
        *,
        named: bool = True,
        within: timedelta | None = None,
    ) -> _T:
        """Make a call; return the response, or only *field* of it."""
        body = msgspec.json.encode(asked | self._named if named else asked)
        raw = await self._client.call(operation, body, within=within)
        try:
            if field:
                raw = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])[field]
            return msgspec.json.decode(raw, type=answer)
        except (msgspec.MsgspecError, KeyError):
            raise Unclear(f"{operation}: the response is not a valid response of Kinesis") from None


def start_of(text: str) -> int | None:
    """
    Return where to start reading: 0 for the oldest record, None for records from now on.

    Any other value is a time, in milliseconds since 1970.
    """
    match text.upper():
        case "TRIM_HORIZON":
            return 0
        case "LATEST":
            return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        message = 'must be TRIM_HORIZON, LATEST or a time such as "2026-03-01T06:00:00Z"'
        raise ConfigError("start", f"{text!r} {message}") from None
    if moment.tzinfo is None:
        raise ConfigError("start", f"{text!r} has no time zone; add Z for UTC")
    return max(round(moment.timestamp() * 1000), 1)


# --- responses ---------------------------------------------------------------------------


class _Range(Struct, rename="pascal"):
    starting_sequence_number: str


class _Shard(Struct, rename="pascal"):
    shard_id: str
    sequence_number_range: _Range
    parent_shard_id: str | None = None
    adjacent_parent_shard_id: str | None = None

    def plain(self) -> Shard:
        parents = (self.parent_shard_id, self.adjacent_parent_shard_id)
        first = self.sequence_number_range.starting_sequence_number
        return Shard(self.shard_id, first, tuple(parent for parent in parents if parent))


class _Listed(Struct, rename="pascal"):
    shards: list[_Shard]
    next_token: str | None = None
