from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from oncebridge.stores.api import Store
from oncebridge.stores.memory import MemoryStore
from oncebridge.testing import ManualClock, StoreContract


class TestMemoryStore(StoreContract):
    @asynccontextmanager
    async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
        async with MemoryStore(clock=clock) as store:
            yield store
