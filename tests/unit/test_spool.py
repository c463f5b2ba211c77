import asyncio
import json
import sqlite3
import subprocess
import sys
from contextlib import asynccontextmanager, closing
from datetime import timedelta

import pytest
from msgspec.structs import replace
from tests.faults.doubles import Deaf, ScriptedSink, event, eventually, rule

from oncebridge import Gateway, No, Settings, StoreUnavailable, Unknown, Verdict, Yes
from oncebridge.base.clock import SystemDice, system_clock
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.engine.router import RouteEntry, Router
from oncebridge.errors import ConfigError, StoreError
from oncebridge.sources import spool as module
from oncebridge.sources.api import Host
from oncebridge.sources.spool import SPOOLED, Spool
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore

QUICK = Settings(
    backoff=timedelta(milliseconds=5), max_backoff=timedelta(milliseconds=20), breaker=10_000
)


class Station:
    """A spool, and the route it forwards to."""

    def __init__(self, path, *, sink=None, store=None, batch=50, settings=QUICK, rules=()):
        self.sink = sink or ScriptedSink()
        self.store = SQLiteStore(store) if store else MemoryStore()
        self.dead = MemoryDeadLetters()
        self.gateway = Gateway(
            store=self.store, sink=self.sink, dead=self.dead, settings=settings, rules=rules
        )
        self.spool = Spool(path)
        router = Router([RouteEntry(self.gateway)])
        self.host = Host(router, self.spool, self.store, batch, system_clock, SystemDice())
        self.running = None

    def start(self):
        self.running = asyncio.create_task(self.spool.run())

    async def put(self, *raws):
        """Put, and give the answers when all are there."""
        answers = {}
        self.spool.put(raws, answers.setdefault)
        await eventually(lambda: len(answers) == len(raws))
        return [answers[at] for at in range(len(raws))]

    async def empty(self):
        await eventually(lambda: not self.spool.depth)

    async def stop(self):
        self.spool.stop()
        await self.gateway.drain(timedelta(seconds=20))
        if self.running is not None:
            await self.running
        await self.spool.aclose()
        await self.gateway.aclose()


@asynccontextmanager
async def station(path, *, runs=True, **more):
    made = Station(path, **more)
    try:
        await made.spool.open(made.host)
        if runs:
            made.start()
        yield made
    finally:
        await made.stop()


def on_disk(path):
    with closing(sqlite3.connect(path)) as db:
        return [raw for (raw,) in db.execute("SELECT raw FROM oncebridge_spool ORDER BY number")]


def events(count, first=0, entity=None):
    return [
        event({"n": n} | ({"e": entity} if entity else {}), id=f"e{n}")
        for n in range(first, first + count)
    ]


def numbers(sink):
    return [json.loads(raw)["detail"]["n"] for raw in sink.raws]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "spool.db"


# --- in -------------------------------------------------------------------------------------------


async def test_the_sender_is_answered_when_its_event_is_on_disk_and_not_before(path):
    async with station(path, runs=False) as one:
        seen = []
        one.spool.put([event()], lambda at, answer: seen.append((answer, on_disk(path))))
        assert seen == []
        await eventually(lambda: seen)
        assert seen == [(SPOOLED, [event()])]
        assert (SPOOLED.acknowledge, SPOOLED.verdict) == (True, None)


async def test_many_are_written_together_in_the_order_they_came(path):
    async with station(path, runs=False) as one:
        raws = events(3500)
        assert set(await one.put(*raws)) == {SPOOLED}
        assert on_disk(path) == raws
        assert one.spool.depth == 3500


async def test_what_is_no_event_is_kept_as_it_came_and_ends_in_the_dead_letters(path):
    async with station(path) as one:
        await one.put(b"\x00\xff no event", b"", event())
        await one.empty()
        assert [letter.raw for letter in await one.dead.list()] == [b"\x00\xff no event", b""]
        assert one.sink.raws == [event()]


