"""
EventBridge's event patterns, compiled once and matched in about a microsecond.

A pattern has the structure of the events it matches. Names are joined by *and*; the
values in one array, and the objects under ``$or``, are joined by *or*::

    {
        "source": ["com.example.orders", {"prefix": "com.example.v2."}],
        "detail": {"total": [{"numeric": [">", 0, "<=", 500]}], "error": [{"exists": False}]},
    }

The semantics are those of AWS's open-source engine, event-ruler. Some are surprising:

- Only leaves count. ``{}``, ``[]`` and a missing field are the same: only ``exists: false``
  matches them, not even ``anything-but``; ``null`` and ``""`` are two different leaves.
- An event's array matches when any of its items does, however deeply arrays nest.
- Two names below one array must be found in the same item of it.
- A dot in a name is a step: ``{"a.b": …}`` and ``{"a": {"b": …}}`` are one path, in
  patterns and in events alike.
- A plain string that is an IP address matches that address in any spelling.

Patterns that EventBridge refuses are refused here. So is a path that occurs twice in one
branch of ``$or``: EventBridge would silently use only the last one.
"""

import difflib
import ipaddress
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from oncebridge.errors import ConfigError

_Test = Callable[[Any], bool]
_Path = tuple[str, ...]
_Branch = dict[_Path, "_Leaf"]

# Represents a missing field: like one, it has no leaves.
_NOTHING: dict[str, Any] = {}

# The maximum number of combinations of the $or of one pattern.
_MOST_BRANCHES = 1000

# The maximum number of combinations of array items if an event has one path under several names.
_MOST_COMBINATIONS = 50_000


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """
    One compiled pattern.

    *spec* is the source of the pattern, for printing. *fields* are the top-level names that
    it uses: the result depends on nothing else in the event.
    """

    spec: Mapping[str, Any]
    fields: frozenset[str]
    _branches: "tuple[_Node, ...]" = field(repr=False)

    @classmethod
    def compile(cls, spec: Mapping[str, Any], where: str = "match") -> "Pattern":
        """Compile *spec*, or raise ``ConfigError`` naming the place below *where*."""
        branches = _expand(spec, where, ())
        fields = frozenset(path[0] for branch in branches for path in branch)
        return cls(spec, fields, tuple(map(_tree, branches)))

    def matches(self, envelope: Mapping[str, Any]) -> bool:
        """Return True if the event *envelope*, as parsed JSON, matches; never raises."""
        for branch in self._branches:  # noqa: SIM110 - a generator would take twice as long
            if branch.matches_object(envelope):
                return True
        return False


# Matching -----------------------------------------------------------------------------


def _never(_value: object) -> bool:
    return False


def _always(_value: object) -> bool:
    return True


