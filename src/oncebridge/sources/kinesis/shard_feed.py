"""
The records of one shard, page by page: polled, or pushed by Kinesis (enhanced fan-out).

Errors are retried without end, with growing pauses: a throttled call, an expired iterator, an
outage. Only errors that last are logged.

A subscription lasts five minutes, and is then renewed from where it ended. The SDK reads it, in a
thread, one page at a time: while there is no room for more, nothing is read, and Kinesis waits.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from typing import Any, Final

import botocore.session  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import ClientError  # type: ignore[import-untyped]
from msgspec import Struct

from oncebridge.aws.client import AwsError, NotSent, Unclear
from oncebridge.aws.options import AwsOptions
from oncebridge.base.clock import Dice
from oncebridge.base.threads import run_in_thread
from oncebridge.errors import ConfigError
from oncebridge.sources.api import backoff_s
from oncebridge.sources.kinesis.stream import KinesisRecord, KinesisStream, Position, RecordPage

_log = logging.getLogger("oncebridge")

_APART_S: Final = 0.25  # a shard answers five calls a second, of all its readers together
_LOG_AT: Final = 3
_LIMIT: Final = 2000
_FAILURES: Final = (AwsError, NotSent, Unclear, ConfigError)  # the last: there are no credentials

_SILENCE_S: Final = 40  # Kinesis sends something every few seconds, even if it is empty
_RENEW_APART_S: Final = 1.1  # Kinesis allows one subscription a second for each shard
_IN_USE_S: Final = 5.0  # a new subscription cannot be taken over for so long
_ACTIVE_WITHIN_S: Final = 60.0

_Pushed = RecordPage | str
"""A page, or the error that ended the subscription; empty if its time was over."""


class ShardFeed(Struct, eq=False, kw_only=True):
    """
    Returns the records of *shard*, from *position* on.

    *gone* is called if Kinesis does not find the shard or the stream.
    """

    stream: KinesisStream
    shard: str
    position: Position
    dice: Dice
    gone: Callable[[], None]
    _failures: int = 0
    """Failures in a row."""
    _due_s: float = 0.0

    async def page(self) -> RecordPage:
        """Wait for the next page; after the last one, `next` is None."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop waiting; safe to repeat."""

    def _failed(self, what: str) -> float:
        """Record a failure; return for how many seconds to pause."""
        self._failures += 1
        if self._failures == _LOG_AT:
            _log.warning("oncebridge.shard_not_read", extra={**self.fields, "error": what})
        if what.startswith("ResourceNotFound"):
            self.gone()
        return backoff_s(self._failures - 1, self.dice)

    def _succeeded(self) -> None:
        if self._failures >= _LOG_AT:
            _log.warning("oncebridge.shard_read_again", extra=self.fields)
        self._failures = 0

    def _start_with_oldest(self) -> None:
        """Kinesis does not have the last record any more: continue with the oldest there is."""
        fields = {**self.fields, "sequence_number": self.position.after}
        _log.error("oncebridge.place_is_unknown_records_may_be_lost", extra=fields)
        self.position = Position()

    @property
    def fields(self) -> dict[str, str]:
        """What log lines about the shard have in them."""
        return {"stream": self.stream.name, "shard": self.shard}

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class PolledFeed(ShardFeed, eq=False, kw_only=True):
    """Polls the stream for the records of a shard, at least every *poll_s*."""

    poll_s: float
    _iterator: str = ""
    _limit: int = _LIMIT

    async def page(self) -> RecordPage:
        while True:
            await asyncio.sleep(max(self._due_s - self._now(), 0))
            began = self._now()
            try:
                page = await self._ask()
            except _FAILURES as error:
                self._due_s = began + max(self._pause_s(error), _APART_S)
                continue
            self._succeeded()
            self._due_s = began + (_APART_S if page.behind_ms else self.poll_s)
            return page

    async def _ask(self) -> RecordPage:
        if not self._iterator:
            try:
                self._iterator = await self.stream.iterator(self.shard, self.position)
            except AwsError as error:
                if not self.position.after or error.code != "InvalidArgumentException":
                    raise
                self._start_with_oldest()
                self._iterator = await self.stream.iterator(self.shard, self.position)
        page = await self.stream.read(self._iterator, self._limit)
        self._limit = min(self._limit * 2, _LIMIT)
        self._iterator = page.next or ""
        if page.records:
            self.position = Position(after=page.records[-1].sequence_number)
        return page

    def _pause_s(self, error: Exception) -> float:
        if isinstance(error, Unclear):
            self._limit = max(self._limit // 2, 1)  # the page may be too large for the connection
        if isinstance(error, AwsError) and not error.retryable:
            self._iterator = ""  # it may have expired: iterators last five minutes
        return self._failed(str(error))


# --- enhanced fan-out --------------------------------------------------------------------


async def registered(stream: KinesisStream, arn: str, name: str) -> str:
    """Return the ARN of the consumer *name*; register it if there is none."""
    now_s = asyncio.get_running_loop().time
    ends_s = now_s() + _ACTIVE_WITHIN_S
    while True:
        try:
            found = await stream.consumer(arn, name)
            if found.status == "ACTIVE":
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
        start = position.asked("Type", "SequenceNumber")
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
                self._due_s = self._now() + _RENEW_APART_S
                self._subscription = _subscribe(self.consumer, self.shard, self.position)
            pushed = await run_in_thread(self._subscription.__next__, "oncebridge-shard")
            if isinstance(pushed, str):
                self._resubscribe_after(pushed)
                continue
            self._succeeded()
            if pushed.next:
                self.position = Position(after=pushed.next)
            return pushed

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


def _page(event: dict[str, Any]) -> RecordPage:
    records = [
        KinesisRecord(
            record["SequenceNumber"],
            record["PartitionKey"],
            record["Data"],
            at.timestamp() if (at := record.get("ApproximateArrivalTimestamp")) else 0.0,
        )
        for record in event["Records"]
    ]
    # At the end of a shard its children are listed, or there is nothing to continue with.
    after = None if event.get("ChildShards") else event.get("ContinuationSequenceNumber")
    return RecordPage(records, after or None, event.get("MillisBehindLatest") or 0)
