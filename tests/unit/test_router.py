import asyncio
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.faults.doubles import (
    After,
    Bench,
    FailingDeadLetters,
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

from oncebridge import Never, No, Settings, StoreUnavailable, Verdict, Yes
from oncebridge.engine.router import RouteEntry, Router
from oncebridge.errors import StoreError
from oncebridge.events.event import Unreadable
from oncebridge.events.pattern import Pattern


def only(kind):
    return Pattern.compile({"detail-type": [kind]}, "match")


class Roads:
    """Several routes over one store, each with a sink of its own, and the router of them."""

    def __init__(self, *, sinks, matches=None, dead=..., settings=None, rules=None, **more):
        self.dead = FailingDeadLetters() if dead is ... else dead
        self.benches = {}
        self.told = []
        store = None
        for name, sink in sinks.items():
            bench = Bench(
                *(rules or {}).get(name, ()),
                sink=sink,
                store=store,
                dead=self.dead,
                route=name,
                settings=(settings or {}).get(name, Settings()),
            )
            store = bench.store
            self.benches[name] = bench
        ways = [
            RouteEntry(bench.gateway, (matches or {}).get(name))
            for name, bench in self.benches.items()
        ]
        self.store = store
        self.router = Router(ways, dead=self.dead, **more)

    def __getitem__(self, name):
        return self.benches[name]

    async def process(self, *arrivals, **more):
        told = {}

        def answered(at, answer):
            assert at not in told, "told twice"
            told[at] = answer

        await self.router.process_each(arrivals, answered, **more)
        assert len(told) == len(arrivals)
        self.check()
        return [told[at] for at in range(len(arrivals))]

    async def one(self, arrival, **more):
        (answer,) = await self.process(arrival, **more)
        return answer

    def check(self):
        for bench in self.benches.values():
            bench.check()
        assert self.router.unrouted.balance
        assert self.router.unrouted.in_flight == 0

    def taken(self, name):
        return [json.loads(raw)["id"] for raw in self.benches[name].sink.raws]

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        await self.router.aclose()


def two(first=None, second=None, **more):
    return Roads(sinks={"crm": first or ScriptedSink(), "lake": second or ScriptedSink()}, **more)


# --- each route has its own claims ------------------------------------------------------------


@virtual
async def test_every_route_gets_the_event_once():
    async with two() as roads:
        first = await roads.one(event())
        again = await roads.one(event())
        assert (first.acknowledge, first.verdict) == (True, Verdict.DELIVERED)
        assert (again.acknowledge, again.verdict) == (True, Verdict.DUPLICATE)
        assert [name for name, _ in first.outcomes] == ["crm", "lake"]
        assert roads.taken("crm") == roads.taken("lake") == ["e1"]


@virtual
async def test_an_event_that_one_route_has_is_a_duplicate_there_and_delivered_on_the_other():
    async with two() as roads:
        await roads["crm"].one(event())
        answer = await roads.one(event())
        assert answer.acknowledge
        assert {name: outcome.verdict for name, outcome in answer.outcomes} == {
            "crm": Verdict.DUPLICATE,
            "lake": Verdict.DELIVERED,
        }
        assert answer.verdict is Verdict.DELIVERED, "the route that forwarded speaks for both"
        assert roads.taken("crm") == roads.taken("lake") == ["e1"]


@virtual
async def test_only_when_all_routes_acknowledge_the_arrival_is_acknowledged():
    async with two(second=ScriptedSink(No("refused", 7000))) as roads:
        answer = await roads.one(event())
        assert (answer.acknowledge, answer.verdict) == (False, Verdict.FAILED)
        assert answer.reason == "refused"
        assert answer.retry_after_ms >= 7000
        assert {name: outcome.acknowledge for name, outcome in answer.outcomes} == {
            "crm": True,
            "lake": False,
        }


@virtual
async def test_a_retry_delivers_only_where_it_failed():
    async with two(second=ScriptedSink(No("refused"), No("refused"))) as roads:
        for _ in range(10):
            answer = await roads.one(event())
            if answer.acknowledge:
                break
            await asyncio.sleep(answer.retry_after_ms / 1000)
        assert answer.verdict is Verdict.DELIVERED
        assert len(roads["crm"].sink.seen) == 1
        assert len(roads["lake"].sink.seen) == 3
        assert roads.taken("lake") == ["e1"]
        assert roads["crm"].books.verdicts[Verdict.DUPLICATE] == 2


@virtual
async def test_the_longest_wait_of_those_that_failed_counts():
    answers = ScriptedSink(No("later", 2000)), ScriptedSink(No("much later", 60_000))
    async with two(*answers) as roads:
        answer = await roads.one(event())
        waits = [outcome.retry_after_ms for _, outcome in answer.outcomes]
        assert answer.retry_after_ms == max(waits) >= 60_000


@virtual
async def test_a_route_that_acknowledges_does_not_set_the_wait():
    async with two(ScriptedSink(Never("400")), ScriptedSink(No("later", 2000))) as roads:
        answer = await roads.one(event())
        assert not answer.acknowledge
        assert 2000 <= answer.retry_after_ms < 5000


@pytest.mark.parametrize("first", [True, False])
@virtual
async def test_the_keys_of_a_route_do_not_depend_on_the_routes_beside_it(first):
    raw = event({"n": 1, "sentAt": "noon", "x": 2})
    rules = {
        "crm": [rule(key="content", ignore=["detail.sentAt"])],
        "lake": [rule(key="content", ignore=["detail.x"])],
    }
    async with two(rules=rules) as roads:
        alone = ["crm", "lake"] if first else ["lake", "crm"]
        for name in alone:
            assert (await roads[name].one(raw)).verdict is Verdict.DELIVERED
        assert (await roads.one(raw)).verdict is Verdict.DUPLICATE
        assert (await roads.one(roads.router.read(raw))).verdict is Verdict.DUPLICATE


# --- which routes an event takes ---------------------------------------------------------------


@virtual
async def test_each_event_takes_the_routes_that_it_matches_and_the_answers_come_in_order():
    matches = {"crm": only("Call"), "lake": None}
    async with two(matches=matches) as roads:
        kinds = ["Call", "Chat", "Call", "Mail"]
        arrivals = [event(id=f"e{n}", detail={"n": n}, detail_type=k) for n, k in enumerate(kinds)]
        answers = await roads.process(*arrivals)
        assert [[name for name, _ in answer.outcomes] for answer in answers] == [
            ["crm", "lake"],
            ["lake"],
            ["crm", "lake"],
            ["lake"],
        ]
        assert roads.taken("crm") == ["e0", "e2"]
        assert sorted(roads.taken("lake")) == ["e0", "e1", "e2", "e3"]
        keys = [{outcome.key for _, outcome in answer.outcomes} for answer in answers]
        assert len(set().union(*keys)) == 6, "each its own key, and each route its own"


@virtual
async def test_a_single_route_may_be_for_some_events_only():
    async with Roads(sinks={"crm": ScriptedSink()}, matches={"crm": only("Call")}) as roads:
        call, chat = await roads.process(
            event({"n": 1}, detail_type="Call"), event({"n": 2}, detail_type="Chat")
        )
        assert (call.verdict, chat.verdict) == (Verdict.DELIVERED, Verdict.DEAD)
        assert roads.router.unrouted.arrived == 1
        assert roads["crm"].books.arrived == 1


@virtual
async def test_an_empty_batch_is_answered_with_nothing():
    async with two() as roads:
        assert await roads.process() == []


@virtual
async def test_events_that_were_read_before_are_not_read_again():
    async with two() as roads:
        read = roads.router.read(event())
        assert (await roads.one(read)).verdict is Verdict.DELIVERED
        assert roads["crm"].sink.seen[0].event is read


# --- what no route is for ------------------------------------------------------------------------

NOWHERE = {"crm": only("Call"), "lake": only("Chat")}


@virtual
async def test_what_no_route_is_for_is_kept_in_the_dead_letters():
    async with two(matches=NOWHERE) as roads:
        raw = event(detail_type="Mail")
        answer = await roads.one(raw)
        assert (answer.acknowledge, answer.verdict) == (True, Verdict.DEAD)
        assert answer.reason == "unrouted: no route matches it"
        (letter,) = await roads.dead.list()
        assert (letter.raw, letter.reason, letter.route) == (raw, "unrouted", "")
        assert roads.router.unrouted.verdicts[Verdict.DEAD] == 1
        assert roads.store.calls["claim"] == 0


@virtual
async def test_what_no_route_is_for_is_dropped_where_that_was_asked_for():
    async with two(matches=NOWHERE, discard_unrouted=True) as roads:
        answer = await roads.one(event(detail_type="Mail"))
        assert (answer.acknowledge, answer.verdict) == (True, Verdict.DISCARDED)
        assert await roads.dead.list() == []
        assert roads.router.unrouted.verdicts[Verdict.DISCARDED] == 1


@virtual
async def test_what_cannot_be_kept_is_handed_back():
    async with two(matches=NOWHERE, dead=FailingDeadLetters(broken=True)) as roads:
        answer = await roads.one(event(detail_type="Mail"))
        assert (answer.acknowledge, answer.verdict) == (False, Verdict.FAILED)
        assert answer.retry_after_ms > 0
        assert "the disk is full" in answer.reason
        assert roads.router.unrouted.verdicts[Verdict.FAILED] == 1
        roads.dead.broken = False
        assert (await roads.one(event(detail_type="Mail"))).verdict is Verdict.DEAD


@virtual
async def test_without_dead_letters_what_no_route_is_for_comes_again():
    async with two(matches=NOWHERE, dead=None) as roads:
        answer = await roads.one(event(detail_type="Mail"))
        assert (answer.acknowledge, answer.verdict) == (False, Verdict.FAILED)


@pytest.mark.parametrize("error", [StoreError("damaged"), StoreUnavailable("locked")])
@pytest.mark.parametrize("step", ["open", "put"])
@virtual
async def test_dead_letters_that_fail_in_another_way_hand_it_back_too(error, step):
    async with two(matches=NOWHERE) as roads:

        async def fails(*_):
            raise error

        setattr(roads.dead, step, fails)
        answer = await roads.one(event(detail_type="Mail"))
        assert (answer.acknowledge, answer.verdict) == (False, Verdict.FAILED)
        assert answer.retry_after_ms > 0


@virtual
async def test_an_unforeseen_error_of_the_dead_letters_does_not_cost_the_others():
    async with two(matches=NOWHERE) as roads:

        async def fails(*_):
            raise ZeroDivisionError

        roads.dead.put = fails
        mail, call = await roads.process(
            event(detail_type="Mail"), event(id="e2", detail_type="Call")
        )
        assert (mail.acknowledge, mail.verdict) == (False, Verdict.FAILED)
        assert call.verdict is Verdict.DELIVERED


@virtual
async def test_what_no_route_is_for_is_not_kept_waiting_by_a_slow_sink():
    async with two(ScriptedSink(After(9, Yes())), matches=NOWHERE) as roads:
        heard = {}
        began = now()
        await roads.router.process_each(
            [event(detail_type="Call"), event(id="e2", detail_type="Mail")],
            lambda at, answer: heard.setdefault(at, now() - began),
        )
        assert heard[1] < 1, "its sender would bring it again, and it would be buried twice"
        assert heard[0] == pytest.approx(9)


# --- what can't be read -------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [b"{", b"", b"\xff", Unreadable(b"x", "not-json", "line 7: no")])
@virtual
async def test_what_cannot_be_read_is_buried_once(bad):
    async with two() as roads:
        bad_answer, good = await roads.process(bad, event())
        assert (bad_answer.acknowledge, bad_answer.verdict) == (True, Verdict.DEAD)
        assert good.verdict is Verdict.DELIVERED
        (letter,) = await roads.dead.list()
        assert letter.raw == (bad.raw if isinstance(bad, Unreadable) else bad)
        assert roads["crm"].books.arrived == 2
        assert roads["lake"].books.arrived == 1


@virtual
async def test_what_cannot_be_read_is_buried_also_where_every_route_has_a_pattern():
    async with two(matches=NOWHERE) as roads:
        answer = await roads.one(b"no event")
        assert (answer.acknowledge, answer.verdict) == (True, Verdict.DEAD)
        assert len(await roads.dead.list()) == 1


# --- when something breaks -------------------------------------------------------------------------


class Broken(ScriptedSink):
    async def open(self):
        raise ZeroDivisionError("with the payload in it")


@pytest.mark.parametrize("order", [("crm", "lake"), ("lake", "crm")])
@virtual
async def test_an_unforeseen_error_on_one_route_hands_back_and_leaves_the_others_alone(order):
    sinks = {"crm": Broken(), "lake": ScriptedSink(otherwise=After(5, Yes()))}
    async with Roads(sinks={name: sinks[name] for name in order}) as roads:
        answer = await roads.one(event())
        assert (answer.acknowledge, answer.verdict) == (False, Verdict.FAILED)
        assert dict(answer.outcomes)["lake"].verdict is Verdict.DELIVERED
        assert roads.taken("lake") == ["e1"]
        assert roads["crm"].books.verdicts[Verdict.FAILED] == 1


@virtual
async def test_what_broke_is_logged_without_a_word_of_the_event(caplog):
    async with two(Broken()) as roads:
        await roads.one(event())
        (record,) = [one for one in caplog.records if one.message == "oncebridge.batch_failed"]
        assert record.error == "ZeroDivisionError"
        assert "payload" not in caplog.text


@virtual
async def test_when_it_is_broken_off_every_arrival_is_handed_back_once():
    slow = ScriptedSink(otherwise=After(5, Yes()))
    matches = {"crm": None, "lake": only("Chat")}
    async with two(slow, matches=matches) as roads:
        told = Counter()
        heard = []

        def answered(at, answer):
            told[at] += 1
            heard.append(answer)

        arrivals = [event(id=f"e{n}", detail={"n": n}) for n in range(3)]
        task = asyncio.create_task(roads.router.process_each(arrivals, answered))
        await eventually(lambda: slow.under_way)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert told == {0: 1, 1: 1, 2: 1}
        assert not any(answer.acknowledge for answer in heard)
        roads.check()


@pytest.mark.parametrize("steps", range(6))
@virtual
async def test_wherever_it_is_broken_off_every_arrival_is_answered_once(steps):
    async with two(matches={"crm": only("Call"), "lake": None}) as roads:
        told = Counter()
        arrivals = [event(detail_type="Call"), event({"n": 2}), b"no event", event({"n": 3})]
        task = asyncio.create_task(
            roads.router.process_each(arrivals, lambda at, _: told.update([at]))
        )
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if steps:  # or it has not even begun
            assert told == {0: 1, 1: 1, 2: 1, 3: 1}
        roads.check()


@virtual
async def test_what_no_route_is_for_is_handed_back_too_when_it_is_broken_off():
    async with two(matches=NOWHERE) as roads:

        async def hangs(*_):
            await asyncio.sleep(100)

        roads.dead.put = hangs
        heard = []
        task = asyncio.create_task(
            roads.router.process_each(
                [event(detail_type="Mail")], lambda _, answer: heard.append(answer)
            )
        )
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert [answer.acknowledge for answer in heard] == [False]
        roads.check()


# --- told early -----------------------------------------------------------------------------------


@virtual
async def test_each_answer_is_told_when_the_last_of_its_routes_has_spoken():
    matches = {"crm": None, "lake": only("Chat")}
    slow = ScriptedSink(otherwise=After(8, Yes()))
    async with two(second=slow, matches=matches) as roads:
        heard, began = {}, now()
        await roads.router.process_each(
            [event({"n": 1}, detail_type="Chat"), event({"n": 2}, detail_type="Call")],
            lambda at, answer: heard.setdefault(at, now() - began),
        )
        assert heard[1] < 0.1
        assert heard[0] == pytest.approx(8)


# --- all together -----------------------------------------------------------------------------------


@virtual
async def test_it_is_away_while_every_route_is_and_until_the_first_is_back():
    async with two(second=ScriptedSink(No("down", 0), otherwise=No("down"))) as roads:
        assert roads.router.unavailable_s() == 0
        for _ in range(5):
            roads["lake"].gateway.sink_breaker.failed(now())
        assert roads["lake"].gateway.unavailable_s() > 0
        assert roads.router.unavailable_s() == 0
        roads.router.pause(["crm"])
        assert roads["crm"].gateway.unavailable_s() == 5
        assert roads.router.unavailable_s() == roads["lake"].gateway.unavailable_s() > 0


@virtual
async def test_pausing_by_name_pauses_those_and_no_others():
    async with two() as roads:
        roads.router.pause(["lake"])
        assert [gateway.is_paused for gateway in roads.router.gateways] == [False, True]
        answer = await roads.one(event())
        assert not answer.acknowledge
        assert roads.taken("crm") == ["e1"]
        assert roads.taken("lake") == []
        roads["lake"].gateway.resume()
        assert (await roads.one(event())).acknowledge
        assert roads.taken("crm") == roads.taken("lake") == ["e1"]
        roads.router.pause()
        assert all(gateway.is_paused for gateway in roads.router.gateways)


@virtual
async def test_it_is_ordered_if_one_route_is():
    by_entity = {"lake": Settings(order="entity")}
    async with two() as plain, two(settings=by_entity) as ordered:
        assert not plain.router.is_ordered
        assert ordered.router.is_ordered


@virtual
async def test_draining_waits_for_all_routes_and_tells_whether_all_were_in_time():
    async with two(second=ScriptedSink(otherwise=After(9, Yes()))) as roads:
        task = asyncio.create_task(roads.router.process([event()]))
        await eventually(lambda: roads["lake"].sink.under_way)
        assert not await roads.router.drain(seconds(1))
        assert await roads.router.drain(seconds(20))
        (answer,) = await task
        assert answer.acknowledge
        late = await roads.one(event({"n": 2}))
        assert (late.acknowledge, late.verdict) == (False, Verdict.FAILED)


@virtual
async def test_closing_closes_every_route_also_beside_one_that_fails():
    class Stuck(ScriptedSink):
        async def aclose(self):
            await super().aclose()
            raise OSError

    roads = two(Stuck())
    await roads.router.open()
    await roads.router.aclose()
    assert (roads["crm"].sink.closed, roads["lake"].sink.closed) == (1, 1)


@virtual
async def test_time_and_patience_reach_the_routes():
    async with two(ScriptedSink(otherwise=After(9, Yes()))) as roads:
        began = now()
        answer = await roads.one(event(), within=seconds(3))
        assert not answer.acknowledge
        assert now() - began < 3


ARRIVALS = st.lists(
    st.tuples(st.sampled_from(["Call", "Chat", "Mail", "bad"]), st.integers(0, 6)), max_size=12
)
STEPS = st.sampled_from([Yes(), No("no"), Never("never"), After(1, Yes()), ZeroDivisionError()])


@settings(max_examples=examples(100))
@given(st.lists(ARRIVALS, max_size=4), st.lists(STEPS, max_size=20), st.lists(STEPS, max_size=20))
def test_whatever_the_sinks_do_all_books_balance_and_nothing_is_lost(batches, crm, lake):
    async def run():
        matches = {"crm": only("Call"), "lake": Pattern.compile({"detail-type": ["Call", "Chat"]})}
        roads = two(ScriptedSink(*crm), ScriptedSink(*lake), matches=matches)
        async with roads:
            for batch in batches:
                arrivals = [
                    b"{" if kind == "bad" else event({"n": n}, id=f"{kind}{n}", detail_type=kind)
                    for kind, n in batch
                ]
                answers = await roads.process(*arrivals)
                buried = Counter(letter.raw for letter in await roads.dead.list(limit=10_000))
                for arrival, answer in zip(arrivals, answers, strict=True):
                    if not answer.acknowledge:
                        continue
                    kind = "bad" if arrival == b"{" else json.loads(arrival)["detail-type"]
                    names = {"Call": ["crm", "lake"], "Chat": ["lake"]}.get(kind, [])
                    assert [name for name, _ in answer.outcomes if kind != "bad"] == names
                    for name in names:
                        is_there = arrival in roads[name].sink.raws
                        assert is_there or buried[arrival], "acknowledged, and nowhere"
                    assert names or buried[arrival]
            for name in ("crm", "lake"):
                assert max(Counter(roads.taken(name)).values(), default=1) == 1

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
