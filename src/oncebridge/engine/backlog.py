"""
What is owed to the store while it does not answer.

A commit after the sink's yes, a memory after an unprotected delivery, the release of a
claim that was never answered: none of them may delay the acknowledgement, and each is
tried until it lands or the process ends. Losing one costs at most one more delivery.

What was delivered and is not recorded yet is known here, and only here: a copy of it is a
duplicate, whatever the store says. A release proves nothing, and is never looked up.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.base.clock import Dice, wait_until_set
from oncebridge.engine.counters import Books
from oncebridge.engine.verdict import First
from oncebridge.stores.api import Claims, Commit, Memory, NoAnswer, Release, rounds

_MOST = 100_000
_CHUNK = 500
_FIRST_S, _LONGEST_S = 0.25, 30.0


class Decided(Struct, frozen=True, gc=False):
    """What was decided about an event, and when."""

    hash: bytes
    first: First
    since: float
    """When the sink said yes, or the event was given up, by the running loop's time."""
    proves: bool
    """
    A copy is a duplicate: the event was delivered, and the key is the one that identifies it. An
    event in the dead letters may be replayed, and must not be taken for a duplicate then.
    """


class Debt(Struct, frozen=True, eq=False, gc=False):
    """One operation that the store has not answered."""

    asked: Commit | Memory | Release
    decided: Decided | None = None
    """None for a release."""

    @property
    def key(self) -> bytes:
        return self.asked.key

    def due(self, now: float) -> Commit | Memory | Release | None:
        """
        Return what to ask for now: the window counts from the delivery.

        None once it is over: a commit that late could end the claim of the next event.
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
    """Tries again, in the order of arrival, with growing pauses."""

    def __init__(self, store: Claims, books: Books, dice: Dice) -> None:
        self._store = store
        self._books = books
        self._dice = dice
        self._owed: dict[int, Debt] = {}
        """By identity, in the order of arrival."""
        self._delivered: dict[bytes, Debt] = {}
        """By the identifying key."""
        self._working: asyncio.Task[None] | None = None
        self._paying = asyncio.Lock()
        self._has_more = asyncio.Event()

    def __len__(self) -> int:
        return len(self._owed)

    @property
    def deliveries(self) -> int:
        """How much of it is about what was delivered, and not only claimed."""
        return sum([debt.decided is not None for debt in self._owed.values()])

    def delivered(self, key: bytes, now: float) -> Decided | None:
        """Return what was delivered under an identifying *key*, if its record is owed."""
        debt = self._delivered.get(key)
        return debt.decided if debt is not None and debt.due(now) is not None else None

    def owe(self, debts: Iterable[Debt]) -> None:
        """Take over *debts*."""
        for debt in debts:
            self._owed[id(debt)] = debt
            if debt.decided is not None and debt.decided.proves:
                self._delivered[debt.key] = debt
        excess = len(self._owed) - _MOST
        if excess > 0:
            # The oldest go: theirs is the shortest rest of a window.
            self._remove([*islice(self._owed.values(), excess)])
            self._books.forgotten += excess
        self._has_more.set()
        if self._owed and (self._working is None or self._working.done()):
            self._working = asyncio.get_running_loop().create_task(self._work())

    async def pay(self) -> bool:
        """
        Try everything once, now, and return False if the store does not answer.

        While it is being paid already, nothing is waited for.
        """
        if self._paying.locked():
            return True
        async with self._paying:
            owed = list(self._owed.values())
            for at in range(0, len(owed), _CHUNK):
                for chunk in rounds(owed[at : at + _CHUNK], lambda debt: debt.key):
                    if not await self._pay(chunk):
                        return False
        return True

    async def settle(self, within_s: float) -> None:
        """Wait up to *within_s* for everything to land."""
        if self._working is not None and not self._working.done():
            await asyncio.wait({self._working}, timeout=within_s)

    async def aclose(self) -> None:
        """Stop trying."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
            self._working = None

    async def _work(self) -> None:
        pause = _FIRST_S
        while self._owed:
            self._has_more.clear()
            before = len(self._owed)
            await self.pay()
            if len(self._owed) < before:
                pause = _FIRST_S
            if self._owed:
                jitter = 0.5 + self._dice.fraction()
                if await wait_until_set(self._has_more, pause * jitter):
                    pause = _FIRST_S  # one that cannot be paid must not delay new ones
                    await asyncio.sleep(pause * jitter)
                pause = min(2 * pause, _LONGEST_S)

    async def _pay(self, debts: list[Debt]) -> bool:
        """Send what is owed, and return False if the store does not answer at all."""
        now = asyncio.get_running_loop().time()
        due = [(debt, debt.due(now)) for debt in debts]
        self._remove([debt for debt, asked in due if asked is None])
        try:
            await self._ask(self._store.commit, [p for p in due if isinstance(p[1], Commit)])
            # Before memories: one is refused while the claim of its own key stands.
            await self._ask(self._store.release, [p for p in due if isinstance(p[1], Release)])
            await self._ask(self._store.remember, [p for p in due if isinstance(p[1], Memory)])
        except Exception:  # noqa: BLE001 - also a store with a fault: what is owed stays owed
            self._books.store_errors += 1
            return False
        return True

    async def _ask(
        self,
        operation: Callable[[Any], Awaitable[Sequence[object]]],
        due: Sequence[tuple[Debt, object]],
    ) -> None:
        if due:
            answers = await operation([asked for _, asked in due])
            self._remove(
                debt
                for (debt, _), answer in zip(due, answers, strict=True)
                if not isinstance(answer, NoAnswer)
            )

    def _remove(self, debts: Iterable[Debt]) -> None:
        for debt in debts:
            self._owed.pop(id(debt), None)
            if self._delivered.get(debt.key) is debt:
                del self._delivered[debt.key]
