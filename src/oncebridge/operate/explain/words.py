"""
The sentences of an explanation: what happened to an event, and why.

They are for readers who do not know about leases and generations. They state only what is known:
if two causes cannot be distinguished, both are named.
"""

from typing import Final

from oncebridge.base.formatting import iso_time
from oncebridge.dead_letters.api import DeadLetter
from oncebridge.engine.causes import MEANINGS, Cause
from oncebridge.engine.decide import UNKEYED, Action
from oncebridge.engine.verdict import First, Verdict
from oncebridge.operate.explain.expected_verdict import ENDED, ExpectedVerdict, RecordStatus
from oncebridge.operate.explain.explanation import Explanation, KeyExplanation
from oncebridge.operate.operator_log import OperatorAction, OperatorActions
from oncebridge.stores.api import Fate

_PASSED: Final = {
    Fate.DELIVERED: "was delivered{by}",
    Fate.DEAD: "went to the dead letters{on}",
    Fate.STALE: "was not sent{by}: a newer state of the same entity had been delivered",
    Fate.UNCHANGED: "was not sent{by}: the same state of the same entity had just been delivered",
    Fate.DROPPED: "was dropped{by}: another event had the same key with different content",
}
_HERE: Final = {
    Verdict.STALE: "A newer state of the same entity was delivered{by}, so this event is stale"
    "{dropped}.",
    Verdict.UNCHANGED: "The same state of the same entity was delivered{by} just now, so this "
    "event is noise{dropped}.",
    Verdict.BYPASSED: "This event is delivered each time it arrives{by}: {why}.",
    Verdict.DISCARDED: "This event is dropped each time it arrives{on}: {why}.",
    Verdict.DEAD: "This event would go to the dead letters{on}: {why}.",
}


def outcome(fate: Fate, *, route: str = "") -> str:
    """Return the outcome of an event: `was delivered by route crm`."""
    by, on = (f" {word} route {route}" if route else "" for word in ("by", "on"))
    return _PASSED[fate].format(by=by, on=on)


def moment(at_ms: int) -> str:
    """Return a time to the second, in UTC."""
    return f"{iso_time(at_ms)[:19].replace('T', ' ')} UTC"


def cause(explanation: Explanation) -> str:
    """Return the likely cause, with alternatives; empty if there is none."""
    if explanation.cause is None:
        return ""
    if not explanation.is_guess:
        return MEANINGS[explanation.cause].rpartition(": ")[2]
    if explanation.cause is Cause.UNKNOWN:
        return "the cause is not known, as one of the two has no id"
    # Under a rule that separates sources, the first one had the same source.
    other = "another bus" if explanation.scope == "source" else "a second integration or bus"
    return (
        f"its producer published it again, or {other} delivers it too (the store has only the id "
        "of the first copy)"
    )


def summary(explanation: Explanation) -> str:
    """Return what happened to an event, and what would happen to this copy."""
    if explanation.event is None:
        return f"This is not an event, and goes to the dead letters: {explanation.why}."
    if explanation.route is None:
        where = "goes to the dead letters" if explanation.action == "dead" else "is dropped"
        by = f" by rule {explanation.rule}" if explanation.rule else ""
        return f"No route matches this event: it {where}{by}."
    sentences = [
        _shadow_mode(explanation),
        _verdict(explanation),
        _duplicate_cause(explanation),
        _letter(explanation.letter),
    ]
    whom = "" if explanation.keys else ", to events without a key on this route"
    sentences += [_last_action(explanation.acts, whom), _paused(explanation)]
    return " ".join(sentence for sentence in sentences if sentence)


def _shadow_mode(explanation: Explanation) -> str:
    """Return what shadow mode changes; empty if nothing."""
    judged = explanation.judged
    if judged is None or judged.enforced is None:
        return ""
    enforced = judged.enforced
    end = _ENFORCED.get(enforced.verdict, "")
    if enforced.verdict is Verdict.CONFLICT:
        end = _CONFLICTS[enforced.action]
    if not end:
        return ""
    return (
        f"Forwarded anyway: route {explanation.route} is in shadow mode; in enforce mode it {end}."
    )


_CONFLICTS: Final = {
    Action.SEND: "",
    Action.BURY: "would go to the dead letters as a conflict",
    Action.DROP: "would be dropped as a conflict",
}
_ENFORCED: Final = {
    Verdict.DUPLICATE: "would be dropped as a duplicate",
    Verdict.STALE: "would be dropped as stale",
    Verdict.UNCHANGED: "would be dropped as unchanged",
    Verdict.DISCARDED: "would be dropped",
    Verdict.DEAD: "would go to the dead letters",
    Verdict.BUSY: "would be returned to its source as busy",
}


