"""`oncebridge audit`: find the duplicates in a recording, and their causes."""

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NoReturn
from weakref import ref

import click
import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from oncebridge.audit.report import AuditReport, Difference
from oncebridge.audit.suggest import Suggestion, suggest
from oncebridge.base.durations import format_duration, parse_duration
from oncebridge.base.formatting import format_list
from oncebridge.base.options import Text, did_you_mean
from oncebridge.cli.command import EXIT_INTERRUPTED, EXIT_NEEDS_ATTENTION, command, note
from oncebridge.cli.event_loop import run_loop
from oncebridge.errors import ConfigError
from oncebridge.service.addresses import StorePlace, refuse_memory
from oncebridge.service.config import PREFIX, Route, Setup, load

QUIET = "500ms"


def _default_to_genesys(made: click.Command) -> click.Command:
    """Use the preset genesys if no configuration and no preset is named."""
    body = made.callback
    assert body is not None  # noqa: S101 - every command has one

    @functools.wraps(body)
    def callback(*, config: str | None, preset: str | None, **rest: Any) -> Any:
        is_configured = (
            config or os.environ.get(f"{PREFIX}CONFIG") or os.environ.get(f"{PREFIX}PRESET")
        )
        preset = preset or (None if is_configured else "genesys")
        return body(config=config, preset=preset, **rest)

    made.callback = callback
    return made


@_default_to_genesys
@command(
    "oncebridge audit events.ndjson",
    "oncebridge audit recordings/ --html report.html --suggest suggested.toml",
    "oncebridge audit events.ndjson.gz --rules suggested.toml",
    "oncebridge audit events.ndjson -c oncebridge.toml --warm sqlite:seen.db",
)
@click.argument("files", nargs=-1, required=True, metavar="FILE|DIRECTORY...")
@click.option(
    "--route", metavar="NAME", help="The route whose rules are used, if there are several."
)
@click.option("--html", metavar="FILE", help="Write the report as an HTML page, too.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as one JSON object.")
@click.option(
    "--suggest", "suggested", metavar="FILE", help="Write the suggested configuration to this file."
)
@click.option("--rules", metavar="FILE", help="Other rules to compare with.")
@click.option(
    "--differences",
    metavar="FILE",
    help="With --rules: write all differences, one JSON object per line.",
)
@click.option(
    "--quiet",
    metavar="DURATION",
    default=QUIET,
    help=f"Within this time the same state again counts as noise. [{QUIET}]",
)
@click.option("--warm", metavar="STORE", help="Write no report; record the events in this store.")
def audit(
    setup: Setup,
    *,
    files: tuple[str, ...],
    route: str | None,
    html: str | None,
    as_json: bool,
    suggested: str | None,
    rules: str | None,
    differences: str | None,
    quiet: str,
    warm: str | None,
) -> None:
    """
    Find the duplicates in recorded events, and their causes.

    Each FILE holds events: one per line, an array, or one after another; also compressed with
    gzip, and wrapped by SQS, SNS, Kinesis or CloudWatch Logs. A DIRECTORY is read with all its
    subdirectories, and - is standard input. Without a configuration, the rules of the preset
    genesys are used. Nothing is sent and nothing is changed; the report has ids and numbers, but
    no payloads.

    --rules FILE compares with other rules (a configuration with rules, preset and window) and
    shows for each event what they would decide differently.

    --warm STORE records the events in a store, as a service with this configuration would, and
    sends nothing: if they arrive again, they are duplicates. STORE is an address, env:NAME, or a
    configuration file (.toml) whose store is used, with its options.

    Exit code 1: something could not be read, or there are no events.
    """
    try:
        with _signals_raise():
            if warm is not None:
                _refuse_with_warm(
                    html=html, suggest=suggested, rules=rules, differences=differences
                )
                sys.exit(_warm(setup, files, route, warm, as_json=as_json))
            _check_targets(html, suggested, differences, rules)
            soon = parse_duration(quiet, "--quiet")
            found = _audit(setup, files, route, rules=rules, differences=differences, quiet=soon)
    except KeyboardInterrupt as left:
        _exit_interrupted(left, "interrupted; there is no report")
    suggestion = suggest(found, quiet=soon)
    _print_report(found, suggestion, as_json=as_json)
    _save(found, suggestion, html, suggested)
    sys.exit(EXIT_NEEDS_ATTENTION if found.unreadable or not found.events else 0)


# --- signals ------------------------------------------------------------------------------


