"""The Kinesis source on virtual time: who reads what, in which order, and what is written down."""

import asyncio
import base64
import itertools
import json
import logging
from collections import Counter
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
from tests.faults.doubles import (
    START_MS,
    After,
    CountingDice,
    FaultyStore,
    ScriptedSink,
    event,
    eventually,
    now,
    now_ms,
    virtual,
)
from tests.servers.kinesis_model import Model, Refused, modelled

from oncebridge import ConfigError, Gateway, No, Settings, StoreUnavailable, Yes
from oncebridge.aws.client import NotSent, Unclear
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.engine.router import RouteEntry, Router
from oncebridge.sources.api import Host
from oncebridge.sources.checkpoint import Checkpoint
from oncebridge.sources.kinesis import stream as stream_module
from oncebridge.sources.kinesis.held_shard import KinesisTimings
from oncebridge.sources.kinesis.shards import (
    END,
    Roster,
    ShardProgress,
    choose,
    is_free,
    readable,
    share,
    surplus,
)
from oncebridge.sources.kinesis.source import KinesisOptions, KinesisSource
from oncebridge.sources.kinesis.stream import KinesisStream, Position, Shard, start_of
from oncebridge.sources.pump import PumpInbox
from oncebridge.stores.api import Record
from oncebridge.stores.cell import Cells, Edit
from oncebridge.stores.memory import MemoryStore

STREAM = "calls"
KEYS = [f"key-{n}" for n in range(100)]
TIMES = KinesisTimings()
LEASE_S = TIMES.lease.total_seconds()
LOOK_S = TIMES.look.total_seconds()
QUICK = Settings(backoff=timedelta(milliseconds=5), max_backoff=timedelta(milliseconds=50))


class Worker:
    """One process of a group: a source, and the route that its events take."""

    def __init__(self, town, *, sink=None, store=None, settings=QUICK, **options):
        self.sink = sink or ScriptedSink()
        self.dead = MemoryDeadLetters()
        self.store = store or town.store
        self.gateway = Gateway(
            store=self.store,
            sink=self.sink,
            dead=self.dead,
            settings=settings,
            clock=now_ms,
            dice=CountingDice(),
        )
        router = Router([RouteEntry(self.gateway)])
        self.is_open = True
        self.host = Host(
            router,
            PumpInbox(router),
            self.store,
            100,
            now_ms,
            CountingDice(),
            lambda: self.is_open,
        )
        stream = modelled(town.model, STREAM, now_ms)
        self.source = KinesisSource(stream, KinesisOptions(**options), times=TIMES)
        self._running = None

    async def start(self):
        await self.source.open(self.host)
        self._running = asyncio.create_task(self.source.run())
        return self

    async def stop(self):
        """End as a process does that was told to."""
        self.source.stop()
        await self._running
        await self.source.aclose()
        await self.gateway.aclose()

    async def crash(self):
        """End without a word."""
        self.store.arm("release.before", times=1e9)
        self.store.arm("extend.before", times=1e9)
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self.store.disarm()
        await self.gateway.aclose()

    @property
    def numbers(self):
        return [json.loads(raw)["detail"]["n"] for raw in self.sink.raws]

    @property
    def shards(self):
        return self.source.shards


class Town:
    """A stream, a store, and workers that are all stopped in the end."""

    def __init__(self, shards=1):
        self.model = Model(now_ms)
        self.store = FaultyStore(MemoryStore(clock=now_ms))
        self.workers = []
        self.put_count = 0
        self.ask("CreateStream", ShardCount=shards)

    def ask(self, operation, **asked):
        return self.model.call(operation, {"StreamName": STREAM, **asked})

    def put(self, count, *keys):
        """Put events whose numbers go on from the last ones, with *keys* by turns."""
        numbers = range(self.put_count, self.put_count + count)
        self.put_count += count
        keys = keys or [f"key-{n}" for n in numbers]
        self.put_raw(
            *[
                (keys[n % len(keys)], event({"n": n, "key": keys[n % len(keys)]}, id=f"e{n}"))
                for n in numbers
            ]
        )

    def put_raw(self, *pairs):
        records = [
            {"PartitionKey": key, "Data": base64.b64encode(data).decode()} for key, data in pairs
        ]
        self.ask("PutRecords", Records=records)

    def split(self, shard=0):
        found = self.model.streams[STREAM].shards[shard_id(shard)]
        middle = (found.low + found.high) // 2 + 1
        self.ask("SplitShard", ShardToSplit=found.id, NewStartingHashKey=str(middle))

    def merge(self, one, other):
        self.ask("MergeShards", ShardToMerge=shard_id(one), AdjacentShardToMerge=shard_id(other))

    async def worker(self, **options):
        worker = Worker(self, **options)
        self.workers.append(worker)
        return await worker.start()

    def numbers(self):
        return [n for worker in self.workers for n in worker.numbers]

    async def all_delivered(self, within_s=120):
        await eventually(lambda: len(set(self.numbers())) == self.put_count, within_s)
        assert Counter(self.numbers()) == Counter(range(self.put_count)), "each of them once"

    async def at_rest(self, *workers):
        """Wait until all shards are read, each by one of *workers*."""
        count = sum(not s.is_closed for s in self.model.streams[STREAM].shards.values())
        await eventually(
            lambda: (
                sorted(s for w in workers for s in w.shards)
                == sorted({s for w in workers for s in w.shards})
                and sum(len(w.shards) for w in workers) == count
                and max(len(w.shards) for w in workers) - min(len(w.shards) for w in workers) <= 1
            ),
            120,
        )

    def checkpoints(self):
        """Give the checkpoints, in the order of the shards."""
        stream = self.model.streams[STREAM]
        return [
            Checkpoint(
                self.store,
                "kinesis",
                f"{stream.arn}/{shard.id}",
                f"oncebridge\0{shard.first}",
                dice=CountingDice(),
                lease_ms=60_000,
                keep_ms=10**9,
            )
            for shard in stream.shards.values()
        ]

    async def places(self):
        return [
            ShardProgress.read(record.memo if record is not None else b"")
            for record in await self.store.peek([one.key for one in self.checkpoints()])
        ]


