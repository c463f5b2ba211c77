"""
Enhanced fan-out: Kinesis pushes the records of a shard.

A subscription lasts five minutes, and is then renewed from where it ended. The SDK reads it, in a
thread for each shard, one page at a time: while there is no room for more, the thread waits, and
so does Kinesis.
"""

import asyncio
import threading
from contextlib import closing, suppress
from datetime import datetime
from typing import Any, Final

import botocore.session  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import ClientError  # type: ignore[import-untyped]

from oncebridge.aws.client import AwsError
from oncebridge.aws.options import AwsOptions
from oncebridge.errors import ConfigError
from oncebridge.sources.kinesis.shard_feed import FailureBackoff, ShardFeed
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


class PushedFeed(ShardFeed):
    """Receives the records of a shard by enhanced fan-out."""

    def __init__(
        self, shard: str, position: Position, pauses: FailureBackoff, *, consumer: FanOutConsumer
    ) -> None:
        super().__init__(shard, position, pauses)
        self._consumer = consumer
        self._listener: _Listener | None = None

    async def page(self) -> RecordPage:
        while True:
            listener = self._listener
            if listener is None:
                await asyncio.sleep(max(self._due_s - self._now(), 0))
                self._due_s = self._now() + _APART_S
                listener = self._listener = _Listener(self._consumer, self._shard, self._position)
            pushed = await listener.pushed()
            if isinstance(pushed, str):
                self._resubscribe_after(pushed)
                continue
            page, after = pushed
            self._pauses.succeeded()
            self._position = Position(after=after) if after else self._position
            return page

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _resubscribe_after(self, what: str) -> None:
        self.close()
        self._listener = None
        now_s = self._now()
        if what == "ResourceInUseException":
            # The worker that had the shard before has not closed yet, or another group uses the
            # same consumer; only the latter lasts long.
            self._due_s = now_s + max(self._pauses.failed(what), _IN_USE_S)
        elif what == "InvalidArgumentException" and self._position.after:
            self._pauses.position_refused(self._position)
            self._position = Position()
        elif what:
            self._due_s = max(self._due_s, now_s + self._pauses.failed(what))


class _Listener:
    """A thread that reads one subscription, until it ends or `close` is called."""

    def __init__(self, consumer: FanOutConsumer, shard: str, position: Position) -> None:
        self._loop = asyncio.get_running_loop()
        self._room = threading.Semaphore(0)
        self._heard: asyncio.Queue[_Pushed] = asyncio.Queue()
        self._is_closed = False
        threading.Thread(
            target=self._listen,
            args=(consumer, shard, position),
            name="oncebridge-shard",
            daemon=True,
        ).start()

    async def pushed(self) -> _Pushed:
        """Wait for the next page, or the end of the subscription."""
        if self._heard.empty():
            self._room.release()
        return await self._heard.get()

    def close(self) -> None:
        # The thread may wait for room or for Kinesis; it is not joined.
        self._is_closed = True
        self._room.release()

    # --- in the thread -----------------------------------------------------------------

    def _listen(self, consumer: FanOutConsumer, shard: str, position: Position) -> None:
        what = ""
        try:
            with closing(consumer.pushed(shard, position)) as events:
                for event in events:
                    if "SubscribeToShardEvent" not in event:
                        continue
                    self._room.acquire()
                    if self._is_closed:
                        return
                    self._hand_over(_page(event["SubscribeToShardEvent"]))
        except ClientError as error:
            what = error.response.get("Error", {}).get("Code", "") or type(error).__name__
        except Exception as error:  # noqa: BLE001 - of the SDK, of HTTP, of TLS: the subscription is over
            what = type(error).__name__
        self._hand_over(what)

    def _hand_over(self, pushed: _Pushed) -> None:
        with suppress(RuntimeError):  # the loop may be gone by now
            self._loop.call_soon_threadsafe(self._heard.put_nowait, pushed)


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
