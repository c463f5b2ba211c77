"""
The numbers, as ratios in one run on one machine.

    python bench/run.py [--quick] [--only TABLE ...]
    python bench/run.py --row NAME [--quick]

Every row runs in a process of its own, three times, all rows in turn, so that a busy
moment of the machine does not hit one row alone. The table shows the median and half the
spread; everything measured goes to build/bench.json. A missed target is said in the last
column and is no failure: this is a measurement. `--quick` measures less of everything, and
once.
"""

import argparse
import asyncio
import gc
import hashlib
import json
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import http_path
import queue_path
import watch_path
from table import Line, Measured, met, middle, show
from traffic import EVENTS, IGNORED, RULE, NullSink, make_events, naive_key

import stores
from oncebridge import Gateway, Settings, Store, Verdict, parse
from oncebridge.rules import RuleSet
from oncebridge.store import Claim, Commit, Fate, Part, Want
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite import SQLiteStore

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
BATCH = 100
SIX_DAYS_MS = 6 * 86_400_000


# --- a key ------------------------------------------------------------------------------


def key_row(*, pretty: bool, ignore: bool) -> Callable[..., Measured]:
    def measure(*, quick: bool) -> Measured:
        raws = [path.read_bytes() for path in sorted(EVENTS.glob("*.json"))]
        if not pretty:
            raws = [
                json.dumps(json.loads(raw), ensure_ascii=False, separators=(",", ":")).encode()
                for raw in raws
            ]
        rules = RuleSet([RULE] if ignore else [], namespace="default")
        apart, plan = rules.apart, rules.plan
        ignored = IGNORED if ignore else ()

        def ours() -> None:
            for raw in raws:
                plan(parse(raw, apart=apart))

        def naive() -> None:
            for raw in raws:
                naive_key(raw, ignored)

        first, second = in_turn([ours, naive], rounds=20 if quick else 100)
        return {
            "ours": first / len(raws) * 1e6,
            "peer": second / len(raws) * 1e6,
            "bytes": statistics.mean(map(len, raws)),
        }

    return measure


def in_turn(works: Sequence[Callable[[], None]], *, rounds: int) -> list[float]:
    """Time *works* one after the other, many times; the medians, in seconds of CPU."""
    took: list[list[float]] = [[] for _ in works]
    for work in works:
        work()
    for _ in range(rounds):
        for times, work in zip(took, works, strict=True):
            begins = time.thread_time()
            for _ in range(5):
                work()
            times.append((time.thread_time() - begins) / 5)
    return [statistics.median(times) for times in took]


# --- whole decisions --------------------------------------------------------------------


def decision_row(kind: str, in_flight: int) -> Callable[..., Measured]:
    def measure(*, quick: bool) -> Measured:
        events = make_events(5_000 if quick else 30_000)
        with tempfile.TemporaryDirectory(dir=build(), prefix="bench-") as directory:
            store: Store = (
                MemoryStore() if kind == "memory" else SQLiteStore(Path(directory) / "ours.db")
            )
            measured = asyncio.run(decide(store, events, in_flight))
            measured["bytes"] = statistics.mean(map(len, events))
            if kind == "memory":
                measured["peer"], naive = naive_memory(events)
            else:
                measured["peer"], naive = naive_sqlite(
                    events[: 2_000 if quick else 6_000], directory
                )
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
            seen[key] = time.time() + 6 * 86_400
    return len(events) / (time.perf_counter() - begins), duplicates


def naive_sqlite(events: list[bytes], directory: str) -> tuple[float, int]:
    """Insert each key in a durable transaction of its own."""
    db = raw_sqlite(f"{directory}/naive.db")
    db.execute("CREATE TABLE seen (key TEXT PRIMARY KEY, until REAL) WITHOUT ROWID")
    deliver = list[bytes]().append
    duplicates = 0
    begins = time.perf_counter()
    for raw in events:
        row = naive_key(raw, IGNORED), time.time() + 6 * 86_400
        if db.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", row).rowcount:
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


# --- what a key takes -------------------------------------------------------------------


class Hand:
    """A clock that stands where it is put."""

    def __init__(self) -> None:
        self.now_ms = 1_765_551_600_000

    def __call__(self) -> int:
        return self.now_ms


