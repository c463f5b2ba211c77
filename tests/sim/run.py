"""
The long simulation: `python -m tests.sim.run --seeds 50000`.

Each seed is one world; a failing one is printed with its trace and can be run again alone
with `--from SEED --seeds 1`.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from .mutants import MUTANTS, first_conviction
from .world import Violation, World

_CHUNK = 250


def run_seeds(first: int, count: int) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Run *count* worlds; give what was seen and what was broken."""
    seen: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    with tempfile.TemporaryDirectory() as directory:
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
    return seen, broken


def run_many(
    first: int, count: int, *, processes: int
) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Spread the seeds over *processes*."""
    seen: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    chunks = [(at, min(_CHUNK, first + count - at)) for at in range(first, first + count, _CHUNK)]
    with ProcessPoolExecutor(processes) as pool:
        for some_seen, some_broken in pool.map(run_seeds, *zip(*chunks, strict=True)):
            seen += some_seen
            broken += some_broken
    return seen, broken


def convict_mutants(most: int) -> dict[str, tuple[int, str] | None]:
    with tempfile.TemporaryDirectory() as directory:
        return {name: first_conviction(name, most, Path(directory)) for name in MUTANTS}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50_000)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args(argv)
    start = time.monotonic()
    seen, broken = run_many(args.first, args.seeds, processes=args.processes)
    for seed, trace in broken[:3]:
        print(f"--- seed {seed}\n{trace}")
    seconds = time.monotonic() - start
    print(
        f"simulation: {seen['seeds']} seeds, {seen['awaits']} awaits, "
        f"{seen['deliveries']} deliveries, {seen['excuses']} excuses, {seconds:.0f} s: "
        f"{len(broken)} violations"
    )
    missed = 0
    for name, found in convict_mutants(2000).items():
        missed += found is None
        print(f"mutant {name:24} {f'caught at seed {found[0]}' if found else 'NOT CAUGHT'}")
    return 1 if broken or missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