def _verdict(explanation: Explanation) -> str:
    judged, by, on = (
        explanation.judged,
        f" by route {explanation.route}",
        f" on route {explanation.route}",
    )
    if judged is None:
        return _without_store(explanation)
    why = judged.why or explanation.why
    match judged.verdict:
        case Verdict.DUPLICATE:
            assert judged.fate is not None  # noqa: S101 - a duplicate is of something done
            ended = outcome(judged.fate, route=explanation.route or "")
            return f"This event {ended}. {_arrived(judged.first)}".rstrip()
        case Verdict.BUSY:
            return _busy(explanation, judged)
        case Verdict.DELIVERED:
            return _not_yet(explanation.standing, f"it would be delivered{by}")
        case Verdict.CONFLICT if not judged.key:
            return f"This event is a conflict{on}: {why}."
        case Verdict.CONFLICT:
            other = f"{_arrived(judged.first)} " if judged.first else ""
            text = f"Another event has the same key{on}, with different content. {other}"
            return f"{text}This one {_OTHER_CONTENT[judged.action]}."
        case Verdict.DISCARDED | Verdict.DEAD if judged.is_shadow:
            return f"Reason: {why}."
        case _:
            dropped = "" if judged.is_shadow else ": it would be dropped"
            return _HERE[judged.verdict].format(by=by, on=on, why=why, dropped=dropped)


_OTHER_CONTENT: Final = {
    Action.SEND: "is delivered as a separate event",
    Action.BURY: "goes to the dead letters",
    Action.DROP: "is dropped",
}


def _without_store(explanation: Explanation) -> str:
    if explanation.action != "deduplicate":
        return _HERE[UNKEYED[explanation.action]].format(
            by=f" by route {explanation.route}",
            on=f" on route {explanation.route}",
            why=explanation.why,
        )
    if explanation.same_as is None:
        return "It is not known whether this event was delivered: there is no store to read."
    if explanation.clashes:
        return f"{_clash(explanation)}."
    return f"This event has the key of {_place(explanation)}."


def _clash(explanation: Explanation) -> str:
    """Return what happens to two events of a file with one key and different content."""
    text = f"This event has the key of {_place(explanation)}, with different content"
    return f"{text}: it is not a duplicate, and {_SECOND[explanation.on_conflict]}"


_SECOND: Final = {
    "deliver": "both are delivered, the second as a conflict",
    "dead": "the second goes to the dead letters as a conflict",
    "duplicate": "the second is dropped as a conflict",
}


def _place(explanation: Explanation) -> str:
    where = f" of {explanation.same_in}" if explanation.same_in else ""
    return f"the one on line {explanation.same_as}{where}"


def _arrived(first: First | None) -> str:
    if first is None or not first.arrived_ms:
        return ""
    who = f", as {first.id}" if first.id else ""
    return f"Its first copy arrived on {moment(first.arrived_ms)}{who}."


def _busy(explanation: Explanation, judged: ExpectedVerdict) -> str:
    standing = explanation.standing_of(judged.key)
    if standing is None:
        return f"This event is busy: {judged.why}."
    left = f"{standing.left_ms / 1000:.1f} s"
    back = "" if judged.is_shadow else "; until then, copies are returned to the source"
    if judged.key == explanation.entity_key:
        return (
            f"A worker of route {explanation.route} holds the same entity for {left} more, unless it extends "
            f"its lease{back}."
        )
    what = "another event with the same key" if standing.is_others else "this event"
    if standing.is_held:
        return (
            f"A worker of route {explanation.route} holds {what} for {left} more, unless it extends its "
            f"lease{back}. {_arrived(judged.first)}"
        ).rstrip()
    return (
        f"{_failed(standing, what)}; it waits for its next attempt for {left} more. "
        f"{_arrived(judged.first)}"
    ).rstrip()


def _failed(standing: RecordStatus, what: str) -> str:
    if not standing.attempts:  # nothing was sent, so no attempt was counted
        return f"{what[0].upper()}{what[1:]} could not be sent yet{_error(standing)}"
    return f"Attempt {standing.attempts} for {what} failed{_error(standing)}"


def _error(standing: RecordStatus) -> str:
    return f" ({standing.memo.error})" if standing.memo.error else ""


def _not_yet(standing: RecordStatus | None, then: str) -> str:
    if standing is None or standing.record is None:
        return f"The store has no record of this event: {then}."
    if standing.is_over:
        until = moment(standing.record.until_ms)
        return f"This event was remembered until {until}; its window is over, so {then} again."
    if not standing.attempts:
        return f"{_failed(standing, 'this event')}; {then} now."
    tried = f"{standing.attempts} attempt{'s' if standing.attempts != 1 else ''}"
    return f"This event was not delivered after {tried}{_error(standing)}; {then} now."


