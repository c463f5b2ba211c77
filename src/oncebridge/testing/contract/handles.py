from oncebridge.stores.api import Busy, Reply
from oncebridge.testing.contract.harness import Harness, needs


class HandleCases(Harness):
    """Handles: each returns the time of its store, and can be opened and closed repeatedly."""

    async def test_time_at_the_store_does_not_go_back(self) -> None:
        before = await self.store.now_ms()
        await self.wait(self.short)
        assert await self.store.now_ms() >= before + self.short - (
            self.tolerance_ms if self.real_time else 0
        )

    @needs("manual_time")
    async def test_time_at_the_store_is_the_clock_it_was_given(self) -> None:
        assert await self.store.now_ms() == self.clock()
        self.clock.advance(1)
        assert await self.store.now_ms() == self.clock()

    async def test_opening_again_forgets_nothing(self) -> None:
        claim = await self.hold(self.want(self.key()))
        await self.store.open()
        assert isinstance(await self.ask(self.want(claim.held[0].key)), Busy)
        assert await self.commit(self.done(claim)) is Reply.COMMITTED

    async def test_closing_again_is_harmless(self) -> None:
        claim = await self.hold(self.want(self.key()))
        assert await self.commit(self.done(claim)) is Reply.COMMITTED
        await self.store.aclose()
        await self.store.aclose()
