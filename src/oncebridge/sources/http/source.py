"""
Events by HTTP: one, an array, or one per line.

The status is 200 if each event is delivered, a duplicate, or stored in the dead letters; 202 if
each is stored on disk, to be forwarded (with a spool); 503 if at least one has to be sent again.

EventBridge drops events that are refused with 400, 403, 404, 413 or 422, so a body that cannot be
parsed is stored in the dead letters and answered with 200. The response is sent within
*answer_within* (API destinations wait 5 seconds); a delivery that takes longer continues, and the
retry finds it busy or done. A client that disconnects changes nothing.
"""

import asyncio
import logging
import math
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Self
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, field

from oncebridge import __version__
from oncebridge.base.options import Doc, Size
from oncebridge.base.secrets import Address
from oncebridge.engine.cpu_turns import SMALL
from oncebridge.engine.router import RouterAnswer
from oncebridge.engine.verdict import Outcome
from oncebridge.errors import ConfigError
from oncebridge.events.framing import BadGzip, TooLarge, TooMany, gunzip, split_body
from oncebridge.events.trace_context import NAME, XRAY_HEADER, BytesWithContext
from oncebridge.http.addresses import names_loopback
from oncebridge.http.auth import AuthOptions, RequestAuthenticator
from oncebridge.http.client_address import TrustedProxies, proxy_errors
from oncebridge.http.cross_site import OwnNames, host_errors, requested_host
from oncebridge.http.health import ALIVE, readiness
from oncebridge.http.server import Request, Response, Server, ServerLimits, refusal
from oncebridge.sources.api import Host, Source, TraceparentReader
from oncebridge.sources.http.openapi import describe

_log = logging.getLogger("oncebridge")
_TRACEPARENT = NAME.encode()
_OVERDUE_CHECK_S = 0.1
_encode = msgspec.json.Encoder().encode


class HttpSourceOptions(AuthOptions, frozen=True, kw_only=True):
    """Options of the HTTP source."""

    answer_within: Annotated[
        timedelta, Doc("The sender gets a response within this time.", example="4500ms")
    ] = timedelta(seconds=4.5)
    max_body: Annotated[Size, Doc("Largest body, also after decompression.", example="2MiB")] = (
        Size(2 * 1024 * 1024)
    )
    max_events: Annotated[
        int, Doc("How many events one request may have.", "500", at_least=1, at_most=10_000)
    ] = 10_000
    max_head: Annotated[
        Size, Doc("Largest request line and headers, together.", example="32KiB")
    ] = Size(32 * 1024)
    head_time: Annotated[timedelta, Doc("Timeout for the headers of a request.", "10s")] = (
        timedelta(seconds=10)
    )
    body_time: Annotated[timedelta, Doc("Timeout for the body of a request.", "30s")] = timedelta(
        seconds=30
    )
    idle_time: Annotated[timedelta, Doc("How long an idle connection stays open.", "75s")] = (
        timedelta(seconds=75)
    )
    max_connections: Annotated[
        int, Doc("How many connections may be open at once.", at_least=1)
    ] = 1000
    max_connections_per_peer: Annotated[
        int,
        Doc(
            "How many connections one address may have; raise it to `max_connections` behind a "
            "proxy.",
            at_least=1,
        ),
    ] = 500
    trusted_proxies: Annotated[
        tuple[str, ...],
        Doc(
            "Addresses or networks of the proxies whose `X-Forwarded-For` is trusted, to "
            "distinguish clients that send wrong credentials to /oauth/token.",
            example='["10.0.0.0/8"]',
        ),
    ] = ()
    hosts: Annotated[
        tuple[str, ...],
        Doc(
            "Further names of a source without auth, as senders or a proxy write them in `Host`; "
            "names of this machine (`localhost`, `127.0.0.1`) need not be listed.",
            example='["ingest.example.com"]',
        ),
    ] = ()
    tls_cert: Annotated[str | None, Doc("Certificate chain (PEM), for https.", "cert.pem")] = None
    tls_key: Annotated[str | None, Doc("Its private key (PEM).", "key.pem")] = None


