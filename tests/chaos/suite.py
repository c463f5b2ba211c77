"""Parts of the test suite that belong to the proof, at full size, each as one row of the table."""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from xml.etree import ElementTree as ET

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Suite:
    what: str
    store: str
    tests: tuple[str, ...]


SUITES = {
    "contract": Suite(what="contract", store="all", tests=("tests/contract",)),
    "machine": Suite(what="state machine", store="all", tests=("tests/model",)),
    "races": Suite(what="races of processes", store="all", tests=("tests/stores/test_races.py",)),
    "faults": Suite(
        what="order, shadow, outage modes, breakers, owed commits",
        store="memory, redis",
        tests=("tests/faults", "tests/unit/test_gateway.py"),
    ),
    "outage": Suite(
        what="an outage under load",
        store="all with a server",
        tests=("tests/stores/test_outage.py",),
    ),
    "naive": Suite(
        what="control: common hand-written solutions", store="", tests=("tests/regression",)
    ),
}


@dataclass(frozen=True)
class SuiteReport:
    """What has happened."""

    tests: int
    passed: int
    seconds: float
    output: str

    @property
    def is_right(self) -> bool:
        """Everything passed, and nothing was left out."""
        return self.passed == self.tests > 0


def run(suite: Suite, *, full: bool) -> SuiteReport:
    """Run the tests of *suite* in two processes."""
    began = monotonic()
    with tempfile.TemporaryDirectory(prefix="oncebridge-suite-") as folder:
        results = Path(folder) / "results.xml"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-n", "2", "--tb=short"),
            *("-p", "no:cacheprovider", f"--junitxml={results}", *suite.tests),
            *(["--full"] if full else []),
        ]
        # What pytest itself was told for another run is not for this one.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = process.communicate()
        finally:
            if process.poll() is None:
                process.terminate()  # so that it stops its servers
                process.wait()
        return report_of(results, monotonic() - began, process.returncode, output)


def report_of(results: Path, seconds: float, code: int, output: str) -> SuiteReport:
    """Read what pytest wrote to *results*, and how it ended."""
    if not results.exists():
        return SuiteReport(0, 0, seconds, output)
    suites = list(ET.parse(results).getroot().iter("testsuite"))
    tests = sum(int(one.get("tests", 0)) for one in suites)
    wrong = sum(
        int(one.get(kind, 0)) for one in suites for kind in ("failures", "errors", "skipped")
    )
    # A run that ended otherwise is not one that passed.
    return SuiteReport(tests, tests - max(wrong, int(code != 0)), seconds, output)
