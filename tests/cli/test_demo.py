"""The demo as a person runs it: in a pipe, on a terminal, interrupted, and proven wrong."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from oncebridge.cli.app import app

DEMO = [sys.executable, "-m", "oncebridge", "demo"]
LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} ")
CAUSES = {
    "redelivered",
    "published again",
    "2nd integration",
    "archive replay",
    "re-serialised",
}


def run(*args: str, code: int = 0, **kwargs) -> str:
    done = subprocess.run(
        [*DEMO, *args], capture_output=True, text=True, check=False, timeout=60, **kwargs
    )
    assert (done.returncode, done.stderr) == (code, ""), done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> list[str]:
    here = tmp_path_factory.mktemp("demo")
    lines = run("--fast", "--seed", "7", env={**os.environ, "TMPDIR": str(here)}).splitlines()
    assert list(here.iterdir()) == []  # it tidies up
    return lines


def number(shown: list[str], name: str) -> int:
    found = [line for line in shown if re.match(rf"  {name} +\d", line)]
    return int(found[0].split()[1]) if found else 0


def verdicts(shown: list[str]) -> Counter[str]:
    return Counter(line[46:55].strip() for line in shown if LINE.match(line))


def test_the_summary_agrees_with_the_truth(shown):
    assert "  every logical event delivered exactly once: yes" in shown
    assert "  look-alikes merged: 0" in shown
    assert "  unreadable bodies kept whole: 2 of 2" in shown
    assert "  every arrival accounted for: yes" in shown


def test_the_numbers_add_up_to_what_arrived(shown):
    names = ("delivered", "duplicate", "dead", "failed", "busy")
    numbers = {name: number(shown, name) for name in names}

    assert sum(numbers.values()) == number(shown, "arrived")
    assert numbers["dead"] == 2
    assert numbers["failed"] == 4
    assert numbers["failed"] + numbers["busy"] == number(shown, "retried")
    assert 0 < numbers["duplicate"] < numbers["delivered"]


def test_every_arrival_has_a_line_with_its_verdict(shown):
    told = verdicts(shown)

    assert sum(told.values()) == number(shown, "arrived")
    assert all(told[name] == number(shown, name) for name in told)


def test_every_cause_is_seen_and_no_repeat_is_without_its_first(shown):
    repeats = [line for line in shown if " duplicate  of " in line]

    assert len(repeats) == number(shown, "duplicate")
    found = [re.search(r"of [0-9a-f]{8}, (.+) after [\d.]+ m?s$", line) for line in repeats]
    overtaken = [line for line in repeats if line.endswith("overtaken by its copy")]
    assert len(overtaken) == found.count(None)
    assert {match[1] for match in found if match} == CAUSES


def test_a_look_alike_is_delivered_and_said_to_be_new(shown):
    alike = [line for line in shown if " new: " in line]

    assert len({line.partition(" new: ")[2] for line in alike}) == 6
    assert all(" delivered " in line for line in alike)


def test_what_the_crm_refuses_fails_and_is_delivered_when_sent_again(shown):
    down = shown.index("── the CRM goes down: it answers 503 ──")
    up = shown.index("── the CRM is up again ──")
    failed = [at for at, line in enumerate(shown) if re.search(r"failed     HTTP 503: retry", line)]
    again = [line for line in shown if " → CRM on try " in line]

    assert len(failed) == 4
    assert all(down < at < up for at in failed)
    # a copy may be faster than the one that was refused
    assert 1 <= len(again) <= 4
    assert all(" delivered " in line for line in again)


def test_the_key_that_reached_the_crm_is_shown(shown):
    keys = re.findall(r'→ CRM  Idempotency-Key: "([0-9a-f]{16})…"', "\n".join(shown))

    assert len(keys) == len(set(keys)) > 50


def test_it_fits_a_terminal_and_is_plain_in_a_pipe(shown):
    assert max(map(len, shown)) <= 100
    assert not any("\x1b" in line for line in shown)


@pytest.mark.full
def test_the_json_is_one_object_that_agrees_with_itself():
    (line,) = run("--json", "--seed", "3", "--seconds", "20").splitlines()
    told = json.loads(line)

    assert told["right"] is True
    assert told["ended_early"] is False
    assert told["seed"] == 3
    assert told["checks"] == {
        "every_event_delivered_exactly_once": True,
        "look_alikes_merged": 0,
        "unreadable_kept": 2,
        "books_balance": True,
    }
    assert told["delivered"] == told["logical_events"]
    assert sum(told["duplicates_by_cause"].values()) == told["duplicate"]
    assert told["dead_by_reason"] == {"not-json": 1, "no-detail": 1}
    ends = ("delivered", "duplicate", "dead", "failed", "busy")
    assert sum(told[verdict] for verdict in ends) == told["arrived"] == 182 + told["retried"]


def on_a_terminal(columns: int, *args: str) -> tuple[int, str]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "CI")}
    with subprocess.Popen(
        [*DEMO, *args],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment, "TERM": "xterm-256color", "LANG": "C.UTF-8"},
    ) as process:
        os.close(theirs)
        seen = b""
        try:
            while piece := os.read(ours, 65536):
                seen += piece
        except OSError:  # how Linux says that the other end has closed
            pass
        finally:
            os.close(ours)
    return process.returncode, seen.decode()


@pytest.mark.full
def test_a_terminal_gets_colours_and_no_line_is_longer_or_cut():
    code, seen = on_a_terminal(80, "--fast", "--seconds", "12")
    plain = re.sub(r"\x1b\[[\d;]*m", "", seen).splitlines()

    assert code == 0, seen
    assert "\x1b[32mdelivered" in seen
    assert "\x1b[33mduplicate" in seen
    assert "\x1b[31mfailed" in seen
    assert max(map(len, plain)) <= 80
    cut = [line for line in plain if line.endswith("…")]
    assert cut == []
    assert "  every logical event delivered exactly once: yes" in plain


def interrupted(tmp_path: Path, *, times: int) -> tuple[int, list[str], str]:
    """Run at a readable pace, and interrupt when the CRM has refused something."""
    with subprocess.Popen(
        [*DEMO, "--seconds", "4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if times and (" failed " in line or "ended early" in line):
                process.send_signal(signal.SIGINT)
                times -= 1
        told = process.stderr.read()
    return process.returncode, lines, told


@pytest.mark.full
def test_an_interrupt_ends_it_early_with_a_summary_that_holds(tmp_path):
    code, lines, told = interrupted(tmp_path, times=1)

    assert (code, told) == (0, "")
    (end,) = [at for at, line in enumerate(lines) if "ended early; " in line]
    assert " → CRM on try " in "\n".join(lines[end:])  # what was refused still got through
    assert "  every logical event delivered exactly once: yes" in lines
    assert "  every arrival accounted for: yes" in lines
    assert number(lines, "arrived") < 50
    assert list(tmp_path.iterdir()) == []


def test_a_second_interrupt_leaves_at_once_and_tidies_up(tmp_path):
    code, lines, told = interrupted(tmp_path, times=2)

    assert (code, told) == (130, "")
    assert "Result" not in lines
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_that_is_closed_leaves_nothing_behind(tmp_path):
    with subprocess.Popen(
        DEMO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        for _ in range(6):
            process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        _, told = process.communicate(timeout=30)

    assert (process.returncode, told) == (130, b"")
    assert list(tmp_path.iterdir()) == []


SABOTAGE = """
import oncebridge.cli.demo as demo
from msgspec.structs import replace
from oncebridge.cli.app import app
from oncebridge.events.rules import Rule

