"""
Measure one way, and print JSON.

The processor time is this process's alone. Then a relay is put between client and server, and
a few events are decided on once more to count the round trips; nothing is timed then.
"""

import argparse
import asyncio
import json
import math
import time

import uvloop
from table import Measured
from traffic import is_repeat

from ways import WAYS, Address, Way, check
from ways.relay import Relay


async def through(
    way: Way,
    address: Address,
    supply: list[bytes],
    *,
    seconds: float = math.inf,
    relay: Relay | None = None,
) -> Measured:
    """Decide on *supply* in batches until it or the time is over."""
    batches = [supply[at : at + way.batch] for at in range(0, len(supply), way.batch)]
    warm = way.warm // way.batch
    async with way.function(address) as decide:
        for batch in batches[:warm]:
            await decide(batch)
        rest = iter(batches[warm:])
        ends = time.perf_counter() + seconds

        async def work() -> tuple[int, int]:
            count = found = 0
            for batch in rest:
                duplicates = await decide(batch)
                found += duplicates
                count += len(batch)
                if time.perf_counter() > ends:
                    break
            return count, found

        before = relay.trips if relay is not None else 0
        begins, spent = time.perf_counter(), time.process_time()
        done = await asyncio.gather(*[work() for _ in range(way.in_flight)])
        took, spent = time.perf_counter() - begins, time.process_time() - spent
        after = relay.trips if relay is not None else 0
    count, found = (sum(numbers) for numbers in zip(*done, strict=True))
    # batches are taken in order, so these are the first *count* events after the warm ones
    check(count, found, sum(is_repeat(way.warm + at, way.back) for at in range(count)))
    measured: Measured = {"rate": count / took, "cpu": spent / count * 1e6, "events": count}
    return measured if relay is None else {**measured, "trips": (after - before) / count}


def measure(way: Way, address: Address, *, quick: bool) -> Measured:
    count = way.warm + way.most
    seconds = 0.4 if quick else 2.0
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        supply = way.supply(count // 4 if quick else count)
        measured = runner.run(through(way, address, supply, seconds=seconds))
        if address.port and way.in_flight == 1:
            few = way.supply(way.warm + max(200, 5 * way.batch), first=count)
            with Relay(address.port) as relay:
                here = address._replace(port=relay.port)
                measured["trips"] = runner.run(through(way, here, few, relay=relay))["trips"]
    return measured


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=WAYS)
    parser.add_argument("way")
    parser.add_argument("port", type=int)
    parser.add_argument("name")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    way = WAYS[given.kind][given.way]
    address = Address(given.kind, given.port, given.name)
    work = way.function if way.found.endswith(":measure") else measure
    print(json.dumps(work(way, address, quick=given.quick)))


if __name__ == "__main__":
    main()
