"""
Who may look, and whether it is they who ask.

Three ways lead in: a token (typed in once, then a cookie; or sent by a program with each request),
a name in a header (believed from the proxies that were named, and from nobody else), or, where only
this machine reaches the dashboard and nothing else was set, being here.

A browser can be made to ask by a page of somebody else. So a request has to be meant for this
dashboard by the name that it was asked under, and what changes anything has to come from a page of
ours (`Origin`, `Sec-Fetch-Site`) and carry what only such a page has, the form token.

The right token is never refused, however many wrong ones came: what keeps people from guessing it
is its length. Those who send wrong ones again and again are told to wait.
"""

import hmac
import ipaddress
import platform
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Literal
from urllib.parse import urlsplit

from msgspec import Struct

from oncebridge.clock import Clock
from oncebridge.config import Config
from oncebridge.dashboard.asking import cookies
from oncebridge.dashboard.seal import Seal
from oncebridge.http.addresses import names_loopback
from oncebridge.http.server import Request

SESSION_S: Final = 12 * 3600
_LONGEST_NAME: Final = 256
_MOST_WRONG, _WRONG_MS = 10, 60_000
_MOST_PEERS, _MOST_ENDED = 1024, 4096
_MOST_HOPS: Final = 32
_HOLDER: Final = "somebody with the token"


class Identity(Struct, frozen=True):
    """Who asks, and how that is known."""

    kind: Literal["here", "token", "bearer", "proxy"]
    user: str = ""
    session: str = ""

    @property
    def name(self) -> str:
        """Name them for the trail; empty where nothing at all is known."""
        return self.user or (_HOLDER if self.kind in ("token", "bearer") else "")

    def __str__(self) -> str:
        """Give what form tokens are bound to."""
        return f"{self.kind}\n{self.user}\n{self.session}"


class TooOften(Exception):
    """Somebody at that address has guessed too often; told as a page with status 429."""


