"""
Writes the history into the store, page by page.

Recording a row takes a few microseconds on the event loop. Every two seconds, new rows are
collected into pages, and pages that changed are written. While the store is unavailable, rows wait
in memory, up to the size of the ring of pages; then the oldest are dropped.

No row is kept for too long: a page expires with its oldest row, and spans at most an eighth of the
retention time.
"""

import asyncio
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Final

import msgspec
from msgspec.structs import replace

from oncebridge.base.clock import Clock, Dice, ms
from oncebridge.engine.causes import Cause
from oncebridge.engine.hooks import Decisions
from oncebridge.errors import StoreUnavailable
from oncebridge.events.event import Event
from oncebridge.observe.history import (
    SLOTS,
    HistoryPage,
    HistoryRow,
    Mode,
    RecordedArrival,
    joined,
    page_key,
    tail_key,
)
from oncebridge.observe.history_rows import RowMask, row_of, row_of_refused
from oncebridge.observe.masking import Mask
from oncebridge.observe.sampling import Sampler
from oncebridge.stores.api import NoAnswer, Store
from oncebridge.stores.cell import Cells, Edit

MOST_ROWS: Final = 512
MOST_BYTES: Final = 160 << 10
"""A page is full at either limit; bytes are counted before compression to about a third."""
MOST_WAITING: Final = 16_384
"""The most rows that wait for the next write."""
MOST_PAYLOADS: Final = 500
_MOST_RAW: Final = 8 << 20
"""The most events and bytes that wait to be masked; further rows have no payload."""
_TAIL_ROWS: Final = 64
"""The page itself is written after this many new rows; fewer are written to the tail."""
_PARTS: Final = 8
"""A page spans at most this part of the retention time."""
_MOST_PAGES: Final = 4
"""The most pages in one store call."""
_THREAD_ROWS, _THREAD_BYTES = 500, 32 << 10
"""From this many rows or bytes on, a thread is used: about half a millisecond of work."""
_CHUNK_BYTES: Final = 16 << 10
_CHUNK_ROWS: Final = 200
"""Bytes or rows that are encoded at once: about a millisecond of work."""


