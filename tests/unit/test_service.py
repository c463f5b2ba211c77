import asyncio
import itertools
import json
import logging
from collections import Counter
from contextlib import asynccontextmanager, suppress
from datetime import timedelta

import pytest
from msgspec.structs import replace
from tests.faults.doubles import (
    After,
    FailingDeadLetters,
    FaultyStore,
    ScriptedSink,
    event,
    eventually,
    now,
    now_ms,
    seconds,
    virtual,
)

from oncebridge import No, StoreError, StoreUnavailable, Verdict, Yes
from oncebridge.base.clock import SystemDice
from oncebridge.base.secrets import Address
from oncebridge.engine import pauses
from oncebridge.engine.gateway import Gateway
from oncebridge.errors import ConfigError
from oncebridge.events.pattern import Pattern
from oncebridge.observe import fleet
from oncebridge.service.addresses import DeadPlace, SinkPlace, SourcePlace, StorePlace
from oncebridge.service.config import load
from oncebridge.service.service import Service
from oncebridge.sources.pump import Pump, SourceRecord
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore


class Stream:
    """A source of so many batches, in the way of files and queues."""

    def __init__(self, *batches, ends=True):
        self.batches = list(batches)
        self.ends = ends
        self.opened = self.closed = 0
        self.numbers = itertools.count(1)
        self.pump = None

    async def open(self, host):
        self.opened += 1
        self.host = host
        self.pump = Pump(host.router, lambda *_: None)

    async def take(self):
        if not self.batches and not self.ends:
            await asyncio.Event().wait()
        batch = self.batches.pop(0) if self.batches else []
        return [SourceRecord(next(self.numbers), raw) for raw in batch] or None

    async def run(self):
        await self.pump.run(self.take)

    def stop(self):
        if self.pump is not None:
            self.pump.stop()

    def progress(self):
        return None

    async def aclose(self):
        self.closed += 1


class Caller(Stream):
    """A source that is called, in the way of HTTP: it puts into the inbox."""

    def __init__(self):
        super().__init__()
        self.stopped = asyncio.Event()
        self.answers = []

    async def run(self):
        await self.stopped.wait()

    def stop(self):
        self.stopped.set()

    def put(self, *raws):
        self.host.inbox.put(raws, lambda at, answer: self.answers.append(answer))


class Store(FaultyStore):
    """A store that counts how often it is opened, closed, looked into and purged."""

    def __init__(self, inner=None):
        super().__init__(inner or MemoryStore(clock=now_ms))
        self.is_closed = False
        self.peek_takes_s = 0.0
        self.broken = None

    async def peek(self, keys):
        self.calls["peek"] += 1
        if self.broken is not None:
            raise self.broken
        await asyncio.sleep(self.peek_takes_s)
        return await self.inner.peek(keys)

    async def purge(self, limit=1000):
        self.calls["purge"] += 1
        if self.broken is not None:
            raise self.broken
        return await self.inner.purge(limit)

    async def aclose(self):
        self.calls["close"] += 1
        await self.inner.aclose()


class Dead(FailingDeadLetters):
    takes_s = 0.0
    is_closed = False

    async def put(self, letters):
        await asyncio.sleep(self.takes_s)
        assert not self.is_closed, "put after the end"
        await super().put(letters)

    async def aclose(self):
        self.is_closed = True


class Parts:
    """A service made of doubles: routes by name, each with a sink, and an optional pattern."""

    def __init__(self, *sources, sinks=None, matches=None, store=None, dead=None, **flags):
        self.sources = sources
        self.sinks = sinks or {"crm": ScriptedSink()}
        self.store = store or Store()
        self.dead = dead or Dead()
        flags = {"source": "file:none", "sink": "-", "store": "memory:", "dead": "memory:", **flags}
        made = load(environment={}, flags=flags)
        config = replace(
            made.config,
            source=[SourcePlace(Address("test:source"), source) for source in sources],
            store=StorePlace(Address("test:store"), self.store),
            dead=DeadPlace(Address("test:dead"), self.dead),
        )
        (route,) = made.routes
        routes = [
            replace(
                route,
                name=name,
                sink=SinkPlace(Address("test:sink"), sink),
                match=(matches or {}).get(name),
            )
            for name, sink in self.sinks.items()
        ]
        self.service = Service(replace(made, config=config, routes=tuple(routes)), clock=now_ms)

    @property
    def sink(self):
        return next(iter(self.sinks.values()))

    @property
    def numbers(self):
        return [json.loads(raw)["detail"]["n"] for raw in self.sink.raws]

    def check_closed(self):
        assert all(sink.closed for sink in self.sinks.values())
        assert all(source.closed for source in self.sources)
        assert self.store.calls["close"]
        assert self.dead.is_closed
        assert [task for task in asyncio.all_tasks() if not task.done()] == [asyncio.current_task()]


