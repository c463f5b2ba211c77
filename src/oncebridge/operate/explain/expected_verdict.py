"""
Predicts what a route would do with an event now.

It follows the steps that the gateway would take (`oncebridge.engine.decide`). The store's answers
come from the transitions (`oncebridge.stores.transitions`) of records that were only read:
nothing is claimed and nothing changes.

It also decides which records belong to an event. Another event may have the same key with
different content, and an action on the one must not touch the other.
"""

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.engine import pauses
from oncebridge.engine.decide import Action, Policy, Step, after_claim, after_entity, first_step
from oncebridge.engine.memos import NO_STATE, EntityState, Memo, first_arrival, why_incomparable
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
    ClaimAnswer,
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
_CLASH: Final = "another event has the same key with different content"
_CONFLICTS: Final = {
    Action.SEND: "this one is delivered as a separate event",
    Action.BURY: "this one goes to the dead letters",
    Action.DROP: "this one is dropped",
}
_INCOMPARABLE: Final = {Action.SEND: "it is delivered", Action.BURY: "it goes to the dead letters"}
_ON_ROUTES: Final = ("pause", "resume")
_OUTDATED: Final = {
    Verdict.STALE: "a newer state of the entity was delivered",
    Verdict.UNCHANGED: "the same state of the entity was delivered just now",
}


Records = Mapping[bytes, Record | None]
"""The records that were read, by key."""


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


def touched(own: Mapping[bytes, bytes], found: Records) -> dict[bytes, bytes]:
    """Return those of *own* contents whose records do not belong to another event."""
    return {
        key: content
        for key, content in own.items()
        if found.get(key) is None or belongs_to_event(found[key], own)
    }


class ExpectedVerdict(Struct, frozen=True):
    """The verdict that a route would reach now, and why."""

    verdict: Verdict
    action: Action
    """What the gateway would do."""
    why: str = ""
    first: First | None = None
    fate: Fate | None = None
    key: bytes = b""
    """The key whose record is the reason, if any."""
    enforced: "ExpectedVerdict | None" = None
    """In shadow mode, if it is forwarded: what it would be in enforce mode."""

    @property
    def is_shadow(self) -> bool:
        """Return whether it is forwarded, whatever the verdict."""
        return self.enforced is not None


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
        self.now_ms = await self._store.now_ms()
        names = [key for key in dict.fromkeys(keys) if key]
        there = await self._store.peek(names) if names else []
        self._found = dict(zip(names, there, strict=True))
        self._actions = await operator_log.read(
            self._store, [operator_log.event_log_key(key) for key in keys if key]
        )

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

    def judge(
        self, plan: Plan, settings: Settings, *, without: Iterable[bytes] = ()
    ) -> ExpectedVerdict:
        """Return the verdict for an event with *plan*, if the records *without* were removed."""
        found: Records = ChainMap(dict.fromkeys(without), self._found)
        policy = Policy.of(settings)
        judged = _expect(plan, policy, found, self.now_ms)
        # Senders that are not allowed stay out in shadow mode, too.
        if not policy.is_shadow or judged.action is not Action.SEND:
            return judged
        enforcing = replace(policy, is_shadow=False)
        return replace(judged, enforced=_expect(plan, enforcing, found, self.now_ms))


class _End(Struct, frozen=True):
    """Where the steps of the gateway end."""

    step: Step
    plan: Plan
    answer: ClaimAnswer | None
    """The last one of the store."""
    clash: Mismatch | None
    """The record of another event with the same key, if there is one."""
    tried: int
    """How many attempts there were before."""
    state: EntityState = NO_STATE


def _expect(plan: Plan, policy: Policy, found: Records, now_ms: int) -> ExpectedVerdict:
    """Return where the steps of the gateway end, and why."""
    end = _follow(plan, policy, found, now_ms)
    step, answer, clash = end.step, end.answer, end.clash
    why, first, fate, key = "", None, None, b""
    if isinstance(answer, Duplicate):
        why, first = ENDED[answer.fate], first_arrival(answer.memo)
        fate, key = answer.fate, answer.key
    elif isinstance(answer, Busy):
        standing = RecordStatus.of(answer.key, found.get(answer.key), now_ms)
        why, key = held(standing), answer.key
        if key == plan.entity:
            why = f"the entity is {why}"
        elif standing.record is not None:
            first = first_arrival(standing.record.memo)
    elif step.verdict is Verdict.CONFLICT and step.reason != "version" and clash is not None:
        why, first, key = (
            f"{_CLASH}; {_CONFLICTS[step.action]}",
            first_arrival(clash.memo),
            clash.key,
        )
    else:
        why = _why(end, now_ms)
    return ExpectedVerdict(step.verdict, step.action, why, first, fate, key)


def _why(end: _End, now_ms: int) -> str:
    step, plan, tried = end.step, end.plan, end.tried
    match step.verdict:
        case Verdict.CONFLICT:
            return f"{why_incomparable(end.state, plan, now_ms)}; {_INCOMPARABLE[step.action]}"
        case Verdict.STALE | Verdict.UNCHANGED:
            return _OUTDATED[step.verdict]
        case Verdict.DEAD:
            return plan.message or f"it was tried {tried} times"
        case Verdict.DELIVERED if tried:
            return f"after {tried} failed attempt{'s' if tried > 1 else ''}"
        case _:
            return ""


def _follow(plan: Plan, policy: Policy, found: Records, now_ms: int) -> _End:
    """Take the steps that the gateway would take, with the answers that a store would give."""
    step, answer = first_step(plan, policy), None
    clash: Mismatch | None = None
    while step.action is Action.CLAIM:
        assert step.plan is not None  # noqa: S101 - this step has one
        plan = step.plan
        answer = _ask(plan.parts, found, now_ms)
        if isinstance(answer, Mismatch):
            clash = clash or answer
        step = after_claim(plan, answer, policy, is_conflict=clash is not None)
    tried = max(held.attempts for held in answer.held) - 1 if isinstance(answer, Claim) else 0
    if step.action is not Action.CLAIM_ENTITY:
        return _End(step, plan, answer, clash, tried)
    answer = _ask((Part(plan.entity),), found, now_ms)
    if not isinstance(answer, Claim):
        return _End(after_claim(plan, answer, policy), plan, answer, clash, tried)
    state = EntityState.read(answer.held[0].memo)
    step = after_entity(plan, state, now_ms, policy, is_conflict=clash is not None)
    return _End(step, plan, answer, clash, tried, state)


def _ask(parts: tuple[Part, ...], found: Records, now_ms: int) -> ClaimAnswer:
    """Return what the store would answer to a claim; the lease and the window do not matter."""
    want = Want(parts, _UNUSED_TOKEN, _UNUSED_TOKEN, lease_ms=1, keep_ms=1)
    return transitions.claim([found.get(part.key) for part in parts], want, now_ms)[0]


def held(standing: RecordStatus) -> str:
    """Return how long a record stays claimed."""
    what = "held by a worker" if standing.is_held else "waiting for its next attempt"
    return f"{what} for {standing.left_ms / 1000:.1f} s more"
