"""Redis and Postgres with each fault planted; and that nothing is ever made by looking."""

import asyncio
import shlex
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.check.setups import codes, found_in, only, setup_of
from tests.servers import postgres as servers
from tests.servers.postgres import PgBouncer, Postgres, ask, bouncing, schema, standby
from tests.servers.redis import (
    RedisCluster,
    RedisSentinel,
    RedisServer,
    eventually,
    running,
)

from oncebridge.base.clock import system_clock
from oncebridge.check.finding import Checkup, Severity
from oncebridge.check.redis import check_memory
from oncebridge.check.run import Check, in_thread, run_all
from oncebridge.check.stores import check_store
from oncebridge.errors import ConfigError, StoreError
from oncebridge.stores.postgres.store import PostgresOptions, PostgresStore
from oncebridge.stores.redis.store import RedisStore

_numbers = count()
MIB = 1024**2

STALE_ROWS = """
INSERT INTO {table} SELECT 1, 1, 0, 1, 1, int4send(n), '', '', '', '', ''
FROM generate_series(1, 3000) AS n
"""


# --- Redis --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def healthy_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Start a server as it should be; tests that change it put it back."""
    folder = tmp_path_factory.mktemp("healthy")
    server = RedisServer(folder, appendfsync="everysec", maxmemory_policy="noeviction")
    with running(server):
        # As one in use: it has our scripts, which take more memory than an empty server does.
        asyncio.run(opened_once(server.url))
        yield server


async def opened_once(url: str) -> None:
    async with RedisStore(url) as store:
        await store.now_ms()


@pytest.fixture
def set_to(healthy_redis):
    """Change settings of the server, until the test ends."""
    before: dict[str, object] = {}

    def change(**settings: object) -> None:
        for name, value in settings.items():
            name = name.replace("_", "-")  # noqa: PLW2901
            (value_before,) = healthy_redis.ask("CONFIG", "GET", name).values()
            before.setdefault(name, value_before)
            healthy_redis.ask("CONFIG", "SET", name, value)

    yield change
    for name, value in before.items():
        healthy_redis.ask("CONFIG", "SET", name, value)


async def of_redis(tmp_path: Path, url: str, options: str = "", **more) -> Checkup:
    return await found_in(setup_of(tmp_path, store=f'{{ url = "{url}"{options} }}'), **more)


async def test_a_healthy_redis_is_in_order_and_nothing_is_put_there(tmp_path, healthy_redis):
    def state() -> tuple:
        info = healthy_redis.info()
        return healthy_redis.ask("DBSIZE"), info.get("number_of_cached_scripts")

    before = state()
    checkup = await of_redis(tmp_path, healthy_redis.url)
    assert (codes(checkup), checkup.not_checked) == ([], [])
    told = [one.what for one in checkup.passed if one.subject == f"store {healthy_redis.url}"]
    assert len(told) == 2
    assert state() == before


@pytest.mark.parametrize(
    "fault",
    [
        ({"maxmemory_policy": "allkeys-lru"}, "redis-eviction", Severity.ERROR),
        ({"maxmemory_policy": "volatile-ttl"}, "redis-eviction", Severity.ERROR),
        ({"appendonly": "no"}, "redis-persistence", Severity.WARNING),
        ({"appendonly": "no", "save": "900 1"}, "redis-persistence", Severity.WARNING),
        ({"appendfsync": "no"}, "redis-fsync", Severity.WARNING),
        ({"maxmemory": "1mb"}, "redis-memory", Severity.WARNING),
        ({"min_replicas_to_write": "1"}, "redis-replicas", Severity.ERROR),
    ],
)
async def test_each_fault_of_redis_is_found(tmp_path, healthy_redis, set_to, fault):
    settings, code, severity = fault
    set_to(**settings)
    finding = only(await of_redis(tmp_path, healthy_redis.url))
    assert (finding.code, finding.severity) == (code, severity)
    assert finding.subject == f"store {healthy_redis.url}"