@asynccontextmanager
async def running(*sources, **more):
    parts = Parts(*sources, **more)
    await parts.service.open()
    run = asyncio.create_task(parts.service.run())
    try:
        yield parts
        parts.service.stop()
        await run
    finally:
        assert await parts.service.close()
    parts.check_closed()
    balance(parts.service)


def balance(service):
    counts = service.counts()
    assert counts["arrived"] == sum(counts[verdict] for verdict in Verdict)
    assert counts["in_flight"] == 0


def events(count, first=0, **envelope):
    return [event({"n": n}, id=f"e{n}", **envelope) for n in range(first, first + count)]


# --- to the end ------------------------------------------------------------------------------------


@virtual
async def test_it_runs_until_every_source_is_at_its_end():
    parts = Parts(Stream(events(10), events(10, 10)), Stream(events(10, 15)))
    await parts.service.open()
    await parts.service.run()
    assert await parts.service.close()
    assert sorted(parts.numbers) == list(range(25))
    counts = parts.service.counts()
    assert (counts["arrived"], counts["delivered"], counts["duplicate"]) == (30, 25, 5)
    balance(parts.service)
    parts.check_closed()


@virtual
async def test_one_source_that_does_not_end_keeps_it_running_and_the_others_are_not_missed():
    async with running(Stream(events(10)), Stream(events(10, 10), ends=False)) as parts:
        await eventually(lambda: len(parts.numbers) == 20)
        await asyncio.sleep(100)


@virtual
async def test_a_source_that_fails_ends_the_others_and_is_heard_of():
    class Fails(Stream):
        async def run(self):
            await asyncio.sleep(5)
            raise ConfigError("source", "torn")

    parts = Parts(Fails(), Stream(events(3), ends=False), Caller())
    await parts.service.open()
    with pytest.raises(ConfigError, match="torn"):
        await parts.service.run()
    with pytest.raises(ConfigError, match="torn"):
        await parts.service.close()
    parts.check_closed()
    assert sorted(parts.numbers) == [0, 1, 2]


@virtual
async def test_a_source_that_fails_after_the_stop_is_heard_of_too():
    class Fails(Stream):
        async def run(self):
            await super().run()
            raise ConfigError("source", "torn")

    parts = Parts(Fails(ends=False))
    await parts.service.open()
    run = asyncio.create_task(parts.service.run())
    await asyncio.sleep(1)
    parts.service.stop()
    await run
    with pytest.raises(ConfigError, match="torn"):
        await parts.service.close()
    parts.check_closed()


# --- stopping -------------------------------------------------------------------------------------


@virtual
async def test_a_stop_finishes_what_is_under_way_and_costs_no_duplicate():
    store = Store()
    slow = ScriptedSink(otherwise=After(3, Yes()), concurrency=2)
    async with running(Stream(events(20), ends=False), sinks={"crm": slow}, store=store) as first:
        await eventually(lambda: len(slow.taken) == 4)
    assert len(slow.seen) == len(slow.taken) < 20
    async with running(Stream(events(20)), store=store) as second:
        await eventually(lambda: len(second.numbers) + len(first.numbers) == 20)
    assert sorted(first.numbers + second.numbers) == list(range(20))


@virtual
async def test_a_stop_tells_when_not_all_was_finished_in_time():
    hangs = ScriptedSink(otherwise=After(9, Yes()))
    parts = Parts(Stream(events(3), ends=False), sinks={"crm": hangs})
    await parts.service.open()
    run = asyncio.create_task(parts.service.run())
    await eventually(lambda: hangs.under_way)
    parts.service.stop()
    await run
    began = now()
    assert not await parts.service.close(seconds(1))
    assert now() - began < 20


