"""Users' rules against their own samples: what passes, what fails and why, what is a mistake."""

import json
import shutil
from pathlib import Path

import pytest
from tests.cli.worlds import event, setup_of

from oncebridge import Gateway, Verdict
from oncebridge.check import cases
from oncebridge.errors import ConfigErrors
from oncebridge.genesys.preset import genesys_rules
from oncebridge.stores.memory import MemoryStore

EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPES = sorted((EXAMPLES / "shapes" / "samples").glob("*.ndjson"))

RULES = """
[[rules]]
name = "orders"
match = { source = ["com.example.shop"] }
tiers = [{ key = "id", window = "5m" }, { key = "content", ignore = ["detail.sentAt"] }]

[[rules]]
name = "calls"
match = { source = ["com.example.calls"] }
key = ["detail.call", "detail.status"]

[[rules]]
name = "ticks"
match = { source = ["com.example.clock"] }
key = "none"
"""


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    def put(name: str, *events: dict | str) -> None:
        lines = [one if isinstance(one, str) else json.dumps(one) for one in events]
        (tmp_path / name).write_text("\n".join(lines))

    put("order.json", event(1))
    put("resent.json", event(1, id="a2") | {"detail": {"order": 1, "sentAt": "later"}})
    put("other.json", event(2, id="b1"))
    put("clash.json", event(2, id="a1"))
    put("elsewhere.json", event(1, id="e1", source="com.example.calls"))
    put("broken.json", "{")
    put("empty.json", "")
    put("tick.json", event(1, source="com.example.clock"))
    calls = [{"call": "c", "status": status} for status in ("ringing", "answered", "ringing")]
    put("calls.ndjson", *[event(source="com.example.calls") | {"detail": one} for one in calls])
    return tmp_path


async def failures(samples: Path, test: str, rules: str = RULES) -> list[str]:
    setup = setup_of(samples, rules)
    (samples / "cases.toml").write_text(f'[[test]]\nname = "it"\n{test}')
    (result,) = await cases.run(cases.load([samples / "cases.toml"], setup), setup)
    return list(result.failures)


def mistakes(samples: Path, text: str, rules: str = RULES) -> list[str]:
    (samples / "cases.toml").write_text(text)
    with pytest.raises(ConfigErrors) as found:
        cases.load([samples / "cases.toml"], setup_of(samples, rules))
    return [str(problem) for problem in found.value.problems]


@pytest.mark.parametrize(
    "test",
    [
        'same = ["order.json", "resent.json"]\nrule = "orders"',
        'same = ["calls.ndjson#1", "calls.ndjson#3"]',
        'apart = ["order.json", "other.json", "elsewhere.json"]',
        'apart = ["order.json", "clash.json"]',
        'apart = ["tick.json", "tick.json"]',
        'events = ["tick.json"]\nrule = "ticks"',
        (
            'events = ["order.json", "resent.json", "clash.json", "tick.json", "broken.json"]\n'
            'verdicts = ["delivered", "duplicate", "conflict", "bypassed", "dead"]'
        ),
        'events = ["order.json", "order.json"]\ngap = "7d"\nverdicts = ["delivered", "delivered"]',
        'events = ["calls.ndjson"]\nverdicts = ["delivered", "delivered", "duplicate"]',
    ],
)
async def test_a_test_that_is_right_passes(samples, test):
    assert await failures(samples, test) == []


@pytest.mark.parametrize(
    ("test", "parts"),
    [
        (
            'same = ["order.json", "other.json"]',
            ["order.json and other.json are different events", "their ids differ", "detail.order"],
        ),
        ('same = ["order.json", "clash.json"]', ["the same id with other content is a conflict"]),
        ('same = ["order.json", "elsewhere.json"]', ["different rules, 'orders' and 'calls'"]),
        ('same = ["calls.ndjson"]', ["calls.ndjson#1 and calls.ndjson#2", "in detail.status"]),
        ('same = ["calls.ndjson#1", "elsewhere.json"]', ["its fields, the other by its content"]),
        ('same = ["tick.json", "tick.json"]', ["rule 'ticks' does not deduplicate"]),
        ('same = ["order.json", "broken.json"]', ["broken.json is not an event: not-json"]),
        (
            'apart = ["order.json", "other.json", "resent.json"]',
            ["order.json and resent.json are the same event by their content", "id, detail.sentAt"],
        ),
        ('apart = ["order.json", "order.json"]', ["they are equal"]),
        ('events = ["order.json"]\nrule = "calls"', ["matches rule 'orders', not 'calls'"]),
        (
            'events = ["order.json", "resent.json"]\nverdicts = ["delivered", "stale"]',
            ["event 2, resent.json, is duplicate; expected stale"],
        ),
    ],
)
async def test_a_test_that_fails_says_why(samples, test, parts):
    told = "\n".join(await failures(samples, test))
    for part in parts:
        assert part in told


