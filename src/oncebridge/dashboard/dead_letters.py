"""
Dead letters as a page shows them: the newest first, some at a time, and how many of which kind.

Dead letters can only be listed upwards from a number. So the newest are found by bisection, and
from there it goes down piece by piece: a page costs as much for a million letters as for a
hundred. Whatever looks through many of them stops after some thousands, and says so.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from hashlib import blake2b
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.dashboard.data import Desk
from oncebridge.dead_letters.api import DeadLetter, DeadLetters
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.events.event import REASONS, Event
from oncebridge.events.summary import entity_of, topic_of
from oncebridge.observe.history import Row
from oncebridge.observe.history_rows import Secrets
from oncebridge.operate.lookup import events_in, lacks_our_tables
from oncebridge.operate.replay import DeadLetterFilter
from oncebridge.service.addresses import is_missing, refuse_memory
from oncebridge.service.config import Config
from oncebridge.service.monitor import mask_of

MOST_LOOKED_AT: Final = 5_000
"""Letters that are looked at for one page, or to be counted."""
_MOST_BYTES: Final = 64 * 1024 * 1024
_FIRST_PIECE: Final = 25
_LARGEST_PIECE: Final = 200
_PIECE_BYTES: Final = 4 * 1024 * 1024
_COUNTS_LAST_S: Final = 3.0
_LARGE: Final = 256 * 1024
_LOOKED_INTO: Final = 4 * 1024 * 1024
"""A list looks into no letter that is larger, and into no more than so many bytes in all."""

MEANINGS: Final = {
    "rejected": "the sink refused it for good",
    "attempts": "it was tried as often as allowed, without a clear answer",
    "too-old": "it failed for as long as give_up_after allows",
    "version": "its version cannot be compared with that of its entity; its rule keeps such",
    "conflict": "the same identity as another event, with other content; its rule keeps such",
    "unkeyable": "a field that its key needs is missing, and its rule keeps such",
    "not-allowed": "its sender is not among those that are let in",
    "unrouted": "no route is for it",
    "foreign": "not written by oncebridge: SQS or EventBridge has moved it here",
    **REASONS,
}
"""Why an event died, in words."""


class Headline(Struct, frozen=True):
    """What a list tells of a letter."""

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
    """False where it was too large to be looked into for a list."""

    @property
    def meaning(self) -> str:
        return meaning_of(self.reason)


class Page(Struct, frozen=True):
    """Some letters, newest first."""

    letters: tuple[DeadLetter, ...]
    older: int | None
    """Where the next page begins: below this number; None where there is none."""
    looked_at: int
    broke_off: bool
    """There were too many that do not fit to look at all of them."""


class Tally(Struct, frozen=True):
    """How many letters there are, by reason and by route."""

    reasons: dict[str, int]
    routes: dict[str, int]
    count: int
    more: bool
    """There are older ones, which were not counted."""


def meaning_of(reason: str) -> str:
    """Tell in words why an event died; nothing where the word says all that is known."""
    return MEANINGS.get(reason, "")


async def opened(desk: Desk) -> DeadLetters:
    """Open the dead letters; none are made to be looked at. Raises what keeps them away."""
    place = desk.setup.config.dead
    if desk.monitor is None:
        refuse_memory(place, "dead")
        if is_missing(place) or lacks_our_tables(place):
            return MemoryDeadLetters()
    dead: DeadLetters = place.opened
    await dead.open()
    return dead


def mark_of(letter: DeadLetter) -> str:
    """
    Tell one letter from another that has its number.

    Numbers begin anew where letters are in memory, and a page may be older than that.
    """
    told = f"{letter.number} {letter.buried_ms} {letter.reason} {letter.route} {letter.key.hex()}"
    return blake2b(told.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


async def find(dead: DeadLetters, number: int) -> DeadLetter | None:
    """Find one letter by its number."""
    found = await dead.list(after=number - 1, limit=1)
    return found[0] if found and found[0].number == number else None


# --- from the newest down -----------------------------------------------------------------


async def highest(dead: DeadLetters) -> int:
    """Find the number of the newest letter; 0 where there is none."""
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


async def downwards(
    dead: DeadLetters, before: int | None = None
) -> AsyncIterator[list[DeadLetter]]:
    """Read all letters below the number *before*, newest first, in pieces."""
    top = await highest(dead) + 1 if before is None else before
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
    Read at most *most* letters, the highest below *top*, and at least half as many if there are.

    *span* is a guess at how far down they are.
    """
    found: list[DeadLetter] = []
    # Above `few` there are few enough, above `many` (if that is known) too many.
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