@virtual
async def test_stopped_while_the_sink_is_down_it_ends_at_once():
    down = ScriptedSink(otherwise=No("down"))
    async with running(Stream(*[events(9, 9 * n) for n in range(9)]), sinks={"crm": down}):
        await asyncio.sleep(500)
        began = now()
    assert now() - began < 1


@virtual
async def test_it_can_be_stopped_before_it_runs():
    parts = Parts(Stream(events(10)), Caller())
    await parts.service.open()
    parts.service.stop()
    await parts.service.run()
    assert await parts.service.close()
    parts.check_closed()


@virtual
async def test_it_can_be_closed_without_having_run():
    parts = Parts(Stream(events(10)))
    await parts.service.open()
    assert await parts.service.close()
    parts.check_closed()
    assert parts.sink.seen == []


@virtual
async def test_a_source_that_does_not_listen_is_ended_before_the_store_is_closed():
    """What it has to give back (a checkpoint) needs the store."""

    class Stubborn(Stream):
        given_back = False

        async def run(self):
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)
                self.given_back = not self.host.store.calls["close"]

    source = Stubborn()
    parts = Parts(source)
    await parts.service.open()
    run = asyncio.create_task(parts.service.run())
    await asyncio.sleep(1)
    parts.service.stop()
    await run
    await parts.service.close()
    assert source.given_back
    parts.check_closed()


@virtual
async def test_arrivals_of_a_caller_are_answered_before_everything_is_closed():
    dead = Dead()
    dead.takes_s = 2
    caller = Caller()
    parts = Parts(caller, matches={"crm": None}, dead=dead)
    await parts.service.open()
    run = asyncio.create_task(parts.service.run())
    await asyncio.sleep(1)
    caller.put(*events(2))
    await asyncio.sleep(0.1)
    caller.put(b"no event")
    await asyncio.sleep(0.1)
    parts.service.stop()
    await run
    assert await parts.service.close()
    assert [answer.acknowledge for answer in caller.answers] == [True] * 3
    parts.check_closed()


@virtual
async def test_what_no_route_is_for_is_buried_before_the_dead_letters_are_closed():
    dead = Dead()
    dead.takes_s = 2
    caller = Caller()
    match = {"crm": Pattern.compile({"detail-type": ["Call"]})}
    parts = Parts(caller, matches=match, dead=dead)
    await parts.service.open()
    run = asyncio.create_task(parts.service.run())
    await asyncio.sleep(1)
    caller.put(*events(2))
    await asyncio.sleep(0.1)
    parts.service.stop()
    await run
    await parts.service.close()
    assert [answer.verdict for answer in caller.answers] == [Verdict.DEAD] * 2
    parts.check_closed()


@virtual
async def test_one_source_that_cannot_be_closed_does_not_keep_the_rest_open():
    class Jammed(Stream):
        async def aclose(self):
            await super().aclose()
            raise OSError("jammed")

    parts = Parts(Jammed(events(2)), Stream(events(2, 2)))
    await parts.service.open()
    await parts.service.run()
    with pytest.raises(OSError, match="jammed"):
        await parts.service.close()
    parts.check_closed()


# --- what can't be opened ---------------------------------------------------------------------------


class Cannot:
    async def open(self, *_):
        raise ConfigError("", "cannot be opened")


class NoSink(Cannot, ScriptedSink): ...


class NoSource(Cannot, Stream): ...


class NoDead(Cannot, Dead): ...


class NoStore(Store):
    async def open(self):
        raise StoreError("cannot be opened")


@pytest.mark.parametrize("what", ["sink", "second sink", "dead", "store", "source"])
@virtual
async def test_when_one_part_cannot_be_opened_everything_is_closed(what):
    sinks = {"crm": ScriptedSink(), "lake": ScriptedSink()}
    sources = [Stream(events(3)), Stream()]
    more = {}
    match what:
        case "sink":
            sinks["crm"] = NoSink()
        case "second sink":
            sinks["lake"] = NoSink()
        case "dead":
            more["dead"] = NoDead()
        case "store":
            more["store"] = NoStore()
        case "source":
            sources[1] = NoSource()
    parts = Parts(*sources, sinks=sinks, **more)
    with pytest.raises((ConfigError, StoreError), match="cannot be opened"):
        await parts.service.open()
    await parts.service.close()
    parts.check_closed()
    assert parts.service.counts()["arrived"] == 0


