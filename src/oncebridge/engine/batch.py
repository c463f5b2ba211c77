"""
A batch while the gateway processes it: columns, and an object for each event that needs one.

The same position (row) in each column of a `Batch` is one event. An event has a `BatchEntry` only
if there is more to know about it than its columns hold: several keys, an entity, a conflict,
an earlier attempt, a send that failed. Nothing here calls a store or a sink.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Self, TypeVar

from msgspec import Struct

from oncebridge.base.clock import Dice, ms
from oncebridge.dead_letters.api import DeadLetter
from oncebridge.engine.backlog import DecidedEvent, PendingWrite
from oncebridge.engine.decide import Step
from oncebridge.engine.hooks import Trace, guarded
from oncebridge.engine.leases import Lease, Leases
from oncebridge.engine.memos import NO_STATE, EntityState, Memo, first_memos
from oncebridge.engine.settings import Settings
from oncebridge.engine.verdict import First, Outcome, Verdict
from oncebridge.events.event import Event, Unreadable, read
from oncebridge.events.key import Part, conflict_key
from oncebridge.events.rules import Plan, RuleSet, Terms
from oncebridge.sinks.api import Delivery
from oncebridge.stores.api import (
    Claim,
    Commit,
    Commits,
    Fate,
    Held,
    Memory,
    Wants,
    folded,
)

if TYPE_CHECKING:
    from oncebridge.engine.ordering import EntityTurn

_T = TypeVar("_T")
_IN_PLACE_MS = 12 * 3_600_000
_NOT_READ = Unreadable(b"", "", "")

_log = logging.getLogger("oncebridge")

Arrival = bytes | Event | Unreadable

Settled = Callable[[int, Outcome], None]
"""Called with the index and the outcome of each arrival of a batch."""


def picked(column: list[_T], rows: Sequence[int]) -> list[_T]:
    """Return the values of *rows*, which are in the order of arrival, so that all are a column."""
    return column if len(rows) == len(column) else [*map(column.__getitem__, rows)]


def now_s() -> float:
    """Return the running loop's monotonic time, in seconds."""
    return asyncio.get_running_loop().time()


