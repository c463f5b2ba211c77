"""
The handler of a Lambda function.

    handler = lambda_handler(gateway, deliver=process)

It recognises the trigger by the event, processes the events, and responds in the form that the
trigger needs. A record is acknowledged when every event in it is.

| trigger               | success                   | some records have to be retried           |
| --------------------- | ------------------------- | ----------------------------------------- |
| SQS, Pipes            | an empty list of failures | the names of the records                  |
| Kinesis               | an empty list of failures | the lowest sequence number: all from there|
| direct, SNS, bus      | None                      | raises `HandedBack`                       |

Any other error is raised, and counts as a failure of the whole batch. So does a batch of which
nothing was accepted because the store or the sink is down: then Lambda polls less, and fewer
messages use up their receives.

Everything is created at the first call and kept for the next ones: one event loop, one set of
connections. Nothing runs after the response; unfinished work is frozen with the process.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NotRequired, Protocol, TypedDict

from msgspec import UNSET

from oncebridge.aws.emf import Counted, EmfMetrics
from oncebridge.aws.invocation import Invocation, LambdaRecord, Trigger, recognise
from oncebridge.base.clock import Clock, system_clock
from oncebridge.engine.batch import Arrival
from oncebridge.engine.blocking import OneLoop
from oncebridge.engine.gateway import Gateway
from oncebridge.engine.ordering import LaneRunner, ReportDone
from oncebridge.engine.router import RouteEntry, Router, RouterAnswer
from oncebridge.errors import ConfigError, HandedBack, StoreUnavailable
from oncebridge.events.event import Event, Unreadable

_log = logging.getLogger("oncebridge")

_RESERVE_S: Final = 0.5
"""The last send has to end this long before the end of the call."""
_LAST_S: Final = 0.25
"""Everything is cancelled this long before the end, so that there is a response."""
_OPEN_SHARE, _MOST_OPEN_S = 0.25, 2.0
"""How much of the time left the store may take to open, if events can be sent without it."""
_LOOK_AGAIN_S: Final = 0.5
"""Near the end of the call, busy events are not waited for: the gateway polls."""
_TURNS: Final = 5
_NOWHERE: Final = frozenset({"no dead letters are configured", "dead letters: none are configured"})
_MOST_REASONS: Final = 3


class Context(Protocol):
    """The part of Lambda's context that is used."""

    def get_remaining_time_in_millis(self) -> int: ...


class ItemFailure(TypedDict):
    """One record that has to be retried."""

    itemIdentifier: str


class Failures(TypedDict):
    """The response to a batch; an empty list means success."""

    batchItemFailures: list[ItemFailure]
    state: NotRequired[Any]


def lambda_handler(
    gateway: Gateway | Router,
    deliver: Callable[[Event], Awaitable[Any] | Any] | None = None,
    *,
    metrics: str | None = "oncebridge",
    clock: Clock = system_clock,
) -> "LambdaHandler":
    """
    Return the handler of a Lambda function.

    *deliver* is called with each event instead of the gateway's sink: a plain function or an
    `async def`. *metrics* is the CloudWatch namespace of the metrics; None writes none.
    """
    if deliver is not None:
        if isinstance(gateway, Router):
            raise ConfigError(
                "deliver",
                "cannot be used with a router: each of its routes has a sink of its own; pass a "
                "gateway, or set the sink of a route to python:MODULE:FUNCTION",
            )
        gateway = gateway.with_sink(deliver)
    return LambdaHandler(gateway, metrics=metrics, clock=clock)


