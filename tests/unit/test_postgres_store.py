"""The Postgres store on a real server: what only it has to promise."""

import asyncio
import gc
import random
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from tests.servers.postgres import (
    PgBouncer,
    Postgres,
    ask,
    bouncing,
    folder,
    running,
    schema,
    standby,
    until,
)
from tests.servers.process import free_port

from oncebridge.errors import ConfigError, StoreError, StoreUnavailable
from oncebridge.events.key import Part
from oncebridge.service.addresses import StorePlace
from oncebridge.stores import transitions
from oncebridge.stores.api import (
    Busy,
    Claim,
    Commit,
    Commits,
    Duplicate,
    Extension,
    Extensions,
    Fate,
    Memories,
    Memory,
    NoAnswer,
    Record,
    Release,
    Releases,
    Reply,
    Want,
    Wants,
)
from oncebridge.stores.postgres.address import read_address
from oncebridge.stores.postgres.pool import NoReply
from oncebridge.stores.postgres.store import PostgresOptions, PostgresStore
from oncebridge.testing import ManualClock

LONG = 600_000
TLS = Path(__file__).parents[1] / "http" / "tls"
_numbers = iter(range(10**9))


def fresh() -> bytes:
    return blake2b(b"%d" % next(_numbers), digest_size=16).digest()


def want(*parts: bytes | Part, lease_ms: int = LONG, keep_ms: int = LONG) -> Want:
    made = tuple(part if isinstance(part, Part) else Part(part) for part in parts)
    return Want(made, fresh(), fresh(), lease_ms, keep_ms, b"memo")


def done(claim: Any, window_ms: int = LONG) -> Commit:
    assert isinstance(claim, Claim)
    held = claim.held[0]
    return Commit(held.key, held.generation, Fate.DELIVERED, window_ms)


def options(**given: Any) -> PostgresOptions:
    return PostgresOptions(**{"schema": schema(), "auto_migrate": True, **given})


@asynccontextmanager
async def opened(
    url: str, clock: ManualClock | None = None, **given: Any
) -> AsyncIterator[PostgresStore]:
    async with PostgresStore(url, options(**given), clock=clock) as store:
        yield store


@pytest.fixture
def own_server() -> Iterator[Postgres]:
    with running() as server:
        yield server


# --- whole batches, against the table as code -----------------------------------------------


BATCHES: dict[str, Any] = {
    "claim": Wants.of,
    "commit": Commits.of,
    "release": Releases.of,
    "extend": Extensions.of,
    "remember": Memories.of,
}


@pytest.mark.parametrize("seed", range(8))
async def test_batches_are_answered_as_one_by_one(postgres: Postgres, seed: int) -> None:
    """A batch of distinct keys must come to what its items come to one after the other."""
    dice = random.Random(seed)
    clock = ManualClock()
    keys = [b"key %d" % number for number in range(40)] + [
        b"long" * 400 + b"%d" % n for n in (1, 2)
    ]
    requests: list[Want] = []
    holds: list[tuple[bytes, bytes, bytes]] = []
    model: dict[bytes, Record] = {}
    async with opened(postgres.url, clock) as store:

        async def same(verb: str, items: list[Any]) -> list[Any]:
            answers = [*await getattr(store, verb)(BATCHES.get(verb, list)(items))]
            assert answers == [_one(model, verb, item, clock()) for item in items]
            return answers

        for _ in range(60):
            clock.advance(dice.choice([0, 1, 20, 60, 300]))
            chosen = dice.sample(keys, dice.randint(1, len(keys)))
            match dice.choice(["claim"] * 4 + ["commit"] * 3 + ["other"] * 2):
                case "claim":
                    batch = _wants(dice, chosen)
                    again = dice.sample(requests, min(len(requests), dice.randint(0, 3)))
                    named = {part.key for one in again for part in one.parts}
                    if len(named) == sum(len(one.parts) for one in again):
                        batch = again + [
                            w for w in batch if named.isdisjoint(p.key for p in w.parts)
                        ]
                    requests += batch
                    for asked, answer in zip(batch, await same("claim", batch), strict=True):
                        if isinstance(answer, Claim):
                            holds += [(h.key, h.generation, asked.token) for h in answer.held]
                case "commit":
                    held = _some(dice, holds)
                    await same("commit", [_commit(dice, key, gen) for key, gen, _ in held])
                case _:
                    held = _some(dice, holds)
                    verb = dice.choice(["release", "extend", "remember", "forget"])
                    made = {
                        "release": [_release(dice, key, token) for key, _, token in held],
                        "extend": [
                            Extension(key, token, dice.choice([20, 500])) for key, _, token in held
                        ],
                        "remember": [_memory(dice, key) for key in chosen],
                        "forget": chosen,
                    }
                    await same(verb, made[verb])
            assert await store.peek(keys) == [model.get(key) for key in keys]


def _one(model: dict[bytes, Record], verb: str, item: Any, now_ms: int) -> Any:
    """Do what the table of operations says, to one item."""
    if verb == "forget":
        if may := transitions.may_forget(model.get(item), now_ms):
            del model[item]
        return may
    if verb == "claim":
        answer, after = transitions.claim(
            [model.get(part.key) for part in item.parts], item, now_ms
        )
    else:
        answer, changed = getattr(transitions, verb)(model.get(item.key), item, now_ms)
        after = [changed] if changed is not None else []
    model |= {record.key: record for record in after}
    return answer


