"""Splits and merges on a server that keeps the parents, as Kinesis does."""

import asyncio

import pytest
from tests.aws.kinesis_workers import crew, in_order
from tests.faults.doubles import eventually

pytestmark = pytest.mark.full

KEYS = "abcdefghij"


async def test_a_parent_is_read_before_its_children(kinesis_server):
    async with crew(kinesis_server) as here:
        await here.put(100, *KEYS)
        (parent,) = kinesis_server.shards(here.stream)
        kinesis_server.split(here.stream, parent["ShardId"])
        await here.put(100, *KEYS)
        one = await here.worker()
        await here.all_delivered()
        assert in_order(one)
        await eventually(lambda: len(one.shards) == 2)
        assert parent["ShardId"] not in one.shards


async def test_both_that_were_merged_are_read_before_what_came_out(kinesis_server):
    async with crew(kinesis_server, shards=2) as here:
        await here.put(100, *KEYS)
        one = await here.worker()
        await eventually(lambda: len(one.shards) == 2)
        kinesis_server.merge(here.stream, *one.shards)
        await here.put(100, *KEYS)
        await here.all_delivered()
        assert in_order(one)
        await eventually(lambda: len(one.shards) == 1)


async def test_resharding_under_load_with_workers_that_come_and_go(kinesis_server):
    async with crew(kinesis_server, shards=2) as here:
        one = await here.worker()
        await here.put(50, *KEYS)
        await here.worker()
        await here.shared(1, 1)
        await here.put(50, *KEYS)
        first, second = (shard["ShardId"] for shard in kinesis_server.shards(here.stream))
        await asyncio.to_thread(kinesis_server.split, here.stream, first)
        await here.put(50, *KEYS)
        await here.shared(1, 2)
        await one.stop()
        await here.put(50, *KEYS)
        *_, low, high = (shard["ShardId"] for shard in kinesis_server.shards(here.stream))
        await asyncio.to_thread(kinesis_server.merge, here.stream, low, high)
        await here.put(50, *KEYS)
        await here.shared(2)
        await here.worker()
        await here.shared(1, 1)
        await asyncio.to_thread(kinesis_server.split, here.stream, second)
        await here.put(50, *KEYS)
        await here.all_delivered()


async def test_a_worker_that_comes_later_knows_what_was_read_to_its_end(kinesis_server):
    async with crew(kinesis_server) as here:
        one = await here.worker()
        await here.put(50)
        await here.all_delivered()
        (parent,) = one.shards
        kinesis_server.split(here.stream, parent)
        await eventually(lambda: len(one.shards) == 2)
        await one.stop()
        await here.put(50)
        two = await here.worker()
        await here.all_delivered()
        assert two.gateway.books.arrived == 50
        assert parent not in two.shards
