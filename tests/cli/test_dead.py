"""Dead letters looked at, tried again and dropped; nothing is lost on the way."""

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from tests.cli.worlds import event, raw, setup_of

from oncebridge.base.clock import SystemDice
from oncebridge.cli.command import opened
from oncebridge.dead_letters.api import DeadLetter
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.dead_letters.sqlite import SQLiteDeadLetters
from oncebridge.engine import pauses
from oncebridge.engine.verdict import Verdict
from oncebridge.events.key import Part
from oncebridge.operate.replay import DeadLetterFilter, Replayed, Replayer, select
from oncebridge.service.config import Setup
from oncebridge.service.routes import make_router
from oncebridge.sinks.api import Delivery, Never, SinkAnswer, Unknown, Yes
from oncebridge.stores.api import Want, Wants
from oncebridge.stores.memory import MemoryStore
from oncebridge.testing.clock import ManualClock


class Taker:
    """A sink that does as it is told."""

    batch = 10
    concurrency = 1

    def __init__(self) -> None:
        self.answer: SinkAnswer = Yes()
        self.taken: list[bytes] = []

    async def open(self) -> None: ...

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        if isinstance(self.answer, Yes):
            self.taken += [delivery.event.raw for delivery in deliveries]
        return [self.answer] * len(deliveries)

    async def aclose(self) -> None: ...


class World:
    """One setup whose places live in memory and outlive its gateways."""

    def __init__(self, tmp_path, text: str = "") -> None:
        setup = setup_of(tmp_path, text)
        self.clock = ManualClock()
        self.store = MemoryStore(clock=self.clock)
        self.dead = MemoryDeadLetters()
        self.sinks = {route.name: Taker() for route in setup.routes}
        self.before: list[list[int]] = []
        self.setup: Setup = replace(
            setup,
            config=replace(
                setup.config,
                store=replace(setup.config.store, opened=self.store),
                dead=replace(setup.config.dead, opened=self.dead),
            ),
            routes=tuple(
                replace(route, sink=replace(route.sink, opened=self.sinks[route.name]))
                for route in setup.routes
            ),
        )

    @property
    def sink(self) -> Taker:
        return next(iter(self.sinks.values()))

    @property
    def routes(self) -> list[str]:
        return list(self.sinks)

    async def arrive(self, *events: dict | bytes) -> list[Verdict]:
        router = make_router(self.setup, clock=self.clock)
        arrivals = [one if isinstance(one, bytes) else raw(one) for one in events]
        answers = await router.process(arrivals)
        await router.aclose()
        return [answer.verdict for answer in answers]

    async def letters(self) -> list[DeadLetter]:
        return [letter async for letter in select(self.dead, DeadLetterFilter())]

    async def replay(
        self, letters: Sequence[DeadLetter] | None = None, *, to: str | None = None
    ) -> list[Replayed]:
        router = make_router(self.setup, clock=self.clock)

        async def before(letters: Sequence[DeadLetter]) -> None:
            self.before.append([letter.number for letter in letters])

        redrive = Replayer(self.setup, router, before=before, to=to)
        try:
            return await redrive.replay(await self.letters() if letters is None else letters)
        finally:
            await router.aclose()


async def test_a_letter_is_delivered_on_its_route_and_goes(tmp_path):
    world = World(tmp_path)
    world.sink.answer = Never("no")
    assert await world.arrive(event(1), event(2)) == [Verdict.DEAD] * 2
    world.sink.answer = Yes()
    done = await world.replay()
    assert [(one.number, one.verdict, one.gone) for one in done] == [
        (1, Verdict.DELIVERED, True),
        (2, Verdict.DELIVERED, True),
    ]
    assert world.sink.taken == [raw(event(1)), raw(event(2))]
    assert await world.letters() == []
    assert world.before == [[1, 2]]
    assert await world.arrive(event(1)) == [Verdict.DUPLICATE]