def _wants(dice: random.Random, keys: list[bytes]) -> list[Want]:
    batch = []
    parts_at_most = dice.choice([1, 3])
    slides = dice.choice([[0], [0, 70, 150]])
    while keys:
        count = dice.randint(1, parts_at_most)
        some, keys = keys[:count], keys[count:]
        hashes = dice.choice([[b""], [b"", b"1" * 32, b"2" * 32]])
        parts = tuple(Part(key, dice.choice(hashes), dice.choice(slides)) for key in some)
        lease, keep = dice.choice([20, 50, 1000]), 10**6
        batch.append(Want(parts, fresh(), fresh(), lease, keep, dice.choice([b"", b"m"])))
    return batch


def _some(dice: random.Random, holds: list[tuple[bytes, bytes, bytes]]) -> list[Any]:
    found = dice.sample(holds, min(len(holds), dice.randint(1, 30)))
    return list({key: (key, generation, token) for key, generation, token in found}.values())


def _commit(dice: random.Random, key: bytes, generation: bytes) -> Commit:
    window = dice.choice([20, 60, 200])
    memo = dice.choice([None, None, b"o"])
    return Commit(key, generation, dice.choice(list(Fate)), window, dice.choice([0, 80]), memo)


def _release(dice: random.Random, key: bytes, token: bytes) -> Release:
    memo = dice.choice([None, b"", b"p"])
    return Release(key, token, dice.choice([0, 30]), 10**6, memo, dice.choice([True, False]))


def _memory(dice: random.Random, key: bytes) -> Memory:
    fate, content = dice.choice(list(Fate)), dice.choice([b"", b"1" * 32])
    return Memory(key, fresh(), fate, dice.choice([20, 200]), content, dice.choice([b"", b"r"]))


# --- time and locks ---------------------------------------------------------------------------


async def test_a_claim_that_waited_while_the_lease_ended_succeeds(postgres: Postgres) -> None:
    """The clock is read after the lock: when the transaction began, the lease was still on."""
    async with opened(postgres.url) as store:
        table, now = store.layout.named(), store.layout.named("now")
        await store.claim(Wants.of([want(b"lapsed", lease_ms=1), want(b"pair", lease_ms=1)]))
        other = await asyncpg.connect(postgres.url)
        async with other.transaction():  # somebody takes all for a second, and two to say so
            await other.execute(f"UPDATE {table} SET token = 't', until_ms = {now}(NULL) + 1000")
            await other.execute(
                f"INSERT INTO {table} SELECT {now}(NULL) + 1000, 9e15, 0, 1, 0, key, 't', 'g', '', "
                "'', '' FROM unnest('{new,mate}'::bytea[]) AS key"
            )
            claims = [
                asyncio.create_task(store.claim(Wants.of([want(*keys)])))
                for keys in ([b"lapsed"], [b"new"], [b"pair", b"mate"])
            ]
            await asyncio.sleep(2)
            assert not any(claim.done() for claim in claims)
        for claim in claims:
            (answer,) = await claim
            assert isinstance(answer, Claim)
            assert {held.attempts for held in answer.held} == {2}
        await other.close()


async def test_who_comes_second_is_told_why_although_it_was_not_there_before(
    postgres: Postgres,
) -> None:
    """What others commit while we wait is not in the snapshot that our statement began with."""
    async with opened(postgres.url) as store:
        table = store.layout.named()
        other = await asyncpg.connect(postgres.url)
        async with other.transaction():
            await other.execute(
                f"INSERT INTO {table} VALUES (9e15, 9e15, 0, 1, 0, 'busy', 't', 'g', '', '', ''), "
                "(9e15, 9e15, 0, 1, 2, 'done', '', 'g', '', 'what', '')"
            )
            alone = asyncio.create_task(
                store.claim(Wants.of([want(b"new"), want(b"done"), want(b"busy")]))
            )
            paired = asyncio.create_task(
                store.claim(Wants.of([want(b"newer", b"done"), want(b"newest")]))
            )
            await asyncio.sleep(0.5)
            assert not alone.done()
            assert not paired.done()
        first, second, third = await alone
        assert isinstance(first, Claim)
        assert second == Duplicate(b"done", Fate.DEAD, b"what")
        assert isinstance(third, Busy)
        pair, single = await paired
        assert pair == Duplicate(b"done", Fate.DEAD, b"what")
        assert isinstance(single, Claim)
        assert await store.peek([b"newer"]) == [None]
        await other.close()


async def test_nobody_waits_for_a_slow_transaction_that_commits_another_event(
    postgres: Postgres,
) -> None:
    async with opened(postgres.url, timeout=timedelta(seconds=20)) as store:
        await store.claim(Wants.of([want(b"slow")]))
        other = await asyncpg.connect(postgres.url)
        async with other.transaction():  # as a sink in the same database does
            await other.execute(f"UPDATE {store.layout.named()} SET fate = 1 WHERE key = 'slow'")
            async with asyncio.timeout(10):
                answers = await store.claim(Wants.of([want(b"a"), want(b"slow"), want(b"z")]))
            assert [type(answer) for answer in answers] == [Claim, Busy, Claim]
        await other.close()


async def test_a_duplicate_writes_nothing(postgres: Postgres) -> None:
    async with opened(postgres.url) as store:
        (first,) = await store.claim(Wants.of([want(Part(b"done", b"1"))]))
        await store.commit(Commits.of([done(first)]))
        await store.claim(Wants.of([want(b"held")]))
        look = f"SELECT ctid, xmin, xmax, * FROM {store.layout.named()} ORDER BY key"
        before = await ask(postgres.url, look)
        answers = await store.claim(
            Wants.of([want(Part(b"done", b"1")), want(b"held"), want(Part(b"new", b"1"))])
        )
        assert [type(answer) for answer in answers] == [Duplicate, Busy, Claim]
        answers = await store.claim(Wants.of([want(Part(b"done", b"2")), want(b"other", b"done")]))
        assert await store.remember(Memories.of([Memory(b"done", fresh(), Fate.DEAD, LONG)])) == [
            Reply.KNOWN
        ]
        after = await ask(postgres.url, look.replace("ORDER", "WHERE key <> 'new' ORDER"))
        assert after == before


