"""
The HTTP sink: one request per event, with the bytes as they were received.

Headers:

| header                 | when                        | value                                      |
| ---------------------- | --------------------------- | ------------------------------------------ |
| `Content-Type`         | always                      | `application/json`, or the user's          |
| `User-Agent`           | always                      | `oncebridge`, or the user's                |
| `Idempotency-Key`      | the event has a key         | the key in hex; the same for every attempt |
| `X-Oncebridge-Attempt` | from the second attempt on  | its number                                 |
| `X-Oncebridge-Version` | newest wins                 | the version of the entity's state          |
| `X-Oncebridge`         | the store was unavailable   | `unprotected`: may be a duplicate          |
| `traceparent`          | events are traced           | the trace that the request belongs to      |
| `webhook-…`            | `sign`                      | id, time and signature (Standard Webhooks) |
| `ce-…`                 | `cloudevents`               | the attributes of a CloudEvent             |

How responses are interpreted:

| response                                    | answer      |
| ------------------------------------------- | ----------- |
| 2xx                                         | `Yes`       |
| nothing was sent: DNS, connection refused,  | `No`        |
| TLS, no tunnel through the proxy            |             |
| 429; 503 with `Retry-After`                 | `Throttled` |
| 502, 504, 503 without `Retry-After`         | `Unwell`    |
| other 5xx, 408, 409, 425; no (whole) answer | `Unknown`   |
| 401, 403, 404, 407, 410                     | `Closed`    |
| any other 4xx; 3xx (never followed)         | `Never`     |

A receiver that still processes the same `Idempotency-Key` returns 409. A `Retry-After` is obeyed,
up to a day. The data of a CloudEvent are the received bytes too, with the envelope. The id of an
event without a key is the hash of its bytes.
"""

import base64
import binascii
import hashlib
import hmac
import re
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Annotated, ClassVar, Literal, Self

from msgspec import Struct

from oncebridge.base.clock import Clock, system_clock
from oncebridge.base.options import Doc
from oncebridge.base.secrets import Secret
from oncebridge.errors import ConfigError
from oncebridge.events.event import Event
from oncebridge.events.trace_context import NAME
from oncebridge.http.addresses import names_loopback
from oncebridge.http.client import Client, ClientResponse, NotSent, Unclear, check_header
from oncebridge.http.target import HttpTarget
from oncebridge.sinks.api import (
    Closed,
    Delivery,
    Never,
    No,
    SinkAnswer,
    Throttled,
    Unknown,
    Unwell,
    Yes,
)

_DAY_MS = 86_400_000
_RETRY_STATUS = frozenset({408, 409, 425})
_UNWELL_STATUS = frozenset({502, 503, 504})
_REFUSED_STATUS = frozenset({401, 403, 404, 407, 410})
_OURS = re.compile(r"idempotency-key|x-oncebridge.*", re.IGNORECASE)

_PLAIN = re.compile(r"[!#$&-~]+")  # characters that a CloudEvent header holds unencoded
_RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)

_Headers = list[tuple[str, str]]


class HttpSinkOptions(Struct, frozen=True, kw_only=True):
    """Options of the HTTP sink."""

    method: Annotated[Literal["POST", "PUT", "PATCH"], Doc("The HTTP method.", example="PUT")] = (
        "POST"
    )
    headers: Annotated[
        dict[str, Secret],
        Doc(
            "Headers to send with every event, such as Authorization.",
            example='{ Authorization = "env:CRM_TOKEN" }',
        ),
    ] = {}
    idempotency_key: Annotated[
        Literal["quoted", "bare", "off"],
        Doc(
            "How to write the header Idempotency-Key: in quotes as its draft standard requires, "
            "bare as many receivers expect, or not at all.",
            example="bare",
        ),
    ] = "quoted"
    sign: Annotated[
        tuple[Secret, ...],
        Doc(
            "Secrets (whsec_…) to sign events with, by Standard Webhooks; several during rotation.",
            example='["env:WEBHOOK_SECRET"]',
        ),
    ] = ()
    cloudevents: Annotated[
        bool, Doc("Send CloudEvents in binary mode: their attributes as headers.", example="true")
    ] = False
    concurrency: Annotated[
        int, Doc("How many requests may run at the same time.", example="16", at_least=1)
    ] = 64
    connect_timeout: Annotated[
        timedelta,
        Doc(
            "How long connecting may take, including TLS; keep it below sink_timeout.", example="2s"
        ),
    ] = timedelta(seconds=5)
    keep_alive: Annotated[
        timedelta, Doc("How long to keep an idle connection open.", example="1m")
    ] = timedelta(seconds=30)
    allow_private: Annotated[
        bool,
        Doc(
            "Allow a target with a private address, such as one in the same network.",
            example="true",
        ),
    ] = False
    allow_http: Annotated[
        bool,
        Doc("Allow http:// to another host: events are then sent unencrypted.", example="true"),
    ] = False
    ca_file: Annotated[
        str | None,
        Doc(
            "PEM file of the certificate authorities to trust instead of the system's.",
            example="/etc/oncebridge/ca.pem",
        ),
    ] = None
    cert_file: Annotated[
        str | None,
        Doc(
            "PEM file of the client certificate, for targets that ask for one.",
            example="/etc/oncebridge/client.pem",
        ),
    ] = None
    key_file: Annotated[
        str | None,
        Doc(
            "PEM file of the private key of cert_file, if it is not in the same file.",
            example="/etc/oncebridge/client.key",
        ),
    ] = None


