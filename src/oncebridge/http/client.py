"""
An HTTP client for one target that reports whether a request can have reached it.

It is an asyncio protocol directly on the transport: that costs a tenth of the CPU of common
clients, and they do not report whether any part of a failed request can have reached the
target, which a sink has to know. A request ends in one of three ways:

- a `ClientResponse`, with any status;
- `NotSent`: nothing was written (no such name, refused, no TLS, address not allowed);
- `Unclear`: something was written, and no complete response arrived.

Nothing is sent twice: no redirect is followed and no request retried, not even one on a
connection that the target was just closing. There is no timeout for a response; the caller
sets one by cancelling, which also closes the connection.

Connections are kept and reused, the most recent first. There are as many as concurrent
requests, so the caller limits their number. A client belongs to the loop it is used in.

A proxy from the environment (`oncebridge.http.proxy`) gets a tunnel (CONNECT) for `https://`,
with TLS to the target inside it, and complete requests for `http://`. Until a tunnel is open
nothing has reached the target, so a proxy that refuses one, or hangs, is a `NotSent`.
"""

import asyncio
import logging
import os
import re
import select
import socket
import ssl
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Final, cast

import httptools
from msgspec import Struct

from oncebridge.errors import OncebridgeError
from oncebridge.http.addresses import AddressRefused, Endpoint, numeric_address, resolve_allowed
from oncebridge.http.proxy import proxy_for
from oncebridge.http.target import VISIBLE, HttpTarget

_log = logging.getLogger("oncebridge")

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_BAD_VALUE = re.compile(r"[^\t\x20-\x7e\x80-\xff]")
_TIMEOUT = re.compile(rb"(?i)\btimeout\s*=\s*\"?(\d{1,9})")
_RESERVED_HEADERS = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "expect", "te"}
)
"""Headers about the transfer of a request; the caller cannot set them."""
_BODILESS_METHODS = frozenset({"GET", "HEAD"})
"""Methods without a Content-Length if there is no body."""

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r]")

_MAX_HEAD: Final = 65536  # the maximum size of a response until its head is complete
_CHECK_AFTER_S: Final = 0.05  # a connection that was idle for longer is checked before it is used
_REFUSALS = (
    *("CERTIFICATE_REQUIRED", "BAD_CERTIFICATE", "UNSUPPORTED_CERTIFICATE", "UNKNOWN_CA"),
    *("CERTIFICATE_REVOKED", "CERTIFICATE_EXPIRED", "CERTIFICATE_UNKNOWN", "ACCESS_DENIED"),
)


class NotSent(OncebridgeError):
    """No part of the request can have reached the target; the message says why."""


class Unclear(OncebridgeError):
    """The request was written, at least in part, and no complete response arrived."""


class ClientResponse(Struct, frozen=True, gc=False):
    """The response of the target."""

    status: int
    headers: dict[bytes, bytes]
    """By name in lower case; of several with the same name, the last."""
    body: bytes
    """At most `max_answer` bytes; the rest was not read."""


def check_header(name: str, value: str) -> None:
    """Raise a ValueError if this cannot be a header of a request; the value is not quoted."""
    if not _TOKEN.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a header")
    if name.lower() in _RESERVED_HEADERS:
        raise ValueError(f"the header {name} is set by the client itself")
    if _BAD_VALUE.search(value):
        raise ValueError(
            f"the value of the header {name} has a line break, another control character "
            "or one outside of Latin-1"
        )


