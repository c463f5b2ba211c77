from oncebridge.stores.api import Claim, Duplicate, Fate, Held, Mismatch, Reply, Store
from oncebridge.testing.contract.harness import (
    CONTENT,
    OTHER,
    Harness,
    ask,
    commit,
    extend,
    hold,
    look,
    release,
    remember,
    see,
)


class RememberingCases(Harness):
    """Keys marked done without a claim; peek and forget."""

    # --- remember ----------------------------------------------------------------

    async def test_what_is_remembered_is_a_duplicate_with_its_fate_and_memo(
        self, store: Store
    ) -> None:
        key = self.key()
        now = await store.now_ms()
        memory = self.memory(key, Fate.UNCHANGED, memo=b"m")
        assert await remember(store, memory) is Reply.REMEMBERED
        assert await ask(store, self.want(key)) == Duplicate(key, Fate.UNCHANGED, b"m")
        record = await see(store, key)
        assert self.near(record.until_ms, now + self.long)
        assert (record.token, record.fate, record.memo) == (b"", Fate.UNCHANGED, b"m")

    async def test_what_is_remembered_is_forgotten_after_its_window(self, store: Store) -> None:
        key = self.key()
        assert await remember(store, self.memory(key, window_ms=self.short)) is Reply.REMEMBERED
        await self.wait(self.short)
        assert (await hold(store, self.want(key))).held[0].attempts == 1

    async def test_what_is_remembered_with_its_content_tells_other_content_apart(
        self, store: Store
    ) -> None:
        key = self.key()
        memory = self.memory(key, content=CONTENT, memo=b"m")
        assert await remember(store, memory) is Reply.REMEMBERED
        assert await ask(store, self.want(key, content=OTHER)) == Mismatch(key, b"m")
        assert isinstance(await ask(store, self.want(key, content=CONTENT)), Duplicate)

    async def test_remembering_twice_changes_nothing(self, store: Store) -> None:
        key = self.key()
        memory = self.memory(key, memo=b"m")
        assert await remember(store, memory) is Reply.REMEMBERED
        before = await see(store, key)
        await self.wait(self.short)
        assert await remember(store, memory) is Reply.KNOWN
        assert await see(store, key) == before

    async def test_remembering_marks_a_free_key_done_and_fences_its_last_holder(
        self, store: Store
    ) -> None:
        lapsed = await self.lapsed(store, self.key())
        released = await hold(store, self.want(self.key()))
        assert await release(store, self.back(released)) is Reply.RELEASED
        for old in (lapsed, released):
            key = old.held[0].key
            assert await remember(store, self.memory(key, memo=b"m")) is Reply.REMEMBERED
            before = await see(store, key)
            assert await release(store, self.back(old)) is Reply.FENCED
            assert await extend(store, self.more(old)) is Reply.FENCED
            assert await commit(store, self.done(old, Fate.DEAD)) in (Reply.ALREADY, Reply.FENCED)
            assert await see(store, key) == before
            assert await ask(store, self.want(key)) == Duplicate(key, Fate.DELIVERED, b"m")

    async def test_remembering_marks_a_key_past_its_window_done_again(self, store: Store) -> None:
        key = self.key()
        await self.committed(store, key, fate=Fate.DEAD, window_ms=self.short, content=CONTENT)
        await self.wait(self.short)
        assert await remember(store, self.memory(key, Fate.STALE)) is Reply.REMEMBERED
        assert await ask(store, self.want(key, content=OTHER)) == Duplicate(key, Fate.STALE, b"")

    async def test_remembering_leaves_a_live_claim_alone(self, store: Store) -> None:
        claim = await hold(store, self.want(self.key()))
        key = claim.held[0].key
        before = await see(store, key)
        assert await remember(store, self.memory(key)) is Reply.KNOWN
        assert await see(store, key) == before
        assert await release(store, self.back(claim)) is Reply.RELEASED

    async def test_remembering_leaves_what_is_done_alone(self, store: Store) -> None:
        key = self.key()
        await self.committed(store, key, memo=b"first")
        before = await see(store, key)
        asked = self.memory(key, Fate.DEAD, window_ms=2 * self.long, memo=b"second")
        assert await remember(store, asked) is Reply.KNOWN
        assert await see(store, key) == before

    # --- forget ------------------------------------------------------------------

    async def test_a_live_claim_cannot_be_forgotten(self, store: Store) -> None:
        claim = await hold(store, self.want(self.key()))
        before = await see(store, claim.held[0].key)
        assert await store.forget([claim.held[0].key]) == [False]
        assert await see(store, claim.held[0].key) == before
        assert await commit(store, self.done(claim)) is Reply.COMMITTED

    async def test_a_free_key_can_be_forgotten_and_starts_anew(self, store: Store) -> None:
        old = await self.lapsed(store, self.key(), memo=b"old")
        key = old.held[0].key
        assert await store.forget([key]) == [True]
        assert await look(store, key) is None
        want = self.want(key, memo=b"new")
        assert (await hold(store, want)).held == (Held(key, want.generation, 1, b"new"),)
        assert await commit(store, self.done(old)) is Reply.FENCED

    async def test_a_done_key_can_be_forgotten_and_its_event_passes_again(
        self, store: Store
    ) -> None:
        key = self.key()
        old = await self.committed(store, key, content=CONTENT)
        assert await store.forget([key]) == [True]
        assert await look(store, key) is None
        want = self.want(key, content=OTHER)
        assert (await hold(store, want)).held == (Held(key, want.generation, 1, b""),)
        assert await commit(store, self.done(old)) is Reply.FENCED

    async def test_there_is_nothing_to_forget_where_nothing_is(self, store: Store) -> None:
        key = self.key()
        await self.committed(store, key)
        assert await store.forget([self.key(), key]) == [False, True]
        assert await store.forget([key]) == [False]

    # --- peek --------------------------------------------------------------------

    async def test_peek_answers_in_order_and_none_for_nothing(self, store: Store) -> None:
        first, absent, second = self.keys(3)
        await hold(store, self.want(first))
        await self.committed(store, second)
        seen = await store.peek([second, absent, first])
        assert [record and record.key for record in seen] == [second, None, first]

    async def test_peek_changes_nothing(self, store: Store) -> None:
        lapsed = await self.lapsed(store, self.key())
        done = await self.committed(store, self.key(), window_ms=self.long, hard_ms=2 * self.long)
        keys = [lapsed.held[0].key, done.held[0].key, self.key()]
        before = await store.peek(keys)
        await self.wait(self.short)
        assert await store.peek(keys) == before
        assert await store.peek(keys) == before
        assert (await hold(store, self.want(keys[0]))).held[0].attempts == 2
        assert isinstance(await ask(store, self.want(keys[2])), Claim)