@pytest.mark.parametrize("never", ["the store", "a source"])
@virtual
async def test_what_never_came_to_run_writes_nothing_of_itself(never):
    store = Store()
    if never == "the store":
        store.arm("open.before", times=1e9)
    parts = Parts(Stream() if never == "the store" else NoSource(), store=store)
    with suppress(ConfigError):
        await parts.service.open()
        await asyncio.sleep(30)
    await parts.service.close()
    assert store.calls["claim"] == store.calls["release"] == 0


@pytest.mark.parametrize("error", [RecursionError, StoreUnavailable, TimeoutError, ValueError])
@virtual
async def test_what_cannot_be_told_at_the_end_keeps_nothing_open(error, caplog):
    async with running(Stream(events(3), ends=False)) as parts:
        await eventually(lambda: len(parts.numbers) == 3)

        async def fail(**_):
            raise error("quoting an event")

        parts.service.monitor.aclose = fail
    (told,) = [record for record in caplog.records if record.message == "oncebridge.not_told"]
    assert told.error == error.__name__


@virtual
async def test_a_store_that_is_only_away_for_now_is_waited_for():
    store = Store()
    store.arm("open.before", times=3)
    async with running(Stream(events(10), ends=False), store=store) as parts:
        await eventually(lambda: len(parts.numbers) == 10, 600)


@virtual
async def test_nobody_uses_a_store_before_it_could_be_opened():
    store = Store()
    store.arm("open.before", times=20)
    async with running(Caller(), store=store) as parts:
        await asyncio.sleep(10)
        assert (store.calls["peek"], store.calls["purge"]) == (0, 0)
        assert not parts.service.monitor.report().state.store.answers
        await eventually(lambda: store.calls["peek"] and store.calls["purge"], 600)
        await eventually(lambda: parts.service.monitor.report().state.store.answers, 600)
        assert not parts.service.gave_up


@virtual
async def test_a_store_that_comes_late_and_is_unfit_ends_the_service_after_a_while():
    store = Store()
    store.arm("open.before")
    async with running(Caller(), store=store) as parts:
        store.arm("open.before", times=5, error=ConfigError("", "it is a replica"))
        await asyncio.sleep(10)  # a failover, and then it is the primary
        assert not parts.service.gave_up
    late = Store()
    late.arm("open.before")
    parts = Parts(Caller(), store=late)
    await parts.service.open()
    late.arm("open.before", times=1000, error=ConfigError("", "it evicts"))
    await parts.service.run()
    assert parts.service.gave_up == "it evicts"
    await parts.service.close()


async def test_a_spool_that_another_uses_is_refused_and_everything_closed(tmp_path):
    path = str(tmp_path / "spool.db")
    first = Parts(Caller(), spool=path)
    await first.service.open()
    second = Parts(Caller(), spool=path)
    with pytest.raises(ConfigError, match="another process"):
        await second.service.open()
    await second.service.close()
    assert second.sink.closed
    assert await first.service.close()


# --- a spool ---------------------------------------------------------------------------------------


async def test_with_a_spool_arrivals_are_kept_and_forwarded_behind(tmp_path):
    caller = Caller()
    parts = Parts(caller, spool=str(tmp_path / "spool.db"))
    await parts.service.open()
    run = asyncio.create_task(parts.service.run())
    caller.put(*events(30))
    await eventually(lambda: len(parts.numbers) == 30 and not parts.service.spool.depth)
    assert all(answer.acknowledge and answer.verdict is None for answer in caller.answers)
    parts.service.stop()
    await run
    assert await parts.service.close()