async def test_what_was_delivered_since_is_not_sent_again(tmp_path):
    world = World(tmp_path)
    world.sink.answer = Never("no")
    await world.arrive(event(1))
    (letter,) = await world.letters()
    await world.store.forget([letter.key])  # an operator let it pass, and it came again
    world.sink.answer = Yes()
    assert await world.arrive(event(1)) == [Verdict.DELIVERED]
    (done,) = await world.replay()
    assert (done.gone, done.reason) == (True, "it was delivered in the meantime")
    assert len(world.sink.taken) == 1
    assert await world.letters() == []


async def test_other_content_under_the_same_key_is_no_proof_of_delivery(tmp_path):
    world = World(tmp_path, '[[rules]]\nname = "by id"\nkey = "id"')
    world.sink.answer = Never("no")
    await world.arrive(event(1))
    (letter,) = await world.letters()
    await world.store.forget([letter.key])
    world.sink.answer = Yes()
    assert await world.arrive(event(2)) == [Verdict.DELIVERED]
    (done,) = await world.replay()
    assert (done.verdict, done.gone) == (Verdict.CONFLICT, True)
    assert world.sink.taken == [raw(event(2)), raw(event(1))]


async def test_a_delivery_whose_window_is_over_is_no_proof_either(tmp_path):
    world = World(tmp_path)
    world.sink.answer = Never("no")
    await world.arrive(event(1))
    (letter,) = await world.letters()
    await world.store.forget([letter.key])
    world.sink.answer = Yes()
    await world.arrive(event(1))
    world.clock.advance(7 * 24 * 3600 * 1000)
    (done,) = await world.replay([letter])
    assert done.verdict is Verdict.DELIVERED
    assert len(world.sink.taken) == 2


async def test_every_tier_of_an_event_forgets_that_it_died(tmp_path):
    world = World(
        tmp_path, '[[rules]]\nname = "two"\ntiers = [{ key = "id" }, { key = "content" }]'
    )
    world.sink.answer = Never("no")
    await world.arrive(event(1))
    world.sink.answer = Yes()
    (done,) = await world.replay()
    assert done.verdict is Verdict.DELIVERED


async def test_the_death_of_another_event_under_the_same_id_is_not_forgotten(tmp_path):
    world = World(tmp_path, '[[rules]]\nname = "by id"\nkey = "id"')
    world.sink.answer = Never("no")
    await world.arrive(event(1))
    await world.arrive(event(2))
    _, second = await world.letters()
    world.sink.answer = Yes()
    (done,) = await world.replay([second])
    assert (done.verdict, world.sink.taken) == (Verdict.CONFLICT, [raw(event(2))])
    assert await world.arrive(event(1)) == [Verdict.DUPLICATE]
    assert [letter.number for letter in await world.letters()] == [1]


async def test_what_dies_again_has_a_new_letter_and_only_that(tmp_path):
    world = World(tmp_path)
    world.sink.answer = Never("no")
    await world.arrive(event(1), b"not json")
    done = await world.replay()
    assert [(one.verdict, one.gone, one.is_resolved) for one in done] == [
        (Verdict.DEAD, True, False),
        (Verdict.DEAD, True, False),
    ]
    left = await world.letters()
    assert sorted(letter.reason for letter in left) == ["not-json", "rejected"]
    assert {letter.number for letter in left} == {3, 4}


async def test_what_the_sink_cannot_take_now_keeps_its_letter(tmp_path):
    world = World(tmp_path)
    world.sink.answer = Never("no")
    await world.arrive(event(1))
    world.sink.answer = Unknown("who knows")
    (done,) = await world.replay()
    assert (done.verdict, done.gone, done.reason) == (Verdict.FAILED, False, "who knows")
    (again,) = await world.replay()
    assert (again.verdict, again.gone) == (Verdict.BUSY, False)  # the pause after a failure
    world.clock.advance(3600 * 1000)
    world.sink.answer = Yes()
    (done,) = await world.replay()
    assert (done.verdict, done.gone) == (Verdict.DELIVERED, True)


async def test_what_a_worker_holds_right_now_is_left_to_it(tmp_path):
    world = World(tmp_path)
    world.sink.answer = Never("no")
    await world.arrive(event(1))
    (letter,) = await world.letters()
    await world.store.forget([letter.key])
    await world.store.claim(
        Wants.of([Want((Part(letter.key),), b"t" * 16, b"g" * 16, 30_000, 60_000)])
    )
    world.sink.answer = Yes()
    (done,) = await world.replay()
    assert (done.verdict, done.gone) == (Verdict.BUSY, False)
    assert world.sink.taken == []
    assert len(await world.letters()) == 1


