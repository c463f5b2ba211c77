"""
Answers a request.

A request passes these checks in order: host, user, route, write permission, form token. Only then
is the page made. An exception in a page becomes an error page with a number that is also in the
log; the error's message is neither shown nor logged, as it may quote an event.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from msgspec.structs import replace

from oncebridge.dashboard import rendering, requests, responses
from oncebridge.dashboard.assets import assets
from oncebridge.dashboard.auth import AccessControl, Visitor
from oncebridge.dashboard.data import DashboardData
from oncebridge.dashboard.page import PageNotFound, PageRequest, PageRoute, Redirect, TemplatePage
from oncebridge.dashboard.requests import UnreadableRequest, WrongContentType
from oncebridge.dashboard.responses import is_here, redirect
from oncebridge.dashboard.routes import VIEWS, RouteMatch, Routes, Views
from oncebridge.dashboard.sessions import SESSION_S
from oncebridge.dashboard.signatures import CookieSigner
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
    """The request is refused with *answer*."""

    def __init__(self, answer: Response) -> None:
        super().__init__()
        self.answer = answer


class App:
    """Answer requests with pages about *data*."""

    def __init__(
        self,
        config: Config,
        data: DashboardData,
        access: AccessControl,
        signer: CookieSigner,
        views: Views = VIEWS,
    ) -> None:
        self._config = config
        self._data = data
        self._access = access
        self._signer = signer
        self._routes = Routes(views)
        self._assets = assets()
        self._templates = rendering.environment()
        self._metrics_page: MetricsPage | None = None

    # --- checks ------------------------------------------------------------------------

    def check_before_body(self, request: Request) -> Response | None:
        """Refuse a body that would not be used, before it is read."""
        length = request.header(b"content-length") or b"0"
        has_body = int(length) > 0 or request.header(b"transfer-encoding") is not None
        if request.method != "POST":
            return (
                responses.text(request, 413, b"a GET request must not have a body\n")
                if has_body
                else None
            )
        if request.path == "/login" and (int(length) > _LARGEST_LOGIN or not int(length)):
            return responses.text(request, 413, b"not a login form\n")
        try:
            self._admitted(request)
        except _Refused as refused:
            return refused.answer
        return None

    @staticmethod
    def answer_immediately(request: Request) -> Response | None:
        """Answer `/healthz`, for which no login is needed."""
        if request.path != "/healthz" or request.method not in _READS:
            return None
        return responses.text(request, 200, _ALIVE, "application/json")

    async def answer(self, request: Request) -> Response:
        """Return the response to any request."""
        try:
            visitor = self._admitted(request)
            session = visitor.session if visitor is not None else ""
            is_static = request.path.startswith("/static/")
            if session and not is_static and not await self._access.sessions.is_live(session):
                visitor = self._admitted(request, ended=session)
            return await self._answer(request, visitor)
        except _Refused as refused:
            return refused.answer
        except UnreadableRequest:
            return self._error_page(
                request, 400, "Bad request", "The address or the form is malformed."
            )
        except WrongContentType:
            why = "Send an HTML form (application/x-www-form-urlencoded)."
            return self._error_page(request, 415, "Unsupported content type", why)

    def _admitted(self, request: Request, *, ended: str = "") -> Visitor | None:
        """Return the visitor, or raise; None for public paths: the login page and its style."""
        is_static = request.path.startswith("/static/") and request.method in _READS
        is_for_all = is_static or request.path == "/login"
        try:
            visitor = self._access.visitor_of(request, ended=ended)
        except TooManyAttempts:
            if not is_for_all:
                raise _Refused(self._too_many_attempts(request)) from None
            visitor = None
        if not self._access.is_own_host(request, visitor):
            raise _Refused(self._unknown_host(request))
        if request.method in _READS:
            if self._access.is_embedded(request):
                why = "Another site tried to embed this page."
                raise _Refused(self._error_page(request, 403, "Request from another site", why))
        elif not self._access.is_own_form(request, visitor):
            why = "Forms must be sent from a page of this dashboard. Open the page and try again."
            raise _Refused(self._error_page(request, 403, "Request from another site", why))
        if visitor is None and not is_for_all:
            raise _Refused(self._ask_to_log_in(request))
        return visitor

    async def _answer(self, request: Request, visitor: Visitor | None) -> Response:
        path, method = request.path, request.method
        if path.startswith("/static/"):
            found = self._assets.get(path)
            if found is None:
                return self._not_found(request, self._page_request_of(request, visitor))
            return (
                responses.asset(request, found)
                if method in _READS
                else self._method_not_allowed(request, _READS)
            )
        if path == "/login" and self._access.has_login:
            return self._login(request, visitor)
        if path == "/logout":
            return await self._logout(request, visitor)
        if path == "/metrics":
            return await self._metrics(request)
        match = self._routes.find(method, requests.segments(path))
        if isinstance(match, RouteMatch):
            return await self._page(request, visitor, match)
        page_request = self._page_request_of(request, visitor)
        return (
            self._method_not_allowed(request, match, page_request)
            if match
            else self._not_found(request, page_request)
        )

    # --- pages -------------------------------------------------------------------------

    async def _page(self, request: Request, visitor: Visitor | None, match: RouteMatch) -> Response:
        page_request = self._page_request(request, visitor, match)
        if match.route.method == "POST":
            page_request = await self._with_form(request, visitor, match.route, page_request)
        try:
            answer = await self._run_handler(match.route, page_request)
            if isinstance(answer, Redirect):
                return redirect(answer.to, self._note_headers(request, answer.note))
            # In a thread: a large page takes a while to render and compress.
            return await asyncio.to_thread(
                self._render_page, request, page_request, match.here, answer
            )
        except PageNotFound:
            return self._not_found(request, page_request, match.here)
        except Exception as error:  # noqa: BLE001 - the client needs a response
            return self._page_failed(request, page_request, match, error)

    async def _run_handler(
        self, route: PageRoute, page_request: PageRequest
    ) -> TemplatePage | Redirect:
        """Run the handler; an action (POST) has no time limit."""
        async with asyncio.timeout(None if route.method == "POST" else _PATIENCE_S):
            return await route.page(self._data, page_request)

    def _page_request(
        self, request: Request, visitor: Visitor | None, match: RouteMatch | None
    ) -> PageRequest:
        return PageRequest(
            path=request.path,
            names=match.names if match else {},
            query=requests.query(request),
            user=visitor.user if visitor else "",
            may_write=self._config.dashboard_write,
            can_log_out=visitor is not None and visitor.kind == "token",
            token=self._access.form_token(visitor),
            is_live=request.header(b"x-live") is not None,
        )

    def _page_request_of(self, request: Request, visitor: Visitor | None) -> PageRequest | None:
        """Return the page request of an authenticated visitor, for the navigation."""
        return self._page_request(request, visitor, None) if visitor is not None else None

    async def _with_form(
        self, request: Request, visitor: Visitor | None, route: PageRoute, page_request: PageRequest
    ) -> PageRequest:
        """Return the request with its form, or raise if it is not allowed."""
        if route.writes and not self._config.dashboard_write:
            why = "Changes are disabled. To allow them, set dashboard_write = true."
            raise _Refused(self._error_page(request, 403, "Read-only", why, page_request))
        is_large = len(request.body) > _LARGE_FORM
        form = (
            await asyncio.to_thread(requests.form, request) if is_large else requests.form(request)
        )
        page_request = replace(
            page_request, form=self._check_form_token(request, visitor, form, page_request)
        )
        # Actions are logged under a name, even if the pages show none.
        return (
            replace(page_request, user=visitor.name) if visitor and route.writes else page_request
        )

    def _check_form_token(
        self,
        request: Request,
        visitor: Visitor | None,
        posted: Mapping[str, Sequence[str]],
        page_request: PageRequest | None = None,
    ) -> dict[str, Sequence[str]]:
        """Return *posted* without its form token; raise if the token is wrong."""
        form = dict(posted)
        if not self._access.is_form_token(visitor, form.pop("token", ())):
            why = "The page was loaded before a restart or a login. Nothing was done."
            raise _Refused(
                self._error_page(request, 403, "Reload the page and try again", why, page_request)
            )
        return form

    def _render_page(
        self, request: Request, page_request: PageRequest, here: str, shown: TemplatePage
    ) -> Response:
        note = ""
        headers: tuple[tuple[str, str], ...] = ()
        if (request.header(b"sec-fetch-mode") or b"navigate") == b"navigate":
            note, headers = self._read_note(request)
        page = self._render(
            shown.template, page_request=page_request, here=here, note=note, **shown.values
        )
        return responses.html(request, shown.status, page, headers)

    def _render(self, template: str, **values: Any) -> str:
        return self._templates.get_template(template).render(**values)

    # --- notes about an action, for the next page ------------------------------------------

    @property
    def _note_cookie(self) -> str:
        return f"oncebridge-note-{self._signer.name}"

    def _note_headers(self, request: Request, note: str) -> tuple[tuple[str, str], ...]:
        cut = note.encode("utf-8", "replace")[:_LONGEST_NOTE].decode("utf-8", "ignore")
        signed = self._signer.sign_value("note", cut, for_s=_NOTE_S)
        return (self._cookie(request, self._note_cookie, signed, _NOTE_S),) if note else ()

    def _read_note(self, request: Request) -> tuple[str, tuple[tuple[str, str], ...]]:
        signed = requests.cookies(request).get(self._note_cookie)
        if signed is None:
            return "", ()
        gone = self._cookie(request, self._note_cookie, "", 0)
        return self._signer.read_value("note", signed) or "", (gone,)

    def _cookie(self, request: Request, name: str, value: str, for_s: int) -> tuple[str, str]:
        secure = "; Secure" if self._access.is_secure(request) else ""
        rules = f"Path=/; Max-Age={for_s}; HttpOnly; SameSite=Strict{secure}"
        return "Set-Cookie", f"{name}={value}; {rules}"

    # --- login and logout --------------------------------------------------------------

    def _login(self, request: Request, visitor: Visitor | None) -> Response:
        if request.method in _READS:
            if visitor is not None:
                return redirect("/")
            return self._login_page(request, 200, requests.query(request).get("next", "/"))
        if request.method != "POST":
            return self._method_not_allowed(request, (*_READS, "POST"))
        form = self._check_form_token(request, None, requests.form(request))
        given = form.get("secret", [""])[-1]
        to = form.get("next", ["/"])[-1]
        try:
            is_right = self._access.is_token(given.encode("utf-8", "replace"), request)
        except TooManyAttempts:
            return self._too_many_attempts(request)
        if not is_right:
            fields = {"peer": self._access.proxies.client(request)}
            _log.warning("oncebridge.dashboard_login_refused", extra=fields)
            return self._login_page(request, 401, to, "Wrong token.")
        cookie = self._cookie(request, self._access.cookie, self._access.begin(), SESSION_S)
        return redirect(to if is_here(to) else "/", (cookie,))

    def _login_page(self, request: Request, status: int, to: str, wrong: str = "") -> Response:
        page_request = PageRequest(path="/login", token=self._access.form_token(None))
        to = to if is_here(to) else "/"
        page = self._render(
            "login.html", page_request=page_request, here="", note="", next=to, wrong=wrong
        )
        return responses.html(request, status, page)

    async def _logout(self, request: Request, visitor: Visitor | None) -> Response:
        if request.method != "POST":
            return self._method_not_allowed(request, ("POST",))
        self._check_form_token(request, visitor, requests.form(request))
        if visitor is None or visitor.kind != "token":
            return redirect("/")
        gone = (self._cookie(request, self._access.cookie, "", 0),)
        try:
            await self._access.sessions.end(visitor.session)
        except StoreError as error:
            fields = {"error": type(error).__name__}
            _log.warning("oncebridge.dashboard_logout_not_stored", extra=fields)
            why = (
                "You are logged out of this browser. The store could not be written, so a copy of "
                "the session cookie may work again after a restart, until 12 hours after the login. "
                "If the cookie may have been copied, change dashboard_token."
            )
            return self._error_page(request, 503, "Logged out", why, headers=gone)
        return redirect("/login", gone)

    def _ask_to_log_in(self, request: Request) -> Response:
        """Redirect browsers to the login page, and answer programs with 401."""
        is_script = request.header(b"x-live") is not None
        is_browser = not is_script and b"text/html" in (request.header(b"accept") or b"")
        if not self._access.has_login:
            why = "Open the dashboard through the proxy that logs users in. It must send your user name."
            return self._error_page(request, 401, "Login required", why)
        if request.method not in _READS or not is_browser:
            return responses.text(
                request, 401, b"log in, or send the token as a bearer token\n", headers=_BEARER
            )
        target = f"{request.path}?{request.query}" if request.query else request.path
        if request.header(b"sec-fetch-site") in (b"cross-site", b"same-site"):
            # A link from another site sends no cookie; a reload from our own page does.
            return self._reload_with_cookie(request, target)
        to = "" if target == "/" else f"?next={quote(target, safe='')}"
        return redirect(f"/login{to}")

    def _reload_with_cookie(self, request: Request, target: str) -> Response:
        to = target if is_here(target) else "/"
        values = self._error_values(request, "Loading", "The page opens automatically.")
        page = self._render("error.html", **values, again=to)
        return responses.html(request, 200, page, (("Refresh", f"0; url={responses.address(to)}"),))

    # --- errors ------------------------------------------------------------------------

    def _error_page(
        self,
        request: Request,
        status: int,
        title: str,
        why: str,
        page_request: PageRequest | None = None,
        *,
        here: str = "",
        headers: tuple[tuple[str, str], ...] = (),
        facts: Sequence[str] = (),
    ) -> Response:
        values = self._error_values(request, title, why) | {"here": here, "facts": facts}
        if page_request is not None:
            values["page_request"] = page_request
            values["here"] = here or "none"
        page = self._render("error.html", **values, again="")
        return responses.html(request, status, page, headers)

    @staticmethod
    def _error_values(request: Request, title: str, why: str) -> dict[str, Any]:
        page_request = PageRequest(path=request.path)
        return {
            "page_request": page_request,
            "here": "",
            "note": "",
            "title": title,
            "why": why,
            "facts": (),
        }

    def _not_found(
        self, request: Request, page_request: PageRequest | None = None, here: str = ""
    ) -> Response:
        why = "The page does not exist, or its history or dead letter is no longer kept."
        return self._error_page(request, 404, "Not found", why, page_request, here=here)

    def _method_not_allowed(
        self, request: Request, allowed: Sequence[str], page_request: PageRequest | None = None
    ) -> Response:
        headers = (("Allow", ", ".join(allowed)),)
        why = "This address does not support the request's method."
        return self._error_page(
            request, 405, "Method not allowed", why, page_request, headers=headers
        )

    def _unknown_host(self, request: Request) -> Response:
        host = (request.header(b"host") or b"").decode("latin-1")[:200]
        why = (
            f"{host} is not a known host name of this dashboard. If it is one, or the name that a "
            "proxy sends as Host, add it to dashboard_hosts."
        )
        return self._error_page(request, 403, "Unknown host name", why)

    def too_many_large_bodies(self, request: Request) -> Response:
        """Refuse a large body while too many others are being received."""
        why = "Too many large requests at once. Nothing was done; try again in a moment."
        return self._error_page(request, 503, "Busy", why, headers=_SOON)

    def _too_many_attempts(self, request: Request) -> Response:
        why = "Too many wrong tokens from your address. Wait a minute, or send the right token."
        return self._error_page(request, 429, "Too many attempts", why, headers=_LATER)

    def _page_failed(
        self, request: Request, page_request: PageRequest, match: RouteMatch, error: Exception
    ) -> Response:
        """Return an error page, and log the type of the error without its message."""
        status, facts = 503, self._data.known_without_store()
        number = self._signer.nonce()[:8]
        match error:
            case StoreError():
                title = "The store is unavailable"
                why = "This page is read from the store, and the store does not answer."
            case DeadLetterError():
                title = "The dead letters are unavailable"
                why = "They cannot be read or written now. None is lost."
            case TimeoutError():
                title = "Timeout"
                why = "The store or the dead letters did not answer in time. Try again."
            case _:
                status, facts, title = 500, [], "Internal error"
                why = f"Find number {number} in the log. Event processing is not affected."
        # A page that refreshes itself would log it every few seconds.
        level = (
            logging.ERROR
            if status == 500
            else logging.DEBUG
            if page_request.is_live
            else logging.WARNING
        )
        page = f"{match.route.method} {match.route.path}"
        fields = {"page": page, "error": type(error).__name__, "number": number}
        _log.log(level, "oncebridge.dashboard_page_failed", extra=fields)
        return self._error_page(
            request, status, title, why, page_request, here=match.here, facts=facts
        )

    # --- for programs ------------------------------------------------------------------

    async def _metrics(self, request: Request) -> Response:
        if request.method not in _READS:
            return self._method_not_allowed(request, _READS)
        monitor = self._data.monitor
        if monitor is None:
            hint = (
                b"no worker in this process: let Prometheus scrape each worker (setting metrics)\n"
            )
            return responses.text(request, 404, hint)
        if self._metrics_page is None:
            try:
                self._metrics_page = MetricsPage(monitor.report)
            except ConfigError as error:
                return responses.text(request, 404, f"{error}\n".encode())
        written: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._metrics_page(
            request, lambda page: None if written.done() else written.set_result(page)
        )
        return responses.with_safe_headers(await written)
