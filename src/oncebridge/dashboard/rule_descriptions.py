"""
Descriptions of the configured routes and rules, with the counts of each rule.

Rules are listed in the order in which they are tried: a route's own rules, the shared rules, then
the default. Each comes with its findings of `oncebridge check`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.base.durations import format_duration
from oncebridge.base.options import format_setting
from oncebridge.check.finding import Checkup, Finding
from oncebridge.check.settings import check_rules
from oncebridge.engine.settings import Settings
from oncebridge.events.key import ContentKey, FieldsKey, IdKey
from oncebridge.events.pattern import Pattern
from oncebridge.events.rules import Rule, Tier
from oncebridge.observe.counts import Counts, added
from oncebridge.observe.fleet import FleetView
from oncebridge.service.config import Config, Route, Setup

DEFAULT: Final = "default"
"""The name of the rule for events that no rule matches."""
_ODD: Final = re.compile(r"[^A-Za-z0-9-]")
_ONE_LINE: Final = 72
_ALWAYS: Final = ("mode", "window", "lease", "max_attempts", "order", "on_store_outage")
_OF_RECEIVING: Final = ("limits", "explain")

_ON_MISSING: Final = {
    "content": "deduplicated by content instead",
    "deliver": "delivered without deduplication",
    "dead": "to the dead letters",
}
_ON_CONFLICT: Final = {
    "deliver": "delivered as a separate event",
    "dead": "to the dead letters",
    "duplicate": "dropped",
}
_ON_REPLAY: Final = {
    "deduplicate": "deduplicated like any event",
    "deliver": "delivered without deduplication",
    "separate": "deduplicated within its replay",
}
_SCOPES: Final = {
    "source": "each source separately",
    "organisation": "all Genesys integrations of one organisation together",
}


class KeyDescription(Struct, frozen=True):
    """One tier of a rule."""

    by: str
    expressions: tuple[str, ...]
    ignored: tuple[str, ...]
    window: str
    checks: bool
    """True if different content under the same key is a conflict."""


class RuleDescription(Struct, frozen=True, kw_only=True):
    """One rule."""

    name: str
    id: str
    """An anchor; empty if an earlier rule has the same name."""
    origin: str
    action: str
    match: str = ""
    """Its pattern; empty if it matches every event."""
    keys: tuple[KeyDescription, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    counts: Mapping[str, int] = {}
    by_route: Mapping[str, Mapping[str, int]] = {}
    findings: tuple[Finding, ...] = ()

    @property
    def matched(self) -> int:
        return sum(self.counts.values())


class RouteDescription(Struct, frozen=True, kw_only=True):
    """One route."""

    name: str
    sink: str
    match: str
    facts: tuple[tuple[str, str], ...]
    rules: tuple[RuleDescription, ...]
    """Its own rules."""
    matched: int


class RuleDescriptions(Struct, frozen=True, kw_only=True):
    """All routes and rules."""

    routes: tuple[RouteDescription, ...]
    shared: tuple[RuleDescription, ...]
    findings: tuple[Finding, ...]
    """Findings about the rules as a whole."""
    since_ms: int | None
    """When counting began, if known."""
    is_counted: bool


def anchor(name: str) -> str:
    """Return the anchor of a rule: unique for each name, and valid in a URL."""
    return "rule-" + _ODD.sub(
        lambda found: "_" if found[0] == " " else f".{ord(found[0]):x}.", name
    )


class RuleDescriber:
    """Describes one configuration; everything but the counts is computed once, as it is slow."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._config: Config = setup.config
        self._names = [route.name for route in setup.routes]
        self._seen: set[str] = set()
        checkup = Checkup()
        check_rules(setup, checkup)
        findings = checkup.worst_first()
        self._findings: dict[str, list[Finding]] = {}
        for one in findings:
            self._findings.setdefault(one.subject, []).append(one)
        self._routes, self._shared = self._read()
        about = {f"rule {rule.name}" for route in setup.routes for rule in route.rules}
        self._others = tuple(one for one in findings if one.subject not in about)

    def book(self, view: FleetView | None) -> RuleDescriptions:
        """Return the descriptions, with the counts of *view*."""
        counts = view.total if view is not None else Counts()
        return RuleDescriptions(
            routes=tuple(_counted_route(route, counts) for route in self._routes),
            shared=tuple(_counted(rule, self._names, counts) for rule in self._shared),
            findings=self._others,
            since_ms=_since_ms(view),
            is_counted=view is not None,
        )

    def _read(self) -> tuple[list[RouteDescription], list[RuleDescription]]:
        own = {way.name: len(way.rules) for way in self._config.routes}
        routes: list[RouteDescription] = []
        shared: list[RuleDescription] = []
        for route in self._setup.routes:
            guards = [rule for rule in route.rules if rule.guard is not None]
            others = [rule for rule in route.rules if rule.guard is None]
            count = own.get(route.name, 0)
            mine = [self._rule(rule, "route") for rule in others[:count]]
            if not routes:  # the rest is the same for all routes
                shared = [self._guard(rule) for rule in guards]
                shared += self._of_all(others[count:])
            routes.append(_route(route, mine))
        return routes, shared

    def _of_all(self, rules: Sequence[Rule]) -> list[RuleDescription]:
        of_file = len(self._config.rules)
        shown = [self._rule(rule, "configuration") for rule in rules[:of_file]]
        preset = f"preset {self._config.preset}"
        shown += [self._rule(rule, preset) for rule in rules[of_file:]]
        default = Rule(name=DEFAULT, tiers=(Tier(window=self._config.window),))
        if DEFAULT not in [rule.name for rule in rules]:
            shown.append(self._rule(default, "built-in"))
        return shown

    def _rule(self, rule: Rule, origin: str) -> RuleDescription:
        return RuleDescription(
            name=rule.name,
            id=self._id(rule.name),
            origin=origin,
            action=_action(rule),
            match=pretty(rule.match),
            keys=tuple(_key(rule, tier) for tier in rule.tiers),
            facts=_facts(rule),
            findings=tuple(self._findings.get(f"rule {rule.name}", ())),
        )

    def _guard(self, rule: Rule) -> RuleDescription:
        allow = self._config.allow
        end = "dropped" if allow.otherwise == "discard" else "kept in the dead letters"
        facts = [
            (f"allowed {name}", ", ".join(values))
            for name in ("sources", "accounts", "regions")
            if (values := getattr(allow, name))
        ]
        return RuleDescription(
            name=rule.name,
            id=self._id(rule.name),
            origin="allow list",
            action=f"events from other senders are {end}",
            facts=tuple(facts),
        )

    def _id(self, name: str) -> str:
        if name in self._seen:
            return ""
        self._seen.add(name)
        return anchor(name)


