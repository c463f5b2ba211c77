"""
Somebody between a client and a DynamoDB server, who meddles.

    async with meddling(server) as meddler:
        meddler.next("BatchExecuteStatement", swallow)

A rule gets the request and a way to pass it on, and gives what the client hears: an answer,
or None for silence, after which the connection is closed. What no rule is for passes as it is.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from tests.servers.aws import DynamoDBServer

Answer = tuple[int, Any]
"""The status, and what is sent as JSON."""
Pass = Callable[[Any], Awaitable[Answer]]
Rule = Callable[[Any, Pass], Awaitable[Answer | None]]


class Meddler:
    def __init__(self, server: DynamoDBServer) -> None:
        self._server = server
        self._once: dict[str, list[Rule]] = {}
        self._always: dict[str, Rule] = {}
        self.calls: list[tuple[str, Any]] = []
        self.date: Callable[[str], str] = lambda date: date
        """What becomes of the `Date` of an answer."""
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def next(self, operation: str, *rules: Rule) -> None:
        """Apply *rules*, one each, to the next calls of *operation*."""
        self._once.setdefault(operation, []).extend(rules)

    def always(self, operation: str, rule: Rule) -> None:
        self._always[operation] = rule

    def count(self, operation: str) -> int:
        return sum(name == operation for name, _ in self.calls)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_connection("127.0.0.1", self._server.port)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._one(reader, writer, *inner):
                    pass
        finally:
            inner[1].close()
            writer.close()

    async def _one(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        back: asyncio.StreamReader,
        forth: asyncio.StreamWriter,
    ) -> bool:
        head, body = await _message(reader)
        operation = _header(head, "x-amz-target").rpartition(".")[2]
        asked = json.loads(body)
        self.calls.append((operation, asked))
        date = ""

        async def pass_on(asked: Any) -> Answer:
            nonlocal date
            sent = json.dumps(asked).encode()
            lines = [line for line in head if not line.lower().startswith("content-length:")]
            forth.write("\r\n".join([*lines, f"Content-Length: {len(sent)}", "", ""]).encode())
            forth.write(sent)
            told, answer = await _message(back)
            date = _header(told, "date")
            return int(told[0].split()[1]), json.loads(answer)

        once = self._once.get(operation)
        rule = once.pop(0) if once else self._always.get(operation)
        answer = await (rule(asked, pass_on) if rule else pass_on(asked))
        if answer is None:
            return False
        status, told = answer
        sent = json.dumps(told).encode()
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(sent)}"]
        if date:
            lines.append(f"Date: {self.date(date)}")
        writer.write("\r\n".join([*lines, "", ""]).encode() + sent)
        await writer.drain()
        return True


async def _message(reader: asyncio.StreamReader) -> tuple[list[str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().removesuffix("\r\n\r\n").split("\r\n")
    return head, await reader.readexactly(int(_header(head, "content-length") or 0))


def _header(head: list[str], name: str) -> str:
    lines = [line for line in head if line.lower().startswith(f"{name}:")]
    return lines[0].partition(":")[2].strip() if lines else ""


@asynccontextmanager
async def meddling(server: DynamoDBServer) -> AsyncIterator[Meddler]:
    meddler = Meddler(server)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(meddler.handle(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    door = await asyncio.start_server(accept, "127.0.0.1", 0)
    meddler.port = door.sockets[0].getsockname()[1]
    try:
        yield meddler
    finally:
        door.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await door.wait_closed()


# --- rules ------------------------------------------------------------------------------------


async def swallow(asked: Any, pass_on: Pass) -> None:
    """Let the server do it, and say nothing."""
    await pass_on(asked)


async def vanish(asked: Any, pass_on: Pass) -> None:
    """Let nothing through, and close."""


async def hang(asked: Any, pass_on: Pass) -> None:
    """Let nothing through, and do not close either."""
    await asyncio.sleep(3600)


def saying(status: int, told: Any) -> Rule:
    """Answer in the server's place."""

    async def rule(asked: Any, pass_on: Pass) -> Answer:
        return status, told

    return rule


def failing(code: str, status: int = 400, **more: Any) -> Rule:
    """Answer with an error of DynamoDB."""
    kind = f"com.amazonaws.dynamodb.v20120810#{code}"
    return saying(status, {"__type": kind, "message": "so it is", **more})


def changing(change: Callable[[Any], None]) -> Rule:
    """Pass it on, and change the answer."""

    async def rule(asked: Any, pass_on: Pass) -> Answer:
        status, told = await pass_on(asked)
        change(told)
        return status, told

    return rule


def failing_statements(code: str, at: Callable[[int], bool]) -> Rule:
    """Let the other statements of a batch through, and fail those."""

    async def rule(asked: Any, pass_on: Pass) -> Answer:
        statements = asked["Statements"]
        passed = [one for number, one in enumerate(statements) if not at(number)]
        answers: list[Any] = []
        if passed:
            _, told = await pass_on({"Statements": passed})
            answers = told["Responses"]
        error = {"Error": {"Code": code, "Message": "so it is"}, "TableName": "t"}
        left = iter(answers)
        return 200, {"Responses": [error if at(n) else next(left) for n in range(len(statements))]}

    return rule
