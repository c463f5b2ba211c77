"""
Copy the records of one store to another.

The times of a record are by the clock of its store. They are shifted by the difference of the two
clocks, so that a window has as much time left in the target as in the source.

Copied are records that are done, and records that are not: the attempts at an event that failed,
and the last delivered state of an entity. Not copied are expired records, and records that a
worker holds: the worker may finish at any moment, and the result would be in the source only. So
stop the workers first. Held records are counted, and the copy can be run again.

A second run finds most records in the target already. If a record has changed in the source since
(another attempt, a newer state, done), it replaces its earlier copy, unless a worker of the target
holds that. It is removed and written again; a claim in between finds no record. A record that is
done in the target is never removed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal, TypeGuard, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.errors import StoreUnavailable
from oncebridge.stores import transitions
from oncebridge.stores.api import NoAnswer, Portable, Record, Reply, Store

BATCH = 1000
_NAMED = 20
_SLACK_MS = 1000
"""By how much two measurements of the clocks' difference may differ."""
_PAUSES_S = (0.1, 0.3, 1.0, 3.0, 5.0, 10.0, 10.0)
"""Between retries: throttling ends after a moment, a restart takes half a minute."""

_T = TypeVar("_T")


def is_portable(store: Store) -> TypeGuard[Portable]:
    """Return True if records can be copied from and to *store*."""
    return callable(getattr(store, "scan", None)) and callable(getattr(store, "load", None))


class HeldKey(Struct, frozen=True):
    """A key that was not copied, because a worker holds it."""

    key: bytes
    left_ms: int
    """How long its lease lasts, unless it is extended."""


class Copying(Struct, eq=False):
    """
    Copy records from *source* to *target*, both open, batch by batch.

    Without a *target*, count as if it were empty. With *dry_run*, change nothing and count what
    would be done. A record that the scan returns twice counts as `known` the second time.
    """

    source: Portable
    target: Portable | None
    dry_run: bool = False
    copied: int = 0
    updated: int = 0
    """Replaced an earlier copy."""
    known: int = 0
    expired: int = 0
    live: int = 0
    """Not copied, because a worker holds them."""
    held: list[HeldKey] = []
    """The first few of those."""
    held_ms: int = 0
    """How long the longest of their leases lasts."""
    place: bytes = b""
    """Where the next batch begins."""
    is_complete: bool = False

    @property
    def seen(self) -> int:
        """How many records were read."""
        return self.copied + self.updated + self.known + self.expired + self.live

    def counts(self) -> dict[str, int]:
        """Return the counts by name."""
        names = ("copied", "updated", "known", "expired", "live")
        return {name: getattr(self, name) for name in names}

    async def step(self) -> bool:
        """Copy the next batch; return True if there is more."""
        records, after = await _with_retries(lambda: self.source.scan(self.place, BATCH))
        # A scan may return a record twice, even in one step.
        await self._copy({record.key: record for record in records}.values())
        self.place = after
        self.is_complete = not after
        return not self.is_complete

    async def _copy(self, records: Iterable[Record]) -> None:
        here_ms, there_ms = await asyncio.gather(
            _with_retries(self.source.now_ms), _with_retries((self.target or self.source).now_ms)
        )
        going: list[Record] = []
        for record in records:
            match condition(record, here_ms):
                case "expired":
                    self.expired += 1
                case "live":
                    self._leave(record.key, record.until_ms - here_ms)
                case "lasting":
                    going.append(shifted(record, there_ms - here_ms))
        if going and self.target is None:
            self.copied += len(going)
        elif going and self.target is not None:
            await self._put(self.target, going, there_ms)

    async def _put(self, target: Portable, records: Sequence[Record], now_ms: int) -> None:
        if self.dry_run:
            found = await _with_retries(lambda: target.peek([one.key for one in records]))
            answers: list[Reply] = [
                transitions.load(there, one, now_ms)[0]
                for there, one in zip(found, records, strict=True)
            ]
        else:
            answers = await _load(target, records)
        known = [one for one, answer in zip(records, answers, strict=True) if answer is Reply.KNOWN]
        self.copied += len(records) - len(known)
        if known:
            await self._update(target, known, now_ms)

    async def _update(self, target: Portable, records: Sequence[Record], now_ms: int) -> None:
        """Replace records of the target that are earlier copies."""
        found = await _with_retries(lambda: target.peek([one.key for one in records]))
        former: list[Record] = []
        for ours, theirs in zip(records, found, strict=True):
            if theirs is None or not is_former(theirs, ours, now_ms):
                self.known += 1
            elif transitions.state(theirs, now_ms) == "claimed":
                self._leave(ours.key, theirs.until_ms - now_ms)
            else:
                former.append(ours)
        updated = len(former)
        if former and not self.dry_run:
            await _with_retries(lambda: target.forget([one.key for one in former]))
            updated = (await _load(target, former)).count(Reply.REMEMBERED)
        self.updated += updated
        self.known += len(former) - updated

    def _leave(self, key: bytes, left_ms: int) -> None:
        self.live += 1
        self.held_ms = max(self.held_ms, left_ms)
        if len(self.held) < _NAMED and all(one.key != key for one in self.held):
            self.held.append(HeldKey(key, left_ms))


# --- one record ---------------------------------------------------------------------------


def condition(record: Record, now_ms: int) -> Literal["lasting", "expired", "live"]:
    """Return `lasting` if the record is to be copied, as is one that waits for its next attempt."""
    if record.fate is None and record.token and now_ms < record.until_ms:
        return "live"
    ends_ms = record.keep_until_ms if record.fate is None else record.until_ms
    return "expired" if now_ms >= ends_ms else "lasting"


def shifted(record: Record, by_ms: int) -> Record:
    """Return the record with its times moved to another clock, and without a holder."""
    return replace(record.shifted(by_ms), token=b"")


def is_former(theirs: Record, ours: Record, now_ms: int) -> bool:
    """Return True if *theirs* is an earlier state of *ours*, or is past keeping."""
    if theirs.fate is not None:
        return False
    if ours.fate is not None or now_ms >= theirs.keep_until_ms:
        return True  # a delivery stays true, whatever was attempted in the target
    return (
        theirs.generation == ours.generation
        and theirs.keep_until_ms < ours.keep_until_ms + _SLACK_MS
        and (theirs.attempts, theirs.hash, theirs.memo) != (ours.attempts, ours.hash, ours.memo)
    )


# --- retries ------------------------------------------------------------------------------


async def _load(target: Portable, records: Sequence[Record]) -> list[Reply]:
    """Load *records*; repeat the request for those that had no answer."""
    answered: dict[bytes, Reply] = {}

    async def load() -> None:
        asked = [one for one in records if one.key not in answered]
        silent = ""
        for one, answer in zip(asked, await target.load(asked), strict=True):
            if isinstance(answer, NoAnswer):
                silent = answer.reason
            else:
                answered[one.key] = answer
        if silent:
            raise StoreUnavailable(silent)

    await _with_retries(load)
    return [answered[one.key] for one in records]


async def _with_retries(call: Callable[[], Awaitable[_T]]) -> _T:
    """Call, and retry for a while if the store is unavailable."""
    for pause_s in _PAUSES_S:
        try:
            return await call()
        except StoreUnavailable:
            await asyncio.sleep(pause_s)
    return await call()
