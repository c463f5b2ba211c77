"""What was delivered is delivered again when somebody means it, and nothing is lost on the way."""

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.cli.test_dead import Killed, Seams, World, _wrapped
from tests.cli.worlds import event, raw

from oncebridge.base.clock import SystemDice
from oncebridge.engine import pauses
from oncebridge.engine.verdict import Verdict
from oncebridge.events.event import parse
from oncebridge.events.key import Part
from oncebridge.operate import operator_log
from oncebridge.operate.explain.expected_verdict import RecordView
from oncebridge.operate.identity import Identities, RouteIdentity
from oncebridge.operate.operator_log import StoreOperatorLog
from oncebridge.operate.resend import Resender, ResendPlan, Resent, plan_resends
from oncebridge.service.config import load
from oncebridge.service.routes import gateways
from oncebridge.sinks.api import Never, Unknown, Yes
from oncebridge.stores.api import Want, Wants
from oncebridge.stores.sqlite.store import SQLiteStore

HOUR = 3_600_000

# --- step by step -------------------------------------------------------------------------


def ways(world: World, one: dict) -> list[RouteIdentity]:
    return Identities(world.setup).of(parse(raw(one)))


async def again(world: World, one: dict, route: str = "") -> Resent:
    """Resend one event on one route, and leave a trail, as the command does."""
    way = next(way for way in ways(world, one) if route in ("", way.route.name))
    made = {g.route: g for g in gateways(world.setup, clock=world.clock)}

    async def before(intent: ResendPlan) -> None:
        names = [operator_log.event_log_key(key) for key in intent.keys]
        await StoreOperatorLog(world.setup.config.store.opened).write("resend", names)

    try:
        return await Resender(world.setup.config.store.opened, made, before=before).send(
            parse(raw(one)), way
        )
    finally:
        for gateway in made.values():
            await gateway.aclose()


async def test_a_delivered_event_is_delivered_once_more_and_then_known_again(tmp_path):
    world = World(tmp_path)
    await world.arrive(event(1))
    done = await again(world, event(1, id="other"))
    assert done.is_sent
    assert done.outcome.verdict is Verdict.DELIVERED
    assert done.intent.before == "it was delivered"
    assert len(world.sink.taken) == 2
    assert await world.arrive(event(1)) == [Verdict.DUPLICATE]


async def test_an_event_that_is_not_known_is_simply_delivered(tmp_path):
    world = World(tmp_path)
    done = await again(world, event(1))
    assert (done.is_sent, done.intent.before) == (True, "the store has no record of it")


async def test_the_key_is_the_same_and_the_generation_new(tmp_path):
    world = World(tmp_path)
    seen = []

    async def deliver(deliveries):
        seen.extend(deliveries)
        return [Yes()] * len(deliveries)

    world.sink.deliver = deliver
    await world.arrive(event(1))
    await again(world, event(1))
    first, second = seen
    assert first.idempotency_key == second.idempotency_key
    assert first.generation != second.generation
    assert (first.attempt, second.attempt) == (1, 1)


async def test_every_tier_is_forgotten_and_what_is_anothers_is_not(tmp_path):
    world = World(tmp_path, '[[rules]]\nname = "by id"\nkey = "id"')
    await world.arrive(event(1))
    await world.arrive(event(2))  # the same id, other content: an event of its own
    done = await again(world, event(2))
    assert (done.outcome.verdict, done.is_sent) == (Verdict.CONFLICT, True)
    assert world.sink.taken == [raw(event(1)), raw(event(2)), raw(event(2))]
    assert await world.arrive(event(1)) == [Verdict.DUPLICATE]
    two = World(tmp_path, '[[rules]]\nname = "two"\ntiers = [{ key = "id" }, { key = "content" }]')
    await two.arrive(event(1))
    assert (await again(two, event(1))).is_sent


async def refusal(world: World, one: dict) -> str:
    """Give the reason for which an event is not sent; nothing may have changed."""
    way = ways(world, one)[0]
    keys = [*way.all_keys(), *([way.plan.entity] if way.plan.entity else [])]
    before = await world.store.peek(keys)
    (intent,) = await plan_resends(world.store, [way])
    done = await again(world, one)
    assert done.outcome is None
    assert done.why_not == intent.why_not
    assert await world.store.peek(keys) == before
    assert (
        await operator_log.read(world.store, [operator_log.event_log_key(key) for key in keys])
        == {}
    )
    return done.why_not


