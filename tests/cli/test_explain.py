"""An explanation says what the gateway then does, and does nothing itself."""

import asyncio
import json
import re
import sqlite3
from random import Random

import asyncpg
import pytest
from tests.cli.worlds import event, raw, setup_of
from tests.servers.aws import DynamoDBServer
from tests.servers.postgres import Postgres, schema
from tests.size import full

from oncebridge.base.clock import SystemDice
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.engine.gateway import Gateway
from oncebridge.engine.memos import EntityState, Memo
from oncebridge.engine.verdict import Verdict
from oncebridge.errors import SinkRejected
from oncebridge.events.framing import RawRecord
from oncebridge.events.key import Part
from oncebridge.operate.explain.explainer import explain, explain_key
from oncebridge.operate.explain.explanation import Explanation
from oncebridge.operate.explain.words import summary, summary_of_key
from oncebridge.operate.lookup import scan_costs
from oncebridge.service.addresses import StorePlace
from oncebridge.service.config import Setup
from oncebridge.sinks.api import Never, No, Unknown, Yes
from oncebridge.stores.api import Commit, Commits, Fate, Release, Releases, Want, Wants
from oncebridge.stores.memory import MemoryStore
from oncebridge.testing.clock import ManualClock

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


CALLS_BY_ID = """
[[rules]]
name = "ids and newest"
match = { source = ["com.example.both"] }
key = "id"
on_conflict = "dead"
latest = { entity = "detail.call", version = "detail.at" }
"""


async def explained(setup: Setup, *events: dict | bytes, store=None) -> list[Explanation]:
    raws = [one if isinstance(one, bytes) else raw(one) for one in events]
    records = [RawRecord(each, line, 0, line) for line, each in enumerate(raws, 1)]
    return [one async for one in explain(records, setup, store)]


class LookedAt:
    """A store that can be looked at, and nothing else."""

    def __init__(self, store) -> None:
        self._store = store
        self.peek, self.now_ms = store.peek, store.now_ms


def call(status: str, at: int | str, *, number: str = "c-1", **more) -> dict:
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


@pytest.mark.parametrize("mode", ["enforce", "shadow"])
async def test_the_verdict_is_the_one_that_the_gateway_then_gives(tmp_path, mode):
    """Every kind of event, each explained right before it arrives."""
    setup = setup_of(tmp_path, f'mode = "{mode}"\n{RULES}')
    seen = set()
    async for number, arrival, said, outcome in judged_and_done(setup, STREAM):
        seen.add(outcome.verdict)
        if isinstance(arrival, dict) and arrival["source"] == "com.example.reject":
            assert said.judged.verdict in (Verdict.DELIVERED, Verdict.DUPLICATE)
            continue
        assert said.judged.verdict is outcome.verdict, (number, said.judged, outcome)
        if said.event is not None:
            assert said.judged.is_shadow == (mode == "shadow")
            assert outcome.forwarded or mode == "enforce"
        if outcome.verdict is Verdict.DELIVERED:
            assert said.keys[-1].key == outcome.key
        if outcome.verdict is Verdict.DUPLICATE:
            assert said.judged.first == outcome.first
    assert seen == set(Verdict) - {Verdict.BUSY, Verdict.FAILED}


class SameDice(SystemDice):
    """Pauses that are the same each time."""

    def fraction(self) -> float:
        return 0.5


async def judged_and_done(setup: Setup, stream, answer=lambda: None):
    """Explain each of a stream and let it arrive then, by a gateway that is made of *setup*."""
    (route,) = setup.routes
    clock = ManualClock()
    store = MemoryStore(clock=clock)

    async def take(one) -> None:
        if one.source == "com.example.reject":
            raise SinkRejected
        if (error := answer()) is not None:
            raise error

    async with Gateway(
        store=store,
        sink=take,
        rules=route.rules,
        route=route.name,
        dead=MemoryDeadLetters(),
        settings=route.settings,
        clock=clock,
        dice=SameDice(),
    ) as gateway:
        for number, arrival in enumerate(stream):
            (said,) = await explained(setup, arrival, store=LookedAt(store))
            (outcome,) = await gateway.process(
                [arrival if isinstance(arrival, bytes) else raw(arrival)]
            )
            yield number, arrival, said, outcome
            clock.advance(5)


