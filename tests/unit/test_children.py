"""What the tests start begins with default signals, however the tests themselves were started."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_IGNORED = """
import signal
print(*(n.name for n in signal.Signals if signal.getsignal(n) is signal.SIG_IGN))
"""
_PYTHON_ITSELF = {"SIGPIPE", "SIGXFSZ"}


def test_a_child_ignores_no_signal():
    done = subprocess.run(
        [sys.executable, "-c", _IGNORED], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == _PYTHON_ITSELF


@pytest.mark.full
@pytest.mark.parametrize("workers", ["0", "1"])
def test_nor_does_it_under_nohup_in_the_background(workers):
    this = f"{Path(__file__)}::{test_a_child_ignores_no_signal.__name__}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", workers, this],
        preexec_fn=_ignore,
        env={name: value for name, value in os.environ.items() if "PYTEST" not in name},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def _ignore() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
