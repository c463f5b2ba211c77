"""
A store for backends that offer only conditional writes.

DynamoDB and S3 are such backends, and so is a Redis cluster for claims across its servers. Such a
backend cannot decide by itself, so this process does: read the record, decide with
`oncebridge.stores.transitions`, and write on the condition that the record has not changed since.
A worker that loses this race reads again. So every decision is still true when it is written.

Most claims are for new keys, and most commits follow a claim of this process, which remembers what
it wrote. So both first write what is right in that case, for the whole batch from its columns.
That takes one round trip. Only what turns out to be stored otherwise is read and decided on.

A condition cannot ask such a backend for its time. Time is that of this host, corrected by the
dates in the backend's answers. It may be wrong by *margin_ms*, so a claim is taken over only when
its lease has been over for that long.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import add
from typing import Any, ClassVar, Final, Protocol, TypeVar, cast

from msgspec import Struct
from msgspec.structs import astuple, replace

from oncebridge.base.clock import Clock
from oncebridge.errors import StoreUnavailable
from oncebridge.stores import transitions
from oncebridge.stores.api import (
    HELD,
    ClaimAnswers,
    Column,
    Columns,
    CommitAnswer,
    Commits,
    ExtendAnswer,
    Extensions,
    Fate,
    Memories,
    NoAnswer,
    Record,
    ReleaseAnswer,
    Releases,
    RememberAnswer,
    Reply,
    Wants,
    answered,
    spread,
)

_V = TypeVar("_V")
_W = TypeVar("_W")
_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")

_ROUNDS = 12  # how many races to lose before giving up
_MOST_HELD = 20_000
_CONTENDED = NoAnswer("other workers keep changing this key")
_COMMITTED: Final = Reply.COMMITTED  # looking up a member of an enum is slow
_UNKNOWN: Final[Mapping[bytes, "VersionedRecord"]] = {}


class Records(Columns[Record], frozen=True, gc=False):
    """Records, held as columns."""

    row: ClassVar = Record

    token: Column[bytes] = b""
    generation: Column[bytes] = b""
    until_ms: Column[int] = 0
    attempts: Column[int] = 0
    hash: Column[bytes] = b""
    fate: Column[Fate | None] = None
    memo: Column[bytes] = b""
    hard_until_ms: Column[int] = 0
    keep_until_ms: Column[int] = 0


class VersionedRecord(Struct, frozen=True, gc=False):
    """A record as it was read, and the backend's name for this version of it."""

    record: Record | None
    """None if the backend keeps a marker for a record that was removed."""
    version: Any


class ConditionalBackend(Protocol):
    """
    The operations that `ConditionalStore` needs.

    The keys of one call are distinct. Each method returns one answer per key, in order:
    `NoAnswer` for those that the backend could not answer for. It raises `StoreUnavailable` if
    it could not answer at all. It splits large calls itself, and limits their time.
    """

    now_ms: Clock
    """Returns the backend's time, as well as it is known."""

    async def read(self, keys: Sequence[bytes]) -> list[VersionedRecord | NoAnswer | None]:
        """Read the latest state of *keys*, None for each that has no record."""
        ...

    async def write(self, records: Records, before: Column[Any]) -> list[Any]:
        """
        Write each record whose key still has the version *before* (None: no record).

        Return the new versions, and None where another version is stored.
        """
        ...

    async def write_together(
        self, records: Records, before: Column[VersionedRecord | None], sizes: Sequence[int]
    ) -> list[Any]:
        """
        Write as `write` does, but groups of *sizes* records each completely or not at all.

        This is for backends that cannot write several records at once: it writes the records of
        each group one after the other, and undoes them if one fails. The order is that of the
        keys, so that one of several overlapping groups succeeds. A worker that dies in between
        leaves a hold that ends with its lease.
        """
        entries = spread(before, len(records))
        going = [sorted(places, key=records.keys.__getitem__) for places in places_of(sizes)]
        answers: list[Any] = [None] * len(records)
        for turn in range(max(sizes, default=0)):
            going = [group for group in going if turn < len(group)]
            places = [group[turn] for group in going]
            expected = [version_of(entries[at]) for at in places]
            written = await self.write(records.select(places), expected)
            for group, answer in zip(going, written, strict=True):
                answers[group[turn]] = answer
                if not _is_version(answer):
                    done = [(entries[at], records.keys[at], answers[at]) for at in group[:turn]]
                    await _undo(self, done)
                    for at in group:
                        answers[at] = answer
            going = [group for group in going if _is_version(answers[group[turn]])]
        return answers

    async def remove(self, keys: Sequence[bytes], before: Sequence[Any]) -> list[bool | NoAnswer]:
        """Remove each record that still has the version *before*; return which were removed."""
        ...