@asynccontextmanager
async def town(shards=1):
    made = Town(shards)
    try:
        yield made
    finally:
        for worker in made.workers:
            if not worker._running.done():
                await worker.stop()


def shard_id(number):
    return f"shardId-{number:012d}"


def in_order(sink):
    """Tell whether what has the same key came in the order in which it was put."""
    seen = {}
    for raw in sink.raws:
        detail = json.loads(raw)["detail"]
        if seen.get(detail["key"], -1) > detail["n"]:
            return False
        seen[detail["key"]] = detail["n"]
    return True


# --- decisions ----------------------------------------------------------------------------


A, B = Shard("shardId-0", "10"), Shard("shardId-1", "11")
A1, A2 = Shard("shardId-2", "20", ("shardId-0",)), Shard("shardId-3", "21", ("shardId-0",))
AB = Shard("shardId-4", "30", ("shardId-0", "shardId-1"))


@pytest.mark.parametrize(
    ("listed", "ended", "expected"),
    [
        ([A, B], [], [A, B]),
        ([A, A1, A2], [], [A]),
        ([A, A1, A2], [A], [A1, A2]),
        ([A1, A2], [], [A1, A2]),
        ([A, B, AB], [A], [B]),
        ([A, B, AB], [A, B], [AB]),
        ([B, AB], [B], [AB]),
        ([], [], []),
    ],
)
def test_a_shard_is_due_when_its_parents_are_at_their_end_or_gone(listed, ended, expected):
    assert readable(listed, ended) == expected


@pytest.mark.parametrize("workers", range(1, 8))
@pytest.mark.parametrize("count", range(12))
def test_shares_add_up_and_differ_by_one_at_most(workers, count):
    ids = [f"w{n}" for n in range(workers)]
    shares = [share(ids, one, count) for one in ids]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1


def test_each_worker_begins_elsewhere_among_what_is_free():
    free = [Shard(f"shardId-{n}", str(n)) for n in range(6)]
    ids = ["a", "b", "c"]
    chosen = [choose(free, 2, ids, one) for one in ids]
    assert sorted(shard for some in chosen for shard in some) == free
    assert choose([], 2, ids, "b") == []
    assert choose(free, 0, ids, "b") == []


def test_what_is_beyond_the_share_is_given_back():
    assert surplus({A: 1, B: 2, A1: 3}, 1) == [B, A1]
    assert surplus({A: 1}, 5) == []


def record(memo, *, is_held, until_ms=1000):
    token = b"t" * 16 if is_held else b""
    return Record(b"key", token, b"g" * 16, until_ms, 1, b"", None, memo, 0, until_ms + 1000)


def test_a_shard_is_free_when_nobody_holds_it():
    given_back, saved = ShardProgress("7", 1).write(), ShardProgress("7", 1, "another").write()
    held = record(saved, is_held=True)
    assert not is_free(held, 999, 500)
    assert is_free(held, 1000, 500)
    assert is_free(None, 0, 500)
    assert is_free(record(given_back, is_held=False), 1000, 500)


def test_a_shard_is_not_free_while_its_worker_saves_the_place():
    saved = record(ShardProgress("7", 1, "another").write(), is_held=False)
    assert not is_free(saved, 1499, 500)
    assert is_free(saved, 1500, 500), "the worker died just then"


@pytest.mark.parametrize(
    "place", [ShardProgress(), ShardProgress("12", 34), ShardProgress("12", 34, "me"), END]
)
def test_a_place_is_read_as_it_was_written(place):
    assert ShardProgress.read(place.write()) == place
    assert ShardProgress.read(place.write()).is_end == (place is END)


@pytest.mark.parametrize("memo", [b"", b"{}", b"\xff", b'[1, "x"]'])
def test_a_place_that_cannot_be_read_is_the_beginning(memo):
    assert ShardProgress.read(memo) == ShardProgress()


@pytest.mark.parametrize(
    ("place", "start_ms", "position"),
    [
        (ShardProgress("12", 34), 99, Position(after="12")),
        (ShardProgress(), 99, Position(at_ms=99)),
        (ShardProgress("", 34), 0, Position()),
    ],
)
def test_a_shard_goes_on_where_it_was_or_begins_where_the_group_did(place, start_ms, position):
    assert place.position(start_ms) == position


