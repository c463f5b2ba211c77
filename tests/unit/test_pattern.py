"""
The pattern language, checked three ways.

Tables of cases say what AWS documents or its engine does. Properties say what must
hold for every value. And a slow model, written from event-ruler's description of
itself (flatten the event, then pick one leaf per path so that no array is used at two
of its places), must agree with the compiled form on anything Hypothesis can think of.
"""

import copy
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from oncebridge.errors import ConfigError
from oncebridge.events.exact_float import ExactFloat
from oncebridge.events.pattern import Pattern

EVENT = {
    "version": "0",
    "id": "ddddd4-aaaa-7777-4444-345dd43cc333",
    "detail-type": "EC2 Instance State-change Notification",
    "source": "aws.ec2",
    "account": "012345679012",
    "time": "2017-10-02T16:24:49Z",
    "region": "us-east-1",
    "resources": ["arn:aws:ec2:us-east-1:123456789012:instance/i-000000aaaaaa00000"],
    "detail": {
        "c-count": 5,
        "d-count": 3,
        "x-limit": 301.8,
        "source-ip": "10.0.0.33",
        "instance-id": "i-000000aaaaaa00000",
        "state": "running",
    },
}
MISSING = object()
EXACT = ExactFloat("1.000000000000000001")


def matches(spec: Any, event: Any) -> bool:
    return Pattern.compile(spec).matches(event)


def value_matches(values: Any, value: Any) -> bool:
    return matches({"x": values}, {} if value is MISSING else {"x": value})


def table(*rows: tuple[Any, Any, bool]) -> Any:
    """Make one case of each row: the pattern's array, the event's value, the answer."""

    def show(value: Any) -> str:
        return "missing" if value is MISSING else json.dumps(value, ensure_ascii=True)

    cases = [
        pytest.param(*row, id=f"{show(row[0])} {'fits' if row[2] else 'declines'} {show(row[1])}")
        for row in rows
    ]
    return pytest.mark.parametrize(("values", "value", "expected"), cases)


# Values -------------------------------------------------------------------------------


@table(
    (["a"], "a", True),
    (["a"], "A", False),
    (["a"], "ab", False),
    (["a", "b"], "b", True),
    ([""], "", True),
    ([""], None, False),
    ([None], None, True),
    ([None], "", False),
    ([None], "null", False),
    ([None], MISSING, False),
    ([None], 0, False),
    ([True], True, True),
    ([True], 1, False),
    ([True], "true", False),
    ([False], False, True),
    ([False], 0, False),
    ([False], None, False),
    ([1], True, False),
    ([0], False, False),
    ([300], 300, True),
    ([300], 300.0, True),
    ([300], 3.0e2, True),
    ([3.0e2], 300, True),
    ([300], 301, False),
    ([300], "300", False),
    (["300"], 300, False),
    ([0], -0.0, True),
    ([123456789012], 123456789012, True),
    ([10**30], 10**30, True),
    ([10**30], 10**30 + 1, False),
    (["a", 1, None, True], 1.0, True),
    (["a", 1, None, True], False, False),
    (["1.5"], 1.5, False),
    ([{"exactly": "a"}], "a", True),
    ([{"exactly": "a"}], "b", False),
    ([1], EXACT, False),
    ([1.0], EXACT, False),
    ([EXACT], EXACT, True),
    ([EXACT], ExactFloat("1.000000000000000002"), False),
    ([EXACT], 1, False),
    ([0], ExactFloat("1e-400"), False),
    ([{"anything-but": 1}], EXACT, True),
)
def test_an_exact_value_equals_only_its_own_kind(values, value, expected):
    assert value_matches(values, value) is expected


@table(
    (["a"], ["b", "a"], True),
    (["a", "b"], ["c", "b"], True),
    (["a"], ["b"], False),
    (["a"], [], False),
    ([None], [], False),
    ([None], [None], True),
    ([""], [], False),
    (["a"], [["b"], [["a"]]], True),
    (["a"], {"a": "a"}, False),
    (["a"], [{"a": "a"}], False),
    (["a"], [{"b": 1}, "a"], True),
    ([{"anything-but": "a"}], ["a", "b"], True),
    ([{"anything-but": "a"}], ["a", "a"], False),
    ([{"anything-but": "a"}], [], False),
    ([{"numeric": [">", 0, "<", 10]}], [100, 5], True),
    ([{"numeric": [">", 0, "<", 10]}], [100, -5], False),
)
def test_an_array_matches_when_any_item_does(values, value, expected):
    assert value_matches(values, value) is expected


@table(
    ([{"prefix": "ab"}], "abc", True),
    ([{"prefix": "ab"}], "ab", True),
    ([{"prefix": "ab"}], "a", False),
    ([{"prefix": "ab"}], "ABC", False),
    ([{"prefix": "1"}], 12, False),
    ([{"prefix": ""}], "", True),
    ([{"prefix": ""}], 12, False),
    ([{"prefix": ""}], None, False),
    ([{"prefix": ""}], MISSING, False),
    ([{"prefix": {"equals-ignore-case": "EventB"}}], "EVENTbridge", True),
    ([{"prefix": {"equals-ignore-case": "EventB"}}], "event", False),
    ([{"suffix": ".png"}], "a.png", True),
    ([{"suffix": ".png"}], ".png", True),
    ([{"suffix": ".png"}], "a.PNG", False),
    ([{"suffix": ".png"}], "a.png ", False),
    ([{"suffix": "2"}], 12, False),
    ([{"suffix": {"equals-ignore-case": ".png"}}], "a.PnG", True),
    ([{"suffix": {"equals-ignore-case": ".png"}}], "a.png\n", False),
    ([{"suffix": {"equals-ignore-case": ".png"}}], "axpng", False),
)
def test_prefix_and_suffix_look_at_strings_only(values, value, expected):
    assert value_matches(values, value) is expected


