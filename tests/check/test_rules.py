"""The linter of rules: what drops real events or lets repeats pass, by the names alone."""

import pytest

from oncebridge.check.finding import Severity
from oncebridge.check.rules import RuleContext, lint, paths_of
from oncebridge.events.rules import Rule

GENESYS = {"source": [{"prefix": "aws.partner/genesys.com/"}]}
ORDERS = {"source": ["com.example.orders"]}
QUIET_FIELDS = ["detail.timestamp", "detail.metadata"]


def codes(*specs: dict, about: RuleContext | None = None, own: int | None = None) -> list[str]:
    rules = [Rule.parse({"name": f"r{n}"} | spec) for n, spec in enumerate(specs)]
    return [finding.code for finding in lint(rules, about, own=own)]


# --- keys that name too little ------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        ["detail.conversationId"],
        ["detail.conversation_id"],
        ["detail.interactionId"],
        ["detail.orderId"],
        ["detail.eventBody.userId"],
        ["detail.queueId"],
        ["detail.status"],
        ["detail.state"],
        ["detail.type"],
        ["detail.eventType"],
        ["source"],
        ['"detail-type"'],
        ["detail.topicName"],
        ["detail.data.order.id || detail.orderId"],
        ["detail.order.id"],
        ["detail.order.uuid"],
        ["detail.conversation._id", "detail.user.id"],
        ["detail.items[0].orderId"],
        ["join('-', [detail.conversationId, detail.userId])"],
        ["detail.conversationId", "detail.participantId"],
        ["detail.status", "detail.eventType"],
    ],
)
def test_a_key_that_names_whom_or_what_kind_and_no_event_is_warned_of(key):
    (finding,) = lint([Rule.parse({"name": "r", "match": ORDERS, "key": key})])
    assert (finding.code, finding.severity) == ("key-coarse", Severity.WARNING)
    assert finding.subject == "rule r"
    assert finding.docs == "docs/check.md#key-coarse"


@pytest.mark.parametrize(
    "key",
    [
        ["detail.eventId"],
        ["detail.event_id"],
        ["id"],
        ["detail.id"],
        ["detail.messageId"],
        ["detail.recordId"],
        ["detail.transcripts[0].utteranceId"],
        ["detail.auditId"],
        ["detail.data.id"],
        ["detail.event.id"],
        ["detail.order.id", "detail.status"],
        ["detail.orderId", "detail.status"],
        ["detail.conversationId", "detail.eventTime"],
        ["detail.conversationId", "detail.sequence"],
        ["detail.eventType", "detail.payload"],
        ["`1`", "detail.whole"],
        ["detail"],
    ],
)
def test_a_key_that_may_well_name_an_event_is_not(key):
    assert codes({"match": ORDERS, "key": key}) == []


def test_where_the_content_is_compared_too_nothing_is_dropped_by_a_coarse_key():
    coarse = {"match": ORDERS, "key": ["detail.orderId"], "check": True}
    assert codes(coarse) == []
    assert codes(coarse | {"on_conflict": "dead"}) == ["key-coarse"]


def test_every_tier_is_looked_at_as_any_of_them_makes_a_duplicate():
    tiers = [{"key": ["detail.orderId"], "window": "5m"}, {"key": "content"}]
    assert codes({"match": ORDERS, "tiers": tiers}) == ["key-coarse"]


def test_the_id_of_a_body_is_the_event_for_orders_and_the_entity_in_snapshots_of_genesys():
    key = ["detail.eventBody.id"]
    assert codes({"match": ORDERS, "key": key}) == []
    assert codes({"match": GENESYS, "key": key}) == ["key-coarse"]


@pytest.mark.parametrize(
    "key", [["detail.timestamp"], ["time"], ["detail.createdAt"], ["detail.event_time"]]
)
def test_a_moment_alone_is_no_key(key):
    assert codes({"match": ORDERS, "key": key}) == ["key-time"]


# --- keys that change with each publication -----------------------------------------------------


