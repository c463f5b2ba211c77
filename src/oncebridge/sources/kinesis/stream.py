"""
One Kinesis stream: its shards, what is in them, and who is registered to be sent it.

Calls are as in `oncebridge.aws.client`: nothing is repeated here, and what goes wrong is raised.
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
_PAGE_TIMEOUT: Final = timedelta(seconds=30)
"""Up to 14 MB come in one answer."""


class Shard(Struct, frozen=True, order=True):
    """A part of a stream; *first* is its first sequence number, which no other shard has."""

    id: str
    first: str
    parents: tuple[str, ...] = ()
    """By their ids: one that was split, or two that were merged."""


class Record(Struct, frozen=True, rename="pascal", gc=False):
    """What a producer put."""

    sequence_number: str
    partition_key: str
    data: bytes
    approximate_arrival_timestamp: float = 0.0

    @property
    def arrived_ms(self) -> int:
        return round(self.approximate_arrival_timestamp * 1000)


class Page(Struct, frozen=True):
    """Records as they came; *next* leads on, and nothing does at the end of a shard."""

    records: list[Record]
    next: str | None
    behind_ms: int


class Position(Struct, frozen=True):
    """From where on to read a shard: after a record, from a moment on, or all there is."""

    after: str = ""
    at_ms: int = 0

    @property
    def kind(self) -> str:
        if self.after:
            return "AFTER_SEQUENCE_NUMBER"
        return "AT_TIMESTAMP" if self.at_ms else "TRIM_HORIZON"


class Summary(Struct, frozen=True):
    """What is to be known about a stream."""

    arn: str
    retention: timedelta


class Consumer(Struct, frozen=True):
    """One who is registered to be sent what is in a stream."""

    arn: str
    is_active: bool


class Stream:
    """The stream *stream*, given by its name or its ARN."""

    def __init__(self, stream: str, options: AwsOptions | None = None) -> None:
        options = options or AwsOptions()
        found = _ARN.fullmatch(stream)
        name = found["name"] if found else stream
        if not _NAME.fullmatch(name):
            raise ConfigError("", f"{stream!r} is neither the name nor the ARN of a Kinesis stream")
        if found and options.region not in (None, found["region"]):
            raise ConfigError("region", f"the ARN of the stream says {found['region']}")
        self.name = name
        self.options = options
        self.region = found["region"] if found else options.region
        self.clock = SkewedClock()
        # By its ARN, so that a stream of another account can be read, too.
        self._by_arn = {"StreamARN": stream} if found else {}
        self._named = self._by_arn or {"StreamName": name}
        self._page_timeout = max(_PAGE_TIMEOUT, options.timeout)
        self._client = AwsClient(
            SampleCall("kinesis", "describe_stream_summary", {"StreamName": name}),
            region=self.region,
            endpoint=options.endpoint,
            profile=options.profile,
            timeout=options.timeout,
            connect_timeout=options.connect_timeout,
            clock=self.clock,
        )

    @classmethod
    def from_url(cls, url: str, options: AwsOptions | None = None) -> Self:
        """Open `kinesis://STREAM`, `kinesis://STREAM?region=REGION` or `kinesis:ARN`."""
        options = options or AwsOptions()
        rest = url.removeprefix("kinesis:")
        if rest == url or not rest.strip("/"):
            raise ConfigError("", f"{url!r}: a stream is kinesis://STREAM or kinesis:ARN")
        if not rest.startswith("//"):
            return cls(rest, options)
        found = name_and_region(rest, options.region)
        if found is None:
            raise ConfigError("", f"{url!r}: only ?region=REGION may follow the stream")
        name, region = found
        return cls(name, msgspec.structs.replace(options, region=region))

    async def describe(self) -> Summary:
        """Tell the stream's ARN, and how long it keeps its records."""
        found = await self._call("DescribeStreamSummary", {}, _summary_of)
        summary = found.stream_description_summary
        return Summary(summary.stream_arn, timedelta(hours=summary.retention_period_hours))

    async def shards(self) -> list[Shard]:
        """List all shards that still hold records or take them, in the order of their ids."""
        found: list[Shard] = []
        token = None
        while True:
            if token is None:
                page = await self._call("ListShards", {"MaxResults": _PAGE}, _shards_of)
            else:  # which says already which stream it is about, and may not be told again
                asked = {"NextToken": token, "MaxResults": _PAGE} | self._by_arn
                page = await self._call("ListShards", asked, _shards_of, named=False)
            found += [shard.plain() for shard in page.shards]
            token = page.next_token
            if not token:
                return sorted(found)

    async def iterator(self, shard: str, position: Position) -> str:
        """Get ready to read a shard."""
        asked: dict[str, Any] = {"ShardId": shard, "ShardIteratorType": position.kind}
        if position.after:
            asked["StartingSequenceNumber"] = position.after
        elif position.at_ms:
            asked["Timestamp"] = position.at_ms / 1000
        return (await self._call("GetShardIterator", asked, _iterator_of)).shard_iterator

    async def read(self, iterator: str, limit: int) -> Page:
        """Read up to *limit* records; there may be none, and more all the same."""
        asked = {"ShardIterator": iterator, "Limit": limit} | self._by_arn
        page = await self._call(
            "GetRecords", asked, _page_of, named=False, within=self._page_timeout
        )
        return Page(page.records, page.next_shard_iterator or None, page.millis_behind_latest or 0)

    async def consumer(self, arn: str, name: str) -> Consumer:
        """Look for the registered consumer *name* of the stream *arn*."""
        asked = {"StreamARN": arn, "ConsumerName": name}
        found = await self._call("DescribeStreamConsumer", asked, _consumer_of, named=False)
        return found.consumer_description.plain()

    async def register(self, arn: str, name: str) -> Consumer:
        """Register a consumer; it takes a moment until it is active."""
        asked = {"StreamARN": arn, "ConsumerName": name}
        found = await self._call("RegisterStreamConsumer", asked, _registered_of, named=False)
        return found.consumer.plain()

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _call(
        self,
        operation: str,
        asked: dict[str, Any],
        answer: "msgspec.json.Decoder[_T]",
        *,
        named: bool = True,
        within: timedelta | None = None,
    ) -> _T:
        body = msgspec.json.encode(asked | self._named if named else asked)
        raw = await self._client.call(operation, body, within=within)
        try:
            return answer.decode(raw)
        except msgspec.MsgspecError:
            raise Unclear(f"{operation}: the answer is not what Kinesis would say") from None


