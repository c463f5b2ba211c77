"""The Redis store on real servers: with time that is moved, and with time as it passes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest
from tests.servers.redis import RedisCluster, RedisServer, prefix

from oncebridge.stores.api import Store
from oncebridge.stores.redis.store import RedisOptions, RedisStore
from oncebridge.testing import ManualClock, StoreContract
from oncebridge.testing.contract.batches import BatchCases
from oncebridge.testing.contract.harness import Harness


class OnRedis(Harness):
    shared = True
    portable = True
    url: ClassVar[str]

    @asynccontextmanager
    async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
        self.options = RedisOptions(prefix=prefix())
        async with self.open_second(clock) as store:
            yield store

    @asynccontextmanager
    async def open_second(self, clock: ManualClock) -> AsyncIterator[Store]:
        given = None if self.real_time else clock
        async with RedisStore(self.url, self.options, clock=given) as store:
            yield store


class OnSingle(OnRedis):
    @pytest.fixture(autouse=True)
    def _server(self, redis_server: RedisServer) -> None:
        type(self).url = redis_server.url


class OnCluster(OnRedis):
    @pytest.fixture(autouse=True)
    def _server(self, redis_cluster_of_one: RedisCluster) -> None:
        type(self).url = redis_cluster_of_one.url


class TestRedisStore(OnSingle, StoreContract):
    """On a test's clock nothing expires, so what needs that is left to real time."""

    purges = False


class TestRedisCluster(OnCluster, StoreContract):
    """One server with all slots: keys of two slots are never seen together there either."""

    purges = False


class InTime(OnRedis):
    """Time as it passes, by the server's clock."""

    real_time = True
    unit_ms = 1500
    tolerance_ms = 1000
    purge_slack_ms = 500


class RedisStoreInTime(InTime, StoreContract):
    pass


class RedisClusterInTime(InTime, StoreContract):
    pass


@pytest.mark.full
async def test_the_whole_contract_in_time(redis_server: RedisServer) -> None:
    RedisStoreInTime.url = redis_server.url
    assert await _all_cases(RedisStoreInTime) == {}


@pytest.mark.full
async def test_the_whole_contract_in_time_on_a_cluster(redis_cluster_of_one: RedisCluster) -> None:
    RedisClusterInTime.url = redis_cluster_of_one.url
    assert await _all_cases(RedisClusterInTime) == {}


async def _all_cases(kind: type[InTime]) -> dict[str, BaseException]:
    """Run cases beside each other, as they do little but wait; not so those of large batches."""
    failed: dict[str, BaseException] = {}
    free = asyncio.Semaphore(40)

    async def run(case: str) -> None:
        async with free:
            try:
                await kind().run(case)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - told together
                failed[case] = error

    large = {case for case in kind.cases() if hasattr(BatchCases, case)}
    for case in large:
        await run(case)
    await asyncio.gather(*map(run, set(kind.cases()) - large))
    return failed
