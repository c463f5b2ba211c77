import json
from datetime import timedelta
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from oncebridge import ConfigError, Latest, Pattern, Quiet, Rule, Tier, from_object, parse
from oncebridge.events.key import ContentKey, FieldsKey, IdKey, make_key
from oncebridge.events.rules import _MOST_KINDS, DEFAULT_WINDOW, Bare, RuleSet

DAY_MS = 86_400_000


def event(detail=None, **envelope):
    whole = {"id": "e1", "detail-type": "Order", "source": "shop"}
    whole |= {name.replace("_", "-"): value for name, value in envelope.items()}
    whole = {name: value for name, value in whole.items() if value is not ...}
    return from_object(whole | {"detail": {"n": 1} if detail is None else detail})


def rule(**spec):
    return Rule.parse({"name": "the rule"} | spec)


def plan(made, one=None):
    return RuleSet([made], namespace="route").plan(one or event())


def refused(spec, where="rules[3]"):
    with pytest.raises(ConfigError) as caught:
        Rule.parse(spec, where)
    assert str(caught.value) == f"{caught.value.where}: {caught.value.message}"
    return caught.value


# --- states ---------------------------------------------------------------------------------

BOTH = {"entity": "detail.e", "state": "detail.[a, b]", "for": "1s"}


@pytest.mark.parametrize("detail", [{"e": 1}, {"e": 1, "a": None}, {"e": 1, "b": None, "c": 2}])
def test_a_state_of_missing_fields_is_missing(detail):
    found = plan(rule(quiet=BOTH), event(detail))
    assert (found.action, found.entity, found.state) == ("deduplicate", b"", b"")
    assert plan(rule(quiet=BOTH, on_missing="deliver"), event(detail)).action == "bypass"


def test_a_state_of_which_a_part_is_there_is_one():
    found = plan(rule(quiet=BOTH), event({"e": 1, "a": 2}))
    assert found.entity
    assert found.state == b"[2,null]"


@pytest.mark.parametrize("state", [{}, [], 0, "", False])
def test_an_empty_state_is_one(state):
    empty = {"entity": "detail.e", "state": "detail.s", "for": "1s"}
    found = plan(rule(quiet=empty), event({"e": 1, "s": state}))
    assert found.entity
    assert found.state == json.dumps(state).encode()


# --- every setting --------------------------------------------------------------------------


def test_a_rule_of_which_only_the_name_is_said():
    made = Rule.parse({"name": "plain"})
    assert made.name == "plain"
    assert made.match is None
    assert made.latest is made.quiet is None
    assert (made.on_missing, made.on_conflict) == ("content", "deliver")
    assert (made.on_replay, made.scope) == ("deduplicate", "source")
    (tier,) = made.tiers
    assert isinstance(tier.key, ContentKey)
    assert tier.window == DEFAULT_WINDOW == timedelta(days=6)
    assert not tier.sliding
    assert not tier.check


def test_the_window_of_the_route_is_the_default():
    assert Rule.parse({"name": "x"}, window=timedelta(hours=1)).tiers[0].window == timedelta(
        hours=1
    )
    said = Rule.parse({"name": "x", "window": "2h"}, window=timedelta(hours=1))
    assert said.tiers[0].window == timedelta(hours=2)
    tiers = [{"key": "id", "window": "5m"}, {"key": "content"}]
    both = Rule.parse({"name": "x", "tiers": tiers}, window=timedelta(hours=1))
    assert [tier.window for tier in both.tiers] == [timedelta(minutes=5), timedelta(hours=1)]