@dataclass(frozen=True, slots=True, eq=False)
class _Leaf:
    """The values one field may have: as a string, as any other scalar, or not at all."""

    text: _Test = _never
    other: _Test = _never
    absent: bool = False

    def matches(self, value: object) -> bool:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return self.absent
        if isinstance(value, list):
            scalars = [item for item in _items(value) if not isinstance(item, dict)]
            return any(map(self.matches, scalars)) if scalars else self.absent
        return self.other(value)

    def first_found(self, value: object) -> tuple[int, ...] | None:
        items = _items(value) if isinstance(value, list) else [value]
        return None if all(isinstance(item, dict) for item in items) else ()


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """
    The fields one object must have, in the order of their dotted paths.

    *may_lack* is True if some leaf below accepts absence. *dotted* are the names with dots
    by which an event could write several steps at once. *leaves* are all leaves below, by
    their dotted paths.
    """

    children: "tuple[tuple[str, _Leaf | _Node], ...]"
    may_lack: bool
    dotted: frozenset[str]
    leaves: tuple[tuple[str, _Leaf], ...]

    def matches(self, value: object) -> bool:
        if isinstance(value, dict):
            return self.matches_object(value)
        if isinstance(value, _Several):
            return _matches_several(self.leaves, value)
        if isinstance(value, list):
            return self._matches_array(value)
        return self.matches_object(_NOTHING)

    def matches_object(self, value: Mapping[str, Any]) -> bool:
        if self.dotted:
            value = _unfolded(value, self.dotted)
        for name, child in self.children:  # noqa: SIM110 - as above
            if not child.matches(value.get(name, _NOTHING)):
                return False
        return True

    def _matches_array(self, array: list[Any]) -> bool:
        """
        Return True if one item has all fields.

        event-ruler takes the paths in sorted order, and the first one that is found anywhere
        in the array determines the item. A path sorted before that one is therefore absent
        only if no item has it; a path after it, if that item does not have it.
        """
        objects = [item for item in _items(array) if isinstance(item, dict)]
        if self.may_lack:
            found = [self.first_found(each) for each in objects]
            first = min((path for path in found if path is not None), default=None)
            if first is None:
                return self.matches_object(_NOTHING)
            objects = [objects[i] for i, path in enumerate(found) if path == first]
        return any(map(self.matches_object, objects))

    def first_found(self, value: object) -> tuple[int, ...] | None:
        """Return, as positions of children, the first path that has a leaf in *value*."""
        if isinstance(value, list):
            objects = (item for item in _items(value) if isinstance(item, dict))
            found = map(self.first_found, objects)
            return min((path for path in found if path is not None), default=None)
        if isinstance(value, dict):
            unfolded = _unfolded(value, self.dotted)
            for position, (name, child) in enumerate(self.children):
                below = child.first_found(unfolded.get(name, _NOTHING))
                if below is not None:
                    return (position, *below)
        return None


def _items(array: list[Any]) -> Iterator[Any]:
    """Yield the items of *array* and of the arrays in it, without recursion: nesting is not limited."""
    pending = [array]
    while pending:
        for item in pending.pop():
            if isinstance(item, list):
                pending.append(item)
            else:
                yield item


class _Several(list[Any]):
    """
    The values that an event has for one path under several names.

    As in an array, the leaves of all of them count, but none excludes the others.
    """


def _unfolded(value: Mapping[str, Any], dotted: frozenset[str]) -> Mapping[str, Any]:
    """Return *value* with *dotted* names as objects: ``{"a.b": 1}`` as ``{"a": {"b": 1}}``."""
    if value.keys().isdisjoint(dotted):
        return value
    plain = {name: value[name] for name in value if name not in dotted}
    for name in sorted(dotted.intersection(value)):
        head, _, rest = name.partition(".")
        old, new = plain.get(head, _NOTHING), {rest: value[name]}
        if isinstance(old, _Several):
            old.append(new)
        elif isinstance(old, dict) and rest not in old:
            plain[head] = {**old, **new}
        else:
            plain[head] = _Several((old, new))
    return plain


_Slot = tuple[object, ...]
_Found = tuple[object, dict[_Slot, int]]


def _matches_several(wanted: tuple[tuple[str, _Leaf], ...], values: _Several) -> bool:
    """
    Return True if there is a leaf for every path, and no array is used at two of its places.

    As event-ruler does: for every choice of leaves, keep the items of arrays that it settles on.
    """
    found = _found_leaves(values, [path for path, _ in wanted])
    slots = [{slot for _, items in found[path] for slot in items} for path, _ in wanted]
    choices: set[frozenset[tuple[_Slot, int]]] = {frozenset()}
    tried = 0
    for at, (path, leaf) in enumerate(wanted):
        near_of = _index(found[path])
        later = set().union(*slots[at + 1 :])
        following = set()
        for choice in choices:
            near = near_of(dict(choice))
            if not near and leaf.absent:
                following.add(choice)
            tried += len(near) + 1
            if tried > _MOST_COMBINATIONS:
                return False  # only an event crafted to waste time needs more
            for value, items in near:
                if leaf.matches(value):
                    settled = choice.union(items.items())
                    following.add(frozenset(item for item in settled if item[0] in later))
        choices = following
    return bool(choices)


