"""
A reference store: one dict and one clock.

Written from `docs/protocol.md` alone and on purpose without `oncebridge.stores.transitions`, so that
a mistake there is not repeated here. It is slow and simple, with one complication: a record past
keeping may or may not have been removed, so a correct store can be in more than one state
(`worlds`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from oncebridge.base.clock import Clock
from oncebridge.events.key import Part
from oncebridge.stores.api import (
    Busy,
    Claim,
    ClaimAnswer,
    Commit,
    Duplicate,
    Extension,
    Fate,
    Held,
    Memory,
    Mismatch,
    Release,
    Reply,
    Want,
)


@dataclass(slots=True)
class ReferenceRow:
    """One record, as a store should return it."""

    token: bytes
    generation: bytes
    until_ms: int
    attempts: int
    hash: bytes
    fate: Fate | None
    memo: bytes
    hard_until_ms: int
    keep_until_ms: int


class Reference:
    """A model of a store, for one item at a time: returns the answers that a store must return."""

    def __init__(self, clock: Clock, rows: dict[bytes, ReferenceRow] | None = None) -> None:
        self.clock = clock
        self.rows = rows or {}

    def worlds(self) -> Iterator["Reference"]:
        """Yield a copy of this state for each choice of rows that may have been purged."""
        loose = [key for key, row in self.rows.items() if self.clock() >= row.keep_until_ms]
        for count in range(len(loose) + 1):
            for gone in combinations(loose, count):
                rows = {key: replace(row) for key, row in self.rows.items() if key not in gone}
                yield Reference(self.clock, rows)

    def is_done(self, row: ReferenceRow | None) -> bool:
        return row is not None and row.fate is not None and self.clock() < row.until_ms

    def is_claimed(self, row: ReferenceRow | None) -> bool:
        return row is not None and row.fate is None and self.clock() < row.until_ms

    def claim(self, want: Want) -> ClaimAnswer:
        now = self.clock()
        tiers = [(part, self.rows.get(part.key)) for part in want.parts]
        done = [(part, row) for part, row in tiers if row is not None and self.is_done(row)]
        if done and done[-1][0] is want.parts[-1] and _same(*done[-1]):
            return self._duplicate(*done[-1])
        busy = [
            (row.until_ms - now, part.key)
            for part, row in tiers
            if row is not None and self.is_claimed(row) and not _owns(row, want.token)
        ]
        if busy:
            left, key = max(busy)
            return Busy(key, left)
        for part, row in reversed(done):
            if not _same(part, row):
                return Mismatch(part.key, row.memo)
        for part, row in done:
            return self._duplicate(part, row)
        return Claim(want.token, tuple(self._take(part, want) for part in want.parts), now)

    def _duplicate(self, part: Part, row: ReferenceRow) -> Duplicate:
        assert row.fate is not None
        if part.slide_ms and row.hard_until_ms:
            pushed = min(self.clock() + part.slide_ms, row.hard_until_ms)
            row.until_ms = row.keep_until_ms = max(row.until_ms, pushed)
        return Duplicate(part.key, row.fate, row.memo)

    def _take(self, part: Part, want: Want) -> Held:
        row = self.rows.get(part.key)
        if row is None or not _owns(row, want.token):
            until = self.clock() + want.lease_ms
            if row is None or row.fate is not None or not _same(part, row):
                row = ReferenceRow(b"", want.generation, 0, 0, part.hash, None, want.memo, 0, 0)
                self.rows[part.key] = row
            row.token, row.until_ms, row.attempts = want.token, until, row.attempts + 1
            row.hash, row.keep_until_ms = row.hash or part.hash, until + want.keep_ms
        return Held(part.key, row.generation, row.attempts, row.memo)

    def commit(self, asked: Commit) -> Reply:
        row = self.rows.get(asked.key)
        if row is None or row.generation != asked.generation:
            return Reply.FENCED
        if row.fate is not None:
            return Reply.ALREADY
        row.token, row.fate = b"", asked.fate
        row.until_ms = row.keep_until_ms = self.clock() + asked.window_ms
        row.hard_until_ms = self.clock() + asked.hard_ms if asked.hard_ms else 0
        row.memo = row.memo if asked.memo is None else asked.memo
        return Reply.COMMITTED

    def release(self, asked: Release) -> Reply:
        row = self.rows.get(asked.key)
        if row is None or not _owns(row, asked.token):
            return Reply.FENCED
        row.token, row.until_ms = b"", self.clock() + asked.delay_ms
        row.keep_until_ms = row.until_ms + asked.keep_ms
        row.attempts = max(row.attempts - asked.unsent, 0)
        row.memo = row.memo if asked.memo is None else asked.memo
        return Reply.RELEASED

    def extend(self, asked: Extension) -> Reply:
        row = self.rows.get(asked.key)
        if row is None or not _owns(row, asked.token):
            return Reply.FENCED
        until = self.clock() + asked.lease_ms
        row.keep_until_ms += max(until - row.until_ms, 0)
        row.until_ms = until
        return Reply.EXTENDED

    def remember(self, asked: Memory) -> Reply:
        row = self.rows.get(asked.key)
        if self.is_done(row) or self.is_claimed(row):
            return Reply.KNOWN
        free = row if row is not None and row.fate is None else None
        generation, attempts = (free.generation, free.attempts) if free else (asked.generation, 0)
        until = self.clock() + asked.window_ms
        self.rows[asked.key] = ReferenceRow(
            b"", generation, until, attempts, asked.hash, asked.fate, asked.memo, 0, until
        )
        return Reply.REMEMBERED

    def forget(self, key: bytes) -> bool:
        if self.is_claimed(self.rows.get(key)):
            return False
        return self.rows.pop(key, None) is not None


def _owns(row: ReferenceRow, token: bytes) -> bool:
    return bool(token) and row.token == token


def _same(part: Part, row: ReferenceRow) -> bool:
    return not part.hash or not row.hash or part.hash == row.hash
