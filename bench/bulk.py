"""
Fill a store with many keys, quickly.

Ten million keys through claim and commit would take a quarter of an hour. So the store itself
writes one record, this is read back as the server keeps it, and copies of it are put there by
the server's own road for much data, each with a key, a generation and an event's id of its own.
Then the store is asked for some of them, and has to find the same record.
"""

import os
import socket
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import asyncpg
import redis
from passing import LEASE_MS, WINDOW_MS
from ways import Address
from ways.gateway import options, url

from oncebridge import Store
from oncebridge.events.key import Part
from oncebridge.service.addresses import StorePlace
from oncebridge.stores.api import Claim, Commit, Commits, Fate, Record, Want, Wants
from oncebridge.stores.sqlite.store import SQLiteStore

CHUNK = 250_000


class Mark(NamedTuple):
    """What differs from copy to copy."""

    key: bytes
    generation: bytes
    id: bytes
    """Of the event: 16 bytes, as a UUID in the memo."""

    @property
    def uuid(self) -> bytes:
        name = self.id.hex()
        return f"{name[:8]}-{name[8:12]}-{name[12:16]}-{name[16:20]}-{name[20:]}".encode()

    @property
    def memo(self) -> bytes:
        return b'["%b",1765552507919]' % self.uuid


def marks(count: int) -> list[Mark]:
    """Draw some, in the order of their keys: indexes are quicker to fill that way."""
    bits = os.urandom(64 * count)
    return sorted(
        Mark(b"\1" + bits[n : n + 32], bits[n + 32 : n + 48], bits[n + 48 : n + 64])
        for n in range(0, len(bits), 64)
    )


class Bulk(ABC):
    """A store that can be filled quickly."""

    @abstractmethod
    def store(self) -> Store:
        """Give the store, not opened yet."""

    @abstractmethod
    async def count(self) -> int:
        """Tell how many keys it has."""

    @abstractmethod
    async def copy(self, model: Mark, record: Record, count: int) -> Sequence[Mark]:
        """Put *count* copies of the *record* of *model* there, and give some of their marks."""

    async def fill(self, size: int) -> None:
        """Put so many copies there that it has *size* keys."""
        (model,) = marks(1)
        async with self.store() as store:
            await self._write(store, model)
            (wanted,) = await store.peek([model.key])
        assert wanted is not None
        some = await self.copy(model, wanted, size - await self.count())
        async with self.store() as store:
            found = await store.peek([mark.key for mark in some])
        for mark, record in zip(some, found, strict=True):
            if record != _renamed(wanted, mark):
                raise SystemExit(f"a copy is not like the record: {record}, {wanted}")
        there = await self.count()
        if there != size:
            raise SystemExit(f"there are {there} keys, not {size}")

    async def _write(self, store: Store, mark: Mark) -> None:
        token = os.urandom(16)
        want = Want((Part(mark.key),), token, mark.generation, LEASE_MS, WINDOW_MS, mark.memo)
        (answer,) = await store.claim(Wants.of([want]))
        assert isinstance(answer, Claim), answer
        await store.commit(
            Commits.of([Commit(mark.key, mark.generation, Fate.DELIVERED, WINDOW_MS)])
        )


def _renamed(record: Record, mark: Mark) -> Record:
    kept = len(record.generation)  # some stores keep a part of it
    return Record(
        mark.key,
        record.token,
        mark.generation[:kept],
        record.until_ms,
        record.attempts,
        record.hash,
        record.fate,
        mark.memo,
        record.hard_until_ms,
        record.keep_until_ms,
    )


def _rows(row: Sequence[Any], model: Mark, copies: Sequence[Mark]) -> Iterator[tuple[Any, ...]]:
    """Copy a row of a table: the same, but for key, generation and memo."""
    key, memo = row.index(model.key), row.index(model.memo)
    generation = row.index(model.generation)
    cells = list(row)
    for mark in copies:
        cells[key], cells[generation], cells[memo] = mark.key, mark.generation, mark.memo
        yield tuple(cells)


# --- each of them -----------------------------------------------------------------------


