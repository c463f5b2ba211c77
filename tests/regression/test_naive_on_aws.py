"""
The known bugs that need AWS: each check is red on the snippet that has it, and green on ours.

Rows iv, viii and xvi as a Lambda function and a worker meet them, and the two about
acknowledgements that never happen.
"""

import asyncio
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError
from tests.aws.queues import QUICK, TestQueue, events, sent, until_empty, working
from tests.faults.doubles import FaultyStore, ScriptedSink

from oncebridge import Gateway, StoreUnavailable, Unknown
from oncebridge.aws import HandedBack, lambda_handler
from oncebridge.stores.memory import MemoryStore

OUTAGE_S = 60


class Context:
    def get_remaining_time_in_millis(self) -> int:
        return 20_000


def batch(*bodies: bytes) -> dict[str, Any]:
    records = [
        {
            "messageId": f"m{at}",
            "receiptHandle": f"r{at}",
            "body": body.decode(),
            "attributes": {"ApproximateReceiveCount": "1"},
            "eventSource": "aws:sqs",
        }
        for at, body in enumerate(bodies)
    ]
    return {"Records": records}


@contextmanager
def ours(**parts: Any) -> Iterator[Any]:
    handler = lambda_handler(Gateway(**{"store": MemoryStore(), **parts}), metrics=None)
    yield handler
    handler.close()


# --- iv: the hash of a detail that is not there ----------------------------------------------


def naive_by_detail(taken: list[Any]) -> Any:
    seen = set()

    def handler(event: Any, _: Any) -> Any:
        for record in event["Records"]:
            text = json.dumps(record.get("detail", {}), sort_keys=True)
            key = hashlib.sha256(text.encode()).hexdigest()
            if key not in seen:
                seen.add(key)
                taken.append(record)
        return {"batchItemFailures": []}

    return handler


def test_iv_ten_distinct_records_of_a_queue_are_ten_events():
    taken: list[Any] = []
    naive_by_detail(taken)(batch(*events(10)), Context())
    assert len(taken) == 1, "the snippet takes all for one"
    taken.clear()
    with ours(sink=taken.append) as handler:
        assert handler(batch(*events(10)), Context()) == {"batchItemFailures": []}
    assert len(taken) == 10


# --- viii: errors swallowed -------------------------------------------------------------------


def naive_swallowing(process: Any) -> Any:
    def handler(event: Any, _: Any) -> Any:
        for record in event["Records"]:
            with suppress(Exception):
                process(json.loads(record["body"]))
        return {"statusCode": 200}

    return handler


def failing_at_two(event: Any) -> None:
    detail = event["detail"] if isinstance(event, dict) else event.detail
    if detail["n"] == 2:
        raise RuntimeError


class Down(MemoryStore):
    async def claim(self, wants: Any) -> Any:
        raise StoreUnavailable("no answer")


def failures(answer: Any) -> list[str]:
    return [one["itemIdentifier"] for one in answer.get("batchItemFailures") or []]


def test_viii_what_fails_is_named_to_the_queue():
    naive = naive_swallowing(failing_at_two)
    assert failures(naive(batch(*events(4)), Context())) == []
    with ours(sink=failing_at_two) as handler:
        assert failures(handler(batch(*events(4)), Context())) == ["m2"]


@pytest.mark.parametrize("what", ["claim", "parse", "send"])
def test_viii_whatever_breaks_nothing_undone_counts_as_done(what):
    store = Down() if what == "claim" else MemoryStore()
    sink = ScriptedSink(otherwise=Unknown("reset")) if what == "send" else ScriptedSink()
    # What is no event cannot be done either: there are no dead letters to keep it in.
    bodies = [b"{"] * 3 if what == "parse" else events(3)
    with ours(store=store, sink=sink) as handler:
        try:
            named = failures(handler(batch(*bodies), Context()))
        except HandedBack:  # a call that fails fails for all of them
            named = ["m0", "m1", "m2"]
    assert named == ["m0", "m1", "m2"]
    naive = naive_swallowing(lambda _: 1 / 0)
    assert failures(naive(batch(*bodies), Context())) == []


# --- acknowledgements that never happen --------------------------------------------------------


async def test_an_arn_is_a_queue_too_and_not_an_acknowledgement_that_never_happens(ministack):
    queue = TestQueue(ministack.endpoint, VisibilityTimeout=1)
    queue.send(*events(3))
    for message in queue.receive(visibility_s=1):
        with suppress(ClientError, BotoCoreError):
            handle = message["ReceiptHandle"]
            queue.sqs.delete_message(QueueUrl=queue.arn, ReceiptHandle=handle)
    assert sum(queue.counts()) == 3, "the snippet deletes nothing"

    async with working(queue, settings=QUICK, visibility=timedelta(seconds=4)) as worker:
        await until_empty(queue)
        assert sorted(sent(worker.sink.raws)) == [0, 1, 2]
    by_arn = TestQueue(ministack.endpoint)
    by_arn.send(*events(3))
    by_arn.__class__ = type("ByArn", (TestQueue,), {"address": property(lambda q: f"sqs:{q.arn}")})
    async with working(by_arn) as worker:
        await until_empty(by_arn)
        assert sorted(sent(worker.sink.raws)) == [0, 1, 2]


# --- xvi: a nack loop while the store is down ----------------------------------------------------


async def naive_nack_loop(queue: TestQueue, dead: TestQueue, within_s: float) -> None:
    """Receive, fail, make visible again; until all are given up, or the outage is over."""
    ends = asyncio.get_running_loop().time() + within_s
    while asyncio.get_running_loop().time() < ends and sum(dead.counts()) < 20:
        answer = queue.sqs.receive_message(QueueUrl=queue.url, MaxNumberOfMessages=10)
        for message in answer.get("Messages", []):
            handle = message["ReceiptHandle"]
            queue.sqs.change_message_visibility(
                QueueUrl=queue.url, ReceiptHandle=handle, VisibilityTimeout=0
            )
        await asyncio.sleep(0.1)


def pair(endpoint: str) -> tuple[TestQueue, TestQueue]:
    queue, dead = TestQueue(endpoint), TestQueue(endpoint)
    queue.redrive(dead, 13)
    queue.send(*events(20))
    return queue, dead


@pytest.mark.full
async def test_xvi_an_outage_of_a_minute_costs_no_message_a_receive(ministack):
    queue, dead = pair(ministack.endpoint)
    await naive_nack_loop(queue, dead, OUTAGE_S)
    assert sum(dead.counts()) == 20, "an outage of the snippet, and all are given up"

    queue, dead = pair(ministack.endpoint)
    store = FaultyStore(MemoryStore())
    store.arm("claim.before", times=10**9)
    visibility = timedelta(seconds=6)
    async with working(queue, store=store, settings=QUICK, visibility=visibility) as worker:
        await asyncio.sleep(OUTAGE_S)
        assert worker.sink.raws == []
    # It gave them back when it stopped, and this is the second receive, or the first.
    counts = [one["Attributes"]["ApproximateReceiveCount"] for one in queue.receive(visibility_s=1)]
    assert len(counts) == 20
    assert set(counts) <= {"1", "2"}
    assert dead.counts() == (0, 0)
    async with working(queue, settings=QUICK, visibility=visibility) as worker:
        await until_empty(queue)
        assert sorted(sent(worker.sink.raws)) == list(range(20))
