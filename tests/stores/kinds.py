"""
The kinds of store that several processes can share, each with a server of its own.

A new store is a class that says how its server is reached, and a line in `SHARED`.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol
from urllib.parse import urlsplit

from tests.servers.aws import DynamoDBServer, _ministack
from tests.servers.postgres import Postgres, folder
from tests.servers.process import Process, free_port, listens
from tests.servers.redis import RedisCluster, RedisServer
from tests.servers.s3 import S3Server

from oncebridge.service.addresses import StorePlace

from . import naive, wired

_ROOT = Path(__file__).parents[2]


class Server(Protocol):
    """Where the records of one kind are kept."""

    port: int

    def start(self) -> None:
        """Start, or start again, with what was kept."""
        ...

    def kill(self) -> None:
        """Kill it, as if the machine had gone."""
        ...

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...

    def place(self, port: int, timeout_s: float) -> dict[str, Any]:
        """
        Give address and options of a store that reaches the server by *port*.

        The port may be a proxy's. Every call of that store ends within *timeout_s*.
        """
        ...


@dataclass(frozen=True)
class Kind:
    """One kind of store, and what can be asked of it."""

    name: str
    server: Callable[[], AbstractContextManager[Server]]
    keys: int = 500
    """How many keys a race is for, and"""
    rivals: int = 64
    """how many of its 64 tasks go for the same one: fewer, where a server takes its time."""
    slack_s: float = 0.0
    """How long after its lease a claim is taken over."""
    events: int = 1500
    """How many events pass while it has an outage."""
    many: int = 1000
    """More than goes into one request."""
    at_once: int = 100
    """How many trials it can be put to at the same time."""
    lies: tuple[bytes, ...] = ()
    """Answers in the right form that say nothing, as from a stranger on the port, if any."""
    keeps: bool = True
    """What it has said outlives `kill -9`."""
    has_clock: bool = True
    """Its own clock decides, whatever the time is here."""

    def __repr__(self) -> str:
        return self.name


class Running:
    """A server that runs, and stores on it."""

    def __init__(self, kind: Kind, server: Server) -> None:
        self.kind = kind
        self.server = server

    @property
    def port(self) -> int:
        return self.server.port

    def place(self, *, port: int | None = None, timeout_s: float = 10.0) -> dict[str, Any]:
        """Give address and options, to be opened here or elsewhere."""
        return self.server.place(port or self.server.port, timeout_s)

    def store(self, *, port: int | None = None, timeout_s: float = 10.0) -> Any:
        return open_store(**self.place(port=port, timeout_s=timeout_s))


@contextmanager
def running(kind: Kind) -> Iterator[Running]:
    """Start a server of one's own."""
    with kind.server() as server:
        server.start()
        try:
            yield Running(kind, server)
        finally:
            server.kill()


def open_store(url: str, options: Mapping[str, Any]) -> Any:
    """Make a store for *url*, which may also be one of those that only tests know."""
    scheme, _, rest = url.partition(":")
    if scheme in _NAIVE:
        return _NAIVE[scheme](rest)
    if scheme == "wired":
        port = urlsplit(url).port
        assert port is not None
        return wired.WiredStore(port, **options)
    return StorePlace.of(url, **options).opened


_NAIVE = {
    "get-then-put": naive.GetThenPut,
    "get-then-put-locked": naive.GetThenPutLocked,
    "part-by-part": naive.PartByPart,
}


# --- how each is reached ---------------------------------------------------------------------


class _Single:
    """A server that is one process on one port."""

    def __init__(self, process: Process, port: int) -> None:
        self._process = process
        self.port = port

    def start(self) -> None:
        self._process.start()

    def kill(self) -> None:
        self._process.kill()

    def freeze(self) -> None:
        self._process.freeze()

    def thaw(self) -> None:
        self._process.thaw()


class _Wired(_Single):
    def place(self, port: int, timeout_s: float) -> dict[str, Any]:
        return {"url": f"wired://127.0.0.1:{port}", "options": {"timeout_s": timeout_s}}


@contextmanager
def _wired() -> Iterator[Server]:
    with TemporaryDirectory(prefix="oncebridge-wired-") as name:
        place, port = Path(name), free_port()
        process = Process(
            [sys.executable, "-m", wired.__name__, str(port), place / "records.db"],
            log=place / "wired.log",
            ready=lambda: listens(port),
            env={"PYTHONPATH": str(_ROOT)},
        )
        yield _Wired(process, port)


class _Redis(_Single):
    def __init__(self, server: RedisServer) -> None:
        super().__init__(server.process, server.port)

    def place(self, port: int, timeout_s: float) -> dict[str, Any]:
        options = {"timeout": _written(timeout_s), "connect_timeout": _written(timeout_s)}
        return {"url": f"redis://127.0.0.1:{port}", "options": options}


@contextmanager
def _redis() -> Iterator[Server]:
    with TemporaryDirectory(prefix="oncebridge-redis-") as name:
        yield _Redis(RedisServer(Path(name), appendfsync="always"))


