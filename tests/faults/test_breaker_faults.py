"""
Sinks and stores that are down, for seconds or for hours, and sinks that want to be spared.

What counts: nobody knocks while the door is shut, nobody waits longer than needed once it
is open again, and nothing is lost or sent twice on the way.
"""

import asyncio
import json
from collections import Counter

import pytest

from oncebridge import Closed, Never, No, Settings, Unknown, Unwell, Verdict, Yes
from oncebridge.engine.router import RouteEntry, Router
from oncebridge.sources.pump import Pump, SourceRecord

from .doubles import (
    After,
    Bench,
    Deaf,
    ScriptedSink,
    event,
    eventually,
    now,
    rule,
    seconds,
    virtual,
)

DELIVER = Settings(on_store_outage="deliver")
SHADOW = Settings(mode="shadow")


def events(count, first=0):
    return [event({"n": n}, id=f"e{n}") for n in range(first, first + count)]


async def down(bench, answer=No("refused")):  # noqa: B008 - frozen
    """Let the breaker of the sink open."""
    otherwise, bench.sink.otherwise = bench.sink.otherwise, answer
    for number in range(100):
        if bench.gateway.sink_breaker.is_open:
            break
        await bench.one(event({"opens": number}, id=f"opens {number}"))
    assert bench.gateway.sink_breaker.is_open
    bench.sink.otherwise = otherwise
    bench.sink.seen.clear()
    bench.store.calls.clear()


# --- a sink that is down ---------------------------------------------------------------------


@pytest.mark.parametrize("answer", [No("refused"), Unknown("reset")])
@pytest.mark.parametrize("limit", [2, 3, 5])
@virtual
async def test_after_so_many_failures_in_a_row_the_sink_counts_as_down(answer, limit):
    async with Bench(
        sink=ScriptedSink(otherwise=answer), settings=Settings(breaker=limit)
    ) as bench:
        for number, arrival in enumerate(events(limit)):
            assert bench.gateway.not_ready() == []
            assert bench.gateway.unavailable_s() == 0
            await bench.one(arrival)
            assert bench.gateway.sink_breaker.failures == number + 1
        assert bench.gateway.not_ready() == ["the sink is down"]
        assert bench.gateway.unavailable_s() > 0


@pytest.mark.parametrize("answer", [Closed("401"), Unwell("503")])
@virtual
async def test_a_sink_that_refuses_all_counts_as_down_and_costs_no_event_an_attempt(answer):
    async with Bench(sink=ScriptedSink(otherwise=answer)) as bench:
        outcomes = [await bench.one(arrival) for arrival in events(5)]
        assert bench.gateway.not_ready() == ["the sink is down"]
        assert outcomes[-1].retry_after_ms >= bench.gateway.unavailable_s() * 1000 > 0
        for outcome in outcomes:
            assert (await bench.record(outcome.key)).attempts == 0


@pytest.mark.parametrize("answer", [Closed("403"), Unwell("503"), Unknown("reset")])
@virtual
async def test_while_one_event_alone_was_refused_another_is_tried_at_once(answer):
    async with Bench(sink=ScriptedSink(*[answer] * 5), settings=Settings(breaker=5)) as bench:
        (poison,) = events(1)
        while True:
            outcome = await bench.one(poison)
            if bench.gateway.sink_breaker.is_open:
                break
            await asyncio.sleep(outcome.retry_after_ms / 1000)
        again = await bench.one(poison)
        assert again.reason == "the sink is down"
        assert again.retry_after_ms > 0
        assert bench.gateway.not_ready() == []
        assert bench.gateway.unavailable_s() == 0
        refused, good = await bench.process(poison, *events(1, 1))
        assert (refused.acknowledge, good.verdict) == (False, Verdict.DELIVERED)
        assert not bench.gateway.sink_breaker.is_open


@pytest.mark.parametrize("alive", [Yes(), Never("400")])
@virtual
async def test_an_answer_in_between_shows_that_it_is_alive(alive):
    async with Bench(sink=ScriptedSink(*([No("no")] * 4 + [alive]) * 5)) as bench:
        for arrival in events(25):
            await bench.one(arrival)
        assert bench.gateway.sink_breaker.opened == 0
        assert len(bench.sink.seen) == 25


