"""
Told early, told once: the `settled` callback, and rules that discard.

Whoever passes `settled` answers its own senders by it alone, so every arrival must be told
exactly once, with the outcome that `process` returns, whatever happens on the way.
"""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.size import examples

from oncebridge import Closed, Never, No, Settings, Unknown, Verdict, Yes
from oncebridge.events.event import Unreadable

from .doubles import (
    SEAMS,
    After,
    Bench,
    ScriptedSink,
    VirtualLoop,
    event,
    eventually,
    now,
    rule,
    seconds,
    virtual,
)

SHADOW = Settings(mode="shadow")


class Told:
    """What was told, by index."""

    def __init__(self):
        self.outcomes = {}
        self.twice = []
        self.at = {}

    def __call__(self, index, outcome):
        if index in self.outcomes:
            self.twice.append(index)
        self.outcomes[index] = outcome
        self.at[index] = now()

    def check(self, count, outcomes=None):
        assert self.twice == []
        assert sorted(self.outcomes) == list(range(count))
        if outcomes is not None:
            assert [self.outcomes[index] for index in range(count)] == outcomes


async def told(bench, *arrivals, **more):
    heard = Told()
    outcomes = await bench.process(*arrivals, settled=heard, **more)
    heard.check(len(arrivals), outcomes)
    return outcomes


DISCARD = rule(name="noise", match={"detail-type": ["Noise"]}, discard=True)
BYPASS = rule(name="bypass", match={"detail-type": ["Pass"]}, key="none")
LATEST = rule(
    name="latest",
    match={"detail-type": ["State"]},
    key="id",
    latest={"entity": "detail.e", "version": "detail.v"},
)
MISSING = rule(
    name="missing", match={"detail-type": ["Keyed"]}, key=["detail.none"], on_missing="dead"
)
RULES = (DISCARD, BYPASS, LATEST, MISSING, rule(name="ids", key="id"))


def every_kind():
    """Give a batch in which every verdict occurs that does not need a fault."""
    return [
        event(id="1"),
        event(id="1"),
        event({"other": 1}, id="1"),
        b"no event",
        Unreadable(b"x", "not-json", "line 3: no"),
        event(detail_type="Noise", id="2"),
        event(detail_type="Pass", id="3"),
        event(detail_type="Keyed", id="4"),
        event({"e": "x", "v": 2}, detail_type="State", id="5"),
        event({"e": "x", "v": 1}, detail_type="State", id="6"),
        event({"e": "x", "v": 2}, detail_type="State", id="5"),
    ]


# --- the callback ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Settings(), SHADOW, Settings(order="entity")])
@virtual
async def test_every_kind_of_arrival_is_told_once_with_what_is_returned(mode):
    async with Bench(*RULES, settings=mode) as bench:
        first = await told(bench, *every_kind())
        again = await told(bench, *every_kind())
        assert all(outcome.acknowledge for outcome in [*first, *again])


@pytest.mark.parametrize(
    "answer", [No("no"), Unknown("reset"), Closed("401"), Never("400"), ZeroDivisionError()]
)
@virtual
async def test_what_the_sink_does_not_take_is_told_once(answer):
    async with Bench(*RULES, sink=ScriptedSink(otherwise=answer)) as bench:
        for _ in range(4):
            await told(bench, *every_kind())
            await asyncio.sleep(1)


@virtual
async def test_an_empty_batch_is_told_nothing():
    async with Bench() as bench:
        assert await told(bench) == []


@virtual
async def test_the_quick_are_told_before_the_slow():
    slow = event({"n": "slow"})
    sink = ScriptedSink(otherwise=lambda one: After(7, Yes()) if one.event.raw == slow else Yes())
    async with Bench(sink=sink) as bench:
        heard, began = Told(), now()
        await bench.process(slow, event(), b"bad", slow, settled=heard)
        assert heard.at[1] - began < 0.1
        assert heard.at[2] - began < 0.1
        assert heard.at[0] - began == pytest.approx(7)
        assert heard.outcomes[3].verdict is Verdict.DUPLICATE


@virtual
async def test_dead_letters_that_take_their_time_hold_up_nobody_else():
    async with Bench() as bench:
        put = bench.dead.put

        async def slowly(letters):
            await asyncio.sleep(8)
            await put(letters)

        bench.dead.put = slowly
        heard, began = Told(), now()
        await bench.process(b"no event", event(), settled=heard)
        assert heard.at[1] - began < 1
        assert heard.at[0] - began == pytest.approx(8)


@pytest.mark.parametrize("state", ["draining", "paused", "sink down", "store down"])
@virtual
async def test_what_is_handed_back_at_the_door_is_told_once(state):
    async with Bench(*RULES) as bench:
        await bench.one(event(id="0"))
        match state:
            case "draining":
                await bench.gateway.drain(seconds(1))
            case "paused":
                bench.gateway.pause()
            case "sink down":
                bench.gateway.sink_breaker.failed(now(), at_once=True)
            case "store down":
                bench.store.arm("claim.before", times=1e9)
        outcomes = await told(bench, *every_kind())
        assert not outcomes[0].acknowledge
        assert not outcomes[1].acknowledge


@pytest.mark.parametrize("seam", SEAMS)
@pytest.mark.parametrize("error", [None, ZeroDivisionError()])
@virtual
async def test_whatever_breaks_in_the_store_everything_is_told_once(seam, error):
    async with Bench(*RULES) as bench:
        bench.store.arm(seam, times=2, error=error)
        heard, arrivals = Told(), every_kind()
        try:
            outcomes = await bench.gateway.process(arrivals, settled=heard)
        except ZeroDivisionError:
            outcomes = None
        heard.check(len(arrivals), outcomes)
        await asyncio.sleep(60)
        bench.check()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 21, 34])
