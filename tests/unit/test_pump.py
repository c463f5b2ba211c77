import asyncio
import contextlib
import itertools
import json
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.faults.doubles import (
    After,
    Bench,
    Deaf,
    ScriptedSink,
    VirtualLoop,
    event,
    eventually,
    now,
    rule,
    seconds,
    virtual,
)
from tests.size import examples

from oncebridge import Closed, No, Settings, Unknown, Verdict, Yes
from oncebridge.engine.router import RouteEntry, Router, RouterAnswer
from oncebridge.sources.pump import Pump, Retry, SourceRecord

FINAL = RouterAnswer(acknowledge=True, verdict=Verdict.DELIVERED)


def item(place, raw, lane=None):
    return SourceRecord(place, raw, lane)


def later(ms=1000):
    return RouterAnswer(
        acknowledge=False, verdict=Verdict.FAILED, retry_after_ms=ms, reason="later"
    )


class Doors:
    """A router that answers by *decide*, which is asked with each arrival and its times."""

    is_ordered = False

    def __init__(self, decide=lambda arrival, times: FINAL, takes_s=0.1):
        self.decide = decide
        self.takes_s = takes_s
        self.brought = Counter()
        self.accepted = []
        self.batches = []
        self.under_way = 0
        self.most_under_way = 0
        self.away = 0.0

    def unavailable_s(self):
        return self.away

    def read(self, raw):
        return raw

    async def process_each(self, arrivals, answered, **_):
        self.batches.append((now(), list(arrivals)))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(self.takes_s)
            self.brought.update(arrivals)
            answers = [self.decide(one, self.brought[one]) for one in arrivals]
        finally:
            self.under_way -= 1
        for at, answer in enumerate(answers):
            answered(at, answer)
            if answer.acknowledge:
                self.accepted.append(arrivals[at])


class Shelf:
    """Records numbered from 1, given in batches, and the answer to each."""

    def __init__(self, router, count=20, batch=3, *, then=None, run=None, **more):
        self.left = [item(number, str(number).encode()) for number in range(1, count + 1)]
        self.batch = batch
        self.then = then
        self.run_options = run or {}
        self.answers = {}
        self.pump = Pump(router, self.note, **more)

    async def run(self):
        await self.pump.run(self.take, **self.run_options)

    async def take(self):
        await asyncio.sleep(0)
        batch, self.left = self.left[: self.batch], self.left[self.batch :]
        if not batch and self.then is not None:
            return await self.then()
        return batch or None

    def note(self, place, answer):
        assert place not in self.answers, "answered twice"
        self.answers[place] = answer

    @property
    def final(self):
        """What was acknowledged, in the order of the answers."""
        return [place for place, answer in self.answers.items() if answer.acknowledge]


def in_order(router, *given, **more):
    """Make a shelf whose records are answered in their order, as for a checkpoint."""
    shelf = Shelf(router, *given, in_order=True, **more)
    note = shelf.note

    def checked(place, answer):
        assert place == len(shelf.answers) + 1, "in order"
        before = shelf.answers.get(place - 1, FINAL)
        assert before.acknowledge or not answer.acknowledge, "it passed what is not final"
        note(place, answer)

    shelf.pump.answered = checked
    return shelf


async def hangs():
    await asyncio.Event().wait()


def pauses(router):
    """Tell how long it was from each batch to the next."""
    moments = [at for at, _ in router.batches]
    return [after - before for before, after in itertools.pairwise(moments)]


# --- bringing ------------------------------------------------------------------------------------


@virtual
async def test_everything_is_brought_once_and_passed_in_order():
    router = Doors()
    shelf = in_order(router)
    await shelf.run()
    assert shelf.pump.is_through
    assert shelf.final == list(range(1, 21))
    assert set(router.brought.values()) == {1}


@virtual
async def test_nothing_to_bring_is_through_at_once():
    shelf = Shelf(Doors(), count=0)
    await shelf.run()
    assert shelf.pump.is_through
    assert shelf.answers == {}


@virtual
async def test_a_few_batches_are_under_way_at_once_and_no_more():
    router = Doors(takes_s=5)
    await Shelf(router, at_once=4).run()
    assert router.most_under_way == 4


@virtual
async def test_what_was_handed_back_is_brought_again_alone_after_the_time_it_asks_for():
    router = Doors(lambda one, times: later(3000) if one == b"2" and times < 3 else FINAL, 0)
    shelf = Shelf(router, count=3)
    began = now()
    await shelf.run()
    assert [(at - began, batch) for at, batch in router.batches] == [
        (0, [b"1", b"2", b"3"]),
        (3, [b"2"]),
        (6, [b"2"]),
    ]
    assert shelf.final == [1, 3, 2]


@virtual
async def test_it_stays_away_as_long_as_the_router_is_away_but_not_for_ever():
    def decide(one, times):
        router.away = {1: 12, 2: 5000}.get(times, 0)
        return later(10) if times < 3 else FINAL

    router = Doors(decide, 0)
    began = now()
    await Shelf(router, count=1).run()
    assert [round(at - began) for at, _ in router.batches] == [0, 12, 42]


