"""
How every command behaves: examples in its help, mistakes in plain words, output that is safe.

A configuration file is read when it is named, and never because it happens to lie there: what
runs must not depend on the directory somebody stands in. Where one lies unused, that is said.
"""

import functools
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import click
from msgspec import Struct
from rich.console import Console
from rich.text import Text

from oncebridge.base.options import Setting, form, settings_of, written
from oncebridge.errors import ConfigError, ConfigErrors, OncebridgeError
from oncebridge.operate.operator_log import AuditFile
from oncebridge.service import logs
from oncebridge.service.config import DEFAULT_FILE, PREFIX, Config, Setup, load

EXIT_NEEDS_ATTENTION, EXIT_BAD_CONFIG, EXIT_CANNOT_OPEN, EXIT_INTERRUPTED = 1, 2, 3, 130
_C = TypeVar("_C", bound="Closing")

_BASIC = ("source", "store", "sink", "dead", "preset", "window", "mode")
"""Settings that have a flag on every command; some have more, and `run` has all."""

as_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")


def examples(*lines: str) -> str:
    """Lay examples out for the end of a command's help, each on its own line."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def command(
    *lines: str, name: str | None = None, every: bool = False, more: Collection[str] = ()
) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command that is configured; *lines* are its examples, *more* further flags."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        body = _hint_at_unused_config(
            configured(every=every, more=more)(_end_quietly_on_broken_pipe(function))
        )
        return click.command(name, epilog=examples(*lines))(body)

    return decorate


def _hint_at_unused_config(function: Callable[..., Any]) -> Callable[..., Any]:
    """Point out a configuration file that lies here and is not read."""

    @functools.wraps(function)
    def wrapped(*args: Any, config: str | None, **rest: Any) -> Any:
        is_named = config or os.environ.get(f"{PREFIX}CONFIG")
        if not is_named and Path(DEFAULT_FILE).is_file():
            note(f"{DEFAULT_FILE} lies here and is not read; to use it: -c {DEFAULT_FILE}")
        return function(*args, config=config, **rest)

    return wrapped


def _end_quietly_on_broken_pipe(function: Callable[..., Any]) -> Callable[..., Any]:
    """End without a word when nobody reads the output any more, as in `… | head`."""

    @functools.wraps(function)
    def wrapped(*args: Any, **rest: Any) -> Any:
        try:
            return function(*args, **rest)
        except BrokenPipeError:
            # Python would complain when it flushes what is left.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(EXIT_NEEDS_ATTENTION)

    return wrapped


def note(text: str) -> None:
    """Tell something beside the output."""
    click.echo(f"oncebridge: {text}", err=True)


def open_audit_file(setup: Setup) -> AuditFile:
    """Get ready to write down what an operator does, in the log as well."""
    logs.set_up(setup.config.log_level, setup.config.log_format)
    return AuditFile(setup.config.audit)


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


def is_to_stdout(setup: Setup) -> bool:
    """Return whether events go to standard output, so that nothing else may."""
    return any(route.sink.url == "-" for route in setup.routes)


# --- settings as flags, and errors --------------------------------------------------------


def configured(
    *, every: bool = False, more: Collection[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a command the flags of the settings, and hand it the `Setup` they make."""
    names = {*_BASIC, *more}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        chosen = [s for s in settings_of(Config) if _is_flag(s) and (every or s.name in names)]

        @report_errors
        @functools.wraps(command)
        def wrapped(config: str | None, set_: tuple[str, ...], **rest: Any) -> Any:
            flags = {s.name: rest.pop(s.name) for s in chosen}
            flags = {name: text for name, text in flags.items() if text is not None}
            for pair in set_:
                name, equals, text = pair.partition("=")
                if not equals:  # and not quoted: it may be a secret without its name
                    raise click.UsageError("--set: write NAME=VALUE, such as sink.concurrency=3")
                flags[name.strip()] = text
            setup = load(config, flags=flags)
            # For what a store or queue has to say; a command that runs on says more.
            logs.set_up("warning", setup.config.log_format)
            return command(setup, **rest)

        for setting in reversed(chosen):
            wrapped = click.option(
                f"--{setting.name.replace('_', '-')}",
                setting.name,
                metavar=_metavar(setting),
                help=_help(setting),
            )(wrapped)
        wrapped = click.option(
            "--set", "set_", multiple=True, metavar="NAME=VALUE", help="Any other setting."
        )(wrapped)
        return click.option(
            "-c",
            "--config",
            metavar="FILE",
            help=f"The configuration file, usually {DEFAULT_FILE}.",
        )(wrapped)

    return decorate


def _is_flag(setting: Setting) -> bool:
    kind = setting.kind
    is_table = isinstance(kind, type) and issubclass(kind, Struct) and "Place" not in kind.__name__
    return not is_table and setting.name not in ("rules", "routes")


def _metavar(setting: Setting) -> str:
    if "address" in form(setting.kind):
        return "ADDRESS"
    return form(setting.kind).replace('"', "").replace(", ", "|").upper().replace(" ", "-")[:24]


def _help(setting: Setting) -> str:
    shown = written(setting.default)
    return f"{setting.doc.text} [{shown}]" if shown else setting.doc.text


def report_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Tell mistakes in plain words, without a traceback, and end with the right code."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except ConfigErrors as errors:
            where = f" in {errors.file}" if errors.file else ""
            click.echo(f"oncebridge: {len(errors.problems)} to put right{where}", err=True)
            for problem in errors.problems:
                click.echo(f"  {problem}", err=True)
            sys.exit(EXIT_BAD_CONFIG)
        except ConfigError as error:
            click.echo(f"oncebridge: {error}", err=True)
            sys.exit(EXIT_BAD_CONFIG)
        except OncebridgeError as error:
            click.echo(f"oncebridge: {error}", err=True)
            sys.exit(EXIT_CANNOT_OPEN)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click tells these, and nobody reads the other end of a broken pipe
        except Exception as error:  # noqa: BLE001 - a mistake of ours, told without what it quotes
            click.echo(_unexpected_error_text(error), err=True)
            sys.exit(EXIT_NEEDS_ATTENTION)

    return wrapped


def _unexpected_error_text(error: BaseException) -> str:
    """Return where an error came from, without its text: that may quote an event or a secret."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    what = f"oncebridge: {type(error).__name__}, which nobody foresaw; please report these lines:"
    return "\n".join([what, *lines])


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