def done(server: RedisServer, fix: str) -> None:
    """Do what a fix says to do by redis-cli."""
    for line in fix.splitlines()[1:]:
        program, *words = shlex.split(line)
        assert program == "redis-cli"
        server.ask(*words)


@pytest.mark.parametrize(
    "settings",
    [
        {"maxmemory_policy": "allkeys-lru"},
        {"appendonly": "no"},
        {"appendfsync": "no"},
        {"maxmemory": "1mb"},
    ],
)
async def test_what_a_finding_says_to_do_puts_it_right(tmp_path, healthy_redis, set_to, settings):
    set_to(**settings)
    done(healthy_redis, only(await of_redis(tmp_path, healthy_redis.url)).fix)
    if "maxmemory" in settings and codes(await of_redis(tmp_path, healthy_redis.url)):
        # An idle server takes about 1 MB, and more for a moment: then the advice grows with it.
        done(healthy_redis, only(await of_redis(tmp_path, healthy_redis.url)).fix)
    assert codes(await of_redis(tmp_path, healthy_redis.url)) == []


@pytest.mark.parametrize(
    ("used", "most", "advised"),
    [
        (14_336 * MIB, 16_384 * MIB, "32gb"),
        (900 * MIB, 1000 * MIB, "2gb"),
        (300 * MIB, 256 * MIB, "600mb"),
        (int(0.9 * MIB), MIB, "2mb"),
    ],
)
def test_more_memory_is_more_than_there_is(used, most, advised):
    checkup = Checkup()
    info = {"used_memory": str(used), "maxmemory": str(most)}
    check_memory(info | {"total_system_memory": str(20 << 30)}, "store x", checkup)
    assert only(checkup).fix.splitlines()[1:] == [f"redis-cli CONFIG SET maxmemory {advised}"]
    assert "if the host has it (20.0 GiB in all)" in only(checkup).fix


async def test_snapshots_are_told_from_nothing_at_all(tmp_path, healthy_redis, set_to):
    set_to(appendonly="no")
    assert "no persistence" in only(await of_redis(tmp_path, healthy_redis.url)).seen
    set_to(save="900 1")
    assert "snapshots only" in only(await of_redis(tmp_path, healthy_redis.url)).seen


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lfu"])
async def test_what_is_an_error_here_is_what_the_store_refuses(
    tmp_path, healthy_redis, set_to, policy
):
    set_to(maxmemory_policy=policy)
    setup = setup_of(tmp_path, store=f'"{healthy_redis.url}"')
    seen = only(await found_in(setup)).seen
    store = setup_of(tmp_path, store=f'"{healthy_redis.url}"').config.store.opened
    with pytest.raises(ConfigError) as told:
        await store.open()
    await store.aclose()
    assert seen.removeprefix("it ") in str(told.value)


async def test_replicas_that_are_waited_for_have_to_be_there(tmp_path, healthy_redis):
    checkup = await of_redis(tmp_path, healthy_redis.url, ", wait_replicas = 1")
    assert only(checkup).code == "redis-replicas"
    assert "wait_replicas asks for 1" in only(checkup).seen


