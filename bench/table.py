"""What was measured, as lines of one table."""

import statistics
from collections.abc import Sequence
from typing import Any

Measured = dict[str, Any]
Line = tuple[str, str, str, str, str, str]


def middle(runs: Sequence[Measured], name: str, form: str) -> str:
    """Give the median, and half the spread in per cent where there is one."""
    values = [run[name] for run in runs]
    centre = statistics.median(values)
    if len(values) == 1:
        return form.format(centre)
    spread = (max(values) - min(values)) / 2 / centre
    return f"{form.format(centre)} ±{spread:.0%}"


def met(reached: bool) -> str:  # noqa: FBT001 - it is the question
    return "met" if reached else "missed"


def show(table: Sequence[Line]) -> None:
    head: Line = ("work", "ours", "peer", "ratio", "target", "met?")
    widths = [max(len(row[at]) for row in [head, *table]) for at in range(len(head))]
    for row in [head, tuple("-" * width for width in widths), *table]:
        print(
            " | ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        )