class HistoryWriter:
    """
    Records recent decisions.

    *payloads* masks the events that are kept with their rows; without it, none are kept. Fields
    that *mask* hides are not kept anywhere. Rows wait up to *lag* before they are written, if
    writes cost money.
    """

    def __init__(
        self,
        store: Store,
        worker: str,
        *,
        mode: Mode,
        keep: timedelta,
        payloads: Mask | None,
        clock: Clock,
        dice: Dice,
        mask: Mask | None = None,
        lag: timedelta = timedelta(0),
    ) -> None:
        # It writes periodically, and only this worker writes its pages.
        self._cells = Cells(store, dice, waits_for_store=False, idempotent=True)
        self.worker = worker
        self.keep_ms = max(ms(keep), 1000)
        self.left_out = 0
        """How many arrivals were not recorded because of the load."""
        self._sampler = Sampler() if mode == "sample" else None
        self._payloads = payloads
        self._secrets = RowMask(mask or payloads)
        self._clock = clock
        self._lag_ms = ms(lag)
        self._number = 0
        self._waiting: deque[HistoryRow] = deque(maxlen=MOST_WAITING)
        self._raws = _Raws()
        self._paged = 0
        """The number of the last row in a page."""
        self._lost = 0
        """How many rows were lost before or with a page."""
        self._page = _Page(0)
        self._full: dict[int, HistoryPage] = {}
        self._tail = 0, 0
        """The last write of the tail: the latest page, and its number of rows."""
        self._unsaved: set[int] = set()
        """Full pages that are not in the store yet."""
        self._lock = asyncio.Lock()

    @property
    def pages(self) -> int:
        """The number of pages begun."""
        return self._page.number + bool(self._page.rows)

    @property
    def lost(self) -> int:
        """How many rows were lost because the store was unavailable for too long."""
        first = self._waiting[0].number if self._waiting else 0
        return self._lost + max(first - self._paged - 1, 0)

    # --- recording --------------------------------------------------------------------------

    def decided(self, decisions: Decisions, causes: Sequence[Cause | None]) -> None:
        """Record the arrivals that are selected."""
        count = len(decisions.events)
        selected = range(count) if self._sampler is None else self._sampler.select(decisions)
        self.left_out += count - len(selected)
        for at in selected:
            event = decisions.events[at]
            if len(self._waiting) == MOST_WAITING:  # the oldest is dropped
                self._raws.drop(self._waiting[0].number)
            self._number = number = self._number + 1
            if type(event) is Event:
                row = row_of(number, decisions[at], event, causes[at])
                if self._secrets:
                    row = self._secrets.blanked(row, event)
                if self._payloads is not None:
                    self._raws.add(number, event.raw)
            else:
                row = row_of_refused(number, decisions[at])
            self._waiting.append(row)

    def rows(self) -> Sequence[RecordedArrival]:
        """Return all rows that this process has in memory, oldest first."""
        kept = [row for page in self._full.values() for row in page.rows()]
        return [RecordedArrival(self.worker, row) for row in (*kept, *self.latest())]

    def full_pages(self) -> Sequence[HistoryPage]:
        """Return the full pages in memory."""
        return list(self._full.values())

    def latest(self) -> Sequence[HistoryRow]:
        """Return the rows that are not in a full page yet."""
        return [*self._page.rows, *self._waiting]

    # --- writing ----------------------------------------------------------------------------

    async def write(self, *, last: bool = False) -> None:
        """
        Write new rows to the store; raise `StoreUnavailable` if that fails.

        With *last*, rows do not wait for the lag.
        """
        async with self._lock:
            await self._gather()
            self._drop_expired()
            if last or self._is_due():
                await self._save()

    async def _gather(self) -> None:
        """Move waiting rows into pages."""
        rows, raws = list(self._waiting), self._raws.waiting()
        if raws or len(rows) > _THREAD_ROWS:
            # A thread that runs without pause delays the event loop by five milliseconds each time.
            for chunk in _chunks(rows, raws):
                await self._add(await asyncio.to_thread(self._encoded, chunk, raws))
        else:
            await self._add(self._encoded(rows, raws))
        if self._page.rows and self._clock() - self._page.first_ms > self.keep_ms // _PARTS:
            await self._begin_page()

    async def _add(self, texts: Sequence[tuple[HistoryRow, bytes]]) -> None:
        """Add rows to the current page and the next ones."""
        for row, text in texts:
            if self._page.is_full_with(text):
                await self._begin_page()
            self._page.add(row, text)
            self._lost += row.number - self._paged - 1
            self._paged = row.number
            # Not earlier: concurrent readers must find each row here or there.
            self._raws.drop(row.number)
            if self._waiting and self._waiting[0].number <= row.number:
                self._waiting.popleft()

    def _encoded(
        self, rows: Sequence[HistoryRow], raws: Mapping[int, bytes]
    ) -> list[tuple[HistoryRow, bytes]]:
        encoded: list[tuple[HistoryRow, bytes]] = []
        for row in rows:
            kept = row
            raw = raws.get(row.number)
            if self._payloads is not None and raw is not None:
                payload = self._payloads.brief(raw) if raw else b""
                kept = replace(row, payload=payload, bare=not raw)
            try:
                encoded.append((kept, _encode(kept)))
            except UnicodeEncodeError:  # the message of a driver may contain surrogates
                kept = replace(kept, reason=kept.reason.encode("utf-8", "replace").decode())
                encoded.append((kept, _encode(kept)))
        return encoded

    async def _begin_page(self) -> None:
        """Begin the next page, which replaces the oldest."""
        full = await self._encode_page(self._page, is_full=True)
        self._full[full.number] = full
        self._unsaved.add(full.number)
        self._page = _Page(full.number + 1)
        self._drop(full.number + 1 - SLOTS)

    def _drop_expired(self) -> None:
        """Drop expired rows."""
        ended_ms = self._clock() - self.keep_ms
        for number, page in list(self._full.items()):
            if page.first_ms < ended_ms:
                self._drop(number)

    def _drop(self, number: int) -> None:
        page = self._full.pop(number, None)
        if page is not None and number in self._unsaved:
            self._unsaved.discard(number)
            self._lost += page.count

    def _is_due(self) -> bool:
        new = self._page.rows[self._rows_in_store() :]
        # The clock may have been set back, so that rows are in the future.
        is_young = bool(new) and 0 <= self._clock() - new[0].at_ms < self._lag_ms
        return bool(self._unsaved) or (bool(new) and not is_young)

    def _rows_in_store(self) -> int:
        """Return how many rows of the latest page are in the store, in the page or the tail."""
        number, count = self._tail
        return max(count if number == self._page.number else 0, self._page.saved)

    async def _save(self) -> None:
        """Write full pages, oldest first; then the current page, or its latest rows as the tail."""
        while self._unsaved:
            numbers = sorted(self._unsaved)[:_MOST_PAGES]
            keys = {page_key(self.worker, number): number for number in numbers}
            written = await self._put({key: self._full[number] for key, number in keys.items()})
            self._unsaved.difference_update(keys[key] for key in written)
            if len(written) < len(numbers):
                return  # the next would fail as well
        page = self._page
        count = len(page.rows)
        if count - page.saved >= _TAIL_ROWS:
            key = page_key(self.worker, page.number)
            if not await self._put({key: await self._encode_page(page)}):
                return
            page.saved = count
        if self._tail != (page.number, count):
            tail = await self._encode_page(page, since=page.saved)
            if await self._put({tail_key(self.worker): tail}):
                self._tail = page.number, count

    async def _encode_page(
        self, page: "_Page", *, since: int = 0, is_full: bool = False
    ) -> HistoryPage:
        """Encode a page, or its rows after *since*."""
        texts, rows = page.texts[since:], page.rows[since:]
        if page.size > _THREAD_BYTES:
            zipped, body = await asyncio.to_thread(_zipped, texts)
        else:
            zipped, body = _zipped(texts)
        times = [row.at_ms for row in rows] or [self._clock()]
        return HistoryPage(
            page.number,
            is_full,
            len(rows),
            rows[-1].number if rows else 0,
            min(times),
            max(times),
            self.keep_ms,
            self.left_out,
            zipped,
            body,
            self._lost,
        )

    async def _put(self, pages: Mapping[bytes, HistoryPage]) -> set[bytes]:
        """Write records, and return which were written."""
        now_ms = self._clock()
        answers = await self._cells.edit(
            {
                key: Edit(partial(_replaced, page), max(page.first_ms + page.keep_ms - now_ms, 1))
                for key, page in pages.items()
            },
            patience_s=0,
        )
        written = {key for key, answer in answers.items() if isinstance(answer, bytes)}
        for answer in answers.values():
            if isinstance(answer, NoAnswer) and not written:
                raise StoreUnavailable(answer.reason)
        return written


