"""What the gateway says about plain cases; faults are in tests/faults. Time is virtual."""

import asyncio
import json
from datetime import timedelta
from itertools import repeat

import pytest
from tests.faults.doubles import (
    After,
    Bench,
    CountingDice,
    ScriptedSink,
    event,
    now_ms,
    rule,
    virtual,
)

from oncebridge import (
    ConfigError,
    Gateway,
    Never,
    No,
    Settings,
    Unknown,
    Unreadable,
    Verdict,
    Yes,
    parse,
)
from oncebridge.dead_letters.copies import copies_of
from oncebridge.engine import (
    ordering,
)
from oncebridge.events.key import conflict_key, fingerprint
from oncebridge.sinks.aws.fifo import deduplication_id
from oncebridge.stores.api import Fate
from oncebridge.stores.memory import MemoryStore
from oncebridge.testing import ManualClock

DELIVERED, DUPLICATE, CONFLICT = Verdict.DELIVERED, Verdict.DUPLICATE, Verdict.CONFLICT
STALE, UNCHANGED, DEAD, FAILED = Verdict.STALE, Verdict.UNCHANGED, Verdict.DEAD, Verdict.FAILED
BYPASSED = Verdict.BYPASSED

TWO_TIERS = {"tiers": [{"key": "id", "window": "5m"}, {"key": "content", "window": "6d"}]}
LATEST = {"key": "id", "latest": {"entity": "detail.e", "version": "detail.v"}}
QUIET = {"key": "id", "quiet": {"entity": "detail.e", "state": "detail.s", "for": "500ms"}}


def verdicts(outcomes):
    return [outcome.verdict for outcome in outcomes]


def state(version, name="a", *, entity="E", **envelope):
    envelope.setdefault("id", f"{entity}/{version}/{name}")
    return event({"e": entity, "v": version, "s": name}, **envelope)


async def each(bench, *arrivals):
    """Process one after another, each in a call of its own."""
    return [(await bench.one(arrival)).verdict for arrival in arrivals]


# --- delivered and duplicate ----------------------------------------------------------------


@virtual
async def test_the_first_is_delivered_and_the_second_a_duplicate():
    async with Bench() as bench:
        first = await bench.one(event())
        assert (first.verdict, first.acknowledge, first.forwarded) == (DELIVERED, True, True)
        arrived_ms = now_ms()
        await asyncio.sleep(60)
        second = await bench.one(event(id="e2"))
        assert (second.verdict, second.acknowledge, second.forwarded) == (DUPLICATE, True, False)
        assert second.key == first.key
        assert (second.first.id, second.first.arrived_ms) == ("e1", arrived_ms)
        assert len(bench.sink.taken) == 1


@virtual
async def test_who_came_first_is_kept_through_failures():
    async with Bench(sink=ScriptedSink(Unknown("500"), No("refused"))) as bench:
        arrived_ms = now_ms()
        await bench.until_acknowledged(event())
        outcome = await bench.one(event(id="e2"))
        assert (outcome.first.id, outcome.first.arrived_ms) == ("e1", arrived_ms)


@virtual
async def test_without_explanations_the_store_keeps_no_memo():
    async with Bench(settings=Settings(explain=False)) as bench:
        outcome = await bench.one(event())
        assert (await bench.record(outcome.key)).memo == b""
        again = await bench.one(event())
        assert (again.verdict, again.first) == (DUPLICATE, None)


@virtual
async def test_a_duplicate_is_one_until_the_window_ends_and_not_longer():
    async with Bench(rule(window="10m")) as bench:
        assert await each(bench, event()) == [DELIVERED]
        await asyncio.sleep(599.999)
        assert await each(bench, event()) == [DUPLICATE]
        await asyncio.sleep(0.001)
        assert await each(bench, event(), event()) == [DELIVERED, DUPLICATE]


@virtual
async def test_a_sliding_window_is_prolonged_by_repeats_but_not_for_ever():
    async with Bench(rule(window="10m", sliding=True, max_window="25m")) as bench:
        assert await each(bench, event()) == [DELIVERED]
        for _ in range(3):
            await asyncio.sleep(8 * 60)
            assert await each(bench, event()) == [DUPLICATE]  # at 8, 16 and 24 minutes
        await asyncio.sleep(61)
        assert await each(bench, event()) == [DELIVERED]  # the hard end was at 25


@virtual
async def test_a_sliding_window_without_repeats_ends():
    async with Bench(rule(window="10m", sliding=True)) as bench:
        assert await each(bench, event()) == [DELIVERED]
        await asyncio.sleep(601)
        assert await each(bench, event()) == [DELIVERED]


@virtual
async def test_what_is_delivered_is_what_was_received_byte_for_byte():
    raw = (
        b'{ "id":"1", "source":"s","detail-type":"t",\n "detail":{"n":1.0,"big":'
        b'123456789012345678901234567890,"\\u00e9":"\xc3\xa9","z":1,"a":[ ]}, "extra" : 1e2 }'
    )
    async with Bench() as bench:
        assert await each(bench, raw) == [DELIVERED]
        (delivery,) = bench.sink.seen
        assert delivery.event.raw == raw


@virtual
async def test_a_delivery_says_what_a_sink_needs_to_know():
    async with Bench(rule(**LATEST), route="crm") as bench:
        outcome = await bench.one(state(7))
        (delivery,) = bench.sink.seen
        record = await bench.record(outcome.key)
        assert delivery.key == outcome.key
        assert delivery.generation == record.generation
        assert (delivery.attempt, delivery.route, delivery.version) == (1, "crm", 7)
        assert not delivery.unprotected


@virtual
async def test_every_attempt_has_the_same_idempotency_key():
    sink = ScriptedSink(Unknown("a"), No("b"), ValueError("c"))
    async with Bench(sink=sink) as bench:
        await bench.until_acknowledged(event())
        assert len(sink.seen) == 4
        assert len({delivery.idempotency_key for delivery in sink.seen}) == 1


@virtual
async def test_two_contents_of_one_key_never_share_an_idempotency_key():
    """The first was sent without a clear answer, and the second took the key that was freed."""
    a, b = event({"n": 1}), event({"n": 2})
    async with Bench(rule(key="id"), sink=ScriptedSink(Unknown("reset"))) as bench:
        first = await bench.one(a)
        assert first.verdict is FAILED
        await asyncio.sleep(60)
        second = await bench.one(b)
        assert (second.verdict, second.key) == (DELIVERED, first.key)
        third = await bench.one(a)
        assert third.verdict is CONFLICT
        sent = {d.idempotency_key: d.event.raw for d in bench.sink.seen}
        assert sorted(sent.values()) == [a, b]
        # The header of a content is the same, whichever way it took.
        assert len({d.idempotency_key for d in bench.sink.seen if d.event.raw == a}) == 1
        assert bench.sink.seen[-1].idempotency_key == third.key.hex()
        assert len(set(map(deduplication_id, bench.sink.seen, repeat(CountingDice())))) == 3


