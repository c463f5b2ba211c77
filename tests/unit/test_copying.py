"""From store to store: what goes along, what stays, and what happens on the way."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.contract.test_conditional_store import BackendInMemory, StoreInMemory

from oncebridge.errors import StoreUnavailable
from oncebridge.events.key import Part
from oncebridge.stores import copying
from oncebridge.stores.api import (
    Busy,
    Claim,
    Commit,
    Commits,
    Duplicate,
    Fate,
    Memories,
    Memory,
    NoAnswer,
    Record,
    Release,
    Releases,
    Reply,
    Want,
    Wants,
)
from oncebridge.stores.copying import Copying, HeldKey, condition, is_former, is_portable, shifted
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore
from oncebridge.testing import ManualClock

HOUR = 3_600_000
NOW = 1_700_000_000_000
AHEAD = 3 * 24 * HOUR + 17
"""How far the clock of the second store is ahead."""


def bits(name: object) -> bytes:
    return str(name).encode().rjust(16, b".")


class World:
    """Two stores in memory, each with its clock."""

    def __init__(self, ahead_ms: int = AHEAD) -> None:
        self.clocks = ManualClock(NOW), ManualClock(NOW + ahead_ms)
        self.source, self.target = (StoreInMemory(BackendInMemory(clock)) for clock in self.clocks)
        self.tokens = iter(range(10**6))

    def wait(self, ms: int) -> None:
        for clock in self.clocks:
            clock.advance(ms)

    async def hold(self, key: bytes, *, lease_ms: int = 30_000, memo: bytes = b"", store=None):
        token, generation = bits(next(self.tokens)), bits(next(self.tokens))
        want = Want((Part(key),), token, generation, lease_ms, HOUR, memo)
        (answer,) = await (store or self.source).claim(Wants.of([want]))
        return answer

    async def done(self, key: bytes, *, window_ms: int = HOUR, hard_ms: int = 0, **more) -> None:
        claim = await self.hold(key, **more)
        asked = Commit(key, claim.held[0].generation, Fate.DELIVERED, window_ms, hard_ms)
        assert await self.source.commit(Commits.of([asked])) == [Reply.COMMITTED]

    async def back(self, key: bytes, delay_ms: int = 0, *, memo: bytes | None = None, **more):
        claim = await self.hold(key, **more)
        asked = Release(key, claim.token, delay_ms, HOUR, memo)
        assert await self.source.release(Releases.of([asked])) == [Reply.RELEASED]

    async def copy(self, **more: bool) -> Copying:
        copied = Copying(self.source, self.target, **more)
        while await copied.step():
            pass
        assert copied.is_complete
        return copied

    async def counts(self, **more: bool) -> dict[str, int]:
        return {name: n for name, n in (await self.copy(**more)).counts().items() if n}

    def records(self, store: StoreInMemory) -> dict[bytes, Record]:
        return {key: entry.record for key, entry in store.backend.entries.items()}


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture(autouse=True)
def _hurried(monkeypatch):
    monkeypatch.setattr(copying, "_PAUSES_S", (0, 0, 0))


# --- what goes along ----------------------------------------------------------------------


async def test_records_arrive_as_they_are_in_the_time_of_the_other_store(world):
    await world.done(b"done", memo=b"m", hard_ms=2 * HOUR)
    await world.back(b"failed", memo=b"why")
    await world.back(b"waits", 300_000)
    await world.hold(b"lapsed")
    world.wait(60_000)
    assert await world.counts() == {"copied": 4}
    before, after = world.records(world.source), world.records(world.target)
    for key in (b"done", b"failed", b"waits", b"lapsed"):
        assert after[key] == shifted(before[key], AHEAD)
    assert after[b"done"].hard_until_ms == before[b"done"].hard_until_ms + AHEAD
    assert after[b"failed"].hard_until_ms == 0
    assert (before[b"lapsed"].token, after[b"lapsed"].token) != (b"", b"")
    assert after[b"lapsed"].token == b""


async def test_a_window_has_as_much_left_there_as_it_had_here(world):
    await world.done(b"a")
    world.wait(HOUR - 1000)
    await world.copy()
    world.wait(999)
    assert isinstance(await world.hold(b"a", store=world.target), Duplicate)
    world.wait(1)
    assert isinstance(await world.hold(b"a", store=world.target), Claim)


async def test_attempts_and_delays_go_on_there(world):
    await world.back(b"a", 5000, memo=b"why")
    await world.copy()
    assert isinstance(await world.hold(b"a", store=world.target), Busy)
    world.wait(5000)
    claim = await world.hold(b"a", store=world.target)
    assert (claim.held[0].attempts, claim.held[0].memo) == (2, b"why")


async def test_what_is_over_stays_behind(world):
    await world.done(b"done", window_ms=1000)
    await world.back(b"failed")
    world.wait(HOUR)
    assert await world.counts() == {"expired": 2}
    assert world.records(world.target) == {}
    assert len(world.records(world.source)) == 2


async def test_what_a_worker_holds_is_left_and_named(world):
    await world.hold(b"a", lease_ms=20_000)
    await world.hold(b"b", lease_ms=30_000)
    await world.done(b"c")
    world.wait(1000)
    copied = await world.copy()
    assert (copied.live, copied.copied) == (2, 1)
    assert copied.held == [HeldKey(b"a", 19_000), HeldKey(b"b", 29_000)]
    assert copied.held_ms == 29_000
    assert list(world.records(world.target)) == [b"c"]
    world.wait(29_000)
    assert await world.counts() == {"copied": 2, "known": 1}


async def test_only_the_first_few_are_named(world):
    for number in range(50):
        await world.hold(b"%d" % number, lease_ms=1000 + number)
    copied = await world.copy()
    assert (copied.live, len(copied.held), copied.held_ms) == (50, 20, 1049)


async def test_nothing_is_taken_away(world):
    await world.done(b"done")
    await world.hold(b"held")
    before = world.records(world.source)
    await world.copy()
    assert world.records(world.source) == before


# --- again --------------------------------------------------------------------------------


async def test_copying_again_changes_nothing(world):
    await world.done(b"done")
    await world.back(b"failed")
    await world.copy()
    before = world.records(world.target)
    world.clocks[1].advance(40)  # the clocks are never read at the very same moment
    assert await world.counts() == {"known": 2}
    assert world.records(world.target) == before


async def test_what_has_gone_on_since_is_brought_up_to_date(world):
    for key in (b"done since", b"one attempt more", b"newer state"):
        await world.back(key, memo=b"v1")
    await world.done(b"was done")
    assert await world.counts() == {"copied": 4}
    world.wait(100)
    await world.done(b"done since")
    await world.back(b"one attempt more")
    await world.back(b"newer state", memo=b"v2")
    world.clocks[1].now_ms -= 40  # as if the clocks had been read less exactly
    assert await world.counts(dry_run=True) == {"updated": 3, "known": 1}
    assert await world.counts() == {"updated": 3, "known": 1}
    there = world.records(world.target)
    assert there[b"done since"].fate is Fate.DELIVERED
    assert there[b"one attempt more"].attempts == 2
    assert there[b"newer state"].memo == b"v2"
    assert await world.counts() == {"known": 4}


async def test_what_workers_of_the_other_store_did_meanwhile_stands(world):
    await world.back(b"a", memo=b"v1")
    await world.copy()
    world.wait(2000)
    claim = await world.hold(b"a", store=world.target)
    await world.target.release(Releases.of([Release(b"a", claim.token, 0, HOUR, b"v2")]))
    before = world.records(world.target)
    assert await world.counts() == {"known": 1}
    assert world.records(world.target) == before


async def test_what_a_worker_of_the_other_store_holds_is_left_and_named(world):
    await world.done(b"a")
    claim = await world.hold(b"a", store=world.target)
    assert await world.counts(dry_run=True) == {"live": 1}
    copied = await world.copy()
    assert copied.held == [HeldKey(b"a", 30_000)]
    asked = Commit(b"a", claim.held[0].generation, Fate.DELIVERED, HOUR)
    assert await world.target.commit(Commits.of([asked])) == [Reply.COMMITTED]
    assert await world.counts() == {"known": 1}


async def test_what_failed_there_and_was_delivered_here_is_done(world):
    claim = await world.hold(b"a", store=world.target)
    await world.target.release(Releases.of([Release(b"a", claim.token, 0, HOUR)]))
    await world.done(b"a")
    assert await world.counts() == {"updated": 1}
    assert isinstance(await world.hold(b"a", store=world.target), Duplicate)


async def test_what_is_done_there_is_never_taken_away(world):
    memory = Memory(b"a", bits("theirs"), Fate.DEAD, 2 * HOUR)
    await world.target.remember(Memories.of([memory]))
    before = world.records(world.target)
    await world.done(b"a")
    assert await world.counts() == {"known": 1}
    assert world.records(world.target) == before


KEYS = [b"a", b"b", b"c"]
ACTS = st.one_of(
    st.tuples(st.sampled_from(["hold", "done", "back", "waits"]), st.sampled_from(KEYS)),
    st.tuples(st.just("wait"), st.sampled_from([1, 999, 30_000, HOUR // 2, HOUR])),
    st.tuples(st.just("copy"), st.just(b"")),
)


@example(
    [
        ("hold", b"c"),
        ("wait", 30_000),
        ("copy", b""),
        ("done", b"c"),
        ("wait", HOUR),
        ("hold", b"c"),
    ],
    0,
)
@given(st.lists(ACTS, max_size=20), st.integers(-AHEAD, AHEAD))
def test_whatever_happened_between_copies_the_last_one_is_right(acts, ahead_ms):
    asyncio.run(check_the_last_copy(acts, World(ahead_ms)))


async def check_the_last_copy(acts: Sequence[tuple], world: World) -> None:
    for number, (act, what) in enumerate(acts):
        world.wait(1)
        if act == "wait":
            world.wait(what)
        elif act == "copy":
            told = await world.counts(dry_run=True)
            assert await world.counts() == told
        elif isinstance(claim := await world.hold(what), Claim):
            if act == "done":
                asked = Commit(what, claim.held[0].generation, Fate.DELIVERED, HOUR)
                await world.source.commit(Commits.of([asked]))
            elif act in ("back", "waits"):
                delay = 60_000 if act == "waits" else 0
                await world.source.release(
                    Releases.of([Release(what, claim.token, delay, HOUR, b"%d" % number)])
                )
    world.wait(60_000)  # so that nothing is held or waits
    assert (await world.copy()).live == 0
    there = world.records(world.target)
    for key, record in world.records(world.source).items():
        if condition(record, world.clocks[0]()) == "lasting":
            assert there[key] == shifted(record, world.clocks[1]() - world.clocks[0]())
    assert set(await world.counts()) <= {"known", "expired"}


# --- looking only -------------------------------------------------------------------------


async def test_a_dry_run_tells_the_same_and_changes_nothing(world):
    await world.done(b"done")
    await world.back(b"failed")
    await world.hold(b"held")
    await world.target.remember(Memories.of([Memory(b"done", bits(1), Fate.DEAD, HOUR)]))
    before = world.records(world.target)
    told = await world.counts(dry_run=True)
    assert told == {"copied": 1, "known": 1, "live": 1}
    assert world.records(world.target) == before
    assert await world.counts() == told


async def test_without_a_target_it_is_as_if_that_were_empty(world):
    await world.done(b"done")
    await world.hold(b"held")
    copied = Copying(world.source, None, dry_run=True)
    assert not await copied.step()
    assert (copied.copied, copied.live, copied.seen) == (1, 1, 2)


# --- on the way ---------------------------------------------------------------------------


async def test_any_number_is_carried_in_bounded_batches(world, monkeypatch):
    monkeypatch.setattr(copying, "BATCH", 7)
    sizes = []
    load = world.target.load

    async def counted(records):
        sizes.append(len(records))
        return await load(records)

    monkeypatch.setattr(world.target, "load", counted)
    await world.source.remember(
        Memories.of(
            [Memory(b"%d" % number, bits(number), Fate.DELIVERED, HOUR) for number in range(70)]
        )
    )
    assert await world.counts() == {"copied": 70}
    assert sizes == [7] * 10
    assert len(world.records(world.target)) == 70


async def test_a_record_that_a_scan_sees_twice_is_put_once(world, monkeypatch):
    await world.done(b"a")
    scan = world.source.scan

    async def twice(place, limit):
        records, _ = await scan(place, limit)
        return [*records, *records], b"" if place else b"a"

    monkeypatch.setattr(world.source, "scan", twice)
    assert await world.counts() == {"copied": 1}


@pytest.mark.parametrize("verb", ["scan", "now_ms", "load", "peek", "forget"])
@pytest.mark.parametrize("side", ["source", "target"])
async def test_a_store_that_is_away_for_a_moment_is_waited_for(world, monkeypatch, side, verb):
    await world.back(b"a", memo=b"v1")
    await world.copy()
    world.wait(1)
    await world.done(b"a")
    store = getattr(world, side)
    call = getattr(store, verb)
    left = [1, 2]

    async def unsteady(*args):
        if left:
            left.pop()
            raise StoreUnavailable("away")
        return await call(*args)

    monkeypatch.setattr(store, verb, unsteady)
    assert await world.counts() == {"updated": 1}


async def test_a_store_that_stays_away_is_told(world, monkeypatch):
    await world.done(b"a")

    async def away(*args):
        raise StoreUnavailable("still away")

    monkeypatch.setattr(world.target, "load", away)
    with pytest.raises(StoreUnavailable, match="still away"):
        await world.copy()


async def test_records_that_had_no_answer_are_put_again(world):
    for key in (b"a", b"b", b"c"):
        await world.done(key)
    backend = world.target.backend
    backend.silent = {b"b"}
    with pytest.raises(StoreUnavailable, match="silent"):
        await world.copy()
    assert set(world.records(world.target)) == {b"a", b"c"}
    load, asked = world.target.load, []

    async def hearing_in_the_end(records):
        asked.append([one.key for one in records])
        answers = await load(records)
        backend.silent = set()
        return answers

    world.target.load = hearing_in_the_end
    assert await world.counts() == {"copied": 1, "known": 2}
    assert asked == [[b"a", b"b", b"c"], [b"b"]]


async def test_an_answer_that_was_lost_is_no_second_record(world):
    await world.done(b"a")
    world.target.backend.swallow = {b"a"}
    assert await world.counts() == {"known": 1}
    assert set(world.records(world.target)) == {b"a"}


async def test_a_copy_that_was_stopped_is_simply_made_again(world, monkeypatch):
    monkeypatch.setattr(copying, "BATCH", 5)
    await world.source.remember(
        Memories.of(
            [Memory(b"%d" % number, bits(number), Fate.DELIVERED, HOUR) for number in range(12)]
        )
    )
    stopped = Copying(world.source, world.target)
    assert await stopped.step()
    assert (stopped.copied, stopped.is_complete) == (5, False)
    assert await world.counts() == {"copied": 7, "known": 5}


async def test_between_files(tmp_path):
    clock = ManualClock(NOW)
    async with (
        SQLiteStore(tmp_path / "old.db", clock=clock) as old,
        SQLiteStore(tmp_path / "new.db", clock=clock) as new,
    ):
        await old.remember(
            Memories.of(
                [Memory(b"%d" % n, bits(n), Fate.DELIVERED, HOUR, memo=b"m") for n in range(2500)]
            )
        )
        copied = Copying(old, new)
        while await copied.step():
            pass
        assert copied.counts() == {"copied": 2500, "updated": 0, "known": 0, "expired": 0} | {
            "live": 0
        }
        assert await new.scan(b"", 5000) == await old.scan(b"", 5000)


# --- the pieces ---------------------------------------------------------------------------


def record(fate: Fate | None = None, **more) -> Record:
    fields = {
        "key": b"a",
        "token": b"",
        "generation": bits(1),
        "until_ms": 100,
        "attempts": 1,
        "hash": b"",
        "fate": fate,
        "memo": b"",
        "hard_until_ms": 0,
        "keep_until_ms": 100 if fate else 200,
    }
    return Record(**fields | more)


def test_the_condition_of_a_record():
    assert condition(record(Fate.DEAD), 99) == "lasting"
    assert condition(record(Fate.DEAD), 100) == "expired"
    assert condition(record(token=b"t"), 99) == "live"
    assert condition(record(token=b"t"), 100) == "lasting"
    assert condition(record(), 99) == "lasting"  # it waits for its next attempt
    assert condition(record(), 199) == "lasting"
    assert condition(record(), 200) == "expired"


def test_which_state_was_before_which():
    assert is_former(record(), record(Fate.DELIVERED), 150)
    assert is_former(record(), record(memo=b"v2", keep_until_ms=201), 150)
    assert not is_former(record(), record(keep_until_ms=201), 150)
    assert not is_former(record(keep_until_ms=9999), record(memo=b"v2"), 150)
    assert not is_former(record(generation=bits(2)), record(memo=b"v2", keep_until_ms=201), 150)
    assert not is_former(record(Fate.DEAD), record(Fate.DELIVERED, keep_until_ms=500), 150)
    # Past keeping: whatever it was, nobody goes by it.
    assert is_former(record(generation=bits(2)), record(memo=b"v2", keep_until_ms=201), 200)


def test_which_stores_can_be_copied():
    assert is_portable(SQLiteStore("never-made.db"))
    assert not is_portable(MemoryStore())
    assert not is_portable(NoAnswer("not a store"))