async def test_a_replica_is_no_store_and_its_primary_may_wait_for_it(tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    primary = RedisServer(folders[0], appendfsync="everysec")
    with running(primary):
        replica = RedisServer(
            folders[1], appendfsync="everysec", replicaof=("127.0.0.1", primary.port)
        )
        with running(replica):
            eventually(lambda: primary.info()["connected_slaves"] == 1)
            assert codes(await of_redis(tmp_path, replica.url)) == ["redis-replica"]
            finding = only(await of_redis(tmp_path, primary.url))
            assert (finding.code, finding.severity) == ("redis-failover", Severity.NOTE)
            waiting = await of_redis(tmp_path, primary.url, ", wait_replicas = 1")
            assert codes(waiting) == []


async def test_a_disk_that_redis_cannot_write_to_is_an_error(tmp_path):
    folder = tmp_path / "redis"
    (folder / "dump.rdb").mkdir(parents=True)  # where the snapshot would go
    server = RedisServer(folder, appendfsync="everysec")
    with running(server):
        server.ask("SET", "some", "thing")
        server.ask("BGSAVE")
        eventually(lambda: server.info()["rdb_last_bgsave_status"] == "err")
        assert codes(await of_redis(tmp_path, server.url)) == ["redis-disk"]


async def test_who_may_not_ask_for_settings_is_told_what_it_takes(tmp_path, healthy_redis):
    user = f"worker{next(_numbers)}"
    healthy_redis.ask(
        *("ACL", "SETUSER", user, "on", ">pw", "~ob:*"),
        *("+evalsha", "+script|load", "+mget", "+set", "+del", "+time", "+info"),
    )
    url = healthy_redis.url.replace("://", f"://{user}:pw@")
    checkup = await of_redis(tmp_path, url)
    assert codes(checkup) == ["secret-written"]  # in this very file
    (blind,) = checkup.not_checked
    assert "+config|get" in blind.needs
    assert "pw@" not in blind.subject


@pytest.mark.parametrize("wrong", ["password", "port"])
async def test_a_redis_that_cannot_be_reached_is_an_error(tmp_path, healthy_redis, wrong):
    url = healthy_redis.url.replace("://", "://nobody:canary@") if wrong == "password" else ""
    checkup = await of_redis(tmp_path, url or "redis://127.0.0.1:1")
    finding = next(one for one in checkup.findings if one.code == "store-unreachable")
    assert finding.severity == Severity.ERROR
    assert "canary" not in repr(checkup.findings)


async def test_clocks_that_differ_are_noted_as_redis_goes_by_its_own(tmp_path, healthy_redis):
    url = healthy_redis.url
    checkup = await of_redis(tmp_path, url, clock=lambda: system_clock() + 60_000)
    finding = only(checkup)
    assert (finding.code, finding.severity) == ("clock-skew", Severity.NOTE)
    assert "behind this host's" in finding.seen


async def test_a_cluster_is_looked_at_server_by_server(tmp_path, redis_cluster):
    checkup = await of_redis(tmp_path, redis_cluster.url)
    assert codes(checkup) == ["redis-fsync"] * 3  # the tests' cluster is a quick one
    subjects = {one.subject for one in checkup.findings}
    assert subjects == {f"store {redis_cluster.url} at {s.host}" for s in redis_cluster.servers}


async def test_an_address_says_whether_it_is_a_cluster(tmp_path, redis_cluster, healthy_redis):
    node = await of_redis(tmp_path, redis_cluster.servers[0].url)
    assert "redis-cluster" in codes(node)
    single = await of_redis(tmp_path, f"redis+cluster://{healthy_redis.host}")
    assert codes(single) == ["store-unreachable"]
    assert "not a cluster" in only(single).seen


async def test_a_cluster_that_lacks_slots_is_an_error(tmp_path):
    cluster = RedisCluster(tmp_path, 1, appendfsync="everysec")
    with running(cluster):
        assert codes(await of_redis(tmp_path, cluster.url)) == []
        server = cluster.servers[0]
        server.ask("CLUSTER", "DELSLOTS", 7)
        eventually(lambda: b"cluster_state:fail" in server.ask("CLUSTER", "INFO"))
        assert codes(await of_redis(tmp_path, cluster.url)) == ["redis-cluster-state"]


async def test_sentinels_have_to_agree(tmp_path, healthy_redis):
    folder = tmp_path / "sentinel"
    folder.mkdir()
    sentinel = RedisSentinel(folder, healthy_redis.port, "pw")
    with running(sentinel):
        options = ', sentinel_password = "env:SENTINEL"'
        url = f"redis+sentinel://{sentinel.host}/orders"

        async def found(url: str) -> Checkup:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SENTINEL", "pw")
                return await of_redis(tmp_path, url, options)

        assert codes(await found(url)) == []
        finding = only(await found(url.replace("/orders", ",127.0.0.1:1/orders")))
        assert (finding.code, finding.severity) == ("redis-sentinel", Severity.WARNING)
        assert "127.0.0.1:1" in finding.seen


# --- Postgres -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound_postgres() -> Iterator[Postgres]:
    """Start a server as it should be, which writes to its disk."""
    with servers.running({"fsync": "on"}) as server:
        yield server


async def of_postgres(tmp_path: Path, url: str, name: str, options: str = "", **more) -> Checkup:
    store = f'{{ url = "{url}", schema = "{name}"{options} }}'
    return await found_in(setup_of(tmp_path, store=store), **more)


async def prepared(server: Postgres) -> str:
    """Make the tables in a schema of one's own, and name it."""
    name = schema()
    store = PostgresStore(server.url, PostgresOptions(schema=name))
    await store.migrate()
    await store.aclose()
    return name


@asynccontextmanager
async def role(server: Postgres, name: str, *, rights: bool = True) -> AsyncIterator[str]:
    """Make a role that may use the schema *name*, and give its address."""
    who = f"role{next(_numbers)}"
    table = f'"{name}".oncebridge_records'
    grants = [f'GRANT USAGE ON SCHEMA "{name}" TO {who}']
    grants += [f'GRANT SELECT ON "{name}".oncebridge_schema TO {who}']
    grants += [f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {who}"] if rights else []
    await ask(server.url, f"CREATE ROLE {who} LOGIN", *grants, "SELECT 1")
    yield server.url.replace("oncebridge@", f"{who}@")
    await ask(server.url, f"DROP OWNED BY {who}", f"DROP ROLE {who}", "SELECT 1")


async def test_a_sound_postgres_is_in_order(tmp_path, sound_postgres):
    name = await prepared(sound_postgres)
    async with role(sound_postgres, name) as url:
        checkup = await of_postgres(tmp_path, url, name)
    assert (codes(checkup), checkup.not_checked) == ([], [])
    told = " ".join(one.what for one in checkup.passed)
    for what in ("accepts and keeps writes", "connections are left", "layout 2", "clock"):
        assert what in told


@pytest.mark.parametrize("auto_migrate", ["false", "true"])
async def test_a_table_that_is_missing_is_found_and_not_made(
    tmp_path, sound_postgres, auto_migrate
):
    def schemas() -> str:
        return "SELECT schema_name FROM information_schema.schemata ORDER BY 1"

    before = await ask(sound_postgres.url, schemas())
    options = f", auto_migrate = {auto_migrate}"
    checkup = await of_postgres(tmp_path, sound_postgres.url, schema(), options)
    if auto_migrate == "true":
        assert codes(checkup) == []
    else:
        assert only(checkup).code == "postgres-table"
        assert "oncebridge migrate" in only(checkup).fix
    assert await ask(sound_postgres.url, schemas()) == before


@pytest.mark.parametrize(
    ("plant", "code", "severity"),
    [
        (
            "UPDATE {schema}.oncebridge_schema SET version = 0",
            "postgres-table",
            Severity.ERROR,
        ),
        (
            "UPDATE {schema}.oncebridge_schema SET version = 99",
            "postgres-table-newer",
            Severity.ERROR,
        ),
        ("ALTER TABLE {table} SET UNLOGGED", "postgres-unlogged", Severity.ERROR),
        (
            "ALTER TABLE {table} SET (autovacuum_enabled = false)",
            "postgres-autovacuum",
            Severity.WARNING,
        ),
        (STALE_ROWS, "postgres-unpurged", Severity.WARNING),
    ],
)
async def test_each_fault_of_a_table_is_found(tmp_path, sound_postgres, plant, code, severity):
    name = await prepared(sound_postgres)
    planted = plant.format(schema=f'"{name}"', table=f'"{name}".oncebridge_records')
    await ask(sound_postgres.url, planted, "SELECT 1")
    finding = only(await of_postgres(tmp_path, sound_postgres.url, name))
    assert (finding.code, finding.severity) == (code, severity)


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ("SET synchronous_commit = off", "postgres-synchronous-commit"),
        ("SET default_transaction_isolation = 'serializable'", "postgres-isolation"),
        ("SET default_transaction_read_only = on", "postgres-read-only"),
        ("CONNECTION LIMIT 2", "postgres-connections"),
    ],
)
async def test_each_fault_of_a_role_is_found(tmp_path, sound_postgres, setting, code):
    name = await prepared(sound_postgres)
    async with role(sound_postgres, name) as url:
        who = url.partition("://")[2].partition("@")[0]
        await ask(sound_postgres.url, f"ALTER ROLE {who} {setting}", "SELECT 1")
        finding = only(await of_postgres(tmp_path, url, name))
        assert finding.code == code
        if finding.fix.startswith("As a database administrator"):
            await granted(sound_postgres, finding.fix)
            assert codes(await of_postgres(tmp_path, url, name)) == []
        if code == "postgres-connections":
            assert finding.fix.splitlines()[1:] == ['store = { url = "…", connections = 1 }']
            less = await of_postgres(tmp_path, url, name, ", connections = 1")
            assert codes(less) == []
    assert bool(finding.fix.splitlines()[1:])  # something to run or to write