class LambdaHandler:
    """
    A function of an event and a context, as Lambda calls it.

    Threads take turns. All work of a call is done before it returns.
    """

    def __init__(
        self,
        gateway: Gateway | Router,
        *,
        metrics: str | None = "oncebridge",
        clock: Clock = system_clock,
    ) -> None:
        if isinstance(gateway, Gateway):
            gateway = Router([RouteEntry(gateway)], settings=gateway.settings, clock=clock)
        self._router = gateway
        self._metrics = None if metrics is None else EmfMetrics(metrics, clock)
        self._loop = OneLoop()
        self._unopened = list(gateway.gateways)
        self._opening: asyncio.Task[None] | None = None
        self._has_warned = False
        self.__name__ = self.__qualname__ = "lambda_handler"  # decorators read it

    @property
    def router(self) -> Router:
        return self._router

    def __call__(self, event: object, context: Context) -> Failures | None:
        """Process the event of an invocation; return the response for its trigger."""
        invocation = recognise(event, self._router.read)
        return self._loop.run(lambda: self._handle(invocation, context))

    def close(self, grace: timedelta = timedelta(seconds=2)) -> None:
        """Finish and close everything; for tests and scripts, Lambda never calls it."""
        self._loop.close(lambda: self._finish(grace))

    async def _finish(self, grace: timedelta) -> None:
        await self._router.drain(grace)
        await self._router.aclose()

    async def _handle(self, invocation: Invocation, context: Context) -> Failures | None:
        loop = asyncio.get_running_loop()
        ends = loop.time() + context.get_remaining_time_in_millis() / 1000
        try:
            await _notice_closed_connections()
            outcomes = _RecordOutcomes(len(invocation.records))
            if loop.time() < ends - _RESERVE_S:
                await self._open(ends - _RESERVE_S)
                before = self._uncommitted()
                try:
                    await self._process(invocation, outcomes, ends)
                finally:
                    if self._uncommitted() > before:
                        await self._wait_for_commits(ends - _RESERVE_S)
            return self._answer(invocation, outcomes)
        finally:
            if self._metrics is not None:
                self._metrics.write_changes(self._books())

    # --- open --------------------------------------------------------------------------

    async def _open(self, ends: float) -> None:
        """Open the gateways that are not open yet; raise `HandedBack` if the store does not open."""
        if not self._unopened:
            return
        if not all(_holds_on_outage(gateway) for gateway in self._router.gateways):
            await self._open_if_possible(ends)
            return
        try:
            await self._open_within(self._unopened, ends)
        except TimeoutError:
            raise HandedBack(
                "the store could not be opened in the time left; check it, or allow more time", 0
            ) from None

    async def _open_if_possible(self, ends: float) -> None:
        """
        Open the stores that open soon; without a store, events are sent unprotected.

        A gateway would also open on first use, without a timeout. So it is tried here, and the
        result is recorded in the breaker that the gateway asks.
        """
        now = asyncio.get_running_loop().time
        due = [gateway for gateway in self._unopened if gateway.store_breaker.admits(now())]
        if not due:
            return
        try:
            left_s = min((ends - now()) * _OPEN_SHARE, _MOST_OPEN_S)
            await self._open_within(due, now() + left_s)
        except (StoreUnavailable, TimeoutError) as error:
            _log.warning("oncebridge.store_is_away", extra={"error": type(error).__name__})
            for gateway in due:
                if gateway in self._unopened:
                    gateway.books.store_errors += 1
                    gateway.store_breaker.failed(now(), at_once=True)
        finally:
            for gateway in due:
                gateway.store_breaker.abandoned()

    async def _open_within(self, gateways: Sequence[Gateway], ends: float) -> None:
        """Open *gateways*, or raise `TimeoutError`; one that cannot be cancelled keeps running."""
        if self._opening is None or self._opening.done():
            self._opening = asyncio.get_running_loop().create_task(self._open_each(gateways))
        opening = self._opening
        await _wait_for(opening, ends)
        if not opening.done():
            await _cancel(opening)
        if not opening.done() or opening.cancelled():
            raise TimeoutError
        opening.result()

    async def _open_each(self, gateways: Sequence[Gateway]) -> None:
        for gateway in list(gateways):
            await gateway.open()
            gateway.store_breaker.succeeded()
            self._unopened.remove(gateway)

    # --- take --------------------------------------------------------------------------

    async def _process(
        self, invocation: Invocation, outcomes: "_RecordOutcomes", ends: float
    ) -> None:
        """Process all records, and cancel work that would outlast the call."""
        loop = asyncio.get_running_loop()
        work = loop.create_task(self._run(invocation, outcomes, ends - _RESERVE_S))
        await _wait_for(work, ends - _LAST_S)
        if not work.done():
            _log.warning("oncebridge.time_is_up", extra={"trigger": invocation.trigger.value})
            outcomes.is_over = True
            # Events that the sink has taken are still reported.
            await _cancel(work)
        if work.done() and not work.cancelled():
            work.result()

    async def _run(self, invocation: Invocation, outcomes: "_RecordOutcomes", ends: float) -> None:
        items = [
            (at, event)
            for at, record in enumerate(invocation.records)
            for event in self._events(record)
        ]
        outcomes.expect([at for at, _ in items])
        waits = invocation.trigger.waits

        async def bring(items: list[_Item], tell: ReportDone) -> None:
            await self._open(ends)
            left_s = ends - asyncio.get_running_loop().time()
            if left_s <= 0:
                return  # without an answer they are returned to the source
            patience_s = max(left_s - _LOOK_AGAIN_S, 0) if waits else 0

            def answered(at: int, answer: RouterAnswer) -> None:
                outcomes.settle(items[at][0], answer)
                tell(at, answer.acknowledge)

            await self._router.process(
                [event for _, event in items],
                within=timedelta(seconds=left_s),
                patience=timedelta(seconds=patience_s),
                answered=answered,
                in_place=invocation.trigger.is_ordered,
            )

        await LaneRunner(_lanes(invocation, items), bring).run()

    def _events(self, record: LambdaRecord) -> Sequence[Event | Unreadable]:
        held = record.held
        return (held,) if isinstance(held, Unreadable) else self._router.unwrap(held)

    def _uncommitted(self) -> int:
        return sum([gateway.books.acked_uncommitted for gateway in self._router.gateways])

    async def _wait_for_commits(self, ends: float) -> None:
        """
        Use the time left for commits that the store did not answer: nothing runs later.

        Not longer than a lease: then another worker may have claimed these keys.
        """
        now = asyncio.get_running_loop().time
        for gateway in self._router.gateways:
            left_s = min(ends - now(), gateway.settings.lease.total_seconds())
            if left_s > 0:
                await gateway.settle(timedelta(seconds=left_s))

    # --- answer ------------------------------------------------------------------------

    def _answer(self, invocation: Invocation, outcomes: "_RecordOutcomes") -> Failures | None:
        trigger, records = invocation.trigger, invocation.records
        back = [record for at, record in enumerate(records) if not outcomes.is_final(at)]
        if back:
            self._warn_of_no_dead_letters(trigger, outcomes)
        if back and trigger.names_failures:
            _log.warning(
                "oncebridge.handed_back",
                extra={
                    "trigger": trigger.value,
                    "back": len(back),
                    "records": len(records),
                    "reasons": outcomes.reasons(len(back)),
                },
            )
        if back and (not trigger.names_failures or self._is_down(back, records)):
            raise HandedBack(outcomes.summary(len(back), len(records)), outcomes.retry_after_s)
        if not trigger.names_failures:
            return None
        if trigger is Trigger.KINESIS and back:
            # Lambda continues from the lowest number, so this one includes all after it.
            back = [min(back, key=lambda record: record.sequence)]
        names = dict.fromkeys(record.name for record in back)
        answer = Failures(batchItemFailures=[ItemFailure(itemIdentifier=name) for name in names])
        if invocation.state is not UNSET:
            answer["state"] = invocation.state
        return answer

    def _is_down(self, back: Sequence[LambdaRecord], records: Sequence[LambdaRecord]) -> bool:
        """Return True if no record was accepted and the store or a sink is down."""
        return len(back) == len(records) and any(g.down() for g in self._router.gateways)

    def _warn_of_no_dead_letters(self, trigger: Trigger, outcomes: "_RecordOutcomes") -> None:
        """Warn once about events that can never succeed while there are no dead letters."""
        if self._has_warned or not any(answer.reason in _NOWHERE for answer in outcomes.refused):
            return
        self._has_warned = True
        what = "it is retried until the trigger gives up"
        if trigger in (Trigger.KINESIS, Trigger.PIPES_KINESIS):
            what = "it is retried, and its shard is blocked, until the record expires"
        _log.warning(
            "oncebridge.no_dead_letters",
            extra={"trigger": trigger.value, "what": f"an event can never succeed: {what}"},
        )

    def _books(self) -> dict[str, Counted]:
        gateways = self._router.gateways
        books: dict[str, Counted] = {gateway.route: gateway.books for gateway in gateways}
        # One for all routes: they share the lookups.
        verified = next((gateway.verified for gateway in gateways if gateway.verified), None)
        if verified is not None:
            books.setdefault("verification", _Verified(verified))
        if self._router.unrouted.arrived:
            books["unrouted"] = self._router.unrouted
        return books


