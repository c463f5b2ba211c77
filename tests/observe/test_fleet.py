"""What workers tell adds up: nothing is counted twice, and nothing that was told is lost."""

import asyncio
import math
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace
from tests.faults.doubles import CountingDice, FaultyStore, VirtualLoop, now_ms, virtual
from tests.servers.postgres import schema
from tests.servers.redis import prefix
from tests.size import examples

from oncebridge.base.clock import Clock, SystemDice, system_clock
from oncebridge.errors import StoreUnavailable
from oncebridge.events.key import Part, make_key
from oncebridge.observe import fleet
from oncebridge.observe.counts import LAGS, SECONDS, CallCounts, Counts, Histogram, RouteCounts
from oncebridge.observe.fleet import GONE_AFTER_MS, FleetMember, read
from oncebridge.observe.report import Report, RouteState, State
from oncebridge.stores.api import Release, Releases, Want, Wants
from oncebridge.stores.dynamodb.store import DynamoDBOptions, DynamoDBStore
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.postgres.store import PostgresOptions, PostgresStore
from oncebridge.stores.redis.store import RedisOptions, RedisStore
from oncebridge.stores.s3.store import S3Options, S3Store
from oncebridge.stores.sqlite.store import SQLiteStore
from oncebridge.testing.clock import ManualClock

LIST = make_key("", b"workers", "", "", ())
DAY_MS = 24 * 3600 * 1000


def report(name: str, arrived: int, *, history: int = 0, route: str = "", **more: Any) -> Report:
    """Tell that so many arrived, on a route of the worker's own."""
    counts = Counts({route or name: RouteCounts({"arrived": arrived})}, **more)
    return Report(State(name, "box", 1, "1.0", 5, 6, history=history), counts)


def arrived(counts: Counts) -> dict[str, int]:
    found = {name: route.books.get("arrived", 0) for name, route in counts.routes.items()}
    return {name: count for name, count in found.items() if count}


def names(view: fleet.FleetView) -> list[str]:
    return [each.state.name for each in view.reports]


