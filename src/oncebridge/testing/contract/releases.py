from oncebridge.events.key import Part
from oncebridge.stores.api import Busy, Claim, Duplicate, Extension, Held, Release, Reply, Want
from oncebridge.testing.contract.harness import CONTENT, OTHER, Harness, _fresh, needs


class ReleaseCases(Harness):
    """Releases: each frees a key, now or later, and only for the worker that holds it."""

    async def test_a_released_key_may_be_claimed_at_once_as_the_next_attempt(self) -> None:
        old = await self.hold(self.want(self.key(), memo=b"m"))
        assert await self.release(self.back(old)) is Reply.RELEASED
        assert (await self.see(old.held[0].key)).token == b""
        new = await self.hold(self.want(old.held[0].key))
        assert new.held[0] == Held(old.held[0].key, old.held[0].generation, 2, b"m")

    async def test_a_release_with_a_delay_keeps_the_key_busy_until_then(self) -> None:
        claim = await self.hold(self.want(self.key()))
        key = claim.held[0].key
        now = await self.store.now_ms()
        assert await self.release(self.back(claim, self.long)) is Reply.RELEASED
        assert self.near((await self.see(key)).until_ms, now + self.long)
        await self.wait(self.short)
        answer = await self.ask(self.want(key))
        assert isinstance(answer, Busy)
        assert 0 < answer.left_ms < self.long

    async def test_a_release_with_a_delay_frees_the_key_when_it_is_over(self) -> None:
        claim = await self.hold(self.want(self.key()))
        assert await self.release(self.back(claim, 2 * self.short)) is Reply.RELEASED
        await self.wait(2 * self.short)
        assert (await self.hold(self.want(claim.held[0].key))).held[0].attempts == 2

    @needs("manual_time")
    async def test_a_delay_ends_on_the_millisecond(self) -> None:
        claim = await self.hold(self.want(self.key()))
        key = claim.held[0].key
        assert await self.release(self.back(claim, self.short)) is Reply.RELEASED
        await self.wait(self.short - 1)
        assert await self.ask(self.want(key)) == Busy(key, 1)
        await self.wait(1)
        assert isinstance(await self.ask(self.want(key)), Claim)

    async def test_a_release_repeated_is_fenced_and_changes_nothing(self) -> None:
        claim = await self.hold(self.want(self.key()))
        back = self.back(claim, self.long, unsent=True)
        assert await self.release(back) is Reply.RELEASED
        before = await self.see(claim.held[0].key)
        await self.wait(self.short)
        assert await self.release(back) is Reply.FENCED
        assert await self.see(claim.held[0].key) == before

    async def test_a_release_with_an_old_token_is_refused_and_changes_nothing(self) -> None:
        old = await self.lapsed(self.key())
        await self.hold(self.want(old.held[0].key))
        before = await self.see(old.held[0].key)
        stale = self.back(old, self.long, memo=b"stale", unsent=True)
        assert await self.release(stale) is Reply.FENCED
        assert await self.see(old.held[0].key) == before

    async def test_a_release_on_nothing_is_fenced_and_writes_nothing(self) -> None:
        key = self.key()
        assert await self.release(Release(key, _fresh())) is Reply.FENCED
        assert await self.look(key) is None

    async def test_a_release_never_erases_what_is_done(self) -> None:
        key = self.key()
        claim = await self.committed(key)
        before = await self.see(key)
        assert await self.release(self.back(claim)) is Reply.FENCED
        assert await self.see(key) == before
        assert isinstance(await self.ask(self.want(key)), Duplicate)

    async def test_a_release_of_a_lapsed_lease_that_nobody_took_counts(self) -> None:
        claim = await self.lapsed(self.key())
        assert await self.release(self.back(claim, self.long, memo=b"m")) is Reply.RELEASED
        assert isinstance(await self.ask(self.want(claim.held[0].key)), Busy)
        assert (await self.see(claim.held[0].key)).memo == b"m"

    async def test_unsent_gives_the_attempt_back(self) -> None:
        first = await self.hold(self.want(self.key()))
        key = first.held[0].key
        assert await self.release(self.back(first, unsent=True)) is Reply.RELEASED
        second = await self.hold(self.want(key))
        assert second.held[0].attempts == 1
        assert await self.release(self.back(second)) is Reply.RELEASED
        third = await self.hold(self.want(key))
        assert third.held[0].attempts == 2
        assert await self.release(self.back(third, unsent=True)) is Reply.RELEASED
        assert (await self.see(key)).attempts == 1

    async def test_unsent_never_goes_below_zero(self) -> None:
        key = self.key()
        for _ in range(3):
            claim = await self.hold(self.want(key))
            assert claim.held[0].attempts == 1
            assert await self.release(self.back(claim, unsent=True)) is Reply.RELEASED
            assert await self.release(self.back(claim, unsent=True)) is Reply.FENCED
            assert (await self.see(key)).attempts == 0

    async def test_an_unsent_release_hands_its_memo_to_the_same_generation(self) -> None:
        """An attempt that does not count may have been delivered, and its memo says so."""
        first = await self.hold(self.want(self.key(), content=CONTENT, memo=b"first"))
        key, generation = first.held[0].key, first.held[0].generation
        held = first
        for memo in (b"maybe", b"maybe again"):
            assert await self.release(self.back(held, memo=memo, unsent=True)) is Reply.RELEASED
            held = await self.hold(self.want(key, content=CONTENT, memo=b"new"))
            assert held.held[0] == Held(key, generation, 1, memo)

    async def test_after_an_unsent_release_other_content_starts_a_new_generation(self) -> None:
        old = await self.hold(self.want(self.key(), content=CONTENT))
        asked = self.back(old, memo=b"old", unsent=True)
        assert await self.release(asked) is Reply.RELEASED
        want = self.want(old.held[0].key, content=OTHER, memo=b"new")
        assert (await self.hold(want)).held[0] == Held(old.held[0].key, want.generation, 1, b"new")
        assert await self.commit(self.done(old)) is Reply.FENCED

    async def test_a_release_keeps_the_memo_or_replaces_it_when_given(self) -> None:
        for given, kept in ((None, b"first"), (b"second", b"second"), (b"", b"")):
            claim = await self.hold(self.want(self.key(), memo=b"first"))
            assert await self.release(self.back(claim, memo=given)) is Reply.RELEASED
            again = await self.hold(self.want(claim.held[0].key, memo=b"third"))
            assert again.held[0].memo == kept

    async def test_a_delayed_release_does_not_free_the_next_attempt_of_the_same_worker(
        self,
    ) -> None:
        """Needs a token of its own for every claim: a worker's name would match."""
        first = await self.hold(self.want(self.key(), worker="w", lease_ms=self.short))
        await self.wait(self.short)
        key = first.held[0].key
        second = await self.hold(self.want(key, worker="w"))
        assert second.held[0].attempts == 2
        assert await self.release(self.back(first)) is Reply.FENCED
        assert isinstance(await self.ask(self.want(key, worker="v")), Busy)
        assert await self.extend(self.more(second)) is Reply.EXTENDED

    async def test_a_release_that_lands_twice_does_not_free_the_next_attempt_of_the_same_worker(
        self,
    ) -> None:
        first = await self.hold(self.want(self.key(), worker="w"))
        assert await self.release(self.back(first)) is Reply.RELEASED
        second = await self.hold(self.want(first.held[0].key, worker="w"))
        assert await self.release(self.back(first)) is Reply.FENCED
        assert await self.extend(self.more(second)) is Reply.EXTENDED
        assert isinstance(await self.ask(self.want(first.held[0].key, worker="v")), Busy)

    async def test_an_empty_token_never_matches_a_released_key(self) -> None:
        claim = await self.hold(self.want(self.key()))
        key = claim.held[0].key
        assert await self.release(self.back(claim, self.long)) is Reply.RELEASED
        before = await self.see(key)
        assert await self.release(Release(key, b"", unsent=True)) is Reply.FENCED
        assert await self.extend(Extension(key, b"", self.short)) is Reply.FENCED
        nameless = Want((Part(key),), b"", _fresh(), self.long, self.long)
        assert isinstance(await self.ask(nameless), Busy)
        assert await self.see(key) == before

    async def test_an_empty_token_never_matches_a_done_key(self) -> None:
        key = self.key()
        await self.committed(key)
        before = await self.see(key)
        assert await self.release(Release(key, b"")) is Reply.FENCED
        assert await self.extend(Extension(key, b"", self.short)) is Reply.FENCED
        assert await self.see(key) == before
