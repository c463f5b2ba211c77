"""Workers that read a stream of a real server, and what they delivered together."""

import asyncio
import json
import time
from collections import Counter
from contextlib import asynccontextmanager
from datetime import timedelta

from tests.faults.doubles import FaultyStore, ScriptedSink, event, eventually

from oncebridge import Gateway, Settings
from oncebridge.base.clock import SystemDice, system_clock
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.engine.router import RouteEntry, Router
from oncebridge.sources.api import Host
from oncebridge.sources.kinesis.held_shard import KinesisTimings
from oncebridge.sources.kinesis.source import KinesisOptions, KinesisSource
from oncebridge.sources.pump import PumpInbox
from oncebridge.stores.memory import MemoryStore

QUICK = KinesisTimings(
    lease=timedelta(seconds=4),
    save=timedelta(milliseconds=200),
    look=timedelta(milliseconds=300),
    gone=timedelta(seconds=4),
    list=timedelta(seconds=1),
)


class Worker:
    """One process of a group."""

    def __init__(self, url, store, **options):
        self.sink = ScriptedSink()
        self.dead = MemoryDeadLetters()
        self.store = store
        settings = Settings(backoff=timedelta(milliseconds=20))
        self.gateway = Gateway(store=store, sink=self.sink, dead=self.dead, settings=settings)
        router = Router([RouteEntry(self.gateway)])
        self.host = Host(router, PumpInbox(router), store, 200, system_clock, SystemDice())
        options = KinesisOptions(poll=timedelta(seconds=0.25), **options)
        made = KinesisSource.from_url(url, options)
        self.source = KinesisSource(made._stream, options, times=QUICK)
        self._running = None

    async def start(self):
        await self.source.open(self.host)
        self._running = asyncio.create_task(self.source.run())
        return self

    async def stop(self):
        if self._running is not None and not self._running.done():
            self.source.stop()
            await self._running
        await self.source.aclose()
        await self.gateway.aclose()

    async def crash(self):
        """End without a word: nothing is given back, and nobody is told."""
        for seam in ("release.before", "extend.before"):
            self.store.arm(seam, times=1e9)
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.source.aclose()
        await self.gateway.aclose()

    @property
    def shards(self):
        return self.source.shards


class Crew:
    """The workers of a group, on a stream of *server*."""

    def __init__(self, server, shards):
        self.server = server
        self.stream = server.stream(shards)
        self.memory = MemoryStore()
        self.workers = []
        self.count = 0

    async def put(self, count, *keys):
        """Put events whose numbers go on from the last ones, with *keys* by turns."""
        numbers = range(self.count, self.count + count)
        self.count += count
        keys = keys or [f"key-{n}" for n in numbers]
        pairs = []
        for n in numbers:
            key = keys[n % len(keys)]
            pairs.append((key, event({"n": n, "key": key}, id=f"{self.stream}-{n}")))
        await asyncio.to_thread(self.server.put, self.stream, pairs)

    async def worker(self, store=None, **options):
        # Each has a store of its own to lose touch with; what is in it is shared.
        options = {"endpoint": self.server.endpoint, **options}
        store = store or FaultyStore(self.memory)
        worker = Worker(f"kinesis://{self.stream}", store, **options)
        self.workers.append(worker)
        return await worker.start()

    def details(self):
        return [json.loads(raw)["detail"] for w in self.workers for raw in w.sink.raws]

    async def all_delivered(self, within_s=40):
        await eventually(lambda: len(self.details()) >= self.count, within_s)
        found = Counter(detail["n"] for detail in self.details())
        assert found == Counter(range(self.count)), "each of them once"

    async def shared(self, *sizes, within_s=40):
        """Wait until the workers that run read so many shards each, in any order."""
        running = [w for w in self.workers if not w._running.done()]

        def is_shared():
            held = [shard for w in running for shard in w.shards]
            return sorted(len(w.shards) for w in running) == sorted(sizes) and len(held) == len(
                set(held)
            )

        await eventually(is_shared, within_s)


@asynccontextmanager
async def crew(server, shards=1):
    made = Crew(server, shards)
    try:
        yield made
    finally:
        for worker in made.workers:
            await worker.stop()


def in_order(worker):
    """Tell whether what has the same key came in the order in which it was put."""
    latest = {}
    for raw in worker.sink.raws:
        detail = json.loads(raw)["detail"]
        if latest.get(detail["key"], -1) >= detail["n"]:
            return False
        latest[detail["key"]] = detail["n"]
    return True


def seconds_since(began):
    return time.monotonic() - began
