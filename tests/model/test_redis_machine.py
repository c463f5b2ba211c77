from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest
from hypothesis import settings
from tests.servers.redis import RedisCluster, RedisServer, prefix
from tests.size import examples

from oncebridge.stores.api import Store
from oncebridge.stores.redis.store import RedisOptions, RedisStore
from oncebridge.testing import ManualClock, StoreMachine

# A failure prints a blob; @reproduce_failure with it runs that very walk again.
WALKS = settings(
    max_examples=examples(200),
    stateful_step_count=50,
    derandomize=False,
    print_blob=True,
    deadline=None,
)


class RedisMachine(StoreMachine):
    url: ClassVar[str]

    @asynccontextmanager
    async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
        async with RedisStore(self.url, RedisOptions(prefix=prefix()), clock=clock) as store:
            yield store


class ClusterMachine(RedisMachine):
    """Its three keys are in three slots."""


class TestRedisMachine(RedisMachine.TestCase):
    settings = WALKS

    @pytest.fixture(autouse=True)
    def _server(self, redis_server: RedisServer) -> None:
        RedisMachine.url = redis_server.url


@pytest.mark.full
class TestClusterMachine(ClusterMachine.TestCase):
    settings = WALKS

    @pytest.fixture(autouse=True)
    def _server(self, redis_cluster_of_one: RedisCluster) -> None:
        ClusterMachine.url = redis_cluster_of_one.url
