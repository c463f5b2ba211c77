"""A setting is declared once; what is read, written and described follows from it."""

import math
import re
import string
import tomllib
from datetime import timedelta
from typing import Annotated, Any, Literal

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import NODEFAULT, Struct, field
from msgspec.structs import fields as struct_fields

from oncebridge.base.options import (
    Doc,
    Problems,
    Rate,
    Size,
    Text,
    bounds,
    convert,
    describe_type,
    did_you_mean,
    format_setting,
    read,
    schema,
    settings_of,
)
from oncebridge.base.secrets import Address, Secret
from oncebridge.errors import ConfigError, ConfigErrors
from oncebridge.events.event import Limits
from oncebridge.events.rule_options import LatestOptions, QuietOptions, RuleOptions, TierOptions
from oncebridge.service.addresses import (
    BackendAddress,
    DeadPlace,
    SinkPlace,
    SourcePlace,
    StorePlace,
)
from oncebridge.service.config import Config, RouteOptions

CANARY = "c4n4ry-5hh"


class Inner(Struct, frozen=True, kw_only=True):
    depth: Annotated[int, Doc("How deep.", at_least=2, at_most=9)] = 3
    of: Annotated[str, Doc("Of what.")]


class Sample(Struct, frozen=True, kw_only=True, rename={"since": "from"}):
    text: Annotated[str, Doc("A text.", example="abc")] = "abc"
    flag: Annotated[bool, Doc("A flag.")] = False
    whole: Annotated[int, Doc("A number.", at_least=1, at_most=10_000_000)] = 1
    number: Annotated[float, Doc("Another.", at_least=0)] = 0.5
    size: Annotated[Size, Doc("A size.", at_least=1024)] = Size(1024)
    rate: Annotated[Rate | None, Doc("A rate.", example="5/s")] = None
    wait: Annotated[timedelta, Doc("A wait.")] = timedelta(seconds=30)
    choice: Annotated[Literal["red", "green"], Doc("A colour.")] = "red"
    secret: Annotated[Secret | None, Doc("A secret.")] = None
    secrets: Annotated[tuple[Secret, ...], Doc("Secrets.", example='["env:A"]')] = ()
    headers: Annotated[dict[str, Secret], Doc("Headers.")] = {}
    names: Annotated[list[str], Doc("Names.")] = []
    one_or_more: Annotated[list[str], Doc("One or more.", or_one=True)] = []
    either: Annotated[Literal["all", "none"] | list[str], Doc("Either.", example='["a"]')] = "all"
    inner: Annotated[Inner | None, Doc("A table.")] = None
    inners: Annotated[list[Inner], Doc("Tables.")] = []
    anything: Annotated[dict[str, Any] | None, Doc("Anything.")] = None
    since: Annotated[timedelta | None, Doc("Since when.")] = None


def reading(table, kind=Sample):
    """Read *table*, and give the record and the mistakes by place."""
    problems = Problems()
    record = read(kind, table, "", problems)
    return record, {problem.where: problem.message for problem in problems.found}


def mistake(**table):
    record, problems = reading(table)
    assert record is None
    assert len(problems) == 1, problems
    ((where, message),) = problems.items()
    return f"{where}: {message}"


# --- reading ----------------------------------------------------------------------------


def test_what_is_not_said_is_the_default():
    assert reading({}) == (Sample(), {})


def test_every_kind_is_read_from_what_a_file_holds():
    record, problems = reading(
        {
            "text": "x",
            "flag": True,
            "whole": 7,
            "number": 2,
            "size": "1MiB",
            "rate": "60/m",
            "wait": "5m",
            "choice": "green",
            "secret": "s",
            "secrets": ["a", "b"],
            "headers": {"X-A": "b"},
            "names": ["a"],
            "one_or_more": "only",
            "either": ["a", "b"],
            "inner": {"of": "sea"},
            "inners": [{"of": "a"}, {"of": "b", "depth": 9}],
            "anything": {"deep": {"er": [1, None]}},
            "from": "6d",
        }
    )
    assert not problems
    assert record == Sample(
        text="x",
        flag=True,
        whole=7,
        number=2.0,
        size=Size(1024 * 1024),
        rate=Rate(1),
        wait=timedelta(minutes=5),
        choice="green",
        secret=Secret("s"),
        secrets=(Secret("a"), Secret("b")),
        headers={"X-A": Secret("b")},
        names=["a"],
        one_or_more=["only"],
        either=["a", "b"],
        inner=Inner(of="sea"),
        inners=[Inner(of="a"), Inner(of="b", depth=9)],
        anything={"deep": {"er": [1, None]}},
        since=timedelta(days=6),
    )
    assert type(record.size) is Size
    assert type(record.number) is float