class Batch(Struct, eq=False):
    """The arrivals of one call as columns, their outcomes, and the time there is."""

    arrivals: Sequence[Arrival]
    arrived_ms: int
    settled: Settled | None
    in_place: bool
    all_leases: Leases
    loop: asyncio.AbstractEventLoop
    """Kept: asking for the running loop is a system call in Python 3.11."""
    now: Callable[[], float]
    began: float
    ends: float | None
    """The end of the caller's time, if that is limited."""
    latest: float
    """Until when a claim may last: 2 s beyond the caller's time."""
    patient_until: float

    events: list[Event | Unreadable]
    terms: list[Terms | None]
    """Those of the rule; None for events that have an entry from the start."""
    keys: list[bytes]
    """The only key of each event; empty for events that have an entry from the start."""
    hashes: list[bytes]
    """The content to compare; empty if the rule compares none."""
    leases: list[Lease | None]
    outcomes: list[Outcome | None]

    entries: "dict[int, BatchEntry]" = {}
    """By row, for events with more to know than these columns."""
    common_terms: Terms | None = None
    """Those of all events, if they are the same."""
    has_memos: bool = False
    """Claims carry the id and the time of the first arrival."""
    turns: "dict[bytes, EntityTurn]" = {}
    """Its turns in the entity queues, where entities are kept in order."""
    traces: Sequence[Trace | None] = ()
    sent: set[int] = set()
    """Rows that were passed to the sink, whatever the result."""
    forwarded: set[int] = set()
    """Rows that the sink took."""

    @classmethod
    def of(
        cls,
        arrivals: Sequence[Arrival],
        within: timedelta | None,
        patience: timedelta,
        settled: Settled | None,
        leases: Leases,
        *,
        in_place: bool,
        arrived_ms: int,
    ) -> Self:
        """Return a batch that begins now."""
        loop = asyncio.get_running_loop()
        now, count = loop.time, len(arrivals)
        began = now()
        ends, latest = None, math.inf
        patient_until = began + patience.total_seconds() if patience else 0.0
        if within is not None:
            ends = began + within.total_seconds()
            latest, patient_until = ends + 2, min(patient_until, ends)
        return cls(
            arrivals,
            arrived_ms,
            settled,
            in_place,
            leases,
            loop,
            now,
            began,
            ends,
            latest,
            patient_until,
            [_NOT_READ] * count,
            [None] * count,
            [b""] * count,
            [b""] * count,
            [None] * count,
            [None] * count,
        )

    # --- reading -------------------------------------------------------------------------

    def read(self, rules: RuleSet, settings: Settings) -> None:
        """Fill the columns: parse bytes, apply the rules."""
        limits, bare, apart = settings.limits, settings.bare, rules.apart
        known, find, events = rules.known_terms, rules.terms, self.events
        common: Terms | None = None
        for row, arrival in enumerate(self.arrivals):
            event: Event | Unreadable
            if type(arrival) is bytes or isinstance(arrival, bytes):
                event = read(arrival, limits=limits, bare=bare, apart=apart)
            else:
                event = arrival
            events[row] = event
            if type(event) is Event and event.replay_name is None:
                kind = event.source, event.detail_type
                terms = known[kind] if kind in known else find(event)
                key = terms.key_of(event) if terms.key_of is not None else None
                if key is not None:
                    self.terms[row] = common = terms
                    self.keys[row] = key
                    if terms.hash_of is not None:
                        self.hashes[row] = terms.hash_of(event)
                    continue
            plan = rules.plan_arrival(event, shadow=settings.mode == "shadow")
            self.entries[row] = BatchEntry(self, row, event, plan, plan.parts, plan.entity)
        if common is not None and self.terms.count(common) == len(self.terms):
            self.common_terms = common

    # --- rows ------------------------------------------------------------------------------

    def entry(self, row: int) -> "BatchEntry":
        """Return the entry of a row; one that had none leaves what it shares with others."""
        entry = self.entries.get(row)
        if entry is None:
            key, hash_, terms, event = (
                self.keys[row],
                self.hashes[row],
                self.terms[row],
                self.events[row],
            )
            assert terms is not None  # noqa: S101 - otherwise it has an entry
            plan = terms.plan_with(key, hash_)
            entry = BatchEntry(self, row, event, plan, plan.parts, b"")
            lease = self.leases[row]
            if lease is not None:
                self.all_leases.split(lease, (key,))
                memo = entry.first_memo() if self.has_memos else b""
                entry.held = (Held(key, lease.generation, 1, memo),)
                entry.since_ms = lease.now_ms
            self.entries[row] = entry
        return entry

    def own_leases(self, rows: Sequence[int]) -> list[Lease]:
        """Return the leases of *rows*, which share them with no other row from now on."""
        entries, by_row = self.entries, self.leases
        shared = by_row[rows[0]]
        if not entries and shared is not None and len(shared.keys) == len(rows):
            return [shared]
        plain = [row for row in rows if row not in entries]
        if plain and (shared := by_row[plain[0]]) is not None and len(shared.keys) > len(plain):
            self.all_leases.split(shared, [self.keys[row] for row in plain])
        leases = [*dict.fromkeys(map(by_row.__getitem__, rows))]
        leases += [entries[row].entity_lease for row in rows if row in entries]
        return [lease for lease in leases if lease is not None]

    def names_of(self, row: int) -> list[bytes]:
        """Return the keys of all records of an event, its entity's included."""
        entry = self.entries.get(row)
        return entry.names() if entry is not None else [self.keys[row]]

    def key_of(self, row: int) -> bytes:
        """Return the identifying key of an event; empty if it has none."""
        entry = self.entries.get(row)
        return entry.key if entry is not None else self.keys[row]

    def parts_of(self, row: int) -> tuple[Part, ...]:
        """Return the keys of an event, with what a store needs to decide about them."""
        terms = self.terms[row]
        if terms is None or row in self.entries:
            return self.entries[row].parts
        return (Part(self.keys[row], self.hashes[row], terms.slide_ms),)

    def keep_ms_of(self, row: int) -> int:
        """Return how long the records of an event are kept while it is not done."""
        terms = self.terms[row]
        if terms is None or row in self.entries:
            return self.entries[row].keep_ms
        return terms.spans[0].window_ms

    def first_arrival(self, row: int) -> First:
        """Return this arrival, as the first of its kind."""
        event = self.events[row]
        return First(event.id if isinstance(event, Event) else None, self.arrived_ms)

    def sent_as(self, row: int) -> bytes:
        """Return the key that an event is sent with, if that is not its own."""
        entry = self.entries.get(row)
        if entry is not None:
            return entry.plan.sent_as if entry.plan.sent_as != entry.key else b""
        hash_ = self.hashes[row]
        return conflict_key(self.keys[row], hash_) if hash_ else b""

    # --- what is asked of the store ----------------------------------------------------------

    def wants(
        self, rows: Sequence[int], token: bytes, generation: bytes, lease_ms: int, *, memos: bool
    ) -> Wants:
        """Return the claims of *rows*, as one call under one token and one generation."""
        self.has_memos = memos
        memo = first_memos(picked(self.events, rows), self.arrived_ms) if memos else b""
        if (terms := self.common_terms) is not None and not self.entries:
            return Wants(
                picked(self.keys, rows),
                token,
                generation,
                lease_ms,
                terms.spans[0].window_ms,
                memo,
                picked(self.hashes, rows) if terms.hash_of is not None else b"",
                terms.slide_ms,
            )
        parts = [self.parts_of(row) for row in rows]
        flat = [part for own in parts for part in own]
        return Wants(
            [part.key for part in flat],
            token,
            generation,
            lease_ms,
            folded([self.keep_ms_of(row) for row in rows]),
            memo,
            folded([part.hash for part in flat]),
            folded([part.slide_ms for part in flat]),
            [len(own) for own in parts] if len(flat) > len(rows) else None,
        )

    def commits(self, rows: Sequence[int], fate: Fate) -> Commits:
        """Return the commits of all claimed keys of *rows*, each under its own generation."""
        leases = {*map(self.leases.__getitem__, rows)}
        if len(leases) == 1 and (terms := self.common_terms) is not None and not self.entries:
            lease = leases.pop()
            if lease is None:
                return Commits([])
            span, keys = terms.spans[0], picked(self.keys, rows)
            return Commits(keys, lease.generation, fate, span.window_ms, span.hard_ms)
        held: list[tuple[bytes, bytes, int, int]] = []
        for row in rows:
            lease, terms = self.leases[row], self.terms[row]
            if lease is None:
                continue
            if terms is not None and row not in self.entries:
                span = terms.spans[0]
                held.append((self.keys[row], lease.generation, span.window_ms, span.hard_ms))
            else:
                entry = self.entries[row]
                held += [
                    (one.key, one.generation, span.window_ms, span.hard_ms)
                    for one, span in zip(entry.held, entry.plan.spans, strict=True)
                ]
        if not held:
            return Commits([])
        keys, generations, windows, hards = map(list, zip(*held, strict=True))
        return Commits(keys, folded(generations), fate, folded(windows), folded(hards))

    def deliveries(self, rows: Sequence[int], route: str, ends: float) -> list[Delivery]:
        """Return what the sink is asked to send; *ends* is when its call is cancelled."""
        entries, events, leases = self.entries, self.events, self.leases
        keys, hashes, traces = self.keys, self.hashes, self.traces
        # Plain events are events and claimed: whatever is not has an entry.
        return [
            entries[row].delivery(route, ends)
            if row in entries
            else Delivery(
                events[row],  # type: ignore[arg-type]
                keys[row],
                leases[row].generation,  # type: ignore[union-attr]
                1,
                route,
                None,
                False,
                b"",
                ends,
                self.trace_of(row) if traces else "",
                self.sent_as(row) if hashes[row] else b"",
            )
            for row in rows
        ]

    def trace_of(self, row: int) -> str:
        """Record that an event is sent now; return the `traceparent` to send with it."""
        trace = self.traces[row] if self.traces else None
        return guarded("", trace.sending) if trace is not None else ""

    # --- time --------------------------------------------------------------------------------

    def report(self, index: int, outcome: Outcome) -> None:
        """Report an outcome to the caller, if it asked for that."""
        if self.settled is not None:
            try:
                self.settled(index, outcome)
            except Exception:  # noqa: BLE001 - a callback must never cost an event
                _log.exception("oncebridge.settled_failed")

    def lease_ms(self, lease_ms: int) -> int:
        """Shorten the lease to the caller's time plus 2 s: the next worker need not wait."""
        if self.ends is None:
            return lease_ms
        return max(min(lease_ms, int((self.latest - self.now()) * 1000)), 1)

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
    """An event of a batch that needs more than the columns, and what is known about it so far."""

    batch: Batch
    row: int
    event: Event | Unreadable
    plan: Plan
    parts: tuple[Part, ...]
    entity: bytes
    """`parts` and `entity` are those of the plan."""
    held: tuple[Held, ...] = ()
    """The records of its claim; none if it has no claim."""
    attempt: int = 1
    since_ms: int = 0
    """When it was first claimed, by the store's clock; 0 if that is not known."""
    entity_lease: Lease | None = None
    store_offset_ms: float = 0.0
    """The store's clock minus ours."""
    state_before: EntityState = NO_STATE
    duplicate_of: First | None = None
    """The arrival that this one is a duplicate of."""
    matched_key: bytes = b""
    """The key that the store knew."""
    duplicates: "list[int] | tuple[()]" = ()
    """The rows of its duplicates in the batch."""
    sent_as: bytes = b""
    """The key it was sent with, if that is not its own."""
    passed_before: int = 0
    """How many sends had succeeded when this one was sent."""
    turn: float | None = None
    """The turn under a rate limit with which it was sent."""
    next_step: Step | None = None
    """What the decision says, once its claim is answered."""
    tries_sink: bool = False
    """It tries whether a sink that was down is available again."""
    success_verdict: Verdict = Verdict.DELIVERED
    is_conflict: bool = False
    """Its key is known with other content."""
    maybe_delivered: bool = False
    """An earlier send may have reached the sink."""
    unprotected: bool = False
    error: str = ""
    why: str = ""
    """The reason for its verdict, if the verdict alone does not say it."""

    # --- what the plan says ------------------------------------------------------------

    @property
    def key(self) -> bytes:
        """The identifying key, that of the last tier; empty if there is none."""
        return self.parts[-1].key if self.parts else b""

    @property
    def keep_ms(self) -> int:
        return self.plan.keep_ms if self.parts else 0

    @property
    def is_undeliverable(self) -> bool:
        """True if it goes to the dead letters without being sent."""
        return self.plan.action == "dead" and bool(self.parts)

    def mark_duplicate(self, key: bytes, first: First | None) -> None:
        """Record that it is a duplicate of *first*, known by *key*."""
        self.matched_key = key
        self.duplicate_of = first
        self.success_verdict = Verdict.DUPLICATE

    def mark_conflict(self, plan: Plan) -> None:
        """Continue as an event of its own, with *plan*: its key is known with other content."""
        self.plan = plan
        self.parts = plan.parts
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

    @property
    def lease(self) -> Lease | None:
        return self.batch.leases[self.row]

    def set_claim(self, claim: Claim, generation: bytes) -> None:
        """Record that the event's keys are claimed; *generation* is that of a new record."""
        self.held = claim.held
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
        return self.lease is not None and self.lease.is_lost

    def age_ms(self) -> int:
        """Return how long ago the event was first claimed, by the store's clock."""
        lease = self.lease
        if lease is None:
            return 0
        held_ms = (self.batch.now() - lease.heard_s) * 1000
        return lease.now_ms - self.since_ms + int(held_ms)

    def is_held_until(self, when: float) -> bool:
        return all(
            not lease.is_lost and lease.ends >= when
            for lease in (self.lease, self.entity_lease)
            if lease is not None
        )

    # --- memos, records and deliveries -------------------------------------------------

    def first_memo(self) -> bytes:
        (memo,) = first_memos((self.event,), self.batch.arrived_ms)
        return memo

    def last_memo(self, error: str, counted: int) -> bytes:
        memo = Memo.read(self.held[-1].memo) if self.held else Memo()
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
        first = self.batch.first_arrival(self.row)
        return [
            PendingWrite(
                one,
                DecidedEvent(
                    hashes[one.key],
                    first,
                    since,
                    one.key == self.key and one.fate is Fate.DELIVERED,
                ),
            )
            for one in asked
        ]

    def delivery(self, route: str, ends: float) -> Delivery:
        assert isinstance(self.event, Event)  # noqa: S101 - an unreadable event is never sent
        plan = self.plan
        sent_as = plan.sent_as
        if sent_as != self.key:
            self.sent_as = sent_as
        return Delivery(
            self.event,
            self.key,
            self.held[-1].generation if self.held else b"",
            self.attempt,
            route,
            plan.version[1] if plan.version else None,
            self.unprotected,
            plan.about,
            ends,
            self.batch.trace_of(self.row),
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
            if self.held and not self.is_undeliverable
            else 0,
            self.maybe_delivered,
            now_ms,
        )


def _writable(text: str) -> str:
    """Return text that can be encoded: the messages of a driver may contain lone surrogates."""
    return text.encode("utf-8", "replace").decode()
