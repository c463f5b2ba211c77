"""
The numbers, as ratios in one run on one machine.

    python bench/run.py [--quick] [--only TABLE ...] [--repeats N] [--most KEYS] [--docs]
    python bench/run.py --row NAME [--quick]

Every row runs in a process of its own, three times, all rows in turn, so that a busy moment of
the machine does not hit one row alone; before it, other work has a minute to end. The table shows
medians with their spread; everything measured goes to build/bench.json, after each row. A missed
aim is said in the last column and is no failure: this is a measurement. A row that breaks is: it
is said at the end, and the others go on without it. `--docs` writes the pages and pictures of the
documentation as well.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import machine
import plot
from table import Effort, Measured, build, shown
from topics import ROWS, TOPICS

LONGEST_S = 3600
"""No row takes as long; one that does hangs."""
PATIENCE_S = 60
"""How long a row waits for other work to end. It is measured then in any case."""


class Run:
    """Rows that are measured again and again, and what came of it."""

    def __init__(self, rows: Sequence[str], effort: Effort, repeats: int) -> None:
        self.rows = list(rows)
        self.effort = effort
        self.repeats = repeats
        self.results: dict[str, list[Measured]] = {name: [] for name in rows}
        self.log: list[Measured] = []
        self.broken: dict[str, str] = {}
        self._patience_s = 0 if effort.quick else PATIENCE_S
        self._began = time.monotonic()

    def go(self, file: Path, known: Measured) -> None:
        """Measure all of it, and save it on the way."""
        for number in range(self.repeats):
            for name in self.rows:
                if name not in self.broken:
                    self._say(f"{number + 1}/{self.repeats} {name}")
                    self._measure(name)
                    save(file, known, self)
        self._say(f"done; of that, in minutes: {', '.join(self.took())}")
        print(file=sys.stderr)

    def _measure(self, name: str) -> None:
        others, began = machine.await_quiet(self._patience_s), time.monotonic()
        words = command(name, self.effort)
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, check=True, timeout=LONGEST_S
            )
        except subprocess.CalledProcessError as error:
            self.broken[name] = (error.stderr or error.stdout).strip()[-2000:]
            return
        except subprocess.TimeoutExpired as error:
            self.broken[name] = str(error)
            return
        took = round(time.monotonic() - began, 1)
        self.results[name].append(json.loads(done.stdout))
        self.log.append({"row": name, "others": others, "took_s": took})

    def took(self) -> Iterator[str]:
        """Tell how long each table took, all its runs together."""
        for topic in TOPICS.values():
            seconds = sum(entry["took_s"] for entry in self.log if entry["row"] in topic.rows)
            if seconds:
                yield f"{topic.name} {int(seconds) // 60}:{int(seconds) % 60:02}"

    def _say(self, what: str) -> None:
        """Tell what is under way, and for how long all of it has been."""
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        end = "" if sys.stderr.isatty() else "\n"
        start = "\r\x1b[K" if sys.stderr.isatty() else ""
        told = f"{start}{minutes:02}:{seconds:02} {what}"
        print(told, end=end, file=sys.stderr, flush=True)


def command(name: str, effort: Effort) -> list[str]:
    words = [sys.executable, __file__, "--row", name, "--most", str(effort.most)]
    return [*words, *(["--quick"] if effort.quick else [])]


def save(file: Path, known: Measured, run: Run) -> None:
    measured = {name: runs for name, runs in run.results.items() if runs}
    found = {
        **known,
        "log": run.log,
        "results": {**known["results"], **measured},
        "kept": {name: day for name, day in known["kept"].items() if name not in measured},
    }
    file.write_text(json.dumps(found, indent=1, ensure_ascii=False))


def show(saved: Measured) -> None:
    for line in machine.in_words(saved["machine"]):
        print(line)
    print(f"medians of {saved['repeats']}{', quick: a first estimate' if saved['quick'] else ''}")
    for topic, lines in plot.told(saved["results"]):
        print(f"\n{topic.title}\n")
        for line in shown(topic.head, lines):
            print(line)


def main() -> None:
    given = arguments()
    effort = Effort(given.quick, given.most)
    if given.show:
        show(json.loads(given.show.read_text()))
        return
    if given.row:
        print(json.dumps(ROWS[given.row](effort)))
        return
    file = given.out or build() / "bench.json"
    repeats = given.repeats or (1 if given.quick else 3)
    kept = json.loads(file.read_text()) if given.keep and file.exists() else {}
    earlier = {name: runs for name, runs in kept.get("results", {}).items() if name in ROWS}
    day = kept.get("machine", {}).get("date")
    known = {
        "machine": machine.heading(),
        "repeats": repeats,
        "quick": given.quick,
        "results": earlier,
        "kept": {**dict.fromkeys(earlier, day), **kept.get("kept", {})},
    }
    rows = dict.fromkeys(name for topic in given.only for name in TOPICS[topic].rows)
    run = Run([*rows], effort, repeats)
    run.go(file, known)
    saved = json.loads(file.read_text())
    show(saved)
    if given.docs:
        plot.publish(file)
    for name, why in run.broken.items():
        print(f"\n{name} failed:\n{why}", file=sys.stderr)
    sys.exit(bool(run.broken))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure, and print one table.")
    parser.add_argument(
        "--quick", action="store_true", help="less of everything, for a first estimate"
    )
    parser.add_argument("--repeats", type=int, help="runs of each row (3, or 1 if quick)")
    parser.add_argument(
        "--most",
        type=int,
        default=10**6,
        metavar="KEYS",
        help="number of keys in SQLite, Redis and PostgreSQL (1000000; 10000000 takes "
        "some minutes for each)",
    )
    parser.add_argument("--row", choices=ROWS, metavar="ROW", help="measure one row and print JSON")
    parser.add_argument(
        "--only",
        choices=TOPICS,
        nargs="+",
        default=[*TOPICS],
        metavar="TABLE",
        help=f"a part of the table: {', '.join(TOPICS)}",
    )
    parser.add_argument("--show", type=Path, metavar="FILE", help="print a saved run")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="output file (default: build/bench.json)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the other rows of that file")
    parser.add_argument(
        "--docs", action="store_true", help="also write the results into the documentation"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
