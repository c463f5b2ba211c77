"""
Look up a conversation with the API of Genesys Cloud.

    POST https://login.HOST/oauth/token                 get a token for the OAuth client
    GET  https://api.HOST/api/v2/conversations/ID       look up a conversation

A lookup has one of five results, and never raises:

| response                                          | result          |
| ------------------------------------------------- | --------------- |
| 200 with the requested conversation               | `Exists`        |
| 404, 400 or 410, in the format of the API         | `Missing`       |
| 403 in that format, while others are visible      | `Hidden`        |
| any other such 403; 401 to a new token; no token  | `ClientRefused` |
| any other response, or none                       | `LookupFailed`  |

A response of another server (a proxy's error, a login page) says nothing about a conversation.
A token is fetched once for all concurrent callers, and kept until shortly before it expires.
Neither the token nor the secret is ever part of a message.
"""

import asyncio
import base64
import re
from collections.abc import Awaitable, Mapping
from datetime import timedelta
from typing import Any, Final
from urllib.parse import quote

import msgspec
from msgspec import Struct

from oncebridge.base.options import did_you_mean
from oncebridge.base.secrets import Secret
from oncebridge.engine.rate_limit import RateLimit
from oncebridge.errors import ConfigError
from oncebridge.http.addresses import names_loopback
from oncebridge.http.client import Client, ClientResponse, NotSent, Unclear
from oncebridge.http.target import HttpTarget

PERMISSION: Final = "conversation:communication:view"
"""The permission that the role of the OAuth client needs."""

REGIONS: Final[Mapping[str, str]] = {
    "us-east-1": "mypurecloud.com",
    "us-east-2": "use2.us-gov-pure.cloud",
    "us-west-2": "usw2.pure.cloud",
    "ca-central-1": "cac1.pure.cloud",
    "mx-central-1": "mxc1.pure.cloud",
    "sa-east-1": "sae1.pure.cloud",
    "eu-central-1": "mypurecloud.de",
    "eu-central-2": "euc2.pure.cloud",
    "eu-west-1": "mypurecloud.ie",
    "eu-west-2": "euw2.pure.cloud",
    "eusc-de-east-1": "edee1.eusc-pure.cloud",
    "me-central-1": "mec1.pure.cloud",
    "ap-south-1": "aps1.pure.cloud",
    "ap-southeast-1": "apse1.pure.cloud",
    "ap-southeast-2": "mypurecloud.com.au",
    "ap-northeast-1": "mypurecloud.jp",
    "ap-northeast-2": "apne2.pure.cloud",
    "ap-northeast-3": "apne3.pure.cloud",
}
"""The host of Genesys Cloud for each AWS Region of an organisation."""

_HOST = re.compile(r"(?!-)[a-z0-9-]{1,63}(\.[a-z0-9-]{1,63})+")
_SERVICES = ("api.", "login.", "apps.")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_TOKEN = re.compile(r"[!-~]{1,16384}")
_ERROR = re.compile(r"[a-z][a-z_ .-]{0,60}")
_REFUSALS: Final = frozenset({400, 401, 403})
_MAX_RESPONSE: Final = 1024 * 1024  # long conversations have long responses
_MAX_WAIT_S: Final = 300
_EARLY_S: Final = 60.0
_USUAL_LIFE_S: Final = 3600.0
_MAX_HIDDEN: Final = 20
"""After so many hidden conversations in a row, the OAuth client is treated as refused."""


class Exists(Struct, frozen=True, gc=False):
    """The conversation exists."""


class Missing(Struct, frozen=True, gc=False):
    """The API does not know the conversation."""


class Hidden(Struct, frozen=True, gc=False):
    """The OAuth client may not see this conversation, but may see others."""


class ClientRefused(Struct, frozen=True, gc=False):
    """The OAuth client is refused for every conversation; the operator has to fix it."""

    reason: str


class LookupFailed(Struct, frozen=True, gc=False):
    """The API gave no usable response; a retry may succeed."""

    reason: str
    retry_after_ms: int = 0
    """How long the API asked to wait."""


LookupResult = Exists | Missing | Hidden | ClientRefused | LookupFailed


def is_conversation_id(conversation: object) -> bool:
    """Return True if this can be the id of a conversation."""
    return isinstance(conversation, str) and _ID.fullmatch(conversation) is not None