class ConditionalStore:
    """
    The operations of a store over *backend*.

    Inherit this and `Portable`, and write `open`, `scan`, `purge` and `aclose`.
    """

    def __init__(self, backend: ConditionalBackend, *, margin_ms: int = 0) -> None:
        self._backend = backend
        self._margin_ms = margin_ms
        self._held: dict[bytes, tuple[Any, ...]] = {}
        """What this process wrote last for each key that it holds: the version, then the record."""

    async def now_ms(self) -> int:
        return self._backend.now_ms()

    async def claim(self, wants: Wants) -> ClaimAnswers:
        now = self._backend.now_ms()
        found = await self._write(_first_attempts(wants, now), None, wants.sizes)
        each, known = _replies(found, HELD)
        if known:
            answers = await self._claim_known(wants.select(known))
            now = max(now, answers.now_ms)
            for at, answer in zip(known, answers.each, strict=True):
                each[at] = answer
        return ClaimAnswers(wants, each, now)

    async def _claim_known(self, wants: Wants) -> ClaimAnswers:
        """Claim keys that probably have records: read first."""
        asked = [*wants]
        keys = [[part.key for part in want.parts] for want in asked]
        return ClaimAnswers.of(
            wants, await self._decide(transitions.claim, asked, keys, margin_ms=self._margin_ms)
        )

    async def commit(self, commits: Commits) -> list[CommitAnswer]:
        generations = spread(commits.generation, len(commits))
        rows = [self._held.pop(key, ()) for key in commits.keys]
        found: list[Any] = [None] * len(commits)
        held = [at for at, row in enumerate(rows) if row and row[3] == generations[at]]
        if held:
            ours = [rows[at] for at in held]
            some = commits if len(held) == len(commits) else commits.select(held)
            done = _done(some, ours, self._backend.now_ms())
            written = await self._backend.write(done, [row[0] for row in ours])
            for at, version in zip(held, written, strict=True):
                found[at] = version
        answers, others = _replies(found, _COMMITTED)
        if others:
            decided = await self._decide_each(transitions.commit, commits.select(others))
            for at, answer in zip(others, decided, strict=True):
                answers[at] = answer
        return answers

    async def release(self, releases: Releases) -> list[ReleaseAnswer]:
        return await self._decide_each(transitions.release, releases)

    async def extend(self, extensions: Extensions) -> list[ExtendAnswer]:
        return await self._decide_each(transitions.extend, extensions)

    async def remember(self, memories: Memories) -> list[RememberAnswer]:
        return await self._decide_each(transitions.remember, memories, margin_ms=self._margin_ms)

    async def load(self, records: Sequence[Record]) -> list[RememberAnswer]:
        asked = Records.of(records)
        return await self._decide_each(transitions.load, asked, margin_ms=self._margin_ms)

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        entries = await self._read_or_raise(keys)
        return [_record_of(entries[key]) for key in keys]

    async def forget(self, keys: Sequence[bytes]) -> list[bool]:
        gone = dict.fromkeys(keys, False)
        pending = keys
        for _ in range(_ROUNDS):
            entries = await self._read_or_raise(pending)
            now = self._backend.now_ms()
            going = {
                key: entry.version
                for key, entry in entries.items()
                if entry and transitions.may_forget(_with_margin(entry, self._margin_ms), now)
            }
            removed = await self._backend.remove([*going], [*going.values()])
            gone |= {key: is_gone is True for key, is_gone in zip(going, removed, strict=True)}
            pending = [key for key in going if not gone[key]]
            if not pending:
                return [gone[key] for key in keys]
        raise StoreUnavailable(_CONTENDED.reason)

    async def _remove_past(self, entries: Sequence[VersionedRecord]) -> int:
        """Remove the records that are past keeping; return how many."""
        now = self._backend.now_ms() - self._margin_ms
        past = {
            entry.record.key: entry.version
            for entry in entries
            if entry.record is not None and entry.record.keep_until_ms <= now
        }
        return (await self._backend.remove([*past], [*past.values()])).count(True)

    async def _read_or_raise(self, keys: Sequence[bytes]) -> dict[bytes, VersionedRecord | None]:
        read = await self._backend.read(keys) if keys else ()
        return dict(zip(keys, map(answered, read), strict=True))

    async def _write(
        self,
        records: Records,
        before: Column[VersionedRecord | None],
        sizes: Sequence[int] | None = None,
    ) -> list[Any]:
        """Write groups of *sizes*, or single records; return the first answer of each group."""
        if sizes is None:
            written = await self._backend.write(records, mapped(version_of, before))
        else:
            written = await self._backend.write_together(records, before, sizes)
        columns = [spread(column, len(written)) for column in astuple(records)]
        for row in zip(written, *columns, strict=True):
            version, key, token, *_ = row
            if token and _is_version(version):
                self._held[key] = row
        while len(self._held) > _MOST_HELD:
            del self._held[next(iter(self._held))]
        return written if sizes is None else [written[places.start] for places in places_of(sizes)]

    # --- item by item ------------------------------------------------------------------

    async def _decide_each(
        self,
        decide: Callable[[Record | None, _Item, int], tuple[_Answer, Record | None]],
        asked: Columns[_Item],
        *,
        margin_ms: int = 0,
    ) -> list[_Answer | NoAnswer]:
        """Decide items about one record each, first by what this process wrote last."""

        def decide_one(
            records: Sequence[Record | None], item: _Item, now_ms: int
        ) -> tuple[_Answer, list[Record]]:
            answer, after = decide(records[0], item, now_ms)
            return answer, [] if after is None else [after]

        rows = [self._held.pop(key) for key in asked.keys if key in self._held]
        known = {key: VersionedRecord(Record(key, *rest), version) for version, key, *rest in rows}
        keys = [[key] for key in asked.keys]
        return await self._decide(decide_one, [*asked], keys, known, margin_ms=margin_ms)

    async def _decide(
        self,
        decide: Callable[[Sequence[Record | None], _Item, int], tuple[_Answer, list[Record]]],
        items: Sequence[_Item],
        keys: Sequence[Sequence[bytes]],
        known: Mapping[bytes, VersionedRecord] = _UNKNOWN,
        *,
        margin_ms: int = 0,
    ) -> list[_Answer | NoAnswer]:
        """
        Read the records of *keys*, decide each item by its own, and write what follows from it.

        What is *known* is not read. An answer counts only if its records were written, or if they
        were just read. A hold counts for *margin_ms* longer.
        """
        answers: list[_Answer | NoAnswer] = [_CONTENDED] * len(items)
        pending: Sequence[int] = range(len(items))
        for _ in range(_ROUNDS):
            wanted = [key for at in pending for key in keys[at] if key not in known]
            read = await self._backend.read(wanted) if wanted else ()
            entries: dict[bytes, Any] = {**dict(zip(wanted, read, strict=True)), **known}
            now = self._backend.now_ms()
            groups: dict[int, list[Record]] = {}
            again: list[int] = []
            for at in pending:
                seen = [entries[key] for key in keys[at]]
                unread = [entry for entry in seen if isinstance(entry, NoAnswer)]
                if unread:
                    answers[at] = unread[0]
                    continue
                records = [_with_margin(entry, margin_ms) for entry in seen]
                answers[at], after = decide(records, items[at], now)
                if after:
                    groups[at] = after
                elif not known.keys().isdisjoint(keys[at]):
                    again.append(at)
            again += await self._write_groups(groups, entries, answers)
            if not again:
                return answers
            for at in again:
                answers[at] = _CONTENDED
            known, pending = _UNKNOWN, again
        return answers

    async def _write_groups(
        self,
        groups: Mapping[int, Sequence[Record]],
        entries: Mapping[bytes, VersionedRecord | None],
        answers: list[_Answer | NoAnswer],
    ) -> list[int]:
        """Write records in place of *entries*; return the groups that found something else."""
        after = [record for group in groups.values() for record in group]
        if not after:
            return []
        sizes = [*map(len, groups.values())] if len(after) > len(groups) else None
        before = [entries[record.key] for record in after]
        found = await self._write(Records.of(after), before, sizes)
        written = dict(zip(groups, found, strict=True))
        for at, answer in written.items():
            if isinstance(answer, NoAnswer):
                answers[at] = answer
        return [at for at, answer in written.items() if answer is None]


