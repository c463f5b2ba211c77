"""
Authentication, and protection against requests forged by other sites.

There are three ways in: a token (typed once, then kept in a session cookie; or sent by a program
with each request), a user name in a header (accepted from the configured proxies only), or no
login at all if the dashboard listens on a loopback address and neither is configured.

Another site can make a browser send requests. So a request must use a host name of this dashboard,
and one that changes state must come from one of its pages (`Origin`, `Sec-Fetch-Site`) and carry
the form token.

The right token is never refused, whatever the number of wrong ones: its length protects it from
guessing. A client that sends many wrong tokens has to wait.
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
from oncebridge.dashboard.signatures import CookieSigner
from oncebridge.http.client_address import FailedAttempts, TrustedProxies
from oncebridge.http.cross_site import OwnNames, requested_host, without_port
from oncebridge.http.server import Request
from oncebridge.service.config import Config

_LONGEST_NAME: Final = 256
_HOLDER: Final = "unknown (token)"


class Visitor(Struct, frozen=True):
    """The user of a request, and how they were authenticated."""

    kind: Literal["here", "token", "bearer", "proxy"]
    user: str = ""
    session: str = ""

    @property
    def name(self) -> str:
        """The name for the operator log; empty if nothing is known."""
        return self.user or (_HOLDER if self.kind in ("token", "bearer") else "")

    def __str__(self) -> str:
        """Return the text that form tokens are bound to."""
        return f"{self.kind}\n{self.user}\n{self.session}"


class AccessControl:
    """Authenticate requests by *config*; *host* is the address that is listened on."""

    def __init__(
        self, config: Config, host: str, *, signer: CookieSigner, clock: Clock, sessions: Sessions
    ) -> None:
        token = config.dashboard_token.reveal() if config.dashboard_token else ""
        self._token = token.encode("utf-8", "surrogateescape")
        self._header = (config.dashboard_user_header or "").lower().encode()
        self.proxies = TrustedProxies(config.dashboard_proxies)
        self._names = OwnNames(config.dashboard_hosts)
        self._own = {host.lower(), platform.node().lower()} - {""}
        self._signer = signer
        self._wrong = FailedAttempts(clock)
        self.sessions = sessions

    @property
    def is_guarded(self) -> bool:
        """True if a login is required."""
        return bool(self._token or self._header)

    @property
    def has_login(self) -> bool:
        """True if there is a token to log in with."""
        return bool(self._token)

    @property
    def cookie(self) -> str:
        """The name of the session cookie."""
        return f"oncebridge-{self._signer.name}"

    # --- authentication ----------------------------------------------------------------

    def visitor_of(self, request: Request, *, ended: str = "") -> Visitor | None:
        """
        Return the visitor, or None; the session *ended* is not accepted any more.

        Raise `TooManyAttempts` if a program has sent too many wrong tokens.
        """
        if not self.is_guarded:
            return Visitor("here")
        # A proxy may add a bearer token of its own, so a session comes first.
        return (
            self._by_proxy(request) or self._by_session(request, ended) or self._by_bearer(request)
        )

    def _by_proxy(self, request: Request) -> Visitor | None:
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
        return Visitor("proxy", user) if user and user.isprintable() else None

    def _by_bearer(self, request: Request) -> Visitor | None:
        given = request.values(b"authorization")
        scheme, _, token = (given[0] if len(given) == 1 else b"").partition(b" ")
        if not self._token or scheme.lower() != b"bearer":
            return None
        return Visitor("bearer") if self.is_token(token.strip(), request) else None

    def _by_session(self, request: Request, ended: str) -> Visitor | None:
        signed = cookies(request).get(self.cookie, "") if self._token else ""
        session = self._signer.read_value("session", signed) if signed else None
        return Visitor("token", session=session) if session and session != ended else None

    def is_token(self, given: bytes, request: Request) -> bool:
        """Return True if *given* is the token; raise `TooManyAttempts` after too many wrong ones."""
        if self._token and hmac.compare_digest(given, self._token):
            return True
        self._wrong.note(self.proxies.client(request))
        return False

    def begin(self) -> str:
        """Begin a session, and return the value of its cookie."""
        session = self._signer.nonce()
        self.sessions.begin(session)
        return self._signer.sign_value("session", session, for_s=SESSION_S)

    def is_secure(self, request: Request) -> bool:
        """Return True if a trusted proxy reports that the browser uses HTTPS."""
        said = request.values(b"x-forwarded-proto")
        return said == [b"https"] and self.proxies.include(request.peer)

    # --- forged requests -----------------------------------------------------------------

    def is_own_host(self, request: Request, visitor: Visitor | None) -> bool:
        """
        Return True if the request's host name is one of this dashboard.

        Another site can point its own host name at this address (DNS rebinding), then send any
        header, including a proxy's, and read the response; only the token it does not have. An IP
        address cannot be rebound, so any is accepted if a login is required.
        """
        if visitor is not None and visitor.kind == "bearer":
            return True
        asked = requested_host(request)
        if self._names.include(asked):
            return True
        name = without_port(asked)
        return self.is_guarded and (name in self._own or _is_number(name))

    def is_own_form(self, request: Request, visitor: Visitor | None) -> bool:
        """Return True if a request that changes state comes from a page of this dashboard."""
        page = self._names.page(request)
        # A program is not a page, and must send the token.
        is_program = page is None and visitor is not None and visitor.kind == "bearer"
        return page == "own" or is_program

    @staticmethod
    def is_embedded(request: Request) -> bool:
        """Return True if a page of another site embeds this one."""
        site = request.header(b"sec-fetch-site") or b"none"
        is_other = site not in (b"same-origin", b"none")
        return is_other and request.header(b"sec-fetch-mode") != b"navigate"

    def form_token(self, visitor: Visitor | None) -> str:
        """Return a new token for a form."""
        return self._signer.sign("form", str(visitor))

    def is_form_token(self, visitor: Visitor | None, given: Sequence[str]) -> bool:
        return len(given) == 1 and self._signer.is_signature("form", str(visitor), given[0])


def _is_number(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