async def test_it_is_refused_while_a_worker_holds_it_or_it_waits(tmp_path):
    world = World(tmp_path)
    (way,) = ways(world, event(1))
    want = Want((Part(way.keys[0].key),), b"t" * 16, b"g" * 16, 30_000, HOUR)
    await world.store.claim(Wants.of([want]))
    assert await refusal(world, event(1)) == "it is held by a worker for 30.0 s more"
    world.clock.advance(40_000)
    world.sink.answer = Unknown("who knows")
    await world.arrive(event(1))
    assert re.match(r"it is waiting for its next attempt for", await refusal(world, event(1)))


async def test_it_is_refused_on_a_paused_route(tmp_path):
    world = World(tmp_path)
    await world.arrive(event(1))
    await pauses.pause(world.store, world.routes, SystemDice())
    assert await refusal(world, event(1)) == "the route is paused"


LATEST = """
[[rules]]
name = "calls"
latest = { entity = "detail.call", version = "detail.order" }
quiet = { entity = "detail.call", state = "detail.state", for = "10s" }
"""


def call_event(version: int, state: str) -> dict:
    return event(id=f"v{version}") | {"detail": {"call": "c", "order": version, "state": state}}


async def test_an_older_state_stays_stale_and_the_newest_goes_once_it_is_no_noise(tmp_path):
    world = World(tmp_path, LATEST)
    older, newer = call_event(1, "rings"), call_event(2, "ended")
    assert await world.arrive(older, newer) == [Verdict.DELIVERED] * 2
    assert "this one is stale" in await refusal(world, older)
    assert "within the quiet time" in await refusal(world, newer)
    world.clock.advance(11_000)
    assert (await again(world, newer)).is_sent


async def test_what_a_rule_drops_is_not_sent_and_what_it_never_keys_is(tmp_path):
    world = World(
        tmp_path,
        '[[rules]]\nname = "noise"\nmatch = { source = ["noise"] }\ndiscard = true\n'
        '[[rules]]\nname = "strict"\nmatch = { source = ["strict"] }\nkey = ["detail.x"]\n'
        'on_missing = "dead"\n[[rules]]\nname = "ticks"\nkey = "none"',
    )
    assert "discard" in await refusal(world, event(source="noise"))
    assert "missing or null" in await refusal(world, event(source="strict"))
    done = await again(world, event(1))
    assert (done.outcome.verdict, done.is_sent) == (Verdict.BYPASSED, True)


async def test_in_shadow_mode_everything_is_sent_again(tmp_path):
    noise = '[[rules]]\nname = "noise"\nmatch = { source = ["noise"] }\ndiscard = true\n'
    world = World(tmp_path, f'mode = "shadow"\n{noise}{LATEST}')
    older, newer = call_event(1, "rings"), call_event(2, "ended")
    await world.arrive(older, newer)
    for one, verdict in ((older, Verdict.STALE), (event(source="noise"), Verdict.DISCARDED)):
        done = await again(world, one)
        assert (done.outcome.verdict, done.is_sent) == (verdict, True)


async def test_what_the_sink_does_not_take_now_is_said_and_goes_later(tmp_path):
    world = World(tmp_path)
    await world.arrive(event(1))
    world.sink.answer = Unknown("who knows")
    done = await again(world, event(1))
    assert (done.is_sent, done.outcome.verdict, done.why_not) == (
        False,
        Verdict.FAILED,
        "who knows",
    )
    world.clock.advance(HOUR)
    world.sink.answer = Yes()
    assert (await again(world, event(1))).is_sent
    world.sink.answer = Never("no")
    done = await again(world, event(1))
    assert (done.is_sent, done.outcome.verdict) == (False, Verdict.DEAD)
    assert [letter.reason for letter in await world.letters()] == ["rejected"]


async def test_a_kill_at_any_point_leaves_the_event_delivered_or_simply_new(tmp_path):
    """Whatever was done by then, the next copy is right, and running it again sends it."""
    ended, steps, new = False, 0, 0
    while not ended:
        world = World(tmp_path)
        await world.arrive(event(1))
        seams, whole = Seams(), world.setup
        world.setup = _wrapped(whole, seams)
        seams.left = steps
        try:
            await again(world, event(1))
            ended = True
        except Killed:
            pass
        seams.left = None
        world.setup = whole
        (way,) = ways(world, event(1))
        (record,) = await world.store.peek([way.keys[0].key])
        trails = await operator_log.read(world.store, [operator_log.event_log_key(way.keys[0].key)])
        if record is None:
            new += 1
            assert trails, f"forgotten without a trail after {steps} steps"
        world.clock.advance(HOUR)  # whatever the dead process held is free
        sent = len(world.sink.taken)
        assert 1 <= sent <= 2
        (verdict,) = await world.arrive(event(1))
        is_known = record is not None and record.fate is not None
        assert verdict is (Verdict.DUPLICATE if is_known else Verdict.DELIVERED), steps
        assert (await again(world, event(1))).is_sent
        steps += 1
    assert steps > 8
    assert new


