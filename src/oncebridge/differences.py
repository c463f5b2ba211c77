"""Where two JSON values differ, as paths: never what stands there."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_MISSING: Final = object()


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """
    List the paths under which *one* and *other* differ, in the order in which they stand.

    What only one of them has is named once, however much it holds.
    """
    found: list[str] = []
    # A list of what is left to compare, for values nested more deeply than Python calls.
    left = [(path, one, other)]
    while left:
        at, first, second = left.pop()
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            names = [*first, *(name for name in second if name not in first)]
            inner = [
                (_member(at, name), first.get(name, _MISSING), second.get(name, _MISSING))
                for name in names
            ]
            left += reversed(inner)
        elif isinstance(first, list) and isinstance(second, list):
            longest = range(max(len(first), len(second)))
            inner = [(f"{at}[{n}]", _element(first, n), _element(second, n)) for n in longest]
            left += reversed(inner)
        elif first != second or isinstance(first, bool) != isinstance(second, bool):
            found.append(at)
    return found


def _element(items: list[Any], at: int) -> Any:
    return items[at] if at < len(items) else _MISSING


def _member(path: str, name: str) -> str:
    step = name if _PLAIN.fullmatch(name) else json.dumps(name)
    return f"{path}.{step}" if path else step
