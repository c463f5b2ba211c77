"""The Postgres sink on a real server: alone, and in one transaction with the store."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from tests.servers.postgres import PgBouncer, Postgres, ask, running, schema, until
from tests.servers.process import free_port

from oncebridge.errors import ConfigError
from oncebridge.events.event import parse
from oncebridge.events.key import Part
from oncebridge.sinks.api import (
    Already,
    Closed,
    Delivery,
    Joint,
    Lost,
    Never,
    No,
    Unknown,
    Yes,
)
from oncebridge.sinks.postgres import PostgresSink, PostgresSinkOptions
from oncebridge.stores.api import (
    Claim,
    Commit,
    Commits,
    Fate,
    Record,
    Release,
    Releases,
    Reply,
    Want,
    Wants,
)
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.postgres.store import PostgresOptions, PostgresStore
from oncebridge.testing import ManualClock

LONG = 600_000
_numbers = iter(range(10**9))


def raw(number: int = 0, **detail: Any) -> bytes:
    event = {
        "version": "0",
        "id": f"event-{number}",
        "detail-type": "v2.users.{id}.presence",
        "source": "aws.partner/genesys.com/cloud/invented",
        "account": "123456789012",
        "time": "2026-03-01T12:30:00Z",
        "region": "eu-west-1",
        "resources": [],
        "detail": {"topicName": f"v2.users.{number}.presence", "number": number, **detail},
    }
    return json.dumps(event, separators=(",", ":")).encode()


def fresh() -> bytes:
    return next(_numbers).to_bytes(16, "big")


def delivery(number: int = 0, *, body: bytes | None = None, **fields: Any) -> Delivery:
    given = {"key": b"key %d" % number, "generation": fresh(), "route": "crm", **fields}
    return Delivery(parse(raw(number) if body is None else body), **given)


class Place:
    """A schema of one's own, with what looks at it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.schema = schema()

    def sink(self, **options: Any) -> PostgresSink:
        named = {} if "statement" in options else {"schema": self.schema}
        return PostgresSink(
            self.url, PostgresSinkOptions(**{"auto_migrate": True, **named, **options})
        )

    def store(self, clock: ManualClock | None = None) -> PostgresStore:
        options = PostgresOptions(schema=self.schema, auto_migrate=True)
        return PostgresStore(self.url, options, clock=clock)

    async def rows(self, what: str = "*", table: str = "oncebridge_events") -> list[Any]:
        return await ask(self.url, f"SELECT {what} FROM {self.schema}.{table} ORDER BY id")

    async def events(self) -> list[str]:
        return [row["event_id"] for row in await self.rows()]


@pytest.fixture
def place(postgres: Postgres) -> Place:
    return Place(postgres.url)


@asynccontextmanager
async def opened(sink: PostgresSink) -> AsyncIterator[PostgresSink]:
    try:
        await sink.open()
        yield sink
    finally:
        await sink.aclose()


@asynccontextmanager
async def joined(
    place: Place, **options: Any
) -> AsyncIterator[tuple[PostgresSink, PostgresStore, ManualClock]]:
    clock = ManualClock()
    async with place.store(clock) as store:
        sink = place.sink(**options)
        assert sink.joins(store)
        async with opened(sink):
            yield sink, store, clock


async def claim(
    store: PostgresStore, *keys: bytes, lease_ms: int = LONG, memo: bytes = b""
) -> Claim:
    parts = tuple(Part(key) for key in keys)
    (answer,) = await store.claim(Wants.of([Want(parts, fresh(), fresh(), lease_ms, LONG, memo)]))
    assert isinstance(answer, Claim)
    return answer


def joint(claim: Claim, number: int = 0, *, body: bytes | None = None, **fields: Any) -> Joint:
    """Deliver event *number* under *claim*, and commit all its keys."""
    held = claim.held[-1]
    commits = tuple(Commit(h.key, h.generation, Fate.DELIVERED, LONG) for h in claim.held)
    made = delivery(number, body=body, key=held.key, generation=held.generation)
    return Joint(made, commits, **fields)


async def state(store: PostgresStore, key: bytes) -> Record:
    (record,) = await store.peek([key])
    assert record is not None
    return record


# --- alone -------------------------------------------------------------------------------


