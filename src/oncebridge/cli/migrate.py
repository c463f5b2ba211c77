"""`oncebridge migrate`: create the tables that the store and the sinks need."""

import json
from collections.abc import Iterator

import click

from oncebridge.cli.command import EXIT_NEEDS_ATTENTION, as_json_option, command, note, printable
from oncebridge.service import logs
from oncebridge.service.addresses import BackendAddress, Migrates, MigratesBySQL
from oncebridge.service.config import Setup


@command(
    "oncebridge migrate -c oncebridge.toml",
    "oncebridge migrate --store postgresql://db.example.com/events",
    "oncebridge migrate -c oncebridge.toml --sql > migration.sql",
)
@click.option("--sql", is_flag=True, help="Print the SQL instead of running it.")
@as_json_option
async def migrate(setup: Setup, *, sql: bool, as_json: bool) -> int:
    """
    Create the tables, indexes and expiry rules that the store and the sinks need.

    Run it before the first start and after each upgrade. It creates what is missing and changes
    nothing that exists, so it is safe to run at any time, also while workers run.

    Exit code 1: with --sql, there is nothing that SQL can create.
    """
    logs.set_up(setup.config.log_level, setup.config.log_format)
    if sql:
        return _print_sql(setup, as_json=as_json)
    for kind, place in _places(setup):
        done = await _migrated(place)
        if as_json:
            click.echo(json.dumps({"kind": kind, "address": str(place), "done": done}))
            continue
        for line in done or ["nothing to do"]:
            click.echo(f"{kind} {printable(place)}: {printable(line)}")
    return 0


def _places(setup: Setup) -> Iterator[tuple[str, BackendAddress]]:
    yield "store", setup.config.store
    for route in setup.routes:
        yield "sink", route.sink
    yield "dead", setup.config.dead


async def _migrated(place: BackendAddress) -> list[str]:
    backend = place.opened
    if not isinstance(backend, Migrates):
        return []
    try:
        return await backend.migrate()
    finally:
        await place.opened.aclose()


def _print_sql(setup: Setup, *, as_json: bool) -> int:
    printed: set[str] = set()
    for kind, place in _places(setup):
        backend = place.opened
        if not isinstance(backend, MigratesBySQL):
            if isinstance(backend, Migrates):
                note(f"{kind} {place} cannot be created with SQL; `oncebridge migrate` creates it")
            continue
        text = backend.migration_sql().strip()
        if as_json:
            click.echo(json.dumps({"kind": kind, "address": str(place), "sql": text}))
        elif text not in printed:  # several routes may use one table
            click.echo(f"-- {kind} {printable(place)}\n{text}\n")
        printed.add(text)
    if not printed:
        note("there is nothing that SQL can create")
    return 0 if printed else EXIT_NEEDS_ATTENTION
