"""
Verify JSON Web Tokens of an identity provider with the keys that it publishes.

A token is refused unless its claims are valid, its algorithm is allowed, and one key of the
provider for this algorithm verifies its signature. Nothing else in a token's header (`jwk`,
`jku`, `x5u`, `x5c`) is ever used.

The keys (a JWK Set) are fetched at the start and again when they expire: after `max-age` of
`Cache-Control`, but not before a minute nor later than an hour. A token may name a key that is
not in the set, because providers rotate keys and caches are late. The set is then fetched
again. Until one fetch has succeeded since the key was first missed, the token cannot be
verified (503); afterwards it is refused (401).

However many such tokens arrive, the set is fetched at most every 30 seconds. While the provider
is unavailable, the known keys stay valid; before the first response, no token can be verified.
A fetched set replaces the previous one, so a removed key is not accepted any more.
"""

import asyncio
import base64
import logging
import re
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from oncebridge.base.clock import Clock
from oncebridge.base.options import Doc
from oncebridge.errors import ConfigError
from oncebridge.http.addresses import names_loopback
from oncebridge.http.client import Client, ClientResponse, NotSent, Unclear
from oncebridge.http.target import HttpTarget

if TYPE_CHECKING:
    from jwt import PyJWK

_log = logging.getLogger("oncebridge")

Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512"]
_RSA: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_CURVES: Final = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512"}
_LEAST_RSA_BITS: Final = 2048

_MOST_TOKEN: Final = 16 * 1024
_MOST_SET: Final = 256 * 1024
_MOST_KEYS: Final = 100
_MOST_VERIFIED: Final = 1000
_MOST_MISSED: Final = 1000
_FETCH_S: Final = 10.0
_LEAST_APART_S: Final = 30.0  # the minimum time between two fetches
_KEPT_S: Final = (60.0, 600.0, 3600.0)
"""How long a set is used: the minimum, the default without max-age, and the maximum."""
_WARN_MS: Final = 60_000
_SHAPE: Final = re.compile(rb"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)")
_MAX_AGE: Final = re.compile(rb"(?i)(?:^|[,\s])max-age\s*=\s*\"?(\d{1,9})")


class JwtOptions(Struct, frozen=True, kw_only=True):
    """One identity provider, and which of its tokens are accepted."""

    issuer: Annotated[
        str,
        Doc("The provider, exactly as in `iss` of its tokens.", "https://login.example.com/eu"),
    ]
    jwks: Annotated[
        str,
        Doc(
            "Where the provider publishes its keys: `jwks_uri` of its "
            "`/.well-known/openid-configuration`.",
            "https://login.example.com/eu/keys",
        ),
    ]
    audience: Annotated[
        tuple[str, ...],
        Doc(
            "What `aud` of a token must be or contain; of several, one. Without it only tokens "
            "that have no `aud` are accepted, and `scope` or `claims` is required.",
            "api://events",
            or_one=True,
        ),
    ] = ()
    scope: Annotated[
        tuple[str, ...],
        Doc(
            "Scopes that a token must have, all of them (`scope` or `scp`).",
            "events.write",
            or_one=True,
        ),
    ] = ()
    claims: Annotated[
        dict[str, tuple[str, ...]],
        Doc(
            "Claims that a token must have, with their text; of several texts, one.",
            '{ client_id = "eventbridge" }',
            or_one=True,
        ),
    ] = {}
    algorithms: Annotated[
        tuple[Algorithm, ...],
        Doc("Algorithms that a token may be signed with.", '["RS256"]'),
    ] = ("RS256", "ES256", "PS256")
    leeway: Annotated[
        timedelta,
        Doc(
            "The allowed difference between the provider's clock and ours.",
            "30s",
            at_least=0,
            at_most=300,
        ),
    ] = timedelta(seconds=60)
    ca_file: Annotated[
        str | None,
        Doc(
            "PEM file of the authorities to trust for `jwks` instead of the system's.",
            "/etc/oncebridge/ca.pem",
        ),
    ] = None
    allow_private: Annotated[bool, Doc("Allow a provider whose address is not public.", "true")] = (
        False
    )


class TokenRefused(Struct, frozen=True, gc=False):
    """Why a token is not accepted; nothing of the token is quoted."""

    reason: str
    is_final: bool = True
    """False if the token cannot be verified yet: the request may be retried."""


_NO_TOKEN: Final = TokenRefused("it is not a signed JWT")
_NO_KEYS: Final = TokenRefused("the keys of the provider are not known yet", is_final=False)
_NEW_KEY: Final = TokenRefused("its key is not known yet", is_final=False)