class Place:
    """A store in memory, and the workers that share it, by a clock that is moved by hand."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(max_keys=10_000, clock=self.clock)

    def member(self, store: Any = None) -> FleetMember:
        return FleetMember(store or self.store, dice=CountingDice())

    async def total(self, own: Report | None = None) -> dict[str, int]:
        return arrived((await read(self.store, own)).total)

    def wait(self, ms: int = GONE_AFTER_MS) -> None:
        self.clock.advance(ms)

    def wait_for_a_look(self) -> None:
        """Let so much time go by that whoever tells next looks who is gone."""
        self.clock.advance(GONE_AFTER_MS + 10 * 60_000)


@pytest.fixture
def place() -> Place:
    return Place()


# --- adding up --------------------------------------------------------------------------------


async def test_before_anybody_has_told_anything_there_is_only_ones_own(place):
    assert (await read(place.store)).reports == []
    view = await read(place.store, report("ann", 3))
    assert names(view) == ["ann"]
    assert arrived(view.total) == {"ann": 3}
    assert view.now_ms == place.clock()


async def test_the_counts_of_workers_add_up(place):
    ann, bob = place.member(), place.member()
    await ann.write(report("ann", 3, route="crm"))
    await bob.write(report("bob", 4, route="crm"))
    await ann.write(report("ann", 5, route="crm"))
    view = await read(place.store)
    assert names(view) == ["ann", "bob"]
    assert arrived(view.total) == {"crm": 9}
    assert view.past == Counts()


async def test_ones_own_report_takes_the_place_of_what_one_wrote(place):
    await place.member().write(report("ann", 3))
    view = await read(place.store, report("ann", 8))
    assert names(view) == ["ann"]
    assert arrived(view.total) == {"ann": 8}


async def test_a_worker_that_leaves_stays_on_the_list_and_says_so(place):
    ann = place.member()
    await ann.write(report("ann", 3))
    await ann.leave(report("ann", 4))
    (told,) = (await read(place.store)).reports
    assert told.state.ended
    assert arrived(told.counts) == {"ann": 4}


async def test_one_that_leaves_at_once_has_told_what_it_counted(place):
    await place.member().leave(report("ann", 4))
    assert await place.total() == {"ann": 4}


# --- those that are gone ----------------------------------------------------------------------


async def test_who_tells_nothing_for_ten_minutes_becomes_part_of_the_past(place):
    bob = place.member()
    await place.member().write(report("ann", 3, history=7))
    await bob.write(report("bob", 1))
    place.wait_for_a_look()
    await bob.write(report("bob", 2))
    view = await read(place.store)
    assert names(view) == ["bob"]
    assert arrived(view.past) == {"ann": 3}
    assert arrived(view.total) == {"ann": 3, "bob": 2}
    (gone,) = view.gone
    assert (gone.state.name, gone.state.history) == ("ann", 7)
    assert gone.counts == Counts()


async def test_who_told_lately_is_not_taken_for_gone(place):
    ann, bob = place.member(), place.member()
    await bob.write(report("bob", 1))
    for _ in range(5):
        place.wait(GONE_AFTER_MS - 1)
        await ann.write(report("ann", 3))
    place.wait(GONE_AFTER_MS - 2)
    await bob.write(report("bob", 1))
    assert names(await read(place.store)) == ["ann", "bob"]


async def test_totals_outlive_restarts(place):
    for run in range(1, 6):
        worker = place.member()
        await worker.write(report(f"ann-{run}", 10, route="crm"))
        await worker.leave(report(f"ann-{run}", 11, route="crm"))
        assert await place.total() == {"crm": 11 * run}
        place.wait_for_a_look()
    view = await read(place.store)
    assert names(view) == ["ann-5"]
    assert len(view.gone) == 4


async def test_one_that_wakes_counts_on_from_what_was_added_to_the_past(place):
    ann, bob = place.member(), place.member()
    await ann.write(report("ann", 3))
    await bob.write(report("bob", 1))
    place.wait_for_a_look()
    await bob.write(report("bob", 1))
    assert arrived((await read(place.store)).past) == {"ann": 3}
    assert await place.total(report("ann", 5)) == {"ann": 5, "bob": 1}
    await ann.write(report("ann", 7))
    view = await read(place.store)
    assert names(view) == ["ann", "bob"]
    assert view.gone == []
    assert arrived(view.reports[0].counts) == {"ann": 4}
    assert arrived(view.total) == {"ann": 7, "bob": 1}
    assert await place.total(report("ann", 9)) == {"ann": 9, "bob": 1}
    await ann.write(report("ann", 20))
    assert await place.total() == {"ann": 20, "bob": 1}


async def test_one_that_sleeps_again_and_again_is_still_counted_once(place):
    ann, bob = place.member(), place.member()
    for number in range(1, 8):
        await ann.write(report("ann", number * 10))
        place.wait_for_a_look()
        await bob.write(report("bob", number))
        assert await place.total() == {"ann": number * 10, "bob": number}
        assert await place.total(report("ann", 99)) == {"ann": 99, "bob": number}


async def test_one_that_wakes_after_it_was_forgotten_counts_on_too(place):
    ann, bob = place.member(), place.member()
    await ann.write(report("ann", 3))
    await bob.write(report("bob", 1))
    for _ in range(3):
        place.wait(DAY_MS)
        await bob.write(report("bob", 1))
    assert (await read(place.store)).gone == []
    assert len(place.store) == 2  # the list, and bob
    await ann.write(report("ann", 5))
    assert await place.total() == {"ann": 5, "bob": 1}
    assert len(place.store) == 3


async def test_only_the_latest_of_those_that_are_gone_are_known(place):
    keeper = place.member()
    for number in range(fleet.MOST_GONE + 30):
        await place.member().write(report(f"w{number:03}", 1, route="crm"))
    for _ in range(3):
        place.wait(3 * 3600 * 1000 * 4)
        await keeper.write(report("keeper", 0))
        view = await read(place.store)
        assert arrived(view.total) == {"crm": fleet.MOST_GONE + 30}
    assert len(view.gone) <= fleet.MOST_GONE
    assert len(place.store) <= fleet.MOST_GONE + 2


async def test_the_past_stays_bounded(place):
    minute = place.clock() // 60_000
    keeper = place.member()
    for worker in range(10):
        many = range(worker * 20, worker * 20 + 20)
        told = report(
            f"w{worker}",
            1,
            route="crm",
            minutes={minute - 50: {"delivered": 1}},
            topics={f"t{n}": {"arrived": n, "repeats": 0} for n in many},
            entities={f"e{n}": n for n in many},
        )
        await place.member().write(told)
    place.wait_for_a_look()
    await keeper.write(report("keeper", 0))
    past = (await read(place.store)).past
    assert arrived(past) == {"crm": 10}
    assert set(past.topics) == {f"t{n}" for n in range(150, 200)}
    assert set(past.entities) == {f"e{n}" for n in range(150, 200)}
    assert past.minutes == {}


async def test_the_list_does_not_expire_while_somebody_tells(place):
    ann, bob = place.member(), place.member()
    await bob.write(report("bob", 5))
    for _ in range(30):
        place.wait(fleet.KEPT_MS // 20)
        await ann.write(report("ann", 1))
        await place.store.purge()
        assert await place.total() == {"ann": 1, "bob": 5}


# --- what others wrote, and what is lost -------------------------------------------------------


async def write(store: Any, key: bytes, memo: bytes) -> None:
    token = b"t" * 16
    await store.claim(Wants.of([Want((Part(key),), token, b"g" * 16, 1000, DAY_MS)]))
    await store.release(Releases.of([Release(key, token, 0, DAY_MS, memo)]))


STRANGE = [
    b"\x02 of another version",
    b"\x01 cut off",
    b"\x01" + zlib.compress(msgspec.msgpack.encode({"reported_ms": "no number", "lives": 3})),
    b"\x01" + zlib.compress(b"\xa3\xff\xff\xff"),
    b"\x01" + zlib.compress(b"\x81\xa1x" + b"\x91" * 100_000),
    b'{"acts":[]}',
]


@pytest.mark.parametrize("memo", STRANGE, ids=range(len(STRANGE)))
async def test_what_another_version_wrote_is_left_out_and_left_alone(place, memo):
    ann, bob = place.member(), place.member()
    await ann.write(report("ann", 3))
    await bob.write(report("bob", 4))
    await write(place.store, fleet._key(ann._life), memo)
    assert await place.total() == {"bob": 4}
    place.wait_for_a_look()
    await bob.write(report("bob", 5))
    assert await place.total() == {"bob": 5}
    (record,) = await place.store.peek([fleet._key(ann._life)])
    assert record.memo == memo


@pytest.mark.parametrize("memo", STRANGE, ids=range(len(STRANGE)))
async def test_a_list_of_another_version_is_left_alone(place, memo):
    await write(place.store, LIST, memo)
    with pytest.raises(StoreUnavailable, match="another version's"):
        await place.member().write(report("ann", 3))
    (record,) = await place.store.peek([LIST])
    assert record.memo == memo
    assert await place.total() == {}
    assert await place.total(report("ann", 3)) == {"ann": 3}


def odd(counts: Counts, started_ms: int = 5) -> bytes:
    """Write what no worker of ours would."""
    state = State("eve", "box", 1, "9.9", started_ms, 6)
    return fleet._write(fleet._WorkerRecord(1, state, counts))


HUGE = 2**64 - 1
ODD = {
    "negative": Counts(
        {"crm": RouteCounts({"arrived": -5}, {"r": {"dead": -1}}, {"c": -1}, failed_sends=-1)},
        {"claim": CallCounts(failed=-1)},
        {28_000_000: {"delivered": -1}},
        {"t": {"arrived": -1}},
        {"e": -1},
    ),
    "more than can be": Counts(
        {"crm": RouteCounts({"arrived": HUGE}, lag=Histogram([HUGE] * 30, 1e308))},
        {"claim": CallCounts(Histogram([HUGE]), failed=HUGE)},
        {2**62: {"delivered": HUGE}},
    ),
    "places": Counts({"crm": RouteCounts(took=Histogram([1] * 900, 1.0), lag=Histogram([1], 1.0))}),
    "no sum": Counts({"crm": RouteCounts(took=Histogram([1] * 17, math.nan))}),
    "a sum below nothing": Counts({"crm": RouteCounts(took=Histogram([-1] * 17, -math.inf))}),
}


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for each in value.values() for number in numbers(each)]
    if isinstance(value, list):
        return [number for each in value for number in numbers(each)]
    return [value]


def check_sound(counts: Counts, minute: int) -> None:
    assert all(0 <= number <= 2**60 for number in numbers(msgspec.to_builtins(counts)))
    for route in counts.routes.values():
        assert len(route.took.counts) in (0, len(SECONDS) + 1)
        assert len(route.lag.counts) in (0, len(LAGS) + 1)
    assert all(n <= minute + 24 * 60 for n in counts.minutes)


@pytest.mark.parametrize("counts", ODD.values(), ids=ODD)
async def test_an_odd_report_breaks_neither_totals_nor_the_past(place, counts):
    eve, ann = place.member(), place.member()
    minute = place.clock() // 60_000
    for _ in range(3):
        await eve.write(report("eve", 0))
        await ann.write(report("ann", 3))
        await write(place.store, fleet._key(eve._life), odd(counts))
        view = await read(place.store)
        check_sound(view.total, minute)
        assert arrived(view.total)["ann"] == 3
        place.wait_for_a_look()
        await ann.write(report("ann", 3))
        view = await read(place.store)
        assert names(view) == ["ann"]
        check_sound(view.past, minute)


@pytest.mark.parametrize("started_ms", [-1, 2**62])
async def test_a_report_of_an_impossible_time_is_left_out(place, started_ms):
    eve, ann = place.member(), place.member()
    await eve.write(report("eve", 1))
    await ann.write(report("ann", 3))
    await write(place.store, fleet._key(eve._life), odd(Counts(), started_ms))
    assert names(await read(place.store)) == ["ann"]


async def test_a_sound_report_is_read_as_it_was_written(place):
    counts = Counts(
        {
            "crm": RouteCounts(
                {"arrived": 7}, {"r": {"dead": 1}}, {"c": 2}, Histogram([1] * 17, 2.5)
            )
        },
        {"claim": CallCounts(Histogram([2] * 17, 0.25), Histogram([3] * 11, 9.0), 4)},
        {place.clock() // 60_000: {"delivered": 1}},
        {"t": {"arrived": 3}},
        {"e": 2},
    )
    await place.member().write(Report(report("ann", 0).state, counts))
    assert (await read(place.store)).total == counts


async def test_when_the_list_is_lost_all_are_back_within_minutes_however_many(place):
    crowd = {f"w{n}": place.member() for n in range(60)}
    for _ in range(2):
        for name, member in crowd.items():
            await member.write(report(name, 5, route="crm"))
        place.wait(10_000)
    await place.store.forget([LIST])
    for _ in range(13):
        place.wait(10_000)
        for name, member in crowd.items():
            await member.write(report(name, 7, route="crm"))
    assert await place.total() == {"crm": 60 * 7}


async def test_whoever_leaves_after_the_list_was_lost_is_counted(place):
    ann, bob = place.member(), place.member()
    await ann.write(report("ann", 5))
    await bob.write(report("bob", 5))
    await place.store.forget([LIST])
    place.wait(10_000)
    await ann.leave(report("ann", 9))
    assert await place.total() == {"ann": 9}
    for _ in range(2):
        place.wait_for_a_look()
        await bob.write(report("bob", 6))
    assert await place.total() == {"ann": 9, "bob": 6}


async def test_the_one_that_is_left_of_many_soon_adds_up_the_others(place):
    crowd = {f"w{n}": place.member() for n in range(60)}
    for _ in range(2):
        for name, member in crowd.items():
            await member.write(report(name, 5, route="crm"))
        place.wait(10_000)
    for _ in range((GONE_AFTER_MS + 130_000) // 10_000):
        place.wait(10_000)
        await crowd["w59"].write(report("w59", 6, route="crm"))
    view = await read(place.store)
    assert names(view) == ["w59"]
    assert arrived(view.past) == {"crm": 59 * 5}


async def test_a_turn_of_another_clock_keeps_nobody_from_looking_who_is_gone(place):
    ann, bob = place.member(), place.member()
    await ann.write(report("ann", 5))
    await bob.write(report("bob", 5))
    listed = await fleet._peek_list(place.store)
    await write(place.store, LIST, fleet._write(replace(listed, searched_ms=2**62)))
    place.wait_for_a_look()
    await bob.write(report("bob", 6))
    assert names(await read(place.store)) == ["bob"]
    assert await place.total() == {"ann": 5, "bob": 6}


async def test_after_the_store_lost_everything_workers_tell_what_they_know(place):
    ann, bob = place.member(), place.member()
    await ann.write(report("ann", 3))
    await bob.write(report("bob", 4))
    place.clock.advance(20_000)
    await place.store.forget([LIST, fleet._key(ann._life), fleet._key(bob._life)])
    assert await place.total() == {}
    for _ in range(3):
        place.wait(5 * 60_000)
        await ann.write(report("ann", 5))
        await bob.write(report("bob", 6))
    assert await place.total() == {"ann": 5, "bob": 6}


async def test_a_store_that_is_away_is_told_to_whoever_asks(place):
    store = FaultyStore(place.store)
    for seam in ("claim.before", "claim.after", "release.before", "release.after"):
        store.arm(seam)
        with pytest.raises(StoreUnavailable):
            await place.member(store).write(report("ann", 3))


@virtual
async def test_an_answer_that_was_lost_counts_nothing_twice():
    inner = MemoryStore(clock=now_ms)
    store = FaultyStore(inner)
    ann = FleetMember(store, dice=CountingDice())
    for number in range(1, 7):
        store.arm("release.after" if number % 2 else "claim.after")
        with pytest.raises(StoreUnavailable):
            await ann.write(report("ann", number))
        await ann.write(report("ann", number))
        assert arrived((await read(inner)).total) == {"ann": number}
        await asyncio.sleep(10)


@virtual
async def test_many_that_begin_at_once_all_get_onto_the_list():
    store = MemoryStore(clock=now_ms)
    members = [FleetMember(store, dice=SystemDice()) for _ in range(50)]
    await asyncio.gather(*[m.write(report(f"w{n}", 1)) for n, m in enumerate(members)])
    assert sum(arrived((await read(store)).total).values()) == 50


class Far:
    """A store that takes a while, and counts how often somebody wants the list, or reads records."""

    def __init__(self) -> None:
        self.inner = MemoryStore(clock=now_ms)
        self.claims = 0
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.inner, name)

        async def passed(asked: Any) -> Any:
            await asyncio.sleep(0.004)
            if name == "claim":
                self.claims += sum(want.parts[0].key == LIST for want in asked)
            if name == "peek":
                self.reads += len(asked)
            answer = await call(asked)
            await asyncio.sleep(0.004)
            return answer

        return passed


@virtual
async def test_those_that_begin_at_once_do_not_fight_over_the_list():
    store = Far()
    left = [(f"w{n}", FleetMember(store, dice=SystemDice())) for n in range(300)]
    for _ in range(2):
        tells = [member.write(report(name, 1, route="crm")) for name, member in left]
        ends = await asyncio.gather(*tells, return_exceptions=True)
        left = [each for each, end in zip(left, ends, strict=True) if end is not None]
        assert all(end is None or isinstance(end, StoreUnavailable) for end in ends)
        assert len(left) < 15
    assert left == []
    assert arrived((await read(store.inner)).total) == {"crm": 300}
    assert store.claims < 300 * 7


@virtual
async def test_one_that_begins_alone_is_seen_at_once():
    store, began = Far(), asyncio.get_running_loop().time()
    await FleetMember(store, dice=SystemDice()).write(report("ann", 1))
    assert asyncio.get_running_loop().time() - began < 0.1
    assert arrived((await read(store.inner)).total) == {"ann": 1}


@virtual
async def test_however_many_there_are_the_list_is_written_once_a_minute():
    store = Far()
    crowd = {f"w{n}": FleetMember(store, dice=SystemDice()) for n in range(60)}
    for at in range(60):
        if at == 30:
            store.claims = store.reads = 0
        await asyncio.gather(*[m.write(report(name, at)) for name, m in crowd.items()])
        await asyncio.sleep(10)
    # In five minutes: some turns, in each of which all records are read, and a look by each
    # worker every one or two minutes. Those that tell at the same time may want the same turn.
    assert store.claims <= 80
    assert store.reads <= 6 * 60 + 60 * 6


async def test_one_that_was_held_up_on_its_way_onto_the_list_does_not_get_there_again(place):
    """It was listed, and taken for gone, and hears at last that its hold was another's."""
    ann, bob = Worker("ann", place.store), place.member()
    await bob.write(report("bob", 1))
    ann.counted = 3
    ann.wire.arm("twice, held up back", after=3)
    telling = asyncio.create_task(ann.write("write"))
    await ann.wire.held_up.wait()
    assert await place.total() == {"ann": 3, "bob": 1}
    place.wait_for_a_look()
    await bob.write(report("bob", 1))
    assert names(await read(place.store)) == ["bob"]
    ann.wire.go_on()
    await telling
    assert await place.total() == {"ann": 3, "bob": 1}


