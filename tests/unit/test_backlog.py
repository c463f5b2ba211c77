import asyncio

import pytest
from tests.faults.doubles import CountingDice, FaultyStore, now, now_ms, virtual

from oncebridge import Books, StoreError
from oncebridge.engine import backlog
from oncebridge.engine.backlog import Backlog, PendingWrite
from oncebridge.engine.verdict import First
from oncebridge.events.key import Part
from oncebridge.stores.api import Commit, Fate, Memories, Memory, NoAnswer, Release, Want, Wants
from oncebridge.stores.memory import MemoryStore

DAY_MS = 86_400_000


def key(n):
    return f"key {n}".encode()


class Owing:
    """A backlog over a store that can fail."""

    def __init__(self):
        self.store = FaultyStore(MemoryStore(clock=now_ms))
        self.books = Books()
        self.dice = CountingDice()
        self.backlog = Backlog(self.store, self.books, self.dice)

    async def claim(self, n):
        token, generation = self.dice.tokens(2)
        await self.store.inner.claim(
            Wants.of([Want((Part(key(n)),), token, generation, 30_000, DAY_MS)])
        )
        return token, generation

    def commit(self, n, generation):
        return self.delivered(Commit(key(n), generation, Fate.DELIVERED, DAY_MS))

    def memory(self, n):
        return self.delivered(Memory(key(n), self.dice.tokens(1)[0], Fate.DELIVERED, DAY_MS))

    def delivered(self, asked, content=b"a"):
        return PendingWrite(asked, now(), content, First("id", 0), proves_duplicate=True)

    async def fate(self, n):
        (record,) = await self.store.inner.peek([key(n)])
        return record and record.fate


@virtual
async def test_a_debt_is_paid_at_once_if_the_store_is_there():
    owing = Owing()
    _, generation = await owing.claim(1)
    owing.backlog.add([owing.commit(1, generation)])
    assert len(owing.backlog) == 1
    began = now()
    await owing.backlog.settle(10)
    assert now() == began
    assert len(owing.backlog) == 0
    assert await owing.fate(1) is Fate.DELIVERED


@pytest.mark.parametrize("side", ["before", "after"])
@virtual
async def test_a_debt_is_tried_until_it_lands_with_growing_pauses(side):
    owing = Owing()
    _, generation = await owing.claim(1)
    owing.store.arm(f"commit.{side}", times=1e9, for_s=300)
    owing.backlog.add([owing.commit(1, generation)])
    await asyncio.sleep(299)
    assert len(owing.backlog) == 1
    assert 10 <= owing.store.calls["commit"] <= 25
    assert owing.books.store_errors == owing.store.calls["commit"]
    await owing.backlog.settle(60)
    assert len(owing.backlog) == 0
    assert await owing.fate(1) is Fate.DELIVERED


@virtual
async def test_single_items_without_an_answer_stay():
    owing = Owing()
    owing.store.silence("remember", lambda asked: asked.key == key(2), times=2)
    owing.backlog.add([owing.memory(n) for n in range(4)])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(owing.backlog) == 1
    await owing.backlog.settle(60)
    assert [await owing.fate(n) for n in range(4)] == [Fate.DELIVERED] * 4
    asked = [memory.key for memory in owing.store.asked["remember"]]
    assert asked.count(key(2)) == 3
    assert asked.count(key(1)) == 1


@virtual
async def test_commits_and_releases_without_an_answer_stay_too():
    owing = Owing()
    _, generation = await owing.claim(1)
    token, _ = await owing.claim(2)
    owing.store.silence("commit", times=2)
    owing.store.silence("release", times=2)
    owing.backlog.add([owing.commit(1, generation), PendingWrite(Release(key(2), token))])
    await owing.backlog.settle(60)
    assert len(owing.backlog) == 0
    assert await owing.fate(1) is Fate.DELIVERED
    (released,) = await owing.store.inner.peek([key(2)])
    assert released.token == b""


