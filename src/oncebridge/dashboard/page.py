"""What a view is: a function from what was asked to what is shown."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from oncebridge.dashboard.data import Desk


class Ask(Struct, frozen=True, kw_only=True):
    """What a browser asks for, once it was let in."""

    path: str
    names: Mapping[str, str] = {}
    """What stood in the places of the route's path: `/dead/{number}`; decoded."""
    query: Mapping[str, str] = {}
    """Decoded; of a name that came twice, the last."""
    form: Mapping[str, Sequence[str]] = {}
    """What was posted; the token against forgery is checked and taken out."""
    user: str = ""
    """Who asks: a name, where it is known; for the trail."""
    may_write: bool = False
    """State may be changed by this one (`dashboard_write`)."""
    may_leave: bool = False
    """They logged in here, so they can log out here: by a POST to `/logout`."""
    token: str = ""
    """What every form has to send back in its field `token`; another in every answer."""
    is_live: bool = False
    """The script asks again, to keep a page fresh."""


class Shown(Struct, frozen=True):
    """A page to be made of a template; `ask`, `here` (the view's name) and `note` are added."""

    template: str
    values: Mapping[str, Any] = {}
    status: int = 200


class Elsewhere(Struct, frozen=True):
    """After something was done: see this page, and above it a note about it."""

    to: str
    """A path here, with a query if need be; what came from outside is percent-encoded in it."""
    note: str = ""


Answer = Shown | Elsewhere
Page = Callable[[Desk, Ask], Awaitable[Answer]]


class Route(Struct, frozen=True):
    """One address of a view."""

    method: Literal["GET", "POST"]
    path: str
    """With names in braces for one segment each: `/decisions/{name}`."""
    page: Page
    writes: bool = False
    """It changes something: refused unless `dashboard_write` is true."""


class NotFound(Exception):
    """There is no such thing; told as a page with status 404."""