# --- size -------------------------------------------------------------------------------------


async def test_a_report_is_small(place):
    """Three routes with ten rules each, where everything has been counted."""
    full = Histogram([123_456] * 17, 12345.678)
    verdicts = dict.fromkeys(("delivered", "duplicate", "conflict", "dead"), 1_234_567)
    route = RouteCounts(
        {f"some count {n}": 1_000_000 + n for n in range(22)},
        {f"conversation-events-{n}": dict(verdicts) for n in range(10)},
        {f"cause-{n}": 12345 + n for n in range(8)},
        *(full, full, full, full),
    )
    minutes = {28_000_000 + n: dict.fromkeys(verdicts, 900 + n) for n in range(60)}
    topics = {f"v2.detail.events.conversation.{{id}}.{n}": {"arrived": n * 997} for n in range(20)}
    entities = {f"{n * 7919:08x}-0b1c-4d2e-8f3a-{n * 104729:012x}": n for n in range(20)}
    counts = Counts({f"route-{n}": route for n in range(3)}, {}, minutes, topics, entities)
    routes = {f"route-{n}": RouteState("https://crm.example.com/hooks") for n in range(3)}
    ann = place.member()
    await ann.write(Report(State("ann", "box", 1, "1.0", 5, 6, routes=routes), counts))
    (record,) = await place.store.peek([fleet._key(ann._life)])
    assert len(record.memo) < 16_000


