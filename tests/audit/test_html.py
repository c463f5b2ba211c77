"""The page stands on its own, is safe to open, and can be read by everybody."""

import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from msgspec.structs import replace
from tests.audit.reports import (
    DAY,
    MINUTE,
    START_MS,
    cause,
    difference,
    empty,
    example,
    gaps,
    report,
    suspicion,
    tally,
    trial,
)

from oncebridge.audit.html import MARK, draw_gaps, page
from oncebridge.audit.report import AuditReport, NaiveKey, RulesComparison, TimeSlice
from oncebridge.audit.suggest import suggest
from oncebridge.engine.causes import Cause
from oncebridge.engine.verdict import Verdict
from oncebridge.observe import charts

NASTY = "</td><script>alert(1)</script>\x1b[31m\u202e'\"&<img src=x onerror=x>"
VOID = {"meta", "br", "img", "link", "hr", "input"}


class Page(HTMLParser):
    """Reads a page strictly: what is opened is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self._open):
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def made(found: AuditReport) -> str:
    return page(found, suggest(found))


def nasty() -> AuditReport:
    """Make a report in which everything that may come from an event is hostile."""
    one = replace(
        example(), place=NASTY, id=NASTY, source=NASTY, detail_type=NASTY, entity=NASTY,
        first_place=NASTY, first_id=NASTY,
    )  # fmt: skip
    bad = replace(
        difference(), place=NASTY, id=NASTY, source=NASTY, detail_type=NASTY, rule_before=NASTY,
        rule_after=NASTY, same_as=NASTY,
    )  # fmt: skip
    found = replace(cause(Cause.REDELIVERY, 9), examples=(one,))
    return report(
        unreadable={NASTY: 1},
        unreadable_places=(NASTY,),
        causes=(found,),
        suspicions=(suspicion("double-emission", 2, one),),
        topics=(tally(NASTY),),
        entities=(tally(NASTY),),
        sources=(tally(NASTY),),
        rules=(tally(NASTY),),
        naive=(NaiveKey("detail-hash", "a hash", 1, 1, (one,)),),
        trial=RulesComparison(1, 0, 1, ((Verdict.DELIVERED, Verdict.STALE, 1),), (bad,)),
    )


def largest() -> AuditReport:
    """Make a report that is full everywhere, with names that are far too long."""
    name = "long & longer " * 200
    tallies = (tally(name),) * 20
    one = replace(example(), place=name, first_place=name, detail_type=name)
    bad = replace(
        difference(), place=name, id=name, detail_type=name, rule_before=name, same_as=name
    )
    return report(
        causes=tuple(replace(cause(each, 9), examples=(one,)) for each in Cause),
        topics=tallies,
        entities=tallies,
        sources=tallies,
        rules=tallies,
        over_time=tuple(
            TimeSlice(START_MS + n * MINUTE, dict.fromkeys(Verdict, 10**6)) for n in range(120)
        ),
        trial=RulesComparison(
            10**6, 0, 10**6, ((Verdict.DELIVERED, Verdict.STALE, 10**6),), (bad,) * 1000
        ),
    )


REPORTS = {
    "ordinary": report(),
    "with a candidate": report(trial=trial(3)),
    "empty": empty(),
    "unreadable alone": replace(empty(), unreadable={"not-json": 3}),
    "one event": report(
        events=1,
        logical=1,
        causes=(),
        gaps=None,
        suspicions=(),
        over_time=(TimeSlice(START_MS, {Verdict.DELIVERED: 1}),),
    ),
    "no times": report(clock="none", gaps=None, over_time=(), first_ms=None, last_ms=None),
    "no gap but 0": report(gaps=gaps(5, longest=0)),
    "gaps of months": report(gaps=gaps(1, longest=90 * DAY), window_ms=90 * DAY),
    "beyond any calendar": report(
        over_time=(TimeSlice(10**17, {}), TimeSlice(10**17 + MINUTE, {}))
    ),
    "nasty": nasty(),
    "as large as it gets": largest(),
}


@pytest.mark.parametrize("name", REPORTS)
def test_the_page_is_sound_and_small(name):
    text = made(REPORTS[name])
    Page(text)
    assert text.startswith(MARK)
    assert len(text.encode()) < 200_000
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", REPORTS)
def test_nothing_is_loaded_and_nothing_runs(name):
    text = made(REPORTS[name])
    read = Page(text)
    assert not read.all("script") + read.all("link") + read.all("img") + read.all("iframe")
    for tag, attributes in read.tags:
        assert not [a for a in attributes if a.startswith("on") or a in ("style", "src", "href")], (
            tag
        )
    assert "@import" not in text
    assert "url(" not in text
    (policy,) = [m["content"] for m in read.all("meta") if "http-equiv" in m]
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert b64encode(sha256(style.encode()).digest()).decode() in policy


def test_what_comes_out_of_events_is_text_and_nothing_else():
    text = made(nasty())
    assert "<script" not in text
    assert "<img" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\\x1b[31m" in text


def test_long_names_are_cut():
    long = "x" * 100_000
    text = made(report(topics=(tally(long),) * 15, entities=(tally(long),) * 15))
    assert len(text) < 60_000


def test_it_says_what_the_terminal_says():
    text = " ".join(Page(made(report(trial=trial(3)))).text)
    for said in (
        "12,340 arrivals contain 9,001 events; 3,339 arrivals are duplicates",
        "the same envelope id: a queue, rule or target sent it again".capitalize(),
        "would have missed 207 duplicates",
        "6,312",
        "double emission",
        "not-json",
        "The candidate rules decide differently for 3 arrivals",
        'preset = "genesys"',
        "It contains no payload",
    ):
        assert said in text, said


def test_every_chart_has_words_and_a_table():
    text = made(report())
    read = Page(text)
    pictures = [a for a in read.all("svg") if a.get("role") == "img"]
    assert len(pictures) == 4  # two charts, for two widths
    for svg in re.findall(r'<svg class="chart".*?</svg>', text):
        root = ET.fromstring(svg)
        title, desc = root[0], root[1]
        assert (title.tag, desc.tag) == ("title", "desc")
        assert root.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
        assert title.text
        assert desc.text
    assert len(re.findall("<summary>Data table</summary>", text)) == 2


def test_headings_follow_each_other():
    levels = [
        int(tag[1])
        for tag, _ in Page(made(report(trial=trial(3)))).tags
        if tag in ("h1", "h2", "h3")
    ]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))


def test_tables_say_what_their_columns_are():
    for head in Page(made(report(trial=trial(3)))).all("th"):
        assert head["scope"] in ("col", "row")


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


def test_words_and_bars_stand_out_by_light_by_dark_and_on_paper():
    roots = re.findall(r":root \{(.*?)\}", made(report()), re.DOTALL)
    assert len(roots) == 3
    for root in roots:
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", root))
        for name in ("ink", "quiet", "accent", "bad"):
            assert contrast(colours[name], colours["paper"]) >= 4.5, name
            assert contrast(colours[name], colours["soft"]) >= 4.5, name
        bars = {"delivered", "duplicate", "stale", "unchanged", "conflict", "dead", "bypassed"}
        for verdict in bars | {"discarded"}:
            assert contrast(colours[verdict], colours["paper"]) >= 3, verdict


# --- charts -------------------------------------------------------------------------------

CHART = charts.Chart("c", "A title", "A text")


def rects(svg: str, kind: str) -> list[dict[str, float]]:
    """Read the bars of one kind out of their outline."""
    (outline,) = [
        path.get("d") for path in ET.fromstring(svg).iter("path") if path.get("class") == kind
    ]
    bars = re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-\3z", outline)
    assert len(bars) == outline.count("z")
    return [dict(zip(("x", "y", "width", "height"), map(float, bar), strict=True)) for bar in bars]


def test_bars_stand_on_each_other_and_are_as_high_as_their_numbers():
    moments = [TimeSlice(START_MS, {Verdict.DELIVERED: 30, Verdict.DUPLICATE: 10})]
    svg = charts.arrivals(moments, charts.WIDE, CHART)
    (passed,), (repeated,) = rects(svg, "v-delivered"), rects(svg, "v-duplicate")
    assert passed["height"] == pytest.approx(3 * repeated["height"], rel=0.02)
    assert repeated["y"] + repeated["height"] == pytest.approx(passed["y"], abs=0.2)


def test_spans_without_arrivals_are_left_empty():
    counts = {Verdict.DELIVERED: 5}
    moments = [TimeSlice(START_MS + n * MINUTE, counts) for n in (0, 1, 9)]
    first, second, third = rects(charts.arrivals(moments, charts.WIDE, CHART), "v-delivered")
    step = second["x"] - first["x"]
    assert third["x"] - first["x"] == pytest.approx(9 * step, rel=0.01)


def test_no_arrival_is_lost_where_bars_are_gathered():
    moments = [TimeSlice(START_MS + n * MINUTE, {Verdict.DELIVERED: 1}) for n in range(1000)]
    svg = charts.arrivals(moments, charts.NARROW, CHART)
    bars = rects(svg, "v-delivered")
    assert len(bars) < 60
    assert all(0 <= bar["x"] <= charts.NARROW for bar in bars)


@pytest.mark.parametrize("width", [charts.WIDE, charts.NARROW])
def test_the_windows_are_marked_where_they_are(width):
    svg = draw_gaps(gaps(0, 3, 9, 2, 0, 0, 0, 0, 1, 4), 30 * DAY, width, CHART)
    for said in (
        "5\xa0min window",
        "24\xa0h window",
        "6\xa0d window",
        "30\xa0d, the window of your rules",
    ):
        assert said in svg
    marks = [float(x) for x in re.findall(r'class="window[^"]*" d="M([\d.]+) ', svg)]
    assert marks == sorted(marks)
    assert marks[-1] <= width
    # 6 d is the upper bound of the last bin
    last = rects(svg, "gap")[-1]
    assert last["x"] + last["width"] == pytest.approx(marks[2], abs=1.5)


def test_a_single_repeat_is_seen_beside_a_million():
    bars = rects(draw_gaps(gaps(1_000_000, 1), 6 * DAY, charts.WIDE, CHART), "gap")
    assert min(bar["height"] for bar in bars) >= 1
