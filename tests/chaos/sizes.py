"""How large things are: a process, and what its store keeps."""

import asyncio
import os
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from redis import Redis
from tests.servers.postgres import ask

_MB = 1 << 20
Sizes = Mapping[str, float]


def of_process(pid: int) -> Sizes:
    """Measure memory (MB, resident), open files and threads."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return {
        "rss": int(status["VmRSS"].split()[0]) / 1024,
        "fds": len(os.listdir(f"/proc/{pid}/fd")),  # noqa: PTH208 - paths of a thousand files for nothing
        "threads": int(status["Threads"]),
    }


async def _of_nothing(_: str) -> Sizes:
    return {}


async def _of_sqlite(url: str) -> Sizes:
    """Measure the file, and what waits beside it; and count the rows, as quickly as one can."""
    path = Path(url.removeprefix("sqlite:"))
    wal = path.with_name(f"{path.name}-wal")

    def look() -> Sizes:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as db:
            ((keys,),) = db.execute("SELECT count(*) FROM oncebridge_records")
        waiting = wal.stat().st_size if wal.exists() else 0
        return {"keys": keys, "file": path.stat().st_size / _MB, "wal": waiting / _MB}

    return await asyncio.to_thread(look)


async def _of_redis(url: str) -> Sizes:
    def look() -> Sizes:
        with Redis.from_url(url, socket_timeout=10) as client:
            used = client.info("memory")["used_memory"]
            return {"keys": client.dbsize(), "memory": used / _MB}

    return await asyncio.to_thread(look)


async def _of_postgres(url: str) -> Sizes:
    ((keys, table, indexes),) = await ask(
        url,
        "SELECT (SELECT count(*) FROM oncebridge_records), pg_table_size(oid), "
        "pg_indexes_size(oid) FROM pg_class WHERE oid = 'oncebridge_records'::regclass",
    )
    return {"keys": keys, "table": table / _MB, "index": indexes / _MB}


_OF: Mapping[str, Callable[[str], Awaitable[Sizes]]] = {
    "memory": _of_nothing,  # it tells by itself, with its metrics
    "sqlite": _of_sqlite,
    "redis": _of_redis,
    "postgres": _of_postgres,
}


async def of_store(kind: str, url: str) -> Sizes:
    """Measure what a store keeps, from outside: keys, and megabytes by what they are for."""
    return await _OF[kind](url)


class Told:
    """What a service says of itself at `/metrics`."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def total(self, name: str) -> int:
        """Add up *name* over all its labels."""
        return int(sum(one.value for one in self._samples if one.name == f"oncebridge_{name}"))

    @property
    def is_balanced(self) -> bool:
        return all(
            one.value == 1 for one in self._samples if one.name == "oncebridge_books_balanced"
        )
