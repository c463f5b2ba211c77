"""
The contract of a store: the place where claims are kept.

A store keeps one record per key and changes it only as the tables below say
(`oncebridge.stores.transitions` has the same rules as code). It knows nothing about events,
rules or sinks. A store must guarantee:

* **Every method takes a batch, as columns.** A batch is a list of keys, and for everything else
  one value for all of them or a list with one for each. Values that all items share are sent
  once. There is one answer per item, in order. The keys of one call are distinct: the gateway
  merges duplicates first. The batch as a whole does not have to be atomic. A batch is also a
  sequence of rows (`Want`, `Commit` ...), for code that decides item by item.
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

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, IntEnum
from itertools import chain, repeat
from typing import Any, ClassVar, Final, Generic, Literal, Protocol, Self, TypeVar, Union

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.errors import StoreUnavailable
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

    def shifted(self, by_ms: int) -> "Record":
        """Return the record with its times moved to another clock."""
        return replace(
            self,
            until_ms=self.until_ms + by_ms,
            hard_until_ms=self.hard_until_ms and self.hard_until_ms + by_ms,
            keep_until_ms=self.keep_until_ms + by_ms,
        )


# --- requests, row by row ----------------------------------------------------------


class Want(Struct, frozen=True, gc=False):
    """
    Request to claim all *parts* together.

    The last part identifies the event; the parts before it are further tiers. *token* and
    *generation* are 16 random bytes each, new for every call: the wants of one call may share
    them, as both fence per key and the keys of a call are distinct. Only a request that is sent
    again has the same ones.
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


# --- requests, as columns ------------------------------------------------------------

_V = TypeVar("_V")
_Row = TypeVar("_Row")

Column = Union[_V, list[_V]]  # noqa: UP007 - an alias with a type variable
"""One value for all items of a batch, or a list with one for each."""


class Columns(Struct, Generic[_Row], frozen=True, gc=False):
    """A batch of requests about one key each: a sequence of rows, held as columns."""

    row: ClassVar[Any]
    per_key: ClassVar[frozenset[str]] = frozenset()
    """The columns with one value per key, if that is not one per row."""

    keys: list[bytes]

    @classmethod
    def of(cls, rows: Iterable[_Row]) -> Self:
        """Return *rows* as columns; what they have in common becomes one value."""
        first, *rest = cls.row.__struct_fields__
        found: Sequence[Any] = [*rows]
        columns = [folded([getattr(one, name) for one in found]) for name in rest] if found else ()
        return cls([getattr(one, first) for one in found], *columns)

    @classmethod
    def joined(cls, batches: Sequence[Self]) -> Self:
        """Return several batches as one; their keys have to be distinct."""
        if len(batches) == 1:
            return batches[0]
        rows, keys = [len(one) for one in batches], [len(one.keys) for one in batches]
        return cls(
            *[
                _joined(
                    [getattr(one, name) for one in batches], keys if name in cls.per_key else rows
                )
                for name in cls.__struct_fields__
            ]
        )

    def select(self, positions: Sequence[int]) -> Self:
        """Return the rows at *positions* as a batch of their own."""
        keys = [on for at in positions for on in self.places(at)]
        return type(self)(
            *[
                _selected(getattr(self, name), keys if name in self.per_key else positions)
                for name in self.__struct_fields__
            ]
        )

    def places(self, at: int) -> range:
        """Return where the keys of the row at position *at* are in `keys`."""
        return range(at, at + 1)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, at: int) -> _Row:
        row: _Row = self.row(*[_at(getattr(self, name), at) for name in self.__struct_fields__])
        return row

    def __iter__(self) -> Iterator[_Row]:
        return iter([self[at] for at in range(len(self))])


