from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from oncebridge.stores.api import Store
from oncebridge.stores.sqlite.store import SQLiteStore
from oncebridge.testing import ManualClock, StoreContract


class TestSQLiteStore(StoreContract):
    shared = True
    portable = True

    @asynccontextmanager
    async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
        with TemporaryDirectory() as folder:
            self.path = Path(folder, "records.db")
            async with SQLiteStore(self.path, clock=clock) as store:
                yield store

    @asynccontextmanager
    async def open_second(self, clock: ManualClock) -> AsyncIterator[Store]:
        async with SQLiteStore(self.path, clock=clock) as store:
            yield store
