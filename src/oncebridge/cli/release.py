"""`oncebridge release`: release the claims of a worker that is gone."""

import json
from collections.abc import Mapping, Sequence

import click
from msgspec import Struct

from oncebridge.cli.command import (
    EXIT_NEEDS_ATTENTION,
    as_json_option,
    chosen_routes,
    command,
    field,
    note,
    open_audit_file,
    printable,
    screen,
)
from oncebridge.cli.event_selection import (
    SelectedEvent,
    event_finder,
    in_option,
    opened_store,
    reason_option,
    require_confirmation,
    route_option,
    scan_option,
    select_events,
    yes_option,
)
from oncebridge.operate.explain.expected_verdict import ENDED, RecordStatus
from oncebridge.operate.explain.words import moment
from oncebridge.operate.operator_log import OperatorLog
from oncebridge.operate.release import Released, can_release, read_statuses
from oncebridge.operate.release import release as release_held
from oncebridge.service.addresses import refuse_memory
from oncebridge.service.config import Setup
from oncebridge.stores.api import Store

_WARNING = (
    "if the worker still runs, the event may be sent twice: another worker claims it at once, and "
    "a send that has begun cannot be undone."
)
_ENTITY = "an older state of the entity may then arrive after a newer one."


@command(
    "oncebridge release event.json -c oncebridge.toml",
    "oncebridge release 01d4… --yes --reason 'host is gone' -c oncebridge.toml",
)
@click.argument("what", nargs=-1, required=True, metavar="FILE|KEY|ID...")
@route_option
@in_option
@scan_option
@reason_option
@yes_option
@as_json_option
async def release(
    setup: Setup,
    *,
    what: tuple[str, ...],
    routes: tuple[str, ...],
    recording: str | None,
    scan: bool,
    reason: str,
    yes: bool,
    as_json: bool,
) -> int:
    """
    Release events that are held by a worker that is gone.

    A worker that dies holds its events until their lease ends. This releases its claims, so
    that the next copy is accepted at once: with a file of events, the keys and the entity of
    each; with a key or the id of a first copy (id:ID if it looks like a file name), the records
    that are held there, on any route. A record that has changed in the meantime is left alone.

    If the worker still runs, an event may be sent twice. Its deliveries still count.

    Exit code 1: something was not held, not found or not readable, or you answered no.
    """
    refuse_memory(setup.config.store, "store")
    chosen_routes(setup, routes)  # raises for unknown names
    require_confirmation("an event may be sent twice if its worker still runs", yes=yes)
    audit = open_audit_file(setup)
    code = 0
    several = len(setup.routes) > 1
    async with (
        event_finder(setup, recording=recording, scan=scan) as finder,
        opened_store(setup, "release") as store,
    ):
        if store is None:
            return EXIT_NEEDS_ATTENTION
        looked = [
            await _check(store, each) async for each in select_events(finder, what, routes, store)
        ]
        if any(one.is_held for one in looked) and not yes and not _confirmed(looked):
            return EXIT_NEEDS_ATTENTION
        operator_log = OperatorLog(audit, store, reason=reason)
        for one in looked:
            done = await _release_event(store, operator_log, one)
            code = code if _is_done(done) else EXIT_NEEDS_ATTENTION
            _print_result(one.each, done, several=several, as_json=as_json)
    return code


class _CheckedEvent(Struct, frozen=True):
    """A selected event, and the status of its records."""

    each: SelectedEvent
    standings: Sequence[RecordStatus]

    @property
    def is_held(self) -> bool:
        return any(can_release(standing) for standing in self.standings)


async def _check(store: Store, each: SelectedEvent) -> _CheckedEvent:
    own = each.own | ({each.entity: b""} if each.entity else {})
    return _CheckedEvent(each, await read_statuses(store, own) if own else [])


def _confirmed(looked: Sequence[_CheckedEvent]) -> bool:
    held = [one for one in looked if one.is_held]
    note(_WARNING)
    if any(one.each.entity for one in held):
        note(_ENTITY)
    what = printable(held[0].each.name) if len(held) == 1 else f"{len(held)} events"
    longest = max(s.left_ms for one in held for s in one.standings if can_release(s)) / 1000
    return click.confirm(f"Release {what}, held for {longest:.1f} s more?", err=True)


async def _release_event(
    store: Store, operator_log: OperatorLog, one: _CheckedEvent
) -> list[Released]:
    each = one.each

    async def write(keys: Mapping[bytes, bytes]) -> None:
        await operator_log.write("release", routes=[each.route] if each.route else [], keys=keys)

    return await release_held(store, one.standings, entities={each.entity}, before=write)


def _is_done(done: Sequence[Released]) -> bool:
    return any(one.gone for one in done) and not any(one.has_changed for one in done)


def _print_result(
    each: SelectedEvent, done: Sequence[Released], *, several: bool, as_json: bool
) -> None:
    result = _result(each, done)
    shown = [one for one in done if one.standing.record is not None]
    if as_json:
        keys = [
            {
                "key": one.standing.key.hex(),
                "was": one.standing.state,
                "held": one.standing.is_held,
                "released": one.gone,
                "entity": one.standing.key == each.entity,
            }
            | ({"of_another": True} if one.standing.is_others else {})
            for one in done
        ]
        fields = {"what": each.name, "route": each.route or None, "result": result, "keys": keys}
        click.echo(json.dumps(fields))
        return
    where = f" on {each.route}" if each.route and several else ""
    click.echo(printable(f"{each.name}{where}: {result}"))
    console = screen()
    for one in shown:
        state = "held" if one.standing.is_held else one.standing.state
        whose = " (the entity)" if one.standing.key == each.entity else ""
        whose = " (of another event)" if one.standing.is_others else whose
        console.print(field(state, one.standing.key.hex() + whose))


def _result(each: SelectedEvent, done: Sequence[Released]) -> str:
    if each.problem:
        return each.problem
    if any(one.has_changed for one in done):
        some = "some of it was released, the rest" if any(one.gone for one in done) else "it"
        return f"{some} has changed in the meantime and was left as it is; run `oncebridge explain` to see it"
    if any(one.gone for one in done):
        return "released; the next copy is accepted at once"
    if not done:
        return "has no key on this route"
    return _not_held([one.standing for one in done if one.standing.key != each.entity])


def _not_held(standings: Sequence[RecordStatus]) -> str:
    """Return why there is nothing to release."""
    for standing in reversed(standings):
        record = standing.record
        if record is None or standing.is_others:
            continue
        if standing.state == "done":
            ended = ENDED[record.fate] if record.fate else ""
            return f"not held: {ended}; use `oncebridge forget` or `oncebridge resend`"
        if standing.state == "claimed":
            until = moment(record.until_ms)
            return f"not held: it waits for its next attempt until {until}"
        if standing.state == "free":
            return "not held: no worker holds it, and the next copy is accepted at once"
    if any(standing.is_others and standing.is_held for standing in standings):
        return "not held: the claim is of another event, with the same key and different content"
    return "not found"
