"""
Why a rule or a route does not match an event: the parts of its pattern that do not match.

Each part is compiled once, and the result is bounded, however many rules and events there are.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from msgspec import UNSET, Struct

from oncebridge.events.event import Event
from oncebridge.events.pattern import Pattern
from oncebridge.events.rules import Rule

MOST_REPORTED: Final = 300
"""The most rules and routes in one result, for all events together."""
_MOST_PARTS: Final = 10
_LONGEST: Final = 400
_encoder: Final = json.JSONEncoder(ensure_ascii=False, default=str)


class FieldMismatch(Struct, frozen=True):
    """A part of a pattern that an event does not match."""

    path: str
    wanted: str
    found: str


class NotMatched(Struct, frozen=True):
    """A rule or route that does not match an event."""

    name: str
    misses: tuple[FieldMismatch, ...]


class PatternPart(Struct, frozen=True):
    """One part of a pattern, as a pattern of its own."""

    path: tuple[str, ...]
    wanted: str
    alone: Pattern


class MismatchFinder:
    """Finds why rules and routes do not match events, up to `MOST_REPORTED` of them."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[Pattern, list[PatternPart]]] = {}
        self._room = MOST_REPORTED

    def of(
        self, event: Event, tried: Iterable[tuple[str, Pattern | None, Rule | None]]
    ) -> tuple[tuple[NotMatched, ...], int]:
        """Return why each of *tried* does not match *event*, and how many are left out."""
        found, more = [], 0
        for name, match, rule in tried:
            if self._room:
                self._room -= 1
                found.append(self._passed(name, match, rule, event))
            else:
                more += 1
        return tuple(found), more

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
