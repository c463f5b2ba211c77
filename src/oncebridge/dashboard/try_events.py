"""
Tries events against the rules: the verdict each would get now, and which are duplicates.

The text is read like a file of `oncebridge explain`, including envelopes of queues and topics.
Nothing is claimed or changed; the text is neither stored nor logged. It is parsed in a thread, and
the result is limited in size.
"""

import asyncio
import io
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.dashboard.mismatches import MismatchFinder, NotMatched, cut, shown
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
from oncebridge.stores.api import Record, Store

_T = TypeVar("_T")

MOST_BYTES: Final = 2 * 1024 * 1024
MOST_EVENTS: Final = 50
_MOST_DIFFERENCES: Final = 20
_MOST_CANONICAL: Final = 20_000
_MOST_CANONICAL_IN_ALL: Final = 150_000
_CHUNK: Final = 32 * 1024
"""A chunk may consist of line ends only, and is split at once."""
_ANSWER_S: Final = 10.0


class KeyTrial(Struct, frozen=True):
    """One key of an event."""

    kind: str
    hex: str
    window: str
    canonical: str
    """The hashed text, or its beginning."""
    left_out: int
    """How many more characters there are."""
    instead: bool


class RouteTrial(Struct, frozen=True, kw_only=True):
    """The result of one event on one route."""

    route: str
    rule: str
    action: str
    why: str
    summary: str
    keys: tuple[KeyTrial, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    """Entity, version and state: expression and value."""
    verdict: str = ""
    verdict_why: str = ""
    is_shadow: bool = False
    first_id: str = ""
    first_ms: int = 0
    cause: str = ""
    cause_words: str = ""
    passed: tuple[NotMatched, ...] = ()
    """Earlier rules that do not match."""
    more_passed: int = 0
    """How many more there are."""
    same_as: int | None = None
    """The number of an earlier event with the same key."""
    clashes: bool = False
    differs_from: int | None = None
    """If it is different: the number of the event it is compared with."""
    differences: tuple[str, ...] = ()
    more_differences: int = 0


class EventTrial(Struct, frozen=True, kw_only=True):
    """One event."""

    number: int
    size: int
    id: str = ""
    source: str = ""
    detail_type: str = ""
    reason: str = ""
    """One word, if it is not an event."""
    why: str = ""
    summary: str = ""
    ways: tuple[RouteTrial, ...] = ()
    passed: tuple[NotMatched, ...] = ()
    """Routes that do not match."""
    more_passed: int = 0


class TrialResult(Struct, frozen=True):
    """The results of a text."""

    events: tuple[EventTrial, ...] = ()
    more: bool = False
    """True if there are more events, which were not tried."""
    refused: str = ""
    """Why the text was not read."""
    trouble: str = ""
    """Why there are no verdicts."""


async def try_events(text: str, setup: Setup, store: Store) -> TrialResult:
    """Return the results of the events in *text*."""
    # The work runs in a thread with an event loop of its own, so that it does not delay events.
    far = cast("Store", _OtherLoopStore(store, asyncio.get_running_loop()))
    return await asyncio.to_thread(lambda: asyncio.run(_tried_out(text, setup, far)))


class _OtherLoopStore:
    """The read methods of a store that belongs to another event loop; they raise `TimeoutError`."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._loop = loop

    async def now_ms(self) -> int:
        return await self._asked(self._store.now_ms)

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        return await self._asked(lambda: self._store.peek(keys))

    async def _asked(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        async def asked() -> _T:
            return await ask()

        answer = asyncio.run_coroutine_threadsafe(asked(), self._loop)
        async with asyncio.timeout(_ANSWER_S):
            return await asyncio.wrap_future(answer)


async def _tried_out(text: str, setup: Setup, store: Store) -> TrialResult:
    raw = text.encode("utf-8", "surrogatepass")
    if len(raw) > MOST_BYTES:
        return TrialResult(refused=f"it has {len(raw):,} bytes, the limit is {MOST_BYTES:,}")
    if not raw.strip():
        return TrialResult(refused="the text is empty; paste an event")
    trial = _Trial(setup)
    try:
        found = list(islice(trial.events(raw), MOST_EVENTS + 1))
    except BadGzip as error:
        return TrialResult(refused=str(error))
    if not found:
        return TrialResult(refused="it contains no event")
    events, trouble = await trial.run(found[:MOST_EVENTS], store)
    return TrialResult(tuple(events), len(found) > MOST_EVENTS, trouble=trouble)


class _Trial:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._settings = setup.config.settings()
        self._identities = Identities(setup)
        self._hides_id = mask_of(setup.config).hides("id")
        self._mismatches = MismatchFinder()
        self._room = _MOST_CANONICAL_IN_ALL

    def events(self, raw: bytes) -> Iterator[Event | Unreadable]:
        """Yield the events in a text, without their envelopes."""
        for record in RecordReader(io.BytesIO(raw), chunk=_CHUNK):
            yield from events_in(record, self._settings)

    async def run(
        self, found: Sequence[Event | Unreadable], store: Store
    ) -> tuple[list[EventTrial], str]:
        """Explain the events; without verdicts if the store does not answer."""
        # One line each, so that results can be assigned.
        lines = [RawRecord(one.raw, at, at, at) for at, one in enumerate(found, 1)]
        trouble = ""
        try:
            explanations = await self._explained(lines, store)
        except OncebridgeError as error:
            trouble = str(error)
        except TimeoutError:
            trouble = "the store did not answer in time"
        if trouble:
            explanations = await self._explained(lines, None)
        return self._tried(found, explanations), trouble

    async def _explained(
        self, lines: Sequence[RawRecord], store: Store | None
    ) -> dict[int, list[Explanation]]:
        by_line: dict[int, list[Explanation]] = {}
        async for one in explain(lines, self._setup, store, values=True):
            by_line.setdefault(one.line, []).append(self._blanked(one))
        return by_line

    def _blanked(self, explanation: Explanation) -> Explanation:
        """Remove the first arrival's id, which is not in the text, if `mask` hides it."""
        judged = explanation.judged
        if not self._hides_id or judged is None or judged.first is None:
            return explanation
        first = First(None, judged.first.arrived_ms)
        return replace(explanation, judged=replace(judged, first=first))

    def _tried(
        self, found: Sequence[Event | Unreadable], explanations: Mapping[int, Sequence[Explanation]]
    ) -> list[EventTrial]:
        above: dict[str, tuple[int, Event, RouteIdentity]] = {}
        tried = []
        for number, one in enumerate(found, 1):
            if isinstance(one, Unreadable):
                tried.append(
                    EventTrial(number=number, size=len(one.raw), reason=one.reason, why=one.message)
                )
                continue
            mine = {each.route: each for each in explanations.get(number, ())}
            ways = []
            for way in self._identities.of(one):
                name = way.route.name
                first = above.setdefault(name, (number, one, way))
                if name in mine:
                    ways.append(self._way(one, way, mine[name], first))
            taken = {way.route for way in ways}
            others = [route for route in self._setup.routes if route.name not in taken]
            passed, more = self._mismatches.of(one, [(r.name, r.match, None) for r in others])
            tried.append(
                EventTrial(
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
        explanation: Explanation,
        first: tuple[int, Event, RouteIdentity],
    ) -> RouteTrial:
        judged = explanation.judged
        passed, more = self._mismatches.of(event, _rules_before(way))
        number, then, its = first
        differing: list[str] = []
        is_compared = explanation.same_as is None and then is not event
        if is_compared:
            differing = _differing(then, its, event, way)
        elif explanation.changes:
            differing = [_change(change) for change in explanation.changes]
        return RouteTrial(
            route=way.route.name,
            rule=way.plan.rule.name,
            action=explanation.action,
            why=explanation.why,
            summary=_words(explanation),
            keys=tuple(self._key(known) for known in way.keys),
            facts=_facts(way, event),
            verdict=judged.verdict.value if judged else "",
            verdict_why=judged.why if judged else "",
            is_shadow=judged.is_shadow if judged else False,
            first_id=(judged.first.id or "") if judged and judged.first else "",
            first_ms=judged.first.arrived_ms if judged and judged.first else 0,
            cause=explanation.cause.value if explanation.cause else "",
            cause_words=cause(explanation),
            passed=passed,
            more_passed=more,
            same_as=explanation.same_as,
            clashes=explanation.clashes,
            differs_from=number if is_compared else None,
            differences=tuple(differing[:_MOST_DIFFERENCES]),
            more_differences=max(len(differing) - _MOST_DIFFERENCES, 0),
        )

    def _key(self, known: EventKey) -> KeyTrial:
        canonical = known.canonical
        shown_text = canonical[: min(_MOST_CANONICAL, self._room)]
        self._room -= len(shown_text)
        return KeyTrial(
            known.kind,
            known.key.hex(),
            window(known),
            shown_text,
            len(canonical) - len(shown_text),
            known.instead,
        )


def _rules_before(way: RouteIdentity) -> Iterator[tuple[str, Pattern | None, Rule | None]]:
    """Yield the rules that were tried before the one that matches."""
    for rule in way.route.rules:
        if rule.name == way.plan.rule.name:
            return
        if rule.guard is None:
            yield rule.name, rule.match, rule


def _words(explanation: Explanation) -> str:
    """Return the explanation in sentences, with event numbers instead of lines."""
    return summary(explanation).replace("the one on line ", "event ")


def _facts(way: RouteIdentity, event: Event) -> tuple[tuple[str, str], ...]:
    """Return the entity, version and state of an event, with their expressions."""
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


# --- differences --------------------------------------------------------------------------


def _differing(one: Event, its: RouteIdentity, other: Event, way: RouteIdentity) -> list[str]:
    """Return the differences that make two events distinct."""
    if its.plan.rule.name != way.plan.rule.name:
        return [f"different rules: {its.plan.rule.name} there, {way.plan.rule.name} here"]
    if not its.keys or not way.keys:
        return ["an event without a key is never a duplicate"]
    found = []
    for name in ("source", "detail_type"):
        was, now = getattr(one, name), getattr(other, name)
        if was != now:
            found.append(f"{name.replace('_', '-')}: {shown(was)} → {shown(now)}")
    first, second = its.keys[-1], way.keys[-1]
    if first.kind != second.kind:
        return [*found, f"identified by {second.kind}, the other by {first.kind}"]
    if first.kind == "content":
        return found + _inside(first.canonical, second.canonical)
    pairs = [(name, first.values.get(name, ""), value) for name, value in second.values.items()]
    return found + [f"{name}: {cut(was)} → {cut(now)}" for name, was, now in pairs if was != now]


def _inside(one: str, other: str) -> list[str]:
    """Return the paths at which two canonical details differ."""
    try:
        return differences(decode_canonical(one), decode_canonical(other), "detail")
    except (ValueError, RecursionError):
        return ["detail"]


def _change(change: FieldChange) -> str:
    return f"{change.path}: {shown(change.was)} → {shown(change.is_)}"