async def granted(server: Postgres, fix: str) -> None:
    """Run what a fix says that an administrator runs, statement by statement."""
    first, *statements = fix.splitlines()
    assert first == "As a database administrator, run:"
    await ask(server.url, *statements, "SELECT 1")


async def test_what_an_administrator_is_to_run_puts_it_right(tmp_path):
    with servers.running({"fsync": "on"}) as server:
        name = await prepared(server)
        await ask(server.url, "ALTER SYSTEM SET autovacuum = off", "SELECT pg_reload_conf()")
        (vacuum,) = (await of_postgres(tmp_path, server.url, name)).findings
        assert vacuum.code == "postgres-autovacuum"
        await granted(server, vacuum.fix)
        assert codes(await of_postgres(tmp_path, server.url, name)) == []


async def test_rights_that_are_missing_are_named(tmp_path, sound_postgres):
    name = await prepared(sound_postgres)
    async with role(sound_postgres, name, rights=False) as url:
        finding = only(await of_postgres(tmp_path, url, name))
        assert finding.code == "postgres-rights"
        assert "GRANT SELECT, INSERT, UPDATE, DELETE ON" in finding.fix
        who = url.partition("://")[2].partition("@")[0]
        await granted(sound_postgres, finding.fix)
        assert codes(await of_postgres(tmp_path, url, name)) == []
        revoked = f'REVOKE USAGE ON SCHEMA "{name}" FROM {who}'
        await ask(sound_postgres.url, revoked, "SELECT 1")
        finding = only(await of_postgres(tmp_path, url, name))
        assert finding.code == "postgres-rights"
        await granted(sound_postgres, finding.fix)
        assert codes(await of_postgres(tmp_path, url, name)) == []