# --- every store ------------------------------------------------------------------------------


def opener(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Clock], Any]:
    """Make what opens the same place again and again."""
    get = request.getfixturevalue
    # The patience is for emulators on a machine that has other things to do.
    patience = {"timeout": timedelta(seconds=60), "connect_timeout": timedelta(seconds=60)}
    match kind:
        case "sqlite":
            return lambda clock: SQLiteStore(tmp_path / "records.db", clock=clock)
        case "redis" | "redis-cluster":
            url = get("redis_server" if kind == "redis" else "redis_cluster_of_one").url
            redis = RedisOptions(prefix=prefix())
            return lambda clock: RedisStore(url, redis, clock=clock)
        case "postgres":
            url, postgres = get("postgres").url, PostgresOptions(schema=schema(), auto_migrate=True)
            return lambda clock: PostgresStore(url, postgres, clock=clock)
        case "s3":
            server = get("s3_server")
            server.show_to(get("monkeypatch"))
            bucket, s3 = server.bucket(), S3Options(endpoint=server.endpoint, **patience)
            return lambda clock: S3Store(bucket, "records", s3, clock=clock)
        case _:
            server = get(kind)
            table, dynamodb = server.table(), DynamoDBOptions(endpoint=server.endpoint, **patience)
            return lambda clock: DynamoDBStore(table, dynamodb, clock=clock)