@virtual
async def test_a_further_tier_that_is_in_conflict_leaves_the_content_out_of_the_header():
    tiers = [{"key": "id"}, {"key": ["detail.n"]}]
    async with Bench(rule(tiers=tiers)) as bench:
        await bench.one(event({"n": 1, "x": 1}))
        outcome = await bench.one(event({"n": 2, "x": 2}))
        assert outcome.verdict is CONFLICT
        assert bench.sink.seen[-1].idempotency_key == outcome.key.hex()


@virtual
async def test_without_a_comparison_of_contents_the_header_is_the_key():
    async with Bench(rule(key=["detail.n"])) as bench:
        outcome = await bench.one(event())
        assert bench.sink.seen[-1].idempotency_key == outcome.key.hex()


@virtual
async def test_an_event_object_goes_as_well_as_its_bytes():
    async with Bench() as bench:
        assert verdicts(await bench.process(parse(event()))) == [DELIVERED]
        assert verdicts(await bench.process(event())) == [DUPLICATE]


@virtual
async def test_an_empty_batch_is_nothing():
    async with Bench() as bench:
        assert await bench.process() == []
        assert bench.books.arrived == 0
        assert sum(bench.store.calls.values()) == 0


@virtual
async def test_outcomes_come_in_the_order_of_the_arrivals():
    async with Bench(rule(key="id")) as bench:
        await bench.one(event(id="b"))
        arrivals = [event(id="a"), b"x", event(id="b"), event(id="c"), event(id="a")]
        outcomes = await bench.process(*arrivals)
        assert verdicts(outcomes) == [DELIVERED, DEAD, DUPLICATE, DELIVERED, DUPLICATE]


@virtual
async def test_routes_are_kept_apart_in_one_store():
    async with Bench(route="a") as one, Bench(route="b", store=one.store) as two:
        first, second = await one.one(event()), await two.one(event())
        assert (first.verdict, second.verdict) == (DELIVERED, DELIVERED)
        assert first.key != second.key


@virtual
async def test_a_plain_function_is_a_sink():
    got = []

    async def take(one):
        got.append(one.detail)

    gateway = Gateway(store=MemoryStore(clock=now_ms), sink=take)
    outcomes = await gateway.process([event(), event()])
    assert verdicts(outcomes) == [DELIVERED, DUPLICATE]
    assert got == [{"n": 1}]
    await gateway.aclose()


@virtual
async def test_the_gateway_opens_and_closes_what_it_was_given():
    bench = Bench()
    async with bench.gateway:
        assert bench.sink.opened == 1
        await bench.one(event())
        assert bench.sink.opened == 1
    assert bench.sink.closed == 1
    assert (await bench.one(event())).verdict is FAILED


# --- repeats in one batch -------------------------------------------------------------------


@virtual
async def test_repeats_in_a_batch_are_one_claim_and_one_delivery():
    async with Bench() as bench:
        outcomes = await bench.process(event(), event(id="e2"), event(), event({"n": 2}))
        assert verdicts(outcomes) == [DELIVERED, DUPLICATE, DUPLICATE, DELIVERED]
        assert len(bench.store.asked["claim"]) == 2
        assert bench.store.calls["claim"] == 1
        assert len(bench.sink.seen) == 2
        assert outcomes[1].first.id == "e1"


@virtual
async def test_repeats_of_something_known_name_the_real_first():
    async with Bench() as bench:
        await bench.one(event())
        outcomes = await bench.process(event(id="e2"), event(id="e3"))
        assert verdicts(outcomes) == [DUPLICATE, DUPLICATE]
        assert [outcome.first.id for outcome in outcomes] == ["e1", "e1"]


@pytest.mark.parametrize("answer", [No("refused"), Unknown("500")])
@virtual
async def test_repeats_share_the_failure_of_the_first(answer):
    async with Bench(sink=ScriptedSink(answer)) as bench:
        outcomes = await bench.process(event(), event(id="e2"))
        assert verdicts(outcomes) == [FAILED, FAILED]
        assert not any(outcome.acknowledge for outcome in outcomes)
        assert outcomes[0].retry_after_ms == outcomes[1].retry_after_ms > 0
        assert len(bench.sink.seen) == 1


@virtual
async def test_repeats_of_what_was_given_up_are_duplicates():
    async with Bench(sink=ScriptedSink(Never("400"))) as bench:
        outcomes = await bench.process(event(), event())
        assert verdicts(outcomes) == [DEAD, DUPLICATE]
        assert len(await bench.letters()) == 1


@virtual
async def test_a_repeat_in_a_batch_marks_its_own_further_tier():
    async with Bench(rule(**TWO_TIERS)) as bench:
        outcomes = await bench.process(event(id="e1"), event(id="e2"))
        assert verdicts(outcomes) == [DELIVERED, DUPLICATE]
        for one in (event(id="e1"), event(id="e2")):
            for key in bench.keys(one):
                assert (await bench.record(key)).fate is Fate.DELIVERED


@virtual
async def test_a_thousand_distinct_events_are_a_thousand_deliveries():
    async with Bench(sink=ScriptedSink(batch=100)) as bench:
        events = [event({"n": n}) for n in range(1000)]
        assert set(verdicts(await bench.process(*events))) == {DELIVERED}
        assert sorted(bench.sink.raws) == sorted(events)
        assert bench.store.calls["claim"] == 1


# --- conflicts ------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False], ids=["one-batch", "two-batches"])
@virtual
async def test_other_content_under_a_known_id_is_delivered_as_an_event_of_its_own(together):
    one, two = event({"n": 1}), event({"n": 2})
    async with Bench(rule(key="id")) as bench:
        if together:
            outcomes = await bench.process(one, two)
        else:
            outcomes = [await bench.one(one), await bench.one(two)]
        assert verdicts(outcomes) == [DELIVERED, CONFLICT]
        assert all(outcome.acknowledge and outcome.forwarded for outcome in outcomes)
        key = bench.key(one)
        k2 = conflict_key(key, fingerprint(parse(two)))
        assert outcomes[1].key == k2
        assert [delivery.key for delivery in bench.sink.seen] == [key, k2]
        assert (await bench.record(k2)).fate is Fate.DELIVERED


@pytest.mark.parametrize("policy", ["deliver", "dead", "duplicate"])
@virtual
async def test_a_conflict_leaves_the_first_record_alone(policy):
    async with Bench(rule(key="id", on_conflict=policy)) as bench:
        await bench.one(event({"n": 1}))
        before = await bench.record(bench.key(event()))
        await asyncio.sleep(60)
        assert await each(bench, event({"n": 2})) == [CONFLICT]
        assert await bench.record(bench.key(event())) == before
        assert await each(bench, event({"n": 1})) == [DUPLICATE]


