"""What became of an arrival: one word, everywhere the same."""

from enum import StrEnum
from typing import Final

from msgspec import Struct


class Verdict(StrEnum):
    """What can become of an arrival."""

    DELIVERED = "delivered"
    """First of its kind: the sink took it, the store remembers."""
    DUPLICATE = "duplicate"
    """Delivered before, within its window."""
    STALE = "stale"
    """A newer state of the same entity was delivered."""
    UNCHANGED = "unchanged"
    """The same state as the last delivered one, inside the quiet time."""
    CONFLICT = "conflict"
    """Same identity, other content; handled as the rule says."""
    BUSY = "busy"
    """Another worker holds it right now: hand it back, it will come again."""
    FAILED = "failed"
    """The sink or the store could not take it: hand it back, it will come again."""
    DEAD = "dead"
    """It can never succeed, and is kept whole in the dead letters."""
    BYPASSED = "bypassed"
    """A rule says not to deduplicate: forwarded as it is."""
    DISCARDED = "discarded"
    """A rule says to drop it, or no route is for it: not forwarded."""

    __hash__ = str.__hash__  # an enum's own is slow, and verdicts are counted for every event


HANDED_BACK = frozenset({Verdict.BUSY, Verdict.FAILED})
"""The verdicts after which the source must bring the event again."""


LONGEST_ID: Final = 128
"""As long as ids are remembered."""


class First(Struct, frozen=True, gc=False):
    """The first arrival of an event, as far as it is remembered."""

    id: str | None
    """The id of its envelope."""
    arrived_ms: int
    """When it arrived, by the clock of the host that took it."""


class Outcome(Struct, frozen=True, gc=False):
    """What became of one arrival, and what to tell its source."""

    verdict: Verdict
    acknowledge: bool
    """True: the source may forget it. False: the source must bring it again."""
    rule: str = ""
    """The name of the rule that decided."""
    key: bytes = b""
    """What it is known by; empty where the rule does not deduplicate, or it is no event."""
    retry_after_ms: int = 0
    """When handed back: how long to wait before bringing it again."""
    reason: str = ""
    """What stood in the way, in words; never part of the payload."""
    forwarded: bool = False
    """The sink took it, whatever the verdict (in shadow mode it takes duplicates too)."""
    unprotected: bool = False
    """Forwarded while the store was down."""
    first: First | None = None
    """For a duplicate: the arrival that was delivered."""
    blamed: bool = False
    """
    When failed: it was tried, and may be the cause itself. Otherwise the sink, the store or the
    route is, and a source that can wait need not give it back.
    """
    sent_as: bytes = b""
    """The `Idempotency-Key` it was sent with, where that is not *key*: made of key and content."""
