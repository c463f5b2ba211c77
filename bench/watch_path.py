"""
Cost of monitoring: counts, history, a dashboard and Prometheus.

    python bench/run.py --only watch [--quick]

The same work without monitoring (gateways without hooks), and with more and more of it. All
ways are ready at the same time and are loaded one after the other, round by round, so that a
busy moment of the machine does not hit one of them alone; each is compared with the bare one of
its own round. `decisions` is the memory store in this process, where there is nothing else to
pay for; `service` is HTTP in, SQLite, HTTP out, as in `http_path`, and so is `seen`, with a
browser and a Prometheus that ask every few seconds: there, each way is loaded for longer.
"""

import argparse
import asyncio
import contextlib
import gc
import gzip
import http.client
import itertools
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import http_path
import uvloop
from processors import cpu_s
from table import BATCH, Effort, Line, Measured, Results, Topic, build, met
from traffic import RULE, NullSink, make_events

from oncebridge import Gateway
from oncebridge.base.clock import SystemDice, system_clock
from oncebridge.observe.report import State
from oncebridge.service import config
from oncebridge.service.monitor import Monitor
from oncebridge.stores.memory import MemoryStore

HERE = Path(__file__)
SLICE = 1_000
"""So short that what else the machine does hits all alike."""
AIM, AIM_SEEN = 0.95, 0.97
PAGE_EVERY_S, SCRAPE_EVERY_S = 2.0, 5.0

WAYS = {
    "bare": "no monitoring",
    "counts": "counts",
    "sample": "counts, history of some",
    "all": "counts, history of all",
    "seen": "counts, history of some, dashboard open, Prometheus",
}


# --- decisions --------------------------------------------------------------------------


def decisions(effort: Effort) -> Measured:
    """Decide in memory, in turn in every way; the CPU time an event takes."""
    count = 4_000
    took: dict[str, list[float]] = {way: [] for way in WAYS if way != "seen"}
    for number in range(6 if effort.quick else 20):
        events = make_events(count, first=number * count)
        for way in _turned([*took], number):
            gc.collect()
            took[way].append(asyncio.run(_decide(way, events)) / count * 1e6)
    bare = [(0.0, cost) for cost in took.pop("bare")]
    return {"cpu_us": took, "bare": dict.fromkeys(took, bare)}


async def _decide(way: str, events: Sequence[bytes]) -> float:
    store = MemoryStore()
    watch = None if way == "bare" else _watch(store, "off" if way == "counts" else way)
    gateway = Gateway(
        store=store,
        sink=NullSink(),
        rules=[RULE],
        hooks=[watch.decided] if watch else [],
        trip_hooks=[watch.travelled] if watch else [],
    )
    async with gateway:
        begins = time.process_time()
        for at in range(0, len(events), BATCH):
            await gateway.process(events[at : at + BATCH])
        if watch is not None:
            await watch.record()
        took = time.process_time() - begins
    if watch is not None:
        rules = watch.report().counts.routes["default"].rules
        counted = sum(sum(verdicts.values()) for verdicts in rules.values())
        if counted != len(events):
            raise SystemExit(f"{counted} of {len(events)} events were counted")
    return took


def _watch(store: MemoryStore, history: str) -> Monitor:
    setup = config.load(None, environment={}, flags={"store": "memory:", "history": history})
    return Monitor(
        setup.config,
        store,
        look=lambda _: State("bench", "bench", 1, "0", 0, 0),
        books=dict,
        rules={"default": [RULE]},
        clock=system_clock,
        dice=SystemDice(),
    )


# --- the service ------------------------------------------------------------------------


def service(effort: Effort) -> Measured:
    """Send to services that nobody looks at."""
    ways = [way for way in WAYS if way not in ("bare", "seen")]
    return _in_turn(ways, 2 if effort.quick else 8, SLICE)


def seen(effort: Effort) -> Measured:
    """Send to a service that is looked at every two seconds: each slice has to take that long."""
    return _in_turn(["seen"], *((2, 4 * SLICE) if effort.quick else (5, 12 * SLICE)))


