"""`oncebridge check`: check the configuration and its environment for problems."""

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.text import Text

from oncebridge.base.formatting import format_count
from oncebridge.check import aws, run
from oncebridge.check.finding import CODES, Checkup, Finding, NotChecked, Severity
from oncebridge.check.stores import UNREACHABLE
from oncebridge.cli.command import (
    EXIT_CANNOT_OPEN,
    EXIT_NEEDS_ATTENTION,
    as_json_option,
    command,
    printable,
    printable_lines,
    screen,
)
from oncebridge.cli.event_loop import run_loop
from oncebridge.errors import ConfigError
from oncebridge.service.config import Setup

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}
_WIDEST, _NARROWEST = 100, 40
_NAMES = 7


@command(
    "oncebridge check -c oncebridge.toml",
    "oncebridge check -c oncebridge.toml --strict --ignore audit-missing",
    "oncebridge check -c oncebridge.toml --json | jq -r .code",
)
@as_json_option
@click.option(
    "--strict", is_flag=True, help="Fail on notes too, and if something could not be checked."
)
@click.option(
    "--only", multiple=True, metavar="CODE", help="Report only this finding (repeatable)."
)
@click.option(
    "--ignore", multiple=True, metavar="CODE", help="Do not report this finding (repeatable)."
)
@click.option(
    "--function",
    "functions",
    multiple=True,
    metavar="NAME",
    help="A Lambda function that uses this configuration (repeatable).",
)
@click.option(
    "--destination",
    "destinations",
    multiple=True,
    metavar="NAME",
    help="An API destination that sends to this HTTP source (repeatable).",
)
@click.option(
    "--role", metavar="ARN", help="The role the service runs as, if not your current one."
)
@click.option("-v", "--verbose", is_flag=True, help="List the checks that passed, too.")
def check(
    setup: Setup,
    *,
    as_json: bool,
    strict: bool,
    only: tuple[str, ...],
    ignore: tuple[str, ...],
    verbose: bool,
    **aims: Any,
) -> None:
    """
    Check the configuration and its environment for problems.

    Checks settings, rules, secrets, files, clocks, the store and the resources on AWS, and
    changes nothing: no file, table or key is created. Each finding says what was seen, why it is
    a problem and how to fix it; docs/check.md lists them all. What could not be checked is
    listed too.

    Exit code 1: there are warnings or errors. 3: the store could not be reached.
    """
    _check_codes("--only", only)
    _check_codes("--ignore", ignore)
    with _progress():
        found = run_loop(run.check(setup, run.AwsScope(**aims)))
    found.findings = [
        one for one in found.findings if one.code not in ignore and (not only or one.code in only)
    ]
    if as_json:
        _print_json(found, verbose=verbose)
    else:
        _print(screen(), found, verbose=verbose)
    sys.exit(_exit_code(found, strict=strict))


def _progress() -> AbstractContextManager[object]:
    """Show on a terminal that checks are running: some servers are slow."""
    console = Console(stderr=True)
    return console.status("checking …") if console.is_terminal else nullcontext()


def _check_codes(option: str, codes: Sequence[str]) -> None:
    known = CODES | aws.CODES
    for code in codes:
        if code not in known:
            close = get_close_matches(code, sorted(known), 1)
            hint = f"did you mean {close[0]!r}?" if close else "docs/check.md lists them"
            raise ConfigError(option, f"{code!r} is not a code of a finding; {hint}")


def _exit_code(found: Checkup, *, strict: bool) -> int:
    if any(one.code == UNREACHABLE for one in found.findings):
        return EXIT_CANNOT_OPEN
    bad = [one for one in found.findings if strict or one.severity is not Severity.NOTE]
    return EXIT_NEEDS_ATTENTION if bad or (strict and found.not_checked) else 0


# --- as JSON -------------------------------------------------------------------------------------


def _print_json(found: Checkup, *, verbose: bool) -> None:
    for finding in found.worst_first():
        _print_object("finding", msgspec.to_builtins(finding))
    for blind in found.not_checked:
        _print_object("could-not-look", msgspec.to_builtins(blind))
    for passed in found.passed if verbose else ():
        _print_object("in-order", msgspec.to_builtins(passed))
    _print_object("summary", _counts(found))


