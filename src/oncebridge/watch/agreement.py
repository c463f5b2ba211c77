"""
Whether the workers that share a store fit together.

Two workers of one route that make different keys deliver an event twice, with two
Idempotency-Keys. Two with different sinks deliver it to one of them only: it is a duplicate for
the other. Both are normal during a rolling restart, and a mistake when they last longer.

A route is part of every key, so a route with a new name remembers nothing of what was delivered
under the old one. Keys are hashes and cannot tell; the reports of earlier workers can.
"""

import logging
import re
from collections.abc import Collection, Iterator
from shlex import quote
from typing import ClassVar, Final, Literal

from msgspec import Struct

from oncebridge.figures import listed, spelt
from oncebridge.watch.fleet import GONE_AFTER_MS, View, here_ms, present
from oncebridge.watch.report import RouteState

ROLLING_RESTART_MS: Final = 10 * 60 * 1000
"""A worker that has run for less is not compared: the others may still have to be restarted."""
_AGAIN_MS: Final = 60 * 60 * 1000
"""How often a difference that lasts is logged."""
# Files and functions are each worker's own, and what a reference stands for is not reported.
_OWN: Final = re.compile(r"-$|(?:file|python|env|ssm|secretsmanager):")
_log = logging.getLogger("oncebridge")


class Difference(Struct, frozen=True):
    """Workers that run with different rules or different sinks for one route."""

    what: Literal["rules", "sinks"]
    route: str
    workers: tuple[tuple[str, ...], ...]
    """The names of the workers, those that agree together."""

    @property
    def code(self) -> str:
        return f"mixed-{self.what}"

    @property
    def seen(self) -> str:
        groups = " / ".join(listed([spelt(n) for n in names], most=3) for names in self.workers)
        return f"workers have different {self.what} for route {spelt(self.route)}: {groups}"

    @property
    def why(self) -> str:
        if self.what == "rules":
            return (
                "An event that two of them receive has two keys: it is delivered twice, with "
                "different Idempotency-Keys."
            )
        return (
            "An event that one of them has delivered is a duplicate for the others: their sink "
            "does not get it."
        )

    @property
    def fix(self) -> str:
        if self.what == "rules":
            return "Give all workers of the route the same configuration and version, and restart."
        return (
            "Give all workers of the route the same sink, or name their routes differently "
            '(route = "NAME").'
        )


class LostRoute(Struct, frozen=True):
    """A route that earlier workers reported, and that neither workers nor configuration have now."""

    route: str
    code: ClassVar[str] = "route-lost"
    why: ClassVar[str] = (
        "The route is part of every key: what was delivered on it is not remembered under another "
        "name, and is delivered again if it arrives again. Its dead letters wait under its name."
    )

    @property
    def seen(self) -> str:
        return (
            f"earlier workers had a route {spelt(self.route)}, which this configuration does not "
            "have and no running worker has"
        )

    @property
    def fix(self) -> str:
        return (
            "Give the route its old name again; or, if it is gone for good, replay its dead "
            f"letters on another:\noncebridge dead replay --all --route {quote(self.route)} --to NEW"
        )


def differences(view: View) -> list[Difference]:
    """Return what workers that have run for longer than a rolling restart takes disagree on."""
    found: dict[tuple[Literal["rules", "sinks"], str], dict[str, list[str]]] = {}
    for state in present(view):
        if state.at_ms - state.started_ms < ROLLING_RESTART_MS:
            continue
        for name, route in state.routes.items():
            for what, value in _compared(route):
                found.setdefault((what, name), {}).setdefault(value, []).append(state.name)
    return [
        Difference(what, route, tuple(sorted(tuple(sorted(names)) for names in each.values())))
        for (what, route), each in sorted(found.items())
        if len(each) > 1
    ]


def _compared(route: RouteState) -> Iterator[tuple[Literal["rules", "sinks"], str]]:
    if route.keys:  # earlier versions report none
        yield "rules", route.keys
    if not _OWN.match(route.sink):
        yield "sinks", route.sink


def lost_routes(view: View, routes: Collection[str]) -> list[LostRoute]:
    """Return the routes that workers reported, except *routes* and those of workers that may run."""
    reported: set[str] = set()
    running = set(routes)
    for one in [*view.reports, *view.gone]:
        is_over = one.state.ended or here_ms(one, view.now_ms) - one.state.at_ms >= GONE_AFTER_MS
        (reported if is_over else running).update(one.state.routes)
    return [LostRoute(name) for name in sorted(reported - running)]


class Warnings:
    """Log what does not fit together, for a worker with *routes*."""

    def __init__(self, routes: Collection[str]) -> None:
        self._routes = routes
        self._logged: dict[Difference | LostRoute, int] = {}

    def log(self, view: View) -> None:
        """Log each problem when it is new, and a difference again every hour."""
        before, self._logged = self._logged, {}
        for one in (*lost_routes(view, self._routes), *differences(view)):
            if one.route not in self._routes and isinstance(one, Difference):
                continue  # another service's; its own workers log it
            logged_ms = before.get(one, view.now_ms)
            is_again = isinstance(one, Difference) and view.now_ms - logged_ms >= _AGAIN_MS
            self._logged[one] = view.now_ms if is_again else logged_ms
            if one not in before or is_again:
                fix = one.fix.replace("\n", " ")
                fields = {"route": one.route, "seen": one.seen, "why": one.why, "fix": fix}
                _log.warning(f"oncebridge.{one.code.replace('-', '_')}", extra=fields)