def test_every_setting_is_read():
    made = rule(
        match={"source": ["shop"]},
        key=["detail.id", "detail.state"],
        window="1h",
        sliding=True,
        max_window="2d",
        check=True,
        latest={"entity": "detail.id", "version": "detail.v"},
        quiet={"entity": "detail.id", "state": "detail.state", "for": "500ms"},
        on_missing="dead",
        on_conflict="duplicate",
        on_replay="separate",
        scope="organisation",
    )
    (tier,) = made.tiers
    assert isinstance(tier.key, FieldsKey)
    assert tier.key.expressions == ("detail.id", "detail.state")
    assert (tier.window, tier.max_window) == (timedelta(hours=1), timedelta(days=2))
    assert tier.sliding
    assert tier.check
    assert made.latest == Latest("detail.id", "detail.v")
    assert made.quiet == Quiet("detail.id", "detail.state", timedelta(milliseconds=500))
    assert (made.on_missing, made.on_conflict) == ("dead", "duplicate")
    assert (made.on_replay, made.scope) == ("separate", "organisation")
    assert made.match is not None
    assert made.match.matches({"source": "shop"})


@pytest.mark.parametrize(
    ("key", "kind", "check"),
    [("content", ContentKey, False), ("id", IdKey, True), (["detail.id"], FieldsKey, False)],
)
def test_only_ids_are_checked_unless_told(key, kind, check):
    (tier,) = rule(key=key).tiers
    assert isinstance(tier.key, kind)
    assert tier.check is check
    assert rule(key=key, check=not check).tiers[0].check is not check


def test_content_can_ignore_paths():
    (tier,) = rule(ignore=["detail.sentAt", "detail.meta.*.at"]).tiers
    assert isinstance(tier.key, ContentKey)
    assert tier.key.ignore == ("detail.sentAt", "detail.meta.*.at")


def test_a_sliding_window_has_an_end_that_is_not_before_its_own():
    assert rule(sliding=True).tiers[0].max_window == timedelta(days=30)
    assert rule(sliding=True, window="90d").tiers[0].max_window == timedelta(days=90)
    assert rule(sliding=True, window="2d", max_window="2d").tiers[0].max_window == timedelta(days=2)


def test_none_is_a_rule_without_tiers():
    assert rule(key="none").tiers == ()
    assert plan(rule(key="none")).action == "bypass"


# --- every mistake --------------------------------------------------------------------------

NAME = {"name": "x"}
LATEST = {"entity": "detail.e", "version": "detail.v"}
QUIET = {"entity": "detail.e", "state": "detail.s", "for": "1s"}


