"""
The report of an audit as one self-contained HTML page.

The page has no script, no font and no address to load from, and its own policy forbids all of
them, so it can be sent by mail and opened anywhere. Everything that came out of an event is
escaped, spelt out and cut. A report holds no payloads, so the page holds none.
"""

from base64 import b64encode
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from itertools import pairwise
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from msgspec import Struct

from oncebridge import __version__
from oncebridge.audit import text
from oncebridge.audit.report import AuditReport, Gaps
from oncebridge.audit.suggest import Suggestion
from oncebridge.base.formatting import (
    DAY,
    HOUR,
    MINUTE,
    NB,
    SECOND,
    format_count,
    format_elapsed,
    format_instant,
    format_list,
    format_share,
    printable,
)
from oncebridge.engine.causes import MEANINGS
from oncebridge.engine.verdict import Verdict
from oncebridge.events.event import REASONS
from oncebridge.observe import charts
from oncebridge.observe.charts import LEFT, RIGHT, WIDE, Chart, Frame, LogScale, coord, label, path

_MOST_DIFFERENCES: Final = 50
_ROWS: Final = 15
MARK: Final = "<!doctype html>\n<!-- oncebridge audit -->"
"""The beginning of every page, by which a file that may be overwritten is recognised."""

_MEANINGS_OF_VERDICTS: Final = {
    Verdict.DELIVERED: "delivered",
    Verdict.DUPLICATE: "duplicate",
    Verdict.STALE: "stale: a newer state was delivered",
    Verdict.UNCHANGED: "unchanged within the quiet time",
    Verdict.CONFLICT: "conflict: same identity, other content",
    Verdict.BYPASSED: "delivered, not deduplicated",
    Verdict.DISCARDED: "discarded by a rule",
    Verdict.DEAD: "dead: can never be delivered",
}

_TICKS: Final = (
    (1, "1 ms"),
    (10, "10 ms"),
    (100, "0.1 s"),
    (SECOND, "1 s"),
    (10 * SECOND, "10 s"),
    (MINUTE, "1 min"),
    (10 * MINUTE, "10 min"),
    (HOUR, "1 h"),
    (6 * HOUR, "6 h"),
    (2 * DAY, "2 d"),
    (15 * DAY, "15 d"),
    (150 * DAY, "150 d"),
)


class _Drawing(Struct, frozen=True):
    """One chart for wide and for narrow screens."""

    wide: Markup
    narrow: Markup