@pytest.mark.parametrize("mode", ["enforce", "shadow"])
@pytest.mark.parametrize("seed", [0, *full(1, 2, 3, 4, 5)])
async def test_the_verdict_is_the_gateways_whatever_comes_in_which_order(tmp_path, mode, seed):
    """Few ids, contents, entities and versions, so that most of them meet; sends may fail."""
    dice = Random(seed)
    settings = f'mode = "{mode}"\nmax_attempts = 2\nbackoff = "60ms"\nmax_backoff = "60ms"\n'
    setup = setup_of(tmp_path, settings + "breaker = 1000\n" + RULES + CALLS_BY_ID)
    sources = ["shop", "calls", "strict", "dead", "dropped", "replays", "apart", "both", "clock"]

    def one() -> dict:
        detail = {"order": dice.randint(1, 2), "call": "c", "status": dice.choice("ab")}
        detail |= {"at": dice.randint(1, 3)} | ({"needed": 1} if dice.random() < 0.5 else {})
        replay = {"replay-name": "r"} if dice.random() < 0.2 else {}
        name = dice.choice(["i1", "i2", None])
        source = f"com.example.{dice.choice(sources)}"
        return event(source=source, id=name, **replay) | {"detail": detail}

    def answer() -> Exception | None:
        return RuntimeError("away") if dice.random() < 0.15 else None

    stream = [one() for _ in range(150)]
    seen = set()
    async for number, _, said, outcome in judged_and_done(setup, stream, answer):
        if outcome.verdict is Verdict.FAILED:
            continue  # what the sink says is not to be foreseen
        seen.add(outcome.verdict)
        assert said.judged.verdict is outcome.verdict, (number, said.judged, outcome)
    assert {Verdict.DUPLICATE, Verdict.CONFLICT, Verdict.STALE, Verdict.DEAD} <= seen


async def test_what_a_worker_holds_is_busy(tmp_path):
    setup = setup_of(tmp_path, RULES)
    store = MemoryStore(clock=ManualClock())
    (said,) = await explained(setup, call("ringing", 1))
    part = Part(said.keys[0].key)
    await store.claim(Wants.of([Want((part,), b"t" * 16, b"g" * 16, 30_000, 60_000)]))
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
    await store.claim(Wants.of([want]))
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
    assert (told["entity_by"], told["version_by"]) == ("detail.call", "detail.at")


async def test_a_key_that_takes_the_place_of_another_says_so(tmp_path):
    setup = setup_of(tmp_path, RULES)
    (said,) = await explained(setup, event(source="com.example.calls"))
    assert [known.kind for known in said.keys] == ["content"]
    assert "content is used instead" in said.why
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


async def test_a_conflict_within_the_file_shows_what_differs_and_that_the_id_was_reused(tmp_path):
    setup = setup_of(tmp_path, RULES)
    _, clash = await explained(setup, event(1), event(2))
    assert (clash.same_as, clash.differs, clash.cause) == (1, ("detail.order",), "id-reused")


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
    assert "it has no event" in call("explain", "-", code=1).err
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


# --- in plain words -------------------------------------------------------------------------


async def words(tmp_path, text: str, again, *before, verdicts=None, advance_ms: int = 0) -> str:
    """Let events pass, and say in words what would become of another."""
    setup = setup_of(tmp_path, text)
    (route,) = setup.routes
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    answers = iter(verdicts or [Yes()] * len(before))

    class Sink:
        batch, concurrency = 1, 1

        async def open(self) -> None: ...

        async def deliver(self, deliveries):
            return [next(answers) for _ in deliveries]

        async def aclose(self) -> None: ...

    async with Gateway(
        store=store,
        sink=Sink(),
        rules=route.rules,
        route=route.name,
        dead=MemoryDeadLetters(),
        settings=route.settings,
        clock=clock,
    ) as gateway:
        for one in before:
            await gateway.process([raw(one)])
    clock.advance(advance_ms)
    said = (await explained(setup, again, store=LookedAt(store)))[0]
    return summary(said)


A_WEEK = 7 * 24 * 3600 * 1000
STARTED = "2023-11-14 22:13:20 UTC"


