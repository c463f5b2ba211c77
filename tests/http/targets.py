"""
Little targets for the client and the sink: real sockets, and a script of what they do.

`serving` starts one and gives a `Seen`, which counts connections and keeps requests.
`answering` is the script that most tests need. `on_both_loops` runs a test on asyncio's
own loop and on uvloop.
"""

import asyncio
import functools
import inspect
import socket
import ssl
import struct
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvloop

TLS = Path(__file__).parent / "tls"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@dataclass
class Request:
    line: str
    headers: list[tuple[str, str]]
    body: bytes
    head: bytes

    def __getitem__(self, name):
        found = [value for other, value in self.headers if other.lower() == name.lower()]
        assert len(found) == 1, f"{name} is there {len(found)} times"
        return found[0]

    def __contains__(self, name):
        return any(other.lower() == name.lower() for other, _ in self.headers)


@dataclass
class Seen:
    port: int = 0
    scheme: str = "http"
    connections: int = 0
    closed: int = 0
    requests: list[Request] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def url(self):
        return f"{self.scheme}://localhost:{self.port}/hook"

    async def until(self, condition):
        async with asyncio.timeout(5), self.changed:
            await self.changed.wait_for(condition)

    async def note(self):
        async with self.changed:
            self.changed.notify_all()


async def read_request(reader):
    """Read one request; None at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    line, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    headers = [tuple(line.split(": ", 1)) for line in lines]
    request = Request(line, headers, b"", head)
    request.body = await reader.readexactly(int(request["content-length"]))
    return request


@asynccontextmanager
async def serving(script, *, tls=None):
    """Serve with `script(seen, reader, writer)` for each connection."""
    seen = Seen(scheme="https" if tls else "http")
    tasks = set()

    async def handle(reader, writer):
        tasks.add(asyncio.current_task())
        seen.connections += 1
        await seen.note()
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
                await script(seen, reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            writer.close()
            with suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()
        seen.closed += 1
        await seen.note()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    seen.port = server.sockets[0].getsockname()[1]
    try:
        yield seen
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


def answering(*answers):
    """Answer request after request, over all connections; the last answer for all the rest."""
    left = list(answers or [OK])

    async def script(seen, reader, writer):
        while request := await read_request(reader):
            seen.requests.append(request)
            await seen.note()
            writer.write(left.pop(0) if len(left) > 1 else left[0])
            await writer.drain()

    return script


def closing_after(*pieces):
    """Read a request, write *pieces*, one segment each, and close."""

    async def script(seen, reader, writer):
        seen.requests.append(await read_request(reader))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    return script


def reset(writer):
    """End a connection the hard way."""
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


@contextmanager
def refusing_port():
    """Hold a port where nobody listens, and nobody can begin to."""
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def server_tls(name="localhost", *, asks_for_certificate=False):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / f"{name}.pem")
    if asks_for_certificate:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(TLS / "ca.pem")
    return context


def on_both_loops(test):
    """Run an async test on both kinds of loop."""

    @functools.wraps(test)
    def run(loop_factory, **others):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(test(**others))

    own = inspect.signature(test)
    name = inspect.Parameter("loop_factory", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), name])
    factories = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return pytest.mark.parametrize("loop_factory", factories.values(), ids=factories)(run)
