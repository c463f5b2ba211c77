import copy
import hashlib
import json
from decimal import Decimal
from itertools import product
from pathlib import Path

import jmespath
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from oncebridge.errors import ConfigError
from oncebridge.events.canonical import canonical
from oncebridge.events.event import Limits, from_object, parse
from oncebridge.events.key import (
    KEY_VERSION,
    ContentKey,
    FieldsKey,
    IdKey,
    compile_field,
    conflict_key,
    fingerprint,
    make_key,
    scoped_source,
)

EVENTS = Path(__file__).parent.parent / "events"
VARIANTS = sorted(EVENTS.glob("variants/*.json"))
VOLATILE = ContentKey(["detail.timestamp", "detail.metadata"])
ORGANISATION = "aws.partner/genesys.com/cloud/3f1c2b7a-5a0e-4a3c-9a0d-1d2f6c1b7e10"

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**30), max_value=10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)
DETAILS = st.dictionaries(st.text(max_size=4), VALUES, min_size=1, max_size=4)


def key_of(event, kind=None, *, scope="source"):
    kind = kind or ContentKey()
    parts = kind.parts(event)
    assert parts is not None
    source = scoped_source(event.source, scope)
    return make_key("test", kind.kind, source, event.detail_type, parts)


def event_of(detail, **envelope):
    names = {"detail_type": "detail-type"}
    return from_object({names.get(n, n): v for n, v in envelope.items()} | {"detail": detail})


class Speller:
    """Writes the same value in ever other ways: order, blanks, numbers, escapes."""

    def __init__(self, dice):
        self.dice = dice

    def blank(self):
        return self.dice.choice(["", "", " ", "\n", "\t\r\n"])

    def write(self, value):
        if isinstance(value, dict):
            members = (
                f"{self.blank()}{self.string(name)}{self.blank()}:{self.padded(value[name])}"
                for name in self.dice.sample(list(value), len(value))
            )
            return f"{{{','.join(members)}}}"
        if isinstance(value, list):
            return f"[{','.join(map(self.padded, value))}]"
        if isinstance(value, str):
            return self.string(value)
        if value is None or isinstance(value, bool):
            return json.dumps(value)
        return self.number(value)

    def padded(self, value):
        return self.blank() + self.write(value) + self.blank()

    def string(self, text):
        return f'"{"".join(map(self.character, text))}"'

    def character(self, c):
        if self.dice.random() < 0.3:
            units = c.encode("utf-16-be")
            codes = [units[n : n + 2].hex() for n in range(0, len(units), 2)]
            return "".join("\\u" + self.dice.choice([code, code.upper()]) for code in codes)
        return "\\/" if c == "/" else json.dumps(c, ensure_ascii=False)[1:-1]

    def number(self, value):
        if isinstance(value, int) and abs(value) >= 2**53:
            return str(value)  # as a float it would be another number
        exact = Decimal(repr(value))
        shift = self.dice.randint(-3, 3)
        shifted = f"{exact.scaleb(-shift):f}e{shift}"
        return self.dice.choice([str(value), f"{exact:e}", f"{exact:E}", shifted])


def respell(value, dice):
    return Speller(dice).write(value).encode()


# --- what is the same event, and what is not


@pytest.mark.parametrize("apart", [(), VOLATILE.apart])
def test_one_event_in_eight_guises_has_one_key_and_two_others_have_their_own(apart):
    keys = [
        key_of(parse(path.read_bytes(), apart=apart), VOLATILE, scope="organisation")
        for path in VARIANTS
    ]
    assert len(keys) == 10
    assert len(set(keys[:8])) == 1
    assert len({keys[0], keys[8], keys[9]}) == 3


def test_every_sample_has_a_key_of_its_own():
    keys = {key_of(parse(path.read_bytes()), VOLATILE) for path in EVENTS.glob("*.json")}
    assert len(keys) == 17


@pytest.mark.parametrize(
    "spelling", ["1", "1.0", "1e0", "10e-1", "1E+0", "0.1e1", "100E-2", "1.000"]
)
def test_the_spelling_of_a_number_does_not_matter(spelling):
    assert key_of(parse(f'{{"detail":{{"n":{spelling}}}}}'.encode())) == key_of(event_of({"n": 1}))


