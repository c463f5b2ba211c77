"""Every fault of the wire, at every operation of every store."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from functools import partial

import pytest
from tests.size import full, some

from oncebridge.errors import StoreUnavailable

from . import wired
from .kinds import QUICK, SHARED, WIRED, Kind, Running
from .operations import (
    OPERATIONS,
    UPKEEP,
    Claiming,
    ClaimingMany,
    Committing,
    Peeking,
    Releasing,
)
from .proxy import Fault, Proxy
from .wire_faults import GRACE_S, LATE_S, TIMEOUT_S, Trial, complaints, is_silent, patiently

_SOME_OF_IT = (Fault.RESET_BEFORE, Fault.RESET_AFTER, Fault.CUT)
_STAYS = (Fault.SWALLOW, Fault.HALF_OPEN, Fault.LATE_REPLY, Fault.LATE_REQUEST)
_QUICK = (Fault.REFUSE, Fault.RESET_AFTER, Fault.SWALLOW)
_HANGS = (Fault.SWALLOW, Fault.TRICKLE, Fault.HALF_OPEN)


def _named(fault: Fault) -> str:
    return fault.value.replace(" ", "-")


@pytest.mark.parametrize("fault", some(Fault, _QUICK), ids=_named)
async def test_what_befalls_a_request_on_its_way_changes_no_record(
    shared: Running, fault: Fault
) -> None:
    # Where the connection stays, the server may think that we are still there.
    both = (False, True) if fault in _STAYS else (False,)
    trials = [
        Trial(operation(), fault, elsewhere=elsewhere)
        for operation in OPERATIONS
        for elsewhere in both
    ]
    assert await complaints(shared, trials) == []


@pytest.mark.full
async def test_upkeep_ends_in_time_too(shared: Running) -> None:
    faults = set(Fault) - {Fault.CRUMBS}
    trials = [Trial(operation(), f, is_warm=False) for operation in UPKEEP for f in faults]
    assert await complaints(shared, trials) == []


@pytest.mark.full
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("fault", _SOME_OF_IT, ids=_named)
async def test_an_operation_may_be_broken_off_at_any_of_its_exchanges(
    shared: Running, fault: Fault, after: int
) -> None:
    # A store that has just been opened has most to say to its server.
    trials = [Trial(operation(), fault, after=after, is_warm=False) for operation in OPERATIONS]
    assert await complaints(shared, trials) == []


@pytest.mark.parametrize("kind", some([kind for kind in SHARED if kind.lies], QUICK), ids=repr)
async def test_an_answer_that_says_nothing_is_no_answer(
    kind: Kind, server_of: Callable[[Kind], Running]
) -> None:
    trials = [
        Trial(operation(), Fault.GARBAGE, garbage=lie, is_warm=False)
        for operation in (*OPERATIONS, *UPKEEP)
        for lie in kind.lies
    ]
    assert await complaints(server_of(kind), trials) == []


@pytest.mark.full
async def test_of_a_large_batch_any_part_may_be_lost(shared: Running) -> None:
    trials = [
        Trial(ClaimingMany(shared.kind.many), fault, after=after)
        for fault in (*_SOME_OF_IT, *_HANGS)
        for after in (0, 1)
    ]
    assert await complaints(shared, trials) == []


async def test_a_store_that_cannot_be_opened_says_so_and_opens_later(shared: Running) -> None:
    told = await asyncio.gather(*(_open_through(shared, fault) for fault in Fault))
    assert [one for one in told if one] == []


async def _open_through(running: Running, fault: Fault) -> str:
    now = asyncio.get_running_loop().time
    with Proxy(running.port, late_s=LATE_S) as proxy:
        proxy.strike(fault)
        async with aclosing(running.store(port=proxy.port, timeout_s=TIMEOUT_S)) as store:
            began = now()
            try:
                await store.open()
            except StoreUnavailable:
                pass
            except Exception as error:  # noqa: BLE001 - this is what must not happen
                return f"{fault.value}: raised {type(error).__name__}: {error}"
            else:
                if fault is not Fault.CRUMBS:
                    return f"{fault.value}: opened all the same"
            if now() - began > TIMEOUT_S + GRACE_S:
                return f"{fault.value}: took {now() - began:.1f} s"
            proxy.heal()
            await patiently(store.open)
            later = Trial(Claiming(), fault)
            await later.again(store, "opened later")
    return "; ".join(later.complaints)


async def test_connections_that_the_server_closed_are_no_reason_to_fail(shared: Running) -> None:
    with Proxy(shared.port) as proxy:
        async with shared.store(port=proxy.port, timeout_s=5) as store:
            for _ in range(3):
                operations = [Claiming() for _ in range(8)]
                answers = await asyncio.gather(*(one.ask(store) for one in operations))
                assert all(o.accepts(a) for o, a in zip(operations, answers, strict=True))
                assert proxy.connections
                proxy.hang_up()
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.RESET_AFTER, Fault.HALF_OPEN], ids=_named)
async def test_a_pool_whose_connections_all_broke_works_again(
    shared: Running, fault: Fault
) -> None:
    with Proxy(shared.port) as proxy:
        async with shared.store(port=proxy.port, timeout_s=TIMEOUT_S) as store:
            before = [Claiming() for _ in range(16)]
            await asyncio.gather(*(patiently(partial(one.ask, store)) for one in before))
            proxy.strike(fault)
            struck = await asyncio.gather(
                *(Claiming().ask(store) for _ in before), return_exceptions=True
            )
            assert [answer for answer in struck if not _is_refusal(answer)] == []
            proxy.heal()
            trials = [Trial(one, fault) for one in before]
            await asyncio.gather(*(trial.again(store, "later") for trial in trials))
            assert [complaint for trial in trials for complaint in trial.complaints] == []


async def test_a_call_that_is_cancelled_leaves_no_answer_behind(shared: Running) -> None:
    with Proxy(shared.port, late_s=0.2) as proxy:
        async with shared.store(port=proxy.port, timeout_s=5) as store:
            operations = [Claiming() for _ in range(24)]
            await asyncio.gather(*(operation.ask(store) for operation in operations))
            proxy.strike(Fault.LATE_REPLY)
            asking = [asyncio.create_task(Claiming().ask(store)) for _ in operations]
            for task in asking:
                await asyncio.sleep(0.01)
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            assert proxy.struck
            proxy.heal()
            # An answer that was meant for another would name the other's claim.
            answers = await asyncio.gather(*(operation.ask(store) for operation in operations))
            accepted = zip(operations, answers, strict=True)
            assert [a for operation, a in accepted if not operation.accepts(a)] == []


# --- a test of the tests ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("store_class", "fault", "told"),
    [
        (wired.Endless, Fault.SWALLOW, "never ends"),
        (wired.Reusing, Fault.LATE_REPLY, "another claim was answered"),
        (wired.Renaming, Fault.RESET_AFTER, "after the fault: answered Busy"),
        *full(
            (wired.Endless, Fault.HALF_OPEN, "never ends"),
            (wired.TimedByTheRead, Fault.TRICKLE, "never ends"),
            (wired.Leaking, Fault.REFUSE, "raised ConnectionResetError"),
            (wired.Leaking, Fault.CUT, "raised IncompleteReadError"),
            (wired.Leaking, Fault.GARBAGE, "raised"),
            (wired.Stubborn, Fault.HALF_OPEN, "after the fault: still no answer"),
            (wired.Silent, Fault.RESET_BEFORE, "answered None"),
        ),
    ],
    ids=lambda value: _named(value) if isinstance(value, Fault) else getattr(value, "__name__", ""),
)
async def test_a_store_that_is_wrong_in_one_way_is_convicted(
    server_of: Callable[[Kind], Running],
    store_class: type[wired.WiredStore],
    fault: Fault,
    told: str,
) -> None:
    trials = [Trial(operation(), fault) for operation in (Claiming, Committing, Releasing, Peeking)]
    found = await complaints(server_of(WIRED), trials, opened=store_class)
    assert any(told in complaint for complaint in found), found


@pytest.mark.full
async def test_a_store_that_is_right_passes_all_trials(
    server_of: Callable[[Kind], Running],
) -> None:
    trials = [Trial(operation(), fault) for operation in OPERATIONS for fault in Fault]
    assert await complaints(server_of(WIRED), trials) == []


def _is_refusal(answer: object) -> bool:
    return isinstance(answer, StoreUnavailable) or is_silent(answer)
