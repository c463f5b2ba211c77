"""
The state of a batch while the gateway processes it, and the memos that records keep.

A `BatchEntry` is one event of a batch, together with its duplicates in the same batch. Nothing
here calls a store or a sink.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from oncebridge.base.clock import Dice, ms
from oncebridge.base.durations import format_duration
from oncebridge.dead_letters.api import DeadLetter
from oncebridge.engine.backlog import DecidedEvent, PendingWrite
from oncebridge.engine.hooks import Trace, sending
from oncebridge.engine.leases import Lease
from oncebridge.engine.verdict import LONGEST_ID, First, Outcome, Verdict
from oncebridge.events.event import Event, Unreadable
from oncebridge.events.key import Part
from oncebridge.events.rules import OnConflict, Plan, Version
from oncebridge.sinks.api import Delivery
from oncebridge.stores.api import Claim, Commit, Fate, Memory

if TYPE_CHECKING:
    from oncebridge.engine.ordering import EntityTurn

_DUPLICATE: Final = Verdict.DUPLICATE  # an enum's members are slow to find
_DAY_MS: Final = 86_400_000
_IN_PLACE_MS: Final = 12 * 3_600_000

_log = logging.getLogger("oncebridge")

Arrival = bytes | Event | Unreadable

Settled = Callable[[int, Outcome], None]
"""Called with the index and the outcome of each arrival of a batch."""


def now_s() -> float:
    """Return the running loop's monotonic time, in seconds."""
    return asyncio.get_running_loop().time()


class Memo(Struct, frozen=True, array_like=True, omit_defaults=True):
    """The memo in the record of an event: the first arrival, and the last failure."""

    id: str | None = None
    arrived_ms: int = 0
    maybe_delivered: bool = False
    error: str = ""
    counted: int = 0
    """How many attempts had been counted when this was written."""
    since_ms: int = 0
    """When the event was first claimed, by the store's clock."""

    @classmethod
    def read(cls, memo: bytes) -> "Memo":
        """Return the memo that was read; an empty one if another version wrote it."""
        try:
            return _read_memo(memo) if memo else cls()
        except msgspec.MsgspecError:
            return cls()

    def write(self) -> bytes:
        return _write(self)


class EntityState(Struct, frozen=True, array_like=True, omit_defaults=True):
    """
    The memo in the record of an entity: the newest state that was delivered.

    It is valid for the rule's window, from the delivery on. Stale arrivals do not prolong it: a
    wrong version must not hide the right ones for ever.
    """

    kind: str = ""
    version: int | float = 0
    state: str = ""
    """A fingerprint: states may be personal data."""
    at_ms: int = 0
    """When that state was delivered, by the store's clock."""
    noted_ms: int = 0
    """When an event arrived that had the same state and a newer version."""
    stale: int = 0
    """How many stale events have arrived since."""

    @classmethod
    def read(cls, memo: bytes) -> "EntityState":
        try:
            return _read_register(memo) if memo else cls()
        except msgspec.MsgspecError:
            return cls()

    def write(self) -> bytes:
        return _write(self)

    def left_ms(self, plan: Plan, now_ms: int) -> int:
        """Return for how many more milliseconds this state is valid."""
        return max(max(self.at_ms, self.noted_ms) + plan.keep_ms - now_ms, 0)

    def judge(self, plan: Plan, now_ms: int) -> Verdict | None:
        """Return the verdict if the event is not to be sent, or CONFLICT if versions do not compare."""
        if why_incomparable(self, plan, now_ms):
            return Verdict.CONFLICT
        if not self.left_ms(plan, now_ms):
            return None
        if self._is_newer_than(plan, now_ms):
            return Verdict.STALE
        quiet = plan.rule.quiet
        if quiet is None or not self.state or self.state != _fingerprint(plan.state):
            return None
        return Verdict.UNCHANGED if now_ms - self.at_ms < ms(quiet.time) else None

    def after_delivery(self, plan: Plan, now_ms: int) -> "EntityState":
        """Return the state after the event was delivered; a newer one stays."""
        if self.left_ms(plan, now_ms) and self._is_newer_than(plan, now_ms):
            return self
        kind, version = plan.version or ("", 0)
        return EntityState(kind, version, _fingerprint(plan.state), now_ms)

    def after_unchanged(self, plan: Plan, now_ms: int) -> "EntityState":
        """Return the state after an event that changes only the version."""
        if plan.version is None or self._is_newer_than(plan, now_ms):
            return self
        kind, version = plan.version
        return EntityState(kind, version, self.state, self.at_ms, now_ms)

    def after_stale(self) -> "EntityState":
        """Return the state after one more stale event."""
        return replace(self, stale=self.stale + 1)

    def _is_newer_than(self, plan: Plan, now_ms: int) -> bool:
        # Strictly: two events of one version are two events, and both are delivered.
        return (
            plan.version is not None
            and plan.version[0] == self.kind
            and plan.version[1] < self.version
            # A version far ahead may have been recorded before the rule had a bound.
            and not _ahead_ms((self.kind, self.version), plan, now_ms)
        )