class _Interrupted(KeyboardInterrupt):
    """A signal asked the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


class _SignalHandler:
    """
    A signal handler that raises `_Interrupted`.

    While that exception propagates, further signals are ignored: they would interrupt the removal
    of temporary files. If it was dropped (as Python does in a `__del__`), the next signal raises
    again.
    """

    def __init__(self) -> None:
        self._raised: Callable[[], _Interrupted | None] = lambda: None

    def __call__(self, number: int, _frame: object) -> None:
        if self._raised() is not None:
            return
        interruption = _Interrupted(number)
        self._raised = ref(interruption)
        try:
            raise interruption
        finally:
            del interruption  # its traceback refers to this frame, which would keep it alive


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP raise, so that temporary files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    ends = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = {number: signal.getsignal(number) for number in ends}
    ending = _SignalHandler()
    for number, how in before.items():
        # Not if it is ignored, as `nohup` does.
        if how in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, ending)
    try:
        yield
    finally:
        for number, how in before.items():
            signal.signal(number, how)


def _exit_interrupted(left: KeyboardInterrupt, why: str) -> NoReturn:
    with suppress(OSError):  # the terminal may be gone
        note(why)
    sys.exit(left.code if isinstance(left, _Interrupted) else EXIT_INTERRUPTED)


# --- options ------------------------------------------------------------------------------


def _route(setup: Setup, name: str | None) -> Route:
    """Return the route whose rules are used; any, if all routes have the same rules."""
    known = [route.name for route in setup.routes]
    if name is not None:
        for route in setup.routes:
            if route.name == name:
                return route
        raise ConfigError("--route", f"{name!r} is not a route; {did_you_mean(name, known)}")
    first, *others = setup.routes
    if any(other.rules != first.rules for other in others):
        raise ConfigError("--route", f"there are several; name one of {', '.join(known)}")
    return first


def _refuse_with_warm(**given: str | None) -> None:
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"--{name}", "cannot be used with --warm, which writes no report")


def _check_targets(
    html: str | None, suggested: str | None, differences: str | None, rules: str | None
) -> None:
    """Raise `ConfigError` before the work begins if its results cannot be saved."""
    if differences is not None and rules is None:
        raise ConfigError("--differences", "needs --rules")
    for flag, name in (("--suggest", suggested), ("--differences", differences)):
        if name is not None and Path(name).exists():
            raise ConfigError(flag, f"{name} already exists and is not overwritten")
    if html is not None and Path(html).exists() and not _is_page(Path(html)):
        raise ConfigError("--html", f"{html} already exists and is not a report of oncebridge")
    for flag, name in (("--html", html), ("--suggest", suggested), ("--differences", differences)):
        if name is not None and not Path(name).parent.is_dir():
            raise ConfigError(flag, f"there is no directory {Path(name).parent}")


def _is_page(path: Path) -> bool:
    from oncebridge.audit.html import MARK  # noqa: PLC0415 - only for pages

    try:
        with path.open("rb") as file:
            return file.read(len(MARK)) == MARK.encode()
    except OSError:
        return False


# --- the report ---------------------------------------------------------------------------


def _audit(
    setup: Setup,
    files: tuple[str, ...],
    route: str | None,
    *,
    rules: str | None,
    differences: str | None,
    quiet: timedelta,
) -> AuditReport:
    from oncebridge.audit import engine  # noqa: PLC0415 - DuckDB takes a moment to load

    ours = _route(setup, route)
    other = None
    if rules is not None:
        candidate = load(rules, environment={}, with_source=False)
        other = _route(candidate, route if len(candidate.routes) > 1 else None)
    with _bar() as progress, _lines(differences) as line:
        return engine.audit(
            [Path(name) for name in files],
            ours.rules,
            window=ours.settings.window,
            candidate=None if other is None else other.rules,
            candidate_window=None if other is None else other.settings.window,
            quiet=quiet,
            bare=ours.settings.bare,
            limits=ours.settings.limits,
            progress=progress,
            differences=line,
            skipped=_note_skipped,
        )


def _note_skipped(names: Sequence[str]) -> None:
    note(f"{format_list(names)}: named more than once; read once")


@contextmanager
def _lines(name: str | None) -> Iterator[Callable[[Difference], None] | None]:
    """Write differences to a file, one JSON object per line."""
    if name is None:
        yield None
        return
    with _created(name, "--differences") as file:
        encode = msgspec.json.Encoder().encode

        def write(difference: Difference) -> None:
            with _saving(name, "--differences"):
                file.write(encode(difference) + b"\n")

        yield write


def _print_report(report: AuditReport, suggestion: Suggestion, *, as_json: bool) -> None:
    with _printing():
        if as_json:
            fields = msgspec.to_builtins(report) | {"suggestion": msgspec.to_builtins(suggestion)}
            click.echo(msgspec.json.encode(fields))
            return
        from oncebridge.audit.terminal import console_for_reports, show  # noqa: PLC0415

        show(report, suggestion, console_for_reports())


@contextmanager
def _printing() -> Iterator[None]:
    """Print why standard output cannot be written to; its disk may be full."""
    try:
        yield
    except BrokenPipeError:
        raise  # handled for all commands
    except OSError as error:
        # Python would print an error when it flushes the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        note(f"standard output: {_error_text(error)}")
        sys.exit(EXIT_NEEDS_ATTENTION)


def _save(
    report: AuditReport, suggestion: Suggestion, html: str | None, suggested: str | None
) -> None:
    if html is not None:
        from oncebridge.audit.html import page  # noqa: PLC0415

        with _saving(html, "--html"):
            Path(html).write_text(page(report, suggestion), "utf-8")
        note(f"wrote {html}")
    if suggested is not None:
        with _created(suggested, "--suggest") as file, _saving(suggested, "--suggest"):
            file.write(suggestion.toml.encode())
            file.flush()
        note(f"wrote {suggested}")


@contextmanager
def _created(name: str, flag: str) -> Iterator[BinaryIO]:
    """Create a file, and remove it again if it could not be finished."""
    path = Path(name)
    with _saving(name, flag):
        file = path.open("xb")
    try:
        yield file
        with _saving(name, flag):
            file.close()
    except BaseException:
        path.unlink(missing_ok=True)
        with suppress(OSError):
            file.close()
        raise


@contextmanager
def _saving(name: str, flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(flag, f"{name}: {_error_text(error)}") from None


def _error_text(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else type(error).__name__


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """Show progress and speed, on a terminal only."""
    console = Console(stderr=True)
    bar = Progress(
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        row = bar.add_task("", total=None)

        def progress(done: int, total: int) -> None:
            # The size of a pipe is not known.
            bar.update(row, completed=done, total=max(total, done) if total else None)

        yield progress


# --- the store ----------------------------------------------------------------------------


def _warm(
    setup: Setup, files: tuple[str, ...], route: str | None, store: str, *, as_json: bool
) -> int:
    from oncebridge.audit.reading import find_files  # noqa: PLC0415 - not for reports
    from oncebridge.audit.warm import StoreWarmer  # noqa: PLC0415

    routes = [_route(setup, route)] if route is not None else list(setup.routes)
    place = _place(setup, store)
    if not setup.file:
        names = ", ".join(repr(route.name) for route in routes)
        note(f"keys are made for the route {names}; the service must use this name: route = …")
    found = find_files([Path(name) for name in files], _note_skipped)
    warming = StoreWarmer(setup, place, routes, found)
    try:
        with _bar() as progress:
            run_loop(warming.run(progress))
    except KeyboardInterrupt as left:
        _print_counts(warming.counts(), as_json=as_json)
        _exit_interrupted(left, "interrupted; run it again to record the rest")
    _print_counts(warming.counts(), as_json=as_json)
    window = format_duration(routes[0].settings.window)
    note(f"windows begin now: new events are remembered for {window} from now on")
    if warming.left:
        note("some events are held by a worker, or the store refused them: run it again")
    return EXIT_NEEDS_ATTENTION if warming.left or warming.unreadable or not warming.events else 0


def _place(setup: Setup, text: str) -> StorePlace:
    """Return the store: by its address, or the one of a configuration, with its options."""
    if text.endswith(".toml") and ":" not in text:
        place = load(text, environment={}, with_source=False).config.store
    elif setup.file and text in (setup.config.store.url, setup.config.store.reference):
        place = setup.config.store
    else:
        place = StorePlace.of(Text.of(text, "--warm"))
    refuse_memory(place, "--warm")
    return place


def _print_counts(counts: dict[str, int], *, as_json: bool) -> None:
    with _printing():
        if as_json:
            fields = {name.replace(" ", "_"): count for name, count in counts.items()}
            click.echo(msgspec.json.encode(fields))
            return
        for name, count in counts.items():
            if count or name in ("new", "known"):
                click.echo(f"{name:<16}{count:>12,}")