class _Verified:
    """The counters of `verify`."""

    def __init__(self, verified: Mapping[str, int]) -> None:
        self._verified = verified

    def counts(self) -> dict[str, int]:
        return dict(self._verified)


_Item = tuple[int, Arrival]
"""The index of a record in the batch, and one of its events."""


class _RecordOutcomes:
    """The outcomes of the records of one call, as far as they are known."""

    def __init__(self, count: int) -> None:
        self._left = [1] * count
        """Events of each record that are not acknowledged; one at least, until it is read."""
        self._refused: dict[int, RouterAnswer] = {}
        self.is_over = False
        """The time is over; only acknowledgements still count."""

    def expect(self, records: Sequence[int]) -> None:
        """Record how many events each record has."""
        events = Counter(records)
        self._left = [max(events[at], 1) for at in range(len(self._left))]

    def settle(self, record: int, answer: RouterAnswer) -> None:
        if answer.acknowledge:
            self._left[record] -= 1
        elif not self.is_over:
            self._refused.setdefault(record, answer)

    def is_final(self, record: int) -> bool:
        return not self._left[record]

    @property
    def refused(self) -> Sequence[RouterAnswer]:
        return list(self._refused.values())

    @property
    def retry_after_s(self) -> float:
        return max([answer.retry_after_ms for answer in self.refused], default=0) / 1000

    def summary(self, back: int, count: int) -> str:
        """Return how many records have to be retried, and why."""
        return f"{back} of {count} records have to be retried: {self.reasons(back)}"

    def reasons(self, back: int) -> str:
        """Return why *back* records have to be retried, the most frequent reasons first."""
        reasons = Counter(
            f"{answer.verdict}: {answer.reason}" if answer.reason else f"{answer.verdict}"
            for answer in self.refused
        )
        if back > len(self.refused):
            reasons["no time left, or queued after one of these"] = back - len(self.refused)
        why = [f"{times} x {reason}" for reason, times in reasons.most_common(_MOST_REASONS)]
        more = ["and others"] if len(reasons) > _MOST_REASONS else []
        return "; ".join(why + more)


