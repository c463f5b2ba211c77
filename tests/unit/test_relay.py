import asyncio
import itertools
import json
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

from oncebridge import No, Settings, Unknown, Verdict, Yes
from oncebridge.relay import Relay
from oncebridge.router import Answer, Router, Way

FINAL = Answer(acknowledge=True, verdict=Verdict.DELIVERED)


def later(ms=1000):
    return Answer(acknowledge=False, verdict=Verdict.FAILED, retry_after_ms=ms, reason="later")


class Doors:
    """A router that answers by *decide*, which is asked with each arrival and its times."""

    is_ordered = False

    def __init__(self, decide=lambda arrival, times: FINAL, takes_s=0.1):
        self.decide = decide
        self.takes_s = takes_s
        self.brought = Counter()
        self.batches = []
        self.under_way = 0
        self.most_under_way = 0
        self.away = 0.0

    def away_s(self):
        return self.away

    async def process(self, arrivals, **_):
        self.batches.append((now(), list(arrivals)))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(self.takes_s)
            self.brought.update(arrivals)
            return [self.decide(one, self.brought[one]) for one in arrivals]
        finally:
            self.under_way -= 1


class Shelf:
    """Records numbered from 1, given in batches, and what was told of them."""

    def __init__(self, router, count=20, batch=3, *, then=None, **more):
        self.left = [(number, str(number).encode()) for number in range(1, count + 1)]
        self.batch = batch
        self.then = then
        self.final = []
        self.passed = []
        self.relay = Relay(
            router, take=self.take, final=self.note_final, passed=self.note_passed, **more
        )

    async def take(self):
        await asyncio.sleep(0)
        batch, self.left = self.left[: self.batch], self.left[self.batch :]
        if not batch and self.then is not None:
            return await self.then()
        return batch

    async def note_final(self, numbers):
        self.final += numbers

    async def note_passed(self, place):
        done = set(self.final)
        assert all(number in done for number in range(1, place + 1)), "passed what is not final"
        assert not self.passed or place > self.passed[-1], "in order"
        self.passed.append(place)


async def hangs():
    await asyncio.Event().wait()


# --- bringing ------------------------------------------------------------------------------------


@virtual
async def test_everything_is_brought_once_and_passed_in_order():
    router = Doors()
    shelf = Shelf(router)
    await shelf.relay.run()
    assert shelf.relay.is_through
    assert sorted(shelf.final) == list(range(1, 21))
    assert shelf.passed[-1] == 20
    assert set(router.brought.values()) == {1}


@virtual
async def test_nothing_to_bring_is_through_at_once():
    shelf = Shelf(Doors(), count=0)
    await shelf.relay.run()
    assert shelf.relay.is_through
    assert shelf.passed == []


@virtual
async def test_a_few_batches_are_under_way_at_once_and_no_more():
    router = Doors(takes_s=5)
    await Shelf(router, at_once=4).relay.run()
    assert router.most_under_way == 4


@virtual
async def test_what_was_handed_back_is_brought_again_alone_after_the_time_it_asks_for():
    router = Doors(lambda one, times: later(3000) if one == b"2" and times < 3 else FINAL, 0)
    shelf = Shelf(router, count=3)
    began = now()
    await shelf.relay.run()
    assert [(at - began, batch) for at, batch in router.batches] == [
        (0, [b"1", b"2", b"3"]),
        (3, [b"2"]),
        (6, [b"2"]),
    ]
    assert shelf.final == [1, 3, 2]
    assert shelf.passed == [3]


@virtual
async def test_it_stays_away_as_long_as_the_router_is_away_but_not_for_ever():
    def decide(one, times):
        router.away = {1: 12, 2: 5000}.get(times, 0)
        return later(10) if times < 3 else FINAL

    router = Doors(decide, 0)
    began = now()
    await Shelf(router, count=1).relay.run()
    assert [round(at - began) for at, _ in router.batches] == [0, 12, 42]


@virtual
async def test_nothing_is_read_while_the_router_is_away():
    router = Doors()
    router.away = 60
    shelf = Shelf(router)
    running = asyncio.create_task(shelf.relay.run())
    await asyncio.sleep(30)
    assert router.batches == []
    assert len(shelf.left) == 20
    router.away = 0
    await running
    assert shelf.relay.is_through