async def test_an_event_becomes_a_row_with_its_bytes_untouched(place: Place) -> None:
    body = raw(7).replace(b'"number":7', b'"number": 7.0 ')
    async with opened(place.sink()) as sink:
        made = delivery(7, body=body, key=b"\x01" * 32, attempt=3, version=2**70)
        assert await sink.deliver([made]) == [Yes()]
    (row,) = await place.rows()
    assert row["raw"] == body
    assert json.loads(row["body"]) == json.loads(body)
    assert (row["key"], row["generation"]) == (b"\x01" * 32, made.generation)
    assert (row["route"], row["attempt"], row["unprotected"]) == ("crm", 3, False)
    assert (row["event_id"], row["topic"]) == ("event-7", "v2.users.7.presence")
    assert row["source"] == "aws.partner/genesys.com/cloud/invented"
    assert row["detail_type"] == "v2.users.{id}.presence"
    assert row["event_time"] == datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
    assert row["version"] == Decimal(2**70)
    assert abs(row["inserted_at"] - datetime.now(UTC)) < timedelta(minutes=1)


async def test_what_an_event_does_not_have_is_null(place: Place) -> None:
    async with opened(place.sink()) as sink:
        assert await sink.deliver([delivery(body=b'{"detail":{"topicName":7}}')]) == [Yes()]
    (row,) = await place.rows()
    assert [row[name] for name in ("event_id", "topic", "event_time", "version")] == [None] * 4
    assert (row["source"], row["detail_type"]) == ("", "")


async def test_rows_are_numbered_in_the_order_of_arrival(place: Place) -> None:
    async with opened(place.sink()) as sink:
        keys = [bytes([255 - number]) * 32 for number in range(100)]
        made = [delivery(number, key=keys[number]) for number in range(100)]
        assert await sink.deliver(made) == [Yes()] * 100
    assert await place.events() == [f"event-{number}" for number in range(100)]


@pytest.mark.parametrize(
    ("time", "shown"),
    [
        ("2026-03-01T12:30:00.25+02:00", datetime(2026, 3, 1, 10, 30, 0, 250_000, tzinfo=UTC)),
        ("2026-03-01T12:30:00", datetime(2026, 3, 1, 12, 30, tzinfo=UTC)),
        ("yesterday", None),
        ("0001-01-01T00:00:00+14:00", None),
        ("9999-12-31T23:59:59-14:00", None),
    ],
)
async def test_a_time_that_cannot_be_read_is_null(
    place: Place, time: str, shown: datetime | None
) -> None:
    body = json.dumps({"time": time, "detail": {"a": 1}}).encode()
    async with opened(place.sink()) as sink:
        assert await sink.deliver([delivery(body=body)]) == [Yes()]
    (row,) = await place.rows()
    assert row["event_time"] == shown


@pytest.mark.parametrize(
    ("detail", "has_body"),
    [
        (rb'{"a":"\u0000"}', False),
        (rb'{"a":"\\\u0000"}', False),
        (rb'{"a":"\\u0000"}', True),
        (rb'{"a":1e-20000}', False),
        (rb'{"a":"\ud83c\udf89"}', True),
        (b'{"a":123456789012345678901234567890.5}', True),
        (b'{"a":' + b"[" * 90 + b"]" * 90 + b"}", True),
    ],
)
async def test_what_jsonb_refuses_is_kept_as_bytes(
    place: Place, detail: bytes, has_body: object
) -> None:
    body = b'{"id":"odd","detail":' + detail + b"}"
    async with opened(place.sink()) as sink:
        made = [delivery(1), delivery(2, body=body), delivery(3)]
        assert await sink.deliver(made) == [Yes()] * 3
    rows = await place.rows()
    assert [bytes(row["raw"]) for row in rows] == [raw(1), body, raw(3)]
    assert [row["body"] is not None for row in rows] == [True, has_body, True]


async def test_a_nul_in_a_name_is_replaced(place: Place) -> None:
    body = rb'{"id":"a\u0000b","source":"\u0000","detail":{"topicName":"t\u0000"}}'
    async with opened(place.sink()) as sink:
        assert await sink.deliver([delivery(body=body)]) == [Yes()]
    (row,) = await place.rows()
    assert (row["event_id"], row["source"], row["topic"]) == ("a\ufffdb", "\ufffd", "t\ufffd")
    assert row["raw"] == body