class TokenVerifier:
    """Verifies the tokens of the *providers*; their keys are fetched from `open` on."""

    def __init__(self, providers: Sequence[JwtOptions], clock: Clock) -> None:
        places = ["jwt"] if len(providers) == 1 else [f"jwt[{at}]" for at in range(len(providers))]
        self._verified: dict[bytes, float] = {}
        self._providers = [
            _Provider(options, place, clock, self._verified.clear)
            for options, place in zip(providers, places, strict=True)
        ]
        self._clock = clock

    def open(self) -> None:
        """Start fetching keys; raise `ConfigError` if a file cannot be used."""
        for provider in self._providers:
            provider.open()

    async def aclose(self) -> None:
        for provider in self._providers:
            await provider.aclose()

    def judge(self, token: bytes) -> TokenRefused | None:
        """Return None if *token* is accepted, otherwise the reason for refusing it."""
        now_s = self._clock() / 1000
        digest = sha256(token).digest()
        if self._verified.get(digest, 0.0) > now_s:
            return None
        read = _read(token)
        if read is None:
            return _NO_TOKEN
        if read.header.crit is not UNSET:
            return TokenRefused("its header has critical extensions (crit)")
        found = [
            provider.judge(read, now_s)
            for provider in self._providers
            if provider.issuer == read.claims.get("iss")
        ]
        if None in found:
            if len(self._verified) >= _MOST_VERIFIED:
                self._verified.clear()
            self._verified[digest] = read.claims["exp"]
            return None
        refused = [one for one in found if one is not None]
        undecided = [one for one in refused if not one.is_final]
        return (*undecided, *refused, TokenRefused("its issuer (iss) is not configured"))[0]

    def warnings(self) -> list[str]:
        """Return the current problems with the keys; they contain no secret."""
        return list(dict.fromkeys(filter(None, (one.warning() for one in self._providers))))

    @property
    def has_keys(self) -> bool:
        """True once the keys of at least one provider are known."""
        return any(provider.has_keys for provider in self._providers)


