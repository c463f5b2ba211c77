"""
A queue, read by a worker, beside a plain loop that remembers nothing.

    python bench/run.py --row sqs [--quick]

The server is an emulator (ministack), one for both, and it is the slower side: so it is the
processor time of the reader that counts, and how many calls it makes of AWS. Ours reads,
decides (memory or SQLite), hands to a sink that takes everything, and deletes; a fifth of the
messages are repeats. The loop is boto3's: receive ten, delete ten.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__)
sys.path.insert(0, str(HERE.parents[1]))


def measure(ways: list[str], count: int) -> dict[str, Any]:
    """Fill a queue for each way, and let it be read in a process of its own."""
    from tests.servers.aws import AWS, _ministack

    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        server = _ministack(Path(folder))
        server.process.start()
        try:
            more = {"AWS_ENDPOINT_URL": server.endpoint, "AWS_DEFAULT_REGION": AWS["AWS_REGION"]}
            env = {**os.environ, **AWS, **more}
            for way in ways:
                words = [sys.executable, HERE, way, "--count", str(count)]
                subprocess.run([*words, "--fill"], env=env, check=True, cwd=folder)
                done = subprocess.run(
                    words, env=env, check=True, cwd=folder, stdout=subprocess.PIPE
                )
                measured[way] = json.loads(done.stdout)
        finally:
            server.process.kill()
    return measured


def fill(name: str, count: int) -> None:
    import boto3
    from traffic import make_events

    sqs = boto3.client("sqs")
    url = sqs.create_queue(QueueName=name)["QueueUrl"]
    events = make_events(count, back=203)
    for at in range(0, count, 10):
        entries = [
            {"Id": str(n), "MessageBody": raw.decode()}
            for n, raw in enumerate(events[at : at + 10])
        ]
        sqs.send_message_batch(QueueUrl=url, Entries=entries)


def boto3_loop(name: str, count: int) -> int:
    import boto3

    sqs = boto3.client("sqs")
    calls = 0

    def counted(**_: Any) -> None:
        nonlocal calls
        calls += 1

    sqs.meta.events.register("before-send.sqs.*", counted)
    url = sqs.get_queue_url(QueueName=name)["QueueUrl"]
    left = count
    while left:
        answer = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=20)
        messages = answer.get("Messages", [])
        entries = [
            {"Id": str(n), "ReceiptHandle": message["ReceiptHandle"]}
            for n, message in enumerate(messages)
        ]
        if entries:
            sqs.delete_message_batch(QueueUrl=url, Entries=entries)
        left -= len(entries)
    return calls


async def ours(name: str, count: int, store: Any) -> tuple[int, float]:
    from traffic import RULE, NullSink

    from oncebridge import Gateway
    from oncebridge.aws.client import AwsClient
    from oncebridge.base.clock import SystemDice, system_clock
    from oncebridge.engine.router import RouteEntry, Router
    from oncebridge.sources.api import Host
    from oncebridge.sources.sqs.source import SqsSource

    calls = 0
    send = AwsClient._send

    async def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return await send(*arguments)

    AwsClient._send = counted
    gateway = Gateway(store=store, sink=NullSink(), rules=[RULE])
    router = Router([RouteEntry(gateway)])
    source = SqsSource.from_url(f"sqs://{name}")
    await router.open()
    await source.open(Host(router, None, store, 500, system_clock, SystemDice()))
    running = asyncio.create_task(source.run())
    while gateway.books.counts()["arrived"] < count or gateway.books.in_flight:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    took = time.perf_counter()  # the last of them are deleted while it stops
    source.stop()
    await router.drain(timedelta(seconds=10))
    await running
    assert gateway.books.counts()["duplicate"] == sum(
        at % 5 == 4 and at > 203 for at in range(count)
    )
    await source.aclose()
    await router.aclose()
    return calls, took


def run(way: str, count: int) -> dict[str, float]:
    if way == "boto3":
        import boto3  # noqa: F401 - not part of what is measured
    else:
        import uvloop

        from oncebridge.sources.sqs import source as sqs  # noqa: F401
        from oncebridge.stores.memory import MemoryStore
        from oncebridge.stores.sqlite.store import SQLiteStore
    began, cpu = time.perf_counter(), time.process_time()
    if way == "boto3":
        calls, ended = boto3_loop(way, count), time.perf_counter()
    else:
        store = MemoryStore() if way == "memory" else SQLiteStore("seen.db")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            calls, ended = runner.run(ours(way, count, store))
    return {
        "per_s": count / (ended - began),
        "cpu_us": (time.process_time() - cpu) / count * 1e6,
        "calls": calls / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["boto3", "memory", "sqlite"])
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--fill", action="store_true")
    given = parser.parse_args()
    if given.fill:
        fill(given.way, given.count)
    else:
        print(json.dumps(run(given.way, given.count)))


if __name__ == "__main__":
    main()
