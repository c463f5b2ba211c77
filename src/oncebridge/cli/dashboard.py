"""`oncebridge dashboard`: the dashboard by itself, beside workers that run elsewhere."""

import asyncio
import logging

import click
from msgspec.structs import replace

from oncebridge.cli.command import command, note
from oncebridge.cli.setup import on_signals, run_loop
from oncebridge.errors import ConfigError, OncebridgeError
from oncebridge.operate.lookup import is_not_ours, opened_to_look
from oncebridge.operate.reachability import is_missing, refuse_memory
from oncebridge.service import logs
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
    Show the dashboard, beside workers that run elsewhere.

    It reads what they tell in the store that they share, so it takes the configuration that
    they have. Nothing is made there, and nothing written but who has logged out, unless
    dashboard_write lets people act on dead letters. Without an address it is at
    http://127.0.0.1:8081/. Ctrl-C ends it.
    """
    refuse_memory(setup.config.store, "store")
    if is_missing(setup.config.store) or is_not_ours(setup.config.store):
        raise OncebridgeError(
            f"{setup.config.store}: no worker has written there yet; start one first"
        )
    if mode_of(setup.config) == "off":
        note('these workers keep no history, so no decisions are shown; history = "sample" does')
    if not setup.config.share_counts:
        note("these workers share no counts, so none are shown; share_counts = true does")
    if not setup.config.dashboard:
        setup = replace(setup, config=replace(setup.config, dashboard=DEFAULT))
    logs.set_up(setup.config.log_level, setup.config.log_format)
    run_loop(_serve(setup))


async def _serve(setup: Setup) -> None:
    from oncebridge.dashboard import Dashboard, DashboardData  # noqa: PLC0415 - other commands need no pages

    told = _told()
    store = await opened_to_look(setup.config.store)
    try:
        served = Dashboard(setup, DashboardData(setup, store))
        try:
            await served.open()
        except ConfigError as error:
            # The settings are in order; the port is taken, or no address of this machine.
            raise OncebridgeError(f"{error} (--dashboard)") from error
        click.echo(f"dashboard: {served.url}")
        try:
            await told.wait()
        finally:
            await served.aclose()
    finally:
        await store.aclose()


def _told() -> asyncio.Event:
    """Return an event that is set when a signal asks the process to end."""
    told = asyncio.Event()

    def stop(name: str) -> None:
        _log.info("oncebridge.stopping", extra={"signal": name})
        told.set()

    on_signals(stop)
    return told
