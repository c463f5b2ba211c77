"""
A worker's share of a rate limit that applies to all workers of a route together.

One record in the store lists the workers, the share of each and until when it is valid, in the
store's time. The valid shares never add up to more than the rate: a worker takes what the others
leave, and workers with more than a fair share return the rest when they renew. A worker that
sends little takes little, and the others divide the rest. A share that is not renewed ends, which
covers workers that died or have nothing to send.

A share is renewed about every second by the sends that need it, so it costs nothing while there is
nothing to send. While the store does not answer, a worker keeps the share it had.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from msgspec import Struct

from oncebridge.base.clock import Clock, Dice
from oncebridge.errors import StoreError
from oncebridge.events.key import make_key
from oncebridge.stores.api import Claims
from oncebridge.stores.cell import CellBusy, Cells, Edit

_log = logging.getLogger("oncebridge")

_RENEW_MS: Final = 1000
_SOON_MS: Final = 250
"""Renewed sooner while other workers have not returned what this worker may have."""
_SHARE_MS: Final = 4000
"""How long a share is valid without a renewal."""
_KEEP_MS: Final = 3_600_000
_LEASE_MS: Final = 2000
"""Half a share: the other workers still have theirs when the lease of a dead worker ends."""
_PATIENCE_S: Final = 1.5
"""Short enough for several renewals while a share is valid."""
_LEAST: Final = 1.0
"""A worker with something to send asks for at least this many events a second."""


class _WorkerShare(Struct, frozen=True, array_like=True):
    """The share of one worker."""

    share: float
    until_ms: int
    """In the store's time."""
    want: float
    """How many events a second it could use."""


_read = msgspec.json.Decoder(list[tuple[str, _WorkerShare]]).decode
_write = msgspec.json.Encoder().encode


def key_of(route: str) -> bytes:
    """Return the key of the record with the shares of *route*."""
    return make_key(route, b"rate", "", "", ())


class RateShare:
    """
    A share of *rate*, the rate of *route* over all workers that use *store*.

    *changed* is called when the share changes. *is_open* is what to do until the store has
    answered for the first time: True to use the whole rate, False to wait.
    """

    def __init__(
        self,
        store: Claims,
        route: str,
        rate: float,
        *,
        clock: Clock,
        dice: Dice,
        changed: Callable[[], None],
        is_open: bool,
    ) -> None:
        self._rate = float(rate)  # what the settings have is a type of its own
        self._clock = clock
        self._dice = dice
        self._changed = changed
        self._is_open = is_open
        self._key = key_of(route)
        self._cells = Cells(store, dice, lease_ms=_LEASE_MS)
        self._name = ""
        self._share = 0.0
        self._from_ms = 0
        """Since when the share is valid, by the wall clock, which runs while a function is frozen."""
        self._due_ms: float = 0
        self._used = 0
        """How many events had been sent when it was last renewed, and"""
        self._used_ms = 0
        """when that was."""
        self._renewing: asyncio.Task[None] | None = None

    def current(self, used: int, *, is_short: bool) -> float:
        """
        Return how many events a second this worker may send now; renew the share if it is due.

        *used* is how many were sent in total; *is_short* is True if events wait for their turn.
        """
        now_ms = self._clock()
        if self._renewing is None and not 0 <= now_ms - self._used_ms < self._due_ms:
            want = self._rate if is_short else self._wanted(used, now_ms)
            self._used, self._used_ms = used, now_ms
            self._renewing = asyncio.get_running_loop().create_task(self._renew(want))
            self._renewing.add_done_callback(self._renewed)
        return self._share if 0 <= now_ms - self._from_ms < _SHARE_MS else 0.0

    async def aclose(self) -> None:
        """Stop renewing; the share ends by itself."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)

    def _wanted(self, used: int, now_ms: int) -> float:
        """Return twice the recent use: demand may grow before the next renewal."""
        passed_s = max(now_ms - self._used_ms, _RENEW_MS) / 1000
        return min(max(2 * (used - self._used) / passed_s, _LEAST), self._rate)

    async def _renew(self, want: float) -> None:
        from_ms = self._clock()
        self._name = self._name or self._dice.tokens(1)[0][-6:].hex()
        fair = self._rate

        def divide(memo: bytes, now_ms: int) -> bytes:
            nonlocal fair
            others = _others(memo, self._name, now_ms)
            wants = {name: entry.want for name, entry in others.items()} | {self._name: want}
            fair = _fair(wants, self._rate)[self._name]
            free = self._rate - sum([entry.share for entry in others.values()])
            share = min(fair, max(free, 0.0))
            # A part that is returned is not used any more when others can see it.
            self._share = min(self._share, share)
            mine = _WorkerShare(share, now_ms + _SHARE_MS, want)
            return _write([*others.items(), (self._name, mine)])

        try:
            async with asyncio.timeout(_PATIENCE_S):
                memo = await self._cells.edit_one(
                    self._key, Edit(divide, _KEEP_MS), patience_s=_PATIENCE_S
                )
        except CellBusy:
            self._due_ms = _SOON_MS
        except Exception as error:  # noqa: BLE001 - also a store with a fault: sending goes on
            if not isinstance(error, StoreError | TimeoutError):
                _log.exception("oncebridge.rate_not_shared")
            if self._is_open and not self._share:
                self._share = self._rate
            self._from_ms, self._due_ms = self._clock(), _RENEW_MS
        else:
            self._share = dict(_read(memo))[self._name].share
            self._from_ms = from_ms
            self._due_ms = _RENEW_MS if self._share > 0.9 * fair else _SOON_MS
        # Jitter: not all workers at the same moment.
        self._due_ms *= 0.75 + self._dice.fraction() / 2

    def _renewed(self, task: asyncio.Task[None]) -> None:
        self._renewing = None
        if not task.cancelled():
            self._changed()


def _others(memo: bytes, name: str, now_ms: int) -> dict[str, _WorkerShare]:
    """Return the shares of the other workers that have not ended."""
    try:
        entries = dict(_read(memo)) if memo else {}
    except msgspec.MsgspecError:
        entries = {}  # written by another version: its workers renew theirs soon
    return {one: e for one, e in entries.items() if e.until_ms > now_ms and one != name}


def _fair(wants: Mapping[str, float], rate: float) -> dict[str, float]:
    """Divide *rate*: the same for all, or less if they want less; the rest is divided among all."""
    fair: dict[str, float] = {}
    left = rate
    for name in sorted(wants, key=lambda one: wants[one]):
        fair[name] = min(wants[name], left / (len(wants) - len(fair)))
        left -= fair[name]
    return {name: part + left / len(wants) for name, part in fair.items()}