def test_every_kind_is_read_from_text():
    given = {
        "text": "x",
        "flag": "TRUE",
        "whole": "7",
        "number": "2.5",
        "size": "64KiB",
        "rate": "5/s",
        "wait": "250ms",
        "choice": "green",
        "secrets": "a, b,",
        "names": " a ,b",
        "one_or_more": "a,b",
        "either": "a,b",
    }
    table = {name: Text.of(text, f"--{name}") for name, text in given.items()}
    record, problems = reading(table)
    assert not problems
    assert (record.flag, record.whole, record.number) == (True, 7, 2.5)
    assert record.names == ["a", "b"]
    assert record.secrets == (Secret("a"), Secret("b"))
    assert record.one_or_more == ["a", "b"]  # an address would not be split: test_config.py
    assert record.either == ["a", "b"]
    assert type(record.text) is type(record.choice) is type(record.names[0]) is str


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"text": 5}, "text: 5: must be text, and not empty"),
        ({"text": ""}, "text: '': must be text, and not empty"),
        ({"text": "a\0b"}, r"text: 'a\x00b': must be text, and not empty"),
        ({"text": {"a": 1}}, "text: a table: must be text, and not empty"),
        ({"flag": 1}, "flag: 1: must be true or false"),
        ({"flag": "true"}, "flag: 'true': must be true or false"),
        ({"whole": True}, "whole: True: must be a whole number"),
        ({"whole": "7"}, "whole: '7': must be a whole number"),
        ({"whole": 7.0}, "whole: 7.0: must be a whole number"),
        ({"whole": 0}, "whole: 0: must be at least 1"),
        ({"whole": 10_000_001}, "whole: 10000001: must be at most 10000000"),
        ({"whole": 2**64}, "whole: is too large; a whole number may have at most 64 bits"),
        ({"whole": 16**5000}, "whole: is too large; a whole number may have at most 64 bits"),
        ({"number": "1"}, "number: '1': must be a number"),
        ({"number": math.nan}, "number: must be a finite number"),
        ({"number": math.inf}, "number: must be a finite number"),
        ({"number": 10**400}, "number: must be a finite number"),
        ({"number": -0.5}, "number: -0.5: must be at least 0"),
        ({"size": 1024}, "size: 1024: is not a size; write a number and a unit: 64KiB, 1MiB, 2GiB"),
        ({"size": "1000B"}, "size: 1000B: must be at least 1KiB"),
        ({"rate": "5"}, "rate: '5': is not a rate; write 100/s, 3000/m or 5000/h"),
        ({"rate": "0/s"}, "rate: '0/s': is not a rate; write 100/s, 3000/m or 5000/h"),
        ({"choice": "blue"}, "choice: 'blue': must be one of red, green"),
        ({"choice": "gren"}, "choice: 'gren': must be one of red, green; did you mean 'green'?"),
        ({"choice": 5}, "choice: 5: must be one of red, green"),
        ({"names": "a"}, "names: 'a': must be a list of text"),
        ({"names": ["a", 5]}, "names[1]: 5: must be text, and not empty"),
        ({"one_or_more": 5}, "one_or_more: 5: must be a list of text"),
        ({"one_or_more": ["a", 5]}, "one_or_more[1]: 5: must be text, and not empty"),
        ({"either": 5}, """either: 5: must be "all", "none" or list of text, such as ["a"]"""),
        (
            {"either": "nome"},
            """either: 'nome': must be "all", "none" or list of text, such as ["a"]; did you mean 'none'?""",
        ),
        (
            {"either": None},
            """either: None: must be "all", "none" or list of text, such as ["a"]""",
        ),
        ({"either": ["a", 5]}, "either[1]: 5: must be text, and not empty"),
        ({"inner": 5}, "inner: must be a table with depth, of"),
        ({"inner": {}}, "inner.of: is missing"),
        ({"inner": {"of": "a", "depht": 1}}, "inner.depht: no such setting; did you mean 'depth'?"),
        ({"inners": [{"of": "a"}, {"of": 5}]}, "inners[1].of: 5: must be text, and not empty"),
        ({"inners": [5]}, "inners[0]: must be a table with depth, of"),
        ({"anything": 5}, "anything: 5: must be a table"),
        ({"txet": "a"}, "txet: no such setting; did you mean 'text'?"),
        ({"since": "1s"}, "since: no such setting; did you mean 'size'?"),
    ],
)
def test_a_mistake_says_where_what_was_found_and_what_is_allowed(table, expected):
    assert mistake(**table) == expected


