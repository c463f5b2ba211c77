"""
Enhanced fan-out: Kinesis pushes the records of a shard.

A subscription lasts five minutes, and is then renewed from where it ended. The SDK reads it, in a
thread, one page at a time: while there is no room for more, nothing is read, and Kinesis waits.
"""

import asyncio
import threading
from collections.abc import Generator
from contextlib import closing, suppress
from datetime import datetime
from typing import Any, Final

import botocore.session  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import ClientError  # type: ignore[import-untyped]

from oncebridge.aws.client import AwsError
from oncebridge.aws.options import AwsOptions
from oncebridge.base.threads import in_thread
from oncebridge.errors import ConfigError
from oncebridge.sources.kinesis.shard_feed import ShardFeed
from oncebridge.sources.kinesis.stream import KinesisRecord, KinesisStream, Position, RecordPage

_SILENCE_S: Final = 40  # Kinesis sends something every few seconds, even if it is empty
_APART_S: Final = 1.1  # Kinesis allows one subscription a second for each shard
_IN_USE_S: Final = 5.0  # a new subscription cannot be taken over for so long
_ACTIVE_WITHIN_S: Final = 60.0


_Pushed = tuple[RecordPage, str] | str
"""
A page, and the sequence number to continue after; or the error that ended the subscription, empty
if its time was over.
"""


async def registered(stream: KinesisStream, arn: str, name: str) -> str:
    """Return the ARN of the consumer *name*; register it if there is none."""
    now_s = asyncio.get_running_loop().time
    ends_s = now_s() + _ACTIVE_WITHIN_S
    while True:
        try:
            found = await stream.consumer(arn, name)
            if found.is_active:
                return found.arn
        except AwsError as error:
            if error.code != "ResourceNotFoundException":
                raise
            try:
                await stream.register(arn, name)
            except AwsError as refused:
                if refused.code != "ResourceInUseException":  # another worker registered it
                    raise
        if now_s() > ends_s:
            raise ConfigError(
                "fan_out",
                f"the consumer {name} did not become active within {_ACTIVE_WITHIN_S:g} s; check it in AWS",
            )
        await asyncio.sleep(1)


class FanOutConsumer:
    """Subscribes to shards as the consumer *arn*, with the SDK."""

    def __init__(self, arn: str, options: AwsOptions) -> None:
        self._arn = arn
        self._options = options
        self._client: Any = None
        self._making = threading.Lock()

    def pushed(self, shard: str, position: Position) -> Any:
        """Subscribe to a shard; return the SDK's stream of events. Blocks."""
        with self._making:
            self._client = self._client or self._create()
        start: dict[str, Any] = {"Type": position.kind}
        if position.after:
            start["SequenceNumber"] = position.after
        elif position.at_ms:
            start["Timestamp"] = position.at_ms / 1000
        return self._client.subscribe_to_shard(
            ConsumerARN=self._arn, ShardId=shard, StartingPosition=start
        )["EventStream"]

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _create(self) -> Any:
        session = botocore.session.Session(profile=self._options.profile)
        return session.create_client(
            "kinesis",
            region_name=self._arn.split(":")[3],
            endpoint_url=self._options.endpoint,
            config=Config(
                connect_timeout=self._options.connect_timeout.total_seconds(),
                read_timeout=_SILENCE_S,
                retries={"total_max_attempts": 1},
                max_pool_connections=100,
            ),
        )


class PushedFeed(ShardFeed, eq=False, kw_only=True):
    """Receives the records of a shard by enhanced fan-out."""

    consumer: FanOutConsumer
    _subscription: Generator[_Pushed] | None = None

    async def page(self) -> RecordPage:
        while True:
            if self._subscription is None:
                await asyncio.sleep(max(self._due_s - self._now(), 0))
                self._due_s = self._now() + _APART_S
                self._subscription = _subscribe(self.consumer, self.shard, self.position)
            pushed = await in_thread(self._subscription.__next__, "oncebridge-shard")
            if isinstance(pushed, str):
                self._resubscribe_after(pushed)
                continue
            page, after = pushed
            self._succeeded()
            self.position = Position(after=after) if after else self.position
            return page

    def close(self) -> None:
        if self._subscription is not None:
            # While a thread waits for Kinesis, it cannot be closed: it is when that thread ends.
            with suppress(ValueError):
                self._subscription.close()
            self._subscription = None

    def _resubscribe_after(self, what: str) -> None:
        self._subscription = None
        now_s = self._now()
        if what == "ResourceInUseException":
            # The worker that had the shard before has not closed yet, or another group uses the
            # same consumer; only the latter lasts long.
            self._due_s = now_s + max(self._failed(what), _IN_USE_S)
        elif what == "InvalidArgumentException" and self.position.after:
            self._start_with_oldest()
        elif what:
            self._due_s = max(self._due_s, now_s + self._failed(what))


def _subscribe(consumer: FanOutConsumer, shard: str, position: Position) -> Generator[_Pushed]:
    """Yield the pages of a subscription, and then why it ended. Blocks."""
    what = ""
    try:
        with closing(consumer.pushed(shard, position)) as events:
            for event in events:
                if "SubscribeToShardEvent" in event:
                    yield _page(event["SubscribeToShardEvent"])
    except ClientError as error:
        what = error.response.get("Error", {}).get("Code", "") or type(error).__name__
    except Exception as error:  # noqa: BLE001 - of the SDK, of HTTP, of TLS: the subscription is over
        what = type(error).__name__
    yield what


def _page(event: dict[str, Any]) -> tuple[RecordPage, str]:
    records = [
        KinesisRecord(
            record["SequenceNumber"],
            record["PartitionKey"],
            record["Data"],
            _seconds(record.get("ApproximateArrivalTimestamp")),
        )
        for record in event["Records"]
    ]
    # Children are listed only at the end of a shard, and then there is nothing to continue with.
    after = event.get("ContinuationSequenceNumber") or ""
    is_end = not after or bool(event.get("ChildShards"))
    return RecordPage(
        records, None if is_end else after, event.get("MillisBehindLatest") or 0
    ), after


def _seconds(moment: datetime | None) -> float:
    return moment.timestamp() if moment is not None else 0.0