class HttpSource(Source):
    """Listens on *host* and *port*, and accepts events at *path*."""

    Options: ClassVar = HttpSourceOptions

    def __init__(self, host: str, port: int, path: str, options: HttpSourceOptions) -> None:
        self._options = options
        self._path = path
        self._address = (host, port)
        # `open` sets the real clock; nothing is served before.
        self._guard = RequestAuthenticator(options, lambda: 0)
        for mistake in (
            *host_errors(options.hosts, "hosts"),
            *proxy_errors(options.trusted_proxies, "trusted_proxies"),
        ):
            raise mistake
        self._names = OwnNames(options.hosts)
        self._proxies = TrustedProxies(options.trusted_proxies)
        self._foreign = 0  # requests of other sites refused since the last log line
        self._foreign_logged = -math.inf
        self._host: Host
        self._server: Server | None = None
        self._openapi = b""
        self._answer_s = options.answer_within.total_seconds()
        self._now: Callable[[], float] = lambda: 0.0  # that of the event loop, once it is open
        self._waiting: deque[tuple[float, _PendingRequest]] = deque()
        self._sweeper: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._queued = 0  # bytes of bodies that wait for a CPU turn
        self._stopped = asyncio.Event()

    @classmethod
    def from_url(cls, url: str, options: HttpSourceOptions | None = None) -> Self:
        """Listen at `http://HOST:PORT/PATH`."""
        options, url = options or HttpSourceOptions(), Address(url)
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:  # whose text may quote a password
            raise ConfigError(
                "", f"{url!r}: the host or port is invalid; write http://HOST:PORT/PATH"
            ) from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                "", f"{url!r} is not the address of an HTTP source; write http://HOST:PORT/PATH"
            )
        if parts.query or parts.fragment or "@" in parts.netloc:
            raise ConfigError(
                "",
                f"{url!r}: an HTTP source is http://HOST:PORT/PATH, without more; configure who may "
                "send with api_keys, basic, bearer, oauth, hmac or jwt",
            )
        if port is None:
            raise ConfigError("", f"{url!r}: the port is missing; write http://HOST:PORT/PATH")
        if bool(options.tls_cert) != (parts.scheme == "https"):
            raise ConfigError("tls_cert", "https:// needs tls_cert, and tls_cert needs https://")
        if options.client_ca is not None and not options.tls_cert:
            raise ConfigError("client_ca", "needs https:// and tls_cert")
        if parts.path in _OTHER_PATHS:
            raise ConfigError("", f"the path {parts.path} is reserved; use another path for events")
        source = cls(parts.hostname, port, parts.path or "/", options)
        if not source._guard.is_needed and not names_loopback(parts.hostname):
            raise ConfigError(
                "",
                f"other machines can reach {parts.hostname}, and no auth is configured: set "
                "api_keys, basic, bearer, oauth, hmac, jwt or client_ca, or listen on 127.0.0.1",
            )
        return source

    # --- the life of a source ----------------------------------------------------------

    async def open(self, host: Host) -> None:
        options = self._options
        self._host = host
        self._now = asyncio.get_running_loop().time  # asking for the loop is a system call in 3.11
        self._guard = RequestAuthenticator(options, host.clock)
        self._openapi = _encode(describe(self._path, options, __version__))
        name, port = self._address
        self._server = Server(
            self._handle,
            host=name,
            port=port,
            screen=self._screen,
            bounds=ServerLimits(**{name: getattr(options, name) for name in _LIMITS}),
            tls=_tls(options),
            spare=_HEALTH,
        )
        self._guard.open()
        await self._server.open()
        self._answer_overdue()

    @property
    def port(self) -> int:
        """The port it listens on; only after `open`."""
        assert self._server is not None  # noqa: S101
        return self._server.port

    @property
    def url(self) -> str:
        """The URL that events are sent to; before `open`, as it was configured."""
        scheme = "https" if self._options.tls_cert else "http"
        name = f"[{self._address[0]}]" if ":" in self._address[0] else self._address[0]
        port = self._address[1] if self._server is None else self._server.port
        return f"{scheme}://{name}:{port}{self._path}"

    async def run(self) -> None:
        await self._stopped.wait()

    def stop(self) -> None:
        self._stopped.set()
        if self._server is not None:
            self._server.stop()

    async def aclose(self) -> None:
        self.stop()
        while self._waiting:  # answer the rest with what is known
            self._waiting.popleft()[1].answer_with_known()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.aclose(self._options.answer_within)
        await self._guard.aclose()
        if self._sweeper is not None:
            self._sweeper.cancel()

    # --- requests ----------------------------------------------------------------------

    def _screen(self, request: Request) -> Response | None:
        """Return a refusal that the headers already decide, before the body is read."""
        allowed = {"POST"} if request.path == self._path else _OTHER_PATHS.get(request.path)
        if allowed is None or (request.path == _TOKEN and not self._guard.has_tokens):
            return refusal(404, "not found")
        if request.method not in allowed:
            allow = ("Allow", ", ".join(sorted(allowed)))
            return refusal(405, "method not allowed for this path", allow)
        if request.path != self._path:
            return _refuse_large_body(request)
        foreign = self._refuse_foreign(request)
        if foreign is not None:
            return foreign
        if not self._guard.admits(request, with_body=False):
            return self._guard.refusal_of(request)
        if _encoding(request) not in _ENCODINGS:
            return _UNSUPPORTED_ENCODING
        return None

    def _refuse_foreign(self, request: Request) -> Response | None:
        """Return a refusal of a request that a web page of another site caused, and log it."""
        if self._guard.is_ambient(request) and self._names.page(request) == "other":
            refused, reason = _FOREIGN_PAGE, "sent by a web page of another site"
        elif not self._guard.is_needed and not self._names.include(requested_host(request)):
            refused, reason = _FOREIGN_HOST, "sent for another Host"
        else:
            return None
        self._foreign += 1
        now = self._now()
        if now - self._foreign_logged >= _LOG_EVERY_S:
            fields = {"reason": reason, "refused": self._foreign, "fix": _FIX_FOREIGN}
            _log.warning("oncebridge.http_request_refused", extra=fields)
            self._foreign, self._foreign_logged = 0, now
        return refused

    def _handle(self, request: Request, respond: Callable[[Response], None]) -> None:
        match request.path:
            case self._path:
                self._receive(request, respond)
            case "/healthz":
                respond(ALIVE)
            case "/readyz":
                respond(self._readiness())
            case "/openapi.json":
                respond(Response(200, self._openapi))
            case _:
                respond(self._guard.token(request, self._proxies.client(request)))

    def _receive(self, request: Request, respond: Callable[[Response], None]) -> None:
        if not self._guard.admits(request, with_body=True):
            respond(self._guard.refusal_of(request))
            return
        pending = _PendingRequest(respond)
        self._waiting.append((self._now() + self._answer_s, pending))
        size, is_packed = len(request.body), _encoding(request) in _GZIP
        if size <= (_SMALL_PACKED if is_packed else SMALL):
            self._submit(request, pending, is_packed=is_packed)
        elif self._queued + size > _MOST_QUEUED:
            pending.answer(_TOO_MUCH)
        else:
            self._queued += size
            work = self._submit_in_turn(request, pending, is_packed=is_packed)
            task = asyncio.get_running_loop().create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _submit_in_turn(
        self, request: Request, pending: "_PendingRequest", *, is_packed: bool
    ) -> None:
        try:
            async with self._host.router.cpu_turns:
                # Otherwise it has to be sent again, and nothing was started.
                if not pending.is_answered:
                    self._submit(request, pending, is_packed=is_packed)
        except Exception as error:  # noqa: BLE001 - the sender gets a response in any case
            # Its type only: the text of an exception may quote the event.
            _log.error("oncebridge.http_handler_failed", extra={"error": type(error).__name__})
            pending.answer_with_known()
        finally:
            self._queued -= len(request.body)

    def _submit(self, request: Request, pending: "_PendingRequest", *, is_packed: bool) -> None:
        """Split the body of *request* into events, and put them into the inbox."""
        content_type = (request.header(b"content-type") or b"").decode("latin-1")
        body, records, most = request.body, None, self._options.max_events
        try:
            if is_packed:
                body = gunzip(body, self._options.max_body, cheap=True)
            records = split_body(body, content_type=content_type, most=most)
        except TooLarge:
            pending.answer(refusal(413, "the decompressed body is too large"))
            return
        except TooMany:
            pending.answer(refusal(413, "too many events in one body"))
            return
        except BadGzip:
            records = [body]  # as it arrived: it goes to the dead letters
        is_one = len(records) == 1 and len(records[0].strip()) == len(body.strip())
        read = self._host.context
        if read is not None and (context := _context(request, read)):
            records = [BytesWithContext.of(raw, context) for raw in records]
        pending.expect(len(records), is_one=is_one)
        self._host.inbox.put(records, pending.take)

    def _readiness(self) -> Response:
        reasons = [*self._host.inbox.not_ready(), *self.not_ready()]
        if self._stopped.is_set():
            reasons.append("shutting down")
        return readiness(reasons, self._guard.warnings())

    def not_ready(self) -> list[str]:
        """Return why this source does not accept events, apart from the sinks."""
        return self._guard.not_ready()

    def _answer_overdue(self) -> None:
        """Answer requests that have waited long enough; all have the same timeout, so in order."""
        loop = asyncio.get_running_loop()
        now, waiting = loop.time(), self._waiting
        while waiting and (waiting[0][1].is_answered or waiting[0][0] <= now):
            waiting.popleft()[1].answer_with_known()
        self._sweeper = loop.call_later(_OVERDUE_CHECK_S, self._answer_overdue)


