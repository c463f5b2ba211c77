"""An explanation says what the gateway then does, and does nothing itself."""

import json
import re

import pytest
from tests.cli.worlds import event, raw, setup_of

from oncebridge.config import Setup
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.errors import SinkRejected
from oncebridge.explain import Explanation, explain
from oncebridge.gateway import Gateway
from oncebridge.records import Record
from oncebridge.store import Part, Want
from oncebridge.stores.memory import MemoryStore
from oncebridge.testing.clock import ManualClock
from oncebridge.verdict import Verdict

RULES = """
[[rules]]
name = "orders"
match = { source = ["com.example.shop"] }
tiers = [{ key = "id", window = "5m" }, { key = "content", ignore = ["detail.sentAt"] }]

[[rules]]
name = "calls"
match = { source = ["com.example.calls"] }
key = ["detail.call", "detail.status", "detail.at"]
latest = { entity = "detail.call", version = "detail.at" }
quiet = { entity = "detail.call", state = "detail.status", for = "10s" }

[[rules]]
name = "strict"
match = { source = ["com.example.strict"] }
key = ["detail.needed"]
on_missing = "dead"

[[rules]]
name = "by id, dead"
match = { source = ["com.example.dead"] }
key = "id"
on_conflict = "dead"

[[rules]]
name = "by id, dropped"
match = { source = ["com.example.dropped"] }
key = "id"
on_conflict = "duplicate"

[[rules]]
name = "replays pass"
match = { source = ["com.example.replays"] }
on_replay = "deliver"

[[rules]]
name = "replays apart"
match = { source = ["com.example.apart"] }
on_replay = "separate"

[[rules]]
name = "ticks"
match = { source = ["com.example.clock"] }
key = "none"

[[rules]]
name = "noise"
match = { source = ["com.example.noise"] }
discard = true
"""


async def explained(setup: Setup, *events: dict | bytes, store=None) -> list[Explanation]:
    raws = [one if isinstance(one, bytes) else raw(one) for one in events]
    records = [Record(each, line, 0, line) for line, each in enumerate(raws, 1)]
    return [one async for one in explain(records, setup, store)]


class LookedAt:
    """A store that can be looked at, and nothing else."""

    def __init__(self, store) -> None:
        self._store = store
        self.peek, self.now_ms = store.peek, store.now_ms


def call(status: str, at: int, *, number: str = "c-1", **more) -> dict:
    detail = {"call": number, "status": status, "at": at}
    return event(source="com.example.calls") | {"detail": detail} | more


STREAM = [
    event(1),
    event(1),
    event(1, id="a2"),
    event(1, id="a3", time="2026-03-02T09:00:00Z") | {"detail": {"order": 1, "sentAt": "now"}},
    event(2, id="a1"),  # the id of another order: a conflict
    event(2, id="a1"),
    event(3, id=None),
    event(1, **{"replay-name": "again"}),
    call("ringing", 10),
    call("ringing", 10, id="x"),
    call("answered", 30),
    call("on hold", 20),  # late
    call("answered", 40),  # the same state again so soon
    call("answered", 40),
    call("ended", 35),
    event(source="com.example.strict"),
    event(source="com.example.strict") | {"detail": {"needed": 1}},
    event(1, source="com.example.dead"),
    event(2, source="com.example.dead"),
    event(2, source="com.example.dead"),
    event(1, source="com.example.dropped"),
    event(2, source="com.example.dropped"),
    event(2, source="com.example.dropped"),
    event(1, source="com.example.replays"),
    event(1, source="com.example.replays", **{"replay-name": "again"}),
    event(1, source="com.example.apart"),
    event(1, source="com.example.apart", **{"replay-name": "again"}),
    event(1, source="com.example.apart", **{"replay-name": "again"}),
    event(1, source="com.example.clock"),
    event(1, source="com.example.clock"),
    event(1, source="com.example.noise"),
    event(1, source="com.example.reject"),
    event(1, source="com.example.reject"),
    event({}, source="elsewhere"),
    b"{",
    b"[1]",
    event(1),
]