def _found_leaves(values: _Several, paths: list[str]) -> dict[str, list[_Found]]:
    """Return the leaves by path, each with the arrays (by their slots) and items that it is in."""
    found: dict[str, list[_Found]] = {path: [] for path in paths}
    steps = {path[: dot.start()] for path in paths for dot in re.finditer(r"\.|\Z", path)}
    pending: list[tuple[Any, str | None, _Slot, dict[_Slot, int]]]
    pending = [(value, None, (which,), {}) for which, value in enumerate(values)]
    while pending:
        value, path, slot, items = pending.pop()
        if isinstance(value, dict):
            for name, inner in value.items():
                below = name if path is None else f"{path}.{name}"
                if below in steps:
                    pending.append((inner, below, (*slot, name), items))
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                inside = {**items, slot: index} if isinstance(inner, (dict, list)) else items
                pending.append((inner, path, (*slot, None), inside))
        elif path in found:
            found[path].append((value, items))
    return found


def _index(leaves: list[_Found]) -> Callable[[dict[_Slot, int]], list[_Found]]:
    """Return a function that finds the leaves which a choice of items does not exclude."""
    by_slots: dict[frozenset[_Slot], list[_Found]] = {}
    for leaf in leaves:
        by_slots.setdefault(frozenset(leaf[1]), []).append(leaf)
    tables: dict[tuple[frozenset[_Slot], _Slot], dict[_Slot, list[_Found]]] = {}

    def near(chosen: dict[_Slot, int]) -> list[_Found]:
        fitting: list[_Found] = []
        for slots, same in by_slots.items():
            shared = tuple(slot for slot in slots if slot in chosen)
            table = tables.get((slots, shared))
            if table is None:
                table = tables[slots, shared] = {}
                for leaf in same:
                    table.setdefault(tuple(leaf[1][slot] for slot in shared), []).append(leaf)
            fitting += table.get(tuple(chosen[slot] for slot in shared), ())
        return fitting

    return near


# Compiling: structure -----------------------------------------------------------------


def _expand(spec: object, where: str, prefix: _Path, *, inside_or: bool = False) -> list[_Branch]:
    """Return the branches of *spec*, of which one must match; each maps every path to its leaf."""
    if not isinstance(spec, Mapping):
        raise _unexpected(where, "an object of fields", spec)
    if not spec:
        raise ConfigError(where, "an empty object is not allowed; add at least one field")
    branches: list[_Branch] = [{}]
    for name, value in spec.items():
        place = f"{where}.{name}"
        path = (*prefix, *str(name).split("."))
        if name == "$or" and _joins_branches(value):
            options = _expand_or(value, place, prefix)
        elif inside_or and name in _RESERVED_INSIDE_OR:
            raise ConfigError(place, f"{name!r} cannot be the name of a field inside $or")
        elif isinstance(value, Mapping):
            options = _expand(value, place, path, inside_or=inside_or)
        else:
            options = [{path: _compile_leaf(value, place)}]
        if len(branches) * len(options) > _MOST_BRANCHES:
            raise ConfigError(place, f"$or has more than {_MOST_BRANCHES} combinations; split it")
        branches = [_joined(left, right, place) for left in branches for right in options]
    return branches


def _joins_branches(value: object) -> bool:
    """Return True if this is the operator ``$or``, not a field with that name."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(each, Mapping) and _RESERVED_INSIDE_OR.isdisjoint(each) for each in value)


def _expand_or(value: list[Any], where: str, prefix: _Path) -> list[_Branch]:
    if len(value) < 2:
        raise ConfigError(where, "$or needs at least two objects to choose from")
    branches = []
    for index, each in enumerate(value):
        branches += _expand(each, f"{where}[{index}]", prefix, inside_or=True)
    return branches


def _joined(left: _Branch, right: _Branch, where: str) -> _Branch:
    if twice := left.keys() & right.keys():
        message = "is given twice in one branch; EventBridge would use only the last"
        raise ConfigError(where, f"{'.'.join(min(twice))!r} {message}")
    return left | right


def _tree(branch: _Branch) -> _Node:
    """Arrange the paths of *branch* as nested nodes, keeping event-ruler's order."""
    children: dict[str, tuple[str, _Leaf | _Node]] = {}
    deeper: dict[str, _Branch] = {}
    for (name, *rest), leaf in branch.items():
        if rest:
            deeper.setdefault(name, {})[tuple(rest)] = leaf
        else:
            children[name] = (name, leaf)
    # A subtree sorts by what its paths begin with, so that "a-b" comes before "a.c".
    children |= {f"{name}.": (name, _tree(paths)) for name, paths in deeper.items()}
    return _Node(
        children=tuple(children[key] for key in sorted(children)),
        may_lack=any(leaf.absent for leaf in branch.values()),
        dotted=frozenset(".".join(path[:n]) for path in branch for n in range(2, len(path) + 1)),
        leaves=tuple((".".join(path), branch[path]) for path in sorted(branch, key=".".join)),
    )


