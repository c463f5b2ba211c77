"""A queue read by our worker, beside a plain loop; `queue_path` does the work."""

import statistics
from collections.abc import Iterator

import queue_path
from table import Effort, Line, Measured, Results, Topic, middle, times


def sqs(effort: Effort) -> Measured:
    return queue_path.measure(["boto3", "memory", "sqlite"], 1000 if effort.quick else 5000)


def lines(results: Results) -> Iterator[Line]:
    runs = results["sqs"]
    peer = [run["boto3"] for run in runs]
    for way, store in (("memory", "memory"), ("sqlite", "SQLite")):
        ours = [run[way] for run in runs]
        ratios = [b["cpu_us"] / a["cpu_us"] for a, b in zip(ours, peer, strict=True)]
        both = [
            f"{1e6 / statistics.median(r['cpu_us'] for r in side):,.0f}/s a core, "
            f"{middle(side, 'cpu_us', '{:.0f} µs')} CPU"
            for side in (ours, peer)
        ]
        work = f"SQS → {store}, decided and deleted"
        yield Line(work, both[0], f"{both[1]} boto3", "", times(ratios, " less CPU"))
        rates = [middle(side, "per_s", "{:,.0f}/s") for side in (ours, peer)]
        yield Line("  rate on the emulator", *rates)
        calls = [f"{statistics.median(r['calls'] for r in side):.3f}" for side in (ours, peer)]
        yield Line("  AWS calls per event", *calls)


TOPIC = Topic(
    "queues",
    "SQS",
    {"sqs": sqs},
    lines,
    "The peer is a boto3 loop that receives ten messages, deletes ten, and keeps no records.",
)
