"""The addresses of all pages."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from oncebridge.dashboard.page import PageRoute
from oncebridge.dashboard.views import dead, decisions, overview, rules

Views = Mapping[str, Sequence[PageRoute]]
VIEWS: Final[Views] = {
    "overview": overview.ROUTES,
    "decisions": decisions.ROUTES,
    "dead": dead.ROUTES,
    "rules": rules.ROUTES,
}


class RouteMatch(Struct, frozen=True):
    """A route that matches a request, and the values of its path names."""

    here: str
    """The view that it belongs to."""
    route: PageRoute
    names: dict[str, str]


class Routes:
    """Find routes by method and path; of two matches, the more literal path wins."""

    def __init__(self, views: Views = VIEWS) -> None:
        self._known = [
            (tuple(route.path.split("/")[1:]), view, route)
            for view, routes in views.items()
            for route in routes
        ]
        self._known.sort(key=lambda one: sum(_is_name(part) for part in one[0]))

    def find(self, method: str, path: Sequence[str]) -> RouteMatch | list[str]:
        """Return the match for a path that was split, or the methods that the path allows."""
        methods: list[str] = []
        for parts, view, route in self._known:
            names = _fit(parts, path)
            if names is None:
                continue
            if route.method == ("GET" if method == "HEAD" else method):
                return RouteMatch(view, route, names)
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
