import base64
import gzip
import json
import math
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oncebridge.errors import EventError
from oncebridge.events.canonical import canonical
from oncebridge.events.event import (
    REASONS,
    Event,
    Limits,
    Unreadable,
    from_object,
    parse,
    parse_all,
)

EVENTS = Path(__file__).parent.parent / "events"
SAMPLES = sorted(EVENTS.glob("*.json")) + sorted(EVENTS.glob("variants/*.json"))
USER_END = (EVENTS / "v2.detail.events.conversation.id.user.end.json").read_bytes()

CANARY = "canary-7f3a"

# Each bad input with the reason it is refused for.
BAD = {
    "empty": (b"", "not-json"),
    "blank": (b" \n", "not-json"),
    "not json": (b"canary-7f3a", "not-json"),
    "truncated": (USER_END[:-9], "not-json"),
    "trailing": (b'{"detail":{"a":"canary-7f3a"}}}', "not-json"),
    "byte order mark": (b'\xef\xbb\xbf{"detail":{"a":1}}', "not-json"),
    "utf-16": ('{"detail":{"a":1}}'.encode("utf-16"), "not-json"),
    "bad utf-8": (b'{"detail":{"canary-7f3a":"\xff"}}', "not-json"),
    "bad utf-8 in a name": (b'{"detail":{"\xc3":1}}', "not-json"),
    "overlong utf-8": (b'{"detail":{"a":"\xc0\x80"}}', "not-json"),
    "control character": (b'{"detail":{"a":"\x01"}}', "not-json"),
    "leading zero": (b'{"detail":{"a":01}}', "not-json"),
    "comment": (b'{"detail":{"a":1}/* canary-7f3a */}', "not-json"),
    "trailing comma": (b'{"detail":{"a":1,}}', "not-json"),
    "single quotes": (b"{'detail':{'a':1}}", "not-json"),
    "bad escape": (b'{"detail":{"a":"\\x41"}}', "not-json"),
    "gzip": (b"\x1f\x8b\x08\x00canary-7f3a", "not-json"),
    "base64": (base64.b64encode(USER_END), "not-json"),
    "null": (b"null", "not-an-object"),
    "number": (b"7", "not-an-object"),
    "string": (b'"canary-7f3a"', "not-an-object"),
    "array": (b'[{"detail":{"a":1}}]', "not-an-object"),
    "no detail": (b'{"id":"canary-7f3a","source":"s"}', "no-detail"),
    "empty object": (b"{}", "no-detail"),
    "blanks in place of a detail": (b'{"id":"x"}' + b" " * 12, "no-detail"),
    "null detail": (b'{"detail":null}', "no-detail"),
    "number detail": (b'{"detail":7}', "no-detail"),
    "array detail": (b'{"detail":[{"a":"canary-7f3a"}]}', "no-detail"),
    "text detail": (b'{"detail":"canary-7f3a"}', "no-detail"),
    "empty text detail": (b'{"detail":""}', "no-detail"),
    "text of an array": (b'{"detail":"[1]"}', "no-detail"),
    "text of a string": (b'{"detail":"\\"{}\\""}', "no-detail"),
    "text with a mark": ('{"detail":"\ufeff{}"}'.encode(), "no-detail"),
    "same name": (b'{"detail":{"a":1,"a":2}}', "duplicate-name"),
    "same name, same value": (b'{"detail":{"a":1,"a":1}}', "duplicate-name"),
    "same name deep down": (b'{"detail":{"b":[{"c":{"a":1,"x":0,"a":2}}]}}', "duplicate-name"),
    "same name as an escape": (b'{"detail":{"a":1,"\\u0061":2}}', "duplicate-name"),
    "same name, colon as an escape": (b'{"detail":{"a\\u003a":1,"a:":2}}', "duplicate-name"),
    "colons made up for": (b'{"detail":{"a":1,"a":"\\u003a"}}', "duplicate-name"),
    "two details": (b'{"detail":{"a":1},"detail":{"a":1}}', "duplicate-name"),
    "two sources": (b'{"source":"s","source":"s","detail":{"a":1}}', "duplicate-name"),
    "two ids, one empty": (b'{"id":"x","id":null,"detail":{"a":1}}', "duplicate-name"),
    "same name in an unknown field": (b'{"x":{"a":1,"a":1},"detail":{"b":1}}', "duplicate-name"),
    "same name in a text": (b'{"detail":"{\\"a\\":1,\\"a\\":2}"}', "duplicate-name"),
    "dropped, and a number grows by as much": (
        b'{"source":"s","detail":{"a":1e7,"":0,"":0}}',
        "duplicate-name",
    ),
    "dropped, and blanks in place of it": (b'{"detail":{"":0,"":0    }}', "duplicate-name"),
    "NaN": (b'{"detail":{"a":NaN}}', "not-finite"),
    "Infinity": (b'{"detail":{"a":[Infinity]}}', "not-finite"),
    "-Infinity": (b'{"detail":{"a":-Infinity}}', "not-finite"),
    "1e400": (b'{"detail":{"a":1e400}}', "not-finite"),
    "-1e400": (b'{"detail":{"a":-1e400}}', "not-finite"),
    "400 digits and a half": (b'{"detail":{"a":' + b"9" * 400 + b".5}}", "not-finite"),
    "NaN in the envelope": (b'{"x":NaN,"detail":{"a":1}}', "not-finite"),
    "NaN in a text": (b'{"detail":"{\\"a\\":NaN}"}', "not-finite"),
    "high surrogate": (b'{"detail":{"a":"\\ud800"}}', "lone-surrogate"),
    "low surrogate": (b'{"detail":{"a":"\\udfff and canary-7f3a"}}', "lone-surrogate"),
    "surrogates swapped": (b'{"detail":{"a":"\\ude02\\ud83d"}}', "lone-surrogate"),
    "surrogate in a name": (b'{"detail":{"\\ud800":1}}', "lone-surrogate"),
    "surrogate in the id": (b'{"id":"\\ud800","detail":{"a":1}}', "lone-surrogate"),
    "surrogate as bytes": (b'{"detail":{"a":"\xed\xa0\x80"}}', "lone-surrogate"),
    "pair in CESU-8": (b'{"detail":{"a":"\xed\xa0\xbd\xed\xb8\x82"}}', "lone-surrogate"),
    "surrogate in a text": (b'{"detail":"{\\"a\\":\\"\\\\ud800\\"}"}', "lone-surrogate"),
    "101 levels of arrays": (
        b'{"detail":{"a":' + b"[" * 99 + b"]" * 99 + b"}}",
        "too-deep",
    ),
    "101 levels of objects": (
        b'{"detail":' + b'{"a":' * 99 + b"{}" + b"}" * 99 + b"}",
        "too-deep",
    ),
    "levels beside the detail": (
        b'{"x":' + b"[" * 100 + b"]" * 100 + b',"detail":{"a":1}}',
        "too-deep",
    ),
    "levels in a text": (
        b'{"detail":"{\\"a\\":' + b"[" * 100 + b"]" * 100 + b'}"}',
        "too-deep",
    ),
    "levels in odd company": (
        b'{"detail":{"n":1e-9,"a":' + b"[" * 99 + b"]" * 99 + b"}}",
        "too-deep",
    ),
    "900 levels": (b'{"detail":{"a":' + b"[" * 900 + b"]" * 900 + b"}}", "too-deep"),
    "900 levels of names beyond ascii": (
        b'{"detail":' + '{"é😂":'.encode() * 900 + b"1" + b"}" * 901,
        "too-deep",
    ),
    "100,000 levels": (b'{"detail":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}", "too-deep"),
    "100,000 levels, never closed": (b'{"detail":' + b'{"a":' * 100_000, "too-deep"),
    "700,000 objects": (b'{"detail":{"a":[' + b"{}," * 698_000 + b"{}]}}", "too-many-values"),
    "a million numbers": (b'{"detail":{"a":[' + b"1," * 1_000_000 + b"1]}}", "too-many-values"),
    "500,000 strings": (b'{"detail":{"a":[' + b'"",' * 500_000 + b'""]}}', "too-many-values"),
    "many values in a detail that is a string": (
        b'{"detail":"{\\"a\\":[' + b"1," * 500_000 + b'1]}"}',
        "too-many-values",
    ),
    "many numbers that are read exactly": (
        b'{"detail":{"a":[' + b"1e-9," * 40_000 + b"1]}}",
        "too-many-values",
    ),
    "5,000 digits": (b'{"detail":{"a":' + b"7" * 5000 + b"}}", "number-too-long"),
    "an exponent of 19 digits": (b'{"detail":{"a":1e-' + b"9" * 19 + b"}}", "number-too-long"),
    "an exponent of 5,000 digits": (b'{"detail":{"a":1e-' + b"9" * 5000 + b"}}", "number-too-long"),
    "a large exponent": (b'{"detail":{"a":1e999999999}}', "not-finite"),
    "a fraction of two million digits": (
        b'{"detail":{"a":0.' + b"7" * 2_000_000 + b"}}",
        "number-too-long",
    ),
    "a large event of long integers": (
        b'{"detail":{"a":[' + (b"7" * 4000 + b",") * 500 + b"1]}}",
        "number-too-long",
    ),
    "too large": (b'{"detail":{"a":"' + b"x" * (2 * 1024 * 1024) + b'"}}', "too-large"),
}

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**30), max_value=10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
    | st.sampled_from([":", '":', "{}", "[[", '\\":', "😂", "\ufb33", "/"])
)


