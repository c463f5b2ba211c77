"""
How fast `oncebridge audit` is, and how much memory it takes: `audit_load.py [EVENTS]`.

The recording is made of one simulated hour of a contact centre with 30 % repeats, again and
again, each time with other ids and another hour of the calendar, its bodies filled up to
1.5 KB an event. It lies in TMPDIR and is removed at the end. Memory is the sum over all
processes, looked at every 50 ms.
"""

import json
import re
import resource
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from oncebridge.audit.engine import audit
from oncebridge.genesys.preset import genesys_rules
from oncebridge.genesys.simulator import simulate

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
        import psutil

        here = psutil.Process()
        while not self.ended.wait(0.05):
            total = here.memory_info().rss
            for child in here.children(recursive=True):
                try:
                    total += child.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.peak = max(self.peak, total)


def main() -> None:
    events = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recorded.ndjson"
        make(path, events)
        size = path.stat().st_size
        made_s = time.process_time()
        memory = Memory()
        memory.start()
        begun = time.perf_counter()
        marks = []

        def note(done: int, size: int) -> None:
            if done == size:
                marks.append(time.perf_counter() - begun)

        report = audit([path], genesys_rules(), progress=note)
        memory.ended.set()
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        cpu_s = sum(one.ru_utime + one.ru_stime for one in used) - made_s
        print(
            f"{report.events:,} events of {size // report.events:,} bytes: "
            f"{report.took_s:.1f} s ({marks[-1]:.1f} s of them reading), "
            f"{report.events / report.took_s:,.0f} events/s, "
            f"{cpu_s * 1e6 / report.events:.1f} us of processor each, "
            f"{memory.peak / 1e6:,.0f} MB at most; "
            f"{report.logical:,} logical, {report.gaps.count:,} repeats"
        )


if __name__ == "__main__":
    main()