class _ClientConnection(asyncio.Protocol):
    """
    One connection: a request, its response, the next request.

    *waiter* is set exactly while a request is in progress.
    """

    def __init__(self, pool: "_Pool") -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport
        self.waiter: asyncio.Future[ClientResponse] | None = None
        self.idle_since = 0.0
        self.idle_s = pool.idle_s
        self._keep_alive = b""
        self._is_first = True
        self._is_head = False
        self._clear()

    def _clear(self) -> None:
        self._seen = 0
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._left = self._pool.max_answer
        self._begun = False  # the head is complete, the body follows
        self._complete = False
        self._keep = False

    def send(
        self, request: bytes, loop: asyncio.AbstractEventLoop, *, is_head: bool = False
    ) -> asyncio.Future[ClientResponse]:
        """Write a complete request; return the future of its response."""
        if self.transport.is_closing():
            raise NotSent("connection closed")
        self._is_head = is_head
        self.waiter = waiter = loop.create_future()
        self.transport.write(request)
        return waiter

    def is_stale(self) -> bool:
        """Return True if data has arrived that the loop has not read yet."""
        look = select.poll()
        look.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(look.poll(0))

    def abort(self) -> None:
        """Close at once; a request in progress is not notified."""
        self.waiter = None
        self._pool.forget(self)
        self.transport.abort()

    # --- from the transport ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        if self.waiter is None:
            self.abort()  # there was no request
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            # A complete response counts even if invalid data follows it.
            self._keep = False
            if not self._complete:
                self._fail(Unclear("the answer is not HTTP"))
                return
        if self._complete:
            self._finish_request()
            return
        self._seen += len(data)
        if self._seen > _MAX_HEAD:
            self._check_size()

    def eof_received(self) -> None:
        # The transport itself would first try to write the rest of the request.
        if self.waiter is None:
            self.abort()
        elif self._begun and self._ends_at_close():
            self._finish_request()
        elif self._seen:
            self._fail(Unclear("connection closed in the middle of the answer"))
        else:
            self._fail(Unclear("connection closed without an answer"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.closed(self)
        if exc is None or self.waiter is None:
            self.eof_received()
        elif self._is_first and not self._seen and _is_refusal(exc):
            # With TLS 1.3 our handshake is complete before the server has seen our certificate.
            self._fail(NotSent(f"TLS: {_reason(exc)}"))
        else:
            self._fail(Unclear(_reason(exc)))

    # --- from the parser ---------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            raise EOFError  # a second response to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._begun:  # else it is a trailer
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._begun = True
        if self._is_head and self._parser.get_status_code() >= 200:
            self.on_message_complete()  # no body follows, whatever the Content-Length

    def on_body(self, body: bytes) -> None:
        if self._is_head:
            self._keep = False  # a body must not follow a HEAD
            return
        if self._left > 0:
            self._body.append(body[: self._left])
        self._left -= len(body)
        if self._left < 0:
            self._complete = True
            raise EOFError  # the rest is not needed

    def on_message_complete(self) -> None:
        if self._complete:
            return  # already completed by the head
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            self._headers = {}  # interim; the final response follows
            self._begun = False
        else:
            self._keep = self._parser.should_keep_alive()
            if self._pool.requires_keep_alive:
                names = (b"connection", b"proxy-connection")
                said = b",".join([self._headers.get(name, b"").lower() for name in names])
                self._keep = self._keep and b"keep-alive" in said
            self._complete = True

    # --- the end of a request ----------------------------------------------------------

    def _finish_request(self) -> None:
        """Set the response, and return the connection to the pool if it can be reused."""
        waiter = cast("asyncio.Future[ClientResponse]", self.waiter)
        status, body = self._parser.get_status_code(), b"".join(self._body)
        answer = ClientResponse(status, self._headers, body)
        transport = self.transport
        if (
            self._keep
            and not waiter.done()  # cancelled; the connection is about to be closed
            and not transport.get_write_buffer_size()
            and not transport.is_closing()
        ):
            self.waiter = None
            keep_alive = self._headers.get(b"keep-alive", b"")
            if keep_alive != self._keep_alive:
                self._keep_alive = keep_alive
                self.idle_s = self._pool.idle_time_of(keep_alive)
            if self._is_head:  # the old parser still expects the body
                self._parser = httptools.HttpResponseParser(self)
            self._is_first = False
            self._clear()
            self._pool.release(self)
        else:
            self.abort()
        if not waiter.done():
            waiter.set_result(answer)

    def _fail(self, error: OncebridgeError) -> None:
        waiter = self.waiter
        self.abort()
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def _check_size(self) -> None:
        """Stop a response with an endless head, or with endless chunk framing or trailers."""
        if not self._begun:
            self._fail(Unclear("the head of the answer is too large"))
        elif self._seen > _MAX_HEAD + 8 * self._pool.max_answer:
            self._keep = False
            self._finish_request()

    def _ends_at_close(self) -> bool:
        coding = self._headers.get(b"transfer-encoding", b"").lower()
        return b"content-length" not in self._headers and b"chunked" not in coding


class _Pool:
    """The open connections of a client, and which of them are idle."""

    def __init__(self, *, idle_s: float, max_answer: int) -> None:
        self.idle_s = idle_s
        self.max_answer = max_answer
        self.is_closed = False
        self.requires_keep_alive = False
        """Keep a connection only if the response says so: some proxies close it silently."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[_ClientConnection, None] = {}
        self._idle: dict[_ClientConnection, None] = {}  # the most recently used last
        self._sweeper: asyncio.TimerHandle | None = None
        self._all_closed = asyncio.Event()
        self._all_closed.set()

    def bound_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop; looked up once, because Python 3.11 makes a system call for it."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def take(self, now: float) -> _ClientConnection | None:
        """Return the most recently used connection that is still usable; None if there is none."""
        while self._idle:
            connection, _ = self._idle.popitem()
            rested_s = now - connection.idle_since
            is_fresh = rested_s < _CHECK_AFTER_S
            if rested_s < connection.idle_s and (is_fresh or not connection.is_stale()):
                return connection
            connection.abort()
        return None

    def release(self, connection: _ClientConnection) -> None:
        """Keep a connection after its response for the next request."""
        if connection.idle_s <= 0 or self.is_closed:
            connection.abort()
            return
        loop = self.bound_loop()
        connection.idle_since = loop.time()
        self._idle[connection] = None
        if self._sweeper is None:
            self._sweeper = loop.call_later(self.idle_s, self._sweep)

    def idle_time_of(self, keep_alive: bytes) -> float:
        """Return how long a connection with this `Keep-Alive` header may be idle."""
        found = _TIMEOUT.search(keep_alive)
        # One second less, so that no request is sent just when the target closes.
        return min(self.idle_s, int(found[1]) - 1) if found else self.idle_s

    def opened(self, connection: _ClientConnection) -> None:
        self._open[connection] = None
        self._all_closed.clear()

    def forget(self, connection: _ClientConnection) -> None:
        """Do not use a connection again."""
        self._idle.pop(connection, None)

    def closed(self, connection: _ClientConnection) -> None:
        """Note that a connection is closed."""
        self._open.pop(connection, None)
        if not self._open:
            self._all_closed.set()

    async def aclose(self) -> None:
        self.is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in list(self._open):
            connection.transport.abort()
        await self._all_closed.wait()

    def _sweep(self) -> None:
        """Close the connections that were idle too long; one timer serves all of them."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in [c for c in self._idle if now - c.idle_since >= c.idle_s]:
            connection.abort()
        self._sweeper = loop.call_later(self.idle_s, self._sweep) if self._idle else None


class Client:
    """
    Send requests to the one target at *url*.

    *headers* are sent with every request. An idle connection is kept for *idle_time*, or as
    long as the target asks for if that is less. At most *max_answer* bytes of a response's
    body are kept; a longer one is cut, and its connection closed. Certificates are verified
    against the system's authorities unless *tls* is set. The target must have a public
    address, or be written as localhost, unless *allow_private*; a proxy may have any address.

    The constructor raises `ValueError` for an invalid *url* or header, and `ConfigError` for
    an invalid proxy.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Iterable[tuple[str, str]] = (),
        connect_timeout: timedelta = timedelta(seconds=5),
        idle_time: timedelta = timedelta(seconds=30),
        max_answer: int = 65536,
        allow_private: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.target = HttpTarget.parse(url)
        self._fixed = self._write_fixed(list(headers))
        self._starts: dict[str, bytes] = {}
        self._names: set[str] = set()
        self._connect_s = connect_timeout.total_seconds()
        self._allow_private = allow_private
        if self.target.is_tls and tls is None:
            tls = ssl.create_default_context()
            tls.set_alpn_protocols(["http/1.1"])
        self._tls = tls if self.target.is_tls else None
        self._pool = _Pool(idle_s=idle_time.total_seconds(), max_answer=max_answer)
        self._prefix = ""
        self._tunnel = b""
        self._through = ""
        self._proxy = proxy_for(self.target)
        if self._proxy is not None:
            self._use_proxy(self._proxy)

    async def post(
        self, body: bytes, headers: Sequence[tuple[str, str]] = (), *, method: str = "POST"
    ) -> ClientResponse:
        """
        Send one request, and return its response or raise `NotSent` or `Unclear`.

        Raise `ValueError`, and send nothing, if a header is invalid.
        """
        start = self._starts.get(method)
        if start is None:
            start = self._starts[method] = self._start_line(method, self.target.path)
        return await self._send(self._join(start, body, headers))

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Sequence[tuple[str, str]] = (),
    ) -> ClientResponse:
        """Send one request as `post` does, but to *path* (with its query, encoded) at the host."""
        if not (path.startswith("/") and VISIBLE.fullmatch(path)):
            raise ValueError("a path starts with / and is percent-encoded")
        start = self._start_line(method, path)
        has_length = bool(body) or method not in _BODILESS_METHODS
        request = self._join(start, body, headers, has_length=has_length)
        return await self._send(request, is_head=method == "HEAD")

    async def _send(self, request: bytes, *, is_head: bool = False) -> ClientResponse:
        loop = self._pool.bound_loop()
        connection = self._pool.take(loop.time()) or await self._connect()
        waiter = connection.send(request, loop, is_head=is_head)
        try:
            return await waiter
        finally:
            # Cancelled. After a response the connection would be idle, or in use by another.
            if connection.waiter is waiter:
                connection.abort()

    async def aclose(self) -> None:
        """Close all connections; requests in progress end as `Unclear`. May be called again."""
        await self._pool.aclose()

    # --- the request -------------------------------------------------------------------

    def _join(
        self,
        start: bytes,
        body: bytes,
        headers: Sequence[tuple[str, str]],
        *,
        has_length: bool = True,
    ) -> bytes:
        names = self._names
        lines = ""
        for name, value in headers:
            if name not in names or not (value.isascii() and value.isprintable()):
                check_header(name, value)
                names.add(name)
            lines += f"{name}: {value}\r\n"
        lines += f"Content-Length: {len(body)}\r\n\r\n" if has_length else "\r\n"
        return b"%b%b%b" % (start, lines.encode("latin-1"), body)

    def _start_line(self, method: str, path: str) -> bytes:
        if not _TOKEN.fullmatch(method):
            raise ValueError(f"{method!r} is not a method")
        host = self.target.host_header
        start = f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {host}\r\n{self._fixed}"
        return start.encode("latin-1")

    def _write_fixed(self, headers: list[tuple[str, str]]) -> str:
        for name, value in headers:
            check_header(name, value)
        if self.target.authorization:
            if any(name.lower() == "authorization" for name, _ in headers):
                raise ValueError(
                    "both a user in the URL and an Authorization header are set; remove one"
                )
            headers.append(("Authorization", self.target.authorization))
        return "".join(f"{name}: {value}\r\n" for name, value in headers)

    def _use_proxy(self, proxy: HttpTarget) -> None:
        """Prepare the requests to *proxy*: complete ones for `http://`, CONNECT for `https://`."""
        target = self.target
        authorization = proxy.authorization and f"Proxy-Authorization: {proxy.authorization}\r\n"
        if target.is_tls:
            where = target.authority
            tunnel = f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n{authorization}\r\n"
            self._tunnel = tunnel.encode("latin-1")
        else:
            self._prefix = f"http://{target.host_header}"
            self._fixed += f"{authorization}Connection: keep-alive\r\n"
            self._pool.requires_keep_alive = True
        self._through = f"proxy {proxy.authority}: "
        fields = {"target": target.host_header, "proxy": proxy.authority}
        _log.info("oncebridge.proxy", extra=fields)

    # --- connections -------------------------------------------------------------------

    async def _connect(self) -> _ClientConnection:
        """Try the addresses in turn; each gets an equal share of the remaining time."""
        if self._pool.is_closed:
            raise NotSent("the client is closed")
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._connect_s
        failure = late = self._not_sent(f"no connection within {self._connect_s:g} s")
        try:
            async with asyncio.timeout_at(ends):
                endpoints = await self._endpoints()
        except AddressRefused as error:
            raise NotSent(str(error)) from None
        except TimeoutError:
            raise late from None
        except OSError as error:
            raise self._not_sent(_reason(error)) from None
        for tried, endpoint in enumerate(endpoints):
            share = (ends - loop.time()) / (len(endpoints) - tried)
            try:
                async with asyncio.timeout(share):
                    connection = await self._connect_to(endpoint)
            except TimeoutError:
                failure = late
            except OSError as error:
                failure = self._not_sent(_reason(error))
            else:
                if self._pool.is_closed:
                    connection.abort()
                    raise NotSent("the client is closed")
                return connection
        raise failure

    async def _endpoints(self) -> list[Endpoint]:
        """Return the addresses to connect to; those of the proxy if there is one."""
        target, proxy = self.target, self._proxy
        if proxy is None or numeric_address(target.host):
            found = await resolve_allowed(
                target.host, target.port, allow_private=self._allow_private
            )
        if proxy is not None:
            found = await resolve_allowed(proxy.host, proxy.port, allow_private=True)
        return found

    async def _connect_to(self, endpoint: Endpoint) -> _ClientConnection:
        loop = asyncio.get_running_loop()
        sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, endpoint.address)
            if self._tunnel:
                await self._open_tunnel(sock)
        except BaseException:
            sock.close()
            raise
        connection = _ClientConnection(self._pool)
        try:
            await loop.create_connection(
                lambda: connection,
                sock=sock,
                ssl=self._tls,
                server_hostname=self.target.host if self._tls else None,
            )
        except BaseException:
            # If we are cancelled just when the connection is made, uvloop closes the transport
            # without calling connection_lost; `aclose` would wait for it for ever.
            self._pool.closed(connection)
            raise
        return connection

    async def _open_tunnel(self, sock: socket.socket) -> None:
        """Have the proxy connect to the target, or raise `NotSent`."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, self._tunnel)
        head = b""
        while b"\r\n\r\n" not in head:
            data = await loop.sock_recv(sock, 4096)
            head += data
            if not data or len(head) > _MAX_HEAD:
                raise self._not_sent("no complete response to CONNECT")
        found = _STATUS.match(head)
        status = int(found[1]) if found else 0
        if status == 407:
            raise self._not_sent("HTTP 407: check the user and password in HTTPS_PROXY")
        if not 200 <= status < 300:
            raise self._not_sent(f"HTTP {status} to CONNECT" if found else "it does not speak HTTP")
        if head.partition(b"\r\n\r\n")[2]:
            raise self._not_sent("it sent data after its response to CONNECT")

    def _not_sent(self, reason: str) -> NotSent:
        return NotSent(f"{self._through}{reason}")


def _is_refusal(error: Exception) -> bool:
    reason = (error.reason or "") if isinstance(error, ssl.SSLError) else ""
    return reason.endswith(_REFUSALS)


def _reason(error: Exception) -> str:
    """Return what failed, without any text of the target."""
    match error:
        case ssl.SSLCertVerificationError():
            return f"certificate verify failed: {error.verify_message}"
        case ssl.SSLError():
            return f"TLS failed: {(error.reason or 'no reason given').replace('_', ' ').lower()}"
        case socket.gaierror():
            is_final = error.errno == socket.EAI_NONAME
            return "no such host name" if is_final else "the host name cannot be looked up now"
        case ConnectionRefusedError():
            return "connection refused"
        case ConnectionResetError():
            return "connection reset"
        case OSError(errno=int(number)):
            return os.strerror(number).lower()
        case _:
            return type(error).__name__