@pytest.mark.parametrize(
    "kind", ["sqlite", "redis", "redis-cluster", "postgres", "ministack", "dynoxide", "s3"]
)
async def test_on_every_store_workers_add_up_and_restarts_keep_the_totals(kind, request, tmp_path):
    clock = ManualClock(system_clock())
    opened = opener(kind, request, tmp_path)
    async with opened(clock) as one, opened(clock) as other:
        ann, bob = FleetMember(one, dice=SystemDice()), FleetMember(other, dice=SystemDice())
        for number in (1, 2):
            await asyncio.gather(
                ann.write(report("ann", number, route="crm")),
                bob.write(report("bob", number * 10, route="crm")),
            )
        assert arrived((await read(one)).total) == {"crm": 22}
        await ann.leave(report("ann", 3, route="crm"))
    async with opened(clock) as one, opened(clock) as other:
        assert arrived((await read(one)).total) == {"crm": 23}
        cy = FleetMember(one, dice=SystemDice())
        await cy.write(report("cy", 100, route="crm"))
        clock.advance(2 * GONE_AFTER_MS)
        await cy.write(report("cy", 200, route="crm"))
        view = await read(other)
        assert names(view) == ["cy"]
        assert [gone.state.name for gone in view.gone] == ["ann", "bob"]
        assert arrived(view.past) == {"crm": 23}
        assert arrived(view.total) == {"crm": 223}


