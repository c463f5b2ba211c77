"""Random walks on a real server, its clock replaced by one that the walk moves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest
from hypothesis import settings
from tests.servers.postgres import Postgres, ask, schema
from tests.size import examples

from oncebridge.stores.api import Store
from oncebridge.stores.postgres.store import PostgresOptions, PostgresStore
from oncebridge.testing import ManualClock, StoreMachine

# A failure prints a blob; @reproduce_failure with it runs that very walk again.
WALKS = settings(
    max_examples=examples(200),
    stateful_step_count=50,
    derandomize=False,
    print_blob=True,
    deadline=None,
)


class PostgresMachine(StoreMachine):
    generation_kept = 16
    attempts_kept = 10**9
    url: ClassVar[str]
    options = PostgresOptions(schema=schema(), auto_migrate=True, connections=1)

    @asynccontextmanager
    async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
        async with PostgresStore(self.url, self.options, clock=clock) as store:
            await ask(self.url, f"DELETE FROM {store.layout.named()}", "SELECT 1")
            yield store


class TestPostgresMachine(PostgresMachine.TestCase):
    settings = WALKS

    @pytest.fixture(autouse=True)
    def _server(self, postgres: Postgres) -> None:
        PostgresMachine.url = postgres.url