@virtual
async def test_while_it_is_down_nothing_is_claimed_and_all_is_handed_back_until_the_next_try():
    async with Bench() as bench:
        await down(bench)
        left = bench.gateway.unavailable_s()
        for arrivals in (events(1), events(50, 10), events(500, 100)):
            for outcome in await bench.process(*arrivals):
                assert (outcome.verdict, outcome.acknowledge) == (Verdict.FAILED, False)
                assert outcome.reason == "the sink is down"
                assert outcome.retry_after_ms > left * 1000
        assert bench.store.calls == {}
        assert bench.sink.seen == []


@virtual
async def test_while_it_is_down_what_cannot_be_read_is_buried_all_the_same():
    async with Bench() as bench:
        await down(bench)
        good, bad = await bench.process(event(), b"no event")
        assert (good.verdict, bad.verdict) == (Verdict.FAILED, Verdict.DEAD)


@virtual
async def test_repeats_in_a_batch_are_handed_back_with_the_first():
    async with Bench() as bench:
        await down(bench)
        outcomes = await bench.process(event(), event(), event())
        assert [outcome.verdict for outcome in outcomes] == [Verdict.FAILED] * 3
        assert all(outcome.retry_after_ms > 0 for outcome in outcomes)


@pytest.mark.parametrize("batches", [1, 20])
@virtual
async def test_when_its_time_has_come_a_single_event_tries_however_many_there_are(batches):
    async with Bench(sink=ScriptedSink(otherwise=After(3, No("refused")))) as bench:
        await down(bench)
        await asyncio.sleep(bench.gateway.unavailable_s())
        arrivals = [events(30, 100 * number) for number in range(batches)]
        found = await asyncio.gather(*[bench.gateway.process(batch) for batch in arrivals])
        assert len(bench.sink.seen) == 1
        assert sum(len(wants) for wants in [bench.store.asked["claim"]]) - 5 == 1
        for outcome in [one for batch in found for one in batch]:
            assert not outcome.acknowledge
            assert outcome.retry_after_ms > 0
        assert bench.gateway.unavailable_s() > 0


@virtual
async def test_a_try_that_goes_through_lets_the_rest_of_its_batch_follow():
    async with Bench() as bench:
        await down(bench)
        await asyncio.sleep(bench.gateway.unavailable_s())
        outcomes = await bench.process(*events(40))
        assert {outcome.verdict for outcome in outcomes} == {Verdict.DELIVERED}
        assert bench.gateway.not_ready() == []
        assert bench.gateway.unavailable_s() == 0


@virtual
async def test_a_try_that_fails_hands_the_rest_of_its_batch_back():
    async with Bench(sink=ScriptedSink(otherwise=No("refused"))) as bench:
        await down(bench)
        before = bench.gateway.sink_breaker.failures
        await asyncio.sleep(bench.gateway.unavailable_s())
        outcomes = await bench.process(*events(40))
        assert len(bench.sink.seen) == 1
        assert bench.gateway.sink_breaker.failures == before + 1
        left_ms = bench.gateway.unavailable_s() * 1000
        assert all(outcome.retry_after_ms >= left_ms for outcome in outcomes)


@virtual
async def test_a_sink_that_refuses_the_one_event_that_tries_is_alive():
    async with Bench(sink=ScriptedSink()) as bench:
        await down(bench)
        bench.sink.script = [Never("400")]
        await asyncio.sleep(bench.gateway.unavailable_s())
        first, second = await bench.process(*events(2))
        assert (first.verdict, second.verdict) == (Verdict.DEAD, Verdict.DELIVERED)


@virtual
async def test_a_duplicate_says_nothing_about_the_sink_and_the_next_one_tries():
    async with Bench() as bench:
        known = events(3)
        await bench.process(*known)
        await down(bench)
        await asyncio.sleep(bench.gateway.unavailable_s())
        outcomes = await bench.process(*known, *events(1, 10))
        assert [outcome.verdict for outcome in outcomes] == [
            *[Verdict.DUPLICATE] * 3,
            Verdict.DELIVERED,
        ]
        assert not bench.gateway.sink_breaker.is_open