@given(DETAILS, st.randoms(use_true_random=False))
def test_the_same_event_spelt_in_any_way_has_one_key(detail, dice):
    whole = {"id": "x", "source": "s", "detail-type": "t", "detail": detail}
    first, second = parse(respell(whole, dice)), parse(respell(whole, dice))
    assert key_of(first) == key_of(second) == key_of(from_object(whole))
    assert fingerprint(first) == fingerprint(second)
    inside = parse(respell(whole | {"detail": respell(detail, dice).decode()}, dice))
    assert key_of(inside) == key_of(first)


def places(value, path=()):
    """List the paths to everything that can be changed below *value*."""
    yield path
    if isinstance(value, dict):
        for name, item in value.items():
            yield from places(item, (*path, name))
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(item, (*path, index))


@given(DETAILS, VALUES, st.data())
def test_events_that_differ_in_one_place_differ_in_key(detail, value, data):
    *way, last = data.draw(st.sampled_from([path for path in places(detail) if path]))
    other = copy.deepcopy(detail)
    parent = other
    for step in way:
        parent = parent[step]
    assume(canonical(parent[last]) != canonical(value))
    parent[last] = value
    volatile = {"timestamp": 1, "metadata": {"a": 1}}
    left, right = event_of(detail | volatile), event_of(other | volatile)
    assume(last not in volatile or way)
    assert key_of(left) != key_of(right)
    assert fingerprint(left) != fingerprint(right)
    if not {"timestamp", "metadata"} & {*detail, *other}:
        assume(VOLATILE.parts(left) is not None and VOLATILE.parts(right) is not None)
        assert key_of(left, VOLATILE) != key_of(right, VOLATILE)


def test_numbers_do_not_pass_through_floats():
    raws = [
        b'{"detail":{"order":123456789012345678901234567890}}',
        b'{"detail":{"order":123456789012345678901234567891}}',
        b'{"detail":{"order":9223372036854775807}}',
        b'{"detail":{"order":9223372036854775806}}',
        b'{"detail":{"order":"9223372036854775806"}}',
    ]
    events = [parse(raw) for raw in raws]
    assert len({key_of(event) for event in events}) == 5
    fields = FieldsKey(["detail.order"])
    assert len({key_of(event, fields) for event in events}) == 5
    assert [event.raw for event in events] == raws


def test_equal_details_of_other_senders_and_types_are_other_events():
    keys = {
        key_of(event_of({"a": 1}, source=source, detail_type=kind))
        for source, kind in product(["s", "t"], ["x", "y"])
    }
    assert len(keys) == 4


def test_wrapped_records_are_no_events_and_their_contents_have_five_keys():
    bodies = [json.dumps({"id": f"{n}", "detail": {"n": n}}) for n in range(5)]
    keys = {key_of(parse(body.encode())) for body in bodies}
    assert len(keys) == 5
    assert hashlib.sha256(b"{}").digest() not in {key[1:] for key in keys}


# --- the form of a key


def test_a_key_is_a_version_and_a_hash():
    key = make_key("n", b"content", "s", "t", (b"{}",))
    framed = b"".join(len(p).to_bytes(8) + p for p in (b"n", b"content", b"s", b"t", b"{}"))
    assert key == bytes([KEY_VERSION]) + hashlib.sha256(framed).digest()
    assert len(key) == 33


TEXTS = st.text(alphabet="ab|\x00", max_size=3)
KEYS = st.tuples(TEXTS, TEXTS, TEXTS, TEXTS, st.lists(TEXTS, max_size=3))


@given(KEYS, KEYS)
def test_only_equal_ingredients_make_equal_keys(left, right):
    def key(ingredients):
        namespace, kind, source, detail_type, parts = ingredients
        return make_key(
            namespace, kind.encode(), source, detail_type, tuple(part.encode() for part in parts)
        )

    assert (key(left) == key(right)) == (left == right)


def test_where_one_ingredient_ends_matters():
    assert make_key("", b"", "a", "bc", ()) != make_key("", b"", "ab", "c", ())
    assert make_key("", b"", "", "", (b"a", b"bc")) != make_key("", b"", "", "", (b"ab", b"c"))
    assert make_key("", b"", "", "", (b"",)) != make_key("", b"", "", "", ())


def test_a_key_does_not_depend_on_the_keys_made_before():
    first = make_key("n", b"id", "s", "t", (b"1",))
    make_key("n", b"id", "s", "t", (b"2",))
    assert make_key("n", b"id", "s", "t", (b"1",)) == first


# --- content


