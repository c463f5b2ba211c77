"""
How many functions are called for one event: in Python, and of those written in C.

    python bench/calls.py         prints JSON

Calls are counted and not timed, with `sys.setprofile`, so the figures do not depend on the machine
or on what else it does. The memory store and a sink that does nothing leave what the gateway
itself needs: read, key, claim, deliver, commit, settle. To resume a coroutine counts as a call.
"""

import asyncio
import gc
import json
import statistics
import sys
from collections.abc import Iterator, Sequence

import uvloop
from table import BATCH, Effort, Line, Measured, Results, Topic, met
from traffic import RULE, NullSink, is_repeat, make_events

from oncebridge import Gateway, Verdict
from oncebridge.stores.memory import MemoryStore

AIM_PYTHON, AIM_C = 9, 25
SIZES = (1, 10, BATCH)
BACK = 1003
WARM, COUNT = 1_100, 2_000
"""The counted events come after the first re-emission: a fifth of them are duplicates."""


def calls(_: Effort) -> Measured:
    """Count the calls per event, in batches of each size."""
    events = make_events(WARM + COUNT, back=BACK)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return {str(size): runner.run(_count(events, size)) for size in SIZES}


async def _count(events: Sequence[bytes], size: int) -> Measured:
    python = c = 0

    def count(_frame: object, kind: str, _arg: object) -> None:
        nonlocal python, c
        python += kind == "call"
        c += kind == "c_call"

    batches = [events[at : at + size] for at in range(WARM, WARM + COUNT, size)]
    async with Gateway(store=MemoryStore(), sink=NullSink(), rules=[RULE]) as gateway:
        for at in range(0, WARM, BATCH):
            await gateway.process(events[at : at + BATCH])
        gc.collect()
        gc.disable()  # what it finalizes would be counted where it happens to run
        sys.setprofile(count)
        try:
            for batch in batches:
                await gateway.process(batch)
        finally:
            sys.setprofile(None)
            gc.enable()
    duplicates = gateway.books.verdicts[Verdict.DUPLICATE]
    if duplicates != sum(is_repeat(at, BACK) for at in range(len(events))):
        raise SystemExit(f"the books say {gateway.books.counts()} of {len(events)} events")
    return {"python": python / COUNT, "c": c / COUNT}


# --- what is told -----------------------------------------------------------------------


def _medians(results: Results, size: int) -> tuple[float, float]:
    runs = [run[str(size)] for run in results["calls"]]
    python, c = (statistics.median(run[kind] for run in runs) for kind in ("python", "c"))
    return python, c


def line(results: Results, work: str, size: int = BATCH) -> Line:
    python, c = _medians(results, size)
    ours = f"{python:.1f} Python, {c:.1f} C"
    if size != BATCH:
        return Line(work, ours)
    reached = met(python <= AIM_PYTHON and c <= AIM_C)
    return Line(work, ours, aim=f"≤ {AIM_PYTHON} and ≤ {AIM_C}", met=reached)


def lines(results: Results) -> Iterator[Line]:
    for size in SIZES:
        yield line(results, f"calls per event, batches of {size}", size)


TOPIC = Topic(
    "calls",
    "Function calls",
    {"calls": calls},
    lines,
    "Python functions and functions written in C that are called for one event, counted with "
    "`sys.setprofile`. Memory store, null sink, a fifth of the events are duplicates.",
)

if __name__ == "__main__":
    print(json.dumps(calls(Effort())))
