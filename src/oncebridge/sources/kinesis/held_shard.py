"""
One shard, for as long as this worker holds its checkpoint.

Records go through a pump, with a lane for each partition key. The position that is saved is the
last record up to which everything is final, about every second while it moves. The claim on the
checkpoint is extended meanwhile; if another worker has taken it over, this one stops. At a stop
the position is saved and the checkpoint released, so that another worker can continue at once.
"""

import asyncio
import logging
from datetime import timedelta
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.base.clock import Clock, ms, wait_until_set
from oncebridge.engine.router import RouterAnswer
from oncebridge.errors import StoreError
from oncebridge.events.event import Unreadable
from oncebridge.sources.api import Host
from oncebridge.sources.checkpoint import Checkpoint, CheckpointTaken
from oncebridge.sources.kinesis.shard_feed import ShardFeed
from oncebridge.sources.kinesis.shards import END, ShardProgress
from oncebridge.sources.kinesis.stream import KinesisRecord, RecordPage, Shard
from oncebridge.sources.pump import Pump, SourceRecord

_log = logging.getLogger("oncebridge")

_MOST_BYTES: Final = 16 * 1024 * 1024
"""Unfinished records, plus one page; a worker may hold many shards."""
_REFRESH_MS: Final = 60_000
_WARN_EVERY_MS: Final = 600_000
_LEAVE_TRIES: Final = 3
_AGGREGATED: Final = b"\xf3\x89\x9a\xc2"
_IS_AGGREGATED: Final = (
    "several records were aggregated into one by the Kinesis Producer Library; "
    "turn its aggregation off (AggregationEnabled = false)"
)

_Place = tuple[str, int]
"""The sequence number of a record, and when it arrived at Kinesis."""


class KinesisTimings(Struct, frozen=True):
    """Intervals and timeouts; tests use shorter ones."""

    lease: timedelta = timedelta(seconds=20)
    save: timedelta = timedelta(seconds=1)
    look: timedelta = timedelta(seconds=5)
    gone: timedelta = timedelta(seconds=20)
    """A worker whose entry is older has no share any more."""
    list: timedelta = timedelta(seconds=30)
    keep: timedelta = timedelta(days=400)
    """A stream keeps records for up to 365 days; a checkpoint has to last longer."""


