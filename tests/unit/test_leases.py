"""The heartbeat: every third of a lease while something is held, and never otherwise."""

import asyncio
from itertools import count, pairwise

import pytest
from tests.faults.doubles import virtual

from oncebridge.engine.counters import Books
from oncebridge.engine.leases import Lease, Leases
from oncebridge.errors import StoreUnavailable
from oncebridge.stores.api import NoAnswer, Reply

LEASE_S, BEAT_S = 30, 10
numbers = count(1)


def now():
    return asyncio.get_running_loop().time()


class Store:
    """Prolongs everything, and remembers when; what is in *fenced* is another's by now."""

    def __init__(self):
        self.beats = []
        self.fenced = set()
        self.silent = set()
        self.error = None

    async def extend(self, extensions):
        self.beats.append((round(now(), 3), [extension.key for extension in extensions]))
        if self.error:
            raise self.error
        return [self.answer(extension.key) for extension in extensions]

    def answer(self, key):
        if key in self.silent:
            return NoAnswer("not this one")
        return Reply.FENCED if key in self.fenced else Reply.EXTENDED


def make():
    store, books = Store(), Books()
    return store, books, Leases(store, books, lease_ms=LEASE_S * 1000)


def lease(*, keys=1, give_up_s=1e9, by_row=None):
    names = [next(numbers).to_bytes(16) for _ in range(keys)]
    rows = {name: row for row, name in enumerate(names)}
    made = Lease(rows, names[0], names[0], now() + LEASE_S, now() + give_up_s)
    if by_row is not None:
        made.by_row = by_row
        by_row.extend([made] * keys)
    return made


@virtual
async def test_the_heart_beats_every_third_of_a_lease():
    store, _, leases = make()
    one = lease()
    began = now()
    leases.add(one, asyncio.get_running_loop())
    await asyncio.sleep(35)
    assert [at - began for at, _ in store.beats] == pytest.approx([10, 20, 30])
    assert one.ends == pytest.approx(began + 30 + LEASE_S)
    await leases.aclose()


@virtual
async def test_nothing_is_prolonged_that_is_not_held_any_more():
    store, _, leases = make()
    one, other = lease(), lease()
    leases.add(one, asyncio.get_running_loop())
    leases.add(other, asyncio.get_running_loop())
    await asyncio.sleep(12)
    leases.discard([one, None])
    await asyncio.sleep(10)
    assert [keys for _, keys in store.beats] == [[*one.keys, *other.keys], [*other.keys]]
    leases.discard([other])
    await asyncio.sleep(100)
    assert len(store.beats) == 2


@virtual
async def test_a_hold_that_comes_after_a_pause_is_prolonged_within_a_third():
    """The timer that runs since an earlier one serves it, too; those that are gone are left out."""
    store, _, leases = make()
    for _ in range(9):  # a batch of one each second
        one = lease()
        leases.add(one, asyncio.get_running_loop())
        await asyncio.sleep(0.5)
        leases.discard([one])
        await asyncio.sleep(0.5)
    began, last = now(), lease()
    leases.add(last, asyncio.get_running_loop())
    await asyncio.sleep(21)
    times = [began, *[at for at, _ in store.beats], began + 21]
    assert all(keys == [*last.keys] for _, keys in store.beats)
    assert max(after - before for before, after in pairwise(times)) <= BEAT_S
    await leases.aclose()


@virtual
async def test_holds_that_overlap_are_never_without_a_beat_for_longer_than_a_third():
    store, _, leases = make()
    previous = None
    for _ in range(19):
        one = lease()
        leases.add(one, asyncio.get_running_loop())
        leases.discard([previous])
        previous = one
        await asyncio.sleep(3)
    times = [at for at, _ in store.beats]
    assert len(times) == 5
    assert {round(b - a, 3) for a, b in pairwise(times)} == {BEAT_S}
    await leases.aclose()


