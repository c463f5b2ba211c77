"""
What an event costs a store that remembers 10⁴, 10⁵, 10⁶ or 10⁷ keys already.

New keys are claimed and committed in batches of 100, one batch at a time, and in memory also
whole events decided. What is there before is put there by the quickest road (`bulk`): copies of
a record that the store itself has written, under other keys; some are read back and compared.
The memory store is filled through its own `remember`, to 10⁷ keys always; the others up to
`--most` keys. At the end of the windows, forgetting must cost no more than remembering did.
"""

import asyncio
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import uvloop
from bulk import Bulk, PostgresBulk, RedisBulk, SQLiteBulk
from passing import WINDOW_MS, Hand, pass_keys
from table import (
    BATCH,
    COST,
    Effort,
    Line,
    Measure,
    Measured,
    Results,
    Topic,
    at_most,
    build,
    met,
    spread,
    times,
)
from traffic import RULE, NullSink, make_events

from oncebridge import Gateway, Settings, Store
from oncebridge.stores.api import Fate, Memories, Memory
from oncebridge.stores.memory import MemoryStore

SIZES = (10**4, 10**5, 10**6, 10**7)
SLICE = 1_000
SLICES, MOST_SLICES = 5, 40
"""The more keys, the more slices: a log that fills up is written back several times meanwhile."""
QUICK = 10**5
AIM_BYTES, FLAT = 150, 1.3
AIM_SQLITE = 1.4
"""At most so many times the cost at 10⁴ keys, at 10⁶."""
TITLES = {
    "sizes-memory": "memory",
    "sizes-sqlite": "SQLite",
    "sizes-redis": "Redis",
    "sizes-postgres": "PostgreSQL",
}


def up_to(effort: Effort, most: int) -> list[int]:
    most = min(most, QUICK) if effort.quick else most
    return [size for size in SIZES if size <= most]


# --- memory -----------------------------------------------------------------------------


def memory(effort: Effort) -> Measured:
    """Fill the memory store, weigh it, and time it at every power of ten on the way."""
    sizes = up_to(effort, SIZES[-1])
    events = make_events(len(sizes) * 4_000)
    clock = Hand()
    store = MemoryStore(max_keys=2 * sizes[-1], clock=clock)
    gateway = Gateway(
        store=store,
        sink=NullSink(),
        rules=[RULE],
        settings=Settings(explain=False),
        clock=clock,
    )

    async def fill() -> Measured:
        measured: Measured = {"keys": sizes[-1], "store": {}, "whole": {}}
        await gateway.process(events[:1])
        empty = resident()
        for number, size in enumerate(sizes):
            while len(store) < size:
                step = min(10_000, size - len(store))
                clock.now_ms += step // 100  # a hundred thousand events a second
                await store.remember(Memories.of(drawn(step)))
            gc.collect()
            if size == sizes[-1]:
                measured["bytes"] = (resident() - empty) / size
            measured["store"][str(size)] = await slices(store, size, time.thread_time)
            few = events[number * 4_000 :][:4_000]
            begins = time.thread_time()
            for at in range(0, len(few), BATCH):
                await gateway.process(few[at : at + BATCH])
            measured["whole"][str(size)] = (time.thread_time() - begins) / len(few) * 1e6
        # and now all of it ends: what was learned has to be forgotten on the way
        clock.now_ms += WINDOW_MS + 60_000
        measured["forgetting"] = await slices(store, sizes[-1], time.thread_time)
        return measured

    return _run(fill())


def drawn(count: int) -> list[Memory]:
    bits = os.urandom(48 * count)
    return [
        Memory(b"\1" + bits[n : n + 32], bits[n + 32 : n + 48], Fate.DELIVERED, WINDOW_MS)
        for n in range(0, len(bits), 48)
    ]


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# --- the others -------------------------------------------------------------------------


def sqlite(effort: Effort) -> Measured:
    with tempfile.TemporaryDirectory(dir=build(), prefix="bench-") as directory:
        bulk = SQLiteBulk(Path(directory) / "sizes.db")
        measured = _run(grown(bulk, up_to(effort, effort.most)))
        return {**measured, "bytes": asyncio.run(bulk.weigh())}


def on_server(kind: str) -> Measure:
    def measure(effort: Effort) -> Measured:
        servers = import_module("servers")
        with servers.running(kind) as server:
            server.make("sizes")
            bulk = {"redis": RedisBulk, "postgres": PostgresBulk}[kind](server.port, "sizes")
            measured = _run(grown(bulk, up_to(effort, effort.most)))
            weight = server.weigh("sizes")
            return {**measured, "bytes": weight, "server": server.about}

    return measure


async def grown(bulk: Bulk, sizes: Sequence[int]) -> Measured:
    """Fill a store up to each size, and time it there."""
    measured: Measured = {"keys": sizes[-1], "store": {}, "filling": {}}
    for size in sizes:
        begins = time.perf_counter()
        await bulk.fill(size)
        measured["filling"][str(size)] = time.perf_counter() - begins
        async with bulk.store() as store:
            await pass_keys(store, SLICE)  # files are read, statements prepared
            measured["store"][str(size)] = await slices(store, size)
    return measured


