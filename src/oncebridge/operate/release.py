"""
Let go of what a worker holds, so that the next copy of an event is taken at once.

For a worker that died with a long lease. The claim is given back in the worker's name, with
the token that was just seen there: if the record changes in between (it is done, the lease
was taken over), nothing happens. A worker that is alive after all loses its hold and not what
it has done: a commit goes by generation, so what it delivered still counts. But another may
have begun the same event by then, and it may be sent twice.

What a worker holds of another event, that has the same key with other content, is let be.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from msgspec import Struct

from oncebridge.errors import StoreUnavailable
from oncebridge.operate.explain.expected_verdict import RecordStatus
from oncebridge.stores.api import NoAnswer, Release, Reply, Store


class Released(Struct, frozen=True):
    """What became of one key."""

    standing: RecordStatus
    """How it stood when it was looked at."""
    gone: bool = False
    """It was held, and is not any more."""

    @property
    def has_changed(self) -> bool:
        """Return whether it was held, and something else happened to it in between."""
        return can_release(self.standing) and not self.gone


async def read_statuses(store: Store, own: Mapping[bytes, bytes]) -> list[RecordStatus]:
    """Return how the records of an event stand, by its keys and what it has there."""
    keys = list(own)
    records = await store.peek(keys)
    now_ms = await store.now_ms()
    return [
        RecordStatus.of(key, record, now_ms, own) for key, record in zip(keys, records, strict=True)
    ]


def can_release(standing: RecordStatus) -> bool:
    """Return whether a worker holds it, and it is what was asked for."""
    return standing.is_held and not standing.is_others


async def release(
    store: Store,
    standings: Sequence[RecordStatus],
    *,
    registers: Collection[bytes] = (),
    before: Callable[[Mapping[bytes, bytes]], Awaitable[None]],
) -> list[Released]:
    """
    Give back what is held among *standings*, if it still is as it was seen.

    *registers* are entities', whose attempts do not count. *before* is told the keys that are
    about to be let go of, with what stands there.
    """
    held = [standing for standing in standings if can_release(standing)]
    gone: set[bytes] = set()
    if held:
        await before({s.key: s.record.hash for s in held if s.record is not None})
        asked = [
            _release_request(standing, is_register=standing.key in registers) for standing in held
        ]
        for one, answer in zip(asked, await store.release(asked), strict=True):
            if isinstance(answer, NoAnswer):
                raise StoreUnavailable(answer.reason)
            if answer is Reply.RELEASED:
                gone.add(one.key)
    return [Released(standing, standing.key in gone) for standing in standings]


def _release_request(standing: RecordStatus, *, is_register: bool) -> Release:
    record = standing.record
    assert record is not None  # noqa: S101 - it is held
    # The memo stays: whoever takes the event next sees that an attempt has left no word.
    keep_ms = max(record.keep_until_ms - record.until_ms, 0)
    return Release(standing.key, record.token, 0, keep_ms, unsent=is_register)
