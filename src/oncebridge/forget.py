"""
Let an event pass again: remove what the store knows of it.

An event is forgotten as a whole. While a worker holds one of its keys nothing is removed, as
the worker would go on and commit what was just forgotten.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct

from oncebridge import record as table
from oncebridge.store import Fate, Store


class Forgotten(Struct, frozen=True):
    """What became of one key."""

    key: bytes
    was: table.State
    """`done` past its window counts as absent, and is removed all the same."""
    fate: Fate | None = None
    gone: bool = False
    """It was there, and is not any more."""
    left_ms: int = 0
    """How long a claim, or the pause after a failure, still lasts."""


async def forget(
    store: Store, keys: Sequence[bytes], *, before: Callable[[list[bytes]], None]
) -> list[Forgotten]:
    """
    Remove the records of *keys*, which belong together, and tell what each was.

    *before* is told the keys that are about to go. Where one is held, none goes.
    """
    keys = list(dict.fromkeys(keys))
    records = await store.peek(keys)
    now_ms = await store.now_ms()
    states = [table.state(record, now_ms) for record in records]
    there = [key for key, record in zip(keys, records, strict=True) if record is not None]
    gone: set[bytes] = set()
    if there and "claimed" not in states:
        before(there)
        answers = await store.forget(there)
        gone = {key for key, is_gone in zip(there, answers, strict=True) if is_gone}
    return [
        Forgotten(
            key,
            state,
            record.fate if record else None,
            key in gone,
            record.until_ms - now_ms if record and state == "claimed" else 0,
        )
        for key, record, state in zip(keys, records, states, strict=True)
    ]