@pytest.mark.parametrize(
    ("before", "again", "more", "expected"),
    [
        (
            [],
            event(1),
            {},
            ["The store has no record of this event: it would be delivered by route crm"],
        ),
        (
            [event(1)],
            event(1, id="x"),
            {},
            [
                f"was delivered by route crm. Its first copy arrived on {STARTED}, as a1.",
                "This copy is a duplicate and would be dropped: its producer published it again, or an",
            ],
        ),
        (
            [event(1)],
            event(1),
            {},
            ["This copy has the id of the first one: it is the same copy, or a"],
        ),
        ([event(1)], event(1, **{"replay-name": "r"}), {}, ["it comes out of an archive"]),
        (
            [event(1, id=None)],
            event(1),
            {},
            ["is a duplicate and would be dropped: the cause is not known"],
        ),
        (
            [event(1)],
            event(1, id="x"),
            {"advance_ms": A_WEEK},
            ["its window is over, so it would be"],
        ),
        (
            [event(1)],
            event(1),
            {"verdicts": [Never("no")]},
            ["went to the dead letters on route crm"],
        ),
        (
            [event(1)],
            event(1),
            {"verdicts": [Unknown("timed out")]},
            ["Attempt 1 for this event failed (timed out); it waits for its next attempt for"],
        ),
        (
            [event(1)],
            event(1),
            {"verdicts": [No("refused")]},
            ["This event could not be sent yet (refused); it waits for its next attempt for"],
        ),
        (
            [event(1)],
            event(1),
            {"verdicts": [No("refused")], "advance_ms": 600_000},
            ["This event could not be sent yet (refused); it would be delivered by route crm now"],
        ),
        (
            [event(1)],
            event(1),
            {"verdicts": [Unknown("timed out")], "advance_ms": 600_000},
            ["This event was not delivered after 1 attempt (timed out); it would be delivered"],
        ),
        (
            [call("ringing", 5)],
            call("ended", 4),
            {},
            ["so this event is stale", "Likely cause: a newer state of the same entity was"],
        ),
        ([call("ended", 5)], call("ended", 6), {}, ["noise: it would be dropped", "too soon"]),
        (
            [event(1, source="com.example.dead")],
            event(2, source="com.example.dead"),
            {},
            [
                "Another event has the same key on route crm, with different content.",
                "This one goes to the dead letters.",
                "the envelope id of another event",
            ],
        ),
        (
            [event(1, source="com.example.dropped")],
            event(2, source="com.example.dropped"),
            {},
            ["This one is dropped."],
        ),
        ([event(1)], event(2), {}, ["This one is delivered as a separate event."]),
        (
            [call("ringing", 5)],
            call("ended", "2023-11-14"),
            {},
            [
                "This event is a conflict on route crm: its version is of type instant, and that",
                "of its entity of type number; it is delivered.",
            ],
        ),
        (
            [],
            event(1, source="com.example.clock"),
            {},
            ["delivered each time it arrives by route crm"],
        ),
        (
            [],
            event(1, source="com.example.noise"),
            {},
            ["is dropped each time it arrives on route crm"],
        ),
        (
            [],
            event(1, source="com.example.strict"),
            {},
            ["would go to the dead letters on route crm"],
        ),
        ([], b"{", {}, ["This is not an event, and goes to the dead letters:"]),
    ],
)
async def test_what_became_of_an_event_is_said_in_plain_words(
    tmp_path, before, again, more, expected
):
    said = await words(tmp_path, 'route = "crm"\n' + RULES, again, *before, **more)
    for part in expected:
        assert part in said
    assert "  " not in said
    assert said.endswith(".")


@pytest.mark.parametrize(
    ("before", "again", "expected"),
    [
        ([event(1)], event(1, id="x"), "in enforce mode it would be dropped as a duplicate."),
        ([call("ringing", 5)], call("ended", 4), "in enforce mode it would be dropped as stale."),
        (
            [event(1, source="com.example.dropped")],
            event(2, source="com.example.dropped"),
            "in enforce mode it would be dropped as a conflict.",
        ),
        ([], event(1, source="com.example.noise"), "in enforce mode it would be dropped."),
        (
            [],
            event(1, source="com.example.strict"),
            "in enforce mode it would go to the dead letters.",
        ),
    ],
)
async def test_in_shadow_mode_it_is_said_that_all_is_forwarded(tmp_path, before, again, expected):
    text = 'route = "crm"\nmode = "shadow"\n' + RULES
    said = await words(tmp_path, text, again, *before)
    assert said.startswith("Forwarded anyway: route crm is in shadow mode; ")
    assert expected in said
    assert said.count("dropped") == expected.count("dropped")
    new = await words(tmp_path, text, event(9))
    assert new == "The store has no record of this event: it would be delivered by route crm."