@virtual
async def test_duplicates_alone_leave_it_down_and_open_for_the_next_try():
    async with Bench() as bench:
        known = events(3)
        await bench.process(*known)
        await down(bench)
        await asyncio.sleep(bench.gateway.unavailable_s())
        await bench.process(*known)
        assert bench.gateway.sink_breaker.is_open
        assert bench.gateway.unavailable_s() == 0
        assert (await bench.one(event({"n": 77}))).verdict is Verdict.DELIVERED


@virtual
async def test_a_busy_event_says_nothing_about_the_sink_either():
    async with Bench() as bench:
        other = Bench(store=bench.store, sink=ScriptedSink(otherwise=After(9, Yes())))
        await down(bench)
        held = asyncio.create_task(other.one(event()))
        await eventually(lambda: other.sink.under_way)
        await asyncio.sleep(1)
        busy, sent = await bench.process(event(), event({"n": 2}))
        assert (busy.verdict, sent.verdict) == (Verdict.BUSY, Verdict.DELIVERED)
        await held


@virtual
async def test_a_try_that_is_cancelled_does_not_keep_the_sink_down_for_ever():
    async with Bench(sink=ScriptedSink(otherwise=After(9, Yes()))) as bench:
        await down(bench)
        await asyncio.sleep(bench.gateway.unavailable_s())
        trying = asyncio.create_task(bench.gateway.process([event({"n": 1})]))
        await eventually(lambda: bench.sink.under_way)
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
        assert bench.gateway.unavailable_s() <= 1, "others are told to ask again soon"
        await asyncio.sleep(30)
        assert (await bench.one(event({"n": 2}))).verdict is Verdict.DELIVERED


@virtual
async def test_a_try_that_the_store_does_not_answer_for_leaves_the_way_free():
    async with Bench() as bench:
        await down(bench)
        await asyncio.sleep(bench.gateway.unavailable_s())
        bench.store.arm("claim.before", times=3)
        assert (await bench.one(event({"n": 1}))).verdict is Verdict.FAILED
        assert (await bench.one(event({"n": 2}))).verdict is Verdict.DELIVERED


@virtual
async def test_what_is_bypassed_or_unprotected_waits_for_the_sink_as_well():
    async with Bench(rule(key="none")) as bench:
        await down(bench)
        assert (await bench.one(event())).verdict is Verdict.FAILED
        assert bench.sink.seen == []
    async with Bench(settings=DELIVER) as bench:
        await down(bench)
        bench.store.arm("claim.before", times=1e9)
        assert (await bench.one(event())).verdict is Verdict.FAILED
        assert bench.sink.seen == []


@virtual
async def test_what_was_claimed_before_the_sink_went_down_is_not_sent_to_a_sink_that_is_down():
    """Five knocks show that nobody is there; four hundred more would only hold the claims."""
    sink = ScriptedSink(otherwise=After(9, Unknown("timeout")), concurrency=10)
    async with Bench(sink=sink) as bench:
        began = now()
        outcomes = await bench.process(*events(400))
        assert not any(outcome.acknowledge for outcome in outcomes)
        assert len(bench.sink.seen) <= 20
        assert now() - began < 30


# --- an hour ---------------------------------------------------------------------------------


class Hours(ScriptedSink):
    """A sink that is down for a while: it takes nothing and says so after a moment."""

    def __init__(self, until, answer, *, delay=0.2):
        super().__init__()
        self.until = until
        self.answer = answer
        self.delay = delay
        self.knocks = []

    async def _do(self, step, deliveries):
        await asyncio.sleep(self.delay)
        if now() < self.until:
            self.knocks.append(now())
            return [self.answer] * len(deliveries)
        return await super()._do(step, deliveries)