class _Looked:
    """How much was looked at, and whether that is enough."""

    def __init__(self) -> None:
        self.count = 0
        self._bytes = 0

    def is_enough(self, piece: list[DeadLetter]) -> bool:
        self.count += len(piece)
        self._bytes += sum([len(letter.raw) for letter in piece])
        return self.count >= MOST_LOOKED_AT or self._bytes >= _MOST_BYTES


async def page_of(
    dead: DeadLetters, choice: DeadLetterFilter, before: int | None, most: int
) -> Page:
    """Find the newest letters below *before* that are meant."""
    fitting: list[DeadLetter] = []
    looked = _Looked()
    async for piece in downwards(dead, before):
        fitting += [letter for letter in piece if choice.takes(letter)]
        if len(fitting) > most:
            return Page(tuple(fitting[:most]), fitting[most - 1].number, looked.count, False)
        if looked.is_enough(piece):
            last = piece[-1].number
            return Page(tuple(fitting), last if last > 1 else None, looked.count, True)
    return Page(tuple(fitting), None, looked.count, False)


async def count(dead: DeadLetters) -> Tally:
    """Count the newest letters, by reason and by route."""
    reasons: dict[str, int] = {}
    routes: dict[str, int] = {}
    looked, more = _Looked(), False
    async for piece in downwards(dead):
        for letter in piece:
            reasons[letter.reason] = reasons.get(letter.reason, 0) + 1
            routes[letter.route] = routes.get(letter.route, 0) + 1
        if looked.is_enough(piece):
            more = bool(await _below(dead, piece[-1].number, 1, 1))
            break
    by_count = sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))
    return Tally(dict(by_count), dict(sorted(routes.items())), looked.count, more)


async def oldest(
    dead: DeadLetters, choice: DeadLetterFilter, most: int, *, whole: int
) -> tuple[list[DeadLetter], bool]:
    """
    Find the oldest letters that are meant, at most *most*; the first *whole* with what they hold.

    Tells too whether there may be more of them.
    """
    fitting: list[DeadLetter] = []
    looked, after = _Looked(), 0
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


# --- what is told of each -----------------------------------------------------------------


class Headlines:
    """Tells of letters what a list has room for, without what `mask` hides."""

    def __init__(self, config: Config) -> None:
        self._settings = config.settings()
        self._secrets = Secrets(mask_of(config))

    async def all(self, letters: Sequence[DeadLetter]) -> list[Headline]:
        """Tell of a list, beside the loop; large letters are not looked into."""
        return await asyncio.to_thread(self._all, letters)

    def _all(self, letters: Sequence[DeadLetter]) -> list[Headline]:
        told, room = [], _LOOKED_INTO
        for letter in letters:
            size = len(letter.raw)
            is_read = size <= min(_LARGE, room)
            room -= size if is_read else 0
            told.append(self.of(letter, is_read=is_read))
        return told

    def of(self, letter: DeadLetter, *, is_read: bool = True) -> Headline:
        """Tell of one letter; to look into a large one takes its time."""
        events = events_in(letter.raw, self._settings) if letter.raw and is_read else ()
        told = self._told(events[0]) if events and isinstance(events[0], Event) else {}
        return Headline(
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
            **told,
        )

    def _told(self, event: Event) -> dict[str, Any]:
        row = Row(
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


class Counter:
    """Counts the letters of one desk now and then: several who look cost no more than one."""

    def __init__(self) -> None:
        self._tally: Tally | None = None
        self._at_s = 0.0
        self._counting = asyncio.Lock()

    async def tally(self, dead: DeadLetters) -> Tally:
        now_s = asyncio.get_running_loop().time
        async with self._counting:
            if self._tally is None or now_s() - self._at_s > _COUNTS_LAST_S:
                self._tally = await count(dead)
                self._at_s = now_s()
            return self._tally

    def forget(self) -> None:
        """Count anew next time: something was done."""
        self._tally = None