async def test_what_is_in_the_spool_at_the_stop_is_there_at_the_next_start(tmp_path):
    path = str(tmp_path / "spool.db")
    caller, down = Caller(), ScriptedSink(otherwise=No("down"))
    parts = Parts(caller, spool=path, sinks={"crm": down})
    await parts.service.open()
    run = asyncio.create_task(parts.service.run())
    caller.put(*events(30))
    await eventually(lambda: len(caller.answers) == 30)
    parts.service.stop()
    await run
    assert await parts.service.close()
    again = Parts(Caller(), spool=path)
    await again.service.open()
    run = asyncio.create_task(again.service.run())
    await eventually(lambda: len(again.numbers) == 30)
    again.service.stop()
    await run
    assert await again.service.close()


async def test_a_spool_does_not_keep_a_service_running_whose_sources_have_ended(tmp_path):
    parts = Parts(Stream(events(5)), spool=str(tmp_path / "spool.db"))
    await parts.service.open()
    await asyncio.wait_for(parts.service.run(), 10)
    assert await parts.service.close()
    assert len(parts.numbers) == 5


# --- pause and resume ----------------------------------------------------------------------------------


@virtual
async def test_a_pause_is_noticed_within_a_second_and_so_is_its_end():
    batches = [events(1, n) for n in range(100)]
    async with running(
        Stream(*batches), sinks={"crm": ScriptedSink(otherwise=After(1, Yes()))}
    ) as (parts):
        await asyncio.sleep(5)
        await pauses.pause(parts.store, ["crm"], SystemDice())
        await asyncio.sleep(3)
        taken = len(parts.numbers)
        (gateway,) = parts.service.router.gateways
        assert gateway.is_paused
        await asyncio.sleep(60)
        assert len(parts.numbers) == taken
        await pauses.resume(parts.store, ["crm"])
        await asyncio.sleep(10)
        assert not gateway.is_paused
        assert len(parts.numbers) > taken


@virtual
async def test_only_the_named_route_is_paused():
    sinks = {"crm": ScriptedSink(), "lake": ScriptedSink()}
    caller = Caller()
    async with running(caller, sinks=sinks) as parts:
        await pauses.pause(parts.store, ["lake"], SystemDice())
        await asyncio.sleep(3)
        caller.put(*events(3))
        await eventually(lambda: len(caller.answers) == 3)
        assert not any(answer.acknowledge for answer in caller.answers)
        assert len(sinks["crm"].taken) == 3
        assert sinks["lake"].seen == []
        await pauses.resume(parts.store, ["lake"])
        await asyncio.sleep(3)
        caller.put(*events(3))
        await eventually(lambda: len(caller.answers) == 6)
        assert len(sinks["crm"].taken) == len(sinks["lake"].taken) == 3


@virtual
async def test_a_route_that_was_paused_before_the_start_gets_nothing_from_the_start():
    store = Store()
    await pauses.pause(store, ["crm"], SystemDice())
    store.peek_takes_s = 0.5
    async with running(Stream(events(10), ends=False), store=store) as parts:
        await asyncio.sleep(20)
        assert parts.sink.seen == []
        await pauses.resume(store, ["crm"])
        await eventually(lambda: len(parts.numbers) == 10)


@virtual
async def test_while_nobody_can_look_a_pause_stays_what_it_was():
    async with running(Stream(events(10), ends=False)) as parts:
        (gateway,) = parts.service.router.gateways
        parts.store.broken = StoreUnavailable("away")
        await asyncio.sleep(30)
        assert not gateway.is_paused
        parts.store.broken = None
        await pauses.pause(parts.store, ["crm"], SystemDice())
        await asyncio.sleep(3)
        parts.store.broken = StoreError("damaged")
        await asyncio.sleep(30)
        assert gateway.is_paused
        parts.store.broken = None
        await pauses.resume(parts.store, ["crm"])
        await asyncio.sleep(3)
        assert not gateway.is_paused


