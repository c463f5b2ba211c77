"""
The handler of a Lambda function.

    handler = lambda_handler(gateway, deliver=process)

It tells the trigger from what it is handed, takes the events through the gateway, and answers
in the form which that trigger wants. A record is acknowledged when every event in it is.

| trigger               | all is well               | something has to come again               |
| --------------------- | ------------------------- | ----------------------------------------- |
| SQS, Pipes            | an empty list of failures | the names of the records                  |
| Kinesis               | an empty list of failures | the lowest sequence number: all from there|
| direct, SNS, bus      | None                      | raises `HandedBack`                       |

Whatever else goes wrong is raised, and counts as a failure of the whole batch. So does a
batch of which nothing could be taken because the store or the sink is down: then Lambda
fetches less, and fewer messages use up their receives.

Everything is made at the first call and kept for the next ones: one loop, one set of
connections. Nothing runs after an answer; what is left over is frozen with the process.
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
"""What is left of the time when the last event may still be under way."""
_LAST_S: Final = 0.25
"""What is left when everything is broken off, so that there still is an answer."""
_OPEN_SHARE, _MOST_OPEN_S = 0.25, 2.0
"""How much of the time left the store may take to open, where events can pass without it."""
_LOOK_AGAIN_S: Final = 0.5
"""For how long, near the end, no busy event is waited for: the gateway looks now and then only."""
_TURNS: Final = 5
_NOWHERE: Final = frozenset({"no dead letters are configured", "dead letters: none are configured"})
_MOST_REASONS: Final = 3


class Context(Protocol):
    """What is needed of the context that Lambda gives."""

    def get_remaining_time_in_millis(self) -> int: ...


class ItemFailure(TypedDict):
    """One record that has to come again."""

    itemIdentifier: str


class Failures(TypedDict):
    """What a batch is answered with; an empty list says that all went well."""

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
    Make the handler of a Lambda function.

    *deliver* is called with each event instead of the gateway's sink: a plain function or an
    `async def`. *metrics* is the CloudWatch namespace of the counts; None writes none.
    """
    if deliver is not None:
        if isinstance(gateway, Router):
            raise ConfigError(
                "deliver",
                "a router has several ways out, each with a sink of its own; give deliver with a "
                "gateway, or make it the sink of a route: python:MODULE:FUNCTION",
            )
        gateway = gateway.with_sink(deliver)
    return LambdaHandler(gateway, metrics=metrics, clock=clock)


class LambdaHandler:
    """
    A function of an event and a context, as Lambda calls it.

    Threads take turns. What happens in a call, happens before it returns.
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
        self.__name__ = self.__qualname__ = "lambda_handler"  # decorators ask for it

    @property
    def router(self) -> Router:
        return self._router

    def __call__(self, event: object, context: Context) -> Failures | None:
        """Take what Lambda hands over, and answer as its trigger wants."""
        invocation = recognise(event, self._router.read)
        return self._loop.run(lambda: self._handle(invocation, context))

    def close(self, grace: timedelta = timedelta(seconds=2)) -> None:
        """Finish and close everything; Lambda never asks for it, tests and scripts do."""
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
                self._metrics.tell(self._books())

    # --- open --------------------------------------------------------------------------

    async def _open(self, ends: float) -> None:
        """Open what is not open yet; a store that is away counts as a failed call."""
        if not self._unopened:
            return
        if not all(_holds_on_outage(gateway) for gateway in self._router.gateways):
            await self._open_if_possible(ends)
            return
        try:
            await self._open_within(self._unopened, ends)
        except TimeoutError:
            raise HandedBack("the store could not be opened in the time left", 0) from None

    async def _open_if_possible(self, ends: float) -> None:
        """
        Open what can be opened soon; without a store, events are sent unprotected, as asked.

        Left to itself the gateway opens too, and waits as long as that takes. So whatever it
        would try is tried here, and what comes of it is told to the breaker that it asks.
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
        """Open *gateways*, or raise `TimeoutError`; one that can't be broken off is let be."""
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
        """Take all records through, and break off what would outlast the call."""
        loop = asyncio.get_running_loop()
        work = loop.create_task(self._run(invocation, outcomes, ends - _RESERVE_S))
        await _wait_for(work, ends - _LAST_S)
        if not work.done():
            _log.warning("oncebridge.time_is_up", extra={"trigger": invocation.trigger.value})
            outcomes.is_over = True
            # What the sink has taken already is told on the way out.
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
                return  # not answered for, and so handed back
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
        Use the time left for commits that the store did not answer: later nothing runs.

        Not longer than a lease: whoever waits for these keys has them by then.
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
            # Lambda goes on from the lowest number, so this one stands for all behind it.
            back = [min(back, key=lambda record: record.sequence)]
        names = dict.fromkeys(record.name for record in back)
        answer = Failures(batchItemFailures=[ItemFailure(itemIdentifier=name) for name in names])
        if invocation.state is not UNSET:
            answer["state"] = invocation.state
        return answer

    def _is_down(self, back: Sequence[LambdaRecord], records: Sequence[LambdaRecord]) -> bool:
        """Return whether nothing was taken, and something is known to be down."""
        return len(back) == len(records) and any(g.down() for g in self._router.gateways)

    def _warn_of_no_dead_letters(self, trigger: Trigger, outcomes: "_RecordOutcomes") -> None:
        """Say once what an event costs that nobody will ever take."""
        if self._has_warned or not any(answer.reason in _NOWHERE for answer in outcomes.refused):
            return
        self._has_warned = True
        what = "it comes again until the trigger gives up"
        if trigger in (Trigger.KINESIS, Trigger.PIPES_KINESIS):
            what = "it comes again, and its shard stands still, until the record is too old"
        _log.warning(
            "oncebridge.no_dead_letters",
            extra={"trigger": trigger.value, "what": f"an event can never succeed: {what}"},
        )

    def _books(self) -> dict[str, Counted]:
        gateways = self._router.gateways
        books: dict[str, Counted] = {gateway.route: gateway.books for gateway in gateways}
        # One for all routes, as they are looked up together.
        verified = next((gateway.verified for gateway in gateways if gateway.verified), None)
        if verified is not None:
            books.setdefault("verification", _Verified(verified))
        if self._router.unrouted.arrived:
            books["unrouted"] = self._router.unrouted
        return books