class Hosts(Struct, frozen=True):
    """The URLs of the login and of the API."""

    login: str
    api: str
    allow_private: bool = False
    """True if the URL was configured explicitly, so it may be a private address."""

    @classmethod
    def of(cls, region: str, where: str) -> "Hosts":
        """Return the hosts of *region*, or raise `ConfigError`."""
        if "://" in region:
            return cls._from_url(region, where)
        name = region.strip().lower()
        host = REGIONS.get(name, name)
        if host.startswith(_SERVICES):
            shorter = host.partition(".")[2]
            raise ConfigError(where, f"{region!r}: write only {shorter!r}")
        if not _HOST.fullmatch(host):
            raise ConfigError(
                where,
                f"{region!r} is neither a Region of Genesys Cloud nor a host; "
                f"{did_you_mean(name, list(REGIONS))}",
            )
        return cls(f"https://login.{host}", f"https://api.{host}")

    @classmethod
    def _from_url(cls, url: str, where: str) -> "Hosts":
        """Use one URL for both, such as that of a proxy."""
        try:
            target = HttpTarget.parse(url)
        except ValueError as error:
            raise ConfigError(where, str(error)) from None
        if target.authorization or "?" in target.path:
            message = "the URL has a user or a query; only a host, a port and a path can be used"
            raise ConfigError(where, message)
        if not (target.is_tls or names_loopback(target.host)):
            raise ConfigError(where, "http:// would send the secret unencrypted; use https://")
        return cls(url, url, allow_private=True)


class _AccessToken(Struct, frozen=True):
    text: Secret
    until_s: float


class Api:
    """
    Looks up conversations at *hosts* as the OAuth client *client_id*, with *timeout* per request.

    The caller takes a turn of *rate_limit* before a lookup. A second request takes another turn.
    """

    def __init__(
        self,
        hosts: Hosts,
        client_id: Secret,
        client_secret: Secret,
        *,
        timeout: timedelta,
        rate_limit: RateLimit,
    ) -> None:
        self._hosts = hosts
        self._id = client_id
        self._secret = client_secret
        self._timeout_s = timeout.total_seconds()
        self._rate_limit = rate_limit
        self._clients: dict[str, Client] = {}
        self._token: _AccessToken | None = None
        self._fetching: asyncio.Task[_AccessToken | ClientRefused | LookupFailed] | None = None
        self._hidden = _MAX_HIDDEN
        """The hidden conversations in a row; a new token starts at the limit until one is visible."""

    async def find(self, conversation: str) -> LookupResult:
        """Look up one conversation; a token that is not accepted any more is renewed once."""
        client, prefix = self._client_for(self._hosts.api)
        path = f"{prefix}/api/v2/conversations/{quote(conversation, safe='')}"
        for is_repeat in (False, True):
            if is_repeat:
                await asyncio.sleep(self._rate_limit.take(1, asyncio.get_running_loop().time()))
            token = await self._get_token()
            if not isinstance(token, _AccessToken):
                return token
            headers = [("Authorization", f"Bearer {token.text.reveal()}")]
            answer = await self._bounded(
                "the Genesys API", client.request("GET", path, headers=headers)
            )
            if isinstance(answer, LookupFailed):
                return answer
            if answer.status != 401:
                return self._interpret_hidden(_interpret(answer, conversation))
            if self._token is token:  # else another task has renewed it
                self._token = None
        return ClientRefused(
            "the OAuth client is refused: the Genesys API answers 401 to a new token"
        )

    def _interpret_hidden(self, found: LookupResult) -> LookupResult:
        """
        Distinguish a hidden conversation from a client that can see none.

        Only a visible conversation proves that the client has the permission: the API may
        check the permission after the existence of the conversation.
        """
        if isinstance(found, Exists):
            self._hidden = 0
        elif isinstance(found, Hidden):
            self._hidden += 1
            if self._hidden > _MAX_HIDDEN:
                return ClientRefused(
                    "the OAuth client has no access: HTTP 403; its role needs the permission "
                    f"{PERMISSION}, in all divisions"
                )
        return found

    async def log_in(self) -> ClientRefused | LookupFailed | None:
        """Get a token if there is none; return the problem if that fails."""
        self._client_for(self._hosts.api)  # raises now if the proxy cannot be used
        token = await self._get_token()
        return None if isinstance(token, _AccessToken) else token

    async def aclose(self) -> None:
        """Close all connections; may be called again, and the API may be used after it."""
        clients, self._clients = self._clients, {}
        fetching, self._fetching = self._fetching, None
        if fetching is not None:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
        for client in clients.values():
            await client.aclose()

    # --- the token ---------------------------------------------------------------------

    async def _get_token(self) -> _AccessToken | ClientRefused | LookupFailed:
        """Return the token; concurrent callers wait for the same fetch."""
        loop = asyncio.get_running_loop()
        if self._token is not None and loop.time() < self._token.until_s:
            return self._token
        if self._fetching is None or self._fetching.done():
            self._fetching = loop.create_task(self._fetch())
        return await asyncio.shield(self._fetching)

    async def _fetch(self) -> _AccessToken | ClientRefused | LookupFailed:
        both = f"{self._id.reveal()}:{self._secret.reveal()}".encode()
        headers = [
            ("Authorization", f"Basic {base64.b64encode(both).decode()}"),
            ("Content-Type", "application/x-www-form-urlencoded"),
        ]
        client, prefix = self._client_for(self._hosts.login)
        body = b"grant_type=client_credentials"
        answer = await self._bounded(
            "the Genesys login", client.request("POST", f"{prefix}/oauth/token", body, headers)
        )
        if isinstance(answer, LookupFailed):
            return answer
        said = _read(answer.body)
        if answer.status in _REFUSALS:
            return ClientRefused(f"the OAuth client is refused: HTTP {answer.status}{_error(said)}")
        if answer.status != 200:
            return _failed_lookup("the Genesys login", answer)
        token, life_s = said.get("access_token"), said.get("expires_in")
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            return LookupFailed("the Genesys login returned no token")
        if isinstance(life_s, bool) or not isinstance(life_s, int | float) or life_s <= 0:
            life_s = _USUAL_LIFE_S
        until_s = asyncio.get_running_loop().time() + life_s - min(_EARLY_S, life_s / 5)
        self._token = _AccessToken(Secret(token), until_s)
        self._hidden = _MAX_HIDDEN
        return self._token

    # --- requests ----------------------------------------------------------------------

    async def _bounded(
        self, who: str, request: Awaitable[ClientResponse]
    ) -> ClientResponse | LookupFailed:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await request
        except TimeoutError:
            return LookupFailed(f"{who} did not answer within {self._timeout_s:g} s")
        except (NotSent, Unclear) as error:
            return LookupFailed(f"{who}: {error}")

    def _client_for(self, url: str) -> tuple[Client, str]:
        """Return the client for *url*, and the prefix of its paths."""
        if url not in self._clients:
            self._clients[url] = Client(
                url,
                headers=[("Accept", "application/json"), ("User-Agent", "oncebridge")],
                connect_timeout=timedelta(seconds=self._timeout_s),
                max_answer=_MAX_RESPONSE,
                allow_private=self._hosts.allow_private,
            )
        client = self._clients[url]
        return client, client.target.path.rstrip("/")


