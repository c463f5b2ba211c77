"""
Sinks that refuse one event, or all of them for a while.

A refusal counts against an event only while other events pass. Otherwise it is the sink's
trouble, however long it lasts, and only the age of an event ends it.
"""

import asyncio
import json
from datetime import timedelta
from itertools import cycle

import pytest

from oncebridge import Closed, No, Settings, Throttled, Unknown, Unwell, Verdict, Yes
from oncebridge.base.options import Rate
from oncebridge.engine.router import RouteEntry, Router
from oncebridge.sources.pump import Pump, SourceRecord
from oncebridge.stores.api import Fate

from .doubles import Bench, ScriptedSink, event, now, rule, virtual


def numbered(n):
    return event({"n": n}, id=f"e{n}")


def number(delivery):
    return json.loads(delivery.event.raw)["detail"]["n"]


async def pump(bench, take):
    """Bring what *take* returns, retrying in place."""
    await Pump(Router([RouteEntry(bench.gateway)]), lambda *_: None).run(take)


async def bring(bench, count, lane=None):
    """Bring *count* events, retrying in place."""
    left = [SourceRecord(n, numbered(n), lane) for n in range(count)]

    async def take():
        taken, left[:] = left[:10], left[10:]
        return taken or None

    await pump(bench, take)


@pytest.mark.parametrize("refusal", [Closed("HTTP 403"), Unwell("HTTP 503")])
@virtual
async def test_events_that_are_refused_while_others_pass_end_in_the_dead_letters(refusal):
    sink = ScriptedSink(otherwise=lambda d: refusal if number(d) < 5 else Yes())
    numbers = iter(range(100_000))

    async def take():
        """Bring ten events every second, as long as a refused one is left."""
        await asyncio.sleep(1)
        if len(await bench.letters()) == 5:
            return None
        return [SourceRecord(n, numbered(n)) for _, n in zip(range(10), numbers, strict=False)]

    async with Bench(sink=sink) as bench:
        began = now()
        await pump(bench, take)
        letters = await bench.letters()
        assert sorted(json.loads(one.raw)["detail"]["n"] for one in letters) == list(range(5))
        assert {letter.reason for letter in letters} == {"attempts"}
        assert {letter.maybe_delivered for letter in letters} == {isinstance(refusal, Unwell)}
        assert sorted(map(number, sink.taken)) == list(range(5, 5 + len(sink.taken)))
        assert now() - began < 3600
        assert bench.gateway.sink_breaker.opened <= 1


@virtual
async def test_good_events_do_not_wait_for_those_that_are_refused():
    sink = ScriptedSink(otherwise=lambda d: Closed("403") if number(d) % 5 == 0 else Yes())
    async with Bench(sink=sink) as bench:
        accepted = 0
        for n in range(400):
            outcome = await bench.one(numbered(n))
            accepted += outcome.verdict is Verdict.DELIVERED
        assert accepted == 320


@pytest.mark.parametrize("refusal", [Closed("HTTP 403"), Unwell("HTTP 503")])
@virtual
async def test_a_sink_that_refuses_everything_for_an_hour_costs_no_event(refusal):
    async with Bench(settings=Settings(max_attempts=2)) as bench:
        ends = now() + 3600
        bench.sink.otherwise = lambda _: refusal if now() < ends else Yes()
        await bring(bench, 50)
        assert await bench.letters() == []
        assert sorted(map(number, bench.sink.taken)) == list(range(50))
        assert now() < ends + 400
        assert bench.gateway.books.ambiguous == 0
        assert (bench.gateway.books.unwell > 0) == isinstance(refusal, Unwell)


@virtual
async def test_a_sink_in_trouble_may_have_taken_it_though_the_attempt_does_not_count():
    async with Bench(sink=ScriptedSink(Unwell("HTTP 502"), No("refused"))) as bench:
        first = await bench.one(numbered(1))
        assert (await bench.record(first.key)).attempts == 0
        await asyncio.sleep(first.retry_after_ms / 1000)
        second = await bench.one(numbered(1))
        await asyncio.sleep(second.retry_after_ms / 1000)
        bench.sink.otherwise = Unknown("reset")
        bench.sink.script.clear()
        await bench.one(numbered(1))
        assert b"true" in (await bench.record(first.key)).memo
    async with Bench(sink=ScriptedSink(otherwise=Unwell("HTTP 502"))) as bench:
        await bench.one(numbered(1))
        await asyncio.sleep(timedelta(days=6).total_seconds())
        outcome = await bench.one(numbered(1))
        assert outcome.verdict is Verdict.DEAD
        (letter,) = await bench.letters()
        assert letter.maybe_delivered


# --- age ------------------------------------------------------------------------------------