def page(report: AuditReport, suggestion: Suggestion) -> str:
    """Return the whole page."""
    environment = _environment()
    assert environment.loader is not None  # noqa: S101 - it has one
    style, _, _ = environment.loader.get_source(environment, "report.css")
    return environment.get_template("report.html").render(
        report=report,
        suggestion=suggestion,
        duplicates=text.count_duplicates(report),
        style=Markup(style),  # noqa: S704 - part of the package
        style_digest=b64encode(sha256(style.encode()).digest()).decode(),
        tallies=_tallies(report) if report.events else [],
        **_arrivals(report),
        **(_gaps(report.gaps, report) if report.gaps is not None else {"gaps_chart": None}),
    )


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("oncebridge.audit"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    made.filters |= {
        "count": lambda number: f"{number:,}",
        "listed": format_list,
        "many": format_count,
        "meaning": lambda verdict: _MEANINGS_OF_VERDICTS.get(verdict, verdict.value),
        "sentence": lambda words: f"{words[:1].upper()}{words[1:]}.",
        "share": format_share,
        "shown": _shown,
        "spelt": printable,
    }
    made.globals |= {
        "meanings": MEANINGS,
        "most_differences": _MOST_DIFFERENCES,
        "reasons": REASONS,
        "share_bar": lambda part, whole: Markup(charts.share_bar(part, whole, "gap")),  # noqa: S704
        "text": text,
        "version": __version__,
    }
    return made


def _shown(value: object, longest: int = 160) -> str:
    """Spell out and cut text that may come from an event; no-break spaces are ours."""
    return NB.join(printable(part, longest) for part in str(value).split(NB))


def _arrivals(report: AuditReport) -> dict[str, Any]:
    moments = report.over_time
    if not moments:
        return {}
    verdicts = [v for v in Verdict if any(moment.verdicts.get(v) for moment in moments)]
    chart = Chart(
        "arrivals",
        "Arrivals over time, by verdict",
        f"{text.headline(report)} The table below has the numbers.",
    )
    wide, narrow = (charts.arrivals(moments, w, chart) for w in (charts.WIDE, charts.NARROW))
    return {
        "verdicts": verdicts,
        "arrivals_chart": _Drawing(Markup(wide), Markup(narrow)),  # noqa: S704 - made of numbers
        "arrivals_rows": [
            [
                format_instant(moment.begins_ms),
                *(f"{moment.verdicts.get(v, 0):,}" for v in verdicts),
            ]
            for moment in moments
        ],
    }


def _gaps(gaps: Gaps, report: AuditReport) -> dict[str, Any]:
    if not gaps.histogram:
        return {"gaps_chart": None}
    summary = " ".join([text.gap_sentence(gaps), *text.window_sentences(report)])
    chart = Chart("gaps", "Time from the first arrival to each duplicate", summary)
    wide, narrow = (
        draw_gaps(gaps, report.window_ms, w, chart) for w in (charts.WIDE, charts.NARROW)
    )
    return {
        "gaps_chart": _Drawing(Markup(wide), Markup(narrow)),  # noqa: S704 - made of numbers
        "gaps_text": summary,
        "gaps_rows": [[f"up to {format_elapsed(bound)}", f"{n:,}"] for bound, n in gaps.histogram],
    }


def _tallies(report: AuditReport) -> list[tuple[str, str, Any]]:
    """Return title, first column and rows of each table that has any."""
    tables = [
        ("Topics", "topic", report.topics[:_ROWS]),
        ("Entities", "entity", report.entities[:_ROWS]),
        ("Sources", "source", report.sources[:_ROWS]),
        ("Rules", "rule", report.rules[:_ROWS]),
    ]
    return [table for table in tables if table[2]]


# --- the chart of gaps ----------------------------------------------------------------------


def draw_gaps(found: Gaps, window_ms: int, width: int, chart: Chart, *, height: int = 270) -> str:
    """Draw the time from the first arrival to each duplicate, on a logarithmic scale."""
    bins = [(bound, count) for bound, count in found.histogram if bound > 0]
    first = next((at for at, (_, count) in enumerate(bins) if count), 0)
    lowest = bins[first - 1][0] if first else max(bins[0][0] / 10, 1)
    marks = [*text.WINDOWS]
    if all(window_ms != known for known, _ in marks):
        marks.append((window_ms, format_elapsed(window_ms)))
    last = max((bound for bound, count in bins if count), default=bins[-1][0])
    highest = max(last, *(mark for mark, _ in marks)) * 1.6
    scale = LogScale(min(lowest, SECOND), highest, LEFT, width - RIGHT)
    top = 20 * len(marks) + 6
    frame = Frame(width, height, max((count for _, count in bins), default=0), top=top)
    bars = ""
    for (lower, _), (bound, count) in pairwise([(lowest, 0), *bins[first:]]):
        if count:
            x, end = scale.at(lower), scale.at(bound)
            bars += frame.bar(x, end - x, 0, count)
    ticks = [(scale.at(at), name) for at, name in _TICKS if scale.holds(at)]
    ticks = ticks[:: 2 if width < WIDE else 1]
    return frame.draw(
        chart,
        [
            *frame.grid(),
            path(bars, "gap"),
            *frame.below(ticks),
            *_window_marks(sorted(marks), window_ms, scale, frame),
        ],
    )


def _window_marks(
    marks: Sequence[tuple[int, str]], window_ms: int, scale: LogScale, frame: Frame
) -> Iterator[str]:
    """Mark windows, each with its name on its own line: they may be close together."""
    labels = []
    for at, (mark, name) in enumerate(marks):
        x, y = scale.at(mark), 14 + 20 * at
        is_ours = mark == window_ms
        kind = "window ours" if is_ours else "window"
        yield f'<path class="{kind}" d="M{coord(x)} {y - 8}V{coord(frame.bottom)}"/>'
        shown = f"{name}, the window of your rules" if is_ours else f"{name} window"
        labels.append(label(x - 6, y, shown, "end", "name ours" if is_ours else "name"))
    yield from labels  # last, so that no line runs through them