async def test_a_pause_comes_from_another_process_and_lasts_over_a_restart(tmp_path):
    operator = SQLiteStore(tmp_path / "s.db")
    for number in range(2):
        caller = Caller()
        parts = Parts(caller, store=Store(SQLiteStore(tmp_path / "s.db")))
        await parts.service.open()
        run = asyncio.create_task(parts.service.run())
        (gateway,) = parts.service.router.gateways
        if number == 0:
            assert not gateway.is_paused
            await pauses.pause(operator, ["crm"], SystemDice())
        await eventually(lambda gateway=gateway: gateway.is_paused)
        caller.put(*events(3))
        await eventually(lambda caller=caller: len(caller.answers) == 3)
        assert not any(answer.acknowledge for answer in caller.answers)
        if number == 1:
            await pauses.resume(operator, ["crm"])
            await eventually(lambda gateway=gateway: not gateway.is_paused)
            caller.put(*events(3))
            await eventually(lambda caller=caller: len(caller.answers) == 6)
            assert len(parts.numbers) == 3
        parts.service.stop()
        await run
        assert await parts.service.close()
    await operator.aclose()


# --- looking after it --------------------------------------------------------------------------------


@virtual
async def test_what_is_past_keeping_is_purged_in_time_and_in_full():
    stream = Stream(events(10), ends=False)
    async with running(stream, window="60s", share_counts="false") as parts:
        await asyncio.sleep(1)
        assert parts.store.inner._count == 10 + 2  # the epoch and the name of the sink stay
        await asyncio.sleep(200)
        assert parts.store.inner._count == 2


@virtual
async def test_a_purge_that_fails_is_tried_again(caplog):
    async with running(Stream(ends=False)) as parts:
        parts.store.broken = StoreUnavailable("away")
        await asyncio.sleep(100)
        parts.store.broken = None
        before = parts.store.calls["purge"]
        await asyncio.sleep(100)
        assert parts.store.calls["purge"] >= before + 9


@virtual
async def test_each_second_with_work_is_told_in_one_line_for_each_route(caplog):
    caplog.set_level(logging.INFO, logger="oncebridge")
    sinks = {"crm": ScriptedSink(), "lake": ScriptedSink()}
    async with running(Stream(events(10), events(5, 5), ends=False), sinks=sinks):
        await asyncio.sleep(30)
    told = [record for record in caplog.records if record.message == "oncebridge.batch"]
    assert Counter(record.route for record in told) == {"crm": 1, "lake": 1}
    for record in told:
        assert (record.arrived, record.delivered, record.duplicate) == (15, 10, 5)


@virtual
async def test_no_line_holds_anything_of_an_event(caplog):
    caplog.set_level(logging.DEBUG, logger="oncebridge")
    canary = "canary-5e1f"
    raws = [event({"n": 1, "canary": canary}, id=canary), canary.encode(), b'{"' + canary.encode()]
    sink = ScriptedSink(ValueError(canary), No("no"))
    async with running(Stream(raws, ends=False), sinks={"crm": sink}):
        await asyncio.sleep(30)
    assert caplog.records
    for record in caplog.records:
        assert canary not in str(vars(record))


@virtual
async def test_it_is_told_when_a_sink_goes_down_and_when_it_is_back(caplog):
    down = ScriptedSink(otherwise=No("down"))
    async with running(Stream(*[events(9, 9 * n) for n in range(3)]), sinks={"crm": down}) as parts:
        await asyncio.sleep(100)
        down.otherwise = Yes()
        await eventually(lambda: len(parts.numbers) == 27, 600)
        await asyncio.sleep(5)
    lines = [record for record in caplog.records if hasattr(record, "what")]
    assert [(line.message, line.route, line.what) for line in lines] == [
        ("oncebridge.down", "crm", "the sink"),
        ("oncebridge.up_again", "crm", "the sink"),
    ]


@virtual
async def test_of_two_that_are_down_each_is_told_when_it_is_back(caplog, monkeypatch):
    down = []
    monkeypatch.setattr(Gateway, "down", lambda _: list(down))
    async with running(Stream(ends=False), sinks={"crm": ScriptedSink()}):
        for now in (["the store"], ["the sink", "the store"], ["the sink"], ["the store"], []):
            down[:] = now
            await asyncio.sleep(5)
    told = [(line.message, line.what) for line in caplog.records if hasattr(line, "what")]
    assert told == [
        ("oncebridge.down", "the store"),
        ("oncebridge.down", "the sink"),
        ("oncebridge.up_again", "the store"),
        ("oncebridge.down", "the store"),
        ("oncebridge.up_again", "the sink"),
        ("oncebridge.up_again", "the store"),
    ]