@table(
    ([{"equals-ignore-case": "alice"}], "ALICE", True),
    ([{"equals-ignore-case": "ALICE"}], "alice", True),
    ([{"equals-ignore-case": "alice"}], "alices", False),
    ([{"equals-ignore-case": "a.c"}], "abc", False),
    ([{"equals-ignore-case": ""}], "", True),
    ([{"equals-ignore-case": "alice"}], None, False),
    ([{"equals-ignore-case": "é"}], "É", True),
    ([{"equals-ignore-case": "straße"}], "STRASSE", True),
    ([{"equals-ignore-case": "strasse"}], "straße", False),
    ([{"equals-ignore-case": "k"}], "\u212a", False),
    ([{"equals-ignore-case": "1"}], 1, False),
)
def test_case_is_ignored_one_character_at_a_time(values, value, expected):
    assert value_matches(values, value) is expected


@table(
    ([{"wildcard": "dir/*.png"}], "dir/a.png", True),
    ([{"wildcard": "dir/*.png"}], "dir/.png", True),
    ([{"wildcard": "dir/*.png"}], "dir/a/b.png", True),
    ([{"wildcard": "dir/*.png"}], "dir/a.jpg", False),
    ([{"wildcard": "*"}], "", True),
    ([{"wildcard": "*"}], 1, False),
    ([{"wildcard": "*"}], None, False),
    ([{"wildcard": ""}], "", True),
    ([{"wildcard": ""}], "a", False),
    ([{"wildcard": "abc"}], "abc", True),
    ([{"wildcard": "a*b*c"}], "a-b-b-c", True),
    ([{"wildcard": "a*b*c"}], "a-c-b", False),
    ([{"wildcard": "a*a"}], "a", False),
    ([{"wildcard": "a*a"}], "aa", True),
    ([{"wildcard": "*ab*ab*"}], "ab", False),
    ([{"wildcard": "*ab*ab*"}], "xabyabz", True),
    ([{"wildcard": "*aba*ba"}], "ababa", True),
    ([{"wildcard": "*aba*aba"}], "ababa", False),
    ([{"wildcard": "a.c"}], "abc", False),
    ([{"wildcard": "a?c"}], "abc", False),
    ([{"wildcard": "a\\*c"}], "a*c", True),
    ([{"wildcard": "a\\*c"}], "abc", False),
    ([{"wildcard": "a\\\\*"}], "a\\b", True),
    ([{"wildcard": "a\\\\*"}], "a*", False),
    ([{"wildcard": "*\\**"}], "x*y", True),
    ([{"wildcard": "*\\**"}], "xy", False),
    ([{"wildcard": "a*c"}], "a\nb\nc", True),
)
def test_a_wildcard_stands_for_any_run_of_characters(values, value, expected):
    assert value_matches(values, value) is expected


@table(
    ([{"anything-but": "a"}], "b", True),
    ([{"anything-but": "a"}], "a", False),
    ([{"anything-but": "a"}], "", True),
    ([{"anything-but": "a"}], None, True),
    ([{"anything-but": "a"}], True, True),
    ([{"anything-but": "a"}], 1, True),
    ([{"anything-but": "a"}], MISSING, False),
    ([{"anything-but": "a"}], {"a": 1}, False),
    ([{"anything-but": ["a", "b"]}], "b", False),
    ([{"anything-but": ["a", "b"]}], "c", True),
    ([{"anything-but": 0}], 0.0, False),
    ([{"anything-but": 0}], False, True),
    ([{"anything-but": 0}], 1, True),
    ([{"anything-but": 0}], "0", True),
    ([{"anything-but": [1, 2]}], 2.0, False),
    ([{"anything-but": [1, 2]}], 3, True),
    ([{"anything-but": {"prefix": "in"}}], "init", False),
    ([{"anything-but": {"prefix": "in"}}], "run", True),
    ([{"anything-but": {"prefix": "in"}}], 12, True),
    ([{"anything-but": {"prefix": "in"}}], None, True),
    ([{"anything-but": {"prefix": "in"}}], MISSING, False),
    ([{"anything-but": {"prefix": ["in", "st"]}}], "stop", False),
    ([{"anything-but": {"prefix": ["in", "st"]}}], "run", True),
    ([{"anything-but": {"suffix": ".png"}}], "a.png", False),
    ([{"anything-but": {"suffix": [".png", ".jpg"]}}], "a.jpg", False),
    ([{"anything-but": {"suffix": [".png", ".jpg"]}}], "a.gif", True),
    ([{"anything-but": {"equals-ignore-case": "init"}}], "INIT", False),
    ([{"anything-but": {"equals-ignore-case": ["init", "stop"]}}], "Stop", False),
    ([{"anything-but": {"equals-ignore-case": ["init", "stop"]}}], "run", True),
    ([{"anything-but": {"wildcard": "*/lib/*"}}], "a/lib/b", False),
    ([{"anything-but": {"wildcard": "*/lib/*"}}], "a/bin/b", True),
    ([{"anything-but": {"wildcard": ["*/lib/*", "*.jar"]}}], "x.jar", False),
    ([{"anything-but": {"wildcard": ""}}], "a", True),
    ([{"anything-but": {"wildcard": ""}}], "", False),
)
def test_anything_but_needs_a_value_and_declines_the_listed_ones(values, value, expected):
    assert value_matches(values, value) is expected