def test_a_name_like_no_other_is_told_all_there_are():
    assert mistake(zzz=1).startswith("zzz: no such setting; allowed: text, flag, whole, number, ")


def test_where_nothing_can_be_set_that_is_said():
    class Nothing(Struct):
        pass

    _, problems = reading({"a": 1}, Nothing)
    assert problems == {"a": "no such setting; there are no settings here"}
    assert did_you_mean("a", []) == "there are no settings here"


def test_what_is_found_is_quoted_in_short():
    assert mistake(choice="x" * 1000) == f"choice: '{'x' * 56}...: must be one of red, green"


def test_all_mistakes_come_at_once_at_every_depth():
    record, problems = reading(
        {
            "txet": 1,
            "flag": 2,
            "inner": {"depth": 1, "x": 1},
            "inners": [{"of": "a", "depth": 10}, 5, {"of": "b"}],
            "headers": {"A": 5, "B": "b", "C": ""},
            "names": [1, "a", 2],
        }
    )
    assert record is None
    assert problems.keys() == {
        *("txet", "flag", "inner.depth", "inner.x", "inner.of", "inners[0].depth", "inners[1]"),
        *("headers.A", "headers.C", "names[0]", "names[2]"),
    }


def test_a_mistake_in_text_is_named_by_where_the_text_came_from():
    table = {
        "whole": Text.of("many", "ONCEBRIDGE_WHOLE"),
        "names": Text.of("", "ONCEBRIDGE_NAMES"),
        "inner": {"of": "a", "depth": Text.of("1", "--set inner.depth")},
        "secrets": Text.of("env:NO_SUCH_SECRET", "--secrets"),
        "zzz": Text.of("1", "ONCEBRIDGE_ZZZ"),
        "flag": Text.of("yes", "ONCEBRIDGE_FLAG"),
    }
    _, problems = reading(table)
    assert problems.keys() == {
        *("ONCEBRIDGE_WHOLE", "ONCEBRIDGE_NAMES", "--set inner.depth", "--secrets"),
        *("ONCEBRIDGE_ZZZ", "ONCEBRIDGE_FLAG"),
    }


# An unset variable in a compose file would turn off the keys of the only door.
def test_an_empty_text_is_no_empty_list():
    for text in ("", " ", ",", " , ,"):
        where = mistake(secrets=Text.of(text, "ONCEBRIDGE_SOURCE__API_KEYS"))
        assert where.startswith("ONCEBRIDGE_SOURCE__API_KEYS: must be a list of secret")


def test_numbers_in_text_are_plain_ones():
    for text in ("", " 7", "7 ", "+7", "7_0", "0x7", "1e3", "7.0", "\u0667", "9" * 5000):
        assert "whole number" in mistake(whole=Text.of(text, "--whole"))
    for text in ("", "inf", "nan", "1e3", ".5", "5.", "\u0667", "9" * 5000):
        assert "number" in mistake(number=Text.of(text, "--number"))
    for text in ("", "yes", "1", "on", " true"):
        assert "true or false" in mistake(flag=Text.of(text, "--flag"))


@pytest.mark.parametrize(
    "table",
    [
        {"secrets": CANARY},
        {"secrets": {"a": CANARY}},
        {"secrets": [[CANARY]]},
        {"secrets": [{"a": CANARY}]},
        {"secrets": [f"env:{CANARY[:3]}"], "secret": [CANARY]},
        {"secret": [CANARY]},
        {"secret": {"a": CANARY}},
        {"headers": CANARY},
        {"headers": [CANARY]},
        {"headers": {"A": [CANARY]}},
        {"headers": {"A": {"b": CANARY}}},
    ],
)
def test_a_mistake_about_a_secret_does_not_quote_it(table):
    record, problems = reading(table)
    assert record is None
    assert CANARY not in str(problems)


