"""
Where events go that can never succeed: the dead letters.

An event is put here whole, with the reason, before it is acknowledged. Putting is
durable when it returns; when it cannot be done it raises, and the event comes again.
The same event may be put twice (a worker died in between); it then has the same key.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from msgspec import Struct

from oncebridge.events.event import REASONS

_UNKEYED: Final = frozenset({*REASONS, "unkeyable", "not-allowed"})


class DeadLetter(Struct, frozen=True, gc=False):
    """One event that was given up, as it was received."""

    raw: bytes
    reason: str
    """One word: why (`rejected`, `attempts`, `too-old`, `conflict`, `version`, `unkeyable`,
    `not-allowed`, `unrouted`, or a reason of `event`)."""
    message: str
    """What went wrong, in words; never part of the payload."""
    route: str
    rule: str
    key: bytes
    """For what has none by its rule, it stands for the bytes and the reason (`is_keyed`)."""
    attempts: int
    maybe_delivered: bool
    """An earlier attempt ended without a clear answer."""
    buried_ms: int
    """When it was put here, by this host's clock."""
    number: int = 0
    """Its number in the dead letters, given when it is put."""

    @property
    def is_keyed(self) -> bool:
        """True if it is an event with a key by its rule: only such were ever sent."""
        return bool(self.key) and self.reason not in _UNKEYED


class DeadLetters(Protocol):
    """A durable place for what was given up."""

    async def open(self) -> None:
        """Connect; safe to repeat."""
        ...

    async def put(self, letters: Sequence[DeadLetter]) -> None:
        """Keep all of *letters* for good, or raise `DeadLetterError` and keep none."""
        ...

    async def list(self, *, after: int = 0, limit: int = 100) -> list[DeadLetter]:
        """Read letters numbered above *after*, oldest first."""
        ...

    async def drop(self, numbers: Sequence[int]) -> int:
        """Remove letters by number, and tell how many were there."""
        ...

    async def aclose(self) -> None:
        """Let go of connections and files; safe to repeat."""
        ...
