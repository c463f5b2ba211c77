"""The Redis store where servers refuse, go, move, fall behind, or come back as something else."""

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Self

import pytest
from msgspec.structs import replace
from tests.http.targets import TLS, on_both_loops, server_tls
from tests.servers.redis import (
    RedisCluster,
    RedisSentinel,
    RedisServer,
    between,
    eventually,
    prefix,
    running,
)

from oncebridge.base.clock import SystemDice
from oncebridge.base.secrets import Secret
from oncebridge.errors import ConfigError, StoreError, StoreUnavailable
from oncebridge.events.key import Part
from oncebridge.stores.api import (
    Busy,
    Claim,
    ClaimAnswer,
    Commit,
    Commits,
    Duplicate,
    Extension,
    Extensions,
    Fate,
    Memories,
    Memory,
    NoAnswer,
    Release,
    Releases,
    Reply,
    Want,
    Wants,
)
from oncebridge.stores.redis.scripts import FORM, FORM_KEY
from oncebridge.stores.redis.servers import slot_of
from oncebridge.stores.redis.store import RedisOptions, RedisStore

HASTY = {"timeout": timedelta(seconds=1), "connect_timeout": timedelta(seconds=1)}


def want(*keys: bytes, hash: bytes = b"", **more) -> Want:  # noqa: A002 - as in `Part`
    token, generation = SystemDice().tokens(2)
    given = {"lease_ms": 60_000, "keep_ms": 60_000, **more}
    return Want(tuple(Part(key, hash) for key in keys), token, generation, **given)


def done(claim: ClaimAnswer, part: int = 0) -> Commit:
    assert isinstance(claim, Claim), claim
    held = claim.held[part]
    return Commit(held.key, held.generation, Fate.DELIVERED, 60_000)


def fresh() -> bytes:
    return os.urandom(32)


def here(server: RedisServer | RedisCluster, **options) -> RedisStore:
    return RedisStore(server.url, RedisOptions(prefix=prefix(), **options))


async def delivered(store: RedisStore, *keys: bytes) -> list[Commit]:
    commits = [done(claim) for claim in await store.claim(Wants.of([want(key) for key in keys]))]
    assert await store.commit(Commits.of(commits)) == [Reply.COMMITTED] * len(keys)
    return commits


async def works(store: RedisStore) -> None:
    await delivered(store, fresh())


async def goes(store: RedisStore) -> None:
    """Work until that fails."""
    while True:
        await works(store)


async def scanned(store: RedisStore) -> set[bytes]:
    records, place = await store.scan(limit=50)
    while place:
        more, place = await store.scan(place, limit=50)
        records += more
    return {record.key for record in records}


