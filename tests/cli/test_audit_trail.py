"""An operator's act is written down before it begins: in a file, in the log, and in the store."""

import asyncio
import json
import logging
import subprocess
import sys

import pytest
from tests.cli.worlds import event

from oncebridge.base.formatting import iso_time
from oncebridge.errors import ConfigError
from oncebridge.operate import operator_log
from oncebridge.operate.operator_log import AuditFile, OperatorActions, who
from oncebridge.stores.sqlite.store import SQLiteStore


def test_each_act_is_one_line_with_who_when_and_what(tmp_path, caplog):
    path = tmp_path / "audit.ndjson"
    audit_file = AuditFile(str(path), clock=lambda: 1_700_000_000_123)
    with caplog.at_level(logging.INFO, "oncebridge"):
        audit_file.write("forget", keys=["01ab"])
        audit_file.write("pause", routes=["crm"])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["verb"] for line in lines] == ["forget", "pause"]
    assert lines[0]["time"] == "2023-11-14T22:13:20.123Z"
    assert lines[0]["user"]
    assert lines[0]["host"]
    assert lines[0]["keys"] == ["01ab"]
    assert [record.verb for record in caplog.records] == ["forget", "pause"]


def test_without_a_file_the_log_alone_has_it(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "oncebridge"):
        AuditFile(None).write("pause", routes=["crm"])
    assert [record.getMessage() for record in caplog.records] == ["oncebridge.audit"]
    assert not list(tmp_path.iterdir())


def test_a_line_that_was_cut_short_spoils_no_other(tmp_path):
    path = tmp_path / "audit.ndjson"
    path.write_text('{"verb": "forg')
    AuditFile(str(path)).write("pause")
    assert json.loads(path.read_text().splitlines()[1])["verb"] == "pause"


def test_a_file_that_cannot_be_written_is_an_error_before_the_act(tmp_path):
    with pytest.raises(ConfigError, match="nothing was done"):
        AuditFile(str(tmp_path)).write("pause")
    with pytest.raises(ConfigError, match="No such file"):
        AuditFile(str(tmp_path / "no" / "audit")).write("pause")


MANY = """
from oncebridge.operate.operator_log import AuditFile
for _ in range(50):
    AuditFile("audit.ndjson").write("pause", routes=["x" * 5000])
"""


def test_lines_of_several_processes_do_not_mix(tmp_path):
    writers = [
        subprocess.Popen([sys.executable, "-c", MANY], cwd=tmp_path, stderr=subprocess.DEVNULL)
        for _ in range(2)
    ]
    assert [writer.wait(30) for writer in writers] == [0, 0]
    lines = (tmp_path / "audit.ndjson").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 100


def test_an_instant_is_written_in_utc():
    assert iso_time(0) == "1970-01-01T00:00:00.000Z"


# --- every verb leaves word in the store ------------------------------------------------------

TAKER = """
import os
from oncebridge.errors import SinkRejected
def take(event):
    if not os.path.exists("open"):
        raise SinkRejected
"""
CONFIG = """
store = "sqlite:seen.db"
dead = "sqlite:dead.db"
sink = "python:trail_taker:take"
route = "crm"
"""
C = ("-c", "pipe.toml")


@pytest.fixture
def dead(call, write, tmp_path, monkeypatch):
    """Two orders that were refused, and a line that is no event."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trail_taker", raising=False)
    write("trail_taker.py", TAKER)
    write("pipe.toml", CONFIG)
    write("events.ndjson", event(1), event(2, id="a2"), "not json")
    call("run", *C, "--source", "file:events.ndjson")


def trails(call) -> list[list[tuple[str, str]]]:
    told = call("explain", "events.ndjson", "--json", *C, code=1).objects()
    return [[(act["verb"], act.get("reason", "")) for act in one["trail"]] for one in told]


def test_replaying_and_dropping_letters_is_found_by_their_events(call, dead, tmp_path):
    (first, *_) = call("dead", "list", "--reason", "rejected", "--json", *C).objects()
    call("dead", "replay", str(first["number"]), "--because", "fixed?", *C, code=1)
    call("dead", "drop", "--all", "--yes", "--because", "hopeless", *C)
    one, two, none = trails(call)
    assert one == [("dead replay", "fixed?"), ("dead drop", "hopeless")]
    assert two == [("dead drop", "hopeless")]
    assert none == []


def test_dropping_letters_makes_no_store_only_to_write_there(call, dead, write, tmp_path):
    write("other.toml", CONFIG.replace("seen.db", "nowhere.db"))
    call("dead", "drop", "--all", "--yes", "-c", "other.toml")
    assert not (tmp_path / "nowhere.db").exists()
    call("dead", "drop", "--all", "--yes", "-c", "other.toml", "--store", "memory:")


def test_pausing_and_resuming_is_found_by_the_route(call, dead, tmp_path):
    call("pause", "--reason", "the CRM migrates", *C)
    told = call("explain", "events.ndjson", "--json", *C, code=1).objects()
    by = told[0]["paused_by"]
    assert (by["verb"], by["reason"], by["who"]) == ("pause", "the CRM migrates", who())
    call("resume", "--because", "it is done", *C)

    async def read() -> OperatorActions:
        async with SQLiteStore(tmp_path / "seen.db") as store:
            name = operator_log.route_log_key("crm")
            return (await operator_log.read(store, [name]))[name]

    acts = asyncio.run(read()).acts
    assert [(act.verb, act.reason) for act in acts] == [
        ("pause", "the CRM migrates"),
        ("resume", "it is done"),
    ]