@table(
    ([{"numeric": ["=", 3.018e2]}], 301.8, True),
    ([{"numeric": ["=", 1]}], True, False),
    ([{"numeric": ["=", 1]}], "1", False),
    ([{"numeric": ["=", 0]}], None, False),
    ([{"numeric": ["<", 10]}], 9.999, True),
    ([{"numeric": ["<", 10]}], 10, False),
    ([{"numeric": ["<=", 10]}], 10, True),
    ([{"numeric": [">", 10]}], 10, False),
    ([{"numeric": [">=", 10]}], 10.0, True),
    ([{"numeric": [">", 0, "<=", 5]}], 5, True),
    ([{"numeric": [">", 0, "<=", 5]}], 0, False),
    ([{"numeric": [">=", 0, "<", 5]}], 0, True),
    ([{"numeric": [">=", 0, "<", 5]}], 5, False),
    ([{"numeric": [">", 5e9]}], 6e9, True),
    ([{"numeric": [">", -1e300, "<", 1e300]}], 10**200, True),
    ([{"numeric": ["<", 1e300]}], 10**400, False),
    ([{"numeric": [">", 0]}], float("nan"), False),
    ([{"numeric": [">", 0]}], MISSING, False),
    ([{"numeric": [">", 1]}], EXACT, True),
    ([{"numeric": ["<=", 1]}], EXACT, False),
    ([{"numeric": ["=", 1]}], EXACT, False),
    ([{"numeric": [">", 1, "<", 1.0000000000000002]}], EXACT, True),
    ([{"numeric": [">", 0]}], ExactFloat("1e-400"), True),
)
def test_numeric_compares_numbers_by_value(values, value, expected):
    assert value_matches(values, value) is expected


@table(
    ([{"cidr": "10.0.0.0/24"}], "10.0.0.255", True),
    ([{"cidr": "10.0.0.0/24"}], "10.0.1.0", False),
    ([{"cidr": "10.0.0.77/24"}], "10.0.0.1", True),
    ([{"cidr": "0.0.0.0/0"}], "255.1.2.3", True),
    ([{"cidr": "10.0.0.0/31"}], "10.0.0.1", True),
    ([{"cidr": "10.0.0.0/24"}], "::ffff", False),
    ([{"cidr": "10.0.0.0/24"}], "host.example", False),
    ([{"cidr": "10.0.0.0/24"}], "", False),
    ([{"cidr": "10.0.0.0/24"}], 167772161, False),
    ([{"cidr": "2001:db8::/32"}], "2001:DB8:1::1", True),
    ([{"cidr": "2001:db8::/32"}], "2001:db9::1", False),
    ([{"cidr": "2001:db8::/32"}], "10.0.0.1", False),
    ([{"cidr": "2001:db8::/32"}], "2001:0db8:0:0:0:0:0:1", True),
    ([{"cidr": "2001:db8::/32"}], "02001:db8::1", True),
    ([{"cidr": "10.0.0.0/24"}], "::ffff:a00:1", True),
    ([{"cidr": "10.0.0.0/24"}], "010.000.0.1", True),
    ([{"cidr": "::/0"}], "::ffff:a00:1", False),
    ([{"cidr": "fe80::/10"}], "fe80::1%eth0", False),
    ([{"cidr": "::/0"}], "1::2::3", False),
    ([{"cidr": "::/0"}], ":" * 2_000_000 + "x", False),
)
def test_cidr_takes_addresses_of_its_own_family(values, value, expected):
    assert value_matches(values, value) is expected


@table(
    (["::1"], "0:0:0:0:0:0:0:1", True),
    (["0:0:0:0:0:0:0:1"], "::1", True),
    (["2001:db8::a"], "2001:0DB8::000A", True),
    (["2001:db8::a"], "2001:db8::b", False),
    (["::1", "text"], "text", True),
    (["::1"], "::1", True),
    (["::1"], "", False),
    (["10.0.0.1"], "010.0.0.001", True),
    (["10.0.0.1"], "::ffff:a00:1", True),
    (["::ffff:a00:1"], "10.0.0.1", True),
    (["10.0.0.1"], "10.0.0.2", False),
    (["10.0.0.256"], "10.0.0.256", True),
    (["10.0.0.256"], "010.0.0.256", False),
    (["::ffff:10.0.0.1"], "10.0.0.1", False),
    ([{"exactly": "::1"}], "0:0:0:0:0:0:0:1", False),
    ([{"anything-but": "::1"}], "0:0:0:0:0:0:0:1", True),
    (["::1"], ["x", "0::1"], True),
)
def test_an_address_matches_in_any_spelling(values, value, expected):
    assert value_matches(values, value) is expected


@table(
    ([{"exists": True}], "a", True),
    ([{"exists": True}], "", True),
    ([{"exists": True}], None, True),
    ([{"exists": True}], False, True),
    ([{"exists": True}], 0, True),
    ([{"exists": True}], ["a"], True),
    ([{"exists": True}], [], False),
    ([{"exists": True}], [[]], False),
    ([{"exists": True}], {}, False),
    ([{"exists": True}], {"a": 1}, False),
    ([{"exists": True}], [{"a": 1}], False),
    ([{"exists": True}], MISSING, False),
    ([{"exists": False}], MISSING, True),
    ([{"exists": False}], [], True),
    ([{"exists": False}], {}, True),
    ([{"exists": False}], {"a": 1}, True),
    ([{"exists": False}], [{"a": 1}], True),
    ([{"exists": False}], None, False),
    ([{"exists": False}], "", False),
    ([{"exists": False}], ["a"], False),
    ([{"exists": False}, "a"], MISSING, True),
    ([{"exists": False}, "a"], "a", True),
    ([{"exists": False}, "a"], "b", False),
)
def test_exists_asks_for_leaves(values, value, expected):
    assert value_matches(values, value) is expected


# Structure ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        {
            "detail-type": ["EC2 Instance State-change Notification"],
            "resources": EVENT["resources"],
            "detail": {"state": ["initializing", "running"]},
        },
        {"time": [{"prefix": "2017-10-02"}]},
        {"source": [{"suffix": "ec2"}]},
        {"source": [{"equals-ignore-case": "AWS.EC2"}]},
        {"resources": [{"wildcard": "arn:*:instance/*"}]},
        {"detail": {"x-limit": [{"anything-but": [100, 200, 300]}]}},
        {
            "time": [{"prefix": "2017-10-02"}],
            "detail": {
                "state": [{"anything-but": "initializing"}],
                "c-count": [{"numeric": [">", 0, "<=", 5]}],
                "d-count": [{"numeric": ["<", 10]}],
                "x-limit": [{"numeric": ["=", 3.018e2]}],
                "source-ip": [{"cidr": "10.0.0.0/8"}],
                "error": [{"exists": False}],
            },
        },
    ],
    ids=" ".join,
)
def test_the_documented_patterns_match_the_documented_event(spec):
    assert matches(spec, EVENT)


