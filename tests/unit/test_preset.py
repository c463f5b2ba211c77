"""What the preset for Genesys Cloud takes for the same event, and what it keeps apart."""

import asyncio
import copy
import json
import re
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.aws.functions import Context
from tests.size import examples

from oncebridge import ConfigError, Gateway, Settings, Verdict
from oncebridge.aws import lambda_handler
from oncebridge.events.canonical import canonical
from oncebridge.events.event import from_object, parse
from oncebridge.events.rules import RuleSet
from oncebridge.genesys.preset import genesys_rules
from oncebridge.genesys.simulator import REPEATS, simulate
from oncebridge.service.config import load
from oncebridge.service.genesys_options import GenesysOptions
from oncebridge.stores.memory import MemoryStore

EVENTS = Path(__file__).parents[1] / "events"
ORGANISATION = "aws.partner/genesys.com/cloud/3f1c2b7a-5a0e-4a3c-9a0d-1d2f6c1b7e10"
CONVERSATION = "4ae47b2b-9417-4a5d-bcf5-8c4737244f97"


def body_of(topic, name, body):
    """Make an event of a topic of which there is no published sample."""
    return {
        "version": "0",
        "id": "0d9ef1b4-6d1e-4d57-9a3a-7d2f40a6c001",
        "detail-type": topic,
        "source": f"{ORGANISATION}/prod",
        "account": "123456789012",
        "time": "2025-12-12T15:15:07Z",
        "region": "us-east-1",
        "resources": [],
        "detail": {
            "topicName": topic.replace("{id}", name),
            "version": "2",
            "eventBody": body,
            "metadata": {"CorrelationId": "5d1f2c38-0b53-4a86-8f83-6c41d3c7a002"},
            "timestamp": "2025-12-12T15:15:07.919Z",
        },
    }


METRIC = body_of(
    "v2.analytics.conversation.{id}.metrics",
    CONVERSATION,
    {
        "metric": "tTalk",
        "metricDate": "2025-12-12T15:15:07.657Z",
        "value": 217521,
        "recordId": "b8a3a5c2-9d0b-4c11-8a52-3b1d9c0e7003",
        "conversationId": CONVERSATION,
        "mediaType": "voice",
    },
)
OPERATION = body_of(
    "v2.operations.events.{id}",
    "SIP-TRUNK-DOWN",
    {
        "eventEntity": {"id": "SIP-TRUNK-DOWN", "name": "Trunk down"},
        "entityId": "c55f0f4e-5b8c-4ce2-9f5b-0c2a6e1bd004",
        "entityName": "trunk 1",
        "previousValue": "up",
        "currentValue": "down",
        "timestamp": 1765552507657,
    },
)
QUEUE = body_of(
    "v2.routing.queues.{id}.conversations.calls",
    "4f81e873-3819-4bae-a453-afde7ad9e870",
    {"id": CONVERSATION, "participants": [{"id": "p1", "calls": [{"muted": False}]}]},
)
UNKNOWN = body_of("v2.something.{id}.quite.new", "x1", {"id": "e1", "state": "open", "n": 1})


def sample(name):
    return json.loads((EVENTS / name).read_text())


