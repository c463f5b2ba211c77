"""The whole contract on DynamoDB, on each server there is and on both kinds of table."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import ClassVar

import pytest
from tests.servers.aws import DynamoDBServer

from oncebridge.stores.api import Store
from oncebridge.stores.dynamodb.store import DynamoDBOptions, DynamoDBStore
from oncebridge.testing import ManualClock, StoreContract


class OnDynamoDB(StoreContract):
    shared = True
    portable = True
    purges = False  # DynamoDB removes what is over by itself, some day

    server: ClassVar[DynamoDBServer]

    @asynccontextmanager
    async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
        self.table = self.server.table()
        try:
            async with self.opened(clock) as store:
                yield store
        finally:
            self.server.drop(self.table)

    @asynccontextmanager
    async def open_second(self, clock: ManualClock) -> AsyncIterator[Store]:
        async with self.opened(clock) as store:
            yield store

    def opened(self, clock: ManualClock) -> DynamoDBStore:
        # The patience is for the emulators; two thousand items take them seconds.
        options = DynamoDBOptions(endpoint=self.server.endpoint, timeout=timedelta(seconds=60))
        return DynamoDBStore(self.table, options, clock=clock)


@pytest.mark.full
class TestDynamoDBStore(OnDynamoDB):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls, ministack: DynamoDBServer) -> None:
        cls.server = ministack


class TestDynamoDBStoreOnDynoxide(OnDynamoDB):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls, dynoxide: DynamoDBServer) -> None:
        cls.server = dynoxide


@pytest.mark.full
class TestGlobalTable(OnDynamoDB):
    """A table without transactions and expiry, as those with strong consistency are."""

    purges = True

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls, dynoxide: DynamoDBServer) -> None:
        cls.server = dynoxide

    def opened(self, clock: ManualClock) -> DynamoDBStore:
        store = super().opened(clock)
        store._table.has_transactions = store._expires = False
        return store
