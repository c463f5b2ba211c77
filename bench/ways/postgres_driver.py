"""PostgreSQL with asyncpg and nothing else."""

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
from traffic import IGNORED, naive_key

from ways import LEASE_S, WINDOW_S, Address, Decide

SEEN = """
CREATE TABLE IF NOT EXISTS seen (key bytea PRIMARY KEY, token bytea, until bigint, done boolean)
"""


@asynccontextmanager
async def connected(address: Address) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(
        host="127.0.0.1", port=address.port, user="oncebridge", database=address.name
    )
    await connection.execute(SEEN)
    yield connection
    await connection.close()


@asynccontextmanager
async def single(address: Address) -> AsyncIterator[Decide]:
    async with connected(address) as connection:
        claim = await connection.prepare(
            "INSERT INTO seen VALUES ($1, $2, $3, false) ON CONFLICT DO NOTHING RETURNING true"
        )
        commit = await connection.prepare("UPDATE seen SET done = true, until = $2 WHERE key = $1")

        async def decide(batch: list[bytes]) -> int:
            duplicates = 0
            for raw in batch:
                key = bytes.fromhex(naive_key(raw, IGNORED))
                now = time.time_ns() // 1_000_000
                if await claim.fetchval(key, os.urandom(16), now + LEASE_S * 1000):
                    await commit.fetchval(key, now + WINDOW_S * 1000)
                else:
                    duplicates += 1
            return duplicates

        yield decide


@asynccontextmanager
async def floor(address: Address) -> AsyncIterator[Decide]:
    async with connected(address) as connection:
        claim = await connection.prepare(
            "INSERT INTO seen SELECT key, $2, $3, false FROM unnest($1::bytea[]) AS key "
            "ON CONFLICT DO NOTHING RETURNING key"
        )
        commit = await connection.prepare(
            "UPDATE seen SET done = true, until = $2 WHERE key = ANY($1::bytea[])"
        )

        async def decide(keys: list[bytes]) -> int:
            now = time.time_ns() // 1_000_000
            rows = await claim.fetch(keys, os.urandom(16), now + LEASE_S * 1000)
            held = [row[0] for row in rows]
            await commit.fetch(held, now + WINDOW_S * 1000)
            return len(keys) - len(held)

        yield decide