@virtual
async def test_nothing_is_read_while_the_router_is_away():
    router = Doors()
    router.away = 60
    shelf = Shelf(router)
    running = asyncio.create_task(shelf.run())
    await asyncio.sleep(30)
    assert router.batches == []
    assert len(shelf.left) == 20
    router.away = 0
    await running
    assert shelf.pump.is_through


@virtual
async def test_others_pass_what_waits_to_be_brought_again_but_only_so_many():
    router = Doors(lambda one, times: later(50_000) if int(one) <= 12 and times < 2 else FINAL)
    shelf = in_order(router, count=40, at_once=2, most_waiting=100)
    running = asyncio.create_task(shelf.run())
    await asyncio.sleep(20)
    assert sorted(map(int, router.accepted)) == list(range(13, 41))
    assert shelf.answers == {}
    await running
    assert shelf.final == list(range(1, 41))

    shelf = Shelf(Doors(router.decide), count=40, at_once=2, most_waiting=12)
    running = asyncio.create_task(shelf.run())
    await asyncio.sleep(20)
    assert len(shelf.final) <= 6
    await running
    assert shelf.pump.is_through


@virtual
async def test_where_nobody_says_when_the_pauses_grow():
    router = Doors(lambda one, times: later(0) if times < 16 else FINAL, 0)
    await Shelf(router, count=1).run()
    gaps = pauses(router)
    assert gaps[0] == pytest.approx(0.05)
    assert gaps[3] == pytest.approx(0.4)
    assert gaps == sorted(gaps)
    assert gaps[-1] == pytest.approx(30)


@virtual
async def test_a_moment_that_is_asked_for_again_and_again_grows():
    router = Doors(lambda one, times: later(1) if times < 16 else FINAL, 0)
    await Shelf(router, count=1).run()
    gaps = pauses(router)
    assert gaps == sorted(gaps)
    assert gaps[-1] == pytest.approx(30)


class Payload(bytes):
    """Bytes that are counted for as long as somebody keeps them."""

    alive = 0

    def __new__(cls, text):
        cls.alive += 1
        return super().__new__(cls, text)

    def __del__(self):
        Payload.alive -= 1


@virtual
async def test_behind_one_that_is_never_final_only_places_are_kept_and_not_too_many():
    most_alive = accepted = 0

    class Watched(Doors):
        async def process_each(self, arrivals, answered, **_):
            nonlocal most_alive, accepted
            most_alive = max(most_alive, Payload.alive)
            for at, one in enumerate(arrivals):
                answered(at, later(3_600_000) if one == b"1" else FINAL)
                accepted += one != b"1"

    took = itertools.count(1)

    async def take():
        assert shelf.pump.untold < 100_000, "that is enough"
        return [item(n, Payload(str(n).encode())) for n in itertools.islice(took, 1000)]

    shelf = in_order(Watched())
    shelf.take = take
    before = Payload.alive
    running = asyncio.create_task(shelf.run())
    await eventually(lambda: shelf.pump.untold >= 100_000)
    await asyncio.sleep(60)
    assert shelf.pump.untold == 100_000
    assert accepted == 99_999
    assert shelf.answers == {}
    assert shelf.pump._bytes == 1
    assert most_alive - before < 10_000
    assert Payload.alive - before < 2000
    shelf.pump.stop()
    await running
    assert len(shelf.answers) == 100_000
    assert shelf.final == []


@virtual
async def test_one_batch_that_has_to_wait_does_not_hold_up_the_rest_but_nothing_passes_it():
    router = Doors(lambda one, times: later(20_000) if one == b"5" and times == 1 else FINAL)
    shelf = in_order(router)
    running = asyncio.create_task(shelf.run())
    await asyncio.sleep(10)
    assert len(router.accepted) == 19
    assert shelf.final == [1, 2, 3, 4]
    await running
    assert shelf.final == list(range(1, 21))
    assert shelf.pump.is_through


@virtual
async def test_who_has_waited_gets_a_place_among_those_that_come_new():
    router = Doors(lambda one, times: later(100) if one == b"1" and times == 1 else FINAL, 1)
    shelf = Shelf(router, count=200, batch=1, at_once=1)
    running = asyncio.create_task(shelf.run())
    await eventually(lambda: router.brought[b"1"] == 2)
    assert len(shelf.final) < 10
    await running


# --- stopping ------------------------------------------------------------------------------------


@virtual
async def test_it_stops_at_once_while_it_waits_for_something_to_take():
    shelf = in_order(Doors(), then=hangs)
    running = asyncio.create_task(shelf.run())
    await asyncio.sleep(10)
    began = now()
    shelf.pump.stop()
    await running
    assert now() == began
    assert not shelf.pump.is_through
    assert shelf.final == list(range(1, 21)), "what is final is passed all the same"


@virtual
async def test_it_stops_at_once_while_all_batches_wait_to_be_brought_again():
    shelf = Shelf(Doors(lambda one, times: later(3_600_000)))
    running = asyncio.create_task(shelf.run())
    await asyncio.sleep(10)
    began = now()
    shelf.pump.stop()
    await running
    assert now() == began
    assert not shelf.pump.is_through
    assert shelf.final == []
    assert len(shelf.answers) == 20 - len(shelf.left), "each that was taken has an answer"


