from oncebridge.events.key import Part
from oncebridge.stores.api import Busy, Duplicate, Fate, Held, Mismatch, Reply
from oncebridge.testing.contract.harness import CONTENT, OTHER, Harness, needs


class ClaimCases(Harness):
    """Claims of one key: granted if it is absent or free, otherwise refused with the reason."""

    # --- claim: one key ----------------------------------------------------------

    async def test_an_absent_key_starts_with_a_first_attempt(self) -> None:
        want = self.want(self.key(), memo=b"first copy")
        claim = await self.hold(want)
        assert claim.token == want.token
        assert claim.held == (Held(want.parts[0].key, want.generation, 1, b"first copy"),)

    async def test_a_claim_tells_the_time_of_the_store(self) -> None:
        before = await self.store.now_ms()
        claim = await self.hold(self.want(self.key()))
        assert before <= claim.now_ms <= await self.store.now_ms()

    async def test_a_claim_is_written_down_in_full(self) -> None:
        want = self.want(self.key(), content=CONTENT, memo=b"m", keep_ms=self.long)
        claim = await self.hold(want)
        record = await self.see(want.parts[0].key)
        assert record.key == want.parts[0].key
        assert (record.token, record.generation) == (want.token, want.generation)
        assert (record.attempts, record.hash, record.memo) == (1, CONTENT, b"m")
        assert record.fate is None
        assert self.near(record.until_ms, claim.now_ms + self.long)
        assert record.keep_until_ms >= record.until_ms

    async def test_tokens_and_generations_come_back_as_16_bytes(self) -> None:
        claim = await self.hold(self.want(self.key()))
        assert (len(claim.token), len(claim.held[0].generation)) == (16, 16)
        record = await self.see(claim.held[0].key)
        assert (len(record.token), len(record.generation)) == (16, 16)

    async def test_a_claimed_key_is_busy_for_everybody_else(self) -> None:
        claim = await self.hold(self.want(self.key()))
        key = claim.held[0].key
        now = await self.store.now_ms()
        answer = await self.ask(self.want(key))
        assert isinstance(answer, Busy)
        assert answer.key == key
        assert self.near(answer.left_ms, claim.now_ms + self.long - now)

    async def test_busy_changes_nothing(self) -> None:
        claim = await self.hold(self.want(self.key(), content=CONTENT, memo=b"mine"))
        key = claim.held[0].key
        before = await self.see(key)
        assert isinstance(await self.ask(self.want(key, memo=b"theirs")), Busy)
        assert isinstance(await self.ask(self.want(key, content=OTHER)), Busy)
        assert await self.see(key) == before
        assert await self.commit(self.done(claim)) is Reply.COMMITTED

    async def test_a_claimed_key_is_busy_for_other_content_too(self) -> None:
        claim = await self.hold(self.want(self.key(), content=CONTENT))
        assert isinstance(await self.ask(self.want(claim.held[0].key, content=OTHER)), Busy)

    async def test_a_claim_whose_reply_was_dropped_may_be_sent_again(self) -> None:
        want = self.want(self.key(), memo=b"m")
        first = await self.hold(want)
        again = await self.hold(want)
        assert (again.token, again.held) == (first.token, first.held)

    async def test_a_claim_sent_again_counts_no_attempt_and_moves_no_lease(self) -> None:
        want = self.want(self.key())
        await self.hold(want)
        before = await self.see(want.parts[0].key)
        await self.wait(self.short)
        await self.hold(want)
        await self.hold(want)
        assert await self.see(want.parts[0].key) == before

    async def test_a_claim_sent_again_after_its_lease_ran_out_is_its_own(self) -> None:
        want = self.want(self.key(), lease_ms=self.short)
        first = await self.hold(want)
        before = await self.see(want.parts[0].key)
        await self.wait(2 * self.short)
        assert (await self.hold(want)).held == first.held
        assert await self.see(want.parts[0].key) == before

    async def test_a_claim_sent_again_after_a_take_over_is_busy(self) -> None:
        want = self.want(self.key(), lease_ms=self.short)
        await self.hold(want)
        await self.wait(self.short)
        taken = await self.hold(self.want(want.parts[0].key))
        assert isinstance(await self.ask(want), Busy)
        assert (await self.see(want.parts[0].key)).token == taken.token

    async def test_a_claim_sent_again_after_its_release_is_one_more_attempt(self) -> None:
        want = self.want(self.key())
        first = await self.hold(want)
        assert await self.release(self.back(first)) is Reply.RELEASED
        again = await self.hold(want)
        assert again.held[0].attempts == 2
        assert (await self.see(want.parts[0].key)).token == want.token

    async def test_a_claim_sent_again_after_its_commit_is_a_duplicate(self) -> None:
        want = self.want(self.key())
        claim = await self.hold(want)
        assert await self.commit(self.done(claim)) is Reply.COMMITTED
        assert isinstance(await self.ask(want), Duplicate)

    # --- claim: taking over ------------------------------------------------------

    async def test_a_lapsed_lease_moves_on_and_fences_the_old_owner(self) -> None:
        old = await self.lapsed(self.key())
        new = await self.hold(self.want(old.held[0].key))
        assert await self.release(self.back(old)) is Reply.FENCED
        assert await self.extend(self.more(old)) is Reply.FENCED
        assert (await self.see(old.held[0].key)).token == new.token

    async def test_a_take_over_keeps_generation_and_memo_and_counts_an_attempt(self) -> None:
        old = await self.lapsed(self.key(), memo=b"first copy")
        want = self.want(old.held[0].key, memo=b"second copy")
        new = await self.hold(want)
        assert new.token == want.token != old.token
        assert new.held == (Held(old.held[0].key, old.held[0].generation, 2, b"first copy"),)
        record = await self.see(old.held[0].key)
        assert (record.token, record.generation) == (want.token, old.held[0].generation)
        assert (record.attempts, record.memo) == (2, b"first copy")

    async def test_every_take_over_counts_one_attempt(self) -> None:
        key = self.key()
        attempts = [(await self.lapsed(key)).held[0].attempts for _ in range(4)]
        assert attempts == [1, 2, 3, 4]

    async def test_a_take_over_starts_a_lease_of_its_own(self) -> None:
        old = await self.lapsed(self.key())
        new = await self.hold(self.want(old.held[0].key, lease_ms=self.long))
        record = await self.see(old.held[0].key)
        assert self.near(record.until_ms, new.now_ms + self.long)

    @needs("manual_time")
    async def test_a_lease_ends_on_the_millisecond(self) -> None:
        claim = await self.hold(self.want(self.key(), lease_ms=self.short))
        key = claim.held[0].key
        await self.wait(self.short - 1)
        assert await self.ask(self.want(key)) == Busy(key, 1)
        await self.wait(1)
        assert (await self.hold(self.want(key))).held[0].attempts == 2

    # --- claim: the content of a free key ----------------------------------------

    async def test_a_free_key_with_the_same_content_stays_in_its_generation(self) -> None:
        old = await self.lapsed(self.key(), content=CONTENT)
        new = await self.hold(self.want(old.held[0].key, content=CONTENT))
        assert new.held[0] == Held(old.held[0].key, old.held[0].generation, 2, b"")

    async def test_a_free_key_with_other_content_starts_a_new_generation(self) -> None:
        old = await self.lapsed(self.key(), content=CONTENT, memo=b"old")
        want = self.want(old.held[0].key, content=OTHER, memo=b"new")
        new = await self.hold(want)
        assert new.held[0] == Held(old.held[0].key, want.generation, 1, b"new")
        assert (await self.see(old.held[0].key)).hash == OTHER

    async def test_a_released_key_with_other_content_starts_a_new_generation(self) -> None:
        old = await self.hold(self.want(self.key(), content=CONTENT, memo=b"old"))
        assert await self.release(self.back(old)) is Reply.RELEASED
        want = self.want(old.held[0].key, content=OTHER, memo=b"new")
        assert (await self.hold(want)).held[0] == Held(old.held[0].key, want.generation, 1, b"new")

    async def test_a_late_commit_of_the_old_content_does_not_mark_the_new_one_done(self) -> None:
        old = await self.lapsed(self.key(), content=CONTENT)
        new = await self.hold(self.want(old.held[0].key, content=OTHER))
        before = await self.see(old.held[0].key)
        assert await self.commit(self.done(old)) is Reply.FENCED
        assert await self.see(old.held[0].key) == before
        assert await self.commit(self.done(new)) is Reply.COMMITTED

    async def test_content_unset_on_either_side_of_a_free_key_counts_as_the_same(self) -> None:
        with_hash = await self.lapsed(self.key(), content=CONTENT)
        without = await self.lapsed(self.key())
        to_unset = await self.hold(self.want(with_hash.held[0].key))
        to_set = await self.hold(self.want(without.held[0].key, content=CONTENT))
        assert to_unset.held[0].generation == with_hash.held[0].generation
        assert to_set.held[0].generation == without.held[0].generation
        assert (to_unset.held[0].attempts, to_set.held[0].attempts) == (2, 2)

    async def test_a_take_over_keeps_the_content_and_fills_it_in_where_unset(self) -> None:
        with_hash = await self.lapsed(self.key(), content=CONTENT)
        without = await self.lapsed(self.key())
        await self.hold(self.want(with_hash.held[0].key))
        await self.hold(self.want(without.held[0].key, content=CONTENT))
        assert (await self.see(with_hash.held[0].key)).hash == CONTENT
        assert (await self.see(without.held[0].key)).hash == CONTENT

    # --- claim: what is done -----------------------------------------------------

    async def test_a_done_key_is_a_duplicate_with_its_fate_and_memo(self) -> None:
        key = self.key()
        await self.committed(key, fate=Fate.DEAD, memo=b"why")
        assert await self.ask(self.want(key)) == Duplicate(key, Fate.DEAD, b"why")
        assert await self.ask(self.want(key)) == Duplicate(key, Fate.DEAD, b"why")

    async def test_done_with_equal_content_is_a_duplicate(self) -> None:
        key = self.key()
        await self.committed(key, content=CONTENT)
        assert isinstance(await self.ask(self.want(key, content=CONTENT)), Duplicate)

    async def test_done_with_content_unset_on_either_side_is_a_duplicate(self) -> None:
        with_hash, without = self.keys(2)
        await self.committed(with_hash, content=CONTENT)
        await self.committed(without)
        assert isinstance(await self.ask(self.want(with_hash)), Duplicate)
        assert isinstance(await self.ask(self.want(without, content=CONTENT)), Duplicate)
        # and an unset content is not filled in by a refused claim
        assert isinstance(await self.ask(self.want(without, content=OTHER)), Duplicate)

    async def test_done_with_other_content_is_a_mismatch(self) -> None:
        key = self.key()
        await self.committed(key, content=CONTENT, memo=b"first copy")
        assert await self.ask(self.want(key, content=OTHER)) == Mismatch(key, b"first copy")

    async def test_a_mismatch_touches_nothing(self) -> None:
        key = self.key()
        await self.committed(key, content=CONTENT, window_ms=4 * self.short, hard_ms=self.long)
        before = await self.see(key)
        await self.wait(self.short)
        sliding = Part(key, OTHER, slide_ms=self.long)
        assert isinstance(await self.ask(self.want(sliding)), Mismatch)
        assert await self.see(key) == before
        assert isinstance(await self.ask(self.want(key, content=CONTENT)), Duplicate)
