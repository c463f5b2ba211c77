"""
Removes the records of an event, so that its next copy is delivered.

An event is forgotten as a whole. While a worker holds one of its keys, nothing is removed, as
the worker would then commit what was just forgotten. Records of another event under the same
key, with different content, are kept, and so is the operator log.
"""

from collections.abc import Awaitable, Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.operate.explain.expected_verdict import belongs_to_event
from oncebridge.operate.operator_log import is_operator_log
from oncebridge.stores import transitions
from oncebridge.stores.api import Fate, Record, Store


class Forgotten(Struct, frozen=True):
    """The result for one key."""

    key: bytes
    was: transitions.State
    """`done` past its window counts as absent, and is removed all the same."""
    fate: Fate | None = None
    gone: bool = False
    """It existed, and was removed."""
    left_ms: int = 0
    """How long a claim, or the pause after a failure, still lasts."""
    is_held: bool = False
    """A worker holds it; else it only waits for its next attempt."""
    is_others: bool = False
    """It belongs to another event, with the same key and different content; it is kept."""
    is_operator_log: bool = False
    """It is an operator log, not an event; it is kept."""

    @property
    def is_left(self) -> bool:
        """Return whether it does not belong to the event, and is kept."""
        return self.is_others or self.is_operator_log


async def forget(
    store: Store,
    own: Mapping[bytes, bytes],
    *,
    before: Callable[[Mapping[bytes, bytes]], Awaitable[None]],
) -> list[Forgotten]:
    """
    Remove the records of one event, and return what each was.

    *own* are the contents of the event (`expected_verdict.contents`). *before* is called with the
    keys that are about to be removed, and their contents. If one is held, none is removed.
    """
    keys = list(own)
    records = await store.peek(keys)
    now_ms = await store.now_ms()
    looked = [
        _result_for(key, record, own, now_ms) for key, record in zip(keys, records, strict=True)
    ]
    there = {
        record.key: record.hash
        for one, record in zip(looked, records, strict=True)
        if record is not None and not one.is_left
    }
    gone: set[bytes] = set()
    if there and not any(one.was == "claimed" and not one.is_left for one in looked):
        await before(there)
        answers = await store.forget(list(there))
        gone = {key for key, is_gone in zip(there, answers, strict=True) if is_gone}
    return [replace(one, gone=True) if one.key in gone else one for one in looked]


def _result_for(
    key: bytes, record: Record | None, own: Mapping[bytes, bytes], now_ms: int
) -> Forgotten:
    state = transitions.state(record, now_ms)
    if record is None:
        return Forgotten(key, state)
    is_claimed = state == "claimed"
    return Forgotten(
        key,
        state,
        record.fate,
        left_ms=record.until_ms - now_ms if is_claimed else 0,
        is_held=is_claimed and bool(record.token),
        is_others=not belongs_to_event(record, own),
        is_operator_log=is_operator_log(record),
    )
