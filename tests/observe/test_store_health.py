"""What stores tell of themselves: on real servers, and whatever befalls them."""

import asyncio
import json
import os
import time
from contextlib import asynccontextmanager
from functools import partial
from http.client import HTTPConnection

import pytest
from tests.faults.doubles import virtual
from tests.servers.meddler import changing, failing, hang, meddling
from tests.servers.postgres import ask as ask_postgres
from tests.servers.postgres import schema
from tests.servers.redis import RedisCluster, RedisServer, running
from tests.stores.proxy import Fault, Proxy

from oncebridge.base.clock import system_clock
from oncebridge.errors import ConfigError, StoreError, StoreUnavailable
from oncebridge.observe.report import StoreHealth
from oncebridge.observe.store_health import read_store_health
from oncebridge.service.addresses import StorePlace, scheme_of
from oncebridge.service.config import load
from oncebridge.service.service import Service
from oncebridge.stores.api import Fate, Memories, Memory
from oncebridge.stores.dynamodb import store as dynamodb
from oncebridge.stores.memory import MemoryStore

DAY_MS = 86_400_000
NEAR_MS = 50
"""Servers on this host have its clock; this is for those who read it late."""
PATIENT = {"timeout": "60s", "connect_timeout": "60s"}


def memories(count):
    return [Memory(os.urandom(16), os.urandom(16), Fate.DELIVERED, DAY_MS) for _ in range(count)]


async def told(place, store=None, clock=system_clock):
    return await read_store_health(scheme_of(place.url), store or place.opened, clock)


async def well(place):
    """Ask until it answers: this host may have other things to do for two seconds."""
    async with asyncio.timeout(30):
        while not (found := await told(place)).answers:  # noqa: ASYNC110 - it is elsewhere
            await asyncio.sleep(0.1)
    return found


@asynccontextmanager
async def opened(url, **options):
    place = StorePlace.of(url, **options)
    async with place.opened:
        yield place


# --- how it is asked ----------------------------------------------------------------------


class Faked:
    """As much of a store as is asked."""

    def __init__(self, now_ms=system_clock, answer=None):
        self._now_ms = now_ms
        self._answer = answer

    async def now_ms(self):
        return await _come_to(self._now_ms)


class Telling(Faked):
    """One that tells more."""

    async def health(self):
        return await _come_to(self._answer)


async def _come_to(answer):
    if isinstance(answer, BaseException):
        raise answer
    if not callable(answer):
        return answer
    found = answer()
    return await found if asyncio.iscoroutine(found) else found


FOREVER = partial(asyncio.sleep, 3600)
REDIS = StorePlace("rediss+cluster://user:secret@host", None)


async def test_a_store_that_tells_nothing_more_answers():
    assert await told(REDIS, Faked()) == StoreHealth("rediss+cluster", clock_offset_ms=0)


async def test_what_a_store_tells_goes_over_what_was_measured():
    answer = {"records": 1, "bytes": 2, "evicted": 3, "clock_offset_ms": None}
    assert await told(REDIS, Telling(answer=answer)) == StoreHealth("rediss+cluster", True, 1, 2, 3)


async def test_what_makes_no_sense_is_not_told():
    answer = {"records": "many", "bytes": True, "evicted": 1.5, "kind": 7, "answers": 0}
    assert await told(REDIS, Telling(answer=answer)) == StoreHealth(
        "rediss+cluster", clock_offset_ms=0
    )


@pytest.mark.parametrize(
    ("store_ms", "here_ms", "offset_ms"),
    [
        (5000, (1000, 1000), 4000),
        (5000, (1000, 3000), 3000),
        (1000, (5000, 7000), -5000),
        (2000, (1000, 3000), 0),
        (1001, (1000, 5000), 0),  # a slow answer is no clock that is off
        (1000, (1001, 1001), 0),  # cut to the millisecond, it may be the same moment
        (1001, (1000, 1000), 0),
        (1002, (1000, 1000), 2),
        (5000, (3000, 1000), None),  # the host's clock was set back
    ],
)
async def test_the_offset_is_measured_in_the_middle_of_the_round_trip(store_ms, here_ms, offset_ms):
    read = iter(here_ms)
    found = await told(REDIS, Faked(store_ms), lambda: next(read))
    assert found == StoreHealth("rediss+cluster", clock_offset_ms=offset_ms)