async def test_a_full_disk_acknowledges_nothing_and_loses_nothing(path):
    async with station(path, runs=False) as one:
        await one.put(*events(10))
        pages = "PRAGMA max_page_count = "
        await one.spool.file.run(lambda db: db.execute(pages + "8").fetchall())
        large = event({"large": "x" * 100_000})
        (answer,) = await one.put(large)
        assert (answer.acknowledge, answer.verdict) == (False, None)
        assert answer.retry_after_ms > 0
        assert answer.reason.startswith("spool: ")
        assert on_disk(path) == events(10)
        await one.spool.file.run(lambda db: db.execute(pages + "100000").fetchall())
        assert await one.put(large) == [SPOOLED]
        assert one.spool.depth == 11


async def test_a_file_that_cannot_be_written_acknowledges_nothing(path):
    async with station(path, runs=False) as one:
        await one.spool.file.run(lambda db: db.execute("PRAGMA query_only = 1").fetchall())
        (answer,) = await one.put(event())
        assert not answer.acknowledge
        assert on_disk(path) == []


async def test_a_batch_is_written_wholly_or_not_at_all(path):
    async with station(path, runs=False) as one:
        refuses = (
            "CREATE TRIGGER refuses BEFORE INSERT ON oncebridge_spool "
            "WHEN new.raw = x'626164' BEGIN SELECT raise(ABORT, 'no'); END"
        )
        await one.spool.file.run(lambda db: db.execute(refuses).fetchall())
        answers = await one.put(b"good", b"bad", b"good too")
        assert len({answer.acknowledge for answer in answers}) == 1
        assert on_disk(path) == []


async def test_one_who_fails_to_listen_does_not_cost_the_others(path):
    def deaf(at, answer):
        raise ZeroDivisionError

    async with station(path, runs=False) as one:
        one.spool.put([b"1"], deaf)
        assert await one.put(b"2", b"3") == [SPOOLED, SPOOLED]
        assert await one.put(b"4") == [SPOOLED]


async def test_when_too_much_waits_to_be_written_the_rest_is_refused(path, monkeypatch):
    monkeypatch.setattr(module, "_MOST_WAITING", 100)
    async with station(path, runs=False) as one:
        answers = await one.put(*events(150))
        assert [answer.acknowledge for answer in answers] == [True] * 100 + [False] * 50
        assert answers[-1].retry_after_ms > 0
        assert len(on_disk(path)) == 100


async def test_closing_answers_what_is_being_written_and_refuses_what_comes_after(path):
    async with station(path, runs=False) as one:
        heard = []
        one.spool.put(events(5), lambda at, answer: heard.append(answer))
        await one.spool.aclose()
        assert heard == [SPOOLED] * 5
        assert on_disk(path) == events(5)
        (late,) = await one.put(event())
        assert not late.acknowledge
        await one.spool.aclose()


# --- out ------------------------------------------------------------------------------------------


async def test_what_is_forwarded_leaves_the_spool(path):
    async with station(path, batch=7) as one:
        await one.put(*events(40))
        await one.empty()
        assert sorted(numbers(one.sink)) == list(range(40))
        assert on_disk(path) == []
        await one.put(*events(5, 100))
        await one.empty()
        assert len(one.sink.raws) == 45


async def test_a_duplicate_leaves_it_too(path):
    async with station(path) as one:
        await one.put(event(), event(), event())
        await one.empty()
        assert one.sink.raws == [event()]


async def test_what_the_sink_does_not_take_stays_until_it_does(path):
    sink = ScriptedSink(*[No("no"), Unknown("reset")] * 6)
    async with station(path, sink=sink) as one:
        await one.put(*events(8))
        await one.empty()
        assert sorted(numbers(one.sink)) == list(range(8))
        assert on_disk(path) == []


@pytest.mark.parametrize("batch", [1, 4, 100])
async def test_entities_are_forwarded_in_the_order_of_their_arrival(path, batch):
    settings = replace(QUICK, order="entity")
    sink = ScriptedSink(*[Yes(), No("no"), Unknown("reset")] * 4)
    rules = [rule(entity="detail.e")]
    async with station(path, sink=sink, settings=settings, rules=rules, batch=batch) as one:
        for first in range(0, 18, 6):
            await one.put(*events(6, first, entity="x"))
        await one.empty()
        assert numbers(one.sink) == list(range(18))


