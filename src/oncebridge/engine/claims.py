"""
The store as the gateway uses it: calls are merged, retried and counted.

A store may answer, fail, or apply a request and fail to answer. Every request may be repeated,
so it is: a claim with the same token, a commit with the same generation. Writes that still get
no answer go to the backlog.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, Generic, TypeVar, cast

from msgspec import Struct

from oncebridge.base.clock import Dice
from oncebridge.engine.backlog import Backlog, PendingWrite
from oncebridge.engine.counters import Books
from oncebridge.engine.hooks import RoundTrip, TripHook, call_hooks
from oncebridge.errors import StoreError, StoreUnavailable
from oncebridge.stores.api import (
    Claim,
    ClaimAnswers,
    Claims,
    Columns,
    CommitAnswer,
    Commits,
    Memories,
    Memory,
    NoAnswer,
    Release,
    ReleaseAnswer,
    Releases,
    Reply,
    Wants,
    rounds,
)

_CLAIM_PAUSES_S = (0.05, 0.2)
_COMMITTED: Final = Reply.COMMITTED  # an enum's members are slow to find
_ALREADY: Final = Reply.ALREADY
_COMMIT_PAUSE_S, _LONGEST_COMMIT_PAUSE_S = 0.02, 0.5
_Q = TypeVar("_Q", bound="Wants | Commits")
_A = TypeVar("_A")


class _WaitingCaller(Struct, Generic[_Q, _A]):
    """One caller's batch, and the future for its answers."""

    batch: _Q
    answers: "asyncio.Future[_A]"


class CallBatcher(Generic[_Q, _A]):
    """
    Merge the batches of many callers into calls of *call*.

    While a call is running, further batches wait and go together with the next one: at low
    load there is no wait, at high load batches grow. At most *at_once* calls run at a time, with
    about *most* keys each. The keys of one store call have to be distinct, so batches that
    share a key go in different calls. *part_of* returns the answers to one of the batches. If a
    call raises, all its callers get the error.
    """

    def __init__(
        self,
        call: Callable[[_Q], Awaitable[_A]],
        part_of: Callable[[_A, _Q, slice], _A],
        *,
        most: int = 500,
        at_once: int = 2,
    ) -> None:
        self._call = call
        self._part_of = part_of
        self._most = most
        self._free = at_once
        self._waiting: list[_WaitingCaller[_Q, _A]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, batch: _Q) -> _A:
        """Return the answers to *batch*, which is asked alone or with those of other callers."""
        if self._free:
            self._free -= 1
            try:
                return await self._call(batch)
            finally:
                self._free += 1
                if self._waiting:
                    self._send()
        answers: asyncio.Future[_A] = asyncio.get_running_loop().create_future()
        self._waiting.append(_WaitingCaller(batch, answers))
        return await answers

    def _send(self) -> None:
        while self._free and self._waiting:
            taken = self._gather()
            self._free -= 1
            task = asyncio.get_running_loop().create_task(self._answer(taken))
            self._tasks.add(task)  # the loop itself keeps only a weak reference
            task.add_done_callback(self._tasks.discard)

    def _gather(self) -> list[_WaitingCaller[_Q, _A]]:
        """Take the batches that have waited longest, and as many more as fit."""
        taken: list[_WaitingCaller[_Q, _A]] = []
        left: list[_WaitingCaller[_Q, _A]] = []
        keys: set[bytes] = set()
        for asked in self._waiting:
            own = asked.batch.keys
            if taken and (len(keys) + len(own) > self._most or not keys.isdisjoint(own)):
                left.append(asked)
                continue
            taken.append(asked)
            keys.update(own)
        self._waiting = left
        return taken

    async def _answer(self, taken: list[_WaitingCaller[_Q, _A]]) -> None:
        try:
            batches: Any = [asked.batch for asked in taken]
            batch: _Q = type(taken[0].batch).joined(batches)  # type: ignore[assignment]
            answers = await self._call(batch)
        except BaseException as error:  # noqa: BLE001 - raised to all callers
            for asked in taken:
                if not asked.answers.done():
                    asked.answers.set_exception(error)
        else:
            at = 0
            for asked in taken:
                after = at + len(asked.batch)
                if not asked.answers.done():
                    asked.answers.set_result(self._part_of(answers, asked.batch, slice(at, after)))
                at = after
        finally:
            self._free += 1
            self._send()


def timed(store: Claims, route: str, hooks: Sequence[TripHook]) -> Claims:
    """Return *store* as the gateway uses it, with the time of each call reported to *hooks*."""

    async def ask(call: str, asked: Columns[Any]) -> Any:
        now_s = asyncio.get_running_loop().time
        before = now_s()
        is_answered = False
        try:
            answers = await getattr(store, call)(asked)
            each = answers.each if isinstance(answers, ClaimAnswers) else answers
            is_answered = any(type(answer) is not NoAnswer for answer in each)
        finally:
            took_s = now_s() - before
            call_hooks(hooks, RoundTrip(route, "store", call, len(asked), took_s, is_answered))
        return answers

    calls = ("claim", "commit", "release", "extend", "remember")
    return cast("Claims", SimpleNamespace(**{call: partial(ask, call) for call in calls}))