async def test_batches_in_opposite_orders_do_not_wait_for_each_other(postgres: Postgres) -> None:
    """Whoever locks as they come would stand still here, and be thrown out by the server."""
    keys = [b"key %d" % number for number in range(60)]
    given = options()
    async with (
        PostgresStore(postgres.url, given) as one,
        PostgresStore(postgres.url, given) as two,
    ):

        async def work(number: int) -> None:
            dice = random.Random(number)
            store = (one, two)[number % 2]
            for _ in range(25):
                some = dice.sample(keys, 30)
                size = dice.choice([1, 1, 2])
                wants = [
                    want(*some[at : at + size], lease_ms=dice.choice([1, 50]))
                    for at in range(0, 30, size)
                ]
                held = [
                    (hold, claim.token)
                    for claim in await store.claim(Wants.of(wants))
                    if isinstance(claim, Claim)
                    for hold in claim.held
                ]
                dice.shuffle(held)
                third = len(held) // 3
                await store.extend(Extensions.of([Extension(h.key, t, 50) for h, t in held]))
                await store.commit(
                    Commits.of(
                        [Commit(h.key, h.generation, Fate.DELIVERED, 1) for h, _ in held[:third]]
                    )
                )
                await store.release(Releases.of([Release(h.key, t) for h, t in held[third:]]))
                await store.remember(
                    Memories.of([Memory(key, fresh(), Fate.DEAD, 1) for key in some[:9]])
                )
                if not dice.randrange(4):
                    await store.forget(some[:9])
                    await store.purge()

        found = "SELECT deadlocks FROM pg_stat_database WHERE datname = 'events'"
        ((before,),) = await ask(postgres.url, found)
        await asyncio.gather(*(work(number) for number in range(8)))
    await gone(postgres, one)
    ((after,),) = await ask(postgres.url, found)
    assert after == before


async def gone(postgres: Postgres, store: PostgresStore) -> None:
    """Wait until the server's side of a closed store has ended: only then it tells all it counted."""
    await until(
        postgres.url,
        f"SELECT FROM pg_stat_activity WHERE query LIKE '%{store.layout.schema}%' "
        "AND pid <> pg_backend_pid()",
        some=False,
    )


async def test_a_batch_is_one_statement_and_no_session_is_changed() -> None:
    with running({"log_statement": "all"}) as server:
        async with opened(server.url, connections=1) as store:
            await store.claim(Wants.of([want(b"warm"), want(b"up")]))
            await store.commit(Commits.of([Commit(b"warm", b"", Fate.DEAD, 1)]))
            log = server.folder / "postgres.log"
            before = len(log.read_text())
            claims = await store.claim(Wants.of([want(b"%d" % number) for number in range(500)]))
            assert (
                await store.commit(Commits.of([done(claim) for claim in claims]))
                == [Reply.COMMITTED] * 500
            )
            told = log.read_text()
        found = [line.split("oncebridge_records_")[1] for line in _statements(told[before:])]
        assert [name.split('"')[0] for name in found] == ["claim", "commit"]
        ours = told.partition("CREATE DATABASE")[2]
        assert "set_config" not in ours
        assert "typeinfo" not in ours
        assert not [line for line in ours.splitlines() if "LOG:  statement: SET" in line]


def _statements(log: str) -> list[str]:
    return [line for line in log.splitlines() if "LOG:" in line and "oncebridge_records" in line]


# --- what is refused at the start ----------------------------------------------------------


async def refusal(url: str, **given: Any) -> str:
    store = PostgresStore(url, PostgresOptions(**given))
    with pytest.raises(ConfigError) as caught:
        await store.open()
    await store.aclose()
    assert not caught.value.where
    return str(caught.value)


async def test_a_table_that_is_not_there_is_told_with_what_to_do(postgres: Postgres) -> None:
    told = await refusal(postgres.url, schema="nowhere")
    assert "there is no table nowhere.oncebridge_records; run `oncebridge migrate`" in told
    assert "auto_migrate = true" in told


async def test_a_table_that_is_not_logged_is_refused(postgres: Postgres) -> None:
    async with opened(postgres.url) as store:
        table = store.layout.named()
        await ask(postgres.url, f"ALTER TABLE {table} SET UNLOGGED", "SELECT 1")
        told = await refusal(postgres.url, schema=store.layout.schema)
        assert f"ALTER TABLE {table} SET LOGGED" in told
        assert "SET LOGGED" in await refusal(
            postgres.url, schema=store.layout.schema, auto_migrate=True
        )


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("synchronous_commit = off", 'ALTER ROLE "guarded" SET synchronous_commit = on'),
        ("default_transaction_read_only = on", "accepts no writes"),
        (
            "default_transaction_isolation = 'serializable'",
            "ALTER ROLE \"guarded\" SET default_transaction_isolation = 'read committed'",
        ),
    ],
)
@pytest.mark.full
async def test_a_server_that_cannot_keep_the_promise_is_refused(
    own_server: Postgres, setting: str, told: str
) -> None:
    await ask(
        own_server.url,
        "CREATE ROLE guarded LOGIN SUPERUSER PASSWORD 'pw'",
        f"ALTER ROLE guarded SET {setting}",
        "SELECT 1",
    )
    assert told in await refusal(own_server.url.replace("oncebridge@", "guarded:pw@"))


