"""
An HTTP/1.1 server that limits every resource a client can use.

The handler is a plain function: it gets a `Request` and a function to respond with, which
it may call at once or later from the loop. There is no task per request, and no framework.

The states of a connection:

    idle ── first byte ──▶ head ── screen ──▶ body ──▶ busy (in the handler) ──▶ idle
    any of them ── a refusal, or the last response ──▶ lingering ──▶ closed

* One request at a time: pipelined requests wait (at most two reads of data), so responses
  leave in the order of their requests.
* A complete head is parsed by llhttp, and checked by stricter rules of our own, so it does
  not matter how the bytes were split. Anything that two servers in a row might read
  differently (two lengths, folded lines, spaces before a colon, bare line feeds) is refused.
* A body is counted while it arrives, and refused as soon as it exceeds the limit.
* Timeouts are checked by one sweep per server, not by a timer per request.
* After a refusal the connection is read for a moment longer: closing it while the client is
  still sending would reset it and destroy the response.
"""

import asyncio
import errno
import logging
import os
import re
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import cache, lru_cache, partial
from http import HTTPStatus
from math import inf
from typing import Any, cast

from httptools import (
    HttpParserError,
    HttpParserInvalidURLError,
    HttpParserUpgrade,
    HttpRequestParser,
    parse_url,
)
from msgspec import Struct

from oncebridge.errors import ConfigError

_log = logging.getLogger("oncebridge")


class Request(Struct, frozen=True, gc=False):
    """
    A request.

    *path* and *query* are not decoded. Names of *headers* are in lower case; order and
    repeated headers are kept.
    """

    method: str
    path: str
    query: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes = b""
    peer: str = ""
    """The address of the client's connection; empty if it has none."""
    certified: frozenset[str] = frozenset()
    """The names in the client's verified certificate; empty without one."""

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of the header *name* (lower case), or None."""
        for known, value in self.headers:
            if known == name:
                return value
        return None

    def values(self, name: bytes) -> list[bytes]:
        """Return all values of the header *name* (lower case), in order."""
        return [value for known, value in self.headers if known == name]


class Response(Struct, frozen=True):
    """A response. The server adds the length, and whether the connection stays open."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


class ServerLimits(Struct, frozen=True, kw_only=True):
    """Limits of size, time and number."""

    max_body: int = 2 * 1024 * 1024
    max_head: int = 32 * 1024
    """Request line and headers together."""
    head_time: timedelta = timedelta(seconds=10)
    """From the first byte (for the first request: from the connection) to the end of the headers."""
    body_time: timedelta = timedelta(seconds=30)
    """For a complete body; also how long a client may leave responses unread."""
    idle_time: timedelta = timedelta(seconds=75)
    """How long a connection stays open between two requests."""
    max_connections: int = 1000
    max_connections_per_peer: int = 500
    """From one address; IPv6 addresses of the same /64 count as one."""
    max_bodies: int = 64 * 1024 * 1024
    """Bytes of incomplete bodies, over all connections."""


Handler = Callable[[Request, Callable[[Response], None]], None]
Screen = Callable[[Request], Response | None]
_RequestHead = tuple[str, str, str, tuple[tuple[bytes, bytes], ...]]

# The states of a connection; up to _CHUNKS it reads.
_IDLE, _HEAD, _BODY, _CHUNKS, _BUSY, _BLOCKED, _LINGERING, _CLOSED = range(8)
# The kind of the next line of a chunked body.
_SIZE, _END_OF_CHUNK, _TRAILER = range(3)

_STOP_DELAY_S = 0.02  # at a stop, for requests that have arrived and were not read yet
_LINGER_S = 1.0
_WARN_S = 60.0
_NO_CERTIFICATE = ("CERTIFICATE_VERIFY_FAILED", "PEER_DID_NOT_RETURN_A_CERTIFICATE")
_LINGER_BYTES = 16 * 1024 * 1024
_MAX_REJECTED = 240  # so many at once get a 503; connections beyond that are aborted
_MAX_SPARE = 16  # connections beyond the limit that may request a spare path, such as /healthz
_ACCEPTED_AT_ONCE = 64
_MAX_LINE = 256  # a chunk's size and extensions
_FRAMING_BYTES = 64 * 1024  # how much chunking may add to the largest body

