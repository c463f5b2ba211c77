"""
Where claims live.

A store keeps one record per key and changes it in the few ways of the table below
(`oncebridge.stores.transitions` is that table as code). It knows nothing of events, rules or
sinks. What a store must promise:

* **A batch is the primitive.** Every method takes a sequence and answers one result
  per item, in order. The keys of one call are distinct: the gateway folds repeats
  first. A batch need not be atomic as a whole.
* **Each item is one atomic step.** All parts of one `Want` are claimed together, or
  none is. Commits, releases and extensions decide per record.
* **Every call may be repeated**, by us or by a client library: a claim recognises its
  own token, a commit its own generation.
* **Expected outcomes are values.** Only a store that cannot answer raises, and then a
  `StoreUnavailable` may be tried again with the same request. Where a store could
  answer for some items only, the others get `NoAnswer`.
* **Every call ends.** A store bounds its own round trips and raises `StoreUnavailable`
  when they take too long; nobody else does.
* **The store's clock decides**, read inside the atomic step. Times are whole
  milliseconds.
* **Physical removal is housekeeping.** A record past its end counts as absent whether
  or not it has been purged, and purging looks at `keep_until` alone.

Two fences, for two reasons. Release and extend undo or prolong a hold, so only the
present holder may do them: they carry the *token*, fresh for every claim. A commit
states a fact (the sink said yes) that stays true after a take-over: it carries the
*generation*, which a take-over keeps and which changes when the key starts anew.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, IntEnum
from typing import Literal, Protocol, Self, TypeVar

from msgspec import Struct

from oncebridge.events.key import Part


class Fate(IntEnum):
    """How a record came to be done."""

    DELIVERED = 1
    DEAD = 2
    STALE = 3
    UNCHANGED = 4
    DROPPED = 5
    """Other content under a known key, where the rule says to drop that."""


class Record(Struct, frozen=True, gc=False):
    """
    What a store keeps under one key.

    A record with a `fate` is done until `until_ms`; one without is claimed until
    `until_ms` and free afterwards.
    """

    key: bytes
    token: bytes
    """Names the present hold; empty when released or done."""
    generation: bytes
    """Names this life of the key; kept on take-over."""
    until_ms: int
    """End of the lease, earliest retry after a release, or end of the window."""
    attempts: int
    """Raised at the claim, so that an event that kills its worker is still counted."""
    hash: bytes
    """Fingerprint of the content; empty when the rule does not compare."""
    fate: Fate | None
    memo: bytes
    """A few bytes of the gateway's own, returned with every answer."""
    hard_until_ms: int
    """Sliding windows only: the end that no repeat can push further. Else 0."""
    keep_until_ms: int
    """When the record may be physically removed."""


# --- what is asked ---------------------------------------------------------------


class Want(Struct, frozen=True, gc=False):
    """
    Ask to hold all *parts* together.

    The last part is the one that identifies the event; those before it are further
    tiers. *token* and *generation* are 16 fresh random bytes each; a resend repeats them.
    """

    parts: tuple[Part, ...]
    token: bytes
    generation: bytes
    lease_ms: int
    keep_ms: int
    """How long a record that is not done stays after its last write."""
    memo: bytes = b""


class Commit(Struct, frozen=True, gc=False):
    """State that this life of the key ended in *fate*, and remember it for *window_ms*."""

    key: bytes
    generation: bytes
    fate: Fate
    window_ms: int
    hard_ms: int = 0
    """Sliding windows only: how far repeats may push the end, counted from now."""
    memo: bytes | None = None


class Release(Struct, frozen=True, gc=False):
    """Give a hold back; the key may be claimed again after *delay_ms*."""

    key: bytes
    token: bytes
    delay_ms: int = 0
    keep_ms: int = 0
    memo: bytes | None = None
    unsent: bool = False
    """Nothing was sent: this attempt does not count."""


class Extension(Struct, frozen=True, gc=False):
    """Prolong a hold to now + *lease_ms*."""

    key: bytes
    token: bytes
    lease_ms: int


class Memory(Struct, frozen=True, gc=False):
    """Mark a key done without a claim: a further tier, after an outage, or to warm a store."""

    key: bytes
    generation: bytes
    fate: Fate
    window_ms: int
    hash: bytes = b""
    memo: bytes = b""


# --- what is answered ------------------------------------------------------------


class Held(Struct, frozen=True, gc=False):
    """One record of a claim, as the holder needs it."""

    key: bytes
    generation: bytes
    attempts: int
    memo: bytes


