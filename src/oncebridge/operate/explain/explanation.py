"""
The explanation of an event or of a key, and its form as JSON.

`explainer` makes it, and `words` turns it into sentences.
"""

from datetime import timedelta
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from oncebridge.base.durations import format_duration
from oncebridge.base.formatting import iso_time
from oncebridge.dead_letters.api import DeadLetter
from oncebridge.engine.memos import first_arrival
from oncebridge.engine.causes import Cause
from oncebridge.engine.verdict import First, Verdict
from oncebridge.events.differences import FieldChange
from oncebridge.events.event import Event
from oncebridge.events.exact_float import ExactFloat
from oncebridge.operate.explain.expected_verdict import ExpectedVerdict, RecordStatus
from oncebridge.operate.identity import EventKey
from oncebridge.operate.operator_log import OperatorAction, OperatorActions, is_operator_log

Action = Literal["deduplicate", "bypass", "discard", "dead"]


class Explanation(Struct, frozen=True, kw_only=True):
    """The explanation of one event of a file on one route."""

    line: int
    action: Action
    event: Event | None = None
    """None if the record is not an event."""
    reason: str = ""
    """One word, if it is not an event."""
    route: str | None = None
    """None if no route matches it."""
    rule: str | None = None
    scope: str = ""
    """What its rule treats as one source."""
    why: str = ""
    keys: tuple[EventKey, ...] = ()
    sent_as: bytes = b""
    """The `Idempotency-Key` that a receiver is sent."""
    entity_by: str = ""
    """The expression for its entity, if it has one."""
    entity: Any = None
    """Its value; None unless values were asked for."""
    entity_key: bytes = b""
    version_by: str = ""
    version: Any = None
    judged: ExpectedVerdict | None = None
    """None if there is no store to read."""
    standings: tuple[RecordStatus, ...] = ()
    """The status of the record of each key, and of the entity if that is held."""
    letter: DeadLetter | None = None
    """Its dead letter, if there is one."""
    acts: OperatorActions = OperatorActions()
    """Operator actions on it."""
    entity_acts: OperatorActions = OperatorActions()
    """Operator actions on its entity, for any event."""
    paused: bool = False
    paused_by: OperatorAction | None = None
    same_as: int | None = None
    """The line of the first event in this file that has one of the keys."""
    same_in: str = ""
    """The name of the file with that line; empty if it is this one."""
    clashes: bool = False
    """That one has different content: this is not a duplicate."""
    on_conflict: str = ""
    """What its rule does with the second of two such events."""
    changes: tuple[FieldChange, ...] | None = None
    """How it differs from that one."""
    cause: Cause | None = None
    is_guess: bool = False
    """Only the id of the first copy is known, so the cause may be another."""

    @property
    def differs(self) -> tuple[str, ...] | None:
        """The paths in which it differs from the one it duplicates."""
        return None if self.changes is None else tuple(one.path for one in self.changes)

    @property
    def standing(self) -> RecordStatus | None:
        """The status of the record that identifies it best: the last one."""
        there = [
            one
            for one in self.standings
            if one.record and not one.is_others and one.key != self.entity_key
        ]
        return there[-1] if there else None

    def standing_of(self, key: bytes) -> RecordStatus | None:
        return next((one for one in self.standings if one.key == key), None)

    def as_json(self, *, canonical: bool = False) -> dict[str, Any]:
        """Return the whole explanation as a JSON object."""
        judged = self.judged
        fields: dict[str, Any] = {
            "line": self.line,
            "route": self.route,
            "id": self.event.id if self.event else None,
            "rule": self.rule,
            "action": self.action,
            "keys": [self._key_as_json(known, canonical=canonical) for known in self.keys],
        }
        if canonical:
            fields["canonical"] = self.keys[-1].canonical if self.keys else None
        fields |= _filled(
            idempotency_key=self.sent_as.hex() or None,
            reason=self.reason or None,
            why=self.why or None,
            entity_by=self.entity_by or None,
            entity=self.entity,
            version_by=self.version_by or None,
            version=self.version,
        )
        fields["verdict"] = judged.verdict.value if judged else None
        fields |= _filled(fate=judged.fate.name.lower() if judged and judged.fate else None)
        if judged is not None and judged.is_shadow:
            fields |= {"mode": "shadow", "forwarded": True}
        fields["first"] = _first_as_json(judged.first if judged else None)
        fields["same_as"] = self.same_as
        fields["differs"] = None if self.differs is None else list(self.differs)
        fields["cause"] = self.cause
        return fields | self._more_as_json()

    def _more_as_json(self) -> dict[str, Any]:
        fields = _filled(
            cause_is_sure=None if self.cause is None else not self.is_guess,
            same_in=self.same_in or None,
            changes=None if self.changes is None else [one.as_json() for one in self.changes],
            dead=_letter_as_json(self.letter) if self.letter else None,
        )
        fields["trail"] = acts_as_json(self.acts)
        if self.entity_acts.acts:
            fields["entity_trail"] = acts_as_json(self.entity_acts)
        if self.paused:
            fields["paused"] = True
            fields["paused_by"] = _act_as_json(self.paused_by) if self.paused_by else None
        return fields

    def _key_as_json(self, known: EventKey, *, canonical: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "kind": known.kind,
            "key": known.key.hex(),
            "window": window(known),
        }
        standing = self.standing_of(known.key)
        if standing is not None:
            fields |= _standing_as_json(standing)
        return fields | ({"canonical": known.canonical} if canonical else {})


