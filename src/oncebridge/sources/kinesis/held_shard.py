"""
One shard, for as long as this worker holds its checkpoint.

Records go through a relay, a lane for each partition key. The place that is saved is that of
the last record before which everything is final, about every second while it moves. The hold
is kept meanwhile; if another worker has taken it nevertheless, this one stops. Whoever stops
writes down how far it came and gives the hold back, so that another can go on at once.
"""

import asyncio
import logging
from collections import deque
from datetime import timedelta
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.base.clock import Clock, ms, wait_until_set
from oncebridge.engine.batch import Arrival
from oncebridge.errors import StoreError
from oncebridge.events.event import Unreadable
from oncebridge.sources.api import Host
from oncebridge.sources.checkpoint import Checkpoint, Taken
from oncebridge.sources.kinesis.shard_feed import Feed
from oncebridge.sources.kinesis.shards import END, Place
from oncebridge.sources.kinesis.stream import Page, Record, Shard
from oncebridge.sources.relay import Item, Relay

_log = logging.getLogger("oncebridge")

_MOST_BYTES: Final = 16 * 1024 * 1024
"""In hand, and a page more; a worker may hold many shards."""
_REFRESH_MS: Final = 60_000
_TELL_EVERY_MS: Final = 600_000
_LEAVE_TRIES: Final = 3
_AGGREGATED: Final = b"\xf3\x89\x9a\xc2"


class Times(Struct, frozen=True):
    """How long things last; tests have less time."""

    lease: timedelta = timedelta(seconds=20)
    save: timedelta = timedelta(seconds=1)
    look: timedelta = timedelta(seconds=5)
    gone: timedelta = timedelta(seconds=20)
    """A worker that says nothing for so long has no share any more."""
    list: timedelta = timedelta(seconds=30)
    keep: timedelta = timedelta(days=400)
    """A stream keeps records for 365 days, and a shard that is read stays read."""