def _in_turn(ways: Sequence[str], rounds: int, count: int) -> Measured:
    """
    Send *count* events to services in turn; events a second and CPU time of each, by the round.

    Each is compared with what the bare one did right before and after it: whatever else the
    machine does, it does to both.
    """
    measured: Measured = {name: {way: [] for way in ways} for name in ("per_s", "cpu_us", "bare")}
    measured["looks"] = []
    fresh = _slices()
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(http_path.receiving())
        running = {way: stack.enter_context(_running(way, target.port)) for way in ("bare", *ways)}
        for road in running.values():  # files are made, statements prepared
            _send(road, fresh(2 * SLICE))
        after = _send(running["bare"], fresh(count))
        for way in (way for number in range(rounds) for way in _turned(ways, number)):
            before, events = after, fresh(count)
            looking = _looking(running[way], measured["looks"]) if way == "seen" else None
            with looking or contextlib.nullcontext():
                rate, cpu = _send(running[way], events)
            after = _send(running["bare"], fresh(count))
            measured["per_s"][way].append(rate)
            measured["cpu_us"][way].append(cpu)
            both = zip(before, after, strict=True)
            measured["bare"][way].append([statistics.mean(pair) for pair in both])
    return measured


def _slices() -> Callable[[int], list[bytes]]:
    """Make new events, every fifth of them a duplicate of another one."""
    numbers = itertools.count(0, 20 * SLICE)
    return lambda count: make_events(count, first=next(numbers), back=103)


def _turned(ways: Sequence[str], number: int) -> list[str]:
    """Begin with another one in every round: who comes first may have it better."""
    at = number % len(ways)
    return [*ways[at:], *ways[:at]]


class Road(NamedTuple):
    """One service: its process, and where it is asked."""

    pid: int
    port: int
    dashboard: int


