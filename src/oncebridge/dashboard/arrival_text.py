"""
What became of one arrival, in plain words.

`oncebridge.operate.explain.words` says what would become of an event; here it is said what did, and what
became of its other arrivals, as far as the history has them. Nothing is said that is not known:
where the history may have gaps, nothing is counted.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from oncebridge.base.formatting import NB, format_count, format_elapsed
from oncebridge.dashboard.dead_letters import meaning_of
from oncebridge.engine.causes import MEANINGS, Cause, Sighting, cause_of_repeat, remembered
from oncebridge.engine.router import UNROUTED
from oncebridge.engine.verdict import HANDED_BACK, Verdict
from oncebridge.events.event import REASONS
from oncebridge.events.key import FieldsKey
from oncebridge.events.rules import Rule
from oncebridge.observe.history import Row
from oncebridge.operate.explain.explainer import why_bypassed
from oncebridge.operate.explain.explanation import Explanation
from oncebridge.operate.explain.words import cause as cause_in_words
from oncebridge.operate.explain.words import outcome
from oncebridge.stores.api import Fate


class At(Struct, frozen=True):
    """A moment inside a sentence, for the page to set in the reader's own time."""

    ms: int


Words = tuple[str | At, ...]
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
"""Causes that can be told of one arrival, without its first: by its id, or by the verdict."""
_SENT_BACK: Final = "It was handed back, so its source brings it again."


class Likely(Struct, frozen=True):
    """Why an arrival came again."""

    cause: Cause
    text: str
    is_sure: bool
    counted_as: str = ""
    """What it was taken for when it came, where that was something else."""
    is_of_copy: bool = False
    """It has not the first one's envelope id, but that of a copy in between."""
    twin_ms: int = 0
    """When that copy came, where the history has it."""

    @property
    def words(self) -> Words:
        """Tell it in words."""
        if not self.is_of_copy:
            return (self.text,)
        which: Words = ("an earlier copy",)
        if self.twin_ms:
            which = ("the arrival of ", At(self.twin_ms), ", which repeats the first")
        what, _, why = self.text.partition(": ")
        return (f"{what} as ", *which, f": {why}")


def likely_cause(
    row: Row, first: Row | None, rule: Rule | None, *, twin: Row | None = None
) -> Likely | None:
    """
    Tell the cause of a repeat, and whether that is sure.

    It is where the first arrival is still known, or where one arrival is enough to tell. Else two
    causes may look alike. *twin*: the earliest arrival with the same id, be it not the first.
    """
    if row.cause not in MEANINGS:
        return None
    counted = cause = Cause(row.cause)
    is_sure = cause in _SURE
    if first is not None and row.verdict == Verdict.DUPLICATE:
        cause = cause_of_repeat(_sighting(first), _sighting(row), id_was_seen=twin is not None)
        is_sure = cause is not Cause.UNKNOWN
    told = Explanation(
        line=0,
        action="deduplicate",
        cause=cause,
        is_guess=not is_sure,
        scope=rule.scope if rule else "",
    )
    text = MEANINGS[cause] if is_sure else cause_in_words(told)
    if rule is not None and any(isinstance(tier.key, FieldsKey) for tier in rule.tiers):
        # Such a rule looks at some fields: what else it holds may be another.
        text = text.replace("the same content", "the same key")
    is_of_copy = cause is Cause.REDELIVERY and _has_another_id(row, first)
    return Likely(
        cause,
        text,
        is_sure,
        counted if counted is not cause else "",
        is_of_copy,
        twin.at_ms if twin is not None and is_of_copy else 0,
    )


def _has_another_id(row: Row, first: Row | None) -> bool:
    """Return whether an arrival has not the id of the first, as far as that is known."""
    known = first.id if first is not None else row.first_id
    return bool(row.id and known) and remembered(row.id) != remembered(known)


def _sighting(row: Row) -> Sighting:
    return Sighting(row.id, row.source, row.account, row.region, row.replay)


