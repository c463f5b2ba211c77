"""
Check the protocol's models: the broken ways have to be convicted, ours has to hold.

    python -m spec.check                     the small rows, in about a minute
    python -m spec.check --full              all rows (`make model`)
    python -m spec.check --only ours         one row, or those whose names start with it
    python -m spec.check --trail NAME        the counterexample of one row, step by step
    python -m spec.check --markdown          the last results, into docs/model.md

It ends with 1 if a row does not come out as expected; a search that was not complete never does.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.servers.spin import NoSpin, Tools, ready

from spec.rows import ROWS, SMALL, Row, by_name
from spec.search import Found, Unusable, search

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "spec"
RESULTS = ROOT / "build" / "spec.json"
PAGE = ROOT / "docs" / "model.md"
BEGIN, END = "<!-- table of models ", "<!-- end of the table -->"

_HEAD = ("row", "model", "setup", "states", "result", "seconds", "memory")


def as_expected(row: Row, found: Found) -> bool:
    """Tell whether it came out as the row says."""
    return found.result == (row.breaks or "holds")


def cells(row: Row, found: Mapping[str, Any]) -> list[str]:
    """Give a line of the table."""
    result = found["result"]
    told = {
        "holds": f"holds: {', '.join(row.checks)}",
        row.breaks: f"**broken: {row.breaks}**, {found['steps']} steps",
    }
    seconds = found["seconds"]
    return [
        f"`{row.name}`",
        row.what,
        row.setup,
        f"{found['states']:,}",
        told.get(result, result),
        f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.1f}",
        f"{found['megabytes']:,.0f} MB",
    ]


def markdown(results: Mapping[str, Any]) -> str:
    """Lay the results out as a table for the page."""
    lines = [f"| {' | '.join(_HEAD)} |", "| --- | --- | --- | ---: | --- | ---: | ---: |"]
    lines += [
        f"| {' | '.join(cells(row, results['rows'][row.name]))} |"
        for row in ROWS
        if row.name in results["rows"]
    ]
    return "\n".join([*lines, "", f"{results['tools']}; {results['machine']}."])


def write_page() -> None:
    """Put the table into the documentation: all rows, and of the models as they are now."""
    results = _saved()
    missing = [row.name for row in ROWS if row.name not in results["rows"]]
    if missing:
        sys.exit(f"not all rows were searched: {', '.join(missing)}; run with --full first")
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}{digest(ROWS)} -->\n\n{markdown(results)}\n\n{END}{after}")


def digest(rows: Sequence[Row]) -> str:
    """Return a name for these rows and the files of their models, without the comments."""
    files = {path for row in rows for path in row.files}
    texts = [path.read_text() for path in sorted(files)]
    plain = re.sub(r"/\*.*?\*/", "", "".join(texts), flags=re.DOTALL).split()
    asked = [word for row in rows for word in (row.name, *row.defines)]
    return hashlib.sha256(" ".join([*plain, *asked]).encode()).hexdigest()[:16]


def run(rows: Sequence[Row], tools: Tools, jobs: int) -> list[Found]:
    """Search the rows, *jobs* at a time, and tell each as it comes."""
    found: list[Found] = []
    with ThreadPoolExecutor(jobs) as pool:
        # The long ones first would be quicker; in order they read as the table does.
        for row, one in zip(rows, pool.map(lambda r: search(r, tools, BUILD), rows), strict=True):
            mark = "ok " if as_expected(row, one) else "BAD"
            line = cells(row, _kept(row, one))
            widths = (29, 48, 64, 12, 42, 7, 9)
            print(mark, *(c.ljust(w) for c, w in zip(line, widths, strict=True)), flush=True)
            _save(row, one, tools)
            found.append(one)
    return found


def _kept(row: Row, found: Found) -> dict[str, Any]:
    kept = asdict(found)
    steps = [step for step in kept.pop("trail") if not step.startswith(("...", "!!"))]
    return {**kept, "steps": len(steps), "digest": digest([row])}


def _saved() -> dict[str, Any]:
    """Read what earlier runs found; what they found of other models is no use."""
    saved: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    digests = {row.name: digest([row]) for row in ROWS}
    rows = saved.get("rows", {})
    of_now = {name: row for name, row in rows.items() if row["digest"] == digests.get(name)}
    return {**saved, "rows": of_now}


def _save(row: Row, found: Found, tools: Tools) -> None:
    said = subprocess.run([tools.spin, "-V"], capture_output=True, text=True, check=False).stdout
    results = {
        "tools": said.strip().split(" -- ")[0],
        "machine": f"{platform.system()} on {platform.machine()}, {os.cpu_count()} cores",
        "rows": {**_saved()["rows"], row.name: _kept(row, found)},
    }
    RESULTS.write_text(json.dumps(results, indent=1))


def _chosen(args: argparse.Namespace) -> list[Row]:
    rows = ROWS if args.full or args.only else SMALL
    if args.only:
        rows = [row for row in rows if row.name.startswith(args.only)]
        rows = [row for row in rows if row.name == args.only] or rows
    if not rows:
        sys.exit(f"no row is called {args.only}: {', '.join(row.name for row in ROWS)}")
    return rows


def _tell_trail(name: str, tools: Tools) -> None:
    try:
        row = by_name(name)
    except KeyError:
        sys.exit(f"no row is called {name}: {', '.join(row.name for row in ROWS)}")
    found = search(row, tools, BUILD)
    print(f"{row.what.strip('*')}; {row.setup}\n")
    if not found.trail:
        print(f"There is none: {found.result}.")
    for number, step in enumerate(found.trail[:-1], 1):
        print(f"{number:3}  {step}")
    print(*found.trail[-1:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m spec.check", description="Check the models.")
    parser.add_argument("--full", action="store_true", help="all rows, not only the small ones")
    parser.add_argument(
        "--only", metavar="NAME", help="one row, or those whose names start with it"
    )
    parser.add_argument("--trail", metavar="NAME", help="show the counterexample of a row")
    parser.add_argument("--markdown", action="store_true", help="write the table of docs/model.md")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    args = parser.parse_args()
    if args.markdown and not (args.full or args.only):
        write_page()
        return
    try:
        tools = ready()
    except NoSpin as error:
        sys.exit(str(error))
    if args.trail:
        _tell_trail(args.trail, tools)
        return
    rows = _chosen(args)
    try:
        found = run(rows, tools, args.jobs)
    except Unusable as error:
        sys.exit(str(error))
    bad = [row.name for row, one in zip(rows, found, strict=True) if not as_expected(row, one)]
    if args.markdown and not bad:
        write_page()
    print(f"\n{len(rows) - len(bad)} of {len(rows)} rows as expected.")
    if bad:
        sys.exit(f"not as expected: {', '.join(bad)}")


if __name__ == "__main__":
    main()