def test_problems_are_raised_alone_or_together():
    problems = Problems()
    problems.check()
    problems.add("a", "is wrong")
    problems.add("a", "is wrong")
    with pytest.raises(ConfigError, match=r"^a: is wrong$") as caught:
        problems.check()
    assert not isinstance(caught.value, ConfigErrors)
    with problems.caught():
        raise ConfigErrors([ConfigError("b", "too"), ConfigError("", "as a whole")])
    with pytest.raises(ConfigErrors) as caught:
        problems.check()
    assert [error.where for error in caught.value.problems] == ["a", "b", ""]
    named = Problems("some.toml")
    named.add("a", "is wrong")
    with pytest.raises(ConfigErrors, match=r"^some\.toml: a: is wrong$"):
        named.check()


# --- sizes, rates, durations --------------------------------------------------------------

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
WORDS = st.text(st.sampled_from(string.digits + " .,/-+eBbKkMGismhd\t\n\u0663\u00b5"), max_size=8)


def value_of(kind, text):
    return convert(text, kind, Doc(""), "x", Problems())


@given(st.integers(0, 10**12 - 1), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "\t"]))
def test_a_size_is_a_number_and_a_unit(number, unit, blank):
    size = value_of(Size, f"{blank}{number}{blank}{unit}{blank}")
    assert size == number * UNITS[unit]


@given(st.integers(0, 2**63).map(Size))
def test_a_size_reads_back_as_it_is_written(size):
    text = format_setting(size)
    if len(text) <= 12:
        assert value_of(Size, text) == size


@given(WORDS)
def test_what_is_no_size_is_refused(text):
    pattern = r"(?a)\s*\d{1,12}\s*(B|KB|MB|GB|KiB|MiB|GiB)\s*"
    if re.fullmatch(pattern, text):
        assert value_of(Size, text) >= 0
    else:
        with pytest.raises(ConfigError, match="is not a size"):
            value_of(Size, text)


RATES = st.decimals(0, 10**12 - 1, places=3).filter(bool)


@given(RATES, st.sampled_from([("s", 1), ("m", 60), ("h", 3600)]))
def test_a_rate_is_a_number_and_a_unit_and_reads_back(number, unit):
    rate = value_of(Rate, f"{number:f}/{unit[0]}")
    assert rate == pytest.approx(float(number) / unit[1])
    assert rate > 0
    assert value_of(Rate, format_setting(rate)) == pytest.approx(rate, rel=1e-9)


@pytest.mark.parametrize("text", ["100/s", "3000/m", "5000/h", "0.5/s", "1000000/s", "1/h"])
def test_a_rate_reads_back_exactly(text):
    rate = value_of(Rate, text)
    assert value_of(Rate, format_setting(rate)) == rate


@given(WORDS)
def test_what_is_no_rate_is_refused(text):
    found = re.fullmatch(r"(?a)\s*(\d{1,12}(\.\d{1,6})?)\s*/\s*([smh])\s*", text)
    if found and float(found[1]):
        assert 0 < value_of(Rate, text) < math.inf
    else:
        with pytest.raises(ConfigError, match="is not a rate"):
            value_of(Rate, text)


@given(
    st.timedeltas(timedelta(milliseconds=1), timedelta(days=3650))
    | st.integers(1, 3650 * 86_400_000).map(lambda ms: timedelta(milliseconds=ms))
)
def test_a_duration_reads_back_as_it_is_written(duration):
    assert value_of(timedelta, format_setting(duration)) == duration


@given(WORDS)
def test_what_is_no_duration_is_refused_and_nothing_else_comes_out(text):
    problems = Problems()
    with problems.caught():
        found = value_of(timedelta, text)
        assert timedelta(milliseconds=1) <= found <= timedelta(days=3650)
    assert [problem.where for problem in problems.found] in ([], ["x"])


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_only_a_mistake_comes_out_of_reading_whatever_is_written(value):
    for setting in settings_of(Sample):
        problems = Problems()
        record = read(Sample, {setting.name: value}, "", problems)
        assert (record is None) == bool(problems.found)


# --- declarations -------------------------------------------------------------------------

