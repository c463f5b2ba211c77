"""
Explains events: rule, keys, verdict, the first copy, and operator actions.

The verdict is the one that the event would get now (see `expected_verdict`). An explanation
claims nothing and changes nothing.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.dead_letters.api import DeadLetter
from oncebridge.engine.causes import Cause, Sighting, duplicate_cause, likely_cause, remembered
from oncebridge.engine.decide import Action
from oncebridge.engine.verdict import Verdict
from oncebridge.events.differences import changes
from oncebridge.events.event import Event, Unreadable
from oncebridge.events.framing import RawRecord as FileRecord
from oncebridge.events.key import compile_field
from oncebridge.events.rules import Plan, Rule
from oncebridge.operate.explain.expected_verdict import (
    ExpectedVerdict,
    RecordStatus,
    RecordView,
    contents,
)
from oncebridge.operate.explain.explanation import Explanation, KeyExplanation
from oncebridge.operate.identity import EventKey, Identities, RouteIdentity
from oncebridge.operate.lookup import DeadLetterIndex, events_in
from oncebridge.operate.operator_log import OperatorActions, is_operator_log
from oncebridge.service.config import Setup
from oncebridge.stores.api import Fate, Record, Store

Wanted = Callable[[Event, Sequence[RouteIdentity]], bool]
"""Whether an event, with its identity on each route, is to be explained."""

_BATCH = 200
_BURIED = ExpectedVerdict(Verdict.DEAD, Action.BURY)
_MOST_REMEMBERED = 64 * 1024 * 1024


async def explain(
    records: Iterable[FileRecord],
    setup: Setup,
    store: Store | None,
    *,
    letters: DeadLetterIndex | None = None,
    values: bool = False,
    recording: Iterable[FileRecord] = (),
    recording_name: str = "",
    wanted: Wanted | None = None,
) -> AsyncIterator[Explanation]:
    """
    Explain each record of a file, in order; one explanation for each route that it takes.

    Without *store*, there are no verdicts. Only `peek` and `now_ms` are called. With *values*, the
    explanation has the values of details that differ, and of entity and version. Events are
    also compared with those of a *recording*. With *wanted*, other events are not explained.
    """
    explainer = _Explainer(setup, store, letters, values=values)
    for record in recording:
        explainer.remember(record, recording_name)
    source = iter(records)
    while batch := list(islice(source, _BATCH)):
        for explanation in await explainer.explain(batch, wanted):
            yield explanation


class _Arrived(Struct, frozen=True):
    """One event of a file, with its identity on each route."""

    line: int
    event: Event | Unreadable
    ways: list[RouteIdentity]


class _Explainer:
    def __init__(
        self, setup: Setup, store: Store | None, letters: DeadLetterIndex | None, *, values: bool
    ) -> None:
        self._setup = setup
        self._settings = setup.config.settings()
        self._identities = Identities(setup)
        self._look = RecordView(store) if store is not None else None
        self._letters = letters
        self._values = values
        self._earlier = _Earlier()

    def remember(self, record: FileRecord, name: str) -> None:
        """Remember the events of a recording, to compare others with."""
        for arrived in self._arrived(record):
            for way in arrived.ways:
                assert isinstance(arrived.event, Event)  # noqa: S101 - or it would have no way
                self._earlier.look(arrived.line, arrived.event, way, name)

    def _arrived(self, record: FileRecord) -> list[_Arrived]:
        return [
            _Arrived(
                record.line, event, self._identities.of(event) if isinstance(event, Event) else []
            )
            for event in events_in(record, self._settings)
        ]

    async def explain(
        self, batch: Sequence[FileRecord], wanted: Wanted | None
    ) -> list[Explanation]:
        arrived = [each for record in batch for each in self._arrived(record)]
        asked = [each for each in arrived if wanted is None or _is_wanted(each, wanted)]
        paused: set[str] = set()
        if self._look is not None and asked:
            paused = await self._look.prepare([way for each in asked for way in each.ways])
        explained: list[Explanation] = []
        for each in arrived:
            event = each.event
            is_asked = wanted is None or _is_wanted(each, wanted)
            if isinstance(event, Unreadable):
                explained += [_unreadable(each.line, event)] if is_asked else []
                continue
            if not each.ways and is_asked:
                explained.append(self._unrouted(each.line, event))
            for way in each.ways:
                earlier = self._earlier.look(each.line, event, way)
                if is_asked:
                    explanation = await self._explain(each.line, event, way, earlier)
                    explained.append(self._with_pause(explanation, paused))
        return explained

    async def _explain(
        self, line: int, event: Event, way: RouteIdentity, earlier: "_Seen | None"
    ) -> Explanation:
        plan, look = way.plan, self._look
        judged = look.judge(plan, way.route.settings) if look else None
        then = events_in(earlier.raw, self._settings)[0] if earlier else None
        own = contents(way)
        entity, version = _expressions(plan)
        explanation = Explanation(
            line=line,
            action=plan.action,
            event=event,
            route=way.route.name,
            rule=plan.rule.name,
            scope=plan.rule.scope,
            why=_why(plan, event, way.keys),
            keys=way.keys,
            sent_as=plan.sent_as if plan.action == "deduplicate" else b"",
            entity_by=entity,
            entity=compile_field(entity)(event) if entity and self._values else None,
            entity_key=plan.entity,
            version_by=version,
            version=compile_field(version)(event) if version and self._values else None,
            judged=judged,
            standings=(
                tuple(look.standing(key, own) for key in _names(way, judged)) if look else ()
            ),
            letter=await self._letter(way, judged),
            acts=look.acts_on(way) if look else OperatorActions(),
            entity_acts=look.acts([plan.entity]) if look else OperatorActions(),
        )
        if earlier is None or not isinstance(then, Event):
            return _with_cause(explanation, event, None)
        differing = changes(then.envelope, event.envelope, values=self._values)
        explanation = replace(
            explanation,
            same_as=earlier.line,
            same_in=earlier.name,
            clashes=earlier.clashes,
            on_conflict=plan.rule.on_conflict,
            changes=tuple(differing),
        )
        if earlier.clashes and (judged is None or judged.verdict is Verdict.DELIVERED):
            return replace(explanation, cause=Cause.ID_REUSED if earlier.kind == "id" else None)
        return _with_cause(explanation, event, None if earlier.clashes else then)

    async def _letter(
        self, way: RouteIdentity, judged: ExpectedVerdict | None
    ) -> DeadLetter | None:
        if self._letters is None or judged is None or judged.fate is not Fate.DEAD:
            return None
        its = self._look.touched(way) if self._look is not None else []
        return await self._letters.with_key([*its, judged.key])

    def _with_pause(self, explanation: Explanation, paused: set[str]) -> Explanation:
        if self._look is None or explanation.route is None or explanation.route not in paused:
            return explanation
        return replace(explanation, paused=True, paused_by=self._look.paused_by(explanation.route))

    def _unrouted(self, line: int, event: Event) -> Explanation:
        plan = self._identities.file_rules.discard_plan(event)
        is_kept = plan is None and self._setup.config.unrouted == "dead"
        said = f", and {_why(plan, event, ())}" if plan is not None else ""
        return Explanation(
            line=line,
            action="dead" if is_kept else "discard",
            event=event,
            rule=plan.rule.name if plan is not None else None,
            why=f"no route matches it{said}",
            judged=_BURIED if is_kept else ExpectedVerdict(Verdict.DISCARDED, Action.SETTLE),
        )


def _is_wanted(arrived: _Arrived, wanted: Wanted) -> bool:
    return isinstance(arrived.event, Event) and wanted(arrived.event, arrived.ways)


def _names(way: RouteIdentity, judged: ExpectedVerdict | None) -> list[bytes]:
    """Return the keys of the records to report."""
    names = [known.key for known in way.keys]
    if judged is not None and judged.key and judged.key not in names:
        names.append(judged.key)
    return names


def _unreadable(line: int, event: Unreadable) -> Explanation:
    return Explanation(
        line=line,
        action="dead",
        reason=event.reason,
        why=event.message,
        judged=_BURIED,
    )


def _why(plan: Plan, event: Event, keys: Sequence[EventKey]) -> str:
    """Return what is unusual about a plan; empty if nothing is."""
    rule = plan.rule
    if plan.action == "dead":
        return plan.message
    if plan.action == "discard":
        return "the rule says to discard it"
    if plan.action == "bypass":
        return why_bypassed(rule, is_replay=event.replay_name is not None)
    if any(known.instead for known in keys):
        return f"a field of the key is missing or null, so its {keys[-1].kind} is used instead"
    return ""


def why_bypassed(rule: Rule, *, is_replay: bool) -> str:
    """Return why *rule* delivers an event without deduplication."""
    if not rule.tiers:
        return 'the rule says key = "none"'
    if is_replay and rule.on_replay == "deliver":
        return 'it is a replay, and the rule says on_replay = "deliver"'
    return 'a field of the key is missing or null, and on_missing = "deliver"'


def _expressions(plan: Plan) -> tuple[str, str]:
    """Return the expressions for the entity and the version of an event, if it has them."""
    rule = plan.rule
    if not plan.entity:
        return "", ""
    entity = next((part.entity for part in (rule.latest, rule.quiet) if part), rule.entity)
    return entity or "", rule.latest.version if plan.version and rule.latest else ""


# --- causes -------------------------------------------------------------------------------


def _with_cause(explanation: Explanation, event: Event, then: Event | None) -> Explanation:
    """Return *explanation* with its likely cause; *then* is an earlier copy from a file, if any."""
    judged = explanation.judged
    match judged.verdict if judged else None:
        case Verdict.DUPLICATE:
            first = judged.first if judged else None
        case Verdict.STALE:
            return replace(explanation, cause=Cause.OUT_OF_ORDER)
        case Verdict.UNCHANGED:
            return replace(explanation, cause=Cause.DOUBLE_EMISSION)
        case Verdict.CONFLICT:
            is_id = any(k.kind == "id" and judged and k.key == judged.key for k in explanation.keys)
            return replace(explanation, cause=Cause.ID_REUSED if is_id else None)
        case _ if then is not None:
            first = None
        case _:
            return explanation
    later = Sighting.of(event)
    if then is not None and (first is None or first.id == remembered(then.id)):
        return replace(explanation, cause=duplicate_cause(Sighting.of(then), later))
    cause, is_guess = likely_cause(first.id if first else None, later)
    return replace(explanation, cause=cause, is_guess=is_guess)


# --- earlier events -----------------------------------------------------------------------


class _Seen(Struct, frozen=True):
    """An earlier event of the file, and whether it has a key with different content."""

    line: int
    raw: bytes
    hash: bytes
    kind: str
    name: str = ""
    clashes: bool = False


class _Earlier:
    """The first event of a file under each key, as far as memory allows."""

    def __init__(self) -> None:
        self._first: dict[bytes, _Seen] = {}
        self._room = _MOST_REMEMBERED

    def look(self, line: int, event: Event, way: RouteIdentity, name: str = "") -> _Seen | None:
        """Return the earlier event with one of the keys; remember this one under the others."""
        found: _Seen | None = None
        for known in reversed(way.keys):
            part = known.part
            seen = self._first.get(part.key)
            if seen is None and self._room > 0:
                self._room -= len(event.raw) + 200
                self._first[part.key] = _Seen(line, event.raw, part.hash, known.kind, name)
            elif seen is not None and found is None:
                found = replace(seen, clashes=bool(seen.hash and seen.hash != part.hash))
        return found


# --- keys ---------------------------------------------------------------------------------


async def explain_key(
    key: bytes,
    store: Store | None,
    letters: DeadLetterIndex | None,
    *,
    record: Record | None = None,
) -> KeyExplanation:
    """Return what is known under *key*; *record* is the one that a scan has just found."""
    letter = await letters.with_key([key]) if letters is not None else None
    if store is None:
        return KeyExplanation(key=key, letter=letter)
    look = RecordView(store)
    await look.look_at([key])
    standing = look.standing(key)
    if standing.record is None and record is not None:
        standing = RecordStatus.of(key, record, look.now_ms)
    there = standing.record
    acts = (
        OperatorActions.read(there.memo) if there and is_operator_log(there) else look.acts([key])
    )
    return KeyExplanation(key=key, standing=standing, letter=letter, acts=acts)