@pytest.mark.parametrize(
    ("spec", "event", "expected"),
    [
        ({"a": ["1"], "b": ["2"]}, {"a": "1", "b": "2", "c": "3"}, True),
        ({"a": ["1"], "b": ["2"]}, {"a": "1"}, False),
        ({"a": {"b": {"c": ["1"]}}}, {"a": {"b": {"c": "1"}}}, True),
        ({"a": {"b": ["1"]}}, {"a": "1"}, False),
        ({"a": {"b": ["1"]}}, {"a": None}, False),
        ({"a": {"b": ["1"]}}, {}, False),
        ({"a": {"b": [{"exists": False}]}}, {}, True),
        ({"a": {"b": [{"exists": False}]}}, {"a": "scalar"}, True),
        ({"a": {"b": [{"exists": False}]}}, {"a": []}, True),
        ({"a": {"b": [{"exists": False}]}}, {"a": {"b": 1}}, False),
        ({"A": ["1"]}, {"a": "1"}, False),
        ({"a.b": ["1"]}, {"a": {"b": "1"}}, True),
        ({"a.b": ["1"]}, {"a.b": "1"}, True),
        ({"a": {"b": ["1"]}}, {"a.b": "1"}, True),
        ({"a": {"b": {"c": ["1"]}}}, {"a": {"b.c": "1"}}, True),
        ({"a": {"b": {"c": ["1"]}}}, {"a.b": {"c": "1"}}, True),
        ({"a": {"b": ["1"], "c": ["2"]}}, {"a": {"b": "1"}, "a.c": "2"}, True),
        ({"a": {"b": ["1"]}}, {"a": {"b": "2"}, "a.b": "1"}, True),
        ({"a": {"b": ["2"]}}, {"a": {"b": "2"}, "a.b": "1"}, True),
        ({"a": {"b": ["1"]}}, {"a": "scalar", "a.b": "1"}, True),
        ({"a": {"b": [{"exists": False}]}}, {"a.b": "1"}, False),
        ({"a.b": ["1"]}, {"a": {"b": "2"}}, False),
        ({"a.b": ["x"], "a": {"c": ["y"]}}, {"a.b": "x", "a": [{"c": "y"}]}, True),
        ({"a.b": ["x"], "a": {"c": ["y"]}}, {"a.b": "x", "a": [{"b": "y"}, {"c": "y"}]}, True),
        ({"a": {"b": ["1"], "c": ["2"]}}, {"a": {"b": "2", "c": "2"}, "a.b": "1"}, True),
        ({"a": {"b": ["1"], "c": ["2"]}}, {"a": [{"b": "1"}, {"c": "2"}], "a.d": "1"}, False),
        (
            {"a": {"b": ["1"], "c": ["2"], "d": ["3"]}},
            {"a": [{"b": "1"}, {"c": "2"}], "a.d": "3"},
            False,
        ),
        (
            {"a": {"b": {"x": ["1"], "y": ["1"]}, "c": ["1"]}},
            {"a": [{"c": "1"}, {"b": {"x": "1"}}], "a.b": [{"x": "1"}, {"x": "1", "y": "1"}]},
            True,
        ),
        (
            {"a": {"b": ["x"], "c": [{"exists": False}]}},
            {"a.b": "x", "a": [{"c": "1"}, {"d": "1"}]},
            False,
        ),
        (
            {"a": {"b": ["x"], "c": [{"exists": False}]}},
            {"a.b": "x", "a": [{"d": "1"}]},
            True,
        ),
    ],
)
def test_every_named_field_must_match_and_a_dot_is_a_step(spec, event, expected):
    assert matches(spec, event) is expected


EMPLOYEES = [
    {"first": "John", "last": "Doe", "born": [{"year": 1970, "town": "Oslo"}]},
    {"first": "Anna", "last": "Smith", "born": [{"year": 1980}, {"town": "Oslo"}]},
    {"first": "Peter", "last": "Jones"},
]


@pytest.mark.parametrize("staff", [EMPLOYEES, [EMPLOYEES[:2], EMPLOYEES[2:]]], ids=["flat", "deep"])
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"first": ["Anna"]}, True),
        ({"first": ["Anna"], "last": ["Smith"]}, True),
        ({"first": ["Anna"], "last": ["Jones"]}, False),
        ({"first": ["Anna", "Peter"], "last": ["Jones"]}, True),
        ({"born": {"year": [1970], "town": ["Oslo"]}}, True),
        ({"born": {"year": [1980], "town": ["Oslo"]}}, False),
        ({"first": ["Anna"], "born": {"town": ["Oslo"]}}, True),
        ({"first": ["Peter"], "born": {"town": ["Oslo"]}}, False),
        ({"first": ["Peter"], "nick": [{"exists": False}]}, True),
        ({"$or": [{"first": ["Anna"]}, {"last": ["Jones"]}], "born": {"year": [1970]}}, False),
        ({"$or": [{"first": ["Anna"]}, {"last": ["Jones"]}], "born": {"year": [1980]}}, True),
    ],
)
def test_fields_below_one_array_come_from_one_item(staff, spec, expected):
    assert matches({"staff": spec}, {"staff": staff}) is expected


@pytest.mark.parametrize(
    ("spec", "items", "expected"),
    [
        ({"b": [{"exists": False}]}, [{"a": 1}, {"b": 1}], False),
        ({"b": [{"exists": False}]}, [{"a": 1}, {"c": 1}], True),
        ({"a": [1], "b": [{"exists": False}]}, [{"a": 1}, {"b": 1}], True),
        ({"a": [1], "b": [{"exists": False}]}, [{"a": 1, "b": 1}], False),
        ({"a": [{"exists": False}], "b": [1]}, [{"b": 1}, {"a": 1}], False),
        ({"a": [{"exists": False}], "b": [1]}, [{"b": 1}, {"c": 1}], True),
        ({"b": [1], "c": {"d": [{"exists": False}]}}, [{"b": 1}, {"c": {"d": 1}}], True),
        ({"a-b": [1], "a": {"c": [{"exists": False}]}}, [{"a-b": 1}, {"a": {"c": 1}}], True),
    ],
)
def test_absence_counts_in_the_item_settled_so_far(spec, items, expected):
    assert matches({"x": spec}, {"x": items}) is expected