async def pass_keys(
    store: Store, count: int, *, window_ms: int = SIX_DAYS_MS, memo: bytes = b""
) -> float:
    """Claim and commit *count* new keys in batches; give the seconds the store took."""
    took = 0.0
    for at in range(0, count, BATCH):
        drawn = os.urandom(64 * min(BATCH, count - at))
        wants = [
            Want(
                (Part(b"\1" + drawn[n : n + 32]),),
                drawn[n + 32 : n + 48],
                drawn[n + 48 : n + 64],
                30_000,
                window_ms,
                memo,
            )
            for n in range(0, len(drawn), 64)
        ]
        begins = time.perf_counter()
        answers = await store.claim(wants)
        took += time.perf_counter() - begins
        held = [answer.held[0] for answer in answers if isinstance(answer, Claim)]
        if len(held) != len(wants):
            raise SystemExit(f"a new key was not claimed: {answers}")
        commits = [Commit(h.key, h.generation, Fate.DELIVERED, window_ms) for h in held]
        begins = time.perf_counter()
        await store.commit(commits)
        took += time.perf_counter() - begins
    return took


def memory_keys(*, quick: bool) -> Measured:
    """Fill the memory store, weigh it, and time it at every power of ten on the way."""
    most = 1_000_000 if quick else 10_000_000
    clock = Hand()
    store = MemoryStore(max_keys=2 * most, clock=clock)
    events = iter(make_events(4 * 2_000 * 2))

    async def fill() -> Measured:
        at_size: dict[str, float] = {}
        whole: dict[str, float] = {}
        settings = Settings(explain=False)
        gateway = Gateway(
            store=store, sink=NullSink(), rules=[RULE], settings=settings, clock=clock
        )
        sizes = [size for size in (10**4, 10**5, 10**6, 10**7) if size <= most]
        weighed = 0
        for size in sizes:
            while len(store) < size:
                step = min(100_000, size - len(store))
                clock.now_ms += step // 100  # a hundred thousand events a second
                await pass_keys(store, step)
            if size == most:
                gc.collect()
                weighed = resident() - empty
            at_size[f"{size:.0e}"] = await pass_keys(store, 20_000) / 20_000 * 1e6
            batches = [[next(events) for _ in range(BATCH)] for _ in range(40)]
            begins = time.perf_counter()
            for batch in batches:
                await gateway.process(batch)
            whole[f"{size:.0e}"] = (time.perf_counter() - begins) / 4_000 * 1e6
        # and now all of it ends: what was learned has to be forgotten on the way
        clock.now_ms += SIX_DAYS_MS + 60_000
        forgetting = await pass_keys(store, 20_000) / 20_000 * 1e6
        return {
            "keys": most,
            "bytes per key": weighed / most,
            "store": at_size,
            "whole": whole,
            "forgetting": forgetting,
        }

    gc.collect()
    empty = resident()
    return asyncio.run(fill())


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def sqlite_bytes(*, quick: bool) -> Measured:
    """Weigh the file with and without the memo that explains a duplicate."""
    keys = 50_000 if quick else 300_000
    measured: Measured = {"keys": keys}
    memo = b'["1dfbc15a-2a17-4071-923d-8f2d1614d09b",1765552507919]'
    with tempfile.TemporaryDirectory(dir=build(), prefix="bench-") as directory:
        for name, note in (("with memo", memo), ("without memo", b"")):
            path = Path(directory) / f"{name}.db"

            async def fill(path: Path = path, note: bytes = note) -> None:
                async with SQLiteStore(path) as store:
                    await pass_keys(store, keys, memo=note)

            asyncio.run(fill())
            measured[name] = path.stat().st_size / keys
    return measured


