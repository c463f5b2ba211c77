import asyncio

import pytest
from tests.faults.doubles import After, Bench, ScriptedSink, event, eventually, seconds, virtual

from oncebridge import Verdict, Yes
from oncebridge.engine.cpu_turns import SMALL, CpuTurns
from oncebridge.engine.router import RouteEntry, Router, RouterAnswer
from oncebridge.sources.pump import PumpInbox


class Recorder:
    """A router that notes its batches, and answers when it is told to."""

    def __init__(self, *, fails=None, answers=None):
        self.batches = []
        self.fails = fails
        self.answers = answers
        self.go = asyncio.Event()
        self.go.set()
        self.parsed = []
        self.cpu_turns = CpuTurns()

    def read(self, raw):
        self.parsed.append((len(self.batches), raw))
        return raw

    crowded = 0.0

    def rate_limited_s(self) -> float:
        return self.crowded

    async def process_each(self, arrivals, answered, **_):
        self.batches.append(list(arrivals))
        await self.go.wait()
        answer = RouterAnswer(acknowledge=True, verdict=Verdict.DELIVERED)
        some = len(arrivals) if self.answers is None else self.answers
        for at in range(some):
            answered(at, answer)
        if self.fails is not None:
            raise self.fails


class Callers:
    """Those who put something, and what they have heard."""

    def __init__(self, inbox):
        self.inbox = inbox
        self.heard = {}

    def put(self, *names):
        for name in names:
            self.put_all(name)

    def put_all(self, *names, size=0):
        """Put them as one request, each record of *size* bytes."""
        heard = [self.heard.setdefault(name, []) for name in names]
        raws = [str(name).encode().ljust(size) for name in names]
        self.inbox.put(raws, lambda at, answer: heard[at].append(answer))

    @property
    def counts(self):
        return {name: len(answers) for name, answers in self.heard.items()}

    @property
    def refused(self):
        return [name for name, answers in self.heard.items() if not answers[0].acknowledge]


@virtual
async def test_whatever_comes_in_one_turn_of_the_loop_goes_together():
    router = Recorder()
    callers = Callers(PumpInbox(router))
    callers.put(1, 2, 3)
    assert router.batches == []
    await asyncio.sleep(0.01)
    callers.put(4)
    await asyncio.sleep(0.01)
    assert router.batches == [[b"1", b"2", b"3"], [b"4"]]
    assert callers.counts == {1: 1, 2: 1, 3: 1, 4: 1}


@virtual
async def test_a_batch_that_is_under_way_does_not_hold_up_the_next():
    router = Recorder()
    router.go.clear()
    callers = Callers(PumpInbox(router))
    callers.put(1)
    await asyncio.sleep(1)
    callers.put(2)
    await asyncio.sleep(1)
    assert router.batches == [[b"1"], [b"2"]]
    router.go.set()
    await asyncio.sleep(1)
    assert callers.counts == {1: 1, 2: 1}


@pytest.mark.parametrize(("batch", "sizes"), [(1, [1] * 7), (2, [2, 2, 2, 1]), (7, [7]), (8, [7])])
@virtual
async def test_no_batch_is_larger_than_it_may_be(batch, sizes):
    router = Recorder()
    callers = Callers(PumpInbox(router, batch=batch))
    callers.put(*range(7))
    await asyncio.sleep(0.01)
    assert [len(one) for one in router.batches] == sizes
    assert [int(raw) for one in router.batches for raw in one] == list(range(7)), "in order"
    assert set(callers.counts.values()) == {1}


@virtual
async def test_when_too_much_is_under_way_the_rest_is_refused_at_once():
    router = Recorder()
    router.go.clear()
    callers = Callers(PumpInbox(router, batch=2, at_most=3))
    callers.put(1, 2, 3, 4, 5)
    assert {name: len(heard) for name, heard in callers.heard.items()} == {
        1: 0,
        2: 0,
        3: 0,
        4: 1,
        5: 1,
    }
    (answer,) = callers.heard[4]
    assert (answer.acknowledge, answer.verdict) == (False, Verdict.FAILED)
    assert answer.retry_after_ms > 0
    router.go.set()
    await asyncio.sleep(0.01)
    callers.put(6, 7, 8, 9)
    await asyncio.sleep(0.01)
    assert callers.refused == [4, 5, 9]
    assert set(callers.counts.values()) == {1}


