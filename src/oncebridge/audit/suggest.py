"""
Suggest a configuration for a recording, with reasons.

Enabled settings are safe: the rules for Genesys, a window that is never shorter than the default,
and rules for other sources that still separate events which differ in more than the time of
sending. Settings that may drop a wanted event (`quiet`, `latest`) are written as comments for the
operator to enable: lines that start with # and no space.
"""

import json
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Final

from msgspec import Struct

from oncebridge.audit import text as report_text
from oncebridge.audit.report import ArrivalExample, AuditReport, FieldStudy, Suspicion
from oncebridge.base import formatting
from oncebridge.base.durations import format_duration
from oncebridge.engine.causes import Cause
from oncebridge.errors import ConfigError
from oncebridge.events.rules import DEFAULT_WINDOW, Rule
from oncebridge.genesys.preset import genesys_rules
from oncebridge.service.genesys_options import GenesysOptions

_SOURCES: Final = GenesysOptions().sources
_OF_PRESET: Final = frozenset(rule.name for rule in genesys_rules())
_MOST_RULES: Final = 20
_STORM: Final = 0.1
"""Above this share of all arrivals, redeliveries are reported as a problem to fix."""
_WIDE: Final = 96
_NARROW: Final = 78


class Suggestion(Struct, frozen=True):
    """A configuration ready to be saved, and the reasons for its settings."""

    toml: str
    reasons: tuple[str, ...]


def suggest(report: AuditReport, *, quiet: timedelta = timedelta(milliseconds=500)) -> Suggestion:
    """
    Return the configuration that fits *report*.

    *quiet* is the time within which the same state counted as a double emission.
    """
    draft = _Draft(quiet)
    is_genesys = any(source.name.startswith(_SOURCES) for source in report.sources) or any(
        rule.name in _OF_PRESET for rule in report.rules
    )
    _preset(report, draft, is_genesys=is_genesys)
    _window(report, draft, is_genesys=is_genesys)
    _own_rules(report, draft)
    _studied(report, draft)
    for found in report.suspicions:
        _suspected(report, found, draft)
    _replays(report, draft)
    _roots(report, draft)
    return Suggestion(draft.toml(), tuple(draft.reasons))


class _Prefix(Struct, frozen=True):
    """The beginning of sources."""

    text: str


class _Draft:
    """Collects settings, tables and reasons of a configuration."""

    def __init__(self, quiet: timedelta) -> None:
        self.quiet = format_duration(quiet)
        self.settings: list[str] = []
        self.tables: list[str] = []
        self.reasons: list[str] = []
        self._names: set[str] = set()

    def add_reason(self, reason: str) -> None:
        self.reasons.append(reason.replace(formatting.NB, " "))

    def name(self, wanted: str) -> str:
        """Return a unique name for a rule."""
        name, number = wanted, 1
        while name in self._names:
            number += 1
            name = f"{wanted} {number}"
        self._names.add(name)
        return name

    def toml(self) -> str:
        head = [
            *_prose(
                "Suggested by `oncebridge audit`. Copy it into your oncebridge.toml, next to "
                "source, store and sink. A line that starts with # and no space is an optional "
                "setting. Try it: oncebridge audit RECORDING --rules FILE"
            ),
        ]
        return "\n".join([*head, *self.settings, *self.tables]) + "\n"


# --- enabled settings ------------------------------------------------------------------


def _preset(report: AuditReport, draft: _Draft, *, is_genesys: bool) -> None:
    if not is_genesys:
        return
    draft.add_reason(
        'preset = "genesys": the recording has Genesys Cloud events, which have no id of their own.'
    )
    draft.settings += ["", 'preset = "genesys"']
    if _count(report, Cause.SECOND_INTEGRATION):
        draft.add_reason(
            "The preset treats the integrations of one organisation as one source, so an event that "
            "arrives through two of them is delivered once."
        )
        draft.settings += [
            *_prose("Integrations of one organisation count as one source. To separate them:"),
            '#genesys = { scope = "source" }',
        ]


