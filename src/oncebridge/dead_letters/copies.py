"""
How often a dead letter arrived again.

Some records become dead letters without being sent: they are not events, or have no key.
Each is kept once; a copy of it is a duplicate. Dead letters in a file or a queue cannot be
changed, so the number of copies is kept in a record of the store.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from oncebridge.base.clock import Dice
from oncebridge.errors import StoreError
from oncebridge.events.key import Part, make_key
from oncebridge.stores.api import Busy, Claim, Claims, Release, Releases, Store, Want, Wants

_LEASE_MS: Final = 5000
_PAUSES_S: Final = (0.02, 0.1, 0.3)


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
    left = dict(counts)
    for pause_s in (0.0, *_PAUSES_S):
        if pause_s:
            await asyncio.sleep(pause_s * (0.5 + dice.fraction()))
        tokens = iter(dice.tokens(2 * len(left)))
        wants = [
            Want((Part(_count_key(key)),), next(tokens), next(tokens), _LEASE_MS, keep_ms)
            for key in left
        ]
        try:
            answers = await store.claim(Wants.of(wants))
            await store.release(
                Releases.of(
                    [
                        Release(
                            claim.held[0].key,
                            claim.token,
                            keep_ms=keep_ms,
                            memo=_write(
                                Copies(
                                    Copies.read(claim.held[0].memo).count + left[key], claim.now_ms
                                )
                            ),
                            unsent=True,
                        )
                        for key, claim in zip(left, answers, strict=True)
                        if isinstance(claim, Claim)
                    ]
                )
            )
        except StoreError:
            return
        left = {
            key: left[key]
            for key, answer in zip(left, answers, strict=True)
            if isinstance(answer, Busy)
        }
        if not left:
            return


async def copies_of(store: Store, keys: Sequence[bytes]) -> list[Copies]:
    """Return how often the dead letters with *keys* arrived again."""
    found = await store.peek([_count_key(key) for key in keys]) if keys else []
    return [Copies.read(record.memo) if record else Copies() for record in found]


def _count_key(key: bytes) -> bytes:
    return make_key("", b"copies", "", "", (key,))
