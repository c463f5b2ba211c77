"""
The HTTP server of the dashboard.

Each request is a task. The number of requests that run at once is limited, as events come first;
so is the number of large bodies in memory.
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
from oncebridge.dashboard import responses
from oncebridge.dashboard.app import App
from oncebridge.dashboard.auth import AccessControl
from oncebridge.dashboard.data import DashboardData
from oncebridge.dashboard.routes import VIEWS, Views
from oncebridge.dashboard.sessions import Sessions
from oncebridge.dashboard.signatures import CookieSigner
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
"""Extra time before a body that was not received completely is given up."""


class Dashboard:
    """Listen on the address of the setting `dashboard`, and serve pages."""

    def __init__(
        self,
        setup: Setup,
        data: DashboardData,
        *,
        views: Views = VIEWS,
        clock: Clock = system_clock,
        dice: Dice | None = None,
    ) -> None:
        config = setup.config
        self._address = ListenAddress.read(config.dashboard or "", "dashboard")
        token = config.dashboard_token.reveal() if config.dashboard_token else ""
        dice = dice or SystemDice()
        signer = CookieSigner(token, clock=clock, dice=dice)
        sessions = Sessions(data.store, dice)
        self._access = AccessControl(
            config, self._address.host, signer=signer, clock=clock, sessions=sessions
        )
        self._app = App(config, data, self._access, signer, views)
        self._server = Server(
            self._handle,
            host=self._address.host,
            port=self._address.port,
            screen=self._screen,
            bounds=_BOUNDS,
        )
        self._clock = clock
        self._data = data
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._large_bodies = _LargeBodies(_MOST_LARGE, _BOUNDS.body_time.total_seconds() + _SWEPT_S)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The URL, after `open`."""
        return f"http://{self._address.url_host}:{self._server.port}/"

    async def open(self) -> None:
        """Listen, or raise `ConfigError`."""
        if not self._access.is_guarded:
            await self._check_is_loopback()
        try:
            await self._server.open()
        except ConfigError as error:
            raise ConfigError("dashboard", error.message) from error

    async def _check_is_loopback(self) -> None:
        """Raise `ConfigError` if `localhost` resolves to an address that other hosts can reach."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._address.host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return  # `open` reports it
        if not all(is_loopback(str(entry[4][0])) for entry in found):
            raise not_local_error(f"{self._address.url_host}:{self._address.port}")

    async def aclose(self) -> None:
        """Stop listening; running requests have two seconds to finish."""
        await self._server.aclose(timedelta(seconds=2))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._data.aclose()

    def _screen(self, request: Request) -> Response | None:
        refused = self._app.check_before_body(request)
        if (
            refused is None
            and _is_large(request)
            and not self._large_bodies.enter(request, _now_s())
        ):
            refused = self._app.too_many_large_bodies(request)
        return refused

    def _handle(self, request: Request, respond: Callable[[Response], None]) -> None:
        answer_immediately = self._app.answer_immediately(request)
        if answer_immediately is not None:
            respond(answer_immediately)
            return
        task = asyncio.get_running_loop().create_task(self._answer(request, respond))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if _is_large(request) and self._large_bodies.arrive(request):
            task.add_done_callback(self._large_bodies.leave)

    async def _answer(self, request: Request, respond: Callable[[Response], None]) -> None:
        try:
            async with self._slots:
                answer = await self._app.answer(request)
        except Exception as error:  # noqa: BLE001 - the client needs a response
            _log.error("oncebridge.dashboard_failed", extra={"error": type(error).__name__})
            answer = responses.text(request, 500, b"internal error\n")
        now = datetime.fromtimestamp(self._clock() / 1000, UTC)
        dated = (*answer.headers, ("Date", format_datetime(now, usegmt=True)))
        respond(replace(answer, headers=dated))


class _LargeBodies:
    """
    Limit large bodies to *most* at once.

    A body counts from when its head was received until the response. A body that is never
    received completely is not reported; it stops counting after *within_s* seconds.
    """

    def __init__(self, most: int, within_s: float) -> None:
        self._most = most
        self._within_s = within_s
        self._coming: list[tuple[float, Request]] = []
        """Deadline and head of each body that is being received."""
        self._here = 0

    def enter(self, head: Request, now_s: float) -> bool:
        """Reserve a place for the body of *head*; False if there is none."""
        self._coming = [one for one in self._coming if one[0] > now_s]
        if len(self._coming) + self._here >= self._most:
            return False
        self._coming.append((now_s + self._within_s, head))
        return True

    def arrive(self, request: Request) -> bool:
        """Keep the place of a complete *request* until it leaves; False if it has none."""
        head = replace(request, body=b"")
        for at, (_, known) in enumerate(self._coming):
            if known == head:  # equal heads are interchangeable
                del self._coming[at]
                self._here += 1
                return True
        return False

    def leave(self, _: object = None) -> None:
        self._here -= 1


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _is_large(request: Request) -> bool:
    """Return True if the body counts as large; one above the maximum is refused unread."""
    if request.header(b"transfer-encoding") is not None:
        return True
    return _LARGE < int(request.header(b"content-length") or 0) <= _BOUNDS.max_body