class Gate:
    """Let in whom *config* lets in; *host* is where it listens."""

    def __init__(self, config: Config, host: str, *, seal: Seal, clock: Clock) -> None:
        token = config.dashboard_token.reveal() if config.dashboard_token else ""
        self._token = token.encode("utf-8", "surrogateescape")
        self._header = (config.dashboard_user_header or "").lower().encode()
        self._proxies = [
            ipaddress.ip_network(one, strict=False) for one in config.dashboard_proxies
        ]
        self._hosts = {_known(host.lower()) for host in config.dashboard_hosts}
        self._own = {host.lower(), platform.node().lower()} - {""}
        self._seal = seal
        self._wrong = _Wrong(clock)
        self._ended: OrderedDict[str, None] = OrderedDict()
        """Sessions that were logged out of, as far as there is room."""

    @property
    def is_guarded(self) -> bool:
        """Tell whether people have to say who they are."""
        return bool(self._token or self._header)

    @property
    def has_login(self) -> bool:
        """Tell whether there is a token to log in with."""
        return bool(self._token)

    @property
    def cookie(self) -> str:
        """Name the cookie of a session."""
        return f"oncebridge-{self._seal.name}"

    # --- who ---------------------------------------------------------------------------

    def who(self, request: Request) -> Identity | None:
        """Tell who asks; raises `TooOften` where a program has sent too many wrong tokens."""
        if not self.is_guarded:
            return Identity("here")
        # A proxy may send a token of its own along, which is none of ours: a session comes first.
        return self._by_proxy(request) or self._by_session(request) or self._by_bearer(request)

    def _by_proxy(self, request: Request) -> Identity | None:
        given = request.values(self._header) if self._header else []
        if len(given) != 1 or len(given[0]) > _LONGEST_NAME or not self.is_proxy(request.peer):
            return None
        try:
            user = given[0].decode().strip()
        except UnicodeDecodeError:
            return None
        return Identity("proxy", user) if user and user.isprintable() else None

    def _by_bearer(self, request: Request) -> Identity | None:
        given = request.values(b"authorization")
        scheme, _, token = (given[0] if len(given) == 1 else b"").partition(b" ")
        if not self._token or scheme.lower() != b"bearer":
            return None
        return Identity("bearer") if self.is_token(token.strip(), request) else None

    def _by_session(self, request: Request) -> Identity | None:
        sealed = cookies(request).get(self.cookie, "") if self._token else ""
        session = self._seal.open("session", sealed) if sealed else None
        if session is None or session in self._ended:
            return None
        return Identity("token", session=session)

    def is_token(self, given: bytes, request: Request) -> bool:
        """Tell whether *given* is the token; raises `TooOften` for one too many that is not."""
        if self._token and hmac.compare_digest(given, self._token):
            return True
        client = self.client(request)
        self._wrong.check(client)
        self._wrong.note(client)
        return False

    def client(self, request: Request) -> str:
        """
        Give the address that a request came from: behind proxies that are believed, before them.

        Each of them adds whom it was asked by at the right. What stands further left than the last
        one that we believe was written by whoever asked.
        """
        client = request.peer
        said = b",".join(request.values(b"x-forwarded-for")).decode("latin-1")
        for hop in reversed(said.rsplit(",", _MOST_HOPS)[-_MOST_HOPS:]):
            if not self.is_proxy(client):
                break
            address = _address(hop.strip())
            if not _is_number(address):
                break
            client = address
        return client

    def begin(self) -> str:
        """Begin a session: what its cookie holds."""
        return self._seal.close("session", self._seal.nonce(), for_s=SESSION_S)

    def end(self, identity: Identity) -> None:
        """End a session, for whoever has its cookie."""
        self._ended[identity.session] = None
        if len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)

    def is_proxy(self, peer: str) -> bool:
        """Tell whether a proxy that is believed is at the other end."""
        try:
            address = ipaddress.ip_address(peer.partition("%")[0])
        except ValueError:
            return False
        return any(address in network for network in self._proxies)

    def is_secure(self, request: Request) -> bool:
        """Tell whether a proxy says that the browser speaks TLS with it."""
        said = request.values(b"x-forwarded-proto")
        return said == [b"https"] and self.is_proxy(request.peer)

    # --- whether it is they --------------------------------------------------------------

    def is_meant(self, request: Request, identity: Identity | None) -> bool:
        """
        Tell whether the name that was asked for is one of ours.

        A page of somebody else can have a name of its own stand for this address, and then send
        whatever headers it likes, that of a proxy among them, and read what it gets. Only the token
        it does not have. An address in numbers stands for nothing else, so where people have to
        log in, any is good.
        """
        if identity is not None and identity.kind == "bearer":
            return True
        asked = (request.header(b"host") or b"").decode("latin-1").lower()
        name = _name(asked)
        if names_loopback(name) or name.endswith(".localhost") or {asked, name} & self._hosts:
            return True
        return self.is_guarded and (name in self._own or _is_number(name))

    def is_own(self, request: Request, identity: Identity | None) -> bool:
        """Tell whether a request that is to change something comes from a page of ours."""
        sites = request.values(b"sec-fetch-site")
        if sites:
            return sites in ([b"same-origin"], [b"none"])
        origins = request.values(b"origin")
        if not origins:  # no browser leaves it out, and a program has to have the token
            return identity is not None and identity.kind == "bearer"
        asked = (request.header(b"host") or b"").decode("latin-1").lower()
        try:
            origin = urlsplit(origins[0].decode("ascii").lower())
        except ValueError:
            return False
        if len(origins) != 1 or origin.scheme not in ("http", "https"):
            return False
        return bool({origin.netloc, _name(origin.netloc)} & self._hosts) or origin.netloc == asked

    @staticmethod
    def is_embedded(request: Request) -> bool:
        """Tell whether a page of somebody else wants this as a part of itself."""
        site = request.header(b"sec-fetch-site") or b"none"
        is_other = site not in (b"same-origin", b"none")
        return is_other and request.header(b"sec-fetch-mode") != b"navigate"

    def form_token(self, identity: Identity | None) -> str:
        """Make what a form has to send back; another each time."""
        return self._seal.mark("form", str(identity))

    def is_form_token(self, identity: Identity | None, given: Sequence[str]) -> bool:
        return len(given) == 1 and self._seal.is_mark("form", str(identity), given[0])


class _Wrong:
    """How often each address has lately sent a wrong token; of so many addresses at most."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def check(self, peer: str) -> None:
        count, since_ms = self._since.get(_whose(peer), (0, 0))
        if count >= _MOST_WRONG and self._clock() - since_ms < _WRONG_MS:
            raise TooOften

    def note(self, peer: str) -> None:
        whose, now_ms = _whose(peer), self._clock()
        count, since_ms = self._since.pop(whose, (0, now_ms))
        is_old = now_ms - since_ms >= _WRONG_MS
        self._since[whose] = (1, now_ms) if is_old else (count + 1, since_ms)
        if len(self._since) > _MOST_PEERS:
            self._since.popitem(last=False)


def _whose(peer: str) -> str:
    """Name who is at an address: of IPv6 a household has a network, of loopback everybody is one."""
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return ""
    if address.is_loopback:
        return "loopback"
    return str(address) if address.version == 4 else address.exploded[:19]


def _address(hop: str) -> str:
    """Take the port off an address, as some proxies write it."""
    return _name(hop) if hop.startswith("[") or hop.count(":") == 1 else hop


def _name(host: str) -> str:
    """Take the port off what a browser calls us."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _known(host: str) -> str:
    """Write a further name as it is compared: with its port, if it has one."""
    return host if ":" in host.rpartition("]")[2] else _name(host)


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
