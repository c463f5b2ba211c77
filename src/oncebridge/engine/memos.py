"""What records keep besides their state: the first arrival of an event, the newest state of an entity."""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from oncebridge.base.clock import ms
from oncebridge.base.durations import format_duration
from oncebridge.engine.verdict import LONGEST_ID, First, Verdict
from oncebridge.events.event import Event, Unreadable
from oncebridge.events.rules import Plan, Version

_T = TypeVar("_T")
_DAY_MS: Final = 86_400_000


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
        return _read(memo, _read_memo, _NO_MEMO)

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
        return _read(memo, _read_state, NO_STATE)

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


NO_STATE: Final = EntityState()
"""The state of an entity of which no event was delivered."""

_NO_MEMO: Final = Memo()
_read_memo = msgspec.json.Decoder(Memo).decode
_read_state = msgspec.json.Decoder(EntityState).decode
_write = msgspec.json.Encoder().encode


def _read(memo: bytes, read: Callable[[bytes], _T], otherwise: _T) -> _T:
    """Return the memo that was read; an empty one if there is none, or another version wrote it."""
    try:
        return read(memo) if memo else otherwise
    except msgspec.MsgspecError:
        return otherwise


def _fingerprint(state: bytes) -> str:
    return blake2b(state, digest_size=16).hexdigest() if state else ""


def first_arrival(memo: bytes) -> First | None:
    """Return the first arrival, from a record's memo."""
    if not memo:
        return None
    read = Memo.read(memo)
    return First(read.id, read.arrived_ms)


def first_memos(events: Sequence[Event | Unreadable], arrived_ms: int) -> list[bytes]:
    """Return the memos of the first arrivals of events."""
    # Longer ids are cut: the memo is stored with every key.
    # A tuple is written as a `Memo` is, and faster.
    return [
        _write((event.id[:LONGEST_ID], arrived_ms))
        if type(event) is Event and event.id
        else _write((None, arrived_ms))
        for event in events
    ]