@virtual
async def test_others_pass_what_waits_to_be_brought_again_but_only_so_many():
    router = Doors(lambda one, times: later(50_000) if int(one) <= 12 and times < 2 else FINAL)
    shelf = Shelf(router, count=40, at_once=2, most_waiting=100)
    running = asyncio.create_task(shelf.relay.run())
    await asyncio.sleep(20)
    assert sorted(shelf.final) == list(range(13, 41))
    assert shelf.passed == []
    await running
    assert shelf.passed[-1] == 40

    shelf = Shelf(Doors(router.decide), count=40, at_once=2, most_waiting=12)
    running = asyncio.create_task(shelf.relay.run())
    await asyncio.sleep(20)
    assert len(shelf.final) <= 6
    await running
    assert shelf.relay.is_through


@virtual
async def test_where_nobody_says_when_the_pauses_grow():
    router = Doors(lambda one, times: later(0) if times < 16 else FINAL, 0)
    await Shelf(router, count=1).relay.run()
    moments = [at for at, _ in router.batches]
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    assert gaps[0] == pytest.approx(0.05)
    assert gaps[3] == pytest.approx(0.4)
    assert gaps == sorted(gaps)
    assert gaps[-1] == pytest.approx(30)


@virtual
async def test_one_batch_that_has_to_wait_does_not_hold_up_the_rest_but_nothing_passes_it():
    router = Doors(lambda one, times: later(20_000) if one == b"5" and times == 1 else FINAL)
    shelf = Shelf(router)
    running = asyncio.create_task(shelf.relay.run())
    await asyncio.sleep(10)
    assert len(shelf.final) == 19
    assert shelf.passed[-1] == 3
    await running
    assert shelf.passed[-1] == 20
    assert shelf.relay.is_through


@virtual
async def test_who_has_waited_gets_a_place_among_those_that_come_new():
    router = Doors(lambda one, times: later(100) if one == b"1" and times == 1 else FINAL, 1)
    shelf = Shelf(router, count=200, batch=1, at_once=1)
    running = asyncio.create_task(shelf.relay.run())
    await eventually(lambda: router.brought[b"1"] == 2)
    assert len(shelf.final) < 10
    await running


# --- stopping ------------------------------------------------------------------------------------


@virtual
async def test_it_stops_at_once_while_it_waits_for_something_to_take():
    shelf = Shelf(Doors(), then=hangs)
    running = asyncio.create_task(shelf.relay.run())
    await asyncio.sleep(10)
    began = now()
    shelf.relay.stop()
    await running
    assert now() == began
    assert not shelf.relay.is_through
    assert shelf.passed[-1] == 20, "what is final is passed all the same"


@virtual
async def test_it_stops_at_once_while_all_batches_wait_to_be_brought_again():
    shelf = Shelf(Doors(lambda one, times: later(3_600_000)))
    running = asyncio.create_task(shelf.relay.run())
    await asyncio.sleep(10)
    began = now()
    shelf.relay.stop()
    await running
    assert now() == began
    assert not shelf.relay.is_through
    assert (shelf.final, shelf.passed) == ([], [])


@virtual
async def test_what_waits_for_a_place_when_it_stops_is_not_brought_again():
    def decide(one, times):
        return later(100) if int(one) <= 3 else FINAL

    router = Doors(decide, 1)
    shelf = Shelf(router, count=6, batch=1, at_once=1)
    running = asyncio.create_task(shelf.relay.run())
    await eventually(
        lambda: router.brought[b"4"] or (router.under_way and len(router.batches) == 4)
    )
    shelf.relay.stop()
    brought = len(router.batches)
    await running
    assert len(router.batches) == brought
    assert shelf.passed == []


@virtual
async def test_it_stops_at_once_while_nobody_takes_anything():
    router = Doors()
    router.away = 3600
    shelf = Shelf(router)
    running = asyncio.create_task(shelf.relay.run())
    await asyncio.sleep(10)
    began = now()
    shelf.relay.stop()
    await running
    assert now() == began
    assert router.batches == []


