"""
What happens next with an event: the one place that decides.

Given the rule, what the store answered and what the entity's record says, each function returns
a `Step`. Nothing here waits, writes or reads a clock. The gateway takes the step; `explain`,
`resend` and `audit` report where the steps lead.

An event without anything special needs no call: a key that was claimed as asked, under a rule
without an entity, is sent (`after_claim` returns the same).
"""

from enum import Enum
from typing import Final

from msgspec import Struct

from oncebridge.engine.memos import EntityState
from oncebridge.engine.settings import Settings
from oncebridge.engine.verdict import Verdict
from oncebridge.events.rules import Plan
from oncebridge.stores.api import Busy, Claim, ClaimAnswer, Duplicate, Fate, Mismatch, NoAnswer


class Action(Enum):
    """What a step asks for."""

    CLAIM = "claim"
    """Claim the keys of the step's plan."""
    CLAIM_ENTITY = "claim the entity"
    SEND = "send"
    """Send it; if the sink takes it, the event gets the step's verdict."""
    BURY = "bury"
    """Store it in the dead letters, then mark it done."""
    DROP = "drop"
    """Mark it done without sending it."""
    SETTLE = "settle"
    """Give it the step's verdict; there is nothing to write."""
    RETURN = "return"
    """Return it to the source, to be retried."""


class Step(Struct, frozen=True, gc=False):
    """What happens next with an event."""

    action: Action
    verdict: Verdict
    """Its verdict, if the step succeeds."""
    reason: str = ""
    """For the dead letters: why. With `version`, the entity keeps its state, also if it is sent."""
    plan: Plan | None = None
    """CLAIM: what to claim."""
    is_unprotected: bool = False
    """SEND: there is no claim, so it may be a duplicate."""


class Policy(Struct, frozen=True):
    """The settings that decide about events."""

    is_shadow: bool = False
    """Forward everything, and only report what would have been dropped."""
    max_attempts: int | None = None
    """Give up after this many attempts; None if there are no dead letters to give up to."""
    sends_without_store: bool = False
    """Send events unprotected while the store does not answer."""

    @classmethod
    def of(cls, settings: Settings, *, has_dead_letters: bool = True) -> "Policy":
        """Return the policy of a route with *settings*."""
        is_shadow = settings.mode == "shadow"
        return cls(
            is_shadow,
            settings.max_attempts if has_dead_letters else None,
            is_shadow or settings.on_store_outage == "deliver",
        )


DROPPED: Final = {
    Verdict.STALE: Fate.STALE,
    Verdict.UNCHANGED: Fate.UNCHANGED,
    Verdict.CONFLICT: Fate.DROPPED,
}
"""How an event is marked that is dropped with a verdict."""

UNKEYED: Final = {
    "bypass": Verdict.BYPASSED,
    "discard": Verdict.DISCARDED,
    "dead": Verdict.DEAD,
}
"""The verdict of an event without a key, by the action of its plan."""

# Made once: looking up a member of an enum is slow, and an audit judges millions of events.
_CLAIM: Final = Action.CLAIM
_DELIVERED: Final = Verdict.DELIVERED
_SEND: Final = Step(Action.SEND, _DELIVERED)
_SEND_CONFLICT: Final = Step(Action.SEND, Verdict.CONFLICT)
_SEND_UNPROTECTED: Final = Step(Action.SEND, _DELIVERED, is_unprotected=True)
_BURY_UNKEYED: Final = Step(Action.BURY, Verdict.DEAD, "unkeyable")
_DUPLICATE: Final = Step(Action.SETTLE, Verdict.DUPLICATE)
_CLAIM_ENTITY: Final = Step(Action.CLAIM_ENTITY, _DELIVERED)


def first_step(plan: Plan, policy: Policy) -> Step:
    """Return the first step of an event."""
    if plan.parts:
        return Step(_CLAIM, _DELIVERED, "", plan)
    if plan.action == "discard" and (plan.refused or not policy.is_shadow):
        return Step(Action.SETTLE, Verdict.DISCARDED)
    if plan.action == "dead" and not policy.is_shadow:
        return _BURY_UNKEYED
    return Step(Action.SEND, UNKEYED[plan.action])


def after_claim(
    plan: Plan, answer: ClaimAnswer, policy: Policy, *, is_conflict: bool = False
) -> Step:
    """
    Return the step after the store's *answer* to the claim of *plan*.

    *is_conflict*: another event has its key, with other content, so it is claimed under a key of
    its own. An entity that another worker holds leads to the same step as a key.
    """
    # What goes to the dead letters unsent is not forwarded in shadow mode, either.
    forwards = policy.is_shadow and plan.action != "dead"
    match answer:
        case Claim():
            return _after_grant(plan, answer, policy, is_conflict=is_conflict)
        case Duplicate():
            return Step(Action.SEND, Verdict.DUPLICATE) if forwards else _DUPLICATE
        case Mismatch():
            return Step(_CLAIM, Verdict.CONFLICT, "", plan.in_conflict(answer.key))
        case Busy():
            return Step(Action.SEND if forwards else Action.RETURN, Verdict.BUSY)
        case NoAnswer():
            if not policy.sends_without_store:
                return Step(Action.RETURN, Verdict.FAILED)
            return _BURY_UNKEYED if plan.action == "dead" else _SEND_UNPROTECTED


def _after_grant(plan: Plan, claim: Claim, policy: Policy, *, is_conflict: bool) -> Step:
    if plan.action == "dead":
        return _BURY_UNKEYED
    if not policy.is_shadow:
        most = policy.max_attempts
        if most is not None and max([held.attempts for held in claim.held]) > most:
            verdict = Verdict.CONFLICT if is_conflict else Verdict.DEAD
            return Step(Action.BURY, verdict, "attempts")
        if is_conflict and plan.rule.on_conflict == "dead":
            return Step(Action.BURY, Verdict.CONFLICT, "conflict")
        if is_conflict and plan.rule.on_conflict == "duplicate":
            return Step(Action.DROP, Verdict.CONFLICT)
    if plan.entity:
        return _CLAIM_ENTITY
    return _SEND_CONFLICT if is_conflict else _SEND


def after_entity(
    plan: Plan, state: EntityState, now_ms: int, policy: Policy, *, is_conflict: bool = False
) -> Step:
    """
    Return the step after the entity was claimed, with the *state* in its record.

    *now_ms* is the store's time.
    """
    verdict = state.judge(plan, now_ms)
    if verdict is None:
        return _SEND_CONFLICT if is_conflict else _SEND
    if verdict is not Verdict.CONFLICT:
        return Step(Action.SEND if policy.is_shadow else Action.DROP, verdict)
    is_sent = policy.is_shadow or plan.rule.on_conflict == "deliver"
    return Step(Action.SEND if is_sent else Action.BURY, verdict, "version")
