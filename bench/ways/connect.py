"""
The `dedupe` of Redpanda Connect, which remembers before it delivers and never commits.

It is loaded into this process, reads a file and drops what is left. Sixteen threads: with one
per processor, which is the default, it spends most of its time waiting for Redis.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import mq_bridge
import mq_bridge_connect
from table import Measured
from traffic import IGNORED, is_repeat, make_events

from ways import WINDOW_S, Address, Way, check
from ways.relay import Relay

FEW = 3_000
BACK = 1003
CACHES = {
    "memory": "memory: {{default_ttl: {window}s, compaction_interval: 60s}}",
    "redis": "redis: {{url: 'redis://127.0.0.1:{port}', default_ttl: {window}s}}",
}
PIPELINE = """
pipeline:
  threads: 16
  processors:
    - dedupe:
        cache: seen
        key: ${{! json("detail").without({ignored}).format_json(no_indent:true).hash("sha256") }}
cache_resources:
  - label: seen
    {cache}
logger: {{level: WARN}}
output: {output}
"""


def measure(way: Way, address: Address, *, quick: bool) -> Measured:
    mq_bridge_connect.register()
    trips = sample(address)
    count = way.most // 4 if quick else way.most
    with ndjson(make_events(count, first=FEW, back=BACK)) as path:
        begins, spent = time.perf_counter(), time.process_time()
        run(address, path, "{drop: {}}")
        took, spent = time.perf_counter() - begins, time.process_time() - spent
    measured: Measured = {"rate": count / took, "cpu": spent / count * 1e6, "events": count}
    return {**measured, "trips": trips} if address.port else measured


def sample(address: Address) -> float:
    """See that it finds the duplicates, and count the round trips of an event."""
    with (
        ndjson(make_events(FEW, back=BACK)) as path,
        ndjson([]) as out,
        Relay(address.port) if address.port else nullcontext() as relay,
    ):
        if relay is not None:
            address = address._replace(port=relay.port)
        run(address, path, f"{{file: {{path: '{out}', codec: lines}}}}")
        passed = len(out.read_bytes().splitlines())
        trips = relay.trips if relay is not None else 0
    check(FEW, FEW - passed, sum(is_repeat(at, BACK) for at in range(FEW)))
    return trips / FEW


def run(address: Address, path: Path, output: str) -> None:
    cache = CACHES[address.kind].format(port=address.port, window=WINDOW_S)
    ignored = ",".join(f'"{name}"' for name in IGNORED)
    yaml = PIPELINE.format(cache=cache, ignored=ignored, output=output)
    mq_bridge.Route.from_config(
        {
            "input": {"file": {"path": str(path)}},
            "output": {"custom": {"name": "connect", "config": {"yaml": yaml}}},
            "batch_size": 100,
            "concurrency": 8,
            "exit_on_empty": True,
        }
    ).run()


@contextmanager
def ndjson(events: list[bytes]) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile(suffix=".ndjson") as file:
        file.writelines(raw + b"\n" for raw in events)
        file.flush()
        yield Path(file.name)
