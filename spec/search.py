"""
Run one row: Spin makes a checker of the model, the compiler builds it, and it searches.

A search counts only if it was complete. One that met its depth, its memory or its time, or
that kept less than whole states, proves nothing, and is told as what it is.
"""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.servers.spin import Tools, translate

from spec.rows import CLAIMS, HERE, Row

_DEPTH = 1_000_000
_MEGABYTES = 12_000
_INCOMPLETE = (
    "max search depth too small",
    "out of memory",
    "reached -DMEMLIM bound",
    "Bit statespace search",
    "Hash-Compact",
    "hashtable full",
)
_STOPPED = "Search not completed"


class Unusable(Exception):
    """Spin, the compiler or the checker did not do its work."""


@dataclass(frozen=True)
class Found:
    """What the search of a row came to."""

    name: str
    result: str
    """`holds`, the name of the claim that does not hold, or why it proves nothing."""
    states: int
    depth: int
    seconds: float
    """The processor's, for the search alone."""
    megabytes: float
    unreached: tuple[str, ...]
    """Places of the model that the search did not come to, as file:line."""
    trail: tuple[str, ...]
    """The counterexample, step by step."""


def search(row: Row, tools: Tools, folder: Path) -> Found:
    """Check one row; *folder* is where its checker is built."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"{row.name}-") as name:
        place = Path(name)
        model = HERE / f"{row.model}.pml"
        _run([*translate(tools), *row.defines, "-a", str(model)], place)
        _run([str(tools.compiler), *_flags(row), "-o", "pan", "pan.c"], place)
        said, seconds = _timed(["./pan", *_options(row)], place)
        result = _result(row, said)
        trails = [*place.glob("*.trail")]
        trail = _trail(row, tools, model, trails[0]) if trails else ()
    return Found(
        row.name,
        result,
        int(_number(r"([\d.e+]+) states, stored", said)),
        int(_number(r"depth reached (\d+)", said)),
        round(seconds, 2),
        round(_number(r"([\d.]+)\s+total actual memory usage", said)),
        _unreached(said),
        trail,
    )


def _flags(row: Row) -> list[str]:
    """
    Say how the checker is built.

    What breaks is looked for breadth first, which gives the shortest way to it. The rest is
    searched to the end, depth first, with every state kept whole.
    """
    flags = ["-O2" if row.is_full else "-O0", "-w", f"-DMEMLIM={_MEGABYTES}"]
    if row.is_live:
        return [*flags, "-DNFAIR=2"]
    if row.breaks:
        return [*flags, "-DSAFETY", "-DBFS"]
    return [*flags, "-DSAFETY"]


def _options(row: Row) -> list[str]:
    options = [f"-m{_DEPTH if row.is_full else _DEPTH // 10}", "-w26" if row.is_full else "-w18"]
    return [*options, "-a", "-f"] if row.is_live else options


def _result(row: Row, said: str) -> str:
    errors = re.search(r"errors: (\d+)", said)
    if errors is None:
        raise Unusable(f"{row.name}: the checker ended early:\n{said[-2000:]}")
    is_broken = errors[1] != "0"
    for trouble in _INCOMPLETE:
        if trouble in said:
            return f"proves nothing: {trouble}"
    if not is_broken and _STOPPED in said:  # one that finds something stops there
        return f"proves nothing: {_STOPPED}"
    if not is_broken:
        return "holds"
    if row.is_live and "acceptance cycle" in said:
        return "L"
    if "assertion violated" in said and len(row.checks) == 1:
        return row.checks[0]  # nothing else was asked for
    return f"broken: {_line(said, 'pan:1:')}"


def _line(said: str, word: str) -> str:
    return next((line for line in said.splitlines() if word in line), "")


def _number(pattern: str, said: str) -> float:
    found = re.search(pattern, said)
    return float(found[1]) if found else 0.0


def _unreached(said: str) -> tuple[str, ...]:
    found = re.findall(r'^\s+(?:\S*/)?(\w+\.pml:\d+), state \d+, (?!"-end-")', said, re.MULTILINE)
    return tuple(dict.fromkeys(found))


def _trail(row: Row, tools: Tools, model: Path, trail: Path) -> tuple[str, ...]:
    """Let Spin go the way that was found; the model says what happens at each step."""
    argv = [*translate(tools), "-T", "-t", "-k", str(trail), *row.defines, str(model)]
    told = _run(argv, trail.parent).split("#processes")[0]
    steps = []
    for line in told.splitlines():
        step = line.strip()
        if "START OF CYCLE" in step:
            steps.append("... and from here on, for ever:")
        elif step and not step.startswith(("spin:", "ltl ", "Never claim")):
            steps.append(step)
    claim = row.breaks or ", ".join(row.checks)
    return (*steps, f"!! not so: {CLAIMS.get(claim, claim)} ({claim})")


def _run(argv: list[str], place: Path) -> str:
    done = subprocess.run(
        argv, cwd=place, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode != 0 and "-t" not in argv:
        raise Unusable(f"{argv[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _timed(argv: list[str], place: Path) -> tuple[str, float]:
    """Run it and give what it said, and its processor time."""
    with (place / "said.txt").open("w+") as said:
        process = subprocess.Popen(argv, cwd=place, stdout=said, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        return said.read(), usage.ru_utime + usage.ru_stime
