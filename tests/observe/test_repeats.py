"""Why an arrival came again, as it is told while events pass."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from tests.faults.doubles import ScriptedSink, now_ms, virtual
from tests.observe.arrivals import together

from oncebridge import Gateway
from oncebridge.engine.causes import Cause
from oncebridge.engine.hooks import Decision, Decisions
from oncebridge.engine.verdict import First, Outcome, Verdict
from oncebridge.events.event import Unreadable, parse
from oncebridge.events.rules import Rule
from oncebridge.genesys.preset import genesys_rules
from oncebridge.genesys.simulator import Label, simulate
from oncebridge.observe import duplicate_causes
from oncebridge.observe.duplicate_causes import DuplicateCauses
from oncebridge.stores.memory import MemoryStore

ENVELOPE = {
    "id": "i1",
    "detail-type": "Order",
    "source": "shop",
    "account": "123456789012",
    "region": "us-east-1",
}


def decision(
    verdict: Verdict = Verdict.DELIVERED,
    *,
    key: bytes = b"key",
    first: First | None = None,
    rule: str = "default",
    **envelope: Any,
) -> Decision:
    whole: Mapping[str, Any] = ENVELOPE | {n.replace("_", "-"): v for n, v in envelope.items()}
    written = {name: value for name, value in whole.items() if value is not None}
    event = parse(json.dumps(written | {"detail": {"n": 1}}).encode())
    return Decision("crm", event, Outcome(verdict, True, rule, key, first=first))


def again(**envelope: Any) -> Decision:
    return decision(Verdict.DUPLICATE, **envelope)


def cause_of(known: DuplicateCauses, one: Decision) -> Cause | None:
    (cause,) = known.causes_of(together(one))
    return cause


# --- repeats --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, Cause.REDELIVERY),
        ({"id": "i2"}, Cause.RE_EMISSION),
        ({"id": "i2", "source": "shop-2"}, Cause.SECOND_INTEGRATION),
        ({"id": "i2", "region": "us-west-2"}, Cause.SECOND_BUS),
        ({"id": "i2", "account": "210987654321"}, Cause.SECOND_BUS),
        ({"replay_name": "r"}, Cause.REPLAY),
        ({"id": None}, Cause.UNKNOWN),
        ({"id": "i2", "account": None, "region": None}, Cause.RE_EMISSION),
    ],
)
def test_a_repeat_is_compared_with_the_first_one(changes, cause):
    known = DuplicateCauses()
    assert cause_of(known, decision()) is None
    for first in (None, First("i1", 5)):
        assert cause_of(known, again(first=first, **changes)) is cause


def test_each_key_has_a_first_one_of_its_own():
    known = DuplicateCauses()
    cause_of(known, decision(key=b"a"))
    cause_of(known, decision(key=b"b", id="i2", source="shop-2", account=None, region=None))
    assert cause_of(known, again(key=b"a", id="i3")) is Cause.RE_EMISSION
    assert cause_of(known, again(key=b"b", id="i3")) is Cause.SECOND_INTEGRATION
    assert cause_of(known, again(key=b"b", id="i2")) is Cause.REDELIVERY


@pytest.mark.parametrize(
    ("first", "cause"),
    [
        (First("i1", 5), Cause.REDELIVERY),
        (First("other", 5), Cause.RE_EMISSION),
        (First(None, 5), Cause.UNKNOWN),
        (None, Cause.UNKNOWN),
    ],
)
def test_where_another_worker_had_the_first_one_its_id_tells(first, cause):
    assert cause_of(DuplicateCauses(), again(first=first)) is cause


def test_what_the_store_says_counts_for_more_than_what_was_seen_here():
    known = DuplicateCauses()
    cause_of(known, decision(id="long ago", source="shop-2"))
    assert cause_of(known, again(id="i2", first=First("i1", 5))) is Cause.RE_EMISSION


def test_long_ids_are_compared_as_they_are_remembered():
    known, long = DuplicateCauses(), "i" * 200
    assert cause_of(known, again(id=long, first=First("i" * 128, 5))) is Cause.REDELIVERY
    cause_of(known, decision(id=long))
    assert cause_of(known, again(id=long, first=First("i" * 128, 5))) is Cause.REDELIVERY


# --- what is no repeat ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdict", "cause"),
    [
        (Verdict.STALE, Cause.OUT_OF_ORDER),
        (Verdict.UNCHANGED, Cause.DOUBLE_EMISSION),
        (Verdict.BUSY, None),
        (Verdict.FAILED, None),
        (Verdict.DEAD, None),
        (Verdict.BYPASSED, None),
        (Verdict.DISCARDED, None),
    ],
)
def test_other_verdicts_say_it_all(verdict, cause):
    assert cause_of(DuplicateCauses(), decision(verdict)) is cause


def test_what_is_no_event_has_no_cause():
    unreadable = Decision("crm", Unreadable(b"x", "not-json", "no"), Outcome(Verdict.DEAD, True))
    assert cause_of(DuplicateCauses(), unreadable) is None


@pytest.mark.parametrize(
    ("spec", "cause"),
    [
        ({"key": "id", "check": True}, Cause.ID_REUSED),
        ({"key": ["detail.n"], "check": True}, None),
        ({"key": "content"}, None),
    ],
)
def test_a_conflict_is_an_id_that_was_used_again_where_the_rule_goes_by_it(spec, cause):
    rule = Rule.parse({"name": "orders"} | spec)
    known = DuplicateCauses({"crm": [rule]})
    assert cause_of(known, decision(Verdict.CONFLICT, rule="orders")) is cause
    assert cause_of(known, decision(Verdict.CONFLICT, rule="others")) is None


def test_a_conflict_may_come_again_as_what_it_is():
    known = DuplicateCauses()
    cause_of(known, decision(Verdict.CONFLICT, key=b"k2", id="i2"))
    assert cause_of(known, again(key=b"k2", id="i2")) is Cause.REDELIVERY


# --- a day of a contact centre ----------------------------------------------------------------

TRUTH = {
    Label.REDELIVERY: Cause.REDELIVERY,
    Label.REORDERED: Cause.REDELIVERY,
    Label.RE_EMISSION: Cause.RE_EMISSION,
    Label.SECOND_INTEGRATION: Cause.SECOND_INTEGRATION,
    Label.REPLAY: Cause.REPLAY,
}


@virtual
async def test_every_repeat_of_a_simulated_day_is_told_its_cause():
    known, causes = DuplicateCauses(), []

    def follow(decisions: Decisions) -> None:
        raws = [event.raw for event in decisions.events]
        causes.extend(zip(raws, known.causes_of(decisions), strict=True))

    gateway = Gateway(
        store=MemoryStore(clock=now_ms),
        sink=ScriptedSink(batch=50),
        rules=genesys_rules(),
        hooks=[follow],
        clock=now_ms,
    )
    day = list(simulate(7, 1500))
    for at in range(0, len(day), 50):
        await gateway.process([arrival.raw for arrival in day[at : at + 50]])
    await gateway.aclose()
    told = Counter((raw, cause) for raw, cause in causes)
    assert told == Counter((arrival.raw, TRUTH.get(arrival.label)) for arrival in day)
    assert {cause for _, cause in told} == {None, *TRUTH.values()}


# --- bounds ---------------------------------------------------------------------------------


def test_the_latest_are_remembered_and_no_more(monkeypatch):
    monkeypatch.setattr(duplicate_causes, "_HALF", 100)
    known = DuplicateCauses()
    for number in range(1000):
        cause_of(known, decision(key=b"%d" % number, source=f"s{number}", id=str(number)))
        assert len(known._firsts) + len(known._older) <= 200
    for number in range(900, 1000):
        assert cause_of(known, again(key=b"%d" % number, id="x")) is Cause.SECOND_INTEGRATION
    assert cause_of(known, again(key=b"5", id="x", source="s5")) is Cause.UNKNOWN


def test_who_is_asked_about_stays(monkeypatch):
    monkeypatch.setattr(duplicate_causes, "_HALF", 10)
    known = DuplicateCauses()
    cause_of(known, decision(key=b"asked", source="shop-2"))
    for number in range(100):
        cause_of(known, decision(key=b"%d" % number))
        if number % 5 == 0:
            assert cause_of(known, again(key=b"asked", id="x")) is Cause.SECOND_INTEGRATION
        assert len(known._firsts) + len(known._older) <= 21


@pytest.mark.parametrize("name", ["id", "source", "account", "region", "replay_name"])
def test_mischief_is_not_kept(name):
    known = DuplicateCauses()
    for number in range(100):
        cause_of(known, decision(key=b"%d" % number, **{name: f"{number}" + "x" * 100_000}))
    assert known._firsts == {}
    assert all(len("".join(filter(None, way))) < 1000 for way in known._origins.values())


def test_ways_are_bounded_whoever_invents_them():
    known = DuplicateCauses()
    for number in range(3 * duplicate_causes._MOST_ORIGINS):
        cause_of(known, decision(key=b"%d" % number, source=f"s{number}"))
    assert len(known._origins) <= duplicate_causes._MOST_ORIGINS