async def test_an_event_sent_again_stands_there_once(place: Place) -> None:
    made = [delivery(number) for number in range(3)]
    async with opened(place.sink()) as sink:
        assert await sink.deliver(made[:2]) == [Yes()] * 2
        assert await sink.deliver(made) == [Yes()] * 3
        assert await sink.deliver([delivery(0)]) == [Yes()]  # the same key in another life
    assert await place.events() == ["event-0", "event-1", "event-2", "event-0"]


async def test_what_is_not_deduplicated_is_written_each_time(place: Place) -> None:
    made = [
        delivery(1, key=b"", generation=b""),
        delivery(2, generation=b"", unprotected=True),
    ]
    async with opened(place.sink()) as sink:
        assert await sink.deliver(made) == [Yes()] * 2
        assert await sink.deliver(made) == [Yes()] * 2
    assert await place.events() == ["event-1", "event-2"] * 2


async def test_keys_of_any_length_are_told_apart(place: Place) -> None:
    generation = fresh()
    keys = [b"", b"k" * 1000, b"k" * 1001, b"k" * 10_000, b"k" * 9_999 + b"l"]
    made = [delivery(at, key=key, generation=generation) for at, key in enumerate(keys)]
    async with opened(place.sink()) as sink:
        assert await sink.deliver(made) == [Yes()] * len(keys)
        assert await sink.deliver(made) == [Yes()] * len(keys)
    assert len(await place.events()) == len(keys)


async def test_a_large_batch_is_written_in_portions(place: Place) -> None:
    made = [delivery(number, body=raw(number, text="x" * 1_900_000)) for number in range(12)]
    async with opened(place.sink(timeout=timedelta(seconds=60))) as sink:
        assert await sink.deliver(made) == [Yes()] * 12
    assert await place.events() == [f"event-{number}" for number in range(12)]


async def test_one_bad_event_leaves_the_others_alone(place: Place) -> None:
    async with opened(place.sink()) as sink:
        await ask(
            place.url,
            f"ALTER TABLE {place.schema}.oncebridge_events ADD CONSTRAINT no_sevens "
            "CHECK (event_id NOT LIKE '%7%')",
            "SELECT 1",
        )
        answers = await sink.deliver([delivery(number) for number in range(60)])
    for number, answer in enumerate(answers):
        if "7" in str(number):
            assert answer == Never("23514 CheckViolationError oncebridge_events no_sevens")
        else:
            assert answer == Yes()
    assert await place.events() == [f"event-{n}" for n in range(60) if "7" not in str(n)]


async def test_a_refusal_never_quotes_the_event(place: Place) -> None:
    async with opened(place.sink()) as sink:
        await ask(
            place.url,
            f"ALTER TABLE {place.schema}.oncebridge_events ADD COLUMN number integer "
            "GENERATED ALWAYS AS ((body #>> '{detail,text}')::integer) STORED",
            "SELECT 1",
        )
        (answer,) = await sink.deliver([delivery(body=raw(text="a secret"))])
    assert isinstance(answer, Never)
    assert "secret" not in answer.reason
    assert answer.reason.startswith("22P02")


# --- a statement of one's own --------------------------------------------------------------


async def calls(place: Place) -> str:
    table = f"{place.schema}.calls"
    await ask(
        place.url,
        f"CREATE SCHEMA {place.schema}",
        f"CREATE TABLE {table} (id text PRIMARY KEY, number integer NOT NULL, data jsonb, "
        "bytes bytea, note text, v numeric, at timestamptz)",
        "SELECT 1",
    )
    return table


async def test_a_statement_of_ones_own_takes_named_parameters(place: Place) -> None:
    table = await calls(place)
    statement = (
        f"INSERT INTO {table} /* :no :parameters here */ "
        "SELECT :event_id, (:body #>> '{detail,number}')::integer, :body, :raw, "
        "'it''s :not $1' || \":odd\".x || $tag$ :nor this $tag$ || :route, :version, :event_time "
        "FROM (SELECT (ARRAY['a','b'])[1:1]::text AS x) AS \":odd\" -- nor :that\n"
        "ON CONFLICT (id) DO NOTHING"
    )
    async with opened(place.sink(statement=statement)) as sink:
        made = [delivery(1, version=1.5), delivery(2), delivery(1)]
        assert await sink.deliver(made) == [Yes()] * 3
    rows = await place.rows(table="calls")
    assert [(row["id"], row["number"], row["v"]) for row in rows] == [
        ("event-1", 1, Decimal("1.5")),
        ("event-2", 2, None),
    ]
    assert rows[0]["bytes"] == raw(1)
    assert json.loads(rows[0]["data"]) == json.loads(raw(1))
    assert rows[0]["note"] == "it's :not $1{a} :nor this crm"
    assert rows[0]["at"] == datetime(2026, 3, 1, 12, 30, tzinfo=UTC)