@pytest.mark.full
async def test_a_standby_is_refused_and_the_primary_beside_it_found(own_server: Postgres) -> None:
    with standby(own_server) as copy:
        assert "is a standby and accepts no writes" in await refusal(copy.url)
        nobody = free_port()
        hosts = ",".join(f"127.0.0.1:{port}" for port in (nobody, copy.port, own_server.port))
        async with opened(f"postgresql://oncebridge@{hosts}/events") as store:
            (answer,) = await store.claim(Wants.of([want(b"k")]))
            assert isinstance(answer, Claim)
        away = PostgresStore(
            f"postgresql://oncebridge@127.0.0.1:{nobody},127.0.0.1:{copy.port}/events", options()
        )
        with pytest.raises(StoreUnavailable):
            await away.open()
        await away.aclose()


async def test_hosts_that_swallow_everything_do_not_keep_us_from_the_others(
    postgres: Postgres,
) -> None:
    """Each call has time for one silent host; the next call begins with another one."""
    with silent() as one, silent() as two:
        hosts = ",".join(f"127.0.0.1:{port}" for port in (one, two, postgres.port))
        seconds = timedelta(seconds=1)
        store = PostgresStore(
            f"postgresql://oncebridge@{hosts}/events?sslmode=disable",
            options(timeout=seconds, connect_timeout=seconds),
        )
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.claim(Wants.of([want(b"k")]))
        await store.open()
        await store.aclose()


@contextmanager
def silent() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


async def test_without_the_rights_it_is_told_which(own_server: Postgres) -> None:
    url = own_server.url.replace("oncebridge@", "guarded:pw@")
    await ask(own_server.url, "CREATE ROLE guarded LOGIN PASSWORD 'pw'", "SELECT 1")
    store = PostgresStore(url, PostgresOptions(schema="fresh"))
    with pytest.raises(ConfigError, match=r"permission denied.*oncebridge migrate --sql"):
        await store.migrate()
    await store.aclose()
    async with opened(own_server.url, schema="ours"):
        assert 'GRANT USAGE ON SCHEMA "ours" TO' in await refusal(url, schema="ours")
        await ask(
            own_server.url,
            "GRANT USAGE ON SCHEMA ours TO guarded",
            "GRANT SELECT ON ALL TABLES IN SCHEMA ours TO guarded",
            "GRANT INSERT ON ours.oncebridge_records TO guarded",
            "SELECT 1",
        )
        told = await refusal(url, schema="ours")
        assert 'GRANT UPDATE, DELETE ON "ours"."oncebridge_records" TO "guarded"' in told
        await ask(
            own_server.url, "GRANT UPDATE, DELETE ON ours.oncebridge_records TO guarded", "SELECT 1"
        )
        async with opened(url, schema="ours", auto_migrate=False) as mine:
            (answer,) = await mine.claim(Wants.of([want(b"k")]))
            assert isinstance(answer, Claim)


async def test_a_wrong_password_is_told_and_never_shown(own_server: Postgres) -> None:
    await ask(own_server.url, "CREATE ROLE guarded LOGIN PASSWORD 'right'", "SELECT 1")
    told = await refusal(own_server.url.replace("oncebridge@", "guarded:hush-hush@"))
    assert "password authentication failed" in told
    assert "hush" not in told
    assert "does not exist" in await refusal(own_server.url.replace("/events", "/nothing"))


# --- migration -----------------------------------------------------------------------------


async def test_migrating_again_changes_nothing(postgres: Postgres) -> None:
    async with opened(postgres.url) as store:
        (claim,) = await store.claim(Wants.of([want(b"k")]))
        assert await store.migrate() == []
        await ask(postgres.url, store.migration_sql(), "SELECT 1")
        assert await store.commit(Commits.of([done(claim)])) == [Reply.COMMITTED]


async def test_many_may_migrate_at_once(postgres: Postgres) -> None:
    given = options(auto_migrate=False)
    stores = [PostgresStore(postgres.url, given) for _ in range(8)]
    told = await asyncio.gather(*(store.migrate() for store in stores))
    assert [f"created the table {given.schema}.oncebridge_records, layout 2"] in told
    for store in stores:
        await store.open()
        await store.aclose()


async def test_the_sql_can_be_run_by_hand(postgres: Postgres) -> None:
    given = options(auto_migrate=False, table="my_records")
    store = PostgresStore(postgres.url, given)
    psql = shutil.which("psql", path=str(postgres.programs))
    subprocess.run(  # noqa: ASYNC221 - nobody else is waiting
        [psql, postgres.url, "-q", "-v", "ON_ERROR_STOP=1", "-f", "-"],
        input=store.migration_sql().encode(),
        check=True,
        capture_output=True,
    )
    await store.open()
    assert isinstance((await store.claim(Wants.of([want(b"k")])))[0], Claim)
    await store.aclose()


async def test_another_layout_is_refused(postgres: Postgres) -> None:
    async with opened(postgres.url) as store:
        set_to = f"UPDATE {store.layout.versions} SET version = "
        await ask(postgres.url, set_to + "0", "SELECT 1")
        told = await refusal(postgres.url, schema=store.layout.schema)
        assert (
            "has layout 0; this oncebridge needs layout 2, complete; run `oncebridge migrate`"
            in told
        )
        async with opened(postgres.url, schema=store.layout.schema):
            pass
        await ask(postgres.url, set_to + "3", "SELECT 1")
        told = await refusal(postgres.url, schema=store.layout.schema)
        assert "which a newer oncebridge wrote" in told
        with pytest.raises(ConfigError, match="made by a newer oncebridge"):
            await store.migrate()


