"""
What is owed to the store while it does not answer.

A commit after the sink's yes, a memory after an unprotected delivery, the release of a
claim that was never answered: none of them may hold up the acknowledgement, and each is
tried until it lands or the process ends. Losing one costs at most one more delivery.
"""

import asyncio

from oncebridge.books import Books
from oncebridge.clock import Dice
from oncebridge.store import Claims, Commit, Memory, NoAnswer, Release, rounds

Debt = Commit | Memory | Release

_MOST = 100_000
_CHUNK = 500
_FIRST_S, _LONGEST_S = 0.25, 30.0


class Backlog:
    """Tries again, in the order of arrival, with growing pauses."""

    def __init__(self, store: Claims, books: Books, dice: Dice) -> None:
        self._store = store
        self._books = books
        self._dice = dice
        self._owed: list[Debt] = []
        self._working: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._owed)

    @property
    def deliveries(self) -> int:
        """How much of it is about what was delivered, and not only claimed."""
        return sum([type(debt) is not Release for debt in self._owed])

    def owe(self, debts: list[Debt]) -> None:
        """Take over *debts*."""
        self._owed += debts
        excess = len(self._owed) - _MOST
        if excess > 0:
            # The oldest go: theirs is the shortest rest of a window.
            del self._owed[:excess]
            self._books.forgotten += excess
        if self._owed and (self._working is None or self._working.done()):
            self._working = asyncio.get_running_loop().create_task(self._work())

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
            chunk = rounds(self._owed[:_CHUNK], lambda debt: debt.key)[0]
            try:
                left = await self._pay(chunk)
            except Exception:  # noqa: BLE001 - also a store with a fault: what is owed stays owed
                self._books.store_errors += 1
                left = chunk
            # What was added meanwhile stands behind; what was dropped meanwhile stood before.
            paid = {id(debt) for debt in chunk} - {id(debt) for debt in left}
            self._owed = [debt for debt in self._owed if id(debt) not in paid]
            if left:
                await asyncio.sleep(pause * (0.5 + self._dice.fraction()))
                pause = min(2 * pause, _LONGEST_S)
            else:
                pause = _FIRST_S

    async def _pay(self, debts: list[Debt]) -> list[Debt]:
        """Send what is owed; give back what got no answer."""
        left: list[Debt] = []
        releases = [debt for debt in debts if isinstance(debt, Release)]
        commits = [debt for debt in debts if isinstance(debt, Commit)]
        memories = [debt for debt in debts if isinstance(debt, Memory)]
        # Releases first: a memory of the same key is refused while its own claim stands.
        if releases:
            released = await self._store.release(releases)
            left += [d for d, a in zip(releases, released, strict=True) if isinstance(a, NoAnswer)]
        if commits:
            committed = await self._store.commit(commits)
            left += [d for d, a in zip(commits, committed, strict=True) if isinstance(a, NoAnswer)]
        if memories:
            kept = await self._store.remember(memories)
            left += [d for d, a in zip(memories, kept, strict=True) if isinstance(a, NoAnswer)]
        return left
