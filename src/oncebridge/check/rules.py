"""
Check rules by themselves, without events.

A key with too few fields makes different events duplicates, and drops them; a key with a field
that changes with every publication recognises no duplicate. Both look right in a test with one
event. Only names of fields are known here, so a finding may be wrong.

Pure functions: nothing is opened, and no event is read.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jmespath
from msgspec import Struct

from oncebridge.base.durations import format_duration
from oncebridge.base.options import format_setting
from oncebridge.check.finding import Checkup, Finding, Severity
from oncebridge.events.key import ContentKey, FieldsKey, IdKey
from oncebridge.events.pattern import Pattern
from oncebridge.events.rules import Rule

Path = tuple[str, ...]

GENESYS_SOURCES: Final = ("aws.partner/genesys.com/", "aws.partner/genesys.com.test/")
_STAMP, _METADATA, _CORRELATION = (
    ("detail", "timestamp"),
    ("detail", "metadata"),
    ("detail", "metadata", "CorrelationId"),
)
_ENTITIES: Final = frozenset(
    [
        *("account", "agent", "asset", "call", "campaign", "cart", "case", "cluster"),
        *("communication", "contact", "conversation", "customer", "device", "employee"),
        *("entity", "flow", "flowoutcome", "group", "host", "instance", "interaction"),
        *("invoice", "item", "job", "lead", "member", "order", "org", "organisation"),
        *("organization", "outcome", "owner", "participant", "peer", "person", "policy"),
        *("product", "project", "queue", "resource", "role", "room", "segment", "session"),
        *("shipment", "site", "skill", "store", "subscription", "team", "tenant", "thread"),
        *("ticket", "topic", "user", "volume", "workflow", "wrapupcode"),
    ]
)
_STATES: Final = frozenset(
    [
        *("action", "activity", "category", "channel", "code", "detailtype", "direction"),
        *("eventname", "eventtype", "kind", "level", "mediatype", "name", "operation"),
        *("phase", "presence", "priority", "queue", "reason", "region", "routingstatus"),
        *("severity", "source", "stage", "state", "status", "step", "subject"),
        *("systempresence", "topic", "topicname", "type", "version"),
    ]
)
_IGNORE: Final = """Use the preset (preset = "genesys") in place of the rule, or ignore these fields:
ignore = ["detail.timestamp", "detail.metadata"]"""
_TIME_ENDINGS: Final = re.compile(r"([a-z0-9](At|On|Date|Time|Timestamp)|_(at|on|date|time|ts))$")
_ODD: Final = re.compile(r"[^a-z0-9]")


class RuleContext(Struct, frozen=True):
    """Facts about the configuration that the checks of rules need."""

    preset: str = "none"
    genesys: tuple[str, ...] = GENESYS_SOURCES
    """Prefixes of Genesys sources."""
    is_genesys: bool = False
    """Something else shows that events come from Genesys, such as the allowed senders."""


def lint(
    rules: Sequence[Rule], about: RuleContext | None = None, *, own: int | None = None
) -> list[Finding]:
    """
    Return the findings about the first *own* rules; without *own*, about all of them.

    The rules after them are a preset's, and only checked for whether an event reaches them.
    """
    checkup = Checkup()
    about = about or RuleContext()
    mine = rules[:own]
    for at, rule in enumerate(mine):
        earlier = next((one for one in rules[:at] if _covers(one.match, rule.match)), None)
        if earlier is not None:
            _unreachable(f"rule {rule.name}", earlier, checkup)
            continue  # other problems of it have no effect
        _lint_rule(rule, about, checkup)
    catch_all = next((rule for rule in mine if rule.match is None), None)
    if catch_all is not None and len(rules) > len(mine):
        _unreachable(f"preset {about.preset}", catch_all, checkup)
    if catch_all is None and len(rules) == len(mine) and is_genesys(None, about):
        _lint_default(checkup)
    return checkup.findings


def _lint_rule(rule: Rule, about: RuleContext, checkup: Checkup) -> None:
    subject = f"rule {rule.name}"
    if not rule.tiers:
        if not rule.discard:
            _no_key(subject, checkup)
        return
    genesys = is_genesys(rule.match, about)
    for tier in rule.tiers:
        # If the content is compared too, different events are delivered: the key drops nothing.
        is_safe = tier.check and rule.on_conflict == "deliver"
        if isinstance(tier.key, FieldsKey) and not is_safe:
            _lint_fields(subject, tier.key.expressions, rule, checkup, genesys=genesys)
    if genesys:
        _lint_genesys(subject, rule, checkup)
    _lint_states(subject, rule, checkup, genesys=genesys)
    if rule.on_conflict == "duplicate" and any(tier.check for tier in rule.tiers):
        checkup.report(
            "conflict-duplicate",
            Severity.WARNING,
            subject,
            seen='on_conflict = "duplicate"',
            why="An event with a known key and other content is dropped without a log line. If a "
            "sender uses an id twice, the second event is lost.",
            fix='Deliver it ("deliver", the default), or keep it as a dead letter:\non_conflict = "dead"',
        )


# --- keys of fields -------------------------------------------------------------------------


def _lint_fields(
    subject: str, expressions: Sequence[str], rule: Rule, checkup: Checkup, *, genesys: bool
) -> None:
    paths = [path for expression in expressions for path in paths_of(expression)]
    if not paths:
        return
    shown = f"key = {format_setting(list(expressions))}"
    if all(map(_is_time, paths)):
        checkup.report(
            "key-time",
            Severity.WARNING,
            subject,
            seen=shown,
            why="Different events of the same moment get the same key, and all but the first are "
            "dropped. The same event, published again with another time, is delivered twice.",
            fix="Add the entity and the change to the key:\n"
            f'key = ["detail.conversationId", "detail.status", {json.dumps(expressions[0])}]',
        )
        return
    # In the snapshots of Genesys the id of the body is the user's or the conversation's.
    if _is_too_little(expressions) or (genesys and paths == [("detail", "eventBody", "id")]):
        _coarse(subject, shown, paths, checkup)
    _lint_volatile(subject, shown, paths, rule, checkup, genesys=genesys)


def _coarse(subject: str, shown: str, paths: Sequence[Path], checkup: Checkup) -> None:
    name = ".".join(paths[0])
    is_state = _is_state(paths[0])
    what = "the kind of an event" if is_state else "the entity of an event"
    others = ["detail.conversationId", name] if is_state else [name, "detail.status"]
    checkup.report(
        "key-coarse",
        Severity.WARNING,
        subject,
        seen=shown,
        why=f"{name} identifies {what}, not the event. The next change with the same detail-type has "
        "the same key, and is dropped as a duplicate. The key is right only if there is never more "
        "than one such event.",
        fix="Use the event's own id, or add fields that distinguish one change from the next, for "
        "example as below; or remove the key, so that the content is compared.\nkey = "
        f"{format_setting([*others, 'detail.eventTime'])}",
    )


def _lint_volatile(
    subject: str,
    shown: str,
    paths: Sequence[Path],
    rule: Rule,
    checkup: Checkup,
    *,
    genesys: bool,
) -> None:
    found: list[Path] = [path for path in paths if path in (("time",), _CORRELATION)]
    severity = Severity.WARNING
    if _STAMP in paths and not _is_of_readings(rule.match):
        found.append(_STAMP)
        severity = Severity.WARNING if genesys or len(found) > 1 else Severity.NOTE
    if not found:
        return
    names = ", ".join(".".join(path) for path in found)
    if found == [_CORRELATION]:
        why = (
            "It identifies the request that caused the event. Several events may share it, and it "
            "may change when an event is published again."
        )
    else:
        why = (
            "An event that is published again may have another value there, and is then delivered "
            "twice. The key is right only if it is the time of the change, not of the sending."
        )
    checkup.report(
        "key-volatile",
        severity,
        subject,
        seen=f"{names} in {shown}",
        why=why,
        fix="Use the time of the change, such as detail.eventBody.eventTime for the detail events of "
        "Genesys, or the content without the fields that change:\n"
        'key = "content"\nignore = ["detail.timestamp", "detail.metadata"]',
    )


# --- Genesys --------------------------------------------------------------------------------


def _lint_genesys(subject: str, rule: Rule, checkup: Checkup) -> None:
    keys = [tier.key for tier in rule.tiers]
    if all(isinstance(key, IdKey) for key in keys):
        checkup.report(
            "key-id-only",
            # With `quiet`, most of the duplicates are dropped by their state.
            Severity.NOTE if rule.quiet else Severity.WARNING,
            subject,
            seen='the only key is "id", which EventBridge assigns',
            why="Genesys retries for up to four days when it gets no answer, and EventBridge assigns "
            "a new id each time. Such duplicates are delivered.",
            fix="Add a tier with the content as its key, or use the preset:\n"
            'tiers = [\n  { key = "id", window = "5m" },\n'
            '  { key = "content", ignore = ["detail.timestamp", "detail.metadata"] },\n]',
        )
    wanted = [_METADATA] if _is_of_readings(rule.match) else [_STAMP, _METADATA]
    for key in keys:
        if isinstance(key, ContentKey) and (missing := _not_ignored(key, wanted)):
            _volatile_content(subject, missing, checkup)


def _not_ignored(key: ContentKey, wanted: Sequence[Path]) -> list[str]:
    ignored = {tuple(path.replace('"', "").split(".")) for path in key.ignore}
    ignored |= {_METADATA} if _CORRELATION in ignored else set()
    return [".".join(path) for path in wanted if path not in ignored]


def _volatile_content(
    subject: str, missing: Sequence[str], checkup: Checkup, fix: str = _IGNORE
) -> None:
    checkup.report(
        "content-volatile",
        Severity.WARNING,
        subject,
        seen=f"the content of Genesys events is compared with {' and '.join(missing)}",
        why="They contain the time and the request of the publication. When Genesys publishes an "
        "event again they may differ, and it is delivered twice.",
        fix=fix,
    )


def _lint_default(checkup: Checkup) -> None:
    _volatile_content(
        "events that no rule matches",
        [".".join(_STAMP), ".".join(_METADATA)],
        checkup,
        fix='Use the preset for events that no rule of yours matches:\npreset = "genesys"',
    )


# --- states -----------------------------------------------------------------------------------


def _lint_states(subject: str, rule: Rule, checkup: Checkup, *, genesys: bool) -> None:
    if rule.latest is not None:
        stamps = {("time",), *([_STAMP] if genesys else [])}
        if stamps.intersection(paths_of(rule.latest.version)):
            checkup.report(
                "latest-publish-stamp",
                Severity.WARNING,
                subject,
                seen=f'latest uses version = "{rule.latest.version}"',
                why="That is the time of publication. An old state that is published again looks like "
                "the newest, and the real newest state is dropped as stale.",
                fix="Use the time of the change, or a counter of the sender:\n"
                'latest = { entity = "detail.eventBody.conversationId", '
                'version = "detail.eventBody.eventTime" }',
            )
    longest = max(tier.window for tier in rule.tiers)
    if rule.quiet is not None and rule.quiet.time > longest:
        checkup.report(
            "quiet-long",
            Severity.WARNING,
            subject,
            seen=f"quiet is {format_duration(rule.quiet.time)}, and the window "
            f"{format_duration(longest)}",
            why="After the window, no duplicate is expected any more. Until the quiet time ends, a real "
            "return of the entity to its former state is dropped.",
            fix='Use quiet for bursts only:\nquiet = { …, for = "500ms" }',
        )


def _no_key(subject: str, checkup: Checkup) -> None:
    checkup.report(
        "key-none",
        Severity.NOTE,
        subject,
        seen='key = "none"',
        why="Events that match the rule are delivered each time they arrive.",
        fix="If that is not intended, remove the key, so that the content is compared.",
    )


# --- rules that are never reached ----------------------------------------------------------------------------


def _unreachable(subject: str, earlier: Rule, checkup: Checkup) -> None:
    name = repr(earlier.name)
    if earlier.match is not None:
        matches, fix = "all of its events", f"Move it before {name}, or remove it."
    elif subject.startswith("preset"):
        matches, fix = "every event", f"Give {name} a match, or remove the preset."
    else:
        matches = "every event"
        fix = f"Move it before {name}, remove it, or give {name} a match."
    checkup.report(
        "rule-unreachable",
        Severity.WARNING,
        subject,
        seen=f"rule {name} comes first and matches {matches}",
        why="The first matching rule decides, so this one is never used.",
        fix=fix,
    )


def _covers(first: Pattern | None, second: Pattern | None) -> bool:
    """Return whether *first* certainly matches every event that *second* matches."""
    if first is None:
        return True
    return second is not None and _spec_covers(first.spec, second.spec)


def _is_same(first: Any, second: Any) -> bool:
    """Compare as patterns do: to Python 1 is True, at any depth."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(
            _is_same(one, second[name]) for name, one in first.items()
        )
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_is_same, first, second))
    return isinstance(first, bool) == isinstance(second, bool) and bool(first == second)


