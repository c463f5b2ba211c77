"""
Shared by all commands: flags for settings, help with examples, errors, and safe output.

A configuration file is used only if it is named, so that the result does not depend on the
current directory. If the directory has one that is not used, a note says so.
"""

import functools
import inspect
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

from oncebridge.base.formatting import format_count
from oncebridge.base.options import Setting, describe_type, format_setting, settings_of
from oncebridge.cli.event_loop import run_loop
from oncebridge.errors import ConfigError, ConfigErrors, OncebridgeError
from oncebridge.operate.operator_log import AuditFile
from oncebridge.service import logs
from oncebridge.service.config import DEFAULT_FILE, PREFIX, Config, Setup, load

EXIT_NEEDS_ATTENTION, EXIT_BAD_CONFIG, EXIT_CANNOT_OPEN, EXIT_INTERRUPTED = 1, 2, 3, 130
_C = TypeVar("_C", bound="Closing")

_BASIC = ("source", "store", "sink", "dead", "preset", "window", "mode")
"""Settings with a flag on every command; some commands have more, and `run` has all."""

as_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object per line."
)


def examples(*lines: str) -> str:
    """Return examples for the end of a command's help, each on its own line."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def command(
    *lines: str, name: str | None = None, every: bool = False, more: Collection[str] = ()
) -> Callable[[Callable[..., Any]], click.Command]:
    """
    Make a command that gets a `Setup`; *lines* are its examples, *more* further flags.

    An async function runs on the event loop, and returns the exit code.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        if inspect.iscoroutinefunction(function):
            function = _on_event_loop(function)
        body = _hint_at_unused_config(
            configured(every=every, more=more)(_end_quietly_on_broken_pipe(function))
        )
        return click.command(name, epilog=examples(*lines))(body)

    return decorate


def _on_event_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **rest: Any) -> None:
        sys.exit(run_loop(function(*args, **rest)))

    return wrapped


def _hint_at_unused_config(function: Callable[..., Any]) -> Callable[..., Any]:
    """Print a note if this directory has a configuration file that is not used."""

    @functools.wraps(function)
    def wrapped(*args: Any, config: str | None, **rest: Any) -> Any:
        is_named = config or os.environ.get(f"{PREFIX}CONFIG")
        if not is_named and Path(DEFAULT_FILE).is_file():
            note(f"{DEFAULT_FILE} found, but not used; to use it: -c {DEFAULT_FILE}")
        return function(*args, config=config, **rest)

    return wrapped


def _end_quietly_on_broken_pipe(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exit silently if the reader of the output is gone, as in `… | head`."""

    @functools.wraps(function)
    def wrapped(*args: Any, **rest: Any) -> Any:
        try:
            return function(*args, **rest)
        except BrokenPipeError:
            # Python would print an error when it flushes the rest.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(EXIT_NEEDS_ATTENTION)

    return wrapped


def note(text: str) -> None:
    """Print a note to standard error."""
    click.echo(f"oncebridge: {text}", err=True)


def open_audit_file(setup: Setup) -> AuditFile:
    """Return the audit file for operator actions, which are logged too."""
    logs.set_up(setup.config.log_level, setup.config.log_format)
    return AuditFile(setup.config.audit)


def chosen_routes(setup: Setup, names: Sequence[str], flag: str = "--route") -> list[str]:
    """Return the routes that *flag* named, or all; raise `ConfigErrors` for unknown names."""
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
    """An object with `open` and `aclose`."""

    async def open(self) -> None: ...

    async def aclose(self) -> None: ...


@asynccontextmanager
async def opened(what: _C) -> AsyncIterator[_C]:
    """Open *what*, and close it at the end, whatever happens."""
    try:
        await what.open()
        yield what
    finally:
        await what.aclose()


def is_to_stdout(setup: Setup) -> bool:
    """Return whether events go to standard output, where nothing else may be printed then."""
    return any(route.sink.url == "-" for route in setup.routes)


# --- settings as flags, and errors --------------------------------------------------------


def configured(
    *, every: bool = False, more: Collection[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the flags of the settings to a command, which gets the resulting `Setup`."""
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
                if not equals:  # not quoted here: it may be a secret without its name
                    raise click.UsageError("--set: write NAME=VALUE, such as sink.concurrency=3")
                flags[name.strip()] = text
            setup = load(config, flags=flags)
            # For warnings of stores and queues; a command that keeps running logs more.
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
            "--set",
            "set_",
            multiple=True,
            metavar="NAME=VALUE",
            help="Set any other setting (repeatable).",
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
    if "address" in describe_type(setting.kind):
        return "ADDRESS"
    return (
        describe_type(setting.kind)
        .replace('"', "")
        .replace(", ", "|")
        .upper()
        .replace(" ", "-")[:24]
    )


def _help(setting: Setting) -> str:
    shown = format_setting(setting.default)
    return f"{setting.doc.text} [{shown}]" if shown else setting.doc.text


def report_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Print errors without a traceback, and exit with the matching code."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except ConfigErrors as errors:
            where = errors.file or "the configuration"
            click.echo(
                f"oncebridge: {format_count(len(errors.problems), 'error')} in {where}", err=True
            )
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
            raise  # click prints these, and a broken pipe has no reader
        except Exception as error:  # noqa: BLE001 - a bug; its text may quote an event
            click.echo(_unexpected_error_text(error), err=True)
            sys.exit(EXIT_NEEDS_ATTENTION)

    return wrapped


def _unexpected_error_text(error: BaseException) -> str:
    """Return where an error came from, without its text: it may quote an event or a secret."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    what = f"oncebridge: unexpected {type(error).__name__}; please report these lines:"
    return "\n".join([what, *lines])


# --- output -------------------------------------------------------------------------------


def printable(text: object) -> str:
    """Return *text* with control characters escaped: ids and messages come from outside."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def screen() -> Console:
    """Return a console that uses colours on a terminal only and never wraps or crops a line."""
    return Console(highlight=False, soft_wrap=True)


def columns(rows: Iterable[Sequence[str]], *, width: int | None = None) -> list[str]:
    """Return *rows* as aligned lines, cropped to *width* if given."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        line = "  ".join([f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)]).rstrip()
        lines.append(line if width is None or len(line) <= width else f"{line[: width - 1]}…")
    return lines


def field(name: str, value: object, style: str = "", *, wide: int = 9) -> Text:
    """Return one named value as an indented line."""
    line = Text()
    line.append(f"  {name:<{wide}}", style="dim")
    first, *others = printable_lines(value)
    line.append(first, style=style)
    for other in others:
        line.append(f"\n  {'':<{wide}}{other}", style=style)
    return line


def printable_lines(value: object) -> list[str]:
    """Return the lines of a text, each printable."""
    return [printable(line) for line in str(value).split("\n")]
