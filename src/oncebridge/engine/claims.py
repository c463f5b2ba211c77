"""
The store as the gateway uses it: calls are merged, retried and counted.

A store may answer, fail, or apply a request and fail to answer. Every request may be repeated,
so it is: a claim with the same token, a commit with the same generation. Writes that still get
no answer go to the backlog.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, Generic, TypeVar

from oncebridge.base.clock import Dice
from oncebridge.engine.backlog import Backlog, PendingWrite
from oncebridge.engine.counters import Books
from oncebridge.errors import StoreError, StoreUnavailable
from oncebridge.stores.api import (
    Claim,
    ClaimAnswer,
    Claims,
    Commit,
    CommitAnswer,
    Commits,
    Memories,
    Memory,
    NoAnswer,
    Release,
    ReleaseAnswer,
    Releases,
    Reply,
    Want,
    Wants,
    rounds,
)

_CLAIM_PAUSES_S = (0.05, 0.2)
_COMMITTED: Final = Reply.COMMITTED  # an enum's members are slow to find
_ALREADY: Final = Reply.ALREADY
_COMMIT_PAUSE_S, _LONGEST_COMMIT_PAUSE_S = 0.02, 0.5


_Q = TypeVar("_Q")
_A = TypeVar("_A")


class _WaitingCaller(Generic[_Q, _A]):
    """One caller's questions, and the future for their answers."""

    __slots__ = ("answers", "questions")

    def __init__(self, questions: Sequence[_Q]) -> None:
        self.questions = questions
        self.answers: asyncio.Future[Sequence[_A]] = asyncio.get_running_loop().create_future()


class CallBatcher(Generic[_Q, _A]):
    """
    Merge the questions of many callers into calls of *call*, which answers each, in order.

    While a call is running, further questions wait and go together with the next one: at low
    load there is no wait, at high load batches grow. At most *at_once* calls run at a time, with
    about *most* questions each. The keys of one store call have to be distinct, so questions that
    share a key (*keys_of*) go in different calls. If a call raises, all its callers get the error.
    """

    def __init__(
        self,
        call: Callable[[Sequence[_Q]], Awaitable[Sequence[_A]]],
        *,
        keys_of: Callable[[_Q], Iterable[bytes]],
        most: int = 500,
        at_once: int = 2,
    ) -> None:
        self._call = call
        self._keys_of = keys_of
        self._most = most
        self._free = at_once
        self._waiting: list[_WaitingCaller[_Q, _A]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, questions: Sequence[_Q]) -> Sequence[_A]:
        """Return the answers to *questions*, which are asked alone or with those of other callers."""
        if self._free:
            self._free -= 1
            try:
                return await self._call(questions)
            finally:
                self._free += 1
                self._send()
        asked: _WaitingCaller[_Q, _A] = _WaitingCaller(questions)
        self._waiting.append(asked)
        return await asked.answers

    def _send(self) -> None:
        while self._free and self._waiting:
            taken = self._gather()
            self._free -= 1
            task = asyncio.get_running_loop().create_task(self._answer(taken))
            self._tasks.add(task)  # the loop itself keeps only a weak reference
            task.add_done_callback(self._tasks.discard)

    def _gather(self) -> list[_WaitingCaller[_Q, _A]]:
        """Take the questions that have waited longest, and as many more as fit."""
        taken: list[_WaitingCaller[_Q, _A]] = []
        left: list[_WaitingCaller[_Q, _A]] = []
        size = 0
        keys: set[bytes] = set()
        for asked in self._waiting:
            questions = asked.questions
            own = {key for question in questions for key in self._keys_of(question)}
            if taken and (size + len(questions) > self._most or not keys.isdisjoint(own)):
                left.append(asked)
                continue
            taken.append(asked)
            keys |= own
            size += len(questions)
        self._waiting = left
        return taken

    async def _answer(self, taken: list[_WaitingCaller[_Q, _A]]) -> None:
        try:
            answers = await self._call([one for asked in taken for one in asked.questions])
        except BaseException as error:  # noqa: BLE001 - raised to all callers
            for asked in taken:
                if not asked.answers.done():
                    asked.answers.set_exception(error)
        else:
            at = 0
            for asked in taken:
                after = at + len(asked.questions)
                if not asked.answers.done():
                    asked.answers.set_result(answers[at:after])
                at = after
        finally:
            self._free += 1
            self._send()


