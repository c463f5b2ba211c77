"""
A store on entries that can be compared and set, and nothing more.

Where a backend cannot run the operations table itself, it is run here: read the entry,
decide with `oncebridge.stores.transitions`, and write under the condition that the entry is still what
was read. Whoever loses that race reads again. So every decision holds at the moment of its
write, and the table stands in one place.

Most claims meet nothing, so a claim writes first, as if nothing were there, and reads only
where that fails. Most commits follow a claim of this process, whose entry is remembered, so a
commit writes first too. Both are one round trip.

Such backends have no clock that a condition could ask. Time is this host's, corrected by
what the backend's answers say, and may be wrong by *margin_ms*: a claim is taken over only
when it has been over for that long.
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
    Commit,
    CommitAnswer,
    ExtendAnswer,
    Extension,
    Memory,
    NoAnswer,
    Record,
    Release,
    ReleaseAnswer,
    RememberAnswer,
    Want,
)

_Asked = TypeVar("_Asked", Commit, Release, Extension, Memory, Record)
_Answer = TypeVar("_Answer")

_ROUNDS = 12  # how often to lose a race before saying that there is no answer
_MOST_HELD = 20_000
_CONTENDED = NoAnswer("others keep changing this key")


class VersionedRecord(Struct, frozen=True, gc=False):
    """What stands in one place, and the backend's name for this very version of it."""

    record: Record | None
    """None where the backend keeps the place of what was removed."""
    version: Any


class RecordChange(Struct, frozen=True, gc=False):
    """Write *after* (None: remove), if *before* (None: nothing at all) still stands there."""

    key: bytes
    before: VersionedRecord | None
    after: Record | None


class RecordChanged(Struct, frozen=True, gc=False):
    """It was written; *entry* is what stands there now."""

    entry: VersionedRecord | None


class RecordDiffers(Struct, frozen=True, gc=False):
    """Something else stands there than was thought, and nothing was written."""


ChangeAnswer = RecordChanged | RecordDiffers | NoAnswer

_DIFFERS = RecordDiffers()


class ConditionalBackend(Protocol):
    """
    What a backend has to be able to do.

    The keys of one call are distinct. Answers are one per item, in order; what the backend
    could not answer for is `NoAnswer`, and where it could not answer at all it raises
    `StoreUnavailable`. It makes its own chunks, and bounds its own calls.
    """

    def now_ms(self) -> int:
        """Tell the backend's time, as well as it is known."""
        ...

    async def read(self, keys: Sequence[bytes]) -> list[VersionedRecord | NoAnswer | None]:
        """Read the latest state of entries."""
        ...

    async def change(self, changes: Sequence[RecordChange]) -> list[ChangeAnswer]:
        """Write each entry whose condition holds, independently of the others."""
        ...

    async def change_together(
        self, groups: Sequence[Sequence[RecordChange]]
    ) -> list[list[RecordChanged] | RecordDiffers | NoAnswer]:
        """Write all entries of a group, or none; groups are independent of each other."""
        ...


class ConditionalStore:
    """
    The operations of PROTOCOL §3 over *entries*.

    Inherit this; `open`, `scan`, `purge`, `now_ms` and `aclose` are the backend's own.
    """

    def __init__(self, backend: ConditionalBackend, *, margin_ms: int = 0) -> None:
        self._backend = backend
        self._margin_ms = margin_ms
        self._held: dict[bytes, VersionedRecord] = {}
        """What this process wrote last under the keys it holds."""

    async def claim(self, wants: Sequence[Want]) -> list[ClaimAnswer]:
        return await self._claim(wants, look=False)

    async def _claim(self, wants: Sequence[Want], *, look: bool) -> list[ClaimAnswer]:
        """Claim, as if nothing were there until we know better, or after a *look*."""
        answers: list[ClaimAnswer] = [_CONTENDED] * len(wants)
        pending: Sequence[int] = range(len(wants))
        entries: dict[bytes, VersionedRecord | None] = {}
        for _ in range(_ROUNDS):
            if look:
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
            look = True
        return answers

    def _decide_claims(
        self,
        wants: Sequence[Want],
        pending: Sequence[int],
        entries: Mapping[bytes, VersionedRecord | None],
        answers: list[ClaimAnswer],
    ) -> dict[int, list[RecordChange]]:
        """Write down an answer to each, and give what has to be written for it to hold."""
        now = self._backend.now_ms()
        groups: dict[int, list[RecordChange]] = {}
        for at in pending:
            want = wants[at]
            before = [entries.get(part.key) for part in want.parts]
            answers[at], after = transitions.claim(
                [self._judged(entry) for entry in before], want, now
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
        """Write, and tell which met something else than was thought."""
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

    async def commit(self, commits: Sequence[Commit]) -> list[CommitAnswer]:
        return await self._each(transitions.commit, commits)

    async def release(self, releases: Sequence[Release]) -> list[ReleaseAnswer]:
        return await self._each(transitions.release, releases)

    async def extend(self, extensions: Sequence[Extension]) -> list[ExtendAnswer]:
        return await self._each(transitions.extend, extensions, keep=True)

    async def remember(self, memories: Sequence[Memory]) -> list[RememberAnswer]:
        return await self._each(transitions.remember, memories, judged=True)

    async def load(self, records: Sequence[Record]) -> list[RememberAnswer]:
        return await self._each(transitions.load, records, judged=True)

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
                key for key in pending if transitions.may_forget(self._judged(entries[key]), now)
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

    # --- the loop of all operations on one record --------------------------------------

    async def _each(
        self,
        decide: Callable[[Record | None, _Asked, int], tuple[_Answer, Record | None]],
        items: Sequence[_Asked],
        *,
        judged: bool = False,
        keep: bool = False,
    ) -> list[_Answer | NoAnswer]:
        """
        Decide operations on one record each, from what we think stands there first.

        Only what was written under its condition, or read just now, is an answer.
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
                record = self._judged(entry) if judged else _record_of(entry)
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
        """Write, and tell which met something else than was thought."""
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
        """Read entries; tell apart what could not be read."""
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
        """Write groups of entries; most are groups of one, which share a call."""
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

    def _judged(self, entry: VersionedRecord | None) -> Record | None:
        """See a hold as lasting a little longer: its holder's clock may be behind ours."""
        record = _record_of(entry)
        if record is None or not self._margin_ms or not record.token or record.fate is not None:
            return record
        return replace(record, until_ms=record.until_ms + self._margin_ms)


async def change_in_turn(
    backend: ConditionalBackend, groups: Sequence[Sequence[RecordChange]]
) -> list[list[RecordChanged] | RecordDiffers | NoAnswer]:
    """
    Write the entries of each group one after the other, and undo where one fails.

    For backends that cannot write several at once. In the order of the keys, so that of
    many who overlap one gets through. A worker that dies in between leaves a hold behind
    that ends with its lease.
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
            assert isinstance(written, list)  # noqa: S101 - only those go on
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
