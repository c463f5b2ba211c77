"""
Why a rule or a route is not for an event: the parts of its pattern that the event does not fit.

Each part is compiled once, and what is told is bounded, however many rules and events there are.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from msgspec import UNSET, Struct

from oncebridge.events.event import Event
from oncebridge.events.pattern import Pattern
from oncebridge.events.rules import Rule

MOST_TOLD: Final = 300
"""So many rules and routes are told of in one go, for all events together."""
_MOST_PARTS: Final = 10
_LONGEST: Final = 400
_encoder: Final = json.JSONEncoder(ensure_ascii=False, default=str)


class FieldMismatch(Struct, frozen=True):
    """A part of a pattern that an event does not fit."""

    path: str
    wanted: str
    found: str


class NotMatched(Struct, frozen=True):
    """A rule or route that is not for an event."""

    name: str
    misses: tuple[FieldMismatch, ...]


class PatternPart(Struct, frozen=True):
    """One part of a pattern, by itself."""

    path: tuple[str, ...]
    wanted: str
    alone: Pattern


class MismatchFinder:
    """Tells why rules and routes are not for events, as long as there is room."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[Pattern, list[PatternPart]]] = {}
        self._room = MOST_TOLD

    def of(
        self, event: Event, tried: Iterable[tuple[str, Pattern | None, Rule | None]]
    ) -> tuple[tuple[NotMatched, ...], int]:
        """Return why each of *tried* is not for *event*, and of how many there is no room to tell."""
        told, more = [], 0
        for name, match, rule in tried:
            if self._room:
                self._room -= 1
                told.append(self._passed(name, match, rule, event))
            else:
                more += 1
        return tuple(told), more

    def _passed(
        self, name: str, match: Pattern | None, rule: Rule | None, event: Event
    ) -> NotMatched:
        if match is None or (rule is not None and rule.takes(event)):
            return NotMatched(name, ())
        # By id(): a pattern has no hash. The pattern is kept so that its id is not reused.
        _, parts = self._parts.setdefault(id(match), (match, []))
        parts += [] if parts else parts_of(match.spec)
        return NotMatched(name, tuple(islice(misses(parts, event.envelope), _MOST_PARTS)))


def misses(parts: Sequence[PatternPart], envelope: Mapping[str, Any]) -> Iterator[FieldMismatch]:
    """Yield the parts of a pattern that an event does not match, each tested separately."""
    fits_all = True
    for part in parts:
        if not part.alone.matches(envelope):
            fits_all = False
            yield FieldMismatch(".".join(part.path), part.wanted, _found(envelope, part.path))
    if fits_all:
        yield FieldMismatch("", "all parts in one array element", "each in a different element")


def parts_of(spec: Mapping[str, Any]) -> list[PatternPart]:
    """Split a pattern into its parts."""
    parts = []
    for path, leaf in _leaves(spec, ()):
        alone: Any = leaf
        for name in reversed(path):
            alone = {name: alone}
        parts.append(PatternPart(path, shown(leaf), Pattern.compile(alone)))
    return parts


def _leaves(
    spec: Mapping[str, Any], above: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in spec.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _found(envelope: Mapping[str, Any], path: Sequence[str]) -> str:
    value: Any = envelope
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return "" if path[-1] == "$or" else "(missing)"
        value = value[name]
    return shown(value)


def shown(value: Any) -> str:
    """Return a value as JSON, cut if it is long: no more of it is encoded."""
    if value is UNSET:
        return "(missing)"
    if isinstance(value, float):
        return cut(repr(value))  # json would round an ExactFloat
    text = ""
    for piece in _encoder.iterencode(value):
        text += piece
        if len(text) > _LONGEST:
            break
    return cut(text)


def cut(text: str) -> str:
    """Return a text, cut if it is long."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
