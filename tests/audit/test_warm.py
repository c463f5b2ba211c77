"""A store that was warmed knows what the service would know, and the service sends nothing."""

import asyncio
import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pytest
from tests.servers.aws import DynamoDBServer
from tests.servers.postgres import Postgres, schema
from tests.servers.redis import RedisServer, prefix

from oncebridge.audit.reading import find_files
from oncebridge.audit.warm import BATCH, StoreWarmer
from oncebridge.audit.workers import AuditFailed
from oncebridge.engine.memos import EntityState, Memo
from oncebridge.errors import StoreUnavailable
from oncebridge.events.framing import as_line
from oncebridge.genesys.simulator import simulate
from oncebridge.service.addresses import Migrates
from oncebridge.service.config import Setup, load
from oncebridge.service.service import Service
from oncebridge.stores.api import ClaimAnswers, NoAnswer
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore

RULES = """
preset = "genesys"
route = "crm"

[[rules]]
name = "orders"
match.source = ["com.example.shop"]
key = ["detail.order"]
check = true
latest = { entity = "detail.order", version = "detail.version" }

[[rules]]
name = "by hand"
match.source = ["com.example.hand"]
key = "none"

[[rules]]
name = "strict"
match.source = ["com.example.strict"]
key = ["detail.id"]
on_missing = "dead"
"""


def order(number: int, version: int, event_id: str = "a", **more) -> bytes:
    detail = {"order": number, "version": version, **more}
    event = {"id": event_id, "source": "com.example.shop", "detail-type": "Order", "detail": detail}
    return json.dumps(event).encode()


def other(source: str, **detail) -> bytes:
    return json.dumps({"source": source, "detail-type": "T", "detail": detail}).encode()


@pytest.fixture
def world(tmp_path: Path):
    """Make a configuration for a store, with a file to read and a file to write."""
    events = tmp_path / "events.ndjson"
    lines = [as_line(one.raw) for one in simulate(3, 400)]
    lines += [
        line + b"\n" for line in (order(1, 1), order(1, 1, "b"), order(2, 5), order(2, 5, x=1))
    ]
    events.write_bytes(b"".join(lines))
    return World(tmp_path, events)


class World:
    def __init__(self, folder: Path, events: Path) -> None:
        self.folder = folder
        self.events = events
        self.sent = folder / "sent.ndjson"

    def setup(self, store: str = "", rules: str = RULES) -> Setup:
        file = self.folder / "pipe.toml"
        places = f"""
            source = "file:{self.events}"
            sink = "file:{self.sent}"
            dead = "sqlite:{self.folder}/dead.db"
        """
        store = store or f'store = "sqlite:{self.folder}/seen.db"'
        file.write_text(f"{places}\n{store}\n{rules}")
        return load(file, environment={})

    async def warm(self, setup: Setup, **counts: int) -> StoreWarmer:
        files = find_files([self.events])
        warming = StoreWarmer(setup, setup.config.store, setup.routes, files)
        await warming.run()
        for name, count in counts.items():
            assert warming.counts()[name] == count, warming.counts()
        return warming

    async def serve(self, setup: Setup) -> dict[str, int]:
        service = Service(setup)
        await service.open()
        await service.run()
        assert await service.close()
        return service.counts()

    def lines_sent(self) -> int:
        return self.sent.read_bytes().count(b"\n") if self.sent.exists() else 0


async def test_the_service_sends_nothing_of_what_was_warmed(world):
    warming = await world.warm(world.setup(), unreadable=0)
    counts = await world.serve(world.setup())
    assert counts["arrived"] == warming.events == 404
    assert counts["duplicate"] == 404
    assert world.lines_sent() == 0


async def test_warming_again_finds_all_of_it_known(world):
    first = await world.warm(world.setup())
    again = await world.warm(world.setup(), new=0, known=404)
    assert first.counts()["new"] + first.counts()["known"] == again.events
    assert first.counts()["new"] > 200


async def test_the_store_holds_what_the_service_would_have_left(world):
    await world.warm(world.setup(f'store = "sqlite:{world.folder}/warmed.db"'))
    await world.serve(world.setup(f'store = "sqlite:{world.folder}/served.db"'))
    warmed = await known(world.folder / "warmed.db")
    served = await known(world.folder / "served.db")
    assert warmed == {key: told for key, told in served.items() if key in warmed}
    # The service also remembers how far it came in the file, what it counted, the store's epoch
    # and the name of its sink.
    assert len(served) - len(warmed) <= 5


async def known(path: Path) -> dict[bytes, tuple]:
    """Read a store: fate and content of each key, who came first, and the newest states."""
    async with SQLiteStore(path) as store:
        records, rest = await store.scan(b"", 5000)
    assert not rest
    found = {}
    for one in records:
        if one.fate is not None:
            found[one.key] = (one.fate, one.hash, Memo.read(one.memo).id)
        else:
            register = EntityState.read(one.memo)
            found[one.key] = (register.kind, register.version, register.state)
    return found


async def test_what_is_no_event_is_counted_and_not_buried(world):
    with world.events.open("ab") as file:
        file.write(b'{"cut off\n[1]\n\n{"ping":true}\n')
    await world.warm(world.setup(), unreadable=3)
    assert not (world.folder / "dead.db").exists()


async def test_what_the_rules_do_not_remember_is_counted(world):
    world.events.write_bytes(
        b"\n".join([other("com.example.hand", n=1), other("com.example.strict")])
    )
    await world.warm(world.setup(), new=0, **{"not remembered": 2})
    assert not (world.folder / "dead.db").exists()


