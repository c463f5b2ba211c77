from oncebridge.stores.api import Claim, Commit, Duplicate, Fate, Reply, Store
from oncebridge.testing.contract.harness import (
    CONTENT,
    Harness,
    _fresh,
    ask,
    commit,
    extend,
    hold,
    look,
    release,
    see,
)


class CommitCases(Harness):
    """Commits: each marks its generation done, once, however late it arrives."""

    async def test_a_commit_marks_the_key_done_for_its_window(self, store: Store) -> None:
        claim = await hold(store, self.want(self.key(), content=CONTENT, memo=b"m"))
        now = await store.now_ms()
        assert await commit(store, self.done(claim, Fate.STALE)) is Reply.COMMITTED
        record = await see(store, claim.held[0].key)
        assert (record.fate, record.token, record.attempts) == (Fate.STALE, b"", 1)
        assert (record.hash, record.memo) == (CONTENT, b"m")
        assert self.near(record.until_ms, now + self.long)

    async def test_a_commit_repeated_is_already_and_changes_nothing(self, store: Store) -> None:
        key = self.key()
        claim = await self.committed(store, key, window_ms=self.long)
        before = await see(store, key)
        await self.wait(self.short)
        assert await commit(store, self.done(claim)) is Reply.ALREADY
        other = self.done(claim, Fate.DEAD, window_ms=2 * self.long, hard_ms=1, memo=b"other")
        assert await commit(store, other) is Reply.ALREADY
        assert await see(store, key) == before

    async def test_a_commit_on_nothing_is_fenced_and_writes_nothing(self, store: Store) -> None:
        key = self.key()
        assert await commit(store, Commit(key, _fresh(), Fate.DELIVERED, self.long)) is Reply.FENCED
        assert await look(store, key) is None
        assert isinstance(await ask(store, self.want(key)), Claim)

    async def test_a_commit_of_another_generation_is_fenced_and_changes_nothing(
        self, store: Store
    ) -> None:
        claim = await hold(store, self.want(self.key()))
        key = claim.held[0].key
        before = await see(store, key)
        foreign = Commit(key, _fresh(), Fate.DELIVERED, self.long)
        assert await commit(store, foreign) is Reply.FENCED
        assert await see(store, key) == before
        assert await commit(store, self.done(claim)) is Reply.COMMITTED
        done = await see(store, key)
        assert await commit(store, foreign) is Reply.FENCED
        assert await see(store, key) == done

    async def test_a_commit_with_no_generation_never_matches(self, store: Store) -> None:
        key, absent = self.keys(2)
        await self.committed(store, key)
        claim = await hold(store, self.want(self.key()))
        for name in (key, absent, claim.held[0].key):
            nameless = Commit(name, b"", Fate.DELIVERED, self.long)
            assert await commit(store, nameless) is Reply.FENCED
        assert (await see(store, claim.held[0].key)).fate is None

    async def test_a_commit_counts_after_the_lease_ran_out(self, store: Store) -> None:
        claim = await self.lapsed(store, self.key())
        assert await commit(store, self.done(claim)) is Reply.COMMITTED
        assert isinstance(await ask(store, self.want(claim.held[0].key)), Duplicate)

    async def test_a_late_commit_counts_after_a_take_over_and_the_other_hears_already(
        self, store: Store
    ) -> None:
        old = await self.lapsed(store, self.key())
        new = await hold(store, self.want(old.held[0].key))
        assert await commit(store, self.done(old)) is Reply.COMMITTED
        assert await commit(store, self.done(new)) is Reply.ALREADY
        assert await release(store, self.back(new)) is Reply.FENCED
        assert await extend(store, self.more(new)) is Reply.FENCED
        assert isinstance(await ask(store, self.want(old.held[0].key)), Duplicate)

    async def test_a_commit_counts_after_the_release_of_its_own_hold(self, store: Store) -> None:
        at_once = await hold(store, self.want(self.key()))
        later = await hold(store, self.want(self.key()))
        assert await release(store, self.back(at_once)) is Reply.RELEASED
        assert await release(store, self.back(later, self.long)) is Reply.RELEASED
        assert await commit(store, self.done(at_once)) is Reply.COMMITTED
        assert await commit(store, self.done(later)) is Reply.COMMITTED
        assert isinstance(await ask(store, self.want(later.held[0].key)), Duplicate)

    async def test_every_fate_comes_back(self, store: Store) -> None:
        for fate in Fate:
            key = self.key()
            await self.committed(store, key, fate=fate)
            assert await ask(store, self.want(key)) == Duplicate(key, fate, b"")
            assert (await see(store, key)).fate is fate

    async def test_a_commit_keeps_the_memo_or_replaces_it_when_given(self, store: Store) -> None:
        for given, kept in ((None, b"first"), (b"second", b"second"), (b"", b"")):
            claim = await hold(store, self.want(self.key(), memo=b"first"))
            assert await commit(store, self.done(claim, memo=given)) is Reply.COMMITTED
            key = claim.held[0].key
            assert await ask(store, self.want(key)) == Duplicate(key, Fate.DELIVERED, kept)
            assert (await see(store, key)).memo == kept

    async def test_the_attempts_of_a_done_key_can_be_read(self, store: Store) -> None:
        key = self.key()
        await self.lapsed(store, key)
        await self.lapsed(store, key)
        await self.committed(store, key)
        assert (await see(store, key)).attempts == 3
