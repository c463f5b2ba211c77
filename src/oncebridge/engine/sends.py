"""
Sending: several calls of the sink at once, each while the claims of its events are held.

There is one task for each call of the sink and no other, and one timer for all of them. Whatever
the sink does, every event gets one answer, within its timeout. Answers that arrive together are
returned together, so that their commits are one round trip.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import inf
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, get_args

from msgspec import Struct

from oncebridge.engine.batch import Batch
from oncebridge.engine.breaker import Breaker
from oncebridge.engine.counters import Books
from oncebridge.engine.hooks import RoundTrip, TripHook, call_hooks
from oncebridge.engine.leases import LazyTimer, Lease, Leases
from oncebridge.engine.rate_limit import RateLimit
from oncebridge.engine.settings import Settings
from oncebridge.errors import SinkRejected, StoreError
from oncebridge.sinks.api import (
    Delivery,
    Joint,
    JointAnswer,
    JointSink,
    Never,
    Sink,
    Unknown,
    Yes,
)

if TYPE_CHECKING:
    from oncebridge.engine.shared_rate_limit import RateShare

SINK_DOWN: Final = "the sink is down"
_SHARE_POLL_S: Final = 0.5  # a share of the rate has to be renewed while events wait for it

Unsent = tuple[Sequence[int], str]
"""Rows that cannot be sent, and why."""

_ANSWERS = frozenset(get_args(JointAnswer))
_TAKEN = {Yes}


class Parcel(Struct, eq=False):
    """The events of one call of the sink: rows of a batch."""

    rows: Sequence[int]
    leases: Sequence[Lease] = ()
    """Those of its events, and of no others, once it is to be sent."""
    turn: float | None = None
    """Its turn under a rate limit, once it is reserved."""
    passed_before: int = 0
    """How many sends had succeeded when it was sent."""
    began: float = 0.0
    ends: float = inf
    """When the call is cancelled."""
    call: "asyncio.Future[Sequence[JointAnswer]] | None" = None
    """None before it is sent, and once it is answered."""
    answers: Sequence[JointAnswer] = ()
    is_taken: bool = False
    """The sink took all events."""


class Sends(Struct, eq=False):
    """The sends of one batch: what waits to be sent, and what is answered."""

    batch: Batch
    waiting: deque[Parcel]
    running: dict[Parcel, None] = {}
    answered: list[Parcel] = []
    """Calls that are over, and whose answers are not taken yet."""
    alarm: asyncio.TimerHandle | None = None
    waiter: asyncio.Future[None] | None = None
    is_woken: bool = False

    async def next(self) -> list[Parcel]:
        """Wait for answers or a wake-up; return what is answered."""
        if not self.answered and not self.is_woken:
            self.waiter = self.batch.loop.create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None
        self.is_woken = False
        answered, self.answered = self.answered, []
        return answered

    def wake(self) -> None:
        """Let `next` return, with or without answers."""
        self.is_woken = True
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Sender:
    """The calls of one sink, over all batches: as many at once as it takes, and as fast."""

    def __init__(
        self,
        sink: Sink,
        joint: JointSink | None,
        *,
        route: str,
        settings: Settings,
        leases: Leases,
        joint_delivery: Callable[[Batch, int, Delivery], Joint],
        breaker: Breaker,
        rate_limit: RateLimit,
        books: Books,
        trip_hooks: Sequence[TripHook],
    ) -> None:
        self._sink = sink
        self._joint = joint
        self._route = route
        self._timeout_s = settings.sink_timeout.total_seconds()
        self._margin_s = settings.margin.total_seconds()
        self._commit_budget_s = settings.commit_budget.total_seconds()
        self._leases = leases
        self._joint_delivery = joint_delivery
        self._breaker = breaker
        self._rate_limit = rate_limit
        self.rate_share: RateShare | None = None
        self._books = books
        self._trip_hooks = trip_hooks
        self._free = sink.concurrency
        self._waiters: dict[Sends, None] = {}
        """What waits for a slot, the longest first."""
        self._open: dict[Sends, None] = {}
        self.timer = LazyTimer(self._check_timeouts)
        self._slowest_s = 0.0
        """How long the slowest recent call took; decays with each call."""
        self.is_draining = False

    def open(self, batch: Batch, rows: Sequence[int]) -> Sends:
        """Return the sends of *rows*; the caller closes them."""
        size, count = self._sink.batch, len(rows)
        parcels = [
            Parcel(rows[at : at + size] if count > size else rows) for at in range(0, count, size)
        ]
        sends = Sends(batch, deque(parcels))
        self._open[sends] = None
        return sends

    def take_late_answers(self, sends: Sends) -> list[Parcel]:
        """Return what is answered, also what `next` has not been woken for yet."""
        for parcel in [p for p in sends.running if p.call is not None and p.call.done()]:
            self.end(sends, parcel)
        return sends.answered

    def close(self, sends: Sends) -> None:
        """Cancel the calls of *sends* that are under way."""
        if sends.alarm is not None:
            sends.alarm.cancel()
        del self._open[sends]
        if self._waiters:
            self._stop_waiting(sends)
        while sends.running:
            parcel, _ = sends.running.popitem()
            call, parcel.call = parcel.call, None
            self._free_slots()
            if call is not None:
                call.cancel()

    def wake_all(self) -> None:
        """Let every batch that waits look again whether it can send."""
        for sends in self._open:
            sends.wake()

    @property
    def waiting(self) -> int:
        """How many events wait to be sent."""
        return sum(len(parcel.rows) for sends in self._open for parcel in sends.waiting)

    # --- starting -------------------------------------------------------------------------

    async def start(self, sends: Sends) -> Unsent | None:
        """
        Start the sends that are due, as long as there is a slot and their claims are held.

        Return events that cannot be sent; the caller returns them to their source and calls
        again.
        """
        limit, batch = self._rate_limit, sends.batch
        limit.note(batch.now())
        while sends.waiting:
            if why := self._why_unsendable(batch, sends.waiting[0]):
                rows = [row for parcel in sends.waiting for row in parcel.rows]
                sends.waiting.clear()
                self._stop_waiting(sends)
                return rows, why
            if limit.is_active and (pause := self._reserve_turn(sends)) > 0:
                longest_s = _SHARE_POLL_S if self.rate_share is not None else self._timeout_s
                if sends.alarm is not None:
                    sends.alarm.cancel()
                sends.alarm = batch.loop.call_later(min(pause, longest_s), sends.wake)
                return None
            if not self._free:
                self._waiters[sends] = None
                return None
            if (unsent := await self._send_next(sends)) is not None:
                return unsent
        return None

    async def _send_next(self, sends: Sends) -> Unsent | None:
        """Send what has waited longest, and return what may not be sent."""
        self._free -= 1
        parcel = sends.waiting.popleft()
        try:
            unsent = await self._confirm_claims(sends.batch, parcel)
            if parcel.rows:
                self._call(sends, parcel)
        finally:
            if parcel not in sends.running:
                self._free_slots()
        return unsent

    def _why_unsendable(self, batch: Batch, parcel: Parcel) -> str:
        """Return why events cannot be sent any more; empty if they can."""
        if self.is_draining:
            return "this gateway is shutting down"
        if self._breaker.is_open:
            entry = batch.entries.get(parcel.rows[0])
            if entry is None or not entry.tries_sink:
                return SINK_DOWN  # since these were claimed
        limit, now = self._rate_limit, batch.now()
        if batch.ends is not None and limit.is_active:
            wait_s = limit.left_s(now)
            if parcel.turn is not None and limit.rate(now):
                # Without a rate, this worker has no share yet, but may get one at any moment.
                wait_s = limit.wait_s(parcel.turn, now)
            if wait_s >= self._send_time(batch):
                return "no time left to send"
        return ""

    def _reserve_turn(self, sends: Sends) -> float:
        """Reserve a turn for what is to be sent next; return the seconds until then."""
        limit, share = self._rate_limit, self.rate_share
        first, now = sends.waiting[0], sends.batch.now()
        if share is not None:
            is_short = limit.left_s(now) > 0
            limit.allow(share.current(limit.reserved, is_short=is_short), now)
        if first.turn is None or limit.is_missed(first.turn, now):
            if len(first.rows) > (most := limit.most(now)):
                sends.waiting.insert(1, Parcel(first.rows[most:]))
                first.rows = first.rows[:most]
            first.turn = limit.reserve(len(first.rows), now)
        return limit.wait_s(first.turn, now)

    def _send_time(self, batch: Batch) -> float:
        """Return how many seconds a send may take; 0 or less if it is too late."""
        if batch.ends is None:
            return self._timeout_s
        return min(self._timeout_s, batch.ends - batch.now() - self._margin_s)

    def _least_send_time(self, batch: Batch) -> float:
        """
        Return how many seconds a send needs at least.

        The sink may take an event whose send is cut short by the end of the caller's time, and
        then it is sent twice. The first send of a batch gets the time there is: a later batch
        would not have more.
        """
        if not batch.sent:
            return 0.0
        return min(1.25 * self._slowest_s, self._timeout_s)

    async def _confirm_claims(self, batch: Batch, parcel: Parcel) -> Unsent | None:
        """
        Leave those in *parcel* that may be sent, and return the others.

        There has to be time, and the claims have to outlast the send.
        """
        send_time = self._timeout_s if batch.ends is None else self._send_time(batch)
        if batch.ends is not None and send_time <= self._least_send_time(batch):
            rows, parcel.rows = parcel.rows, ()
            return rows, "no time left to send"
        needed = batch.now() + send_time + self._margin_s
        parcel.leases = leases = batch.own_leases(parcel.rows)
        short = [lease for lease in leases if lease.lost or lease.ends < needed]
        if not short:
            return None
        try:
            await self._leases.extend(short)
        except StoreError:
            self._books.store_errors += 1
        # Again: the store may have been slow.
        needed = batch.now() + send_time + self._margin_s
        late = [row for row in parcel.rows if not batch.entry(row).is_held_until(needed)]
        gone = {*late}
        parcel.rows = [row for row in parcel.rows if row not in gone]
        parcel.leases = batch.own_leases(parcel.rows) if parcel.rows else ()
        return (late, "the lease ended before the send") if late else None

    def _call(self, sends: Sends, parcel: Parcel) -> None:
        """Call the sink; from now on the leases are extended for this attempt only."""
        batch, rows = sends.batch, parcel.rows
        timeout_s = self._timeout_s if batch.ends is None else self._send_time(batch)
        parcel.began = now = batch.now()
        parcel.ends = ends = now + timeout_s
        leases = parcel.leases
        for lease in leases:
            lease.give_up = ends + self._commit_budget_s + self._margin_s
        batch.sent.update(rows)
        parcel.passed_before = self._breaker.passed
        deliveries = batch.deliveries(rows, self._route, ends)
        call: Awaitable[Sequence[JointAnswer]]
        if self._joint is None:
            call = self._sink.deliver(deliveries)
        else:
            for lease in leases:
                # The transaction itself checks the claims. It locks the rows until it ends, so
                # leases are not extended: they outlast the send.
                lease.ending = True
                lease.give_up = now
            call = self._joint.deliver_jointly(
                [
                    self._joint_delivery(batch, row, delivery)
                    for row, delivery in zip(rows, deliveries, strict=True)
                ]
            )
        # Not `ensure_future`, which asks for the running loop: a system call in Python 3.11.
        is_coroutine = isinstance(call, CoroutineType)
        task = batch.loop.create_task(call) if is_coroutine else asyncio.ensure_future(call)
        parcel.call = task
        task.add_done_callback(partial(self._on_done, sends, parcel))
        if len(rows) == 1 and self._joint is None:
            for lease in leases:  # one lost lease must not cancel the sends of others
                lease.sending = task
        sends.running[parcel] = None
        if ends < self.timer.at_s or batch.loop is not self.timer.loop:
            self.timer.start(batch.loop, ends)

    # --- ending ---------------------------------------------------------------------------

    def _on_done(
        self, sends: Sends, parcel: Parcel, call: "asyncio.Future[Sequence[JointAnswer]]"
    ) -> None:
        if parcel.call is call:
            self.end(sends, parcel)
            sends.wake()
        elif not call.cancelled():
            call.exception()  # retrieved, or asyncio would log it

    def end(self, sends: Sends, parcel: Parcel, *, timed_out: bool = False) -> None:
        """Take the answers of a call that is over, or whose time is."""
        call, count = parcel.call, len(parcel.rows)
        assert call is not None  # noqa: S101 - it is under way
        parcel.call = None
        if timed_out:
            took_s = parcel.ends - parcel.began
            parcel.answers = [Unknown(f"no answer within {took_s:g} s")] * count
            # Not awaited: a sink that ignores its cancellation must not delay the batch.
            call.cancel()
        else:
            took_s = sends.batch.now() - parcel.began
            parcel.answers = answers = _answers_of(call, count)
            parcel.is_taken = {*map(type, answers)} == _TAKEN
        del sends.running[parcel]
        sends.answered.append(parcel)
        self._free_slots()
        self._slowest_s = max(took_s, self._slowest_s * 0.9)
        if self._trip_hooks:
            trip = RoundTrip(self._route, "sink", "deliver", count, took_s, parcel.is_taken)
            call_hooks(self._trip_hooks, trip)

    def _free_slots(self, count: int = 1) -> None:
        """Free slots, and wake what has waited longest for one."""
        self._free += count
        if self._waiters and self._free > 0:
            sends = next(iter(self._waiters))
            del self._waiters[sends]
            sends.wake()

    def _stop_waiting(self, sends: Sends) -> None:
        """Give the slot that *sends* waits for, or was woken for, to the next one."""
        self._waiters.pop(sends, None)
        self._free_slots(0)

    # --- timeouts -------------------------------------------------------------------------

    def _check_timeouts(self, loop: asyncio.AbstractEventLoop) -> None:
        now, earliest = loop.time(), inf
        for sends in [*self._open]:
            for parcel in [*sends.running]:
                if parcel.ends > now:
                    earliest = min(earliest, parcel.ends)
                elif parcel.call is not None and not parcel.call.done():
                    self.end(sends, parcel, timed_out=True)
                    sends.wake()
        if earliest < inf:
            self.timer.start(loop, earliest)


def _answers_of(task: "asyncio.Future[Any]", count: int) -> Sequence[JointAnswer]:
    """Return the sink's answers, or answers that describe how the call failed."""
    answer: JointAnswer
    answers: Sequence[JointAnswer]
    if task.cancelled():
        answer = Unknown("the send was cancelled")
    elif isinstance(error := task.exception(), SinkRejected):
        answer = Never(type(error).__name__)
    elif error is not None:
        # Its type only: the text of an exception may quote the event.
        answer = Unknown(type(error).__name__)
    elif (
        # Mostly a list: the check for a sequence is slow.
        not isinstance(answers := task.result(), (list, Sequence))
        or not _ANSWERS.issuperset(map(type, answers))
    ):
        answer = Unknown("the sink returned something other than answers")
    elif len(answers) != count:
        answer = Unknown(f"the sink returned {len(answers)} answers for {count} events")
    else:
        return answers
    return [answer] * count
