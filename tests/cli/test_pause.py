"""Pausing from another process, through the store."""

import asyncio
import json

import pytest

from oncebridge.engine import pauses
from oncebridge.stores.sqlite.store import SQLiteStore

CONFIG = """
store = "sqlite:seen.db"
audit = "audit.ndjson"
[[routes]]
name = "crm"
sink = "-"
[[routes]]
name = "lake"
sink = "file:lake.ndjson"
"""


@pytest.fixture
def config(write):
    write("pipe.toml", CONFIG)
    return ("-c", "pipe.toml")


def paused(tmp_path) -> list[bool]:
    async def look() -> list[bool]:
        async with SQLiteStore(tmp_path / "seen.db") as store:
            return await pauses.paused(store, ["crm", "lake"])

    return asyncio.run(look())


def test_routes_are_paused_and_resumed_one_by_one_or_all(run, call, config, tmp_path):
    first = run("pause", *config, "--route", "crm")
    assert first.out == "crm: paused\n"
    assert "does not exist yet" in first.err
    assert paused(tmp_path) == [True, False]
    (told,) = call("pause", *config, "--json").objects()
    assert told["routes"] == [
        {"route": "crm", "paused": True, "was_paused": True},
        {"route": "lake", "paused": True, "was_paused": False},
    ]
    assert paused(tmp_path) == [True, True]
    assert call("resume", *config, "--route", "lake").out == "lake: resumed\n"
    assert paused(tmp_path) == [True, False]
    assert run("resume", *config).out == "crm: resumed\nlake: was not paused\n"
    assert paused(tmp_path) == [False, False]
    lines = [json.loads(line) for line in (tmp_path / "audit.ndjson").read_text().splitlines()]
    assert [(line["verb"], line["routes"]) for line in lines] == [
        ("pause", ["crm"]),
        ("pause", ["crm", "lake"]),
        ("resume", ["lake"]),
        ("resume", ["crm", "lake"]),
    ]


def test_what_another_process_cannot_see_is_refused(call, tmp_path):
    for verb in ("pause", "resume"):
        ran = call(verb, "--store", "memory:", code=2)
        assert "is inside the memory of the running service" in ran.err
    assert "nothing is paused" in call("resume", "--store", "sqlite:seen.db").err
    assert not list(tmp_path.iterdir())


def test_a_route_that_is_none_is_refused_with_a_list(call, config, tmp_path):
    refused = call("pause", *config, "--route", "lak", code=2).err
    assert "'lak' is not a route; routes: crm, lake" in refused
    assert not (tmp_path / "seen.db").exists()