class Wants(Columns[Want], frozen=True, gc=False):
    """
    A batch of claims: a sequence of `Want`, held as columns.

    The keys of events with several tiers stand together; *sizes* has the number of keys of each
    event. None means that all have one, and so does a list of ones. *hash* and *slide_ms* have one
    value per key, the other columns have one per event.
    """

    row: ClassVar = Want
    per_key: ClassVar = frozenset({"keys", "hash", "slide_ms"})

    token: Column[bytes] = b""
    generation: Column[bytes] = b""
    lease_ms: Column[int] = 0
    keep_ms: Column[int] = 0
    memo: Column[bytes] = b""
    hash: Column[bytes] = b""
    slide_ms: Column[int] = 0
    sizes: list[int] | None = None

    @classmethod
    def of(cls, rows: Iterable[Want]) -> Self:
        """Return *rows* as columns; what they have in common becomes one value."""
        wants = [*rows]
        parts = [part for want in wants for part in want.parts]
        if not wants:
            return cls([])
        columns: list[Any] = [[part.key for part in parts]]
        for name in cls.__struct_fields__[1:-1]:
            holders: Sequence[Any] = parts if name in cls.per_key else wants
            columns.append(folded([getattr(one, name) for one in holders]))
        columns.append([len(want.parts) for want in wants] if len(parts) > len(wants) else None)
        return cls(*columns)

    @classmethod
    def joined(cls, batches: Sequence[Self]) -> Self:
        """Return several batches as one; their keys have to be distinct."""
        if any(one.sizes for one in batches):
            batches = [replace(one, sizes=one.sizes or [1] * len(one.keys)) for one in batches]
        return super().joined(batches)

    def by_key(self, column: Column[_V]) -> Column[_V]:
        """Return a column that has a value per event as one that has a value per key."""
        if self.sizes is None or not isinstance(column, list):
            return column
        return [*chain.from_iterable(map(repeat, column, self.sizes))]

    def places(self, at: int) -> range:
        """Return where the keys of the event at position *at* are in `keys`."""
        if self.sizes is None:
            return range(at, at + 1)
        start = sum(self.sizes[:at])
        return range(start, start + self.sizes[at])

    def __len__(self) -> int:
        return len(self.keys) if self.sizes is None else len(self.sizes)

    def __getitem__(self, at: int) -> Want:
        keys, hash_, slide_ms, places = self.keys, self.hash, self.slide_ms, self.places(at)
        if hash_ or slide_ms:
            parts = tuple([Part(keys[on], _at(hash_, on), _at(slide_ms, on)) for on in places])
        else:
            parts = tuple([Part(keys[on]) for on in places])
        columns: Any = self.token, self.generation, self.lease_ms, self.keep_ms, self.memo
        return Want(parts, *[one[at] if type(one) is list else one for one in columns])


class Commits(Columns[Commit], frozen=True, gc=False):
    """A batch of commits: a sequence of `Commit`, held as columns."""

    row: ClassVar = Commit

    generation: Column[bytes] = b""
    fate: Column[Fate] = Fate.DELIVERED
    window_ms: Column[int] = 0
    hard_ms: Column[int] = 0
    memo: Column[bytes | None] = None


class Releases(Columns[Release], frozen=True, gc=False):
    """A batch of releases: a sequence of `Release`, held as columns."""

    row: ClassVar = Release

    token: Column[bytes] = b""
    delay_ms: Column[int] = 0
    keep_ms: Column[int] = 0
    memo: Column[bytes | None] = None
    unsent: Column[bool] = False


class Extensions(Columns[Extension], frozen=True, gc=False):
    """A batch of extensions: a sequence of `Extension`, held as columns."""

    row: ClassVar = Extension

    token: Column[bytes] = b""
    lease_ms: Column[int] = 0


class Memories(Columns[Memory], frozen=True, gc=False):
    """A batch of memories: a sequence of `Memory`, held as columns."""

    row: ClassVar = Memory

    generation: Column[bytes] = b""
    fate: Column[Fate] = Fate.DELIVERED
    window_ms: Column[int] = 0
    hash: Column[bytes] = b""
    memo: Column[bytes] = b""


def folded(values: list[_V]) -> Column[_V]:
    """Return the one value that all of *values* are, or else *values*."""
    return values[0] if values and values.count(values[0]) == len(values) else values


def spread(column: Column[_V], count: int) -> list[_V]:
    """Return a column as a list of *count* values."""
    return column if isinstance(column, list) else [column] * count


def _at(column: Column[_V], at: int) -> _V:
    return column[at] if isinstance(column, list) else column


def _selected(column: Any, positions: Sequence[int]) -> Any:
    return [column[at] for at in positions] if isinstance(column, list) else column


