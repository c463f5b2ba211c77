"""The suggested configuration always loads, is safe as it stands, and says why it is so."""

import json
import re
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.audit.reports import (
    DAY,
    GENESYS,
    HOUR,
    PRESENCE,
    SHOP,
    TOPIC,
    cause,
    empty,
    example,
    gaps,
    report,
    study,
    suspicion,
    tally,
)

from oncebridge.audit.suggest import Suggestion, suggest
from oncebridge.base.durations import parse_duration
from oncebridge.engine.causes import Cause
from oncebridge.service.config import Setup, load


def loaded(text: str, tmp_path) -> Setup:
    file = tmp_path / "suggested.toml"
    file.write_text(text)
    return load(file, environment={})


def switched_on(suggestion: Suggestion) -> str:
    """Take what is proposed as comments too."""
    return re.sub(r"^#(?=\S)", "", suggestion.toml, flags=re.MULTILINE)


def only_genesys(**more):
    return report(sources=(tally(GENESYS),), studies=(), suspicions=(), causes=(), **more)


def only_shop(*studies, **more):
    known = {"rules": (tally("default"),), "causes": (), "suspicions": (), "gaps": None}
    return report(sources=(tally(SHOP),), studies=studies, **(known | more))


SUSPICIONS = ("double-emission", "out-of-order", "id-reused", "return")
REPORTS = {
    "ordinary": report(),
    "empty": empty(),
    "genesys": only_genesys(),
    "no gaps": only_genesys(gaps=None),
    "shop": only_shop(study()),
    "shop, suspected": only_shop(
        study(entity="detail.orderId"),
        suspicions=tuple(suspicion(kind, 3, example(source=SHOP)) for kind in SUSPICIONS),
    ),
    "genesys, suspected": report(suspicions=tuple(suspicion(kind) for kind in SUSPICIONS)),
    "no type": only_shop(study(detail_type="", entity="detail.orderId")),
    "odd names": only_shop(study(source='com."ex\\ample\x07\x7f', detail_type="Or\nder 🙂")),
    "odd paths": only_shop(study(volatile=('detail."sent at"', "detail.items.*.at"))),
    "no id": only_shop(study(identifying=None)),
    "many": only_shop(
        *[study(detail_type=f"T{n}", identifying=f"detail.id{n}") for n in range(40)]
    ),
    "own rules": report(rules=(tally("shop Order"), tally("my own\x1b[31m"), tally("default"))),
}


@pytest.mark.parametrize("name", REPORTS)
def test_every_suggestion_loads_as_it_stands_and_with_all_of_it_switched_on(name, tmp_path):
    suggestion = suggest(REPORTS[name])
    loaded(suggestion.toml, tmp_path)
    loaded(switched_on(suggestion), tmp_path)
    assert all(reason.isprintable() for reason in suggestion.reasons)


@given(
    st.lists(
        st.builds(
            study,
            source=st.text(max_size=30),
            detail_type=st.text(max_size=30),
            volatile=st.lists(st.text(max_size=20), max_size=3).map(tuple),
            identifying=st.none() | st.text(max_size=20),
            entity=st.none() | st.text(max_size=20),
        ),
        max_size=4,
    ),
    st.sampled_from(SUSPICIONS),
)
def test_whatever_senders_write_the_suggestion_loads(tmp_path_factory, studies, kind):
    found = suspicion(
        kind, 2, *[example(source=s.source, detail_type=s.detail_type) for s in studies]
    )
    suggestion = suggest(only_shop(*studies, suspicions=(found,)))
    tmp_path = tmp_path_factory.getbasetemp()
    loaded(suggestion.toml, tmp_path)
    loaded(switched_on(suggestion), tmp_path)


def test_the_preset_is_for_genesys_only():
    assert tomllib.loads(suggest(only_genesys()).toml)["preset"] == "genesys"
    assert "preset" not in tomllib.loads(suggest(only_shop(study())).toml)


def test_the_preset_is_found_by_the_rule_that_decided_where_the_source_is_not_among_the_noisiest():
    quiet = report(sources=(tally(SHOP),), rules=(tally("genesys snapshots", repeats=0),))
    assert tomllib.loads(suggest(quiet).toml)["preset"] == "genesys"


@pytest.mark.parametrize(
    ("longest", "window", "suggested"),
    [
        (2 * HOUR, 6 * DAY, "6d"),
        (3 * DAY, 6 * DAY, "6d"),
        (5 * DAY, 6 * DAY, "12d"),  # near the window, so there may be longer ones
        (5 * DAY, 30 * DAY, "8d"),
        (20 * DAY, 90 * DAY, "30d"),
        (4 * 60_000, 5 * 60_000, "6d"),
    ],
)
def test_the_window_leaves_room_behind_the_longest_gap(longest, window, suggested):
    found = suggest(only_genesys(gaps=gaps(1, longest=longest), window_ms=window))
    assert tomllib.loads(found.toml)["window"] == suggested
    assert any(reason.startswith(f'window = "{suggested}"') for reason in found.reasons)


def test_a_longer_window_says_why(tmp_path):
    found = suggest(only_genesys(gaps=gaps(1, longest=5 * DAY), window_ms=6 * DAY))
    (why,) = [reason for reason in found.reasons if reason.startswith("window")]
    assert "the longest gap is 5 d" in why
    assert loaded(found.toml, tmp_path).config.window == parse_duration("12d", "")


