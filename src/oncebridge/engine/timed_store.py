"""A store that reports each round trip to hooks: how long it took, and for how many keys."""

import asyncio
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from oncebridge.engine.hooks import RoundTrip, TripHook, call_hooks
from oncebridge.stores.api import ClaimAnswers, Claims, Columns, NoAnswer


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
