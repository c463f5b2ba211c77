"""What `check` learns from the reports of workers."""

import sqlite3
from contextlib import closing

from oncebridge import Books
from oncebridge.base.clock import SystemDice, system_clock
from oncebridge.check.finding import Checkup
from oncebridge.check.stores import check_store
from oncebridge.observe.counts import Counts, RouteCounts
from oncebridge.observe.fleet import FleetMember
from oncebridge.observe.report import Report, RouteState, State, StoreHealth
from oncebridge.service.config import load
from oncebridge.stores.sqlite.store import SQLiteStore


def setup_of(tmp_path):
    file = tmp_path / "oncebridge.toml"
    file.write_text(
        f'source = "-"\nstore = "sqlite:{tmp_path}/seen.db"\nsink = "-"\n'
        f'dead = "sqlite:{tmp_path}/dead.db"\n'
    )
    return load(file, environment={})


async def report(tmp_path, books, **more):
    store = SQLiteStore(tmp_path / "seen.db")
    await store.open()
    now_ms = system_clock()
    state = State("w1", "h", 1, "1", started_ms=now_ms, at_ms=now_ms, **more)
    counts = Counts(routes={"crm": RouteCounts(books=books.counts())})
    await FleetMember(store, dice=SystemDice()).write(Report(state, counts))
    await store.aclose()


async def report_route(tmp_path, name, route, keys="aaa", **more):
    """Write what a worker would that has run for a day."""
    async with SQLiteStore(tmp_path / "seen.db") as store:
        now_ms = system_clock()
        routes = {route: RouteState(sink="-", keys=keys)}
        state = State(name, "h", 1, "1", now_ms - 86_400_000, now_ms, routes=routes, **more)
        await FleetMember(store, dice=SystemDice()).write(Report(state, Counts()))


async def test_a_file_without_its_write_ahead_log_is_left_so(tmp_path):
    await report_route(tmp_path, "w1", "of old", ended=True)
    with closing(sqlite3.connect(tmp_path / "seen.db")) as db:
        db.execute("PRAGMA journal_mode = DELETE")
    await check_store(setup_of(tmp_path), Checkup(), clock=system_clock)
    with closing(sqlite3.connect(tmp_path / "seen.db")) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)


async def test_a_route_that_the_configuration_no_longer_has_is_found(tmp_path):
    await report_route(tmp_path, "w1", "https://crm.example.com/hook", ended=True)
    await report_route(tmp_path, "w2", "log")
    await report_route(tmp_path, "w3", "default", ended=True)
    checkup = Checkup()
    await check_store(setup_of(tmp_path), checkup, clock=system_clock)
    (one,) = checkup.findings
    assert (one.code, one.subject) == ("route-lost", "route https://crm.example.com/***93c24104")
    assert "--to NEW --route OLD (oncebridge dead list shows it)" in one.fix
    assert "hook" not in f"{one.seen} {one.fix}"


async def test_workers_with_different_rules_for_one_route_are_found(tmp_path):
    await report_route(tmp_path, "w1", "default")
    await report_route(tmp_path, "w2", "default", "bbb")
    checkup = Checkup()
    await check_store(setup_of(tmp_path), checkup, clock=system_clock)
    (one,) = checkup.findings
    assert (one.code, one.subject) == ("mixed-rules", "route default")
    assert one.seen.endswith("for route default: w1 / w2")


async def found(tmp_path):
    checkup = Checkup()
    await check_store(setup_of(tmp_path), checkup, clock=system_clock)
    return [(one.code, one.subject) for one in checkup.findings]


async def test_long_runs_of_stale_events_are_found_in_the_reports(tmp_path):
    assert await found(tmp_path) == []
    assert not (tmp_path / "seen.db").exists(), "nothing is made to be looked at"
    books = Books()
    await report(tmp_path, books)
    assert await found(tmp_path) == []
    books.stale_runs = 2
    await report(tmp_path, books)
    assert await found(tmp_path) == [("stale-runs", "route crm")]


async def test_a_store_that_lost_its_records_is_found_in_the_reports(tmp_path):
    await report(tmp_path, Books(), store=StoreHealth(records_lost_ms=1_700_000_000_000))
    assert await found(tmp_path) == [("records-lost", "store")]
