"""
From a request to an answer.

What is asked is judged in this order, and each step sees only what passed the one before: is it
meant for us, who asks, is the page there, may it be done, is it they who want it. Only then is a
page made. Whatever a page raises ends in a page that says so, with a number that the log has too;
what the error said stays between them and is told to nobody, as it may quote an event.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from msgspec.structs import replace

from oncebridge.dashboard import rendering as paper
from oncebridge.dashboard import requests as asking
from oncebridge.dashboard import responses as answers
from oncebridge.dashboard.assets import assets
from oncebridge.dashboard.auth import Gate, Identity
from oncebridge.dashboard.data import Desk
from oncebridge.dashboard.page import Ask, Elsewhere, NotFound, Route, Shown
from oncebridge.dashboard.requests import Unreadable, WrongKind
from oncebridge.dashboard.responses import elsewhere, is_here
from oncebridge.dashboard.routes import VIEWS, Match, Routes, Views
from oncebridge.dashboard.sessions import SESSION_S
from oncebridge.dashboard.signatures import Seal
from oncebridge.errors import ConfigError, DeadLetterError, StoreError
from oncebridge.http.client_address import TooManyAttempts
from oncebridge.http.server import Request, Response
from oncebridge.observe.health import MetricsPage
from oncebridge.service.config import Config

_log = logging.getLogger("oncebridge")
_LONGEST_NOTE: Final = 2000
_NOTE_S: Final = 60
_PATIENCE_S: Final = 30.0
_LARGEST_LOGIN: Final = 4096
_LARGE_FORM: Final = 64 * 1024
_READS: Final = ("GET", "HEAD")
_BEARER: Final = (("WWW-Authenticate", 'Bearer realm="oncebridge"'),)
_LATER: Final = (("Retry-After", "60"),)
_SOON: Final = (("Retry-After", "5"),)
_ALIVE: Final = b'{"alive":true}'


class _Refused(Exception):
    """It is not to be; the answer says why."""

    def __init__(self, answer: Response) -> None:
        super().__init__()
        self.answer = answer


class App:
    """Answer requests with pages about what is on the *desk*."""

    def __init__(
        self, config: Config, desk: Desk, gate: Gate, seal: Seal, views: Views = VIEWS
    ) -> None:
        self._config = config
        self._desk = desk
        self._gate = gate
        self._seal = seal
        self._routes = Routes(views)
        self._assets = assets()
        self._templates = paper.environment()
        self._measured: MetricsPage | None = None

    # --- what is asked -----------------------------------------------------------------

    def screen(self, request: Request) -> Response | None:
        """Refuse a body that nobody is going to look at, before it is read."""
        length = request.header(b"content-length") or b"0"
        has_body = int(length) > 0 or request.header(b"transfer-encoding") is not None
        if request.method != "POST":
            return answers.text(request, 413, b"a GET has no body\n") if has_body else None
        if request.path == "/login" and (int(length) > _LARGEST_LOGIN or not int(length)):
            return answers.text(request, 413, b"that is no log-in\n")
        try:
            self._admitted(request)
        except _Refused as refused:
            return refused.answer
        return None

    @staticmethod
    def at_once(request: Request) -> Response | None:
        """Answer what anybody may ask at any time: whether the process lives."""
        if request.path != "/healthz" or request.method not in _READS:
            return None
        return answers.text(request, 200, _ALIVE, "application/json")

    async def answer(self, request: Request) -> Response:
        """Answer *request*, whatever it is."""
        try:
            identity = self._admitted(request)
            session = identity.session if identity is not None else ""
            is_static = request.path.startswith("/static/")
            if session and not is_static and not await self._gate.sessions.is_live(session):
                identity = self._admitted(request, ended=session)
            return await self._answer(request, identity)
        except _Refused as refused:
            return refused.answer
        except Unreadable:
            return self._trouble(request, 400, "This cannot be read", "Nothing here links to it.")
        except WrongKind:
            why = "Only forms of this dashboard can be sent."
            return self._trouble(request, 415, "This is no form", why)

    def _admitted(self, request: Request, *, ended: str = "") -> Identity | None:
        """Return who asks, or raise; None for what is for everybody: the log-in and its style."""
        is_static = request.path.startswith("/static/") and request.method in _READS
        is_for_all = is_static or request.path == "/login"
        try:
            identity = self._gate.who(request, ended=ended)
        except TooManyAttempts:
            if not is_for_all:
                raise _Refused(self._too_often(request)) from None
            identity = None
        if not self._gate.is_meant(request, identity):
            raise _Refused(self._not_meant(request))
        if request.method in _READS:
            if self._gate.is_embedded(request):
                why = "Another site has asked for this page as a part of its own."
                raise _Refused(self._trouble(request, 403, "Not from there", why))
        elif not self._gate.is_own(request, identity):
            why = "It has to be sent by a page of this dashboard. Open the page, and try again."
            raise _Refused(self._trouble(request, 403, "Not from there", why))
        if identity is None and not is_for_all:
            raise _Refused(self._who_are_you(request))
        return identity

    async def _answer(self, request: Request, identity: Identity | None) -> Response:
        path, method = request.path, request.method
        if path.startswith("/static/"):
            found = self._assets.get(path)
            if found is None:
                return self._nothing(request, self._asked(request, identity))
            return (
                answers.asset(request, found) if method in _READS else self._method(request, _READS)
            )
        if path == "/login" and self._gate.has_login:
            return self._login(request, identity)
        if path == "/logout":
            return await self._logout(request, identity)
        if path == "/metrics":
            return await self._metrics(request)
        match = self._routes.find(method, asking.segments(path))
        if isinstance(match, Match):
            return await self._page(request, identity, match)
        asked = self._asked(request, identity)
        return self._method(request, match, asked) if match else self._nothing(request, asked)

    # --- pages -------------------------------------------------------------------------

    async def _page(self, request: Request, identity: Identity | None, match: Match) -> Response:
        ask = self._ask(request, identity, match)
        if match.route.method == "POST":
            ask = await self._posted(request, identity, match.route, ask)
        try:
            answer = await self._made(match.route, ask)
            if isinstance(answer, Elsewhere):
                return elsewhere(answer.to, self._note(request, answer.note))
            # Beside the loop: a large page takes a while to write and to pack.
            return await asyncio.to_thread(self._shown, request, ask, match.here, answer)
        except NotFound:
            return self._nothing(request, ask, match.here)
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody waits for an answer
            return self._failed(request, ask, match, error)

    async def _made(self, route: Route, ask: Ask) -> Shown | Elsewhere:
        """Make a page; what is being done is not broken off for want of patience."""
        async with asyncio.timeout(None if route.method == "POST" else _PATIENCE_S):
            return await route.page(self._desk, ask)

    def _ask(self, request: Request, identity: Identity | None, match: Match | None) -> Ask:
        return Ask(
            path=request.path,
            names=match.names if match else {},
            query=asking.query(request),
            user=identity.user if identity else "",
            may_write=self._config.dashboard_write,
            may_leave=identity is not None and identity.kind == "token",
            token=self._gate.form_token(identity),
            is_live=request.header(b"x-live") is not None,
        )

    def _asked(self, request: Request, identity: Identity | None) -> Ask | None:
        """Return what somebody who was let in has asked for, to find their way from there."""
        return self._ask(request, identity, None) if identity is not None else None

    async def _posted(
        self, request: Request, identity: Identity | None, route: Route, ask: Ask
    ) -> Ask:
        """Add what was posted, or raise if it must not be done."""
        if route.writes and not self._config.dashboard_write:
            why = "Nothing can be changed here. To allow it, set dashboard_write = true."
            raise _Refused(self._trouble(request, 403, "Only to look at", why, ask))
        is_large = len(request.body) > _LARGE_FORM
        form = await asyncio.to_thread(asking.form, request) if is_large else asking.form(request)
        ask = replace(ask, form=self._checked(request, identity, form, ask))
        # What is done is written down under some name, even where no page greets anybody by it.
        return replace(ask, user=identity.name) if identity and route.writes else ask

    def _checked(
        self,
        request: Request,
        identity: Identity | None,
        posted: Mapping[str, Sequence[str]],
        ask: Ask | None = None,
    ) -> dict[str, Sequence[str]]:
        """Return what was *posted* without the form token; raises where that is not right."""
        form = dict(posted)
        if not self._gate.is_form_token(identity, form.pop("token", ())):
            why = "The page that sent this is from before a restart or a log-in. Nothing was done."
            raise _Refused(self._trouble(request, 403, "Please try again", why, ask))
        return form

    def _shown(self, request: Request, ask: Ask, here: str, shown: Shown) -> Response:
        note = ""
        headers: tuple[tuple[str, str], ...] = ()
        if (request.header(b"sec-fetch-mode") or b"navigate") == b"navigate":
            note, headers = self._noted(request)
        page = self._render(shown.template, ask=ask, here=here, note=note, **shown.values)
        return answers.html(request, shown.status, page, headers)

    def _render(self, template: str, **values: Any) -> str:
        return self._templates.get_template(template).render(**values)

    # --- notes: from what was done to the page that is seen next ----------------------------

    @property
    def _note_cookie(self) -> str:
        return f"oncebridge-note-{self._seal.name}"

    def _note(self, request: Request, note: str) -> tuple[tuple[str, str], ...]:
        cut = note.encode("utf-8", "replace")[:_LONGEST_NOTE].decode("utf-8", "ignore")
        sealed = self._seal.close("note", cut, for_s=_NOTE_S)
        return (self._cookie(request, self._note_cookie, sealed, _NOTE_S),) if note else ()

    def _noted(self, request: Request) -> tuple[str, tuple[tuple[str, str], ...]]:
        sealed = asking.cookies(request).get(self._note_cookie)
        if sealed is None:
            return "", ()
        gone = self._cookie(request, self._note_cookie, "", 0)
        return self._seal.open("note", sealed) or "", (gone,)

    def _cookie(self, request: Request, name: str, value: str, for_s: int) -> tuple[str, str]:
        secure = "; Secure" if self._gate.is_secure(request) else ""
        rules = f"Path=/; Max-Age={for_s}; HttpOnly; SameSite=Strict{secure}"
        return "Set-Cookie", f"{name}={value}; {rules}"

    # --- coming and going --------------------------------------------------------------

    def _login(self, request: Request, identity: Identity | None) -> Response:
        if request.method in _READS:
            if identity is not None:
                return elsewhere("/")
            return self._login_page(request, 200, asking.query(request).get("next", "/"))
        if request.method != "POST":
            return self._method(request, (*_READS, "POST"))
        form = self._checked(request, None, asking.form(request))
        given = form.get("secret", [""])[-1]
        to = form.get("next", ["/"])[-1]
        try:
            is_right = self._gate.is_token(given.encode("utf-8", "replace"), request)
        except TooManyAttempts:
            return self._too_often(request)
        if not is_right:
            fields = {"peer": self._gate.proxies.client(request)}
            _log.warning("oncebridge.dashboard_login_refused", extra=fields)
            return self._login_page(request, 401, to, "That is not the token.")
        cookie = self._cookie(request, self._gate.cookie, self._gate.begin(), SESSION_S)
        return elsewhere(to if is_here(to) else "/", (cookie,))

    def _login_page(self, request: Request, status: int, to: str, wrong: str = "") -> Response:
        ask = Ask(path="/login", token=self._gate.form_token(None))
        to = to if is_here(to) else "/"
        page = self._render("login.html", ask=ask, here="", note="", next=to, wrong=wrong)
        return answers.html(request, status, page)

    async def _logout(self, request: Request, identity: Identity | None) -> Response:
        if request.method != "POST":
            return self._method(request, ("POST",))
        self._checked(request, identity, asking.form(request))
        if identity is None or identity.kind != "token":
            return elsewhere("/")
        gone = (self._cookie(request, self._gate.cookie, "", 0),)
        try:
            await self._gate.sessions.end(identity.session)
        except StoreError as error:
            fields = {"error": type(error).__name__}
            _log.warning("oncebridge.dashboard_logout_not_stored", extra=fields)
            why = (
                "You are logged out of this browser. The store could not be written, so a copy of "
                "the session's cookie may work again after a restart, until 12 hours after the "
                "log-in. If somebody may have a copy, change dashboard_token."
            )
            return self._trouble(request, 503, "Logged out", why, headers=gone)
        return elsewhere("/login", gone)

    def _who_are_you(self, request: Request) -> Response:
        """Send people to the log-in, and tell programs that they lack a token."""
        is_script = request.header(b"x-live") is not None
        is_browser = not is_script and b"text/html" in (request.header(b"accept") or b"")
        if not self._gate.has_login:
            why = "Come through the proxy that logs people in; it has to name you to us."
            return self._trouble(request, 401, "Who are you?", why)
        if request.method not in _READS or not is_browser:
            return answers.text(request, 401, b"log in, or send the token\n", headers=_BEARER)
        asked = f"{request.path}?{request.query}" if request.query else request.path
        if request.header(b"sec-fetch-site") in (b"cross-site", b"same-site"):
            # A link from elsewhere brings no cookie along. From a page of ours it does.
            return self._once_more(request, asked)
        to = "" if asked == "/" else f"?next={quote(asked, safe='')}"
        return elsewhere(f"/login{to}")

    def _once_more(self, request: Request, asked: str) -> Response:
        to = asked if is_here(asked) else "/"
        values = self._plain(request, "One moment", "This page opens by itself.")
        page = self._render("error.html", **values, again=to)
        return answers.html(request, 200, page, (("Refresh", f"0; url={answers.address(to)}"),))

    # --- what is wrong -----------------------------------------------------------------

    def _trouble(
        self,
        request: Request,
        status: int,
        title: str,
        why: str,
        ask: Ask | None = None,
        *,
        here: str = "",
        headers: tuple[tuple[str, str], ...] = (),
        facts: Sequence[str] = (),
    ) -> Response:
        values = self._plain(request, title, why) | {"here": here, "facts": facts}
        if ask is not None:
            values["ask"] = ask
            values["here"] = here or "none"
        page = self._render("error.html", **values, again="")
        return answers.html(request, status, page, headers)

    @staticmethod
    def _plain(request: Request, title: str, why: str) -> dict[str, Any]:
        ask = Ask(path=request.path)
        return {"ask": ask, "here": "", "note": "", "title": title, "why": why, "facts": ()}

    def _nothing(self, request: Request, ask: Ask | None = None, here: str = "") -> Response:
        why = "It may have been there, and be gone: history and letters are not kept for ever."
        return self._trouble(request, 404, "There is nothing here", why, ask, here=here)

    def _method(self, request: Request, allowed: Sequence[str], ask: Ask | None = None) -> Response:
        headers = (("Allow", ", ".join(allowed)),)
        why = "This address is there for something else."
        return self._trouble(request, 405, "Not like this", why, ask, headers=headers)

    def _not_meant(self, request: Request) -> Response:
        host = (request.header(b"host") or b"").decode("latin-1")[:200]
        why = (
            f"This dashboard does not know itself as {host}. If that is a name of it, or the one "
            "that a proxy before it passes on as Host, put it into dashboard_hosts."
        )
        return self._trouble(request, 403, "Under another name", why)

    def no_room(self, request: Request) -> Response:
        """Say that others are sending so much that no more can be kept."""
        why = "Others are sending large events. Nothing was done; try again in a moment."
        return self._trouble(request, 503, "No room", why, headers=_SOON)

    def _too_often(self, request: Request) -> Response:
        why = "Too many wrong tokens came from your address. Wait a minute, or send the right one."
        return self._trouble(request, 429, "Not now", why, headers=_LATER)

    def _failed(self, request: Request, ask: Ask, match: Match, error: Exception) -> Response:
        """Say that a page could not be made; of the error only its kind is told, in the log."""
        status, facts = 503, self._desk.known_without_store()
        number = self._seal.nonce()[:8]
        match error:
            case StoreError():
                title = "The store is away"
                why = "This page is read from the store, and the store does not answer now."
            case DeadLetterError():
                title = "The dead letters are away"
                why = "They cannot be read or written now. Nothing of them was lost."
            case TimeoutError():
                title = "It takes too long"
                why = "Whatever this page is read from does not answer in time."
            case _:
                status, facts, title = 500, [], "This page failed"
                why = f"It is written in the log under the number {number}. Nothing else stopped."
        # A page that keeps itself fresh would say it again and again.
        level = (
            logging.ERROR if status == 500 else logging.DEBUG if ask.is_live else logging.WARNING
        )
        page = f"{match.route.method} {match.route.path}"
        fields = {"page": page, "error": type(error).__name__, "number": number}
        _log.log(level, "oncebridge.dashboard_page_failed", extra=fields)
        return self._trouble(request, status, title, why, ask, here=match.here, facts=facts)

    # --- for programs ------------------------------------------------------------------

    async def _metrics(self, request: Request) -> Response:
        if request.method not in _READS:
            return self._method(request, _READS)
        monitor = self._desk.monitor
        if monitor is None:
            hint = b"the workers have these: let Prometheus ask each of them (metrics = ...)\n"
            return answers.text(request, 404, hint)
        if self._measured is None:
            try:
                self._measured = MetricsPage(monitor.report)
            except ConfigError as error:
                return answers.text(request, 404, f"{error}\n".encode())
        written: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._measured(request, lambda page: None if written.done() else written.set_result(page))
        return answers.careful(await written)
