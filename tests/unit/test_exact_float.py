import copy
import json
import math
import pickle
from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fuzz.slow_reader import Refused, decimal_slowly
from tests.fuzz.strategies import decimals, floats

from oncebridge.aws.powertools.payload import digest, finder
from oncebridge.events.canonical import canonical, number_text
from oncebridge.events.event import parse
from oncebridge.events.exact_float import ExactFloat, read_decimal
from oncebridge.events.key import ContentKey, FieldsKey, fingerprint

# Texts that name one number, a row each. No two rows have a number in common.
NUMBERS = [
    ["0.1", "0.10", "0.10000000000000001", "0.10000000000000000555", "1.00000000000000005551e-1"],
    ["0.1000000000000000001", "1.000000000000000001e-1", "0.10000000000000000010"],
    ["1", "1.0", "1e0", "0.01E2", "1.0000000000000000000000"],
    ["1.000000000000000001", "1000000000000000001e-18", "1.00000000000000000100"],
    ["1.000000000000000002"],
    ["-1.000000000000000002"],
    ["9007199254740992.0", "9007199254740992", "9.007199254740992e15"],
    ["9007199254740993.0", "9007199254740993", "9.007199254740993E+15"],
    ["9007199254740992.5"],
    ["100000000000000000000.0", "100000000000000000000", "1e20"],
    ["100000000000000000001.0", "100000000000000000001", "1.00000000000000000001e20"],
    ["1.2345678901234567890123e22", "12345678901234567890123.0"],
    ["1e-400", "0.1e-399", "10E-401"],
    ["2e-400"],
    ["-1e-400"],
    ["0", "0.0", "-0.0", "-0", "0e-400", "0e99999999999999999999", "0.000000000000000000000000"],
    ["5e-324", "4.9e-324", "4.94065645841246544e-324"],
    ["3e-324"],
    ["1e-320", "9.99989e-321", "1.0e-320"],
    ["9.9998e-321"],
    ["2.2250738585072014e-308", "2.22507385850720138e-308"],
    ["5.684341886080802e-14", "5.6843418860808015e-14"],  # the shortest digits are not the nearest
    ["5.684341886080801e-14"],
    ["1.7976931348623157e308", "1.79769313486231570815e308"],
    ["1.7976931348623158e308"],
    ["1e-999999999", "0.1e-999999998"],
    ["1e-999999999999999999"],
    ["123456789012345.67"],
    ["1234567890123456.1"],
    ["1234567890123456", "1234567890123456.0"],
]
WAYS = {
    "content": ContentKey(),
    "content without a field": ContentKey(["detail.o"]),
    "content without a path": ContentKey(["detail.l.*.o"]),
    "field": FieldsKey(["detail.n"]),
    "field of an array": FieldsKey(["detail.l[].n"]),
    "choice": FieldsKey(["detail.missing || detail.n"]),
    "JMESPath": FieldsKey(["detail.l[0].n"]),
    "JMESPath that filters": FieldsKey(["detail.l[?n == n].n | [0]"]),
    "to_number": FieldsKey(["to_number(detail.n)"]),
}


def event_of(text):
    return parse(f'{{"detail":{{"n":{text},"l":[{{"n":{text},"o":0.5}}],"o":1}}}}'.encode())


@pytest.mark.parametrize("way", WAYS)
def test_numbers_that_differ_have_different_keys_and_spellings_of_one_have_the_same(way):
    keys = [{WAYS[way].parts(event_of(text)) for text in row} for row in NUMBERS]
    assert None not in set.union(*keys)
    assert [len(found) for found in keys] == [1] * len(NUMBERS)
    assert len(set.union(*keys)) == len(NUMBERS)


def test_the_fingerprint_tells_them_apart_too():
    found = [{fingerprint(event_of(text)) for text in row} for row in NUMBERS]
    assert [len(each) for each in found] == [1] * len(NUMBERS)
    assert len(set.union(*found)) == len(NUMBERS)


@pytest.mark.parametrize(
    "expression",
    [
        *("abs(detail.n)", "ceil(detail.n)", "floor(detail.n)", "sum([detail.n])"),
        *("avg([detail.n])", "max([detail.n])", "min([detail.n])", "sort([detail.n])"),
        *("to_string(detail.n)", "to_string(detail)", "to_string([{a: detail.n}])"),
        *("sort_by(detail.l, &n)", "max_by(detail.l, &n)", "min_by(detail.l, &n)"),
        *("join('-', [to_string(detail.n)])", "length(to_string(detail.n))"),
    ],
)
def test_a_function_that_would_round_makes_no_key(expression):
    kind = FieldsKey(["detail.n", expression])
    assert kind.parts(event_of("1.5")) is not None
    assert kind.parts(event_of("1.000000000000000001")) is None
    assert kind.parts(event_of("1e-400")) is None


