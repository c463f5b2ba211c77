"""
Random sequences of operations, compared with the reference step by step.

    class MyMachine(StoreMachine):
        @asynccontextmanager
        async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
            async with MyStore(clock=clock) as store:
                yield store

    TestMyMachine = MyMachine.TestCase

There are three workers and three keys. A call has one item or several: with one token and one
generation for all, as a worker sends it, or with different ones, as calls that were joined. Every
other call has a list for each of its columns. Every earlier request can be repeated, and every hold
can be committed, released or extended, even after it has ended. After each step the answers and all
records must be those of `Reference`. A few invariants are checked from the answers alone, so that a
mistake in the reference is found as well.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from oncebridge.events.key import Part
from oncebridge.stores.api import (
    Claim,
    Commit,
    Commits,
    Duplicate,
    Extension,
    Extensions,
    Fate,
    Memories,
    Memory,
    Mismatch,
    Record,
    Release,
    Releases,
    Reply,
    Store,
    Want,
    Wants,
)
from oncebridge.testing.clock import ManualClock
from oncebridge.testing.contract.harness import ask_all, listed
from oncebridge.testing.reference import Reference, ReferenceRow

_T = TypeVar("_T")

KEYS = (b"key 0", b"key 1", b"key 2")

_workers = st.sampled_from(["ann", "bob", "cy"])
_keys = st.sampled_from(KEYS)
_hashes = st.sampled_from([b"", b"1" * 32, b"2" * 32])
_slides = st.sampled_from([0, 70, 150])
_parts = st.builds(Part, _keys, _hashes, _slides)
_two_or_three_parts = st.lists(_parts, min_size=2, max_size=3, unique_by=lambda part: part.key)
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
    """One event of a claim call. Its number is the call's; its token might not be unique."""

    number: int
    want: Want

    def __repr__(self) -> str:
        return f"<{self.number}: {self.want}>"


def _of_holds(
    asked: Bundle[ClaimRequest], *values: st.SearchStrategy[Any]
) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    """
    Return one or two holds, each with *values*.

    A hold is a request, one of its parts, and whether to use the part's current holder instead.
    """
    holds = st.tuples(asked, st.integers(0, 1), st.booleans())
    return st.lists(st.tuples(holds, *values), min_size=1, max_size=2)


