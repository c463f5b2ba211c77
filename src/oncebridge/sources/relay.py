"""
From something that is read to the router, retrying in place.

A file, a spool, a shard, a queue: its records are numbered as they are taken, and stay in
hand until they are final. A few batches are under way at once. What is handed back by the
router is brought again when it is time; meanwhile others pass it, as long as not too many
wait, unless they are in the same lane or the router keeps an order of its own. Everything
before the earliest record in hand is final, and that is what may be checkpointed. While no
route takes anything, nothing more is taken.

Where the origin can take records back (a queue), it gets those that another worker holds and
those that may be the cause of their own failure. The rest waits here, so that an outage costs
no record anything. What breaks things off in a way that nobody foresaw is brought alone from
then on, and goes back in the end.
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
from oncebridge.engine.router import Answer, Router
from oncebridge.engine.verdict import Verdict

_T = TypeVar("_T")

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 30.0
_LOOK_AGAIN_S = 1.0
# The other copy is often under way in this very process, and a moment from its end.
_PATIENCE = timedelta(seconds=2)
_MOST_BREAKS, _LATER_MS = 8, 300_000
_MOST_BEHIND = 100_000
_STOPPED = Answer(acknowledge=False, verdict=Verdict.FAILED, reason="this worker is shutting down")


class Item(Struct, frozen=True, gc=False):
    """A record that was taken."""

    place: int
    """Its number, or the place just behind it; rises in the order of taking."""
    arrivals: tuple[Arrival, ...]
    """What it holds: one event, as a rule. It is final when all of them are."""
    lane: str | None = None
    """In a lane, a record starts only when the one before it is final."""


class Relay:
    """
    Bring records from *take* to *router*, and tell *final* which are done.

    *take* gives the next records, or none at the end; *takers* of it run side by side, as
    long as no more than *ahead* records are ready to be brought. *passed* is told the place up
    to which everything is final, in order, whenever that moves. *hand_back* gets what the
    origin is to have back, with the answer, and at a stop all that is left. A take that is
    under way at a stop has *leave_s* to come to its end.
    """

    def __init__(
        self,
        router: Router,
        *,
        take: Callable[[], Coroutine[Any, Any, Sequence[Item]]],
        final: Callable[[Sequence[int]], Awaitable[None]] | None = None,
        passed: Callable[[int], Awaitable[None]] | None = None,
        hand_back: Callable[[Sequence[tuple[Item, Answer]]], Awaitable[None]] | None = None,
        takers: int = 1,
        ahead: int = 0,
        at_once: int = 4,
        batch: int = 500,
        most_waiting: int = 2000,
        most_in_hand: int = 20_000,
        most_bytes: int = 128 * 1024 * 1024,
        leave_s: float = 0.0,
    ) -> None:
        # What was given back is not final, and must not be passed.
        assert hand_back is None or passed is None  # noqa: S101
        self._router = router
        self._take = take
        self._final = final
        self._passed = passed
        self._hand_back = hand_back
        self._takers = takers
        self._ahead = ahead
        # Two batches side by side would retry in any order.
        self._is_ordered = router.is_ordered
        self._at_once = 1 if self._is_ordered else at_once
        self._batch = batch
        self._most_waiting = most_waiting
        self._most_in_hand = most_in_hand
        self._most_bytes = most_bytes
        self._leave_s = leave_s

        self._hand: dict[int, _Entry] = {}
        self._bytes = 0
        self._line: deque[_Mark] = deque()
        """The places of all that was taken and not passed yet, in order."""
        self._lanes: dict[str, deque[_Entry]] = {}
        self._ready: deque[_Entry] = deque()
        self._waiting: list[tuple[float, int, _Entry]] = []
        """A heap of those to be brought again, by the time for it."""
        self._in_trouble = 0
        """How many in hand were handed back at least once."""
        self._numbers = count()
        self._batches: set[asyncio.Task[None]] = set()

        self._done: list[int] = []
        self._back: list[tuple[Item, Answer]] = []
        self._telling: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._space = asyncio.Event()
        self._stopping = asyncio.Event()
        self._at_end = False
        self._error: BaseException | None = None
        self.is_through = False
        """There is nothing more to take, and all that was taken is final."""

    def stop(self) -> None:
        """Take nothing more; what is handed back from now on stays where it is."""
        self._stopping.set()
        self._changed.set()

    async def run(self) -> None:
        """
        Run until *take* has nothing more, or until `stop`.

        Where *take* raises, what it gave before is still brought to its end; any other
        error is raised as soon as what is under way is back.
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
        self.is_through = self._at_end and not self._hand

    def _is_over(self, takers: "set[asyncio.Task[None]]") -> bool:
        if self._batches or self._telling is not None:
            return False
        if self._stopping.is_set():
            return True
        is_taking = self._error is None and not all(taker.done() for taker in takers)
        return not (is_taking or self._hand)

    async def _finish(self, takers: "set[asyncio.Task[None]]") -> None:
        """Wait for what is under way, and give back what is left."""
        # They look for the stop themselves.
        await asyncio.gather(*takers, return_exceptions=True)
        while self._batches or self._telling is not None:
            await asyncio.wait([*self._batches, *([self._telling] if self._telling else [])])
        if self._hand_back is not None and self._hand:
            left = [(entry.item, _STOPPED) for entry in self._hand.values()]
            try:
                await self._hand_back(left)
            except Exception as error:  # noqa: BLE001 - raised by `run`
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self.stop()

    # --- taking ------------------------------------------------------------------------

    async def _take_all(self) -> None:
        try:
            while self._wants_more() and await self._unless_stopping(self._room()):
                items = await self._unless_stopping(self._take_more(), self._leave_s)
                if not items:
                    self._at_end = self._at_end or items is not None
                    break
                self._add(items)
        except Exception as error:  # noqa: BLE001 - raised when what was taken is final
            self._error = self._error or error
        finally:
            self._changed.set()

    async def _take_more(self) -> Sequence[Item] | None:
        """Take, unless a stop or the error of another came in between."""
        return await self._take() if self._wants_more() else None

    def _wants_more(self) -> bool:
        return not self._stopping.is_set() and self._error is None

    async def _room(self) -> bool:
        """Wait until there is room for more, and somebody who would take it."""
        while True:
            away_s = self._router.away_s()
            if not away_s and self._has_space():
                return True
            self._space.clear()
            look_s = min(max(away_s, 0.1), _LOOK_AGAIN_S) if away_s else None
            await wait_until_set(self._space, look_s)

    def _has_space(self) -> bool:
        return (
            len(self._ready) <= self._ahead
            and self._in_trouble < self._most_waiting
            and len(self._hand) < self._most_in_hand
            and self._bytes < self._most_bytes
            # So much would be read again after a crash.
            and len(self._line) < _MOST_BEHIND
        )

    async def _unless_stopping(
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

    def _add(self, items: Sequence[Item]) -> None:
        for item in items:
            entry = _Entry(item)
            self._hand[item.place] = entry
            self._bytes += entry.size
            if self._passed is not None:
                self._line.append(entry.mark)
            if item.lane is None:
                self._ready.append(entry)
                continue
            lane = self._lanes.setdefault(item.lane, deque())
            lane.append(entry)
            if len(lane) == 1:
                self._ready.append(entry)
        self._changed.set()

    # --- bringing ----------------------------------------------------------------------

    def _dispatch(self) -> float | None:
        """Start what can be started; tell in how many seconds there is more, if that is known."""
        if self._stopping.is_set():
            return None
        now, away_s = self._now(), self._router.away_s()
        while len(self._batches) < self._at_once and (entries := self._next(now, away_s)):
            task = asyncio.create_task(self._bring(entries))
            self._batches.add(task)
            task.add_done_callback(self._returned)
        if self._has_space():
            self._space.set()
        if len(self._batches) >= self._at_once:
            return None
        times = [self._waiting[0][0] - now] if self._waiting else []
        if self._ready and away_s:
            times.append(min(away_s, _LOOK_AGAIN_S))
        return min(times, default=None)

    def _next(self, now: float, away_s: float) -> "list[_Entry]":
        """Choose a batch: first those whose time has come again, then what is new."""
        if self._is_ordered and self._waiting:
            # Nothing may pass what waits, and that has to keep its own order.
            if self._waiting[0][0] > now:
                return []
            again = sorted([entry for *_, entry in self._waiting], key=_place)
            if again[0].breaks:  # alone, and the others behind it
                again = again[:1]
            self._waiting = [one for one in self._waiting if one[-1] not in again]
            heapify(self._waiting)
            return again
        entries: list[_Entry] = []
        while self._waiting and self._waiting[0][0] <= now and len(entries) < self._batch:
            if self._waiting[0][-1].breaks and entries:
                return entries
            entries.append(heappop(self._waiting)[-1])
            if entries[-1].breaks:
                return entries
        while not away_s and self._ready and len(entries) < self._batch:
            entries.append(self._ready.popleft())
        return entries

    async def _bring(self, entries: "list[_Entry]") -> None:
        owners = [entry for entry in entries for _ in entry.arrivals]
        arrivals = [arrival for entry in entries for arrival in entry.arrivals]
        for entry in entries:
            entry.left, entry.arrivals, entry.answer = len(entry.arrivals), [], None
        is_told = bytearray(len(owners))

        def answered(at: int, answer: Answer) -> None:
            if not is_told[at]:
                is_told[at] = True
                self._note(owners[at], arrivals[at], answer)

        read = arrivals
        if sum([entry.size for entry in entries]) > SMALL:
            read = await self._router.read_all(arrivals)
        in_lanes = any([entry.item.lane is not None for entry in entries])  # noqa: C419 - quicker
        answers = await self._router.process(
            read,
            patience=_PATIENCE,
            answered=answered,
            in_place=in_lanes or self._hand_back is None,
        )
        for at, answer in enumerate(answers):
            answered(at, answer)

    def _returned(self, task: asyncio.Task[None]) -> None:
        self._batches.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)
        self._changed.set()

    def _note(self, entry: "_Entry", arrival: Arrival, answer: Answer) -> None:
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
            self._close(entry)
            return
        if not answer.retry_after_ms:
            entry.breaks += 1
        if entry.breaks >= _MOST_BREAKS and self._hand_back is not None:
            answer = replace(answer, blamed=True, retry_after_ms=_LATER_MS)
        if self._may_go_back(answer):
            self._give_back(entry, answer)
        else:
            self._wait(entry, answer)

    def _may_go_back(self, answer: Answer) -> bool:
        if self._hand_back is None or self._is_ordered:
            return False  # what is behind it would pass it
        return answer.verdict is Verdict.BUSY or answer.blamed

    def _close(self, entry: "_Entry") -> None:
        self._let_go(entry)
        self._done.append(entry.item.place)
        if entry.item.lane is not None:
            lane = self._lanes[entry.item.lane]
            lane.popleft()
            if lane:
                self._ready.append(lane[0])
                self._changed.set()
            else:
                del self._lanes[entry.item.lane]
        self._tell_soon()

    def _give_back(self, entry: "_Entry", answer: Answer) -> None:
        """Leave a record to its origin, with all that stand behind it in its lane."""
        lane = entry.item.lane
        for one in [entry] if lane is None else self._lanes.pop(lane):
            self._let_go(one)
            self._back.append((one.item, answer))
        self._tell_soon()

    def _wait(self, entry: "_Entry", answer: Answer) -> None:
        due = self._now() + self._pause_s(answer, entry.times)
        self._in_trouble += not entry.times
        entry.times += 1
        heappush(self._waiting, (due, next(self._numbers), entry))
        self._changed.set()

    def _let_go(self, entry: "_Entry") -> None:
        entry.mark.is_final = True
        del self._hand[entry.item.place]
        self._bytes -= entry.size
        self._in_trouble -= bool(entry.times)
        if self._has_space():
            self._space.set()

    def _pause_s(self, answer: Answer, times: int) -> float:
        """
        Return how long to wait: as long as was asked for, since nobody could take it sooner.

        Where it takes long nobody knows for how long, and the pause grows.
        """
        grown = max(_SHORTEST_PAUSE_S * 2.0 ** min(times, 10), self._router.away_s())
        return max(answer.retry_after_ms / 1000, min(grown, _LONGEST_PAUSE_S))

    # --- telling -----------------------------------------------------------------------

    def _tell_soon(self) -> None:
        if self._telling is None:
            self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        """Tell what has become final or goes back, as much as there is at a time."""
        try:
            while self._done or self._back:
                done, self._done = self._done, []
                back, self._back = self._back, []
                reached = self._reached()
                if done and self._final is not None:
                    await self._final(done)
                if back and self._hand_back is not None:
                    await self._hand_back(back)
                if reached is not None and self._passed is not None:
                    await self._passed(reached)
        except Exception as error:  # noqa: BLE001 - raised when all are back
            self._fail(error)
        finally:
            self._telling = None
            self._changed.set()

    def _reached(self) -> int | None:
        """Tell the place before the earliest record that is not final, if it has moved."""
        place = None
        while self._line and self._line[0].is_final:
            place = self._line.popleft().place
        return place

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class _Mark:
    """A place, and whether what was there is final; it outlives the record."""

    __slots__ = ("is_final", "place")

    def __init__(self, place: int) -> None:
        self.place = place
        self.is_final = False


class _Entry:
    """A record in hand, and what is known about it."""

    __slots__ = ("answer", "arrivals", "breaks", "item", "left", "mark", "size", "times")

    def __init__(self, item: Item) -> None:
        self.item = item
        self.mark = _Mark(item.place)
        self.arrivals: list[Arrival] = list(item.arrivals)
        """What is still to be brought: of several, some may be final already."""
        self.left = 0
        """Arrivals that are not answered yet."""
        self.answer: Answer | None = None
        self.times = 0
        """How often it was handed back."""
        self.breaks = 0
        """How often that was because something broke which nobody foresaw."""
        self.size = sum([len(a if isinstance(a, bytes) else a.raw) for a in item.arrivals])


def _place(entry: _Entry) -> int:
    return entry.item.place