@contextlib.contextmanager
def _running(way: str, target: int) -> Iterator[Road]:
    port, dashboard = http_path.free_port(), http_path.free_port()
    more: Mapping[str, Sequence[str]] = {
        "bare": ["--share-counts", "false"],
        "counts": [],
        "sample": ["--history", "sample"],
        "all": ["--history", "all"],
        "seen": ["--dashboard", f"127.0.0.1:{dashboard}"],
    }
    role = ["--role", "bare", "--"] if way == "bare" else ["--role", "ours", "--"]
    command = [
        *(sys.executable, HERE, *role, "run", "--log-level", "error"),
        *("--source", f"http://127.0.0.1:{port}/", "--preset", "genesys"),
        *("--store", "sqlite:seen.db", "--dead", "sqlite:dead.db"),
        *("--sink", f"http://127.0.0.1:{target}/", *more[way]),
    ]
    with tempfile.TemporaryDirectory(dir=build(), prefix="bench-") as directory:
        process = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL)
        try:
            http_path.wait_for(port)
            yield Road(process.pid, port, dashboard)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _send(road: Road, events: Sequence[bytes]) -> tuple[float, float]:
    """Send *events*; how many a second it took, and its CPU time for one in microseconds."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        before, began = cpu_s(road.pid), time.perf_counter()
        runner.run(http_path.send(road.port, "/", events, 64))
        took, cpu = time.perf_counter() - began, cpu_s(road.pid) - before
    return len(events) / took, cpu / len(events) * 1e6


@contextlib.contextmanager
def _looking(road: Road, looks: list[Measured]) -> Iterator[None]:
    """Ask for the overview as an open browser does, and for the metrics as Prometheus does."""
    over = threading.Event()

    def look(path: str, every_s: float, headers: Mapping[str, str]) -> None:
        wait_s = every_s / 2
        while not over.wait(wait_s):
            began, wait_s = time.perf_counter(), every_s
            body = _get(road.dashboard, path, headers)
            looks.append({"path": path, "ms": (time.perf_counter() - began) * 1000, "bytes": body})

    browser = ("/", PAGE_EVERY_S, {"Accept-Encoding": "gzip", "X-Live": "1"})
    prometheus = ("/metrics", SCRAPE_EVERY_S, {"Accept-Encoding": "gzip"})
    threads = [threading.Thread(target=look, args=one) for one in (browser, prometheus)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _get(port: int, path: str, headers: Mapping[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=dict(headers))
        answer = connection.getresponse()
        body = answer.read()
        plain = gzip.decompress(body) if answer.headers["Content-Encoding"] == "gzip" else body
        if answer.status != 200 or b"oncebridge" not in plain:
            raise SystemExit(f"{path} was answered with {answer.status}")
        return len(body)


def run_bare(arguments: Sequence[str]) -> None:
    """Run the command with gateways without hooks."""
    import oncebridge.service.service
    from oncebridge.cli import main

    make = oncebridge.service.service.make_router

    def without_hooks(setup: Any, **more: Any) -> Any:
        return make(setup, clock=more["clock"])

    oncebridge.service.service.make_router = without_hooks  # type: ignore[assignment]
    sys.argv = ["oncebridge", *arguments]
    main()


# --- what is told -----------------------------------------------------------------------


def lines(results: Results) -> Iterator[Line]:
    memory = _pairs(results["watch-memory"], "cpu_us")
    for way, pairs in memory.items():
        yield _compared(f"decision, memory, CPU: {WAYS[way]}", pairs)
    for row in ("watch-http", "watch-seen"):
        rates, costs = (_pairs(results[row], name) for name in ("per_s", "cpu_us"))
        for way, pairs in rates.items():
            aim = AIM_SEEN if way == "seen" else AIM
            yield _compared(f"HTTP → SQLite → HTTP: {WAYS[way]}", pairs, aim)
            yield _compared("  in CPU time", costs[way])
    looks = [look for run in results["watch-seen"] for look in run["looks"]]
    for path in sorted({look["path"] for look in looks}):
        its = [look for look in looks if look["path"] == path]
        ms, size = (statistics.median(look[name] for look in its) for name in ("ms", "bytes"))
        yield Line(f"  GET {path} under load", f"{ms:.0f} ms, {size:,.0f} B")


def line(results: Results, work: str) -> Line:
    """Tell what a service costs that is looked at."""
    return _compared(work, _pairs(results["watch-seen"], "per_s")["seen"], AIM_SEEN)


def ratios(results: Results) -> list[float]:
    return [own / bare for own, bare in _pairs(results["watch-seen"], "per_s")["seen"]]


def _pairs(runs: Sequence[Measured], name: str) -> dict[str, list[tuple[float, float]]]:
    """Give what each way measured in each round, beside what the bare one did."""
    at = ("per_s", "cpu_us").index(name)
    return {
        way: [
            (value, bare[at])
            for run in runs
            for value, bare in zip(run[name][way], run["bare"][way], strict=True)
        ]
        for way in runs[0][name]
    }


def _compared(work: str, pairs: Sequence[tuple[float, float]], aim: float | None = None) -> Line:
    """Compare rates with *aim*; without, CPU times."""
    form = "{:,.1f} µs" if aim is None else "{:,.0f}/s"
    ratios = sorted(bare / own if aim is None else own / bare for own, bare in pairs)
    ratio = statistics.median(ratios)
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    own, bare = (form.format(statistics.median(side)) for side in zip(*pairs, strict=True))
    told = f"{ratio:.3f}x ({low:.2f}-{high:.2f})"
    judged = () if aim is None else (f"≥ {aim}x", met(ratio >= aim))
    return Line(work, own, "", f"{bare} no monitoring", told, *judged)


TOPIC = Topic(
    "watch",
    "Cost of monitoring",
    {"watch-memory": decisions, "watch-http": service, "watch-seen": seen},
    lines,
    "Each variant compared with the same gateway without hooks, in alternating pairs; the middle half of "
    "the ratios in brackets.",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=["bare", "ours"], required=True)
    parser.add_argument("arguments", nargs="*")
    given = parser.parse_args()
    if given.role == "bare":
        run_bare(given.arguments)
        return
    from oncebridge.cli import main as run

    sys.argv = ["oncebridge", *given.arguments]
    run()


if __name__ == "__main__":
    main()
