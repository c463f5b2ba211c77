"""
The long run, as a table: `make chaos`, which is `python -m tests.chaos.run`.

Real processes that are killed, frozen and asked to leave, on every store; servers that are killed
and wires that are cut under them; every fault of the network at every operation; the tests of the
contract, of order, shadow mode and outages, at full size; the simulation; and everything that has
to be convicted by them: naive workers and mutants. Exit code 0 means that all rows were run, that
nothing was lost, nothing was delivered again without a cause, nothing hung, the simulation found
nothing, and every control was convicted.

The simulation runs beside the other rows, in a process of its own and at a lower priority: its
time is virtual, and the others mostly wait. Rows are saved as they come. A run that was interrupted
goes on with `--resume`: rows of the same commit are kept, right or not. For what failed, the command
that runs it again is printed.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import SystemRandom
from typing import NamedTuple

from tests.sim.run import Simulated, conviction, convictions, simulate

from . import network, page, service, suite
from .harness import Report, run
from .network import NetworkReport
from .plans import STORES, Plan, Size, plans
from .service import ServiceReport, ServiceRun
from .suite import SUITES
from .table import SIMULATION, Row, Rows, commit, joined, shown, simulated, told
from .worker import die_with_parent

_ROOT = Path(__file__).parents[2]
_MODULE = "python -m tests.chaos.run"


_BESIDE = "simulation,mutant"
_PARTS = 10
"""The simulation is so many rows, so that a run that is interrupted keeps most of it."""


class Job(NamedTuple):
    """One row to come."""

    name: str
    run: Callable[[], Row]
    is_beside: bool = False
    """It only computes, and its time is virtual: run it beside the others."""


def main(argv: Sequence[str] | None = None) -> int:
    asked = _arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is cleaned up
    rows = Rows(asked.out, commit())
    if asked.resume:
        if not rows.run:
            print(f"{asked.out} has no run to resume")
            return 2
        asked = _resumed(asked, rows.run)
    jobs = [job for job in _jobs(asked) if _is_wanted(job.name, asked.only)]
    if not jobs:
        print(f"nothing is called {', '.join(asked.only)}; --list tells what there is")
        return 2
    if asked.list:
        print("\n".join(job.name for job in jobs))
        return 0
    names = [job.name for job in jobs]
    is_partial = bool(asked.only) or set(asked.stores) != set(STORES)
    if asked.resume:
        rows.keep_current()
    elif is_partial:
        rows.drop(names)
    else:
        rows.begin(_Again(asked).arguments())
    if asked.beside:
        die_with_parent()
        os.nice(5)
    else:
        print(f"seed {asked.seed} (decides events and faults; the timing is the machine's)")
        print(f"simulated seeds from {asked.first}", flush=True)
    kept = rows.all()
    missing = [job for job in jobs if job.name not in kept]
    try:
        _run(missing, asked, rows, alone=is_partial)
    finally:
        found = [row for row in rows.all().values() if row.name in names]
        if not asked.beside:
            told = f"{len(found)} of {len(jobs)} rows, kept in {asked.out}"
            print(f"\n{shown(joined(found))}\n\n{told}", flush=True)
    if asked.docs:
        page.write_chaos(asked.out)
    return 0 if len(found) == len(jobs) and all(row.is_right for row in found) else 1


def _run(jobs: Sequence[Job], asked: argparse.Namespace, rows: Rows, *, alone: bool) -> None:
    """Run *jobs*, one after the other; unless *alone*, those that may, in a process beside."""
    beside = None
    if not alone and any(job.is_beside for job in jobs):
        jobs = [job for job in jobs if not job.is_beside]
        words = ("-m", "tests.chaos.run", "--beside", "--resume", "--out", str(asked.out))
        beside = subprocess.Popen([sys.executable, *words, "--only", _BESIDE], cwd=_ROOT)
    again = _Again(asked)
    try:
        for job in jobs:
            row = _ended(job, again)
            rows.add(row)
            print(told(row), flush=True)
        if beside is not None:
            beside.wait()
    finally:
        if beside is not None and beside.poll() is None:
            beside.terminate()
            beside.wait()


def _resumed(asked: argparse.Namespace, run: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of an earlier *run*, as far as they decide what is run."""
    before = _arguments(run)
    for name in ("resume", "only", "list", "docs", "out", "beside"):
        setattr(before, name, getattr(asked, name))
    return before