async def comes_back(store: RedisStore, within_s: float = 30) -> None:
    """Try until it works; that it does not is `StoreUnavailable`, and nothing else."""
    ends = time.monotonic() + within_s
    while True:
        try:
            (answer,) = await store.claim(Wants.of([want(fresh())]))
        except StoreUnavailable:
            answer = NoAnswer("")
        if isinstance(answer, Claim):
            return
        assert time.monotonic() < ends, "it never came back"
        await asyncio.sleep(0.05)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that may be mistreated."""
    server = RedisServer(tmp_path)
    with running(server):
        yield server


# --- what a server must be ------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        *("allkeys-lru", "allkeys-lfu", "allkeys-random"),
        *("volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl"),
    ],
)
async def test_a_server_that_evicts_is_refused(tmp_path: Path, policy: str) -> None:
    """Every record has an end, so volatile policies evict them as surely as the others."""
    server = RedisServer(tmp_path, maxmemory_policy=policy)
    with running(server):
        with pytest.raises(ConfigError) as caught:
            await here(server).open()
        assert f"maxmemory-policy {policy}" in str(caught.value)
        assert "set it to noeviction" in str(caught.value)


async def test_a_server_that_comes_back_evicting_is_refused(server: RedisServer) -> None:
    async with here(server) as store:
        await works(store)
        server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        await works(store)  # nobody looks while a connection stands
        server.ask("CLIENT", "KILL", "TYPE", "normal")
        await asyncio.sleep(0.05)
        with pytest.raises(StoreError, match="noeviction"):
            await store.claim(Wants.of([want(fresh())]))


async def test_a_replica_is_refused(tmp_path: Path, redis_server: RedisServer) -> None:
    replica = RedisServer(tmp_path, replicaof=("127.0.0.1", redis_server.port))
    with (
        running(replica),
        pytest.raises(ConfigError, match="is a replica; use the address of the primary"),
    ):
        await here(replica).open()


async def test_a_cluster_and_a_single_server_are_told_apart(
    redis_cluster: RedisCluster, redis_server: RedisServer
) -> None:
    with pytest.raises(ConfigError, match=r"write redis\+cluster://"):
        await here(redis_cluster.servers[0]).open()
    with pytest.raises(ConfigError, match="write redis://"):
        await RedisStore(f"redis+cluster://{redis_server.host}").open()


async def test_a_server_that_keeps_nothing_is_told_once(
    tmp_path: Path, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    forgetful = RedisServer(tmp_path, appendonly="no")
    with running(forgetful), caplog.at_level(logging.WARNING, "oncebridge"):
        async with here(redis_server) as store:
            await works(store)
        assert not caplog.records
        async with here(forgetful) as store:
            await store.open()
            forgetful.ask("CLIENT", "KILL", "TYPE", "normal")
            await comes_back(store)
    (told,) = caplog.records
    assert (told.message, told.server) == ("oncebridge.redis_without_aof", forgetful.host)


@on_both_loops
async def test_what_is_no_redis_is_refused(redis_server: RedisServer) -> None:
    async with between(redis_server.port) as middle:
        middle.says = b"HTTP/1.1 400 Bad Request\r\n\r\n"
        store = RedisStore(f"redis://127.0.0.1:{middle.port}")
        with pytest.raises(StoreUnavailable, match="this is a Redis server"):
            await store.open()
        await store.aclose()


@pytest.mark.parametrize(
    "said", [b"+OK\r\n", b"*0\r\n", b"$-1\r\n", b":7\r\n", b"*2\r\n:7\r\n+x\r\n"]
)
async def test_what_is_no_answer_to_the_question_is_refused(
    redis_server: RedisServer, said: bytes
) -> None:
    key, options = fresh(), RedisOptions(prefix=prefix(), **HASTY)
    token = SystemDice().tokens(1)[0]
    async with between(redis_server.port) as middle:
        store = RedisStore(f"redis://127.0.0.1:{middle.port}", options)
        calls = {
            "open": store.open,
            "claim": lambda: store.claim(Wants.of([want(key)])),
            "commit": lambda: store.commit(Commits.of([Commit(key, token, Fate.DEAD, 1)])),
            "release": lambda: store.release(Releases.of([Release(key, token)])),
            "extend": lambda: store.extend(Extensions.of([Extension(key, token, 1)])),
            "remember": lambda: store.remember(Memories.of([Memory(key, token, Fate.DEAD, 1)])),
            "peek": lambda: store.peek([key]),
            "forget": lambda: store.forget([key]),
            "scan": store.scan,
            "now_ms": store.now_ms,
        }
        for name, call in calls.items():
            for is_connected in (False, True):
                middle.says = b""
                store._servers.drop_connections()
                if is_connected:
                    await store.peek([key])
                middle.says = said
                with pytest.raises((StoreError, ConfigError)):
                    print(name, await call())
        middle.says = b""
        await works(store)
        await store.aclose()


@on_both_loops
async def test_nobody_there_is_unavailable(tmp_path: Path) -> None:
    for url in ("redis://127.0.0.1:1", f"redis+unix://{tmp_path}/none", "redis+cluster://[::1]:1"):
        store = RedisStore(url)
        with pytest.raises(StoreUnavailable):
            await store.open()
        with pytest.raises(StoreUnavailable):
            await store.claim(Wants.of([want(fresh())]))
        await store.aclose()


async def test_a_closed_store_says_so(redis_server: RedisServer) -> None:
    store = here(redis_server)
    await store.open()
    await store.aclose()
    for call in (
        store.open(),
        store.claim(Wants.of([want(fresh())])),
        store.now_ms(),
        store.scan(),
    ):
        with pytest.raises(StoreError, match="has been closed"):
            await call


# --- who may, and how one gets there --------------------------------------------------------

PERMISSIONS = (
    *("+evalsha", "+script|load", "+info", "+scan", "+select", "+wait"),
    *("+mget", "+set", "+del", "+time"),
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), requirepass="s3cret/word")
    with running(server):
        server.ask("ACL", "SETUSER", "ann", "on", ">p@ss/w:rd", "~ob:*", *PERMISSIONS)
        server.ask("ACL", "SETUSER", "bob", "on", ">pw", "~ob:*", "+info", "+evalsha")
        server.ask("ACL", "SETUSER", "cy", "on", ">pw", "~other:*", *PERMISSIONS)
        yield server


@pytest.mark.parametrize("login", [":s3cret%2Fword", "default:s3cret/word", "ann:p%40ss%2Fw%3Ard"])
async def test_a_password_in_the_address_opens(guarded: RedisServer, login: str) -> None:
    url = f"redis://{login}@{guarded.host}/1"
    async with RedisStore(url, RedisOptions(wait_replicas=0)) as store:
        key = fresh()
        await delivered(store, key)
        assert isinstance((await store.claim(Wants.of([want(key)])))[0], Duplicate)
        claim = (await store.claim(Wants.of([want(fresh())])))[0]
        assert isinstance(claim, Claim)
        held = claim.held[0].key
        assert await store.extend(Extensions.of([Extension(held, claim.token, 1000)])) == [
            Reply.EXTENDED
        ]
        assert await store.release(Releases.of([Release(held, claim.token)])) == [Reply.RELEASED]
        memory = Memory(fresh(), fresh()[:16], Fate.DEAD, 1000)
        assert await store.remember(Memories.of([memory])) == [Reply.REMEMBERED]
        assert await store.forget([memory.key]) == [True]
        assert key in {record.key for record in (await store.scan())[0]}
        assert await store.now_ms() > 0


@pytest.mark.parametrize(
    ("login", "told"),
    [
        ("", "NOAUTH"),
        (":wr0ngword@", "WRONGPASS"),
        ("ann:wr0ngword@", "WRONGPASS"),
        ("bob:pw@", "NOPERM"),
        ("cy:pw@", "NOPERM"),
    ],
)
async def test_whoever_may_not_is_told_at_the_start(
    guarded: RedisServer, login: str, told: str
) -> None:
    store = RedisStore(f"redis://{login}{guarded.host}")
    with pytest.raises(ConfigError, match=told) as caught:
        await store.open()
    assert "wr0ng" not in str(caught.value)
    await store.aclose()


@on_both_loops
async def test_a_socket_leads_to_the_same_records(server: RedisServer) -> None:
    key = fresh()
    async with RedisStore(f"redis+unix://{server.socket}?db=2") as store:
        await delivered(store, key)
    async with RedisStore(f"{server.url}/2") as store:
        assert isinstance((await store.claim(Wants.of([want(key)])))[0], Duplicate)
    async with RedisStore(server.url) as store:
        assert isinstance((await store.claim(Wants.of([want(key)])))[0], Claim)


CA, CLIENT = str(TLS / "ca.pem"), str(TLS / "client.pem")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (server_tls(), RedisOptions(ca_file=CA)),
        (server_tls(asks_for_certificate=True), RedisOptions(ca_file=CA, cert_file=CLIENT)),
        (server_tls("elsewhere"), RedisOptions(ca_file=CA, tls_name="elsewhere.example")),
    ],
)
@on_both_loops
async def test_tls_keeps_a_conversation_private(
    redis_server: RedisServer, theirs: ssl.SSLContext, ours: RedisOptions
) -> None:
    """The server at hand speaks no TLS, so somebody does it for it."""
    async with (
        between(redis_server.port, theirs) as middle,
        RedisStore(f"rediss://localhost:{middle.port}", ours) as store,
    ):
        await works(store)
        assert len(await store.claim(Wants.of([want(fresh()) for _ in range(2000)]))) == 2000


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (server_tls(), RedisOptions()),
        (server_tls("elsewhere"), RedisOptions(ca_file=CA)),
        (server_tls("stranger"), RedisOptions(ca_file=CA)),
    ],
)
@on_both_loops
async def test_a_certificate_that_proves_nothing_is_refused(
    redis_server: RedisServer, theirs: ssl.SSLContext, ours: RedisOptions
) -> None:
    async with between(redis_server.port, theirs) as middle:
        store = RedisStore(f"rediss://localhost:{middle.port}", ours)
        with pytest.raises(ConfigError, match="certificate verify failed"):
            await store.open()
        await store.aclose()


@on_both_loops
async def test_whoever_shows_no_certificate_does_not_get_in(redis_server: RedisServer) -> None:
    async with between(redis_server.port, server_tls(asks_for_certificate=True)) as middle:
        store = RedisStore(f"rediss://localhost:{middle.port}", RedisOptions(ca_file=CA))
        with pytest.raises(StoreUnavailable):
            await store.open()
        await store.aclose()


# --- names ----------------------------------------------------------------------------------


async def test_prefixes_do_not_see_each_other(redis_server: RedisServer) -> None:
    names = ["a", "a*", "a?", "[a]", "a\\", "^a", "é", "{a}"]
    stores = [RedisStore(redis_server.url, RedisOptions(prefix=name)) for name in names]
    keys = [b":b", b"*", b"\\", b"\xff", b"\r\n", b"{}", b""]
    for store in stores:
        await delivered(store, *keys)
    for store in stores:
        assert sorted(await scanned(store)) == sorted(keys)
        assert await store.forget(keys) == [True] * len(keys)
        await store.aclose()


# --- the form of the records -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["redis_server", "redis_cluster"])
async def test_a_store_notes_the_form_of_its_records_once(
    kind: str, request: pytest.FixtureRequest
) -> None:
    server: RedisServer | RedisCluster = request.getfixturevalue(kind)
    async with here(server) as store:
        await store.open()
        assert await scanned(store) == set()
        (name,) = names_of(store, FORM_KEY)
        if isinstance(server, RedisServer):
            assert server.ask("GET", name) == b"%d" % FORM
            assert server.ask("PTTL", name) == -1  # it stays
            server.ask("SET", name, "0")  # an older one is left to this version
            await store.open()
            assert server.ask("GET", name) == b"0"


@pytest.mark.parametrize("newer", [b"%d" % (FORM + 1), b"2030", b"later", b"", b"\xff"])
async def test_records_of_a_newer_form_are_refused(redis_server: RedisServer, newer: bytes) -> None:
    store = here(redis_server)
    (name,) = names_of(store, FORM_KEY)
    redis_server.ask("SET", name, newer)
    with pytest.raises(ConfigError, match=r"by a newer version .* upgrade this worker"):
        await store.open()
    assert redis_server.ask("GET", name) == newer
    await store.aclose()


# --- memory ---------------------------------------------------------------------------------


async def test_a_done_key_takes_less_than_200_bytes(server: RedisServer) -> None:
    count = 100_000
    memo = b'["3f1c8a52-1c2b-4d3e-8f9a-0123456789ab",1763200000000]'
    async with RedisStore(server.url) as store:
        before = server.info()["used_memory"]
        for _ in range(count // 2000):
            claims = await store.claim(Wants.of([want(fresh(), memo=memo) for _ in range(2000)]))
            await store.commit(Commits.of([done(claim) for claim in claims]))
        each = (server.info()["used_memory"] - before) / count
        (record,) = await store.peek([done(claims[0]).key])
    assert record is not None
    assert record.memo == memo
    assert server.ask("DBSIZE") == count + 1  # and the form of all
    assert each <= 200


async def test_redis_removes_what_is_past_keeping(redis_server: RedisServer) -> None:
    async with here(redis_server) as store:
        keys = [fresh() for _ in range(50)]
        await store.remember(
            Memories.of([Memory(key, fresh()[:16], Fate.DELIVERED, 50) for key in keys])
        )
        names = [store._prefix + key for key in keys]
        ends = redis_server.ask("PTTL", names[0])
        assert -2 <= ends <= 50
        await asyncio.sleep(0.1)
        assert redis_server.ask("EXISTS", *names) == 0
        assert await store.purge() == 0


# --- one round trip -------------------------------------------------------------------------


async def test_a_batch_is_one_round_trip(redis_server: RedisServer) -> None:
    async with between(redis_server.port) as middle:
        async with RedisStore(f"redis://127.0.0.1:{middle.port}") as store:
            before = middle.turns
            claims = await store.claim(Wants.of([want(fresh()) for _ in range(200)]))
            assert middle.turns == before + 1
            await store.commit(Commits.of([done(claim) for claim in claims]))
            assert middle.turns == before + 2
        assert middle.connections == 1


async def test_a_batch_of_many_rules_and_callers_is_one_round_trip(
    redis_server: RedisServer,
) -> None:
    pairs = [
        want(fresh(), fresh(), lease_ms=10_000 + at, memo=b"%d" % at, hash=fresh()[: at % 33])
        for at in range(100)
    ]
    async with (
        between(redis_server.port) as middle,
        RedisStore(f"redis://127.0.0.1:{middle.port}") as store,
    ):
        before = middle.turns
        claims = [*await store.claim(Wants.of(pairs))]
        assert middle.turns == before + 1
        commits = [
            replace(done(claim, part), window_ms=20_000 + at, memo=None if part else b"%d" % at)
            for at, claim in enumerate(claims)
            for part in (0, 1)
        ]
        assert await store.commit(Commits.of(commits)) == [Reply.COMMITTED] * 200
        assert middle.turns == before + 2


async def test_duplicates_write_nothing_while_their_window_is_fixed(server: RedisServer) -> None:
    """Not even a new expiry: what is written goes to the disk and to the replicas."""
    async with here(server) as store:
        keys = [fresh() for _ in range(50)]
        again = Wants.of([want(key, hash=bytes(at % 2 * 32)) for at, key in enumerate(keys)])
        claims = await store.claim(again)
        await store.commit(Commits.of([done(claim) for claim in claims]))
        before = server.info()["rdb_changes_since_last_save"]
        assert {type(answer) for answer in await store.claim(again)} == {Duplicate}
        assert server.info()["rdb_changes_since_last_save"] == before


async def test_no_script_sees_more_than_a_few_hundred_records(server: RedisServer) -> None:
    async with RedisStore(server.url) as store:
        server.ask("CONFIG", "RESETSTAT")
        wants = [want(fresh(), fresh(), fresh()) for _ in range(1000)]
        assert all(isinstance(answer, Claim) for answer in await store.claim(Wants.of(wants)))
        ran = server.ask("INFO", "commandstats")["cmdstat_evalsha"]
        assert ran["calls"] == 16  # of 66 wants, with 198 parts


# --- servers that go and come ---------------------------------------------------------------


@on_both_loops
async def test_a_server_that_goes_and_comes_back_is_found_again(server: RedisServer) -> None:
    async with here(server, **HASTY) as store:
        key = fresh()
        await delivered(store, key)
        server.kill()
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                await store.claim(Wants.of([want(fresh())]))
        server.start()
        await comes_back(store)
        assert isinstance(
            (await store.claim(Wants.of([want(key)])))[0], Duplicate
        )  # it was on disk


@on_both_loops
async def test_whoever_waits_when_a_server_goes_is_told(server: RedisServer) -> None:
    async with here(server, **HASTY) as store:
        server.process.freeze()
        waiting = [asyncio.create_task(store.claim(Wants.of([want(fresh())]))) for _ in range(20)]
        await asyncio.sleep(0.1)
        server.kill()
        told = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(error) for error in told} == {StoreUnavailable}
        server.start()
        await comes_back(store)


@on_both_loops
async def test_a_server_that_hangs_is_given_up_in_time(server: RedisServer) -> None:
    async with here(server, **HASTY) as store:
        await works(store)
        server.process.freeze()
        for _ in range(2):  # first on a connection that stands, then on a new one
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match="within 1 s"):
                await store.claim(Wants.of([want(fresh())]))
            assert 0.9 < time.monotonic() - began < 5
        server.process.thaw()
        await comes_back(store)


async def test_many_who_find_a_server_hanging_wait_no_longer_than_one(server: RedisServer) -> None:
    async with here(server, **HASTY) as store:
        server.process.freeze()
        store._servers._node.drop()
        began = time.monotonic()
        told = await asyncio.gather(
            *[store.claim(Wants.of([want(fresh())])) for _ in range(30)], return_exceptions=True
        )
        assert {type(error) for error in told} == {StoreUnavailable}
        assert time.monotonic() - began < 10
        server.process.thaw()


@on_both_loops
async def test_a_connection_that_was_closed_meanwhile_is_not_used(server: RedisServer) -> None:
    async with here(server) as store:
        for _ in range(5):
            await works(store)
            server.ask("CLIENT", "KILL", "TYPE", "normal")
            await asyncio.sleep(0.05)
        await works(store)


@on_both_loops
async def test_a_connection_that_died_while_we_were_frozen_is_not_used(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with here(server) as store:
        await works(store)
        monkeypatch.setattr("oncebridge.stores.redis.connection._LOOK_AFTER_S", 0)
        server.ask("CLIENT", "KILL", "TYPE", "normal")
        time.sleep(0.3)  # noqa: ASYNC251 - the loop must not come round to it
        await works(store)


async def test_a_connection_that_rested_for_long_is_replaced(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        between(redis_server.port) as middle,
        RedisStore(f"redis://127.0.0.1:{middle.port}") as store,
    ):
        await works(store)
        assert middle.connections == 1
        monkeypatch.setattr("oncebridge.stores.redis.connection._LOOK_AFTER_S", 0.2)
        monkeypatch.setattr("oncebridge.stores.redis.connection._REST_S", 0.2)
        await asyncio.sleep(0.3)
        await works(store)
        assert middle.connections == 2


async def test_scripts_are_told_again_to_a_server_that_forgot_them(server: RedisServer) -> None:
    async with here(server) as store:
        await works(store)
        server.ask("SCRIPT", "FLUSH")
        claims = await store.claim(Wants.of([want(fresh()) for _ in range(1000)]))
        assert all(isinstance(claim, Claim) for claim in claims)
        server.ask("SCRIPT", "FLUSH")
        assert (
            await store.commit(Commits.of([done(claim) for claim in claims]))
            == [Reply.COMMITTED] * 1000
        )


@on_both_loops
async def test_whoever_is_cancelled_leaves_no_answer_to_others(redis_server: RedisServer) -> None:
    async with here(redis_server, connections=1) as store:
        for number in range(200):
            cancelled = [
                asyncio.create_task(store.claim(Wants.of([want(fresh())]))) for _ in range(3)
            ]
            await asyncio.sleep(0 if number % 2 else 0.0003)
            for task in cancelled:
                task.cancel()
            mine = want(fresh(), memo=b"%d" % number)
            (answer,) = await store.claim(Wants.of([mine]))
            assert isinstance(answer, Claim)
            assert answer.token == mine.token
            (record,) = await store.peek([mine.parts[0].key])
            assert record is not None
            assert record.memo == b"%d" % number
            await asyncio.gather(*cancelled, return_exceptions=True)


@on_both_loops
async def test_a_claim_whose_answer_was_lost_is_our_own(redis_server: RedisServer) -> None:
    async with between(redis_server.port) as middle:
        options = RedisOptions(prefix=prefix())
        async with RedisStore(f"redis://127.0.0.1:{middle.port}", options) as store:
            several = [want(fresh()), want(fresh(), fresh())]
            middle.swallows = True
            with pytest.raises(StoreUnavailable):
                await store.claim(Wants.of(several))
            middle.swallows = False
            for asked, answer in zip(several, await store.claim(Wants.of(several)), strict=True):
                assert isinstance(answer, Claim)
                assert answer.token == asked.token
                assert {held.attempts for held in answer.held} == {1}
            other = await store.claim(Wants.of([want(several[1].parts[0].key)]))
            assert isinstance(other[0], Busy)


async def test_a_commit_whose_answer_was_lost_counts(redis_server: RedisServer) -> None:
    async with (
        between(redis_server.port) as middle,
        RedisStore(f"redis://127.0.0.1:{middle.port}") as store,
    ):
        (claim,) = await store.claim(Wants.of([want(fresh())]))
        middle.swallows = True
        with pytest.raises(StoreUnavailable):
            await store.commit(Commits.of([done(claim)]))
        middle.swallows = False
        assert await store.commit(Commits.of([done(claim)])) == [Reply.ALREADY]


# --- servers that refuse for a while --------------------------------------------------------


async def test_a_full_server_is_unavailable_and_takes_no_half_of_a_claim(
    server: RedisServer,
) -> None:
    async with here(server) as store:
        key = fresh()
        await delivered(store, key)
        server.ask("CONFIG", "SET", "maxmemory", "100kb")
        pair = want(fresh(), fresh())
        with pytest.raises(StoreUnavailable, match="OOM"):
            await store.claim(Wants.of([pair]))
        server.ask("CONFIG", "SET", "maxmemory", "0")
        assert await store.peek([part.key for part in pair.parts]) == [None, None]
        assert isinstance((await store.claim(Wants.of([pair])))[0], Claim)


async def test_a_server_that_became_a_replica_is_unavailable(
    server: RedisServer, redis_server: RedisServer
) -> None:
    async with here(server) as store:
        await works(store)
        server.ask("REPLICAOF", "127.0.0.1", redis_server.port)
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                await store.claim(Wants.of([want(fresh())]))
        server.ask("REPLICAOF", "NO", "ONE")
        await comes_back(store)


async def test_a_busy_server_is_unavailable(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, lua_time_limit=50)
    with running(server):
        async with here(server) as store:
            await works(store)
            endless = asyncio.create_task(
                asyncio.to_thread(server.ask, "EVAL", "while true do end", 0)
            )
            with pytest.raises(StoreUnavailable, match="BUSY"):
                await goes(store)
            server.ask("SCRIPT", "KILL")
            await asyncio.wait([endless])
            assert endless.exception() is not None
            await comes_back(store)


async def test_a_value_that_is_no_record_is_an_error_of_its_own(server: RedisServer) -> None:
    async with RedisStore(server.url) as store:
        newer = b"\xe0" + (await store.now_ms() + 60_000).to_bytes(6, "big") + bytes(40)
        server.ask("SET", b"ob:newer", newer)
        good, bad = await store.claim(Wants.of([want(b"good"), want(b"newer")]))
        assert isinstance(good, Claim)
        assert isinstance(bad, NoAnswer)
        assert server.ask("GET", "ob:newer") == newer
        server.ask("SET", b"ob:short", b"\x00")
        with pytest.raises(StoreError) as caught:
            await store.claim(Wants.of([want(b"short")]))
        assert not isinstance(caught.value, StoreUnavailable)


# --- replicas -------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[RedisServer, RedisServer]]:
    for name in ("primary", "replica"):
        (tmp_path / name).mkdir()
    primary = RedisServer(tmp_path / "primary", repl_diskless_sync_delay=0)
    replica = RedisServer(tmp_path / "replica", replicaof=("127.0.0.1", primary.port))
    with running(primary, replica):
        eventually(lambda: replica.info()["master_link_status"] == "up")
        yield primary, replica


async def test_what_no_replica_has_does_not_count_yet(
    pair: tuple[RedisServer, RedisServer],
) -> None:
    primary, replica = pair
    options = {"wait_replicas": 1, "wait_timeout": timedelta(milliseconds=200)}
    async with here(primary, **options) as store:
        await works(store)
        claims = await store.claim(Wants.of([want(fresh()) for _ in range(3)]))
        replica.process.freeze()
        commits = [done(claim) for claim in claims]
        memory = Memory(fresh(), fresh()[:16], Fate.DELIVERED, 60_000)
        for answer in (
            *await store.commit(Commits.of(commits)),
            *await store.remember(Memories.of([memory])),
        ):
            assert isinstance(answer, NoAnswer)
            assert "only 0 of 1 replicas" in answer.reason
        store._servers._node.drop()  # another connection has to find out just the same
        assert {type(answer) for answer in await store.commit(Commits.of(commits))} == {NoAnswer}
        assert isinstance(
            (await store.claim(Wants.of([want(fresh())])))[0], Claim
        )  # claims do not wait
        replica.process.thaw()
        assert await store.commit(Commits.of(commits)) == [Reply.ALREADY] * 3
        assert await store.remember(Memories.of([memory])) == [Reply.KNOWN]


async def test_sentinel_leads_to_the_next_primary(
    tmp_path: Path, pair: tuple[RedisServer, RedisServer]
) -> None:
    primary, replica = pair
    sentinels = []
    for number in range(2):
        (tmp_path / f"s{number}").mkdir()
        sentinels.append(RedisSentinel(tmp_path / f"s{number}", primary.port, "wat/ch"))
    with running(*sentinels):
        one = sentinels[0]
        eventually(lambda: one.ask("SENTINEL", "REPLICAS", "orders"))
        hosts = ",".join(["127.0.0.1:1", *[each.host for each in sentinels]])
        options = RedisOptions(
            sentinel_password=Secret("wat/ch"),
            wait_replicas=1,
            wait_timeout=timedelta(milliseconds=500),
            connections=2,
            **HASTY,
        )
        async with RedisStore(f"redis+sentinel://{hosts}/orders", options) as store:
            keys = [fresh() for _ in range(20)]
            await delivered(store, *keys)
            primary.kill()
            with pytest.raises(StoreUnavailable):
                await store.claim(Wants.of([want(fresh())]))
            await comes_back(store)
            assert replica.info()["role"] == "master"
            answers = await store.claim(Wants.of([want(key) for key in keys]))
            assert {type(answer) for answer in answers} == {Duplicate}
        with pytest.raises(StoreUnavailable, match="does not know the service 'invoices'"):
            await RedisStore(f"redis+sentinel://{hosts}/invoices", options).open()
        with pytest.raises(StoreUnavailable, match="NOAUTH"):
            await RedisStore(f"redis+sentinel://{hosts}/orders").open()


# --- clusters -------------------------------------------------------------------------------


def in_slot(slot: int, beside: str) -> bytes:
    """Find a key whose name is in *slot*."""
    while True:
        key = fresh()
        if slot_of(f"{beside}:".encode() + key) == slot:
            return key


def names_of(store: RedisStore, *keys: bytes) -> list[bytes]:
    return [store._prefix + key for key in keys]


async def test_three_servers_share_the_work(redis_cluster: RedisCluster) -> None:
    async with here(redis_cluster) as store:
        keys = [fresh() for _ in range(300)]
        commits = await delivered(store, *keys)
        assert await store.commit(Commits.of(commits)) == [Reply.ALREADY] * 300
        answers = await store.claim(Wants.of([want(key) for key in keys]))
        assert {type(answer) for answer in answers} == {Duplicate}
        shares = [set(server.ask("KEYS", store._prefix + b"*")) for server in redis_cluster.servers]
        assert all(len(share) > 50 for share in shares)
        assert set().union(*shares) == set(names_of(store, *keys, FORM_KEY))
        assert await scanned(store) == set(keys)


async def test_parts_on_different_servers_are_claimed_together(redis_cluster: RedisCluster) -> None:
    async with here(redis_cluster) as store:
        groups = [[fresh() for _ in range(3)] for _ in range(40)]
        wants = Wants.of([want(*keys) for keys in groups] + [want(fresh())])
        claims = [*await store.claim(Wants.of(wants))]
        assert {type(claim) for claim in claims} == {Claim}
        tokens = [claim.token for claim in claims[:-1]]
        for keys, token in zip(groups, tokens, strict=True):
            assert [record and record.token for record in await store.peek(keys)] == [token] * 3
        others = await store.claim(Wants.of([want(fresh(), keys[1]) for keys in groups]))
        assert {type(answer) for answer in others} == {Busy}
        left = [answer.left_ms for answer in others]
        assert all(59_000 < ms <= 60_000 for ms in left)
        commits = [done(claim, part) for claim in claims[:-1] for part in range(3)]
        assert set(await store.commit(Commits.of(commits))) == {Reply.COMMITTED}
        again = await store.claim(Wants.of([want(*keys) for keys in groups]))
        assert {type(answer) for answer in again} == {Duplicate}


async def test_parts_of_one_slot_are_claimed_in_one_step(redis_cluster: RedisCluster) -> None:
    async with RedisStore(redis_cluster.url, RedisOptions(prefix=f"{{{prefix()}}}")) as store:
        for server in redis_cluster.servers:
            server.ask("CONFIG", "RESETSTAT")
        claims = await store.claim(Wants.of([want(fresh(), fresh()) for _ in range(50)]))
        assert {type(claim) for claim in claims} == {Claim}
        stats = [server.ask("INFO", "commandstats") for server in redis_cluster.servers]
        assert sum(told.get("cmdstat_evalsha", {"calls": 0})["calls"] for told in stats) == 1


async def test_a_slot_that_moved_is_found(redis_cluster: RedisCluster) -> None:
    async with here(redis_cluster) as store, here(redis_cluster) as late:
        key = fresh()
        slot = slot_of(*names_of(store, key))
        (claim,) = await store.claim(Wants.of([want(key)]))
        await late.open()
        with moving(redis_cluster, slot) as move:
            move.keys(store._prefix + key)
            move.finish()
        assert await store.commit(Commits.of([done(claim)])) == [Reply.COMMITTED]
        assert isinstance((await store.claim(Wants.of([want(key)])))[0], Duplicate)
        await works(late)


async def test_a_slot_that_is_moving_is_asked_for_on_both_sides(
    redis_cluster: RedisCluster,
) -> None:
    tag = prefix()
    async with RedisStore(redis_cluster.url, RedisOptions(prefix=f"{{{tag}}}")) as store:
        moved, staying, absent, *more = [fresh() for _ in range(10)]
        claims = await store.claim(Wants.of([want(moved), want(staying)]))
        with moving(redis_cluster, slot_of(tag.encode())) as move:
            move.keys(store._prefix + moved)
            for server in redis_cluster.servers:
                server.ask("SCRIPT", "FLUSH")
            wants = [want(key) for key in (moved, staying, absent, *more)]
            answers = await store.claim(Wants.of(wants))
            assert [type(answer) for answer in answers] == [Busy, Busy] + [Claim] * 8
            pair = want(staying, moved)
            with pytest.raises(StoreUnavailable):
                await store.claim(Wants.of([pair]))
            assert (
                await store.commit(Commits.of([done(claim) for claim in claims]))
                == [Reply.COMMITTED] * 2
            )
            there = await store.peek([moved, staying, absent])
            assert [record and record.fate for record in there] == [Fate.DELIVERED] * 2 + [None]
            move.keys(*names_of(store, staying))
            move.finish()
        assert isinstance((await store.claim(Wants.of([pair])))[0], Duplicate)


class moving:  # noqa: N801 - reads as a phrase
    """Have a slot on its way from the server that has it to the next one, and end that."""

    def __init__(self, cluster: RedisCluster, slot: int) -> None:
        self._cluster, self._slot = cluster, slot
        self._ids = [server.ask("CLUSTER", "MYID").decode() for server in cluster.servers]
        self._from = next(
            number
            for number, server in enumerate(cluster.servers)
            for owned in server.ask("CLUSTER", "SLOTS")
            if owned[0] <= slot <= owned[1] and owned[2][1] == server.port
        )
        self._to = (self._from + 1) % len(cluster.servers)

    def __enter__(self) -> Self:
        there, back = self._cluster.servers[self._to], self._cluster.servers[self._from]
        there.ask("CLUSTER", "SETSLOT", self._slot, "IMPORTING", self._ids[self._from])
        back.ask("CLUSTER", "SETSLOT", self._slot, "MIGRATING", self._ids[self._to])
        return self

    def keys(self, *names: bytes) -> None:
        there, back = self._cluster.servers[self._to], self._cluster.servers[self._from]
        for name in names:
            back.ask("MIGRATE", "127.0.0.1", there.port, name, 0, 5000)

    def finish(self) -> None:
        for number in (self._to, self._from):
            server = self._cluster.servers[number]
            server.ask("CLUSTER", "SETSLOT", self._slot, "NODE", self._ids[self._to])

    def __exit__(self, *exc: object) -> None:
        self.finish()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    """A cluster that may be mistreated."""
    cluster = RedisCluster(tmp_path, 3, cluster_require_full_coverage="no")
    with running(cluster):
        yield cluster


async def test_a_server_of_a_cluster_that_goes_takes_only_its_share(cluster: RedisCluster) -> None:
    async with here(cluster, **HASTY) as store:
        keys = [fresh() for _ in range(90)]
        await delivered(store, *keys)
        cluster.servers[1].kill()
        answers = await store.claim(Wants.of([want(key) for key in keys]))
        kinds = [type(answer) for answer in answers]
        assert kinds.count(NoAnswer) + kinds.count(Duplicate) == 90
        assert 10 < kinds.count(NoAnswer) < 50
        tiers = await store.claim(Wants.of([want(fresh(), fresh(), fresh()) for _ in range(20)]))
        assert {type(answer) for answer in tiers} == {Claim, NoAnswer}
        lost = [key for key, kind in zip(keys, kinds, strict=True) if kind is NoAnswer]
        with pytest.raises(StoreUnavailable):
            await store.peek(lost)
        cluster.servers[1].start()
        ends = time.monotonic() + 30
        while NoAnswer in kinds and time.monotonic() < ends:
            await asyncio.sleep(0.1)
            kinds = [
                type(answer) for answer in await store.claim(Wants.of([want(key) for key in keys]))
            ]
        assert kinds == [Duplicate] * 90


async def test_the_replica_of_a_server_that_goes_takes_its_place(cluster: RedisCluster) -> None:
    gone = cluster.servers[1]
    replica = cluster.replicate(gone)
    options = {"wait_timeout": timedelta(milliseconds=500), **HASTY}
    async with here(cluster, **options) as store:
        keys = [fresh() for _ in range(90)]
        await delivered(store, *keys)
        eventually(lambda: replica.ask("DBSIZE") == gone.ask("DBSIZE"))
        gone.kill()
        ends = time.monotonic() + 30
        kinds = {NoAnswer}
        while NoAnswer in kinds and time.monotonic() < ends:
            kinds = {
                type(answer) for answer in await store.claim(Wants.of([want(key) for key in keys]))
            }
            assert kinds <= {NoAnswer, Duplicate}
            await asyncio.sleep(0.1)
        assert kinds == {Duplicate}
    seeds = f"redis+cluster://{replica.host}"
    async with RedisStore(seeds, store.options) as another:
        assert isinstance((await another.claim(Wants.of([want(keys[0])])))[0], Duplicate)


async def test_a_replica_can_tell_where_the_others_are(cluster: RedisCluster) -> None:
    replica = cluster.replicate(cluster.servers[0])
    async with RedisStore(f"redis+cluster://{replica.host}") as store:
        claims = await store.claim(Wants.of([want(fresh()) for _ in range(60)]))
        assert {type(claim) for claim in claims} == {Claim}


async def test_a_cluster_that_is_down_is_unavailable(tmp_path: Path) -> None:
    cluster = RedisCluster(tmp_path, 3)
    with running(cluster):
        async with here(cluster, **HASTY) as store:
            await works(store)
            for server in cluster.servers[1:]:
                server.kill()
            first = cluster.servers[0]
            eventually(lambda: b"cluster_state:fail" in first.ask("CLUSTER", "INFO"))
            for _ in range(20):
                with pytest.raises(StoreUnavailable):
                    await store.claim(Wants.of([want(fresh())]))
            for server in cluster.servers[1:]:
                server.start()
            await comes_back(store)


async def test_the_checks_are_for_every_server_of_a_cluster(cluster: RedisCluster) -> None:
    cluster.servers[2].ask("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
    store = here(cluster)
    with pytest.raises(ConfigError, match="noeviction") as caught:
        await store.open()
    assert cluster.servers[2].host in str(caught.value)
    await store.aclose()