async def test_decimals_that_a_double_would_round_are_told_apart(samples):
    line = '{"source":"com.example.elsewhere","detail":{"price":%s}}'
    prices = ("1.000000000000000001", "1.000000000000000002")
    (samples / "prices.ndjson").write_text("\n".join(line % price for price in prices))
    assert await failures(samples, 'apart = ["prices.ndjson"]') == []
    (told,) = await failures(samples, 'same = ["prices.ndjson"]')
    assert "their content differs in detail.price" in told


async def test_samples_are_the_same_through_another_one(samples):
    """The second has the content of the first and the id of the third; the gateway agrees."""
    rules = """
        [[rules]]
        name = "two"
        tiers = [{ key = "id", check = false }, { key = "content" }]
    """
    (samples / "second.json").write_text(json.dumps(event(1, id="z9")))
    (samples / "third.json").write_text(json.dumps(event(2, id="z9")))
    chain = '["order.json", "second.json", "third.json"]'
    assert await failures(samples, f"same = {chain}", rules) == []
    verdicts = 'verdicts = ["delivered", "duplicate", "duplicate"]'
    assert await failures(samples, f"events = {chain}\n{verdicts}", rules) == []
    (told,) = await failures(samples, 'same = ["order.json", "third.json"]', rules)
    assert "their ids differ; their content differs in detail.order" in told


async def test_a_conflict_names_only_what_counts(samples):
    rules = """
        [[rules]]
        name = "r"
        key = ["detail.order"]
        check = true
        ignore = ["detail.sentAt"]
    """
    details = [{"order": 1, "n": n, "sentAt": n} for n in (1, 2)]
    for name, detail in zip(("one.json", "two.json"), details, strict=True):
        (samples / name).write_text(json.dumps(event(1) | {"detail": detail}))
    (told,) = await failures(samples, 'same = ["one.json", "two.json"]', rules)
    assert "the same fields with other content is a conflict (detail.n)" in told


async def test_replays_that_are_kept_apart_say_so(samples):
    rules = '[[rules]]\nname = "r"\non_replay = "separate"'
    (samples / "replay.json").write_text(json.dumps(event(1, **{"replay-name": "x"})))
    (told,) = await failures(samples, 'same = ["order.json", "replay.json"]', rules)
    assert "one of them is a replay" in told


ROUTES = """
[[routes]]
name = "crm"
sink = "python:json:dumps"
match = { source = ["com.example.shop"] }
[[routes]]
name = "lake"
sink = "python:json:dumps"
"""


async def test_a_test_is_for_one_route(samples):
    same = 'same = ["order.json", "order.json"]'
    assert await failures(samples, f'route = "crm"\n{same}', ROUTES) == []
    (told,) = await failures(
        samples, 'route = "crm"\nevents = ["tick.json"]\nrule = "default"', ROUTES
    )
    assert told == "route 'crm' does not match tick.json"
    text = f'[[test]]\nname = "a"\n{same}'
    assert mistakes(samples, text, ROUTES) == [
        "test[0].route: is missing; set it to one of crm, lake"
    ]
    setup = setup_of(samples, ROUTES)
    (samples / "cases.toml").write_text(f'route = "lake"\n{text}')
    (case,) = cases.load([samples / "cases.toml"], setup)
    assert case.route.name == "lake"