async def test_a_paused_route_and_one_that_is_gone_keep_their_letters(tmp_path):
    world = World(tmp_path)
    world.sink.answer = Never("no")
    await world.arrive(event(1), b"not json")
    refused = next(letter for letter in await world.letters() if letter.rule)
    await pauses.pause(world.store, world.routes, SystemDice())
    assert [one.gone for one in await world.replay()] == [False, False]
    await pauses.resume(world.store, world.routes)
    await world.dead.put([replace(refused, route="of old")])
    gone = [letter for letter in await world.letters() if letter.route == "of old"]
    (done,) = await world.replay(gone)
    assert (done.gone, done.verdict) == (False, None)
    assert "no route 'of old'" in done.reason
    assert world.before == []


ROUTES = """
[[routes]]
name = "crm"
sink = "python:json:dumps"
match = { source = ["com.example.shop"] }

[[routes]]
name = "lake"
sink = "python:json:loads"
match = { source = [{ prefix = "com.example" }] }
"""


async def test_a_letter_is_replayed_on_the_route_where_it_died_and_on_no_other(tmp_path):
    world = World(tmp_path, ROUTES)
    world.sinks["crm"].answer = Never("no")
    await world.arrive(event(1))
    assert len(world.sinks["lake"].taken) == 1
    world.clock.advance(7 * 24 * 3600 * 1000)  # the lake would take it again
    world.sinks["crm"].answer = Yes()
    (done,) = await world.replay()
    assert done.verdict is Verdict.DELIVERED
    assert len(world.sinks["crm"].taken) == 1
    assert len(world.sinks["lake"].taken) == 1


async def orphans(world: World) -> list[DeadLetter]:
    """Put letters of a route that is gone in the place of those there are."""
    letters = await world.letters()
    await world.dead.drop([letter.number for letter in letters])
    await world.dead.put([replace(letter, route="of old") for letter in letters])
    return await world.letters()


async def test_letters_of_a_route_that_is_gone_are_replayed_on_another(tmp_path):
    world = World(tmp_path, ROUTES)
    world.sinks["crm"].answer = Never("no")
    await world.arrive(event(1, source="com.example.shop"), event(2, source="com.example.shop"))
    old = await orphans(world)
    assert [one.gone for one in await world.replay(old)] == [False, False]
    world.sinks["crm"].answer = Yes()
    # crm knows that both died there: it forgets that, and delivers under its own key
    done = await world.replay(old, to="crm")
    assert [(one.verdict, one.gone) for one in done] == [(Verdict.DELIVERED, True)] * 2
    assert sorted(world.sinks["crm"].taken) == [raw(event(1)), raw(event(2))]
    assert await world.letters() == []
    assert await world.arrive(event(1)) == [Verdict.DUPLICATE]


async def test_what_the_other_route_has_delivered_is_not_sent_again(tmp_path):
    world = World(tmp_path, ROUTES)
    world.sinks["crm"].answer = Never("no")
    await world.arrive(event(1))
    assert len(world.sinks["lake"].taken) == 1
    (done,) = await world.replay(await orphans(world), to="lake")
    assert (done.verdict, done.gone) == (Verdict.DUPLICATE, True)
    assert len(world.sinks["lake"].taken) == 1


async def test_what_dies_on_the_other_route_has_a_letter_there(tmp_path):
    world = World(tmp_path, ROUTES)
    world.sinks["lake"].answer = Never("no")
    await world.arrive(event(1), b"not json")
    await orphans(world)
    done = await world.replay(to="lake")
    assert {one.verdict for one in done} == {Verdict.DEAD}
    assert {letter.route for letter in await world.letters()} == {"lake"}
    await pauses.pause(world.store, ["lake"], SystemDice())
    assert {one.reason for one in await world.replay(to="lake")} == {"the route is paused"}