OR = {"source": ["s"], "$or": [{"a": [1]}, {"b": [2], "c": [3]}]}


@pytest.mark.parametrize(
    ("spec", "event", "expected"),
    [
        (OR, {"source": "s", "a": 1}, True),
        (OR, {"source": "s", "b": 2, "c": 3}, True),
        (OR, {"source": "s", "b": 2}, False),
        (OR, {"source": "t", "a": 1}, False),
        ({"detail": {"$or": [{"a": [1]}, {"b": [1]}]}}, {"detail": {"b": 1}}, True),
        ({"detail": {"$or": [{"a": [1]}, {"b": [1]}]}}, {"b": 1}, False),
        (
            {"$or": [{"a": [1]}, {"b": [1], "$or": [{"c": [1]}, {"d": [1]}]}]},
            {"b": 1, "d": 1},
            True,
        ),
        ({"$or": [{"a": [1]}, {"b": [1], "$or": [{"c": [1]}, {"d": [1]}]}]}, {"b": 1}, False),
        ({"$or": [{"a": [1]}, {"a": [2]}]}, {"a": 2}, True),
        (
            {"$or": [{"x": {"a": [1]}}, {"x": {"b": [1]}}], "x": {"c": [1]}},
            {"x": {"b": 1, "c": 1}},
            True,
        ),
        ({"$or": [{"d": ["x"]}, {"e": [1]}], "d": {"a": [1]}}, {"d": ["x", {"a": 1}]}, True),
        ({"$or": {"a": [1]}}, {"$or": {"a": 1}}, True),
        ({"$or": {"a": [1]}}, {"a": 1}, False),
        ({"$or": ["a"]}, {"$or": "a"}, True),
        ({"$or": [{"numeric": [">", 0]}, {"prefix": "a"}]}, {"$or": 1}, True),
        ({"$or": [{"cidr": "10.0.0.0/24"}]}, {"$or": "10.0.0.9"}, True),
    ],
)
def test_or_joins_objects_and_is_otherwise_a_name(spec, event, expected):
    assert matches(spec, event) is expected


def test_fields_are_the_top_level_names_of_every_branch():
    pattern = Pattern.compile({"source": ["a"], "$or": [{"detail.x": ["b"]}, {"account": ["c"]}]})
    assert pattern.fields == {"source", "detail", "account"}


def test_a_pattern_keeps_the_mapping_it_came_from_and_leaves_it_alone():
    spec = {"detail": {"a": ["x", {"anything-but": ["y"]}]}, "$or": [{"b": [1]}, {"c": [2]}]}
    before = copy.deepcopy(spec)
    pattern = Pattern.compile(spec)
    pattern.matches({"detail": {"a": "x"}})
    assert pattern.spec is spec
    assert spec == before
    assert repr(spec) in repr(pattern)


# Refusals -----------------------------------------------------------------------------


def leaf(value: Any) -> dict[str, Any]:
    return {"detail": {"state": ["ok", value]}}


AT = "match.detail.state[1]"


