"""
The configuration that a recording asks for, with reasons.

What is switched on is safe: the rules for Genesys, a window that is never shorter than the
default, and rules for other sources that still tell apart whatever differs in more than the
time it was sent. What may lose something that somebody wants (`quiet`, `latest`) stands there
as comments, to be switched on by a person: a line that begins with # and no blank.
"""

import json
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Final

from msgspec import Struct

from oncebridge.audit import text as words
from oncebridge.audit.report import ArrivalExample, AuditReport, FieldStudy, Suspicion
from oncebridge.base import formatting as figures
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
"""From which share of all arrivals on redeliveries are a fault of their own."""
_WIDE: Final = 96
_NARROW: Final = 78


class Suggestion(Struct, frozen=True):
    """A configuration ready to be saved, and why it is as it is."""

    toml: str
    reasons: tuple[str, ...]


def suggest(report: AuditReport, *, quiet: timedelta = timedelta(milliseconds=500)) -> Suggestion:
    """
    Make the configuration that fits what *report* found.

    *quiet* is how soon the same state again counted as a double emission.
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
    """How sources begin."""

    text: str


class _Draft:
    """A configuration in the making: settings first, tables after them."""

    def __init__(self, quiet: timedelta) -> None:
        self.quiet = format_duration(quiet)
        self.settings: list[str] = []
        self.tables: list[str] = []
        self.reasons: list[str] = []
        self._names: set[str] = set()

    def say(self, reason: str) -> None:
        self.reasons.append(reason.replace(figures.NB, " "))

    def name(self, wanted: str) -> str:
        """Return a rule a name that no other has."""
        name, number = wanted, 1
        while name in self._names:
            number += 1
            name = f"{wanted} {number}"
        self._names.add(name)
        return name

    def toml(self) -> str:
        head = [
            *_prose("Suggested by `oncebridge audit`. Put it into your oncebridge.toml, beside"),
            *_prose("source, store and sink. A line that begins with # and no blank is a"),
            *_prose("setting to switch on. Try it: oncebridge audit RECORDING --rules FILE"),
        ]
        return "\n".join([*head, *self.settings, *self.tables]) + "\n"


# --- what is switched on ------------------------------------------------------------------


def _preset(report: AuditReport, draft: _Draft, *, is_genesys: bool) -> None:
    if not is_genesys:
        return
    draft.say(
        'preset = "genesys": there are events of Genesys Cloud, which have no id of their own.'
    )
    draft.settings += ["", 'preset = "genesys"']
    if _count(report, Cause.SECOND_INTEGRATION):
        draft.say(
            "The preset takes the integrations of one organisation for one source, so what comes "
            "through two of them is passed on once."
        )
        draft.settings += [
            *_prose("Integrations of one organisation are one source. To keep them apart:"),
            '#genesys = { scope = "source" }',
        ]


def _window(report: AuditReport, draft: _Draft, *, is_genesys: bool) -> None:
    window = _window_for(report)
    text = format_duration(window)
    longest = f"the longest gap is {figures.elapsed(report.gaps.max_ms)}" if report.gaps else ""
    if window > DEFAULT_WINDOW:
        why = (
            f"{longest}, and the window it was found with is "
            f"{figures.elapsed(report.window_ms)}; what comes later than that counts as new."
        )
    elif is_genesys:
        why = "Genesys sends again for four days, and EventBridge for one more."
        why = f"{longest}, but {why}" if longest else why
    else:
        why = (
            f"{longest}, and a day of EventBridge's retries is in it."
            if longest
            else "the default."
        )
    draft.say(f'window = "{text}": {why}')
    draft.settings += [*_prose(f"{why[:1].upper()}{why[1:]}"), f'window = "{text}"']


def _window_for(report: AuditReport) -> timedelta:
    """Leave half as much again as the longest gap, in whole days; twice where more may be hidden."""
    if report.gaps is None:
        return DEFAULT_WINDOW
    longest_ms = report.gaps.max_ms
    # A gap cannot be longer than the window, so one that comes near says there may be longer ones.
    is_near = longest_ms * 3 >= report.window_ms * 2
    needed_ms = max(longest_ms * 3 // 2, report.window_ms * 2 if is_near else 0)
    return max(DEFAULT_WINDOW, timedelta(days=-(-needed_ms // figures.DAY)))


def _own_rules(report: AuditReport, draft: _Draft) -> None:
    """Leave the user's own rules where they are: a report knows only their names."""
    own = [rule.name for rule in report.rules if not _is_ours(rule.name)]
    for name in ("default", "allow", *_OF_PRESET, *own):
        draft.name(name)
    if own:
        told = figures.listed([figures.spelt(name, 40) for name in own])
        draft.say(f"Your own rules ({told}) are not repeated here: keep them, before these.")
        draft.tables += ["", *_prose(f"Your own rules belong here: {told}.")]


def _is_ours(name: str) -> bool:
    return name in _OF_PRESET or name in ("default", "allow")


def _studied(report: AuditReport, draft: _Draft) -> None:
    """Propose a rule for what none of ours knows."""
    grouped: dict[tuple[object, ...], list[FieldStudy]] = {}
    for study in report.studies:
        same = (study.source, study.identifying, study.volatile, study.entity)
        grouped.setdefault(same, []).append(study)
    proposals = [group for group in grouped.values() if _is_sound(group[0])]
    for group in proposals[:_MOST_RULES]:
        _rule_for(group, draft)
    if len(proposals) > _MOST_RULES:
        more = len(proposals) - _MOST_RULES
        draft.say(f"{figures.many(more, 'more kind')} of events could have a rule of their own.")
    for group in grouped.values():
        if group[0].identifying is None:
            _no_rule_for(group, draft)