async def test_a_statement_of_ones_own_takes_numbered_parameters(place: Place) -> None:
    table = await calls(place)
    statement = f"INSERT INTO {table} (id, number, bytes) VALUES ($6, $4, $12)"
    async with opened(place.sink(statement=statement)) as sink:
        assert await sink.deliver([delivery(1, attempt=5)]) == [Yes()]
    (row,) = await place.rows(table="calls")
    assert (row["id"], row["number"], row["bytes"]) == ("event-1", 5, raw(1))


async def test_one_event_that_a_statement_refuses_leaves_the_others_alone(place: Place) -> None:
    table = await calls(place)
    statement = (
        f"INSERT INTO {table} (id, number, data) "
        "VALUES (:event_id, (:body #>> '{detail,number}')::integer, :body)"
    )
    bad = {
        3: raw(3).replace(b'"number":3', b'"number":"three"'),
        5: raw(5).replace(b'"number":5', b'"other":5'),
        6: raw(5),
    }
    async with opened(place.sink(statement=statement)) as sink:
        answers = await sink.deliver([delivery(n, body=bad.get(n)) for n in range(8)])
    assert answers == [
        *[Yes()] * 3,
        Never("22P02 InvalidTextRepresentationError"),
        Yes(),
        Never("23502 NotNullViolationError calls number"),
        Yes(),
        Yes(),
    ]
    rows = await place.rows(table="calls")
    assert [row["id"] for row in rows] == [f"event-{n}" for n in (0, 1, 2, 4, 5, 7)]


async def test_a_statement_gets_no_body_where_jsonb_refuses_it(place: Place) -> None:
    table = await calls(place)
    statement = f"INSERT INTO {table} (id, number, data) VALUES (:event_id, 1, :body)"
    odd = [rb'{"id":"nul","detail":{"a":"\u0000"}}', b'{"id":"tiny","detail":{"a":1e-20000}}']
    async with opened(place.sink(statement=statement)) as sink:
        assert await sink.deliver([delivery(body=body) for body in odd]) == [Yes()] * 2
    assert [(row["id"], row["data"]) for row in await place.rows(table="calls")] == [
        ("nul", None),
        ("tiny", None),
    ]


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("INSERT INTO x VALUES (:event)", "did you mean 'event_id'?"),
        ("INSERT INTO x VALUES ($14)", "use \\$1 to \\$13"),
        ("INSERT INTO x VALUES ($0)", "use \\$1 to \\$13"),
        ("INSERT INTO x VALUES (1)", "uses no part of the event"),
    ],
)
def test_a_statement_that_cannot_work_is_refused(statement: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        PostgresSink("postgresql://host/db", PostgresSinkOptions(statement=statement))
    assert caught.value.where == "statement"


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("INSERT INTO nowhere VALUES (:event_id)", "nowhere"),
        (
            "INSERT INTO pg_class (oid) VALUES (:event_id)",
            "type oid but expression is of type text",
        ),
        ("SELECT :event_id; SELECT 2", "multiple commands"),
    ],
)
async def test_a_statement_is_tried_before_use(place: Place, statement: str, told: str) -> None:
    sink = place.sink(statement=statement)
    with pytest.raises(ConfigError, match=told) as caught:
        await sink.open()
    assert caught.value.where == "statement"
    await sink.aclose()


def test_a_statement_names_its_table_itself() -> None:
    for url, given in (("postgresql://h/d?table=x", {}), ("postgresql://h/d", {"schema": "x"})):
        options = PostgresSinkOptions(statement="SELECT :raw", **given)
        with pytest.raises(ConfigError, match="names its own table"):
            PostgresSink(url, options)


# --- jointly -------------------------------------------------------------------------------


