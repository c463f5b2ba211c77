from oncebridge.stores.api import Busy, Reply, Store
from oncebridge.testing.contract.harness import Harness, ask, commit, hold, needs


class HandleCases(Harness):
    """Handles: each returns the time of its store, and can be opened and closed repeatedly."""

    async def test_time_at_the_store_does_not_go_back(self, store: Store) -> None:
        before = await store.now_ms()
        await self.wait(self.short)
        assert await store.now_ms() >= before + self.short - (
            self.tolerance_ms if self.real_time else 0
        )

    @needs("manual_time")
    async def test_time_at_the_store_is_the_clock_it_was_given(self, store: Store) -> None:
        assert await store.now_ms() == self.clock()
        self.clock.advance(1)
        assert await store.now_ms() == self.clock()

    async def test_opening_again_forgets_nothing(self, store: Store) -> None:
        claim = await hold(store, self.want(self.key()))
        await store.open()
        assert isinstance(await ask(store, self.want(claim.held[0].key)), Busy)
        assert await commit(store, self.done(claim)) is Reply.COMMITTED

    async def test_closing_again_is_harmless(self, store: Store) -> None:
        claim = await hold(store, self.want(self.key()))
        assert await commit(store, self.done(claim)) is Reply.COMMITTED
        await store.aclose()
        await store.aclose()
