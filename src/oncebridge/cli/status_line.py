"""The status line of a running service, with a progress bar if the end is known."""

import asyncio
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from oncebridge.cli.command import is_to_stdout
from oncebridge.engine.verdict import Verdict
from oncebridge.service.config import Setup
from oncebridge.service.service import Service

_EVERY_S = 0.25
STYLES = {
    Verdict.DELIVERED: "green",
    Verdict.DUPLICATE: "yellow",
    Verdict.DEAD: "red",
    Verdict.FAILED: "red",
    Verdict.CONFLICT: "magenta",
}


class Screen:
    """Show the counts of *service* while it runs, on a terminal only."""

    def __init__(self, service: Service, setup: Setup) -> None:
        self._service = service
        # Events on the same terminal would break the status line.
        shares = is_to_stdout(setup) and sys.stdout.isatty()
        self._live: Live | None = None
        self._console = Console(stderr=True)
        if self._console.is_terminal and not shares:
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
        self._bar = Progress(
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self._console,
        )
        self._task = self._bar.add_task("", total=None, visible=False)
        self._seen = (0.0, 0)
        self._rate = 0.0
        self._painter: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._live is not None:
            self._live.start()
            self._service.has_status_line = True
            self._painter = asyncio.create_task(self._paint())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None and self._painter is not None:
            self._painter.cancel()
            await asyncio.gather(self._painter, return_exceptions=True)
            self._live.stop()

    async def _paint(self) -> None:
        assert self._live is not None  # noqa: S101
        while True:
            self._live.update(self._picture(asyncio.get_running_loop().time()), refresh=True)
            await asyncio.sleep(_EVERY_S)

    def _picture(self, now_s: float) -> RenderableType:
        counts = self._service.counts()
        then_s, then = self._seen
        if now_s - then_s >= 1:
            if then_s:
                self._rate = (counts["arrived"] - then) / (now_s - then_s)
            self._seen = (now_s, counts["arrived"])
        line = status_line(counts, self._rate, self._notes())
        ways = [found for source in self._service.sources if (found := source.progress())]
        if not ways:
            return line
        done, total = (sum(part) for part in zip(*ways, strict=True))
        self._bar.update(self._task, completed=done, total=max(total, 1), visible=True)
        return Group(self._bar, line)

    def _notes(self) -> list[str]:
        notes = [why for g in self._service.router.gateways for why in g.not_ready()]
        spool = self._service.spool
        notes += spool.not_ready() if spool else []
        return [*notes, *([f"{spool.depth:,} in the spool"] if spool and spool.depth else [])]


def status_line(counts: Mapping[str, int], rate: float, notes: list[str]) -> Text:
    """Return the rate and the verdicts as one line."""
    line = Text(f"{rate:,.0f}/s in", style="bold")
    for verdict in Verdict:
        if counts.get(verdict.value):
            line.append("  ·  ", style="dim")
            line.append(f"{verdict.value} {counts[verdict.value]:,}", style=STYLES.get(verdict, ""))
    if counts.get("in_flight"):
        line.append(f"  ·  in flight {counts['in_flight']:,}", style="dim")
    for note in notes:
        line.append(f"  ·  {note}", style="bold red")
    return line


def table_of_counts(counts: Mapping[str, int]) -> str:
    """Return the counts in two columns: arrivals, then verdicts."""
    rows = [("arrived", counts["arrived"])]
    rows += [(v.value, counts[v.value]) for v in Verdict if counts.get(v.value)]
    rows += [(n, counts[n]) for n in ("in_flight", "unprotected") if counts.get(n)]
    return "\n".join(f"{name:<12}{number:>12,}" for name, number in rows)