RULES = {
    "v2.analytics.queues.id.observations.json": "genesys observations",
    "v2.audits.entitytype.id.entityid.id.OAuthClient-Delete.json": "genesys audits",
    "v2.audits.entitytype.id.entityid.id.UserPresence-Update.json": "genesys audits",
    "v2.conversations.id.transcription.json": "genesys transcription",
    "v2.detail.events.conversation.id.acd.end.json": "genesys detail events",
    "v2.detail.events.conversation.id.acd.start.json": "genesys detail events",
    "v2.detail.events.conversation.id.acw.json": "genesys detail events",
    "v2.detail.events.conversation.id.attributes.json": "genesys attributes",
    "v2.detail.events.conversation.id.customer.end.json": "genesys detail events",
    "v2.detail.events.conversation.id.customer.start.json": "genesys detail events",
    "v2.detail.events.conversation.id.flow.end.json": "genesys detail events",
    "v2.detail.events.conversation.id.user.end.json": "genesys detail events",
    "v2.detail.events.conversation.id.user.start.json": "genesys detail events",
    "v2.detail.events.conversation.id.wrapup.json": "genesys detail events",
    "v2.users.id.conversations.json": "genesys snapshots",
    "v2.users.id.presence.json": "genesys snapshots",
    "v2.users.id.routingStatus.json": "genesys snapshots",
}
SAMPLES = {name: sample(name) for name in RULES} | {
    "metrics": METRIC,
    "operations": OPERATION,
    "queue": QUEUE,
    "unknown": UNKNOWN,
}
MADE = {
    "metrics": "genesys conversation metrics",
    "operations": "genesys operational events",
    "queue": "genesys snapshots",
    "unknown": "genesys",
}
OBSERVATIONS = "v2.analytics.queues.id.observations.json"
KEPT = [name for name in SAMPLES if name != OBSERVATIONS]
USER_END = "v2.detail.events.conversation.id.user.end.json"
ACW = "v2.detail.events.conversation.id.acw.json"
WRAPUP = "v2.detail.events.conversation.id.wrapup.json"
ATTRIBUTES = "v2.detail.events.conversation.id.attributes.json"
AUDIT = "v2.audits.entitytype.id.entityid.id.UserPresence-Update.json"
PRESENCE = "v2.users.id.presence.json"
TRANSCRIPTION = "v2.conversations.id.transcription.json"


async def verdicts(*events, rules=None, **more):
    """Bring events one after the other to a real gateway, and check what the sink saw."""
    seen = []
    rules = genesys_rules() if rules is None else rules
    gateway = Gateway(store=MemoryStore(), sink=seen.append, rules=rules, **more)
    async with gateway:
        outcomes = [
            (await gateway.process([one if isinstance(one, bytes) else json.dumps(one).encode()]))[
                0
            ]
            for one in events
        ]
    assert len(seen) == sum(outcome.forwarded for outcome in outcomes)
    return [outcome.verdict for outcome in outcomes]


def with_changes(event, changes=(), **envelope):
    """Copy *event* with other values at dotted paths below `detail`."""
    made = copy.deepcopy(event)
    made |= {name.replace("_", "-"): value for name, value in envelope.items()}
    for path, value in dict(changes).items():
        *above, last = path.split(".")
        at = made["detail"]
        for name in above:
            at = at[int(name)] if isinstance(at, list) else at[name]
        at[last] = value
    return made


def plan(event, options=GenesysOptions(), **more):  # noqa: B008 - frozen
    return RuleSet(genesys_rules(options), namespace="r", **more).plan(from_object(event))


D, DUP = Verdict.DELIVERED, Verdict.DUPLICATE

# --- the samples ----------------------------------------------------------------------------


def test_every_published_sample_is_here():
    assert sorted(RULES) == sorted(path.name for path in EVENTS.glob("v2.*.json"))


@pytest.mark.parametrize(("name", "rule"), [*RULES.items(), *MADE.items()])
def test_each_topic_has_the_rule_of_its_family(name, rule):
    assert plan(SAMPLES[name]).rule.name == rule


@pytest.mark.parametrize("name", SAMPLES)
async def test_every_sample_passes_once(name):
    assert await verdicts(SAMPLES[name], SAMPLES[name]) == [D, DUP]


async def test_all_samples_are_events_of_their_own():
    assert set(await verdicts(*SAMPLES.values())) == {D}


async def test_the_variants_of_one_event_are_one_and_what_is_distinct_passes():
    files = sorted((EVENTS / "variants").glob("*.json"))
    assert [path.name[:2] for path in files] == [f"{n:02}" for n in range(10)]
    expected = [D] + [DUP] * 7 + [D] * 2
    assert await verdicts(*(path.read_bytes() for path in files)) == expected


