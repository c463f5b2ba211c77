"""What the tests of the sinks in AWS share: events, names, boto3's view, and a gateway to go through."""

import asyncio
import json
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import boto3
from botocore.config import Config

from oncebridge import Delivery, Gateway, Rule, Settings, parse
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.stores.memory import MemoryStore

KEY = bytes(range(33))
GENERATION = bytes(range(16))


def boto(service, server) -> Any:
    """Look at the server as everybody does."""
    return boto3.client(
        service,
        region_name="us-east-1",
        endpoint_url=server.endpoint,
        config=Config(retries={"total_max_attempts": 1}),
    )


def raw(number=1, detail=None, **envelope):
    """Write an event; `_` in a name of the envelope stands for `-`."""
    whole = {
        "version": "0",
        "id": f"6f1c2c1e-0000-4000-8000-{number:012}",
        "detail-type": "Order",
        "source": "shop",
        "account": "123456789012",
        "time": "2025-12-12T15:15:07Z",
        "region": "us-east-1",
        "resources": [],
        "detail": {"n": number} if detail is None else detail,
    }
    whole |= {name.replace("_", "-"): value for name, value in envelope.items()}
    kept = {name: value for name, value in whole.items() if value is not None}
    return json.dumps(kept, ensure_ascii=False).encode()


def delivery(text=None, key=KEY, *, bare=False, route="main", generation=GENERATION, **others):
    event = parse(raw() if text is None else text, bare=bare)
    return Delivery(event, key, generation, route=route, **others)


def several(*texts, **others):
    """Make deliveries with keys of their own."""
    return [delivery(text, KEY + bytes([at]), **others) for at, text in enumerate(texts)]


@asynccontextmanager
async def opened(sink):
    try:
        async with asyncio.timeout(30):
            await sink.open()
            yield sink
    finally:
        await sink.aclose()


class Town:
    """A gateway with a memory store before *sink*, which tries again at once."""

    def __init__(self, sink, **rule):
        self.dead = MemoryDeadLetters()
        self.gateway = Gateway(
            store=MemoryStore(),
            sink=sink,
            dead=self.dead,
            route="main",
            rules=[Rule.parse({"name": "all", **rule})],
            settings=Settings(
                backoff=timedelta(milliseconds=1),
                max_backoff=timedelta(milliseconds=5),
                breaker=100,
            ),
        )

    async def __aenter__(self):
        await self.gateway.open()
        return self

    async def __aexit__(self, *_):
        await self.gateway.drain()
        await self.gateway.aclose()

    async def process(self, *texts):
        async with asyncio.timeout(30):
            return await self.gateway.process(texts)

    async def until_acknowledged(self, *texts):
        """Bring what is handed back again, as a source does; give the verdicts of each time."""
        told = {text: [] for text in texts}
        left = list(texts)
        while left:
            outcomes = await self.process(*left)
            for text, outcome in zip(left, outcomes, strict=True):
                told[text].append(str(outcome.verdict))
            waits = [outcome.retry_after_ms for outcome in outcomes if not outcome.acknowledge]
            left = [t for t, o in zip(left, outcomes, strict=True) if not o.acknowledge]
            await asyncio.sleep(max(waits, default=0) / 1000)
        return [told[text] for text in texts]