_METHODS = {
    name.encode(): name
    for name in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY")
}
_VERSIONS = {b"HTTP/1.1": True, b"HTTP/1.0": False}
_FRAMING = frozenset([b"host", b"content-length", b"transfer-encoding", b"connection", b"expect"])
_HOST_BYTES = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~!$&'()*+;=%:[]"
_METHOD = re.compile(rb"[A-Z][A-Z-]*")
_VERSION = re.compile(rb"HTTP/[0-9]\.[0-9]")
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_QUOTED = rb'"(?:[\t\x20\x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t\x20-\x7e\x80-\xff])*"'
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;%b(?:=(?:%b|%b))?)*" % (_TOKEN, _TOKEN, _QUOTED))
_FIELD = re.compile(rb"%b:[\t\x20-\x7e\x80-\xff]*" % _TOKEN)

_REASONS = {status.value: status.phrase for status in HTTPStatus}
_NAME = re.compile(_TOKEN.decode())
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_SERVER_HEADERS = frozenset(["content-length", "content-type", "transfer-encoding", "connection"])
_BODILESS_STATUSES = frozenset([204, 304])


def refusal(status: int, why: str, *headers: tuple[str, str]) -> Response:
    """Return a response whose body has the reason *why*, which needs no escapes in JSON."""
    return Response(status, b'{"error":"%b"}' % why.encode(), headers=headers)


_BAD_REQUEST = refusal(400, "not a request that can be read safely")
_TOO_SLOW = refusal(408, "the request took too long to arrive")
_NO_LENGTH = refusal(411, "send Content-Length, or a chunked body")
_BODY_TOO_LARGE = refusal(413, "the body is too large")
_NO_SUCH_EXPECTATION = refusal(417, "only 100-continue can be expected")
_HEAD_TOO_LARGE = refusal(431, "the request line and headers are too large")
_FAILED = refusal(500, "internal error")
_NO_SUCH_METHOD = refusal(501, "no such method")
_NO_SUCH_CODING = refusal(501, "the only transfer coding is chunked")
_NO_ROOM = refusal(503, "too many connections", ("Retry-After", "1"))
_NO_MEMORY = refusal(503, "too many unfinished bodies", ("Retry-After", "1"))
_NO_SUCH_VERSION = refusal(505, "only HTTP/1.0 and HTTP/1.1 are supported")


