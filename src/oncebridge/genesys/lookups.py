"""
Ask for conversations: each once for all who want to know, not too often, and not in vain.

What was said is remembered; that there is no such conversation only briefly, and never as the
reason to refuse an event for good (`oncebridge.genesys.verification`). Requests keep to the pace of *lookups*; whoever would get no turn
early enough for an answer is told so at once. While the API is down or refuses us, only single
tries reach it, and all others are told what the last one met.
"""

import asyncio
from collections import Counter, OrderedDict
from math import inf
from typing import Final

from msgspec import Struct

from oncebridge.base.clock import Dice
from oncebridge.engine.breaker import Breaker
from oncebridge.engine.rate_limit import RateLimit
from oncebridge.genesys.api import (
    Api,
    ClientRefused,
    Exists,
    Hidden,
    LookupResult,
    Missing,
    NoAnswer,
)
from oncebridge.service.genesys_options import GenesysOptions

_MAX_REMEMBERED: Final = 50_000
"""How many conversations are remembered."""
BRIEFLY_S: Final = 5.0
"""How long it is remembered that there is none, and after what time it is asked again."""
_FAILURES: Final = 5
"""In a row, after which nobody is kept waiting for an answer, but for single tries."""
_MOST_WAIT_S: Final = 60.0
"""The longest line of those who got no turn, and come again one by one."""
_TOO_MANY: Final = "more conversations to look up than lookups permits"


class LookupDelayed(Struct, frozen=True, gc=False):
    """There was no time to ask, which is nobody's fault."""

    reason: str
    retry_after_ms: int = 0


class _PendingLookup(Struct, frozen=True):
    task: asyncio.Task[LookupResult]
    at_s: float
    """When it is its turn."""


class Lookups:
    """Ask *api*, at *pace*; requests are counted as `lookups` in *counts*."""

    def __init__(
        self, api: Api, pace: RateLimit, options: GenesysOptions, counts: Counter[str], dice: Dice
    ) -> None:
        self._api = api
        self._pace = pace
        self._retry_turns = RateLimit(options.lookups)
        """When those come again who got no turn."""
        self._options = options
        self._counts = counts
        self._breaker = Breaker(_FAILURES, dice)
        self._problem: NoAnswer | ClientRefused = NoAnswer("")
        """The latest, for those who are not let through to find out themselves."""
        self._unavailable_until_s = 0.0
        self._known: OrderedDict[str, tuple[LookupResult, float]] = OrderedDict()
        self._pending: dict[str, _PendingLookup] = {}

    async def aclose(self) -> None:
        """Break off what is asked; safe to repeat."""
        asking = [each.task for each in self._pending.values()]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    def remembered(self, conversation: str) -> LookupResult | None:
        """Return what was said about *conversation* not long ago."""
        found = self._known.get(conversation)
        if found is None:
            return None
        if asyncio.get_running_loop().time() >= found[1]:
            del self._known[conversation]
            return None
        self._known.move_to_end(conversation)
        return found[0]

    async def find(
        self, conversation: str, within_s: float, since_s: float = -inf
    ) -> LookupResult | LookupDelayed:
        """
        Ask, or wait with those who have asked already; not longer than *within_s*.

        A negative answer to a request that was sent before *since_s* is not returned: the
        conversation is asked for once more.
        """
        now = asyncio.get_running_loop().time
        ends_s = now() + within_s
        while True:
            asking = self._pending.get(conversation) or self._start(conversation, ends_s - now())
            if not isinstance(asking, _PendingLookup):
                return asking
            # Whoever is broken off here leaves the others their answer.
            await asyncio.wait({asking.task}, timeout=max(ends_s - now(), 0))
            if asking.task.cancelled():
                return LookupDelayed("this gateway is shutting down")
            if not asking.task.done():
                break
            found = asking.task.result()
            if asking.at_s >= since_s or not isinstance(found, Missing | Hidden):
                return found
        left_s = asking.at_s - now()
        if left_s > 0:
            return LookupDelayed(_TOO_MANY, int(left_s * 1000) + 1)
        return NoAnswer("the Genesys API did not answer in the time left")

    def _start(
        self, conversation: str, within_s: float
    ) -> _PendingLookup | ClientRefused | NoAnswer | LookupDelayed:
        """Take a turn to ask, early enough for an answer; or tell why there is none."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now < self._unavailable_until_s:
            return self._last_problem(now)
        wait_s = self._pace.left_s(now)
        if wait_s > max(within_s - self._options.timeout.total_seconds(), 0):
            return self._delay(wait_s, now)
        if not self._breaker.admits(now):
            return self._last_problem(now)
        at_s = now + self._pace.take(1, now)
        is_try = self._breaker.is_open
        task = loop.create_task(self._look_up(conversation, at_s - now, is_try=is_try))
        asking = self._pending[conversation] = _PendingLookup(task, at_s)

        def ended(_: object) -> None:
            # Here, and not in the task: one that is cancelled early does not even begin.
            del self._pending[conversation]
            self._breaker.abandoned()

        task.add_done_callback(ended)
        return asking

    def _delay(self, wait_s: float, now: float) -> LookupDelayed:
        """Send away for now: come when there are turns again, one by one and not all at once."""
        if self._retry_turns.left_s(now) < _MOST_WAIT_S:
            wait_s += self._retry_turns.take(1, now)
        else:
            wait_s += _MOST_WAIT_S
        return LookupDelayed(_TOO_MANY, int(wait_s * 1000) + 1)

    def _last_problem(self, now: float) -> NoAnswer | ClientRefused:
        """Say what the last one met who asked."""
        if isinstance(self._problem, ClientRefused):
            return self._problem
        left_s = max(self._breaker.left_s(now), self._unavailable_until_s - now)
        return NoAnswer(self._problem.reason, int(left_s * 1000) + 1)

    async def _look_up(self, conversation: str, turn_s: float, *, is_try: bool) -> LookupResult:
        await asyncio.sleep(turn_s)
        now = asyncio.get_running_loop().time()
        if now < self._unavailable_until_s or (self._breaker.is_open and not is_try):
            return self._last_problem(now)  # said to somebody who was before us
        self._counts["lookups"] += 1
        found = await self._api.find(conversation)
        self._record_result(conversation, found)
        return found

    def _record_result(self, conversation: str, found: LookupResult) -> None:
        now = asyncio.get_running_loop().time()
        match found:
            case Exists():
                self._remember(conversation, found, now + self._options.remember.total_seconds())
                self._breaker.succeeded()
            case Missing() | Hidden():
                self._remember(conversation, found, now + BRIEFLY_S)
                self._breaker.succeeded()
            case ClientRefused():
                self._problem = found
                self._breaker.failed(now, at_once=True)
            case NoAnswer():
                self._problem = found
                self._breaker.failed(now)
                self._unavailable_until_s = max(
                    self._unavailable_until_s, now + found.retry_after_ms / 1000
                )

    def _remember(self, conversation: str, found: LookupResult, until_s: float) -> None:
        self._known[conversation] = (found, until_s)
        self._known.move_to_end(conversation)
        if len(self._known) > _MAX_REMEMBERED:
            self._known.popitem(last=False)
