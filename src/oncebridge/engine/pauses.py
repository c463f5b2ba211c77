"""
Pause and resume, for all workers at once.

A paused route has a record in the store. Every worker checks it once a second, so a pause works
from another process or machine, and survives a restart.
"""

from collections.abc import Sequence

from oncebridge.base.clock import Dice
from oncebridge.errors import StoreUnavailable
from oncebridge.events.key import make_key
from oncebridge.stores.api import Fate, Memories, NoAnswer, Store

_FOR_EVER_MS = 10 * 365 * 24 * 3600 * 1000


def _key(route: str) -> bytes:
    return make_key(route, b"paused", "", "", ())


async def pause(store: Store, routes: Sequence[str], dice: Dice) -> None:
    """Pause *routes* for all workers, until `resume`."""
    (generation,) = dice.tokens(1)
    keys = [_key(route) for route in routes]
    answers = await store.remember(Memories(keys, generation, Fate.DROPPED, _FOR_EVER_MS))
    for answer in answers:
        if isinstance(answer, NoAnswer):
            raise StoreUnavailable(answer.reason)


async def resume(store: Store, routes: Sequence[str]) -> list[bool]:
    """Resume *routes*; return for each whether it was paused."""
    return await store.forget([_key(route) for route in routes])


async def paused(store: Store, routes: Sequence[str]) -> list[bool]:
    """Return for each of *routes* whether it is paused."""
    records = await store.peek([_key(route) for route in routes])
    return [record is not None and record.fate is not None for record in records]