async def test_an_event_and_its_commit_are_one(place: Place) -> None:
    async with joined(place) as (sink, store, clock):
        claims = [await claim(store, b"k%d" % number, memo=b"m") for number in range(3)]
        made = [joint(one, number) for number, one in enumerate(claims)]
        assert await sink.deliver_jointly(made) == [Yes()] * 3
        for one in claims:
            record = await state(store, one.held[0].key)
            assert (record.fate, record.token, record.memo) == (Fate.DELIVERED, b"", b"m")
            assert record.until_ms == clock() + LONG
            assert record.generation == one.held[0].generation
    rows = await place.rows()
    assert [bytes(row["key"]) for row in rows] == [b"k0", b"k1", b"k2"]
    assert [bytes(row["generation"]) for row in rows] == [one.held[0].generation for one in claims]


async def test_what_was_committed_before_is_not_written(place: Place) -> None:
    async with joined(place) as (sink, store, _):
        one, two, three = [await claim(store, key) for key in (b"a", b"b", b"c")]
        assert await sink.deliver_jointly([joint(two, 2)]) == [Yes()]
        before = await state(store, b"b")
        answers = await sink.deliver_jointly([joint(one, 1), joint(two, 2), joint(three, 3)])
        assert answers == [Yes(), Already(), Yes()]
        assert await state(store, b"b") == before
    assert await place.events() == ["event-2", "event-1", "event-3"]


async def test_what_was_taken_over_may_still_be_committed_by_its_generation(place: Place) -> None:
    async with joined(place) as (sink, store, clock):
        late = await claim(store, b"k", lease_ms=10)
        clock.advance(10)
        taker = await claim(store, b"k")
        assert await sink.deliver_jointly([joint(late, 1)]) == [Yes()]
        assert await sink.deliver_jointly([joint(taker, 1)]) == [Already()]
    assert await place.events() == ["event-1"]


async def test_what_belongs_to_another_life_is_lost(place: Place) -> None:
    async with joined(place) as (sink, store, _):
        old = await claim(store, b"k")
        await store.release(Releases.of([Release(b"k", old.token)]))
        assert await store.forget([b"k"]) == [True]
        new = await claim(store, b"k")
        other = await claim(store, b"other")
        answers = await sink.deliver_jointly([joint(old, 1), joint(other, 2)])
        assert answers == [Lost(), Yes()]
        assert (await state(store, b"k")).token == new.token
    assert await place.events() == ["event-2"]


async def test_all_keys_of_an_event_are_committed_or_none(place: Place) -> None:
    async with joined(place) as (sink, store, _):
        good = await claim(store, b"t1", b"b1")
        half = await claim(store, b"t2", b"b2")
        gone = await claim(store, b"t3", b"b3")
        held = half.held[1]
        assert await store.commit(
            Commits.of([Commit(held.key, held.generation, Fate.DEAD, LONG)])
        ) == [Reply.COMMITTED]
        await store.release(Releases.of([Release(b"t3", gone.token)]))
        await store.forget([b"t3"])
        made = [joint(good, 1), joint(half, 2), joint(gone, 3)]
        assert await sink.deliver_jointly(made) == [Yes(), Already(), Lost()]
        fates = {
            key: record and record.fate
            for key, record in zip(
                (b"t1", b"b1", b"t2", b"b2", b"t3", b"b3"),
                await store.peek([b"t1", b"b1", b"t2", b"b2", b"t3", b"b3"]),
                strict=True,
            )
        }
    assert fates == {
        b"t1": Fate.DELIVERED,
        b"b1": Fate.DELIVERED,
        b"t2": None,
        b"b2": Fate.DEAD,
        b"t3": None,
        b"b3": None,
    }
    assert await place.events() == ["event-1"]


async def test_already_counts_before_lost(place: Place) -> None:
    async with joined(place) as (sink, store, _):
        one = await claim(store, b"t", b"b")
        held = one.held[1]
        await store.commit(Commits.of([Commit(held.key, held.generation, Fate.DELIVERED, LONG)]))
        await store.release(Releases.of([Release(b"t", one.token)]))
        await store.forget([b"t"])
        assert await sink.deliver_jointly([joint(one, 1)]) == [Already()]
    assert await place.events() == []


async def test_a_register_is_given_back_in_the_same_step(place: Place) -> None:
    async with joined(place) as (sink, store, clock):
        event, plain = await claim(store, b"e"), await claim(store, b"p")
        register = await claim(store, b"entity", memo=b"old")
        back = Release(b"entity", register.token, 5, LONG, b"new", unsent=True)
        made = [joint(event, 1, releases=(back,)), joint(plain, 2)]
        assert await sink.deliver_jointly(made) == [Yes()] * 2
        record = await state(store, b"entity")
        assert (record.token, record.memo, record.attempts) == (b"", b"new", 0)
        assert (record.until_ms, record.fate) == (clock() + 5, None)
        assert record.keep_until_ms == clock() + 5 + LONG