def _spec_covers(first: Any, second: Any) -> bool:
    if _is_same(first, second):
        return True
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        # Under $or one match is enough, so only equal ones are certain.
        return all(
            name != "$or" and name in second and _spec_covers(one, second[name])
            for name, one in first.items()
        )
    if isinstance(first, list) and isinstance(second, list):
        return all(any(_value_covers(one, other) for one in first) for other in second)
    return False


def _value_covers(first: Any, second: Any) -> bool:
    if _is_same(first, second):
        return True
    prefix = first.get("prefix") if isinstance(first, Mapping) else None
    other = second.get("prefix") if isinstance(second, Mapping) else second
    return isinstance(prefix, str) and isinstance(other, str) and other.startswith(prefix)


def is_genesys(match: Pattern | None, about: RuleContext) -> bool:
    """Return whether events come from Genesys, by the pattern or else by the configuration."""
    sources = match.spec.get("source") if match is not None else None
    if not isinstance(sources, list):
        return about.is_genesys or about.preset == "genesys"
    return any(_names_genesys(value, about.genesys) for value in sources)


def _names_genesys(value: Any, prefixes: Sequence[str]) -> bool:
    is_open = isinstance(value, Mapping)
    if is_open:
        value = value.get("prefix", value.get("wildcard"))
    if not isinstance(value, str):
        return False
    begins = value.partition("*")[0] if is_open else value
    return begins.startswith(tuple(prefixes)) or (
        is_open and bool(begins) and any(prefix.startswith(begins) for prefix in prefixes)
    )