class Story(Struct, frozen=True, kw_only=True):
    """One arrival, and what is known around it."""

    row: Row
    before: Sequence[Row] = ()
    """Earlier arrivals of the same event that the history has, oldest first."""
    after: Sequence[Row] = ()
    is_whole: bool = False
    """The history has all its arrivals, from the first on."""
    rule: Rule | None = None
    """None where it is not configured any more, or there was none."""
    fate: Fate | None = None
    """How it ended, as the store knows it now."""
    likely: Likely | None = None


def is_acknowledged(row: Row) -> bool:
    """Return whether the source was told that it may forget it."""
    return row.verdict not in HANDED_BACK or row.forwarded


def is_unreadable(row: Row) -> bool:
    """Return whether it was no event at all."""
    return row.verdict == Verdict.DEAD and not row.rule and death_of(row) in REASONS


def death_of(row: Row) -> str:
    """Return the word for why it died."""
    return row.reason.partition(":")[0]


def ordinal(number: int) -> str:
    """Count up: `first`, `second`, … `11th`."""
    if number <= len(_ORDINALS):
        return _ORDINALS[number - 1]
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number:,}{last or 'th'}"


def ended_ms(row: Row) -> int:
    """Return when the verdict was there."""
    return row.at_ms + round(row.took_ms)


def tell(story: Story) -> list[Words]:
    """Tell in a few sentences what became of an arrival, and why."""
    row = story.row
    sentences = _TOLD[Verdict(row.verdict)](story) if row.verdict in _TOLD else []
    if row.unprotected:
        sentences.append(
            ("The store was down: it was sent without a look whether it had been before.",)
        )
    return sentences + _since(story)


# --- what became of it --------------------------------------------------------------------


def _delivered(story: Story) -> list[Words]:
    row, earlier = story.row, _settled(story.before)
    if earlier is not None:
        before: Words = ("It had been delivered before, at ", At(ended_ms(earlier)))
        return [
            ("This event was delivered.",),
            (*before, ": that was over by then, or it was let through by hand."),
        ]
    tries = f", at attempt {row.attempt}" if row.attempt > 1 else ""
    if story.before:
        back = format_count(len(story.before), "earlier arrival")
        was = "was" if len(story.before) == 1 else "were"
        return [(f"This event was delivered{tries}. {back} {was} handed back.",)]
    if story.is_whole:
        return [(f"This was the first arrival of the event, and it was delivered{tries}.",)]
    return [(f"This event was delivered{tries}.",)]


def _duplicate(story: Story) -> list[Words]:
    row = story.row
    which = "This repeats"
    if story.is_whole:
        which = f"This is the {ordinal(len(story.before) + 1)} arrival of"
    why: Words = ("; ", *story.likely.words, ".") if story.likely else (".",)
    return [(f"{which} an event that ", *_how_it_ended(story), *why), *_not_sent(row)]


def _how_it_ended(story: Story) -> Words:
    row, settled = story.row, _settled(story.before)
    if settled is not None and settled.forwarded:
        return ("was delivered at ", At(ended_ms(settled)))
    fate = _FATES.get(Verdict(settled.verdict)) if settled is not None else story.fate
    text = outcome(fate) if fate is not None else "was done with"
    at_ms = settled.at_ms if settled is not None else row.first_ms
    if not at_ms:
        return (text,)
    return ("came first at ", At(at_ms), f" and {text}")


def _settled(rows: Sequence[Row]) -> Row | None:
    """Find the arrival that settled the matter: the first that was delivered, or else ended."""
    ended = [row for row in rows if row.verdict in _FATES or row.verdict == Verdict.CONFLICT]
    return next((row for row in ended if row.forwarded), ended[0] if ended else None)


def _stale(story: Story) -> list[Words]:
    text = "A newer state of the same entity had been delivered when this one came"
    return [(f"{text}, so it is stale.",), *_not_sent(story.row)]


def _unchanged(story: Story) -> list[Words]:
    text = "The same state of the same entity had been delivered just before this one came"
    return [(f"{text}, so it is noise.",), *_not_sent(story.row)]


