"""
Searches the store and the dead letters for events that the history does not have.

An event may be older than the history, or not sampled. A key is looked up directly. For an id,
every record has to be read: without asking only if that is cheap, and otherwise after the user has
seen the cost and confirmed.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.dashboard.data import DashboardData
from oncebridge.dashboard.dead_letters import newest_first, open_dead_letters
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
"""Stores whose records are free to read."""
_GLANCE_S: Final = 0.5
_SEARCH_S: Final = 10.0
_MOST_FOUND: Final = 20


class FoundDeadLetters(Struct, frozen=True):
    """The result of a search for dead letters."""

    found: tuple[DeadLetter, ...] = ()
    """The newest matches, without their events."""
    missed: str = ""
    """Why matches may be missing; empty if all were read."""


class StoreLookup(Struct, frozen=True, kw_only=True):
    """What the store and the dead letters have for a search text."""

    text: str
    key: bytes = b""
    """Set if the text is a complete key."""
    events: tuple[KeyExplanation, ...] = ()
    """What the store has."""
    letters: FoundDeadLetters = FoundDeadLetters()
    scanned: int | None = None
    """How many records were read for an id; None if none were."""
    is_all: bool = False
    """True if all records were read."""
    costs: str = ""
    """The cost of reading all records, in words; empty if that is not possible."""
    hint: str = ""
    trouble: str = ""
    """Why the store did not answer."""


async def look_up(data: DashboardData, text: str, *, thorough: bool = False) -> StoreLookup:
    """Search for *text*, a key or an id; *thorough*: read all records for an id."""
    key = key_in(text)
    try:
        if key is not None:
            return await _by_key(data, text, key)
        return await _by_id(data, text.removeprefix("id:"), thorough=thorough)
    except StoreError as error:
        return StoreLookup(text=text, key=key or b"", trouble=str(error))


async def explain_stored_key(
    data: DashboardData, key: bytes, record: Record | None = None
) -> KeyExplanation:
    """
    Return what the store has for a key, without the first id if `mask` hides it.

    *record* is the record, if a scan has just read it.
    """
    explanation = await explain_key(key, data.store, None, record=record)
    standing, first = explanation.standing, explanation.first
    if not (first and first.id and standing and standing.record):
        return explanation
    if not mask_of(data.setup.config).hides("id"):
        return explanation
    memo = replace(standing.memo, id=None).write()
    return replace(
        explanation, standing=replace(standing, record=replace(standing.record, memo=memo))
    )


async def _by_key(data: DashboardData, text: str, key: bytes) -> StoreLookup:
    explanation = await explain_stored_key(data, key)
    letters = await find_dead_letters(data, lambda letter: letter.key == key)
    events = (explanation,) if explanation.is_known else ()
    return StoreLookup(text=text, key=key, events=events, letters=letters, is_all=True)


async def _by_id(data: DashboardData, id_: str, *, thorough: bool) -> StoreLookup:
    settings = data.setup.config.settings()

    letters = FoundDeadLetters(missed="they are in an SQS queue, which is only read on request")
    if thorough or scheme_of(data.setup.config.dead.url) != "sqs":
        within_s = _SEARCH_S if thorough else _GLANCE_S
        letters = await find_dead_letters(
            data, lambda letter: has_id(letter, id_, settings), within_s=within_s
        )
    lookup = StoreLookup(
        text=id_, letters=letters, hint=EventReference(id_, "id").hint.removeprefix("; ")
    )
    if not is_portable(data.store):
        return lookup
    place = data.setup.config.store
    lookup = replace(lookup, costs=scan_costs(place) or "this reads every record of the store")
    if thorough or scheme_of(place.url) in _LOCAL:
        return await _scanned(data, lookup, _SEARCH_S if thorough else _GLANCE_S)
    return lookup


class _Enough(Exception):
    """The time is up."""


async def _scanned(data: DashboardData, lookup: StoreLookup, within_s: float) -> StoreLookup:
    """Read records until the time is up."""
    assert is_portable(data.store)  # noqa: S101 - the caller has checked
    now_s = asyncio.get_running_loop().time
    ends, scanned, is_all = now_s() + within_s, 0, True
    found: dict[bytes, KeyExplanation] = {}

    def progress(count: int) -> None:
        nonlocal scanned
        scanned = count
        if now_s() >= ends:
            raise _Enough

    try:
        async for record in records_with_id(data.store, lookup.text, progress):
            if len(found) < _MOST_FOUND and record.key not in found:
                found[record.key] = await explain_stored_key(data, record.key, record)
    except _Enough:
        is_all = False
    return replace(lookup, events=tuple(found.values()), scanned=scanned, is_all=is_all)


# --- dead letters -------------------------------------------------------------------------


async def find_dead_letters(
    data: DashboardData, fits: Callable[[DeadLetter], bool], *, within_s: float = _GLANCE_S
) -> FoundDeadLetters:
    """Return the newest dead letters for which *fits* is true, until the time is up."""
    now_s = asyncio.get_running_loop().time
    ends, looked_at = now_s() + within_s, 0

    def fitting(piece: list[DeadLetter]) -> tuple[list[DeadLetter], int]:
        """Check dead letters, which may be large, until the time is up."""
        found: list[DeadLetter] = []
        for at, letter in enumerate(piece, 1):
            if fits(letter):
                found.append(replace(letter, raw=b""))
            if now_s() >= ends:
                return found, at
        return found, len(piece)

    try:
        async for piece in newest_first(await open_dead_letters(data)):
            found, count = await asyncio.to_thread(fitting, piece)
            looked_at += count
            if found:
                return FoundDeadLetters(tuple(found[:_MOST_FOUND]))
            if now_s() >= ends:
                return FoundDeadLetters(missed=f"only the newest {looked_at:,} were read")
    except OncebridgeError as error:
        return FoundDeadLetters(missed=str(error))
    return FoundDeadLetters()


def has_id(letter: DeadLetter, id_: str, settings: Settings) -> bool:
    """Return True if an event in *letter* has the id, as far as the history keeps ids."""
    events = events_in(letter.raw, settings)
    return any(isinstance(e, Event) and remembered(e.id) == remembered(id_) for e in events)
