"""
Why an arrival was treated so: all that is known of it, put together for a page.

It comes out of four places: the history (this arrival, and the others of the same event), the
configuration (rule and keys), the store (what it knows by now, and what was done by hand), and
the dead letters. Each may be without an answer; the others are told all the same.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct

from oncebridge.base.formatting import format_elapsed
from oncebridge.dashboard.arrival_text import (
    Likely,
    Story,
    Words,
    death_of,
    is_acknowledged,
    likely_cause,
    tell,
)
from oncebridge.dashboard.data import Desk
from oncebridge.dashboard.store_lookup import Letters, has_id, known, letters_that
from oncebridge.dead_letters.api import DeadLetter
from oncebridge.engine.causes import remembered
from oncebridge.engine.router import UNROUTED
from oncebridge.engine.verdict import Verdict
from oncebridge.errors import StoreError
from oncebridge.events.differences import FieldChange, changes
from oncebridge.events.key import ContentKey, FieldsKey
from oncebridge.events.rules import Rule, Tier
from oncebridge.observe.history import Found, Query, Row, Seen
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


class Tie(Struct, frozen=True):
    """One way in which a rule knows an event again."""

    kind: str
    made_of: tuple[str, ...]
    """The fields that it is made of; of the content, what does not count."""
    window: str
    is_last: bool
    """It identifies the event: the key that is shown is made by it."""


class Arrival(Struct, frozen=True):
    """One arrival on the time line."""

    seen: Seen
    gap: str
    """How long after the one before it."""
    since: str
    """How long after the first."""
    is_this: bool = False
    left_out: int = 0
    """How many there are between the one before it and this one, that are not shown."""


class Whole(Struct, frozen=True, kw_only=True):
    """A logical event: all of its arrivals, and what is known of it by now."""

    key: bytes
    arrivals: tuple[Arrival, ...] = ()
    count: int = 0
    is_complete: bool = True
    """False where there may have been arrivals that were not kept."""
    told: KeyExplanation | None = None
    letters: Letters = Letters()
    trouble: str = ""
    """Why the store could not be asked."""


class Comparison(Struct, frozen=True, kw_only=True):
    """How an arrival differs from the first."""

    envelope: tuple[FieldChange, ...]
    same: tuple[str, ...]
    """The fields of the envelope in which they agree."""
    payload: tuple[FieldChange, ...] | None
    """None where one of the two payloads is not kept."""
    more: int = 0
    """How many further places there are."""


class Why(Struct, frozen=True, kw_only=True):
    """All there is to tell of one arrival."""

    seen: Seen
    sentences: list[Words]
    is_acknowledged: bool
    rule: Rule | None
    """None where it is not configured any more, or there was none."""
    ties: tuple[Tie, ...]
    likely: Likely | None
    twin: Seen | None
    """The earlier copy whose envelope id it has, where that is not the first arrival."""
    first: Seen | None
    """The arrival to compare with, where the history has it."""
    first_id: str
    first_ms: int
    earlier: str
    """How long before this one the first came."""
    comparison: Comparison | None
    whole: Whole
    namesakes: tuple[Seen, ...]
    """Arrivals with the same envelope id that are another event, or another route's."""
    body: str


# --- one arrival --------------------------------------------------------------------------


async def explain_arrival(desk: Desk, seen: Seen, reports: Sequence[Report]) -> Why:
    """Find out all there is to tell of an arrival."""
    row = seen.row
    alike = await _alike(desk, seen, reports)
    others, is_complete = await _namesakes(desk, row, alike, reports)
    first = await _first(desk, seen, alike, others, reports)
    told, trouble = await _known(desk, row.key)
    rule = rule_of(desk.setup, row)
    at = [one.name for one in alike].index(seen.name)
    twin = next((one for one in alike[:at] if row.id and one.row.id == row.id), None)
    likely = likely_cause(row, first.row if first else None, rule, twin=twin.row if twin else None)
    record = told.standing.record if told and told.standing else None
    story = Story(
        row=row,
        before=[one.row for one in alike[:at]],
        after=[one.row for one in alike[at + 1 :]],
        is_whole=_is_whole(row, alike, first, is_complete=is_complete),
        rule=rule,
        fate=record.fate if record else None,
        likely=likely,
    )
    first_ms = row.first_ms or (first.row.at_ms if first else 0)
    return Why(
        seen=seen,
        sentences=tell(story),
        is_acknowledged=is_acknowledged(row),
        rule=rule,
        ties=ties_of(rule),
        likely=likely,
        twin=twin if likely and likely.twin_ms else None,
        first=first,
        first_id=row.first_id or (first.row.id if first else ""),
        first_ms=first_ms,
        earlier=format_elapsed(max(row.at_ms - first_ms, 0)) if first_ms else "",
        comparison=compared(first.row, row) if first else None,
        whole=Whole(
            key=row.key,
            arrivals=time_line(alike, seen),
            count=len(alike),
            is_complete=is_complete,
            told=told,
            letters=await _letters_of(desk, row, story.fate),
            trouble=trouble,
        ),
        namesakes=tuple(others[:_MOST_NAMESAKES]),
        body=indented(row.payload) if row.payload else "",
    )