# --- anything may happen ----------------------------------------------------------------------


class Wire:
    """
    One worker's way to the store.

    A call can be lost on the way there or back, or held up there until `go_on`; or it arrives
    twice, as when whoever carries it has no answer and sends it again.
    """

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._gate = asyncio.Event()
        self.left = -1
        self.seam = ""
        self.held_up = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        async def passed(*args: Any) -> Any:
            self.left -= 1
            is_now = self.left == -1 and self.seam
            if is_now:
                await self._pass("there")
            answer = await call(*args)
            if is_now:
                await self._pass("back")
                if self.seam.startswith("twice"):
                    answer = await call(*args)
            return answer

        return passed

    def arm(self, seam: str, after: int) -> None:
        self.seam, self.left = seam, after

    async def _pass(self, way: str) -> None:
        if self.seam == f"lost {way}":
            raise StoreUnavailable("no answer")
        if self.seam.endswith(f"held up {way}"):
            self.held_up.set()
            await self._gate.wait()

    def go_on(self) -> None:
        self._gate.set()
        self._gate = asyncio.Event()
        self.held_up.clear()


class Worker:
    """A process that counts, and what is known of what it has told."""

    def __init__(self, name: str, store: MemoryStore) -> None:
        self.name = name
        self.wire = Wire(store)
        self.member = FleetMember(self.wire, dice=CountingDice())
        self.counted = 0
        self.least = 0
        """What it has told, and heard that it was taken."""
        self.most = 0
        """What it has tried to tell."""
        self.telling: asyncio.Task[None] | None = None

    def report(self) -> Report:
        return report(self.name, self.counted)

    async def write(self, how: str) -> None:
        counted = self.most = self.counted
        await getattr(self.member, how)(self.report())
        self.least = counted


