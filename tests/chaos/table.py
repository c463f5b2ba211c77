"""The rows of a long run: shown as a table, kept as JSON while it goes on."""

import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

_HEADINGS = ("run", "store", "size", "faults", "s", "/s", "lost", "duplicates", "unexplained", "")


class Row(Struct, frozen=True, kw_only=True):
    """What became of one run."""

    name: str
    """How it is asked for: `--only NAME`."""
    what: str
    store: str
    size: str
    struck: str = ""
    seconds: float
    per_s: float | None = None
    lost: int | None = None
    extra: str = ""
    unexplained: int | None = None
    verdict: str
    is_right: bool
    seed: int | None = None
    again: str
    """The command that runs it again."""
    details: list[str] = []
    """What was found, where it is not right."""
    when: str = ""

    def cells(self) -> tuple[str, ...]:
        return (
            self.what,
            self.store,
            self.size,
            self.struck,
            f"{self.seconds:.0f}",
            _number(self.per_s),
            _number(self.lost),
            self.extra,
            _number(self.unexplained),
            self.verdict,
        )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


class Rows:
    """The rows so far, by name; every new one is saved at once."""

    def __init__(self, path: Path, *, keep: bool) -> None:
        """Begin a table at *path*; *keep* those rows of an earlier one that are not run again."""
        self._path = path
        self._rows: dict[str, Row] = {}
        if keep and path.exists():
            self._rows = {row.name: row for row in read(path)}
        self.new: list[Row] = []

    def add(self, row: Row) -> None:
        row = msgspec.structs.replace(row, when=_now())
        self._rows[row.name] = row
        self.new.append(row)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = {
            "version": version("oncebridge"),
            "machine": f"{platform.machine()}, Python {platform.python_version()}",
            "rows": msgspec.to_builtins(list(self._rows.values())),
        }
        beside = self._path.with_suffix(".tmp")
        beside.write_text(json.dumps(kept, indent=1) + "\n")
        beside.replace(self._path)  # whoever reads it meanwhile finds it whole

    @property
    def are_right(self) -> bool:
        return all(row.is_right for row in self.new)


def read(path: Path) -> list[Row]:
    """Read the rows that an earlier run has left."""
    return msgspec.convert(json.loads(path.read_text())["rows"], list[Row])


def shown(rows: Sequence[Row]) -> str:
    """Lay *rows* out in columns, and say below how to run again what failed."""
    lines = columns([_HEADINGS, *(row.cells() for row in rows)])
    failed = [row for row in rows if not row.is_right]
    for row in failed:
        lines += ["", f"{row.name}: {row.verdict}", *row.details, f"again: {row.again}"]
    return "\n".join(lines)


def columns(rows: Sequence[Sequence[Any]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
