from oncebridge.stores.api import Claim, Duplicate, Fate, Held, Mismatch, Reply
from oncebridge.testing.contract.harness import CONTENT, OTHER, Harness


class RememberingCases(Harness):
    """Keys marked done without a claim; peek and forget."""

    # --- remember ----------------------------------------------------------------

    async def test_what_is_remembered_is_a_duplicate_with_its_fate_and_memo(self) -> None:
        key = self.key()
        now = await self.store.now_ms()
        memory = self.memory(key, Fate.UNCHANGED, memo=b"m")
        assert await self.remember(memory) is Reply.REMEMBERED
        assert await self.ask(self.want(key)) == Duplicate(key, Fate.UNCHANGED, b"m")
        record = await self.see(key)
        assert self.near(record.until_ms, now + self.long)
        assert (record.token, record.fate, record.memo) == (b"", Fate.UNCHANGED, b"m")

    async def test_what_is_remembered_is_forgotten_after_its_window(self) -> None:
        key = self.key()
        assert await self.remember(self.memory(key, window_ms=self.short)) is Reply.REMEMBERED
        await self.wait(self.short)
        assert (await self.hold(self.want(key))).held[0].attempts == 1

    async def test_what_is_remembered_with_its_content_tells_other_content_apart(self) -> None:
        key = self.key()
        memory = self.memory(key, content=CONTENT, memo=b"m")
        assert await self.remember(memory) is Reply.REMEMBERED
        assert await self.ask(self.want(key, content=OTHER)) == Mismatch(key, b"m")
        assert isinstance(await self.ask(self.want(key, content=CONTENT)), Duplicate)

    async def test_remembering_twice_changes_nothing(self) -> None:
        key = self.key()
        memory = self.memory(key, memo=b"m")
        assert await self.remember(memory) is Reply.REMEMBERED
        before = await self.see(key)
        await self.wait(self.short)
        assert await self.remember(memory) is Reply.KNOWN
        assert await self.see(key) == before

    async def test_remembering_marks_a_free_key_done_and_fences_its_last_holder(self) -> None:
        lapsed = await self.lapsed(self.key())
        released = await self.hold(self.want(self.key()))
        assert await self.release(self.back(released)) is Reply.RELEASED
        for old in (lapsed, released):
            key = old.held[0].key
            assert await self.remember(self.memory(key, memo=b"m")) is Reply.REMEMBERED
            before = await self.see(key)
            assert await self.release(self.back(old)) is Reply.FENCED
            assert await self.extend(self.more(old)) is Reply.FENCED
            assert await self.commit(self.done(old, Fate.DEAD)) in (Reply.ALREADY, Reply.FENCED)
            assert await self.see(key) == before
            assert await self.ask(self.want(key)) == Duplicate(key, Fate.DELIVERED, b"m")

    async def test_remembering_marks_a_key_past_its_window_done_again(self) -> None:
        key = self.key()
        await self.committed(key, fate=Fate.DEAD, window_ms=self.short, content=CONTENT)
        await self.wait(self.short)
        assert await self.remember(self.memory(key, Fate.STALE)) is Reply.REMEMBERED
        assert await self.ask(self.want(key, content=OTHER)) == Duplicate(key, Fate.STALE, b"")

    async def test_remembering_leaves_a_live_claim_alone(self) -> None:
        claim = await self.hold(self.want(self.key()))
        key = claim.held[0].key
        before = await self.see(key)
        assert await self.remember(self.memory(key)) is Reply.KNOWN
        assert await self.see(key) == before
        assert await self.release(self.back(claim)) is Reply.RELEASED

    async def test_remembering_leaves_what_is_done_alone(self) -> None:
        key = self.key()
        await self.committed(key, memo=b"first")
        before = await self.see(key)
        asked = self.memory(key, Fate.DEAD, window_ms=2 * self.long, memo=b"second")
        assert await self.remember(asked) is Reply.KNOWN
        assert await self.see(key) == before

    # --- forget ------------------------------------------------------------------

    async def test_a_live_claim_cannot_be_forgotten(self) -> None:
        claim = await self.hold(self.want(self.key()))
        before = await self.see(claim.held[0].key)
        assert await self.store.forget([claim.held[0].key]) == [False]
        assert await self.see(claim.held[0].key) == before
        assert await self.commit(self.done(claim)) is Reply.COMMITTED

    async def test_a_free_key_can_be_forgotten_and_starts_anew(self) -> None:
        old = await self.lapsed(self.key(), memo=b"old")
        key = old.held[0].key
        assert await self.store.forget([key]) == [True]
        assert await self.look(key) is None
        want = self.want(key, memo=b"new")
        assert (await self.hold(want)).held == (Held(key, want.generation, 1, b"new"),)
        assert await self.commit(self.done(old)) is Reply.FENCED

    async def test_a_done_key_can_be_forgotten_and_its_event_passes_again(self) -> None:
        key = self.key()
        old = await self.committed(key, content=CONTENT)
        assert await self.store.forget([key]) == [True]
        assert await self.look(key) is None
        want = self.want(key, content=OTHER)
        assert (await self.hold(want)).held == (Held(key, want.generation, 1, b""),)
        assert await self.commit(self.done(old)) is Reply.FENCED

    async def test_there_is_nothing_to_forget_where_nothing_is(self) -> None:
        key = self.key()
        await self.committed(key)
        assert await self.store.forget([self.key(), key]) == [False, True]
        assert await self.store.forget([key]) == [False]

    # --- peek --------------------------------------------------------------------

    async def test_peek_answers_in_order_and_none_for_nothing(self) -> None:
        first, absent, second = self.keys(3)
        await self.hold(self.want(first))
        await self.committed(second)
        seen = await self.store.peek([second, absent, first])
        assert [record and record.key for record in seen] == [second, None, first]

    async def test_peek_changes_nothing(self) -> None:
        lapsed = await self.lapsed(self.key())
        done = await self.committed(self.key(), window_ms=self.long, hard_ms=2 * self.long)
        keys = [lapsed.held[0].key, done.held[0].key, self.key()]
        before = await self.store.peek(keys)
        await self.wait(self.short)
        assert await self.store.peek(keys) == before
        assert await self.store.peek(keys) == before
        assert (await self.hold(self.want(keys[0]))).held[0].attempts == 2
        assert isinstance(await self.ask(self.want(keys[2])), Claim)
