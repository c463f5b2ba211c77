import hashlib
import json
import math
import struct
from decimal import Decimal
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fuzz.slow_reader import decimal_text

from oncebridge.errors import EventError
from oncebridge.events.canonical import (
    canonical,
    canonical_plain,
    decode_canonical,
    number_text,
    plain_number,
)
from oncebridge.events.event import parse
from oncebridge.events.exact_float import ExactFloat

VECTORS = Path(__file__).parent.parent / "jcs"

APPENDIX_B = {
    "0000000000000000": "0",
    "8000000000000000": "0",
    "0000000000000001": "5e-324",
    "8000000000000001": "-5e-324",
    "7fefffffffffffff": "1.7976931348623157e+308",
    "ffefffffffffffff": "-1.7976931348623157e+308",
    "4340000000000000": "9007199254740992",
    "c340000000000000": "-9007199254740992",
    "4430000000000000": "295147905179352830000",
    "44b52d02c7e14af5": "9.999999999999997e+22",
    "44b52d02c7e14af6": "1e+23",
    "44b52d02c7e14af7": "1.0000000000000001e+23",
    "444b1ae4d6e2ef4e": "999999999999999700000",
    "444b1ae4d6e2ef4f": "999999999999999900000",
    "444b1ae4d6e2ef50": "1e+21",
    "3eb0c6f7a0b5ed8c": "9.999999999999997e-7",
    "3eb0c6f7a0b5ed8d": "0.000001",
    "41b3de4355555553": "333333333.3333332",
    "41b3de4355555554": "333333333.33333325",
    "41b3de4355555555": "333333333.3333333",
    "41b3de4355555556": "333333333.3333334",
    "41b3de4355555557": "333333333.33333343",
    "becbf647612f3696": "-0.0000033333333333333333",
    "43143ff3c1cb0959": "1424953923781206.2",
}

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**40), max_value=10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(min_value=-(2**60), max_value=2**60).map(float)
    | st.sampled_from(["1.000000000000000001", "-1e-400", "1e-999999999"]).map(ExactFloat)
    | st.text()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


