"""The real gateway and store on a seeded scheduler: 2,000 worlds (250 in the quick suite), and the mutants."""

from pathlib import Path

import pytest
from tests.size import sized

from .mutants import MUTANTS, first_conviction
from .run import run_seeds
from .world import World

SEEDS = sized(250, 2_000)
PARTS = sized(2, 8)
SEEN = (
    "Unwell",
    "Closed",
    "dead rejected",
    "dead attempts",
    "dead too-old",
    "copies of what is owed",
    "unprotected",
    "older versions",
)


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_lost_and_every_repeat_has_an_excuse(part):
    count = SEEDS // PARTS
    seen, broken = run_seeds(part * count, count)
    assert not broken, broken[0][1]
    # A run in which nothing went wrong would prove nothing.
    assert seen["seeds"] == count
    assert seen["deliveries"] > count
    assert seen["excuses"] > count
    assert seen["joint"] > count // 20
    assert all(seen[what] > count // 20 for what in SEEN), seen


def test_the_same_seed_gives_the_same_run(tmp_path: Path):
    traces = []
    for _ in range(2):
        world = World(12, tmp_path)
        world.run()
        traces.append(world.trace)
    assert traces[0] == traces[1]
    assert traces[0]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_convicted(name, tmp_path: Path):
    found = first_conviction(name, 2_000, tmp_path)
    assert found is not None
    _, promise = found
    is_crash = "ended in" in promise and "Violation(" not in promise
    assert not is_crash, "a mutant that crashes proves nothing"