async def _alike(desk: Desk, seen: Seen, reports: Sequence[Report]) -> list[Seen]:
    """Find all arrivals of the same event, this one among them, oldest first."""
    found = {seen.name: seen}
    if seen.row.key:
        found |= {one.name: one for one in await desk.archive.alike(seen.row.key, reports)}
    return sorted(found.values(), key=lambda one: one.place)


async def _namesakes(
    desk: Desk, row: Row, alike: Sequence[Seen], reports: Sequence[Report]
) -> tuple[list[Seen], bool]:
    """
    Find what else came under the same envelope id, newest first.

    Tells too whether the history has all arrivals of its time.
    """
    text = row.id or row.key.hex()
    found = await desk.archive.search(Query(text=text, limit=_MOST_ARRIVALS), reports)
    if not row.id:
        return [], _is_complete(found)
    names = {one.name for one in alike}
    its = [one for one in found.rows if one.row.id == row.id and one.name not in names]
    return its, _is_complete(found)


def _is_complete(found: Found) -> bool:
    return found.is_whole and not (found.left_out or found.lost)


async def _first(
    desk: Desk,
    seen: Seen,
    alike: Sequence[Seen],
    others: Sequence[Seen],
    reports: Sequence[Report],
) -> Seen | None:
    """Find the arrival that this one repeats, or clashes with."""
    row = seen.row
    if row.first_ms:
        candidates = [*alike, *others]
        if row.first_id and not any(_is_first_of(one, seen) for one in candidates):
            # A rule with tiers may have known it by another key.
            found = await desk.archive.search(
                Query(text=row.first_id, route=row.route, limit=_MOST_ARRIVALS), reports
            )
            candidates += found.rows
        return next((one for one in candidates if _is_first_of(one, seen)), None)
    if row.verdict == Verdict.CONFLICT:
        earlier = [one for one in others if one.place < seen.place and one.row.route == row.route]
        return min(earlier, key=lambda one: one.place, default=None)
    return alike[0] if alike[0].name != seen.name else None


def _is_first_of(one: Seen, later: Seen) -> bool:
    """Return whether *one* is the arrival that the store remembers as the first."""
    row, other = one.row, later.row
    if one.name == later.name or row.route != other.route or row.at_ms != other.first_ms:
        return False
    return remembered(row.id) == remembered(other.first_id)


def _is_whole(row: Row, alike: Sequence[Seen], first: Seen | None, *, is_complete: bool) -> bool:
    """Return whether the history has all arrivals up to this one."""
    if first is None:
        # The store had never heard of it before.
        return row.verdict == Verdict.DELIVERED and row.attempt == 1 and not row.unprotected
    return is_complete and alike[0].name == first.name


def rule_of(setup: Setup, row: Row) -> Rule | None:
    """Find the rule by which an arrival was judged, as it is configured now."""
    if row.route == UNROUTED:
        return next((rule for rule in setup.rules if rule.name == row.rule), None)
    route = next((route for route in setup.routes if route.name == row.route), None)
    if route is None or not row.rule:
        return None
    return next((rule for rule in route.rules if rule.name == row.rule), _default(route, row.rule))


def _default(route: Route, name: str) -> Rule | None:
    """Make the rule for what no other rule matches, where that is meant."""
    return (
        Rule(name=name, tiers=(Tier(window=route.settings.window),)) if name == "default" else None
    )


def ties_of(rule: Rule | None) -> tuple[Tie, ...]:
    """Tell by what a rule knows events again, the identifying one first."""
    if rule is None:
        return ()
    ties = [_tie(tier, is_last=tier is rule.tiers[-1]) for tier in rule.tiers]
    return tuple(reversed(ties))


