"""
The leases of this process, and the heartbeat that extends them.

All leases are extended in one call, every third of a lease, each only while its own attempt may
still be running: an unconditional heartbeat would keep the claims of a worker that is stuck.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, MutableSequence, Sequence

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.engine.counters import Books
from oncebridge.errors import StoreError
from oncebridge.stores.api import Claims, Extensions, Reply, folded, rounds


class Lease(Struct, eq=False):
    """
    The lease on keys that were claimed in one call, measured by this process's monotonic clock.

    Events that share a lease are in the same state: one that leaves it gets a lease of its own
    (`Leases.split`).
    """

    keys: dict[bytes, int]
    """The keys that are held, each with the row of its event."""
    token: bytes
    generation: bytes
    """That of records that this claim started."""
    ends: float
    """When the lease ends; counted from before the claim was sent, so never too late."""
    give_up: float
    """When the attempt must be over; the lease is not extended after that."""
    latest: float = math.inf
    """Until when the lease may be extended: the end of the caller's time, plus a margin."""
    now_ms: int = 0
    """The store's clock at the claim."""
    heard_s: float = 0.0
    """When the claim was answered."""
    by_row: "MutableSequence[Lease | None]" = []
    """The lease of each row, for leases that may be split."""
    attempt: int = 1
    lost: "set[int] | frozenset[int]" = frozenset()
    """The rows of events that another worker has taken over."""
    ending: bool = False
    """It is being committed or released: a refused heartbeat does not mean that it is lost."""
    sending: "asyncio.Task[object] | None" = None
    """The send to cancel when the lease is lost."""


class LazyTimer:
    """
    Calls *due* with its event loop, at one time; another is set when that has come.

    It is not stopped when there is nothing to wait for any more: most leases and sends end soon,
    and a timer for each costs more than one that finds nothing to do. Nor is it a task: a loop that
    only runs during calls (`BlockingGateway`) can be left at any time, and be followed by another.
    """

    def __init__(self, due: Callable[[asyncio.AbstractEventLoop], None]) -> None:
        self._due = due
        self._handle: asyncio.TimerHandle | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.at_s = math.inf

    def start(self, loop: asyncio.AbstractEventLoop, at_s: float) -> None:
        """Wait until *at_s*, and for nothing else."""
        self.stop()
        self.loop, self.at_s = loop, at_s
        self._handle = loop.call_at(at_s, self._call, loop)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self.loop, self.at_s = None, None, math.inf

    def _call(self, loop: asyncio.AbstractEventLoop) -> None:
        self.stop()
        self._due(loop)


class Leases:
    """All leases of one gateway; the heartbeat runs while there are any."""

    def __init__(self, store: Claims, books: Books, *, lease_ms: int) -> None:
        self._store = store
        self._books = books
        self._lease_ms = lease_ms
        self._interval_s = lease_ms / 3000
        self._leases: dict[Lease, None] = {}  # in the order of the claims: a seed replays a run
        self._timer = LazyTimer(self._tick)
        self._extending: asyncio.Task[None] | None = None

    def add(self, lease: Lease, loop: asyncio.AbstractEventLoop) -> None:
        self._leases[lease] = None
        if self._timer.loop is not loop:
            self._timer.start(loop, loop.time() + self._interval_s)

    def discard(self, leases: Iterable[Lease | None]) -> None:
        for lease in leases:
            if lease is not None:
                self._leases.pop(lease, None)

    def discard_keys(self, lease: Lease, keys: Sequence[bytes]) -> None:
        """Stop extending *keys* of a lease; the others stay."""
        if len(keys) < len(lease.keys):
            for key in keys:
                lease.keys.pop(key, None)
        else:
            self.discard((lease,))

    def split(self, lease: Lease, keys: Sequence[bytes]) -> Lease:
        """Return a lease of their own for *keys* of *lease*, in the same state."""
        if len(keys) == len(lease.keys):
            return lease
        rows = {key: lease.keys.pop(key) for key in keys}
        part = replace(lease, keys=rows, lost=lease.lost.intersection(rows.values()))
        lease.lost = lease.lost.difference(part.lost)
        for row in rows.values():
            lease.by_row[row] = part
        if lease in self._leases:
            self._leases[part] = None
        return part

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._leases:
            self._timer.start(loop, loop.time() + self._interval_s)
            if self._extending is None or self._extending.done():
                self._extending = loop.create_task(self._extend_all())

    async def extend(self, leases: Iterable[Lease]) -> None:
        """Extend *leases* now; keys that another worker has taken over are marked lost."""
        pairs = [
            (lease, key)
            for lease in leases
            for key, row in lease.keys.items()
            if row not in lease.lost
        ]
        # A key may occur twice: its lease ended unnoticed, and it was claimed again.
        for asked in rounds(pairs, lambda pair: pair[1]):
            await self._extend(asked)

    async def _extend(self, asked: list[tuple[Lease, bytes]]) -> None:
        before = asyncio.get_running_loop().time()
        answers = await self._store.extend(
            Extensions(
                [key for _, key in asked],
                folded([lease.token for lease, _ in asked]),
                folded([self.lease_ms(lease.latest, before) for lease, _ in asked]),
            )
        )
        unanswered: dict[Lease, list[bytes]] = {}
        for (lease, key), answer in zip(asked, answers, strict=True):
            row = lease.keys.get(key)
            if row is None or lease not in self._leases:
                continue  # it was settled meanwhile
            if answer is Reply.FENCED and not lease.ending:
                self.mark_lost(lease, row)
            elif answer is not Reply.EXTENDED:
                unanswered.setdefault(lease, []).append(key)
        for lease in dict.fromkeys([lease for lease, _ in asked if lease in self._leases]):
            silent = unanswered.get(lease, ())
            if len(silent) < len(lease.keys):
                if silent:
                    self.split(lease, silent)
                if not lease.lost.issuperset(lease.keys.values()):
                    lease.ends = before + self.lease_ms(lease.latest, before) / 1000

    def lease_ms(self, latest: float, now: float) -> int:
        """Return how long a lease lasts from *now*, if it may last until *latest*."""
        if latest == math.inf:
            return self._lease_ms
        return max(min(self._lease_ms, int((latest - now) * 1000)), 1)

    def mark_lost(self, lease: Lease, row: int) -> None:
        """Mark an event of *lease* as taken over by another worker, once, and cancel its send."""
        if row in lease.lost:
            return
        lease.lost = lease.lost | {row}
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
        self._leases.clear()
        self._timer.stop()
        if self._extending is not None:
            self._extending.cancel()
            await asyncio.gather(self._extending, return_exceptions=True)
            self._extending = None
