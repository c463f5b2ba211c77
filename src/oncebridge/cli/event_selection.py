"""Finds the events that `explain`, `forget`, `release` and `resend` are called with."""

import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import click
from msgspec import Struct
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from oncebridge.cli.command import note, open_file, opened, printable
from oncebridge.dead_letters.api import DeadLetter, DeadLetters
from oncebridge.errors import ConfigError, OncebridgeError, StoreError
from oncebridge.events.event import Event, Unreadable
from oncebridge.events.framing import RecordReader
from oncebridge.operate.explain.expected_verdict import contents
from oncebridge.operate.identity import Identities, RouteIdentity
from oncebridge.operate.lookup import (
    DeadLetterIndex,
    EventReference,
    events_in,
    lacks_our_tables,
    open_for_reading,
    parse_reference,
    records_with_id,
    scan_costs,
)
from oncebridge.service.addresses import is_missing, is_out_of_reach
from oncebridge.service.config import Setup
from oncebridge.stores.api import Record, Store
from oncebridge.stores.copying import is_portable

in_option = click.option(
    "--in", "recording", metavar="FILE", help="Search this file of events for the key or id."
)
scan_option = click.option(
    "--scan",
    is_flag=True,
    help="Search all of a DynamoDB or S3 store for an id; AWS charges for it.",
)
reason_option = click.option(
    "--reason",
    "--because",
    "reason",
    default="",
    metavar="TEXT",
    help="The reason, for the operator log.",
)
because_option = click.option(
    "--because", "because", default="", metavar="TEXT", help="The reason, for the operator log."
)
yes_option = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
route_option = click.option(
    "--route", "routes", multiple=True, help="Only on this route (repeatable)."
)


class FoundEvent(Struct, frozen=True):
    """One event, and where it was found."""

    label: str
    event: Event | Unreadable
    letter: DeadLetter | None = None
    """The dead letter in which it was found, if any."""

    @property
    def problem(self) -> str:
        """Why it is not an event; empty if it is one."""
        event = self.event
        return f"{event.reason}: {event.message}" if isinstance(event, Unreadable) else ""