HELD_UP = ["held up there", "held up back", "twice, held up back"]
SEAMS = ["", "lost there", "lost back", "twice", *HELD_UP]
_which = st.integers(0, 3)
_calls = st.integers(0, 14)
_waits = st.sampled_from([0, 3000, 2 * GONE_AFTER_MS])


class FleetMachine(RuleBasedStateMachine):
    """Workers count, tell, freeze anywhere in between, wake, die, and take each other for gone."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.skew_ms = 0
        self.store = MemoryStore(clock=lambda: now_ms() + self.skew_ms)
        self.alive: list[Worker] = []
        self.dead: list[Worker] = []
        self.do(self._start())

    def do(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        self.do(self._cancel(*self.alive))
        self.loop.close()

    async def _cancel(self, *workers: Worker) -> None:
        for worker in workers:
            if worker.telling is not None:
                worker.telling.cancel()
                with suppress(asyncio.CancelledError, StoreUnavailable):
                    await worker.telling
                worker.telling = None
                worker.wire.go_on()

    async def _start(self) -> None:
        self.alive.append(Worker(f"w{len(self.alive) + len(self.dead)}", self.store))

    def pick(self, which: int) -> Worker:
        return self.alive[which % len(self.alive)]

    @precondition(lambda self: len(self.alive) < 4)
    @rule()
    def start(self) -> None:
        self.do(self._start())

    @rule(which=_which, count=st.integers(1, 5), how=st.sampled_from(["write", "leave"]))
    def count_and_tell(self, which: int, count: int, how: str) -> None:
        self.pick(which).counted += count
        self.write(which, "", 0, how)

    @rule(which=_which, seam=st.sampled_from(SEAMS), after=_calls)
    def tell_with_trouble(self, which: int, seam: str, after: int) -> None:
        self.pick(which).counted += 1
        self.write(which, seam, after)

    @rule(which=_which, seam=st.sampled_from(["", "", *SEAMS]), after=_calls)
    def take_the_others_for_gone(self, which: int, seam: str, after: int) -> None:
        self.skew_ms += 2 * GONE_AFTER_MS
        self.write(which, seam, after)

    @rule(
        which=_which,
        other=_which,
        seam=st.sampled_from(HELD_UP),
        after=_calls,
        waits=st.tuples(_waits, _waits),
    )
    def tell_while_another_is_held_up(
        self, which: int, other: int, seam: str, after: int, waits: tuple[int, int]
    ) -> None:
        self.skew_ms += waits[0]
        self.tell_with_trouble(which, seam, after)
        self.skew_ms += waits[1]
        self.count_and_tell(other, 1, "write")
        self.go_on(which)

    def write(self, which: int, seam: str, after: int, how: str = "write") -> None:
        worker = self.pick(which)
        if worker.telling is None:
            worker.wire.arm(seam, after)
            self.do(self._tell(worker, how))

    async def _tell(self, worker: Worker, how: str) -> None:
        worker.telling = asyncio.create_task(worker.write(how))
        await self._see(worker)

    async def _see(self, worker: Worker) -> None:
        """Wait until it has told, or is held up."""
        assert worker.telling is not None
        seam = worker.wire.seam
        held_up = asyncio.create_task(worker.wire.held_up.wait())
        await asyncio.wait([worker.telling, held_up], return_when=asyncio.FIRST_COMPLETED)
        held_up.cancel()
        if worker.telling.done():
            try:
                await worker.telling
            except StoreUnavailable:
                assert seam.startswith("lost")
            worker.telling = None

    @rule(which=_which)
    def go_on(self, which: int) -> None:
        worker = self.pick(which)
        if worker.telling is not None:
            worker.wire.go_on()
            self.do(self._see(worker))

    @rule(which=_which)
    def give_up(self, which: int) -> None:
        """Whoever waited for it to be told has no more time."""
        self.do(self._cancel(self.pick(which)))

    @precondition(lambda self: len(self.alive) > 1)
    @rule(which=_which)
    def die(self, which: int) -> None:
        worker = self.alive.pop(which % len(self.alive))
        self.do(self._cancel(worker))
        self.dead.append(worker)

    @rule(ms=st.sampled_from([10, 1000, 3000, 100_000, GONE_AFTER_MS]))
    def wait(self, ms: int) -> None:
        self.skew_ms += ms

    @invariant()
    def all_that_was_told_is_counted_once(self) -> None:
        total = arrived(self.do(read(self.store)).total)
        for worker in [*self.alive, *self.dead]:
            assert worker.least <= total.get(worker.name, 0) <= worker.most

    @invariant()
    def whoever_looks_sees_all_of_its_own(self) -> None:
        for worker in self.alive:
            total = arrived(self.do(read(self.store, worker.report())).total)
            assert total.get(worker.name, 0) == worker.counted


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(
    max_examples=examples(120), stateful_step_count=40, deadline=None
)