@pytest.mark.parametrize(
    ("spec", "where", "message"),
    [
        ({}, "match", "empty object"),
        ([], "match", "an object of fields"),
        (None, "match", "an object of fields"),
        ({"detail": {}}, "match.detail", "empty object"),
        ({"detail": {"state": []}}, "match.detail.state", "empty array"),
        ({"source": "aws.ec2"}, "match.source", "expected an array of values"),
        ({"source": None}, "match.source", "found None"),
        ({"source": {"prefix": "aws"}}, "match.source.prefix", "[{'prefix': 'b'}]"),
        (leaf(["a"]), AT, "a string, number, true, false, null or operator"),
        (leaf(float("inf")), AT, "finite"),
        (leaf(float("nan")), AT, "finite"),
        (leaf({}), AT, "exactly one of anything-but, cidr"),
        (leaf({"prefix": "a", "suffix": "b"}), AT, "exactly one of"),
        (leaf({"prefxi": "a"}), AT, "did you mean 'prefix'?"),
        (leaf({"Prefix": "a"}), AT, "did you mean 'prefix'?"),
        (leaf({"anythingbut": "a"}), AT, "did you mean 'anything-but'?"),
        (leaf({"zzz": "a"}), AT, "'zzz' is not one of"),
        (leaf({"exactly": 1}), f"{AT}.exactly", "a string"),
        (leaf({"prefix": 1}), f"{AT}.prefix", "a string"),
        (leaf({"prefix": ["a"]}), f"{AT}.prefix", "a string"),
        (leaf({"prefix": {"suffix": "a"}}), f"{AT}.prefix", "equals-ignore-case"),
        (
            leaf({"prefix": {"equals-ignore-case": 1}}),
            f"{AT}.prefix.equals-ignore-case",
            "a string",
        ),
        (leaf({"suffix": None}), f"{AT}.suffix", "a string"),
        (leaf({"suffix": {}}), f"{AT}.suffix", "exactly one of"),
        (leaf({"equals-ignore-case": ["a"]}), f"{AT}.equals-ignore-case", "a string"),
        (leaf({"wildcard": 5}), f"{AT}.wildcard", "a string"),
        (leaf({"wildcard": ["a*"]}), f"{AT}.wildcard", "a string"),
        (leaf({"wildcard": "a**b"}), f"{AT}.wildcard", "two wildcards in a row"),
        (leaf({"wildcard": "**"}), f"{AT}.wildcard", "two wildcards in a row"),
        (leaf({"wildcard": "a\\b"}), f"{AT}.wildcard", "backslash"),
        (leaf({"wildcard": "a\\"}), f"{AT}.wildcard", "backslash"),
        (leaf({"exists": "true"}), f"{AT}.exists", "true or false"),
        (leaf({"exists": 1}), f"{AT}.exists", "true or false"),
        (leaf({"anything-but": None}), f"{AT}.anything-but", "a string, a number"),
        (leaf({"anything-but": True}), f"{AT}.anything-but", "a string, a number"),
        (leaf({"anything-but": []}), f"{AT}.anything-but", "only strings or only numbers"),
        (leaf({"anything-but": ["a", 1]}), f"{AT}.anything-but", "only strings or only numbers"),
        (leaf({"anything-but": ["a", None]}), f"{AT}.anything-but", "only strings"),
        (leaf({"anything-but": [{"prefix": "a"}]}), f"{AT}.anything-but", "only strings"),
        (leaf({"anything-but": 2**53 + 1}), f"{AT}.anything-but", "64-bit float"),
        (leaf({"anything-but": {"numeric": ["=", 1]}}), f"{AT}.anything-but", "not one of"),
        (leaf({"anything-but": {"prefx": "a"}}), f"{AT}.anything-but", "did you mean 'prefix'?"),
        (leaf({"anything-but": {}}), f"{AT}.anything-but", "exactly one of"),
        (leaf({"anything-but": {"prefix": ""}}), f"{AT}.anything-but.prefix", "empty prefix"),
        (
            leaf({"anything-but": {"suffix": ["a", ""]}}),
            f"{AT}.anything-but.suffix",
            "empty suffix",
        ),
        (leaf({"anything-but": {"prefix": []}}), f"{AT}.anything-but.prefix", "empty array"),
        (leaf({"anything-but": {"prefix": [1]}}), f"{AT}.anything-but.prefix", "a string"),
        (
            leaf({"anything-but": {"prefix": {"equals-ignore-case": "a"}}}),
            f"{AT}.anything-but.prefix",
            "a string",
        ),
        (leaf({"anything-but": {"wildcard": "**"}}), f"{AT}.anything-but.wildcard", "in a row"),
        (leaf({"numeric": 5}), f"{AT}.numeric", "a comparison"),
        (leaf({"numeric": []}), f"{AT}.numeric", "a comparison"),
        (leaf({"numeric": [">"]}), f"{AT}.numeric", "a comparison"),
        (leaf({"numeric": [">", 0, "<"]}), f"{AT}.numeric", "a comparison"),
        (leaf({"numeric": ["!=", 5]}), f"{AT}.numeric[0]", "one of = < <= > >="),
        (leaf({"numeric": [5, ">"]}), f"{AT}.numeric[0]", "one of ="),
        (leaf({"numeric": [[], 1]}), f"{AT}.numeric[0]", "one of ="),
        (leaf({"numeric": [">", "5"]}), f"{AT}.numeric[1]", "a number"),
        (leaf({"numeric": [">", True]}), f"{AT}.numeric[1]", "a number"),
        (leaf({"numeric": [">", float("inf")]}), f"{AT}.numeric[1]", "finite"),
        (leaf({"numeric": [">", 10**400]}), f"{AT}.numeric[1]", "64-bit float"),
        (
            leaf({"numeric": [">", EXACT]}),
            f"{AT}.numeric[1]",
            f"64-bit float can hold, found {EXACT}",
        ),
        (leaf({"anything-but": EXACT}), f"{AT}.anything-but", "64-bit float"),
        (leaf({"anything-but": [1, EXACT]}), f"{AT}.anything-but", "64-bit float"),
        (leaf({"numeric": ["<", 5, ">", 0]}), f"{AT}.numeric[0]", "one of > >="),
        (leaf({"numeric": ["=", 5, "<", 9]}), f"{AT}.numeric[0]", "one of > >="),
        (leaf({"numeric": [">", 0, ">", 0]}), f"{AT}.numeric[2]", "one of < <="),
        (leaf({"numeric": [">", 0, "<", None]}), f"{AT}.numeric[3]", "a number"),
        (leaf({"numeric": [">", 5, "<", 1]}), f"{AT}.numeric", "no number matches"),
        (leaf({"numeric": [">=", 5, "<=", 5]}), f"{AT}.numeric", "no number matches"),
        (leaf({"cidr": 10}), f"{AT}.cidr", "a string"),
        (leaf({"cidr": "10.0.0.0"}), f"{AT}.cidr", "an address block"),
        (leaf({"cidr": "10.0.0.0/"}), f"{AT}.cidr", "an address block"),
        (leaf({"cidr": "10.0.0.0/33"}), f"{AT}.cidr", "an address block"),
        (leaf({"cidr": "10.0.0.0/-1"}), f"{AT}.cidr", "an address block"),
        (leaf({"cidr": "10.0.0.0/255.0.0.0"}), f"{AT}.cidr", "an address block"),
        (leaf({"cidr": "bad/8"}), f"{AT}.cidr", "an address block"),
        (leaf({"cidr": "10.0.0.1/32"}), f"{AT}.cidr", "'10.0.0.1'"),
        (leaf({"cidr": "::1/128"}), f"{AT}.cidr", "'::1'"),
        (leaf({"cidr": "::ffff:a00:0/120"}), f"{AT}.cidr", "an address block"),
        (leaf({"cidr": "10.0.0.0/+8"}), f"{AT}.cidr", "an address block"),
        ({"$or": []}, "match.$or", "empty array"),
        ({"$or": [{"a": [1]}]}, "match.$or", "at least two"),
        ({"$or": [{"a": [1]}, {}]}, "match.$or[1]", "empty object"),
        ({"$or": [{"a": [1]}, {"b": 2}]}, "match.$or[1].b", "an array of values"),
        ({"$or": [{"a": [1]}, [{"b": [1]}]]}, "match.$or[0]", "'a' is not one of"),
        ({"$or": [{"a": [1]}, {"prefix": "b"}]}, "match.$or[0]", "'a' is not one of"),
        ({"$or": [{"a": {"prefix": ["b"]}}, {"c": [1]}]}, "match.$or[0].a.prefix", "inside $or"),
        ({"a": [1], "$or": [{"a": [2]}, {"b": [1]}]}, "match.$or", "'a' is given twice"),
        ({"a": {"b": [1]}, "a.b": [2]}, "match.a.b", "'a.b' is given twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:60],
)
def test_a_pattern_eventbridge_would_refuse_names_its_place(spec, where, message):
    with pytest.raises(ConfigError) as caught:
        Pattern.compile(spec)
    assert caught.value.where == where
    assert message in caught.value.message


def test_the_caller_says_where_the_pattern_stands():
    with pytest.raises(
        ConfigError, match=r"^rules\[2\]\.match\.source\[0\]\.exists: expected true"
    ):
        Pattern.compile({"source": [{"exists": 0}]}, where="rules[2].match")


def test_or_that_unfolds_without_end_is_refused():
    spec = {f"f{step}": {"$or": [{"a": [1]}, {"b": [2]}]} for step in range(10)}
    with pytest.raises(ConfigError, match="more than 1000 combinations") as caught:
        Pattern.compile(spec)
    assert caught.value.where == "match.f9"


# Properties ---------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
json_values = st.recursive(
    scalars | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)
short_text = st.text(alphabet="aAbBß*\\.", max_size=6)


@given(scalars)
def test_an_exact_value_always_matches_itself(value):
    assert value_matches([value], value)


@given(scalars, scalars)
def test_an_exact_match_is_equality_as_json_has_it(wanted, value):
    same_kind = isinstance(wanted, bool) == isinstance(value, bool)
    assert value_matches([wanted], value) is (same_kind and wanted == value)


@given(short_text, short_text)
def test_the_text_operators_agree_with_str(operand, value):
    escaped = operand.replace("\\", "\\\\").replace("*", "\\*")
    assert value_matches([{"prefix": operand}], value) is value.startswith(operand)
    assert value_matches([{"suffix": operand}], value) is value.endswith(operand)
    assert value_matches([{"wildcard": escaped}], value) is (operand == value)
    assert value_matches([{"wildcard": f"*{escaped}-*"}], f"{value}-") is value.endswith(operand)


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=2), min_size=1), st.data())
def test_a_wildcard_matches_whatever_fills_its_gaps(pieces, data):
    gaps = data.draw(st.lists(st.text(alphabet="abc"), min_size=len(pieces), max_size=len(pieces)))
    filled = "".join(gap + piece for gap, piece in zip(gaps, pieces, strict=True))
    assert value_matches([{"wildcard": "*" + "*".join(pieces)}], filled)
    assert not value_matches([{"wildcard": "*" + "*".join(pieces)}], filled + "c")