@virtual
async def test_what_waits_for_a_place_when_it_stops_is_not_brought_again():
    def decide(one, times):
        return later(100) if int(one) <= 3 else FINAL

    router = Doors(decide, 1)
    shelf = Shelf(router, count=6, batch=1, at_once=1)
    running = asyncio.create_task(shelf.run())
    await eventually(
        lambda: router.brought[b"4"] or (router.under_way and len(router.batches) == 4)
    )
    shelf.pump.stop()
    brought = len(router.batches)
    await running
    assert len(router.batches) == brought
    assert shelf.final == [4]
    assert {answer.reason for answer in shelf.answers.values()} == {
        "",
        "this worker is shutting down",
    }


@virtual
async def test_it_stops_at_once_while_nobody_takes_anything():
    router = Doors()
    router.away = 3600
    shelf = Shelf(router)
    running = asyncio.create_task(shelf.run())
    await asyncio.sleep(10)
    began = now()
    shelf.pump.stop()
    await running
    assert now() == began
    assert router.batches == []


@pytest.mark.parametrize("leave_s", [0, 1])
@virtual
async def test_where_there_is_always_more_no_take_begins_after_the_stop(leave_s):
    for steps in range(100, 115):  # at every step of the loop there may be a stop
        shelf = Shelf(Doors(takes_s=0), run={"takers": 2, "leave_s": leave_s})
        numbers, late = itertools.count(1), []

        async def take(shelf=shelf, numbers=numbers, late=late):
            if shelf.pump._is_stopped:
                late.append(now())
                assert len(late) < 9, "it goes on for ever"
            await asyncio.sleep(0)
            return [item(n, str(n).encode()) for n in itertools.islice(numbers, 3)]

        shelf.take = take
        running = asyncio.create_task(shelf.run())
        for _ in range(steps):
            await asyncio.sleep(0)
        shelf.pump.stop()
        await running
        assert shelf.final
        assert late == []


@virtual
async def test_it_stops_before_it_has_begun():
    router = Doors()
    shelf = Shelf(router)
    shelf.pump.stop()
    await shelf.run()
    assert router.batches == []
    assert not shelf.pump.is_through


@virtual
async def test_what_is_under_way_when_it_stops_is_awaited_and_counts():
    shelf = Shelf(Doors(takes_s=5), count=6)
    running = asyncio.create_task(shelf.run())
    await asyncio.sleep(1)
    shelf.pump.stop()
    await running
    assert sorted(shelf.final) == [1, 2, 3, 4, 5, 6]


@virtual
async def test_what_is_handed_back_after_the_stop_stays_where_it_is():
    router = Doors(lambda one, times: later() if one == b"4" else FINAL, 5)
    shelf = in_order(router, count=9)
    running = asyncio.create_task(shelf.run())
    await asyncio.sleep(1)
    shelf.pump.stop()
    await running
    assert router.brought[b"4"] == 1
    assert shelf.final == [1, 2, 3]
    assert list(shelf.answers) == list(range(1, 10)), "those behind it come again, and are known"
    assert not shelf.pump.is_through


@virtual
async def test_a_sink_that_hangs_holds_it_up_no_longer_than_the_gateway():
    async with Bench(sink=ScriptedSink(otherwise=Deaf(3600, Yes()))) as bench:
        shelf = Shelf(Router([RouteEntry(bench.gateway)]), count=0)
        shelf.left = [item(1, event())]
        running = asyncio.create_task(shelf.run())
        await eventually(lambda: bench.sink.under_way)
        shelf.pump.stop()
        began = now()
        await bench.gateway.drain(seconds(25))
        await running
        assert now() - began <= 10
        assert (shelf.final, shelf.pump.is_through) == ([], False)


@virtual
async def test_it_stops_at_once_when_the_gateway_is_paused():
    async with Bench() as bench:
        bench.gateway.pause()
        shelf = Shelf(Router([RouteEntry(bench.gateway)]), count=0)
        shelf.left = [item(1, event())]
        running = asyncio.create_task(shelf.run())
        await asyncio.sleep(60)
        began = now()
        shelf.pump.stop()
        await running
        assert now() == began
        assert bench.sink.seen == []


@virtual
async def test_a_paused_route_is_brought_everything_when_it_goes_on():
    async with Bench() as bench:
        bench.gateway.pause()
        shelf = Shelf(Router([RouteEntry(bench.gateway)]), count=0)
        shelf.left = [item(n, event({"n": n}, id=f"e{n}")) for n in range(1, 8)]
        running = asyncio.create_task(shelf.run())
        await asyncio.sleep(300)
        assert bench.store.calls["claim"] == 0
        bench.gateway.resume()
        await running
        assert shelf.pump.is_through
        assert len(bench.sink.taken) == 7


# --- errors ---------------------------------------------------------------------------------------


async def fails():
    raise ZeroDivisionError


@virtual
async def test_where_taking_fails_what_was_taken_before_is_still_brought_to_its_end():
    router = Doors(lambda one, times: later() if times < 4 else FINAL)
    shelf = Shelf(router, then=fails)
    with pytest.raises(ZeroDivisionError):
        await shelf.run()
    assert sorted(shelf.final) == list(range(1, 21))
    assert not shelf.pump.is_through


