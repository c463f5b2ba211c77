"""A cell: every edit counts once, whoever edits beside, and whatever the store loses."""

import asyncio

import pytest
from tests.faults.doubles import CountingDice, FaultyStore, now, now_ms, virtual

from oncebridge.base.clock import SystemDice
from oncebridge.errors import StoreError, StoreUnavailable
from oncebridge.events.key import Part, make_key
from oncebridge.stores.api import Fate, Memories, Memory, Want, Wants
from oncebridge.stores.cell import Cell, CellBusy
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore

KEY = make_key("crm", b"count", "", "", ())
KEEP_MS = 60_000


def add_one(memo: bytes, _now_ms: int) -> bytes:
    return b"%d" % (int(memo or b"0") + 1)


def cell(store, **more) -> Cell:
    return Cell(store, KEY, SystemDice(), keep_ms=KEEP_MS, **more)


def on_virtual_time(**more) -> tuple[FaultyStore, Cell]:
    store = FaultyStore(MemoryStore(clock=now_ms))
    return store, Cell(store, KEY, CountingDice(), keep_ms=KEEP_MS, **more)


async def test_an_edit_returns_what_it_wrote_and_the_next_one_sees_it():
    store = MemoryStore()
    assert await cell(store).edit(add_one) == b"1"
    assert await cell(store).edit(add_one) == b"2"
    (record,) = await store.peek([KEY])
    assert record is not None
    assert (record.memo, record.fate, record.token) == (b"2", None, b"")
    assert record.attempts == 0, "an edit is not an attempt"


async def test_an_edit_is_told_the_time_of_the_store():
    store = MemoryStore(clock=lambda: 1_700_000_000_123)
    seen = []
    await cell(store).edit(lambda memo, at: seen.append((memo, at)) or b"x")
    assert seen == [(b"", 1_700_000_000_123)]


async def test_edits_from_several_connections_all_count(tmp_path):
    stores = [SQLiteStore(tmp_path / "store.db") for _ in range(3)]
    for store in stores:
        await store.open()
    edits = [cell(store, patience_s=60).edit(add_one) for store in stores for _ in range(8)]
    values = await asyncio.gather(*edits)
    assert sorted(map(int, values)) == list(range(1, 25))
    for store in stores:
        await store.aclose()


@pytest.mark.parametrize("seam", ["claim.before", "claim.after", "release.before", "release.after"])
@pytest.mark.parametrize("times", [1, 3])
@virtual
async def test_an_answer_that_is_lost_makes_no_edit_count_twice(seam, times):
    store, counter = on_virtual_time(patience_s=30)
    store.arm(seam, times=times)
    assert await counter.edit(add_one) == b"1"
    assert await counter.edit(add_one) == b"2"


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("operation", ["claim", "release"])
@virtual
async def test_an_item_without_an_answer_is_asked_again(operation, applied):
    store, counter = on_virtual_time()
    store.silence(operation, applied=applied)
    assert await counter.edit(add_one) == b"1"
    assert await counter.edit(add_one) == b"2"


@virtual
async def test_each_claim_has_a_token_of_its_own():
    store, counter = on_virtual_time()
    store.arm("claim.before", times=3)
    await counter.edit(add_one)
    drawn = [draw for want in store.asked["claim"] for draw in (want.token, want.generation)]
    assert len(drawn) == len(set(drawn)) == 8


@virtual
async def test_a_worker_that_died_during_an_edit_is_waited_for():
    store, counter = on_virtual_time(lease_ms=5000)
    await store.claim(Wants.of([Want((Part(KEY),), b"d" * 16, b"g" * 16, 5000, KEEP_MS)]))
    began = now()
    assert await counter.edit(add_one) == b"1"
    assert 5 <= now() - began < 6


@virtual
async def test_an_edit_after_its_lease_does_not_overwrite_a_later_one():
    store, counter = on_virtual_time(lease_ms=1000)
    other = Cell(store.inner, KEY, CountingDice(), keep_ms=KEEP_MS)

    async def stall() -> None:
        await asyncio.sleep(1.5)
        await other.edit(add_one)

    store.meanwhile("release.before", stall)
    assert await counter.edit(add_one) == b"2"


@virtual
async def test_patience_ends_with_an_error_while_the_store_does_not_answer():
    store, counter = on_virtual_time(patience_s=2)
    store.arm("claim.before", times=1e9)
    began = now()
    with pytest.raises(StoreUnavailable, match="no answer"):
        await counter.edit(add_one)
    assert 1 < now() - began <= 2
    store.disarm()
    assert await counter.edit(add_one) == b"1"


@virtual
async def test_patience_ends_with_an_error_while_another_worker_keeps_the_cell():
    store, counter = on_virtual_time(patience_s=2)
    await store.claim(Wants.of([Want((Part(KEY),), b"d" * 16, b"g" * 16, 60_000, KEEP_MS)]))
    with pytest.raises(CellBusy, match="another worker is editing"):
        await counter.edit(add_one)


async def test_a_change_that_fails_leaves_the_cell_as_it_was_and_free():
    store = MemoryStore()
    await cell(store).edit(add_one)

    def fail(memo: bytes, now_ms: int) -> bytes:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await cell(store).edit(fail)
    assert await cell(store, patience_s=0).edit(add_one) == b"2"


async def test_the_record_of_an_event_is_refused_at_once():
    store = MemoryStore()
    await store.remember(Memories.of([Memory(KEY, b"g" * 16, Fate.DELIVERED, KEEP_MS)]))
    with pytest.raises(StoreError, match="not a cell") as raised:
        await cell(store).edit(add_one)
    assert not isinstance(raised.value, StoreUnavailable)