def _replies(found: Sequence[Any], reply: Any) -> tuple[list[Any], list[int]]:
    """Return *reply* or `NoAnswer` for what was written, and the positions of what was not."""
    replies = [answer if isinstance(answer, NoAnswer) else reply for answer in found]
    return replies, [at for at, version in enumerate(found) if version is None]


# --- records as columns ----------------------------------------------------------------


def mapped(function: Callable[[_V], _W], column: Column[_V]) -> Column[_W]:
    """Return *function* of each value of a column."""
    return [*map(function, column)] if isinstance(column, list) else function(column)


def places_of(sizes: Sequence[int]) -> list[range]:
    """Return where groups of *sizes* are in a column."""
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _first_attempts(wants: Wants, now_ms: int) -> Records:
    """Return the records of *wants*, if their keys have none yet."""
    until = wants.by_key(mapped(now_ms.__add__, wants.lease_ms))
    keep = wants.by_key(wants.keep_ms)
    if isinstance(until, list):
        keep_until: Column[int] = [*map(add, until, spread(keep, len(until)))]
    else:
        keep_until = mapped(until.__add__, keep)
    return Records(
        wants.keys,
        wants.by_key(wants.token),
        wants.by_key(wants.generation),
        until,
        1,
        wants.hash,
        None,
        wants.by_key(wants.memo),
        0,
        keep_until,
    )


