"""
The shared stores beside what people would use instead, each on one server.

    python bench/run.py --row redis [--quick]

A row starts one server and decides on the same kind of events in several ways (`ways/`), one
after the other, each in a process of its own and in a database, table or bucket of its own:

    ours-1, -10, -100, -4x100   the gateway with batches of that size; the last: four at once
    powertools                  the idempotency utility of Powertools for AWS Lambda
    connect                     the dedupe of Redpanda Connect
    single                      a claim and a commit for each event, with the driver alone
    floor-1                     the same two calls for bare keys, one at a time
    floor-100                   the same two batched round trips, with the driver alone

A fifth of the events are duplicates, and each way has to find them all.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from table import (
    BATCH,
    COST,
    Effort,
    Line,
    Measure,
    Measured,
    Results,
    Topic,
    at_least,
    at_most,
    middle,
    times,
)
from ways import WAYS

HERE = Path(__file__).parent


def row(kind: str) -> Measure:
    def measure(effort: Effort) -> Measured:
        # Here and not above: rows without a server should not pay for the drivers.
        servers = import_module("servers")
        measured: Measured = {}
        with servers.running(kind) as server:
            for name, way in WAYS[kind].items():
                if way.is_there:
                    server.make(name)
                    words = [kind, name, str(server.port), name]
                    measured[name] = run_way(words, server.environment, quick=effort.quick)
                    measured[name]["weight"] = server.weigh(name)
            return {"server": server.about, "ways": measured}

    return measure


def run_way(words: list[str], environment: dict[str, str], *, quick: bool) -> Measured:
    command = [sys.executable, "-m", "ways", *words, *(["--quick"] if quick else [])]
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=HERE, env=env, stdout=subprocess.PIPE, check=True)
    measured: Measured = json.loads(done.stdout)
    return measured


KINDS = {"memory-peers": "memory", **{kind: kind for kind in WAYS if kind != "memory"}}


# --- the table --------------------------------------------------------------------------


UNITS = {"rate": "", "cpu": " less CPU", "cost": COST, "cpu cost": " its CPU"}
COSTS = ("cost", "cpu cost")
"""The less, the better."""


class Beside(NamedTuple):
    """One way of ours beside another one, and what is aimed at."""

    ours: str
    peer: str
    by: str = "rate"
    """
    `rate`: events per second; `cpu`: processor time.

    Beside a floor: `cost`, time; `cpu cost`, processor time.
    """
    aim: float | None = None

    def ratio(self, run: Measured) -> float:
        ours, peer = run[self.ours], run[self.peer]
        match self.by:
            case "cpu":
                return float(peer["cpu"] / ours["cpu"])
            case "cost":
                return float(peer["rate"] / ours["rate"])
            case "cpu cost":
                return float(ours["cpu"] / peer["cpu"])
            case _:
                return float(ours["rate"] / peer["rate"])

    def judge(self, ratios: Sequence[float]) -> tuple[str, str]:
        if self.aim is None:
            return "", ""
        judged = at_most if self.by in COSTS else at_least
        return judged(ratios, self.aim, UNITS[self.by])


TITLES = {
    "memory-peers": "memory",
    "redis": "Redis",
    "postgres": "PostgreSQL",
    "dynamodb": "DynamoDB",
    "s3": "S3",
}
BATCHES = {
    "ours-1": "1 x 1",
    "ours-10": "1 x 10",
    "ours-100": f"1 x {BATCH}",
    "ours-4x100": f"4 x {BATCH}",
}
PEERS = {
    "powertools": "Powertools",
    "connect": "Redpanda Connect",
    "single": "the driver, one by one",
    "floor-1": "the driver's two calls",
    "floor-100": "the driver, in batches",
}
FLOORS = ("floor-1", "floor-100")
REDIS_POWERTOOLS = Beside("ours-100", "powertools", aim=20)
REDIS_CONNECT = Beside("ours-100", "connect", aim=3)
REDIS_FLOOR = Beside("ours-100", "floor-100", by="cost", aim=3)
REDIS_FOUR = Beside("ours-4x100", "powertools", aim=28)
REDIS_ONE = Beside("ours-1", "powertools", aim=1.8)
REDIS_ONE_CPU = Beside("ours-1", "floor-1", by="cpu cost", aim=1.3)
POSTGRES_SINGLE = Beside("ours-100", "single", aim=20)
POSTGRES_ONE = Beside("ours-1", "single", aim=0.8)
DYNAMODB_CPU = Beside("ours-100", "powertools", by="cpu", aim=45)
MEMORY_POWERTOOLS = Beside("ours-100", "powertools", aim=7)
MEMORY_CONNECT = Beside("ours-100", "connect", aim=3.5)
MEMORY_ONE = Beside("ours-1", "powertools", aim=2.5)
COMPARED = {
    "memory-peers": [MEMORY_POWERTOOLS, MEMORY_CONNECT, MEMORY_ONE],
    "redis": [
        REDIS_POWERTOOLS,
        REDIS_CONNECT,
        Beside("ours-100", "single"),
        REDIS_FLOOR,
        REDIS_FOUR,
        Beside("ours-10", "powertools"),
        REDIS_ONE,
        REDIS_ONE_CPU,
        Beside("ours-1", "single"),
    ],
    "postgres": [
        POSTGRES_SINGLE,
        Beside("ours-100", "floor-100", by="cost"),
        Beside("ours-4x100", "single"),
        Beside("ours-10", "single"),
        POSTGRES_ONE,
    ],
    "dynamodb": [
        DYNAMODB_CPU,
        Beside("ours-100", "powertools"),
        Beside("ours-100", "single"),
        Beside("ours-100", "floor-100", by="cost"),
        Beside("ours-4x100", "powertools"),
        Beside("ours-10", "powertools"),
        Beside("ours-1", "powertools"),
    ],
    "s3": [
        Beside("ours-100", "single", by="cpu"),
        Beside("ours-100", "single"),
        Beside("ours-100", "floor-100", by="cost"),
        Beside("ours-10", "single"),
        Beside("ours-1", "single"),
    ],
}


def lines(results: Results) -> Iterator[Line]:
    """Turn what was measured into lines of the table."""
    for name, title in TITLES.items():
        runs = [run["ways"] for run in results[name]]
        told = ""
        for beside in COMPARED[name]:
            work = f"decision, {title}, {BATCHES[beside.ours]}" if beside.ours != told else ""
            told = beside.ours
            yield compared(beside, runs, work)
        server = results[name][0]["server"]
        if server:
            yield from taken(runs)
            yield Line(f"  on {server}")


def ratios(results: Results, name: str, beside: Beside) -> list[float]:
    """Give one comparison of the row *name*, run by run; none if the peer is not installed."""
    runs = [run["ways"] for run in results[name]]
    return [beside.ratio(run) for run in runs if beside.peer in run]


def line(results: Results, name: str, beside: Beside, work: str, floor: str = "") -> Line:
    """Tell one comparison of the row *name*, and the way called *floor* beside it."""
    runs = [run["ways"] for run in results[name]]
    told = compared(beside, runs, work)
    return told._replace(floor=speed(runs, floor)) if floor in runs[0] else told


def compared(beside: Beside, runs: Sequence[Measured], work: str) -> Line:
    """Tell one comparison; without *work*, of what stands in the line above."""
    peer = PEERS[beside.peer]
    first = work or f"  vs. {peer}"
    ours = speed(runs, beside.ours) if work else ""
    if beside.peer not in runs[0]:
        return Line(first, ours, f"{peer}: not measured")
    ratios = [beside.ratio(run) for run in runs]
    rates = speed(runs, beside.peer)
    is_floor = beside.peer in FLOORS
    theirs = f"{rates} {peer}" if work and not is_floor else rates
    sides = ("", theirs) if is_floor else (theirs, "")
    return Line(first, ours, *sides, times(ratios, UNITS[beside.by]), *beside.judge(ratios))


def speed(runs: Sequence[Measured], way: str) -> str:
    found = [run[way] for run in runs]
    cpu = statistics.median(one["cpu"] for one in found)
    return f"{middle(found, 'rate', '{:,.0f}/s')}, {cpu:,.0f} µs CPU"


def taken(runs: Sequence[Measured]) -> Iterator[Line]:
    """Tell what an event costs the network, and what a key takes on the server."""
    for field, form, work in (
        ("trips", "{:.2f}", "  round trips per event, at 1, 10, 100"),
        ("weight", "{:.0f}", "  bytes per key on the server"),
    ):
        values = {
            way: form.format(statistics.median(run[way][field] for run in runs))
            for way in runs[0]
            if field in runs[0][way]
        }
        mine = [values[way] for way in ("ours-1", "ours-10", "ours-100")]
        peers = {way: PEERS[way] for way in PEERS if way in values and way not in FLOORS}
        yield Line(
            work,
            " ".join(mine) if field == "trips" else mine[-1],
            ", ".join(f"{values[way]} {peer}" for way, peer in peers.items()),
            ", ".join(values[way] for way in FLOORS if way in values),
        )


TOPIC = Topic(
    "stores",
    "Shared stores and alternatives",
    {name: row(kind) for name, kind in KINDS.items()},
    lines,
    f"4 x {BATCH}: four batches of {BATCH} events at a time. CPU is that of the client. The floor is the driver "
    f"alone: the same two batched round trips with bare keys, {BATCH} at a time. Redpanda Connect "
    "records before it delivers, and does not commit. DynamoDB and S3 are emulators on the same "
    "machine: compare the client's CPU there.",
)