def sqlite_flat(*, quick: bool) -> Measured:
    """Write ten windows' worth of keys, and look at the file on the way."""
    worth = 5_000 if quick else 20_000
    window_ms = 60_000
    clock = Hand()
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=build(), prefix="bench-") as directory:
        path = Path(directory) / "flat.db"

        async def fill() -> None:
            async with SQLiteStore(path, clock=clock) as store:
                for number in range(1, 11):
                    for _ in range(worth // BATCH):
                        await pass_keys(store, BATCH, window_ms=window_ms)
                        clock.now_ms += window_ms * BATCH // worth
                    if number in {1, 2, 5, 10}:
                        db = sqlite3.connect(path)
                        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                        db.close()
                        sizes[f"{number}x"] = path.stat().st_size

        asyncio.run(fill())
    return {"keys": worth, "sizes": sizes, "ratio": sizes["10x"] / sizes["2x"]}


# --- the service ------------------------------------------------------------------------


def http_row(*, quick: bool) -> Measured:
    """HTTP in, SQLite, HTTP out, against uvicorn and aiohttp with nothing in between."""
    events = make_events(10_000 if quick else 30_000)
    measured = {}
    for connections in (64, 256):
        direct = http_path.measure("direct", events, connections)
        ours = http_path.measure("ours", events, connections)
        if ours["taken"] != len(set(map(identity, events))):
            raise SystemExit(f"the receiver got {ours['taken']} events")
        ratio = ours["per_s"] / direct["per_s"]
        measured[str(connections)] = {"ours": ours, "direct": direct, "ratio": ratio}
    return measured


def identity(raw: bytes) -> str:
    body = json.loads(raw)["detail"]["eventBody"]
    return str(body["conversationId"])


def file_row(*, quick: bool) -> Measured:
    """A file through SQLite into a file: events a second, and the most memory it took."""
    # SQLite's own cache (64 MiB) is full after a few hundred thousand keys.
    sizes = [100_000, 200_000] if quick else [400_000, 1_000_000]
    measured = {}
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=build()) as directory:
            with Path(directory, "in.ndjson").open("wb") as file:
                file.writelines(short_event(at) for at in range(size))
            command = [sys.executable, "-m", "oncebridge", "run", "--log-level", "error"]
            command += ["--source", "file:in.ndjson", "--sink", "file:out.ndjson", "--json"]
            command += ["--store", "sqlite:seen.db", "--dead", "sqlite:dead.db"]
            begins = time.perf_counter()
            process = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE)
            assert process.stdout is not None
            counts = json.loads(process.stdout.read())
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            took = time.perf_counter() - begins
            if process.returncode or counts["arrived"] != size:
                raise SystemExit(f"the run of {size} ended with {process.returncode}: {counts}")
            measured[str(size)] = {
                "per_s": size / took,
                "mib": used.ru_maxrss / 1024,
                "cpu_us": (used.ru_utime + used.ru_stime) / size * 1e6,
                "delivered": counts["delivered"],
            }
    return {"sizes": measured}


def short_event(at: int) -> bytes:
    """Make an event of 700 bytes, every fifth a repeat of an earlier one."""
    number, copy = (at - 1003, 1) if at % 5 == 4 and at > 1003 else (at, 0)
    own = hashlib.md5(f"{number}".encode()).hexdigest()
    mark = hashlib.md5(f"{number} {copy}".encode()).hexdigest()
    text = (
        f'{{"version":"0","id":"{mark}","detail-type":"order","source":"com.example.orders",'
        f'"account":"123456789012","time":"2025-12-12T15:15:07Z","region":"us-east-1",'
        f'"resources":[],"detail":{{"order":"{own}","number":{number},"text":"{own * 12}"}}}}\n'
    )
    return text.encode()


def build() -> Path:
    BUILD.mkdir(exist_ok=True)
    return BUILD


def queue_row(*, quick: bool) -> Measured:
    return queue_path.measure(["boto3", "memory", "sqlite"], 1000 if quick else 5000)


ROWS: dict[str, Callable[..., Measured]] = {
    "key-compact": key_row(pretty=False, ignore=False),
    "key-compact-ignore": key_row(pretty=False, ignore=True),
    "key-pretty": key_row(pretty=True, ignore=False),
    "key-pretty-ignore": key_row(pretty=True, ignore=True),
    "memory-1": decision_row("memory", 1),
    "memory-4": decision_row("memory", 4),
    "sqlite-1": decision_row("sqlite", 1),
    "sqlite-4": decision_row("sqlite", 4),
    "memory-keys": memory_keys,
    "sqlite-bytes": sqlite_bytes,
    "sqlite-flat": sqlite_flat,
    "http": http_row,
    "file": file_row,
    "sqs": queue_row,
    **stores.ROWS,
    **watch_path.ROWS,
}


# --- the table --------------------------------------------------------------------------


def keys(results: dict[str, list[Measured]]) -> Iterator[Line]:
    for name, how in (
        ("key-compact", "compact"),
        ("key-compact-ignore", "compact, two fields ignored"),
        ("key-pretty", "pretty-printed"),
        ("key-pretty-ignore", "pretty-printed, two fields ignored"),
    ):
        runs = results[name]
        ratio = statistics.median(run["peer"] / run["ours"] for run in runs)
        ours, peer = middle(runs, "ours", "{:.1f} µs"), middle(runs, "peer", "{:.1f} µs")
        yield f"key, {how}", ours, f"{peer} naive", f"{ratio:.1f}x", ">= 3x", met(ratio >= 3)


