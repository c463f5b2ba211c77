"""
The contract of a store, as a test suite to inherit.

    class TestMyStore(StoreContract):
        @asynccontextmanager
        async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
            async with MyStore(clock=clock) as store:
                yield store

Each case opens its own store and uses new keys, so cases may run in any order, and at the same
time on one server.

If the store uses the clock of a server, set `real_time = True`. Then `wait` really waits, and every
lease, window and delay is a multiple of `unit_ms`. Class attributes say what a backend cannot do.
The cases that are left out for this are listed in `left_out`, printed, and recorded with the test
results.
"""

import pytest

from oncebridge.testing.contract.batches import BatchCases
from oncebridge.testing.contract.claims import ClaimCases
from oncebridge.testing.contract.columns import ColumnCases
from oncebridge.testing.contract.commits import CommitCases
from oncebridge.testing.contract.concurrency import ConcurrencyCases
from oncebridge.testing.contract.entity_state import EntityStateCases
from oncebridge.testing.contract.extensions import ExtensionCases
from oncebridge.testing.contract.handles import HandleCases
from oncebridge.testing.contract.harness import _NEEDS, needs
from oncebridge.testing.contract.keys import KeyCases
from oncebridge.testing.contract.parts import PartCases
from oncebridge.testing.contract.portability import PortabilityCases
from oncebridge.testing.contract.purging import PurgingCases
from oncebridge.testing.contract.releases import ReleaseCases
from oncebridge.testing.contract.remembering import RememberingCases
from oncebridge.testing.contract.windows import WindowCases

__all__ = ["StoreContract", "needs"]


@pytest.mark.asyncio
class StoreContract(
    ClaimCases,
    PartCases,
    CommitCases,
    ReleaseCases,
    ExtensionCases,
    WindowCases,
    EntityStateCases,
    RememberingCases,
    PurgingCases,
    KeyCases,
    BatchCases,
    ColumnCases,
    ConcurrencyCases,
    PortabilityCases,
    HandleCases,
):
    """The test suite of a store: inherit it and write `open`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        able = {
            "shared": cls.shared,
            "purges": cls.purges,
            "portable": cls.portable,
            "manual_time": not cls.real_time,
        }
        cls.left_out = tuple(name for name, needed in _NEEDS.items() if not able[needed])
        for name in _NEEDS:
            if name in cls.left_out:
                setattr(cls, name, None)
            elif getattr(cls, name) is None:  # hidden by a class this one inherits from
                setattr(cls, name, getattr(StoreContract, name))

    async def test_what_is_left_out_is_said(self) -> None:
        missing = {name for name in dir(StoreContract) if name.startswith("test_")}
        missing -= set(self.cases())
        assert missing == set(self.left_out)
        for name in self.left_out:
            print(f"left out, because it needs {_NEEDS[name]!r}: {name}")  # noqa: T201
        assert await self.store.peek([self.key()]) == [None]
