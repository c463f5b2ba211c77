import asyncio
import gzip
import http.client
import json
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.dashboard.fleets import histogram

from oncebridge.engine.causes import Cause
from oncebridge.engine.counters import Books
from oncebridge.engine.verdict import Verdict
from oncebridge.errors import ConfigError
from oncebridge.observe.counts import (
    ITEMS,
    LAGS,
    SECONDS,
    CallCounts,
    Counts,
    Histogram,
    RouteCounts,
)
from oncebridge.observe.health import Health, listeners
from oncebridge.observe.metric_families import CALLS, COUNTED, DEFAULT, MOST_RULES, NO_RULE, OTHER
from oncebridge.observe.prometheus import CONTENT_TYPE, exposition
from oncebridge.observe.report import Report, RouteState, State, StoreHealth
from oncebridge.service.config import load
from oncebridge.service.service import Service

BUCKET = "oncebridge_decision_seconds_bucket"
LABELS = {"route", "rule", "verdict", "cause", "call", "version", "le"}


def state(**more):
    routes = more.pop("routes", {"crm": RouteState(rules=("orders", "default"))})
    return State(
        name="host-1-abc",
        host="host",
        pid=1,
        version="1.2.3",
        started_ms=1_700_000_000_500,
        at_ms=1_700_000_060_000,
        routes=routes,
        **more,
    )


def report(counts=None, **more):
    return Report(state(**more), counts or Counts())