class Members(list):
    """An object as pairs, so that it can have a name twice."""


NAMES = st.sampled_from(["a", "b", "a:", ":", "é", "😂", "\ufb33", "detail", ""])
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(st.tuples(NAMES, inner), max_size=3).map(Members)
        | st.lists(st.tuples(NAMES, inner), max_size=3, unique_by=lambda pair: pair[0]).map(Members)
    ),
    max_leaves=12,
)
DETAILS = st.lists(st.tuples(NAMES, TREES), max_size=4).map(Members)


def spell(value, dice, *, blanks, escapes):
    """Write a tree as JSON, with blanks and escapes where the dice say so."""

    def blank():
        return dice.choice(["", "", " ", "\n\t", "\r\n  "]) if blanks else ""

    def string(text):
        return '"' + "".join(character(c) for c in text) + '"'

    def character(c):
        if escapes and dice.random() < 0.4:
            units = c.encode("utf-16-be")
            codes = [units[n : n + 2].hex() for n in range(0, len(units), 2)]
            return "".join("\\u" + dice.choice([code, code.upper()]) for code in codes)
        return json.dumps(c, ensure_ascii=False)[1:-1]

    def write(value):
        if isinstance(value, Members):
            members = (f"{blank()}{string(n)}{blank()}:{blank()}{write(v)}" for n, v in value)
            return "{" + f"{blank()},".join(members) + blank() + "}"
        if isinstance(value, list):
            return "[" + ",".join(f"{blank()}{write(v)}{blank()}" for v in value) + "]"
        return string(value) if isinstance(value, str) else json.dumps(value)

    return (blank() + write(value) + blank()).encode()


