"""
Random batches in every form that a call can have, against the reference.

The stores ask for what items have in common only once, and write many of them in one statement.
So that must give the same answers and records as deciding one item after the other, whether a
column has one value or a list, and whether a call is one caller's or several were joined.
"""

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.servers.postgres import Postgres, schema
from tests.servers.redis import RedisCluster, RedisServer, prefix

from oncebridge.events.key import Part
from oncebridge.stores.api import (
    Busy,
    Claim,
    ClaimAnswer,
    Commit,
    Commits,
    Duplicate,
    Extension,
    Extensions,
    Fate,
    Memories,
    Memory,
    Mismatch,
    Release,
    Releases,
    Reply,
    Store,
    Want,
    Wants,
)
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.postgres.store import PostgresOptions, PostgresStore
from oncebridge.stores.redis.options import RedisOptions
from oncebridge.stores.redis.store import RedisStore
from oncebridge.stores.sqlite.store import SQLiteStore
from oncebridge.testing import ManualClock, Reference
from oncebridge.testing.contract.harness import ask_all, listed

Opened = Callable[[ManualClock], AbstractAsyncContextManager[Store]]
_Value = TypeVar("_Value")

HOUR, DAY = 3_600_000, 86_400_000  # nothing is past keeping here, or it might be gone
SIZES = (1, 2, 3, 127, 128, 129, 255, 300)
KEYS = [b"\x01%d" % number for number in range(700)]
MEMOS = (
    b"",
    b"plain",
    b'["1dfbc15a-2a17-4071-923d-8f2d1614d09b",1765552507919,false,"",0]',
    b'["c686fcb6378af86c90d67e929da5c081",1794794686890]',
)
HASHES = (b"", b"", b"a" * 32, b"b" * 32, b"short", b"long" * 20)


