"""From each store to the next, on real servers, until what was remembered is back where it was."""

import asyncio
from itertools import pairwise

import pytest
from msgspec.structs import replace
from tests.servers.aws import DynamoDBServer
from tests.servers.postgres import Postgres, schema
from tests.servers.redis import RedisServer, prefix
from tests.servers.s3 import S3Server

from oncebridge.events.key import Part
from oncebridge.stores.api import Commit, Commits, Fate, Record, Release, Releases, Want, Wants
from oncebridge.stores.sqlite.store import SQLiteStore

HOUR = 3_600_000
TIMES = ("until_ms", "keep_until_ms", "hard_until_ms")
FAR_MS = 30_000
"""How much five copies may move a time at most, on a slow machine."""


@pytest.fixture
def stores(
    write,
    monkeypatch,
    *,
    redis_server: RedisServer,
    postgres: Postgres,
    ministack: DynamoDBServer,
    s3_server: S3Server,
) -> list[str]:
    """Write a configuration for each store, the first and the last in a file."""
    s3_server.show_to(monkeypatch)
    tables = {
        "first": {"url": "sqlite:first.db"},
        "redis": {"url": redis_server.url, "prefix": prefix()},
        "postgres": {"url": postgres.url, "schema": schema()},
        "dynamodb": {"url": "dynamodb://carried", "endpoint": ministack.endpoint},
        "s3": {"url": "s3://carried/here", "endpoint": s3_server.endpoint},
        "last": {"url": "sqlite:last.db"},
    }
    for name, table in tables.items():
        write(f"{name}.toml", "[store]", *[f'{key} = "{text}"' for key, text in table.items()])
    return [f"{name}.toml" for name in tables]


def remember(path) -> list[Record]:
    """Leave a record of every kind behind, and many that are done."""
    keys = [b"\x01" + number.to_bytes(32, "big") for number in range(1300)]

    async def work() -> list[Record]:
        async with SQLiteStore(path) as store:
            wants = [
                Want((Part(key, b"h" * 32),), b"t" * 16, key[-16:], HOUR, 5 * HOUR, b"first")
                for key in keys
            ]
            await store.claim(Wants.of(wants))
            failed, waits, register, *done = keys
            await store.release(
                Releases.of(
                    [
                        Release(failed, b"t" * 16, 0, 5 * HOUR, b"why"),
                        Release(waits, b"t" * 16, HOUR, 5 * HOUR),
                        Release(register, b"t" * 16, 0, 5 * HOUR, b"v7", unsent=True),
                    ]
                )
            )
            fates = list(Fate)
            await store.commit(
                Commits.of(
                    [
                        Commit(
                            key, key[-16:], fates[at % len(fates)], 5 * HOUR, 9 * HOUR * (at % 2)
                        )
                        for at, key in enumerate(done)
                    ]
                )
            )
            return [record for record in await store.peek(keys) if record is not None]

    return asyncio.run(work())


def everything(path) -> list[Record]:
    async def work() -> list[Record]:
        async with SQLiteStore(path) as store:
            return (await store.scan(b"", 5000))[0]

    return asyncio.run(work())


def test_what_is_remembered_survives_a_journey_through_every_store(call, stores, tmp_path):
    before = remember(tmp_path / "first.db")
    for here, there in pairwise(stores):
        call("migrate", "-c", there)
        again = call("migrate", "-c", there, "--json").objects()
        assert [one["done"] for one in again] == [[], [], []]
        told = call("copy", "--from", here, "--to", there, "--json").objects()[0]
        assert (told["copied"], told["live"]) == (len(before), 0), (here, there, told)
        told = call("copy", "--from", here, "--to", there, "--json", "--dry-run").objects()[0]
        assert told["known"] >= len(before)
        assert told["copied"] + told["updated"] + told["live"] == 0, (here, there, told)
    after = everything(tmp_path / "last.db")
    assert len(after) == len(before)
    for was, now in zip(sorted(before, key=key_of), after, strict=True):
        for name in TIMES:
            assert abs(getattr(was, name) - getattr(now, name)) < FAR_MS
        head = now.generation if was.fate else was.generation  # all that some keep of it
        assert was.generation.startswith(head)
        assert len(head) >= 8
        assert now == replace(was, generation=head, **{name: getattr(now, name) for name in TIMES})


def key_of(record: Record) -> bytes:
    return record.key
