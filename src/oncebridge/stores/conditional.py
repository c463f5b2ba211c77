"""
A store for backends that offer only conditional writes.

DynamoDB and S3 are such backends, and so is a Redis cluster for claims across its servers. Such a
backend cannot decide by itself, so this process does: read the record, decide with
`oncebridge.stores.transitions`, and write on the condition that the record has not changed since.
A worker that loses this race reads again. So every decision is still true when it is written.

Most claims are for new keys. A claim therefore writes first, as if there were no record, and
reads only if that fails. Most commits follow a claim of this process, which remembers what it
wrote, so a commit writes first too. Both take one round trip.

A condition cannot ask such a backend for its time. Time is that of this host, corrected by the
dates in the backend's answers. It may be wrong by *margin_ms*, so a claim is taken over only when
its lease has been over for that long.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.errors import StoreUnavailable
from oncebridge.stores import transitions
from oncebridge.stores.api import (
    Claim,
    ClaimAnswer,
    ClaimAnswers,
    Commit,
    CommitAnswer,
    Commits,
    ExtendAnswer,
    Extension,
    Extensions,
    Memories,
    Memory,
    NoAnswer,
    Record,
    Release,
    ReleaseAnswer,
    Releases,
    RememberAnswer,
    Want,
    Wants,
)

_Asked = TypeVar("_Asked", Commit, Release, Extension, Memory, Record)
_Answer = TypeVar("_Answer")

_ROUNDS = 12  # how many races to lose before giving up
_MOST_HELD = 20_000
_CONTENDED = NoAnswer("other workers keep changing this key")


class VersionedRecord(Struct, frozen=True, gc=False):
    """A record as it was read or written, and the backend's name for this version of it."""

    record: Record | None
    """None if the backend keeps a marker for a record that was removed."""
    version: Any


class RecordChange(Struct, frozen=True, gc=False):
    """Write *after* (None: remove) if *before* (None: no record) is still stored."""

    key: bytes
    before: VersionedRecord | None
    after: Record | None


class RecordChanged(Struct, frozen=True, gc=False):
    """The change was written; *entry* is what is stored now."""

    entry: VersionedRecord | None


class RecordDiffers(Struct, frozen=True, gc=False):
    """Something else is stored than the change expected; nothing was written."""


ChangeAnswer = RecordChanged | RecordDiffers | NoAnswer

_DIFFERS = RecordDiffers()


class ConditionalBackend(Protocol):
    """
    The operations that `ConditionalStore` needs.

    The keys of one call are distinct. Each method returns one answer per item, in order:
    `NoAnswer` for items that the backend could not answer for. It raises `StoreUnavailable` if
    it could not answer at all. It splits large calls itself, and limits their time.
    """

    def now_ms(self) -> int:
        """Return the backend's time, as well as it is known."""
        ...

    async def read(self, keys: Sequence[bytes]) -> list[VersionedRecord | NoAnswer | None]:
        """Read the latest state of *keys*, None for each that has no record."""
        ...

    async def change(self, changes: Sequence[RecordChange]) -> list[ChangeAnswer]:
        """Write each change whose condition holds, independently of the others."""
        ...

    async def change_together(
        self, groups: Sequence[Sequence[RecordChange]]
    ) -> list[list[RecordChanged] | RecordDiffers | NoAnswer]:
        """Write all changes of a group, or none; groups are independent of each other."""
        ...