def why_incomparable(state: EntityState, plan: Plan, now_ms: int) -> str:
    """Return why the event's version cannot be compared with the entity's; empty if it can."""
    if plan.version is None:
        return ""
    ahead_ms = _ahead_ms(plan.version, plan, now_ms)
    if ahead_ms and plan.rule.latest is not None:
        most = format_duration(plan.rule.latest.ahead)
        return (
            f"its version is {ahead_ms / _DAY_MS:,.1f} days ahead of the store's clock; the rule "
            f"allows {most} (latest.ahead)"
        )
    kind = plan.version[0]
    if state.kind and state.kind != kind and state.left_ms(plan, now_ms):
        return f"its version is of type {kind}, and that of its entity of type {state.kind}"
    return ""


def _ahead_ms(version: Version, plan: Plan, now_ms: int) -> int:
    """Return how far an instant is ahead of the clock; 0 if that is within the rule's bound."""
    kind, value = version
    latest = plan.rule.latest
    if kind != "instant" or latest is None:
        return 0
    ahead_ms = int(value) // 1000 - now_ms
    return ahead_ms if ahead_ms > ms(latest.ahead) else 0


_NOTHING_YET = EntityState()

_read_memo = msgspec.json.Decoder(Memo).decode
_read_register = msgspec.json.Decoder(EntityState).decode
_write = msgspec.json.Encoder().encode


def _writable(text: str) -> str:
    """Return text that can be encoded: the messages of a driver may contain lone surrogates."""
    return text.encode("utf-8", "replace").decode()


def _fingerprint(state: bytes) -> str:
    return blake2b(state, digest_size=16).hexdigest() if state else ""


def first_arrival(memo: bytes) -> First | None:
    """Return the first arrival, from a record's memo."""
    if not memo:
        return None
    read = Memo.read(memo)
    return First(read.id, read.arrived_ms)


class Batch:
    """The arrivals of one call, their outcomes, and the time there is."""

    __slots__ = (
        "arrivals",
        "began",
        "ends",
        "entries",
        "has_sent",
        "in_place",
        "loop",
        "now",
        "outcomes",
        "patient_until",
        "settled",
        "turns",
        "undeliverable",
        "unkeyed",
    )

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        within: timedelta | None,
        patience: timedelta,
        settled: Settled | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        self.arrivals = arrivals
        self.settled = settled
        self.in_place = in_place
        # Kept: asking for the running loop is a system call in Python 3.11.
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self.began = self.now()
        self.turns: dict[bytes, EntityTurn] = {}
        """Its turns in the entity queues, where entities are kept in order."""
        self.outcomes: list[Outcome | None] = [None] * len(arrivals)
        self.entries: list[BatchEntry] = []
        self.unkeyed: list[BatchEntry] = []
        """Entries without a key to claim."""
        self.undeliverable: list[BatchEntry] = []
        """Entries that go to the dead letters without being sent."""
        self.has_sent = False
        self.ends = None if within is None else self.began + within.total_seconds()
        until = self.began + patience.total_seconds() if patience else 0.0
        self.patient_until = until if self.ends is None else min(until, self.ends)

    def report(self, index: int, outcome: Outcome) -> None:
        """Report an outcome to the caller, if it asked for that."""
        if self.settled is not None:
            try:
                self.settled(index, outcome)
            except Exception:  # noqa: BLE001 - a callback must never cost an event
                _log.exception("oncebridge.settled_failed")

    def latest(self) -> float:
        """Return until when a claim may last: 2 s beyond the caller's time."""
        return math.inf if self.ends is None else self.ends + 2

    def lease_ms(self, lease_ms: int) -> int:
        """Shorten the lease to the caller's time plus 2 s: the next worker need not wait."""
        if self.ends is None:
            return lease_ms
        return max(min(lease_ms, int((self.latest() - self.now()) * 1000)), 1)

    def send_time(self, longest_s: float, margin_s: float) -> float:
        """Return how many seconds a send may take; 0 or less if it is too late."""
        if self.ends is None:
            return longest_s
        return min(longest_s, self.ends - self.now() - margin_s)

    def is_patient(self) -> bool:
        """Return whether to wait in place for a busy key."""
        return bool(self.patient_until) and self.now() < self.patient_until

    def is_over(self) -> bool:
        return self.ends is not None and self.now() >= self.ends

    def give_up_ms(self, chosen: timedelta | None, keep_ms: int) -> int:
        """
        Return the age at which an event that fails is given up.

        By default that is its window. If the source retries in place, events queued after it
        wait, and the window would be too long.
        """
        if chosen is not None:
            return ms(chosen)
        return min(keep_ms, _IN_PLACE_MS) if self.in_place else keep_ms