@pytest.mark.parametrize("answer", [No("refused"), Closed("401"), Unknown("503")])
@virtual
async def test_an_hour_without_the_sink_costs_nothing_but_the_hour(answer):
    sink = Hours(now() + 3600, answer)
    settings = Settings(max_attempts=1000)
    async with Bench(sink=sink, settings=settings) as bench:

        async def bring(arrival):
            for _ in range(10_000):
                outcome = await bench.gateway.process([arrival])
                if outcome[0].acknowledge:
                    return outcome[0].verdict
                assert outcome[0].retry_after_ms > 0
                await asyncio.sleep(outcome[0].retry_after_ms / 1000)
            raise AssertionError

        began = now()
        verdicts = await asyncio.gather(*[bring(arrival) for arrival in events(50)])
        assert set(verdicts) == {Verdict.DELIVERED}
        assert set(Counter(sink.raws).values()) == {1}
        assert len(sink.raws) == 50
        assert now() - began < 3600 + 400, "not long after"
        assert len(sink.knocks) < 400, "at most once in half a minute, and a few at the start"
        assert bench.books.balance


@virtual
async def test_a_pump_brings_everything_when_an_hour_without_the_sink_is_over():
    sink = Hours(now() + 3600, No("refused"))
    async with Bench(sink=sink) as bench:
        left = [
            [SourceRecord(n, raw) for n, raw in enumerate(events(40, 40 * k), 40 * k)]
            for k in range(10)
        ]

        async def take():
            return left.pop(0) if left else None

        pump = Pump(Router([RouteEntry(bench.gateway)]), lambda *_: None)
        began = now()
        await pump.run(take)
        assert pump.is_through
        assert sorted(json.loads(raw)["detail"]["n"] for raw in sink.raws) == list(range(400))
        assert now() - began < 3600 + 400
        assert len(sink.knocks) < 400


# --- a store that is down ----------------------------------------------------------------------


@virtual
async def test_a_store_that_is_down_is_not_asked_until_the_next_try():
    async with Bench() as bench:
        bench.store.arm("claim.before", times=1e9)
        for arrival in events(5):
            outcome = await bench.one(arrival)
            assert (outcome.verdict, outcome.acknowledge) == (Verdict.FAILED, False)
        assert bench.gateway.not_ready() == ["the store is down"]
        asked = bench.store.calls["claim"]
        left = bench.gateway.unavailable_s()
        assert left > 0
        for outcome in await bench.process(*events(50, 100)):
            assert outcome.retry_after_ms >= left * 1000
        assert bench.store.calls["claim"] == asked
        assert bench.sink.seen == []


@virtual
async def test_a_store_that_is_back_is_noticed_and_all_flows():
    async with Bench() as bench:
        bench.store.arm("claim.before", times=1e9)
        for arrival in events(5):
            await bench.one(arrival)
        bench.store.disarm()
        await asyncio.sleep(bench.gateway.unavailable_s())
        outcomes = await bench.process(*events(50))
        assert {outcome.verdict for outcome in outcomes} == {Verdict.DELIVERED}
        assert bench.gateway.not_ready() == []


@virtual
async def test_only_one_batch_tries_the_store():
    async with Bench() as bench:
        bench.store.arm("claim.before", times=1e9)
        for arrival in events(5):
            await bench.one(arrival)
        await asyncio.sleep(bench.gateway.unavailable_s())
        bench.store.calls.clear()
        bench.store.takes_s = 2
        await asyncio.gather(
            *[bench.gateway.process(events(3, 100 * number)) for number in range(1, 20)]
        )
        assert bench.store.calls["claim"] == 3, "one batch, with the ledger's two repeats"


@virtual
async def test_those_who_are_turned_away_do_not_count_as_failures_of_the_store():
    """A short outage under load must not end in waits of minutes."""
    async with Bench(fraction=0.99) as bench:
        bench.store.arm("claim.before", times=1e9)
        for arrival in events(5):
            await bench.one(arrival)
        failures = bench.gateway.store_breaker.failures
        outcomes = [await bench.one(arrival) for arrival in events(100, 100)]
        assert bench.gateway.store_breaker.failures == failures
        assert max(outcome.retry_after_ms for outcome in outcomes) < 60_000