def decisions(results: dict[str, list[Measured]]) -> Iterator[Line]:
    for name, kind, in_flight in (
        ("memory-1", "memory", 1),
        ("memory-4", "memory", 4),
        ("sqlite-1", "SQLite", 1),
        ("sqlite-4", "SQLite", 4),
    ):
        runs = results[name]
        ratio = statistics.median(run["ours"] / run["peer"] for run in runs)
        ours, peer = middle(runs, "ours", "{:,.0f}/s"), middle(runs, "peer", "{:,.0f}/s")
        cpu = statistics.median(run["cpu"] for run in runs)
        ours = f"{ours}, {cpu:.0f} µs CPU"
        work = f"decision, {kind}, {in_flight} x {BATCH}"
        target, reached = "-", "-"
        if kind == "SQLite":
            target = ">= 30,000/s"
            reached = met(statistics.median(run["ours"] for run in runs) >= 30_000)
        yield work, ours, f"{peer} naive", f"{ratio:.1f}x", target, reached
        if kind == "SQLite":
            share = statistics.median(run["ours"] / run["floor"] for run in runs)
            floor = f"{middle(runs, 'floor', '{:,.0f}/s')} floor"
            yield "  beside the raw driver", "", floor, f"{share:.2f}x", "-", "-"


def service(results: dict[str, list[Measured]]) -> Iterator[Line]:
    for connections in results["http"][0]:
        runs = [run[connections] for run in results["http"]]
        ratio = statistics.median(run["ratio"] for run in runs)
        sides = [[run[side] for run in runs] for side in ("ours", "direct")]
        both = [
            f"{middle(side, 'per_s', '{:,.0f}/s')}, "
            f"{statistics.median(r['cpu_us'] for r in side):.0f} µs CPU"
            for side in sides
        ]
        work = f"HTTP -> SQLite -> HTTP, {connections} connections"
        yield work, both[0], f"{both[1]} no gateway", f"{ratio:.2f}x", ">= 0.6x", met(ratio >= 0.6)
        waits = [
            " / ".join(f"{statistics.median(r[p] for r in side):.0f}" for p in ("p50_ms", "p99_ms"))
            for side in sides
        ]
        yield "  answered after, p50 / p99 ms", waits[0], waits[1], "", "-", "-"
    runs = results["file"]
    sizes = list(runs[0]["sizes"])
    peaks = {size: statistics.median(run["sizes"][size]["mib"] for run in runs) for size in sizes}
    rate = [run["sizes"][sizes[-1]] for run in runs]
    growth = peaks[sizes[-1]] / peaks[sizes[0]]
    yield f"file of {int(sizes[-1]):,} events", middle(rate, "per_s", "{:,.0f}/s"), "", "", "-", "-"
    listed = " ".join(f"{peak:.0f}" for peak in peaks.values())
    at = ", ".join(f"{int(size):,}" for size in sizes)
    work = "  peak memory, MiB"
    yield work, listed, f"at {at}", f"{growth:.2f}x", "flat (<= 1.3x)", met(growth <= 1.3)


def queues(results: dict[str, list[Measured]]) -> Iterator[Line]:
    runs = results["sqs"]
    peer = [run["boto3"] for run in runs]
    for way, store in (("memory", "memory"), ("sqlite", "SQLite")):
        ours = [run[way] for run in runs]
        ratio = statistics.median(
            b["cpu_us"] / a["cpu_us"] for a, b in zip(ours, peer, strict=True)
        )
        both = [
            f"{1e6 / statistics.median(r['cpu_us'] for r in side):,.0f}/s a core, "
            f"{middle(side, 'cpu_us', '{:.0f} µs')} CPU"
            for side in (ours, peer)
        ]
        work = f"SQS -> {store}, decided and deleted"
        yield work, both[0], f"{both[1]} boto3, deletes only", f"{ratio:.1f}x", "-", "-"
        rates = [middle(side, "per_s", "{:,.0f}/s") for side in (ours, peer)]
        yield "  on an emulator that takes its time", *rates, "", "-", "-"
        calls = [f"{statistics.median(r['calls'] for r in side):.3f}" for side in (ours, peer)]
        yield "  calls of AWS for an event", *calls, "", "-", "-"


