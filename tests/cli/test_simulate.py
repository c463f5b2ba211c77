"""The stream as a file, and the truth about it beside it."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from oncebridge.cli.app import app
from oncebridge.events.event import Event, read
from oncebridge.genesys.simulator import LOOK_ALIKES, REPEATS, Label, simulate

SIMULATE = [sys.executable, "-m", "oncebridge", "simulate"]


def run(*args: str) -> Result:
    """Run without a process of its own."""
    return CliRunner().invoke(app, ["simulate", *args])


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[list[bytes], list[dict]]:
    labels = tmp_path_factory.mktemp("simulate") / "labels.ndjson"
    done = subprocess.run(
        [*SIMULATE, "--events", "400", "--seed", "5", "--labels", labels],
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"\n")
    return (
        done.stdout.removesuffix(b"\n").split(b"\n"),
        [json.loads(line) for line in labels.read_text().splitlines()],
    )


def test_each_line_is_one_event_also_where_it_was_written_over_several(made):
    lines, _ = made

    assert len(lines) == 400
    assert all(isinstance(read(line), Event) for line in lines)
    written = [one.raw for one in simulate(5, 400)]
    assert any(b"\n" in raw for raw in written)
    assert [json.loads(line) for line in lines] == [json.loads(raw) for raw in written]


def test_each_event_has_its_label_in_the_same_order(made):
    lines, labels = made
    expected = [
        {
            "line": at,
            "truth": one.truth,
            "label": one.label.value,
            "at_ms": one.at_ms,
            "resembles": one.resembles,
        }
        for at, one in enumerate(simulate(5, 400), start=1)
    ]

    assert len(lines) == len(labels)
    assert labels == expected
    assert {label["label"] for label in labels} == {label.value for label in Label}


def test_the_labels_are_enough_to_judge_a_consumer(made):
    _, labels = made
    seen: set[int] = set()
    for label in labels:
        kind = Label(label["label"])
        assert (label["truth"] in seen) is (kind in REPEATS)
        assert (label["resembles"] is not None) is (kind in LOOK_ALIKES)
        seen.add(label["truth"])


def test_the_same_seed_gives_the_same_bytes_and_another_others():
    first, again, other = (run("--events", "20", "--seed", seed).stdout for seed in "223")

    assert first == again != other


def test_without_repeats_there_is_none(tmp_path):
    run("--events", "100", "--repeats", "0", "--labels", str(tmp_path / "labels"))
    labels = [json.loads(line) for line in (tmp_path / "labels").read_text().splitlines()]

    assert len({label["truth"] for label in labels}) == 100


@pytest.mark.parametrize(
    "start", ["2031-05-06T07:08:09Z", "2031-05-06T09:08:09+02:00", "2031-05-06T07:08:09"]
)
def test_the_day_begins_when_it_is_told_to(start):
    (line,) = run("--events", "1", "--start", start).stdout.splitlines()

    assert json.loads(line)["time"].startswith("2031-05-06T07:08:")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--start", "yesterday"], "--start"),
        (["--start", "1066-10-14"], "--start"),
        (["--repeats", "1"], "--repeats"),
        (["--events", "0"], "--events"),
        (["--labels", "no/such/place"], "--labels"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(args, named):
    done = run(*args)

    assert (done.exit_code, done.stdout) == (2, "")
    assert named in done.stderr


def test_a_reader_that_has_enough_is_no_error_to_read_about():
    with subprocess.Popen(
        [*SIMULATE, "--events", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
