"""
Predicts what a route would do with an event now.

It applies the transitions of the stores (`oncebridge.stores.transitions`) to records that were
only read: nothing is claimed and nothing changes.

It also decides which records belong to an event. Another event may have the same key with
different content, and an action on the one must not touch the other.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.base.clock import ms
from oncebridge.engine import pauses
from oncebridge.engine.memos import EntityState, Memo, first_arrival, why_incomparable
from oncebridge.engine.settings import Settings
from oncebridge.engine.verdict import First, Verdict
from oncebridge.events.key import Part, conflict_key
from oncebridge.events.rules import Plan
from oncebridge.operate import operator_log
from oncebridge.operate.identity import RouteIdentity
from oncebridge.operate.operator_log import OperatorAction, OperatorActions
from oncebridge.stores import transitions
from oncebridge.stores.api import (
    Busy,
    Claim,
    Duplicate,
    Fate,
    Mismatch,
    Record,
    Store,
    Want,
)

_UNUSED_TOKEN: Final = b"explain"  # no claim ever has this token

ENDED: Final = {
    Fate.DELIVERED: "it was delivered",
    Fate.DEAD: "it went to the dead letters",
    Fate.STALE: "it was stale",
    Fate.UNCHANGED: "it was unchanged",
    Fate.DROPPED: "it was dropped as a conflict",
}
_CONFLICTS: Final = {
    "deliver": "another event has the same key with different content; this one is delivered as a separate event",
    "dead": "another event has the same key with different content; this one goes to the dead letters",
    "duplicate": "another event has the same key with different content; this one is dropped",
}
_SENT: Final = {"deliver": "it is delivered", "dead": "it goes to the dead letters"}
_ON_ROUTES: Final = ("pause", "resume")
_OUTDATED: Final = {
    Verdict.STALE: "a newer state of the entity was delivered",
    Verdict.UNCHANGED: "the same state of the entity was delivered just now",
}


def contents(way: RouteIdentity) -> dict[bytes, bytes]:
    """Return every key that may have a record of an event, with the hash of its content."""
    own = {part.key: part.hash for part in way.plan.parts}
    return own | {conflict_key(key, hashed): hashed for key, hashed in own.items() if hashed}


def belongs_to_event(record: Record | None, own: Mapping[bytes, bytes]) -> bool:
    """
    Return whether a record belongs to the event with *own* contents: same key, same content.

    The same key with different content is another event. If one of the two contents is not
    known (empty), the key decides.
    """
    if record is None or record.key not in own:
        return False
    content = own[record.key]
    return not record.hash or not content or record.hash == content


def touched(own: Mapping[bytes, bytes], found: Mapping[bytes, Record | None]) -> dict[bytes, bytes]:
    """Return those of *own* contents whose records do not belong to another event."""
    return {
        key: content
        for key, content in own.items()
        if found.get(key) is None or belongs_to_event(found[key], own)
    }


class ExpectedVerdict(Struct, frozen=True):
    """The verdict that a route would reach now, and why."""

    verdict: Verdict
    why: str = ""
    first: First | None = None
    fate: Fate | None = None
    key: bytes = b""
    """The key whose record is the reason, if any."""
    policy: str = ""
    """What the rule does with a conflict, if it is one."""
    is_shadow: bool = False
    """In shadow mode: it is forwarded, whatever the verdict."""


class RecordStatus(Struct, frozen=True):
    """The state of the record of one key."""

    key: bytes
    state: transitions.State
    """`done` past its window counts as absent."""
    record: Record | None
    left_ms: int = 0
    """How long that lasts: a lease or a wait for the next attempt, or a window."""
    is_others: bool = False
    """It belongs to another event, with the same key and different content."""

    @classmethod
    def of(
        cls,
        key: bytes,
        record: Record | None,
        now_ms: int,
        own: Mapping[bytes, bytes] | None = None,
    ) -> "RecordStatus":
        """Return the status of *record*; with *own* contents, also whether it is another event's."""
        left_ms = record.until_ms - now_ms if record else 0
        is_others = (
            own is not None and key in own and not (record is None or belongs_to_event(record, own))
        )
        return cls(key, transitions.state(record, now_ms), record, max(left_ms, 0), is_others)

    @property
    def is_held(self) -> bool:
        """Return whether a worker holds it; else it waits for its next attempt, if at all."""
        return self.state == "claimed" and bool(self.record and self.record.token)

    @property
    def is_over(self) -> bool:
        """Return whether it was done, and its window is over."""
        return self.state == "absent" and self.record is not None

    @property
    def memo(self) -> Memo:
        return Memo.read(self.record.memo) if self.record else Memo()

    @property
    def attempts(self) -> int:
        return self.record.attempts if self.record else 0


