"""
Who is to blame for a failure: the event, or whatever it was to pass.

A source that can wait keeps what is not to blame, and gives the rest back to where it counts
against the event. An outage must never be blamed on those that wait for its end.
"""

import asyncio

import pytest

from oncebridge import Closed, Never, No, Settings, Unknown, Unwell, Verdict, Yes
from oncebridge.engine.router import RouteEntry, Router
from oncebridge.events.pattern import Pattern

from .doubles import After, Bench, FailingDeadLetters, ScriptedSink, event, seconds, virtual


def events(count):
    return [event({"n": n}, id=f"e{n}") for n in range(count)]


def blame(*outcomes):
    """Tell who is blamed, of those that are not final."""
    assert not any(outcome.acknowledge for outcome in outcomes)
    return [outcome.blamed for outcome in outcomes]


async def route(bench, *arrivals):
    """Bring *arrivals* by a router, and give its answers."""
    return await Router([RouteEntry(bench.gateway)]).process(arrivals)


# --- the sink -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "blamed"),
    [
        (No("refused"), False),
        (Closed("401"), False),
        (Unwell("503"), False),
        (Unknown("reset"), True),
        (ZeroDivisionError(), True),
        (After(60, Yes()), True),
    ],
)
@virtual
async def test_only_what_was_sent_without_a_clear_answer_may_be_the_cause(answer, blamed):
    async with Bench(sink=ScriptedSink(otherwise=answer)) as bench:
        assert blame(await bench.one(event())) == [blamed]
    async with Bench(sink=ScriptedSink(otherwise=answer)) as bench:
        assert blame(*await route(bench, event())) == [blamed]


@virtual
async def test_what_a_sink_that_is_down_was_not_even_sent_is_not_to_blame():
    sink = ScriptedSink(otherwise=Closed("401"), concurrency=1)
    async with Bench(sink=sink, settings=Settings(breaker=2)) as bench:
        assert blame(*await bench.process(*events(4))) == [False] * 4, "claimed, and shut then"
        assert blame(*await bench.process(*events(4))) == [False] * 4, "not even claimed"
        assert len(bench.sink.seen) == 2


@virtual
async def test_what_was_claimed_while_the_sink_went_down_is_told_when_to_come_again():
    """No time at all is for what nobody foresaw, and a source brings that alone from then on."""
    sink = ScriptedSink(otherwise=No("refused"))
    async with Bench(sink=sink, settings=Settings(breaker=1)) as bench:
        bench.store.takes_s = 2.0
        first = asyncio.create_task(bench.one(event({"n": 99})))
        await asyncio.sleep(1)
        late = await bench.process(*events(3))  # it would be time to try the sink again
        assert blame(await first, *late) == [False] * 4
        assert {outcome.reason for outcome in late} == {"the sink is down"}
        assert all(outcome.retry_after_ms for outcome in late)


@virtual
async def test_of_a_batch_each_is_blamed_for_itself():
    async with Bench(sink=ScriptedSink([No("no"), Unknown("reset"), No("no")], batch=3)) as bench:
        assert blame(*await bench.process(*events(3))) == [False, True, False]


@pytest.mark.parametrize(("answer", "blamed"), [(No("refused"), False), (Unknown("reset"), True)])
@virtual
async def test_repeats_in_a_batch_share_the_blame(answer, blamed):
    async with Bench(sink=ScriptedSink(otherwise=answer)) as bench:
        assert blame(*await bench.process(event(), event(), event())) == [blamed] * 3
        assert len(bench.sink.seen) == 1


@virtual
async def test_what_is_final_is_blamed_for_nothing():
    async with Bench(sink=ScriptedSink(Yes(), Never("400"))) as bench:
        outcomes = await bench.process(*events(2), b"garbage", events(1)[0])
        assert all(outcome.acknowledge for outcome in outcomes)
        assert not any(outcome.blamed for outcome in outcomes)


# --- the store and the dead letters ---------------------------------------------------------------


@pytest.mark.parametrize("seam", ["open.before", "claim.before", "claim.after"])
@virtual
async def test_while_the_store_is_down_nobody_is_to_blame(seam):
    async with Bench() as bench:
        bench.store.arm(seam, times=1e9)
        for _ in range(8):  # until it counts as down, and beyond
            assert blame(*await bench.process(*events(2))) == [False] * 2
        bench.store.disarm()


