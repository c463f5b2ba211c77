"""
Events from a Kinesis stream, shared by any number of workers.

**Checkpoints:** for each shard, the last record up to which everything is final. A record that
failed is never skipped: it is retried in place, and meanwhile only records with other partition
keys continue.
**Sharing:** each shard is read by the worker that holds its checkpoint in the store. Workers of a
*group* find each other there, and each takes its share.
**Outages:** while the store or all sinks are unavailable nothing is read; while Kinesis is
unavailable, reading is retried.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar

from msgspec.structs import replace

from oncebridge.aws.client import AwsError, NotSent, Unclear
from oncebridge.aws.options import AwsOptions
from oncebridge.base.clock import ms, wait_until_set
from oncebridge.base.options import Doc
from oncebridge.errors import ConfigError, OncebridgeError, StoreError
from oncebridge.sources.api import Host, Source
from oncebridge.sources.checkpoint import Checkpoint, CheckpointTaken
from oncebridge.sources.kinesis.held_shard import HeldShard, KinesisTimings
from oncebridge.sources.kinesis.shard_feed import (
    FanOutConsumer,
    PolledFeed,
    PushedFeed,
    ShardFeed,
    registered,
)
from oncebridge.sources.kinesis.shards import (
    Roster,
    ShardProgress,
    choose,
    is_free,
    readable,
    share,
    surplus,
)
from oncebridge.sources.kinesis.stream import (
    KinesisStream,
    Position,
    Shard,
    StreamSummary,
    start_of,
)

_T = TypeVar("_T")

_log = logging.getLogger("oncebridge")

_SKIP_S: Final = 10.0  # a shard whose reading ended in an unexpected error is skipped for so long
_MINUTE_MS: Final = 60_000


class KinesisOptions(AwsOptions, frozen=True, kw_only=True):
    """Options of the Kinesis source."""

    start: Annotated[
        str,
        Doc(
            "Where a new group starts: TRIM_HORIZON (the oldest record), LATEST (records from now "
            "on) or a time, such as 2026-03-01T06:00:00Z.",
            "LATEST",
        ),
    ] = "TRIM_HORIZON"
    group: Annotated[
        str, Doc("Workers of the same group share the shards; each group reads all of them.", "crm")
    ] = "oncebridge"
    fan_out: Annotated[
        str | None,
        Doc("Use enhanced fan-out, as this registered consumer, instead of polling.", "oncebridge"),
    ] = None
    poll: Annotated[
        timedelta,
        Doc("How often to poll a shard that is read to its end.", "1s", at_least=0.25),
    ] = timedelta(seconds=1)


class KinesisSource(Source):
    """Reads *stream*, together with the other workers of the group."""

    Options: ClassVar = KinesisOptions

    def __init__(
        self,
        stream: KinesisStream,
        options: KinesisOptions | None = None,
        *,
        times: KinesisTimings = KinesisTimings(),  # noqa: B008 - frozen
    ) -> None:
        self._options = options or KinesisOptions()
        self._start_ms = start_of(self._options.start)
        if not self._options.group:
            raise ConfigError("group", "must not be empty")
        self._stream = stream
        self._times = times
        self._host: Host
        self._roster: Roster
        self._worker = ""
        self._summary: StreamSummary | None = None
        self._consumer: FanOutConsumer | None = None
        self._shards: list[Shard] = []
        self._ended: set[Shard] = set()
        self._held: dict[Shard, HeldShard] = {}
        self._skipped_until: dict[Shard, float] = {}
        self._listed_s = self._searched_s = -1e9
        self._has_news = False
        self._stopping = asyncio.Event()
        self._woken = asyncio.Event()
        self._failures: dict[str, str] = {}

    @classmethod
    def from_url(cls, url: str, options: KinesisOptions | None = None) -> Self:
        """Read `kinesis://STREAM`, `kinesis://STREAM?region=REGION` or `kinesis:ARN`."""
        return cls(KinesisStream.from_url(url, options), options)

    @property
    def shards(self) -> tuple[str, ...]:
        """The shards that this worker reads now, by their ids."""
        return tuple(shard.id for shard in sorted(self._held))

    # --- the life of a source ----------------------------------------------------------

    async def open(self, host: Host) -> None:
        self._host = host
        (token,) = host.dice.tokens(1)
        self._worker = f"{socket.gethostname()}-{os.getpid()}-{token.hex()[-12:]}"
        try:
            await self._get_ready()
        except (AwsError, NotSent, Unclear) as error:
            if isinstance(error, AwsError) and not (
                error.retryable or error.code == "ResourceInUseException"
            ):
                raise ConfigError("source", f"Kinesis refused the request: {error}") from None
            self._log_failure("describe", str(error))  # it may become available later

    async def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._woken.clear()
                await self._refresh()
                pause_s = self._times.look.total_seconds()
                await wait_until_set(self._woken, pause_s * (0.9 + self._host.dice.fraction() / 5))
            await self._leave()
        finally:
            # There are some only after a cancellation: then nothing is released.
            tasks = [held.task for held in self._held.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        self._stopping.set()
        self._woken.set()
        for held in self._held.values():
            held.leave()

    async def aclose(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
        await self._stream.aclose()

    async def _leave(self) -> None:
        """Finish records in progress, release all shards, and leave the group."""
        for held in self._held.values():
            held.leave()
        await asyncio.gather(*[held.task for held in self._held.values()], return_exceptions=True)
        self._remove_finished()
        if self._summary is not None and self._roster.start_ms is not None:
            with suppress(StoreError):  # its entry expires
                await self._roster.leave()

    # --- getting ready -----------------------------------------------------------------

    async def _get_ready(self) -> None:
        """Describe the stream, and check the permissions that are needed."""
        if self._summary is not None:
            return
        stream, options = self._stream, self._options
        summary = await self._allowed(stream.describe(), "DescribeStreamSummary")
        shards = await self._allowed(stream.shards(), "ListShards")
        if self._start_ms is not None and self._start_ms > stream.clock.now_ms() + _MINUTE_MS:
            raise ConfigError(
                "start",
                f"{options.start} is in the future; use a time in the past, LATEST or TRIM_HORIZON",
            )
        if options.fan_out:
            consumer = registered(stream, summary.arn, options.fan_out)
            arn = await self._allowed(consumer, "DescribeStreamConsumer, RegisterStreamConsumer")
            self._consumer = FanOutConsumer(arn, options)
        else:
            await self._try_to_read(shards)
        if times := self._host.outlasted_window(summary.retention):
            _log.warning(
                "oncebridge.stream_outlasts_window", extra={"stream": stream.name, **times}
            )
        self._roster = Roster(
            self._host.store,
            f"{summary.arn}\0{options.group}",
            self._worker,
            dice=self._host.dice,
            gone_ms=ms(self._times.gone),
            keep_ms=ms(self._times.keep),
        )
        self._summary = summary

    async def _try_to_read(self, shards: list[Shard]) -> None:
        if not shards:
            return
        begin = self._stream.iterator(shards[-1].id, Position())
        iterator = await self._allowed(begin, "GetShardIterator")
        try:
            await self._allowed(self._stream.read(iterator, 1), "GetRecords")
        except AwsError as error:
            if not error.is_throttling:  # other readers cause that
                raise

    async def _allowed(self, call: Coroutine[Any, Any, _T], action: str) -> _T:
        try:
            return await call
        except AwsError as error:
            code, name = error.code.removesuffix("Exception"), self._stream.name
            if code == "ResourceNotFound":
                message = f"Kinesis stream {name} not found in this Region and account"
            elif code == "AccessDenied":
                message = f"AWS denies kinesis:{action} on the stream {name}: {error.message}"
            else:
                raise
            raise ConfigError("source", message) from None

    # --- sharing -----------------------------------------------------------------------

    async def _refresh(self) -> None:
        """Renew this worker's entry, list the shards, and claim or release some."""
        self._remove_finished()
        if not self._host.is_open() or not await self._attempt("describe", self._get_ready):
            return
        if not await self._attempt("roster", self._renew):
            return
        await self._attempt("list", self._list)
        await self._attempt("share", self._rebalance)

    def _remove_finished(self) -> None:
        """Remove the shards whose reading has ended."""
        for shard, held in list(self._held.items()):
            if not held.task.done():
                continue
            del self._held[shard]
            if held.is_ended:
                self._ended.add(shard)
                self._has_news = True
                self._list_soon()
            if not held.task.cancelled() and (error := held.task.exception()):
                # Its type only: the text of an exception may quote the event.
                place = {"stream": self._stream.name, "shard": shard.id}
                _log.error(
                    "oncebridge.shard_failed", extra={**place, "error": type(error).__name__}
                )
                self._skipped_until[shard] = self._now() + _SKIP_S

    async def _renew(self) -> None:
        before, has_news = self._roster.news, self._has_news
        # The start of the group stays, even if the store has lost it.
        start_ms = self._roster.start_ms or self._start_ms
        if start_ms is None:
            clock = self._stream.clock
            start_ms = clock.now_ms() - (1000 if clock.error_ms is None else clock.error_ms)
        await self._roster.renew(start_ms, has_news=has_news)
        self._has_news = False
        if self._roster.news != before + has_news:
            self._list_soon()  # another worker reached the end of a shard

    async def _list(self) -> None:
        if self._now() - self._listed_s < self._times.list.total_seconds():
            return
        self._shards = await self._stream.shards()
        self._listed_s, self._searched_s = self._now(), -1e9
        self._ended.intersection_update(self._shards)
        for shard, held in self._held.items():
            if shard not in self._shards:  # it expired, or the stream was created again
                held.leave()

    async def _rebalance(self) -> None:
        active = {shard: held for shard, held in self._held.items() if not held.is_leaving}
        free: list[Shard] = []
        if self._searched_s < self._listed_s or len(active) < self._share():
            free = await self._find_free()
        for shard in surplus(active, self._share()):
            active[shard].leave()
        wanted = self._share() - len(active)
        for shard in choose(free, max(wanted, 0), self._roster.workers, self._worker):
            if self._stopping.is_set():
                return
            await self._take(shard)

    def _share(self) -> int:
        return share(self._roster.workers, self._worker, len(readable(self._shards, self._ended)))

    async def _find_free(self) -> list[Shard]:
        """Return the shards that no worker reads, and record those that have ended."""
        known = self._ended | set(self._held)
        unknown = [shard for shard in self._shards if shard not in known]
        records = await self._host.store.peek([self._checkpoint(shard).key for shard in unknown])
        found = dict(zip(unknown, records, strict=True))
        self._ended.update(
            [shard for shard, at in found.items() if at and ShardProgress.read(at.memo).is_end]
        )
        self._searched_s = self._now()
        now_ms, lease_ms = self._roster.now_ms, ms(self._times.lease)
        return [
            shard
            for shard in readable(self._shards, self._ended)
            if shard in found
            and is_free(found[shard], now_ms, lease_ms)
            and self._skipped_until.get(shard, 0) <= self._now()
        ]

    async def _take(self, shard: Shard) -> None:
        checkpoint = self._checkpoint(shard)
        try:
            memo = await checkpoint.take()
        except CheckpointTaken:
            return  # by another worker
        place = ShardProgress.read(memo)
        if place.is_end:
            self._ended.add(shard)
            await checkpoint.release(memo)
            return
        assert self._summary is not None  # noqa: S101 - or nothing is listed
        held = HeldShard(
            self._make_feed(shard, place.position(self._roster.start_ms or 0)),
            self._host,
            checkpoint=checkpoint,
            taken=replace(place, by=self._worker),
            retention=self._summary.retention,
            times=self._times,
        )
        held.task = asyncio.create_task(held.run())
        held.task.add_done_callback(lambda _: self._woken.set())
        self._held[shard] = held
        _log.info("oncebridge.shard_taken", extra={"stream": self._stream.name, "shard": shard.id})

    def _make_feed(self, shard: Shard, position: Position) -> ShardFeed:
        at: dict[str, Any] = {"stream": self._stream, "shard": shard.id, "position": position}
        at |= {"dice": self._host.dice, "gone": self._list_soon}
        if self._consumer is not None:
            return PushedFeed(consumer=self._consumer, **at)
        return PolledFeed(poll_s=self._options.poll.total_seconds(), **at)

    def _checkpoint(self, shard: Shard) -> Checkpoint:
        assert self._summary is not None  # noqa: S101 - or nothing is listed
        return Checkpoint(
            self._host.store,
            "kinesis",
            f"{self._summary.arn}/{shard.id}",
            # A stream that is created again under the same name starts with the same ids.
            f"{self._options.group}\0{shard.first}",
            dice=self._host.dice,
            lease_ms=ms(self._times.lease),
            keep_ms=ms(self._times.keep),
        )

    def _list_soon(self) -> None:
        self._listed_s = -1e9

    # --- failures ----------------------------------------------------------------------

    async def _attempt(self, what: str, step: Callable[[], Awaitable[None]]) -> bool:
        """Run a step; return True if it worked. The next refresh tries it again."""
        failure = ""
        try:
            await step()
        except OncebridgeError as error:
            failure = str(error)
        self._log_failure(what, failure)
        return not failure

    def _log_failure(self, what: str, error: str) -> None:
        """Log the failure of a step, once, and when it is over."""
        before = self._failures.get(what, "")
        self._failures[what] = error
        fields = {"stream": self._stream.name, "what": what}
        if error and not before:
            _log.warning("oncebridge.kinesis_waits", extra={**fields, "error": error})
        elif before and not error:
            _log.warning("oncebridge.kinesis_goes_on", extra=fields)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
