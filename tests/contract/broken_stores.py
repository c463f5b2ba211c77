"""
Stores with one fault each, to see whether the suites notice.

Every one is a `MemoryStore`, or `Carried` where its records have to be read out, that is
right in all but one thing. `FAULTS` names for each at least one case that has to fail, and
whether a random walk can see it too.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import ClassVar

from msgspec.structs import replace

from oncebridge.stores.api import (
    HELD,
    Busy,
    Claim,
    ClaimAnswer,
    ClaimAnswers,
    CommitAnswer,
    Commits,
    Duplicate,
    ExtendAnswer,
    Extensions,
    Fate,
    Memories,
    Memory,
    Mismatch,
    Record,
    ReleaseAnswer,
    Releases,
    RememberAnswer,
    Reply,
    Store,
    Want,
    Wants,
)
from oncebridge.stores.conditional import VersionedRecord
from oncebridge.stores.memory import MemoryStore, _name
from oncebridge.testing import ManualClock, StoreContract, StoreMachine

from .test_conditional_store import BackendInMemory, StoreInMemory


class Faulty(MemoryStore):
    """What the faults have in common: they look, one item at a time."""

    async def claim(self, wants: Wants) -> ClaimAnswers:
        return ClaimAnswers.of(wants, [await self.claim_one(want) for want in wants])

    async def claim_one(self, want: Want) -> ClaimAnswer:
        (answer,) = await super().claim(Wants.of([want]))
        return answer

    async def look(self, key: bytes) -> Record | None:
        (record,) = await self.peek([key])
        return record

    async def records(self, want: Want) -> list[Record]:
        return [record for record in await self.peek([p.key for p in want.parts]) if record]

    def put(self, record: Record) -> None:
        self._write(_name(record.key), record, is_new=False)

    def is_free(self, record: Record | None) -> bool:
        return record is not None and record.fate is None and record.until_ms <= self._clock()


class UnfencedRelease(Faulty):
    async def release(self, releases: Releases) -> list[ReleaseAnswer]:
        held = [await self.look(asked.key) for asked in releases]
        return await super().release(
            Releases.of(
                [
                    replace(asked, token=record.token) if record and record.token else asked
                    for asked, record in zip(releases, held, strict=True)
                ]
            )
        )


class UnfencedExtend(Faulty):
    async def extend(self, extensions: Extensions) -> list[ExtendAnswer]:
        held = [await self.look(asked.key) for asked in extensions]
        return await super().extend(
            Extensions.of(
                [
                    replace(asked, token=record.token) if record and record.token else asked
                    for asked, record in zip(extensions, held, strict=True)
                ]
            )
        )


class CommitByKeyAlone(Faulty):
    async def commit(self, commits: Commits) -> list[CommitAnswer]:
        held = [await self.look(asked.key) for asked in commits]
        return await super().commit(
            Commits.of(
                [
                    replace(asked, generation=record.generation) if record else asked
                    for asked, record in zip(commits, held, strict=True)
                ]
            )
        )


class CommitOnlyUnderALease(Faulty):
    """Safe, but what was delivered late is delivered again."""

    async def commit(self, commits: Commits) -> list[CommitAnswer]:
        answers = []
        for asked in commits:
            record = await self.look(asked.key)
            late = self.is_free(record)
            answers += [Reply.FENCED] if late else await super().commit(Commits.of([asked]))
        return answers


class RepeatedCommitMovesTheWindow(Faulty):
    async def commit(self, commits: Commits) -> list[CommitAnswer]:
        answers = await super().commit(commits)
        for asked, answer in zip(commits, answers, strict=True):
            record = await self.look(asked.key)
            if answer is Reply.ALREADY and record is not None:
                self.put(replace(record, until_ms=self._clock() + asked.window_ms))
        return answers


class NoExpiryCondition(Faulty):
    """Whatever is there counts, as with `attribute_not_exists` alone."""

    async def claim_one(self, want: Want) -> ClaimAnswer:
        for record in await self.records(want):
            if record.fate is not None and record.until_ms <= self._clock():
                return Duplicate(record.key, record.fate, record.memo)
        return await super().claim_one(want)


class BusyAsDuplicate(Faulty):
    async def claim_one(self, want: Want) -> ClaimAnswer:
        answer = await super().claim_one(want)
        return Duplicate(answer.key, Fate.DELIVERED, b"") if isinstance(answer, Busy) else answer


class MismatchAsDuplicate(Faulty):
    async def claim_one(self, want: Want) -> ClaimAnswer:
        answer = await super().claim_one(want)
        if isinstance(answer, Mismatch):
            return Duplicate(answer.key, Fate.DELIVERED, answer.memo)
        return answer


class OwnTokenUnknown(Faulty):
    """A dropped reply then means busy against oneself for a whole lease."""

    async def claim_one(self, want: Want) -> ClaimAnswer:
        for record in await self.records(want):
            if record.token == want.token and record.until_ms > self._clock():
                return Busy(record.key, record.until_ms - self._clock())
        return await super().claim_one(want)


class TakeOverStartsAGeneration(Faulty):
    async def claim_one(self, want: Want) -> ClaimAnswer:
        before = {record.key: record for record in await self.records(want)}
        answer = await super().claim_one(want)
        if not isinstance(answer, Claim):
            return answer
        held = []
        for part in answer.held:
            old, new = before.get(part.key), await self.look(part.key)
            if self.is_free(old) and new is not None and old.token != new.token:
                self.put(replace(new, generation=want.generation))
                part = replace(part, generation=want.generation)  # noqa: PLW2901
            held.append(part)
        return replace(answer, held=tuple(held))


class TakeOverUncounted(Faulty):
    async def claim_one(self, want: Want) -> ClaimAnswer:
        answer = await super().claim_one(want)
        if not isinstance(answer, Claim):
            return answer
        for part in answer.held:
            record = await self.look(part.key)
            if record is not None:
                self.put(replace(record, attempts=1))
        return replace(answer, held=tuple(replace(part, attempts=1) for part in answer.held))


class HashIgnoredOnFree(Faulty):
    async def claim_one(self, want: Want) -> ClaimAnswer:
        free = {record.key for record in await self.records(want) if self.is_free(record)}
        parts = (replace(part, hash=b"") if part.key in free else part for part in want.parts)
        return await super().claim_one(replace(want, parts=tuple(parts)))


class DelayForgotten(Faulty):
    async def release(self, releases: Releases) -> list[ReleaseAnswer]:
        return await super().release(
            Releases.of([replace(asked, delay_ms=0) for asked in releases])
        )


class UnsentIgnored(Faulty):
    async def release(self, releases: Releases) -> list[ReleaseAnswer]:
        return await super().release(
            Releases.of([replace(asked, unsent=False) for asked in releases])
        )


class UnsentForgotten(Faulty):
    """What was never counted leaves nothing behind, not even that it may have been delivered."""

    async def release(self, releases: Releases) -> list[ReleaseAnswer]:
        answers = await super().release(releases)
        for asked, answer in zip(releases, answers, strict=True):
            record = await self.look(asked.key)
            if answer is Reply.RELEASED and record is not None and not record.attempts:
                self.put(replace(record, generation=asked.token, memo=b""))
        return answers


class KeepingNeverShortened(Faulty):
    async def release(self, releases: Releases) -> list[ReleaseAnswer]:
        held = [await self.look(asked.key) for asked in releases]
        answers = await super().release(releases)
        for old, answer in zip(held, answers, strict=True):
            if answer is Reply.RELEASED and old is not None:
                record = await self.look(old.key)
                assert record is not None
                longest = max(old.keep_until_ms, record.keep_until_ms)
                self.put(replace(record, keep_until_ms=longest))
        return answers


class PartsOneByOne(Faulty):
    async def claim_one(self, want: Want) -> ClaimAnswer:
        held = []
        for part in want.parts:
            answer = await super().claim_one(replace(want, parts=(part,)))
            if not isinstance(answer, Claim):
                return answer
            held += answer.held
        return Claim(want.token, tuple(held), self._clock())


class DoneTierBeforeBusy(Faulty):
    """Fatal: the event is lost when the worker that holds its own key dies."""

    async def claim_one(self, want: Want) -> ClaimAnswer:
        for part in want.parts[:-1]:
            alone = await self.look(part.key)
            if alone is not None and alone.fate is not None and alone.until_ms > self._clock():
                return await super().claim_one(replace(want, parts=(part,)))
        return await super().claim_one(want)


class EndlessSliding(Faulty):
    async def claim_one(self, want: Want) -> ClaimAnswer:
        answer = await super().claim_one(want)
        if isinstance(answer, Duplicate):
            record = await self.look(answer.key)
            slide = next(part.slide_ms for part in want.parts if part.key == answer.key)
            if slide and record is not None and record.hard_until_ms:
                self.put(replace(record, until_ms=max(record.until_ms, self._clock() + slide)))
        return answer


class PurgeByUntil(Faulty):
    """The lease's end is taken for the end of keeping, and the attempts are gone."""

    async def purge(self, limit: int = 1000) -> int:
        lapsed = [r for r in self._open.values() if r.until_ms <= self._clock()]
        for record in lapsed:
            self._remove(_name(record.key))
        return len(lapsed) + await super().purge(limit)