@pytest.mark.parametrize(
    ("match", "field", "severity"),
    [
        (ORDERS, "time", Severity.WARNING),
        (ORDERS, "detail.metadata.CorrelationId", Severity.WARNING),
        (GENESYS, "detail.timestamp", Severity.WARNING),
        (ORDERS, "detail.timestamp", Severity.NOTE),  # it may be when it happened
    ],
)
def test_what_a_publication_changes_is_no_part_of_a_key(match, field, severity):
    key = ["detail.conversationId", "detail.status", field]
    (finding,) = lint([Rule.parse({"name": "r", "match": match, "key": key})])
    assert (finding.code, finding.severity) == ("key-volatile", severity)
    assert field in finding.seen


def test_the_time_of_a_reading_belongs_to_it():
    readings = GENESYS | {"detail-type": ["v2.analytics.queues.{id}.observations"]}
    assert codes({"match": readings, "key": ["detail.topicName", "detail.timestamp"]}) == []
    assert codes({"match": readings, "ignore": ["detail.metadata"]}) == []


# --- Genesys ------------------------------------------------------------------------------------


def test_the_content_of_genesys_counts_without_what_a_publication_changes():
    assert codes({"match": GENESYS}) == ["content-volatile"]
    assert codes({"match": GENESYS, "ignore": ["detail.timestamp"]}) == ["content-volatile"]
    assert codes({"match": GENESYS, "ignore": QUIET_FIELDS}) == []
    narrower = ["detail.timestamp", "detail.metadata.CorrelationId"]
    assert codes({"match": GENESYS, "ignore": narrower}) == []
    assert codes({"match": ORDERS}) == []


def test_what_no_rule_matches_is_looked_at_where_genesys_is_known_to_send():
    rules = [Rule.parse({"name": "r", "match": ORDERS})]
    (finding,) = lint(rules, RuleContext(is_genesys=True))
    assert (finding.code, finding.subject) == ("content-volatile", "events that no rule matches")
    assert lint([], RuleContext()) == []


def test_an_id_alone_does_not_know_what_genesys_publishes_again():
    assert codes({"match": GENESYS, "key": "id"}) == ["key-id-only"]
    assert codes({"match": ORDERS, "key": "id"}) == []
    tiers = [{"key": "id", "window": "5m"}, {"key": "content", "ignore": QUIET_FIELDS}]
    assert codes({"match": GENESYS, "tiers": tiers}) == []


def test_an_id_beside_a_state_that_is_quiet_is_noted_only():
    quiet = {"entity": "detail.topicName", "state": "detail.eventBody", "for": "1h"}
    spec = {"name": "r", "match": GENESYS, "key": "id", "quiet": quiet}
    (finding,) = lint([Rule.parse(spec)])
    assert (finding.code, finding.severity) == ("key-id-only", Severity.NOTE)


@pytest.mark.parametrize(
    "source",
    [
        "aws.partner/genesys.com/cloud/1/a",
        {"prefix": "aws.partner/genesys.com"},
        {"prefix": "aws.partner/"},
        {"wildcard": "aws.partner/genesys.com.test/*"},
    ],
)
def test_a_pattern_tells_that_genesys_is_meant(source):
    assert codes({"match": {"source": [source]}, "key": "id"}) == ["key-id-only"]


def test_a_prefix_of_ones_own_is_genesys_too():
    about = RuleContext(genesys=("com.example.genesys",))
    match = {"source": ["com.example.genesys.eu"]}
    assert codes({"match": match, "key": "id"}, about=about) == ["key-id-only"]


# --- states -------------------------------------------------------------------------------------


def test_newest_wins_goes_by_when_it_happened():
    def latest(version: str) -> dict:
        entity = "detail.conversationId"
        return {"latest": {"entity": entity, "version": version}, "ignore": QUIET_FIELDS}

    stamp = ["latest-publish-stamp"]
    assert codes({"match": ORDERS} | latest("time")) == stamp
    assert codes({"match": GENESYS} | latest("detail.timestamp")) == stamp
    assert codes({"match": ORDERS} | latest("detail.timestamp")) == []
    assert codes({"match": GENESYS} | latest("detail.eventBody.eventTime")) == []


