"""Who is let in, and that nobody else gets anywhere."""

import json
import logging

import pytest
from tests.aws.functions import Context

from oncebridge import ConfigError, Gateway, Rule, Settings, Verdict
from oncebridge.aws import lambda_handler
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.errors import ConfigErrors
from oncebridge.events.access import AllowOptions, SenderAllowlist
from oncebridge.events.event import from_object, parse
from oncebridge.events.framing import RawRecord
from oncebridge.events.rules import RuleSet
from oncebridge.genesys.preset import genesys_rules
from oncebridge.operate.explain.explainer import explain
from oncebridge.operate.identity import Identities
from oncebridge.service.config import load
from oncebridge.service.routes import make_router
from oncebridge.stores.memory import MemoryStore

SOURCE = "aws.partner/genesys.com/cloud/org-1/prod"
ENVELOPE = {
    "id": "e1",
    "detail-type": "Order",
    "source": SOURCE,
    "account": "123456789012",
    "region": "eu-central-1",
}
ALL = AllowOptions(
    sources=("com.example.shop", "aws.partner/genesys.com/*"),
    accounts=("123456789012", "210987654321"),
    regions=("eu-central-1",),
)


def event(detail=None, **envelope):
    whole = {**ENVELOPE, **envelope, "detail": detail or {"n": 1}}
    return {name: value for name, value in whole.items() if value is not ...}


def raw(*args, **envelope):
    return json.dumps(event(*args, **envelope)).encode()


def guarded(options=ALL, *rules):
    return [Rule.for_refused_senders(SenderAllowlist(options)), *rules]


