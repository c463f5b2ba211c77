"""
Checks that the workers that share a store have compatible configurations.

Two workers of one route that make different keys deliver an event twice, with two
Idempotency-Keys. Two with different sinks deliver it to one of them only: it is a duplicate for
the other. Both are normal during a rolling restart, and an error if they last longer.

The route name is part of every key, so a renamed route does not recognise events that were
delivered under its old name. Keys are hashes; only the reports of earlier workers have old names.
"""

import logging
import re
from collections.abc import Collection, Mapping
from functools import partial
from shlex import quote
from typing import Final

from msgspec import Struct

from oncebridge.base.clock import Dice
from oncebridge.base.formatting import format_list, printable
from oncebridge.base.secrets import mask_address
from oncebridge.events.key import make_key
from oncebridge.observe.fleet import GONE_AFTER_MS, FleetView, here_ms, present
from oncebridge.stores.api import Store
from oncebridge.stores.cell import Cells, Edit

ROLLING_RESTART_MS: Final = 10 * 60 * 1000
"""A worker that has run for less is not compared: the others may still have to be restarted."""
_KEEP_MS: Final = 365 * 24 * 60 * 60 * 1000
_AGAIN_MS: Final = 60 * 60 * 1000
"""How often a difference that lasts is logged."""
# Files and functions are local to a worker, and the target of a reference is not reported.
_OWN: Final = re.compile(r"-$|(?:file|python|env|ssm|secretsmanager):")
_log = logging.getLogger("oncebridge")


class Disagreement(Struct, frozen=True):
    """One incompatibility, as the log, the dashboard and `check` show it."""

    code: str
    route: str
    seen: str
    why: str
    fix: str


_RULES: Final = (
    (
        "An event that two of them receive has two keys: it is delivered twice, with different "
        "Idempotency-Keys."
    ),
    "Give all workers of the route the same configuration and version, and restart them.",
)
_SINKS: Final = (
    (
        "An event that one of them has delivered is a duplicate for the others: their sink does not "
        "get it."
    ),
    (
        "Give all workers of the route the same sink, or name their routes differently "
        '(route = "NAME").'
    ),
)
_LOST: Final = (
    "The route is part of every key: what was delivered on it is not remembered under another "
    "name, and is delivered again if it arrives again. Its dead letters wait under its name."
)


def differences(view: FleetView) -> list[Disagreement]:
    """Return incompatibilities of workers that have run longer than a rolling restart takes."""
    states = [s for s in present(view) if s.at_ms - s.started_ms >= ROLLING_RESTART_MS]
    found: dict[str, dict[str, dict[str, list[str]]]] = {}
    for state in states:
        for name, route in state.routes.items():
            here = found.setdefault(name, {"rules": {}, "sinks": {}})
            if route.keys:  # earlier versions report none
                here["rules"].setdefault(route.keys, []).append(state.name)
            if not _OWN.match(route.sink):
                here["sinks"].setdefault(route.sink, []).append(state.name)
    return [
        _difference(what, route, sorted(map(sorted, groups.values())))
        for route, here in sorted(found.items())
        for what, groups in here.items()
        if len(groups) > 1
    ]


def _difference(what: str, route: str, groups: list[list[str]]) -> Disagreement:
    """Return one incompatibility; workers that agree are named together."""
    names = " / ".join(format_list([printable(name) for name in group], most=3) for group in groups)
    seen = f"workers have different {what} for route {printable(route)}: {names}"
    return Disagreement(f"mixed-{what}", route, seen, *(_RULES if what == "rules" else _SINKS))


def lost_routes(view: FleetView, routes: Collection[str]) -> list[Disagreement]:
    """Return the routes that workers reported, except *routes* and those of workers that may run."""
    reported: set[str] = set()
    running = set(routes)
    for one in [*view.reports, *view.gone]:
        is_over = one.state.ended or here_ms(one, view.now_ms) - one.state.at_ms >= GONE_AFTER_MS
        (reported if is_over else running).update(one.state.routes)
    return [_lost(route) for route in sorted(reported - running)]


def _lost(route: str) -> Disagreement:
    shown = mask_address(route)  # an earlier build named routes after the address of a sink
    name = quote(route) if shown == route else "OLD (oncebridge dead list shows it)"
    return Disagreement(
        "route-lost",
        shown,
        f"earlier workers had a route {printable(shown)}, which this configuration does not have "
        "and no running worker has",
        _LOST,
        "Give the route its old name again; or, if it is gone for good, replay its dead letters "
        f"on another:\noncebridge dead replay --all --to NEW --route {name}",
    )


def sink_key(route: str) -> bytes:
    """Return the key of the record that says where *route* delivers to."""
    return make_key(route, b"sink", "", "", ())


async def warn_of_new_sinks(store: Store, sinks: Mapping[str, str], dice: Dice) -> None:
    """
    Log if routes had another sink before; *sinks* are masked addresses by route.

    Events that the old sink got count as delivered. That is right if the sink has moved, and
    unexpected if a second service, or another sink, is started on the same store.
    """
    keys = {route: sink_key(route) for route in sinks}
    records = await store.peek(list(keys.values()))
    for (route, sink), record in zip(sinks.items(), records, strict=True):
        before = record.memo.decode("utf-8", "replace") if record is not None else ""
        if before == sink:
            continue
        await Cells(store, dice).edit_one(keys[route], Edit(partial(_sink, sink), _KEEP_MS))
        if before:
            what = (
                f"route {printable(route)} delivered to {printable(before)} before, and now to "
                f"{printable(sink)}: events that it has delivered are duplicates, and are not sent to "
                'the new sink; a route with another name has no records yet (route = "NAME")'
            )
            fields = {"route": route, "what": what}
            _log.warning("oncebridge.sink_changed", extra=fields)


def _sink(address: str, _memo: bytes, _now_ms: int) -> bytes:
    return address.encode("utf-8", "replace")


class DisagreementWarnings:
    """Log incompatibilities, for a worker with *routes*."""

    def __init__(self, routes: Collection[str]) -> None:
        self._routes = routes
        self._logged: dict[Disagreement, int] = {}

    def log(self, view: FleetView) -> None:
        """Log each new incompatibility, and one that lasts every hour."""
        # A difference on another service's route is logged by its own workers.
        ours = [one for one in differences(view) if one.route in self._routes]
        lost = lost_routes(view, self._routes)
        before, self._logged = self._logged, {}
        for one in [*lost, *ours]:
            logged_ms = before.get(one)
            if logged_ms is None or (one in ours and view.now_ms - logged_ms >= _AGAIN_MS):
                logged_ms = view.now_ms
                fix = one.fix.replace("\n", " ")
                fields = {"route": one.route, "seen": one.seen, "why": one.why, "fix": fix}
                _log.warning(f"oncebridge.{one.code.replace('-', '_')}", extra=fields)
            self._logged[one] = logged_ms