class ConditionalStore:
    """
    The operations of a store over *backend*.

    Inherit this and write `open`, `scan`, `purge`, `now_ms` and `aclose`.
    """

    def __init__(self, backend: ConditionalBackend, *, margin_ms: int = 0) -> None:
        self._backend = backend
        self._margin_ms = margin_ms
        self._held: dict[bytes, VersionedRecord] = {}
        """The last write of this process, for each key that it holds."""

    async def claim(self, wants: Wants) -> ClaimAnswers:
        return ClaimAnswers.of(wants, await self._claim([*wants], read_first=False))

    async def _claim(self, wants: Sequence[Want], *, read_first: bool) -> list[ClaimAnswer]:
        """Claim as if there were no records, and read where that fails; or *read_first*."""
        answers: list[ClaimAnswer] = [_CONTENDED] * len(wants)
        pending: Sequence[int] = range(len(wants))
        entries: dict[bytes, VersionedRecord | None] = {}
        for _ in range(_ROUNDS):
            if read_first:
                entries, silent = await self._read(
                    [part.key for at in pending for part in wants[at].parts]
                )
                for at in pending:
                    answers[at] = _first(silent, wants[at]) or _CONTENDED
                pending = [at for at in pending if answers[at] is _CONTENDED]
            groups = self._decide_claims(wants, pending, entries, answers)
            pending = await self._write_claims(groups, answers)
            if not pending:
                break
            read_first = True
        return answers

    def _decide_claims(
        self,
        wants: Sequence[Want],
        pending: Sequence[int],
        entries: Mapping[bytes, VersionedRecord | None],
        answers: list[ClaimAnswer],
    ) -> dict[int, list[RecordChange]]:
        """Put an answer to each into *answers*; return the changes that make them true."""
        now = self._backend.now_ms()
        groups: dict[int, list[RecordChange]] = {}
        for at in pending:
            want = wants[at]
            before = [entries.get(part.key) for part in want.parts]
            answers[at], after = transitions.claim(
                [self._with_margin(entry) for entry in before], want, now
            )
            written = {record.key: record for record in after}
            if after:
                groups[at] = [
                    RecordChange(part.key, entry, written[part.key])
                    for part, entry in zip(want.parts, before, strict=True)
                    if part.key in written
                ]
            elif isinstance(answers[at], Claim):
                self._hold(before)
        return groups

    async def _write_claims(
        self, groups: Mapping[int, list[RecordChange]], answers: list[ClaimAnswer]
    ) -> list[int]:
        """Write, and return those that found another record than expected."""
        lost: list[int] = []
        outcomes = await self._write(list(groups.values()))
        for at, outcome in zip(groups, outcomes, strict=True):
            if isinstance(outcome, NoAnswer):
                answers[at] = outcome
            elif isinstance(outcome, RecordDiffers):
                answers[at] = _CONTENDED
                lost.append(at)
            elif isinstance(answers[at], Claim):
                self._hold([changed.entry for changed in outcome])
        return lost

    async def commit(self, commits: Commits) -> list[CommitAnswer]:
        return await self._each(transitions.commit, [*commits])

    async def release(self, releases: Releases) -> list[ReleaseAnswer]:
        return await self._each(transitions.release, [*releases])

    async def extend(self, extensions: Extensions) -> list[ExtendAnswer]:
        return await self._each(transitions.extend, [*extensions], keep=True)

    async def remember(self, memories: Memories) -> list[RememberAnswer]:
        return await self._each(transitions.remember, [*memories], with_margin=True)

    async def load(self, records: Sequence[Record]) -> list[RememberAnswer]:
        return await self._each(transitions.load, records, with_margin=True)

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        entries = await self._read_or_raise(keys)
        return [_record_of(entries[key]) for key in keys]

    async def forget(self, keys: Sequence[bytes]) -> list[bool]:
        gone: dict[bytes, bool] = {}
        pending = list(keys)
        for _ in range(_ROUNDS):
            entries = await self._read_or_raise(pending)
            now = self._backend.now_ms()
            going = [
                key
                for key in pending
                if transitions.may_forget(self._with_margin(entries[key]), now)
            ]
            results = await self._backend.change(
                [RecordChange(key, entries[key], None) for key in going]
            )
            pending = []
            for key, result in zip(going, results, strict=True):
                if isinstance(result, RecordChanged):
                    gone[key] = True
                    self._held.pop(key, None)
                else:
                    pending.append(key)
            if not pending:
                return [gone.get(key, False) for key in keys]
        raise StoreUnavailable(_CONTENDED.reason)

    async def _read_or_raise(self, keys: Sequence[bytes]) -> dict[bytes, VersionedRecord | None]:
        entries, silent = await self._read(keys)
        for answer in silent.values():
            raise StoreUnavailable(answer.reason)
        return entries

    # --- operations on one record each -------------------------------------------------

    async def _each(
        self,
        decide: Callable[[Record | None, _Asked, int], tuple[_Answer, Record | None]],
        items: Sequence[_Asked],
        *,
        with_margin: bool = False,
        keep: bool = False,
    ) -> list[_Answer | NoAnswer]:
        """
        Decide operations on one record each, first from what this process wrote last.

        An answer counts only if its change was written, or if the record was just read.
        *with_margin*: a hold counts for *margin_ms* longer. *keep*: the write is remembered.
        """
        answers: list[_Answer | NoAnswer] = [_CONTENDED] * len(items)
        entries: dict[bytes, VersionedRecord | None] = {}
        for item in items:
            held = self._held.pop(item.key, None)
            if held is not None:
                entries[item.key] = held
        guessed = set(entries)
        pending: Sequence[int] = range(len(items))
        for _ in range(_ROUNDS):
            read, silent = await self._read(
                [items[at].key for at in pending if items[at].key not in entries]
            )
            entries |= read
            now = self._backend.now_ms()
            changes: dict[int, RecordChange] = {}
            again: list[int] = []
            for at in pending:
                item = items[at]
                if item.key in silent:
                    answers[at] = silent[item.key]
                    continue
                entry = entries[item.key]
                record = self._with_margin(entry) if with_margin else _record_of(entry)
                answers[at], after = decide(record, item, now)
                if after is not None:
                    changes[at] = RecordChange(item.key, entry, after)
                elif item.key in guessed:
                    again.append(at)
            again += await self._write_each(changes, answers, keep=keep)
            if not again:
                return answers
            for at in again:
                answers[at] = _CONTENDED
                del entries[items[at].key]
                guessed.discard(items[at].key)
            pending = again
        return answers

    async def _write_each(
        self, changes: Mapping[int, RecordChange], answers: list[_Answer | NoAnswer], *, keep: bool
    ) -> list[int]:
        """Write, and return those that found another record than expected."""
        lost: list[int] = []
        results = await self._backend.change(list(changes.values())) if changes else []
        for at, result in zip(changes, results, strict=True):
            if isinstance(result, NoAnswer):
                answers[at] = result
            elif isinstance(result, RecordDiffers):
                lost.append(at)
            elif keep:
                self._hold([result.entry])
        return lost

    async def _read(
        self, keys: Sequence[bytes]
    ) -> tuple[dict[bytes, VersionedRecord | None], dict[bytes, NoAnswer]]:
        """Return the records that could be read, and the reasons for those that could not."""
        entries: dict[bytes, VersionedRecord | None] = {}
        silent: dict[bytes, NoAnswer] = {}
        for key, entry in zip(keys, await self._backend.read(keys) if keys else (), strict=True):
            if isinstance(entry, NoAnswer):
                silent[key] = entry
            else:
                entries[key] = entry
        return entries, silent

    async def _write(
        self, groups: Sequence[Sequence[RecordChange]]
    ) -> list[list[RecordChanged] | RecordDiffers | NoAnswer]:
        """Write groups of changes; most are groups of one, which share a call."""
        outcomes: list[list[RecordChanged] | RecordDiffers | NoAnswer] = [_DIFFERS] * len(groups)
        ones = [at for at, group in enumerate(groups) if len(group) == 1]
        several = [at for at, group in enumerate(groups) if len(group) > 1]
        if ones:
            answers = await self._backend.change([groups[at][0] for at in ones])
            for at, answer in zip(ones, answers, strict=True):
                outcomes[at] = [answer] if isinstance(answer, RecordChanged) else answer
        if several:
            together = await self._backend.change_together([groups[at] for at in several])
            for at, outcome in zip(several, together, strict=True):
                outcomes[at] = outcome
        return outcomes

    def _hold(self, entries: Sequence[VersionedRecord | None]) -> None:
        for entry in entries:
            if entry is not None and entry.record is not None:
                self._held[entry.record.key] = entry
        while len(self._held) > _MOST_HELD:
            del self._held[next(iter(self._held))]

    def _with_margin(self, entry: VersionedRecord | None) -> Record | None:
        """Return the record with its hold prolonged: the holder's clock may be behind ours."""
        record = _record_of(entry)
        if record is None or not self._margin_ms or not record.token or record.fate is not None:
            return record
        return replace(record, until_ms=record.until_ms + self._margin_ms)