# --- the command line ---------------------------------------------------------------------


class Receiver(ThreadingHTTPServer):
    """A receiver that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Take)
        self.got: list[tuple[str, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook"


class _Take(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append((self.headers["idempotency-key"], body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


CONFIG = """
store = "sqlite:seen.db"
dead = "sqlite:dead.db"
audit = "audit.ndjson"
[[routes]]
name = "crm"
sink = "{url}"
[[routes]]
name = "lake"
sink = "file:lake.ndjson"
match = {{ source = ["com.example.shop"] }}
"""
C = ("-c", "pipe.toml")


@pytest.fixture
def delivered(call, write, receiver):
    write("pipe.toml", CONFIG.format(url=receiver.url))
    write("events.ndjson", event(1), event(1, id="a2"), event(2, id="b1"))
    call("run", *C, "--source", "file:events.ndjson")
    assert len(receiver.got) == 2


def lines(tmp_path, name: str) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]


def test_an_event_goes_to_all_its_routes_again_with_the_same_key(
    call, write, delivered, receiver, tmp_path
):
    write("one.json", event(2, id="b1"))
    told = call("resend", "one.json", "--yes", "--reason", "CRM lost it", "--json", *C).objects()
    assert [(one["route"], one["result"], one["verdict"]) for one in told] == [
        ("crm", "sent", "delivered"),
        ("lake", "sent", "delivered"),
    ]
    assert told[0]["before"] == "it was delivered"
    assert len(lines(tmp_path, "lake.ndjson")) == 3
    assert len(receiver.got) == 3
    assert receiver.got[-1] in receiver.got[:2]  # the same key and the same bytes
    assert receiver.got[-1][0].strip('"') == told[0]["key"]
    written = lines(tmp_path, "audit.ndjson")
    assert [(one["verb"], one["routes"], one["reason"]) for one in written] == [
        ("resend", ["crm"], "CRM lost it"),
        ("resend", ["lake"], "CRM lost it"),
    ]
    said = call("explain", "one.json", "--json", *C).objects()
    assert [one["verdict"] for one in said] == ["duplicate", "duplicate"]
    assert [one["trail"][0]["verb"] for one in said] == ["resend", "resend"]


def test_a_route_can_be_chosen_and_repeats_in_a_file_are_sent_once(
    call, delivered, receiver, tmp_path
):
    told = call("resend", "events.ndjson", "--route", "lake", "--yes", *C)
    assert told.out.count("delivered: once more; it was delivered before") == 2
    assert "the same event as one above" in told.out
    assert len(receiver.got) == 2
    assert len(lines(tmp_path, "lake.ndjson")) == 4


def test_a_dry_run_sends_and_changes_nothing(call, delivered, receiver, tmp_path):
    told = call("resend", "events.ndjson", "--dry-run", *C)
    assert told.out.count("would be sent: it was delivered") == 4
    assert len(receiver.got) == 2
    assert not (tmp_path / "audit.ndjson").exists()
    call("pause", "--route", "crm", *C)
    told = call("resend", "events.ndjson", "--dry-run", "--json", *C, code=1).objects()
    assert [one["result"] for one in told].count("not sent") == 2


def test_by_id_it_needs_a_body_and_a_recording_has_it(call, delivered, receiver):
    assert "the store has no payloads" in call("resend", "b1", "--yes", *C, code=1).out
    told = call("resend", "b1", "--in", "events.ndjson", "--route", "crm", "--yes", *C)
    assert "events.ndjson, line 3 on crm" in told.out
    assert json.loads(receiver.got[-1][1])["id"] == "b1"


@pytest.mark.parametrize("by", ["id", "key"])
def test_what_is_in_the_dead_letters_is_replayed(call, write, tmp_path, by):
    write("sink.py", "")
    write("pipe.toml", 'store = "sqlite:seen.db"\ndead = "sqlite:dead.db"\nsink = "python:sink:x"')
    taker = "from oncebridge.errors import SinkRejected\ndef x(event):\n    raise SinkRejected\n"
    write("sink.py", taker)
    write("events.ndjson", event(1))
    environment = {"PYTHONPATH": str(tmp_path)}
    run_in(tmp_path, "run", *C, "--source", "file:events.ndjson", **environment)
    (letter,) = call_json(tmp_path, "dead", "list", "--json", *C, **environment)
    name = "a1" if by == "id" else letter["key"]
    write("sink.py", "def x(event):\n    open('taken', 'a').write(event.id)\n")
    done = run_in(tmp_path, "resend", name, "--yes", *C, **environment)
    assert "this is `oncebridge dead replay 1`" in done.stderr
    assert "delivered" in done.stdout
    assert (tmp_path / "taken").read_text() == "a1"
    assert not call_json(tmp_path, "dead", "list", "--json", *C, **environment)
    (said,) = call_json(tmp_path, "explain", "events.ndjson", "--json", *C, **environment)
    assert [act["verb"] for act in said["trail"]] == ["dead replay"]


def run_in(tmp_path, *args: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, "-m", "oncebridge", *args],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done
    return done


def call_json(tmp_path, *args: str, **environment: str) -> list[dict]:
    return [json.loads(line) for line in run_in(tmp_path, *args, **environment).stdout.splitlines()]


def test_it_asks_on_a_terminal_and_is_refused_where_nobody_can_be_asked(
    call, delivered, receiver, tmp_path
):
    assert "--yes" in call("resend", "events.ndjson", *C, code=2).err
    for answer, code, got in (("n", 1, 2), ("y", 0, 4)):
        screen, terminal = pty.openpty()
        done = subprocess.Popen(
            [sys.executable, "-m", "oncebridge", "resend", "events.ndjson", "--route", "crm", *C],
            cwd=tmp_path,
            stdin=terminal,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        os.write(screen, answer.encode() + b"\n")
        _, shown = done.communicate(timeout=30)
        os.close(screen)
        os.close(terminal)
        assert done.returncode == code, shown
        assert b"Send 2 events again, on crm?" in shown
        assert b"same Idempotency-Key" in shown
        assert len(receiver.got) == got


def test_what_is_no_event_or_for_no_route_is_said_and_the_rest_is_sent(
    call, write, delivered, receiver
):
    write("some.ndjson", "not json", event(1), event(3, source="elsewhere"))
    told = call("resend", "some.ndjson", "--route", "lake", "--yes", *C, code=1).out
    assert "not sent: not an event: not-json" in told
    assert "line 2 on lake\n  delivered" in told
    assert "not sent: no route matches it" in told
    assert "No such file" in call("resend", "nowhere.json", "--yes", *C, code=2).err
    write("empty.ndjson", "")
    assert "it has no event" in call("resend", "empty.ndjson", "--yes", *C, code=1).out


def test_a_sink_that_is_down_leaves_the_event_to_be_sent_again(
    call, write, delivered, receiver, tmp_path
):
    write("pipe.toml", CONFIG.format(url="http://127.0.0.1:9/hook"))
    told = call("resend", "events.ndjson", "--route", "crm", "--yes", *C, code=1).out
    assert told.count("; its records are removed: run it again in ") == 2

    async def wait() -> None:
        (way,) = [w for w in _ways(tmp_path) if w.route.name == "crm"]
        async with SQLiteStore(tmp_path / "seen.db") as store:
            for _ in range(300):
                (record,) = await store.peek([way.keys[0].key])
                if record.until_ms <= await store.now_ms():
                    return
                await asyncio.sleep(0.1)

    asyncio.run(wait())
    write("pipe.toml", CONFIG.format(url=receiver.url))
    write("one.json", event(1))
    call("resend", "one.json", "--route", "crm", "--yes", *C)
    assert len(receiver.got) == 3


def _ways(tmp_path) -> list[RouteIdentity]:
    return Identities(load(tmp_path / "pipe.toml", environment={})).of(parse(raw(event(1))))


def test_wrapped_events_are_unwrapped_and_standard_output_holds_events_alone(run, write, tmp_path):
    body = {"MessageId": "m", "ReceiptHandle": "r", "Body": json.dumps(event(1))}
    write("queue.json", {"Messages": [body]})
    flags = ("--store", "sqlite:seen.db", "--sink", "-", "--yes")
    ran = run("resend", "queue.json", *flags)
    assert [json.loads(line)["id"] for line in ran.out.splitlines()] == ["a1"]
    assert "delivered" in ran.err


# --- what belongs to others ------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["duplicate", "dead"])
async def test_a_conflict_that_its_rule_does_not_send_is_refused(tmp_path, policy):
    rule = f'[[rules]]\nname = "by id"\nkey = "id"\non_conflict = "{policy}"'
    world = World(tmp_path, rule)
    await world.arrive(event(1))
    assert "another event has the same key with different content" in await refusal(world, event(2))
    assert world.sink.taken == [raw(event(1))]
    watching = World(tmp_path, f'mode = "shadow"\n{rule}')
    await watching.arrive(event(1))
    assert (await again(watching, event(2))).is_sent


async def test_it_is_not_told_of_another_event_with_the_same_key(tmp_path):
    world = World(tmp_path, '[[rules]]\nname = "by id"\nkey = "id"')
    await world.arrive(event(1), event(2))
    await again(world, event(2))
    for one, verbs in ((event(1), []), (event(2), ["resend"]), (event(3), [])):
        look = RecordView(world.store)
        (way,) = ways(world, one)
        await look.prepare([way])
        assert [act.verb for act in look.acts_on(way).acts] == verbs


TWO = """
store = "sqlite:seen.db"
dead = "sqlite:dead.db"
[[routes]]
name = "crm"
sink = "python:sink:crm"
[[routes]]
name = "bill"
sink = "python:sink:bill"
"""


def test_a_letter_is_replayed_only_where_that_was_asked_for(write, tmp_path):
    write("pipe.toml", TWO)
    write(
        "sink.py",
        "from oncebridge.errors import SinkRejected\n"
        "def crm(event):\n    raise SinkRejected\n"
        "def bill(event):\n    open('bill', 'a').write(event.id)\n",
    )
    write("events.ndjson", event(1))
    path = {"PYTHONPATH": str(tmp_path)}
    run_in(tmp_path, "run", *C, "--source", "file:events.ndjson", **path)
    taken = "def crm(event):\n    open('crm', 'a').write(event.id)\ndef bill(event):\n    1 / 0\n"
    write("sink.py", taken)
    told = run_in(tmp_path, "resend", "a1", "--route", "bill", "--yes", *C, code=1, **path).stdout
    assert "it died on route crm; `oncebridge dead show 1 --raw` prints the event" in told
    assert not (tmp_path / "crm").exists()
    run_in(tmp_path, "resend", "a1", "--route", "crm", "--yes", *C, **path)
    assert (tmp_path / "crm").read_text() == "a1"
    assert (tmp_path / "bill").read_text() == "a1"


def test_an_event_without_a_key_leaves_its_trail_on_the_route(call, write, tmp_path):
    rule = '[[rules]]\nname = "ticks"\nkey = "none"'
    places = 'store = "sqlite:seen.db"\ndead = "sqlite:dead.db"\nsink = "file:out"\nroute = "crm"\n'
    write("pipe.toml", places + rule)
    write("events.ndjson", event(1), event(2))
    call("pause", "--reason", "stop", *C)
    call("resume", *C)
    call("resend", "events.ndjson", "--yes", "--reason", "lost", *C)
    for said in call("explain", "events.ndjson", "--json", *C).objects():
        assert [(act["verb"], act["reason"]) for act in said["trail"]] == [("resend", "lost")]
        assert "Operator action, to events without a key on this route: resend" in said["summary"]


def test_a_large_file_is_sent_in_parts_and_each_event_once(call, write, tmp_path, monkeypatch):
    monkeypatch.setattr("oncebridge.cli.resend._AT_ONCE", 2)
    places = 'store = "sqlite:seen.db"\ndead = "sqlite:dead.db"\nsink = "file:out.ndjson"'
    write("pipe.toml", places)
    write("events.ndjson", *[event(n, id=f"i{n}") for n in (1, 2, 3, 4, 5, 1)])
    told = call("resend", "events.ndjson", "--yes", *C).out
    assert told.count("the store has no record of it") == 5
    assert told.count("the same event as one above") == 1
    assert [line["id"] for line in lines(tmp_path, "out.ndjson")] == ["i1", "i2", "i3", "i4", "i5"]
    asked = call("resend", "events.ndjson", "--dry-run", *C).out
    assert asked.count("would be sent: it was delivered") == 5
