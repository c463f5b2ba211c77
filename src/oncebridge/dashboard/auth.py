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
import platform
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Final, Literal

from msgspec import Struct

from oncebridge.base.clock import Clock
from oncebridge.dashboard.requests import cookies
from oncebridge.dashboard.sessions import SESSION_S, Sessions
from oncebridge.dashboard.signatures import Seal
from oncebridge.http.client_address import FailedAttempts, TrustedProxies
from oncebridge.http.cross_site import OwnNames, requested_host, without_port
from oncebridge.http.server import Request
from oncebridge.service.config import Config

_LONGEST_NAME: Final = 256
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
        """Return what form tokens are bound to."""
        return f"{self.kind}\n{self.user}\n{self.session}"


class Gate:
    """Let in whom *config* lets in; *host* is where it listens."""

    def __init__(
        self, config: Config, host: str, *, seal: Seal, clock: Clock, sessions: Sessions
    ) -> None:
        token = config.dashboard_token.reveal() if config.dashboard_token else ""
        self._token = token.encode("utf-8", "surrogateescape")
        self._header = (config.dashboard_user_header or "").lower().encode()
        self.proxies = TrustedProxies(config.dashboard_proxies)
        self._names = OwnNames(config.dashboard_hosts)
        self._own = {host.lower(), platform.node().lower()} - {""}
        self._seal = seal
        self._wrong = FailedAttempts(clock)
        self.sessions = sessions

    @property
    def is_guarded(self) -> bool:
        """Return whether people have to say who they are."""
        return bool(self._token or self._header)

    @property
    def has_login(self) -> bool:
        """Return whether there is a token to log in with."""
        return bool(self._token)

    @property
    def cookie(self) -> str:
        """Name the cookie of a session."""
        return f"oncebridge-{self._seal.name}"

    # --- who ---------------------------------------------------------------------------

    def who(self, request: Request, *, ended: str = "") -> Identity | None:
        """
        Return who asks, where the session *ended* lets nobody in any more.

        Raises `TooOften` where a program has sent too many wrong tokens.
        """
        if not self.is_guarded:
            return Identity("here")
        # A proxy may send a token of its own along, which is none of ours: a session comes first.
        return (
            self._by_proxy(request) or self._by_session(request, ended) or self._by_bearer(request)
        )

    def _by_proxy(self, request: Request) -> Identity | None:
        given = request.values(self._header) if self._header else []
        if (
            len(given) != 1
            or len(given[0]) > _LONGEST_NAME
            or not self.proxies.include(request.peer)
        ):
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

    def _by_session(self, request: Request, ended: str) -> Identity | None:
        sealed = cookies(request).get(self.cookie, "") if self._token else ""
        session = self._seal.open("session", sealed) if sealed else None
        return Identity("token", session=session) if session and session != ended else None

    def is_token(self, given: bytes, request: Request) -> bool:
        """Return whether *given* is the token; raises `TooOften` for one too many that is not."""
        if self._token and hmac.compare_digest(given, self._token):
            return True
        self._wrong.note(self.proxies.client(request))
        return False

    def begin(self) -> str:
        """Begin a session: what its cookie holds."""
        session = self._seal.nonce()
        self.sessions.begin(session)
        return self._seal.close("session", session, for_s=SESSION_S)

    def is_secure(self, request: Request) -> bool:
        """Return whether a proxy says that the browser speaks TLS with it."""
        said = request.values(b"x-forwarded-proto")
        return said == [b"https"] and self.proxies.include(request.peer)

    # --- whether it is they --------------------------------------------------------------

    def is_meant(self, request: Request, identity: Identity | None) -> bool:
        """
        Return whether the name that was asked for is one of ours.

        A page of somebody else can have a name of its own stand for this address, and then send
        whatever headers it likes, that of a proxy among them, and read what it gets. Only the token
        it does not have. An address in numbers stands for nothing else, so where people have to
        log in, any is good.
        """
        if identity is not None and identity.kind == "bearer":
            return True
        asked = requested_host(request)
        if self._names.include(asked):
            return True
        name = without_port(asked)
        return self.is_guarded and (name in self._own or _is_number(name))

    def is_own(self, request: Request, identity: Identity | None) -> bool:
        """Return whether a request that is to change something comes from a page of ours."""
        page = self._names.page(request)
        # A program is no page, and has to have the token.
        is_program = page is None and identity is not None and identity.kind == "bearer"
        return page == "own" or is_program

    @staticmethod
    def is_embedded(request: Request) -> bool:
        """Return whether a page of somebody else wants this as a part of itself."""
        site = request.header(b"sec-fetch-site") or b"none"
        is_other = site not in (b"same-origin", b"none")
        return is_other and request.header(b"sec-fetch-mode") != b"navigate"

    def form_token(self, identity: Identity | None) -> str:
        """Make what a form has to send back; another each time."""
        return self._seal.mark("form", str(identity))

    def is_form_token(self, identity: Identity | None, given: Sequence[str]) -> bool:
        return len(given) == 1 and self._seal.is_mark("form", str(identity), given[0])


def _is_number(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
