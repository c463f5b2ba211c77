"""
Compare two event patterns: whether an event can match both.

It is proved for patterns that are equal, that contain each other, or that exclude each other. All
others may overlap.

A member of an event may be an array, which matches two patterns with different values. So patterns
exclude each other only by members that are never arrays, or by `exists: false`.
"""

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final

from msgspec import Struct

_Path = tuple[str, ...]
_SINGLE: Final[frozenset[_Path]] = frozenset(
    (name,) for name in ("account", "detail-type", "id", "region", "source", "time", "version")
)
_ABSENT: Final = '{"exists": false}'


class Overlap(Enum):
    """What two patterns have in common."""

    SAME = "they match the same events"
    WITHIN = "the second matches every event that the first matches"
    AROUND = "the first matches every event that the second matches"
    PERHAPS = "some events may match both"
    NEVER = "no event matches both"


class RulePattern(Struct, frozen=True):
    """A pattern, prepared for comparison."""

    text: str
    flat: dict[_Path, list[Any]]
    has_choice: bool

    @classmethod
    def of(cls, pattern: Mapping[str, Any]) -> "RulePattern":
        return cls(_text(pattern), _flat(pattern), _has_choice(pattern))


def overlap(one: RulePattern, other: RulePattern) -> Overlap:
    """Return what two patterns have in common, as far as it can be proved."""
    if one.text == other.text:
        return Overlap.SAME
    first, second = one.flat, other.flat
    if any(_exclude(path, first[path], second[path]) for path in first.keys() & second.keys()):
        return Overlap.NEVER
    if one.has_choice or other.has_choice:
        return Overlap.PERHAPS
    if _is_within(first, second):
        return Overlap.WITHIN
    return Overlap.AROUND if _is_within(second, first) else Overlap.PERHAPS


def _text(pattern: Any) -> str:
    """Return a pattern as text in one form; the order of alternatives does not matter."""
    if isinstance(pattern, Mapping):
        return json.dumps({name: _text(value) for name, value in sorted(pattern.items())})
    if isinstance(pattern, list):
        return json.dumps(sorted(map(_matcher, pattern)))
    return _matcher(pattern)


def _matcher(value: Any) -> str:
    """Return one alternative as text; inside it, order may matter (`numeric`)."""
    return json.dumps(value, sort_keys=True)


def _flat(pattern: Mapping[str, Any], path: _Path = ()) -> dict[_Path, list[Any]]:
    found: dict[_Path, list[Any]] = {}
    for name, value in pattern.items():
        if name == "$or":
            continue
        if isinstance(value, Mapping):
            found |= _flat(value, (*path, name))
        elif isinstance(value, list):
            found[(*path, name)] = value
    return found


def _has_choice(pattern: Mapping[str, Any]) -> bool:
    return "$or" in pattern or any(
        _has_choice(value) for value in pattern.values() if isinstance(value, Mapping)
    )


# --- one within the other ---------------------------------------------------------------------


def _is_within(narrow: Mapping[_Path, Sequence[Any]], wide: Mapping[_Path, Sequence[Any]]) -> bool:
    return all(
        path in narrow
        and all(any(_covers(path, other, one) for other in wanted) for one in narrow[path])
        for path, wanted in wide.items()
    )


def _covers(path: _Path, wide: Any, narrow: Any) -> bool:
    if _matcher(wide) == _matcher(narrow):
        return True
    if path in _SINGLE and isinstance(narrow, str) and _is_but(wide):
        return not _is_left_out(narrow, wide)
    begins = _prefix(wide)
    if begins is None:
        return False
    text = narrow if isinstance(narrow, str) else _prefix(narrow)
    return text is not None and text.startswith(begins)


def _prefix(value: Any) -> str | None:
    """Return the prefix of a `prefix` operator; None for anything else."""
    if isinstance(value, dict) and [*value] == ["prefix"] and isinstance(value["prefix"], str):
        return value["prefix"]
    return None


# --- neither with the other -------------------------------------------------------------------


def _exclude(path: _Path, one: Sequence[Any], other: Sequence[Any]) -> bool:
    left, right = set(map(_matcher, one)), set(map(_matcher, other))
    if (left == {_ABSENT} and _ABSENT not in right) or (right == {_ABSENT} and _ABSENT not in left):
        return True
    return path in _SINGLE and all(_differ(first, second) for first in one for second in other)


def _differ(left: Any, right: Any) -> bool:
    """Return True if it is certain that no value matches both."""
    if not isinstance(left, dict) and not isinstance(right, dict):
        return _matcher(left) != _matcher(right)
    if _is_but(left) or _is_but(right):
        but, other = (left, right) if _is_but(left) else (right, left)
        return not _is_but(other) and _is_left_out(other, but)
    first = left if isinstance(left, str) else _prefix(left)
    second = right if isinstance(right, str) else _prefix(right)
    if first is None or second is None:
        return False
    if isinstance(left, str):
        return not first.startswith(second)
    if isinstance(right, str):
        return not second.startswith(first)
    return not first.startswith(second) and not second.startswith(first)


def _is_but(value: Any) -> bool:
    """Return True for an `anything-but` of values or of a prefix; others cannot be compared."""
    if not isinstance(value, dict) or [*value] != ["anything-but"]:
        return False
    but = value["anything-but"]
    return not isinstance(but, dict) or _prefix(but) is not None


def _is_left_out(value: Any, but: Mapping[str, Any]) -> bool:
    """Return True if an `anything-but` excludes everything that *value* matches."""
    without = but["anything-but"]
    begins = _prefix(without)
    if begins is not None:
        text = value if isinstance(value, str) else _prefix(value)
        return text is not None and text.startswith(begins)
    several = without if isinstance(without, list) else [without]
    return not isinstance(value, dict) and _matcher(value) in map(_matcher, several)
