"""
A store at the other end of a wire, as small as one can be.

What this folder asks of the stores is tried on it first. It is right, and the variants below
are each wrong in one way that a driver or a pool invites: a test that lets one of them pass
would let the same mistake pass in a real store.

`python -m tests.stores.wired PORT FILE` is the server, on a SQLite file; so it forgets nothing
when it is killed.
"""

import asyncio
import pickle
import sys
from collections.abc import Sequence
from typing import Any, Self

from msgspec.structs import replace

from oncebridge.base.clock import SystemDice
from oncebridge.errors import StoreUnavailable
from oncebridge.stores.api import Commits, Extensions, Memories, Releases, Wants
from oncebridge.stores.sqlite.store import SQLiteStore

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class WiredStore:
    """Ask the server on *port*, and give up after *timeout_s*."""

    def __init__(self, port: int, timeout_s: float = 5.0) -> None:
        self._port = port
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []

    async def open(self) -> None:
        await self._ask("now_ms")

    async def claim(self, wants: Wants) -> Any:
        return await self._ask("claim", wants)

    async def commit(self, commits: Commits) -> Any:
        return await self._ask("commit", commits)

    async def release(self, releases: Releases) -> Any:
        return await self._ask("release", releases)

    async def extend(self, extensions: Extensions) -> Any:
        return await self._ask("extend", extensions)

    async def remember(self, memories: Memories) -> Any:
        return await self._ask("remember", memories)

    async def peek(self, keys: Sequence[bytes]) -> Any:
        return await self._ask("peek", list(keys))

    async def forget(self, keys: Sequence[bytes]) -> Any:
        return await self._ask("forget", list(keys))

    async def purge(self, limit: int = 1000) -> Any:
        return await self._ask("purge", limit)

    async def now_ms(self) -> Any:
        return await self._ask("now_ms")

    async def scan(self, place: bytes = b"", limit: int = 1000) -> Any:
        return await self._ask("scan", place, limit)

    async def load(self, records: Sequence[Any]) -> Any:
        return await self._ask("load", list(records))

    async def aclose(self) -> None:
        for _, writer in self._idle:
            writer.transport.abort()
        self._idle.clear()
        await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # --- one round trip ----------------------------------------------------------------

    async def _ask(self, operation: str, *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._exchange(operation, *arguments)
        except (OSError, EOFError, TimeoutError, pickle.UnpicklingError) as error:
            raise StoreUnavailable(f"127.0.0.1:{self._port}: {type(error).__name__}") from error

    async def _exchange(self, operation: str, *arguments: Any) -> Any:
        reader, writer = connection = await self._connection()
        try:
            writer.write(framed((operation, arguments)))
            answer = await self._read(reader)
        except BaseException:
            writer.transport.abort()
            raise
        self._idle.append(connection)
        return answer

    async def _connection(self) -> _Connection:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.transport.is_closing():
                return reader, writer
            writer.transport.abort()
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def _read(self, reader: asyncio.StreamReader) -> Any:
        return await read_frame(reader)


def framed(message: Any) -> bytes:
    body = pickle.dumps(message)
    return len(body).to_bytes(4) + body


async def read_frame(reader: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await reader.readexactly(4))
    return pickle.loads(await reader.readexactly(size))


# --- each wrong in one way -------------------------------------------------------------------


class Endless(WiredStore):
    """It waits as long as it takes."""

    async def _ask(self, operation: str, *arguments: Any) -> Any:
        try:
            return await self._exchange(operation, *arguments)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise StoreUnavailable(type(error).__name__) from error


class TimedByTheRead(Endless):
    """It bounds every read, as socket timeouts do, and so bounds nothing."""

    async def _read(self, reader: asyncio.StreamReader) -> Any:
        data = b""
        while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4]):
            async with asyncio.timeout(self._timeout_s):
                data += await reader.readexactly(1)
        return pickle.loads(data[4:])


class Leaking(WiredStore):
    """It lets what its driver raises pass."""

    async def _ask(self, operation: str, *arguments: Any) -> Any:
        async with asyncio.timeout(self._timeout_s):
            return await self._exchange(operation, *arguments)


class Reusing(WiredStore):
    """It goes on with a connection on which an answer is still to come."""

    async def _exchange(self, operation: str, *arguments: Any) -> Any:
        reader, writer = connection = await self._connection()
        try:
            writer.write(framed((operation, arguments)))
            return await self._read(reader)
        finally:
            self._idle.append(connection)


class Stubborn(WiredStore):
    """It keeps its one connection for ever."""

    async def _connection(self) -> _Connection:
        if not self._idle:
            self._kept = await super()._connection()
        self._idle.clear()
        return self._kept

    async def _exchange(self, operation: str, *arguments: Any) -> Any:
        try:
            return await super()._exchange(operation, *arguments)
        finally:
            if hasattr(self, "_kept"):
                self._idle = [self._kept]


class Renaming(WiredStore):
    """It draws the token itself, and so does not know its own claim again."""

    async def claim(self, wants: Wants) -> Any:
        return await super().claim(
            Wants.of([replace(w, token=SystemDice().tokens(1)[0]) for w in wants])
        )


class Silent(WiredStore):
    """It says that nothing is there when it does not know."""

    async def peek(self, keys: Sequence[bytes]) -> Any:
        try:
            return await super().peek(keys)
        except StoreUnavailable:
            return [None] * len(keys)


# --- the server ------------------------------------------------------------------------------


async def serve(port: int, store: Any) -> None:
    """Answer for *store* on *port*, until killed."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                operation, arguments = await read_frame(reader)
                writer.write(framed(await getattr(store, operation)(*arguments)))
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    async with store:
        server = await asyncio.start_server(talk, "127.0.0.1", port)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), SQLiteStore(sys.argv[2])))