class EventFinder:
    """Finds events in files, dead letters and a store."""

    def __init__(self, setup: Setup, *, recording: str | None = None, scan: bool = False) -> None:
        self._setup = setup
        self._settings = setup.config.settings()
        self._recording = recording
        self._scan = scan
        self._dead: DeadLetters | None = None
        self._has_tried = False
        self.identities = Identities(setup)
        self.letters = DeadLetterIndex(self._open_dead, self._settings)

    def named(self, text: str) -> EventReference:
        """Return what *text* names; note if it could be something else."""
        found = parse_reference(text)
        if found.other_kind is not None:
            note(f"{printable(text)} is also a {found.other_kind}; the file of that name is used")
        return found

    def in_file(self, name: str) -> Iterator[FoundEvent]:
        """Read the events of a file, however they are wrapped."""
        with open_file(name) as file:
            for record in RecordReader(file):
                for event in events_in(record, self._settings):
                    yield FoundEvent(f"{name}, line {record.line}", event)

    async def events(self, named: EventReference) -> list[FoundEvent]:
        """Find whole events by key or id: in the recording, then in the dead letters."""
        if self._recording is not None:
            found = [one for one in self.in_file(self._recording) if self.is_named(one, named)]
            if found:
                return found
            note(f"{self._recording} has no event with that {named.kind}")
        return [one async for one in self._in_letters(named)]

    def is_named(self, one: FoundEvent, named: EventReference) -> bool:
        """Return whether an event has the id, or on some route the key, that was named."""
        if not isinstance(one.event, Event):
            return False
        if named.kind == "id":
            return one.event.id == named.text
        return any(named.key in way.all_keys() for way in self.identities.of(one.event))

    async def _in_letters(self, named: EventReference) -> AsyncIterator[FoundEvent]:
        if named.kind == "id":
            letters = await self.letters.with_id(named.text)
        else:
            letter = await self.letters.with_key([named.key])
            whole = await self.letters.whole(letter) if letter else None
            letters = [whole] if whole else []
        for letter in letters:
            for event in events_in(letter.raw, self._settings):
                found = FoundEvent(f"dead letter {letter.number}", event, letter)
                is_key = named.kind == "key" and letter.key == named.key
                if is_key or self.is_named(found, named):
                    yield found

    async def records(self, named: EventReference, store: Store) -> list[Record]:
        """Return the records whose first copy had an id; this reads all records."""
        place = self._setup.config.store
        if not is_portable(store):
            note(f"{place} cannot be searched; use --in FILE to search a file of events")
            return []
        costs = scan_costs(place)
        if costs and not self._scan:
            note(f"{place} was not searched: {costs}. Use --scan to search it, or --in FILE")
            return []
        found: dict[bytes, Record] = {}
        with progress_text() as show:
            counted = records_with_id(store, named.text, lambda count: show(f"{count:,} read"))
            async for record in counted:
                found[record.key] = record
        return list(found.values())

    def ways(self, one: FoundEvent, routes: Sequence[str]) -> list[RouteIdentity]:
        """
        Return the identity of an event on the route where it died, or on each that it takes.

        Only of *routes*, if any are named.
        """
        if not isinstance(one.event, Event):
            return []
        if one.letter is not None and one.letter.rule:
            way = self.identities.on(one.letter.route, one.event)
            ways = [way] if way else []
        else:
            ways = self.identities.of(one.event)
        return [way for way in ways if not routes or way.route.name in routes]

    async def _open_dead(self) -> DeadLetters | None:
        """Open the dead letters when they are first needed; note it if that fails."""
        if not self._has_tried:
            self._has_tried = True
            place = self._setup.config.dead
            if not (is_out_of_reach(place) or is_missing(place) or lacks_our_tables(place)):
                try:
                    await place.opened.open()
                    self._dead = place.opened
                except OncebridgeError as error:
                    note(f"the dead letters are left out: {error}")
        return self._dead

    async def aclose(self) -> None:
        """Close what was opened."""
        if self._dead is not None:
            await self._dead.aclose()


@asynccontextmanager
async def event_finder(setup: Setup, **options: Any) -> AsyncIterator[EventFinder]:
    """Make a finder, and close what it opened."""
    finder = EventFinder(setup, **options)
    try:
        yield finder
    finally:
        await finder.aclose()


class SelectedEvent(Struct, frozen=True):
    """One selected event: its keys in the store, and its name in the output."""

    name: str
    own: dict[bytes, bytes]
    """Its keys, each with the hash of its content; empty where that is not known."""
    route: str = ""
    entity: bytes = b""
    problem: str = ""
    is_bare: bool = False
    """Found by key or in the store only: its other keys are not known."""


async def select_events(
    finder: EventFinder, texts: Sequence[str], routes: Sequence[str], store: Store
) -> AsyncIterator[SelectedEvent]:
    """
    Find the events that were named, each once.

    Only on *routes*, if any are named.
    """
    seen: set[tuple[bytes, bytes]] = set()
    for text in texts:
        named = finder.named(text)
        async for one in _select_events(finder, named, routes, store):
            if one.own and seen.issuperset(one.own.items()):
                continue
            seen.update(one.own.items())
            yield one


