"""
The contract of dead letters: the place for events that cannot be delivered.

An event is written here whole, with the reason, before it is acknowledged. `put` returns when
the event is durable. If it raises, the event is not acknowledged, and its source sends it
again. The same event may be put twice, if a worker dies in between; both have the same key.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from msgspec import Struct

from oncebridge.events.event import REASONS

_UNKEYED: Final = frozenset({*REASONS, "unkeyable", "not-allowed"})


class DeadLetter(Struct, frozen=True, gc=False):
    """One event that could not be delivered, as it was received."""

    raw: bytes
    reason: str
    """One word: `rejected`, `attempts`, `too-old`, `conflict`, `version`, `unkeyable`,
    `not-allowed`, `unrouted`, or why it is not an event (`oncebridge.events.event.REASONS`)."""
    message: str
    """What went wrong, as a sentence; never quotes the payload."""
    route: str
    rule: str
    key: bytes
    """The key by its rule. If there is none, a hash of the bytes and the reason (`is_keyed`)."""
    attempts: int
    maybe_delivered: bool
    """True if an attempt ended without a clear answer."""
    buried_ms: int
    """When it was put here, by this host's clock."""
    number: int = 0
    """Its number among the dead letters, assigned by `put`."""

    @property
    def is_keyed(self) -> bool:
        """True if its rule gave it a key; events without a key were never sent."""
        return bool(self.key) and self.reason not in _UNKEYED


class DeadLetters(Protocol):
    """A durable place for events that could not be delivered."""

    async def open(self) -> None:
        """Connect; safe to repeat."""
        ...

    async def put(self, letters: Sequence[DeadLetter]) -> None:
        """Write all *letters* durably, or raise `DeadLetterError` and write none."""
        ...

    async def list(self, *, after: int = 0, limit: int = 100) -> list[DeadLetter]:
        """Return up to *limit* dead letters with numbers above *after*, oldest first."""
        ...

    async def drop(self, numbers: Sequence[int]) -> int:
        """Remove dead letters by number; return how many existed."""
        ...

    async def aclose(self) -> None:
        """Close connections and files; safe to repeat."""
        ...