@pytest.mark.parametrize(
    ("detail", "ignore"),
    [
        ({}, []),
        ({"timestamp": 1}, ["detail.timestamp"]),
        ({"timestamp": 1, "metadata": {}}, ["detail.timestamp", "detail.metadata"]),
        ({"a": 1, "b": [2]}, ["detail.*"]),
        ({"a": {"b": 1}}, ["detail.a.b"]),
        ({"a": {"b": 1}, "c": {"d": {"e": 2}}}, ["detail.a.*", "detail.c.d.e"]),
        ({"a": [1, 2]}, ["detail.a.*"]),
        ({"a": [{"b": 1}]}, ["detail.a.*.b"]),
    ],
)
def test_a_detail_with_nothing_left_is_no_key(detail, ignore):
    kind = ContentKey(ignore)
    assert kind.parts(event_of(detail)) is None
    assert kind.parts(parse(event_of(detail).raw, apart=kind.apart)) is None


# Was a bug: only nested paths were asked whether what they leave says anything; with plain names,
# nulls made a constant key, and strangers met under it.
@pytest.mark.parametrize("ignore", [["detail.at"], ["detail.at", "detail.a.at"]])
@pytest.mark.parametrize(
    "left",
    [
        *({"a": None}, {"a": []}, {"a": {}}, {"a": [None, {"b": None}], "c": {"d": [[]]}}),
        {f"{n:03}": None for n in range(40)},
    ],
)
def test_what_is_left_must_say_something(left, ignore):
    kind = ContentKey(ignore)
    for apart in ((), kind.apart, ("a",)):
        for detail in (left, left | {"at": 1}):
            assert kind.parts(parse(event_of(detail).raw, apart=apart)) is None
        said = left | {"z": 0}
        assert kind.parts(parse(event_of(said | {"at": 1}).raw, apart=apart)) == (canonical(said),)


@pytest.mark.parametrize("detail", [{"a": None}, {"a": []}, {"a": {"b": {}}}])
def test_where_nothing_is_ignored_all_of_the_detail_is_a_key(detail):
    assert ContentKey().parts(event_of(detail)) == (canonical(detail),)


@pytest.mark.parametrize("ignore", [[], ["detail.at"], ["detail.at", "detail.a.at"]])
def test_labels_count_and_are_no_key_by_themselves(ignore):
    kind = ContentKey(ignore, labels=["topic", "version"])
    for apart in ((), kind.apart, ("topic",)):
        for little in ({"topic": "t"}, {"topic": "t" * 400, "version": "2", "body": {"x": None}}):
            raw = event_of(little | ({"at": 1} if ignore else {})).raw
            assert kind.parts(parse(raw, apart=apart)) is None
        enough = {"topic": "t", "version": "2", "body": 0}
        assert kind.parts(parse(event_of(enough).raw, apart=apart)) == (canonical(enough),)


@pytest.mark.parametrize("ignore", [[], ["detail.trace"], ["detail.a.trace"]])
def test_a_content_can_need_a_member(ignore):
    kind = ContentKey(ignore, needs=["at"])
    for apart in ((), kind.apart, ("at",)):
        for detail in ({"n": 1}, {"n": 1, "at": None}, {"n": 1, "at": {}}):
            assert kind.parts(parse(event_of(detail).raw, apart=apart)) is None
        whole = {"n": 1, "at": 0}
        assert kind.parts(parse(event_of(whole).raw, apart=apart)) == (canonical(whole),)


def test_nothing_is_found_at_any_depth():
    nothing = None
    for _ in range(200):
        nothing = [nothing]
    event = from_object({"detail": {"a": nothing, "at": 1}}, limits=Limits(max_depth=1000))
    assert ContentKey(["detail.at"]).parts(event) is None


