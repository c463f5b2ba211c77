"""
What makes two events the same, by rule.

The first rule whose pattern matches decides; an event that no rule matches is judged by
its content. A rule turns an event into a `Plan`: the keys to claim (one per tier, the
identifying one last), how long each is remembered, and the entity whose newest state
the event may change. Nothing here touches a store.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import Any, Literal, Self, get_args

from msgspec import Struct, field
from msgspec.structs import replace

from oncebridge.canonical import canonical
from oncebridge.clock import ms
from oncebridge.duration import parse_duration
from oncebridge.errors import ConfigError
from oncebridge.event import Event
from oncebridge.key import (
    ContentKey,
    FieldsKey,
    IdKey,
    Scope,
    compile_field,
    conflict_key,
    fingerprint,
    make_key,
    scoped_source,
)
from oncebridge.pattern import Pattern
from oncebridge.store import Part

OnMissing = Literal["content", "deliver", "dead"]
OnConflict = Literal["deliver", "dead", "duplicate"]
OnReplay = Literal["deduplicate", "deliver", "separate"]

DEFAULT_WINDOW = timedelta(days=6)
"""Four days of Genesys re-sends, a day of EventBridge retries, and a margin."""

Version = tuple[Literal["number", "instant"], int | float]
"""Versions compare within their kind only."""


class Tier(Struct, frozen=True, kw_only=True):
    """One way to recognise an event, and for how long."""

    key: ContentKey | IdKey | FieldsKey = field(default_factory=ContentKey)
    window: timedelta = DEFAULT_WINDOW
    sliding: bool = False
    """Every repeat prolongs the window, up to *max_window* after the delivery."""
    max_window: timedelta = timedelta(days=30)
    check: bool = False
    """Compare the content too: the same key with other content is a conflict."""


class Latest(Struct, frozen=True):
    """Newest wins: of one *entity*, drop what is older than what was delivered."""

    entity: str
    version: str


class Quiet(Struct, frozen=True):
    """Of one *entity*, drop the same *state* again within *time* of its delivery."""

    entity: str
    state: str
    time: timedelta


class Rule(Struct, frozen=True, kw_only=True):
    """
    What is the same, for the events that *match*.

    Without *tiers* the rule does not deduplicate: events are forwarded as they are.
    """

    name: str
    match: Pattern | None = None
    tiers: tuple[Tier, ...] = (Tier(),)
    latest: Latest | None = None
    quiet: Quiet | None = None
    on_missing: OnMissing = "content"
    on_conflict: OnConflict = "deliver"
    on_replay: OnReplay = "deduplicate"
    scope: Scope = "source"

    @classmethod
    def parse(
        cls, spec: Mapping[str, Any], where: str = "rule", *, window: timedelta = DEFAULT_WINDOW
    ) -> Self:
        """Read a rule as the configuration file writes it (see the README)."""
        return cls(**_RuleReader(spec, where, window).read())


class Span(Struct, frozen=True, gc=False):
    """A tier's window, as the store takes it."""

    window_ms: int
    hard_ms: int


class Plan(Struct, frozen=True, gc=False):
    """What a rule makes of one event."""

    rule: Rule
    action: Literal["deduplicate", "bypass", "dead"]
    parts: tuple[Part, ...] = ()
    spans: tuple[Span, ...] = ()
    """How long each part is remembered, in the same order."""
    entity: bytes = b""
    """The key of the entity's register; empty where the rule has none."""
    version: Version | None = None
    state: bytes = b""
    message: str = ""
    """For the dead letters: what is missing."""

    @property
    def key(self) -> bytes:
        """The identifying key: the last tier's."""
        return self.parts[-1].key if self.parts else b""

    @property
    def keep_ms(self) -> int:
        """How long records stay that are not done: the longest window."""
        if len(self.spans) == 1:
            return self.spans[0].window_ms
        return max(span.window_ms for span in self.spans)

    def in_conflict(self, key: bytes) -> "Plan":
        """
        Make the plan for other content under *key*.

        It is an event of its own: K2, made of the key and the content, takes the key's
        place, with the same window.
        """
        parts = tuple(
            replace(part, key=conflict_key(key, part.hash)) if part.key == key else part
            for part in self.parts
        )
        return replace(self, parts=parts)


