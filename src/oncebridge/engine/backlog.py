"""
Writes that wait for a store that does not answer.

A commit after the sink's yes, a record after an unprotected delivery, the release of a claim
that was never answered: none of them may delay the acknowledgement, and each is retried until
the store has it or the process ends. Losing one costs at most one more delivery.

Only the backlog knows which events are delivered but not recorded yet: a copy of one is a
duplicate, whatever the store says. A release proves nothing, and is never looked up.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.base.clock import Dice, wait_until_set
from oncebridge.engine.counters import Books
from oncebridge.engine.verdict import First
from oncebridge.stores.api import (
    Claims,
    Commit,
    Commits,
    Memories,
    Memory,
    NoAnswer,
    Release,
    Releases,
    rounds,
)

_C = TypeVar("_C", Commits, Releases, Memories)
_MOST = 100_000
_CHUNK = 500
_FIRST_S, _LONGEST_S = 0.25, 30.0


class DecidedEvent(Struct, frozen=True, gc=False):
    """An event whose fate is decided, and when that was."""

    hash: bytes
    first: First
    since: float
    """When the sink said yes, or the event was given up, by the running loop's time."""
    proves_duplicate: bool
    """
    A copy is a duplicate: the event was delivered, and the key is the one that identifies it. An
    event in the dead letters may be replayed, and must not be treated as a duplicate then.
    """


class PendingWrite(Struct, frozen=True, eq=False, gc=False):
    """One write that the store has not answered."""

    asked: Commit | Memory | Release
    decided: DecidedEvent | None = None
    """None for a release."""

    @property
    def key(self) -> bytes:
        return self.asked.key

    def due(self, now: float) -> Commit | Memory | Release | None:
        """
        Return the write to send now: the window counts from the delivery.

        None once the window is over: a commit that late could end the claim of the next event.
        """
        asked = self.asked
        if self.decided is None or isinstance(asked, Release):
            return asked
        gone_ms = int((now - self.decided.since) * 1000)
        window_ms = asked.window_ms - gone_ms
        if window_ms <= 0:
            return None
        if isinstance(asked, Memory):
            return replace(asked, window_ms=window_ms)
        return replace(
            asked, window_ms=window_ms, hard_ms=asked.hard_ms and asked.hard_ms - gone_ms
        )


class Backlog:
    """Retries writes, in the order of arrival, with growing pauses."""

    def __init__(self, store: Claims, books: Books, dice: Dice) -> None:
        self._store = store
        self._books = books
        self._dice = dice
        self.pending: dict[int, PendingWrite] = {}
        """By identity, in the order of arrival."""
        self._delivered: dict[bytes, PendingWrite] = {}
        """By the identifying key."""
        self._worker: asyncio.Task[None] | None = None
        self._flushing = asyncio.Lock()
        self._has_more = asyncio.Event()

    def __len__(self) -> int:
        return len(self.pending)

    @property
    def deliveries(self) -> int:
        """How many of the writes are about delivered events, not only claimed ones."""
        return sum([write.decided is not None for write in self.pending.values()])

    def delivered(self, key: bytes, now: float) -> DecidedEvent | None:
        """Return the event delivered under an identifying *key*, if it is not recorded yet."""
        write = self._delivered.get(key)
        return write.decided if write is not None and write.due(now) is not None else None

    def add(self, pending_writes: Iterable[PendingWrite]) -> None:
        """Add *pending_writes*, and retry them until the store has them."""
        for write in pending_writes:
            self.pending[id(write)] = write
            if write.decided is not None and write.decided.proves_duplicate:
                self._delivered[write.key] = write
        excess = len(self.pending) - _MOST
        if excess > 0:
            # The oldest are dropped: their windows end first.
            self._remove([*islice(self.pending.values(), excess)])
            self._books.forgotten += excess
        self._has_more.set()
        if self.pending and (self._worker is None or self._worker.done()):
            self._worker = asyncio.get_running_loop().create_task(self._work())

    async def flush(self) -> bool:
        """
        Send every pending write once, now; return False if the store does not answer.

        If that is under way already, return at once.
        """
        if self._flushing.locked():
            return True
        async with self._flushing:
            writes = list(self.pending.values())
            for at in range(0, len(writes), _CHUNK):
                for chunk in rounds(writes[at : at + _CHUNK], lambda write: write.key):
                    if not await self._write_chunk(chunk):
                        return False
        return True

    async def settle(self, within_s: float) -> None:
        """Wait up to *within_s* until everything is recorded."""
        if self._worker is not None and not self._worker.done():
            await asyncio.wait({self._worker}, timeout=within_s)

    async def aclose(self) -> None:
        """Stop retrying."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
            self._worker = None

    async def _work(self) -> None:
        pause = _FIRST_S
        while self.pending:
            self._has_more.clear()
            before = len(self.pending)
            await self.flush()
            if len(self.pending) < before:
                pause = _FIRST_S
            if self.pending:
                jitter = 0.5 + self._dice.fraction()
                if await wait_until_set(self._has_more, pause * jitter):
                    pause = _FIRST_S  # a write that keeps failing must not delay new ones
                    await asyncio.sleep(pause * jitter)
                pause = min(2 * pause, _LONGEST_S)

    async def _write_chunk(self, pending_writes: list[PendingWrite]) -> bool:
        """Send some writes; return False if the store does not answer at all."""
        now = asyncio.get_running_loop().time()
        due = [(write, write.due(now)) for write in pending_writes]
        self._remove([write for write, asked in due if asked is None])
        try:
            await self._ask(self._store.commit, Commits, due)
            # Before memories: a memory is refused while its key is claimed.
            await self._ask(self._store.release, Releases, due)
            await self._ask(self._store.remember, Memories, due)
        except Exception:  # noqa: BLE001 - also a bug in a store: the writes stay pending
            self._books.store_errors += 1
            return False
        return True

    async def _ask(
        self,
        operation: Callable[[_C], Awaitable[Sequence[object]]],
        columns: type[_C],
        due: Sequence[tuple[PendingWrite, object]],
    ) -> None:
        """Send those writes of *due* that *operation* takes, as *columns*."""
        its = [(write, asked) for write, asked in due if isinstance(asked, columns.row)]
        if its:
            answers = await operation(columns.of([asked for _, asked in its]))
            self._remove(
                write
                for (write, _), answer in zip(its, answers, strict=True)
                if not isinstance(answer, NoAnswer)
            )

    def _remove(self, pending_writes: Iterable[PendingWrite]) -> None:
        for write in pending_writes:
            self.pending.pop(id(write), None)
            if self._delivered.get(write.key) is write:
                del self._delivered[write.key]
