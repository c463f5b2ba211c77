"""A store that reports each round trip to hooks: how long it took, and for how many keys."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from oncebridge.engine.hooks import RoundTrip, TripHook, call_hooks
from oncebridge.stores.api import (
    ClaimAnswers,
    Claims,
    CommitAnswer,
    Commits,
    ExtendAnswer,
    Extensions,
    Memories,
    NoAnswer,
    ReleaseAnswer,
    Releases,
    RememberAnswer,
    Wants,
)

_Asked = TypeVar("_Asked", Wants, Commits, Releases, Extensions, Memories)
_Answered = TypeVar("_Answered", bound="ClaimAnswers | Sequence[object]")


class TimedStore:
    """*store* as the gateway uses it, with the time of each call reported to *hooks*."""

    def __init__(self, store: Claims, route: str, hooks: Sequence[TripHook]) -> None:
        self._store = store
        self._route = route
        self._hooks = tuple(hooks)

    async def claim(self, wants: Wants) -> ClaimAnswers:
        return await self._timed("claim", self._store.claim, wants)

    async def commit(self, commits: Commits) -> list[CommitAnswer]:
        return await self._timed("commit", self._store.commit, commits)

    async def release(self, releases: Releases) -> list[ReleaseAnswer]:
        return await self._timed("release", self._store.release, releases)

    async def extend(self, extensions: Extensions) -> list[ExtendAnswer]:
        return await self._timed("extend", self._store.extend, extensions)

    async def remember(self, memories: Memories) -> list[RememberAnswer]:
        return await self._timed("remember", self._store.remember, memories)

    async def _timed(
        self, call: str, ask: Callable[[_Asked], Awaitable[_Answered]], asked: _Asked
    ) -> _Answered:
        now_s = asyncio.get_running_loop().time
        before = now_s()
        is_answered = False
        try:
            answers = await ask(asked)
            each = answers.each if isinstance(answers, ClaimAnswers) else answers
            is_answered = any(type(answer) is not NoAnswer for answer in each)
        finally:
            took_s = now_s() - before
            trip = RoundTrip(self._route, "store", call, len(asked), took_s, is_answered)
            call_hooks(self._hooks, trip)
        return answers
