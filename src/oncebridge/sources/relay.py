"""
Passes records from a file, a spool, a shard or a queue to the router, and retries in place.

Records are numbered as they are read, and kept here until they are final. A few batches run at
once. A record that failed is retried when it is due; meanwhile others are processed, as long as
not too many wait, unless they are in the same lane or the router keeps entities in order.
Everything before the earliest unfinished record is final, and may be checkpointed. While no route
accepts events, nothing more is read.

If records can be returned to their origin (a queue), those that another worker holds and those
that may be the cause of their own failure are returned. The rest waits here, so that an outage
uses up no receive counts. A record that causes an unexpected error is retried alone from then on,
and returned in the end.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.base.clock import wait_until_set
from oncebridge.engine.batch import Arrival
from oncebridge.engine.cpu_turns import SMALL
from oncebridge.engine.router import Router, RouterAnswer
from oncebridge.engine.verdict import Verdict

_T = TypeVar("_T")

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 30.0
_LOOK_AGAIN_S = 1.0
# The other copy is often being processed by this very process, and almost done.
_PATIENCE = timedelta(seconds=2)
_MOST_UNEXPECTED_ERRORS, _RETRY_LATER_MS = 8, 300_000
_MOST_MARKS = 100_000
_STOPPED = RouterAnswer(
    acknowledge=False, verdict=Verdict.FAILED, reason="this worker is shutting down"
)


class SourceRecord(Struct, frozen=True, gc=False):
    """A record that was read from a source."""

    place: int
    """Its number, or the position after it; rises in the order of reading."""
    arrivals: tuple[Arrival, ...]
    """Its events: one, as a rule. The record is final when all of them are."""
    lane: str | None = None
    """In a lane, a record starts only when the one before it is final."""


class Relay:
    """
    Pass records from *take* to *router*, and report to *final* which are done.

    *take* returns the next records, or none at the end; *takers* of it run at the same time, as
    long as no more than *ahead* records are waiting. *passed* is called with the place up to which
    everything is final, whenever that moves. *hand_back* gets the records that are returned to
    their origin, with the answer, and at a stop all that are left. A take that is running at a
    stop has *leave_s* to end.
    """

    def __init__(
        self,
        router: Router,
        *,
        take: Callable[[], Coroutine[Any, Any, Sequence[SourceRecord]]],
        final: Callable[[Sequence[int]], Awaitable[None]] | None = None,
        passed: Callable[[int], Awaitable[None]] | None = None,
        hand_back: Callable[[Sequence[tuple[SourceRecord, RouterAnswer]]], Awaitable[None]]
        | None = None,
        takers: int = 1,
        ahead: int = 0,
        at_once: int = 4,
        batch: int = 500,
        most_waiting: int = 2000,
        most_in_hand: int = 20_000,
        most_bytes: int = 128 * 1024 * 1024,
        leave_s: float = 0.0,
    ) -> None:
        # A record that was returned is not final, and must not be passed.
        assert hand_back is None or passed is None  # noqa: S101
        self._router = router
        self._take = take
        self._final = final
        self._passed = passed
        self._hand_back = hand_back
        self._takers = takers
        self._ahead = ahead
        # Two batches at once would retry in any order.
        self._is_ordered = router.is_ordered
        self._at_once = 1 if self._is_ordered else at_once
        self._batch = batch
        self._most_waiting = most_waiting
        self._most_in_hand = most_in_hand
        self._most_bytes = most_bytes
        self._leave_s = leave_s

        self._unfinished: dict[int, _RelayEntry] = {}
        self._bytes = 0
        self._marks: deque[_PlaceMark] = deque()
        """The places of all records that were read and not passed yet, in order."""
        self._lanes: dict[str, deque[_RelayEntry]] = {}
        self._ready: deque[_RelayEntry] = deque()
        self._waiting: list[tuple[float, int, _RelayEntry]] = []
        """A heap of entries to retry, by the time when they are due."""
        self._retrying = 0
        """How many unfinished records have failed at least once."""
        self._numbers = count()
        self._batches: set[asyncio.Task[None]] = set()

        self._finished: list[int] = []
        self._to_return: list[tuple[SourceRecord, RouterAnswer]] = []
        self._reporting: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._room_made = asyncio.Event()
        self._stopping = asyncio.Event()
        self._at_end = False
        self._error: BaseException | None = None
        self.is_through = False
        """There is nothing more to read, and all that was read is final."""

    def stop(self) -> None:
        """Read nothing more; records that fail from now on are not retried."""
        self._stopping.set()
        self._changed.set()

    async def run(self) -> None:
        """
        Run until *take* has nothing more, or until `stop`.

        If *take* raises, the records it returned before are still finished; any other error is
        raised as soon as the running batches have ended.
        """
        takers = {asyncio.create_task(self._take_all()) for _ in range(self._takers)}
        try:
            while not self._is_over(takers):
                self._changed.clear()
                wake_s = self._dispatch()
                await wait_until_set(self._changed, wake_s)
        except asyncio.CancelledError:
            for batch in self._batches:
                batch.cancel()
            raise
        finally:
            self.stop()
            await self._finish(takers)
        if self._error is not None:
            raise self._error
        self.is_through = self._at_end and not self._unfinished

    def _is_over(self, takers: "set[asyncio.Task[None]]") -> bool:
        if self._batches or self._reporting is not None:
            return False
        if self._stopping.is_set():
            return True
        is_taking = self._error is None and not all(taker.done() for taker in takers)
        return not (is_taking or self._unfinished)

    async def _finish(self, takers: "set[asyncio.Task[None]]") -> None:
        """Wait for the running batches, and return the records that are left."""
        # They notice the stop themselves.
        await asyncio.gather(*takers, return_exceptions=True)
        while self._batches or self._reporting is not None:
            await asyncio.wait([*self._batches, *([self._reporting] if self._reporting else [])])
        if self._hand_back is not None and self._unfinished:
            left = [(entry.record, _STOPPED) for entry in self._unfinished.values()]
            try:
                await self._hand_back(left)
            except Exception as error:  # noqa: BLE001 - raised by `run`
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self.stop()

    # --- reading -----------------------------------------------------------------------

    async def _take_all(self) -> None:
        try:
            while self._wants_more() and await self._run_until_stop(self._wait_for_room()):
                records = await self._run_until_stop(self._take_more(), self._leave_s)
                if not records:
                    self._at_end = self._at_end or records is not None
                    break
                self._add(records)
        except Exception as error:  # noqa: BLE001 - raised when what was taken is final
            self._error = self._error or error
        finally:
            self._changed.set()

    async def _take_more(self) -> Sequence[SourceRecord] | None:
        """Read, unless there was a stop or an error of another reader in between."""
        return await self._take() if self._wants_more() else None

    def _wants_more(self) -> bool:
        return not self._stopping.is_set() and self._error is None

    async def _wait_for_room(self) -> bool:
        """Wait until there is room for more, and a route accepts events."""
        while True:
            unavailable_s = self._router.unavailable_s()
            if not unavailable_s and self._has_room():
                return True
            self._room_made.clear()
            look_s = min(max(unavailable_s, 0.1), _LOOK_AGAIN_S) if unavailable_s else None
            await wait_until_set(self._room_made, look_s)

    def _has_room(self) -> bool:
        return (
            len(self._ready) <= self._ahead
            and self._retrying < self._most_waiting
            and len(self._unfinished) < self._most_in_hand
            and self._bytes < self._most_bytes
            # This many would be read again after a crash.
            and len(self._marks) < _MOST_MARKS
        )

    async def _run_until_stop(
        self, work: Coroutine[Any, Any, _T], leave_s: float = 0.0
    ) -> _T | None:
        """Wait for *work*, but not longer than *leave_s* beyond `stop`."""
        task = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({stopping, task}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and leave_s:
                await asyncio.wait({task}, timeout=leave_s)
        finally:
            stopping.cancel()
            if not task.done():
                task.cancel()
        return task.result() if task.done() else None

    def _add(self, records: Sequence[SourceRecord]) -> None:
        for record in records:
            entry = _RelayEntry(record)
            self._unfinished[record.place] = entry
            self._bytes += entry.size
            if self._passed is not None:
                self._marks.append(entry.mark)
            if record.lane is None:
                self._ready.append(entry)
                continue
            lane = self._lanes.setdefault(record.lane, deque())
            lane.append(entry)
            if len(lane) == 1:
                self._ready.append(entry)
        self._changed.set()

    # --- processing --------------------------------------------------------------------

    def _dispatch(self) -> float | None:
        """Start batches; return in how many seconds the next one is due, if that is known."""
        if self._stopping.is_set():
            return None
        now, unavailable_s = self._now(), self._router.unavailable_s()
        while len(self._batches) < self._at_once and (
            entries := self._next_batch(now, unavailable_s)
        ):
            task = asyncio.create_task(self._process(entries))
            self._batches.add(task)
            task.add_done_callback(self._on_batch_done)
        if self._has_room():
            self._room_made.set()
        if len(self._batches) >= self._at_once:
            return None
        retries = [self._waiting[0][0] - now] if self._waiting else []
        if self._ready and unavailable_s:
            retries.append(min(unavailable_s, _LOOK_AGAIN_S))
        return min(retries, default=None)

    def _next_batch(self, now: float, unavailable_s: float) -> "list[_RelayEntry]":
        """Return the next batch: first retries that are due, then new records."""
        if self._is_ordered and self._waiting:
            # Nothing may overtake the records that wait, and they keep their own order.
            if self._waiting[0][0] > now:
                return []
            again = sorted([entry for *_, entry in self._waiting], key=_place)
            if again[0].unexpected_errors:  # alone, and the others after it
                again = again[:1]
            self._waiting = [one for one in self._waiting if one[-1] not in again]
            heapify(self._waiting)
            return again
        entries: list[_RelayEntry] = []
        while self._waiting and self._waiting[0][0] <= now and len(entries) < self._batch:
            if self._waiting[0][-1].unexpected_errors and entries:
                return entries
            entries.append(heappop(self._waiting)[-1])
            if entries[-1].unexpected_errors:
                return entries
        while not unavailable_s and self._ready and len(entries) < self._batch:
            entries.append(self._ready.popleft())
        return entries

    async def _process(self, entries: "list[_RelayEntry]") -> None:
        owners = [entry for entry in entries for _ in entry.arrivals]
        arrivals = [arrival for entry in entries for arrival in entry.arrivals]
        for entry in entries:
            entry.left, entry.arrivals, entry.answer = len(entry.arrivals), [], None
        is_answered = bytearray(len(owners))

        def answered(at: int, answer: RouterAnswer) -> None:
            if not is_answered[at]:
                is_answered[at] = True
                self._on_answer(owners[at], arrivals[at], answer)

        read = arrivals
        if sum([entry.size for entry in entries]) > SMALL:
            read = await self._router.read_all(arrivals)
        in_lanes = any([entry.record.lane is not None for entry in entries])  # noqa: C419 - quicker
        answers = await self._router.process(
            read,
            patience=_PATIENCE,
            answered=answered,
            in_place=in_lanes or self._hand_back is None,
        )
        for at, answer in enumerate(answers):
            answered(at, answer)

    def _on_batch_done(self, task: asyncio.Task[None]) -> None:
        self._batches.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)
        self._changed.set()

    def _on_answer(self, entry: "_RelayEntry", arrival: Arrival, answer: RouterAnswer) -> None:
        """Act on the answer to an arrival, when it is the last of its record."""
        entry.left -= 1
        if not answer.acknowledge:
            entry.arrivals.append(arrival)
        if entry.answer is None or entry.answer.acknowledge:
            entry.answer = answer
        if entry.left:
            return
        answer = entry.answer
        if answer.acknowledge:
            self._finish_entry(entry)
            return
        if not answer.retry_after_ms:
            entry.unexpected_errors += 1
        if entry.unexpected_errors >= _MOST_UNEXPECTED_ERRORS and self._hand_back is not None:
            answer = replace(answer, blamed=True, retry_after_ms=_RETRY_LATER_MS)
        if self._may_return(answer):
            self._return_to_origin(entry, answer)
        else:
            self._retry_later(entry, answer)

    def _may_return(self, answer: RouterAnswer) -> bool:
        if self._hand_back is None or self._is_ordered:
            return False  # later records would overtake it
        return answer.verdict is Verdict.BUSY or answer.blamed

    def _finish_entry(self, entry: "_RelayEntry") -> None:
        self._remove(entry)
        self._finished.append(entry.record.place)
        if entry.record.lane is not None:
            lane = self._lanes[entry.record.lane]
            lane.popleft()
            if lane:
                self._ready.append(lane[0])
                self._changed.set()
            else:
                del self._lanes[entry.record.lane]
        self._report_soon()

    def _return_to_origin(self, entry: "_RelayEntry", answer: RouterAnswer) -> None:
        """Return a record to its origin, with all that are queued after it in its lane."""
        lane = entry.record.lane
        for one in [entry] if lane is None else self._lanes.pop(lane):
            self._remove(one)
            self._to_return.append((one.record, answer))
        self._report_soon()

    def _retry_later(self, entry: "_RelayEntry", answer: RouterAnswer) -> None:
        due = self._now() + self._pause_s(answer, entry.retries)
        self._retrying += not entry.retries
        entry.retries += 1
        heappush(self._waiting, (due, next(self._numbers), entry))
        self._changed.set()

    def _remove(self, entry: "_RelayEntry") -> None:
        entry.mark.is_final = True
        del self._unfinished[entry.record.place]
        self._bytes -= entry.size
        self._retrying -= bool(entry.retries)
        if self._has_room():
            self._room_made.set()

    def _pause_s(self, answer: RouterAnswer, retries: int) -> float:
        """
        Return how many seconds to wait: as long as the answer says, or longer.

        The pause grows with each retry.
        """
        grown = max(_SHORTEST_PAUSE_S * 2.0 ** min(retries, 10), self._router.unavailable_s())
        return max(answer.retry_after_ms / 1000, min(grown, _LONGEST_PAUSE_S))

    # --- reporting ---------------------------------------------------------------------

    def _report_soon(self) -> None:
        if self._reporting is None:
            self._reporting = asyncio.create_task(self._report())

    async def _report(self) -> None:
        """Report records that are final or returned, as many as there are at a time."""
        try:
            while self._finished or self._to_return:
                done, self._finished = self._finished, []
                back, self._to_return = self._to_return, []
                reached = self._passed_place()
                if done and self._final is not None:
                    await self._final(done)
                if back and self._hand_back is not None:
                    await self._hand_back(back)
                if reached is not None and self._passed is not None:
                    await self._passed(reached)
        except Exception as error:  # noqa: BLE001 - raised when all are back
            self._fail(error)
        finally:
            self._reporting = None
            self._changed.set()

    def _passed_place(self) -> int | None:
        """Return the place up to which everything is final, if it has moved."""
        place = None
        while self._marks and self._marks[0].is_final:
            place = self._marks.popleft().place
        return place

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class _PlaceMark:
    """A place, and whether its record is final; it outlives the record."""

    __slots__ = ("is_final", "place")

    def __init__(self, place: int) -> None:
        self.place = place
        self.is_final = False


class _RelayEntry:
    """An unfinished record, and what is known about it."""

    __slots__ = (
        "answer",
        "arrivals",
        "left",
        "mark",
        "record",
        "retries",
        "size",
        "unexpected_errors",
    )

    def __init__(self, record: SourceRecord) -> None:
        self.record = record
        self.mark = _PlaceMark(record.place)
        self.arrivals: list[Arrival] = list(record.arrivals)
        """The events that are not final yet."""
        self.left = 0
        """Arrivals that are not answered yet."""
        self.answer: RouterAnswer | None = None
        self.retries = 0
        """How often it failed."""
        self.unexpected_errors = 0
        """How often that was because of an unexpected error."""
        self.size = sum([len(a if isinstance(a, bytes) else a.raw) for a in record.arrivals])


def _place(entry: _RelayEntry) -> int:
    return entry.record.place
