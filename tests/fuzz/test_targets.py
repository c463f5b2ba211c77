"""The targets of `fuzz/` hold on what they begin with: else nobody would notice that they broke."""

import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest

FUZZ = Path(__file__).parents[2] / "fuzz"
TARGETS = sorted(path.stem.removeprefix("fuzz_") for path in FUZZ.glob("fuzz_*.py"))


@pytest.fixture
def seeds() -> dict:
    return runpy.run_path(str(FUZZ / "seeds.py"))["SEEDS"]


@pytest.fixture(autouse=True)
def _without_instruments(monkeypatch):
    """The fuzzer itself is in an environment of its own; only its watching is missing here."""
    atheris = ModuleType("atheris")
    atheris.instrument_imports = lambda **_: nullcontext()
    monkeypatch.setitem(sys.modules, "atheris", atheris)
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_every_target_has_seeds_and_is_run(seeds):
    assert sorted(seeds) == TARGETS == sorted(runpy.run_path(str(FUZZ / "run.py"))["TARGETS"])


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_holds_on_its_seeds(target: str, seeds):
    names = runpy.run_path(str(FUZZ / f"fuzz_{target}.py"))
    inputs = list(seeds[target]())
    assert inputs
    if target == "http":
        door = names["Door"]()
        try:
            for data in inputs:
                door.look(data)
        finally:
            door.close()
        return
    for data in inputs:
        names["look"](data)
    if target == "config":
        names["FOLDER"].cleanup()
