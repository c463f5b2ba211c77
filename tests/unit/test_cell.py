"""A cell: every edit counts once, whoever edits beside, and whatever the store loses."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.faults.doubles import CountingDice, FaultyStore, VirtualLoop, now, now_ms, virtual
from tests.size import examples

from oncebridge.base.clock import SystemDice
from oncebridge.errors import StoreError, StoreUnavailable
from oncebridge.events.key import Part, make_key
from oncebridge.stores.api import (
    Busy,
    ClaimAnswers,
    Fate,
    Memories,
    Memory,
    NoAnswer,
    Reply,
    Want,
    Wants,
)
from oncebridge.stores.cell import (
    PATIENCE_S,
    CellBusy,
    Cells,
    Edit,
    value_or_raise,
)
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore

KEY = make_key("crm", b"count", "", "", ())
OTHER = make_key("lake", b"count", "", "", ())
KEEP_MS = 60_000


def add_one(memo: bytes, _now_ms: int) -> bytes:
    return b"%d" % (int(memo or b"0") + 1)


class Counter:
    """One cell, which is edited with the same patience each time."""

    def __init__(self, store, dice=None, *, patience_s=PATIENCE_S, **settings) -> None:
        self.cells = Cells(store, dice or SystemDice(), **settings)
        self.patience_s = patience_s

    async def edit(self, change) -> bytes:
        return await self.cells.edit_one(KEY, Edit(change, KEEP_MS), patience_s=self.patience_s)


def on_virtual_time(**settings) -> tuple[FaultyStore, Counter]:
    store = FaultyStore(MemoryStore(clock=now_ms))
    return store, Counter(store, CountingDice(), **settings)


async def test_an_edit_returns_what_it_wrote_and_the_next_one_sees_it():
    store = MemoryStore()
    assert await Counter(store).edit(add_one) == b"1"
    assert await Counter(store).edit(add_one) == b"2"
    (record,) = await store.peek([KEY])
    assert record is not None
    assert (record.memo, record.fate, record.token) == (b"2", None, b"")
    assert record.attempts == 0, "an edit is not an attempt"


async def test_an_edit_is_told_the_time_of_the_store():
    store = MemoryStore(clock=lambda: 1_700_000_000_123)
    seen = []
    await Counter(store).edit(lambda memo, at: seen.append((memo, at)) or b"x")
    assert seen == [(b"", 1_700_000_000_123)]


async def test_edits_from_several_connections_all_count(tmp_path):
    stores = [SQLiteStore(tmp_path / "store.db") for _ in range(3)]
    for store in stores:
        await store.open()
    edits = [Counter(store, patience_s=60).edit(add_one) for store in stores for _ in range(8)]
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
async def test_a_cell_is_free_at_once_for_the_worker_whose_edit_was_cancelled():
    for seam in ("claim.after", "release.before", "release.after"):
        store, counter = on_virtual_time()

        async def hang() -> None:
            await asyncio.sleep(3600)

        store.meanwhile(seam, hang)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await counter.edit(add_one)
        began = now()
        assert await counter.edit(add_one) == (b"2" if seam == "release.after" else b"1")
        assert now() == began


@virtual
async def test_an_edit_after_its_lease_does_not_overwrite_a_later_one():
    store, counter = on_virtual_time(lease_ms=1000)
    other = Counter(store.inner, CountingDice())

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
    await Counter(store).edit(add_one)

    def fail(memo: bytes, now_ms: int) -> bytes:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Counter(store).edit(fail)
    assert await Counter(store, patience_s=0).edit(add_one) == b"2"


async def test_the_record_of_an_event_is_refused_at_once():
    store = MemoryStore()
    await store.remember(Memories.of([Memory(KEY, b"g" * 16, Fate.DELIVERED, KEEP_MS)]))
    with pytest.raises(StoreError, match="not a cell") as raised:
        await Counter(store).edit(add_one)
    assert not isinstance(raised.value, StoreUnavailable)


# --- idempotent changes ---------------------------------------------------------------------


@virtual
async def test_an_idempotent_edit_is_repeated_when_its_hold_is_another_workers():
    """A host that was suspended does not know that the lease has ended."""

    def add_name(memo: bytes, _now_ms: int) -> bytes | None:
        return None if b"mine" in memo else memo + b"mine"

    for idempotent, value in ((True, b"othermine"), (False, b"other")):
        skew_ms = 0
        store = FaultyStore(MemoryStore(clock=lambda: now_ms() + skew_ms))  # noqa: B023
        mine = Counter(store, CountingDice(), idempotent=idempotent)

        async def suspend() -> None:
            nonlocal skew_ms
            skew_ms += 6000
            other = Counter(store.inner, SystemDice())  # noqa: B023
            await other.edit(lambda _memo, _now_ms: b"other")

        store.meanwhile("release.before", suspend)
        await mine.edit(add_name)
        (record,) = await store.peek([KEY])
        assert record.memo == value


@pytest.mark.parametrize("seam", ["claim.before", "claim.after", "release.before", "release.after"])
@virtual
async def test_an_edit_that_does_not_wait_for_the_store_fails_at_once(seam):
    store, counter = on_virtual_time(waits_for_store=False)
    store.arm(seam)
    began = now()
    with pytest.raises(StoreUnavailable, match="no answer"):
        await counter.edit(add_one)
    assert await counter.edit(add_one) == (b"2" if seam == "release.after" else b"1")
    assert now() == began


@virtual
async def test_a_change_may_leave_the_value_as_it_is():
    store, counter = on_virtual_time()
    await counter.edit(add_one)
    for seam in ("", "release.before", "release.after"):
        store.arm(seam)
        assert await counter.edit(lambda _memo, _now_ms: None) == b"1"
    assert await counter.edit(add_one) == b"2"


# --- several cells --------------------------------------------------------------------------


@virtual
async def test_several_cells_are_edited_in_two_round_trips():
    store, _ = on_virtual_time()
    cells = Cells(store, CountingDice())
    edits = {
        KEY: Edit(add_one, KEEP_MS),
        OTHER: Edit(lambda _memo, at: b"%d" % at, 2 * KEEP_MS),
    }
    answers = await cells.edit(edits)
    assert answers == {KEY: b"1", OTHER: b"%d" % now_ms()}
    assert (store.calls["claim"], store.calls["release"]) == (1, 1)
    one, other = await store.peek([KEY, OTHER])
    assert one.keep_until_ms - now_ms() == KEEP_MS
    assert other.keep_until_ms - now_ms() == 2 * KEEP_MS
    assert {want.token for want in store.asked["claim"]} == {
        release.token for release in store.asked["release"]
    }


@pytest.mark.parametrize("operation", ["claim", "release"])
@pytest.mark.parametrize("applied", [False, True])
@virtual
async def test_only_what_has_no_result_yet_is_tried_again(operation, applied):
    store, _ = on_virtual_time()
    cells = Cells(store, CountingDice())
    edits = {key: Edit(add_one, KEEP_MS) for key in (KEY, OTHER)}

    def is_chosen(item) -> bool:
        return (item.parts[0].key if operation == "claim" else item.key) == OTHER

    store.silence(operation, is_chosen, applied=applied)
    assert await cells.edit(edits) == {KEY: b"1", OTHER: b"1"}
    asked = [want.parts[0].key for want in store.asked["claim"]]
    assert (asked.count(KEY), asked.count(OTHER)) == (1, 2 if operation == "claim" else 1)
    assert await cells.edit(edits) == {KEY: b"2", OTHER: b"2"}


@virtual
async def test_a_cell_that_is_busy_does_not_hold_up_the_others():
    store, _ = on_virtual_time()
    await store.claim(Wants.of([Want((Part(KEY),), b"d" * 16, b"g" * 16, 60_000, KEEP_MS)]))
    cells = Cells(store, CountingDice())
    edits = {key: Edit(add_one, KEEP_MS) for key in (KEY, OTHER)}
    answers = await cells.edit(edits, patience_s=0)
    assert answers == {KEY: Busy(KEY, 60_000), OTHER: b"1"}
    store.arm("claim.before", times=1e9)
    assert await cells.edit(edits, patience_s=0) == dict.fromkeys(edits, NoAnswer("no answer"))


@virtual
async def test_no_edits_are_no_round_trips():
    store, _ = on_virtual_time()
    assert await Cells(store, CountingDice()).edit({}) == {}
    assert not store.calls


@virtual
async def test_edits_by_one_object_at_the_same_time_all_count():
    store = FaultyStore(MemoryStore(clock=now_ms))
    counter = Counter(store, SystemDice(), patience_s=600)
    store.takes_s = 0.01
    for seam in ("", "claim.after", "release.before", "release.after"):
        store.arm(seam)
        await asyncio.gather(*[counter.edit(add_one) for _ in range(20)])
    assert await counter.edit(add_one) == b"81"


# --- holding cells --------------------------------------------------------------------------


@virtual
async def test_cells_that_are_held_stay_held_whoever_else_wants_them():
    store, _ = on_virtual_time()
    cells = Cells(store, CountingDice(), lease_ms=60_000)
    hold = await cells.claim({KEY: KEEP_MS, OTHER: KEEP_MS})
    assert hold.answers == {KEY: b"", OTHER: b""}
    assert hold.now_ms == now_ms()
    again = await cells.claim({KEY: KEEP_MS})
    assert again.answers == {KEY: Busy(KEY, 60_000)}
    assert await cells.release(hold, {KEY: b"a", OTHER: None}) == {
        KEY: Reply.RELEASED,
        OTHER: Reply.RELEASED,
    }
    assert await cells.release(hold, {KEY: b"b"}) == {KEY: Reply.FENCED}
    assert (await cells.claim({KEY: KEEP_MS, OTHER: KEEP_MS})).answers == {KEY: b"a", OTHER: b""}


@pytest.mark.parametrize("applied", [False, True])
@virtual
async def test_a_claim_without_an_answer_is_ended_before_the_next_one(applied):
    store, _ = on_virtual_time()
    cells = Cells(store, CountingDice(), lease_ms=60_000, waits_for_store=False)
    store.silence("claim", lambda want: want.parts[0].key == KEY, applied=applied)
    hold = await cells.claim({KEY: KEEP_MS, OTHER: KEEP_MS})
    assert hold.answers == {KEY: NoAnswer("no answer for this one"), OTHER: b""}
    store.arm("release.before")
    assert (await cells.claim({KEY: KEEP_MS})).answers == {KEY: NoAnswer("no answer")}
    assert (await cells.claim({KEY: KEEP_MS})).answers == {KEY: b""}
    assert await cells.release(hold, {OTHER: b"a"}) == {OTHER: Reply.RELEASED}


# --- anything may happen --------------------------------------------------------------------


class Network:
    """A way to a store that loses requests and replies, and delays requests."""

    def __init__(self, store, chance: random.Random) -> None:
        self._store = store
        self._chance = chance
        self._late: set[asyncio.Task] = set()

    async def claim(self, wants):
        return await self._call(self._store.claim, wants)

    async def release(self, releases):
        return await self._call(self._store.release, releases)

    async def _call(self, call, asked):
        await asyncio.sleep(self._chance.random() * 0.02)
        match self._chance.choices(["", "lost", "late", "reply lost", "in part"], [6, 1, 1, 1, 1])[
            0
        ]:
            case "lost":
                raise StoreUnavailable("lost")
            case "late":
                self._late.add(asyncio.create_task(self._apply_late(call, asked)))
                raise StoreUnavailable("late")
            case "reply lost":
                await call(asked)
                raise StoreUnavailable("reply lost")
            case "in part":
                answers = [*await call(asked)]
                answers[self._chance.randrange(len(answers))] = NoAnswer("in part")
                return ClaimAnswers.of(asked, answers) if isinstance(asked, Wants) else answers
            case _:
                return await call(asked)

    async def _apply_late(self, call, asked) -> None:
        await asyncio.sleep(self._chance.random() * 100)
        await call(asked)


class SeededDice(CountingDice):
    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    def fraction(self) -> float:
        return self._chance.random()


async def edit_through_a_network(seed: int, *, idempotent: bool) -> None:
    chance = random.Random(seed)
    store = MemoryStore(clock=now_ms)

    def added(name: bytes) -> Edit:
        def add(memo: bytes, _now_ms: int) -> bytes | None:
            is_there = idempotent and name in memo.split()
            return None if is_there else memo + name + b" "

        return Edit(add, 10**9)

    async def work(worker: int) -> None:
        cells = Cells(
            Network(store, chance), SeededDice(chance), lease_ms=60_000, idempotent=idempotent
        )
        for number in range(4):
            edit = added(b"%d.%d" % (worker, number))
            keys = [KEY] if number % 2 else [KEY, OTHER]
            answers = await cells.edit(dict.fromkeys(keys, edit), patience_s=3600)
            assert all(isinstance(answer, bytes) for answer in answers.values())

    await asyncio.gather(*[work(worker) for worker in range(3)])
    await asyncio.sleep(1000)
    one, other = await store.peek([KEY, OTHER])
    assert sorted(one.memo.split()) == [b"%d.%d" % (w, n) for w in range(3) for n in range(4)]
    assert sorted(other.memo.split()) == [b"%d.%d" % (w, n) for w in range(3) for n in (0, 2)]


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_whatever_a_network_does_every_edit_is_applied_once(seed, idempotent):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(edit_through_a_network(seed, idempotent=idempotent))


# --- requests and answers -------------------------------------------------------------------


async def test_the_answers_to_a_claim_are_values_or_reasons():
    store = MemoryStore()
    cells, others = Cells(store, SystemDice(), lease_ms=1000), Cells(store, SystemDice())
    keeps = {KEY: KEEP_MS, OTHER: 2}
    hold = await cells.claim(keeps)
    assert hold.answers == {KEY: b"", OTHER: b""}
    replies = await cells.release(hold, {KEY: b"a", OTHER: None})
    assert replies == dict.fromkeys(keeps, Reply.RELEASED)
    assert (await cells.claim(keeps)).answers == {KEY: b"a", OTHER: b""}
    with pytest.raises(CellBusy) as raised:
        value_or_raise((await others.claim({KEY: 1})).answers[KEY])
    assert 0 < raised.value.left_ms <= 1000


async def test_a_record_that_is_done_is_not_a_cell():
    store = MemoryStore()
    await store.remember(Memories.of([Memory(OTHER, b"g" * 16, Fate.DELIVERED, 60_000)]))
    with pytest.raises(StoreError, match=f"{OTHER.hex()} is an event's"):
        await Cells(store, SystemDice()).claim({KEY: 1, OTHER: 1})


@pytest.mark.parametrize(
    ("reply", "lease_runs", "written"),
    [
        (Reply.RELEASED, True, True),
        (Reply.RELEASED, False, True),
        (Reply.FENCED, True, True),
        (Reply.FENCED, False, False),
        (NoAnswer("no answer"), True, False),
    ],
)
async def test_a_release_that_is_fenced_while_the_lease_runs_was_applied_before(
    reply, lease_runs, written
):
    class Replying(MemoryStore):
        async def release(self, releases):
            return [reply] * len(releases)

    lease_ms = 60_000 if lease_runs else 0
    cells = Cells(Replying(), SystemDice(), lease_ms=lease_ms, waits_for_store=False)
    answers = await cells.edit({KEY: Edit(add_one, KEEP_MS)}, patience_s=0)
    assert (answers[KEY] == b"1") is written
