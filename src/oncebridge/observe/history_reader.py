"""
Reads the history of all workers out of the store they share.

What this process has seen itself is in its memory; of others, tails and pages are read. A page
that is full never changes, so it is read once and remembered: to look again every two seconds
costs little more than to read the tails.
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
"""So many pages are remembered as they stand in the store, about 40 MB;"""
MOST_READ: Final = 24
"""and of so many the rows."""
_TOGETHER: Final = 16
"""So many pages are asked for in one call."""
_SETTLED_MS: Final = 60_000
"""Who has told nothing for so long writes no more either."""
_KEY: Final = re.compile(r"([0-9a-f]{6,66})(?:…|\.\.\.)?")
_CUT: Final = re.compile(r"(.*?)(?:…|\.\.\.)(.*)")
_LEAST: Final = 8
"""So much of an id has to be told."""
_place: Final[Callable[[RecordedArrival], HistoryPosition]] = attrgetter("place")
_left_out: Final[Callable[["_PageRef"], int]] = attrgetter("left_out")
_lost: Final[Callable[["_PageRef"], int]] = attrgetter("lost")


class HistoryReader:
    """
    Search the history; *own* is that of this process, where it has one.

    Where the store cannot be asked, what this process has seen itself is all there is, and
    `Found` says so; without any, it raises `StoreError`.
    """

    def __init__(
        self, store: Store, own: HistoryWriter | None = None, *, clock: Clock = system_clock
    ) -> None:
        self._own = own
        self._clock = clock
        self._shelf = _PageCache(store, clock)
        self._read: OrderedDict[tuple[str, int, int], Sequence[HistoryRow]] = OrderedDict()

    async def search(self, query: HistoryQuery, reports: Sequence[Report]) -> SearchResult:
        """Find arrivals; *reports* tell which workers there are."""
        everything, is_whole = await self._leaves(reports)
        filled = [leaf for leaf in everything if leaf.count]
        leaves = sorted(filled, key=lambda leaf: leaf.last_ms, reverse=True)
        fits, before, wanted = _fits(query), query.before, query.limit + 1
        found: list[RecordedArrival] = []
        for leaf in leaves:
            if len(found) == wanted and found[-1].row.at_ms > leaf.last_ms:
                break  # all that is left is older
            if before is not None and leaf.first_ms > before[0]:
                continue
            rows = await self._rows(leaf)
            seen = [RecordedArrival(leaf.worker, row) for row in rows if fits(leaf.worker, row)]
            if before is not None:
                seen = [one for one in seen if one.place < before]
            found = nlargest(wanted, [*found, *seen], key=_place)
        return SearchResult(
            tuple(found[: query.limit]),
            len(found) > query.limit,
            sum(leaf.count for leaf in leaves),
            min([leaf.first_ms for leaf in leaves], default=None),
            _counted(everything, _left_out),
            is_whole,
            _counted(everything, _lost),
        )

    async def named(self, name: str, reports: Sequence[Report]) -> RecordedArrival | None:
        """Find one arrival by its name; its worker need not be known any more."""
        worker, _, text = name.rpartition(".")
        if not (worker and text.isascii() and text.isdigit() and len(text) < 20):
            return None
        leaves, _ = await self._leaves(reports, worker)
        for leaf in leaves:
            if leaf.worker == worker and leaf.last >= int(text):
                rows = await self._rows(leaf)
                return next(
                    (RecordedArrival(worker, row) for row in rows if row.number == int(text)), None
                )
        return None

    async def alike(self, key: bytes, reports: Sequence[Report]) -> list[RecordedArrival]:
        """Find all arrivals of one event by its key, oldest first."""
        leaves, _ = await self._leaves(reports)
        found: list[RecordedArrival] = []
        for leaf in leaves:
            if leaf.sheet is not None:
                await asyncio.sleep(0)
                if key not in leaf.sheet.text():  # much quicker than to read its rows
                    continue
            rows = await self._rows(leaf)
            found += [RecordedArrival(leaf.worker, row) for row in rows if row.key == key]
        return sorted(found, key=_place)

    # --- what there is ----------------------------------------------------------------------

    async def _leaves(
        self, reports: Sequence[Report], *further: str
    ) -> tuple[list["_PageRef"], bool]:
        """Return all that is not past keeping, and tell whether the store could be asked."""
        own = self._own.worker if self._own is not None else None
        workers = {name: _WorkerHistory(name) for name in further}
        workers |= {
            state.name: _WorkerHistory(state.name, state.history, state.at_ms)
            for state in (report.state for report in reports)
        }
        others = [worker for worker in workers.values() if worker.name != own]
        leaves = self._own_leaves()
        is_whole = True
        try:
            leaves += await self._shelf.leaves(others)
        except StoreError:
            if own is None:
                raise
            is_whole = False
        now_ms = self._clock()
        return [await self._lasting(leaf, now_ms - leaf.keep_ms) for leaf in leaves], is_whole

    def _own_leaves(self) -> list["_PageRef"]:
        own = self._own
        if own is None:
            return []
        leaves = [_PageRef.of_sheet(own.worker, sheet) for sheet in own.sheets()]
        rows = own.latest()
        latest = _PageRef.of_rows(own.worker, rows, own.keep_ms, own.left_out, own.lost)
        return [*leaves, latest]

    async def _lasting(self, leaf: "_PageRef", since_ms: int) -> "_PageRef":
        """Leave out what is past keeping."""
        if leaf.first_ms >= since_ms:
            return leaf
        if leaf.last_ms < since_ms:
            rows: Sequence[HistoryRow] = ()
        else:
            rows = [row for row in await self._rows(leaf) if row.at_ms >= since_ms]
        return _PageRef.of_rows(leaf.worker, rows, leaf.keep_ms, leaf.left_out, leaf.lost)

    async def _rows(self, leaf: "_PageRef") -> Sequence[HistoryRow]:
        sheet = leaf.sheet
        if sheet is None:
            return leaf.rows
        name = leaf.worker, sheet.number, sheet.count
        rows = self._read.get(name)
        if rows is None:
            await asyncio.sleep(0)  # a millisecond each, and there may be many
            rows = self._read[name] = sheet.rows()
        self._read.move_to_end(name)
        while len(self._read) > MOST_READ:
            self._read.popitem(last=False)
        return rows


class _PageRef(Struct, frozen=True):
    """Rows of one worker: a page as it stands in the store, or loose ones."""

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


def _counted(leaves: Sequence[_PageRef], count: Callable[[_PageRef], int]) -> int:
    """Add up what each worker has counted last."""
    counts: dict[str, int] = {}
    for leaf in leaves:
        counts[leaf.worker] = max(counts.get(leaf.worker, 0), count(leaf))
    return sum(counts.values())


# --- what stands in the store ---------------------------------------------------------------


class _WorkerHistory(Struct, frozen=True):
    """A worker, and what it has told of itself."""

    name: str
    history: int = 0
    at_ms: int = 0


class _Volume(Struct):
    """The history of one worker, as far as it was read."""

    sheets: dict[int, HistoryPage] = field(default_factory=dict)
    tail: HistoryPage | None = None
    gone: set[int] = field(default_factory=set)
    """Pages that were there once."""
    read_ms: int = 0


class _PageCache:
    """Remembers what was read from *store*, and reads only what may have changed."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._volumes: dict[str, _Volume] = {}

    async def leaves(self, workers: Sequence[_WorkerHistory]) -> list[_PageRef]:
        """Return the histories of *workers*, and forget those of all others."""
        now_ms = self._clock()
        old = self._volumes
        volumes = {worker.name: old.get(worker.name, _Volume()) for worker in workers}
        asked = [w for w in workers if volumes[w.name].read_ms <= w.at_ms + _SETTLED_MS]
        await self._read_tails({worker.name: volumes[worker.name] for worker in asked})
        most = max(min(SLOTS, MOST_SHEETS // max(len(workers), 1)), 1)
        missing: list[tuple[_Volume, int, bytes]] = []
        for worker in asked:
            volume = volumes[worker.name]
            numbers = _trimmed(volume, worker.history, most)
            missing += [(volume, n, page_key(worker.name, n)) for n in numbers]
        for at in range(0, len(missing), _TOGETHER):
            await self._read_pages(missing[at : at + _TOGETHER])
        for worker in asked:
            volumes[worker.name].read_ms = now_ms
        self._volumes = volumes
        return [leaf for name, volume in volumes.items() for leaf in _leaves_of(name, volume)]

    async def _read_tails(self, volumes: dict[str, _Volume]) -> None:
        # Before the pages: what leaves a tail is in its page by then.
        keys = [tail_key(name) for name in volumes]
        records = await self._store.peek(keys) if keys else []
        for volume, record in zip(volumes.values(), records, strict=True):
            volume.tail = HistoryPage.read(record.memo) if record is not None else None

    async def _read_pages(self, missing: Sequence[tuple[_Volume, int, bytes]]) -> None:
        records = await self._store.peek([key for _, _, key in missing])
        for (volume, number, _), record in zip(missing, records, strict=True):
            sheet = HistoryPage.read(record.memo) if record is not None else None
            if sheet is not None and sheet.number == number:
                volume.sheets[number] = sheet
                continue
            volume.sheets.pop(number, None)
            if volume.tail is not None and number < volume.tail.number:
                volume.gone.add(number)


def _trimmed(volume: _Volume, history: int, most: int) -> list[int]:
    """Let go of pages that were written over, and name those that are to be read."""
    tail = volume.tail
    newest = max(history, tail.number + 1 if tail is not None else 0)
    numbers = range(max(newest - most, 0), newest)
    volume.sheets = {n: sheet for n, sheet in volume.sheets.items() if n in numbers}
    volume.gone.intersection_update(numbers)
    full = {n for n, sheet in volume.sheets.items() if sheet.is_full}
    return [n for n in numbers if n not in full and n not in volume.gone]


def _leaves_of(worker: str, volume: _Volume) -> list[_PageRef]:
    leaves = [_PageRef.of_sheet(worker, sheet) for _, sheet in sorted(volume.sheets.items())]
    tail = volume.tail
    if tail is not None:
        paged = max([leaf.last for leaf in leaves], default=0)
        rows = [row for row in tail.rows() if row.number > paged]
        leaves.append(_PageRef.of_rows(worker, rows, tail.keep_ms, tail.left_out, tail.lost))
    return leaves


# --- what is wanted -------------------------------------------------------------------------


def _fits(query: HistoryQuery) -> Callable[[str, HistoryRow], bool]:
    """Make what tells whether a row is wanted."""
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
    """Make what knows an id by its beginning, or as a list shows it: `6f1c2a10-…0001`."""
    cut = _CUT.fullmatch(text)
    start, end = cut.groups() if cut else (text, "")
    if len(start) + len(end) < _LEAST or not start:
        return lambda _: False
    starts, ends = (start, start.casefold()), (end, end.casefold())
    return lambda id_: id_.startswith(starts) and id_.endswith(ends)
