"""
Find events that arrive more than once: by two targets of a rule, or by two rules.

All feeds of the configuration are compared with each other: a queue and a function that reads
another queue share the store, and an event of both arrives twice.
"""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final

from msgspec import Struct

from oncebridge.check.aws.context import AwsContext
from oncebridge.check.aws.feeds import Bus, EventFeed, EventFeeds, rules_to
from oncebridge.check.aws.patterns import Overlap, RulePattern, overlap
from oncebridge.check.finding import Severity

_FEW: Final = 3
_BREATHE: Final = 500
"""Pairs to compare before other tasks may run."""


class _Rule(Struct, frozen=True):
    """A rule, and its targets that send events here."""

    feeds: tuple[EventFeed, ...]
    pattern: RulePattern | None

    @property
    def first(self) -> EventFeed:
        return self.feeds[0]

    @property
    def to(self) -> str:
        return self.first.to


class _Pair(Struct, frozen=True):
    """Two rules that send the same events, or may."""

    one: _Rule
    other: _Rule
    common: Overlap

    @property
    def is_proved(self) -> bool:
        return self.common is not Overlap.PERHAPS

    @property
    def is_on_one_bus(self) -> bool:
        return self.one.first.bus == self.other.first.bus

    @property
    def subject(self) -> str:
        return " and ".join(sorted({self.one.to, self.other.to}))

    @property
    def removable(self) -> _Rule | None:
        """The rule that can be removed without losing an event; None if that is not certain."""
        if not (self.is_proved and self.is_on_one_bus and self.one.to == self.other.to):
            return None
        is_first = self.common is Overlap.WITHIN
        spare, kept = (self.one, self.other) if is_first else (self.other, self.one)
        # A rule that changes events must not be the only one left.
        return None if "Input" in kept.first.changes else spare


async def check_overlaps(context: AwsContext, several: Sequence[EventFeeds]) -> None:
    """Check for events that arrive more than once."""
    rules = list(_rules(several))
    for rule in rules:
        if len(rule.feeds) > 1:
            _report_targets(context, rule)
    found = await _pairs(context, rules)
    for subject in dict.fromkeys(pair.subject for pair in found):
        for is_proved in (True, False):
            pairs = [
                pair for pair in found if (pair.subject, pair.is_proved) == (subject, is_proved)
            ]
            if pairs:
                _report_pairs(context, subject, pairs)
    spoilt = {rule.to for rule in rules if len(rule.feeds) > 1}
    spoilt |= {rule.to for pair in found for rule in (pair.one, pair.other)}
    for feeds in several:
        if feeds.found and feeds.is_sure and feeds.to not in spoilt:
            context.report_passed(feeds.to, "no two rules send the same events")


def _rules(several: Sequence[EventFeeds]) -> Iterator[_Rule]:
    """Group the enabled feeds by rule, each once."""
    by_rule: dict[tuple[Bus, str], dict[str, EventFeed]] = {}
    for feed in (feed for feeds in several for feed in feeds.found):
        if feed.is_enabled:
            by_rule.setdefault((feed.bus, feed.rule), {}).setdefault(feed.id, feed)
    for feeds in by_rule.values():
        found = tuple(feeds.values())
        pattern = found[0].pattern
        yield _Rule(found, None if pattern is None else RulePattern.of(_on_its_bus(found[0])))


def _on_its_bus(feed: EventFeed) -> dict[str, object]:
    """Return the pattern, narrowed to what can be on the bus: a partner's has one source."""
    pattern = dict(feed.pattern or {})
    if feed.bus.is_partner:
        pattern["source"] = [feed.bus.name]
    return pattern


