"""A store that has lost its records is noticed, and what is sent afterwards is counted."""

import asyncio

import pytest
from tests.faults.doubles import Bench, CountingDice, FaultyStore, event, now_ms, virtual

from oncebridge import Verdict
from oncebridge.base.clock import SystemDice
from oncebridge.engine.settings import Settings
from oncebridge.service.epoch import KEY, Epoch
from oncebridge.stores.cell import Cells, Edit
from oncebridge.stores.memory import MemoryStore

HOUR_S = 3600


def fresh() -> FaultyStore:
    return FaultyStore(MemoryStore(clock=now_ms))


def wipe(store: FaultyStore) -> None:
    store.inner = MemoryStore(clock=now_ms)


def worker(store: FaultyStore) -> Epoch:
    return Epoch(store, clock=now_ms, dice=SystemDice())


@virtual
async def test_a_new_store_has_lost_nothing() -> None:
    store = fresh()
    workers = [worker(store) for _ in range(5)]
    await asyncio.gather(*(one.look() for one in workers))
    for _ in range(3):
        await asyncio.gather(*(one.look() for one in workers))
    assert {one.lost_ms for one in workers} == {0}
    assert len({one._known for one in workers}) == 1


@virtual
async def test_a_look_only_reads() -> None:
    store = fresh()
    one = worker(store)
    await one.look()
    claims = store.calls["claim"]
    for _ in range(100):
        await one.look()
    assert store.calls["claim"] == claims


@virtual
async def test_a_wiped_store_is_noticed_by_all_and_known_to_whoever_comes_later() -> None:
    store = fresh()
    workers = [worker(store) for _ in range(4)]
    for one in workers:
        await one.look()
    wipe(store)
    await asyncio.sleep(7)
    noticed_ms = now_ms()
    await asyncio.gather(*(one.look() for one in workers))
    workers.append(worker(store))
    await asyncio.gather(*(one.look() for one in workers))
    assert len({one.lost_ms for one in workers}) == 1
    assert 0 <= workers[0].lost_ms - noticed_ms < 15_000


@virtual
async def test_a_wiped_store_is_noticed_even_if_a_new_worker_was_there_first() -> None:
    store = fresh()
    old = worker(store)
    await old.look()
    wipe(store)
    new = worker(store)
    await new.look()
    assert new.lost_ms == 0  # it cannot know
    await old.look()
    await new.look()
    assert new.lost_ms == old.lost_ms > 0


@virtual
async def test_a_worker_that_looks_late_does_not_make_the_loss_a_later_one() -> None:
    store = fresh()
    prompt, late = worker(store), worker(store)
    for one in (prompt, late):
        await one.look()
    wipe(store)
    await asyncio.sleep(1)
    await prompt.look()
    noticed_ms = prompt.lost_ms
    await asyncio.sleep(600)
    await late.look()
    await prompt.look()
    assert late.lost_ms == prompt.lost_ms == noticed_ms


@virtual
async def test_a_clock_that_is_ahead_writes_no_more_than_others() -> None:
    store = fresh()
    one = Epoch(store, clock=lambda: now_ms() + 7 * HOUR_S * 1000, dice=SystemDice())
    await one.look()
    claims = store.calls["claim"]
    for _ in range(20):
        await one.look()
    assert store.calls["claim"] == claims


@virtual
async def test_each_loss_counts() -> None:
    store = fresh()
    one = worker(store)
    await one.look()
    losses = []
    for _ in range(3):
        wipe(store)
        await asyncio.sleep(HOUR_S)
        await one.look()
        losses.append(one.lost_ms)
    assert losses == sorted(set(losses))


@virtual
async def test_the_record_is_written_again_before_a_bucket_would_remove_it() -> None:
    store = fresh()
    one = worker(store)
    await one.look()
    claims = store.calls["claim"]
    for _ in range(48):
        await asyncio.sleep(HOUR_S / 2)
        await one.look()
    assert store.calls["claim"] - claims == 3
    assert one.lost_ms == 0


@virtual
@pytest.mark.parametrize("memo", [b"\xff other", b'{"form": 2}', b'["only a list", "of words"]'])
async def test_what_another_version_wrote_is_left_alone(memo: bytes) -> None:
    store = fresh()
    await Cells(store, CountingDice()).edit_one(KEY, Edit(lambda _memo, _ms: memo, 10**9))
    one = worker(store)
    await one.look()
    await one.look()
    (record,) = await store.peek([KEY])
    assert record.memo == memo
    assert one.lost_ms == 0


@virtual
async def test_what_is_sent_after_a_loss_is_unprotected_until_its_window_is_over() -> None:
    async with Bench(settings=Settings(window=Settings().lease * 100)) as bench:
        assert not (await bench.one(event({"n": 1}))).unprotected
        bench.gateway.records_lost_ms = now_ms()
        outcome = await bench.one(event({"n": 2}))
        assert (outcome.verdict, outcome.unprotected) == (Verdict.DELIVERED, True)
        assert [delivery.unprotected for delivery in bench.sink.seen] == [False, True]
        assert bench.books.unprotected == 1
        assert (await bench.one(event({"n": 2}))).verdict is Verdict.DUPLICATE
        assert len(bench.gateway._claims.backlog) == 0  # it was claimed, so nothing is owed
        await asyncio.sleep(bench.gateway.rules.longest_ms / 1000 + 1)
        assert not (await bench.one(event({"n": 3}))).unprotected
        assert bench.books.unprotected == 1