class ForgetUnderAClaim(Faulty):
    async def forget(self, keys: Sequence[bytes]) -> list[bool]:
        there = [await self.look(key) is not None for key in keys]
        for key, yes in zip(keys, there, strict=True):
            if yes:
                self._remove(_name(key))
        return there


class AnswersOutOfOrder(Faulty):
    """As a store may that sorts its rows against deadlocks and forgets to sort back."""

    async def claim(self, wants: Wants) -> ClaimAnswers:
        return await super().claim(Wants.of(sorted(wants, key=lambda want: want.parts[0].key)))


# --- calls as columns ----------------------------------------------------------------


class ReleaseOfAllOfTheToken(Faulty):
    """As with `DELETE ... WHERE token = $1`: the keys are not looked at."""

    async def release(self, releases: Releases) -> list[ReleaseAnswer]:
        rows = [
            replace(asked, key=record.key)
            for asked in releases
            for record in self._open.values()
            if asked.token and record.token == asked.token and record.key not in releases.keys
        ]
        await super().release(Releases.of({row.key: row for row in rows}.values()))
        return await super().release(releases)


class ExtensionOfAllOfTheToken(Faulty):
    async def extend(self, extensions: Extensions) -> list[ExtendAnswer]:
        rows = [
            replace(asked, key=record.key)
            for asked in extensions
            for record in self._open.values()
            if asked.token and record.token == asked.token and record.key not in extensions.keys
        ]
        await super().extend(Extensions.of({row.key: row for row in rows}.values()))
        return await super().extend(extensions)