def mentions_genesys(rules: Sequence[Rule], prefixes: Sequence[str]) -> bool:
    """Return whether any of the rules is for events of Genesys."""
    sources = [rule.match.spec.get("source") for rule in rules if rule.match is not None]
    return any(
        _names_genesys(value, prefixes) for one in sources if isinstance(one, list) for value in one
    )


def _is_of_readings(match: Pattern | None) -> bool:
    """Return whether a rule matches observations only: an equal one is a new reading."""
    kinds = match.spec.get("detail-type") if match is not None else None
    return isinstance(kinds, list) and all("observations" in json.dumps(kind) for kind in kinds)


# --- names --------------------------------------------------------------------------------------


def paths_of(expression: str) -> list[Path]:
    """Return the fields that a JMESPath expression ends at, as paths."""
    return _ends(jmespath.compile(expression).parsed, [()])


_IN_TURN: Final = frozenset({"subexpression", "index_expression", "pipe"})
_PROJECTIONS: Final = frozenset({"projection", "value_projection", "filter_projection"})
_HERE: Final = frozenset({"identity", "current", "index", "slice"})


def _ends(node: Any, above: list[Path]) -> list[Path]:
    """Return the ends of an expression that starts at the paths *above*."""
    kind, children = node["type"], node["children"]
    if kind == "field":
        return [(*path, node["value"]) for path in above]
    if kind in _HERE:
        return above
    if kind in _IN_TURN or kind in _PROJECTIONS:
        for child in children[:2] if kind in _PROJECTIONS else children:
            above = _ends(child, above)
        return above
    ends = [path for child in children if isinstance(child, dict) for path in _ends(child, above)]
    return list(dict.fromkeys(ends))


