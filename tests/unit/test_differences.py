import pytest

from oncebridge.events.differences import differences
from oncebridge.events.exact_float import ExactFloat


@pytest.mark.parametrize(
    ("one", "other", "paths"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1, "b": {"c": [1, 2]}}, {"b": {"c": [1, 3]}, "a": 1}, ["b.c[1]"]),
        ({"a": 1}, {"a": True}, ["a"]),
        ({"a": 1}, {"a": "1"}, ["a"]),
        ({"a": ExactFloat("1.000000000000000001")}, {"a": 1.0}, ["a"]),
        ({"a": ExactFloat("1e-400")}, {"a": ExactFloat("2e-400")}, ["a"]),
        ({"a": ExactFloat("1e-400")}, {"a": ExactFloat("1e-400")}, []),
        ({"a": None}, {}, ["a"]),
        ({}, {"b": {"deep": 1}}, ["b"]),
        ({"a": [1]}, {"a": [1, 2, 3]}, ["a[1]", "a[2]"]),
        ({"a": [1]}, {"a": {"0": 1}}, ["a"]),
        ({"odd.name": 1, "detail-type": 2}, {}, ['"odd.name"', "detail-type"]),
    ],
)
def test_differences_are_told_as_paths(one, other, paths):
    assert differences(one, other) == paths
    assert sorted(differences(other, one)) == sorted(paths)


def test_values_nested_more_deeply_than_python_calls_are_compared():
    one = other = 1
    for _ in range(5000):
        one, other = {"a": one}, {"a": other}
    assert differences(one, other) == []
    assert differences(one, {"a": other}) != []