def test_the_start_is_read():
    assert start_of("TRIM_HORIZON") == 0
    assert start_of("latest") is None
    assert start_of("2026-03-01T06:00:00Z") == 1_772_344_800_000
    assert start_of("2026-03-01T07:00:00+01:00") == 1_772_344_800_000
    with pytest.raises(ConfigError, match="has no time zone"):
        start_of("2026-03-01T06:00:00")
    with pytest.raises(ConfigError, match="must be TRIM_HORIZON, LATEST or a time"):
        start_of("yesterday")


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("kinesis://", "kinesis://STREAM or kinesis:ARN"),
        ("kinesis:", "kinesis://STREAM or kinesis:ARN"),
        ("kinesis://a b", "neither the name nor the ARN"),
        ("kinesis:arn:aws:sqs:eu-west-1:000000000000:calls", "neither the name nor the ARN"),
        ("kinesis://calls?reigon=x", "only [?]region=REGION may follow"),
        ("kinesis://calls/more", "only [?]region=REGION may follow"),
    ],
)
def test_an_address_that_is_none_is_told(url, wrong):
    with pytest.raises(ConfigError, match=wrong):
        KinesisSource.from_url(url)


def test_an_address_may_say_the_region():
    arn = "arn:aws:kinesis:eu-west-1:000000000000:stream/calls"
    assert KinesisStream.from_url(f"kinesis:{arn}").region == "eu-west-1"
    assert KinesisStream.from_url("kinesis://calls?region=eu-west-1").region == "eu-west-1"
    assert KinesisStream.from_url("kinesis://calls").region is None
    with pytest.raises(ConfigError, match=r"(says|has) eu-west-1"):
        KinesisStream.from_url(f"kinesis:{arn}", KinesisOptions(region="us-east-1"))


# --- the roster ---------------------------------------------------------------------------


def roster(store, worker):
    return Roster(store, "calls", worker, dice=CountingDice(), gone_ms=20_000, keep_ms=10**9)


@virtual
async def test_workers_find_each_other():
    kept = FaultyStore(MemoryStore(clock=now_ms))
    a, b = roster(kept, "a"), roster(kept, "b")
    await a.renew(0)
    await b.renew(0)
    assert b.workers == ("a", "b")
    await a.renew(0)
    assert a.workers == ("a", "b")


@virtual
async def test_who_leaves_or_is_silent_is_gone():
    kept = FaultyStore(MemoryStore(clock=now_ms))
    a, b, c = (roster(kept, name) for name in "abc")
    for one in (a, b, c):
        await one.renew(0)
    await b.leave()
    await a.renew(0)
    assert a.workers == ("a", "c")
    await asyncio.sleep(19)
    await a.renew(0)
    assert a.workers == ("a", "c")
    await asyncio.sleep(2)
    await a.renew(0)
    assert a.workers == ("a",)


@virtual
async def test_the_first_worker_decides_from_when_on_to_read():
    kept = FaultyStore(MemoryStore(clock=now_ms))
    a, b = roster(kept, "a"), roster(kept, "b")
    await a.renew(1111)
    await a.leave()
    await b.renew(2222)
    assert b.start_ms == 1111


@virtual
async def test_news_reach_the_others():
    kept = FaultyStore(MemoryStore(clock=now_ms))
    a, b = roster(kept, "a"), roster(kept, "b")
    await a.renew(0, has_news=True)
    await b.renew(0)
    before = b.news
    await a.renew(0)
    await b.renew(0)
    assert b.news == before
    await a.renew(0, has_news=True)
    await b.renew(0)
    assert b.news == before + 1


@virtual
async def test_a_roster_that_is_in_use_is_waited_for():
    kept = FaultyStore(MemoryStore(clock=now_ms))
    kept.takes_s = 0.02
    many = [roster(kept, f"w{n}") for n in range(8)]
    await asyncio.gather(*[one.renew(0) for one in many])
    await many[0].renew(0)
    assert len(many[0].workers) == 8


@virtual
async def test_a_worker_that_died_with_the_roster_in_hand_holds_it_for_a_moment_only():
    kept = FaultyStore(MemoryStore(clock=now_ms))
    a, b = roster(kept, "a"), roster(kept, "b")
    await a.renew(0)
    kept.arm("release.before")
    with pytest.raises(Exception, match="no answer"):
        await a.renew(0)
    began = now_ms()
    await b.renew(0)
    assert 5000 <= now_ms() - began < 7000
    assert b.workers == ("a", "b")


@virtual
async def test_a_renewal_without_an_answer_is_ended_by_the_next_one():
    kept = FaultyStore(MemoryStore(clock=now_ms))
    a = roster(kept, "a")
    for seam in ("claim.after", "release.before", "release.after"):
        kept.arm(seam)
        with pytest.raises(StoreUnavailable):
            await a.renew(0)
        began = now_ms()
        await a.renew(0)
        assert now_ms() == began


