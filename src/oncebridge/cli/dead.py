"""`oncebridge dead`: list, show, replay and drop dead letters."""

import base64
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import click
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from oncebridge.base.formatting import iso_time
from oncebridge.cli.command import (
    EXIT_NEEDS_ATTENTION,
    as_json_option,
    chosen_routes,
    columns,
    command,
    examples,
    field,
    is_to_stdout,
    note,
    open_audit_file,
    opened,
    printable,
    screen,
)
from oncebridge.cli.event_selection import (
    because_option,
    require_confirmation,
    store_for_reading,
    yes_option,
)
from oncebridge.cli.status_line import STYLES
from oncebridge.dead_letters.api import DeadLetter, DeadLetters
from oncebridge.dead_letters.copies import Copies, copies_of
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.events.event import Event
from oncebridge.operate.identity import Identities
from oncebridge.operate.operator_log import OperatorLog
from oncebridge.operate.replay import (
    DeadLetterFilter,
    LetterToDrop,
    Replayed,
    Replayer,
    select,
    write_replay,
)
from oncebridge.operate.replay import drop as drop_letters
from oncebridge.service.addresses import is_missing, is_out_of_reach, refuse_memory
from oncebridge.service.config import Setup
from oncebridge.service.routes import make_router
from oncebridge.stores.api import Store

_BATCH = 100

_numbers = click.argument("numbers", nargs=-1, type=click.IntRange(min=1), metavar="[NUMBER]...")
_all = click.option("--all", "every", is_flag=True, help="All dead letters.")
_reason = click.option("--reason", default="", help="Only dead letters with this reason.")
_route = click.option("--route", default=None, help="Only dead letters of this route.")


@click.group(
    epilog=examples(
        "oncebridge dead list -c oncebridge.toml",
        "oncebridge dead show 12 -c oncebridge.toml",
        "oncebridge dead replay --all --reason rejected -c oncebridge.toml",
    )
)
def dead() -> None:
    """List, show, replay or drop dead letters."""


# --- reading ------------------------------------------------------------------------------


@command(
    "oncebridge dead list -c oncebridge.toml",
    "oncebridge dead list --reason rejected --limit 500 --json -c oncebridge.toml",
    name="list",
)
@_reason
@_route
@click.option(
    "--limit", default=50, show_default=True, type=click.IntRange(min=1), help="The most to list."
)
@as_json_option
async def list_(setup: Setup, *, reason: str, route: str | None, limit: int, as_json: bool) -> None:
    """List dead letters, the oldest first, without their payloads."""
    choice = DeadLetterFilter(reason=reason, route=route)
    letters: list[DeadLetter] = []
    async with _letters(setup) as dead:
        async for letter in select(dead, choice):
            letters.append(replace(letter, raw=b"") if not as_json else letter)
            if len(letters) > limit:
                break
    if len(letters) > limit:
        note("there are more; use --limit to list them")
        letters = letters[:limit]
    counts = await _copies(setup, letters)
    if as_json:
        for letter, copies in zip(letters, counts, strict=True):
            click.echo(json.dumps(_as_json(letter, copies)))
        return
    rows = [["number", "died", "reason", "route", "copies", "message"]]
    for letter, copies in zip(letters, counts, strict=True):
        died = iso_time(letter.buried_ms)[:19].replace("T", " ")
        again = f"{copies.count:,}" if copies.count else "-"
        on = letter.route or "-"
        rows.append([str(letter.number), died, letter.reason, on, again, letter.message])
    if not any(copies.count for copies in counts):
        rows = [[*row[:4], row[5]] for row in rows]
    if len(rows) == 1:
        note("no dead letters")
        return
    console = screen()
    heading, *lines = columns(rows, width=console.width if console.is_terminal else None)
    console.print(heading, style="dim", markup=False)
    for line in lines:
        console.print(line, markup=False)


async def _copies(setup: Setup, letters: Sequence[DeadLetter]) -> list[Copies]:
    """Return how often dead letters that were never sent arrived again; others have no count."""
    found = {letter.key: Copies() for letter in letters}
    counted = [letter.key for letter in letters if letter.key and not letter.is_keyed]
    if counted:
        async with store_for_reading(setup, "") as store:
            if store is not None:
                found |= dict(zip(counted, await copies_of(store, counted), strict=True))
    return [found[letter.key] for letter in letters]


def _as_json(letter: DeadLetter, copies: Copies) -> dict[str, Any]:
    more = {"copies": copies.count, "last_copy": iso_time(copies.last_ms)} if copies.count else {}
    return {
        "number": letter.number,
        "died": iso_time(letter.buried_ms),
        "reason": letter.reason,
        "message": letter.message,
        "route": letter.route,
        "rule": letter.rule,
        "key": letter.key.hex(),
        "attempts": letter.attempts,
        "maybe_delivered": letter.maybe_delivered,
        "bytes": len(letter.raw),
        **more,
    }