async def test_a_register_that_is_not_ours_any_more_keeps_the_event_out(place: Place) -> None:
    async with joined(place) as (sink, store, clock):
        event = await claim(store, b"e")
        register = await claim(store, b"entity", lease_ms=10)
        clock.advance(10)
        await claim(store, b"entity")
        back = Release(b"entity", register.token, memo=b"new")
        before = await store.peek([b"e", b"entity"])
        assert await sink.deliver_jointly([joint(event, 1, releases=(back,))]) == [Lost()]
        assert await store.peek([b"e", b"entity"]) == before
    assert await place.events() == []


async def test_an_event_without_a_key_is_only_written(place: Place) -> None:
    async with joined(place) as (sink, store, _):
        keyed = await claim(store, b"k")
        loose = Joint(delivery(2, key=b"", generation=b""), ())
        assert await sink.deliver_jointly([loose, joint(keyed, 1), loose]) == [Yes()] * 3
    assert await place.events() == ["event-2", "event-1", "event-2"]


async def test_a_key_that_stands_twice_in_a_call_is_committed_once(place: Place) -> None:
    async with joined(place) as (sink, store, _):
        one, two = await claim(store, b"k"), await claim(store, b"l")
        made = [joint(one, 1), joint(two, 2), joint(one, 1)]
        assert await sink.deliver_jointly(made) == [Yes(), Yes(), Already()]
    assert await place.events() == ["event-1", "event-2"]


async def test_one_bad_event_leaves_the_others_and_its_own_record_alone(place: Place) -> None:
    async with joined(place) as (sink, store, _):
        await ask(
            place.url,
            f"ALTER TABLE {place.schema}.oncebridge_events ADD CHECK (event_id <> 'event-5')",
            "SELECT 1",
        )
        claims = [await claim(store, b"k%d" % number) for number in range(9)]
        odd = rb'{"id":"odd","detail":{"a":"\u0000","b":1e-20000}}'
        bodies = {7: odd}
        before = await state(store, b"k5")
        answers = await sink.deliver_jointly(
            [joint(one, number, body=bodies.get(number)) for number, one in enumerate(claims)]
        )
        assert [type(answer) for answer in answers] == [Yes] * 5 + [Never] + [Yes] * 3
        assert await state(store, b"k5") == before
        records = await store.peek([b"k%d" % number for number in range(9)])
        fates = [record and record.fate for record in records]
        assert fates == [Fate.DELIVERED] * 5 + [None] + [Fate.DELIVERED] * 3
    names = [f"event-{number}" for number in range(9)]
    names[7] = "odd"
    del names[5]
    assert await place.events() == names


async def test_a_statement_of_ones_own_is_run_in_the_same_transaction(place: Place) -> None:
    table = await calls(place)
    statement = (
        f"INSERT INTO {table} (id, number, data) "
        "VALUES (:event_id, (:body #>> '{detail,number}')::integer, :body)"
    )
    async with joined(place, statement=statement) as (sink, store, _):
        claims = [await claim(store, b"k%d" % number) for number in range(6)]
        assert await sink.deliver_jointly([joint(claims[1], 1)]) == [Yes()]
        await store.release(Releases.of([Release(b"k2", claims[2].token)]))
        await store.forget([b"k2"])
        bad = raw(4).replace(b'"number":4', b'"number":"four"')
        made = [joint(one, number) for number, one in enumerate(claims)]
        made[4] = joint(claims[4], 4, body=bad)
        answers = await sink.deliver_jointly(made)
        assert answers == [
            Yes(),
            Already(),
            Lost(),
            Yes(),
            Never("22P02 InvalidTextRepresentationError"),
            Yes(),
        ]
        records = await store.peek([b"k%d" % number for number in range(6)])
        fates = [record and record.fate for record in records]
    done = Fate.DELIVERED
    assert fates == [done, done, None, done, None, done]
    rows = await place.rows("id", table="calls")
    assert [row["id"] for row in rows] == ["event-0", "event-1", "event-3", "event-5"]