def test_a_bare_object_with_nothing_in_it_is_no_key():
    assert ContentKey().parts(parse(b"{}", bare=True)) is None


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        ([], {"a": {"b": 1, "c": 2}, "l": [{"t": 1, "u": 2}, 3, [{"t": 4}]], "x.y": 5, "*": 6}),
        (["detail.a"], {"l": [{"t": 1, "u": 2}, 3, [{"t": 4}]], "x.y": 5, "*": 6}),
        (["detail.a.b"], {"a": {"c": 2}, "l": [{"t": 1, "u": 2}, 3, [{"t": 4}]], "x.y": 5, "*": 6}),
        (["detail.l", "detail.*.c"], {"a": {"b": 1}, "x.y": 5, "*": 6}),
        (
            ["detail.l.*.t", "detail.a"],
            {"l": [{"u": 2}, 3, [{"t": 4}]], "x.y": 5, "*": 6},
        ),
        (["detail.l.*.*.t", "detail.a"], {"l": [{"t": 1, "u": 2}, 3, [{}]], "x.y": 5, "*": 6}),
        (['detail."x.y"', "detail.l"], {"a": {"b": 1, "c": 2}, "*": 6}),
        (['detail."*"', "detail.l"], {"a": {"b": 1, "c": 2}, "x.y": 5}),
        (['"detail"."a"', "detail.l"], {"x.y": 5, "*": 6}),
        (["detail.missing", "detail.a.b.c", "detail.l", "detail.a"], {"x.y": 5, "*": 6}),
        (["detail.a", "detail.a.b", "detail.l.*"], {"l": [], "x.y": 5, "*": 6}),
    ],
)
def test_ignored_paths_are_left_out_and_the_event_stays_whole(ignore, left):
    detail = {"a": {"b": 1, "c": 2}, "l": [{"t": 1, "u": 2}, 3, [{"t": 4}]], "x.y": 5, "*": 6}
    raw = json.dumps({"detail": detail}).encode()
    kind = ContentKey(ignore)
    for event in (parse(raw), parse(raw, apart=kind.apart), parse(raw, apart=("a", "zz"))):
        assert kind.parts(event) == (canonical(left),)
        assert event.detail == detail
        assert event.canonical == canonical(detail)


def test_ignoring_works_on_the_exact_path_too():
    raw = b'{"detail":{"n":1e-9,"timestamp":5,"a":{"b":1e21}}}'
    assert ContentKey(["detail.timestamp"]).parts(parse(raw)) == (b'{"a":{"b":1e+21},"n":1e-9}',)
    assert ContentKey(["detail.a.b"]).parts(parse(raw)) == (b'{"a":{},"n":1e-9,"timestamp":5}',)


def test_only_plain_names_are_set_apart():
    assert ContentKey().apart == ()
    assert VOLATILE.apart == ("timestamp", "metadata")
    assert ContentKey(["detail.a", "detail.b.c"]).apart == ()
    assert ContentKey(["detail.*"]).apart == ()


@pytest.mark.parametrize(
    "path",
    [
        *("", "detail", "detail.", "timestamp", "id", "*", "*.a", ".detail.a", "detail..a"),
        *("detail.a.", "detail.a b", "detail.a[0]", 'detail."a', 'detail.a"b"', "detail.a*"),
        *('detail."\\x"', 'detail."\\ud800"', "Detail.a", " detail.a", "detail.a\n"),
    ],
)
def test_a_bad_path_is_refused_with_its_place_and_what_is_allowed(path):
    with pytest.raises(ConfigError) as caught:
        ContentKey(["detail.fine", path], where="rules[2].ignore")
    assert caught.value.where == "rules[2].ignore[1]"
    assert "detail.timestamp" in caught.value.message


@pytest.mark.parametrize("make", [ContentKey, FieldsKey])
def test_one_string_is_not_a_list(make):
    for wrong in ("detail.a", [1]):
        with pytest.raises(ConfigError, match="list of strings"):
            make(wrong)


# --- id


def test_events_without_an_id_have_no_id_key():
    envelopes = [{}, {"id": None}, {"id": ""}, {"id": 7}, {"id": ["x"]}, {"id": {"x": 1}}]
    for number, envelope in enumerate(envelopes):
        assert IdKey().parts(event_of({"n": number}, **envelope)) is None
    assert len({key_of(event_of({"n": n}, **e)) for n, e in enumerate(envelopes)}) == len(envelopes)


def test_any_string_is_an_id():
    ids = ["x", "X", "x" * 10_000, "a\r\nb: c", "é", "\x00", " "]
    keys = [key_of(event_of({"a": 1}, id=value), IdKey()) for value in ids]
    assert len(set(keys)) == len(ids)
    assert {len(key) for key in keys} == {33}


# --- fields


@pytest.mark.parametrize(
    ("expressions", "detail"),
    [
        (["detail.a"], {}),
        (["detail.a"], {"a": None}),
        (["detail.a", "detail.b"], {"a": 1}),
        (["detail.a.b"], {"a": "text"}),
        (["detail.a.b"], {"a": [{"b": 1}]}),
        (["[detail.a, detail.b]"], {}),
        (["{x: detail.a}"], {"b": 1}),
        (["detail.l[*].x"], {"l": []}),
        (["detail.l[*].x"], {"l": [{"y": 1}]}),
        (["length(detail.a)"], {"a": 1}),
        (["join('-', [detail.a, detail.b])"], {"a": "x"}),
        (["to_number(detail.a)"], {"a": "nan"}),
        (["sum(detail.a)"], {"a": ["x"]}),
        (["&detail.a", "detail.a"], {"a": 1}),
    ],
)
def test_a_missing_or_null_part_makes_no_key(expressions, detail):
    assert FieldsKey(expressions).parts(event_of(detail)) is None


