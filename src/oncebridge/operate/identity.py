"""
Which routes an event takes, and what identifies it there.

A plan has the keys of an event. Here they come with the values that they are made of, to show
why two events are the same, or why they are not.
"""

from collections.abc import Iterator
from datetime import timedelta

from msgspec import Struct

from oncebridge.events.event import Event, Unreadable, read
from oncebridge.events.framing import RawRecord
from oncebridge.events.key import (
    ContentKey,
    FieldsKey,
    IdKey,
    KeyKind,
    Part,
    conflict_key,
    make_key,
    scoped_source,
)
from oncebridge.events.rules import Plan, RuleSet, Span
from oncebridge.service.config import Route, Setup


class EventKey(Struct, frozen=True):
    """One key of an event, and the values it is made of."""

    kind: str
    """`content`, `id` or `fields`."""
    part: Part
    span: Span
    made_of: tuple[bytes, ...]
    instead: bool
    """The key of the rule lacks a field; this one is used instead."""

    @property
    def key(self) -> bytes:
        return self.part.key

    @property
    def window(self) -> timedelta:
        return timedelta(milliseconds=self.span.window_ms)

    @property
    def longest(self) -> timedelta | None:
        """The end of a sliding window."""
        return timedelta(milliseconds=self.span.hard_ms) if self.span.hard_ms else None

    @property
    def values(self) -> dict[str, str]:
        """The hashed values in canonical form, by name."""
        texts = [part.decode() for part in self.made_of]
        if self.kind == "fields":
            return dict(zip(texts[::2], texts[1::2], strict=True))
        return {"detail" if self.kind == "content" else "id": texts[0]}

    @property
    def canonical(self) -> str:
        """The hashed values as one text."""
        if self.kind == "fields":
            return "\n".join(f"{name} = {value}" for name, value in self.values.items())
        return self.made_of[0].decode()


class RouteIdentity(Struct, frozen=True):
    """The identity of an event on one route."""

    route: Route
    plan: Plan
    keys: tuple[EventKey, ...]
    """In the order of the plan, the identifying one last; empty if it can never be sent."""

    def sent_as_of(self, key: bytes) -> bytes:
        """Return the `Idempotency-Key` of this event if it is known by *key*, else nothing."""
        sent_as = self.plan.sent_as if self.keys else b""
        return sent_as if key in (self.plan.key, sent_as) else b""

    def all_keys(self) -> list[bytes]:
        """Return every key under which the store may have a record of this event."""
        conflicts = [
            conflict_key(known.key, known.part.hash) for known in self.keys if known.part.hash
        ]
        return [*(part.key for part in self.plan.parts), *conflicts]


class Identities:
    """Identifies events as the gateways of *setup* do."""

    def __init__(self, setup: Setup) -> None:
        self.file_rules = setup.file_rules()
        """The rules for events that no route matches."""
        self._settings = setup.config.settings()
        self._routes = [
            (
                route,
                RuleSet(
                    route.rules,
                    namespace=route.name,
                    ordered=_is_ordered(route),
                    window=route.settings.window,
                ),
            )
            for route in setup.routes
        ]

    def read(self, record: RawRecord | bytes) -> Event | Unreadable:
        """Read one event as the service would."""
        raw = record if isinstance(record, bytes) else record.raw
        if isinstance(record, RawRecord) and record.too_long:
            return Unreadable(raw, "too-large", "longer than can be read")
        return read(raw, limits=self._settings.limits, bare=self._settings.bare)

    def of(self, event: Event) -> list[RouteIdentity]:
        """Return the identity of *event* on each route that it takes."""
        return [
            self._on(route, rules, event)
            for route, rules in self._routes
            if route.match is None or route.match.matches(event.envelope)
        ]

    def on(self, name: str, event: Event) -> RouteIdentity | None:
        """Return the identity of *event* on one route, even if it does not take it."""
        for route, rules in self._routes:
            if route.name == name:
                return self._on(route, rules, event)
        return None

    def _on(self, route: Route, rules: RuleSet, event: Event) -> RouteIdentity:
        plan = rules.plan_arrival(event, shadow=route.settings.mode == "shadow")
        if plan.action == "dead":
            return RouteIdentity(route, plan, ())
        made = {key: (how, parts) for key, how, parts in _possible_keys(route, plan, event)}
        asked = [tier.key.kind for tier in plan.rule.tiers]
        keys = []
        for part, span in zip(plan.parts, plan.spans, strict=True):
            how, parts = made[part.key]
            keys.append(EventKey(how.kind.decode(), part, span, parts, how.kind not in asked))
        return RouteIdentity(route, plan, tuple(keys))


def _is_ordered(route: Route) -> bool:
    return route.settings.order == "entity"


def _possible_keys(
    route: Route, plan: Plan, event: Event
) -> Iterator[tuple[bytes, KeyKind, tuple[bytes, ...]]]:
    """Yield every key that the rule may have made, with its values."""
    kinds: list[ContentKey | IdKey | FieldsKey] = [IdKey()]
    for tier in plan.rule.tiers:
        kinds += [plan.rule.content_of(tier), tier.key]
    namespaces = [route.name]
    if event.replay_name is not None:
        namespaces.append(f"{route.name}\0replay\0{event.replay_name}")
    source = scoped_source(event.source, plan.rule.scope)
    for how in kinds:
        parts = how.parts(event)
        if parts is None:
            continue
        for namespace in namespaces:
            yield make_key(namespace, how.kind, source, event.detail_type, parts), how, parts