class CommitOfAllOfTheGeneration(Faulty):
    """Fatal: what was claimed with it and not sent yet is lost."""

    async def commit(self, commits: Commits) -> list[CommitAnswer]:
        rows = [
            replace(asked, key=record.key)
            for asked in commits
            for record in self._open.values()
            if record.generation == asked.generation and record.key not in commits.keys
        ]
        await super().commit(Commits.of({row.key: row for row in rows}.values()))
        return await super().commit(commits)


class HeldByAttemptsAlone(MemoryStore):
    """Fatal: after a release that does not count, the record has an older generation."""

    async def claim(self, wants: Wants) -> ClaimAnswers:
        answers = await super().claim(wants)
        each = [
            HELD
            if isinstance(answer, Claim) and {held.attempts for held in answer.held} == {1}
            else answer
            for answer in answers.each
        ]
        return replace(answers, each=each)


class HeldByGenerationAndAttempts(MemoryStore):
    """What the first copy has left in the memo is not told: that it may have been delivered."""

    async def claim(self, wants: Wants) -> ClaimAnswers:
        answers = await super().claim(wants)
        each = [
            HELD
            if isinstance(answer, Claim)
            and {(held.attempts, held.generation) for held in answer.held} == {(1, want.generation)}
            else answer
            for want, answer in zip(wants, answers.each, strict=True)
        ]
        return replace(answers, each=each)


class DetailsOfOwnClaims(Faulty):
    """A claim that is sent again is answered as if it were special."""

    async def claim(self, wants: Wants) -> ClaimAnswers:
        known = {record.key for want in wants for record in await self.records(want)}
        answers = await super().claim(wants)
        each = [
            answer if want.parts[-1].key in known else short
            for want, answer, short in zip(wants, answers, answers.each, strict=True)
        ]
        return replace(answers, each=each)


