"""
What an audit found, as one page that needs nothing else.

No script, no font, no address to load from: the page's own policy forbids all of them, so it
can be sent by mail and opened anywhere. Whatever came out of an event is escaped, spelt out
and cut; payloads are not in a report, so they are not here.
"""

from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from html import escape
from importlib import resources
from typing import Final

from oncebridge import __version__
from oncebridge.audit import text as words
from oncebridge.audit.charts import gaps as draw_gaps
from oncebridge.audit.report import CauseFound, Difference, Example, Report, Tally, Trial
from oncebridge.audit.suggest import Suggestion
from oncebridge.base import formatting as figures
from oncebridge.engine.causes import MEANINGS
from oncebridge.engine.verdict import Verdict
from oncebridge.events.event import REASONS
from oncebridge.observe import charts
from oncebridge.observe.charts import Chart

_MOST_DIFFERENCES: Final = 50
_ROWS: Final = 15
MARK: Final = "<!doctype html>\n<!-- oncebridge audit -->"
"""How every page begins, by which one that may be replaced is known."""

_OF_VERDICTS: Final = {
    Verdict.DELIVERED: "passed on",
    Verdict.DUPLICATE: "repeat",
    Verdict.STALE: "stale: a newer state was passed on",
    Verdict.UNCHANGED: "unchanged within the quiet time",
    Verdict.CONFLICT: "conflict: same identity, other content",
    Verdict.BYPASSED: "passed on, not deduplicated",
    Verdict.DISCARDED: "discarded by a rule",
    Verdict.DEAD: "dead: can never be passed on",
}