def refuse_repeats(pairs):
    if len({name for name, _ in pairs}) != len(pairs):
        raise KeyError
    return dict(pairs)


def has_repeats(raw):
    try:
        json.loads(raw, object_pairs_hook=refuse_repeats)
    except KeyError:
        return True
    return False


def compact(raw):
    return json.dumps(json.loads(raw), separators=(",", ":"), ensure_ascii=False).encode()


def refusal(raw, **options):
    with pytest.raises(EventError) as caught:
        parse(raw, **options)
    return caught.value


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "spelling", [bytes, compact, lambda raw: json.dumps(json.loads(raw)).encode()]
)
def test_a_sample_is_read_whole(sample, spelling):
    raw = spelling(sample.read_bytes())
    whole = json.loads(raw)
    event = parse(raw)
    assert event.raw is raw
    assert event.detail == whole["detail"]
    assert event.envelope == whole
    assert event.envelope is event.envelope
    assert event.canonical == canonical(whole["detail"])
    assert event.id == whole["id"]
    assert event.source == whole["source"]
    assert event.detail_type == whole["detail-type"]
    assert event.time == whole["time"]
    assert event.account == whole["account"]
    assert event.region == whole["region"]
    assert list(event.resources) == whole["resources"]
    assert event.replay_name == whole.get("replay-name")
    assert not event.bare