@virtual
async def test_those_who_are_turned_away_do_not_prolong_the_wait_of_the_one_that_tries():
    async with Bench() as bench:
        bench.store.arm("claim.before", times=1e9)
        for arrival in events(5):
            await bench.one(arrival)
        bench.store.disarm()
        await asyncio.sleep(bench.gateway.unavailable_s())
        bench.store.takes_s = 5
        trying = asyncio.create_task(bench.gateway.process(events(1, 50)))
        await asyncio.sleep(1)
        await bench.gateway.process(events(1, 60))
        bench.store.calls.clear()
        await asyncio.sleep(3)
        await bench.gateway.process(events(1, 70))
        assert bench.store.calls["claim"] == 0, "the first try is still under way"
        (outcome,) = await trying
        assert outcome.acknowledge


@pytest.mark.parametrize("settings", [DELIVER, SHADOW])
@virtual
async def test_who_delivers_without_the_store_does_not_wait_for_it(settings):
    async with Bench(settings=settings) as bench:
        bench.store.arm("claim.before", times=1e9)
        for arrival in events(5):
            assert (await bench.one(arrival)).forwarded
        assert bench.gateway.store_breaker.is_open
        assert bench.gateway.not_ready() == []
        assert bench.gateway.unavailable_s() == 0
        began = now()
        outcomes = await bench.process(*events(50, 100))
        assert all(outcome.forwarded and outcome.acknowledge for outcome in outcomes)
        assert now() == began, "nobody asks a store that is down"
        bench.store.disarm()


@virtual
async def test_a_store_that_is_away_from_the_start_counts_as_down():
    async with Bench() as bench:
        bench.store.arm("open.before", times=1e9)
        for arrival in events(6):
            outcome = await bench.one(arrival)
            assert outcome.verdict is Verdict.FAILED
            assert outcome.retry_after_ms > 0
            assert "the store did not answer" in outcome.reason
        assert bench.gateway.not_ready() == ["the store is down"]
        assert bench.gateway.unavailable_s() > 0


@virtual
async def test_an_hour_without_the_store_costs_nothing_but_the_hour():
    async with Bench() as bench:
        began = now()
        for operation in ("claim", "commit", "release", "extend"):
            bench.store.arm(f"{operation}.before", times=1e9, for_s=3600)

        async def bring(arrival):
            for _ in range(10_000):
                (outcome,) = await bench.gateway.process([arrival])
                if outcome.acknowledge:
                    return outcome.verdict
                await asyncio.sleep(max(outcome.retry_after_ms, 1000) / 1000)
            raise AssertionError

        verdicts = await asyncio.gather(*[bring(arrival) for arrival in events(30)])
        assert set(verdicts) == {Verdict.DELIVERED}
        assert set(Counter(bench.sink.raws).values()) == {1}
        assert now() - began < 3600 + 400
        assert bench.store.calls["claim"] < 1500


# --- a sink that wants to be spared --------------------------------------------------------------


@pytest.mark.parametrize(("rate", "count"), [(5.0, 60), (100.0, 500)])
@virtual
async def test_so_many_events_at_such_a_rate_take_their_time(rate, count):
    async with Bench(settings=Settings(rate=rate)) as bench:
        began = now()
        await bench.process(*events(count))
        assert now() - began == pytest.approx(count / rate, rel=0.05, abs=0.3)
        assert len(bench.sink.taken) == count


@virtual
async def test_batches_share_the_rate_and_leases_last_while_they_wait():
    async with Bench(settings=Settings(rate=1.0)) as bench:
        began = now()
        await asyncio.gather(*[bench.gateway.process(events(60, 100 * n)) for n in range(3)])
        assert now() - began == pytest.approx(179, abs=2)
        assert set(Counter(bench.sink.raws).values()) == {1}
        assert len(bench.sink.taken) == 180
        assert bench.books.lease_lost == 0


