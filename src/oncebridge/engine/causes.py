"""
Why an event arrived again: the causes of duplicates, from what two arrivals have in common.

`oncebridge audit` (for recordings), `oncebridge explain` (for one event) and a running gateway (in
its counters) all use these names.
"""

from enum import StrEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.engine.verdict import LONGEST_ID
from oncebridge.events.event import Event


class Cause(StrEnum):
    """Why an arrival is a duplicate, or looks like one."""

    REDELIVERY = "redelivery"
    RE_EMISSION = "re-emission"
    SECOND_INTEGRATION = "second-integration"
    SECOND_BUS = "second-bus"
    REPLAY = "replay"
    DOUBLE_EMISSION = "double-emission"
    OUT_OF_ORDER = "out-of-order"
    ID_REUSED = "id-reused"
    UNKNOWN = "unknown"


MEANINGS: Final[dict[Cause, str]] = {
    Cause.REDELIVERY: "the same envelope id: a queue, rule or target sent it again",
    Cause.RE_EMISSION: "the same content under a new envelope id: its producer published it again",
    Cause.SECOND_INTEGRATION: "the same content from another source: two integrations overlap",
    Cause.SECOND_BUS: "the same content by another account or Region: two buses carry it",
    Cause.REPLAY: "it comes out of an archive",
    Cause.DOUBLE_EMISSION: "the same state of the same entity again, too soon to be news",
    Cause.OUT_OF_ORDER: "a newer state of the same entity was there before it",
    Cause.ID_REUSED: "the envelope id of another event, with different content",
    Cause.UNKNOWN: "an envelope id is not known, or the content is not that of the first",
}


class Sighting(Struct, frozen=True, gc=False):
    """The fields of an arrival that tell the cause of a duplicate."""

    id: str
    source: str
    account: str
    region: str
    replay: str
    """The name of the replay; empty if it is not one."""

    @classmethod
    def of(cls, event: Event) -> "Sighting":
        """Return the fields of *event*."""
        return cls(
            event.id or "",
            event.source,
            event.account or "",
            event.region or "",
            event.replay_name or "",
        )


def duplicate_cause(first: Sighting, later: Sighting, *, id_was_seen: bool = False) -> Cause:
    """
    Return why *later*, a duplicate of *first*, arrived.

    *id_was_seen*: another arrival of the same event had the id before, even if not the first one:
    a copy may be sent again, too. If the first came from the same replay, the replay is not the
    cause. A field that one of the two does not have counts as equal: a transformer may have
    removed it.

    `oncebridge.audit.findings` has the same rules in SQL.
    """
    if later.replay and later.replay != first.replay:
        return Cause.REPLAY
    if id_was_seen or (later.id and later.id == first.id):
        return Cause.REDELIVERY
    if _differ(later.source, first.source):
        return Cause.SECOND_INTEGRATION
    if _differ(later.account, first.account) or _differ(later.region, first.region):
        return Cause.SECOND_BUS
    return Cause.RE_EMISSION if later.id and first.id else Cause.UNKNOWN


def likely_cause(first_id: str | None, later: Sighting) -> tuple[Cause, bool]:
    """
    Return the likely cause of a duplicate, and whether it is a guess.

    A store knows only the id of the first arrival, as `remembered`; the other fields are treated
    as equal.
    """
    known = first_id or ""
    is_same = known == remembered(later.id)
    first = replace(later, id=later.id if is_same else known, replay="")
    cause = duplicate_cause(first, later)
    return cause, cause not in (Cause.REDELIVERY, Cause.REPLAY)


def remembered(id_: str | None) -> str | None:
    """Return an id as a record remembers it."""
    return id_[:LONGEST_ID] if id_ else id_


def _differ(one: str, other: str) -> bool:
    return bool(one and other) and one != other
