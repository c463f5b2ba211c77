"""What workers wrote is found: all of it, in order, by whoever reaches the store."""

import asyncio
import random
import time
import zlib
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.faults.doubles import FaultyStore
from tests.observe.arrivals import (
    NOW_MS,
    TOPIC,
    decision,
    event,
    everything,
    key,
    numbers,
    recorder,
    remember,
    report,
)
from tests.servers.aws import fresh
from tests.servers.postgres import schema
from tests.size import examples

from oncebridge.base.clock import system_clock
from oncebridge.engine.causes import Cause
from oncebridge.engine.memos import Memo
from oncebridge.engine.verdict import First, Verdict
from oncebridge.errors import StoreUnavailable
from oncebridge.events.key import Part
from oncebridge.observe.history import (
    HistoryPage,
    HistoryQuery,
    HistoryRow,
    RecordedArrival,
    joined,
    page_key,
    tail_key,
)
from oncebridge.observe.history_reader import HistoryReader
from oncebridge.operate.lookup import records_with_id
from oncebridge.service.addresses import StorePlace
from oncebridge.stores.api import Fate, Memories, Memory, Release, Releases, Want, Wants
from oncebridge.stores.copying import Copying
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore
from oncebridge.testing.clock import ManualClock

DAY_MS = 24 * 3600 * 1000