async def change_in_turn(
    backend: ConditionalBackend, groups: Sequence[Sequence[RecordChange]]
) -> list[list[RecordChanged] | RecordDiffers | NoAnswer]:
    """
    Write the changes of each group one after the other, and undo them if one fails.

    For backends that cannot write several records at once. Changes are written in the order of
    their keys, so that one of several overlapping groups succeeds. A worker that dies in between
    leaves a hold that ends with its lease.
    """
    ordered = [sorted(group, key=lambda change: change.key) for group in groups]
    outcomes: list[list[RecordChanged] | RecordDiffers | NoAnswer] = [[] for _ in groups]
    for turn in range(max((len(group) for group in ordered), default=0)):
        going = [
            at
            for at, group in enumerate(ordered)
            if turn < len(group) and isinstance(outcomes[at], list)
        ]
        answers = await backend.change([ordered[at][turn] for at in going])
        for at, answer in zip(going, answers, strict=True):
            written = outcomes[at]
            assert isinstance(written, list)  # noqa: S101 - filtered above
            if isinstance(answer, RecordChanged):
                written.append(answer)
                continue
            await _undo(backend, ordered[at], written)
            outcomes[at] = answer
    return [
        _as_asked(group, sorted_, outcome)
        for group, sorted_, outcome in zip(groups, ordered, outcomes, strict=True)
    ]


async def _undo(
    backend: ConditionalBackend, changes: Sequence[RecordChange], written: Sequence[RecordChanged]
) -> None:
    undone = [
        RecordChange(change.key, done.entry, _record_of(change.before))
        for change, done in zip(changes, written, strict=False)
    ]
    if undone:
        await backend.change(undone)


def _as_asked(
    group: Sequence[RecordChange],
    ordered: Sequence[RecordChange],
    outcome: list[RecordChanged] | RecordDiffers | NoAnswer,
) -> list[RecordChanged] | RecordDiffers | NoAnswer:
    if not isinstance(outcome, list):
        return outcome
    by_key = {change.key: done for change, done in zip(ordered, outcome, strict=True)}
    return [by_key[change.key] for change in group]


def _record_of(entry: VersionedRecord | None) -> Record | None:
    return entry.record if entry is not None else None


def _first(silent: Mapping[bytes, NoAnswer], want: Want) -> NoAnswer | None:
    return next((silent[part.key] for part in want.parts if part.key in silent), None)
