"""
Notices that a store has lost its records.

One record of the store holds a random name, the store's epoch. A store that was wiped or
replaced by an empty one has no epoch or another one. A worker that knew the former epoch then
writes into the record when it noticed, so that all workers know: what was delivered before that
time is not remembered, and may be delivered once more.

A loss is not noticed if no worker was running, or if the epoch itself was restored: from a
backup, or by a failover to a replica that had it.
"""

from typing import Final

import msgspec
from msgspec import Struct

from oncebridge.base.clock import Clock, Dice
from oncebridge.events.key import make_key
from oncebridge.stores.api import Record, Store
from oncebridge.stores.cell import Cells, Edit

KEY: Final = make_key("", b"epoch", "", "", ())
"""Of the record."""
_KEEP_MS: Final = 365 * 24 * 3_600_000
_RENEW_MS: Final = 6 * 3_600_000
"""Written again after this time: S3 removes objects that have not been written for a day."""
_SAME_LOSS_MS: Final = 60_000
"""By how much the clocks of a worker and the store may differ for the same loss."""


class _Epoch(Struct, frozen=True, array_like=True):
    """What the record holds."""

    name: str
    lost_ms: int = 0
    """When a worker noticed that the records before were lost, by the store's clock; 0: never."""


_decode = msgspec.json.Decoder(_Epoch).decode
_encode = msgspec.json.Encoder().encode


def _read(memo: bytes) -> _Epoch | None:
    try:
        return _decode(memo) if memo else None
    except msgspec.MsgspecError:
        return None


class Epoch:
    """The epoch of *store*, as this worker knows it."""

    def __init__(self, store: Store, *, clock: Clock, dice: Dice) -> None:
        self._store = store
        self._clock = clock
        self._dice = dice
        self._cells = Cells(store, dice)
        self._known = ""
        self._seen_ms = 0
        """When the known epoch was last seen, by this host's clock."""
        self.lost_ms = 0
        """When the store was last seen to have lost its records, by its clock; 0: never."""

    async def look(self) -> None:
        """Compare the store's epoch with the known one; raises `StoreError` if it can't."""
        (record,) = await self._store.peek([KEY])
        found = None if record is None else _read(record.memo)
        if record is not None and record.memo and found is None:
            return  # another version's
        is_known = found is not None and found.name == (self._known or found.name)
        if record is None or not is_known or await self._is_old(record):
            found = _read(await self._cells.edit_one(KEY, Edit(self._renewed, _KEEP_MS)))
        if found is not None:
            self._known, self._seen_ms = found.name, self._clock()
            self.lost_ms = found.lost_ms

    async def _is_old(self, record: Record) -> bool:
        due_ms = record.keep_until_ms - _KEEP_MS + _RENEW_MS
        # This host's clock may be ahead of the store's.
        return self._clock() > due_ms and await self._store.now_ms() > due_ms

    def _renewed(self, memo: bytes, now_ms: int) -> bytes:
        """Return what to write: the epoch that is there, or a new one, and whether one was lost."""
        found = _read(memo)
        if memo and found is None:
            return memo  # another version's
        if found is None:
            (name,) = self._dice.tokens(1)
            return _encode(_Epoch(name.hex(), now_ms if self._known else 0))
        is_other = bool(self._known) and found.name != self._known
        if is_other and found.lost_ms < self._seen_ms - _SAME_LOSS_MS:
            return _encode(_Epoch(found.name, now_ms))
        return memo