@given(
    st.sampled_from(["prefix", "suffix", "equals-ignore-case"]),
    st.lists(short_text.filter(bool), min_size=1, max_size=3),
    scalars | short_text,
)
def test_anything_but_is_the_opposite_of_its_operator(name, operands, value):
    positive = value_matches([{name: each} for each in operands], value)
    assert value_matches([{"anything-but": {name: operands}}], value) is not positive


@given(st.lists(short_text, min_size=1) | st.lists(st.integers(-3, 3), min_size=1), scalars)
def test_anything_but_a_list_is_the_opposite_of_the_list(values, value):
    positive = value_matches(values, value)
    assert value_matches([{"anything-but": values}], value) is not positive


@given(json_values)
def test_a_field_exists_or_it_does_not(value):
    there = value_matches([{"exists": True}], value)
    assert value_matches([{"exists": False}], value) is not there


@given(st.integers() | st.floats(), st.integers(-(2**53), 2**53))
def test_numeric_splits_the_number_line(value, bound):
    assume(value == value)  # noqa: PLR0124 - not nan
    answers = [value_matches([{"numeric": [sign, bound]}], value) for sign in ("<", "=", ">")]
    assert answers == [value < bound, value == bound, value > bound]


EVERYTHING = {
    "a": ["x", 1, 2.5, None, True, {"prefix": "p"}, {"suffix": {"equals-ignore-case": "s"}}],
    "b": [{"anything-but": {"wildcard": ["*a*", "b"]}}, {"cidr": "::/1"}, {"numeric": [">", 0]}],
    "c": {"d": [{"exists": False}, {"equals-ignore-case": "e"}], "f": {"g": [{"anything-but": 3}]}},
    "$or": [{"h": [{"exists": True}]}, {"c": {"i": [{"wildcard": "*"}]}}],
}


@given(st.dictionaries(st.sampled_from(["a", "b", "c", "c.d", "h"]), json_values))
def test_matching_never_raises(event):
    assert Pattern.compile(EVERYTHING).matches(event) in (True, False)


@pytest.mark.parametrize(
    "value",
    [10**5000, -(10**5000), 1e308, float("inf"), "\ud800", "x" * 10**6],
    ids=["huge", "hugely negative", "almost infinite", "infinite", "half a surrogate", "long"],
)
def test_matching_survives_extreme_scalars(value):
    event = dict.fromkeys("abh", value) | {"c": {"d": value, "f": {"g": value}, "i": value}}
    assert Pattern.compile(EVERYTHING).matches(event) in (True, False)
    assert value_matches([{"exists": True}], value)


def test_arrays_may_nest_deeper_than_the_stack():
    deep: Any = "found"
    objects: Any = {"y": "found"}
    for _ in range(50_000):
        deep, objects = [deep], [objects]
    assert value_matches(["found"], deep)
    assert value_matches([{"exists": True}], deep)
    assert matches({"x": {"y": ["found"], "z": [{"exists": False}]}}, {"x": objects})
    while deep != "found":  # taken apart by hand: the interpreter would do so recursively
        deep, objects = deep[0], objects[0]


