"""
Events from a Kinesis stream, shared by any number of workers.

**What is checkpointed when:** for each shard, the last record before which everything is final
(delivered, a duplicate, in the dead letters), about every second while it moves and at a stop.
Nothing that failed is ever passed over: it is tried again in place, and behind it only records
with other partition keys go on.
**Who reads what:** each shard is read by one worker at a time, who holds its checkpoint in the
store. Workers of a *group* find each other there, and each takes its share. A worker that stops
gives its shards back at once; those of one that dies are taken over when its holds end.
**What an outage does:** while the store or all sinks are away nothing is read; while Kinesis is
away, it is asked again. Records stay in the stream for as long as it keeps them.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar

from msgspec import Struct

from oncebridge.aws.client import AwsError, NotSent, Unclear
from oncebridge.aws.options import AwsOptions
from oncebridge.base.clock import ms, wait_until_set
from oncebridge.base.durations import format_duration
from oncebridge.base.options import Doc
from oncebridge.errors import ConfigError, OncebridgeError, StoreError
from oncebridge.sources.api import Host
from oncebridge.sources.checkpoint import Checkpoint, Taken, look
from oncebridge.sources.kinesis.fan_out import Consumer, Pushed, registered
from oncebridge.sources.kinesis.held_shard import HeldShard, Times
from oncebridge.sources.kinesis.roster import Roster, share
from oncebridge.sources.kinesis.shard_feed import Feed, Pauses, Polled
from oncebridge.sources.kinesis.shards import Place, choose, due, is_free, surplus
from oncebridge.sources.kinesis.stream import Position, Shard, Stream, Summary, start_of

_T = TypeVar("_T")

_log = logging.getLogger("oncebridge")

_ASIDE_S: Final = 10.0
"""So long a shard is left alone whose reading ended in an error of our own."""
_MINUTE_MS: Final = 60_000


class KinesisOptions(AwsOptions, frozen=True, kw_only=True):
    """What can be set about reading a Kinesis stream."""

    start: Annotated[
        str,
        Doc(
            "From where on a new group reads: TRIM_HORIZON (all there is), LATEST (what comes from "
            "now on) or a time, such as 2026-03-01T06:00:00Z.",
            "LATEST",
        ),
    ] = "TRIM_HORIZON"
    group: Annotated[
        str, Doc("Workers of the same group share the shards; each group reads all.", "crm")
    ] = "oncebridge"
    fan_out: Annotated[
        str | None,
        Doc("Be sent the records as this registered consumer, instead of asking.", "oncebridge"),
    ] = None
    poll: Annotated[
        timedelta,
        Doc("How often to ask for records where all have been read.", "1s", at_least=0.25),
    ] = timedelta(seconds=1)


class _Held(Struct):
    """A shard of ours, and what reads it."""

    reader: HeldShard
    task: asyncio.Task[None]
    is_leaving: bool = False

    def leave(self) -> None:
        self.is_leaving = True
        self.reader.stop()


class KinesisSource:
    """Read *stream*, together with the other workers of the group."""

    Options: ClassVar = KinesisOptions

    def __init__(
        self,
        stream: Stream,
        options: KinesisOptions | None = None,
        *,
        times: Times = Times(),  # noqa: B008 - frozen
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
        self._summary: Summary | None = None
        self._consumer: Consumer | None = None
        self._shards: list[Shard] = []
        self._ended: set[Shard] = set()
        self._held: dict[Shard, _Held] = {}
        self._aside: dict[Shard, float] = {}
        self._listed_s = self._looked_s = -1e9
        self._has_news = False
        self._stopping = asyncio.Event()
        self._woken = asyncio.Event()
        self._troubles: dict[str, str] = {}

    @classmethod
    def from_url(cls, url: str, options: KinesisOptions | None = None) -> Self:
        """Read `kinesis://STREAM`, `kinesis://STREAM?region=REGION` or `kinesis:ARN`."""
        return cls(Stream.from_url(url, options), options)

    @property
    def shards(self) -> tuple[str, ...]:
        """The shards that this worker reads now, by their ids."""
        return tuple(shard.id for shard in sorted(self._held))

    @property
    def behind_ms(self) -> int:
        """How far this worker is behind, in the shard where it is furthest."""
        return max([held.reader.behind_ms for held in self._held.values()], default=0)

    # --- the life of a source ----------------------------------------------------------

    async def open(self, host: Host) -> None:
        self._host = host
        (token,) = host.dice.tokens(1)
        self._worker = f"{socket.gethostname()}-{os.getpid()}-{token.hex()[-12:]}"
        try:
            await self._get_ready()
        except (NotSent, Unclear) as error:
            self._trouble("describe", str(error))  # it may come later than we do
        except AwsError as error:
            if not (error.retryable or error.code == "ResourceInUseException"):
                raise ConfigError("source", f"Kinesis refuses: {error}") from None
            self._trouble("describe", str(error))

    async def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._woken.clear()
                await self._look()
                pause_s = self._times.look.total_seconds()
                await wait_until_set(self._woken, pause_s * (0.9 + self._host.dice.fraction() / 5))
            await self._leave()
        finally:
            # Only where it was broken off there are any: nothing is given back then.
            tasks = [held.task for held in self._held.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        self._stopping.set()
        self._woken.set()
        for held in self._held.values():
            held.leave()

    def progress(self) -> tuple[int, int] | None:
        return None

    async def aclose(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
        await self._stream.aclose()

    async def _leave(self) -> None:
        """Finish what is under way, give all shards back, and tell the others."""
        for held in self._held.values():
            held.leave()
        await asyncio.gather(*[held.task for held in self._held.values()], return_exceptions=True)
        self._sweep()
        if self._summary is not None and self._roster.start_ms is not None:
            with suppress(StoreError, Taken):  # the others notice by themselves
                await self._roster.leave()

    # --- getting ready -----------------------------------------------------------------

    async def _get_ready(self) -> None:
        """Find out about the stream, and whether we may do what we will do."""
        if self._summary is not None:
            return
        stream, options = self._stream, self._options
        summary = await self._allowed(stream.describe(), "DescribeStreamSummary")
        shards = await self._allowed(stream.shards(), "ListShards")
        if self._start_ms is not None and self._start_ms > stream.clock.now_ms() + _MINUTE_MS:
            raise ConfigError("start", f"{options.start} lies in the future")
        if options.fan_out:
            consumer = registered(stream, summary.arn, options.fan_out)
            arn = await self._allowed(consumer, "DescribeStreamConsumer, RegisterStreamConsumer")
            self._consumer = Consumer(arn, options)
        else:
            await self._try_to_read(shards)
        self._warn_of_replays(summary.retention)
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
            if not error.is_throttling:  # others read, too
                raise

    async def _allowed(self, call: Coroutine[Any, Any, _T], action: str) -> _T:
        try:
            return await call
        except AwsError as error:
            code, name = error.code.removesuffix("Exception"), self._stream.name
            if code == "ResourceNotFound":
                message = f"there is no Kinesis stream {name} in this Region and account"
            elif code == "AccessDenied":
                message = f"AWS denies kinesis:{action} on the stream {name}: {error.message}"
            else:
                raise
            raise ConfigError("source", message) from None

    def _warn_of_replays(self, retention: timedelta) -> None:
        """Say so where the stream keeps records for longer than they are recognised."""
        windows = [gateway.settings.window for gateway in self._host.router.gateways]
        windows += [
            tier.window
            for gateway in self._host.router.gateways
            for rule in gateway.rules.rules
            for tier in rule.tiers
        ]
        if retention > min(windows):
            times = {"retention": retention, "window": min(windows)}
            told = {name: format_duration(time) for name, time in times.items()}
            fields = {"stream": self._stream.name, **told}
            _log.warning("oncebridge.stream_outlasts_window", extra=fields)

    # --- sharing -----------------------------------------------------------------------

    async def _look(self) -> None:
        """See who is there and what there is to read, and take or give back accordingly."""
        self._sweep()
        if not self._host.is_open() or not await self._try("describe", self._get_ready):
            return
        if not await self._try("roster", self._renew):
            return
        await self._try("list", self._list)
        await self._try("share", self._rebalance)

    def _sweep(self) -> None:
        """Let go of the shards whose reading is over."""
        for shard, held in list(self._held.items()):
            if not held.task.done():
                continue
            del self._held[shard]
            if held.reader.is_ended:
                self._ended.add(shard)
                self._listed_s, self._has_news = -1e9, True
            if not held.task.cancelled() and (error := held.task.exception()):
                # Its type only: the text of an exception may quote the event.
                told = {"stream": self._stream.name, "shard": shard.id}
                _log.error("oncebridge.shard_failed", extra={**told, "error": type(error).__name__})
                self._aside[shard] = self._now() + _ASIDE_S

    async def _renew(self) -> None:
        before, has_news = self._roster.news, self._has_news
        # What the group began with holds, also where the store has forgotten it.
        start_ms = self._roster.start_ms or self._start_ms
        if start_ms is None:
            clock = self._stream.clock
            start_ms = clock.now_ms() - (1000 if clock.error_ms is None else clock.error_ms)
        await self._roster.renew(start_ms, has_news=has_news)
        self._has_news = False
        if self._roster.news != before + has_news:
            self._listed_s = -1e9  # another worker came to the end of a shard

    async def _list(self) -> None:
        if self._now() - self._listed_s < self._times.list.total_seconds():
            return
        self._shards = await self._stream.shards()
        self._listed_s, self._looked_s = self._now(), -1e9
        self._ended.intersection_update(self._shards)
        for shard, held in self._held.items():
            if shard not in self._shards:  # it expired, or the stream was made anew
                held.leave()

    async def _rebalance(self) -> None:
        active = {shard: held for shard, held in self._held.items() if not held.is_leaving}
        free: list[Shard] = []
        if self._looked_s < self._listed_s or len(active) < self._share():
            free = await self._find_free()
        for shard in surplus(active, self._share()):
            self._held[shard].leave()
        wanted = self._share() - len(active)
        for shard in choose(free, max(wanted, 0), self._roster.workers, self._worker):
            if self._stopping.is_set():
                return
            await self._take(shard)

    def _share(self) -> int:
        return share(self._roster.workers, self._worker, len(due(self._shards, self._ended)))

    async def _find_free(self) -> list[Shard]:
        """Look which shards nobody reads, and which are read to their end."""
        known = self._ended | set(self._held)
        unknown = [shard for shard in self._shards if shard not in known]
        seen = await look(self._host.store, [self._checkpoint(shard) for shard in unknown])
        found = dict(zip(unknown, seen, strict=True))
        self._ended.update([shard for shard in unknown if Place.read(found[shard].place).is_end])
        self._looked_s = self._now()
        now_ms, lease_ms = self._roster.now_ms, ms(self._times.lease)
        return [
            shard
            for shard in due(self._shards, self._ended)
            if shard in found
            and is_free(found[shard], now_ms, lease_ms)
            and self._aside.get(shard, 0) <= self._now()
        ]

    async def _take(self, shard: Shard) -> None:
        checkpoint = self._checkpoint(shard)
        try:
            memo = await checkpoint.take()
        except Taken:
            return  # another was quicker
        place = Place.read(memo)
        if place.is_end:
            self._ended.add(shard)
            await checkpoint.give_back(memo)
            return
        assert self._summary is not None  # noqa: S101 - or nothing is listed
        reader = HeldShard(
            shard,
            self._host,
            feed=self._feed(shard, place.position(self._roster.start_ms or 0)),
            checkpoint=checkpoint,
            taken=place,
            worker=self._worker,
            clock=self._stream.clock.now_ms,
            retention=self._summary.retention,
            times=self._times,
            stream=self._stream.name,
        )
        task = asyncio.create_task(reader.run())
        task.add_done_callback(lambda _: self._woken.set())
        self._held[shard] = _Held(reader, task)
        _log.info("oncebridge.shard_taken", extra={"stream": self._stream.name, "shard": shard.id})

    def _feed(self, shard: Shard, position: Position) -> Feed:
        pauses = Pauses(self._stream.name, shard.id, self._host.dice, self._list_soon)
        if self._consumer is not None:
            return Pushed(self._consumer, shard.id, position, pauses=pauses)
        poll_s = self._options.poll.total_seconds()
        return Polled(self._stream, shard.id, position, poll_s=poll_s, pauses=pauses)

    def _checkpoint(self, shard: Shard) -> Checkpoint:
        assert self._summary is not None  # noqa: S101 - or nothing is listed
        return Checkpoint(
            self._host.store,
            "kinesis",
            f"{self._summary.arn}/{shard.id}",
            # A stream that is made anew under the same name begins with the same ids.
            f"{self._options.group}\0{shard.first}",
            dice=self._host.dice,
            lease_ms=ms(self._times.lease),
            keep_ms=ms(self._times.keep),
        )

    def _list_soon(self) -> None:
        self._listed_s = -1e9

    # --- what goes wrong ---------------------------------------------------------------

    async def _try(self, what: str, step: Callable[[], Awaitable[None]]) -> bool:
        """Take a step, and tell whether it worked; the next look tries it again."""
        try:
            await step()
        except OncebridgeError as error:
            self._trouble(what, str(error))
            return False
        self._trouble(what, "")
        return True

    def _trouble(self, what: str, error: str) -> None:
        """Log what is in the way of a step, once, and when it is over."""
        before = self._troubles.get(what, "")
        self._troubles[what] = error
        fields = {"stream": self._stream.name, "what": what}
        if error and not before:
            _log.warning("oncebridge.kinesis_waits", extra={**fields, "error": error})
        elif before and not error:
            _log.warning("oncebridge.kinesis_goes_on", extra=fields)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
