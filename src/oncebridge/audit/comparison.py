"""Compare two sets of rules on one recording: the arrivals for which they decide differently."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from oncebridge.audit.report import Difference, RulesComparison
from oncebridge.audit.rows import as_read
from oncebridge.audit.table import Table
from oncebridge.audit.verdicts import UNKEYED
from oncebridge.engine.verdict import Verdict
from oncebridge.events.rules import Rule

_MOST: Final = 1_000


def compare(
    table: Table,
    files: Sequence[str],
    rules: Sequence[Rule],
    candidate: Sequence[Rule],
    report: Callable[[Difference], None] | None,
) -> RulesComparison:
    """Report every difference in the order of arrival; each list of rules ends with the default."""
    changes: Counter[_Change] = Counter()
    kept: list[Difference] = []
    limit = "" if report is not None else f"LIMIT {_MOST}"
    for difference in _differences(table, files, rules, candidate, limit):
        changes[_change(difference)] += 1
        if len(kept) < _MOST:
            kept.append(difference)
        if report is not None:
            report(difference)
    if report is None:
        changes = _counted(table)
    by_verdict: Counter[tuple[Verdict, Verdict]] = Counter()
    by_passing: Counter[tuple[bool, bool]] = Counter()
    for (before, after, passed, passed2), many in changes.items():
        by_verdict[before, after] += many
        by_passing[passed, passed2] += many
    listed = sorted(by_verdict.items(), key=lambda item: (-item[1], item[0]))
    return RulesComparison(
        changed=sum(changes.values()),
        more=by_passing[False, True],
        fewer=by_passing[True, False],
        by_change=tuple((*verdicts, many) for verdicts, many in listed),
        differences=tuple(kept),
    )


_Change = tuple[Verdict, Verdict, bool, bool]
"""A verdict before and after, and whether each delivers it."""


def _change(one: Difference) -> _Change:
    return one.before, one.after, one.passed_before, one.passed_after


def _verdict(action: str) -> str:
    """Return SQL for the verdict on arrivals without a row in `fates`."""
    cases = " ".join(f"WHEN '{name}' THEN '{verdict}'" for name, verdict in UNKEYED.items())
    return f"CASE {action} {cases} END"


_PASSING: Final = "('deduplicate', 'bypass')"
"""Actions of rules that deliver, unless the arrival has another verdict."""
_DIFFERENT: Final = f"""
    SELECT arrivals.ord, line, id, source, topic, rule, rule2,
        coalesce(fates2.first, fates.first) AS same,
        coalesce(fates.verdict, {_verdict("action")}) AS before,
        coalesce(fates2.verdict, {_verdict("action2")}) AS after,
        coalesce(fates.passed, action IN {_PASSING}) AS passes,
        coalesce(fates2.passed, action2 IN {_PASSING}) AS passes2
    FROM arrivals JOIN kinds USING (kind)
    LEFT JOIN fates ON fates.ord = arrivals.ord LEFT JOIN fates2 ON fates2.ord = arrivals.ord
    WHERE before <> after OR passes <> passes2
"""  # noqa: S608


def _counted(table: Table) -> Counter[_Change]:
    rows = table.rows(
        f"SELECT before, after, passes, passes2, count(*) FROM ({_DIFFERENT}) GROUP BY ALL"  # noqa: S608
    )
    return Counter(
        {
            (Verdict(before), Verdict(after), passed, passed2): many
            for before, after, passed, passed2, many in rows
        }
    )


def _differences(
    table: Table, files: Sequence[str], rules: Sequence[Rule], candidate: Sequence[Rule], limit: str
) -> Iterator[Difference]:
    step = table.times.step
    rows = table.stream(
        f"""
        WITH changed AS (SELECT * FROM ({_DIFFERENT}) ORDER BY ord {limit})
        SELECT mine.file, changed.line, id::VARCHAR, text, source, topic, before, after,
            passes, passes2, rule, rule2, theirs.file, other.line
        FROM changed ASOF JOIN chunks mine ON changed.ord % {step} >= mine.base
        LEFT JOIN names ON name = id
        LEFT JOIN (SELECT ord, line FROM arrivals) other ON other.ord = same
        ASOF LEFT JOIN chunks theirs ON same % {step} >= theirs.base
        ORDER BY changed.ord
        """  # noqa: S608
    )
    for row in rows:
        file, line, id_, text, source, topic, *verdicts, rule, rule2, file2, line2 = row
        before, after, passed, passed2 = verdicts
        yield Difference(
            f"{files[file]}:{line + 1}",
            as_read(text) if text else id_ or "",
            as_read(source),
            as_read(topic),
            Verdict(before),
            Verdict(after),
            passed,
            passed2,
            rules[rule].name,
            candidate[rule2].name,
            f"{files[file2]}:{line2 + 1}" if file2 is not None else "",
        )
