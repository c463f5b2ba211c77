"""
Compare-and-set on small records that several workers share.

A cell is a record in the store that is never done: its memo is the value. To edit cells, a
worker claims their records, which excludes other workers, computes the new values and releases
the records with them: two round trips for any number of cells. Every store can do this, and the
claim returns the store's time, so that all workers compare times of one clock.

An edit is applied exactly once, with two exceptions. If the store does not answer for a whole
lease after the new value was sent, the edit may be applied twice. If this host was suspended
during the edit for longer than the lease, the edit may be lost. Where that matters, make the
change idempotent: then an edit with an unknown result is repeated, and is never lost.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, repeat
from typing import Final

from msgspec import Struct

from oncebridge.base.clock import Dice
from oncebridge.errors import StoreError, StoreUnavailable
from oncebridge.stores.api import (
    Busy,
    Claim,
    ClaimAnswer,
    Claims,
    NoAnswer,
    ReleaseAnswer,
    Releases,
    Reply,
    Wants,
    answered,
    folded,
)

LEASE_MS: Final = 5000
"""A worker that dies during an edit blocks its cells for so long."""
PATIENCE_S: Final = 10.0
"""Longer than a lease: a worker may have died during an edit."""
_PAUSES_S: Final = (0.02, 0.08, 0.3, 1.0, 2.0)
"""Another worker is done after two round trips, unless it died or many want the same cell."""

Change = Callable[[bytes, int], bytes | None]
"""
Return the new value for the present one (empty: none yet) and the store's time in ms; None to
leave the value as it is. May be called more than once.
"""

CellAnswer = bytes | Busy | NoAnswer
"""The value of a cell, or why it cannot be claimed or written now."""


class CellBusy(StoreUnavailable):
    """Other workers kept editing the cell; the store itself answers."""

    def __init__(self, left_ms: int) -> None:
        super().__init__("another worker is editing the cell")
        self.left_ms = left_ms
        """When the other worker's lease ends, unless it extends it."""


# --- requests and answers -------------------------------------------------------------


def value_or_raise(answer: CellAnswer) -> bytes:
    """Return the value, or raise `CellBusy` or `StoreUnavailable`."""
    if isinstance(answer, Busy):
        raise CellBusy(answer.left_ms)
    return answered(answer)


def _value(answer: ClaimAnswer | int) -> CellAnswer:
    """Return the value of a cell that was claimed; raise `StoreError` if it is not a cell."""
    if isinstance(answer, int):  # HELD: as it was asked for, and so without a value
        return b""
    if isinstance(answer, Claim):
        return answer.held[0].memo
    if isinstance(answer, Busy | NoAnswer):
        return answer
    raise StoreError(
        f"the record {answer.key.hex()} is an event's and not a cell; it cannot be edited"
    )


# --- claiming and editing --------------------------------------------------------------


class Edit(Struct, frozen=True):
    """A change of one cell, and how long its value is kept afterwards."""

    change: Change
    keep_ms: int


class Hold(Struct, frozen=True):
    """The result of claiming several cells in one call."""

    tokens: Mapping[bytes, bytes]
    keeps: Mapping[bytes, int]
    answers: dict[bytes, CellAnswer] = {}
    now_ms: int = 0
    """The store's time."""
    ends_s: float = 0.0
    """When the lease ends, by the running loop's clock."""


