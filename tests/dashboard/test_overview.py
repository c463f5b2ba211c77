"""The first page: one look tells whether it works, what is dropped, and what needs somebody."""

import re
import shlex
import threading
import time
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard import fleets
from tests.dashboard.fleets import MINUTE, NOW_MS, busy, histogram, route, state, view
from tests.unit.test_dead_letters import letter

from oncebridge.base.clock import SystemDice
from oncebridge.dashboard import health
from oncebridge.dashboard.data import DashboardData
from oncebridge.dashboard.health import COUNTERS, DeadLetterCount, HealthFinding, HealthSummary
from oncebridge.dashboard.page import PageRequest
from oncebridge.dashboard.rates import RateTracker, Totals, by_minutes
from oncebridge.dashboard.rendering import environment, rate, seconds, short, soft
from oncebridge.dashboard.views import overview
from oncebridge.dead_letters.api import DeadLetter
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.engine import pauses
from oncebridge.engine.counters import Books
from oncebridge.engine.verdict import Verdict
from oncebridge.errors import StoreUnavailable
from oncebridge.observe.counts import LAGS, SECONDS, CallCounts, Counts
from oncebridge.observe.fleet import FleetView
from oncebridge.observe.report import Report, RouteState, StoreHealth

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7*7 }}"


def judged(
    seen: FleetView, *, letters: DeadLetterCount | None = None, off: bool = False
) -> HealthSummary:
    tracker = RateTracker()
    tracker.observe(seen)
    return health.of(seen, tracker, letters or DeadLetterCount(), history_is_off=off)


def values_of(seen: FleetView, tracker: RateTracker, found: HealthSummary) -> dict[str, Any]:
    return overview._laid_out(seen, tracker.rates(), tracker.durations(), found)


def page(seen: FleetView, **more: Any) -> str:
    tracker = RateTracker()
    tracker.observe(seen)
    found = health.of(seen, tracker, more.pop("letters", DeadLetterCount()))
    values = {**values_of(seen, tracker, found), **more}
    return rendered(**values)


def rendered(**values: Any) -> str:
    template = environment().get_template("overview.html")
    return template.render(page_request=PageRequest(path="/"), here="overview", note="", **values)


def until(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.2)


def told(found: HealthSummary, part: str) -> HealthFinding:
    (one,) = [one for one in found.findings if part in one.text]
    return one


def well(**more: Any) -> Report:
    return Report(state(**more), Counts({"crm": route({"delivered": 5, "duplicate": 2})}))


def test_a_route_shows_why_its_events_may_have_been_delivered_twice() -> None:
    counted = {"delivered": 5, "ambiguous": 3, "retried": 1, "lease_lost": 2}
    shown = re.sub(r"\s+", " ", page(view(Report(state(), Counts({"crm": route(counted)})))))
    assert "ambiguous 3, retried 1, lease lost 2</span>" in shown


# --- the sentence -------------------------------------------------------------------------


def test_it_works_and_says_how_fast() -> None:
    found = judged(busy())
    assert (found.kind, found.word) == ("good", "Running")
    assert re.fullmatch(
        r"[\d.]+ arrivals/s on 2 routes, [\d.]+/s delivered, [\d.]+/s duplicates dropped\.",
        found.text,
    )
    assert not found.findings


def test_on_one_route_an_arrival_is_an_event() -> None:
    counts = Counts({"crm": route({"delivered": 5})}, minutes={MINUTE: {"delivered": 5}})
    assert "events/s received, " in judged(view(Report(state(), counts))).text


def test_nothing_arrived_lately() -> None:
    found = judged(view(well()))
    assert (found.word, found.text) == ("Running", "No events received in the last minute.")


def test_nothing_ever_arrived() -> None:
    found = judged(view(Report(state(), Counts())))
    assert (found.kind, found.word) == ("good", "Ready")


def test_no_worker_at_all() -> None:
    found = judged(view())
    assert (found.kind, found.text) == ("off", "No worker has reported.")


def test_all_workers_ended() -> None:
    found = judged(view(well(ended=True, at_ms=NOW_MS - 120_000)))
    assert found.word == "No workers running"
    assert "2\N{NO-BREAK SPACE}min ago" in found.text


def test_in_shadow_mode_no_repeat_is_stopped() -> None:
    seen = busy()
    for report in seen.reports:
        for here in report.state.routes.values():
            here.mode = "shadow"
    assert "found and delivered (shadow mode)" in judged(seen).text


def test_where_one_route_of_several_is_in_shadow_mode_not_all_repeats_were_stopped() -> None:
    seen = busy()
    seen.reports[1].state.routes["crm"].mode = "shadow"
    assert judged(seen).text.endswith("/s duplicates found.")