async def _pairs(context: AwsContext, rules: Sequence[_Rule]) -> list[_Pair]:
    found: list[_Pair] = []
    for at, (one, other) in enumerate(combinations(rules, 2)):
        if at % _BREATHE == 0:
            await asyncio.sleep(0)
        if one.pattern is None or other.pattern is None:
            continue  # a schedule, or denied
        common = overlap(one.pattern, other.pattern)
        if common is not Overlap.NEVER:
            found.append(_Pair(one, other, common))
    apart = {
        (one.first.bus, other.first.bus): one.first
        for pair in found
        if not pair.is_on_one_bus
        for one, other in ((pair.one, pair.other), (pair.other, pair.one))
    }
    ways = await asyncio.gather(
        *[_is_forwarded(context, start, end, feed) for (start, end), feed in apart.items()]
    )
    joined = {way for way, is_there in zip(apart, ways, strict=True) if is_there}
    # Without forwarding, an event is on one bus only.
    return [pair for pair in found if pair.is_on_one_bus or _joined(pair) & joined]


def _joined(pair: _Pair) -> set[tuple[Bus, Bus]]:
    one, other = pair.one.first.bus, pair.other.first.bus
    return {(one, other), (other, one)}


async def _is_forwarded(context: AwsContext, start: Bus, end: Bus, feed: EventFeed) -> bool:
    """Return whether a rule of one bus forwards to the other; a partner's bus takes no events."""
    if not end.arn or end.is_partner:
        return False
    return bool(await rules_to(context, start, end.arn, feed.where))


# --- findings -----------------------------------------------------------------------


def _report_targets(context: AwsContext, rule: _Rule) -> None:
    ids = ", ".join(feed.id for feed in rule.feeds)
    places = sorted({feed.to for feed in rule.feeds})
    if len(places) > 1:
        seen = (
            f"{len(rule.feeds)} of its targets send events here, to {' and '.join(places)}: {ids}"
        )
        fix = "Keep one of them, and remove the other targets (aws events remove-targets)."
    else:
        seen = f"{len(rule.feeds)} of its targets are {places[0]}: {ids}"
        spare = [feed.id for feed in rule.feeds[1:]]
        fix = "Remove all but one:\n" + rule.first.command("remove-targets", "--ids", *spare)
    context.report(
        "target-twice",
        Severity.WARNING,
        rule.first.subject,
        seen=seen,
        why="Every event arrives that many times. oncebridge delivers one, and you pay for the "
        "others.",
        fix=fix,
    )


def _report_pairs(context: AwsContext, subject: str, pairs: Sequence[_Pair]) -> None:
    seen = "; ".join(_pair_text(pair) for pair in pairs[:_FEW])
    if len(pairs) > _FEW:
        seen += f"; and {len(pairs) - _FEW:,} more pairs of rules"
    context.report(
        "rules-overlap",
        Severity.WARNING if pairs[0].is_proved else Severity.NOTE,
        subject,
        seen=seen,
        why="An event that matches both arrives once for each rule, with the same id. oncebridge "
        "delivers one, and you pay for the others. A change to one rule has no effect.",
        fix=_fix(pairs),
    )


def _pair_text(pair: _Pair) -> str:
    way = "" if pair.is_on_one_bus else ", since a rule forwards from one bus to the other"
    names = f"{pair.one.first.subject} and {pair.other.first.subject}"
    return f"{names} both send events here, and {pair.common.value}{way}"


def _fix(pairs: Sequence[_Pair]) -> str:
    spare = {id(rule): rule for pair in pairs if (rule := pair.removable) is not None}
    if spare:
        removals = [feed.removal for rule in spare.values() for feed in rule.feeds]
        more = f"\n(and {len(removals) - _FEW:,} more)" if len(removals) > _FEW else ""
        return (
            "Remove this target: the same events arrive without it. The rule keeps its other targets:\n"
            + "\n".join(removals[:_FEW])
            + more
        )
    if pairs[0].is_proved:
        return (
            "Keep one of them. Before you remove a target, check that all of its events arrive by "
            "the other: that the forwarding rule matches them all."
        )
    return (
        "Check whether an event can match both. If so, exclude the events of one pattern from the "
        "other (anything-but), or merge the two rules."
    )
