from oncebridge.stores.api import Busy, Extension, Reply
from oncebridge.testing.contract.harness import CONTENT, Harness, _fresh


class ExtensionCases(Harness):
    """Extensions: each moves the end of a lease, unless another worker has claimed the key."""

    async def test_an_extension_counts_from_now_and_may_be_repeated(self) -> None:
        claim = await self.hold(self.want(self.key(), lease_ms=self.long))
        key = claim.held[0].key
        for lease_ms in (2 * self.long, 2 * self.long, self.long // 2):
            await self.wait(self.short)
            now = await self.store.now_ms()
            assert await self.extend(self.more(claim, lease_ms)) is Reply.EXTENDED
            assert self.near((await self.see(key)).until_ms, now + lease_ms)

    async def test_an_extended_lease_outlasts_the_first_one(self) -> None:
        claim = await self.hold(self.want(self.key(), lease_ms=2 * self.short))
        assert await self.extend(self.more(claim)) is Reply.EXTENDED
        await self.wait(3 * self.short)
        assert isinstance(await self.ask(self.want(claim.held[0].key)), Busy)
        assert await self.release(self.back(claim)) is Reply.RELEASED

    async def test_an_extension_changes_nothing_but_the_end(self) -> None:
        claim = await self.hold(self.want(self.key(), content=CONTENT, memo=b"m"))
        assert await self.extend(self.more(claim, 2 * self.long)) is Reply.EXTENDED
        record = await self.see(claim.held[0].key)
        assert (record.token, record.generation) == (claim.token, claim.held[0].generation)
        assert (record.attempts, record.hash, record.memo) == (1, CONTENT, b"m")
        assert record.fate is None
        assert record.keep_until_ms >= record.until_ms

    async def test_a_lapsed_lease_that_nobody_took_can_be_extended(self) -> None:
        claim = await self.lapsed(self.key())
        assert await self.extend(self.more(claim)) is Reply.EXTENDED
        assert isinstance(await self.ask(self.want(claim.held[0].key)), Busy)

    async def test_an_extension_with_an_old_token_is_refused_and_changes_nothing(self) -> None:
        old = await self.lapsed(self.key())
        await self.hold(self.want(old.held[0].key))
        before = await self.see(old.held[0].key)
        assert await self.extend(self.more(old, 2 * self.long)) is Reply.FENCED
        assert await self.see(old.held[0].key) == before

    async def test_what_is_absent_released_or_done_cannot_be_extended(self) -> None:
        absent = self.key()
        assert await self.extend(Extension(absent, _fresh(), self.long)) is Reply.FENCED
        assert await self.look(absent) is None
        released = await self.hold(self.want(self.key()))
        assert await self.release(self.back(released)) is Reply.RELEASED
        assert await self.extend(self.more(released)) is Reply.FENCED
        done = await self.committed(self.key())
        before = await self.see(done.held[0].key)
        assert await self.extend(self.more(done, 2 * self.long)) is Reply.FENCED
        assert await self.see(done.held[0].key) == before
