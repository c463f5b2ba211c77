import asyncio
from contextlib import asynccontextmanager

import pytest
from tests.faults.doubles import CountingDice, FaultyStore, ScriptedSink, event, now_ms, virtual

from oncebridge import Gateway, StoreError, StoreUnavailable, Verdict, Yes
from oncebridge.base.clock import SystemDice
from oncebridge.engine import pauses
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore
from oncebridge.testing import ManualClock

DICE = SystemDice()


@asynccontextmanager
async def opened(path):
    store = SQLiteStore(path)
    await store.open()
    try:
        yield store
    finally:
        await store.aclose()


def memory():
    return FaultyStore(MemoryStore(clock=now_ms))


@virtual
async def test_nothing_is_paused_at_first():
    assert await pauses.paused(memory(), ["crm", "lake"]) == [False, False]


@virtual
async def test_the_named_routes_are_paused_and_no_others():
    store = memory()
    await pauses.pause(store, ["crm", "erp"], CountingDice())
    assert await pauses.paused(store, ["crm", "lake", "erp"]) == [True, False, True]


@virtual
async def test_resuming_tells_which_were_paused():
    store = memory()
    await pauses.pause(store, ["crm"], CountingDice())
    assert await pauses.resume(store, ["crm", "lake"]) == [True, False]
    assert await pauses.paused(store, ["crm"]) == [False]
    assert await pauses.resume(store, ["crm"]) == [False]


@virtual
async def test_pausing_twice_is_pausing_once():
    store = memory()
    for _ in range(3):
        await pauses.pause(store, ["crm"], CountingDice())
    await pauses.resume(store, ["crm"])
    assert await pauses.paused(store, ["crm"]) == [False]


async def test_a_pause_lasts_for_years_and_no_purge_ends_it():
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await pauses.pause(store, ["crm"], CountingDice())
    for _ in range(5):
        clock.advance(365 * 24 * 3600 * 1000)
        await store.purge(100_000)
    assert await pauses.paused(store, ["crm"]) == [True]


@virtual
async def test_who_pauses_hears_that_the_store_did_not_answer():
    store = memory()
    store.silence("remember")
    with pytest.raises(StoreUnavailable):
        await pauses.pause(store, ["crm"], CountingDice())
    store.arm("remember.before")
    with pytest.raises(StoreUnavailable):
        await pauses.pause(store, ["crm"], CountingDice())
    assert await pauses.paused(store, ["crm"]) == [False]


@virtual
async def test_events_pass_on_a_route_of_the_same_name_as_a_paused_one_elsewhere():
    """The record of a pause is no event's, whatever the route is called."""
    store = memory()
    await pauses.pause(store, ["default", "", "paused"], CountingDice())
    for route in ("default", "", "paused"):
        gateway = Gateway(store=store, sink=ScriptedSink(), route=route, clock=now_ms)
        (outcome,) = await gateway.process([event()])
        assert outcome.verdict is Verdict.DELIVERED
        await gateway.aclose()


async def test_a_pause_reaches_others_who_use_the_same_file(tmp_path):
    async with opened(tmp_path / "s.db") as here, opened(tmp_path / "s.db") as there:
        await pauses.pause(here, ["crm"], DICE)
        assert await pauses.paused(there, ["crm", "lake"]) == [True, False]
        assert await pauses.resume(there, ["crm"]) == [True]
        assert await pauses.paused(here, ["crm"]) == [False]


async def test_a_pause_lasts_over_a_restart(tmp_path):
    async with opened(tmp_path / "s.db") as store:
        await pauses.pause(store, ["crm"], DICE)
    async with opened(tmp_path / "s.db") as store:
        assert await pauses.paused(store, ["crm"]) == [True]


async def test_many_who_pause_and_resume_at_once_leave_one_state(tmp_path):
    async with opened(tmp_path / "s.db") as here, opened(tmp_path / "s.db") as there:
        for _ in range(5):
            await asyncio.gather(
                *[pauses.pause(store, ["crm", "lake"], DICE) for store in (here, there) * 5],
                *[pauses.resume(store, ["crm", "lake"]) for store in (here, there) * 5],
            )
            assert await pauses.paused(here, ["crm", "lake"]) == await pauses.paused(
                there, ["crm", "lake"]
            )


async def test_a_store_that_is_gone_is_said(tmp_path):
    async with opened(tmp_path / "s.db") as store:
        await store.aclose()
        with pytest.raises(StoreError):
            await pauses.paused(store, ["crm"])
        with pytest.raises(StoreError):
            await pauses.pause(store, ["crm"], DICE)


@virtual
async def test_what_is_under_way_when_a_route_is_paused_is_not_touched():
    store = memory()
    sink = ScriptedSink(otherwise=Yes())
    gateway = Gateway(store=store, sink=sink, route="crm", clock=now_ms, dice=CountingDice())
    await gateway.process([event()])
    await pauses.pause(store, ["crm"], CountingDice())
    (outcome,) = await gateway.process([event()])
    assert outcome.verdict is Verdict.DUPLICATE, "who pauses a gateway is who looks: the service"
    await gateway.aclose()