def test_where_nobody_runs_that_is_what_is_said_first() -> None:
    killed = well(name="a", at_ms=NOW_MS - 90_000)
    found = judged(view(killed, well(name="b", ended=True)), letters=DeadLetterCount(3))
    assert (found.kind, found.word) == ("bad", "No workers running")
    assert found.text.startswith("Worker a has not reported for 1\N{NO-BREAK SPACE}min 30")


def test_where_the_only_route_is_paused_nothing_works() -> None:
    paused = {"crm": RouteState(paused=True)}
    found = judged(view(well(routes=paused), well(name="b", routes=paused)))
    assert (found.kind, found.word) == ("bad", "Needs attention")
    assert told(found, "Route crm is paused").kind == "bad"


def test_where_one_route_of_two_is_paused_the_other_one_works() -> None:
    routes = {"crm": RouteState(paused=True), "lake": RouteState()}
    found = judged(view(well(routes=routes)))
    assert (found.kind, found.word) == ("warn", "Running")


def test_the_worst_comes_first_and_a_long_list_is_cut() -> None:
    down = {f"r{at}": RouteState(down=("the sink",)) for at in range(6)}
    found = judged(view(Report(state(routes=down), Counts())), letters=DeadLetterCount(41))
    assert found.word == "Needs attention"
    assert found.text.startswith("The sink of route r0 is down. The sink of route r1 is down. ")
    assert found.text.endswith(" And 4 more.")
    assert [one.kind for one in found.findings] == ["bad"] * 6 + ["warn"]


# --- what needs somebody ------------------------------------------------------------------


def test_a_sink_that_is_down_is_told_with_how_long_and_when_it_is_tried() -> None:
    down = {"crm": RouteState(down=("the sink",), down_for_s=12.4)}
    tracker = RateTracker()
    for at_ms in (0, 180_000):
        seen = view(Report(state(routes=down, at_ms=NOW_MS + at_ms), Counts()))
        seen.now_ms = NOW_MS + at_ms
        tracker.observe(seen)
        found = health.of(seen, tracker, DeadLetterCount())
    one = told(found, "sink of route crm")
    assert (one.kind, one.href) == ("bad", "/decisions?route=crm&verdict=failed")
    assert "for at least 3\N{NO-BREAK SPACE}min" in one.text
    assert "Next try in 12\N{NO-BREAK SPACE}s" in one.help


def test_a_sink_that_came_back_and_went_again_is_counted_anew() -> None:
    tracker = RateTracker()
    for at_ms, down in ((0, True), (60_000, False), (120_000, True)):
        here = {"crm": RouteState(down=("the sink",) if down else ())}
        seen = view(Report(state(routes=here, at_ms=NOW_MS + at_ms), Counts()))
        seen.now_ms = NOW_MS + at_ms
        tracker.observe(seen)
        found = health.of(seen, tracker, DeadLetterCount())
    assert told(found, "sink of route crm").text == "The sink of route crm is down."


def test_what_is_paused_is_not_tried_again() -> None:
    down = {"crm": RouteState(down=("the sink",), down_for_s=5.0, paused=True)}
    assert "Next try" not in told(judged(view(well(routes=down))), "is down").help


def test_a_sink_is_down_for_some_of_the_workers() -> None:
    down = {"crm": RouteState(down=("the sink",))}
    found = judged(view(Report(state("a", routes=down), Counts()), well(name="b")))
    assert "for 1 of 2 workers" in told(found, "is down").text


@pytest.mark.parametrize(
    ("more", "part", "kind"),
    [
        ({"routes": {"crm": RouteState(down=("the store",))}}, "The store of route crm", "bad"),
        ({"routes": {"crm": RouteState(paused=True)}}, "Route crm is paused", "bad"),
        ({"routes": {"crm": RouteState(balanced=False)}}, "books of route crm do not", "bad"),
        ({"routes": {"crm": RouteState(owed=3)}}, "3 deliveries of route crm", "warn"),
        ({"at_ms": NOW_MS - 31_000}, "has not reported for 31", "bad"),
        ({"not_ready": ("the store is not available yet",)}, "is not ready: the store", "bad"),
        ({"not_ready": ("shutting down",)}, "is not ready: shutting", "warn"),
        ({"store": StoreHealth("redis", answers=False)}, "The store did not answer worker", "bad"),
        (
            {"store": StoreHealth("redis", clock_offset_ms=-2500), "at_ms": NOW_MS + 2000},
            "clock is 2.5\N{NO-BREAK SPACE}s behind",
            "warn",
        ),
        ({"store": StoreHealth("redis", evicted=7)}, "evicted 7 records", "note"),
    ],
)
def test_what_a_worker_tells_is_found(more: dict[str, Any], part: str, kind: str) -> None:
    found = judged(view(well(**more)))
    one = told(found, part)
    assert one.kind == kind
    assert one.href
    assert one.link


