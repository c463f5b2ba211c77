from oncebridge.stores.api import (
    Busy,
    Claim,
    Commits,
    Duplicate,
    Extensions,
    Fate,
    Held,
    Memories,
    Mismatch,
    Releases,
    Reply,
)
from oncebridge.testing.contract.harness import CONTENT, OTHER, Harness, claimed


class BatchCases(Harness):
    """Batches of any size: answers are in order, and each item keeps its own values."""

    async def test_an_empty_batch_has_an_empty_answer(self) -> None:
        assert await self.ask_all([]) == []
        assert await self.store.commit(Commits.of([])) == []
        assert await self.store.release(Releases.of([])) == []
        assert await self.store.extend(Extensions.of([])) == []
        assert await self.store.remember(Memories.of([])) == []
        assert await self.store.peek([]) == []
        assert await self.store.forget([]) == []

    async def test_a_batch_of_hundreds_of_mixed_wants_answers_in_order(self) -> None:
        rounds = 50
        keys = self.keys(8 * rounds)
        absent, claimed, own, lapsed, changed, done, other, past = (keys[at::8] for at in range(8))
        mine = {key: self.want(key, memo=key) for key in own}
        await self.ask_all([self.want(key) for key in claimed])
        await self.ask_all(list(mine.values()))
        for key in (*done, *other, *past):
            window = self.short if key in past else self.long
            await self.committed(key, content=CONTENT, window_ms=window, memo=key)
        await self.ask_all(
            [
                self.want(key, lease_ms=self.short, content=CONTENT, memo=key)
                for key in (*lapsed, *changed)
            ]
        )
        await self.wait(self.short)
        wants = [
            mine.get(key) or self.want(key, content=OTHER if key in {*changed, *other} else CONTENT)
            for key in keys
        ]
        answers = await self.ask_all(wants)
        assert len(answers) == len(keys)
        for key, want, answer in zip(keys, wants, answers, strict=True):
            if key in absent or key in past or key in changed:
                assert isinstance(answer, Claim)
                assert answer.held == (Held(key, want.generation, 1, b""),)
            elif key in claimed:
                assert isinstance(answer, Busy)
                assert answer.key == key
            elif key in own:
                assert isinstance(answer, Claim)
                assert answer.held == (Held(key, want.generation, 1, key),)
            elif key in lapsed:
                assert isinstance(answer, Claim)
                assert (answer.held[0].attempts, answer.held[0].memo) == (2, key)
                assert answer.held[0].generation != want.generation
            elif key in done:
                assert answer == Duplicate(key, Fate.DELIVERED, key)
            else:
                assert answer == Mismatch(key, key)

    async def test_single_and_grouped_wants_in_one_batch_answer_in_order(self) -> None:
        groups = [self.keys(1 + number % 3) for number in range(90)]
        await self.ask_all([self.want(keys[-1]) for keys in groups[::5]])
        answers = await self.ask_all([self.want(*keys) for keys in groups])
        for number, (keys, answer) in enumerate(zip(groups, answers, strict=True)):
            if number % 5:
                assert isinstance(answer, Claim)
                assert [held.key for held in answer.held] == keys
            else:
                assert isinstance(answer, Busy)
                assert answer.key == keys[-1]
                assert await self.store.peek(keys[:-1]) == [None] * (len(keys) - 1)

    async def test_mixed_batches_of_the_other_verbs_answer_in_order(self) -> None:
        claims = await self._claims(90)
        first, second, third = claims[::3], claims[1::3], claims[2::3]
        await self.store.commit(Commits.of([self.done(claim) for claim in first]))
        await self.store.release(Releases.of([self.back(claim) for claim in second]))
        assert await self.store.extend(Extensions.of([self.more(claim) for claim in claims])) == [
            Reply.FENCED,
            Reply.FENCED,
            Reply.EXTENDED,
        ] * len(third)
        assert await self.store.forget([claim.held[0].key for claim in claims[:45]]) == [
            True,
            True,
            False,
        ] * (len(third) // 2)
        assert await self.store.remember(
            Memories.of([self.memory(claim.held[0].key) for claim in claims])
        ) == [Reply.REMEMBERED, Reply.REMEMBERED, Reply.KNOWN] * (len(third) // 2) + [
            Reply.KNOWN,
            Reply.REMEMBERED,
            Reply.KNOWN,
        ] * (len(third) // 2)
        assert await self.store.commit(Commits.of([self.done(claim) for claim in claims[45:]])) == [
            Reply.ALREADY,
            Reply.ALREADY,
            Reply.COMMITTED,
        ] * (len(third) // 2)
        assert await self.store.release(Releases.of([self.back(claim) for claim in claims])) == [
            *[Reply.FENCED, Reply.FENCED, Reply.RELEASED] * (len(third) // 2),
            *[Reply.FENCED] * 45,
        ]

    async def test_each_want_of_a_batch_has_its_own_lease_and_memo(self) -> None:
        short, long, longer = self.keys(3)
        leases = {short: self.short, long: self.long, longer: 2 * self.long}
        answers = await self.ask_all(
            [self.want(key, lease_ms=lease, memo=key) for key, lease in leases.items()]
        )
        now = claimed(answers[0]).now_ms
        for key, lease in leases.items():
            record = await self.see(key)
            assert self.near(record.until_ms, now + lease)
            assert record.memo == key
        await self.wait(self.short)
        answers = await self.ask_all([self.want(key) for key in leases])
        assert [type(answer) for answer in answers] == [Claim, Busy, Busy]

    async def test_each_commit_of_a_batch_has_its_own_window_fate_and_memo(self) -> None:
        claims = await self._claims(len(Fate))
        now = await self.store.now_ms()
        asked = [
            self.done(claim, fate, window_ms=fate * self.long, memo=b"%d" % fate)
            for claim, fate in zip(claims, Fate, strict=True)
        ]
        assert await self.store.commit(Commits.of(asked)) == [Reply.COMMITTED] * len(Fate)
        for claim, fate in zip(claims, Fate, strict=True):
            record = await self.see(claim.held[0].key)
            assert (record.fate, record.memo) == (fate, b"%d" % fate)
            assert self.near(record.until_ms, now + fate * self.long)

    async def test_each_release_of_a_batch_has_its_own_delay_memo_and_unsent(self) -> None:
        now_free, soon, later = claims = await self._claims(3)
        answers = await self.store.release(
            Releases.of(
                [
                    self.back(now_free, memo=b"now", unsent=True),
                    self.back(soon, 2 * self.short),
                    self.back(later, self.long, memo=b"later"),
                ]
            )
        )
        assert answers == [Reply.RELEASED] * 3
        records = [await self.see(claim.held[0].key) for claim in claims]
        assert [record.attempts for record in records] == [0, 1, 1]
        assert [record.memo for record in records] == [b"now", b"", b"later"]
        assert isinstance(await self.ask(self.want(now_free.held[0].key)), Claim)
        await self.wait(2 * self.short)
        answers_then = await self.ask_all([self.want(claim.held[0].key) for claim in claims[1:]])
        assert [type(answer) for answer in answers_then] == [Claim, Busy]

    async def test_each_extension_and_memory_of_a_batch_has_its_own_time(self) -> None:
        claims = await self._claims(3)
        now = await self.store.now_ms()
        await self.store.extend(
            Extensions.of(
                [self.more(claim, number * self.long) for number, claim in enumerate(claims, 1)]
            )
        )
        for number, claim in enumerate(claims, 1):
            until = (await self.see(claim.held[0].key)).until_ms
            assert self.near(until, now + number * self.long)
        keys = self.keys(3)
        now = await self.store.now_ms()
        await self.store.remember(
            Memories.of(
                [
                    self.memory(key, window_ms=number * self.long)
                    for number, key in enumerate(keys, 1)
                ]
            )
        )
        for number, key in enumerate(keys, 1):
            assert self.near((await self.see(key)).until_ms, now + number * self.long)

    async def test_a_batch_of_two_thousand_is_answered_in_full(self) -> None:
        count = 2000
        keys = self.keys(count)
        wants = [self.want(key, memo=key) for key in keys]
        claims = [claimed(answer) for answer in await self.ask_all(wants)]
        assert [claim.held[0].key for claim in claims] == keys
        assert [claim.token for claim in claims] == [want.token for want in wants]
        assert [record and record.memo for record in await self.store.peek(keys)] == keys
        assert await self.store.extend(Extensions.of([self.more(claim) for claim in claims])) == (
            [Reply.EXTENDED] * count
        )
        half = count // 2
        assert await self.store.commit(
            Commits.of([self.done(claim) for claim in claims[:half]])
        ) == ([Reply.COMMITTED] * half)
        assert await self.store.release(
            Releases.of([self.back(claim) for claim in claims[half:]])
        ) == ([Reply.RELEASED] * half)
        answers = await self.ask_all([self.want(key) for key in keys])
        assert [type(answer) for answer in answers] == [Duplicate] * half + [Claim] * half
        assert await self.store.forget(keys) == [True] * half + [False] * half
