"""
Describes one arrival and its verdict in sentences.

`oncebridge.operate.explain.words` describes the verdict that an event would get now; this module
describes the verdict that it got, and the verdicts of its other arrivals in the history. Arrivals
are not counted if the history may have gaps.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from oncebridge.base.formatting import NB, format_count, format_elapsed
from oncebridge.dashboard.dead_letters import meaning_of
from oncebridge.engine.causes import MEANINGS, Cause, Sighting, duplicate_cause, remembered
from oncebridge.engine.router import UNROUTED
from oncebridge.engine.verdict import HANDED_BACK, Verdict
from oncebridge.events.event import REASONS
from oncebridge.events.key import FieldsKey
from oncebridge.events.rules import Rule
from oncebridge.observe.history import HistoryRow
from oncebridge.operate.explain.explainer import why_bypassed
from oncebridge.operate.explain.explanation import Explanation
from oncebridge.operate.explain.words import cause as cause_in_words
from oncebridge.operate.explain.words import outcome
from oncebridge.stores.api import Fate


class Instant(Struct, frozen=True):
    """A time inside a sentence, shown in the reader's time zone."""

    ms: int


Words = tuple[str | Instant, ...]
"""One sentence."""

_FATES: Final = {
    Verdict.DELIVERED: Fate.DELIVERED,
    Verdict.DEAD: Fate.DEAD,
    Verdict.STALE: Fate.STALE,
    Verdict.UNCHANGED: Fate.UNCHANGED,
}
_ORDINALS: Final = (
    *("first", "second", "third", "fourth", "fifth"),
    *("sixth", "seventh", "eighth", "ninth", "tenth"),
)
_SURE: Final = frozenset(
    {Cause.REDELIVERY, Cause.REPLAY, Cause.OUT_OF_ORDER, Cause.DOUBLE_EMISSION, Cause.ID_REUSED}
)
"""Causes that are certain without the first arrival: by the id, or by the verdict."""
_RETURNED: Final = "It was returned to its source, which retries it."


class LikelyCause(Struct, frozen=True):
    """Why an event arrived again."""

    cause: Cause
    text: str
    is_sure: bool
    counted_as: str = ""
    """The cause that was counted when it arrived, if different."""
    is_of_copy: bool = False
    """True if its envelope id is that of a later copy instead of the first."""
    twin_ms: int = 0
    """When that copy arrived, if the history has it."""

    @property
    def words(self) -> Words:
        """The cause in words."""
        if not self.is_of_copy:
            return (self.text,)
        which: Words = ("an earlier copy",)
        if self.twin_ms:
            which = ("the arrival of ", Instant(self.twin_ms), ", a duplicate of the first")
        what, _, why = self.text.partition(": ")
        return (f"{what} as ", *which, f": {why}")


def likely_cause(
    row: HistoryRow,
    first: HistoryRow | None,
    rule: Rule | None,
    *,
    twin: HistoryRow | None = None,
) -> LikelyCause | None:
    """
    Return the cause of a duplicate, and whether it is certain.

    It is certain if the first arrival is known, or if one arrival is enough. Otherwise two causes
    may look alike. *twin* is the earliest arrival with the same id, even if it is not the first.
    """
    if row.cause not in MEANINGS:
        return None
    counted = cause = Cause(row.cause)
    is_sure = cause in _SURE
    if first is not None and row.verdict == Verdict.DUPLICATE:
        cause = duplicate_cause(_sighting(first), _sighting(row), id_was_seen=twin is not None)
        is_sure = cause is not Cause.UNKNOWN
    explanation = Explanation(
        line=0,
        action="deduplicate",
        cause=cause,
        is_guess=not is_sure,
        scope=rule.scope if rule else "",
    )
    text = MEANINGS[cause] if is_sure else cause_in_words(explanation)
    if rule is not None and any(isinstance(tier.key, FieldsKey) for tier in rule.tiers):
        # Such a rule compares some fields only: the rest of the content may differ.
        text = text.replace("the same content", "the same key")
    is_of_copy = cause is Cause.REDELIVERY and _has_another_id(row, first)
    return LikelyCause(
        cause,
        text,
        is_sure,
        counted if counted is not cause else "",
        is_of_copy,
        twin.at_ms if twin is not None and is_of_copy else 0,
    )


def _has_another_id(row: HistoryRow, first: HistoryRow | None) -> bool:
    """Return True if an arrival is known to have another id than the first."""
    known = first.id if first is not None else row.first_id
    return bool(row.id and known) and remembered(row.id) != remembered(known)