def numbers(text):
    """Give every sample by its name and labels."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def one(found, name, **labels):
    return found[(name, *sorted(labels.items()))]


# --- what is declared ---------------------------------------------------------------------


def test_no_count_of_the_books_is_forgotten():
    beside = {"arrived", "in_flight", *[verdict.value for verdict in Verdict]}
    assert set(COUNTED) == set(Books().counts()) - beside


def test_names_follow_the_conventions():
    store_health = StoreHealth(records=1, bytes=2, evicted=3, clock_offset_ms=4)
    text = exposition(report(store=store_health, spooled=5)).decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.name.startswith("oncebridge_")
        assert family.documentation.endswith(".")
        assert len(family.documentation) < 100
        assert family.samples
        for sample in family.samples:
            assert sample.labels.keys() <= LABELS
            if family.type == "counter":
                assert sample.name.endswith("_total")
    for name in ("decision", "event_lag", "sink_call", "store_call", "store_clock_offset"):
        assert f"# TYPE oncebridge_{name}_seconds " in text


def test_what_a_store_cannot_tell_is_left_out():
    found = numbers(exposition(report(store=StoreHealth(answers=False))))
    assert one(found, "oncebridge_store_answers") == 0
    names = {name for name, *_ in found}
    assert not names & {"oncebridge_store_records", "oncebridge_store_bytes"}
    assert not names & {"oncebridge_store_evicted_total", "oncebridge_spool_records"}


def test_the_state_of_a_worker_is_told_in_base_units():
    down = RouteState(
        paused=True, in_flight=3, owed=2, down=("the sink", "the store"), balanced=False
    )
    store_health = StoreHealth(records=10, bytes=2048, evicted=7, clock_offset_ms=-1500)
    told = report(
        routes={"crm": down, "audit": RouteState()},
        store=store_health,
        spooled=4,
        not_ready=("paused",),
    )
    found = numbers(exposition(told))
    for name, number in {
        "in_flight": 3,
        "owed_commits": 2,
        "sink_up": 0,
        "store_up": 0,
        "paused": 1,
        "books_balanced": 0,
    }.items():
        assert one(found, f"oncebridge_{name}", route="crm") == number
    assert one(found, "oncebridge_sink_up", route="audit") == 1
    assert one(found, "oncebridge_books_balanced", route="audit") == 1
    assert one(found, "oncebridge_store_records") == 10
    assert one(found, "oncebridge_store_bytes") == 2048
    assert one(found, "oncebridge_store_evicted_total") == 7
    assert one(found, "oncebridge_store_clock_offset_seconds") == -1.5
    assert one(found, "oncebridge_spool_records") == 4
    assert one(found, "oncebridge_ready") == 0
    assert one(found, "oncebridge_start_time_seconds") == 1_700_000_000.5
    assert one(found, "oncebridge_build_info", version="1.2.3") == 1


def test_all_series_are_there_from_the_start():
    found = numbers(exposition(report()))
    for verdict in Verdict:
        for rule in ("orders", "default", NO_RULE):
            labels = {"route": "crm", "rule": rule, "verdict": verdict.value}
            assert one(found, "oncebridge_verdicts_total", **labels) == 0
    for cause in Cause:
        assert one(found, "oncebridge_repeats_total", route="crm", cause=cause.value) == 0
    for name in ("arrivals", "sink_call_failed", *COUNTED):
        assert one(found, f"oncebridge_{name}_total", route="crm") == 0
    for call in CALLS:
        assert one(found, "oncebridge_store_call_failed_total", call=call) == 0
        assert one(found, "oncebridge_store_call_seconds_count", call=call) == 0
        assert one(found, "oncebridge_store_call_items_bucket", call=call, le="+Inf") == 0
    for name in ("decision_seconds", "event_lag_seconds", "sink_call_seconds", "sink_call_events"):
        assert one(found, f"oncebridge_{name}_count", route="crm") == 0
        assert one(found, f"oncebridge_{name}_bucket", route="crm", le="+Inf") == 0


def test_histograms_count_up():
    counts = RouteCounts(
        took=histogram((0.0001, 0.0005, 0.003, 99.0), SECONDS),
        lag=histogram([7200.0], LAGS),
        sent_together=histogram([10], ITEMS),
    )
    found = numbers(exposition(report(Counts({"crm": counts}))))

    def bucket(name, end):
        return one(found, f"oncebridge_{name}_bucket", route="crm", le=end)

    assert bucket("decision_seconds", "0.0005") == 2
    assert bucket("decision_seconds", "0.0025") == 2
    assert bucket("decision_seconds", "0.005") == 3
    assert bucket("decision_seconds", "60.0") == 3
    assert bucket("decision_seconds", "+Inf") == 4
    assert one(found, "oncebridge_decision_seconds_sum", route="crm") == pytest.approx(99.0036)
    assert bucket("event_lag_seconds", "3600.0") == 0
    assert bucket("event_lag_seconds", "21600.0") == 1
    assert bucket("sink_call_events", "10.0") == 1


@pytest.mark.parametrize("places", [1, len(SECONDS), len(SECONDS) + 4])
def test_histograms_of_other_lengths_are_told_in_the_usual_places(places):
    counts = RouteCounts(took=Histogram([2] * places, 7.0))
    found = numbers(exposition(report(Counts({"crm": counts}))))
    ends = [dict(labels)["le"] for name, *labels in found if name == BUCKET]
    assert len(ends) == len(SECONDS) + 1
    assert one(found, BUCKET, route="crm", le="0.0005") == 2
    assert one(found, BUCKET, route="crm", le="+Inf") == 2 * places


# --- labels -------------------------------------------------------------------------------


def test_label_values_are_escaped():
    odd = 'a "route"\\ with\nlines, {braces} und Umlauten: äöü \U0001f600'
    found = numbers(exposition(report(routes={odd: RouteState(rules=(odd,))})))
    assert one(found, "oncebridge_in_flight", route=odd) == 0
    labels = {"route": odd, "rule": odd, "verdict": "dead"}
    assert one(found, "oncebridge_verdicts_total", **labels) == 0


def test_a_name_that_utf8_cannot_carry_spoils_nothing():
    found = numbers(exposition(report(routes={"crm-\udcff": RouteState()})))
    assert one(found, "oncebridge_in_flight", route="crm-?") == 0


def rules_of(found):
    return {dict(labels)["rule"] for name, *labels in found if name == "oncebridge_verdicts_total"}


def test_many_rules_are_folded_into_one():
    rules = tuple(f"rule {number}" for number in range(MOST_RULES + 50))
    states = {"crm": RouteState(rules=rules)}
    counts = RouteCounts(rules={rule: {"delivered": 2} for rule in reversed(rules)})
    found = numbers(exposition(report(Counts({"crm": counts}), routes=states)))
    assert rules_of(found) == {*rules[:MOST_RULES], OTHER, NO_RULE}
    labels = {"route": "crm", "verdict": "delivered"}
    assert one(found, "oncebridge_verdicts_total", rule=OTHER, **labels) == 100
    assert one(found, "oncebridge_verdicts_total", rule="rule 0", **labels) == 2


def test_what_no_rule_matched_is_told_however_many_rules_there_are():
    rules = (*(f"rule {number}" for number in range(MOST_RULES + 5)), DEFAULT)
    counts = RouteCounts(rules={rule: {"delivered": 2} for rule in rules})
    states = {"crm": RouteState(rules=rules)}
    found = numbers(exposition(report(Counts({"crm": counts}), routes=states)))
    assert rules_of(found) == {*rules[:MOST_RULES], DEFAULT, OTHER, NO_RULE}
    labels = {"route": "crm", "verdict": "delivered"}
    assert one(found, "oncebridge_verdicts_total", rule=DEFAULT, **labels) == 2
    assert one(found, "oncebridge_verdicts_total", rule=OTHER, **labels) == 10


def test_a_rule_that_is_not_known_keeps_its_place_when_others_come():
    first = RouteCounts(rules={"late": {"delivered": 5}})
    later = RouteCounts(rules={"late": {"delivered": 6}, "later": {"delivered": 900}})
    for counts, number in ((first, 5), (later, 6)):
        found = numbers(exposition(report(Counts({"crm": counts}))))
        labels = {"route": "crm", "rule": "late", "verdict": "delivered"}
        assert one(found, "oncebridge_verdicts_total", **labels) == number


def test_causes_and_calls_that_are_not_known_are_folded():
    counts = Counts(
        {"crm": RouteCounts(causes={"redelivery": 1, "made up": 2})},
        {"claim": CallCounts(failed=1), "made up": CallCounts(failed=2)},
    )
    found = numbers(exposition(report(counts)))
    assert one(found, "oncebridge_repeats_total", route="crm", cause="redelivery") == 1
    assert one(found, "oncebridge_repeats_total", route="crm", cause="unknown") == 2
    assert one(found, "oncebridge_store_call_failed_total", call="claim") == 1
    assert one(found, "oncebridge_store_call_failed_total", call=OTHER) == 2


def test_verdicts_add_up_to_the_books_also_where_no_rule_was_asked():
    books = {"arrived": 10, "failed": 6, "dead": 4}
    rules = {"orders": {"failed": 3}, "": {"dead": 4}}
    found = numbers(exposition(report(Counts({"crm": RouteCounts(books, rules)}))))
    verdicts = {
        (dict(labels)["rule"], dict(labels)["verdict"]): number
        for (name, *labels), number in found.items()
        if name == "oncebridge_verdicts_total" and number
    }
    assert verdicts == {("orders", "failed"): 3, (NO_RULE, "failed"): 3, (NO_RULE, "dead"): 4}


def test_twenty_routes_of_fifty_rules_stay_bounded():
    rules = tuple(f"rule {number}" for number in range(50))
    states = {f"route {number}": RouteState(rules=rules) for number in range(20)}
    counts = Counts({route: RouteCounts(rules={r: {"dead": 1} for r in rules}) for route in states})
    text = exposition(report(counts, routes=states))
    assert len(numbers(text)) < 13_000
    assert len(text) < 2_000_000
    assert len(gzip.compress(text, 3)) < 100_000


# --- a service ----------------------------------------------------------------------------


def event(number, **more):
    detail = {"order": number, **more}
    envelope = {"id": f"id-{number}", "detail-type": "Order", "source": "shop", "detail": detail}
    return json.dumps(envelope).encode()


def ask(port, path="/metrics", method="GET", body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


async def scrape(port, **headers):
    return await asyncio.to_thread(ask, port, **headers)


@asynccontextmanager
async def running(tmp_path, toml="", **flags):
    file = tmp_path / "oncebridge.toml"
    file.write_text(toml)
    flags = {
        "source": "http://127.0.0.1:0/events",
        "store": "memory:",
        "dead": "memory:",
        "metrics": "http://127.0.0.1:0",
        "share_counts": "false",
        **flags,
    }
    service = Service(load(file, environment={}, flags=flags))
    await service.open()
    run = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        service.stop()
        await run
        await service.close()


ROUTES = """
[[rules]]
name = "orders"
match = { detail-type = ["Order"] }
key = ["detail.order"]

