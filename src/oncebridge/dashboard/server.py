"""
Serves the pages.

Each request is a task of its own, and so many at most are at work at once: pages are looked at
beside events, and events come first. Of large bodies so many at most are kept at once.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Final

from msgspec.structs import replace

from oncebridge.base.clock import Clock, Dice, SystemDice, system_clock
from oncebridge.dashboard import responses as answers
from oncebridge.dashboard.app import App
from oncebridge.dashboard.auth import Gate
from oncebridge.dashboard.data import Desk
from oncebridge.dashboard.routes import VIEWS, Views
from oncebridge.dashboard.sessions import Sessions
from oncebridge.dashboard.signatures import Seal
from oncebridge.errors import ConfigError
from oncebridge.http.addresses import ListenAddress, is_loopback
from oncebridge.http.server import Request, Response, Server, ServerLimits
from oncebridge.service.config import Setup
from oncebridge.service.dashboard_checks import not_local_error

_log = logging.getLogger("oncebridge")
_BOUNDS: Final = ServerLimits(
    max_body=7 * 1024 * 1024,  # an event of 2 MiB, of which a form makes up to three times as much
    idle_time=timedelta(seconds=30),
    max_connections=256,
    max_connections_per_peer=128,
)
_AT_ONCE: Final = 16
_LARGE: Final = 64 * 1024
_MOST_LARGE: Final = 8
_SWEPT_S: Final = 5.0
"""After its time is up, a body is given up by then."""


class Dashboard:
    """Listen where `dashboard` says, and answer with pages."""

    def __init__(
        self,
        setup: Setup,
        desk: Desk,
        *,
        views: Views = VIEWS,
        clock: Clock = system_clock,
        dice: Dice | None = None,
    ) -> None:
        config = setup.config
        self._address = ListenAddress.read(config.dashboard or "", "dashboard")
        token = config.dashboard_token.reveal() if config.dashboard_token else ""
        dice = dice or SystemDice()
        seal = Seal(token, clock=clock, dice=dice)
        sessions = Sessions(desk.store, dice)
        self._gate = Gate(config, self._address.host, seal=seal, clock=clock, sessions=sessions)
        self._app = App(config, desk, self._gate, seal, views)
        self._server = Server(
            self._handle,
            host=self._address.host,
            port=self._address.port,
            screen=self._screen,
            bounds=_BOUNDS,
        )
        self._clock = clock
        self._desk = desk
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._room = _Room(_MOST_LARGE, _BOUNDS.body_time.total_seconds() + _SWEPT_S)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where it is, once it is open."""
        return f"http://{self._address.url_host}:{self._server.port}/"

    async def open(self) -> None:
        """Listen, or raise `ConfigError`."""
        if not self._gate.is_guarded:
            await self._check_that_it_is_here()
        try:
            await self._server.open()
        except ConfigError as error:
            raise ConfigError("dashboard", error.message) from error

    async def _check_that_it_is_here(self) -> None:
        """Refuse where even `localhost` stands for an address that others reach."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._address.host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return  # which listening will say in its own words
        if not all(is_loopback(str(entry[4][0])) for entry in found):
            raise not_local_error(f"{self._address.url_host}:{self._address.port}")

    async def aclose(self) -> None:
        """Stop listening; what is being done is given a moment to end."""
        await self._server.aclose(timedelta(seconds=2))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._desk.aclose()

    def _screen(self, request: Request) -> Response | None:
        refused = self._app.screen(request)
        if refused is None and _is_large(request) and not self._room.enter(request, _now_s()):
            refused = self._app.no_room(request)
        return refused

    def _handle(self, request: Request, respond: Callable[[Response], None]) -> None:
        at_once = self._app.at_once(request)
        if at_once is not None:
            respond(at_once)
            return
        task = asyncio.get_running_loop().create_task(self._answer(request, respond))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if _is_large(request) and self._room.arrive(request):
            task.add_done_callback(self._room.leave)

    async def _answer(self, request: Request, respond: Callable[[Response], None]) -> None:
        try:
            async with self._turns:
                answer = await self._app.answer(request)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets an answer
            _log.error("oncebridge.dashboard_failed", extra={"error": type(error).__name__})
            answer = answers.text(request, 500, b"internal error\n")
        now = datetime.fromtimestamp(self._clock() / 1000, UTC)
        dated = (*answer.headers, ("Date", format_datetime(now, usegmt=True)))
        respond(replace(answer, headers=dated))


class _Room:
    """
    Room for large bodies: *most* at once.

    A body has its place from when its head is here until it is answered. Of one that never comes
    whole nobody tells; the server has given it up *within_s* seconds, and so do we.
    """

    def __init__(self, most: int, within_s: float) -> None:
        self._most = most
        self._within_s = within_s
        self._coming: list[tuple[float, Request]] = []
        """Until when each is waited for, and its head."""
        self._here = 0

    def enter(self, head: Request, now_s: float) -> bool:
        """Take a place for what follows *head*; False if there is none."""
        self._coming = [one for one in self._coming if one[0] > now_s]
        if len(self._coming) + self._here >= self._most:
            return False
        self._coming.append((now_s + self._within_s, head))
        return True

    def arrive(self, request: Request) -> bool:
        """Keep the place of *request*, which is whole, until it leaves; False if it has none."""
        head = replace(request, body=b"")
        for at, (_, known) in enumerate(self._coming):
            if known == head:  # of two that are alike, either will do
                del self._coming[at]
                self._here += 1
                return True
        return False

    def leave(self, _: object = None) -> None:
        self._here -= 1


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _is_large(request: Request) -> bool:
    """Return whether a body takes up room; one that is too large is not even read."""
    if request.header(b"transfer-encoding") is not None:
        return True
    return _LARGE < int(request.header(b"content-length") or 0) <= _BOUNDS.max_body
