"""
What the commands share: the flags that are settings, and how mistakes are told.

The flags come from the declarations of the settings, so there is none that the file does
not have, and no second place that describes it.
"""

import asyncio
import errno
import functools
import gc
import logging
import os
import signal
import sys
import termios
import traceback
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

import click
from msgspec import Struct

from oncebridge.base.options import Setting, describe_type, format_setting, settings_of
from oncebridge.errors import ConfigError, ConfigErrors, OncebridgeError
from oncebridge.service import logs
from oncebridge.service.config import DEFAULT_FILE, Config, Setup, load

NEEDS_YOU, WRONG, CANNOT_OPEN, LEFT = 1, 2, 3, 130

_log = logging.getLogger("oncebridge")
_T = TypeVar("_T")
_BASIC = ("source", "store", "sink", "dead", "preset", "window", "mode")
"""Settings that have a flag on every command; some have more, and `run` has all."""


def configured(
    *, every: bool = False, more: Collection[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a command the flags of the settings, and hand it the `Setup` they make."""
    names = {*_BASIC, *more}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        chosen = [s for s in settings_of(Config) if _is_flag(s) and (every or s.name in names)]

        @told
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


def told(command: Callable[..., Any]) -> Callable[..., Any]:
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
            sys.exit(WRONG)
        except ConfigError as error:
            click.echo(f"oncebridge: {error}", err=True)
            sys.exit(WRONG)
        except OncebridgeError as error:
            click.echo(f"oncebridge: {error}", err=True)
            sys.exit(CANNOT_OPEN)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click tells these, and nobody reads the other end of a broken pipe
        except Exception as error:  # noqa: BLE001 - a mistake of ours, told without what it quotes
            click.echo(_unforeseen(error), err=True)
            sys.exit(NEEDS_YOU)

    return wrapped


def _unforeseen(error: BaseException) -> str:
    """Return where an error came from, without its text: that may quote an event or a secret."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    what = f"oncebridge: {type(error).__name__}, which nobody foresaw; please report these lines:"
    return "\n".join([what, *lines])


def run_loop(work: Coroutine[Any, Any, _T]) -> _T:
    """Run *work* on the fastest loop there is."""
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    # What is there now stays; what an event leaves behind is mostly not cyclic.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.get_loop().set_exception_handler(_log_stray)
        return runner.run(work)


def on_signals(stop: Callable[[str], None]) -> None:
    """
    Call *stop* with the name of each signal that asks this process to end.

    SIGHUP stays ignored where the process was started so, as `nohup` does.
    """

    def hang_up() -> None:
        _leave_lost_terminal()
        stop(signal.SIGHUP.name)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number.name)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, hang_up)


def _leave_lost_terminal() -> None:
    """Write to nowhere from now on, if the terminal was closed: every write would fail."""
    for fd in (1, 2):
        try:
            termios.tcgetattr(fd)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)


def remove_signal_handlers() -> None:
    """Undo `on_signals`."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.remove_signal_handler(number)


def _log_stray(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error that nobody waits for, by its type: the loop would print its text."""
    error = context.get("exception")
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    at = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    _log.error("oncebridge.unforeseen", extra={"error": type(error).__name__, "at": at})


def is_to_stdout(setup: Setup) -> bool:
    """Return whether events go to standard output, so that nothing else may."""
    return any(route.sink.url == "-" for route in setup.routes)
