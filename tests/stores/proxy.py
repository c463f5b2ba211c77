"""
A wire that can be cut: a TCP proxy on loopback, and what can go wrong on the way.

It runs in a thread with a loop of its own, so that it goes on while the loop of a test is
blocked. It knows nothing of the protocol that passes through. An *exchange* is what a client
sends until it waits, and what it hears then; a fault strikes exchanges, and may let some pass
before the first it strikes.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from enum import Enum
from typing import Any, Self

GARBAGE = b"\x7fHTTP/9 -garbage\r\n\xff" * 64
_RESET = struct.pack("ii", 1, 0)


class Fault(Enum):
    """What befalls a request or its reply."""

    REFUSE = "refuse"
    """Nobody listens any more, and what was connected is reset."""
    RESET_BEFORE = "reset before"
    """The connection is reset, and the request never arrives."""
    RESET_AFTER = "reset after"
    """The request is applied, and the connection reset instead of a reply."""
    SWALLOW = "swallow"
    """The request is applied, and no reply comes; the connection stays."""
    TRICKLE = "trickle"
    """The reply comes a byte at a time, too slowly to be of use."""
    CRUMBS = "crumbs"
    """Request and reply come a byte at a time, but swiftly. No reason to fail."""
    LATE_REPLY = "late reply"
    """The reply comes when nobody waits for it any more."""
    LATE_REQUEST = "late request"
    """The request arrives when its sender has long given up, and is applied then."""
    HALF_OPEN = "half-open"
    """The peer has gone without a word: nothing arrives, and nobody answers a connect."""
    GARBAGE = "garbage"
    """Something else comes instead of the reply, at every exchange the same."""
    CUT = "cut"
    """The reply ends in the middle, in good order."""


class Proxy:
    """Pass on to *target* what comes to `port`, until told otherwise."""

    def __init__(self, target: int, *, late_s: float = 1.5, garbage: bytes = GARBAGE) -> None:
        self._target = target
        self.late_s = late_s
        self.garbage = garbage
        self.fault: Fault | None = None
        self.struck = 0
        """How many exchanges the fault has struck."""
        self._spared = 0
        self._wires: set[_Wire] = set()
        self._fillers: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        # Keeps the port ours while nobody listens on it.
        self._guard = _bound(0)
        self.port: int = self._guard.getsockname()[1]
        self._listener: socket.socket | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._listen)
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def connections(self) -> int:
        return len(self._wires)

    def strike(self, fault: Fault, *, after: int = 0) -> None:
        """Let *after* exchanges pass, and strike all others until `heal`."""
        self._do(lambda: self._strike(fault, after))

    def heal(self) -> None:
        """Let everything pass again; what was broken stays broken."""
        self._do(self._heal)

    def hang_up(self) -> None:
        """End all connections in good order, as servers do with such as are idle."""
        self._do(lambda: [wire.hang_up() for wire in list(self._wires)])

    # --- in the thread -----------------------------------------------------------------

    def _do(self, work: Callable[[], Any]) -> None:
        done: threading.Event = threading.Event()

        def run() -> None:
            try:
                work()
            finally:
                done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(10), "the proxy is stuck"

    def _strike(self, fault: Fault, after: int) -> None:
        self.fault, self.struck, self._spared = fault, 0, after
        if fault is Fault.REFUSE:
            self._shut()
            for wire in list(self._wires):
                wire.reset()
        elif fault is Fault.HALF_OPEN and not after:
            self._deafen()

    def _heal(self) -> None:
        self.fault = None
        self._undeafen()
        self._listen()

    def strikes(self) -> bool:
        """Tell whether an exchange that begins now is to be struck, and count it."""
        if self.fault is None:
            return False
        if self._spared:
            self._spared -= 1
            return False
        self.struck += 1
        if self.fault is Fault.HALF_OPEN:
            self._deafen()
        return True

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = _bound(self.port)
            self._listener.listen(128)
            self._listener.setblocking(False)
            # Not `sock_accept`: a connection that it has accepted is lost if it is cancelled then.
            self._loop.add_reader(self._listener, self._accept, self._listener)

    def _shut(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        self._listener = None

    def _deafen(self) -> None:
        """Fill the queue of those who wait to be accepted: the kernel drops who comes then."""
        if self._listener is None or self._fillers:
            return
        self._loop.remove_reader(self._listener)
        self._listener.listen(0)
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self.port))
            self._fillers.append(filler)

    def _undeafen(self) -> None:
        if not self._fillers:
            return
        for filler in self._fillers:
            filler.close()
        self._fillers.clear()
        self._shut()  # and with it all who are waiting in the queue

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except OSError:  # it has gone again
            return
        client.setblocking(False)
        wire = _Wire(self, client, self._target)
        self._wires.add(wire)
        self.start(wire.run()).add_done_callback(lambda _: self._forget(wire))

    def _forget(self, wire: "_Wire") -> None:
        self._wires.discard(wire)
        wire.close_if_unused()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end(self) -> None:
        self._undeafen()
        self._shut()
        self._guard.close()
        await asyncio.sleep(0.01)  # who was just accepted is connected by then
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the loop's next turn


class _Wire:
    """One connection, from its client to the server and back."""

    def __init__(self, proxy: Proxy, client: socket.socket, target: int) -> None:
        self._proxy = proxy
        self._socket = client
        self._target = target
        self._fault: Fault | None = None
        """What strikes the present exchange."""
        self._client_speaks = False
        self._is_reset = False

    async def run(self) -> None:
        reader, self._client = await asyncio.open_connection(sock=self._socket)
        try:
            with suppress(OSError):
                await self._pass_on(reader)
        finally:
            if self._is_reset:
                self._client.transport.abort()
            else:
                self._client.close()

    async def _pass_on(self, reader: asyncio.StreamReader) -> None:
        server_reader, self._server = await asyncio.open_connection("127.0.0.1", self._target)
        up = asyncio.ensure_future(self._up(reader))
        down = asyncio.ensure_future(self._down(server_reader))
        try:
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            if self._fault is Fault.LATE_REQUEST:  # let the server see to it
                await asyncio.wait({down}, timeout=self._proxy.late_s)
        finally:
            self._server.transport.abort()
            up.cancel()
            down.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    def close_if_unused(self) -> None:
        """Close the connection of a task that was cancelled before it ran."""
        if not hasattr(self, "_client"):
            self._socket.close()

    def reset(self) -> None:
        """Answer with a reset."""
        self._is_reset = True
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._client.transport.abort()

    def hang_up(self) -> None:
        self._client.close()

    # --- to the server -----------------------------------------------------------------

    async def _up(self, reader: asyncio.StreamReader) -> None:
        """Pass requests on, until the client goes."""
        with suppress(OSError):
            while data := await reader.read(65536):
                if not self._client_speaks:
                    self._client_speaks = True
                    if self._fault is not Fault.HALF_OPEN:  # there is no way back from that
                        self._fault = self._proxy.fault if self._proxy.strikes() else None
                if not await self._pass_up(data):
                    return
        if self._fault is Fault.HALF_OPEN:
            await asyncio.Event().wait()  # the server does not hear of it either

    async def _pass_up(self, data: bytes) -> bool:
        match self._fault:
            case Fault.RESET_BEFORE:
                self.reset()
                return False
            case Fault.HALF_OPEN:
                return True
            case Fault.LATE_REQUEST:
                await asyncio.sleep(self._proxy.late_s)
            case Fault.CRUMBS:
                await _crumble(self._server, data, 0)
                return True
        self._server.write(data)
        await self._server.drain()
        return True

    # --- and back ----------------------------------------------------------------------

    async def _down(self, reader: asyncio.StreamReader) -> None:
        """Pass replies on, until the server goes."""
        with suppress(OSError):
            while data := await reader.read(65536):
                self._client_speaks = False
                if not await self._pass_down(data):
                    return

    async def _pass_down(self, data: bytes) -> bool:
        match self._fault:
            case Fault.RESET_AFTER:
                self.reset()
                return False
            case Fault.SWALLOW | Fault.HALF_OPEN:
                return True
            case Fault.TRICKLE:
                await _crumble(self._client, data, self._proxy.late_s / 8)
                return True
            case Fault.CRUMBS:
                await _crumble(self._client, data, 0)
                return True
            case Fault.LATE_REPLY:
                await asyncio.sleep(self._proxy.late_s)
            case Fault.GARBAGE:
                data = self._proxy.garbage
            case Fault.CUT:
                self._client.write(data[: len(data) // 2])
                await self._client.drain()
                return False
        self._client.write(data)
        await self._client.drain()
        return True


async def _crumble(writer: asyncio.StreamWriter, data: bytes, pause_s: float) -> None:
    for at in range(len(data)):
        writer.write(data[at : at + 1])
        await writer.drain()
        await asyncio.sleep(pause_s)


def _bound(port: int) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", port))
    made.setblocking(False)
    return made
