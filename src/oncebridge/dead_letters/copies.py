"""
How often a dead letter arrived again.

Some records become dead letters without being sent: they are not events, or have no key.
Each is kept once; a copy of it is a duplicate. Dead letters in a file or a queue cannot be
changed, so the number of copies is kept in a record of the store.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec
from msgspec import Struct

from oncebridge.base.clock import Dice
from oncebridge.errors import StoreError
from oncebridge.events.key import make_key
from oncebridge.stores.api import Claims, Store
from oncebridge.stores.cell import Cells, Edit

_PATIENCE_S: Final = 0.5
"""Short: a batch of events waits for it."""


class Copies(Struct, frozen=True, array_like=True):
    """How many copies of a dead letter have arrived, and when the last one did."""

    count: int = 0
    last_ms: int = 0
    """By the store's clock."""

    @classmethod
    def read(cls, memo: bytes) -> "Copies":
        try:
            return _read(memo) if memo else cls()
        except msgspec.MsgspecError:
            return cls()


_read = msgspec.json.Decoder(Copies).decode
_write = msgspec.json.Encoder().encode


async def count_copies(
    store: Claims, dice: Dice, counts: Mapping[bytes, int], *, keep_ms: int
) -> None:
    """
    Add *counts* to the counts of dead letters, by key, in two round trips.

    The count is only information: if the store does not answer, or another worker holds the
    record for long, it stays as it is.
    """
    cells = Cells(store, dice, waits_for_store=False)
    with suppress(StoreError):
        await cells.edit(
            {
                _count_key(key): Edit(partial(_added, count), keep_ms)
                for key, count in counts.items()
            },
            patience_s=_PATIENCE_S,
        )


def _added(count: int, memo: bytes, now_ms: int) -> bytes:
    return _write(Copies(Copies.read(memo).count + count, now_ms))


async def copies_of(store: Store, keys: Sequence[bytes]) -> list[Copies]:
    """Return how often the dead letters with *keys* arrived again."""
    found = await store.peek([_count_key(key) for key in keys]) if keys else []
    return [Copies.read(record.memo) if record else Copies() for record in found]


def _count_key(key: bytes) -> bytes:
    return make_key("", b"copies", "", "", (key,))
