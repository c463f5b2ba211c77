"""
What there is to be learnt of an event beside its key: when, about what, in which state.

All of it serves to describe and to suspect; nothing here decides what is the same.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from oncebridge.events.canonical import canonical
from oncebridge.events.event import Event
from oncebridge.events.key import compile_field
from oncebridge.events.rules import Rule
from oncebridge.events.timestamps import parse_instant, parse_timestamp

_MOST_NAMES: Final = 5_000
_encode = msgspec.json.Encoder().encode


def body_of(detail: dict[str, Any]) -> dict[str, Any]:
    """Return what an event of Genesys is about; of others, the detail."""
    body = detail.get("eventBody")
    return body if type(body) is dict else detail


def published_ms(event: Event) -> int | None:
    """
    Return when an event was published.

    Genesys writes it to the millisecond, EventBridge cuts it to the second. A timestamp in
    the detail that is more than a minute off is something else.
    """
    stamp, time = event.detail.get("timestamp"), event.time
    if type(stamp) is not str or not stamp:
        return parse_instant(time) if time else None
    if time is None or stamp[:19] == time[:19]:
        return parse_instant(stamp) if stamp[4:5] == "-" else None
    second, exact = parse_instant(time), parse_instant(stamp)
    if second is None or exact is None or abs(exact - second) > 60_000:
        return second
    return exact


def topic_of(event: Event) -> str:
    """
    Name the kind of thing that an event tells of.

    Without an envelope it is the topic that Genesys writes into the detail, and what is an id
    there is none of the kind.
    """
    if event.detail_type:
        return event.detail_type
    topic = event.detail.get("topicName")
    return _ID.sub("{id}", topic) if type(topic) is str else ""


_ID: Final = re.compile(r"(?<![^.])[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?![^.])")


def entity_of(event: Event) -> str:
    """Return what an event is about, by what it looks like."""
    return _guess_entity(event, body_of(event.detail))


_Entity = Callable[[Event, dict[str, Any]], str]


def entity_finder(rule: Rule | None) -> _Entity:
    """Make what tells the entity of an event: as the rule says, or else what it looks like."""
    named = None
    if rule is not None:
        named_by = [rule.entity, *(each.entity for each in (rule.latest, rule.quiet) if each)]
        named = next((part for part in named_by if part), None)
    if named is None:
        return _guess_entity
    # `a || b` costs JMESPath ten times what it costs to look for a, and then for b.
    parts = [part.strip() for part in named.split("||")]
    walked = [part.split(".")[1:] for part in parts if _PLAIN.fullmatch(part)]
    if len(walked) == len(parts):
        return _walker(walked)
    find = compile_field(named)
    return lambda event, _body: _as_text(find(event))


def _walker(paths: Sequence[Sequence[str]]) -> _Entity:
    """Look for the first of several paths below the detail that leads anywhere."""

    def walk(event: Event, _body: dict[str, Any]) -> str:
        for path in paths:
            value: Any = event.detail
            for name in path:
                value = value.get(name) if type(value) is dict else None
            if value:
                return value if type(value) is str else _as_text(value)
        return ""

    return walk


def _as_text(value: Any) -> str:
    if type(value) is str:
        return value
    return canonical(value).decode() if value else ""


_PLAIN: Final = re.compile(r"detail(?:\.[A-Za-z_]\w*)+", re.ASCII)
ENTITIES: Final = (
    *("conversationId", "conversation_id", "interactionId", "interaction_id"),
    *("entityId", "entity_id", "id"),
)
_CONVERSATIONS: Final = ("conversationId", "conversation_id", "interactionId", "interaction_id")


def _guess_entity(event: Event, body: dict[str, Any]) -> str:
    for name in ENTITIES:
        value = body.get(name)
        if type(value) is str and value:
            return value
    topic = event.detail.get("topicName")
    return topic if type(topic) is str else ""


def conversation_of(detail: dict[str, Any], body: dict[str, Any]) -> str:
    """Find what a naive key would take for the conversation's id."""
    for name in _CONVERSATIONS:
        value = body.get(name)
        if value is None:
            value = detail.get(name)
        if type(value) is str:
            return value
    return ""


class _TimeNames(dict[tuple[str, ...], tuple[str, ...]]):
    """Tells which names of members are those of times; remembers what it found."""

    def __missing__(self, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(self) >= _MOST_NAMES:  # attributes are anybody's to invent
            self.clear()
        found = self[names] = tuple(name for name in names if _TIME_LIKE.fullmatch(name))
        return found


_TIME_LIKE: Final = re.compile(
    r".*(?:Time|Date|Timestamp|_time|_date|_timestamp|_at|[a-z]At|DateTime|TimeMs|Millis)"
    r"|time|date|timestamp|datetime|ts|at|date[A-Z].*",
    re.ASCII | re.DOTALL,
)
_times_among: Final = _TimeNames()
_HAPPENED: Final = (
    *("eventTime", "event_time", "modifiedDate", "dateModified", "updatedAt", "updated_at"),
    *("timestamp", "occurredAt", "occurred_at"),
)


def state_of(body: dict[str, Any]) -> int | str:
    """Hash what a body says apart from when it says it; nothing where that is all."""
    times = _times_among[tuple(body)]
    if times:
        body = body.copy()
        for name in times:
            del body[name]
    return hash(_encode(body)) if body else ""


def happened_ms(event: Event, body: dict[str, Any]) -> int | str:
    """Return when an event says it happened; -1 where there is no time in it at all."""
    for name in _HAPPENED:
        if name in body:
            at_ms = parse_timestamp(body[name])
            if at_ms is not None:
                return at_ms
    kept = event.kept
    return "" if any(mark in kept for mark in _TIME_MARKS) else -1


_TIME_MARKS: Final = (b'ime"', b'Date"', b'_date"', b'"date', b'imestamp"', b'At"', b'_at"')
"""How the names of times end, or begin, in JSON."""