@virtual
async def test_a_roster_of_another_version_is_read_from_the_beginning():
    kept = FaultyStore(MemoryStore(clock=now_ms))
    a, b = roster(kept, "a"), roster(kept, "b")
    await a.renew(1111)
    await Cells(kept, CountingDice()).edit_one(a._key, Edit(lambda *_: b"strange", 10**9))
    await b.renew(2222)
    assert (b.start_ms, b.workers) == (0, ("b",))


# --- one worker ---------------------------------------------------------------------------


@virtual
async def test_all_shards_are_read_each_record_once_and_by_key_in_order():
    async with town(shards=4) as here:
        here.put(300, "a", "b", "c", "d", "e", "f", "g")
        one = await here.worker()
        await here.all_delivered()
        here.put(50, "a", "b", "c")
        await here.all_delivered()
        assert in_order(one.sink)
        assert len(one.shards) == 4


@virtual
async def test_after_a_stop_it_goes_on_without_a_gap_and_without_reading_twice():
    async with town(shards=2) as here:
        here.put(100)
        one = await here.worker()
        await here.all_delivered()
        await one.stop()
        here.put(100)
        two = await here.worker()
        await here.all_delivered()
        assert two.gateway.books.arrived == 100


@virtual
async def test_numbers_are_compared_as_numbers():
    async with town() as here:
        here.put(40, "a")
        records = here.model.streams[STREAM].shards[shard_id(0)].records
        assert {len(record["SequenceNumber"]) for record in records} == {9, 10}
        one = await here.worker()
        await here.all_delivered()
        await asyncio.sleep(3)
        assert (await here.places())[0].number == records[-1]["SequenceNumber"]
        await one.stop()
        assert (await here.places())[0] == ShardProgress(
            records[-1]["SequenceNumber"], (await here.places())[0].at_ms
        )


@virtual
async def test_the_checkpoint_never_passes_what_is_not_final():
    def fussy(delivery):
        return No("not now") if refused and b'"n": 3,' in delivery.event.raw else Yes()

    refused = True
    async with town() as here:
        here.put(20, "a", "b")
        one = await here.worker(sink=ScriptedSink(otherwise=fussy))
        await eventually(lambda: set(one.numbers) >= set(range(0, 20, 2)))
        await asyncio.sleep(10)
        assert set(one.numbers) == {*range(0, 20, 2), 1}, "the other key went on, this one waits"
        third = here.model.streams[STREAM].shards[shard_id(0)].records[2]
        assert (await here.places())[0].number == third["SequenceNumber"]
        await one.stop()
        assert (await here.places())[0].number == third["SequenceNumber"]
        refused = False
        two = await here.worker()
        await here.all_delivered()
        assert two.gateway.books.counts()["duplicate"] == 8


@virtual
async def test_nothing_is_checkpointed_before_the_first_record_is_final():
    def fussy(delivery):
        return No("not now") if b'"n": 0,' in delivery.event.raw else Yes()

    async with town() as here:
        here.put(20, *"abcdefghijklmnopqrst")
        one = await here.worker(sink=ScriptedSink(otherwise=fussy))
        await eventually(lambda: len(one.numbers) == 19)
        await asyncio.sleep(10)
        assert (await here.places())[0].number == ""
        await one.stop()
        assert (await here.places())[0].number == ""


@virtual
async def test_what_is_no_event_goes_to_the_dead_letters_and_blocks_nobody():
    async with town() as here:
        packed = b"\xf3\x89\x9a\xc2" + b"\x0a\x01a" + b"\0" * 16
        here.put_raw(("a", b"not json"), ("a", packed))
        here.put(5, "a")
        one = await here.worker()
        await here.all_delivered()
        letters = await one.dead.list()
        assert [letter.raw for letter in letters] == [b"not json", packed]
        assert "Kinesis Producer Library" in letters[1].message
        await asyncio.sleep(3)
        records = here.model.streams[STREAM].shards[shard_id(0)].records
        assert (await here.places())[0].number == records[-1]["SequenceNumber"]


@virtual
async def test_a_stop_waits_for_what_is_under_way_and_gives_it_up_to_no_one():
    async with town() as here:
        here.put(10, "a", "b", "c", "d", "e")
        one = await here.worker(sink=ScriptedSink(otherwise=After(3, Yes())))
        await eventually(lambda: one.gateway.books.in_flight)
        await one.stop()
        taken = set(one.numbers)
        assert taken
        two = await here.worker()
        await here.all_delivered()
        assert not taken & set(two.numbers)
        assert now() < 1000 + 60, "the shard was given back at once"


# --- asking ---------------------------------------------------------------------------------


def moments(model, operation="GetRecords"):
    return [at for done, _, at in model.log if done == operation]


@virtual
@pytest.mark.full
async def test_a_shard_is_asked_four_times_a_second_at_most_and_seldom_when_caught_up():
    async with town() as here:
        here.put(5000, *KEYS)
        await here.worker(poll=timedelta(seconds=2))
        await here.all_delivered()
        asked = moments(here.model)[1:]
        busy = [later - at for at, later in itertools.pairwise(asked)]
        assert min(busy) > 0.2, "a shard answers five times a second"
        before = here.model.calls["GetRecords"]
        await asyncio.sleep(60)
        assert 28 <= here.model.calls["GetRecords"] - before <= 31


