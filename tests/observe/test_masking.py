"""Nothing that is hidden can be seen, whatever the event looks like."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncebridge.observe.masking import HIDDEN, Mask, indented
from oncebridge.service.config import MASKED

ENVELOPE = {
    "version": "0",
    "id": "id-1",
    "detail-type": "Order",
    "source": "com.example.shop",
    "account": "123456789012",
    "time": "2026-01-02T03:04:05Z",
    "region": "eu-central-1",
    "resources": ["arn:one"],
    "replay-name": "again",
}


def masked(value, *names, **more):
    return Mask(names, **more).masked(value)


# --- by name and by path --------------------------------------------------------------------


def test_a_name_hides_the_whole_value_wherever_it_stands_in_any_case():
    value = {"detail": {"ANI": "a", "deep": [{"ani": {"x": 1}, "other": "seen"}], "n": 3}}
    assert masked(value, "Ani") == {
        "detail": {"ANI": HIDDEN, "deep": [{"ani": HIDDEN, "other": "seen"}], "n": 3}
    }


@pytest.mark.parametrize(
    "path",
    [
        "detail.people.name",
        "detail.people[].name",
        "DETAIL.People.NAME",
        "detail.*.name",
        "detail.people.*",
    ],
)
def test_a_dotted_name_is_a_path_from_the_top_through_lists(path):
    value = {"detail": {"people": [{"name": "Ana"}, [{"name": "Ben"}]], "name": "seen"}}
    hidden = {"people": [{"name": HIDDEN}, [{"name": HIDDEN}]], "name": "seen"}
    assert masked(value, path) == {"detail": hidden}


def test_a_path_may_end_at_an_object_or_a_list():
    value = {"detail": {"people": [{"name": "Ana"}], "n": 1}}
    assert masked(value, "detail.people") == {"detail": {"people": HIDDEN, "n": 1}}


def test_a_path_leads_nowhere_else():
    value = {"detail": {"a": {"b": 1}, "x": {"a": {"b": 2}}, "b": 3}}
    assert masked(value, "detail.a.b")["detail"] == {
        "a": {"b": HIDDEN},
        "x": {"a": {"b": 2}},
        "b": 3,
    }


def test_a_dotted_name_may_be_that_of_one_member():
    assert masked({"detail": {"user.mail": "x"}}, "user.mail") == {"detail": {"user.mail": HIDDEN}}


def test_without_an_envelope_the_event_is_the_detail():
    assert masked({"a": {"b": 1}}, "detail.a.b") == {"a": {"b": HIDDEN}}
    assert masked([{"a": {"b": 1}}], "detail.a.b") == [{"a": {"b": HIDDEN}}]


def test_an_event_inside_a_wrapper_is_found_by_its_path():
    inner = {"detail": {"a": "secret"}}
    value = {"Records": [{"body": json.dumps(inner), "plain": inner}]}
    record = masked(value, "detail.a")["Records"][0]
    assert json.loads(record["body"]) == {"detail": {"a": HIDDEN}}
    assert record["plain"] == {"detail": {"a": HIDDEN}}


def test_json_in_a_string_is_looked_into_and_stays_a_string():
    twice = json.dumps(json.dumps({"ani": "secret", "n": 1}))
    value = {"detail": json.dumps({"ani": "secret", "x": twice})}
    shown = masked(value, "ani")["detail"]
    assert "secret" not in shown
    inner = json.loads(shown)
    assert inner["ani"] == HIDDEN
    assert json.loads(json.loads(inner["x"])) == {"ani": HIDDEN, "n": 1}
    assert masked({"detail": '{"a":{"b":1}}'}, "detail.a.b") == {"detail": '{"a":{"b":"•••"}}'}


@pytest.mark.parametrize(
    "text",
    [
        '{"ani": "secret',
        '{"x":1}\n{"ani":"secret"}',
        '{"\\u0061ni": "secret',
        'payload={"ani": "secret"}',
        r"payload={\"ani\": \"secret\"}",
        '\ufeff \n{"ani":"secret"}',
        '["ani", "secret"',
        " " * 5000 + '{"ani":"secret"}',
    ],
)
def test_what_only_looks_like_json_is_hidden_where_it_may_tell(text):
    assert "secret" not in json.dumps(masked({"detail": {"note": text}}, "ani"))


@pytest.mark.parametrize("text", ["{ not json", 'she said "hello"', "[1, 2", '"', "{"])
def test_other_text_stays(text):
    assert masked({"detail": {"note": text}}, "ani")["detail"]["note"] == text


def test_what_is_given_is_not_changed():
    value = {"detail": {"ani": ["x"], "l": [{"a": 1}]}}
    before = json.dumps(value)
    masked(value, "ani")
    masked(value, shape_only=True)
    assert json.dumps(value) == before


def test_blank_names_hide_nothing():
    value = {"detail": {"a": 1, "": 2}}
    assert masked(value, "", " ", ".", "[]") == value


def test_hides_tells_by_name_and_by_path():
    mask = Mask(["ani", "detail.people.name", "detail.x.*"])
    assert mask.hides("detail", "eventBody", "ANI")
    assert mask.hides("detail", "people", "name", "first")
    assert mask.hides("detail", "x", "y")
    assert not mask.hides("detail", "people")
    assert not mask.hides("detail", "name")
    assert not Mask([]).hides("detail")


# --- the shape alone ------------------------------------------------------------------------


def test_of_the_shape_the_envelope_is_seen_and_no_value_of_the_detail():
    detail = {"s": "text", "n": 7, "b": True, "z": None, "l": [1, {"x": "y"}], "o": {}, "e": []}
    shown = masked({**ENVELOPE, "detail": detail, "odd": "secret"}, shape_only=True)
    hidden = dict.fromkeys("snbz", HIDDEN)
    hidden |= {"l": [HIDDEN, {"x": HIDDEN}], "o": {}, "e": []}
    assert shown == {**ENVELOPE, "detail": hidden, "odd": HIDDEN}


def test_of_the_shape_a_detail_in_a_string_is_seen_as_well():
    shown = masked({**ENVELOPE, "detail": '{"a": {"b": "secret"}}'}, shape_only=True)
    assert shown["detail"] == '{"a":{"b":"•••"}}'
    assert masked({"detail": "secret"}, shape_only=True) == {"detail": HIDDEN}


def test_names_of_the_envelope_are_its_own_only_in_an_envelope():
    bare = {"id": "secret", "source": "secret", "x": 1}
    assert masked(bare, shape_only=True) == {"id": HIDDEN, "source": HIDDEN, "x": HIDDEN}
    odd = {"id": {"x": "secret"}, "resources": ["a", {"x": "secret"}], "time": 5, "detail": {}}
    assert "secret" not in json.dumps(masked(odd, shape_only=True))
    assert masked([{**ENVELOPE, "detail": {"a": 1}}], shape_only=True)[0]["id"] == "id-1"
    assert masked("secret", shape_only=True) == HIDDEN


def test_names_hide_in_the_envelope_of_a_shape_too():
    shown = masked({**ENVELOPE, "detail": {}}, "account", shape_only=True)
    assert shown["account"] == HIDDEN
    assert shown["id"] == "id-1"


# --- as text --------------------------------------------------------------------------------


def test_text_is_indented_json_and_of_what_is_none_only_the_size():
    mask = Mask(["ani"])
    assert mask.masked_text(b'{"detail":{"ani":"x","\xc3\xa9":1.5}}') == (
        '{\n  "detail": {\n    "ani": "•••",\n    "é": 1.5\n  }\n}'
    )
    for raw in (b"", b"secret", b"\xff\xfe", b'{"a":', b"\x00" * 2000):
        assert mask.masked_text(raw) == f"{len(raw):,} bytes, not JSON"
        assert mask.brief(raw) == b""


@pytest.mark.parametrize("depth", [50, 100, 1000, 100_000])
@pytest.mark.parametrize("shape_only", [False, True])
def test_depth_is_no_obstacle(depth, shape_only):
    mask = Mask(["ani"], shape_only=shape_only)
    for start, end in (("[", "]"), ('{"a":', "}")):
        raw = f'{{"id":"i","detail":{start * depth}{{"ani":"secret"}}{end * depth}}}'.encode()
        text = mask.masked_text(raw)
        assert "secret" not in text
        assert b"secret" not in mask.brief(raw)
        assert text.startswith("{") or "nested too deeply" in text


def test_strings_of_json_in_strings_without_end_are_no_obstacle():
    text = "secret"
    for _ in range(12):
        text = json.dumps({"ani": text, "x": text}) if len(text) < 100_000 else text
    shown = Mask(["ani"]).masked_text(json.dumps({"detail": text}).encode())
    assert shown.startswith("{")


def test_a_huge_event_is_cut_and_costs_little():
    many = {"detail": {"l": [{"n": i, "ani": f"secret-{i}"} for i in range(50_000)]}}
    long = {"detail": {"text": "x" * 2_000_000, "n" * 1_000_000: 1}}
    for value, mark in ((many, "more"), (long, "(2,000,000 characters)")):
        raw = json.dumps(value).encode()
        assert len(raw) > 1_800_000
        began = time.process_time()
        text = Mask(["ani"]).masked_text(raw)
        assert time.process_time() - began < 5
        assert len(text) < 600_000
        assert mark in text
        assert "secret" not in text
        json.loads(text)
    assert "too large" in Mask([]).masked_text(b" " * (4 << 20) + b"{}")


def test_duplicate_names_half_characters_and_controls_are_no_obstacle():
    raw = (
        rb'{"detail":{"ani":"secret","ani":"secret2","x":"\ud800","\udc00":"\u0000\u001b[2J",'
        rb'"b":"\u202e\u200b\u0085","n":' + b"9" * 5000 + rb',"f":1e400,"tag":"\udb40\udc41"}}'
    )
    text = Mask(["ani"]).masked_text(raw)
    assert "secret" not in text
    assert r"\ud800" in text
    assert r"\u202e\u200b\u0085" in text
    assert "(5,000 digits)" in text
    assert all(character == "\n" or character.isprintable() for character in text)
    text.encode()
    assert Mask([]).masked({"detail": {"n": 10**6000}}) == {"detail": {"n": "…"}}
    assert b"secret" not in Mask(["ani"]).brief(raw)


# --- for keeping ----------------------------------------------------------------------------


def test_what_is_kept_is_small_and_can_be_read():
    mask = Mask(["ani"])
    assert mask.brief(b'{"detail": {"ani": "x", "n": 1}}') == (
        '{"detail":{"ani":"•••","n":1}}'.encode()
    )
    assert indented(b'{"a":[1]}') == '{\n  "a": [\n    1\n  ]\n}'
    long = {"detail": {"a": "é" * 3000, "b": list(range(5000)), "c": {"d": "x" * 5000}}}
    kept = mask.brief(json.dumps(long, ensure_ascii=False).encode())
    assert len(kept) <= 4096
    assert "…" in indented(kept)
    assert mask.brief(b'{"x":"' + b"a" * 300_000 + b'"}') == b""


# --- whatever the event looks like ----------------------------------------------------------

SECRETS = st.integers(0, 10**6).map(lambda n: f"sekrit-{n}-sekrit")
NAMES = st.sampled_from(["a", "detail", "é", "x.y", "", "body2", "…", '"ani"', "id", "name1"])
HIDING = st.sampled_from(["ani", "ANI", "Email", "user.mail"])
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)
)


def _objects(inner):
    hidden = st.dictionaries(HIDING, st.one_of(SECRETS, st.lists(SECRETS), inner_secret(inner)))
    return st.tuples(st.dictionaries(NAMES, inner, max_size=4), hidden).map(
        lambda both: {**both[0], **both[1]}
    )


def inner_secret(inner):
    return st.tuples(SECRETS, inner).map(lambda both: {"deep": both[0], "x": both[1]})


VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), _objects(inner), inner.map(json.dumps), inner.map(str)
    ),
    max_leaves=25,
)


@given(VALUES, st.booleans())
def test_no_value_under_a_hidden_name_is_ever_seen(value, shape_only):
    mask = Mask(["ani", "email", "user.mail"], shape_only=shape_only)
    raw = json.dumps({"id": "1", "detail": value}).encode()
    assert "sekrit" not in mask.masked_text(raw)
    assert b"sekrit" not in mask.brief(raw)
    assert "sekrit" not in mask.masked_text(json.dumps(value).encode())


@given(
    st.recursive(
        SECRETS,
        lambda inner: st.one_of(
            st.lists(inner), st.dictionaries(NAMES, inner), inner.map(json.dumps)
        ),
        max_leaves=20,
    )
)
def test_of_a_shape_no_value_is_ever_seen(detail):
    mask = Mask(MASKED, shape_only=True)
    assert "sekrit" not in mask.masked_text(json.dumps({"id": "1", "detail": detail}).encode())


@given(st.binary(max_size=200))
def test_any_bytes_are_no_obstacle(raw):
    for mask in (Mask(["a"]), Mask(["a"], shape_only=True)):
        mask.masked_text(raw).encode()
        assert len(mask.brief(raw)) <= 4096


PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text("abé. ", max_size=9)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text("abé. ", max_size=4), inner, max_size=4),
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.text("abé. ", max_size=4), PLAIN, max_size=5))
def test_what_has_no_hidden_name_is_shown_as_it_is(detail):
    shown = Mask(["ani", "detail.x"]).masked({"detail": detail})
    assert repr(shown) == repr({"detail": detail})


def test_what_genesys_says_of_people_is_hidden_by_default():
    """Numbers, names, and what agents and customers wrote or said."""
    hidden = {
        "ani": "tel:+4912345",
        "callbackUserName": "Lee Invented",
        "wrapupNotes": "will call back",
        "attributes": {"customer": "Lee Invented"},
        "transcripts": [{"alternatives": [{"transcript": "my card is"}]}],
    }
    event = {"id": "a1", "detail": {"eventBody": {"conversationId": "c-1", **hidden}}}
    shown = json.dumps(Mask(MASKED).masked(event))
    assert "c-1" in shown
    for text in ("4912345", "Lee", "call back", "card"):
        assert text not in shown