def test_a_replay_shows_its_name():
    raw = (EVENTS / "variants" / "02_archive_replay_replay-name.json").read_bytes()
    assert parse(raw).replay_name
    assert parse(USER_END).replay_name is None


@pytest.mark.parametrize(("raw", "reason"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_with_its_reason(raw, reason):
    error = refusal(raw)
    assert error.reason == reason
    assert error.reason in REASONS
    assert CANARY not in str(error)
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None


@pytest.mark.parametrize(("raw", "reason"), BAD.values(), ids=BAD)
def test_one_bad_record_does_not_spoil_a_batch(raw, reason):
    first, bad, last = parse_all([USER_END, raw, USER_END])
    assert isinstance(first, Event)
    assert isinstance(last, Event)
    assert isinstance(bad, Unreadable)
    assert (bad.raw, bad.reason) == (raw, reason)
    assert bad.message
    assert CANARY not in bad.message


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1}',
        ' {"a" : 1.0}',
        '{"\\u0061":10e-1}',
    ],
)
def test_a_detail_may_be_a_string_of_json(text):
    raw = json.dumps({"id": "x", "source": "s", "detail": text}).encode()
    event = parse(raw)
    assert event.raw is raw
    assert event.detail == {"a": 1}
    assert event.envelope == {"id": "x", "source": "s", "detail": {"a": 1}}
    assert event.canonical == b'{"a":1}'


def test_a_bare_detail_is_taken_only_on_request():
    raw = b'{"topicName":"t","eventBody":{"n":1.50}}'
    assert refusal(raw).reason == "no-detail"
    event = parse(raw, bare=True)
    assert event.bare
    assert event.raw is raw
    assert event.detail == {"topicName": "t", "eventBody": {"n": 1.5}}
    assert event.envelope == {"detail": event.detail}
    assert (event.id, event.source, event.detail_type) == (None, "", "")


def test_an_envelope_is_seen_also_when_a_bare_detail_would_do():
    event = parse(USER_END, bare=True)
    assert not event.bare
    assert event.id == json.loads(USER_END)["id"]
    assert refusal(b'{"detail":null}', bare=True).reason == "no-detail"
    assert refusal(b"[1]", bare=True).reason == "not-an-object"


@pytest.mark.parametrize("value", [None, 7, 7.5, True, ["x"], {"x": 1}])
@pytest.mark.parametrize(
    ("name", "field", "absent"),
    [
        ("id", "id", None),
        ("source", "source", ""),
        ("detail-type", "detail_type", ""),
        ("time", "time", None),
        ("account", "account", None),
        ("region", "region", None),
        ("replay-name", "replay_name", None),
    ],
)
def test_what_is_no_string_counts_as_absent_and_stays_visible(name, field, absent, value):
    event = parse(json.dumps({name: value, "detail": {"a": 1}}).encode())
    assert getattr(event, field) == absent
    assert event.envelope == {name: value, "detail": {"a": 1}}


@pytest.mark.parametrize("value", [None, "arn", [1], {"a": "b"}])
def test_resources_are_a_list_of_strings_or_nothing(value):
    event = parse(json.dumps({"resources": value, "detail": {"a": 1}}).encode())
    assert list(event.resources) == []
    assert event.envelope["resources"] == value