def _sighting(row: HistoryRow) -> Sighting:
    return Sighting(row.id, row.source, row.account, row.region, row.replay)


class ArrivalContext(Struct, frozen=True, kw_only=True):
    """One arrival, and the other arrivals of the same event."""

    row: HistoryRow
    before: Sequence[HistoryRow] = ()
    """Earlier arrivals of the same event that the history has, oldest first."""
    after: Sequence[HistoryRow] = ()
    is_whole: bool = False
    """True if the history has all arrivals, from the first on."""
    rule: Rule | None = None
    """None if it is no longer configured, or there was none."""
    fate: Fate | None = None
    """The fate in the store's record now."""
    likely: LikelyCause | None = None


def is_acknowledged(row: HistoryRow) -> bool:
    """Return True if the event was acknowledged to its source."""
    return row.verdict not in HANDED_BACK or row.forwarded


def is_unreadable(row: HistoryRow) -> bool:
    """Return True if it was not a readable event."""
    return row.verdict == Verdict.DEAD and not row.rule and death_of(row) in REASONS


def death_of(row: HistoryRow) -> str:
    """Return the reason of a dead letter: one word."""
    return row.reason.partition(":")[0]


def ordinal(number: int) -> str:
    """Return an ordinal number: `first`, `second`, … `11th`."""
    if number <= len(_ORDINALS):
        return _ORDINALS[number - 1]
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number:,}{last or 'th'}"


def ended_ms(row: HistoryRow) -> int:
    """Return the time of the verdict."""
    return row.at_ms + round(row.took_ms)


def describe_arrival(context: ArrivalContext) -> list[Words]:
    """Return a few sentences about the verdict of an arrival, and the reason."""
    row = context.row
    sentences = _DESCRIBERS[Verdict(row.verdict)](context) if row.verdict in _DESCRIBERS else []
    if row.unprotected:
        sentences.append(
            ("The store was unavailable: it was delivered without checking for duplicates.",)
        )
    return sentences + _since(context)


# --- the verdict --------------------------------------------------------------------------


def _delivered(context: ArrivalContext) -> list[Words]:
    row, earlier = context.row, _settled(context.before)
    if earlier is not None:
        before: Words = ("It had been delivered before, at ", Instant(ended_ms(earlier)))
        return [
            ("This event was delivered.",),
            (*before, ": its window had passed, or an operator forgot or resent it."),
        ]
    tries = f", at attempt {row.attempt}" if row.attempt > 1 else ""
    if context.before:
        back = format_count(len(context.before), "earlier arrival")
        was = "was" if len(context.before) == 1 else "were"
        return [(f"This event was delivered{tries}. {back} {was} returned to the source.",)]
    if context.is_whole:
        return [(f"This was the first arrival of the event. It was delivered{tries}.",)]
    return [(f"This event was delivered{tries}.",)]


def _duplicate(context: ArrivalContext) -> list[Words]:
    row = context.row
    which = "This is a duplicate of"
    if context.is_whole:
        which = f"This is the {ordinal(len(context.before) + 1)} arrival of"
    why: Words = ("; ", *context.likely.words, ".") if context.likely else (".",)
    return [(f"{which} an event that ", *_how_it_ended(context), *why), *_not_sent(row)]


def _how_it_ended(context: ArrivalContext) -> Words:
    row, settled = context.row, _settled(context.before)
    if settled is not None and settled.forwarded:
        return ("was delivered at ", Instant(ended_ms(settled)))
    fate = _FATES.get(Verdict(settled.verdict)) if settled is not None else context.fate
    text = outcome(fate) if fate is not None else "was processed"
    at_ms = settled.at_ms if settled is not None else row.first_ms
    if not at_ms:
        return (text,)
    return ("first arrived at ", Instant(at_ms), f" and {text}")


def _settled(rows: Sequence[HistoryRow]) -> HistoryRow | None:
    """Return the arrival that ended the event: the first delivered, or else the first final one."""
    ended = [row for row in rows if row.verdict in _FATES or row.verdict == Verdict.CONFLICT]
    return next((row for row in ended if row.forwarded), ended[0] if ended else None)


def _stale(context: ArrivalContext) -> list[Words]:
    text = "A newer state of the same entity had been delivered when this one arrived"
    return [(f"{text}, so it is stale.",), *_not_sent(context.row)]


def _unchanged(context: ArrivalContext) -> list[Words]:
    text = "The same state of the same entity had been delivered just before this one arrived"
    return [(f"{text}, so it is unchanged.",), *_not_sent(context.row)]


