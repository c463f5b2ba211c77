"""
How many functions the gateway calls for an event, counted as `make bench` does.

Calls are counted and not timed: the figures are the same on every machine, and more of them are
more work. A change that needs more raises a limit here, in the open, or finds out why.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COUNT = Path(__file__).parents[2] / "bench" / "calls.py"
LIMITS = {
    "100": {"python": 9, "c": 25},
    "1": {"python": 98, "c": 100},
}
"""By batch size; those of single events are a tenth above what they needed when this was written."""


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, float]]:
    command = [sys.executable, "-E", str(COUNT)]  # in debug mode the loop makes calls of its own
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("size", LIMITS)
def test_an_event_needs_few_calls(counted, size):
    found = counted[size]
    print(f"batches of {size}: {found['python']:.1f} Python calls and {found['c']:.1f} C calls")
    assert found["python"] <= LIMITS[size]["python"]
    assert found["c"] <= LIMITS[size]["c"]


def test_what_is_called_more_is_counted(counted):
    """Each event of a large batch costs something, and a batch costs something by itself."""
    for kind in ("python", "c"):
        assert 1 < counted["100"][kind] < counted["10"][kind] < counted["1"][kind]