async def test_a_letter_that_no_route_was_for_takes_all_that_are_for_it_now(tmp_path):
    world = World(tmp_path, ROUTES)
    await world.arrive(event(1, source="elsewhere"))
    (letter,) = await world.letters()
    assert (letter.reason, letter.route) == ("unrouted", "")
    (done,) = await world.replay()
    assert (done.verdict, done.gone) == (Verdict.DEAD, True)
    assert len(await world.letters()) == 1
    wide = World(tmp_path, ROUTES.replace('["com.example.shop"]', '["elsewhere"]'))
    await wide.dead.put([letter])
    (done,) = await wide.replay()
    assert done.verdict is Verdict.DELIVERED
    assert len(wide.sinks["crm"].taken) == 1


class Killed(BaseException):
    """The process ends here."""


class Seams:
    """Count the calls to a store or to dead letters, and end at one of them."""

    def __init__(self) -> None:
        self.left: int | None = None

    def wrap(self, inner):
        seams = self

        class Wrapped:
            def __getattr__(self, name: str):
                found = getattr(inner, name)
                if name not in ("peek", "forget", "claim", "commit", "put", "drop", "deliver"):
                    return found

                async def called(*args, **kwargs):
                    seams.step()
                    result = await found(*args, **kwargs)
                    seams.step()
                    return result

                return called

        return Wrapped()

    def step(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed


@pytest.mark.parametrize("answer", [Yes(), Never("no")])
async def test_a_kill_at_any_point_of_a_replay_loses_nothing(tmp_path, answer):
    ended = False
    steps = 0
    while not ended:
        world = World(tmp_path)
        world.sink.answer = Never("no")
        await world.arrive(event(1))
        world.sink.answer = answer
        seams = Seams()
        whole = world.setup
        world.setup = _wrapped(whole, seams)
        seams.left = steps
        letters = await world.letters()
        try:
            await world.replay(letters)
            ended = True
        except Killed:
            pass
        seams.left = None
        world.setup = whole
        assert world.sink.taken or await world.letters(), f"lost after {steps} steps"
        world.clock.advance(3600 * 1000)  # whatever the dead process held is free
        await world.replay()
        if isinstance(answer, Yes):
            assert world.sink.taken
            assert await world.letters() == []
            assert len(world.sink.taken) <= 2
        else:
            assert await world.letters()
        steps += 1
    assert steps > 8


def _wrapped(setup: Setup, seams: Seams) -> Setup:
    config = setup.config
    return replace(
        setup,
        config=replace(
            config,
            store=replace(config.store, opened=seams.wrap(config.store.opened)),
            dead=replace(config.dead, opened=seams.wrap(config.dead.opened)),
        ),
        routes=tuple(
            replace(route, sink=replace(route.sink, opened=seams.wrap(route.sink.opened)))
            for route in setup.routes
        ),
    )


async def test_letters_are_selected_by_number_reason_and_route():
    dead = MemoryDeadLetters()
    blank = DeadLetter(b"", "rejected", "", "crm", "", b"", 0, False, 0)
    kinds = [("rejected", "crm"), ("attempts", "crm"), ("rejected", "lake")]
    await dead.put([replace(blank, reason=why, route=route) for why, route in kinds * 60])

    async def numbers(choice: DeadLetterFilter) -> list[int]:
        return [letter.number async for letter in select(dead, choice)]

    assert await numbers(DeadLetterFilter()) == list(range(1, 181))
    assert await numbers(DeadLetterFilter((5, 3, 5, 999))) == [3, 5]
    assert (await numbers(DeadLetterFilter(reason="attempts")))[:2] == [2, 5]
    assert len(await numbers(DeadLetterFilter(reason="rejected", route="lake"))) == 60
    assert await numbers(DeadLetterFilter(up_to=2)) == [1, 2]


# --- the command line ---------------------------------------------------------------------

SINK = """
import os
from oncebridge.errors import SinkRejected

def take(event):
    if os.path.exists("closed"):
        raise SinkRejected
    with open("taken", "a") as file:
        file.write(event.id + "\\n")
"""
CONFIG = """
store = "sqlite:seen.db"
dead = "sqlite:dead.db"
sink = "python:taker:take"
route = "crm"
audit = "audit.ndjson"
"""
C = ("-c", "pipe.toml")


@pytest.fixture
def three(call, write, tmp_path, monkeypatch):
    """Three dead letters: a line that is no event, and two orders that were refused."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "taker", raising=False)
    write("taker.py", SINK)
    write("pipe.toml", CONFIG)
    write("closed", "")
    write("events.ndjson", event("\x1b[2J secret", id="o-1"), event(2, id="o-2"), "not \x1b json")
    call("run", *C, "--source", "file:events.ndjson")


def test_letters_are_listed_without_what_they_hold(run, call, three):
    listed = run("dead", "list", *C)
    assert "secret" not in listed.out
    heading, *rows = listed.out.splitlines()
    assert heading.split() == ["number", "died", "reason", "route", "message"]
    assert len(rows) == 3
    told = call("dead", "list", "--json", *C).objects()
    assert sorted(one["reason"] for one in told) == ["not-json", "rejected", "rejected"]
    assert not any("raw" in one or "body" in one for one in told)
    assert len(call("dead", "list", "--json", "--reason", "rejected", *C).objects()) == 2
    limited = call("dead", "list", "--json", "--limit", "1", *C)
    assert len(limited.objects()) == 1
    assert "there are more" in limited.err
    assert "no dead letters" in call("dead", "list", "--route", "other", *C).err


def test_a_line_that_is_no_event_is_one_letter_with_a_count(run, call, three):
    for _ in range(2):
        call("run", *C, "--source", "file:events.ndjson")
    (told,) = call("dead", "list", "--json", "--reason", "not-json", *C).objects()
    assert told["copies"] == 2
    assert told["last_copy"] > told["died"]
    (row,) = [row for row in run("dead", "list", *C).out.splitlines() if "not-json" in row]
    assert "  2  " in row
    shown = call("dead", "show", str(told["number"]), "--json", *C).objects()[0]
    assert (shown["copies"], shown["last_copy"]) == (2, told["last_copy"])


def test_a_letter_shows_the_header_that_its_event_is_sent_with(call, write, three):
    write("pipe.toml", CONFIG + '\n[[rules]]\nname = "by id"\nkey = "id"\n')
    write("events.ndjson", event(3, id="o-3"))
    call("run", *C, "--source", "file:events.ndjson")
    number = number_of(call, "o-3")
    shown = call("dead", "show", number, "--json", *C).objects()[0]
    (explained,) = call("explain", "events.ndjson", "--json", *C).objects()
    assert shown["idempotency_key"] == explained["idempotency_key"] != shown["key"]
    assert shown["key"] == explained["keys"][0]["key"]


def number_of(call, what: str) -> str:
    """Find the letter whose event holds *what*."""
    for one in call("dead", "list", "--json", *C).objects():
        (shown,) = call("dead", "show", str(one["number"]), "--json", *C).objects()
        if what in shown["body"]:
            return str(shown["number"])
    raise LookupError(what)


def test_one_letter_is_shown_with_its_event(run, call, three):
    number = number_of(call, "o-1")
    assert (
        run("dead", "show", number, "--raw", *C).out
        == raw(event("\x1b[2J secret", id="o-1")).decode()
    )
    shown = call("dead", "show", number, *C).out
    assert "rejected" in shown
    assert "secret" in shown
    assert "\x1b" not in shown
    assert "\x1b" not in call("dead", "show", number_of(call, "not "), *C).out
    assert "there is no dead letter 99" in call("dead", "show", "99", *C, code=1).err


def test_bytes_that_are_no_text_are_shown_as_such(call, write, tmp_path):
    write("pipe.toml", 'dead = "sqlite:dead.db"\nsink = "-"')
    (tmp_path / "events.ndjson").write_bytes(b"\xff\xfe\n")
    call("run", *C, "--source", "file:events.ndjson")
    (shown,) = call("dead", "show", "1", "--json", *C).objects()
    assert shown["body_base64"] == "//4="
    assert "\\xff" in call("dead", "show", "1", *C).out


def test_letters_are_replayed_and_it_is_written_down_before(run, call, three, tmp_path):
    number = number_of(call, "o-2")
    again = call("dead", "replay", number, *C, code=1)
    assert "dead again: rejected" in again.out
    (tmp_path / "closed").unlink()
    told = run("dead", "replay", "--all", "--json", *C, code=1).objects()
    assert sorted(one["result"] for one in told) == ["dead again", "delivered", "delivered"]
    assert sorted((tmp_path / "taken").read_text().split()) == ["o-1", "o-2"]
    (left,) = call("dead", "list", "--json", *C).objects()
    assert left["reason"] == "not-json"
    lines = [json.loads(line) for line in (tmp_path / "audit.ndjson").read_text().splitlines()]
    assert [line["verb"] for line in lines] == ["dead replay", "dead replay"]
    assert lines[0]["numbers"] == [int(number)]
    assert len(lines[1]["numbers"]) == 3
    assert "secret" not in (tmp_path / "audit.ndjson").read_text()
    assert "there is no dead letter 77" in call("dead", "replay", "77", *C, code=1).err
    assert call("dead", "replay", "--all", "--reason", "other", *C).out == ""


def test_letters_of_an_old_name_are_replayed_under_the_new_one(run, call, write, three, tmp_path):
    (tmp_path / "closed").unlink()
    write("pipe.toml", CONFIG.replace('"crm"', '"default"'))
    kept = call("dead", "replay", "--all", "--reason", "rejected", *C, code=1)
    assert "there is no route 'crm' in this configuration" in kept.out
    assert "dead replay --to ROUTE" in kept.out
    wrong = run("dead", "replay", "--all", "--to", "nowhere", *C, code=2)
    assert "--to: 'nowhere' is not a route; routes: default" in wrong.err
    chosen = ("--all", "--route", "crm", "--reason", "rejected", "--to", "default")
    told = run("dead", "replay", *chosen, "--json", *C).objects()
    assert [one["result"] for one in told] == ["delivered", "delivered"]
    assert sorted((tmp_path / "taken").read_text().split()) == ["o-1", "o-2"]
    line = json.loads((tmp_path / "audit.ndjson").read_text().splitlines()[-1])
    assert (line["verb"], line["routes"]) == ("dead replay", ["default"])
    call("run", *C, "--source", "file:events.ndjson")
    assert len((tmp_path / "taken").read_text().split()) == 2, "remembered under the new name"


def test_what_is_no_event_keeps_a_letter_wherever_it_is_replayed(call, write, three):
    unreadable = ("dead", "list", "--json", "--reason", "not-json")
    call("dead", "replay", "--all", "--reason", "not-json", "--to", "crm", *C, code=1)
    (letter,) = call(*unreadable, *C).objects()
    write("pipe.toml", CONFIG.replace('"crm"', '"default"'))
    for _ in range(3):
        told = call("dead", "replay", str(letter["number"]), "--to", "default", *C, code=1)
        assert "dead again" in told.out
        (letter,) = call(*unreadable, *C).objects()
        assert letter["route"] == "default"


def test_events_on_standard_output_stay_alone_there(run, write, three, tmp_path):
    write("pipe.toml", CONFIG.replace("python:taker:take", "-"))
    ran = run("dead", "replay", "--all", "--reason", "rejected", "--json", *C)
    assert sorted(json.loads(line)["id"] for line in ran.out.splitlines()) == ["o-1", "o-2"]
    assert ran.err.count('"delivered"') >= 2


def test_letters_are_dropped_for_good_when_that_is_meant(call, three, tmp_path):
    assert "--yes" in call("dead", "drop", "--all", *C, code=2).err
    assert "by number, or use --all" in call("dead", "drop", "--yes", *C, code=2).err
    number = number_of(call, "o-1")
    dropped = call("dead", "drop", number, "99", "--yes", "--json", *C, code=1)
    assert dropped.objects() == [{"dropped": 1, "numbers": [int(number)]}]
    assert call("dead", "drop", "--all", "--reason", "rejected", "--yes", *C).out == "dropped 1\n"
    assert [one["reason"] for one in call("dead", "list", "--json", *C).objects()] == ["not-json"]
    lines = (tmp_path / "audit.ndjson").read_text().splitlines()
    assert [json.loads(line)["verb"] for line in lines] == ["dead drop"] * 2


def test_letters_in_a_plain_file_are_handled_the_same(call, write, three, tmp_path):
    write("pipe.toml", CONFIG.replace("sqlite:dead.db", "file:dead.ndjson").replace("seen", "new"))
    call("run", *C, "--source", "file:events.ndjson")
    assert len(call("dead", "list", "--json", *C).objects()) == 3
    (tmp_path / "closed").unlink()
    call("dead", "replay", "--all", "--reason", "rejected", *C)
    assert call("dead", "drop", "--all", "--yes", *C).out == "dropped 1\n"
    assert "no dead letters" in call("dead", "list", *C).err


def test_nothing_is_made_to_be_looked_at_and_memory_is_out_of_reach(call, tmp_path):
    for verb in (["list"], ["replay", "--all"], ["drop", "--all", "--yes"]):
        call("dead", *verb)
    call("dead", "show", "1", code=1)
    call("dead", "replay", "1", code=1)
    assert not list(tmp_path.iterdir())
    for verb in (["list"], ["show", "1"], ["replay", "1"], ["drop", "1", "--yes"]):
        assert "memory:" in call("dead", *verb, "--dead", "memory:", code=2).err
    assert "memory:" in call("dead", "replay", "1", "--store", "memory:", code=2).err


def test_many_letters_have_a_bar_on_a_terminal_and_are_all_replayed(tmp_path, write):
    blank = DeadLetter(b"", "rejected", "", "crm", "default", b"", 1, False, 0)
    letters = [replace(blank, raw=raw(event(n, id=f"m-{n}"))) for n in range(250)]

    async def bury() -> None:
        async with opened(SQLiteDeadLetters(tmp_path / "dead.db")) as dead:
            await dead.put(letters)

    asyncio.run(bury())
    write("pipe.toml", CONFIG.replace("python:taker:take", "file:out.ndjson"))
    screen, terminal = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-m", "oncebridge", "dead", "replay", "--all", *C],
        cwd=tmp_path,
        stdin=terminal,
        stdout=subprocess.DEVNULL,
        stderr=terminal,
        env=os.environ | {"COLUMNS": "80", "TERM": "xterm"},
    )
    os.close(terminal)
    shown = b""
    try:
        while chunk := os.read(screen, 65536):
            shown += chunk
    except OSError:  # the other end of a terminal is gone
        pass
    os.close(screen)
    assert done.wait(30) == 0
    assert re.search(rb"/250", shown)
    assert b"250 delivered" in shown
    assert (tmp_path / "out.ndjson").read_bytes().count(b"\n") == 250


def test_it_is_not_told_of_another_event_with_the_same_key(call, write, tmp_path, monkeypatch):
    """Neither replaying nor dropping a letter is an act on whoever has its key by now."""
    monkeypatch.syspath_prepend(str(tmp_path))
    write("refusing.py", "from oncebridge.errors import SinkRejected", "def take(event):")
    with (tmp_path / "refusing.py").open("a") as file:
        file.write("    if event.detail['order'] == 1:\n        raise SinkRejected\n")
    places = 'store = "sqlite:seen.db"\ndead = "sqlite:dead.db"\nsink = "python:refusing:take"\n'
    write("pipe.toml", places + '[[rules]]\nname = "by id"\nkey = "id"')
    flags = ("-c", "pipe.toml")
    write("one.json", event(1))
    write("two.json", event(2))
    call("run", *flags, "--source", "file:one.json")
    call("forget", "one.json", *flags)
    call("run", *flags, "--source", "file:two.json")

    def verbs(name: str) -> list[str]:
        (said,) = call("explain", name, "--json", *flags).objects()
        return [act["verb"] for act in said["trail"]]

    call("dead", "replay", "1", *flags, code=1)
    assert verbs("one.json") == ["forget", "dead replay"]
    (letter,) = call("dead", "list", "--json", *flags).objects()
    call("dead", "drop", str(letter["number"]), "--yes", *flags)
    assert verbs("one.json") == ["forget", "dead replay", "dead drop"]
    assert verbs("two.json") == []
