from oncebridge.events.key import Part
from oncebridge.stores.api import Busy, Duplicate, Held, Reply
from oncebridge.testing.contract.harness import Harness, needs


class PurgingCases(Harness):
    """Purging: removes records past keeping, and no record that still counts."""

    @needs("purges")
    async def test_purging_removes_what_is_past_keeping_and_nothing_else(self) -> None:
        past_done, past_free, kept_done, kept_free, live = self.keys(5)
        ages = 100 * self.purge_slack_ms
        claim = await self.hold(self.want(past_done, lease_ms=self.short, keep_ms=0))
        await self.commit(self.done(claim, window_ms=self.short))
        await self.committed(kept_done, window_ms=ages)
        await self.hold(self.want(past_free, lease_ms=self.short, keep_ms=self.short))
        await self.hold(self.want(kept_free, lease_ms=self.short, keep_ms=ages))
        await self.hold(self.want(live, lease_ms=ages, keep_ms=0))
        kept = await self.store.peek([kept_done, kept_free, live])
        await self.wait(2 * self.short + self.purge_slack_ms)
        await self.purge()
        assert await self.store.peek([past_done, past_free]) == [None, None]
        assert await self.store.peek([kept_done, kept_free, live]) == kept

    @needs("purges")
    async def test_what_was_purged_starts_anew(self) -> None:
        key = self.key()
        old = await self.hold(self.want(key, lease_ms=self.short, keep_ms=self.short))
        await self.wait(2 * self.short + self.purge_slack_ms)
        await self.purge()
        want = self.want(key)
        assert (await self.hold(want)).held == (Held(key, want.generation, 1, b""),)
        assert await self.commit(self.done(old)) is Reply.FENCED
        assert await self.release(self.back(old)) is Reply.FENCED

    async def test_purging_nothing_removes_nothing(self) -> None:
        claim = await self.hold(self.want(self.key()))
        await self.purge()
        assert (await self.see(claim.held[0].key)).token == claim.token
        assert await self.commit(self.done(claim)) is Reply.COMMITTED

    async def test_attempts_survive_the_lease_until_the_end_of_keeping(self) -> None:
        key = self.key()
        keep = 100 * self.purge_slack_ms
        await self.hold(self.want(key, lease_ms=self.short, keep_ms=keep, memo=b"m"))
        await self.wait(self.short + self.purge_slack_ms)
        await self.purge()
        claim = await self.hold(self.want(key))
        assert (claim.held[0].attempts, claim.held[0].memo) == (2, b"m")

    async def test_an_extended_claim_is_never_purged(self) -> None:
        claim = await self.hold(self.want(self.key(), lease_ms=self.short, keep_ms=0))
        ages = 100 * self.purge_slack_ms
        assert await self.extend(self.more(claim, ages)) is Reply.EXTENDED
        await self.wait(2 * self.short + self.purge_slack_ms)
        await self.purge()
        assert isinstance(await self.ask(self.want(claim.held[0].key)), Busy)
        assert await self.commit(self.done(claim)) is Reply.COMMITTED

    async def test_a_released_key_is_kept_as_long_as_the_release_says(self) -> None:
        claim = await self.hold(self.want(self.key(), keep_ms=0))
        keep = 100 * self.purge_slack_ms
        asked = self.back(claim, self.short, keep_ms=keep, memo=b"m")
        assert await self.release(asked) is Reply.RELEASED
        await self.wait(self.short + self.purge_slack_ms)
        await self.purge()
        again = await self.hold(self.want(claim.held[0].key))
        assert (again.held[0].attempts, again.held[0].memo) == (2, b"m")

    async def test_a_window_that_was_pushed_is_not_purged_at_its_first_end(self) -> None:
        key = self.key()
        ages = 100 * self.purge_slack_ms
        await self.committed(key, window_ms=4 * self.short, hard_ms=ages)
        assert isinstance(await self.ask(self.want(Part(key, slide_ms=ages))), Duplicate)
        await self.wait(4 * self.short + self.purge_slack_ms)
        await self.purge()
        assert isinstance(await self.ask(self.want(key)), Duplicate)