_BATCHES: dict[str, Any] = {
    "claim": Wants,
    "commit": Commits,
    "release": Releases,
    "extend": Extensions,
    "remember": Memories,
}


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
        self.calls = 0
        self.generations: dict[tuple[int, bytes], bytes] = {}
        self.leases: dict[bytes, tuple[ClaimRequest, int]] = {}
        self.remembered: dict[bytes, int] = {}
        self.seen: dict[bytes, Record | None] = dict.fromkeys(KEYS)
        """The records after the last operation."""
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
        return self._claim_one(worker, (part,), lease, keep, memo)

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
        return self._claim_one(worker, parts, lease, keep, memo)

    @rule(
        target=asked,
        worker=_workers,
        parts=_two_or_three_parts,
        leases=st.tuples(_leases, _leases, _leases),
        keep=_keeps,
        memos=st.tuples(_memos, _memos, _memos),
        has_tiers=st.booleans(),
        is_joined=st.booleans(),
    )
    def claim_several(
        self,
        *,
        worker: str,
        parts: list[Part],
        leases: tuple[int, ...],
        keep: int,
        memos: tuple[bytes, ...],
        has_tiers: bool,
        is_joined: bool,
    ) -> Any:
        """Claim several events in one call, with one token or, where calls are joined, several."""
        events: list[tuple[Part, ...]] = [(part,) for part in parts]
        if has_tiers and len(parts) > 2:
            events = [(parts[0],), (parts[1], parts[2])]
        wants: list[Want] = []
        for at, event in enumerate(events):
            if is_joined or not wants:
                token, generation = self._draw(worker)
            wants.append(Want(event, token, generation, leases[at], keep, memos[at]))
        return multiple(*self._claim_anew(wants))

    @rule(again=st.lists(asked, min_size=1, max_size=3))
    def repeat_claims(self, again: list[ClaimRequest]) -> None:
        """Send claims again: one, all or some of those of a call, or of several calls."""
        keys: set[bytes] = set()
        distinct = []
        for asked in again:
            mine = {part.key for part in asked.want.parts}
            if not keys & mine:
                keys |= mine
                distinct.append(asked)
        self._claim(distinct)

    @rule(target=asked, worker=_workers, part=_parts, fate=_fates, window=_windows, hard=_hards)
    def deliver(
        self, *, worker: str, part: Part, fate: Fate, window: int, hard: int
    ) -> ClaimRequest:
        """Claim and commit: walks that have to find this by themselves rarely do."""
        asked = self._claim_one(worker, (part,), 1000, 300, b"d")
        if (asked.number, part.key) in self.generations:
            self._commit([(asked, part.key, fate, window, hard, None)])
        return asked

    @rule(target=asked, worker=_workers, part=_parts, memo=_memos)
    def stall(self, worker: str, part: Part, memo: bytes) -> ClaimRequest:
        """Claim and sleep past the lease."""
        asked = self._claim_one(worker, (part,), 20, 100_000, memo)
        self.clock.advance(20)
        return asked

    # --- with any earlier holds, or the current ones -----------------------------

    @rule(holds=_of_holds(asked, _fates, _windows, _hards, _new_memos))
    def commit(self, holds: list[tuple[Any, ...]]) -> None:
        self._commit(self._chosen(holds))

    @rule(holds=_of_holds(asked, _delays, _keeps, _new_memos, st.booleans()))
    def release(self, holds: list[tuple[Any, ...]]) -> None:
        chosen = self._chosen(holds)
        items = [Release(key, asked.want.token, *values) for asked, key, *values in chosen]
        before = self._peek()
        answers = self._step("release", items)
        for (asked, key, *_), answer in zip(chosen, answers, strict=True):
            if answer is Reply.FENCED:
                assert self.seen[key] == before[key], "a fenced release changed something"
            else:
                self._must_hold(asked, key)
                del self.leases[key]

    @rule(holds=_of_holds(asked, _leases))
    def extend(self, holds: list[tuple[Any, ...]]) -> None:
        chosen = self._chosen(holds)
        items = [Extension(key, asked.want.token, lease) for asked, key, lease in chosen]
        before = self._peek()
        answers = self._step("extend", items)
        for (asked, key, lease), answer in zip(chosen, answers, strict=True):
            if answer is Reply.FENCED:
                assert self.seen[key] == before[key], "a fenced extension changed something"
            else:
                self._must_hold(asked, key)
                self.leases[key] = (asked, self.clock() + lease)

    # --- without a hold ----------------------------------------------------------

    @rule(key=_keys, fate=_fates, window=_windows, content=_hashes, memo=_memos)
    def remember(self, key: bytes, fate: Fate, window: int, content: bytes, memo: bytes) -> None:
        self.count += 1
        generation = _bits(f"generation {self.count}")
        memory = Memory(key, generation, fate, window, content, memo)
        (answer,) = self._step("remember", [memory])
        if answer is Reply.REMEMBERED:
            assert not self._is_leased(key), "remembered under a live claim"
            self.leases.pop(key, None)
            self.remembered[key] = self.clock() + window

    @rule(key=_keys, what=st.sampled_from(["forget", "purge", "peek"]))
    def look_after(self, key: bytes, what: str) -> None:
        """Forget, purge or peek: one rule for the three, so that they do not dominate the walks."""
        before = self._peek()
        if what == "forget":
            if self._step("forget", [key]) == [True]:
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
        for key, (asked, _) in self.leases.items():
            record = self.seen[key]
            if self._is_leased(key):
                assert record is not None, f"{key!r} was removed under a live lease"
                assert record.token == asked.want.token, f"{key!r} has two live leases"

    def _draw(self, worker: str) -> tuple[bytes, bytes]:
        """Return a new token and a new generation."""
        self.count += 1
        return self.token(worker), _bits(f"generation {self.count}")

    def _claim_one(
        self, worker: str, parts: tuple[Part, ...], lease: int, keep: int, memo: bytes
    ) -> ClaimRequest:
        (asked,) = self._claim_anew([Want(parts, *self._draw(worker), lease, keep, memo)])
        return asked

    def _claim_anew(self, wants: Sequence[Want]) -> list[ClaimRequest]:
        requests = [ClaimRequest(self.count, want) for want in wants]
        self._claim(requests)
        return requests

    def _claim(self, requests: Sequence[ClaimRequest]) -> None:
        answers = self._step("claim", [asked.want for asked in requests])
        now = self.clock()
        for asked, answer in zip(requests, answers, strict=True):
            if isinstance(answer, Duplicate | Mismatch):
                assert now < self.remembered.get(answer.key, 0), "known, yet never done or past"
            if isinstance(answer, Duplicate):
                record = self.seen[answer.key]
                assert record is not None
                self.remembered[answer.key] = record.until_ms  # it may have slid
            if isinstance(answer, Claim):
                for held in answer.held:
                    self._granted(asked, held.key, held.generation)

    def _granted(self, asked: ClaimRequest, key: bytes, generation: bytes) -> None:
        now = self.clock()
        assert now >= self.remembered.pop(key, 0), f"{key!r} passed although it is remembered"
        holder, _ = self.leases.get(key, (asked, 0))
        if holder is not asked:
            assert not self._is_leased(key), f"{key!r} has two live leases"
        record = self.seen[key]
        # A claim sent again keeps its old end; a record past keeping may be gone already.
        self.leases[key] = (asked, record.until_ms if record else now)
        self.generations[asked.number, key] = generation

    def _commit(self, chosen: Sequence[tuple[Any, ...]]) -> None:
        items = [
            Commit(key, self.generations.get((asked.number, key), asked.want.generation), *values)
            for asked, key, *values in chosen
        ]
        answers = self._step("commit", items)
        for item, answer in zip(items, answers, strict=True):
            if answer is Reply.COMMITTED:
                self.leases.pop(item.key, None)
                self.remembered[item.key] = self.clock() + item.window_ms

    def _chosen(self, holds: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Return the request, the key and the values of each hold; each key once."""
        chosen: dict[bytes, tuple[Any, ...]] = {}
        for (asked, part, present), *values in holds:
            key = asked.want.parts[part % len(asked.want.parts)].key
            holder = self.leases[key][0] if present and key in self.leases else asked
            chosen.setdefault(key, (holder, key, *values))
        return [*chosen.values()]

    def _must_hold(self, asked: ClaimRequest, key: bytes) -> None:
        holder, _ = self.leases.get(key, (None, 0))
        assert holder is asked, f"the token of {asked} served for the hold of {holder}"

    def _is_leased(self, key: bytes) -> bool:
        return key in self.leases and self.clock() < self.leases[key][1]

    # --- the comparison ----------------------------------------------------------

    def _step(self, verb: str, items: Sequence[Any]) -> list[Any]:
        """Run the operation on the store and on the reference, and compare."""
        answers = self._await(self._call(verb, items))
        self._compare(verb, items, answers, lambda world: [*map(getattr(world, verb), items)])
        return answers

    async def _call(self, verb: str, items: Sequence[Any]) -> list[Any]:
        self.calls += 1
        answers: list[Any]
        if verb == "forget":
            answers = await self.store.forget(items)
        else:
            batch = _BATCHES[verb].of(items)
            batch = listed(batch) if self.calls % 2 else batch
            ask = partial(ask_all, self.store) if verb == "claim" else getattr(self.store, verb)
            answers = await ask(batch)
        self.seen = await self._records()
        return answers

    def _compare(
        self, verb: str, items: object, answers: object, apply: Callable[[Reference], object]
    ) -> None:
        expected = []
        for before in self.model.worlds():
            said = apply(before)
            for world in before.worlds():  # a record past keeping may be removed before or after
                if said == answers and self._shows(world):
                    self.model = world
                    return
                expected.append(f"{said} with {world.rows}")
        models = "\n or ".join(expected)
        raise AssertionError(
            f"{verb} {items} at {self.clock()}\n store: {answers} with {self.seen}\n model: {models}"
        )

    def _shows(self, world: Reference) -> bool:
        return all(self._is_alike(self.seen[key], world.rows.get(key)) for key in KEYS)

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
        self.seen = self._await(self._records())
        return self.seen

    async def _records(self) -> dict[bytes, Record | None]:
        return dict(zip(KEYS, await self.store.peek(KEYS), strict=True))

    def _await(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return self._runner.run(coroutine)


def _bits(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()