async def test_what_the_server_does_not_write_to_disk_is_found(tmp_path, postgres):
    name = await prepared(postgres)
    assert codes(await of_postgres(tmp_path, postgres.url, name)) == ["postgres-fsync"]


async def test_a_standby_is_no_store(tmp_path, sound_postgres):
    name = await prepared(sound_postgres)
    with standby(sound_postgres) as copy:
        found = codes(await of_postgres(tmp_path, copy.url, name))
    assert found == ["postgres-fsync", "postgres-standby"]  # the copy is a quick one


async def test_a_pooler_keeps_transactions_together_or_is_an_error(
    tmp_path, sound_postgres, pgbouncer: PgBouncer, postgres
):
    name = await prepared(postgres)
    checkup = await of_postgres(tmp_path, pgbouncer.url, name)
    assert codes(checkup) == ["postgres-fsync"]
    assert any("pooler" in one.what for one in checkup.passed)
    other = await prepared(sound_postgres)
    with bouncing(sound_postgres, {"pool_mode": "statement"}) as pooler:
        assert codes(await of_postgres(tmp_path, pooler.url, other)) == ["postgres-pooler"]


async def test_a_sink_that_is_a_database_is_looked_at_too(tmp_path, sound_postgres):
    sink = f'{{ url = "{sound_postgres.url}", schema = "{schema()}" }}'
    finding = only(await found_in(setup_of(tmp_path, sink=sink)))
    assert finding.code == "postgres-table"
    assert finding.subject.startswith("sink postgresql://")


