"""
HTTP in, SQLite, HTTP out, against the same road with no gateway on it.

    python bench/run.py --row http [--quick]

Three processes: a sender, the thing measured, and a receiver. The thing measured is
`oncebridge run` (the HTTP source, a SQLite file with `synchronous=FULL`, the HTTP sink), or
a uvicorn app that POSTs each body on with aiohttp and answers when that has answered. Both
run on uvloop; sender and receiver are the same for both.
"""

import argparse
import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import uvicorn
import uvloop
from processors import cpu_s
from table import build

HERE = Path(__file__)


# --- the receiver -----------------------------------------------------------------------


class Receiver(asyncio.Protocol):
    """Answer every request with 200 as cheaply as can be; the body is never looked at."""

    taken = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            at = head.index(b"content-length:") + 15
            stop = head.find(b"\r\n", at)
            length = int(head[at : stop if stop > 0 else None])
            if len(self.buffer) < end + 4 + length:
                return
            self.buffer = self.buffer[end + 4 + length :]
            Receiver.taken += 1
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


async def receive(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Receiver, "127.0.0.1", port)
    print("ready", flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    server.close()
    print(Receiver.taken, flush=True)


# --- the road without a gateway ---------------------------------------------------------


def direct(port: int, target: int) -> None:
    session: Any = None

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal session
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if session is None:
            session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64))
        url = f"http://127.0.0.1:{target}/"
        headers = {"Content-Type": "application/json"}
        async with session.post(url, data=body, headers=headers) as answer:
            await answer.read()
        reply = {"type": "http.response.start", "status": answer.status, "headers": []}
        await send(reply)
        await send({"type": "http.response.body", "body": b"ok"})

    uvicorn.run(
        app, host="127.0.0.1", port=port, loop="uvloop", http="httptools",
        access_log=False, log_level="warning", lifespan="off",
    )  # fmt: skip


# --- the sender -------------------------------------------------------------------------


class Sender(asyncio.Protocol):
    """One connection: the next request when the last one was answered."""

    def __init__(self, requests: Iterator[bytes], latencies: list[float], done: Any) -> None:
        self.requests, self.latencies, self.done = requests, latencies, done
        self.buffer = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.next()

    def next(self) -> None:
        request = next(self.requests, None)
        if request is None:
            self.transport.close()
            return
        self.began = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if is_whole(self.buffer):
            self.buffer = b""
            self.latencies.append(time.perf_counter() - self.began)
            self.next()

    def connection_lost(self, _error: Any) -> None:
        self.done()


def is_whole(answer: bytes) -> bool:
    """Tell whether all of an answer is there; one that is no yes ends everything."""
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = answer[:end].lower()
    if not head.startswith(b"http/1.1 200"):
        raise SystemExit(f"answered {head[:40]!r} {answer[end:][:200]!r}")
    if b"transfer-encoding: chunked" in head:
        return answer.endswith(b"0\r\n\r\n")
    at = head.index(b"content-length:") + 15
    stop = head.find(b"\r\n", at)
    return len(answer) >= end + 4 + int(head[at : stop if stop > 0 else None])


def requests(port: int, path: str, events: Sequence[bytes]) -> list[bytes]:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return [f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw for raw in events]


async def send(port: int, path: str, events: Sequence[bytes], connections: int) -> list[float]:
    """Send *events* over so many connections; the seconds until each was answered."""
    queue = iter(requests(port, path, events))
    latencies: list[float] = []
    left, ended = connections, asyncio.Event()

    def done() -> None:
        nonlocal left
        left -= 1
        if not left:
            ended.set()

    loop = asyncio.get_running_loop()
    for _ in range(connections):
        await loop.create_connection(lambda: Sender(queue, latencies, done), "127.0.0.1", port)
    await ended.wait()
    return latencies


# --- the measurement --------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int) -> None:
    for _ in range(1200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.025)
    raise SystemExit(f"nothing listens on {port}")


class Road(NamedTuple):
    """Where events are sent to, and the process that takes them."""

    pid: int
    port: int


class Target:
    """A receiver that runs, and how many events it took until it was stopped."""

    def __init__(self) -> None:
        self.port = free_port()
        command = [sys.executable, HERE, "--role", "receive", "--port", str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.taken = 0
        wait_for(self.port)

    def stop(self) -> None:
        self._process.terminate()
        self.taken = int((self._process.communicate(timeout=30)[0] or "0").split()[-1])


@contextlib.contextmanager
def receiving() -> Iterator[Target]:
    target = Target()
    try:
        yield target
    finally:
        target.stop()


@contextlib.contextmanager
def running(kind: str, target: int) -> Iterator[Road]:
    """Open the road called *kind* to the port *target*, in a folder of its own."""
    port = free_port()
    command = {
        "direct": [
            *(sys.executable, HERE, "--role", "direct"),
            *("--port", str(port), "--target", str(target)),
        ],
        "ours": [
            *(sys.executable, "-m", "oncebridge", "run", "--log-level", "error"),
            *("--source", f"http://127.0.0.1:{port}/", "--preset", "genesys"),
            *("--store", "sqlite:seen.db", "--dead", "sqlite:dead.db"),
            *("--sink", f"http://127.0.0.1:{target}/"),
        ],
    }[kind]
    # Not in /tmp, which is memory in some places: what is durable has to reach a disk.
    with tempfile.TemporaryDirectory(dir=build(), prefix="bench-") as directory:
        process = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL)
        try:
            wait_for(port)
            yield Road(process.pid, port)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def measure(kind: str, events: Sequence[bytes], connections: int) -> dict[str, float]:
    """Send *events* down the road called *kind*; events a second, CPU, latency."""
    warm = len(events) // 10
    with (
        receiving() as target,
        running(kind, target.port) as road,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(send(road.port, "/", events[:warm], connections))
        before, began = cpu_s(road.pid), time.perf_counter()
        own = time.process_time()
        latencies = sorted(runner.run(send(road.port, "/", events[warm:], connections)))
        took, own = time.perf_counter() - began, time.process_time() - own
        cpu = cpu_s(road.pid) - before
    count = len(events) - warm
    return {
        "events": len(events),
        "taken": target.taken,
        "per_s": count / took,
        "cpu_us": cpu / count * 1e6,
        "sender_cpu_us": own / count * 1e6,
        "p50_ms": latencies[len(latencies) // 2] * 1000,
        "p99_ms": latencies[int(len(latencies) * 0.99)] * 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=["receive", "direct"], required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--target", type=int, default=0)
    given = parser.parse_args()
    if given.role == "direct":
        direct(given.port, given.target)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(receive(given.port))


if __name__ == "__main__":
    main()
