"""`oncebridge explain`: why an event is treated as it is."""

import sys
from collections.abc import Iterable

import click
from rich.console import Console
from rich.text import Text

from oncebridge.audit_trail import instant
from oncebridge.cli.manners import (
    as_json_option,
    command,
    field,
    note,
    open_file,
    printable,
    screen,
)
from oncebridge.cli.screen import STYLES
from oncebridge.cli.setup import NEEDS_YOU, run_loop
from oncebridge.config import Setup
from oncebridge.errors import StoreError
from oncebridge.explain import CAUSES, Explanation, dumps, window
from oncebridge.explain import explain as explain_records
from oncebridge.reach import is_missing, is_out_of_reach
from oncebridge.records import BadGzip, Record, Records
from oncebridge.store import Store

_MOST_PATHS = 12


@command(
    "oncebridge explain event.json",
    "oncebridge explain events.ndjson.gz -c oncebridge.toml --json",
    "tail -n 1 events.ndjson | oncebridge explain - --preset genesys --canonical",
)
@click.argument("file")
@as_json_option
@click.option("--canonical", is_flag=True, help="Show what was hashed too: part of the event.")
def explain(setup: Setup, *, file: str, as_json: bool, canonical: bool) -> None:
    """
    Tell an event's rule, keys and verdict, and who came first.

    FILE holds one event, an array or one per line, gzip too; - is standard input. Nothing is
    claimed and nothing is changed. The verdict needs the store of the service, so give the
    same configuration; without it, rule and keys are told all the same.

    Exit code 1: something in it could not be read as an event.
    """
    sys.exit(run_loop(_explain(setup, file, as_json=as_json, canonical=canonical)))


async def _explain(setup: Setup, name: str, *, as_json: bool, canonical: bool) -> int:
    place = setup.config.store
    store: Store | None = place.opened
    if is_out_of_reach(place) or is_missing(place):
        why = "lives in another process" if is_out_of_reach(place) else "is not there yet"
        note(f"no verdicts: the store {place} {why}")
        store = None
    with open_file(name) as file:
        try:
            if store is not None:
                store = await _opened_if_it_can(store)
            return await _tell(Records(file), setup, store, as_json=as_json, canonical=canonical)
        finally:
            await place.opened.aclose()


async def _opened_if_it_can(store: Store) -> Store | None:
    try:
        await store.open()
    except StoreError as error:
        note(f"no verdicts: {error}")
        return None
    return store


async def _tell(
    records: Iterable[Record],
    setup: Setup,
    store: Store | None,
    *,
    as_json: bool,
    canonical: bool,
) -> int:
    console = screen()
    unreadable = told = 0
    try:
        async for explanation in explain_records(records, setup, store):
            told += 1
            unreadable += explanation.event is None
            if as_json:
                click.echo(dumps(explanation, canonical=canonical))
            else:
                if told > 1:
                    click.echo()
                _print(console, explanation, several=len(setup.routes) > 1, canonical=canonical)
    except BadGzip as error:
        note(str(error))
        unreadable += 1
    if not told:
        note("there is no event in it")
    return NEEDS_YOU if unreadable or not told else 0


def _print(console: Console, told: Explanation, *, several: bool, canonical: bool) -> None:
    title = Text()
    title.append(f"line {told.line}", style="bold")
    if told.event is not None:
        names = (told.event.id, told.event.source, told.event.detail_type)
        title.append("".join(f"  {printable(name)}" for name in names if name))
    console.print(title)
    if told.event is None:
        console.print(field("dead", f"{told.reason}: {told.why}", "red"))
        return
    if told.route is None:
        console.print(field(told.action, told.why, "red" if told.action == "dead" else ""))
        return
    if several:
        console.print(field("route", told.route))
    console.print(field("rule", told.rule))
    if told.why:
        console.print(field(told.action if told.action != "deduplicate" else "note", told.why))
    for known in told.keys:
        console.print(field("key", f"{known.kind}, remembered for {window(known)}"))
        console.print(field("", known.key.hex()))
        if canonical:
            console.print(field("", known.canonical, "dim"))
    for name in ("entity", "version"):
        if (value := getattr(told, name)) is not None:
            console.print(field(name, value))
    _print_verdict(console, told)


def _print_verdict(console: Console, told: Explanation) -> None:
    judged = told.judged
    if judged is not None:
        text = f"{judged.verdict.value}: {judged.why}" if judged.why else judged.verdict.value
        if told.paused:
            text += " (once the route is resumed: it is paused)"
        console.print(field("verdict", text, STYLES.get(judged.verdict, "")))
        if judged.first is not None:
            who = f" as {judged.first.id}" if judged.first.id else ""
            console.print(field("first", f"arrived {instant(judged.first.arrived_ms)}{who}"))
    if told.cause is not None:
        console.print(field("cause", f"{told.cause}: {CAUSES[told.cause]}"))
    if told.same_as is not None and told.differs is not None:
        shown = ", ".join(told.differs[:_MOST_PATHS]) or "in nothing"
        more = len(told.differs) - _MOST_PATHS
        shown += f" and {more} more" if more > 0 else ""
        console.print(field("differs", f"{shown} (from line {told.same_as})"))