async def _select_events(
    finder: EventFinder, named: EventReference, routes: Sequence[str], store: Store
) -> AsyncIterator[SelectedEvent]:
    if named.kind == "key" and not routes:
        yield SelectedEvent(str(named), {named.key: b""}, is_bare=True)
        return
    found = finder.in_file(named.text) if named.kind == "file" else await finder.events(named)
    is_found = False
    for one in found:
        is_found = True
        ways = finder.ways(one, routes)
        if one.problem or not ways:
            yield SelectedEvent(one.label, {}, problem=_why_not_selected(one, routes))
        for way in ways:
            more = {one.letter.key: b""} if one.letter and one.letter.key else {}
            own = more | contents(way)
            if named.kind != "key":
                yield SelectedEvent(one.label, own, way.route.name, way.plan.entity)
            elif named.key in own:
                its = {named.key: own[named.key]}  # only this key was named
                yield SelectedEvent(one.label, its, way.route.name, is_bare=True)
            else:
                yield SelectedEvent(
                    one.label, {}, problem=f"this is not its key on route {way.route.name}"
                )
    if is_found or named.kind == "file":
        return
    if routes:
        yield SelectedEvent(str(named), {}, problem=_NO_ROUTE)
        return
    own = {record.key: b"" for record in await finder.records(named, store)}
    yield SelectedEvent(str(named), own, problem="" if own else not_found(named), is_bare=True)


_NO_ROUTE = (
    "the store does not keep the route; with --route, name a file with the event, or use --in FILE"
)
_NOT_FOUND = (
    "not found; the store keeps only the id of the first copy: use a file with the event, or a key"
)


def _why_not_selected(one: FoundEvent, routes: Sequence[str]) -> str:
    """Return why an event was not selected; empty if it only has no key."""
    if one.problem:
        return f"not an event: {one.problem}"
    if one.letter is not None and one.letter.rule and routes and one.letter.route not in routes:
        return f"dead letter {one.letter.number} is of route {one.letter.route}"
    return ""


def not_found(named: EventReference) -> str:
    """Return the message for an id that was not found, with the likely reason."""
    return f"{_NOT_FOUND}{named.hint}"


def note_other_keys() -> None:
    """Note that an event may have other keys."""
    note("only this key was checked: a rule with tiers may know the event by another key")


def note_idempotency_keys() -> None:
    """Note that an Idempotency-Key is not always a key."""
    note(
        "an Idempotency-Key is not always a key: if the rule compares contents, it is made of key "
        "and content; use a file with the event, its id, or --in FILE"
    )


# --- stores and prompts -------------------------------------------------------------------


def require_confirmation(what: str, *, yes: bool) -> None:
    """Raise `UsageError` if the operator cannot be asked and did not pass --yes."""
    if not yes and not sys.stdin.isatty():
        raise click.UsageError(f"{what}; use --yes to confirm without a terminal")


@asynccontextmanager
async def opened_store(setup: Setup, what: str) -> AsyncIterator[Store | None]:
    """Open the store; yield None, with a note, if it is a file that does not exist yet."""
    place = setup.config.store
    if is_missing(place) or lacks_our_tables(place):
        note(f"the store {place} does not exist yet, so there is nothing to {what}")
        yield None
        return
    async with opened(place.opened) as store:
        yield store


@asynccontextmanager
async def store_for_reading(setup: Setup, otherwise: str) -> AsyncIterator[Store | None]:
    """
    Open the store without creating anything; if it cannot be, note *otherwise* and why.

    Nothing is noted if *otherwise* is empty.
    """
    place = setup.config.store
    store: Store | None = None
    problem = ""
    if is_out_of_reach(place):
        problem = f"the store {place} is in the memory of another process"
    elif is_missing(place) or lacks_our_tables(place):
        problem = f"the store {place} does not exist yet"
    else:
        try:
            store = await open_for_reading(place)
        except (StoreError, ConfigError) as error:
            problem = str(error)
    if problem and otherwise:
        note(f"{otherwise}: {problem}")
    try:
        yield store
    finally:
        if store is not None:
            await store.aclose()


@contextmanager
def progress_text(*, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show the progress as text on a terminal, where the total is not known."""
    console = Console(stderr=True)
    bar = Progress(
        BarColumn(bar_width=30),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )
    with bar:
        row = bar.add_task("", total=None)
        yield lambda text: bar.update(row, description=text)