def slow(value):
    """Write RFC 8785 in another way than the library does, to compare with."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value)
    if isinstance(value, ExactFloat):
        return value.text
    if isinstance(value, float):
        return slow_number(value)
    if isinstance(value, str):
        return slow_string(value)
    if isinstance(value, list):
        return "[" + ",".join(slow(item) for item in value) + "]"
    names = sorted(value, key=lambda name: list(struct.iter_unpack(">H", name.encode("utf-16-be"))))
    return "{" + ",".join(slow_string(name) + ":" + slow(value[name]) for name in names) + "}"


def slow_number(value):
    if value == 0:
        return "0"
    return decimal_text(Decimal(repr(value)).normalize())


def slow_string(value):
    short = {'"': '\\"', "\\": "\\\\"} | dict(
        zip("\b\t\n\f\r", ["\\b", "\\t", "\\n", "\\f", "\\r"], strict=True)
    )
    return (
        '"' + "".join(short.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in value) + '"'
    )


def published_numbers():
    """Yield the doubles of the test suite: fixed ones, a row of small ones, a hash chain."""
    for line in (VECTORS / "es6_static_u64.txt").read_text().split():
        yield int(line, 16)
    yield from range(0x0010000000000000, 0x0010000000000000 + 2000)
    block = bytes(32)
    while True:
        block = hashlib.sha256(block).digest()
        for (bits,) in struct.iter_unpack("<Q", block):
            number = as_double(bits)
            if number != 0 and math.isfinite(number):
                yield bits


def as_double(bits):
    return struct.unpack(">d", struct.pack(">Q", bits))[0]


@pytest.mark.parametrize("name", ["arrays", "french", "structures", "unicode", "values", "weird"])
def test_the_published_vectors_come_out_byte_for_byte(name):
    raw = (VECTORS / "input" / f"{name}.json").read_bytes()
    expected = bytes.fromhex((VECTORS / "outhex" / f"{name}.txt").read_text())
    assert canonical(json.loads(raw)) == expected
    event = parse(b'{"detail":{"value":' + raw + b"}}")
    # The RFC reads numbers as doubles. We keep the digits of the one that is not the double's.
    exact = expected.replace(b"[333333333.3333333,", b"[333333333.33333329,")
    assert (exact != expected) is (name == "values")
    assert canonical(event.detail["value"]) == exact
    assert event.canonical == b'{"value":' + exact + b"}"


@pytest.mark.parametrize(
    ("count", "digest"),
    [
        (1_000, "be18b62b6f69cdab33a7e0dae0d9cfa869fda80ddc712221570f9f40a5878687"),
        (10_000, "b9f7a8e75ef22a835685a52ccba7f7d6bdc99e34b010992cbc5864cd12be6892"),
    ],
)
def test_the_published_numbers_have_the_published_hash(count, digest):
    lines = (
        f"{bits:x},{canonical(as_double(bits)).decode()}\n"
        for bits in islice(published_numbers(), count)
    )
    assert hashlib.sha256("".join(lines).encode()).hexdigest() == digest


@pytest.mark.parametrize(("bits", "text"), APPENDIX_B.items())
def test_appendix_b_of_the_rfc(bits, text):
    number = as_double(int(bits, 16))
    assert canonical(number) == text.encode()
    assert canonical({"n": [number]}) == f'{{"n":[{text}]}}'.encode()


@pytest.mark.parametrize("number", [1, 1.0])
def test_the_spelling_of_a_number_does_not_matter(number):
    assert canonical(number) == b"1"


@pytest.mark.parametrize("number", [0, -0, 0.0, -0.0])
def test_zero_has_no_sign(number):
    assert canonical(number) == b"0"


@pytest.mark.parametrize(
    "number", [2**53 + 1, 2**63 - 1, 2**63 - 2, 2**64 + 1, -(2**64) - 1, 10**30, 10**4000 + 1]
)
def test_integers_are_exact_at_any_size(number):
    assert canonical({"n": number}) == f'{{"n":{number}}}'.encode()


def test_names_are_sorted_by_utf_16_units_at_any_depth():
    value = {"list": [{"\ufb33": 1, "\U0001f602": 2}]}
    assert canonical(value) == '{"list":[{"\U0001f602":2,"\ufb33":1}]}'.encode()


def test_astral_characters_in_values_change_nothing():
    value = {"b": "\U0001f602", "a": ["\U0001f602", {"é": "\ufb33"}]}
    assert canonical(value) == slow(value).encode()


PIECES = ["\U0001f602", "\U0010ffff", '"', "\\", ":", '":', "a", "\ufb33", "\n"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)


@given(
    st.recursive(
        TEXTS,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(TEXTS | st.just("\ufb33"), inner, max_size=4)
        ),
    )
)
@example({'\U0001f602"b': 1, '\ufb33"b': 2})
@example({"\U0001f602\\": 1, "\ufb33\\": 2})
@example({"a": '\U0001f602\\"', "\U0001f602": 1, "\ufb33": 2})
@example("\U0001f602")
def test_names_are_told_from_other_strings_whatever_is_in_them(value):
    assert canonical(value) == slow(value).encode()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wrap", [lambda n: n, lambda n: [n], lambda n: {"a": {"b": n}}])
def test_what_is_not_finite_is_refused(number, wrap):
    with pytest.raises(EventError) as caught:
        canonical(wrap(number))
    assert caught.value.reason == "not-finite"


@pytest.mark.parametrize(
    "value", ["\ud800", ["\udfff"], {"\ud800": 1}, {"a": "x\udc00y"}, {"\ud800": 1e-9}]
)
def test_half_a_surrogate_pair_is_refused(value):
    with pytest.raises(EventError) as caught:
        canonical(value)
    assert caught.value.reason == "lone-surrogate"
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("value", [(1,), {1: 2}, {1, 2}, b"x", Decimal(1), object(), [1j]])
def test_what_json_cannot_say_is_refused(value):
    with pytest.raises(EventError) as caught:
        canonical(value)
    assert caught.value.reason == "not-json"


def test_an_integer_that_python_will_not_print_is_refused():
    with pytest.raises(EventError) as caught:
        canonical([10**5000])
    assert caught.value.reason == "number-too-long"


def test_a_bottomless_value_is_refused():
    value = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(EventError) as caught:
        canonical(value)
    assert caught.value.reason == "too-deep"
    while value:  # taken apart by hand: a deep destructor is not what is tested
        value = value.pop()


@given(VALUES)
@example({"": 1e21, "a": 1e-7, "b": 123456789012345680.0, "c": 5e-324, "d": 1e-5})
@example({"\U0001f602": {"\ufb33": 0.5, "\U00010000": 1}, "\uffff": 2.0})
def test_the_fast_and_the_slow_way_agree(value):
    assert canonical(value) == slow(value).encode()
    assert canonical(decode_canonical(canonical(value))) == canonical(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
@example(1e-4)
@example(9.999999999999999e-5)
@example(float(2**53))
@example(float(2**53 - 1))
def test_a_plain_float_needs_no_care_and_any_other_is_known(number):
    assert number_text(number) == slow_number(number)
    plain = plain_number(number)
    if plain is not None:
        assert plain == number
        assert canonical_plain(plain) == number_text(number).encode()