class ValuesByPlaceAmongTheNew(MemoryStore):
    """Absent keys are written together, and get the values that stand first in each column."""

    async def claim(self, wants: Wants) -> ClaimAnswers:
        found = iter(await self.peek(wants.keys))
        is_new = [not any(next(found) for _ in want.parts) for want in wants]
        new = [at for at, fresh in enumerate(is_new) if fresh]
        rows = [
            replace(want, memo=wants[new.index(at)].memo if at in new else want.memo)
            for at, want in enumerate(wants)
        ]
        return replace(await super().claim(Wants.of(rows)), asked=wants)


class AnswersOfTheNewFirst(MemoryStore):
    """As a store may that inserts first and then looks at what was there."""

    async def claim(self, wants: Wants) -> ClaimAnswers:
        answers = await super().claim(wants)
        return replace(answers, each=sorted(answers.each, key=lambda each: each != HELD))


class FirstValueForAll(MemoryStore):
    """A column is read as if it were one value."""

    column: ClassVar[str]

    async def claim(self, wants: Wants) -> ClaimAnswers:
        values = getattr(wants, self.column)
        if isinstance(values, list):
            wants = replace(wants, **{self.column: values[0]})
        return await super().claim(wants)


class FirstMemoForAll(FirstValueForAll):
    column = "memo"


class FirstTokenForAll(FirstValueForAll):
    """Callers whose requests were merged then hold one token, of which all but one know nothing."""

    column = "token"


class FirstGenerationForAll(FirstValueForAll):
    column = "generation"


class FirstContentForAll(FirstValueForAll):
    column = "hash"


class CommitWithTheFirstGeneration(MemoryStore):
    async def commit(self, commits: Commits) -> list[CommitAnswer]:
        if isinstance(commits.generation, list):
            commits = replace(commits, generation=commits.generation[0])
        return await super().commit(commits)


class ContentByEvent(MemoryStore):
    """The content of a key is looked up at the place of its event."""

    async def claim(self, wants: Wants) -> ClaimAnswers:
        if isinstance(wants.hash, list):
            hashes = [wants.hash[at] for at, want in enumerate(wants) for _ in want.parts]
            wants = replace(wants, hash=hashes)
        return await super().claim(wants)


class GroupsAnsweredByKey(MemoryStore):
    async def claim(self, wants: Wants) -> ClaimAnswers:
        answers = await super().claim(wants)
        each = zip(wants, answers.each, strict=True)
        return replace(answers, each=[answer for want, answer in each for _ in want.parts])


class TimeOfTheCaller(MemoryStore):
    """The clock of the host is told, and the store has another."""

    async def claim(self, wants: Wants) -> ClaimAnswers:
        return replace(await super().claim(wants), now_ms=self._clock() + 3_600_000)


# --- reading records out, and putting them in ---------------------------------------


class Carried(StoreInMemory):
    """A store whose records can be carried to another, as that in memory cannot."""

    def __init__(self, *, clock: ManualClock) -> None:
        super().__init__(BackendInMemory(clock))

    def put(self, record: Record) -> None:
        self.backend.entries[record.key] = VersionedRecord(record, next(self.backend.numbers))


class ScanSkipsWhereItGoesOn(Carried):
    """The place is that of the next record, and the scan goes on behind it."""

    async def scan(self, place: bytes = b"", limit: int = 1000) -> tuple[list[Record], bytes]:
        records, place = await super().scan(place, limit + 1)
        return records[:limit], place


class ScanByNumber(Carried):
    """As with OFFSET: what goes meanwhile moves the others out of sight."""

    async def scan(self, place: bytes = b"", limit: int = 1000) -> tuple[list[Record], bytes]:
        at = int(place or b"0")
        keys = list(islice(sorted(self.backend.entries), at, at + limit))
        after = b"%d" % (at + limit) if len(keys) == limit else b""
        return [self.backend.entries[key].record for key in keys], after


class ScanOfWhatIsDone(Carried):
    """The attempts of what failed and the newest states of entities would stay behind."""

    async def scan(self, place: bytes = b"", limit: int = 1000) -> tuple[list[Record], bytes]:
        records, place = await super().scan(place, limit)
        return [record for record in records if record.fate is not None], place


