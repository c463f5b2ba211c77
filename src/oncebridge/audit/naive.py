"""
What simple keys would have done with this recording.

A naive key delivers the first arrival of each value and drops all others. An arrival without the
field is delivered. An event is lost if none of its arrivals is delivered; further deliveries of an
event count as let through. The rules define the events (`fates`). An arrival after its window is
not an event of its own, and arrivals that the rules discard or cannot key are left out. For
`five-minutes` the key is right, but forgotten too early.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from oncebridge.audit.findings import Findings
from oncebridge.audit.report import ArrivalExample, NaiveKey
from oncebridge.audit.table import Table
from oncebridge.engine.verdict import Verdict

_COLUMNS: Final = {
    "conversation-id": ("conversation", "the conversation id alone"),
    "envelope-id": ("id", "the envelope id alone"),
    "detail-hash": ("detail", "a hash of the whole detail, 1 and 1.0 alike"),
}
_FIVE_MINUTES_MS: Final = 300_000


class NaiveKeys:
    """Finds what each naive key would have done."""

    def __init__(self, table: Table, found: Findings, most_examples: int) -> None:
        self._table = table
        self._found = found
        self._most = most_examples

    def keys(self) -> tuple[NaiveKey, ...]:
        """Return what each naive key would have lost and let through."""
        self._table.run(
            f"""
            CREATE VIEW taken AS SELECT * FROM arrivals
            SEMI JOIN (SELECT kind FROM kinds WHERE action IN ('deduplicate', 'bypass')) USING (kind);
            -- not events of their own: duplicates, and arrivals after the window
            CREATE TABLE copies AS
            SELECT ord, first, verdict IN ('{Verdict.DUPLICATE}', '{Verdict.DELIVERED}') AS is_same
            FROM fates WHERE NOT passed OR verdict = '{Verdict.DELIVERED}'
            """  # noqa: S608
        )
        self._find_events()
        keys = [self._by(name, *how) for name, how in _COLUMNS.items()]
        return (*keys, self._five_minutes())

    def _find_events(self) -> None:
        """Make each copy of a copy a copy of the event itself."""
        while True:
            (left,) = self._table.row(
                "SELECT count(*) FROM copies SEMI JOIN copies before ON before.ord = copies.first "
                "WHERE is_same"
            )
            if not left:
                return
            self._table.run(
                """
                CREATE OR REPLACE TABLE copies AS
                SELECT copies.ord, coalesce(before.first, copies.first) AS first,
                    copies.is_same AND coalesce(before.is_same, true) AS is_same
                FROM copies LEFT JOIN copies before ON copies.is_same AND before.ord = copies.first
                """
            )

    def _by(self, name: Any, column: str, title: str) -> NaiveKey:
        table = self._table
        table.run(
            f"""
            CREATE OR REPLACE TABLE passing AS
            SELECT min(ord) AS ord, {column} AS value FROM taken
            WHERE {column} IS NOT NULL GROUP BY {column}
            UNION ALL SELECT ord, NULL FROM taken WHERE {column} IS NULL;
            CREATE OR REPLACE TABLE passing_copies AS
            SELECT copies.ord, copies.first, is_same FROM passing JOIN copies USING (ord);
            -- events of which only a copy passes
            CREATE OR REPLACE TABLE saved AS
            SELECT first AS ord, min(passing_copies.ord) AS copy FROM passing_copies
            ANTI JOIN passing ON passing.ord = passing_copies.first
            WHERE is_same GROUP BY first;
            """  # noqa: S608
        )
        passing, copies = table.count("passing"), table.count("passing_copies")
        saved = table.count("saved")
        events = table.count("taken") - table.count("copies")
        let_through = copies - saved
        lost = events - (passing - copies) - saved
        examples = self._lost(column) if lost else self._let_through()
        return NaiveKey(name, title, lost, let_through, examples)

    def _lost(self, column: str) -> tuple[ArrivalExample, ...]:
        """Return examples of lost events, each with the event it would be treated as."""
        pairs = self._table.rows(
            f"""
            WITH lost AS (
                SELECT ord, {column} AS value FROM taken
                ANTI JOIN copies USING (ord) ANTI JOIN passing USING (ord) ANTI JOIN saved USING (ord)
                ORDER BY ord LIMIT {self._most}
            )
            SELECT lost.ord, passing.ord FROM lost JOIN passing USING (value) ORDER BY 1
            """  # noqa: S608
        )
        return tuple(self._found.examples_of(dict(pairs)).values())

    def _let_through(self) -> tuple[ArrivalExample, ...]:
        pairs = self._table.rows(
            f"""
            SELECT ord, first FROM passing_copies ANTI JOIN saved ON saved.copy = passing_copies.ord
            ORDER BY ord LIMIT {self._most}
            """  # noqa: S608
        )
        return tuple(self._found.examples_of(dict(pairs)).values())

    def _five_minutes(self) -> NaiveKey:
        path = self._table.folder / "forgotten"
        rows = self._table.stream(
            f"""
            SELECT arrivals.key, ord FROM arrivals SEMI JOIN (
                SELECT key FROM arrivals WHERE key IS NOT NULL GROUP BY key
                HAVING max(ord) // {self._table.times.step} - min(ord) // {self._table.times.step}
                    >= {_FIVE_MINUTES_MS}
            ) long USING (key) ORDER BY arrivals.key, ord
            """  # noqa: S608
        )
        with path.open("w") as file:
            file.writelines(f"{number}\n" for number in self._forgotten(rows))
        kind = self._table.times.kind
        self._table.run(
            f"""
            CREATE TABLE forgotten AS SELECT ord, first
            FROM {self._table.lines("forgotten", {"ord": kind})} JOIN fates USING (ord)
            WHERE NOT passed AND verdict = '{Verdict.DUPLICATE}'
            """  # noqa: S608
        )
        pairs = self._table.rows(f"SELECT * FROM forgotten ORDER BY ord LIMIT {self._most}")  # noqa: S608
        return NaiveKey(
            "five-minutes",
            "the right key, kept for five minutes",
            0,
            self._table.count("forgotten"),
            tuple(self._found.examples_of(dict(pairs)).values()),
        )

    def _forgotten(self, rows: Iterable[tuple[Any, int]]) -> Iterator[int]:
        """Yield the arrivals of a key that come after it was forgotten."""
        last, until_ms = None, 0
        for key, number in rows:
            at_ms = self._table.at_ms(number)
            if key != last:
                last, until_ms = key, at_ms + _FIVE_MINUTES_MS
            elif at_ms >= until_ms:
                until_ms = at_ms + _FIVE_MINUTES_MS
                yield number
