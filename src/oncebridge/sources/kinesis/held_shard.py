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

from oncebridge.base.clock import ms
from oncebridge.engine.router import RouterAnswer
from oncebridge.errors import StoreError
from oncebridge.events.event import Unreadable
from oncebridge.sources.api import Host
from oncebridge.sources.checkpoint import Checkpoint, CheckpointTaken
from oncebridge.sources.kinesis.shard_feed import ShardFeed
from oncebridge.sources.kinesis.shards import END, ShardProgress
from oncebridge.sources.kinesis.stream import KinesisRecord, RecordPage
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

_Place = tuple[str, int]  # the sequence number of a record, and when it arrived at Kinesis


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
    Reads a shard from *feed*, from the position *taken* that *checkpoint* had.

    Kinesis keeps its records for *retention*.
    """

    def __init__(
        self,
        feed: ShardFeed,
        host: Host,
        *,
        checkpoint: Checkpoint,
        taken: ShardProgress,
        retention: timedelta,
        times: KinesisTimings,
    ) -> None:
        self.is_ended = False
        """True if the shard is read to its end, and the checkpoint says so."""
        self.is_leaving = False
        self.task: asyncio.Task[None]
        """Runs `run`."""
        self._feed = feed
        self._checkpoint = checkpoint
        self._place = taken
        self._clock = feed.stream.clock.now_ms
        self._retention_ms = ms(retention)
        self._times = times
        self._taken = int(taken.number or -1)
        self._at_end = False
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

    def leave(self) -> None:
        """Read nothing more; `run` ends when the records in progress are final."""
        self.is_leaving = True
        self._pump.stop()

    async def run(self) -> None:
        """Read until the end of the shard, until `stop`, or until another worker takes it over."""
        self._warn_if_records_expired()
        save_s, over = self._times.save.total_seconds(), asyncio.Event()
        place = lambda: self._place.write()  # noqa: E731, PLW0108 - `_place` is replaced
        keeping = asyncio.create_task(self._checkpoint.keep(place, over, every_s=save_s))
        keeping.add_done_callback(self._on_not_kept)
        try:
            await self._pump.run(self._take)
        finally:
            self._feed.close()
            over.set()
            (failure,) = await asyncio.gather(keeping, return_exceptions=True)
        # Not after a cancellation: then the lease ends by itself.
        if failure is None:
            await self._release_checkpoint()
        elif not isinstance(failure, CheckpointTaken):
            raise failure

    def _on_not_kept(self, keeping: asyncio.Task[None]) -> None:
        """Read nothing more: the checkpoint is not kept any more."""
        self._pump.stop()
        if not keeping.cancelled() and isinstance(keeping.exception(), CheckpointTaken):
            _log.warning("oncebridge.shard_taken_by_another", extra=self._feed.fields)

    # --- reading -----------------------------------------------------------------------

    async def _take(self) -> list[SourceRecord[_Place]] | None:
        if self._at_end:
            return None
        # While the lease may be over, the store is unavailable, and so are the routes.
        now_s = asyncio.get_running_loop().time
        while now_s() >= self._checkpoint.held_until_s:  # noqa: ASYNC110 - time has to pass
            await asyncio.sleep(self._times.save.total_seconds())
        page = await self._feed.page()
        self._record_progress(page)
        self._at_end = not page.next
        return [item for record in page.records if (item := self._take_record(record))]

    def _record_progress(self, page: RecordPage) -> None:
        now_ms = self._clock()
        is_idle = not page.behind_ms and not page.records and not self._pump.untold
        if is_idle and now_ms - self._place.at_ms >= _REFRESH_MS:
            self._place = replace(self._place, at_ms=now_ms)
        if page.behind_ms > self._retention_ms / 2 and now_ms - self._warned_ms > _WARN_EVERY_MS:
            self._warned_ms = now_ms
            behind = {"behind_s": page.behind_ms // 1000, "kept_s": self._retention_ms // 1000}
            _log.warning("oncebridge.shard_is_far_behind", extra={**self._feed.fields, **behind})

    def _take_record(self, record: KinesisRecord) -> SourceRecord[_Place] | None:
        """Return a record, or None if it was read before; numbers are compared as numbers."""
        number = int(record.sequence_number)
        if number <= self._taken:
            return None
        self._taken = number
        raw: bytes | Unreadable = record.data
        if record.data.startswith(_AGGREGATED):
            raw = Unreadable(record.data, "not-json", _IS_AGGREGATED)
        place = (record.sequence_number, round(record.approximate_arrival_timestamp * 1000))
        return SourceRecord(place, raw, record.partition_key)

    def _on_answer(self, place: _Place, answer: RouterAnswer) -> None:
        if answer.acknowledge:
            number, at_ms = place
            self._place = replace(self._place, number=number, at_ms=at_ms)

    # --- the checkpoint ----------------------------------------------------------------

    async def _release_checkpoint(self) -> None:
        """Save the position and release the checkpoint."""
        is_through = self._pump.is_through
        place = END if is_through else replace(self._place, by="")
        for tries_left in reversed(range(_LEAVE_TRIES)):
            try:
                await self._checkpoint.release(place.write())
                break
            except CheckpointTaken:
                return
            except StoreError as error:
                if not tries_left:
                    # Another worker reads some events again, and finds duplicates.
                    fields = {**self._feed.fields, "error": str(error)}
                    _log.warning("oncebridge.place_not_saved", extra=fields)
                    return
            await asyncio.sleep(self._times.save.total_seconds())
        self.is_ended = is_through
        what = "oncebridge.shard_ended" if is_through else "oncebridge.shard_given_back"
        _log.info(what, extra=self._feed.fields)

    def _warn_if_records_expired(self) -> None:
        """Log an error if the shard was not read for longer than Kinesis keeps records."""
        away_ms = self._clock() - self._place.at_ms
        if self._place.at_ms and away_ms > self._retention_ms:
            away = {"away_s": away_ms // 1000, "kept_s": self._retention_ms // 1000}
            _log.error("oncebridge.records_may_be_lost", extra={**self._feed.fields, **away})