class Looked:
    """A store that counts what is read of it, and can be away."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.peeked: list[bytes] = []
        self.is_away = False

    async def peek(self, keys):
        if self.is_away:
            raise StoreUnavailable("away")
        self.peeked += keys
        return await self.inner.peek(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def written(store, worker: str, *decisions, **more):
    kept = recorder(store, worker, **more)
    for told in decisions:
        remember(kept, told)
    await kept.write()
    return kept


def reader(store, own=None, clock=None) -> HistoryReader:
    return HistoryReader(store, own, clock=clock or ManualClock())


# --- order and pages of a list --------------------------------------------------------------


async def test_two_workers_are_read_as_one_newest_first_and_ties_in_a_fixed_order():
    store = MemoryStore()
    times = [5, 3, 9, 3]
    one = await written(store, "a", *[decision(n, at_ms=NOW_MS + t) for n, t in enumerate(times)])
    two = await written(store, "b", *[decision(n, at_ms=NOW_MS + t) for n, t in enumerate(times)])
    found = await everything(reader(store), [report(two), report(one)])
    assert [(seen.row.at_ms - NOW_MS, seen.name) for seen in found.rows] == [
        (9, "b.3"),
        (9, "a.3"),
        (5, "b.1"),
        (5, "a.1"),
        (3, "b.4"),
        (3, "b.2"),
        (3, "a.4"),
        (3, "a.2"),
    ]
    assert (found.looked_at, found.since_ms, found.more) == (8, NOW_MS + 3, False)


@given(
    st.lists(st.lists(st.integers(0, 4), max_size=40), min_size=1, max_size=3),
    st.integers(1, 9),
    st.integers(1, 9),
)
@settings(max_examples=examples(50))
def test_page_after_page_gives_everything_once(workers, limit, rows_a_page):
    asyncio.run(_leaf_through(workers, limit, rows_a_page))


async def _leaf_through(workers, limit: int, rows_a_page: int) -> None:
    store = MemoryStore()
    of = event()
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oncebridge.observe.history_writer.MOST_ROWS", rows_a_page)
        for name, times in zip("abc", workers, strict=False):
            told = [decision(n, at_ms=NOW_MS + t, of=of) for n, t in enumerate(times)]
            kept.append(await written(store, name, *told))
    archive, reports = reader(store, kept[0]), [report(each) for each in kept]
    seen: list[RecordedArrival] = []
    before = None
    while True:
        found = await archive.search(HistoryQuery(limit=limit, before=before), reports)
        seen += found.rows
        if not found.more:
            break
        assert len(found.rows) == limit
        before = found.rows[-1].place
    places = [one.place for one in seen]
    assert places == sorted(places, reverse=True)
    expected = {
        (NOW_MS + t, w, n)
        for w, ts in zip("abc", workers, strict=False)
        for n, t in enumerate(ts, 1)
    }
    assert set(places) == expected
    assert len(places) == len(expected)


# --- what fits ------------------------------------------------------------------------------


@pytest.fixture
async def town():
    """A reader, a report, and three arrivals that differ."""
    store = MemoryStore()
    kept = recorder(store, "box.example-7-abc")
    first = First("id-1", NOW_MS - 1)
    remember(kept, decision(1))
    remember(kept, decision(2, Verdict.DUPLICATE, first=first), cause=Cause.REDELIVERY)
    other = event(3, {"id": "user-3"}, **{"detail-type": "v2.users.{id}.presence"})
    remember(kept, decision(3, Verdict.DEAD, of=other))
    await kept.write()
    return reader(store), [report(kept)]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, [3, 2, 1]),
        ({"text": " "}, [3, 2, 1]),
        ({"text": "id-2"}, [2]),
        ({"text": "  id-2 "}, [2]),
        ({"text": "id-1"}, [2, 1]),
        ({"text": "id-"}, []),
        ({"text": "conversation-1"}, [1]),
        ({"text": "user-3"}, [3]),
        ({"text": "PRESENCE"}, [3]),
        ({"text": "events.conversation"}, [2, 1]),
        ({"text": key(2).hex()}, [2]),
        ({"text": key(2).hex().upper()}, [2]),
        ({"text": key(2).hex()[:7]}, [2]),
        ({"text": f"{key(2).hex()[:10]}…"}, [2]),
        ({"text": f"{key(2).hex()[:10]}..."}, [2]),
        ({"text": key(2).hex()[:5]}, []),
        ({"text": key(2).hex() + "00"}, []),
        ({"text": "box.example-7-abc.3"}, [3]),
        ({"text": "box.example-7-abc"}, []),
        ({"verdict": "duplicate"}, [2]),
        ({"verdict": "duplicate", "text": "id-1"}, [2]),
        ({"verdict": "stale"}, []),
        ({"route": "crm"}, [3, 2, 1]),
        ({"route": "other"}, []),
        ({"cause": "redelivery"}, [2]),
        ({"topic": TOPIC}, [2, 1]),
        ({"topic": "Users"}, [3]),
        ({"topic": "users", "verdict": "delivered"}, []),
    ],
)
async def test_what_fits_is_found(town, query, expected):
    archive, reports = town
    found = await everything(archive, reports, **query)
    assert numbers(found) == expected
    assert found.looked_at == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6f1c2a10", [2, 1]),
        ("6F1C2A10-0000", [2, 1]),
        ("6f1c2a10-0000-4000-8000-00000000000", [2, 1]),
        ("6f1c2a10-0000-4000-8000-000000000001", [1]),
        ("6f1c2a10-…0001", [1]),
        ("6f1c2a10-...0002", [2]),
        ("6f1c2a10-…", [2, 1]),
        ("6f1c2a10-…0003", []),
        ("6f1c2a1", []),
        ("6f…0001", []),
        ("…4000-8000-000000000001", []),
        ("…", []),
        ("c2a10-0000", []),
    ],
)
async def test_an_id_is_found_by_its_beginning_and_as_a_list_shows_it(text, expected):
    ids = [f"6f1c2a10-0000-4000-8000-{n:012d}" for n in (1, 2)]
    ids.append("another-id-of-somebody-else")
    kept = recorder(store := MemoryStore(), "a")
    for number, id_ in enumerate(ids):
        remember(kept, decision(number, at_ms=NOW_MS + number, of=event(id=id_)))
    await kept.write()
    found = await reader(store).search(HistoryQuery(text=text), [report(kept)])
    assert numbers(found) == expected


async def test_an_arrival_is_found_by_its_name_whoever_tells_of_its_worker(town):
    archive, reports = town
    for told in (reports, []):
        seen = await archive.named("box.example-7-abc.2", told)
        assert seen is not None
        assert (seen.row.id, seen.name) == ("id-2", "box.example-7-abc.2")
    for name in ("", ".", "2", ".2", "box.example-7-abc.", "box.example-7-abc.4", "nobody.1"):
        assert await archive.named(name, reports) is None
    for name in ("box.example-7-abc.²", "box.example-7-abc.-2", f"box.example-7-abc.{'9' * 5000}"):
        assert await archive.named(name, reports) is None


async def test_all_arrivals_of_one_event_are_found_oldest_first():
    store = MemoryStore()
    one = await written(store, "a", *[decision(n % 3, at_ms=NOW_MS + n) for n in range(1000)])
    two = await written(store, "b", decision(1, at_ms=NOW_MS + 500), decision(7))
    archive, reports = reader(store, two), [report(one), report(two)]
    seen = await archive.alike(key(1), reports)
    assert len(seen) == 334
    assert [each.place for each in seen] == sorted(each.place for each in seen)
    assert {each.worker for each in seen} == {"a", "b"}
    assert [each.name for each in await archive.alike(key(7), reports)] == ["b.2"]
    assert await archive.alike(key(8), reports) == []


# --- memory and store -----------------------------------------------------------------------


async def test_own_rows_come_from_memory_and_the_store_may_be_away():
    store = Looked(MemoryStore())
    other = await written(store, "other", decision(1))
    own = recorder(store, "own")
    remember(own, decision(2))
    archive = reader(store, own)
    found = await everything(archive, [report(own), report(other)])
    assert {seen.name for seen in found.rows} == {"own.1", "other.1"}
    assert found.is_whole
    assert tail_key("own") not in store.peeked
    store.is_away = True
    found = await everything(archive, [report(own), report(other)])
    assert [seen.name for seen in found.rows] == ["own.1"]
    assert not found.is_whole
    assert await archive.alike(key(2), [report(other)]) == list(found.rows)
    with pytest.raises(StoreUnavailable):
        await everything(reader(store), [report(other)])


async def test_to_look_again_costs_little():
    store = Looked(MemoryStore())
    kept = await written(store, "a", *[decision(n) for n in range(3000)])
    archive = reader(store)
    await everything(archive, [report(kept)])
    assert len(store.peeked) == kept.pages + 1
    store.peeked.clear()
    for _ in range(3):
        found = await archive.search(HistoryQuery(), [report(kept)])
        assert found.looked_at == 3000
    pages = [name for name in store.peeked if name != tail_key("a")]
    assert set(pages) <= {page_key("a", kept.pages - 1)}
    assert len(store.peeked) <= 6
    remember(kept, decision(7))
    await kept.write()
    assert numbers(await archive.search(HistoryQuery(limit=1), [report(kept)])) == [3001]


async def test_a_worker_that_is_long_gone_is_read_only_once():
    clock = ManualClock()
    store = Looked(MemoryStore())
    gone = await written(store, "a", *[decision(n) for n in range(100)])
    archive = reader(store, clock=clock)
    clock.advance(60_001)
    for _ in range(3):
        assert len((await everything(archive, [report(gone)])).rows) == 100
    assert len(store.peeked) == 2


async def test_a_reader_follows_a_ring_that_wraps(monkeypatch):
    monkeypatch.setattr("oncebridge.observe.history_writer.MOST_ROWS", 3)
    store = MemoryStore()
    kept, archive = recorder(store), reader(store)
    stale = report(kept)
    for number in range(1, 500):
        remember(kept, decision(number))
        if number % 11 == 0:
            await kept.write()
            found = await everything(archive, [stale])
            own = [seen.row.number for seen in kept.rows()]
            assert numbers(found) == own[::-1], "also where the report is of long ago"


async def test_a_tail_that_could_not_be_written_again_tells_nothing_twice():
    store = FaultyStore(MemoryStore())
    kept = await written(store, "a", *[decision(n) for n in range(60)])
    for number in range(60):
        remember(kept, decision(number))
    store.silence("release", lambda release: release.key == tail_key("a"))
    with pytest.raises(StoreUnavailable):
        await kept.write()
    tail = HistoryPage.read((await store.peek([tail_key("a")]))[0].memo)
    page = HistoryPage.read((await store.peek([page_key("a", 0)]))[0].memo)
    assert tail is not None
    assert page is not None
    assert (tail.count, page.count) == (60, 120)
    assert numbers(await everything(reader(store), [report(kept)])) == list(range(120, 0, -1))


async def test_a_page_that_was_removed_is_not_shown_any_more():
    store = MemoryStore()
    kept = await written(store, "a", *[decision(n) for n in range(100)])
    archive = reader(store)
    assert len((await everything(archive, [report(kept)])).rows) == 100
    assert await store.forget([page_key("a", 0), tail_key("a")]) == [True, True]
    assert (await everything(archive, [report(kept)])).rows == ()


async def test_rows_of_a_restarted_worker_are_all_there():
    store = MemoryStore()
    before = await written(store, "box-1-aaa", *[decision(n) for n in range(100)])
    after = await written(store, "box-1-bbb", decision(7))
    found = await everything(reader(store, after), [report(after), report(before)])
    assert len(found.rows) == 101


async def test_what_is_past_keeping_is_not_shown():
    clock = ManualClock()
    store = Looked(MemoryStore(clock=ManualClock()))
    kept = recorder(store, "a", clock=clock, keep=timedelta(days=1))
    for hours in (0, 1, 2):
        remember(kept, decision(hours, at_ms=NOW_MS + hours * 3600_000))
    await kept.write()
    for archive in (reader(store, clock=clock), reader(store, kept, clock=clock)):
        clock.now_ms = NOW_MS + DAY_MS + 1800_000
        found = await everything(archive, [report(kept)])
        assert numbers(found) == [3, 2]
        assert (found.looked_at, found.since_ms) == (2, NOW_MS + 3600_000)
        assert await archive.alike(key(0), [report(kept)]) == []
        assert await archive.named("a.1", [report(kept)]) is None
        clock.now_ms = NOW_MS + 2 * DAY_MS
        found = await everything(archive, [report(kept)])
        assert (found.rows, found.looked_at, found.since_ms) == ((), 0, None)


async def test_a_record_that_cannot_be_read_is_passed_over():
    store = MemoryStore()
    kept = await written(store, "a", *[decision(n) for n in range(1000)])
    whole = len((await everything(reader(store), [report(kept)])).rows)
    good = HistoryPage.read((await store.peek([page_key("a", 0)]))[0].memo)
    assert good is not None
    spoilt = good.write()[:-20] + b"x" * 20
    for memo in (b"", b"rubbish", b"history1", b"history1\xff", spoilt, b'["id",5]'):
        await overwritten(store, page_key("a", 0), memo)
        found = await everything(reader(store), [report(kept)])
        assert len(found.rows) == whole - good.count
        await everything(reader(store), [report("nobody", history=10**9)])
    await overwritten(store, tail_key("a"), b"rubbish")
    assert (await everything(reader(store), [report(kept)])).rows


DEEP = b"\x91" * 200_000 + b"\x01"
"""Lists in lists, deeper than anybody can follow."""


def rows_of(*more: bytes) -> bytes:
    """Write one row that has some members more than it should."""
    row = msgspec.msgpack.encode(HistoryRow(1, NOW_MS, "crm", "dead"))
    count = int.from_bytes(row[1:3]) + len(more)
    return joined([row[:1] + count.to_bytes(2) + row[3:] + b"".join(more)])


@pytest.mark.parametrize(
    "body",
    [joined([b"\x94\x01\x01\xa2\xff\xfe\xa1a"]), rows_of(DEEP), DEEP, b"\xdd" + b"\xff" * 4],
    ids=["no utf-8", "deep beside", "deep", "more than there is"],
)
@pytest.mark.parametrize("is_zipped", [True, False])
async def test_rows_that_cannot_be_read_do_not_keep_others_from_being_found(body, is_zipped):
    store = MemoryStore()
    kept = await written(store, "good", *[decision(n) for n in range(10)])
    packed = zlib.compress(body) if is_zipped else body
    times = NOW_MS, NOW_MS, DAY_MS
    for name, number in ((page_key("bad", 0), 0), (tail_key("bad"), 1)):
        sheet = HistoryPage(number, number == 0, 1, 1, *times, 0, is_zipped, packed)
        await overwritten(store, name, sheet.write())
    archive, reports = reader(store), [report(kept), report("bad", history=1)]
    assert numbers(await everything(archive, reports)) == list(range(10, 0, -1))
    assert len(await archive.alike(key(1), reports)) == 1
    assert await archive.named("bad.1", reports) is None


def test_a_row_with_members_of_a_later_version_is_read():
    (row,) = HistoryPage(0, True, 1, 1, 0, 0, 1, 0, False, rows_of(b"\xc3", b"\x91\x01")).rows()
    assert row == HistoryRow(1, NOW_MS, "crm", "dead")


def test_a_page_that_is_nested_too_deeply_is_none():
    good = HistoryPage(0, True, 0, 0, 0, 0, 1, 0, False, b"").write()
    count = good[8] + 1
    assert HistoryPage.read(good[:8] + bytes([count]) + good[9:] + b"\x01") is not None
    assert HistoryPage.read(good[:8] + bytes([count]) + good[9:] + DEEP) is None


def test_a_page_of_an_earlier_version_is_read():
    made = msgspec.msgpack.encode([0, True, 1, 1, 5, 5, 1000, 7, False, b"x"])
    sheet = HistoryPage.read(b"history1" + made)
    assert sheet is not None
    assert (sheet.left_out, sheet.body, sheet.lost) == (7, b"x", 0)


async def overwritten(store, name: bytes, memo: bytes) -> None:
    (claim,) = await store.claim(
        Wants.of([Want((Part(name),), b"t" * 16, b"g" * 16, 9000, DAY_MS)])
    )
    await store.release(Releases.of([Release(name, claim.token, 0, DAY_MS, memo)]))


async def test_how_many_were_left_out_is_told_by_all_workers():
    clock = ManualClock()
    store = MemoryStore()
    of = event()
    told = [decision(n, of=of) for n in range(3000)]
    one = await written(store, "a", *told, mode="sample", clock=clock)
    two = await written(store, "b", *told, mode="sample", clock=clock)
    assert one.left_out > 1000
    found = await everything(reader(store, two), [report(one), report(two)])
    assert found.left_out == one.left_out + two.left_out
    assert found.looked_at == 6000 - found.left_out


async def test_how_many_were_lost_is_told_by_all_workers(monkeypatch):
    monkeypatch.setattr("oncebridge.observe.history_writer.MOST_ROWS", 2)
    store = FaultyStore(MemoryStore())
    one, two = recorder(store, "a"), recorder(store, "b")
    for kept, count in ((one, 300), (two, 400)):
        store.arm("claim.before")
        for number in range(count):
            remember(kept, decision(number))
        with pytest.raises(StoreUnavailable):
            await kept.write()
        remember(kept, decision(1))
        await kept.write()
    assert (one.lost, two.lost) == (301 - 255, 401 - 255)
    found = await everything(reader(store, two), [report(one), report(two)])
    assert (found.lost, found.looked_at) == (one.lost + two.lost, 2 * 255)
    found = await everything(reader(store), [report(one), report(two)])
    assert found.lost == one.lost + two.lost
    assert found.left_out == 0


async def test_many_workers_are_read_within_bounds(monkeypatch):
    monkeypatch.setattr("oncebridge.observe.history_writer.MOST_ROWS", 2)
    monkeypatch.setattr("oncebridge.observe.history_reader.MOST_SHEETS", 40)
    store = Looked(MemoryStore())
    workers = [await written(store, f"w{n}", *[decision(i) for i in range(40)]) for n in range(10)]
    archive = reader(store)
    found = await everything(archive, [report(worker) for worker in workers])
    assert len(store.peeked) == 10 + 40
    assert {seen.worker for seen in found.rows} == {f"w{n}" for n in range(10)}
    assert max(numbers(found)) == 40


# --- every store ----------------------------------------------------------------------------


@pytest.fixture(
    params=["sqlite", "redis", "redis-cluster", "postgres", "dynoxide", "ministack", "s3"]
)
async def place(request, tmp_path):
    """Give a store of each kind, twice: for one who writes, and one who reads."""
    kind = request.param
    server = {
        "sqlite": lambda _: None,
        "redis": lambda get: get("redis_server"),
        "redis-cluster": lambda get: get("redis_cluster_of_one"),
        "postgres": lambda get: get("postgres"),
        "dynoxide": lambda get: get("dynoxide"),
        "ministack": lambda get: get("ministack"),
        "s3": lambda get: get("s3_server"),
    }[kind](request.getfixturevalue)
    options: dict[str, Any] = {}
    match kind:
        case "sqlite":
            url = f"sqlite:{tmp_path / 'seen.db'}"
        case "redis" | "redis-cluster":
            url = server.url
        case "postgres":
            url, options = server.url, {"schema": schema(), "auto_migrate": True}
        case "s3":
            request.getfixturevalue("aws_identity")
            url = f"s3://{server.bucket()}/records?region={server.region}"
            options = {"endpoint": f"http://127.0.0.1:{server.port}", "expiry": "sweep"}
        case _:
            url = f"dynamodb://{server.table()}"
            options = {"endpoint": server.endpoint}
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(StorePlace.of(url, **options).opened) for _ in range(2)
        ]


async def test_every_store_has_it(place):
    mine, other = place
    names = [fresh("worker"), fresh("worker")]
    now_ms = system_clock()
    of = event()
    workers = [
        recorder(store, name, clock=system_clock) for store, name in zip(place, names, strict=True)
    ]
    for round_ in range(3):
        for worker in workers:
            for number in range(300):
                remember(worker, decision(number, at_ms=now_ms + round_, of=of))
            await worker.write()
    reports = [report(worker, at_ms=now_ms) for worker in workers]
    archive = HistoryReader(other, clock=system_clock)
    found = await everything(archive, reports)
    assert found.looked_at == 1800
    assert [seen.place for seen in found.rows] == sorted(
        [(now_ms + n // 300, name, n + 1) for name in names for n in range(900)], reverse=True
    )
    assert len(await archive.alike(key(7), reports)) == 6
    (record,) = await mine.peek([page_key(names[0], 0)])
    assert 10_000 < len(record.memo) < 64_000
    assert record.fate is None
    assert record.keep_until_ms <= now_ms + DAY_MS + 5000


@pytest.mark.full
async def test_every_store_takes_pages_that_cannot_be_compressed(place):
    mine, other = place
    name = fresh("worker")
    kept = recorder(mine, name, clock=system_clock)
    now_ms = system_clock()
    dice = random.Random(7)
    for _ in range(400):
        noise = {f: dice.randbytes(64).hex() for f in ("id", "source", "account", "region", "time")}
        of = event(1, {"id": dice.randbytes(64).hex()}, **noise)
        remember(kept, decision(of=of, at_ms=now_ms))
    await kept.write()
    found = await everything(HistoryReader(other), [report(kept)])
    assert len(found.rows) == 400


# --- among the records of events ------------------------------------------------------------


async def test_a_copy_carries_history_along(tmp_path):
    async with (
        SQLiteStore(tmp_path / "old.db") as old,
        SQLiteStore(tmp_path / "new.db") as new,
    ):
        now_ms = system_clock()
        of = event()
        told = [decision(n, of=of, at_ms=now_ms) for n in range(1000)]
        kept = await written(old, "a", *told, clock=system_clock)
        await old.remember(Memories.of([Memory(key(1), b"g" * 16, Fate.DELIVERED, 60_000)]))
        copying = Copying(old, new)
        while await copying.step():
            pass
        assert copying.copied == kept.pages + 2
        assert len((await everything(HistoryReader(new), [report(kept)])).rows) == 1000
        remember(kept, decision(7, at_ms=now_ms))
        await kept.write()
        again = Copying(old, new)
        while await again.step():
            pass
        assert again.updated == 1
        assert len((await everything(HistoryReader(new), [report(kept)])).rows) == 1001


async def test_a_search_for_an_id_in_the_store_passes_history_by(tmp_path):
    async with SQLiteStore(tmp_path / "seen.db") as store:
        now_ms = system_clock()
        of = event(5)
        await written(store, "a", *[decision(5, of=of, at_ms=now_ms)] * 1500, clock=system_clock)
        memo = Memo("id-5", now_ms).write()
        await store.remember(
            Memories.of([Memory(key(5), b"g" * 16, Fate.DELIVERED, 60_000, memo=memo)])
        )
        found = [record async for record in records_with_id(store, "id-5", lambda _: None)]
        assert [record.key for record in found] == [key(5)]
        (page,) = await store.peek([page_key("a", 0)])
        began = time.process_time()
        for _ in range(1000):
            assert Memo.read(page.memo) == Memo()
        assert time.process_time() - began < 1


async def test_history_is_purged_when_its_time_has_come(tmp_path):
    clock = ManualClock()
    async with SQLiteStore(tmp_path / "seen.db", clock=clock) as store:
        of = event()
        kept = await written(store, "a", *[decision(n, of=of) for n in range(1000)], clock=clock)
        await store.remember(Memories.of([Memory(key(1), b"g" * 16, Fate.DELIVERED, 9 * DAY_MS)]))
        clock.advance(DAY_MS - 1)
        assert await store.purge() == 0
        clock.advance(1 + 5000)
        assert await store.purge() == kept.pages + 1
        assert (await store.peek([key(1)]))[0] is not None
