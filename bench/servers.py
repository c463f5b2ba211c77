"""
The servers of the shared stores, as they should run in production, and what a key takes there.

They are those of the tests: started here, on loopback, and gone with this process.
"""

import asyncio
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol

import asyncpg
import boto3
from botocore.config import Config
from ways import REGION

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.servers.aws import AWS, DynamoDBServer, _dynoxide, _dynoxide_server, _ministack
from tests.servers.postgres import Postgres
from tests.servers.postgres import running as postgres_running
from tests.servers.redis import RedisServer
from tests.servers.redis import running as redis_running
from tests.servers.s3 import S3Server


class Server(Protocol):
    """A server that runs."""

    port: int
    pid: int
    about: str
    environment: Mapping[str, str]
    """What clients must find in their environment."""

    def make(self, name: str) -> None:
        """Make an empty place of its own for the next way, where it does not do so itself."""
        ...

    def weigh(self, name: str) -> float:
        """Tell how many bytes a key takes there."""
        ...


class Nowhere:
    """The memory of the process itself."""

    port = 0
    pid = 0
    about = ""
    environment: ClassVar[Mapping[str, str]] = {}

    def make(self, name: str) -> None: ...

    def weigh(self, name: str) -> float:
        return 0.0


class Redis:
    """`used_memory` without what is under way to clients and to the disk, per key."""

    environment: ClassVar[Mapping[str, str]] = {}

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._empty = 0
        self.port = server.port
        self.pid = server.process.pid
        self.about = f"Redis {server.info()['redis_version']}, appendfsync everysec"

    def make(self, name: str) -> None:
        self._server.ask("FLUSHALL")
        self._server.ask("SCRIPT", "FLUSH")
        self._empty = self._used()

    def weigh(self, name: str) -> float:
        return (self._used() - self._empty) / self._server.ask("DBSIZE")

    def _used(self) -> int:
        told = self._server.info()
        passing = told["mem_aof_buffer"] + told["mem_clients_normal"]
        return int(told["used_memory"]) - int(passing)


class PostgreSQL:
    """The size of all tables with their indexes, per row."""

    environment: ClassVar[Mapping[str, str]] = {}

    def __init__(self, server: Postgres) -> None:
        self._server = server
        self.port = server.port
        self.pid = server.process.pid
        self.about = f"PostgreSQL {self._ask('events', 'SHOW server_version')[0][0]}, fsync on"

    def make(self, name: str) -> None:
        self._ask("events", f'CREATE DATABASE "{name}"')

    def weigh(self, name: str) -> float:
        sizes = (
            "SELECT c.oid::regclass::text, pg_total_relation_size(c.oid) FROM pg_class c "
            "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'r' "
            "AND n.nspname NOT IN ('pg_catalog', 'information_schema')"
        )
        tables = self._ask(name, sizes)
        rows = max(self._ask(name, f"SELECT count(*) FROM {table}")[0][0] for table, _ in tables)
        return sum(size for _, size in tables) / rows

    def _ask(self, database: str, statement: str) -> list[Any]:
        async def ask() -> list[Any]:
            address = f"postgresql://oncebridge@127.0.0.1:{self._server.port}/{database}"
            connection = await asyncpg.connect(address)
            try:
                found: list[Any] = await connection.fetch(statement)
                return found
            finally:
                await connection.close()

        return asyncio.run(ask())


class DynamoDB:
    """The size of an item as it is billed: names and values."""

    environment = AWS

    def __init__(self, server: DynamoDBServer) -> None:
        self._server = server
        self.port = server.port
        self.pid = server.process.pid
        self.about = f"DynamoDB by {server.kind}"

    def make(self, name: str) -> None: ...

    def weigh(self, name: str) -> float:
        client = boto3.client("dynamodb", endpoint_url=self._server.endpoint, **_KEYS)
        items = client.scan(TableName=name, Limit=500)["Items"]
        client.close()
        return sum(_size(value) + len(key) for item in items for key, value in item.items()) / len(
            items
        )


def _size(value: Mapping[str, Any]) -> int:
    ((kind, content),) = value.items()
    match kind:
        case "N":
            return len(content.strip("-0.")) // 2 + 2  # two digits a byte, and one more
        case "BOOL" | "NULL":
            return 1
        case "S":
            return len(content.encode())
        case _:
            return len(content)


class S3:
    """The size of an object; its name comes on top."""

    environment = AWS

    def __init__(self, server: S3Server) -> None:
        self._server = server
        self.port = server.port
        self.pid = server.process.pid
        self.about = "S3 by ministack"

    def make(self, name: str) -> None:
        status, _ = self._server.ask("PUT", f"/{name}")
        assert status == 200, status

    def weigh(self, name: str) -> float:
        path = Config(s3={"addressing_style": "path"})
        client = boto3.client("s3", endpoint_url=self._server.endpoint, config=path, **_KEYS)
        found = client.list_objects_v2(Bucket=name)["Contents"]
        client.close()
        sizes = [item["Size"] for item in found if not item["Key"].endswith("/form")]
        return sum(sizes) / len(sizes)


_KEYS = {
    "region_name": REGION,
    "aws_access_key_id": AWS["AWS_ACCESS_KEY_ID"],
    "aws_secret_access_key": AWS["AWS_SECRET_ACCESS_KEY"],
}


# --- starting them ----------------------------------------------------------------------


@contextmanager
def memory(_: Path) -> Iterator[Server]:
    yield Nowhere()


@contextmanager
def redis(folder: Path) -> Iterator[Server]:
    server = RedisServer(folder, appendfsync="everysec")
    with redis_running(server):
        yield Redis(server)


@contextmanager
def postgres(_: Path) -> Iterator[Server]:
    settings = {
        "fsync": "on",
        "full_page_writes": "on",
        "synchronous_commit": "on",
        "shared_buffers": "256MB",
    }
    with postgres_running(settings) as server:
        yield PostgreSQL(server)


@contextmanager
def dynamodb(folder: Path) -> Iterator[Server]:
    program = _dynoxide()
    server = _ministack(folder) if program is None else _dynoxide_server(folder, program)
    server.process.start()
    try:
        yield DynamoDB(server)
    finally:
        server.process.kill()


@contextmanager
def s3(folder: Path) -> Iterator[Server]:
    server = S3Server(folder)
    server.process.start()
    try:
        yield S3(server)
    finally:
        server.process.kill()


START = {"memory": memory, "redis": redis, "postgres": postgres, "dynamodb": dynamodb, "s3": s3}


@contextmanager
def running(kind: str) -> Iterator[Server]:
    with (
        tempfile.TemporaryDirectory(prefix="oncebridge-bench-", ignore_cleanup_errors=True) as name,
        START[kind](Path(name)) as server,
    ):
        yield server
