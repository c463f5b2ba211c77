"""The fingerprint of rules: equal where the keys are equal, and different where they are not."""

import subprocess
import sys
from datetime import timedelta

import pytest

from oncebridge.events import key, rules
from oncebridge.events.rules import Rule, RuleSet
from oncebridge.genesys.preset import genesys_rules
from oncebridge.service.config import load

BASE = {
    "name": "orders",
    "match": {
        "source": ["com.example.shop"],
        "detail": {"kind": ["order"], "n": [{"exists": True}]},
    },
    "key": ["detail.orderId", "detail.status"],
}


def of(*specs, ordered=False, route="crm", **more):
    made = [Rule.parse(spec) for spec in specs]
    return RuleSet(made, namespace=route, ordered=ordered, **more).key_fingerprint()


def test_it_is_short_and_the_same_whenever_it_is_asked_for():
    assert of(BASE) == of(BASE)
    assert len(of(BASE)) == 12
    assert of() == RuleSet([], namespace="other").key_fingerprint()


def test_it_is_the_same_in_another_process_with_another_hash_seed():
    text = (
        "from oncebridge.events.rules import Rule, RuleSet\n"
        "from oncebridge.genesys.preset import genesys_rules\n"
        f"rules = [Rule.parse({BASE!r}), *genesys_rules()]\n"
        "print(RuleSet(rules, namespace='crm').key_fingerprint())\n"
    )
    here = RuleSet([Rule.parse(BASE), *genesys_rules()], namespace="crm").key_fingerprint()
    for seed in ("1", "2"):
        ran = subprocess.run(
            [sys.executable, "-c", text],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        )
        assert ran.stdout.decode().strip() == here


@pytest.mark.parametrize(
    "other",
    [
        {**BASE, "match": {"detail": {"n": [{"exists": True}], "kind": ["order"]}, "source": BASE["match"]["source"]}},
        {**BASE, "name": "another name"},
        {**BASE, "window": "1h"},
        {**BASE, "on_conflict": "dead"},
        {**BASE, "sliding": True},
        {**BASE, "entity": "detail.orderId"},
    ],
    ids=["order of members", "name", "window", "on_conflict", "sliding", "entity without order"],
)  # fmt: skip
def test_what_changes_no_key_does_not_change_it(other):
    assert of(other) == of(BASE)


@pytest.mark.parametrize(
    "other",
    [
        {**BASE, "key": ["detail.orderId"]},
        {**BASE, "key": ["detail.status", "detail.orderId"]},
        {**BASE, "key": "content"},
        {**BASE, "key": "id"},
        {**BASE, "key": "none"},
        {"name": "orders", "match": BASE["match"], "discard": True},
        {**BASE, "match": {"source": ["com.example.shop"]}},
        {**BASE, "check": True},
        {**BASE, "ignore": ["detail.sentAt"]},
        {**BASE, "on_missing": "dead"},
        {**BASE, "on_replay": "separate"},
        {**BASE, "scope": "organisation"},
        {**BASE, "latest": {"entity": "detail.orderId", "version": "detail.v"}},
        {**BASE, "quiet": {"entity": "detail.orderId", "state": "detail.s", "for": "1s"}},
    ],
)
def test_what_changes_a_key_changes_it(other):
    assert of(other) != of(BASE)


def test_the_order_of_rules_counts_and_that_of_ignored_paths_does_not():
    other = {"name": "all", "key": "id"}
    assert of(BASE, other) != of(other, BASE)
    content = {"name": "all", "ignore": ["detail.a", "detail.b"]}
    assert of(content) == of({**content, "ignore": ["detail.b", "detail.a"]})
    assert of(content) != of({**content, "ignore": ["detail.b"]})


def test_the_register_of_an_entity_counts_where_there_is_one():
    kept = {**BASE, "latest": {"entity": "detail.orderId", "version": "detail.v"}}
    assert of(kept) != of({**kept, "name": "another name"}), (
        "the name is part of the register's key"
    )
    assert of(kept) != of({**kept, "latest": {"entity": "detail.orderId", "version": "detail.w"}})
    entity = {**BASE, "entity": "detail.orderId"}
    assert of(entity, ordered=True) != of(BASE, ordered=True)


def test_the_version_of_the_keys_counts(monkeypatch):
    before = of(BASE)
    monkeypatch.setattr(rules, "KEY_VERSION", key.KEY_VERSION + 1)
    assert of(BASE) != before


def test_numbers_of_a_pattern_count_in_full(tmp_path):
    def with_number(text):
        file = tmp_path / "oncebridge.toml"
        file.write_text(
            'store = "memory:"\ndead = "memory:"\nsink = "-"\n'
            f'[[rules]]\nname = "n"\nmatch = {{ detail = {{ n = [{text}] }} }}\n'
        )
        setup = load(file, environment={})
        return RuleSet(setup.routes[0].rules, namespace="").key_fingerprint()

    assert with_number("1") == with_number("1.0")
    assert with_number("1") != with_number("2")


def test_the_genesys_preset_counts_with_all_that_it_is_made_of():
    def of_preset(made):
        return RuleSet(made, namespace="").key_fingerprint()

    preset = genesys_rules()
    assert of_preset(preset) == of_preset(genesys_rules(window=timedelta(days=1)))
    assert of_preset(preset) != of_preset(preset[1:])
    assert of_preset(preset) != of_preset([])