@virtual
async def test_an_iterator_that_expired_is_replaced_and_nothing_is_left_out():
    async with town() as here:
        here.put(10)
        await here.worker()
        await here.all_delivered()
        here.model.expire_iterators()
        here.put(10)
        await here.all_delivered()
        iterators = [asked for done, asked, _ in here.model.log if done == "GetShardIterator"]
        assert iterators[-1]["ShardIteratorType"] == "AFTER_SEQUENCE_NUMBER"


@virtual
async def test_throttled_calls_are_repeated_with_pauses_that_grow(caplog):
    async with town() as here:
        one = await here.worker()
        await eventually(lambda: here.model.calls["GetRecords"] > 3)
        throttled = Refused("ProvisionedThroughputExceededException", "Rate exceeded")
        here.model.fail("GetRecords", *[throttled] * 6)
        first = here.model.calls["GetRecords"]
        here.put(10)
        await here.all_delivered()
        asked = moments(here.model)[first:]
        pauses = [later - at for at, later in itertools.pairwise(asked)][:6]
        assert pauses == sorted(pauses)
        assert pauses[-1] > 8
        told = [record.msg for record in caplog.records]
        assert told.count("oncebridge.shard_not_read") == 1
        assert told.count("oncebridge.shard_read_again") == 1
        assert one.shards == (shard_id(0),)


@pytest.mark.parametrize(
    "error",
    [
        NotSent("no connection"),
        Unclear("no answer"),
        Refused("AccessDeniedException", "kinesis:GetRecords"),
        Refused("InternalFailure"),
    ],
)
@virtual
async def test_whatever_goes_wrong_later_is_tried_again(error, caplog):
    caplog.set_level(logging.INFO)
    async with town() as here:
        await here.worker()
        await eventually(lambda: here.model.calls["GetRecords"] > 3)
        for operation in ("GetRecords", "ListShards"):
            here.model.fail(operation, *[error] * 4)
        here.put(10)
        await here.all_delivered()
        await asyncio.sleep(60)
        here.put(10)
        await here.all_delivered()
    assert "oncebridge.shard_not_read" in [record.msg for record in caplog.records]


@virtual
async def test_an_answer_that_takes_too_long_is_asked_for_in_smaller_pieces():
    async with town() as here:
        await here.worker()
        await eventually(lambda: here.model.calls["GetRecords"] > 3)
        here.model.fail("GetRecords", *[Unclear("no answer within 30 s")] * 3)
        here.put(10)
        await here.all_delivered()
        await asyncio.sleep(10)
        limits = [asked["Limit"] for done, asked, _ in here.model.log if done == "GetRecords"]
        assert min(limits[1:]) == 250
        assert limits[-1] == 2000


@virtual
async def test_shards_are_listed_page_by_page():
    async with town(shards=7) as here:
        here.put(100)
        page, stream_module._PAGE = stream_module._PAGE, 3
        try:
            one = await here.worker()
            await here.all_delivered()
        finally:
            stream_module._PAGE = page
        assert len(one.shards) == 7


# --- where to begin -------------------------------------------------------------------------


@virtual
async def test_latest_begins_with_what_comes_after_the_first_worker():
    async with town() as here:
        here.put(10)
        await asyncio.sleep(60)
        await here.worker(start="LATEST")
        await asyncio.sleep(5)
        here.put(10)
        await eventually(lambda: len(here.numbers()) == 10)
        await asyncio.sleep(30)
        assert sorted(here.numbers()) == list(range(10, 20))


@virtual
async def test_latest_loses_nothing_between_a_crash_and_the_first_checkpoint():
    async with town(shards=2) as here:
        await asyncio.sleep(60)
        one = await here.worker(start="LATEST")
        await eventually(lambda: len(one.shards) == 2)
        await one.crash()
        here.put(20)
        await asyncio.sleep(60)
        await here.worker(start="LATEST")
        await here.all_delivered()


@virtual
async def test_latest_stays_where_it_was_when_the_store_forgets_the_group():
    def fussy(delivery):
        return No("not now") if refused and b'"n": 0,' in delivery.event.raw else Yes()

    refused = True
    async with town() as here:
        await asyncio.sleep(60)
        one = await here.worker(sink=ScriptedSink(otherwise=fussy), start="LATEST")
        await eventually(lambda: one.shards)
        # The children wait for their parent, and nobody has begun them.
        here.put(1, "a")
        here.split()
        here.put(10)
        await asyncio.sleep(60)
        assert one.numbers == []
        here.store.inner = MemoryStore(clock=now_ms)
        await asyncio.sleep(60)
        refused = False
        await here.all_delivered()
        asked = [asked for done, asked, _ in here.model.log if done == "GetShardIterator"]
        began = [at["Timestamp"] for at in asked if at["ShardIteratorType"] == "AT_TIMESTAMP"]
        assert len(began) == 3
        assert len(set(began)) == 1


@virtual
async def test_a_time_to_begin_with():
    async with town() as here:
        here.put(10)
        await asyncio.sleep(3600)
        here.put(10)
        start = (START_MS + 1000 * 1000 + 1800 * 1000) / 1000
        await here.worker(start=datetime.fromtimestamp(start, UTC).isoformat())
        await eventually(lambda: len(here.numbers()) == 10)
        await asyncio.sleep(30)
        assert sorted(here.numbers()) == list(range(10, 20))