def test_a_rule_compares_the_content_beside_the_field_that_identifies(tmp_path):
    (route,) = loaded(suggest(only_shop(study())).toml, tmp_path).routes
    (rule,) = route.rules
    (tier,) = rule.tiers
    assert tier.check
    assert tomllib.loads(suggest(only_shop(study())).toml)["rules"] == [
        {
            "name": "shop Order",
            "match": {"source": [SHOP], "detail-type": ["Order"]},
            "key": ["detail.orderId"],
            "check": True,
            "ignore": ["detail.sentAt"],
        }
    ]


def test_without_a_field_that_identifies_a_rule_is_only_proposed():
    found = suggest(only_shop(study(identifying=None)))
    assert "rules" not in tomllib.loads(found.toml)
    assert tomllib.loads(switched_on(found))["rules"][0]["ignore"] == ["detail.sentAt"]
    assert any("count as different events" in reason for reason in found.reasons)


def test_kinds_that_are_alike_share_a_rule():
    found = suggest(only_shop(study(detail_type="Order"), study(detail_type="Refund")))
    (rule,) = tomllib.loads(found.toml)["rules"]
    assert rule["match"]["detail-type"] == ["Order", "Refund"]
    assert rule["name"] == "shop"


def test_more_kinds_than_anybody_reads_are_counted():
    found = suggest(REPORTS["many"])
    assert len(tomllib.loads(found.toml)["rules"]) == 20
    assert any(reason.startswith("20 more kinds") for reason in found.reasons)


def test_names_of_rules_are_given_once_also_beside_the_users_own():
    found = suggest(REPORTS["own rules"])
    assert [rule["name"] for rule in tomllib.loads(found.toml)["rules"]] == ["shop Order 2"]
    (kept,) = [reason for reason in found.reasons if "not included here" in reason]
    assert "shop Order" in kept
    assert "\\x1b[31m" in kept


def proposed(kind: str, *examples) -> list[dict]:
    found = suggest(report(studies=(), suspicions=(suspicion(kind, 41, *examples),)))
    assert "rules" not in tomllib.loads(found.toml)
    return tomllib.loads(switched_on(found)).get("rules", [])


def test_what_may_lose_something_is_a_comment():
    (rule,) = proposed("double-emission")
    assert rule["quiet"]["state"] == "detail.eventBody.presenceDefinition"
    assert rule["match"]["detail-type"] == [PRESENCE]
    (rule,) = proposed("out-of-order")
    assert rule["latest"]["entity"] == "detail.topicName"


def test_newest_wins_is_for_states_and_never_for_events_of_a_conversation():
    (rule,) = proposed("out-of-order", example(), example(detail_type=PRESENCE))
    assert rule["match"]["detail-type"] == [PRESENCE]
    assert proposed("out-of-order", example()) == []


def test_no_state_is_made_up_where_nobody_knows_it():
    assert proposed("double-emission", example(detail_type=TOPIC)) == []
    found = only_shop(
        study(entity="detail.orderId"),
        suspicions=(suspicion("double-emission", 3, example(source=SHOP)),),
    )
    assert "quiet =" not in suggest(found).toml


def test_the_newest_of_others_is_told_by_when_it_was_published():
    found = suggest(
        only_shop(
            study(entity="detail.orderId", volatile=("detail.attempt",)),
            suspicions=(suspicion("out-of-order", 3, example(source=SHOP)),),
        )
    )
    (rule,) = [one for one in tomllib.loads(switched_on(found))["rules"] if "latest" in one]
    assert rule["latest"] == {"entity": "detail.orderId", "version": "time"}


@pytest.mark.parametrize(
    "odd", ["\x9b31m", "\x85", "\u2028", "\u202e", "\x7f", "\x1b[2J", "\U000e0001"]
)
def test_nothing_that_a_terminal_obeys_is_in_a_suggestion(odd, tmp_path):
    found = suggest(
        only_shop(
            study(
                source=f"com.{odd}",
                detail_type=f"T{odd}",
                identifying=f"detail.{json.dumps(f'a{odd}', ensure_ascii=False)}",
                entity=f"detail.{json.dumps(f'b{odd}', ensure_ascii=False)}",
                volatile=(f"detail.{json.dumps(f'c{odd}', ensure_ascii=False)}",),
            )
        )
    )
    assert all(line.isprintable() for line in found.toml.split("\n"))
    (rule,) = tomllib.loads(found.toml)["rules"]
    assert rule["match"] == {"source": [f"com.{odd}"], "detail-type": [f"T{odd}"]}


def test_the_quiet_time_is_that_of_the_audit():
    found = suggest(report(), quiet=parse_duration("2s", ""))
    rules = [rule for rule in tomllib.loads(switched_on(found))["rules"] if "quiet" in rule]
    assert {rule["quiet"]["for"] for rule in rules} == {"2s"}


def test_two_integrations_are_one_source_and_better_put_right():
    found = suggest(report(causes=(cause(Cause.SECOND_INTEGRATION, 400),)))
    assert tomllib.loads(switched_on(found))["genesys"] == {"scope": "source"}
    assert any("topic filtering" in reason for reason in found.reasons)


def test_a_storm_of_redeliveries_is_named_and_a_few_are_not():
    def names_it(count: int) -> bool:
        found = suggest(report(causes=(cause(Cause.REDELIVERY, count),)))
        return any("visibility timeout" in reason for reason in found.reasons)

    assert names_it(5000)
    assert not names_it(50)


def test_replays_come_with_what_to_do_about_them():
    found = suggest(report(causes=(cause(Cause.REPLAY, 7),)))
    assert any('on_replay = "separate"' in reason for reason in found.reasons)


def test_a_report_without_times_has_the_default_window():
    found = suggest(replace(report(), gaps=None))
    assert tomllib.loads(found.toml)["window"] == "6d"
