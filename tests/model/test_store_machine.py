from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from tests.size import examples

from oncebridge.stores.api import Store
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore
from oncebridge.testing import ManualClock, StoreMachine

# A failure prints a blob; @reproduce_failure with it runs that very walk again.
WALKS = settings(
    max_examples=examples(200),
    stateful_step_count=50,
    derandomize=False,
    print_blob=True,
    deadline=None,
)


class MemoryMachine(StoreMachine):
    @asynccontextmanager
    async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
        async with MemoryStore(clock=clock) as store:
            yield store


class SQLiteMachine(StoreMachine):
    generation_kept = 16

    @asynccontextmanager
    async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
        with TemporaryDirectory() as folder:
            async with SQLiteStore(Path(folder, "records.db"), clock=clock) as store:
                yield store


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = WALKS

TestSQLiteMachine = SQLiteMachine.TestCase
TestSQLiteMachine.settings = WALKS
