"""Makes a history row of an arrival, with bounded length."""

from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import replace

from oncebridge.engine.causes import Cause
from oncebridge.engine.hooks import Decision
from oncebridge.events.event import Event, Unreadable
from oncebridge.events.summary import ENTITIES, body_of, entity_of, topic_of
from oncebridge.observe.history import HistoryRow
from oncebridge.observe.masking import Mask

_SHORT, _LONG = 128, 300
"""The greatest length of texts and of reasons."""


def row_of(number: int, decision: Decision, event: Event, cause: Cause | None) -> HistoryRow:
    """Return the row of *event*, which the decision is about."""
    outcome = decision.outcome
    first = outcome.first
    return HistoryRow(
        number,
        decision.arrived_ms,
        decision.route,
        outcome.verdict.value,
        outcome.rule,
        outcome.key,
        (event.id or "")[:_SHORT],
        event.source[:_SHORT],
        event.detail_type[:_SHORT],
        topic_of(event)[:_SHORT],
        entity_of(event)[:_SHORT],
        (event.account or "")[:_SHORT],
        (event.region or "")[:_SHORT],
        (event.replay_name or "")[:_SHORT],
        (event.time or "")[:_SHORT],
        len(event.raw),
        outcome.reason[:_LONG],
        (first.id or "")[:_SHORT] if first is not None else "",
        first.arrived_ms if first is not None else 0,
        cause.value if cause is not None else "",
        decision.took_s * 1000,
        decision.attempt,
        outcome.forwarded,
        outcome.unprotected,
        sent_as=outcome.sent_as,
    )


def row_of_refused(number: int, decision: Decision) -> HistoryRow:
    """Return the row of input that is not an event, without its content."""
    outcome, event = decision.outcome, decision.event
    reason = event.reason if isinstance(event, Unreadable) else ""
    return HistoryRow(
        number,
        decision.arrived_ms,
        decision.route,
        outcome.verdict.value,
        rule=outcome.rule,
        key=outcome.key,
        size=len(event.raw),
        reason=(outcome.reason or reason)[:_LONG],
        took_ms=decision.took_s * 1000,
        attempt=decision.attempt,
        forwarded=outcome.forwarded,
        unprotected=outcome.unprotected,
    )


_ENVELOPE: Final = {
    "id": "id",
    "source": "source",
    "detail_type": "detail-type",
    "account": "account",
    "region": "region",
    "replay": "replay-name",
    "time": "time",
}


class RowMask:
    """Applies a mask to the fields of rows other than the payload."""

    def __init__(self, mask: Mask | None) -> None:
        def hides(*path: str) -> bool:
            return mask is not None and mask.hides(*path)

        hidden = [field for field, name in _ENVELOPE.items() if hides(name)]
        self._blank = dict.fromkeys(hidden, "")
        if "id" in hidden:
            self._blank["first_id"] = ""
        if "detail_type" in hidden:
            self._blank["topic"] = ""
        names = (*ENTITIES, "topicName")
        self._entities = [n for n in names if hides("detail", n) or hides("detail", "eventBody", n)]

    def __bool__(self) -> bool:
        return bool(self._blank or self._entities)

    @property
    def hide_topics(self) -> bool:
        """Return True if topics may be masked."""
        return "topic" in self._blank or "topicName" in self._entities

    @property
    def hide_entities(self) -> bool:
        """Return True if entities may be masked."""
        return bool(self._entities)

    def blanked(self, row: HistoryRow, event: Event) -> HistoryRow:
        """Return *row* without masked fields."""
        blank = self._blank
        bodies = (body_of(event.detail), event.detail)
        if any(self._is_at(name, body, row) for name in self._entities for body in bodies):
            blank = {**blank, "entity": ""}
        if "topicName" in self._entities and not event.detail_type:
            blank = {**blank, "topic": ""}
        return replace(row, **blank) if blank else row

    def _is_at(self, name: str, body: Mapping[str, Any], row: HistoryRow) -> bool:
        value = body.get(name)
        return type(value) is str and bool(value) and value[:_SHORT] == row.entity
