"""Nothing to do is done at once: no store and no sink asks anybody, or makes anything, for it."""

import asyncio
from pathlib import Path
from typing import Any, Self

import pytest

from oncebridge.service.addresses import SinkPlace, StorePlace
from oncebridge.stores.api import Commits, Extensions, Memories, Releases, Wants

pytestmark = pytest.mark.usefixtures("aws_identity")

STORES = {
    "memory": "memory:",
    "sqlite": "sqlite:{path}",
    "redis": "redis://127.0.0.1:{port}",
    "cluster": "redis+cluster://127.0.0.1:{port}",
    "sentinel": "redis+sentinel://127.0.0.1:{port}/orders",
    "postgres": "postgresql://ann:pw@127.0.0.1:{port}/db",
    "dynamodb": "dynamodb://records",
    "s3": "s3://records-of-acme",
}
SINKS = {
    "stdout": "-",
    "file": "file:{path}",
    "http": "http://127.0.0.1:{port}/hook",
    "function": "python:json:loads",
    "postgres": "postgresql://ann:pw@127.0.0.1:{port}/db",
    "events": "events://bus",
    "kinesis": "kinesis://stream",
    "sns": "sns:arn:aws:sns:us-east-1:123456789012:topic",
    "sqs": "sqs:http://127.0.0.1:{port}/123456789012/queue",
}
NOTHING: dict[str, Any] = {
    "claim": Wants.of([]),
    "commit": Commits.of([]),
    "release": Releases.of([]),
    "extend": Extensions.of([]),
    "remember": Memories.of([]),
    "peek": [],
    "forget": [],
    "load": [],
}


class Listener:
    """Somebody who listens, says nothing, and counts who comes."""

    def __init__(self) -> None:
        self.came = 0
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _accept(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.came += 1
        writer.close()

    def options(self, kind: str) -> dict[str, str]:
        is_aws = kind in ("dynamodb", "s3", "events", "kinesis", "sns", "sqs")
        return {"endpoint": f"http://127.0.0.1:{self.port}"} if is_aws else {}


@pytest.mark.parametrize("kind", STORES)
async def test_a_store_asks_nobody_for_nothing(kind: str, tmp_path: Path) -> None:
    async with Listener() as listener:
        url = STORES[kind].format(port=listener.port, path=tmp_path / "made")
        store = StorePlace.of(url, **listener.options(kind)).opened
        for verb, nothing in NOTHING.items():
            if hasattr(store, verb):  # not every store can be loaded
                assert [*await getattr(store, verb)(nothing)] == [], verb
        await store.aclose()
        assert listener.came == 0


@pytest.mark.parametrize("kind", SINKS)
async def test_a_sink_asks_nobody_for_nothing(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "made"
    async with Listener() as listener:
        url = SINKS[kind].format(port=listener.port, path=path)
        sink = SinkPlace.of(url, **listener.options(kind)).opened
        assert list(await sink.deliver([])) == []
        await sink.aclose()
        assert listener.came == 0
    assert not path.exists()