@pytest.mark.parametrize("ahead", [0, 100])
@virtual
async def test_where_one_of_several_that_take_fails_no_other_begins_to_take(ahead):
    """Be it that they wait for room, or for what they take."""
    shelf = Shelf(Doors(takes_s=5), count=0, run={"takers": 4}, ahead=ahead, at_once=1)
    begun = []

    async def take():
        begun.append(now())
        mine = len(begun)
        await asyncio.sleep(0.3)
        if mine == 2:
            await asyncio.sleep(1)
            raise ZeroDivisionError
        return [item(mine, str(mine).encode())]

    shelf.take = take
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(100):
            await shelf.run()
    assert max(begun) - min(begun) < 1.3, "nobody after the error"
    assert sorted(shelf.final) == [n for n in range(1, len(begun) + 1) if n != 2]
    assert not shelf.pump.is_through


@virtual
async def test_where_one_fails_to_take_nobody_waits_for_another_that_finds_nothing():
    shelf = Shelf(Doors(), count=0, run={"takers": 2})
    begun = []

    async def take():
        begun.append(now())
        if len(begun) == 2:
            await asyncio.sleep(1)
            raise ZeroDivisionError
        await asyncio.sleep(3600)

    shelf.take = take
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(60):
            await shelf.run()


@virtual
async def test_one_who_fails_to_listen_does_not_cost_the_others(caplog):
    shelf = Shelf(Doors())
    note = shelf.note

    def deaf(place, answer):
        note(place, answer)
        if place == 5:
            raise ZeroDivisionError("payload")

    shelf.pump.answered = deaf
    await shelf.run()
    assert sorted(shelf.final) == list(range(1, 21))
    assert shelf.pump.is_through
    assert [record.message for record in caplog.records] == ["oncebridge.answer_failed"]
    assert "payload" not in caplog.text


@virtual
async def test_where_the_router_fails_it_is_an_answer_and_each_record_is_tried_again_alone():
    def decide(one, times):
        if one == b"8" and times < 3:
            raise ZeroDivisionError
        return FINAL

    router = Doors(decide)
    shelf = in_order(router)
    await shelf.run()
    assert shelf.pump.is_through
    assert shelf.final == list(range(1, 21))
    assert [len(batch) for _, batch in router.batches if b"8" in batch] == [3, 1, 1]
    assert len(asyncio.all_tasks()) == 1


@virtual
async def test_where_a_record_cannot_even_be_parsed_the_others_can():
    class Choking(Doors):
        def read(self, raw):
            if raw == b"8":
                raise ZeroDivisionError
            return raw

    shelf = Shelf(Choking(), retry=Retry.WHAT_IS_NOT_RETURNED)
    await shelf.run()
    assert sorted(shelf.final) == [n for n in range(1, 21) if n != 8]
    assert shelf.answers[8].blamed


@virtual
async def test_cancelled_it_brings_nothing_more():
    router = Doors(lambda one, times: later() if one == b"4" else FINAL)
    shelf = in_order(router, then=hangs)
    running = asyncio.create_task(shelf.run())
    await asyncio.sleep(10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(60):
            await running
    assert shelf.final == [1, 2, 3]
    assert len(asyncio.all_tasks()) == 1


@virtual
async def test_cancelled_it_ends_at_once_although_a_batch_hangs():
    router = Doors(takes_s=3600)
    shelf = Shelf(router, then=hangs)
    running = asyncio.create_task(shelf.run())
    await asyncio.sleep(10)
    assert router.under_way
    began = now()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert now() == began
    assert (router.under_way, shelf.final) == (0, [])
    assert len(asyncio.all_tasks()) == 1


# --- order ----------------------------------------------------------------------------------------

ORDERED = Settings(order="entity", breaker=1000, max_attempts=1000)


@virtual
async def test_an_ordered_router_is_brought_one_batch_at_a_time():
    async with Bench(rule(entity="detail.e"), settings=ORDERED) as bench:
        router = Router([RouteEntry(bench.gateway)])
        shelf = Shelf(router, count=0, at_once=4)
        shelf.left = [item(n, event({"e": "x", "n": n}, id=f"e{n}")) for n in range(1, 10)]
        bench.sink.script = [Unknown("reset"), Yes(), No("refused"), Unknown("reset")]
        await shelf.run()
        assert shelf.pump.is_through
        numbers = [json.loads(raw)["detail"]["n"] for raw in bench.sink.raws]
        assert numbers == list(range(1, 10))


ANSWERS = st.sampled_from([Yes(), Unknown("reset"), No("refused"), After(2, Yes())])


@settings(max_examples=examples(60))
@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=15),
    st.lists(ANSWERS, max_size=25),
    st.integers(1, 5),
)
def test_entities_of_a_file_arrive_in_its_order_whatever_the_sink_does(entities, script, batch):
    async def run():
        sink = ScriptedSink(*script)
        async with Bench(rule(entity="detail.e"), sink=sink, settings=ORDERED) as bench:
            shelf = Shelf(Router([RouteEntry(bench.gateway)]), count=0, batch=batch)
            shelf.left = [
                item(n, event({"e": entity, "n": n}, id=f"e{n}"))
                for n, entity in enumerate(entities, start=1)
            ]
            await shelf.run()
            assert shelf.pump.is_through
            assert len(shelf.final) == len(entities)
            taken = [json.loads(raw)["detail"] for raw in sink.raws]
            for entity in "abc":
                own = [detail["n"] for detail in taken if detail["e"] == entity]
                assert own == [n for n, e in enumerate(entities, start=1) if e == entity]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


