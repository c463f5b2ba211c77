"""
Random sequences of operations, compared with the reference step by step.

    class MyMachine(StoreMachine):
        @asynccontextmanager
        async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
            async with MyStore(clock=clock) as store:
                yield store

    TestMyMachine = MyMachine.TestCase

There are three workers and three keys. Every earlier request can be repeated, and every hold can be
committed, released or extended, even after it has ended. After each step the answer and all records
must be those of `Reference`. A few invariants are checked from the answers alone, so that a mistake
in the reference is found as well.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from oncebridge.events.key import Part
from oncebridge.stores.api import (
    Claim,
    ClaimAnswer,
    Commit,
    Duplicate,
    Extension,
    Fate,
    Memory,
    Mismatch,
    Record,
    Release,
    Reply,
    Store,
    Want,
)
from oncebridge.testing.clock import ManualClock
from oncebridge.testing.reference import Reference, ReferenceRow

_T = TypeVar("_T")

KEYS = (b"key 0", b"key 1", b"key 2")

_workers = st.sampled_from(["ann", "bob", "cy"])
_keys = st.sampled_from(KEYS)
_hashes = st.sampled_from([b"", b"1" * 32, b"2" * 32])
_slides = st.sampled_from([0, 70, 150])
_parts = st.builds(Part, _keys, _hashes, _slides)
_leases = st.sampled_from([20, 50, 1000])
_keeps = st.sampled_from([0, 300, 100_000])
_windows = st.sampled_from([20, 60, 200])
_hards = st.sampled_from([0, 80])
_delays = st.sampled_from([0, 0, 30])
_memos = st.sampled_from([b"", b"m", b"n"])
_new_memos = st.sampled_from([None, b"", b"o", b"p"])
_fates = st.sampled_from(Fate)


@dataclass(frozen=True)
class ClaimRequest:
    """One claim request. Its number identifies its holds; its token might not be unique."""

    number: int
    want: Want

    def __repr__(self) -> str:
        return f"<{self.number}: {self.want}>"


Hold = tuple[ClaimRequest, int, bool]
"""A request, one of its parts, and whether to use the part's current holder instead."""


def _holds(asked: Bundle[ClaimRequest]) -> st.SearchStrategy[Hold]:
    return st.tuples(asked, st.integers(0, 1), st.booleans())