def _plain(name: str) -> str:
    return _ODD.sub("", name.lower())


def _is_entity(path: Path) -> bool:
    name = _plain(path[-1])
    if name in ("uuid", "guid", "id") and len(path) > 1:
        return _plain(path[-2]) in _ENTITIES  # order.id is the orderId
    for ending in ("uuid", "guid", "id"):
        stem = name.removesuffix(ending)
        if stem != name:
            return stem in _ENTITIES
    return name in _ENTITIES


def _is_state(path: Path) -> bool:
    return _plain(path[-1]) in _STATES


def _is_too_little(expressions: Sequence[str]) -> bool:
    """
    Return whether a key has only the entity of an event, or only its kind.

    With both, it may identify one event.
    """
    ways = [_alternatives(jmespath.compile(expression).parsed) for expression in expressions]
    return any(
        all(any(way and all(map(is_such, way)) for way in one) for one in ways)
        for is_such in (_is_entity, _is_state)
    )


def _alternatives(node: Any) -> list[list[Path]]:
    """Return the alternatives of an expression: one for each side of `||`."""
    if node["type"] == "or_expression":
        return [way for child in node["children"] for way in _alternatives(child)]
    return [_ends(node, [()])]


def _is_time(path: Path) -> bool:
    name = path[-1]
    return name in ("time", "timestamp", "date", "ts") or bool(_TIME_ENDINGS.search(name))