@virtual
async def test_nobody_else_gets_at_what_waits_for_its_turn():
    async with Bench(settings=Settings(rate=1.0)) as bench:
        other = Bench(store=bench.store)
        waiting = asyncio.create_task(bench.gateway.process(events(120)))
        await asyncio.sleep(100)
        found = await other.process(*events(12, 105))
        assert {outcome.verdict for outcome in found} == {Verdict.BUSY}
        await waiting
        assert other.sink.seen == []


@virtual
async def test_what_cannot_be_held_until_its_turn_is_handed_back_and_not_sent_late():
    async with Bench(settings=Settings(rate=0.1)) as bench:
        bench.store.arm("extend.before", times=1e9)
        outcomes = await bench.process(*events(12))
        sent = [outcome for outcome in outcomes if outcome.acknowledge]
        back = [outcome for outcome in outcomes if not outcome.acknowledge]
        assert len(bench.sink.seen) == len(sent) < 12
        assert {outcome.reason for outcome in back} == {"the lease ended before the send"}


@virtual
async def test_what_another_has_taken_over_while_it_waited_is_not_sent():
    async with Bench(settings=Settings(rate=0.05)) as bench:
        other = Bench(store=bench.store)
        bench.store.arm("extend.before", times=1e9, for_s=45)
        waiting = asyncio.create_task(bench.gateway.process(events(4)))
        await asyncio.sleep(40)
        assert (await other.one(events(4)[3])).verdict is Verdict.DELIVERED
        outcomes = await waiting
        assert not outcomes[3].acknowledge
        raws = bench.sink.raws + other.sink.raws
        assert set(Counter(raws).values()) == {1}


@virtual
async def test_the_callers_time_is_kept_also_where_a_rate_makes_events_wait():
    async with Bench(settings=Settings(rate=1.0)) as bench:
        began = now()
        outcomes = await bench.process(*events(100), within=seconds(20))
        assert now() - began <= 20
        assert 10 <= sum(outcome.acknowledge for outcome in outcomes) <= 21
        assert len(bench.sink.seen) == sum(outcome.acknowledge for outcome in outcomes)


@virtual
async def test_a_stop_does_not_wait_for_the_rate():
    async with Bench(settings=Settings(rate=1.0)) as bench:
        waiting = asyncio.create_task(bench.gateway.process(events(200)))
        await asyncio.sleep(5)
        began = now()
        assert await bench.gateway.drain(seconds(25))
        assert now() - began < 15
        outcomes = await waiting
        assert len(bench.sink.taken) == sum(outcome.acknowledge for outcome in outcomes) < 20
        other = Bench(store=bench.store)
        found = await other.process(*events(200))
        assert {outcome.verdict for outcome in found} == {Verdict.DELIVERED, Verdict.DUPLICATE}


# --- a stop in the middle of it ---------------------------------------------------------------------


@virtual
async def test_a_stop_while_the_sink_hangs_gives_the_rest_back():
    sink = ScriptedSink(otherwise=Deaf(3600, Yes()), concurrency=2)
    async with Bench(sink=sink) as bench:
        waiting = asyncio.create_task(bench.gateway.process(events(50)))
        await eventually(lambda: sink.under_way == 2)
        began = now()
        assert await bench.gateway.drain(seconds(25))
        assert now() - began <= 11
        outcomes = await waiting
        assert not any(outcome.acknowledge for outcome in outcomes)
        assert len(sink.seen) == 2


# --- paused -----------------------------------------------------------------------------------------


@virtual
async def test_while_it_is_paused_nothing_is_claimed_and_all_comes_back():
    async with Bench() as bench:
        bench.gateway.pause()
        assert bench.gateway.not_ready() == ["paused"]
        assert bench.gateway.unavailable_s() > 0
        for outcome in await bench.process(*events(10)):
            assert (outcome.verdict, outcome.acknowledge) == (Verdict.FAILED, False)
            assert outcome.reason == "paused by an operator"
            assert outcome.retry_after_ms > 0
        assert bench.store.calls["claim"] == 0
        bench.gateway.resume()
        assert bench.gateway.not_ready() == []
        assert {one.verdict for one in await bench.process(*events(10))} == {Verdict.DELIVERED}


