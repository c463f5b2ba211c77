"""`oncebridge forget`: remove the records of an event, so that its next copy is delivered."""

import json
from collections.abc import Mapping, Sequence

import click

from oncebridge.cli.command import (
    EXIT_NEEDS_ATTENTION,
    as_json_option,
    chosen_routes,
    command,
    field,
    open_audit_file,
    printable,
    screen,
)
from oncebridge.cli.event_selection import (
    SelectedEvent,
    event_finder,
    in_option,
    note_idempotency_keys,
    note_other_keys,
    opened_store,
    reason_option,
    route_option,
    scan_option,
    select_events,
)
from oncebridge.operate.explain.expected_verdict import ENDED
from oncebridge.operate.forget import Forgotten
from oncebridge.operate.forget import forget as forget_keys
from oncebridge.operate.operator_log import OperatorLog
from oncebridge.service.addresses import refuse_memory
from oncebridge.service.config import Setup
from oncebridge.stores.api import Store

_LEFT = " (of another event)"
_BUT = "; another event has the same key with different content, and is kept"


@command(
    "oncebridge forget event.json -c oncebridge.toml",
    "oncebridge forget event.json --route crm -c oncebridge.toml",
    "oncebridge forget 01d4… -c oncebridge.toml    # a key as `explain` shows it",
    "oncebridge forget 6f5c… --reason 'CRM lost it' -c oncebridge.toml    # an id",
)
@click.argument("what", nargs=-1, required=True, metavar="FILE|KEY|ID...")
@route_option
@in_option
@scan_option
@reason_option
@as_json_option
async def forget(
    setup: Setup,
    *,
    what: tuple[str, ...],
    routes: tuple[str, ...],
    recording: str | None,
    scan: bool,
    reason: str,
    as_json: bool,
) -> int:
    """
    Remove events from the store, so that the next copy is delivered.

    Name files of events (- is standard input), keys in hex, or the envelope id of a first
    copy (id:ID if it looks like a file name). An event is forgotten on every route that it
    takes, with all its keys; with --route, which needs the event itself, on that route only.
    It is refused while a worker holds the event. The newest state of an entity (rules with
    latest) is kept: an older state is still stale. To send an event again at once, use
    `oncebridge resend`.

    Exit code 1: nothing was found, something could not be read, or it was refused.
    """
    refuse_memory(setup.config.store, "store")
    chosen_routes(setup, routes)  # raises for unknown names
    audit = open_audit_file(setup)
    code, is_bare, is_unknown = 0, False, False
    async with (
        event_finder(setup, recording=recording, scan=scan) as finder,
        opened_store(setup, "forget") as store,
    ):
        if store is None:
            return EXIT_NEEDS_ATTENTION
        operator_log = OperatorLog(audit, store, reason=reason)
        async for each in select_events(finder, what, routes, store):
            done = await _forget_event(store, operator_log, each) if each.own else []
            if not _is_done(done):
                code = EXIT_NEEDS_ATTENTION
            is_bare = is_bare or (each.is_bare and any(one.gone for one in done))
            is_unknown = is_unknown or (each.is_bare and all(one.was == "absent" for one in done))
            _print_result(each, done, several=len(setup.routes) > 1, as_json=as_json)
    if is_bare:
        note_other_keys()
    if is_unknown:
        note_idempotency_keys()
    return code


async def _forget_event(
    store: Store, operator_log: OperatorLog, each: SelectedEvent
) -> list[Forgotten]:
    async def write(keys: Mapping[bytes, bytes]) -> None:
        await operator_log.write("forget", routes=[each.route] if each.route else [], keys=keys)

    return await forget_keys(store, each.own, before=write)


def _is_done(done: Sequence[Forgotten]) -> bool:
    asked = [one for one in done if not one.is_left]
    return any(one.gone for one in asked) and all(one.gone or one.was == "absent" for one in asked)


def _print_result(
    each: SelectedEvent, done: Sequence[Forgotten], *, several: bool, as_json: bool
) -> None:
    verdict = _verdict(each, done)
    if as_json:
        keys = [
            {
                "key": one.key.hex(),
                "was": one.was,
                "fate": one.fate.name.lower() if one.fate else None,
                "forgotten": one.gone,
            }
            | ({"of_another": True} if one.is_others else {})
            for one in done
        ]
        fields = {"what": each.name, "route": each.route or None, "result": verdict, "keys": keys}
        click.echo(json.dumps(fields))
        return
    where = f" on {each.route}" if each.route and several else ""
    click.echo(printable(f"{each.name}{where}: {verdict}"))
    console = screen()
    for one in done:
        console.print(field(one.was, one.key.hex() + (_LEFT if one.is_others else "")))


def _verdict(each: SelectedEvent, done: Sequence[Forgotten]) -> str:
    if each.problem:
        return each.problem
    if any(one.is_operator_log for one in done):
        return "refused: this is the operator log of an event or a route, not an event"
    asked = [one for one in done if not one.is_left]
    held = max(asked, key=lambda one: one.left_ms, default=None)
    if held is not None and held.left_ms:
        left = f"for {held.left_ms / 1000:.1f} s more"
        if held.is_held:
            return f"refused: a worker holds it {left}; if it is gone, use `oncebridge release`"
        return f"refused: it waits for its next attempt {left}"
    if not each.own:
        return "has no key on this route"
    if not any(one.gone for one in done):
        return f"not found{_BUT if len(asked) < len(done) else ''}"
    fate = next((one.fate for one in reversed(done) if one.fate and one.gone), None)
    return f"forgotten; {ENDED[fate]}" if fate else "forgotten"
