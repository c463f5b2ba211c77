"""`oncebridge dashboard`: the dashboard in a separate process."""

import asyncio
import logging

import click
from msgspec.structs import replace

from oncebridge.cli.command import command, note
from oncebridge.cli.event_loop import on_signals, run_loop
from oncebridge.errors import ConfigError, OncebridgeError
from oncebridge.operate.lookup import lacks_our_tables, open_for_reading
from oncebridge.service import logs
from oncebridge.service.addresses import is_missing, refuse_memory
from oncebridge.service.config import Setup
from oncebridge.service.monitor import mode_of

_log = logging.getLogger("oncebridge")
DEFAULT = "127.0.0.1:8081"
_FLAGS = ("dashboard", "dashboard_write", "dashboard_payloads")


@command(
    "oncebridge dashboard -c oncebridge.toml",
    "oncebridge dashboard -c oncebridge.toml --dashboard 127.0.0.1:9000",
    more=_FLAGS,
)
def dashboard(setup: Setup) -> None:
    """
    Run the dashboard for workers that run elsewhere.

    It reads the counts and the history of the workers from their store, so it needs their
    configuration. It creates nothing there, and writes only who has logged out, unless
    dashboard_write allows actions on dead letters. The default address is
    http://127.0.0.1:8081/. Ctrl-C stops it.
    """
    refuse_memory(setup.config.store, "store")
    if is_missing(setup.config.store) or lacks_our_tables(setup.config.store):
        raise OncebridgeError(
            f"{setup.config.store}: no worker has used this store yet; start one first"
        )
    if mode_of(setup.config) == "off":
        note('history is off, so no decisions are shown; set history = "sample" to keep some')
    if not setup.config.share_counts:
        note("share_counts is off, so no counts are shown; set share_counts = true")
    if not setup.config.dashboard:
        setup = replace(setup, config=replace(setup.config, dashboard=DEFAULT))
    logs.set_up(setup.config.log_level, setup.config.log_format)
    run_loop(_serve(setup))


async def _serve(setup: Setup) -> None:
    from oncebridge.dashboard import Dashboard, DashboardData  # noqa: PLC0415 - other commands need no pages

    stop = _stop_event()
    store = await open_for_reading(setup.config.store)
    try:
        served = Dashboard(setup, DashboardData(setup, store))
        try:
            await served.open()
        except ConfigError as error:
            # The settings are valid; the port is taken, or the address is not of this machine.
            raise OncebridgeError(f"{error} (--dashboard)") from error
        click.echo(f"dashboard: {served.url}")
        try:
            await stop.wait()
        finally:
            await served.aclose()
    finally:
        await store.aclose()


def _stop_event() -> asyncio.Event:
    """Return an event that is set when a signal asks the process to end."""
    stopped = asyncio.Event()

    def stop(name: str) -> None:
        _log.info("oncebridge.stopping", extra={"signal": name})
        stopped.set()

    on_signals(stop)
    return stopped
