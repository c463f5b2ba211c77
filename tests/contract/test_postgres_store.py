"""The Postgres store on a real server: with time that is moved, as it passes, and through a pooler."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest
from tests.servers.postgres import PgBouncer, Postgres, ask, schema

from oncebridge.stores.api import Store
from oncebridge.stores.postgres.store import PostgresOptions, PostgresStore
from oncebridge.testing import ManualClock, StoreContract
from oncebridge.testing.contract.harness import Harness


class OnPostgres(Harness):
    shared = True
    portable = True
    url: ClassVar[str]
    options = PostgresOptions(schema=schema(), auto_migrate=True)

    @asynccontextmanager
    async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
        async with self.open_second(clock) as store:
            await ask(self.url, f"DELETE FROM {store.layout.named()}", "SELECT 1")
            yield store

    @asynccontextmanager
    async def open_second(self, clock: ManualClock) -> AsyncIterator[PostgresStore]:
        given = None if self.real_time else clock
        async with PostgresStore(self.url, self.options, clock=given) as store:
            yield store


class OnItsOwn(OnPostgres):
    @pytest.fixture(autouse=True)
    def _server(self, postgres: Postgres) -> None:
        type(self).url = postgres.url


class TestPostgresStore(OnItsOwn, StoreContract):
    pass


@pytest.mark.full
class TestPostgresStoreOnRealTime(OnItsOwn, StoreContract):
    real_time = True
    unit_ms = 300
    tolerance_ms = 250
    purge_slack_ms = 100


@pytest.mark.full
class TestPostgresStoreThroughPgBouncer(OnPostgres, StoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, pgbouncer: PgBouncer) -> None:
        type(self).url = pgbouncer.url
