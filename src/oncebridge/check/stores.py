"""
Check the store and database sinks without writing to them.

A store is not opened, since that may create a file, a table or a script. `oncebridge.check.aws`
checks stores on AWS, `oncebridge.check.files` checks files.
"""

import re
from pathlib import Path

from oncebridge.base.clock import Clock
from oncebridge.base.formatting import format_instant
from oncebridge.check.files import has_write_ahead_log
from oncebridge.check.finding import Checkup, Severity
from oncebridge.errors import ConfigError, OncebridgeError, StoreError
from oncebridge.observe import fleet
from oncebridge.observe.agreement import differences, lost_routes
from oncebridge.operate.lookup import lacks_our_tables, open_for_reading
from oncebridge.service.addresses import (
    BackendAddress,
    StorePlace,
    is_missing,
    is_out_of_reach,
    scheme_of,
)
from oncebridge.service.config import Setup

UNREACHABLE = "store-unreachable"
_REDIS = re.compile(r"rediss?(\+(unix|sentinel|cluster))?")
_ELSEWHERE = ("dynamodb", "s3")


async def check_store(setup: Setup, checkup: Checkup, *, clock: Clock) -> None:
    """Check the store, and the reports of its workers."""
    place = setup.config.store
    subject = f"store {place}"
    scheme = scheme_of(place.url)
    if _REDIS.fullmatch(scheme):
        await _check_redis(place, subject, checkup, clock)
    elif scheme == "postgresql":
        await _check_postgres(place, subject, checkup, clock)
    elif scheme in ("sqlite", "memory"):
        checkup.report_passed(subject, "it uses the clock of this host")
    elif scheme not in _ELSEWHERE:
        checkup.report_not_checked(subject, "the store", "a check for this kind of store")
        return
    if scheme not in _ELSEWHERE:
        await _check_workers(setup, checkup)


async def check_sinks(setup: Setup, checkup: Checkup, *, clock: Clock) -> None:
    """Check the databases that are sinks."""
    for route in setup.routes:
        if scheme_of(route.sink.url) == "postgresql":
            await _check_postgres(route.sink, f"sink {route.sink}", checkup, clock)


async def _check_redis(place: BackendAddress, subject: str, checkup: Checkup, clock: Clock) -> None:
    from oncebridge.check.redis import check_redis  # noqa: PLC0415 - needs its driver

    try:
        await check_redis(place.opened, subject, checkup, clock=clock)
    except OncebridgeError as error:
        _unreachable(subject, error, checkup)


async def _check_postgres(
    place: BackendAddress, subject: str, checkup: Checkup, clock: Clock
) -> None:
    import asyncpg  # noqa: PLC0415 - only for Postgres sinks

    from oncebridge.check.postgres import check_postgres  # noqa: PLC0415 - needs its driver

    opened, options = place.opened, place.options
    connections: int = getattr(options, "connections", 0) or options.concurrency
    try:
        await check_postgres(
            opened.pool,
            opened.layout,
            subject,
            checkup,
            clock=clock,
            auto_migrate=options.auto_migrate,
            connections=connections,
        )
    except OncebridgeError as error:
        _unreachable(subject, error, checkup)
    except asyncpg.PostgresError as error:
        checkup.report_not_checked(
            subject, "all of it", f"a response without error: {type(error).__name__}"
        )


def _unreachable(subject: str, error: OncebridgeError, checkup: Checkup) -> None:
    is_store = subject.startswith("store")
    checkup.report(
        UNREACHABLE if is_store else "sink-unreachable",
        Severity.ERROR if is_store else Severity.WARNING,
        subject,
        seen=str(error),
        why="While it is unavailable nothing is delivered: events are returned to the source. It was "
        "not checked further.",
        fix="Start it, or fix address, password, certificate or firewall; then run the check again.",
    )


# --- what the workers that share the store have reported ----------------------------------------


async def _check_workers(setup: Setup, checkup: Checkup) -> None:
    """Check the workers' reports, if the store can be opened without creating anything."""
    place = setup.config.store
    if (
        is_out_of_reach(place)
        or is_missing(place)
        or lacks_our_tables(place)
        or _would_change(place)
    ):
        return
    try:
        store = await open_for_reading(place)
    except (StoreError, ConfigError):
        return  # the check of the store reports it
    try:
        view = await fleet.read(store)
    except StoreError:
        return
    finally:
        await store.aclose()
    lost_ms = max((report.state.store.records_lost_ms for report in view.reports), default=0)
    if lost_ms:
        checkup.report(
            "records-lost",
            Severity.WARNING,
            "store",
            seen=f"a worker noticed at {format_instant(lost_ms)} UTC that the store had lost its records",
            why="The store was emptied, or replaced by an empty one. Events that were delivered "
            "before may be delivered again.",
            fix="Find out what emptied it (FLUSHALL, a restart without persistence, eviction). Until "
            "the longest window has ended, let receivers check the Idempotency-Key.",
        )
    _check_agreement(view, setup, checkup)
    for name, route in sorted(view.total.routes.items()):
        runs = route.books.get("stale_runs", 0)
        if runs:
            checkup.report(
                "stale-runs",
                Severity.WARNING,
                f"route {name}",
                seen=f"{runs} times, 20 or more events of one entity in a row were stale",
                why="One wrong version (milliseconds instead of seconds, a date in the future) makes "
                "every later update of its entity stale until the window of its rule ends.",
                fix="Find the entity in the log line oncebridge.stale_run, and clear it:\n"
                "oncebridge forget ENTITY_KEY",
            )


def _would_change(place: StorePlace) -> bool:
    """Return whether opening a SQLite file would turn on its write-ahead log."""
    if scheme_of(place.url) != "sqlite":
        return False
    try:
        return not has_write_ahead_log(Path(place.url.partition(":")[2]))
    except OSError:
        return True  # the check of files reports it


def _check_agreement(view: fleet.FleetView, setup: Setup, checkup: Checkup) -> None:
    routes = [route.name for route in setup.routes]
    for one in (*lost_routes(view, routes), *differences(view)):
        checkup.report(
            one.code,
            Severity.WARNING,
            f"route {one.route}",
            seen=one.seen,
            why=one.why,
            fix=one.fix,
        )
