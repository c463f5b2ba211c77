"""
Record the events of a recording in a store, before the service that uses it goes live.

The events go through the gateways of the service, with its rules and the names of its routes, into
a sink that accepts everything and sends nothing. So keys, entities and conflicts are as the
service would have written them, and an event that arrives again is a duplicate. No dead letters are
written: unreadable and dead events are counted.

It can be run again, and while workers run: known events stay as they are. A window begins when it
is written here, not when the event arrived; the store has no other clock.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Final

from msgspec.structs import replace

from oncebridge.audit.reading import Damage, File, Piece, content_of, read_pieces
from oncebridge.audit.unpacking import Unpacker
from oncebridge.audit.workers import AuditFailed, explain_os_error
from oncebridge.dead_letters.api import DeadLetter
from oncebridge.engine.gateway import Gateway
from oncebridge.engine.router import RouteEntry, Router, RouterAnswer
from oncebridge.engine.settings import Settings
from oncebridge.engine.verdict import Verdict
from oncebridge.errors import StoreUnavailable
from oncebridge.events.event import Event, Unreadable
from oncebridge.service.addresses import StorePlace
from oncebridge.service.config import Route, Setup
from oncebridge.sinks.api import Delivery, SinkAnswer, Yes

BATCH: Final = 2000
_BLOCK: Final = 4 << 20
_PATIENCE: Final = timedelta(seconds=5)
_PAUSES_S: Final = (0.2, 1.0, 3.0, 5.0, 10.0)
"""Pauses between attempts, for a store that throttles or restarts."""
Progress = Callable[[int, int], None]
"""Called with the bytes read so far, and the total."""
_NEW: Final = frozenset({Verdict.DELIVERED, Verdict.STALE, Verdict.UNCHANGED, Verdict.CONFLICT})


class AcceptAllSink:
    """A sink that accepts every event and sends nothing."""

    batch = BATCH
    concurrency = 1

    async def open(self) -> None:
        """Do nothing: there is no connection."""

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        return [_YES] * len(deliveries)

    async def aclose(self) -> None:
        """Do nothing: there is no connection."""


_YES: Final = Yes()


class NoDeadLetters:
    """Discards dead letters: those of a recording were handled before."""

    async def open(self) -> None:
        """Do nothing."""

    async def put(self, letters: Sequence[DeadLetter]) -> None:
        """Discard them."""

    async def list(self, *, after: int = 0, limit: int = 100) -> list[DeadLetter]:  # noqa: ARG002
        return []

    async def drop(self, numbers: Sequence[int]) -> int:  # noqa: ARG002
        return 0

    async def aclose(self) -> None:
        """Do nothing."""


class StoreWarmer:
    """Records the events of *files* in the store at *place*, as *routes* of *setup* would."""

    def __init__(
        self, setup: Setup, place: StorePlace, routes: Sequence[Route], files: Sequence[File]
    ) -> None:
        self._router = _router(setup, place, routes)
        self._files = files
        settings = setup.config.settings()
        apart = self._router.gateways[0].rules.apart
        self._unpacker = Unpacker(settings.limits, bare=settings.bare, apart=apart)
        self._counts: Counter[str] = Counter()
        self._read = 0
        """Bytes on disk that were read so far."""
        self.left = 0
        """Events that could not be recorded."""

    @property
    def events(self) -> int:
        """How many events were processed so far, with any result."""
        return sum(self._counts.values()) - self._counts["unreadable"]

    @property
    def unreadable(self) -> int:
        return self._counts["unreadable"]

    def counts(self) -> dict[str, int]:
        """Return the counts of records by result."""
        names = ("new", "known", "not remembered", "unreadable")
        return {name: self._counts[name] for name in names}

    async def run(self, progress: Progress | None = None) -> None:
        """Process all files; raise the error of the store if it fails."""
        total = sum(file.size for file in self._files)
        await self._router.open()
        try:
            for batch in self._batches():
                await self._take(batch)
                if progress is not None:
                    progress(self._read, total)
        finally:
            await self._router.drain(_PATIENCE)
            await self._router.aclose()

    def _batches(self) -> Iterator[list[Event]]:
        batch: list[Event] = []
        for piece in read_pieces(self._files, block=_BLOCK):
            if isinstance(piece, Damage):
                self._counts["unreadable"] += 1
                continue
            for event in self._events(piece):
                batch.append(event)
                if len(batch) == BATCH:
                    yield batch
                    batch = []
            before = sum(file.size for file in self._files[: piece.file])
            self._read = max(self._read, before + piece.read)
        if batch:
            yield batch

    def _events(self, piece: Piece) -> Iterator[Event]:
        try:
            records = content_of(piece.work).records
        except OSError as error:
            raise AuditFailed(explain_os_error(error)) from None
        for _, raw in records:
            if raw is None:
                self._counts["unreadable"] += 1
                continue
            found: Event | Unreadable = self._unpacker.read(raw)
            if isinstance(found, Event) and not found.bare:
                yield found
                continue
            for event, _ in self._unpacker.unpack(raw):
                if isinstance(event, Unreadable):
                    self._counts["unreadable"] += 1
                else:
                    yield event

    async def _take(self, events: Sequence[Event]) -> None:
        """Process events; retry for a while if the store is unavailable or another worker holds them."""
        for pause_s in (*_PAUSES_S, None):
            if not events:
                return
            answers = await self._router.process(events, patience=_PATIENCE)
            again = []
            for event, answer in zip(events, answers, strict=True):
                if answer.acknowledge:
                    self._counts[_outcome(answer)] += 1
                else:
                    again.append(event)
            events = again
            if events and pause_s is not None:
                await asyncio.sleep(pause_s)
        self.left += len(events)
        if any(gateway.down() for gateway in self._router.gateways):
            raise StoreUnavailable("the store stopped answering; run --warm again, which is safe")


def _outcome(answer: RouterAnswer) -> str:
    if answer.verdict in _NEW:
        return "new"
    return "known" if answer.verdict is Verdict.DUPLICATE else "not remembered"


def _router(setup: Setup, place: StorePlace, routes: Sequence[Route]) -> Router:
    dead = NoDeadLetters()
    ways = [
        RouteEntry(
            Gateway(
                store=place.opened,
                sink=AcceptAllSink(),
                rules=route.rules,
                dead=dead,
                route=route.name,
                settings=_without_sink_limits(route.settings),
            ),
            route.match,
        )
        for route in routes
    ]
    return Router(
        ways,
        dead=dead,
        discard_unrouted=True,
        settings=_without_sink_limits(setup.config.settings()),
    )


def _without_sink_limits(settings: Settings) -> Settings:
    """Return the settings that affect keys and records, without those for a sink."""
    return replace(settings, mode="enforce", on_store_outage="hold", rate=None)