class RuleSet:
    """The rules of one route, compiled; *namespace* keeps routes apart in one store."""

    def __init__(self, rules: Sequence[Rule], *, namespace: str) -> None:
        names = [rule.name for rule in rules]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError("rules", f"two rules are named {name!r}")
        self.rules = tuple(rules)
        self.namespace = namespace
        self._compiled = [_Compiled(rule, namespace) for rule in rules]
        self._default = _Compiled(Rule(name="default"), namespace)
        # Most patterns look at these two only, and there are few pairs of them.
        self._by_type = all(
            rule.match is None or rule.match.fields <= {"source", "detail-type"} for rule in rules
        )
        self._found: dict[tuple[str, str], _Compiled] = {}
        contents = (t.key for rule in rules for t in rule.tiers if isinstance(t.key, ContentKey))
        self.apart = next((key.apart for key in contents if key.apart), ())
        """What to tell `oncebridge.event.parse`, which then spares most keys some work."""

    def plan(self, event: Event) -> Plan:
        """Decide what *event* is the same as. Raises nothing, whatever the event holds."""
        if not (self._by_type and event.source and event.detail_type):
            # Empty stands for missing, null and odd values too, and a pattern tells them apart.
            return self._first(event).plan(event)
        kind = (event.source, event.detail_type)
        compiled = self._found.get(kind)
        if compiled is None:
            if len(self._found) >= 10_000:  # sources are the sender's to invent
                self._found.clear()
            compiled = self._found[kind] = self._first(event)
        return compiled.plan(event)

    def _first(self, event: Event) -> "_Compiled":
        for compiled in self._compiled:
            if compiled.rule.match is None or compiled.rule.match.matches(event.envelope):
                return compiled
        return self._default


class _Compiled:
    """One rule with its expressions compiled."""

    def __init__(self, rule: Rule, namespace: str) -> None:
        self.rule = rule
        self._namespace = namespace
        self._fallback = ContentKey()
        contents = [tier.key for tier in rule.tiers if isinstance(tier.key, ContentKey)]
        self._content = contents[0] if contents else self._fallback
        self._checks = any(tier.check for tier in rule.tiers)
        self._tiers = [
            (tier, Span(ms(tier.window), ms(tier.max_window) if tier.sliding else 0))
            for tier in rule.tiers
        ]
        self._slides = [ms(tier.window) if tier.sliding else 0 for tier in rule.tiers]
        self._spans = tuple(span for _, span in self._tiers)
        self._only = rule.tiers[0].key if len(rule.tiers) == 1 else None
        entities = {part.entity for part in (rule.latest, rule.quiet) if part}
        if len(entities) > 1:
            raise ConfigError(
                f"rule {rule.name!r}",
                "latest and quiet name different entities; a rule keeps the state of one: "
                "use the same expression, or two rules",
            )
        self._entity = FieldsKey(list(entities)) if entities else None
        self._version = compile_field(rule.latest.version) if rule.latest else None
        self._state = compile_field(rule.quiet.state) if rule.quiet else None

    def plan(self, event: Event) -> Plan:
        rule = self.rule
        if not rule.tiers:
            return Plan(rule, "bypass")
        namespace = self._namespace
        if event.replay_name is not None:
            if rule.on_replay == "deliver":
                return Plan(rule, "bypass")
            if rule.on_replay == "separate":
                namespace = f"{namespace}\0replay\0{event.replay_name}"
        source = scoped_source(event.source, rule.scope)
        if self._only is not None and self._entity is None and not self._checks:
            # the common case, with nothing to gather
            parts = self._only.parts(event)
            if parts is not None:
                key = make_key(namespace, self._only.kind, source, event.detail_type, parts)
                part = Part(key, b"", self._slides[0])
                return Plan(rule, "deduplicate", (part,), self._spans)
        return self._gather(event, namespace, source)

    def _gather(self, event: Event, namespace: str, source: str) -> Plan:
        rule = self.rule
        found: dict[bytes, tuple[Part, Span]] = {}
        content = fingerprint(event, content=self._content, source=source) if self._checks else b""
        missing = False
        for (tier, span), slide_ms in zip(self._tiers, self._slides, strict=True):
            how: ContentKey | IdKey | FieldsKey = tier.key
            parts = how.parts(event)
            if parts is None:
                missing = True
                how, parts = self._instead(event)
                if parts is None:
                    continue
            key = make_key(namespace, how.kind, source, event.detail_type, parts)
            found.pop(key, None)  # the later tier decides the order
            found[key] = Part(key, content if tier.check else b"", slide_ms), span
        entity, version, state, unknown = self._register(event, namespace, source)
        if missing or unknown:
            if rule.on_missing == "deliver":
                return Plan(rule, "bypass")
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
        )

    def _instead(self, event: Event) -> tuple[ContentKey | IdKey, tuple[bytes, ...] | None]:
        """Find a key where the configured one has none: the content, or else the id."""
        parts = self._content.parts(event)
        if parts is not None:
            return self._content, parts
        by_id = IdKey()
        return by_id, by_id.parts(event)

    def _register(
        self, event: Event, namespace: str, source: str
    ) -> tuple[bytes, Version | None, bytes, bool]:
        """Find the entity's register and the version and state to put there."""
        if self._entity is None:
            return b"", None, b"", False
        parts = self._entity.parts(event)
        version = _version(self._version(event)) if self._version else None
        state = self._state(event) if self._state else None
        if (
            parts is None
            or (self._version is not None and version is None)
            or (self._state is not None and state is None)
        ):
            return b"", None, b"", True
        # One register for all detail-types of the rule: they are states of one thing.
        key = make_key(namespace, b"entity", source, f"rule\0{self.rule.name}", parts)
        return key, version, b"" if state is None else canonical(state), False