@pytest.mark.parametrize("arrival", [event(), b"garbage"], ids=["event", "garbage"])
@virtual
async def test_while_the_dead_letters_are_down_nobody_is_to_blame(arrival):
    dead = FailingDeadLetters(broken=True)
    async with Bench(sink=ScriptedSink(otherwise=Never("400")), dead=dead) as bench:
        assert blame(await bench.one(arrival)) == [False]


@pytest.mark.parametrize("arrival", [event(), b"garbage"], ids=["event", "garbage"])
@virtual
async def test_where_there_are_no_dead_letters_it_is_the_event_that_can_never_pass(arrival):
    async with Bench(sink=ScriptedSink(otherwise=Never("400")), dead=None) as bench:
        assert blame(*await route(bench, arrival)) == [True]


@virtual
async def test_what_another_worker_holds_is_not_to_blame():
    async with (
        Bench(sink=ScriptedSink(After(5, Yes()))) as first,
        Bench(store=first.store) as second,
    ):
        sending = asyncio.create_task(first.one(event()))
        await asyncio.sleep(1)
        outcome = await second.one(event())
        assert (outcome.verdict, outcome.blamed) == (Verdict.BUSY, False)
        (answer,) = await route(second, event())
        assert (answer.verdict, answer.blamed) == (Verdict.BUSY, False)
        await sending


# --- ourselves ------------------------------------------------------------------------------------


@virtual
async def test_who_is_handed_back_at_a_shutdown_is_not_to_blame():
    slow = ScriptedSink(otherwise=After(5, Yes()), concurrency=1)
    async with Bench(sink=slow) as bench:
        task = asyncio.create_task(bench.process(*events(3)))
        await asyncio.sleep(1)
        assert await bench.gateway.drain(seconds(25))
        _, *rest = await task
        assert blame(*rest) == [False] * 2
        assert blame(await bench.one(event())) == [False]


@virtual
async def test_while_it_is_paused_nobody_is_to_blame():
    async with Bench() as bench:
        bench.gateway.pause()
        assert blame(*await bench.process(*events(2))) == [False] * 2


@virtual
async def test_of_those_that_an_unforeseen_error_hit_nobody_knows_who_is_to_blame():
    async with Bench() as bench:
        bench.store.arm("claim.before", error=ZeroDivisionError())
        answers = await route(bench, *events(3))
        assert blame(*answers) == [False] * 3
        assert {answer.reason for answer in answers} == {"an unexpected error"}
        assert {answer.retry_after_ms for answer in answers} == {0}, "so a source can tell"


@virtual
async def test_what_broke_off_before_it_began_blames_nobody():
    async with Bench() as bench:
        router = Router([RouteEntry(bench.gateway)])

        async def broken(*_, **__):
            raise ZeroDivisionError

        bench.gateway.process = broken
        assert blame(*await router.process(events(2))) == [False] * 2


# --- several routes -------------------------------------------------------------------------------

BOTH, ONE = event(detail_type="Both", id="b"), event(detail_type="One", id="o")


@pytest.mark.parametrize(
    ("here", "there", "blamed"),
    [
        (No("refused"), Unknown("reset"), True),
        (Unknown("reset"), Closed("401"), True),
        (Unknown("reset"), Yes(), True),
        (No("refused"), Closed("401"), False),
        (Yes(), Closed("401"), False),
    ],
)
@virtual
async def test_blamed_on_one_route_is_blamed(here, there, blamed):
    async with (
        Bench(sink=ScriptedSink(otherwise=here), route="here") as first,
        Bench(sink=ScriptedSink(otherwise=there), route="there") as second,
    ):
        both = Pattern.compile({"detail-type": ["Both"]}, "match")
        router = Router([RouteEntry(first.gateway), RouteEntry(second.gateway, both)])
        answers = await router.process([BOTH, ONE])
        assert blame(answers[0]) == [blamed]
        assert answers[1].blamed == isinstance(here, Unknown), "the other route is not its own"