def published_again(event):
    return with_changes(
        event,
        {"timestamp": "2025-12-16T04:44:01.001Z", "metadata": {"CorrelationId": "another"}},
        id="77f2a3a6-3f0c-4c06-9f2b-9f8b6c1d2e3f",
        time="2025-12-16T04:44:01Z",
    )


def reordered(value):
    if isinstance(value, dict):
        return {name: reordered(value[name]) for name in reversed(value)}
    return [reordered(item) for item in value] if isinstance(value, list) else value


COPIES = {
    "published again": published_again,
    "second integration": lambda e: published_again(e) | {"source": e["source"] + "-second"},
    "other region": lambda e: (
        published_again(e) | {"region": "eu-west-2", "account": "210987654321"}
    ),
    "replay": lambda e: {**e, "replay-name": "after-the-outage"},
    "reordered": reordered,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", KEPT)
async def test_a_copy_is_a_duplicate(name, how):
    event = SAMPLES[name]
    assert await verdicts(event, COPIES[how](event)) == [D, DUP]


@pytest.mark.parametrize(
    ("how", "verdict"),
    [
        *(("published again", D), ("second integration", D), ("other region", D)),
        *(("replay", DUP), ("reordered", DUP)),
    ],
)
async def test_an_observation_published_again_is_another_reading(how, verdict):
    event = SAMPLES[OBSERVATIONS]
    assert await verdicts(event, COPIES[how](event)) == [D, verdict]


async def test_an_observation_of_the_same_time_is_one_through_every_integration():
    event = SAMPLES[OBSERVATIONS]
    other = with_changes(event, {"metadata": {}}, id="x", source=event["source"] + "-second")
    assert await verdicts(event, other) == [D, DUP]


# --- what must stay apart -------------------------------------------------------------------

PARTIAL = with_changes(SAMPLES[TRANSCRIPTION], {"eventBody.transcripts.0.isFinal": False})
ANOTHER_USER = SAMPLES[PRESENCE]["detail"]["topicName"].replace("0a041b94", "1b152ca5")
REOPENED = SAMPLES[ACW]["detail"]["eventBody"]["eventTime"] + 60_000

PAIRS = {
    "two users with the same presence": (
        SAMPLES[PRESENCE],
        with_changes(SAMPLES[PRESENCE], {"topicName": ANOTHER_USER}),
    ),
    "a partial utterance and its final form": (PARTIAL, SAMPLES[TRANSCRIPTION]),
    "after-call work of a conversation that was reopened": (
        SAMPLES[ACW],
        with_changes(SAMPLES[ACW], {"eventBody.eventTime": REOPENED}),
    ),
    "two updates of attributes in one millisecond": (
        SAMPLES[ATTRIBUTES],
        with_changes(SAMPLES[ATTRIBUTES], {"eventBody.attributes.outage_flag": "false"}),
    ),
    "audits that differ in their ids only": (
        SAMPLES[AUDIT],
        with_changes(SAMPLES[AUDIT], {"eventBody.id": "5cb40926-f6ea-4fea-8b7d-be337ceca0cc"}),
    ),
    "records of a metric": (METRIC, with_changes(METRIC, {"eventBody.recordId": "r2"})),
    "metrics of a record": (METRIC, with_changes(METRIC, {"eventBody.metric": "tHeld"})),
    "dates of a metric": (
        METRIC,
        with_changes(METRIC, {"eventBody.metricDate": "2025-12-12T15:15:07.658Z"}),
    ),
    "one body on two topics": (
        SAMPLES[ACW],
        with_changes(
            SAMPLES[WRAPUP],
            {"eventBody": SAMPLES[ACW]["detail"]["eventBody"]},
        ),
    ),
    "two organisations": (
        SAMPLES[USER_END],
        with_changes(SAMPLES[USER_END], source=f"{ORGANISATION[:-2]}ff/prod"),
    ),
    "the test partner and the real one": (
        SAMPLES[USER_END],
        with_changes(
            SAMPLES[USER_END],
            source=SAMPLES[USER_END]["source"].replace("genesys.com/", "genesys.com.test/"),
        ),
    ),
    "two versions of a topic": (
        SAMPLES[USER_END],
        with_changes(SAMPLES[USER_END], {"version": "3"}),
    ),
    "something new beside the body": (
        SAMPLES[USER_END],
        with_changes(SAMPLES[USER_END], {"sequence": 2}),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
async def test_what_only_looks_alike_passes(pair):
    one, other = PAIRS[pair]
    assert await verdicts(one, published_again(other), published_again(one), other) == [
        *(D, D),
        *(DUP, DUP),
    ]


# --- an identity with other content ---------------------------------------------------------

CHECKED = {
    AUDIT: {"eventBody.action": "Delete"},
    "metrics": {"eventBody.value": 217522},
    TRANSCRIPTION: {"eventBody.transcripts.0.channel": "INTERNAL"},
}


@pytest.mark.parametrize("name", CHECKED)
async def test_the_same_identity_with_other_content_is_a_conflict_and_delivered(name):
    event = SAMPLES[name]
    other = with_changes(event, CHECKED[name])
    again = published_again(other)
    found = await verdicts(event, other, again, published_again(event))
    assert found == [D, Verdict.CONFLICT, DUP, DUP]


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        (AUDIT, "id"),
        *(("metrics", part) for part in ("recordId", "metric", "metricDate")),
        *((TRANSCRIPTION, part) for part in ("communicationId", "transcripts", "status")),
    ],
)
@pytest.mark.parametrize("how", ["left out", "null"])
async def test_without_its_identity_the_content_counts(name, missing, how):
    event = copy.deepcopy(SAMPLES[name])
    body = event["detail"]["eventBody"]
    body[missing] = None
    if how == "left out":
        del body[missing]
    other = with_changes(event, {"eventBody.more": 1})
    assert await verdicts(event, published_again(event), other) == [D, DUP, D]


async def test_a_transcript_that_holds_no_utterance_goes_by_its_content():
    event = with_changes(SAMPLES[TRANSCRIPTION], {"eventBody.transcripts": []})
    ended = with_changes(event, {"eventBody.status.status": "SESSION_ENDED"})
    assert await verdicts(event, published_again(event), ended) == [D, DUP, D]


# --- topics, sources, scope -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic", "rule"),
    [
        ("v2.detail.events.conversation.{conversationId}.user.end", "genesys detail events"),
        ("v2.detail.events.conversation.{conversationId}.attributes", "genesys attributes"),
        ("v2.conversations.{conversationId}.transcription", "genesys transcription"),
        ("v2.analytics.conversation.{conversationId}.metrics", "genesys conversation metrics"),
        ("v2.analytics.queues.{queueId}.observations", "genesys observations"),
        ("v2.analytics.users.{id}.observations", "genesys observations"),
        ("v2.audits.entitytype.{entityType}.entityid.{entityId}", "genesys audits"),
        ("v2.operations.events.{operationalEventId}", "genesys operational events"),
        *(
            (f"v2.users.{{userId}}.{what}", "genesys snapshots")
            for what in ("activity", "station", "geolocation", "conversations.calls", "new")
        ),
        ("v2.routing.queues.{queueId}.conversations.emails", "genesys snapshots"),
        ("v2.conversations.{id}.recordings", "genesys"),
        ("v2.analytics.users.{id}.aggregates", "genesys"),
        ("v3.what.comes.next", "genesys"),
    ],
)
async def test_a_topic_is_known_however_its_placeholder_is_named(topic, rule):
    event = body_of(topic, "x", {"id": "e1", "state": "new"})
    assert plan(event).rule.name == rule
    assert await verdicts(event, {**event, "id": "other"}) == [D, DUP]


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"topicName": None},
        {"eventBody": None},
        {"eventBody": []},
        {"eventBody": "text"},
        {"topicName": 5, "eventBody": {"transcripts": 5, "status": []}},
    ],
)
@pytest.mark.parametrize("name", SAMPLES)
async def test_whatever_a_topic_holds_it_passes_once(name, odd):
    at = {"timestamp": "t"} if name == OBSERVATIONS else {}
    event = {**SAMPLES[name], "detail": {**odd, **at, "more": 1}}
    other = {**event, "detail": {**odd, **at, "more": 2}}
    assert await verdicts(event, event, other) == [D, DUP, D]


