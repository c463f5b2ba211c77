"""
What is measured, and what is told of it: topics, rows and lines of one table.

A topic is a module with a `TOPIC`. Its rows measure, each in a process of its own, and its lines
tell the medians of what was measured, with the spread where a row ran more than once. Nothing
here measures, and lines can be told again of figures that were saved.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BUILD = Path(__file__).parents[1] / "build"
BATCH = 100
COST = " its cost"
"""Of a ratio: the less, the better."""

Measured = dict[str, Any]
Results = Mapping[str, Sequence[Measured]]
"""What each row measured, one for each time it ran."""


class Effort(NamedTuple):
    """How much to measure."""

    quick: bool = False
    """Less of everything, for a first look."""
    most: int = 10**6
    """How many keys a store is filled with at most, where its size matters."""


Measure = Callable[[Effort], Measured]


class Line(NamedTuple):
    """One line of the table, ready to be read."""

    work: str
    ours: str = ""
    peer: str = ""
    """What people would use instead."""
    floor: str = ""
    """What the same work takes at least: the driver alone, or nothing in between."""
    ratio: str = ""
    aim: str = ""
    met: str = ""


HEAD = Line("work", "ours", "peer", "floor", "ratio", "target", "met?")


class Topic(NamedTuple):
    """A part of the table, and the rows it is made of."""

    name: str
    title: str
    rows: Mapping[str, Measure]
    lines: Callable[[Results], Iterator[Line]]
    about: str = ""
    """What has to be known to read it."""
    head: Line = HEAD


# --- figures ----------------------------------------------------------------------------


def middle(runs: Iterable[Measured], name: str, form: str) -> str:
    """Give the median of one figure, and half the spread in per cent where there is one."""
    return spread([run[name] for run in runs], form)


def spread(values: Sequence[float], form: str) -> str:
    centre = statistics.median(values)
    if len(values) == 1 or not centre:
        return form.format(centre)
    return f"{form.format(centre)} ±{(max(values) - min(values)) / 2 / abs(centre):.0%}"


def times(values: Sequence[float], unit: str = "") -> str:
    """Give the median of ratios, and the least and the greatest where there are several."""
    least, centre, most = (
        _factor(n) for n in (min(values), statistics.median(values), max(values))
    )
    span = f" ({least}-{most})" if least != most else ""
    return f"{centre}x{span}{unit}"


def _factor(number: float) -> str:
    return f"{number:.2f}" if number < 2 else f"{number:.1f}" if number < 100 else f"{number:.0f}"


def met(reached: bool) -> str:  # noqa: FBT001 - it is the question
    return "met" if reached else "missed"


def at_least(values: Sequence[float], aim: float, unit: str = "") -> tuple[str, str]:
    """Tell an aim, and whether the median reaches it."""
    return f"≥ {aim:g}x{unit}", met(statistics.median(values) >= aim)


def at_most(values: Sequence[float], aim: float, unit: str = "") -> tuple[str, str]:
    return f"≤ {aim:g}x{unit}", met(statistics.median(values) <= aim)


# --- rows and columns -------------------------------------------------------------------


def columns(head: Line, lines: Sequence[Line]) -> list[tuple[str, ...]]:
    """Give the head and the lines, without columns that have nothing in them."""
    used = [at for at in range(len(head)) if any(line[at] for line in lines)]
    return [tuple(row[at] for at in used) for row in (head, *lines)]


def shown(head: Line, lines: Sequence[Line]) -> Iterator[str]:
    """Lay lines out for a terminal."""
    first, *rest = columns(head, lines)
    widths = [max(map(len, column)) for column in zip(first, *rest, strict=True)]
    for row in (first, ["-" * width for width in widths], *rest):
        cells = zip(row, widths, strict=True)
        yield " | ".join(f"{cell:<{width}}" for cell, width in cells).rstrip()


def build() -> Path:
    """Give the folder for what is made here; it is no part of the sources."""
    BUILD.mkdir(exist_ok=True)
    return BUILD
