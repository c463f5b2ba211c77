"""
Events from an SQS queue, standard or FIFO.

**What is acknowledged when:** a message is deleted once its event is final: delivered, a
duplicate, or safe in the dead letters. One that another worker holds, or that failed and may be
the cause itself, goes back into the queue for as long as it should wait.
**What an outage does:** while the store or every sink is down, or all routes are paused, nothing
is received, and what is in hand stays in hand and hidden, so no receive count goes up.
**What it costs:** a receive and a delete for ten messages, and three receives a minute for each
receiver that waits at an empty queue.

Messages are received with a visibility of our own, and hidden further while they are in hand, up
to the twelve hours that SQS allows. Of a FIFO queue, the next message of a group starts when the
one before it is final; one that goes back takes the rest of its group with it.
"""

import asyncio
import logging
import math
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar

from oncebridge.aws.client import AwsError
from oncebridge.aws.options import AwsOptions
from oncebridge.aws.queue import MOST_ENTRIES, Message, QueueAddress, SqsQueue, advice
from oncebridge.base.durations import format_duration
from oncebridge.base.options import Doc
from oncebridge.engine.gateway import Gateway
from oncebridge.engine.router import Answer
from oncebridge.errors import ConfigError, OncebridgeError
from oncebridge.events.event import Event, Unreadable, set_context
from oncebridge.events.trace_context import NAME as TRACEPARENT
from oncebridge.events.trace_context import XRAY_ATTRIBUTE
from oncebridge.sinks.api import Closed
from oncebridge.sinks.aws.answers import answer_to
from oncebridge.sources.api import Context, Host
from oncebridge.sources.relay import Item, Relay
from oncebridge.sources.sqs.receiver import LONGEST_S, Hand, Trouble

_T = TypeVar("_T")
_log = logging.getLogger("oncebridge")

_MOST_BYTES: Final = 64 * 1024 * 1024
_LEAVE_S: Final = 1.0
_LOOK_AGAIN_S: Final = 1.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
SPARE_RECEIVES: Final = 5
"""Receives beyond the attempts: a message that another worker holds goes back a few times."""
_NO_HANDLE: Final = "oncebridge-tries-its-rights"
_GROUP: Final = "MessageGroupId"


class SqsSourceOptions(AwsOptions, frozen=True, kw_only=True):
    """How a queue is read."""

    wait: Annotated[
        timedelta,
        Doc("How long a receive waits for the first message.", "20s", at_least=1, at_most=20),
    ] = timedelta(seconds=20)
    receivers: Annotated[
        int, Doc("How many receives run side by side.", "8", at_least=1, at_most=100)
    ] = 4
    visibility: Annotated[
        timedelta,
        Doc(
            "How long a message stays hidden if this worker dies; longer than the lease.",
            "2m",
            at_least=1,
            at_most=LONGEST_S,
        ),
    ] = timedelta(minutes=2)
    in_hand: Annotated[
        int, Doc("How many messages may be in hand at once.", "1000", at_least=1)
    ] = 2000