class HeldShard:
    """
    Reads *shard* from *feed*, from the position *taken* that *checkpoint* had.

    *clock* returns the time at Kinesis, which keeps records for *retention*.
    """

    def __init__(
        self,
        shard: Shard,
        host: Host,
        *,
        feed: ShardFeed,
        checkpoint: Checkpoint,
        taken: ShardProgress,
        worker: str,
        clock: Clock,
        retention: timedelta,
        times: KinesisTimings,
        stream: str,
    ) -> None:
        self.behind_ms = 0
        """The age of the oldest record that is not read yet."""
        self.is_ended = False
        """True if the shard is read to its end, and the checkpoint says so."""
        self._host = host
        self._feed = feed
        self._checkpoint = checkpoint
        self._place = replace(taken, by=worker)
        self._clock = clock
        self._retention_ms = ms(retention)
        self._times = times
        self._fields: dict[str, str | int] = {"stream": stream, "shard": shard.id}
        self._taken = int(taken.number or -1)
        self._at_end = False
        self._is_lost = False
        self._over = asyncio.Event()
        self._held_until_s = self._now() + times.lease.total_seconds()
        self._warned_ms = 0
        self._pump = Pump(
            host.router,
            self._on_answer,
            in_order=True,
            unwraps=True,
            batch=host.batch,
            most_in_hand=4 * host.batch,
            most_bytes=_MOST_BYTES,
        )

    def stop(self) -> None:
        """Read nothing more; `run` ends when the records in progress are final."""
        self._pump.stop()

    async def run(self) -> None:
        """Read until the end of the shard, until `stop`, or until another worker takes it over."""
        self._warn_if_records_expired()
        keeping = asyncio.create_task(self._keep_checkpoint())
        # If the checkpoint is not kept any more, nothing more is read.
        keeping.add_done_callback(lambda _: self._pump.stop())
        try:
            await self._pump.run(self._take)
        finally:
            self._feed.close()
            self._over.set()
            await keeping
        # Not after a cancellation: then the lease ends by itself.
        await self._release_checkpoint()

    # --- reading -----------------------------------------------------------------------

    async def _take(self) -> list[SourceRecord[_Place]] | None:
        if self._at_end:
            return None
        await self._wait_for_lease()
        page = await self._feed.page()
        self._record_progress(page)
        self._at_end = page.next is None
        return [item for record in page.records if (item := self._take_record(record))]

    async def _wait_for_lease(self) -> None:
        """Wait while the lease may be over: the store is unavailable, and so are the routes."""
        while self._now() >= self._held_until_s:  # noqa: ASYNC110 - it is time that has to pass
            await asyncio.sleep(self._times.save.total_seconds())

    def _record_progress(self, page: RecordPage) -> None:
        self.behind_ms = page.behind_ms
        now_ms = self._clock()
        if not page.behind_ms and not page.records and not self._pump.untold:
            self._place = replace(self._place, at_ms=now_ms)
        if page.behind_ms > self._retention_ms / 2 and now_ms - self._warned_ms > _WARN_EVERY_MS:
            self._warned_ms = now_ms
            behind = {"behind_s": page.behind_ms // 1000, "kept_s": self._retention_ms // 1000}
            _log.warning("oncebridge.shard_is_far_behind", extra={**self._fields, **behind})

    def _take_record(self, record: KinesisRecord) -> SourceRecord[_Place] | None:
        """Return a record, or None if it was read before; numbers are compared as numbers."""
        number = int(record.sequence_number)
        if number <= self._taken:
            return None
        self._taken = number
        raw: bytes | Unreadable = record.data
        if record.data.startswith(_AGGREGATED):
            raw = Unreadable(record.data, "not-json", _IS_AGGREGATED)
        place = (record.sequence_number, record.arrived_ms)
        return SourceRecord(place, raw, record.partition_key)

    def _on_answer(self, place: _Place, answer: RouterAnswer) -> None:
        if answer.acknowledge:
            number, at_ms = place
            self._place = replace(self._place, number=number, at_ms=at_ms)

    # --- the checkpoint ----------------------------------------------------------------

    async def _keep_checkpoint(self) -> None:
        """Save the position and extend the claim, until `run` ends."""
        lease_s, save_s = self._times.lease.total_seconds(), self._times.save.total_seconds()
        saved, held_s = self._place, self._now()
        while not await wait_until_set(self._over, save_s):
            place, began_s = self._place, self._now()
            try:
                if place.number != saved.number or place.at_ms - saved.at_ms >= _REFRESH_MS:
                    await self._checkpoint.save(place.write())
                    saved = place
                elif began_s - held_s >= lease_s / 3:
                    await self._checkpoint.extend()
                else:
                    continue
            except StoreError:
                continue  # the lease lasts a while, and events that are read twice are duplicates
            except CheckpointTaken:
                _log.warning("oncebridge.shard_taken_by_another", extra=self._fields)
                self._is_lost = True
                self._pump.stop()
                return
            held_s = began_s
            self._held_until_s = began_s + lease_s

    async def _release_checkpoint(self) -> None:
        """Save the position and release the checkpoint."""
        if self._is_lost:
            return
        is_through = self._pump.is_through
        place = END if is_through else replace(self._place, by="")
        for tries_left in reversed(range(_LEAVE_TRIES)):
            try:
                await self._checkpoint.release(place.write())
            except CheckpointTaken:
                return
            except StoreError as error:
                if not tries_left:
                    # Another worker reads some events again, and finds duplicates.
                    fields = {**self._fields, "error": str(error)}
                    _log.warning("oncebridge.place_not_saved", extra=fields)
                    return
                await asyncio.sleep(self._times.save.total_seconds())
            else:
                self.is_ended = is_through
                what = "oncebridge.shard_ended" if is_through else "oncebridge.shard_given_back"
                _log.info(what, extra=self._fields)
                return

    def _warn_if_records_expired(self) -> None:
        """Log an error if the shard was not read for longer than Kinesis keeps records."""
        away_ms = self._clock() - self._place.at_ms
        if self._place.at_ms and away_ms > self._retention_ms:
            away = {"away_s": away_ms // 1000, "kept_s": self._retention_ms // 1000}
            _log.error("oncebridge.records_may_be_lost", extra={**self._fields, **away})

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
