"""A hold that a dead worker left is let go of; nothing else is touched."""

import asyncio
import json
import os
import pty
import subprocess
import sys

import pytest
from tests.cli.worlds import event, raw, setup_of

from oncebridge.engine.gateway import Gateway
from oncebridge.engine.memos import Memo
from oncebridge.engine.verdict import Verdict
from oncebridge.events.event import parse
from oncebridge.events.key import Part
from oncebridge.operate import operator_log
from oncebridge.operate.identity import Identities
from oncebridge.operate.release import read_statuses, release
from oncebridge.stores.api import (
    Commit,
    Commits,
    Extension,
    Extensions,
    Fate,
    Memories,
    Memory,
    Release,
    Releases,
    Reply,
    Want,
    Wants,
)
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore
from oncebridge.testing.clock import ManualClock

CONFIG = """
store = "sqlite:seen.db"
dead = "sqlite:dead.db"
sink = "file:out.ndjson"
route = "crm"
audit = "audit.ndjson"
[[rules]]
name = "calls"
match = { source = ["com.example.calls"] }
latest = { entity = "detail.order", version = "detail.order" }
"""
C = ("-c", "pipe.toml")
TOKEN, GENERATION = b"t" * 16, b"g" * 16
HOUR = 3_600_000


@pytest.fixture
def config(write, tmp_path):
    write("pipe.toml", CONFIG)
    write("events.ndjson", event(1))
    return setup_of(tmp_path, CONFIG)


def keys_of(setup, one: dict) -> tuple[list[bytes], bytes]:
    (way,) = Identities(setup).of(parse(raw(one)))
    return [known.key for known in way.keys], way.plan.entity


def in_store(tmp_path, work):
    async def run():
        async with SQLiteStore(tmp_path / "seen.db") as store:
            return await work(store)

    return asyncio.run(run())


def hold(tmp_path, *keys: bytes, token: bytes = TOKEN) -> None:
    wants = [Want((Part(key),), token, GENERATION, HOUR, HOUR) for key in keys]
    in_store(tmp_path, lambda store: store.claim(Wants.of(wants)))


def test_a_held_event_is_released_and_passes_at_once(call, config, tmp_path):
    ((key,), _) = keys_of(config, event(1))
    hold(tmp_path, key)
    told = call("release", "events.ndjson", "--yes", "--reason", "host is gone", *C)
    assert "line 1: released; the next copy is accepted at once" in told.out
    assert key.hex() in told.out
    counts = call("run", *C, "--source", "file:events.ndjson", "--json").objects()[-1]
    assert counts["delivered"] == 1
    (line,) = [json.loads(text) for text in (tmp_path / "audit.ndjson").read_text().splitlines()]
    assert (line["verb"], line["routes"], line["reason"]) == ("release", ["crm"], "host is gone")
    (said,) = call("explain", "events.ndjson", "--json", *C).objects()
    assert [(act["verb"], act["reason"]) for act in said["trail"]] == [("release", "host is gone")]


def test_a_key_is_enough(call, config, tmp_path):
    ((key,), _) = keys_of(config, event(1))
    hold(tmp_path, key)
    (told,) = call("release", key.hex(), "--yes", "--json", *C).objects()
    assert told["keys"] == [
        {"key": key.hex(), "was": "claimed", "held": True, "released": True, "entity": False}
    ]
    (told,) = call("release", key.hex(), "--yes", "--json", *C, code=1).objects()
    assert told["result"] == "not held: no worker holds it, and the next copy is accepted at once"


def test_the_entity_of_an_event_is_released_with_it(call, config, write, tmp_path):
    one = event(5, source="com.example.calls")
    write("call.json", one)
    keys, entity = keys_of(config, one)
    assert entity
    hold(tmp_path, entity)
    told = call("release", "call.json", "--yes", *C)
    assert f"{entity.hex()} (the entity)" in told.out
    (register,) = in_store(tmp_path, lambda store: store.peek([entity]))
    assert (register.token, register.attempts) == (b"", 0)
    (said,) = call("explain", "call.json", "--json", *C).objects()
    assert [act["verb"] for act in said["entity_trail"]] == ["release"]
    assert said["trail"] == []
    assert "release of its entity on crm, by " in call("explain", "call.json", *C).out
    assert keys