@virtual
async def test_the_start_counts_for_a_new_group_only():
    async with town() as here:
        here.put(10)
        one = await here.worker()
        await here.all_delivered()
        await one.stop()
        here.split()
        here.put(10)
        await asyncio.sleep(60)
        await here.worker(start="LATEST")
        await here.all_delivered()


@virtual
async def test_every_group_reads_all():
    async with town(shards=2) as here:
        here.put(20)
        one = await here.worker(group="one")
        two = await here.worker(group="two")
        await eventually(lambda: [w.gateway.books.arrived for w in (one, two)] == [20, 20])
        assert len(one.shards) == len(two.shards) == 2
        assert sorted(here.numbers()) == list(range(20)), "they share a store, and so the keys"


@virtual
async def test_a_start_in_the_future_is_refused():
    async with town() as here:
        with pytest.raises(ConfigError, match="is in the future"):
            await here.worker(start="2100-01-01T00:00:00Z")
        here.workers.clear()


# --- several workers ------------------------------------------------------------------------


@virtual
async def test_two_workers_share_and_a_third_gets_its_part():
    async with town(shards=6) as here:
        one = await here.worker()
        await here.at_rest(one)
        two = await here.worker()
        await here.at_rest(one, two)
        here.put(100)
        three = await here.worker()
        await here.at_rest(one, two, three)
        here.put(100)
        await here.all_delivered()
        assert all(worker.numbers for worker in here.workers)


@virtual
async def test_the_shards_of_one_that_stops_are_read_on_within_a_look():
    async with town(shards=4) as here:
        one, two = await here.worker(), await here.worker()
        await here.at_rest(one, two)
        await one.stop()
        stopped = now()
        await here.at_rest(two)
        assert now() - stopped < 2 * LOOK_S
        here.put(40)
        await here.all_delivered()


@virtual
async def test_the_shards_of_one_that_dies_are_taken_over_when_its_lease_ends():
    async with town(shards=4) as here:
        one, two = await here.worker(), await here.worker()
        await here.at_rest(one, two)
        here.put(100)
        await here.all_delivered()
        here.put(100)
        await one.crash()
        died = now()
        await eventually(lambda: len(two.shards) == 4)
        assert now() - died > LEASE_S / 2
        assert now() - died < LEASE_S + TIMES.gone.total_seconds() + 2 * LOOK_S
        await here.all_delivered()
        assert two.gateway.books.counts().get("duplicate", 0) <= 100, "the unsaved tail"


@virtual
async def test_one_that_was_frozen_past_its_lease_stops_reading_what_another_took():
    async with town() as here:
        one = await here.worker(store=FaultyStore(here.store.inner))
        await eventually(lambda: one.shards)
        # It cannot reach the store, and does not know that time goes by.
        for seam in ("claim.before", "release.before", "extend.before"):
            one.store.arm(seam, times=1e9)
        two = await here.worker()
        await eventually(lambda: two.shards, 120)
        one.store.disarm()
        here.put(10)
        await eventually(lambda: sorted([*one.shards, *two.shards]) == [shard_id(0)], 120)
        await here.all_delivered()


@virtual
async def test_who_learns_that_its_hold_is_anothers_stops_reading(caplog):
    async with town() as here:
        one = await here.worker(store=FaultyStore(here.store.inner))
        await eventually(lambda: one.shards)
        for operation in ("claim", "release", "extend"):
            one.store.arm(f"{operation}.before", times=1e9)
        await asyncio.sleep(LEASE_S + 1)
        (other,) = here.checkpoints()
        await other.take()
        one.store.disarm()
        await eventually(lambda: not one.shards, LEASE_S)
        assert told(caplog, "shard_taken_by_another")
        asked = here.model.calls["GetRecords"]
        await asyncio.sleep(20)
        assert here.model.calls["GetRecords"] == asked
        here.put(10)
        await other.release(b"")
        await here.all_delivered()


@virtual
async def test_who_lost_its_hold_does_not_write_its_place_over_the_next_ones(caplog):
    slow = ScriptedSink(otherwise=After(24, Yes()))
    patient = Settings(sink_timeout=timedelta(seconds=30), lease=timedelta(minutes=1))
    async with town() as here:
        one = await here.worker(sink=slow, store=FaultyStore(here.store.inner), settings=patient)
        await eventually(lambda: one.shards)
        for seam in ("extend.before", "release.before"):
            one.store.arm(seam, times=1e9)
        await asyncio.sleep(LEASE_S - 6)
        here.put(1)
        await eventually(lambda: slow.under_way)
        await asyncio.sleep(6)
        # What is under way here keeps it from its end, while another comes and goes.
        (other,) = here.checkpoints()
        await other.take()
        one.store.disarm()
        await eventually(lambda: told(caplog, "shard_taken_by_another"), 5)
        here.put(1)
        last = here.model.streams[STREAM].shards[shard_id(0)].records[-1]["SequenceNumber"]
        await other.release(ShardProgress(last, now_ms()).write())
        assert slow.under_way
        await eventually(lambda: slow.taken)
        await asyncio.sleep(60)
        assert (await here.places())[0].number == last
        assert one.numbers == [0], "the second was the other's"
        assert one.gateway.books.arrived == 1