class RetryingStore:
    """Call *store* and retry; errors of the store are never raised, but answered."""

    def __init__(self, store: Claims, books: Books, dice: Dice) -> None:
        self._store = store
        self._books = books
        self._dice = dice
        self._claims = CallBatcher[Wants, ClaimAnswers](
            store.claim,
            lambda found, asked, part: ClaimAnswers(asked, found.each[part], found.now_ms),
        )
        self._commits = CallBatcher[Commits, list[CommitAnswer]](
            store.commit, lambda found, _, part: found[part]
        )
        self.backlog = Backlog(store, books, dice)

    async def claim(self, wants: Wants) -> ClaimAnswers:
        """
        Claim; where there is no answer, retry with the same tokens.

        A claim that is given up may have been applied: it is released by its token later, or
        the retry of the event would find it busy for a lease.
        """
        try:
            answers, may_retry = await self._ask_once(wants)
            if NoAnswer in {*map(type, answers.each)}:
                answers = await self._retry_unanswered(answers, may_retry=may_retry)
        except asyncio.CancelledError:
            self._defer_releases(wants)
            raise
        return answers

    async def _ask_once(self, wants: Wants) -> tuple[ClaimAnswers, bool]:
        """Claim once; return the answers, and whether a retry may help."""
        try:
            return await self._claims.ask(wants), True
        except StoreError as error:
            self._books.store_errors += 1
            silent = ClaimAnswers(wants, [NoAnswer(str(error))] * len(wants), 0)
            return silent, isinstance(error, StoreUnavailable)

    async def _retry_unanswered(self, answers: ClaimAnswers, *, may_retry: bool) -> ClaimAnswers:
        wants, each, now_ms = answers.asked, [*answers.each], answers.now_ms
        unanswered = _unanswered(each)
        for pause in _CLAIM_PAUSES_S:
            if not unanswered or not may_retry:
                break
            await self.pause(pause)
            again, may_retry = await self._ask_once(wants.select(unanswered))
            for at, answer in zip(unanswered, again.each, strict=True):
                each[at] = answer
            now_ms = max(now_ms, again.now_ms)
            if sizes := wants.sizes:
                # A store may claim the parts of a want one after another, and another worker may
                # have claimed the second one in between.
                given = Claim | NoAnswer | int
                refused = [at for at in unanswered if not isinstance(each[at], given)]
                self._defer_releases(wants.select([at for at in refused if sizes[at] > 1]))
            unanswered = _unanswered(each)
        self._defer_releases(wants.select(unanswered))
        return ClaimAnswers(wants, each, now_ms)

    def _defer_releases(self, wants: Wants) -> None:
        self.backlog.add(
            PendingWrite(Release(part.key, want.token, keep_ms=want.keep_ms, unsent=True))
            for want in wants
            for part in want.parts
        )

    async def commit(self, commits: Commits, until_s: float) -> tuple[Commits | None, list[bytes]]:
        """
        Commit, and retry until *until_s*.

        Return the commits that could not be recorded by then, and the keys of those that the
        store had before it was first asked. Each record is independent: one that is fenced does
        not cancel the others.
        """
        pause = _COMMIT_PAUSE_S
        before: list[bytes] | None = None
        while True:
            answers: list[CommitAnswer]
            try:
                answers = await self._commits.ask(commits)
            except StoreError as error:
                self._books.store_errors += 1
                answers = [NoAnswer(str(error))] * len(commits)
            if answers.count(_COMMITTED) == len(answers):
                return None, before or []
            self._books.fenced_commits += answers.count(Reply.FENCED)
            if before is None:
                before = [
                    key for key, a in zip(commits.keys, answers, strict=True) if a is _ALREADY
                ]
            if not (unanswered := _unanswered(answers)):
                return None, before
            commits = commits.select(unanswered)
            if asyncio.get_running_loop().time() >= until_s:
                return commits, before
            await self.pause(pause)
            pause = min(2 * pause, _LONGEST_COMMIT_PAUSE_S)

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
            self.backlog.add([PendingWrite(releases[at]) for at in _unanswered(answers)])
        return answers

    async def remember(self, memories: Iterable[Memory]) -> None:
        """Write records if the store answers; they only save work later."""
        # Two duplicates may have the same further tier; one record is enough.
        first, *_ = rounds(memories, lambda memory: memory.key) or [[]]
        if not first:
            return
        try:
            await self._store.remember(Memories.of(first))
        except StoreError:
            self._books.store_errors += 1

    async def pause(self, about_s: float) -> None:
        """Wait 0.5 to 1.5 times *about_s*, so that workers do not retry at the same moment."""
        await asyncio.sleep(about_s * (0.5 + self._dice.fraction()))


def _unanswered(answers: Sequence[object]) -> list[int]:
    return [at for at, answer in enumerate(answers) if type(answer) is NoAnswer]