async def test_functions_of_an_older_layout_are_replaced(postgres: Postgres) -> None:
    """One with other parameters would stay, and a call would not know which of the two is meant."""
    async with opened(postgres.url) as store:
        (claim,) = await store.claim(Wants.of([want(b"k")]))
        await ask(
            postgres.url,
            f"CREATE FUNCTION {store.layout.named('commit')}"
            "(a bytea[], b bytea[], c smallint[], d bigint[], e bigint[], f bytea[], g bigint) "
            "RETURNS integer LANGUAGE sql AS 'SELECT 1'",
            f"UPDATE {store.layout.versions} SET version = 1",
            "SELECT 1",
        )
        assert await store.migrate() == [f"updated the table {store.layout.shown}, layout 2"]
        assert await store.commit(Commits.of([done(claim)])) == [Reply.COMMITTED]


async def test_functions_that_are_replaced_under_way_are_found_again(postgres: Postgres) -> None:
    async with opened(postgres.url, connections=1) as store:
        (claim,) = await store.claim(Wants.of([want(b"k")]))
        commit = store.layout.named("commit")
        await ask(
            postgres.url,
            f"DROP FUNCTION {commit}",
            store.migration_sql(),
            "SELECT 1",
        )
        assert isinstance((await store.claim(Wants.of([want(b"l")])))[0], Claim)
        assert await store.commit(Commits.of([done(claim)])) == [Reply.COMMITTED]


async def test_a_function_that_is_gone_is_told(postgres: Postgres) -> None:
    async with opened(postgres.url) as store:
        await ask(postgres.url, f"DROP FUNCTION {store.layout.named('extend')}", "SELECT 1")
        with pytest.raises(StoreError, match="run `oncebridge migrate`"):
            await store.extend(Extensions.of([Extension(b"k", b"t", 1)]))
        with pytest.raises(ConfigError, match="run `oncebridge migrate`"):
            await PostgresStore(postgres.url, PostgresOptions(schema=store.layout.schema)).open()
        (done,) = await store.migrate()
        assert done.startswith("updated")
        assert await store.extend(Extensions.of([Extension(b"k", b"t", 1)])) == [Reply.FENCED]


# --- keeping house -------------------------------------------------------------------------


async def test_the_table_stays_flat_once_the_window_has_passed(postgres: Postgres) -> None:
    clock = ManualClock()
    async with opened(postgres.url, clock) as store:
        sizes = []
        for turn in range(12):
            wants = [want(b"%d/%d" % (turn, number)) for number in range(1000)]
            claims = await store.claim(Wants.of(wants))
            assert set(await store.commit(Commits.of([done(claim, 3000) for claim in claims]))) == {
                Reply.COMMITTED
            }
            clock.advance(1000)
            while await store.purge(500) >= 500:
                pass
            await ask(postgres.url, f"VACUUM {store.layout.named()}", "SELECT 1")
            ((rows, size),) = await ask(
                postgres.url,
                f"SELECT count(*), pg_total_relation_size('{store.layout.named()}') "
                f"FROM {store.layout.named()}",
            )
            sizes.append(size)
            assert rows <= 3000
        assert max(sizes[6:]) <= sizes[5] * 1.1


async def test_a_commit_touches_no_index(postgres: Postgres) -> None:
    async with opened(postgres.url) as store:
        for turn in range(10):
            wants = [want(b"%d/%d" % (turn, number)) for number in range(100)]
            await store.commit(
                Commits.of([done(claim) for claim in await store.claim(Wants.of(wants))])
            )
    await gone(postgres, store)
    ((updated, beside),) = await ask(
        postgres.url,
        "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables "
        f"WHERE relid = '{store.layout.named()}'::regclass",
    )
    assert (updated, beside) == (1000, 1000)


async def test_purging_waits_for_nobody(postgres: Postgres) -> None:
    clock = ManualClock()
    async with opened(postgres.url, clock) as store:
        await store.claim(
            Wants.of([want(b"a", lease_ms=1, keep_ms=0), want(b"b", lease_ms=1, keep_ms=0)])
        )
        clock.advance(10)
        other = await asyncpg.connect(postgres.url)
        async with other.transaction():
            await other.execute(f"SELECT FROM {store.layout.named()} WHERE key = 'a' FOR UPDATE")
            assert await asyncio.wait_for(store.purge(), 2) == 1
        assert await store.purge() == 1
        await other.close()


async def test_purging_goes_round_the_table_in_steps(postgres: Postgres) -> None:
    clock = ManualClock()
    async with opened(postgres.url, clock) as store:
        for turn in range(3):
            await store.claim(
                Wants.of(
                    [
                        want(b"%d/%d" % (turn, number), lease_ms=1, keep_ms=0)
                        for number in range(2000)
                    ]
                )
            )
        clock.advance(10)
        removed = [await store.purge(300)]
        assert 300 <= removed[0] < 1500
        while removed[-1]:
            removed.append(await store.purge(300))
        assert sum(removed) == 6000
        assert len(removed) > 4
        assert await ask(postgres.url, f"SELECT FROM {store.layout.named()}") == []
        assert await store.purge() == 0


async def test_what_was_carried_over_is_recognised(postgres: Postgres) -> None:
    """Some stores keep only the head of a generation."""
    clock = ManualClock()
    generation = fresh()
    async with opened(postgres.url, clock) as store:
        record = Record(
            b"k", b"", generation[:8], clock() + 100, 1, b"", Fate.DEAD, b"m", 0, clock() + 100
        )
        assert await store.load([record]) == [Reply.REMEMBERED]
        asked = [Commit(b"k", generation, Fate.DELIVERED, 1)]
        assert await store.commit(Commits.of(asked)) == [Reply.ALREADY]
        assert await store.commit(Commits.of([Commit(b"k", b"x" * 16, Fate.DEAD, 1)])) == [
            Reply.FENCED
        ]