class _Verified:
    """What was counted of `verify`, in the form of books."""

    def __init__(self, verified: Mapping[str, int]) -> None:
        self._verified = verified

    def counts(self) -> dict[str, int]:
        return dict(self._verified)


_Item = tuple[int, Arrival]
"""An event, and the place of its record in the batch."""


class _RecordOutcomes:
    """What became of the records of one call, as far as it is known."""

    def __init__(self, count: int) -> None:
        self._left = [1] * count
        """Events of each record that are not acknowledged; one at least, until it is read."""
        self._refused: dict[int, RouterAnswer] = {}
        self.is_over = False
        """Time is up, and only what the sink has taken still counts."""

    def expect(self, records: Sequence[int]) -> None:
        """Note how many events each record holds."""
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
        """Return how many records have to come again, and why."""
        return f"{back} of {count} records have to come again: {self.reasons(back)}"

    def reasons(self, back: int) -> str:
        """Return why *back* records have to come again, the most frequent reasons first."""
        reasons = Counter(
            f"{answer.verdict}: {answer.reason}" if answer.reason else f"{answer.verdict}"
            for answer in self.refused
        )
        if back > len(self.refused):
            reasons["no time left, or behind one of these"] = back - len(self.refused)
        why = [f"{times} x {reason}" for reason, times in reasons.most_common(_MOST_REASONS)]
        more = ["and others"] if len(reasons) > _MOST_REASONS else []
        return "; ".join(why + more)


def _lanes(invocation: Invocation, items: Sequence[_Item]) -> Sequence[Sequence[_Item]]:
    """Put what stays in order into one lane; where there is no order, each into its own."""
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
    Let the loop run for a moment before anything is sent.

    While the process was frozen, the other side may have closed connections. To hear of it
    takes a few turns: one to see it, one to read it, one to tell the connection's owner.
    """
    for _ in range(_TURNS):
        await asyncio.sleep(0)


async def _wait_for(work: asyncio.Task[None], ends: float) -> None:
    """Wait for *work* until *ends*, and leave it as it is then."""
    work.add_done_callback(_retrieve)
    try:
        await asyncio.wait({work}, timeout=ends - asyncio.get_running_loop().time())
    except asyncio.CancelledError:
        work.cancel()
        raise


async def _cancel(work: asyncio.Task[None]) -> None:
    """Cancel *work*, and give it a moment to end; not everything can be cancelled."""
    work.cancel()
    await asyncio.wait({work}, timeout=_LAST_S / 2)


def _retrieve(work: asyncio.Task[None]) -> None:
    """Ask for the error of work that nobody waits for any more, so that nobody complains."""
    if not work.cancelled():
        work.exception()