async def test_after_a_restart_it_goes_on_with_what_is_left(path):
    store = path.with_name("store.db")
    async with station(path, store=store, sink=ScriptedSink(otherwise=No("no"))) as one:
        await one.put(*events(20))
        await eventually(lambda: one.sink.seen)
    assert on_disk(path) == events(20)
    async with station(path, store=store) as one:
        assert one.spool.depth == 20
        await one.empty()
        assert sorted(numbers(one.sink)) == list(range(20))


async def test_a_restart_in_the_middle_forwards_nothing_twice(path):
    store = path.with_name("store.db")
    sent = []
    for _ in range(6):
        sink = ScriptedSink(*[Yes()] * 9, otherwise=No("no"))
        async with station(path, store=store, sink=sink, batch=4) as one:
            if not sent:
                await one.put(*events(40))
            await eventually(lambda one=one: len(one.sink.taken) >= 9 or not one.spool.depth)
        sent += numbers(one.sink)
    assert sorted(sent) == list(range(40))
    assert on_disk(path) == []


async def test_records_that_cannot_be_deleted_come_again_and_are_duplicates(path):
    keeps = (
        "CREATE TRIGGER keeps BEFORE DELETE ON oncebridge_spool BEGIN SELECT raise(ABORT, ''); END"
    )
    store = path.with_name("store.db")
    async with station(path, store=store, runs=False) as one:
        await one.spool.file.run(lambda db: db.execute(keeps).fetchall())
        await one.put(*events(5))
        one.start()
        await eventually(lambda: len(one.sink.taken) == 5)
        await one.put(*events(3, 10))
        await eventually(lambda: len(one.sink.taken) == 8)
    assert len(on_disk(path)) == 8
    async with station(path, store=store, runs=False) as one:
        assert one.spool.depth == 8
        await one.spool.file.run(lambda db: db.execute("DROP TRIGGER keeps").fetchall())
        one.start()
        await one.empty()
        assert one.sink.seen == []
        assert one.gateway.books.verdicts[Verdict.DUPLICATE] == 8
    assert on_disk(path) == []


async def test_a_spool_that_cannot_be_read_for_a_moment_is_read_again(path, monkeypatch):
    monkeypatch.setattr(module, "_TRY_AGAIN_S", 0.01)
    async with station(path, runs=False) as one:
        await one.put(*events(5))
        run, failures = one.spool.file.run, iter(range(3))

        async def fails(work):
            if next(failures, None) is not None:
                raise StoreUnavailable("disk I/O error")
            return await run(work)

        one.spool.file.run = fails
        one.start()
        await one.empty()
        assert len(one.sink.taken) == 5


async def test_while_the_sink_is_down_only_a_few_batches_are_in_memory(path):
    down = replace(QUICK, breaker=5)
    sink = ScriptedSink(otherwise=No("no"))
    async with station(path, runs=False, batch=10, sink=sink, settings=down) as one:
        await one.put(*events(500))
        one.start()
        await eventually(lambda: len(one.sink.seen) >= 7)
        assert one.spool._taken <= 100
        assert one.spool.depth == 500


async def test_while_the_sink_refuses_everything_no_more_is_in_memory_than_may_wait(path):
    async with station(path, runs=False, batch=100, sink=ScriptedSink(otherwise=No("no"))) as one:
        await one.put(*events(4000))
        one.start()
        await eventually(lambda: len(one.sink.seen) > 5000)
        assert one.spool._taken <= 2000 + 6 * 100
        assert one.spool.depth == 4000


async def test_a_batch_of_large_records_is_short(path):
    async with station(path, runs=False, batch=500) as one:
        large = [event({"n": n, "large": "x" * 1_500_000}) for n in range(7)]
        await one.put(*large)
        sizes = []
        while sum(sizes) < 7:
            sizes.append(len(await one.spool._take()))
        assert sizes == [3, 3, 1]


# --- stopping -----------------------------------------------------------------------------------


async def test_it_stops_while_it_waits_for_something_to_come(path):
    async with station(path) as one:
        await one.put(event())
        await one.empty()
        one.spool.stop()
        await asyncio.wait_for(one.running, 5)


async def test_it_stops_while_the_sink_is_down(path):
    down = Settings(backoff=timedelta(minutes=5))
    async with station(path, settings=down, sink=ScriptedSink(otherwise=No("no"))) as one:
        await one.put(*events(20))
        await eventually(lambda: one.gateway.sink_breaker.is_open)
        one.spool.stop()
        await asyncio.wait_for(one.running, 5)
    assert on_disk(path) == events(20)