class RecordView:
    """Reads the records of a store, and predicts what the gateway would decide."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._found: dict[bytes, Record | None] = {}
        self._actions: dict[bytes, OperatorActions] = {}
        self.now_ms = 0

    async def prepare(self, ways: Sequence[RouteIdentity]) -> set[str]:
        """Read all records of a batch at once; return the routes that are paused."""
        keys = [key for way in ways for key in (*way.all_keys(), way.plan.entity)]
        await self.look_at(keys)
        routes = sorted({way.route.name for way in ways})
        states = await pauses.paused(self._store, routes) if routes else []
        paused = {route for route, is_paused in zip(routes, states, strict=True) if is_paused}
        unkeyed = {way.route.name for way in ways if not way.keys}
        names = [operator_log.route_log_key(name) for name in sorted(paused | unkeyed)]
        self._actions |= await operator_log.read(self._store, names)
        return paused

    async def look_at(self, keys: Sequence[bytes]) -> None:
        """Read the records of *keys* and their operator actions; forget all others."""
        self._found.clear()
        self.now_ms = await self._store.now_ms()
        await self._fetch(keys)
        self._actions = await operator_log.read(
            self._store, [operator_log.event_log_key(key) for key in keys if key]
        )

    async def _fetch(self, keys: Iterable[bytes]) -> None:
        missing = [key for key in dict.fromkeys(keys) if key and key not in self._found]
        if missing:
            self._found.update(zip(missing, await self._store.peek(missing), strict=True))

    def standing(self, key: bytes, own: Mapping[bytes, bytes] | None = None) -> RecordStatus:
        """Return the status of a record that was read."""
        return RecordStatus.of(key, self._found.get(key), self.now_ms, own)

    def touched(self, way: RouteIdentity) -> dict[bytes, bytes]:
        """Return the contents of an event whose records belong to no other event."""
        return touched(contents(way), self._found)

    def acts(self, keys: Sequence[bytes]) -> OperatorActions:
        """Return the operator actions on *keys*."""
        found = [self._actions.get(operator_log.event_log_key(key)) for key in keys if key]
        return operator_log.merged([each for each in found if each is not None])

    def acts_on(self, way: RouteIdentity) -> OperatorActions:
        """
        Return the operator actions on an event.

        Under a key that belongs to another event by now, only those that are certainly its own.
        Actions on events without a key are among those on their route.
        """
        if not way.keys:
            on_route = self._actions.get(
                operator_log.route_log_key(way.route.name), OperatorActions()
            )
            return OperatorActions(
                tuple(act for act in on_route.acts if act.verb not in _ON_ROUTES)
            )
        own = contents(way)
        found: list[OperatorActions] = []
        for key, content in own.items():
            acts = self._actions.get(operator_log.event_log_key(key), OperatorActions())
            is_others = self.standing(key, own).is_others
            its = tuple(act for act in acts.acts if act.is_of(content, surely=is_others))
            found.append(OperatorActions(its, 0 if is_others else acts.before))
        return operator_log.merged(found)

    def paused_by(self, route: str) -> OperatorAction | None:
        """Return the action that paused *route*, if it is known."""
        acts = self._actions.get(operator_log.route_log_key(route), OperatorActions()).acts
        return next((act for act in reversed(acts) if act.verb == "pause"), None)

    async def judge(self, plan: Plan, settings: Settings) -> ExpectedVerdict:
        """Return the verdict for an event with *plan*."""
        judged = await self._judge(plan, settings)
        # Senders that are not allowed stay out in shadow mode, too.
        is_shadow = settings.mode == "shadow" and not plan.refused
        return replace(judged, is_shadow=True) if is_shadow else judged

    async def _judge(self, plan: Plan, settings: Settings) -> ExpectedVerdict:
        match plan.action:
            case "discard":
                return ExpectedVerdict(Verdict.DISCARDED)
            case "bypass":
                return ExpectedVerdict(Verdict.BYPASSED)
            case "dead" if not plan.parts:
                return ExpectedVerdict(Verdict.DEAD, plan.message)
        clash: Mismatch | None = None
        while True:
            await self._fetch(part.key for part in plan.parts)
            answer = self._ask(plan.parts, settings, plan.keep_ms)
            match answer:
                case Mismatch():
                    clash = clash or answer
                    plan = plan.in_conflict(answer.key)
                case Duplicate():
                    return ExpectedVerdict(
                        Verdict.DUPLICATE,
                        ENDED[answer.fate],
                        first_arrival(answer.memo),
                        answer.fate,
                        answer.key,
                    )
                case Busy():
                    standing = self.standing(answer.key)
                    first = first_arrival(standing.record.memo) if standing.record else None
                    return ExpectedVerdict(Verdict.BUSY, held(standing), first, key=answer.key)
                case _ if plan.action == "dead":
                    return ExpectedVerdict(Verdict.DEAD, plan.message)
                case _:
                    assert isinstance(answer, Claim)  # noqa: S101 - there is no other answer
                    return self._claimed(plan, settings, answer, clash)

    def outdated(self, plan: Plan) -> Verdict | None:
        """Return the verdict that the state of the entity forces on *plan*, if any."""
        return (
            self._entity_state(plan).judge(plan, self.now_ms)
            if plan.entity and plan.parts
            else None
        )

    def _entity_state(self, plan: Plan) -> EntityState:
        record = self._found.get(plan.entity)
        return EntityState.read(record.memo) if record else EntityState()

    def _ask(self, parts: tuple[Part, ...], settings: Settings, keep_ms: int) -> object:
        want = Want(parts, _UNUSED_TOKEN, _UNUSED_TOKEN, ms(settings.lease), keep_ms)
        return transitions.claim([self._found[part.key] for part in parts], want, self.now_ms)[0]

    def _claimed(
        self, plan: Plan, settings: Settings, claim: Claim, clash: Mismatch | None
    ) -> ExpectedVerdict:
        tried = max(each.attempts for each in claim.held) - 1
        policy = plan.rule.on_conflict
        if settings.mode != "shadow":  # in shadow mode it is forwarded
            if tried >= settings.max_attempts:
                why = f"it was tried {tried} times"
                return _conflict(clash, "dead") if clash else ExpectedVerdict(Verdict.DEAD, why)
            if clash is not None and policy != "deliver":
                return _conflict(clash, policy)
        if plan.entity:
            answer = self._ask((Part(plan.entity),), settings, plan.keep_ms)
            if isinstance(answer, Busy):
                why = f"the entity is {held(self.standing(plan.entity))}"
                return ExpectedVerdict(Verdict.BUSY, why, key=plan.entity)
            if isinstance(answer, Claim):
                state = self._entity_state(plan)
                outdated = state.judge(plan, self.now_ms)
                if outdated is Verdict.CONFLICT:
                    why = why_incomparable(state, plan, self.now_ms)
                    sent = policy if policy == "deliver" else "dead"
                    return ExpectedVerdict(Verdict.CONFLICT, f"{why}; {_SENT[sent]}", policy=sent)
                if outdated is not None:
                    return ExpectedVerdict(outdated, _OUTDATED[outdated])
        if clash is not None:
            return _conflict(clash, policy)
        return ExpectedVerdict(Verdict.DELIVERED, _after_attempts(tried))


def _after_attempts(tried: int) -> str:
    if not tried:
        return ""
    return "after 1 failed attempt" if tried == 1 else f"after {tried} failed attempts"


def _conflict(clash: Mismatch, policy: str) -> ExpectedVerdict:
    why = _CONFLICTS[policy]
    return ExpectedVerdict(
        Verdict.CONFLICT, why, first_arrival(clash.memo), key=clash.key, policy=policy
    )


def held(standing: RecordStatus) -> str:
    """Return how long a record stays claimed."""
    what = "held by a worker" if standing.is_held else "waiting for its next attempt"
    return f"{what} for {standing.left_ms / 1000:.1f} s more"