async def test_in_shadow_mode_it_is_said_what_too_many_attempts_would_lead_to(tmp_path):
    text = 'route = "crm"\nmode = "shadow"\nmax_attempts = 1\n'
    again = {"verdicts": [Unknown("timed out")], "advance_ms": 600_000}
    said = await words(tmp_path, text, event(1), event(1), **again)
    assert "in enforce mode it would go to the dead letters. This event was not delivered" in said


def test_shadow_mode_is_told_to_programs_and_people(call, write):
    write("events.ndjson", event(1), event(1, id="a2"))
    flags = ("--set", "mode=shadow", *FLAGS)
    counts = call("run", "--source", "file:events.ndjson", "--json", *flags).objects()[-1]
    assert counts["duplicate"] == 1
    for said in call("explain", "events.ndjson", "--json", *flags).objects():
        assert (said["verdict"], said["mode"], said["forwarded"]) == ("duplicate", "shadow", True)
    people = " ".join(call("explain", "events.ndjson", *flags).out.split())
    assert "(forwarded anyway: shadow mode)" in people


@pytest.mark.parametrize("policy", ["deliver", "dead", "duplicate"])
@pytest.mark.parametrize("knows", [True, False])
async def test_an_id_with_other_content_further_up_is_no_repeat(tmp_path, policy, knows):
    rule = f'[[rules]]\nname = "by id"\nkey = "id"\non_conflict = "{policy}"'
    setup = setup_of(tmp_path, f'route = "crm"\n{rule}')
    store = MemoryStore() if knows else None
    _, clash = await explained(setup, event(1), event(2), store=store)
    said = summary(clash)
    ends = {"deliver": "both are delivered", "dead": "dead letters", "duplicate": "is dropped"}
    assert "has the key of the one on line 1, with different content: it is not a duplicate" in said
    assert ends[policy] in said
    assert "is a repeat" not in said
    assert clash.cause == "id-reused"
    assert "Likely cause: " in said


async def test_of_two_copies_that_the_store_does_not_know_the_first_to_come_is_delivered(tmp_path):
    setup = setup_of(tmp_path, 'route = "crm"')
    _, again = await explained(setup, event(1), event(1, id="a2"), store=MemoryStore())
    assert again.judged.verdict is Verdict.DELIVERED
    said = summary(again)
    assert "It is a duplicate of the one on line 1: " in said
    assert said.endswith("; the one that arrives first is delivered.")


async def test_a_long_id_is_known_by_its_beginning(tmp_path):
    """Records remember 128 characters of it."""
    setup = setup_of(tmp_path)
    store = MemoryStore()
    async with Gateway(store=store, sink=lambda _: None, route=setup.routes[0].name) as gateway:
        await gateway.process([raw(event(1, id="x" * 200))])
    (said,) = await explained(setup, event(1, id="x" * 200), store=store)
    assert (said.cause, said.is_guess) == ("redelivery", False)


async def test_a_worker_that_holds_an_event_or_its_entity_is_told_with_how_long(tmp_path):
    setup = setup_of(tmp_path, 'route = "crm"\n' + RULES)
    store = MemoryStore(clock=ManualClock())
    (said,) = await explained(setup, call("ringing", 1))
    await store.claim(
        Wants.of([Want((Part(said.entity_key),), b"t" * 16, b"g" * 16, 30_000, 60_000)])
    )
    (said,) = await explained(setup, call("ringing", 1), store=LookedAt(store))
    assert "holds the same entity for 30.0 s more" in summary(said)
    key = said.keys[0].key
    memo = Memo("a1", 1_700_000_000_000).write()
    await store.claim(Wants.of([Want((Part(key),), b"t" * 16, b"g" * 16, 20_000, 60_000, memo)]))
    (said,) = await explained(setup, call("ringing", 1), store=LookedAt(store))
    assert "A worker of route crm holds this event for 20.0 s more, unless it ext" in summary(said)
    (told,) = said.as_json()["keys"]
    assert (told["state"], told["held"], told["left_ms"], told["attempts"]) == (
        "claimed",
        True,
        20_000,
        1,
    )