def _tie(tier: Tier, *, is_last: bool) -> Tie:
    made_of: tuple[str, ...] = ()
    if isinstance(tier.key, FieldsKey):
        made_of = tuple(tier.key.expressions)
    elif isinstance(tier.key, ContentKey):
        made_of = tuple(tier.key.ignore)
    longest = tier.max_window if tier.sliding else None
    return Tie(tier.key.kind.decode(), made_of, lasting(tier.window, longest), is_last)


# --- a logical event ----------------------------------------------------------------------


async def explain_event(desk: Desk, key: bytes, reports: Sequence[Report]) -> Whole | None:
    """Find out all there is to tell of a logical event; None where nothing is known of it."""
    alike = sorted(await desk.archive.alike(key, reports), key=lambda one: one.place)
    found = await desk.archive.search(Query(text=key.hex(), limit=1), reports)
    told, trouble = await _known(desk, key)
    letters = await letters_that(desk, lambda letter: letter.key == key)
    if not (alike or trouble or letters.found or (told and told.is_known)):
        return None
    return Whole(
        key=key,
        arrivals=time_line(alike, None),
        count=len(alike),
        is_complete=_is_complete(found),
        told=told,
        letters=letters,
        trouble=trouble,
    )


async def _known(desk: Desk, key: bytes) -> tuple[KeyExplanation | None, str]:
    """Ask the store what it knows by now, or tell why it does not answer."""
    if not key:
        return None, ""
    try:
        return await known(desk, key), ""
    except StoreError as error:
        return None, str(error)


async def _letters_of(desk: Desk, row: Row, fate: Fate | None) -> Letters:
    """Find the dead letter of an event: by its key, or else by when and how it died."""
    if row.key:
        key = row.key
        is_due = row.verdict in _DIES or fate is Fate.DEAD
        return await letters_that(desk, lambda letter: letter.key == key) if is_due else Letters()
    if row.verdict != Verdict.DEAD:
        return Letters()
    settings = desk.setup.config.settings()

    def fits(letter: DeadLetter) -> bool:
        is_alike = (
            not letter.key
            and letter.reason == death_of(row)
            and len(letter.raw) == row.size
            and abs(letter.buried_ms - row.at_ms) <= _DIED_WITHIN_MS
        )
        return is_alike and (not row.id or has_id(letter, row.id, settings))

    return await letters_that(desk, fits)


def time_line(alike: Sequence[Seen], this: Seen | None) -> tuple[Arrival, ...]:
    """Set arrivals on a line, oldest first, with the gaps between them; of many, some are left out."""
    shown = _shown(alike, this)
    if not shown:
        return ()
    began_ms = shown[0][1].row.at_ms
    line = [Arrival(shown[0][1], "", "", is_this=_is(shown[0][1], this))]
    for (before, earlier), (at, seen) in pairwise(shown):
        line.append(
            Arrival(
                seen,
                format_elapsed(max(seen.row.at_ms - earlier.row.at_ms, 0)),
                format_elapsed(max(seen.row.at_ms - began_ms, 0)),
                is_this=_is(seen, this),
                left_out=at - before - 1,
            )
        )
    return tuple(line)


def _is(seen: Seen, this: Seen | None) -> bool:
    return this is not None and seen.name == this.name


def _shown(alike: Sequence[Seen], this: Seen | None) -> list[tuple[int, Seen]]:
    """Choose the first ones, the last ones, and those around *this*, with their places."""
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


def envelope_of(row: Row) -> dict[str, Any]:
    """Return what the history keeps of an envelope, whatever else is kept; what is empty is not there."""
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


def compared(first: Row, row: Row) -> Comparison:
    """Return how an arrival differs from the first."""
    one, other = envelope_of(first), envelope_of(row)
    differing = changes(one, other, values=True)
    paths = {change.path for change in differing}
    payload: list[FieldChange] | None = None
    then, now = payload_of(first), payload_of(row)
    if then is not None and now is not None:
        payload = [c for c in changes(then, now, values=True) if c.path not in _KEPT]
    return Comparison(
        envelope=tuple(differing),
        same=tuple(name for name in one if name not in paths),
        payload=None if payload is None else tuple(payload[:_MOST_CHANGES]),
        more=max(len(payload or ()) - _MOST_CHANGES, 0),
    )


_KEPT: Final = frozenset(
    ("id", "time", "source", "account", "region", "detail-type", "replay-name")
)


def shown(value: Any) -> str:
    """Write one value of a comparison."""
    if value is UNSET:
        return "(not there)"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def payload_of(row: Row) -> Any:
    """Read the masked event that the history has; None where it has none."""
    try:
        return msgspec.json.decode(row.payload) if row.payload else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # whoever reaches the store may have written it