@contextmanager
def _redis_in_memory() -> Iterator[Server]:
    with TemporaryDirectory(prefix="oncebridge-redis-") as name:
        yield _Redis(RedisServer(Path(name), appendonly="no"))


class _RedisCluster(_Redis):
    """Three servers; there is no one port to stand before."""

    def __init__(self, cluster: RedisCluster) -> None:
        super().__init__(cluster.servers[0])
        self._cluster = cluster

    def start(self) -> None:
        self._cluster.start()

    def kill(self) -> None:
        self._cluster.kill()

    def place(self, port: int, timeout_s: float) -> dict[str, Any]:
        assert port == self.port
        return {**super().place(port, timeout_s), "url": self._cluster.url}


@contextmanager
def _redis_cluster() -> Iterator[Server]:
    with TemporaryDirectory(prefix="oncebridge-redis-") as name:
        yield _RedisCluster(RedisCluster(Path(name), 3))


class _Postgres:
    def __init__(self, server: Postgres) -> None:
        self._server = server

    @property
    def port(self) -> int:
        return self._server.port

    def start(self) -> None:
        if self._server.port:
            self._server.start()
        else:
            self._server.create()

    def kill(self) -> None:
        self._server.kill()

    def freeze(self) -> None:
        self._server.process.freeze()

    def thaw(self) -> None:
        self._server.process.thaw()

    def place(self, port: int, timeout_s: float) -> dict[str, Any]:
        url = f"postgresql://oncebridge@127.0.0.1:{port}/events"
        options = {
            "timeout": _written(timeout_s),
            "connect_timeout": _written(timeout_s),
            "auto_migrate": True,
        }
        return {"url": url, "options": options}


@contextmanager
def _postgres() -> Iterator[Server]:
    with folder() as place:
        yield _Postgres(Postgres(place, {"fsync": "on"}))


class _DynamoDB(_Single):
    def __init__(self, server: DynamoDBServer) -> None:
        super().__init__(server.process, server.port)
        self._server = server
        self._table = ""

    def start(self) -> None:
        super().start()
        self._table = self._table or self._server.table()

    def place(self, port: int, timeout_s: float) -> dict[str, Any]:
        options = {
            "endpoint": f"http://127.0.0.1:{port}",
            "timeout": _written(timeout_s),
            "connect_timeout": _written(timeout_s),
        }
        return {"url": f"dynamodb://{self._table}", "options": options}


@contextmanager
def _dynamodb() -> Iterator[Server]:
    with TemporaryDirectory(prefix="oncebridge-dynamodb-") as name:
        yield _DynamoDB(_ministack(Path(name)))


class _S3(_Single):
    def __init__(self, server: S3Server) -> None:
        super().__init__(server.process, server.port)
        self._server = server
        self._bucket = ""

    def start(self) -> None:
        super().start()
        self._bucket = self._bucket or self._server.bucket()

    def place(self, port: int, timeout_s: float) -> dict[str, Any]:
        options = {
            "endpoint": f"http://127.0.0.1:{port}",
            "timeout": _written(timeout_s),
            "expiry": "sweep",
        }
        url = f"s3://{self._bucket}/records?region={self._server.region}"
        return {"url": url, "options": options}


@contextmanager
def _s3() -> Iterator[Server]:
    with TemporaryDirectory(prefix="oncebridge-s3-", ignore_cleanup_errors=True) as name:
        yield _S3(S3Server(Path(name)))


def _written(seconds: float) -> str:
    return f"{int(seconds * 1000)}ms"


_PORTAL = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 13\r\n\r\n<html></html>",
    b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n",
)
"""Somebody between us and the service wants us to log in first."""

# The emulators keep nothing, and take their time; the clocks of those stores are the hosts'.
_EMULATED: Mapping[str, Any] = {
    "keeps": False,
    "has_clock": False,
    "slack_s": 2.0,
    "lies": _PORTAL,
    "at_once": 8,
    "events": 500,
}

WIRED = Kind("wired", _wired)
REDIS = Kind("redis", _redis, lies=(b"+OK\r\n", b"*0\r\n", b"$-1\r\n", b":7\r\n"))
REDIS_IN_MEMORY = Kind("redis-in-memory", _redis_in_memory, keeps=False)
REDIS_CLUSTER = Kind("redis-cluster", _redis_cluster, rivals=16)
POSTGRES = Kind("postgres", _postgres)
DYNAMODB = Kind("dynamodb", _dynamodb, rivals=4, many=60, **_EMULATED)
S3 = Kind("s3", _s3, keys=60, rivals=8, many=20, **_EMULATED)

SHARED = [REDIS, POSTGRES, DYNAMODB, S3]
RACED = [*SHARED, REDIS_CLUSTER]
QUICK = [REDIS, POSTGRES]
"""Those that the quick suite tries; emulators take longer."""