@pytest.mark.parametrize(
    ("values", "value"),
    [
        ([{"wildcard": "*" + "a*" * 30 + "b"}], "a" * 20_000),
        ([{"suffix": {"equals-ignore-case": "a" * 300 + "b"}}], "a" * 2_000_000),
        ([{"prefix": {"equals-ignore-case": "a" * 300 + "b"}}], "a" * 2_000_000),
        ([{"equals-ignore-case": "a" * 300 + "b"}], "a" * 2_000_000),
        (["::1"], ":" * 2_000_000),
    ],
    ids=["wildcard", "suffix", "prefix", "any case", "address"],
)
def test_a_hostile_string_costs_milliseconds_at_most(values, value):
    pattern = Pattern.compile({"x": values})
    started = time.thread_time()
    assert not pattern.matches({"x": value})
    assert time.thread_time() - started < 0.5


@given(short_text, st.text(alphabet="aAbBßsSﬁfiFI", max_size=6), short_text)
@example("ß", "SS", "")
@example("a", "ß", "xSS")
def test_a_suffix_in_any_case_is_found_whatever_stands_before_it(before, suffix, other):
    values = [{"suffix": {"equals-ignore-case": suffix}}]
    for spelt in (suffix, suffix.upper(), suffix.lower()):
        assert value_matches(values, before + spelt)
    spellings = re.compile("".join(f"(?:{c}|{c.lower()}|{c.upper()})" for c in suffix) + r"\Z")
    assert value_matches(values, other) is (spellings.search(other) is not None)


def test_a_path_spelt_in_several_ways_costs_a_second_at_most():
    items = [{"b": {"c": "1", "d": "1"}, "e": "1"} for _ in range(5_000)]
    event = {"a": items, "a.b": [{"c": "1", "d": "1"} for _ in range(5_000)]}
    started = time.thread_time()
    assert not matches({"a": {"b": {"c": ["1"], "d": ["1"]}, "e": ["2"]}}, event)
    assert time.thread_time() - started < 5


def test_sibling_arrays_are_not_multiplied():
    names = [f"n{index}" for index in range(8)]
    spec = {name: {"k": [{"exists": True}], "l": [{"exists": False}]} for name in names}
    event: Any = {name: [{"k": index} for index in range(500)] for name in names}
    event["n7"] = [{"k": index, "l": 1} for index in range(500)]
    started = time.perf_counter()
    assert not matches(spec, event)
    assert time.perf_counter() - started < 1


# The model ----------------------------------------------------------------------------


def flattened(
    value: Any, path: str, arrays: dict[int, int], ids: Iterator[int]
) -> Iterator[tuple[str, Any, dict[int, int]]]:
    """List the leaves of an event: the path, the value, and the place taken in each array."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from flattened(each, f"{path}.{name}" if path else name, arrays, ids)
    elif isinstance(value, list):
        own = next(ids)
        for index, each in enumerate(value):
            inside = {**arrays, own: index} if isinstance(each, (dict, list)) else arrays
            yield from flattened(each, path, inside, ids)
    else:
        yield path, value, arrays


def consistent(left: dict[int, int], right: dict[int, int]) -> bool:
    return all(left[array] == right[array] for array in left.keys() & right.keys())


def model_matches(rule: list[tuple[str, list[Any]]], leaves: Any, chosen: dict[int, int]) -> bool:
    """Pick a leaf for each path in turn, trying every one; *rule* is sorted by path."""
    if not rule:
        return True
    (path, wanted), *rest = rule
    near = [each for each in leaves if each[0] == path and consistent(chosen, each[2])]
    if not near and {"exists": False} in wanted and model_matches(rest, leaves, chosen):
        return True
    return any(
        ({"exists": True} in wanted or value in wanted)
        and model_matches(rest, leaves, chosen | arrays)
        for _, value, arrays in near
    )


def model_rules(spec: Any, path: str = "") -> list[dict[str, list[Any]]]:
    rules: list[dict[str, list[Any]]] = [{}]
    for name, value in spec.items():
        below = f"{path}.{name}" if path else name
        if name == "$or":
            options = [rule for each in value for rule in model_rules(each, path)]
        elif isinstance(value, dict):
            options = model_rules(value, below)
        else:
            options = [{below: value}]
        rules = [left | right for left in rules for right in options]
    return rules


names = st.sampled_from(["a", "b", "c", "a-b"])
model_leaves = st.lists(
    st.sampled_from(["1", "2", {"exists": False}, {"exists": True}]), min_size=1, max_size=2
)
model_specs = st.recursive(
    st.dictionaries(names, model_leaves, min_size=1, max_size=3),
    lambda inner: st.dictionaries(names, inner | model_leaves, min_size=1, max_size=3),
    max_leaves=4,
)
model_or_specs = st.builds(
    lambda spec, left, right: {**spec, "z": {"$or": [left, right]}},
    model_specs,
    model_specs,
    model_specs,
)
event_names = names | st.sampled_from(["a.b", "a.c", "b.a", "a.b.c", "a.a"])
model_events = st.dictionaries(
    event_names | st.just("z"),
    st.recursive(
        st.sampled_from(["1", "2"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(event_names, inner, max_size=3),
        max_leaves=12,
    ),
    max_size=4,
)


@given(model_specs | model_or_specs, model_events)
@example({"a": {"b": ["1"], "c": ["1"]}}, {"a.b": "1", "a": [{"c": "1"}]})
@example({"a": {"b": ["1"], "c": [{"exists": False}]}}, {"a.b": "1", "a": [{"c": "1"}, "1"]})
@example({"a": {"b": {"a": ["1"], "c": ["1"]}}}, {"a.b": [{"a": "1"}], "a": [{"b": {"c": "1"}}]})
def test_the_compiled_pattern_agrees_with_the_model(spec, event):
    leaves = list(flattened(event, "", {}, iter(range(10**9))))
    expected = any(model_matches(sorted(rule.items()), leaves, {}) for rule in model_rules(spec))
    assert matches(spec, event) is expected