async def test_a_conflict_is_an_event_of_its_own(world):
    world.events.write_bytes(b"\n".join([order(1, 1), order(1, 1, x=2), order(1, 1, "c", x=2)]))
    await world.warm(world.setup(), new=2, known=1)
    assert (await world.serve(world.setup()))["duplicate"] == 3


TWO = """
preset = "genesys"

[[routes]]
name = "crm"
sink = "file:crm.ndjson"
[routes.match]
source = ["com.example.shop"]

[[routes]]
name = "lake"
sink = "file:lake.ndjson"
"""


async def test_every_route_has_its_own_keys(world, monkeypatch):
    monkeypatch.chdir(world.folder)
    world.events.write_bytes(order(1, 1))

    def setup() -> Setup:
        file = world.folder / "two.toml"
        file.write_text(
            f'source = "file:{world.events}"\nstore = "sqlite:two.db"\ndead = "memory:"\n{TWO}'
        )
        return load(file, environment={})

    one = setup()
    crm = StoreWarmer(one, one.config.store, one.routes[:1], find_files([world.events]))
    await crm.run()
    counts = await world.serve(setup())
    assert (counts["delivered"], counts["duplicate"]) == (1, 1)
    assert (
        not (world.folder / "crm.ndjson").exists() or not (world.folder / "crm.ndjson").read_bytes()
    )
    assert (world.folder / "lake.ndjson").read_bytes()


async def test_settings_that_are_about_a_sink_do_not_slow_it_or_leave_gaps(world):
    setup = world.setup(
        rules='rate = "1/s"\nmode = "shadow"\non_store_outage = "deliver"\n' + RULES
    )
    await asyncio.wait_for(world.warm(setup), 20)
    assert (await world.serve(world.setup()))["duplicate"] == 404


async def test_packed_files_arrays_and_wrapped_events_are_read(world, tmp_path):
    messages = [
        {"MessageId": str(n), "ReceiptHandle": "r", "Body": order(n, 1).decode()} for n in range(5)
    ]
    folder = tmp_path / "recordings"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps({"Messages": messages}))
    (folder / "b.ndjson.gz").write_bytes(
        gzip.compress(b"\n".join(order(n, 1) for n in range(5, 9)))
    )
    (folder / "c.json").write_text(json.dumps([json.loads(order(9, 1))]))
    world.events = folder
    await world.warm(world.setup(), new=10, unreadable=0)


async def test_a_damaged_file_is_counted_and_the_rest_is_taken(world):
    packed = gzip.compress(b"\n".join(order(n, 1, pad="x" * 500) for n in range(2000)))
    world.events.write_bytes(packed[: len(packed) // 2])
    warming = await world.warm(world.setup())
    assert warming.unreadable >= 1
    assert warming.counts()["new"] > 100


async def test_more_than_a_batch_is_told_as_it_goes(world):
    world.events.write_bytes(b"\n".join(order(n, 1) for n in range(BATCH + 10)))
    setup = world.setup()
    told = []
    warming = StoreWarmer(setup, setup.config.store, setup.routes, find_files([world.events]))
    await warming.run(lambda done, total: told.append((done, total)))
    assert warming.events == BATCH + 10
    assert told[-1] == (world.events.stat().st_size, world.events.stat().st_size)


class Silent(MemoryStore):
    """A store that stops answering."""

    async def claim(self, wants):
        return ClaimAnswers(wants, [NoAnswer("it is away")] * len(wants), 0)


async def test_a_store_that_is_away_ends_it_with_a_word(world, monkeypatch):
    monkeypatch.setattr("oncebridge.audit.warm._PAUSES_S", (0.01, 0.01))
    setup = world.setup()
    place = setup.config.store.__class__(setup.config.store.url, Silent())
    warming = StoreWarmer(setup, place, setup.routes, find_files([world.events]))
    with pytest.raises(StoreUnavailable, match="run --warm again"):
        await warming.run()
    assert warming.left == 404


@pytest.mark.parametrize("kind", ["redis", "postgres", "dynamodb"])
async def test_it_is_the_same_on_servers(
    world, kind, redis_server: RedisServer, postgres: Postgres, ministack: DynamoDBServer
):
    tables = {
        "redis": {"url": redis_server.url, "prefix": prefix()},
        "postgres": {"url": postgres.url, "schema": schema()},
        "dynamodb": {"url": "dynamodb://warmed", "endpoint": ministack.endpoint},
    }
    inline = ", ".join(f'{name} = "{text}"' for name, text in tables[kind].items())
    store = f"store = {{ {inline} }}"
    made = world.setup(store).config.store.opened
    if isinstance(made, Migrates):
        await made.migrate()
        await made.aclose()
    warming = await world.warm(world.setup(store), unreadable=0)
    assert warming.counts()["new"] > 200
    assert (await world.serve(world.setup(store)))["duplicate"] == 404
    assert world.lines_sent() == 0


async def test_a_mark_at_the_beginning_of_a_file_is_no_part_of_the_first_event(world):
    world.events.write_bytes(b"\xef\xbb\xbf" + order(1, 1) + b"\n" + order(2, 1) + b"\n")
    await world.warm(world.setup(), new=2, unreadable=0)


async def test_a_line_without_end_is_counted_and_not_held(world):
    with world.events.open("wb") as file:
        file.write(order(1, 1) + b"\n")
        for _ in range(40):
            file.write(b"x" * (1 << 20))
        file.write(b"\n" + order(2, 1) + b"\n")
    tracemalloc.start()
    try:
        await world.warm(world.setup(), new=2, unreadable=1)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 30 << 20


async def test_a_file_that_shrinks_is_told(world, monkeypatch):
    monkeypatch.setattr(os, "pread", lambda *_: b"")
    with pytest.raises(AuditFailed, match="became shorter while it was read"):
        await world.warm(world.setup())
