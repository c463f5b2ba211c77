import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.faults.doubles import FaultyStore, ScriptedSink, event, eventually, rule

from oncebridge import ConfigError, Gateway, No, Settings, StoreUnavailable, Verdict, Yes
from oncebridge.base.clock import SystemDice, system_clock
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.engine.router import RouteEntry, Router
from oncebridge.events.framing import BadGzip
from oncebridge.sources import file as module
from oncebridge.sources.api import Host
from oncebridge.sources.checkpoint import CheckpointTaken
from oncebridge.sources.file import FileSource, FileSourceOptions
from oncebridge.sources.pump import PumpInbox
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore

QUICK = Settings(
    backoff=timedelta(milliseconds=5), max_backoff=timedelta(milliseconds=20), breaker=10_000
)


class Reader:
    """A file source, and the route that its events take."""

    def __init__(self, path, store, *, sink=None, batch=10, settings=QUICK, rules=(), **options):
        self.sink = sink or ScriptedSink()
        self.dead = MemoryDeadLetters()
        self.store = store
        self.gateway = Gateway(
            store=store, sink=self.sink, dead=self.dead, settings=settings, rules=rules
        )
        router = Router([RouteEntry(self.gateway)])
        self.source = FileSource(path and Path(path), FileSourceOptions(**options))
        self.host = Host(router, PumpInbox(router), store, batch, system_clock, SystemDice())

    async def run(self):
        """Read to the end, or to the stop."""
        await self.source.open(self.host)
        await self.source.run()

    @property
    def numbers(self):
        return [json.loads(raw)["detail"]["n"] for raw in self.sink.raws]

    @property
    def books(self):
        return self.gateway.books

    async def close(self):
        await self.gateway.drain(timedelta(seconds=20))
        await self.source.aclose()
        # The store is the test's.
        await self.gateway._sink.aclose()
        await self.gateway._leases.aclose()
        await self.gateway._claims.backlog.aclose()


@asynccontextmanager
async def reading(path, store=None, **more):
    reader = Reader(path, MemoryStore() if store is None else store, **more)
    try:
        yield reader
    finally:
        await reader.close()


def events(count, first=0, **detail):
    return [event({"n": n, **detail}, id=f"e{n}") for n in range(first, first + count)]


def lines(raws):
    return b"".join(raw + b"\n" for raw in raws)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "in.ndjson"


@pytest.fixture
async def store(tmp_path):
    store = SQLiteStore(tmp_path / "store.db")
    yield store
    await store.aclose()


# --- what a file may be ----------------------------------------------------------------------------


def pretty(raw):
    return json.dumps(json.loads(raw), indent=2).encode()


SHAPES = {
    "lines": lines,
    "lines without the last end": lambda raws: lines(raws)[:-1],
    "an array": lambda raws: b"[" + b",".join(raws) + b"]",
    "an array over lines": lambda raws: b"[\n" + b",\n".join(map(pretty, raws)) + b"\n]\n",
    "values": lambda raws: b"\n".join(map(pretty, raws)),
}


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_every_shape_is_read_to_its_end(path, shape, pack):
    path.write_bytes(pack(SHAPES[shape](events(57))))
    async with reading(path) as reader:
        await reader.run()
        assert sorted(reader.numbers) == list(range(57))
        assert await reader.dead.list() == []


@pytest.mark.parametrize("make", [lambda raw: raw, pretty, lambda raw: raw + b"\n"])
async def test_one_event_is_a_file_too(path, make):
    path.write_bytes(make(event()))
    async with reading(path) as reader:
        await reader.run()
        assert len(reader.sink.taken) == 1


@pytest.mark.parametrize("text", [b"", b"\n\n", b"[]", gzip.compress(b"", mtime=0)])
async def test_a_file_without_events_is_at_its_end_at_once(path, text):
    path.write_bytes(text)
    async with reading(path) as reader:
        await reader.run()
        assert reader.books.arrived == 0


async def test_a_bad_line_goes_to_the_dead_letters_with_its_number_and_the_rest_goes_on(path):
    raws = events(30)
    raws[4], raws[20], raws[21] = b"no event", b'{"id": 7}', b'{"detail": {}'
    path.write_bytes(lines(raws))
    async with reading(path) as reader:
        await reader.run()
        letters = await reader.dead.list()
        assert {letter.message.partition(":")[0] for letter in letters} == {
            "line 5",
            "line 21",
            "line 22",
        }
        assert {letter.raw for letter in letters} == {raws[4], raws[20], raws[21]}
        assert len(reader.sink.taken) == 27
        assert not any("no event" in letter.message for letter in letters)