def test_absent_fields_are_absent():
    event = parse(b'{"detail":{"a":1}}')
    assert (event.id, event.source, event.detail_type, event.time) == (None, "", "", None)
    assert (event.account, event.region, event.replay_name) == (None, None, None)
    assert list(event.resources) == []
    assert event.envelope == {"detail": {"a": 1}}


@pytest.mark.parametrize("value", ["x" * 10_000, "a\r\nX-Evil: 1", "é😂", "", "\x00"])
def test_an_odd_id_is_still_an_id(value):
    assert parse(json.dumps({"id": value, "detail": {"a": 1}}).encode()).id == value


def test_unknown_fields_and_topics_are_kept():
    whole = {"detail-type": "v9.new", "x": {"y": [1]}, "detail": {"a": 1}, "é": None}
    event = parse(json.dumps(whole).encode())
    assert event.detail_type == "v9.new"
    assert event.envelope == whole


def test_an_empty_detail_is_an_event():
    assert parse(b'{"detail":{}}').canonical == b"{}"
    assert parse(b"{}", bare=True).canonical == b"{}"


def test_an_object_that_was_read_here_keeps_its_decimals():
    raw = b'{"detail":{"b":[1.000000000000000001,{"c":1e-400}],"a":0.5},"id":"x"}'
    event = parse(raw)
    again = from_object(event.envelope)
    assert again.detail == event.detail
    assert again.canonical == event.canonical != from_object(json.loads(raw)).canonical


def test_integers_keep_all_their_digits():
    digits = "9" * 4300
    for text in ("123456789012345678901234567890", "-18446744073709551617", digits):
        event = parse(f'{{"detail":{{"n":{text}}}}}'.encode())
        assert event.detail["n"] == int(text)
        assert event.canonical == f'{{"n":{text}}}'.encode()


@pytest.mark.parametrize(
    ("text", "number"),
    [("1.0", 1), ("1e5", 100000), ("-0.0", 0), ("1.5E3", 1500), ("0e-400", 0), ("1e20", 1e20)],
)
def test_numbers_are_read_the_same_way_on_every_path(text, number):
    for raw in (f'{{"detail":{{"n":{text}}}}}', f'{{"detail":{{"n":{text},"o":1e-9}}}}'):
        found = parse(raw.encode()).detail["n"]
        assert found == number
        assert type(found) is type(number)
        assert math.copysign(1, found) == math.copysign(1, number)


def test_a_hundred_levels_are_allowed():
    deep = b'{"detail":{"a":' + b"[" * 98 + b"]" * 98 + b"}}"
    assert isinstance(parse(deep), Event)
    assert isinstance(parse(deep.replace(b'"a"', b'"n":1e-9,"a"')), Event)
    assert isinstance(parse(b'{"x":' + b"[" * 99 + b"]" * 99 + b',"detail":{"a":1}}'), Event)


def test_many_brackets_are_not_depth():
    assert isinstance(parse(b'{"detail":{"a":"' + b"[{" * 500 + b'"}}'), Event)
    assert isinstance(parse(b'{"detail":{"a":[' + b"[]," * 500 + b"{}]}}"), Event)


@pytest.mark.parametrize(
    "levels",
    [
        ('{"s":"}","x":', ',"t":"{"}'),
        ('{"s":"}","":', ',"t":"{"}'),
        ('{"s":"\\"}","x":', ',"t":"{\\""}'),
        ('["]",', ',"["]'),
        ('["","]","",', ',"","[",""]'),
    ],
)
def test_brackets_in_strings_hide_no_depth(levels):
    first, last = levels
    for count, is_fine in ((98, True), (99, False)):
        raw = f'{{"detail":{{"a":{first * count}1{last * count}}}}}'.encode()
        if is_fine:
            assert parse(raw).raw is raw
        else:
            assert refusal(raw).reason == "too-deep"


