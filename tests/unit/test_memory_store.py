"""What is particular to the store in memory; what every store must do is in tests/contract."""

import asyncio
import gc
import tracemalloc
from itertools import count

import pytest

from oncebridge import ConfigError
from oncebridge.events.key import Part
from oncebridge.stores.api import (
    HELD,
    Busy,
    Claim,
    Commit,
    Commits,
    Duplicate,
    Fate,
    Memories,
    Memory,
    NoAnswer,
    Release,
    Releases,
    Reply,
    Want,
    Wants,
)
from oncebridge.stores.memory import MemoryStore
from oncebridge.testing import ManualClock

LEASE_MS, WINDOW_MS = 30_000, 600_000
tokens = (number.to_bytes(16) for number in count(1))


def key(n):
    return n.to_bytes(33)


def want(*numbers, keep_ms=WINDOW_MS, memo=b""):
    parts = tuple(Part(key(n)) for n in numbers)
    return Want(parts, next(tokens), next(tokens), LEASE_MS, keep_ms, memo)


async def deliver(store, *numbers, window_ms=WINDOW_MS):
    """Claim and commit keys; give those that were claimed."""
    answers = await store.claim(Wants.of([want(n) for n in numbers]))
    claimed = [answer for answer in answers if isinstance(answer, Claim)]
    commits = [
        Commit(held.key, held.generation, Fate.DELIVERED, window_ms)
        for claim in claimed
        for held in claim.held
    ]
    assert set(await store.commit(Commits.of(commits))) <= {Reply.COMMITTED}
    return claimed


@pytest.fixture
def clock():
    return ManualClock()


# --- the cap --------------------------------------------------------------------------------


async def test_at_the_cap_new_keys_are_refused_and_nothing_is_evicted(clock):
    store = MemoryStore(max_keys=10, clock=clock)
    assert len(await deliver(store, *range(10))) == 10
    answers = await store.claim(Wants.of([want(n) for n in range(10, 20)]))
    assert all(isinstance(answer, NoAnswer) for answer in answers)
    assert "max_keys" in answers[0].reason
    answers = await store.claim(Wants.of([want(n) for n in range(10)]))
    assert all(isinstance(answer, Duplicate) for answer in answers)
    assert len(store) == 10


async def test_a_batch_of_claims_is_granted_up_to_the_cap(clock):
    store = MemoryStore(max_keys=10, clock=clock)
    await deliver(store, *range(5))
    keys = [key(n) for n in range(3, 13)]
    answers = await store.claim(Wants(keys, next(tokens), next(tokens), LEASE_MS, WINDOW_MS))
    kinds = [answer if answer == HELD else type(answer) for answer in answers.each]
    assert kinds == [Duplicate] * 2 + [HELD] * 5 + [NoAnswer] * 3
    assert len(store) == 10


async def test_every_key_of_a_batch_has_the_terms_that_were_asked_for_it(clock):
    store = MemoryStore(clock=clock)
    keys = [key(n) for n in range(3)]
    own = [next(tokens) for _ in keys]
    leases, keeps, memos = [1_000, 2_000, 3_000], [10_000, 20_000, 40_000], [b"a", b"", b"c"]
    answers = await store.claim(Wants(keys, own, own, leases, keeps, memos, [b"", b"h", b""]))
    assert answers.each == [HELD] * 3
    assert answers.now_ms == clock()
    records = await store.peek(keys)
    assert [record.until_ms - clock() for record in records] == leases
    assert [record.keep_until_ms - record.until_ms for record in records] == keeps
    assert [(r.token, r.memo, r.hash) for r in records] == [
        *[(own[0], b"a", b""), (own[1], b"", b"h"), (own[2], b"c", b"")]
    ]
    fates, windows = [Fate.DEAD, Fate.STALE, Fate.DELIVERED], [50_000, 60_000, 70_000]
    commits = Commits(keys, own, fates, windows, [0, 90_000, 0], [None, b"new", b""])
    assert await store.commit(commits) == [Reply.COMMITTED] * 3
    records = await store.peek(keys)
    assert [record.fate for record in records] == fates
    assert [record.until_ms - clock() for record in records] == windows
    assert [record.memo for record in records] == [b"a", b"new", b""]
    assert records[1].hard_until_ms - clock() == 90_000
    clock.advance(120_000)
    assert await store.purge() == 3


