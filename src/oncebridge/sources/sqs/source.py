"""
Events from an SQS queue, standard or FIFO.

**Acknowledgement:** a message is deleted once its event is final: delivered, a duplicate, or
stored in the dead letters. A message that another worker holds, or that failed and may itself be
the cause, is returned to the queue for as long as it should wait.
**Outages:** while the store or every sink is down, or all routes are paused, nothing is received,
and the messages that were received stay hidden, so no receive count goes up.
**Order:** in a FIFO queue, the next message of a group starts when the one before it is final; if
one is returned, so is the rest of its group.
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
from oncebridge.engine.router import RouterAnswer
from oncebridge.errors import ConfigError, OncebridgeError
from oncebridge.events.trace_context import NAME as TRACEPARENT
from oncebridge.events.trace_context import XRAY_ATTRIBUTE, BytesWithContext
from oncebridge.sinks.api import Closed
from oncebridge.sinks.aws.answers import answer_to
from oncebridge.sources.api import Host, Source, TraceparentReader, backoff_s
from oncebridge.sources.pump import Pump, Retry, SourceRecord
from oncebridge.sources.sqs.receiver import LONGEST_S, FailureLog, ReceivedMessage, ReceivedMessages

_T = TypeVar("_T")
_log = logging.getLogger("oncebridge")

_MOST_BYTES: Final = 64 * 1024 * 1024
_LEAVE_S: Final = 1.0
SPARE_RECEIVES: Final = 5
"""Receives in addition to the attempts: a message that another worker holds is returned."""
_NO_HANDLE: Final = "oncebridge-tries-its-rights"
_GROUP: Final = "MessageGroupId"


class SqsSourceOptions(AwsOptions, frozen=True, kw_only=True):
    """Options of the SQS source."""

    wait: Annotated[
        timedelta,
        Doc("How long a receive waits for the first message.", "20s", at_least=1, at_most=20),
    ] = timedelta(seconds=20)
    receivers: Annotated[
        int, Doc("How many receives run at the same time.", "8", at_least=1, at_most=100)
    ] = 4
    visibility: Annotated[
        timedelta,
        Doc(
            "How long a message stays hidden if this worker dies; must be longer than the lease.",
            "2m",
            at_least=1,
            at_most=LONGEST_S,
        ),
    ] = timedelta(minutes=2)
    in_hand: Annotated[
        int, Doc("How many messages a worker may process at once.", "1000", at_least=1)
    ] = 2000


class SqsSource(Source):
    """Reads the queue at *address*."""

    Options: ClassVar = SqsSourceOptions

    def __init__(self, address: QueueAddress, options: SqsSourceOptions | None = None) -> None:
        self._options = options = options or SqsSourceOptions()
        self._queue = SqsQueue(address, options, polls=options.receivers)
        self._visibility_s = math.ceil(options.visibility.total_seconds())
        self._is_fifo = address.is_fifo
        self._failures = FailureLog("ReceiveMessage", address.name)
        self._host: Host
        self._received: ReceivedMessages
        self._pump: Pump[ReceivedMessage] | None = None
        self._first: list[SourceRecord[ReceivedMessage]] = []  # from the check of permissions
        self._is_stopping = False

    @classmethod
    def from_url(cls, url: str, options: SqsSourceOptions | None = None) -> Self:
        """Read `sqs://NAME`, `sqs:URL` or `sqs:ARN`."""
        return cls(QueueAddress.parse(url), options)

    # --- the life of a source ----------------------------------------------------------

    async def open(self, host: Host) -> None:
        self._host = host
        self._check_visibility()
        self._received = ReceivedMessages(self._queue, self._visibility_s, host.dice)
        self._pump = Pump(
            host.router,
            self._on_answer,
            retry=Retry.WHAT_IS_NOT_RETURNED,
            unwraps=True,
            batch=host.batch,
            ahead=host.batch,
            most_waiting=self._options.in_hand,
            most_in_hand=self._options.in_hand,
            most_bytes=_MOST_BYTES,
        )
        try:
            await self._queue.open()
            await self._check_queue_settings()
            await self._check_permissions()
        except ConfigError:
            raise
        except OncebridgeError as error:
            # It may become available; receives are retried without end.
            extra = {"source": self._queue.name, "error": str(error)}
            _log.warning("oncebridge.source_is_away", extra=extra)

    async def run(self) -> None:
        assert self._pump is not None  # noqa: S101 - open before
        keeping = asyncio.create_task(self._received.keep())
        self._pump.put(self._first)
        try:
            await self._pump.run(
                self._take,
                takers=self._options.receivers,
                may_take=self._may_receive,
                leave_s=_LEAVE_S,
            )
            await self._received.settle()
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    def stop(self) -> None:
        self._is_stopping = True
        if self._pump is not None:
            self._pump.stop()

    async def aclose(self) -> None:
        if self._pump is not None:
            await self._received.aclose()
        await self._queue.aclose()

    # --- checks at the start -----------------------------------------------------------

    def _check_visibility(self) -> None:
        lease = max([gateway.settings.lease for gateway in self._host.router.gateways])
        if self._options.visibility <= lease:
            raise ConfigError(
                "source.visibility",
                f"{format_duration(self._options.visibility)} is not longer than the lease "
                f"({format_duration(lease)}): a message would be redelivered while its event is held; set a longer visibility",
            )

    async def _check_queue_settings(self) -> None:
        """Warn about settings of the queue that do not fit ours."""
        queue: dict[str, Any] = {"queue": self._queue.name}
        try:
            found = await self._allowed(self._queue.settings(), "GetQueueAttributes")
        except _Denied as denied:
            _log.info("oncebridge.queue_settings_unknown", extra={**queue, "error": denied.message})
            return
        settings = [gateway.settings for gateway in self._host.router.gateways]
        needed = max([one.max_attempts for one in settings]) + SPARE_RECEIVES
        if found.max_receives is None:
            extra = {**queue, "do": f"set a redrive policy, maxReceiveCount at least {needed}"}
            _log.warning("oncebridge.queue_without_redrive", extra=extra)
        elif found.max_receives < needed:
            extra = {**queue, "maxReceiveCount": found.max_receives, "at_least": needed}
            _log.warning("oncebridge.queue_redrives_early", extra=extra)
        if times := self._host.outlasted_window(found.retention):
            _log.warning("oncebridge.queue_outlasts_window", extra={**queue, **times})

    async def _check_permissions(self) -> None:
        """Check the permissions that are needed, without losing a message."""
        with suppress(_OtherRefusal):
            await self._allowed(self._queue.delete([_NO_HANDLE]), "DeleteMessage")
        with suppress(_OtherRefusal):
            hidden = self._queue.change_visibility([(_NO_HANDLE, 0)])
            await self._allowed(hidden, "ChangeMessageVisibility")
        if self._may_receive() and not self._host.router.unavailable_s():
            # The messages received are the first to be processed.
            received = self._receive(most=MOST_ENTRIES, wait_s=0)
            messages = await self._allowed(received, "ReceiveMessage")
            self._first = self._items(messages)

    async def _allowed(self, call: Coroutine[Any, Any, _T], action: str) -> _T:
        """Make a call; raise `ConfigError` if permissions or the queue are missing."""
        try:
            return await call
        except AwsError as error:
            if error.retryable:
                raise
            problem = advice(error, action, self._queue.name)
            if error.is_denied:
                raise _Denied("", problem) from None
            if isinstance(answer_to(error), Closed):
                raise ConfigError("", problem) from None
            raise _OtherRefusal(problem) from None

    # --- receiving -----------------------------------------------------------------------

    async def _take(self) -> list[SourceRecord[ReceivedMessage]]:
        """Receive once; after an error, until that works."""
        failures, wait_s = 0, math.ceil(self._options.wait.total_seconds())
        while not failures or self._may_receive():
            try:
                # A response that cannot be read may have been too large.
                most = 1 if failures else MOST_ENTRIES
                messages = await self._receive(most=most, wait_s=wait_s)
            except OncebridgeError as error:
                self._failures.failed(error)
                await asyncio.sleep(backoff_s(failures, self._host.dice))
                failures += 1
            else:
                self._failures.succeeded()
                return self._items(messages)
        return []

    def _may_receive(self) -> bool:
        in_hand = len(self._received)
        if not self._host.is_open() or self._host.router.has_enough(in_hand):
            return False
        # Messages that are about to be deleted count here, but not in the pump.
        return in_hand < self._options.in_hand

    async def _receive(self, *, most: int, wait_s: int) -> list[Message]:
        is_traced = self._host.context is not None
        return await self._queue.receive(
            most=most,
            wait_s=wait_s,
            visibility_s=self._visibility_s,
            system=[*([_GROUP] if self._is_fifo else []), *([XRAY_ATTRIBUTE] if is_traced else [])],
            attributes=[TRACEPARENT] if is_traced else (),
        )

    def _items(self, messages: Sequence[Message]) -> list[SourceRecord[ReceivedMessage]]:
        now = asyncio.get_running_loop().time()
        records = []
        for message in messages:
            held = self._received.take(message, now)
            if held is not None:
                lane = message.attributes.get(_GROUP) if self._is_fifo else None
                raw = message.body.encode()
                if self._host.context is not None:
                    raw = _with_context(raw, message, self._host.context)
                records.append(SourceRecord(held, raw, lane))
        return records

    def _on_answer(self, held: ReceivedMessage, answer: RouterAnswer) -> None:
        if answer.acknowledge:
            self._received.delete(held)
        else:
            # At a stop another worker may take it at once; otherwise after a second.
            least = 0 if self._is_stopping else 1
            seconds = max(math.ceil(answer.retry_after_ms / 1000), least)
            self._received.return_to_queue(held, seconds)


def _with_context(raw: bytes, message: Message, read: TraceparentReader) -> bytes:
    """Return the body of a message with its trace context, if it has one."""
    attribute = message.message_attributes.get(TRACEPARENT)
    context = read(
        attribute.string_value if attribute else "", message.attributes.get(XRAY_ATTRIBUTE, "")
    )
    return BytesWithContext.of(raw, context) if context else raw


class _OtherRefusal(OncebridgeError):
    """SQS refused a call, but not for missing permissions or a missing queue."""


class _Denied(ConfigError):
    """The permission is missing."""