@virtual
async def test_it_stops_before_it_has_begun():
    router = Doors()
    shelf = Shelf(router)
    shelf.relay.stop()
    await shelf.relay.run()
    assert router.batches == []
    assert not shelf.relay.is_through


@virtual
async def test_what_is_under_way_when_it_stops_is_awaited_and_counts():
    shelf = Shelf(Doors(takes_s=5), count=6)
    running = asyncio.create_task(shelf.relay.run())
    await asyncio.sleep(1)
    shelf.relay.stop()
    await running
    assert sorted(shelf.final) == [1, 2, 3, 4, 5, 6]
    assert shelf.passed[-1] == 6


@virtual
async def test_what_is_handed_back_after_the_stop_stays_where_it_is():
    router = Doors(lambda one, times: later() if one == b"4" else FINAL, 5)
    shelf = Shelf(router, count=9)
    running = asyncio.create_task(shelf.relay.run())
    await asyncio.sleep(1)
    shelf.relay.stop()
    await running
    assert router.brought[b"4"] == 1
    assert shelf.passed == [3]
    assert not shelf.relay.is_through


@virtual
async def test_a_sink_that_hangs_holds_it_up_no_longer_than_the_gateway():
    async with Bench(sink=ScriptedSink(otherwise=Deaf(3600, Yes()))) as bench:
        shelf = Shelf(Router([Way(bench.gateway)]), count=0)
        shelf.left = [(1, event())]
        running = asyncio.create_task(shelf.relay.run())
        await eventually(lambda: bench.sink.under_way)
        shelf.relay.stop()
        began = now()
        await bench.gateway.drain(seconds(25))
        await running
        assert now() - began <= 10
        assert (shelf.final, shelf.relay.is_through) == ([], False)


@virtual
async def test_it_stops_at_once_when_the_gateway_is_paused():
    async with Bench() as bench:
        bench.gateway.pause()
        shelf = Shelf(Router([Way(bench.gateway)]), count=0)
        shelf.left = [(1, event())]
        running = asyncio.create_task(shelf.relay.run())
        await asyncio.sleep(60)
        began = now()
        shelf.relay.stop()
        await running
        assert now() == began
        assert bench.sink.seen == []


@virtual
async def test_a_paused_route_is_brought_everything_when_it_goes_on():
    async with Bench() as bench:
        bench.gateway.pause()
        shelf = Shelf(Router([Way(bench.gateway)]), count=0)
        shelf.left = [(n, event({"n": n}, id=f"e{n}")) for n in range(1, 8)]
        running = asyncio.create_task(shelf.relay.run())
        await asyncio.sleep(300)
        assert bench.store.calls["claim"] == 0
        bench.gateway.resume()
        await running
        assert shelf.relay.is_through
        assert len(bench.sink.taken) == 7


# --- errors ---------------------------------------------------------------------------------------


async def fails():
    raise ZeroDivisionError


@virtual
async def test_where_taking_fails_what_was_taken_before_is_still_brought_to_its_end():
    router = Doors(lambda one, times: later() if times < 4 else FINAL)
    shelf = Shelf(router, then=fails)
    with pytest.raises(ZeroDivisionError):
        await shelf.relay.run()
    assert shelf.passed[-1] == 20
    assert not shelf.relay.is_through


@pytest.mark.parametrize("what", ["final", "passed"])
@virtual
async def test_where_noting_fails_the_others_come_back_and_the_error_is_raised(what):
    router = Doors(lambda one, times: later() if one == b"20" else FINAL)
    shelf = Shelf(router)

    async def note(place):
        raise ZeroDivisionError

    setattr(shelf.relay, f"_{what}", note)
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(60):
            await shelf.relay.run()
    assert router.under_way == 0
    assert len(asyncio.all_tasks()) == 1
    assert not shelf.relay.is_through


@virtual
async def test_where_the_router_fails_nothing_behind_it_is_passed():
    def decide(one, times):
        if one == b"8":
            raise ZeroDivisionError
        return FINAL

    shelf = Shelf(Doors(decide))
    with pytest.raises(ZeroDivisionError):
        await shelf.relay.run()
    assert shelf.passed[-1] == 6
    assert len(asyncio.all_tasks()) == 1


