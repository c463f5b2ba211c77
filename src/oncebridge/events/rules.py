"""
The rules that define which events are the same.

The first rule whose pattern matches an event applies; an event that no rule matches is
identified by its content. A rule turns an event into a `Plan`: the keys to claim (one per
tier, the identifying one last) and the entity whose newest state the event may change.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, Self

from msgspec import Struct, field
from msgspec.structs import replace

from oncebridge.base.clock import ms
from oncebridge.errors import ConfigError
from oncebridge.events.canonical import canonical
from oncebridge.events.event import Event, Unreadable
from oncebridge.events.key import (
    KEY_VERSION,
    ContentKey,
    FieldsKey,
    IdKey,
    Part,
    Scope,
    compile_field,
    conflict_key,
    fingerprint,
    holds_only_null,
    key_maker,
    make_key,
    scoped_source,
)

if TYPE_CHECKING:  # most routes have neither
    from oncebridge.events.access import SenderAllowlist
    from oncebridge.events.pattern import Pattern

OnMissing = Literal["content", "deliver", "dead"]
OnConflict = Literal["deliver", "dead", "duplicate"]
OnReplay = Literal["deduplicate", "deliver", "separate"]

_MOST_KINDS = 4096
"""The maximum number of pairs of source and detail-type whose planner is cached."""

DEFAULT_WINDOW = timedelta(days=6)
"""Four days of Genesys re-sends, a day of EventBridge retries, and a margin."""

DEFAULT_AHEAD = timedelta(days=1)
"""Clocks are rarely off by more, and a version far in the future would hide all later ones."""

Version = tuple[Literal["number", "instant"], int | float]
"""Versions compare within their kind only."""


class Tier(Struct, frozen=True, kw_only=True):
    """One way to recognise a duplicate, and how long the event is remembered."""

    key: ContentKey | IdKey | FieldsKey = field(default_factory=ContentKey)
    window: timedelta = DEFAULT_WINDOW
    sliding: bool = False
    """Every duplicate extends the window, up to *max_window* after the delivery."""
    max_window: timedelta = timedelta(days=30)
    check: bool = False
    """Compare the content too: the same key with other content is a conflict."""
    content: ContentKey | None = None
    """The content to compare, and to use as the key if a field of *key* is missing. The default
    is the rule's first content key, or else the whole detail (`Rule.content_of`)."""


class Latest(Struct, frozen=True):
    """Drop events of an *entity* that are older than the last delivered one."""

    entity: str
    version: str
    ahead: timedelta = DEFAULT_AHEAD
    """How far ahead of the store's clock a version that is an instant may be."""


class Quiet(Struct, frozen=True):
    """Drop an event of an *entity* with the same *state* again within *time* of its delivery."""

    entity: str
    state: str
    time: timedelta


class Bare(Struct, frozen=True):
    """
    Which details without an envelope a rule applies to: those that *match*.

    None of *members* is null or empty, which a pattern cannot check for an object.
    """

    match: "Pattern"
    members: tuple[str, ...] = ()

    def takes(self, event: Event) -> bool:
        """Return True if *event* has no envelope and is one of these details."""
        return (
            event.bare
            and not any(holds_only_null(event.detail.get(name)) for name in self.members)
            and self.match.matches(event.envelope)
        )