def page(report: Report, suggestion: Suggestion) -> str:
    """Make the whole page."""
    style = resources.files("oncebridge.audit").joinpath("page.css").read_text("utf-8")
    digest = b64encode(sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return "\n".join(
        [
            MARK,
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>oncebridge audit: {escape(words.headline(report))}</title>",
            f"<style>{style}</style></head><body>",
            *_header(report),
            "<main>",
            *_sections(report, suggestion),
            "</main>",
            *_footer(report),
            "</body></html>",
            "",
        ]
    )


def _header(report: Report) -> Iterator[str]:
    yield '<header><p class="brand">oncebridge audit</p>'
    yield f"<h1>{escape(words.headline(report))}</h1>"
    yield f'<p class="quiet">Read from {escape(words.whence(report))}.</p>'
    if report.events:
        found = words.repeats(report)
        tiles = [
            ("arrivals", f"{report.events:,}", ""),
            ("different events", f"{report.logical:,}", ""),
            ("repeats", f"{found:,}", "hot" if found else ""),
            (
                "share of repeats",
                figures.format_share(found, report.events),
                "hot" if found else "",
            ),
        ]
        yield '<dl class="tiles">'
        for name, value, kind in tiles:
            yield f'<div class="{kind}"><dt>{name}</dt><dd>{_e(value)}</dd></div>'
        yield "</dl>"
    if note := words.about_clock(report):
        yield f'<p class="note">{escape(note)}</p>'
    yield "</header>"


def _sections(report: Report, suggestion: Suggestion) -> Iterator[str]:
    if report.events:
        yield from _over_time(report)
        yield from _causes(report)
        yield from _gaps(report)
        yield from _naive(report)
        yield from _noisiest(report)
        yield from _suspicions(report)
    yield from _unreadable(report)
    if report.trial is not None:
        yield from _trial(report.trial)
    if report.events:
        yield from _suggestion(suggestion)


def _footer(report: Report) -> Iterator[str]:
    yield (
        "<footer><p>This page holds ids, topics, sources, entities and numbers as they stood in "
        "the events, and names of files. It holds no payload, loads nothing and sends nothing. "
        "Times are UTC.</p>"
    )
    took = f"{report.took_s:,.1f}{figures.NB}s"
    yield f"<p>oncebridge {_e(__version__)}, {report.records:,} records in {took}.</p></footer>"


# --- sections -----------------------------------------------------------------------------


def _over_time(report: Report) -> Iterator[str]:
    if not report.over_time:
        return
    chart = Chart(
        "arrivals",
        "Arrivals over time, by what becomes of them",
        f"{words.headline(report)} The numbers are in the table below.",
    )
    yield '<section id="time"><h2>Arrivals over time</h2><figure>'
    yield from _twice(
        charts.arrivals(report.over_time, width, chart) for width in (charts.WIDE, charts.NARROW)
    )
    shown = [v for v in Verdict if any(m.verdicts.get(v) for m in report.over_time)]
    yield '<ul class="legend">'
    for verdict in shown:
        count = f"{report.verdicts.get(verdict, 0):,}"
        name = _OF_VERDICTS.get(verdict, verdict.value)
        yield f'<li><i class="v-{verdict.value}"></i>{_e(name)}: {count}</li>'
    yield "</ul></figure>"
    rows = [
        [
            figures.format_instant(moment.begins_ms),
            *(f"{moment.verdicts.get(v, 0):,}" for v in shown),
        ]
        for moment in report.over_time
    ]
    yield from _numbers("Arrivals over time", ["from (UTC)", *(v.value for v in shown)], rows)
    yield "</section>"


def _causes(report: Report) -> Iterator[str]:
    if not report.causes:
        return
    whole = words.repeats(report)
    yield '<section id="causes"><h2>Why they came again</h2><ul class="causes">'
    for found in report.causes:
        yield from _cause(found, whole)
    yield "</ul></section>"


def _cause(found: CauseFound, whole: int) -> Iterator[str]:
    counted = f"{found.count:,} ({figures.format_share(found.count, whole)})"
    yield f'<li><div class="head"><h3>{_e(found.cause.value)}</h3>'
    yield f"<span>{_e(counted)}</span></div>{charts.share_bar(found.count, whole, 'gap')}"
    told = MEANINGS[found.cause]
    told = f"{told[:1].upper()}{told[1:]}."
    if found.gaps is not None:
        span = words.span_of(found.gaps)
        told += f" {span[:1].upper()}{span[1:]}."
    yield f"<p>{escape(told)}</p>"
    if found.examples:
        yield f'<p class="quiet">For example {_example(found.examples[0])}</p>'
    yield "</li>"


def _gaps(report: Report) -> Iterator[str]:
    gaps = report.gaps
    if gaps is None or not gaps.histogram:
        return
    told = (
        f"Half came within {figures.format_elapsed(gaps.p50_ms)}, 90 % within {figures.format_elapsed(gaps.p90_ms)}, "
        f"99 % within {figures.format_elapsed(gaps.p99_ms)}, the last after {figures.format_elapsed(gaps.max_ms)}."
    )
    sentences = [told, *words.about_windows(report)]
    chart = Chart("gaps", "How long after the first arrival the others came", " ".join(sentences))
    yield '<section id="gaps"><h2>How long after the first</h2>'
    yield f"<p>{escape(' '.join(sentences))}</p><figure>"
    yield from _twice(
        draw_gaps(gaps, report.window_ms, width, chart) for width in (charts.WIDE, charts.NARROW)
    )
    yield '<figcaption class="quiet">The scale of time is logarithmic.'
    yield "</figcaption></figure>"
    rows = [
        [f"up to {figures.format_elapsed(bound)}", f"{count:,}"] for bound, count in gaps.histogram
    ]
    yield from _numbers("Gaps", ["gap", "repeats"], rows)
    yield "</section>"


def _naive(report: Report) -> Iterator[str]:
    if not report.naive:
        return
    yield '<section id="naive"><h2>What a simple key would have done</h2>'
    yield "<p>On this very recording, instead of your rules.</p>"
    rows = []
    for key in report.naive:
        lost = f"{key.lost:,}"
        shown = f'<span class="bad">{lost}</span>' if key.lost else lost
        name = _e(key.title)
        if key.examples and (key.lost or key.let_through):
            place = f"<code>{_e(key.examples[0].place)}</code>"
            name += f'<span class="quiet">for example {place}</span>'
        rows.append([name, shown, f"{key.let_through:,}"])
    heads = ["key", "events lost", "repeats let through"]
    yield f"{_table('', heads, rows, numbers={1, 2}, named=True)}</section>"


def _noisiest(report: Report) -> Iterator[str]:
    groups: list[tuple[str, str, Sequence[Tally]]] = [
        ("Topics", "topic", report.topics),
        ("Entities", "entity", report.entities),
        ("Sources", "source", report.sources),
        ("Rules that decided", "rule", report.rules),
    ]
    if not any(tallies for _, _, tallies in groups):
        return
    yield '<section id="noisiest"><h2>Where the repeats are</h2>'
    for title, what, tallies in groups:
        if not tallies:
            continue
        rows = [
            [
                _e(tally.name or "(none)"),
                f"{tally.arrivals:,}",
                f"{tally.repeats:,}",
                _e(figures.format_share(tally.repeats, tally.arrivals)),
            ]
            for tally in tallies[:_ROWS]
        ]
        heads = [what, "arrivals", "repeats", "share"]
        yield f"<h3>{title}</h3>{_table('', heads, rows, numbers={1, 2, 3})}"
    yield "</section>"


def _suspicions(report: Report) -> Iterator[str]:
    if not report.suspicions:
        return
    yield '<section id="suspicions"><h2>Worth a look</h2><ul class="causes">'
    for found in report.suspicions:
        title, meaning = words.suspicion(found)
        yield f'<li><div class="head"><h3>{_e(title)}</h3>'
        yield f"<span>{found.count:,}</span></div>"
        yield f"<p>{_e(meaning[:1].upper() + meaning[1:])}.</p>"
        if found.examples:
            yield f'<p class="quiet">For example {_example(found.examples[0], "after")}</p>'
        yield "</li>"
    yield "</ul></section>"


def _unreadable(report: Report) -> Iterator[str]:
    if not report.unreadable:
        return
    counted = figures.format_count(sum(report.unreadable.values()), "record")
    yield f'<section id="unreadable"><h2>Unreadable: {counted}</h2>'
    rows = [
        [_e(reason), _e(REASONS.get(reason, "")), f"{count:,}"]
        for reason, count in report.unreadable.items()
    ]
    yield _table("", ["reason", "what it means", "records"], rows, numbers={2})
    places = [figures.printable(place) for place in report.unreadable_places]
    if places:
        yield f'<p class="quiet">At {escape(figures.format_list(places, most=10))}</p>'
    yield "</section>"


def _trial(trial: Trial) -> Iterator[str]:
    yield '<section id="candidate"><h2>The candidate rules</h2>'
    yield f"<p>{escape(' '.join(words.about_trial(trial)))}</p>"
    if trial.by_change:
        rows = [[_change(before, after), f"{n:,}"] for before, after, n in trial.by_change]
        yield _table("", ["change", "arrivals"], rows, numbers={1})
    shown = trial.differences[:_MOST_DIFFERENCES]
    if shown:
        heads = ["where", "change", "event", "rules", "same as"]
        yield '<h3>Event by event</h3><div class="scroll">'
        yield _table("", heads, [_difference(one) for one in shown], numbers=set())
        yield "</div>"
    if trial.changed > len(shown):
        yield f'<p class="quiet">And {trial.changed - len(shown):,} more.</p>'
    yield "</section>"


def _difference(one: Difference) -> list[str]:
    rules = dict.fromkeys(
        [figures.printable(one.rule_before, 40), figures.printable(one.rule_after, 40)]
    )
    passing = words.about_passing(one)
    return [
        f"<code>{_e(one.place, 80)}</code>",
        _change(one.before, one.after) + (f", {passing}" if passing else ""),
        f"{_e(one.detail_type, 80)}<br><code>{_e(one.id, 60)}</code>",
        escape(", then ".join(rules)),
        f"<code>{_e(one.same_as, 80)}</code>",
    ]


def _suggestion(suggestion: Suggestion) -> Iterator[str]:
    yield '<section id="suggestion"><h2>Suggested configuration</h2><ul class="reasons">'
    yield from (f"<li>{escape(reason)}</li>" for reason in suggestion.reasons)
    lines = [
        f'<span class="c">{escape(line)}</span>' if line.startswith("#") else escape(line)
        for line in suggestion.toml.splitlines()
    ]
    yield '</ul><p class="quiet screen">One click selects all of it.</p>'
    told = "\n".join(lines)
    yield f'<pre tabindex="0"><code>{told}</code></pre></section>'


# --- pieces -------------------------------------------------------------------------------


def _e(text: object, longest: int = 160) -> str:
    """Escape, spell out and cut what may be out of an event; no-break spaces are ours."""
    parts = [figures.printable(part, longest) for part in str(text).split(figures.NB)]
    return escape(figures.NB.join(parts))


def _example(one: Example, how: str = "repeats") -> str:
    told = f"<code>{_e(one.place)}</code>"
    if one.first_place:
        told += f" {how} <code>{_e(one.first_place)}</code>"
    return f"{told}: {_e(one.detail_type)}" if one.detail_type else told


def _change(before: Verdict, after: Verdict) -> str:
    return f"{before.value} → {after.value}"


def _twice(drawn: Iterable[str]) -> Iterator[str]:
    for kind, chart in zip(("wide", "narrow"), drawn, strict=True):
        yield f'<div class="{kind}">{chart}</div>'


def _numbers(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    escaped = [[_e(cell) for cell in row] for row in rows]
    table = _table(title, heads, escaped, numbers=set(range(1, len(heads))))
    yield f'<details><summary>The numbers</summary><div class="scroll">{table}</div></details>'


def _table(
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: set[int],
    named: bool = False,
) -> str:
    """Lay out a table; what is in *rows* is escaped already."""
    kinds = [' class="n"' if at in numbers else ' class="name"' for at in range(len(heads))]
    top = "".join(
        f'<th scope="col"{kind}>{_e(head)}</th>' for head, kind in zip(heads, kinds, strict=True)
    )
    body = []
    for row in rows:
        cells = [f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)]
        if named:
            cells[0] = f'<th scope="row">{row[0]}</th>'
        body.append(f"<tr>{''.join(cells)}</tr>")
    caption = f"<caption>{_e(title)}</caption>" if title else ""
    return f"<table>{caption}<thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table>"
