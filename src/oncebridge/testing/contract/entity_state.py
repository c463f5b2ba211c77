from oncebridge.stores.api import Reply
from oncebridge.testing.contract.harness import Harness


class EntityStateCases(Harness):
    """The record of an entity's state: each hold gets the memo of the last one; never done."""

    async def test_a_register_hands_its_memo_from_hold_to_hold_and_is_never_done(self) -> None:
        entity = self.key()
        read = []
        for version in (b"v1", b"v2", b"v3"):
            claim = await self.hold(self.want(entity))
            read.append(claim.held[0].memo)
            asked = self.back(claim, memo=version, unsent=True)
            assert await self.release(asked) is Reply.RELEASED
        assert read == [b"", b"v1", b"v2"]
        record = await self.see(entity)
        assert (record.memo, record.fate, record.attempts) == (b"v3", None, 0)

    async def test_a_holder_that_lost_its_register_cannot_write_to_it(self) -> None:
        old = await self.lapsed(self.key())
        entity = old.held[0].key
        new = await self.hold(self.want(entity))
        assert await self.release(self.back(old, memo=b"v1")) is Reply.FENCED
        assert await self.release(self.back(new, memo=b"v2")) is Reply.RELEASED
        assert await self.release(self.back(old, memo=b"v1")) is Reply.FENCED
        assert (await self.hold(self.want(entity))).held[0].memo == b"v2"

    async def test_a_register_may_be_given_back_for_less_time_than_it_was_claimed_for(self) -> None:
        """A stale event must not prolong what its entity is remembered for."""
        entity = self.key()
        first = await self.hold(self.want(entity))
        assert await self.release(self.back(first, memo=b"v1", unsent=True)) is Reply.RELEASED
        second = await self.hold(self.want(entity, keep_ms=2 * self.long))
        now = await self.store.now_ms()
        asked = self.back(second, keep_ms=self.long // 2, unsent=True)
        assert await self.release(asked) is Reply.RELEASED
        record = await self.see(entity)
        assert self.near(record.keep_until_ms, now + self.long // 2)
        assert record.memo == b"v1"