@pytest.mark.parametrize(
    "error",
    [
        StoreUnavailable("away"),
        StoreError("closed"),
        ConfigError("", "wrong"),
        TimeoutError(),
        ZeroDivisionError(),
        ExceptionGroup("both", [OSError()]),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_store_that_fails_does_not_answer(error):
    assert await told(REDIS, Faked(error)) == StoreHealth("rediss+cluster", answers=False)
    half = await told(REDIS, Telling(answer=error))
    assert half == StoreHealth("rediss+cluster", answers=False, clock_offset_ms=0)


@pytest.mark.parametrize("answer", [None, 7, ["records"]])
async def test_what_is_no_table_is_no_answer(answer):
    assert not (await told(REDIS, Telling(answer=answer))).answers


@virtual
async def test_two_seconds_are_enough():
    time_s = asyncio.get_running_loop().time
    for store in (Faked(FOREVER), Telling(FOREVER), Telling(answer=FOREVER)):
        began_s = time_s()
        assert not (await told(REDIS, store)).answers
        assert time_s() - began_s == pytest.approx(2)


@virtual
async def test_two_seconds_are_for_both_questions():
    async def slowly():
        await asyncio.sleep(1.5)
        return {}

    async def late():
        await asyncio.sleep(1.5)
        return system_clock()

    assert (await told(REDIS, Telling(answer=slowly))).answers
    assert (await told(REDIS, Faked(late))).answers
    assert not (await told(REDIS, Telling(late, slowly))).answers


async def test_whoever_is_cancelled_is_cancelled():
    asking = asyncio.create_task(told(REDIS, Faked(FOREVER)))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


# --- what each tells ----------------------------------------------------------------------


async def test_memory_tells_its_records():
    async with opened("memory:") as place:
        await place.opened.remember(Memories.of(memories(7)))
        assert await told(place) == StoreHealth("memory", records=7, clock_offset_ms=0)


async def test_the_clock_of_a_store_may_be_another():
    store = MemoryStore(clock=lambda: system_clock() - 90_000)
    found = await told(StorePlace("memory:", store), store)
    assert found.clock_offset_ms == pytest.approx(-90_000, abs=NEAR_MS)


async def test_sqlite_tells_the_size_of_its_files(tmp_path):
    file = tmp_path / "records.db"
    async with opened(f"sqlite:{file}") as place:
        await place.opened.remember(Memories.of(memories(2000)))
        files = [file, file.with_name("records.db-wal")]
        sizes = [each.stat().st_size for each in files]
        assert sum(sizes) > sizes[1] > 0
        assert await told(place) == StoreHealth("sqlite", bytes=sum(sizes), clock_offset_ms=0)


@pytest.mark.parametrize("harm", ["removed", "closed", "emptied"])
async def test_a_sqlite_file_that_is_lost_does_not_answer(tmp_path, harm):
    file = tmp_path / "records.db"
    async with opened(f"sqlite:{file}") as place:
        await place.opened.remember(Memories.of(memories(1)))
        assert (await told(place)).answers
        if harm == "removed":
            file.unlink()
        elif harm == "closed":
            await place.opened.aclose()
        else:
            await place.opened.file.run(lambda db: db.execute("DROP TABLE oncebridge_records"))
        assert await told(place) == StoreHealth("sqlite", answers=False, clock_offset_ms=0)


async def test_redis_tells_its_memory_and_what_it_evicted(tmp_path):
    server = RedisServer(tmp_path, appendonly="no")
    with running(server):
        async with opened(server.url, **PATIENT) as place:
            await place.opened.remember(Memories.of(memories(100)))
            found = await well(place)
            used = server.info()["used_memory"]
            assert found.bytes == pytest.approx(used, rel=0.2)
            assert (found.kind, found.answers, found.evicted) == ("redis", True, 0)
            assert found.clock_offset_ms == pytest.approx(0, abs=NEAR_MS)
            assert found.records is None  # others may keep theirs there too

            # Whoever changes it later is not seen by those who are connected already.
            server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
            server.ask("CONFIG", "SET", "maxmemory", used + 200_000)
            for number in range(50):
                server.ask("SET", f"junk:{number}", "x" * 10_000)
            # Whoever connects, to look, needs memory too.
            before = server.info()["evicted_keys"]
            found = await well(place)
            assert 0 < before <= found.evicted <= server.info()["evicted_keys"]


async def test_a_cluster_tells_the_sum_and_answers_only_as_a_whole(tmp_path):
    cluster = RedisCluster(tmp_path, 2, appendonly="no")
    with running(cluster):
        async with opened(cluster.url) as place:
            await place.opened.remember(Memories.of(memories(50)))
            found = await well(place)
            used = [server.info()["used_memory"] for server in cluster.servers]
            assert found.bytes == pytest.approx(sum(used), rel=0.2)
            assert found.bytes > max(used)
            assert (found.kind, found.answers, found.evicted) == ("redis+cluster", True, 0)

            cluster.servers[1].kill()
            assert not (await told(place)).answers


async def test_postgres_tells_the_size_of_its_table_and_guesses_its_rows(postgres):
    name = schema()
    table = f'"{name}".oncebridge_records'
    async with opened(postgres.url, schema=name, auto_migrate=True) as place:
        empty = await well(place)
        assert (empty.kind, empty.answers, empty.records) == ("postgresql", True, 0)
        assert empty.clock_offset_ms == pytest.approx(0, abs=NEAR_MS)

        await ask_postgres(postgres.url, f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
        await place.opened.remember(Memories.of(memories(2000)))
        assert (await well(place)).records is None  # nobody has looked yet

        await ask_postgres(postgres.url, f"ANALYZE {table}")
        ((size,),) = await ask_postgres(postgres.url, f"SELECT pg_total_relation_size('{table}')")
        found = await well(place)
        assert found.records == pytest.approx(2000, rel=0.05)
        assert found.bytes == size > 0
        assert found.evicted is None

        await place.opened.remember(Memories.of(memories(2000)))
        assert (await well(place)).records == pytest.approx(4000, rel=0.1)


@pytest.fixture
def on_dynamodb(dynoxide):
    """Open a store on a table of its own, whose requests go to *endpoint*."""

    @asynccontextmanager
    async def on_dynamodb(endpoint=dynoxide.endpoint):
        table = dynoxide.table()
        try:
            async with opened(f"dynamodb://{table}", endpoint=endpoint, **PATIENT) as place:
                yield place
        finally:
            dynoxide.drop(table)

    return on_dynamodb


@pytest.mark.parametrize(
    ("records", "size", "known"),
    [(1234, 56_789, (1234, 56_789)), (0, 0, (None, None)), (None, "many", (None, None))],
    ids=["counted", "not counted yet", "nonsense"],
)
async def test_dynamodb_tells_what_was_counted(on_dynamodb, dynoxide, records, size, known):
    async with meddling(dynoxide) as meddler:
        counted = {"ItemCount": records, "TableSizeBytes": size}
        meddler.always("DescribeTable", changing(lambda said: said["Table"].update(counted)))
        async with on_dynamodb(meddler.endpoint) as place:
            for _ in range(2):
                found = await well(place)
                assert (found.kind, found.answers, found.evicted) == ("dynamodb", True, None)
                assert (found.records, found.bytes) == known
                assert found.clock_offset_ms == pytest.approx(0, abs=NEAR_MS)


async def test_dynamodb_describes_its_table_as_we_read_it(ministack):
    table = ministack.table()
    async with opened(f"dynamodb://{table}", endpoint=ministack.endpoint, **PATIENT) as place:
        await place.opened.remember(Memories.of(memories(20)))
        counted = ministack.ask("DescribeTable", {"TableName": table})["Table"]
        assert counted["ItemCount"] >= 20
        assert (await well(place)).records == counted["ItemCount"]
    ministack.drop(table)


async def test_dynamodb_is_asked_for_its_table_every_ten_minutes(
    on_dynamodb, dynoxide, monkeypatch
):
    async with meddling(dynoxide) as meddler, on_dynamodb(meddler.endpoint) as place:
        before = meddler.count("DescribeTable")
        read = meddler.count("BatchGetItem")
        for _ in range(3):
            assert (await well(place)).answers
        assert meddler.count("DescribeTable") == before + 1
        assert meddler.count("BatchGetItem") >= read + 3
        monkeypatch.setattr(place.opened, "_count_from_s", time.monotonic())
        await well(place)
        assert meddler.count("DescribeTable") == before + 2
        assert dynamodb._COUNT_EVERY_S == 600


@pytest.mark.parametrize(
    "rule",
    [failing("AccessDeniedException"), failing("ThrottlingException"), hang],
    ids=["denied", "throttled", "hangs"],
)
async def test_dynamodb_answers_also_where_its_table_is_not_described(on_dynamodb, dynoxide, rule):
    async with meddling(dynoxide) as meddler, on_dynamodb(meddler.endpoint) as place:
        meddler.always("DescribeTable", rule)
        found = await well(place)
        assert (found.answers, found.records, found.bytes) == (True, None, None)


@pytest.mark.parametrize(
    "rule",
    [failing("AccessDeniedException"), failing("ResourceNotFoundException"), hang],
    ids=["denied", "gone", "hangs"],
)
async def test_dynamodb_that_reads_nothing_does_not_answer(on_dynamodb, dynoxide, rule):
    async with meddling(dynoxide) as meddler, on_dynamodb(meddler.endpoint) as place:
        meddler.always("BatchGetItem", rule)
        assert not (await told(place)).answers


async def test_the_time_at_aws_is_compared_with_this_host(on_dynamodb, dynoxide):
    async with on_dynamodb() as place:
        an_hour_ago = await told(place, clock=lambda: system_clock() - 3_600_000)
        assert an_hour_ago.clock_offset_ms == pytest.approx(3_600_000, abs=NEAR_MS)
    async with meddling(dynoxide) as meddler:
        meddler.date = lambda _: "some day"
        async with on_dynamodb(meddler.endpoint) as place:
            found = await well(place)
            assert found == StoreHealth("dynamodb", records=1)  # the form of the records


@pytest.fixture
def s3_place(s3_server, monkeypatch):
    """Give address and options of a store in a bucket of its own."""
    s3_server.show_to(monkeypatch)
    bucket = s3_server.bucket()
    return {"url": f"s3://{bucket}/records", "endpoint": s3_server.endpoint, "expiry": "sweep"}


async def test_s3_tells_that_it_is_there(s3_place, s3_server):
    async with opened(**s3_place, **PATIENT) as place:
        await place.opened.remember(Memories.of(memories(3)))
        found = await well(place)
        near = pytest.approx(0, abs=NEAR_MS)
        assert found == StoreHealth("s3", clock_offset_ms=found.clock_offset_ms)
        assert found.clock_offset_ms == near

        bucket = s3_place["url"].split("/")[2]
        for record in (await place.opened.scan())[0]:
            assert await place.opened.forget([record.key]) == [True]
        for path in (f"/{bucket}/records/form", f"/{bucket}"):
            assert s3_server.ask("DELETE", path)[0] == 204
        assert not (await told(place)).answers


# --- when there is no server --------------------------------------------------------------


@pytest.fixture(params=["redis", "postgresql", "dynamodb", "s3"])
def remote(request):
    """Give the port of a server, and how a store reaches it by another."""
    ask = request.getfixturevalue
    if request.param == "redis":
        server = ask("redis_server")
        return server.port, lambda port: {"url": f"redis://127.0.0.1:{port}"}
    if request.param == "postgresql":
        server, name = ask("postgres"), schema()
        url = "postgresql://oncebridge@127.0.0.1:{}/events"
        more = {"schema": name, "auto_migrate": True}
        return server.port, lambda port: {"url": url.format(port), **more}
    if request.param == "dynamodb":
        server = ask("dynoxide")
        url = f"dynamodb://{server.table()}"
    else:
        given, server = ask("s3_place"), ask("s3_server")
        return server.port, lambda port: {**given, "endpoint": f"http://127.0.0.1:{port}"}
    return server.port, lambda port: {"url": url, "endpoint": f"http://127.0.0.1:{port}"}


@pytest.mark.full
@pytest.mark.parametrize("fault", [Fault.SWALLOW, Fault.REFUSE])
async def test_a_server_that_is_away_is_told_of_soon(remote, fault):
    port, place_at = remote
    with Proxy(port) as proxy:
        async with opened(**place_at(proxy.port), **PATIENT) as place:
            assert (await well(place)).answers
            proxy.strike(fault)
            began_s = time.monotonic()
            assert not (await told(place)).answers
            assert time.monotonic() - began_s < 20  # and not the store's own 60 s

            proxy.heal()
            async with asyncio.timeout(30):
                assert (await well(place)).answers
                await place.opened.remember(Memories.of(memories(3)))


# --- through a service --------------------------------------------------------------------


@asynccontextmanager
async def serving(folder, store):
    options = "\n".join(f"{name} = {json.dumps(value)}" for name, value in store.items())
    file = folder / "oncebridge.toml"
    file.write_text(
        'source = "http://127.0.0.1:0/events"\ndead = "memory:"\nshare_counts = false\n'
        'metrics = "http://127.0.0.1:0"\n'
        f"[store]\n{options}\n"
        '[[routes]]\nname = "crm"\nsink = "python:tests.observe.sinks:take"\n'
    )
    service = Service(load(file, environment={}))
    await service.open()
    run = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        service.stop()
        await run
        await service.close()


def scrape(port):
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    pairs = (line.rpartition(" ") for line in lines if line.startswith("oncebridge_store_"))
    return {name: float(value) for name, _, value in pairs}


async def scraped(service, *, answers=1):
    """Scrape until it says so; the service itself measures now and then, too."""
    async with asyncio.timeout(30):
        while True:
            await service.monitor.measure(is_open=True)
            found = await asyncio.to_thread(scrape, service._listeners[-1].port)
            if found["oncebridge_store_answers"] == answers:
                return found


async def test_metrics_show_how_a_local_store_is(tmp_path):
    async with serving(tmp_path, {"url": f"sqlite:{tmp_path / 'records.db'}"}) as service:
        found = await scraped(service)
        assert found["oncebridge_store_bytes"] > 4096
        assert found["oncebridge_store_clock_offset_seconds"] == 0
        assert "oncebridge_store_records" not in found
    async with serving(tmp_path, {"url": "memory:"}) as service:
        found = await scraped(service)
        assert found["oncebridge_store_records"] <= 2  # the epoch, and the name of the sink
        assert "oncebridge_store_bytes" not in found


TELLS = {
    "redis": {"bytes", "evicted_total", "clock_offset_seconds"},
    "postgresql": {"records", "bytes", "clock_offset_seconds"},
    "dynamodb": {"clock_offset_seconds"},
    "s3": {"clock_offset_seconds"},
}


async def test_metrics_show_how_a_store_elsewhere_is_and_when_it_is_down(tmp_path, remote):
    port, place_at = remote
    with Proxy(port) as proxy:
        place = place_at(proxy.port)
        async with serving(tmp_path, place | {"timeout": "20s"}) as service:
            found = await scraped(service)
            kind = service.monitor.store_health.kind
            assert {f"oncebridge_store_{name}" for name in TELLS[kind]} <= found.keys()

            proxy.strike(Fault.REFUSE)
            assert "oncebridge_store_bytes" not in await scraped(service, answers=0)
            proxy.heal()
            await scraped(service, answers=1)
