"""Workers of one store that do not fit together are found, and those of a rolling restart are not."""

import asyncio
import logging
from datetime import timedelta

import pytest
from msgspec.structs import replace
from tests.faults.doubles import CountingDice

from oncebridge.base.clock import system_clock
from oncebridge.dashboard import health
from oncebridge.dashboard.rates import RateTracker
from oncebridge.engine.verdict import Verdict
from oncebridge.errors import StoreUnavailable
from oncebridge.observe.agreement import (
    ROLLING_RESTART_MS,
    DisagreementWarnings,
    differences,
    lost_routes,
)
from oncebridge.observe.counts import Counts
from oncebridge.observe.fleet import (
    GONE_AFTER_MS,
    SEEN_AFTER_MS,
    SILENT_MS,
    FleetMember,
    FleetView,
    read,
)
from oncebridge.observe.report import Report, RouteState, State, StoreHealth
from oncebridge.service.config import load
from oncebridge.service.service import Service
from oncebridge.stores.memory import MemoryStore
from oncebridge.testing.clock import ManualClock

OLD = ROLLING_RESTART_MS
NOW = 10 * 24 * 3600 * 1000


def worker(name, keys="aaa", *, sink="-", route="crm", age_ms=OLD, ago_ms=0, **more):
    at_ms = NOW - ago_ms
    routes = {route: RouteState(sink=sink, keys=keys)}
    return Report(
        State(name, "box", 1, "1", at_ms - age_ms, at_ms, routes=routes, **more), Counts()
    )


def seen(*reports, gone=()):
    return FleetView(list(reports), Counts(), NOW, list(gone))


def found(*reports):
    return [
        (one.code, one.route, one.seen.rpartition(": ")[2]) for one in differences(seen(*reports))
    ]


# --- different rules --------------------------------------------------------------------------


def test_workers_with_other_rules_are_named_by_what_they_agree_on():
    workers = worker("w1"), worker("w2", "bbb"), worker("w3")
    assert found(*workers) == [("mixed-rules", "crm", "w1, w3 / w2")]
    (one,) = differences(seen(*workers))
    assert one.seen == "workers have different rules for route crm: w1, w3 / w2"


def test_a_rolling_restart_is_no_difference():
    assert found(worker("w1"), worker("w2", "bbb", age_ms=OLD - 1)) == []
    assert found(worker("w1", age_ms=100 * OLD), worker("w2", "bbb", age_ms=OLD))


@pytest.mark.parametrize(
    "other",
    [
        worker("w2", "bbb", ended=True),
        worker("w2", "bbb", ago_ms=SILENT_MS + 1),
        worker("w2", "bbb", route="log"),
        worker("w2", ""),
    ],
    ids=["stopped", "silent", "another route", "a version that reports none"],
)
def test_only_workers_that_run_on_one_route_are_compared(other):
    assert found(worker("w1"), other) == []


def test_a_worker_whose_clock_is_off_is_still_one_that_runs():
    late = worker("w2", "bbb", ago_ms=3600_000, store=StoreHealth(clock_offset_ms=3600_000))
    assert len(found(worker("w1"), late)) == 1


# --- different sinks --------------------------------------------------------------------------


def test_one_route_with_two_sinks_is_found():
    one, other = "https://crm.example.com/***00000001", "https://crm.example.com/***00000002"
    assert found(worker("w1", sink=one), worker("w2", sink=other)) == [
        ("mixed-sinks", "crm", "w1 / w2")
    ]
    assert found(worker("w1", sink=one), worker("w2", sink=one)) == []


@pytest.mark.parametrize("kind", ["file:{}.ndjson", "python:hooks:{}", "env:HOOK_{}"])
def test_sinks_that_are_each_workers_own_are_not_compared(kind):
    assert found(worker("w1", sink=kind.format(1)), worker("w2", sink=kind.format(2))) == []


# --- routes that are gone ---------------------------------------------------------------------


def lost(view, *routes):
    return [one.route for one in lost_routes(view, routes)]


def test_a_route_that_only_earlier_workers_had_is_lost():
    before = worker("w1", route="https://crm.example.com/hook", ended=True)
    assert lost(seen(before, worker("w2", route="default")), "default") == [
        "https://crm.example.com/***93c24104"  # the path may be secret
    ]
    assert lost(seen(before), before.state.name, "https://crm.example.com/hook") == []
    killed = worker("w1", route="of old", ago_ms=GONE_AFTER_MS)
    assert lost(seen(killed), "default") == ["of old"]


def test_a_route_that_a_worker_of_another_service_has_is_not_lost():
    assert lost(seen(worker("w1", route="log")), "crm") == []
    assert lost(seen(worker("w1", route="log", ago_ms=GONE_AFTER_MS - 1)), "crm") == []
    ended = worker("w1", route="log", ended=True)
    assert lost(seen(ended, worker("w2", route="log")), "crm") == []


async def test_the_routes_of_workers_that_are_gone_are_known_for_a_day():
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    old, new = FleetMember(store, dice=CountingDice()), FleetMember(store, dice=CountingDice())
    await old.leave(worker("w1", route="of old"))

    async def still():
        clock.advance(GONE_AFTER_MS)
        await new.write(worker("w2", route="default"))
        return lost(await read(store), "default")

    assert await still() == ["of old"], "taken off the list of workers just now"
    assert [one.state.name for one in (await read(store)).gone] == ["w1"]
    clock.advance(SEEN_AFTER_MS - 2 * GONE_AFTER_MS)
    assert await still() == ["of old"]
    clock.advance(GONE_AFTER_MS)
    assert await still() == []