_LIMITS = {*ServerLimits.__struct_fields__} & {*HttpSourceOptions.__struct_fields__}
_TOKEN = "/oauth/token"  # noqa: S105 - a path
_GET = {"GET", "HEAD"}
_HEALTH = ("/healthz", "/readyz")
_OTHER_PATHS = {**dict.fromkeys(_HEALTH, _GET), "/openapi.json": _GET, _TOKEN: {"POST"}}
_GZIP = (b"gzip", b"x-gzip")
_ENCODINGS = (*_GZIP, b"identity", b"")
_SMALL = 4096
_SMALL_PACKED = 4096  # decompressed and split within some milliseconds
_LOG_EVERY_S = 60
_FIX_FOREIGN = (
    "set api_keys, basic, bearer, oauth or hmac; if a proxy in front authenticates senders, add "
    "the name that it sends as Host to hosts"
)
_FOREIGN_PAGE = refusal(
    403,
    "sent by a web page of another site; such a request is accepted only with an API key, a bearer "
    "token or a signature (set api_keys, bearer, oauth or hmac)",
)
_FOREIGN_HOST = refusal(
    401,  # EventBridge retries after 401, and drops events after 403
    "the source has no auth, so it accepts requests for names of this machine only (Host: "
    f"localhost); {_FIX_FOREIGN}",
)
_UNSUPPORTED_ENCODING = refusal(
    415,
    "unsupported Content-Encoding; send the body uncompressed or with gzip",
    ("Accept-Encoding", "gzip"),
)
_MOST_QUEUED = 64 * 1024 * 1024  # bytes of large bodies that wait for a CPU turn
_TOO_MUCH = refusal(503, "too many large bodies at once", ("Retry-After", "1"))