def _print_object(kind: str, fields: dict[str, Any]) -> None:
    click.echo(json.dumps({"kind": kind, **fields}, ensure_ascii=False))


def _counts(found: Checkup) -> dict[str, int]:
    severities = [one.severity for one in found.findings]
    counts = {f"{severity}s": severities.count(severity) for severity in Severity}
    return {**counts, "could_not_look": len(found.not_checked), "in_order": len(found.passed)}


# --- as text ------------------------------------------------------------------------------------


def _print(console: Console, found: Checkup, *, verbose: bool) -> None:
    columns = shutil.get_terminal_size().columns
    width = max(min(columns, _WIDEST), _NARROWEST)
    for finding in found.worst_first():
        console.print(_finding_text(finding, width), end="\n\n")
    if found.not_checked:
        console.print(Text("could not be checked", style="bold"))
        for needs, blinds in _by_needs(found.not_checked).items():
            console.print(_wrapped("  ", f"needs {needs}", width))
            for blind in blinds:
                console.print(
                    _wrapped("    ", f"{blind.subject}: {blind.what}", width), style="dim"
                )
        console.print()
    if verbose and found.passed:
        console.print(Text("passed", style="bold"))
        for passed in found.passed:
            console.print(_wrapped("  ", f"{passed.subject}: {passed.what}", width))
        console.print()
    console.print(_summary(found, width))


def _finding_text(finding: Finding, width: int) -> Text:
    text = Text()
    text.append(f"{finding.severity.upper()}", style=_STYLES[finding.severity])
    text.append(f"  {finding.code}", style="bold")
    subject = printable(finding.subject)
    is_long = len(text) + 2 + len(subject) > width
    text.append(f"\n  {subject}" if is_long else f"  {subject}")
    sentence, *snippet = finding.fix.split("\n")
    for name, value in (("seen", finding.seen), ("why", finding.why), ("fix", sentence)):
        text.append("\n")
        text.append(_field(name, value, width))
    for line in snippet:
        # Not wrapped: it is there to be copied.
        text.append(f"\n  {'':<{_NAMES}}  ")
        text.append(printable(line), style="green")
    text.append("\n")
    text.append(_field("docs", finding.docs, width, style="dim"))
    return text


def _field(name: str, value: str, width: int, style: str = "") -> Text:
    text = Text()
    text.append(f"  {name:<{_NAMES}}", style="dim")
    rest = " " * (_NAMES + 2)
    lines = [
        wrapped
        for line in printable_lines(value)
        for wrapped in _lines(line, width - len(rest)) or [""]
    ]
    text.append(f"\n{rest}".join(lines), style=style)
    return text


def _by_needs(blinds: Sequence[NotChecked]) -> dict[str, list[NotChecked]]:
    """Group the checks that could not be made by what they need."""
    found: dict[str, list[NotChecked]] = {}
    for blind in blinds:
        found.setdefault(blind.needs, []).append(blind)
    return found


def _wrapped(indent: str, value: str, width: int) -> Text:
    return Text("\n".join(_lines(printable(value), width, indent, f"{indent}  ")))


def _lines(text: str, width: int, first: str = "", others: str = "") -> list[str]:
    """Wrap at spaces only, so that names and addresses can be copied."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(found: Checkup, width: int) -> Text:
    counts = _counts(found)
    counted = [
        f"{number} {name.removesuffix('s') if number == 1 else name}"
        for name, number in ((f"{one}s", counts[f"{one}s"]) for one in Severity)
        if number
    ]
    verdict = ", ".join(counted) or "no problems found"
    rest = f"; {format_count(counts['in_order'], 'check')} passed"
    if found.not_checked:
        rest += f", {counts['could_not_look']} could not be made"
    text = Text("\n".join(_lines(verdict + rest, width)))
    text.stylize("bold" if counted else "bold green", 0, len(verdict))
    return text
