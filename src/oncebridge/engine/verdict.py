"""The outcome of an arrival; its verdict is the same word everywhere."""

from enum import StrEnum
from typing import Final

from msgspec import Struct


class Verdict(StrEnum):
    """The possible outcomes of an arrival."""

    DELIVERED = "delivered"
    """The first of its kind: the sink took it, and the store remembers it."""
    DUPLICATE = "duplicate"
    """Delivered before, within its window."""
    STALE = "stale"
    """A newer state of the same entity was delivered."""
    UNCHANGED = "unchanged"
    """The same state as the last delivered one, inside the quiet time."""
    CONFLICT = "conflict"
    """Same identity, other content; handled as the rule says."""
    BUSY = "busy"
    """Another worker is processing it: returned to the source, to be retried."""
    FAILED = "failed"
    """The sink or the store could not take it: returned to the source, to be retried."""
    DEAD = "dead"
    """It can never succeed, and is stored in the dead letters as it arrived."""
    BYPASSED = "bypassed"
    """A rule says not to deduplicate it: forwarded as it is."""
    DISCARDED = "discarded"
    """A rule says to drop it, or no route matches it: not forwarded."""

    __hash__ = str.__hash__  # an enum's own is slow, and verdicts are counted for every event


HANDED_BACK = frozenset({Verdict.BUSY, Verdict.FAILED})
"""The verdicts after which the source must deliver the event again."""


LONGEST_ID: Final = 128
"""Longer ids are cut when they are stored."""


class First(Struct, frozen=True, gc=False):
    """The first arrival of an event, as far as it is recorded."""

    id: str | None
    """The id of its envelope."""
    arrived_ms: int
    """When it arrived, by the clock of the host that took it."""


class Outcome(Struct, frozen=True, gc=False):
    """The outcome of one arrival, and how to answer its source."""

    verdict: Verdict
    acknowledge: bool
    """True: the source may delete it. False: the source must deliver it again."""
    rule: str = ""
    """The name of the rule that decided."""
    key: bytes = b""
    """Its deduplication key; empty if the rule does not deduplicate, or it is not an event."""
    retry_after_ms: int = 0
    """If it was returned: how long to wait before the retry."""
    reason: str = ""
    """Why, in words; never contains any of the payload."""
    forwarded: bool = False
    """The sink took it, whatever the verdict (in shadow mode it takes duplicates, too)."""
    unprotected: bool = False
    """Forwarded while the store was down."""
    first: First | None = None
    """For a duplicate: the arrival that was delivered."""
    blamed: bool = False
    """
    If it failed: it was tried, and may itself be the cause. Otherwise the sink, the store or the
    route is, and a source that can wait need not return it.
    """
    sent_as: bytes = b""
    """The `Idempotency-Key` it was sent with, if that is not *key*: made of key and content."""