@virtual
async def test_the_counts_of_all_routes_add_up():
    sinks = {"crm": ScriptedSink(), "lake": ScriptedSink()}
    matches = {"crm": Pattern.compile({"detail-type": ["Call"]})}
    batch = [*events(4, detail_type="Call"), *events(3, 10), b"bad"]
    async with running(Stream(batch, ends=False), sinks=sinks, matches=matches) as parts:
        await asyncio.sleep(5)
    counts = parts.service.counts()
    assert counts["arrived"] == (4 + 1) + (4 + 3)
    assert counts["delivered"] == 4 + 4 + 3
    assert counts["dead"] == 1


@virtual
async def test_what_the_only_route_is_not_for_is_counted_too():
    matches = {"crm": Pattern.compile({"detail-type": ["Call"]})}
    batch = [*events(4, detail_type="Call"), *events(3, 10)]
    async with running(Stream(batch, ends=False), matches=matches) as parts:
        await asyncio.sleep(5)
    counts = parts.service.counts()
    assert (counts["arrived"], counts["delivered"], counts["dead"]) == (7, 4, 3)


@virtual
async def test_hooks_are_told_of_every_decision():
    seen = []
    parts = Parts(Stream(events(3)))
    service = Service(parts.service._setup, hooks=[seen.extend], clock=now_ms)
    await service.open()
    await service.run()
    assert await service.close(timedelta(seconds=5))
    assert [decision.outcome.verdict for decision in seen] == [Verdict.DELIVERED] * 3


# --- what others learn of it ---------------------------------------------------------------------


@virtual
async def test_a_worker_that_is_killed_has_told_all_but_its_last_second():
    stream = Stream(events(10), ends=False)
    async with running(stream) as parts:
        await eventually(lambda: len(parts.numbers) == 10)
        await asyncio.sleep(1.5)
        told = (await fleet.read(parts.store)).total.routes["crm"]
        assert told.books["delivered"] == 10
        quiet = parts.store.calls["claim"]
        await asyncio.sleep(8)
        assert parts.store.calls["claim"] == quiet, "nothing is written while nothing happens"


@virtual
async def test_where_writes_cost_money_counts_are_told_every_ten_seconds():
    stream = Stream(*[events(1, n) for n in range(5)], ends=False)
    async with running(stream) as parts:
        parts.service.monitor.is_charged = True
        await asyncio.sleep(1)
        writes = parts.store.calls["release"]
        for _ in range(30):
            parts.service.router.gateways[0].books.arrive(1)
            parts.service.router.gateways[0].books.settle(Verdict.DELIVERED)
            await asyncio.sleep(1)
        assert parts.store.calls["release"] - writes <= 4


@virtual
async def test_a_store_that_lost_its_records_is_told_and_counted(caplog):
    caller = Caller()
    async with running(caller) as parts:
        caller.put(*events(2))
        await eventually(lambda: len(parts.numbers) == 2)
        await asyncio.sleep(2)
        assert parts.service.monitor.report().state.store.records_lost_ms == 0
        parts.store.inner = MemoryStore(clock=now_ms)
        await asyncio.sleep(3)
        caller.put(*events(2))
        await eventually(lambda: len(parts.numbers) == 4)
        assert parts.service.counts()["unprotected"] == 2
        assert parts.service.monitor.report().state.store.records_lost_ms
    said = [one for one in caplog.records if one.message == "oncebridge.store_lost_its_records"]
    assert len(said) == 1
    assert "delivered once more" in said[0].what


@virtual
async def test_another_sink_on_the_same_route_is_told_at_once(caplog):
    store = Store()
    for address in ("https://a.example.com/x", "https://a.example.com/x", "https://b.example.com/"):
        parts = Parts(Stream(events(1)), store=store)
        route = parts.service._setup.routes[0]
        named = replace(route, sink=SinkPlace(Address(address), parts.sink))
        parts.service._setup = replace(parts.service._setup, routes=(named,))
        await parts.service.open()
        await parts.service.run()
        assert await parts.service.close()
    (said,) = [one for one in caplog.records if one.message == "oncebridge.sink_changed"]
    assert said.route == "crm"
    assert "a.example.com/***" in said.what
    assert "now to https://b.example.com/" in said.what
