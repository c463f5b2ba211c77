"""A spool on a small disk: full, freed, filled up by itself; over real sockets."""

import json
import logging
import sqlite3
from contextlib import closing
from http.client import HTTPConnection

import pytest
from tests.http.live import Desk, event, live
from tests.servers.small_disk import KINDS, small_disk

from oncebridge.base.clock import SystemDice
from oncebridge.engine import pauses
from oncebridge.sinks.api import No, Yes
from oncebridge.stores.sqlite.database import wal_limit

MIB = 1024 * 1024
WAIT_S = 90  # beside others on a slow disk
NOWHERE = "http://127.0.0.1:0"


@pytest.fixture(params=KINDS)
def disk(request, tmp_path, monkeypatch):
    with small_disk(request.param, tmp_path / "small", 8 * MIB, monkeypatch) as made:
        yield made


@pytest.fixture
def spooling(disk, tmp_path):
    """A service that writes nothing but its spool, on the small disk."""
    flags = {
        "spool": f"{disk.folder}/spool.db",
        "store": "memory:",
        "dead": "memory:",
        "breaker": "100000",
        "health": NOWHERE,
        "metrics": NOWHERE,
        "backoff": "10ms",
        "max_backoff": "50ms",
    }
    with live(tmp_path, Desk(No("down")), **flags) as running:
        yield running
        running.sink.answer = Yes()


def large(number, size=20_000):
    return event(number, detail={"order": number, "filler": "x" * size})


def ask(port, path):
    with closing(HTTPConnection("127.0.0.1", port, timeout=10)) as line:
        line.request("GET", path)
        answer = line.getresponse()
        return answer.status, answer.read().decode()


def readiness(running):
    """Ask everybody who tells whether events are taken."""
    port = running.service.health_port
    source = running.get("/readyz")
    status, _ = ask(port, "/readyz")
    _, exposed = ask(port, "/metrics")
    gauge = next(line for line in exposed.splitlines() if line.startswith("oncebridge_ready "))
    return source.status, status, float(gauge.split()[1])


READY, NOT_READY = (200, 200, 1.0), (503, 503, 0.0)


def lines(caplog):
    return [one for one in caplog.records if one.message.startswith("oncebridge.spool_")]


def test_a_disk_that_was_full_is_used_again_though_nobody_sends_anything(spooling, disk, caplog):
    assert spooling.post(event(1)).status == 202
    assert readiness(spooling) == READY
    disk.fill()
    refused = spooling.post(large(2))
    assert (refused.status, refused.retry_after) == (503, 1)
    assert refused.results[0]["reason"] == "spool: the disk of the spool is full"
    assert readiness(spooling) == NOT_READY
    assert spooling.get("/readyz").json["reasons"] == ["the disk of the spool is full"]
    _, body = ask(spooling.service.health_port, "/readyz")
    assert json.loads(body) == spooling.get("/readyz").json
    for number in range(3, 10):
        assert spooling.post(large(number)).status == 503
    (warning,) = lines(caplog)
    assert (warning.message, warning.levelno) == ("oncebridge.spool_full", logging.WARNING)
    assert "senders get 503" in warning.what
    assert str(disk.folder) in warning.error
    assert "free space on that disk" in warning.fix
    disk.free()
    spooling.until(lambda: readiness(spooling) == READY, WAIT_S)
    _, again = lines(caplog)
    assert (again.message, again.refused) == ("oncebridge.spool_available", 7)
    assert spooling.post(large(2)).status == 202
    spooling.sink.answer = Yes()
    spooling.until(lambda: not spooling.service.spool.depth, WAIT_S)
    assert sorted(spooling.sink.bodies) == sorted([event(1), large(2)])


@pytest.mark.full
def test_a_small_disk_never_jams_and_nothing_acknowledged_is_lost(spooling, disk):
    acknowledged = []
    number = 0
    for _ in range(3):
        spooling.sink.answer = No("down")
        taken = 0
        while True:
            number += 1
            answer = spooling.post(large(number))
            if answer.status != 202:
                break
            acknowledged.append(large(number))
            taken += 1
        assert (answer.status, answer.retry_after) == (503, 1)
        assert taken * 20_000 > 2 * MIB, "it has room for some"
        assert readiness(spooling) == NOT_READY
        log = disk.folder / "spool.db-wal"
        assert log.stat().st_size <= 3 * wal_limit(disk.folder / "spool.db")
        spooling.sink.answer = Yes()
        spooling.until(lambda: not spooling.service.spool.depth, WAIT_S)
        spooling.until(lambda: readiness(spooling) == READY, WAIT_S)
        assert sorted(spooling.sink.bodies) == sorted(acknowledged)
    spooling.balance()


