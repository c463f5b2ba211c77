from oncebridge.events.key import Part
from oncebridge.stores.api import (
    Busy,
    Commits,
    Duplicate,
    Extensions,
    Fate,
    Held,
    Mismatch,
    Releases,
    Reply,
)
from oncebridge.testing.contract.harness import CONTENT, OTHER, Harness


class PartCases(Harness):
    """Claims of several parts: all are granted or none, and precedence decides the answer."""

    # --- several parts: claiming -------------------------------------------------

    async def test_two_parts_are_claimed_together_under_one_token(self) -> None:
        tier, event = self.keys(2)
        want = self.want(tier, event, memo=b"m")
        claim = await self.hold(want)
        assert claim.token == want.token
        assert claim.held == tuple(Held(key, want.generation, 1, b"m") for key in (tier, event))
        for key in (tier, event):
            assert (await self.see(key)).token == want.token
            assert isinstance(await self.ask(self.want(key)), Busy)

    async def test_three_parts_are_claimed_together_under_one_token(self) -> None:
        keys = self.keys(3)
        want = self.want(*keys)
        claim = await self.hold(want)
        assert [held.key for held in claim.held] == keys
        assert [(await self.see(key)).token for key in keys] == [want.token] * 3

    async def test_parts_answer_in_the_order_they_were_asked(self) -> None:
        low, high = sorted(self.keys(2))
        assert [held.key for held in (await self.hold(self.want(high, low))).held] == [high, low]

    async def test_each_part_keeps_its_own_generation_attempts_memo_and_content(self) -> None:
        free, other, absent = self.keys(3)
        first = await self.lapsed(Part(free, CONTENT), memo=b"old")
        await self.lapsed(Part(other, CONTENT), memo=b"old")
        want = self.want(Part(free, CONTENT), Part(other, OTHER), Part(absent), memo=b"new")
        assert (await self.hold(want)).held == (
            Held(free, first.held[0].generation, 2, b"old"),
            Held(other, want.generation, 1, b"new"),
            Held(absent, want.generation, 1, b"new"),
        )
        hashes = [(await self.see(key)).hash for key in (free, other, absent)]
        assert hashes == [CONTENT, OTHER, b""]

    async def test_a_claim_of_parts_sent_again_is_the_same_claim(self) -> None:
        for count in (2, 3):
            keys = self.keys(count)
            want = self.want(*keys)
            first = await self.hold(want)
            before = await self.store.peek(keys)
            await self.wait(self.short)
            assert (await self.hold(want)).held == first.held
            assert await self.store.peek(keys) == before

    async def test_a_claim_of_parts_sent_again_after_its_lease_ran_out_is_its_own(self) -> None:
        keys = self.keys(2)
        want = self.want(*keys, lease_ms=self.short)
        first = await self.hold(want)
        before = await self.store.peek(keys)
        await self.wait(2 * self.short)
        assert (await self.hold(want)).held == first.held
        assert await self.store.peek(keys) == before

    async def test_a_claim_of_parts_sent_again_after_one_was_taken_over_is_busy(self) -> None:
        tier, event = keys = self.keys(2)
        want = self.want(*keys, lease_ms=self.short)
        await self.hold(want)
        await self.wait(self.short)
        await self.hold(self.want(event))
        before = await self.store.peek(keys)
        answer = await self.ask(want)
        assert isinstance(answer, Busy)
        assert answer.key == event
        assert await self.store.peek([tier, event]) == before

    async def test_a_claim_of_parts_sent_again_takes_what_it_does_not_hold_any_more(self) -> None:
        tier, event = self.keys(2)
        want = self.want(tier, event)
        first = await self.hold(want)
        assert await self.release(self.back(first, part=0)) is Reply.RELEASED
        again = await self.hold(want)
        assert [held.attempts for held in again.held] == [2, 1]
        assert [(await self.see(key)).token for key in (tier, event)] == [want.token] * 2

    async def test_lapsed_parts_move_on_together_and_fence_the_old_owner(self) -> None:
        keys = self.keys(2)
        old = await self.lapsed(*keys)
        new = await self.hold(self.want(*keys))
        assert [held.attempts for held in new.held] == [2, 2]
        assert [held.generation for held in new.held] == [held.generation for held in old.held]
        for part in range(2):
            assert await self.release(self.back(old, part=part)) is Reply.FENCED
            assert await self.extend(self.more(old, part=part)) is Reply.FENCED

    # --- several parts: refusals, in order of precedence ----------------------------

    async def test_the_identifying_part_done_wins_over_a_claimed_tier(self) -> None:
        tier, event = self.keys(2)
        await self.hold(self.want(tier))
        await self.committed(event, fate=Fate.DEAD, memo=b"m")
        before = await self.store.peek([tier, event])
        assert await self.ask(self.want(tier, event)) == Duplicate(event, Fate.DEAD, b"m")
        assert await self.store.peek([tier, event]) == before

    async def test_the_identifying_part_done_wins_over_a_mismatch_of_a_tier(self) -> None:
        tier, event = self.keys(2)
        await self.committed(tier, content=CONTENT)
        await self.committed(event)
        answer = await self.ask(self.want(Part(tier, OTHER), Part(event)))
        assert answer == Duplicate(event, Fate.DELIVERED, b"")

    async def test_the_identifying_part_done_wins_over_a_done_tier(self) -> None:
        tier, event = self.keys(2)
        await self.committed(tier, fate=Fate.STALE)
        await self.committed(event)
        answer = await self.ask(self.want(tier, event))
        assert answer == Duplicate(event, Fate.DELIVERED, b"")

    async def test_the_identifying_part_done_leaves_absent_tiers_absent(self) -> None:
        first, second, event = self.keys(3)
        await self.committed(event)
        assert isinstance(await self.ask(self.want(first, second, event)), Duplicate)
        assert await self.store.peek([first, second]) == [None, None]

    async def test_a_claimed_identifying_part_is_busy_although_a_tier_is_done(self) -> None:
        """If this were a duplicate, the event would be lost if that claim's worker dies."""
        tier, event = self.keys(2)
        await self.committed(tier)
        await self.hold(self.want(event))
        before = await self.store.peek([tier, event])
        answer = await self.ask(self.want(tier, event))
        assert isinstance(answer, Busy)
        assert answer.key == event
        assert await self.store.peek([tier, event]) == before

    async def test_any_claimed_part_makes_all_busy_and_none_is_taken(self) -> None:
        for count in (2, 3):
            for claimed in range(count):
                keys = self.keys(count)
                await self.hold(self.want(keys[claimed]))
                before = await self.store.peek(keys)
                answer = await self.ask(self.want(*keys))
                assert isinstance(answer, Busy)
                assert answer.key == keys[claimed]
                assert await self.store.peek(keys) == before

    async def test_of_several_claimed_parts_busy_tells_the_one_held_longest(self) -> None:
        for longest in range(3):
            keys = self.keys(3)
            for at, key in enumerate(keys):
                lease_ms = self.long * (2 if at == longest else 1)
                await self.hold(self.want(key, lease_ms=lease_ms))
            answer = await self.ask(self.want(*keys))
            assert isinstance(answer, Busy)
            assert answer.key == keys[longest]
            assert answer.left_ms > self.long

    async def test_a_claimed_part_is_busy_although_another_mismatches(self) -> None:
        for claimed in range(2):
            keys = self.keys(2)
            await self.hold(self.want(keys[claimed]))
            await self.committed(keys[1 - claimed], content=CONTENT)
            answer = await self.ask(self.want(*keys, content=OTHER))
            assert isinstance(answer, Busy)
            assert answer.key == keys[claimed]

    async def test_a_mismatch_of_any_part_wins_over_a_done_tier(self) -> None:
        for other in range(3):
            for done in range(2):
                if done == other:
                    continue
                keys = self.keys(3)
                await self.committed(keys[other], content=CONTENT, memo=b"m")
                await self.committed(keys[done])
                before = await self.store.peek(keys)
                answer = await self.ask(self.want(*keys, content=OTHER))
                assert answer == Mismatch(keys[other], b"m")
                assert await self.store.peek(keys) == before

    async def test_of_several_mismatches_the_one_nearest_the_identifying_part_is_told(self) -> None:
        tier, event = self.keys(2)
        await self.committed(tier, content=CONTENT)
        await self.committed(event, content=CONTENT)
        answer = await self.ask(self.want(tier, event, content=OTHER))
        assert answer == Mismatch(event, b"")

    async def test_a_done_tier_is_a_duplicate_and_nothing_is_taken(self) -> None:
        for count, done in ((2, 0), (3, 0), (3, 1)):
            keys = self.keys(count)
            await self.committed(keys[done], fate=Fate.STALE, memo=b"m")
            before = await self.store.peek(keys)
            answer = await self.ask(self.want(*keys))
            assert answer == Duplicate(keys[done], Fate.STALE, b"m")
            assert await self.store.peek(keys) == before

    async def test_a_tier_past_its_window_stands_against_nothing(self) -> None:
        tier, event = self.keys(2)
        await self.committed(tier, content=CONTENT, window_ms=self.short)
        await self.wait(self.short)
        want = self.want(tier, event, content=OTHER)
        claim = await self.hold(want)
        assert claim.held == tuple(Held(key, want.generation, 1, b"") for key in (tier, event))

    async def test_only_the_part_that_is_told_slides(self) -> None:
        tier, event = self.keys(2)
        for key in (tier, event):
            await self.committed(key, window_ms=self.long, hard_ms=4 * self.long)
        before = await self.see(tier)
        parts = (Part(tier, slide_ms=2 * self.long), Part(event, slide_ms=2 * self.long))
        now = await self.store.now_ms()
        answer = await self.ask(self.want(*parts))
        assert answer == Duplicate(event, Fate.DELIVERED, b"")
        assert await self.see(tier) == before
        assert self.near((await self.see(event)).until_ms, now + 2 * self.long)

    async def test_a_done_tier_slides_when_it_is_told(self) -> None:
        tier, event = self.keys(2)
        await self.committed(tier, window_ms=self.long, hard_ms=4 * self.long)
        now = await self.store.now_ms()
        answer = await self.ask(self.want(Part(tier, slide_ms=2 * self.long), Part(event)))
        assert isinstance(answer, Duplicate)
        assert self.near((await self.see(tier)).until_ms, now + 2 * self.long)

    # --- several parts: finishing ------------------------------------------------

    async def test_parts_are_committed_each_for_itself(self) -> None:
        tier, event = self.keys(2)
        old = await self.lapsed(tier, event)
        await self.store.forget([tier])
        answers = await self.store.commit(
            Commits.of([self.done(old, part=0), self.done(old, part=1)])
        )
        assert answers == [Reply.FENCED, Reply.COMMITTED]
        assert await self.look(tier) is None
        assert (await self.see(event)).fate is Fate.DELIVERED

    async def test_parts_are_released_and_extended_each_for_itself(self) -> None:
        tier, event = self.keys(2)
        old = await self.lapsed(tier, event)
        new = await self.hold(self.want(tier))
        assert await self.store.extend(
            Extensions.of([self.more(old, part=0), self.more(old, part=1)])
        ) == [Reply.FENCED, Reply.EXTENDED]
        assert await self.store.release(
            Releases.of([self.back(old, part=0), self.back(old, part=1)])
        ) == [Reply.FENCED, Reply.RELEASED]
        assert (await self.see(tier)).token == new.token
        assert (await self.see(event)).token == b""