def _not_sent(row: Row) -> list[Words]:
    if row.forwarded:
        return [(f"It was passed on all the same: route {row.route} is in shadow mode.",)]
    return [("It was not passed on.",)]


def _conflict(story: Story) -> list[Words]:
    row = story.row
    is_by_id = story.likely is not None and story.likely.cause is Cause.ID_REUSED
    what = "envelope id" if is_by_id else "key"
    first: Words = (f"Another event has the same {what}, with other content.",)
    if row.forwarded:
        return [first, ("This one was passed on as an event of its own.",)]
    if row.reason:
        return [first, ("This one went to the dead letters.",)]
    return [first, ("The rule says to drop such events, so this one was dropped.",)]


def _busy(story: Story) -> list[Words]:
    why = story.row.reason or "another worker held it at that moment"
    return [(f"It could not be taken: {why}.",), *_handed_back(story)]


def _failed(story: Story) -> list[Words]:
    row = story.row
    why = row.reason or "the reason was not told"
    if row.forwarded:
        return [(f"The sink took it, and what was to follow failed: {why}.",)]
    return [(f"It was not delivered: {why}.",), *_handed_back(story)]


def _handed_back(story: Story) -> list[Words]:
    """Say what happened next."""
    if story.row.forwarded:
        return _not_sent(story.row)
    if not story.row.key:
        return [(_SENT_BACK,)]
    settled = _settled(story.after)
    if settled is not None:
        later = _after(story.row, settled)
        how = f"was {settled.verdict}"
        if settled.verdict in _FATES:
            how = outcome(_FATES[Verdict(settled.verdict)])
        return [(f"It was handed back, came again after {later} and {how}.",)]
    if story.after:
        times = format_count(len(story.after), "time")
        return [(f"It was handed back, came again {times}, and is not through yet.",)]
    return [(f"{_SENT_BACK} As far as the history goes, it has not come again yet.",)]


def _dead(story: Story) -> list[Words]:
    row = story.row
    word, _, message = row.reason.partition(": ")
    why = meaning_of(word) or word
    if message and message != why:
        why = f"{why} ({message})"
    what = "This is no event" if is_unreadable(row) else "This event went to the dead letters"
    kept = " It is kept whole in the dead letters." if is_unreadable(row) else ""
    return [(f"{what}: {why}.{kept}" if why else f"{what}.{kept}",)]


def _bypassed(story: Story) -> list[Words]:
    why = ""
    if story.rule is not None:
        why = f": {why_bypassed(story.rule, is_replay=bool(story.row.replay))}"
    return [(f"It was passed on without a look whether it had been before{why}.",)]


def _discarded(story: Story) -> list[Words]:
    row, rule = story.row, story.rule
    if not row.rule:
        why = meaning_of(UNROUTED)
    elif rule is not None and rule.guard is not None:
        why = meaning_of("not-allowed")
    else:
        why = "the rule says to discard such events"
    if row.forwarded:
        return [(f"It would be dropped: {why}.",), *_not_sent(row)]
    return [(f"It was dropped: {why}.",)]


_TOLD: Final = {
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


# --- and since then -----------------------------------------------------------------------


def _since(story: Story) -> list[Words]:
    """Say how often it came again."""
    if not story.after or not is_acknowledged(story.row):
        return []
    if len(story.after) == 1:
        one = story.after[0]
        later = _after(story.row, one)
        return [(f"It came again after {later}: {one.verdict}.",)]
    times = format_count(len(story.after), "time")
    return [(f"It came again {times}: {_counted(story.after)}.",)]


def _after(row: Row, later: Row) -> str:
    """Return how long after an arrival another came; workers' clocks may differ."""
    return format_elapsed(max(later.at_ms - row.at_ms, 0)).replace(NB, " ")


def _counted(rows: Sequence[Row]) -> str:
    counts = Counter(row.verdict for row in rows)
    return ", ".join(f"{count:,} {verdict}" for verdict, count in counts.most_common())
