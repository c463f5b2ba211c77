"""
Write the measurements into the documentation: tables between two marks, and charts.

    python bench/plot.py [build/bench.json [docs]] [--check]

No number is typed by hand: the text between `<!-- numbers: NAME -->` and `<!-- end of numbers -->`
is replaced, and the rest of the page stays. NAME is a table (`targets`, `sizes`, ...), `machine`,
or `rest` for all tables without a mark of their own. The README above the folder may have such
marks too. The measurements are kept next to the page as numbers.json. With `--check` nothing is
written, and files that are out of date are reported.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import drawing
import latency
import machine
import scaling
import sizes
import targets
from drawing import Bar, Curve, X
from table import Line, Measured, Results, Topic, build, columns
from topics import TOPICS

DOCS = Path(__file__).parents[1] / "docs"
PAGE, FIGURES = "numbers.md", "numbers.json"
MARKED = re.compile(r"(<!-- numbers: (\w+) -->\n).*?(<!-- end of numbers -->)", re.DOTALL)


def told(results: Results) -> list[tuple[Topic, list[Line]]]:
    """Return the topics that were measured, with their lines."""
    whole = [
        topic
        for topic in TOPICS.values()
        if topic.name == "targets" or all(results.get(name) for name in topic.rows)
    ]
    found = [(topic, list(topic.lines(results))) for topic in whole]
    return [(topic, lines) for topic, lines in found if lines]


# --- the page ---------------------------------------------------------------------------


def page(text: str, saved: Measured) -> str:
    """Return *text* with its tables replaced."""
    named = {name for _, name, _ in MARKED.findall(text)}
    tables = dict(parts(saved, named))
    for name in named - set(tables):
        tables[name] = f"*Not measured in this run: `python bench/run.py --only {name}`.*\n"
    return MARKED.sub(lambda m: f"{m[1]}{tables[m[2]]}{m[3]}", text)


def parts(saved: Measured, named: set[str]) -> Iterator[tuple[str, str]]:
    """Yield every part of a page with its name."""
    yield "machine", on(saved)
    rest = ""
    for topic, lines in told(saved["results"]):
        written = f"{_signed(topic.about)}\n\n{markdown(topic.head, lines)}{earlier(saved, topic)}"
        yield topic.name, written
        if topic.name not in named:
            rest += f"### {topic.title}\n\n{written}\n"
    yield "rest", rest


def earlier(saved: Measured, topic: Topic) -> str:
    """Return which rows of *topic* were kept from earlier runs, as a sentence."""
    kept = {row: day for row, day in saved.get("kept", {}).items() if row in topic.rows}
    days = ", ".join(sorted({*kept.values()}))
    if len(kept) == len(topic.rows):
        return f"\nMeasured in an earlier run ({days}).\n"
    return f"\nMeasured in an earlier run ({days}): {', '.join(kept)}.\n" if kept else ""


def on(saved: Measured) -> str:
    """Return the description of the machine."""
    where, versions = machine.in_words(saved["machine"])
    times = "once" if saved["repeats"] == 1 else f"{saved['repeats']} times"
    others = [entry["others"] for entry in saved["log"] if "others" in entry]  # not in old runs
    before = f"; before a row, other work used {max(others)} processors at most" if others else ""
    warnings = {
        "A quick run: treat the numbers as a first estimate.": saved["quick"],
        "The machine was running other work.": max(others, default=saved["machine"]["load"])
        > machine.QUIET,
    }
    warned = "".join(f" **{warning}**" for warning, is_so in warnings.items() if is_so)
    return f"{where}. Each row ran {times}{before}.{warned}\n\n{versions}.\n"


def markdown(head: Line, lines: Sequence[Line]) -> str:
    first, *rest = columns(head, lines)
    rows = [first, ("---",) * len(first), *rest]
    return "".join(f"| {' | '.join(map(_cell, row))} |\n" for row in rows)


def _cell(text: str) -> str:
    if text == "missed":
        return "**missed**"
    spanned = re.sub(r"\((\S+)-(\S+)\)", "(\\1\N{EN DASH}\\2)", _signed(text))
    return f"&nbsp;&nbsp;{spanned.strip()}" if spanned.startswith("  ") else spanned


def _signed(text: str) -> str:
    """Write the sign of multiplication where the terminal has a letter."""
    return re.sub(r"(?<=\d)x(?!\w)|(?<= )x(?= \d)", X, text)


# --- pictures ---------------------------------------------------------------------------


def pictures(results: Results) -> Iterator[tuple[str, str]]:
    """Draw the charts that have measurements."""
    if bars := list(ratio_bars(results)):
        note = "Ratio of oncebridge to the alternative; above 1 is better. Diamond: target. Line: all runs."
        yield "bench-ratios", drawing.compared("Compared with the alternatives", note, bars)
    if all(results.get(name) for name in sizes.TITLES):
        yield "bench-sizes", size_picture(results)
    if all(results.get(name) for name in latency.KINDS):
        yield "bench-latency", latency_picture(results)
    if all(results.get(name) for name in scaling.KINDS):
        yield "bench-scaling", scaling_picture(results)


def bar(name: str, values: Sequence[float], aim: float | None = None) -> Bar:
    return Bar(name, statistics.median(values), min(values), max(values), aim)


def ratio_bars(results: Results) -> Iterator[Bar]:
    for target in targets.ALL:
        if results.get(target.row) and target.ratios is not None:
            ratios = target.ratios(results)
            if ratios:
                yield bar(_signed(target.work), ratios, target.aim)


def size_picture(results: Results) -> str:
    lines = []
    for colour, (name, title) in enumerate(sizes.TITLES.items()):
        each = sizes.costs(results[name], "store")
        values = {
            sizes.power(size): statistics.median(one[size] for one in each) for size in each[0]
        }
        lines.append(Curve(title, values, colour))
    places = [sizes.power(size) for size in sizes.SIZES]
    used = [place for place in places if any(place in line.values for line in lines)]
    title = "Claim and commit of one key, by number of keys"
    note = "Microseconds, in batches of 100, one after the other; with durable writes if the store has them."
    return drawing.curves(title, note, used, lines, unit="µs")


def latency_picture(results: Results) -> str:
    lines = []
    for colour, (road, title) in enumerate(latency.ROADS.items()):
        for name in ("p50", "p99"):
            values = {
                f"{load} %": statistics.median(run["roads"][road][name] for run in results[row])
                for row, load in latency.KINDS.items()
            }
            lines.append(Curve(f"{title} {name}", values, colour, dashed=name == "p99"))
    places = [f"{load} %" for load in latency.LOADS]
    title = "From HTTP in to HTTP out, by load"
    note = "Milliseconds at a share of oncebridge's peak, at a constant rate, from when each event was due."
    return drawing.curves(title, note, places, lines, unit="ms", logarithmic=True)


def scaling_picture(results: Results) -> str:
    found = {
        f"{title}, number of processes": [
            bar(str(count), [run["processes"][str(count)]["rate"] for run in results[name]])
            for count in scaling.PROCESSES
        ]
        for name, (_, title) in scaling.KINDS.items()
    }
    cores = results["scaling-redis"][0]["cores"]
    title = "Decisions per second, by processes on one store"
    note = f"Clients and server share the {cores} processors of one machine."
    return drawing.groups(title, note, found, unit="per second")


# --- writing ----------------------------------------------------------------------------


def written(saved: Measured, docs: Path) -> dict[Path, str]:
    """Return the up-to-date files of the documentation."""
    pages = [path for path in (docs / PAGE, docs.parent / "README.md") if path.exists()]
    files = {path: page(path.read_text(), saved) for path in pages}
    files[docs / FIGURES] = json.dumps(saved, indent=1, ensure_ascii=False) + "\n"
    for name, picture in pictures(saved["results"]):
        files[docs / "img" / f"{name}.svg"] = picture
    return files


def publish(file: Path, docs: Path = DOCS) -> None:
    (docs / "img").mkdir(exist_ok=True)
    for path, text in written(json.loads(file.read_text()), docs).items():
        path.write_text(text)
        print(path, file=sys.stderr)


def out_of_date(file: Path, docs: Path) -> list[Path]:
    files = written(json.loads(file.read_text()), docs)
    return [path for path, text in files.items() if not path.exists() or path.read_text() != text]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the measurements into the documentation.")
    parser.add_argument("file", type=Path, nargs="?", default=build() / "bench.json")
    parser.add_argument("docs", type=Path, nargs="?", default=DOCS)
    parser.add_argument(
        "--check", action="store_true", help="only report files that are out of date"
    )
    given = parser.parse_args()
    if not given.check:
        publish(given.file, given.docs)
        return
    late = out_of_date(given.file, given.docs)
    for path in late:
        print(f"{path} does not match {given.file}", file=sys.stderr)
    sys.exit(bool(late))


if __name__ == "__main__":
    main()