class _Provider:
    """One provider: its keys, and the claims that its tokens must have."""

    def __init__(
        self, options: JwtOptions, place: str, clock: Clock, on_change: Callable[[], None]
    ) -> None:
        self.issuer = options.issuer
        self._options = options
        self._place = place
        self._target = _checked(options, place)
        self._jwk = _pyjwk(place)
        self._clock = clock
        self._on_change = on_change
        self._keys: tuple[_PublicKey, ...] | None = None
        self._begun = 0  # the number of fetches that were started
        self._fetched = 0  # the number of the last successful fetch
        self._missed: dict[str | UnsetType, int] = {}
        """The number of started fetches when a key was first missed."""
        self._failures = 0
        self._warn_at_ms = 0
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # --- the token ---------------------------------------------------------------------

    def judge(self, token: "_Token", now_s: float) -> TokenRefused | None:
        options = self._options
        if token.header.alg not in options.algorithms:
            return TokenRefused("its algorithm (alg) is not among jwt.algorithms")
        wrong = next(_wrong_claims(token.claims, options, now_s), "")
        if wrong:
            return TokenRefused(wrong)
        if self._keys is None:
            return _NO_KEYS
        kid = token.header.kid
        fitting = [
            key
            for key in self._keys
            if key.algorithm == token.header.alg and (kid is UNSET or key.kid == kid)
        ]
        if kid is UNSET and len(fitting) > 1:
            return TokenRefused("it names no key (kid), and several keys of the provider fit it")
        if any(key.verifies(token) for key in fitting):
            return None
        if fitting and kid is not UNSET:
            return TokenRefused("its signature is wrong")
        if kid in _names(self._keys):
            return TokenRefused("its algorithm (alg) is not the one that its key is for")
        return self._without_key(kid)

    def _without_key(self, kid: str | UnsetType) -> TokenRefused:
        """Request a fetch; refuse finally if a later fetch did not bring the key either."""
        self._wanted.set()
        if kid not in self._missed and len(self._missed) >= _MOST_MISSED:
            self._missed.clear()
        if self._fetched > self._missed.setdefault(kid, self._begun):
            return TokenRefused("no key of the provider fits it")
        return _NEW_KEY

    # --- the keys ----------------------------------------------------------------------

    def open(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep(self._client()))

    async def aclose(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def has_keys(self) -> bool:
        return bool(self._keys)

    def warning(self) -> str:
        if self._keys is None:
            return "jwt: the keys of the identity provider are not known yet"
        if not self._keys:
            return "jwt: the identity provider publishes no key that can be used"
        return "jwt: the keys of the identity provider cannot be renewed" if self._failures else ""

    def _client(self) -> Client:
        options = self._options
        tls = None
        if options.ca_file is not None:
            try:
                tls = ssl.create_default_context(cafile=options.ca_file)
                tls.set_alpn_protocols(["http/1.1"])
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or type(error).__name__
                raise ConfigError(
                    f"{self._place}.ca_file", f"{options.ca_file} cannot be used: {reason}"
                ) from None
        return Client(
            options.jwks,
            headers=[("Accept", "application/json"), ("User-Agent", "oncebridge")],
            max_answer=_MOST_SET + 1,
            allow_private=options.allow_private,
            tls=tls,
        )

    async def _keep(self, client: Client) -> None:
        """Fetch the keys when they expire, or when a key is missing."""
        try:
            while True:
                self._wanted.clear()
                due_s = await self._refresh(client)
                await asyncio.sleep(min(due_s, _LEAST_APART_S))
                with suppress(TimeoutError):
                    async with asyncio.timeout(due_s - _LEAST_APART_S):
                        await self._wanted.wait()
        finally:
            await client.aclose()

    async def _refresh(self, client: Client) -> float:
        """Fetch the keys, or log the error; return the seconds until the next fetch."""
        self._begun += 1
        try:
            async with asyncio.timeout(_FETCH_S):
                answer = await client.request("GET", self._target.path)
            keys = self._read_set(answer)
        except TimeoutError:
            return self._failed(f"no answer within {_FETCH_S:g} s")
        except (NotSent, Unclear, ValueError) as error:
            return self._failed(str(error))
        except Exception as error:  # noqa: BLE001 - after any error, the next fetch may succeed
            return self._failed(type(error).__name__)
        had_failed, self._failures = self._failures, 0
        self._fetched = self._begun
        if self._keys is None or had_failed or _names(keys) != _names(self._keys):
            _log.log(
                logging.INFO if keys else logging.WARNING,
                "oncebridge.jwt_keys_fetched",
                extra={"host": self._target.host, "keys": len(_names(keys))},
            )
        self._keys = keys
        self._on_change()
        said = _MAX_AGE.search(answer.headers.get(b"cache-control", b""))
        least, usual, most = _KEPT_S
        return min(max(float(said[1]), least), most) if said else usual

    def _failed(self, error: str) -> float:
        self._failures += 1
        now_ms = self._clock()
        if now_ms >= self._warn_at_ms:
            self._warn_at_ms = now_ms + _WARN_MS
            known = self._keys is not None
            _log.warning(
                "oncebridge.jwt_keys_unavailable",
                extra={
                    "host": self._target.host,
                    "error": error,
                    "what": "the known keys stay valid" if known else "senders receive 503",
                },
            )
        # Without keys every sender is refused, so the first fetch is retried sooner.
        is_first = self._keys is None
        return min(2.0 ** (self._failures - 1), _LEAST_APART_S) if is_first else _LEAST_APART_S

    def _read_set(self, answer: ClientResponse) -> "tuple[_PublicKey, ...]":
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}")
        if len(answer.body) > _MOST_SET:
            raise ValueError(f"the answer has more than {_MOST_SET} bytes")
        try:
            written = msgspec.json.decode(answer.body, type=_KeySet).keys
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise ValueError("the answer is not a set of keys (JWKS)") from None
        if len(written) > _MOST_KEYS:
            raise ValueError(f"the set has more than {_MOST_KEYS} keys")
        keys = []
        for jwk in written:
            with suppress(Exception):  # of a key that cannot be read
                for algorithm in _algorithms(jwk, self._options.algorithms):
                    key = self._jwk(jwk, algorithm)
                    if algorithm not in _RSA or key.key.key_size >= _LEAST_RSA_BITS:
                        keys.append(
                            _PublicKey(str(jwk["kid"]) if "kid" in jwk else None, algorithm, key)
                        )
        return tuple(keys)


class _KeySet(Struct):
    keys: list[dict[str, Any]]


class _PublicKey(Struct, frozen=True):
    """A key with one of its algorithms."""

    kid: str | None
    algorithm: str
    jwk: Any

    def verifies(self, token: "_Token") -> bool:
        return bool(self.jwk.Algorithm.verify(token.signed, self.jwk.key, token.signature))


def _names(keys: "tuple[_PublicKey, ...]") -> set[str | None]:
    return {key.kid for key in keys}


