"""
Try events against the rules: what would become of each now, and which of them are the same.

The text is read as `oncebridge explain` reads a file, wrappings of queues and topics included.
Nothing is claimed and nothing changed; the text is neither stored nor logged. It is read beside
the loop, and what is told of it is bounded.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.dashboard.background_work import beside
from oncebridge.dashboard.mismatches import Misfits, Passed, cut, shown
from oncebridge.engine.verdict import First
from oncebridge.errors import OncebridgeError
from oncebridge.events.canonical import decode_canonical
from oncebridge.events.differences import FieldChange, differences
from oncebridge.events.event import Event, Unreadable
from oncebridge.events.framing import BadGzip, RawRecord, RecordReader
from oncebridge.events.key import compile_field
from oncebridge.events.pattern import Pattern
from oncebridge.events.rules import Rule
from oncebridge.operate.explain.explainer import explain
from oncebridge.operate.explain.explanation import Explanation, window
from oncebridge.operate.explain.words import cause, summary
from oncebridge.operate.identity import EventKey, Identities, RouteIdentity
from oncebridge.operate.lookup import events_in
from oncebridge.service.config import Setup
from oncebridge.service.monitor import mask_of
from oncebridge.stores.api import Store

MOST_BYTES: Final = 2 * 1024 * 1024
MOST_EVENTS: Final = 50
_MOST_DIFFERENCES: Final = 20
_MOST_CANONICAL: Final = 20_000
_MOST_CANONICAL_IN_ALL: Final = 150_000
_CHUNK: Final = 32 * 1024
"""A chunk may be all line ends, and is taken apart in one go."""


class KeyTried(Struct, frozen=True):
    """One key of an event."""

    kind: str
    hex: str
    window: str
    canonical: str
    """What is hashed, or its beginning."""
    left_out: int
    """How many characters follow."""
    instead: bool


class Way(Struct, frozen=True, kw_only=True):
    """What one route makes of an event."""

    route: str
    rule: str
    action: str
    why: str
    summary: str
    keys: tuple[KeyTried, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    """Entity, version and state: by which expression, and what it finds."""
    verdict: str = ""
    verdict_why: str = ""
    is_watched: bool = False
    first_id: str = ""
    first_ms: int = 0
    cause: str = ""
    cause_words: str = ""
    passed: tuple[Passed, ...] = ()
    """The rules before it, which are not for the event."""
    more_passed: int = 0
    """How many further ones there are."""
    same_as: int | None = None
    """The number of an event above that it has a key of."""
    clashes: bool = False
    differs_from: int | None = None
    """Where it is not the same: the number of the event it is compared with."""
    differences: tuple[str, ...] = ()
    more_differences: int = 0


class Tried(Struct, frozen=True, kw_only=True):
    """One event."""

    number: int
    size: int
    id: str = ""
    source: str = ""
    detail_type: str = ""
    reason: str = ""
    """One word, where it is no event."""
    why: str = ""
    summary: str = ""
    ways: tuple[Way, ...] = ()
    passed: tuple[Passed, ...] = ()
    """The routes that are not for it."""
    more_passed: int = 0


class Result(Struct, frozen=True):
    """All that came of a text."""

    events: tuple[Tried, ...] = ()
    more: bool = False
    """There are more events in it, which were not looked at."""
    refused: str = ""
    """Why it was not read at all."""
    trouble: str = ""
    """Why there are no verdicts."""


async def try_out(text: str, setup: Setup, store: Store) -> Result:
    """Return what would become of the events in *text*."""
    return await beside(store, lambda far: _tried_out(text, setup, far))


async def _tried_out(text: str, setup: Setup, store: Store) -> Result:
    raw = text.encode("utf-8", "surrogatepass")
    if len(raw) > MOST_BYTES:
        return Result(refused=f"it has {len(raw):,} bytes, and at most {MOST_BYTES:,} are read")
    if not raw.strip():
        return Result(refused="there is nothing in it: paste an event")
    trial = _Trial(setup)
    try:
        found = list(islice(trial.events(raw), MOST_EVENTS + 1))
    except BadGzip as error:
        return Result(refused=str(error))
    if not found:
        return Result(refused="there is no event in it")
    events, trouble = await trial.run(found[:MOST_EVENTS], store)
    return Result(tuple(events), len(found) > MOST_EVENTS, trouble=trouble)


class _Trial:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._settings = setup.config.settings()
        self._identities = Identities(setup)
        self._hides_id = mask_of(setup.config).hides("id")
        self._misfits = Misfits()
        self._room = _MOST_CANONICAL_IN_ALL

    def events(self, raw: bytes) -> Iterator[Event | Unreadable]:
        """Take a text apart, and what is in it out of its wrappings."""
        for record in RecordReader(io.BytesIO(raw), chunk=_CHUNK):
            yield from events_in(record, self._settings)

    async def run(
        self, found: Sequence[Event | Unreadable], store: Store
    ) -> tuple[list[Tried], str]:
        """Explain what was found; without a store that answers, all but the verdicts."""
        # Each on a line of its own, so that one is told from the other.
        lines = [RawRecord(one.raw, at, at, at) for at, one in enumerate(found, 1)]
        trouble = ""
        try:
            told = await self._explained(lines, store)
        except OncebridgeError as error:
            trouble = str(error)
        except TimeoutError:
            trouble = "it did not answer in time"
        if trouble:
            told = await self._explained(lines, None)
        return self._tried(found, told), trouble

    async def _explained(
        self, lines: Sequence[RawRecord], store: Store | None
    ) -> dict[int, list[Explanation]]:
        by_line: dict[int, list[Explanation]] = {}
        async for one in explain(lines, self._setup, store, values=True):
            by_line.setdefault(one.line, []).append(self._blanked(one))
        return by_line

    def _blanked(self, told: Explanation) -> Explanation:
        """Leave out what `mask` hides of an event that is not in the text: the first one's id."""
        judged = told.judged
        if not self._hides_id or judged is None or judged.first is None:
            return told
        first = First(None, judged.first.arrived_ms)
        return replace(told, judged=replace(judged, first=first))

    def _tried(
        self, found: Sequence[Event | Unreadable], told: Mapping[int, Sequence[Explanation]]
    ) -> list[Tried]:
        above: dict[str, tuple[int, Event, RouteIdentity]] = {}
        tried = []
        for number, one in enumerate(found, 1):
            if isinstance(one, Unreadable):
                tried.append(
                    Tried(number=number, size=len(one.raw), reason=one.reason, why=one.message)
                )
                continue
            mine = {each.route: each for each in told.get(number, ())}
            ways = []
            for way in self._identities.of(one):
                name = way.route.name
                first = above.setdefault(name, (number, one, way))
                if name in mine:
                    ways.append(self._way(one, way, mine[name], first))
            taken = {way.route for way in ways}
            others = [route for route in self._setup.routes if route.name not in taken]
            passed, more = self._misfits.of(one, [(r.name, r.match, None) for r in others])
            tried.append(
                Tried(
                    number=number,
                    size=len(one.raw),
                    id=one.id or "",
                    source=one.source,
                    detail_type=one.detail_type,
                    summary=_words(mine[None]) if None in mine else "",
                    ways=tuple(ways),
                    passed=passed,
                    more_passed=more,
                )
            )
        return tried

    def _way(
        self,
        event: Event,
        way: RouteIdentity,
        told: Explanation,
        first: tuple[int, Event, RouteIdentity],
    ) -> Way:
        judged = told.judged
        passed, more = self._misfits.of(event, _rules_before(way))
        number, then, its = first
        differing: list[str] = []
        is_compared = told.same_as is None and then is not event
        if is_compared:
            differing = _differing(then, its, event, way)
        elif told.changes:
            differing = [_change(change) for change in told.changes]
        return Way(
            route=way.route.name,
            rule=way.plan.rule.name,
            action=told.action,
            why=told.why,
            summary=_words(told),
            keys=tuple(self._key(known) for known in way.keys),
            facts=_facts(way, event),
            verdict=judged.verdict.value if judged else "",
            verdict_why=judged.why if judged else "",
            is_watched=judged.is_watched if judged else False,
            first_id=(judged.first.id or "") if judged and judged.first else "",
            first_ms=judged.first.arrived_ms if judged and judged.first else 0,
            cause=told.cause.value if told.cause else "",
            cause_words=cause(told),
            passed=passed,
            more_passed=more,
            same_as=told.same_as,
            clashes=told.clashes,
            differs_from=number if is_compared else None,
            differences=tuple(differing[:_MOST_DIFFERENCES]),
            more_differences=max(len(differing) - _MOST_DIFFERENCES, 0),
        )

    def _key(self, known: EventKey) -> KeyTried:
        canonical = known.canonical
        told = canonical[: min(_MOST_CANONICAL, self._room)]
        self._room -= len(told)
        return KeyTried(
            known.kind,
            known.key.hex(),
            window(known),
            told,
            len(canonical) - len(told),
            known.instead,
        )


