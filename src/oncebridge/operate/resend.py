"""
Send an event again although it was delivered: a deliberate act.

    look      is it free, is its route not paused, is no newer state of its entity delivered?
    write     who does it, and why
    forget    what the store knows of it, or it would be a duplicate
    process   on its route, as if it had just arrived

Nothing is lost, wherever the process dies. Until it is forgotten, nothing has changed. After
that the event is simply new, and the next copy of it is delivered, be it from this command
run again or from its source; the trail tells why.

The `Idempotency-Key` is the event's own, so a receiver that remembers those may drop it. That
is the receiver's promise to make, and nothing here gets around it. The generation is new, so
queues that deduplicate by themselves let it pass.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from msgspec import Struct

from oncebridge.engine.gateway import Gateway
from oncebridge.engine.verdict import Outcome, Verdict
from oncebridge.events.event import Event
from oncebridge.operate.explain.expected_verdict import (
    ENDED,
    RecordStatus,
    RecordView,
    contents,
    held,
)
from oncebridge.operate.identity import RouteIdentity
from oncebridge.stores.api import Fate, Store

_REFUSED = {
    "discard": "the rule says to discard it",
    "dead": "it cannot be told apart from others, and would go to the dead letters",
}
_CONFLICTS = {
    "duplicate": "another event has its key with other content: the rule drops such a conflict",
    "dead": "another event has its key with other content: it would go to the dead letters",
}
_OUTDATED = {
    Verdict.STALE: "a newer state of its entity was delivered: an older one stays stale",
    Verdict.UNCHANGED: "the same state of its entity was delivered within the quiet time just now",
}


class ResendPlan(Struct, frozen=True):
    """What would be done about one event on one route."""

    event: Event
    way: RouteIdentity
    why_not: str = ""
    """Empty: it can be sent."""
    was: Fate | None = None
    """How it ended before; None where the store does not know that."""
    forgets: tuple[bytes, ...] = ()
    """The keys that stand in its way."""
    keys: Mapping[bytes, bytes] = {}
    """What it has left and will leave, by key; another event's are not among them."""

    @property
    def route(self) -> str:
        return self.way.route.name

    @property
    def before(self) -> str:
        """Return how it ended before."""
        return ENDED[self.was] if self.was else "the store does not know it"


class Resent(Struct, frozen=True):
    """What became of one event on one route."""

    intent: ResendPlan
    outcome: Outcome | None = None
    """None where it was not brought to the gateway."""
    why_not: str = ""

    @property
    def is_sent(self) -> bool:
        """Return whether the sink took it."""
        return self.outcome is not None and self.outcome.forwarded


async def plan_resends(
    store: Store, asked: Sequence[tuple[Event, RouteIdentity]]
) -> list[ResendPlan]:
    """Look what stands against sending each event on its route; nothing is changed."""
    look = RecordView(store)
    paused = await look.prepare([way for _, way in asked])
    return [_intent(look, event, way, paused) for event, way in asked]


def _intent(look: RecordView, event: Event, way: RouteIdentity, paused: set[str]) -> ResendPlan:
    plan = way.plan
    own = contents(way)
    standings = [look.standing(key, own) for key in own]
    there = [s.record for s in standings if s.record and not s.is_others]
    was = next((r.fate for r in reversed(there) if r.fate is not None), None)

    def refused(why: str) -> ResendPlan:
        return ResendPlan(event, way, why, was)

    if plan.action in _REFUSED:
        return refused(plan.message or _REFUSED[plan.action])
    if way.route.name in paused:
        return refused("the route is paused")
    for standing in standings:
        if standing.state == "claimed":
            return refused(f"it is {held(standing)}")
    if plan.entity and look.standing(plan.entity).state == "claimed":
        return refused(f"its entity is {held(look.standing(plan.entity))}")
    if _is_dropped_as_conflict(way, standings):
        return refused(_CONFLICTS[plan.rule.on_conflict])
    outdated = look.outdated(plan)
    if outdated is Verdict.CONFLICT and plan.rule.on_conflict != "deliver":
        return refused("its version cannot be compared: it would go to the dead letters")
    if outdated in _OUTDATED:
        return refused(_OUTDATED[outdated])
    forgets = tuple(record.key for record in there)
    return ResendPlan(event, way, "", was, forgets, look.touched(way))


def _is_dropped_as_conflict(way: RouteIdentity, standings: Sequence[RecordStatus]) -> bool:
    """Return whether another event stands under its key, and its rule does not send it then."""
    is_shadow = way.route.settings.mode == "shadow"
    return (
        way.plan.rule.on_conflict in _CONFLICTS
        and not is_shadow
        and any(standing.is_others and standing.state == "done" for standing in standings)
    )


class Resender:
    """
    Send events again through *gateways*, which are open, by the names of their routes.

    *before* is told what is about to be done.
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
        """Take one event through all steps on one route."""
        # Again, as somebody may have thought about it for a while.
        (intent,) = await plan_resends(self._store, [(event, way)])
        if intent.why_not:
            return Resent(intent, why_not=intent.why_not)
        await self._before(intent)
        if intent.forgets and not all(await self._forget(intent.forgets)):
            return Resent(intent, why_not="a worker has taken it in hand just now")
        (outcome,) = await self._gateways[intent.route].process([event])
        return Resent(intent, outcome, "" if outcome.forwarded else outcome.reason)

    async def _forget(self, keys: Sequence[bytes]) -> list[bool]:
        """Forget *keys*; one that went by itself in the meantime is gone as well."""
        gone = await self._store.forget(keys)
        left = [key for key, is_gone in zip(keys, gone, strict=True) if not is_gone]
        there = await self._store.peek(left) if left else []
        return [record is None for record in there]
