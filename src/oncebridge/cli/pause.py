"""`oncebridge pause` and `oncebridge resume`: stop and start delivery on all workers."""

import json
from collections.abc import Sequence

import click

from oncebridge.base.clock import SystemDice
from oncebridge.cli.command import chosen_routes, command, note, open_audit_file, opened
from oncebridge.cli.event_selection import reason_option
from oncebridge.engine import pauses
from oncebridge.operate.operator_log import OperatorLog
from oncebridge.service.addresses import is_missing, refuse_memory
from oncebridge.service.config import Setup

_route = click.option("--route", "routes", multiple=True, help="Only this route (repeatable).")
_json = click.option("--json", "as_json", is_flag=True, help="Print the routes as one JSON object.")


@command(
    "oncebridge pause -c oncebridge.toml",
    "oncebridge pause --route crm --reason 'CRM migrates' -c oncebridge.toml",
)
@_route
@reason_option
@_json
async def pause(setup: Setup, *, routes: tuple[str, ...], reason: str, as_json: bool) -> int:
    """
    Pause delivery on all workers, on all routes or on some.

    Workers notice within a second. Deliveries in progress are finished; events that arrive are
    returned to their source, to be retried. It lasts across restarts, until `oncebridge resume`.
    """
    refuse_memory(setup.config.store, "store")
    names = chosen_routes(setup, routes)
    if is_missing(setup.config.store):
        note(f"the store {setup.config.store} does not exist yet: no worker has used it")
    audit = open_audit_file(setup)
    async with opened(setup.config.store.opened) as store:
        before = await pauses.paused(store, names)
        await OperatorLog(audit, store, reason=reason).write_on_routes("pause", names)
        await pauses.pause(store, names, SystemDice())
    _print_result(names, before, paused=True, as_json=as_json)
    return 0


@command("oncebridge resume -c oncebridge.toml", "oncebridge resume --route crm -c oncebridge.toml")
@_route
@reason_option
@_json
async def resume(setup: Setup, *, routes: tuple[str, ...], reason: str, as_json: bool) -> int:
    """Resume paused routes, all or some."""
    refuse_memory(setup.config.store, "store")
    names = chosen_routes(setup, routes)
    audit = open_audit_file(setup)
    before = [False] * len(names)
    if is_missing(setup.config.store):
        note(f"the store {setup.config.store} does not exist yet, so nothing is paused")
    else:
        async with opened(setup.config.store.opened) as store:
            await OperatorLog(audit, store, reason=reason).write_on_routes("resume", names)
            before = await pauses.resume(store, names)
    _print_result(names, before, paused=False, as_json=as_json)
    return 0


def _print_result(
    routes: Sequence[str], before: Sequence[bool], *, paused: bool, as_json: bool
) -> None:
    if as_json:
        listed = [
            {"route": route, "paused": paused, "was_paused": was}
            for route, was in zip(routes, before, strict=True)
        ]
        click.echo(json.dumps({"routes": listed}))
        return
    for route, was in zip(routes, before, strict=True):
        state = "paused" if paused else "resumed" if was else "was not paused"
        click.echo(f"{route}: {'already paused' if paused and was else state}")