async def test_a_scan_sees_every_key(postgres: Postgres) -> None:
    keys = [b"", b"\x00", b"k" * 1000, b"k" * 1001, b"k" * 10_000, *(b"%d" % n for n in range(40))]
    async with opened(postgres.url) as store:
        await store.claim(Wants.of([want(key) for key in keys]))
        found, place = await store.scan(limit=7)
        while place:
            more, place = await store.scan(place, limit=7)
            found += more
        assert sorted(record.key for record in found) == sorted(keys)


# --- outages -------------------------------------------------------------------------------


async def test_a_restart_is_survived(own_server: Postgres) -> None:
    async with opened(own_server.url) as store:
        (claim,) = await store.claim(Wants.of([want(b"k")]))
        own_server.stop()
        with pytest.raises(StoreUnavailable):
            await store.claim(Wants.of([want(b"l")]))
        own_server.start()
        assert await store.commit(Commits.of([done(claim)])) == [Reply.COMMITTED]
        own_server.kill()
        own_server.start()
        assert isinstance((await store.claim(Wants.of([want(b"k")])))[0], Duplicate)


async def test_a_primary_that_becomes_read_only_is_an_outage(own_server: Postgres) -> None:
    async with opened(own_server.url) as store:
        await store.claim(Wants.of([want(b"k")]))
        for state in ("on", "off"):
            await ask(
                own_server.url,
                f"ALTER SYSTEM SET default_transaction_read_only = {state}",
                "SELECT pg_reload_conf()",
            )
            await until(
                own_server.url,
                f"SELECT 1 WHERE current_setting('default_transaction_read_only') = '{state}'",
            )
            if state == "on":
                with pytest.raises(StoreUnavailable, match="25006"):
                    await store.claim(Wants.of([want(b"l")]))
        assert isinstance((await store.claim(Wants.of([want(b"l")])))[0], Claim)


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    url = f"postgresql://someone:hush@127.0.0.1:{free_port()}/db"
    store = PostgresStore(url, options())
    for call in (
        store.open,
        store.migrate,
        lambda: store.claim(Wants.of([want(b"k")])),
        store.purge,
    ):
        with pytest.raises(StoreUnavailable) as caught:
            await call()
        assert "hush" not in str(caught.value)
    await store.aclose()


@pytest.mark.full
async def test_a_server_that_is_silent_is_left_in_time(own_server: Postgres) -> None:
    async with opened(own_server.url, timeout=timedelta(seconds=1)) as store:
        await store.claim(Wants.of([want(b"k")]))
        own_server.freeze()
        loop = asyncio.get_running_loop()
        for ask_for in (b"l", b"m"):
            began = loop.time()
            with pytest.raises(StoreUnavailable, match="within 1s"):
                await store.claim(Wants.of([want(ask_for)]))
            assert loop.time() - began < 3
        own_server.thaw()
        assert isinstance((await store.claim(Wants.of([want(b"n")])))[0], Claim)


async def test_a_call_that_is_broken_off_leaves_nothing_behind(postgres: Postgres) -> None:
    async with opened(postgres.url, connections=1) as store:
        await store.claim(Wants.of([want(b"k", lease_ms=1)]))
        other = await asyncpg.connect(postgres.url)
        await asyncio.sleep(0.05)
        async with other.transaction():
            await other.execute(f"SELECT FROM {store.layout.named()} WHERE key = 'k' FOR UPDATE")
            waiting = asyncio.create_task(store.claim(Wants.of([want(b"k")])))
            blocked = (
                "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
                f"AND query LIKE '%{store.layout.schema}%'"
            )
            await until(postgres.url, blocked)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            # The one connection is free again at once, and the server gives the statement up.
            assert isinstance((await store.claim(Wants.of([want(b"l")])))[0], Claim)
            await until(postgres.url, blocked, some=False)
        assert isinstance((await store.claim(Wants.of([want(b"k")])))[0], Claim)
        await other.close()


async def test_what_was_not_reached_has_no_answer(postgres: Postgres) -> None:
    async with opened(postgres.url, timeout=timedelta(seconds=2)) as store:
        claims = await store.claim(Wants.of([want(b"%04d" % number) for number in range(1200)]))
        other = await asyncpg.connect(postgres.url)
        async with other.transaction():
            await other.execute(f"SELECT FROM {store.layout.named()} WHERE key = '0700' FOR UPDATE")
            answers = await store.commit(Commits.of([done(claim) for claim in claims]))
        assert answers[:500] == [Reply.COMMITTED] * 500
        assert {type(answer) for answer in answers[500:]} == {NoAnswer}
        # The server is asked to give up the second part; the lock may have come free just before.
        again = await store.commit(Commits.of([done(claim) for claim in claims]))
        assert again[:500] == [Reply.ALREADY] * 500
        assert again[500:1000] in ([Reply.ALREADY] * 500, [Reply.COMMITTED] * 500)
        assert again[1000:] == [Reply.COMMITTED] * 200
        await other.close()