async def test_bad_elements_of_an_array_are_counted_by_the_line_they_begin_on(path):
    path.write_bytes(b"[\n" + event() + b",\n  17,\n\n" + event({"n": 2}) + b', {"id": }]')
    async with reading(path) as reader:
        await reader.run()
        found = [letter.message.partition(":")[0] for letter in await reader.dead.list()]
        assert sorted(found) == ["line 3", "line 5"]
        assert len(reader.sink.taken) == 2


async def test_a_line_that_is_too_long_is_kept_with_its_beginning_and_the_rest_goes_on(path):
    with path.open("wb") as file:
        file.write(event({"n": 0}) + b"\n" + b'{"long": "' + b"x" * 17_000_000 + b'"}\n')
        file.write(event({"n": 1}) + b"\n")
    async with reading(path) as reader:
        await reader.run()
        (letter,) = await reader.dead.list()
        assert letter.reason == "too-large"
        assert letter.message.startswith("line 2: ")
        assert reader.numbers == [0, 1]


async def test_repeats_within_a_file_are_duplicates(path):
    path.write_bytes(lines(events(10) * 5))
    async with reading(path) as reader:
        await reader.run()
        assert sorted(reader.numbers) == list(range(10))
        assert reader.books.verdicts[Verdict.DUPLICATE] == 40


async def test_it_waits_in_place_for_a_sink_that_refuses(path):
    path.write_bytes(lines(events(25)))
    async with reading(path, sink=ScriptedSink(*[No("no")] * 40)) as reader:
        await reader.run()
        assert sorted(reader.numbers) == list(range(25))


async def test_an_ordered_route_gets_the_order_of_the_file(path):
    path.write_bytes(lines(events(25, e="x")))
    ordered = replace(QUICK, order="entity")
    sink = ScriptedSink(*[Yes(), No("no")] * 10)
    rules = [rule(entity="detail.e")]
    async with reading(path, sink=sink, settings=ordered, rules=rules, batch=4) as reader:
        await reader.run()
        assert reader.numbers == list(range(25))


# --- going on -------------------------------------------------------------------------------------


async def stopped_after(path, store, count, **more):
    """Read until *count* are taken, be stopped, and give the numbers that were taken."""
    sink = ScriptedSink(*[Yes()] * count, otherwise=No("enough"))
    async with reading(path, store, sink=sink, **more) as reader:
        running = asyncio.create_task(reader.run())
        await eventually(lambda: len(reader.sink.taken) >= count)
        reader.source.stop()
        await asyncio.wait_for(running, 10)
    return reader.numbers


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_run_that_was_stopped_goes_on_exactly_there(path, store, shape, pack):
    path.write_bytes(pack(SHAPES[shape](events(200))))
    first = await stopped_after(path, store, 83)
    async with reading(path, store) as reader:
        await reader.run()
        assert sorted(first + reader.numbers) == list(range(200))
        assert reader.source.resumed_at > 0
        assert reader.books.arrived <= 200 - 83 + 40, "at most the batches that were under way"
        assert reader.books.arrived < 200


async def test_it_goes_on_again_and_again(path, store):
    path.write_bytes(lines(events(150)))
    taken = []
    for _ in range(40):
        if len(taken) == 150:
            break
        count = min(11, 150 - len(taken))
        taken += await stopped_after(path, store, count, batch=7)
    assert sorted(taken) == list(range(150))


async def test_line_numbers_go_on_too(path, store):
    raws = events(5000)
    raws[4990] = b"no event"  # far behind what is read before the stop
    path.write_bytes(lines(raws))
    await stopped_after(path, store, 40)
    async with reading(path, store) as reader:
        await reader.run()
        (letter,) = await reader.dead.list()
        assert letter.message.startswith("line 4991: ")


async def test_with_entities_in_order_it_goes_on_in_order(path, store):
    path.write_bytes(lines(events(60, e="x")))
    more = {
        "settings": replace(QUICK, order="entity"),
        "rules": [rule(entity="detail.e")],
        "batch": 5,
    }
    first = await stopped_after(path, store, 23, **more)
    async with reading(path, store, **more) as reader:
        await reader.run()
        assert first + reader.numbers == list(range(60))


