from oncebridge.stores.api import Busy, Extension, Reply, Store
from oncebridge.testing.contract.harness import (
    CONTENT,
    Harness,
    _fresh,
    ask,
    extend,
    hold,
    look,
    release,
    see,
)


class ExtensionCases(Harness):
    """Extensions: each moves the end of a lease, unless another worker has claimed the key."""

    async def test_an_extension_counts_from_now_and_may_be_repeated(self, store: Store) -> None:
        claim = await hold(store, self.want(self.key(), lease_ms=self.long))
        key = claim.held[0].key
        for lease_ms in (2 * self.long, 2 * self.long, self.long // 2):
            await self.wait(self.short)
            now = await store.now_ms()
            assert await extend(store, self.more(claim, lease_ms)) is Reply.EXTENDED
            assert self.near((await see(store, key)).until_ms, now + lease_ms)

    async def test_an_extended_lease_outlasts_the_first_one(self, store: Store) -> None:
        claim = await hold(store, self.want(self.key(), lease_ms=2 * self.short))
        assert await extend(store, self.more(claim)) is Reply.EXTENDED
        await self.wait(3 * self.short)
        assert isinstance(await ask(store, self.want(claim.held[0].key)), Busy)
        assert await release(store, self.back(claim)) is Reply.RELEASED

    async def test_an_extension_changes_nothing_but_the_end(self, store: Store) -> None:
        claim = await hold(store, self.want(self.key(), content=CONTENT, memo=b"m"))
        assert await extend(store, self.more(claim, 2 * self.long)) is Reply.EXTENDED
        record = await see(store, claim.held[0].key)
        assert (record.token, record.generation) == (claim.token, claim.held[0].generation)
        assert (record.attempts, record.hash, record.memo) == (1, CONTENT, b"m")
        assert record.fate is None
        assert record.keep_until_ms >= record.until_ms

    async def test_a_lapsed_lease_that_nobody_took_can_be_extended(self, store: Store) -> None:
        claim = await self.lapsed(store, self.key())
        assert await extend(store, self.more(claim)) is Reply.EXTENDED
        assert isinstance(await ask(store, self.want(claim.held[0].key)), Busy)

    async def test_an_extension_with_an_old_token_is_refused_and_changes_nothing(
        self, store: Store
    ) -> None:
        old = await self.lapsed(store, self.key())
        await hold(store, self.want(old.held[0].key))
        before = await see(store, old.held[0].key)
        assert await extend(store, self.more(old, 2 * self.long)) is Reply.FENCED
        assert await see(store, old.held[0].key) == before

    async def test_what_is_absent_released_or_done_cannot_be_extended(self, store: Store) -> None:
        absent = self.key()
        assert await extend(store, Extension(absent, _fresh(), self.long)) is Reply.FENCED
        assert await look(store, absent) is None
        released = await hold(store, self.want(self.key()))
        assert await release(store, self.back(released)) is Reply.RELEASED
        assert await extend(store, self.more(released)) is Reply.FENCED
        done = await self.committed(store, self.key())
        before = await see(store, done.held[0].key)
        assert await extend(store, self.more(done, 2 * self.long)) is Reply.FENCED
        assert await see(store, done.held[0].key) == before
