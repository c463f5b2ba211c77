"""`oncebridge test`: test rules with sample events."""

import json
import sys

import click
from rich.text import Text

from oncebridge.check import cases
from oncebridge.cli.command import (
    EXIT_NEEDS_ATTENTION,
    as_json_option,
    command,
    field,
    printable,
    screen,
)
from oncebridge.cli.event_loop import run_loop
from oncebridge.service.config import Setup


@command(
    "oncebridge test cases.toml -c oncebridge.toml",
    "oncebridge test tests/*.toml -c oncebridge.toml --json",
)
@click.argument("files", nargs=-1, required=True, metavar="CASES.toml...")
@as_json_option
def test(setup: Setup, *, files: tuple[str, ...], as_json: bool) -> None:
    """
    Test the rules of a configuration with sample events.

    CASES.toml says which samples are the same event, which are not, and which verdicts they
    get. No store, sink or source is opened.

    \b
      [[test]]
      name = "a resend is the same event"
      same = ["first.json", "resent.json"]    # next to this file
      rule = "orders"
    \b
      [[test]]
      name = "every order is a separate event"
      apart = ["orders.ndjson"]               # or "orders.ndjson#2", the second
    \b
      [[test]]
      name = "the window ends"
      events = ["first.json", "resent.json"]
      gap = "7d"                              # between one and the next
      verdicts = ["delivered", "delivered"]

    Exit code 1: a test failed.
    """  # noqa: D301 - \b keeps lines as they are
    results = run_loop(cases.run(cases.load(files, setup), setup))
    console = screen()
    for result in results:
        if as_json:
            fields = {
                "file": result.case.file,
                "name": result.case.name,
                "passed": not result.failures,
                "failures": list(result.failures),
            }
            click.echo(json.dumps(fields))
            continue
        style, word = ("red", "failed") if result.failures else ("green", "ok")
        line = Text("  ")
        line.append(f"{word:<8}", style=style)
        console.print(line.append(printable(result.case.name)))
        for failure in result.failures:
            console.print(field("", failure, wide=8))
    failed = sum(bool(result.failures) for result in results)
    if not as_json:
        click.echo(f"{len(results)} test{'s' * (len(results) != 1)}, {failed} failed")
    sys.exit(EXIT_NEEDS_ATTENTION if failed else 0)