# --- what says too little to be known by ----------------------------------------------------

TOPIC = {"topicName": "v2.some.x.new"}
LITTLE = {
    "nothing": {},
    "a version": {"version": "2"},
    "nulls": {"topicName": None, "version": "2", "eventBody": None},
    "a topic": {**TOPIC, "version": "2"},
    "a topic and nothing": {**TOPIC, "version": "2", "eventBody": None},
    "a topic and an empty body": {**TOPIC, "version": "2", "eventBody": {}},
    "a topic and a body of nulls": {**TOPIC, "eventBody": {"id": None, "items": [None, {}]}},
}


# Was a bug: what is the same in every event of a topic was a key, and all but the first were lost.
@pytest.mark.parametrize("little", LITTLE)
@pytest.mark.parametrize("name", KEPT)
async def test_what_every_event_of_a_topic_has_is_no_key(name, little):
    event = {**SAMPLES[name], "detail": LITTLE[little] | {"timestamp": "t1", "metadata": {"a": 1}}}
    other = published_again(event)
    assert await verdicts(event, other, event, other) == [D, D, DUP, DUP]
    rules = RuleSet(genesys_rules(), namespace="r")
    for apart in ((), rules.apart):
        found = [rules.plan(parse(json.dumps(one).encode(), apart=apart)) for one in (event, other)]
        assert found[0].key != found[1].key