def test_a_worker_that_is_well_is_no_finding() -> None:
    small = StoreHealth("redis", True, 5, 5, 0, 1999)
    assert judged(view(well(at_ms=NOW_MS - 31_999, store=small))).findings == ()


def test_a_silent_worker_is_less_bad_where_others_work() -> None:
    found = judged(view(well(name="a", at_ms=NOW_MS - 90_000), well(name="b")))
    assert (found.kind, told(found, "Worker a").kind) == ("warn", "warn")


def test_what_a_silent_worker_said_of_its_routes_does_not_count_any_more() -> None:
    here = {"crm": RouteState(paused=True)}
    found = judged(view(well(name="a", at_ms=NOW_MS - 90_000, routes=here), well(name="b")))
    assert [one.text[:8] for one in found.findings] == ["Worker a"]


# --- a spool ------------------------------------------------------------------------------


@pytest.mark.parametrize("why", [{"paused": True}, {"down": ("the sink",)}])
def test_what_waits_on_disk_while_nothing_passes_is_told_and_nothing_is_called_ready(
    why: dict[str, Any],
) -> None:
    seen = view(Report(state(routes={"crm": RouteState(**why)}, spooled=30), Counts()))
    found = judged(seen)
    assert (found.kind, found.word) == ("bad", "Needs attention")
    one = told(found, "30 events wait on disk")
    assert (one.kind, one.href) == ("warn", "#store")
    assert "returned to" not in " ".join(each.help for each in found.findings)
    assert "wait on disk" in told(found, "oute crm is").help
    text = " ".join(read(page(seen)).text.split())
    assert "Ready." not in text
    assert "No events received" not in text
    assert "0 in total, 30 more in the spool" in text


def test_what_leaves_the_disk_as_fast_as_it_comes_is_no_finding() -> None:
    assert judged(view(well(spooled=3))).findings == ()


def test_what_waits_on_disk_for_a_minute_is_worth_a_note() -> None:
    tracker = RateTracker()
    for at_ms in (0, 61_000):
        seen = view(well(spooled=3, at_ms=NOW_MS + at_ms), now_ms=NOW_MS + at_ms)
        tracker.observe(seen)
        found = health.of(seen, tracker, DeadLetterCount())
    assert told(found, "3 events wait on disk").kind == "note"
    assert found.text == "No events left the spool in the last minute."


def test_before_the_first_event_leaves_the_disk_it_is_not_waited_for() -> None:
    seen = view(Report(state(spooled=1), Counts()))
    assert judged(seen).word == "Running"
    assert "curl" not in read(page(seen)).text


def test_where_a_sink_is_down_nobody_is_told_to_send_a_first_event() -> None:
    down = {"crm": RouteState(down=("the sink",))}
    assert "curl" not in read(page(view(Report(state(routes=down), Counts())))).text


# --- those that are gone ------------------------------------------------------------------


def gone(name: str, ago_ms: int, *, ended: bool = False) -> Report:
    return Report(state(name, at_ms=NOW_MS - ago_ms, ended=ended, routes={}), Counts())


def test_who_went_without_a_word_is_a_finding_for_an_hour_and_listed_for_longer() -> None:
    seen = view(well(name="here"))
    seen.gone = [
        gone("killed", 12 * 60_000),
        gone("Killed-2", 50 * 60_000),
        gone("long-ago", 3_700_000),
        gone("polite", 12 * 60_000, ended=True),
    ]
    found = judged(seen)
    (one,) = found.findings
    assert one.text == "Workers killed, Killed-2 disappeared."
    assert (one.kind, one.href, found.word) == ("warn", "#workers", "Running")
    workers = {
        row.state.name: row.status for row in values_of(seen, RateTracker(), found)["workers"]
    }
    assert workers == {
        "here": "running",
        "killed": "disappeared",
        "Killed-2": "disappeared",
        "long-ago": "disappeared",
    }
    assert "long-ago" in read(page(seen)).text


def test_of_many_that_went_without_a_word_the_latest_are_listed() -> None:
    seen = view(well(name="here"))
    seen.gone = [gone(f"spot-{at:02}", at * 60_000) for at in range(60)]
    workers = values_of(seen, RateTracker(), judged(seen))["workers"]
    assert [row.state.name for row in workers[:3]] == ["here", "spot-00", "spot-01"]
    assert len(workers) < 30
    assert "and 57 more disappeared" in judged(seen).text