class LoadOverwrites(Carried):
    async def load(self, records: Sequence[Record]) -> list[RememberAnswer]:
        for record in records:
            self.put(record)
        return [Reply.REMEMBERED] * len(records)


class LoadAsRemembered(Carried):
    """Each record becomes a memory with a window of its own, and is done."""

    async def load(self, records: Sequence[Record]) -> list[RememberAnswer]:
        now = await self.now_ms()
        return await self.remember(
            Memories.of(
                [
                    Memory(
                        one.key,
                        one.generation,
                        one.fate or Fate.DELIVERED,
                        max(one.until_ms - now, 1),
                        one.hash,
                        one.memo,
                    )
                    for one in records
                ]
            )
        )


class LoadStartsWindowsAnew(Carried):
    async def load(self, records: Sequence[Record]) -> list[RememberAnswer]:
        until = await self.now_ms() + 10**9
        return await super().load(
            [replace(r, until_ms=until, keep_until_ms=until) if r.fate else r for r in records]
        )


class LoadBlockedByTheExpired(Carried):
    """Whatever is there counts, also a window that is over and not purged yet."""

    async def load(self, records: Sequence[Record]) -> list[RememberAnswer]:
        there = await self.peek([record.key for record in records])
        fresh = [record for record, old in zip(records, there, strict=True) if old is None]
        answers = iter(await super().load(fresh))
        return [Reply.KNOWN if old else next(answers) for old in there]


class LoadWithoutItsKeeping(Carried):
    async def load(self, records: Sequence[Record]) -> list[RememberAnswer]:
        return await super().load([replace(one, keep_until_ms=one.until_ms) for one in records])


# --- the same suites, over any store -----------------------------------------------


def contract_of(store_class: type[MemoryStore | Carried]) -> type[StoreContract]:
    class Contract(StoreContract):
        portable = issubclass(store_class, Carried)

        @asynccontextmanager
        async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
            async with store_class(clock=clock) as store:
                yield store

    return Contract


def machine_of(store_class: type[MemoryStore | Carried]) -> type[StoreMachine]:
    class Machine(StoreMachine):
        @asynccontextmanager
        async def open(self, clock: ManualClock) -> AsyncIterator[Store]:
            async with store_class(clock=clock) as store:
                yield store

    return Machine


def _name_of(worker: str) -> bytes:
    return blake2b(worker.encode(), digest_size=16).digest()


class WorkerNameAsToken(contract_of(MemoryStore)):
    """The fault is in who asks: a worker that gives its own name instead of fresh bits."""

    def token(self, worker: str = "") -> bytes:
        return _name_of(worker) if worker else super().token()


class WorkerNameAsTokenMachine(machine_of(MemoryStore)):
    def token(self, worker: str) -> bytes:
        return _name_of(worker)


class GenerationUsedAgain(contract_of(MemoryStore)):
    """The fault is in who asks: a worker that gives all its calls the same generation."""

    def generation(self, worker: str = "") -> bytes:
        return _name_of(worker) if worker else super().generation()


def failures(contract: type[StoreContract]) -> dict[str, AssertionError]:
    """Run all cases and tell which promises were broken; any other error is our own."""
    broken = {}
    for case in contract.cases():
        try:
            asyncio.run(contract().run(case))
        except AssertionError as error:
            broken[case] = error
    return broken


@dataclass(frozen=True)
class Fault:
    name: str
    contract: type[StoreContract]
    machine: type[StoreMachine]
    convicted_by: set[str]
    seen_by_machine: bool = field(default=True)


def _fault(
    store_class: type[MemoryStore | Carried], *convicted_by: str, seen_by_machine: bool = True
) -> Fault:
    return Fault(
        store_class.__name__,
        contract_of(store_class),
        machine_of(store_class),
        set(convicted_by),
        seen_by_machine,
    )