# Was a bug: without the time of publication, equal readings were one, and all but the first lost.
@pytest.mark.parametrize("how", ["left out", "null", "empty"])
async def test_an_observation_without_its_time_is_known_by_its_id(how):
    event = with_changes(SAMPLES[OBSERVATIONS], {"timestamp": {} if how == "empty" else None})
    if how == "left out":
        del event["detail"]["timestamp"]
    again = {**event, "replay-name": "after-the-outage"}
    reading = {**event, "id": "another", "time": "2025-12-12T15:15:17Z"}
    assert await verdicts(event, again, reading, reading) == [D, DUP, D, DUP]
    without = {name: value for name, value in event.items() if name != "id"}
    assert plan(without).action == "dead"


# --- details without an envelope ------------------------------------------------------------


def bare_plan(detail, **more):
    rules = RuleSet(genesys_rules(), namespace="r", **more)
    found = [
        rules.plan(parse(json.dumps(detail).encode(), bare=True, apart=apart))
        for apart in ((), rules.apart)
    ]
    assert found[0] == found[1]
    return found[0]


BARE = Settings(bare=True)


@pytest.mark.parametrize(("name", "rule"), [*RULES.items(), *MADE.items()])
def test_a_detail_alone_has_the_rule_of_its_topic(name, rule):
    assert bare_plan(SAMPLES[name]["detail"]).rule.name == rule


# Was a bug: the preset asked for a source, which a detail alone has not; so all of it counted, and
# whatever was published again passed again.
@pytest.mark.parametrize("name", KEPT)
async def test_a_detail_alone_passes_once_however_often_it_is_published(name):
    event = SAMPLES[name]
    copies = [published_again(event), reordered(event)]
    details = [one["detail"] for one in (event, *copies)]
    assert await verdicts(*details, settings=BARE) == [D, DUP, DUP]


async def test_an_observation_alone_published_again_is_another_reading():
    event = SAMPLES[OBSERVATIONS]
    details = [one["detail"] for one in (event, published_again(event), event)]
    assert await verdicts(*details, settings=BARE) == [D, D, DUP]


BY_SOURCE = {name for name, (one, other) in PAIRS.items() if one["source"] != other["source"]}