def test_quiet_is_for_less_than_the_window():
    quiet = {"entity": "detail.orderId", "state": "detail.status"}
    assert codes({"match": ORDERS, "window": "1h", "quiet": quiet | {"for": "2h"}}) == [
        "quiet-long"
    ]
    assert codes({"match": ORDERS, "window": "1h", "quiet": quiet | {"for": "1h"}}) == []


def test_other_content_that_is_dropped_is_warned_of():
    assert codes({"match": ORDERS, "key": "id", "on_conflict": "duplicate"}) == [
        "conflict-duplicate"
    ]
    # without a comparison there is no conflict
    assert codes({"match": ORDERS, "on_conflict": "duplicate"}) == []


def test_a_rule_without_a_key_is_noted_and_one_that_discards_is_not():
    (finding,) = lint([Rule.parse({"name": "r", "match": ORDERS, "key": "none"})])
    assert (finding.code, finding.severity) == ("key-none", Severity.NOTE)
    assert codes({"match": ORDERS, "discard": True}) == []


# --- what is never reached ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (None, ORDERS),
        (None, None),
        (ORDERS, ORDERS),
        ({"source": ["a", "b"]}, {"source": ["b"]}),
        ({"source": [{"prefix": "com."}]}, {"source": ["com.a", {"prefix": "com.b."}]}),
        (ORDERS, ORDERS | {"detail-type": ["Order Placed"]}),
        ({"detail": {"a": [1, 2]}}, {"detail": {"a": [1], "b": [3]}}),
    ],
)
def test_a_rule_behind_one_that_takes_all_of_it_is_never_reached(first, second):
    rules = [{"match": one} if one else {} for one in (first, second)]
    assert codes(*rules) == ["rule-unreachable"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ORDERS, None),
        (ORDERS, {"source": ["com.example.others"]}),
        (ORDERS | {"detail-type": ["Order Placed"]}, ORDERS),
        ({"source": ["b"]}, {"source": ["a", "b"]}),
        ({"source": [{"prefix": "com.b."}]}, {"source": [{"prefix": "com."}]}),
        ({"detail": {"n": [1]}}, {"detail": {"n": [True]}}),  # which Python takes for the same
        ({"detail": {"n": [False, "x"]}}, {"detail": {"n": [0]}}),
        ({"$or": [{"a": [1]}, {"b": [1]}]}, {"$or": [{"a": [True]}, {"b": [1]}]}),
        ({"source": [{"suffix": ".a"}]}, {"source": ["com.a"]}),  # it does, and nobody claims it
        ({"$or": [ORDERS, {"account": ["1"]}]}, {"source": ["x"], "detail": {"a": [1]}}),
    ],
)
def test_one_that_some_events_reach_is_not_warned_of(first, second):
    rules = [{"match": one} if one else {} for one in (first, second)]
    assert codes(*rules) == []


def test_what_is_never_reached_is_not_picked_at_further():
    assert codes({}, {"match": ORDERS, "key": ["detail.orderId"]}) == ["rule-unreachable"]


def test_a_preset_is_not_picked_at_but_has_to_be_reached():
    preset = {"match": GENESYS, "key": "id"}
    about = RuleContext(preset="genesys")
    assert codes({"match": ORDERS}, preset, about=about, own=1) == []
    rules = [
        Rule.parse({"name": "all", "ignore": QUIET_FIELDS}),
        Rule.parse(preset | {"name": "g"}),
    ]
    (finding,) = lint(rules, about, own=1)
    assert (finding.code, finding.subject) == ("rule-unreachable", "preset genesys")
    assert "'all'" in finding.seen


@pytest.mark.parametrize(
    ("expression", "paths"),
    [
        ("detail.a.b", ["detail.a.b"]),
        ("detail.a || id", ["detail.a", "id"]),
        ("detail.items[?a == 'b'].c | [0]", ["detail.items.c"]),
        ("detail.{x: a, y: b.c}", ["detail.a", "detail.b.c"]),
        ("join('-', [detail.a, detail.b])", ["detail.a", "detail.b"]),
        ('"detail-type"', ["detail-type"]),
        ("`1`", []),
    ],
)
def test_an_expression_ends_at_fields(expression, paths):
    assert [".".join(path) for path in paths_of(expression)] == paths