async def test_a_statement_that_the_server_gave_up_is_run_again(postgres: Postgres) -> None:
    """The first run prepares it, the second one is on the connection that is idle then."""
    async with opened(postgres.url, connections=1) as store:
        place = store.layout.schema
        await ask(
            postgres.url,
            f"CREATE SEQUENCE {place}.runs",
            f"CREATE FUNCTION {place}.run() RETURNS bigint LANGUAGE plpgsql AS $$ "
            f"DECLARE run bigint := nextval('{place}.runs'); BEGIN "
            "IF run IN (2, 3) THEN RAISE 'beaten' USING ERRCODE = 'deadlock_detected'; END IF; "
            "RETURN run; END $$",
            "SELECT 1",
        )
        assert await store.pool.fetch(f"SELECT {place}.run()") == [(1,)]
        assert await store.pool.fetch(f"SELECT {place}.run()") == [(4,)]


async def test_an_idle_connection_is_left_in_time_too(postgres: Postgres) -> None:
    async with opened(postgres.url, connections=1, timeout=timedelta(seconds=1)) as store:
        sleep = "SELECT pg_sleep($1)"
        await store.pool.fetch(sleep, 0.0)
        began = asyncio.get_running_loop().time()
        with pytest.raises(NoReply, match="no answer within 1s"):
            await store.pool.fetch(sleep, 30.0)
        assert asyncio.get_running_loop().time() - began < 3
        assert isinstance((await store.claim(Wants.of([want(b"k")])))[0], Claim)
        await until(
            postgres.url,
            "SELECT FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'SELECT pg_sleep(%'",
            some=False,
        )


async def test_there_are_never_more_connections_than_allowed(postgres: Postgres) -> None:
    async with opened(postgres.url + "?application_name=counted", connections=2) as store:
        most = 0

        async def watch() -> None:
            nonlocal most
            found = "SELECT FROM pg_stat_activity WHERE application_name = 'counted'"
            while True:
                most = max(most, len(await ask(postgres.url, found)))

        watching = asyncio.create_task(watch())
        for _ in range(10):
            await asyncio.gather(*(store.claim(Wants.of([want(fresh())])) for _ in range(20)))
        await asyncio.sleep(0.2)
        watching.cancel()
    assert 1 <= most <= 2


async def test_all_connections_in_use_is_an_outage_not_a_wait_for_ever(postgres: Postgres) -> None:
    async with opened(postgres.url, connections=1, timeout=timedelta(seconds=1)) as store:
        minute = timedelta(minutes=1)
        held = asyncio.create_task(store.pool.run(lambda _: asyncio.sleep(60), within=minute))
        await asyncio.sleep(0.2)
        with pytest.raises(StoreUnavailable, match="all connections were in use"):
            await store.claim(Wants.of([want(b"k")]))
        held.cancel()
        await asyncio.wait([held])
        assert isinstance((await store.claim(Wants.of([want(b"k")])))[0], Claim)


@pytest.mark.full
async def test_too_many_connections_for_the_server_is_an_outage() -> None:
    with running({"max_connections": "5", "superuser_reserved_connections": "0"}) as server:
        held = [await asyncpg.connect(server.url) for _ in range(5)]
        store = PostgresStore(server.url, options())
        with pytest.raises(StoreUnavailable, match="53300"):
            await store.open()
        for connection in held:
            await connection.close()
        await asyncio.sleep(0.2)
        await store.open()
        await store.aclose()


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # a loop took it along
def test_it_may_be_used_on_one_loop_after_another(postgres: Postgres) -> None:
    store = PostgresStore(postgres.url, options())

    async def use(key: bytes) -> None:
        await store.open()
        assert isinstance((await store.claim(Wants.of([want(key)])))[0], Claim)

    asyncio.run(use(b"one"))
    asyncio.run(use(b"two"))

    async def close() -> None:
        await use(b"three")
        await store.aclose()
        with pytest.raises(StoreUnavailable, match="has been closed"):
            await store.claim(Wants.of([want(b"four")]))

    asyncio.run(close())
    gc.collect()


# --- ways in ---------------------------------------------------------------------------------


async def test_a_unix_socket_is_a_way_in(postgres: Postgres) -> None:
    written = str(postgres.folder)
    for url in (
        f"postgresql://oncebridge@{written.replace('/', '%2F')}:{postgres.port}/events",
        f"postgresql://oncebridge@/events?host={written}&port={postgres.port}",
    ):
        async with opened(url) as store:
            assert isinstance((await store.claim(Wants.of([want(b"k")])))[0], Claim)


async def test_a_pooler_that_was_restarted_is_found_again(postgres: Postgres) -> None:
    with bouncing(postgres) as pooler:
        async with opened(pooler.url) as store:
            (claim,) = await store.claim(Wants.of([want(b"k")]))
            pooler.restart()
            assert await store.commit(Commits.of([done(claim)])) == [Reply.COMMITTED]


async def test_statements_are_not_named_behind_a_pooler(
    postgres: Postgres, pgbouncer: PgBouncer
) -> None:
    """Two processes would give the same name to different statements on one connection."""
    named = "SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'oncebridge%'"
    async with opened(postgres.url, connections=1) as store:
        await store.claim(Wants.of([want(b"k")]))
        ((count,),) = await store.pool.fetch(named)
        assert count > 0
    async with opened(pgbouncer.url, connections=1) as store:
        await store.claim(Wants.of([want(b"k")]))
        ((count,),) = await store.pool.fetch(named)
        assert count == 0