@pytest.mark.parametrize("pair", sorted(PAIRS.keys() - BY_SOURCE))
async def test_details_alone_that_only_look_alike_pass(pair):
    details = [one["detail"] for one in PAIRS[pair]]
    assert await verdicts(*details, settings=BARE) == [D, D]


@pytest.mark.parametrize("pair", sorted(BY_SOURCE))
async def test_details_alone_do_not_tell_who_sent_them(pair):
    details = [one["detail"] for one in PAIRS[pair]]
    assert await verdicts(*details, settings=BARE) == [D, DUP]


async def test_a_detail_alone_is_another_event_than_the_one_with_its_envelope():
    event = SAMPLES[USER_END]
    assert await verdicts(event, event["detail"], settings=BARE) == [D, D]


def test_a_detail_alone_is_about_what_it_was_about():
    for name in SAMPLES:
        alone = bare_plan(SAMPLES[name]["detail"], about=True)
        assert alone.about == plan(SAMPLES[name], about=True).about != b""


@pytest.mark.parametrize(
    "detail",
    [
        {"topicName": "orders", "eventBody": {"n": 1}},
        {"topicName": "vehicles.moved", "eventBody": {"n": 1}},
        {"topicName": 5, "eventBody": {"n": 1}},
        {"topicName": "v2.users.x.presence"},
        {"topicName": "v2.users.x.presence", "eventBody": None},
        {"topicName": "v2.users.x.presence", "eventBody": {}},
        {"topicName": "v2.users.x.presence", "eventBody": {"id": None}},
        {"eventBody": {"n": 1}},
    ],
)
async def test_a_detail_alone_that_is_none_of_genesys_counts_as_a_whole(detail):
    one, other = ({**detail, "timestamp": at} for at in ("t1", "t2"))
    assert bare_plan(one).rule.name == "default"
    assert await verdicts(one, other, one, settings=BARE) == [D, D, DUP]


def test_topics_of_a_later_version_are_known_without_an_envelope_too():
    assert bare_plan({"topicName": "v3.what.next", "eventBody": {"n": 1}}).rule.name == "genesys"


def test_a_function_passes_details_on_once():
    passed = []
    gateway = Gateway(store=MemoryStore(), sink=print, rules=genesys_rules())
    handler = lambda_handler(gateway, deliver=passed.append, metrics=None)
    event = SAMPLES[ACW]
    try:
        for one in (event, published_again(event)):
            handler(one["detail"], Context())
    finally:
        handler.close()
    assert [one.bare for one in passed] == [True]


async def test_by_source_each_integration_is_a_sender_of_its_own():
    rules = genesys_rules(GenesysOptions(scope="source"))
    event = SAMPLES[USER_END]
    second = COPIES["second integration"](event)
    assert await verdicts(event, second, published_again(event), rules=rules) == [D, D, DUP]
    assert {rule.scope for rule in rules} == {"source"}


async def test_the_test_domain_is_genesys_too():
    source = SAMPLES[USER_END]["source"].replace("genesys.com/", "genesys.com.test/")
    event = {**SAMPLES[USER_END], "source": source}
    assert plan(event).rule.name == "genesys detail events"
    assert await verdicts(event, COPIES["second integration"](event)) == [D, DUP]


async def test_sources_can_be_others():
    options = GenesysOptions(sources=("com.example.genesys",))
    event = {**SAMPLES[USER_END], "source": "com.example.genesys.relay"}
    assert plan(event, options).rule.name == "genesys detail events"
    assert plan(SAMPLES[USER_END], options).rule.name == "default"
    rules = genesys_rules(options)
    assert await verdicts(event, published_again(event), rules=rules) == [D, DUP]


@pytest.mark.parametrize("source", ["aws.partner/genesys.com", "aws.partner/other.com/x", "", "a"])
def test_what_is_not_from_genesys_is_left_alone(source):
    assert plan({**SAMPLES[USER_END], "source": source}).rule.name == "default"


