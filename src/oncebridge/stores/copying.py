"""
Carry what one store remembers to another.

A record says until when it counts, by the clock of its store. On its way it is shifted by
what the two clocks differ, so that a window has as much left there as it had here.

What is done goes along, and what is not: the attempts at an event that failed, and what was
delivered last of an entity. What is over stays behind, and so does what a worker holds: it
may end any moment, and its end would be known here only. So workers should be stopped; what
was held is counted, and the same copy may simply be made again.

A copy made again finds most records there already. One that has gone on since (an attempt
more, a newer state, done meanwhile) takes the place of its former self, unless a worker of
the other store has that in hand. It is removed and put anew; whoever comes in between finds
nothing, and what is done there is never removed.
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
"""How far apart two readings of the clocks' difference may be."""
_PAUSES_S = (0.1, 0.3, 1.0, 3.0, 5.0, 10.0, 10.0)
"""Between tries: a store that is throttled needs a moment, one that restarts half a minute."""

_T = TypeVar("_T")


def is_portable(store: Store) -> TypeGuard[Portable]:
    """Return whether the records of *store* can be read out and put in."""
    return callable(getattr(store, "scan", None)) and callable(getattr(store, "load", None))


class HeldKey(Struct, frozen=True):
    """A key that was left, as a worker has it in hand."""

    key: bytes
    left_ms: int
    """How long that lasts, unless it is prolonged."""


class Copying:
    """
    Carry records from *source* to *target*, both open, batch by batch.

    Without a *target* it is as if that were empty. With *dry_run* nothing is changed, and
    the counts are what they would be. The counts are of records as the scan sees them: what
    it sees twice is `known` the second time.
    """

    def __init__(self, source: Portable, target: Portable | None, *, dry_run: bool = False) -> None:
        self._source = source
        self._target = target
        self._dry_run = dry_run
        self._place = b""
        self.copied = 0
        self.updated = 0
        """Were there in a former state."""
        self.known = 0
        self.expired = 0
        self.live = 0
        """Left, as a worker has them in hand."""
        self.held: list[HeldKey] = []
        """The first few of those."""
        self.held_ms = 0
        """When the last of them ends, seen from now."""
        self.is_complete = False

    @property
    def seen(self) -> int:
        """How many records were looked at."""
        return self.copied + self.updated + self.known + self.expired + self.live

    def counts(self) -> dict[str, int]:
        """Return what became of the records, by name."""
        names = ("copied", "updated", "known", "expired", "live")
        return {name: getattr(self, name) for name in names}

    async def step(self) -> bool:
        """Carry the next batch, and tell whether there is more."""
        place = self._place
        records, after = await _tried(lambda: self._source.scan(place, BATCH))
        # A scan may see a record twice, also in one step.
        await self._carry({record.key: record for record in records}.values())
        self._place = after
        self.is_complete = not after
        return not self.is_complete

    async def _carry(self, records: Iterable[Record]) -> None:
        here_ms, there_ms = await asyncio.gather(
            _tried(self._source.now_ms), _tried((self._target or self._source).now_ms)
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
        if going and self._target is None:
            self.copied += len(going)
        elif going and self._target is not None:
            await self._put(self._target, going, there_ms)

    async def _put(self, target: Portable, records: Sequence[Record], now_ms: int) -> None:
        if self._dry_run:
            found = await _tried(lambda: target.peek([one.key for one in records]))
            answers: list[Reply] = [
                transitions.load(there, one, now_ms)[0]
                for there, one in zip(found, records, strict=True)
            ]
        else:
            answers = await _load(target, records)
        known = [one for one, told in zip(records, answers, strict=True) if told is Reply.KNOWN]
        self.copied += len(records) - len(known)
        if known:
            await self._update(target, known, now_ms)

    async def _update(self, target: Portable, records: Sequence[Record], now_ms: int) -> None:
        """Bring up to date what stands in the target in a former state."""
        found = await _tried(lambda: target.peek([one.key for one in records]))
        former: list[Record] = []
        for ours, theirs in zip(records, found, strict=True):
            if theirs is None or not is_former(theirs, ours, now_ms):
                self.known += 1
            elif transitions.state(theirs, now_ms) == "claimed":
                self._leave(ours.key, theirs.until_ms - now_ms)
            else:
                former.append(ours)
        updated = len(former)
        if former and not self._dry_run:
            await _tried(lambda: target.forget([one.key for one in former]))
            updated = (await _load(target, former)).count(Reply.REMEMBERED)
        self.updated += updated
        self.known += len(former) - updated

    def _leave(self, key: bytes, left_ms: int) -> None:
        self.live += 1
        self.held_ms = max(self.held_ms, left_ms)
        if len(self.held) < _NAMED and all(one.key != key for one in self.held):
            self.held.append(HeldKey(key, left_ms))


# --- what is to be done with a record -----------------------------------------------------


def condition(record: Record, now_ms: int) -> Literal["lasting", "expired", "live"]:
    """Return whether a record is worth carrying; one that only waits for its next attempt is."""
    if record.fate is None and record.token and now_ms < record.until_ms:
        return "live"
    ends_ms = record.keep_until_ms if record.fate is None else record.until_ms
    return "expired" if now_ms >= ends_ms else "lasting"


def shifted(record: Record, by_ms: int) -> Record:
    """Move the times of a record to another clock; what was held here is held by nobody there."""
    hard_until = record.hard_until_ms
    return replace(
        record,
        token=b"",
        until_ms=record.until_ms + by_ms,
        hard_until_ms=hard_until + by_ms if hard_until else 0,
        keep_until_ms=record.keep_until_ms + by_ms,
    )


def is_former(theirs: Record, ours: Record, now_ms: int) -> bool:
    """Return whether *theirs* is a state that *ours* was in before, or is past keeping."""
    if theirs.fate is not None:
        return False
    if ours.fate is not None or now_ms >= theirs.keep_until_ms:
        return True  # what is done is a fact, whoever else has tried
    return (
        theirs.generation == ours.generation
        and theirs.keep_until_ms < ours.keep_until_ms + _SLACK_MS
        and (theirs.attempts, theirs.hash, theirs.memo) != (ours.attempts, ours.hash, ours.memo)
    )


# --- patience -----------------------------------------------------------------------------


async def _load(target: Portable, records: Sequence[Record]) -> list[Reply]:
    """Load *records*, asking again for those that had no answer."""
    told: dict[bytes, Reply] = {}

    async def load() -> None:
        asked = [one for one in records if one.key not in told]
        silent = ""
        for one, answer in zip(asked, await target.load(asked), strict=True):
            if isinstance(answer, NoAnswer):
                silent = answer.reason
            else:
                told[one.key] = answer
        if silent:
            raise StoreUnavailable(silent)

    await _tried(load)
    return [told[one.key] for one in records]


async def _tried(call: Callable[[], Awaitable[_T]]) -> _T:
    """Call, and again for a while where the store is away."""
    for pause_s in _PAUSES_S:
        try:
            return await call()
        except StoreUnavailable:
            await asyncio.sleep(pause_s)
    return await call()