@pytest.mark.parametrize("error", [RuntimeError("boom"), asyncio.CancelledError()])
@pytest.mark.parametrize("answers", [0, 2, 3])
@virtual
async def test_a_router_that_explodes_still_answers_everybody_once(error, answers):
    inbox = PumpInbox(Recorder(fails=error, answers=answers), at_most=3)
    callers = Callers(inbox)
    for _ in range(3):
        callers.heard.clear()
        callers.put(1, 2, 3)
        await asyncio.sleep(0.01)
        assert callers.counts == {1: 1, 2: 1, 3: 1}
        assert callers.refused == [1, 2, 3][answers:]
    assert inbox._pump.untold == 0, "or it would refuse everything some day"
    assert inbox._pump._tasks == set()


@pytest.mark.parametrize("steps", range(4))
@virtual
async def test_wherever_a_batch_is_broken_off_everybody_is_answered_once(steps):
    router = Recorder()
    router.go.clear()
    inbox = PumpInbox(router)
    callers = Callers(inbox)
    callers.put(1, 2)
    for _ in range(steps):
        await asyncio.sleep(0)
    await inbox.aclose(0)
    assert callers.counts == {1: 1, 2: 1}
    assert callers.refused == [1, 2]
    assert inbox._pump.untold == 0


@virtual
async def test_one_who_fails_to_listen_does_not_cost_the_others(caplog):
    def deaf(at, answer):
        raise ZeroDivisionError("payload")

    async with Bench() as bench:
        inbox = PumpInbox(Router([RouteEntry(bench.gateway)]))
        heard = []
        inbox.put([event({"n": 1})], deaf)
        inbox.put([event({"n": 2})], lambda at, answer: heard.append(answer))
        inbox.put([event({"n": 3})], deaf)
        await inbox.aclose()
        assert [answer.verdict for answer in heard] == [Verdict.DELIVERED]
        assert bench.books.verdicts[Verdict.DELIVERED] == 3
        assert bench.books.in_flight == 0
        assert inbox._pump.untold == 0
        assert "payload" not in caplog.text


@virtual
async def test_the_quick_are_answered_before_the_slow_of_the_same_batch():
    slow = event({"n": "slow"})
    sink = ScriptedSink(otherwise=lambda one: After(8, Yes()) if one.event.raw == slow else Yes())
    async with Bench(sink=sink) as bench:
        inbox = PumpInbox(Router([RouteEntry(bench.gateway)]))
        heard = []
        names = ["slow", "quick"]
        inbox.put([slow, event({"n": "quick"})], lambda at, _: heard.append(names[at]))
        await asyncio.sleep(1)
        assert heard == ["quick"]
        await inbox.aclose()
        assert heard == ["quick", "slow"]


@virtual
async def test_closing_waits_for_what_is_under_way_and_for_what_was_just_put():
    router = Recorder()
    router.go.clear()
    inbox = PumpInbox(router)
    callers = Callers(inbox)
    callers.put(1)
    await asyncio.sleep(0.01)
    callers.put(2)
    closing = asyncio.create_task(inbox.aclose())
    await asyncio.sleep(1)
    assert not closing.done()
    router.go.set()
    await closing
    assert callers.counts == {1: 1, 2: 1}


@virtual
async def test_a_gateway_that_drains_hands_back_what_is_put_meanwhile():
    async with Bench(sink=ScriptedSink(otherwise=After(5, Yes()))) as bench:
        inbox = PumpInbox(Router([RouteEntry(bench.gateway)]))
        heard = []
        inbox.put([event({"n": 1})], lambda at, answer: heard.append(answer))
        await eventually(lambda: bench.sink.under_way)
        draining = asyncio.create_task(bench.gateway.drain(seconds(20)))
        await asyncio.sleep(0.1)
        inbox.put([event({"n": 2})], lambda at, answer: heard.append(answer))
        assert await draining
        await inbox.aclose()
        assert [answer.acknowledge for answer in heard] == [False, True]
        assert len(bench.sink.seen) == 1


