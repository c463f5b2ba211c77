"""
How a store is doing: asked now and then, and never in the way of events.

Every store is asked for its time. One that `TellsVitals` is asked for more; what it tells goes
over what was found out otherwise. All of it ends within two seconds, and whatever goes wrong on
the way means that the store does not answer.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, Protocol, runtime_checkable

from oncebridge.base.clock import Clock
from oncebridge.observe.report import StoreHealth
from oncebridge.stores.api import Store

_WITHIN_S: Final = 2.0
_TOLD: Final = ("records", "bytes", "evicted", "clock_offset_ms")


@runtime_checkable
class ReportsHealth(Protocol):
    """A store that knows how it is; no store has to."""

    async def health(self) -> Mapping[str, int | None]:
        """
        Tell `records`, `bytes`, `evicted` and `clock_offset_ms`, as `Vitals` means them.

        What is not known is None or left out. It is called every few seconds, so it is one
        cheap round trip. It raises only where the store does not answer; a right that is
        missing is no reason.
        """
        ...


async def read_store_health(kind: str, store: Store, clock: Clock) -> StoreHealth:
    """Ask *store* how it is; what it cannot tell is None. Never raises for a store's sake."""
    found = StoreHealth(kind, answers=False)
    # Of an outage others tell more; here it is enough that there is one.
    with suppress(Exception):
        async with asyncio.timeout(_WITHIN_S):
            found.clock_offset_ms = await _offset_ms(store, clock)
            if isinstance(store, ReportsHealth):
                _take(found, await store.health())
            found.answers = True
    return found


async def _offset_ms(store: Store, clock: Clock) -> int | None:
    """
    Measure the store's clock less this host's, right to within half the round trip.

    Clocks that may well agree do: else a slow answer would look like a clock that is off.
    """
    asked_ms = clock()
    told_ms = await store.now_ms()
    answered_ms = clock()
    if answered_ms < asked_ms:  # the host's clock was set back meanwhile
        return None
    low, high = told_ms - answered_ms, told_ms - asked_ms
    may_agree = low - 1 <= 0 <= high + 1  # all three are cut to the millisecond
    return 0 if may_agree else (low + high) // 2


def _take(found: StoreHealth, told: Mapping[str, int | None]) -> None:
    for name in _TOLD:
        if name in told:
            value = told[name]
            setattr(found, name, value if type(value) is int else None)
