"""Claims over several servers of a cluster whose clocks are hours apart."""

from struct import unpack_from

import pytest
from msgspec.structs import replace

from oncebridge.errors import StoreUnavailable
from oncebridge.events.key import Part
from oncebridge.stores.api import Busy, Claim, Duplicate, Fate, NoAnswer, Record, Want, Wants
from oncebridge.stores.conditional import ConditionalStore
from oncebridge.stores.redis.cluster_claims import ClusterBackend
from oncebridge.stores.redis.scripts import KeyBatch, decode_record, encode_record
from oncebridge.testing import ManualClock

HOUR = 3_600_000
A, B = b"a", b"b"


class Servers:
    """One server per key, each with a clock of its own; what `records.lua` does, in short."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.ahead = {A: HOUR, B: -HOUR}
        self.values: dict[bytes, bytes] = {}
        self.writes: list[bytes] = []
        self.full: set[bytes] = set()
        """Those who can be read, but take nothing."""

    async def decide(self, script: str, asked: KeyBatch) -> tuple[dict[int, object], list[int]]:
        times = [self.now(key) for key in asked.keys]
        if script == "look":
            given = [self.values.get(key) for key in asked.keys]
        else:
            given = [self._swap(*one) for one in zip(asked.keys, asked.own, strict=True)]
        return {at: one for at, one in enumerate(given) if one is not None}, times

    def now(self, key: bytes) -> int:
        return self.clock() + self.ahead[key]

    def record(self, key: bytes) -> Record:
        return decode_record(key, self.values[key])

    def put(self, key: bytes, record: Record) -> None:
        self.values[key] = encode_record(record)

    def _swap(self, key: bytes, asked: bytes) -> object:
        if key in self.full:
            return StoreUnavailable("it is full")
        what, _, lease, keep, size = unpack_from(">BQQQI", asked)
        expected, value = asked[29 : 29 + size], asked[29 + size :]
        if self.values.get(key, b"") != expected:
            return 0
        if what == 0:
            del self.values[key]
            return None
        if what == 2:
            until = self.now(key) + lease
            started = replace(decode_record(key, value), until_ms=until, keep_until_ms=until + keep)
            value = encode_record(started)
        self.values[key] = value
        self.writes.append(key)
        return None


@pytest.fixture
def servers() -> Servers:
    return Servers()


@pytest.fixture
def store(servers: Servers) -> ConditionalStore:
    return ConditionalStore(ClusterBackend(servers.decide, servers.clock))


def want(number: int, *parts: Part, lease_ms: int = 1000) -> Want:
    both = parts or (Part(A), Part(B))
    return Want(both, bytes([number]) * 16, bytes([100 + number]) * 16, lease_ms, 5000, b"m")


async def test_a_hold_ends_by_the_clock_of_its_server(
    servers: Servers, store: ConditionalStore
) -> None:
    (claim,) = await store.claim(Wants.of([want(1)]))
    assert isinstance(claim, Claim)
    for key in (A, B):
        record = servers.record(key)
        assert record.until_ms == servers.now(key) + 1000
        assert record.keep_until_ms == servers.now(key) + 6000
    servers.clock.advance(999)
    assert [*await store.claim(Wants.of([want(2)]))] == [Busy(B, 1)]
    servers.clock.advance(1)
    (taken,) = await store.claim(Wants.of([want(2)]))
    assert isinstance(taken, Claim)
    assert [held.attempts for held in taken.held] == [2, 2]
    for key in (A, B):
        record = servers.record(key)
        assert (record.until_ms, record.token) == (servers.now(key) + 1000, bytes([2]) * 16)


async def test_a_claim_sent_again_is_the_same_claim(
    servers: Servers, store: ConditionalStore
) -> None:
    first, before = await store.claim(Wants.of([want(1)])), dict(servers.values)
    servers.clock.advance(5000)
    (again,) = await store.claim(Wants.of([want(1)]))
    assert isinstance(again, Claim)
    assert isinstance(first[0], Claim)
    assert again.held == first[0].held
    assert servers.values == before


async def test_what_cannot_be_had_together_is_left_to_the_byte(
    servers: Servers, store: ConditionalStore
) -> None:
    old = Record(A, b"", b"g" * 16, servers.now(A) - 5, 3, b"", None, b"old", 0, 2**44)
    servers.put(A, old)
    servers.full.add(B)
    before = dict(servers.values)
    (answer,) = await store.claim(Wants.of([want(1)]))
    assert isinstance(answer, NoAnswer)
    assert servers.writes == [A, A]  # taken, and given back
    assert servers.values == before
    servers.full.clear()
    (claim,) = await store.claim(Wants.of([want(1)]))
    assert isinstance(claim, Claim)
    assert [(held.attempts, held.memo) for held in claim.held] == [(4, b"old"), (1, b"m")]


async def test_a_window_slides_by_the_clock_of_its_server(
    servers: Servers, store: ConditionalStore
) -> None:
    now = servers.now(B)
    done = Record(
        B, b"", b"g" * 8, now + 100, 1, b"", Fate.DELIVERED, b"first", now + 900, now + 100
    )
    servers.put(B, done)
    sliding = (Part(A), Part(B, slide_ms=500))
    (answer,) = await store.claim(Wants.of([want(1, *sliding)]))
    assert answer == Duplicate(B, Fate.DELIVERED, b"first")
    pushed = replace(done, until_ms=now + 500, keep_until_ms=now + 500)
    assert servers.record(B) == pushed
    servers.clock.advance(450)
    await store.claim(Wants.of([want(2, *sliding)]))
    assert servers.record(B) == replace(done, until_ms=now + 900, keep_until_ms=now + 900)
    assert A not in servers.values