def _window(report: AuditReport, draft: _Draft, *, is_genesys: bool) -> None:
    window = _window_for(report)
    text = format_duration(window)
    longest = (
        f"the longest gap is {formatting.format_elapsed(report.gaps.max_ms)}" if report.gaps else ""
    )
    if window > DEFAULT_WINDOW:
        why = (
            f"{longest}, and the audit used a window of "
            f"{formatting.format_elapsed(report.window_ms)}; later arrivals count as new."
        )
    elif is_genesys:
        why = "Genesys retries for four days, and EventBridge for one more."
        why = f"{longest}, but {why}" if longest else why
    else:
        why = (
            f"{longest}, and the window also covers a day of EventBridge's retries."
            if longest
            else "the default."
        )
    draft.add_reason(f'window = "{text}": {why}')
    draft.settings += [*_prose(f"{why[:1].upper()}{why[1:]}"), f'window = "{text}"']


def _window_for(report: AuditReport) -> timedelta:
    """Return 1.5 times the longest gap in whole days; twice the window if a gap comes near it."""
    if report.gaps is None:
        return DEFAULT_WINDOW
    longest_ms = report.gaps.max_ms
    # A gap cannot be longer than the window, so one that comes near says there may be longer ones.
    is_near = longest_ms * 3 >= report.window_ms * 2
    needed_ms = max(longest_ms * 3 // 2, report.window_ms * 2 if is_near else 0)
    return max(DEFAULT_WINDOW, timedelta(days=-(-needed_ms // formatting.DAY)))


def _own_rules(report: AuditReport, draft: _Draft) -> None:
    """List the user's own rules by name, which is all that a report has of them."""
    own = [rule.name for rule in report.rules if not _is_ours(rule.name)]
    for name in ("default", "allow", *_OF_PRESET, *own):
        draft.name(name)
    if own:
        names = formatting.format_list([formatting.printable(name, 40) for name in own])
        draft.add_reason(
            f"Your own rules ({names}) are not included here: keep them, before these."
        )
        draft.tables += ["", *_prose(f"Your own rules go here: {names}.")]


def _is_ours(name: str) -> bool:
    return name in _OF_PRESET or name in ("default", "allow")


def _studied(report: AuditReport, draft: _Draft) -> None:
    """Suggest a rule for events that no rule matches."""
    grouped: dict[tuple[object, ...], list[FieldStudy]] = {}
    for study in report.studies:
        same = (study.source, study.identifying, study.volatile, study.entity)
        grouped.setdefault(same, []).append(study)
    proposals = [group for group in grouped.values() if _is_sound(group[0])]
    for group in proposals[:_MOST_RULES]:
        _rule_for(group, draft)
    if len(proposals) > _MOST_RULES:
        more = len(proposals) - _MOST_RULES
        draft.add_reason(
            f"{formatting.format_count(more, 'more kind')} of events could have a rule of their own."
        )
    for group in grouped.values():
        if group[0].identifying is None:
            _no_rule_for(group, draft)


def _rule_for(group: Sequence[FieldStudy], draft: _Draft) -> None:
    first = group[0]
    assert first.identifying is not None  # noqa: S101 - or there is no rule
    identifying = formatting.printable(first.identifying)
    merged = sum(study.would_merge for study in group)
    why = (
        f"{identifying} identifies an event; the same value with other content is a conflict, and is "
        "delivered."
    )
    keys = [f"key = {_array([first.identifying])}", "check = true"]
    if first.volatile:
        ignored = formatting.format_list([formatting.printable(path) for path in first.volatile])
        why += f" Copies of one event may differ in {ignored}."
        keys.append(f"ignore = {_array(first.volatile)}")
    of_whom = formatting.printable(first.source, 60) or "no source"
    found = f" ({merged:,} in a sample of {sum(s.sampled for s in group):,} are duplicates by it)"
    draft.add_reason(f"A rule for {of_whom}: {why}{found if merged else ''}")
    entity = [f"entity = {_string(first.entity)}"] if first.entity else []
    draft.tables += [
        "",
        *_prose(why),
        "[[rules]]",
        f"name = {_string(draft.name(_rule_name(first, alone=len(group) == 1)))}",
        *_match([first.source], [study.detail_type for study in group]),
        *keys,
        *entity,
    ]


def _no_rule_for(group: Sequence[FieldStudy], draft: _Draft) -> None:
    first = group[0]
    if not first.volatile:
        return
    of_whom = formatting.printable(first.source, 60) or "no source"
    ignored = formatting.format_list([formatting.printable(path) for path in first.volatile])
    draft.add_reason(
        f"{of_whom}: some events differ only in {ignored}, and no field shows whether they are the "
        "same event. They count as different events unless you enable this rule."
    )
    rule = [
        "[[rules]]",
        f"name = {_string(draft.name(_rule_name(first, alone=len(group) == 1)))}",
        *_match([first.source], [study.detail_type for study in group]),
        f"ignore = {_array(first.volatile)}",
    ]
    if _loads(first):
        draft.tables += [
            "",
            *_prose(
                f"Enable this rule if events that differ only in {ignored} are the same event."
            ),
            *(f"#{line}" for line in rule),
        ]


def _is_sound(study: FieldStudy) -> bool:
    return study.identifying is not None and _loads(study)


def _loads(study: FieldStudy) -> bool:
    """Return whether a rule with the paths of a study loads: the sender chooses the names."""
    spec: dict[str, object] = {"name": "studied"}
    if study.identifying is not None:
        spec |= {"key": [study.identifying], "check": True}
    if study.volatile:
        spec["ignore"] = list(study.volatile)
    if study.entity:
        spec["entity"] = study.entity
    try:
        Rule.parse(spec)
    except ConfigError:
        return False
    return bool(study.source)


def _rule_name(study: FieldStudy, *, alone: bool) -> str:
    stem = _rule_stem(study.source)
    return f"{stem} {formatting.printable(study.detail_type, 60)}".strip() if alone else stem


# --- optional settings ----------------------------------------------------------


def _suspected(report: AuditReport, found: Suspicion, draft: _Draft) -> None:
    title, meaning = report_text.suspicion_text(found)
    reason = f"{formatting.format_count(found.count, 'arrival')} ({title}): {meaning}."
    match found.kind:
        case "double-emission":
            noise = "If that is noise to you, define the state and enable a rule with quiet."
            if _switch(report, found, draft, "quiet", f"{reason} {noise}"):
                reason = f"{reason} {noise}"
        case "out-of-order":
            newest = "If only the newest state matters to you, enable a rule with latest."
            if _switch(report, found, draft, "latest", f"{reason} {newest}"):
                reason = f"{reason} {newest}"
            else:
                reason += (
                    " Let the receiver order events by the time in them, not by their arrival."
                )
        case "id-reused":
            reason += " So no suggested rule uses the id alone."
        case "other-content":
            reason += (
                " Add a field that distinguishes them to the key of your rule, or let the rule compare "
                "the content (check = true); ignore lists the fields that do not count."
            )
        case "return":
            reason += " If so, add a field that distinguishes the two to the key, such as the time of the change."
    draft.add_reason(reason)


def _switch(report: AuditReport, found: Suspicion, draft: _Draft, what: str, reason: str) -> bool:
    """Add rules that would drop it, as comments; True if there is one."""
    by_shape: dict[_StatePaths, list[ArrivalExample]] = {}
    for one in found.examples:
        shape = _shape_of(report, one, what)
        if shape is not None:
            by_shape.setdefault(shape, []).append(one)
    for shape, examples in by_shape.items():
        lines = [
            "[[rules]]",
            f"name = {_string(draft.name(f'{shape.stem} {what}'))}",
            *_match(shape.sources, [one.detail_type for one in examples]),
            *shape.rule(what, draft.quiet),
        ]
        draft.tables += ["", *_prose(reason), *(f"#{line}" for line in lines)]
    return bool(by_shape)


class _StatePaths(Struct, frozen=True):
    """Where events of one kind have the state of an entity."""

    stem: str
    sources: tuple[str | _Prefix, ...]
    entity: str
    more: tuple[str, ...]
    state: str = ""
    version: str = ""

    def rule(self, what: str, quiet: str) -> list[str]:
        held = {"quiet": ("state", self.state), "latest": ("version", self.version)}
        name, value = held[what]
        fields = [f"entity = {_string(self.entity)}", f"{name} = {_string(value)}"]
        fields += [f"for = {_string(quiet)}"] if what == "quiet" else []
        return [*self.more, f"{what} = {{ {', '.join(fields)} }}"]


_STATES: Final = {
    ".presence": "detail.eventBody.presenceDefinition",
    ".routingStatus": "detail.eventBody.routingStatus.status",
    ".attributes": "detail.eventBody.attributes",
}
"""
The state in a Genesys event, without times, by the end of its topic.

Other topics have none: a state that is the same in all events would drop all but one.
"""
_SNAPSHOTS: Final = ("v2.users.", "v2.routing.queues.")
_BODY: Final = "detail.eventBody"
_HAPPENED: Final = f"{_BODY}.eventTime || {_BODY}.modifiedDate || detail.timestamp"


def _shape_of(report: AuditReport, one: ArrivalExample, what: str) -> _StatePaths | None:
    prefix = next((prefix for prefix in _SOURCES if one.source.startswith(prefix)), None)
    if prefix is None:
        # The state of other senders' events is not known.
        return _shape_elsewhere(report, one.source) if what == "latest" else None
    if what == "latest" and not one.detail_type.startswith(_SNAPSHOTS):
        return None  # two events of a conversation are not two states of it
    ends = (state for end, state in _STATES.items() if one.detail_type.endswith(end))
    state = next(ends, "")
    if what == "quiet" and not state:
        return None
    return _StatePaths(
        "genesys",
        (_Prefix(prefix),),
        "detail.topicName",
        ('ignore = ["detail.timestamp", "detail.metadata"]', 'scope = "organisation"'),
        **{"state": state} if what == "quiet" else {"version": _HAPPENED},
    )


def _shape_elsewhere(report: AuditReport, source: str) -> _StatePaths | None:
    study = next((s for s in report.studies if s.source == source and s.entity), None)
    if study is None or not study.entity or not _loads(study):
        return None
    ignore = (f"ignore = {_array(study.volatile)}",) if study.volatile else ()
    return _StatePaths(_rule_stem(source), (source,), study.entity, ignore, version="time")


def _rule_stem(source: str) -> str:
    return formatting.printable(re.split(r"[/.]", source)[-1] or source, 40)


# --- notes --------------------------------------------------------------------------------


def _replays(report: AuditReport, draft: _Draft) -> None:
    count = _count(report, Cause.REPLAY)
    if count:
        draft.add_reason(
            f"{formatting.format_count(count, 'arrival')} came from an archive replay and count as duplicates. "
            'To process a replay again, give its rule on_replay = "separate": once for each replay.'
        )


def _roots(report: AuditReport, draft: _Draft) -> None:
    """Add advice on duplicates that can be avoided where they arise."""
    for cause in (Cause.SECOND_INTEGRATION, Cause.SECOND_BUS):
        if _count(report, cause):
            draft.add_reason(report_text.advice_at_origin(cause))
    if _count(report, Cause.REDELIVERY) > report.events * _STORM:
        draft.add_reason(report_text.advice_at_origin(Cause.REDELIVERY))


def _count(report: AuditReport, cause: Cause) -> int:
    return sum(found.count for found in report.causes if found.cause is cause)


# --- TOML ---------------------------------------------------------------------------------


def _string(text: str) -> str:
    # JSON's escapes are TOML's. Control characters are spelt out as well.
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else _escape(c) for c in quoted)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _array(items: Sequence[str]) -> str:
    return f"[{', '.join(map(_string, items))}]"


def _match(sources: Sequence[str | _Prefix], types: Sequence[str]) -> list[str]:
    """Return a pattern as TOML; *types* count only if none is empty."""
    named = [_string(name) for name in dict.fromkeys(types) if name]
    lines = [f"match.source = [{', '.join(map(_source, sources))}]"]
    if named and all(types):
        lines += _laid_out("match.detail-type", named)
    return lines


def _source(source: str | _Prefix) -> str:
    return (
        f"{{ prefix = {_string(source.text)} }}" if isinstance(source, _Prefix) else _string(source)
    )


def _laid_out(name: str, items: Sequence[str]) -> list[str]:
    line = f"{name} = [{', '.join(items)}]"
    if len(line) <= _WIDE:
        return [line]
    return [f"{name} = [", *(f"  {item}," for item in items), "]"]


def _prose(text: str) -> Iterator[str]:
    """Return a sentence as comment lines of limited width."""
    line = "#"
    for word in formatting.printable(text.replace(formatting.NB, " "), 2000).split(" "):
        if len(line) + len(word) >= _NARROW and line != "#":
            yield line
            line = "#"
        line += f" {word}"
    yield line
