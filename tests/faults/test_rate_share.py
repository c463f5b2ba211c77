"""A rate holds for all workers of a route together."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.doubles import Bench, CountingDice, FaultyStore, event, now, now_ms, virtual

from oncebridge import Settings, Yes
from oncebridge.base.options import Rate
from oncebridge.engine.shared_rate_limit import RateShare, key_of
from oncebridge.stores.memory import MemoryStore


class StampingSink:
    """Take everything, and note when."""

    batch, concurrency = 1, 64

    def __init__(self) -> None:
        self.at: list[float] = []

    async def open(self) -> None: ...

    async def aclose(self) -> None: ...

    async def deliver(self, deliveries):
        self.at += [now()] * len(deliveries)
        return [Yes()] * len(deliveries)


def events(count: int, name: str) -> list[bytes]:
    return [event({"n": f"{name}{n}"}, id=f"{name}{n}") for n in range(count)]


def most_within(at: list[float], seconds: float) -> int:
    """Count the most events of any stretch of time."""
    at = sorted(at)
    first = most = 0
    for last, moment in enumerate(at):
        while at[first] < moment - seconds:
            first += 1
        most = max(most, last - first + 1)
    return most


def worker(store: FaultyStore, sink: StampingSink) -> Bench:
    return Bench(store=store, sink=sink, settings=Settings(rate=Rate(40)))


@pytest.mark.parametrize("workers", [2, 3, 8])
@virtual
async def test_workers_together_send_no_more_than_the_rate(workers):
    store, sink = FaultyStore(MemoryStore(clock=now_ms)), StampingSink()
    benches = [worker(store, sink) for _ in range(workers)]
    began = now()

    async def work(number: int) -> None:
        await asyncio.sleep(number * 0.7)
        await benches[number].process(*events(1200 // workers, f"w{number}-"))

    await asyncio.gather(*[work(number) for number in range(workers)])
    took = now() - began
    assert most_within(sink.at, 1.0) <= 40 + 4 + workers
    assert most_within(sink.at, 10.0) <= 400 + 4 + workers
    assert 1200 / 40 - 1 <= took <= 1200 / 40 / 0.85
    for bench in benches:
        await bench.gateway.aclose()


@virtual
async def test_a_worker_that_has_little_to_send_leaves_the_rest_to_others():
    store, busy, idle = FaultyStore(MemoryStore(clock=now_ms)), StampingSink(), StampingSink()
    first, second = worker(store, busy), worker(store, idle)

    async def trickle() -> None:
        for one in events(30, "slow"):
            await second.one(one)
            await asyncio.sleep(1)

    began = now()
    slow = asyncio.create_task(trickle())
    await first.process(*events(1000, "busy"))
    took = now() - began
    assert took <= 1000 / (40 * 0.8)
    await slow
    await first.gateway.aclose()
    await second.gateway.aclose()


@virtual
async def test_the_share_of_a_dead_worker_returns():
    store, sink = FaultyStore(MemoryStore(clock=now_ms)), StampingSink()
    dead, alive = worker(store, StampingSink()), worker(store, sink)
    dying = asyncio.create_task(dead.gateway.process(events(1000, "dead")))
    await asyncio.sleep(5)
    living = asyncio.create_task(alive.gateway.process(events(1000, "alive")))
    await asyncio.sleep(10)
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)
    await dead.gateway.aclose()
    cut = now()
    await asyncio.sleep(6)
    assert most_within([at for at in sink.at if at < cut], 2.0) <= 2 * 20 + 5
    await living
    after = [at for at in sink.at if at > cut + 6]
    assert most_within(after, 2.0) >= 2 * 40 * 0.9
    await alive.gateway.aclose()


@virtual
async def test_a_worker_keeps_its_share_while_the_store_does_not_answer():
    store = FaultyStore(MemoryStore(clock=now_ms))
    sinks = StampingSink(), StampingSink()
    benches = [worker(store, sink) for sink in sinks]
    tasks = [
        asyncio.create_task(bench.gateway.process(events(2000, f"w{n}-")))
        for n, bench in enumerate(benches)
    ]
    await asyncio.sleep(10)
    store.arm("claim.before", times=1e9)
    began = now()
    await asyncio.sleep(20)
    for sink in sinks:
        during = [at for at in sink.at if at >= began]
        assert len(during) == pytest.approx(20 * 20, rel=0.1)
    store.disarm()
    await asyncio.gather(*tasks)
    for bench in benches:
        await bench.gateway.aclose()


def share(store, rate: float, *, is_open: bool) -> RateShare:
    dice = CountingDice()
    return RateShare(
        store, "r", rate, clock=now_ms, dice=dice, changed=lambda: None, is_open=is_open
    )


@pytest.mark.parametrize("is_open", [False, True])
@virtual
async def test_a_worker_that_never_had_a_share_waits_unless_it_delivers_in_an_outage(is_open):
    store = FaultyStore(MemoryStore(clock=now_ms))
    store.arm("claim.before", times=1e9)
    mine = share(store, 40.0, is_open=is_open)
    assert mine.current(0, is_short=True) == 0
    await asyncio.sleep(3)
    assert mine.current(0, is_short=True) == (40 if is_open else 0)
    await mine.aclose()


@virtual
async def test_a_share_that_is_not_renewed_is_not_used_any_more():
    store = FaultyStore(MemoryStore(clock=now_ms))
    mine = share(store, 40.0, is_open=False)
    mine.current(0, is_short=True)
    await asyncio.sleep(0.1)
    assert mine.current(0, is_short=True) == 40
    await asyncio.sleep(60)
    assert mine.current(0, is_short=True) == 0
    await asyncio.sleep(0.1)
    assert mine.current(0, is_short=True) == 40
    await mine.aclose()


@virtual
async def test_without_a_rate_the_store_is_not_asked():
    store, sink = FaultyStore(MemoryStore(clock=now_ms)), StampingSink()
    async with Bench(store=store, sink=sink) as bench:
        await bench.process(*events(10, "x"))
        assert await bench.record(key_of("default")) is None


_PROGRAM = """
import asyncio, json, sys, time
from oncebridge import Gateway, Settings
from oncebridge.stores.sqlite import SQLiteStore

async def main(path, name, count):
    at = []
    gateway = Gateway(
        store=SQLiteStore(path), sink=lambda event: at.append(time.time()), settings=Settings(rate=40.0)
    )
    raws = [
        json.dumps({"id": f"{name}{n}", "detail-type": "T", "source": "s", "detail": {"n": f"{name}{n}"}})
        for n in range(count)
    ]
    async with gateway:
        outcomes = await gateway.process([raw.encode() for raw in raws])
    assert all(outcome.acknowledge for outcome in outcomes)
    print(json.dumps(at))

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


@pytest.mark.full
def test_two_processes_send_no_more_than_the_rate_together(tmp_path: Path):
    import json

    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "store.db")]
    started = [
        subprocess.Popen([*command, name, "150"], stdout=subprocess.PIPE) for name in ("a", "b")
    ]
    at = sorted(moment for one in started for moment in json.loads(one.communicate(timeout=60)[0]))
    assert len(at) == 300
    assert most_within(at, 3.0) <= 3 * 40 + 4 + 2