class BatchEntry(Struct, eq=False):
    """One event of a batch, and what is known about it so far."""

    batch: Batch
    index: int
    event: Event | Unreadable
    plan: Plan
    parts: tuple[Part, ...]
    entity: bytes
    """`parts` and `entity` are those of the plan."""
    arrived_ms: int
    claim: Claim | None = None
    claimed_at: float = 0.0
    """When the claim was answered, by the running loop's time."""
    attempt: int = 1
    since_ms: int = 0
    """When it was first claimed, by the store's clock; 0 if that is not known."""
    lease: Lease | None = None
    entity_lease: Lease | None = None
    store_offset_ms: float = 0.0
    """The store's clock minus ours."""
    state_before: EntityState = _NOTHING_YET
    duplicate_of: First | None = None
    """The arrival that this one is a duplicate of."""
    matched_key: bytes = b""
    """The key that the store knew."""
    duplicates: "list[BatchEntry] | tuple[()]" = ()
    is_sent: bool = False
    """It was passed to the sink, whatever the result."""
    sent_as: bytes = b""
    """The key it was sent with, if that is not its own."""
    passed_before: int = 0
    """How many sends had succeeded when this one was sent."""
    tries_sink: bool = False
    """It tries whether a sink that was down is available again."""
    turn: float | None = None
    """Its turn under a rate limit, once it is reserved."""
    success_verdict: Verdict = Verdict.DELIVERED
    is_conflict: bool = False
    """Its key is known with other content."""
    maybe_delivered: bool = False
    """An earlier send may have reached the sink."""
    forwarded: bool = False
    unprotected: bool = False
    settled: bool = False
    error: str = ""
    why: str = ""
    """The reason for its verdict, if the verdict alone does not say it."""
    trace: Trace | None = None

    # --- what the plan says ------------------------------------------------------------

    @property
    def key(self) -> bytes:
        """The identifying key, that of the last tier; empty if there is none."""
        return self.parts[-1].key if self.parts else b""

    @property
    def is_undeliverable(self) -> bool:
        """True if it goes to the dead letters without being sent."""
        return self.plan.action == "dead" and bool(self.parts)

    @property
    def keep_ms(self) -> int:
        return self.plan.keep_ms if self.parts else 0

    @property
    def on_conflict(self) -> OnConflict:
        return self.plan.rule.on_conflict

    @property
    def first(self) -> First:
        """Return this arrival, as the first of its kind."""
        return First(self.event.id if isinstance(self.event, Event) else None, self.arrived_ms)

    def mark_duplicate(self, key: bytes, first: First | None) -> None:
        """Record that it is a duplicate of *first*, known by *key*."""
        self.matched_key = key
        self.duplicate_of = first
        self.success_verdict = _DUPLICATE

    def mark_conflict(self, key: bytes) -> None:
        """Continue as an event of its own: *key* is known with other content."""
        self.plan = self.plan.in_conflict(key)
        self.parts = self.plan.parts
        self.is_conflict = True
        self.success_verdict = Verdict.CONFLICT

    def names(self) -> list[bytes]:
        """Return the keys of all records of this event, its entity's included."""
        names = [part.key for part in self.parts]
        if self.entity:
            names.append(self.entity)
        return names

    def parts_not_in(self, other: "BatchEntry") -> tuple[Part, ...]:
        """Return the tiers that *other*, delivered as the same event, does not have."""
        if self.parts[-1].key != other.parts[-1].key:
            return ()
        known = {part.key for part in other.parts}
        return tuple(part for part in self.parts if part.key not in known)

    # --- what the claim says -----------------------------------------------------------

    def set_claim(
        self, claim: Claim, lease: Lease, heard_at: float, generation: bytes, lost_ms: int
    ) -> None:
        """
        Record that the event's keys are claimed; *generation* is that of a new record.

        If the store lost its records, at *lost_ms*, the event may have been delivered before.
        """
        if lost_ms:
            self.unprotected = claim.now_ms - lost_ms < self.keep_ms
        self.claim = claim
        self.claimed_at = heard_at
        self.lease = lease
        if len(claim.held) > 1 or claim.held[0].attempts > 1:
            self.attempt = max([held.attempts for held in claim.held])
        last = claim.held[-1]
        if last.generation == generation and self.attempt == 1:
            self.since_ms = claim.now_ms
            return
        memo = Memo.read(last.memo)
        # An attempt that wrote no memo died, perhaps after the sink's yes.
        self.maybe_delivered = memo.maybe_delivered or memo.counted != self.attempt - 1
        self.error = memo.error
        self.since_ms = memo.since_ms or memo.arrived_ms or claim.now_ms

    @property
    def is_lost(self) -> bool:
        """True if another worker has taken the event over."""
        return self.lease is not None and self.lease.lost

    def age_ms(self) -> int:
        """Return how long ago the event was first claimed, by the store's clock."""
        if self.claim is None:
            return 0
        held_ms = (self.batch.now() - self.claimed_at) * 1000
        return self.claim.now_ms - self.since_ms + int(held_ms)

    def is_held_until(self, when: float) -> bool:
        return all(
            not lease.lost and lease.ends >= when
            for lease in (self.lease, self.entity_lease)
            if lease is not None
        )

    # --- memos, records and deliveries -------------------------------------------------

    def first_memo(self) -> bytes:
        event_id = self.event.id if isinstance(self.event, Event) else None
        # Longer ids are cut: the memo is stored with every key.
        # A tuple is written as a `Memo` is, and faster.
        return _write((event_id[:LONGEST_ID] if event_id else None, self.arrived_ms))

    def last_memo(self, error: str, counted: int) -> bytes:
        memo = Memo.read(self.claim.held[-1].memo) if self.claim else Memo()
        text = _writable(error)[:200]
        return Memo(
            memo.id, memo.arrived_ms, self.maybe_delivered, text, counted, self.since_ms
        ).write()

    def memories(self, parts: Sequence[Part], fate: Fate, dice: Dice) -> list[Memory]:
        """Return records of *parts* of this event, to be written without a claim."""
        windows = {
            part.key: span.window_ms
            for part, span in zip(self.plan.parts, self.plan.spans, strict=True)
        }
        return [
            Memory(part.key, generation, fate, windows[part.key], part.hash, self.first_memo())
            for part, generation in zip(parts, dice.tokens(len(parts)), strict=True)
        ]

    def pending_writes(self, asked: Sequence[Commit | Memory], since: float) -> list[PendingWrite]:
        """Return *asked* as pending writes of this event, which was decided at *since*."""
        hashes = {part.key: part.hash for part in self.parts}
        return [
            PendingWrite(
                one,
                DecidedEvent(
                    hashes[one.key],
                    self.first,
                    since,
                    one.key == self.key and one.fate is Fate.DELIVERED,
                ),
            )
            for one in asked
        ]

    def delivery(self, route: str, ends: float) -> Delivery:
        assert isinstance(self.event, Event)  # noqa: S101 - an unreadable event is never sent
        plan, claim = self.plan, self.claim
        sent_as = plan.sent_as
        if sent_as != self.key:
            self.sent_as = sent_as
        return Delivery(
            self.event,
            self.key,
            claim.held[-1].generation if claim else b"",
            self.attempt,
            route,
            plan.version[1] if plan.version else None,
            self.unprotected,
            plan.about,
            ends,
            sending(self.trace) if self.trace is not None else "",
            self.sent_as,
        )

    def letter(self, reason: str, route: str, now_ms: int) -> DeadLetter:
        if isinstance(self.event, Unreadable):
            reason, message = self.event.reason, self.event.message
        else:
            message = self.why or self.error or self.plan.message
            reason = "not-allowed" if self.plan.refused else reason
        return DeadLetter(
            self.event.raw,
            reason,
            _writable(message),
            route,
            self.plan.rule.name,
            self.key,
            # The claim that found too many attempts sent nothing.
            (self.attempt - (reason == "attempts"))
            if self.claim and not self.is_undeliverable
            else 0,
            self.maybe_delivered,
            now_ms,
        )


def commits_of(entries: Sequence[BatchEntry], fate: Fate) -> list[Commit]:
    """Return the commits of all claimed parts of *entries*, each under its own generation."""
    return [
        Commit(held.key, held.generation, fate, span.window_ms, span.hard_ms)
        for entry in entries
        if entry.claim
        for held, span in zip(entry.claim.held, entry.plan.spans, strict=True)
    ]
