"""
Sessions, and which of them ended.

A session is a signed cookie, so it is valid without a record, also after a restart and in every
dashboard with the same token. A log-out is a record in the store: it survives a restart and
applies to every dashboard on that store. It is read with each request of a session.

While the store does not answer, only sessions that this process has verified before are accepted;
other users log in again, which does not need the store.
"""

import asyncio
from collections import OrderedDict
from typing import Final

from oncebridge.base.clock import Dice
from oncebridge.errors import StoreError, StoreUnavailable
from oncebridge.events.key import make_key
from oncebridge.stores.api import Fate, Memories, NoAnswer, Store

SESSION_S: Final = 12 * 3600
_KEPT_MS: Final = 2 * SESSION_S * 1000
"""Longer than any session, so that clocks that were set meanwhile do not matter."""
_ANSWER_S: Final = 5.0
_MOST: Final = 4096


class Sessions:
    """The sessions that ended, in *store*."""

    def __init__(self, store: Store, dice: Dice) -> None:
        self._store = store
        self._dice = dice
        self._live: OrderedDict[str, bool] = OrderedDict()
        """The latest sessions that this process knows: True if live."""

    def begin(self, session: str) -> None:
        """Record a new session."""
        self._note(session, is_live=True)

    async def end(self, session: str) -> None:
        """End *session*; raise `StoreError` if only this process knows it."""
        self._note(session, is_live=False)
        (generation,) = self._dice.tokens(1)
        memories = Memories([_key(session)], generation, Fate.DROPPED, _KEPT_MS)
        (answer,) = await self._store.remember(memories)
        if isinstance(answer, NoAnswer):
            raise StoreUnavailable(answer.reason)

    async def is_live(self, session: str) -> bool:
        """Return False if *session* was logged out of, here or elsewhere, or may have been."""
        known = self._live.get(session)
        if known is False:
            return False
        try:
            async with asyncio.timeout(_ANSWER_S):
                (record,) = await self._store.peek([_key(session)])
        except (StoreError, TimeoutError):
            return known is True
        return self._note(session, is_live=record is None or record.fate is None)

    def _note(self, session: str, *, is_live: bool) -> bool:
        # A log-out during a read of the store stays.
        is_live = self._live.pop(session, True) and is_live
        self._live[session] = is_live
        if len(self._live) > _MOST:
            self._live.popitem(last=False)
        return is_live


def _key(session: str) -> bytes:
    return make_key("", b"logged out", "", "", (session.encode(),))