async def test_the_verdict_is_the_one_that_the_gateway_then_gives(tmp_path):
    """Every kind of event, each explained right before it arrives."""
    setup = setup_of(tmp_path, RULES)
    (route,) = setup.routes
    clock = ManualClock()
    store = MemoryStore(clock=clock)

    async def take(one) -> None:
        if one.source == "com.example.reject":
            raise SinkRejected

    seen = set()
    async with Gateway(
        store=store,
        sink=take,
        rules=route.rules,
        route=route.name,
        dead=MemoryDeadLetters(),
        settings=route.settings,
        clock=clock,
    ) as gateway:
        for number, arrival in enumerate(STREAM):
            (said,) = await explained(setup, arrival, store=LookedAt(store))
            (outcome,) = await gateway.process(
                [arrival if isinstance(arrival, bytes) else raw(arrival)]
            )
            seen.add(outcome.verdict)
            if isinstance(arrival, dict) and arrival["source"] == "com.example.reject":
                assert said.judged.verdict in (Verdict.DELIVERED, Verdict.DUPLICATE)
                continue
            assert said.judged.verdict is outcome.verdict, (number, said.judged, outcome)
            if outcome.verdict is Verdict.DELIVERED:
                assert said.keys[-1].key == outcome.key
            if outcome.verdict is Verdict.DUPLICATE:
                assert said.judged.first == outcome.first
            clock.advance(5)
    assert seen == set(Verdict) - {Verdict.BUSY, Verdict.FAILED}


async def test_what_a_worker_holds_is_busy(tmp_path):
    setup = setup_of(tmp_path, RULES)
    store = MemoryStore(clock=ManualClock())
    (said,) = await explained(setup, call("ringing", 1))
    part = Part(said.keys[0].key)
    await store.claim([Want((part,), b"t" * 16, b"g" * 16, 30_000, 60_000)])
    now, beside = await explained(
        setup, call("ringing", 1), call("ringing", 1, number="c-2"), store=LookedAt(store)
    )
    assert now.judged.verdict is Verdict.BUSY
    assert "30.0 s" in now.judged.why
    assert beside.judged.verdict is Verdict.DELIVERED


async def test_an_event_tried_too_often_would_die(tmp_path):
    setup = setup_of(tmp_path, "max_attempts = 1")
    store = MemoryStore()
    (said,) = await explained(setup, event())
    want = Want((said.keys[0].part,), b"t" * 16, b"g" * 16, 1, 60_000)
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await store.claim([want])
    clock.advance(1000)
    (now,) = await explained(setup, event(), store=LookedAt(store))
    assert now.judged.verdict is Verdict.DEAD


async def test_each_tier_is_told_with_its_kind_its_window_and_what_was_hashed(tmp_path):
    setup = setup_of(tmp_path, RULES)
    order = event(7) | {"detail": {"order": 7, "sentAt": "now", "b": 1.0}}
    (said,) = await explained(setup, order)
    told = said.as_json(canonical=True)
    assert [(key["kind"], key["window"], key["canonical"]) for key in told["keys"]] == [
        ("id", "5m", "a1"),
        ("content", "6d", '{"b":1,"order":7}'),
    ]
    assert told["canonical"] == '{"b":1,"order":7}'
    assert all(re.fullmatch(r"01[0-9a-f]{64}", key["key"]) for key in told["keys"])
    (said,) = await explained(setup, call("ringing", 3))
    told = said.as_json(canonical=True)
    assert told["canonical"] == 'detail.call = "c-1"\ndetail.status = "ringing"\ndetail.at = 3'
    assert (told["entity"], told["version"]) == ("c-1", 3)


async def test_a_key_that_takes_the_place_of_another_says_so(tmp_path):
    setup = setup_of(tmp_path, RULES)
    (said,) = await explained(setup, event(source="com.example.calls"))
    assert [known.kind for known in said.keys] == ["content"]
    assert "content counts" in said.why
    (said,) = await explained(setup, event(source="com.example.strict"))
    assert (said.action, said.keys) == ("dead", ())
    assert "missing or null" in said.why


async def test_a_sliding_window_is_told_with_its_end(tmp_path):
    setup = setup_of(
        tmp_path,
        '[[rules]]\nname = "s"\nsliding = true\nwindow = "1h"\nmax_window = "2d"',
    )
    (said,) = await explained(setup, event())
    assert said.as_json()["keys"][0]["window"] == "1h, sliding up to 2d"


async def test_repeats_within_the_file_are_found_with_what_differs(tmp_path):
    setup = setup_of(tmp_path, RULES)
    first, again, other, replay = await explained(
        setup,
        event(1, time="2026-03-02T09:00:00Z"),
        event(1, id="a2", time="2026-03-02T09:00:01Z"),
        event(2, id="a4"),
        event(1, **{"replay-name": "again"}),
    )
    assert (first.same_as, first.differs, first.cause) == (None, None, None)
    assert (again.same_as, again.differs, again.cause) == (1, ("id", "time"), "re-emission")
    assert (other.same_as, other.differs) == (None, None)
    assert (replay.same_as, replay.cause) == (1, "replay")
    assert set(replay.differs) == {"time", "replay-name"}


async def test_a_conflict_within_the_file_shows_what_differs_and_has_no_cause(tmp_path):
    setup = setup_of(tmp_path, RULES)
    _, clash = await explained(setup, event(1), event(2))
    assert (clash.same_as, clash.differs, clash.cause) == (1, ("detail.order",), None)