class KeyExplanation(Struct, frozen=True, kw_only=True):
    """The explanation of one key."""

    key: bytes
    standing: RecordStatus | None = None
    """None if there is no store to read."""
    letter: DeadLetter | None = None
    acts: OperatorActions = OperatorActions()

    @property
    def route(self) -> str | None:
        """The route, if a dead letter has it: a key does not."""
        return (self.letter.route or None) if self.letter else None

    @property
    def first(self) -> First | None:
        record = self.standing.record if self.standing else None
        if record is None or not record.memo or self.is_entity_state or self.is_operator_log:
            return None
        return first_arrival(record.memo)

    @property
    def is_entity_state(self) -> bool:
        """Return whether it looks like the state of an entity."""
        record = self.standing.record if self.standing else None
        if record is None or record.fate is not None:
            return False
        return record.memo.startswith((b'["number"', b'["instant"', b'["",0'))

    @property
    def is_operator_log(self) -> bool:
        """Return whether it is the operator log of an event or a route."""
        record = self.standing.record if self.standing else None
        return record is not None and is_operator_log(record)

    @property
    def is_known(self) -> bool:
        """Return whether anything at all is known."""
        return bool((self.standing and self.standing.record) or self.letter or self.acts.acts)

    @property
    def verdict(self) -> Verdict | None:
        """
        The verdict for an event with this key and the same content.

        None if this key does not stop it: another key may.
        """
        if self.standing is None or self.is_entity_state or self.is_operator_log:
            return None
        return _VERDICTS.get(self.standing.state)

    def as_json(self) -> dict[str, Any]:
        """Return it as a JSON object in the form of an explanation."""
        key: dict[str, Any] = {"kind": None, "key": self.key.hex(), "window": None}
        fields: dict[str, Any] = {
            "route": self.route,
            "rule": (self.letter.rule or None) if self.letter else None,
            "keys": [key | (_standing_as_json(self.standing) if self.standing else {})],
            "verdict": self.verdict,
        }
        record = self.standing.record if self.standing else None
        if record is not None and record.fate is not None:
            fields["fate"] = record.fate.name.lower()
        fields |= {"first": _first_as_json(self.first), "differs": None, "cause": None}
        if self.letter is not None:
            fields["dead"] = _letter_as_json(self.letter)
        return fields | {"trail": acts_as_json(self.acts)}


_VERDICTS: Final = {
    "done": Verdict.DUPLICATE,
    "claimed": Verdict.BUSY,
}


def _filled(**members: Any) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}


def _first_as_json(first: First | None) -> dict[str, Any] | None:
    return None if first is None else {"id": first.id, "arrived": iso_time(first.arrived_ms)}


def _standing_as_json(standing: RecordStatus) -> dict[str, Any]:
    fields: dict[str, Any] = {"state": standing.state}
    record = standing.record
    if record is None:
        return fields
    fields |= {"until": iso_time(record.until_ms), "attempts": record.attempts}
    if standing.is_others:
        fields["of_another"] = True
    if record.fate is not None:
        fields["fate"] = record.fate.name.lower()
    elif standing.state == "claimed":
        fields |= {"held": standing.is_held, "left_ms": standing.left_ms}
    memo = standing.memo
    if memo.error:
        fields["error"] = memo.error
    if memo.maybe_delivered:
        fields["maybe_delivered"] = True
    return fields


def _letter_as_json(letter: DeadLetter) -> dict[str, Any]:
    return {
        "number": letter.number,
        "died": iso_time(letter.buried_ms),
        "reason": letter.reason,
        "message": letter.message,
        "route": letter.route,
        "attempts": letter.attempts,
        "maybe_delivered": letter.maybe_delivered,
    }


def acts_as_json(acts: OperatorActions) -> list[dict[str, Any]]:
    """Return operator actions as JSON, the latest last."""
    return [_act_as_json(act) for act in acts.acts]


def _act_as_json(act: OperatorAction) -> dict[str, Any]:
    fields = {"time": iso_time(act.at_ms), "who": act.who, "verb": act.verb}
    more = {"route": act.route, "reason": act.reason}
    return fields | {name: text for name, text in more.items() if text}


def window(known: EventKey) -> str:
    """Return how long a key is remembered."""
    return lasting(known.window, known.longest)


def lasting(window: timedelta, longest: timedelta | None) -> str:
    """Return how long a window is; *longest* is the end of a sliding one."""
    text = format_duration(window)
    return f"{text}, sliding up to {format_duration(longest)}" if longest else text


def dumps(
    explanation: Explanation | KeyExplanation, *, canonical: bool = False, **more: Any
) -> str:
    """Write an explanation as one line of JSON; *more* goes to its end."""
    fields = (
        explanation.as_json(canonical=canonical)
        if isinstance(explanation, Explanation)
        else explanation.as_json()
    )
    return msgspec.json.encode(fields | more, enc_hook=_exactly).decode()


def _exactly(number: ExactFloat) -> msgspec.Raw:
    return msgspec.Raw(number.text.encode())
