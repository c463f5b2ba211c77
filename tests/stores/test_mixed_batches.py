"""
Batches whose items differ in every term, against the operations table.

The stores ask for what items have in common only once, and write many of them in one statement.
So that must give the same answers as deciding one item after the other.
"""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from tests.servers.postgres import Postgres, schema
from tests.servers.redis import RedisCluster, RedisServer, prefix

from oncebridge.events.key import Part
from oncebridge.stores import transitions
from oncebridge.stores.api import (
    Claim,
    ClaimAnswer,
    Commit,
    CommitAnswer,
    Fate,
    Record,
    Reply,
    Store,
    Want,
)
from oncebridge.stores.postgres.store import PostgresOptions, PostgresStore
from oncebridge.stores.redis.options import RedisOptions
from oncebridge.stores.redis.store import RedisStore
from oncebridge.stores.sqlite.store import SQLiteStore
from oncebridge.testing import ManualClock

Opened = Callable[[ManualClock], AbstractAsyncContextManager[Store]]

HOUR, DAY = 3_600_000, 86_400_000  # nothing is past keeping here, or it might be gone
SIZES = (1, 2, 3, 127, 128, 129, 255, 300)
MEMOS = (
    b"",
    b"plain",
    b'["1dfbc15a-2a17-4071-923d-8f2d1614d09b",1765552507919,false,"",0]',
    b'["c686fcb6378af86c90d67e929da5c081",1794794686890]',
)
HASHES = (b"", b"", b"a" * 32, b"b" * 32, b"short", b"long" * 20)


class Model:
    """What stands under each key, decided one by one."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._rows: dict[bytes, Record] = {}

    def claim(self, want: Want) -> ClaimAnswer:
        before = [self._rows.get(part.key) for part in want.parts]
        answer, after = transitions.claim(before, want, self._clock())
        self._rows |= {record.key: record for record in after}
        return answer

    def commit(self, asked: Commit) -> CommitAnswer:
        answer, after = transitions.commit(self._rows.get(asked.key), asked, self._clock())
        if after is not None:
            self._rows[asked.key] = after
        return answer


class Author:
    """Makes up batches."""

    def __init__(self, seed: int, *, several: bool) -> None:
        self._dice = random.Random(seed)
        self._several = several
        self._generations: dict[bytes, bytes] = {}

    def wants(self, size: int) -> list[Want]:
        keys = self._dice.sample(range(500), size + size // 4)
        wants = []
        while len(wants) < size:
            count = 2 if self._several and len(keys) > size - len(wants) else 1
            wants.append(self._want([keys.pop() for _ in range(count)]))
        return wants

    def _want(self, keys: list[int]) -> Want:
        dice = self._dice
        parts = tuple(
            Part(b"\x01" + b"%d" % key, dice.choice(HASHES), dice.choice((0, 0, 50_000)))
            for key in keys
        )
        token, generation = dice.randbytes(16), dice.randbytes(16)
        lease = dice.choice((10_000, 30_000, 30_000, 60_000))
        return Want(
            parts, token, generation, lease, dice.choice((DAY, 2 * DAY)), dice.choice(MEMOS)
        )

    def commits(self, answers: list[ClaimAnswer]) -> list[Commit]:
        for answer in answers:
            if isinstance(answer, Claim):
                self._generations |= {held.key: held.generation for held in answer.held}
        keys = self._dice.sample(sorted(self._generations), len(self._generations) * 2 // 3)
        return [self._commit(key) for key in keys]

    def _commit(self, key: bytes) -> Commit:
        dice = self._dice
        generation = self._generations[key] if dice.random() < 0.95 else dice.randbytes(16)
        hard = dice.choice((0, 0, 0, 10 * DAY))
        memo = dice.choice((None, None, None, *MEMOS))
        fate = dice.choice((Fate.DELIVERED, Fate.DELIVERED, Fate.DEAD))
        return Commit(key, generation, fate, dice.choice((HOUR, DAY)), hard, memo)

    def pause(self) -> int:
        return self._dice.choice((0, 1, 9_999, 10_000, 45_000))


@pytest.fixture
def sqlite(tmp_path: Path) -> Opened:
    return lambda clock: SQLiteStore(tmp_path / "seen.db", clock=clock)


@pytest.fixture
def redis(redis_server: RedisServer) -> Opened:
    options = RedisOptions(prefix=prefix())
    return lambda clock: RedisStore(redis_server.url, options, clock=clock)


@pytest.fixture
def cluster(redis_cluster: RedisCluster) -> Opened:
    options = RedisOptions(prefix=prefix())
    return lambda clock: RedisStore(redis_cluster.url, options, clock=clock)


@pytest.fixture
def postgresql(postgres: Postgres) -> Opened:
    options = PostgresOptions(schema=schema(), auto_migrate=True)

    @asynccontextmanager
    async def opened(clock: ManualClock) -> AsyncIterator[Store]:
        async with PostgresStore(postgres.url, options, clock=clock) as store:
            yield store

    return opened


@pytest.mark.parametrize("several", [False, True], ids=["one-part", "some-of-two-parts"])
@pytest.mark.parametrize("kind", ["sqlite", "redis", "cluster", "postgresql"])
async def test_a_batch_is_decided_as_its_items_would_be_one_by_one(
    kind: str, request: pytest.FixtureRequest, *, several: bool
) -> None:
    clock = ManualClock()
    author, model = Author(7, several=several), Model(clock)
    opened: Opened = request.getfixturevalue(kind)
    met = set()
    async with opened(clock) as store:
        for size in (*SIZES, *SIZES):
            wants = author.wants(size)
            answers = await store.claim(wants)
            assert answers == [model.claim(want) for want in wants]
            clock.advance(author.pause())
            commits = author.commits(answers)
            replies = await store.commit(commits)
            assert replies == [model.commit(commit) for commit in commits]
            clock.advance(author.pause())
            met |= {type(answer).__name__ for answer in answers} | set(replies)
    assert met == {
        *("Claim", "Duplicate", "Busy", "Mismatch"),
        *(Reply.COMMITTED, Reply.ALREADY, Reply.FENCED),
    }