@pytest.mark.parametrize("policy", ["deliver", "dead", "duplicate"])
@virtual
async def test_a_repeat_of_the_other_content_is_a_duplicate(policy):
    arrivals = event({"n": 1}), event({"n": 2}), event({"n": 2}), event({"n": 3}), event({"n": 1})
    expected = [DELIVERED, CONFLICT, DUPLICATE, CONFLICT, DUPLICATE]
    async with Bench(rule(key="id", on_conflict=policy)) as bench:
        assert await each(bench, *arrivals) == expected
    async with Bench(rule(key="id", on_conflict=policy)) as bench:
        assert verdicts(await bench.process(*arrivals)) == expected


@virtual
async def test_a_conflict_can_be_put_into_the_dead_letters():
    async with Bench(rule(key="id", on_conflict="dead")) as bench:
        await bench.one(event({"n": 1}))
        outcome = await bench.one(event({"n": 2}))
        assert (outcome.verdict, outcome.acknowledge, outcome.forwarded) == (CONFLICT, True, False)
        (letter,) = await bench.letters()
        assert (letter.raw, letter.reason, letter.key) == (event({"n": 2}), "conflict", outcome.key)
        assert (await bench.record(outcome.key)).fate is Fate.DEAD
        assert bench.sink.raws == [event({"n": 1})]


@virtual
async def test_a_conflict_can_be_dropped():
    async with Bench(rule(key="id", on_conflict="duplicate")) as bench:
        await bench.one(event({"n": 1}))
        outcome = await bench.one(event({"n": 2}))
        assert (outcome.verdict, outcome.acknowledge, outcome.forwarded) == (CONFLICT, True, False)
        assert (await bench.record(outcome.key)).fate is Fate.DROPPED
        assert await bench.letters() == []
        assert bench.sink.raws == [event({"n": 1})]


@virtual
async def test_a_conflict_that_the_sink_did_not_take_comes_again_under_the_same_key():
    async with Bench(rule(key="id"), sink=ScriptedSink(Yes(), Unknown("500"))) as bench:
        await bench.one(event({"n": 1}))
        outcome = await bench.one(event({"n": 2}))
        assert (outcome.verdict, outcome.acknowledge) == (FAILED, False)
        assert (await bench.until_acknowledged(event({"n": 2}))).verdict is CONFLICT
        _, first, second = bench.sink.seen
        assert first.key == second.key
        assert (first.attempt, second.attempt) == (1, 2)


@virtual
async def test_field_keys_do_not_compare_the_rest_unless_told():
    one, two = event({"id": 1, "x": 1}), event({"id": 1, "x": 2})
    async with Bench(rule(key=["detail.id"])) as bench:
        assert await each(bench, one, two) == [DELIVERED, DUPLICATE]
    async with Bench(rule(key=["detail.id"], check=True)) as bench:
        assert await each(bench, one, two) == [DELIVERED, CONFLICT]


@virtual
async def test_ids_can_be_told_not_to_compare():
    async with Bench(rule(key="id", check=False)) as bench:
        assert await each(bench, event({"n": 1}), event({"n": 2})) == [DELIVERED, DUPLICATE]
        outcomes = await bench.process(event({"n": 3}, id="z"), event({"n": 4}, id="z"))
        assert verdicts(outcomes) == [DELIVERED, DUPLICATE]


@virtual
async def test_transport_fields_are_no_other_content():
    async with Bench(rule(key="id")) as bench:
        again = event(time="2025-01-01T00:00:00Z", region="eu-west-1", replay_name="r")
        assert await each(bench, event(), again) == [DELIVERED, DUPLICATE]


@virtual
async def test_other_content_where_nothing_was_delivered_yet_is_no_conflict():
    async with Bench(rule(key="id"), sink=ScriptedSink(No("refused"))) as bench:
        failed = await bench.one(event({"n": 1}))
        await asyncio.sleep(failed.retry_after_ms / 1000)
        assert await each(bench, event({"n": 2}), event({"n": 1})) == [DELIVERED, CONFLICT]
        assert {*bench.sink.raws} == {event({"n": 1}), event({"n": 2})}


# --- tiers ----------------------------------------------------------------------------------


@virtual
async def test_a_re_emission_with_a_new_id_is_a_duplicate_by_its_content():
    async with Bench(rule(**TWO_TIERS)) as bench:
        assert await each(bench, event(id="e1"), event(id="e2")) == [DELIVERED, DUPLICATE]


@virtual
async def test_a_redelivery_after_the_short_window_is_a_duplicate_by_its_content():
    async with Bench(rule(**TWO_TIERS)) as bench:
        assert await each(bench, event()) == [DELIVERED]
        await asyncio.sleep(6 * 60)
        assert await each(bench, event()) == [DUPLICATE]
        await asyncio.sleep(6 * 86_400)
        assert await each(bench, event()) == [DELIVERED]


@virtual
async def test_a_duplicate_by_content_marks_the_id_too():
    async with Bench(rule(**TWO_TIERS)) as bench:
        await each(bench, event(id="e1"), event(id="e2"))
        by_id, _ = bench.keys(event(id="e2"))
        record = await bench.record(by_id)
        assert record.fate is Fate.DELIVERED
        assert record.until_ms == now_ms() + 300_000
        # so the same id with other content is seen, as with any other delivered event
        assert await each(bench, event({"n": 2}, id="e2")) == [CONFLICT]


@virtual
async def test_a_known_id_with_other_content_is_a_conflict_in_tiers_too():
    async with Bench(rule(**TWO_TIERS)) as bench:
        assert await each(bench, event({"n": 1}), event({"n": 2})) == [DELIVERED, CONFLICT]
        assert await each(bench, event({"n": 2})) == [DUPLICATE]
        assert await each(bench, event({"n": 2}, id="e9")) == [DUPLICATE]
        assert len(bench.sink.taken) == 2
    async with Bench(rule(**TWO_TIERS)) as bench:
        outcomes = await bench.process(event({"n": 1}), event({"n": 2}), event({"n": 2}))
        assert verdicts(outcomes) == [DELIVERED, CONFLICT, DUPLICATE]


@virtual
async def test_both_tiers_are_committed_and_released_together():
    async with Bench(rule(**TWO_TIERS), sink=ScriptedSink(No("refused"))) as bench:
        failed = await bench.one(event())
        for key in bench.keys(event()):
            assert (await bench.record(key)).token == b""
        await asyncio.sleep(failed.retry_after_ms / 1000)
        await bench.one(event())
        by_id, by_content = [await bench.record(key) for key in bench.keys(event())]
        assert (by_id.fate, by_content.fate) == (Fate.DELIVERED, Fate.DELIVERED)
        assert by_content.until_ms - by_id.until_ms == 6 * 86_400_000 - 300_000