FAULTS = [
    _fault(
        UnfencedRelease,
        "test_a_release_with_an_old_token_is_refused_and_changes_nothing",
        "test_a_lapsed_lease_moves_on_and_fences_the_old_owner",
        "test_a_delayed_release_does_not_free_the_next_attempt_of_the_same_worker",
        "test_a_holder_that_lost_its_register_cannot_write_to_it",
    ),
    _fault(
        UnfencedExtend,
        "test_an_extension_with_an_old_token_is_refused_and_changes_nothing",
        "test_lapsed_parts_move_on_together_and_fence_the_old_owner",
    ),
    _fault(
        CommitByKeyAlone,
        "test_a_commit_from_before_the_windows_end_does_not_land_on_the_next_claim",
        "test_a_late_commit_of_the_old_content_does_not_mark_the_new_one_done",
        "test_a_commit_of_another_generation_is_fenced_and_changes_nothing",
    ),
    _fault(
        CommitOnlyUnderALease,
        "test_a_commit_counts_after_the_lease_ran_out",
    ),
    _fault(
        RepeatedCommitMovesTheWindow,
        "test_a_commit_repeated_is_already_and_changes_nothing",
    ),
    _fault(
        NoExpiryCondition,
        "test_a_key_past_its_window_passes_although_its_record_is_still_there",
        "test_a_window_ends_on_the_millisecond",
    ),
    _fault(
        BusyAsDuplicate,
        "test_a_claimed_key_is_busy_for_everybody_else",
        "test_of_many_claims_at_once_exactly_one_wins_each_key",
    ),
    _fault(
        MismatchAsDuplicate,
        "test_done_with_other_content_is_a_mismatch",
    ),
    _fault(
        OwnTokenUnknown,
        "test_a_claim_whose_reply_was_dropped_may_be_sent_again",
        "test_a_claim_of_parts_sent_again_is_the_same_claim",
    ),
    Fault(
        "WorkerNameAsToken",
        WorkerNameAsToken,
        WorkerNameAsTokenMachine,
        {
            "test_a_delayed_release_does_not_free_the_next_attempt_of_the_same_worker",
            "test_a_release_that_lands_twice_does_not_free_the_next_attempt_of_the_same_worker",
        },
    ),
    _fault(
        TakeOverStartsAGeneration,
        "test_a_take_over_keeps_generation_and_memo_and_counts_an_attempt",
        "test_a_late_commit_counts_after_a_take_over_and_the_other_hears_already",
    ),
    _fault(
        TakeOverUncounted,
        "test_every_take_over_counts_one_attempt",
    ),
    _fault(
        HashIgnoredOnFree,
        "test_a_free_key_with_other_content_starts_a_new_generation",
        "test_a_late_commit_of_the_old_content_does_not_mark_the_new_one_done",
    ),
    _fault(
        DelayForgotten,
        "test_a_release_with_a_delay_keeps_the_key_busy_until_then",
        "test_a_delay_ends_on_the_millisecond",
    ),
    _fault(
        UnsentIgnored,
        "test_unsent_gives_the_attempt_back",
    ),
    _fault(
        UnsentForgotten,
        "test_an_unsent_release_hands_its_memo_to_the_same_generation",
    ),
    _fault(
        KeepingNeverShortened,
        "test_a_register_may_be_given_back_for_less_time_than_it_was_claimed_for",
        seen_by_machine=False,  # to which a record past keeping may stay
    ),
    _fault(
        PartsOneByOne,
        "test_any_claimed_part_makes_all_busy_and_none_is_taken",
        "test_of_overlapping_claims_of_parts_none_is_half_taken",
    ),
    _fault(
        DoneTierBeforeBusy,
        "test_a_claimed_identifying_part_is_busy_although_a_tier_is_done",
    ),
    _fault(
        EndlessSliding,
        "test_a_sliding_window_is_never_pushed_past_its_hard_end",
    ),
    _fault(
        PurgeByUntil,
        "test_attempts_survive_the_lease_until_the_end_of_keeping",
        "test_a_released_key_is_kept_as_long_as_the_release_says",
    ),
    _fault(
        ForgetUnderAClaim,
        "test_a_live_claim_cannot_be_forgotten",
    ),
    _fault(
        AnswersOutOfOrder,
        "test_a_batch_of_hundreds_of_mixed_wants_answers_in_order",
    ),
    _fault(
        ReleaseOfAllOfTheToken,
        "test_a_release_of_some_keys_of_a_call_leaves_the_others_held",
        "test_a_later_call_with_the_same_token_leaves_the_earlier_one_alone",
    ),
    _fault(
        ExtensionOfAllOfTheToken,
        "test_an_extension_of_some_keys_of_a_call_leaves_the_others_as_they_are",
    ),
    _fault(
        CommitOfAllOfTheGeneration,
        "test_a_commit_of_some_keys_of_a_call_leaves_the_others_held",
    ),
    Fault(
        "GenerationUsedAgain",
        GenerationUsedAgain,
        machine_of(MemoryStore),
        {"test_a_workers_later_call_for_other_content_is_not_done_by_its_earlier_commit"},
        seen_by_machine=False,  # the reference answers it in the same way
    ),
    _fault(
        HeldByAttemptsAlone,
        "test_held_says_that_generation_attempts_and_memo_are_as_asked",
        "test_held_says_it_of_every_key_of_a_group",
        "test_an_unsent_release_hands_its_memo_to_the_same_generation",
    ),
    _fault(
        HeldByGenerationAndAttempts,
        "test_a_call_sent_again_with_another_memo_is_told_the_first_one",
        seen_by_machine=False,  # it rarely repeats a claim after a release that does not count
    ),
    _fault(
        DetailsOfOwnClaims,
        "test_a_call_sent_again_is_the_same_claim",
        "test_a_part_of_a_call_sent_again_is_the_same_claim",
    ),
    _fault(
        ValuesByPlaceAmongTheNew,
        "test_a_call_sent_again_takes_only_the_keys_that_it_did_not_get",
    ),
    _fault(
        AnswersOfTheNewFirst,
        "test_a_batch_of_hundreds_of_mixed_wants_answers_in_order",
        "test_the_keys_of_a_call_may_differ_in_everything",
    ),
    _fault(
        FirstMemoForAll,
        "test_each_want_of_a_batch_has_its_own_lease_and_memo",
        "test_the_calls_of_several_workers_may_be_joined",
    ),
    _fault(
        FirstTokenForAll,
        "test_the_calls_of_several_workers_may_be_joined",
    ),
    _fault(
        FirstGenerationForAll,
        "test_the_calls_of_several_workers_may_be_joined",
    ),
    _fault(
        FirstContentForAll,
        "test_the_keys_of_a_call_may_differ_in_everything",
    ),
    _fault(
        CommitWithTheFirstGeneration,
        "test_the_calls_of_several_workers_may_be_joined",
    ),
    _fault(
        ContentByEvent,
        "test_groups_of_keys_have_values_of_their_own_and_each_key_its_content",
    ),
    _fault(
        GroupsAnsweredByKey,
        "test_single_and_grouped_wants_in_one_batch_answer_in_order",
        "test_groups_of_keys_have_values_of_their_own_and_each_key_its_content",
    ),
    _fault(
        TimeOfTheCaller,
        "test_the_answers_to_a_call_tell_the_time_of_the_store",
    ),
    # The machine carries nothing from store to store.
    _fault(
        ScanSkipsWhereItGoesOn,
        "test_a_scan_in_small_steps_misses_nothing",
        seen_by_machine=False,
    ),
    _fault(
        ScanByNumber,
        "test_what_stands_there_during_the_whole_scan_is_seen",
        seen_by_machine=False,
    ),
    _fault(
        ScanOfWhatIsDone,
        "test_a_scan_sees_every_record_as_it_is",
        seen_by_machine=False,
    ),
    _fault(
        LoadOverwrites,
        "test_loading_leaves_what_is_there_alone",
        "test_loading_twice_changes_nothing",
        "test_of_many_loads_at_once_exactly_one_wins_each_key",
        seen_by_machine=False,
    ),
    _fault(
        LoadAsRemembered,
        "test_records_are_loaded_as_they_are",
        "test_loaded_attempts_go_on_counting",
        "test_a_loaded_delay_is_waited_for",
        "test_a_loaded_window_slides_up_to_its_hard_end",
        seen_by_machine=False,
    ),
    _fault(
        LoadStartsWindowsAnew,
        "test_records_are_loaded_as_they_are",
        "test_a_loaded_window_ends_when_its_record_says",
        seen_by_machine=False,
    ),
    _fault(
        LoadBlockedByTheExpired,
        "test_loading_takes_the_place_of_what_is_past_its_window",
        seen_by_machine=False,
    ),
    _fault(
        LoadWithoutItsKeeping,
        "test_records_are_loaded_as_they_are",
        "test_what_was_loaded_is_not_purged_before_its_time",
        seen_by_machine=False,
    ),
]