def _rule_for(group: Sequence[FieldStudy], draft: _Draft) -> None:
    first = group[0]
    assert first.identifying is not None  # noqa: S101 - or there is no rule
    identifying = figures.spelt(first.identifying)
    merged = sum(study.would_merge for study in group)
    why = (
        f"{identifying} tells events apart; the same with other content is a conflict, and passes."
    )
    keys = [f"key = {_array([first.identifying])}", "check = true"]
    if first.volatile:
        ignored = figures.listed([figures.spelt(path) for path in first.volatile])
        why += f" In {ignored} copies of one event may differ."
        keys.append(f"ignore = {_array(first.volatile)}")
    of_whom = figures.spelt(first.source, 60) or "no source"
    found = f" ({merged:,} in a sample of {sum(s.sampled for s in group):,} are repeats by it)"
    draft.say(f"A rule for {of_whom}: {why}{found if merged else ''}")
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
    of_whom = figures.spelt(first.source, 60) or "no source"
    ignored = figures.listed([figures.spelt(path) for path in first.volatile])
    draft.say(
        f"{of_whom}: events differ in {ignored} alone, and no field says whether they are one. "
        "They stay apart unless you switch its rule on."
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
            *_prose(f"Are events that differ in {ignored} alone the same? Nothing here says so."),
            *(f"#{line}" for line in rule),
        ]


def _is_sound(study: FieldStudy) -> bool:
    return study.identifying is not None and _loads(study)


def _loads(study: FieldStudy) -> bool:
    """Return whether the paths of a study can be written in a rule: names are the sender's."""
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
    return f"{stem} {figures.spelt(study.detail_type, 60)}".strip() if alone else stem


# --- what a person may switch on ----------------------------------------------------------


def _suspected(report: AuditReport, found: Suspicion, draft: _Draft) -> None:
    title, meaning = words.suspicion_text(found)
    told = f"{figures.many(found.count, 'arrival')} ({title}): {meaning}."
    match found.kind:
        case "double-emission":
            noise = (
                "If that is noise to you, say what the state is, and switch a rule with quiet on."
            )
            if _switch(report, found, draft, "quiet", f"{told} {noise}"):
                told = f"{told} {noise}"
        case "out-of-order":
            newest = "If only the newest state counts to you, switch a rule with latest on."
            if _switch(report, found, draft, "latest", f"{told} {newest}"):
                told = f"{told} {newest}"
            else:
                told += " Let whoever receives them go by the time in them, not by their arrival."
        case "id-reused":
            told += " So no rule here goes by the id alone."
        case "other-content":
            told += (
                " Add to the key of your rule what tells them apart, or let it compare the content "
                "(check = true); ignore says what does not count in it."
            )
        case "return":
            told += " If it is, add what tells the two apart to the key, such as the time of the change."
    draft.say(told)


def _switch(report: AuditReport, found: Suspicion, draft: _Draft, what: str, told: str) -> bool:
    """Write rules that would drop it, as comments, where it is known by what."""
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
        draft.tables += ["", *_prose(told), *(f"#{line}" for line in lines)]
    return bool(by_shape)


class _StatePaths(Struct, frozen=True):
    """Where the state of an entity stands in events of one kind."""

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
What of a Genesys event is its state, by how the topic ends; times are no part of it.

Of other topics nobody knows: a state that is the same in all events would drop all but one.
"""
_SNAPSHOTS: Final = ("v2.users.", "v2.routing.queues.")
_BODY: Final = "detail.eventBody"
_HAPPENED: Final = f"{_BODY}.eventTime || {_BODY}.modifiedDate || detail.timestamp"


def _shape_of(report: AuditReport, one: ArrivalExample, what: str) -> _StatePaths | None:
    prefix = next((prefix for prefix in _SOURCES if one.source.startswith(prefix)), None)
    if prefix is None:
        # Where the state stands in events of others, only they know.
        return _shape_elsewhere(report, one.source) if what == "latest" else None
    if what == "latest" and not one.detail_type.startswith(_SNAPSHOTS):
        return None  # two events of a conversation are no two states of it
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
    return figures.spelt(re.split(r"[/.]", source)[-1] or source, 40)


# --- notes --------------------------------------------------------------------------------


def _replays(report: AuditReport, draft: _Draft) -> None:
    count = _count(report, Cause.REPLAY)
    if count:
        draft.say(
            f"{figures.many(count, 'arrival')} came out of an archive and count as repeats. To process "
            'a replay anew, give its rule on_replay = "separate": once for each replay.'
        )


def _roots(report: AuditReport, draft: _Draft) -> None:
    """Name what is better put right where it comes from."""
    for cause in (Cause.SECOND_INTEGRATION, Cause.SECOND_BUS):
        if _count(report, cause):
            draft.say(words.advice_at_origin(cause))
    if _count(report, Cause.REDELIVERY) > report.events * _STORM:
        draft.say(words.advice_at_origin(Cause.REDELIVERY))


def _count(report: AuditReport, cause: Cause) -> int:
    return sum(found.count for found in report.causes if found.cause is cause)


# --- TOML ---------------------------------------------------------------------------------


def _string(text: str) -> str:
    # JSON's escapes are TOML's. Whatever a terminal might obey is spelt out as well.
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else _escape(c) for c in quoted)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _array(items: Sequence[str]) -> str:
    return f"[{', '.join(map(_string, items))}]"


def _match(sources: Sequence[str | _Prefix], types: Sequence[str]) -> list[str]:
    """Write a pattern; *types* that are not all there do not count."""
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
    """Make comments of a sentence, none too wide."""
    line = "#"
    for word in figures.spelt(text.replace(figures.NB, " "), 2000).split(" "):
        if len(line) + len(word) >= _NARROW and line != "#":
            yield line
            line = "#"
        line += f" {word}"
    yield line
