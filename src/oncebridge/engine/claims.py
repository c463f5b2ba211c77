"""
The store as the gateway uses it: many questions in one round trip, patient, and counted.

What a store may do here is answer, fail, or apply a request and fail to say so. Every
request may be repeated, so the ledger repeats it: a claim with the same token, a commit
with the same generation. What it has to give up on is left to the backlog.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from oncebridge.base.clock import Dice
from oncebridge.engine.backlog import Backlog, Debt
from oncebridge.engine.batcher import Batcher
from oncebridge.engine.counters import Books
from oncebridge.errors import StoreError, StoreUnavailable
from oncebridge.stores.api import (
    Claim,
    ClaimAnswer,
    Claims,
    Commit,
    CommitAnswer,
    Memory,
    NoAnswer,
    Release,
    ReleaseAnswer,
    Reply,
    Want,
    rounds,
)

_CLAIM_PAUSES_S = (0.05, 0.2)
_COMMITTED: Final = Reply.COMMITTED  # an enum's members are slow to find
_ALREADY: Final = Reply.ALREADY
_COMMIT_PAUSE_S, _LONGEST_COMMIT_PAUSE_S = 0.02, 0.5


class Ledger:
    """Ask *store*; never raise for what a store may do."""

    def __init__(self, store: Claims, books: Books, dice: Dice) -> None:
        self._store = store
        self._books = books
        self._dice = dice
        self._claims: Batcher[Want, ClaimAnswer] = Batcher(
            store.claim, keys_of=lambda want: [part.key for part in want.parts]
        )
        self._commits: Batcher[Commit, CommitAnswer] = Batcher(
            store.commit, keys_of=lambda commit: [commit.key]
        )
        self.backlog = Backlog(store, books, dice)

    async def claim(self, wants: Sequence[Want]) -> Sequence[ClaimAnswer]:
        """
        Claim, trying again with the same tokens where no answer comes.

        A claim that is given up may have been applied: it is released by its token later,
        or we would stand in our own way for a lease.
        """
        try:
            answers, is_passing = await self._ask(wants)
            if NoAnswer in set(map(type, answers)):
                answers = await self._ask_again(wants, [*answers], is_passing=is_passing)
        except asyncio.CancelledError:
            self._owe_releases(wants)
            raise
        return answers

    async def _ask(self, wants: Sequence[Want]) -> tuple[Sequence[ClaimAnswer], bool]:
        """Claim once, and tell whether it may help to try again."""
        try:
            return await self._claims.ask(wants), True
        except StoreError as error:
            self._books.store_errors += 1
            return [NoAnswer(str(error))] * len(wants), isinstance(error, StoreUnavailable)

    async def _ask_again(
        self, wants: Sequence[Want], answers: list[ClaimAnswer], *, is_passing: bool
    ) -> Sequence[ClaimAnswer]:
        unanswered = _unanswered(answers)
        for pause in _CLAIM_PAUSES_S:
            if not unanswered or not is_passing:
                break
            await self.pause(pause)
            again, is_passing = await self._ask([wants[at] for at in unanswered])
            for at, answer in zip(unanswered, again, strict=True):
                answers[at] = answer
            self._owe_leftovers([(wants[at], answers[at]) for at in unanswered])
            unanswered = _unanswered(answers)
        self._owe_releases([wants[at] for at in unanswered])
        return answers

    def _owe_leftovers(self, asked_again: Sequence[tuple[Want, ClaimAnswer]]) -> None:
        """
        Give back what a claim left behind that was interrupted, and then refused.

        A store may take the parts of a want one after the other; another may have been quicker
        with the second.
        """
        self._owe_releases(
            [
                want
                for want, answer in asked_again
                if len(want.parts) > 1 and type(answer) not in (Claim, NoAnswer)
            ]
        )

    def _owe_releases(self, wants: Sequence[Want]) -> None:
        self.backlog.owe(
            Debt(Release(part.key, want.token, keep_ms=want.keep_ms, unsent=True))
            for want in wants
            for part in want.parts
        )

    async def commit(
        self, commits: Sequence[Commit], until_s: float
    ) -> tuple[Sequence[Commit], Sequence[Commit]]:
        """
        Commit, trying until *until_s*.

        Return the commits that could not be recorded by then, and those that the store had
        before it was first asked. Each record decides for itself: one that is fenced never
        cancels the others.
        """
        pause = _COMMIT_PAUSE_S
        before: Sequence[Commit] | None = None
        while commits:
            answers: Sequence[CommitAnswer]
            try:
                answers = await self._commits.ask(commits)
            except StoreError as error:
                self._books.store_errors += 1
                answers = [NoAnswer(str(error))] * len(commits)
            if answers.count(_COMMITTED) == len(commits):
                return (), before or ()
            self._books.fenced_commits += answers.count(Reply.FENCED)
            if before is None:
                before = [c for c, a in zip(commits, answers, strict=True) if a is _ALREADY]
            commits = [c for c, a in zip(commits, answers, strict=True) if type(a) is NoAnswer]
            if not commits or asyncio.get_running_loop().time() >= until_s:
                break
            await self.pause(pause)
            pause = min(2 * pause, _LONGEST_COMMIT_PAUSE_S)
        return commits, before or ()

    async def release(
        self, releases: Sequence[Release], *, owe: bool = True
    ) -> Sequence[ReleaseAnswer]:
        """
        Release, now or later; until it lands, others see the key busy for its lease.

        With *owe* false, the caller tries again itself.
        """
        if not releases:
            return ()
        answers: Sequence[ReleaseAnswer]
        try:
            answers = await self._store.release(releases)
        except StoreError as error:
            self._books.store_errors += 1
            answers = [NoAnswer(str(error))] * len(releases)
        if owe:
            late = [r for r, a in zip(releases, answers, strict=True) if type(a) is NoAnswer]
            self.backlog.owe([Debt(release) for release in late])
        return answers

    async def remember(self, memories: Sequence[Memory]) -> None:
        """Remember if the store is there: it only saves work later."""
        if not memories:
            return
        try:
            # Two repeats may bring the same further tier; one of them is enough.
            await self._store.remember(rounds(memories, lambda memory: memory.key)[0])
        except StoreError:
            self._books.store_errors += 1

    async def pause(self, about_s: float) -> None:
        """Wait half to one and a half times *about_s*, so that workers do not march in step."""
        await asyncio.sleep(about_s * (0.5 + self._dice.fraction()))


def _unanswered(answers: Sequence[ClaimAnswer]) -> list[int]:
    return [at for at, answer in enumerate(answers) if type(answer) is NoAnswer]