def test_what_nobody_holds_is_refused_with_what_to_do_instead(call, config, write, tmp_path):
    assert "does not exist yet" in call("release", "events.ndjson", "--yes", *C, code=1).err
    assert not (tmp_path / "seen.db").exists()
    ((key,), _) = keys_of(config, event(1))
    hold(tmp_path, b"somebody else's")
    assert "not found" in call("release", "events.ndjson", "--yes", *C, code=1).out
    hold(tmp_path, key)
    wait = [Release(key, TOKEN, HOUR, HOUR)]
    in_store(tmp_path, lambda store: store.release(Releases.of(wait)))
    waits = call("release", "events.ndjson", "--yes", *C, code=1).out
    assert "waits for its next attempt until 20" in waits
    in_store(
        tmp_path, lambda store: store.commit(Commits.of([Commit(key, GENERATION, Fate.DEAD, HOUR)]))
    )
    done = call("release", "events.ndjson", "--yes", *C, code=1).out
    assert "it went to the dead letters; use `oncebridge forget` or `oncebridge resend`" in done
    write("other.ndjson", "not json")
    assert "not an event: not-json" in call("release", "other.ndjson", "--yes", *C, code=1).out
    assert not (tmp_path / "audit.ndjson").exists()


def test_it_asks_on_a_terminal_and_is_refused_where_nobody_can_be_asked(call, config, tmp_path):
    ((key,), _) = keys_of(config, event(1))
    hold(tmp_path, key)
    assert "--yes" in call("release", "events.ndjson", *C, code=2).err
    for answer, code in (("n", 1), ("y", 0)):
        screen, terminal = pty.openpty()
        done = subprocess.Popen(
            [sys.executable, "-m", "oncebridge", "release", "events.ndjson", *C],
            cwd=tmp_path,
            stdin=terminal,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"COLUMNS": "80", "TERM": "xterm"},
        )
        os.write(screen, answer.encode() + b"\n")
        _, shown = done.communicate(timeout=30)
        os.close(screen)
        os.close(terminal)
        assert done.returncode == code, shown
        assert b"may be sent twice" in shown
        assert b"Release events.ndjson, line 1, held for 3" in shown
        (record,) = in_store(tmp_path, lambda store: store.peek([key]))
        assert bool(record.token) == (answer == "n")


def test_what_another_process_cannot_see_is_refused(call):
    assert "memory:" in call("release", "x", "--yes", "--store", "memory:", code=2).err


# --- what happens to a worker that lives after all ------------------------------------------


async def nothing(keys: list[bytes]) -> None:
    pass


async def test_what_changed_since_it_was_seen_is_left_alone():
    store = MemoryStore()
    keys = [b"one", b"two"]
    await store.claim(Wants.of([Want((Part(key),), TOKEN, GENERATION, HOUR, HOUR) for key in keys]))
    seen = await read_statuses(store, dict.fromkeys(keys, b""))
    await store.commit(Commits.of([Commit(b"one", GENERATION, Fate.DELIVERED, HOUR)]))
    one, two = await release(store, seen, before=nothing)
    assert (one.gone, one.has_changed) == (False, True)
    assert (two.gone, two.has_changed) == (True, False)
    (record, _) = await store.peek(keys)
    assert record.fate is Fate.DELIVERED


async def test_a_living_worker_loses_its_hold_and_its_delivery_still_counts(tmp_path):
    setup = setup_of(tmp_path)
    (route,) = setup.routes
    store = MemoryStore(clock=ManualClock())
    is_sending, may_end = asyncio.Event(), asyncio.Event()
    sent = []

    async def take(one) -> None:
        sent.append(one.raw)
        is_sending.set()
        await may_end.wait()

    async def other(one) -> None:
        sent.append(one.raw)

    async with (
        Gateway(store=store, sink=take, route=route.name) as slow,
        Gateway(store=store, sink=other, route=route.name) as quick,
    ):
        working = asyncio.create_task(slow.process([raw(event(1))]))
        await is_sending.wait()
        (outcome,) = await quick.process([raw(event(1))])
        assert outcome.verdict is Verdict.BUSY
        keys, _ = keys_of(setup, event(1))
        (gone,) = await release(
            store, await read_statuses(store, dict.fromkeys(keys, b"")), before=nothing
        )
        assert gone.gone
        assert await store.extend(Extensions.of([Extension(keys[0], b"x" * 16, 1)])) == [
            Reply.FENCED
        ]
        (outcome,) = await quick.process([raw(event(1))])
        assert outcome.verdict is Verdict.DELIVERED  # the second time, as the warning says
        may_end.set()
        (outcome,) = await working
        assert outcome.acknowledge
        (outcome,) = await quick.process([raw(event(1))])
        assert outcome.verdict is Verdict.DUPLICATE
    assert len(sent) == 2


