import asyncio
import logging
from collections import Counter
from datetime import timedelta

import pytest
from tests.faults.doubles import After, Bench, ScriptedSink, event, virtual

from oncebridge import Decision, Decisions, Event, No, Outcome, Unreadable, Verdict
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.engine import hooks
from oncebridge.engine.hooks import call_hooks
from oncebridge.engine.router import RouteEntry, Router
from oncebridge.errors import StoreUnavailable
from oncebridge.events.pattern import Pattern
from oncebridge.sinks.api import Unknown, Yes


@virtual
async def test_every_arrival_is_told_once_with_its_outcome():
    told = []
    async with Bench(hooks=[told.extend], route="crm") as bench:
        outcomes = await bench.process(event(), event(), b"rubbish", event({"n": 2}))
        assert len(told) == 4
        assert {decision.route for decision in told} == {"crm"}
        assert sorted(d.outcome.verdict for d in told) == sorted(o.verdict for o in outcomes)
        (unreadable,) = [d.event for d in told if isinstance(d.event, Unreadable)]
        assert unreadable.raw == b"rubbish"
        assert all(d.outcome in outcomes for d in told)


@virtual
async def test_a_hook_is_called_once_for_the_arrivals_with_one_verdict():
    calls = []
    async with Bench(hooks=[calls.append], sink=ScriptedSink(batch=100), route="crm") as bench:
        events = [event({"n": n}) for n in range(30)]
        await bench.process(*events[:10])
        await bench.process(*events)
    told = [(decisions.verdict, len(decisions)) for decisions in calls]
    assert sorted(told) == [
        (Verdict.DELIVERED, 10),
        (Verdict.DELIVERED, 20),
        (Verdict.DUPLICATE, 10),
    ]
    for decisions in calls:
        assert {one.outcome.verdict for one in decisions} == {decisions.verdict}
        assert {one.took_s for one in decisions} == {decisions.took_s}


def test_decisions_are_a_sequence():
    parts = [(Unreadable(b"%d" % n, "not-json", ""), Outcome(Verdict.DEAD, True)) for n in range(4)]
    events, outcomes = zip(*parts, strict=True)
    decisions = Decisions("crm", events, outcomes, 1000, 0.25, [1, 2, 3, 4])
    each = [Decision("crm", e, o, 1000, 0.25, n) for n, (e, o) in enumerate(parts, start=1)]
    assert list(decisions) == each
    assert list(reversed(decisions)) == each[::-1]
    assert (decisions[0], decisions[-1], decisions[1:3]) == (each[0], each[-1], each[1:3])
    assert (len(decisions), each[2] in decisions) == (4, True)
    with pytest.raises(IndexError):
        decisions[4]


@virtual
async def test_what_is_handed_back_is_told_too():
    told = []
    async with Bench(hooks=[told.extend], sink=ScriptedSink(No("refused"))) as bench:
        outcome = await bench.one(event())
        (decision,) = told
        assert decision.outcome == outcome
        assert isinstance(decision.event, Event)


@virtual
async def test_what_ends_in_an_error_is_told_as_failed():
    told = []
    async with Bench(hooks=[told.extend]) as bench:
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
    async with Bench(hooks=[told.extend]) as bench:
        await bench.gateway.drain()
        await bench.process(event({"n": 1}), event({"n": 2}))
        assert [d.outcome.verdict for d in told] == [Verdict.FAILED] * 2


@virtual
async def test_a_hook_that_raises_costs_nothing(caplog):
    told = []

    def broken(decisions):
        raise ZeroDivisionError("in a hook")

    async with Bench(hooks=[broken, told.extend]) as bench:
        with caplog.at_level(logging.ERROR, "oncebridge"):
            outcome = await bench.one(event())
        assert outcome.verdict is Verdict.DELIVERED
        assert len(told) == 1
    (logged,) = caplog.records
    assert logged.message == "oncebridge.hook_failed"
    assert logged.error == "ZeroDivisionError"
    assert "test_hooks.py:" in logged.at
    assert logged.exc_info is None, "its text may quote the event"


# --- when, and how often -------------------------------------------------------------------


@virtual
async def test_it_is_told_when_it_arrived_how_long_it_took_and_which_attempt_it_was():
    told = []
    slow = ScriptedSink(No("refused"), After(3, Yes()))
    async with Bench(hooks=[told.extend], sink=slow) as bench:
        first = bench.clock()
        failed = await bench.one(event())
        await asyncio.sleep(failed.retry_after_ms / 1000)
        await bench.one(event())
    refused, delivered = told
    assert refused.arrived_ms == first
    assert delivered.arrived_ms == first + failed.retry_after_ms
    assert refused.took_s < 0.1
    assert 3 <= delivered.took_s < 3.5
    assert (refused.attempt, delivered.attempt) == (1, 1), "what was refused does not count"


@virtual
async def test_every_round_trip_is_told_with_its_size_and_time():
    trips = []
    async with Bench(trip_hooks=[trips.append], route="crm", sink=ScriptedSink(batch=10)) as bench:
        await bench.process(*[event({"n": n}) for n in range(25)])
        told = Counter((t.place, t.call) for t in trips)
        assert told["store", "claim"] == 1
        assert told["sink", "deliver"] == 3
        assert sorted(t.items for t in trips if t.place == "sink") == [5, 10, 10]
        assert sum(t.items for t in trips if t.call == "commit") == 25
        assert all(t.route == "crm" and t.ok and t.took_s >= 0 for t in trips)


