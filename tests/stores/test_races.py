"""Four processes with sixteen tasks each go for the same five hundred keys."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.size import some

from .kinds import QUICK, RACED, Kind, Running, open_store
from .racers import HEATS, Outcome, faults, race


@pytest.mark.parametrize("kind", some(RACED, QUICK), ids=repr)
async def test_of_four_processes_exactly_one_wins(
    kind: Kind, server_of: Callable[[Kind], Running]
) -> None:
    running = server_of(kind)
    async with running.store(timeout_s=20) as store:
        place = running.place(timeout_s=20)
        outcomes = await race(
            store, place, keys=kind.keys, rivals=kind.rivals, slack_s=kind.slack_s
        )
    assert _faults(outcomes) == []


async def test_of_four_processes_on_one_file_exactly_one_wins(tmp_path: Path) -> None:
    outcomes = await _race_on_a_file("sqlite", tmp_path)
    assert _faults(outcomes) == []


# --- a test of the tests ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "heats"),
    [
        ("get-then-put", {"claims", "take-overs", "commits"}),
        ("part-by-part", {"pairs", "ring"}),
    ],
    ids=["get-then-put", "part-by-part"],
)
async def test_a_store_without_the_one_atomic_step_is_convicted(
    scheme: str, heats: set[str], tmp_path: Path
) -> None:
    outcomes = await _race_on_a_file(scheme, tmp_path, keys=200, rivals=16)
    convicted = {fault.partition(":")[0] for fault in _faults(outcomes)}
    assert heats <= convicted


async def test_a_lock_that_other_processes_know_nothing_of_is_convicted(tmp_path: Path) -> None:
    assert _faults(await _race_on_a_file("get-then-put-locked", tmp_path, rivals=8))


async def _race_on_a_file(
    scheme: str, folder: Path, *, keys: int = 500, rivals: int = 64
) -> dict[str, Outcome]:
    place = {"url": f"{scheme}:{folder / 'records.db'}", "options": {}}
    async with open_store(**place) as store:
        return await race(store, place, keys=keys, rivals=rivals)


def _faults(outcomes: dict[str, Outcome]) -> list[str]:
    for heat, outcome in outcomes.items():
        print(f"{heat}: {len(outcome.wins)} wins, {dict(outcome.others)}, again {outcome.again}")
    return [f"{heat}: {fault}" for heat in HEATS for fault in faults(heat, outcomes[heat])[:5]]