async def test_an_attempt_that_left_no_word_is_counted_after_a_release(tmp_path):
    """The one who takes it next knows that it may have arrived."""
    store = MemoryStore(clock=ManualClock())
    await store.claim(Wants.of([Want((Part(b"k"),), TOKEN, GENERATION, HOUR, HOUR, b'["a1",7]')]))
    await release(store, await read_statuses(store, dict.fromkeys([b"k"], b"")), before=nothing)
    (claim,) = await store.claim(Wants.of([Want((Part(b"k"),), b"n" * 16, b"m" * 16, HOUR, HOUR)]))
    (held,) = claim.held
    assert (held.attempts, held.generation, held.memo) == (2, GENERATION, b'["a1",7]')


async def test_nothing_is_written_down_where_there_is_nothing_to_release():
    store = MemoryStore()
    await store.remember(Memories.of([Memory(b"k", GENERATION, Fate.DELIVERED, HOUR)]))

    async def never(keys: list[bytes]) -> None:
        raise AssertionError(keys)

    (one,) = await release(
        store, await read_statuses(store, dict.fromkeys([b"k"], b"")), before=never
    )
    assert not one.gone
    assert await operator_log.read(store, [operator_log.event_log_key(b"k")]) == {}


# --- what belongs to others ------------------------------------------------------------------


def test_what_a_worker_holds_of_another_event_is_let_be(call, config, write, tmp_path):
    """The same id with other content is an event of its own."""
    write("pipe.toml", CONFIG + '[[rules]]\nname = "by id"\nkey = "id"')
    write("other.json", event(2))
    rules = setup_of(tmp_path, CONFIG + '[[rules]]\nname = "by id"\nkey = "id"')
    (way,) = Identities(rules).of(parse(raw(event(1))))
    want = Want((way.keys[0].part,), TOKEN, GENERATION, HOUR, HOUR)
    in_store(tmp_path, lambda store: store.claim(Wants.of([want])))
    told = call("release", "other.json", "--yes", *C, code=1).out
    assert "the claim is of another event, with the same key and different content" in told
    (said,) = call("explain", "other.json", "--json", *C).objects()
    assert "holds another event with the same key" in said["summary"]
    assert said["keys"][0]["of_another"]
    (record,) = in_store(tmp_path, lambda store: store.peek([way.keys[0].key]))
    assert record.token == TOKEN
    call("release", "events.ndjson", "--yes", *C)
    (said,) = call("explain", "other.json", "--json", *C).objects()
    assert (said["verdict"], said["trail"]) == ("delivered", [])
    assert "The store has no record of this event" in said["summary"]


def test_a_route_is_chosen_with_the_event_only(call, write, tmp_path):
    text = """
store = "sqlite:seen.db"
dead = "sqlite:dead.db"
[[routes]]
name = "crm"
sink = "file:crm.ndjson"
[[routes]]
name = "bill"
sink = "file:bill.ndjson"
"""
    write("pipe.toml", text)
    write("events.ndjson", event(1))
    crm, bill = (
        w.keys[0].key for w in Identities(setup_of(tmp_path, text)).of(parse(raw(event(1))))
    )
    memo = Memo("a1", 7).write()
    wants = [Want((Part(key),), TOKEN, GENERATION, HOUR, HOUR, memo) for key in (crm, bill)]
    in_store(tmp_path, lambda store: store.claim(Wants.of(wants)))
    for name in ("a1", crm.hex()):
        told = call("release", name, "--route", "crm", "--yes", *C, code=1).out
        assert "does not keep the route; with --route, name a file with the event" in told
    call("release", "a1", "--route", "crm", "--in", "events.ndjson", "--yes", *C)
    one, two = in_store(tmp_path, lambda store: store.peek([crm, bill]))
    assert (one.token, two.token) == (b"", TOKEN)