@virtual
async def test_the_idempotency_key_is_the_last_tiers():
    async with Bench(rule(**TWO_TIERS)) as bench:
        outcome = await bench.one(event())
        by_id, by_content = bench.keys(event())
        assert by_id != by_content
        assert outcome.key == bench.sink.seen[0].key == by_content


@virtual
async def test_three_tiers():
    tiers = [{"key": "id"}, {"key": ["detail.order"]}, {"key": "content", "ignore": ["detail.at"]}]
    async with Bench(rule(tiers=tiers)) as bench:
        first = event({"order": 1, "x": 1, "at": 1}, id="a")
        same_content = event({"order": 1, "x": 1, "at": 2}, id="b")
        same_order = event({"order": 1, "x": 2, "at": 3}, id="c")
        other = event({"order": 2, "x": 1, "at": 4}, id="d")
        assert await each(bench, first, same_content, same_order, other) == [
            DELIVERED,
            DUPLICATE,
            DUPLICATE,
            DELIVERED,
        ]
    async with Bench(rule(tiers=tiers)) as bench:
        outcomes = await bench.process(first, same_content, same_order, other)
        assert verdicts(outcomes) == [DELIVERED, DUPLICATE, DUPLICATE, DELIVERED]


@virtual
async def test_two_tiers_that_fall_together_are_one():
    async with Bench(rule(tiers=[{"key": "id"}, {"key": "content"}])) as bench:
        assert len(bench.keys(event(id=None))) == 1
        assert await each(bench, event(id=None), event(id=None)) == [DELIVERED, DUPLICATE]


# --- bypass, missing keys, replays, scope ---------------------------------------------------


@virtual
async def test_what_bypasses_is_forwarded_as_it_is():
    async with Bench(rule(key="none")) as bench:
        outcomes = await bench.process(event(), event())
        assert verdicts(outcomes) == [BYPASSED, BYPASSED]
        assert all(outcome.acknowledge and outcome.forwarded for outcome in outcomes)
        assert bench.store.calls["claim"] == 0
        assert [delivery.key for delivery in bench.sink.seen] == [b"", b""]


@virtual
async def test_what_bypasses_and_is_not_taken_is_handed_back():
    async with Bench(rule(key="none"), sink=ScriptedSink(Unknown("500"), Never("400"))) as bench:
        outcome = await bench.one(event())
        assert (outcome.verdict, outcome.acknowledge) == (FAILED, False)
        assert await each(bench, event()) == [DEAD]
        assert (await bench.letters())[0].key == b""


@pytest.mark.parametrize("missing", [{}, {"x": None}, {"x": []}, {"x": {"y": None}}])
@virtual
async def test_without_its_fields_an_event_is_judged_by_its_content(missing):
    one, two = event({"n": 1} | missing), event({"n": 2} | missing)
    async with Bench(rule(key=["detail.x"])) as bench:
        assert await each(bench, one, two, one) == [DELIVERED, DELIVERED, DUPLICATE]


@virtual
async def test_without_its_fields_an_event_can_be_passed_on():
    async with Bench(rule(key=["detail.x"], on_missing="deliver")) as bench:
        assert await each(bench, event(), event()) == [BYPASSED, BYPASSED]
        assert await each(bench, event({"x": 1}), event({"x": 1})) == [DELIVERED, DUPLICATE]


@virtual
async def test_without_its_fields_an_event_can_be_given_up():
    async with Bench(rule(key=["detail.x"], on_missing="dead")) as bench:
        outcome = await bench.one(event())
        assert (outcome.verdict, outcome.acknowledge) == (DEAD, True)
        (letter,) = await bench.letters()
        assert (letter.reason, letter.rule, letter.raw) == ("unkeyable", "the rule", event())
        assert "missing" in letter.message
        assert bench.sink.seen == []
        assert await each(bench, event()) == [DUPLICATE]
        assert len(await bench.letters()) == 1


@virtual
async def test_without_id_and_content_nothing_is_merged():
    nothing = [event({}, id=None, time=str(n)) for n in range(3)]
    async with Bench() as bench:
        assert verdicts(await bench.process(*nothing)) == [DEAD] * 3
        assert [letter.raw for letter in await bench.letters()] == nothing
    async with Bench() as bench:
        by_id = [event({}, id=str(n)) for n in range(3)]
        assert verdicts(await bench.process(*by_id)) == [DELIVERED] * 3
        assert verdicts(await bench.process(*by_id)) == [DUPLICATE] * 3


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("deduplicate", [DELIVERED, DUPLICATE, DUPLICATE, DUPLICATE]),
        ("deliver", [DELIVERED, BYPASSED, BYPASSED, BYPASSED]),
        ("separate", [DELIVERED, DELIVERED, DUPLICATE, DELIVERED]),
    ],
)
@virtual
async def test_replays(policy, expected):
    arrivals = [event(), *[event(replay_name=name) for name in ("r1", "r1", "r2")]]
    async with Bench(rule(on_replay=policy)) as bench:
        assert await each(bench, *arrivals) == expected


@virtual
async def test_a_separate_replay_has_registers_of_its_own():
    async with Bench(rule(**LATEST, on_replay="separate")) as bench:
        assert await each(bench, state(5), state(4), state(4, replay_name="r")) == [
            DELIVERED,
            STALE,
            DELIVERED,
        ]


@pytest.mark.parametrize(
    ("scope", "expected"),
    [("source", [DELIVERED, DELIVERED]), ("organisation", [DELIVERED, DUPLICATE])],
)
@virtual
async def test_scope(scope, expected):
    organisation = "aws.partner/genesys.com/cloud/3f1c2b7a-5a0e-4a3c-9a0d-1d2f6c1b7e10"
    arrivals = [event(source=f"{organisation}/{suffix}") for suffix in ("prod", "audit")]
    async with Bench(rule(scope=scope)) as bench:
        assert await each(bench, *arrivals) == expected


@virtual
async def test_the_first_rule_that_matches_decides():
    rules = [
        rule(name="a", match={"source": ["shop"]}, key=["detail.x"]),
        rule(name="b", match={"detail-type": ["Order"]}, key="none"),
    ]
    async with Bench(*rules) as bench:
        one = await bench.one(event({"x": 1}))
        two = await bench.one(event({"x": 1}, source="other"))
        three = await bench.one(event({"x": 1}, source="other", detail_type="other"))
        assert [outcome.rule for outcome in (one, two, three)] == ["a", "b", "default"]
        assert [one.verdict, two.verdict, three.verdict] == [DELIVERED, BYPASSED, DELIVERED]