def _ended(job: Job, again: "_Again") -> Row:
    """Run *job*; one that breaks off is a row too, and no reason to leave out the others."""
    began = time.monotonic()
    try:
        return job.run()
    except Exception as error:  # noqa: BLE001 - whatever it is, it stands in the table
        return Row(
            name=job.name,
            what="broken off",
            store="",
            size="",
            seconds=time.monotonic() - began,
            verdict=f"BROKEN OFF by {type(error).__name__}",
            is_right=False,
            seed=again.seed,
            again=again.sized(job.name),
            details=traceback.format_exc().splitlines(),
        )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Break what can break; see what becomes of events."
    )
    parser.add_argument("--only", type=_words, default=[], help="rows by name: kill, kill:redis, …")
    parser.add_argument("--list", action="store_true", help="tell the names of all rows")
    parser.add_argument("--stores", type=_stores, default=STORES, help=",".join(STORES))
    parser.add_argument("--events", type=int, default=100_000, help="distinct events")
    parser.add_argument("--kills", type=int, default=150, help="how many workers get SIGKILL")
    parser.add_argument("--sim-seeds", type=int, default=100_000, help="runs of the simulation")
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(2**32))
    parser.add_argument(
        *("--from",),
        type=int,
        default=SystemRandom().randrange(2**40),
        dest="first",
        help="where simulated seeds begin",
    )
    parser.add_argument("--quick", action="store_true", help="5000 events, 50 kills, 2000 seeds")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in --out: keep its rows of this commit, right or not",
    )
    parser.add_argument("--docs", action="store_true", help="write the table into docs/proof.md")
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="where rows are kept; build/chaos.json")
    asked = parser.parse_args(argv)
    if asked.quick:
        asked.events, asked.kills, asked.sim_seeds = 5000, 50, 2000
    name = "chaos-quick.json" if asked.quick else "chaos.json"
    asked.out = asked.out or _ROOT / "build" / name
    return asked


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _stores(text: str) -> list[str]:
    names = _words(text)
    if unknown := set(names) - set(STORES):
        raise argparse.ArgumentTypeError(f"no such store: {', '.join(sorted(unknown))}")
    return names


def _is_wanted(name: str, only: Sequence[str]) -> bool:
    return not only or any(name == word or name.startswith(f"{word}:") for word in only)


# --- what is run -------------------------------------------------------------------------