class HttpSink:
    """Send each event to *url*, once per attempt."""

    Options: ClassVar[type[HttpSinkOptions]] = HttpSinkOptions
    batch = 1

    def __init__(
        self,
        url: str,
        options: HttpSinkOptions | None = None,
        *,
        clock: Clock = system_clock,
    ) -> None:
        options = options or HttpSinkOptions()
        if options.concurrency < 1:
            raise ConfigError("concurrency", f"must be at least 1, not {options.concurrency}")
        self.concurrency = options.concurrency
        self._url = url
        self._options = options
        self._clock = clock
        self._fixed = _fixed_headers(options)
        self._traces = all(name.lower() != NAME for name in options.headers)
        self._keys = [_signing_key(at, secret) for at, secret in enumerate(options.sign)]
        self._key_form = {"quoted": '"%s"', "bare": "%s", "off": ""}[options.idempotency_key]
        self._target = _checked_target(url, options)
        self._client: Client | None = None

    @classmethod
    def from_url(cls, url: str, options: HttpSinkOptions | None = None) -> Self:
        """Send to `https://HOST/PATH`; `http://` is for this host, or needs *allow_http*."""
        return cls(url, options)

    async def open(self) -> None:
        """Read the TLS files and find the proxy; nothing is sent, so the target may be down."""
        self._opened()

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        return [await self._send(delivery) for delivery in deliveries]

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _opened(self) -> Client:
        if self._client is None:
            self._client = Client(
                self._url,
                headers=self._fixed,
                connect_timeout=self._options.connect_timeout,
                idle_time=self._options.keep_alive,
                allow_private=self._options.allow_private,
                tls=_tls(self._options) if self._target.is_tls else None,
            )
        return self._client

    async def _send(self, delivery: Delivery) -> SinkAnswer:
        client = self._client or self._opened()
        try:
            answer = await client.post(
                delivery.event.raw, self._headers(delivery), method=self._options.method
            )
        except NotSent as error:
            return No(str(error))
        except Unclear as error:
            return Unknown(str(error))
        if 200 <= answer.status < 300:
            return Yes()
        return self._answer_to(answer)

    def _answer_to(self, answer: ClientResponse) -> SinkAnswer:
        status = answer.status
        reason = f"HTTP {status}"  # without the body, which may quote the event
        if status == 429 or (status == 503 and b"retry-after" in answer.headers):
            # A 503 may come from a proxy after the target has accepted the event.
            return Throttled(reason, self._retry_after_ms(answer), maybe=status == 503)
        if status in _REFUSED_STATUS:
            return Closed(reason, self._retry_after_ms(answer))
        if status in _UNWELL_STATUS:
            return Unwell(reason, self._retry_after_ms(answer))
        if 300 <= status < 400:
            return Never(f"{reason}: redirects are not followed")
        if 400 <= status < 500 and status not in _RETRY_STATUS:
            return Never(reason)
        return Unknown(reason, self._retry_after_ms(answer))

    def _retry_after_ms(self, answer: ClientResponse) -> int:
        """Return `Retry-After` in ms; 0 if it is neither seconds nor a date."""
        text = answer.headers.get(b"retry-after", b"").decode("latin-1").strip()
        if text.isascii() and text.isdigit():
            return min(int(text) * 1000, _DAY_MS) if len(text) < 10 else _DAY_MS
        try:
            date = parsedate_to_datetime(text)
            if date.tzinfo is None:
                date = date.replace(tzinfo=UTC)
            asked = int(date.timestamp() * 1000) - self._clock()
        except (ValueError, TypeError, IndexError, OverflowError):
            return 0
        return max(0, min(asked, _DAY_MS))

    # --- headers -----------------------------------------------------------------------

    def _headers(self, delivery: Delivery) -> _Headers:
        headers: _Headers = []
        key = delivery.idempotency_key
        if key and self._key_form:
            headers.append(("Idempotency-Key", self._key_form % key))
        if delivery.attempt > 1:
            headers.append(("X-Oncebridge-Attempt", str(delivery.attempt)))
        if delivery.version is not None:
            headers.append(("X-Oncebridge-Version", str(delivery.version)))
        if delivery.unprotected:
            headers.append(("X-Oncebridge", "unprotected"))
        if delivery.trace and self._traces:
            headers.append((NAME, delivery.trace))
        if self._keys or self._options.cloudevents:
            event = delivery.event
            name = key or hashlib.sha256(event.raw).hexdigest()
            if self._keys:
                headers += _signature(name, self._clock() // 1000, event.raw, self._keys)
            if self._options.cloudevents:
                headers += _attributes(name, event)
        return headers


def _signature(name: str, seconds: int, body: bytes, keys: Sequence[bytes]) -> _Headers:
    """Return the headers of Standard Webhooks 1.0.0: one signature for each key."""
    signed = b"%b.%d.%b" % (name.encode(), seconds, body)
    digests = [base64.b64encode(hmac.digest(key, signed, "sha256")).decode() for key in keys]
    return [
        ("webhook-id", name),
        ("webhook-timestamp", str(seconds)),
        ("webhook-signature", " ".join([f"v1,{digest}" for digest in digests])),
    ]


def _attributes(name: str, event: Event) -> _Headers:
    """Return the attributes of a CloudEvent 1.0 as headers (binary mode over HTTP)."""
    headers = [
        ("ce-specversion", "1.0"),
        ("ce-id", name),
        ("ce-source", _encoded(event.source or "oncebridge")),
        ("ce-type", _encoded(event.detail_type or "event")),
    ]
    subject = event.detail.get("topicName")
    if isinstance(subject, str) and subject:
        headers.append(("ce-subject", _encoded(subject)))
    if event.time is not None and _is_rfc3339(event.time):
        headers.append(("ce-time", event.time))
    return headers


def _encoded(text: str) -> str:
    """Percent-encode the space, `"`, `%` and all that is not printable ASCII, in UTF-8."""
    if _PLAIN.fullmatch(text):
        return text
    return "".join(
        chr(byte) if 0x21 <= byte <= 0x7E and byte not in b'"%' else f"%{byte:02X}"
        for byte in text.encode()
    )


def _is_rfc3339(text: str) -> bool:
    if not _RFC3339.fullmatch(text):
        return False
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


# --- settings ------------------------------------------------------------------------------


def _checked_target(url: str, options: HttpSinkOptions) -> HttpTarget:
    try:
        target = HttpTarget.parse(url)
    except ValueError as error:
        raise ConfigError("", str(error)) from None
    if target.authorization and any(name.lower() == "authorization" for name in options.headers):
        raise ConfigError(
            "headers.Authorization", "the URL already has a user; remove one of the two"
        )
    if not (target.is_tls or options.allow_http or names_loopback(target.host)):
        raise ConfigError(
            "", "http:// sends events unencrypted; use https://, or set allow_http = true"
        )
    for option in ("ca_file", "cert_file", "key_file"):
        file = getattr(options, option)
        if file is not None and not target.is_tls:
            raise ConfigError(option, "is for https:// only, and the target is http://")
        if file == "":
            raise ConfigError(option, "is empty; set it to a file, or remove it")
    if options.key_file is not None and options.cert_file is None:
        raise ConfigError("key_file", "needs cert_file, the certificate of the key")
    return target


def _fixed_headers(options: HttpSinkOptions) -> _Headers:
    """Return the user's headers, checked, with our defaults where the user has none."""
    taken = [
        (_OURS, "is set for each event"),
        (re.compile(r"webhook-(id|timestamp|signature)", re.IGNORECASE), "is set by sign")
        if options.sign
        else None,
        (re.compile(r"ce-.*", re.IGNORECASE), "is set by cloudevents")
        if options.cloudevents
        else None,
    ]
    for name, value in options.headers.items():
        where = f"headers.{name}"
        for pattern, message in filter(None, taken):
            if pattern.fullmatch(name):
                raise ConfigError(where, f"{message} and cannot be set here")
        try:
            check_header(name, value.reveal())
        except ValueError as error:
            raise ConfigError(where, str(error)) from None
    headers = {name.lower(): (name, value.reveal()) for name, value in options.headers.items()}
    if len(headers) != len(options.headers):
        raise ConfigError("headers", "has the same name twice; case does not matter")
    headers.setdefault("content-type", ("Content-Type", "application/json"))
    headers.setdefault("user-agent", ("User-Agent", "oncebridge"))
    return list(headers.values())


def _signing_key(at: int, secret: Secret) -> bytes:
    text = secret.reveal()
    try:
        key = base64.b64decode(text.removeprefix("whsec_").encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        key = b""
    if not text.startswith("whsec_") or not 24 <= len(key) <= 64:
        raise ConfigError(
            f"sign[{at}]",
            "is not whsec_ followed by 24 to 64 bytes in base64 (32 to 88 characters)",
        )
    return key


def _tls(options: HttpSinkOptions) -> ssl.SSLContext:
    """Return the TLS context; raise `ConfigError` that names a file that cannot be used."""
    try:
        context = ssl.create_default_context(cafile=options.ca_file)
    except (OSError, ValueError) as error:
        raise ConfigError("ca_file", _unusable(options.ca_file, error)) from None
    context.set_alpn_protocols(["http/1.1"])
    if options.cert_file is not None:
        try:
            # Without a password OpenSSL would ask for one on the terminal and wait.
            context.load_cert_chain(options.cert_file, options.key_file, password="")
        except (OSError, ValueError) as error:
            files = " with ".join(filter(None, (options.cert_file, options.key_file)))
            raise ConfigError("cert_file", _unusable(files, error)) from None
    return context


def _unusable(files: str | None, error: Exception) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else getattr(error, "strerror", None)
    return f"{files} cannot be used: {reason or type(error).__name__}"