def _duplicate_cause(explanation: Explanation) -> str:
    """Return why this copy arrived, if there was one before it."""
    judged = explanation.judged
    is_new = judged is not None and judged.verdict is Verdict.DELIVERED
    if explanation.clashes and is_new:
        likely = f" Likely cause: {cause(explanation)}." if explanation.cause else ""
        return f"{_clash(explanation)}.{likely}"
    if explanation.cause is None:
        return ""
    if is_new and explanation.same_as is not None:
        return f"It is a duplicate of {_place(explanation)}: {cause(explanation)}; the one that arrives first is delivered."
    is_repeat = judged is None or judged.verdict is Verdict.DUPLICATE
    if not is_repeat or explanation.clashes:
        return f"Likely cause: {cause(explanation)}."
    drops = " and would be dropped" if judged is not None and not judged.is_shadow else ""
    if explanation.cause is Cause.REDELIVERY and explanation.same_as is None:
        return (
            "This copy has the id of the first one: it is the same copy, or a queue, rule or target "
            f"redelivered it{drops and ', and it would be dropped'}."
        )
    return f"This copy is a duplicate{drops}: {cause(explanation)}."


def _letter(letter: DeadLetter | None) -> str:
    if letter is None:
        return ""
    return f"It is dead letter {letter.number} ({letter.reason})."


def _paused(explanation: Explanation) -> str:
    if not explanation.paused:
        return ""
    by = f", {_act(explanation.paused_by)}" if explanation.paused_by else ""
    return f"The route is paused{by}: nothing is delivered until `oncebridge resume`."


def _last_action(acts: OperatorActions, whom: str = "") -> str:
    """Return the latest operator action; the details list the others."""
    if not acts.acts:
        return ""
    return f"Operator action{whom}: {acts.acts[-1].verb}, {_act(acts.acts[-1])}."


def _act(act: OperatorAction) -> str:
    why = f" ({act.reason})" if act.reason else ""
    return f"by {act.who} on {moment(act.at_ms)}{why}"


# --- by its key ---------------------------------------------------------------------------


def summary_of_key(explanation: KeyExplanation) -> str:
    """Return what the store has under a key."""
    sentences = [
        _standing(explanation),
        _letter(explanation.letter),
        _last_action(explanation.acts),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _standing(explanation: KeyExplanation) -> str:
    standing = explanation.standing
    if standing is None:
        return "There is no store to read."
    record = standing.record
    if record is None:
        return f"The store has no record of this key: {_AS_FAR}. {_OTHER_TIERS} {_HEADER}"
    if explanation.is_operator_log:
        return "This is the operator log of an event or a route, not an event."
    arrived = _arrived(explanation.first)
    match standing.state:
        case "done":
            assert record.fate is not None  # noqa: S101 - that is what done means
            ended = outcome(record.fate, route=explanation.route or "")
            until = f"Duplicates are dropped until {moment(record.until_ms)}."
            return f"The event with this key {ended}. {arrived} {until}".replace("  ", " ")
        case "claimed" if standing.is_held:
            left = f"{standing.left_ms / 1000:.1f} s"
            text = f"A worker holds the event with this key for {left} more, unless it extends its lease."
            return f"{text} {arrived}".rstrip()
        case "claimed":
            return (
                f"{_failed(standing, 'the event with this key')}; it waits for its next attempt "
                f"until {moment(record.until_ms)}. {arrived}"
            ).rstrip()
        case "free" if explanation.is_entity_state:
            return "This is the state of an entity, not an event; no worker holds it."
        case _:
            return f"{_not_yet(standing, _AS_FAR)} {arrived}".rstrip() + f" {_OTHER_TIERS}"


_AS_FAR: Final = "by this key alone, an event that has it would be delivered"
_OTHER_TIERS: Final = "A rule with tiers may know the event by another key."
_HEADER: Final = (
    "It may also be an Idempotency-Key, which is made of key and content if the rule compares "
    "contents."
)


# --- one record ---------------------------------------------------------------------------


def state(standing: RecordStatus) -> str:
    """Return the state of a record that exists."""
    record = standing.record
    assert record is not None  # noqa: S101 - the caller checked
    until = moment(record.until_ms)
    memo = standing.memo
    match standing.state:
        case "done" if record.fate is not None:
            text = f"done, {ENDED[record.fate]}; until {until}"
        case "claimed" if standing.is_held:
            text = f"held by a worker until {until}, attempt {record.attempts}"
        case "claimed":
            text = f"waits for its next attempt until {until}{_tried(record.attempts)}"
        case "free":
            text = f"not held{_tried(record.attempts)}"
        case _:
            text = f"its window ended {until}"
    text += f"; last error: {memo.error}" if memo.error else ""
    if standing.is_others:
        text = f"of another event, with different content: {text}"
    return text + ("; an attempt may have been delivered" if memo.maybe_delivered else "")


def _tried(attempts: int) -> str:
    if not attempts:
        return ""
    return f", after {attempts} attempt{'s' if attempts != 1 else ''}"
