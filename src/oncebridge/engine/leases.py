"""
What this process holds, and the heartbeat that keeps it.

A hold is prolonged in one batch with all others, every third of a lease, and only while
its own attempt may still be under way: a heartbeat that ran by itself would keep the
claim of a worker that is stuck.
"""

import asyncio
import math
from collections.abc import Iterable

from msgspec import Struct

from oncebridge.engine.counters import Books
from oncebridge.errors import StoreError
from oncebridge.stores.api import Claim, Claims, Extension, Reply, rounds


class Hold(Struct, eq=False):
    """One claim, measured by this process's own monotonic clock."""

    claim: Claim
    ends: float
    """When the lease ends; counted from before the claim was sent, so never too late."""
    give_up: float
    """When the attempt must be over; the hold is not prolonged beyond."""
    latest: float = math.inf
    """How far the lease may be prolonged: the caller's time and a little."""
    lost: bool = False
    """Somebody else has taken over."""
    ending: bool = False
    """It is being committed or released; that a heartbeat comes too late says nothing."""
    sending: "asyncio.Task[object] | None" = None
    """The send to break off when the hold is lost."""

    @property
    def token(self) -> bytes:
        return self.claim.token

    @property
    def keys(self) -> list[bytes]:
        return [held.key for held in self.claim.held]


class Holds:
    """All holds of one gateway; the heart beats while there are any."""

    def __init__(self, store: Claims, books: Books, *, lease_ms: int) -> None:
        self._store = store
        self._books = books
        self._lease_ms = lease_ms
        self._beat_s = lease_ms / 3000
        self._holds: dict[Hold, None] = {}  # in the order of the claims: a seed replays a run
        # A timer rather than a task: nothing is left over when the last hold goes, so a loop
        # that only runs during calls (BlockingGateway) can be left at any time.
        self._timer: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None

    def add(self, holds: Iterable[Hold]) -> None:
        self._holds.update(dict.fromkeys(holds))
        if self._holds and self._timer is None:
            self._wind()

    def discard(self, holds: Iterable[Hold | None]) -> None:
        for hold in holds:
            if hold is not None:
                self._holds.pop(hold, None)
        if not self._holds and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wind(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._beat_s, self._tick)

    def _tick(self) -> None:
        self._wind()
        if self._beating is None or self._beating.done():
            self._beating = asyncio.get_running_loop().create_task(self._beat())

    async def extend(self, holds: Iterable[Hold]) -> None:
        """Prolong *holds* now; those that another has taken are marked lost."""
        pairs = [(hold, key) for hold in holds if not hold.lost for key in hold.keys]
        # A key may stand here twice: held, lapsed unnoticed, and claimed again.
        for asked in rounds(pairs, lambda pair: pair[1]):
            await self._extend(asked)

    async def _extend(self, asked: list[tuple[Hold, bytes]]) -> None:
        before = asyncio.get_running_loop().time()
        answers = await self._store.extend(
            [Extension(key, hold.token, self._lease(hold, before)) for hold, key in asked]
        )
        unanswered = set()
        for (hold, _), answer in zip(asked, answers, strict=True):
            if answer is Reply.FENCED and not hold.ending:
                self.lose(hold)
            elif answer is not Reply.EXTENDED:
                unanswered.add(hold)
        for hold, _ in asked:
            if hold not in unanswered and not hold.lost:
                hold.ends = before + self._lease(hold, before) / 1000

    def _lease(self, hold: Hold, now: float) -> int:
        if hold.latest == math.inf:
            return self._lease_ms
        return max(min(self._lease_ms, int((hold.latest - now) * 1000)), 1)

    def lose(self, hold: Hold) -> None:
        """Count *hold* as taken over by another worker, once, and break off its send."""
        if hold.lost:
            return
        hold.lost = True
        self._books.lease_lost += 1
        if hold.sending is not None:
            hold.sending.cancel()

    async def _beat(self) -> None:
        now = asyncio.get_running_loop().time()
        try:
            await self.extend([hold for hold in self._holds if now < hold.give_up])
        except StoreError:
            # The lease goes on by itself; before the next send it is looked at again.
            self._books.store_errors += 1

    async def aclose(self) -> None:
        """Stop the heart; leases run out by themselves."""
        self.discard(list(self._holds))
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
            self._beating = None