async def test_tls_is_asked_for_in_the_address(postgres: Postgres) -> None:
    with folder() as place:
        shutil.copy(TLS / "localhost.pem", place)
        (place / "localhost.pem").chmod(0o644)
        settings = {
            "client_tls_sslmode": "require",
            "client_tls_cert_file": str(place / "localhost.pem"),
            "client_tls_key_file": str(place / "localhost.pem"),
        }
        with bouncing(postgres, settings) as pooler:
            ca = f"sslrootcert={TLS / 'ca.pem'}"
            for query in ("sslmode=require", f"sslmode=verify-full&{ca}"):
                async with opened(f"{pooler.url}?{query}") as store:
                    assert isinstance((await store.claim(Wants.of([want(b"k")])))[0], Claim)
            other = f"sslrootcert={TLS / 'stranger.pem'}"
            told = await refusal(f"{pooler.url}?sslmode=verify-full&{other}")
            assert "its certificate" in told
            plain = PostgresStore(f"{pooler.url}?sslmode=disable")
            with pytest.raises(StoreUnavailable, match="SSL required"):
                await plain.open()
            await plain.aclose()


# --- addresses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "hosts", "database"),
    [
        ("postgresql://u:p@h:6000/d", [("h", 6000)], "d"),
        ("postgresql://u:p@h", [("h", 5432)], "u"),
        ("postgres://h/d", [("h", 5432)], "d"),
        ("postgresql://h,i:7000/d", [("h", 5432), ("i", 7000)], "d"),
        ("postgresql://[::1]:6000,[fe80::1]/d", [("::1", 6000), ("fe80::1", 5432)], "d"),
        ("postgresql:///d", [], "d"),
        ("postgresql:///d?host=/run/pg,h&port=1,2", [("/run/pg", 1), ("h", 2)], "d"),
        ("postgresql:///?host=h&port=9&dbname=d", [("h", 9)], "d"),
        ("postgresql://%2Frun%2Fpg/a%2Fb", [("/run/pg", 5432)], "a/b"),
    ],
)
def test_addresses_are_read_as_libpq_reads_them(
    url: str, hosts: list[tuple[str, int]], database: str
) -> None:
    address, given = read_address(url)
    assert list(address.hosts) == hosts
    assert address.database == database
    assert given == {}


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("postgresql:d", "write it as postgresql://"),
        ("postgresql://u:hush#hush@h/d", "write a # in the password as %23"),
        ("postgresql://u:hush@hush@h/d", "write an @ in the password as %40"),
        ("postgresql://u:hush/hush@h/d", "a port must be a number|a / in the password|NAME:PORT"),
        ("postgresql://u:hush?hush@h/d", "write a \\? in the password as %3F"),
        ("postgresql://u:hush@h:x/d", "write a host as NAME:PORT"),
        ("postgresql://u:hush@h:99999/d", "a port must be a number from 1 to 65535"),
        ("postgresql://u:hush@h:0/d", "a port must be a number from 1 to 65535"),
        ("postgresql://u:hush@h,,i/d", "write a host as NAME:PORT"),
        ("postgresql://u:hush@[::1/d", "its host or port cannot be read"),
        ("postgresql://u:hush@h/d?sslmod=require", "did you mean 'sslmode'"),
        ("postgresql://u:hush@h/d?target_session_attrs=readwrite", "did you mean 'read-write'"),
        ("postgresql://u:hush@h/d?sslrootcert=/nowhere.pem", "sslrootcert: there is no such file"),
        ("postgresql:///d?host=a,b&port=1,2,3", "3 ports for 2 hosts"),
        ("postgresql://u:hush@h/d?statement_timeout=5", "there is no parameter"),
    ],
)
def test_an_address_that_cannot_be_read_is_told_without_its_secret(url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        PostgresStore(url)
    assert "hush" not in str(caught.value)


async def test_what_the_driver_refuses_of_an_address_is_told() -> None:
    store = PostgresStore("postgresql://u:hush@127.0.0.1:1/d?sslmode=perhaps")
    with pytest.raises(ConfigError, match="sslmode") as caught:
        await store.open()
    assert "hush" not in str(caught.value)
    await store.aclose()


def test_table_and_schema_stand_in_the_address_or_the_options() -> None:
    store = PostgresStore("postgresql://h/d?table=a&schema=b")
    assert store.layout.shown == "b.a"
    store = PostgresStore("postgresql://h/d?table=a", PostgresOptions(schema="c", table="a"))
    assert store.layout.shown == "c.a"
    with pytest.raises(ConfigError, match="'x', but the address has 'a'") as caught:
        PostgresStore("postgresql://h/d?table=a", PostgresOptions(table="x"))
    assert caught.value.where == "table"


@pytest.mark.parametrize("name", ["", "a b", 'a"b', "a;b", "1a", "ä", "a" * 51, "a$$b", "a.b"])
def test_names_are_plain(name: str) -> None:
    with pytest.raises(ConfigError):
        PostgresStore("postgresql://h/d", PostgresOptions(table=name or "-"))


def test_a_time_of_nothing_is_refused() -> None:
    for name in ("timeout", "connect_timeout"):
        with pytest.raises(ConfigError, match="must be more than 0") as caught:
            PostgresStore("postgresql://h/d", PostgresOptions(**{name: timedelta(0)}))
        assert caught.value.where == name
    with pytest.raises(ConfigError, match="at least one connection"):
        PostgresStore("postgresql://h/d", PostgresOptions(connections=0))


def test_it_is_found_by_its_address() -> None:
    place = StorePlace.of("postgresql://u:hush@h/d", schema="once", connections=2)
    assert isinstance(place.opened, PostgresStore)
    assert place.opened.layout.shown == "once.oncebridge_records"
    assert "hush" not in str(place)


async def test_a_server_without_fsync_is_told_without_the_password(
    postgres: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    host = postgres.url.rpartition("@")[2]
    async with opened(f"postgresql://oncebridge:s3cret@{host}"):  # the test server trusts anybody
        pass
    (record,) = [r for r in caplog.records if r.message == "oncebridge.postgres_without_fsync"]
    assert record.server == f"postgresql://***@{host}"