@virtual
async def test_what_is_under_way_when_it_is_paused_is_finished():
    async with Bench(sink=ScriptedSink(otherwise=After(5, Yes()))) as bench:
        running = asyncio.create_task(bench.one(event()))
        await eventually(lambda: bench.sink.under_way)
        bench.gateway.pause()
        assert (await running).verdict is Verdict.DELIVERED


@virtual
async def test_a_pause_while_the_sink_is_down_stops_the_tries_too():
    async with Bench() as bench:
        await down(bench)
        bench.gateway.pause()
        await asyncio.sleep(60)
        assert (await bench.one(event())).reason == "paused by an operator"
        assert bench.sink.seen == []
        bench.gateway.resume()
        assert (await bench.one(event())).verdict is Verdict.DELIVERED


# --- slots that are shared ----------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 2])
@virtual
async def test_batches_that_wait_for_a_slot_all_end_when_the_sink_goes_down(concurrency):
    sink = ScriptedSink(otherwise=After(1, No("refused")), concurrency=concurrency)
    async with Bench(sink=sink) as bench:
        batches = [events(10, 100 * number) for number in range(5)]
        async with asyncio.timeout(300):
            found = await asyncio.gather(*[bench.gateway.process(batch) for batch in batches])
        assert not any(outcome.acknowledge for batch in found for outcome in batch)
        assert len(sink.seen) < 20


@pytest.mark.parametrize("after", [0.5, 1.0, 1.5, 2.0])
@virtual
async def test_batches_that_wait_for_a_slot_go_on_when_another_is_cancelled(after):
    sink = ScriptedSink(otherwise=After(1, Yes()), concurrency=1)
    async with Bench(sink=sink) as bench:
        first, second, third = [
            asyncio.create_task(bench.gateway.process(events(4, 100 * number)))
            for number in range(3)
        ]
        await asyncio.sleep(after)
        first.cancel()
        async with asyncio.timeout(300):
            found = [*await second, *await third]
        assert all(outcome.acknowledge for outcome in found)
        await asyncio.gather(first, return_exceptions=True)
        assert (await bench.one(event({"n": 999}))).acknowledge


@pytest.mark.parametrize("how", ["cancelled", "an error"])
@virtual
async def test_a_slot_is_given_back_when_it_ends_before_the_send(how):
    """While the claim is prolonged, say: else there is one slot less, for ever."""
    sink = ScriptedSink(otherwise=Yes(), concurrency=1)
    async with Bench(sink=sink, settings=Settings(rate=1 / 19.8)) as bench:
        for number in range(3):
            # The second one waits for its turn for so long that its claim has to be prolonged.
            bench.store.arm("extend.before", times=1e9, for_s=19)
            waiting = asyncio.create_task(bench.gateway.process(events(2, 100 * number)))
            await asyncio.sleep(19.5)
            if how == "an error":
                bench.store.arm("extend.before", error=ZeroDivisionError())
            else:
                bench.store.takes_s = 3
                await asyncio.sleep(2)
                waiting.cancel()
            async with asyncio.timeout(300):
                await asyncio.gather(waiting, return_exceptions=True)
            bench.store.takes_s = 0
            bench.store.disarm()
            await asyncio.sleep(40)
        async with asyncio.timeout(300):
            assert (await bench.one(event({"n": 999}))).acknowledge


@virtual
async def test_a_sink_that_raises_before_it_gives_a_coroutine_costs_no_slot():
    class Plain(ScriptedSink):
        def deliver(self, deliveries):
            if self.script:
                raise self.script.pop()
            return super().deliver(deliveries)

    sink = Plain(*[ZeroDivisionError()] * 3, concurrency=1)
    async with Bench(sink=sink) as bench:
        for arrival in events(3):
            async with asyncio.timeout(300):
                await asyncio.gather(bench.gateway.process([arrival]), return_exceptions=True)
        async with asyncio.timeout(300):
            assert (await bench.one(event({"n": 999}))).acknowledge
