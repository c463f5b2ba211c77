"""The rows of a long run: shown as a table, kept as JSON while it goes on."""

import fcntl
import hashlib
import json
import platform
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

_ROOT = Path(__file__).parents[2]
_TESTED = ("src", "tests")
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
    counts: dict[str, int] = {}
    """What can be added up over several rows."""
    when: str = ""
    commit: str = ""

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
    """
    The rows so far, by name, in a file that several processes may add to.

    `run` has the arguments of a run that can be resumed.
    """

    def __init__(self, path: Path, commit: str) -> None:
        """Use the table at *path* for results of *commit*, which is empty if it is not known."""
        self._path = path
        self._commit = commit

    def begin(self, run: Sequence[str]) -> None:
        """Begin a new table, of the run with these arguments."""
        with self._locked():
            self._save({}, run)

    def drop(self, names: Collection[str]) -> None:
        """Forget the rows that are about to be run again."""
        with self._locked():
            kept = {name: row for name, row in self.all().items() if name not in names}
            self._save(kept, self.run)

    def keep_current(self) -> None:
        """Forget the rows of other commits than the one that is checked out."""
        others = [
            n for n, row in self.all().items() if row.commit != self._commit or not row.commit
        ]
        self.drop(others)

    def add(self, row: Row) -> None:
        row = msgspec.structs.replace(row, when=_now(), commit=self._commit)
        with self._locked():
            self._save(self.all() | {row.name: row}, self.run)

    def all(self) -> dict[str, Row]:
        return {row.name: row for row in read(self._path)} if self._path.exists() else {}

    @property
    def run(self) -> list[str]:
        """The arguments of the run that began this table; none if there was none."""
        told: Mapping[str, Any] = {}
        if self._path.exists():
            told = json.loads(self._path.read_text())
        return list(told.get("run", ()))

    def _save(self, rows: Mapping[str, Row], run: Sequence[str]) -> None:
        kept = {
            "version": version("oncebridge"),
            "machine": f"{platform.machine()}, Python {platform.python_version()}",
            "run": run,
            "rows": msgspec.to_builtins(list(rows.values())),
        }
        beside = self._path.with_suffix(".tmp")
        beside.write_text(json.dumps(kept, indent=1) + "\n")
        beside.replace(self._path)  # whoever reads it meanwhile finds it whole

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def commit() -> str:
    """Return the commit that is checked out, and a hash of what was changed since; or nothing."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD").strip()
        new = _git("ls-files", "--others", "--exclude-standard", "--", *_TESTED).split()
        changes = [_git("diff", "HEAD", "--", *_TESTED).encode()]
    except (OSError, subprocess.CalledProcessError):
        return ""
    changes += [(_ROOT / name).read_bytes() for name in new]
    if not any(changes):
        return head
    return f"{head} and changes {hashlib.sha256(b''.join(changes)).hexdigest()[:12]}"


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def read(path: Path) -> list[Row]:
    """Read the rows that an earlier run has left."""
    return msgspec.convert(json.loads(path.read_text())["rows"], list[Row])


SIMULATION = "simulation:"
"""The rows of the simulation: its parts."""


def simulated(counts: Mapping[str, int]) -> dict[str, str]:
    """Return what a row of the simulation says of its *counts*."""
    return {
        "size": f"{counts['seeds']} seeds",
        "struck": f"faults at {counts['awaits'] / 1e6:.0f} million awaits",
        "extra": f"at most {counts['excuses']}, all excused",
    }


def joined(rows: Sequence[Row]) -> list[Row]:
    """Return *rows* with the parts of the simulation as one, which comes last."""
    parts = [row for row in rows if row.name.startswith(SIMULATION)]
    if len(parts) < 2:
        return list(rows)
    failed = [row for row in parts if not row.is_right]
    told = failed[0] if failed else parts[0]
    counts = {
        name: sum(row.counts.get(name, 0) for row in parts)
        for name in ("seeds", "awaits", "excuses")
    }
    seconds = sum(row.seconds for row in parts)
    whole = msgspec.structs.replace(
        told,
        name=SIMULATION.rstrip(":"),
        **simulated(counts),
        seconds=seconds,
        per_s=counts["seeds"] / seconds,
        unexplained=sum(row.unexplained or 0 for row in parts),
        details=[line for row in failed for line in row.details],
        counts=counts,
    )
    return [*(row for row in rows if row not in parts), whole]


def told(row: Row) -> str:
    """Return a line about a row that has just ended."""
    found = {"lost": row.lost, "duplicates": row.extra, "unexplained": row.unexplained}
    what = [
        row.size,
        row.struck,
        *(f"{name} {value}" for name, value in found.items() if value not in (None, "")),
    ]
    return f"{row.name}: {row.verdict} after {row.seconds:.0f} s ({', '.join(filter(None, what))})"


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