class HeldShard:
    """
    Read *shard* from *feed*, from the place that *checkpoint* was *taken* at.

    *clock* tells the time at Kinesis, which keeps records for *retention*.
    """

    def __init__(
        self,
        shard: Shard,
        host: Host,
        *,
        feed: Feed,
        checkpoint: Checkpoint,
        taken: Place,
        worker: str,
        clock: Clock,
        retention: timedelta,
        times: Times,
        stream: str,
    ) -> None:
        self.shard = shard
        self.behind_ms = 0
        """How old the oldest record is that Kinesis has not given yet."""
        self.is_ended = False
        """All that was ever in it is final, and that is written down."""
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
        self._in_hand: deque[tuple[int, str, int]] = deque()
        """Of what is not passed yet: the number, as it is written, and the time of arrival."""
        self._is_lost = False
        self._over = asyncio.Event()
        self._held_until_s = self._now() + times.lease.total_seconds()
        self._told_ms = 0
        self._relay = Relay(
            host.router,
            take=self._take,
            passed=self._passed,
            batch=host.batch,
            most_in_hand=4 * host.batch,
            most_bytes=_MOST_BYTES,
        )

    def stop(self) -> None:
        """Take nothing more; `run` ends when what is under way is final."""
        self._relay.stop()

    async def run(self) -> None:
        """Read until the end of the shard, until `stop`, or until another has taken it."""
        self._warn_of_a_gap()
        keeping = asyncio.create_task(self._keep())
        # Whatever ends it, nothing is read on a hold that nobody keeps.
        keeping.add_done_callback(lambda _: self._relay.stop())
        try:
            await self._relay.run()
        finally:
            self._feed.close()
            self._over.set()
            await keeping
        # A worker that is broken off gives nothing back: its hold ends by itself.
        await self._leave()

    # --- reading -----------------------------------------------------------------------

    async def _take(self) -> list[Item]:
        while not self._at_end:
            await self._hold()
            page = await self._feed.page()
            self._note(page)
            self._at_end = page.next is None
            if items := [item for record in page.records if (item := self._new(record))]:
                return items
        return []

    async def _hold(self) -> None:
        """Read nothing on a hold that may be over: the store is away, and so are the routes."""
        while self._now() >= self._held_until_s:  # noqa: ASYNC110 - it is time that has to pass
            await asyncio.sleep(self._times.save.total_seconds())

    def _note(self, page: Page) -> None:
        self.behind_ms = page.behind_ms
        now_ms = self._clock()
        if not page.behind_ms and not page.records and not self._in_hand:
            self._place = replace(self._place, at_ms=now_ms)
        if page.behind_ms > self._retention_ms / 2 and now_ms - self._told_ms > _TELL_EVERY_MS:
            self._told_ms = now_ms
            behind = {"behind_s": page.behind_ms // 1000, "kept_s": self._retention_ms // 1000}
            _log.warning("oncebridge.shard_is_far_behind", extra={**self._fields, **behind})

    def _new(self, record: Record) -> Item | None:
        """Take a record, unless it was taken before; numbers are compared as numbers."""
        number = int(record.sequence_number)
        if number <= self._taken:
            return None
        self._taken = number
        self._in_hand.append((number, record.sequence_number, record.arrived_ms))
        return Item(number, self._arrivals(record), lane=record.partition_key)

    def _arrivals(self, record: Record) -> tuple[Arrival, ...]:
        if not record.data.startswith(_AGGREGATED):
            return self._host.router.unwrap(record.data)
        message = (
            "several records were packed into one by the Kinesis Producer Library; "
            "turn its aggregation off (AggregationEnabled = false)"
        )
        return (Unreadable(record.data, "not-json", message),)

    async def _passed(self, number: int) -> None:
        while self._in_hand and self._in_hand[0][0] <= number:
            _, written, at_ms = self._in_hand.popleft()
            self._place = replace(self._place, number=written, at_ms=at_ms)

    # --- the hold ----------------------------------------------------------------------

    async def _keep(self) -> None:
        """Save the place, and keep the hold, until it is over."""
        lease_s, save_s = self._times.lease.total_seconds(), self._times.save.total_seconds()
        saved, held_s = self._place, self._now()
        while not await wait_until_set(self._over, save_s):
            place, began_s = self._place, self._now()
            try:
                if place.number != saved.number or place.at_ms - saved.at_ms >= _REFRESH_MS:
                    await self._checkpoint.save(place.write())
                    saved = place
                elif began_s - held_s >= lease_s / 3:
                    await self._checkpoint.keep()
                else:
                    continue
            except StoreError:
                continue  # the lease lasts a while, and what is read twice is a duplicate
            except Taken:
                _log.warning("oncebridge.shard_taken_by_another", extra=self._fields)
                self._is_lost = True
                self._relay.stop()
                return
            held_s = began_s
            self._held_until_s = began_s + lease_s

    async def _leave(self) -> None:
        """Write down how far it came, and let others go on."""
        if self._is_lost:
            return
        is_through = self._relay.is_through
        place = END if is_through else replace(self._place, by="")
        for tries_left in reversed(range(_LEAVE_TRIES)):
            try:
                await self._checkpoint.give_back(place.write())
            except Taken:
                return
            except StoreError as error:
                if not tries_left:
                    # Another reads some of it again, and finds duplicates.
                    fields = {**self._fields, "error": str(error)}
                    _log.warning("oncebridge.place_not_saved", extra=fields)
                    return
                await asyncio.sleep(self._times.save.total_seconds())
            else:
                self.is_ended = is_through
                what = "oncebridge.shard_ended" if is_through else "oncebridge.shard_given_back"
                _log.info(what, extra=self._fields)
                return

    def _warn_of_a_gap(self) -> None:
        """Say so where nobody has read for longer than Kinesis keeps what is put."""
        away_ms = self._clock() - self._place.at_ms
        if self._place.at_ms and away_ms > self._retention_ms:
            away = {"away_s": away_ms // 1000, "kept_s": self._retention_ms // 1000}
            _log.error("oncebridge.records_may_be_lost", extra={**self._fields, **away})

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