@virtual
async def test_a_hold_is_kept_for_as_long_as_it_takes():
    async with town(shards=2) as here:
        one, two = await here.worker(), await here.worker()
        await here.at_rest(one, two)
        before = one.shards, two.shards
        for _ in range(30):
            here.put(4)
            await asyncio.sleep(20)
        assert (one.shards, two.shards) == before
        await here.all_delivered()


@virtual
async def test_a_place_is_saved_under_the_eyes_of_others_who_want_shards(caplog):
    async with town(shards=3) as here:
        here.store.takes_s = 0.2
        one = await here.worker()
        await eventually(lambda: len(one.shards) == 3)
        # More workers than shards: somebody always looks for a free one.
        others = [await here.worker() for _ in range(4)]
        for _ in range(60):
            here.put(3)
            await asyncio.sleep(1)
        await here.all_delivered()
        assert "oncebridge.shard_taken_by_another" not in [r.msg for r in caplog.records]
        assert sum(len(worker.shards) for worker in [one, *others]) == 3


# --- resharding -----------------------------------------------------------------------------


@virtual
async def test_a_parent_is_read_to_its_end_before_its_children():
    async with town() as here:
        here.put(100, "a", "b", "c", "d")
        here.split()
        here.put(100, "a", "b", "c", "d")
        one = await here.worker()
        await here.all_delivered()
        assert in_order(one.sink)
        await eventually(lambda: one.shards == (shard_id(1), shard_id(2)))
        assert (await here.places())[0] == END


@virtual
async def test_children_wait_for_a_record_of_the_parent_that_is_not_final():
    def fussy(delivery):
        return No("not now") if refused and b'"n": 0,' in delivery.event.raw else Yes()

    refused = True
    async with town() as here:
        here.put(10, "a", "b", "c")
        here.split()
        here.put(10, "a", "b", "c")
        one = await here.worker(sink=ScriptedSink(otherwise=fussy))
        await asyncio.sleep(120)
        assert not set(one.numbers) & set(range(10, 20))
        assert not (await here.places())[0].is_end
        refused = False
        await here.all_delivered()
        assert in_order(one.sink)


@virtual
async def test_merged_shards_are_both_read_first():
    async with town(shards=2) as here:
        here.put(50, "a", "b", "c", "d")
        here.merge(0, 1)
        here.put(50, "a", "b", "c", "d")
        one = await here.worker()
        await here.all_delivered()
        assert in_order(one.sink)
        await eventually(lambda: one.shards == (shard_id(2),))


@virtual
async def test_a_parent_that_is_not_listed_any_more_holds_nobody_up():
    async with town() as here:
        here.split()
        here.put(10)
        here.model.forget_shard(STREAM, shard_id(0))
        one = await here.worker()
        await here.all_delivered()
        assert one.shards == (shard_id(1), shard_id(2))


@virtual
async def test_a_split_while_two_read_is_shared_within_a_few_looks():
    async with town(shards=2) as here:
        one, two = await here.worker(), await here.worker()
        await here.at_rest(one, two)
        here.put(40, *"abcdefgh")
        here.split(0)
        here.split(1)
        here.put(40, *"abcdefgh")
        began = now()
        await eventually(lambda: len(one.shards) == len(two.shards) == 2)
        assert now() - began < 5 * LOOK_S
        await here.all_delivered()
        both = sorted(
            [json.loads(raw)["detail"] for worker in here.workers for raw in worker.sink.raws],
            key=lambda detail: detail["n"],
        )
        assert len(both) == 80


@virtual
async def test_shards_that_were_read_stay_read():
    async with town() as here:
        here.put(10)
        here.split()
        one = await here.worker()
        await eventually(lambda: one.shards == (shard_id(1), shard_id(2)))
        await one.stop()
        two = await here.worker()
        await eventually(lambda: two.shards == (shard_id(1), shard_id(2)))
        assert two.gateway.books.arrived == 0


@virtual
async def test_a_stream_that_is_made_anew_under_the_same_name_is_read_from_its_beginning():
    async with town() as here:
        here.put(10)
        one = await here.worker()
        await here.all_delivered()
        here.ask("DeleteStream")
        await asyncio.sleep(60)
        here.ask("CreateStream", ShardCount=1)
        here.put(10)
        await here.all_delivered()
        await one.stop()
        here.put(10)
        await here.worker()
        await here.all_delivered()


# --- what is told, and what is refused ------------------------------------------------------


def told(caplog, name):
    return [record for record in caplog.records if record.msg == f"oncebridge.{name}"]


@virtual
async def test_a_place_that_kinesis_does_not_know_any_more_is_told_loudly(caplog):
    async with town() as here:
        here.put(10)
        one = await here.worker()
        await here.all_delivered()
        await one.stop()
        here.put(10)
        here.model.trim(STREAM, keep=5)
        two = Worker(here)
        here.workers.append(two)
        await two.source.open(two.host)
        here.model.fail(
            "GetShardIterator", Refused("InvalidArgumentException", "StartingSequenceNumber")
        )
        two._running = asyncio.create_task(two.source.run())
        await eventually(lambda: sorted(here.numbers())[10:] == list(range(15, 20)))
        (record,) = told(caplog, "place_is_unknown_records_may_be_lost")
        assert record.levelno == logging.ERROR
        assert two.gateway.books.arrived == 5, "nothing is read twice"


