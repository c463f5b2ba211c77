"""
How fast `oncebridge audit` reads a recording, and how much memory it takes.

    python bench/audits.py [EVENTS]         another size than that of the table

The recording is made of one simulated hour of a contact centre with 30 % repeats, again and
again, each time with other ids and another hour of the calendar, its bodies filled up to
1.5 KB an event. Memory is the sum over all processes, looked at every 50 ms.
"""

import json
import re
import resource
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
from table import Effort, Line, Measured, Results, Topic, build, met, middle, spread

from oncebridge.audit.engine import audit
from oncebridge.genesys.preset import genesys_rules
from oncebridge.genesys.simulator import simulate

AIM_PER_S = 50_000
HOUR = 9_000
SIZE = 1_500
_UUID = re.compile(rb"[0-9a-f]{8}(?=(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")
_MARK = b"@@@@@@@@"
_START = b"2025-12-12T15:"


def make(path: Path, events: int) -> None:
    """Write a recording of *events* arrivals."""
    filling: dict[int, int] = {}
    hour = []
    for arrival in simulate(1, min(events, HOUR)):
        # by the first arrival of each, so that copies stay copies
        lacking = filling.setdefault(arrival.truth, max(SIZE - len(arrival.raw), 0) // 45)
        hour.append(_filled(json.loads(arrival.raw), lacking))
    lines = [_UUID.sub(_MARK, line.replace(b"\n", b" ")) + b"\n" for line in hour]
    template = b"".join(lines)
    source = next(iter(simulate(1, 1))).raw
    organisation = re.search(rb"/cloud/([0-9a-f]{8})", source)[1]
    template = template.replace(b"/cloud/" + _MARK, b"/cloud/" + organisation)
    begins = datetime(2025, 1, 1, tzinfo=UTC)
    with path.open("wb") as file:
        for number in range(events // len(hour)):
            stamp = (begins + timedelta(hours=number)).strftime("%Y-%m-%dT%H:").encode()
            file.write(template.replace(_MARK, b"%08x" % number).replace(_START, stamp))


def _filled(event: dict, lacking: int) -> bytes:
    """Fill the body up with members like those that real ones have."""
    body = event["detail"]["eventBody"]
    for number in range(lacking):
        body[f"customAttribute{number:02}"] = f"value {number} of what callers said"
    return json.dumps(event, separators=(",", ":")).encode()


class Memory(threading.Thread):
    """Looks at the resident memory of this process and its children."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.ended = threading.Event()

    def run(self) -> None:
        here = psutil.Process()
        while not self.ended.wait(0.05):
            total = here.memory_info().rss
            for child in here.children(recursive=True):
                try:
                    total += child.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.peak = max(self.peak, total)


def measure(events: int) -> Measured:
    """Audit a recording of about *events*."""
    with tempfile.TemporaryDirectory(dir=build(), prefix="bench-") as folder:
        path = Path(folder) / "recorded.ndjson"
        make(path, events)
        size = path.stat().st_size
        before = _cpu_s()
        memory = Memory()
        memory.start()
        report = audit([path], genesys_rules())
        memory.ended.set()
        memory.join()
    return {
        "events": report.events,
        "bytes": size / report.events,
        "per_s": report.events / report.took_s,
        "cpu_us": (_cpu_s() - before) / report.events * 1e6,
        "peak": memory.peak,
        "logical": report.logical,
        "repeats": report.gaps.count,
    }


def _cpu_s() -> float:
    """Give the CPU time of this process and of those it has seen end."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def row(effort: Effort) -> Measured:
    return measure(90_000 if effort.quick else 450_000)


def lines(results: Results) -> Iterator[Line]:
    runs = results["audit"]
    cpu = statistics.median(run["cpu_us"] for run in runs)
    ours = f"{middle(runs, 'per_s', '{:,.0f}/s')}, {cpu:.0f} µs CPU"
    reached = met(statistics.median(run["per_s"] for run in runs) >= AIM_PER_S)
    work = f"audit of {runs[0]['events']:,} events of {runs[0]['bytes'] / 1000:.1f} KB"
    yield Line(work, ours, aim=f"≥ {AIM_PER_S:,}/s", met=reached)
    peaks = [run["peak"] / 1e6 for run in runs]
    yield Line("  peak memory of all processes", spread(peaks, "{:,.0f} MB"))


TOPIC = Topic(
    "audit",
    "Audit",
    {"audit": row},
    lines,
    "30 % of the events are duplicates. All processors are used.",
)

if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)))
