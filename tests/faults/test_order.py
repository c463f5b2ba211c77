"""
order = "entity": one at a time, in the order of arrival, and nobody held up for nothing.

The order is kept within a process, from arrival to acknowledgement; a source that brings
an event again brings a new arrival. Across processes the register of the entity keeps two
events from being under way at once.
"""

import asyncio
import json
from collections import defaultdict
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.size import examples

from oncebridge import Closed, Never, No, Settings, Unknown, Verdict, Yes

from .doubles import (
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

ORDERED = Settings(order="entity", breaker=1000)
BY_ENTITY = {"entity": "detail.e"}


def of(entity, n, **envelope):
    detail = {"n": n} if entity is None else {"e": entity, "n": n}
    return event(detail, id=f"{entity}{n}", **envelope)


def bench(*, order=ORDERED, **more):
    return Bench(rule(**BY_ENTITY), settings=order, **more)


def numbers(sink):
    return [json.loads(raw)["detail"]["n"] for raw in sink.raws]


def slow_for(*slow, seconds=5, answer=Yes()):  # noqa: B008 - frozen
    """Let the sink take its time with some, and answer *answer* to them."""

    def step(delivery):
        n = json.loads(delivery.event.raw)["detail"]["n"]
        return After(seconds, answer) if n in slow else Yes()

    return ScriptedSink(otherwise=step)


# --- one after the other ------------------------------------------------------------------------


@virtual
async def test_events_of_one_entity_in_one_batch_go_one_after_the_other():
    async with bench(sink=ScriptedSink(otherwise=After(1, Yes()))) as one:
        began = now()
        await one.process(*[of("x", n) for n in range(5)])
        assert numbers(one.sink) == [0, 1, 2, 3, 4]
        assert one.sink.most_under_way == 1
        assert now() - began == pytest.approx(5)


@virtual
async def test_batches_that_overlap_keep_the_order_of_their_arrival():
    async with bench(sink=slow_for(0, 2)) as one:
        running = [asyncio.create_task(one.gateway.process([of("x", n)])) for n in range(4)]
        for (outcome,) in await asyncio.gather(*running):
            assert outcome.verdict is Verdict.DELIVERED
        assert numbers(one.sink) == [0, 1, 2, 3]
        assert one.sink.most_under_way == 1
        assert one.gateway._entity_queues == {}


@virtual
async def test_entities_go_side_by_side():
    async with bench(sink=ScriptedSink(otherwise=After(1, Yes()))) as one:
        began = now()
        await one.process(*[of(entity, 1) for entity in "abcdefgh"])
        assert now() - began == pytest.approx(1)
        assert one.sink.most_under_way == 8


@virtual
async def test_without_it_nobody_waits():
    async with bench(order=Settings(), sink=slow_for(0)) as one:
        await one.process(*[of("x", n) for n in range(3)])
        assert numbers(one.sink) == [1, 2, 0]


# --- behind one that failed -------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [No("refused"), Unknown("reset"), Closed("401")])
@virtual
async def test_in_a_batch_what_is_behind_a_failed_one_is_handed_back_unsent(answer):
    async with bench(sink=ScriptedSink(Yes(), answer)) as one:
        outcomes = await one.process(*[of("x", n) for n in range(4)])
        assert [outcome.acknowledge for outcome in outcomes] == [True, False, False, False]
        assert len(one.sink.seen) == 2
        assert all(outcome.retry_after_ms > 0 for outcome in outcomes[1:])
        if not isinstance(answer, Closed):
            assert "same entity" in outcomes[3].reason


@virtual
async def test_across_batches_what_is_behind_a_failed_one_is_handed_back_unsent():
    async with bench(sink=slow_for(0, answer=No("refused"))) as one:
        first = asyncio.create_task(one.gateway.process([of("x", 0)]))
        await eventually(lambda: one.sink.under_way)
        behind = [asyncio.create_task(one.gateway.process([of("x", n)])) for n in (1, 2)]
        other = await one.one(of("y", 9))
        for (outcome,) in await asyncio.gather(first, *behind):
            assert not outcome.acknowledge
        assert other.acknowledge
        assert numbers(one.sink) == [9]
        assert len(one.sink.seen) == 2
        assert one.store.calls["claim"] == 4, "two events with their entities, and no more"


@virtual
async def test_one_that_will_never_succeed_is_out_of_the_way():
    async with bench(sink=ScriptedSink(Never("400"))) as one:
        outcomes = await one.process(of("x", 0), of("x", 1))
        assert [outcome.verdict for outcome in outcomes] == [Verdict.DEAD, Verdict.DELIVERED]


@virtual
async def test_one_that_cannot_be_buried_stays_in_the_way():
    async with bench(sink=ScriptedSink(Never("400"))) as one:
        one.dead.broken = True
        outcomes = await one.process(of("x", 0), of("x", 1))
        assert [outcome.acknowledge for outcome in outcomes] == [False, False]
        assert len(one.sink.seen) == 1


@virtual
async def test_a_duplicate_is_not_in_the_way():
    async with bench() as one:
        await one.one(of("x", 0))
        outcomes = await one.process(of("x", 0), of("x", 1))
        assert [outcome.verdict for outcome in outcomes] == [Verdict.DUPLICATE, Verdict.DELIVERED]


@virtual
async def test_one_that_another_worker_has_is_in_the_way():
    async with bench() as one:
        other = bench(store=one.store, sink=slow_for(0))
        held = asyncio.create_task(other.one(of("x", 0)))
        await eventually(lambda: other.sink.under_way)
        outcomes = await one.process(of("x", 0), of("x", 1))
        assert [outcome.acknowledge for outcome in outcomes] == [False, False]
        assert outcomes[0].verdict is Verdict.BUSY
        assert one.sink.seen == []
        await held


@virtual
async def test_the_way_is_free_again_when_the_failed_one_has_come_again():
    async with bench(sink=ScriptedSink(No("refused"))) as one:
        arrivals = [of("x", 0), of("x", 1)]
        outcomes = await one.process(*arrivals)
        await asyncio.sleep(max(outcome.retry_after_ms for outcome in outcomes) / 1000)
        assert all(outcome.acknowledge for outcome in await one.process(*arrivals))
        assert numbers(one.sink) == [0, 1]


@virtual
async def test_repeats_of_what_is_handed_back_are_handed_back_with_it():
    async with bench(sink=ScriptedSink(No("refused"))) as one:
        outcomes = await one.process(of("x", 0), of("x", 1), of("x", 0), of("x", 1))
        assert not any(outcome.acknowledge for outcome in outcomes)
        assert len(one.sink.seen) == 1
        assert one.gateway._entity_queues == {}


# --- held up for nothing -----------------------------------------------------------------------------


@virtual
async def test_events_without_an_entity_do_not_wait_for_others_of_their_batch():
    async with bench(sink=slow_for(0)) as one:
        first = asyncio.create_task(one.gateway.process([of("x", 0)]))
        await eventually(lambda: one.sink.under_way)
        began, heard = now(), {}
        await one.gateway.process(
            [of("x", 1), of(None, 2), of("y", 3), of("x", 4)],
            settled=lambda index, _: heard.setdefault(index, now() - began),
        )
        assert heard[1] == heard[2] == 0
        assert heard[0] > 4
        await first


@virtual
async def test_events_without_an_entity_do_not_wait_for_entities_that_another_worker_holds():
    async with bench() as one:
        other = bench(store=one.store, sink=slow_for(0, seconds=9))
        held = asyncio.create_task(other.one(of("x", 0)))
        await eventually(lambda: other.sink.under_way)
        began, heard = now(), {}
        outcomes = await one.gateway.process(
            [of("x", 1), of(None, 2), of("y", 3)],
            settled=lambda index, _: heard.setdefault(index, now() - began),
        )
        assert all(outcome.acknowledge for outcome in outcomes)
        assert heard[1] < 1
        assert heard[2] < 1
        await held


@virtual
async def test_a_rule_that_does_not_deduplicate_keeps_its_entities_in_order_too():
    """Or refuses to start: an order that is silently not kept is worse than none."""
    bypass = rule(key="none", **BY_ENTITY)
    async with Bench(bypass, settings=ORDERED, sink=slow_for(0)) as one:
        await one.process(of("x", 0), of("x", 1))
        assert numbers(one.sink) == [0, 1]


# --- two workers --------------------------------------------------------------------------------------


@virtual
async def test_two_workers_never_have_one_entity_under_way_at_once():
    async with bench(sink=slow_for(0, seconds=3)) as one, bench(store=one.store) as other:
        first = asyncio.create_task(one.one(of("x", 0)))
        await eventually(lambda: one.sink.under_way)
        began = now()
        assert (await other.one(of("x", 1))).verdict is Verdict.DELIVERED
        assert now() - began > 2
        await first


@virtual
async def test_a_worker_that_waits_too_long_for_the_other_hands_back():
    patient = Settings(order="entity", patience=seconds(2))
    async with (
        bench(sink=slow_for(0, seconds=9)) as one,
        bench(store=one.store, order=patient) as other,
    ):
        first = asyncio.create_task(one.one(of("x", 0)))
        await eventually(lambda: one.sink.under_way)
        outcomes = await other.process(of("x", 1), of("x", 2))
        assert [outcome.acknowledge for outcome in outcomes] == [False, False]
        assert outcomes[0].verdict is Verdict.BUSY
        assert other.sink.seen == []
        await first


# --- broken off ----------------------------------------------------------------------------------------


@virtual
async def test_one_that_is_cancelled_while_it_waits_does_not_let_others_overtake_the_first():
    async with bench(sink=slow_for(0, seconds=8, answer=No("refused"))) as one:
        first = asyncio.create_task(one.gateway.process([of("x", 0)]))
        await eventually(lambda: one.sink.under_way)
        second = asyncio.create_task(one.gateway.process([of("x", 1)]))
        await asyncio.sleep(1)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        (third,) = await one.gateway.process([of("x", 2)])
        assert not third.acknowledge, "the first was handed back"
        await first
        assert one.sink.raws == []
        assert one.gateway._entity_queues == {}


@virtual
async def test_a_stop_lets_nobody_wait_in_line_for_ever():
    async with bench(sink=slow_for(0, seconds=8)) as one:
        running = [asyncio.create_task(one.gateway.process([of("x", n)])) for n in range(5)]
        await eventually(lambda: one.sink.under_way)
        assert await one.gateway.drain(seconds(20))
        outcomes = [outcome for (outcome,) in await asyncio.gather(*running)]
        assert [outcome.acknowledge for outcome in outcomes] == [True, *[False] * 4]
        assert one.gateway._entity_queues == {}


@virtual
async def test_the_callers_time_is_kept_also_in_line():
    async with bench(sink=slow_for(0, seconds=9)) as one:
        first = asyncio.create_task(one.gateway.process([of("x", 0)]))
        await eventually(lambda: one.sink.under_way)
        began = now()
        outcomes = await one.process(of("x", 1), of("x", 2), of("y", 3), within=seconds(4))
        assert now() - began <= 4
        assert [outcome.acknowledge for outcome in outcomes] == [False, False, True]
        await first
        assert numbers(one.sink) == [3, 0]
        assert one.gateway._entity_queues == {}


@virtual
async def test_an_unforeseen_error_lets_nobody_wait_in_line_for_ever():
    async with bench() as one:
        one.store.arm("claim.before", error=ZeroDivisionError())
        one.store.takes_s = 1
        running = [asyncio.create_task(one.gateway.process([of("x", n)])) for n in range(3)]
        first, second, third = await asyncio.gather(*running, return_exceptions=True)
        assert isinstance(first, ZeroDivisionError)
        assert not second[0].acknowledge
        assert not third[0].acknowledge
        assert one.gateway._entity_queues == {}
        assert (await one.one(of("x", 0))).acknowledge


@virtual
async def test_paused_in_the_middle_the_line_is_handed_back():
    async with bench(sink=slow_for(0, seconds=8)) as one:
        running = [asyncio.create_task(one.gateway.process([of("x", n)])) for n in range(3)]
        await eventually(lambda: one.sink.under_way)
        one.gateway.pause()
        outcomes = [outcome for (outcome,) in await asyncio.gather(*running)]
        assert [outcome.acknowledge for outcome in outcomes] == [True, False, False]
        assert one.gateway._entity_queues == {}


@virtual
async def test_shadow_mode_keeps_the_order_within_a_process():
    shadow = Settings(order="entity", mode="shadow")
    async with bench(order=shadow, sink=slow_for(0)) as one:
        running = [asyncio.create_task(one.gateway.process([of("x", n)])) for n in range(3)]
        await asyncio.gather(*running)
        assert numbers(one.sink) == [0, 1, 2]


@virtual
async def test_delivering_without_the_store_keeps_the_order_within_a_process():
    anyway = Settings(order="entity", on_store_outage="deliver")
    async with bench(order=anyway, sink=slow_for(0)) as one:
        one.store.arm("claim.before", times=1e9)
        running = [asyncio.create_task(one.gateway.process([of("x", n)])) for n in range(3)]
        await asyncio.gather(*running)
        assert numbers(one.sink) == [0, 1, 2]
        one.store.disarm()


# --- whatever happens ---------------------------------------------------------------------------------


class Watched(ScriptedSink):
    """A sink that shares with the others of its kind what is under way where."""

    def __init__(self, world, worker, script, size):
        super().__init__(*script, batch=size[0], concurrency=size[1])
        self.world = world
        self.worker = worker

    async def deliver(self, deliveries):
        details = [json.loads(delivery.event.raw)["detail"] for delivery in deliveries]
        entities = [detail["e"] for detail in details if "e" in detail]
        self.world.at_once += [entity for entity in entities if entity in self.world.inside]
        self.world.inside.update(entities)
        for detail in details:
            self.world.sent[detail["n"]].append((self.worker, now()))
        try:
            answers = await super().deliver(deliveries)
            for detail, answer in zip(details, answers, strict=True):
                if isinstance(answer, Yes):
                    self.world.taken.append((self.worker, detail.get("e"), detail["n"]))
            return answers
        finally:
            self.world.inside.difference_update(entities)


class World:
    """Workers on one store, sources that bring until they are rid of it, and what was seen."""

    def __init__(self, scripts, size, breaker):
        self.inside = set()
        self.at_once = []
        """Entities of which two events were under way at once."""
        self.sent = defaultdict(list)
        self.taken = []
        self.broken = set()
        """What was perhaps on its way when its call was broken off: an excuse to repeat it."""
        self.arrivals = []
        """Worker, entity, number, when it came, when it was settled, and how."""
        self.clock = count()
        self.workers = []
        order = Settings(order="entity", breaker=breaker, max_attempts=1000)
        for worker, script in enumerate(scripts):
            store = self.workers[0].store if self.workers else None
            sink = Watched(self, worker, script, size)
            self.workers.append(bench(order=order, sink=sink, store=store))

    async def bring(self, worker, events, broken):
        """Bring a batch, and what is handed back again and again, one by one."""
        again = await self.call(worker, events, broken)
        await asyncio.gather(*[self.bring_again(worker, one, wait) for one, wait in again])

    async def bring_again(self, worker, one, wait):
        for _ in range(200):
            await asyncio.sleep(max(wait, 100) / 1000)
            again = await self.call(worker, [one], None)
            if not again:
                return
            wait = again[0][1]
        raise AssertionError("never acknowledged")

    async def call(self, worker, events, broken):
        gateway = self.workers[worker].gateway
        notes = [{"worker": worker, "e": entity, "n": n} for entity, n in events]

        def settled(index, outcome):
            assert "outcome" not in notes[index], "settled twice"
            notes[index] |= {"outcome": outcome, "settled": next(self.clock)}

        async def process():
            for note in notes:
                note["came"] = next(self.clock)
            self.arrivals.extend(notes)
            arrivals = [of(entity, n) for entity, n in events]
            return await gateway.process(arrivals, settled=settled)

        call = asyncio.create_task(process())
        if broken is not None:
            asyncio.get_running_loop().call_later(broken, call.cancel)
        (found,) = await asyncio.gather(call, return_exceptions=True)
        if isinstance(found, asyncio.CancelledError):
            self.broken |= {n for _, n in events}
            if "came" not in notes[0]:  # it had not even begun
                return [(one, 31_000) for one in events]
        elif isinstance(found, BaseException):
            raise found
        else:
            assert [note["outcome"] for note in notes] == found
        return [
            (one, note["outcome"].retry_after_ms or 31_000)
            for one, note in zip(events, notes, strict=True)
            if not note["outcome"].acknowledge
        ]

    def check(self):
        assert self.at_once == []
        for worker in self.workers:
            worker.check()
            assert worker.gateway._entity_queues == {}
        delivered = [n for _, _, n in self.taken]
        repeated = {n for n in delivered if delivered.count(n) > 1}
        assert repeated <= self.broken
        came = {
            (note["worker"], note["n"]): note["came"]
            for note in self.arrivals
            if note["outcome"].forwarded
        }
        lines = defaultdict(list)
        for worker, entity, n in self.taken:
            if entity is not None and (worker, n) in came and n not in self.broken:
                lines[worker, entity].append(came[worker, n])
        for line in lines.values():
            assert line == sorted(line), "overtaken"
        for behind in self.arrivals:
            if behind["e"] is not None and behind["outcome"].forwarded:
                for ahead in self.arrivals:
                    is_ahead = (ahead["worker"], ahead["e"]) == (
                        behind["worker"],
                        behind["e"],
                    ) and ahead["came"] < behind["came"] < ahead["settled"]
                    assert not is_ahead or ahead["outcome"].acknowledge, "sent behind a failed one"


ENTITY = st.sampled_from(["a", "b", None])
STEP = st.sampled_from(
    [Yes(), No("refused"), Unknown("reset"), After(1, Yes()), After(3, No("no")), After(8, Yes())]
)
CALLS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.floats(0, 4),
        st.lists(ENTITY, min_size=1, max_size=5),
        st.none() | st.none() | st.floats(0, 12),
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=examples(150))
@given(
    calls=CALLS,
    scripts=st.lists(st.lists(STEP, max_size=10), min_size=1, max_size=3),
    size=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    breaker=st.sampled_from([2, 1000]),
)
def test_entities_stay_in_order_whatever_sinks_and_sources_do(calls, scripts, size, breaker):
    async def run():
        world = World(scripts, size, breaker)
        ids = count()
        tasks = []
        for worker, comes, entities, broken in calls:
            await asyncio.sleep(comes)
            events = [(entity, next(ids)) for entity in entities]
            bringing = world.bring(worker % len(scripts), events, broken)
            tasks.append(asyncio.create_task(bringing))
        async with asyncio.timeout(100_000):
            await asyncio.gather(*tasks)
        world.check()
        expected = set(range(sum(len(entities) for _, _, entities, _ in calls)))
        assert {n for _, _, n in world.taken} == expected, "lost"
        for worker in world.workers:
            await worker.gateway.aclose()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
