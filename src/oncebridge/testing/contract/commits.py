from oncebridge.stores.api import Claim, Commit, Duplicate, Fate, Reply
from oncebridge.testing.contract.harness import CONTENT, Harness, _fresh


class CommitCases(Harness):
    """Commits: each marks its generation done, once, however late it arrives."""

    async def test_a_commit_marks_the_key_done_for_its_window(self) -> None:
        claim = await self.hold(self.want(self.key(), content=CONTENT, memo=b"m"))
        now = await self.store.now_ms()
        assert await self.commit(self.done(claim, Fate.STALE)) is Reply.COMMITTED
        record = await self.see(claim.held[0].key)
        assert (record.fate, record.token, record.attempts) == (Fate.STALE, b"", 1)
        assert (record.hash, record.memo) == (CONTENT, b"m")
        assert self.near(record.until_ms, now + self.long)

    async def test_a_commit_repeated_is_already_and_changes_nothing(self) -> None:
        key = self.key()
        claim = await self.committed(key, window_ms=self.long)
        before = await self.see(key)
        await self.wait(self.short)
        assert await self.commit(self.done(claim)) is Reply.ALREADY
        other = self.done(claim, Fate.DEAD, window_ms=2 * self.long, hard_ms=1, memo=b"other")
        assert await self.commit(other) is Reply.ALREADY
        assert await self.see(key) == before

    async def test_a_commit_on_nothing_is_fenced_and_writes_nothing(self) -> None:
        key = self.key()
        assert await self.commit(Commit(key, _fresh(), Fate.DELIVERED, self.long)) is Reply.FENCED
        assert await self.look(key) is None
        assert isinstance(await self.ask(self.want(key)), Claim)

    async def test_a_commit_of_another_generation_is_fenced_and_changes_nothing(self) -> None:
        claim = await self.hold(self.want(self.key()))
        key = claim.held[0].key
        before = await self.see(key)
        foreign = Commit(key, _fresh(), Fate.DELIVERED, self.long)
        assert await self.commit(foreign) is Reply.FENCED
        assert await self.see(key) == before
        assert await self.commit(self.done(claim)) is Reply.COMMITTED
        done = await self.see(key)
        assert await self.commit(foreign) is Reply.FENCED
        assert await self.see(key) == done

    async def test_a_commit_with_no_generation_never_matches(self) -> None:
        key, absent = self.keys(2)
        await self.committed(key)
        claim = await self.hold(self.want(self.key()))
        for name in (key, absent, claim.held[0].key):
            nameless = Commit(name, b"", Fate.DELIVERED, self.long)
            assert await self.commit(nameless) is Reply.FENCED
        assert (await self.see(claim.held[0].key)).fate is None

    async def test_a_commit_counts_after_the_lease_ran_out(self) -> None:
        claim = await self.lapsed(self.key())
        assert await self.commit(self.done(claim)) is Reply.COMMITTED
        assert isinstance(await self.ask(self.want(claim.held[0].key)), Duplicate)

    async def test_a_late_commit_counts_after_a_take_over_and_the_other_hears_already(self) -> None:
        old = await self.lapsed(self.key())
        new = await self.hold(self.want(old.held[0].key))
        assert await self.commit(self.done(old)) is Reply.COMMITTED
        assert await self.commit(self.done(new)) is Reply.ALREADY
        assert await self.release(self.back(new)) is Reply.FENCED
        assert await self.extend(self.more(new)) is Reply.FENCED
        assert isinstance(await self.ask(self.want(old.held[0].key)), Duplicate)

    async def test_a_commit_counts_after_the_release_of_its_own_hold(self) -> None:
        at_once = await self.hold(self.want(self.key()))
        later = await self.hold(self.want(self.key()))
        assert await self.release(self.back(at_once)) is Reply.RELEASED
        assert await self.release(self.back(later, self.long)) is Reply.RELEASED
        assert await self.commit(self.done(at_once)) is Reply.COMMITTED
        assert await self.commit(self.done(later)) is Reply.COMMITTED
        assert isinstance(await self.ask(self.want(later.held[0].key)), Duplicate)

    async def test_every_fate_comes_back(self) -> None:
        for fate in Fate:
            key = self.key()
            await self.committed(key, fate=fate)
            assert await self.ask(self.want(key)) == Duplicate(key, fate, b"")
            assert (await self.see(key)).fate is fate

    async def test_a_commit_keeps_the_memo_or_replaces_it_when_given(self) -> None:
        for given, kept in ((None, b"first"), (b"second", b"second"), (b"", b"")):
            claim = await self.hold(self.want(self.key(), memo=b"first"))
            assert await self.commit(self.done(claim, memo=given)) is Reply.COMMITTED
            key = claim.held[0].key
            assert await self.ask(self.want(key)) == Duplicate(key, Fate.DELIVERED, kept)
            assert (await self.see(key)).memo == kept

    async def test_the_attempts_of_a_done_key_can_be_read(self) -> None:
        key = self.key()
        await self.lapsed(key)
        await self.lapsed(key)
        await self.committed(key)
        assert (await self.see(key)).attempts == 3
