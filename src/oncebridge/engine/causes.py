"""
Why an event comes again, by what two arrivals of it have in common.

Everybody who names a cause names it by these words: `oncebridge audit` for whole recordings,
`oncebridge explain` for one event, and a gateway that runs for what it counts.
"""

from enum import StrEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.engine.verdict import LONGEST_ID
from oncebridge.events.event import Event


class Cause(StrEnum):
    """Why an arrival is not the first of its kind, or looks as if it were not."""

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
    Cause.ID_REUSED: "the envelope id of another event, with other content",
    Cause.UNKNOWN: "an envelope id is not known, or the content is not that of the first",
}


class Sighting(Struct, frozen=True, gc=False):
    """What of an arrival tells how it came."""

    id: str
    source: str
    account: str
    region: str
    replay: str
    """The name of the replay; empty where it is none."""

    @classmethod
    def of(cls, event: Event) -> "Sighting":
        """Look at how *event* came."""
        return cls(
            event.id or "",
            event.source,
            event.account or "",
            event.region or "",
            event.replay_name or "",
        )


def cause_of_repeat(first: Sighting, later: Sighting, *, id_was_seen: bool = False) -> Cause:
    """
    Name the cause of a repeat: the same event as *first*, later.

    *id_was_seen* says that another arrival of the same event had the id before, be it not
    the first: a copy may be sent again as well. Where the first came out of the same replay,
    the replay is not why it comes again. What one of the two does not say, it does not say
    otherwise: a transformer may have left it out.

    `oncebridge.audit.findings` says the same in SQL.
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
    Name the likely cause of a repeat, and tell whether it is a guess.

    All that a store knows of how the first one came is its id, as `remembered`; the rest is
    taken for equal.
    """
    known = first_id or ""
    is_same = known == remembered(later.id)
    first = replace(later, id=later.id if is_same else known, replay="")
    cause = cause_of_repeat(first, later)
    return cause, cause not in (Cause.REDELIVERY, Cause.REPLAY)


def remembered(id_: str | None) -> str | None:
    """Return an id as a record remembers it."""
    return id_[:LONGEST_ID] if id_ else id_


def _differ(one: str, other: str) -> bool:
    return bool(one and other) and one != other
