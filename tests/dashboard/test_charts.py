"""What is drawn says what was counted, and nothing in it can be anything but a drawing."""

import itertools
import re
from importlib.resources import files
from xml.etree import ElementTree as ET

import pytest
from tests.dashboard import fleets

from oncebridge.base.formatting import MINUTE
from oncebridge.dashboard import charts
from oncebridge.engine.verdict import Verdict
from oncebridge.observe import charts as shared
from oncebridge.observe.charts import Chart
from oncebridge.observe.counts import SECONDS, Histogram


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def test_the_last_hour_has_sixty_minutes_and_those_without_arrivals_too() -> None:
    minutes = {fleets.MINUTE: {"delivered": 3}, fleets.MINUTE - 59: {"duplicate": 2}}
    hour = charts.last_hour({**minutes, fleets.MINUTE - 60: {"dead": 1}}, fleets.NOW_MS)
    assert len(hour) == 60
    assert hour[-1].verdicts == {Verdict.DELIVERED: 3}
    assert hour[0].verdicts == {Verdict.DUPLICATE: 2}
    assert sum(minute.total for minute in hour) == 5
    assert {later.begins_ms - earlier.begins_ms for earlier, later in itertools.pairwise(hour)} == {
        MINUTE
    }


def test_a_worker_whose_clock_is_ahead_is_not_cut_off() -> None:
    hour = charts.last_hour({fleets.MINUTE + 2: {"delivered": 1}}, fleets.NOW_MS)
    assert hour[-1].verdicts == {Verdict.DELIVERED: 1}


def test_a_verdict_that_nobody_knows_is_left_out_of_the_drawing() -> None:
    hour = charts.last_hour({fleets.MINUTE: {"<script>": 4, "stale": 1}}, fleets.NOW_MS)
    assert hour[-1].verdicts == {Verdict.STALE: 1}


def test_the_chart_is_drawn_for_a_desk_and_a_phone_with_words_for_those_who_do_not_see_it() -> None:
    hour = charts.last_hour({fleets.MINUTE: {"delivered": 3, "duplicate": 9}}, fleets.NOW_MS)
    (wide, data), (narrow, phone) = charts.over_time(hour)
    assert (wide, narrow) == ("wide", "narrow")
    for drawn, width, minutes in ((data, shared.WIDE, 60), (phone, shared.NARROW, 45)):
        svg = parsed(drawn)
        assert svg.get("viewBox", "").split()[2] == str(width)
        assert svg.get("role") == "img"
        named = [svg.find(f"*[@id='{name}']") for name in svg.get("aria-labelledby", "").split()]
        assert [part.tag for part in named if part is not None] == ["title", "desc"]
        assert f"12 arrivals in {minutes} minutes" in "".join(svg.itertext())
    assert not set(re.findall(r'id="([^"]+)"', data)) & set(re.findall(r'id="([^"]+)"', phone))


def test_bars_stand_on_top_of_each_other_in_the_order_of_verdicts() -> None:
    hour = charts.last_hour({fleets.MINUTE: {"duplicate": 50, "delivered": 50}}, fleets.NOW_MS)
    svg = shared.arrivals(hour, shared.WIDE, Chart("c", "t", "d"))
    outlines = {part.get("class"): part.get("d", "") for part in parsed(svg).iter("path")}
    tops = {
        kind: float(re.match(r"M[\d.]+ ([\d.]+)", outlines[kind]).group(1))  # type: ignore[union-attr]
        for kind in ("v-delivered", "v-duplicate")
    }
    assert tops["v-duplicate"] < tops["v-delivered"]


@pytest.mark.parametrize("count", [1, 10**12])
def test_a_number_of_any_size_is_drawn_within_the_frame(count: int) -> None:
    hour = charts.last_hour({fleets.MINUTE: {"delivered": count}}, fleets.NOW_MS)
    for _, drawn in charts.over_time(hour):
        height = float(parsed(drawn).get("viewBox", "").split()[3])
        ys = [float(y) for y in re.findall(r"M[\d.]+ ([\d.]+)", drawn)]
        assert ys
        assert all(0 <= y <= height for y in ys)


def test_a_spread_has_a_bar_for_each_span_that_holds_something() -> None:
    found = fleets.histogram((0.0001, 0.0001, 0.04, 700.0), SECONDS)
    svg = parsed(charts.spread(found))
    assert svg.get("aria-hidden") == "true"
    outline = next(part.get("d", "") for part in svg.iter("path") if part.get("class") == "bars")
    assert outline.count("z") == 3
    assert outline.startswith("M0 16v-16.0")  # two of four: the highest
    assert "style" not in charts.spread(found)


def test_a_spread_of_nothing_is_nothing() -> None:
    assert charts.spread(Histogram()) == ""
    assert charts.spread(Histogram([0] * 17)) == ""


@pytest.mark.parametrize("counts", [[-1], [-3, 0, -1], [0, -7, 4], [-(10**12), 1]])
def test_a_spread_of_counts_that_nobody_could_have_counted_is_drawn_as_far_as_it_goes(
    counts: list[int],
) -> None:
    svg = charts.spread(Histogram(counts))
    assert svg.count("z") == sum(count > 0 for count in counts)
    assert "v--" not in svg


def test_what_is_there_at_all_is_seen_in_its_bar() -> None:
    rects = [*parsed(charts.bar(1, 1_000_000, "v-duplicate")).iter("rect")]
    assert float(rects[1].get("width", 0)) > 0
    assert float([*parsed(charts.bar(0, 10, "v-duplicate")).iter("rect")][1].get("width", 1)) == 0


# --- the style it is drawn in -------------------------------------------------------------

STATIC = files("oncebridge.dashboard") / "static"


def colours() -> dict[str, dict[str, str]]:
    """Read the colours by name, in light and in dark."""
    style = (STATIC / "app.css").read_text("utf-8")
    light, dark = re.findall(r":root \{([^}]*)\}", style)[:2]
    named = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part)) for part in (light, dark)]
    return {"light": named[0], "dark": {**named[0], **named[1]}}


def contrast(one: str, other: str) -> float:
    """Tell the contrast of two colours, as WCAG 2 counts it."""

    def brightness(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([brightness(one), brightness(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_and_marks_can_be_told_from_what_is_behind_them(scheme: str) -> None:
    named = colours()[scheme]
    words = {
        **{key: ["paper", "soft"] for key in ["ink", "quiet", "accent", "good", "warn", "bad"]},
        "on-accent": ["accent"],
    }
    for kind in ("good", "warn", "bad"):
        words[kind] = [*words[kind], f"{kind}-soft"]
        words["ink"] = [*words["ink"], f"{kind}-soft"]
    marks = {name: ["paper"] for name in [*(v.value for v in Verdict), "edge", "focus"]}
    poor = [
        f"{front} on {back}: {found:.1f}"
        for needed, pairs in ((4.5, words), (3.0, marks))
        for front, backs in pairs.items()
        for back in backs
        if (found := contrast(named[front], named[back])) < needed
    ]
    assert not poor


def test_what_a_page_loads_is_small_and_comes_from_here() -> None:
    loaded = {file.name: file.read_bytes() for file in STATIC.iterdir() if file.is_file()}
    assert sum(map(len, loaded.values())) <= 60_000
    assert len(loaded["app.js"]) <= 10_000
    for name, body in loaded.items():
        addresses = set(re.findall(rb"https?://[^\s\"']+", body))
        assert addresses <= {b"http://www.w3.org/2000/svg"}, name
    assert b"@import" not in loaded["app.css"]
    assert b"innerHTML" not in loaded["app.js"]