@pytest.mark.parametrize("explain", [True, False])
@pytest.mark.parametrize("answer", [Closed("HTTP 403"), Unwell("HTTP 503"), Unknown("reset")])
@virtual
async def test_an_event_that_fails_and_is_too_old_goes_to_the_dead_letters(answer, explain):
    settings = Settings(
        give_up_after=timedelta(hours=1), explain=explain, max_attempts=1000, breaker=1000
    )
    async with Bench(sink=ScriptedSink(otherwise=answer), settings=settings) as bench:
        began = now()
        outcome = await bench.until_acknowledged(numbered(1), rounds=10_000)
        assert outcome.verdict is Verdict.DEAD
        assert outcome.reason.startswith("too-old: ")
        assert "not delivered within 1h of the first attempt" in outcome.reason
        (letter,) = await bench.letters()
        assert letter.reason == "too-old"
        assert 3600 <= now() - began < 3600 + 400
        assert (await bench.record(outcome.key)).fate is Fate.DEAD


@pytest.mark.parametrize(("in_place", "hours"), [(True, 12), (False, 6 * 24)])
@virtual
async def test_it_is_given_up_after_its_window_or_sooner_where_nothing_can_pass_it(in_place, hours):
    async with Bench(sink=ScriptedSink(otherwise=Closed("HTTP 403"))) as bench:
        began = now()
        while True:
            (outcome,) = await bench.gateway.process([numbered(1)], in_place=in_place)
            if outcome.acknowledge:
                break
            await asyncio.sleep(max(outcome.retry_after_ms / 1000, 600))
        assert outcome.verdict is Verdict.DEAD
        assert hours * 3600 <= now() - began < hours * 3600 + 700


@virtual
async def test_a_poison_at_the_head_of_a_lane_ends_and_the_lane_goes_on():
    sink = ScriptedSink(otherwise=lambda d: Unwell("HTTP 503") if number(d) == 0 else Yes())
    async with Bench(sink=sink) as bench:
        began = now()
        await bring(bench, 3, lane="one")
        assert list(map(number, sink.taken)) == [1, 2]
        (letter,) = await bench.letters()
        assert (letter.reason, letter.maybe_delivered) == ("too-old", True)
        assert 12 * 3600 <= now() - began < 13 * 3600


@virtual
async def test_a_sink_that_cannot_be_reached_costs_no_event_however_old():
    async with Bench(settings=Settings(give_up_after=timedelta(hours=1))) as bench:
        ends = now() + 24 * 3600
        bench.sink.otherwise = lambda _: No("refused") if now() < ends else Yes()
        await bring(bench, 5)
        assert await bench.letters() == []
        assert len(bench.sink.taken) == 5


@virtual
async def test_a_slow_claim_makes_an_event_no_older_than_it_is():
    sink = ScriptedSink(otherwise=Closed("HTTP 403"))
    async with Bench(sink=sink, settings=Settings(give_up_after=timedelta(seconds=85))) as bench:
        assert (await bench.one(numbered(1))).verdict is Verdict.FAILED
        await asyncio.sleep(60)
        bench.store.takes_s = 15
        assert (await bench.one(numbered(1))).verdict is Verdict.FAILED
        assert await bench.letters() == []


@virtual
async def test_age_counts_from_the_first_claim_of_this_life_of_the_key():
    settings = Settings(give_up_after=timedelta(hours=1), breaker=1000)
    async with Bench(rule(window="2h"), sink=ScriptedSink(), settings=settings) as bench:
        assert (await bench.one(numbered(1))).verdict is Verdict.DELIVERED
        await asyncio.sleep(3 * 3600)
        bench.sink.otherwise = Closed("HTTP 403")
        outcome = await bench.one(numbered(1))
        assert outcome.verdict is Verdict.FAILED


@pytest.mark.parametrize("refusal", [Closed("HTTP 401"), Unwell("HTTP 502")])
@virtual
async def test_throttling_in_between_does_not_show_that_others_pass(refusal):
    answers = cycle([refusal] * 4 + [Throttled("HTTP 429", 1000)])
    async with Bench(settings=Settings(max_attempts=2)) as bench:
        ends = now() + 3600
        bench.sink.otherwise = lambda _: next(answers) if now() < ends else Yes()
        await bring(bench, 20)
        assert await bench.letters() == []
        assert len(bench.sink.taken) == 20
        assert bench.gateway.sink_breaker.opened > 0


@pytest.mark.parametrize("rate", [None, Rate(5)])
@virtual
async def test_throttling_does_not_outlast_the_time_of_the_caller(rate):
    sink = ScriptedSink(Throttled("HTTP 429", 120_000))
    async with Bench(sink=sink, settings=Settings(rate=rate)) as bench:
        began = now()
        arrivals = [numbered(n) for n in range(40)]
        outcomes = await bench.process(*arrivals, within=timedelta(seconds=30))
        assert now() - began < 31
        assert not outcomes[0].acknowledge
