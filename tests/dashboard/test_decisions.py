"""Decisions: recent arrivals, search, and what is known beyond the history."""

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from msgspec.structs import replace
from tests.dashboard.arrivals import NOTHING, World, event, world

from oncebridge.base.clock import system_clock
from oncebridge.dashboard import DashboardData, store_lookup
from oncebridge.errors import StoreUnavailable
from oncebridge.observe.history_reader import HistoryReader
from oncebridge.service import config

ORGANISATION = "aws.partner/genesys.com/cloud/0a1b2c3d-0000-4000-8000-000000000001"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Run services; each may have settings of its own."""
    with ExitStack() as stack:
        yield lambda *more, **settings: stack.enter_context(world(tmp_path, *more, **settings))


def still() -> Callable[[], int]:
    """Make a clock that stands still."""
    now_ms = system_clock()
    return lambda: now_ms


# --- what is listed -----------------------------------------------------------------------


def test_an_event_sent_twice_shows_once_as_delivered_and_once_as_a_duplicate(run):
    live = run()
    assert live.post(event()).verdicts == ["delivered"]
    assert live.post(event()).verdicts == ["duplicate"]

    first, second = reversed(live.page().rows)

    assert (first["Verdict"], first["Cause"]) == ("delivered", NOTHING)
    assert (second["Verdict"], second["Cause"]) == ("duplicate", "redelivery")
    assert first["Topic"] == second["Topic"] == "Order Placed"
    assert first["Entity"] == "conversation-1"
    assert first["Rule"] == "default"
    assert first["Key"] == second["Key"]
    assert first["Id"].startswith("6f1c2a10") or "…" in first["Id"]
    assert re.fullmatch(r"[\d.]+\s(ms|s)", first["Took"])


def test_the_same_content_under_another_id_is_a_re_emission(run):
    live = run()
    live.send(event())
    live.send(event(id="another"))
    assert [row["Cause"] for row in live.page().rows] == ["re-emission", NOTHING]


def test_the_same_content_from_another_integration_is_a_second_integration(run):
    live = run()
    live.send(event(source=f"{ORGANISATION}/one"))
    live.send(event(source=f"{ORGANISATION}/two", id="another"))
    assert [row["Cause"] for row in live.page().rows] == ["second-integration", NOTHING]


def test_routes_are_told_apart_where_there_are_several(run):
    routes = """
        [[routes]]
        name = "crm"
        sink = "python:os:fsencode"
        [[routes]]
        name = "pager"
        sink = "python:os:fsencode"
        match = { detail-type = ["Alarm"] }
    """
    live = run(routes)
    live.send(event(**{"detail-type": "Alarm"}))

    assert sorted(row["Route"] for row in live.page().rows) == ["crm", "pager"]
    assert [row["Route"] for row in live.page("/decisions?route=pager").rows] == ["pager"]


def test_why_stands_beside_the_verdict_where_no_column_pushes_it_out_of_sight(run):
    live = run()
    live.send(event())
    cells = re.findall(r"<td.*?</td>", live.page().html, re.DOTALL)
    assert ["Why?" in cell for cell in cells[:3]] == [False, True, False]
    assert sum("Why?" in cell for cell in cells) == 1


def test_titles_are_written_alike(run):
    live = run()
    (outcome,) = live.send(event())
    pages = {
        "/decisions": "Decisions · oncebridge",
        "/decisions?q=conversation-1": "conversation-1 · Decisions · oncebridge",
        live.page().rows[0]["why"]: "delivered: Order Placed · Decisions · oncebridge",
        f"/events/{outcome.key.hex()}": (
            f"Event {outcome.key.hex()[:12]}… · Decisions · oncebridge"
        ),
    }
    for path, title in pages.items():
        assert f"<title>{title}</title>" in live.page(path).html


def test_one_route_and_one_worker_need_no_columns(run):
    live = run()
    live.send(event())
    (row,) = live.page().rows
    assert "Route" not in row
    assert "Worker" not in row


def test_what_was_looked_at_is_told(run):
    live = run()
    live.send(event(1), event(2))
    assert "The last 2 arrivals since " in live.page().text
    assert "Searched the last 2 arrivals since " in live.page("/decisions?verdict=dead").text
    assert "sampled" not in live.page().text


def test_what_was_not_kept_is_told(run):
    live = run(history="sample", clock=still())
    live.send(*[event(number) for number in range(900)])
    found = re.search(r"sampled: ([\d,]+) more were not kept", live.page().text)
    assert found
    assert int(found[1]) > 0
    assert "The history is sampled" in live.page("/decisions?q=nobody").text


def test_a_history_that_is_off_says_how_to_switch_it_on(run):
    live = run(history="off")
    live.send(event())
    page = live.page()
    assert "the history is off" in page.text
    assert 'history = "all"' in page.text
    assert "ONCEBRIDGE_HISTORY=all" in page.text


def test_before_anything_arrives_that_is_said(run):
    assert "No events received" in run().page().text


def test_the_first_page_is_live_and_older_ones_stay_as_they_are(run):
    live = run()
    live.send(*[event(number) for number in range(51)])

    first = live.page()
    assert "data-live" in first.attributes("section", id="arrivals")[0]
    assert "data-live" in live.page("/decisions?verdict=delivered").html
    older = live.page(first.links["Older"])
    assert "data-live" not in older.attributes("section", id="arrivals")[0]
    assert older.links["Newest"] == "/decisions"


def test_pages_miss_nothing_where_many_arrive_in_one_millisecond(run):
    live = run(clock=still())
    for at in range(0, 260, 20):
        live.send(*[event(number) for number in range(at, at + 20)])

    page, seen = live.page("/decisions?verdict=delivered"), []
    while True:
        seen += [row["Entity"] for row in page.rows]
        if "Older" not in page.links:
            break
        assert "verdict=delivered" in page.links["Older"]
        page = live.page(page.links["Older"])

    assert len(seen) == len(set(seen)) == 260


def test_while_the_store_is_away_what_this_worker_saw_is_shown(run):
    live = run()
    live.send(event())

    async def away(*_):
        raise StoreUnavailable("it is away")

    live.store.peek = away
    try:
        page = live.page()
        why = live.page(page.rows[0]["why"])
    finally:
        del live.store.peek
    assert [row["Verdict"] for row in page.rows] == ["delivered"]
    assert "The store does not answer" in page.text
    assert "The store did not answer: it is away" in why.text


# --- search -------------------------------------------------------------------------------


def test_search_finds_arrivals_by_whatever_one_has(run):
    live = run()
    (wanted,) = live.send(event(1))
    live.send(event(2, **{"detail-type": "Order Shipped"}))
    key = wanted.key.hex()

    for text in ("6f1c2a10-0000-4000-8000-000000000001", "conversation-1", key, key[:10]):
        rows = live.page(f"/decisions?{urlencode({'q': text})}").rows
        assert [row["Entity"] for row in rows] == ["conversation-1"], text
    by_topic = live.page("/decisions?q=Order+Shipped").rows
    assert [row["Entity"] for row in by_topic] == ["conversation-2"]
    assert live.page(f"/decisions?q={key[:12]}%E2%80%A6").rows, "a key as it is shown"
    (shown,) = (row["Id"] for row in rows)
    assert "…" in shown
    rows = live.page(f"/decisions?{urlencode({'q': shown})}").rows
    assert [row["Entity"] for row in rows] == ["conversation-1"], "an id as it is shown"
    assert len(live.page("/decisions?q=6f1c2a10").rows) == 2, "the beginning of an id"


def test_filters_narrow_and_are_kept_in_the_address(run):
    live = run()
    live.send(event(1))
    live.send(event(1))
    live.send(event(2))

    page = live.page("/decisions?verdict=duplicate")
    assert [row["Verdict"] for row in page.rows] == ["duplicate"]
    assert page.attributes("option", value="duplicate") == [
        {"value": "duplicate", "selected": None}
    ]
    assert len(live.page("/decisions?cause=redelivery").rows) == 1
    assert len(live.page("/decisions?q=conversation-1&verdict=delivered").rows) == 1
    form = page.attributes("form", role="search")[0]
    assert (form["method"], form["action"]) == ("get", "/decisions")


def test_a_search_that_filters_hide_can_be_widened(run):
    live = run()
    live.send(event(1))
    page = live.page("/decisions?q=conversation-1&verdict=dead")
    assert not page.rows
    link = page.links["Search without verdict, route and cause"]
    assert len(live.page(link).rows) == 1


def test_what_no_choice_is_is_no_choice(run):
    live = run()
    live.send(event())
    assert len(live.page("/decisions?verdict=nonsense&cause=nonsense&before=nonsense").rows) == 1
    for before in ("1.2", "x.worker.1", "1.worker.x", f"1.worker.{'9' * 30}", "\u0661.w.1"):
        assert live.page(f"/decisions?{urlencode({'before': before})}").rows, before


def test_a_route_that_is_not_configured_can_be_looked_for(run):
    live = run()
    page = live.page("/decisions?route=gone")
    assert "No matching arrival in the history." in page.text or "No events received" in page.text
    assert page.attributes("option", value="gone") == [{"value": "gone", "selected": None}]


def test_what_was_searched_for_stands_in_the_box_again(run):
    live = run()
    for text in ("a b&c=d#e%f+g", "ü🎉\u202e", '"><script>alert(1)</script>'):
        page = live.page(f"/decisions?{urlencode({'q': text})}")
        assert page.attributes("input", id="q")[0]["value"] == text
        assert "<script>alert" not in page.html


def test_the_address_of_the_next_page_has_the_whole_question(run):
    live = run()
    topic = "Odd & odder/#?"
    live.send(*[event(number, **{"detail-type": topic}) for number in range(51)])
    page = live.page(f"/decisions?{urlencode({'q': topic, 'verdict': 'delivered'})}")
    asked = parse_qs(urlsplit(page.links["Older"]).query)
    assert asked["q"] == [topic]
    assert asked["verdict"] == ["delivered"]
    assert len(live.page(page.links["Older"]).rows) == 1


# --- beyond the history -------------------------------------------------------------------


def test_a_key_that_the_history_does_not_have_is_looked_up_in_the_store(run):
    live = run(history="off")
    (outcome,) = live.send(event())
    key = outcome.key.hex()

    page = live.page(f"/decisions?q={key.upper()}")

    assert "The event with this key was delivered." in page.section("lookup").text
    assert page.links["Details"] == f"/events/{key}"
    assert "It was delivered" in live.page(f"/events/{key}").text.replace("it was", "It was")


def test_an_id_that_the_history_does_not_have_is_looked_up_in_the_store(run):
    live = run(history="off")
    live.send(event(7), event(8))
    page = live.page("/decisions?q=6f1c2a10-0000-4000-8000-000000000007")
    assert "The event with this key was delivered." in page.section("lookup").text
    assert not page.attributes("form", action="/decisions/scan")


def test_an_id_that_died_is_looked_up_in_the_dead_letters(run):
    live = run(history="off")
    live.send(event(7, **{"detail-type": "Strict"}))
    page = live.page("/decisions?q=6f1c2a10-0000-4000-8000-000000000007")
    assert page.links["Dead letter 1"] == "/dead/1"


def test_what_nobody_knows_is_not_found(run):
    live = run()
    live.send(event())
    text = live.page("/decisions?q=01abcdef01abcdef01abcdef01abcdef01abcdef01abcdef").text
    assert "No matching arrival in the history." in text
    assert "None of the store's " in text
    assert "A key has 66 hex digits, this text has 48" in text
    unknown = live.page(f"/decisions?q=01{'0' * 64}").text
    assert "This key is not in the store or in the dead letters." in unknown


def test_reading_the_whole_store_takes_a_button(run, monkeypatch):
    live = run(history="off")
    live.send(event(7))
    monkeypatch.setattr(store_lookup, "_GLANCE_S", -1.0)
    id_ = "6f1c2a10-0000-4000-8000-000000000007"

    page = live.page(f"/decisions?q={id_}")
    (form,) = page.attributes("form", action="/decisions/scan")
    assert form["method"] == "post"
    assert "this reads every record of the store" in page.text
    token = page.attributes("input", name="token")[0]["value"]

    refused = live.visitor.post("/decisions/scan", {"q": id_, "token": "wrong"})
    assert refused.status == 403
    done = live.visitor.post("/decisions/scan", {"q": id_, "token": token})
    assert done.status == 200
    assert "The event with this key was delivered." in done.text
    assert live.visitor.get("/decisions/scan").status == 404


def test_a_page_that_keeps_itself_fresh_does_not_look_further(run, monkeypatch):
    live = run(history="off")
    live.send(event(7))
    asked = "/decisions?q=6f1c2a10-0000-4000-8000-000000000007"
    assert "Store and dead letters" in live.visitor.get(asked).text
    assert "Store and dead letters" not in live.visitor.get(asked, X_Live="1").text


@pytest.mark.parametrize(
    ("store", "costs"),
    [
        ("dynamodb://seen", "DynamoDB charges for reading every record"),
        ("redis://127.0.0.1:1/0", "this reads every record of the store"),
    ],
)
def test_a_store_that_costs_is_not_read_without_being_asked(tmp_path, monkeypatch, store, costs):
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    flags = {"store": store, "dead": f"sqlite:{tmp_path}/dead.db", "dashboard": "127.0.0.1:0"}
    setup = config.load(environment={}, flags=flags)
    scanned = []

    async def scan(place, limit):
        scanned.append(place)
        return [], b""

    monkeypatch.setattr(setup.config.store.opened, "scan", scan)
    data = DashboardData(setup, setup.config.store.opened)

    told = asyncio.run(store_lookup.look_up(data, "some-id"))
    assert told.costs == costs
    assert not scanned
    told = asyncio.run(store_lookup.look_up(data, "some-id", thorough=True))
    assert scanned
    assert told.is_all


# --- wrong addresses ----------------------------------------------------------------------


def test_what_is_not_there_is_not_found(run):
    visitor = run().visitor
    for path in (
        *("/decisions/nobody", "/decisions/host.1", "/decisions/host.x", "/decisions/%2e%2e%2f"),
        *("/decisions/.1", f"/decisions/{'x' * 2000}.1", f"/decisions/host.{'9' * 300}"),
        *("/events/x", "/events/01", f"/events/01{'0' * 64}", f"/events/02{'0' * 64}"),
        *(f"/events/01{'0' * 66}", "/decisions/a/b"),
    ):
        assert visitor.get(path).status == 404, path
    assert visitor.get("/events/%00").status == 400


# --- what is missing ----------------------------------------------------------------------


def test_arrivals_that_could_not_be_written_are_told(run, monkeypatch):
    live = run()
    live.send(event())
    assert "missing" not in live.page().text
    search = HistoryReader.search

    async def gappy(self, *given):
        return replace(await search(self, *given), lost=3)

    monkeypatch.setattr(HistoryReader, "search", gappy)
    assert "3 arrivals are missing: the store was unavailable for too long." in live.page().text
    assert (
        "because the store was unavailable for too long"
        in live.page("/decisions?verdict=stale").text
    )
    assert "there may have been more" in live.why().text