@command(
    "oncebridge dead show 12 -c oncebridge.toml",
    "oncebridge dead show 12 --raw -c oncebridge.toml > event.json",
)
@click.argument("number", type=click.IntRange(min=1))
@click.option("--json", "as_json", is_flag=True, help="Print it as one JSON object.")
@click.option("--raw", is_flag=True, help="Print only the event, byte for byte as it was received.")
async def show(setup: Setup, *, number: int, as_json: bool, raw: bool) -> int:
    """Show one dead letter with its event."""
    async with _letters(setup) as dead:
        found = [letter async for letter in select(dead, DeadLetterFilter((number,)))]
    if not found:
        note(f"there is no dead letter {number}")
        return EXIT_NEEDS_ATTENTION
    letter, copies = found[0], (await _copies(setup, found))[0]
    if raw:
        sys.stdout.buffer.write(letter.raw)
        return 0
    fields = _as_json(letter, copies) | _header_as_json(setup, letter)
    if as_json:
        click.echo(json.dumps({**fields, **_body_as_json(letter.raw)}))
    else:
        _print(fields, letter.raw)
    return 0


def _header_as_json(setup: Setup, letter: DeadLetter) -> dict[str, str]:
    """Return the Idempotency-Key of the event, by the current rules."""
    identities = Identities(setup)
    event = identities.read(letter.raw)
    way = identities.on(letter.route, event) if isinstance(event, Event) else None
    sent_as = way.sent_as_of(letter.key) if way is not None else b""
    return {"idempotency_key": sent_as.hex()} if sent_as else {}


def _body_as_json(raw: bytes) -> dict[str, str]:
    try:
        return {"body": raw.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(raw).decode()}


def _print(fields: dict[str, Any], raw: bytes) -> None:
    console = screen()
    console.print(f"dead letter {fields.pop('number')}", style="bold")
    if fields.pop("maybe_delivered"):
        fields["maybe"] = "an earlier attempt may have arrived"
    for name, value in fields.items():
        if value != "":
            console.print(field(name, value, "red" if name == "reason" else "", wide=16))
    console.print()
    for line in _body(raw).split("\n"):
        console.print(printable(line), markup=False)


