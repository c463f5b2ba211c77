"""Stores that can only compare and set, over records in memory: atomic groups, and groups in turn."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate, count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.size import examples

from oncebridge.errors import StoreUnavailable
from oncebridge.events.key import Part
from oncebridge.stores import conditional, transitions
from oncebridge.stores.api import (
    HELD,
    Busy,
    Claim,
    Column,
    Commit,
    Commits,
    Duplicate,
    Fate,
    Held,
    Memories,
    Memory,
    NoAnswer,
    Portable,
    Record,
    Releases,
    Reply,
    Store,
    Want,
    Wants,
    spread,
)
from oncebridge.stores.conditional import (
    ConditionalBackend,
    ConditionalStore,
    Records,
    VersionedRecord,
    version_of,
)
from oncebridge.testing import ManualClock, StoreContract, StoreMachine


class BackendInMemory(ConditionalBackend):
    """As a backend would be: every call takes a while, and others get in between."""

    def __init__(self, clock: ManualClock, *, is_atomic: bool = True) -> None:
        self.clock = clock
        self.is_atomic = is_atomic
        self.entries: dict[bytes, VersionedRecord] = {}
        self.numbers = count(1)
        self.reads = self.writes = 0
        self.silent: set[bytes] = set()
        self.swallow: set[bytes] = set()

    def now_ms(self) -> int:
        return self.clock()

    async def read(self, keys: Sequence[bytes]) -> list[VersionedRecord | NoAnswer | None]:
        self.reads += 1
        await asyncio.sleep(0)
        return [NoAnswer("silent") if k in self.silent else self.entries.get(k) for k in keys]

    async def write(self, records: Records, before: Column[int | None]) -> list[Any]:
        self.writes += 1
        await asyncio.sleep(0)
        expected = spread(before, len(records))
        return [self._write(record, one) for record, one in zip(records, expected, strict=True)]

    def _write(self, record: Record, expected: int | None) -> Any:
        if record.key in self.silent:
            return NoAnswer("silent")
        if self.version(record.key) != expected:
            return None
        entry = self.entries[record.key] = VersionedRecord(record, next(self.numbers))
        return NoAnswer("swallowed") if record.key in self.swallow else entry.version

    async def write_together(
        self, records: Records, before: Column[VersionedRecord | None], sizes: Sequence[int]
    ) -> list[Any]:
        if not self.is_atomic:
            return await super().write_together(records, before, sizes)
        await asyncio.sleep(0)
        rows = [*zip(records, map(version_of, spread(before, len(records))), strict=True)]
        answers: list[Any] = []
        for end, size in zip(accumulate(sizes), sizes, strict=True):
            group = rows[end - size : end]
            if any(self.version(record.key) != expected for record, expected in group):
                answers += [None] * size
            else:
                answers += [self._write(*row) for row in group]
        return answers

    async def remove(self, keys: Sequence[bytes], before: Sequence[int]) -> list[bool | NoAnswer]:
        await asyncio.sleep(0)
        return [self._remove(key, version) for key, version in zip(keys, before, strict=True)]

    def _remove(self, key: bytes, expected: int) -> bool | NoAnswer:
        if key in self.silent:
            return NoAnswer("silent")
        return self.version(key) == expected and bool(self.entries.pop(key))

    def version(self, key: bytes) -> Any:
        return version_of(self.entries.get(key))


class StoreInMemory(ConditionalStore, Portable):
    def __init__(self, backend: BackendInMemory, **options: int) -> None:
        super().__init__(backend, **options)
        self.backend = backend

    async def scan(self, place: bytes = b"", limit: int = 1000):
        keys = sorted(key for key in self.backend.entries if key > place)[:limit]
        records = [self.backend.entries[key].record for key in keys]
        return records, keys[-1] if len(keys) == limit else b""

    async def purge(self, limit: int = 1000) -> int:
        now = self.backend.now_ms()
        gone = [k for k, c in self.backend.entries.items() if c.record.keep_until_ms <= now]
        for key in gone:
            del self.backend.entries[key]
        return len(gone)


class TestConditionalStore(StoreContract):
    shared = True
    portable = True
    is_atomic = True

    @asynccontextmanager
    async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
        self.backend = BackendInMemory(clock, is_atomic=self.is_atomic)
        yield StoreInMemory(self.backend)

    @asynccontextmanager
    async def open_second(self, clock: ManualClock) -> AsyncIterator[Store]:
        yield StoreInMemory(self.backend)


class TestConditionalStoreInTurn(TestConditionalStore):
    is_atomic = False


class CompareMachine(StoreMachine):
    generation_kept = 16

    @asynccontextmanager
    async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
        yield StoreInMemory(BackendInMemory(clock))


class InTurnMachine(StoreMachine):
    generation_kept = 16

    @asynccontextmanager
    async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
        yield StoreInMemory(BackendInMemory(clock, is_atomic=False))


TestCompareMachine = CompareMachine.TestCase
TestInTurnMachine = InTurnMachine.TestCase
TestCompareMachine.settings = TestInTurnMachine.settings = settings(
    max_examples=examples(200), stateful_step_count=50, deadline=None
)


# --- what is particular to it ---------------------------------------------------------


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def backend(clock):
    return BackendInMemory(clock)


def want(*keys, token=b"t", lease_ms=1000):
    token = token.ljust(16, b".")
    return Want(tuple(Part(key) for key in keys), token, b"g".ljust(16, b"."), lease_ms, 5000)


def done(claim):
    return [Commit(held.key, held.generation, Fate.DELIVERED, 60_000) for held in claim.held]


async def test_a_new_event_is_one_write_for_the_claim_and_one_for_the_commit(backend):
    store = StoreInMemory(backend)
    claims = await store.claim(Wants.of([want(b"a"), want(b"b", token=b"u")]))
    assert (
        await store.commit(Commits.of([*done(claims[0]), *done(claims[1])]))
        == [Reply.COMMITTED] * 2
    )
    assert (backend.reads, backend.writes) == (0, 2)


async def test_new_events_are_not_decided_on_one_by_one(backend, monkeypatch):
    monkeypatch.setattr(conditional, "transitions", None)
    store = StoreInMemory(backend)
    keys = [b"%d" % number for number in range(100)]
    claims = await store.claim(Wants(keys, b"t" * 16, b"g" * 16, 1000, 5000))
    assert claims.each == [HELD] * 100
    commits = Commits(keys, b"g" * 16, Fate.DELIVERED, 60_000)
    assert await store.commit(commits) == [Reply.COMMITTED] * 100


_wants = st.builds(
    lambda one, several: [
        Want(
            tuple(Part(b"%d %d" % (at, number), *part) for number, part in enumerate(parts)), *rest
        )
        for at, (parts, *rest) in enumerate([*one, *several])
    ],
    *(
        st.lists(
            st.tuples(
                st.lists(st.tuples(st.binary(max_size=2), st.just(0)), min_size=1, max_size=most),
                st.sampled_from([b"t" * 16, b"u" * 16]),
                st.sampled_from([b"g" * 16, b"h" * 16]),
                st.sampled_from([1000, 2000]),
                st.sampled_from([5000, 6000]),
                st.sampled_from([b"", b"memo"]),
            ),
            max_size=4,
        )
        for most in (1, 3)
    ),
)


@given(_wants, st.data())
async def test_what_is_written_at_first_is_what_the_rules_say(wants, data):
    """For new keys, and for the commits of what is held; whatever the columns are."""
    backend = BackendInMemory(ManualClock())
    store, now = StoreInMemory(backend), backend.now_ms()
    await store.claim(Wants.of(wants))
    expected = {}
    for want in wants:
        _, records = transitions.claim([None] * len(want.parts), want, now)
        expected |= {record.key: record for record in records}
    assert {key: entry.record for key, entry in backend.entries.items()} == expected
    commits = [
        Commit(
            key,
            record.generation,
            data.draw(st.sampled_from(Fate)),
            data.draw(st.sampled_from([1000, 2000])),
            data.draw(st.sampled_from([0, 9000])),
            data.draw(st.sampled_from([None, b"", b"done"])),
        )
        for key, record in expected.items()
    ]
    assert await store.commit(Commits.of(commits)) == [Reply.COMMITTED] * len(commits)
    assert backend.reads == 0
    for asked in commits:
        _, after = transitions.commit(expected[asked.key], asked, now)
        assert backend.entries[asked.key].record == after


async def test_what_is_not_as_it_was_left_is_read_and_decided_on(backend, clock):
    one, other = StoreInMemory(backend), StoreInMemory(backend)
    mine, theirs, new = b"m" * 16, b"o" * 16, b"n" * 16
    await one.claim(Wants([b"a", b"b", b"c", b"d"], mine, mine, 1000, 5000))
    clock.advance(1000)
    await other.claim(Wants([b"b"], theirs, theirs, 1000, 5000))  # the generation stays
    await other.forget([b"c"])
    await other.claim(Wants([b"c", b"e"], theirs, new, 1000, 5000))
    keys = [b"e", b"d", b"c", b"b", b"a"]
    generations = [new, mine, mine, mine, theirs]
    assert await one.commit(Commits(keys, generations, Fate.DELIVERED, 60_000)) == [
        *(Reply.COMMITTED, Reply.COMMITTED, Reply.FENCED, Reply.COMMITTED, Reply.FENCED)
    ]
    assert (await one.claim(Wants([b"f", b"a", b"b"], new, new, 1000, 5000))).each == [
        HELD,
        Claim(new, (Held(b"a", mine, 2, b""),), clock()),
        Duplicate(b"b", Fate.DELIVERED, b""),
    ]


async def test_a_commit_after_a_take_over_still_counts(backend, clock):
    one, other = StoreInMemory(backend), StoreInMemory(backend)
    (claim,) = await one.claim(Wants.of([want(b"a")]))
    clock.advance(1000)
    (taken,) = await other.claim(Wants.of([want(b"a", token=b"u")]))
    assert taken.held[0].attempts == 2
    assert await one.commit(Commits.of(done(claim))) == [Reply.COMMITTED]
    assert await other.commit(Commits.of(done(taken))) == [Reply.ALREADY]


async def test_a_margin_keeps_others_from_a_hold_whose_holder_may_be_behind(backend, clock):
    one, other = StoreInMemory(backend, margin_ms=200), StoreInMemory(backend, margin_ms=200)
    await one.claim(Wants.of([want(b"a")]))
    clock.advance(1199)
    assert [*await other.claim(Wants.of([want(b"a", token=b"u")]))] == [Busy(b"a", 1)]
    generation = b"h".ljust(16, b".")
    memory = Memory(b"a", generation, Fate.DELIVERED, 1000)
    assert await other.remember(Memories.of([memory])) == [Reply.KNOWN]
    assert await other.forget([b"a"]) == [False]
    clock.advance(1)
    (answer,) = await other.claim(Wants.of([want(b"a", token=b"u")]))
    assert isinstance(answer, Claim)


async def test_nobody_waits_for_the_margin_of_a_hold_that_was_given_back(backend, clock):
    from oncebridge.stores.api import Release

    store = StoreInMemory(backend, margin_ms=200)
    await store.claim(Wants.of([want(b"a")]))
    assert await store.release(Releases.of([Release(b"a", b"t".ljust(16, b"."), 50, 5000)])) == [
        Reply.RELEASED
    ]
    clock.advance(50)
    assert isinstance((await store.claim(Wants.of([want(b"a", token=b"u")])))[0], Claim)


async def test_silence_about_one_key_is_silence_about_its_event_only(backend):
    backend.silent = {b"b"}
    store = StoreInMemory(backend)
    wants = [want(b"a"), want(b"b", token=b"u"), want(b"c", token=b"v")]
    answers = await store.claim(Wants.of(wants))
    assert [type(answer) for answer in answers] == [Claim, NoAnswer, Claim]
    with pytest.raises(StoreUnavailable):
        await store.peek([b"a", b"b"])
    with pytest.raises(StoreUnavailable):
        await store.forget([b"b"])


@pytest.mark.parametrize("keys", [(b"a",), (b"a", b"b"), (b"b", b"a")])
async def test_a_claim_whose_answer_was_swallowed_is_known_as_our_own(clock, keys):
    backend = BackendInMemory(clock, is_atomic=False)
    backend.swallow = {b"a"}
    store = StoreInMemory(backend)
    assert isinstance((await store.claim(Wants.of([want(*keys)])))[0], NoAnswer)
    backend.swallow = set()
    (answer,) = await store.claim(Wants.of([want(*keys)]))
    assert isinstance(answer, Claim)
    assert [held.attempts for held in answer.held] == [1] * len(keys)


async def test_a_commit_whose_answer_was_swallowed_is_known_as_done(backend):
    store = StoreInMemory(backend)
    (claim,) = await store.claim(Wants.of([want(b"a")]))
    backend.swallow = {b"a"}
    assert [type(a) for a in await store.commit(Commits.of(done(claim)))] == [NoAnswer]
    backend.swallow = set()
    assert await store.commit(Commits.of(done(claim))) == [Reply.ALREADY]


async def test_what_others_keep_changing_has_no_answer(backend, clock):
    class Restless(BackendInMemory):
        def _write(self, record, expected):
            return None

    store = StoreInMemory(Restless(clock))
    (answer,) = await store.claim(Wants.of([want(b"a")]))
    assert isinstance(answer, NoAnswer)
