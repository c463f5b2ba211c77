"""
The keys of the sample events, as they were when the first records were written.

Whoever stored them has no others. A change here is a change of `KEY_VERSION`.
"""

import json
from pathlib import Path

import pytest

from oncebridge import Rule, parse
from oncebridge.events.rules import RuleSet
from oncebridge.genesys.preset import genesys_rules

EVENTS = Path(__file__).parents[1] / "events"
KNOWN = json.loads(Path(__file__).with_name("keys.json").read_bytes())
IGNORE = {"name": "r", "ignore": ["detail.timestamp", "detail.metadata"], "scope": "organisation"}
RULES = {
    "content": RuleSet([], namespace="default"),
    "ignore": RuleSet([Rule.parse(IGNORE)], namespace="default"),
    "path": RuleSet(
        [Rule.parse({"name": "r", "ignore": ["detail.*.eventTime"]})], namespace="default"
    ),
    "fields": RuleSet(
        [Rule.parse({"name": "r", "key": ["detail.topicName", "source"], "check": True})],
        namespace="default",
    ),
    "id": RuleSet([Rule.parse({"name": "r", "key": "id"})], namespace="default"),
    "preset": RuleSet(genesys_rules(), namespace="n", ordered=True, about=True),
}


def told(rules, raw):
    """Give all that is hashed for an event."""
    plan = rules.plan(parse(raw, apart=rules.apart))
    hashed = [[part.key.hex(), part.hash.hex()] for part in plan.parts]
    return [*hashed, [plan.entity.hex(), plan.about.hex()]]


@pytest.mark.parametrize("name", RULES)
def test_stored_keys_are_found_again(name):
    samples = sorted(EVENTS.glob("*.json")) + sorted(EVENTS.glob("variants/*.json"))
    found = {}
    for path in samples:
        raw = path.read_bytes()
        found[path.stem] = told(RULES[name], raw)
        compact = json.dumps(json.loads(raw), separators=(",", ":")).encode()
        assert told(RULES[name], compact) == found[path.stem]
    assert found == KNOWN[name]