def _body(raw: bytes) -> str:
    """Return an event indented for reading; --raw prints it unchanged."""
    try:
        return json.dumps(json.loads(raw), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return raw.decode(errors="backslashreplace")


# --- acting -------------------------------------------------------------------------------


@command(
    "oncebridge dead replay 12 13 -c oncebridge.toml",
    "oncebridge dead replay --all --reason rejected -c oncebridge.toml",
    "oncebridge dead replay --all --route old --to crm -c oncebridge.toml",
)
@_numbers
@_all
@_reason
@_route
@click.option("--to", metavar="ROUTE", help="Replay them on this route instead of their own.")
@because_option
@as_json_option
async def replay(
    setup: Setup, *, to: str | None, because: str, as_json: bool, **chosen: Any
) -> int:
    """
    Replay dead letters, each on the route where it died.

    A dead letter is removed once its event is delivered. An event that was delivered in the
    meantime is not sent again. One that fails for good again becomes a new dead letter; one that
    the sink cannot accept now stays a dead letter.

    With --to, they go to another route, such as the successor of a route that was removed. An
    event that this route has delivered before is not sent again.

    Exit code 1: a dead letter is left, died again, or was not found.
    """
    choice = _choice(**chosen)
    refuse_memory(setup.config.store, "store")
    chosen_routes(setup, [to] if to is not None else [], flag="--to")
    operator_log = OperatorLog(open_audit_file(setup), setup.config.store.opened, reason=because)
    if _is_empty(setup):
        return _missing(choice.numbers)
    router = make_router(setup)
    try:
        await router.open()
        dead: DeadLetters = setup.config.dead.opened
        numbers = [letter.number async for letter in select(dead, choice)]
        code = _missing(sorted(set(choice.numbers) - set(numbers))) if choice.numbers else 0
        redrive = Replayer(
            setup, router, before=lambda each: write_replay(setup, operator_log, each), to=to
        )
        counts: dict[str, int] = {}
        with _bar(len(numbers)) as bar:
            task = bar.add_task("", total=len(numbers))
            async for done in _batches(redrive, dead, choice, numbers):
                for one in done:
                    name = _print_result(one, setup, as_json=as_json)
                    counts[name] = counts.get(name, 0) + 1
                    code = code if one.is_resolved else EXIT_NEEDS_ATTENTION
                bar.update(task, advance=len(done))
        await router.drain(setup.config.grace)
    finally:
        await router.aclose()
    if not as_json:
        summary = ", ".join(f"{count} {name}" for name, count in counts.items())
        note(summary or "no dead letters")
    return code


async def _batches(
    redrive: Replayer, dead: DeadLetters, choice: DeadLetterFilter, numbers: Sequence[int]
) -> AsyncIterator[list[Replayed]]:
    wanted = set(numbers)
    batch: list[DeadLetter] = []
    async for letter in select(dead, choice):
        if letter.number not in wanted:
            continue  # it died after the replay began
        batch.append(letter)
        if len(batch) == _BATCH:
            yield await redrive.replay(batch)
            batch = []
    if batch:
        yield await redrive.replay(batch)


def _print_result(one: Replayed, setup: Setup, *, as_json: bool) -> str:
    """Print the result for one dead letter; return the word under which it is counted."""
    name = one.result
    # If events go to standard output, nothing else may.
    is_err = is_to_stdout(setup)
    if as_json:
        click.echo(json.dumps(replayed_as_json(one)), err=is_err)
    else:
        style = STYLES.get(one.verdict, "") if one.verdict and one.gone else "red"
        text = f"{name}: {printable(one.reason)}" if one.reason else name
        Console(stderr=is_err, highlight=False, soft_wrap=True).print(
            field(str(one.number), text, style, wide=8)
        )
    return name


def replayed_as_json(one: Replayed) -> dict[str, Any]:
    """Return the result for one dead letter as JSON."""
    return {
        "number": one.number,
        "result": one.result,
        "verdict": one.verdict.value if one.verdict else None,
        "reason": one.reason,
        "dropped": one.gone,
    }


@command(
    "oncebridge dead drop 12 13 -c oncebridge.toml",
    "oncebridge dead drop --all --reason not-json --yes -c oncebridge.toml",
)
@_numbers
@_all
@_reason
@_route
@because_option
@yes_option
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as one JSON object.")
async def drop(setup: Setup, *, because: str, yes: bool, as_json: bool, **chosen: Any) -> int:
    """
    Delete dead letters for good, with their events.

    Exit code 1: a dead letter was not found, or you answered no.
    """
    choice = _choice(**chosen)
    require_confirmation("dropped events cannot be restored", yes=yes)
    audit = open_audit_file(setup)
    async with _letters(setup) as dead:
        identities = Identities(setup)
        doomed = [LetterToDrop.of(letter, identities) async for letter in select(dead, choice)]
        numbers = [each.number for each in doomed]
        code = _missing(sorted(set(choice.numbers) - set(numbers))) if choice.numbers else 0
        if numbers and not yes:
            what = (
                f"dead letter {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} dead letters"
            )
            if not click.confirm(f"Drop {what} for good?", err=True):
                return EXIT_NEEDS_ATTENTION
        dropped = 0
        async with _store_for_operator_log(setup, doomed) as store:
            operator_log = OperatorLog(audit, store, reason=because)
            for at in range(0, len(doomed), _BATCH):
                dropped += await drop_letters(doomed[at : at + _BATCH], dead, store, operator_log)
    if as_json:
        click.echo(json.dumps({"dropped": dropped, "numbers": numbers}))
    else:
        click.echo(f"dropped {dropped:,}")
    return code


# --- shared -------------------------------------------------------------------------------


@asynccontextmanager
async def _letters(setup: Setup) -> AsyncIterator[DeadLetters]:
    """Open the dead letters; yield empty ones if they do not exist yet."""
    if _is_empty(setup):
        yield MemoryDeadLetters()
        return
    async with opened(setup.config.dead.opened) as dead:
        yield dead


@asynccontextmanager
async def _store_for_operator_log(
    setup: Setup, doomed: Sequence[LetterToDrop]
) -> AsyncIterator[Store | None]:
    """Open the store for the operator log; yield None if there is nothing to write to it."""
    place = setup.config.store
    has_keys = any(each.key for each in doomed)
    if not has_keys or is_missing(place) or is_out_of_reach(place):
        yield None
        return
    async with opened(place.opened) as store:
        yield store


def _is_empty(setup: Setup) -> bool:
    refuse_memory(setup.config.dead, "dead")
    return is_missing(setup.config.dead)


def _choice(
    *, numbers: Sequence[int], every: bool, reason: str, route: str | None
) -> DeadLetterFilter:
    if bool(numbers) == every:
        raise click.UsageError("name dead letters by number, or use --all")
    return DeadLetterFilter(tuple(numbers), reason, route)


def _missing(numbers: Sequence[int]) -> int:
    for number in numbers:
        note(f"there is no dead letter {number}, or it does not match")
    if not numbers:
        return 0
    return EXIT_NEEDS_ATTENTION


def _bar(count: int) -> Progress:
    """Return a progress bar, shown on a terminal if there is much to do."""
    console = Console(stderr=True)
    return Progress(
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal or count < 2 * _BATCH,
    )


dead.add_command(list_)
dead.add_command(show)
dead.add_command(replay)
dead.add_command(drop)