@virtual
async def test_cancelled_it_brings_nothing_more():
    router = Doors(lambda one, times: later() if one == b"4" else FINAL)
    shelf = Shelf(router, then=hangs)
    running = asyncio.create_task(shelf.relay.run())
    await asyncio.sleep(10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(60):
            await running
    assert shelf.passed == [3]
    assert len(asyncio.all_tasks()) == 1


# --- order ----------------------------------------------------------------------------------------

ORDERED = Settings(order="entity", breaker=1000, max_attempts=1000)


@virtual
async def test_an_ordered_router_is_brought_one_batch_at_a_time():
    async with Bench(rule(entity="detail.e"), settings=ORDERED) as bench:
        router = Router([Way(bench.gateway)])
        shelf = Shelf(router, count=0, at_once=4)
        shelf.left = [(n, event({"e": "x", "n": n}, id=f"e{n}")) for n in range(1, 10)]
        bench.sink.script = [Unknown("reset"), Yes(), No("refused"), Unknown("reset")]
        await shelf.relay.run()
        assert shelf.relay.is_through
        numbers = [json.loads(raw)["detail"]["n"] for raw in bench.sink.raws]
        assert numbers == list(range(1, 10))


ANSWERS = st.sampled_from([Yes(), Unknown("reset"), No("refused"), After(2, Yes())])


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=15),
    st.lists(ANSWERS, max_size=25),
    st.integers(1, 5),
)
def test_entities_of_a_file_arrive_in_its_order_whatever_the_sink_does(entities, script, batch):
    async def run():
        sink = ScriptedSink(*script)
        async with Bench(rule(entity="detail.e"), sink=sink, settings=ORDERED) as bench:
            shelf = Shelf(Router([Way(bench.gateway)]), count=0, batch=batch)
            shelf.left = [
                (n, event({"e": entity, "n": n}, id=f"e{n}"))
                for n, entity in enumerate(entities, start=1)
            ]
            await shelf.relay.run()
            assert shelf.relay.is_through
            assert shelf.passed[-1] == len(entities)
            taken = [json.loads(raw)["detail"] for raw in sink.raws]
            for entity in "abc":
                own = [detail["n"] for detail in taken if detail["e"] == entity]
                assert own == [n for n, e in enumerate(entities, start=1) if e == entity]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


# --- whatever happens --------------------------------------------------------------------------------


@settings(max_examples=200)
@given(
    st.tuples(st.integers(0, 30), st.integers(1, 7), st.integers(1, 5)),
    st.dictionaries(st.integers(1, 30), st.integers(1, 6), max_size=12),
    st.none() | st.floats(0, 30),
    st.booleans(),
)
def test_the_checkpoint_never_passes_what_is_not_final(sizes, stubborn, stops, ends):
    """Each of the *stubborn* is handed back so many times; `Shelf` checks every passing."""
    count, batch, at_once = sizes

    async def run():
        router = Doors(lambda one, times: FINAL if times > stubborn.get(int(one), 0) else later())
        shelf = Shelf(router, count, batch, at_once=at_once, then=None if ends else hangs)
        running = asyncio.create_task(shelf.relay.run())
        if stops is not None or not ends:
            await asyncio.sleep(100 if stops is None else stops)
            shelf.relay.stop()
            began = now()
            await running
            assert now() - began <= 0.1001
        await running
        assert router.under_way == 0
        assert router.most_under_way <= at_once
        unfinished = [number for number in range(1, count + 1) if number not in shelf.final]
        assert not shelf.relay.is_through or (ends and not unfinished)
        if ends and stops is None:
            assert shelf.relay.is_through
        reached = shelf.passed[-1] if shelf.passed else 0
        assert reached <= min(unfinished, default=count + 1) - 1
        # Nothing is left behind that could have been passed: whole batches, up to the first
        # that is not final.
        whole = (min(unfinished, default=count + 1) - 1) // batch * batch
        assert reached >= min(whole, count)
        assert len(shelf.final) == len(set(shelf.final))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