async def test_at_the_cap_known_keys_are_still_answered_and_worked_on(clock):
    store = MemoryStore(max_keys=2, clock=clock)
    await deliver(store, 1)
    (claim,) = await store.claim(Wants.of([want(2)]))
    duplicate, busy, full = await store.claim(Wants.of([want(1), want(2), want(3)]))
    assert isinstance(duplicate, Duplicate)
    assert isinstance(busy, Busy)
    assert isinstance(full, NoAnswer)
    assert await store.release(Releases.of([Release(key(2), claim.token, keep_ms=WINDOW_MS)])) == [
        Reply.RELEASED
    ]
    (again,) = await store.claim(Wants.of([want(2)]))
    assert isinstance(again, Claim)
    assert again.held[0].attempts == 2
    commit = Commit(key(2), again.held[0].generation, Fate.DELIVERED, WINDOW_MS)
    assert await store.commit(Commits.of([commit])) == [Reply.COMMITTED]


async def test_a_claim_of_several_keys_fits_as_a_whole_or_not_at_all(clock):
    store = MemoryStore(max_keys=3, clock=clock)
    await deliver(store, 1, 2)
    (answer,) = await store.claim(Wants.of([want(3, 4)]))
    assert isinstance(answer, NoAnswer)
    assert await store.peek([key(3), key(4)]) == [None, None]
    (fits,) = await store.claim(Wants.of([want(3)]))
    assert isinstance(fits, Claim)


async def test_a_duplicate_needs_no_room(clock):
    store = MemoryStore(max_keys=2, clock=clock)
    await deliver(store, 1, 2)
    (answer,) = await store.claim(Wants.of([want(9, 1)]))
    assert isinstance(answer, Duplicate)