def test_a_second_integration_may_look_like_a_re_emission(call, write):
    """From the id alone they cannot be told apart; with the first copy at hand they can."""
    genesys = "aws.partner/genesys.com/cloud/1b6dd5c8-0000-4000-8000-000000000001/{}"
    one = event(1, source=genesys.format("one"), **{"detail-type": "v2.x"})
    two = event(1, id="a2", source=genesys.format("two"), **{"detail-type": "v2.x"})
    write("rules.toml", '[[rules]]\nname = "all"\nscope = "organisation"')
    write("first.ndjson", one)
    write("second.json", two)
    flags = ("-c", "rules.toml", "--store", "sqlite:seen.db", "--sink", "file:out.ndjson")
    call("run", "--source", "file:first.ndjson", *flags)
    (said,) = call("explain", "second.json", "--json", *flags).objects()
    assert (said["cause"], said["cause_is_sure"]) == ("re-emission", False)
    assert "or a second integration or bus delivers it too" in said["summary"]
    people = call("explain", "second.json", *flags).out
    assert "re-emission (likely)" in people
    (said,) = call("explain", "second.json", "--in", "first.ndjson", "--json", *flags).objects()
    assert (said["cause"], said["cause_is_sure"]) == ("second-integration", True)
    assert (said["same_as"], said["same_in"]) == (1, "first.ndjson")
    assert said["differs"] == ["id", "source"]


# --- by other names -------------------------------------------------------------------------

FLAGS = ("--store", "sqlite:seen.db", "--sink", "file:out.ndjson", "--set", "route=crm")


@pytest.fixture
def ran(call, write):
    write("events.ndjson", event(1), event(1, id="a2"), event(2, id="b1"))
    call("run", "--source", "file:events.ndjson", *FLAGS)


def test_a_key_is_explained_by_what_the_store_has(call, ran):
    (first, *_) = call("explain", "events.ndjson", "--json", *FLAGS).objects()
    key = first["keys"][0]["key"]
    (said,) = call("explain", key.upper(), "--json", *FLAGS).objects()
    assert {"rule", "keys", "verdict", "first", "differs", "cause", "trail"} <= said.keys()
    assert (said["verdict"], said["fate"], said["first"]["id"]) == ("duplicate", "delivered", "a1")
    (known,) = said["keys"]
    assert (known["key"], known["state"], known["kind"]) == (key, "done", None)
    people = call("explain", key, *FLAGS).out
    assert "The event with this key was delivered." in " ".join(people.split())
    assert "Duplicates are dropped until 20" in " ".join(people.split())
    assert max(map(len, people.splitlines())) <= 80
    unknown = call("explain", "01" + "0" * 64, *FLAGS, code=1)
    assert "The store has no record of this key" in unknown.out


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("held", "A worker holds the event with this key for 3"),
        ("waits", "Attempt 1 for the event with this key failed (timed out); it waits"),
        ("free", "was not delivered after 1 attempt (timed out)"),
        ("over", "its window is over, so by this key alone, an event that has it would be deliv"),
        ("register", "This is the state of an entity, not an event"),
    ],
)
async def test_a_key_is_explained_in_whatever_state_it_is(state, expected):
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    first, failed = Memo("a1", clock()), Memo("a1", clock(), error="timed out", counted=1)
    await store.claim(
        Wants.of([Want((Part(b"k"),), b"t" * 16, b"g" * 16, 3_600_000, A_WEEK, first.write())])
    )
    if state in ("waits", "free"):
        wait_ms = 60_000 if state == "waits" else 0
        await store.release(
            Releases.of([Release(b"k", b"t" * 16, wait_ms, A_WEEK, failed.write())])
        )
    if state == "register":
        memo = EntityState("number", 5, "", 0).write()
        await store.release(Releases.of([Release(b"k", b"t" * 16, 0, A_WEEK, memo)]))
    if state == "over":
        await store.commit(Commits.of([Commit(b"k", b"g" * 16, Fate.DELIVERED, 1000)]))
        clock.advance(2000)
    told = await explain_key(b"k", LookedAt(store), None)
    assert expected in summary_of_key(told)
    assert (told.first is None) == (state == "register")
    assert json.dumps(told.as_json())