load = demo.config.load

def wrong(**given):
    setup = load(**given)
    rules = (Rule.parse({rule}),)
    return replace(setup, routes=tuple(replace(route, rules=rules) for route in setup.routes))

demo.config.load = wrong
app(["demo", "--json", "--seconds", "10"])
"""


@pytest.mark.parametrize(
    ("rule", "is_once", "is_merged"),
    [
        # too strict: what is published again passes again
        ({"name": "by id", "key": "id"}, False, False),
        # too loose: look-alikes become one, and are lost
        ({"name": "by topic", "key": ["detail.topicName"]}, False, True),
    ],
    ids=["repeats pass", "look-alikes merge"],
)
@pytest.mark.full
def test_a_gateway_with_the_wrong_rule_is_found_out(rule, is_once, is_merged):
    done = subprocess.run(
        [sys.executable, "-c", SABOTAGE.replace("{rule}", repr(rule))],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (1, "")
    told = json.loads(done.stdout)
    assert told["right"] is False
    assert told["checks"]["every_event_delivered_exactly_once"] is is_once
    assert bool(told["checks"]["look_alikes_merged"]) is is_merged
    assert told["checks"]["books_balance"] is True


@pytest.mark.parametrize("seconds", ["0", "-1", "soon"])
def test_a_length_that_makes_no_sense_is_refused(seconds):
    done = CliRunner().invoke(app, ["demo", "--seconds", seconds])

    assert (done.exit_code, done.stdout) == (2, "")
    assert "--seconds" in done.stderr