class Cells(Struct, eq=False):
    """
    The cells in *store*.

    A worker that dies during an edit blocks its cells for *lease_ms*. Edits wait for other workers
    and, with *waits_for_store*, for a store that does not answer; callers that edit periodically
    do not need that. *idempotent* applies to all changes.
    """

    store: Claims
    dice: Dice
    lease_ms: int = LEASE_MS
    waits_for_store: bool = True
    idempotent: bool = False
    unknown: dict[bytes, bytes] = {}
    """Tokens of claims that may still exist: unanswered, or cancelled before the answer."""

    async def edit_one(self, key: bytes, edit: Edit, *, patience_s: float = PATIENCE_S) -> bytes:
        """
        Edit a cell and return its value.

        Raise `StoreUnavailable` if the value could not be written within *patience_s*
        (`CellBusy` if other workers were the reason); `StoreError` if the record under the key
        is not a cell.
        """
        return value_or_raise((await self.edit({key: edit}, patience_s=patience_s))[key])

    async def edit(
        self, edits: Mapping[bytes, Edit], *, patience_s: float = PATIENCE_S
    ) -> dict[bytes, CellAnswer]:
        """
        Edit several cells, in two round trips; return their values.

        For a cell that could not be written within *patience_s*, return the reason.
        """
        now_s = asyncio.get_running_loop().time
        ends_s = now_s() + patience_s
        answers: dict[bytes, CellAnswer] = {}
        retried = (Busy, NoAnswer) if self.waits_for_store else (Busy,)
        left = edits
        for pause_s in _pauses():
            answers |= await self._edit_once(left) if left else {}
            left = {k: edit for k, edit in left.items() if isinstance(answers[k], retried)}
            if not left or now_s() + pause_s >= ends_s:
                break
            await self._pause(pause_s)
        return answers

    async def claim(self, keeps: Mapping[bytes, int]) -> Hold:
        """
        Claim cells once, without waiting; *keeps* says how long the value of each is kept.

        An earlier claim or release of a cell that got no answer is ended first.
        """
        ends_s = asyncio.get_running_loop().time() + self.lease_ms / 1000
        unknown = {key: self.unknown.pop(key) for key in keeps if key in self.unknown}
        if unknown:
            replies = await self.release(Hold(unknown, keeps), dict.fromkeys(unknown))
            for reply in replies.values():
                if isinstance(reply, NoAnswer):
                    return Hold({}, keeps, dict.fromkeys(keeps, reply))
        # Fresh for each claim: a release that is still on its way must not end a later hold.
        token, generation = self.dice.tokens(2)
        tokens, keep_ms = dict.fromkeys(keeps, token), folded([*keeps.values()])
        wants = Wants([*keeps], token, generation, self.lease_ms, keep_ms)
        try:
            claimed = await self.store.claim(wants)
            answers = dict(zip(keeps, map(_value, claimed.each), strict=True))
        except BaseException as error:
            self.unknown |= tokens
            if not isinstance(error, StoreUnavailable):
                raise
            return Hold(tokens, keeps, dict.fromkeys(keeps, NoAnswer(str(error))))
        self.unknown |= {key: token for key, one in answers.items() if isinstance(one, NoAnswer)}
        return Hold(tokens, keeps, answers, claimed.now_ms, ends_s)

    async def release(
        self, hold: Hold, values: Mapping[bytes, bytes | None]
    ) -> dict[bytes, ReleaseAnswer]:
        """
        Release cells with their new *values*; None leaves a value as it is.

        With *waits_for_store*, the request is repeated until the lease has ended.
        """
        now_s = asyncio.get_running_loop().time
        replies: dict[bytes, ReleaseAnswer] = {}
        left = [*values]
        try:
            for pause_s in _pauses():
                token = folded([hold.tokens[key] for key in left])
                keep_ms = folded([hold.keeps[key] for key in left])
                memo = folded([values[key] for key in left])
                try:
                    answers = await self.store.release(
                        Releases(left, token, 0, keep_ms, memo, unsent=True)
                    )
                    replies |= zip(left, answers, strict=True)
                except StoreUnavailable as error:
                    replies |= dict.fromkeys(left, NoAnswer(str(error)))
                left = [key for key in left if isinstance(replies[key], NoAnswer)]
                if not left or not self.waits_for_store or now_s() >= hold.ends_s:
                    break
                await self._pause(pause_s)
        finally:
            self.unknown |= {key: hold.tokens[key] for key in left}
        return replies

    async def _edit_once(self, edits: Mapping[bytes, Edit]) -> dict[bytes, CellAnswer]:
        hold = await self.claim({key: edit.keep_ms for key, edit in edits.items()})
        held = {key: value for key, value in hold.answers.items() if isinstance(value, bytes)}
        if not held:
            return hold.answers
        try:
            after = {key: edits[key].change(value, hold.now_ms) for key, value in held.items()}
        except BaseException:
            with suppress(StoreError):
                await self.release(hold, dict.fromkeys(held))
            raise
        replies = await self.release(hold, after)
        # No other worker can have ended a hold whose lease still runs: a release that is fenced then
        # was applied before, and its answer was lost.
        lease_runs = asyncio.get_running_loop().time() < hold.ends_s and not self.idempotent
        written = (Reply.RELEASED, Reply.FENCED) if lease_runs else (Reply.RELEASED,)
        changed = {key: value for key, value in after.items() if value is not None}
        answers = hold.answers | changed
        for key in changed:
            reply = replies[key]
            if reply not in written:
                answers[key] = reply if isinstance(reply, NoAnswer) else Busy(key, 0)
        return answers

    async def _pause(self, about_s: float) -> None:
        await asyncio.sleep(2 * about_s * self.dice.fraction())


def _pauses() -> Iterator[float]:
    return chain(_PAUSES_S, repeat(_PAUSES_S[-1]))