@pytest.mark.parametrize(
    ("again", "cause"),
    [
        (event(1), "redelivery"),
        (event(1, id="other"), "re-emission"),
        (event(1, id=None), "unknown"),
        (event(1, **{"replay-name": "again"}), "replay"),
    ],
)
async def test_the_cause_of_a_duplicate_is_guessed_from_the_first_arrival(tmp_path, again, cause):
    setup = setup_of(tmp_path)
    (route,) = setup.routes
    store = MemoryStore()
    async with Gateway(store=store, sink=lambda _: None, route=route.name) as gateway:
        await gateway.process([raw(event(1))])
    (said,) = await explained(setup, again, store=store)
    assert (said.judged.verdict, said.cause) == (Verdict.DUPLICATE, cause)
    assert said.as_json()["first"]["id"] == "a1"


ROUTES = """
[[routes]]
name = "crm"
sink = "python:json:dumps"
match = { source = ["com.example.shop"] }

[[routes]]
name = "all orders"
sink = "python:json:dumps"
match = { detail-type = ["Order"] }
"""


async def test_there_is_an_explanation_for_each_route(tmp_path):
    setup = setup_of(tmp_path, ROUTES)
    crm, orders, elsewhere, lost = await explained(
        setup, event(), event(source="x"), event(source="x", **{"detail-type": "y"})
    )
    assert [crm.route, orders.route, elsewhere.route] == ["crm", "all orders", "all orders"]
    assert crm.keys[0].key != orders.keys[0].key
    assert (lost.route, lost.action, lost.judged.verdict) == (None, "dead", Verdict.DEAD)
    dropped = setup_of(tmp_path, 'unrouted = "discard"' + ROUTES)
    (lost,) = await explained(dropped, event(source="x", **{"detail-type": "y"}))
    assert lost.judged.verdict is Verdict.DISCARDED


def test_an_event_is_explained_before_and_after_it_ran(run, call, write, tmp_path):
    write("events.ndjson", event(1), event(1, id="a2"), event(2, id="a3"))
    before = run("explain", "events.ndjson", "--json")
    assert [told["verdict"] for told in before.objects()] == [None] * 3
    assert "no verdicts" in before.err
    assert [path.name for path in tmp_path.iterdir()] == ["events.ndjson"]
    run("run", "--source", "file:events.ndjson")
    first, again, other = call("explain", "events.ndjson", "--json").objects()
    assert {"route", "rule", "keys", "verdict", "first", "differs", "cause"} <= first.keys()
    assert "canonical" not in first
    assert (first["verdict"], first["cause"]) == ("duplicate", "redelivery")
    assert (again["verdict"], again["cause"], again["differs"]) == (
        "duplicate",
        "re-emission",
        ["id"],
    )
    assert other["first"]["id"] == "a3"
    assert other["fate"] == "delivered"
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:.]+Z", other["first"]["arrived"])
    call("pause")
    assert call("explain", "events.ndjson", "--json").objects()[0]["paused"]


def test_what_cannot_be_read_is_told_among_the_rest_and_ends_with_1(call, write):
    write("events.ndjson", event(1), "not json", '{"detail": 7}', event(2, id="a2"))
    ran = call("explain", "events.ndjson", "--json", code=1)
    assert [told.get("reason") for told in ran.objects()] == [None, "not-json", "no-detail", None]
    assert [told["line"] for told in ran.objects()] == [1, 2, 3, 4]
    people = call("explain", "-", code=1, given=b"not json")
    assert "not-json" in people.out
    assert "no event in it" in call("explain", "-", code=1).err
    assert "No such file" in call("explain", "nowhere.json", code=2).err


def test_people_get_short_lines_and_nothing_that_a_terminal_obeys(call, write):
    write("events.ndjson", event(1, id="\x1b]0;mine\x07"), event(1, id="a2"))
    ran = call("explain", "events.ndjson", "--canonical")
    assert "\x1b" not in ran.out
    assert "\\x1b]0;mine" in ran.out
    assert '{"order":1}' in ran.out
    assert "re-emission" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


def test_a_store_that_cannot_be_opened_costs_the_verdicts_only(call, write):
    write("seen.db", "this is no SQLite file, and quite long enough to be looked at as one" * 20)
    write("event.json", event())
    ran = call("explain", "event.json", "--store", "sqlite:seen.db", "--json")
    assert "is not a SQLite file" in ran.err
    assert ran.objects()[0]["verdict"] is None


def test_an_explanation_in_json_is_one_object_per_line(call):
    array = json.dumps([event(1), event(2, id="b")], indent=2).encode()
    assert [told["id"] for told in call("explain", "-", "--json", given=array).objects()] == [
        "a1",
        "b",
    ]