# --- lanes ----------------------------------------------------------------------------------------


class Lanes(Shelf):
    """Records in the lanes that *lanes* names, one letter each; a dot is none."""

    def __init__(self, router, lanes, **more):
        super().__init__(router, count=0, batch=5, **more)
        self.left = [
            item(n, str(n).encode(), None if lane == "." else lane)
            for n, lane in enumerate(lanes, start=1)
        ]


@virtual
async def test_in_a_lane_one_starts_when_the_one_before_it_is_final():
    router = Doors(takes_s=1)
    shelf = Lanes(router, "aab.a")
    await shelf.run()
    assert [sorted(batch) for _, batch in router.batches] == [[b"1", b"3", b"4"], [b"2"], [b"5"]]
    assert len(shelf.final) == 5


@virtual
async def test_a_lane_that_waits_lets_the_others_pass():
    router = Doors(lambda one, times: later(9000) if one == b"1" and times < 3 else FINAL, 0.1)
    shelf = Lanes(router, "abababab")
    running = asyncio.create_task(shelf.run())
    await asyncio.sleep(5)
    assert shelf.final == [2, 4, 6, 8]
    await running
    assert shelf.final == [2, 4, 6, 8, 1, 3, 5, 7]


@settings(max_examples=examples(100))
@given(
    st.text("ab.", min_size=1, max_size=25),
    st.dictionaries(st.integers(1, 25), st.integers(1, 4), max_size=8),
    st.integers(1, 4),
)
def test_a_lane_is_finished_in_its_order_whatever_is_handed_back(lanes, stubborn, at_once):
    async def run():
        router = Doors(lambda one, times: FINAL if times > stubborn.get(int(one), 0) else later())
        shelf = Lanes(router, lanes, at_once=at_once)
        await shelf.run()
        assert shelf.pump.is_through
        for lane in "ab":
            own = [number for number in shelf.final if lanes[number - 1] == lane]
            assert own == sorted(own)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


# --- giving back ----------------------------------------------------------------------------------

BUSY = RouterAnswer(acknowledge=False, verdict=Verdict.BUSY, retry_after_ms=7000)
BLAMED = RouterAnswer(acknowledge=False, verdict=Verdict.FAILED, retry_after_ms=5000, blamed=True)


class Desk(Lanes):
    """An origin that takes records back."""

    def __init__(self, router, lanes, **more):
        super().__init__(router, lanes, retry=Retry.WHAT_IS_NOT_RETURNED, **more)

    @property
    def back(self):
        return [(place, one) for place, one in self.answers.items() if not one.acknowledge]


@pytest.mark.parametrize("answer", [BUSY, BLAMED])
@virtual
async def test_what_is_busy_or_to_blame_goes_back_at_once(answer):
    router = Doors(lambda one, times: answer if one == b"2" else FINAL)
    counter = Desk(router, "...")
    await counter.run()
    assert counter.back == [(2, answer)]
    assert counter.final == [1, 3]
    assert router.brought[b"2"] == 1


@virtual
async def test_with_it_goes_what_stands_behind_it_in_its_lane_and_nothing_else():
    router = Doors(lambda one, times: BUSY if one == b"2" else FINAL)
    counter = Desk(router, "aaaba.")
    await counter.run()
    assert [place for place, _ in counter.back] == [2, 3, 5]
    assert counter.answers[2] == BUSY
    assert {answer.retry_after_ms for _, answer in counter.back} == {7000}
    assert counter.answers[3].reason == "queued after one that has to be retried"
    assert sorted(counter.final) == [1, 4, 6]


@virtual
async def test_an_outage_gives_nothing_back():
    router = Doors(lambda one, times: later(2000) if times < 30 else FINAL)
    counter = Desk(router, "ab.")
    await counter.run()
    assert counter.back == []
    assert sorted(counter.final) == [1, 2, 3]


@virtual
async def test_at_a_stop_all_that_is_left_goes_back_with_no_pause():
    router = Doors(lambda one, times: later(60_000) if one == b"1" else FINAL)
    counter = Desk(router, "a.aa", then=hangs)
    running = asyncio.create_task(counter.run())
    await asyncio.sleep(1)
    assert counter.final == [2]
    counter.pump.stop()
    await running
    assert [place for place, _ in counter.back] == [1, 3, 4]
    assert {answer.retry_after_ms for _, answer in counter.back} == {0}


