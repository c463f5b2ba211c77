"""
Authentication of the senders of events.

Supported are the methods of EventBridge connections (an API key in a header, Basic, an OAuth
bearer token, issued here or by an identity provider) and, for other senders, an HMAC over
time and body. For each method several secrets may be valid at once, so that one can be
replaced without a gap. Every secret is compared in constant time, and all of them are
compared, whichever matches. A client certificate is required in addition, not instead.

A signature covers the time and the body. The content type and the content encoding determine
how the body is read, so a signature is bound to the values it was first accepted with.
"""

import base64
import binascii
import hmac
import logging
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Annotated, Final
from urllib.parse import parse_qs

from msgspec import Struct

from oncebridge.base.clock import Clock
from oncebridge.base.options import Doc
from oncebridge.base.secrets import Secret, find_weakness
from oncebridge.errors import ConfigError
from oncebridge.http.client_address import FailedAttempts, TooManyAttempts
from oncebridge.http.jwt import JwtOptions, TokenRefused, TokenVerifier
from oncebridge.http.server import Request, Response, refusal

_log = logging.getLogger("oncebridge")

_SKEW_S: Final = 300
_VALID_S: Final = 2 * _SKEW_S  # for a timestamp as far ahead as is allowed
_MOST_SIGNATURES: Final = 200_000  # about 30 MB
_TOKEN_S: Final = 3600
_WARN_MS: Final = 60_000
_TIMESTAMP, _SIGNATURE = b"x-oncebridge-timestamp", b"x-oncebridge-signature"
_SIGNED = re.compile(rb"v1=[0-9a-f]{64}")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class AuthOptions(Struct, frozen=True, kw_only=True):
    """Which senders are accepted; if several methods are set, a sender may use any of them."""

    api_keys: Annotated[
        tuple[Secret, ...],
        Doc("Valid API keys (two while one is replaced).", example='["env:KEY", "env:OLD_KEY"]'),
    ] = ()
    api_key_header: Annotated[str, Doc("The header that carries the API key.")] = "x-api-key"
    basic: Annotated[
        tuple[Secret, ...], Doc("Valid USER:PASSWORD pairs for Basic.", example='["env:BASIC"]')
    ] = ()
    bearer: Annotated[
        tuple[Secret, ...], Doc("Valid bearer tokens.", example='["file:/run/secrets/token"]')
    ] = ()
    oauth: Annotated[
        tuple[Secret, ...],
        Doc(
            "CLIENT_ID:CLIENT_SECRET pairs that get a token at /oauth/token "
            "(OAuth client credentials, as EventBridge connections use them).",
            example='["env:OAUTH_CLIENT"]',
        ),
    ] = ()
    hmac: Annotated[
        tuple[Secret, ...],
        Doc(
            "Secrets for a signature: X-Oncebridge-Signature: v1=HEX of HMAC-SHA256 over "
            "X-Oncebridge-Timestamp (seconds since 1970), a dot and the body.",
            example='["env:HMAC_SECRET"]',
        ),
    ] = ()
    jwt: Annotated[
        tuple[JwtOptions, ...],
        Doc(
            "Identity providers whose tokens (JWT) are accepted as bearer tokens.",
            example='{ issuer = "https://login.example.com/eu", audience = "api://events", '
            'jwks = "https://login.example.com/eu/keys" }',
            or_one=True,
        ),
    ] = ()
    client_ca: Annotated[
        str | None,
        Doc(
            "PEM file of the authorities of client certificates. With it, every client must "
            "present one (mutual TLS), in addition to any other authentication.",
            example="client-ca.pem",
        ),
    ] = None
    client_names: Annotated[
        tuple[str, ...],
        Doc(
            "Which client certificates may send events: those with one of these as a DNS name, "
            "URI or common name. Without it, all of `client_ca`.",
            example="gateway.example.com",
            or_one=True,
        ),
    ] = ()


