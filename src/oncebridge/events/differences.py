"""
The differences between two JSON values: as paths without values, or as changes with values.

Values may be personal data, so they are included only on request. The fields of an EventBridge
envelope are always included: they describe the transport of an event, not its subject.
"""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, Final

from msgspec import UNSET, Struct

_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_ENVELOPE: Final = frozenset(
    ("version", "id", "detail-type", "source", "account", "time", "region", "replay-name")
)


class FieldChange(Struct, frozen=True, omit_defaults=True):
    """One field in which two events differ."""

    path: str
    was: Any = UNSET
    """Unset if the field was missing, or is not shown."""
    is_: Any = UNSET
    shown: bool = True
    """True if the values are included, not only the path."""

    def as_json(self) -> dict[str, Any]:
        """Return the path and the values; a missing value is left out."""
        result: dict[str, Any] = {"path": self.path}
        if self.shown:
            pairs = (("was", self.was), ("is", self.is_))
            result |= {name: value for name, value in pairs if value is not UNSET}
        return result


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """
    Return the paths at which *one* and *other* differ, in the order of their fields.

    A field that only one of them has is returned once, without the paths inside it.
    """
    return [at for at, _, _ in _differing(one, other, path)]


def changes(one: Any, other: Any, *, values: bool = False) -> list[FieldChange]:
    """Return how the event *other* differs from *one*; with *values*, include all values."""
    return [
        FieldChange(at, was, is_) if values or at in _ENVELOPE else FieldChange(at, shown=False)
        for at, was, is_ in _differing(one, other, "")
    ]


def _differing(one: Any, other: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    # A list instead of recursion, for values nested more deeply than Python's stack allows.
    left = [(path, one, other)]
    while left:
        at, first, second = left.pop()
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            names = [*first, *(name for name in second if name not in first)]
            inner = [
                (_member(at, name), first.get(name, UNSET), second.get(name, UNSET))
                for name in names
            ]
            left += reversed(inner)
        elif isinstance(first, list) and isinstance(second, list):
            pairs = enumerate(zip_longest(first, second, fillvalue=UNSET))
            left += reversed([(f"{at}[{n}]", *pair) for n, pair in pairs])
        elif first != second or isinstance(first, bool) != isinstance(second, bool):
            yield at, first, second


def _member(path: str, name: str) -> str:
    step = name if _PLAIN.fullmatch(name) else json.dumps(name)
    return f"{path}.{step}" if path else step
