"""
Look up conversations: each once for all callers, rate limited, and not while the API is down.

Results are cached; "not found" only briefly, and it is never the reason for refusing an event
finally (`oncebridge.genesys.verification`). The setting *lookups* limits the rate of requests;
a caller whose turn would be too late is refused at once. While the API is unavailable or refuses
the client, only single probes are sent, and all other callers get the result of the last one.
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
    LookupFailed,
    LookupResult,
    Missing,
)
from oncebridge.service.genesys_options import GenesysOptions

_MAX_REMEMBERED: Final = 50_000
"""The maximum number of cached conversations."""
BRIEFLY_S: Final = 5.0
"""How long "not found" is cached, and the time until the next lookup."""
_FAILURES: Final = 5
"""After so many failures in a row, only single probes are sent."""
_MOST_WAIT_S: Final = 60.0
"""The maximum time over which the retries of delayed callers are spread."""
_TOO_MANY: Final = "more conversations to look up than lookups permits"


class LookupDelayed(Struct, frozen=True, gc=False):
    """There was no time for a lookup, because of the rate limit or a shutdown."""

    reason: str
    retry_after_ms: int = 0


class _PendingLookup(Struct, frozen=True):
    task: asyncio.Task[LookupResult]
    at_s: float
    """When its request is sent."""


class Lookups:
    """Looks up conversations with *api*, limited by *rate_limit*; counts requests as `lookups`."""

    def __init__(
        self,
        api: Api,
        rate_limit: RateLimit,
        options: GenesysOptions,
        counts: Counter[str],
        dice: Dice,
    ) -> None:
        self._api = api
        self._rate_limit = rate_limit
        self._retry_turns = RateLimit(options.lookups)
        """Spreads the retries of delayed callers."""
        self._options = options
        self._counts = counts
        self._breaker = Breaker(_FAILURES, dice)
        self._problem: LookupFailed | ClientRefused = LookupFailed("")
        """The latest problem, for callers that are not sent to the API."""
        self._unavailable_until_s = 0.0
        self._known: OrderedDict[str, tuple[LookupResult, float]] = OrderedDict()
        self._pending: dict[str, _PendingLookup] = {}

    async def aclose(self) -> None:
        """Cancel pending lookups; may be called again."""
        asking = [each.task for each in self._pending.values()]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    def remembered(self, conversation: str) -> LookupResult | None:
        """Return the cached result for *conversation*; None if there is none."""
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
        Look up *conversation*, or wait for a pending lookup of it; at most *within_s*.

        A negative result of a request that was sent before *since_s* is not returned: the
        conversation is looked up once more.
        """
        now = asyncio.get_running_loop().time
        ends_s = now() + within_s
        while True:
            asking = self._pending.get(conversation) or self._start(conversation, ends_s - now())
            if not isinstance(asking, _PendingLookup):
                return asking
            # A caller that is cancelled here does not cancel the lookup of the others.
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
        return LookupFailed("the Genesys API did not answer in the time left")

    def _start(
        self, conversation: str, within_s: float
    ) -> _PendingLookup | ClientRefused | LookupFailed | LookupDelayed:
        """Start a lookup if its turn is early enough; otherwise return why not."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now < self._unavailable_until_s:
            return self._last_problem(now)
        wait_s = self._rate_limit.left_s(now)
        if wait_s > max(within_s - self._options.timeout.total_seconds(), 0):
            return self._delay(wait_s, now)
        if not self._breaker.admits(now):
            return self._last_problem(now)
        at_s = now + self._rate_limit.take(1, now)
        is_try = self._breaker.is_open
        task = loop.create_task(self._look_up(conversation, at_s - now, is_try=is_try))
        asking = self._pending[conversation] = _PendingLookup(task, at_s)

        def ended(_: object) -> None:
            # Not in the task: one that is cancelled early does not even start.
            del self._pending[conversation]
            self._breaker.abandoned()

        task.add_done_callback(ended)
        return asking

    def _delay(self, wait_s: float, now: float) -> LookupDelayed:
        """Return when to retry; retries are spread, so that they do not all come at once."""
        if self._retry_turns.left_s(now) < _MOST_WAIT_S:
            wait_s += self._retry_turns.take(1, now)
        else:
            wait_s += _MOST_WAIT_S
        return LookupDelayed(_TOO_MANY, int(wait_s * 1000) + 1)

    def _last_problem(self, now: float) -> LookupFailed | ClientRefused:
        """Return the problem of the last request."""
        if isinstance(self._problem, ClientRefused):
            return self._problem
        left_s = max(self._breaker.left_s(now), self._unavailable_until_s - now)
        return LookupFailed(self._problem.reason, int(left_s * 1000) + 1)

    async def _look_up(self, conversation: str, turn_s: float, *, is_try: bool) -> LookupResult:
        await asyncio.sleep(turn_s)
        now = asyncio.get_running_loop().time()
        if now < self._unavailable_until_s or (self._breaker.is_open and not is_try):
            return self._last_problem(now)  # an earlier request has just failed
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
            case LookupFailed():
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
