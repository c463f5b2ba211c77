"""
Where the records of a run live: an address for the workers, and a server to be killed.

Each run has a server of its own, on loopback, with its data in a folder of its own.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.servers import aws, postgres, redis
from tests.servers.redis import RedisServer
from tests.servers.s3 import S3Server
from tests.stores.proxy import Proxy

# With "everysec", Redis answers before it writes while an earlier fsync is under way (up to two
# seconds), so not everything it has said outlives it. Only "always" is a promise.
_EVERYSEC = {"appendonly": "yes", "appendfsync": "everysec"}
_ALWAYS = {"appendonly": "yes", "appendfsync": "always"}
_MEMORY = {"appendonly": "no"}
_DURABLE = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}


def _nothing_to_kill() -> None:
    raise NotImplementedError("this store has no server, or one that forgets all")


@dataclass(frozen=True, kw_only=True)
class SinkHome:
    """A table in the store's own database, to deliver to."""

    url: str
    options: Mapping[str, Any]
    prepare: str
    """A statement to run before all else."""
    rows: str
    """What to ask for the keys and the events that were delivered."""


@dataclass(frozen=True, kw_only=True)
class StoreHome:
    """What the harness needs of a store."""

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """What a worker needs besides."""
    kill: Callable[[], None] = _nothing_to_kill
    """Kill the server, and return when it is no more."""
    start: Callable[[], None] = _nothing_to_kill
    remembers: bool = True
    """Everything that it has answered for outlives a SIGKILL of the server."""
    sinks: Mapping[str, SinkHome] = field(default_factory=dict)
    emulator: str = ""
    """What stands in for the real thing."""


@contextmanager
def _sqlite(folder: Path) -> Iterator[StoreHome]:
    yield StoreHome(url=f"sqlite:{folder / 'store.db'}")


@contextmanager
def _redis(folder: Path, *, remembers: bool = False, **options: str) -> Iterator[StoreHome]:
    place = folder / "redis"
    place.mkdir()
    server = RedisServer(place, **options)
    with redis.running(server):
        yield StoreHome(url=server.url, kill=server.kill, start=server.start, remembers=remembers)


@contextmanager
def _postgres(_: Path) -> Iterator[StoreHome]:
    with postgres.running(_DURABLE) as server:
        yield StoreHome(
            url=server.url,
            options={"auto_migrate": True},  # all workers at once
            kill=server.kill,
            start=server.start,
            sinks={"table": _table(server.url), "statement": _statement(server.url)},
        )


def _table(url: str) -> SinkHome:
    return SinkHome(
        url=url,
        options={"auto_migrate": True, "timeout": "900ms"},
        prepare="SELECT 1",
        rows="SELECT key, raw FROM oncebridge_events",
    )


def _statement(url: str) -> SinkHome:
    """Make a table that takes whatever comes: no index stands in for the transaction."""
    return SinkHome(
        url=url,
        options={
            "statement": "INSERT INTO delivered VALUES (:key, :raw)",
            "timeout": "900ms",
        },
        prepare="CREATE TABLE delivered (key bytea, raw bytea)",
        rows="SELECT key, raw FROM delivered",
    )


@contextmanager
def _dynamodb(folder: Path) -> Iterator[StoreHome]:
    program = aws._dynoxide()
    server = aws._ministack(folder) if program is None else aws._dynoxide_server(folder, program)
    server.process.start()
    try:
        yield StoreHome(
            url=f"dynamodb://{server.table()}",
            options={"endpoint": server.endpoint},
            environment=aws.AWS,
            emulator=server.kind,
        )
    finally:
        server.process.kill()


@contextmanager
def _s3(folder: Path) -> Iterator[StoreHome]:
    server = S3Server(folder)
    server.process.start()
    try:
        yield StoreHome(
            url=f"s3://{server.bucket()}/records",
            options={"endpoint": server.endpoint, "expiry": "sweep"},
            environment=server.environment,
            emulator="ministack",
        )
    finally:
        server.process.kill()


_HOMES: Mapping[str, Callable[[Path], AbstractContextManager[StoreHome]]] = {
    "sqlite": _sqlite,
    "redis": partial(_redis, **_EVERYSEC),
    "redis:always": partial(_redis, remembers=True, **_ALWAYS),
    "redis:memory": partial(_redis, **_MEMORY),
    "postgres": _postgres,
    "dynamodb": _dynamodb,
    "s3": _s3,
}


@contextmanager
def by_a_wire(home: StoreHome) -> Iterator[tuple[StoreHome, Proxy]]:
    """Let workers reach a store through a wire that can be cut."""
    endpoint = home.options.get("endpoint", home.url)
    port = urlsplit(endpoint).port
    if port is None:
        raise NotImplementedError("this store is not at the other end of a wire")
    with Proxy(port) as wire:
        here, there = f"127.0.0.1:{wire.port}", f"127.0.0.1:{port}"
        options = {**home.options}
        if "endpoint" in options:
            options["endpoint"] = endpoint.replace(there, here)
        yield replace(home, url=home.url.replace(there, here), options=options), wire


def home_of(kind: str, folder: Path) -> AbstractContextManager[StoreHome]:
    """Start what a store of this *kind* needs."""
    return _HOMES[kind](folder)
