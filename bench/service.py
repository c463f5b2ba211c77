"""The service as it is run: HTTP in and out, and a file through it."""

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import http_path
from table import Effort, Line, Measured, Results, Topic, at_least, build, met, middle, times
from traffic import make_events

CONNECTIONS = (64, 256)
AIM = 0.75
FLAT = 1.3


def http(effort: Effort) -> Measured:
    """HTTP in, SQLite, HTTP out, against uvicorn and aiohttp with nothing in between."""
    events = make_events(10_000 if effort.quick else 30_000)
    measured = {}
    for connections in CONNECTIONS:
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


def file(effort: Effort) -> Measured:
    """A file through SQLite into a file: events a second, and the most memory it took."""
    # SQLite's own cache (64 MiB) is full after a few hundred thousand keys.
    sizes = [100_000, 200_000] if effort.quick else [250_000, 500_000]
    measured = {}
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=build(), prefix="bench-") as directory:
            with Path(directory, "in.ndjson").open("wb") as recorded:
                recorded.writelines(short_event(at) for at in range(size))
            measured[str(size)] = through(directory, size)
    return {"sizes": measured}


def through(directory: str, size: int) -> Measured:
    """Run the service on the file there, which holds *size* events."""
    command = [sys.executable, "-m", "oncebridge", "run", "--log-level", "error"]
    command += ["--source", "file:in.ndjson", "--sink", "file:out.ndjson", "--json"]
    command += ["--store", "sqlite:seen.db", "--dead", "sqlite:dead.db"]
    begins = time.perf_counter()
    process = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as out:
        counts = json.loads(out.read())
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    took = time.perf_counter() - begins
    if process.returncode or counts["arrived"] != size:
        raise SystemExit(f"the run of {size} ended with {process.returncode}: {counts}")
    return {
        "per_s": size / took,
        "mib": used.ru_maxrss / 1024,
        "cpu_us": (used.ru_utime + used.ru_stime) / size * 1e6,
        "delivered": counts["delivered"],
    }


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


# --- what is told -----------------------------------------------------------------------


def ratios(results: Results, connections: int) -> list[float]:
    return [run[str(connections)]["ratio"] for run in results["http"]]


def line(results: Results, connections: int, work: str) -> Line:
    runs = [run[str(connections)] for run in results["http"]]
    found = ratios(results, connections)
    ours, floor = (
        f"{middle([run[side] for run in runs], 'per_s', '{:,.0f}/s')}, "
        f"{statistics.median(run[side]['cpu_us'] for run in runs):.0f} µs CPU"
        for side in ("ours", "direct")
    )
    told = times(found), *at_least(found, AIM)
    return Line(work, ours, "", f"{floor} no gateway", *told)


def lines(results: Results) -> Iterator[Line]:
    for connections in CONNECTIONS:
        yield line(results, connections, f"HTTP → SQLite → HTTP, {connections} connections")
        runs = [run[str(connections)] for run in results["http"]]
        ours, direct = (
            " / ".join(
                f"{statistics.median(run[side][at] for run in runs):.0f}"
                for at in ("p50_ms", "p99_ms")
            )
            for side in ("ours", "direct")
        )
        yield Line("  response time, p50 / p99 ms", ours, "", direct)
    runs = results["file"]
    sizes = list(runs[0]["sizes"])
    largest = [run["sizes"][sizes[-1]] for run in runs]
    yield Line(f"file of {int(sizes[-1]):,} events", middle(largest, "per_s", "{:,.0f}/s"))
    growth = [run["sizes"][sizes[-1]]["mib"] / run["sizes"][sizes[0]]["mib"] for run in runs]
    yield Line(
        "  peak memory, MiB",
        " ".join(f"{statistics.median(r['sizes'][size]['mib'] for r in runs):.0f}" for size in sizes),
        f"at {', '.join(f'{int(size):,}' for size in sizes)}",
        "",
        times(growth),
        f"flat (≤ {FLAT}x)",
        met(statistics.median(growth) <= FLAT),
    )  # fmt: skip


TOPIC = Topic(
    "service",
    "Service",
    {"http": http, "file": file},
    lines,
    "HTTP in, a SQLite file with synchronous=FULL, HTTP out, one event per request. The floor is "
    "uvicorn (raw ASGI) that forwards every body with aiohttp. Each connection sends the next event "
    "after the response to the previous one.",
)
