"""
The format of the history: recent arrivals and their verdicts, in the store.

A row is one arrival. Rows are collected in pages, and a page is the memo of a record, so every
store supports it, and every client of the store can read it. Each worker has a ring of 128 pages,
of which the oldest is overwritten, and one small record, the tail: it has the number of the latest
page, and the rows that are not in that page yet. So a page is not rewritten for every few rows.
"""

import zlib
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
from msgspec import Struct

from oncebridge.events.key import make_key

Mode = Literal["off", "sample", "all"]
HistoryPosition = tuple[int, str, int]
"""Time, worker and number of an arrival: lists are sorted by it, descending."""
SLOTS: Final = 128
"""Pages per worker."""
_MARK: Final = b"history1"
"""No JSON begins like this, so other records are not mistaken for pages."""
_LARGEST: Final = 4 << 20
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of decoding: every client of the store can write anything."""


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
    """Usually a conversation."""
    account: str = ""
    region: str = ""
    replay: str = ""
    time: str = ""
    """The time in the event."""
    size: int = 0
    reason: str = ""
    first_id: str = ""
    first_ms: int = 0
    """The first arrival, as far as the store has it."""
    cause: str = ""
    took_ms: float = 0.0
    attempt: int = 1
    forwarded: bool = False
    unprotected: bool = False
    payload: bytes = b""
    """The masked event; empty unless payloads are kept."""
    bare: bool = False
    """True if its payload was not kept because of the load."""
    sent_as: bytes = b""
    """The `Idempotency-Key` it was sent with, if different from the key."""


class HistoryPage(Struct, frozen=True, array_like=True, gc=False):
    """A page or a tail, as stored in a record."""

    number: int
    """The number of the page; for a tail, of the latest page."""
    is_full: bool
    """True if no rows will be added."""
    count: int
    last: int
    """The number of its last row."""
    first_ms: int
    last_ms: int
    """When the earliest and the latest of its rows arrived."""
    keep_ms: int
    """How long rows are kept after they arrived."""
    left_out: int
    """How many arrivals this worker has not kept because of the load."""
    is_zipped: bool
    body: bytes
    lost: int = 0
    """How many rows this worker could not write to the store."""

    @classmethod
    def read(cls, memo: bytes) -> "HistoryPage | None":
        """Decode a memo; None if it is not a page."""
        if not memo.startswith(_MARK):
            return None
        try:
            return _read_page(memoryview(memo)[len(_MARK) :])
        except _UNREADABLE:
            return None

    def write(self) -> bytes:
        return _MARK + _write(self)

    def text(self) -> bytes:
        """Return its encoded rows; empty if they cannot be decoded."""
        if not self.is_zipped:
            return self.body
        try:
            return zlib.decompressobj().decompress(self.body, _LARGEST)
        except zlib.error:
            return b""

    def rows(self) -> list[HistoryRow]:
        """Return its rows by number; empty if they cannot be decoded."""
        try:
            return _read_rows(self.text())
        except _UNREADABLE:
            return []


def joined(rows: Sequence[bytes]) -> bytes:
    """Join encoded rows."""
    return b"\xdd" + len(rows).to_bytes(4) + b"".join(rows)


_read_page = msgspec.msgpack.Decoder(HistoryPage).decode
_read_rows = msgspec.msgpack.Decoder(list[HistoryRow]).decode
_write = msgspec.msgpack.Encoder().encode


def page_key(worker: str, number: int) -> bytes:
    """Return the key of a page; the page 128 later has the same."""
    return make_key("", b"history", worker, str(number % SLOTS), ())


def tail_key(worker: str) -> bytes:
    """Return the key of a worker's tail."""
    return make_key("", b"history", worker, "tail", ())


class RecordedArrival(Struct, frozen=True):
    """One arrival, and the worker that received it."""

    worker: str
    row: HistoryRow

    @property
    def name(self) -> str:
        """A unique name, valid in a URL."""
        return f"{self.worker}.{self.row.number}"

    @property
    def place(self) -> HistoryPosition:
        """Its unique position among all arrivals."""
        return self.row.at_ms, self.worker, self.row.number


class HistoryQuery(Struct, frozen=True, kw_only=True):
    """A search; all conditions must match."""

    text: str = ""
    """An envelope id or key or its beginning, an entity, or a topic."""
    verdict: str = ""
    route: str = ""
    topic: str = ""
    cause: str = ""
    before: HistoryPosition | None = None
    """Only arrivals after this position in the list: for the next page."""
    limit: int = 100


class SearchResult(Struct, frozen=True):
    """The result of a search, newest first."""

    rows: tuple[RecordedArrival, ...]
    more: bool
    """True if there are older matches."""
    looked_at: int
    """How many rows there are to search."""
    since_ms: int | None
    """When the oldest of them arrived."""
    left_out: int = 0
    """How many arrivals were not kept because of the load."""
    is_whole: bool = True
    """False if the store did not answer, and only rows of this process were searched."""
    lost: int = 0
    """How many arrivals are missing because the store was unavailable for too long."""
