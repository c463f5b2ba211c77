"""Redis with redis-py and nothing else."""

import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import redis
from traffic import IGNORED, naive_key

from ways import LEASE_S, WINDOW_S, Address, Decide

CLAIM = """
local won = {}
for at, key in ipairs(KEYS) do
  won[at] = redis.call('SET', key, ARGV[1], 'NX', 'PX', ARGV[2]) and 1 or 0
end
return won
"""
COMMIT = """
for _, key in ipairs(KEYS) do redis.call('SET', key, 'done', 'XX', 'PX', ARGV[1]) end
return #KEYS
"""


@asynccontextmanager
async def single(address: Address) -> AsyncIterator[Decide]:
    async with calls(address) as decide_keys:

        async def decide(batch: list[bytes]) -> int:
            return await decide_keys([naive_key(raw, IGNORED) for raw in batch])

        yield decide


@asynccontextmanager
async def calls(
    address: Address,
) -> AsyncIterator[Callable[[Sequence[str | bytes]], Awaitable[int]]]:
    client = redis.Redis(port=address.port)

    async def decide(keys: Sequence[str | bytes]) -> int:
        duplicates = 0
        for key in keys:
            if client.set(key, os.urandom(16), nx=True, px=LEASE_S * 1000):
                client.set(key, b"done", xx=True, px=WINDOW_S * 1000)
            else:
                duplicates += 1
        return duplicates

    yield decide
    client.close()


@asynccontextmanager
async def floor(address: Address) -> AsyncIterator[Decide]:
    client = redis.Redis(port=address.port)
    claim, commit = client.script_load(CLAIM), client.script_load(COMMIT)

    async def decide(keys: list[bytes]) -> int:
        won = client.evalsha(claim, len(keys), *keys, os.urandom(16), LEASE_S * 1000)
        held = list(itertools.compress(keys, won))
        client.evalsha(commit, len(held), *held, WINDOW_S * 1000)
        return len(keys) - len(held)

    yield decide
    client.close()
