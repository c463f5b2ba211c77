"""Rules on the dashboard: what is configured, what matched, and events tried out over real HTTP."""

import asyncio
import html
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.corpus.bad_input import CASES
from tests.dashboard.conftest import Answer, Visitor
from tests.http.live import Desk as Sink
from tests.http.live import Live, event

from oncebridge.dashboard import (
    mismatches,
    rule_descriptions,
    try_events,
)
from oncebridge.dashboard.rule_descriptions import anchor
from oncebridge.dashboard.views import rules
from oncebridge.errors import StoreUnavailable
from oncebridge.events.pattern import Pattern
from oncebridge.service import config
from oncebridge.sinks.api import Yes

EVENTS = Path(__file__).parents[1] / "events"

PLACES = """
source = "http://127.0.0.1:0/events"
store = "sqlite:{folder}/seen.db"
dead = "sqlite:{folder}/dead.db"
dashboard = "127.0.0.1:0"
"""
SHOP = """
[[routes]]
name = "crm"
sink = "https://zoe:secret-5b1e@crm.example.com/hooks"
match = { source = [{ prefix = "com.example.shop" }] }
rate = "100/s"
[[routes.rules]]
name = "orders"
match = { detail-type = ["Order Placed"] }
key = ["detail.order", "detail.state"]
entity = "detail.order"
latest = { version = "detail.version" }
quiet = { state = "detail.state", for = "500ms" }
on_missing = "deliver"

[[routes]]
name = "lake"
sink = "file:{folder}/lake.ndjson"
match = { source = ["com.example.lake"], detail = { size = [{ numeric = [">", 10] }] } }

[[rules]]
name = "two tiers"
match = { source = ["com.example.lake"] }
tiers = [
  { key = "id", window = "5m" },
  { key = "content", ignore = ["detail.sentAt"], sliding = true, max_window = "40d" },
]
scope = "organisation"

[[rules]]
name = "never reached"
match = { source = ["com.example.lake"], detail-type = ["Fish"] }

[[rules]]
name = "noise"
match = { detail-type = ["Ping"] }
discard = true
"""

