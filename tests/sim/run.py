"""
The long simulation: `python -m tests.sim.run --seeds 100000`.

Each seed is one world; a failing one is printed with its trace and can be run again alone
with `--from SEED --seeds 1`.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from oncebridge.stores.memory import MemoryStore

from ..chaos.worker import die_with_parent
from ..contract.broken_stores import WorkerNameAsToken, contract_of
from .mutants import MUTANTS, first_conviction
from .world import Violation, World

_CHUNK = 250
_MEMORY = Path("/dev/shm")
"""Where a file costs no disk: what SQLite keeps here has to outlive a worker of ours, not power."""


def run_seeds(first: int, count: int) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Run *count* worlds; give what was seen and what was broken."""
    seen: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as directory:
        for seed in range(first, first + count):
            world = World(seed, Path(directory))
            try:
                world.run()
            except Violation as violation:
                broken.append((seed, "\n".join([*world.trace[-60:], str(violation)])))
            seen["seeds"] += 1
            seen["awaits"] += world.loop.steps
            seen["deliveries"] += len(world.sent)
            seen["excuses"] += world.excuses.total()
            seen["joint"] += world.is_joint
            seen[f"rule {world.swarm.rule}"] += 1
            seen += world.seen
    return seen, broken


def run_many(
    first: int, count: int, *, processes: int
) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Spread the seeds over *processes*."""
    seen: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    chunks = [(at, min(_CHUNK, first + count - at)) for at in range(first, first + count, _CHUNK)]
    with ProcessPoolExecutor(processes, initializer=die_with_parent) as pool:
        for some_seen, some_broken in pool.map(run_seeds, *zip(*chunks, strict=True)):
            seen += some_seen
            broken += some_broken
    return seen, broken


class Simulated(NamedTuple):
    """What many seeds have shown."""

    first: int
    seen: Counter[str]
    broken: list[tuple[int, str]]
    seconds: float


def simulate(first: int, count: int, *, processes: int | None = None) -> Simulated:
    """Run *count* worlds from seed *first* on, on all cores."""
    start = time.monotonic()
    seen, broken = run_many(first, count, processes=processes or os.cpu_count() or 1)
    return Simulated(first, seen, broken, time.monotonic() - start)


_NAMED = "worker name as token"
_DIRECTED = "test_a_delayed_release_does_not_free_the_next_attempt_of_the_same_worker"


def convictions() -> list[str]:
    """Name all mutants; the last is one that seeds do not find."""
    return [*MUTANTS, _NAMED]


def conviction(name: str, most: int = 2000) -> str:
    """Say what convicts a mutant: a seed, or a case that is directed at it; nothing if none does."""
    if name == _NAMED:
        return _directed_conviction()
    with tempfile.TemporaryDirectory() as directory:
        found = first_conviction(name, most, Path(directory))
    return f"at seed {found[0]}" if found else ""


def _directed_conviction() -> str:
    """Let a release of the first attempt land in the second one of the same worker."""
    asyncio.run(contract_of(MemoryStore)().run(_DIRECTED))  # which is right, and passes
    try:
        asyncio.run(WorkerNameAsToken().run(_DIRECTED))
    except AssertionError:
        return "by a case of the contract"
    return ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100_000)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--processes", type=int)
    args = parser.parse_args(argv)
    found = simulate(args.first, args.seeds, processes=args.processes)
    for seed, trace in found.broken[:3]:
        again = f"python -m tests.sim.run --from {seed} --seeds 1"
        print(f"--- seed {seed}\n{trace}\nagain: {again}")
    seen = found.seen
    print(
        f"simulation: {seen['seeds']} seeds from {found.first}, {seen['awaits']} awaits, "
        f"{seen['deliveries']} deliveries, {seen['excuses']} excuses, {found.seconds:.0f} s: "
        f"{len(found.broken)} violations"
    )
    if args.seeds == 1:
        return 1 if found.broken else 0
    missed = 0
    for name in convictions():
        convicted = conviction(name)
        missed += not convicted
        print(f"mutant {name:24} {f'convicted {convicted}' if convicted else 'NOT CONVICTED'}")
    return 1 if found.broken or missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