@virtual
async def test_the_release_of_a_claim_goes_before_the_memory_of_its_key():
    owing = Owing()
    token, _ = await owing.claim(1)
    owing.backlog.add([PendingWrite(Release(key(1), token))])
    owing.backlog.add([owing.memory(1)])
    await owing.backlog.settle(10)
    assert await owing.fate(1) is Fate.DELIVERED


@virtual
async def test_several_debts_of_one_key_are_paid_in_their_order():
    owing = Owing()
    token, _ = await owing.claim(1)
    owing.store.arm("release.before", times=3)
    owing.backlog.add(
        [PendingWrite(Release(key(1), token, memo=b"a")), owing.memory(1), owing.memory(1)]
    )
    await owing.backlog.settle(60)
    assert len(owing.backlog) == 0
    assert await owing.fate(1) is Fate.DELIVERED


@virtual
async def test_more_than_a_chunk_is_paid_in_several_calls():
    owing = Owing()
    owing.backlog.add([owing.memory(n) for n in range(1200)])
    await owing.backlog.settle(10)
    assert len(owing.backlog) == 0
    assert owing.store.calls["remember"] == 3
    assert {await owing.fate(n) for n in range(1200)} == {Fate.DELIVERED}


@virtual
async def test_too_many_debts_cost_the_oldest_and_are_counted(monkeypatch):
    monkeypatch.setattr(backlog, "_MOST", 10)
    owing = Owing()
    owing.store.arm("remember.before", times=1e9, for_s=5)
    owing.backlog.add([owing.memory(n) for n in range(8)])
    await asyncio.sleep(1)
    owing.backlog.add([owing.memory(n) for n in range(8, 13)])
    assert len(owing.backlog) == 10
    assert owing.books.forgotten == 3
    await owing.backlog.settle(60)
    assert [await owing.fate(n) for n in range(13)] == [None] * 3 + [Fate.DELIVERED] * 10


@virtual
async def test_what_is_owed_while_it_works_is_paid_too():
    owing = Owing()
    owing.store.takes_s = 1
    for n in range(5):
        owing.backlog.add([owing.memory(n)])
        await asyncio.sleep(0.3)
    await owing.backlog.settle(60)
    assert len(owing.backlog) == 0
    assert [await owing.fate(n) for n in range(5)] == [Fate.DELIVERED] * 5


@virtual
async def test_settling_does_not_wait_longer_than_told():
    owing = Owing()
    owing.store.arm("remember.before", times=1e9)
    owing.backlog.add([owing.memory(1)])
    began = now()
    await owing.backlog.settle(3)
    assert now() - began == pytest.approx(3)
    assert len(owing.backlog) == 1
    await owing.backlog.aclose()


@virtual
async def test_settling_nothing_takes_no_time():
    owing = Owing()
    began = now()
    await owing.backlog.settle(3)
    owing.backlog.add([])
    await owing.backlog.settle(3)
    assert now() == began
    await owing.backlog.aclose()


@virtual
async def test_closing_stops_the_work():
    owing = Owing()
    owing.store.arm("remember.before", times=1e9)
    owing.backlog.add([owing.memory(1)])
    await asyncio.sleep(1)
    await owing.backlog.aclose()
    calls = owing.store.calls["remember"]
    await asyncio.sleep(60)
    assert owing.store.calls["remember"] == calls


@virtual
async def test_one_kind_of_debt_that_fails_does_not_hold_up_the_others_for_ever():
    owing = Owing()
    _, generation = await owing.claim(1)
    token, _ = await owing.claim(2)
    owing.store.arm("release.before", times=4, error=StoreError("not passing"))
    owing.backlog.add([PendingWrite(Release(key(2), token)), owing.commit(1, generation)])
    await owing.backlog.settle(60)
    assert len(owing.backlog) == 0
    assert await owing.fate(1) is Fate.DELIVERED