# --- numbers ------------------------------------------------------------------------------


def test_numbers_of_books_that_do_not_balance_are_told() -> None:
    counts = Counts({"crm": route({"delivered": 5, "arrived": 9})})
    here = {"crm": RouteState(balanced=False, in_flight=1)}
    one = told(judged(view(Report(state(routes=here), counts))), "do not balance")
    assert "9 arrived, 5 have a verdict, 1 are in flight" in one.text


@pytest.mark.parametrize(
    ("letters", "text"),
    [
        (DeadLetterCount(1), "1 dead letter needs attention."),
        (DeadLetterCount(41), "41 dead letters need attention."),
        (DeadLetterCount(100, more=True), "More than 100 dead letters need attention."),
        (DeadLetterCount(problem="no such file"), "The dead letters cannot be read: no such file"),
    ],
)
def test_dead_letters_are_for_somebody(letters: DeadLetterCount, text: str) -> None:
    (one,) = judged(view(well()), letters=letters).findings
    assert (one.kind, one.text, one.href) == ("warn", text, "/dead")


def test_history_that_is_off_is_worth_a_note() -> None:
    found = judged(view(well()), off=True)
    assert found.word == "Running"
    assert told(found, "History is off").kind == "note"


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_matters_while_it_rises_and_is_a_note_later(name: str) -> None:
    assert name in vars(Books())
    tracker, kinds = RateTracker(), []
    for after_ms, value in ((0, 2), (2_000, 3), (600_000, 3), (1_000_000, 3)):
        counts = Counts({"crm": route({"delivered": 5, name: value})})
        seen = view(Report(state(at_ms=NOW_MS + after_ms), counts), now_ms=NOW_MS + after_ms)
        tracker.observe(seen)
        found = health.of(seen, tracker, DeadLetterCount())
        kinds.append(found.findings[0].kind)
    assert kinds == ["note", COUNTERS[name][0], COUNTERS[name][0], "note"]


# --- rates --------------------------------------------------------------------------------