def _jobs(asked: argparse.Namespace) -> Iterator[Job]:
    again = _Again(asked)
    for plan in plans(asked.stores, Size(asked.seed, asked.events, asked.kills)):
        yield Job(plan.name, lambda plan=plan: _of_processes(plan, again))
    for store in asked.stores:
        if store in network.KINDS:
            yield Job(
                f"network:{store}",
                lambda store=store: _of_network(store, network.run_store(store), again),
            )
    yield Job("network:sink", lambda: _of_network("sink", network.run_sink(), again))
    for name in SUITES:
        yield Job(f"suite:{name}", lambda name=name: _of_suite(name, again))
    count = -(-asked.sim_seeds // _PARTS)
    for part in range(_PARTS):
        name, first = f"{SIMULATION}{part + 1}", asked.first + part * count
        yield Job(
            name,
            lambda name=name, first=first: _of_simulation(name, simulate(first, count)),
            is_beside=True,
        )
    for name in convictions():
        slug = f"mutant:{name.replace(' ', '-')}"
        run = lambda name=name, slug=slug: _of_mutant(name, slug, again)  # noqa: E731
        yield Job(slug, run, is_beside=True)


class _Again:
    """The commands that run a row again."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.seed = asked.seed
        self.is_quick: bool = asked.quick
        self._asked = asked
        sizes = {"--events": (asked.events, 100_000), "--kills": (asked.kills, 150)}
        other = [f"{name} {value}" for name, (value, usual) in sizes.items() if value != usual]
        self._sizes = ["--quick"] if asked.quick else other

    def sized(self, name: str) -> str:
        return " ".join([f"{_MODULE} --only {name} --seed {self.seed}", *self._sizes])

    def plain(self, name: str) -> str:
        return f"{_MODULE} --only {name}"

    def arguments(self) -> list[str]:
        """Return what decides about all rows."""
        asked = self._asked
        numbers = {
            "--seed": asked.seed,
            "--from": asked.first,
            "--events": asked.events,
            "--kills": asked.kills,
            "--sim-seeds": asked.sim_seeds,
        }
        words = [word for name, value in numbers.items() for word in (name, str(value))]
        return [*words, "--quick"] if asked.quick else words


def _of_processes(plan: Plan, again: _Again) -> Row:
    report = service.run(plan.run) if isinstance(plan.run, ServiceRun) else run(plan.run)
    judged = report.judgement
    verdict, is_right = verdict_of(report)
    why = ", ".join(f"{count} {excuse}" for excuse, count in sorted(judged.excuses.items()))
    return Row(
        name=plan.name,
        what=plan.what,
        store=report.store,
        size=f"{report.run.events} events",
        struck=_struck(report),
        seconds=report.seconds,
        per_s=report.copies_per_s,
        lost=judged.lost,
        extra=f"{judged.extra} ({why})" if why else str(judged.extra),
        unexplained=judged.unexplained,
        verdict=verdict,
        is_right=is_right,
        seed=again.seed,
        again=again.sized(plan.name),
        details=[] if is_right else report.told().splitlines(),
    )


def _struck(report: Report | ServiceReport) -> str:
    counts = {
        "kills": report.kills,
        "stops": report.stops,
        "terms": report.terms,
        "server kills": report.crashes,
        "cuts": report.cuts,
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def verdict_of(report: Report | ServiceReport) -> tuple[str, bool]:
    """Say in a word how it went, and whether that is as it should be."""
    judged = report.judgement
    if isinstance(report, Report) and report.run.is_control:
        is_before = report.run.kind == "controls:mark-before"
        convicted = bool(judged.lost if is_before else judged.unexplained)
        return "convicted" if convicted else "NOT CONVICTED", convicted
    if isinstance(report, Report) and report.run.fails_open and not report.unprotected:
        return "NOT TRIED: nothing was sent while the store was down", False
    # Nobody's death excuses a worker that was asked to leave.
    is_right = not judged.violations and not (report.terms and judged.extra)
    return "right" if is_right else "VIOLATED", is_right


def _of_network(store: str, report: NetworkReport, again: _Again) -> Row:
    is_right = not report.complaints
    ended = f"{report.trials - report.wrong} of {report.trials} as they must"
    hung = f"{report.hung} hung, {report.longest_s:.1f} s at most (of {report.allowed_s:.1f})"
    if report.again:
        hung += f", {report.again} run again alone"
    return Row(
        name=f"network:{store}",
        what="network faults at every operation",
        store="HTTP sink" if store == "sink" else store,
        size=f"{report.trials} trials",
        struck=f"{report.faults} faults, {report.operations} operations",
        seconds=report.seconds,
        verdict=f"{'right' if is_right else 'VIOLATED'}: {ended}, {hung}",
        is_right=is_right,
        again=again.plain(f"network:{store}"),
        details=report.complaints[:20],
    )


def _of_suite(name: str, again: _Again) -> Row:
    one = SUITES[name]
    report = suite.run(one, full=not again.is_quick)
    verdict = "right" if report.is_right else "VIOLATED"
    return Row(
        name=f"suite:{name}",
        what=one.what,
        store=one.store,
        size=f"{report.tests} tests",
        seconds=report.seconds,
        verdict=f"{verdict}: {report.passed} of {report.tests} passed",
        is_right=report.is_right,
        again=again.plain(f"suite:{name}") + (" --quick" if again.is_quick else ""),
        details=[] if report.is_right else report.output.splitlines()[-200:],
    )


def _of_simulation(name: str, found: Simulated) -> Row:
    again = f"python -m tests.sim.run --from {found.first} --seeds {found.seen['seeds']}"
    details: list[str] = []
    for seed, trace in found.broken[:3]:
        details += [f"--- seed {seed}", trace]
    if found.broken:
        again = f"python -m tests.sim.run --from {found.broken[0][0]} --seeds 1"
    counts = {what: found.seen[what] for what in ("seeds", "awaits", "excuses")}
    return Row(
        name=name,
        what="simulation",
        store="memory, sqlite",
        **simulated(counts),
        seconds=found.seconds,
        per_s=counts["seeds"] / found.seconds,
        lost=None if found.broken else 0,
        unexplained=len(found.broken),
        verdict="VIOLATED" if found.broken else "right",
        is_right=not found.broken,
        seed=found.first,
        again=again,
        details=details,
        counts=counts,
    )


def _of_mutant(name: str, slug: str, again: _Again) -> Row:
    began = time.monotonic()
    found = conviction(name)
    return Row(
        name=slug,
        what=f"mutant: {name}",
        store="memory",
        size="",
        seconds=time.monotonic() - began,
        verdict=f"convicted {found}" if found else "NOT CONVICTED",
        is_right=bool(found),
        again=again.plain(slug),
    )


if __name__ == "__main__":
    sys.exit(main())
