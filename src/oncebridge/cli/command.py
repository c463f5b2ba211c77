"""
How every command behaves: examples in its help, mistakes in plain words, output that is safe.

A configuration file is read when it is named, and never because it happens to lie there: what
runs must not depend on the directory somebody stands in. Where one lies unused, that is said.
"""

import functools
import os
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import click
from rich.console import Console
from rich.text import Text

from oncebridge.cli.setup import NEEDS_YOU, configured
from oncebridge.errors import ConfigError, ConfigErrors
from oncebridge.operate.operator_log_file import AuditTrail
from oncebridge.service import logs
from oncebridge.service.config import DEFAULT_FILE, PREFIX, Setup

_C = TypeVar("_C", bound="Closing")

as_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")


def examples(*lines: str) -> str:
    """Lay examples out for the end of a command's help, each on its own line."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def command(
    *lines: str, name: str | None = None, every: bool = False, more: Collection[str] = ()
) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command that is configured; *lines* are its examples, *more* further flags."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        body = _hinting(configured(every=every, more=more)(_ending_with_its_reader(function)))
        return click.command(name, epilog=examples(*lines))(body)

    return decorate


def _hinting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Point out a configuration file that lies here and is not read."""

    @functools.wraps(function)
    def wrapped(*args: Any, config: str | None, **rest: Any) -> Any:
        is_named = config or os.environ.get(f"{PREFIX}CONFIG")
        if not is_named and Path(DEFAULT_FILE).is_file():
            note(f"{DEFAULT_FILE} lies here and is not read; to use it: -c {DEFAULT_FILE}")
        return function(*args, config=config, **rest)

    return wrapped


def _ending_with_its_reader(function: Callable[..., Any]) -> Callable[..., Any]:
    """End without a word when nobody reads the output any more, as in `… | head`."""

    @functools.wraps(function)
    def wrapped(*args: Any, **rest: Any) -> Any:
        try:
            return function(*args, **rest)
        except BrokenPipeError:
            # Python would complain when it flushes what is left.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(NEEDS_YOU)

    return wrapped


def note(text: str) -> None:
    """Tell something beside the output."""
    click.echo(f"oncebridge: {text}", err=True)


def audited(setup: Setup) -> AuditTrail:
    """Get ready to write down what an operator does, in the log as well."""
    logs.set_up(setup.config.log_level, setup.config.log_format)
    return AuditTrail(setup.config.audit)


def chosen_routes(setup: Setup, names: Sequence[str], flag: str = "--route") -> list[str]:
    """Return the names of the routes that *flag* gave, or of all; raise if there is no such route."""
    known = [route.name for route in setup.routes]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigErrors(
            [
                ConfigError(flag, f"{name!r} is not a route; routes: {', '.join(known)}")
                for name in unknown
            ],
            setup.file,
        )
    return list(names) or known


@contextmanager
def open_file(name: str) -> Iterator[BinaryIO]:
    """Open a file of events; `-` is standard input."""
    if name == "-":
        if sys.stdin is None:
            raise ConfigError("", "-: standard input is closed")
        yield sys.stdin.buffer
        return
    try:
        file = Path(name).open("rb")  # noqa: SIM115 - only opening may fail here
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else type(error).__name__
        raise ConfigError("", f"{name}: {why}") from None
    with file:
        yield file


class Closing(Protocol):
    """What is opened and closed."""

    async def open(self) -> None: ...

    async def aclose(self) -> None: ...


@asynccontextmanager
async def opened(what: _C) -> AsyncIterator[_C]:
    """Open *what*, and close it in any case."""
    try:
        await what.open()
        yield what
    finally:
        await what.aclose()


# --- what people see ----------------------------------------------------------------------


def printable(text: object) -> str:
    """Spell out what a terminal would obey: ids and messages come from strangers."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def screen() -> Console:
    """Get a console that colours on a terminal only, and never breaks or crops a line."""
    return Console(highlight=False, soft_wrap=True)


def columns(rows: Iterable[Sequence[str]], *, width: int | None = None) -> list[str]:
    """Align *rows*; the last column is cropped to *width*, if there is one."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        line = "  ".join([f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)]).rstrip()
        lines.append(line if width is None or len(line) <= width else f"{line[: width - 1]}…")
    return lines


def field(name: str, value: object, style: str = "", *, wide: int = 9) -> Text:
    """Set one named value on a line of its own, indented."""
    line = Text()
    line.append(f"  {name:<{wide}}", style="dim")
    first, *others = printable_lines(value)
    line.append(first, style=style)
    for other in others:
        line.append(f"\n  {'':<{wide}}{other}", style=style)
    return line


def printable_lines(value: object) -> list[str]:
    """Spell out each line of a text."""
    return [printable(line) for line in str(value).split("\n")]
