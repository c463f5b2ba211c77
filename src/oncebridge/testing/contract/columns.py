from typing import Any

from msgspec.structs import replace

from oncebridge.stores.api import (
    HELD,
    Busy,
    Claim,
    Commits,
    Duplicate,
    Extensions,
    Fate,
    Held,
    Memories,
    Record,
    Releases,
    Reply,
    Wants,
)
from oncebridge.testing.contract.harness import CONTENT, OTHER, Harness, _fresh, listed


class ColumnCases(Harness):
    """Calls as columns: what keys share is fenced for each, and what they do not is kept apart."""

    # --- one token and one generation for all keys of a call -----------------------

    async def test_the_keys_of_a_call_are_held_under_its_one_token_and_generation(self) -> None:
        wants = self.one_call(self.keys(5), memo=b"m")
        assert (await self.store.claim(wants)).each == [HELD] * 5
        for record in await self.see_all(wants.keys):
            assert (record.token, record.generation) == (wants.token, wants.generation)
            assert (record.attempts, record.memo, record.fate) == (1, b"m", None)

    async def test_a_commit_of_some_keys_of_a_call_leaves_the_others_held(self) -> None:
        wants = await self._call(5)
        before = await self.see_all(wants.keys[1::2])
        some = self._commits(wants, wants.keys[::2])
        assert await self.store.commit(some) == [Reply.COMMITTED] * 3
        assert await self.see_all(wants.keys[1::2]) == before
        assert await self._strangers_hear(wants) == [Duplicate, Busy, Duplicate, Busy, Duplicate]
        assert await self.store.commit(self._commits(wants, wants.keys)) == [
            Reply.ALREADY,
            Reply.COMMITTED,
            Reply.ALREADY,
            Reply.COMMITTED,
            Reply.ALREADY,
        ]

    async def test_a_release_of_some_keys_of_a_call_leaves_the_others_held(self) -> None:
        wants = await self._call(5)
        before = await self.see_all(wants.keys[1::2])
        some = Releases(wants.keys[::2], wants.token, keep_ms=self.long)
        assert await self.store.release(some) == [Reply.RELEASED] * 3
        assert await self.see_all(wants.keys[1::2]) == before
        assert await self._strangers_hear(wants) == [Claim, Busy, Claim, Busy, Claim]
        assert await self.store.release(Releases(wants.keys, wants.token, keep_ms=self.long)) == [
            Reply.FENCED,
            Reply.RELEASED,
            Reply.FENCED,
            Reply.RELEASED,
            Reply.FENCED,
        ]

    async def test_an_extension_of_some_keys_of_a_call_leaves_the_others_as_they_are(self) -> None:
        wants = await self._call(5)
        before = await self.see_all(wants.keys[1::2])
        now = await self.store.now_ms()
        some = Extensions(wants.keys[::2], wants.token, 2 * self.long)
        assert await self.store.extend(some) == [Reply.EXTENDED] * 3
        assert await self.see_all(wants.keys[1::2]) == before
        for record in await self.see_all(wants.keys[::2]):
            assert self.near(record.until_ms, now + 2 * self.long)

    async def test_a_take_over_of_one_key_of_a_call_fences_that_key_alone(self) -> None:
        wants = await self._call(3, lease_ms=self.short)
        await self.wait(self.short)
        taken = await self.hold(self.want(wants.keys[1]))
        theirs = await self.see(wants.keys[1])
        assert await self.store.extend(Extensions(wants.keys, wants.token, self.long)) == [
            Reply.EXTENDED,
            Reply.FENCED,
            Reply.EXTENDED,
        ]
        assert await self.store.release(Releases(wants.keys, wants.token, keep_ms=self.long)) == [
            Reply.RELEASED,
            Reply.FENCED,
            Reply.RELEASED,
        ]
        assert await self.see(wants.keys[1]) == theirs
        assert await self.commit(self.done(taken)) is Reply.COMMITTED

    async def test_a_late_commit_of_a_call_counts_for_a_key_that_was_taken_over_too(self) -> None:
        wants = await self._call(3, lease_ms=self.short)
        await self.wait(self.short)
        taken = await self.hold(self.want(wants.keys[1]))
        done = await self.store.commit(self._commits(wants, wants.keys))
        assert done == [Reply.COMMITTED] * 3
        assert await self.commit(self.done(taken)) is Reply.ALREADY

    async def test_a_commit_of_a_call_is_fenced_for_a_key_that_started_anew(self) -> None:
        wants = self.one_call(self.keys(3), content=CONTENT, lease_ms=self.short)
        await self.store.claim(wants)
        await self.wait(self.short)
        await self.hold(self.want(wants.keys[1], content=OTHER))
        before = await self.see(wants.keys[1])
        assert await self.store.commit(self._commits(wants, wants.keys)) == [
            Reply.COMMITTED,
            Reply.FENCED,
            Reply.COMMITTED,
        ]
        assert await self.see(wants.keys[1]) == before

    # --- a call that is sent again -------------------------------------------------

    async def test_a_call_sent_again_is_the_same_claim(self) -> None:
        keys = self.keys(4)
        wants = self.one_call(keys, memo=[b"%d" % at for at in range(4)])
        await self.store.claim(wants)
        before = await self.see_all(keys)
        await self.wait(self.short)
        assert (await self.store.claim(wants)).each == [HELD] * 4
        assert await self.see_all(keys) == before

    async def test_a_part_of_a_call_sent_again_is_the_same_claim(self) -> None:
        """As after an answer of which a part was lost."""
        keys = self.keys(5)
        wants = self.one_call(keys, memo=[b"%d" % at for at in range(5)])
        await self.store.claim(wants)
        before = await self.see_all(keys)
        assert (await self.store.claim(wants.select([4, 1, 2]))).each == [HELD] * 3
        assert (await self.store.claim(wants.select([3]))).each == [HELD]
        assert await self.see_all(keys) == before

    async def test_a_call_sent_again_takes_only_the_keys_that_it_did_not_get(self) -> None:
        wants = self.one_call(self.keys(4), memo=[b"%d" % at for at in range(4)])
        await self.store.claim(wants.select([1, 3]))
        before = await self.see_all(wants.keys[1::2])
        await self.wait(self.short)
        assert (await self.store.claim(wants)).each == [HELD] * 4
        assert await self.see_all(wants.keys[1::2]) == before
        memos = [record.memo for record in await self.see_all(wants.keys)]
        assert memos == wants.memo

    async def test_a_call_sent_again_answers_for_each_key_as_it_is_now(self) -> None:
        kept, done, back, unsent, taken = keys = self.keys(5)
        wants = self.one_call(keys, lease_ms=self.short, memo=b"m")
        await self.store.claim(wants)
        await self.wait(self.short)
        await self.store.commit(self._commits(wants, [done]))
        await self.store.release(
            Releases([back, unsent], wants.token, keep_ms=self.long, unsent=[False, True])
        )
        theirs = await self.hold(self.want(taken))
        answers = await self.store.claim(wants)
        assert answers.each[0] == HELD
        assert answers.each[1] == Duplicate(done, Fate.DELIVERED, b"m")
        assert _held(answers.each[2]) == (Held(back, wants[2].generation, 2, b"m"),)
        assert answers.each[3] == HELD
        assert isinstance(answers.each[4], Busy)
        records = await self.see_all([kept, back, unsent, taken])
        assert [record.token for record in records] == [wants.token] * 3 + [theirs.token]

    async def test_a_call_sent_again_with_another_memo_is_told_the_first_one(self) -> None:
        wants = self.one_call(self.keys(2), memo=[b"first", b"same"])
        await self.store.claim(wants)
        answers = await self.store.claim(replace(wants, memo=[b"other", b"same"]))
        assert _held(answers.each[0]) == (Held(wants.keys[0], wants[0].generation, 1, b"first"),)
        assert answers.each[1] == HELD

    # --- a later call with the same token and generation ---------------------------

    async def test_a_later_call_with_the_same_token_leaves_the_earlier_one_alone(self) -> None:
        """Workers send a new token with each call; for other keys, an old one does no harm."""
        earlier = await self._call(2)
        later = replace(earlier, keys=self.keys(2))
        before = await self.see_all(earlier.keys)
        assert (await self.store.claim(later)).each == [HELD] * 2
        assert await self.see_all(earlier.keys) == before
        await self.store.release(Releases(earlier.keys, earlier.token, keep_ms=self.long))
        assert await self._strangers_hear(later) == [Busy, Busy]
        done = await self.store.commit(self._commits(later, later.keys))
        assert done == [Reply.COMMITTED] * 2
        assert [record.fate for record in await self.see_all(earlier.keys)] == [None, None]

    async def test_a_later_call_with_the_same_token_for_a_held_key_changes_nothing(self) -> None:
        """A store cannot tell it from a call that is sent again, whatever its content."""
        wants = self.one_call([self.key()], content=CONTENT)
        await self.store.claim(wants)
        before = await self.see_all(wants.keys)
        assert (await self.store.claim(replace(wants, hash=OTHER))).each == [HELD]
        assert await self.see_all(wants.keys) == before

    async def test_a_workers_later_call_for_other_content_is_not_done_by_its_earlier_commit(
        self,
    ) -> None:
        """Needs a generation of its own for every call: if it is used again, events are lost."""
        earlier = await self.hold(self.want(self.key(), worker="w", content=CONTENT))
        key = earlier.held[0].key
        assert await self.release(self.back(earlier)) is Reply.RELEASED
        later = await self.hold(self.want(key, worker="w", content=OTHER))
        assert await self.commit(self.done(earlier)) is Reply.FENCED
        assert (await self.see(key)).fate is None
        assert await self.commit(self.done(later)) is Reply.COMMITTED

    # --- what HELD says ------------------------------------------------------------

    async def test_held_says_that_generation_attempts_and_memo_are_as_asked(self) -> None:
        absent, past, changed, lapsed, unsent, noted = keys = self.keys(6)
        await self.committed(past, window_ms=self.short, memo=b"m")
        await self.lapsed(changed, content=CONTENT, memo=b"old")
        first = await self.lapsed(lapsed, memo=b"m")
        uncounted = await self.hold(self.want(unsent, memo=b"m"))
        assert await self.release(self.back(uncounted, unsent=True)) is Reply.RELEASED
        maybe = await self.hold(self.want(noted, memo=b"m"))
        asked = self.back(maybe, memo=b"maybe delivered", unsent=True)
        assert await self.release(asked) is Reply.RELEASED

        wants = self.one_call(keys, content=OTHER, memo=b"m")
        each = (await self.store.claim(wants)).each
        assert each[:3] == [HELD] * 3, (absent, past, changed)
        assert [_held(answer) for answer in each[3:]] == [
            (Held(lapsed, first.held[0].generation, 2, b"m"),),
            (Held(unsent, uncounted.held[0].generation, 1, b"m"),),
            (Held(noted, maybe.held[0].generation, 1, b"maybe delivered"),),
        ]
        assert [answer.token for answer in each[3:] if isinstance(answer, Claim)] == (
            [wants.token] * 3
        )
        records = await self.see_all(keys)
        assert [record.generation == wants.generation for record in records] == (
            [True] * 3 + [False] * 3
        )
        # Committed under what was asked, the other three would be delivered again.
        assert await self.store.commit(self._commits(wants, keys)) == (
            [Reply.COMMITTED] * 3 + [Reply.FENCED] * 3
        )
        generations = [record.generation for record in records]
        assert await self.store.commit(Commits(keys, generations, window_ms=self.long)) == (
            [Reply.ALREADY] * 3 + [Reply.COMMITTED] * 3
        )

    async def test_held_says_it_of_every_key_of_a_group(self) -> None:
        keys = self.keys(6)
        first, last = [await self.hold(self.want(key)) for key in (keys[0], keys[5])]
        for free in (first, last):
            assert await self.release(self.back(free, unsent=True)) is Reply.RELEASED
        wants = self.one_call(keys, sizes=[2, 2, 2])
        each = (await self.store.claim(wants)).each
        new = wants[0].generation
        assert _held(each[0]) == (first.held[0], Held(keys[1], new, 1, b""))
        assert each[1] == HELD
        assert _held(each[2]) == (Held(keys[4], new, 1, b""), last.held[0])

    async def test_the_answers_to_a_call_tell_the_time_of_the_store(self) -> None:
        before = await self.store.now_ms()
        wants = self.one_call(self.keys(3))
        answers = await self.store.claim(wants)
        assert before <= answers.now_ms <= await self.store.now_ms()
        for record in await self.see_all(wants.keys):
            assert self.near(record.until_ms, answers.now_ms + self.long)
        assert {claim.now_ms for claim in answers if isinstance(claim, Claim)} == {answers.now_ms}

    # --- one value, or one for each ------------------------------------------------

    async def test_a_claim_with_one_value_for_all_is_as_one_with_a_list_of_it(self) -> None:
        wants = self.one_call(self.keys(5), content=CONTENT, memo=b"m")
        await self._same_in_each_form("claim", replace(wants, slide_ms=2 * self.long))

    async def test_a_commit_with_one_value_for_all_is_as_one_with_a_list_of_it(self) -> None:
        commits = Commits(self.keys(3), _fresh(), Fate.DEAD, self.long, 2 * self.long, b"o")
        await self._same_in_each_form("commit", commits)

    async def test_a_release_with_one_value_for_all_is_as_one_with_a_list_of_it(self) -> None:
        releases = Releases(self.keys(3), _fresh(), self.long, self.long, b"o", unsent=True)
        await self._same_in_each_form("release", releases)

    async def test_an_extension_with_one_value_for_all_is_as_one_with_a_list_of_it(self) -> None:
        extensions = Extensions(self.keys(3), _fresh(), 2 * self.long)
        await self._same_in_each_form("extend", extensions)

    async def test_a_memory_with_one_value_for_all_is_as_one_with_a_list_of_it(self) -> None:
        memories = Memories(self.keys(3), _fresh(), Fate.STALE, self.long, CONTENT, b"o")
        await self._same_in_each_form("remember", memories)

    async def test_the_keys_of_a_call_may_differ_in_everything(self) -> None:
        done = self.keys(2)
        for key in done:
            await self.committed(key, content=CONTENT, hard_ms=4 * self.long)
        new = self.keys(2)
        now = await self.store.now_ms()
        wants = Wants(
            [done[0], new[0], done[1], new[1]],
            [_fresh() for _ in range(4)],
            [_fresh() for _ in range(4)],
            [self.short, self.long, self.short, 2 * self.long],
            [self.long, 2 * self.long, self.long, 0],
            [b"a", b"b", b"c", b""],
            [CONTENT, OTHER, b"", CONTENT],
            [2 * self.long, self.long, 3 * self.long, 0],
        )
        each = (await self.store.claim(wants)).each
        assert [type(answer) for answer in each] == [Duplicate, int, Duplicate, int]
        for at, until in enumerate((2 * self.long, self.long, 3 * self.long, 2 * self.long)):
            record = await self.see(wants.keys[at])
            assert self.near(record.until_ms, now + until)
            if record.fate is None:
                assert (record.token, record.generation) == (wants[at].token, wants[at].generation)
                assert (record.memo, record.hash) == (wants[at].memo, wants[at].parts[0].hash)

    # --- groups of keys ------------------------------------------------------------

    async def test_groups_of_keys_have_values_of_their_own_and_each_key_its_content(self) -> None:
        sizes = [1, 3, 2, 1, 2]
        keys = self.keys(sum(sizes))
        busy = await self.hold(self.want(keys[4]))
        wants = Wants(
            keys,
            [_fresh() for _ in sizes],
            [_fresh() for _ in sizes],
            [self.long * number for number in range(1, 6)],
            self.long,
            [b"%d" % number for number in range(5)],
            [b"%d" % at * 32 for at in range(len(keys))],
            0,
            sizes,
        )
        answers = await self.store.claim(wants)
        assert [type(answer) for answer in answers.each] == [int, int, Busy, int, int]
        for number in (0, 1, 3, 4):
            want = wants[number]
            for at in wants.places(number):
                record = await self.see(keys[at])
                assert (record.token, record.generation) == (want.token, want.generation)
                assert (record.memo, record.hash) == (b"%d" % number, b"%d" % at * 32)
                assert self.near(record.until_ms, answers.now_ms + want.lease_ms)
        assert (await self.see(keys[4])).token == busy.token
        assert await self.look(keys[5]) is None

    async def test_groups_of_one_key_are_as_no_groups(self) -> None:
        wants = self.one_call(self.keys(3), memo=[b"a", b"b", b"c"], sizes=[1, 1, 1])
        assert (await self.store.claim(wants)).each == [HELD] * 3
        assert (await self.store.claim(replace(wants, sizes=None))).each == [HELD] * 3
        assert [record.memo for record in await self.see_all(wants.keys)] == wants.memo

    # --- calls of several workers as one -------------------------------------------

    async def test_the_calls_of_several_workers_may_be_joined(self) -> None:
        single = self.one_call(self.keys(3), content=CONTENT, memo=b"one")
        listing = self.one_call(self.keys(2), lease_ms=2 * self.long, memo=[b"two", b"three"])
        groups = self.one_call(self.keys(5), content=OTHER, sizes=[2, 3])
        calls = [single, listing, groups]
        assert (await self.store.claim(Wants.joined(calls))).each == [HELD] * 7
        for call in calls:
            for want in call:
                for part in want.parts:
                    record = await self.see(part.key)
                    assert (record.token, record.generation) == (call.token, call.generation)
                    assert (record.memo, record.hash) == (want.memo, part.hash)
        wrong = Extensions(groups.keys[:1], single.token, self.long)
        extended = [Extensions(call.keys[:2], call.token, self.long) for call in calls]
        assert await self.store.extend(Extensions.joined(extended)) == [Reply.EXTENDED] * 6
        assert await self.store.extend(wrong) == [Reply.FENCED]
        mixed = Releases.joined(
            [
                Releases(single.keys[:1], single.token, keep_ms=self.long),
                Releases(listing.keys[:1], single.token, keep_ms=self.long),
                Releases(groups.keys[:1], groups.token, self.long, self.long, b"later"),
            ]
        )
        assert await self.store.release(mixed) == [Reply.RELEASED, Reply.FENCED, Reply.RELEASED]
        joined = Commits.joined([self._commits(call, call.keys) for call in calls])
        assert await self.store.commit(joined) == [Reply.COMMITTED] * 10
        assert (await self.see(groups.keys[0])).memo == b"later"

    # --- shared by cases -----------------------------------------------------------

    async def _call(self, count: int, *, lease_ms: int | None = None) -> Wants:
        """Claim new keys with one token and one generation."""
        wants = self.one_call(self.keys(count), lease_ms=lease_ms)
        assert (await self.store.claim(wants)).each == [HELD] * count
        return wants

    def _commits(self, wants: Wants, keys: list[bytes]) -> Commits:
        return Commits(keys, wants.generation, window_ms=self.long)

    async def _strangers_hear(self, wants: Wants) -> list[type]:
        answers = await self.ask_all([self.want(key) for key in wants.keys])
        return [type(answer) for answer in answers]

    async def _same_in_each_form(self, verb: str, batch: Any) -> None:
        """Send *batch* with one value for all, with one column as a list, and with only lists."""
        lists = listed(batch)
        columns = [name for name in batch.__struct_fields__[1:] if name != "sizes"]
        forms = [
            batch,
            *[replace(batch, **{name: getattr(lists, name)}) for name in columns],
            lists,
        ]
        forms = [replace(form, keys=self.keys(len(batch))) for form in forms]
        await self._prepare(verb, forms)
        answers = [await getattr(self.store, verb)(form) for form in forms]
        heard = [[_kind(answer) for answer in getattr(some, "each", some)] for some in answers]
        assert heard == [heard[0]] * len(forms), columns
        first, *others = [await self.see_all(form.keys) for form in forms]
        for name, records in zip([*columns, "all"], others, strict=True):
            for one, other in zip(first, records, strict=True):
                assert self._alike(one, other), name

    async def _prepare(self, verb: str, forms: list[Any]) -> None:
        """Bring the keys into the states in which *verb* has an effect."""
        if verb == "remember":
            return
        if verb == "claim":
            done, other, lapsed, busy, _ = zip(*[form.keys for form in forms], strict=True)
            count, far = len(forms), self.long
            known = self.one_call([*done, *other], content=[CONTENT] * count + [OTHER] * count)
            await self.store.claim(known)
            commits = self._commits(known, known.keys)
            await self.store.commit(replace(commits, hard_ms=4 * far, memo=b"n"))
            lease_ms = [self.short] * count + [far] * count
            await self.store.claim(self.one_call([*lapsed, *busy], lease_ms=lease_ms, memo=b"n"))
            await self.wait(self.short)
            return
        wants = self.one_call([key for form in forms for key in form.keys], memo=b"m")
        if verb == "commit":
            wants = replace(wants, generation=forms[0].generation)
        else:
            wants = replace(wants, token=forms[0].token)
        assert (await self.store.claim(wants)).each == [HELD] * len(wants)

    def _alike(self, one: Record, other: Record) -> bool:
        """Return True if the records have the same content, and about the same times."""
        return (
            self.near(one.until_ms, other.until_ms)
            and self.near(one.hard_until_ms, other.hard_until_ms)
            and replace(one, key=b"", until_ms=0, hard_until_ms=0, keep_until_ms=0)
            == replace(other, key=b"", until_ms=0, hard_until_ms=0, keep_until_ms=0)
        )


def _held(answer: Any) -> tuple[Held, ...]:
    """Return the records of an answer, which must be a claim with details."""
    assert isinstance(answer, Claim), answer
    return answer.held


def _kind(answer: Any) -> Any:
    """Return an answer without what differs between the keys of equal requests."""
    match answer:
        case Claim():
            return Claim, [(held.generation, held.attempts, held.memo) for held in answer.held]
        case Duplicate():
            return Duplicate, answer.fate, answer.memo
        case Busy():
            return Busy
    return type(answer) if not isinstance(answer, int | Reply) else answer
