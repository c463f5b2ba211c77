"""
What an audit found, as plain data: every report is a view of this.

Times are milliseconds since 1970, places are `FILE:LINE`. Nothing here holds a payload: ids,
topics, sources and entities, as they stood in the events, and numbers.
"""

from typing import Literal

from msgspec import Struct

from oncebridge.engine.causes import Cause
from oncebridge.engine.verdict import Verdict


class Gaps(Struct, frozen=True):
    """How long after its first arrival an event came again."""

    count: int
    p50_ms: int
    p90_ms: int
    p99_ms: int
    max_ms: int
    histogram: tuple[tuple[int, int], ...]
    """Upper bounds in milliseconds, each with how many lie below it and above the last."""


class ArrivalExample(Struct, frozen=True):
    """One arrival that stands for many."""

    place: str
    id: str
    source: str
    detail_type: str
    entity: str
    gap_ms: int | None
    first_place: str
    first_id: str


class CauseFound(Struct, frozen=True):
    """One cause, how often, and some of the arrivals that have it."""

    cause: Cause
    count: int
    gaps: Gaps | None
    examples: tuple[ArrivalExample, ...]


class Suspicion(Struct, frozen=True):
    """
    Arrivals with which the rules do what somebody may not want.

    Passed on, and no duplicates: double emissions where no rule has `quiet`, states out of
    order where none has `latest`, ids reused. Dropped: what has the key of another event and
    other content, and repeats that may be a return to an earlier state.
    """

    kind: Literal["double-emission", "out-of-order", "id-reused", "other-content", "return"]
    count: int
    examples: tuple[ArrivalExample, ...]


class NamedCounts(Struct, frozen=True):
    """A topic, entity, source or rule, and what came of it."""

    name: str
    arrivals: int
    repeats: int
    """Arrivals that are not passed on."""


class NaiveKey(Struct, frozen=True):
    """What a simple way to deduplicate would have done with this very recording."""

    name: Literal["conversation-id", "envelope-id", "detail-hash", "five-minutes"]
    title: str
    lost: int
    """Events of which no arrival would have passed."""
    let_through: int
    """Arrivals beyond the first of an event that would have passed."""
    examples: tuple[ArrivalExample, ...]
    """Of what would have been lost; otherwise of what would have been let through."""


class TimeSlice(Struct, frozen=True):
    """What arrived in one span of the recording."""

    begins_ms: int
    verdicts: dict[Verdict, int]


class Difference(Struct, frozen=True):
    """An arrival with which two sets of rules do not do the same."""

    place: str
    id: str
    source: str
    detail_type: str
    before: Verdict
    after: Verdict
    passed_before: bool
    """It is passed on, which of a conflict the verdict alone does not say."""
    passed_after: bool
    rule_before: str
    rule_after: str
    same_as: str
    """Where the arrival is that it counts as a repeat of, under whichever rules it does."""


class RulesComparison(Struct, frozen=True):
    """How candidate rules would have done otherwise."""

    changed: int
    more: int
    """Arrivals that only the candidate would pass on."""
    fewer: int
    """Arrivals that the candidate would no longer pass on."""
    by_change: tuple[tuple[Verdict, Verdict, int], ...]
    differences: tuple[Difference, ...]
    """In the order of arrival; bounded, `changed` has all."""


class FieldStudy(Struct, frozen=True):
    """
    What a sample tells of events that no rule of ours knows, for one source and detail-type.

    *identifying* is a field whose values never come with other content, apart from *volatile*
    paths; None where there is none.
    """

    source: str
    detail_type: str
    sampled: int
    volatile: tuple[str, ...]
    identifying: str | None
    entity: str | None
    would_merge: int
    """How many of the sample would be repeats by that, and are none today."""


class AuditReport(Struct, frozen=True, kw_only=True):
    """What an audit found."""

    files: int
    size: int
    """Bytes as they lie on disk."""
    records: int
    unreadable: dict[str, int]
    """Records that hold no event, by reason."""
    unreadable_places: tuple[str, ...]
    events: int
    logical: int
    """How many different events: what is passed on at least once."""
    verdicts: dict[Verdict, int]
    after_window: int
    """Arrivals that are passed on again, because the window of an earlier one was over."""
    clock: Literal["recorded", "published", "none"]
    """Whence the times are: written down on arrival, taken from the events, or there are none."""
    first_ms: int | None
    last_ms: int | None
    causes: tuple[CauseFound, ...]
    """Most frequent first; together they are all repeats."""
    gaps: Gaps | None
    suspicions: tuple[Suspicion, ...]
    over_time: tuple[TimeSlice, ...]
    topics: tuple[NamedCounts, ...]
    entities: tuple[NamedCounts, ...]
    sources: tuple[NamedCounts, ...]
    rules: tuple[NamedCounts, ...]
    naive: tuple[NaiveKey, ...]
    studies: tuple[FieldStudy, ...]
    trial: RulesComparison | None
    window_ms: int
    """The window of the rules, where they name no other."""
    took_s: float
