"""
The long run, as a table: `make chaos`, which is `python -m tests.chaos.run`.

Exit code 0 means that nothing was lost, nothing was repeated without an excuse, all
controls were convicted, and the simulation found nothing.
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import SystemRandom
from typing import Any, NamedTuple

from . import service
from .harness import Report, Run, run
from .service import ServiceReport, ServiceRun

_ROOT = Path(__file__).parents[2]
_STORES = ("sqlite", "redis", "postgres", "dynamodb", "s3")
_SHARE = {"dynamodb": 0.5, "s3": 0.2}
"""How much of the work an emulator does in the time that a server needs for all of it."""
_HEADINGS = ("run", "store", "events", "kills/stops/terms/crashes", "s", "copies/s")
_FOUND = ("lost", "extra", "unexplained", "")


def main(argv: Sequence[str] | None = None) -> int:
    asked = _arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is cleaned up
    print(f"seed {asked.seed} (decides events and faults; the timing is the machine's)", flush=True)
    rows: list[tuple[str, ...]] = []
    failed = False
    for name, plan in _plans(asked):
        report = service.run(plan) if isinstance(plan, ServiceRun) else run(plan)
        verdict, is_right = _verdict(report)
        failed |= not is_right
        rows.append((*_row(name, report), verdict))
        if not is_right:
            print(f"{name}: {report.told()}")
        print(f"{name}: {verdict} after {report.seconds:.0f} s", flush=True)
    simulated, is_right = _simulate(asked.sim_seeds)
    failed |= not is_right
    print()
    _print_table([(*_HEADINGS, *_FOUND), *rows])
    print(f"\nsimulation: {simulated}")
    return 1 if failed else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill workers, and look what becomes of events.")
    parser.add_argument("--stores", type=_stores, default=_STORES, help=",".join(_STORES))
    parser.add_argument("--events", type=int, default=100_000, help="distinct events")
    parser.add_argument("--kills", type=int, default=150, help="how many workers get SIGKILL")
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(2**32))
    parser.add_argument("--sim-seeds", type=int, default=50_000, help="runs of the simulation")
    parser.add_argument("--quick", action="store_true", help="5000 events, 50 kills, 2000 runs")
    asked = parser.parse_args(argv)
    if asked.quick:
        asked.events, asked.kills, asked.sim_seeds = 5000, 50, 2000
    return asked


def _stores(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(_STORES):
        raise argparse.ArgumentTypeError(f"no such store: {', '.join(sorted(unknown))}")
    return names


def _plans(asked: argparse.Namespace) -> Iterator[tuple[str, Run | ServiceRun]]:
    for store in asked.stores:
        share = _SHARE.get(store, 1)
        events, kills = int(asked.events * share), int(asked.kills * share)
        size = _Size(asked.seed, max(events, 500), max(kills, 15))
        yield from _of_each_store(store, size)
        yield from _OF_ITS_OWN[store](size)
    seed = asked.seed
    yield "mark before", Run(seed=seed, kind="controls:mark-before", events=2000, kills=25)
    yield "mark after", Run(seed=seed, kind="controls:mark-after", events=2000, kills=25)


class _Size(NamedTuple):
    seed: int
    events: int
    kills: int

    @property
    def limit_s(self) -> float:
        """An hour for a run that takes minutes: only one that is stuck gets there."""
        return 600 + self.events / 30


def _of_each_store(store: str, size: _Size) -> Iterator[tuple[str, Run]]:
    seed, events, kills = size
    yield (
        "kill and freeze",
        Run(
            seed=seed,
            store=store,
            events=events,
            kills=kills,
            stops=kills // 10,
            unclear=0.001,
            limit_s=size.limit_s,
        ),
    )
    yield (
        "leave",
        Run(
            seed=seed,
            store=store,
            events=max(events // 5, 2000),
            terms=max(kills // 3, 10),
            lease_s=7,
            sink_timeout_s=5,
            visibility_s=8,
            limit_s=size.limit_s,
        ),
    )


def _of_sqlite(size: _Size) -> Iterator[tuple[str, Run | ServiceRun]]:
    """Run the whole service between HTTP on both sides; each event is a request, so fewer."""
    seed, events, kills = size
    for name, spool in (("service, kill", False), ("service, kill, spool", True)):
        yield name, _service("sqlite", size, spool=spool)
    yield (
        "service, leave",
        ServiceRun(
            seed=seed,
            events=max(events // 10, 2000),
            terms=max(kills // 3, 10),
            lease_s=15,
            sink_timeout_s=10,
            commit_budget_s=4,
            limit_s=size.limit_s,
        ),
    )
    # The emulators take a hundred events a second or two.
    few, some = max(events // 10, 1500), max(kills // 5, 8)
    yield "bus, queue, kill", _fed("queue", size, events=few, kills=some, services=3)
    calm = {"lease_s": 15, "sink_timeout_s": 10, "commit_budget_s": 4}
    yield "bus, queue, leave", _fed("queue", size, events=few // 2, terms=some, **calm)
    yield "stream, reshard, kill", _fed("stream", size, events=few * 2, kills=some // 2)


def _fed(feed: str, size: _Size, **more: Any) -> ServiceRun:
    return ServiceRun(seed=size.seed, feed=feed, limit_s=size.limit_s, **more)


def _of_redis(size: _Size) -> Iterator[tuple[str, Run | ServiceRun]]:
    yield "service, kill", _service("redis", size)
    yield "kill, and the server", _crashing("redis:always", size)
    # Here what the server forgets may come again; it stands in the table.
    yield "kill, and the server", _crashing("redis", size)
    yield "kill, and the server", _crashing("redis:memory", size)


def _of_postgres(size: _Size) -> Iterator[tuple[str, Run | ServiceRun]]:
    seed, events, kills = size
    yield "service, kill", _service("postgres", size)
    yield "kill, and the server", _crashing("postgres", size)
    joint = Run(
        seed=seed,
        store="postgres",
        sink="statement",
        events=events,
        kills=kills,
        stops=kills // 10,
        limit_s=size.limit_s,
    )
    yield "one transaction (statement)", joint
    for sink in ("statement", "table"):
        yield f"one transaction ({sink}), and the server", _crashing("postgres", size, sink=sink)
    control = {"sink": "statement", "apart": True, "events": 2000, "kills": 25}
    yield "two transactions", Run(seed=seed, store="postgres", **control)


def _of_an_emulator(_: _Size) -> Iterator[tuple[str, Run | ServiceRun]]:
    """Leave it alive: one that keeps its records in memory says nothing about the real one."""
    yield from ()


_OF_ITS_OWN = {
    "sqlite": _of_sqlite,
    "redis": _of_redis,
    "postgres": _of_postgres,
    "dynamodb": _of_an_emulator,
    "s3": _of_an_emulator,
}


def _service(store: str, size: _Size, *, spool: bool = False) -> ServiceRun:
    seed, events, kills = size
    return ServiceRun(
        seed=seed, store=store, events=events // 2, kills=kills, spool=spool, limit_s=size.limit_s
    )


def _crashing(store: str, size: _Size, *, sink: str = "") -> Run:
    seed, events, kills = size
    return Run(
        seed=seed,
        store=store,
        sink=sink,
        events=events // 2,
        kills=kills // 3,
        stops=kills // 30,
        crashes=max(kills // 10, 3),
        limit_s=size.limit_s,
    )


def _verdict(report: Report | ServiceReport) -> tuple[str, bool]:
    """Say in a word how it went, and whether that is as it should be."""
    judged = report.judgement
    if isinstance(report, Report) and report.run.is_control:
        is_before = report.run.kind == "controls:mark-before"
        convicted = bool(judged.lost if is_before else judged.unexplained)
        return "convicted" if convicted else "NOT CONVICTED", convicted
    # Nobody's death excuses a worker that was asked to leave.
    is_right = not judged.violations and not (report.terms and judged.extra)
    return "right" if is_right else "VIOLATED", is_right


def _row(name: str, report: Report | ServiceReport) -> tuple[str, ...]:
    judged = report.judgement
    why = ", ".join(f"{count} {excuse}" for excuse, count in sorted(judged.excuses.items()))
    return (
        name,
        report.store,
        str(report.run.events),
        f"{report.kills}/{report.stops}/{report.terms}/{report.crashes}",
        f"{report.seconds:.0f}",
        f"{report.copies_per_s:.0f}",
        str(judged.lost),
        f"{judged.extra} ({why})" if why else str(judged.extra),
        str(judged.unexplained),
    )


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _simulate(seeds: int) -> tuple[str, bool]:
    """Run the simulation in a process of its own; give the line that sums it up."""
    result = "it said nothing"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.sim.run", "--seeds", str(seeds)],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("simulation:"):
                result = line.removeprefix("simulation:").strip()
    if process.returncode:
        return f"VIOLATED (exit code {process.returncode}): {result}", False
    return result, True


if __name__ == "__main__":
    sys.exit(main())