class Watched(MemoryStore):
    """A store that counts what it is asked."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    async def claim(self, wants):
        self.asked += len(wants)
        return await super().claim(wants)


STRANGERS = [
    ({"source": "com.example.shops"}, "the source 'com.example.shops' is not among allow.sources"),
    ({"source": "aws.partner/genesys.co"}, "the source 'aws.partner/genesys.co' is not among"),
    ({"source": ...}, "it names no source, and allow.sources is set"),
    ({"source": ""}, "it names no source"),
    ({"source": None}, "it names no source"),
    ({"source": ["com.example.shop"]}, "it names no source"),
    ({"account": "123456789013"}, "the account '123456789013' is not among allow.accounts"),
    ({"account": ...}, "it names no account, and allow.accounts is set"),
    ({"account": 123456789012}, "it names no account"),
    ({"region": "eu-central-2"}, "the region 'eu-central-2' is not among allow.regions"),
    ({"region": ...}, "it names no region, and allow.regions is set"),
    ({"region": None}, "it names no region"),
]


@pytest.mark.parametrize(("envelope", "why"), STRANGERS)
async def test_a_stranger_is_kept_in_the_dead_letters_and_takes_no_key_of_an_event(envelope, why):
    store, sent, dead = Watched(), [], MemoryDeadLetters()
    gateway = Gateway(store=store, sink=sent.append, rules=guarded(), dead=dead)
    async with gateway:
        (outcome,) = await gateway.process([raw(**envelope)])
        (letter,) = await dead.list(after=0, limit=9)
    assert outcome.verdict is Verdict.DEAD
    assert outcome.acknowledge
    assert why in outcome.reason
    assert (letter.raw, letter.rule) == (raw(**envelope), "allow")
    assert letter.key != RuleSet((), namespace="default").plan(parse(letter.raw)).key
    assert letter.reason == "not-allowed"
    assert letter.message.startswith(why)
    assert sent == []


@pytest.mark.parametrize(
    "envelope",
    [
        {},
        {"source": "com.example.shop"},
        {"source": "aws.partner/genesys.com/"},
        {"account": "210987654321"},
    ],
)
async def test_who_is_on_every_list_is_let_in(envelope):
    sent = []
    async with Gateway(store=MemoryStore(), sink=sent.append, rules=guarded()) as gateway:
        first, again = await gateway.process([raw(**envelope)] * 2)
    assert (first.verdict, again.verdict) == (Verdict.DELIVERED, Verdict.DUPLICATE)
    assert len(sent) == 1


@pytest.mark.parametrize(("envelope", "why"), STRANGERS)
async def test_a_stranger_may_be_dropped_instead(envelope, why):
    options = AllowOptions(
        sources=ALL.sources, accounts=ALL.accounts, regions=ALL.regions, otherwise="discard"
    )
    store, sent, dead = Watched(), [], MemoryDeadLetters()
    async with Gateway(store=store, sink=sent.append, rules=guarded(options), dead=dead) as gateway:
        (outcome,) = await gateway.process([raw(**envelope)])
        letters = await dead.list(after=0, limit=9)
    assert (outcome.verdict, outcome.acknowledge) == (Verdict.DISCARDED, True)
    assert (letters, sent, store.asked) == ([], [], 0)
    plan = RuleSet(guarded(options), namespace="r").plan(parse(raw(**envelope)))
    assert plan.message.startswith(why)


@pytest.mark.parametrize("otherwise", ["dead", "discard"])
async def test_no_stranger_gets_through_in_shadow_mode(otherwise):
    options = AllowOptions(regions=("eu-central-1",), otherwise=otherwise)
    store, sent = Watched(), []
    async with Gateway(
        store=store,
        sink=lambda e: sent.append(e.region),
        rules=guarded(options),
        dead=MemoryDeadLetters(),
        settings=Settings(mode="shadow"),
    ) as gateway:
        known, stranger = await gateway.process([raw(), raw(region="us-east-1")])
    assert known.verdict is Verdict.DELIVERED
    assert stranger.verdict is {"dead": Verdict.DEAD, "discard": Verdict.DISCARDED}[otherwise]
    assert sent == ["eu-central-1"]


async def test_strangers_among_others_keep_nobody_from_passing():
    sent, dead = [], MemoryDeadLetters()
    arrivals = [raw({"n": n}, region=region) for n in range(6) for region in ("eu-central-1", "x")]
    async with Gateway(
        store=MemoryStore(), sink=lambda e: sent.append(e.detail["n"]), rules=guarded(), dead=dead
    ) as gateway:
        outcomes = await gateway.process(arrivals)
    assert [outcome.verdict for outcome in outcomes] == [Verdict.DELIVERED, Verdict.DEAD] * 6
    assert sorted(sent) == list(range(6))


async def test_an_event_without_an_envelope_comes_from_nowhere():
    options = AllowOptions(sources=("*",))
    bare = parse(b'{"n": 1}', bare=True)
    plan = RuleSet(guarded(options), namespace="r").plan(bare)
    assert (plan.action, plan.message) == ("dead", "it names no source, and allow.sources is set")
    known = RuleSet(guarded(options), namespace="r").plan(from_object(event()))
    assert known.action == "deduplicate"


def test_a_genesys_detail_without_its_envelope_is_let_in_by_no_list():
    text = b'{"topicName":"v2.users.u.presence","eventBody":{"n":1},"timestamp":"t"}'
    bare = parse(text, bare=True)
    for options in (ALL, AllowOptions(sources=("*",)), AllowOptions(regions=("eu-central-1",))):
        plan = RuleSet(guarded(options, *genesys_rules()), namespace="r").plan(bare)
        assert (plan.action, plan.refused, plan.parts) == ("dead", True, ())
        assert "it names no" in plan.message
    assert RuleSet(genesys_rules(), namespace="r").plan(bare).rule.name == "genesys snapshots"


def test_guards_come_before_every_rule_wherever_they_stand():
    rules = [Rule(name="none", tiers=()), *guarded(), Rule(name="allow")]
    plan = RuleSet(rules, namespace="r").plan(from_object(event(region="x")))
    assert (plan.rule.name, plan.action, plan.refused) == ("allow", "dead", True)
    known = RuleSet(rules, namespace="r").plan(from_object(event()))
    assert (known.rule.name, known.action, known.refused) == ("none", "bypass", False)


def test_who_is_let_in_has_the_keys_it_had():
    one = from_object(event())
    assert RuleSet(guarded(), namespace="r").plan(one).parts == (
        RuleSet([], namespace="r").plan(one).parts
    )


def test_one_list_says_nothing_about_the_others():
    guard = SenderAllowlist(AllowOptions(regions=("eu-central-1",)))
    assert guard.refusal(from_object(event(source="anything", account=...))) == ""
    assert "region" in guard.refusal(from_object(event(region="us-east-1")))
    assert AllowOptions().is_open
    assert not AllowOptions(regions=("eu-central-1",)).is_open


def test_what_is_remembered_about_one_sender_is_about_no_other():
    guard = SenderAllowlist(ALL)
    senders = [{}, {"region": "x"}, {"account": "y"}, {"source": "z"}] * 2
    found = [bool(guard.refusal(from_object(event(**sender)))) for sender in senders]
    assert found == [False, True, True, True] * 2


def test_many_senders_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr("oncebridge.events.access._MOST_REMEMBERED", 10)
    guard = SenderAllowlist(ALL)
    for n in range(50):
        assert guard.refusal(from_object(event(source=f"s{n}")))
    assert len(guard._known) <= 10
    assert guard.refusal(from_object(event())) == ""


def test_what_a_stranger_calls_itself_is_spelt_out_and_cut():
    guard = SenderAllowlist(ALL)
    assert r"'\x1b[2J\u202e'" in guard.refusal(from_object(event(source="\x1b[2J\u202e")))
    assert len(guard.refusal(from_object(event(source="x" * 10_000)))) < 400


# --- mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"sources": ("",)}, "allow.sources[0]"),
        ({"sources": ("ok", "a*b")}, "allow.sources[1]"),
        ({"sources": ("a**",)}, "allow.sources[0]"),
        ({"accounts": ("12345678901",)}, "allow.accounts[0]"),
        ({"accounts": ("1234567890123",)}, "allow.accounts[0]"),
        ({"accounts": ("1234*",)}, "allow.accounts[0]"),
        ({"accounts": ("",)}, "allow.accounts[0]"),
        ({"accounts": ("1234 5678 9012",)}, "allow.accounts[0]"),
        ({"regions": ("eu-central-1", "eu-*")}, "allow.regions[1]"),
        ({"regions": ("EU-central-1",)}, "allow.regions[0]"),
        ({"regions": ("",)}, "allow.regions[0]"),
        ({"regions": ("eu-central-1\n",)}, "allow.regions[0]"),
    ],
)
def test_a_list_with_a_mistake_is_refused(wrong, where):
    with pytest.raises(ConfigError) as caught:
        SenderAllowlist(AllowOptions(**wrong))
    assert caught.value.where == where


def test_every_mistake_is_named_at_once():
    with pytest.raises(ConfigErrors) as caught:
        SenderAllowlist(AllowOptions(sources=("a*b",), accounts=("1",), regions=("*",)))
    assert len(caught.value.problems) == 3


# --- by file --------------------------------------------------------------------------------

FILE = """
store = "memory:"
dead = "memory:"
preset = "genesys"