def _algorithms(jwk: dict[str, Any], allowed: Sequence[str]) -> list[str]:
    """Return those of *allowed* that a key is for; none if it is not for verifying."""
    is_for_signatures = jwk.get("use", "sig") == "sig" and "verify" in jwk.get(
        "key_ops", ["verify"]
    )
    if not is_for_signatures or "d" in jwk:  # a published private key proves nothing
        return []
    if jwk.get("kty") == "RSA":
        fitting: Sequence[str] = _RSA
    elif jwk.get("kty") == "EC":
        fitting = [_CURVES[crv]] if (crv := jwk.get("crv")) in _CURVES else []
    else:
        fitting = ()
    only = jwk.get("alg")
    return [name for name in fitting if name in allowed and only in (None, name)]


# --- reading a token ----------------------------------------------------------------------


class _Header(Struct):
    alg: str
    kid: str | UnsetType = UNSET
    crit: Any = UNSET


class _Token(Struct):
    header: _Header
    claims: dict[str, Any]
    signed: bytes
    signature: bytes


_read_header = msgspec.json.Decoder(_Header).decode
_read_claims = msgspec.json.Decoder(dict[str, Any]).decode


def _read(token: bytes) -> _Token | None:
    """Return the parts of *token*; None if it is not a signed JWT."""
    parts = _SHAPE.fullmatch(token) if len(token) <= _MOST_TOKEN else None
    if parts is None:
        return None
    try:
        header, claims, signature = map(_decoded, parts.groups())
        return _Token(_read_header(header), _read_claims(claims), token[: parts.end(2)], signature)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def _decoded(part: bytes) -> bytes:
    decoded = base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4))
    if base64.urlsafe_b64encode(decoded).rstrip(b"=") != part:
        raise ValueError("not the canonical encoding")
    return decoded


def _wrong_claims(claims: dict[str, Any], options: JwtOptions, now_s: float) -> Iterator[str]:
    """Yield what is wrong with *claims*, except for their issuer."""
    leeway_s = options.leeway.total_seconds()
    times = {name: claims[name] for name in ("exp", "nbf", "iat") if name in claims}
    if "exp" not in times:
        yield "it does not expire (exp)"
    elif not all(map(_is_time, times.values())):
        yield "its times (exp, nbf, iat) are not numbers"
    elif times["exp"] + leeway_s <= now_s:
        yield "it has expired (exp)"
    elif any(times.get(name, 0) - leeway_s > now_s for name in ("nbf", "iat")):
        yield "it is not valid yet (nbf, iat)"
    if not options.audience and claims.get("aud"):
        yield "it is for an audience (aud), and jwt.audience is not set"
    if options.audience and not _texts(claims.get("aud")) & set(options.audience):
        yield "it is for another audience (aud)"
    if not _scopes(claims) >= set(options.scope):
        yield "it lacks a scope of jwt.scope"
    for name, texts in options.claims.items():
        if not _texts(claims.get(name)) & set(texts):
            yield f"its claim {name} is missing, or is not as in jwt.claims"


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e15  # false for NaN too


def _texts(value: Any) -> set[str]:
    values = value if isinstance(value, list) else [value]
    return {text for text in values if isinstance(text, str)}


def _scopes(claims: dict[str, Any]) -> set[str]:
    return {
        scope
        for name in ("scope", "scp")
        for text in _texts(claims.get(name))
        for scope in text.split()
    }


# --- settings -----------------------------------------------------------------------------


def _checked(options: JwtOptions, place: str) -> HttpTarget:
    try:
        target = HttpTarget.parse(options.jwks)
    except ValueError as error:
        raise ConfigError(f"{place}.jwks", str(error)) from None
    if not (target.is_tls or names_loopback(target.host)):
        raise ConfigError(
            f"{place}.jwks", "http:// would allow others to replace the keys; use https://"
        )
    if target.authorization:
        raise ConfigError(f"{place}.jwks", "the URL has a user; remove it, because keys are public")
    if not options.algorithms:
        raise ConfigError(f"{place}.algorithms", "is empty; remove it, or list at least one")
    if not (options.audience or options.scope or options.claims):
        raise ConfigError(
            f"{place}.audience",
            "is missing: tokens for other services would be accepted; set it, or scope or claims "
            "where the provider's tokens have no audience",
        )
    return target


def _pyjwk(place: str) -> "type[PyJWK]":
    try:
        import cryptography  # noqa: F401, PLC0415 - PyJWT can do without
        from jwt import PyJWK  # noqa: PLC0415 - only needed here
    except ImportError as error:
        raise ConfigError(
            place,
            f"needs a package that is not installed ({error.name or error}); "
            'pip install "oncebridge[jwt]"',
        ) from error
    return PyJWK