@pytest.mark.parametrize(
    ("spec", "where", "says"),
    [
        ({}, "name", "is missing"),
        ({"name": ""}, "name", "must be text"),
        ({"name": 5}, "name", "must be text"),
        ({"name": "a\0b"}, "name", "must be text"),
        (NAME | {"windw": "1s"}, "windw", "did you mean 'window'?"),
        (NAME | {"on_conflicts": "dead"}, "on_conflicts", "did you mean 'on_conflict'?"),
        (NAME | {"zzz": 1}, "zzz", "allowed: name, match, "),
        (NAME | {"window": "5 minutes"}, "window", "500ms, 30s, 5m, 36h, 6d"),
        (NAME | {"window": 5}, "window", "is not a duration"),
        (NAME | {"window": "0s"}, "window", "at least 1ms"),
        (NAME | {"window": "4000d"}, "window", "at most 3650d"),
        (NAME | {"max_window": "x"}, "max_window", "is not a duration"),
        (
            NAME | {"sliding": True, "window": "2d", "max_window": "1d"},
            "max_window",
            "must not be shorter",
        ),
        (NAME | {"sliding": "yes"}, "sliding", "must be true or false"),
        (NAME | {"sliding": 1}, "sliding", "must be true or false"),
        (NAME | {"check": None}, "check", "must be true or false"),
        (NAME | {"key": "ids"}, "key", "did you mean 'id'?"),
        (NAME | {"key": []}, "key", "a list of JMESPath"),
        (NAME | {"key": [1]}, "key[0]", "must be text"),
        (NAME | {"key": None}, "key", "list of text"),
        (NAME | {"key": {"a": 1}}, "key", "list of text"),
        (NAME | {"key": ["detail.a", "detail..b"]}, "key[1]", "is not JMESPath"),
        (NAME | {"key": ["nosuch(detail)"]}, "key[0]", "unknown function"),
        (NAME | {"key": ["'constant'"]}, "key", "has a value even if the event is empty"),
        (
            NAME | {"key": ["detail.a || 'unknown'"]},
            "key",
            "different events would get the same key",
        ),
        (NAME | {"ignore": "detail.a"}, "ignore", "must be a list"),
        (NAME | {"ignore": [1]}, "ignore[0]", "must be text"),
        (NAME | {"ignore": ["a"]}, "ignore[0]", "is not below detail"),
        (NAME | {"ignore": ["detail.a."]}, "ignore[0]", "has no name at column 10"),
        (NAME | {"key": "id", "ignore": ["a"]}, "ignore[0]", "is not below detail"),
        (
            NAME | {"key": ["detail.a"], "ignore": ["detail.b"], "on_missing": "dead"},
            "ignore",
            "the content is not used",
        ),
        (
            NAME
            | {"tiers": [{}, {"key": "id", "check": False, "ignore": ["detail.b"]}]}
            | {"on_missing": "deliver"},
            "tiers[1].ignore",
            "the content is not used",
        ),
        (NAME | {"match": {"source": "shop"}}, "match.source", "an array of values"),
        (NAME | {"match": {"source": [{"prefx": "a"}]}}, "match.source[0]", "prefx"),
        (NAME | {"tiers": []}, "tiers", "a list of"),
        (NAME | {"tiers": "id"}, "tiers", "a list of"),
        (NAME | {"tiers": ["id"]}, "tiers[0]", "must be a table"),
        (NAME | {"tiers": [{"key": "id"}, {"key": "none"}]}, "tiers[1].key", "for a rule only"),
        (NAME | {"tiers": [{"kee": "id"}]}, "tiers[0].kee", "did you mean 'key'?"),
        (NAME | {"tiers": [{"name": "x"}]}, "tiers[0].name", "no such setting"),
        (NAME | {"tiers": [{"window": "x"}]}, "tiers[0].window", "is not a duration"),
        (NAME | {"tiers": [{}], "window": "1s"}, "window", "inside a tier"),
        (NAME | {"tiers": [{}], "key": "id"}, "key", "inside a tier"),
        (NAME | {"on_missing": "drop"}, "on_missing", "one of content, deliver, dead"),
        (NAME | {"on_missing": "deliverr"}, "on_missing", "did you mean 'deliver'?"),
        (NAME | {"on_conflict": None}, "on_conflict", "one of deliver, dead, duplicate"),
        (NAME | {"on_replay": "seperate"}, "on_replay", "did you mean 'separate'?"),
        (NAME | {"scope": "organization"}, "scope", "did you mean 'organisation'?"),
        (NAME | {"scope": ["source"]}, "scope", "one of source, organisation"),
        (NAME | {"latest": "detail.v"}, "latest", "a table with entity, version"),
        (NAME | {"latest": {"entity": "detail.e"}}, "latest.version", "is missing"),
        (NAME | {"latest": LATEST | {"vers": 1}}, "latest.vers", "did you mean 'version'?"),
        (NAME | {"latest": LATEST | {"version": 1}}, "latest.version", "must be text"),
        (NAME | {"latest": LATEST | {"entity": "a b"}}, "latest.entity", "is not JMESPath"),
        (NAME | {"quiet": QUIET | {"for": "x"}}, "quiet.for", "is not a duration"),
        (NAME | {"quiet": {"for": "1s"}}, "quiet.state", "is missing"),
        (NAME | {"quiet": QUIET | {"state": "detail."}}, "quiet.state", "is not JMESPath"),
        (NAME | {"key": "none", "latest": LATEST}, "", "latest and quiet need a key"),
        (NAME | {"key": "none", "quiet": QUIET}, "", "latest and quiet need a key"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_a_mistake_is_named_with_its_place(spec, where, says):
    error = refused(spec)
    assert error.where == (f"rules[3].{where}" if where else "rules[3]")
    assert says in error.message


# Was a bug: Rule.parse takes key="none" together with settings that then mean nothing (window, ignore,
# check, sliding): a rule that was meant to deduplicate bypasses, or the setting is silently lost.
@pytest.mark.parametrize(
    "beside",
    [{"window": "1h"}, {"ignore": ["detail.a"]}, {"check": True}, {"sliding": True}],
    ids=lambda beside: next(iter(beside)),
)
def test_none_goes_with_nothing_that_needs_a_key(beside):
    error = refused(NAME | {"key": "none"} | beside)
    assert error.where in {"rules[3]", f"rules[3].{next(iter(beside))}"}


# Was a bug: max_window without sliding = true has no effect, and is taken without a word.
def test_a_longest_window_is_for_sliding_windows():
    error = refused(NAME | {"window": "1d", "max_window": "2d"})
    assert error.where == "rules[3].max_window"


# Was a bug: something that is no table raises TypeError/AttributeError or is read letter by letter.
@pytest.mark.parametrize("spec", [None, 5, "x", ["name"]])
def test_a_rule_is_a_table(spec):
    error = refused(spec)
    assert error.where == "rules[3]"


def test_latest_and_quiet_are_about_one_entity():
    made = rule(latest=LATEST, quiet=QUIET | {"entity": "detail.other"})
    with pytest.raises(ConfigError, match="different entities") as caught:
        RuleSet([made], namespace="r")
    assert "the rule" in caught.value.where


def test_rules_have_names_of_their_own():
    with pytest.raises(ConfigError, match="two rules are named 'the rule'"):
        RuleSet([rule(), rule(key="id")], namespace="r")


# --- matching -------------------------------------------------------------------------------


def test_the_first_match_wins_and_else_the_content_decides():
    rules = RuleSet(
        [
            rule(name="a", match={"source": ["shop"], "detail": {"n": [1]}}),
            rule(name="b", match={"source": ["shop"]}),
            rule(name="c", match={"source": ["shop"]}, key="id"),
        ],
        namespace="r",
    )
    assert rules.plan(event({"n": 1})).rule.name == "a"
    assert rules.plan(event({"n": 2})).rule.name == "b"
    default = rules.plan(event(source="other"))
    assert default.rule.name == "default"
    content = make_key("r", b"content", "other", "Order", (b'{"n":1}',))
    assert [part.key for part in default.parts] == [content]


def test_a_rule_without_a_pattern_matches_everything():
    rules = RuleSet([rule(name="all"), rule(name="never", key="id")], namespace="r")
    assert rules.plan(event(source="x", detail_type="y")).rule.name == "all"


MATCHES = [
    {"source": ["shop"]},
    {"source": [{"prefix": "sh"}], "detail-type": ["Order"]},
    {"detail-type": [{"anything-but": ["Order"]}]},
    {"source": [""]},
    {"source": [{"exists": False}]},
    {"detail-type": [{"exists": True}]},
    {"source": [None]},
    {"source": [{"numeric": [">", 1]}]},
]
FIELDS = st.sampled_from([..., "", "shop", "Order", None, 5, ["shop"], {"a": 1}])


# Was a bug: the cache goes by event.source and event.detail_type, which are "" for a field that is missing,
# null or no string; patterns see the difference ({"exists": false}, [null], numbers, [""], lists), so
# the first such event decides the rule for all that follow.
@settings(derandomize=True, database=None, deadline=None)
@given(
    st.lists(st.sampled_from(MATCHES), min_size=1, max_size=3),
    st.lists(st.tuples(FIELDS, FIELDS), min_size=2, max_size=6),
)
def test_remembering_the_rule_of_a_pair_changes_no_answer(matches, pairs):
    made = [rule(name=str(n), match=match) for n, match in enumerate(matches)]
    remembering = RuleSet(made, namespace="r")
    for source, detail_type in pairs:
        one = event(source=source, detail_type=detail_type)
        fresh = RuleSet(made, namespace="r").plan(one)
        assert remembering.plan(one).rule.name == fresh.rule.name


# Was a bug: the same, as small as it gets.
def test_an_event_without_a_source_is_not_one_with_an_empty_source():
    made = [rule(name="none", match={"source": [{"exists": False}]}), rule(name="rest", key="id")]
    rules = RuleSet(made, namespace="r")
    assert rules.plan(event(source="")).rule.name == "rest"
    assert rules.plan(event(source=...)).rule.name == "none"


def test_patterns_on_the_detail_are_looked_at_every_time():
    made = [rule(name="one", match={"detail": {"n": [1]}}), rule(name="rest")]
    rules = RuleSet(made, namespace="r")
    assert [rules.plan(event({"n": n})).rule.name for n in (2, 1, 2)] == ["rest", "one", "rest"]


def test_what_is_remembered_of_a_pair_is_of_that_pair_only():
    rules = RuleSet([rule(match={"detail": {"n": [1]}}, ignore=["detail.t"])], namespace="r")
    several = [
        event({"n": n, "t": t}, source=source)
        for n, t, source in product([1, 2], ["x", "y"], ["s", "aws.partner/s"])
    ]
    alone = [RuleSet(rules.rules, namespace="r").plan(each).key for each in several]
    assert [rules.plan(each).key for each in several] == alone
    assert [rules.plan(each).key for each in several] == alone
    assert len(set(alone)) == 6


def test_many_sources_do_not_fill_the_memory():
    rules = RuleSet([rule(match={"source": [{"prefix": "s"}]})], namespace="r")
    one = event()
    for n in range(_MOST_KINDS):
        rules._found[f"x{n}", ""] = rules._default.plan
    assert rules.plan(one).rule.name == "the rule"
    assert len(rules._found) == 1


BARE = Bare(Pattern.compile({"detail": {"topic": [{"prefix": "t."}]}}), members=("body",))


def bare(**detail):
    return parse(json.dumps(detail).encode(), bare=True)


def test_a_rule_may_take_details_without_an_envelope_by_other_marks():
    made = [
        replace(rule(name="shop", match={"source": ["shop"]}), bare=BARE),
        rule(name="rest", match={"detail": {"topic": [{"exists": True}]}}),
    ]
    rules = RuleSet(made, namespace="r")
    assert rules.plan(bare(topic="t.1", body={"n": 1})).rule.name == "shop"
    assert rules.plan(bare(topic="x.1", body={"n": 1})).rule.name == "rest"
    assert rules.plan(bare(topic=5, body={"n": 1})).rule.name == "rest"
    assert rules.plan(bare(body={"n": 1})).rule.name == "default"
    for nothing in ({}, {"body": None}, {"body": {"n": None}}):
        assert rules.plan(bare(topic="t.1", **nothing)).rule.name == "rest"


def test_those_marks_are_for_nothing_that_has_an_envelope():
    made = replace(rule(name="shop", match={"source": ["shop"]}), bare=BARE)
    rules = RuleSet([made], namespace="r")
    detail = {"topic": "t.1", "body": {"n": 1}}
    for source in ("other", "", ..., None):
        assert rules.plan(event(detail, source=source)).rule.name == "default"
    assert rules.plan(bare(**detail)).rule.name == "shop"
    assert rules.plan(event(detail)).rule.name == "shop"


def test_a_rule_for_bare_details_is_remembered_by_source_and_type_as_any():
    rules = RuleSet([replace(rule(match={"source": ["shop"]}), bare=BARE)], namespace="r")
    rules.plan(bare(topic="t.1", body={"n": 1}))
    assert not rules._found
    rules.plan(event())
    assert list(rules._found) == [("shop", "Order")]


# --- keys -----------------------------------------------------------------------------------


def test_an_empty_detail_falls_to_the_id_and_without_one_to_the_dead():
    one, two = plan(rule(), event({})), plan(rule(), event({}, id="e2"))
    assert one.action == two.action == "deduplicate"
    assert one.key != two.key
    nothing = plan(rule(), event({}, id=...))
    assert (nothing.action, nothing.parts) == ("dead", ())
    assert "missing" in nothing.message


@pytest.mark.parametrize("id_", [..., None, "", 7, ["a"]])
@pytest.mark.parametrize("key", ["content", "id", ["detail.x"]])
def test_what_has_neither_content_nor_id_is_dead(key, id_):
    assert plan(rule(key=key), event({}, id=id_)).action == "dead"


@pytest.mark.parametrize("detail", [{"at": 1, "n": None}, {"at": 2, "n": {"m": []}}])
def test_a_detail_that_says_nothing_falls_to_the_id(detail):
    made = rule(ignore=["detail.at"])
    assert plan(made, event(detail)).key == plan(rule(key="id")).key
    assert plan(made, event(detail)).key != plan(made, event(detail, id="e2")).key
    assert plan(made, event(detail, id=...)).action == "dead"


def test_a_detail_of_which_everything_is_ignored_falls_to_the_id():
    made = rule(ignore=["detail.n"])
    assert plan(made).key != plan(made, event(id="e2")).key
    assert plan(made, event(id=...)).action == "dead"


@pytest.mark.parametrize("key", ["content", "id", ["detail.x"]])
@settings(derandomize=True, database=None, deadline=None)
@given(
    st.dictionaries(st.sampled_from("nxy"), st.none() | st.integers(0, 3)),
    st.dictionaries(st.sampled_from("nxy"), st.none() | st.integers(0, 3)),
)
def test_no_two_events_meet_under_a_constant(key, this, that):
    one, two = (plan(rule(key=key), event(detail, id=...)) for detail in (this, that))
    same_field = isinstance(key, list) and this.get("x") == that.get("x") is not None
    if one.parts and two.parts and one.key == two.key:
        assert this == that or same_field


def test_a_missing_field_falls_to_the_content_of_the_rule():
    made = rule(key=["detail.x"])
    assert plan(made).key == plan(rule(), event()).key
    assert plan(made, event({"x": 0})).key != plan(made, event({"x": False})).key


def test_the_fallback_ignores_what_another_tier_ignores():
    made = rule(tiers=[{"key": ["detail.x"]}, {"key": "content", "ignore": ["detail.at"]}])
    assert plan(made, event({"n": 1, "at": 1})).parts == plan(made, event({"n": 1, "at": 2})).parts


def test_beside_fields_ignore_is_about_what_is_compared():
    made = rule(key=["detail.x"], check=True, ignore=["detail.at"])
    first, again, other = (
        plan(made, event({"x": 1, "n": n, "at": at})).parts[0] for n, at in ((1, 1), (1, 2), (2, 1))
    )
    assert first == again
    assert first.key == other.key
    assert first.hash != other.hash
    assert first.key == plan(rule(key=["detail.x"]), event({"x": 1})).key


def test_beside_fields_ignore_is_about_what_stands_in_for_them():
    made = rule(key=["detail.x"], ignore=["detail.at"])
    first, again, other = (
        plan(made, event({"n": n, "at": at})) for n, at in ((1, 1), (1, 2), (2, 1))
    )
    assert first.key == again.key == plan(rule(ignore=["detail.at"]), event({"n": 1})).key
    assert first.key != other.key


def test_beside_an_id_ignore_is_about_what_is_compared():
    made = rule(key="id", ignore=["detail.at"])
    assert plan(made, event({"n": 1, "at": 1})).parts == plan(made, event({"n": 1, "at": 2})).parts
    assert plan(made, event({"n": 1})).parts != plan(made, event({"n": 2})).parts


def test_every_tier_compares_what_counts_for_it():
    tiers = [
        {"key": "id", "ignore": ["detail.a"]},
        {"key": ["detail.x"], "check": True, "ignore": ["detail.b"]},
        {"key": "content", "ignore": ["detail.c"]},
    ]
    made = rule(tiers=tiers)
    details = [{"x": 1, "n": 1, **more} for more in ({}, {"a": 1}, {"b": 1})]
    none, a, b = (plan(made, event(detail)).parts for detail in details)
    assert [one == other for one, other in zip(none, a, strict=True)] == [True, False, False]
    assert [one == other for one, other in zip(none, b, strict=True)] == [False, True, False]


def test_a_tier_that_ignores_nothing_compares_what_the_content_of_the_rule_is():
    made = rule(tiers=[{"key": "id"}, {"key": "content", "ignore": ["detail.at"]}])
    assert made.content_of(made.tiers[0]) is made.tiers[1].key
    alone = rule(key="id")
    assert alone.content_of(alone.tiers[0]).ignore == ()


def test_what_most_rules_ignore_is_taken_apart_once():
    often = ["detail.at", "detail.trace"]
    rules = [
        rule(name="a", ignore=["detail.sentAt"]),
        rule(name="b", ignore=often),
        rule(name="c", key=["detail.x"], check=True, ignore=often),
        rule(name="d", ignore=["detail.deep.at"]),
    ]
    assert RuleSet(rules, namespace="r").apart == ("at", "trace")
    assert RuleSet(rules[:2], namespace="r").apart == ("sentAt",)
    assert RuleSet([rule()], namespace="r").apart == ()


def test_rules_can_keep_one_order_together():
    one = event({"e": 7})
    made = [Rule(name=name, entity="detail.e", together="all") for name in ("a", "b")]
    first, second = (RuleSet([r], namespace="n", ordered=True, about=True).plan(one) for r in made)
    assert first.entity == second.entity != b""
    assert first.about == second.about != b""
    alone = RuleSet([Rule(name="a", entity="detail.e")], namespace="n", ordered=True).plan(one)
    assert alone.entity != first.entity


def test_tiers_come_in_their_order_and_the_last_identifies():
    made = rule(tiers=[{"key": "id", "window": "5m"}, {"key": "content", "window": "6d"}])
    found = plan(made)
    assert [span.window_ms for span in found.spans] == [300_000, 6 * DAY_MS]
    assert found.keep_ms == 6 * DAY_MS
    assert found.key == found.parts[-1].key
    assert [bool(part.hash) for part in found.parts] == [True, False]


def test_tiers_that_fall_together_count_once_and_as_the_last():
    made = rule(tiers=[{"key": "id", "window": "5m"}, {"key": "content", "window": "6d"}])
    found = plan(made, event(id=...))
    assert len(found.parts) == len(found.spans) == 1
    assert found.spans[0].window_ms == 6 * DAY_MS


def test_a_first_tier_that_falls_back_to_the_last_does_not_take_its_place():
    made = rule(tiers=[{"key": ["detail.x"]}, {"key": "id"}, {"key": "content"}])
    by_id, by_content = plan(made).parts
    assert by_content.key == plan(rule()).key
    assert by_id.key == plan(rule(key="id")).key


def test_sliding_windows_tell_the_store_how_far():
    found = plan(rule(window="1h", sliding=True, max_window="2h"))
    assert found.parts[0].slide_ms == 3_600_000
    assert (found.spans[0].window_ms, found.spans[0].hard_ms) == (3_600_000, 7_200_000)
    fixed = plan(rule(window="1h"))
    assert (fixed.parts[0].slide_ms, fixed.spans[0].hard_ms) == (0, 0)


def test_the_short_way_and_the_long_way_agree_about_the_key():
    fast = plan(rule())
    latest = {"entity": "detail.n", "version": "detail.n"}
    slow = plan(rule(latest=latest))
    assert fast.parts == slow.parts


def test_namespaces_and_rules_make_keys_and_registers_of_their_own():
    made = rule(latest=LATEST)
    one = event({"e": 1, "v": 1})
    here = RuleSet([made], namespace="a").plan(one)
    there = RuleSet([made], namespace="b").plan(one)
    assert here.key != there.key
    assert here.entity != there.entity
    other = RuleSet([rule(name="other", latest=LATEST)], namespace="a").plan(one)
    assert other.key == here.key
    assert other.entity != here.entity
    assert here.entity != here.key


def test_a_route_cannot_be_mistaken_for_the_replay_of_another():
    separate = rule(on_replay="separate")
    replayed = RuleSet([separate], namespace="a").plan(event(replay_name="x"))
    again = RuleSet([separate], namespace="a").plan(event())
    assert replayed.key != again.key


@pytest.mark.parametrize(
    ("value", "version"),
    [
        (5, ("number", 5)),
        (5.5, ("number", 5.5)),
        (10**30, ("number", 10**30)),
        ("1970-01-01T00:00:01Z", ("instant", 1_000_000)),
        ("1970-01-01T01:00:01.000002+01:00", ("instant", 1_000_002)),
        ("1970-01-01T00:00:01", ("instant", 1_000_000)),
        ("1969-12-31T23:59:59Z", ("instant", -1_000_000)),
        ("0001-01-01T00:00:00+14:00", ("instant", -62_135_647_200_000_000)),
        ("9999-12-31T23:59:59-14:00", ("instant", 253_402_351_199_000_000)),
    ],
)
def test_versions(value, version):
    assert plan(rule(latest=LATEST), event({"e": 1, "v": value})).version == version


def test_versions_that_a_double_rounds_alike_are_one_so_that_neither_is_stale():
    made = rule(latest=LATEST)
    texts = ("1700000000.12345678901", "1700000000.12345678902")
    raws = [f'{{"id":"1","detail":{{"e":1,"v":{text}}}}}'.encode() for text in texts]
    versions = [plan(made, parse(raw)).version for raw in raws]
    assert versions == [("number", 1700000000.123456789)] * 2
    assert type(versions[0][1]) is float  # which every store can keep
    whole = plan(made, parse(b'{"id":"1","detail":{"e":1,"v":9007199254740993.0}}'))
    assert whole.version == ("number", 9007199254740993)


def test_states_that_a_double_rounds_alike_are_two():
    made = rule(quiet=QUIET)
    texts = ("1.000000000000000001", "1.000000000000000002", "1.0000000000000000010")
    raws = [f'{{"id":"1","detail":{{"e":1,"s":{text}}}}}'.encode() for text in texts]
    one, other, again = (plan(made, parse(raw)).state for raw in raws)
    assert one == again != other


@pytest.mark.parametrize("value", [True, False, "x", "", [], {}, "12:30", "2025-13-01"])
def test_what_has_no_order_is_no_version(value):
    found = plan(rule(latest=LATEST, on_missing="dead"), event({"e": 1, "v": value}))
    assert found.action == "dead"


# Was a bug: digits alone are read as a date since Python 3.11 ("20250101", "2025W011"), so a counter kept as a
# text is an instant when it has eight digits and no version when it has seven: newest-wins is silently
# off for some events of the entity and on for others.
@pytest.mark.parametrize("value", ["20250101", "10000101", "2025W01", "2025W011"])
def test_a_text_of_digits_is_no_instant(value):
    found = plan(rule(latest=LATEST, on_missing="dead"), event({"e": 1, "v": value}))
    assert found.action == "dead"


@settings(derandomize=True, database=None, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=5,
    )
)
def test_planning_raises_nothing_whatever_the_event_holds(value):
    raw = json.dumps({"id": "1", "detail": {"e": value, "v": value, "s": value}}).encode()
    try:
        one = parse(raw)
    except Exception:  # noqa: BLE001 - not our concern here
        return
    made = rule(latest=LATEST, quiet=QUIET, key=["detail.s", "to_number(detail.v)"])
    assert plan(made, one).action in {"deduplicate", "dead"}


def test_a_rule_can_be_made_without_the_configuration_language():
    made = Rule(
        name="by hand",
        match=Pattern.compile({"source": ["shop"]}),
        tiers=(Tier(key=IdKey(), window=timedelta(minutes=5), check=True),),
    )
    assert plan(made).rule is made
    assert plan(made).spans[0].window_ms == 300_000