class RetryingStore:
    """Call *store* and retry; errors of the store are never raised, but answered."""

    def __init__(self, store: Claims, books: Books, dice: Dice) -> None:
        self._store = store
        self._books = books
        self._dice = dice
        self._claims: CallBatcher[Want, ClaimAnswer] = CallBatcher(
            lambda wants: self._claim_rows(store, wants),
            keys_of=lambda want: [part.key for part in want.parts],
        )
        self._commits: CallBatcher[Commit, CommitAnswer] = CallBatcher(
            lambda commits: store.commit(Commits.of(commits)), keys_of=lambda commit: [commit.key]
        )
        self.backlog = Backlog(store, books, dice)

    @staticmethod
    async def _claim_rows(store: Claims, wants: Sequence[Want]) -> Sequence[ClaimAnswer]:
        return [*await store.claim(Wants.of(wants))]

    async def claim(self, wants: Sequence[Want]) -> Sequence[ClaimAnswer]:
        """
        Claim; where there is no answer, retry with the same tokens.

        A claim that is given up may have been applied: it is released by its token later, or
        the retry of the event would find it busy for a lease.
        """
        try:
            answers, may_retry = await self._ask_once(wants)
            if NoAnswer in set(map(type, answers)):
                answers = await self._retry_unanswered(wants, [*answers], may_retry=may_retry)
        except asyncio.CancelledError:
            self._defer_releases(wants)
            raise
        return answers

    async def _ask_once(self, wants: Sequence[Want]) -> tuple[Sequence[ClaimAnswer], bool]:
        """Claim once; return the answers, and whether a retry may help."""
        try:
            return await self._claims.ask(wants), True
        except StoreError as error:
            self._books.store_errors += 1
            return [NoAnswer(str(error))] * len(wants), isinstance(error, StoreUnavailable)

    async def _retry_unanswered(
        self, wants: Sequence[Want], answers: list[ClaimAnswer], *, may_retry: bool
    ) -> Sequence[ClaimAnswer]:
        unanswered = _unanswered(answers)
        for pause in _CLAIM_PAUSES_S:
            if not unanswered or not may_retry:
                break
            await self.pause(pause)
            again, may_retry = await self._ask_once([wants[at] for at in unanswered])
            for at, answer in zip(unanswered, again, strict=True):
                answers[at] = answer
            self._defer_leftovers([(wants[at], answers[at]) for at in unanswered])
            unanswered = _unanswered(answers)
        self._defer_releases([wants[at] for at in unanswered])
        return answers

    def _defer_leftovers(self, asked_again: Sequence[tuple[Want, ClaimAnswer]]) -> None:
        """
        Release the parts of claims that were interrupted, retried and then refused.

        A store may claim the parts of a want one after another, and another worker may have
        claimed the second one in between.
        """
        self._defer_releases(
            [
                want
                for want, answer in asked_again
                if len(want.parts) > 1 and type(answer) not in (Claim, NoAnswer)
            ]
        )

    def _defer_releases(self, wants: Sequence[Want]) -> None:
        self.backlog.add(
            PendingWrite(Release(part.key, want.token, keep_ms=want.keep_ms, unsent=True))
            for want in wants
            for part in want.parts
        )

    async def commit(
        self, commits: Sequence[Commit], until_s: float
    ) -> tuple[Sequence[Commit], Sequence[Commit]]:
        """
        Commit, and retry until *until_s*.

        Return the commits that could not be recorded by then, and those that the store had
        before it was first asked. Each record is independent: one that is fenced does not cancel
        the others.
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
        self, releases: Sequence[Release], *, retry_later: bool = True
    ) -> Sequence[ReleaseAnswer]:
        """
        Release, now or later; until then, other workers see the key as busy for its lease.

        With *retry_later* false, the caller retries itself.
        """
        if not releases:
            return ()
        answers: Sequence[ReleaseAnswer]
        try:
            answers = await self._store.release(Releases.of(releases))
        except StoreError as error:
            self._books.store_errors += 1
            answers = [NoAnswer(str(error))] * len(releases)
        if retry_later:
            late = [r for r, a in zip(releases, answers, strict=True) if type(a) is NoAnswer]
            self.backlog.add([PendingWrite(release) for release in late])
        return answers

    async def remember(self, memories: Sequence[Memory]) -> None:
        """Write records if the store answers; they only save work later."""
        if not memories:
            return
        try:
            # Two duplicates may have the same further tier; one record is enough.
            await self._store.remember(Memories.of(rounds(memories, lambda memory: memory.key)[0]))
        except StoreError:
            self._books.store_errors += 1

    async def pause(self, about_s: float) -> None:
        """Wait 0.5 to 1.5 times *about_s*, so that workers do not retry at the same moment."""
        await asyncio.sleep(about_s * (0.5 + self._dice.fraction()))


def _unanswered(answers: Sequence[ClaimAnswer]) -> list[int]:
    return [at for at, answer in enumerate(answers) if type(answer) is NoAnswer]