def _rules_before(way: RouteIdentity) -> Iterator[tuple[str, Pattern | None, Rule | None]]:
    """List the rules that were tried before the one that decides."""
    for rule in way.route.rules:
        if rule.name == way.plan.rule.name:
            return
        if rule.guard is None:
            yield rule.name, rule.match, rule


def _words(told: Explanation) -> str:
    """Tell it in sentences; here events have numbers, and no lines."""
    return summary(told).replace("the one on line ", "event ")


def _facts(way: RouteIdentity, event: Event) -> tuple[tuple[str, str], ...]:
    """Return what entity, version and state an event has, and by which expression."""
    rule = way.plan.rule
    parts = {
        "entity": next((part.entity for part in (rule.latest, rule.quiet) if part), rule.entity),
        "version": rule.latest.version if rule.latest else None,
        "state": rule.quiet.state if rule.quiet else None,
    }
    return tuple(
        (name, f"{expression} = {shown(compile_field(expression)(event))}")
        for name, expression in parts.items()
        if expression
    )


# --- what differs -------------------------------------------------------------------------


def _differing(one: Event, its: RouteIdentity, other: Event, way: RouteIdentity) -> list[str]:
    """Return why two events are not the same: which of what counts is not equal."""
    if its.plan.rule.name != way.plan.rule.name:
        return [f"another rule decides: {its.plan.rule.name} there, {way.plan.rule.name} here"]
    if not its.keys or not way.keys:
        return ["an event without a key is like no other"]
    found = []
    for name in ("source", "detail_type"):
        was, now = getattr(one, name), getattr(other, name)
        if was != now:
            found.append(f"{name.replace('_', '-')}: {shown(was)} → {shown(now)}")
    first, second = its.keys[-1], way.keys[-1]
    if first.kind != second.kind:
        return [*found, f"known by its {second.kind}, and the other by its {first.kind}"]
    if first.kind == "content":
        return found + _inside(first.canonical, second.canonical)
    pairs = [(name, first.values.get(name, ""), value) for name, value in second.values.items()]
    return found + [f"{name}: {cut(was)} → {cut(now)}" for name, was, now in pairs if was != now]


def _inside(one: str, other: str) -> list[str]:
    """Name the places where two canonical details differ."""
    try:
        return differences(decode_canonical(one), decode_canonical(other), "detail")
    except (ValueError, RecursionError):
        return ["detail"]


def _change(change: FieldChange) -> str:
    return f"{change.path}: {shown(change.was)} → {shown(change.is_)}"
