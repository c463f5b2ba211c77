"""
What is wrong with rules, as far as they show it by themselves.

A key that names too little makes strangers into duplicates, and those are dropped; one that
names what every publication changes lets everything through. Both look right in a test with one
event. Names are all there is to go by here, so a finding is a question as much as an answer.

Pure functions: nothing is opened, and no event is looked at.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jmespath
from msgspec import Struct

from oncebridge.base.durations import format_duration
from oncebridge.base.options import written
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
_IGNORE: Final = """Leave the rule out and use the preset (preset = "genesys"), or let them not count:
ignore = ["detail.timestamp", "detail.metadata"]"""
_TIME_ENDINGS: Final = re.compile(r"([a-z0-9](At|On|Date|Time|Timestamp)|_(at|on|date|time|ts))$")
_ODD: Final = re.compile(r"[^a-z0-9]")


class RuleContext(Struct, frozen=True):
    """What a linter has to know besides the rules."""

    preset: str = "none"
    genesys: tuple[str, ...] = GENESYS_SOURCES
    """How the sources of Genesys begin."""
    is_genesys: bool = False
    """Something else says that events come from Genesys: a list of allowed senders, for one."""


def lint(
    rules: Sequence[Rule], about: RuleContext | None = None, *, own: int | None = None
) -> list[Finding]:
    """
    Find what is wrong with the first *own* rules; without that, with all of them.

    What follows them is a preset's, and only looked at for whether anything reaches it.
    """
    checkup = Checkup()
    about = about or RuleContext()
    mine = rules[:own]
    for at, rule in enumerate(mine):
        earlier = next((one for one in rules[:at] if _covers(one.match, rule.match)), None)
        if earlier is not None:
            _unreachable(f"rule {rule.name}", earlier, checkup)
            continue  # whatever else is wrong with it has no effect
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
        # Where the content is compared too, what differs is delivered: the key drops nothing.
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
            why="An event with a known key and other content is dropped, and nobody hears of it. "
            "Where a sender uses an id twice, the second event is lost.",
            fix='Deliver it, which is the default, or keep it:\non_conflict = "dead"',
        )


# --- keys of fields -------------------------------------------------------------------------


def _lint_fields(
    subject: str, expressions: Sequence[str], rule: Rule, checkup: Checkup, *, genesys: bool
) -> None:
    paths = [path for expression in expressions for path in paths_of(expression)]
    if not paths:
        return
    shown = f"key = {written(list(expressions))}"
    if all(map(_is_time, paths)):
        checkup.report(
            "key-time",
            Severity.WARNING,
            subject,
            seen=shown,
            why="Different events of the same moment get one key, and all but the first are "
            "dropped; the same event published again may carry another time, and passes.",
            fix="Name what happened to whom as well:\n"
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
    what = "of what kind an event is" if is_state else "whom or what an event is about"
    others = ["detail.conversationId", name] if is_state else [name, "detail.status"]
    checkup.report(
        "key-coarse",
        Severity.WARNING,
        subject,
        seen=shown,
        why=f"{name} says {what}, and not which event it is. The next change of the same one has "
        "the same key if its detail-type is the same, and is dropped as a duplicate. The key is "
        "right only where there is never more than one such event.",
        fix="Name the event's own id, or what tells one change from the next, such as the "
        f"following; or leave the key out, and the content counts.\nkey = "
        f"{written([*others, 'detail.eventTime'])}",
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
            "It belongs to the request that caused the event: several events may share it, and "
            "nothing says that an event published again keeps it."
        )
    else:
        why = (
            "An event that is published again may carry another value there, and then passes as "
            "new. Right only where the sender writes when it happened, not when it sent it."
        )
    checkup.report(
        "key-volatile",
        severity,
        subject,
        seen=f"{names} in {shown}",
        why=why,
        fix="Use the time of what happened, such as detail.eventBody.eventTime for the detail "
        "events of Genesys, or the content without what changes:\n"
        'key = "content"\nignore = ["detail.timestamp", "detail.metadata"]',
    )


# --- Genesys --------------------------------------------------------------------------------


def _lint_genesys(subject: str, rule: Rule, checkup: Checkup) -> None:
    keys = [tier.key for tier in rule.tiers]
    if all(isinstance(key, IdKey) for key in keys):
        checkup.report(
            "key-id-only",
            # Who also goes by the state drops most of it, and has thought of it.
            Severity.NOTE if rule.quiet else Severity.WARNING,
            subject,
            seen='the only key is "id", which EventBridge gives',
            why="Genesys publishes again for up to four days when it had no answer, and each time "
            "EventBridge gives the event a new id: such repeats pass.",
            fix="Add a tier that knows the event by its content, or use the preset:\n"
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
        seen=f"the content of Genesys events counts with {' and '.join(missing)}",
        why="They say when and by which request an event was published. When Genesys publishes it "
        "again they may differ, and it passes as new.",
        fix=fix,
    )


def _lint_default(checkup: Checkup) -> None:
    _volatile_content(
        "events that no rule matches",
        [".".join(_STAMP), ".".join(_METADATA)],
        checkup,
        fix='Let the preset take what no rule of yours does:\npreset = "genesys"',
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
                seen=f'latest goes by version = "{rule.latest.version}"',
                why="That is when the event was published. An old state that is published again "
                "looks like the newest, and what really came later is dropped as stale.",
                fix="Go by when it happened, or by a counter of the sender:\n"
                'latest = { entity = "detail.eventBody.conversationId", '
                'version = "detail.eventBody.eventTime" }',
            )
    longest = max(tier.window for tier in rule.tiers)
    if rule.quiet is not None and rule.quiet.time > longest:
        checkup.report(
            "quiet-long",
            Severity.WARNING,
            subject,
            seen=f"quiet for {format_duration(rule.quiet.time)}, and a window of "
            f"{format_duration(longest)}",
            why="For the rest of the quiet time an entity's return to its former state is dropped "
            "although no copy of it is expected any more: that is a change, not noise.",
            fix='Quiet is for bursts:\nquiet = { …, for = "500ms" }',
        )


def _no_key(subject: str, checkup: Checkup) -> None:
    checkup.report(
        "key-none",
        Severity.NOTE,
        subject,
        seen='key = "none"',
        why="What it matches is forwarded as often as it comes.",
        fix="If that is meant, nothing. Otherwise leave the key out, and the content counts.",
    )


# --- what is reached ----------------------------------------------------------------------------


def _unreachable(subject: str, earlier: Rule, checkup: Checkup) -> None:
    name = repr(earlier.name)
    if earlier.match is not None:
        matches, fix = "all that it could match", f"Put it before {name}, or leave it out."
    elif subject.startswith("preset"):
        matches, fix = "every event", f"Give {name} a match, or leave the preset out."
    else:
        matches = "every event"
        fix = f"Put it before {name}, leave it out, or give {name} a match."
    checkup.report(
        "rule-unreachable",
        Severity.WARNING,
        subject,
        seen=f"rule {name} stands before it and matches {matches}",
        why="The first rule that matches decides, so this never does.",
        fix=fix,
    )


def _covers(first: Pattern | None, second: Pattern | None) -> bool:
    """Return whether *first* surely matches all that *second* does."""
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
        # Under $or only one has to hold, so there only equal ones are sure.
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
    """Return whether events of Genesys are meant: by the pattern, or else by everything around."""
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
    """Return whether a rule is for observations only: there the same again is another reading."""
    kinds = match.spec.get("detail-type") if match is not None else None
    return isinstance(kinds, list) and all("observations" in json.dumps(kind) for kind in kinds)


# --- names --------------------------------------------------------------------------------------


def paths_of(expression: str) -> list[Path]:
    """List the fields that a JMESPath expression ends at, each as its names from the top."""
    return _ends(jmespath.compile(expression).parsed, [()])


_IN_TURN: Final = frozenset({"subexpression", "index_expression", "pipe"})
_PROJECTIONS: Final = frozenset({"projection", "value_projection", "filter_projection"})
_HERE: Final = frozenset({"identity", "current", "index", "slice"})


def _ends(node: Any, above: list[Path]) -> list[Path]:
    """Follow an expression from where others ended; what stands side by side, to each end."""
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
    Return whether a key says only whom an event is about, or only of what kind it is.

    Where both are named it may well be one event.
    """
    ways = [_alternatives(jmespath.compile(expression).parsed) for expression in expressions]
    return any(
        all(any(way and all(map(is_such, way)) for way in one) for one in ways)
        for is_such in (_is_entity, _is_state)
    )


def _alternatives(node: Any) -> list[list[Path]]:
    """List what an expression may go by: each side of `||` is a way of its own."""
    if node["type"] == "or_expression":
        return [way for child in node["children"] for way in _alternatives(child)]
    return [_ends(node, [()])]


def _is_time(path: Path) -> bool:
    name = path[-1]
    return name in ("time", "timestamp", "date", "ts") or bool(_TIME_ENDINGS.search(name))