def _route(route: Route, rules: Sequence[RuleDescription]) -> RouteDescription:
    return RouteDescription(
        name=route.name,
        sink=str(route.sink),
        match=pretty(route.match),
        facts=_settings(route.settings),
        rules=tuple(rules),
        matched=0,
    )


# --- counts -------------------------------------------------------------------------------


def _since_ms(view: FleetView | None) -> int | None:
    if view is None or view.past.routes or not view.reports:
        return None
    return min(report.state.started_ms for report in view.reports)


def _counted_route(route: RouteDescription, counts: Counts) -> RouteDescription:
    counted = counts.routes.get(route.name)
    by_rule = counted.rules.values() if counted else ()
    return replace(
        route,
        rules=tuple(_counted(rule, [route.name], counts) for rule in route.rules),
        matched=sum([sum(verdicts.values()) for verdicts in by_rule]),
    )


def _counted(rule: RuleDescription, routes: Sequence[str], counts: Counts) -> RuleDescription:
    by_route = {name: found for name in routes if (found := _matched(counts, name, rule.name))}
    if not by_route:
        return rule
    total: dict[str, int] = {}
    for verdicts in by_route.values():
        total = added(total, verdicts)
    return replace(rule, counts=total, by_route=by_route if len(routes) > 1 else {})


def _matched(counts: Counts, route: str, rule: str) -> Mapping[str, int]:
    counted = counts.routes.get(route)
    return counted.rules.get(rule, {}) if counted else {}


# --- in words -----------------------------------------------------------------------------


def pretty(match: Pattern | None) -> str:
    """Return a pattern as formatted JSON."""
    return "" if match is None else _laid_out(match.spec, "")


def _laid_out(value: Any, indent: str) -> str:
    line = json.dumps(value, ensure_ascii=False, default=str)
    if len(indent) + len(line) <= _ONE_LINE or not isinstance(value, Mapping | list):
        return line
    inner = f"{indent}  "
    if isinstance(value, list):
        items = [f"{inner}{_laid_out(item, inner)}" for item in value]
        return "[\n" + ",\n".join(items) + f"\n{indent}]"
    members = [
        f"{inner}{json.dumps(name, ensure_ascii=False)}: {_laid_out(item, inner)}"
        for name, item in value.items()
    ]
    return "{\n" + ",\n".join(members) + f"\n{indent}}}"


def _action(rule: Rule) -> str:
    if rule.tiers:
        return "deduplicate"
    return "discard: always dropped" if rule.discard else "bypass: always delivered"


def _key(rule: Rule, tier: Tier) -> KeyDescription:
    window = format_duration(tier.window)
    if tier.sliding:
        window += f", extended by each duplicate up to {format_duration(tier.max_window)}"
    match tier.key:
        case FieldsKey():
            by, expressions = "fields", tier.key.expressions
        case IdKey():
            by, expressions = "envelope id", ()
        case _:
            by, expressions = "content", ()
    compared = rule.content_of(tier)
    ignored = compared.ignore if isinstance(tier.key, ContentKey) or tier.check else ()
    return KeyDescription(by, tuple(expressions), tuple(ignored), window, tier.check)


def _facts(rule: Rule) -> tuple[tuple[str, str], ...]:
    facts = [("entity", rule.entity or "")]
    if rule.latest is not None:
        latest = f"for each {rule.latest.entity}, older events by {rule.latest.version} are dropped"
        facts.append(("latest", latest))
    if rule.quiet is not None:
        quiet = rule.quiet
        time = format_duration(quiet.time)
        text = f"for each {quiet.entity}, the same {quiet.state} within {time} is dropped"
        facts.append(("quiet", text))
    if rule.bare is not None:
        facts.append(
            ("without an envelope", f"also bare details that match {pretty(rule.bare.match)}")
        )
    if rule.tiers:
        facts += [
            ("on_missing", _ON_MISSING[rule.on_missing]),
            ("on_conflict", _ON_CONFLICT[rule.on_conflict] if _has_checks(rule) else ""),
            ("on_replay", _ON_REPLAY[rule.on_replay]),
            ("scope", _SCOPES[rule.scope]),
        ]
    return tuple((name, text) for name, text in facts if text)


def _has_checks(rule: Rule) -> bool:
    return any(tier.check for tier in rule.tiers)


def _settings(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Return the main settings, and others that differ from the default."""
    usual: Any = Settings()
    found = []
    for name in Settings.__struct_fields__:
        value = getattr(settings, name)
        if name in _OF_RECEIVING or (name not in _ALWAYS and value == getattr(usual, name)):
            continue
        text = format_setting(value).strip('"')
        found.append((name, text))
    found.sort(key=lambda pair: _ALWAYS.index(pair[0]) if pair[0] in _ALWAYS else len(_ALWAYS))
    return tuple(found)
