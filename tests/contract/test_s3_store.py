"""The S3 store, on a real server: with time that is moved, and with time as it passes."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import ClassVar

import pytest
from msgspec.structs import replace
from tests.servers.s3 import S3Server

from oncebridge.stores.api import Store
from oncebridge.stores.s3.store import S3Options, S3Store
from oncebridge.testing import ManualClock, StoreContract
from oncebridge.testing.contract.batches import BatchCases
from oncebridge.testing.contract.claims import ClaimCases
from oncebridge.testing.contract.concurrency import ConcurrencyCases
from oncebridge.testing.contract.harness import Harness
from oncebridge.testing.contract.parts import PartCases
from oncebridge.testing.contract.portability import PortabilityCases
from oncebridge.testing.contract.purging import PurgingCases
from oncebridge.testing.contract.remembering import RememberingCases
from oncebridge.testing.contract.windows import WindowCases

# The server is an emulator on a machine that has other things to do.
PATIENT = S3Options(
    expiry="sweep", timeout=timedelta(seconds=60), connect_timeout=timedelta(seconds=60)
)


@pytest.fixture(autouse=True)
def server(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.show_to(monkeypatch)
    OnServer.server = s3_server


class OnServer(Harness):
    shared = True
    portable = True
    server: ClassVar[S3Server]
    options: ClassVar = replace(PATIENT, look_first="never")

    @asynccontextmanager
    async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
        self.bucket = self.server.bucket()
        async with self.open_second(clock) as store:
            yield store

    @asynccontextmanager
    async def open_second(self, clock: ManualClock) -> AsyncIterator[Store]:
        options = replace(self.options, endpoint=self.server.endpoint)
        given = None if self.real_time else clock
        async with S3Store(self.bucket, "records", options=options, clock=given) as store:
            yield store


class TestS3Store(OnServer, StoreContract):
    pass


@pytest.mark.full
class TestS3StoreThatLooksFirst(OnServer, ClaimCases, PartCases, WindowCases, ConcurrencyCases):
    """As it does where there are many repeats; all that differs are claims."""

    options = replace(PATIENT, look_first="always")


@pytest.mark.full
class TestS3StoreThatCannotRemove(
    OnServer, ClaimCases, PartCases, RememberingCases, PurgingCases, PortabilityCases
):
    """As on servers that heed no conditions when they remove."""

    @asynccontextmanager
    async def open_second(self, clock: ManualClock) -> AsyncIterator[Store]:
        async with super().open_second(clock) as store:
            assert isinstance(store, S3Store)
            store._objects.has_conditional_removal = False
            yield store


class OnRealTime(OnServer, StoreContract):
    """Time as it passes, by the dates in the server's answers."""

    real_time = True
    options = replace(PATIENT, max_skew=timedelta(seconds=1))
    unit_ms = 2500
    tolerance_ms = 2000
    wait_slack_ms = 2200  # the margin, and what two handles may differ in
    purge_slack_ms = 1000
    one_by_one: ClassVar[asyncio.Lock]

    @asynccontextmanager
    async def open_second(self, clock: ManualClock) -> AsyncIterator[Store]:
        opening = super().open_second(clock)
        async with self.one_by_one:  # opening is work, and others are being timed
            store = await opening.__aenter__()
        try:
            yield store
        finally:
            await opening.__aexit__(None, None, None)


@pytest.mark.full
async def test_the_whole_contract_on_real_time() -> None:
    """Cases run beside each other: nearly all they do is wait. Batches know nothing of time."""
    OnRealTime.one_by_one = asyncio.Lock()
    cases = {case for case in OnRealTime.cases() if not hasattr(BatchCases, case)}
    races = {case for case in cases if hasattr(ConcurrencyCases, case)}
    assert await _run(cases - races, 40) == {}
    assert await _run(races, 4) == {}


async def _run(cases: Iterable[str], at_once: int) -> dict[str, BaseException]:
    free = asyncio.Semaphore(at_once)
    failed: dict[str, BaseException] = {}

    async def run(case: str) -> None:
        async with free:
            try:
                await OnRealTime().run(case)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - told together
                failed[case] = error

    await asyncio.gather(*map(run, cases))
    return failed