@virtual
async def test_what_is_over_is_not_kept_alive():
    store, _, leases = make()
    stuck = lease(give_up_s=15)
    leases.add(stuck, asyncio.get_running_loop())
    await asyncio.sleep(100)
    assert [keys for _, keys in store.beats if keys] == [[*stuck.keys]]
    await leases.aclose()


@virtual
async def test_what_another_took_is_lost_and_its_send_broken_off():
    store, books, leases = make()
    one, ending = lease(), lease()
    ending.ending = True
    one.sending = asyncio.get_running_loop().create_task(asyncio.sleep(1000))
    store.fenced = {*one.keys, *ending.keys}
    leases.add(one, asyncio.get_running_loop())
    leases.add(ending, asyncio.get_running_loop())
    await asyncio.sleep(11)
    assert (bool(one.lost), bool(ending.lost), books.lease_lost) == (True, False, 1)
    assert one.sending.cancelled()
    await leases.aclose()


@virtual
async def test_one_lost_key_of_a_lease_leaves_the_others_held():
    store, books, leases = make()
    by_row = []
    shared = lease(keys=3, by_row=by_row)
    first, second, third = shared.keys
    store.fenced = {second}
    leases.add(shared, asyncio.get_running_loop())
    await asyncio.sleep(11)
    assert (shared.lost, books.lease_lost) == ({1}, 1)
    assert shared.ends == pytest.approx(now() + LEASE_S, abs=2)
    alone = leases.split(shared, [second])
    assert (by_row[1] is alone, by_row[0] is shared, by_row[2] is shared) == (True, True, True)
    assert (bool(alone.lost), bool(shared.lost)) == (True, False)
    await asyncio.sleep(10)
    assert store.beats[-1][1] == [first, third]
    await leases.aclose()


@virtual
async def test_keys_without_an_answer_are_not_prolonged_with_the_others():
    store, _, leases = make()
    by_row = []
    shared = lease(keys=3, by_row=by_row)
    before = shared.ends
    first, second, third = shared.keys
    store.silent = {third}
    leases.add(shared, asyncio.get_running_loop())
    await asyncio.sleep(11)
    assert by_row[0].ends == by_row[1].ends > before
    assert by_row[2].ends == before
    store.silent = set()
    await asyncio.sleep(10)
    assert sorted(store.beats[-1][1]) == sorted([first, second, third])
    assert by_row[2].ends > before
    await leases.aclose()


@virtual
async def test_settled_keys_of_a_lease_are_not_prolonged():
    store, _, leases = make()
    shared = lease(keys=2)
    first, second = shared.keys
    leases.add(shared, asyncio.get_running_loop())
    leases.discard_keys(shared, [first])
    await asyncio.sleep(11)
    assert [keys for _, keys in store.beats] == [[second]]
    leases.discard_keys(shared, [second])
    await asyncio.sleep(30)
    assert len(store.beats) == 1


@virtual
async def test_a_store_that_is_away_stops_no_heart():
    store, books, leases = make()
    store.error = StoreUnavailable("away")
    leases.add(lease(), asyncio.get_running_loop())
    await asyncio.sleep(15)
    store.error = None
    await asyncio.sleep(10)
    assert len(store.beats) == 2
    assert books.store_errors == 1
    await leases.aclose()


@virtual
async def test_nothing_beats_after_the_end():
    store, _, leases = make()
    leases.add(lease(), asyncio.get_running_loop())
    await leases.aclose()
    await asyncio.sleep(100)
    assert store.beats == []


def test_the_heart_beats_in_another_loop_too():
    """What was held in a loop that is over says nothing about this one."""
    store, _, leases = make()

    @virtual
    async def little():
        one = lease()
        leases.add(one, asyncio.get_running_loop())
        leases.discard([one])

    @virtual
    async def long():
        leases.add(lease(), asyncio.get_running_loop())
        await asyncio.sleep(15)
        await leases.aclose()

    little()
    long()
    assert len(store.beats) == 1
