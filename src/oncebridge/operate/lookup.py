"""
Finds an event by a file, a key, or the id of its envelope.

A key leads straight to its record. An id does not: the store keeps the id of the first copy in
each record, so all records have to be read. The dead letters are searched first: they are few
and have the whole event.
"""

import re
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.dead_letters.api import DeadLetter, DeadLetters
from oncebridge.engine.memos import Memo
from oncebridge.engine.settings import Settings
from oncebridge.engine.verdict import LONGEST_ID
from oncebridge.errors import ConfigError
from oncebridge.events.envelopes import unwrap
from oncebridge.events.event import Event, Unreadable, read
from oncebridge.events.framing import RawRecord as FileRecord
from oncebridge.operate.replay import DeadLetterFilter, select
from oncebridge.service.addresses import BackendAddress, StorePlace, scheme_of
from oncebridge.stores.api import Portable, Record, Store
from oncebridge.stores.sqlite.database import open_unchanged

_KEY: Final = re.compile(r"01[0-9a-f]{64}")
_NEARLY_A_KEY: Final = re.compile(r"01[0-9a-f]{38,}")
_CUT_KEY: Final = re.compile(r"01[0-9a-f]+(…|\.\.\.)")
_SAYS_ID: Final = "id:"
_FILE: Final = re.compile(r".*\.(json|ndjson|jsonl|log|txt|gz)", re.IGNORECASE)
_BATCH: Final = 1000

_HAS_TABLE: Final = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"

Kind = Literal["file", "key", "id"]


class EventReference(Struct, frozen=True):
    """A reference to events: a file, a key or an id."""

    text: str
    kind: Kind
    other_kind: Kind | None = None
    """What else it could be."""

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.text)

    @property
    def hint(self) -> str:
        """A hint for an id that was not found and resembles a key."""
        if self.kind != "id" or not _NEARLY_A_KEY.fullmatch(self.text.lower()):
            return ""
        return f"; a key has 66 hex digits, this text has {len(self.text)}"

    def __str__(self) -> str:
        return f"key {self.text[:10]}…" if self.kind == "key" else f"{self.kind} {self.text}"


def parse_reference(text: str) -> EventReference:
    """
    Return whether *text* names a file, a key or an id; an existing file comes first.

    Text that begins with `id:` is an id. Raise `ConfigError` for text that can be none of them: a
    file that does not exist, or a shortened key.
    """
    is_key = _KEY.fullmatch(text.lower()) is not None
    if text == "-" or _exists(text):
        return EventReference(text, "file", "key" if is_key else None)
    if is_key:
        return EventReference(text.lower(), "key")
    if text.startswith(_SAYS_ID) and text != _SAYS_ID:
        return EventReference(text.removeprefix(_SAYS_ID), "id")
    if _CUT_KEY.fullmatch(text.lower()):
        raise ConfigError("", f"{text}: this key is shortened; use all 66 hex digits")
    if not text.strip() or "/" in text or _FILE.fullmatch(text):
        raise ConfigError("", f"{text}: No such file or directory; if it is an id, write id:{text}")
    return EventReference(text, "id")


def key_in(text: str) -> bytes | None:
    """Return the key that *text* has in hex; None if it is not a key."""
    return bytes.fromhex(text) if _KEY.fullmatch(text.lower()) else None


def _exists(text: str) -> bool:
    try:
        return bool(text) and Path(text).exists()
    except (OSError, ValueError):  # too long for a name, or with an invalid character
        return False


def events_in(record: FileRecord | bytes, settings: Settings) -> tuple[Event | Unreadable, ...]:
    """Read the events of one record, however they are wrapped."""
    raw = record if isinstance(record, bytes) else record.raw
    if isinstance(record, FileRecord) and record.too_long:
        return (Unreadable(raw, "too-large", "longer than can be read"),)

    def read_one(text: bytes, /, *, bare: bool | None = None) -> Event | Unreadable:
        is_bare = settings.bare if bare is None else bare
        return read(text, limits=settings.limits, bare=is_bare)

    return unwrap(raw, read_one)


# --- in the dead letters ------------------------------------------------------------------


