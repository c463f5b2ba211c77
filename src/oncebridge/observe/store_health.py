"""
Checks the health of a store, in the background.

Every store is asked for its time. A store that implements `ReportsHealth` is asked for more, which
takes precedence. The check ends within two seconds; any error means that the store does not
answer.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, Protocol, runtime_checkable

from oncebridge.base.clock import Clock
from oncebridge.observe.report import StoreHealth
from oncebridge.stores.api import Store

_WITHIN_S: Final = 2.0
_FIELDS: Final = ("records", "bytes", "evicted", "clock_offset_ms")


@runtime_checkable
class ReportsHealth(Protocol):
    """A store that reports its health; optional."""

    async def health(self) -> Mapping[str, int | None]:
        """
        Return `records`, `bytes`, `evicted` and `clock_offset_ms`, as in `StoreHealth`.

        Unknown values are None or left out. It is called every few seconds, so it must be one cheap
        round trip. It raises only if the store does not answer; a missing permission is not an
        error.
        """
        ...


async def read_store_health(kind: str, store: Store, clock: Clock) -> StoreHealth:
    """Return the health of *store*; unknown values are None. Never raise."""
    found = StoreHealth(kind, answers=False)
    # The error itself is logged elsewhere.
    with suppress(Exception):
        async with asyncio.timeout(_WITHIN_S):
            found.clock_offset_ms = await _offset_ms(store, clock)
            if isinstance(store, ReportsHealth):
                _update(found, await store.health())
            found.answers = True
    return found


async def _offset_ms(store: Store, clock: Clock) -> int | None:
    """
    Return the store's clock minus this host's, accurate to half the round trip.

    Return 0 if the clocks may agree; otherwise a slow response would look like an offset.
    """
    asked_ms = clock()
    told_ms = await store.now_ms()
    answered_ms = clock()
    if answered_ms < asked_ms:  # the host's clock was set back meanwhile
        return None
    low, high = told_ms - answered_ms, told_ms - asked_ms
    may_agree = low - 1 <= 0 <= high + 1  # all three are truncated to milliseconds
    return 0 if may_agree else (low + high) // 2


def _update(found: StoreHealth, reported: Mapping[str, int | None]) -> None:
    for name in _FIELDS:
        if name in reported:
            value = reported[name]
            setattr(found, name, value if type(value) is int else None)