@pytest.mark.parametrize("value", [0, False, "", "null", [0], {"a": False}])
def test_what_is_there_is_a_part_even_if_it_is_false(value):
    parts = FieldsKey(["detail.a"]).parts(event_of({"a": value}))
    assert parts == (b"detail.a", canonical(value))


def test_equal_numbers_agree_and_a_string_is_another_value():
    kind = FieldsKey(["detail.a"])
    one = key_of(parse(b'{"detail":{"a":1}}'), kind)
    assert key_of(parse(b'{"detail":{"a":1.0,"z":3e-9}}'), kind) == one
    assert key_of(parse(b'{"detail":{"a":"1"}}'), kind) != one
    assert key_of(parse(b'{"detail":{"a":true}}'), kind) != one


def test_other_expressions_make_other_keys():
    event = event_of({"a": 1, "b": 1})
    rules = [["detail.a"], ["detail.b"], ["detail.a", "detail.b"], ["detail.b", "detail.a"]]
    assert len({key_of(event, FieldsKey(rule)) for rule in rules}) == 4


def test_the_kinds_of_key_never_meet():
    event = event_of({"a": 1}, id='{"a":1}')
    kinds = [ContentKey(), IdKey(), FieldsKey(["detail"])]
    assert len({key_of(event, kind) for kind in kinds}) == 3


def test_the_envelope_and_unknown_fields_can_be_asked_for():
    event = parse(b'{"detail-type":"t","extra":{"n":2},"detail":{"a b":{"c":[1,2]}}}')
    kind = FieldsKey(['"detail-type"', "extra.n", 'detail."a b".c', 'detail."a b".c[-1]'])
    assert kind.parts(event) == (
        *(b'"detail-type"', b'"t"'),
        *(b"extra.n", b"2"),
        *(b'detail."a b".c', b"[1,2]"),
        *(b'detail."a b".c[-1]', b"2"),
    )


PATHS = st.lists(st.sampled_from(["a", "b", '"c"']), min_size=1, max_size=4).map(".".join)


@given(
    st.recursive(
        st.integers() | st.none() | st.text(max_size=2),
        lambda inner: (
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3) | st.lists(inner, max_size=2)
        ),
    ).map(lambda value: {"a": value}),
    PATHS,
    st.none() | st.just("") | PATHS,
)
@example({"a": [{"b": 1}, [{"b": 2}, [{"b": 3}]], None, 4, {"c": 5}]}, "a", "b")
@example({"a": [1, [2, None], None]}, "a", "")
def test_a_direct_walk_finds_what_jmespath_finds(detail, path, each):
    event = event_of(detail)
    if each is not None:
        path += f"[].{each}" if each else "[]"
    found = jmespath.search(f"detail.{path}", {"detail": detail})
    assert compile_field(f"detail.{path}")(event) == found
    parts = FieldsKey([f"detail.{path}"]).parts(event)
    assert parts is None or parts[1] == canonical(found)
    if isinstance(found, int | str):
        assert parts is not None


@given(
    st.dictionaries(
        st.sampled_from("abc"), st.sampled_from([None, False, True, 0, 0.5, 1, "", "x", [], {}])
    ),
    st.lists(
        st.sampled_from(["detail.a", "detail.b", "detail.c[]", "id", "nowhere.a"]), min_size=2
    ),
    st.sampled_from(["||", " || ", "\n||\t"]),
)
@example({"a": 0, "b": 1}, ["detail.a", "detail.b"], "||")
@example({"a": False, "b": ""}, ["detail.a", "detail.b"], " || ")
def test_a_direct_choice_is_the_one_jmespath_makes(detail, choices, between):
    event = event_of({**detail, "z": 1}, id="e1")
    expression = between.join(choices)
    found = jmespath.search(expression, dict(event.envelope))
    chosen = compile_field(expression)(event)
    assert chosen == found
    assert type(chosen) is type(found)


def test_a_bar_in_a_name_is_no_choice():
    event = event_of({"a||b": 1, "a": 2, "b": 3})
    assert compile_field('detail."a||b"')(event) == 1