class Rule(Struct, frozen=True, kw_only=True):
    """
    Which events are the same, among those that *match* and the details that match *bare*.

    Without *tiers* events are delivered without deduplication, or, with *discard*, dropped.
    *entity* is the subject of an event, for gateways that keep the events of one entity in
    order; rules with the same *together* share the order of an entity that they find by the
    same expression. A rule with a *guard* applies, before all others, only to the senders that
    the guard refuses.
    """

    name: str
    match: "Pattern | None" = None
    bare: Bare | None = None
    tiers: tuple[Tier, ...] = (Tier(),)
    latest: Latest | None = None
    quiet: Quiet | None = None
    on_missing: OnMissing = "content"
    on_conflict: OnConflict = "deliver"
    on_replay: OnReplay = "deduplicate"
    scope: Scope = "source"
    entity: str | None = None
    together: str = ""
    discard: bool = False
    guard: "SenderAllowlist | None" = None

    @classmethod
    def parse(
        cls, spec: Mapping[str, Any], where: str = "rule", *, window: timedelta = DEFAULT_WINDOW
    ) -> Self:
        """Return a rule in the form of the configuration file; raise all errors together."""
        from oncebridge.events.rule_options import read_rule  # noqa: PLC0415 - it imports this module

        return cls(**read_rule(spec, where, window))

    @classmethod
    def for_refused_senders(cls, guard: "SenderAllowlist") -> Self:
        """Return the rule for the senders that *guard* refuses."""
        return cls(name="allow", tiers=(), discard=guard.otherwise == "discard", guard=guard)

    def takes(self, event: Event) -> bool:
        """Return True if *event* matches the rule; its guard is not checked."""
        if self.match is None or self.match.matches(event.envelope):
            return True
        return self.bare is not None and self.bare.takes(event)

    def content_of(self, tier: Tier) -> ContentKey:
        """Return the content that *tier* compares, or uses if its key is missing."""
        keys = (tier.content, *(each.key for each in self.tiers))
        return next((key for key in keys if isinstance(key, ContentKey)), ContentKey())


_UNREADABLE = Rule(name="", tiers=())


class Span(Struct, frozen=True, gc=False):
    """The window of a tier, in the units of the store."""

    window_ms: int
    hard_ms: int


class Plan(Struct, frozen=True, gc=False):
    """What a rule does with one event."""

    rule: Rule
    action: Literal["deduplicate", "bypass", "discard", "dead"]
    parts: tuple[Part, ...] = ()
    spans: tuple[Span, ...] = ()
    """How long each part is remembered, in the same order."""
    entity: bytes = b""
    """The key of the entity's state; empty if the rule keeps none."""
    version: Version | None = None
    state: bytes = b""
    message: str = ""
    """For the dead letter: the missing field, or the refused sender."""
    about: bytes = b""
    """The entity, for sinks that keep its events together; empty if the route has no such sink."""
    refused: bool = False
    """The sender is refused: the event is not sent to a sink in any mode."""
    clashed: tuple[bytes, ...] = ()
    """The keys that are made of a key and the content already (`in_conflict`)."""

    @property
    def key(self) -> bytes:
        """The identifying key: the last tier's."""
        return self.parts[-1].key if self.parts else b""

    @property
    def sent_as(self) -> bytes:
        """
        The key that is sent to the sink, so that receivers can recognise duplicates.

        If a key can have several contents, it is made of both: a content that was sent first and
        lost its claim must not hide the one that replaced it.
        """
        if not self.parts:
            return b""
        last = self.parts[-1]
        if not last.hash or last.key in self.clashed:
            return last.key
        return conflict_key(last.key, last.hash)

    @property
    def keep_ms(self) -> int:
        """How long records of unfinished events are kept: the longest window."""
        return max([span.window_ms for span in self.spans])

    def in_conflict(self, key: bytes) -> "Plan":
        """
        Return the plan for an event with another content under the same *key*.

        It is an event of its own: its key is made of both, with the same window.
        """
        parts, clashed = list(self.parts), self.clashed
        for at, part in enumerate(parts):
            if part.key == key:
                parts[at] = replace(part, key=conflict_key(key, part.hash))
                clashed = *clashed, parts[at].key
        return replace(self, parts=tuple(parts), clashed=clashed)


class Terms(Struct, frozen=True, eq=False):
    """
    What the events of one source and detail-type have in common under a rule.

    If all the rule needs is one key, *key_of* returns it (None: a part is missing), and *hash_of*
    the content to compare, if the rule compares it. Otherwise `plan` is needed.
    """

    rule: Rule
    full_plan: Callable[[Event], Plan]
    key_of: Callable[[Event], bytes | None] | None = None
    hash_of: Callable[[Event], bytes] | None = None
    slide_ms: int = 0
    spans: tuple[Span, ...] = ()

    def plan_with(self, key: bytes, hash_: bytes) -> Plan:
        """Return the plan of an event whose only key is *key*."""
        return Plan(self.rule, "deduplicate", (Part(key, hash_, self.slide_ms),), self.spans)

    def plan(self, event: Event) -> Plan:
        """Return the plan for *event*."""
        key = self.key_of(event) if self.key_of and event.replay_name is None else None
        if key is None:
            return self.full_plan(event)
        return self.plan_with(key, self.hash_of(event) if self.hash_of else b"")