def _joined(columns: Sequence[Any], counts: Sequence[int]) -> Any:
    first = columns[0]
    if not isinstance(first, list) and columns.count(first) == len(columns):
        return first
    return [
        value
        for column, count in zip(columns, counts, strict=True)
        for value in spread(column, count)
    ]


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

    def is_as_asked(self, want: Want) -> bool:
        """Return True if the records are first attempts, with the generation and memo of *want*."""
        asked = want.generation, 1, want.memo
        return all((held.generation, held.attempts, held.memo) == asked for held in self.held)


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


def answered(answer: _V | NoAnswer) -> _V:
    """Return *answer*; raise `StoreUnavailable` if there is none."""
    if isinstance(answer, NoAnswer):
        raise StoreUnavailable(answer.reason)
    return answer


ClaimAnswer = Claim | Duplicate | Busy | Mismatch | NoAnswer
CommitAnswer = Literal[Reply.COMMITTED, Reply.ALREADY, Reply.FENCED] | NoAnswer
ReleaseAnswer = Literal[Reply.RELEASED, Reply.FENCED] | NoAnswer
ExtendAnswer = Literal[Reply.EXTENDED, Reply.FENCED] | NoAnswer
RememberAnswer = Literal[Reply.REMEMBERED, Reply.KNOWN] | NoAnswer


HELD: Final = 0
"""In `ClaimAnswers`: claimed, and the record is a first attempt as it was asked for."""


class ClaimAnswers(Struct, frozen=True, gc=False):
    """
    The answers to a batch of claims, in order.

    *each* has `HELD` for a claim that is granted as asked: all its records have the generation
    and the memo of the want, and this is their first attempt. That includes a claim that is sent
    again. Everything else is an object, also a `Claim` whose records differ from that: after a
    release that does not count, a record is a first attempt again, but of its old generation, and
    a commit under the generation of the want would be fenced. As a sequence, it has an object for
    each.
    """

    asked: Wants
    each: list[ClaimAnswer | int]
    now_ms: int
    """
    The store's clock at the call; the latest, if several servers answered.

    If no claim is granted, it may be 0.
    """

    @classmethod
    def of(cls, asked: Wants, answers: Iterable[ClaimAnswer]) -> Self:
        """Return *answers* with `HELD` wherever the claim is granted as *asked*."""
        given = [*answers]
        each = [
            HELD if isinstance(answer, Claim) and answer.is_as_asked(want) else answer
            for want, answer in zip(asked, given, strict=True)
        ]
        granted = [answer.now_ms for answer in given if isinstance(answer, Claim)]
        return cls(asked, each, max(granted, default=0))

    def __len__(self) -> int:
        return len(self.each)

    def __getitem__(self, at: int) -> ClaimAnswer:
        answer = self.each[at]
        if not isinstance(answer, int):
            return answer
        want = self.asked[at]
        held = tuple([Held(part.key, want.generation, 1, want.memo) for part in want.parts])
        return Claim(want.token, held, self.now_ms)

    def __iter__(self) -> Iterator[ClaimAnswer]:
        return iter([self[at] for at in range(len(self.each))])


class Claims(Protocol):
    """The part of `Store` that the gateway needs to deliver events."""

    async def claim(self, wants: Wants) -> ClaimAnswers:
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

    async def commit(self, commits: Commits) -> list[CommitAnswer]:
        """
        Mark keys done.

        Fenced by generation only: the lease may have ended, and another worker may hold the key.
        """
        ...

    async def release(self, releases: Releases) -> list[ReleaseAnswer]:
        """End holds, so that the keys may be claimed again. Fenced by token."""
        ...

    async def extend(self, extensions: Extensions) -> list[ExtendAnswer]:
        """
        Prolong holds. Fenced by token.

        A lease that has ended can be extended as long as no other worker has claimed the key.
        """
        ...

    async def remember(self, memories: Memories) -> list[RememberAnswer]:
        """Mark keys done that are absent, free or expired; leave other keys as they are."""
        ...


class Store(Claims, Protocol):
    """
    A store: every operation on records.

    The test suite `oncebridge.testing.StoreContract` defines what each operation must do. A
    store that passes it is ready for production. A class that inherits from this one has only
    `async with` from it.
    """

    async def open(self) -> None:
        """
        Connect, and check that the backend can keep the guarantees; safe to repeat.

        Raise `ConfigError` if an operator has to change something, `StoreUnavailable` if the
        backend does not answer now.
        """
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

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


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
