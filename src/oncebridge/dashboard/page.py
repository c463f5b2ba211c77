"""The types of a page: request, response and route."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from oncebridge.dashboard.data import DashboardData


class PageRequest(Struct, frozen=True, kw_only=True):
    """A request of an authenticated browser."""

    path: str
    names: Mapping[str, str] = {}
    """The values of the names in the route's path (`/dead/{number}`), decoded."""
    query: Mapping[str, str] = {}
    """Decoded; of a repeated name, the last value."""
    form: Mapping[str, Sequence[str]] = {}
    """The posted form, after its token was checked and removed."""
    user: str = ""
    """The user's name, if known; for the operator log."""
    may_write: bool = False
    """True if state may be changed (`dashboard_write`)."""
    can_log_out: bool = False
    """True if the user logged in here, so a POST to `/logout` logs them out."""
    token: str = ""
    """Every form sends this in its field `token`; new in every response."""
    is_live: bool = False
    """True for the script's requests that refresh a page."""


class TemplatePage(Struct, frozen=True):
    """A page from a template; `page_request`, `here` (the view's name) and `note` are added."""

    template: str
    values: Mapping[str, Any] = {}
    status: int = 200


class Redirect(Struct, frozen=True):
    """A redirect after an action, with a note to show on the next page."""

    to: str
    """A path of this dashboard, optionally with a query; outside values are percent-encoded."""
    note: str = ""


PageResponse = TemplatePage | Redirect
PageHandler = Callable[[DashboardData, PageRequest], Awaitable[PageResponse]]


class PageRoute(Struct, frozen=True):
    """One address of a view."""

    method: Literal["GET", "POST"]
    path: str
    """Names in braces match one segment each: `/decisions/{name}`."""
    page: PageHandler
    writes: bool = False
    """True if it changes state: refused unless `dashboard_write` is true."""


class PageNotFound(Exception):
    """Shown as a page with status 404."""
