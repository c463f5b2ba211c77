"""What is told of the numbers: the same figures give the same table, page and pictures."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[2]
MEASURED = Path(__file__).parent / "measured.json"
PAGE = """\
# Numbers

<!-- numbers: machine -->
<!-- end of numbers -->

Words between them.

<!-- numbers: targets -->
| work | ours |
| --- | --- |
| typed by hand | 1,000,000/s |
<!-- end of numbers -->

<!-- numbers: audit -->
<!-- end of numbers -->

<!-- numbers: rest -->
<!-- end of numbers -->
"""
SVG = "{http://www.w3.org/2000/svg}"


def bench(script: str, *words: object, fails: bool = False) -> str:
    """Run a script of the bench as people do, and give what it printed."""
    command = [sys.executable, str(ROOT / "bench" / script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode != 0) is fails, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def docs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    (folder / "numbers.md").write_text(PAGE)
    bench("plot.py", MEASURED, folder)
    return folder


def cells(text: str, work: str) -> list[str]:
    """Find the line about *work*, and take it apart."""
    (line,) = [one for one in plain(text).splitlines() if one.strip("| ").startswith(work)]
    return [cell.strip() for cell in line.strip("|").split("|")]


def plain(text: str) -> str:
    return text.translate({ord("\N{MULTIPLICATION SIGN}"): "x", ord("\N{EN DASH}"): "-"})


def test_the_first_table_has_a_line_for_every_aim():
    told = bench("run.py", "--show", MEASURED)
    first = told.partition("Targets")[2].partition("\n\n")[2].partition("\n\n")[0]
    head, _, *lines = first.splitlines()
    assert [cell.strip() for cell in head.split("|")] == [
        *("work", "ours", "peer", "floor", "ratio", "target", "met?"),
    ]
    assert len(lines) == 23
    assert all(line.rsplit("|", 1)[1].strip() in ("met", "missed") for line in lines)


def test_a_line_has_medians_their_spread_and_the_aim(docs):
    page = (docs / "numbers.md").read_text()
    assert cells(page, "key of an event") == [
        "key of an event, vs. msgspec",
        "5.2 µs ±5%",
        "20.0 µs ±0% json + sha256",
        "4.0 µs ±0%",
        "1.31x (1.25-1.38) its cost",
        "≤ 1.35x its cost",
        "met",
    ]
    assert cells(page, "PostgreSQL 1 x 100")[4:] == ["15.0x", "≥ 20x", "**missed**"]
    assert cells(page, "Redis 1 x 100, vs. the raw driver")[4:] == [
        "3.0x its cost",
        "≤ 3x its cost",
        "met",
    ]
    assert cells(page, "memory of a key")[1] == "141 B ±0% of 10⁷ keys"


def test_a_page_keeps_its_words_and_loses_what_was_typed(docs):
    page = (docs / "numbers.md").read_text()
    assert "Words between them." in page
    assert "typed by hand" not in page
    assert "an invented processor" in page
    assert "Not measured in this run: `python bench/run.py --only audit`" in page
    assert "### Several processes on one store" in page.partition("numbers: rest")[2]


def test_a_page_says_how_busy_the_machine_was_and_what_is_older(docs):
    page = (docs / "numbers.md").read_text()
    assert "Each row ran 2 times; before a row, other work used 0.05 processors at most.\n" in page
    assert page.count("Measured in an earlier run (2026-01-01): latency-80.\n") == 1


def test_a_number_that_somebody_typed_is_found(docs, tmp_path):
    (tmp_path / "img").mkdir()
    for file in docs.rglob("*.*"):
        (tmp_path / file.relative_to(docs)).write_text(file.read_text())
    page = tmp_path / "numbers.md"
    page.write_text(page.read_text().replace("| 5.2 µs", "| 1.2 µs"))
    told = bench("plot.py", "--check", MEASURED, tmp_path, fails=True)
    assert "numbers.md does not match" in told
    assert ".svg" not in told


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ratios", "PostgreSQL 1 x 100, vs. one by one: 15.0x (target 20x)"),
        ("sizes", "SQLite: 26.2 at 10⁴, 30.2 at 10⁵, 34.7 at 10⁶"),
        ("latency", "ours p99: 4.3 at 10 %, 8.3 at 50 %, 23.1 at 80 %"),
        ("scaling", "Redis, number of processes, 2: 58,800"),
    ],
)
def test_a_picture_is_well_formed_and_says_its_numbers(docs, name, said):
    picture = ET.parse(docs / "img" / f"bench-{name}.svg").getroot()
    assert picture.tag == f"{SVG}svg"
    assert picture.find(f"{SVG}title").text
    assert said in plain(picture.find(f"{SVG}desc").text)
    assert "prefers-color-scheme: dark" in picture.find(f"{SVG}style").text
    width, height = float(picture.get("width")), float(picture.get("height"))
    for text in picture.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x")) <= width
        assert 0 <= float(text.get("y")) <= height


def test_the_page_in_the_documentation_is_what_its_figures_say():
    bench("plot.py", "--check", ROOT / "docs" / "numbers.json", ROOT / "docs")
    saved = json.loads((ROOT / "docs" / "numbers.json").read_text())
    assert saved["machine"]["versions"]["Python"]
