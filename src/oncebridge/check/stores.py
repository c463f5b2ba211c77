"""
The servers that keep something for us, looked at and never written to.

A store is not opened for it: that may make a file, a table or a script. What is on AWS is looked
at in `oncebridge.check.aws`, files in `oncebridge.check.files`.
"""

import re

from oncebridge.base.clock import Clock
from oncebridge.check.finding import Checkup, Severity
from oncebridge.check.workers import check_workers
from oncebridge.errors import OncebridgeError
from oncebridge.service.addresses import BackendAddress, scheme_of
from oncebridge.service.config import Setup

UNREACHABLE = "store-unreachable"
_REDIS = re.compile(r"rediss?(\+(unix|sentinel|cluster))?")
_ELSEWHERE = ("dynamodb", "s3")


async def check_store(setup: Setup, checkup: Checkup, *, clock: Clock) -> None:
    """Look at the store, by what it is."""
    place = setup.config.store
    subject = f"store {place}"
    scheme = scheme_of(place.url)
    if _REDIS.fullmatch(scheme):
        await _check_redis(place, subject, checkup, clock)
    elif scheme == "postgresql":
        await _check_postgres(place, subject, checkup, clock)
    elif scheme in ("sqlite", "memory"):
        checkup.fine(subject, "its clock is this host's own")
    elif scheme not in _ELSEWHERE:
        checkup.could_not(subject, "the store", "a check that knows this kind of store")
        return
    if scheme not in _ELSEWHERE:
        await check_workers(setup, checkup)


async def check_sinks(setup: Setup, checkup: Checkup, *, clock: Clock) -> None:
    """Look at the databases that events go to."""
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
    import asyncpg  # noqa: PLC0415 - only for those who have one

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
        checkup.could_not(subject, "all of it", f"an answer: {type(error).__name__}")


def _unreachable(subject: str, error: OncebridgeError, checkup: Checkup) -> None:
    is_store = subject.startswith("store")
    checkup.find(
        UNREACHABLE if is_store else "sink-unreachable",
        Severity.ERROR if is_store else Severity.WARNING,
        subject,
        seen=str(error),
        why="Without it nothing is passed on: events are handed back until it is there. Nothing "
        "else about it was looked at.",
        fix="Start it, or put address, password, certificate and firewall right; then check again.",
    )