def test_a_key_that_is_free_promises_nothing(call, write):
    """The content of the event is known still, and that is what it would be dropped by."""
    write("rules.toml", '[[rules]]\nname = "two"\ntiers = [{ key = "id" }, { key = "content" }]')
    write("events.ndjson", event(1))
    flags = ("-c", "rules.toml", *FLAGS)
    call("run", "--source", "file:events.ndjson", *flags)
    (said,) = call("explain", "events.ndjson", "--json", *flags).objects()
    key = said["keys"][0]["key"]
    forgotten = call("forget", key, *flags)
    assert "only this key was checked: a rule with tiers may know the event" in forgotten.err
    (by_key,) = call("explain", key, "--json", *flags).objects()
    assert by_key["verdict"] is None
    assert "by this key alone" in by_key["summary"]
    assert "A rule with tiers may know the event by another key." in by_key["summary"]
    (said,) = call("explain", "events.ndjson", "--json", *flags).objects()
    assert said["verdict"] == "duplicate"


def test_a_file_that_is_not_ours_stays_as_it_is(call, write, tmp_path):
    write("events.ndjson", event(1))
    for name in ("theirs.db", "dead.db"):
        with sqlite3.connect(tmp_path / name) as db:
            db.execute("CREATE TABLE theirs (a)")
        db.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    flags = ("--store", "sqlite:theirs.db", "--dead", "sqlite:dead.db", "--sink", "file:out.ndjson")
    told = call("explain", "events.ndjson", *flags)
    assert "no verdicts: the store sqlite:theirs.db does not exist yet" in told.err
    call("explain", "a1", *flags, code=1)
    assert "does not exist yet, so there is nothing" in call("forget", "a1", *flags, code=1).err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_no_table_is_made_to_be_looked_at(call, write, postgres: Postgres):
    write("events.ndjson", event(1))
    name = schema()
    table = f'[store]\nurl = "{postgres.url}"\nschema = "{name}"\nauto_migrate = true'
    write("pipe.toml", 'sink = "file:out.ndjson"', table)
    told = call("explain", "events.ndjson", "--json", "-c", "pipe.toml")
    assert "no verdicts" in told.err
    assert told.objects()[0]["verdict"] is None

    async def is_there() -> bool:
        connection = await asyncpg.connect(postgres.url)
        try:
            there = "SELECT to_regclass($1) IS NOT NULL"
            return await connection.fetchval(there, f"{name}.oncebridge_records")
        finally:
            await connection.close()

    assert not asyncio.run(is_there())
    call("run", "-c", "pipe.toml", "--source", "file:events.ndjson")
    (said,) = call("explain", "events.ndjson", "--json", "-c", "pipe.toml").objects()
    assert said["verdict"] == "duplicate"
    assert asyncio.run(is_there())


def test_entity_and_version_are_values_too(call, write):
    write("rules.toml", RULES)
    one = event(source="com.example.calls")
    write("call.json", one | {"detail": {"call": "Ada", "status": "s", "at": 7}})
    told = call("explain", "call.json", "-c", "rules.toml")
    assert "Ada" not in told.out
    assert "  entity   detail.call\n  version  detail.at\n" in told.out
    (said,) = call("explain", "call.json", "--json", "-c", "rules.toml").objects()
    assert "Ada" not in json.dumps(said)
    assert (said["entity_by"], said["version_by"]) == ("detail.call", "detail.at")
    shown = call("explain", "call.json", "--values", "-c", "rules.toml").out
    assert "  entity   detail.call = Ada\n  version  detail.at = 7\n" in shown
    (said,) = call("explain", "call.json", "--values", "--json", "-c", "rules.toml").objects()
    assert (said["entity"], said["version"]) == ("Ada", 7)


