"""
Embedded stores: read, key, claim, commit, in memory and in a SQLite file.

Beside them what people write by hand, one event at a time: look the key up, deliver, remember;
in SQLite a durable transaction each. The floor of SQLite is the driver alone, with the same two
batched and durable transactions and with no event. A fifth of the events are re-emissions.
"""

import asyncio
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop
from table import (
    BATCH,
    Effort,
    Line,
    Measure,
    Measured,
    Results,
    Topic,
    at_least,
    build,
    middle,
    times,
)
from traffic import IGNORED, RULE, NullSink, make_events, naive_key

from oncebridge import Gateway, Store, Verdict
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore

KINDS = {
    "memory-1": ("memory", 1),
    "memory-4": ("memory", 4),
    "sqlite-1": ("SQLite", 1),
    "sqlite-4": ("SQLite", 4),
}
AIM_SQLITE = 0.75
"""Of the rate of the raw driver."""
KEEP_S = 6 * 86_400


def row(kind: str, in_flight: int) -> Measure:
    def measure(effort: Effort) -> Measured:
        events = make_events(5_000 if effort.quick else 40_000)
        with tempfile.TemporaryDirectory(dir=build(), prefix="bench-") as directory:
            store: Store = (
                MemoryStore() if kind == "memory" else SQLiteStore(Path(directory) / "ours.db")
            )
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                measured = runner.run(decide(store, events, in_flight))
            measured["bytes"] = statistics.mean(map(len, events))
            if kind == "memory":
                measured["peer"], naive = naive_memory(events)
            else:
                few = events[: 2_000 if effort.quick else 8_000]
                measured["peer"], naive = naive_sqlite(few, directory)
                measured["floor"] = floor_sqlite(events, directory)
        measured["naive duplicates"] = naive
        return measured

    return measure


async def decide(store: Store, events: list[bytes], in_flight: int) -> Measured:
    """Decide on all *events* and give the rate, the CPU time and the duplicates found."""
    gateway = Gateway(store=store, sink=NullSink(), rules=[RULE])
    batches = iter([events[at : at + BATCH] for at in range(0, len(events), BATCH)])
    async with gateway:
        for _ in range(5):  # files are made, statements prepared
            await gateway.process(next(batches))
        warm = gateway.books.arrived

        async def work() -> None:
            for batch in batches:
                await gateway.process(batch)

        begins, spent = time.perf_counter(), time.process_time()
        await asyncio.gather(*[work() for _ in range(in_flight)])
        took, spent = time.perf_counter() - begins, time.process_time() - spent
    verdicts = gateway.books.verdicts
    found = verdicts[Verdict.DUPLICATE]
    if found + verdicts[Verdict.DELIVERED] != len(events):
        raise SystemExit(f"the books say {gateway.books.counts()} of {len(events)} events")
    count = len(events) - warm
    return {"ours": count / took, "cpu": spent / count * 1e6, "duplicates": found}


def naive_memory(events: list[bytes]) -> tuple[float, int]:
    """Look the key up, deliver, remember: one event at a time."""
    seen: dict[str, float] = {}
    deliver = list[bytes]().append
    duplicates = 0
    begins = time.perf_counter()
    for raw in events:
        key = naive_key(raw, IGNORED)
        if key in seen:
            duplicates += 1
        else:
            deliver(raw)
            seen[key] = time.time() + KEEP_S
    return len(events) / (time.perf_counter() - begins), duplicates


def naive_sqlite(events: list[bytes], directory: str) -> tuple[float, int]:
    """Insert each key in a durable transaction of its own."""
    db = raw_sqlite(f"{directory}/naive.db")
    db.execute("CREATE TABLE seen (key TEXT PRIMARY KEY, until REAL) WITHOUT ROWID")
    deliver = list[bytes]().append
    duplicates = 0
    begins = time.perf_counter()
    for raw in events:
        new = naive_key(raw, IGNORED), time.time() + KEEP_S
        if db.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", new).rowcount:
            deliver(raw)
        else:
            duplicates += 1
    took = time.perf_counter() - begins
    db.close()
    return len(events) / took, duplicates


def floor_sqlite(events: list[bytes], directory: str) -> float:
    """Do the same two batched transactions with the driver alone: no event, no loop."""
    db = raw_sqlite(f"{directory}/floor.db")
    db.execute(
        "CREATE TABLE seen (key BLOB PRIMARY KEY, token BLOB, generation BLOB, until INTEGER, "
        "attempts INTEGER, hash BLOB, fate INTEGER, memo BLOB, hard INTEGER, keep INTEGER) "
        "WITHOUT ROWID"
    )
    keys = [bytes.fromhex(naive_key(raw, IGNORED)) for raw in events]
    memo, token = b"m" * 56, os.urandom(16)
    begins = time.perf_counter()
    for at in range(0, len(keys), BATCH):
        rows = [(k, token, token, 1, 1, b"", 0, memo, 0, 1) for k in keys[at : at + BATCH]]
        db.execute("BEGIN IMMEDIATE")
        db.executemany("INSERT OR IGNORE INTO seen VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        db.execute("COMMIT")
        db.execute("BEGIN IMMEDIATE")
        done = "UPDATE seen SET token = x'', fate = 1, until = ? WHERE key = ? AND fate = 0"
        db.executemany(done, [(2, key) for key in keys[at : at + BATCH]])
        db.execute("COMMIT")
    took = time.perf_counter() - begins
    db.close()
    return len(keys) / took


def raw_sqlite(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA cache_size = -65536")
    db.execute("PRAGMA wal_autocheckpoint = 4000")
    return db


# --- what is told -----------------------------------------------------------------------


def line(results: Results, name: str, work: str) -> Line:
    kind, _ = KINDS[name]
    runs = results[name]
    cpu = statistics.median(run["cpu"] for run in runs)
    ours = f"{middle(runs, 'ours', '{:,.0f}/s')}, {cpu:.0f} µs CPU"
    peer = f"{middle(runs, 'peer', '{:,.0f}/s')} by hand"
    if kind == "memory":
        return Line(work, ours, peer, "", times([run["ours"] / run["peer"] for run in runs]))
    found = ratios(results, name)
    floor = middle(runs, "floor", "{:,.0f}/s")
    return Line(work, ours, peer, floor, times(found), *at_least(found, AIM_SQLITE))


def ratios(results: Results, name: str) -> list[float]:
    """Return the rate compared with the floor, run by run."""
    return [run["ours"] / run["floor"] for run in results[name]]


def lines(results: Results) -> Iterator[Line]:
    for name, (kind, in_flight) in KINDS.items():
        yield line(results, name, f"decision, {kind}, {in_flight} x {BATCH}")


TOPIC = Topic(
    "decisions",
    "Embedded stores",
    {name: row(kind, in_flight) for name, (kind, in_flight) in KINDS.items()},
    lines,
    f"1.8 KB events, a fifth of them duplicates; 4 x {BATCH}: four batches of {BATCH} at a time. SQLite "
    "with synchronous=FULL, and the ratio is to the floor: the same two batched transactions with the driver "
    "alone. The code by hand processes one event at a time and guarantees nothing; in memory the ratio is to it.",
)
