from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import ClassVar

import pytest
from hypothesis import settings
from tests.servers.aws import DynamoDBServer
from tests.size import examples

from oncebridge.stores.api import Store
from oncebridge.stores.dynamodb.store import DynamoDBOptions, DynamoDBStore
from oncebridge.testing import ManualClock, StoreMachine


class DynamoDBMachine(StoreMachine):
    generation_kept = 16
    server: ClassVar[DynamoDBServer]

    @asynccontextmanager
    async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
        table = self.server.table()
        try:
            async with self.opened(table, clock) as store:
                yield store
        finally:
            self.server.drop(table)

    def opened(self, table: str, clock: ManualClock) -> DynamoDBStore:
        options = DynamoDBOptions(endpoint=self.server.endpoint, timeout=timedelta(seconds=60))
        return DynamoDBStore(table, options, clock=clock)


class GlobalMachine(DynamoDBMachine):
    """A table without transactions and expiry, as those with strong consistency are."""

    def opened(self, table: str, clock: ManualClock) -> DynamoDBStore:
        store = super().opened(table, clock)
        store._table.has_transactions = store._expires = False
        return store


def walks(count: int) -> settings:
    return settings(
        max_examples=examples(count),
        stateful_step_count=50,
        derandomize=False,
        print_blob=True,
        deadline=None,
    )


@pytest.mark.full
class TestDynamoDBMachine(DynamoDBMachine.TestCase):
    settings = walks(25)  # it answers a few hundred requests a second

    @pytest.fixture(autouse=True)
    def _server(self, ministack: DynamoDBServer) -> None:
        DynamoDBMachine.server = ministack


class TestDynamoDBMachineOnDynoxide(DynamoDBMachine.TestCase):
    settings = walks(200)

    @pytest.fixture(autouse=True)
    def _server(self, dynoxide: DynamoDBServer) -> None:
        DynamoDBMachine.server = dynoxide


@pytest.mark.full
class TestGlobalMachine(GlobalMachine.TestCase):
    settings = walks(50)

    @pytest.fixture(autouse=True)
    def _server(self, dynoxide: DynamoDBServer) -> None:
        GlobalMachine.server = dynoxide
