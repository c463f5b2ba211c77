"""
Why an event is treated as it is: rule, keys, verdict, and who came first.

The verdict is the one the event would get now. It is found with the table that stores
decide by (`oncebridge.record`), on records that were only looked at: nothing is claimed, and
an explanation changes nothing.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import islice
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from oncebridge import control
from oncebridge import record as table
from oncebridge.audit_trail import instant
from oncebridge.clock import ms
from oncebridge.config import Setup
from oncebridge.differences import differences
from oncebridge.duration import format_duration
from oncebridge.event import Event, Unreadable
from oncebridge.flight import Register, first_arrival
from oncebridge.identity import Identities, Identity, Known
from oncebridge.key import compile_field
from oncebridge.records import Record as FileRecord
from oncebridge.rules import Plan
from oncebridge.settings import Settings
from oncebridge.store import Busy, Claim, Duplicate, Fate, Mismatch, Part, Record, Store, Want
from oncebridge.verdict import First, Verdict

Action = Literal["deduplicate", "bypass", "discard", "dead"]
Cause = Literal["redelivery", "re-emission", "replay", "unknown"]

CAUSES: dict[Cause, str] = {
    "redelivery": "the same envelope id as the first",
    "re-emission": "another envelope id than the first",
    "replay": "it comes out of an archive",
    "unknown": "the first one's envelope id is not known",
}

_BATCH = 200
_MOST_REMEMBERED = 64 * 1024 * 1024
_NOBODY = b"explain"  # a token that no claim ever has


class Judged(Struct, frozen=True):
    """What a route would do with an event now."""

    verdict: Verdict
    why: str = ""
    first: First | None = None
    fate: Fate | None = None


class Explanation(Struct, frozen=True, kw_only=True):
    """What one route makes of one event of a file."""

    line: int
    action: Action
    event: Event | None = None
    """None where the record is no event."""
    reason: str = ""
    """One word, where it is no event."""
    route: str | None = None
    """None where no route is for it."""
    rule: str | None = None
    why: str = ""
    keys: tuple[Known, ...] = ()
    entity: Any = None
    version: Any = None
    judged: Judged | None = None
    """None where there is no store to ask."""
    paused: bool = False
    same_as: int | None = None
    """The line of the first event in this file that has one of the keys."""
    differs: tuple[str, ...] | None = None
    """The paths in which it differs from that one."""
    cause: Cause | None = None

    def as_json(self, *, canonical: bool = False) -> dict[str, Any]:
        """Give the whole explanation as a JSON object."""
        judged = self.judged
        told: dict[str, Any] = {
            "line": self.line,
            "route": self.route,
            "id": self.event.id if self.event else None,
            "rule": self.rule,
            "action": self.action,
            "keys": [_key_as_json(known, canonical=canonical) for known in self.keys],
        }
        if canonical:
            told["canonical"] = self.keys[-1].canonical if self.keys else None
        if self.reason:
            told["reason"] = self.reason
        if self.why:
            told["why"] = self.why
        if self.entity is not None:
            told["entity"] = self.entity
        if self.version is not None:
            told["version"] = self.version
        told["verdict"] = judged.verdict.value if judged else None
        if judged and judged.fate is not None:
            told["fate"] = judged.fate.name.lower()
        first = judged.first if judged else None
        told["first"] = (
            {"id": first.id, "arrived": instant(first.arrived_ms)} if first is not None else None
        )
        told["same_as"] = self.same_as
        told["differs"] = None if self.differs is None else list(self.differs)
        told["cause"] = self.cause
        if self.paused:
            told["paused"] = True
        return told


def _key_as_json(known: Known, *, canonical: bool) -> dict[str, str]:
    told = {"kind": known.kind, "key": known.key.hex(), "window": window(known)}
    return told | ({"canonical": known.canonical} if canonical else {})


def window(known: Known) -> str:
    """Tell for how long a key is remembered."""
    text = format_duration(known.window)
    return f"{text}, sliding up to {format_duration(known.longest)}" if known.longest else text


async def explain(
    records: Iterable[FileRecord], setup: Setup, store: Store | None
) -> AsyncIterator[Explanation]:
    """
    Explain each record of a file, in order; one explanation for each route that it takes.

    Without *store*, nothing is said about verdicts. Only `peek` and `now_ms` are called.
    """
    explainer = _Explainer(setup, store)
    source = iter(records)
    while batch := list(islice(source, _BATCH)):
        for explanation in await explainer.explain(batch):
            yield explanation


class _Explainer:
    def __init__(self, setup: Setup, store: Store | None) -> None:
        self._setup = setup
        self._identities = Identities(setup)
        self._look = _Look(store) if store is not None else None
        self._earlier = _Earlier()

    async def explain(self, batch: Sequence[FileRecord]) -> list[Explanation]:
        events = [(record.line, self._identities.read(record)) for record in batch]
        ways = [self._identities.of(e) if isinstance(e, Event) else [] for _, e in events]
        paused: set[str] = set()
        if self._look is not None:
            paused = await self._look.prepare([way for each in ways for way in each])
        explained: list[Explanation] = []
        for (line, event), each in zip(events, ways, strict=True):
            if isinstance(event, Unreadable):
                explained.append(_unreadable(line, event))
            elif not each:
                explained.append(self._unrouted(line, event))
            for way in each:
                assert isinstance(event, Event)  # noqa: S101 - or it would have no way
                is_paused = way.route.name in paused
                explained.append(await self._explain(line, event, way, is_paused=is_paused))
        return explained

    async def _explain(
        self, line: int, event: Event, way: Identity, *, is_paused: bool
    ) -> Explanation:
        plan = way.plan
        judged = await self._look.judge(plan, way.route.settings) if self._look else None
        is_duplicate = judged is not None and judged.verdict is Verdict.DUPLICATE
        first = judged.first if judged is not None and is_duplicate else None
        earlier = self._earlier.look(line, event, way)
        then = self._identities.read(earlier.raw) if earlier else None
        differs: tuple[str, ...] | None = None
        if earlier is not None and isinstance(then, Event):
            differs = tuple(differences(then.envelope, event.envelope))
            if not is_duplicate and not earlier.clashes:
                is_duplicate, first = True, First(then.id, 0)
        return Explanation(
            line=line,
            action=plan.action,
            event=event,
            route=way.route.name,
            rule=plan.rule.name,
            why=_why(plan, event, way.keys),
            keys=way.keys,
            entity=_entity(plan, event),
            version=_version(plan, event),
            judged=judged,
            paused=is_paused,
            same_as=earlier.line if earlier else None,
            differs=differs,
            cause=_cause(event, first) if is_duplicate else None,
        )

    def _unrouted(self, line: int, event: Event) -> Explanation:
        is_kept = self._setup.config.unrouted == "dead"
        return Explanation(
            line=line,
            action="dead" if is_kept else "discard",
            event=event,
            why="no route is for it",
            judged=Judged(Verdict.DEAD if is_kept else Verdict.DISCARDED),
        )


def _unreadable(line: int, event: Unreadable) -> Explanation:
    return Explanation(
        line=line,
        action="dead",
        reason=event.reason,
        why=event.message,
        judged=Judged(Verdict.DEAD),
    )


def _why(plan: Plan, event: Event, keys: Sequence[Known]) -> str:
    """Say what is unusual about a plan; nothing where all is as the rule asks."""
    rule = plan.rule
    if plan.action == "dead":
        return plan.message
    if plan.action == "discard":
        return "the rule says to discard it"
    if plan.action == "bypass":
        if not rule.tiers:
            return 'the rule says key = "none"'
        if event.replay_name is not None and rule.on_replay == "deliver":
            return 'it is a replay, and the rule says on_replay = "deliver"'
        return 'a field that the key needs is missing or null, and on_missing = "deliver"'
    if any(known.instead for known in keys):
        return f"a field that the key needs is missing or null, so its {keys[-1].kind} counts"
    return ""


def _entity(plan: Plan, event: Event) -> Any:
    rule = plan.rule
    if not plan.entity:
        return None
    expression = next((part.entity for part in (rule.latest, rule.quiet) if part), rule.entity)
    return compile_field(expression)(event) if expression else None


def _version(plan: Plan, event: Event) -> Any:
    return (
        compile_field(plan.rule.latest.version)(event)
        if plan.version and plan.rule.latest
        else None
    )


def _cause(event: Event, first: First | None) -> Cause:
    """Guess why a duplicate came."""
    if event.replay_name is not None:
        return "replay"
    if first is None or not first.id or not event.id:
        return "unknown"
    return "redelivery" if first.id == event.id else "re-emission"


# --- what the store says ------------------------------------------------------------------


class _Look:
    """Look at the records of a store, and judge by them as the gateway would."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._found: dict[bytes, Record | None] = {}
        self._now_ms = 0

    async def prepare(self, ways: Sequence[Identity]) -> set[str]:
        """Look at all records of a batch at once, and tell which routes are paused."""
        self._found.clear()
        self._now_ms = await self._store.now_ms()
        await self._fetch([key for way in ways for key in (*way.all_keys(), way.plan.entity)])
        routes = sorted({way.route.name for way in ways})
        states = await control.paused(self._store, routes) if routes else []
        return {route for route, is_paused in zip(routes, states, strict=True) if is_paused}

    async def _fetch(self, keys: Iterable[bytes]) -> None:
        missing = [key for key in dict.fromkeys(keys) if key and key not in self._found]
        if missing:
            self._found.update(zip(missing, await self._store.peek(missing), strict=True))

    async def judge(self, plan: Plan, settings: Settings) -> Judged:
        match plan.action:
            case "dead":
                return Judged(Verdict.DEAD, plan.message)
            case "discard":
                return Judged(Verdict.DISCARDED)
            case "bypass":
                return Judged(Verdict.BYPASSED)
        clash: Mismatch | None = None
        while True:
            await self._fetch(part.key for part in plan.parts)
            answer = self._ask(plan.parts, settings, plan.keep_ms)
            match answer:
                case Mismatch():
                    clash = clash or answer
                    plan = plan.in_conflict(answer.key)
                case Duplicate():
                    return Judged(
                        Verdict.DUPLICATE,
                        ENDED[answer.fate],
                        first_arrival(answer.memo),
                        answer.fate,
                    )
                case Busy():
                    record = self._found[answer.key]
                    return Judged(
                        Verdict.BUSY, _held(answer), first_arrival(record.memo) if record else None
                    )
                case _:
                    assert isinstance(answer, Claim)  # noqa: S101 - the table knows no other
                    return self._claimed(plan, settings, answer, clash)

    def _ask(self, parts: tuple[Part, ...], settings: Settings, keep_ms: int) -> object:
        want = Want(parts, _NOBODY, _NOBODY, ms(settings.lease), keep_ms)
        return table.claim([self._found[part.key] for part in parts], want, self._now_ms)[0]

    def _claimed(
        self, plan: Plan, settings: Settings, claim: Claim, clash: Mismatch | None
    ) -> Judged:
        tried = max(held.attempts for held in claim.held) - 1
        if tried >= settings.max_attempts:
            return Judged(Verdict.DEAD, f"it was tried {tried} times")
        if clash is not None and plan.rule.on_conflict != "deliver":
            return Judged(
                Verdict.CONFLICT, _CONFLICTS[plan.rule.on_conflict], first_arrival(clash.memo)
            )
        if plan.entity:
            answer = self._ask((Part(plan.entity),), settings, plan.keep_ms)
            if isinstance(answer, Busy):
                return Judged(Verdict.BUSY, f"the entity is {_held(answer)}")
            if isinstance(answer, Claim):
                outdated = Register.read(answer.held[0].memo).judge(plan, self._now_ms)
                if outdated is not None:
                    return Judged(outdated, _OUTDATED[outdated])
        if clash is not None:
            return Judged(Verdict.CONFLICT, _CONFLICTS["deliver"], first_arrival(clash.memo))
        return Judged(Verdict.DELIVERED, f"after {tried} that failed" if tried else "")


