"""A forgotten event passes again; one that is held does not."""

import json

from tests.cli.worlds import event, raw, setup_of

from oncebridge.event import parse
from oncebridge.forget import forget
from oncebridge.identity import Identities
from oncebridge.store import Fate, Memory, Part, Want
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite import SQLiteStore

FLAGS = ("--store", "sqlite:seen.db", "--sink", "file:out.ndjson")


def ran(call, *flags: str) -> dict:
    return call("run", "--source", "file:events.ndjson", "--json", *FLAGS, *flags).objects()[-1]


def test_a_forgotten_event_passes_again(run, call, write, tmp_path):
    write("events.ndjson", event(1), event(1, id="a2"))
    assert ran(call)["delivered"] == 1
    assert ran(call)["duplicate"] == 2
    told = run("forget", "events.ndjson", *FLAGS, "--set", "audit=audit.ndjson")
    assert "forgotten; it was delivered" in told.out
    assert "oncebridge.audit" in told.err
    (line,) = (tmp_path / "audit.ndjson").read_text().splitlines()
    written = json.loads(line)
    assert written["verb"] == "forget"
    assert written["keys"][0] in told.out
    assert {"time", "user", "host"} <= written.keys()
    assert "order" not in line
    assert ran(call)["delivered"] == 1
    assert (tmp_path / "out.ndjson").read_text().count("\n") == 2
    assert "not known" in call("forget", "-", *FLAGS, code=1, given=raw(event(9))).out


def test_keys_are_forgotten_by_their_hex(call, write):
    write("events.ndjson", event(1))
    ran(call)
    (told,) = call("explain", "events.ndjson", "--json", *FLAGS).objects()
    key = told["keys"][0]["key"]
    (gone,) = call("forget", key, "--json", *FLAGS).objects()
    assert gone["result"] == "forgotten; it was delivered"
    assert gone["keys"] == [{"key": key, "was": "done", "fate": "delivered", "forgotten": True}]
    (gone,) = call("forget", key.upper(), "--json", *FLAGS, code=1).objects()
    assert gone["result"] == "not known"
    assert "No such file" in call("forget", key[:-1], *FLAGS, code=2).err


async def test_an_event_that_a_worker_holds_is_refused(run, write, tmp_path):
    write("events.ndjson", event(1))
    (told,) = run("explain", "events.ndjson", "--json", *FLAGS).objects()
    key = bytes.fromhex(told["keys"][0]["key"])
    async with SQLiteStore(tmp_path / "seen.db") as store:
        await store.claim([Want((Part(key),), b"t" * 16, b"g" * 16, 600_000, 600_000)])
        refused = run("forget", "events.ndjson", *FLAGS, "--set", "audit=audit.ndjson", code=1)
        assert "refused" in refused.out
        assert (await store.peek([key]))[0] is not None
    assert not (tmp_path / "audit.ndjson").exists()


def test_nothing_is_made_or_changed_where_nothing_can_be_forgotten(call, write, tmp_path):
    write("events.ndjson", event(1))
    assert "not there yet" in call("forget", "events.ndjson", *FLAGS, code=1).err
    assert [path.name for path in tmp_path.iterdir()] == ["events.ndjson"]
    assert "memory:" in call("forget", "events.ndjson", "--store", "memory:", code=2).err
    assert "'crm' is no route" in call("forget", "x", "--route", "crm", *FLAGS, code=2).err


def test_what_cannot_be_written_down_is_not_done(call, write, tmp_path):
    write("events.ndjson", event(1))
    ran(call)
    (tmp_path / "folder").mkdir()
    refused = call("forget", "events.ndjson", *FLAGS, "--set", "audit=folder", code=2)
    assert "nothing was done" in refused.err
    assert ran(call)["duplicate"] == 1


def test_what_is_no_event_is_said_and_the_rest_goes_on(call, write):
    write("events.ndjson", event(1))
    ran(call)
    write("some.ndjson", "not json", event(1))
    told = call("forget", "some.ndjson", *FLAGS, code=1)
    assert "not an event: not-json" in told.out
    assert "line 2: forgotten" in told.out


async def test_an_event_is_forgotten_with_all_its_keys(tmp_path):
    setup = setup_of(
        tmp_path,
        '[[rules]]\nname = "two"\ntiers = [{ key = "id", window = "5m" }, { key = "content" }]',
    )
    (identity,) = Identities(setup).of(parse(raw(event(1))))
    keys = identity.all_keys()
    assert len(keys) == 3  # id, content, and the id in conflict with another content
    store = MemoryStore()
    await store.remember([Memory(key, b"g" * 16, Fate.DELIVERED, 60_000) for key in keys])
    told: list[list[bytes]] = []
    done = await forget(store, keys, before=told.append)
    assert told == [keys]
    assert all(one.gone and one.was == "done" for one in done)
    assert await store.peek(keys) == [None] * 3


async def test_an_event_is_forgotten_as_a_whole_or_not_at_all():
    store = MemoryStore()
    keys = [b"one", b"two"]
    await store.remember([Memory(b"one", b"g" * 16, Fate.DELIVERED, 60_000)])
    await store.claim([Want((Part(b"two"),), b"t" * 16, b"g" * 16, 60_000, 60_000)])
    told: list[list[bytes]] = []
    done = await forget(store, keys, before=told.append)
    assert [(one.was, one.gone) for one in done] == [("done", False), ("claimed", False)]
    assert told == []
    assert None not in await store.peek(keys)