def test_a_text_becomes_a_number_without_rounding():
    kind = FieldsKey(["to_number(detail.n)"])
    texts = ['"1.000000000000000001"', '"1.000000000000000002"', '"1"', '"1.0"', '"1e-400"']
    one, other, whole, same, small = (kind.parts(event_of(text)) for text in texts)
    assert len({one, other, whole, small}) == 4
    assert whole == same
    assert one == kind.parts(event_of("1.000000000000000001"))
    assert kind.parts(event_of('"x"')) is None
    assert kind.parts(event_of('"1e-99999999999999999999"')) is None


@pytest.mark.parametrize(
    ("filter_", "found"),
    [("n > `1`", True), ("n < `1`", False), ("n == `1`", False), ("n <= `1.5`", True)],
)
def test_a_filter_compares_by_the_exact_value(filter_, found):
    kind = FieldsKey([f"detail.l[?{filter_}].o | [0]"])
    assert (kind.parts(event_of("1.000000000000000001")) is not None) is found


def test_the_functions_of_powertools_do_not_round():
    find = finder("event_key_jmespath", "powertools_json(body).n", None)
    texts = ("1.000000000000000001", "1.000000000000000002", "1.0", "1")
    one, other, whole, same = (digest(find({"body": f'{{"n":{text}}}'})) for text in texts)
    assert len({one, other, whole}) == 3
    assert whole == same
    with pytest.raises(ValueError, match="round"):
        finder("event_key_jmespath", "to_string(powertools_json(body))", None)({"body": "[1e-400]"})


@pytest.mark.parametrize("text", ["1e-999999999", "-1.5e-999999999999999999", "1e-400"])
def test_a_large_exponent_is_not_written_out(text):
    event = event_of(text)
    assert canonical(event.detail["n"]) == text.encode()
    assert event.detail["n"] < 1
    assert hash(event.detail["n"]) == hash(event_of(text).detail["n"])


@given(decimals)
def test_a_decimal_is_read_as_the_slow_reader_reads_it(text):
    try:
        expected = decimal_slowly(text)
    except Refused:
        try:
            assert not math.isfinite(read_decimal(text))
        except ValueError:
            return
    else:
        found = read_decimal(text)
        assert (type(found), canonical(found)) == (type(expected), canonical(expected))


@given(floats, st.integers(16, 60))
@example(2.0**-44, 16)
@example(5e-324, 17)
def test_a_double_is_a_double_however_many_of_its_digits_are_written(double, digits):
    for text in (repr(double), f"{double:.{digits}e}", f"{double:.{digits + 1}g}"):
        if "." in text or "e" in text:
            found = read_decimal(text)
            assert type(found) is float
            assert found == double


@given(decimals, decimals)
def test_only_equal_values_have_one_form(one, other):
    try:
        numbers = read_decimal(one), read_decimal(other)
    except ValueError:
        return
    if not all(map(math.isfinite, numbers)):
        return
    values = [Decimal(number_text(each) if type(each) is float else str(each)) for each in numbers]
    assert (canonical(numbers[0]) == canonical(numbers[1])) is (values[0] == values[1])


def test_to_code_that_knows_nothing_of_it_it_is_a_float():
    number = parse(b'{"detail":{"n":1.000000000000000001}}').detail["n"]
    assert isinstance(number, float)
    assert json.dumps({"n": number}) == '{"n": 1.0}'
    assert number + 1 == 2.0
    assert round(number, 2) == 1.0
    assert math.isfinite(number)
    assert f"{number:.2f}" == "1.00"
    assert repr(number) == str(number) == f"{number}" == "1.000000000000000001"


def test_it_is_compared_by_its_exact_value():
    number, next_ = ExactFloat("1.000000000000000001"), ExactFloat("1.000000000000000002")
    for smaller, larger in [
        (1, number),
        (1.0, number),
        (number, next_),
        (number, 2),
        (number, 1.0000000000000002),
        (ExactFloat("-1.000000000000000001"), -1),
        (0, ExactFloat("1e-400")),
        (ExactFloat("1e-400"), 5e-324),
        (0.1, ExactFloat("0.1000000000000000001")),
        (number, math.inf),
        (number, 10**5000),
    ]:
        assert smaller < larger
        assert smaller <= larger
        assert larger > smaller
        assert larger >= smaller
        assert smaller != larger
        assert not smaller == larger  # noqa: SIM201 - another method
        assert not larger < smaller
        assert not larger <= smaller
    assert number == ExactFloat("1.000000000000000001")
    assert not number != ExactFloat("1.000000000000000001")  # noqa: SIM202 - another method
    assert number <= ExactFloat("1.000000000000000001")
    assert not number < float("nan")  # noqa: PLW0177 - that is the comparison
    assert number != "1.000000000000000001"
    with pytest.raises(TypeError):
        assert number < "2"


def test_it_can_be_copied_kept_in_sets_and_asked_whether_it_is_there():
    number = ExactFloat("1e-400")
    assert number
    for again in (copy.copy(number), copy.deepcopy(number), pickle.loads(pickle.dumps(number))):
        assert again == number
        assert type(again) is ExactFloat
        assert {again, number} == {number}
    assert len({number, 0}) == 2