class Post:
    """An origin that counts how often it gives each message; what comes back is there later."""

    def __init__(self, router, *arrivals, **more):
        self.arrivals = arrivals
        self.there = [(0, item(place, one)) for place, one in enumerate(arrivals, start=1)]
        self.given = Counter()
        self.final = []
        self.back = []
        returns = {"retry": Retry.WHAT_IS_NOT_RETURNED}
        self.pump = Pump(router, self.note, **returns, ahead=20, batch=20, **more)

    async def take(self):
        while not (due := [one for at, one in self.there if at <= now()][:10]):  # noqa: ASYNC110
            await asyncio.sleep(1)
        self.there = [pair for pair in self.there if pair[1] not in due]
        self.given.update([one.handle for one in due])
        return due

    def note(self, place, answer):
        if answer.acknowledge:
            self.final.append(place)
            return
        self.back.append(place)
        due = now() + max(answer.retry_after_ms / 1000, 1)
        self.there.append((due, item(place, self.arrivals[place - 1])))

    @contextlib.asynccontextmanager
    async def running(self):
        running = asyncio.create_task(self.pump.run(self.take, takers=2))
        yield
        self.pump.stop()
        await running


def numbered(count, **detail):
    return [event({"n": n} | detail, id=f"e{n}") for n in range(1, count + 1)]


@pytest.mark.parametrize("answer", [No("refused"), Closed("401"), None])
@virtual
async def test_an_hour_of_outage_gives_no_message_back(answer):
    async with Bench(sink=ScriptedSink(otherwise=answer or Yes())) as bench:
        if answer is None:
            bench.store.arm("claim.before", times=1e9, for_s=3600)
        post = Post(Router([RouteEntry(bench.gateway)]), *numbered(100))
        async with post.running():
            await asyncio.sleep(3600)
            assert bench.sink.taken == []
            bench.sink.otherwise = Yes()
            # The longest pause that a gateway asks for, and a moment.
            await eventually(lambda: len(post.final) == 100, 330)
        assert len(bench.sink.taken) == 100
        assert Counter(post.given.values()) == {1: 100}, "each is received once"


@virtual
async def test_where_order_is_kept_nothing_goes_back_and_nothing_passes():
    async with Bench(rule(entity="detail.e"), settings=ORDERED) as bench:
        bench.sink.script = [Unknown("reset")] * 4
        post = Post(Router([RouteEntry(bench.gateway)]), *numbered(30, e="x"))
        async with post.running():
            await eventually(lambda: len(post.final) == 30, 600)
            assert post.back == []
        assert post.given.total() == 30
        numbers = [json.loads(raw)["detail"]["n"] for raw in bench.sink.raws]
        assert numbers == list(range(1, 31))


# --- what nobody foresaw --------------------------------------------------------------------------

BROKEN = RouterAnswer(acknowledge=False, verdict=Verdict.FAILED, reason="an unexpected error")


class Fragile(Doors):
    """A router that answers for nobody in a batch with the poison."""

    async def process_each(self, arrivals, answered, **_):
        broken = b"poison" in arrivals
        await super().process_each(
            arrivals, lambda at, answer: answered(at, BROKEN if broken else answer)
        )


def with_poison():
    return [item(n, b"poison" if n == 7 else str(n).encode()) for n in range(1, 13)]


@virtual
async def test_what_was_in_a_batch_that_broke_is_brought_alone_and_only_the_poison_goes_back():
    router = Fragile()
    counter = Desk(router, "")
    counter.left, counter.batch = with_poison(), 12
    running = asyncio.create_task(counter.run())
    await asyncio.sleep(1)
    assert counter.back == []
    assert sorted(counter.final) == [n for n in range(1, 13) if n != 7]
    await running
    assert [len(batch) for _, batch in router.batches] == [12] + [1] * (11 + 7)
    assert router.brought.pop(b"poison") == 8
    assert set(router.brought.values()) == {2}
    ((place, answer),) = counter.back
    assert (place, answer.retry_after_ms, answer.blamed) == (7, 300_000, True)


@virtual
async def test_poison_that_nobody_takes_back_is_tried_for_ever_alone_and_ever_more_seldom():
    router = Fragile(takes_s=0.3)
    numbers = itertools.count(13)

    async def more():
        await asyncio.sleep(0.1)
        number = next(numbers)
        return [item(number, str(number).encode())]

    shelf = Shelf(router, count=0, batch=12, then=more, at_once=1)
    shelf.left = with_poison()
    running = asyncio.create_task(shelf.run())
    await asyncio.sleep(600)
    shelf.pump.stop()
    await running
    assert set(range(1, 1000)) - set(shelf.final) == {7}
    first, *others = [(at, len(batch)) for at, batch in router.batches if b"poison" in batch]
    assert first[1] == 12
    assert {size for _, size in others} == {1}
    gaps = [after - before for (before, _), (after, _) in itertools.pairwise(others)]
    assert 20 < len(others) < 40
    assert gaps[-5:] == [pytest.approx(30, abs=1)] * 5


# --- several that take, several in one --------------------------------------------------------------


@virtual
async def test_several_take_side_by_side_and_what_they_bring_goes_together():
    router = Doors(takes_s=1)
    options = {"ahead": 100, "at_once": 1, "most_in_hand": 40}
    shelf = Shelf(router, count=60, batch=2, run={"takers": 5}, **options)
    took = 0

    async def take():
        nonlocal took
        took += 1
        assert took <= 5
        await asyncio.sleep(0.2)
        took -= 1
        batch, shelf.left = shelf.left[:2], shelf.left[2:]
        return batch or None

    shelf.take = take
    await shelf.run()
    assert sorted(shelf.final) == list(range(1, 61))
    sizes = [len(batch) for _, batch in router.batches]
    assert max(sizes) >= 30
    assert max(sizes) <= 40