def test_what_could_not_be_deleted_on_a_full_disk_is_deleted_when_there_is_room(spooling, disk):
    for number in range(1, 6):
        assert spooling.post(event(number)).status == 202
    disk.fill()
    # Whatever room is left in the write-ahead log is used up.
    for number in range(100, 120):
        spooling.post(large(number, 2_000))
    spooling.sink.answer = Yes()
    spooling.until(lambda: len(spooling.sink.taken) >= 5, WAIT_S)
    disk.free()
    spooling.until(lambda: readiness(spooling) == READY, WAIT_S)
    spooling.until(lambda: not spooling.service.spool.depth, WAIT_S)
    with closing(sqlite3.connect(disk.folder / "spool.db")) as db:
        assert db.execute("SELECT count(*) FROM oncebridge_spool").fetchone() == (0,)


def test_a_spool_with_a_limit_refuses_before_the_disk_is_full(disk, tmp_path, caplog):
    flags = {"spool": f"{disk.folder}/spool.db", "spool_max": "1MiB"}
    with live(tmp_path, Desk(No("down")), **flags) as running:
        accepted = 0
        while (answer := running.post(large(accepted))).status == 202:
            accepted += 1
        assert (answer.status, answer.retry_after) == (503, 1)
        assert answer.results[0]["reason"] == "spool: the spool is full"
        assert 20_000 * accepted < MIB < 2 * 20_000 * accepted
        assert running.get("/readyz").json["reasons"] == ["the spool is full"]
        (warning,) = lines(caplog)
        assert "raise spool_max" in warning.fix
        running.sink.answer = Yes()
        running.until(lambda: running.get("/readyz").status == 200, WAIT_S)
        running.until(lambda: len(running.sink.taken) == accepted, WAIT_S)


@pytest.mark.parametrize("kind", ["mounted", "limited"])
@pytest.mark.parametrize("size", [5_000, 700_000])
@pytest.mark.full
def test_a_limit_beyond_the_disk_leaves_room_to_delete(kind, size, tmp_path, monkeypatch):
    with small_disk(kind, tmp_path / "small", 8 * MIB, monkeypatch) as disk:
        places = {"store": "memory:", "dead": "memory:", "spool": f"{disk.folder}/spool.db"}
        flags = {"spool_max": "1GiB", "breaker": "100000", "max_backoff": "50ms"} | places
        with live(tmp_path, Desk(No("down")), **flags) as running:
            accepted = 0
            while (answer := running.post(large(accepted, size))).status == 202:
                accepted += 1
            assert answer.results[0]["reason"] == "spool: the disk of the spool is full"
            assert accepted * size > 3 * MIB
            running.sink.answer = Yes()
            running.until(lambda: not running.service.spool.depth, WAIT_S)
            running.until(lambda: running.get("/readyz").status == 200, WAIT_S)
            assert len(running.sink.taken) == accepted


def test_one_event_that_is_larger_than_the_limit_passes_when_the_spool_is_empty(disk, tmp_path):
    flags = {"spool": f"{disk.folder}/spool.db", "spool_max": "1MiB"}
    with live(tmp_path, **flags) as running:
        assert running.post(large(1, 1_200_000)).status == 202
        running.until(lambda: running.sink.taken, WAIT_S)
        running.until(lambda: running.post(large(2, 1_200_000)).status == 202, WAIT_S)


def test_a_route_that_takes_nothing_keeps_nobody_from_spooling(tmp_path):
    flags = {"spool": f"{tmp_path}/spool.db"} | dict.fromkeys(["health", "metrics"], NOWHERE)
    with live(tmp_path, **flags) as running:
        running.do(lambda: pauses.pause(running.store, ["desk"], SystemDice()))
        running.until(lambda: running.service.router.gateways[0].is_paused, WAIT_S)
        assert readiness(running) == READY
        assert running.post(event(1)).status == 202
        assert not running.sink.taken