# Compiling: values --------------------------------------------------------------------


def _unexpected(where: str, wanted: str, found: object) -> ConfigError:
    return ConfigError(where, f"expected {wanted}, found {found!r}")


def _compile_leaf(values: object, where: str) -> _Leaf:
    if not isinstance(values, list):
        wanted = "an array of values, such as ['a'] or [{'prefix': 'b'}], or an object of fields"
        raise _unexpected(where, wanted, values)
    if not values:
        raise ConfigError(where, "an empty array is not allowed; give at least one value")
    places = [(value, f"{where}[{index}]") for index, value in enumerate(values)]
    strings = frozenset(value for value in values if isinstance(value, str))
    addresses = frozenset(map(_address, strings)) - {None}
    leaves = [_compile_value(*each) for each in places if not isinstance(each[0], str)]
    leaves += [_Leaf(text=strings.__contains__)] if strings else []
    leaves += [_Leaf(text=lambda text: _address(text) in addresses)] if addresses else []
    return _Leaf(
        text=_any_of([leaf.text for leaf in leaves]),
        other=_any_of([leaf.other for leaf in leaves]),
        absent=any(leaf.absent for leaf in leaves),
    )


def _compile_value(value: object, where: str) -> _Leaf:
    if value is None or isinstance(value, bool):
        return _Leaf(other=lambda found: found is value)
    if isinstance(value, (int, float)):
        if isinstance(value, float) and not math.isfinite(value):  # which TOML has
            raise _unexpected(where, "a finite number", value)
        return _Leaf(other=lambda found: _is_number(found) and found == value)
    if isinstance(value, Mapping):
        name, operand = _only_entry(value, where, _OPERATORS)
        return _OPERATORS[name](operand, f"{where}.{name}")
    raise _unexpected(where, "a string, number, true, false, null or operator", value)


def _any_of(tests: list[_Test]) -> _Test:
    tests = [test for test in tests if test is not _never]
    if len(tests) < 2:
        return tests[0] if tests else _never
    return lambda value: any(test(value) for test in tests)