@virtual
async def test_a_round_trip_that_fails_is_told_as_such():
    trips = []
    sink = ScriptedSink(Unknown("cut off"))
    async with Bench(trip_hooks=[trips.append], sink=sink) as bench:
        bench.store.arm("claim.before", error=StoreUnavailable("away"))
        await bench.one(event())
    claims = [t.ok for t in trips if t.call == "claim"]
    assert claims == [False, True], "the claim is repeated"
    (sent,) = [t for t in trips if t.place == "sink"]
    assert not sent.ok
    assert [t.call for t in trips if t.call == "release"], "and it is handed back"


@virtual
async def test_an_event_that_no_route_is_for_is_told_too():
    told = []
    match = Pattern.compile({"source": ["nobody"]})
    async with Bench() as bench:
        dead = MemoryDeadLetters()
        router = Router([RouteEntry(bench.gateway, match)], dead=dead, hooks=[told.extend])
        await router.process([event()])
    (decision,) = told
    assert (decision.route, decision.outcome.verdict) == ("unrouted", Verdict.DEAD)


# --- what is owed --------------------------------------------------------------------------


@virtual
async def test_what_was_only_claimed_is_not_told_as_delivered():
    async with Bench() as bench:
        bench.store.arm("claim.before", times=1e9)
        bench.store.arm("release.before", times=1e9)
        assert (await bench.one(event())).verdict is Verdict.FAILED
        assert bench.gateway.owed == 0
        bench.store.disarm()


@virtual
async def test_what_is_delivered_and_not_recorded_is_told():
    async with Bench() as bench:
        bench.store.arm("commit.before", times=1e9)
        assert (await bench.one(event())).verdict is Verdict.DELIVERED
        assert bench.gateway.owed == 1
        bench.store.disarm()
        await bench.gateway.settle(timedelta(minutes=5))
        assert bench.gateway.owed == 0


# --- tracing -------------------------------------------------------------------------------


class Followed:
    """A tracer that takes down what it is told."""

    def __init__(self, fails=()):
        self.told = []
        self._fails = fails

    def _tell(self, what, value=None):
        self.told.append((what, value))
        if what in self._fails:
            raise ZeroDivisionError(what)

    def arrived(self, route, events):
        self._tell("arrived", route)
        return [self] * len(events)

    def sending(self):
        self._tell("sending")
        return "00-" + "1" * 32 + "-" + "2" * 16 + "-01"

    def ended(self, outcome):
        self._tell("ended", outcome.verdict)


@virtual
async def test_a_tracer_follows_each_arrival_to_its_verdict():
    tracer = Followed()
    async with Bench(tracer=tracer, route="crm") as bench:
        await bench.one(event())
        await bench.one(event())
        assert [d.trace[:6] for d in bench.sink.seen] == ["00-111"]
    assert tracer.told == [
        ("arrived", "crm"),
        ("sending", None),
        ("ended", Verdict.DELIVERED),
        ("arrived", "crm"),
        ("ended", Verdict.DUPLICATE),
    ]


@virtual
async def test_a_tracer_is_asked_once_for_a_batch_and_may_leave_out_events():
    class Second(Followed):
        def arrived(self, route, events):
            self._tell("arrived", [type(each) for each in events])
            return [None, self, None]

    tracer = Second()
    async with Bench(tracer=tracer) as bench:
        await bench.process(event({"n": 1}), event({"n": 2}), b"rubbish")
        assert [bool(d.trace) for d in bench.sink.seen] == [False, True]
    assert tracer.told == [
        ("arrived", [Event, Event, Unreadable]),
        ("sending", None),
        ("ended", Verdict.DELIVERED),
    ]


@pytest.mark.parametrize("answer", [[], [None], [None] * 3, None, 7])
@virtual
async def test_a_tracer_that_does_not_answer_for_each_event_costs_nothing(answer, caplog):
    class Wrong(Followed):
        def arrived(self, route, events):
            return answer

    async with Bench(tracer=Wrong()) as bench:
        for outcome in await bench.process(event({"n": 1}), event({"n": 2})):
            assert outcome.verdict is Verdict.DELIVERED
    assert [r.message for r in caplog.records] == ["oncebridge.hook_failed"]


@pytest.mark.parametrize("step", ["arrived", "sending", "ended"])
@virtual
async def test_a_tracer_that_raises_costs_nothing(step, caplog):
    async with Bench(tracer=Followed(fails=[step])) as bench:
        outcome = await bench.one(event())
        assert outcome.verdict is Verdict.DELIVERED
        assert len(bench.sink.taken) == 1
        assert not bench.gateway.books.in_flight
    assert [r.message for r in caplog.records] == ["oncebridge.hook_failed"]


def test_a_hook_that_always_fails_does_not_fill_the_log(caplog):
    def broken(decisions):
        raise ZeroDivisionError("in a hook")

    for _ in range(250):
        call_hooks([broken], _decisions())
    assert [record.times for record in caplog.records] == [1, 10, 100]


@pytest.fixture(autouse=True)
def nothing_failed_yet():
    hooks._failed.clear()


def test_hooks_are_called_in_their_order(caplog):
    order = []
    call_hooks(
        [lambda _: order.append(1), lambda _: 1 / 0, lambda _: order.append(2)], _decisions()
    )
    assert order == [1, 2]
    assert len(caplog.records) == 1


def _decisions():
    outcome = Outcome(Verdict.DEAD, True)
    return Decisions("crm", [Unreadable(b"", "not-json", "")], [outcome], 0, 0.0, [1])


def test_a_decision_cannot_be_changed():
    decision = Decision("crm", Unreadable(b"", "not-json", ""), None)
    with pytest.raises(AttributeError):
        decision.route = "other"
