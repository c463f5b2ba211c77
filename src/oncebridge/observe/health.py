"""
The endpoints `/healthz`, `/readyz` and `/metrics`.

`/healthz` answers while the event loop runs; `/readyz` lists the reasons why events cannot be
delivered. An HTTP source answers both on its own port; other workers listen here. `/metrics` is for
Prometheus: numbers, and the names of routes and rules. None of them contains events or secrets, so
no authentication is needed.
"""

import asyncio
import gzip
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Final
from urllib.parse import urlsplit

import msgspec

from oncebridge.errors import ConfigError
from oncebridge.http.health import ALIVE, readiness
from oncebridge.http.server import Request, Response, Server, ServerLimits
from oncebridge.observe.report import Report

_log = logging.getLogger("oncebridge")

_METHOD = Response(
    405, b'{"error":"method not allowed for this path"}', headers=(("Allow", "GET, HEAD"),)
)
_FAILED = Response(500, b'{"error":"internal error"}')
_encode = msgspec.json.Encoder().encode
_BOUNDS = ServerLimits(
    max_body=0,
    head_time=timedelta(seconds=2),
    idle_time=timedelta(seconds=10),
    max_connections=256,
    max_connections_per_peer=128,
)
_SMALL: Final = 1024
_LEVEL: Final = 3
"""The gzip level: half the time of the default, and hardly larger."""

Respond = Callable[[Response], None]
Page = Callable[[Request, Respond], None]


def listeners(
    health: str | None,
    metrics: str | None,
    reasons: Callable[[], list[str]],
    report: Callable[[], Report],
) -> "list[Health]":
    """Return the servers for *health* and *metrics*; one if the addresses are equal."""
    if health and metrics and _address(health, "health") == _address(metrics, "metrics"):
        return [Health(health, reasons, report)]
    made = [Health(health, reasons)] if health else []
    return [*made, Health(metrics, report=report)] if metrics else made


class Health:
    """
    Listen at `http://HOST:PORT`.

    *reasons* returns why the worker is not ready; *report* returns the measurements. Endpoints
    without their function are not served.
    """

    def __init__(
        self,
        url: str,
        reasons: Callable[[], list[str]] | None = None,
        report: Callable[[], Report] | None = None,
    ) -> None:
        self._setting = "health" if reasons is not None else "metrics"
        host, port = _address(url, self._setting)
        self._pages: dict[str, Page] = {}
        if reasons is not None:
            self._pages["/healthz"] = lambda _, respond: respond(ALIVE)
            self._pages["/readyz"] = lambda _, respond: respond(readiness(reasons()))
        if report is not None:
            self._pages["/metrics"] = MetricsPage(report)
        self._nothing = _nothing(list(self._pages))
        self._server = Server(self._handle, host=host, port=port, bounds=_BOUNDS, spare=self._pages)

    @property
    def port(self) -> int:
        return self._server.port

    async def open(self) -> None:
        try:
            await self._server.open()
        except ConfigError as error:
            raise ConfigError(self._setting, error.message) from error

    async def aclose(self) -> None:
        await self._server.aclose(timedelta(0))

    def _handle(self, request: Request, respond: Respond) -> None:
        page = self._pages.get(request.path)
        if page is None:
            respond(self._nothing)
        elif request.method not in ("GET", "HEAD"):
            respond(_METHOD)
        else:
            page(request, respond)


class MetricsPage:
    """
    Answer with *report* in the format of Prometheus.

    It is encoded in a thread, one at a time: concurrent requests share the result.
    """

    def __init__(self, report: Callable[[], Report]) -> None:
        try:
            from oncebridge.observe import prometheus  # noqa: PLC0415 - most measure nothing
        except ImportError as error:
            raise ConfigError(
                "metrics",
                f"needs a package that is not installed ({error.name or error}); "
                "pip install 'oncebridge[service]'",
            ) from error
        self._report = report
        self._write = prometheus.exposition
        self._content_type = prometheus.CONTENT_TYPE
        self._beside = ThreadPoolExecutor(1, "oncebridge-metrics")
        self._writing: asyncio.Future[tuple[bytes, bytes]] | None = None

    def __call__(self, request: Request, respond: Respond) -> None:
        """Answer *request* when the page is encoded."""
        if self._writing is None:
            # On the event loop, so that nothing changes meanwhile.
            report = self._report()
            loop = asyncio.get_running_loop()
            self._writing = loop.run_in_executor(self._beside, self._written, report)
            self._writing.add_done_callback(self._wrote)
        packed = _takes_gzip(request)
        self._writing.add_done_callback(lambda done: respond(self._response(done, packed=packed)))

    def _written(self, report: Report) -> tuple[bytes, bytes]:
        plain = self._write(report)
        return plain, gzip.compress(plain, _LEVEL, mtime=0)

    def _wrote(self, done: "asyncio.Future[tuple[bytes, bytes]]") -> None:
        self._writing = None
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.error("oncebridge.metrics_failed", extra={"error": type(error).__name__})

    def _response(self, done: "asyncio.Future[tuple[bytes, bytes]]", *, packed: bool) -> Response:
        if done.cancelled() or done.exception() is not None:
            return _FAILED
        plain, small = done.result()
        if not packed or len(plain) < _SMALL:
            return Response(200, plain, self._content_type, (("Vary", "Accept-Encoding"),))
        headers = (("Vary", "Accept-Encoding"), ("Content-Encoding", "gzip"))
        return Response(200, small, self._content_type, headers)


def _takes_gzip(request: Request) -> bool:
    """Return True if gzip is accepted with a weight above 0."""
    accepted = b",".join(request.values(b"accept-encoding")).decode("latin-1").lower()
    for part in accepted.split(","):
        coding, _, weight = part.replace(" ", "").partition(";")
        if coding in ("gzip", "x-gzip"):
            return weight.removeprefix("q=").strip("0.") != "" or not weight
    return False


def _nothing(paths: list[str]) -> Response:
    return Response(404, _encode({"error": f"not found; use {' or '.join(paths)}"}))


def _address(url: str, setting: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    is_plain = not (parts.query or parts.fragment or "@" in parts.netloc)
    if parts.scheme != "http" or not parts.hostname or port is None or not is_plain:
        raise ConfigError(setting, "must be http://HOST:PORT, without more")
    if parts.path not in ("", "/"):
        paths = "/metrics" if setting == "metrics" else "/healthz and /readyz"
        raise ConfigError(setting, f"must have no path: it serves {paths}")
    return parts.hostname, port