async def test_a_sink_that_cannot_be_reached_is_a_warning(tmp_path):
    sink = '"postgresql://oncebridge@127.0.0.1:1/events"'
    finding = only(await found_in(setup_of(tmp_path, sink=sink)))
    assert (finding.code, finding.severity) == ("sink-unreachable", Severity.WARNING)


async def test_a_postgres_that_hangs_is_given_up(tmp_path):
    with servers.running() as server:
        name = await prepared(server)
        server.freeze()
        try:
            started = time.monotonic()
            options = ', timeout = "1s", connect_timeout = "1s"'
            checkup = await of_postgres(tmp_path, server.url, name, options)
            assert time.monotonic() - started < 10
        finally:
            server.thaw()
    assert codes(checkup) == ["store-unreachable"]


# --- what takes too long, and what breaks -------------------------------------------------------


async def test_a_server_that_never_answers_is_given_up(tmp_path):
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    door = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = door.sockets[0].getsockname()[1]
    started = time.monotonic()
    options = ', timeout = "500ms", connect_timeout = "500ms"'
    checkup = await of_redis(tmp_path, f"redis://127.0.0.1:{port}", options)
    door.close()
    assert codes(checkup) == ["store-unreachable"]
    assert time.monotonic() - started < 10


async def test_a_check_that_hangs_keeps_what_it_found_and_the_others_go_on():
    async def slow(checkup: Checkup) -> None:
        checkup.report_passed("slow", "the first half")
        await asyncio.Event().wait()

    async def broken(checkup: Checkup) -> None:
        raise ValueError("canary")

    async def refused(checkup: Checkup) -> None:
        raise StoreError("no")

    async def quick(checkup: Checkup) -> None:
        checkup.report_passed("quick", "all of it")

    checks = [
        Check("slow", slow, 0.2),
        Check("broken", broken),
        Check("refused", refused),
        Check("quick", quick),
    ]
    whole = await run_all(checks)
    assert [one.subject for one in whole.passed] == ["slow", "quick"]
    assert [one.subject for one in whole.not_checked] == ["slow", "broken", "refused"]
    assert "ValueError" in whole.not_checked[1].needs
    assert "canary" not in repr(whole.not_checked)


async def test_a_disk_that_hangs_keeps_what_was_found_and_nobody_waiting():
    hang = threading.Event()

    def slow(checkup: Checkup) -> None:
        checkup.report_passed("disk", "the first file")
        hang.wait(30)

    def broken(checkup: Checkup) -> None:
        raise OSError("canary")

    try:
        checks = [Check("disk", in_thread(slow), 0.2), Check("other", in_thread(broken))]
        whole = await run_all(checks)
    finally:
        hang.set()
    assert [one.what for one in whole.passed] == ["the first file"]
    assert [one.subject for one in whole.not_checked] == ["disk", "other"]
    assert "OSError" in whole.not_checked[1].needs


async def test_a_store_that_nobody_knows_could_not_be_looked_at(tmp_path):
    setup = setup_of(tmp_path)
    place = type(setup.config.store)("other://x", None)
    checkup = Checkup()
    other = replace(setup, config=replace(setup.config, store=place))
    await check_store(other, checkup, clock=system_clock)
    assert [one.subject for one in checkup.not_checked] == ["store other://x"]