async def test_it_stops_when_the_gateway_gives_up_on_a_sink_that_hangs(path):
    short = Settings(sink_timeout=timedelta(milliseconds=200))
    async with station(path, settings=short, sink=ScriptedSink(otherwise=Deaf(1, Yes()))) as one:
        await one.put(*events(3))
        await eventually(lambda: one.sink.under_way)
        one.spool.stop()
        await asyncio.wait_for(one.running, 5)
        await asyncio.sleep(1.1)  # until the sink is through with ignoring us
    assert on_disk(path) == events(3)


async def test_arrivals_are_still_written_after_the_stop(path):
    async with station(path) as one:
        one.spool.stop()
        await one.running
        assert await one.put(event()) == [SPOOLED]
    assert on_disk(path) == [event()]


# --- one process -----------------------------------------------------------------------------------


async def test_a_second_one_is_refused_until_the_first_is_gone(path):
    async with station(path, runs=False):
        with pytest.raises(ConfigError, match="another process uses this spool; give each"):
            async with station(path):
                pass
    async with station(path) as one:
        await one.put(event())
        await one.empty()


def run(program, *args):
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


PUTS = """
import asyncio, sys
from oncebridge import Gateway, Yes
from oncebridge.base.clock import SystemDice, system_clock
from oncebridge.engine.router import RouteEntry, Router
from oncebridge.sources.api import Host
from oncebridge.sources.spool import Spool
from oncebridge.stores.memory import MemoryStore

async def hangs(event):
    await asyncio.sleep(1000)

async def main():
    store = MemoryStore()
    spool = Spool(sys.argv[1])
    router = Router([RouteEntry(Gateway(store=store, sink=hangs))])
    await spool.open(Host(router, spool, store, 50, system_clock, SystemDice()))
    running = asyncio.create_task(spool.run())
    def put(number):
        raw = b'{"id":"e%d","source":"shop","detail-type":"Order","detail":{"n":%d}}' % (
            number, number)
        spool.put([raw], lambda at, answer: tell(number, answer))
    def tell(number, answer):
        assert answer.acknowledge
        print(number, flush=True)
    for number in range(100_000):
        put(number)
        if number % 7 == 0:
            await asyncio.sleep(0.001)

asyncio.run(main())
"""


async def test_what_was_answered_survives_the_kill_of_its_process(path):
    writer = run(PUTS, path)
    try:
        answered = [int(writer.stdout.readline()) for _ in range(300)]
    finally:
        writer.kill()
        rest = writer.communicate()[0].splitlines()
    answered += [int(line) for line in rest if line.strip()]
    kept = [json.loads(raw)["detail"]["n"] for raw in on_disk(path)]
    assert set(answered) <= set(kept), "answered, and lost"
    assert kept == sorted(kept)
    async with station(path) as one:
        await one.empty()
        assert sorted(numbers(one.sink)) == kept


async def test_a_second_process_is_refused_too(path):
    writer = run(PUTS, path)
    try:
        writer.stdout.readline()
        with pytest.raises(ConfigError, match="another process uses this spool"):
            async with station(path):
                pass
    finally:
        writer.kill()
        writer.communicate()


# --- what can't be opened ---------------------------------------------------------------------------


async def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="directory not found; create it") as error:
        async with station(tmp_path / "none" / "spool.db"):
            pass
    assert error.value.where == "spool"


async def test_a_lock_that_cannot_be_made_is_said_in_plain_words(path):
    path.with_name("spool.db.lock").mkdir()
    with pytest.raises(ConfigError, match=r"spool\.db\.lock: Is a directory"):
        async with station(path):
            pass


async def test_a_file_that_is_something_else_is_refused_and_left_alone(path):
    path.write_bytes(b"my letters\n" * 1000)
    for _ in range(2):  # the lock is given back
        with pytest.raises(StoreError, match="is not a SQLite file"):
            async with station(path):
                pass
    assert path.read_bytes() == b"my letters\n" * 1000


async def test_a_spool_that_was_never_opened_can_be_closed(path):
    spool = Spool(path)
    spool.stop()
    await spool.aclose()
    assert not path.exists()
    assert spool.progress() is None