def _encoding(request: Request) -> bytes:
    return b",".join(request.values(b"content-encoding")).strip().lower()


def _context(request: Request, read: TraceparentReader) -> str:
    """Return the trace context of a request; a header that occurs twice is ignored."""
    headers = [request.values(name) for name in (_TRACEPARENT, XRAY_HEADER)]
    parent, xray = [values[0].decode("latin-1") if len(values) == 1 else "" for values in headers]
    return read(parent, xray) if parent or xray else ""


def _refuse_large_body(request: Request) -> Response | None:
    """Return a refusal of a body larger than a form: its sender is not authenticated."""
    if request.header(b"transfer-encoding") is not None:
        return refusal(411, "Content-Length is required")
    if int(request.header(b"content-length") or 0) > _SMALL:
        return refusal(413, "the body is too large")
    return None


class _PendingRequest(Struct, eq=False):
    """One request that waits for the outcomes of its events."""

    respond: Callable[[Response], None]
    answers: list[RouterAnswer | None] = field(default_factory=lambda: [None])
    left: int = 0
    is_one: bool = True
    is_answered: bool = False

    def expect(self, count: int, *, is_one: bool) -> None:
        """Wait for *count* answers."""
        self.answers, self.left, self.is_one = [None] * count, count, is_one
        if not count:
            self.answer_with_known()

    def take(self, at: int, answer: RouterAnswer) -> None:
        """Take the answer number *at*."""
        self.answers[at] = answer
        self.left -= 1
        if not self.left:
            self.answer_with_known()

    def answer_with_known(self) -> None:
        """Respond with the answers there are; the other events continue, and a retry finds them."""
        if not self.is_answered:
            self.answer(_response(self.answers, is_one=self.is_one))

    def answer(self, response: Response) -> None:
        """Send *response*, unless the request was answered before."""
        if not self.is_answered:
            self.is_answered = True
            self.respond(response)