def test_decimals_that_a_double_would_round_are_shown_exactly(call, write):
    write("rules.toml", RULES)
    line = '{"id":"x","source":"%s","detail":{"call":%s,"order":%s,"at":%s,"status":"s"}}'
    one, other = "1.000000000000000001", "1.000000000000000002"
    write(
        "events.ndjson",
        line % ("com.example.calls", one, 1, one),
        line % ("com.example.dead", 1, one, 1),
        line % ("com.example.dead", 1, other, 1),
    )
    flags = ("explain", "events.ndjson", "--values", "-c", "rules.toml")
    shown = call(*flags).out
    assert f"  entity   detail.call = {one}\n  version  detail.at = {one}\n" in shown
    assert f"detail.order: {one} → {other}" in shown
    told = call(*flags, "--json").out
    assert f'"entity":{one}' in told
    assert f'"version":{one}' in told
    assert f'{{"path":"detail.order","was":{one},"is":{other}}}' in told


def test_an_id_is_found_in_a_recording_in_the_dead_letters_or_in_the_store(call, write, ran):
    (said,) = call("explain", "b1", "--json", *FLAGS).objects()
    assert (said["verdict"], said["first"]["id"]) == ("duplicate", "b1")
    missing = call("explain", "a2", *FLAGS, code=1)
    assert "the store keeps only the id of the first copy" in missing.err
    (said,) = call("explain", "a2", "--in", "events.ndjson", "--json", *FLAGS).objects()
    assert (said["line"], said["same_as"], said["cause"]) == (2, 1, "re-emission")
    assert said["changes"] == [{"path": "id", "was": "a1", "is": "a2"}]
    key = said["keys"][0]["key"]
    told = call("explain", key, "--in", "events.ndjson", "--json", *FLAGS).objects()
    assert [one["line"] for one in told] == [1, 2]
    nothing = call("explain", "b1", "--in", "events.ndjson", "--json", *FLAGS).objects()
    assert [one["line"] for one in nothing] == [3]
    elsewhere = call("explain", "zz", "--in", "events.ndjson", *FLAGS, code=1)
    assert "events.ndjson has no event with that id" in elsewhere.err


TAKER = """
from oncebridge.errors import SinkRejected
def take(event):
    raise SinkRejected("unheard of")
"""


def test_a_dead_event_is_told_with_its_letter(run, write, tmp_path):
    write("taker.py", TAKER)
    write("events.ndjson", event(1))
    flags = ("--store", "sqlite:seen.db", "--dead", "sqlite:dead.db", "--sink", "python:taker:take")
    path = {"PYTHONPATH": str(tmp_path)}
    run("run", "--source", "file:events.ndjson", *flags, **path)
    (said,) = run("explain", "events.ndjson", "--json", *flags, **path).objects()
    assert (said["verdict"], said["fate"]) == ("duplicate", "dead")
    assert (said["dead"]["number"], said["dead"]["reason"]) == (1, "rejected")
    assert "It is dead letter 1 (rejected)." in said["summary"]
    (by_id,) = run("explain", "a1", "--json", *flags, **path).objects()
    assert (by_id["letter"], by_id["rule"]) == (1, "default")
    (by_key,) = run("explain", said["keys"][0]["key"], "--json", *flags, **path).objects()
    assert by_key["dead"] == said["dead"]
    assert by_key["rule"] == "default"
    people = run("explain", "a1", *flags, **path).out
    assert people.startswith("dead letter 1  a1")
    assert "  dead     dead letter 1, died 20" in people


def test_a_file_comes_first_and_what_can_be_nothing_is_refused(call, write, ran):
    key = "01" + "a" * 64
    write(key, event(1))
    said = call("explain", key, "--json", *FLAGS)
    assert said.objects()[0]["id"] == "a1"
    assert "is also a key; the file of that name is used" in said.err
    nearly = call("explain", key[:60], *FLAGS, code=1).err
    assert "a key has 66 hex digits, this text has 60" in nearly
    cut = "this key is shortened"
    assert cut in call("explain", key[:10] + "…", code=2).err
    assert "No such file" in call("explain", "some/where", code=2).err
    assert "No such file" in call("explain", "", code=2).err