async def test_a_finished_file_runs_anew_and_finds_duplicates(path, store):
    path.write_bytes(lines(events(40)))
    for verdict in (Verdict.DELIVERED, Verdict.DUPLICATE):
        async with reading(path, store) as reader:
            await reader.run()
            assert reader.source.resumed_at == 0
            assert reader.books.verdicts[verdict] == 40


async def test_without_resume_it_begins_at_the_beginning(path, store):
    path.write_bytes(lines(events(100)))
    await stopped_after(path, store, 40)
    async with reading(path, store, resume=False) as reader:
        await reader.run()
        assert reader.books.arrived == 100
        assert reader.books.verdicts[Verdict.DUPLICATE] == 40


LARGE = {"large": "x" * 1000}


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("changes", ["head", "middle", "shorter"])
async def test_a_changed_file_begins_at_the_beginning(path, store, changes, pack):
    raws = events(100, **LARGE)
    path.write_bytes(pack(lines(raws)))
    await stopped_after(path, store, 60)
    match changes:
        case "head":
            raws[:3] = events(3, 1000, **LARGE)
        case "middle":
            raws[10:15] = events(40, 1000, **LARGE)
        case "shorter":
            raws[8:] = events(5, 1000, **LARGE)
    path.write_bytes(pack(lines(raws)))
    os.utime(path, ns=(10**18, 10**18))
    async with reading(path, store) as reader:
        await reader.run()
        assert reader.source.resumed_at == 0
        assert reader.books.arrived == len(raws), "what is new before the old place is not missed"


async def test_a_file_that_has_grown_goes_on_where_it_stopped(path, store):
    path.write_bytes(lines(events(100, **LARGE)))
    first = await stopped_after(path, store, 60)
    with path.open("ab") as file:
        file.write(lines(events(50, 100, **LARGE)))
    async with reading(path, store) as reader:
        await reader.run()
        assert reader.source.resumed_at > 0
        assert sorted(first + reader.numbers) == list(range(150))


async def test_another_file_of_the_same_content_has_its_own_place(path, store, tmp_path):
    path.write_bytes(lines(events(100)))
    await stopped_after(path, store, 60)
    other = tmp_path / "other.ndjson"
    other.write_bytes(path.read_bytes())
    async with reading(other, store) as reader:
        await reader.run()
        assert reader.books.arrived == 100


async def test_the_place_is_saved_while_it_runs(path, store, monkeypatch):
    """So that a process that is killed does not begin at the beginning."""
    monkeypatch.setattr(module, "_SAVE_EVERY_S", 0.01)
    monkeypatch.setattr(module, "_LEASE_MS", 1000)
    path.write_bytes(lines(events(100)))
    sink = ScriptedSink(*[Yes()] * 60, otherwise=No("down"))
    async with reading(path, store, sink=sink) as reader:
        running = asyncio.create_task(reader.run())
        await eventually(lambda: len(sink.taken) == 60)
        async with asyncio.timeout(60):
            while await _saved_line(reader, store) < 40:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        # Be killed: nothing is given back.
        reader.source._checkpoint._store = BrokenStore()
        reader.source.stop()
        await running
    await asyncio.sleep(1.2)
    async with reading(path, store) as reader:
        await reader.run()
        assert reader.source.resumed_at > 1
        assert 40 <= reader.books.arrived <= 80


async def _saved_line(reader, store):
    (record,) = await store.peek([reader.source._checkpoint.key])
    return json.loads(record.memo)[1] if record and record.memo else 0


class BrokenStore:
    def __getattr__(self, name):
        async def fails(*_):
            raise StoreUnavailable("gone")

        return fails


async def test_it_ends_well_where_the_place_cannot_be_saved(path, store, monkeypatch):
    monkeypatch.setattr(module, "_SAVE_EVERY_S", 0.01)
    path.write_bytes(lines(events(50)))
    async with reading(path, store, sink=ScriptedSink(*[No("no")] * 20)) as reader:
        running = asyncio.create_task(reader.run())
        await eventually(lambda: reader.sink.seen)
        reader.source._checkpoint._store = BrokenStore()
        await running
        assert sorted(reader.numbers) == list(range(50))