class StoreMachine(RuleBasedStateMachine):
    """Random tests of a store against `Reference`: inherit it and write `open`."""

    generation_kept = 8
    """How many bytes of a done record's generation the store keeps at least."""
    attempts_kept = 15
    """Up to which number the store counts the attempts of a done record at least."""

    asked = Bundle[ClaimRequest]("asked")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.model = Reference(self.clock)
        self.count = 0
        self.generations: dict[tuple[int, bytes], bytes] = {}
        self.leases: dict[bytes, tuple[ClaimRequest, int]] = {}
        self.remembered: dict[bytes, int] = {}
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self.store = self._await(self._stack.enter_async_context(self.open(self.clock)))

    def open(self, clock: ManualClock) -> AbstractAsyncContextManager[Store]:
        """Open an empty store."""
        raise NotImplementedError

    def token(self, worker: str) -> bytes:
        """Return a new token for a claim of *worker*."""
        return _bits(f"token {worker} {self.count}")

    def teardown(self) -> None:
        try:
            self._await(self._stack.aclose())
        finally:
            self._runner.close()

    # --- claim -------------------------------------------------------------------

    @rule(target=asked, worker=_workers, part=_parts, lease=_leases, keep=_keeps, memo=_memos)
    def claim(self, worker: str, part: Part, lease: int, keep: int, memo: bytes) -> ClaimRequest:
        return self._claim_anew(worker, (part,), lease, keep, memo)

    @rule(
        target=asked,
        worker=_workers,
        parts=st.tuples(_parts, _parts).filter(lambda two: two[0].key != two[1].key),
        lease=_leases,
        keep=_keeps,
        memo=_memos,
    )
    def claim_two_tiers(
        self, worker: str, parts: tuple[Part, Part], lease: int, keep: int, memo: bytes
    ) -> ClaimRequest:
        return self._claim_anew(worker, parts, lease, keep, memo)

    @rule(asked=asked)
    def repeat_a_claim(self, asked: ClaimRequest) -> None:
        self._claim(asked)

    @rule(target=asked, worker=_workers, part=_parts, fate=_fates, window=_windows, hard=_hards)
    def deliver(
        self, *, worker: str, part: Part, fate: Fate, window: int, hard: int
    ) -> ClaimRequest:
        """Claim and commit: walks that have to find this by themselves rarely do."""
        asked = self._claim_anew(worker, (part,), 1000, 300, b"d")
        if (asked.number, part.key) in self.generations:
            self._commit(asked, part.key, fate=fate, window=window, hard=hard)
        return asked

    @rule(target=asked, worker=_workers, part=_parts, memo=_memos)
    def stall(self, worker: str, part: Part, memo: bytes) -> ClaimRequest:
        """Claim and sleep past the lease."""
        asked = self._claim_anew(worker, (part,), 20, 100_000, memo)
        self.clock.advance(20)
        return asked

    # --- with any earlier hold, or the current one -------------------------------

    @rule(hold=_holds(asked), fate=_fates, window=_windows, hard=_hards, memo=_new_memos)
    def commit(self, *, hold: Hold, fate: Fate, window: int, hard: int, memo: bytes | None) -> None:
        asked, key = self._chosen(hold)
        self._commit(asked, key, fate=fate, window=window, hard=hard, memo=memo)

    @rule(hold=_holds(asked), delay=_delays, keep=_keeps, memo=_new_memos, unsent=st.booleans())
    def release(
        self, *, hold: Hold, delay: int, keep: int, memo: bytes | None, unsent: bool
    ) -> None:
        asked, key = self._chosen(hold)
        before = self._peek()
        answer = self._step("release", Release(key, asked.want.token, delay, keep, memo, unsent))
        if answer is Reply.FENCED:
            assert self._peek() == before, "a fenced release changed something"
        else:
            self._must_hold(asked, key)
            del self.leases[key]

    @rule(hold=_holds(asked), lease=_leases)
    def extend(self, hold: Hold, lease: int) -> None:
        asked, key = self._chosen(hold)
        before = self._peek()
        answer = self._step("extend", Extension(key, asked.want.token, lease))
        if answer is Reply.FENCED:
            assert self._peek() == before, "a fenced extension changed something"
        else:
            self._must_hold(asked, key)
            self.leases[key] = (asked, self.clock() + lease)

    # --- without a hold ----------------------------------------------------------

    @rule(key=_keys, fate=_fates, window=_windows, content=_hashes, memo=_memos)
    def remember(self, key: bytes, fate: Fate, window: int, content: bytes, memo: bytes) -> None:
        self.count += 1
        generation = _bits(f"generation {self.count}")
        answer = self._step("remember", Memory(key, generation, fate, window, content, memo))
        if answer is Reply.REMEMBERED:
            assert not self._is_leased(key), "remembered under a live claim"
            self.leases.pop(key, None)
            self.remembered[key] = self.clock() + window

    @rule(key=_keys, what=st.sampled_from(["forget", "purge", "peek"]))
    def look_after(self, key: bytes, what: str) -> None:
        """Forget, purge or peek: one rule for the three, so that they do not dominate the walks."""
        before = self._peek()
        if what == "forget":
            if self._step("forget", key):
                assert not self._is_leased(key), "a live claim was forgotten"
                self.leases.pop(key, None)
                self.remembered.pop(key, None)
        elif what == "purge":
            removed = self._await(self.store.purge())
            gone = [key for key, record in self._peek().items() if before[key] and not record]
            assert removed == len(gone), f"purge returned {removed}, but removed {gone}"
            self._compare("purge", None, None, lambda _: None)
        else:
            assert self._peek() == before, "peek changed something"
            self._compare("peek", None, None, lambda _: None)

    # --- time --------------------------------------------------------------------

    @rule(ms=st.sampled_from([1, 15, 20, 50, 300, 40_000]))
    def wait(self, ms: int) -> None:
        self.clock.advance(ms)

    @rule(key=_keys, off=st.sampled_from([-1, 0, 1]))
    def wait_for_the_end(self, key: bytes, off: int) -> None:
        """Advance to just before, at, or just after the end of a record."""
        row = self.model.rows.get(key)
        if row is not None:
            self.clock.advance(max(row.until_ms + off - self.clock(), 0))

    # --- facts -------------------------------------------------------------------

    @invariant()
    def a_lease_is_the_one_on_record(self) -> None:
        seen = self._peek()
        for key, (asked, _) in self.leases.items():
            record = seen[key]
            if self._is_leased(key):
                assert record is not None, f"{key!r} was removed under a live lease"
                assert record.token == asked.want.token, f"{key!r} has two live leases"

    def _claim_anew(
        self, worker: str, parts: tuple[Part, ...], lease: int, keep: int, memo: bytes
    ) -> ClaimRequest:
        self.count += 1
        generation = _bits(f"generation {self.count}")
        want = Want(parts, self.token(worker), generation, lease, keep, memo)
        asked = ClaimRequest(self.count, want)
        self._claim(asked)
        return asked

    def _claim(self, asked: ClaimRequest) -> None:
        answer: ClaimAnswer = self._step("claim", asked.want)
        now = self.clock()
        if isinstance(answer, Duplicate | Mismatch):
            assert now < self.remembered.get(answer.key, 0), "known, yet never done or past"
        if isinstance(answer, Duplicate):
            after = self._peek()[answer.key]
            assert after is not None
            self.remembered[answer.key] = after.until_ms  # it may have slid
        if isinstance(answer, Claim):
            for held in answer.held:
                self._granted(asked, held.key, held.generation)

    def _granted(self, asked: ClaimRequest, key: bytes, generation: bytes) -> None:
        now = self.clock()
        assert now >= self.remembered.pop(key, 0), f"{key!r} passed although it is remembered"
        holder, _ = self.leases.get(key, (asked, 0))
        if holder is not asked:
            assert not self._is_leased(key), f"{key!r} has two live leases"
        record = self._peek()[key]
        # A claim sent again keeps its old end; a record past keeping may be gone already.
        self.leases[key] = (asked, record.until_ms if record else now)
        self.generations[asked.number, key] = generation

    def _commit(
        self,
        asked: ClaimRequest,
        key: bytes,
        *,
        fate: Fate,
        window: int,
        hard: int,
        memo: bytes | None = None,
    ) -> None:
        generation = self.generations.get((asked.number, key), asked.want.generation)
        answer = self._step("commit", Commit(key, generation, fate, window, hard, memo))
        if answer is Reply.COMMITTED:
            self.leases.pop(key, None)
            self.remembered[key] = self.clock() + window

    def _chosen(self, hold: Hold) -> tuple[ClaimRequest, bytes]:
        asked, part, present = hold
        key = asked.want.parts[part % len(asked.want.parts)].key
        return (self.leases[key][0] if present and key in self.leases else asked), key

    def _must_hold(self, asked: ClaimRequest, key: bytes) -> None:
        holder, _ = self.leases.get(key, (None, 0))
        assert holder is asked, f"the token of {asked} served for the hold of {holder}"

    def _is_leased(self, key: bytes) -> bool:
        return key in self.leases and self.clock() < self.leases[key][1]

    # --- the comparison ----------------------------------------------------------

    def _step(self, verb: str, item: object) -> Any:
        """Run the operation on the store and on the reference, and compare."""
        (answer,) = self._await(getattr(self.store, verb)([item]))
        self._compare(verb, item, answer, lambda world: getattr(world, verb)(item))
        return answer

    def _compare(
        self, verb: str, item: object, answer: object, apply: Callable[[Reference], object]
    ) -> None:
        seen = self._peek()
        expected = []
        for before in self.model.worlds():
            said = apply(before)
            for world in before.worlds():  # a record past keeping may be removed before or after
                if said == answer and self._shows(seen, world):
                    self.model = world
                    return
                expected.append(f"{said} with {world.rows}")
        models = "\n or ".join(expected)
        raise AssertionError(
            f"{verb} {item} at {self.clock()}\n store: {answer} with {seen}\n model: {models}"
        )

    def _shows(self, seen: dict[bytes, Record | None], world: Reference) -> bool:
        return all(self._is_alike(seen[key], world.rows.get(key)) for key in KEYS)

    def _is_alike(self, record: Record | None, row: ReferenceRow | None) -> bool:
        if record is None or row is None:
            return record is None and row is None
        whole = record.fate is None
        most = 10**9 if whole else self.attempts_kept
        return (
            (record.token, record.hash, record.fate, record.memo)
            == (row.token, row.hash, row.fate, row.memo)
            and record.until_ms == row.until_ms
            and min(record.attempts, most) == min(row.attempts, most)
            and row.generation.startswith(record.generation)
            and len(record.generation) >= (16 if whole else self.generation_kept)
        )

    def _peek(self) -> dict[bytes, Record | None]:
        return dict(zip(KEYS, self._await(self.store.peek(KEYS)), strict=True))

    def _await(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return self._runner.run(coroutine)


def _bits(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()