def _replaced(page: HistoryPage, _memo: bytes, _now_ms: int) -> bytes:
    return page.write()


class _Raws:
    """Events that wait to be masked, by row number."""

    def __init__(self) -> None:
        self._raws: dict[int, bytes] = {}
        self._places = MOST_PAYLOADS
        self._room = _MOST_RAW

    def add(self, number: int, raw: bytes) -> None:
        """Add an event; if the limit is reached, only its row number."""
        if not self._places or len(raw) > self._room:
            raw = b""
        else:
            self._places -= 1
            self._room -= len(raw)
        self._raws[number] = raw

    def drop(self, number: int) -> None:
        raw = self._raws.pop(number, b"")
        if raw:
            self._places += 1
            self._room += len(raw)

    def waiting(self) -> Mapping[int, bytes]:
        return self._raws.copy()


def _chunks(
    rows: Sequence[HistoryRow], raws: Mapping[int, bytes]
) -> Iterator[Sequence[HistoryRow]]:
    """Split *rows* into small units of work."""
    chunk: list[HistoryRow] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(raws.get(row.number, b""))
        if size > _CHUNK_BYTES or len(chunk) == _CHUNK_ROWS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class _Page:
    """The page that rows are added to."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rows: list[HistoryRow] = []
        self.texts: list[bytes] = []
        self.size = 0
        self.first_ms = 0
        self.saved = 0
        """How many of its rows are in its own record."""

    def is_full_with(self, text: bytes) -> bool:
        return len(self.rows) >= MOST_ROWS or (self.size > 0 and self.size + len(text) > MOST_BYTES)

    def add(self, row: HistoryRow, text: bytes) -> None:
        self.first_ms = min(self.first_ms, row.at_ms) if self.rows else row.at_ms
        self.rows.append(row)
        self.texts.append(text)
        self.size += len(text)


_encode = msgspec.msgpack.Encoder().encode


def _zipped(texts: Sequence[bytes]) -> tuple[bool, bytes]:
    text = joined(texts)
    zipped = zlib.compress(text, 1)
    return (True, zipped) if len(zipped) < len(text) else (False, text)
