"""
What a store must do, as a suite to inherit.

    class TestMyStore(StoreContract):
        @asynccontextmanager
        async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
            async with MyStore(clock=clock) as store:
                yield store

Each case opens a store of its own and uses keys nobody else uses, so cases may run in
any order and beside each other on one server.

A store on a server keeps its own time. Such a class sets `real_time = True`; waiting
then really waits, and every lease, window and delay is a multiple of `unit_ms`. What a
backend cannot do it says in a class attribute, and the cases it thereby leaves out are
listed in `left_out`, printed, and recorded with the test results.
"""

import pytest

from oncebridge.stores.api import Store
from oncebridge.testing.contract.batches import BatchCases
from oncebridge.testing.contract.claims import ClaimCases
from oncebridge.testing.contract.commits import CommitCases
from oncebridge.testing.contract.concurrency import ConcurrencyCases
from oncebridge.testing.contract.extensions import ExtensionCases
from oncebridge.testing.contract.handles import HandleCases
from oncebridge.testing.contract.harness import _NEEDS, needs
from oncebridge.testing.contract.keys import KeyCases
from oncebridge.testing.contract.parts import PartCases
from oncebridge.testing.contract.portability import PortabilityCases
from oncebridge.testing.contract.purging import PurgingCases
from oncebridge.testing.contract.registers import RegisterCases
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
    RegisterCases,
    RememberingCases,
    PurgingCases,
    KeyCases,
    BatchCases,
    ConcurrencyCases,
    PortabilityCases,
    HandleCases,
):
    """Inherit this, write `open`, and be a store."""

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

    async def test_what_is_left_out_is_said(self, store: Store) -> None:
        missing = {name for name in dir(StoreContract) if name.startswith("test_")}
        missing -= set(self.cases())
        assert missing == set(self.left_out)
        for name in self.left_out:
            print(f"left out, for want of {_NEEDS[name]!r}: {name}")  # noqa: T201
        assert await store.peek([self.key()]) == [None]