def _interpret(answer: ClientResponse, conversation: str) -> LookupResult:
    """Return the result that a response means; nothing of its body is ever quoted."""
    match answer.status:
        case 200 if _is_conversation(answer.body, conversation):
            return Exists()
        case 400 | 404 | 410 if _is_error(answer):
            return Missing()
        case 403 if _is_error(answer):
            return Hidden()
        case 200 | 400 | 403 | 404 | 410:
            return LookupFailed(
                f"the Genesys API answers HTTP {answer.status}, but not in its own format"
            )
    return _failed_lookup("the Genesys API", answer)


def _is_conversation(body: bytes, conversation: str) -> bool:
    """Return True if this is the requested conversation."""
    if len(body) < _MAX_RESPONSE:
        name = _read(body).get("id")
        return isinstance(name, str) and name.lower() == conversation.lower()
    # Truncated, so it cannot be parsed.
    own = re.compile(rb'"id"\s*:\s*"%s"' % re.escape(conversation.encode()), re.IGNORECASE)
    return body.lstrip().startswith(b"{") and own.search(body) is not None


def _is_error(answer: ClientResponse) -> bool:
    """Return True if this is an error in the format of Genesys: with a code and the status."""
    said = _read(answer.body)
    return isinstance(said.get("code"), str) and said.get("status") == answer.status


def _failed_lookup(who: str, answer: ClientResponse) -> LookupFailed:
    text = answer.headers.get(b"retry-after", b"").decode("latin-1").strip()
    seconds = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    return LookupFailed(f"{who} answers HTTP {answer.status}", min(seconds, _MAX_WAIT_S) * 1000)


def _read(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a response; empty if it is not one."""
    try:
        said = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _error(said: Mapping[str, Any]) -> str:
    """Return the error code of OAuth, such as `invalid_client`."""
    word = said.get("error")
    return f" {word}" if isinstance(word, str) and _ERROR.fullmatch(word) else ""