# --- one at a time ----------------------------------------------------------------------------------


async def test_a_second_reader_is_refused_in_plain_words(path, store):
    path.write_bytes(lines(events(50)))
    async with reading(path, store, sink=ScriptedSink(otherwise=No("down"))) as first:
        running = asyncio.create_task(first.run())
        await eventually(lambda: first.sink.seen)
        async with reading(path, store) as second:
            with pytest.raises(CheckpointTaken) as refused:
                await second.run()
            assert str(refused.value).startswith(f"{path}: another process is reading it; ")
            assert "\0" not in str(refused.value)
            assert second.books.arrived == 0
        first.source.stop()
        await running
    async with reading(path, store) as third:
        await third.run()
        assert sorted(third.numbers) == list(range(50))


async def test_it_is_held_for_as_long_as_the_run_lasts(path, store, monkeypatch):
    monkeypatch.setattr(module, "_LEASE_MS", 1500)
    monkeypatch.setattr(module, "_SAVE_EVERY_S", 0.02)
    path.write_bytes(lines(events(50)))
    sink = ScriptedSink(otherwise=No("down"))
    async with reading(path, store, sink=sink) as first:
        running = asyncio.create_task(first.run())
        await eventually(lambda: sink.seen)
        for _ in range(4):
            await asyncio.sleep(0.6)
            async with reading(path, store) as second:
                with pytest.raises(CheckpointTaken):
                    await second.run()
        sink.otherwise = Yes()
        await running
        assert sorted(first.numbers) == list(range(50))


async def test_who_was_frozen_too_long_notices_and_nothing_is_lost_or_sent_twice(
    path, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "_LEASE_MS", 1500)
    monkeypatch.setattr(module, "_SAVE_EVERY_S", 0.05)
    path.write_bytes(lines(events(50)))
    inner = SQLiteStore(tmp_path / "store.db")
    faulty = FaultyStore(inner)
    sink = ScriptedSink(*[Yes()] * 15, otherwise=No("down"))
    # What it cannot release is free soon.
    brief = replace(
        QUICK,
        lease=timedelta(seconds=2),
        sink_timeout=timedelta(seconds=0.5),
        commit_budget=timedelta(seconds=0.5),
        margin=timedelta(seconds=0.1),
    )
    async with reading(path, faulty, sink=sink, settings=brief) as first:
        running = asyncio.create_task(first.run())
        await eventually(lambda: len(sink.taken) == 15)
        for operation in ("claim", "release", "extend"):
            faulty.arm(f"{operation}.before", times=1e9)
        await asyncio.sleep(2)
        async with reading(path, inner, sink=ScriptedSink(otherwise=No("down"))) as second:
            second_run = asyncio.create_task(second.run())
            await eventually(lambda: second.sink.seen)
            # Until it has saved how far it knows the events: each save releases the checkpoint for
            # a moment, in which the first one could take it.
            await asyncio.sleep(10 * module._SAVE_EVERY_S)
            faulty.disarm()
            with pytest.raises(CheckpointTaken, match="another process is reading it"):
                await asyncio.wait_for(running, 10)
            second.sink.otherwise = Yes()
            await second_run
            assert sorted(first.numbers + second.numbers) == list(range(50))
    await inner.aclose()


async def test_a_store_that_is_away_at_the_start_is_waited_for(path, store, monkeypatch):
    monkeypatch.setattr(module, "_TRY_AGAIN_S", 0.01)
    path.write_bytes(lines(events(5)))
    faulty = FaultyStore(store)
    faulty.arm("claim.after", times=3)
    async with reading(path, faulty) as reader:
        await reader.run()
        assert len(reader.sink.taken) == 5
        assert faulty.calls["claim"] > 3


async def test_waiting_for_a_store_that_is_away_ends_with_the_stop(path, store):
    path.write_bytes(lines(events(5)))
    faulty = FaultyStore(store)
    faulty.arm("claim.before", times=1e9)
    async with reading(path, faulty) as reader:
        running = asyncio.create_task(reader.run())
        await eventually(lambda: faulty.calls["claim"])
        reader.source.stop()
        await asyncio.wait_for(running, 5)
        assert reader.books.arrived == 0


# --- damage ---------------------------------------------------------------------------------------