class DeadLetterIndex:
    """
    An index of the dead letters by key and id.

    *opened* opens them when they are first needed, or returns None if they cannot be opened.
    They are read once, as reading is slow if they are in a queue.
    """

    def __init__(
        self, opened: Callable[[], Awaitable[DeadLetters | None]], settings: Settings
    ) -> None:
        self._opened = opened
        self._settings = settings
        self._by_key: dict[bytes, DeadLetter] | None = None
        self._by_id: dict[str, list[int]] = {}

    async def with_key(self, keys: Sequence[bytes]) -> DeadLetter | None:
        """Return the latest dead letter under any of *keys*, without its payload."""
        by_key = await self._read()
        found = [by_key[key] for key in keys if key in by_key]
        return max(found, key=lambda letter: letter.number, default=None)

    async def with_id(self, id_: str) -> list[DeadLetter]:
        """Return the dead letters whose event has the id *id_*, with payload."""
        await self._read()
        return await self._whole(self._by_id.get(id_, []))

    async def whole(self, letter: DeadLetter) -> DeadLetter | None:
        """Return *letter* with its payload, if it still exists."""
        found = await self._whole([letter.number])
        return found[0] if found else None

    async def _whole(self, numbers: Sequence[int]) -> list[DeadLetter]:
        dead = await self._opened() if numbers else None
        if dead is None:
            return []
        return [letter async for letter in select(dead, DeadLetterFilter(tuple(numbers)))]

    async def _read(self) -> dict[bytes, DeadLetter]:
        if self._by_key is None:
            self._by_key = {}
            dead = await self._opened()
            if dead is not None:
                async for letter in select(dead, DeadLetterFilter()):
                    self._note(letter, self._by_key)
        return self._by_key

    def _note(self, letter: DeadLetter, by_key: dict[bytes, DeadLetter]) -> None:
        if letter.key:
            by_key[letter.key] = replace(letter, raw=b"")
        for event in events_in(letter.raw, self._settings):
            if isinstance(event, Event) and event.id:
                self._by_id.setdefault(event.id, []).append(letter.number)


# --- in the store -------------------------------------------------------------------------


def lacks_our_tables(place: BackendAddress) -> bool:
    """
    Return whether *place* is a SQLite file without our tables, which opening it would create.

    A file that cannot be read fails later, when it is opened.
    """
    if scheme_of(place.url) != "sqlite":
        return False
    path = Path(place.url.partition(":")[2])
    helpers = [path.with_name(f"{path.name}{end}").exists() for end in ("-wal", "-shm")]
    if helpers == [True, False]:
        return False  # its log cannot be read without write access
    table = "oncebridge_records" if isinstance(place, StorePlace) else "oncebridge_dead"
    try:
        with open_unchanged(path) as db:
            return not db.execute(_HAS_TABLE, (table,)).fetchone()
    except (sqlite3.Error, OSError):
        return False


async def open_for_reading(place: StorePlace) -> Store:
    """Open the store of *place* without creating anything; raise as `open` does."""
    store: Store = place.opened
    if getattr(place.options, "auto_migrate", False):
        options = replace(place.options, auto_migrate=False)
        store = type(place.opened).from_url(place.url, options)
    try:
        await store.open()
    except BaseException:
        await store.aclose()
        raise
    return store


def scan_costs(place: StorePlace) -> str:
    """Return what AWS charges for reading all records of *place*; empty if it is free."""
    match scheme_of(place.url):
        case "dynamodb":
            return "DynamoDB charges for reading every record"
        case "s3":
            return "S3 charges a request for every record"
        case _:
            return ""


async def records_with_id(
    store: Portable, id_: str, progress: Callable[[int], None]
) -> AsyncIterator[Record]:
    """
    Yield the records whose first copy had the id *id_*; a record may come more than once.

    *progress* is called with the number of records read. A later copy with another id is not
    found: its id was not stored.
    """
    place, seen = b"", 0
    while True:
        records, place = await store.scan(place, _BATCH)
        seen += len(records)
        for record in records:
            if Memo.read(record.memo).id == id_[:LONGEST_ID]:
                yield record
        progress(seen)
        if not place:
            return
