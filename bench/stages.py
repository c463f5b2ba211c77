"""
Where the time of one decision goes, stage by stage.

    python bench/stages.py [--stores memory sqlite redis postgres dynamodb] [--functions]
    python bench/stages.py --http [--functions]

Stages are timed from outside, for whole batches, so that nothing is slowed down by looking: what
goes into the store and the sink is timed on its way, reading and keys are timed by themselves,
and the rest is the gateway's own. CPU is that of this process, with the threads of SQLite;
waiting is what is left of the time, for a disk or for a server. With `--functions` it runs once
more and is looked at a thousand times a second (`sampler`). `--http` does the latter to the
service: HTTP in, SQLite, HTTP out.
"""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import http_path
import sampler
import uvloop
from table import BATCH, HEAD, Line, build, shown
from traffic import RULE, NullSink, make_events
from ways import Address
from ways.gateway import options, url

from oncebridge import Gateway, parse
from oncebridge.events.rules import RuleSet
from oncebridge.service.addresses import StorePlace

STORES = ("memory", "sqlite", "redis", "postgres", "dynamodb")
OPERATIONS = ("claim", "commit", "release", "extend", "remember")
WARM = 2_000
MOST = 24


class Spent:
    """Seconds of a stage: by the wall, and of the processor."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def timed(self, work: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def run(*arguments: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                return await work(*arguments)
            finally:
                self.wall += time.perf_counter() - wall
                self.cpu += time.process_time() - cpu

        return run

    @property
    def waited(self) -> float:
        return max(self.wall - self.cpu, 0.0)


class Watched:
    """A store or sink whose calls are timed."""

    def __init__(self, inner: Any, spent: Mapping[str, Spent]) -> None:
        self._inner = inner
        for name, stage in spent.items():
            setattr(self, name, stage.timed(getattr(inner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


# --- decisions --------------------------------------------------------------------------


@contextmanager
def place(kind: str) -> Iterator[Any]:
    """Open a store of its own, on a server of its own if it needs one."""
    if kind == "sqlite":
        with tempfile.TemporaryDirectory(dir=build(), prefix="bench-") as directory:
            yield StorePlace.of(f"sqlite:{directory}/stages.db").opened
        return
    with import_module("servers").running(kind) as server:
        server.make("stages")
        address = Address(kind, server.port, "stages")
        if kind == "dynamodb":
            import_module("os").environ.update(server.environment)
        yield StorePlace.of(url(address), **options(address)).opened


async def decide(store: Any, events: Sequence[bytes], *, look: bool) -> dict[str, Any]:
    """Decide on *events*; the seconds of each stage, or what was seen by looking."""
    if hasattr(store, "migrate"):
        await store.migrate()
    stages = {name: Spent() for name in (*OPERATIONS, "deliver")}
    sink: Any = NullSink()
    if not look:
        store = Watched(store, {name: stages[name] for name in OPERATIONS})
        sink = Watched(sink, {"deliver": stages["deliver"]})
    whole = Spent()
    async with Gateway(store=store, sink=sink, rules=[RULE]) as gateway:

        async def all_of(part: Sequence[bytes]) -> None:
            for at in range(0, len(part), BATCH):
                await gateway.process(part[at : at + BATCH])

        await all_of(events[:WARM])
        for stage in stages.values():
            stage.wall = stage.cpu = 0.0
        looking = sampler.Sampler() if look else nullcontext()
        with looking as seen:
            await whole.timed(all_of)(events[WARM:])
    return {"stages": stages, "whole": whole, "seen": seen}


def alone(events: Sequence[bytes]) -> tuple[float, float]:
    """Time reading, and keys, by themselves; seconds for all events."""
    rules = RuleSet([RULE], namespace="default")
    reading = keying = 0.0
    for at in range(0, len(events), BATCH):  # all at once would be hard on the garbage collector
        begins = time.thread_time()
        read = [parse(raw, apart=rules.apart) for raw in events[at : at + BATCH]]
        parsed = time.thread_time()
        for event in read:
            rules.terms(event).key_of(event)
        keying += time.thread_time() - parsed
        reading += parsed - begins
    return reading, keying


def measure(kind: str, count: int, *, look: bool) -> dict[str, Any]:
    events = make_events(WARM + count)
    with (
        place(kind) as store,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return {**runner.run(decide(store, events, look=look)), "alone": alone(events[WARM:])}


def stages_of(found: Mapping[str, Any], count: int) -> dict[str, float]:
    """Give microseconds for an event, stage by stage."""
    stages, whole = found["stages"], found["whole"]
    read, key = found["alone"]
    claim, commit, deliver = (stages[name] for name in ("claim", "commit", "deliver"))
    others = [stages[name] for name in OPERATIONS if name not in ("claim", "commit")]
    known = read + key + sum(stage.cpu for stage in stages.values())
    seconds = {
        "read (parse, prove)": read,
        "key (rule, canonical form, hash)": key,
        "claim, CPU": claim.cpu,
        "deliver to a null sink, CPU": deliver.cpu,
        "commit, CPU": commit.cpu,
        "other calls of the store, CPU": sum(stage.cpu for stage in others),
        "the gateway in between (plan, settle), CPU": whole.cpu - known,
        "whole decision, CPU": whole.cpu,
        "claim, waiting": claim.waited,
        "commit, waiting": commit.waited,
        "whole decision": whole.wall,
    }
    return {name: spent / count * 1e6 for name, spent in seconds.items()}


def table(kinds: Sequence[str], count: int) -> None:
    columns = {kind: stages_of(measure(kind, count, look=False), count) for kind in kinds}
    head = HEAD._replace(work="µs of one event", **dict(zip(HEAD._fields[1:], kinds, strict=False)))
    lines = [
        Line(name, *[f"{columns[kind][name]:.1f}" for kind in kinds]) for name in columns[kinds[0]]
    ]
    print("\n".join(shown(head, lines)))


# --- functions --------------------------------------------------------------------------


def tell(seen: Mapping[str, Mapping[str, float]], count: int) -> None:
    """Print the greatest parts: by module, and by function."""
    for title, found in (("module", seen["modules"]), ("function", seen["functions"])):
        whole = sum(found.values())
        most = sorted(found.items(), key=lambda item: -item[1])[:MOST]
        lines = [
            Line(name, f"{spent / count * 1e6:.2f}", f"{spent / whole:.1%}") for name, spent in most
        ]
        print("\n" + "\n".join(shown(Line(title, "µs of CPU", "share"), lines)))


def service(count: int) -> None:
    """Look at the service while HTTP goes in and out."""
    events = make_events(WARM + count)
    with (
        http_path.receiving() as target,
        tempfile.TemporaryDirectory(dir=build(), prefix="bench-") as directory,
    ):
        port = http_path.free_port()
        process = subprocess.Popen(
            [
                *(sys.executable, Path(__file__).resolve(), "--role", "service", "--"),
                *("run", "--log-level", "error", "--preset", "genesys"),
                *("--source", f"http://127.0.0.1:{port}/", "--sink", f"http://127.0.0.1:{target.port}/"),
                *("--store", "sqlite:seen.db", "--dead", "sqlite:dead.db"),
            ],
            cwd=directory,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            http_path.wait_for(port)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(http_path.send(port, "/", events[:WARM], 64))
                process.send_signal(signal.SIGUSR1)  # from now on it looks
                runner.run(http_path.send(port, "/", events[WARM:], 64))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        seen = json.loads(Path(directory, "seen.json").read_text())
    print("HTTP -> SQLite -> HTTP, the service's own CPU")
    tell(seen, count)


def run_service(arguments: Sequence[str]) -> None:
    """Run the command, looked at from the first SIGUSR1 on, and write down what was seen."""
    from oncebridge.cli import main as run

    sys.argv = ["oncebridge", *arguments]
    looking = sampler.Sampler()
    signal.signal(signal.SIGUSR1, lambda *_: looking.start())
    try:
        run()
    finally:
        looking.stop()
        Path("seen.json").write_text(json.dumps(sampler.told(looking)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Where the time of one decision goes.")
    parser.add_argument("--stores", nargs="+", choices=STORES, default=STORES[:4], metavar="STORE")
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--functions", action="store_true", help="and by module and function")
    parser.add_argument("--http", action="store_true", help="the service instead")
    parser.add_argument("--role", choices=["service"], help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        run_service(given.arguments)
    elif given.http:
        service(given.events)
    else:
        table(given.stores, given.events)
        for kind in given.stores if given.functions else ():
            seen = measure(kind, given.events, look=True)["seen"]
            print(f"\n{kind}, profiled")
            tell(sampler.told(seen), given.events)


if __name__ == "__main__":
    main()