OPTIONS = {
    kind.__name__: kind
    for place in (SourcePlace, StorePlace, SinkPlace, DeadPlace)
    for kind in place.option_kinds().values()
}
DECLARED = {
    kind.__name__: kind
    for kind in (
        *(Config, RouteOptions, RuleOptions, TierOptions, LatestOptions, QuietOptions, Limits),
        *OPTIONS.values(),
    )
}


def test_the_backends_that_have_options_declare_them():
    assert {"HttpSourceOptions", "HttpSinkOptions", "SQLiteOptions", "MemoryOptions"} <= set(
        OPTIONS
    )


@pytest.mark.parametrize("kind", DECLARED.values(), ids=DECLARED)
def test_everything_declared_has_a_sentence(kind):
    for setting in settings_of(kind):
        where = f"{kind.__name__}.{setting.name}"
        assert re.fullmatch(r'["A-Z].*[.]', setting.doc.text, re.DOTALL), where
        assert re.fullmatch(r"[a-z][a-z_]*", setting.name), where
        assert describe_type(setting.kind), where


@pytest.mark.parametrize("kind", DECLARED.values(), ids=DECLARED)
def test_every_default_is_one_that_could_be_written(kind):
    for setting in settings_of(kind):
        if setting.required or setting.default in (None, [], (), {}):
            continue
        if isinstance(setting.default, Struct):
            assert settings_of(type(setting.default))  # and looked at by itself
            continue
        text = format_setting(setting.default)
        value = tomllib.loads(f"x = {quoted(setting, text)}")["x"]
        problems = Problems()
        again = convert(value, setting.kind, setting.doc, setting.name, problems)
        assert not problems.found
        if "Place" in str(setting.kind):  # a default that is read like any other value
            place = again[0] if isinstance(again, list) else again
            assert (place.url, isinstance(place, BackendAddress)) == (setting.default, True)
        else:
            assert again == setting.default, setting.name


def quoted(setting, text):
    bare = isinstance(setting.default, bool | str | tuple) or type(setting.default) in (int, float)
    return text if bare else f'"{text}"'


@pytest.mark.parametrize("kind", DECLARED.values(), ids=DECLARED)
def test_every_example_is_one_that_could_be_written(kind, monkeypatch, tmp_path):
    for setting in settings_of(kind):
        example = setting.doc.example
        if not example or "Place" in str(setting.kind):
            continue
        try:
            value = tomllib.loads(f"x = {example}")["x"]
        except tomllib.TOMLDecodeError:
            value = example
        for name in re.findall(r"env:(\w+)", example):
            monkeypatch.setenv(name, "something")
        if "file:" in example:
            (tmp_path / "secret").write_text("something")
            value = [f"file:{tmp_path / 'secret'}"]
        problems = Problems()
        convert(value, setting.kind, setting.doc, setting.name, problems)
        assert not problems.found, [str(problem) for problem in problems.found]


@pytest.mark.parametrize("kind", DECLARED.values(), ids=DECLARED)
def test_bounds_are_for_what_can_be_compared_and_hold_the_default(kind):
    for setting in settings_of(kind):
        least, most = bounds(setting.kind, setting.doc)
        if least is None and most is None:
            continue
        assert any(kind in str(setting.kind) for kind in ("int", "Size", "float", "timedelta"))
        if setting.default is not None:
            assert least is None or least <= setting.default
            assert most is None or setting.default <= most


def test_own_settings_come_first_and_then_those_that_are_inherited():
    names = [setting.name for setting in settings_of(RuleOptions)]
    assert names[:2] == ["name", "match"]
    assert names[-6:] == ["key", "ignore", "window", "sliding", "max_window", "check"]
    fields = {each.encode_name for each in struct_fields(RuleOptions)}
    assert set(names) == fields


def test_a_factory_is_a_default_as_well():
    class Made(Struct, kw_only=True):
        names: Annotated[list[str], Doc("Names.")] = field(default_factory=lambda: ["a"])
        must: Annotated[str, Doc("Must.")]
        bare: int = 5

    names, must, bare = settings_of(Made)
    assert (names.default, names.required) == (["a"], False)
    assert (must.default, must.required) == (None, True)
    assert (bare.default, bare.doc) == (5, Doc(""))
    assert struct_fields(Made)[1].default is NODEFAULT


