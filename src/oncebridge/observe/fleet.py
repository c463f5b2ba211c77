"""
The reports of all workers, in their shared store.

Each worker has a record with its latest report, and its name is in one shared list. Both are cells
(`oncebridge.stores.cell`), so every store supports it.

The record of the list also has the *past*: the sum of the counts of workers that are gone. A worker
that has not reported for ten minutes is considered gone, and the worker that notices it

1. closes its record: it is marked, and not changed any more;
2. adds its counts to the past and removes its name from the list, in one step, as both are in
   one record.

The total is the past plus the records of the workers on the list; so at any moment every reported
count is included exactly once, even if a worker dies in between. A worker that was only frozen
finds its record closed. Its reported counts are in the past by then or will be, so it continues
with a new record (a new *life*) and counts from there.

The list may be lost with the newest writes of a store: each worker checks every two minutes, and
before it stops, that it is on the list. Workers that are gone are searched once a minute, by the
first worker that notices that no other has done so recently.

A worker that is killed loses its counts since its last report. The counts of a worker's last write
are counted twice only if it was then frozen for more than a day and did not see the store's
response: by then its record is forgotten.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from oncebridge.base.clock import Dice
from oncebridge.errors import StoreUnavailable
from oncebridge.events.key import make_key
from oncebridge.observe.counts import Counts
from oncebridge.observe.report import Report, RouteState, State
from oncebridge.stores.api import Record, Store
from oncebridge.stores.cell import PATIENCE_S, CellBusy, Cells, Edit

GONE_AFTER_MS: Final = 10 * 60 * 1000
"""A worker that has not reported for this long is considered gone."""
KEPT_MS: Final = 365 * 24 * 3600 * 1000
"""How long everything is kept after the last report of any worker."""
SEEN_AFTER_MS: Final = 24 * 3600 * 1000
"""How long workers that are gone are listed."""
SILENT_MS: Final = 30 * 1000
"""A worker that has not reported for this long may be down: workers report every ten seconds."""
MOST_GONE: Final = 100
MOST_PAST: Final = 50
"""The most topics and entities of the past."""

_LIST: Final = make_key("", b"workers", "", "", ())
_CHECK_MS: Final = 120_000
"""How often each worker checks that it is on the list."""
_SEARCH_MS: Final = 60_000
"""How often one of the workers searches for workers that are gone."""
_TRIES: Final = 4
_MOST_MS: Final = 253_402_300_799_999
"""The end of the year 9999: later times are invalid."""

_FORM: Final = b"\x01"
"""The first byte of a memo: the version of its format."""
_MOST_BYTES: Final = 16 << 20
_T = TypeVar("_T")


# --- record formats -----------------------------------------------------------------------


class _WorkerEntry(Struct, frozen=True, array_like=True):
    """A worker on the list, and the name of its record."""

    id: str
    name: str

    @property
    def key(self) -> bytes:
        return _key(self.id)


class _GoneWorker(Struct, frozen=True, omit_defaults=True):
    """A worker that was removed from the list; its record still exists."""

    id: str
    until_ms: int
    state: State


class _WorkerList(Struct, frozen=True, omit_defaults=True):
    """The record that all workers share."""

    lives: tuple[_WorkerEntry, ...] = ()
    past: Counts = field(default_factory=Counts)
    gone: tuple[_GoneWorker, ...] = ()
    """The latest last."""
    searched_ms: int = 0
    """When workers that are gone were last searched, by the store's clock."""

    def has(self, life: str) -> bool:
        return any(each.id == life for each in self.lives)

    def had(self, life: str) -> bool:
        return any(each.id == life for each in self.gone)

    def with_entry(self, life: _WorkerEntry) -> "_WorkerList":
        return replace(self, lives=(*self.lives, life))

    def without(self, closed: dict[str, "_WorkerRecord"], now_ms: int) -> "_WorkerList":
        """Return the list with *closed* records added to the past; each is added once."""
        past, gone = self.past, list(self.gone)
        for life in self.lives:
            record = closed.get(life.id)
            if record is not None:
                past = past + record.counts
                gone.append(_GoneWorker(life.id, now_ms + SEEN_AFTER_MS, _in_short(record.state)))
        left = tuple(life for life in self.lives if life.id not in closed)
        past = past.mended().trimmed(now_ms // 60_000, MOST_PAST)
        return replace(self, lives=left, past=past, gone=tuple(gone))

    def forgettable(self, now_ms: int) -> list[_GoneWorker]:
        """Return workers that are no longer kept, by age or by number."""
        return [
            each
            for at, each in enumerate(self.gone)
            if each.until_ms <= now_ms or at < len(self.gone) - MOST_GONE
        ]


class _WorkerRecord(Struct, frozen=True, omit_defaults=True):
    """The record of one life."""

    reported_ms: int
    """When, by the store's clock."""
    state: State
    counts: Counts
    """Since this life began."""
    base: Counts | None = None
    """Counts of the worker before this life; None for its first life."""
    closed: bool = False
    """True if the worker was considered gone: the record is final."""

    @property
    def all_counts(self) -> Counts:
        """All counts of the worker at this report."""
        return self.counts if self.base is None else self.base + self.counts

    def is_over(self, now_ms: int) -> bool:
        return self.closed or now_ms - self.reported_ms >= GONE_AFTER_MS


_encode = msgspec.msgpack.Encoder().encode
_decode_list: Final = msgspec.msgpack.Decoder(_WorkerList).decode
_decode_record: Final = msgspec.msgpack.Decoder(_WorkerRecord).decode


def _is_due(last_ms: int, every_ms: int, now_ms: int) -> bool:
    """Return True if *every_ms* have passed; a time far in the future is from another clock."""
    return abs(now_ms - last_ms) >= every_ms


def _key(life: str) -> bytes:
    return make_key("", b"worker", "", "", (life.encode(),))


def _write(value: _WorkerList | _WorkerRecord) -> bytes:
    return _FORM + zlib.compress(_encode(value))


def _read(memo: bytes, decode: Callable[[bytes], _T]) -> _T | None:
    """Decode a memo; None if there is none, or it is of another version."""
    if not memo.startswith(_FORM):
        return None
    try:
        return decode(zlib.decompressobj().decompress(memo[1:], _MOST_BYTES))
    except (msgspec.MsgspecError, zlib.error, UnicodeDecodeError, RecursionError):
        return None


def _read_list(memo: bytes) -> _WorkerList | None:
    listed = _read(memo, _decode_list)
    if listed is None or not all(_is_plausible(each.state) for each in listed.gone):
        return None
    return replace(listed, past=listed.past.mended())


def _read_record(memo: bytes) -> _WorkerRecord | None:
    record = _read(memo, _decode_record)
    if record is None or not _is_plausible(record.state):
        return None
    base = None if record.base is None else record.base.mended()
    return replace(record, counts=record.counts.mended(), base=base)


def _is_plausible(state: State) -> bool:
    return 0 <= state.started_ms <= _MOST_MS and 0 <= state.at_ms <= _MOST_MS


def _record_in(record: Record | None) -> _WorkerRecord | None:
    return None if record is None else _read_record(record.memo)


async def _peek_list(store: Store) -> _WorkerList | None:
    """Read the list; None if there is none, or it is of another version."""
    (record,) = await store.peek([_LIST])
    return None if record is None else _read_list(record.memo)


def _in_short(state: State) -> State:
    """Return the identity of a worker that is gone."""
    return State(
        name=state.name,
        host=state.host,
        pid=state.pid,
        version=state.version,
        started_ms=state.started_ms,
        at_ms=state.at_ms,
        ended=state.ended,
        routes={route: RouteState() for route in state.routes},
        history=state.history,
    )


# --- reading ------------------------------------------------------------------------------


class FleetView(Struct):
    """The reports of all workers."""

    reports: list[Report]
    """Of workers that are running or stopped recently, by name."""
    past: Counts
    """The counts of workers that are not listed any more."""
    now_ms: int
    """The store's time."""
    gone: list[Report] = []
    """Workers that were listed until a day ago, without counts, which are in the past."""

    @property
    def total(self) -> Counts:
        """The counts of all workers."""
        total = self.past
        for report in self.reports:
            total = total + report.counts
        return total.trimmed(self.now_ms // 60_000)


def here_ms(report: Report, store_ms: int) -> int:
    """Return the time of a worker's clock when the store's clock shows *store_ms*."""
    return store_ms - (report.state.store.clock_offset_ms or 0)


def is_silent(report: Report, now_ms: int) -> bool:
    """Return True if a worker has neither stopped normally nor reported recently."""
    silent_ms = here_ms(report, now_ms) - report.state.at_ms
    return not report.state.ended and silent_ms > SILENT_MS


def present(view: FleetView) -> list[State]:
    """Return the workers that are running, as far as is known."""
    return [
        report.state
        for report in view.reports
        if not report.state.ended and not is_silent(report, view.now_ms)
    ]


async def read(store: Store, own: Report | None = None) -> FleetView:
    """
    Read the reports of all workers; *own* is this process's, and newer than what it wrote.

    Raise `StoreUnavailable`. Records of other versions that cannot be decoded are left out.
    """
    now_ms = await store.now_ms()
    # The list is read first: the records of workers on it are kept, closed or not.
    listed = await _peek_list(store) or _WorkerList()
    lives = {life.id: life.name for life in listed.lives}
    if own is not None:
        lives |= {each.id: "" for each in listed.gone if each.state.name == own.state.name}
    records = await store.peek([_key(life) for life in lives]) if lives else []
    by_life = dict(zip(lives, map(_record_in, records), strict=True))
    reports: dict[str, Report] = {}
    for life in listed.lives:
        if (its := by_life[life.id]) is not None:
            before = reports.get(life.name)
            counts = its.counts if before is None else before.counts + its.counts
            reports[life.name] = Report(its.state, counts)
    if own is not None:
        counts = own.counts - _counted_elsewhere(own.state.name, listed, by_life)
        reports[own.state.name] = Report(own.state, counts)
    gone = {each.state.name: Report(each.state, Counts()) for each in listed.gone}
    return FleetView(
        [reports[name] for name in sorted(reports)],
        listed.past,
        now_ms,
        [gone[name] for name in sorted(gone) if name not in reports],
    )


def _counted_elsewhere(
    name: str, listed: _WorkerList, by_life: dict[str, _WorkerRecord | None]
) -> Counts:
    """Return the counts of a worker that are part of the past."""
    for life in listed.lives:
        its = by_life[life.id]
        if life.name == name and its is not None:
            return its.base or Counts()
    for each in reversed(listed.gone):
        its = by_life.get(each.id)
        if each.state.name == name and its is not None:
            return its.all_counts
    return Counts()


# --- writing ------------------------------------------------------------------------------


class FleetMember:
    """One worker among all that share *store*."""

    def __init__(self, store: Store, *, dice: Dice) -> None:
        self._store = store
        self._dice = dice
        # Reports are written again soon, and may be written twice.
        self._cells = Cells(store, dice, waits_for_store=False, idempotent=True)
        self._life = ""
        self._base: Counts | None = None
        """Counts before this life, which are part of the past."""
        self._reported: Counts | None = None
        """Counts that are known to be in the store, of this and earlier lives."""
        self._reported_ms = 0
        self._is_listed = False
        self._may_be_listed = False
        self._checked_ms = 0
        self._check_after_ms = 0
        """Until when the last check of the list is valid."""
        self._has_turn = False
        """True if this worker searches for workers that are gone."""

    async def write(self, report: Report) -> None:
        """Write *report*; raise `StoreUnavailable` if that fails. Safe to retry."""
        self._has_turn = False
        listed = await self._report(report)
        if listed is None:
            return
        if not self._has_turn and _is_due(listed.searched_ms, _SEARCH_MS, self._reported_ms):
            # Written in any case, so that the list does not expire while workers report.
            try:
                listed = await self._change_list(self._take_turn, patience_s=0)
            except CellBusy:  # probably by another worker, for the same purpose
                return
        if self._has_turn:
            await self._remove_gone(listed)

    async def leave(self, report: Report) -> None:
        """Write the last report of a worker that stops normally."""
        self._check_after_ms = 0  # no later check could fix it
        await self._report(Report(replace(report.state, ended=True), report.counts))

    async def _report(self, report: Report) -> _WorkerList | None:
        """Write *report*, and make sure to be on the list; return the list if it was read."""
        for _ in range(_TRIES):
            # The record is written first: every worker on the list must have one.
            if not await self._write(report):
                continue
            if self._is_listed and not _is_due(
                self._checked_ms, self._check_after_ms, self._reported_ms
            ):
                return None
            listed = await self._check_list(report.state.name)
            if self._is_listed:
                return listed
        raise StoreUnavailable("other workers keep writing the record with this worker's counts")

    # --- the record of this worker --------------------------------------------------------

    async def _write(self, report: Report) -> bool:
        """Write *report* into this life's record; return False if a new life began instead."""
        if not self._life:
            self._begin(None)
        key, may_be_forgotten = _key(self._life), self._may_be_listed

        def renewed(memo: bytes, now_ms: int) -> bytes | None:
            before = _read_record(memo)
            if before.closed if before is not None else memo:
                return None  # closed, or another version's
            if not memo and may_be_forgotten and now_ms - self._reported_ms >= GONE_AFTER_MS:
                return None
            counts = report.counts if self._base is None else report.counts - self._base
            return _write(_WorkerRecord(now_ms, report.state, counts, self._base))

        memo = await self._cells.edit_one(key, Edit(renewed, KEPT_MS))
        if not memo and not await self._is_forgotten():
            may_be_forgotten = False  # the store has lost the record
            memo = await self._cells.edit_one(key, Edit(renewed, KEPT_MS))
        record = _read_record(memo)
        if record is not None and not record.closed:
            self._reported, self._reported_ms = report.counts, record.reported_ms
            return True
        if record is None:  # removed, or another version's
            if not memo:
                await self._store.forget([key])
            self._begin(self._reported)
        else:
            self._begin(record.counts if self._base is None else self._base + record.counts)
        return False

    def _begin(self, base: Counts | None) -> None:
        """Begin a life; *base* are earlier counts, which it does not report."""
        self._life = self._dice.tokens(1)[0].hex()
        self._base = self._reported = base
        self._is_listed = self._may_be_listed = False

    async def _is_forgotten(self) -> bool:
        """Return True if this worker was considered gone so long ago that its record was removed."""
        listed = await _peek_list(self._store)
        return listed is not None and not listed.has(self._life)

    # --- the list -------------------------------------------------------------------------

    async def _check_list(self, name: str) -> _WorkerList:
        """Read the list, and add this worker to it."""
        listed = await _peek_list(self._store) if self._is_listed else None
        if listed is None or not listed.has(self._life):
            self._is_listed = False
            listed = await self._enter(name)
        self._is_listed = listed.has(self._life)
        self._checked_ms = self._reported_ms
        self._check_after_ms = int(_CHECK_MS * (0.5 + self._dice.fraction() / 2))
        return listed

    async def _enter(self, name: str) -> _WorkerList:
        """Add this worker to the list, unless its record may have expired."""
        life = _WorkerEntry(self._life, name)

        def entered(listed: _WorkerList, now_ms: int) -> _WorkerList | None:
            # An earlier try may have succeeded, and this life may have ended since.
            may_be_over = now_ms - self._reported_ms >= GONE_AFTER_MS or listed.had(life.id)
            if may_be_over or listed.has(life.id):
                return None
            return self._take_turn(listed.with_entry(life), now_ms)

        self._may_be_listed = True
        return await self._change_list(entered)

    async def _change_list(
        self,
        change: Callable[[_WorkerList, int], _WorkerList | None],
        patience_s: float = PATIENCE_S,
    ) -> _WorkerList:
        """Replace the list by the result of *change*, if not None, and return the list."""
        listed = _WorkerList()

        def changed(memo: bytes, now_ms: int) -> bytes | None:
            nonlocal listed
            found = _read_list(memo) if memo else _WorkerList()
            if found is None:
                raise StoreUnavailable("the list of workers in the store is another version's")
            after = change(found, now_ms)
            listed = found if after is None else after
            return None if after is None else _write(after)

        await self._cells.edit_one(_LIST, Edit(changed, KEPT_MS), patience_s=patience_s)
        return listed

    # --- workers that are gone ------------------------------------------------------------

    def _take_turn(self, listed: _WorkerList, now_ms: int) -> _WorkerList:
        """Announce that this worker searches for workers that are gone, unless another did."""
        self._has_turn = _is_due(listed.searched_ms, _SEARCH_MS, now_ms)
        return replace(listed, searched_ms=now_ms) if self._has_turn else listed

    async def _remove_gone(self, listed: _WorkerList) -> None:
        """Find workers that are gone, and add their counts to the past."""
        now_ms = listed.searched_ms
        closed = await self._close([each for each in listed.lives if each.id != self._life], now_ms)
        forgotten = {each.id for each in listed.forgettable(now_ms)}
        if forgotten:
            await self._store.forget([_key(life) for life in forgotten])
        if closed or forgotten:

            def tidied(listed: _WorkerList, now_ms: int) -> _WorkerList:
                after = listed.without(closed, now_ms)
                kept = tuple(each for each in after.gone if each.id not in forgotten)
                return replace(after, gone=kept)

            await self._change_list(tidied)

    async def _close(self, lives: Sequence[_WorkerEntry], now_ms: int) -> dict[str, _WorkerRecord]:
        """Close the records of workers that are gone, and return them."""
        records = await self._store.peek([life.key for life in lives]) if lives else []
        found = dict(zip(lives, map(_record_in, records), strict=True))
        over = [
            life
            for life, record in zip(lives, records, strict=True)
            if record is None
            or ((its := found[life]) is not None and not its.closed and its.is_over(now_ms))
        ]
        if over:
            edits = {life.key: Edit(partial(_closed, life), KEPT_MS) for life in over}
            answers = await self._cells.edit(edits, patience_s=0)
            for life in over:
                answer = answers[life.key]
                found[life] = _read_record(answer) if isinstance(answer, bytes) else None
        return {life.id: its for life, its in found.items() if its is not None and its.closed}


def _closed(life: _WorkerEntry, memo: bytes, now_ms: int) -> bytes | None:
    """Return the closed record; None if the worker is not gone, or it cannot be decoded."""
    if not memo:  # the store has lost it
        unknown = State(life.name, "", 0, "", now_ms, now_ms)
        return _write(_WorkerRecord(now_ms, unknown, Counts(), closed=True))
    record = _read_record(memo)
    if record is None or not record.is_over(now_ms):
        return None
    return _write(replace(record, closed=True))