class RuleSet:
    """
    The compiled rules of one route; *namespace* separates routes that share a store.

    With *ordered*, plans of rules with an entity have the key of its state; with *about*, they
    have the entity. Events that no rule matches are remembered for *window*.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        *,
        namespace: str,
        ordered: bool = False,
        about: bool = False,
        window: timedelta = DEFAULT_WINDOW,
    ) -> None:
        names = [rule.name for rule in rules if rule.guard is None]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError("rules", f"two rules are named {name!r}; rename one of them")
        self.rules = tuple(rules)
        self.namespace = namespace
        compiled = partial(_CompiledRule, namespace=namespace, ordered=ordered, about=about)
        self._compiled = [compiled(rule) for rule in rules if rule.guard is None]
        self._guards = [(rule, rule.guard) for rule in rules if rule.guard is not None]
        self._default = compiled(Rule(name="default", tiers=(Tier(window=window),)))
        # Most patterns use only these two fields, and there are few pairs of them. A bare detail
        # has neither, so its planner is never cached.
        self._by_type = all(
            rule.match is None or rule.match.fields <= {"source", "detail-type"} for rule in rules
        )
        self._found: dict[tuple[str, str], Terms] = {}
        self.known_terms: Mapping[tuple[str, str], Terms] = {} if self._guards else self._found
        """By source and detail-type; empty if guards have to see each event."""
        self.apart = _apart(rules)
        """The argument for `oncebridge.events.event.parse` that makes most keys cheaper."""
        rest = [*self._compiled, self._default]
        self.longest_ms = max(span.window_ms for each in rest for span in each.spans)
        """The longest time for which any event is remembered."""

    def plan(self, event: Event) -> Plan:
        """Return the plan for *event*. Never raises, whatever the event contains."""
        for rule, guard in self._guards:
            if why := guard.refusal(event):
                return Plan(rule, guard.otherwise, message=why, refused=True)
        return self._find_terms(event).plan(event)

    def terms(self, event: Event) -> Terms:
        """Return the terms of the rule that applies to *event*; a refused sender has none of its own."""
        known = self.known_terms.get((event.source, event.detail_type))
        if known is not None:
            return known
        for rule, guard in self._guards:
            if guard.refusal(event):
                return Terms(rule, self.plan)
        return self._find_terms(event)

    def plan_arrival(self, arrival: Event | Unreadable, *, shadow: bool = False) -> Plan:
        """
        Return the plan for any arrival, with a key also if it becomes a dead letter.

        The key is made of its bytes and the reason: a copy of it is a duplicate, not a second
        dead letter. In *shadow* mode an event is delivered instead, unless its sender is refused.
        """
        if isinstance(arrival, Unreadable):
            plan, reason = Plan(_UNREADABLE, "dead"), arrival.reason
        else:
            plan = self.plan(arrival)
            reason = plan.message
            if plan.action != "dead" or (shadow and not plan.refused):
                return plan
        key = make_key(self.namespace, b"dead", "", reason, (arrival.raw,))
        return replace(plan, parts=(Part(key),), spans=self._default.spans)

    def discard_plan(self, event: Event) -> Plan | None:
        """Return the plan for *event* if its rule discards it, else None."""
        plan = self.plan(event)
        return plan if plan.action == "discard" else None

    def key_fingerprint(self) -> str:
        """
        Return a short hash of everything that decides which events have the same key.

        It must be equal for all workers of a route: otherwise one event has two keys, and is
        delivered twice. What changes no key is left out: windows, the handling of conflicts,
        allowed senders, and the names of rules without an entity.
        """
        forms = [compiled.key_form() for compiled in self._compiled]
        return sha256(canonical([KEY_VERSION, forms])).hexdigest()[:12]

    def _find_terms(self, event: Event) -> Terms:
        kind = (event.source, event.detail_type)
        terms = self._found.get(kind)
        if terms is None:
            for compiled in self._compiled:
                if compiled.rule.takes(event):
                    break
            else:
                compiled = self._default
            terms = compiled.terms(*kind)
            # Empty also means missing, null and other types, which a pattern distinguishes.
            if self._by_type and all(kind):
                if len(self._found) >= _MOST_KINDS:  # senders can invent any number of sources
                    self._found.clear()
                self._found[kind] = terms
        return terms


def _apart(rules: Sequence[Rule]) -> tuple[str, ...]:
    """Return the names that most of the rules ignore; in a tie, those of the first rule."""
    keys = [key for rule in rules for tier in rule.tiers for key in (tier.key, tier.content)]
    counts = Counter(key.apart for key in keys if isinstance(key, ContentKey) and key.apart)
    return max(counts, key=counts.__getitem__, default=())


class _CompiledRule:
    """One rule with its expressions compiled."""

    def __init__(
        self, rule: Rule, namespace: str, *, ordered: bool = False, about: bool = False
    ) -> None:
        self.rule = rule
        self._namespace = namespace
        self._tiers = [(tier, rule.content_of(tier)) for tier in rule.tiers]
        self._slides = [ms(tier.window) if tier.sliding else 0 for tier in rule.tiers]
        self.spans = tuple(
            Span(ms(tier.window), ms(tier.max_window) if tier.sliding else 0) for tier in rule.tiers
        )
        only = rule.tiers[0].key if len(rule.tiers) == 1 else None
        entities = {part.entity for part in (rule.latest, rule.quiet) if part}
        if ordered and rule.entity:
            entities.add(rule.entity)
        if len(entities) > 1:
            raise ConfigError(
                f"rule {rule.name!r}",
                "has different entities, but a rule keeps the state of one; use the same "
                "expression for entity, latest and quiet, or two rules",
            )
        self._entity = FieldsKey(list(entities)) if entities else None
        named = rule.entity or next(iter(entities), None)
        self._about = FieldsKey([named]) if about and named else None
        self._only_key = None if self._entity or self._about else only
        self._together = f"rule\0{rule.together or rule.name}"
        self._version = compile_field(rule.latest.version) if rule.latest else None
        self._state = compile_field(rule.quiet.state) if rule.quiet else None
        self.terms = lru_cache(maxsize=_MOST_KINDS)(self._make_terms)

    def key_form(self) -> dict[str, Any]:
        """Return the part of this rule in `RuleSet.key_fingerprint`, as JSON."""
        rule, bare = self.rule, self.rule.bare
        tiers = [[_key_form(each.key), _key_form(c), each.check] for each, c in self._tiers]
        form: dict[str, Any] = {
            "match": rule.match.spec if rule.match else None,
            "bare": [bare.match.spec, sorted(bare.members)] if bare else None,
            "tiers": tiers,
            "discard": rule.discard,
            "on_missing": rule.on_missing,
            "on_replay": rule.on_replay,
            "scope": rule.scope,
        }
        if self._entity is not None:
            version = rule.latest.version if rule.latest else None
            state = rule.quiet.state if rule.quiet else None
            form["entity"] = [_key_form(self._entity), self._together, version, state]
        return form

    def _make_terms(self, source: str, detail_type: str) -> Terms:
        """Return the terms of events of one source and detail-type."""
        if self._only_key is None:
            return Terms(self.rule, self.plan)
        ((tier, content),) = self._tiers
        scope = scoped_source(source, self.rule.scope)
        return Terms(
            self.rule,
            self.plan,
            key_maker(self._namespace, self._only_key, scope, detail_type),
            partial(fingerprint, content=content, source=scope) if tier.check else None,
            self._slides[0],
            self.spans,
        )

    def plan(self, event: Event) -> Plan:
        rule, namespace = self.rule, self._namespace
        source = scoped_source(event.source, rule.scope)
        if not rule.tiers:
            if rule.discard:
                return Plan(rule, "discard")
            entity, *_ = self._entity_state(event, namespace, source)
            return Plan(rule, "bypass", entity=entity, about=self._entity_key(event))
        if event.replay_name is not None:
            if rule.on_replay == "deliver":
                return Plan(rule, "bypass", about=self._entity_key(event))
            if rule.on_replay == "separate":
                namespace = f"{namespace}\0replay\0{event.replay_name}"
        return self._plan_with_keys(event, namespace, source)

    def _plan_with_keys(self, event: Event, namespace: str, source: str) -> Plan:
        rule = self.rule
        found: dict[bytes, tuple[Part, Span]] = {}
        said: dict[ContentKey, bytes] = {}
        missing = False
        tiers = zip(self._tiers, self.spans, self._slides, strict=True)
        for (tier, content), span, slide_ms in tiers:
            for how in (tier.key, content, IdKey()):
                parts = how.parts(event)
                if parts is not None:
                    break
                missing = True
            else:
                continue
            if tier.check and content not in said:
                said[content] = fingerprint(event, content=content, source=source)
            key = make_key(namespace, how.kind, source, event.detail_type, parts)
            found.pop(key, None)  # the later tier decides the order
            found[key] = Part(key, said[content] if tier.check else b"", slide_ms), span
        entity, version, state, unknown = self._entity_state(event, namespace, source)
        if missing or unknown:
            if rule.on_missing == "deliver":
                return Plan(rule, "bypass", about=self._entity_key(event))
            if rule.on_missing == "dead" or not found:
                return Plan(rule, "dead", message=_MISSING.format(rule=rule.name))
        return Plan(
            rule,
            "deduplicate",
            tuple(part for part, _ in found.values()),
            tuple(span for _, span in found.values()),
            entity,
            version,
            state,
            about=self._entity_key(event),
        )

    def _entity_key(self, event: Event) -> bytes:
        """Return the key of the event's entity, independent of source and replay."""
        parts = self._about.parts(event) if self._about else None
        if parts is None:
            return b""
        return make_key(self._namespace, b"about", "", self._together, parts)

    def _entity_state(
        self, event: Event, namespace: str, source: str
    ) -> tuple[bytes, Version | None, bytes, bool]:
        """Return the key of the entity's state, the event's version and state, and if one is missing."""
        if self._entity is None:
            return b"", None, b"", False
        parts = self._entity.parts(event)
        version = _version(self._version(event)) if self._version else None
        state = self._state(event) if self._state else None
        # An empty state is not missing.
        lacks_state = self._state and state not in ({}, []) and holds_only_null(state)
        if parts is None or (self._version and version is None) or lacks_state:
            return b"", None, b"", True
        # One state for all detail-types of the rule: they describe the same entity.
        key = make_key(namespace, b"entity", source, self._together, parts)
        return key, version, b"" if state is None else canonical(state), False


def _key_form(key: ContentKey | IdKey | FieldsKey) -> list[Any]:
    kind = key.kind.decode()
    if isinstance(key, FieldsKey):
        return [kind, *key.expressions]
    if isinstance(key, ContentKey):
        return [kind, *(sorted(set(names)) for names in (key.ignore, key.labels, key.needs))]
    return [kind]


# Part of the key of the dead letter: do not change it.
_MISSING = "rule {rule!r}: a field that the key needs is missing or null"


# Python would also parse a counter of eight digits as a date.
_INSTANT = re.compile(r"\d{4}-\d\d-\d\d(?!\d)", re.ASCII)


def _version(value: Any) -> Version | None:
    """Return a version: a number, or an instant in ISO 8601; None for anything else."""
    if isinstance(value, float):
        # The nearest double of an ExactFloat: versions that round to the same are both delivered.
        return "number", float(value)
    if type(value) is int:
        return "number", value
    if not isinstance(value, str) or not _INSTANT.match(value):
        return None
    try:
        instant = datetime.fromisoformat(value)
    except ValueError:
        return None
    if instant.tzinfo is None:
        instant = instant.replace(tzinfo=UTC)
    return "instant", (instant - _EPOCH) // timedelta(microseconds=1)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
