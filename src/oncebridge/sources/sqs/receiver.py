"""
Messages of a queue while they are processed.

They are hidden from other receivers for as long as they are processed, and then deleted or
returned to the queue, ten in a call and several calls at once. Calls that fail are retried a few
times. In any case nothing is lost: a message that is not deleted is redelivered and found to be a
duplicate, and one that is not returned becomes visible when its visibility timeout is over.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from msgspec import Struct, field

from oncebridge.aws.client import AwsError
from oncebridge.aws.queue import MOST_ENTRIES, Failure, Message, SqsQueue, advice, tens
from oncebridge.base.clock import Dice
from oncebridge.errors import OncebridgeError

_T = TypeVar("_T")
_log = logging.getLogger("oncebridge")

LONGEST_S: Final = 43_195
"""SQS hides a message for at most twelve hours after it was received; this leaves a margin."""

_LEAVE_S: Final = 2.0
_LINGER_S = 0.05  # a short wait fills calls: ten messages in a call cost no more than one
_TRIES: Final = 6
_TRY_AGAIN_S: Final = 0.2
_OVER_AFTER_S: Final = 5.0
_NOT_DELETED: Final = "oncebridge.messages_not_deleted"


class ReceivedMessage(Struct, eq=False):
    """A message that is being processed."""

    id: str
    handle: str = ""
    received_at: float = 0.0
    until: float = 0.0
    """When it becomes visible to others again."""
    is_hidden: bool = True
    """False once SQS refuses to hide it any longer."""

    def longest_s(self, now: float) -> int:
        """Return for how many seconds it can be hidden from now on."""
        return max(int(self.received_at + LONGEST_S - now), 0)


_Hiding = tuple[ReceivedMessage, int]  # a message, and after how many seconds it is visible


class ReceivedMessages(Struct, eq=False):
    """The messages received from *queue* that are neither deleted nor returned to it."""

    queue: SqsQueue
    visibility_s: int
    dice: Dice
    _held: dict[str, ReceivedMessage] = {}
    _failure_logs: "dict[str, FailureLog]" = {}
    _extending: asyncio.Lock = field(default_factory=asyncio.Lock)
    _final: list[ReceivedMessage] = []  # about to be deleted
    _lingering: asyncio.TimerHandle | None = None
    _back: "list[_Hiding]" = []  # about to be returned
    _calls: set[asyncio.Task[None]] = set()
    _unlogged: Counter[str] = field(default_factory=Counter)
    """Failures by the number of messages, to be logged from time to time."""

    def __len__(self) -> int:
        return len(self._held)

    def take(self, message: Message, now: float) -> ReceivedMessage | None:
        """Add a message and return it; None if it was received before."""
        known = self._held.get(message.message_id)
        held = known or ReceivedMessage(message.message_id)
        self._held[held.id] = held
        # Only the latest handle is guaranteed to delete it.
        held.handle = message.receipt_handle
        held.received_at = now
        held.until = now + self.visibility_s
        held.is_hidden = True
        return None if known else held

    async def settle(self) -> None:
        """Wait until all final messages are deleted or returned, or given up."""
        self._start_calls()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def aclose(self) -> None:
        """Return the remaining messages to the queue."""
        self._start_calls()
        for task in list(self._calls):
            task.cancel()
        await self.settle()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self._return([(held, 0) for held in self._held.values()])
        self._log_counts()

    def _log_counts(self) -> None:
        unlogged, self._unlogged = self._unlogged, Counter()
        for what, messages in (+unlogged).items():
            _log.warning(what, extra={"queue": self.queue.name, "messages": messages})

    # --- hiding ----------------------------------------------------------------------------

    async def keep(self) -> None:
        """Keep the messages hidden, until cancelled."""
        every_s = min(self.visibility_s / 8, 5.0)
        while True:
            await asyncio.sleep(every_s)
            try:
                await self._extend(asyncio.get_running_loop().time())
            except Exception as error:  # noqa: BLE001 - without it, all messages would be redelivered
                extra = {"queue": self.queue.name, "error": type(error).__name__}
                _log.error("oncebridge.keeper_failed", extra=extra)
            self._log_counts()

    async def _extend(self, now: float) -> None:
        half = now + self.visibility_s / 2
        changes = []
        for held in self._held.values():
            if held.is_hidden and held.until < half:
                seconds = min(self.visibility_s, held.longest_s(now))
                if now + seconds > held.until:
                    changes.append((held, seconds))
                elif held.until <= now:
                    self._mark_visible(held)  # twelve hours are over
        async with self._extending:
            answers = await self._hide(changes)
        for (held, seconds), failure in zip(changes, answers, strict=True):
            if failure is None:
                held.until = now + seconds
            elif not failure.is_transient:
                self._mark_visible(held)  # it is visible again

    def _mark_visible(self, held: ReceivedMessage) -> None:
        # Other receivers may get it from now on; the claim in the store decides.
        held.is_hidden = False
        self._unlogged["oncebridge.messages_not_hidden"] += 1

    async def _hide(self, changes: Sequence[_Hiding]) -> list[Failure | None]:
        return await self._in_tens(
            self.queue.change_visibility,
            [(held.handle, seconds) for held, seconds in changes],
            "ChangeMessageVisibility",
        )

    # --- deleting and returning ------------------------------------------------------------

    def delete(self, held: ReceivedMessage) -> None:
        """Delete a message soon: together with others if there are any."""
        self._final.append(held)
        if len(self._final) < MOST_ENTRIES:
            self._start_calls_soon()
        else:
            self._start_calls()

    def return_to_queue(self, held: ReceivedMessage, seconds: int) -> None:
        """Return a message to the queue, visible after so many seconds."""
        self._back.append((held, seconds))
        self._start_calls_soon()

    def _start_calls_soon(self) -> None:
        if self._lingering is None:
            loop = asyncio.get_running_loop()
            self._lingering = loop.call_later(_LINGER_S, self._start_calls)

    def _start_calls(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        if self._final:
            final, self._final = self._final, []
            self._start(self._delete(final))
        if self._back:
            back, self._back = self._back, []
            self._start(self._return(back))

    def _start(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _return(self, back: Sequence[_Hiding]) -> None:
        now = asyncio.get_running_loop().time()
        changes = [(held, min(seconds, held.longest_s(now))) for held, seconds in back]
        for held, _ in back:
            del self._held[held.id]
        async with self._extending:
            pass  # a running call would hide them again
        # Those that cannot be returned become visible when their visibility timeout ends.
        await self._retried(self._hide, changes, _TRIES // 2, "oncebridge.messages_not_given_back")

    async def _delete(self, final: list[ReceivedMessage]) -> None:
        # Those that cannot be deleted are redelivered, and found to be duplicates.
        for held in await self._retried(self._delete_once, final, _TRIES, _NOT_DELETED):
            del self._held[held.id]

    async def _delete_once(self, final: Sequence[ReceivedMessage]) -> list[Failure | None]:
        handles = [held.handle for held in final]
        answers = await self._in_tens(self.queue.delete, handles, "DeleteMessage")
        for held, failure in zip(final, answers, strict=True):
            if failure is None or not failure.is_transient:
                self._unlogged[_NOT_DELETED] += failure is not None
                del self._held[held.id]
        return answers

    async def _retried(
        self,
        call: Callable[[list[_T]], Awaitable[list[Failure | None]]],
        left: list[_T],
        tries: int,
        log: str,
    ) -> list[_T]:
        """Make *call* until all is done or refused; return, and count for *log*, what is left."""
        pause_s = _TRY_AGAIN_S
        for _ in range(tries):
            pairs = zip(left, await call(left), strict=True)
            left = [entry for entry, failure in pairs if failure and failure.is_transient]
            if not left:
                break
            await asyncio.sleep(pause_s * (1 + self.dice.fraction()))
            pause_s *= 2
        self._unlogged[log] += len(left)
        return left

    # --- calls -------------------------------------------------------------------------------

    async def _in_tens(
        self,
        call: Callable[[list[_T]], Awaitable[list[Failure | None]]],
        entries: Sequence[_T],
        action: str,
    ) -> list[Failure | None]:
        """Make a call for each ten entries; if it fails, it has failed for all of them."""
        failures = self._failure_logs.setdefault(action, FailureLog(action, self.queue.name))

        async def one(ten: list[_T]) -> list[Failure | None]:
            try:
                answers = await call(ten)
            except OncebridgeError as error:
                failures.failed(error)
                return [Failure("") for _ in ten]
            failures.succeeded()
            return answers

        answers = await asyncio.gather(*[one(ten) for ten in tens(entries)])
        return [answer for ten in answers for answer in ten]


class FailureLog(Struct, eq=False):
    """Logs when a call begins to fail, when the error changes, and when it works again."""

    action: str
    queue: str
    known: str = ""
    last_at: float = 0.0

    def failed(self, error: OncebridgeError) -> None:
        self.last_at = asyncio.get_running_loop().time()
        kind = error.code if isinstance(error, AwsError) else type(error).__name__
        if self.known == kind:
            return
        self.known = kind
        if isinstance(error, AwsError) and not error.retryable:
            message, level = advice(error, self.action, self.queue), logging.ERROR
        else:
            message, level = str(error), logging.WARNING
        extra = {"queue": self.queue, "call": self.action, "error": message}
        _log.log(level, "oncebridge.queue_fails", extra=extra)

    def succeeded(self) -> None:
        # Calls run at the same time: a single success says little.
        if self.known and asyncio.get_running_loop().time() - self.last_at > _OVER_AFTER_S:
            self.known = ""
            extra = {"queue": self.queue, "call": self.action}
            _log.warning("oncebridge.queue_answers_again", extra=extra)