async def test_of_two_who_deliver_the_same_event_one_writes_it(place: Place) -> None:
    async with joined(place) as (sink, store, clock), place.store(clock) as second_store:
        second = place.sink()
        assert second.joins(second_store)
        await second.open()
        for number in range(20):
            late = await claim(store, b"k%d" % number, lease_ms=10)
            clock.advance(10)
            taker = await claim(second_store, b"k%d" % number)
            answers: list[Any] = await asyncio.gather(
                sink.deliver_jointly([joint(late, number)]),
                second.deliver_jointly([joint(taker, number)]),
            )
            assert sorted(type(one).__name__ for (one,) in answers) == ["Already", "Yes"]
        await second.aclose()
    assert await place.events() == [f"event-{number}" for number in range(20)]


async def test_it_works_through_pgbouncer(pgbouncer: PgBouncer) -> None:
    place = Place(pgbouncer.url)
    async with joined(place) as (sink, store, _):
        for number in range(10):
            one = await claim(store, b"k%d" % number)
            assert await sink.deliver_jointly([joint(one, number)]) == [Yes()]
            assert await sink.deliver_jointly([joint(one, number)]) == [Already()]
    statement = f"INSERT INTO {place.schema}.oncebridge_events (key, generation, route, attempt, unprotected, raw) VALUES (:key, :generation, :route, 1, false, :raw)"
    async with joined(place, statement=statement) as (sink, store, _):
        for number in range(10):
            one = await claim(store, b"l%d" % number)
            assert await sink.deliver_jointly([joint(one, number)]) == [Yes()]
        assert await sink.deliver([delivery(11)]) == [Yes()]
    assert len(await place.rows()) == 21


# --- who joins, and what is refused -----------------------------------------------------------


@pytest.mark.parametrize(
    ("sink", "store", "same"),
    [
        ("postgresql://a:x@h/d", "postgresql://b:y@h:5432/d?sslmode=require", True),
        ("postgresql://h,i/d", "postgresql://i:5432,h/d", True),
        ("postgresql:///d?host=/run/pg", "postgresql://%2Frun%2Fpg/d", True),
        ("postgresql://me@h", "postgresql://h/me", True),
        ("postgresql://h/d", "postgresql://h/e", False),
        ("postgresql://h/d", "postgresql://i/d", False),
        ("postgresql://h/d", "postgresql://h:5433/d", False),
        ("postgresql://h/d", "postgresql://h,i/d", False),
    ],
)
def test_a_sink_joins_a_store_in_the_same_database(sink: str, store: str, same: object) -> None:
    assert PostgresSink(sink).joins(PostgresStore(store)) is same


def test_a_sink_does_not_join_another_kind_of_store() -> None:
    assert not PostgresSink("postgresql://h/d").joins(MemoryStore())


async def test_exactly_once_is_refused_without_the_store(place: Place) -> None:
    sink = place.sink(exactly_once=True)
    assert not sink.joins(MemoryStore())
    with pytest.raises(ConfigError, match="needs a store in the same database"):
        await sink.open()
    async with place.store() as store:
        assert sink.joins(store)
        await sink.open()
    await sink.aclose()


async def test_a_table_that_is_not_there_is_told_with_what_to_do(place: Place) -> None:
    sink = place.sink(auto_migrate=False)
    with pytest.raises(ConfigError, match="oncebridge_events; run `oncebridge migrate`"):
        await sink.open()
    assert await sink.migrate() == [f"created the table {place.schema}.oncebridge_events, layout 1"]
    assert await sink.migrate() == []
    await sink.open()
    assert await sink.deliver([delivery(1)]) == [Yes()]
    assert (
        f'CREATE TABLE IF NOT EXISTS "{place.schema}"."oncebridge_events"' in sink.migration_sql()
    )
    await sink.aclose()


async def test_a_statement_of_ones_own_has_nothing_to_migrate() -> None:
    sink = PostgresSink(
        f"postgresql://127.0.0.1:{free_port()}/d", PostgresSinkOptions(statement="SELECT :raw")
    )
    assert await sink.migrate() == []
    assert sink.migration_sql() == ""


async def test_a_database_of_another_encoding_is_refused(postgres: Postgres) -> None:
    await ask(
        postgres.url,
        "DROP DATABASE IF EXISTS latin",
        "CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0",
        "SELECT 1",
    )
    sink = PostgresSink(postgres.url.replace("/events", "/latin"))
    with pytest.raises(ConfigError, match="LATIN1, but events are UTF-8"):
        await sink.open()
    await sink.aclose()


