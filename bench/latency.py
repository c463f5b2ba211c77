"""
How long an event takes from HTTP in to HTTP out, at 10, 50 and 80 % of what is possible.

Events are sent at a constant rate, whatever becomes of those before them, and the time of each
counts from when it should have been sent: one that has to wait because others are slow is slow
itself. The peak is measured first, in the same run, with senders that send the next event when
the last one was answered. The same rates go to uvicorn and aiohttp with no gateway in between,
and to the receiver itself; what is left after taking those away is what we add.
"""

import asyncio
import gc
import itertools
import selectors
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import http_path
import uvloop
from table import Effort, Line, Measure, Measured, Results, Topic, met, spread
from traffic import make_events

LOADS = (10, 50, 80)
HALF = 50
AIM_MS = 5
"""Added by us to the p50 of the same road with no gateway, at half load."""
CONNECTIONS = 64
ROADS = {"ours": "ours", "direct": "uvicorn + aiohttp", "straight": "direct"}


# --- the sender -------------------------------------------------------------------------


class Wire(asyncio.Protocol):
    """One connection: it carries one request at a time."""

    def __init__(self, freed: "Callable[[Wire], None]") -> None:
        self._freed = freed
        self._buffer = b""
        self._due = 0.0
        self.took: list[float] = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def carry(self, request: bytes, due: float) -> None:
        self._due = due
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if http_path.is_whole(self._buffer):
            self._buffer = b""
            self.took.append(time.perf_counter() - self._due)
            self._freed(self)


async def at_rate(
    port: int, events: Sequence[bytes], per_s: float
) -> tuple[list[float], list[float]]:
    """
    Send *events* at a constant rate.

    Gives the seconds from when each was due to its answer, and how late the sender itself was.
    """
    loop = asyncio.get_running_loop()
    free: list[Wire] = []
    waiting: deque[tuple[bytes, float]] = deque()
    left, over = len(events), asyncio.Event()
    late: list[float] = []

    def freed(wire: Wire) -> None:
        nonlocal left
        left -= 1
        if waiting:
            wire.carry(*waiting.popleft())
        else:
            free.append(wire)
        if not left:
            over.set()

    wires = []
    for _ in range(CONNECTIONS):
        _, wire = await loop.create_connection(lambda: Wire(freed), "127.0.0.1", port)
        wires.append(wire)
    free += wires
    requests = iter(http_path.requests(port, "/", events))
    begins = time.perf_counter() + 0.1
    dues = (begins + number / per_s for number in itertools.count())

    def send_due(due: float) -> None:
        """Send what is due by now, and come back when the next one is."""
        while (now := time.perf_counter()) >= due:
            request = next(requests, None)
            if request is None:
                return
            late.append(now - due)
            if free:
                free.pop().carry(request, due)
            else:
                waiting.append((request, due))
            due = next(dues)
        loop.call_later(due - now, send_due, due)

    gc.collect()
    gc.disable()
    send_due(next(dues))
    await over.wait()
    gc.enable()
    for wire in wires:
        wire.transport.close()
    return [seconds for wire in wires for seconds in wire.took], late


def precise_loop() -> asyncio.AbstractEventLoop:
    """Make a loop that keeps time to the microsecond; uvloop and epoll do to the millisecond."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


# --- the measurement --------------------------------------------------------------------


def row(load: int) -> Measure:
    def measure(effort: Effort) -> Measured:
        seconds = 1.5 if effort.quick else 5.0
        numbers = itertools.count(0, 10**7)

        def fresh(count: int) -> list[bytes]:
            return make_events(count, first=next(numbers), back=1003)

        with ExitStack() as stack:
            target = stack.enter_context(http_path.receiving())
            ports = {"straight": target.port}
            for kind in ("direct", "ours"):
                ports[kind] = stack.enter_context(http_path.running(kind, target.port)).port
            for port in ports.values():
                closed(port, fresh(2_000))
            peak = closed(ports["ours"], fresh(8_000 if effort.quick else 20_000))
            per_s = peak * load / 100
            roads = {
                road: percentiles(ports[road], fresh(int(per_s * seconds)), per_s) for road in ROADS
            }
        return {"peak": peak, "roads": roads}

    return measure


def closed(port: int, events: Sequence[bytes]) -> float:
    """Send as fast as answers come; events a second."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        begins = time.perf_counter()
        runner.run(http_path.send(port, "/", events, CONNECTIONS))
        return len(events) / (time.perf_counter() - begins)


def percentiles(port: int, events: Sequence[bytes], per_s: float) -> Measured:
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        begins = time.perf_counter()
        took, late = runner.run(at_rate(port, events, per_s))
        elapsed = time.perf_counter() - begins
    return {
        "p50": percentile(took, 0.5),
        "p99": percentile(took, 0.99),
        "max": percentile(took, 1),
        "late p99": percentile(late, 0.99),
        "events": len(took),
        "asked": per_s,
        "sent": len(took) / elapsed,
    }


def percentile(seconds: Sequence[float], share: float) -> float:
    """Give milliseconds."""
    return sorted(seconds)[min(int(len(seconds) * share), len(seconds) - 1)] * 1000


# --- what is told -----------------------------------------------------------------------


KINDS = {f"latency-{load}": load for load in LOADS}


def half_line(results: Results, work: str) -> Line:
    """Tell the p50 at half load beside that of the same road with no gateway."""
    found = [run["roads"] for run in results[f"latency-{HALF}"]]
    ours, direct = (
        spread([one[road]["p50"] for one in found], "{:.1f} ms") for road in ("ours", "direct")
    )
    more = statistics.median(one["ours"]["p50"] - one["direct"]["p50"] for one in found)
    told = f"{more:+.1f} ms", f"≤ +{AIM_MS} ms", met(more <= AIM_MS)
    return Line(work, ours, "", f"{direct} no gateway", *told)


def lines(results: Results) -> Iterator[Line]:
    for name, load in KINDS.items():
        runs = results[name]
        found = [run["roads"] for run in runs]
        rate = statistics.median(run["peak"] for run in runs) * load / 100
        cells = [" / ".join(figures(found, road)) for road in ROADS]
        beside = [
            " / ".join(added(found, other, name) for name in ("p50", "p99"))
            for other in ("direct", "straight")
        ]
        yield Line(f"{load} % of peak, {rate:,.0f}/s", *cells, *beside)


def figures(found: Sequence[Measured], road: str) -> Iterator[str]:
    for name in ("p50", "p99"):
        values = [run[road][name] for run in found]
        told = f"{statistics.median(values):.1f}"
        yield f"{told} ({min(values):.1f}-{max(values):.1f})" if len(values) > 1 else told


def added(found: Sequence[Measured], other: str, name: str) -> str:
    return f"{statistics.median(run['ours'][name] - run[other][name] for run in found):+.1f}"


TOPIC = Topic(
    "latency",
    "Latency from HTTP in to HTTP out, by load",
    {name: row(load) for name, load in KINDS.items()},
    lines,
    "Milliseconds, p50 / p99, with a SQLite store. Events are sent at a constant rate, and each is "
    "timed from when it was due, so slow events do not hide the delay of others. The peak is measured "
    "before each. Sender, service and receiver share this machine.",
    Line(
        "load",
        "ours",
        "uvicorn + aiohttp",
        "direct",
        "added to uvicorn + aiohttp",
        "added to direct",
    ),
)
