"""A relay that counts round trips."""

import asyncio
import threading
from typing import Any, Self


class Relay:
    """
    Stand between clients and a server, and count round trips.

    What a client says until the server says something is one, however many pieces it is in.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.port = 0
        self.trips = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        listening = self._loop.create_server(lambda: _Side(self), "127.0.0.1", 0)
        server = self._loop.run_until_complete(listening)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()

    def connect(self, side: "_Side") -> None:
        other = _Side(self, side)
        making = self._loop.create_connection(lambda: other, "127.0.0.1", self._target)
        side.connecting = self._loop.create_task(making)


class _Side(asyncio.Protocol):
    """One end of a relayed connection: of the client, or (with *other*) of the server."""

    def __init__(self, relay: Relay, other: "_Side | None" = None) -> None:
        self.relay = relay
        self.other = other
        self.is_client = other is None
        self.transport: Any = None
        self.connecting: asyncio.Task[Any] | None = None
        self.early: list[bytes] = []
        self.has_asked = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        if self.other is None:
            self.relay.connect(self)
            return
        self.other.other = self
        for data in self.other.early:
            transport.write(data)

    def data_received(self, data: bytes) -> None:
        if not self.is_client:
            assert self.other is not None
            self.other.has_asked = False
        elif not self.has_asked:
            self.has_asked = True
            self.relay.trips += 1
        if self.other is None:
            self.early.append(data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, _error: Any) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()