Start = Callable[..., tuple[Live, Visitor]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Run a service with a configuration file; all its sinks are one, in memory."""
    started: list[Live] = []

    def start(text: str = "") -> tuple[Live, Visitor]:
        path = tmp_path / "shop.toml"
        path.write_text((PLACES + text).replace("{folder}", str(tmp_path)))
        setup = config.load(path, environment={})
        sink = Sink(Yes())
        routes = [replace(one, sink=replace(one.sink, opened=sink)) for one in setup.routes]
        live = Live(replace(setup, routes=tuple(routes)), sink)
        live.start()
        started.append(live)
        return live, Visitor(live.service.dashboard_url)

    yield start
    for live in started:
        live.stop()


def order(number: int) -> bytes:
    return event(number, detail={"order": number, "state": "placed", "version": number})


def words(page: Answer) -> str:
    main = page.text.partition("<main")[2].partition("</main>")[0]
    main = re.sub(r"<textarea.*?</textarea>", "", main, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", main)))


def tried(visitor: Visitor, text: str | bytes) -> Answer:
    token = visitor.get("/rules").token
    return visitor.post("/rules/try", {"token": token, "event": text})


def result(page: Answer) -> str:
    """Give the words of what came of try_events."""
    assert page.status == 200
    return words(page).partition("Try")[2]


# --- what is configured -------------------------------------------------------------------


def test_routes_and_rules_are_told_in_order(start):
    _, visitor = start(SHOP)
    page = visitor.get("/rules")
    told = words(page)
    places = [
        told.index(name)
        for name in ("1. orders", "1. two tiers", "2. never reached", "3. noise", "4. default")
    ]
    assert places == sorted(places)
    for word in (
        "https://",
        '{"source": [{"prefix": "com.example.shop"}]}',
        "by fields: detail.order , detail.state ; remembered for 6d",
        "for each detail.order, older events by detail.version are dropped",
        "for each detail.order, the same detail.state within 500ms is dropped",
        "delivered without deduplication",
        "by envelope id; remembered for 5m; the content is compared as well",
        "remembered for 6d, extended by each duplicate up to 40d",
        "ignoring detail.sentAt",
        "all Genesys integrations of one organisation together",
        "discard: always dropped",
        "built-in",
        "rate 100/s",
    ):
        assert word in told, word
    assert "secret-5b1e" not in page.text
    assert f'id="{anchor("two tiers")}"' in page.text


def test_the_preset_and_the_allow_list_are_told_too(start):
    _, visitor = start(
        'preset = "genesys"\nsink = "-"\nroute = "crm"\n[allow]\naccounts = ["123456789012"]\n'
    )
    told = words(visitor.get("/rules"))
    assert "events from other senders are kept in the dead letters" in told
    assert "allowed accounts" in told
    assert "genesys detail events preset genesys" in told
    assert "v2.detail.events.conversation.{id}.acd.start" in visitor.get("/rules").text


def test_what_each_rule_matched_is_counted_over_its_routes(start):
    live, visitor = start(SHOP)
    lake = {"source": "com.example.lake", "detail": {"size": 11}}
    live.do(lambda: live.service.router.process([order(1), order(1), order(2)]))
    live.do(lambda: live.service.router.process([event(3, **lake), event(3, **lake)]))
    live.until(lambda: "delivered 2" in words(visitor.get("/rules")))
    told = words(visitor.get("/rules"))
    assert "1. orders route delivered 2 duplicate 1" in told
    assert "1. two tiers configuration delivered 1 duplicate 1" in told
    assert "3. noise configuration No matches since" in told


def test_what_the_check_finds_stands_beside_its_rule(start):
    _, visitor = start(SHOP)
    told = words(visitor.get("/rules"))
    assert "rule 'two tiers' comes first and matches all of its events" in told
    never = told.index("2. never reached")
    assert never < told.index("rule 'two tiers' comes first") < told.index("3. noise")


def test_without_the_store_the_rules_are_told_all_the_same(start, monkeypatch):
    live, visitor = start(SHOP)

    async def away(*_args: object, **_more: object):
        raise StoreUnavailable("the store is away")

    for name in ("peek", "now_ms", "claim"):
        monkeypatch.setattr(live.store, name, away)
    page = tried(visitor, order(1).decode())
    assert page.status == 200
    assert "1. orders" in words(page)
    assert "No verdicts: the store is away" in result(page)
    assert "Key by fields" in result(page)


def test_anchors_tell_rules_apart():
    names = ["a b", "a-b", "a_b", "a.b", "ab", "ä", "<script>", "a  b", 'a"b']
    assert len({anchor(name) for name in names}) == len(names)
    assert all(re.fullmatch(r"rule-[A-Za-z0-9._-]+", anchor(name)) for name in names)
    assert anchor("genesys detail events") == "rule-genesys_detail_events"


def test_patterns_are_laid_out_to_be_read():
    short = Pattern.compile({"source": ["com.example.shop"]})
    assert rule_descriptions.pretty(short) == '{"source": ["com.example.shop"]}'
    spec = {"source": ["com.example.shop"], "detail-type": [{"prefix": "x" * n} for n in (30, 40)]}
    shown = rule_descriptions.pretty(Pattern.compile(spec))
    assert json.loads(shown) == spec
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("\n") == 6


# --- trying events ------------------------------------------------------------------------


def test_an_event_is_tried_and_nothing_comes_of_it(start):
    live, visitor = start(SHOP)
    told = result(tried(visitor, order(1).decode()))
    assert "Route crm" in told
    assert "Verdict now delivered" in told
    assert "The store has no record of this event" in told
    assert "detail.order = 1" in told
    assert 'detail.state = "placed"' in told
    assert "detail.version = 1" in told
    assert "Routes that do not match lake" in told
    assert 'source must be ["com.example.lake"] and is "com.example.shop"' in told
    assert 'detail.size must be [{"numeric": [">", 10]}] and is (missing)' in told
    assert live.sink.taken == []
    assert live.counts["arrived"] == 0
    again = result(tried(visitor, order(1).decode()))
    assert "Verdict now delivered" in again


def test_what_was_delivered_is_a_duplicate_with_its_first_arrival_and_cause(start):
    live, visitor = start('sink = "-"\nroute = "crm"')
    live.do(lambda: live.service.router.process([event(1)]))
    told = result(tried(visitor, event(1).decode()))
    assert "Verdict now duplicate it was delivered" in told
    assert "First arrival" in told
    assert "as 6f1c2a10-0000-4000-8000-000000000001" in told
    assert "Cause redelivery" in told
    other = json.loads(event(1)) | {"id": "another"}
    assert "Cause re-emission" in result(tried(visitor, json.dumps(other)))


def test_the_canonical_form_is_there_to_be_looked_at(start):
    _, visitor = start('sink = "-"\nroute = "crm"')
    page = tried(visitor, event(1, detail={"b": 1.0, "a": "ü"}).decode())
    assert "Hashed text" in result(page)
    assert html.escape('{"a":"ü","b":1}').replace("&quot;", "&#34;") in page.text


def test_of_a_long_canonical_form_the_beginning_is_shown(start):
    _, visitor = start('sink = "-"\nroute = "crm"')
    page = tried(visitor, event(1, detail={"a": "x" * 50_000}).decode())
    assert "and 30,008 more characters" in result(page)


def test_several_events_are_compared_with_one_another(start):
    _, visitor = start('sink = "-"\nroute = "crm"')
    again = json.loads(event(1)) | {"id": "another", "time": "2026-03-01T10:00:09Z"}
    text = "\n".join([event(1).decode(), json.dumps(again), event(2).decode()])
    told = result(tried(visitor, text))
    assert "3 records" in told
    assert "same as event 1" in told
    assert 'id: "6f1c2a10-0000-4000-8000-000000000001" → "another"' in told
    assert "different from event 1. Differences that count: detail.order" in told
    assert "duplicate of event 1" in told
    array = json.dumps([json.loads(event(1)), json.loads(event(1))], indent=2)
    assert "No differences." in result(tried(visitor, array))


def test_decimals_that_a_double_would_round_are_compared_and_shown_exactly(start):
    _, visitor = start('sink = "-"\nroute = "crm"\n[[rules]]\nname = "r"\nignore = ["detail.at"]')
    line = '{"source":"s","detail":{"n":%s,"at":%s}}'
    one, other = "1.000000000000000001", "1.000000000000000002"
    told = result(tried(visitor, "\n".join([line % (one, one), line % (other, one)])))
    assert "different from event 1. Differences that count: detail.n" in told
    told = result(tried(visitor, "\n".join([line % (one, one), line % (one, other)])))
    assert f"detail.at: {one} → {other}" in told


def test_the_same_id_with_other_content_is_a_conflict(start):
    _, visitor = start('sink = "-"\nroute = "crm"\n[[rules]]\nname = "by id"\nkey = "id"')
    text = event(1).decode() + "\n" + event(1, detail={"order": 9}).decode()
    told = result(tried(visitor, text))
    assert "conflict The same key as event 1, with different content." in told


def test_what_no_route_is_for_is_said(start):
    _, visitor = start(SHOP)
    told = result(tried(visitor, event(1, source="elsewhere").decode()))
    assert "No route matches this event: it goes to the dead letters." in told


@pytest.mark.parametrize("preset", ["none", "genesys"])
def test_every_sample_is_understood(start, preset):
    _, visitor = start(f'sink = "-"\nroute = "crm"\npreset = "{preset}"')
    samples = sorted(EVENTS.rglob("*.json"))
    assert len(samples) > 40
    for sample in samples:
        page = tried(visitor, sample.read_bytes())
        told = result(page)
        assert "Not read:" not in told, sample.name
        # Each is on the route, or it is said why it is no event.
        assert "Route crm" in told or "Not an event" in told, sample.name


def test_what_is_wrapped_is_unwrapped(start):
    _, visitor = start('sink = "-"\nroute = "crm"\npreset = "genesys"')
    for name in (
        "lambda_sqs_standard",
        "lambda_sns",
        "lambda_kinesis",
        "pipes_sqs_batch_to_lambda",
    ):
        told = result(tried(visitor, (EVENTS / f"transports/{name}.json").read_bytes()))
        assert "Route crm" in told, name
        assert "Not an event" not in told, name


def test_whatever_is_pasted_there_is_an_answer(start):
    _, visitor = start('sink = "-"\nroute = "crm"')
    small = [case for case in CASES.values() if len(case.body) < 300_000]
    assert len(small) > 30
    for case in small:
        page = tried(visitor, case.body)
        # What is no UTF-8 is nothing that a browser sends.
        assert page.status in (200, 400), case.name
        if page.status == 200:
            assert "Try an event" in page.text, case.name


NO_EVENTS = [
    ("", "the text is empty; paste an event"),
    (" \r\n ", "the text is empty; paste an event"),
    ("not json", "not-json"),
    ("[" * 100_000, "too-deep"),
    ('{"detail":' * 100_000, "too-deep"),
    ('{"detail": {"a": NaN}}', "not-finite"),
    ('{"detail": {"a": 1e400}}', "not-finite"),
    ('{"detail": {"a": 1, "a": 2}}', "duplicate-name"),
    ('{"id": "x"}', "no-detail"),
    ("[]", "it contains no event"),
    ("7", "not-an-object"),
]


def test_what_is_no_event_gets_the_reason(start):
    _, visitor = start('sink = "-"\nroute = "crm"')
    for text, expected in NO_EVENTS:
        assert expected in result(tried(visitor, text)), text[:20]


def test_what_is_too_large_is_refused_in_words(start):
    _, visitor = start('sink = "-"\nroute = "crm"')
    told = result(tried(visitor, "x" * (2 * 1024 * 1024 + 1)))
    assert "it has 2,097,153 bytes, the limit is 2,097,152" in told
    quotes = '\\"' * (1024 * 1024 - 300)  # six bytes of a form for each
    text = event(1, detail={"a": "?"}).decode().replace("?", quotes)
    assert "Route crm" in result(tried(visitor, text))


def test_of_many_events_the_first_fifty_are_tried(start):
    _, visitor = start('sink = "-"\nroute = "crm"')
    text = "\n".join(event(n).decode() for n in range(80))
    told = result(tried(visitor, text))
    assert "50 records; the rest was not tried" in told
    assert "Event 50" in told
    assert "Event 51" not in told
    assert "50 records" in result(tried(visitor, "[" + ",".join(["1"] * 5000) + "]"))


def test_a_token_is_needed_but_no_leave_to_change_things(start):
    _, visitor = start('sink = "-"\nroute = "crm"')
    text = event(1).decode()
    assert visitor.post("/rules/try", {"event": text}).status == 403
    assert visitor.post("/rules/try", {"event": text, "token": "forged"}).status == 403
    assert tried(visitor, text).status == 200


def test_what_is_pasted_is_shown_again_and_kept_nowhere(start, tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "oncebridge")
    _, visitor = start('sink = "-"\nroute = "crm"\naudit = "{folder}/audit.ndjson"')
    canary = "canary-91c4"
    page = tried(visitor, event(1, detail={"note": canary}).decode())
    assert canary in page.text.partition("<textarea")[2].partition("</textarea>")[0]
    assert canary not in visitor.get("/rules").text
    assert canary not in caplog.text
    for path in tmp_path.iterdir():
        assert canary.encode() not in path.read_bytes(), path.name


XSS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</textarea><svg/onload=alert(1)>",
    "</pre></code><iframe src=javascript:alert(1)>",
    "{{ 7 * 7 }}",
)


@pytest.mark.parametrize("text", XSS)
def test_words_of_strangers_stay_words(start, text):
    quoted = json.dumps(text)
    rules = f"""
[[rules]]
name = {quoted}
match = {{ source = [{quoted}] }}
key = ["detail.a"]
[[rules]]
name = "other"
match = {{ source = ["other"], detail = {{ a = [{quoted}] }} }}
"""
    _, visitor = start(f'sink = "-"\nroute = {quoted}\n{rules}')
    first = event(1, source=text, id=text, **{"detail-type": text}, detail={"a": text, text: 1})
    second = event(2, source=text, id="b", **{"detail-type": text}, detail={"a": text + "!"})
    for page in (
        visitor.get("/rules"),
        tried(visitor, first.decode() + "\n" + second.decode()),
        tried(visitor, text),
    ):
        assert page.status == 200
        for seed in ("<script>alert", "<img src=x", "<svg/onload", "<iframe"):
            assert seed not in page.text
        assert "</textarea><svg" not in page.text


def test_characters_that_do_something_are_spelt_out(start):
    _, visitor = start('sink = "-"\nroute = "crm"')
    page = tried(visitor, event(1, id="\x1b[2J\u202e").decode())
    told = result(page)
    assert "\\x1b[2J" in told
    assert "\x1b" not in page.text.partition("</textarea>")[2]


async def test_a_pattern_that_fits_only_in_pieces_is_explained():
    spec = {"detail": {"items": {"kind": ["a"], "size": [1]}}}
    envelope = {"detail": {"items": [{"kind": "a", "size": 2}, {"kind": "b", "size": 1}]}}
    assert not Pattern.compile(spec).matches(envelope)
    (miss,) = mismatches.misses(mismatches.parts_of(spec), envelope)
    assert (miss.path, miss.found) == ("", "each in a different element")
    either = {"$or": [{"source": ["a"]}, {"source": ["b"]}]}
    (miss,) = mismatches.misses(mismatches.parts_of(either), {"source": "c"})
    assert miss.path == "$or"


# --- events come first --------------------------------------------------------------------


def many_rules(count: int) -> str:
    rules = [
        f'[[rules]]\nname = "rule {n}"\nmatch = {{ source = ["s{n}"], detail = {{ a = ["x"] }} }}'
        for n in range(count)
    ]
    return "\n".join(['sink = "-"\nroute = "crm"', *rules])


def test_what_is_told_of_many_events_and_rules_is_bounded(start, monkeypatch):
    compiled = []
    compile_ = Pattern.compile

    def noted(spec, *given):
        compiled.append(spec)
        return compile_(spec, *given)

    _, visitor = start(many_rules(40))
    monkeypatch.setattr(mismatches.Pattern, "compile", noted)
    page = tried(visitor, "\n".join(event(n).decode() for n in range(1, 21)))
    assert page.text.count("must be <code>[&#34;x&#34;]</code>") == mismatches.MOST_REPORTED
    assert "and 20 more" in result(page)
    assert "and 40 more" in result(page)
    assert len(compiled) == 2 * 40  # each part of each rule once, for all events
    alone = tried(visitor, event(1))
    assert not re.search(r"and \d+ more", result(alone))


def test_a_text_is_read_beside_the_loop_and_one_at_a_time(start, monkeypatch):
    live, visitor = start('sink = "-"\nroute = "crm"')
    threads, at_once = [], []
    read = try_events.events_in
    run_trial = rules.try_events
    loop_thread = live.do(lambda: in_loop(threading.current_thread))

    def noted(*given):
        threads.append(threading.current_thread())
        return read(*given)

    async def counted(*given):
        at_once.append(1)
        assert sum(at_once) == 1
        try:
            return await run_trial(*given)
        finally:
            at_once.append(-1)

    monkeypatch.setattr(try_events, "events_in", noted)
    monkeypatch.setattr(rules, "try_events", counted)
    with ThreadPoolExecutor(4) as pool:
        pages = list(pool.map(lambda n: tried(visitor, event(n)), range(1, 5)))
    assert all("delivered" in result(page) for page in pages)
    assert len(threads) == 4
    assert loop_thread not in threads
    assert sum(at_once) == 0


async def in_loop(ask):
    return ask()


def test_who_waits_too_long_for_others_is_told(start, monkeypatch):
    monkeypatch.setattr(rules, "_TURN_S", 0.05)
    live, visitor = start('sink = "-"\nroute = "crm"')
    begun, go_on = threading.Event(), threading.Event()
    read = try_events.events_in

    def slowly(*given):
        begun.set()
        assert go_on.wait(20)
        return read(*given)

    monkeypatch.setattr(try_events, "events_in", slowly)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(tried, visitor, event(1))
        try:
            assert begun.wait(20)
            # The page itself is there meanwhile, and events go through.
            assert "other users are trying events" in result(tried(visitor, event(2)))
            assert live.do(lambda: live.service.router.process([event(3)]))
        finally:
            go_on.set()
        assert "delivered" in result(first.result(20))


def test_a_store_that_never_answers_is_told(start, monkeypatch):
    monkeypatch.setattr(try_events, "_ANSWER_S", 0.05)
    monkeypatch.setattr(rules, "_VIEW_WITHIN_S", 0.05)
    live, visitor = start('sink = "-"\nroute = "crm"')

    async def silent(*_given):
        await asyncio.sleep(60)

    monkeypatch.setattr(live.store, "now_ms", silent)
    page = tried(visitor, event(1))
    told = result(page)
    assert "No counts: the store did not answer in time" in words(page)
    assert "No verdicts: the store did not answer in time" in told
    assert "Key by content" in told


def test_the_configuration_is_read_once(start, monkeypatch):
    readings = []
    check_rules = rule_descriptions.check_rules

    def noted(*given):
        readings.append(threading.current_thread())
        check_rules(*given)

    monkeypatch.setattr(rule_descriptions, "check_rules", noted)
    live, visitor = start(SHOP)
    first = words(visitor.get("/rules"))
    live.do(lambda: live.service.router.process([event(1, source="com.example.shop")]))
    assert "No matches" in first
    assert visitor.get("/rules").status == 200
    assert len(readings) == 1
    assert live.do(lambda: in_loop(threading.current_thread)) not in readings


def test_blank_lines_are_passed_over(start):
    _, visitor = start('sink = "-"\nroute = "crm"')
    text = "\n" * 300_000 + event(1).decode() + "\n" * 300_000
    page = tried(visitor, text)
    assert "delivered" in result(page)
    assert "too long to be shown again" in result(page)


# --- what is masked -----------------------------------------------------------------------


def test_of_the_first_one_nothing_is_told_that_is_masked(start):
    live, visitor = start('mask = ["id"]\nsink = "-"\nroute = "crm"')
    live.do(lambda: live.service.router.process([event(1, id="canary-id")]))
    page = tried(visitor, event(1, id="pasted"))
    assert "duplicate" in result(page)
    assert "First arrival" in result(page)
    assert "canary" not in page.text