ENDED = {
    Fate.DELIVERED: "it was delivered",
    Fate.DEAD: "it went to the dead letters",
    Fate.STALE: "it was stale",
    Fate.UNCHANGED: "it was unchanged",
    Fate.DROPPED: "it was dropped as a conflict",
}
_CONFLICTS = {
    "deliver": "the same key was done with other content; it is delivered as an event of its own",
    "dead": "the same key was done with other content; it goes to the dead letters",
    "duplicate": "the same key was done with other content; it is dropped",
}
_OUTDATED = {
    Verdict.STALE: "a newer state of the entity was delivered",
    Verdict.UNCHANGED: "the same state of the entity was delivered just now",
}


def _held(answer: Busy) -> str:
    return f"held, or waiting for its next attempt, for {answer.left_ms / 1000:.1f} s more"


# --- what the file says -------------------------------------------------------------------


class _Seen(Struct, frozen=True):
    """An event further up in the file, and whether it has a key with other content."""

    line: int
    raw: bytes
    hash: bytes
    clashes: bool = False


class _Earlier:
    """The first event of a file under each key, as far as there is room to remember them."""

    def __init__(self) -> None:
        self._first: dict[bytes, _Seen] = {}
        self._room = _MOST_REMEMBERED

    def look(self, line: int, event: Event, way: Identity) -> _Seen | None:
        """Find who has one of the keys already, and remember this one under the others."""
        found: _Seen | None = None
        for part in reversed([known.part for known in way.keys]):
            seen = self._first.get(part.key)
            if seen is None and self._room > 0:
                self._room -= len(event.raw) + 200
                self._first[part.key] = _Seen(line, event.raw, part.hash)
            elif seen is not None and found is None:
                found = replace(seen, clashes=bool(seen.hash and seen.hash != part.hash))
        return found


def dumps(explanation: Explanation, *, canonical: bool = False) -> str:
    """Write an explanation as one line of JSON."""
    return msgspec.json.encode(explanation.as_json(canonical=canonical)).decode()
