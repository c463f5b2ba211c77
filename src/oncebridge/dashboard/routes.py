"""Which page is for which address."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from oncebridge.dashboard.page import Route
from oncebridge.dashboard.views import dead, decisions, overview, rules

Views = Mapping[str, Sequence[Route]]
VIEWS: Final[Views] = {
    "overview": overview.ROUTES,
    "decisions": decisions.ROUTES,
    "dead": dead.ROUTES,
    "rules": rules.ROUTES,
}


class Match(Struct, frozen=True):
    """A page, and what stood in the places of its path."""

    here: str
    """The view that it belongs to."""
    route: Route
    names: dict[str, str]


class Routes:
    """Find pages by method and path; of two that fit, the one that names more of the path."""

    def __init__(self, views: Views = VIEWS) -> None:
        self._known = [
            (tuple(route.path.split("/")[1:]), view, route)
            for view, routes in views.items()
            for route in routes
        ]
        self._known.sort(key=lambda one: sum(_is_name(part) for part in one[0]))

    def find(self, method: str, path: Sequence[str]) -> Match | list[str]:
        """Return the page for a path that was taken apart, or the methods that it has."""
        methods: list[str] = []
        for parts, view, route in self._known:
            names = _fit(parts, path)
            if names is None:
                continue
            if route.method == ("GET" if method == "HEAD" else method):
                return Match(view, route, names)
            methods += ["GET", "HEAD"] if route.method == "GET" else [route.method]
        return sorted(set(methods))


def _fit(parts: Iterable[str], path: Sequence[str]) -> dict[str, str] | None:
    known = tuple(parts)
    if len(known) != len(path):
        return None
    names = {}
    for part, given in zip(known, path, strict=True):
        if _is_name(part):
            if not given:
                return None
            names[part[1:-1]] = given
        elif part != given:
            return None
    return names


def _is_name(part: str) -> bool:
    return part.startswith("{")
