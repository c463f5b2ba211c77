"""A forgotten event passes again; one that is held does not."""

import asyncio
import json

from tests.cli.worlds import event, raw, setup_of

from oncebridge.events.event import parse
from oncebridge.events.key import Part
from oncebridge.operate import operator_log
from oncebridge.operate.forget import forget
from oncebridge.operate.identity import Identities
from oncebridge.operate.operator_log import who
from oncebridge.stores.api import Fate, Memories, Memory, Want, Wants
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore

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
    assert "not found" in call("forget", "-", *FLAGS, code=1, given=raw(event(9))).out


def test_keys_are_forgotten_by_their_hex(call, write):
    write("events.ndjson", event(1))
    ran(call)
    (told,) = call("explain", "events.ndjson", "--json", *FLAGS).objects()
    key = told["keys"][0]["key"]
    (gone,) = call("forget", key, "--json", *FLAGS).objects()
    assert gone["result"] == "forgotten; it was delivered"
    assert gone["keys"] == [{"key": key, "was": "done", "fate": "delivered", "forgotten": True}]
    (gone,) = call("forget", key.upper(), "--json", *FLAGS, code=1).objects()
    assert gone["result"] == "not found"
    assert "66 hex digits, this text has 65" in call("forget", key[:-1], *FLAGS, code=1).out
    assert "No such file" in call("forget", "nowhere.json", *FLAGS, code=2).err


async def test_an_event_that_a_worker_holds_is_refused(run, write, tmp_path):
    write("events.ndjson", event(1))
    (told,) = run("explain", "events.ndjson", "--json", *FLAGS).objects()
    key = bytes.fromhex(told["keys"][0]["key"])
    async with SQLiteStore(tmp_path / "seen.db") as store:
        await store.claim(Wants.of([Want((Part(key),), b"t" * 16, b"g" * 16, 600_000, 600_000)]))
        refused = run("forget", "events.ndjson", *FLAGS, "--set", "audit=audit.ndjson", code=1)
        assert "refused" in refused.out
        assert (await store.peek([key]))[0] is not None
    assert not (tmp_path / "audit.ndjson").exists()


def test_nothing_is_made_or_changed_where_nothing_can_be_forgotten(call, write, tmp_path):
    write("events.ndjson", event(1))
    assert "does not exist yet" in call("forget", "events.ndjson", *FLAGS, code=1).err
    assert [path.name for path in tmp_path.iterdir()] == ["events.ndjson"]
    assert "memory:" in call("forget", "events.ndjson", "--store", "memory:", code=2).err
    assert (
        "'crm' is not a route; routes: default"
        in call("forget", "x", "--route", "crm", *FLAGS, code=2).err
    )


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
    await store.remember(
        Memories.of([Memory(key, b"g" * 16, Fate.DELIVERED, 60_000) for key in keys])
    )
    told: list[list[bytes]] = []

    async def before(keys: list[bytes]) -> None:
        told.append(list(keys))

    done = await forget(store, dict.fromkeys(keys, b""), before=before)
    assert told == [keys]
    assert all(one.gone and one.was == "done" for one in done)
    assert await store.peek(keys) == [None] * 3


async def test_an_event_is_forgotten_as_a_whole_or_not_at_all():
    store = MemoryStore()
    keys = [b"one", b"two"]
    await store.remember(Memories.of([Memory(b"one", b"g" * 16, Fate.DELIVERED, 60_000)]))
    await store.claim(Wants.of([Want((Part(b"two"),), b"t" * 16, b"g" * 16, 60_000, 60_000)]))
    told: list[list[bytes]] = []

    async def before(keys: list[bytes]) -> None:
        told.append(list(keys))

    done = await forget(store, dict.fromkeys(keys, b""), before=before)
    assert [(one.was, one.gone) for one in done] == [("done", False), ("claimed", False)]
    assert told == []
    assert None not in await store.peek(keys)


def test_a_forgotten_event_keeps_who_forgot_it_and_why(call, write, tmp_path):
    write("events.ndjson", event(1))
    ran(call)
    call("forget", "events.ndjson", *FLAGS, "--reason", "the CRM lost it")
    (said,) = call("explain", "events.ndjson", "--json", *FLAGS).objects()
    assert said["verdict"] == "delivered"
    (act,) = said["trail"]
    assert (act["verb"], act["reason"], act["who"]) == ("forget", "the CRM lost it", who())
    key = said["keys"][0]["key"]
    (by_key,) = call("explain", key, "--json", *FLAGS).objects()
    assert by_key["trail"] == said["trail"]
    ran(call)
    (said,) = call("explain", "events.ndjson", "--json", *FLAGS).objects()
    assert (said["verdict"], len(said["trail"])) == ("duplicate", 1)


def test_an_event_is_forgotten_by_the_id_of_its_first_copy(call, write):
    write("events.ndjson", event(1), event(1, id="a2"), event(2, id="b1"))
    ran(call)
    assert "id a1: forgotten; it was delivered" in call("forget", "a1", *FLAGS).out
    (told,) = call("forget", "a2", "--json", *FLAGS, code=1).objects()
    assert told["result"].startswith("not found; the store keeps only the id of the first copy")
    found = call("forget", "b1", "--in", "events.ndjson", *FLAGS).out
    assert "events.ndjson, line 3: forgotten; it was delivered" in found
    assert ran(call)["delivered"] == 2


def test_wrapped_events_are_forgotten_too(call, write):
    write("events.ndjson", event(1))
    ran(call)
    body = {"MessageId": "m", "ReceiptHandle": "r", "Body": json.dumps(event(1))}
    write("queue.json", {"Messages": [body]})
    assert "line 1: forgotten; it was delivered" in call("forget", "queue.json", *FLAGS).out


