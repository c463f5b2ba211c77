"""
Group arrivals into events, and find the verdict of each arrival.

Arrivals affect each other if they share a key, or the register of an entity. Most groups have one
plain key and lie within its window: the first arrival is delivered and the others are duplicates,
which DuckDB finds for all of them at once. Other groups are decided one arrival after the other,
by `oncebridge.audit.judge`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from oncebridge.audit.judge import Judge, Judgement
from oncebridge.audit.rows import ComplexPlan
from oncebridge.audit.table import Table
from oncebridge.base.clock import ms
from oncebridge.engine import decide
from oncebridge.engine.verdict import Verdict
from oncebridge.events.key import Part
from oncebridge.events.rules import Plan, Rule, Span

UNKEYED: Final = {"deduplicate": Verdict.DELIVERED, **decide.UNKEYED}
"""The verdict on arrivals without a row in `fates`, by the action of their rule."""


RULES: Final = ""
CANDIDATE: Final = "2"
"""Suffixes of the tables and columns of the rules, and of the candidate rules."""


def judge_all(table: Table, rules: Sequence[Rule], of: str) -> None:
    """
    Create the table `fates`: the verdict of each arrival that is not simply delivered.

    `first` is the arrival that it duplicates; for one that is delivered again after its window, it
    is the delivery before. Rules are numbered by their place in *rules*; the last is the default.
    """
    table.run(
        f"""
        CREATE TABLE fates{of} (ord {table.times.kind}, verdict VARCHAR,
            first {table.times.kind}, passed BOOLEAN);
        CREATE TABLE windows{of} (rule INTEGER, window_ms BIGINT);
        """
    )
    spans = [(at, ms(rule.tiers[0].window)) for at, rule in enumerate(rules) if rule.tiers]
    listed = ", ".join(f"({at}, {window})" for at, window in spans) or "(0, 0)"
    table.run(f"INSERT INTO windows{of} VALUES {listed}")  # noqa: S608
    group = _join_links(table, of) if table.count(f"links{of}") else _key(of)
    _make_groups(table, of, group)
    _judge_plain(table, of, group)
    _judge_others(table, rules, of, group)
    _find_again(table, of, group)


def _join_links(table: Table, of: str) -> str:
    """
    Find the groups of linked keys; return SQL for the group of an arrival.

    Every key has a label: another key of its group, or itself. In each round every key, and the key
    that was its label, takes the smallest label of its neighbours, so whole groups are joined at
    once. Then each takes its label's own label, which halves the distance. The number of rounds
    grows with the logarithm of the longest chain.
    """
    table.run(
        f"""
        CREATE TEMP TABLE edges AS
            SELECT DISTINCT one, other FROM links{of}
            UNION SELECT DISTINCT other, one FROM links{of};
        CREATE TABLE labels{of} AS SELECT DISTINCT one AS key, one AS label FROM edges;
        """  # noqa: S608
    )
    while True:
        table.run(
            f"""
            CREATE TEMP TABLE near AS
                SELECT one AS key, min(label) AS label FROM edges JOIN labels{of} ON key = other
                GROUP BY one;
            CREATE TEMP TABLE lower AS
                SELECT key, min(label) AS label FROM (
                    FROM labels{of} UNION ALL FROM near UNION ALL
                    SELECT mine.label, near.label FROM near JOIN labels{of} mine USING (key)
                ) GROUP BY key;
            CREATE TEMP TABLE jumped AS
                SELECT lower.key, there.label FROM lower JOIN lower there ON there.key = lower.label;
            """  # noqa: S608
        )
        (changed,) = table.row(
            f"""
            SELECT count(*) FROM jumped JOIN labels{of} old USING (key)
            WHERE jumped.label <> old.label
            """  # noqa: S608
        )
        table.run(f"DROP TABLE labels{of}; DROP TABLE near; DROP TABLE lower")
        table.run(
            f"CREATE TABLE labels{of} AS SELECT * FROM jumped; DROP TABLE jumped"  # noqa: S608
        )
        if not changed:
            break
    table.run("DROP TABLE edges")
    return f"coalesce(labels{of}.label, arrivals.key{of})"


def _from(of: str, group: str) -> str:
    """Return SQL for the arrivals with a key, with their kinds and groups, if any."""
    labelled = f"LEFT JOIN labels{of} ON labels{of}.key = arrivals.key{of}"
    return (
        f"arrivals JOIN kinds USING (kind) {labelled if group != _key(of) else ''} "
        f"LEFT JOIN windows{of} ON windows{of}.rule = kinds.rule{of}"
    )


def _key(of: str) -> str:
    return f"arrivals.key{of}"


def _make_groups(table: Table, of: str, group: str) -> None:
    """Create the table of groups with more than one arrival, and whether they are plain."""
    table.run(
        f"""
        CREATE TABLE groups{of} AS
        SELECT {group} AS name, min(ord) AS first, max(ord) AS last, count(*) AS many,
            count(plan{of}) = 0
            AND (min(content{of}) IS NULL OR min(content{of}) = max(content{of}))
            AND max(ord) // {table.times.step} - min(ord) // {table.times.step} < min(window_ms)
                AS is_plain
        FROM {_from(of, group)}
        WHERE arrivals.key{of} IS NOT NULL GROUP BY name HAVING count(*) > 1
        """  # noqa: S608
    )


def _judge_plain(table: Table, of: str, group: str) -> None:
    table.run(
        f"""
        INSERT INTO fates{of}
        SELECT ord, '{Verdict.DUPLICATE}', first, false
        FROM {_from(of, group)} JOIN groups{of} ON name = {group}
        WHERE is_plain AND ord <> first
        """  # noqa: S608
    )


def _judge_others(table: Table, rules: Sequence[Rule], of: str, group: str) -> None:
    rows = table.stream(
        f"""
        SELECT name, ord, arrivals.key{of}, content{of}, plan{of}, kinds.rule{of}
        FROM {_from(of, group)} JOIN groups{of} ON name = {group}
        WHERE NOT is_plain ORDER BY name, ord
        """  # noqa: S608
    )
    path = table.folder / "judged"
    with path.open("w") as file:
        for number, found in _judged(table, rules, rows):
            if found.verdict is not Verdict.DELIVERED:
                first = "" if found.first is None else found.first
                file.write(f"{number}\t{found.verdict}\t{first}\t{found.delivered:d}\n")
    columns = {"ord": table.times.kind, "verdict": "VARCHAR", "first": table.times.kind}
    columns |= {"passed": "BOOLEAN"}
    table.run(f"INSERT INTO fates{of} SELECT * FROM {table.lines('judged', columns)}")  # noqa: S608
    path.unlink()


def _find_again(table: Table, of: str, group: str) -> None:
    """Find arrivals that are delivered again because the window of their key had ended."""
    table.run(
        f"""
        INSERT INTO fates{of}
        WITH delivered AS (
            SELECT ord, arrivals.key{of} AS key
            FROM {_from(of, group)} JOIN groups{of} ON name = {group}
            ANTI JOIN fates{of} ON fates{of}.ord = arrivals.ord
            WHERE NOT is_plain
        ), again AS (SELECT key FROM delivered GROUP BY key HAVING count(*) > 1)
        SELECT ord, '{Verdict.DELIVERED}', before, true FROM (
            SELECT ord, lag(ord) OVER (PARTITION BY key ORDER BY ord) AS before
            FROM delivered SEMI JOIN again USING (key)
        ) WHERE before IS NOT NULL
        """  # noqa: S608
    )


def _judged(
    table: Table, rules: Sequence[Rule], rows: Iterable[tuple[Any, ...]]
) -> Iterator[tuple[int, Judgement]]:
    group, judge = None, Judge()
    plain = {at: _only_tier(rule) for at, rule in enumerate(rules) if len(rule.tiers) == 1}
    for name, number, key, content, plan, at in rows:
        if name != group:
            group, judge = name, Judge()
        if plan:
            asked = ComplexPlan.read(plan).plan(rules[at])
        else:
            slide_ms, spans = plain[at]
            part = Part(key.bytes, content.bytes if content else b"", slide_ms)
            asked = Plan(rules[at], "deduplicate", (part,), spans)
        yield number, judge.judge(number, table.at_ms(number), asked)


def _only_tier(rule: Rule) -> tuple[int, tuple[Span, ...]]:
    """Return the slide and the span of a rule with one tier."""
    (tier,) = rule.tiers
    window_ms = ms(tier.window)
    if not tier.sliding:
        return 0, (Span(window_ms, 0),)
    return window_ms, (Span(window_ms, ms(tier.max_window)),)