@pytest.mark.parametrize("apart", [(), ("a",), ("b",)])
@pytest.mark.parametrize("brackets", ["{}", "[]"])
@pytest.mark.parametrize("beside", [0, 40, 60, 120])
def test_depth_is_counted_whatever_stands_beside_or_apart(apart, brackets, beside):
    limits = Limits(max_depth=100)
    for levels, is_fine in ((98, True), (99, False)):
        first, last = ('{"x":', "}") if brackets == "{}" else "[]"
        deep = first * (levels - 1) + brackets + last * (levels - 1)
        many = ",".join([brackets] * beside)
        raw = f'{{"detail":{{"a":{deep},"b":[{many}]}}}}'.encode()
        if is_fine:
            assert parse(raw, limits=limits, apart=apart).raw is raw
        else:
            assert refusal(raw, limits=limits, apart=apart).reason == "too-deep"


def test_limits_can_be_set():
    assert refusal(USER_END, limits=Limits(max_bytes=len(USER_END) - 1)).reason == "too-large"
    assert isinstance(parse(USER_END, limits=Limits(max_bytes=len(USER_END))), Event)
    nested = b'{"detail":{"a":[[]]}}'
    assert isinstance(parse(nested, limits=Limits(max_depth=4)), Event)
    assert refusal(nested, limits=Limits(max_depth=3)).reason == "too-deep"


@pytest.mark.parametrize(
    "inner", [b"1", b'"a,[{"', rb'"\",\\"', b'{"a":1}', b"[2]", b"0.5", b"1e-9"]
)
def test_values_are_counted_outside_of_strings(inner):
    each = 2 if inner[:1] in b"{[" else 1
    for count in (98, 2000):
        raw = b'{"detail":{"a":[' + b",".join([inner] * count) + b"]}}"
        values = 3 + each * count
        limits = Limits(max_values=values)
        assert isinstance(parse(raw, limits=limits), Event)
        refused = refusal(raw, limits=Limits(max_values=values - 1))
        assert (refused.reason, str(values - 1) in str(refused)) == ("too-many-values", True)


def test_what_is_gzip_says_so():
    assert "gzip" in str(refusal(gzip.compress(b"{}")))


def test_a_text_of_many_commas_is_one_value():
    raw = b'{"detail":{"a":"' + b"1,[{" * 200_000 + b"7" * 5000 + b'"}}'
    assert parse(raw).raw is raw


def test_a_megabyte_in_one_string_is_fine():
    raw = b'{"detail":{"a":"' + b"x" * 1_000_000 + b'"}}'
    assert parse(raw).raw is raw


def test_an_event_cannot_be_changed_and_does_not_show_its_payload():
    event = parse(json.dumps({"id": CANARY, "detail": {"name": CANARY}}).encode())
    with pytest.raises(AttributeError):
        event.source = "other"
    assert CANARY not in repr(event)
    assert len({event, event, parse(event.raw)}) == 2


def test_an_object_becomes_an_event_with_compact_bytes():
    event = from_object(json.loads(USER_END))
    assert event.raw == compact(USER_END)
    assert event.canonical == parse(USER_END).canonical
    assert from_object({"a": "é"}, bare=True).raw == '{"a":"é"}'.encode()


def test_an_object_is_refused_like_bytes():
    endless = {}
    endless["detail"] = endless
    cases = [
        ({"detail": {"a": math.nan}}, "not-finite"),
        ({"detail": {"a": math.inf}}, "not-finite"),
        ({"detail": {"a": "\ud800"}}, "lone-surrogate"),
        ({"detail": {"a": {1, 2}}}, "not-json"),
        ({"detail": {("a",): 1}}, "not-json"),
        ({"detail": {"1": 1, 1: 2}}, "duplicate-name"),
        ({"detail": {"a": 10**5000}}, "number-too-long"),
        ({"id": "x"}, "no-detail"),
        (endless, "too-deep"),
    ]
    for mapping, reason in cases:
        with pytest.raises(EventError) as caught:
            from_object(mapping)
        assert caught.value.reason == reason


