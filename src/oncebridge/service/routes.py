"""
The routes of a configuration.

Apart from `oncebridge.service.service`, because the Lambda handler and commands use the routes
without running a service.
"""

from collections.abc import Sequence

from oncebridge.base.clock import Clock, system_clock
from oncebridge.engine.gateway import Gateway
from oncebridge.engine.hooks import Hook, Tracer, TripHook
from oncebridge.engine.router import RouteEntry, Router
from oncebridge.service.config import Setup


def gateways(
    setup: Setup,
    *,
    hooks: Sequence[Hook] = (),
    trip_hooks: Sequence[TripHook] = (),
    tracer: Tracer | None = None,
    clock: Clock = system_clock,
) -> list[Gateway]:
    """Make a gateway for each route of *setup*; they share store and dead letters."""
    return [
        Gateway(
            store=setup.config.store.opened,
            sink=setup.sink_of(route, clock=clock),
            rules=route.rules,
            dead=setup.config.dead.opened,
            route=route.name,
            settings=route.settings,
            hooks=hooks,
            trip_hooks=trip_hooks,
            tracer=tracer,
            clock=clock,
        )
        for route in setup.routes
    ]


def make_router(
    setup: Setup,
    *,
    hooks: Sequence[Hook] = (),
    trip_hooks: Sequence[TripHook] = (),
    tracer: Tracer | None = None,
    clock: Clock = system_clock,
) -> Router:
    """Make the routes of *setup*."""
    made = gateways(setup, hooks=hooks, trip_hooks=trip_hooks, tracer=tracer, clock=clock)
    return Router(
        [
            RouteEntry(gateway, route.match)
            for gateway, route in zip(made, setup.routes, strict=True)
        ],
        dead=setup.config.dead.opened,
        rules=setup.file_rules(),
        discard_unrouted=setup.config.unrouted == "discard",
        settings=setup.config.settings(),
        hooks=hooks,
        clock=clock,
    )
