"""
Frames between the harness and its workers, over a unix socket.

A frame is its length and a MessagePack value. A worker may be killed between any two
bytes: half a frame is nothing at all, on both sides.
"""

import asyncio
from pathlib import Path
from typing import Any, Self

import msgspec

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode

GONE = (asyncio.IncompleteReadError, ConnectionError)
"""What reading or writing raises when the other side is no more."""


async def read_frame(reader: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await reader.readexactly(4), "big")
    return _unpack(await reader.readexactly(size))


def write_frame(writer: asyncio.StreamWriter, value: Any) -> None:
    packed = _pack(value)
    writer.write(len(packed).to_bytes(4, "big") + packed)


class Connection:
    """One conversation of a worker with the harness: a question, an answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, path: str | Path, incarnation: int) -> Self:
        connection = cls(*await asyncio.open_unix_connection(path))
        connection.tell("hello", incarnation)
        return connection

    async def ask(self, op: str, *arguments: Any) -> Any:
        self.tell(op, *arguments)
        await self._writer.drain()
        return await read_frame(self._reader)

    def tell(self, op: str, *arguments: Any) -> None:
        """Say something that has no answer."""
        write_frame(self._writer, (op, *arguments))

    async def flush(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()