APART = ("timestamp", "metadata")


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("spelling", [bytes, compact])
def test_setting_members_apart_changes_no_answer(sample, spelling):
    raw = spelling(sample.read_bytes())
    usual, event = parse(raw), parse(raw, apart=APART)
    assert event.detail == usual.detail
    assert event.envelope == usual.envelope
    assert event.canonical == usual.canonical
    assert event.canonical is event.canonical
    left = {name: item for name, item in usual.detail.items() if name not in APART}
    assert event.kept == canonical(left)


@pytest.mark.parametrize(("raw", "reason"), BAD.values(), ids=BAD)
def test_setting_members_apart_lets_nothing_bad_through(raw, reason):
    assert refusal(raw, apart=("a", "b")).reason == reason


@given(DETAILS, st.randoms(use_true_random=False), st.booleans(), st.booleans(), st.booleans())
def test_repeated_names_are_found_wherever_they_are(detail, dice, blanks, escapes, apart):
    raw = spell(
        Members([("source", "s"), ("detail", detail)]), dice, blanks=blanks, escapes=escapes
    )
    options = {"apart": ("a", "b")} if apart else {}
    if has_repeats(raw):
        assert refusal(raw, **options).reason == "duplicate-name"
    else:
        event = parse(raw, **options)
        assert event.detail == json.loads(raw)["detail"]
        assert event.canonical == canonical(json.loads(raw)["detail"])


@given(DETAILS, st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_repeated_names_are_found_in_a_text_and_in_a_bare_detail(detail, dice, blanks, escapes):
    inner = spell(detail, dice, blanks=blanks, escapes=escapes)
    outer = spell(Members([("detail", inner.decode())]), dice, blanks=blanks, escapes=escapes)
    if has_repeats(inner):
        assert refusal(outer).reason == "duplicate-name"
    else:
        assert parse(outer).canonical == canonical(json.loads(inner))
        if "detail" not in json.loads(inner):
            assert parse(inner, bare=True).canonical == canonical(json.loads(inner))


@given(st.binary(max_size=200), st.booleans())
@example(b'{"detail":{}}', False)
def test_arbitrary_bytes_are_an_event_or_an_event_error(raw, bare):
    check_answer(raw, bare=bare)


SNIPPETS = st.binary(max_size=3) | st.sampled_from(
    [
        *(
            b'"',
            b"\\",
            b"\\u",
            b"\\ud83d",
            b"{",
            b"}",
            b"[",
            b"]",
            b":",
            b",",
            b"0",
            b".5",
            b"null",
        ),
        *(b"1e400", b"NaN", b"\xed\xa0\x80", b"\xf0\x9f\x98\x82", b"[" * 99),
        *(b'"detail":{}', b'"id":1,', b'"a":1,"a":1,'),
    ]
)
EDITS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 20), SNIPPETS), min_size=1, max_size=4)


@given(st.sampled_from(SAMPLES), EDITS, st.booleans(), st.booleans())
def test_damaged_events_are_an_event_or_an_event_error(sample, edits, squeeze, bare):
    raw = sample.read_bytes()
    raw = compact(raw) if squeeze else raw
    for place, length, snippet in edits:
        start = int(place * len(raw))
        raw = raw[:start] + snippet + raw[start + length :]
    check_answer(raw, bare=bare)


def check_answer(raw, *, bare):
    """Parse what may be damaged, and compare with the standard library where it can tell."""
    [event] = parse_all([raw], bare=bare)
    if isinstance(event, Unreadable):
        assert event.reason in REASONS
        return
    assert event.raw is raw
    assert not has_repeats(raw)
    whole = json.loads(raw)
    detail = whole if event.bare else whole["detail"]
    detail = json.loads(detail) if isinstance(detail, str) else detail
    assert event.canonical == canonical(detail)