_MISSING = "rule {rule!r}: a field that the key needs is missing or null"


# Python would take a counter of eight digits for a date as well.
_INSTANT = re.compile(r"\d{4}-\d\d-\d\d(?!\d)", re.ASCII)


def _version(value: Any) -> Version | None:
    """Read a version: a number, or an instant in ISO 8601. Nothing else has an order."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
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


# --- reading rules as people write them -------------------------------------------------


class _RuleReader:
    """Read one rule of the configuration, naming the place of every mistake."""

    _NAMES = (
        *("name", "match", "key", "ignore", "window", "sliding", "max_window", "check", "tiers"),
        *("latest", "quiet", "on_missing", "on_conflict", "on_replay", "scope"),
    )
    _TIER_NAMES = ("key", "ignore", "window", "sliding", "max_window", "check")

    def __init__(self, spec: Mapping[str, Any], where: str, window: timedelta) -> None:
        self._spec = spec
        self._where = where
        self._window = window

    def read(self) -> dict[str, Any]:
        spec, where = self._spec, self._where
        if not isinstance(spec, Mapping):
            raise ConfigError(where, "a rule is a table with a name, a key and so on")
        _known(spec, self._NAMES, where)
        name = _text(spec, "name", where)
        read: dict[str, Any] = {"name": name, "tiers": self._tiers()}
        if "match" in spec:
            read["match"] = Pattern.compile(spec["match"], f"{where}.match")
        if "latest" in spec:
            read["latest"] = self._latest(spec["latest"], f"{where}.latest")
        if "quiet" in spec:
            read["quiet"] = self._quiet(spec["quiet"], f"{where}.quiet")
        for choice, allowed in (
            ("on_missing", OnMissing),
            ("on_conflict", OnConflict),
            ("on_replay", OnReplay),
            ("scope", Scope),
        ):
            if choice in spec:
                read[choice] = _choice(spec[choice], get_args(allowed), f"{where}.{choice}")
        if not read["tiers"] and ("latest" in read or "quiet" in read):
            raise ConfigError(
                where, 'key = "none" forwards everything; latest and quiet need a key'
            )
        return read

    def _tiers(self) -> tuple[Tier, ...]:
        spec, where = self._spec, self._where
        if "tiers" not in spec:
            if spec.get("key") == "none":
                for name in self._TIER_NAMES[1:]:
                    if name in spec:
                        raise ConfigError(f"{where}.{name}", 'means nothing with key = "none"')
                return ()
            return (self._tier(spec, where),)
        beside = sorted(set(self._TIER_NAMES) & set(spec))
        if beside:
            raise ConfigError(
                f"{where}.{beside[0]}", "stands beside tiers; say it inside the tier it is for"
            )
        tiers = spec["tiers"]
        if not isinstance(tiers, list) or not tiers:
            raise ConfigError(f"{where}.tiers", "must be a list of at least one tier")
        read = []
        for at, tier in enumerate(tiers):
            place = f"{where}.tiers[{at}]"
            if not isinstance(tier, Mapping):
                raise ConfigError(place, "must be a table such as { key = 'id', window = '5m' }")
            _known(tier, self._TIER_NAMES, place)
            if tier.get("key") == "none":
                raise ConfigError(f"{place}.key", '"none" is for a whole rule, not for a tier')
            read.append(self._tier(tier, place))
        return tuple(read)

    def _tier(self, spec: Mapping[str, Any], where: str) -> Tier:
        key = _key(spec, where)
        window = (
            parse_duration(spec["window"], f"{where}.window") if "window" in spec else self._window
        )
        sliding = _flag(spec, "sliding", where, default=False)
        longest = (
            parse_duration(spec["max_window"], f"{where}.max_window")
            if "max_window" in spec
            else max(Tier().max_window, window)
        )
        if "max_window" in spec and not sliding:
            raise ConfigError(f"{where}.max_window", "goes with sliding = true only")
        if longest < window:
            raise ConfigError(f"{where}.max_window", "must not be shorter than the window")
        return Tier(
            key=key,
            window=window,
            sliding=sliding,
            max_window=longest,
            check=_flag(spec, "check", where, default=isinstance(key, IdKey)),
        )

    def _latest(self, spec: Any, where: str) -> Latest:
        _table(spec, ("entity", "version"), where)
        return Latest(
            _expression(spec, "entity", where),
            _expression(spec, "version", where),
        )

    def _quiet(self, spec: Any, where: str) -> Quiet:
        _table(spec, ("entity", "state", "for"), where)
        return Quiet(
            _expression(spec, "entity", where),
            _expression(spec, "state", where),
            parse_duration(spec["for"], f"{where}.for"),
        )


def _key(spec: Mapping[str, Any], where: str) -> ContentKey | IdKey | FieldsKey:
    key = spec.get("key", "content")
    ignore = spec.get("ignore", [])
    if not isinstance(ignore, list) or not all(isinstance(path, str) for path in ignore):
        raise ConfigError(f"{where}.ignore", "must be a list of paths such as 'detail.sentAt'")
    if ignore and key != "content":
        raise ConfigError(f"{where}.ignore", 'goes with key = "content" only')
    makers: dict[str, Callable[[], ContentKey | IdKey]] = {
        "content": lambda: ContentKey(ignore, where=f"{where}.ignore"),
        "id": IdKey,
    }
    if isinstance(key, str) and key in makers:
        return makers[key]()
    if isinstance(key, list) and key and all(isinstance(one, str) for one in key):
        return FieldsKey(key, where=f"{where}.key")
    raise ConfigError(
        f"{where}.key",
        f'{key!r}: must be "content", "id", "none", or a list of JMESPath expressions '
        'such as ["detail.orderId"]',
    )


def _known(spec: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in spec:
        if name not in names:
            close = get_close_matches(str(name), names, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(names)}"
            raise ConfigError(f"{where}.{name}", f"no such setting; {hint}")


def _table(spec: Any, names: Sequence[str], where: str) -> None:
    if not isinstance(spec, Mapping):
        raise ConfigError(where, f"must be a table with {', '.join(names)}")
    _known(spec, names, where)
    for name in names:
        if name not in spec:
            raise ConfigError(f"{where}.{name}", "is missing")


def _text(spec: Mapping[str, Any], name: str, where: str) -> str:
    value = spec.get(name)
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError(f"{where}.{name}", "must be a text that is not empty")
    return value


def _expression(spec: Mapping[str, Any], name: str, where: str) -> str:
    text = _text(spec, name, where)
    compile_field(text, f"{where}.{name}")
    return text


def _flag(spec: Mapping[str, Any], name: str, where: str, *, default: bool) -> bool:
    value = spec.get(name, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{where}.{name}", f"{value!r}: must be true or false")
    return value


def _choice(value: Any, allowed: Sequence[str], where: str) -> str:
    if not isinstance(value, str) or value not in allowed:
        close = get_close_matches(str(value), allowed, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(where, f"{value!r}: must be one of {', '.join(allowed)}{hint}")
    return value
