"""
One of several processes that decide on one store at the same time.

    python -m ways.crew KIND PORT NAME NUMBER SECONDS     (in this folder's parent)

It gets ready, says so, waits for a line, decides for so many seconds, and prints JSON. Each
process has events of its own, a fifth of them repeats, and four batches under way.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator

import uvloop
from table import BATCH, Measured
from traffic import make_events

from ways import Address
from ways.gateway import ours

IN_FLIGHT = 4
BACK = 1003
AHEAD = 20_000
"""So many events are made before it begins, and as many whenever they run out."""


def batches(number: int) -> Iterator[list[bytes]]:
    first = number * 10**9
    while True:
        events = make_events(AHEAD, first=first, back=BACK)
        first += AHEAD
        for at in range(0, AHEAD, BATCH):
            yield events[at : at + BATCH]


async def work(address: Address, number: int, seconds: float) -> Measured:
    supply = batches(number)
    loop = asyncio.get_running_loop()
    count = duplicates = 0
    async with ours(address) as decide:
        for _ in range(20):  # connections are made, statements prepared
            await decide(next(supply))
        print("ready", flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
        begins, spent = time.perf_counter(), time.process_time()
        ends = begins + seconds

        async def go_on() -> None:
            nonlocal count, duplicates
            while time.perf_counter() < ends:
                batch = next(supply)
                found = await decide(batch)
                count += len(batch)
                duplicates += found

        await asyncio.gather(*[go_on() for _ in range(IN_FLIGHT)])
        took, spent = time.perf_counter() - begins, time.process_time() - spent
        return {
            "rate": count / took,
            "cpu": spent / count * 1e6,
            "events": count,
            "duplicates": duplicates,
        }


def main() -> None:
    kind, port, name, number, seconds = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        address = Address(kind, int(port), name)
        print(json.dumps(runner.run(work(address, int(number), float(seconds)))))


if __name__ == "__main__":
    main()
