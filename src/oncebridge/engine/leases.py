"""
The leases of this process, and the heartbeat that extends them.

All leases are extended in one call, every third of a lease, each only while its own attempt may
still be running: an unconditional heartbeat would keep the claims of a worker that is stuck.
"""

import asyncio
import math
from collections.abc import Iterable

from msgspec import Struct

from oncebridge.engine.counters import Books
from oncebridge.errors import StoreError
from oncebridge.stores.api import Claim, Claims, Extension, Extensions, Reply, rounds


class Lease(Struct, eq=False):
    """The lease of one claim, measured by this process's monotonic clock."""

    claim: Claim
    ends: float
    """When the lease ends; counted from before the claim was sent, so never too late."""
    give_up: float
    """When the attempt must be over; the lease is not extended after that."""
    latest: float = math.inf
    """Until when the lease may be extended: the end of the caller's time, plus a margin."""
    lost: bool = False
    """Another worker has taken over."""
    ending: bool = False
    """It is being committed or released: a refused heartbeat does not mean that it is lost."""
    sending: "asyncio.Task[object] | None" = None
    """The send to cancel when the lease is lost."""

    @property
    def token(self) -> bytes:
        return self.claim.token

    @property
    def keys(self) -> list[bytes]:
        return [held.key for held in self.claim.held]


class Leases:
    """All leases of one gateway; the heartbeat runs while there are any."""

    def __init__(self, store: Claims, books: Books, *, lease_ms: int) -> None:
        self._store = store
        self._books = books
        self._lease_ms = lease_ms
        self._interval_s = lease_ms / 3000
        self._leases: dict[Lease, None] = {}  # in the order of the claims: a seed replays a run
        # A timer rather than a task: nothing is left over when the last lease ends, so a loop
        # that only runs during calls (BlockingGateway) can be left at any time.
        self._timer: asyncio.TimerHandle | None = None
        self._extending: asyncio.Task[None] | None = None

    def add(self, leases: Iterable[Lease]) -> None:
        self._leases.update(dict.fromkeys(leases))
        if self._leases and self._timer is None:
            self._schedule()

    def discard(self, leases: Iterable[Lease | None]) -> None:
        for lease in leases:
            if lease is not None:
                self._leases.pop(lease, None)
        if not self._leases and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._tick)

    def _tick(self) -> None:
        self._schedule()
        if self._extending is None or self._extending.done():
            self._extending = asyncio.get_running_loop().create_task(self._extend_all())

    async def extend(self, leases: Iterable[Lease]) -> None:
        """Extend *leases* now; those that another worker has taken over are marked lost."""
        pairs = [(lease, key) for lease in leases if not lease.lost for key in lease.keys]
        # A key may occur twice: its lease ended unnoticed, and it was claimed again.
        for asked in rounds(pairs, lambda pair: pair[1]):
            await self._extend(asked)

    async def _extend(self, asked: list[tuple[Lease, bytes]]) -> None:
        before = asyncio.get_running_loop().time()
        answers = await self._store.extend(
            Extensions.of(
                [
                    Extension(key, lease.token, self._next_lease_ms(lease, before))
                    for lease, key in asked
                ]
            )
        )
        unanswered = set()
        for (lease, _), answer in zip(asked, answers, strict=True):
            if answer is Reply.FENCED and not lease.ending:
                self.mark_lost(lease)
            elif answer is not Reply.EXTENDED:
                unanswered.add(lease)
        for lease, _ in asked:
            if lease not in unanswered and not lease.lost:
                lease.ends = before + self._next_lease_ms(lease, before) / 1000

    def _next_lease_ms(self, lease: Lease, now: float) -> int:
        if lease.latest == math.inf:
            return self._lease_ms
        return max(min(self._lease_ms, int((lease.latest - now) * 1000)), 1)

    def mark_lost(self, lease: Lease) -> None:
        """Mark *lease* as taken over by another worker, once, and cancel its send."""
        if lease.lost:
            return
        lease.lost = True
        self._books.lease_lost += 1
        if lease.sending is not None:
            lease.sending.cancel()

    async def _extend_all(self) -> None:
        now = asyncio.get_running_loop().time()
        try:
            await self.extend([lease for lease in self._leases if now < lease.give_up])
        except StoreError:
            # The lease still runs; it is checked again before the next send.
            self._books.store_errors += 1

    async def aclose(self) -> None:
        """Stop the heartbeat; leases end by themselves."""
        self.discard(list(self._leases))
        if self._extending is not None:
            self._extending.cancel()
            await asyncio.gather(self._extending, return_exceptions=True)
            self._extending = None