async def slices(
    store: Store, size: int, timer: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Time slices of new keys, few beside *size*; microseconds for one, slice by slice."""
    count = min(max(size // (25 * SLICE), SLICES), MOST_SLICES)
    memo = b'["1dfbc15a-2a17-4071-923d-8f2d1614d09b",1765552507919]'
    took = [await pass_keys(store, SLICE, memo=memo, timer=timer) for _ in range(count)]
    return [seconds / SLICE * 1e6 for seconds in took]


def _run(work: Coroutine[Any, Any, Measured]) -> Measured:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


# --- what is told -----------------------------------------------------------------------


def costs(runs: Sequence[Measured], part: str) -> list[dict[int, float]]:
    """Give what a key cost at each size, run by run."""
    return [{int(size): _mean(figures) for size, figures in run[part].items()} for run in runs]


def _mean(figures: float | Sequence[float]) -> float:
    return figures if isinstance(figures, float) else statistics.mean(figures)


def growth(runs: Sequence[Measured], part: str) -> list[float]:
    return [max(each.values()) / min(each.values()) for each in costs(runs, part)]


def cells(runs: Sequence[Measured], part: str) -> list[str]:
    each = costs(runs, part)
    shown = {size: f"{statistics.median(one[size] for one in each):.1f} µs" for size in each[0]}
    return [shown.get(size, "") for size in SIZES]


def bytes_line(results: Results, work: str) -> Line:
    runs = results["sizes-memory"]
    weights = [run["bytes"] for run in runs]
    heaviest = statistics.median(weights)
    is_full = runs[0]["keys"] == SIZES[-1]  # a small dict has more room to spare
    reached = met(heaviest <= AIM_BYTES) if is_full else ""
    told = f"{spread(weights, '{:.0f} B')} of {power(runs[0]['keys'])} keys"
    return Line(work, told, aim=f"≤ {AIM_BYTES} B of 10⁷", met=reached)


def flat_line(results: Results, work: str, part: str) -> Line:
    """Tell how flat the memory store is, in the columns of the first table."""
    runs = results["sizes-memory"]
    grew = growth(runs, part)
    told = [cell.removesuffix(" µs") for cell in cells(runs, part) if cell]
    reached = met(statistics.median(grew) <= FLAT)
    ours = f"{' '.join(told)} µs at 10⁴ … {power(runs[0]['keys'])} keys"
    return Line(work, ours, ratio=times(grew), aim=f"flat (≤ {FLAT}x)", met=reached)


def sqlite_growth(results: Results) -> list[float]:
    """Return the cost of a key at 10⁶ keys compared with that at 10⁴, run by run."""
    return [each[10**6] / each[10**4] for each in costs(results["sizes-sqlite"], "store")]


def sqlite_line(results: Results, work: str) -> Line:
    runs = results["sizes-sqlite"]
    ours = " ".join(cell.removesuffix(" µs") for cell in cells(runs, "store")[:3])
    if runs[0]["keys"] < 10**6:
        return Line(work, f"{ours} µs at 10⁴ … {power(runs[0]['keys'])} keys")
    grew = sqlite_growth(results)
    told = times(grew, COST), *at_most(grew, AIM_SQLITE, COST)
    return Line(work, f"{ours} µs at 10⁴ … 10⁶ keys", "", "", *told)


def power(keys: int) -> str:
    """Write a power of ten as one."""
    return f"10{'⁰¹²³⁴⁵⁶⁷⁸⁹'[len(str(keys)) - 1]}"


def lines(results: Results) -> Iterator[Line]:
    for name, title in TITLES.items():
        runs = results[name]
        grew = growth(runs, "store")
        yield Line(f"{title}, claim + commit", *cells(runs, "store"), times(grew), weight(runs))
        if name == "sizes-memory":
            yield Line(
                "memory, whole decision", *cells(runs, "whole"), times(growth(runs, "whole"))
            )
            forgets = statistics.median(_mean(run["forgetting"]) for run in runs)
            yield Line("memory, claim + commit while windows end", *last(runs, f"{forgets:.1f} µs"))


def last(runs: Sequence[Measured], cell: str) -> list[str]:
    return [cell if size == runs[0]["keys"] else "" for size in SIZES]


def weight(runs: Sequence[Measured]) -> str:
    return f"{statistics.median(run['bytes'] for run in runs):.0f} B"


TOPIC = Topic(
    "sizes",
    "Cost of an event by store size",
    {
        "sizes-memory": memory,
        "sizes-sqlite": sqlite,
        "sizes-redis": on_server("redis"),
        "sizes-postgres": on_server("postgres"),
    },
    lines,
    "Time to claim and commit one key, in batches of 100, one batch after the other, by the number "
    "of keys in the store before; with durable writes if the store has them, and CPU time in memory. "
    "SQLite, Redis and PostgreSQL are filled up to --most keys (default: a million).",
    Line("work", "10⁴ keys", "10⁵", "10⁶", "10⁷", "greatest / least", "size of a key"),
)
