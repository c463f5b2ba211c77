"""Queues on an emulator, as their owner sees them, and a worker that reads one."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import boto3
from tests.faults.doubles import FaultyStore, ScriptedSink, event
from tests.servers.aws import AWS, fresh

from oncebridge import Gateway, Settings
from oncebridge.base.clock import SystemDice, system_clock
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.engine.router import RouteEntry, Router
from oncebridge.sources.api import Host
from oncebridge.sources.sqs.source import SqsSource, SqsSourceOptions
from oncebridge.stores.memory import MemoryStore

QUICK = Settings(
    lease=timedelta(seconds=2),
    sink_timeout=timedelta(seconds=1),
    commit_budget=timedelta(milliseconds=500),
    margin=timedelta(milliseconds=100),
)
"""Short times, for tests that wait for them."""


@cache
def sqs(endpoint: str) -> Any:
    session = boto3.session.Session(region_name=AWS["AWS_REGION"])
    return session.client("sqs", endpoint_url=endpoint)


class TestQueue:
    """A queue of a test's own."""

    __test__ = False

    def __init__(self, endpoint: str, *, fifo: bool = False, **attributes: Any) -> None:
        self.endpoint = endpoint
        self.sqs = sqs(endpoint)
        self.name = f"{fresh('events')}{'.fifo' if fifo else ''}"
        given = {name: str(value) for name, value in attributes.items()}
        if fifo:
            given["FifoQueue"] = "true"
        self.url = self.sqs.create_queue(QueueName=self.name, Attributes=given)["QueueUrl"]

    @property
    def address(self) -> str:
        return f"sqs://{self.name}"

    @property
    def arn(self) -> str:
        return self.attributes()["QueueArn"]

    def attributes(self) -> dict[str, str]:
        asked = self.sqs.get_queue_attributes(QueueUrl=self.url, AttributeNames=["All"])
        return asked["Attributes"]

    def set(self, **attributes: Any) -> None:
        given = {name: str(value) for name, value in attributes.items()}
        self.sqs.set_queue_attributes(QueueUrl=self.url, Attributes=given)

    def redrive(self, to: "TestQueue", max_receives: int) -> None:
        policy = {"deadLetterTargetArn": to.arn, "maxReceiveCount": max_receives}
        self.set(RedrivePolicy=json.dumps(policy))

    def send(self, *bodies: bytes | str, group: str | None = None) -> None:
        for body in bodies:
            text = body if isinstance(body, str) else body.decode()
            ordered = {}
            if group is not None:
                name = fresh("message")
                ordered = {"MessageGroupId": group, "MessageDeduplicationId": name}
            self.sqs.send_message(QueueUrl=self.url, MessageBody=text, **ordered)

    def counts(self) -> tuple[int, int]:
        """Tell how many are visible, and how many are hidden."""
        found = self.attributes()
        return (
            int(found["ApproximateNumberOfMessages"]),
            int(found["ApproximateNumberOfMessagesNotVisible"]),
        )

    def receive(self, *, wait_s: int = 0, visibility_s: int = 30) -> list[Any]:
        """Take what is there, as another consumer would."""
        found: list[Any] = []
        for _ in range(50):
            answer = self.sqs.receive_message(
                QueueUrl=self.url,
                MaxNumberOfMessages=10,
                WaitTimeSeconds=wait_s,
                VisibilityTimeout=visibility_s,
                AttributeNames=["All"],
                MessageAttributeNames=["All"],
            )
            if not answer.get("Messages"):
                return found
            found += answer["Messages"]
        raise AssertionError("it goes on for ever")


def events(number: int, start: int = 0) -> list[bytes]:
    return [event({"n": n}, id=f"e{n}") for n in range(start, start + number)]


class Worker:
    """A source on a queue, with everything behind it in this process."""

    def __init__(
        self,
        address: str,
        endpoint: str,
        *,
        sink: Any = None,
        store: Any = None,
        settings: Settings = Settings(),  # noqa: B008 - frozen
        dead: Any = None,
        is_open: bool = True,
        **options: Any,
    ) -> None:
        self.sink = ScriptedSink() if sink is None else sink
        self.store = store or FaultyStore(MemoryStore())
        self.dead = dead or MemoryDeadLetters()
        self.gateway = Gateway(store=self.store, sink=self.sink, dead=self.dead, settings=settings)
        self.router = Router([RouteEntry(self.gateway)], dead=self.dead, settings=settings)
        self.is_open = is_open
        self.host = Host(
            self.router,
            None,  # type: ignore[arg-type] # a queue is read, it does not call
            self.store,
            100,
            system_clock,
            SystemDice(),
            lambda: self.is_open,
        )
        chosen = {"wait": timedelta(seconds=1), "receivers": 2, "endpoint": endpoint, **options}
        self.source = SqsSource.from_url(address, SqsSourceOptions(**chosen))
        self._run: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.router.open()
        await self.source.open(self.host)
        self._run = asyncio.create_task(self.source.run())

    async def stop(self) -> None:
        """Stop as the service does at SIGTERM."""
        self.source.stop()
        await self.router.drain(timedelta(seconds=10))
        assert self._run is not None
        async with asyncio.timeout(10):
            await self._run
        self._run = None

    async def aclose(self) -> None:
        try:
            if self._run is not None:
                await self.stop()
        finally:
            await self.source.aclose()
            await self.router.aclose()

    @property
    def counts(self) -> dict[str, int]:
        return {name: n for name, n in self.gateway.books.counts().items() if n}


@asynccontextmanager
async def working(queue: TestQueue, endpoint: str = "", **more: Any) -> AsyncIterator[Worker]:
    """Run a worker on *queue*, through *endpoint* where that is another."""
    worker = Worker(queue.address, endpoint or queue.endpoint, **more)
    try:
        await worker.start()
        yield worker
    finally:
        await worker.aclose()


async def until_empty(queue: TestQueue, within_s: float = 20) -> None:
    """Wait until nothing is left in the queue, visible or not."""
    await until(lambda: queue.counts() == (0, 0), within_s)


async def until(holds: Any, within_s: float = 20) -> None:
    loop = asyncio.get_running_loop()
    ends = loop.time() + within_s
    while not holds():
        assert loop.time() < ends, "it never happened"
        await asyncio.sleep(0.02)


def told(caplog: Any, event_name: str) -> list[Any]:
    """Give what was logged under a name."""
    return [record for record in caplog.records if record.message == event_name]


def sent(raws: Sequence[bytes]) -> list[int]:
    """Read the numbers of `events` again."""
    return [json.loads(raw)["detail"]["n"] for raw in raws]