def _not_sent(row: HistoryRow) -> list[Words]:
    if row.forwarded:
        return [(f"It was delivered anyway: route {row.route} is in shadow mode.",)]
    return [("It was not delivered.",)]


def _conflict(context: ArrivalContext) -> list[Words]:
    row = context.row
    is_by_id = context.likely is not None and context.likely.cause is Cause.ID_REUSED
    what = "envelope id" if is_by_id else "key"
    first: Words = (f"Another event has the same {what}, with different content.",)
    if row.forwarded:
        return [first, ("This one was delivered as a separate event.",)]
    if row.reason:
        return [first, ("This one went to the dead letters.",)]
    return [first, ("Its rule drops such events, so this one was dropped.",)]


def _busy(context: ArrivalContext) -> list[Words]:
    why = context.row.reason or "another worker was processing it"
    return [(f"It could not be claimed: {why}.",), *_returned_to_source(context)]


def _failed(context: ArrivalContext) -> list[Words]:
    row = context.row
    why = row.reason or "no reason was reported"
    if row.forwarded:
        return [(f"It was delivered, but a later step failed: {why}.",)]
    return [(f"It was not delivered: {why}.",), *_returned_to_source(context)]


def _returned_to_source(context: ArrivalContext) -> list[Words]:
    """Return what happened next."""
    if context.row.forwarded:
        return _not_sent(context.row)
    if not context.row.key:
        return [(_RETURNED,)]
    settled = _settled(context.after)
    if settled is not None:
        later = _after(context.row, settled)
        how = f"was {settled.verdict}"
        if settled.verdict in _FATES:
            how = outcome(_FATES[Verdict(settled.verdict)])
        return [(f"It was returned to its source, arrived again after {later} and {how}.",)]
    if context.after:
        times = format_count(len(context.after), "time")
        return [
            (f"It was returned to its source, arrived again {times}, and is still being retried.",)
        ]
    return [(f"{_RETURNED} The history has no later arrival yet.",)]


def _dead(context: ArrivalContext) -> list[Words]:
    row = context.row
    word, _, message = row.reason.partition(": ")
    why = meaning_of(word) or word
    if message and word != UNROUTED and message != why:
        why = f"{why} ({message})"
    what = "This is not an event" if is_unreadable(row) else "This event went to the dead letters"
    kept = " It is kept in the dead letters." if is_unreadable(row) else ""
    return [(f"{what}: {why}.{kept}" if why else f"{what}.{kept}",)]


def _bypassed(context: ArrivalContext) -> list[Words]:
    why = ""
    if context.rule is not None:
        why = f": {why_bypassed(context.rule, is_replay=bool(context.row.replay))}"
    return [(f"It was delivered without checking for duplicates{why}.",)]


def _discarded(context: ArrivalContext) -> list[Words]:
    row, rule = context.row, context.rule
    if not row.rule:
        why = meaning_of(UNROUTED)
    elif rule is not None and rule.guard is not None:
        why = meaning_of("not-allowed")
    else:
        why = "its rule discards such events"
    if row.forwarded:
        return [(f"It would be dropped: {why}.",), *_not_sent(row)]
    return [(f"It was dropped: {why}.",)]


_DESCRIBERS: Final = {
    Verdict.DELIVERED: _delivered,
    Verdict.DUPLICATE: _duplicate,
    Verdict.STALE: _stale,
    Verdict.UNCHANGED: _unchanged,
    Verdict.CONFLICT: _conflict,
    Verdict.BUSY: _busy,
    Verdict.FAILED: _failed,
    Verdict.DEAD: _dead,
    Verdict.BYPASSED: _bypassed,
    Verdict.DISCARDED: _discarded,
}


# --- later arrivals -----------------------------------------------------------------------


def _since(context: ArrivalContext) -> list[Words]:
    """Return how often it arrived again."""
    if not context.after or not is_acknowledged(context.row):
        return []
    if len(context.after) == 1:
        one = context.after[0]
        later = _after(context.row, one)
        return [(f"It arrived again after {later}: {one.verdict}.",)]
    times = format_count(len(context.after), "time")
    return [(f"It arrived again {times}: {_counted(context.after)}.",)]


def _after(row: HistoryRow, later: HistoryRow) -> str:
    """Return the time between two arrivals; workers' clocks may differ."""
    return format_elapsed(max(later.at_ms - row.at_ms, 0)).replace(NB, " ")


def _counted(rows: Sequence[HistoryRow]) -> str:
    counts = Counter(row.verdict for row in rows)
    return ", ".join(f"{count:,} {verdict}" for verdict, count in counts.most_common())
