from oncebridge.events.key import Part
from oncebridge.stores.api import Claim, Duplicate, Fate, Held, Reply
from oncebridge.testing.contract.harness import CONTENT, OTHER, Harness, needs


class WindowCases(Harness):
    """Windows: fixed or sliding; after the end, the key can be claimed again."""

    # --- fixed and sliding -------------------------------------------------------

    async def test_a_fixed_window_is_not_moved_by_duplicates(self) -> None:
        key = self.key()
        await self.committed(key, window_ms=4 * self.short)
        before = await self.see(key)
        await self.wait(2 * self.short)
        for part in (Part(key), Part(key, slide_ms=self.long)):
            assert isinstance(await self.ask(self.want(part)), Duplicate)
        assert await self.see(key) == before
        await self.wait(2 * self.short)
        assert isinstance(await self.ask(self.want(key)), Claim)

    async def test_a_sliding_window_is_pushed_by_duplicates(self) -> None:
        key = self.key()
        await self.committed(key, window_ms=6 * self.short, hard_ms=self.long)
        await self.wait(4 * self.short)
        now = await self.store.now_ms()
        sliding = self.want(Part(key, slide_ms=6 * self.short))
        assert isinstance(await self.ask(sliding), Duplicate)
        record = await self.see(key)
        assert self.near(record.until_ms, now + 6 * self.short)
        assert record.keep_until_ms >= record.until_ms
        await self.wait(4 * self.short)
        assert isinstance(await self.ask(self.want(key)), Duplicate)

    async def test_a_sliding_window_is_never_pushed_past_its_hard_end(self) -> None:
        key = self.key()
        await self.committed(key, window_ms=6 * self.short, hard_ms=8 * self.short)
        hard = (await self.see(key)).hard_until_ms
        await self.wait(4 * self.short)
        for _ in range(2):
            sliding = self.want(Part(key, slide_ms=6 * self.short))
            assert isinstance(await self.ask(sliding), Duplicate)
            assert (await self.see(key)).until_ms == hard
        await self.wait(4 * self.short)
        assert isinstance(await self.ask(self.want(key)), Claim)

    async def test_a_sliding_window_is_never_pulled_in(self) -> None:
        key = self.key()
        await self.committed(key, window_ms=self.long, hard_ms=2 * self.long)
        before = await self.see(key)
        assert isinstance(await self.ask(self.want(Part(key, slide_ms=1))), Duplicate)
        assert await self.see(key) == before

    async def test_a_duplicate_that_does_not_slide_leaves_a_sliding_window_alone(self) -> None:
        key = self.key()
        await self.committed(key, window_ms=self.long, hard_ms=2 * self.long)
        before = await self.see(key)
        await self.wait(self.short)
        assert isinstance(await self.ask(self.want(key)), Duplicate)
        assert await self.see(key) == before

    # --- past the end ------------------------------------------------------------

    async def test_a_key_past_its_window_passes_again_as_a_new_generation(self) -> None:
        key = self.key()
        old = await self.committed(key, window_ms=self.short, memo=b"old")
        await self.wait(self.short)
        want = self.want(key, memo=b"new")
        assert (await self.hold(want)).held == (Held(key, want.generation, 1, b"new"),)
        assert want.generation != old.held[0].generation

    @needs("manual_time")
    async def test_a_key_past_its_window_passes_although_its_record_is_still_there(self) -> None:
        key = self.key()
        await self.committed(key, window_ms=self.short)
        await self.wait(self.short)
        left = await self.see(key)
        assert left.fate is Fate.DELIVERED
        assert left.until_ms <= await self.store.now_ms()
        want = self.want(key)
        assert (await self.hold(want)).held == (Held(key, want.generation, 1, b""),)
        assert (await self.see(key)).fate is None

    @needs("manual_time")
    async def test_a_window_ends_on_the_millisecond(self) -> None:
        key = self.key()
        await self.committed(key, window_ms=self.short)
        await self.wait(self.short - 1)
        assert isinstance(await self.ask(self.want(key)), Duplicate)
        await self.wait(1)
        assert isinstance(await self.ask(self.want(key)), Claim)

    async def test_past_its_window_other_content_is_no_mismatch(self) -> None:
        key = self.key()
        await self.committed(key, content=CONTENT, window_ms=self.short)
        await self.wait(self.short)
        claim = await self.hold(self.want(key, content=OTHER))
        assert claim.held[0].attempts == 1
        assert (await self.see(key)).hash == OTHER

    async def test_a_commit_from_before_the_windows_end_does_not_land_on_the_next_claim(
        self,
    ) -> None:
        key = self.key()
        old = await self.committed(key, window_ms=self.short)
        await self.wait(self.short)
        new = await self.hold(self.want(key))
        before = await self.see(key)
        assert await self.commit(self.done(old)) is Reply.FENCED
        assert await self.see(key) == before
        assert await self.commit(self.done(new)) is Reply.COMMITTED
