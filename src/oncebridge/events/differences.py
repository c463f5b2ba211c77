"""
Where two JSON values differ: as paths, which say nothing of what stands there, or as changes.

Values may be personal data. So whoever wants to see them has to say so, but for the fields that
EventBridge gives an envelope: they tell how an event came, and not whom it is about.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import UNSET, Struct, UnsetType

_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_ENVELOPE: Final = frozenset(
    ("version", "id", "detail-type", "source", "account", "time", "region", "replay-name")
)


class FieldChange(Struct, frozen=True, omit_defaults=True):
    """One place in which two events differ."""

    path: str
    was: Any = UNSET
    """Unset where it was not there, and where it is not shown."""
    is_: Any = UNSET
    shown: bool = True
    """The values are told, not only the place."""

    def as_json(self) -> dict[str, Any]:
        """Return path and values; a value is left out where there is none."""
        told: dict[str, Any] = {"path": self.path}
        if self.shown:
            pairs = (("was", self.was), ("is", self.is_))
            told |= {name: value for name, value in pairs if value is not UNSET}
        return told


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """
    List the paths under which *one* and *other* differ, in the order in which they stand.

    What only one of them has is named once, however much it holds.
    """
    return [at for at, _, _ in _differing(one, other, path)]


def changes(one: Any, other: Any, *, values: bool = False) -> list[FieldChange]:
    """List how the event *other* differs from *one*; all that it says is told with *values* only."""
    return [
        FieldChange(at, was, is_) if values or at in _ENVELOPE else FieldChange(at, shown=False)
        for at, was, is_ in _differing(one, other, "")
    ]


def _differing(one: Any, other: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    # A list of what is left to compare, for values nested more deeply than Python calls.
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
            longest = range(max(len(first), len(second)))
            inner = [(f"{at}[{n}]", _element(first, n), _element(second, n)) for n in longest]
            left += reversed(inner)
        elif first != second or isinstance(first, bool) != isinstance(second, bool):
            yield at, first, second


def _element(items: list[Any], at: int) -> Any | UnsetType:
    return items[at] if at < len(items) else UNSET


def _member(path: str, name: str) -> str:
    step = name if _PLAIN.fullmatch(name) else json.dumps(name)
    return f"{path}.{step}" if path else step