# --- newest wins ----------------------------------------------------------------------------


@virtual
async def test_an_older_state_is_stale_and_stays_so():
    async with Bench(rule(**LATEST)) as bench:
        assert await each(bench, state(5), state(4), state(6), state(5, id="x")) == [
            DELIVERED,
            STALE,
            DELIVERED,
            STALE,
        ]
        stale = await bench.one(state(4, id="y"))
        assert (stale.acknowledge, stale.forwarded) == (True, False)
        assert (await bench.record(stale.key)).fate is Fate.STALE
        assert await each(bench, state(4)) == [DUPLICATE]
        assert [delivery.version for delivery in bench.sink.taken] == [5, 6]


@virtual
async def test_two_events_of_one_version_both_go():
    async with Bench(rule(**LATEST)) as bench:
        assert await each(bench, state(5, id="a"), state(5, id="b")) == [DELIVERED, DELIVERED]
        outcomes = await bench.process(state(6, id="c"), state(6, id="d"))
        assert verdicts(outcomes) == [DELIVERED, DELIVERED]


@virtual
async def test_states_out_of_order_in_one_batch_run_in_the_order_of_their_versions():
    order = [3, 1, 2, 5, 4]
    async with Bench(rule(**LATEST)) as bench:
        outcomes = await bench.process(*[state(version) for version in order])
        assert verdicts(outcomes) == [DELIVERED] * 5
        assert [delivery.version for delivery in bench.sink.taken] == [1, 2, 3, 4, 5]


@virtual
async def test_states_of_different_entities_do_not_meet():
    async with Bench(rule(**LATEST)) as bench:
        arrivals = [state(2, entity="A"), state(1, entity="B"), state(2, entity="B")]
        assert verdicts(await bench.process(*arrivals)) == [DELIVERED] * 3
        assert await each(bench, state(1, entity="A", id="x")) == [STALE]


@virtual
async def test_a_state_that_was_not_taken_does_not_raise_the_register():
    async with Bench(rule(**LATEST), sink=ScriptedSink(No("refused"))) as bench:
        assert await each(bench, state(5)) == [FAILED]
        assert await each(bench, state(4)) == [DELIVERED]


@virtual
async def test_a_state_that_was_given_up_does_not_raise_the_register():
    async with Bench(rule(**LATEST), sink=ScriptedSink(Never("400"))) as bench:
        assert await each(bench, state(5), state(4)) == [DEAD, DELIVERED]


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        (1, 2),
        (-1, 0),
        (1, 1.5),
        (9.99, 10),
        (123456789012345678901234567890, 123456789012345678901234567891),
        ("2023-01-01T00:00:00Z", "2023-01-01T00:00:00.001Z"),
        ("2023-01-01T00:00:00Z", "2023-01-01T00:00:00.000001Z"),
        ("2023-01-01T12:00:00+02:00", "2023-01-01T11:00:00Z"),
        ("2023-01-01T10:00:00", "2023-01-01T11:00:00Z"),
        ("2023-01-01", "2023-01-02"),
    ],
)
@virtual
async def test_versions_are_numbers_or_instants(older, newer):
    async with Bench(rule(**LATEST)) as bench:
        assert await each(bench, state(newer), state(older)) == [DELIVERED, STALE]
    async with Bench(rule(**LATEST)) as bench:
        assert await each(bench, state(older), state(newer)) == [DELIVERED, DELIVERED]


@virtual
async def test_equal_instants_in_two_zones_are_one_version():
    async with Bench(rule(**LATEST)) as bench:
        arrivals = state("2023-01-01T12:00:00+02:00"), state("2023-01-01T10:00:00Z")
        assert await each(bench, *arrivals) == [DELIVERED, DELIVERED]


@virtual
async def test_numbers_and_instants_do_not_compare_and_do_not_replace_each_other():
    async with Bench(rule(**LATEST)) as bench:
        arrivals = state(7), state("2023-01-01T00:00:00Z"), state(6), state(8)
        assert await each(bench, *arrivals) == [DELIVERED, CONFLICT, STALE, DELIVERED]
    async with Bench(rule(**LATEST)) as bench:
        arrivals = state("2023-01-02"), state(9e15), state("2023-01-01"), state("2023-01-03")
        assert await each(bench, *arrivals) == [DELIVERED, CONFLICT, STALE, DELIVERED]


AHEAD = "2023-11-17T00:00:00Z"  # the store's clock is at 2023-11-14


@virtual
async def test_a_version_from_far_ahead_does_not_hide_the_true_ones():
    async with Bench(rule(**LATEST)) as bench:
        arrivals = state("2023-11-14T00:00:00Z"), state(AHEAD), state("9999-12-31")
        assert await each(bench, *arrivals) == [DELIVERED, CONFLICT, CONFLICT]
        odd = await bench.one(state(AHEAD, "b"))
        assert odd.forwarded
        assert "ahead of the store's clock; the rule allows 1d (latest.ahead)" in odd.reason
        later = state("2023-11-14T01:00:00Z"), state("2023-11-13T00:00:00Z")
        assert await each(bench, *later) == [DELIVERED, STALE]


@virtual
async def test_how_far_ahead_a_version_may_be_is_the_rules_choice():
    latest = {**LATEST["latest"], "ahead": "30d"}
    async with Bench(rule(key="id", latest=latest)) as bench:
        assert await each(bench, state(AHEAD), state("2023-11-16")) == [DELIVERED, STALE]


@pytest.mark.parametrize("policy", ["dead", "duplicate"])
@virtual
async def test_a_version_from_far_ahead_is_kept_where_the_rule_does_not_deliver_conflicts(policy):
    async with Bench(rule(**LATEST, on_conflict=policy)) as bench:
        outcome = await bench.one(state(AHEAD))
        assert (outcome.verdict, outcome.acknowledge) == (CONFLICT, True)
        (letter,) = await bench.letters()
        assert letter.reason == "version"
        assert "ahead of the store's clock" in letter.message
        assert bench.sink.seen == []
        assert await each(bench, state("2023-11-14")) == [DELIVERED]


@virtual
async def test_in_shadow_mode_a_version_from_far_ahead_is_forwarded_and_changes_nothing():
    async with Bench(rule(**LATEST), settings=Settings(mode="shadow")) as bench:
        arrivals = state("2023-11-13"), state(AHEAD), state("2023-11-14")
        assert await each(bench, *arrivals) == [DELIVERED, CONFLICT, DELIVERED]