@pytest.mark.parametrize("url", ["dynamodb://seen-keys", "s3://seen-keys/here"])
def test_a_store_whose_reading_costs_is_searched_only_when_that_is_said(url, capsys):
    place = StorePlace.of(url, region="eu-central-1")
    assert "charges" in scan_costs(place)
    assert scan_costs(StorePlace.of("sqlite:seen.db")) == ""


def test_a_dynamodb_store_is_searched_with_scan_only(
    call, write, ministack: DynamoDBServer, monkeypatch
):
    write("events.ndjson", event(1, id="d1"))
    table = {"url": f"dynamodb://{ministack.table()}", "endpoint": ministack.endpoint}
    lines = [f'{name} = "{text}"' for name, text in table.items()]
    write("pipe.toml", 'sink = "file:out.ndjson"', "[store]", *lines)
    call("run", "-c", "pipe.toml", "--source", "file:events.ndjson")
    refused = call("explain", "d1", "-c", "pipe.toml", code=1)
    assert "was not searched: DynamoDB charges for reading every record" in refused.err
    (said,) = call("explain", "d1", "--scan", "--json", "-c", "pipe.toml").objects()
    assert said["first"]["id"] == "d1"
    forgotten = call("forget", "d1", "--scan", "-c", "pipe.toml").out
    assert "id d1: forgotten; it was delivered" in forgotten
    (said,) = call("explain", "events.ndjson", "--json", "-c", "pipe.toml").objects()
    assert [act["verb"] for act in said["trail"]] == ["forget"]


# --- what differs ---------------------------------------------------------------------------


def test_values_of_details_are_shown_only_when_asked_for(call, write):
    rule = '[[rules]]\nname = "o"\nkey = ["detail.order"]'
    write("rules.toml", rule)
    one = event(1, time="2026-03-02T09:00:00Z") | {"detail": {"order": 1, "name": "Ada", "n": [1]}}
    two = event(1, id="a2", vip="Bob") | {"detail": {"order": 1, "name": "Eve\x1b", "n": [1, 2]}}
    write("events.ndjson", one, two)
    quiet = call("explain", "events.ndjson", "--json", "-c", "rules.toml").objects()[1]
    assert quiet["differs"] == ["id", "time", "detail.name", "detail.n[1]", "vip"]
    assert quiet["changes"] == [
        {"path": "id", "was": "a1", "is": "a2"},
        {"path": "time", "was": "2026-03-02T09:00:00Z"},
        {"path": "detail.name"},
        {"path": "detail.n[1]"},
        {"path": "vip"},
    ]
    people = call("explain", "events.ndjson", "-c", "rules.toml").out
    assert "Ada" not in people
    assert "Bob" not in people
    assert "id: a1 → a2" in people
    assert "time: 2026-03-02T09:00:00Z → (missing)" in people
    shown = call("explain", "events.ndjson", "--values", "-c", "rules.toml").out
    assert "detail.name: Ada → Eve\\x1b" in shown
    assert "detail.n[1]: (missing) → 2" in shown
    assert "\x1b" not in shown


def test_wrapped_events_are_explained_one_by_one(call, write):
    def message(one: dict) -> dict:
        return {"MessageId": "m", "ReceiptHandle": "r", "Body": json.dumps(one)}

    write("queue.json", {"Messages": [message(event(1)), message(event(1, id="a2"))]})
    first, second = call("explain", "queue.json", "--json").objects()
    assert (first["id"], second["id"]) == ("a1", "a2")
    assert (second["cause"], second["differs"]) == ("re-emission", ["id"])


def test_who_did_what_is_told_to_people_too(call, ran):
    call("forget", "events.ndjson", "--reason", "wrong \x1bcustomer", *FLAGS)
    call("pause", "--reason", "the CRM migrates", *FLAGS)
    told = call("explain", "events.ndjson", *FLAGS).out
    words = " ".join(told.split())
    assert "Operator action: forget, by" in words
    assert "wrong \\x1bcustomer" in words
    assert "The route is paused, by" in words
    assert "(the CRM migrates): nothing is delivered until `oncebridge resume`." in words
    assert re.search(r"operator +20\d\d-\d\d-\d\d [\d:]+ UTC forget on crm, by \S+@", told)
    assert "\x1b" not in told
