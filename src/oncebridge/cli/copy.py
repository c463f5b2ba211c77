"""`oncebridge copy`: copy the records of one store to another."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import click

from oncebridge.base.options import Text
from oncebridge.cli.command import (
    EXIT_INTERRUPTED,
    EXIT_NEEDS_ATTENTION,
    examples,
    field,
    note,
    opened,
    report_errors,
    screen,
)
from oncebridge.cli.event_loop import on_signals, remove_signal_handlers, run_loop
from oncebridge.cli.event_selection import progress_text
from oncebridge.errors import ConfigError, OncebridgeError
from oncebridge.service import logs
from oncebridge.service.addresses import StorePlace, is_missing, refuse_memory
from oncebridge.service.config import load
from oncebridge.stores.api import Portable
from oncebridge.stores.copying import Copying, is_portable


@click.command(
    epilog=examples(
        "oncebridge copy --from sqlite:oncebridge.db --to redis://cache:6379/0",
        "oncebridge copy --from old.toml --to new.toml --dry-run",
        "oncebridge copy --from env:OLD_STORE --to env:NEW_STORE --json",
    )
)
@click.option("--from", "from_", required=True, metavar="STORE", help="The store to read.")
@click.option("--to", required=True, metavar="STORE", help="The store to write to.")
@click.option("--dry-run", is_flag=True, help="Change nothing; show what would be done.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts as one JSON object.")
@report_errors
def copy(*, from_: str, to: str, dry_run: bool, as_json: bool) -> None:
    """
    Copy the records of one store to another.

    STORE is an address, env:NAME, or a configuration file (.toml) whose store is used, with its
    options. Windows keep their end; attempts and the newest states of entities are copied, and
    nothing is removed from the first store.

    Stop the workers of both stores first: records that a worker holds are listed and not copied.
    It is safe to copy again: it adds what is missing and updates what has changed. With
    --dry-run it shows what that would be. Dead letters and spools are not in the store.

    Exit code 1: some records were not copied, as a worker holds them, or you pressed Ctrl-C.
    """
    logs.set_up("warning", "auto")
    source, target = _place(from_, "--from"), _place(to, "--to")
    if source.url == target.url:
        raise ConfigError("--to", f"{target} is the same store as --from")
    if is_missing(source):
        raise ConfigError("--from", f"{source} does not exist, so there is nothing to copy")
    sys.exit(run_loop(_copy(source, target, dry_run=dry_run, as_json=as_json)))


def _place(text: str, flag: str) -> StorePlace:
    """Return a store by its address, or the one of a configuration file."""
    if text.endswith(".toml") and ":" not in text:
        # The environment names one store, but there are two here.
        place = load(text, environment={}).config.store
    else:
        place = StorePlace.of(Text.of(text, flag))
    refuse_memory(place, flag)
    if not is_portable(place.opened):
        raise ConfigError(flag, f"{place} cannot be copied: this kind of store does not support it")
    return place


async def _copy(source: StorePlace, target: StorePlace, *, dry_run: bool, as_json: bool) -> int:
    # A dry run does not create a file.
    is_new = dry_run and is_missing(target)
    async with opened(source.opened) as from_, _opened(target, is_new=is_new) as to:
        copying = Copying(from_, to, dry_run=dry_run)
        try:
            await _run(copying)
        except asyncio.CancelledError:
            _print_result(copying, dry_run=dry_run, as_json=as_json)
            return EXIT_INTERRUPTED
        except OncebridgeError:
            _print_result(copying, dry_run=dry_run, as_json=as_json)
            raise
    _print_result(copying, dry_run=dry_run, as_json=as_json)
    return 0 if copying.is_complete and not copying.live else EXIT_NEEDS_ATTENTION


@asynccontextmanager
async def _opened(place: StorePlace, *, is_new: bool) -> AsyncIterator[Portable | None]:
    if is_new:
        yield None
        return
    async with opened(place.opened) as store:
        yield store


async def _run(copying: Copying) -> None:
    """Copy to the end, or to the first Ctrl-C; the second one cancels the batch in progress."""
    stopping = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - we run in one

    def stop(_: str) -> None:
        if stopping.is_set():
            task.cancel()
        stopping.set()

    on_signals(stop)
    try:
        with progress_text() as show:
            while await copying.step() and not stopping.is_set():
                show(f"{copying.seen:,} read, {copying.copied:,} copied")
    finally:
        remove_signal_handlers()


def _print_result(copying: Copying, *, dry_run: bool, as_json: bool) -> None:
    counts = copying.counts()
    if as_json:
        more = {
            "live_keys": [one.key.hex() for one in copying.held],
            "complete": copying.is_complete,
            "dry_run": dry_run,
        }
        click.echo(json.dumps(counts | more))
    else:
        for name, count in counts.items():
            if count or name == "copied":
                click.echo(f"{name:<12}{count:>12,}")
        console = screen()
        for one in copying.held:
            console.print(field("held", f"{one.key.hex()} for {one.left_ms / 1000:.1f} s"))
        if copying.live > len(copying.held) > 0:
            console.print(field("", f"and {copying.live - len(copying.held):,} more"))
    if dry_run:
        note("nothing was changed")
    if copying.live:
        note(
            "live records were not copied, as a worker holds them: stop the workers, and copy again "
            f"after {copying.held_ms / 1000:.0f} s"
        )
    if not copying.is_complete:
        note("the copy is not complete; run it again: no record is copied twice")