class SQLiteBulk(Bulk):
    """One large transaction, with a cache that holds all of it and nothing made durable."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def store(self) -> Store:
        return SQLiteStore(self._path)

    async def weigh(self) -> float:
        return self._path.stat().st_size / await self.count()

    async def count(self) -> int:
        db = sqlite3.connect(self._path)
        count: int = db.execute("SELECT count(*) FROM oncebridge_records").fetchone()[0]
        db.close()
        return count

    async def copy(self, model: Mark, record: Record, count: int) -> Sequence[Mark]:
        db = sqlite3.connect(self._path, isolation_level=None)
        for setting in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{4 * 2**20}"):
            db.execute(f"PRAGMA {setting}")
        fields = ", ".join(Record.__struct_fields__)
        read = f"SELECT {fields} FROM oncebridge_records WHERE key = ?"
        row = db.execute(read, (model.key,)).fetchone()
        marks_ = ", ".join("?" * len(row))
        write = f"INSERT INTO oncebridge_records (key_crc, {fields}) VALUES (?, {marks_})"
        key = row.index(model.key)
        some: list[Mark] = []
        db.execute("BEGIN")
        for at in range(0, count, CHUNK):
            copies = marks(min(CHUNK, count - at))
            rows = _rows(row, model, sorted(copies, key=lambda mark: mark.id))  # as they arrive
            db.executemany(write, ((crc32(copy[key]), *copy) for copy in rows))
            some += copies[:: max(len(copies) // 3, 1)]
        db.execute("COMMIT")
        db.execute("PRAGMA journal_mode = WAL")
        db.close()
        os.sync()
        return some


class RedisBulk(Bulk):
    """Plain SETs down a socket, many at a time."""

    def __init__(self, port: int, name: str) -> None:
        self._address = Address("redis", port, name)
        self._prefix = b""

    def store(self) -> Store:
        return StorePlace.of(url(self._address), **options(self._address)).opened

    def _ask(self, *words: object) -> Any:
        with redis.Redis(port=self._address.port, socket_timeout=120) as client:
            return client.execute_command(*words)

    async def count(self) -> int:
        return int(self._ask("DBSIZE"))

    async def copy(self, model: Mark, record: Record, count: int) -> Sequence[Mark]:
        self._prefix = self._prefix or self._prefix_of(model)
        value = self._ask("GET", self._prefix + model.key)
        command = _set_command(self._prefix, model, value, record.keep_until_ms)
        some: list[Mark] = []
        self._ask("CONFIG", "SET", "auto-aof-rewrite-percentage", "0")
        with socket.create_connection(("127.0.0.1", self._address.port)) as link:
            for at in range(0, count, CHUNK):
                copies = marks(min(CHUNK, count - at))
                for first in range(0, len(copies), 5_000):
                    few = copies[first : first + 5_000]
                    link.sendall(b"".join([command(mark) for mark in few]))
                    _await_ok(link, len(few))
                some += copies[:: max(len(copies) // 3, 1)]
        return some

    def _prefix_of(self, model: Mark) -> bytes:
        """See what the store puts before a key, while there is only one."""
        name: bytes = self._ask("RANDOMKEY")
        assert name.endswith(model.key), name
        return name.removesuffix(model.key)


def _set_command(prefix: bytes, model: Mark, value: bytes, ends_ms: int) -> Callable[[Mark], bytes]:
    """Give what writes the command that puts a copy of *value* there, until *ends_ms*."""
    before, _, rest = value.partition(model.generation[:8])
    between, _, after = rest.partition(model.id)
    if len(before) + len(between) + len(after) + 24 != len(value):
        raise SystemExit(f"Redis keeps records in a form that is not known here: {value!r}")
    size = len(prefix) + len(model.key)
    head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b" % (size, prefix)
    then = b"\r\n$%d\r\n%b" % (len(value), before)
    ends = b"%d" % ends_ms
    tail = b"%b\r\n$4\r\nPXAT\r\n$%d\r\n%b\r\n" % (after, len(ends), ends)

    def command(mark: Mark) -> bytes:
        parts = (head, mark.key, then, mark.generation[:8], between, mark.id, tail)
        return b"".join(parts)

    return command


def _await_ok(link: socket.socket, count: int) -> None:
    left = len(b"+OK\r\n") * count
    while left:
        said = link.recv(min(left, 2**16))
        if not said or b"-" in said:
            raise SystemExit(f"Redis said {said!r}")
        left -= len(said)


class PostgresBulk(Bulk):
    """COPY, and then what the server would do by itself in the next minutes."""

    def __init__(self, port: int, name: str) -> None:
        self._address = Address("postgres", port, name)

    def store(self) -> Store:
        return StorePlace.of(url(self._address), **options(self._address), auto_migrate=True).opened

    async def _connect(self) -> Any:
        return await asyncpg.connect(
            host="127.0.0.1",
            port=self._address.port,
            user="oncebridge",
            database=self._address.name,
        )

    async def count(self) -> int:
        link = await self._connect()
        count: int = await link.fetchval("SELECT count(*) FROM oncebridge_records")
        await link.close()
        return count

    async def copy(self, model: Mark, record: Record, count: int) -> Sequence[Mark]:
        link = await self._connect()
        read = "SELECT * FROM oncebridge_records WHERE key = $1"
        row = await link.fetchrow(read, model.key)
        some: list[Mark] = []
        for at in range(0, count, CHUNK):
            copies = marks(min(CHUNK, count - at))
            rows = _rows(list(row.values()), model, copies)
            await link.copy_records_to_table(
                "oncebridge_records", records=rows, columns=list(row.keys()), timeout=600
            )
            some += copies[:: max(len(copies) // 3, 1)]
        await link.execute("VACUUM (FREEZE, ANALYZE) oncebridge_records", timeout=600)
        await link.execute("CHECKPOINT", timeout=600)
        await link.close()
        return some
