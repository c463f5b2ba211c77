"""
Query the table of arrivals, once each has its verdict: causes, gaps, counts.

The table `repeats` has the arrivals that are not delivered because of an earlier one: duplicates,
stale and unchanged states, and conflicts that the rule drops. A duplicate `is_other` if its key is
that of the first and its content is not, where the rule does not compare the content.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from oncebridge.audit.report import ArrivalExample, CauseFound, Gaps, NamedCounts, TimeSlice
from oncebridge.audit.rows import as_read
from oncebridge.audit.table import Table
from oncebridge.audit.verdicts import UNKEYED
from oncebridge.engine.causes import Cause
from oncebridge.engine.verdict import Verdict
from oncebridge.events.rules import Rule

_S, _MIN, _H, _D = 1000, 60_000, 3_600_000, 86_400_000
BOUNDS: Final = (
    *(10, 100, 500, _S, 5 * _S, 10 * _S, 30 * _S),
    *(_MIN, 5 * _MIN, 15 * _MIN, _H, 4 * _H, 12 * _H),
    *(_D, 2 * _D, 4 * _D, 6 * _D, 14 * _D, 30 * _D),
)
"""Bounds of the histogram of gaps: common windows and retry times."""

_MOST_MOMENTS: Final = 120
_TOP: Final = 10
_WIDTHS: Final = (
    *(_S, 2 * _S, 5 * _S, 10 * _S, 15 * _S, 30 * _S),
    *(_MIN, 2 * _MIN, 5 * _MIN, 10 * _MIN, 15 * _MIN, 30 * _MIN),
    *(_H, 2 * _H, 3 * _H, 6 * _H, 12 * _H),
)


class Findings:
    """Queries the table; *rules* are those of the verdicts, the default rule last."""

    def __init__(
        self, table: Table, rules: Sequence[Rule], files: Sequence[str], most_examples: int
    ) -> None:
        self._table = table
        self._rules = rules
        self._files = files
        self._most = most_examples

    # --- causes -----------------------------------------------------------------------------

    def name_causes(self) -> None:
        """Create the table `repeats`, with the cause and the gap of each."""
        step = self._table.times.step
        self._table.run(
            f"""
            CREATE TABLE repeats AS
            WITH events AS (
                -- the repeats, and what they repeat
                SELECT ord FROM fates WHERE NOT passed
                UNION SELECT first FROM fates WHERE NOT passed
            ), seen AS (
                SELECT ord, key, id, kind, entity, said,
                    id IS NOT NULL AND key IS NOT NULL AND
                    row_number() OVER (PARTITION BY key, id, said ORDER BY ord) > 1 AS id_was_seen
                FROM arrivals SEMI JOIN events USING (ord)
            ), pairs AS (
                SELECT fates.ord, fates.first, verdict,
                    later.kind, later.entity, later.id_was_seen, later.id,
                    earlier.kind AS first_kind, earlier.id AS first_id,
                    verdict = '{Verdict.DUPLICATE}'
                    AND coalesce(later.said <> earlier.said, false) AS is_other
                FROM fates JOIN seen later ON later.ord = fates.ord
                LEFT JOIN seen earlier ON earlier.ord = fates.first
                WHERE NOT passed
            )
            SELECT pairs.ord, pairs.first, verdict, pairs.kind, pairs.entity,
                pairs.ord // {step} - pairs.first // {step} AS gap, is_other,
                CASE
                    WHEN verdict = '{Verdict.STALE}' THEN '{Cause.OUT_OF_ORDER}'
                    WHEN verdict = '{Verdict.UNCHANGED}' THEN '{Cause.DOUBLE_EMISSION}'
                    WHEN pairs.id = first_id AND (verdict = '{Verdict.CONFLICT}' OR is_other)
                        THEN '{Cause.ID_REUSED}'
                    WHEN verdict = '{Verdict.CONFLICT}' OR (is_other AND NOT id_was_seen)
                        THEN '{Cause.UNKNOWN}'
                    -- and from here on as `oncebridge.engine.causes` has it
                    WHEN kinds.replay <> '""' AND kinds.replay <> first_kinds.replay
                        THEN '{Cause.REPLAY}'
                    WHEN id_was_seen OR pairs.id = first_id THEN '{Cause.REDELIVERY}'
                    WHEN {_differ("source")} THEN '{Cause.SECOND_INTEGRATION}'
                    WHEN {_differ("account")} OR {_differ("region")} THEN '{Cause.SECOND_BUS}'
                    WHEN pairs.id IS NULL OR first_id IS NULL THEN '{Cause.UNKNOWN}'
                    ELSE '{Cause.RE_EMISSION}'
                END AS cause
            FROM pairs JOIN kinds ON kinds.kind = pairs.kind
            LEFT JOIN kinds first_kinds ON first_kinds.kind = first_kind
            """  # noqa: S608
        )

    def causes(self) -> tuple[CauseFound, ...]:
        """Count the causes, most frequent first."""
        found = self._table.rows(
            f"""
            SELECT cause, count(*) AS many, min(ord, {max(self._most, 1)})
            FROM repeats GROUP BY cause ORDER BY many DESC, cause
            """  # noqa: S608
        )
        gaps = self._gaps("cause")
        examples = self.examples([number for *_, numbers in found for number in numbers])
        return tuple(
            CauseFound(
                Cause(cause),
                many,
                gaps.get(cause),
                tuple(examples[number] for number in numbers[: self._most]),
            )
            for cause, many, numbers in found
        )

    def gaps(self) -> Gaps | None:
        """Return the time from the first arrival to each duplicate, for all causes."""
        return self._gaps("verdict").get(Verdict.DUPLICATE)

    def _gaps(self, group: str) -> dict[str, Gaps]:
        if not self._table.times.known:
            return {}
        bounds = ", ".join(map(str, BOUNDS))
        found: dict[str, Gaps] = {}
        histograms: dict[str, dict[int, int]] = {}
        for name, place, many in self._table.rows(
            f"""
            SELECT {group} AS name, len(list_filter([{bounds}], lambda bound: bound <= gap)), count(*)
            FROM repeats WHERE gap IS NOT NULL GROUP BY ALL
            """  # noqa: S608
        ):
            histograms.setdefault(name, {})[place] = many
        for name, many, (p50, p90, p99), longest in self._table.rows(
            f"""
            SELECT {group} AS name, count(*), quantile_disc(gap, [0.5, 0.9, 0.99]), max(gap)
            FROM repeats WHERE gap IS NOT NULL GROUP BY name
            """  # noqa: S608
        ):
            histogram = _histogram(histograms[name], longest)
            found[name] = Gaps(many, int(p50), int(p90), int(p99), int(longest), histogram)
        return found

    # --- examples ---------------------------------------------------------------------------

    def examples(self, numbers: Iterable[int]) -> dict[int, ArrivalExample]:
        """Return examples for rows of `repeats`."""
        listed = _listed(dict.fromkeys(numbers))
        pairs = self._table.rows(
            f"SELECT ord, first FROM repeats WHERE ord IN ({listed})"  # noqa: S608
        )
        return self.examples_of(dict(pairs))

    def examples_of(self, pairs: Mapping[int, int | None]) -> dict[int, ArrivalExample]:
        """Return examples for arrivals, each with an earlier one."""
        texts = self.arrival_texts(
            [*pairs, *(first for first in pairs.values() if first is not None)]
        )
        examples = {}
        for number, first in pairs.items():
            one = texts[number]
            other = texts[first] if first is not None else None
            gap = None
            if first is not None and self._table.times.known:
                gap = abs(self._table.at_ms(number) - self._table.at_ms(first))
            examples[number] = ArrivalExample(
                one["place"],
                one["id"],
                one["source"],
                one["topic"],
                one["entity"],
                gap,
                other["place"] if other else "",
                other["id"] if other else "",
            )
        return examples

    def arrival_texts(self, numbers: Iterable[int]) -> dict[int, dict[str, str]]:
        """Return place, id, source, topic and entity of arrivals."""
        listed = _listed(dict.fromkeys(numbers))
        rows = self._table.rows(
            f"""
            WITH wanted AS (SELECT * FROM arrivals WHERE ord IN ({listed}))
            SELECT ord, line, wanted.id::VARCHAR, ids.text, wanted.entity::VARCHAR, entities.text,
                source, topic, file
            FROM wanted JOIN kinds USING (kind)
            ASOF JOIN chunks ON ord % {self._table.times.step} >= base
            LEFT JOIN names ids ON ids.name = wanted.id
            LEFT JOIN names entities ON entities.name = wanted.entity
            """  # noqa: S608
        )
        return {
            number: {
                "place": f"{self._files[file]}:{line + 1}",
                "id": as_read(id_text) if id_text else id_ or "",
                "entity": as_read(entity_text) if entity_text else entity or "",
                "source": as_read(source),
                "topic": as_read(topic),
            }
            for number, line, id_, id_text, entity, entity_text, source, topic, file in rows
        }

    # --- counts -----------------------------------------------------------------------------

    def verdicts(self) -> dict[Verdict, int]:
        """Count the verdicts of all arrivals."""
        counts: Counter[Verdict] = Counter()
        for action, many in self._table.rows(
            "SELECT action, count(*) FROM arrivals JOIN kinds USING (kind) GROUP BY action"
        ):
            counts[UNKEYED[action]] += many
        for verdict, many in self._table.rows(
            "SELECT verdict, count(*) FROM fates GROUP BY verdict"
        ):
            counts[Verdict(verdict)] += many
            counts[Verdict.DELIVERED] -= many
        return {verdict: counts[verdict] for verdict in Verdict if counts[verdict]}

    def count_events(self, verdicts: Mapping[Verdict, int]) -> int:
        """Count the different events: those that are delivered at least once."""
        again, clashed = self._table.row(
            f"""
            SELECT count(*) FILTER (verdict = '{Verdict.DELIVERED}'),
                count(*) FILTER (verdict = '{Verdict.CONFLICT}' AND passed)
            FROM fates
            """  # noqa: S608
        )
        passed = verdicts.get(Verdict.DELIVERED, 0) + verdicts.get(Verdict.BYPASSED, 0)
        return int(passed - again + clashed)

    def after_window(self) -> int:
        """Count the arrivals that are delivered again because an earlier window had ended."""
        (again,) = self._table.row(
            f"SELECT count(*) FROM fates WHERE verdict = '{Verdict.DELIVERED}'"  # noqa: S608
        )
        return int(again)

    def over_time(self) -> tuple[TimeSlice, ...]:
        """Count the verdicts of each span of the recording."""
        times = self._table.times
        if not times.known:
            return ()
        width = _width(times.last_ms - times.first_ms + 1)
        begins = times.first_ms - times.first_ms % width
        at = f"(({self._table.ms} + {times.first_ms - begins}) // {width})::BIGINT"
        moments: dict[int, Counter[Verdict]] = {}
        for moment, action, many in self._table.rows(
            f"SELECT {at} AS moment, action, count(*) FROM arrivals JOIN kinds USING (kind) "  # noqa: S608
            "GROUP BY ALL ORDER BY moment"
        ):
            moments.setdefault(moment, Counter())[UNKEYED[action]] += many
        for moment, verdict, many in self._table.rows(
            f"SELECT {at} AS moment, verdict, count(*) FROM fates GROUP BY ALL"  # noqa: S608
        ):
            moments[moment][Verdict(verdict)] += many
            moments[moment][Verdict.DELIVERED] -= many
        return tuple(
            TimeSlice(begins + at * width, {v: counts[v] for v in Verdict if counts[v]})
            for at, counts in moments.items()
        )

    # --- tallies ----------------------------------------------------------------------------

    def tallies(self) -> dict[str, tuple[NamedCounts, ...]]:
        """Return the topics, sources, rules and entities with most duplicates."""
        self._table.run(
            """
            CREATE TABLE tallied AS
            SELECT kinds.*, arrived, coalesce(repeated, 0) AS repeated
            FROM kinds JOIN (SELECT kind, count(*) AS arrived FROM arrivals GROUP BY kind)
                USING (kind)
            LEFT JOIN (SELECT kind, count(*) AS repeated FROM repeats GROUP BY kind) USING (kind)
            """
        )
        return {
            "topics": self._tally("topic"),
            "sources": self._tally("source"),
            "rules": self._by_rule(),
            "entities": self._entities(),
        }

    def _tally(self, column: str) -> tuple[NamedCounts, ...]:
        return tuple(
            NamedCounts(as_read(name), int(arrived), int(repeated))
            for name, arrived, repeated in self._table.rows(
                f"""
                SELECT {column} AS name, sum(arrived) AS arrivals, sum(repeated) AS repeats
                FROM tallied WHERE name <> '""' GROUP BY name
                ORDER BY repeats DESC, arrivals DESC, name LIMIT {_TOP}
                """  # noqa: S608
            )
        )

    def _by_rule(self) -> tuple[NamedCounts, ...]:
        """Return all rules that matched an event: they are few."""
        return tuple(
            NamedCounts(self._rules[rule].name, int(arrived), int(repeated))
            for rule, arrived, repeated in self._table.rows(
                """
                SELECT rule, sum(arrived) AS arrivals, sum(repeated) AS repeats
                FROM tallied GROUP BY rule ORDER BY repeats DESC, arrivals DESC, rule
                """
            )
        )

    def _entities(self) -> tuple[NamedCounts, ...]:
        rows = self._table.rows(
            f"""
            WITH arrived AS (
                SELECT entity, count(*) AS arrivals FROM arrivals
                WHERE entity IS NOT NULL GROUP BY entity
            ), repeated AS (
                SELECT entity, count(*) AS repeats FROM repeats
                WHERE entity IS NOT NULL GROUP BY entity
            ), top AS (
                SELECT entity, arrivals, coalesce(repeats, 0) AS repeats
                FROM arrived LEFT JOIN repeated USING (entity)
                ORDER BY repeats DESC, arrivals DESC, entity LIMIT {_TOP}
            )
            SELECT entity::VARCHAR, text, arrivals, repeats
            FROM top LEFT JOIN names ON name = entity
            ORDER BY repeats DESC, arrivals DESC, entity
            """  # noqa: S608
        )
        return tuple(
            NamedCounts(as_read(text) if text else entity, arrived, repeated)
            for entity, text, arrived, repeated in rows
        )


def _differ(column: str) -> str:
    """Return SQL that is true if both arrivals have the column, with different values."""
    one, other = f"kinds.{column}", f"first_kinds.{column}"
    return f"""({one} <> '""' AND {other} <> '""' AND {one} <> {other})"""


def _histogram(places: Mapping[int, int], longest: int) -> tuple[tuple[int, int], ...]:
    """Return every bound up to the one after the longest gap, with its count."""
    bounds = [*BOUNDS, max(longest + 1, BOUNDS[-1] + 1)]
    last = max(places)
    return tuple((bounds[at], places.get(at, 0)) for at in range(last + 1))


def _width(span_ms: int) -> int:
    """Return the shortest round span with which the recording has few enough spans."""
    for width in _WIDTHS:
        if span_ms // width + 2 <= _MOST_MOMENTS:
            return width
    return _D * -(-(span_ms // _D + 2) // _MOST_MOMENTS)


def _listed(numbers: Iterable[Any]) -> str:
    return ", ".join(map(str, numbers)) or "NULL"
