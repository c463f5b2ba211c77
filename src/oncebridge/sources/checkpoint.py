"""
Checkpoints: the position of a source, recorded in the store.

A checkpoint is a cell that is held for as long as its source is read, so that one worker at a time
continues from it; its value is the position. It is in the same store as the keys: if that is lost,
the source starts again, which is what the lost keys need, too.
"""

import asyncio
from collections.abc import Callable

from oncebridge.base.clock import Dice, wait_until_set
from oncebridge.errors import OncebridgeError, StoreError, StoreUnavailable
from oncebridge.events.key import make_key
from oncebridge.stores.api import Extensions, NoAnswer, Reply, Store
from oncebridge.stores.cell import CellBusy, Cells, Hold, value_or_raise

_NAMESPACE = "checkpoint"


class CheckpointTaken(OncebridgeError):
    """Another worker holds this checkpoint, for *left_s* at least."""

    def __init__(self, name: str, left_s: float) -> None:
        super().__init__(
            f"{name}: another process is reading it; its claim ends in {left_s:.0f} s at the earliest"
        )
        self.left_s = left_s


class Checkpoint:
    """
    The position in *name*, of a kind of source, claimed for *lease_ms* at a time.

    *mark* distinguishes sources that have the same name but are not the same any more.
    """

    def __init__(
        self,
        store: Store,
        kind: str,
        name: str,
        mark: str = "",
        *,
        dice: Dice,
        lease_ms: int,
        keep_ms: int,
    ) -> None:
        self._store = store
        self._name = name
        self.key = make_key(_NAMESPACE, b"source", kind, f"{name}\0{mark}", ())
        self._cells = Cells(store, dice, lease_ms=lease_ms, waits_for_store=False)
        self._lease_ms = lease_ms
        self._keeps = {self.key: keep_ms}
        self._hold: Hold
        self.held_until_s = 0.0
        """When the lease ends, by the running loop's clock."""

    async def take(self) -> bytes:
        """Claim it and return the position; empty if there is none yet. Raise `CheckpointTaken`."""
        hold = await self._cells.claim(self._keeps)
        try:
            place = value_or_raise(hold.answers[self.key])
        except CellBusy as busy:
            raise CheckpointTaken(self._name, busy.left_ms / 1000) from None
        self._hold, self.held_until_s = hold, hold.ends_s
        return place

    async def extend(self) -> None:
        """Extend the claim; raise `CheckpointTaken` if another worker has taken over."""
        ends_s = asyncio.get_running_loop().time() + self._lease_ms / 1000
        request = Extensions([self.key], self._hold.tokens[self.key], self._lease_ms)
        (answer,) = await self._store.extend(request)
        if isinstance(answer, NoAnswer):
            raise StoreUnavailable(answer.reason)
        if answer is Reply.EXTENDED:
            self.held_until_s = ends_s
        else:  # perhaps only an answer was lost, and no worker holds it
            await self.take()

    async def save(self, place: bytes) -> None:
        """Record the position and keep the claim; raise `CheckpointTaken` if another worker has it."""
        await self.release(place)
        await self.take()

    async def keep(
        self, place: Callable[[], bytes], over: asyncio.Event, *, every_s: float
    ) -> None:
        """
        Save the position whenever it has changed, and extend the claim, until *over*.

        Raise `CheckpointTaken` if another worker has taken over.
        """
        now_s, saved = asyncio.get_running_loop().time, place()
        while not await wait_until_set(over, every_s):
            try:
                if (current := place()) != saved:
                    await self.save(current)
                    saved = current
                elif self.held_until_s - now_s() <= self._lease_ms / 1500:
                    await self.extend()
            except StoreError:
                pass  # the lease lasts a while, and events that are read twice are duplicates

    async def release(self, place: bytes) -> None:
        """Record the position and release the claim, so that other workers can continue."""
        if not await self._release(place):
            await self.take()
            await self._release(place)

    async def clear(self) -> None:
        """Delete the position: the next reader starts at the beginning."""
        await self.release(b"")
        await self._store.forget([self.key])

    async def _release(self, place: bytes) -> bool:
        """Return True if the claim was still ours."""
        answer = (await self._cells.release(self._hold, {self.key: place}))[self.key]
        if isinstance(answer, NoAnswer):
            raise StoreUnavailable(answer.reason)
        return answer is Reply.RELEASED
