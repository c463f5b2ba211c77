"""
The results on the page about proof: `python -m tests.chaos.page`.

It writes the results of `make chaos` and `make soak` from `build/` between the marks in
`docs/proof.md`.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .table import Row, joined, read

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "proof.md"
_MUTANT = "mutant:"
_SIMULATION = "simulation"


def main() -> int:
    chaos, soak = _ROOT / "build" / "chaos.json", _ROOT / "build" / "soak.json"
    if chaos.exists():
        write_chaos(chaos)
    if soak.exists():
        told = of_soak(json.loads(soak.read_text()))
        _PAGE.write_text(placed(_PAGE.read_text(), "soak", told))
    return 0


def write_chaos(results: Path) -> None:
    """Write the results of `make chaos` to the page."""
    told = of_chaos(json.loads(results.read_text()), read(results))
    _PAGE.write_text(placed(_PAGE.read_text(), "chaos", told))


def placed(text: str, mark: str, what: str) -> str:
    """Put *what* between the two marks called *mark*."""
    begin, end = f"<!-- {mark}: made by tests.chaos.page -->", f"<!-- end of {mark} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"the page has no place for {mark}")
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n\n{what}\n\n{end}", text)


def of_chaos(told: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Lay the rows out, the mutants in one line below them."""
    others = [row for row in joined(rows) if not row.name.startswith(_MUTANT)]
    mutants = [row for row in rows if row.name.startswith(_MUTANT)]
    headings = (
        "run",
        "store",
        "size",
        "faults",
        "s",
        "lost",
        "duplicates",
        "unexplained",
        "verdict",
    )
    table = [headings, ("---",) * len(headings), *(_cells(row) for row in others)]
    days = sorted({row.when[:10] for row in rows if row.when})
    lines = [
        (
            f"oncebridge {told['version']}, {_commits(rows)}, {told['machine']}, {_span(days)}. "
            f"{_minutes(others)} in all, the simulation and the mutants beside the other rows."
        ),
        "",
        *(f"| {' | '.join(cells)} |" for cells in table),
    ]
    if mutants:
        convicted = sum(row.is_right for row in mutants)
        named = ", ".join(
            f"{row.what.removeprefix('mutant: ')} ({row.verdict.removeprefix('convicted ')})"
            for row in mutants
        )
        lines += ["", f"Mutants convicted: {convicted} of {len(mutants)}: {named}."]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    what, store, size, struck, seconds, _, *found = row.cells()
    return (what, store, size, struck, seconds, *found)


def _span(days: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "undated"


def _commits(rows: Sequence[Row]) -> str:
    found = sorted({row.commit for row in rows})
    return f"commit {found[0] or 'unknown'}" if len(found) == 1 else f"{len(found)} commits"


def _minutes(rows: Sequence[Row]) -> str:
    beside = sum(row.seconds for row in rows if row.name.startswith(_SIMULATION))
    others = sum(row.seconds for row in rows if not row.name.startswith(_SIMULATION))
    return f"{max(beside, others) / 60:.0f} minutes"


def of_soak(told: Mapping[str, Any]) -> str:
    lines = [
        (
            f"{told['minutes']:g} minutes, {told['rate']:g} arrivals a second and store, window "
            f"{told['window_s']:g} s, the first {told['warm_up_s'] / 60:g} minutes not judged; "
            f"{told['machine']}, {told['when'][:10]}."
        ),
        "",
        "| store | what | measured | allowed | verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    for store, one in told["stores"].items():
        for found in one["findings"]:
            verdict = "right" if found["is_right"] else "VIOLATED"
            cells = (store, found["what"], found["value"], found["limit"], verdict)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