# --- large requests -----------------------------------------------------------------------


@virtual
async def test_a_small_request_goes_with_whatever_else_comes():
    router = Recorder()
    callers = Callers(PumpInbox(router))
    callers.put(1)
    callers.put_all(2, 3, size=SMALL // 2)
    callers.put(4)
    await asyncio.sleep(0.01)
    assert [len(batch) for batch in router.batches] == [4]
    assert callers.counts == {1: 1, 2: 1, 3: 1, 4: 1}


@virtual
async def test_a_large_request_is_parsed_first_in_turns_while_others_pass():
    router = Recorder()
    callers = Callers(PumpInbox(router, batch=2))
    async with router.cpu_turns:  # of another large request
        callers.put_all(*range(5), size=SMALL)
        callers.put(9)
        await asyncio.sleep(0.01)
        assert router.batches == [[b"9"]]
        assert [raw for _, raw in router.parsed] == [b"9"], "the large one waits for its turn"
    await asyncio.sleep(0.01)
    assert [int(raw) for begun, raw in router.parsed if begun == 1] == list(range(5))
    assert [[int(raw) for raw in batch] for batch in router.batches[1:]] == [[0, 1], [2, 3], [4]]
    assert set(callers.counts.values()) == {1}
    assert callers.refused == []
    assert (callers.inbox._pump.untold, callers.inbox._pump._bytes) == (0, 0)


@pytest.mark.parametrize("bound", [{"at_most": 8}, {"at_most_bytes": 8 * SMALL}])
@virtual
async def test_large_requests_leave_room_for_single_records(bound):
    router = Recorder()
    router.go.clear()
    callers = Callers(PumpInbox(router, **bound))
    callers.put_all(*range(4), size=SMALL)
    callers.put_all(*range(10, 13), size=SMALL)
    assert [len(callers.heard[name]) for name in range(10, 13)] == [1] * 3, "as a whole, at once"
    assert callers.heard[10][0].retry_after_ms > 0
    callers.put(20, 21, 22, 23)
    router.go.set()
    await asyncio.sleep(0.01)
    assert callers.refused == [10, 11, 12]
    callers.put_all(*range(30, 36), size=SMALL)
    await asyncio.sleep(0.01)
    assert callers.refused == [10, 11, 12]
    assert set(callers.counts.values()) == {1}
    assert (callers.inbox._pump.untold, callers.inbox._pump._bytes) == (0, 0)


@pytest.mark.parametrize("steps", range(6))
@virtual
async def test_wherever_the_reading_is_broken_off_everybody_is_answered_once(steps):
    router = Recorder()
    router.go.clear()
    inbox = PumpInbox(router, batch=2)
    callers = Callers(inbox)
    callers.put_all(*range(5), size=SMALL)
    for _ in range(steps):
        await asyncio.sleep(0)
    await inbox.aclose(0)
    assert set(callers.counts.values()) == {1}
    assert callers.refused == list(range(5))
    assert (inbox._pump.untold, inbox._pump._bytes) == (0, 0)


@virtual
async def test_a_close_waits_for_what_is_being_read():
    router = Recorder()
    inbox = PumpInbox(router, batch=2)
    callers = Callers(inbox)
    callers.put_all(*range(5), size=SMALL)
    await inbox.aclose(10)
    assert set(callers.counts.values()) == {1}
    assert callers.refused == []


@virtual
async def test_a_close_whose_time_is_over_answers_what_is_being_read():
    router = Recorder()
    inbox = PumpInbox(router)
    callers = Callers(inbox)
    async with router.cpu_turns:
        callers.put_all(*range(5), size=SMALL)
        await inbox.aclose(1)
    assert callers.refused == list(range(5))


@virtual
async def test_while_enough_wait_for_the_sink_more_are_refused_at_once_with_a_time():
    router, told = Recorder(), []
    inbox = PumpInbox(router)
    router.crowded = 3.2
    inbox.put([b"1"], lambda at, answer: told.append(answer))
    assert router.batches == []
    assert [(answer.acknowledge, answer.verdict) for answer in told] == [(False, Verdict.FAILED)]
    assert told[0].retry_after_ms == 3201
    assert told[0].reason == "too many events are waiting for the sink"