@pytest.mark.parametrize(
    "expression",
    [
        *("", "detail.", "detail..a", "detail-type", "detail.a[", "'", "nonsense("),
        *("foo(detail.a)", "detail.a && bar(detail.b)"),
    ],
)
def test_a_bad_expression_is_refused_with_its_place(expression):
    with pytest.raises(ConfigError) as caught:
        FieldsKey(["detail.fine", expression], where="rules[0].key")
    assert caught.value.where == "rules[0].key[1]"
    assert "\n" not in caught.value.message


def test_a_name_with_a_hyphen_gets_a_hint():
    with pytest.raises(ConfigError, match="quote a name"):
        FieldsKey(["detail-type"])


@pytest.mark.parametrize(
    "expressions",
    [[], ["'unknown'"], ["`1`"], ["detail.a || 'unknown'"], ["'a'", "`2`"], ["keys(@) || 'x'"]],
)
def test_a_constant_is_never_a_key(expressions):
    with pytest.raises(ConfigError):
        FieldsKey(expressions)


def test_a_fallback_beside_a_field_is_fine():
    kind = FieldsKey(["detail.a", "detail.b || 'none'"])
    assert kind.parts(event_of({"a": 1})) == (b"detail.a", b"1", b"detail.b || 'none'", b'"none"')
    assert kind.parts(event_of({"b": 1})) is None


# --- fingerprints and conflicts


def test_the_transport_does_not_change_the_fingerprint():
    envelope = {"source": "s", "detail_type": "t"}
    transport = {"id": "x", "time": "now", "region": "r", "account": "1", "replay-name": "n"}
    plain = fingerprint(event_of({"a": 1}, **envelope))
    assert fingerprint(event_of({"a": 1}, **envelope, **transport)) == plain
    assert len(plain) == 16


def test_content_source_and_type_change_the_fingerprint():
    envelope = {"source": "s", "detail_type": "t"}
    prints = {
        fingerprint(event_of({"a": 1}, **envelope)),
        fingerprint(event_of({"a": 2}, **envelope)),
        fingerprint(event_of({"a": 1}, **envelope | {"source": "t"})),
        fingerprint(event_of({"a": 1}, **envelope | {"detail_type": "s"})),
    }
    assert len(prints) == 4
    scoped = fingerprint(event_of({"a": 1}, **envelope | {"source": "other"}), source="s")
    assert scoped in prints


@pytest.mark.parametrize("apart", [(), VOLATILE.apart, ("a",)])
def test_the_fingerprint_leaves_out_what_is_ignored(apart):
    raws = [json.dumps({"detail": {"a": 1, "timestamp": t}}).encode() for t in (1, 2)]
    first, second = (parse(raw, apart=apart) for raw in raws)
    assert fingerprint(first) != fingerprint(second)
    assert fingerprint(first, content=VOLATILE) == fingerprint(second, content=VOLATILE)


def test_a_conflict_has_a_key_of_its_own():
    key = make_key("n", b"id", "s", "t", (b"1",))
    one, two = (fingerprint(event_of({"a": n})) for n in (1, 2))
    conflicts = {conflict_key(key, one), conflict_key(key, two), key}
    assert len(conflicts) == 3
    assert {len(k) for k in conflicts} == {33}
    assert {k[0] for k in conflicts} == {KEY_VERSION}


# --- scope


@pytest.mark.parametrize(
    ("source", "scoped"),
    [
        (f"{ORGANISATION}/genesys-prod", ORGANISATION),
        (f"{ORGANISATION}/second", ORGANISATION),
        ("aws.partner/genesys.com.test/cloud/o/x", "aws.partner/genesys.com.test/cloud/o"),
        (ORGANISATION, ORGANISATION),
        (f"{ORGANISATION}/", f"{ORGANISATION}/"),
        ("aws.partner/genesys.com/cloud/", "aws.partner/genesys.com/cloud/"),
        ("aws.partner/genesysXcom/cloud/o/x", "aws.partner/genesysXcom/cloud/o/x"),
        ("aws.partner/other.com/cloud/o/x", "aws.partner/other.com/cloud/o/x"),
        ("com.example/a/b/c/d", "com.example/a/b/c/d"),
        ("", ""),
    ],
)
def test_an_organisation_is_one_source_and_others_stay(source, scoped):
    assert scoped_source(source, "organisation") == scoped
    assert scoped_source(source, "source") == source