async def test_without_the_table_or_the_right_the_door_is_shut(place: Place) -> None:
    async with opened(place.sink()) as sink:
        role = place.schema
        table = f"{place.schema}.oncebridge_events"
        await ask(
            place.url,
            f"CREATE ROLE {role} LOGIN",
            f"GRANT USAGE ON SCHEMA {place.schema} TO {role}",
            f"GRANT SELECT ON ALL TABLES IN SCHEMA {place.schema} TO {role}",
            "SELECT 1",
        )
        poor = PostgresSink(
            place.url.replace("oncebridge@", f"{role}@"),
            PostgresSinkOptions(schema=place.schema),
        )
        with pytest.raises(ConfigError, match="GRANT INSERT ON"):
            await poor.open()
        (answer,) = await poor.deliver([delivery(1)])
        assert isinstance(answer, Closed)
        await ask(place.url, f"GRANT INSERT ON {table} TO {role}", "SELECT 1")
        assert await poor.deliver([delivery(1)]) == [Yes()]
        await ask(place.url, f"REVOKE INSERT ON {table} FROM {role}", "SELECT 1")
        (answer,) = await poor.deliver([delivery(2)])
        assert isinstance(answer, Closed)
        assert "42501" in answer.reason
        await poor.aclose()
        await ask(place.url, f"DROP TABLE {table}", "SELECT 1")
        (answer,) = await sink.deliver([delivery(3)])
        assert isinstance(answer, Closed)
        assert "42P01" in answer.reason


# --- outages -------------------------------------------------------------------------------


@pytest.fixture
def own_server() -> Iterator[Postgres]:
    with running() as server:
        yield server


async def test_a_server_that_is_away_at_the_start_does_not_matter(own_server: Postgres) -> None:
    own_server.stop()
    async with opened(Place(own_server.url).sink()) as sink:
        (answer,) = await sink.deliver([delivery(1)])
        assert isinstance(answer, No)
        own_server.start()
        assert await sink.deliver([delivery(1)]) == [Yes()]
        own_server.kill()
        (answer,) = await sink.deliver([delivery(2)])
        assert isinstance(answer, No | Unknown)
        own_server.start()
        assert await sink.deliver([delivery(1), delivery(2)]) == [Yes()] * 2


async def test_a_connection_lost_before_the_answer_leaves_it_open(place: Place) -> None:
    table = await calls(place)
    statement = f"INSERT INTO {table} (id, number) SELECT :event_id, 1 FROM pg_sleep(30)"
    async with opened(place.sink(statement=statement)) as sink:
        sending = asyncio.create_task(sink.deliver([delivery(1)]))
        end = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE state = 'active' AND query LIKE '%pg_sleep(30)%' AND pid <> pg_backend_pid()"
            f" AND query LIKE '%{place.schema}%'"
        )
        await until(place.url, end)
        (answer,) = await sending
    assert isinstance(answer, Unknown)


async def test_what_takes_too_long_is_unknown(place: Place) -> None:
    statement = "SELECT :raw FROM pg_sleep(20)"
    sink = place.sink(statement=statement, timeout=timedelta(seconds=1))
    async with opened(sink):
        (answer,) = await sink.deliver([delivery(1)])
    assert isinstance(answer, Unknown)
    assert "no answer within 1s" in answer.reason


async def test_a_joint_delivery_that_is_broken_off_is_there_wholly_or_not(place: Place) -> None:
    """Whatever came of it, record and row agree, and the next attempt makes it one."""
    async with joined(place) as (sink, store, _):
        for number in range(30):
            one = await claim(store, b"k%d" % number)
            sending = asyncio.create_task(sink.deliver_jointly([joint(one, number)]))
            await asyncio.sleep(number / 5000)
            sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending
            (answer,) = await sink.deliver_jointly([joint(one, number)])
            assert isinstance(answer, Yes | Already)
            assert (await state(store, b"k%d" % number)).fate is Fate.DELIVERED
    assert await place.events() == [f"event-{number}" for number in range(30)]


def test_it_is_found_by_its_address() -> None:
    sink = PostgresSink.from_url(
        "postgresql://u:p@h/d?table=calls", PostgresSinkOptions(schema="crm", batch=7)
    )
    assert '"crm"."calls"' in sink.migration_sql()
    assert (sink.batch, sink.concurrency) == (7, 2)
