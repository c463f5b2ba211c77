"""`oncebridge run`: the service."""

import asyncio
import json
import logging
import os
import sys
from typing import Any

import click

from oncebridge.cli.command import EXIT_INTERRUPTED, EXIT_NEEDS_ATTENTION, command, is_to_stdout
from oncebridge.cli.event_loop import on_signals
from oncebridge.cli.status_line import Screen, table_of_counts
from oncebridge.errors import ConfigError, OncebridgeError
from oncebridge.service import logs
from oncebridge.service.config import Setup
from oncebridge.service.service import Service

_log = logging.getLogger("oncebridge")
_SAME_STROKE_S = 0.05  # a supervisor may signal the process and its group


@command(
    "oncebridge run",
    "oncebridge run -c oncebridge.toml",
    "oncebridge run --source file:in.ndjson --sink file:out.ndjson --json",
    every=True,
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the counts at the end as one JSON object."
)
async def run(setup: Setup, *, as_json: bool) -> int:
    """
    Run the service: receive events and deliver each one once.

    By default it listens on http://127.0.0.1:8080/events, keeps its records in a SQLite file
    in this directory, and writes events to standard output. Ctrl-C, SIGTERM or SIGHUP stops
    it after the work in progress is finished; a second Ctrl-C stops it at once. With a file as
    source, it ends by itself and prints the counts.
    """
    logs.set_up(setup.config.log_level, setup.config.log_format)
    return await serve(setup, as_json=as_json)


async def serve(setup: Setup, *, as_json: bool = False) -> int:
    """Run the service to its end, and return the exit code."""
    service = Service(setup)
    _on_signals(service)
    try:
        await service.open()
    except ConfigError as error:
        # The settings are valid; a port is taken, or a file does not exist.
        await service.close()
        raise OncebridgeError(str(error)) from error
    except BaseException:
        await service.close()
        raise
    _log_ready(setup, service)
    async with Screen(service, setup):
        try:
            await service.run()
        finally:
            finished = await service.close()
    counts = service.counts()
    _print_end(setup, service, counts, as_json=as_json)
    return EXIT_NEEDS_ATTENTION if service.gave_up or not finished else 0


def _on_signals(service: Service) -> None:
    """Stop at the first signal; exit at the second Ctrl-C."""
    loop = asyncio.get_running_loop()
    told_at: float | None = None

    def stop(name: str) -> None:
        nonlocal told_at
        if told_at is None:
            told_at = loop.time()
            _log.info("oncebridge.stopping", extra={"signal": name})
            service.stop()
        elif name == "SIGINT" and loop.time() - told_at > _SAME_STROKE_S:
            _log.error("oncebridge.left_at_once")
            os._exit(EXIT_INTERRUPTED)

    on_signals(stop)


def _log_ready(setup: Setup, service: Service) -> None:
    config = setup.config
    _log.info(
        "oncebridge.ready",
        extra={
            "source": ", ".join(map(str, config.source)),
            "store": str(config.store),
            "sink": ", ".join(str(route.sink) for route in setup.routes),
            "dead": str(config.dead),
            **({"dashboard": service.dashboard_url} if service.dashboard_url else {}),
        },
    )
    if service.spool is not None and service.spool.depth:
        _log.info("oncebridge.spool_goes_on", extra={"records": service.spool.depth})


def _print_end(setup: Setup, service: Service, counts: dict[str, int], *, as_json: bool) -> None:
    stream: Any = sys.stderr if is_to_stdout(setup) else sys.stdout
    if as_json:
        routes = {name: books.counts() for name, books in service.books().items()}
        fields = {**counts, **({"routes": routes} if len(routes) > 1 else {})}
        print(json.dumps(fields), file=stream, flush=True)
    else:
        print(table_of_counts(counts), file=stream, flush=True)
