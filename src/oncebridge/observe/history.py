"""
Recent arrivals, and what became of each: a bounded history in the store.

A row is one arrival. Rows are gathered into pages, and a page is a record in the store, used as a
register like a trail: so every store has it, and whoever reaches the store can read it. Each
worker has a ring of 128 pages, of which the oldest is written over, and one small record more,
the tail: it tells which page is the latest, and holds the rows that are not in that page yet. So
a page need not be written again for each few rows.
"""

import zlib
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
from msgspec import Struct

from oncebridge.events.key import make_key

Mode = Literal["off", "sample", "all"]
HistoryPosition = tuple[int, str, int]
"""When an arrival came, to which worker, and its number there: lists have the greatest first."""
SLOTS: Final = 128
"""So many pages each worker has."""
_MARK: Final = b"history1"
"""No JSON begins like this, so no record is mistaken for another."""
_LARGEST: Final = 4 << 20
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What reading raises: whoever reaches the store may have written anything."""


class HistoryRow(Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """One arrival."""

    number: int
    """Counted by its worker, from 1."""
    at_ms: int
    """When it arrived, by its worker's clock."""
    route: str
    verdict: str
    rule: str = ""
    key: bytes = b""
    id: str = ""
    source: str = ""
    detail_type: str = ""
    topic: str = ""
    entity: str = ""
    """What it is about: a conversation, mostly."""
    account: str = ""
    region: str = ""
    replay: str = ""
    time: str = ""
    """The time that the event bears."""
    size: int = 0
    reason: str = ""
    first_id: str = ""
    first_ms: int = 0
    """The arrival that it repeats, as far as the store remembers it."""
    cause: str = ""
    took_ms: float = 0.0
    attempt: int = 1
    forwarded: bool = False
    unprotected: bool = False
    payload: bytes = b""
    """The event, with fields masked; empty unless that was allowed."""
    bare: bool = False
    """Its payload is not kept, as too many came at the time."""
    sent_as: bytes = b""
    """The `Idempotency-Key` it was sent with, where that is not the key."""


class HistoryPage(Struct, frozen=True, array_like=True, gc=False):
    """A page or a tail, as it stands in a record."""

    number: int
    """Of the page; of a tail: of the latest page."""
    is_full: bool
    """Nothing is added any more."""
    count: int
    last: int
    """The number of its last row."""
    first_ms: int
    last_ms: int
    """When the earliest and the latest of its rows arrived."""
    keep_ms: int
    """How long rows are kept after they arrived."""
    left_out: int
    """How many arrivals this worker did not keep, so far, as there were too many."""
    is_zipped: bool
    body: bytes
    lost: int = 0
    """How many rows this worker could not bring to the store, so far."""

    @classmethod
    def read(cls, memo: bytes) -> "HistoryPage | None":
        """Read what stands in a record; None where it is no page."""
        if not memo.startswith(_MARK):
            return None
        try:
            return _read_sheet(memoryview(memo)[len(_MARK) :])
        except _UNREADABLE:
            return None

    def write(self) -> bytes:
        return _MARK + _write(self)

    def text(self) -> bytes:
        """Return its rows, encoded; nothing where they cannot be read."""
        if not self.is_zipped:
            return self.body
        try:
            return zlib.decompressobj().decompress(self.body, _LARGEST)
        except zlib.error:
            return b""

    def rows(self) -> list[HistoryRow]:
        """Return its rows, in the order of their numbers; none where they cannot be read."""
        try:
            return _read_rows(self.text())
        except _UNREADABLE:
            return []


def joined(rows: Sequence[bytes]) -> bytes:
    """Make one text of encoded rows."""
    return b"\xdd" + len(rows).to_bytes(4) + b"".join(rows)


_read_sheet = msgspec.msgpack.Decoder(HistoryPage).decode
_read_rows = msgspec.msgpack.Decoder(list[HistoryRow]).decode
_write = msgspec.msgpack.Encoder().encode


def page_key(worker: str, number: int) -> bytes:
    """Name the record of a page; one that is 128 pages younger has the same."""
    return make_key("", b"history", worker, str(number % SLOTS), ())


def tail_key(worker: str) -> bytes:
    """Name the record of a worker's latest rows."""
    return make_key("", b"history", worker, "tail", ())


class RecordedArrival(Struct, frozen=True):
    """One arrival, and which worker saw it."""

    worker: str
    row: HistoryRow

    @property
    def name(self) -> str:
        """Names it among all arrivals; good for an address."""
        return f"{self.worker}.{self.row.number}"

    @property
    def place(self) -> HistoryPosition:
        """Its place among all arrivals; no two have the same, be it in one millisecond."""
        return self.row.at_ms, self.worker, self.row.number


class HistoryQuery(Struct, frozen=True, kw_only=True):
    """Which arrivals are wanted; all that is given has to fit."""

    text: str = ""
    """An envelope id, an entity (a conversation), a key or the beginning of one, or a topic."""
    verdict: str = ""
    route: str = ""
    topic: str = ""
    cause: str = ""
    before: HistoryPosition | None = None
    """Only what comes after the arrival of this place: for the next page of a list."""
    limit: int = 100


class SearchResult(Struct, frozen=True):
    """What was found, newest first."""

    rows: tuple[RecordedArrival, ...]
    more: bool
    """There are older ones that fit."""
    looked_at: int
    """How many rows there are in all."""
    since_ms: int | None
    """When the oldest of them arrived."""
    left_out: int = 0
    """How many arrivals were not kept, as there were too many at the time."""
    is_whole: bool = True
    """False where the store could not be asked, and these are only those of this process."""
    lost: int = 0
    """How many arrivals are missing, as the store was away for too long."""
