"""
Other ways in, for the service under kill -9: a bus and its queue, and a stream.

The harness puts events on a bus, repeats among them; a rule brings them to a queue, and
workers take them from there. Or it puts them into a stream, whose shards are split and merged
while workers read them. Nobody can see from outside when a worker lets go of a message, so a
kill excuses a repeat of whatever the killed process has sent: losses are found without doubt,
repeats by worker and by their number.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from tests.servers import aws, kinesis

from .oracle import Delivery
from .service import Harness, Service, ServiceReport, ServiceRun
from .stores import StoreHome
from .stream import Copy

_CONFIG = """
[[rules]]
name = "calls"
match = { source = [{ prefix = "com.example.calls/" }] }
key = "content"
ignore = ["detail.timestamp", "detail.metadata"]
"""
_FEEDERS = 4
_AT_ONCE = 10
_MOST_RECEIVES = 100
_SHARDS = 4


class AwsHarness(Harness):
    """From something at AWS that the harness fills; progress is what arrives at the sink."""

    feeders = _FEEDERS
    at_once = _AT_ONCE

    def __init__(self, plan: ServiceRun, folder: Path, home: StoreHome, endpoint: str) -> None:
        super().__init__(plan, folder, home)
        self._endpoint = endpoint
        self._environment |= {**aws.AWS, "AWS_ENDPOINT_URL": endpoint}
        self._seen: set[int] = set()
        self._counted = 0

    def _share(self) -> float:
        return len(self._seen) / self._plan.events

    async def run(self) -> ServiceReport:
        """Bring most of it first: workers that are killed should have their hands full."""
        later = [self._queue.pop() for _ in range(len(self._queue) // 3)]
        await asyncio.gather(*[self._feed() for _ in range(self.feeders)])
        self._queue.extend(reversed(later))
        return await super().run()

    async def _send_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch())
            works = [self._strike(), self._change(), *[self._feed() for _ in range(self.feeders)]]
            await asyncio.gather(*[group.create_task(work) for work in works])
            while len(self._seen) < self._plan.events or await asyncio.to_thread(self._left):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
            watch.cancel()

    async def _watch(self) -> None:
        """Tell those who wait for progress."""
        while True:
            deliveries = self._history.deliveries
            self._seen.update(one.event for one in deliveries[self._counted :])
            self._counted = len(deliveries)
            async with self._progress:
                self._progress.notify_all()
            await asyncio.sleep(0.05)

    async def _feed(self) -> None:
        while self._queue:
            copies = [self._queue.popleft() for _ in range(min(self.at_once, len(self._queue)))]
            await asyncio.to_thread(self._put, copies)
            self._posts += 1

    def _put(self, copies: Sequence[Copy]) -> None:
        raise NotImplementedError

    def _left(self) -> int:
        """Tell how much is still there."""
        return 0

    async def _change(self) -> None:
        """Change something about it in the middle."""


class QueueHarness(AwsHarness):
    """From a bus by a rule to a queue, and from there to workers."""

    def __init__(self, plan: ServiceRun, folder: Path, home: StoreHome, endpoint: str) -> None:
        super().__init__(plan, folder, home, endpoint)
        (folder / "rules.toml").write_text(_CONFIG)
        self._sqs, self._events = self._client("sqs"), self._client("events")
        self._dlq = self._queue_url("dead-copies", {})
        redrive = {"deadLetterTargetArn": _arn("dead-copies"), "maxReceiveCount": _MOST_RECEIVES}
        self._url = self._queue_url("copies", {"RedrivePolicy": json.dumps(redrive)})
        self._events.create_event_bus(Name="calls")
        pattern = json.dumps({"source": [{"prefix": "com.example.calls/"}]})
        self._events.put_rule(Name="all", EventBusName="calls", EventPattern=pattern)
        targets = [{"Id": "queue", "Arn": _arn("copies")}]
        self._events.put_targets(Rule="all", EventBusName="calls", Targets=targets)

    def _client(self, service: str) -> Any:
        return boto3.client(
            service,
            endpoint_url=self._endpoint,
            region_name="us-east-1",
            aws_access_key_id=aws.AWS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=aws.AWS["AWS_SECRET_ACCESS_KEY"],
            config=Config(max_pool_connections=_FEEDERS, retries={"total_max_attempts": 1}),
        )

    def _queue_url(self, name: str, attributes: dict[str, str]) -> str:
        return self._sqs.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]

    def _source(self, service: Service) -> list[str]:
        plan = self._plan
        return [
            *("-c", "rules.toml", "--source", "sqs://copies"),
            *("--health", f"http://127.0.0.1:{service.port}"),
            *("--set", f"source.visibility={2 * plan.lease_s}s", "--set", "source.wait=1s"),
        ]

    def _recognise(self, raw: bytes) -> int | None:
        return self._stream.recognise_detail(raw)

    def _put(self, copies: Sequence[Copy]) -> None:
        entries = []
        for copy in copies:
            envelope = json.loads(self._stream.render(copy))
            entries.append(
                {
                    "EventBusName": "calls",
                    # The emulator takes no partner's sources, and neither would AWS from us.
                    "Source": f"com.example.calls/{copy.event % 3}",
                    "DetailType": envelope["detail-type"],
                    "Detail": json.dumps(envelope["detail"]),
                }
            )
        answer = self._events.put_events(Entries=entries)
        if answer["FailedEntryCount"]:
            raise RuntimeError(f"the bus refuses: {answer}")

    def _left(self, url: str | None = None) -> int:
        names = ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible")
        answer = self._sqs.get_queue_attributes(QueueUrl=url or self._url, AttributeNames=names)
        return sum(int(answer["Attributes"][name]) for name in names)

    async def _look_at_the_dead(self) -> None:
        await super()._look_at_the_dead()
        if left := self._left(self._dlq):
            self._history.faults.append(f"{left} messages were received too often")
        if left := self._left():
            self._history.faults.append(f"{left} messages are left in the queue")


class StreamHarness(AwsHarness):
    """
    From a stream whose shards change in the middle.

    The four events of a conversation share a partition key: their first deliveries have to be in
    the order in which they were put. One feeder, so that there is such an order.
    """

    feeders = 1
    at_once = 50

    def __init__(
        self, plan: ServiceRun, folder: Path, home: StoreHome, server: kinesis.KinesisServer
    ) -> None:
        super().__init__(plan, folder, home, server.endpoint)
        self._server = server
        self._name = server.stream(_SHARDS)
        self._put_first: dict[int, None] = {}
        """The events, in the order in which they were put first."""

    def _source(self, service: Service) -> list[str]:
        return [
            *("--source", f"kinesis://{self._name}", "--preset", "genesys"),
            *("--health", f"http://127.0.0.1:{service.port}", "--set", "source.poll=250ms"),
        ]

    def _put(self, copies: Sequence[Copy]) -> None:
        pairs = [(f"{copy.event // 4}", self._stream.render(copy)) for copy in copies]
        self._server.put(self._name, pairs)
        self._put_first.update(dict.fromkeys(copy.event for copy in copies))

    async def _look_at_the_dead(self) -> None:
        await super()._look_at_the_dead()
        self._history.faults += out_of_order(self._put_first, self._history.deliveries)

    async def _change(self) -> None:
        """Split a shard, and merge two others: four end, and five are open then."""
        for moment, change in ((0.2, self._split), (0.4, self._merge)):
            async with self._progress:
                await self._progress.wait_for(lambda moment=moment: self._share() >= moment)
            await asyncio.to_thread(change)

    def _split(self) -> None:
        self._server.split(self._name, self._open()[0])

    def _merge(self) -> None:
        *_, one, other = self._open()
        self._server.merge(self._name, one, other)

    def _open(self) -> list[str]:
        """Name the shards that take records, in the order of their keys."""
        shards = self._server.shards(self._name)
        kinds = ("ParentShardId", "AdjacentParentShardId")
        parents = {one.get(kind) for one in shards for kind in kinds}
        shards.sort(key=lambda one: int(one["HashKeyRange"]["StartingHashKey"]))
        return [one["ShardId"] for one in shards if one["ShardId"] not in parents]


def out_of_order(put: Iterable[int], deliveries: Iterable[Delivery]) -> list[str]:
    """Return the conversations whose first deliveries are not in the order of *put*."""
    expected, arrived = _by_conversation(put), _by_conversation(one.event for one in deliveries)
    return [
        f"conversation {number} was put as {order} and delivered as {arrived[number]}"
        for number, order in expected.items()
        if arrived[number] != order
    ]


def _by_conversation(events: Iterable[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for event in dict.fromkeys(events):
        found[event // 4].append(event)
    return found


def _arn(queue: str) -> str:
    return f"arn:aws:sqs:us-east-1:000000000000:{queue}"


@contextmanager
def _queue(plan: ServiceRun, folder: Path, home: StoreHome) -> Iterator[Harness]:
    place = folder / "aws"
    place.mkdir()
    server = aws._ministack(place)
    server.process.start()
    try:
        yield QueueHarness(plan, folder, home, server.endpoint)
    finally:
        server.process.kill()


@contextmanager
def _shards(plan: ServiceRun, folder: Path, home: StoreHome) -> Iterator[Harness]:
    place = folder / "aws"
    place.mkdir()
    with kinesis.running(place) as server:
        yield StreamHarness(plan, folder, home, server)


FEEDS = {"queue": _queue, "stream": _shards}