@virtual
async def test_a_take_under_way_at_a_stop_may_come_to_its_end_within_its_leave():
    for takes_s, taken in ((0.5, [1]), (5, [])):
        counter = Desk(Doors(), "", run={"leave_s": 1})

        async def take(takes_s=takes_s):
            await asyncio.sleep(takes_s)
            return [item(1, b"1")]

        counter.take = take
        running = asyncio.create_task(counter.run())
        await asyncio.sleep(0.01)
        counter.pump.stop()
        began = now()
        await running
        assert now() - began <= 1
        assert [place for place, _ in counter.back] == taken


@virtual
async def test_not_more_is_taken_than_there_are_bytes_for():
    router = Doors(takes_s=100)
    shelf = Shelf(router, count=9, batch=1, ahead=100, at_once=1, most_bytes=4)
    running = asyncio.create_task(shelf.run())
    await asyncio.sleep(50)
    assert len(shelf.left) == 5
    await running
    assert shelf.pump.is_through


@virtual
async def test_a_record_of_several_events_is_final_when_all_of_them_are():
    router = Doors(lambda one, times: later() if one == b"b" and times < 3 else FINAL)
    router.unwrap = lambda raw: raw.split(b",")
    shelf = Shelf(router, count=0, unwraps=True)
    shelf.left = [item(1, b"a,b,c"), item(2, b"d")]
    await shelf.run()
    assert shelf.final == [2, 1]
    assert router.brought == {b"a": 1, b"b": 3, b"c": 1, b"d": 1}, "what is final is final"


@virtual
async def test_of_a_record_only_what_is_not_final_is_brought_again():
    rules = rule(name="log", match={"detail-type": ["Log"]}, key="none"), rule()
    async with Bench(*rules) as bench:
        bench.sink.otherwise = lambda one: Yes() if b"Log" in one.event.raw else No("refused")
        shelf = Shelf(Router([RouteEntry(bench.gateway)]), count=0, unwraps=True)
        shelf.left = [item(1, b"[" + event(detail_type="Log") + b"," + event() + b",7]")]
        running = asyncio.create_task(shelf.run())
        await asyncio.sleep(60)
        assert shelf.final == []
        bench.sink.otherwise = Yes()
        await running
        assert bench.sink.raws == [event(detail_type="Log"), event()]
        assert [letter.raw for letter in await bench.letters()] == [b"7"]


@virtual
async def test_what_is_retried_while_its_first_batch_still_runs_is_answered_once():
    """Was a bug: at the end of the first batch it was retried once more, and was empty by then."""
    ends = [asyncio.Event(), asyncio.Event()]
    brought = []

    class Early(Doors):
        async def process_each(self, arrivals, answered, **_):
            brought.append(list(arrivals))
            if len(brought) == 1:
                answered(0, later(ms=1))
            await ends[len(brought) - 1].wait()
            answered(len(arrivals) - 1, FINAL)

    shelf = in_order(Early(), 2, 2)
    running = asyncio.create_task(shelf.run())
    await asyncio.sleep(1)
    assert brought == [[b"1", b"2"], [b"1"]]
    ends[0].set()
    await asyncio.sleep(1)
    ends[1].set()
    await running
    assert (brought, shelf.final) == ([[b"1", b"2"], [b"1"]], [1, 2])


@virtual
async def test_what_is_answered_early_is_told_early():
    class Early(Doors):
        async def process_each(self, arrivals, answered, **_):
            for at, one in enumerate(arrivals):
                asyncio.get_running_loop().call_later(int(one), answered, at, FINAL)
            await asyncio.sleep(20)

    shelf = in_order(Early())
    running = asyncio.create_task(shelf.run())
    await asyncio.sleep(2.5)
    assert shelf.final == [1, 2]
    await running
    assert shelf.final == list(range(1, 21))


# --- whatever happens --------------------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(
    st.tuples(st.integers(0, 30), st.integers(1, 7), st.integers(1, 5)),
    st.dictionaries(st.integers(1, 30), st.integers(1, 6), max_size=12),
    st.none() | st.floats(0, 30),
    st.booleans(),
)
def test_the_checkpoint_never_passes_what_is_not_final(sizes, stubborn, stops, ends):
    """Each of the *stubborn* is handed back so many times; `in_order` checks every answer."""
    count, batch, at_once = sizes

    async def run():
        router = Doors(lambda one, times: FINAL if times > stubborn.get(int(one), 0) else later())
        shelf = in_order(router, count, batch, at_once=at_once, then=None if ends else hangs)
        running = asyncio.create_task(shelf.run())
        if stops is not None or not ends:
            await asyncio.sleep(100 if stops is None else stops)
            shelf.pump.stop()
            began = now()
            await running
            assert now() - began <= 0.1001
        await running
        assert router.under_way == 0
        assert router.most_under_way <= at_once
        done = {*map(int, router.accepted)}
        unfinished = [number for number in range(1, count + 1) if number not in done]
        assert not shelf.pump.is_through or (ends and not unfinished)
        if ends and stops is None:
            assert shelf.pump.is_through
        assert len(shelf.answers) == count - len(shelf.left), "each that was taken has an answer"
        assert shelf.final == list(range(1, min(unfinished, default=count + 1)))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


