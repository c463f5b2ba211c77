"""
How long single events take while other clients send the costliest bodies that are accepted.

Four clients send bodies that are small on the wire or dense inside, each the next one when the
last one was answered. Beside them, events arrive one by one at a constant rate, and the time of
each counts from when it was due. An event that is answered with anything but 200 ends the row.
"""

import asyncio
import gzip
import itertools
import statistics
from collections.abc import Iterator, Sequence

import http_path
from latency import at_rate, percentile, precise_loop
from table import Effort, Line, Measured, Results, Topic, met, middle
from traffic import make_events

CLIENTS = 4
PER_S = 50
AIM_MS = 250
_SIZE = 2 * 1024 * 1024 - 4096


def filled(unit: bytes, size: int = _SIZE) -> bytes:
    """Make an array of *unit* again and again."""
    return b"[" + b",".join([unit] * (size // (len(unit) + 1))) + b"]"


def around(inner: bytes) -> bytes:
    return b'{"version":"0","id":"a","detail-type":"b","source":"c","detail":{"d":%b}}' % inner


def dense(unit: bytes, values: int) -> bytes:
    return around(filled(unit, values * (len(unit) + 1)))


BODIES = {
    "small objects": around(filled(b"{}")),
    "as many numbers as may be": dense(b"0.1", 149_000),
    "as many odd numbers as may be": dense(b"1e-9", 37_000),
    "as many brackets as may be": dense(b"[" * 90 + b"]" * 90, 1600),
    "a name twice": around(filled(b'{"a":1}', 18_000 * 8) + b',"e":1,"e":2'),
    "long numbers": around(filled(b"1" * 990)),
    "an array of a million": filled(b"1"),
    "10,000 events": filled(around(filled(b"1e-9", 100)), 10_000 * 160),
    "700,000 lines": b"{}\n" * (_SIZE // 3),
}
"""Bodies by what is costly about them; each is sent packed and plain in turn."""


async def send_again(port: int, bodies: Sequence[bytes], answers: list[int]) -> None:
    """Send *bodies* in turn over one connection, as fast as they are answered."""
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Encoding: %b\r\n"
    for body in itertools.cycle(bodies):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        encoding = b"gzip" if body.startswith(b"\x1f\x8b") else b"identity"
        writer.write(head % encoding + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = await reader.read()
        answers.append(int(answer[9:12]))
        writer.close()


async def beside(port: int, bodies: Sequence[bytes], events: Sequence[bytes]) -> Measured:
    answers: list[int] = []
    clients = [asyncio.create_task(send_again(port, bodies, answers)) for _ in range(CLIENTS)]
    try:
        took, _ = await at_rate(port, events, PER_S)
    finally:
        for client in clients:
            client.cancel()
        ended = await asyncio.gather(*clients, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error
    return {
        "p50": percentile(took, 0.5),
        "p99": percentile(took, 0.99),
        "max": percentile(took, 1),
        "bodies": len(answers),
        "answers": {str(status): answers.count(status) for status in sorted({*answers})},
    }


def neighbours(effort: Effort) -> Measured:
    count = PER_S * (4 if effort.quick else 10)
    numbers = itertools.count(0, 10**7)
    measured: Measured = {}
    with http_path.receiving() as target, http_path.running("ours", target.port) as road:
        for name, body in BODIES.items():
            events = make_events(count, first=next(numbers))
            with asyncio.Runner(loop_factory=precise_loop) as runner:
                bodies = [gzip.compress(body), body]
                measured[name] = runner.run(beside(road.port, bodies, events))
    return measured


def lines(results: Results) -> Iterator[Line]:
    runs = results["neighbours"]
    for name in runs[0]:
        found = [run[name] for run in runs]
        p99 = statistics.median(run["p99"] for run in found)
        both = " / ".join(middle(found, share, "{:.0f}") for share in ("p50", "p99"))
        aim = f"p99 ≤ {AIM_MS} ms"
        yield Line(f"during {name}", both, aim=aim, met=met(p99 <= AIM_MS))


TOPIC = Topic(
    "neighbours",
    "Single events during costly requests",
    {"neighbours": neighbours},
    lines,
    f"Milliseconds, p50 / p99, of {PER_S} events a second from HTTP in to HTTP out, while "
    f"{CLIENTS} other clients send the costliest bodies without a pause.",
    Line("work", "p50 / p99 ms", "", "", "", "target", "met?"),
)
