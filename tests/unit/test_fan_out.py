"""Being sent records: subscriptions that end, are taken, are refused, or break off."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError
from tests.faults.doubles import CountingDice, eventually, now_ms, virtual
from tests.servers.kinesis_model import Refused, modelled

from oncebridge import ConfigError
from oncebridge.sources.kinesis import shard_feed as module
from oncebridge.sources.kinesis.shard_feed import PushedFeed, registered
from oncebridge.sources.kinesis.stream import Position


def pushed(*numbers, after=None, children=(), behind=0):
    """Write an event as the SDK gives it."""
    records = [{"SequenceNumber": str(n), "PartitionKey": "a", "Data": b"%d" % n} for n in numbers]
    told = {
        "Records": records,
        "ContinuationSequenceNumber": after or (str(numbers[-1]) if numbers else None),
        "MillisBehindLatest": behind,
    }
    return {"SubscribeToShardEvent": told | ({"ChildShards": children} if children else {})}


def refused(code):
    return ClientError({"Error": {"Code": code, "Message": "told"}}, "SubscribeToShard")


class Subscription:
    """What the SDK reads one subscription from."""

    def __init__(self, steps):
        self._steps = iter(steps)
        self.read = 0
        self.is_closed = threading.Event()

    def __iter__(self):
        return self

    def __next__(self):
        step = next(self._steps)
        if isinstance(step, BaseException):
            raise step
        self.read += 1
        return step

    def close(self):
        self.is_closed.set()


class Sender:
    """Gives out *subscriptions*, one for each time it is asked."""

    def __init__(self, *subscriptions):
        self._subscriptions = list(subscriptions)
        self.asked = []
        self.made = []

    def pushed(self, shard, position):
        self.asked.append(position)
        steps = self._subscriptions.pop(0)
        if isinstance(steps, BaseException):
            raise steps
        self.made.append(Subscription(steps))
        return self.made[-1]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(module, "_RENEW_APART_S", 0.0)
    monkeypatch.setattr(module, "_IN_USE_S", 0.3)


def feed(*subscriptions, position=None, gone=lambda: None):
    sender = Sender(*subscriptions)
    return sender, PushedFeed(
        stream=SimpleNamespace(name="calls"),
        shard="shardId-0",
        position=position or Position(),
        dice=CountingDice(0),
        gone=gone,
        consumer=sender,
    )


async def test_a_subscription_that_is_over_is_taken_out_again_from_where_it_ended():
    sender, sent = feed([pushed(1, 2), pushed(after="9")], [pushed(10)])
    first, empty, more = [await sent.page() for _ in range(3)]
    assert [record.sequence_number for record in first.records] == ["1", "2"]
    assert [record.data for record in first.records] == [b"1", b"2"]
    assert (empty.records, empty.next) == ([], "9")
    assert [record.sequence_number for record in more.records] == ["10"]
    assert sender.asked == [Position(), Position(after="9")]


async def test_the_end_of_a_shard_is_seen_by_its_children_or_by_nothing_to_go_on_with():
    _, sent = feed([pushed(1, children=[{"ShardId": "shardId-1"}])])
    assert (await sent.page()).next is None
    _, sent = feed([pushed()])
    assert (await sent.page()).next is None


async def test_a_subscription_that_another_has_is_waited_for(caplog):
    sender, sent = feed(refused("ResourceInUseException"), [pushed(1)])
    began = asyncio.get_running_loop().time()
    assert (await sent.page()).records
    assert asyncio.get_running_loop().time() - began >= 0.3
    assert len(sender.asked) == 2
    assert not caplog.records, "that is usual when a shard changes hands"


async def test_one_that_breaks_off_goes_on_after_what_was_taken():
    sender, sent = feed([pushed(1, 2), OSError("reset")], [pushed(3)])
    assert [len((await sent.page()).records) for _ in range(2)] == [2, 1]
    assert sender.asked[1] == Position(after="2")


async def test_a_place_that_kinesis_does_not_know_any_more_is_told(caplog):
    sender, sent = feed(
        refused("InvalidArgumentException"), [pushed(7)], position=Position(after="3")
    )
    assert (await sent.page()).records
    assert sender.asked == [Position(after="3"), Position()]
    assert [r.msg for r in caplog.records] == ["oncebridge.place_is_unknown_records_may_be_lost"]


async def test_a_shard_that_is_gone_is_told():
    told = []
    _, sent = feed(
        refused("ResourceNotFoundException"), [pushed(1)], gone=lambda: told.append("gone")
    )
    await sent.page()
    assert told == ["gone"]


async def test_no_more_is_read_than_is_asked_for():
    sender, sent = feed([pushed(n) for n in range(1, 100)])
    await sent.page()
    await sent.page()
    await asyncio.sleep(0.05)
    assert sender.made[0].read <= 3, "what was asked for, and one in hand"
    sent.close()
    await eventually(sender.made[0].is_closed.is_set, 5)


async def test_one_that_is_closed_while_kinesis_is_silent_ends_with_its_thread():
    has_more = threading.Event()

    def silent():
        has_more.wait(10)
        yield pushed(1)
        yield pushed(2)

    sender, sent = feed(silent())
    waiting = asyncio.create_task(sent.page())
    await eventually(lambda: sender.made, 5)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    sent.close()
    assert not sender.made[0].is_closed.is_set()
    has_more.set()
    await eventually(sender.made[0].is_closed.is_set, 5)
    assert sender.made[0].read == 1


# --- registering ----------------------------------------------------------------------------

ARN = "arn:aws:kinesis:us-east-1:000000000000:stream/calls"


class Registry:
    """Knows consumers, and makes them active after *looks* looks."""

    def __init__(self, *known, looks=0):
        self._known = set(known)
        self._looks = looks
        self.registered = []
        self.in_use = False

    def call(self, operation, asked):
        name = asked["ConsumerName"]
        if operation == "RegisterStreamConsumer":
            self._known.add(name)
            if self.in_use:
                raise Refused("ResourceInUseException")
            self.registered.append(name)
            return {"Consumer": {"ConsumerARN": f"{ARN}/{name}", "ConsumerStatus": "CREATING"}}
        if name not in self._known:
            raise Refused("ResourceNotFoundException")
        self._looks -= 1
        status = "ACTIVE" if self._looks < 0 else "CREATING"
        return {"ConsumerDescription": {"ConsumerARN": f"{ARN}/{name}", "ConsumerStatus": status}}


@virtual
async def test_a_consumer_that_is_there_is_used():
    registry = Registry("crm")
    assert await registered(modelled(registry, "calls", now_ms), ARN, "crm") == f"{ARN}/crm"
    assert registry.registered == []


@pytest.mark.parametrize("in_use", [False, True], ids=["alone", "another was quicker"])
@virtual
async def test_one_that_is_missing_is_registered_and_waited_for(in_use):
    registry = Registry(looks=1)
    registry.in_use = in_use
    assert await registered(modelled(registry, "calls", now_ms), ARN, "crm") == f"{ARN}/crm"
    assert registry.registered == ([] if in_use else ["crm"])


@virtual
async def test_one_that_never_becomes_active_is_told():
    registry = Registry("crm", looks=100)
    with pytest.raises(ConfigError, match="did not become active"):
        await registered(modelled(registry, "calls", now_ms), ARN, "crm")
