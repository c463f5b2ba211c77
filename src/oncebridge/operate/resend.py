"""
Sends an event again, although it was delivered.

    check     it is free, its route is not paused, no newer state of its entity was delivered
    log       write the action to the operator log
    forget    remove its records, or it would be a duplicate
    process   on its route, as if it had just arrived

No event is lost if the process dies in between. Before its records are removed, nothing has
changed. After that the event is new, and its next copy is delivered, from this command or from
its source.

The `Idempotency-Key` is the same as before, so a receiver that keeps those may drop it. The
generation is new, so queues that deduplicate by themselves accept it.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from msgspec import Struct

from oncebridge.engine.decide import Action
from oncebridge.engine.gateway import Gateway
from oncebridge.engine.verdict import Outcome, Verdict
from oncebridge.events.event import Event
from oncebridge.operate.explain.expected_verdict import (
    ENDED,
    RecordView,
    contents,
    held,
)
from oncebridge.operate.identity import RouteIdentity
from oncebridge.stores.api import Fate, Store

_REFUSED = {
    Verdict.DISCARDED: "the rule says to discard it",
    Verdict.DEAD: "it has no key, and would go to the dead letters",
    Verdict.STALE: "a newer state of its entity was delivered: this one is stale",
    Verdict.UNCHANGED: "the same state of its entity was delivered within the quiet time",
    Verdict.CONFLICT: "its version cannot be compared: it would go to the dead letters",
}
_CONFLICTS = {
    Action.DROP: "another event has the same key with different content: the rule drops conflicts",
    Action.BURY: "another event has the same key with different content: it would be a dead letter",
}


class ResendPlan(Struct, frozen=True):
    """What would be done with one event on one route."""

    way: RouteIdentity
    why_not: str = ""
    """Empty: it can be sent."""
    was: Fate | None = None
    """Its last outcome; None if the store has none."""
    forgets: tuple[bytes, ...] = ()
    """The keys whose records have to be removed."""
    keys: Mapping[bytes, bytes] = {}
    """Its contents by key, without those of other events."""

    @property
    def route(self) -> str:
        return self.way.route.name

    @property
    def before(self) -> str:
        """Its last outcome, in words."""
        return ENDED[self.was] if self.was else "the store has no record of it"


class Resent(Struct, frozen=True):
    """The result for one event on one route."""

    intent: ResendPlan
    outcome: Outcome | None = None
    """None if it was not processed."""
    why_not: str = ""

    @property
    def is_sent(self) -> bool:
        """Return whether the sink accepted it."""
        return self.outcome is not None and self.outcome.forwarded


async def plan_resends(store: Store, ways: Sequence[RouteIdentity]) -> list[ResendPlan]:
    """Return for each event whether it can be sent on its route; nothing is changed."""
    look = RecordView(store)
    paused = await look.prepare(ways)
    return [_intent(look, way, paused) for way in ways]


def _intent(look: RecordView, way: RouteIdentity, paused: set[str]) -> ResendPlan:
    plan = way.plan
    own = contents(way)
    standings = [look.standing(key, own) for key in own]
    there = [s.record for s in standings if s.record and not s.is_others]
    was = next((r.fate for r in reversed(there) if r.fate is not None), None)

    def refused(why: str) -> ResendPlan:
        return ResendPlan(way, why, was)

    if way.route.name in paused:
        return refused("the route is paused")
    for standing in standings:
        if standing.state == "claimed":
            return refused(f"it is {held(standing)}")
    if plan.entity and look.standing(plan.entity).state == "claimed":
        return refused(f"its entity is {held(look.standing(plan.entity))}")
    forgets = tuple(record.key for record in there)
    judged = look.judge(plan, way.route.settings, without=forgets)
    if judged.action is Action.SEND:
        return ResendPlan(way, "", was, forgets, look.touched(way))
    if judged.verdict is Verdict.CONFLICT and judged.key:
        return refused(_CONFLICTS[judged.action])
    return refused(plan.message or _REFUSED[judged.verdict])


class Resender:
    """
    Sends events again through *gateways*, which are open, by the names of their routes.

    *before* is called before each event is sent.
    """

    def __init__(
        self,
        store: Store,
        gateways: Mapping[str, Gateway],
        *,
        before: Callable[[ResendPlan], Awaitable[None]],
    ) -> None:
        self._store = store
        self._gateways = gateways
        self._before = before

    async def send(self, event: Event, way: RouteIdentity) -> Resent:
        """Send one event on one route."""
        # Checked again: the operator may have taken a while to confirm.
        (intent,) = await plan_resends(self._store, [way])
        if intent.why_not:
            return Resent(intent, why_not=intent.why_not)
        await self._before(intent)
        if intent.forgets and not all(await self._forget(intent.forgets)):
            return Resent(intent, why_not="a worker has just claimed it")
        (outcome,) = await self._gateways[intent.route].process([event])
        return Resent(intent, outcome, "" if outcome.forwarded else outcome.reason)

    async def _forget(self, keys: Sequence[bytes]) -> list[bool]:
        """Forget *keys*; for each that was not removed, return whether it is gone by now."""
        gone = await self._store.forget(keys)
        left = [key for key, is_gone in zip(keys, gone, strict=True) if not is_gone]
        there = await self._store.peek(left) if left else []
        return [record is None for record in there]