class Claim(Struct, frozen=True, gc=False):
    """The caller holds every part of its want until the lease ends."""

    token: bytes
    held: tuple[Held, ...]
    now_ms: int
    """The store's clock at the claim."""


class Duplicate(Struct, frozen=True, gc=False):
    """*key* is done and its window lasts."""

    key: bytes
    fate: Fate
    memo: bytes


class Busy(Struct, frozen=True, gc=False):
    """Somebody else holds a part, for *left_ms* more unless it is extended."""

    key: bytes
    left_ms: int


class Mismatch(Struct, frozen=True, gc=False):
    """*key* is done with other content."""

    key: bytes
    memo: bytes


class NoAnswer(Struct, frozen=True, gc=False):
    """The store could not answer for this item; it may be asked again."""

    reason: str


class Reply(Enum):
    """The short answers."""

    COMMITTED = "committed"
    ALREADY = "already"
    """This very life of the key was committed before."""
    FENCED = "fenced"
    """Not yours any more; nothing was changed."""
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
    """What the gateway asks of a store while events pass."""

    async def claim(self, wants: Sequence[Want]) -> list[ClaimAnswer]: ...

    async def commit(self, commits: Sequence[Commit]) -> list[CommitAnswer]: ...

    async def release(self, releases: Sequence[Release]) -> list[ReleaseAnswer]: ...

    async def extend(self, extensions: Sequence[Extension]) -> list[ExtendAnswer]: ...

    async def remember(self, memories: Sequence[Memory]) -> list[RememberAnswer]: ...


class Store(Protocol):
    """
    The operations of PROTOCOL §3.

    `oncebridge.testing.StoreContract` is the meaning of this class: a store is ready
    for production when it passes.
    """

    async def open(self) -> None:
        """Connect and check that the backend can keep the promises; safe to repeat."""
        ...

    async def claim(self, wants: Sequence[Want]) -> list[ClaimAnswer]:
        """
        Take hold of keys.

        | the record is        | effect                          | answer    |
        | -------------------- | ------------------------------- | --------- |
        | held by this token   | none                            | Claim     |
        | absent or expired    | first attempt, new generation   | Claim     |
        | free, same content   | one more attempt, memo kept     | Claim     |
        | free, other content  | first attempt, new generation   | Claim     |
        | claimed by another   | none                            | Busy      |
        | done, same content   | none (a sliding window slides)  | Duplicate |
        | done, other content  | none                            | Mismatch  |

        With several parts: the last part done decides first; then any part claimed;
        then any other content; then any part done; else all are claimed.
        """
        ...

    async def commit(self, commits: Sequence[Commit]) -> list[CommitAnswer]:
        """Mark keys done; the lease may be over and the token another's."""
        ...

    async def release(self, releases: Sequence[Release]) -> list[ReleaseAnswer]:
        """Return holds back."""
        ...

    async def extend(self, extensions: Sequence[Extension]) -> list[ExtendAnswer]:
        """Prolong holds, also such as have just run out but were not taken over."""
        ...

    async def remember(self, memories: Sequence[Memory]) -> list[RememberAnswer]:
        """Mark keys done that are absent, free or expired."""
        ...

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        """Read what is there, without changing anything."""
        ...

    async def forget(self, keys: Sequence[bytes]) -> list[bool]:
        """
        Remove records, so that their events pass again. For operators.

        Refused (False) while a live claim stands, and where there is nothing.
        """
        ...

    async def purge(self, limit: int = 1000) -> int:
        """Remove about *limit* records that are past keeping, and tell how many went."""
        ...

    async def now_ms(self) -> int:
        """Tell the store's time."""
        ...

    async def aclose(self) -> None:
        """Let go of connections and files; safe to repeat."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...


class Portable(Store, Protocol):
    """A store whose records can be carried to another one."""

    async def scan(self, place: bytes = b"", limit: int = 1000) -> tuple[list[Record], bytes]:
        """
        Read about *limit* records from *place* on, and tell the next place; none: the end.

        In no order. What stands there during the whole scan is seen at least once.
        """
        ...

    async def load(self, records: Sequence[Record]) -> list[RememberAnswer]:
        """Put *records* as they are where nothing stands; their times are this store's."""
        ...


_T = TypeVar("_T")


def rounds(items: Iterable[_T], key: Callable[[_T], bytes]) -> list[list[_T]]:
    """Split *items* so that no key stands twice in one call, in as few calls as possible."""
    split: list[list[_T]] = []
    times: dict[bytes, int] = {}
    for item in items:
        name = key(item)
        at = times[name] = times.get(name, -1) + 1
        if at == len(split):
            split.append([])
        split[at].append(item)
    return split
