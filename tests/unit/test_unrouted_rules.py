"""Rules of the file apply to events that no route is for, in the service and in what explains it."""

import json

import pytest
from tests.cli.worlds import event, raw, setup_of

from oncebridge import Verdict
from oncebridge.check import cases
from oncebridge.events.framing import RawRecord
from oncebridge.operate.explain.explainer import explain
from oncebridge.operate.explain.words import summary
from oncebridge.service.routes import make_router
from oncebridge.stores.memory import MemoryStore

CONFIGURATION = """
[[rules]]
name = "wanted"
match = { detail-type = ["Noise"], detail = { order = [1] } }

[[rules]]
name = "noise"
match = { detail-type = ["Noise"] }
discard = true

[[routes]]
name = "crm"
sink = "python:json:dumps"
match = { source = ["com.example.crm"] }

[[routes.rules]]
name = "own"
match = { detail-type = ["Private"] }
discard = true

[[routes]]
name = "lake"
sink = "python:json:dumps"
match = { source = ["com.example.lake"] }
"""
EVENTS = {
    "noise": event(7, **{"detail-type": "Noise"}),
    "earlier rule": event(1, **{"detail-type": "Noise"}),
    "no rule": event(7),
    "rule of a route": event(7, **{"detail-type": "Private"}),
}
DROPPED, KEPT = (Verdict.DISCARDED, "noise"), (Verdict.DEAD, "")
EXPECTED = {
    "noise": DROPPED,
    "earlier rule": KEPT,
    "no rule": KEPT,
    "rule of a route": KEPT,
}


async def test_a_rule_of_the_file_discards_what_no_route_is_for(tmp_path):
    setup = setup_of(tmp_path, CONFIGURATION)
    told = []
    router = make_router(setup, hooks=[told.extend])
    answers = await router.process([raw(one) for one in EVENTS.values()])
    assert [answer.acknowledge for answer in answers] == [True] * 4
    assert [answer.verdict for answer in answers] == [verdict for verdict, _ in EXPECTED.values()]
    decided = {(one.event.raw, one.route, one.outcome.verdict, one.outcome.rule) for one in told}
    assert decided == {
        (raw(EVENTS[name]), "unrouted", verdict, rule) for name, (verdict, rule) in EXPECTED.items()
    }
    assert router.unrouted.verdicts[Verdict.DISCARDED] == 1
    assert router.unrouted.verdicts[Verdict.DEAD] == 3
    assert router.unrouted.balance
    letters = await setup.config.dead.opened.list()
    assert {letter.raw for letter in letters} == {
        raw(EVENTS[name]) for name, expected in EXPECTED.items() if expected == KEPT
    }


async def test_what_is_discarded_does_not_wait_for_the_dead_letters(tmp_path):
    setup = setup_of(tmp_path, f'dead = "sqlite:{tmp_path}/none/dead.db"\n{CONFIGURATION}')
    router = make_router(setup)
    noise, lost = await router.process([raw(EVENTS["noise"]), raw(EVENTS["no rule"])])
    assert (noise.acknowledge, noise.verdict) == (True, Verdict.DISCARDED)
    assert (lost.acknowledge, lost.verdict) == (False, Verdict.FAILED)
    assert router.unrouted.balance


async def test_a_sender_that_is_not_allowed_is_discarded_on_no_route_too(tmp_path):
    allow = '[allow]\nsources = ["com.example.crm"]\notherwise = "discard"\n'
    setup = setup_of(tmp_path, allow + CONFIGURATION)
    (answer,) = await make_router(setup).process([raw(EVENTS["no rule"])])
    assert answer.verdict is Verdict.DISCARDED
    (told,) = await explained(setup, EVENTS["no rule"])
    assert (told.judged.verdict, told.rule) == (Verdict.DISCARDED, "allow")


async def explained(setup, *events):
    records = [RawRecord(raw(one), at, at, at) for at, one in enumerate(events, 1)]
    return [told async for told in explain(records, setup, MemoryStore())]


async def test_an_explanation_says_the_same(tmp_path):
    told = await explained(setup_of(tmp_path, CONFIGURATION), *EVENTS.values())
    found = [(one.judged.verdict, one.rule or "") for one in told]
    assert found == list(EXPECTED.values())
    assert [one.route for one in told] == [None] * 4
    assert told[0].why == "no route matches it, and the rule says to discard it"
    assert summary(told[0]) == "No route matches this event: it is dropped by rule noise."
    assert summary(told[1]) == "No route matches this event: it goes to the dead letters."


@pytest.mark.parametrize("route", ["crm", "lake"])
async def test_a_test_of_rules_says_the_same(tmp_path, route):
    setup = setup_of(tmp_path, CONFIGURATION)
    for name, one in EVENTS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(one))

    async def failures(test):
        text = f'route = "{route}"\n[[test]]\nname = "it"\n{test}'
        (tmp_path / "cases.toml").write_text(text)
        (result,) = await cases.run(cases.load([tmp_path / "cases.toml"], setup), setup)
        return list(result.failures)

    noise = 'events = ["noise.json"]\n'
    assert await failures(noise + 'verdicts = ["discarded"]\nrule = "noise"') == []
    assert await failures(noise + 'verdicts = ["delivered"]') == [
        "event 1, noise.json, is discarded; expected delivered"
    ]
    for name in ("earlier rule", "no rule", "rule of a route"):
        test = f'events = ["{name}.json"]\nverdicts = ["discarded"]'
        assert await failures(test) == [f"route {route!r} does not match {name}.json"]
    other = "lake" if route == "crm" else "crm"
    elsewhere = event(7, source=f"com.example.{other}", **{"detail-type": "Noise"})
    (tmp_path / "elsewhere.json").write_text(json.dumps(elsewhere))
    assert await failures('events = ["elsewhere.json"]\nverdicts = ["discarded"]') == [
        f"route {route!r} does not match elsewhere.json"
    ]
