"""
The report of an audit as plain data; terminal, page and JSON are made from it.

Times are milliseconds since 1970, places are `FILE:LINE`. A report contains ids, topics, sources
and entities of the events, and numbers, but no payload.
"""

from typing import Literal

from msgspec import Struct

from oncebridge.engine.causes import Cause
from oncebridge.engine.verdict import Verdict


class Gaps(Struct, frozen=True):
    """The time from the first arrival of an event to its duplicates."""

    count: int
    p50_ms: int
    p90_ms: int
    p99_ms: int
    max_ms: int
    histogram: tuple[tuple[int, int], ...]
    """Upper bounds in milliseconds, each with the count since the previous bound."""


class ArrivalExample(Struct, frozen=True):
    """One arrival as an example."""

    place: str
    id: str
    source: str
    detail_type: str
    entity: str
    gap_ms: int | None
    first_place: str
    first_id: str


class CauseFound(Struct, frozen=True):
    """One cause, its count, and some arrivals that have it."""

    cause: Cause
    count: int
    gaps: Gaps | None
    examples: tuple[ArrivalExample, ...]


class Suspicion(Struct, frozen=True):
    """
    Arrivals for which the rules may be wrong.

    Delivered: double emissions without a rule with `quiet`, states out of order without a rule with
    `latest`, reused ids. Dropped: arrivals with the key of another event and other content, and
    duplicates that may be a return to an earlier state.
    """

    kind: Literal["double-emission", "out-of-order", "id-reused", "other-content", "return"]
    count: int
    examples: tuple[ArrivalExample, ...]


class NamedCounts(Struct, frozen=True):
    """A topic, entity, source or rule, and its counts."""

    name: str
    arrivals: int
    repeats: int
    """Arrivals that are not delivered."""


class NaiveKey(Struct, frozen=True):
    """What a simple key would have done with this recording."""

    name: Literal["conversation-id", "envelope-id", "detail-hash", "five-minutes"]
    title: str
    lost: int
    """Events of which no arrival would have been delivered."""
    let_through: int
    """Arrivals after the first of an event that would have been delivered."""
    examples: tuple[ArrivalExample, ...]
    """Of lost events; if there are none, of duplicates that were let through."""


class TimeSlice(Struct, frozen=True):
    """The verdicts in one span of the recording."""

    begins_ms: int
    verdicts: dict[Verdict, int]


class Difference(Struct, frozen=True):
    """An arrival for which two sets of rules decide differently."""

    place: str
    id: str
    source: str
    detail_type: str
    before: Verdict
    after: Verdict
    passed_before: bool
    """Whether it is delivered, which the verdict `conflict` alone does not show."""
    passed_after: bool
    rule_before: str
    rule_after: str
    same_as: str
    """The place of the arrival that it duplicates, under either set of rules."""


class RulesComparison(Struct, frozen=True):
    """How candidate rules would have decided differently."""

    changed: int
    more: int
    """Arrivals that only the candidate rules would deliver."""
    fewer: int
    """Arrivals that the candidate rules would no longer deliver."""
    by_change: tuple[tuple[Verdict, Verdict, int], ...]
    differences: tuple[Difference, ...]
    """In the order of arrival; limited, `changed` is the full count."""


class FieldStudy(Struct, frozen=True):
    """
    The study of a sample of one source and detail-type that no rule matches.

    *identifying* is a field whose values always have the same content, apart from *volatile*
    paths; None if there is none.
    """

    source: str
    detail_type: str
    sampled: int
    volatile: tuple[str, ...]
    identifying: str | None
    entity: str | None
    would_merge: int
    """How many of the sample would become duplicates by it."""


class AuditReport(Struct, frozen=True, kw_only=True):
    """The result of an audit."""

    files: int
    size: int
    """Bytes on disk."""
    records: int
    unreadable: dict[str, int]
    """Records without an event, by reason."""
    unreadable_places: tuple[str, ...]
    events: int
    logical: int
    """How many different events: those that are delivered at least once."""
    verdicts: dict[Verdict, int]
    after_window: int
    """Arrivals that are delivered again, because the window of an earlier one had ended."""
    clock: Literal["recorded", "published", "none"]
    """Origin of the times: recorded on arrival, taken from the events, or none."""
    first_ms: int | None
    last_ms: int | None
    causes: tuple[CauseFound, ...]
    """Most frequent first; together they are all duplicates."""
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
    """The window of rules that set no other."""
    took_s: float
