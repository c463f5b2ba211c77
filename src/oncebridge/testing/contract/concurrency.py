import asyncio
from collections.abc import Iterable, Sequence
from typing import TypeVar

from oncebridge.stores.api import (
    Busy,
    Claim,
    ClaimAnswer,
    CommitAnswer,
    Commits,
    Duplicate,
    ReleaseAnswer,
    Releases,
    Reply,
    Store,
)
from oncebridge.testing.contract.harness import TASKS, Harness, needs

_Item = TypeVar("_Item")


class ConcurrencyCases(Harness):
    """Concurrent requests, through one handle or two: exactly one of them succeeds."""

    # --- many at once ------------------------------------------------------------

    async def test_of_many_claims_at_once_exactly_one_wins_each_key(self) -> None:
        keys = self.keys(100)
        await self._race([self.store], keys, attempts=1)

    async def test_of_many_take_overs_at_once_exactly_one_wins_each_key(self) -> None:
        keys = self.keys(100)
        await self.ask_all([self.want(key, lease_ms=self.short) for key in keys])
        await self.wait(self.short)
        await self._race([self.store], keys, attempts=2)

    async def test_of_many_claims_of_parts_at_once_exactly_one_wins_all(self) -> None:
        pairs = [self.keys(2) for _ in range(50)]

        async def compete(number: int) -> list[ClaimAnswer]:
            # Half of them ask in the other order: a store that locks part by part deadlocks here.
            wants = [self.want(*(pair if number % 2 else pair[::-1])) for pair in pairs]
            answers: list[ClaimAnswer] = []
            for batch in _batches(wants, 5):
                answers += await self.ask_all(batch)
                await asyncio.sleep(0)
            return answers

        results = await asyncio.gather(*(compete(number) for number in range(TASKS)))
        for pair, answers in zip(pairs, zip(*results, strict=True), strict=True):
            winners = [answer for answer in answers if isinstance(answer, Claim)]
            assert len(winners) == 1
            assert sum(isinstance(answer, Busy) for answer in answers) == TASKS - 1
            assert [(await self.see(key)).token for key in pair] == [winners[0].token] * 2

    async def test_of_overlapping_claims_of_parts_none_is_half_taken(self) -> None:
        ring = self.keys(20)
        # In this order some find their first key free and their second one taken.
        wants = [self.want(ring[7 * at % 20], ring[(7 * at + 1) % 20]) for at in range(20)]
        answers = await asyncio.gather(*(self.ask(want) for want in wants))
        tokens = {key: (await self.see(key)).token for key in ring if await self.look(key)}
        for want, answer in zip(wants, answers, strict=True):
            holds = [tokens.get(part.key) == want.token for part in want.parts]
            assert holds == [isinstance(answer, Claim)] * 2
        assert any(isinstance(answer, Claim) for answer in answers)

    async def test_of_many_commits_at_once_exactly_one_counts(self) -> None:
        claims = await self._claims(25)

        async def compete() -> list[CommitAnswer]:
            return await self.store.commit(Commits.of([self.done(claim) for claim in claims]))

        results = await asyncio.gather(*(compete() for _ in range(TASKS)))
        for answers in zip(*results, strict=True):
            assert answers.count(Reply.COMMITTED) == 1
            assert answers.count(Reply.ALREADY) == TASKS - 1

    async def test_of_many_releases_at_once_exactly_one_counts(self) -> None:
        claims = await self._claims(25)

        async def compete() -> list[ReleaseAnswer]:
            return await self.store.release(
                Releases.of([self.back(claim, unsent=True) for claim in claims])
            )

        results = await asyncio.gather(*(compete() for _ in range(TASKS)))
        for answers in zip(*results, strict=True):
            assert answers.count(Reply.RELEASED) == 1
            assert answers.count(Reply.FENCED) == TASKS - 1

    # --- two handles on one backend ----------------------------------------------

    @needs("shared")
    async def test_two_handles_see_each_others_claims(self) -> None:
        async with self.open_second(self.clock) as second:
            want = self.want(self.key(), lease_ms=8 * self.short)
            key = want.parts[0].key
            claim = await self.hold(want)
            assert isinstance(await self.ask(self.want(key), second), Busy)
            assert (await self.hold(want, second)).held == claim.held
            assert await second.peek([key]) == await self.store.peek([key])
            await self.wait(8 * self.short)
            taken = await self.hold(self.want(key), second)
            assert taken.held[0].attempts == 2
            assert await self.release(self.back(claim)) is Reply.FENCED

    @needs("shared")
    async def test_what_one_handle_commits_is_a_duplicate_at_the_other(self) -> None:
        async with self.open_second(self.clock) as second:
            claim = await self.hold(self.want(self.key()))
            assert await self.commit(self.done(claim), second) is Reply.COMMITTED
            assert await self.commit(self.done(claim)) is Reply.ALREADY
            assert isinstance(await self.ask(self.want(claim.held[0].key)), Duplicate)
            assert await second.forget([claim.held[0].key]) == [True]
            assert isinstance(await self.ask(self.want(claim.held[0].key)), Claim)

    @needs("shared")
    async def test_of_many_claims_through_two_handles_exactly_one_wins_each_key(self) -> None:
        async with self.open_second(self.clock) as second:
            keys = self.keys(100)
            await self._race([self.store, second], keys, attempts=1)
            lapsed = self.keys(100)
            await self.ask_all([self.want(key, lease_ms=self.short) for key in lapsed])
            await self.wait(self.short)
            await self._race([self.store, second], lapsed, attempts=2)

    @needs("shared")
    async def test_closing_one_handle_leaves_the_other_working(self) -> None:
        async with self.open_second(self.clock) as second:
            claim = await self.hold(self.want(self.key()), second)
        assert isinstance(await self.ask(self.want(claim.held[0].key)), Busy)
        assert await self.commit(self.done(claim)) is Reply.COMMITTED

    # --- shared by cases ---------------------------------------------------------

    async def _race(self, stores: Sequence[Store], keys: list[bytes], *, attempts: int) -> None:
        """Let sixteen tasks claim all *keys*, each from another start, and count winners."""

        async def compete(number: int) -> dict[bytes, ClaimAnswer]:
            store = stores[number % len(stores)]
            start = number * len(keys) // TASKS
            answers: dict[bytes, ClaimAnswer] = {}
            for batch in _batches(keys[start:] + keys[:start], 10):
                wants = [self.want(key) for key in batch]
                answers |= zip(batch, await self.ask_all(wants, store), strict=True)
                await asyncio.sleep(0)
            return answers

        results = await asyncio.gather(*(compete(number) for number in range(TASKS)))
        for key in keys:
            answers = [result[key] for result in results]
            winners = [answer for answer in answers if isinstance(answer, Claim)]
            assert len(winners) == 1
            assert sum(isinstance(answer, Busy) for answer in answers) == TASKS - 1
            assert winners[0].held[0].attempts == attempts
            assert (await self.see(key)).token == winners[0].token


def _batches(items: Iterable[_Item], size: int) -> list[list[_Item]]:
    listed = list(items)
    return [listed[at : at + size] for at in range(0, len(listed), size)]
