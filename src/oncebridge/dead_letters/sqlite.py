"""
Dead letters in a SQLite file.

It may be the file of the SQLite store. A dead letter is durable, even against power loss, before
its event is acknowledged.
"""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from oncebridge.dead_letters.api import DeadLetter
from oncebridge.errors import ConfigError, DeadLetterError, StoreError
from oncebridge.stores.sqlite.database import SQLiteFile

_SCHEMA = """
CREATE TABLE IF NOT EXISTS oncebridge_dead (
    number          INTEGER PRIMARY KEY AUTOINCREMENT,
    raw             BLOB    NOT NULL,
    reason          TEXT    NOT NULL,
    message         TEXT    NOT NULL,
    route           TEXT    NOT NULL,
    rule            TEXT    NOT NULL,
    key             BLOB    NOT NULL,
    attempts        INTEGER NOT NULL,
    maybe_delivered INTEGER NOT NULL,
    buried_ms       INTEGER NOT NULL
)
"""
_PUT = """
INSERT INTO oncebridge_dead
    (raw, reason, message, route, rule, key, attempts, maybe_delivered, buried_ms)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_LIST = """
SELECT raw, reason, message, route, rule, key, attempts, maybe_delivered, buried_ms, number
FROM oncebridge_dead WHERE number > ? ORDER BY number LIMIT ?
"""


class SQLiteDeadLetters:
    """Keep dead letters in the SQLite file at *path*."""

    def __init__(self, path: str | Path) -> None:
        self._file = SQLiteFile(path, name="dead letters", version=1, schema=_SCHEMA)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open `sqlite:PATH`."""
        path = url.removeprefix("sqlite:")
        if path == url or not path:
            raise ConfigError("", f"{url!r}: the address of dead letters in SQLite is sqlite:PATH")
        return cls(path)

    @property
    def file(self) -> SQLiteFile:
        return self._file

    async def open(self) -> None:
        await self._file.run(lambda _: None)

    async def put(self, letters: Sequence[DeadLetter]) -> None:
        rows = [
            (
                letter.raw,
                letter.reason,
                letter.message,
                letter.route,
                letter.rule,
                letter.key,
                letter.attempts,
                letter.maybe_delivered,
                letter.buried_ms,
            )
            for letter in letters
        ]

        try:
            await self._file.change(lambda db: db.executemany(_PUT, rows))
        except (StoreError, UnicodeEncodeError) as error:
            raise DeadLetterError(str(error)) from error

    async def list(self, *, after: int = 0, limit: int = 100) -> list[DeadLetter]:
        rows = await self._file.run(lambda db: db.execute(_LIST, (after, limit)).fetchall())
        return [
            DeadLetter(
                raw, reason, message, route, rule, key, attempts, bool(maybe), buried, number
            )
            for raw, reason, message, route, rule, key, attempts, maybe, buried, number in rows
        ]

    async def drop(self, numbers: Sequence[int]) -> int:
        def delete(db: sqlite3.Connection) -> int:
            return sum(
                db.execute("DELETE FROM oncebridge_dead WHERE number = ?", (number,)).rowcount
                for number in numbers
            )

        return await self._file.change(delete)

    async def aclose(self) -> None:
        await self._file.aclose()