@virtual
async def test_wherever_it_is_cancelled_everything_is_told_once(steps):
    async with Bench(*RULES, sink=ScriptedSink(otherwise=After(0.001, Yes()))) as bench:
        heard, arrivals = Told(), every_kind()

        async def run():
            return await bench.gateway.process(arrivals, settled=heard)

        task = asyncio.create_task(run())
        await asyncio.sleep(0)
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        heard.check(len(arrivals))
        bench.check()
        for index in (0, 8):
            if heard.outcomes[index].acknowledge:
                assert arrivals[index] in bench.sink.raws


@virtual
async def test_a_drain_in_the_middle_tells_everything_once():
    sink = ScriptedSink(otherwise=After(5, Yes()), concurrency=1)
    async with Bench(sink=sink) as bench:
        heard = Told()
        arrivals = [event({"n": n}) for n in range(6)]
        task = asyncio.create_task(bench.gateway.process(arrivals, settled=heard))
        await eventually(lambda: sink.under_way)
        assert await bench.gateway.drain(seconds(20))
        heard.check(6, await task)
        assert sum(outcome.acknowledge for outcome in heard.outcomes.values()) == len(sink.taken)


@virtual
async def test_a_callback_that_raises_costs_no_event():
    def deaf(index, outcome):
        raise ZeroDivisionError

    async with Bench(*RULES) as bench:
        outcomes = await bench.process(*every_kind(), settled=deaf)
        assert all(outcome.acknowledge for outcome in outcomes)
        assert {outcome.verdict for outcome in await bench.process(event(id="1"))} == {
            Verdict.DUPLICATE
        }


KIND = st.sampled_from(["Order", "Noise", "Pass", "State", "Keyed", "bad"])
STEP = st.sampled_from(
    [Yes(), No("no"), Unknown("?"), Never("x"), After(2, Yes()), After(20, Yes()), OSError()]
)


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(KIND, st.integers(0, 3), st.integers(0, 2)), max_size=12),
    st.lists(STEP, max_size=12),
    st.none() | st.floats(0, 15),
    st.booleans(),
)
def test_whatever_happens_everything_is_told_once(arrivals, script, broken, is_shadow):
    async def run():
        mode = SHADOW if is_shadow else Settings(order="entity")
        async with Bench(*RULES, sink=ScriptedSink(*script), settings=mode) as bench:
            raws = [
                b"{" if kind == "bad" else event({"e": "x", "v": v}, id=str(n), detail_type=kind)
                for kind, n, v in arrivals
            ]
            heard = Told()
            task = asyncio.create_task(bench.gateway.process(raws, settled=heard))
            await asyncio.sleep(0)
            if broken is not None:
                await asyncio.sleep(broken)
                task.cancel()
            (found,) = await asyncio.gather(task, return_exceptions=True)
            heard.check(len(raws), found if isinstance(found, list) else None)
            await asyncio.sleep(60)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


# --- discard --------------------------------------------------------------------------------------


@virtual
async def test_what_a_rule_discards_is_acknowledged_and_never_claimed_or_sent():
    async with Bench(DISCARD) as bench:
        for _ in range(2):
            outcome = await bench.one(event(detail_type="Noise"))
            assert (outcome.verdict, outcome.acknowledge) == (Verdict.DISCARDED, True)
            assert (outcome.rule, outcome.forwarded) == ("noise", False)
        assert bench.store.calls == {}
        assert bench.sink.seen == []
        assert await bench.letters() == []
        assert bench.books.verdicts[Verdict.DISCARDED] == 2
        assert (await bench.one(event())).verdict is Verdict.DELIVERED


@virtual
async def test_shadow_mode_forwards_what_it_would_discard():
    async with Bench(DISCARD, settings=SHADOW) as bench:
        outcome = await bench.one(event(detail_type="Noise"))
        assert (outcome.verdict, outcome.acknowledge) == (Verdict.DISCARDED, True)
        assert outcome.forwarded
        assert len(bench.sink.taken) == 1
        assert bench.store.calls["claim"] == 0
        assert bench.books.verdicts[Verdict.DISCARDED] == 1


@virtual
async def test_in_shadow_mode_a_sink_that_refuses_gets_the_discarded_again():
    async with Bench(DISCARD, settings=SHADOW, sink=ScriptedSink(No("no"))) as bench:
        outcome = await bench.one(event(detail_type="Noise"))
        assert (outcome.verdict, outcome.acknowledge) == (Verdict.FAILED, False)
        assert (await bench.one(event(detail_type="Noise"))).acknowledge


@virtual
async def test_a_batch_of_noise_does_not_wait_for_what_is_not():
    sink = ScriptedSink(otherwise=After(8, Yes()))
    async with Bench(DISCARD, sink=sink) as bench:
        heard, began = Told(), now()
        await bench.process(
            event(), *[event({"n": n}, detail_type="Noise") for n in range(5)], settled=heard
        )
        assert all(heard.at[index] == began for index in range(1, 6))


@virtual
async def test_discards_need_neither_store_nor_sink():
    async with Bench(DISCARD) as bench:
        bench.store.arm("claim.before", times=1e9)
        bench.gateway.sink_breaker.failed(now(), at_once=True)
        assert (await bench.one(event(detail_type="Noise"))).acknowledge