def _done(commits: Commits, rows: Sequence[tuple[Any, ...]], now_ms: int) -> Records:
    """Return what *commits* make of *rows*, which are held and have their generation."""
    _, _, _, _, _, attempts, hashes, _, memos, _, _ = zip(*rows, strict=True)
    until = mapped(now_ms.__add__, commits.window_ms)
    return Records(
        commits.keys,
        b"",
        commits.generation,
        until,
        [*attempts],
        [*hashes],
        cast("Column[Fate | None]", commits.fate),
        [
            kept if memo is None else memo
            for memo, kept in zip(spread(commits.memo, len(rows)), memos, strict=True)
        ],
        mapped(lambda hard_ms: hard_ms and now_ms + hard_ms, commits.hard_ms),
        until,
    )


# --- groups of records -----------------------------------------------------------------


async def _undo(
    backend: ConditionalBackend, written: Sequence[tuple[VersionedRecord | None, bytes, Any]]
) -> None:
    """Restore what was stored before the writes of keys, which gave them these versions."""
    old = [(entry.record, version) for entry, _, version in written if entry and entry.record]
    new = {key: version for entry, key, version in written if _record_of(entry) is None}
    if old:
        await backend.write(
            Records.of([record for record, _ in old]), [version for _, version in old]
        )
    if new:
        await backend.remove([*new], [*new.values()])


def _is_version(answer: Any) -> bool:
    return answer is not None and not isinstance(answer, NoAnswer)


def version_of(entry: VersionedRecord | None) -> Any:
    """Return the version to expect where *entry* was read."""
    return entry.version if entry is not None else None


def _record_of(entry: VersionedRecord | None) -> Record | None:
    return entry.record if entry is not None else None


def _with_margin(entry: VersionedRecord | None, margin_ms: int) -> Record | None:
    """Return the record with its hold prolonged: the holder's clock may be behind ours."""
    record = _record_of(entry)
    if record is None or not margin_ms or not record.token or record.fate is not None:
        return record
    return replace(record, until_ms=record.until_ms + margin_ms)
