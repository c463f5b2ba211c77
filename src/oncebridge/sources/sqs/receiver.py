"""
Messages of a queue while they are worked on.

They are hidden from others for as long as they are in hand, up to the twelve hours that SQS
allows, and then deleted or given back, ten in a call and several calls at once. What SQS could
not do for now is tried again a few times. Whatever comes of it, nothing is lost: a message that
is not deleted comes again and is found to be a duplicate, and one that is not given back comes
when its time is over.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Final, TypeVar

from oncebridge.aws.client import AwsError
from oncebridge.aws.queue import MOST_ENTRIES, Failure, Message, SqsQueue, advice
from oncebridge.base.clock import Dice
from oncebridge.errors import OncebridgeError

_T = TypeVar("_T")
_log = logging.getLogger("oncebridge")

LONGEST_S: Final = 43_195
"""SQS hides a message for twelve hours after it was received, and not quite to the last second."""

_LEAVE_S: Final = 2.0
_GATHER_S, _LINGER_S = 0.02, 0.05
"""A call for ten messages costs no more than one for a single message."""
_TRIES: Final = 6
_TRY_AGAIN_S: Final = 0.2
_OVER_AFTER_S: Final = 5.0
_NOT_DELETED: Final = "oncebridge.messages_not_deleted"


class _Held:
    """A message in hand."""

    __slots__ = ("handle", "id", "is_hidden", "received_at", "until")

    def __init__(self, name: str) -> None:
        self.id = name
        self.handle = ""
        self.received_at = 0.0
        self.until = 0.0
        """When it becomes visible to others again."""
        self.is_hidden = True
        """False once SQS has said that it cannot be hidden any longer."""

    def longest_s(self, now: float) -> int:
        """Return for how long it can be hidden from now on."""
        return max(int(self.received_at + LONGEST_S - now), 0)


class Hand:
    """What was received from *queue* and is neither deleted nor given back."""

    def __init__(self, queue: SqsQueue, visibility_s: int, dice: Dice) -> None:
        self._queue = queue
        self._visibility_s = visibility_s
        self._dice = dice
        self._places = count(1)
        self._held: dict[int, _Held] = {}
        self._by_id: dict[str, _Held] = {}
        self._troubles: dict[str, Trouble] = {}
        self._extending = asyncio.Lock()
        self._final: list[int] = []
        """What is about to be deleted."""
        self._lingering: asyncio.TimerHandle | None = None
        self._deletes: set[asyncio.Task[None]] = set()
        self._untold: Counter[str] = Counter()
        """What could not be done to how many messages, to be logged now and then."""

    def __len__(self) -> int:
        return len(self._held)

    def take(self, message: Message, now: float) -> int | None:
        """Take a message, and give its place; None if it is in hand already."""
        held = self._by_id.get(message.message_id)
        place = None
        if held is None:
            held = self._by_id[message.message_id] = _Held(message.message_id)
            place = next(self._places)
            self._held[place] = held
        # Only the latest handle is sure to delete.
        held.handle = message.receipt_handle
        held.received_at = now
        held.until = now + self._visibility_s
        held.is_hidden = True
        return place

    def _drop(self, places: Iterable[int]) -> None:
        for place in places:
            held = self._held.pop(place, None)
            if held is not None:
                del self._by_id[held.id]

    async def settled(self) -> None:
        """Wait until all that is to be deleted is, or cannot be."""
        self._delete_rest()
        await asyncio.gather(*self._deletes, return_exceptions=True)

    async def aclose(self) -> None:
        """Give back what is left."""
        self._delete_rest()
        for task in list(self._deletes):
            task.cancel()
        await self.settled()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self.give_back([(place, 0) for place in self._held])
        self._tell()

    def _tell(self) -> None:
        untold, self._untold = self._untold, Counter()
        for what, messages in (+untold).items():
            _log.warning(what, extra={"queue": self._queue.name, "messages": messages})

    # --- hiding ----------------------------------------------------------------------------

    async def keep(self) -> None:
        """Keep hidden what is in hand, until cancelled."""
        every_s = min(self._visibility_s / 8, 5.0)
        while True:
            await asyncio.sleep(every_s)
            try:
                await self._extend(asyncio.get_running_loop().time())
            except Exception as error:  # noqa: BLE001 - without it, all would come again
                extra = {"queue": self._queue.name, "error": type(error).__name__}
                _log.error("oncebridge.keeper_failed", extra=extra)
            self._tell()

    async def _extend(self, now: float) -> None:
        half = now + self._visibility_s / 2
        changes = []
        for held in self._held.values():
            if held.is_hidden and held.until < half:
                seconds = min(self._visibility_s, held.longest_s(now))
                if now + seconds > held.until:
                    changes.append((held, seconds))
                elif held.until <= now:
                    self._lose(held)  # twelve hours are over
        async with self._extending:
            answers = await self._hide(changes)
        for (held, seconds), failure in zip(changes, answers, strict=True):
            if failure is None:
                held.until = now + seconds
            elif not failure.is_transient:
                self._lose(held)  # it is visible already

    def _lose(self, held: _Held) -> None:
        # Others may have it from now on; the store will tell who goes ahead.
        held.is_hidden = False
        self._untold["oncebridge.messages_not_hidden"] += 1

    async def _hide(self, changes: Sequence[tuple[_Held, int]]) -> list[Failure | None]:
        return await self._in_tens(
            self._queue.change_visibility,
            [(held.handle, seconds) for held, seconds in changes],
            "ChangeMessageVisibility",
        )

    async def give_back(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Let others have messages, by their place, after so many seconds."""
        now = asyncio.get_running_loop().time()
        changes = []
        for place, seconds in pairs:
            held = self._held[place]
            changes.append((held, min(seconds, held.longest_s(now))))
        self._drop([place for place, _ in pairs])
        async with self._extending:
            pass  # what is under way would hide them again
        pause_s = _TRY_AGAIN_S
        for _ in range(_TRIES // 2):
            answers = await self._hide(changes)
            changes = [
                change
                for change, failure in zip(changes, answers, strict=True)
                if failure is not None and failure.is_transient
            ]
            if not changes:
                return
            await asyncio.sleep(pause_s)
            pause_s *= 2
        # They come by themselves when their visibility ends.
        self._untold["oncebridge.messages_not_given_back"] += len(changes)

    # --- deleting --------------------------------------------------------------------------

    async def delete(self, places: Sequence[int]) -> None:
        """Delete messages, by their place, soon: together with others where there are any."""
        self._final += places
        while len(self._final) >= MOST_ENTRIES:
            self._delete_ten()
        if self._final and self._lingering is None:
            loop = asyncio.get_running_loop()
            self._lingering = loop.call_later(_LINGER_S, self._delete_rest)
        await asyncio.sleep(_GATHER_S)

    def _delete_rest(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        if self._final:
            self._delete_ten()

    def _delete_ten(self) -> None:
        ten, self._final = self._final[:MOST_ENTRIES], self._final[MOST_ENTRIES:]
        task = asyncio.create_task(self._delete(ten))
        self._deletes.add(task)
        task.add_done_callback(self._deletes.discard)

    async def _delete(self, left: list[int]) -> None:
        pause_s = _TRY_AGAIN_S
        for _ in range(_TRIES):
            left = await self._delete_once(left)
            if not left:
                return
            await asyncio.sleep(pause_s * (1 + self._dice.fraction()))
            pause_s *= 2
        # They come again, and are found to be duplicates.
        self._drop(left)
        self._untold[_NOT_DELETED] += len(left)

    async def _delete_once(self, places: Sequence[int]) -> list[int]:
        """Delete what can be deleted, and give what may be later."""
        handles = [self._held[place].handle for place in places]
        answers = await self._in_tens(self._queue.delete, handles, "DeleteMessage")
        left = []
        for place, failure in zip(places, answers, strict=True):
            if failure is not None and failure.is_transient:
                left.append(place)
            else:
                self._untold[_NOT_DELETED] += failure is not None
                self._drop([place])
        return left

    # --- calls -------------------------------------------------------------------------------

    async def _in_tens(
        self,
        call: Callable[[list[_T]], Awaitable[list[Failure | None]]],
        entries: Sequence[_T],
        action: str,
    ) -> list[Failure | None]:
        """Make a call for each ten entries; one that fails has failed for all of them."""
        trouble = self._troubles.setdefault(action, Trouble(action, self._queue.name))

        async def one(ten: list[_T]) -> list[Failure | None]:
            try:
                answers = await call(ten)
            except OncebridgeError as error:
                trouble.is_there(error)
                return [Failure("") for _ in ten]
            trouble.is_over()
            return answers

        answers = await asyncio.gather(*[one(ten) for ten in _tens(entries)])
        return [answer for ten in answers for answer in ten]


def _tens(entries: Sequence[_T]) -> Iterator[list[_T]]:
    for at in range(0, len(entries), MOST_ENTRIES):
        yield list(entries[at : at + MOST_ENTRIES])


class Trouble:
    """A call that fails: told when that begins or changes, and when it is over."""

    def __init__(self, action: str, queue: str) -> None:
        self._action = action
        self._queue = queue
        self._known = ""
        self._last_at = 0.0

    def is_there(self, error: OncebridgeError) -> None:
        self._last_at = asyncio.get_running_loop().time()
        kind = error.code if isinstance(error, AwsError) else type(error).__name__
        if self._known == kind:
            return
        self._known = kind
        if isinstance(error, AwsError) and not error.retryable:
            told, level = advice(error, self._action, self._queue), logging.ERROR
        else:
            told, level = str(error), logging.WARNING
        extra = {"queue": self._queue, "call": self._action, "error": told}
        _log.log(level, "oncebridge.queue_fails", extra=extra)

    def is_over(self) -> None:
        # Calls run side by side: a single one that gets through says little.
        if self._known and asyncio.get_running_loop().time() - self._last_at > _OVER_AFTER_S:
            self._known = ""
            extra = {"queue": self._queue, "call": self._action}
            _log.warning("oncebridge.queue_answers_again", extra=extra)
