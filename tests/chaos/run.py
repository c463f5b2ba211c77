"""
The long run, as a table: `make chaos`, which is `python -m tests.chaos.run`.

Exit code 0 means that nothing was lost, nothing was repeated without an excuse, both
controls were convicted, and the simulation found nothing.
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import SystemRandom

from . import service
from .harness import Report, Run, run
from .service import ServiceReport, ServiceRun

_ROOT = Path(__file__).parents[2]
_HEADINGS = ("run", "store", "events", "kills/stops/terms", "s", "copies/s")
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
    parser.add_argument("--events", type=int, default=100_000, help="distinct events")
    parser.add_argument("--kills", type=int, default=150, help="how many workers get SIGKILL")
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(2**32))
    parser.add_argument("--sim-seeds", type=int, default=50_000, help="runs of the simulation")
    parser.add_argument("--quick", action="store_true", help="5000 events, 50 kills, 2000 runs")
    asked = parser.parse_args(argv)
    if asked.quick:
        asked.events, asked.kills, asked.sim_seeds = 5000, 50, 2000
    return asked


def _plans(asked: argparse.Namespace) -> Iterator[tuple[str, Run | ServiceRun]]:
    seed, events, kills = asked.seed, asked.events, asked.kills
    # An hour for a run that takes minutes: only one that is stuck gets there.
    limit_s = 600 + events / 30
    yield (
        "kill and freeze",
        Run(
            seed=seed, events=events, kills=kills, stops=kills // 10, unclear=0.001, limit_s=limit_s
        ),
    )
    yield (
        "leave",
        Run(
            seed=seed,
            events=max(events // 5, 2000),
            terms=max(kills // 3, 10),
            lease_s=7,
            sink_timeout_s=5,
            visibility_s=8,
            limit_s=limit_s,
        ),
    )
    # The whole service between HTTP on both sides; half as many events, as each is a request.
    for name, spool in (("service, kill", False), ("service, kill, spool", True)):
        plan = ServiceRun(seed=seed, events=events // 2, kills=kills, spool=spool, limit_s=limit_s)
        yield name, plan
    yield (
        "service, leave",
        ServiceRun(
            seed=seed,
            events=max(events // 10, 2000),
            terms=max(kills // 3, 10),
            lease_s=15,
            sink_timeout_s=10,
            commit_budget_s=4,
            limit_s=limit_s,
        ),
    )
    yield "mark before", Run(seed=seed, kind="controls:mark-before", events=2000, kills=25)
    yield "mark after", Run(seed=seed, kind="controls:mark-after", events=2000, kills=25)


def _verdict(report: Report | ServiceReport) -> tuple[str, bool]:
    """Say in a word how it went, and whether that is as it should be."""
    judged = report.judgement
    if isinstance(report, Report) and report.run.kind.startswith("controls:"):
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
        "sqlite",
        str(report.run.events),
        f"{report.kills}/{report.stops}/{report.terms}",
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
