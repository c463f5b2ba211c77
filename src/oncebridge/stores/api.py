"""
The contract of a store: the place where claims are kept.

A store keeps one record per key and changes it only as the tables below say
(`oncebridge.stores.transitions` has the same rules as code). It knows nothing about events,
rules or sinks. A store must guarantee:

* **Every method takes a batch.** It takes a sequence and returns one answer per item, in
  order. The keys of one call are distinct: the gateway merges duplicates first. The batch as
  a whole does not have to be atomic.
* **Each item is one atomic step.** All parts of a `Want` are claimed together, or none is.
  Commits, releases and extensions are decided for each record on its own.
* **Every call may be repeated**, by the gateway or by a client library. A claim recognises
  its own token, a commit its own generation.
* **Expected results are return values.** A store raises only if it cannot answer at all. After
  `StoreUnavailable` the caller may send the same request again. If the store can answer for
  some items only, it returns `NoAnswer` for the others.
* **Every call ends.** The store limits the time of its own round trips and raises
  `StoreUnavailable` when they take too long. The gateway does not do this for it.
* **The store's clock decides.** It is read inside the atomic step. Times are whole
  milliseconds.
* **Removing records is housekeeping.** A record past its end counts as absent, purged or not.
  `purge` removes records by `keep_until_ms` only.

A record is fenced in two ways. Release and extend end or prolong a hold, so only the current
holder may do them: they carry the *token*, which is new for every claim. A commit records a
fact (the sink has accepted the event) that stays true if another worker has taken the claim
over: it carries the *generation*, which a take-over keeps, and which changes when the key
starts again from nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, IntEnum
from typing import Literal, Protocol, Self, TypeVar

from msgspec import Struct

from oncebridge.events.key import Part


class Fate(IntEnum):
    """The result with which a record was marked done."""

    DELIVERED = 1
    DEAD = 2
    STALE = 3
    UNCHANGED = 4
    DROPPED = 5
    """Other content under a known key, and the rule says to drop such events."""


class Record(Struct, frozen=True, gc=False):
    """
    The state that a store keeps for one key.

    A record with a `fate` is done until `until_ms`. A record without one is claimed until
    `until_ms`, and free afterwards.
    """

    key: bytes
    token: bytes
    """Identifies the current hold; empty when released or done."""
    generation: bytes
    """Identifies this life of the key: from its first claim until it expires or is forgotten."""
    until_ms: int
    """End of the lease, earliest retry after a release, or end of the window."""
    attempts: int
    """Counted at the claim, so that an attempt counts even if it kills its worker."""
    hash: bytes
    """Fingerprint of the content; empty if the rule does not compare content."""
    fate: Fate | None
    memo: bytes
    """A few bytes that belong to the gateway; returned with every answer."""
    hard_until_ms: int
    """Sliding windows only: the end that no duplicate can move. Otherwise 0."""
    keep_until_ms: int
    """From when on the record may be removed."""


# --- requests --------------------------------------------------------------------


class Want(Struct, frozen=True, gc=False):
    """
    Request to claim all *parts* together.

    The last part identifies the event; the parts before it are further tiers. *token* and
    *generation* are 16 new random bytes each. A request that is sent again has the same ones.
    """

    parts: tuple[Part, ...]
    token: bytes
    generation: bytes
    lease_ms: int
    keep_ms: int
    """How long a record that is not done is kept after the end of its lease."""
    memo: bytes = b""


class Commit(Struct, frozen=True, gc=False):
    """Request to mark the key done with *fate*, and to remember that for *window_ms*."""

    key: bytes
    generation: bytes
    fate: Fate
    window_ms: int
    hard_ms: int = 0
    """Sliding windows only: how far duplicates may move the end, counted from now."""
    memo: bytes | None = None


class Release(Struct, frozen=True, gc=False):
    """Request to end a hold; the key may be claimed again after *delay_ms*."""

    key: bytes
    token: bytes
    delay_ms: int = 0
    keep_ms: int = 0
    memo: bytes | None = None
    unsent: bool = False
    """True if nothing was sent, so that this attempt does not count."""


class Extension(Struct, frozen=True, gc=False):
    """Request to prolong a hold until now + *lease_ms*."""

    key: bytes
    token: bytes
    lease_ms: int


class Memory(Struct, frozen=True, gc=False):
    """
    Request to mark a key done without a claim.

    Used for further tiers, after an outage, and to fill a new store.
    """

    key: bytes
    generation: bytes
    fate: Fate
    window_ms: int
    hash: bytes = b""
    memo: bytes = b""


# --- answers ---------------------------------------------------------------------


class Held(Struct, frozen=True, gc=False):
    """One record of a granted claim."""

    key: bytes
    generation: bytes
    attempts: int
    memo: bytes


class Claim(Struct, frozen=True, gc=False):
    """The claim is granted: the caller holds all parts until the lease ends."""

    token: bytes
    held: tuple[Held, ...]
    now_ms: int
    """The store's clock at the claim."""


class Duplicate(Struct, frozen=True, gc=False):
    """*key* is done, and its window has not ended."""

    key: bytes
    fate: Fate
    memo: bytes


class Busy(Struct, frozen=True, gc=False):
    """Another worker holds a part, for *left_ms* more unless it extends its lease."""

    key: bytes
    left_ms: int


