"""Why an arrival was treated so, in plain words and in all that is known of it."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from html import unescape
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.dashboard.arrivals import Page, World, event, world

from oncebridge.dashboard.arrival_text import (
    ArrivalContext,
    Instant,
    describe_arrival,
    likely_cause,
    ordinal,
)
from oncebridge.dashboard.why import compared, payload_of, timeline
from oncebridge.engine.verdict import Verdict
from oncebridge.events.key import FieldsKey
from oncebridge.events.rules import Rule, Tier
from oncebridge.observe.history import HistoryRow, RecordedArrival
from oncebridge.observe.history_reader import HistoryReader
from oncebridge.operate.operator_log import StoreOperatorLog, event_log_key
from oncebridge.sinks.api import Never, No, Unknown
from oncebridge.stores.api import Fate

AT_MS = 1_767_225_600_000
ORGANISATION = "aws.partner/genesys.com/cloud/0a1b2c3d-0000-4000-8000-000000000001"
ROUTED = """
[[routes]]
name = "crm"
sink = "python:os:fsencode"
match = { source = ["com.example.shop"] }
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Run services; each may have settings of its own."""
    with ExitStack() as stack:
        yield lambda *more, **settings: stack.enter_context(world(tmp_path, *more, **settings))


def row(verdict: Verdict, number: int = 1, **more: object) -> HistoryRow:
    given = {"rule": "orders", "key": b"\x01key", "id": "an-id", "source": "com.example.shop"}
    forwarded = verdict in (Verdict.DELIVERED, Verdict.BYPASSED)
    return HistoryRow(
        number,
        AT_MS + 1000 * number,
        "crm",
        verdict.value,
        **given | {"forwarded": forwarded} | more,
    )


def said(story: ArrivalContext) -> str:
    return " ".join(
        "".join(f"<{part.ms - AT_MS}>" if isinstance(part, Instant) else part for part in words)
        for words in describe_arrival(story)
    ).replace("\N{NO-BREAK SPACE}", " ")


# --- in plain words -----------------------------------------------------------------------


def test_a_repeat_is_told_with_its_first_and_its_cause():
    first = row(Verdict.DELIVERED, took_ms=123.4)
    again = row(Verdict.DUPLICATE, 2, id="other", cause="re-emission", first_ms=AT_MS + 1000)
    likely = likely_cause(again, first, None)
    story = ArrivalContext(row=again, before=[first], is_whole=True, likely=likely)
    assert said(story) == (
        "This is the second arrival of an event that was delivered at <1123>; the same content "
        "under a new envelope id: its producer published it again. It was not delivered."
    )


def test_what_the_history_may_miss_is_not_counted():
    again = row(Verdict.DUPLICATE, 2, cause="redelivery", first_ms=AT_MS + 5)
    story = ArrivalContext(row=again, fate=Fate.DEAD, likely=likely_cause(again, None, None))
    assert said(story) == (
        "This is a duplicate of an event that first arrived at <5> and went to the dead letters; the "
        "same envelope id: a queue, rule or target sent it again. It was not delivered."
    )


@pytest.mark.parametrize(
    ("story", "words"),
    [
        (
            ArrivalContext(row=row(Verdict.DELIVERED), is_whole=True),
            "This was the first arrival of the event. It was delivered.",
        ),
        (
            ArrivalContext(row=row(Verdict.DELIVERED, 2, attempt=2), before=[row(Verdict.FAILED)]),
            "This event was delivered, at attempt 2. 1 earlier arrival was returned to the source.",
        ),
        (
            ArrivalContext(row=row(Verdict.DELIVERED, 2), before=[row(Verdict.DELIVERED)]),
            (
                "This event was delivered. It had been delivered before, at <1000>: its window "
                "had passed, or an operator forgot or resent it."
            ),
        ),
        (
            ArrivalContext(
                row=row(Verdict.DELIVERED),
                after=[row(Verdict.DUPLICATE, 2), row(Verdict.DUPLICATE, 3), row(Verdict.BUSY, 4)],
            ),
            "This event was delivered. It arrived again 3 times: 2 duplicate, 1 busy.",
        ),
        (
            ArrivalContext(row=row(Verdict.DELIVERED), after=[row(Verdict.DUPLICATE, 2)]),
            "This event was delivered. It arrived again after 1 s: duplicate.",
        ),
        (
            ArrivalContext(row=row(Verdict.DELIVERED, unprotected=True)),
            (
                "This event was delivered. The store was unavailable: it was delivered without "
                "checking for duplicates."
            ),
        ),
        (
            ArrivalContext(row=row(Verdict.DUPLICATE, forwarded=True)),
            (
                "This is a duplicate of an event that was processed. It was delivered anyway: route crm "
                "is in shadow mode."
            ),
        ),
        (
            ArrivalContext(row=row(Verdict.STALE)),
            (
                "A newer state of the same entity had been delivered when this one arrived, so it is "
                "stale. It was not delivered."
            ),
        ),
        (
            ArrivalContext(row=row(Verdict.UNCHANGED)),
            (
                "The same state of the same entity had been delivered just before this one arrived, so "
                "it is unchanged. It was not delivered."
            ),
        ),
        (
            ArrivalContext(row=row(Verdict.CONFLICT, forwarded=True)),
            (
                "Another event has the same key, with different content. This one was delivered as a "
                "separate event."
            ),
        ),
        (
            ArrivalContext(row=row(Verdict.CONFLICT, reason="conflict")),
            (
                "Another event has the same key, with different content. This one went to the dead "
                "letters."
            ),
        ),
        (
            ArrivalContext(row=row(Verdict.CONFLICT)),
            (
                "Another event has the same key, with different content. Its rule drops such "
                "events, so this one was dropped."
            ),
        ),
        (
            ArrivalContext(row=row(Verdict.BUSY), after=[row(Verdict.DELIVERED, 3)]),
            (
                "It could not be claimed: another worker was processing it. It was returned to its "
                "source, arrived again after 2 s and was delivered."
            ),
        ),
        (
            ArrivalContext(
                row=row(Verdict.FAILED, reason="HTTP 503"), after=[row(Verdict.FAILED, 2)]
            ),
            (
                "It was not delivered: HTTP 503. It was returned to its source, arrived again 1 time, "
                "and is still being retried."
            ),
        ),
        (
            ArrivalContext(row=row(Verdict.FAILED, reason="HTTP 503")),
            (
                "It was not delivered: HTTP 503. It was returned to its source, which retries it. "
                "The history has no later arrival yet."
            ),
        ),
        (
            ArrivalContext(row=row(Verdict.FAILED, reason="cut off", forwarded=True)),
            "It was delivered, but a later step failed: cut off.",
        ),
        (
            ArrivalContext(row=row(Verdict.FAILED, key=b"", reason="HTTP 503")),
            "It was not delivered: HTTP 503. It was returned to its source, which retries it.",
        ),
        (
            ArrivalContext(row=row(Verdict.DEAD, reason="rejected: HTTP 400")),
            "This event went to the dead letters: the sink rejected it permanently (HTTP 400).",
        ),
        (
            ArrivalContext(
                row=row(Verdict.DEAD, rule="", reason="not-json: the bytes are not JSON in UTF-8")
            ),
            (
                "This is not an event: the bytes are not JSON in UTF-8. It is kept in the dead "
                "letters."
            ),
        ),
        (
            ArrivalContext(row=row(Verdict.BYPASSED), rule=Rule(name="orders", tiers=())),
            ('It was delivered without checking for duplicates: the rule says key = "none".'),
        ),
        (
            ArrivalContext(
                row=row(Verdict.BYPASSED, replay="r"), rule=Rule(name="o", on_replay="deliver")
            ),
            (
                "It was delivered without checking for duplicates: it is a replay, and the "
                'rule says on_replay = "deliver".'
            ),
        ),
        (
            ArrivalContext(
                row=row(Verdict.DISCARDED), rule=Rule(name="orders", tiers=(), discard=True)
            ),
            "It was dropped: its rule discards such events.",
        ),
        (
            ArrivalContext(row=row(Verdict.DISCARDED, forwarded=True)),
            (
                "It would be dropped: its rule discards such events. It was delivered "
                "anyway: route crm is in shadow mode."
            ),
        ),
    ],
)
def test_each_verdict_is_told_in_words(story, words):
    assert said(story) == words


def test_what_a_later_version_may_say_is_told_without_words():
    assert said(ArrivalContext(row=HistoryRow(1, AT_MS, "crm", "something-new"))) == ""


def test_arrivals_are_counted_as_people_do():
    counted = [ordinal(n) for n in (1, 2, 10, 11, 12, 21, 22, 23, 101, 111, 1000)]
    assert counted == [
        "first",
        "second",
        "tenth",
        "11th",
        "12th",
        "21st",
        "22nd",
        "23rd",
        "101st",
        "111th",
        "1,000th",
    ]


def test_a_cause_is_sure_where_the_first_arrival_is_known():
    first = row(Verdict.DELIVERED)
    again = row(Verdict.DUPLICATE, 2, id="other", cause="re-emission")
    sure, guess = likely_cause(again, first, None), likely_cause(again, None, None)
    assert (sure.cause, sure.is_sure) == ("re-emission", True)
    assert (guess.cause, guess.is_sure) == ("re-emission", False)
    assert "or a second integration or bus delivers it too" in guess.text


def test_the_id_of_a_copy_is_told_as_that_of_the_copy():
    first = row(Verdict.DELIVERED)
    copy = row(Verdict.DUPLICATE, 2, id="other", cause="re-emission")
    again = row(Verdict.DUPLICATE, 3, id="other", cause="redelivery", first_id="an-id")
    found = likely_cause(again, first, None, twin=copy)
    assert (found.cause, found.is_sure) == ("redelivery", True)
    story = ArrivalContext(row=again, before=[first, copy], is_whole=True, likely=found)
    assert said(story) == (
        "This is the third arrival of an event that was delivered at <1000>; the same envelope id "
        "as the arrival of <2000>, a duplicate of the first: a queue, rule or target sent it "
        "again. It was not delivered."
    )
    unseen = likely_cause(again, None, None)
    assert "".join(map(str, unseen.words)) == (
        "the same envelope id as an earlier copy: a queue, rule or target sent it again"
    )


def test_a_key_of_fields_says_nothing_about_the_content():
    first = row(Verdict.DELIVERED)
    again = row(Verdict.DUPLICATE, 2, id="other", cause="re-emission")
    by_fields = Rule(name="orders", tiers=(Tier(key=FieldsKey(("detail.order",))),))
    assert likely_cause(again, first, by_fields).text == (
        "the same key under a new envelope id: its producer published it again"
    )
    assert likely_cause(again, first, Rule(name="orders")).text.startswith("the same content")


def test_a_cause_is_corrected_by_the_first_arrival():
    first = row(Verdict.DELIVERED, source="com.example.other")
    again = row(Verdict.DUPLICATE, 2, id="other", cause="re-emission")
    found = likely_cause(again, first, None)
    assert (found.cause, found.counted_as) == ("second-integration", "re-emission")


def test_without_a_cause_there_is_none():
    assert likely_cause(row(Verdict.DELIVERED), None, None) is None
    assert likely_cause(row(Verdict.DELIVERED, cause="a new one"), None, None) is None


# --- the time line and what differs -------------------------------------------------------


def test_the_time_line_has_gaps_in_words():
    alike = [
        RecordedArrival("w", HistoryRow(1, 0, "crm", "delivered")),
        RecordedArrival("w", HistoryRow(2, 12, "crm", "duplicate")),
        RecordedArrival("w", HistoryRow(3, 12 + 7_380_000, "crm", "duplicate")),
    ]
    gaps = [one.gap.replace("\N{NO-BREAK SPACE}", " ") for one in timeline(alike, alike[1])]
    assert gaps == ["", "12 ms", "2 h 3 min"]
    assert [one.is_this for one in timeline(alike, alike[1])] == [False, True, False]


def test_of_very_many_arrivals_some_are_left_out():
    alike = [RecordedArrival("w", HistoryRow(n, n, "crm", "duplicate")) for n in range(1000)]
    line = timeline(alike, alike[500])
    assert len(line) < 80
    assert sum(one.left_out for one in line) + len(line) == 1000
    shown = {one.seen.row.number for one in line}
    assert {0, 499, 500, 501, 999} <= shown
    assert timeline([], None) == ()


def test_payloads_are_compared_where_both_are_kept():
    first = row(Verdict.DELIVERED, payload=b'{"id":"an-id","detail":{"a":1,"b":[1,2]}}')
    again = row(Verdict.DUPLICATE, payload=b'{"id":"an-id","detail":{"a":2,"b":[1]}}', region="x")
    found = compared(first, again)
    assert [change.path for change in found.envelope] == ["region"]
    assert [(c.path, c.was) for c in found.payload] == [("detail.a", 1), ("detail.b[1]", 2)]
    assert found.same == ("id", "source")
    assert compared(first, row(Verdict.DUPLICATE)).payload is None
    assert compared(first, row(Verdict.DUPLICATE, payload='{"cut…'.encode())).payload is None


@pytest.mark.parametrize("payload", [b"{", b'"\xff"', b"\xff", b"[" * 100_000, b'{"a":"\\ud800"}'])
def test_a_payload_that_cannot_be_read_is_none(payload):
    assert payload_of(row(Verdict.DELIVERED, payload=payload)) is None


# --- the pages ----------------------------------------------------------------------------


def test_a_delivered_event_tells_of_its_repeats(run):
    live = run()
    for _ in range(3):
        live.send(event())
    page = live.why(-1)
    assert page.lead == (
        "This was the first arrival of the event. It was delivered. It arrived again 2 times: "
        "2 duplicate."
    )
    assert "acknowledged" in page.section("decided").text
    line = page.section("line")
    assert "All arrivals of this event (3)" in line.text
    assert len(line.attributes("time")) == 3
    assert line.text.count("+") == 2
    assert "done, it was delivered; until " in page.section("now").text


def test_a_repeat_tells_which_arrival_it_is_and_links_to_the_first(run):
    live = run()
    live.send(event())
    live.send(event(id="another"))
    page = live.why()
    assert re.fullmatch(
        r"This is the second arrival of an event that was delivered at \d{4}-\d\d-\d\d "
        r"\d\d:\d\d:\d\d\.\d{3} UTC; the same content under a new envelope id: its producer "
        r"published it again\. It was not delivered\.",
        page.lead,
    )
    text = page.section("decided").text
    assert "re-emission" in text
    assert "(certain)" in text
    assert "the content, for 6d" in text
    assert page.links["default"].startswith("/rules#rule-")
    assert live.page(page.links["that arrival"]).lead.startswith("This was the first arrival")
    changed, size = page.section("differs").rows
    assert size["Field"] == "size"
    assert changed == {
        "Field": "id",
        "First": "6f1c2a10-0000-4000-8000-000000000001",
        "This one": "another",
    }
    same = "Equal: time, source, account, region, detail-type"
    assert same in page.section("differs").text
    assert "payloads are not kept (dashboard_payloads)" in page.section("differs").text


def test_a_copy_that_is_sent_again_names_the_copy_and_links_to_it(run):
    live = run()
    live.send(event())
    live.send(event(id="another"))
    live.send(event(id="another"))
    page = live.why()
    assert "; the same envelope id as the arrival of 2" in page.lead
    assert ", a duplicate of the first: a queue, rule or target sent it again." in page.lead
    assert "redelivery: the same envelope id as the arrival of" in page.section("decided").text
    copy = live.page(page.links["that copy"])
    assert copy.lead.startswith("This is the second arrival")
    assert copy.section("event").text.count("another") == 1
    assert "that copy" not in copy.links


def test_a_payload_that_was_not_kept_says_why(run, monkeypatch):
    live = run(dashboard_payloads=True)
    live.send(event())
    named = HistoryReader.named

    async def bare(self, *given):
        seen = await named(self, *given)
        return replace(seen, row=replace(seen.row, payload=b"", bare=True))

    why = "Payload not kept, because of the load at that time."
    assert why not in live.why().text
    monkeypatch.setattr(HistoryReader, "named", bare)
    assert why in live.why().section("event").text


def test_a_second_integration_is_told_with_both_sources(run):
    live = run()
    live.send(event(source=f"{ORGANISATION}/one"))
    live.send(event(source=f"{ORGANISATION}/two", id="another"))
    page = live.why()
    assert "the same content from another source: two integrations overlap" in page.lead
    changed = {row["Field"]: row["This one"] for row in page.section("differs").rows}
    assert changed["source"] == f"{ORGANISATION}/two"


def test_an_older_state_is_stale_and_the_same_state_is_noise(run):
    live = run()

    def state(version: int, state: str, copy: int = 1) -> bytes:
        detail = {"conversationId": "c-1", "version": version, "state": state, "copy": copy}
        return event(version * 10 + copy, **{"detail-type": "State", "detail": detail})

    live.send(state(5, "open"))
    live.send(state(4, "new"))
    stale = live.why()
    assert stale.lead.startswith("A newer state of the same entity had been delivered")
    assert "out-of-order" in stale.section("decided").text
    assert len(live.page(stale.links["c-1"]).rows) == 2
    live.send(state(6, "open"))
    noise = live.why()
    assert noise.lead.startswith("The same state of the same entity")
    assert "double-emission" in noise.section("decided").text
    tied = "the fields detail.conversationId, detail.version, detail.copy, for 6d"
    assert tied in noise.section("decided").text


def test_an_id_with_other_content_is_a_conflict(run):
    live = run()
    live.send(event(**{"detail-type": "By Id"}))
    live.send(event(**{"detail-type": "By Id", "detail": {"other": True}, "region": "eu-west-1"}))
    page = live.why()
    assert page.lead == (
        "Another event has the same envelope id, with different content. This one was delivered as "
        "a separate event."
    )
    assert "made of the shared key" in page.section("decided").text
    changed = {
        row["Field"]: (row["Other"], row["This one"]) for row in page.section("differs").rows
    }
    assert changed["region"] == ("eu-central-1", "eu-west-1")
    assert "as another event" in page.section("namesakes").text


def test_what_failed_is_told_with_its_reason_and_what_came_then(run):
    live = run()
    live.sink.answer = Unknown("the line broke", 1)
    live.send(event())
    page = live.why()
    assert page.lead.startswith(
        "It was not delivered: the line broke. It was returned to its source"
    )
    assert "The history has no later arrival yet" in page.lead
    assert "returned: the source retries it" in page.section("decided").text
    assert "last error: the line broke" in page.section("now").text
    live.sink.answer = type(live.sink)().answer
    live.until(lambda: live.send(event())[0].verdict is Verdict.DELIVERED, within=20)
    page = live.why(-1, "?verdict=failed")
    assert "arrived again after" in page.lead
    assert "and was delivered." in page.lead
    assert "returned to the source" in live.why(0, "?verdict=delivered").lead


def test_what_another_worker_holds_is_busy(run):
    live = run()
    live.sink.hold()
    first = live.begin(event())
    live.until(lambda: live.sink.begun, within=20)
    live.send(event())
    page = live.why()
    assert page.lead.startswith("It could not be claimed: another worker was processing it")
    assert "A worker holds the event with this key" in page.section("now").text
    live.sink.let_go()
    first.result(20)
    # The one that held it came first, so the history has it before the one that was busy.
    assert live.why(0, "?verdict=delivered").lead.endswith(": busy.")


def test_what_died_leads_to_its_letter(run):
    live = run()
    live.sink.answer = Never("HTTP 400")
    live.send(event())
    page = live.why()
    assert page.lead == (
        "This event went to the dead letters: the sink rejected it permanently (HTTP 400)."
    )
    assert page.links["Dead letter 1"] == "/dead/1"
    live.send(event())
    again = live.why()
    assert "and went to the dead letters" in again.lead
    assert again.links["Dead letter 1"] == "/dead/1"
    live.do(lambda: live.setup.config.dead.opened.drop([1]))
    assert "Its dead letter was replayed or dropped since" in live.why(0, "?verdict=dead").text


def test_what_has_no_key_leads_to_its_letter(run):
    live = run(ROUTED)
    live.send(event(1, **{"detail-type": "Strict"}))
    strict = live.why()
    assert "went to the dead letters: a field that its key needs is missing" in strict.lead
    assert strict.links["Dead letter 1"] == "/dead/1"
    live.send(b"\xff no event")
    assert live.page().rows[0]["Topic"] == "not an event"
    page = live.why()
    assert "not an event" in page.text
    assert page.lead.startswith("This is not an event: the bytes are not JSON in UTF-8")
    assert page.links["Dead letter 2"] == "/dead/2"
    assert "none: it is not a readable event" in page.section("decided").text
    live.send(event(3, source="com.example.stranger"))
    page = live.why()
    assert page.lead == "This event went to the dead letters: no route matches it."
    assert page.links["Dead letter 3"] == "/dead/3"
    assert "no route matches" in page.section("decided").text


def test_what_is_bypassed_and_what_is_discarded(run):
    live = run(ROUTED, unrouted="discard")
    live.send(event(1, **{"detail-type": "As It Is"}))
    assert 'the rule says key = "none"' in live.why().lead
    live.send(event(2, **{"detail-type": "Noise"}))
    page = live.why()
    assert page.lead == "It was dropped: its rule discards such events."
    assert "none: it was not deduplicated" in page.section("decided").text
    live.send(event(3, source="com.example.stranger"))
    assert live.why().lead == "It was dropped: no route matches it."
    live.send(event(4, source="com.example.stranger", **{"detail-type": "Noise"}))
    page = live.why()
    assert page.lead == "It was dropped: its rule discards such events."
    assert "no route matches" in page.section("decided").text
    assert page.links["noise"] == "/rules#rule-noise"


def test_shadow_mode_is_told(run):
    live = run(mode="shadow")
    live.send(event())
    live.send(event())
    page = live.why()
    assert "\\x" not in page.html
    assert "It was delivered anyway: route crm is in shadow mode." in page.lead
    assert "delivered (shadow mode)" in page.section("line").text


def test_a_further_tier_is_told(run):
    live = run()
    live.send(event(1, **{"detail-type": "Tiers"}))
    live.send(event(1, **{"detail-type": "Tiers", "detail": {"order": 99}}))
    page = live.why()
    assert "the envelope id, for 5m (further tier)" in page.section("decided").text
    assert page.links["that arrival"], "the first is found by its id, as its key is another"


def test_acts_of_operators_are_told(run):
    live = run()
    (outcome,) = live.send(event())

    async def forget() -> None:
        trail = StoreOperatorLog(live.store, by="ada <b>")
        await trail.write(
            "forget", [event_log_key(outcome.key)], route="crm", reason="asked & told"
        )
        await live.store.forget([outcome.key])

    live.do(forget)
    page = live.why()
    assert "forget on crm, by ada <b>: asked & told" in page.section("now").text
    assert "ada <b>" not in page.html
    live.send(event())
    assert "It had been delivered before" in live.why().lead


def test_a_rule_that_is_gone_is_told_as_gone(run, tmp_path):
    with world(tmp_path) as before:
        before.send(event(**{"detail-type": "By Id"}))
    page = run(rules="").why()
    assert "by id (no longer in the configuration)" in page.section("decided").text
    assert "Deduplicated by" not in page.text


def test_another_workers_arrivals_are_part_of_the_story(run, tmp_path):
    with world(tmp_path) as before:
        before.send(event())
    live = run()
    live.send(event())
    listed = live.page()
    second, first = listed.rows
    assert first["Worker"] != second["Worker"]
    name = live.service.monitor.name
    assert second["Worker"] == name.rpartition("-")[2]
    assert listed.attributes("span", title=name), "the whole of it is told to whoever points at it"
    assert live.page(second["why"]).lead.startswith("This is the second arrival of an event that")
    assert "It arrived again after" in live.page(first["why"]).lead


def test_beside_workers_elsewhere_the_store_tells_all(serve, tmp_path):
    with world(tmp_path) as worker:
        worker.send(event())
        worker.send(event(id="another"))
        worker.sink.answer = Never("HTTP 400")
        worker.send(event(2))
    visitor = serve()
    rows = Page(visitor.get("/decisions").text).rows
    assert [row["Verdict"] for row in rows] == ["dead", "duplicate", "delivered"]
    died, again = (Page(visitor.get(rows[at]["why"]).text) for at in (0, 1))
    assert died.links["Dead letter 1"] == "/dead/1"
    assert again.lead.startswith("This is the second arrival of an event that was delivered at")
    assert "(certain)" in again.text


def test_an_event_by_its_key(run):
    live = run()
    (outcome,) = live.send(event())
    live.send(event())
    page = live.page(f"/events/{outcome.key.hex()}")
    assert "The event with this key was delivered." in page.section("now").text
    assert "Arrivals (2)" in page.section("line").text
    assert len(page.section("line").attributes("li")) == 2
    assert "this one" not in page.section("line").text


def test_an_event_that_only_the_store_knows(run):
    live = run(history="off")
    (outcome,) = live.send(event())
    page = live.page(f"/events/{outcome.key.hex()}")
    assert "The event with this key was delivered." in page.text
    assert "No arrivals in the history" in page.text


# --- what must not be seen ----------------------------------------------------------------


CANARY = "canary-7c1d"


def canaries() -> dict[str, object]:
    """Make a detail with a canary in every value, at every depth."""
    return {
        "text": f"{CANARY}-1",
        "ani": f"tel:+49{CANARY}",
        "list": [f"{CANARY}-2", {"deep": f"{CANARY}-3"}],
        "inner": json.dumps({"text": f"{CANARY}-4"}),
        "eventBody": {"name": f"{CANARY}-5", "number": 1234567890123},
    }


def all_pages(live: World) -> list[str]:
    """Fetch the list and the page of each arrival and event on it."""
    listed = live.page()
    pages = [listed.html, *[live.page(row["why"]).html for row in listed.rows]]
    keys = set(re.findall(r"/events/[0-9a-f]{66}", listed.html))
    return [*pages, *[live.page(path).html for path in keys]]


def test_without_payloads_nothing_of_a_detail_is_on_any_page(run):
    live = run()
    live.send(event(detail=canaries()))
    live.send(event(id="again", detail=canaries()))
    live.send(event(2, **{"detail-type": "Strict", "detail": canaries()}))
    live.send(event(3, **{"detail-type": "By Id", "detail": canaries()}))
    live.send(event(3, **{"detail-type": "By Id", "detail": {**canaries(), "more": CANARY}}))
    live.sink.answer = No("not now")
    live.send(event(4, detail={**canaries(), "n": 4}))
    for html in all_pages(live):
        assert CANARY not in html
        assert "1234567890123" not in html


def test_with_payloads_what_is_masked_stays_hidden(run):
    live = run(dashboard_payloads=True, mask=["ani", "detail.eventBody.name"])
    live.send(event(detail=canaries()))
    live.send(event(detail=canaries()))
    live.send(event(2, **{"detail-type": "By Id", "detail": canaries()}))
    live.send(event(2, **{"detail-type": "By Id", "detail": {**canaries(), "text": "changed"}}))
    page = live.why()
    body = page.html[page.html.index('<details id="body">') :]
    assert f"{CANARY}-1" not in body
    assert f"{CANARY}-3" in body
    assert "•••" in body
    changed = {
        row["Field"]: (row["Other"], row["This one"]) for row in page.section("differs").rows
    }
    assert changed["detail.text"] == (f"{CANARY}-1", "changed")
    same = live.why(2)
    assert "detail" in same.section("differs").text
    for html in all_pages(live):
        assert f"tel:+49{CANARY}" not in html
        assert f"{CANARY}-5" not in html


HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg/onload=alert(1)>',
    "' onmouseover='alert(1)",
    "javascript:alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "</title></textarea></script><b>bold</b>",
    "&lt;script&gt;",
    "line\nbreak\r\x00\x1b[31m\u202eevil\u2028",
    "<!-- --!> ]]> <![CDATA[",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_of_an_event_becomes_markup(run, text):
    # The configuration takes no name that cannot be printed.
    name = json.dumps(f"rule {text}" if text.isprintable() else "rule")
    route = f"route {text}" if text.isprintable() else "route"
    rules = f"""
        [[routes]]
        name = {json.dumps(route)}
        sink = "python:os:fsencode"
        [[routes.rules]]
        name = {name}
        match = {{ detail-type = [{json.dumps(text)}] }}
        key = ["detail.conversationId"]
        check = true
    """
    live = run(rules, dashboard_payloads=True)
    fields = {
        **dict.fromkeys(["id", "source", "account", "region", "time", "replay-name"], text),
        "detail-type": text,
    }
    detail = {"topicName": text, "conversationId": text, text: text}
    live.send(event(**fields, detail=detail))
    live.send(event(**fields, detail=detail))
    live.send(event(**fields, detail={**detail, f"{text}3": [text]}))
    live.sink.answer = Never(text)
    live.send(
        event(**{**fields, "id": f"{text}2"}, detail={**detail, "conversationId": f"{text}2"})
    )
    live.do(live.service.monitor.record)

    for html in [*all_pages(live), live.page("/decisions?q=nobody").html]:
        page = Page(html)
        for tag, attributes in page.tags:
            assert tag in OUR_TAGS, tag
            assert not [one for one in attributes if one.startswith("on") or one == "style"]
            href = attributes.get("href") or attributes.get("action") or ""
            assert not href or href.startswith(("/", "#")), href
            assert (attributes.get("src") or "/static/").startswith("/static/")
        assert len(page.attributes("script")) == 1
        for character in "\x00\x1b\u202e\u2028\r":
            assert character not in html
        assert "49{" not in html
        assert text not in html or not set(text) & set("<>&\"'")
    assert any(unescape(html).count("alert(1)") for html in all_pages(live)) == ("alert" in text)


OUR_TAGS = {
    *("html", "head", "meta", "title", "link", "script", "body", "header", "nav", "main", "footer"),
    *("table", "thead", "tbody", "tr", "td", "th", "code", "details", "summary", "pre", "form"),
    *("input", "select", "option", "label", "button", "time", "ol", "ul", "li", "b", "br", "wbr"),
    *("dl", "dt", "dd", "svg", "path", "circle", "span", "p", "a", "h1", "h2", "h3", "section"),
    "div",
}


def test_long_texts_are_cut_with_all_of_them_at_hand(run):
    live = run()
    live.send(event(source="x" * 5000, **{"detail-type": "y" * 5000}))
    listed = live.page()
    assert "y" * 61 not in listed.text
    assert "y" * 128 in listed.html, "what is kept of it is told to whoever points at it"


def test_the_first_ones_id_is_nowhere_where_ids_are_masked(run):
    live = run(mask=["id"])
    live.send(event(id="canary-id"))
    live.send(event(id="another-canary"))
    (again, _) = live.page().rows
    key = next(iter(re.findall(r"/events/([0-9a-f]{66})", live.visitor.get("/decisions").text)))
    why = live.why(0)
    for path in ("/decisions", f"/decisions?q={key}&verdict=dead", f"/events/{key}"):
        assert "canary" not in live.visitor.get(path).text, path
    assert again["Verdict"] == "duplicate"
    assert "canary" not in why.html
    assert "First arrival" in why.text
    # Whoever has the id may look for it, and is told no more than they know.
    by_id = live.visitor.get("/decisions?q=canary-id").text
    assert "The event with this key was delivered." in by_id
    assert ", as canary" not in by_id