[[routes]]
name = "crm"
sink = "python:tests.observe.sinks:take"

[[routes]]
name = "odd"
sink = "python:tests.observe.sinks:refuse_odd"
match = { source = ["shop"] }
"""


async def test_a_scrape_while_events_pass_never_falls_and_ends_as_the_books_do(tmp_path):
    async with running(tmp_path, ROUTES) as service:
        metrics, source = service._listeners[-1].port, service.sources[0].port
        before = numbers((await scrape(metrics))[1])
        assert one(before, "oncebridge_arrivals_total", route="crm") == 0

        def send():
            for number in range(300):
                ask(source, "/events", "POST", event(number % 100))
            ask(source, "/events", "POST", b"no event")

        sending = asyncio.create_task(asyncio.to_thread(send))
        scrapes = 0
        while not sending.done():
            now = numbers((await scrape(metrics))[1])
            scrapes += 1
            for name, number in before.items():
                if name[0].endswith(("_total", "_bucket", "_count", "_sum")):
                    assert now[name] >= number, name
            assert now.keys() >= before.keys()
            before = now
        await sending
        found = numbers((await scrape(metrics))[1])
        assert scrapes > 3
        for route, books in service.books().items():
            counts = books.counts()
            assert one(found, "oncebridge_arrivals_total", route=route) == counts["arrived"]
            for name in COUNTED:
                assert one(found, f"oncebridge_{name}_total", route=route) == counts[name]
            for verdict in Verdict:
                told = sum(
                    number
                    for (name, *labels), number in found.items()
                    if name == "oncebridge_verdicts_total"
                    and dict(labels)["verdict"] == verdict
                    and dict(labels)["route"] == route
                )
                assert told == counts[verdict.value]
        assert one(found, "oncebridge_repeats_total", route="crm", cause="redelivery") == 200
        labels = {"route": "crm", "rule": "orders", "verdict": "duplicate"}
        assert one(found, "oncebridge_verdicts_total", **labels) == 200
        assert one(found, "oncebridge_decision_seconds_count", route="crm") == 301
        assert one(found, "oncebridge_sink_call_seconds_count", route="crm") > 0
        assert one(found, "oncebridge_store_call_seconds_count", call="claim") > 0


SECRET = "c4n4ryOfSomeLength"

CANARY = f"""
store = "redis://user:{SECRET}-store@127.0.0.1:1/0"
dead = "sqlite:dead.db"
dashboard_token = "{SECRET}-dashboard"

