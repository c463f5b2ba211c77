"""
The small rows of the model: the broken ways are convicted, ours holds.

`make model` runs the large ones too.
"""

import re
import subprocess
import sys
from functools import cache

import pytest
from spec.check import BEGIN, END, PAGE, as_expected, cells, digest
from spec.rows import BITS, CLAIMS, ROWS, SMALL, Row, by_name
from spec.search import HERE, Found, Unusable, _result, search
from tests.servers.spin import Tools, ready
from tests.size import some

ROOT = HERE.parent
QUICK = [
    by_name(name)
    for name in (
        *("ours", "ours-window", "ours-loss", "ours-live", "tiers", "register", "debts", "answers"),
        *("calls-waves", "draw-per-batch", "release-by-token"),
        *("get-then-put", "mark-before-crash", "mark-after", "no-lease", "unfenced-done"),
    )
]
"""Ours, and the ways that are most often taken instead."""


@cache
def tools() -> Tools:
    return ready()


@cache
def found(name: str) -> Found:
    return search(by_name(name), tools(), ROOT / "build" / "spec")


@pytest.mark.parametrize("row", some(SMALL, QUICK), ids=lambda row: row.name)
def test_a_row_comes_out_as_expected(row: Row):
    one = found(row.name)
    assert as_expected(row, one), "\n".join([one.result, *one.trail])


@pytest.mark.parametrize(
    "rows",
    [
        ("ours-window", "ours-contents"),
        ("ours-header", "ours-window"),
        ("tiers",),
        ("register",),
        ("register-window", "register"),
        ("debts-open",),
        ("debts-contents", "debts-open"),
        ("debts-window",),
        ("debts-stuck", "debts"),
        ("answers-forbidden",),
        ("answers-poison",),
        ("answers-live-stream", "answers-forbidden"),
        ("calls", "calls-stalls", "calls-waves"),
    ],
    ids=lambda rows: rows[0],
)
@pytest.mark.full
def test_every_step_of_ours_is_taken_in_some_search(rows):
    """What holds, holds of a model in which everything does happen."""
    never = set.intersection(*(set(found(name).unreached) for name in rows))
    assert never == set()


def test_a_counterexample_reads_as_a_story():
    assert found("busy-acked").trail == (
        "worker 1 takes copy 0, of event 0",
        "worker 1 claims key 0: OK",
        "worker 1 dies",
        "worker 1 takes copy 0, of event 0",
        "worker 1 claims key 0: BUSY",
        "worker 1 acknowledges copy 0",
        f"!! not so: {CLAIMS['I1']} (I1)",
    )


@pytest.mark.parametrize(
    "trouble",
    [
        "error: max search depth too small",
        "pan: reached -DMEMLIM bound",
        "Warning: Search not completed",
        "Bit statespace search for:",
    ],
)
def test_a_search_that_was_cut_short_proves_nothing(trouble):
    said = f"{trouble}\nState-vector 44 byte, depth reached 9, errors: 0\n"
    assert _result(by_name("ours"), said).startswith("proves nothing")


def test_a_checker_that_says_nothing_is_no_proof():
    with pytest.raises(Unusable):
        _result(by_name("ours"), "Killed")


@pytest.mark.full
def test_a_row_that_does_not_come_out_ends_with_an_error():
    code = (
        "import dataclasses, sys, spec.check as check\n"
        "row = dataclasses.replace(check.by_name('mark-after'), breaks=None)\n"
        "check.ROWS[:] = [row]\n"
        "sys.argv[1:] = ['--only', 'mark-after']\n"
        "check.RESULTS = check.BUILD / 'unexpected.json'\n"
        "check.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "not as expected: mark-after" in done.stderr


def test_names_and_letters_are_those_of_the_models():
    assert len({row.name for row in ROWS}) == len(ROWS)
    defined = re.findall(r"#define ([IXRDC]\d) +(\d+)", (HERE / "store.pml").read_text())
    assert {name: int(bit) for name, bit in defined} == BITS
    assert {*BITS, "L"} == set(CLAIMS)


def test_every_switch_and_fault_of_a_row_is_one_of_its_model():
    """A misspelt one would leave a broken way whole, or a fault out."""
    for row in ROWS:
        text = "".join(path.read_text() for path in row.files)
        tested = re.findall(r"#(?:ifn?def|if|elif) (.*)", text)
        names = {name for line in tested for name in re.findall(r"[A-Z_]{3,}", line)}
        assert {*row.switches, *row.faults} <= names, row.name


def test_every_claim_is_broken_by_some_row():
    """A claim that nothing breaks might say nothing."""
    assert {row.breaks for row in SMALL} - {None} == set(CLAIMS)


def test_the_page_has_every_row_as_it_is_now():
    """And its numbers are of these models: `python -m spec.check --full --markdown`."""
    table = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    assert table.startswith(f"{digest(ROWS)} -->")
    shown = [
        tuple(cell.strip() for cell in line.split("|")[1:4])
        for line in table.splitlines()
        if line.startswith("|")
    ][2:]
    nothing = {"result": "holds", "steps": 0, "states": 0, "seconds": 0.0, "megabytes": 0.0}
    assert shown == [tuple(cells(row, nothing)[:3]) for row in ROWS]


@pytest.mark.full
def test_the_counterexample_of_the_page_is_what_is_found():
    shown = re.search(r"--trail ([\w-]+)\n.*?\n\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown is not None
    steps = [line.split(maxsplit=1)[1] for line in shown[2].splitlines()[:-1]]
    assert (*steps, shown[2].splitlines()[-1]) == found(shown[1]).trail