@pytest.mark.parametrize(
    ("sources", "where"),
    [((), ""), (("a", ""), "[1]"), (("aws.partner/genesys.com/*",), "[0]")],
)
def test_sources_that_would_be_nobodys_or_everybodys_are_refused(sources, where):
    with pytest.raises(ConfigError) as caught:
        genesys_rules(GenesysOptions(sources=sources))
    assert caught.value.where == f"genesys.sources{where}"


def test_the_file_says_sources_scope_and_window(tmp_path):
    path = tmp_path / "oncebridge.toml"
    path.write_text(
        """
        store = "memory:"
        preset = "genesys"
        window = "14d"
        [genesys]
        sources = ["com.example.genesys"]
        scope = "source"
        """
    )
    (route,) = load(path, environment={}).routes
    assert [rule.name for rule in route.rules] == [rule.name for rule in genesys_rules()]
    assert {rule.scope for rule in route.rules} == {"source"}
    assert {tier.window for rule in route.rules for tier in rule.tiers} == {timedelta(days=14)}
    event = from_object({**SAMPLES[USER_END], "source": "com.example.genesys"})
    assert RuleSet(route.rules, namespace="r").plan(event).rule.name == "genesys detail events"
    path.write_text('store = "memory:"\npreset = "genesys"\ngenesys.sources = ["x*"]')
    with pytest.raises(ConfigError, match=r"genesys.sources\[0\]: 'x\*': .* without a star"):
        load(path, environment={})


# --- what the documentation says ------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "genesys.md").read_text()
SNIPPETS = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_has_every_rule_in_its_order():
    assert re.findall(r"^\| `(genesys[a-z ]*)` \|", PAGE, re.MULTILINE) == [
        rule.name for rule in genesys_rules()
    ]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_every_snippet_of_the_page_is_read(tmp_path, snippet):
    path = tmp_path / "oncebridge.toml"
    path.write_text(f'store = "memory:"\n{snippet}')
    assert load(path, environment={}).routes


def test_the_event_of_the_page_is_one():
    (text,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert plan(json.loads(text)).rule.name == "genesys detail events"


RETURNS = [
    with_changes(
        QUEUE,
        {"eventBody.participants.0.calls": [{"muted": muted}], "timestamp": f"t{n}"},
        id=f"e{n}",
        detail_type="v2.users.{id}.conversations",
    )
    for n, muted in enumerate([False, True, False, False])
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, [D, D, DUP, DUP, DUP]),
        ("every return", [D, D, D, Verdict.UNCHANGED, DUP]),
        ("every publication", [D, D, D, D, DUP]),
    ],
)
async def test_the_rules_of_the_page_let_a_return_pass(tmp_path, name, expected):
    path = tmp_path / "oncebridge.toml"
    snippet = next((one for one in SNIPPETS if f'"{name}"' in one), "")
    path.write_text(f'store = "memory:"\npreset = "genesys"\n{snippet}')
    (route,) = load(path, environment={}).routes
    assert await verdicts(*RETURNS, RETURNS[-1], rules=route.rules) == expected


# --- entities, order, speed -----------------------------------------------------------------

ABOUT = {
    USER_END: CONVERSATION,
    ATTRIBUTES: CONVERSATION,
    TRANSCRIPTION: CONVERSATION,
    "metrics": CONVERSATION,
    "v2.users.id.conversations.json": CONVERSATION,
    "queue": CONVERSATION,
    "v2.users.id.routingStatus.json": "0a041b94-62ca-44a3-9bac-3567e0b6e6fd",
    PRESENCE: SAMPLES[PRESENCE]["detail"]["topicName"],
    OBSERVATIONS: SAMPLES[OBSERVATIONS]["detail"]["topicName"],
    AUDIT: SAMPLES[AUDIT]["detail"]["topicName"],
    "operations": "c55f0f4e-5b8c-4ce2-9f5b-0c2a6e1bd004",
}


