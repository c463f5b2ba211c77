"""What operators' verbs need of every store: the trail, releasing by token, finding by id."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from itertools import count

import pytest
from tests.servers.aws import DynamoDBServer
from tests.servers.postgres import Postgres, schema
from tests.servers.redis import RedisCluster, RedisServer, prefix
from tests.servers.s3 import S3Server

from oncebridge.engine.memos import Memo
from oncebridge.events.key import Part
from oncebridge.operate import operator_log
from oncebridge.operate.lookup import records_with_id
from oncebridge.operate.operator_log import MOST_BYTES, OperatorActions, StoreOperatorLog
from oncebridge.operate.release import read_statuses, release
from oncebridge.service.addresses import StorePlace
from oncebridge.stores.api import Claim, Commit, Commits, Fate, Memories, Memory, Reply, Want, Wants
from oncebridge.stores.memory import MemoryStore

Opened = Callable[[], AbstractAsyncContextManager]
HOUR = 3_600_000

_numbers = count(1)


def fresh(what: bytes = b"key") -> bytes:
    return b"\x01" + (b"%b %d " % (what, next(_numbers))).ljust(32, b".")


@pytest.fixture
def sqlite(tmp_path) -> Opened:
    return lambda: StorePlace.of(f"sqlite:{tmp_path / 'seen.db'}").opened


@pytest.fixture
def redis(redis_server: RedisServer) -> Opened:
    name = prefix()
    return lambda: StorePlace.of(redis_server.url, prefix=name).opened


@pytest.fixture
def cluster(redis_cluster: RedisCluster) -> Opened:
    name = prefix()
    return lambda: StorePlace.of(redis_cluster.url, prefix=name).opened


@pytest.fixture
def postgresql(postgres: Postgres) -> Opened:
    name = schema()
    return lambda: StorePlace.of(postgres.url, schema=name, auto_migrate=True).opened


@pytest.fixture
def dynamodb(ministack: DynamoDBServer) -> Opened:
    url, options = f"dynamodb://{ministack.table()}", {"endpoint": ministack.endpoint}
    return lambda: StorePlace.of(url, timeout="30s", **options).opened


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Opened:
    s3_server.show_to(monkeypatch)
    url, options = f"s3://{s3_server.bucket()}/here", {"endpoint": s3_server.endpoint}
    return lambda: StorePlace.of(url, timeout="30s", expiry="sweep", **options).opened


SHARED = ["sqlite", "redis", "cluster", "postgresql", "dynamodb", "s3"]


@pytest.fixture(params=SHARED)
def opened(request: pytest.FixtureRequest) -> Opened:
    """Opens one and the same store as often as it is called."""
    return request.getfixturevalue(request.param)


async def test_acts_of_many_writers_are_all_there_and_seen_by_another_process(opened: Opened):
    event, route = (
        operator_log.event_log_key(fresh()),
        operator_log.route_log_key(f"crm {next(_numbers)}"),
    )
    async with opened() as one, opened() as other:
        writers = [
            StoreOperatorLog(store, by=f"u{n}@box") for n, store in enumerate([one, other] * 3)
        ]
        acts = [writer.write("forget", [event], route="crm") for writer in writers]
        acts.append(
            StoreOperatorLog(one).write("pause", [route], reason="caf\N{LATIN SMALL LETTER E}")
        )
        await asyncio.gather(*acts)
        found = await operator_log.read(other, [event, route])
        now_ms = await one.now_ms()
    assert {act.who for act in found[event].acts} == {f"u{n}@box" for n in range(6)}
    assert all(abs(act.at_ms - now_ms) < 60_000 for act in found[event].acts)
    assert [act.verb for act in found[route].acts] == ["pause"]


async def test_a_trail_as_large_as_it_gets_comes_back_whole(opened: Opened):
    name = operator_log.event_log_key(fresh())
    async with opened() as store:
        for number in range(12):
            await StoreOperatorLog(store, by="u" * 90).write(
                "resend", [name], reason=f"{number:02}" + "\N{SNOWMAN}" * 198
            )
        (record,) = await store.peek([name])
        assert MOST_BYTES - 1000 < len(record.memo) <= MOST_BYTES
        acts = OperatorActions.read(record.memo)
        assert acts.acts[-1].reason == "11" + "\N{SNOWMAN}" * 198
        assert acts.before + len(acts.acts) == 12
        assert await store.now_ms() + operator_log.KEPT_MS - record.keep_until_ms < 60_000
        assert await store.purge() == 0
        assert (await operator_log.read(store, [name]))[name] == acts


async def test_what_is_held_is_released_by_what_was_seen_there(opened: Opened):
    held, register, done, waits = (fresh(name) for name in (b"h", b"r", b"d", b"w"))
    keys = [held, register, done, waits]
    async with opened() as worker, opened() as operator:
        memo = Memo("a1", 7).write()
        wants = [Want((Part(key),), key[:16], key[-16:], HOUR, 5 * HOUR, memo) for key in keys[:2]]
        assert all(isinstance(answer, Claim) for answer in await worker.claim(Wants.of(wants)))
        await operator.remember(Memories.of([Memory(done, b"g" * 16, Fate.DELIVERED, HOUR)]))
        seen = await read_statuses(operator, dict.fromkeys(keys, b""))
        assert [one.is_held for one in seen] == [True, True, False, False]
        told: list[bytes] = []

        async def before(keys: list[bytes]) -> None:
            told.extend(keys)

        gone = await release(operator, seen, entities={register}, before=before)
        assert [one.gone for one in gone] == [True, True, False, False]
        assert told == [held, register]
        one, two = await operator.peek(keys[:2])
        assert (one.token, one.attempts, one.memo) == (b"", 1, memo)
        assert (two.token, two.attempts) == (b"", 0)
        assert one.keep_until_ms - one.until_ms == 5 * HOUR
        again = [Want((Part(held),), b"n" * 16, b"m" * 16, HOUR, HOUR)]
        (claim,) = await operator.claim(Wants.of(again))  # at once, also where clocks may be wrong
        assert (claim.held[0].generation, claim.held[0].attempts) == (held[-16:], 2)
        # A worker that lives after all: what it has delivered counts, and its hold is another's.
        assert not any(one.gone for one in await release(operator, seen, before=before))
        commit = Commit(held, held[-16:], Fate.DELIVERED, HOUR)
        assert await worker.commit(Commits.of([commit])) == [Reply.COMMITTED]


async def test_a_first_copy_is_found_by_its_id_among_all_records(opened: Opened):
    keys = [fresh() for _ in range(7)]
    async with opened() as store:
        wants = [
            Want((Part(key),), key[:16], key[-16:], HOUR, HOUR, Memo(f"id-{n}", 7).write())
            for n, key in enumerate(keys)
        ]
        await store.claim(Wants.of(wants))
        await StoreOperatorLog(store).write(
            "forget", [operator_log.event_log_key(key) for key in keys]
        )
        counts: list[int] = []
        found = {r.key async for r in records_with_id(store, "id-3", counts.append)}
        assert found == {keys[3]}
        assert counts[-1] >= 14
        assert [r async for r in records_with_id(store, "id", counts.append)] == []


async def test_the_memory_store_has_it_all_but_the_scan():
    store = MemoryStore()
    name = operator_log.event_log_key(fresh())
    await asyncio.gather(*[StoreOperatorLog(store).write("forget", [name]) for _ in range(5)])
    assert len((await operator_log.read(store, [name]))[name].acts) == 5
