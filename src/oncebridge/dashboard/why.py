"""
Everything that is known of one arrival or event, for its page.

It comes from the history (this arrival and the others of the same event), the configuration (rule
and keys), the store (record and operator actions) and the dead letters. If one of them does not
answer, the page shows the others.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct

from oncebridge.base.formatting import format_elapsed
from oncebridge.dashboard.arrival_text import (
    ArrivalContext,
    LikelyCause,
    Words,
    death_of,
    describe_arrival,
    is_acknowledged,
    likely_cause,
)
from oncebridge.dashboard.data import DashboardData
from oncebridge.dashboard.store_lookup import (
    FoundDeadLetters,
    explain_stored_key,
    find_dead_letters,
    has_id,
)
from oncebridge.dead_letters.api import DeadLetter
from oncebridge.engine.causes import remembered
from oncebridge.engine.router import UNROUTED
from oncebridge.engine.verdict import Verdict
from oncebridge.errors import StoreError
from oncebridge.events.differences import FieldChange, changes
from oncebridge.events.key import ContentKey, FieldsKey
from oncebridge.events.rules import Rule, Tier
from oncebridge.observe.history import HistoryQuery, HistoryRow, RecordedArrival, SearchResult
from oncebridge.observe.masking import indented
from oncebridge.observe.report import Report
from oncebridge.operate.explain.explanation import KeyExplanation, lasting
from oncebridge.service.config import Route, Setup
from oncebridge.stores.api import Fate

_MOST_ARRIVALS: Final = 60
_MOST_NAMESAKES: Final = 20
_MOST_CHANGES: Final = 100
_DIED_WITHIN_MS: Final = 60_000
_DIES: Final = frozenset({Verdict.DEAD, Verdict.CONFLICT})


class KeyUse(Struct, frozen=True):
    """One key by which a rule identifies duplicates."""

    kind: str
    made_of: tuple[str, ...]
    """The fields of the key; for a content key, the ignored fields."""
    window: str
    is_last: bool
    """True if this is the key that is shown."""


class TimelineEntry(Struct, frozen=True):
    """One arrival on the time line."""

    seen: RecordedArrival
    gap: str
    """Time since the previous arrival."""
    since: str
    """Time since the first."""
    is_this: bool = False
    left_out: int = 0
    """How many arrivals before this one are not shown."""


class EventSummary(Struct, frozen=True, kw_only=True):
    """A logical event: all of its arrivals, its record and its dead letters."""

    key: bytes
    arrivals: tuple[TimelineEntry, ...] = ()
    count: int = 0
    is_complete: bool = True
    """False if there may have been arrivals that were not kept."""
    explanation: KeyExplanation | None = None
    letters: FoundDeadLetters = FoundDeadLetters()
    trouble: str = ""
    """Why the store did not answer."""


class ArrivalComparison(Struct, frozen=True, kw_only=True):
    """The differences between an arrival and the first."""

    envelope: tuple[FieldChange, ...]
    same: tuple[str, ...]
    """Envelope fields that are equal."""
    payload: tuple[FieldChange, ...] | None
    """None if one of the payloads is not kept."""
    more: int = 0
    """How many more differences there are."""


class ArrivalExplanation(Struct, frozen=True, kw_only=True):
    """All that is known of one arrival."""

    seen: RecordedArrival
    sentences: list[Words]
    is_acknowledged: bool
    rule: Rule | None
    """None if it is no longer configured, or there was none."""
    key_uses: tuple[KeyUse, ...]
    likely: LikelyCause | None
    twin: RecordedArrival | None
    """The earlier arrival with the same envelope id, if that is not the first."""
    first: RecordedArrival | None
    """The arrival to compare with, if the history has it."""
    first_id: str
    first_ms: int
    earlier: str
    """Time between the first arrival and this one."""
    comparison: ArrivalComparison | None
    whole: EventSummary
    namesakes: tuple[RecordedArrival, ...]
    """Arrivals with the same envelope id of another event or route."""
    body: str


# --- one arrival --------------------------------------------------------------------------


async def explain_arrival(
    data: DashboardData, seen: RecordedArrival, reports: Sequence[Report]
) -> ArrivalExplanation:
    """Return all that is known of an arrival."""
    row = seen.row
    alike = await _alike(data, seen, reports)
    others, is_complete = await _namesakes(data, row, alike, reports)
    first = await _first(data, seen, alike, others, reports)
    explanation, trouble = await _known(data, row.key)
    rule = rule_of(data.setup, row)
    at = [one.name for one in alike].index(seen.name)
    twin = next((one for one in alike[:at] if row.id and one.row.id == row.id), None)
    likely = likely_cause(row, first.row if first else None, rule, twin=twin.row if twin else None)
    record = explanation.standing.record if explanation and explanation.standing else None
    context = ArrivalContext(
        row=row,
        before=[one.row for one in alike[:at]],
        after=[one.row for one in alike[at + 1 :]],
        is_whole=_is_whole(row, alike, first, is_complete=is_complete),
        rule=rule,
        fate=record.fate if record else None,
        likely=likely,
    )
    first_ms = row.first_ms or (first.row.at_ms if first else 0)
    return ArrivalExplanation(
        seen=seen,
        sentences=describe_arrival(context),
        is_acknowledged=is_acknowledged(row),
        rule=rule,
        key_uses=key_uses(rule),
        likely=likely,
        twin=twin if likely and likely.twin_ms else None,
        first=first,
        first_id=row.first_id or (first.row.id if first else ""),
        first_ms=first_ms,
        earlier=format_elapsed(max(row.at_ms - first_ms, 0)) if first_ms else "",
        comparison=compared(first.row, row) if first else None,
        whole=EventSummary(
            key=row.key,
            arrivals=timeline(alike, seen),
            count=len(alike),
            is_complete=is_complete,
            explanation=explanation,
            letters=await _letters_of(data, row, context.fate),
            trouble=trouble,
        ),
        namesakes=tuple(others[:_MOST_NAMESAKES]),
        body=indented(row.payload) if row.payload else "",
    )


async def _alike(
    data: DashboardData, seen: RecordedArrival, reports: Sequence[Report]
) -> list[RecordedArrival]:
    """Return all arrivals of the same event, including this one, oldest first."""
    found = {seen.name: seen}
    if seen.row.key:
        found |= {one.name: one for one in await data.history.alike(seen.row.key, reports)}
    return sorted(found.values(), key=lambda one: one.place)


async def _namesakes(
    data: DashboardData,
    row: HistoryRow,
    alike: Sequence[RecordedArrival],
    reports: Sequence[Report],
) -> tuple[list[RecordedArrival], bool]:
    """
    Return other arrivals with the same envelope id, newest first.

    The second value is True if the history has all arrivals of that time.
    """
    text = row.id or row.key.hex()
    found = await data.history.search(HistoryQuery(text=text, limit=_MOST_ARRIVALS), reports)
    if not row.id:
        return [], _is_complete(found)
    names = {one.name for one in alike}
    its = [one for one in found.rows if one.row.id == row.id and one.name not in names]
    return its, _is_complete(found)


def _is_complete(found: SearchResult) -> bool:
    return found.is_whole and not (found.left_out or found.lost)


async def _first(
    data: DashboardData,
    seen: RecordedArrival,
    alike: Sequence[RecordedArrival],
    others: Sequence[RecordedArrival],
    reports: Sequence[Report],
) -> RecordedArrival | None:
    """Return the first arrival of this event, or the one that it conflicts with."""
    row = seen.row
    if row.first_ms:
        candidates = [*alike, *others]
        if row.first_id and not any(_is_first_of(one, seen) for one in candidates):
            # A rule with tiers may have known it by another key.
            found = await data.history.search(
                HistoryQuery(text=row.first_id, route=row.route, limit=_MOST_ARRIVALS), reports
            )
            candidates += found.rows
        return next((one for one in candidates if _is_first_of(one, seen)), None)
    if row.verdict == Verdict.CONFLICT:
        earlier = [one for one in others if one.place < seen.place and one.row.route == row.route]
        return min(earlier, key=lambda one: one.place, default=None)
    return alike[0] if alike[0].name != seen.name else None


def _is_first_of(one: RecordedArrival, later: RecordedArrival) -> bool:
    """Return whether *one* is the arrival that the store remembers as the first."""
    row, other = one.row, later.row
    if one.name == later.name or row.route != other.route or row.at_ms != other.first_ms:
        return False
    return remembered(row.id) == remembered(other.first_id)


def _is_whole(
    row: HistoryRow,
    alike: Sequence[RecordedArrival],
    first: RecordedArrival | None,
    *,
    is_complete: bool,
) -> bool:
    """Return whether the history has all arrivals up to this one."""
    if first is None:
        # The store had no record of it before.
        return row.verdict == Verdict.DELIVERED and row.attempt == 1 and not row.unprotected
    return is_complete and alike[0].name == first.name


def rule_of(setup: Setup, row: HistoryRow) -> Rule | None:
    """Return the rule that decided an arrival, as it is configured now."""
    if row.route == UNROUTED:
        return next((rule for rule in setup.rules if rule.name == row.rule), None)
    route = next((route for route in setup.routes if route.name == row.route), None)
    if route is None or not row.rule:
        return None
    return next((rule for rule in route.rules if rule.name == row.rule), _default(route, row.rule))


def _default(route: Route, name: str) -> Rule | None:
    """Return the rule for events that no other rule matches, if *name* is its name."""
    return (
        Rule(name=name, tiers=(Tier(window=route.settings.window),)) if name == "default" else None
    )


def key_uses(rule: Rule | None) -> tuple[KeyUse, ...]:
    """Return the keys by which a rule recognises duplicates, the identifying one first."""
    if rule is None:
        return ()
    ties = [_key_use(tier, is_last=tier is rule.tiers[-1]) for tier in rule.tiers]
    return tuple(reversed(ties))


def _key_use(tier: Tier, *, is_last: bool) -> KeyUse:
    made_of: tuple[str, ...] = ()
    if isinstance(tier.key, FieldsKey):
        made_of = tuple(tier.key.expressions)
    elif isinstance(tier.key, ContentKey):
        made_of = tuple(tier.key.ignore)
    longest = tier.max_window if tier.sliding else None
    return KeyUse(tier.key.kind.decode(), made_of, lasting(tier.window, longest), is_last)


# --- a logical event ----------------------------------------------------------------------


async def explain_event(
    data: DashboardData, key: bytes, reports: Sequence[Report]
) -> EventSummary | None:
    """Return all that is known of a logical event; None if nothing is."""
    alike = sorted(await data.history.alike(key, reports), key=lambda one: one.place)
    found = await data.history.search(HistoryQuery(text=key.hex(), limit=1), reports)
    explanation, trouble = await _known(data, key)
    letters = await find_dead_letters(data, lambda letter: letter.key == key)
    if not (alike or trouble or letters.found or (explanation and explanation.is_known)):
        return None
    return EventSummary(
        key=key,
        arrivals=timeline(alike, None),
        count=len(alike),
        is_complete=_is_complete(found),
        explanation=explanation,
        letters=letters,
        trouble=trouble,
    )


async def _known(data: DashboardData, key: bytes) -> tuple[KeyExplanation | None, str]:
    """Return what the store knows of a key, and why it does not answer."""
    if not key:
        return None, ""
    try:
        return await explain_stored_key(data, key), ""
    except StoreError as error:
        return None, str(error)


async def _letters_of(data: DashboardData, row: HistoryRow, fate: Fate | None) -> FoundDeadLetters:
    """Return the dead letter of an event: by its key, or by its time and reason."""
    if row.key:
        key = row.key
        is_due = row.verdict in _DIES or fate is Fate.DEAD
        return (
            await find_dead_letters(data, lambda letter: letter.key == key)
            if is_due
            else FoundDeadLetters()
        )
    if row.verdict != Verdict.DEAD:
        return FoundDeadLetters()
    settings = data.setup.config.settings()

    def fits(letter: DeadLetter) -> bool:
        is_alike = (
            not letter.key
            and letter.reason == death_of(row)
            and len(letter.raw) == row.size
            and abs(letter.buried_ms - row.at_ms) <= _DIED_WITHIN_MS
        )
        return is_alike and (not row.id or has_id(letter, row.id, settings))

    return await find_dead_letters(data, fits)


def timeline(
    alike: Sequence[RecordedArrival], this: RecordedArrival | None
) -> tuple[TimelineEntry, ...]:
    """Return arrivals oldest first, with the time between them; if there are many, only some."""
    shown = _shown(alike, this)
    if not shown:
        return ()
    began_ms = shown[0][1].row.at_ms
    line = [TimelineEntry(shown[0][1], "", "", is_this=_is(shown[0][1], this))]
    for (before, earlier), (at, seen) in pairwise(shown):
        line.append(
            TimelineEntry(
                seen,
                format_elapsed(max(seen.row.at_ms - earlier.row.at_ms, 0)),
                format_elapsed(max(seen.row.at_ms - began_ms, 0)),
                is_this=_is(seen, this),
                left_out=at - before - 1,
            )
        )
    return tuple(line)


def _is(seen: RecordedArrival, this: RecordedArrival | None) -> bool:
    return this is not None and seen.name == this.name


def _shown(
    alike: Sequence[RecordedArrival], this: RecordedArrival | None
) -> list[tuple[int, RecordedArrival]]:
    """Return the first, the last, and those around *this*, with their indexes."""
    numbered = list(enumerate(alike))
    if len(alike) <= _MOST_ARRIVALS:
        return numbered
    third = _MOST_ARRIVALS // 3
    wanted = {*range(third), *range(len(alike) - third, len(alike))}
    at = next((at for at, seen in numbered if _is(seen, this)), None)
    if at is not None:
        wanted |= set(range(at - third // 2, at + third // 2 + 1))
    return [(at, seen) for at, seen in numbered if at in wanted]


# --- what differs -------------------------------------------------------------------------


def envelope_of(row: HistoryRow) -> dict[str, Any]:
    """Return the envelope fields that the history has, without empty ones."""
    fields = {
        "id": row.id,
        "time": row.time,
        "source": row.source,
        "account": row.account,
        "region": row.region,
        "detail-type": row.detail_type,
        "replay-name": row.replay,
        "size": row.size,
    }
    return {name: value for name, value in fields.items() if value}


def compared(first: HistoryRow, row: HistoryRow) -> ArrivalComparison:
    """Return the differences between an arrival and the first."""
    one, other = envelope_of(first), envelope_of(row)
    differing = changes(one, other, values=True)
    paths = {change.path for change in differing}
    payload: list[FieldChange] | None = None
    then, now = payload_of(first), payload_of(row)
    if then is not None and now is not None:
        payload = [c for c in changes(then, now, values=True) if c.path not in _KEPT]
    return ArrivalComparison(
        envelope=tuple(differing),
        same=tuple(name for name in one if name not in paths),
        payload=None if payload is None else tuple(payload[:_MOST_CHANGES]),
        more=max(len(payload or ()) - _MOST_CHANGES, 0),
    )


_KEPT: Final = frozenset(
    ("id", "time", "source", "account", "region", "detail-type", "replay-name")
)


def shown(value: Any) -> str:
    """Return one value of a comparison as text."""
    if value is UNSET:
        return "(not there)"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def payload_of(row: HistoryRow) -> Any:
    """Return the masked event in the history; None if it was not kept."""
    try:
        return msgspec.json.decode(row.payload) if row.payload else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # anyone with access to the store may have written it