def test_what_cannot_be_written_down_in_the_store_is_not_done(call, write, tmp_path, monkeypatch):
    write("events.ndjson", event(1))
    ran(call)
    (told,) = call("explain", "events.ndjson", "--json", *FLAGS).objects()
    name = operator_log.event_log_key(bytes.fromhex(told["keys"][0]["key"]))

    async def hold() -> None:
        async with SQLiteStore(tmp_path / "seen.db") as store:
            await store.claim(
                Wants.of([Want((Part(name),), b"t" * 16, b"g" * 16, 600_000, 600_000)])
            )

    asyncio.run(hold())
    monkeypatch.setattr(operator_log, "_PATIENCE_S", 0.1)
    refused = call("forget", "events.ndjson", *FLAGS, code=3)
    assert "cannot be written, so nothing was done" in refused.err
    assert ran(call)["duplicate"] == 1


# --- what belongs to others ------------------------------------------------------------------

BY_ID = """
store = "sqlite:seen.db"
dead = "sqlite:dead.db"
sink = "file:out.ndjson"
route = "crm"
[[rules]]
name = "by id"
key = "id"
"""
C = ("-c", "pipe.toml")


def counted(call, name: str) -> dict:
    return call("run", *C, "--source", f"file:{name}", "--json").objects()[-1]


def test_another_event_with_the_same_key_is_not_forgotten(call, write):
    """The same id with other content is an event of its own, and so is what is known of it."""
    write("pipe.toml", BY_ID)
    write("a.json", event(1))
    write("b.json", event(2))
    write("c.json", event(3))
    counted(call, "a.json")
    unknown = call("forget", "b.json", *C, code=1).out
    assert (
        "not found; another event has the same key with different content, and is kept" in unknown
    )
    assert "(of another event)" in unknown
    assert counted(call, "b.json")["conflict"] == 1
    (told,) = call("forget", "b.json", "--json", *C).objects()
    assert [key["forgotten"] for key in told["keys"]] == [False, True]
    assert told["keys"][0]["of_another"]
    assert counted(call, "a.json")["duplicate"] == 1
    assert counted(call, "b.json")["conflict"] == 1
    trails = {
        name: [act["verb"] for act in call("explain", name, "--json", *C).objects()[0]["trail"]]
        for name in ("a.json", "b.json", "c.json")
    }
    assert trails == {"a.json": [], "b.json": ["forget"], "c.json": []}


ROUTES = """
store = "sqlite:seen.db"
dead = "sqlite:dead.db"
[[routes]]
name = "crm"
sink = "file:crm.ndjson"
[[routes]]
name = "bill"
sink = "file:bill.ndjson"
"""


def test_a_route_is_chosen_with_the_event_only(call, write, tmp_path):
    """A record does not tell its route, so neither a key nor an id found there does."""
    write("pipe.toml", ROUTES)
    write("events.ndjson", event(1))
    counted(call, "events.ndjson")
    crm, bill = [o["keys"][0]["key"] for o in call("explain", "a1", "--json", *C).objects()]
    for name in ("a1", crm):
        refused = call("forget", name, "--route", "crm", *C, code=1).out
        assert (
            "does not keep the route; with --route, name a file with the event, or use --in"
            in refused
        )
    assert counted(call, "events.ndjson")["duplicate"] == 2
    chosen = ("--in", "events.ndjson", "--route", "crm", "--json")
    told = call("forget", "a1", *chosen, *C).objects()
    assert [(one["route"], one["keys"][0]["forgotten"]) for one in told] == [("crm", True)]
    counted(call, "events.ndjson")
    assert (tmp_path / "crm.ndjson").read_text().count("\n") == 2
    assert (tmp_path / "bill.ndjson").read_text().count("\n") == 1
    by_key = {
        key: call("forget", key, *chosen, *C, code=code).objects()[0]
        for key, code in ((told[0]["keys"][0]["key"], 0), (other(told, crm, bill), 1))
    }
    assert [one["result"] for one in by_key.values()] == [
        "forgotten; it was delivered",
        "this is not its key on route crm",
    ]


def other(told: list[dict], *keys: str) -> str:
    return next(key for key in keys if key != told[0]["keys"][0]["key"])


def test_what_was_done_by_hand_is_not_forgotten(call, write):
    write("events.ndjson", event(1))
    ran(call)
    (told,) = call("explain", "events.ndjson", "--json", *FLAGS).objects()
    key = told["keys"][0]["key"]
    forgotten = call("forget", key, *FLAGS)
    assert "only this key was checked: a rule with tiers may know the event" in forgotten.err
    name = operator_log.event_log_key(bytes.fromhex(key)).hex()
    (said,) = call("explain", name, "--json", *FLAGS).objects()
    assert said["verdict"] is None
    assert [act["verb"] for act in said["trail"]] == ["forget"]
    assert "This is the operator log of an event or a route" in said["summary"]
    assert "the operator log of an event or a route" in call("forget", name, *FLAGS, code=1).out
    (said,) = call("explain", key, "--json", *FLAGS).objects()
    assert [act["verb"] for act in said["trail"]] == ["forget"]


def test_an_id_may_look_like_anything(call, write):
    hexadecimal = "01" + "a" * 40
    ids = ["orders/7", "7.json", hexadecimal, "01" + "b" * 64, "x" * 200]
    write("events.ndjson", *[event(n, id=one) for n, one in enumerate(ids)])
    ran(call)
    assert "if it is an id, write id:orders/7" in call("forget", "orders/7", *FLAGS, code=2).err
    for one in ids:
        name = one if one in (hexadecimal, ids[-1]) else f"id:{one}"
        assert f"id {one}: forgotten" in call("forget", name, *FLAGS).out
    assert ran(call)["delivered"] == len(ids)