def test_all_mistakes_are_told_at_once(samples):
    text = """
        [[test]]
        name = "one"
        same = ["order.json"]
        [[test]]
        nam = "two"
        [[test]]
        name = "three"
        events = ["nowhere.json", "calls.ndjson#4", "empty.json", "calls.ndjson#x"]
        rule = "order"
        [[test]]
        name = "four"
        verdicts = ["delivered"]
        [[test]]
        name = "five"
        events = ["order.json"]
        verdicts = ["delivered", "dropped"]
        [[test]]
        name = "six"
        events = ["calls.ndjson"]
        verdicts = ["delivered"]
        route = "crm"
        [[test]]
        name = "seven"
        events = ["order.json"]
        gap = "1d"
    """
    told = mistakes(samples, text)
    for part in [
        "test[0].same: needs at least two events",
        "test[1].nam: no such setting; did you mean 'name'?",
        "test[2].events[0]: 'nowhere.json' cannot be read: No such file",
        "test[2].events[1]: 'calls.ndjson#4': calls.ndjson has events #1 to #3",
        "test[2].events[2]: 'empty.json' contains no event",
        "test[2].events[3]: 'calls.ndjson#x': calls.ndjson has events #1 to #3",
        "test[2].rule: 'order' is not a rule of the configuration; did you mean 'orders'?",
        "test[3]: names no sample",
        "test[3].verdicts: needs events",
        "test[4].verdicts[1]: 'dropped': must be one of",
        "test[5].verdicts: has 1 for 3 events",
        "test[5].route: 'crm' is not a route",
        "test[6].events: needs verdicts",
        "test[6].gap: needs verdicts",
    ]:
        assert any(part in line for line in told), part


def test_a_file_that_is_no_file_of_cases_is_a_mistake(samples):
    assert "is not TOML" in mistakes(samples, "[[")[0]
    assert "test: is missing" in mistakes(samples, "")[0]
    with pytest.raises(ConfigErrors) as found:
        cases.load([samples / "no.toml", samples / "neither.toml"], setup_of(samples))
    assert len(found.value.problems) == 2


@pytest.mark.parametrize(("name", "tests"), [("rules", 7), ("shapes", 13), ("returns", 2)])
def test_an_example_passes_as_it_is_shown(run, tmp_path, name, tests):
    shutil.copytree(EXAMPLES / name, tmp_path / "examples" / name)
    shown = f"test examples/{name}/cases.toml -c examples/{name}/oncebridge.toml"
    assert f"oncebridge {shown}\n" in (EXAMPLES / name / "oncebridge.toml").read_text()
    ran = run(*shown.split())
    assert ran.out.splitlines()[-1] == f"{tests} tests, 0 failed"
    assert [path.name for path in tmp_path.iterdir()] == ["examples"]


def test_every_example_is_tested():
    assert sorted(path.name for path in EXAMPLES.iterdir()) == ["returns", "rules", "shapes"]


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
async def test_any_shape_passes_once_without_a_rule_of_its_own(path):
    raws = path.read_bytes().splitlines()
    details = {json.dumps(json.loads(raw)["detail"]) for raw in raws}
    sent = []
    async with Gateway(store=MemoryStore(), sink=sent.append, rules=genesys_rules()) as gateway:
        outcomes = [(await gateway.process([raw]))[0] for raw in raws + raws]
    assert len(sent) == len(details)
    assert {outcome.rule for outcome in outcomes} == {"default"}
    assert {outcome.verdict for outcome in outcomes[len(raws) :]} == {Verdict.DUPLICATE}


def test_a_failure_ends_with_1_and_never_shows_an_event(call, write):
    write("a.json", event("secret-a"))
    write("b.json", event("secret-b"))
    write("cases.toml", '[[test]]\nname = "a is b"\nsame = ["a.json", "b.json"]')
    ran = call("test", "cases.toml", code=1)
    assert "failed  a is b" in ran.out
    assert "1 test, 1 failed" in ran.out
    (told,) = call("test", "cases.toml", "--json", code=1).objects()
    assert (told["name"], told["passed"], len(told["failures"])) == ("a is b", False, 1)
    assert "secret" not in ran.out + ran.err
    assert "cannot be read" in call("test", "no.toml", code=2).err
