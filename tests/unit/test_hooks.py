import logging

import pytest
from tests.faults.doubles import Bench, ScriptedSink, event, virtual

from oncebridge import Decision, Event, No, Unreadable, Verdict
from oncebridge.hooks import tell


@virtual
async def test_every_arrival_is_told_once_with_its_outcome():
    told = []
    async with Bench(hooks=[told.append], route="crm") as bench:
        outcomes = await bench.process(event(), event(), b"rubbish", event({"n": 2}))
        assert len(told) == 4
        assert {decision.route for decision in told} == {"crm"}
        assert sorted(d.outcome.verdict for d in told) == sorted(o.verdict for o in outcomes)
        (unreadable,) = [d.event for d in told if isinstance(d.event, Unreadable)]
        assert unreadable.raw == b"rubbish"
        assert all(d.outcome in outcomes for d in told)


@virtual
async def test_what_is_handed_back_is_told_too():
    told = []
    async with Bench(hooks=[told.append], sink=ScriptedSink(No("refused"))) as bench:
        outcome = await bench.one(event())
        (decision,) = told
        assert decision.outcome == outcome
        assert isinstance(decision.event, Event)


@virtual
async def test_what_ends_in_an_error_is_told_as_failed():
    told = []
    async with Bench(hooks=[told.append]) as bench:
        bench.store.arm("claim.before", error=RuntimeError("a bug in a driver"))
        with pytest.raises(RuntimeError):
            await bench.process(event({"n": 1}), event({"n": 2}))
        assert [d.outcome.verdict for d in told] == [Verdict.FAILED] * 2
        assert not any(d.outcome.acknowledge for d in told)


# Was a bug: arrivals that come while the gateway is shutting down (or while it could not open its store) are
# counted, but no hook is told: _settle_rest settles what has no flight without one.
@virtual
async def test_what_comes_during_a_shutdown_is_told_as_failed():
    told = []
    async with Bench(hooks=[told.append]) as bench:
        await bench.gateway.drain()
        await bench.process(event({"n": 1}), event({"n": 2}))
        assert [d.outcome.verdict for d in told] == [Verdict.FAILED] * 2


@virtual
async def test_a_hook_that_raises_costs_nothing(caplog):
    told = []

    def broken(decision):
        raise ZeroDivisionError("in a hook")

    async with Bench(hooks=[broken, told.append]) as bench:
        with caplog.at_level(logging.ERROR, "oncebridge"):
            outcome = await bench.one(event())
        assert outcome.verdict is Verdict.DELIVERED
        assert len(told) == 1
    (logged,) = caplog.records
    assert logged.message == "oncebridge.hook_failed"
    assert logged.exc_info[0] is ZeroDivisionError


def test_hooks_are_called_in_their_order(caplog):
    order = []
    decision = Decision("crm", Unreadable(b"", "not-json", ""), None)
    tell([lambda _: order.append(1), lambda _: 1 / 0, lambda _: order.append(2)], decision)
    assert order == [1, 2]
    assert len(caplog.records) == 1


def test_a_decision_cannot_be_changed():
    decision = Decision("crm", Unreadable(b"", "not-json", ""), None)
    with pytest.raises(AttributeError):
        decision.route = "other"
