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
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from math import inf
from typing import Any, Final, NotRequired, Protocol, TypedDict

from msgspec import UNSET

from oncebridge.aws.emf import Counted, EmfMetrics
from oncebridge.aws.invocation import Invocation, LambdaRecord, Trigger, recognise
from oncebridge.base.clock import Clock, system_clock
from oncebridge.engine.blocking import OneLoop
from oncebridge.engine.gateway import Gateway
from oncebridge.engine.opening import share_of
from oncebridge.engine.router import RouteEntry, Router, RouterAnswer
from oncebridge.errors import ConfigError, HandedBack
from oncebridge.events.event import Event
from oncebridge.sources.pump import Pump, Retry, SourceRecord

_log = logging.getLogger("oncebridge")

_RESERVE_S: Final = 0.5
"""The last send has to end this long before the end of the call."""
_LAST_S: Final = 0.25
"""Everything is cancelled this long before the end, so that there is a response."""
_LONGEST_CALL_S: Final = 900.0
_TURNS: Final = 5
_NOWHERE: Final = "dead letters: none are configured"
_MOST_REASONS: Final = 3
_NO_TIME: Final = RouterAnswer(acknowledge=False, verdict=None, reason="no time left")


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
            answers: dict[int, RouterAnswer] = {}
            if loop.time() < ends - _RESERVE_S:
                await self._open(ends - _RESERVE_S)
                before = self._uncommitted()
                try:
                    answers = await self._process(invocation, ends)
                finally:
                    if self._uncommitted() > before:
                        await self._wait_for_commits(ends - _RESERVE_S)
            return self._respond(invocation, answers)
        finally:
            if self._metrics is not None:
                self._metrics.write_changes(self._books())

    async def _open(self, ends: float) -> None:
        """Open the gateways; raise if none can send without its store, and a store does not open."""
        now = asyncio.get_running_loop().time
        gateways = self._router.gateways
        if not all(_holds_on_outage(gateway) for gateway in gateways):
            for gateway in gateways:
                if why := await gateway.try_open(share_of(ends - now())):
                    _log.warning("oncebridge.store_is_away", extra={"error": why})
            return
        try:
            for gateway in gateways:
                await gateway.open(ends - now())
        except TimeoutError:
            raise HandedBack(
                "the store could not be opened in the time left; check it, or allow more time", 0
            ) from None

    # --- process -----------------------------------------------------------------------

    async def _process(self, invocation: Invocation, ends: float) -> dict[int, RouterAnswer]:
        """Process all records; return the answer to each, and cancel work that would outlast the call."""
        answers: dict[int, RouterAnswer] = {}
        trigger, records = invocation.trigger, invocation.records
        pump = Pump[int](
            self._router,
            answers.__setitem__,
            retry=Retry.NOTHING,
            unwraps=True,
            batch=len(records),
            at_once=inf,
            patience_s=_LONGEST_CALL_S if trigger.waits else 0,
            ends=ends - _RESERVE_S,
        )
        pump.put(
            [
                SourceRecord(at, record.held, record.lane if trigger.is_ordered else None)
                for at, record in enumerate(records)
            ]
        )
        left_s = ends - _LAST_S - asyncio.get_running_loop().time()
        # Events that the sink has taken are still acknowledged after that.
        if not await pump.aclose(left_s, _LAST_S / 2):
            _log.warning("oncebridge.time_is_up", extra={"trigger": trigger.value})
        return answers

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

    # --- respond -----------------------------------------------------------------------

    def _respond(
        self, invocation: Invocation, answers: Mapping[int, RouterAnswer]
    ) -> Failures | None:
        trigger, records = invocation.trigger, invocation.records
        refused = {
            at: answer
            for at in range(len(records))
            if not (answer := answers.get(at, _NO_TIME)).acknowledge
        }
        back = [records[at] for at in refused]
        reasons = _reasons(refused.values())
        if back:
            self._warn_of_no_dead_letters(trigger, refused.values())
        if back and trigger.names_failures:
            _log.warning(
                "oncebridge.handed_back",
                extra={
                    "trigger": trigger.value,
                    "back": len(back),
                    "records": len(records),
                    "reasons": reasons,
                },
            )
        if back and (not trigger.names_failures or self._is_down(back, records)):
            why = f"{len(back)} of {len(records)} records have to be retried: {reasons}"
            wait_ms = max([answer.retry_after_ms for answer in refused.values()])
            raise HandedBack(why, wait_ms / 1000)
        if not trigger.names_failures:
            return None
        if trigger is Trigger.KINESIS and back:
            # Lambda continues from the lowest number, so this one includes all after it.
            back = [min(back, key=lambda record: record.sequence)]
        names = dict.fromkeys(record.name for record in back)
        failures = Failures(batchItemFailures=[ItemFailure(itemIdentifier=name) for name in names])
        if invocation.state is not UNSET:
            failures["state"] = invocation.state
        return failures

    def _is_down(self, back: Sequence[LambdaRecord], records: Sequence[LambdaRecord]) -> bool:
        """Return True if no record was accepted and the store or a sink is down."""
        return len(back) == len(records) and any(g.down() for g in self._router.gateways)

    def _warn_of_no_dead_letters(self, trigger: Trigger, refused: Iterable[RouterAnswer]) -> None:
        """Warn once about events that can never succeed while there are no dead letters."""
        if self._has_warned or not any(answer.reason == _NOWHERE for answer in refused):
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


def _reasons(refused: Iterable[RouterAnswer]) -> str:
    """Return why records have to be retried, the most frequent reasons first."""
    reasons = Counter(
        ": ".join([part for part in (answer.verdict, answer.reason) if part]) for answer in refused
    )
    why = [f"{times} x {reason}" for reason, times in reasons.most_common(_MOST_REASONS)]
    more = ["and others"] if len(reasons) > _MOST_REASONS else []
    return "; ".join(why + more)


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
