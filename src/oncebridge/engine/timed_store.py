"""A store that reports each round trip to hooks: how long it took, and for how many keys."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, cast

from oncebridge.engine.hooks import RoundTrip, TripHook, call_hooks
from oncebridge.stores.api import ClaimAnswers, Claims, Columns, NoAnswer


def timed(store: Claims, route: str, hooks: Sequence[TripHook]) -> Claims:
    """Return *store* as the gateway uses it, with the time of each call reported to *hooks*."""
    return cast("Claims", _TimedStore(store, route, hooks))


class _TimedStore:
    def __init__(self, store: Claims, route: str, hooks: Sequence[TripHook]) -> None:
        self._route = route
        self._hooks = hooks
        self.claim = partial(self._ask, "claim", store.claim)
        self.commit = partial(self._ask, "commit", store.commit)
        self.release = partial(self._ask, "release", store.release)
        self.extend = partial(self._ask, "extend", store.extend)
        self.remember = partial(self._ask, "remember", store.remember)

    async def _ask(
        self, call: str, ask: Callable[[Any], Coroutine[Any, Any, Any]], asked: Columns[Any]
    ) -> Any:
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
