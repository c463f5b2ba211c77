"""
Releases the claims of a worker, so that the next copy of an event is accepted at once.

For a worker that died with a long lease. The claim is released with the token that was just
read: if the record changes in between (committed, or claimed by another), nothing happens. A
worker that still runs loses its claim, but not its deliveries: a commit is fenced by
generation, so they still count. But another worker may have begun the same event by then, and
it may be sent twice.

Claims of another event, with the same key and different content, are left alone.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from msgspec import Struct

from oncebridge.errors import StoreUnavailable
from oncebridge.operate.explain.expected_verdict import RecordStatus
from oncebridge.stores.api import NoAnswer, Release, Releases, Reply, Store


class Released(Struct, frozen=True):
    """The result for one key."""

    standing: RecordStatus
    """Its status before."""
    gone: bool = False
    """It was held, and was released."""

    @property
    def has_changed(self) -> bool:
        """Return whether it was held, and has changed in between."""
        return can_release(self.standing) and not self.gone


async def read_statuses(store: Store, own: Mapping[bytes, bytes]) -> list[RecordStatus]:
    """Return the status of the records of an event, by its contents."""
    keys = list(own)
    records = await store.peek(keys)
    now_ms = await store.now_ms()
    return [
        RecordStatus.of(key, record, now_ms, own) for key, record in zip(keys, records, strict=True)
    ]


def can_release(standing: RecordStatus) -> bool:
    """Return whether a worker holds it, and it belongs to the event."""
    return standing.is_held and not standing.is_others


async def release(
    store: Store,
    standings: Sequence[RecordStatus],
    *,
    entities: Collection[bytes] = (),
    before: Callable[[Mapping[bytes, bytes]], Awaitable[None]],
) -> list[Released]:
    """
    Release the claims among *standings*, unless they have changed.

    *entities* are the keys of entities, whose attempts do not count. *before* is called with
    the keys that are about to be released, and their contents.
    """
    held = [standing for standing in standings if can_release(standing)]
    gone: set[bytes] = set()
    if held:
        await before({s.key: s.record.hash for s in held if s.record is not None})
        asked = [
            _release_request(standing, is_entity_state=standing.key in entities)
            for standing in held
        ]
        for one, answer in zip(asked, await store.release(Releases.of(asked)), strict=True):
            if isinstance(answer, NoAnswer):
                raise StoreUnavailable(answer.reason)
            if answer is Reply.RELEASED:
                gone.add(one.key)
    return [Released(standing, standing.key in gone) for standing in standings]


def _release_request(standing: RecordStatus, *, is_entity_state: bool) -> Release:
    record = standing.record
    assert record is not None  # noqa: S101 - it is held
    # The memo stays: the next worker sees that an attempt has no known result.
    keep_ms = max(record.keep_until_ms - record.until_ms, 0)
    return Release(standing.key, record.token, 0, keep_ms, unsent=is_entity_state)
