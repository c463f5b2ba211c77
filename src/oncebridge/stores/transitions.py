"""
The operations of a store, as pure functions.

Each takes the stored record (None if there is none), the request and the store's time, and
returns the answer and the record to store instead (None: leave it as it is). Stores that decide
in this process use these functions. Stores that decide on a server implement the same rules
there (in Lua or SQL). The contract suite tests both.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from oncebridge.events.key import Part
from oncebridge.stores.api import (
    Busy,
    Claim,
    ClaimAnswer,
    Commit,
    CommitAnswer,
    Duplicate,
    ExtendAnswer,
    Extension,
    Held,
    Memory,
    Mismatch,
    Record,
    Release,
    ReleaseAnswer,
    RememberAnswer,
    Reply,
    Want,
)

State = Literal["absent", "claimed", "free", "done"]


def state(record: Record | None, now_ms: int) -> State:
    """Return the state at *now_ms*; a done record past its window is absent, purged or not."""
    if record is None:
        return "absent"
    ended = now_ms >= record.until_ms
    if record.fate is None:
        return "free" if ended else "claimed"
    return "absent" if ended else "done"


def claim(
    records: Sequence[Record | None], want: Want, now_ms: int
) -> tuple[ClaimAnswer, list[Record]]:
    """Decide one claim, given the records of its parts in the order of the parts."""
    if not any(records):  # the common case by far: no part has a record
        written: list[Record] = []
        held: tuple[Held, ...] = ()
        for part in want.parts:  # mostly one: faster than a comprehension
            written.append(_first_attempt(part, want, now_ms))
            held += (Held(part.key, want.generation, 1, want.memo),)
        return Claim(want.token, held, now_ms), written
    states = [state(record, now_ms) for record in records]
    answer = _refusal(records, states, want, now_ms)
    if answer is not None:
        return answer
    written = [
        record
        if record is not None and _owns(record, want.token)
        else _next_attempt(record, where, part, want, now_ms)
        for record, where, part in zip(records, states, want.parts, strict=True)
    ]
    held = tuple(Held(r.key, r.generation, r.attempts, r.memo) for r in written)
    return Claim(want.token, held, now_ms), [
        new for new, old in zip(written, records, strict=True) if new is not old
    ]


def _refusal(
    records: Sequence[Record | None], states: Sequence[State], want: Want, now_ms: int
) -> tuple[ClaimAnswer, list[Record]] | None:
    """
    Return the answer that refuses the claim, by precedence; None if it is granted.

    A claimed part comes before a done tier: if the answer were *duplicate* while the identifying
    part is only claimed, the event would be lost if the worker that holds it dies.
    """
    last = records[-1]
    if last is not None and states[-1] == "done" and _same(last.hash, want.parts[-1].hash):
        return _duplicate(last, want.parts[-1], now_ms)
    left = 0
    holder = b""
    for record, where in zip(records, states, strict=True):
        if record is not None and where == "claimed" and not _owns(record, want.token):
            left, holder = max((left, holder), (record.until_ms - now_ms, record.key))
    if left:
        return Busy(holder, left), []
    done = [
        (record, part)
        for record, where, part in zip(records, states, want.parts, strict=True)
        if record is not None and where == "done"
    ]
    for record, part in reversed(done):
        if not _same(record.hash, part.hash):
            return Mismatch(record.key, record.memo), []
    for record, part in done:
        return _duplicate(record, part, now_ms)
    return None


def _duplicate(record: Record, part: Part, now_ms: int) -> tuple[Duplicate, list[Record]]:
    assert record.fate is not None  # noqa: S101 - only called for done records
    answer = Duplicate(record.key, record.fate, record.memo)
    if not (part.slide_ms and record.hard_until_ms):
        return answer, []
    until = min(now_ms + part.slide_ms, record.hard_until_ms)
    if until <= record.until_ms:
        return answer, []
    return answer, [replace(record, until_ms=until, keep_until_ms=until)]


def _next_attempt(
    record: Record | None, where: State, part: Part, want: Want, now_ms: int
) -> Record:
    # Other content starts a new generation: under the old one, a late commit of the old
    # content would mark the new content done, and it would be lost.
    if record is None or where != "free" or not _same(record.hash, part.hash):
        return _first_attempt(part, want, now_ms)
    until = now_ms + want.lease_ms
    return replace(
        record,
        token=want.token,
        until_ms=until,
        attempts=record.attempts + 1,
        hash=record.hash or part.hash,
        keep_until_ms=until + want.keep_ms,
    )


def _first_attempt(part: Part, want: Want, now_ms: int) -> Record:
    until = now_ms + want.lease_ms
    keep_until = until + want.keep_ms
    return Record(
        part.key, want.token, want.generation, until, 1, part.hash, None, want.memo, 0, keep_until
    )


def commit(record: Record | None, asked: Commit, now_ms: int) -> tuple[CommitAnswer, Record | None]:
    """
    Decide one commit; fenced by generation, not by token or lease.

    A done record past its window is still compared: a commit that is sent again gets *already*
    as long as the record exists.
    """
    # A store may keep only the first bytes of a done record's generation. Such a record is not
    # written here, so they are enough to tell *already* from *fenced*.
    if (
        record is None
        or not record.generation
        or not asked.generation.startswith(record.generation)
    ):
        return Reply.FENCED, None
    if record.fate is not None:
        return Reply.ALREADY, None
    until = now_ms + asked.window_ms
    return Reply.COMMITTED, Record(
        record.key,
        b"",
        record.generation,
        until,
        record.attempts,
        record.hash,
        asked.fate,
        record.memo if asked.memo is None else asked.memo,
        now_ms + asked.hard_ms if asked.hard_ms else 0,
        until,
    )


def release(
    record: Record | None, asked: Release, now_ms: int
) -> tuple[ReleaseAnswer, Record | None]:
    """Decide one release; only the current holder may release."""
    if record is None or not _owns(record, asked.token):
        return Reply.FENCED, None
    until = now_ms + asked.delay_ms
    return Reply.RELEASED, replace(
        record,
        token=b"",
        until_ms=until,
        attempts=max(record.attempts - 1, 0) if asked.unsent else record.attempts,
        memo=record.memo if asked.memo is None else asked.memo,
        keep_until_ms=until + asked.keep_ms,
    )


def extend(
    record: Record | None, asked: Extension, now_ms: int
) -> tuple[ExtendAnswer, Record | None]:
    """Decide one extension; a lease that has ended counts until another worker claims the key."""
    if record is None or not _owns(record, asked.token):
        return Reply.FENCED, None
    until = now_ms + asked.lease_ms
    gained = max(until - record.until_ms, 0)
    return Reply.EXTENDED, replace(
        record, until_ms=until, keep_until_ms=record.keep_until_ms + gained
    )


def remember(
    record: Record | None, asked: Memory, now_ms: int
) -> tuple[RememberAnswer, Record | None]:
    """Decide one memory; written unless the key is claimed or done."""
    where = state(record, now_ms)
    if where in ("claimed", "done"):
        return Reply.KNOWN, None
    kept = record is not None and where == "free"
    until = now_ms + asked.window_ms
    return Reply.REMEMBERED, Record(
        asked.key,
        b"",
        record.generation if record is not None and kept else asked.generation,
        until,
        record.attempts if record is not None and kept else 0,
        asked.hash,
        asked.fate,
        asked.memo,
        0,
        until,
    )


def load(
    record: Record | None, asked: Record, now_ms: int
) -> tuple[Literal[Reply.REMEMBERED, Reply.KNOWN], Record | None]:
    """Decide one record of another store; written if the key is absent."""
    if state(record, now_ms) != "absent":
        return Reply.KNOWN, None
    return Reply.REMEMBERED, asked


def may_forget(record: Record | None, now_ms: int) -> bool:
    """Return True if an operator may remove the record: it exists, and no worker holds it."""
    return record is not None and state(record, now_ms) != "claimed"


def _owns(record: Record, token: bytes) -> bool:
    # A record that was released or is done has no token, and so no owner.
    return bool(token) and record.token == token


def _same(stored: bytes, asked: bytes) -> bool:
    return stored == asked or not stored or not asked
