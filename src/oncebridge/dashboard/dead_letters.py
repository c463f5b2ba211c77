"""
Lists dead letters newest first, page by page, and counts them by reason.

Dead letters can only be listed upwards from a number. So the newest number is found by bisection,
and pages are read downwards from there: a page costs the same for a million dead letters as for a
hundred. A search stops after some thousands, and reports that.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from hashlib import blake2b
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.dashboard.data import DashboardData
from oncebridge.dead_letters.api import DeadLetter, DeadLetters
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.events.event import REASONS, Event
from oncebridge.events.summary import entity_of, topic_of
from oncebridge.observe.history import HistoryRow
from oncebridge.observe.history_rows import RowMask
from oncebridge.operate.lookup import events_in, lacks_our_tables
from oncebridge.operate.replay import DeadLetterFilter
from oncebridge.service.addresses import is_missing, refuse_memory
from oncebridge.service.config import Config
from oncebridge.service.monitor import mask_of

MOST_READ: Final = 5_000
"""The most dead letters that are read for one page, or for counting."""
_MOST_BYTES: Final = 64 * 1024 * 1024
_FIRST_PIECE: Final = 25
_LARGEST_PIECE: Final = 200
_PIECE_BYTES: Final = 4 * 1024 * 1024
_COUNTS_LAST_S: Final = 3.0
_LARGE: Final = 256 * 1024
_PARSED_BYTES: Final = 4 * 1024 * 1024
"""A list does not parse larger dead letters, nor more bytes than this in total."""

MEANINGS: Final = {
    "rejected": "the sink rejected it permanently",
    "attempts": "it was tried max_attempts times without a clear response",
    "too-old": "it failed for as long as give_up_after allows",
    "version": "its version cannot be compared with its entity's, and its rule keeps such events",
    "conflict": "the same identity as another event with different content, and its rule keeps such events",
    "unkeyable": "a field that its key needs is missing, and its rule keeps such events",
    "not-allowed": "its sender is not in the allow list",
    "unrouted": "no route matches it",
    "foreign": "not written by oncebridge: moved here by SQS or EventBridge",
    **REASONS,
}
"""The reasons of dead letters, in words."""


class DeadLetterRow(Struct, frozen=True):
    """One dead letter in a list."""

    number: int
    died_ms: int
    reason: str
    message: str
    route: str
    rule: str
    key: str
    attempts: int
    maybe_delivered: bool
    size: int
    id: str = ""
    source: str = ""
    topic: str = ""
    entity: str = ""
    is_read: bool = True
    """False if it was too large to be parsed for a list."""

    @property
    def meaning(self) -> str:
        return meaning_of(self.reason)


class DeadLetterPage(Struct, frozen=True):
    """One page of dead letters, newest first."""

    letters: tuple[DeadLetter, ...]
    older: int | None
    """The next page has numbers below this; None on the last page."""
    read_count: int
    stopped_early: bool
    """True if the search stopped before all were read."""


class DeadLetterTally(Struct, frozen=True):
    """Numbers of dead letters, by reason and by route."""

    reasons: dict[str, int]
    routes: dict[str, int]
    count: int
    more: bool
    """True if older ones were not counted."""


def meaning_of(reason: str) -> str:
    """Return a reason in words; empty if it is unknown."""
    return MEANINGS.get(reason, "")


async def open_dead_letters(data: DashboardData) -> DeadLetters:
    """Open the dead letters without creating their store; raise if they are unavailable."""
    place = data.setup.config.dead
    if data.monitor is None:
        refuse_memory(place, "dead")
        if is_missing(place) or lacks_our_tables(place):
            return MemoryDeadLetters()
    dead: DeadLetters = place.opened
    await dead.open()
    return dead


def fingerprint(letter: DeadLetter) -> str:
    """
    Return a fingerprint that distinguishes dead letters with the same number.

    Numbers in memory start again after a restart, and a page may be older than that.
    """
    text = f"{letter.number} {letter.buried_ms} {letter.reason} {letter.route} {letter.key.hex()}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


async def find(dead: DeadLetters, number: int) -> DeadLetter | None:
    """Return one dead letter by its number."""
    found = await dead.list(after=number - 1, limit=1)
    return found[0] if found and found[0].number == number else None


# --- newest first -------------------------------------------------------------------------


async def newest_number(dead: DeadLetters) -> int:
    """Return the number of the newest dead letter; 0 if there is none."""
    found = await dead.list(limit=1)
    low, step = (found[0].number if found else 0), 1
    while found and (found := await dead.list(after=low + step, limit=1)):
        low, step = found[0].number, 2 * step
    high = low + step
    while low and low < high:
        middle = (low + high) // 2
        found = await dead.list(after=middle, limit=1)
        if found:
            low = found[0].number
        else:
            high = middle
    return low


async def newest_first(
    dead: DeadLetters, before: int | None = None
) -> AsyncIterator[list[DeadLetter]]:
    """Yield all dead letters below the number *before* in batches, newest first."""
    top = await newest_number(dead) + 1 if before is None else before
    most = span = _FIRST_PIECE
    while top > 1:
        piece = await _below(dead, top, most, span)
        if not piece:
            return
        yield piece[::-1]
        span = top - piece[0].number
        top = piece[0].number
        average = sum([len(letter.raw) for letter in piece]) // len(piece) + 1
        most = min(max(_PIECE_BYTES // average, 5), _LARGEST_PIECE)
        span = max(most, span)


async def _below(dead: DeadLetters, top: int, most: int, span: int) -> list[DeadLetter]:
    """
    Return at most *most* dead letters, the highest below *top*, and at least half as many if possible.

    *span* is an estimate of how far down they are.
    """
    found: list[DeadLetter] = []
    # Above `few` there are at most *most*, above `many` (if known) more.
    few, many = top - 1, -1
    after = max(top - 1 - span, 0)
    while True:
        page = [one for one in await dead.list(after=after, limit=most + 1) if one.number < top]
        if len(page) > most:
            many = after
        else:
            found, few = page, after
            if 2 * len(found) >= most:
                return found
        if few == 0 or few - many <= 1:
            return found
        span *= 2
        after = (few + many) // 2 if many >= 0 else max(top - 1 - span, 0)


class _ReadLimit:
    """Counts what was read, up to the limit."""

    def __init__(self) -> None:
        self.count = 0
        self._bytes = 0

    def is_enough(self, piece: list[DeadLetter]) -> bool:
        self.count += len(piece)
        self._bytes += sum([len(letter.raw) for letter in piece])
        return self.count >= MOST_READ or self._bytes >= _MOST_BYTES


async def page_of(
    dead: DeadLetters, choice: DeadLetterFilter, before: int | None, most: int
) -> DeadLetterPage:
    """Return the newest matching dead letters below *before*."""
    fitting: list[DeadLetter] = []
    looked = _ReadLimit()
    async for piece in newest_first(dead, before):
        fitting += [letter for letter in piece if choice.takes(letter)]
        if len(fitting) > most:
            return DeadLetterPage(
                tuple(fitting[:most]), fitting[most - 1].number, looked.count, False
            )
        if looked.is_enough(piece):
            last = piece[-1].number
            return DeadLetterPage(tuple(fitting), last if last > 1 else None, looked.count, True)
    return DeadLetterPage(tuple(fitting), None, looked.count, False)


async def count(dead: DeadLetters) -> DeadLetterTally:
    """Count the newest dead letters, by reason and by route."""
    reasons: dict[str, int] = {}
    routes: dict[str, int] = {}
    looked, more = _ReadLimit(), False
    async for piece in newest_first(dead):
        for letter in piece:
            reasons[letter.reason] = reasons.get(letter.reason, 0) + 1
            routes[letter.route] = routes.get(letter.route, 0) + 1
        if looked.is_enough(piece):
            more = bool(await _below(dead, piece[-1].number, 1, 1))
            break
    by_count = sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))
    return DeadLetterTally(dict(by_count), dict(sorted(routes.items())), looked.count, more)


async def oldest(
    dead: DeadLetters, choice: DeadLetterFilter, most: int, *, whole: int
) -> tuple[list[DeadLetter], bool]:
    """
    Return the oldest matching dead letters, at most *most*; the first *whole* with their events.

    The second value is True if there may be more.
    """
    fitting: list[DeadLetter] = []
    looked, after = _ReadLimit(), 0
    while piece := await dead.list(after=after, limit=_LARGEST_PIECE):
        after = piece[-1].number
        for letter in piece:
            if choice.takes(letter):
                if len(fitting) == most:
                    return fitting, True
                fitting.append(letter if len(fitting) < whole else replace(letter, raw=b""))
        if looked.is_enough(piece):
            return fitting, bool(await dead.list(after=after, limit=1))
    return fitting, False


# --- rows ---------------------------------------------------------------------------------


class DeadLetterRows:
    """Makes rows of dead letters, without the fields that `mask` hides."""

    def __init__(self, config: Config) -> None:
        self._settings = config.settings()
        self._secrets = RowMask(mask_of(config))

    async def all(self, letters: Sequence[DeadLetter]) -> list[DeadLetterRow]:
        """Return rows, made in a thread; large dead letters are not parsed."""
        return await asyncio.to_thread(self._all, letters)

    def _all(self, letters: Sequence[DeadLetter]) -> list[DeadLetterRow]:
        rows, room = [], _PARSED_BYTES
        for letter in letters:
            size = len(letter.raw)
            is_read = size <= min(_LARGE, room)
            room -= size if is_read else 0
            rows.append(self.of(letter, is_read=is_read))
        return rows

    def of(self, letter: DeadLetter, *, is_read: bool = True) -> DeadLetterRow:
        """Return the row of one dead letter; parsing a large one is slow."""
        events = events_in(letter.raw, self._settings) if letter.raw and is_read else ()
        summary = self._summary(events[0]) if events and isinstance(events[0], Event) else {}
        return DeadLetterRow(
            letter.number,
            letter.buried_ms,
            letter.reason,
            letter.message,
            letter.route,
            letter.rule,
            letter.key.hex(),
            letter.attempts,
            letter.maybe_delivered,
            len(letter.raw),
            is_read=is_read,
            **summary,
        )

    def _summary(self, event: Event) -> dict[str, Any]:
        row = HistoryRow(
            0,
            0,
            "",
            "",
            id=event.id or "",
            source=event.source,
            topic=topic_of(event),
            entity=entity_of(event),
        )
        seen = self._secrets.blanked(row, event)
        return {"id": seen.id, "source": seen.source, "topic": seen.topic, "entity": seen.entity}


class TallyCache:
    """Counts dead letters at most every few seconds, whatever the number of visitors."""

    def __init__(self) -> None:
        self._tally: DeadLetterTally | None = None
        self._at_s = 0.0
        self._counting = asyncio.Lock()

    async def tally(self, dead: DeadLetters) -> DeadLetterTally:
        now_s = asyncio.get_running_loop().time
        async with self._counting:
            if self._tally is None or now_s() - self._at_s > _COUNTS_LAST_S:
                self._tally = await count(dead)
                self._at_s = now_s()
            return self._tally

    def forget(self) -> None:
        """Count again next time, after an action."""
        self._tally = None
