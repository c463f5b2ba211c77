"""
The pump: takes records from a source, and gives each of them one answer.

Records that are put within one turn of the event loop are processed together, in batches. Large
ones are parsed first, in turns (see `oncebridge.engine.cpu_turns`). The answer to a record is
final. What happens before it depends on the source:

- It retries by itself (HTTP, Lambda): every answer is final.
- It is read to its end (a file, a spool, a shard): a record is retried here until it is
  acknowledged.
- It takes records back (a queue): those that another worker holds, and those that may be the cause
  of their own failure, are returned. The rest is retried here, so that an outage uses up no receive
  counts.

Meanwhile others are processed, unless they are in the same lane, or the router keeps entities in
order. While no route accepts events, nothing more is read.

Lanes are the order that a source has: its FIFO groups and partition keys. They are kept here and
not in the gateway, because a record keeps its place while it waits for a retry.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from datetime import timedelta
from enum import Enum
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from oncebridge.base.clock import wait_until_set
from oncebridge.base.formatting import raised_at
from oncebridge.engine.cpu_turns import SMALL, TURN_S
from oncebridge.engine.router import UNEXPECTED_ERROR, OnAnswer, Router, RouterAnswer
from oncebridge.engine.verdict import Verdict
from oncebridge.events.event import Event, Unreadable

_H = TypeVar("_H")
_log = logging.getLogger("oncebridge")

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 30.0
_EARLY_S: Final = 0.001  # a timer may fire a little early
_LAST_LOOK_S: Final = 0.5  # before the end, busy events are not waited for: the gateway polls
_MOST_UNEXPECTED_ERRORS, _RETRY_LATER_MS = 8, 300_000
_MOST_UNTOLD = 100_000  # so many would be read again after a crash
_SHARE_OF_LARGE: Final = 0.75
"""Large requests may take up this much of the capacity; the rest is for single records."""

_FULL = RouterAnswer(
    acknowledge=False,
    verdict=Verdict.FAILED,
    retry_after_ms=1000,
    reason="too many events in progress",
)
_RATE_LIMITED = RouterAnswer(
    acknowledge=False, verdict=Verdict.FAILED, reason="too many events are waiting for the sink"
)
_STOPPED = RouterAnswer(acknowledge=False, verdict=None, reason="this worker is shutting down")
_NO_TIME = RouterAnswer(acknowledge=False, verdict=None, reason="no time left")
_QUEUED_AFTER: Final = "queued after one that has to be retried"


class Retry(Enum):
    """Which records are retried here; the answer to any other is final."""

    NOTHING = "nothing"
    WHAT_IS_NOT_RETURNED = "what is not returned"
    """Returned is what another worker holds, and what may be the cause of its own failure."""
    EVERYTHING = "everything"
    """Until it is acknowledged."""


class SourceRecord(Struct, Generic[_H], eq=False):
    """A record of a source, and its state in the pump."""

    handle: _H
    """What the source knows it by."""
    raw: bytes | Unreadable
    lane: str | None = None
    """In a lane, a record starts only when the one before it is final."""
    origin: str = ""
    """Where it was read, such as `line 7`; reported if it is not an event."""

    number: int = 0
    """Rises in the order in which records were put."""
    events: Sequence[Event | Unreadable] = ()
    """Those that are not final: one, as a rule. Empty until it is parsed."""
    batch: Sequence[object] | None = None
    """Those that it is processed with, until it is answered."""
    retries: int = 0
    unexpected_errors: int = 0
    answer: RouterAnswer | None = None
    """Its answer, while that waits for records before it."""

    @property
    def size(self) -> int:
        raw = self.raw
        return len(raw.raw if isinstance(raw, Unreadable) else raw)


class Pump(Struct, Generic[_H], eq=False):
    """
    Process records on *router*, and call *answered* once for each, with its handle and its answer.

    *in_order*: in the order in which the records were put; one that is behind an unfinished record
    is not acknowledged. *unwraps*: records may be envelopes with events in them. No batch is larger
    than *batch*, and no more than *at_once* run at the same time. A busy key is waited for in
    place for *patience_s*, and everything ends at *ends* of the event loop's time.

    The other options limit how much `run` reads: as long as no more than *ahead* records are
    waiting to be started, *most_waiting* to be retried, and *most_in_hand* with *most_bytes* are
    unfinished.
    """

    router: Router
    answered: Callable[[_H, RouterAnswer], None]
    retry: Retry = Retry.EVERYTHING
    in_order: bool = False
    unwraps: bool = False
    batch: int = 500
    at_once: float = 4
    patience_s: float = 2.0
    """The other copy is often being processed by this very process, and almost done."""
    ends: float = inf
    ahead: int = 0
    most_waiting: int = 2000
    most_in_hand: int = 20_000
    most_bytes: int = 128 * 1024 * 1024

    is_through: bool = False
    """There is nothing more to read, and all that was read is acknowledged."""
    _unfinished: dict[SourceRecord[_H], None] = {}
    _bytes: int = 0
    _untold: deque[SourceRecord[_H]] = field(default_factory=deque)
    """If answers are told in order: the records without one, and those behind them."""
    _lanes: dict[str, deque[SourceRecord[_H]]] = {}
    _ready: deque[SourceRecord[_H]] = field(default_factory=deque)
    _waiting: list[tuple[float, int, SourceRecord[_H]]] = []
    """A heap of records to retry, by the time when they are due."""
    _retrying: int = 0  # how many unfinished records have failed at least once
    _numbers: Iterator[int] = field(default_factory=count)
    _tasks: set[asyncio.Task[None]] = set()
    _soon: asyncio.Handle | None = None
    _timer: asyncio.TimerHandle | None = None
    _is_ordered: bool = False
    _left_over: RouterAnswer = _STOPPED
    """The answer to records that are not processed."""
    _is_stopped: bool = False
    _is_cancelled: bool = False
    _is_closed: bool = False
    _at_end: bool = False
    _error: Exception | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _room_made: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._room_made.set()
        self._is_ordered = self.retry is not Retry.NOTHING and self.router.is_ordered
        self.at_once = 1 if self._is_ordered else self.at_once  # two would retry in any order
        self._left_over = _STOPPED if self.ends == inf else _NO_TIME

    # --- in ----------------------------------------------------------------------------

    @property
    def untold(self) -> int:
        """How many records have no answer yet."""
        return len(self._untold or self._unfinished)

    def is_full(self, records: int = 0, size: int = 0, share: float = 1.0) -> bool:
        """Return True if there is no room for so many more *records*, with *size* bytes."""
        return (
            len(self._unfinished) + records > self.most_in_hand * share
            or self._bytes + size > self.most_bytes * share
        )

    def put(self, records: Sequence[SourceRecord[_H]]) -> None:
        """Accept records, in order."""
        if self._accept(records) <= SMALL:
            self._enqueue(records)
        else:
            self._start(self._parse_first(records))

    def _accept(self, records: Sequence[SourceRecord[_H]]) -> int:
        """Answer for *records* from now on; return their size."""
        size = 0
        for record in records:
            record.number = next(self._numbers)
            self._unfinished[record] = None
            size += record.size
        self._bytes += size
        if self.in_order:
            self._untold += records
        if self._is_closed:
            self._answer_rest()
        return size

    async def _parse_first(self, records: Sequence[SourceRecord[_H]]) -> None:
        """Parse *records* in turns, and then start them."""
        turns = self.router.cpu_turns
        left = deque(records)
        try:
            while left:
                async with turns:
                    while left and turns.used_s < TURN_S:
                        self._parse(left.popleft())
        except Exception as error:  # noqa: BLE001 - it is parsed again, and then it is an answer
            _log_unexpected("oncebridge.parsing_failed", error)
        self._enqueue(records)

    def _parse(self, record: SourceRecord[_H]) -> None:
        raw, origin = record.raw, record.origin
        if isinstance(raw, Unreadable):
            record.events = (raw,)
        elif self.unwraps:
            record.events = self.router.unwrap(raw)
        else:
            record.events = (self.router.read(raw),)
        if origin:
            record.events = [
                replace(event, message=f"{origin}: {event.message}")
                if isinstance(event, Unreadable)
                else event
                for event in record.events
            ]

    def _enqueue(self, records: Sequence[SourceRecord[_H]]) -> None:
        if self._is_stopped:
            return
        for record in records:
            if record.lane is not None:
                lane = self._lanes.setdefault(record.lane, deque())
                lane.append(record)
                if len(lane) > 1:
                    continue
            self._ready.append(record)
        self._dispatch_soon()

    # --- reading -----------------------------------------------------------------------

    async def run(
        self,
        take: Callable[[], Awaitable[Sequence[SourceRecord[_H]] | None]],
        *,
        takers: int = 1,
        may_take: Callable[[], bool] = lambda: True,
        leave_s: float = 0.0,
    ) -> None:
        """
        Process what *take* returns until it returns None, at the end, or until `stop`.

        *takers* of it run at the same time, while *may_take*. One that is running at a stop has
        *leave_s* to end. If it raises, the records it returned before are still finished, and then
        the error is raised.
        """
        readers = {asyncio.create_task(self._read_all(take, may_take)) for _ in range(takers)}
        try:
            while not self._is_stopped:
                is_reading = self._error is None and not all(reader.done() for reader in readers)
                if not (is_reading or self._unfinished or self._tasks):
                    break
                self._changed.clear()
                await self._changed.wait()
        except asyncio.CancelledError:
            for task in self._tasks:
                task.cancel()
            raise
        finally:
            self.stop()
            await asyncio.wait(readers, timeout=leave_s)
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, *self._tasks, return_exceptions=True)
            self.is_through = self._at_end and not self._unfinished
            self._answer_rest()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Read nothing more; records that fail from now on are not retried, and none is started."""
        self._is_stopped = True
        self._changed.set()
        self._room_made.set()
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()

    async def _read_all(
        self,
        take: Callable[[], Awaitable[Sequence[SourceRecord[_H]] | None]],
        may_take: Callable[[], bool],
    ) -> None:
        try:
            while await self._wait_for_room(may_take):
                records = await take()
                if records is None:
                    self._at_end = True
                    break
                if self._accept(records) <= SMALL:
                    self._enqueue(records)
                else:
                    await self._parse_first(records)
        except Exception as error:  # noqa: BLE001 - raised when what was read is final
            self._error = self._error or error
            self._room_made.set()
        finally:
            self._changed.set()

    async def _wait_for_room(self, may_take: Callable[[], bool]) -> bool:
        """Wait until there is room for more and a route accepts events; False: read nothing more."""
        while not self._is_stopped and self._error is None:
            unavailable_s = self.router.unavailable_s()
            may_read = not unavailable_s and may_take()
            if may_read and self._has_room():
                return True
            self._room_made.clear()
            await wait_until_set(
                self._room_made, None if may_read else _look_again_s(unavailable_s)
            )
        return False

    def _has_room(self) -> bool:
        return (
            len(self._ready) <= self.ahead
            and self._retrying < self.most_waiting
            and len(self._unfinished) < self.most_in_hand
            and self._bytes < self.most_bytes
            and len(self._untold) < _MOST_UNTOLD
        )

    # --- processing --------------------------------------------------------------------

    def _dispatch_soon(self) -> None:
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Start batches, as many as may run, and come back when a retry is due."""
        self._soon = None
        if self._is_stopped:
            return
        now, unavailable_s = self._now() + _EARLY_S, 0.0
        if self.retry is not Retry.NOTHING:
            unavailable_s = self.router.unavailable_s()
        while len(self._tasks) < self.at_once and (records := self._next_batch(now, unavailable_s)):
            for record in records:
                record.batch = records
            self._start(self._process(records))
        self._make_room()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = [self._waiting[0][0]] if self._waiting else []
        if self._ready and unavailable_s:
            due.append(now + _look_again_s(unavailable_s))
        if due and len(self._tasks) < self.at_once:
            self._timer = asyncio.get_running_loop().call_at(min(due), self._dispatch)

    def _next_batch(self, now: float, unavailable_s: float) -> list[SourceRecord[_H]]:
        """Return the next batch: first retries that are due, then new records."""
        waiting, ready = self._waiting, self._ready
        if self._is_ordered and waiting:
            # Nothing may overtake the records that wait, and they keep their own order.
            if waiting[0][0] > now:
                return []
            again = sorted(waiting, key=lambda entry: entry[1])
            if again[0][2].unexpected_errors:  # alone, and the others after it
                again = again[:1]
            self._waiting = [entry for entry in waiting if entry not in again]
            heapify(self._waiting)
            return [record for *_, record in again]
        records: list[SourceRecord[_H]] = []
        while waiting and waiting[0][0] <= now and len(records) < self.batch:
            if waiting[0][2].unexpected_errors and records:
                return records
            records.append(heappop(waiting)[2])
            if records[-1].unexpected_errors:
                return records
        while not unavailable_s and ready and len(records) < self.batch:
            records.append(ready.popleft())
        return records

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._waiting or self._ready:
            self._dispatch_soon()
        self._changed.set()

    async def _process(self, records: list[SourceRecord[_H]]) -> None:
        """Process a batch, and see to it that each record is answered."""
        try:
            await self._bring(records)
        except Exception as error:  # noqa: BLE001 - an unexpected error is an answer
            _log_unexpected("oncebridge.batch_failed", error)
        finally:
            for record in records:
                # Not if it was answered, and is retried in another batch already.
                if record.batch is records:
                    self._on_answer(record, UNEXPECTED_ERROR)

    async def _bring(self, records: list[SourceRecord[_H]]) -> None:
        """Parse what is not parsed yet, and pass a batch to the router."""
        within, patience = None, timedelta(seconds=self.patience_s)
        if self.ends != inf:
            left_s = max(self.ends - self._now(), 0.0)
            if not left_s:
                for record in records:
                    record.batch = None
                    self._finish(record, self._left_over)
                return
            within = timedelta(seconds=left_s)
            patience = min(patience, timedelta(seconds=max(left_s - _LAST_LOOK_S, 0.0)))
        events: list[Event | Unreadable] = []
        owners: list[Callable[[RouterAnswer], None]] = []
        in_place = self.retry is Retry.EVERYTHING
        for record in records:
            if not record.events:
                self._parse(record)
            in_place = in_place or record.lane is not None
            events += record.events
            if len(record.events) == 1:
                owners.append(partial(self._on_answer, record))
            else:
                answers: dict[int, RouterAnswer] = {}
                take = partial(self._on_answer_of_several, record, answers)
                owners += [partial(take, at) for at in range(len(record.events))]
        await self.router.process_each(
            events,
            lambda at, answer: owners[at](answer),
            within=within,
            patience=patience,
            in_place=in_place,
        )

    # --- out ---------------------------------------------------------------------------

    def _on_answer_of_several(
        self,
        record: SourceRecord[_H],
        answers: dict[int, RouterAnswer],
        at: int,
        answer: RouterAnswer,
    ) -> None:
        """Take the answer to an event of a record; the first failure is that of the record."""
        answers[at] = answer
        if len(answers) < len(record.events):
            return
        failed = [number for number in sorted(answers) if not answers[number].acknowledge]
        if failed:
            record.events = [record.events[number] for number in failed]
        self._on_answer(record, answers[failed[0] if failed else 0])

    def _on_answer(self, record: SourceRecord[_H], answer: RouterAnswer) -> None:
        """Act on the answer to a record: it is final, or the record is retried."""
        record.batch = None
        if answer.acknowledge or self.retry is Retry.NOTHING:
            self._finish(record, answer)
            return
        if not answer.retry_after_ms:
            record.unexpected_errors += 1
        # Where entities are kept in order, later records would overtake one that is returned.
        if self.retry is Retry.WHAT_IS_NOT_RETURNED and not self._is_ordered:
            if record.unexpected_errors >= _MOST_UNEXPECTED_ERRORS:
                answer = replace(answer, blamed=True, retry_after_ms=_RETRY_LATER_MS)
            if answer.blamed or answer.verdict is Verdict.BUSY:
                self._finish(record, answer)
                return
        due = self._now() + self._pause_s(answer, record.retries)
        self._retrying += not record.retries
        record.retries += 1
        heappush(self._waiting, (due, record.number, record))
        if not self._is_stopped:
            self._dispatch_soon()

    def _pause_s(self, answer: RouterAnswer, retries: int) -> float:
        """Return how many seconds to wait: as long as the answer says, or longer at each retry."""
        grown = max(_SHORTEST_PAUSE_S * 2.0 ** min(retries, 10), self.router.unavailable_s())
        return max(answer.retry_after_ms / 1000, min(grown, _LONGEST_PAUSE_S))

    def _finish(self, record: SourceRecord[_H], answer: RouterAnswer) -> None:
        """Give a record its answer; if it is not acknowledged, neither is the rest of its lane."""
        self._answer(record, answer)
        name = record.lane
        if name is None or (lane := self._lanes.get(name)) is None:
            return
        lane.popleft()
        if lane and answer.acknowledge:
            self._ready.append(lane[0])
            self._dispatch_soon()
            return
        del self._lanes[name]
        for behind in lane:
            self._answer(behind, replace(answer, verdict=None, reason=_QUEUED_AFTER, outcomes=()))

    def _answer(self, record: SourceRecord[_H], answer: RouterAnswer) -> None:
        if record not in self._unfinished:
            return  # it was answered when the time was over
        del self._unfinished[record]
        if self._is_cancelled and not answer.acknowledge:
            answer = self._left_over
        self._bytes -= record.size
        self._retrying -= bool(record.retries)
        if not self.in_order:
            tell(self.answered, record.handle, answer)
        else:
            # Only the places of records behind an unfinished one are kept, not their payloads.
            record.answer = RouterAnswer(answer.acknowledge, answer.verdict)
            record.raw, record.events = b"", ()
            while self._untold and (first := self._untold[0]).answer is not None:
                self._untold.popleft()
                tell(self.answered, first.handle, first.answer)
        self._make_room()

    def _make_room(self) -> None:
        if not self._room_made.is_set() and self._has_room():
            self._room_made.set()

    async def aclose(self, within_s: float | None = None, leave_s: float | None = None) -> bool:
        """
        Wait until every record that was put is answered, and accept no more; True if all was done.

        What is not done *within_s* is cancelled, and answered at the latest when *leave_s* is over:
        not everything can be cancelled.
        """
        try:
            async with asyncio.timeout(within_s):
                while self._unfinished or self._tasks:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        else:
            return True
        finally:
            self.stop()
            self._is_cancelled = True
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=leave_s)
            self._answer_rest()

    def _answer_rest(self) -> None:
        """Answer the records that are left; in order, also those that are final behind them."""
        self._is_closed = True
        rest = [*(self._untold or self._unfinished)]
        for kept in (self._untold, self._unfinished, self._lanes, self._ready, self._waiting):
            kept.clear()
        self._bytes = self._retrying = 0
        for record in rest:
            tell(self.answered, record.handle, self._left_over)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class PumpInbox:
    """
    Accepts the records of requests, for sources that are called.

    They are refused while *at_most* of them, or *at_most_bytes*, are in progress, and while the
    sink is kept busy by those that wait for its rate limit: then the sender gets an answer at once.
    *is_open* returns True once the store is open.
    """

    def __init__(
        self,
        router: Router,
        *,
        batch: int = 500,
        at_most: int = 20_000,
        at_most_bytes: int = 256 * 1024 * 1024,
        is_open: Callable[[], bool] = lambda: True,
    ) -> None:
        self._router = router
        self._is_open = is_open
        self._pump = Pump[tuple[OnAnswer, int]](
            router,
            lambda handle, answer: handle[0](handle[1], answer),
            retry=Retry.NOTHING,
            patience_s=0,
            batch=batch,
            at_once=inf,
            most_in_hand=at_most,
            most_bytes=at_most_bytes,
        )

    def put(self, raws: Sequence[bytes], answered: OnAnswer) -> None:
        size = sum(map(len, raws))
        share = 1.0 if size <= SMALL else _SHARE_OF_LARGE
        if self._pump.is_full(len(raws), size, share):
            refusal = _FULL
        elif rate_limited_s := self._router.rate_limited_s():
            refusal = replace(_RATE_LIMITED, retry_after_ms=int(rate_limited_s * 1000) + 1)
        else:
            self._pump.put([SourceRecord((answered, at), raw) for at, raw in enumerate(raws)])
            return
        for at in range(len(raws)):
            answered(at, refusal)

    def not_ready(self, *, named: bool = True) -> list[str]:
        """Return why records are not accepted right now; *named*: with the routes' names."""
        reasons = [] if self._is_open() else ["the store is not available yet"]
        for gateway in self._router.gateways:
            reasons += [f"{gateway.route}: {why}" if named else why for why in gateway.not_ready()]
        return reasons if named else sorted(set(reasons))

    async def aclose(self, within_s: float | None = None) -> None:
        """Wait for records in progress, and cancel those that are not done *within_s*."""
        await self._pump.aclose(within_s)


def tell(answered: Callable[[_H, RouterAnswer], None], handle: _H, answer: RouterAnswer) -> None:
    """Call a source back, which may raise anything."""
    try:
        answered(handle, answer)
    except Exception as error:  # noqa: BLE001
        # Its type only: the text of an exception may quote the event.
        _log.error("oncebridge.answer_failed", extra={"error": type(error).__name__})


def _look_again_s(unavailable_s: float) -> float:
    return min(max(unavailable_s, 0.1), 1.0)


def _log_unexpected(what: str, error: Exception) -> None:
    # Its type and place only: the text of an exception may quote the event.
    _log.error(what, extra={"error": type(error).__name__, "at": raised_at(error)})