def damaged():
    """Give a file of 500 events that is cut short in the middle, and how many are whole."""
    packed = gzip.compress(lines(events(500, noise=os.urandom(50).hex())))
    return packed[: len(packed) // 2]


async def test_a_damaged_file_is_read_as_far_as_it_goes_and_then_said_to_be(path, store):
    path.write_bytes(damaged())
    sink = ScriptedSink(*[No("no")] * 30)
    async with reading(path, store, sink=sink) as reader:
        with pytest.raises(BadGzip, match="truncated"):
            await reader.run()
        whole = len(reader.numbers)
        assert 10 < whole < 500
        assert sorted(reader.numbers) == list(range(whole))
        assert len(await reader.dead.list()) <= 1, "the broken end"
    async with reading(path, store) as again:
        with pytest.raises(BadGzip):
            await again.run()
        assert again.sink.seen == []


@pytest.mark.parametrize("name", ["none.ndjson", "."])
async def test_a_file_that_cannot_be_opened_is_named(tmp_path, name):
    async with reading(tmp_path / name) as reader:
        with pytest.raises(ConfigError) as error:
            await reader.source.open(reader.host)
        assert error.value.where == "source"
        assert str(tmp_path) in error.value.message


async def test_a_disk_that_fails_is_said_after_what_could_be_read(path, store):
    path.write_bytes(lines(events(3000)))
    async with reading(path, store) as reader:
        await reader.source.open(reader.host)

        class Failing:
            def __init__(self, file):
                self.file = file
                self.reads = 0

            def read1(self, size):
                self.reads += 1
                if self.reads > 2:
                    raise OSError(5, "Input/output error")
                return self.file.read(50_000)

            def __getattr__(self, name):
                return getattr(self.file, name)

        reader.source._file = Failing(reader.source._file)
        with pytest.raises(OSError, match="Input/output"):
            await reader.source.run()
        assert len(reader.numbers) > 500
        assert sorted(reader.numbers) == list(range(len(reader.numbers)))
    async with reading(path, store) as reader:
        await reader.run()
        assert reader.source.resumed_at > 500
        assert 0 < len(reader.numbers) < 2500


# --- pipes ------------------------------------------------------------------------------------------


@asynccontextmanager
async def piped():
    """Give a path that is a pipe, and the file to write to it."""
    inner, outer = os.pipe()
    with os.fdopen(outer, "wb", buffering=0) as file:
        try:
            yield Path(f"/dev/fd/{inner}"), file
        finally:
            os.close(inner)


async def test_a_path_that_is_a_pipe_is_read_as_it_comes(store):
    async with piped() as (path, file), reading(path, store) as reader:
        await reader.source.open(reader.host)
        running = asyncio.create_task(reader.source.run())
        file.write(lines(events(5)))
        await eventually(lambda: len(reader.sink.taken) == 5)
        file.write(lines(events(5, 5)))
        file.close()
        await asyncio.wait_for(running, 10)
        assert sorted(reader.numbers) == list(range(10))


async def test_a_pipe_that_never_ends_ends_with_the_stop(store):
    async with piped() as (path, file), reading(path, store) as reader:
        await reader.source.open(reader.host)
        running = asyncio.create_task(reader.source.run())
        file.write(lines(events(5)) + b'{"half')
        await eventually(lambda: len(reader.sink.taken) == 5)
        reader.source.stop()
        await asyncio.wait_for(running, 5)
        file.close()  # lets the thread go that is still waiting
        await asyncio.sleep(0.05)
        assert await reader.dead.list() == []


async def test_standard_input_needs_no_place_and_no_memory(monkeypatch):
    inner, outer = os.pipe()
    opened = os.fdopen(inner, "rb", buffering=0)
    monkeypatch.setattr(module.os, "fdopen", lambda *_, **__: opened)
    faulty = FaultyStore(MemoryStore())
    async with reading(None, faulty, batch=2) as reader:
        os.write(outer, lines(events(50)))
        os.close(outer)
        await reader.run()
        assert sorted(reader.numbers) == list(range(50))
        assert reader.source.progress() is None
        assert faulty.calls["extend"] == 0


async def test_how_far_it_is_can_be_seen(path):
    path.write_bytes(lines(events(40)))
    async with reading(path) as reader:
        assert reader.source.progress() is None
        await reader.source.open(reader.host)
        assert reader.source.progress() == (0, path.stat().st_size)
        await reader.source.run()
        assert reader.source.progress() == (path.stat().st_size,) * 2
        await reader.source.aclose()
        assert reader.source.progress() is None
        await reader.source.aclose()


async def test_it_can_be_stopped_before_it_runs(path, store):
    path.write_bytes(lines(events(40)))
    async with reading(path, store) as reader:
        reader.source.stop()
        await reader.source.open(reader.host)
        reader.source.stop()
        await asyncio.wait_for(reader.source.run(), 5)
        assert reader.books.arrived == 0
    async with reading(path, store) as reader:
        await reader.run()
        assert len(reader.numbers) == 40


# --- in a process of its own -------------------------------------------------------------------------


class Process:
    """`oncebridge run` on a file, with everything it needs beside it."""

    def __init__(self, folder, source, *flags):
        self.folder = folder
        command = [sys.executable, "-m", "oncebridge", "run", "--json", "--source", source]
        command += ["--store", "sqlite:store.db", "--sink", "file:out.ndjson"]
        command += ["--dead", "sqlite:dead.db", *flags]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    @property
    def taken(self):
        with suppress(FileNotFoundError):
            text = (self.folder / "out.ndjson").read_bytes()
            return [json.loads(line)["detail"]["n"] for line in text.splitlines()]
        return []

    async def ended(self):
        out, err = await asyncio.to_thread(self.process.communicate, timeout=30)
        return self.process.returncode, out, err.decode()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.process.kill()
        with suppress(ValueError):  # all was read, and is closed
            self.process.communicate()


async def test_told_to_stop_by_a_signal_it_goes_on_there_when_run_again(tmp_path, path):
    path.write_bytes(lines(events(3000)))
    with Process(tmp_path, "file:in.ndjson", "--rate", "500/s", "--batch", "50") as first:
        await eventually(lambda: len(first.taken) > 300)
        first.process.send_signal(signal.SIGTERM)
        code, _, err = await first.ended()
        assert code == 0, err
        before = len(first.taken)
        assert before < 3000
    with Process(tmp_path, "file:in.ndjson") as second:
        code, out, err = await second.ended()
        assert code == 0, err
        assert Counter(second.taken) == Counter(range(3000))
        assert json.loads(out)["arrived"] <= 3000 - before + 200


async def test_a_second_process_is_refused_and_the_first_goes_on(tmp_path, path):
    path.write_bytes(lines(events(20_000)))  # more than it gets to in this time
    with Process(tmp_path, "file:in.ndjson", "--rate", "400/s") as first:
        await eventually(lambda: first.taken)
        with Process(tmp_path, "file:in.ndjson") as second:
            code, _, err = await second.ended()
            assert code not in (0, None)
            assert "another process is reading it" in err
            assert "Traceback" not in err
        before = len(first.taken)
        await eventually(lambda: len(first.taken) > before)
        first.process.send_signal(signal.SIGTERM)
        code, _, err = await first.ended()
        assert code == 0, err
        assert len(first.taken) < 20_000
    with Process(tmp_path, "file:in.ndjson") as third:
        code, _, err = await third.ended()
        assert code == 0, err
        assert Counter(third.taken) == Counter(range(20_000)), "each once, and none left out"


async def test_standard_input_that_never_ends_stops_at_a_signal(tmp_path):
    with Process(tmp_path, "-") as one:
        one.process.stdin.write(lines(events(20)))
        one.process.stdin.flush()
        await eventually(lambda: len(one.taken) == 20)
        one.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(one.process.wait, 10)
        assert code == 0


async def test_killed_in_the_middle_it_loses_nothing(tmp_path, path):
    path.write_bytes(lines(events(2000)))
    short = ["--lease", "2s", "--sink-timeout", "1s", "--commit-budget", "500ms"]
    short += ["--margin", "100ms", "--batch", "50"]
    with Process(tmp_path, "file:in.ndjson", "--rate", "800/s", *short) as first:
        await eventually(lambda: len(first.taken) > 300)
        first.process.kill()
        await first.ended()
    with Process(tmp_path, "file:in.ndjson", "--set", "source.resume=false", *short) as second:
        await second.ended()
        found = Counter(second.taken)
        assert set(found) == set(range(2000))
        assert sum(found.values()) <= 2000 + 100, "what was between the yes and the commit"
