import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.fixture(scope="module")
def shown() -> list[str]:
    done = subprocess.run(
        [sys.executable, str(DEMO), "--fast", "--seed", "7"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def number(shown: list[str], name: str) -> int:
    (found,) = [line for line in shown if re.match(rf"  {name} +\d", line)]
    return int(found.split()[1])


def test_the_summary_agrees_with_the_truth(shown):
    assert "  every logical event delivered exactly once: yes" in shown
    assert "  look-alikes merged: 0" in shown
    assert "  the books balance: yes" in shown


def test_the_numbers_add_up_to_what_arrived(shown):
    delivered, duplicate, dead = (
        number(shown, name) for name in ("delivered", "duplicate", "dead")
    )

    assert delivered + duplicate + dead == number(shown, "arrived")
    assert dead == 2
    assert 0 < duplicate < delivered


def test_every_arrival_has_a_line_with_its_verdict(shown):
    lines = [line for line in shown if re.match(r"\d\d:\d\d:\d\d\.\d{3} ", line)]
    verdicts = [line[46:55].strip() for line in lines]

    assert len(lines) == number(shown, "arrived")
    assert verdicts.count("delivered") == number(shown, "delivered")
    assert verdicts.count("duplicate") == number(shown, "duplicate")
    assert verdicts.count("dead") == number(shown, "dead")


def test_every_cause_is_seen_and_no_repeat_is_without_its_first(shown):
    repeats = [line for line in shown if " duplicate  of " in line]

    assert len(repeats) == number(shown, "duplicate")
    assert all(re.search(r"of [0-9a-f]{8} +[\d.]+ m?s ago  \w", line) for line in repeats)
    causes = {line.rpartition(" ago  ")[2] for line in repeats}
    assert causes == {
        "redelivered",
        "published again",
        "second integration",
        "archive replay",
        "re-serialised",
    }


def test_it_fits_a_terminal_and_is_plain_in_a_pipe(shown):
    assert max(map(len, shown)) <= 100
    assert not any("\x1b" in line for line in shown)