async def test_a_duplicate_whose_window_slides_needs_no_room_either(clock):
    store = MemoryStore(max_keys=1, clock=clock)
    (claim,) = await store.claim(Wants.of([want(1)]))
    generation = claim.held[0].generation
    await store.commit(
        Commits.of([Commit(key(1), generation, Fate.DELIVERED, WINDOW_MS, 2 * WINDOW_MS)])
    )
    clock.advance(WINDOW_MS // 2)
    parts = (Part(key(9)), Part(key(1), slide_ms=WINDOW_MS))
    (answer,) = await store.claim(
        Wants.of([Want(parts, next(tokens), next(tokens), LEASE_MS, WINDOW_MS)])
    )
    assert isinstance(answer, Duplicate)
    (record,) = await store.peek([key(1)])
    assert record.until_ms == clock() + WINDOW_MS
    assert len(store) == 1


async def test_memories_are_refused_at_the_cap_too(clock):
    store = MemoryStore(max_keys=1, clock=clock)
    memories = [Memory(key(n), next(tokens), Fate.DELIVERED, WINDOW_MS) for n in (1, 2, 1)]
    first, second = await store.remember(Memories.of(memories[:2]))
    assert first is Reply.REMEMBERED
    assert isinstance(second, NoAnswer)
    assert await store.remember(Memories.of(memories[2:])) == [Reply.KNOWN]


async def test_what_expires_makes_room(clock):
    store = MemoryStore(max_keys=10, clock=clock)
    await deliver(store, *range(10))
    clock.advance(WINDOW_MS + 60_000)
    assert len(await deliver(store, *range(10, 20))) == 10
    assert len(store) == 10


async def test_forgetting_makes_room(clock):
    store = MemoryStore(max_keys=1, clock=clock)
    await deliver(store, 1)
    assert await store.forget([key(1), key(1), key(2)]) == [True, False, False]
    assert len(store) == 0
    assert len(await deliver(store, 2)) == 1


@pytest.mark.parametrize("cap", [0, -1])
def test_a_cap_of_nothing_is_refused(cap):
    with pytest.raises(ConfigError, match="at least 1"):
        MemoryStore(max_keys=cap)


def test_addresses():
    assert isinstance(MemoryStore.from_url("memory:"), MemoryStore)
    with pytest.raises(ConfigError, match="store is 'memory:'"):
        MemoryStore.from_url("memory://x")


# --- housekeeping ---------------------------------------------------------------------------


async def test_it_stays_flat_over_many_windows(clock):
    store = MemoryStore(clock=clock)
    sizes = []
    for window in range(12):
        for batch in range(20):
            start = (window * 20 + batch) * 100
            await deliver(store, *range(start, start + 100))
            clock.advance(WINDOW_MS // 20)
        sizes.append(len(store))
    assert max(sizes) <= 2 * 2000 + 500
    names = sum(len(names) for names in store._calendar._days.values())
    assert names == len(store)


async def test_purging_looks_at_the_date_and_at_nothing_else(clock):
    store = MemoryStore(clock=clock)
    await deliver(store, 1, window_ms=WINDOW_MS)
    await deliver(store, 2, window_ms=10 * WINDOW_MS)
    await store.claim(Wants.of([want(3, keep_ms=10 * WINDOW_MS)]))
    assert await store.purge() == 0
    clock.advance(WINDOW_MS + 60_000)
    assert await store.purge() == 1
    assert [record is not None for record in await store.peek([key(1), key(2), key(3)])] == [
        False,
        True,
        True,
    ]


async def test_what_was_prolonged_is_not_purged_on_its_first_date(clock):
    store = MemoryStore(clock=clock)
    for _ in range(5):
        (claim,) = await store.claim(Wants.of([want(1, keep_ms=60_000)]))
        assert isinstance(claim, Claim)
        await store.release(Releases.of([Release(key(1), claim.token, keep_ms=60_000)]))
        clock.advance(59_000)
        await store.purge()
        assert len(store) == 1
    clock.advance(120_000)
    assert await store.purge() == 1


async def test_purging_little_by_little_ends(clock):
    store = MemoryStore(clock=clock)
    await deliver(store, *range(100))
    clock.advance(WINDOW_MS + 60_000)
    removed = [await store.purge(7) for _ in range(20)]
    assert sum(removed) == 100
    assert max(removed) <= 7
    assert store._calendar._days == {}
    assert store._calendar._order == []


async def test_of_what_is_done_or_gone_only_the_record_is_kept(clock):
    store = MemoryStore(clock=clock)
    await deliver(store, 1, 2)
    await store.claim(Wants.of([want(3), want(4, keep_ms=0), want(5)]))
    assert (len(store._open), len(store._names)) == (3, 3)
    clock.advance(LEASE_MS + 60_000)
    assert await store.purge() == 1
    assert await store.forget([key(5)]) == [True]
    assert {*store._names} == {key(3)}
    assert {*store._open} == {*store._names.values()}
    clock.advance(WINDOW_MS + 60_000)
    assert await store.purge() == 3
    assert (len(store), store._open, store._names) == (0, {}, {})


async def test_a_clock_that_jumps_back_and_forth_purges_nothing_early(clock):
    store = MemoryStore(clock=clock)
    await deliver(store, 1)
    clock.now_ms -= 3_600_000
    await store.purge()
    assert isinstance((await store.claim(Wants.of([want(1)])))[0], Duplicate)
    clock.now_ms += 3_600_000
    await store.purge()
    assert isinstance((await store.claim(Wants.of([want(1)])))[0], Duplicate)


async def test_forgetting_and_coming_again_does_not_fill_the_calendar(clock):
    store = MemoryStore(clock=clock)
    for _ in range(50):
        await deliver(store, 1)
        await store.forget([key(1)])
    clock.advance(2 * WINDOW_MS)
    await store.purge(10_000)
    assert len(store) == 0
    assert store._calendar._days == {}


# --- size -----------------------------------------------------------------------------------


@pytest.mark.full
async def test_many_done_keys_take_little_memory(clock):
    # Between two doublings of its dicts: 134 bytes a key. Just after one it is 151 for a while.
    many, batch = 160_000, 1000
    store = MemoryStore(clock=clock)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for start in range(0, many, batch):
            memories = [
                Memory(key(n), n.to_bytes(16), Fate.DELIVERED, WINDOW_MS)
                for n in range(start, start + batch)
            ]
            await store.remember(Memories.of(memories))
        del memories
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(store) == many
    assert taken / many <= 150


async def test_done_records_come_back_as_they_went_in(clock):
    store = MemoryStore(clock=clock)
    part = Part(key(1), b"h" * 16, 60_000)
    (claim,) = await store.claim(
        Wants.of([Want((part,), next(tokens), next(tokens), LEASE_MS, WINDOW_MS, b"memo")])
    )
    held = claim.held[0]
    await store.commit(
        Commits.of([Commit(key(1), held.generation, Fate.STALE, WINDOW_MS, 2 * WINDOW_MS)])
    )
    (record,) = await store.peek([key(1)])
    assert (record.key, record.generation, record.hash) == (key(1), held.generation, b"h" * 16)
    assert (record.fate, record.memo, record.attempts) == (Fate.STALE, b"memo", 1)
    assert record.until_ms == record.keep_until_ms == clock() + WINDOW_MS
    assert record.hard_until_ms == clock() + 2 * WINDOW_MS


async def test_keys_of_any_shape_are_kept_apart(clock):
    store = MemoryStore(clock=clock)
    keys = [b"", b"\0", b"\r\n", "😀".encode(), b"'; drop table", b"{}", b"x" * 10_000, b"x" * 9999]
    wants = [Want((Part(k),), next(tokens), next(tokens), LEASE_MS, WINDOW_MS) for k in keys]
    assert all(isinstance(answer, Claim) for answer in await store.claim(Wants.of(wants)))
    assert len(store) == len(keys)


def test_many_threads_and_one_key_have_one_winner(clock):
    store = MemoryStore(clock=clock)

    def work():
        return asyncio.run(store.claim(Wants.of([want(1)])))[0]

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: work(), range(64)))
    assert sum(isinstance(answer, Claim) for answer in answers) == 1