[allow]
sources = ["aws.partner/genesys.com/*"]
accounts = ["123456789012"]
regions = ["eu-central-1"]
"""
ROUTES = """
[[routes]]
name = "crm"
sink = "python:builtins:repr"

[[routes]]
name = "audit"
sink = "python:builtins:repr"
match = { detail-type = ["Order"] }
"""


def written(tmp_path, text=FILE):
    path = tmp_path / "oncebridge.toml"
    path.write_text(text)
    return path


async def test_a_gateway_of_a_file_lets_in_whom_the_file_allows(tmp_path, monkeypatch):
    monkeypatch.delenv("ONCEBRIDGE_CONFIG", raising=False)
    sent = []
    gateway = Gateway.from_config(written(tmp_path), sink=sent.append)
    async with gateway:
        outcomes = await gateway.process([raw(), raw(region="us-east-1"), raw(account=...)])
    assert [o.verdict for o in outcomes] == [Verdict.DELIVERED, Verdict.DEAD, Verdict.DEAD]
    assert "'us-east-1' is not among allow.regions" in outcomes[1].reason
    assert len(sent) == 1


def test_the_environment_may_say_it_too(tmp_path):
    setup = load(
        written(tmp_path, 'store = "memory:"'),
        environment={"ONCEBRIDGE_ALLOW__REGIONS": '["eu-central-1"]'},
    )
    (guard,) = [rule.guard for rule in setup.routes[0].rules]
    assert guard.refusal(from_object(event(region="x")))


async def test_a_router_lets_strangers_in_on_no_route(tmp_path):
    setup = load(written(tmp_path, FILE + ROUTES), environment={})
    router = make_router(setup)
    await router.open()
    try:
        good, bad = await router.process([raw(), raw(source="com.example.evil")])
        letters = await setup.config.dead.opened.list(after=0, limit=9)
    finally:
        await router.aclose()
    assert (good.verdict, bad.verdict) == (Verdict.DELIVERED, Verdict.DEAD)
    assert [name for name, _ in bad.outcomes] == ["crm", "audit"]
    # one for each route, as each may be replayed once the list is put right
    assert sorted(letter.route for letter in letters) == ["audit", "crm"]


def test_a_function_lets_in_whom_its_file_allows(tmp_path, monkeypatch):
    monkeypatch.delenv("ONCEBRIDGE_CONFIG", raising=False)
    sent = []
    gateway = Gateway.from_config(written(tmp_path), sink=print)
    handler = lambda_handler(gateway, sent.append, metrics=None)
    try:
        handler(event(), Context())
        handler(event({"n": 2}, region="us-east-1"), Context())
    finally:
        handler.close()
    assert [one.detail for one in sent] == [{"n": 1}]


async def test_explanations_and_identities_say_the_same(tmp_path):
    setup = load(written(tmp_path), environment={})
    stranger = raw(source="com.example.evil")
    (identity,) = Identities(setup).of(parse(stranger))
    assert (identity.plan.action, identity.keys) == ("dead", ())
    assert identity.all_keys() == [identity.plan.key]
    records = [RawRecord(stranger, 1, 0, 1), RawRecord(raw(), 2, 0, 2)]
    refused, known = [told async for told in explain(records, setup, None)]
    assert (refused.rule, refused.action) == ("allow", "dead")
    assert "'com.example.evil' is not among allow.sources" in refused.why
    assert (known.rule, known.action) == ("genesys", "deduplicate")


def test_a_file_with_wrong_lists_does_not_start(tmp_path):
    text = FILE.replace('"123456789012"', '"12345"').replace('"eu-central-1"', '"eu-*"')
    with pytest.raises(ConfigErrors) as caught:
        load(written(tmp_path, text), environment={})
    assert [problem.where for problem in caught.value.problems] == [
        "allow.accounts[0]",
        "allow.regions[0]",
    ]


def test_a_rule_of_a_user_may_have_the_name_of_the_guard(tmp_path):
    text = FILE + '\n[[rules]]\nname = "allow"\nkey = "id"\n'
    (route,) = load(written(tmp_path, text), environment={}).routes
    assert RuleSet(route.rules, namespace="r").plan(from_object(event())).rule.name == "allow"


def test_without_a_list_no_rule_is_added(tmp_path):
    text = 'store = "memory:"\n[allow]\notherwise = "discard"'
    (route,) = load(written(tmp_path, text), environment={}).routes
    assert route.rules == ()


async def test_nothing_of_a_stranger_is_logged_but_where_it_comes_from(caplog):
    caplog.set_level(logging.DEBUG, "oncebridge")
    async with Gateway(
        store=MemoryStore(), sink=print, rules=guarded(), dead=MemoryDeadLetters()
    ) as gateway:
        (outcome,) = await gateway.process([raw({"secret": "hunter2"}, region="x")])
    assert outcome.verdict is Verdict.DEAD
    assert "hunter2" not in caplog.text + outcome.reason
