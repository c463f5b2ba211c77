"""
Reads the history of all workers from their shared store.

Rows of this process are in memory; of other workers, tails and pages are read. A full page never
changes, so it is read once and cached: a refresh every two seconds mainly reads the tails.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import nlargest
from operator import attrgetter
from typing import Final

from msgspec import Struct, field

from oncebridge.base.clock import Clock, system_clock
from oncebridge.errors import StoreError
from oncebridge.observe.history import (
    SLOTS,
    HistoryPage,
    HistoryPosition,
    HistoryQuery,
    HistoryRow,
    RecordedArrival,
    SearchResult,
    page_key,
    tail_key,
)
from oncebridge.observe.history_writer import HistoryWriter
from oncebridge.observe.report import Report
from oncebridge.stores.api import Store

MOST_SHEETS: Final = 1024
"""The most cached pages, about 40 MB."""
MOST_READ: Final = 24
"""The most pages whose decoded rows are cached."""
_TOGETHER: Final = 16
"""The most pages in one store call."""
_SETTLED_MS: Final = 60_000
"""A worker that has not reported for this long does not write history either."""
_KEY: Final = re.compile(r"([0-9a-f]{6,66})(?:…|\.\.\.)?")
_CUT: Final = re.compile(r"(.*?)(?:…|\.\.\.)(.*)")
_LEAST: Final = 8
"""The least length of the beginning of an id."""
_place: Final[Callable[[RecordedArrival], HistoryPosition]] = attrgetter("place")
_left_out: Final[Callable[["_PageRef"], int]] = attrgetter("left_out")
_lost: Final[Callable[["_PageRef"], int]] = attrgetter("lost")


class HistoryReader:
    """
    Search the history; *own* is the writer of this process, if any.

    If the store does not answer, only rows of this process are searched, and `SearchResult.is_whole`
    is False; without a writer, `StoreError` is raised.
    """

    def __init__(
        self, store: Store, own: HistoryWriter | None = None, *, clock: Clock = system_clock
    ) -> None:
        self._own = own
        self._clock = clock
        self._cache = _PageCache(store, clock)
        self._read: OrderedDict[tuple[str, int, int], Sequence[HistoryRow]] = OrderedDict()

    async def search(self, query: HistoryQuery, reports: Sequence[Report]) -> SearchResult:
        """Return matching arrivals; *reports* name the workers."""
        everything, is_whole = await self._all_pages(reports)
        filled = [page for page in everything if page.count]
        pages = sorted(filled, key=lambda page: page.last_ms, reverse=True)
        fits, before, wanted = _fits(query), query.before, query.limit + 1
        found: list[RecordedArrival] = []
        for page in pages:
            if len(found) == wanted and found[-1].row.at_ms > page.last_ms:
                break  # all others are older
            if before is not None and page.first_ms > before[0]:
                continue
            rows = await self._rows(page)
            seen = [RecordedArrival(page.worker, row) for row in rows if fits(page.worker, row)]
            if before is not None:
                seen = [one for one in seen if one.place < before]
            found = nlargest(wanted, [*found, *seen], key=_place)
        return SearchResult(
            tuple(found[: query.limit]),
            len(found) > query.limit,
            sum(page.count for page in pages),
            min([page.first_ms for page in pages], default=None),
            _counted(everything, _left_out),
            is_whole,
            _counted(everything, _lost),
        )

    async def named(self, name: str, reports: Sequence[Report]) -> RecordedArrival | None:
        """Return one arrival by its name, even if its worker is not listed any more."""
        worker, _, text = name.rpartition(".")
        if not (worker and text.isascii() and text.isdigit() and len(text) < 20):
            return None
        pages, _ = await self._all_pages(reports, worker)
        for page in pages:
            if page.worker == worker and page.last >= int(text):
                rows = await self._rows(page)
                return next(
                    (RecordedArrival(worker, row) for row in rows if row.number == int(text)), None
                )
        return None

    async def alike(self, key: bytes, reports: Sequence[Report]) -> list[RecordedArrival]:
        """Return all arrivals of one event by its key, oldest first."""
        pages, _ = await self._all_pages(reports)
        found: list[RecordedArrival] = []
        for page in pages:
            if page.sheet is not None:
                await asyncio.sleep(0)
                if key not in page.sheet.text():  # much faster than decoding its rows
                    continue
            rows = await self._rows(page)
            found += [RecordedArrival(page.worker, row) for row in rows if row.key == key]
        return sorted(found, key=_place)

    # --- pages ------------------------------------------------------------------------------

    async def _all_pages(
        self, reports: Sequence[Report], *further: str
    ) -> tuple[list["_PageRef"], bool]:
        """Return all pages that have not expired, and whether the store answered."""
        own = self._own.worker if self._own is not None else None
        workers = {name: _WorkerHistory(name) for name in further}
        workers |= {
            state.name: _WorkerHistory(state.name, state.history, state.at_ms)
            for state in (report.state for report in reports)
        }
        others = [worker for worker in workers.values() if worker.name != own]
        pages = self._own_pages()
        is_whole = True
        try:
            pages += await self._cache.pages(others)
        except StoreError:
            if own is None:
                raise
            is_whole = False
        now_ms = self._clock()
        return [await self._lasting(page, now_ms - page.keep_ms) for page in pages], is_whole

    def _own_pages(self) -> list["_PageRef"]:
        own = self._own
        if own is None:
            return []
        pages = [_PageRef.of_sheet(own.worker, sheet) for sheet in own.full_pages()]
        rows = own.latest()
        latest = _PageRef.of_rows(own.worker, rows, own.keep_ms, own.left_out, own.lost)
        return [*pages, latest]

    async def _lasting(self, page: "_PageRef", since_ms: int) -> "_PageRef":
        """Remove expired rows."""
        if page.first_ms >= since_ms:
            return page
        if page.last_ms < since_ms:
            rows: Sequence[HistoryRow] = ()
        else:
            rows = [row for row in await self._rows(page) if row.at_ms >= since_ms]
        return _PageRef.of_rows(page.worker, rows, page.keep_ms, page.left_out, page.lost)

    async def _rows(self, page: "_PageRef") -> Sequence[HistoryRow]:
        sheet = page.sheet
        if sheet is None:
            return page.rows
        name = page.worker, sheet.number, sheet.count
        rows = self._read.get(name)
        if rows is None:
            await asyncio.sleep(0)  # a millisecond each, and there may be many of them
            rows = self._read[name] = sheet.rows()
        self._read.move_to_end(name)
        while len(self._read) > MOST_READ:
            self._read.popitem(last=False)
        return rows


class _PageRef(Struct, frozen=True):
    """Rows of one worker: an encoded page, or decoded rows."""

    worker: str
    count: int
    last: int
    first_ms: int
    last_ms: int
    keep_ms: int
    left_out: int
    lost: int
    rows: Sequence[HistoryRow] = ()
    sheet: HistoryPage | None = None

    @classmethod
    def of_sheet(cls, worker: str, sheet: HistoryPage) -> "_PageRef":
        times = sheet.first_ms, sheet.last_ms, sheet.keep_ms
        missing = sheet.left_out, sheet.lost
        return cls(worker, sheet.count, sheet.last, *times, *missing, sheet=sheet)

    @classmethod
    def of_rows(
        cls, worker: str, rows: Sequence[HistoryRow], keep_ms: int, left_out: int, lost: int
    ) -> "_PageRef":
        times = [row.at_ms for row in rows] or [0]
        last = rows[-1].number if rows else 0
        return cls(worker, len(rows), last, min(times), max(times), keep_ms, left_out, lost, rows)


def _counted(pages: Sequence[_PageRef], count: Callable[[_PageRef], int]) -> int:
    """Add up the latest count of each worker."""
    counts: dict[str, int] = {}
    for page in pages:
        counts[page.worker] = max(counts.get(page.worker, 0), count(page))
    return sum(counts.values())


# --- reading the store ----------------------------------------------------------------------


class _WorkerHistory(Struct, frozen=True):
    """A worker, from its report."""

    name: str
    history: int = 0
    at_ms: int = 0


class _CachedHistory(Struct):
    """The cached history of one worker."""

    sheets: dict[int, HistoryPage] = field(default_factory=dict)
    tail: HistoryPage | None = None
    gone: set[int] = field(default_factory=set)
    """Pages that no longer exist."""
    read_ms: int = 0


class _PageCache:
    """Caches pages of *store*, and reads only those that may have changed."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._cached: dict[str, _CachedHistory] = {}

    async def pages(self, workers: Sequence[_WorkerHistory]) -> list[_PageRef]:
        """Return the pages of *workers*, and drop those of others."""
        now_ms = self._clock()
        old = self._cached
        cached_by_worker = {
            worker.name: old.get(worker.name, _CachedHistory()) for worker in workers
        }
        asked = [w for w in workers if cached_by_worker[w.name].read_ms <= w.at_ms + _SETTLED_MS]
        await self._read_tails({worker.name: cached_by_worker[worker.name] for worker in asked})
        most = max(min(SLOTS, MOST_SHEETS // max(len(workers), 1)), 1)
        missing: list[tuple[_CachedHistory, int, bytes]] = []
        for worker in asked:
            cached = cached_by_worker[worker.name]
            numbers = _trimmed(cached, worker.history, most)
            missing += [(cached, n, page_key(worker.name, n)) for n in numbers]
        for at in range(0, len(missing), _TOGETHER):
            await self._read_pages(missing[at : at + _TOGETHER])
        for worker in asked:
            cached_by_worker[worker.name].read_ms = now_ms
        self._cached = cached_by_worker
        return [
            page for name, cached in cached_by_worker.items() for page in _pages_of(name, cached)
        ]

    async def _read_tails(self, cached_by_worker: dict[str, _CachedHistory]) -> None:
        # Before the pages: rows that leave a tail are in a page by then.
        keys = [tail_key(name) for name in cached_by_worker]
        records = await self._store.peek(keys) if keys else []
        for cached, record in zip(cached_by_worker.values(), records, strict=True):
            cached.tail = HistoryPage.read(record.memo) if record is not None else None

    async def _read_pages(self, missing: Sequence[tuple[_CachedHistory, int, bytes]]) -> None:
        records = await self._store.peek([key for _, _, key in missing])
        for (cached, number, _), record in zip(missing, records, strict=True):
            sheet = HistoryPage.read(record.memo) if record is not None else None
            if sheet is not None and sheet.number == number:
                cached.sheets[number] = sheet
                continue
            cached.sheets.pop(number, None)
            if cached.tail is not None and number < cached.tail.number:
                cached.gone.add(number)


def _trimmed(cached: _CachedHistory, history: int, most: int) -> list[int]:
    """Drop pages that were overwritten, and return those to read."""
    tail = cached.tail
    newest = max(history, tail.number + 1 if tail is not None else 0)
    numbers = range(max(newest - most, 0), newest)
    cached.sheets = {n: sheet for n, sheet in cached.sheets.items() if n in numbers}
    cached.gone.intersection_update(numbers)
    full = {n for n, sheet in cached.sheets.items() if sheet.is_full}
    return [n for n in numbers if n not in full and n not in cached.gone]


def _pages_of(worker: str, cached: _CachedHistory) -> list[_PageRef]:
    pages = [_PageRef.of_sheet(worker, sheet) for _, sheet in sorted(cached.sheets.items())]
    tail = cached.tail
    if tail is not None:
        paged = max([page.last for page in pages], default=0)
        rows = [row for row in tail.rows() if row.number > paged]
        pages.append(_PageRef.of_rows(worker, rows, tail.keep_ms, tail.left_out, tail.lost))
    return pages


# --- matching -------------------------------------------------------------------------------


def _fits(query: HistoryQuery) -> Callable[[str, HistoryRow], bool]:
    """Return a function that is True for matching rows."""
    asked = {"verdict": query.verdict, "route": query.route, "cause": query.cause}
    checks = [_is(name, value) for name, value in asked.items() if value]
    if query.topic.strip():
        checks.append(_is_of_topic(query.topic.strip().casefold()))
    if query.text.strip():
        checks.append(_says(query.text.strip()))
    return lambda worker, row: all(check(worker, row) for check in checks)


def _is(name: str, asked: str) -> Callable[[str, HistoryRow], bool]:
    value = attrgetter(name)
    return lambda _, row: bool(value(row) == asked)


def _is_of_topic(folded: str) -> Callable[[str, HistoryRow], bool]:
    return lambda _, row: folded in row.topic.casefold() or folded in row.detail_type.casefold()


def _says(text: str) -> Callable[[str, HistoryRow], bool]:
    folded = text.casefold()
    names = {text[:128], folded[:128]}
    key = _KEY.fullmatch(folded)
    start = key[1] if key else None
    has_topic = _is_of_topic(folded)
    has_id = _begins(text)

    def says(worker: str, row: HistoryRow) -> bool:
        return (
            row.id in names
            or row.entity in names
            or row.first_id in names
            or has_id(row.id)
            or (start is not None and row.key.hex().startswith(start))
            or has_topic(worker, row)
            or text == f"{worker}.{row.number}"
        )

    return says


def _begins(text: str) -> Callable[[str], bool]:
    """Return a matcher for the beginning of an id, or its short form: `6f1c2a10-…0001`."""
    cut = _CUT.fullmatch(text)
    start, end = cut.groups() if cut else (text, "")
    if len(start) + len(end) < _LEAST or not start:
        return lambda _: False
    starts, ends = (start, start.casefold()), (end, end.casefold())
    return lambda id_: id_.startswith(starts) and id_.endswith(ends)
