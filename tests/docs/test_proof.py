"""The table in `docs/proof.md`: every guarantee has a quick test and a full proof, and both exist."""

import ast
import re
import subprocess
import sys
import tomllib

import pytest
from tests.docs.pages import ROOT

_TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")


def _rows() -> list[tuple[str, list[str], list[str]]]:
    """Return guarantee, quick tests and full proofs of every line of the table."""
    page = (ROOT / "docs" / "proof.md").read_text()
    _, _, table = page.partition("| guarantee | quick test | full proof |\n| --- | --- | --- |\n")
    lines = table.partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [(what, _CODE.findall(quick), _CODE.findall(proof)) for what, quick, proof in rows]


ROWS = _rows()


def _tests(path: str) -> dict[str, bool]:
    """Return the tests and classes of a file or folder: whether each is marked `full`."""
    place = ROOT / path
    files = [place] if place.is_file() else sorted(place.glob("test_*.py"))
    found: dict[str, bool] = {}
    for file in files:
        module = ast.parse(file.read_text())
        is_all_full = any("mark.full" in ast.unparse(one) for one in module.body if _is_mark(one))
        for one in module.body:
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                marks = [ast.unparse(mark) for mark in one.decorator_list]
                found[one.name] = is_all_full or "pytest.mark.full" in marks
            elif isinstance(one, ast.Assign):  # Test… = Machine.TestCase
                found[ast.unparse(one.targets[0])] = is_all_full
    return {name: found[name] for name in found if re.match("test_|Test[A-Z]", name)}


def _is_mark(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark"


def _sizes(name: str) -> list[bool]:
    """Return for each test that *name* names whether it is full; nothing if there is none."""
    path, _, test = name.partition("::")
    tests = _tests(path)
    return [tests[test]] if test in tests else [] if test else list(tests.values())


def test_every_guarantee_has_a_quick_test_and_a_full_proof():
    assert len(ROWS) > 40
    assert [what for what, quick, proof in ROWS if not (quick and proof)] == []


def test_every_quick_test_is_in_the_quick_suite():
    named = {name for _, quick, _ in ROWS for name in quick}
    assert [name for name in sorted(named) if all(_sizes(name))] == []


def test_every_full_proof_exists():
    named = {name for _, _, proof in ROWS for name in proof}
    made = {name for name in named if name.startswith("make ")}
    assert {name.removeprefix("make ") for name in made} <= set(_TARGETS)
    assert [name for name in sorted(named - made) if not _sizes(name)] == []


@pytest.mark.parametrize("kind", ["sources", "stores", "sinks", "dead_letters"])
def test_every_backend_has_a_row(kind):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    schemes: dict[str, set[str]] = {}
    for scheme, backend in project["entry-points"][f"oncebridge.{kind}"].items():
        schemes.setdefault(backend, set()).add(scheme)
    word = kind.replace("_", " ").removesuffix("s")
    told = {name for what, _, _ in ROWS if what.startswith(word) for name in _CODE.findall(what)}
    assert [names for names in schemes.values() if not names & told] == []


def test_what_is_full_or_missing_is_noticed():
    file = "tests/contract/test_s3_store.py"
    assert False in _sizes(file)
    assert _sizes(f"{file}::TestS3StoreThatLooksFirst") == [True]
    assert _sizes(f"{file}::TestNothing") == []


@pytest.mark.full
def test_pytest_finds_every_quick_test_among_those_that_are_not_full():
    named = sorted({name for _, quick, _ in ROWS for name in quick})
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0"),
            *("-p", "no:randomly", "-p", "no:cacheprovider", "-m", "not full", *named),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    tests = done.stdout.splitlines()
    missing = {
        name
        for name in named
        if not any(f"{test}[".startswith((f"{name}[", f"{name}::")) for test in tests)
    }
    assert missing == set()