# --- calls that end: everything is put at once ---------------------------------------------------


def put_all(router, *lanes, **more):
    """Put records named after their lanes, such as a1 and a2, and return the pump and the answers."""
    answers = {}
    more = {"retry": Retry.NOTHING, "at_once": math.inf} | more
    pump = Pump(router, answers.__setitem__, **more)
    pump.put([item(name, name.encode(), name[0]) for lane in lanes for name in lane.split()])
    return pump, answers


def batches(router):
    return [sorted(one.decode() for one in batch) for _, batch in router.batches]


@virtual
async def test_what_may_start_together_does_and_lanes_keep_their_order():
    router = Doors(takes_s=0)
    pump, answers = put_all(router, "a1 a2 a3", "b1 b2", "c1")
    assert await pump.aclose()
    assert batches(router) == [["a1", "b1", "c1"], ["a2", "b2"], ["a3"]]
    assert {answer.acknowledge for answer in answers.values()} == {True}


class Slow(Doors):
    """A router that answers each record after a time of its own."""

    def __init__(self, **seconds):
        super().__init__()
        self.seconds = seconds

    async def process_each(self, arrivals, answered, **_):
        self.batches.append((now(), list(arrivals)))

        async def one(at, raw):
            await asyncio.sleep(self.seconds.get(raw.decode(), 0))
            answered(at, self.decide(raw, 1))

        await asyncio.gather(*[one(at, raw) for at, raw in enumerate(arrivals)])


@virtual
async def test_lanes_do_not_wait_for_each_other_nor_for_the_end_of_a_batch():
    router = Slow(a1=10)
    pump, _ = put_all(router, "a1 a2", "b1 b2 b3")
    assert await pump.aclose()
    assert batches(router) == [["a1", "b1"], ["b2"], ["b3"], ["a2"]]


@virtual
async def test_where_one_is_handed_back_the_rest_of_its_lane_is_not_started():
    router = Doors(lambda one, times: later() if one == b"a2" else FINAL, takes_s=0)
    pump, answers = put_all(router, "a1 a2 a3 a4", "b1 b2 b3")
    assert await pump.aclose()
    assert batches(router) == [["a1", "b1"], ["a2", "b2"], ["b3"]]
    refused = {name: answer for name, answer in answers.items() if not answer.acknowledge}
    assert list(refused) == ["a2", "a3", "a4"]
    assert [refused[name].reason for name in refused][1:] == [
        "queued after one that has to be retried"
    ] * 2


@virtual
async def test_it_ends_when_the_last_batch_is_back_and_not_when_all_is_told():
    class Lingering(Doors):
        async def process_each(self, arrivals, answered, **_):
            answered(0, FINAL)
            await asyncio.sleep(3)

    began = now()
    pump, _ = put_all(Lingering(), "a1")
    assert await pump.aclose()
    assert now() - began == pytest.approx(3)


@pytest.mark.parametrize("takes_s", [0, 0.1, 50])
@virtual
async def test_when_the_time_is_over_the_rest_is_answered_and_what_was_taken_stays(takes_s):
    """*takes_s*: how long what is cancelled needs to end."""

    class Leaving(Doors):
        async def process_each(self, arrivals, answered, **_):
            for at, one in enumerate(arrivals):
                if one != b"a1":
                    answered(at, FINAL)
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(takes_s)
                for at, one in enumerate(arrivals):
                    if one == b"a1":
                        answered(at, later())
                raise

    pump, answers = put_all(Leaving(), "a1 a2", "b1", ends=now() + 10)
    began = now()
    assert not await pump.aclose(11, 0.5)
    assert now() - began == pytest.approx(11 + min(takes_s, 0.5))
    assert {name: answer.acknowledge for name, answer in answers.items()} == {
        "a1": False,
        "a2": False,
        "b1": True,
    }
    assert answers["a1"].reason == "no time left"
    pump.put([item("c1", b"c1", "c")])
    assert not answers["c1"].acknowledge, "nothing is accepted any more"
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


@virtual
async def test_the_time_that_is_left_goes_with_each_batch_and_without_any_nothing_starts():
    times = []

    class Timed(Slow):
        async def process_each(self, arrivals, answered, *, within, patience, in_place):
            times.append((within.total_seconds(), patience.total_seconds(), in_place))
            await super().process_each(arrivals, answered)

    router = Timed(a1=3, a2=8)
    pump, answers = put_all(router, "a1 a2 a3", ends=now() + 10, patience_s=900)
    assert await pump.aclose(12)
    assert times == [(10, 9.5, True), (7, 6.5, True)]
    assert answers["a2"].acknowledge
    assert answers["a3"].reason == "no time left"


@virtual
async def test_who_breaks_it_off_waits_until_all_is_told():
    pump, answers = put_all(Slow(a1=100), "a1 a2")
    closing = asyncio.create_task(pump.aclose())
    await asyncio.sleep(1)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert sorted(answers) == ["a1", "a2"]
    assert len(asyncio.all_tasks()) == 1