# --- the log ----------------------------------------------------------------------------------


def lines(caplog):
    got = [(r.message, r.route) for r in caplog.records if r.levelno == logging.WARNING]
    caplog.clear()
    return got


def test_a_difference_is_logged_when_it_is_new_and_then_every_hour(caplog):
    warnings = DisagreementWarnings(["crm"])
    mixed = worker("w1"), worker("w2", "bbb")

    def log_after(minutes, *reports):
        view = replace(seen(*reports), now_ms=NOW)
        ahead_ms = minutes * 60_000
        for report in view.reports:
            report.state.at_ms = NOW + ahead_ms
        view.now_ms = NOW + ahead_ms
        warnings.log(view)
        return lines(caplog)

    assert log_after(0, worker("w1"), worker("w2")) == []
    assert log_after(1, *mixed) == [("oncebridge.mixed_rules", "crm")]
    assert log_after(6, *mixed) == []
    assert log_after(60, *mixed) == []
    assert log_after(61, *mixed) == [("oncebridge.mixed_rules", "crm")]
    assert log_after(66, *mixed) == []
    assert log_after(71, worker("w1"), worker("w2")) == []
    assert log_after(76, *mixed) == [("oncebridge.mixed_rules", "crm")], "it is back"
    assert log_after(81, *mixed, worker("w3")) == [("oncebridge.mixed_rules", "crm")], "it changed"


def test_a_lost_route_is_logged_once_and_another_services_difference_never(caplog):
    warnings = DisagreementWarnings(["default"])
    view = seen(worker("w0", route="of old", ended=True), worker("w1"), worker("w2", "bbb"))
    warnings.log(view)
    (record,) = caplog.records
    assert (record.message, record.route) == ("oncebridge.route_lost", "of old")
    assert "dead replay --all --to NEW --route 'of old'" in record.fix
    caplog.clear()
    view.now_ms += 2 * 3600_000
    for report in view.reports:
        report.state.at_ms = view.now_ms
    warnings.log(view)
    assert lines(caplog) == []


# --- the dashboard ----------------------------------------------------------------------------


def test_the_health_page_names_route_and_workers():
    view = seen(worker("w1"), worker("w2", "bbb"))
    pulse = RateTracker()
    pulse.observe(view)
    judged = health.of(view, pulse, health.DeadLetterCount())
    assert (judged.kind, judged.word) == ("warn", "Running")
    (one,) = judged.findings
    assert one.text == "Workers have different rules for route crm: w1 / w2."
    assert "two keys" in one.help
    assert "same configuration" in one.help


# --- services that really share a store -------------------------------------------------------


class Clock:
    """The system's clock, and some time on top of it."""

    ahead_ms = 0

    def __call__(self):
        return system_clock() + self.ahead_ms


def service(tmp_path, rule, clock, **flags):
    (tmp_path / "rules.toml").write_text(f'[[rules]]\nname = "orders"\nkey = {rule}\n')
    setup = load(
        tmp_path / "rules.toml",
        environment={},
        flags={
            "source": "http://127.0.0.1:0/events",
            "store": f"sqlite:{tmp_path}/seen.db",
            "dead": f"sqlite:{tmp_path}/dead.db",
            "sink": f"file:{tmp_path}/out.ndjson",
            **flags,
        },
    )
    return Service(setup, clock=clock)


async def told(running):
    """Let a worker measure its clock and report, as it does at least every ten seconds."""
    await running._measure()
    await running.monitor.share()


async def test_services_with_different_rules_on_one_file_warn_after_a_rolling_restart(
    tmp_path, caplog
):
    clock = Clock()
    one = service(tmp_path, '["detail.orderId"]', clock)
    other = service(tmp_path, '"content"', clock)
    await one.open()
    await other.open()
    try:
        for each in (one, other):
            await told(each)
        await one.monitor.compare()
        assert [line for line in lines(caplog) if "mixed" in line[0]] == []
        clock.ahead_ms = ROLLING_RESTART_MS
        for each in (one, other):
            await told(each)
        await one.monitor.compare()
        await other.monitor.compare()
        assert lines(caplog) == [("oncebridge.mixed_rules", "default")] * 2
    finally:
        await one.close(timedelta(seconds=1))
        await other.close(timedelta(seconds=1))


async def test_a_service_whose_route_has_a_new_name_says_so_after_its_start(tmp_path, caplog):
    clock = Clock()
    for name in ("of old", "default"):
        running = service(tmp_path, '"content"', clock, route=name)
        await running.open()
        await told(running)
        await running.monitor.compare()
        await running.close(timedelta(seconds=1))
    assert ("oncebridge.route_lost", "of old") in lines(caplog)


@pytest.mark.parametrize("how", ["hangs", "fails"])
async def test_a_read_that_hangs_or_fails_neither_delays_nor_fails_the_start(
    tmp_path, monkeypatch, how
):
    asked = asyncio.Event()

    async def read_badly(*_):
        asked.set()
        if how == "hangs":
            await asyncio.Event().wait()
        raise StoreUnavailable("gone")

    running = service(tmp_path, '"content"', Clock())
    monkeypatch.setattr("oncebridge.service.monitor.read", read_badly)
    await running.open()
    try:
        await asked.wait()
        (answer,) = await running.router.process([b'{"detail":{"n":1}}'])
        assert answer.verdict is Verdict.DELIVERED
        assert running._not_ready() == []
    finally:
        assert await running.close(timedelta(seconds=1))