def weights(results: dict[str, list[Measured]]) -> Iterator[Line]:
    runs = results["memory-keys"]
    weight = statistics.median(run["bytes per key"] for run in runs)
    ours = middle(runs, "bytes per key", "{:.0f} B")
    yield f"memory, a key of {runs[0]['keys']:,}", ours, "", "", "<= 150 B", met(weight <= 150)
    for part, what in (("store", "claim + commit"), ("whole", "whole decision")):
        costs = {size: statistics.median(run[part][size] for run in runs) for size in runs[0][part]}
        growth = max(costs.values()) / min(costs.values())
        listed = " ".join(f"{cost:.1f}" for cost in costs.values())
        sizes = f"at {', '.join(size.replace('e+0', 'e') for size in costs)}"
        work = f"memory, {what}, µs"
        yield work, listed, sizes, f"{growth:.2f}x", "flat (<= 1.3x)", met(growth <= 1.3)
    last = [*runs[0]["store"]][-1]
    growth = statistics.median(run["forgetting"] / run["store"][last] for run in runs)
    ours = middle(runs, "forgetting", "{:.1f} µs")
    work = "memory, claim + commit while windows end"
    before = statistics.median(run["store"][last] for run in runs)
    yield (
        work,
        ours,
        f"{before:.1f} µs before",
        f"{growth:.2f}x",
        "flat (<= 1.3x)",
        met(growth <= 1.3),
    )
    runs = results["sqlite-bytes"]
    ours = middle(runs, "with memo", "{:.0f} B")
    without = f"{middle(runs, 'without memo', '{:.0f} B')} without memo"
    yield f"SQLite, a key of {runs[0]['keys']:,}", ours, without, "", "-", "-"
    runs = results["sqlite-flat"]
    sizes = runs[0]["sizes"]
    listed = " ".join(f"{size / 2**20:.1f}" for size in sizes.values())
    growth = statistics.median(run["ratio"] for run in runs)
    work = f"SQLite, MiB after n x {runs[0]['keys']:,} keys"
    yield (
        work,
        listed,
        f"at {', '.join(sizes)}",
        f"{growth:.2f}x",
        "flat (<= 1.3x)",
        met(growth <= 1.3),
    )


Tell = Callable[[dict[str, list[Measured]]], Iterator[Line]]
TABLES: dict[str, tuple[Tell, Sequence[str]]] = {
    "keys": (keys, [name for name in ROWS if name.startswith("key-")]),
    "decisions": (decisions, ["memory-1", "memory-4", "sqlite-1", "sqlite-4"]),
    "service": (service, ["http", "file"]),
    "queues": (queues, ["sqs"]),
    "weights": (weights, ["memory-keys", "sqlite-bytes", "sqlite-flat"]),
    "stores": (stores.lines, [*stores.ROWS]),
    "watch": (watch_path.lines, [*watch_path.ROWS]),
}
"""What is told of the measured rows, and which ones it needs."""


def heading(repeats: int, *, quick: bool) -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "machine": f"{platform.system()} {platform.machine()}",
        "repeats": repeats,
        "quick": quick,
    }


def run_row(name: str, *, quick: bool) -> Measured:
    command = [sys.executable, __file__, "--row", name, *(["--quick"] if quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    measured: Measured = json.loads(done.stdout)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure, and print one table.")
    parser.add_argument("--quick", action="store_true", help="less of everything, for a first look")
    parser.add_argument("--repeats", type=int, help="runs of each row (3, or 1 if quick)")
    parser.add_argument("--row", choices=ROWS, help="measure one row here, and print JSON")
    parser.add_argument(
        "--only",
        choices=TABLES,
        nargs="+",
        default=[*TABLES],
        metavar="TABLE",
        help=f"a part of the table: {', '.join(TABLES)}",
    )
    given = parser.parse_args()
    if given.row:
        print(json.dumps(ROWS[given.row](quick=given.quick)))
        return
    repeats = given.repeats or (1 if given.quick else 3)
    machine = heading(repeats, quick=given.quick)
    results: dict[str, list[Measured]] = {
        name: [] for table in given.only for name in TABLES[table][1]
    }
    for number in range(repeats):
        for name, runs in results.items():
            print(f"\r\x1b[K{number + 1}/{repeats} {name}", end="", file=sys.stderr, flush=True)
            runs.append(run_row(name, quick=given.quick))
    print("\r\x1b[K", end="", file=sys.stderr)
    print(
        f"oncebridge bench: {machine['cores']} cores (load {machine['load']}), "
        f"{machine['machine']}, Python {machine['python']}, SQLite {machine['sqlite']}; "
        f"medians of {repeats}{', quick' if given.quick else ''}\n"
    )
    table = [line for name in given.only for line in TABLES[name][0](results)]
    show(table)
    saved = {"machine": machine, "table": table, "results": results}
    (build() / "bench.json").write_text(json.dumps(saved, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
