"""
Several processes that decide on one store: how much faster two and four of them are.

Clients and server share the processors of this machine, so what is left for more processes ends
with them. The server's CPU for an event says what one server could do if it had processors of
its own: Redis decides on one of them, PostgreSQL on all.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from processors import family_cpu_s
from table import Effort, Line, Measure, Measured, Results, Topic, spread, times

HERE = Path(__file__).parent
KINDS = {"scaling-redis": ("redis", "Redis"), "scaling-postgres": ("postgres", "PostgreSQL")}
PROCESSES = (1, 2, 4)


def row(kind: str) -> Measure:
    def measure(effort: Effort) -> Measured:
        seconds = 1.0 if effort.quick else 3.0
        measured = {}
        with import_module("servers").running(kind) as server:
            for count in PROCESSES:
                name = f"crew{count}"
                server.make(name)
                measured[str(count)] = together(server, kind, name, count, seconds)
        return {"server": server.about, "processes": measured, "cores": os.cpu_count()}

    return measure


def together(server: Any, kind: str, name: str, count: int, seconds: float) -> Measured:
    """Let *count* processes decide at the same time."""
    crew = [
        subprocess.Popen(
            [sys.executable, "-m", "ways.crew", kind, str(server.port), name, str(n), str(seconds)],
            cwd=HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(count)
    ]  # fmt: skip
    try:
        if any(one.stdout.readline() != "ready\n" for one in crew):
            raise SystemExit("a process did not get ready")
        before = family_cpu_s(server.pid)
        for one in crew:
            one.stdin.write("go\n")
            one.stdin.flush()
        done = [json.loads(one.stdout.readline()) for one in crew]
        spent = family_cpu_s(server.pid) - before
        for one in crew:
            one.communicate(timeout=60)
    finally:
        for one in crew:
            one.kill()
            one.wait()
    events = sum(each["events"] for each in done)
    rate = sum(each["rate"] for each in done)
    cpu = sum(each["cpu"] * each["events"] for each in done) / events
    server_cpu = spent / events * 1e6
    busy = rate * (cpu + server_cpu) / 1e6 / (os.cpu_count() or 1)
    return {"rate": rate, "cpu": cpu, "server": server_cpu, "busy": busy, "each": done}


def lines(results: Results) -> Iterator[Line]:
    for name, (_, title) in KINDS.items():
        runs = results[name]
        for count in PROCESSES:
            found = [run["processes"][str(count)] for run in runs]
            alone = [run["processes"]["1"] for run in runs]
            ratios = [a["rate"] / b["rate"] for a, b in zip(found, alone, strict=True)]
            yield Line(
                f"{title}, {count} process{'es' if count > 1 else ''}",
                spread([one["rate"] for one in found], "{:,.0f}/s"),
                spread([one["cpu"] for one in found], "{:.0f} µs"),
                spread([one["server"] for one in found], "{:.0f} µs"),
                f"{statistics.median(one['busy'] for one in found):.0%}",
                times(ratios) if count > 1 else "",
            )
        yield Line(f"  on {runs[0]['server']}")


TOPIC = Topic(
    "scaling",
    "Several processes on one store",
    {name: row(kind) for name, (kind, _) in KINDS.items()},
    lines,
    "Decisions per second of all processes together, each with four batches of 100 in progress. "
    "Clients and server share this machine: when all its processors are busy, more processes do "
    "not help. To estimate a server on its own machine, use its CPU time per event.",
    Line(
        "work",
        "decisions",
        "client's CPU",
        "server's CPU",
        "machine busy",
        "vs. one process",
    ),
)