def _lanes(invocation: Invocation, items: Sequence[_Item]) -> Sequence[Sequence[_Item]]:
    """Return the lanes: events that stay in order are in one; without an order, each has its own."""
    if not invocation.trigger.is_ordered:
        return [[item] for item in items]
    lanes: dict[str, list[_Item]] = {}
    for item in items:
        lanes.setdefault(invocation.records[item[0]].lane, []).append(item)
    return list(lanes.values())


def _holds_on_outage(gateway: Gateway) -> bool:
    settings = gateway.settings
    return settings.on_store_outage == "hold" and settings.mode != "shadow"


async def _notice_closed_connections() -> None:
    """
    Let the event loop run for a moment before anything is sent.

    While the process was frozen, servers may have closed connections. To notice that takes a few
    turns of the loop: to select, to read, and to call the connection's owner.
    """
    for _ in range(_TURNS):
        await asyncio.sleep(0)


async def _wait_for(work: asyncio.Task[None], ends: float) -> None:
    """Wait for *work* until *ends*; it is not cancelled then."""
    work.add_done_callback(_retrieve)
    try:
        await asyncio.wait({work}, timeout=ends - asyncio.get_running_loop().time())
    except asyncio.CancelledError:
        work.cancel()
        raise


async def _cancel(work: asyncio.Task[None]) -> None:
    """Cancel *work* and wait a moment; not everything can be cancelled."""
    work.cancel()
    await asyncio.wait({work}, timeout=_LAST_S / 2)


def _retrieve(work: asyncio.Task[None]) -> None:
    """Retrieve the error of work that is not awaited, or asyncio would log it."""
    if not work.cancelled():
        work.exception()
