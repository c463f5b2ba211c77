"""
Find arrivals for which the rules may be wrong.

| kind            | condition                                                                 |
| --------------- | ------------------------------------------------------------------------- |
| double-emission | the same state of an entity again within `quiet`, with only a time changed |
| out-of-order    | an event that happened before an earlier arrival of its entity and topic   |
| id-reused       | an envelope id that arrived with other content before                      |
| other-content   | dropped as a duplicate by its key, but its content differs from the first, |
|                 | apart from what the rule ignores                                           |
| return          | a dropped duplicate, but the entity had another state in between, and no   |
|                 | time in it shows which of the two it is                                    |

Rules with `quiet` and `latest` handle the first two themselves.
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Final, Literal

from oncebridge.audit.findings import Findings
from oncebridge.audit.report import Suspicion
from oncebridge.audit.table import Table
from oncebridge.base.clock import ms
from oncebridge.engine.causes import Cause
from oncebridge.events.rules import Rule

_Kind = Literal["double-emission", "out-of-order", "id-reused", "other-content", "return"]

_OTHER_CONTENT: Final = "SELECT ord, first AS other FROM repeats WHERE is_other"


class SuspicionFinder:
    """Finds arrivals for which the rules may be wrong."""

    def __init__(
        self, table: Table, found: Findings, rules: Sequence[Rule], quiet: timedelta, most: int
    ) -> None:
        self._table = table
        self._found = found
        self._rules = rules
        self._quiet_ms = ms(quiet)
        self._most = most

    def all(self) -> tuple[Suspicion, ...]:
        """Return every suspicion that has an arrival."""
        return tuple(self._found_any())

    def _found_any(self) -> Iterator[Suspicion]:
        cases: tuple[tuple[_Kind, str], ...] = (
            ("double-emission", self._double()),
            ("out-of-order", self._out_of_order()),
            ("id-reused", self._id_reused()),
            ("other-content", _OTHER_CONTENT),
            ("return", self._returns()),
        )
        for kind, sql in cases:
            # `other` is the arrival that makes this one suspicious.
            self._table.run(f"CREATE OR REPLACE TABLE suspects AS {sql}")
            count = self._table.count("suspects")
            if count:
                pairs = self._table.rows(
                    f"SELECT ord, other FROM suspects ORDER BY ord LIMIT {self._most}"  # noqa: S608
                )
                yield Suspicion(kind, count, tuple(self._found.examples_of(dict(pairs)).values()))

    def _passed(self) -> str:
        """Return SQL for the delivered arrivals, with their topics."""
        return "(SELECT * FROM arrivals ANTI JOIN repeats USING (ord)) JOIN topics USING (kind)"

    def _double(self) -> str:
        step = self._table.times.step
        without = self._without("quiet")
        return f"""
            WITH again AS (
                SELECT entity, state FROM arrivals WHERE entity IS NOT NULL AND state IS NOT NULL
                GROUP BY ALL HAVING count(*) > 1
            ), near AS (
                SELECT ord, lag(ord) OVER (PARTITION BY entity, topic, state ORDER BY ord) AS other
                FROM {self._passed()} SEMI JOIN again USING (entity, state)
                WHERE {without}
            )
            SELECT ord, other FROM near
            WHERE other IS NOT NULL AND ord // {step} - other // {step} < {self._quiet_ms}
            """  # noqa: S608

    def _out_of_order(self) -> str:
        without = self._without("latest")
        return f"""
            WITH several AS (
                SELECT entity, topic FROM arrivals JOIN topics USING (kind)
                WHERE entity IS NOT NULL AND happened > 0 GROUP BY ALL HAVING count(*) > 1
            ), before AS (
                SELECT ord, happened,
                    max(happened) OVER earlier AS newest, arg_max(ord, happened) OVER earlier AS other
                FROM {self._passed()} SEMI JOIN several USING (entity, topic)
                WHERE happened > 0 AND {without}
                WINDOW earlier AS (PARTITION BY entity, topic ORDER BY ord
                    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
            )
            SELECT ord, other FROM before WHERE happened < newest
            """  # noqa: S608

    def _id_reused(self) -> str:
        return """
            WITH reused AS (
                SELECT id, arg_min(detail, ord) AS detail, min(ord) AS other
                FROM arrivals WHERE id IS NOT NULL
                GROUP BY id HAVING min(detail) <> max(detail)
            )
            SELECT ord, other FROM (SELECT * FROM arrivals ANTI JOIN repeats USING (ord)) late
            JOIN reused USING (id) WHERE late.detail <> reused.detail
            """

    def _returns(self) -> str:
        return f"""
            WITH several AS (
                SELECT DISTINCT entity, topic FROM repeats JOIN topics USING (kind)
                SEMI JOIN (SELECT ord FROM arrivals WHERE happened = -1) timeless USING (ord)
                WHERE cause = '{Cause.RE_EMISSION}' AND entity IS NOT NULL
            ), between_them AS (
                SELECT arrivals.ord, cause, coalesce(first, arrivals.ord) AS event,
                    lag(coalesce(first, arrivals.ord)) OVER entity_s AS before,
                    lag(arrivals.ord) OVER entity_s AS other
                FROM arrivals JOIN topics USING (kind)
                LEFT JOIN repeats ON repeats.ord = arrivals.ord
                SEMI JOIN several ON several.entity = arrivals.entity AND several.topic = topics.topic
                WHERE happened = -1
                WINDOW entity_s AS (PARTITION BY arrivals.entity, topic ORDER BY arrivals.ord)
            )
            SELECT ord, other FROM between_them
            WHERE cause = '{Cause.RE_EMISSION}' AND before <> event
            """  # noqa: S608

    def _without(self, part: str) -> str:
        """Return SQL that excludes rules which have *part*."""
        with_it = [at for at, rule in enumerate(self._rules) if getattr(rule, part) is not None]
        return f"rule NOT IN ({', '.join(map(str, with_it))})" if with_it else "true"
