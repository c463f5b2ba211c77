"""A queue, and a target that throttles: all arrive, none ends in the queue's own dead letters."""

import asyncio
from collections import deque
from datetime import timedelta
from typing import Self

import pytest
from tests.aws.queues import TestQueue, events, sent, until_empty, working

from oncebridge.http.server import Request, Response, Server
from oncebridge.sinks.http import HttpSink, HttpSinkOptions

pytestmark = pytest.mark.full


class Target:
    """An HTTP server that takes *limit* requests in any second."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: deque[float] = deque()
        self.bodies: list[bytes] = []
        self.refused = 0
        self._server = Server(self._handle, host="127.0.0.1", port=0)

    async def __aenter__(self) -> Self:
        await self._server.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._server.aclose(timedelta(seconds=1))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}/"

    def _handle(self, request: Request, respond) -> None:
        now = asyncio.get_running_loop().time()
        while self._taken and self._taken[0] <= now - 1:
            self._taken.popleft()
        if len(self._taken) >= self._limit:
            self.refused += 1
            respond(Response(429, b"", headers=(("Retry-After", "1"),)))
            return
        self._taken.append(now)
        self.bodies.append(request.body)
        respond(Response(200, b""))


async def test_a_queue_that_gives_up_early_loses_nothing_to_a_target_that_throttles(ministack):
    queue, dead = TestQueue(ministack.endpoint), TestQueue(ministack.endpoint)
    queue.redrive(dead, 3)
    raws = events(300)
    queue.send(*raws)
    async with Target(20) as target:
        sink = HttpSink(target.url, HttpSinkOptions(allow_private=True))
        async with working(queue, sink=sink, visibility=timedelta(seconds=40)) as worker:
            await until_empty(queue, 60)
            assert worker.counts.get("dead", 0) == 0
            assert worker.counts["throttled"] == target.refused > 0
            assert worker.gateway.sink_breaker.opened == 0
    assert sorted(sent(target.bodies)) == sorted(sent(raws))
    assert dead.counts() == (0, 0)