@virtual
async def test_a_wrong_version_is_forgotten_a_window_after_its_delivery_however_many_are_stale():
    async with Bench(rule(**LATEST | {"window": "1d"})) as bench:
        assert await each(bench, state(1e308)) == [DELIVERED]
        found = []
        for n in range(60):  # one every half an hour: 30 h
            await asyncio.sleep(1800)
            found += await each(bench, state(n))
        assert found[:47] == [STALE] * 47
        assert found[48:] == [DELIVERED] * 12


@virtual
async def test_an_unchanged_state_keeps_its_version():
    quiet = {**QUIET["quiet"], "for": "1000d"}
    async with Bench(rule(**LATEST | {"window": "1d"}, quiet=quiet)) as bench:
        assert await each(bench, state(1)) == [DELIVERED]
        await asyncio.sleep(80_000)
        assert await each(bench, state(5)) == [UNCHANGED]
        await asyncio.sleep(80_000)
        assert await each(bench, state(4)) == [STALE]


@virtual
async def test_a_stale_event_does_not_prolong_the_record_of_the_entity():
    async with Bench(rule(**LATEST)) as bench:
        await bench.one(state(5))
        entity = bench.gateway.rules.plan(parse(state(5))).entity
        before = (await bench.record(entity)).keep_until_ms
        await asyncio.sleep(3600)
        assert await each(bench, state(4)) == [STALE]
        assert (await bench.record(entity)).keep_until_ms == pytest.approx(before, abs=2)


@virtual
async def test_a_long_run_of_stale_events_is_counted_and_logged(caplog):
    async with Bench(rule(**LATEST)) as bench:
        await bench.one(state(1000))
        assert await each(bench, *map(state, range(19))) == [STALE] * 19
        assert bench.books.stale_runs == 0
        assert caplog.records == []
        await bench.one(state(19))
        assert bench.books.stale_runs == 1
        (record,) = caplog.records
        assert (record.message, record.stale) == ("oncebridge.stale_run", 20)
        entity = bench.gateway.rules.plan(parse(state(0))).entity
        assert record.entity == entity.hex()
        await bench.one(state(1001))
        assert await each(bench, *[state(n, "again") for n in range(19)]) == [STALE] * 19
        assert bench.books.stale_runs == 1, "one that is newer ends the run"


@pytest.mark.parametrize("version", [None, "", "five", True, [5], {"v": 5}, "5"])
@pytest.mark.parametrize(
    ("policy", "expected"),
    [("content", DELIVERED), ("deliver", BYPASSED), ("dead", DEAD)],
)
@virtual
async def test_without_a_version_the_rule_says_what_then(version, policy, expected):
    async with Bench(rule(**LATEST, on_missing=policy)) as bench:
        assert await each(bench, state(5), state(version, id="x")) == [DELIVERED, expected]


@virtual
async def test_without_an_entity_the_rule_says_what_then():
    async with Bench(rule(**LATEST, on_missing="dead")) as bench:
        assert await each(bench, state(5, entity=None)) == [DEAD]


@virtual
async def test_registers_belong_to_a_rule():
    rules = [
        rule(name="a", match={"detail-type": ["A"]}, **LATEST),
        rule(name="b", match={"detail-type": ["B"]}, **LATEST),
    ]
    async with Bench(*rules) as bench:
        assert await each(
            bench,
            state(5, detail_type="A"),
            state(4, detail_type="B"),
            state(4, detail_type="A", id="x"),
        ) == [DELIVERED, DELIVERED, STALE]


@virtual
async def test_all_detail_types_of_a_rule_are_states_of_one_thing():
    async with Bench(rule(**LATEST)) as bench:
        arrivals = state(5, detail_type="Opened"), state(4, detail_type="Closed")
        assert await each(bench, *arrivals) == [DELIVERED, STALE]


@virtual
async def test_events_of_one_entity_go_one_after_the_other():
    sink = ScriptedSink(otherwise=After(1, Yes()))
    async with Bench(rule(**QUIET), sink=sink) as bench:
        arrivals = [state(n, name=str(n)) for n in range(4)]
        arrivals += [state(n, name=str(n), entity="F") for n in range(4)]
        assert verdicts(await bench.process(*arrivals)) == [DELIVERED] * 8
        assert sink.most_under_way == 2  # one for each entity
        for entity in (arrivals[:4], arrivals[4:]):
            assert [raw for raw in sink.raws if raw in entity] == entity


@virtual
async def test_a_register_outlives_what_is_forgotten_about_its_events():
    async with Bench(rule(**LATEST, window="1h")) as bench:
        await bench.one(state(5))
        await asyncio.sleep(3000)
        assert await each(bench, state(6)) == [DELIVERED]
        await asyncio.sleep(3000)
        assert await each(bench, state(5, id="x")) == [STALE]


# --- quiet ----------------------------------------------------------------------------------


@virtual
async def test_the_same_state_inside_the_quiet_time_is_unchanged():
    async with Bench(rule(**QUIET)) as bench:
        assert await each(bench, state(1)) == [DELIVERED]
        await asyncio.sleep(0.4)
        unchanged = await bench.one(state(2))
        assert (unchanged.verdict, unchanged.acknowledge) == (UNCHANGED, True)
        assert not unchanged.forwarded
        assert (await bench.record(unchanged.key)).fate is Fate.UNCHANGED
        await asyncio.sleep(0.2)
        assert await each(bench, state(3)) == [DELIVERED]  # what was dropped prolongs nothing
        assert await each(bench, state(2)) == [DUPLICATE]


@virtual
async def test_another_state_inside_the_quiet_time_goes():
    async with Bench(rule(**QUIET)) as bench:
        arrivals = state(1, "a"), state(2, "b"), state(3, "a"), state(4, "a")
        assert await each(bench, *arrivals) == [DELIVERED, DELIVERED, DELIVERED, UNCHANGED]


@virtual
async def test_the_quiet_time_ends_to_the_millisecond():
    async with Bench(rule(**QUIET)) as bench:
        assert await each(bench, state(1)) == [DELIVERED]
        await asyncio.sleep(0.499)
        assert await each(bench, state(2)) == [UNCHANGED]
        await asyncio.sleep(0.001)
        assert await each(bench, state(3)) == [DELIVERED]


@virtual
async def test_repeats_of_a_state_in_one_batch_are_unchanged():
    async with Bench(rule(**QUIET)) as bench:
        outcomes = await bench.process(state(1), state(2), state(3, "b"), state(4, "b"))
        assert verdicts(outcomes) == [DELIVERED, UNCHANGED, DELIVERED, UNCHANGED]


@virtual
async def test_a_state_can_be_anything_but_nothing():
    async with Bench(rule(**QUIET, on_missing="dead")) as bench:
        arrivals = [
            event({"e": n, "s": value}, id=f"{n}-{copy}")
            for n, value in enumerate([0, False, "", [1], {"a": 1}])
            for copy in (1, 2)
        ]
        assert await each(bench, *arrivals) == [DELIVERED, UNCHANGED] * 5
        assert await each(bench, event({"e": 9, "s": None}, id="z")) == [DEAD]