# --- writing --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (True, "true"),
        (False, "false"),
        (5, "5"),
        (0.5, "0.5"),
        (timedelta(seconds=90), "90s"),
        (Size(0), "0B"),
        (Size(1000), "1000B"),
        (Size(1024), "1KiB"),
        (Size(3 * 2**20), "3MiB"),
        (Size(2**31), "2GiB"),
        (Rate(100), "100/s"),
        (Rate(5000 / 3600), "5000/h"),
        (Rate(2_000_000), "2000000/s"),
        ("a", '"a"'),
        ('a "b" \\ c', '"a \\"b\\" \\\\ c"'),
        ("\u00e9", '"\u00e9"'),
        (["a", 1], '["a", 1]'),
        (("a",), '["a"]'),
        ({}, "{}"),
        ({"a": 1}, "{\u2026}"),
        (Inner(of="a"), ""),
        (Secret(CANARY), "***"),
        ((Secret(CANARY),), "[***]"),
        (Address(f"redis://:{CANARY}@h"), '"redis://***@h"'),
    ],
)
def test_a_value_is_written_as_the_configuration_would(value, text):
    assert format_setting(value) == text


# --- describing -----------------------------------------------------------------------------


def test_the_schema_says_what_the_declarations_say():
    described = schema(Sample)
    assert described["additionalProperties"] is False
    assert "required" not in described
    properties = described["properties"]
    assert properties["whole"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 10_000_000,
        "description": "A number.",
        "default": 1,
    }
    assert properties["wait"]["default"] == "30s"
    assert properties["choice"]["enum"] == ["red", "green"]
    assert properties["inner"]["required"] == ["of"]
    assert "since" not in properties
    assert CANARY not in str(schema(Sample))


ANYTHING = st.recursive(
    st.booleans() | st.integers(-3, 12) | st.sampled_from(["", "a", "red", "gren", "1MiB", "5/s"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["of", "depth", "zzz"]), inner, max_size=3)
    ),
    max_leaves=4,
)
GOOD = {
    "text": st.sampled_from(["a", "b c"]),
    "flag": st.booleans(),
    "whole": st.integers(1, 10_000_000),
    "number": st.floats(0, 1e9),
    "size": st.integers(1, 1000).map("{}KiB".format) | st.just(" 1 MiB "),
    "rate": st.integers(1, 1000).map("{}/s".format) | st.just(" 5 / m "),
    "wait": st.integers(1, 1000).map("{}s".format) | st.just(" 1.5h "),
    "choice": st.sampled_from(["red", "green"]),
    "secret": st.just("s"),
    "secrets": st.lists(st.just("s"), max_size=2),
    "headers": st.dictionaries(st.sampled_from(["A", "B"]), st.just("s")),
    "names": st.lists(st.just("a"), max_size=2),
    "one_or_more": st.just("a") | st.lists(st.just("a"), max_size=2),
    "either": st.sampled_from(["all", "none", ["a"], []]),
    "inner": st.fixed_dictionaries({"of": st.just("a")}, optional={"depth": st.integers(2, 9)}),
    "inners": st.lists(st.just({"of": "a"}), max_size=2),
    "anything": st.dictionaries(st.text(), ANYTHING, max_size=2),
    "from": st.just("1d"),
}
VALIDATOR = jsonschema_rs.Draft202012Validator(schema(Sample))


@given(st.fixed_dictionaries({}, optional=GOOD))
def test_what_is_in_order_is_so_for_the_schema_too(table):
    record, problems = reading(table)
    assert not problems
    assert record is not None
    assert VALIDATOR.is_valid(table)


# The schema cannot know the size of a size, nor that a secret is to be looked up.
@given(st.dictionaries(st.sampled_from([*GOOD, "zzz", "since"]), ANYTHING, max_size=4))
def test_the_schema_and_the_reader_are_of_one_mind(table):
    record, _ = reading(table)
    assert VALIDATOR.is_valid(table) == (record is not None)


def test_a_duration_is_bounded_in_seconds():
    class Bounded(Struct, frozen=True, kw_only=True):
        wait: Annotated[timedelta, Doc("How long.", at_least=0.5, at_most=60)] = timedelta(
            seconds=1
        )

    assert reading({"wait": "500ms"}, Bounded)[1] == {}
    assert reading({"wait": "499ms"}, Bounded)[1] == {"wait": "499ms: must be at least 500ms"}
    assert reading({"wait": "61s"}, Bounded)[1] == {"wait": "61s: must be at most 1m"}