[source]
url = "http://127.0.0.1:0/events"
api_keys = ["{SECRET}-api-key"]
basic = ["user:{SECRET}-basic"]
bearer = ["{SECRET}-bearer"]
oauth = ["client:{SECRET}-oauth"]
hmac = ["{SECRET}-hmac"]

[[routes]]
name = "crm"

[routes.sink]
url = "http://user:{SECRET}-user@127.0.0.1:1/hooks?token={SECRET}-query"
headers = {{ X-Key = "{SECRET}-header" }}
sign = ["whsec_{SECRET}AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"]
allow_private = true

[[routes]]
name = "pg"
sink = "postgresql://user:{SECRET}-postgres@127.0.0.1:1/db?table=events"
"""


async def test_no_secret_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "canary.toml"
    file.write_text(CANARY)
    service = Service(load(file, environment={}))
    assert SECRET.encode() not in exposition(service.monitor.report())


@pytest.mark.parametrize(
    "sink",
    [
        f"http://user:{SECRET}-user@127.0.0.1:1/hooks?token={SECRET}-query",
        f"postgresql://user:{SECRET}-postgres@127.0.0.1:1/db?table=events",
        "env:CANARY_SINK",
    ],
)
async def test_a_route_without_a_name_shows_no_secret_either(tmp_path, monkeypatch, sink):
    monkeypatch.setenv("CANARY_SINK", f"http://127.0.0.1:1/{SECRET}-path")
    flags = {"source": "-", "store": "memory:", "dead": "memory:", "sink": sink}
    service = Service(load(environment={}, flags=flags))
    text = exposition(service.monitor.report())
    assert b'oncebridge_in_flight{route="' in text
    assert SECRET.encode() not in text


# --- the page -----------------------------------------------------------------------------


@asynccontextmanager
async def listening(health=None, metrics=None):
    made = listeners(health, metrics, list, report)
    for listener in made:
        await listener.open()
    try:
        yield [listener.port for listener in made]
    finally:
        for listener in made:
            await listener.aclose()


async def test_the_page_says_what_it_is(tmp_path):
    async with listening(metrics="http://127.0.0.1:0") as (port,):
        status, body, headers = await scrape(port)
        assert status == 200
        assert body == exposition(report())
        assert headers["Content-Type"] == CONTENT_TYPE
        assert headers["Content-Encoding"] is None
        assert headers["Vary"] == "Accept-Encoding"


@pytest.mark.parametrize("accepted", ["gzip", "deflate, gzip;q=0.5", "GZIP", "gzip;q=1.0, *;q=0"])
async def test_it_is_packed_for_those_who_take_that(accepted):
    async with listening(metrics="http://127.0.0.1:0") as (port,):
        _, body, headers = await scrape(port, Accept_Encoding=accepted)
        assert headers["Content-Encoding"] == "gzip"
        assert gzip.decompress(body) == exposition(report())


@pytest.mark.parametrize("accepted", ["identity", "gzip;q=0", "gzip;q=0.0, br", "", "gzipped"])
async def test_it_is_not_packed_for_others(accepted):
    async with listening(metrics="http://127.0.0.1:0") as (port,):
        _, body, headers = await scrape(port, Accept_Encoding=accepted)
        assert headers["Content-Encoding"] is None
        assert body == exposition(report())


async def test_it_is_there_to_be_got_and_nothing_else_is():
    async with listening(metrics="http://127.0.0.1:0") as (port,):
        status, body, headers = await scrape(port, method="HEAD")
        assert (status, body) == (200, b"")
        assert int(headers["Content-Length"]) == len(exposition(report()))
        status, _, headers = await scrape(port, method="POST")
        assert (status, headers["Allow"]) == (405, "GET, HEAD")
        status, body, _ = await scrape(port, path="/healthz")
        assert (status, body) == (404, b'{"error":"not found; use /metrics"}')


async def test_one_address_has_one_server():
    same = "http://127.0.0.1:0"
    async with listening(same, same) as ports:
        (port,) = ports
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await scrape(port, path=path))[0] == 200
        assert (await scrape(port, path="/"))[0] == 404


async def test_two_addresses_have_two_servers():
    async with listening("http://127.0.0.1:0", "http://localhost:0") as (health, metrics):
        assert (await scrape(health, path="/metrics"))[0] == 404
        assert (await scrape(health, path="/healthz"))[0] == 200
        assert (await scrape(metrics, path="/metrics"))[0] == 200


async def test_those_who_ask_at_once_are_all_answered():
    async with listening(metrics="http://127.0.0.1:0") as (port,):
        answers = await asyncio.gather(*[scrape(port) for _ in range(20)])
        assert {body for _, body, _ in answers} == {exposition(report())}


async def test_a_report_that_fails_is_no_page(caplog):
    broken = report(Counts({"crm": RouteCounts(rules=None)}))
    health = Health("http://127.0.0.1:0", report=lambda: broken)
    await health.open()
    try:
        status, body, _ = await scrape(health.port)
        assert (status, body) == (500, b'{"error":"internal error"}')
        assert "oncebridge.metrics_failed" in [record.message for record in caplog.records]
    finally:
        await health.aclose()


@pytest.mark.parametrize(
    "url", ["https://127.0.0.1:1", "127.0.0.1:1", "http://127.0.0.1", "http://a:b@c:1"]
)
def test_an_error_names_the_setting(url):
    with pytest.raises(ConfigError, match=r"^metrics: must be http://HOST:PORT, without more"):
        listeners(None, url, list, report)
    with pytest.raises(ConfigError, match=r"^health: must be http://HOST:PORT, without more"):
        listeners(url, "http://127.0.0.1:0", list, report)
    with pytest.raises(ConfigError, match=r"^metrics: must have no path: it serves /metrics"):
        listeners(None, "http://127.0.0.1:1/metrics", list, report)


async def test_an_address_in_use_names_the_setting():
    async with listening("http://127.0.0.1:0") as (port,):
        (taken,) = listeners(None, f"http://127.0.0.1:{port}", list, report)
        with pytest.raises(ConfigError, match=r"^metrics: "):
            await taken.open()


def test_without_the_package_it_says_what_to_install():
    code = """
import sys
sys.modules["prometheus_client"] = None
from oncebridge.observe.health import listeners
assert listeners("http://127.0.0.1:0", None, list, list)
try:
    listeners(None, "http://127.0.0.1:0", list, list)
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith("ConfigError metrics: needs a package that is not installed")
    assert "pip install 'oncebridge[service]'" in done.stdout
