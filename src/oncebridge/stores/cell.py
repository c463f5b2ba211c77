"""
Compare-and-set on a small record that several workers share.

A cell is a record in the store that is never done: its memo is the value. To edit it, a
worker claims the record, which excludes other workers, computes the new value and releases
the record with it. Every store can do this, and the claim returns the store's time, so
that all workers compare times of one clock.

An edit is applied exactly once, with one exception: if the store does not answer for a
whole lease after the new value was sent, the edit may be applied twice. Where that matters,
make the change idempotent.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, repeat
from typing import Final

from oncebridge.base.clock import Dice
from oncebridge.errors import StoreError, StoreUnavailable
from oncebridge.events.key import Part
from oncebridge.stores.api import (
    Busy,
    Claim,
    Claims,
    NoAnswer,
    Release,
    Releases,
    Reply,
    Want,
    Wants,
)

Change = Callable[[bytes, int], bytes]
"""Return the new value for the present one (empty: none yet) and the store's time in ms."""

_PAUSES_S: Final = (0.02, 0.04, 0.08, 0.16, 0.3)
"""An edit takes two round trips, so another worker is done soon, unless it died."""


class CellBusy(StoreUnavailable):
    """Other workers kept editing the cell; the store itself answers."""


class Cell:
    """
    The value under *key* in *store*.

    The value is kept for *keep_ms* after the last edit. A worker that dies during an edit
    blocks the cell for *lease_ms*. `edit` waits *patience_s* for other workers and for a
    store that does not answer.
    """

    def __init__(
        self,
        store: Claims,
        key: bytes,
        dice: Dice,
        *,
        keep_ms: int,
        lease_ms: int = 5000,
        patience_s: float = 10.0,
    ) -> None:
        self._store = store
        self._key = key
        self._dice = dice
        self._keep_ms = keep_ms
        self._lease_ms = lease_ms
        self._patience_s = patience_s

    async def edit(self, change: Change) -> bytes:
        """
        Apply *change* and return the new value.

        *change* may be called more than once. Raise `StoreUnavailable` if the value could not
        be written in time (`CellBusy` if other workers were the reason); `StoreError` if the
        record under the key is not a cell.
        """
        now_s = asyncio.get_running_loop().time
        ends = now_s() + self._patience_s
        for pause_s in chain(_PAUSES_S, repeat(_PAUSES_S[-1])):
            try:
                return await self._edit_once(change)
            except StoreUnavailable:
                if now_s() + pause_s >= ends:
                    raise
            await self._pause(pause_s)
        raise AssertionError  # pragma: no cover - the pauses never end

    async def _edit_once(self, change: Change) -> bytes:
        now_s = asyncio.get_running_loop().time
        ends = now_s() + self._lease_ms / 1000
        # Fresh for each claim: a release that is still on its way must not end a later hold.
        token, generation = self._dice.tokens(2)
        claim = await self._claim(token, generation)
        before = claim.held[0].memo
        try:
            after = change(before, claim.now_ms)
        except BaseException:
            await self._undo(token)
            raise
        release = Release(self._key, token, 0, self._keep_ms, after, unsent=True)
        while True:
            try:
                (reply,) = await self._store.release(Releases.of([release]))
            except StoreUnavailable as error:
                reply = NoAnswer(str(error))
            is_held = now_s() < ends
            # No other worker can have ended a hold whose lease still runs: a release that is
            # refused then was applied before, and its answer was lost.
            if reply is Reply.RELEASED or (reply is Reply.FENCED and is_held):
                return after
            if not is_held:
                raise StoreUnavailable(
                    reply.reason if isinstance(reply, NoAnswer) else "the lease on the cell ended"
                )
            await self._pause(_PAUSES_S[0])

    async def _claim(self, token: bytes, generation: bytes) -> Claim:
        want = Want((Part(self._key),), token, generation, self._lease_ms, self._keep_ms)
        try:
            (answer,) = await self._store.claim(Wants.of([want]))
        except StoreUnavailable as error:
            answer = NoAnswer(str(error))
        match answer:
            case Claim():
                return answer
            case NoAnswer():
                await self._undo(token)
                raise StoreUnavailable(answer.reason)
            case Busy():
                raise CellBusy("another worker is editing the cell")
            case _:
                raise StoreError(
                    f"the record {self._key.hex()} is an event's and not a cell; "
                    "it cannot be edited"
                )

    async def _undo(self, token: bytes) -> None:
        """Release a claim that may have been granted; if this fails, its lease ends it."""
        with suppress(StoreError):
            release = Release(self._key, token, keep_ms=self._keep_ms, unsent=True)
            await self._store.release(Releases.of([release]))

    async def _pause(self, about_s: float) -> None:
        await asyncio.sleep(about_s * (0.5 + self._dice.fraction()))