class SqsSource:
    """Read the queue at *address*."""

    Options: ClassVar = SqsSourceOptions

    def __init__(self, address: QueueAddress, options: SqsSourceOptions | None = None) -> None:
        self._options = options = options or SqsSourceOptions()
        self._queue = SqsQueue(address, options, polls=options.receivers)
        self._visibility_s = math.ceil(options.visibility.total_seconds())
        self._is_fifo = address.is_fifo
        self._trouble = Trouble("ReceiveMessage", address.name)
        self._host: Host
        self._hand: Hand
        self._relay: Relay | None = None
        self._first: list[Item] = []
        """What was received when it was tried whether we may."""
        self._is_stopping = False

    @classmethod
    def from_url(cls, url: str, options: SqsSourceOptions | None = None) -> Self:
        """Read `sqs://NAME`, `sqs:URL` or `sqs:ARN`."""
        return cls(QueueAddress.parse(url), options)

    # --- the life of a source ----------------------------------------------------------

    async def open(self, host: Host) -> None:
        self._host = host
        self._check_visibility()
        self._hand = Hand(self._queue, self._visibility_s, host.dice)
        self._relay = Relay(
            host.router,
            take=self._take,
            final=self._hand.delete,
            hand_back=self._hand_back,
            takers=self._options.receivers,
            ahead=host.batch,
            batch=host.batch,
            most_waiting=self._options.in_hand,
            most_in_hand=self._options.in_hand,
            most_bytes=_MOST_BYTES,
            leave_s=_LEAVE_S,
        )
        try:
            await self._queue.open()
            await self._look_at_settings()
            await self._try_rights()
        except ConfigError:
            raise
        except OncebridgeError as error:
            # It may be there in a moment; it is asked again for as long as it takes.
            extra = {"source": self._queue.name, "error": str(error)}
            _log.warning("oncebridge.source_is_away", extra=extra)

    async def run(self) -> None:
        assert self._relay is not None  # noqa: S101 - open before
        keeping = asyncio.create_task(self._hand.keep())
        try:
            await self._relay.run()
            await self._hand.settled()
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    def stop(self) -> None:
        self._is_stopping = True
        if self._relay is not None:
            self._relay.stop()

    def progress(self) -> tuple[int, int] | None:
        return None

    async def aclose(self) -> None:
        if self._relay is not None:
            await self._hand.aclose()
        await self._queue.aclose()

    # --- what is checked at the start --------------------------------------------------

    def _check_visibility(self) -> None:
        lease = max([gateway.settings.lease for gateway in self._host.router.gateways])
        if self._options.visibility <= lease:
            raise ConfigError(
                "source.visibility",
                f"{format_duration(self._options.visibility)} is not longer than the lease "
                f"({format_duration(lease)}): a message would come again while its event is held",
            )

    async def _look_at_settings(self) -> None:
        """Warn of settings of the queue that do not go well with ours."""
        queue: dict[str, Any] = {"queue": self._queue.name}
        try:
            found = await _allowed(self._queue.settings(), "GetQueueAttributes", self._queue.name)
        except _Denied as denied:
            _log.info("oncebridge.queue_settings_unknown", extra={**queue, "error": denied.message})
            return
        settings = [gateway.settings for gateway in self._host.router.gateways]
        needed = max([one.max_attempts for one in settings]) + SPARE_RECEIVES
        if found.max_receives is None:
            told = {**queue, "do": f"set a redrive policy, maxReceiveCount at least {needed}"}
            _log.warning("oncebridge.queue_without_redrive", extra=told)
        elif found.max_receives < needed:
            told = {**queue, "maxReceiveCount": found.max_receives, "at_least": needed}
            _log.warning("oncebridge.queue_redrives_early", extra=told)
        window = min([one.window for one in settings])
        if found.retention > window:
            times = {"retention": found.retention, "window": window}
            told = {**queue, **{name: format_duration(time) for name, time in times.items()}}
            _log.warning("oncebridge.queue_outlasts_window", extra=told)

    async def _try_rights(self) -> None:
        """Find out now whether we may do what we will do, at the cost of no message."""
        name, queue = self._queue.name, self._queue
        with suppress(_NotThis):
            await _allowed(queue.delete([_NO_HANDLE]), "DeleteMessage", name)
        with suppress(_NotThis):
            hidden = queue.change_visibility([(_NO_HANDLE, 0)])
            await _allowed(hidden, "ChangeMessageVisibility", name)
        if self._may_receive():
            # What comes is the first that is brought.
            messages = await _allowed(self._receive(wait_s=0), "ReceiveMessage", name)
            self._first = self._items(messages)

    # --- receiving -----------------------------------------------------------------------

    async def _take(self) -> list[Item]:
        """Receive until there is something new; there is no end."""
        failures = 0
        while True:
            if self._first:
                items, self._first = self._first, []
                return items
            while not self._may_receive():
                away_s = self._host.router.away_s()
                await asyncio.sleep(min(max(away_s, 0.1), _LOOK_AGAIN_S))
            try:
                # An answer that cannot be read may have been too large.
                messages = await self._receive(most=1 if failures else MOST_ENTRIES)
            except OncebridgeError as error:
                self._trouble.is_there(error)
                await asyncio.sleep(self._pause_s(failures))
                failures += 1
                continue
            self._trouble.is_over()
            failures = 0
            if items := self._items(messages):
                return items

    def _may_receive(self) -> bool:
        router = self._host.router
        if not self._host.is_open() or router.away_s():
            return False
        if len(self._hand) and len(router.gateways) == 1 and _is_down(router.gateways[0]):
            return False  # what is in hand is enough to find out whether that is over
        # Those that are about to be deleted count here, and not with the relay.
        return len(self._hand) < self._options.in_hand

    async def _receive(
        self, *, most: int = MOST_ENTRIES, wait_s: int | None = None
    ) -> list[Message]:
        if wait_s is None:
            wait_s = math.ceil(self._options.wait.total_seconds())
        is_traced = self._host.context is not None
        return await self._queue.receive(
            most=most,
            wait_s=wait_s,
            visibility_s=self._visibility_s,
            system=[*([_GROUP] if self._is_fifo else []), *([XRAY_ATTRIBUTE] if is_traced else [])],
            attributes=[TRACEPARENT] if is_traced else (),
        )

    def _pause_s(self, failures: int) -> float:
        longest = min(_PAUSE_S * 2.0 ** min(failures, 10), _LONGEST_PAUSE_S)
        return longest * (1 + self._host.dice.fraction()) / 2

    def _items(self, messages: Sequence[Message]) -> list[Item]:
        now = asyncio.get_running_loop().time()
        unwrap = self._host.router.unwrap
        items = []
        for message in messages:
            place = self._hand.take(message, now)
            if place is not None:
                lane = message.attributes.get(_GROUP) if self._is_fifo else None
                arrivals = unwrap(message.body.encode())
                if self._host.context is not None:
                    _trace(message, arrivals, self._host.context)
                items.append(Item(place, arrivals, lane))
        return items

    async def _hand_back(self, pairs: Sequence[tuple[Item, Answer]]) -> None:
        # Right after a stop somebody else may begin; else let there be a moment in between.
        least = 0 if self._is_stopping else 1
        await self._hand.give_back(
            [(item.place, max(math.ceil(a.retry_after_ms / 1000), least)) for item, a in pairs]
        )


def _trace(message: Message, arrivals: Sequence[Event | Unreadable], read: Context) -> None:
    """Note which request the events of a message belong to."""
    told = message.message_attributes.get(TRACEPARENT)
    context = read(told.string_value if told else "", message.attributes.get(XRAY_ATTRIBUTE, ""))
    if context:
        for arrival in arrivals:
            set_context(arrival, context)


def _is_down(gateway: Gateway) -> bool:
    holds = gateway.settings.on_store_outage == "hold"
    return gateway.sink_breaker.is_open or (holds and gateway.store_breaker.is_open)


class _NotThis(OncebridgeError):
    """SQS said no, and not because of who we are or because there is no such queue."""


class _Denied(ConfigError):
    """We may not do this."""


async def _allowed(call: Coroutine[Any, Any, _T], action: str, queue: str) -> _T:
    """Make a call; where our access is at fault, a human has to put it right."""
    try:
        return await call
    except AwsError as error:
        if error.retryable:
            raise
        told = advice(error, action, queue)
        if error.is_denied:
            raise _Denied("", told) from None
        if isinstance(answer_to(error), Closed):
            raise ConfigError("", told) from None
        raise _NotThis(told) from None
