"""Copies of dead letters are counted in few round trips, and never hold up a batch for long."""

import asyncio

import pytest
from tests.faults.doubles import CountingDice, FaultyStore, now, now_ms, virtual

from oncebridge.dead_letters.copies import copies_of, count_copies
from oncebridge.events.key import make_key
from oncebridge.stores.memory import MemoryStore

KEYS = [make_key("crm", b"content", "", "", (b"%d" % n,)) for n in range(3)]
KEEP_MS = 60_000


def fresh() -> FaultyStore:
    return FaultyStore(MemoryStore(clock=now_ms))


async def counted(store: FaultyStore) -> list[int]:
    return [copies.count for copies in await copies_of(store.inner, KEYS)]


@virtual
async def test_the_copies_of_several_dead_letters_are_counted_in_two_round_trips():
    store = fresh()
    await count_copies(store, CountingDice(), {KEYS[0]: 2, KEYS[1]: 1}, keep_ms=KEEP_MS)
    assert (store.calls["claim"], store.calls["release"]) == (1, 1)
    await asyncio.sleep(1)
    await count_copies(store, CountingDice(), {KEYS[1]: 4}, keep_ms=KEEP_MS)
    assert await counted(store) == [2, 5, 0]
    assert (await copies_of(store.inner, KEYS))[1].last_ms == now_ms()


@virtual
async def test_workers_that_count_at_the_same_time_all_count():
    store = fresh()
    store.takes_s = 0.005
    dice = CountingDice(0.25), CountingDice(0.75)
    counts = [count_copies(store, one, dict.fromkeys(KEYS, 1), keep_ms=KEEP_MS) for one in dice]
    await asyncio.gather(*counts)
    assert await counted(store) == [2, 2, 2]


@pytest.mark.parametrize("seam", ["claim.before", "claim.after", "release.before", "release.after"])
@virtual
async def test_a_store_that_does_not_answer_is_not_waited_for(seam):
    store, began = fresh(), now()
    store.arm(seam)
    await count_copies(store, CountingDice(), {KEYS[0]: 1}, keep_ms=KEEP_MS)
    assert now() == began
    assert await counted(store) == [1 if seam == "release.after" else 0, 0, 0]