def start_of(text: str) -> int | None:
    """
    Read from when on to read: 0 for all there is, None for what comes from now on.

    Anything else is a moment, in milliseconds since 1970.
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
        raise ConfigError("start", f"{text!r} says no time zone; add Z for UTC")
    return max(round(moment.timestamp() * 1000), 1)


# --- what Kinesis says -------------------------------------------------------------------


class _Summary(
    Struct, rename={"stream_arn": "StreamARN", "retention_period_hours": "RetentionPeriodHours"}
):
    stream_arn: str
    retention_period_hours: int = 24


class _Described(Struct, rename="pascal"):
    stream_description_summary: _Summary


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


class _Iterator(Struct, rename="pascal"):
    shard_iterator: str


class _Records(Struct, rename="pascal"):
    records: list[Record]
    next_shard_iterator: str | None = None
    millis_behind_latest: int | None = None


class _Consumer(
    Struct, rename={"consumer_arn": "ConsumerARN", "consumer_status": "ConsumerStatus"}
):
    consumer_arn: str
    consumer_status: str = ""

    def plain(self) -> Consumer:
        return Consumer(self.consumer_arn, self.consumer_status == "ACTIVE")


class _ConsumerDescribed(Struct, rename="pascal"):
    consumer_description: _Consumer


class _Registered(Struct, rename="pascal"):
    consumer: _Consumer


_summary_of = msgspec.json.Decoder(_Described)
_shards_of = msgspec.json.Decoder(_Listed)
_iterator_of = msgspec.json.Decoder(_Iterator)
_page_of = msgspec.json.Decoder(_Records)
_consumer_of = msgspec.json.Decoder(_ConsumerDescribed)
_registered_of = msgspec.json.Decoder(_Registered)