@virtual
@pytest.mark.full
async def test_a_pause_longer_than_the_retention_is_told(caplog):
    async with town() as here:
        here.model.retention_hours = 1
        here.put(10)
        one = await here.worker()
        await here.all_delivered()
        await asyncio.sleep(2 * 3600)
        await one.stop()
        two = await here.worker()
        await asyncio.sleep(10)
        assert not told(caplog, "records_may_be_lost"), "it was idle, and caught up"
        await two.stop()
        await asyncio.sleep(3700)
        await here.worker()
        await asyncio.sleep(10)
        (record,) = told(caplog, "records_may_be_lost")
        assert record.levelno == logging.ERROR


@virtual
@pytest.mark.full
async def test_one_that_is_about_to_lose_records_is_told_and_not_too_often(caplog):
    async with town() as here:
        here.model.behind_ms = 13 * 3600 * 1000
        here.put(3000)
        await here.worker()
        await eventually(lambda: told(caplog, "shard_is_far_behind"))
        await here.all_delivered()
        (record,) = told(caplog, "shard_is_far_behind")
        assert (record.behind_s, record.kept_s) == (13 * 3600, 24 * 3600)


@virtual
async def test_a_stream_that_keeps_records_longer_than_the_window_is_told(caplog):
    async with town() as here:
        here.model.retention_hours = 24 * 7
        await here.worker()
        (record,) = told(caplog, "stream_outlasts_window")
        assert (record.retention, record.window) == ("7d", "6d")


@pytest.mark.parametrize(
    ("operation", "error", "expected"),
    [
        ("DescribeStreamSummary", "AccessDeniedException", "AWS denies kinesis:Describe"),
        (
            "ListShards",
            "AccessDeniedException",
            "AWS denies kinesis:ListShards on the stream calls",
        ),
        ("GetShardIterator", "AccessDeniedException", "AWS denies kinesis:GetShardIterator"),
        ("GetRecords", "AccessDeniedException", "AWS denies kinesis:GetRecords"),
        ("GetRecords", "KMSAccessDeniedException", "Kinesis refused the request: KMSAccessDenied"),
        ("DescribeStreamSummary", "ResourceNotFoundException", "Kinesis stream calls not found"),
        (
            "DescribeStreamSummary",
            "UnrecognizedClientException",
            "Kinesis refused the request: Unrecognized",
        ),
    ],
)
@virtual
@pytest.mark.full
async def test_what_a_human_must_put_right_is_told_at_the_start(operation, error, expected):
    async with town() as here:
        here.model.fail(operation, Refused(error, "told"))
        with pytest.raises(ConfigError, match=expected):
            await here.worker()
        here.workers.clear()


@pytest.mark.parametrize(
    "error",
    [
        NotSent("no connection"),
        Refused("ThrottlingException"),
        Refused("ResourceInUseException", "it is being created"),
    ],
)
@virtual
async def test_a_stream_that_is_away_at_the_start_may_come_later(error, caplog):
    async with town() as here:
        here.put(10)
        here.model.fail("DescribeStreamSummary", error, error)
        await here.worker()
        await here.all_delivered()
        assert len(told(caplog, "kinesis_waits")) == 1
        assert len(told(caplog, "kinesis_goes_on")) == 1


@virtual
async def test_others_who_read_all_the_time_are_no_reason_not_to_start():
    async with town() as here:
        here.put(10)
        here.model.fail("GetRecords", Refused("ProvisionedThroughputExceededException"))
        await here.worker()
        await here.all_delivered()


@virtual
async def test_nothing_is_read_before_the_store_is_open():
    async with town() as here:
        here.put(10)
        one = Worker(here)
        one.is_open = False
        here.workers.append(one)
        await one.start()
        at_start = here.model.calls["GetRecords"]
        await asyncio.sleep(60)
        assert here.model.calls["GetRecords"] == at_start
        one.is_open = True
        await here.all_delivered()


@virtual
async def test_nothing_is_read_while_the_store_is_away():
    async with town() as here:
        await here.worker()
        await eventually(lambda: here.model.calls["GetRecords"] > 3)
        for seam in ("claim.before", "release.before", "extend.before"):
            here.store.arm(seam, times=1e9)
        here.put(10)
        await asyncio.sleep(60)
        quiet = here.model.calls["GetRecords"]
        await asyncio.sleep(60)
        assert here.model.calls["GetRecords"] - quiet <= 1
        here.store.disarm()
        await here.all_delivered()


@virtual
async def test_an_answer_of_the_store_that_is_lost_stops_nothing():
    async with town(shards=2) as here:
        await here.worker()
        for seam in ("claim.after", "release.after", "extend.after", "claim.before"):
            for _ in range(3):
                here.put(5)
                here.store.arm(seam)
                await asyncio.sleep(4)
        await eventually(lambda: len(set(here.numbers())) == here.put_count)