def _response(answers: Sequence[RouterAnswer | None], *, is_one: bool) -> Response:
    results = [_result(answer) for answer in answers]
    status = max([result["status"] for result in results], default=200)
    body = _encode(results[0] if is_one else {"results": results})
    if status != 503:
        return Response(status, body)
    wait = max(result.get("retry_after", 1) for result in results)
    return Response(status, body, headers=(("Retry-After", str(wait)),))


def _result(answer: RouterAnswer | None) -> dict[str, Any]:
    if answer is None:
        return {"status": 503, "reason": "still in progress", "retry_after": 2}
    if answer.acknowledge and answer.verdict is None:
        return {"status": 202, "spooled": True}
    result: dict[str, Any] = {"status": 200}
    if not answer.acknowledge:
        wait = max(math.ceil(answer.retry_after_ms / 1000), 1)
        result = {"status": 503, "reason": answer.reason, "retry_after": wait}
    if answer.verdict is None:
        return result
    result["verdict"] = answer.verdict
    if len(answer.outcomes) > 1:
        result["routes"] = {name: _route_result(outcome) for name, outcome in answer.outcomes}
    elif answer.outcomes and answer.acknowledge:
        outcome = answer.outcomes[0][1]
        result |= {"rule": outcome.rule, "key": outcome.key.hex()}
    if answer.reason:
        result["reason"] = answer.reason
    return result


def _route_result(outcome: Outcome) -> dict[str, str]:
    found = {"verdict": outcome.verdict, "rule": outcome.rule, "key": outcome.key.hex()}
    return found | ({"reason": outcome.reason} if outcome.reason else {})


def _tls(options: HttpSourceOptions) -> ssl.SSLContext | None:
    if options.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    option, what = "tls_cert", "the certificate or its key"
    try:
        # Without a password OpenSSL would ask for one on the terminal, and block.
        context.load_cert_chain(options.tls_cert, options.tls_key, password="")
        if options.client_ca is not None:
            option, what = "client_ca", "the certificates"
            context.load_verify_locations(options.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # also an SSLError
        raise ConfigError(option, f"{what} cannot be loaded: {type(error).__name__}") from None
    return context