class Mismatch(Struct, frozen=True, gc=False):
    """*key* is done with other content."""

    key: bytes
    memo: bytes


class NoAnswer(Struct, frozen=True, gc=False):
    """The store could not answer for this item; the caller may send it again."""

    reason: str


class Reply(Enum):
    """The answers that carry no data."""

    COMMITTED = "committed"
    ALREADY = "already"
    """This generation of the key was committed before."""
    FENCED = "fenced"
    """The caller does not hold the key any more; nothing was changed."""
    RELEASED = "released"
    EXTENDED = "extended"
    REMEMBERED = "remembered"
    KNOWN = "known"
    """The key is claimed or done; nothing was changed."""


ClaimAnswer = Claim | Duplicate | Busy | Mismatch | NoAnswer
CommitAnswer = Literal[Reply.COMMITTED, Reply.ALREADY, Reply.FENCED] | NoAnswer
ReleaseAnswer = Literal[Reply.RELEASED, Reply.FENCED] | NoAnswer
ExtendAnswer = Literal[Reply.EXTENDED, Reply.FENCED] | NoAnswer
RememberAnswer = Literal[Reply.REMEMBERED, Reply.KNOWN] | NoAnswer


class Claims(Protocol):
    """The part of `Store` that the gateway needs to deliver events."""

    async def claim(self, wants: Sequence[Want]) -> list[ClaimAnswer]: ...

    async def commit(self, commits: Sequence[Commit]) -> list[CommitAnswer]: ...

    async def release(self, releases: Sequence[Release]) -> list[ReleaseAnswer]: ...

    async def extend(self, extensions: Sequence[Extension]) -> list[ExtendAnswer]: ...

    async def remember(self, memories: Sequence[Memory]) -> list[RememberAnswer]: ...


class Store(Protocol):
    """
    A store: every operation on records.

    The test suite `oncebridge.testing.StoreContract` defines what each operation must do. A
    store that passes it is ready for production.
    """

    async def open(self) -> None:
        """
        Connect, and check that the backend can keep the guarantees; safe to repeat.

        Raise `ConfigError` if an operator has to change something, `StoreUnavailable` if the
        backend does not answer now.
        """
        ...

    async def claim(self, wants: Sequence[Want]) -> list[ClaimAnswer]:
        """
        Claim keys.

        | the record is              | effect                          | answer    |
        | -------------------------- | ------------------------------- | --------- |
        | held by this token         | none                            | Claim     |
        | absent or expired          | first attempt, new generation   | Claim     |
        | free, same content         | one more attempt, memo kept     | Claim     |
        | free, other content        | first attempt, new generation   | Claim     |
        | claimed by another token   | none                            | Busy      |
        | done, same content         | none (a sliding window slides)  | Duplicate |
        | done, other content        | none                            | Mismatch  |

        With several parts, the first of these that applies decides: the last part is done with
        the same content (Duplicate); a part is claimed (Busy); a part is done with other
        content (Mismatch); a part is done (Duplicate). Otherwise all parts are claimed.
        """
        ...

    async def commit(self, commits: Sequence[Commit]) -> list[CommitAnswer]:
        """
        Mark keys done.

        Fenced by generation only: the lease may have ended, and another worker may hold the key.
        """
        ...

    async def release(self, releases: Sequence[Release]) -> list[ReleaseAnswer]:
        """End holds, so that the keys may be claimed again. Fenced by token."""
        ...

    async def extend(self, extensions: Sequence[Extension]) -> list[ExtendAnswer]:
        """
        Prolong holds. Fenced by token.

        A lease that has ended can be extended as long as no other worker has claimed the key.
        """
        ...

    async def remember(self, memories: Sequence[Memory]) -> list[RememberAnswer]:
        """Mark keys done that are absent, free or expired; leave other keys as they are."""
        ...

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        """Return the records of *keys*, None for each that has none; change nothing."""
        ...

    async def forget(self, keys: Sequence[bytes]) -> list[bool]:
        """
        Remove records, so that their events are delivered again. For operators.

        Return for each key whether a record was removed: False while a worker holds the key,
        and if there is no record.
        """
        ...

    async def purge(self, limit: int = 1000) -> int:
        """Remove about *limit* records that are past `keep_until_ms`; return how many."""
        ...

    async def now_ms(self) -> int:
        """Return the store's time."""
        ...

    async def aclose(self) -> None:
        """Close connections and files; safe to repeat."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...


class Portable(Store, Protocol):
    """A store whose records can be copied to another store."""

    async def scan(self, place: bytes = b"", limit: int = 1000) -> tuple[list[Record], bytes]:
        """
        Return about *limit* records from *place* on, and the next place; empty at the end.

        The order is not defined. A record that exists during the whole scan is returned at
        least once.
        """
        ...

    async def load(self, records: Sequence[Record]) -> list[RememberAnswer]:
        """Write *records* as they are, where the key is absent; times are by this store's clock."""
        ...


_T = TypeVar("_T")


def rounds(items: Iterable[_T], key: Callable[[_T], bytes]) -> list[list[_T]]:
    """Split *items* into as few lists as possible, so that no key is in one list twice."""
    split: list[list[_T]] = []
    times: dict[bytes, int] = {}
    for item in items:
        name = key(item)
        at = times[name] = times.get(name, -1) + 1
        if at == len(split):
            split.append([])
        split[at].append(item)
    return split