def _only_entry(spec: Mapping[str, Any], where: str, allowed: Collection[str]) -> tuple[str, Any]:
    names = ", ".join(sorted(allowed))
    if len(spec) != 1:
        raise _unexpected(where, f"exactly one of {names}", spec)
    ((name, operand),) = spec.items()
    if name not in allowed:
        close = difflib.get_close_matches(str(name), allowed, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(where, f"{name!r} is not one of {names}{hint}")
    return name, operand


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _unexpected(where, "a string", value)
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _threshold(value: object, where: str) -> float:
    """Return a number to compare with, which EventBridge stores as a 64-bit float."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _unexpected(where, "a number", value)
    with suppress(OverflowError):
        if not math.isfinite(value):
            raise _unexpected(where, "a finite number", value)
        if float(value) == value:
            return value
    raise _unexpected(where, "a number that a 64-bit float can hold", value)


# Compiling: operators -----------------------------------------------------------------


def _any_case(value: str) -> str:
    """
    Return a regular expression that matches either case of each character of *value*.

    Unlike ``casefold``, as in event-ruler: ``ß`` matches ``SS``, but ``ss`` never matches ``ß``.
    """
    cases = ({each, each.lower(), each.upper()} for each in value)
    return "".join(f"(?:{'|'.join(map(re.escape, sorted(case)))})" for case in cases)


def _found(search: Callable[[str], re.Match[str] | None]) -> _Test:
    return lambda text: search(text) is not None


def _ends_in_any_case(value: str) -> _Test:
    """Return a test of only as much of the end as the longest form of *value* needs."""
    longest = sum(max(len(each.lower()), len(each.upper())) for each in value)
    search = re.compile(_any_case(value) + r"\Z").search
    return lambda text: search(text, max(len(text) - longest, 0)) is not None


def _like(value: str, where: str) -> _Test:
    """Return a test that compares piece by piece: a regular expression could backtrack for ever."""
    head, *rest = _pieces(value, where)
    if not rest:
        return frozenset((head,)).__contains__
    *middle, tail = rest

    def test(text: str) -> bool:
        start, end = len(head), len(text) - len(tail)
        if start > end or not text.startswith(head) or not text.endswith(tail):
            return False
        for piece in middle:
            start = text.find(piece, start, end)
            if start < 0:
                return False
            start += len(piece)
        return True

    return test


def _pieces(value: str, where: str) -> list[str]:
    """Return *value* split at its wildcards; a backslash escapes a star or a backslash."""
    pieces = [""]
    characters = iter(value)
    for each in characters:
        if each == "*":
            if len(pieces) > 1 and not pieces[-1]:
                raise ConfigError(where, f"two wildcards in a row in {value!r}; write one *")
            pieces.append("")
        elif each == "\\":
            escaped = next(characters, "")
            if escaped not in ("*", "\\"):
                raise ConfigError(where, f"a backslash must be followed by * or \\ in {value!r}")
            pieces[-1] += escaped
        else:
            pieces[-1] += each
    return pieces


_TEXT_TESTS: dict[str, Callable[[str, str], _Test]] = {
    "exactly": lambda value, _: frozenset((value,)).__contains__,
    "prefix": lambda value, _: operator.methodcaller("startswith", value),
    "suffix": lambda value, _: operator.methodcaller("endswith", value),
    "equals-ignore-case": lambda value, _: _found(re.compile(_any_case(value)).fullmatch),
    "wildcard": _like,
}
_ANY_CASE_TESTS: dict[str, Callable[[str], _Test]] = {
    "prefix": lambda value: _found(re.compile(_any_case(value)).match),
    "suffix": _ends_in_any_case,
}
_NEGATED = ("prefix", "suffix", "equals-ignore-case", "wildcard")


def _compile_text(name: str, spec: object, where: str) -> _Leaf:
    if name in _ANY_CASE_TESTS and isinstance(spec, Mapping):
        inner, value = _only_entry(spec, where, ("equals-ignore-case",))
        return _Leaf(text=_ANY_CASE_TESTS[name](_text(value, f"{where}.{inner}")))
    return _Leaf(text=_TEXT_TESTS[name](_text(spec, where), where))


def _compile_anything_but(spec: object, where: str) -> _Leaf:
    if isinstance(spec, Mapping):
        name, operand = _only_entry(spec, where, _NEGATED)
        unwanted = _compile_negated(name, operand, f"{where}.{name}")
        return _Leaf(text=lambda text: not unwanted(text), other=_always)
    values = spec if isinstance(spec, list) else [spec]
    if values and all(isinstance(each, str) for each in values):
        texts = frozenset(values)
        return _Leaf(text=lambda text: text not in texts, other=_always)
    if values and all(map(_is_number, values)):
        numbers = frozenset(_threshold(each, where) for each in values)
        return _Leaf(
            text=_always, other=lambda found: not _is_number(found) or found not in numbers
        )
    wanted = "a string, a number, an array of only strings or only numbers, or one of "
    raise _unexpected(where, wanted + ", ".join(_NEGATED), spec)


def _compile_negated(name: str, operand: object, where: str) -> _Test:
    values = operand if isinstance(operand, list) else [operand]
    if not values:
        raise ConfigError(where, "an empty array is not allowed; give at least one string")
    if name in ("prefix", "suffix") and "" in values:
        raise ConfigError(where, f"an empty {name} is not allowed; it would exclude every string")
    return _any_of([_TEXT_TESTS[name](_text(each, where), where) for each in values])


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _compile_numeric(spec: object, where: str) -> _Leaf:
    if not isinstance(spec, list) or len(spec) not in (2, 4):
        raise _unexpected(where, "a comparison ['>', 0] or a range ['>', 0, '<=', 5]", spec)
    signs = _COMPARISONS if len(spec) == 2 else (">", ">=")
    above = _comparison(spec[0], f"{where}[0]", signs)
    low = _threshold(spec[1], f"{where}[1]")
    if len(spec) == 2:
        return _Leaf(other=lambda found: _is_number(found) and above(found, low))
    below = _comparison(spec[2], f"{where}[2]", ("<", "<="))
    high = _threshold(spec[3], f"{where}[3]")
    if low >= high:
        raise ConfigError(where, f"no number matches: {low!r} must be less than {high!r}")
    return _Leaf(other=lambda found: _is_number(found) and above(found, low) and below(found, high))


def _comparison(sign: object, where: str, allowed: Collection[str]) -> Callable[[Any, Any], bool]:
    if not isinstance(sign, str) or sign not in allowed:
        raise _unexpected(where, f"one of {' '.join(allowed)}", sign)
    return _COMPARISONS[sign]


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# The texts that event-ruler treats as an address; it ignores leading zeros.
_ADDRESS = re.compile(r"[0-9]+(?:\.[0-9]+){3}|[0-9a-fA-F:]*:[0-9a-fA-F:]*")
_LEADING_ZEROS = re.compile(r"(?<![0-9a-fA-F])0+(?=[0-9a-fA-F])")
_LONGEST_ADDRESS = 64


def _address(text: str) -> _Address | None:
    """Return the IP address in *text*, or None; an IPv4 address mapped to IPv6 is IPv4."""
    if len(text) > _LONGEST_ADDRESS or not _ADDRESS.fullmatch(text):
        return None
    try:
        address = ipaddress.ip_address(_LEADING_ZEROS.sub("", text))
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _compile_cidr(spec: object, where: str) -> _Leaf:
    start, _, bits = _text(spec, where).partition("/")
    address = _address(start)
    network = None
    # ipaddress also reads "10.0.0.0" and "10.0.0.0/255.0.0.0"; EventBridge does not.
    if address is not None and bits.isdecimal():
        with suppress(ValueError):
            network = ipaddress.ip_network((address, int(bits)), strict=False)
    if network is None:
        raise _unexpected(where, "an address block such as '10.0.0.0/24'", spec)
    if network.num_addresses == 1:
        hint = f"write the plain value {str(network.network_address)!r} instead"
        raise ConfigError(where, f"EventBridge does not accept a block of a single address; {hint}")

    return _Leaf(text=lambda text: (its := _address(text)) is not None and its in network)


def _compile_exists(spec: object, where: str) -> _Leaf:
    if not isinstance(spec, bool):
        raise _unexpected(where, "true or false", spec)
    return _Leaf(text=_always, other=_always) if spec else _Leaf(absent=True)


_OPERATORS: dict[str, Callable[[Any, str], _Leaf]] = {
    **{name: partial(_compile_text, name) for name in _TEXT_TESTS},
    "anything-but": _compile_anything_but,
    "numeric": _compile_numeric,
    "cidr": _compile_cidr,
    "exists": _compile_exists,
}

# Reserved by event-ruler, the later ones for future operators.
_RESERVED_INSIDE_OR = frozenset(
    {*_OPERATORS, *_COMPARISONS, "regex", "not-wildcard", "not-equals-ignore-case"}
    | {"date-after", "date-on-or-after", "date-before", "date-on-or-before", "in-date-range"}
    | {"ip-address-in-range", "ip-address-not-in-range"}
)
