"""Random walks over the S3 store, compared with the reference step by step."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import ClassVar, Literal

import pytest
from hypothesis import settings
from tests.servers.s3 import S3Server
from tests.size import examples

from oncebridge.stores.api import Store
from oncebridge.stores.s3.store import S3Options, S3Store
from oncebridge.testing import ManualClock, StoreMachine

# A walk is some 700 requests, so there are fewer than for stores in this process.
WALKS = settings(
    max_examples=examples(50),
    stateful_step_count=50,
    derandomize=False,
    print_blob=True,
    deadline=None,
)


@pytest.fixture(autouse=True)
def server(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.show_to(monkeypatch)
    S3Machine.server = s3_server


class S3Machine(StoreMachine):
    generation_kept = 16
    server: ClassVar[S3Server]
    look_first: ClassVar[Literal["always", "never"]] = "never"

    @asynccontextmanager
    async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
        options = S3Options(
            endpoint=self.server.endpoint,
            expiry="sweep",
            look_first=self.look_first,
            timeout=timedelta(seconds=60),
            connect_timeout=timedelta(seconds=60),
        )
        async with S3Store(self.server.bucket(), options=options, clock=clock) as store:
            yield store


class LookingMachine(S3Machine):
    look_first = "always"


TestS3Machine = S3Machine.TestCase
TestS3Machine.settings = WALKS

TestLookingMachine = LookingMachine.TestCase
TestLookingMachine.settings = WALKS