class Server:
    """
    Listen on *host* and *port*, and call *handler* with each request.

    *screen* is called when the headers of a request are complete, and may refuse it before
    the body is read; the connection is then closed. Both are called on the loop and must be
    quick. If one raises, the client gets a 500, and the type of the error is logged.

    At the maximum of connections, a new one replaces the one that has waited longest for a
    request. If every connection has a request in progress, the new one may still request one
    of the *spare* paths (health checks), and gets a 503 for any other.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        host: str,
        port: int,
        screen: Screen | None = None,
        bounds: ServerLimits = ServerLimits(),  # noqa: B008 - frozen
        tls: ssl.SSLContext | None = None,
        spare: Collection[str] = (),
    ) -> None:
        self.handler = handler
        self.screen = screen
        self.bounds = bounds
        self.head_s = bounds.head_time.total_seconds()
        self.body_s = bounds.body_time.total_seconds()
        self.idle_s = bounds.idle_time.total_seconds()
        self.stopping = False
        self.spare_paths = frozenset(spare)
        self._tls = tls
        self._host = host
        self._port = port
        self._listening: list[socket.socket] = []
        self._accept_paused = False  # out of file descriptors; resumed by the next sweep
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._served: dict[_ServerConnection, None] = {}
        self._per_peer: Counter[str] = Counter()  # of the served connections
        self._spare: dict[_ServerConnection, None] = {}
        self._rejected: dict[_ServerConnection, None] = {}
        # Bytes of incomplete bodies, the oldest first.
        self._bodies: dict[_ServerConnection, int] = {}
        self._body_bytes = 0
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._next_sweep: asyncio.TimerHandle | None = None
        self._warn_at_s = 0.0

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._port

    @property
    def connections(self) -> int:
        """The number of served connections."""
        return len(self._served)

    async def open(self) -> None:
        """Listen, or raise `ConfigError` if that is not possible."""
        _check_strictness()
        self._listening = await _listen(self._host, self._port)
        self._port = self._listening[0].getsockname()[1]
        self._start_accepting()
        self._sweep()

    def stop(self) -> None:
        """Accept no new connections, close idle ones, and the others after their response."""
        self.stopping = True
        loop = asyncio.get_running_loop()
        for listening in self._listening:
            loop.remove_reader(listening)
            listening.close()
        self._listening.clear()
        loop.call_later(_STOP_DELAY_S, self._close_idle)

    async def aclose(self, grace: timedelta = timedelta(seconds=5)) -> None:
        """Stop, wait up to *grace* for requests in progress, then abort the rest."""
        self.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace.total_seconds()):
                await self._all_closed.wait()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
        for connection in self._all():
            connection.abort()
        await self._all_closed.wait()
        if self._next_sweep is not None:
            self._next_sweep.cancel()
            self._next_sweep = None

    # --- for the connections -------------------------------------------------------------

    def register(self, connection: "_ServerConnection") -> bool:
        """Add *connection*; return False if the maximum is reached."""
        self._all_closed.clear()
        bounds, peer = self.bounds, connection.address
        is_crowded = self._per_peer[peer] >= bounds.max_connections_per_peer
        if is_crowded:
            has_room = self._make_room([one for one in self._served if one.address == peer])
        else:
            has_room = len(self._served) < bounds.max_connections or self._make_room(self._served)
        if has_room:
            self._served[connection] = None
            self._per_peer[peer] += 1
        elif self.spare_paths and (len(self._spare) < _MAX_SPARE or self._make_room(self._spare)):
            has_room = connection.is_spare = True
            self._spare[connection] = None
        else:
            self._rejected[connection] = None
        return has_room

    def unregister(self, connection: "_ServerConnection") -> None:
        self._release_place(connection)
        self._rejected.pop(connection, None)
        if not (self._served or self._spare or self._rejected):
            self._all_closed.set()

    def note_body_size(self, connection: "_ServerConnection", size: int) -> None:
        """Note that *connection* has *size* bytes of an incomplete body; 0 when it is complete."""
        self._body_bytes += size - self._bodies.get(connection, 0)
        if not size:
            self._bodies.pop(connection, None)
            return
        self._bodies[connection] = size
        # Clients that never complete their bodies must not block those that do.
        while self._body_bytes > self.bounds.max_bodies:
            next(iter(self._bodies)).refuse(_NO_MEMORY)

    # --- inside --------------------------------------------------------------------------

    def _all(self) -> "list[_ServerConnection]":
        return [*self._served, *self._spare, *self._rejected]

    def _make_room(self, connections: "Iterable[_ServerConnection]") -> bool:
        """Close the connection that is idle longest; return False if none is idle."""
        waiting = [one for one in connections if one.is_waiting]
        if not waiting:
            return False
        oldest = min(waiting, key=lambda one: one.waiting_since)
        self._release_place(oldest)
        self._rejected[oldest] = None
        oldest.make_room()
        return True

    def _release_place(self, connection: "_ServerConnection") -> None:
        self._spare.pop(connection, None)
        if connection in self._served:
            del self._served[connection]
            self._per_peer[connection.address] -= 1
            if not self._per_peer[connection.address]:
                del self._per_peer[connection.address]

    def _abort_oldest(self) -> bool:
        """Abort a rejected connection, or else one that is still in its TLS handshake."""
        if self._rejected:
            connection = next(iter(self._rejected))
            del self._rejected[connection]
            connection.abort()
            return True
        if self._tls is None or not self._handshakes:
            return False
        task = next(iter(self._handshakes))
        del self._handshakes[task]
        task.cancel()
        return True

    def _start_accepting(self) -> None:
        loop = asyncio.get_running_loop()
        for listening in self._listening:
            loop.add_reader(listening, self._accept, listening)

    def _close_idle(self) -> None:
        for task in self._handshakes:
            task.cancel()
        for connection in [*self._served, *self._spare]:
            connection.close_if_idle()

    # Not with loop.create_server, which does not count connections in their TLS handshake.
    def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        most = self.bounds.max_connections + _MAX_SPARE + _MAX_REJECTED
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                client, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.error("oncebridge.http_accept_failed", extra={"error": error.strerror})
                self._accept_paused = True
                loop.remove_reader(listening)
                return
            if len(self._all()) + len(self._handshakes) >= most and not self._abort_oldest():
                client.close()
                continue
            client.setblocking(False)
            task = loop.create_task(self._set_up_connection(client))
            self._handshakes[task] = None
            task.add_done_callback(lambda task: self._handshakes.pop(task, None))

    async def _set_up_connection(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        is_tls = self._tls is not None
        try:
            await loop.connect_accepted_socket(
                lambda: _ServerConnection(self, loop, is_tls=is_tls),
                client,
                ssl=self._tls,
                ssl_handshake_timeout=self.head_s if is_tls else None,
                ssl_shutdown_timeout=_LINGER_S if is_tls else None,
            )
        except ssl.SSLError as error:
            self._refused_handshake(error)
        except OSError:
            pass  # the client closed the connection

    def _refused_handshake(self, error: ssl.SSLError) -> None:
        """Log that a client presented no valid certificate, at most once a minute."""
        now = asyncio.get_running_loop().time()
        asks = self._tls is not None and self._tls.verify_mode == ssl.CERT_REQUIRED
        if asks and error.reason in _NO_CERTIFICATE and now >= self._warn_at_s:
            self._warn_at_s = now + _WARN_S
            reason = getattr(error, "verify_message", None) or "the client presented no certificate"
            _log.warning("oncebridge.http_certificate_refused", extra={"reason": reason})

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        shortest = min(self.head_s, self.body_s, self.idle_s)
        self._next_sweep = loop.call_later(min(1.0, shortest / 4), self._sweep)
        now = loop.time()
        for connection in self._all():
            if connection.deadline <= now:
                connection.time_out()
        if self._accept_paused:
            self._accept_paused = False
            self._start_accepting()


def _names(certificate: dict[str, Any] | None) -> frozenset[str]:
    """Return the DNS names, URIs and common names of a verified certificate."""
    if not certificate:
        return frozenset()
    alternative = certificate.get("subjectAltName", ())
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    return frozenset(
        value for kind, value in (*alternative, *subject) if kind in ("DNS", "URI", "commonName")
    )


class _ServerConnection(asyncio.Protocol):
    """One client, one request at a time."""

    def __init__(
        self, server: Server, loop: asyncio.AbstractEventLoop, *, is_tls: bool = False
    ) -> None:
        self._server = server
        self._bounds = server.bounds
        self._time = loop.time
        self._is_tls = is_tls
        self._transport: asyncio.Transport
        self._peer = ""
        self._certified: frozenset[str] = frozenset()
        self.address = ""  # the group by which connections of the peer are counted
        self.is_spare = False
        self._state = _IDLE
        self.waiting_since = 0.0  # for a complete head
        self.deadline = inf
        self._data = b""  # received and not read yet, from _at on
        self._at = 0
        self._advancing = False
        self._paused = False  # reading is paused
        self._blocked = False  # the client does not read its responses
        self._client_done = False  # the client has closed its sending side
        # The request in progress.
        self._number = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._complete = False
        self._head: _RequestHead
        self._body = bytearray()
        self._left = 0
        self._line = _SIZE
        self._framing = 0
        self._is_http11 = True  # HTTP/1.1
        self._keep_alive = True
        self._is_head = False  # it was a HEAD

    # --- called by the transport -------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]) if peer else ""
        if self._is_tls:
            self._certified = _names(transport.get_extra_info("peercert"))
        self.address = _peer_group(self._peer)
        self.waiting_since = self._time()
        self.deadline = self.waiting_since + self._server.head_s
        has_room = self._server.register(self)
        if self._server.stopping:
            self.abort()
        elif not has_room:
            self.refuse(_NO_ROOM)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the signature is asyncio's
        self._state = _CLOSED
        self.deadline = inf
        self._discard_input()
        self._server.unregister(self)

    def data_received(self, data: bytes) -> None:
        if self._state <= _CHUNKS:
            self._data = self._data + data if self._data else data
            self._advance()
        elif self._state <= _BLOCKED:
            self._data += data
            if not self._paused:
                self._paused = True
                self._transport.pause_reading()
        elif self._state == _LINGERING:
            self._left -= len(data)
            if self._left < 0:
                self._close()

    def eof_received(self) -> bool:
        if self._state in (_BUSY, _BLOCKED) and not self._is_tls:
            self._client_done = True
            return True  # it may still read
        self._state = _CLOSED
        self.deadline = self._time() + self._server.body_s
        return False

    def pause_writing(self) -> None:
        self._blocked = True

    def resume_writing(self) -> None:
        self._blocked = False
        if self._state == _BLOCKED:
            self._await_request()

    # --- called by the server ------------------------------------------------------------

    def close_if_idle(self) -> None:
        if self._state in (_IDLE, _BLOCKED):
            self._close()

    @property
    def is_waiting(self) -> bool:
        """True if no request is in progress, so that it can be closed without loss."""
        return self._state <= _HEAD or self._state >= _LINGERING

    def make_room(self) -> None:
        """Close for a new connection, unless this one is closing already."""
        if self._state <= _HEAD:
            self.abort()

    def abort(self) -> None:
        self._state = _CLOSED
        self._transport.abort()

    def time_out(self) -> None:
        """Handle a deadline that has passed."""
        if self._state in (_HEAD, _BODY, _CHUNKS):
            self.refuse(_TOO_SLOW)
        elif self._state in (_IDLE, _LINGERING):
            self._close()
        else:
            self.abort()

    # --- reading -------------------------------------------------------------------------

    def _advance(self) -> None:
        """Read until a response has to be waited for, or more data is needed."""
        self._advancing = True
        try:
            while self._at < len(self._data):
                state = self._state
                if state <= _HEAD:
                    goes_on = self._read_head()
                elif state == _BODY:
                    goes_on = self._read_body()
                elif state == _CHUNKS:
                    goes_on = self._read_chunks()
                else:
                    break
                if not goes_on:
                    break
        finally:
            self._advancing = False
        self._data = self._data[self._at :]
        self._at = 0
        if self._state in (_BODY, _CHUNKS):
            self._server.note_body_size(self, len(self._body))

    def _read_head(self) -> bool:
        data, at = self._data, self._at
        while data.startswith(b"\r\n", at):  # some clients end a body with one too many
            at += 2
        self._is_http11, self._is_head = True, False
        end = data.find(b"\r\n\r\n", at) + 4
        if end < 4:
            self._at = at
            return self._await_head(data[at:])
        self._at = end
        refused = (
            _HEAD_TOO_LARGE if end - at > self._bounds.max_head else self._parse_head(data[at:end])
        )
        if refused is not None:
            self.refuse(refused)
        return refused is None

    def _await_head(self, part: bytes) -> bool:
        if len(part) >= self._bounds.max_head:
            self.refuse(_HEAD_TOO_LARGE)
        elif part and part != b"\r":
            # Refuse other protocols, such as TLS, at once.
            if not 65 <= part[0] <= 90 or part.count(b"\n") != part.count(b"\r\n"):
                self.refuse(_BAD_REQUEST)
            elif self._state == _IDLE:
                self._state = _HEAD
                self.deadline = self._time() + self._server.head_s
        return False

    def _parse_head(self, head: bytes) -> Response | None:
        """Parse a complete *head*; return a response if it is refused."""
        line = head[: head.find(b"\r\n")].split(b" ")
        if len(line) != 3:
            return _BAD_REQUEST
        method = _METHODS.get(line[0])
        modern = _VERSIONS.get(line[2])
        if method is None or modern is None:
            return _unknown(line[0], line[2])
        self._is_http11 = self._keep_alive = modern
        self._is_head = method == "HEAD"
        self._headers = []
        self._complete = False
        try:
            HttpRequestParser(self).feed_data(head)
        except HttpParserUpgrade:
            pass  # a server may ignore the offer to upgrade
        except HttpParserError:
            return _BAD_REQUEST
        target = _path_and_query(line[1], method)
        if target is None or not self._complete:
            return _BAD_REQUEST
        self._head = (method, target[0], target[1], tuple(self._headers))
        return self._parse_framing()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; called by llhttp."""
        self._headers.append((name.lower(), value.strip()))

    def on_headers_complete(self) -> None:
        """Note that the head is complete; called by llhttp."""
        self._complete = True

    def _parse_framing(self) -> Response | None:
        """Determine how the body is read; return a response if the request is refused."""
        said: dict[bytes, bytes] = {}
        for name, value in self._headers:
            if name in _FRAMING:  # joined with a comma, which is invalid in a host or a length
                said[name] = b"%b,%b" % (said[name], value) if name in said else value
        host = said.get(b"host")
        if (self._is_http11 and host is None) or (host and host.translate(None, _HOST_BYTES)):
            return _BAD_REQUEST
        if b"connection" in said:
            wishes = {wish.strip() for wish in said[b"connection"].lower().split(b",")}
            is_kept = self._is_http11 or b"keep-alive" in wishes
            self._keep_alive = is_kept and b"close" not in wishes
        coding = said.get(b"transfer-encoding")
        if coding is not None:
            coding = coding.lower()
            if not self._is_http11 or not coding.endswith(b"chunked") or b"content-length" in said:
                return _BAD_REQUEST
            if coding != b"chunked":
                return _NO_SUCH_CODING
        length = said.get(b"content-length")
        if length is not None and (not length.isdigit() or len(length) > 19):
            return _BAD_REQUEST
        expected = said.get(b"expect", b"").lower() if self._is_http11 else b""
        return self._admit(length, expected, is_chunked=coding is not None)

    def _admit(
        self, declared: bytes | None, expected: bytes, *, is_chunked: bool
    ) -> Response | None:
        if self.is_spare and self._head[1] not in self._server.spare_paths:
            return _NO_ROOM
        if self._server.screen is not None:
            try:
                refused = self._server.screen(
                    Request(*self._head, b"", self._peer, self._certified)
                )
            except Exception as error:  # noqa: BLE001 - the client gets a response in any case
                refused = _failed(error)
            if refused is not None:
                return refused
        if declared is None and not is_chunked and self._head[0] == "POST":
            # Without a length the body would be read as empty, and its events lost.
            return _NO_LENGTH
        length = int(declared or 0)
        if length > self._bounds.max_body:
            return _BODY_TOO_LARGE
        if expected and expected != b"100-continue":
            return _NO_SUCH_EXPECTATION
        data, at = self._data, self._at
        if not is_chunked and len(data) - at >= length:  # all here, as usual
            self._at = at + length
            self._handle(data[at : at + length])
            return None
        self._state = _CHUNKS if is_chunked else _BODY
        self.deadline = self._time() + self._server.body_s
        self._left, self._line, self._framing = length, _SIZE, 0
        if expected and at == len(data):
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None

    def _read_body(self) -> bool:
        piece = self._data[self._at : self._at + self._left]
        self._at += len(piece)
        self._left -= len(piece)
        self._body += piece
        if self._left:
            return False
        self._handle(bytes(self._body))
        return True

    def _read_chunks(self) -> bool:
        data, at = self._data, self._at
        while at < len(data):
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                self._body += piece
                self._left -= len(piece)
                if not self._left:
                    self._line = _END_OF_CHUNK
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                self._at = at
                return self._await_line(data[at:])
            line = data[at:end]
            at = end + 2
            if not line and self._line == _TRAILER:
                self._at = at
                self._handle(bytes(self._body))
                return True
            refused = self._read_chunk_line(line)
            if refused is not None:
                self.refuse(refused)
                return False
        self._at = at
        return False

    def _await_line(self, part: bytes) -> bool:
        if self._line == _TRAILER and self._framing + len(part) > self._bounds.max_head:
            self.refuse(_HEAD_TOO_LARGE)
        elif (
            b"\n" in part
            or (self._line == _SIZE and len(part) > _MAX_LINE + 1)
            or (self._line == _END_OF_CHUNK and part != b"\r")
        ):
            self.refuse(_BAD_REQUEST)
        return False

    def _read_chunk_line(self, line: bytes) -> Response | None:
        """Parse a line between chunks; return a response if it is refused."""
        self._framing += len(line) + 2
        if self._line == _END_OF_CHUNK:
            self._line = _SIZE
            return _BAD_REQUEST if line else None
        if self._line == _TRAILER:  # checked, and dropped
            if self._framing > self._bounds.max_head:
                return _HEAD_TOO_LARGE
            return None if _FIELD.fullmatch(line) else _BAD_REQUEST
        found = _CHUNK.fullmatch(line)
        if found is None or len(line) > _MAX_LINE:
            return _BAD_REQUEST
        size = int(found[1], 16)
        most = self._bounds.max_body
        if len(self._body) + size > most or self._framing > most + _FRAMING_BYTES:
            return _BODY_TOO_LARGE
        self._left = size
        if not size:
            self._line, self._framing = _TRAILER, 0
        return None

    # --- responding ----------------------------------------------------------------------

    def _handle(self, body: bytes) -> None:
        self._state = _BUSY
        self.deadline = inf
        self._number += 1
        if self._body:
            self._drop_body()
        request = Request(*self._head, body, self._peer, self._certified)
        try:
            self._server.handler(request, partial(self._answer, self._number))
        except Exception as error:  # noqa: BLE001 - the client gets a response in any case
            failed = _failed(error)
            if self._state == _BUSY:
                self.refuse(failed)
            elif self._state < _LINGERING:
                self._linger()

    def _answer(self, number: int, response: Response) -> None:
        if number != self._number or self._state != _BUSY:
            return
        wants_more = self._keep_alive and not self.is_spare
        keeps = self._write(response, keeps=wants_more and not self._server.stopping)
        if not keeps:
            if wants_more or self._at < len(self._data):
                self._linger()
            else:
                self._close()
        elif self._blocked:
            self._state = _BLOCKED
            self.deadline = self._time() + self._server.body_s
        else:
            self._await_request()

    def _await_request(self) -> None:
        """Wait for the next request, which may have arrived already."""
        self._state = _IDLE
        self.waiting_since = self._time()
        self.deadline = self.waiting_since + self._server.idle_s
        if self._advancing:
            return
        if self._data:
            self._advance()
        if self._state <= _CHUNKS:
            if self._client_done:
                self._close()
            else:
                self._resume_reading()

    def _write(self, response: Response, *, keeps: bool) -> bool:
        """Send *response*; return True if the connection stays open."""
        modern, bodiless = self._is_http11, self._is_head
        try:
            answer = _encoded(response, keeps=keeps, modern=modern, bodiless=bodiless)
        except Exception as error:  # noqa: BLE001 - the client gets a response in any case
            keeps = False
            answer = _encoded(_failed(error), keeps=False, modern=modern, bodiless=bodiless)
        self._transport.write(answer)
        return keeps

    def refuse(self, response: Response) -> None:
        self._write(response, keeps=False)
        self._linger()

    def _linger(self) -> None:
        """Close the sending side, and read until the client has noticed."""
        if self._client_done:
            self._close()
            return
        self._discard_input()
        self._state = _LINGERING
        self.deadline = self._time() + _LINGER_S
        self._left = _LINGER_BYTES
        if not self._is_tls and not self._transport.is_closing():
            self._transport.write_eof()
        self._resume_reading()

    def _resume_reading(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def _close(self) -> None:
        self._discard_input()
        self._state = _CLOSED
        self.deadline = self._time() + self._server.body_s
        self._transport.close()

    def _discard_input(self) -> None:
        self._data, self._at = b"", 0
        self._headers = []
        self._drop_body()

    def _drop_body(self) -> None:
        self._body = bytearray()
        self._server.note_body_size(self, 0)


# We rely on llhttp to refuse these; older versions accept some of them.
_MUST_BE_REFUSED = (
    b"GET / HTTP/1.1\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX Y: b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n: b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX: \0\r\n\r\n",
    b"GET /\t HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
)


@cache
def _check_strictness() -> None:
    for head in _MUST_BE_REFUSED:
        with suppress(HttpParserError):
            HttpRequestParser(object()).feed_data(head)
            raise ConfigError(
                "", "the installed httptools reads requests too leniently; install 0.6.4 or later"
            )


def _peer_group(peer: str) -> str:
    """Return the group that *peer* is counted in: its address, or its /64 in IPv6."""
    if ":" not in peer:
        return peer
    return socket.inet_pton(socket.AF_INET6, peer.partition("%")[0])[:8].hex()


def _failed(error: Exception) -> Response:
    # The type alone: a message might quote the payload.
    _log.error("oncebridge.http_handler_failed", extra={"error": type(error).__name__})
    return _FAILED


def _unknown(method: bytes, version: bytes) -> Response:
    if version not in _VERSIONS:
        return _NO_SUCH_VERSION if _VERSION.fullmatch(version) else _BAD_REQUEST
    is_word = _METHOD.fullmatch(method) and method != b"CONNECT"
    return _NO_SUCH_METHOD if is_word else _BAD_REQUEST


def _path_and_query(target: bytes, method: str) -> tuple[str, str] | None:
    """Return the path and the query of a request target; None if it is not supported."""
    if b"#" in target or not target.isascii():
        return None
    if target.startswith(b"/"):
        path, _, query = target.decode("ascii").partition("?")
        return path, query
    if target == b"*":
        return ("*", "") if method == "OPTIONS" else None
    try:
        url = parse_url(target)
    except HttpParserInvalidURLError:
        return None
    if (url.schema or b"").lower() not in (b"http", b"https") or not url.host:
        return None
    return (url.path or b"/").decode("ascii"), (url.query or b"").decode("ascii")


# --- writing ----------------------------------------------------------------------------


def _encoded(response: Response, *, keeps: bool, modern: bool, bodiless: bool) -> bytes:
    body = response.body
    start = _start(response.status, response.content_type if body else "")
    fields = _fields(response.headers) if response.headers else b""
    if not keeps:
        fields += b"Connection: close\r\n"
    elif not modern:
        fields += b"Connection: keep-alive\r\n"
    if response.status in _BODILESS_STATUSES:
        if body:
            raise ValueError(f"a response with status {response.status} must not have a body")
        return b"%b%b\r\n" % (start, fields)
    shown = b"" if bodiless else body
    return b"%bContent-Length: %d\r\n%b\r\n%b" % (start, len(body), fields, shown)


@lru_cache(256)
def _start(status: int, content_type: str) -> bytes:
    if not 200 <= status <= 599:
        raise ValueError("a status must be from 200 to 599")
    line = f"HTTP/1.1 {status} {_REASONS.get(status, '')}\r\n"
    if not _VALUE.fullmatch(content_type):
        raise ValueError("a content type must be one line of text")
    return (f"{line}Content-Type: {content_type}\r\n" if content_type else line).encode("latin-1")


def _fields(headers: tuple[tuple[str, str], ...]) -> bytes:
    for name, value in headers:
        is_valid = _NAME.fullmatch(name) and _VALUE.fullmatch(value)
        if not is_valid or name.lower() in _SERVER_HEADERS:
            raise ValueError("a header must be a name that the server does not set, and one line")
    return "".join(f"{name}: {value}\r\n" for name, value in headers).encode("latin-1")


# --- listening --------------------------------------------------------------------------

_NOT_LOCAL = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


async def _listen(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of *host*, on the same port."""
    if not 0 <= port <= 65535:
        raise ConfigError("", f"{host}:{port}: the port must be from 0 to 65535")
    listening: list[socket.socket] = []
    problem: OSError | None = None
    for family, address in await _addresses(host, port):
        if listening:  # port 0 was asked for, and the first has picked one
            address = (address[0], listening[0].getsockname()[1], *address[2:])  # noqa: PLW2901
        try:
            sock = socket.create_server(address, family=family, backlog=1024)
            sock.setblocking(False)
            listening.append(sock)
        except OSError as error:
            # A name may have an IPv6 address although this machine has no IPv6.
            if problem is None or error.errno not in _NOT_LOCAL:
                problem = error
    if problem is not None and not (listening and problem.errno in _NOT_LOCAL):
        for sock in listening:
            sock.close()
        raise ConfigError("", f"{host}:{port}: {_advice(problem)}") from problem
    return listening


async def _addresses(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            "", f"{host}:{port}: the host name was not found; write an address of this machine"
        ) from error
    return list(dict.fromkeys((entry[0], entry[4]) for entry in found))


def _advice(problem: OSError) -> str:
    match problem.errno:
        case errno.EADDRINUSE:
            return "another program uses this port already; stop it, or choose another port"
        case errno.EADDRNOTAVAIL | errno.EAFNOSUPPORT:
            return (
                "is not an address of this machine; use 127.0.0.1 to be reachable from this "
                "machine only, or 0.0.0.0 from everywhere"
            )
        case errno.EACCES | errno.EPERM:
            return "ports below 1024 need special privileges; choose 1024 or above"
        case _:
            return f"cannot listen there ({os.strerror(problem.errno or 0)})"
