"""
What follows from the answers of a sink: delivered, dead letters, or a retry, when, and at whose cost.

It updates the breaker, the rate limit and the counters, and nothing else.
"""

from collections.abc import Iterable
from datetime import timedelta

from msgspec import Struct

from oncebridge.base.clock import Dice, ms
from oncebridge.base.durations import format_duration
from oncebridge.engine.batch import Batch, BatchEntry, now_s
from oncebridge.engine.breaker import Blame, Breaker
from oncebridge.engine.counters import Books
from oncebridge.engine.rate_limit import RateLimit
from oncebridge.engine.sends import Parcel
from oncebridge.engine.settings import Settings
from oncebridge.engine.verdict import Verdict
from oncebridge.sinks.api import (
    Already,
    Closed,
    JointAnswer,
    Lost,
    Never,
    No,
    Throttled,
    Unknown,
    Unwell,
    Yes,
)
from oncebridge.stores.api import Release


class Backoff:
    """The pauses before retries, random so that workers do not retry at the same moment."""

    def __init__(self, settings: Settings, dice: Dice) -> None:
        self._first_ms = ms(settings.backoff)
        self.longest_ms = ms(settings.max_backoff)
        self._dice = dice

    def after_ms(self, times: int) -> int:
        """Return a random pause: anything from 0 to 1 s, 2 s, 4 s … 5 min (full jitter)."""
        doubled = self._first_ms << min(max(times, 1) - 1, 20)
        return int(self._dice.fraction() * min(doubled, self.longest_ms)) + 1

    def jittered_ms(self, left_ms: int) -> int:
        """Return *left_ms* and up to a quarter of a second more."""
        return left_ms + int(250 * self._dice.fraction()) + 1


class HandBack(Struct, frozen=True):
    """One event to return to the source: why, and after what pause."""

    entry: BatchEntry
    reason: str
    wait_ms: int
    unsent: bool = True
    """Nothing was sent, or it was the sink's fault: the attempt does not count."""
    verdict: Verdict = Verdict.FAILED

    def releases(self) -> list[Release]:
        """Return the releases of its claim; none if it has none, or lost it."""
        entry, lease = self.entry, self.entry.lease
        if lease is None or lease.is_lost:
            return []
        counted = entry.attempt - 1 if self.unsent else entry.attempt
        memo = entry.last_memo(entry.error or self.reason, counted)
        return [
            Release(key, lease.token, self.wait_ms, entry.keep_ms, memo, self.unsent)
            for key in lease.keys
        ]


class SortedAnswers(Struct, frozen=True):
    """The sink's answers to several events of a batch, grouped by what happens next."""

    batch: Batch
    taken: list[int]
    """Rows."""
    refused: list[BatchEntry]
    too_old: list[BatchEntry]
    back: list[HandBack]
    lost_races: list[tuple[BatchEntry, Already | Lost]]


class SinkAnswers(Struct, eq=False, kw_only=True):
    """Decides what follows from each answer of one sink."""

    give_up_after: timedelta | None
    books: Books
    breaker: Breaker
    blame: Blame
    rate_limit: RateLimit
    backoff: Backoff
    may_give_up: bool

    def sort(self, batch: Batch, parcels: Iterable[Parcel]) -> SortedAnswers:
        """Group events by what follows from their answers."""
        found = SortedAnswers(batch, [], [], [], [], [])
        for parcel in parcels:
            if parcel.is_taken:
                found.taken.extend(parcel.rows)
                continue
            for row, answer in zip(parcel.rows, parcel.answers, strict=True):
                if type(answer) is Yes:
                    found.taken.append(row)
                else:
                    entry = batch.entry(row)
                    entry.passed_before, entry.turn = parcel.passed_before, parcel.turn
                    self._sort_one(entry, answer, found)
        batch.forwarded.update(found.taken)
        self.rate_limit.delivered += len(found.taken)
        return found

    def _sort_one(self, entry: BatchEntry, answer: JointAnswer, found: SortedAnswers) -> None:
        match answer:
            case Already() | Lost():
                self.breaker.succeeded()
                found.lost_races.append((entry, answer))
            case Never():
                if not answer.unsent:
                    self.breaker.succeeded()
                entry.error = answer.reason
                found.refused.append(entry)
            case Yes():
                raise AssertionError
            case _:
                back = self.plan_retry(entry, answer)
                if isinstance(answer, No | Throttled) or not self._is_too_old(entry):
                    found.back.append(back)
                else:
                    found.too_old.append(entry)

    def _is_too_old(self, entry: BatchEntry) -> bool:
        """Return True if a failed event is to be given up for its age, and record why."""
        if not self.may_give_up or not entry.held or entry.is_lost:
            return False
        most_ms = entry.batch.give_up_ms(self.give_up_after, entry.keep_ms)
        if entry.age_ms() < most_ms:
            return False
        most = format_duration(timedelta(milliseconds=most_ms))
        entry.error = f"{entry.error}; not delivered within {most} of the first attempt"
        return True

    def plan_retry(
        self, entry: BatchEntry, answer: Unknown | No | Throttled | Unwell | Closed
    ) -> HandBack:
        """Decide when to retry an event the sink did not take, and whether the attempt counts."""
        backoff, breaker = self.backoff, self.breaker
        asked = min(max(answer.retry_after_ms, 0), backoff.longest_ms)
        if isinstance(answer, Throttled):
            return self._plan_throttled_retry(entry, answer, asked)
        if isinstance(answer, No) and answer.too_early:
            return HandBack(entry, answer.reason, max(backoff.after_ms(1), asked))
        is_blamed = False
        match answer:
            case Unknown():
                self.books.ambiguous += 1
                is_blamed = True
            case Unwell() | Closed():
                self.books.unwell += isinstance(answer, Unwell)
                is_blamed = self.blame.is_of(entry.key, entry.passed_before)
        if not isinstance(answer, No):
            entry.error = answer.reason
            entry.maybe_delivered = entry.maybe_delivered or not isinstance(answer, Closed)
        # The send of a lost claim was cancelled here, and a refusal that is the event's own fault
        # says nothing about the sink.
        if not entry.is_lost and (isinstance(answer, Unknown) or not is_blamed):
            event = b"" if isinstance(answer, No) else entry.key
            breaker.failed(now_s(), event=event)
        if is_blamed:
            wait = max(backoff.after_ms(entry.attempt), asked)
            return HandBack(entry, answer.reason, wait, unsent=False)
        # The sink's fault: the attempt does not count, and the pause grows with its refusals.
        left_s = breaker.left_s(now_s(), entry.key)
        wait = max(backoff.after_ms(breaker.level), asked, int(left_s * 1000))
        return HandBack(entry, answer.reason, wait)

    def _plan_throttled_retry(
        self, entry: BatchEntry, answer: Throttled, asked_ms: int
    ) -> HandBack:
        """Lower the rate, and retry when the sink accepts events again."""
        now, limit = now_s(), self.rate_limit
        self.breaker.answered()
        self.books.throttled += 1
        if answer.maybe:
            self.books.unwell += 1
            entry.maybe_delivered = True
            entry.error = answer.reason
        limit.throttled(entry.turn, asked_ms / 1000, now)
        wait = max(asked_ms, int(limit.left_s(now) * 1000)) + 1
        return HandBack(entry, answer.reason, wait)
