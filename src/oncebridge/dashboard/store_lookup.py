"""
What the history does not have: looked up in the store, and in the dead letters.

An event may be older than the history, or not among those that are kept. A key leads straight to
its record. An id does not: every record has to be read for it, which is done at once only where
that is cheap, and else when somebody asks for it who was told what it costs.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.dashboard.data import Desk
from oncebridge.dashboard.dead_letters import downwards, opened
from oncebridge.dead_letters.api import DeadLetter
from oncebridge.engine.causes import remembered
from oncebridge.engine.settings import Settings
from oncebridge.errors import OncebridgeError, StoreError
from oncebridge.events.event import Event
from oncebridge.operate.explain.explainer import explain_key
from oncebridge.operate.explain.explanation import KeyExplanation
from oncebridge.operate.lookup import EventReference, events_in, key_in, records_with_id, scan_costs
from oncebridge.service.addresses import scheme_of
from oncebridge.service.monitor import mask_of
from oncebridge.stores.api import Record
from oncebridge.stores.copying import is_portable

_LOCAL: Final = frozenset({"memory", "sqlite"})
"""Stores whose records cost nobody anything to read."""
_GLANCE_S: Final = 0.5
_SEARCH_S: Final = 10.0
_MOST_FOUND: Final = 20


class Letters(Struct, frozen=True):
    """Dead letters that were looked for."""

    found: tuple[DeadLetter, ...] = ()
    """The newest that fit, without what they hold."""
    missed: str = ""
    """Why none may have been found; empty where all were looked at."""


class Beyond(Struct, frozen=True, kw_only=True):
    """What else is known of what somebody has looked for."""

    text: str
    key: bytes = b""
    """Where the text is a whole key."""
    events: tuple[KeyExplanation, ...] = ()
    """What the store has, where anything is known of it."""
    letters: Letters = Letters()
    scanned: int | None = None
    """How many records were read for an id; None where that was not done."""
    is_all: bool = False
    """Those were all there are."""
    costs: str = ""
    """What it costs to read them all, in words; empty where they cannot be."""
    hint: str = ""
    trouble: str = ""
    """Why the store could not be asked."""


async def look_beyond(desk: Desk, text: str, *, thorough: bool = False) -> Beyond:
    """Look for *text*, a key or an id, where the history does not reach; *thorough*: in all of it."""
    key = key_in(text)
    try:
        if key is not None:
            return await _by_key(desk, text, key)
        return await _by_id(desk, text.removeprefix("id:"), thorough=thorough)
    except StoreError as error:
        return Beyond(text=text, key=key or b"", trouble=str(error))


async def known(desk: Desk, key: bytes, record: Record | None = None) -> KeyExplanation:
    """
    Return what the store knows under a key, without what `mask` hides of it: the first one's id.

    *record* is what a scan has just found there.
    """
    told = await explain_key(key, desk.store, None, record=record)
    standing, first = told.standing, told.first
    if not (first and first.id and standing and standing.record):
        return told
    if not mask_of(desk.setup.config).hides("id"):
        return told
    memo = replace(standing.memo, id=None).write()
    return replace(told, standing=replace(standing, record=replace(standing.record, memo=memo)))


async def _by_key(desk: Desk, text: str, key: bytes) -> Beyond:
    told = await known(desk, key)
    letters = await letters_that(desk, lambda letter: letter.key == key)
    events = (told,) if told.is_known else ()
    return Beyond(text=text, key=key, events=events, letters=letters, is_all=True)


async def _by_id(desk: Desk, id_: str, *, thorough: bool) -> Beyond:
    settings = desk.setup.config.settings()

    letters = Letters(missed="they are in a queue, which is not read without need")
    if thorough or scheme_of(desk.setup.config.dead.url) != "sqs":
        within_s = _SEARCH_S if thorough else _GLANCE_S
        letters = await letters_that(
            desk, lambda letter: has_id(letter, id_, settings), within_s=within_s
        )
    told = Beyond(text=id_, letters=letters, hint=EventReference(id_, "id").hint.removeprefix("; "))
    if not is_portable(desk.store):
        return told
    place = desk.setup.config.store
    told = replace(told, costs=scan_costs(place) or "every record of the store is read for it")
    if thorough or scheme_of(place.url) in _LOCAL:
        return await _scanned(desk, told, _SEARCH_S if thorough else _GLANCE_S)
    return told


class _Enough(Exception):
    """It has taken long enough."""


async def _scanned(desk: Desk, told: Beyond, within_s: float) -> Beyond:
    """Read records as long as there is time."""
    assert is_portable(desk.store)  # noqa: S101 - the caller looked
    now_s = asyncio.get_running_loop().time
    ends, scanned, is_all = now_s() + within_s, 0, True
    found: dict[bytes, KeyExplanation] = {}

    def progress(count: int) -> None:
        nonlocal scanned
        scanned = count
        if now_s() >= ends:
            raise _Enough

    try:
        async for record in records_with_id(desk.store, told.text, progress):
            if len(found) < _MOST_FOUND and record.key not in found:
                found[record.key] = await known(desk, record.key, record)
    except _Enough:
        is_all = False
    return replace(told, events=tuple(found.values()), scanned=scanned, is_all=is_all)


# --- in the dead letters ------------------------------------------------------------------


async def letters_that(
    desk: Desk, fits: Callable[[DeadLetter], bool], *, within_s: float = _GLANCE_S
) -> Letters:
    """Look for dead letters that fit, from the newest down, for as long as there is time."""
    now_s = asyncio.get_running_loop().time
    ends, looked_at = now_s() + within_s, 0

    def fitting(piece: list[DeadLetter]) -> tuple[list[DeadLetter], int]:
        """Look into letters, which may be large, as long as there is time."""
        found: list[DeadLetter] = []
        for at, letter in enumerate(piece, 1):
            if fits(letter):
                found.append(replace(letter, raw=b""))
            if now_s() >= ends:
                return found, at
        return found, len(piece)

    try:
        async for piece in downwards(await opened(desk)):
            found, count = await asyncio.to_thread(fitting, piece)
            looked_at += count
            if found:
                return Letters(tuple(found[:_MOST_FOUND]))
            if now_s() >= ends:
                return Letters(missed=f"only the newest {looked_at:,} were looked at")
    except OncebridgeError as error:
        return Letters(missed=str(error))
    return Letters()


def has_id(letter: DeadLetter, id_: str, settings: Settings) -> bool:
    """Return whether an event in *letter* has an id, as far as the history keeps ids."""
    events = events_in(letter.raw, settings)
    return any(isinstance(e, Event) and remembered(e.id) == remembered(id_) for e in events)