@virtual
async def test_an_answer_that_refuses_is_an_answer():
    owing = Owing()
    _, generation = await owing.claim(1)
    stranger = bytes(16)
    owing.backlog.add(
        [owing.commit(1, stranger), PendingWrite(Release(key(1), stranger)), owing.memory(1)]
    )
    await owing.backlog.settle(10)
    assert len(owing.backlog) == 0
    assert await owing.fate(1) is None
    assert generation != stranger


@virtual
async def test_a_silent_store_is_not_asked_without_a_pause():
    owing = Owing()
    owing.store.silence("remember", times=1e9)
    owing.backlog.add([owing.memory(1)])
    await asyncio.sleep(10)
    assert owing.store.calls["remember"] < 10
    assert isinstance(
        (await owing.store.remember(Memories.of([owing.memory(1).asked])))[0], NoAnswer
    )
    await owing.backlog.aclose()


@virtual
async def test_what_is_owed_is_known_by_its_identifying_key_until_its_window_is_over():
    owing = Owing()
    owing.store.arm("commit.before", times=1e9)
    _, generation = await owing.claim(1)
    write = owing.commit(1, generation)
    other = PendingWrite(
        Commit(key(2), generation, Fate.DELIVERED, DAY_MS),
        now(),
        b"a",
        First("id", 0),
    )
    owing.backlog.add([write, other, PendingWrite(Release(key(3), generation))])
    ends = now() + DAY_MS / 1000
    assert owing.backlog.delivered(key(1), ends - 1) is write
    assert owing.backlog.delivered(key(1), ends) is None
    assert owing.backlog.delivered(key(2), now()) is None, "a further tier proves nothing"
    assert owing.backlog.delivered(key(3), now()) is None, "a release proves nothing"
    await owing.backlog.aclose()


@virtual
async def test_a_debt_that_is_paid_late_ends_when_its_window_does():
    owing = Owing()
    owing.store.arm("commit.before", times=1e9, for_s=3600)
    _, generation = await owing.claim(1)
    ends_ms = now_ms() + DAY_MS
    owing.backlog.add([owing.commit(1, generation)])
    await owing.backlog.settle(7200)
    (record,) = await owing.store.inner.peek([key(1)])
    assert record.until_ms == pytest.approx(ends_ms, abs=2)


@virtual
async def test_debts_are_paid_at_once_when_asked_and_one_that_cannot_be_keeps_no_other():
    owing = Owing()
    owing.store.arm("remember.before", times=1e9, for_s=100)
    owing.backlog.add([owing.memory(n) for n in range(3)])
    await asyncio.sleep(101)  # the next try is many seconds away
    owing.store.silence("remember", lambda asked: asked.key == key(1), times=1e9)
    calls, began = owing.store.calls["remember"], now()
    assert await owing.backlog.flush()
    assert (owing.store.calls["remember"], now()) == (calls + 1, began)
    assert [await owing.fate(n) for n in range(3)] == [Fate.DELIVERED, None, Fate.DELIVERED]
    assert len(owing.backlog) == 1
    await owing.backlog.aclose()


@virtual
async def test_nobody_waits_for_a_payment_that_is_under_way():
    owing = Owing()
    owing.store.takes_s = 5
    owing.store.arm("remember.before", times=1e9)
    owing.backlog.add([owing.memory(1)])
    await asyncio.sleep(1)
    began = now()
    await asyncio.gather(*[owing.backlog.flush() for _ in range(50)])
    assert now() == began
    await owing.backlog.aclose()


@virtual
async def test_a_debt_that_cannot_be_paid_does_not_delay_new_ones():
    owing = Owing()
    owing.store.silence("remember", lambda asked: asked.key == key(1), times=1e9)
    owing.backlog.add([owing.memory(1)])
    await asyncio.sleep(300)  # by now it is tried twice a minute
    owing.backlog.add([owing.memory(2)])
    await asyncio.sleep(1)
    assert await owing.fate(2) is Fate.DELIVERED
    await owing.backlog.aclose()
