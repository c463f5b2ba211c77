"""
Arrivals on disk, forwarded behind.

With a spool the sender is answered as soon as its event is durable here; the spool is the
source from then on, and keeps the same rule: a record leaves it when the event is where it
belongs. It is one SQLite file of one process; a second process is refused.
"""

import asyncio
import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

from oncebridge.errors import ConfigError, StoreError, StoreUnavailable
from oncebridge.intake import tell
from oncebridge.relay import Item, Relay
from oncebridge.router import Answer
from oncebridge.source import Done, Host
from oncebridge.sqlite_file import SQLiteFile, transaction

_log = logging.getLogger("oncebridge")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS oncebridge_spool (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    raw    BLOB NOT NULL
)
"""
_TAKE = "SELECT number, raw FROM oncebridge_spool WHERE number > ? ORDER BY number LIMIT ?"
_MOST_AT_ONCE, _MOST_WAITING = 1000, 20_000
_BATCH_BYTES = 4 * 1024 * 1024
_TRY_AGAIN_S = 1.0

SPOOLED = Answer(acknowledge=True, verdict=None)
_FULL = Answer(
    acknowledge=False, verdict=None, retry_after_ms=1000, reason="spool: too much to write"
)


class Spool:
    """Keep records in the file at *path* until they are forwarded: an inbox and a source."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file = SQLiteFile(path, name="spool", version=1, schema=_SCHEMA)
        self._lock: IO[bytes] | None = None
        self._waiting: list[tuple[bytes, Done]] = []
        self._writer: asyncio.Task[None] | None = None
        self._relay: Relay | None = None
        self._host: Host | None = None
        self._taken = 0
        self._filled = asyncio.Event()
        self._trouble = ""
        """Why the last write failed, if it did."""
        self.depth = 0
        """Records that are here."""

    @property
    def file(self) -> SQLiteFile:
        return self._file

    # --- the inbox ---------------------------------------------------------------------

    def put(self, raw: bytes, done: Done) -> None:
        if len(self._waiting) >= _MOST_WAITING:
            done(_FULL)
            return
        self._waiting.append((raw, done))
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())

    def put_all(self, raws: Sequence[bytes], dones: Sequence[Done]) -> None:
        for raw, done in zip(raws, dones, strict=True):
            self.put(raw, done)

    def not_ready(self) -> list[str]:
        return [self._trouble] if self._trouble else []

    async def _write(self) -> None:
        """Write what is waiting, as many as there are at a time, one fsync each time."""
        try:
            while self._waiting:
                batch = self._waiting[:_MOST_AT_ONCE]
                del self._waiting[:_MOST_AT_ONCE]
                answer = await self._insert([raw for raw, _ in batch])
                for _, done in batch:
                    tell(done, answer)
        finally:
            self._writer = None

    async def _insert(self, raws: Sequence[bytes]) -> Answer:
        def insert(db: sqlite3.Connection) -> None:
            with transaction(db):
                db.executemany(
                    "INSERT INTO oncebridge_spool (raw) VALUES (?)", [(raw,) for raw in raws]
                )

        try:
            await self._file.run(insert)
        except StoreError as error:
            self._trouble = f"spool: {error}"
            return Answer(
                acknowledge=False, verdict=None, retry_after_ms=1000, reason=self._trouble
            )
        self._trouble = ""
        self.depth += len(raws)
        self._filled.set()
        return SPOOLED

    # --- the source --------------------------------------------------------------------

    async def open(self, host: Host) -> None:
        self._host = host
        self._lock_alone()
        self.depth = await self._file.run(
            lambda db: db.execute("SELECT count(*) FROM oncebridge_spool").fetchone()[0]
        )
        self._relay = Relay(host.router, take=self._take, final=self._forget, batch=host.batch)

    async def run(self) -> None:
        assert self._relay is not None  # noqa: S101 - open before
        await self._relay.run()

    def stop(self) -> None:
        if self._relay is not None:
            self._relay.stop()

    def progress(self) -> tuple[int, int] | None:
        return None

    async def aclose(self) -> None:
        if self._writer is not None:
            await self._writer
        await self._file.aclose()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def _take(self) -> list[Item]:
        """Give the next records, waiting until there are some."""
        assert self._host is not None  # noqa: S101
        most, after = self._host.batch, self._taken
        while True:
            self._filled.clear()
            try:
                rows = await self._file.run(lambda db: _some(db.execute(_TAKE, (after, most))))
            except StoreUnavailable as error:
                _log.warning("oncebridge.spool_is_away", extra={"error": str(error)})
                await asyncio.sleep(_TRY_AGAIN_S)
                continue
            if rows:
                self._taken = rows[-1].place
                return rows
            await self._filled.wait()

    async def _forget(self, numbers: Sequence[int]) -> None:
        def delete(db: sqlite3.Connection) -> None:
            with transaction(db):
                db.executemany(
                    "DELETE FROM oncebridge_spool WHERE number = ?", [(n,) for n in numbers]
                )

        try:
            await self._file.run(delete)
        except StoreError as error:
            # They come again after a restart, and are duplicates then.
            _log.warning("oncebridge.spool_keeps_forwarded", extra={"error": str(error)})
        else:
            self.depth -= len(numbers)

    def _lock_alone(self) -> None:
        """Refuse a second process: both would forward the same records."""
        if not self._path.parent.is_dir():
            raise ConfigError("spool", f"{self._path.parent}: there is no such directory")
        try:
            fd = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else type(error).__name__
            raise ConfigError("spool", f"{self._path}.lock: {why}") from None
        self._lock = os.fdopen(fd, "rb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            self._lock = None
            raise ConfigError(
                "spool", f"{self._path}: another process uses it; give each its own"
            ) from None


def _some(rows: Iterable[tuple[int, bytes]]) -> list[Item]:
    """Take rows until they are as large as a batch may be."""
    taken: list[Item] = []
    size = 0
    for number, raw in rows:
        taken.append(Item(number, (raw,)))
        size += len(raw)
        if size >= _BATCH_BYTES:
            break
    return taken
