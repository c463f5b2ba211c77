"""The Kinesis source on a real server: reading, sharing, going on, being sent records."""

import asyncio
import time
from datetime import UTC, datetime, timedelta

import pytest
from tests.aws.kinesis_workers import QUICK, Worker, crew, in_order, seconds_since
from tests.faults.doubles import FaultyStore, eventually

from oncebridge import ConfigError
from oncebridge.sources.kinesis.source import KinesisOptions
from oncebridge.stores.dynamodb.store import DynamoDBOptions, DynamoDBStore
from oncebridge.stores.memory import MemoryStore

KEYS = "abcdefghij"


async def test_all_shards_are_read_once_and_by_key_in_order(ministack_kinesis):
    async with crew(ministack_kinesis, shards=4) as here:
        await here.put(300, *KEYS)
        one = await here.worker()
        await here.put(300, *KEYS)
        await here.all_delivered()
        assert len(one.shards) == 4
        assert in_order(one)


async def test_a_stream_is_found_by_its_arn(ministack_kinesis):
    async with crew(ministack_kinesis) as here:
        await here.put(10)
        arn = f"arn:aws:kinesis:us-east-1:000000000000:stream/{here.stream}"
        store = FaultyStore(here.memory)
        one = Worker(f"kinesis:{arn}", store, endpoint=ministack_kinesis.endpoint)
        here.workers.append(one)
        await one.start()
        await here.all_delivered()


async def test_after_a_stop_it_goes_on_and_reads_nothing_twice(ministack_kinesis):
    async with crew(ministack_kinesis, shards=2) as here:
        await here.put(200)
        one = await here.worker()
        await here.all_delivered()
        await one.stop()
        await here.put(100)
        two = await here.worker()
        await here.all_delivered()
        assert two.gateway.books.arrived == 100


async def test_a_killed_worker_is_taken_over_when_its_lease_ends(ministack_kinesis):
    async with crew(ministack_kinesis, shards=2) as here:
        one = await here.worker()
        await here.shared(2)
        await here.put(100)
        await here.all_delivered()
        await one.crash()
        began = time.monotonic()
        await here.put(100)
        two = await here.worker()
        await here.all_delivered()
        assert seconds_since(began) > QUICK.lease.total_seconds() / 2
        assert two.gateway.books.arrived <= 200


async def test_workers_come_and_go_and_the_shards_are_shared(ministack_kinesis):
    async with crew(ministack_kinesis, shards=6) as here:
        putting = asyncio.create_task(_put_for_a_while(here))
        one = await here.worker()
        await here.shared(6)
        await here.worker()
        await here.shared(3, 3)
        await here.worker()
        await here.shared(2, 2, 2)
        await one.stop()
        await here.shared(3, 3)
        putting.cancel()
        await asyncio.gather(putting, return_exceptions=True)
        await here.all_delivered()


async def test_workers_share_by_a_table_as_they_would_on_aws(ministack_kinesis, dynoxide):
    table, options = dynoxide.table(), DynamoDBOptions(endpoint=dynoxide.endpoint)
    async with crew(ministack_kinesis, shards=4) as here:
        stores = [DynamoDBStore(table, options) for _ in range(3)]
        one = await here.worker(stores[0])
        await here.put(100, *KEYS)
        await here.shared(4)
        await here.worker(stores[1])
        await here.shared(2, 2)
        await here.put(100, *KEYS)
        await here.all_delivered()
        await one.stop()
        await here.shared(4)
        await here.worker(stores[2])
        await here.put(100, *KEYS)
        await here.all_delivered()


async def _put_for_a_while(here):
    while True:
        await here.put(20, *KEYS)
        await asyncio.sleep(0.1)


@pytest.mark.full
async def test_latest_and_a_time(ministack_kinesis):
    async with crew(ministack_kinesis) as here:
        await here.put(10)
        await asyncio.sleep(2.1)  # it is not known to the second what time it is there
        middle = datetime.now(UTC) - timedelta(seconds=1)
        latest = await here.worker(start="LATEST")
        await eventually(lambda: latest.shards)
        await here.put(10)
        await eventually(lambda: len(latest.sink.raws) == 10)
        await latest.stop()
        since = await here.worker(start=middle.isoformat(), group="another")
        await eventually(lambda: since.gateway.books.arrived == 10)
        await asyncio.sleep(0.6)
        assert since.gateway.books.arrived == 10


async def test_a_stream_that_is_not_there_is_told(ministack_kinesis):
    store = FaultyStore(MemoryStore())
    one = Worker("kinesis://nowhere", store, endpoint=ministack_kinesis.endpoint)
    with pytest.raises(ConfigError, match="Kinesis stream nowhere not found"):
        await one.start()
    await one.stop()


async def test_a_server_that_is_not_there_yet_is_waited_for(aws_identity):
    store = FaultyStore(MemoryStore())
    one = Worker("kinesis://calls", store, endpoint="http://127.0.0.1:9")
    await one.start()
    await asyncio.sleep(0.5)
    await one.stop()
    assert one.shards == ()


# --- enhanced fan-out -----------------------------------------------------------------------


async def test_records_are_sent_to_a_consumer_that_is_registered_if_need_be(ministack_kinesis):
    async with crew(ministack_kinesis, shards=3) as here:
        await here.put(100, *KEYS)
        one = await here.worker(fan_out="pushed")
        await here.put(100, *KEYS)
        await here.all_delivered()
        assert len(one.shards) == 3
        assert in_order(one)
        consumers = ministack_kinesis.ask(
            "ListStreamConsumers",
            {"StreamARN": f"arn:aws:kinesis:us-east-1:000000000000:stream/{here.stream}"},
        )
        assert [consumer["ConsumerName"] for consumer in consumers["Consumers"]] == ["pushed"]


@pytest.mark.full
async def test_a_pushed_shard_goes_on_with_another_worker(ministack_kinesis):
    async with crew(ministack_kinesis) as here:
        await here.put(50)
        one = await here.worker(fan_out="pushed")
        await here.all_delivered()
        await one.stop()
        await here.put(50)
        # For five seconds Kinesis lets nobody else have the subscription.
        two = await here.worker(fan_out="pushed")
        await here.all_delivered()
        assert two.gateway.books.arrived == 50


async def test_a_pushed_shard_comes_to_its_end(ministack_kinesis):
    async with crew(ministack_kinesis) as here:
        one = await here.worker(fan_out="pushed")
        await here.put(50, *KEYS)
        await here.all_delivered()
        (parent,) = one.shards
        ministack_kinesis.split(here.stream, parent)
        await here.put(50, *KEYS)
        await here.all_delivered()
        assert len(one.shards) == 2
        assert in_order(one)


def test_the_defaults_are_what_the_page_says():
    options = KinesisOptions()
    assert (options.start, options.group, options.fan_out) == ("TRIM_HORIZON", "oncebridge", None)
    assert options.poll == timedelta(seconds=1)