def test_what_happens_in_a_conversation_has_one_order():
    found = {name: plan(SAMPLES[name], ordered=True, about=True) for name in ABOUT}
    for part in ("entity", "about"):
        of = {name: getattr(one, part) for name, one in found.items()}
        assert all(of.values())
        for name, entity in ABOUT.items():
            alike = {other for other in ABOUT if ABOUT[other] == entity}
            assert {other for other in of if of[other] == of[name]} == alike


async def test_an_ordered_gateway_takes_every_sample():
    ordered = Settings(order="entity")
    assert set(await verdicts(*SAMPLES.values(), settings=ordered)) == {D}


def test_detail_events_are_encoded_once():
    rules = RuleSet(genesys_rules(), namespace="r")
    event = parse(json.dumps(SAMPLES[USER_END]).encode(), apart=rules.apart)
    key = rules.plan(event).rule.tiers[0].key
    assert event.apart == rules.apart == key.apart == ("timestamp", "metadata")
    assert rules.plan(event).key == rules.plan(parse(event.raw)).key


def test_the_rules_are_made_once_and_cannot_be_spoilt():
    first, second = genesys_rules(), genesys_rules()
    assert all(one is other for one, other in zip(first, second, strict=True))
    first.clear()
    assert genesys_rules() == second


async def test_a_simulated_stream_is_sorted_as_it_was_made():
    seen = []
    arrivals = list(simulate(11, 1500))
    async with Gateway(
        store=MemoryStore(), sink=lambda e: seen.append(e.raw), rules=genesys_rules()
    ) as gateway:
        outcomes = await gateway.process([one.raw for one in arrivals])
    firsts = {}
    for one in arrivals:
        firsts.setdefault(one.truth, one)
    expected = [D if firsts[one.truth] is one else DUP for one in arrivals]
    assert [outcome.verdict for outcome in outcomes] == expected
    assert len(seen) == len(firsts)
    assert any(one.label in REPEATS for one in arrivals)


# --- whatever changes -----------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.text("ab é", max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)
MANY = settings(max_examples=examples(40), deadline=None)


def leaves(value, path=()):
    """List the places of all leaves; an empty object or list is one as well."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in inner:
        if isinstance(item, dict | list) and item:
            yield from leaves(item, (*path, name))
        else:
            yield (*path, name)


LEAVES = {name: list(leaves(event["detail"]["eventBody"])) for name, event in SAMPLES.items()}


@pytest.mark.parametrize("name", SAMPLES)
@MANY
@given(data=st.data())
def test_no_change_of_a_body_is_dropped(name, data):
    event = SAMPLES[name]
    *above, last = data.draw(st.sampled_from(LEAVES[name]))
    changed = published_again(event)
    if name == OBSERVATIONS:
        changed["detail"]["timestamp"] = event["detail"]["timestamp"]
    at = changed["detail"]["eventBody"]
    for step in above:
        at = at[step]
    if data.draw(st.booleans()):
        before, at[last] = at[last], data.draw(JSON)
        assume(canonical(at[last]) != canonical(before))
    else:
        del at[last]
    _, found = asyncio.run(verdicts(event, changed))
    assert found in {D, Verdict.CONFLICT}


TEXT = st.text(max_size=12)
VOLATILE = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(["id", "time", "account", "region", "replay-name", "version"], TEXT),
        "resources": st.lists(TEXT, max_size=2),
    },
)


@pytest.mark.parametrize("name", KEPT)
@MANY
@given(envelope=VOLATILE, timestamp=st.none() | JSON, metadata=st.none() | JSON, gone=st.booleans())
def test_a_change_of_what_is_volatile_is_always_a_duplicate(
    name, envelope, timestamp, metadata, gone
):
    event = SAMPLES[name]
    changed = copy.deepcopy(event) | envelope
    changed["detail"] |= {"timestamp": timestamp, "metadata": metadata}
    if gone:
        del changed["detail"]["timestamp"], changed["detail"]["metadata"]
    assert asyncio.run(verdicts(event, changed)) == [D, DUP]