class Author:
    """Makes up batches, and remembers who holds what."""

    def __init__(self, seed: int, *, several: bool) -> None:
        self._dice = random.Random(seed)
        self._several = several
        self._held: dict[bytes, tuple[bytes, bytes]] = {}

    def wants(self, count: int) -> list[Want]:
        dice = self._dice
        sizes = [dice.choice((1, 1, 2, 3)) if self._several else 1 for _ in range(count)]
        keys = dice.sample(KEYS, sum(sizes))
        hashes = self._column(len(keys), lambda: dice.choice(HASHES))
        slides = self._column(len(keys), lambda: dice.choice((0, 0, 50_000)))
        parts = map(Part, keys, hashes, slides)
        draws = self._column(count, lambda: (dice.randbytes(16), dice.randbytes(16)))
        leases = self._column(count, lambda: dice.choice((10_000, 30_000, 60_000)))
        keeps = self._column(count, lambda: dice.choice((DAY, 2 * DAY)))
        memos = self._column(count, lambda: dice.choice(MEMOS))
        return [
            Want(tuple(next(parts) for _ in range(size)), *draw, lease, keep, memo)
            for size, draw, lease, keep, memo in zip(
                sizes, draws, leases, keeps, memos, strict=True
            )
        ]

    def some(self, wants: Sequence[Want]) -> list[Want]:
        """Return about half of *wants*, to be sent again."""
        return self._dice.sample(wants, (len(wants) + 1) // 2)

    def hear(self, answers: Sequence[ClaimAnswer]) -> None:
        for answer in answers:
            if isinstance(answer, Claim):
                self._held |= {h.key: (answer.token, h.generation) for h in answer.held}

    def commits(self) -> list[Commit]:
        dice, keys = self._dice, self._known(1 / 3)
        fates = self._column(len(keys), lambda: dice.choice((Fate.DELIVERED, Fate.DEAD)))
        windows = self._column(len(keys), lambda: dice.choice((HOUR, DAY)))
        hards = self._column(len(keys), lambda: dice.choice((0, 10 * DAY)))
        memos = self._column(len(keys), lambda: dice.choice((None, *MEMOS)))
        generations = [self._or_other(self._held[key][1]) for key in keys]
        return [*map(Commit, keys, generations, fates, windows, hards, memos)]

    def releases(self) -> list[Release]:
        dice, keys = self._dice, self._known(1 / 4)
        delays = self._column(len(keys), lambda: dice.choice((0, 0, 20_000)))
        keeps = self._column(len(keys), lambda: dice.choice((DAY, 2 * DAY)))
        memos = self._column(len(keys), lambda: dice.choice((None, *MEMOS)))
        unsent = self._column(len(keys), lambda: dice.random() < 0.5)
        tokens = [self._or_other(self._held[key][0]) for key in keys]
        return [*map(Release, keys, tokens, delays, keeps, memos, unsent)]

    def extensions(self) -> list[Extension]:
        keys = self._known(1 / 4)
        leases = self._column(len(keys), lambda: self._dice.choice((10_000, 60_000)))
        tokens = [self._or_other(self._held[key][0]) for key in keys]
        return [*map(Extension, keys, tokens, leases)]

    def memories(self) -> list[Memory]:
        dice, keys = self._dice, self._dice.sample(KEYS, 20)
        fates = self._column(20, lambda: dice.choice((Fate.DELIVERED, Fate.STALE)))
        windows = self._column(20, lambda: dice.choice((HOUR, DAY)))
        hashes = self._column(20, lambda: dice.choice(HASHES))
        memos = self._column(20, lambda: dice.choice(MEMOS))
        generations = self._column(20, lambda: dice.randbytes(16))
        return [*map(Memory, keys, generations, fates, windows, hashes, memos)]

    def pause(self) -> int:
        return self._dice.choice((0, 1, 9_999, 10_000, 45_000))

    def form(self, batch: type[Any], rows: Sequence[Any]) -> Any:
        """Return *rows* folded, with a list for each column, or as three calls that are joined."""
        match self._dice.randrange(3):
            case 0:
                return batch.of(rows)
            case 1:
                return listed(batch.of(rows))
        third = len(rows) // 3 + 1
        return batch.joined(
            [batch.of(rows[at : at + third]) for at in range(0, len(rows) or 1, third)]
        )

    def _column(self, count: int, value: Callable[[], _Value]) -> list[_Value]:
        """Return *count* values; half of the time, all are the same."""
        return [value()] * count if self._dice.random() < 0.5 else [value() for _ in range(count)]

    def _known(self, share: float) -> list[bytes]:
        return self._dice.sample(sorted(self._held), int(len(self._held) * share))

    def _or_other(self, fence: bytes) -> bytes:
        return fence if self._dice.random() < 0.95 else self._dice.randbytes(16)


@pytest.fixture
def memory() -> Opened:
    return lambda clock: MemoryStore(clock=clock)


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


@pytest.mark.parametrize("several", [False, True], ids=["one-part", "some-of-several-parts"])
@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis", "cluster", "postgresql"])
async def test_a_batch_is_decided_as_its_items_would_be_one_by_one(
    kind: str, request: pytest.FixtureRequest, *, several: bool
) -> None:
    clock = ManualClock()
    author, model = Author(7, several=several), Reference(clock)
    opened: Opened = request.getfixturevalue(kind)
    met: set[Any] = set()

    async def claim(asked: Sequence[Want]) -> None:
        answers = await ask_all(store, author.form(Wants, asked))
        assert answers == [*map(model.claim, asked)]
        author.hear(answers)
        met.update(map(type, answers))

    async with opened(clock) as store:
        for size in (*SIZES, *SIZES):
            wants = author.wants(size)
            await claim(wants)
            await claim(author.some(wants))
            clock.advance(author.pause())
            for verb, batch, rows in (
                ("extend", Extensions, author.extensions()),
                ("commit", Commits, author.commits()),
                ("release", Releases, author.releases()),
                ("remember", Memories, author.memories()),
            ):
                replies = await getattr(store, verb)(author.form(batch, rows))
                assert replies == [*map(getattr(model, verb), rows)], verb
                met |= {*replies}
            await claim(author.some(wants))
            clock.advance(author.pause())
        assert met == {Claim, Duplicate, Busy, Mismatch, *Reply}
        for key, record in zip(KEYS, await store.peek(KEYS), strict=True):
            row = model.rows.get(key)
            assert (record is None) == (row is None)
            if record is not None and row is not None:
                assert (record.token, record.until_ms) == (row.token, row.until_ms)
                assert (record.hash, record.memo, record.fate) == (row.hash, row.memo, row.fate)
                assert row.generation.startswith(record.generation)
