"""
Whether the process lives, and whether events can pass: for whoever looks after it.

`/healthz` answers as long as the process turns; `/readyz` names what stands in the way, if
anything does. An HTTP source answers both beside its events; a worker that is not called by
anybody listens here for nothing else. It says no more than that, so anybody may ask.
"""

from collections.abc import Callable
from datetime import timedelta
from urllib.parse import urlsplit

import msgspec

from oncebridge.errors import ConfigError
from oncebridge.http.server import Bounds, Request, Response, Server

ALIVE = Response(200, b'{"alive":true}')
_READY = Response(200, b'{"ready":true}')
_NOTHING = Response(404, b'{"error":"nothing is here; ask /healthz or /readyz"}')
_METHOD = Response(
    405, b'{"error":"the method is not for this path"}', headers=(("Allow", "GET, HEAD"),)
)
_encode = msgspec.json.Encoder().encode
_BOUNDS = Bounds(
    max_body=0, head_time=timedelta(seconds=2), idle_time=timedelta(seconds=10), max_connections=256
)


def readiness(reasons: list[str]) -> Response:
    """Say that events can pass, or why not."""
    if not reasons:
        return _READY
    body = _encode({"ready": False, "reasons": reasons})
    return Response(503, body, headers=(("Retry-After", "1"),))


class Health:
    """Listen at `http://HOST:PORT`; *reasons* names what keeps events from passing."""

    def __init__(self, url: str, reasons: Callable[[], list[str]]) -> None:
        host, port = _address(url)
        self._reasons = reasons
        self._server = Server(self._handle, host=host, port=port, bounds=_BOUNDS)

    @property
    def port(self) -> int:
        return self._server.port

    async def open(self) -> None:
        await self._server.open()

    async def aclose(self) -> None:
        await self._server.aclose(timedelta(0))

    def _handle(self, request: Request, respond: Callable[[Response], None]) -> None:
        if request.path not in ("/healthz", "/readyz"):
            respond(_NOTHING)
        elif request.method not in ("GET", "HEAD"):
            respond(_METHOD)
        else:
            respond(ALIVE if request.path == "/healthz" else readiness(self._reasons()))


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    is_plain = not (parts.query or parts.fragment or "@" in parts.netloc)
    if parts.scheme != "http" or not parts.hostname or port is None or not is_plain:
        raise ConfigError("health", "is http://HOST:PORT and no more")
    if parts.path not in ("", "/"):
        raise ConfigError("health", "has no path: it answers at /healthz and /readyz")
    return parts.hostname, port
