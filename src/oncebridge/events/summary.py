"""
Describe an event: when it was published, its topic, its entity and its state.

The audit, the history and the dashboard use these; deduplication does not depend on them.
"""

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from oncebridge.events.canonical import canonical
from oncebridge.events.event import Event
from oncebridge.events.key import compile_field
from oncebridge.events.rules import Rule
from oncebridge.events.timestamps import parse_instant, parse_timestamp

_encode = msgspec.json.Encoder().encode


def body_of(detail: dict[str, Any]) -> dict[str, Any]:
    """Return the `eventBody` of a Genesys event, or the detail of any other."""
    body = detail.get("eventBody")
    return body if type(body) is dict else detail


def published_ms(event: Event) -> int | None:
    """
    Return when an event was published; None if that is not known.

    Genesys writes milliseconds into the detail, EventBridge only seconds into the envelope. A
    timestamp in the detail that is more than a minute off has another meaning.
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
    Return the detail-type of an event.

    Without an envelope it is the topic that Genesys writes into the detail, with the ids in it
    replaced.
    """
    if event.detail_type:
        return event.detail_type
    topic = event.detail.get("topicName")
    return _ID.sub("{id}", topic) if type(topic) is str else ""


_ID: Final = re.compile(r"(?<![^.])[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?![^.])")


def entity_of(event: Event) -> str:
    """Return a guess of the entity of an event, from the usual names of fields."""
    return _guess_entity(event, body_of(event.detail))


_Entity = Callable[[Event, dict[str, Any]], str]


def entity_finder(rule: Rule | None) -> _Entity:
    """Return a function that returns the entity of an event: by the rule, or else by a guess."""
    named_by = [each.entity for each in (rule, rule.latest, rule.quiet) if each] if rule else []
    named = next(filter(None, named_by), None)
    if named is None:
        return _guess_entity
    find = compile_field(named)
    return lambda event, _body: _as_text(find(event))


def _as_text(value: Any) -> str:
    if type(value) is str:
        return value
    return canonical(value).decode() if value else ""


_CONVERSATIONS: Final = ("conversationId", "conversation_id", "interactionId", "interaction_id")
ENTITIES: Final = (*_CONVERSATIONS, "entityId", "entity_id", "id")


def _guess_entity(event: Event, body: dict[str, Any]) -> str:
    for name in ENTITIES:
        value = body.get(name)
        if type(value) is str and value:
            return value
    topic = event.detail.get("topicName")
    return topic if type(topic) is str else ""


def conversation_of(detail: dict[str, Any], body: dict[str, Any]) -> str:
    """Return what a naive key would use as the conversation's id."""
    for name in _CONVERSATIONS:
        value = body.get(name)
        if value is None:
            value = detail.get(name)
        if type(value) is str:
            return value
    return ""


class _TimeNames(dict[tuple[str, ...], tuple[str, ...]]):
    """The names among those of members that are names of times; a cache."""

    def __missing__(self, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(self) >= 5_000:  # senders can invent any number of names
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
    """Return a hash of a body without its times; empty if there is nothing else in it."""
    times = _times_among[tuple(body)]
    if times:
        body = body.copy()
        for name in times:
            del body[name]
    return hash(_encode(body)) if body else ""


def happened_ms(event: Event, body: dict[str, Any]) -> int | str:
    """Return when the event happened according to its body; -1 if there is no time in it."""
    for name in _HAPPENED:
        if name in body:
            at_ms = parse_timestamp(body[name])
            if at_ms is not None:
                return at_ms
    kept = event.kept
    return "" if any(mark in kept for mark in _TIME_MARKS) else -1


_TIME_MARKS: Final = (b'ime"', b'Date"', b'_date"', b'"date', b'imestamp"', b'At"', b'_at"')
"""How the names of times end, or begin, in JSON."""