@virtual
async def test_newest_wins_and_quiet_together():
    async with Bench(rule(**LATEST | QUIET)) as bench:
        arrivals = state(5, "a"), state(6, "a"), state(4, "b"), state(7, "b"), state(6, "c")
        assert await each(bench, *arrivals) == [DELIVERED, UNCHANGED, STALE, DELIVERED, STALE]


# Was a bug: an unchanged event does not raise the version ("raise version=max() when handing back"): what is
# older than it, but newer than what was delivered, passes later and leaves the sink with an old state.
@virtual
async def test_an_unchanged_state_is_the_newest_all_the_same():
    async with Bench(rule(**LATEST | QUIET)) as bench:
        arrivals = state(1, "a"), state(3, "a"), state(2, "b")
        assert await each(bench, *arrivals) == [DELIVERED, UNCHANGED, STALE]
        assert json.loads(bench.sink.raws[-1])["detail"]["s"] == "a"  # as it truly is


@virtual
async def test_the_register_keeps_no_state_in_clear():
    async with Bench(rule(**QUIET)) as bench:
        await bench.one(state(1, "Jane Doe"))
        plan = bench.gateway.rules.plan(parse(state(1, "Jane Doe")))
        assert b"Jane" not in (await bench.record(plan.entity)).memo


# --- dead letters ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "not-json"),
        (b"\xff\x00rubbish", "not-json"),
        (b"[1]", "not-an-object"),
        (b'{"id":"1"}', "no-detail"),
        (b'{"id":"1","detail":{"a":1,"a":2}}', "duplicate-name"),
        (b'{"id":"1","detail":{"a":NaN}}', "not-finite"),
        (b'{"id":"1","detail":{"a":"\\ud800"}}', "lone-surrogate"),
        (b'{"detail":' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}", "too-deep"),
        (b'{"detail":{"a":"' + b"x" * 2_100_000 + b'"}}', "too-large"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@virtual
async def test_what_is_no_event_is_kept_whole_with_the_reason(raw, reason):
    async with Bench(route="crm") as bench:
        outcome = await bench.one(raw)
        assert (outcome.verdict, outcome.acknowledge) == (DEAD, True)
        assert outcome.reason.startswith(reason)
        (letter,) = await bench.letters()
        assert (letter.raw, letter.reason, letter.route) == (raw, reason, "crm")
        assert letter.key == outcome.key
        assert (letter.attempts, letter.maybe_delivered) == (0, False)
        assert letter.buried_ms == now_ms()
        assert bench.sink.seen == []


@virtual
async def test_what_a_source_could_not_read_is_kept_too():
    async with Bench() as bench:
        outcome = await bench.one(Unreadable(b"xx", "not-base64", "no base64 in the record"))
        assert (outcome.verdict, outcome.acknowledge) == (DEAD, True)
        (letter,) = await bench.letters()
        assert (letter.raw, letter.reason) == (b"xx", "not-base64")


@virtual
async def test_what_is_no_event_is_one_letter_however_often_it_arrives():
    async with Bench() as bench:
        outcomes = await bench.process(b"x", b"x", b"y")
        assert verdicts(outcomes) == [DEAD, DUPLICATE, DEAD]
        assert verdicts(await bench.process(*[b"x"] * 500)) == [DUPLICATE] * 500
        assert [letter.raw for letter in await bench.letters()] == [b"x", b"y"]
        found = await copies_of(bench.store.inner, [outcomes[0].key, outcomes[2].key])
        assert [copies.count for copies in found] == [501, 0]
        assert found[0].last_ms == now_ms()


@virtual
async def test_the_same_bytes_for_another_reason_or_route_are_another_letter():
    async with Bench(route="one") as one, Bench(route="two") as two:
        first, second = await one.one(b"x"), await two.one(b"x")
        (third,) = await one.process(Unreadable(b"x", "too-large", "longer than the limit"))
        assert verdicts([first, second, third]) == [DEAD] * 3
        assert len({outcome.key for outcome in (first, second, third)}) == 3


@virtual
async def test_what_is_no_event_is_handed_back_while_the_store_is_down_and_buried_once():
    async with Bench() as bench:
        bench.store.arm("claim.before", times=1e9, for_s=60)
        assert verdicts(await bench.process(b"x", b"x")) == [FAILED] * 2
        assert await bench.letters() == []
        await asyncio.sleep(61)
        assert verdicts(await bench.process(b"x", b"x")) == [DEAD, DUPLICATE]
    async with Bench(settings=Settings(on_store_outage="deliver")) as bench:
        bench.store.arm("claim.before", times=1e9, for_s=60)
        assert await each(bench, b"x") == [DEAD]
        assert len(await bench.letters()) == 1
        assert bench.sink.seen == []


@virtual
async def test_what_is_no_event_is_kept_once_in_shadow_mode_too():
    async with Bench(settings=Settings(mode="shadow")) as bench:
        assert verdicts(await bench.process(b"x", b"x")) == [DEAD, DUPLICATE]
        assert await each(bench, b"x") == [DUPLICATE]
        assert bench.sink.seen == []
        assert len(await bench.letters()) == 1


@virtual
async def test_what_fails_too_often_is_given_up_with_its_last_error():
    settings = Settings(max_attempts=3)
    script = Unknown("one"), Unknown("two"), Unknown("three")
    async with Bench(sink=ScriptedSink(*script), settings=settings) as bench:
        outcome = await bench.until_acknowledged(event())
        assert (outcome.verdict, outcome.acknowledge) == (DEAD, True)
        assert outcome.reason == "attempts: three"
        assert len(bench.sink.seen) == 3
        (letter,) = await bench.letters()
        assert (letter.reason, letter.message) == ("attempts", "three")
        assert (letter.key, letter.maybe_delivered) == (outcome.key, True)
        assert (await bench.record(outcome.key)).fate is Fate.DEAD
        assert await each(bench, event()) == [DUPLICATE]


# Was a bug: the letter counts the claim that found the limit exceeded: 4 attempts for 3 sends.
@virtual
async def test_a_letter_counts_the_attempts_that_were_made():
    settings = Settings(max_attempts=3)
    async with Bench(sink=ScriptedSink(otherwise=Unknown("x")), settings=settings) as bench:
        await bench.until_acknowledged(event())
        (letter,) = await bench.letters()
        assert letter.attempts == len(bench.sink.seen) == 3


@virtual
async def test_the_last_attempt_is_made_also_beside_one_that_is_given_up():
    settings = Settings(max_attempts=2)
    async with Bench(sink=ScriptedSink(otherwise=Unknown("500")), settings=settings) as bench:
        for arrivals in ([event({"n": 1})], [event({"n": 1}), event({"n": 2})]):
            await bench.process(*arrivals)
            await asyncio.sleep(60)
        bench.sink.otherwise = Yes()
        outcomes = await bench.process(event({"n": 1}), event({"n": 2}))
        assert verdicts(outcomes) == [DEAD, DELIVERED]


@virtual
async def test_a_sink_that_is_down_for_days_gives_nothing_up():
    sink = ScriptedSink(*[No("refused")] * 50)
    async with Bench(sink=sink, settings=Settings(max_attempts=3)) as bench:
        assert (await bench.until_acknowledged(event())).verdict is DELIVERED
        assert len(sink.seen) == 51


@pytest.mark.parametrize(
    ("arrival", "spec", "answer"),
    [
        (b"rubbish", {}, Yes()),
        (event(), {"key": ["detail.x"], "on_missing": "dead"}, Yes()),
        (event(), {}, Never("400")),
    ],
    ids=["unreadable", "unkeyable", "rejected"],
)
@virtual
async def test_without_dead_letters_nothing_is_ever_acknowledged(arrival, spec, answer):
    async with Bench(rule(**spec), sink=ScriptedSink(otherwise=answer), dead=None) as bench:
        for _ in range(3):
            outcome = await bench.one(arrival)
            assert (outcome.verdict, outcome.acknowledge) == (FAILED, False)
            assert outcome.reason == "dead letters: none are configured"
            assert outcome.retry_after_ms > 0
            await asyncio.sleep(outcome.retry_after_ms / 1000)


@virtual
async def test_without_dead_letters_an_event_is_tried_for_ever():
    sink = ScriptedSink(*[Unknown("500")] * 20)
    async with Bench(sink=sink, dead=None, settings=Settings(max_attempts=3)) as bench:
        assert (await bench.until_acknowledged(event())).verdict is DELIVERED
        assert len(sink.seen) == 21


@virtual
async def test_without_dead_letters_a_conflict_that_should_go_there_is_handed_back():
    async with Bench(rule(key="id", on_conflict="dead"), dead=None) as bench:
        await bench.one(event({"n": 1}))
        outcome = await bench.one(event({"n": 2}))
        assert (outcome.verdict, outcome.acknowledge) == (FAILED, False)
        assert bench.sink.raws == [event({"n": 1})]


# --- books, hooks and settings --------------------------------------------------------------


@virtual
async def test_every_arrival_is_counted_once():
    async with Bench(rule(**LATEST)) as bench:
        await bench.process(state(2), state(2), b"x", state(1), state(2, "b", id="E/2/a"))
        counts = bench.books.counts()
        assert counts["arrived"] == 5
        assert counts["in_flight"] == 0
        assert sum(counts[verdict.value] for verdict in Verdict) == 5
        assert counts["forwarded"] == len(bench.sink.taken)


@virtual
async def test_the_books_balance_while_events_are_under_way():
    async with Bench(sink=ScriptedSink(After(1, Yes()))) as bench:
        task = asyncio.create_task(bench.process(event(), event(), b"x"))
        await asyncio.sleep(0.5)
        assert bench.books.in_flight == 2
        assert bench.books.balance
        await task
        assert bench.books.in_flight == 0


@virtual
async def test_two_calls_at_once_for_one_event():
    async with Bench(sink=ScriptedSink(After(1, Yes()))) as bench:
        first, second = await asyncio.gather(bench.one(event()), bench.one(event()))
        assert (first.verdict, second.verdict) == (DELIVERED, Verdict.BUSY)
        assert (first.acknowledge, second.acknowledge) == (True, False)
        assert second.retry_after_ms > 0


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        (Settings(lease=timedelta(seconds=15)), "lease"),
        (Settings(sink_timeout=timedelta(seconds=60)), "lease"),
        (Settings(max_attempts=0), "max_attempts"),
    ],
)
def test_settings_that_cannot_keep_the_promise_are_refused(settings, where):
    with pytest.raises(ConfigError) as caught:
        Gateway(store=MemoryStore(), sink=lambda _: None, settings=settings)
    assert caught.value.where == where