class RequestAuthenticator:
    """Decides whether a request is accepted."""

    def __init__(self, options: AuthOptions, clock: Clock) -> None:
        _check(options)
        self._clock = clock
        self._header = options.api_key_header.lower().encode()
        self._keys = _bytes(options.api_keys)
        self._basic = [base64.b64encode(pair) for pair in _bytes(options.basic)]
        self._bearer = _bytes(options.bearer)
        self._clients = _bytes(options.oauth)
        self._hmac = _bytes(options.hmac)
        self._accepted = _Accepted()
        self._wrong = FailedAttempts(clock)
        self._jwt = TokenVerifier(options.jwt, clock) if options.jwt else None
        self._names = frozenset(options.client_names)
        self._warned: dict[str, tuple[int, int]] = {}
        self._has_secrets = any((self._keys, self._basic, self._bearer, self._clients, self._hmac))
        self._wants_credentials = self._has_secrets or self._jwt is not None
        self.is_needed = self._wants_credentials or options.client_ca is not None
        self.has_tokens = bool(self._clients)

    def open(self) -> None:
        """Start fetching the keys of identity providers."""
        if self._jwt is not None:
            self._jwt.open()

    async def aclose(self) -> None:
        if self._jwt is not None:
            await self._jwt.aclose()

    def not_ready(self) -> list[str]:
        """Return the reasons for which no sender can authenticate at the moment."""
        if self._jwt is None or self._has_secrets or self._jwt.has_keys:
            return []
        return self._jwt.warnings()

    def warnings(self) -> list[str]:
        """Return the reasons for which some senders cannot authenticate, or soon may not."""
        return self._jwt.warnings() if self._jwt is not None else []

    def admits(self, request: Request, *, with_body: bool) -> bool:
        """Return True if *request* is accepted; without its body, if it may still be accepted."""
        if self._names and self._names.isdisjoint(request.certified):
            return False
        if not self._wants_credentials or self._by_key(request) or self._by_authorization(request):
            return True
        return self._is_timely(request) and (not with_body or self._by_signature(request))

    def is_ambient(self, request: Request) -> bool:
        """
        Return True if a web page could have made a browser send *request* without knowing a secret.

        That is so if no secret is required, and for credentials that a browser adds by itself:
        Basic, which it remembers, and a client certificate.
        """
        return not self._wants_credentials or bool(self._basic and _credentials(request, b"basic"))

    def refusal(self, *, error: str = "") -> Response:
        takes_bearer = self._bearer or self._clients or self._jwt or not self._basic
        challenge = [*(["Basic"] if self._basic else []), *(["Bearer"] if takes_bearer else [])]
        realm = ", ".join(f'{kind} realm="oncebridge"' for kind in challenge)
        if error:
            realm += f', error="{error}"'
        return refusal(401, "not authenticated", ("WWW-Authenticate", realm))

    def token(self, request: Request, client_address: str) -> Response:
        """
        Answer a request for a token: OAuth 2.0, grant type client_credentials.

        Wrong credentials are throttled by *client_address*; the right ones never are.
        """
        form = parse_qs(request.body[:4096].decode("latin-1"))
        client = ":".join(form.get(name, [""])[0] for name in ("client_id", "client_secret"))
        given = [client.encode()] if "client_id" in form else []
        given += [base64_or_nothing(value) for value in _credentials(request, b"basic")]
        if form.get("grant_type") != ["client_credentials"]:
            return refusal(400, "unsupported_grant_type")
        if len(given) != 1 or not _is_one_of(given[0], self._clients):
            return self._refused_client(client_address)
        expires = str(self._clock() // 1000 + _TOKEN_S).encode()
        token = b"%b.%b" % (expires, _sign(given[0], b"token." + expires))
        return Response(
            200,
            b'{"access_token":"%b","token_type":"Bearer","expires_in":%d}' % (token, _TOKEN_S),
            headers=(("Cache-Control", "no-store"),),
        )

    def _refused_client(self, address: str) -> Response:
        try:
            self._wrong.note(address)
        except TooManyAttempts:
            return _TOO_OFTEN
        _log.warning("oncebridge.oauth_client_refused", extra={"peer": address})
        return refusal(401, "invalid_client", ("WWW-Authenticate", 'Basic realm="oncebridge"'))

    def _by_key(self, request: Request) -> bool:
        given = request.values(self._header) if self._keys else []
        return len(given) == 1 and _is_one_of(given[0], self._keys)

    def _by_authorization(self, request: Request) -> bool:
        if len(request.values(b"authorization")) != 1:
            return False
        basic, bearer = _credentials(request, b"basic"), _credentials(request, b"bearer")
        if not basic and not bearer:
            return False
        if basic:
            return _is_one_of(basic[0], self._basic)
        if _is_one_of(bearer[0], self._bearer) or self._is_token(bearer[0]):
            return True
        return self._jwt is not None and self._jwt.judge(bearer[0]) is None

    def _is_token(self, token: bytes) -> bool:
        expires, _, _signature = token.partition(b".")
        valid = [b"%b.%b" % (expires, _sign(key, b"token." + expires)) for key in self._clients]
        is_ours = _is_one_of(token, valid)
        return is_ours and expires.isdigit() and int(expires) > self._clock() // 1000

    def _is_timely(self, request: Request) -> bool:
        """Return True if the request has a signature and a timestamp close to the current time."""
        times, signatures = request.values(_TIMESTAMP), request.values(_SIGNATURE)
        if not self._hmac or len(times) != 1 or len(signatures) != 1:
            return False
        if not times[0].isdigit() or len(times[0]) > 12 or not _SIGNED.fullmatch(signatures[0]):
            return False
        return abs(int(times[0]) - self._clock() // 1000) <= _SKEW_S

    def _by_signature(self, request: Request) -> bool:
        (time,), (signature,) = request.values(_TIMESTAMP), request.values(_SIGNATURE)
        signed = time + b"." + request.body
        if not _is_one_of(signature, [b"v1=" + _sign(key, signed) for key in self._hmac]):
            return False
        return self._accepted.admits(signature, _reading(request), self._clock() // 1000)

    def refusal_of(self, request: Request) -> Response:
        """Answer a *request* that is not admitted, and log what is wrong with its token."""
        token = _credentials(request, b"bearer")
        if self._names and self._names.isdisjoint(request.certified):
            self._warn("oncebridge.http_certificate_refused", "its names are not in client_names")
            return self.refusal()
        if self._jwt is None or len(request.values(b"authorization")) != 1 or not token:
            return self.refusal()
        refused = self._jwt.judge(token[0]) or _ACCEPTED_MEANWHILE
        self._warn("oncebridge.http_token_refused", refused.reason)
        return self.refusal(error="invalid_token") if refused.is_final else _CANNOT_JUDGE

    def _warn(self, event: str, reason: str) -> None:
        """Log a refusal, each reason once a minute at most."""
        since_ms, refused = self._warned.get(reason, (0, 0))
        refused += 1
        if self._clock() >= since_ms:
            _log.warning(event, extra={"reason": reason, "refused": refused})
            since_ms, refused = self._clock() + _WARN_MS, 0
        self._warned[reason] = since_ms, refused


_ACCEPTED_MEANWHILE: Final = TokenRefused("its key was not known yet", is_final=False)
_CANNOT_JUDGE: Final = refusal(
    503,
    "the token cannot be judged yet: the keys of its issuer are being fetched",
    ("Retry-After", "1"),
)


class _Accepted:
    """
    The accepted signatures while they are valid, each with how its body was read.

    They are kept in two generations, each for as long as a signature can be valid, and the
    older one is dropped as a whole. A full generation ends early.
    """

    def __init__(self) -> None:
        self._newer: dict[bytes, bytes] = {}
        self._older: dict[bytes, bytes] = {}
        self._began_s = 0

    def admits(self, signature: bytes, reading: bytes, now_s: int) -> bool:
        """Return False if *signature* was accepted before with another *reading*."""
        if now_s - self._began_s > _VALID_S or len(self._newer) >= _MOST_SIGNATURES // 2:
            self._older, self._newer, self._began_s = self._newer, {}, now_s
        key = bytes.fromhex(signature[-32:].decode())  # half of it, which is 128 bits
        known = self._newer.get(key) or self._older.get(key)
        if known is None:
            self._newer[key] = reading
        return known in (None, reading)


def _reading(request: Request) -> bytes:
    """Return a digest of the headers that determine how the body is read."""
    said = [request.values(name) for name in (b"content-type", b"content-encoding")]
    return sha256(repr(said).encode()).digest()[:16]


_TOO_OFTEN: Final = Response(
    429,
    b'{"error":"invalid_client","error_description":"too many wrong credentials; correct the '
    b'client_id and the client_secret, and wait a minute"}',
    headers=(("Retry-After", "60"),),
)


def _check(options: AuthOptions) -> None:
    """Raise `ConfigError` for a setting that no request could match, or every request could."""
    if not _NAME.fullmatch(options.api_key_header):
        raise ConfigError("api_key_header", f"{options.api_key_header!r}: is not a header name")
    if options.client_names and options.client_ca is None:
        raise ConfigError("client_names", "needs client_ca, the authorities of the certificates")
    for name in ("basic", "oauth"):
        for at, pair in enumerate(getattr(options, name)):
            if not all(pair.reveal().partition(":")):
                raise ConfigError(f"{name}[{at}]", "must be two parts separated by a colon")
    for name in ("api_keys", "basic", "bearer", "oauth", "hmac"):
        for at, secret in enumerate(getattr(options, name)):
            text, is_pair = secret.reveal(), name in ("basic", "oauth")
            shown = text.partition(":")[2] if is_pair else text
            why = find_weakness(shown, in_header=name in ("api_keys", "bearer"))
            if why is not None:
                part = "the part after the colon " if is_pair else ""
                raise ConfigError(f"{name}[{at}]", part + why)


def _bytes(secrets: Sequence[Secret]) -> list[bytes]:
    # The bytes of an environment variable need not be UTF-8.
    return [secret.reveal().encode("utf-8", "surrogateescape") for secret in secrets]


def _is_one_of(given: bytes, valid: Iterable[bytes]) -> bool:
    # All are compared, so that the time taken does not depend on which one matches.
    return any([hmac.compare_digest(given, one) for one in valid])  # noqa: C419 - all of them


def _credentials(request: Request, kind: bytes) -> list[bytes]:
    found = []
    for value in request.values(b"authorization"):
        scheme, _, rest = value.partition(b" ")
        if scheme.lower() == kind:
            found.append(rest.strip())
    return found


def base64_or_nothing(text: bytes) -> bytes:
    """Return the decoded *text*; empty, which equals no secret, if it is not base64."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return b""


def _sign(key: bytes, text: bytes) -> bytes:
    return hmac.new(key, text, sha256).hexdigest().encode()