def counted(at_ms: int, arrived: int, **more: Any) -> Report:
    books = {"delivered": arrived // 2, "duplicate": arrived - arrived // 2}
    return Report(state(at_ms=NOW_MS + at_ms, **more), Counts({"crm": route(books)}))


def test_a_rate_is_what_was_counted_between_two_reports() -> None:
    tracker = RateTracker()
    for at_ms in range(0, 92_000, 2_000):
        tracker.observe(view(counted(at_ms, at_ms // 10), now_ms=NOW_MS + at_ms))
    assert tracker.rates() == Totals(100.0, 50.0, 50.0, 0.0)


def test_what_was_seen_an_hour_ago_does_not_make_a_rate_of_now() -> None:
    tracker = RateTracker()
    tracker.observe(view(counted(0, 0), now_ms=NOW_MS))
    for at_s in (0, 2, 10, 30, 58, 61, 70):
        at_ms = 3_600_000 + at_s * 1000
        tracker.observe(view(counted(at_ms, 36_000), now_ms=NOW_MS + at_ms))
        assert tracker.rates() == Totals(), at_s


def test_a_short_look_that_sees_nothing_does_not_deny_the_minute() -> None:
    tracker = RateTracker()
    for at_ms in (0, 10_000):
        report = counted(at_ms, 60)
        report.counts.minutes = {MINUTE: {"delivered": 60}}
        tracker.observe(view(report, now_ms=NOW_MS + at_ms))
    assert tracker.rates().arrived == pytest.approx(1.0)


def test_sums_that_fall_give_no_rate_below_nothing() -> None:
    tracker = RateTracker()
    for at_ms, arrived in ((0, 5000), (30_000, 10), (60_000, 70)):
        tracker.observe(view(counted(at_ms, arrived), now_ms=NOW_MS + at_ms))
    assert tracker.rates().arrived == pytest.approx(2.0)


def test_rates_of_several_workers_add_up_by_the_clock_of_each() -> None:
    tracker = RateTracker()
    ahead = StoreHealth(clock_offset_ms=-500_000)
    for at_ms in range(0, 62_000, 2_000):
        one = counted(at_ms, at_ms // 100, name="a")
        other = counted(
            500_000 + at_ms - at_ms % 10_000, (at_ms - at_ms % 10_000) // 100, name="b", store=ahead
        )
        tracker.observe(view(one, other, now_ms=NOW_MS + at_ms))
    assert tracker.rates().arrived == pytest.approx(20.0)


def test_whoever_looks_for_the_first_time_sees_a_rate_by_the_minutes() -> None:
    minutes = {MINUTE: {"delivered": 21, "failed": 21}, MINUTE - 1: {"duplicate": 60}}
    at_ms = NOW_MS  # 21 seconds into the minute
    found = by_minutes(Report(state(at_ms=at_ms), Counts(minutes=minutes)))
    assert found.arrived == pytest.approx((42 + 60 * 39 / 60) / 60)
    assert found.repeats == pytest.approx(39 / 60)
    assert found.forwarded == found.failing == pytest.approx(21 / 60)


def test_what_was_passed_on_counts_whatever_its_verdict() -> None:
    told = {"delivered": 5, "duplicate": 50, "conflict": 5, "forwarded": 60}
    found = by_minutes(Report(state(), Counts(minutes={MINUTE: told})))
    assert (found.arrived, found.forwarded) == (pytest.approx(1.0), pytest.approx(1.0))


def test_a_worker_that_just_began_is_not_measured_by_a_whole_minute() -> None:
    here = state(started_ms=NOW_MS - 4_000, at_ms=NOW_MS)
    found = by_minutes(Report(here, Counts(minutes={MINUTE: {"delivered": 40}})))
    assert found.arrived == pytest.approx(10)


def test_who_ended_or_is_silent_has_no_rate() -> None:
    minutes = {MINUTE: {"delivered": 100}}
    ended = Report(state("a", ended=True), Counts(minutes=minutes))
    silent = Report(state("b", at_ms=NOW_MS - 61_000), Counts(minutes=minutes))
    tracker = RateTracker()
    tracker.observe(view(ended, silent))
    assert tracker.rates() == Totals()


def test_a_clock_that_was_set_back_gives_no_nonsense() -> None:
    tracker = RateTracker()
    for at_ms in (0, 10_000, -3_600_000):
        tracker.observe(view(counted(at_ms, 50), now_ms=NOW_MS))
    assert tracker.rates() == Totals()


def test_times_are_of_the_last_minute_once_that_is_known() -> None:
    tracker = RateTracker()
    slow, quick = [2.0] * 50, [0.004] * 10
    for at_ms, values in ((0, slow), (30_000, slow + quick)):
        crm = route({"delivered": len(values)}, took=histogram(values, SECONDS), failed_sends=3)
        store = {"claim": CallCounts(histogram(values, SECONDS), failed=at_ms and 1)}
        seen = view(Report(state(at_ms=NOW_MS + at_ms), Counts({"crm": crm}, store)))
        tracker.observe(seen)
        lines = values_of(seen, tracker, judged(seen))["lines"]
        took, claim = lines
        if not at_ms:
            assert (took.count, took.lately) == (50, False)
    assert (took.count, took.lately, claim.count, claim.failed) == (10, True, 10, 1)
    assert took.p95 == "4.9\N{NO-BREAK SPACE}ms"


@pytest.mark.parametrize("ended", [True, False])
def test_times_of_who_works_no_more_are_not_of_the_last_minute(*, ended: bool) -> None:
    tracker = RateTracker()
    for at_ms, now_ms in ((0, 0), (30_000, 30_000), (30_000, 120_000)):
        crm = route({"delivered": 1}, took=histogram([1.0] * (1 + at_ms // 1000), SECONDS))
        here = state(at_ms=NOW_MS + at_ms, ended=ended and bool(at_ms))
        tracker.observe(view(Report(here, Counts({"crm": crm})), now_ms=NOW_MS + now_ms))
        assert (tracker.durations() is not None) is (now_ms == 30_000)


def test_what_is_above_all_ends_is_told_as_such() -> None:
    crm = route({"delivered": 1}, lag=histogram([90_000.0] * 3, LAGS))
    seen = view(Report(state(), Counts({"crm": crm})))
    (line,) = values_of(seen, RateTracker(), judged(seen))["lines"]
    assert line.p50 == "> 1\N{NO-BREAK SPACE}d"


# --- the page -----------------------------------------------------------------------------


class _Reader(HTMLParser):
    """Collects what a page is made of, and that it is well formed enough to be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "input", "br", "img", "wbr", "circle", "path", "rect"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def read(html: str) -> _Reader:
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def names(reader: _Reader, name: str) -> list[str]:
    return [value for _, attrs in reader.tags if (value := attrs.get(name))]


@pytest.fixture(scope="module")
def busy_page() -> _Reader:
    return read(page(busy()))


def test_a_busy_page_shows_what_there_is(busy_page: _Reader) -> None:
    for part in ("Running.", "redelivery", "4,100", "crm", "warehouse", "unrouted", "worker-a-17"):
        assert part in busy_page.text
    hrefs = names(busy_page, "href")
    assert "/decisions?q=v2.users.%7Bid%7D.presence" in hrefs
    assert "/decisions?cause=redelivery" in hrefs
    assert any(href.startswith("/decisions?q=8f6d0c1e") for href in hrefs)
    assert "30,726 received = 30,723 decided + 6 in flight" in busy_page.text


def test_nothing_of_it_needs_what_the_policy_forbids(busy_page: _Reader) -> None:
    for tag, attrs in busy_page.tags:
        assert tag != "style"
        assert "style" not in attrs
        assert not [name for name in attrs if name.startswith("on")]
        assert tag != "script" or attrs.get("src") == "/static/app.js"
    outside = [at for at in names(busy_page, "src") + names(busy_page, "href") if "//" in at]
    assert outside == []


def test_every_live_part_has_a_name_that_nobody_else_has(busy_page: _Reader) -> None:
    ids = names(busy_page, "id")
    assert len(ids) == len(set(ids))
    live = [attrs for _, attrs in busy_page.tags if "data-live" in attrs]
    assert len(live) >= 8
    assert all(attrs.get("id") for attrs in live)


def test_it_can_be_read_without_eyes(busy_page: _Reader) -> None:
    tags = [tag for tag, _ in busy_page.tags]
    assert tags.count("h1") == tags.count("main") == 1
    assert tags.count("table") == tags.count("caption")
    assert all(attrs.get("scope") for tag, attrs in busy_page.tags if tag == "th")
    for _, attrs in busy_page.tags:
        for name in ("aria-labelledby", "aria-describedby"):
            assert set((attrs.get(name) or "").split()) <= set(names(busy_page, "id"))
        if attrs.get("role") == "region":
            assert attrs.get("tabindex") == "0"
            assert attrs.get("aria-label")
    (current,) = [attrs for _, attrs in busy_page.tags if attrs.get("aria-current")]
    assert current.get("href") == "/"


def test_names_that_hold_html_stay_names() -> None:
    evil = route({"delivered": 1}, causes={EVIL: 3})
    counts = Counts(
        {EVIL: evil},
        {EVIL: CallCounts(histogram([0.1], SECONDS))},
        {MINUTE: {EVIL: 2, "delivered": 1}},
        {EVIL: {"arrived": 2, "repeats": 1}},
        {EVIL: 3},
    )
    here = state(
        name=EVIL,
        host=EVIL,
        version=EVIL,
        sources=(EVIL,),
        routes={EVIL: RouteState(EVIL, EVIL, paused=True, down=("the sink", EVIL))},
        store=StoreHealth(EVIL, answers=False),
        not_ready=(EVIL,),
    )
    html = page(view(Report(here, counts)), letters=DeadLetterCount(problem=EVIL))
    reader = read(html)
    assert "<script>alert" not in html
    assert "<img" not in html
    assert "alert(1)" in reader.text
    assert "{{ 7*7 }}" in reader.text
    assert [tag for tag, _ in reader.tags].count("script") == 1


def test_what_cannot_be_printed_is_spelt_out() -> None:
    name = "crm\N{RIGHT-TO-LEFT OVERRIDE}\x1b[31m"
    html = page(view(Report(state(routes={name: RouteState()}), Counts({name: route()}))))
    assert "\\u202e" in html
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in read(html).text


def test_long_names_and_huge_numbers_are_cut_and_kept_in_full_beside() -> None:
    name = "https://crm.example.com/" + "a" * 3000
    counts = Counts({name: route({"delivered": 10**14 + 7})})
    html = page(view(Report(state(routes={name: RouteState(name)}), counts)))
    assert "a" * 200 not in read(html).text
    assert "100T" in read(html).text
    assert 'title="100,000,000,000,007"' in html


def test_before_the_first_worker_it_says_how_to_start_one() -> None:
    reader = read(page(view()))
    assert "No workers yet" in reader.text
    assert "oncebridge run" in reader.text


def test_before_the_first_event_it_says_how_to_send_one() -> None:
    text = read(page(view(Report(state(), Counts())))).text
    assert "curl -H 'Content-Type: application/json' -d '{" in text
    assert "' http://127.0.0.1:8080/events" in text


def test_before_the_first_event_of_a_queue_it_says_whence_it_comes() -> None:
    text = read(page(view(Report(state(sources=("sqs://genesys",)), Counts())))).text
    assert "curl" not in text
    assert "sqs://genesys" in text


def test_after_the_first_event_nobody_is_told_how() -> None:
    assert "curl" not in read(page(view(well()))).text


def test_a_store_that_is_away_is_the_whole_page() -> None:
    reader = read(rendered(health=health.store_away("redis: gone"), view=None))
    assert "Needs attention." in reader.text
    assert "redis: gone" in reader.text
    assert "Routes" not in reader.text


def test_what_was_with_workers_that_are_gone_is_told_and_no_fault() -> None:
    past = Counts({"crm": route({"delivered": 5, "arrived": 8})})
    seen = view(Report(state(), Counts()), past=past)
    assert judged(seen).kind == "good"
    assert (
        "8 received = 5 decided + 0 in flight + 3 held by workers that disappeared"
        in read(page(seen)).text
    )


def test_repeats_without_an_entity_are_repeats_all_the_same() -> None:
    text = read(page(view(well()))).text
    assert "2 in total" in " ".join(text.split())
    assert "No duplicates yet." not in text
    assert "No duplicate had an entity" in text
    assert "No topics yet." not in text
    assert "No duplicates yet." in read(page(view(Report(state(), Counts())))).text


def test_causes_that_several_workers_found_are_called_guesses() -> None:
    alone = view(Report(state("a"), Counts({"crm": route({}, causes={"re-emission": 3})})))
    assert "may be counted as re-emission" not in read(page(alone)).text
    alone.reports.append(well(name="b"))
    assert "may be counted as re-emission" in read(page(alone)).text


def test_what_arrived_on_several_routes_is_counted_on_each() -> None:
    assert "in total, on 2 routes" in " ".join(read(page(busy())).text.split())


def test_unrouted_comes_last() -> None:
    counts = Counts({"unrouted": route({"dead": 1}), "zoo": route(), "crm": route()})
    seen = view(Report(state(), counts))
    found = values_of(seen, RateTracker(), judged(seen))
    assert [way.name for way in found["ways"]] == ["crm", "zoo", "unrouted"]


# --- from a real service ------------------------------------------------------------------

EVENT = b'{"version":"0","id":"one","source":"com.example","detail-type":"Hello","detail":{"n":1}}'


def shown(visitor: Any) -> str:
    answer = visitor.get("/")
    assert answer.status == 200
    return " ".join(read(answer.text).text.split())


def test_what_was_sent_twice_is_passed_on_once_and_told_so(service: Any) -> None:
    live, visitor = service(route="crm", history="off")
    assert "Ready. No events received yet." in shown(visitor)
    for _ in range(2):
        assert live.post(EVENT).status == 200
    live.post(b'{"no":"event"}')
    until(lambda: "duplicate 1" in shown(visitor))
    text = shown(visitor)
    assert "delivered 1 duplicate 1 dead 1" in text
    assert "3 received = 3 decided + 0 in flight" in text
    assert "redelivery" in text
    assert "1 dead letter needs attention." in text
    assert "History is off" in text


def test_the_command_for_a_first_event_is_one_that_works(service: Any) -> None:
    live, visitor = service()
    found = re.search(r"<code>(curl [^<]+)</code>", visitor.get("/").text)
    assert found
    argv = shlex.split(unescape(found.group(1)))
    assert argv[:2] == ["curl", "-H"]
    assert argv[-1] == live.service.sources[0].url
    assert live.post(argv[argv.index("-d") + 1].encode()).status == 200


def test_what_shadow_mode_passes_on_is_told_at_first_sight(service: Any) -> None:
    live, visitor = service(route="crm", mode="shadow")
    for _ in range(3):
        assert live.post(EVENT).status == 200
    until(lambda: "duplicate 2" in shown(visitor))
    found = re.search(r"([\d.]+) events/s received, ([\d.]+)/s delivered", shown(visitor))
    assert found
    assert found.group(1) == found.group(2)


def test_what_is_spooled_while_the_route_is_paused_is_on_the_page(
    service: Any, tmp_path: Path
) -> None:
    live, visitor = service(route="crm", spool=str(tmp_path / "spool.db"))
    (name,) = [gateway.route for gateway in live.service.router.gateways]
    live.do(lambda: pauses.pause(live.store, [name], SystemDice()))
    until(lambda: "is paused" in shown(visitor))
    assert live.post(EVENT).status == 202
    until(lambda: "1 event waits on disk" in shown(visitor))
    text = shown(visitor)
    assert f"Needs attention. Route {name} is paused. 1 event waits on disk." in text
    assert "Ready." not in text


def test_beside_no_worker_it_says_so(serve: Any) -> None:
    assert "No workers yet. No worker has reported." in shown(serve())


class _Gone:
    """A store that went away after it was opened."""

    async def open(self) -> None: ...

    async def aclose(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        async def fail(*_: Any, **__: Any) -> None:
            raise StoreUnavailable("nobody answers at that address")

        return fail


def test_a_store_that_went_away_is_told_by_a_page_and_no_error(serve: Any) -> None:
    text = shown(serve(store=_Gone()))
    assert "Needs attention. The store cannot be reached." in text
    assert "nobody answers at that address." in text


def test_where_the_store_is_away_the_worker_here_is_shown_all_the_same(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, visitor = service(route="crm")
    live.post(EVENT)

    async def fail(_: Any) -> None:
        raise StoreUnavailable("nobody answers")

    monkeypatch.setattr(DashboardData, "view", fail)
    text = shown(visitor)
    assert "Needs attention. The store cannot be reached: nobody answers" in text
    assert "delivered 1" in text


# --- words --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (0.004, "0.01"), (0.3, "0.3"), (12.44, "12.4"), (123.4, "123"), (4567.8, "4,568")],
)
def test_rates_have_the_places_that_mean_something(number: float, text: str) -> None:
    assert rate(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(999_999, "999,999"), (1_234_567, "1.23M"), (12_345_678, "12.3M"), (4 * 10**15, "4.00P")],
)
def test_numbers_stay_short(number: int, text: str) -> None:
    assert short(number) == text


def test_long_words_may_break_at_their_joints_and_stay_escaped() -> None:
    assert soft("v2.users.{id}") == "v2.<wbr>users.<wbr>{id}"
    assert soft("<a.b>&c-d") == "&lt;a.<wbr>b&gt;&amp;c-<wbr>d"
    assert soft("a.&b/<i>") == "a.&amp;b/&lt;i&gt;"


def test_a_verdict_is_told_by_a_word_a_shape_and_a_colour() -> None:
    macro = environment().get_template("parts.html").module
    shown = {v: str(macro.verdict(v.value)) for v in Verdict}  # type: ignore[attr-defined]
    shapes = {re.search(r' d="([^"]+)"', html).group(1) for html in shown.values()}  # type: ignore[union-attr]
    assert len(shapes) == len(Verdict)
    assert all(f"v-{v}" in html and f"</svg>{v}</span>" in html for v, html in shown.items())


def test_a_time_is_told_for_people_and_machines() -> None:
    macro = environment().get_template("parts.html").module
    html = str(macro.moment(fleets.NOW_MS + 5))  # type: ignore[attr-defined]
    assert 'datetime="2026-01-01T00:37:21.005Z"' in html
    assert "2026-01-01 00:37:21<" in html
    assert seconds(None) == "\N{EN DASH}"
    assert seconds(0.0042) == "4.2\N{NO-BREAK SPACE}ms"


# --- events come first --------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 60])
def test_the_counts_of_very_many_workers_are_added_up_beside_the_loop(
    service: Any, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    live, visitor = service()
    seen = view(*[Report(state(f"worker-{at}"), Counts()) for at in range(workers)])
    threads = []
    laid_out = overview._laid_out

    async def look(_data: DashboardData) -> FleetView:
        return seen

    def noted(*given: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return laid_out(*given)

    async def here() -> threading.Thread:
        return threading.current_thread()

    monkeypatch.setattr(DashboardData, "view", look)
    monkeypatch.setattr(overview, "_laid_out", noted)
    assert visitor.get("/").status == 200
    (thread,) = threads
    assert (thread is live.do(here)) is (workers == 2)


@pytest.mark.parametrize(
    ("count", "size", "told"),
    [
        (0, 0, (0, False)),
        (9, 1, (9, False)),
        (10, 1, (10, False)),
        (100, 1, (100, False)),
        (101, 1, (100, True)),
        (500, 1, (100, True)),
        (30, 2_000_000, (10, True)),
    ],
)
async def test_letters_are_counted_without_reading_more_than_a_few_megabytes(
    count: int, size: int, told: tuple[int, bool]
) -> None:
    read = []

    class Shelf(MemoryDeadLetters):
        async def list(self, *, after: int = 0, limit: int = 100) -> list[DeadLetter]:
            found = await super().list(after=after, limit=limit)
            read.append(sum(len(one.raw) for one in found))
            return found

    shelf = Shelf()
    await shelf.put([letter(at, raw=b"x" * size) for at in range(count)])
    found, more = await overview._counted(shelf)
    assert (min(found, 100), more or found > 100) == told
    assert sum(read) <= 20_000_000