def test_the_shortest_lease_that_will_do():
    settings = Settings(lease=timedelta(seconds=16))
    settings.check()
    with pytest.raises(ConfigError, match="15999ms is too short"):
        Settings(lease=timedelta(milliseconds=15_999)).check()


def test_two_rules_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two rules are named 'x'"):
        Gateway(store=MemoryStore(), sink=print, rules=[rule(name="x"), rule(name="x")])


@virtual
async def test_bare_details_are_events_where_the_settings_say_so():
    async with Bench(settings=Settings(bare=True)) as bench:
        assert await each(bench, b'{"a":1}', b'{"a": 1}', b'{"a":2}') == [
            DELIVERED,
            DUPLICATE,
            DELIVERED,
        ]
    async with Bench() as bench:
        assert await each(bench, b'{"a":1}') == [DEAD]


@virtual
async def test_a_large_batch_of_one_entity_is_planned_in_reasonable_time(monkeypatch):
    looked_up = 0
    identity = ordering._identity

    def counted(part):
        nonlocal looked_up
        looked_up += 1
        return identity(part)

    monkeypatch.setattr(ordering, "_identity", counted)
    async with Bench(rule(**LATEST)) as bench:
        arrivals = [state(n) for n in range(300)]
        assert set(verdicts(await bench.process(*arrivals))) == {DELIVERED}
    assert len(arrivals) <= looked_up <= 10 * len(arrivals)


@virtual
async def test_a_large_batch_of_repeats_is_folded_in_reasonable_time():
    async with Bench() as bench:
        outcomes = await bench.process(*[event()] * 5000)
        assert verdicts(outcomes) == [DELIVERED] + [DUPLICATE] * 4999
        assert len(bench.store.asked["claim"]) == 1


async def test_a_repeat_in_the_batch_is_judged_by_its_own_keys_where_the_first_was_known_by_another():
    clock = ManualClock()
    tiers = rule(tiers=[{"key": "id", "window": "1h"}, {"key": "content", "window": "1m"}])
    store, sent = MemoryStore(clock=clock), []
    gateway = Gateway(store=store, sink=sent.append, rules=[tiers], clock=clock)
    old = event({"n": 1}, id="old")
    assert verdicts(await gateway.process([old])) == [DELIVERED]
    clock.advance(120_000)  # the content is forgotten, the id is not
    again = await gateway.process([old, event({"n": 1}, id="new")])
    assert verdicts(again) == [DUPLICATE, DELIVERED]
    assert [one.id for one in sent] == ["old", "new"]
    await gateway.aclose()
