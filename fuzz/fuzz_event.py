"""Reading an event: the quick reader and the slow one agree, whatever the bytes."""

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))

with atheris.instrument_imports(include=["oncebridge", "json"]):
    from tests.fuzz.slow_reader import Refused, exactly, read_slowly

    from oncebridge.events.canonical import canonical
    from oncebridge.events.event import REASONS, Unreadable, read
    from oncebridge.events.rules import Rule, RuleSet

CONTENT = RuleSet([], namespace="fuzz")
FIELDS = RuleSet(
    [
        Rule.parse({"name": "fields", "key": ["detail.a", "detail.b[0]", "length(detail.c)"]}),
        Rule.parse(
            {
                "name": "latest",
                "key": "id",
                "latest": {"entity": "detail.a", "version": "detail.b"},
            }
        ),
    ],
    namespace="fuzz",
)


def look(raw: bytes) -> None:
    found = read(raw)
    assert found.raw == raw
    try:
        expected = read_slowly(raw)
    except Refused:
        assert isinstance(found, Unreadable)
        assert found.reason in REASONS
        return
    assert not isinstance(found, Unreadable), found.reason
    assert exactly(found.detail) == exactly(expected)
    assert found.canonical == read(raw, apart=("a", "b")).canonical == canonical(expected)
    for rules in (CONTENT, FIELDS):
        plan = rules.plan(found)
        assert all(len(part.key) > 16 for part in plan.parts)


if __name__ == "__main__":
    atheris.Setup(sys.argv, look)
    atheris.Fuzz()
