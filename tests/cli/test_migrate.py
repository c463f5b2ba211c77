"""What stores and sinks need is made, once, and told."""

import pytest
from tests.cli import strangers
from tests.cli.strangers import CANARY, installed

CONFIG = f"""
store = "tabled://user:{CANARY}@db/one"
dead = "ruled://host/dead"
[[routes]]
name = "lake"
sink = "tabled://db/two"
[[routes]]
name = "crm"
sink = "https://crm.example.com/hook?token={CANARY}"
"""


@pytest.fixture(autouse=True)
def _strangers(monkeypatch):
    installed(monkeypatch)


@pytest.fixture
def config(write):
    write("pipe.toml", CONFIG)
    return ("-c", "pipe.toml")


def test_what_is_missing_is_made_and_told(call, config):
    told = call("migrate", *config)
    assert told.out.splitlines() == [
        "store tabled://***@db/one: made the table events",
        "store tabled://***@db/one: made its\\x1b[31m index",
        "sink tabled://db/two: made the table events",
        "sink tabled://db/two: made its\\x1b[31m index",
        "sink https://crm.example.com/***cffaf5c1: nothing to do",
        "dead ruled://host/dead: made the table events",
        "dead ruled://host/dead: made its\\x1b[31m index",
    ]
    again = call("migrate", *config)
    assert [line.partition(": ")[2] for line in again.out.splitlines()] == ["nothing to do"] * 4
    assert CANARY not in told.out + told.err + again.out


def test_programs_are_told_by_address(call, config):
    call("migrate", "--store", "tabled://db/two", "--sink", "-")
    told = call("migrate", *config, "--json").objects()
    assert [(one["kind"], one["address"], len(one["done"])) for one in told] == [
        ("store", "tabled://***@db/one", 2),
        ("sink", "tabled://db/two", 0),
        ("sink", "https://crm.example.com/***cffaf5c1", 0),
        ("dead", "ruled://host/dead", 2),
    ]


def test_the_sql_is_printed_and_nothing_is_made(call, config):
    told = call("migrate", *config, "--sql")
    assert told.out == (
        "-- store tabled://***@db/one\ncreate table events (id int);\n\n"  # for both, as it is one
    )
    assert "dead ruled://host/dead cannot be created with SQL" in told.err
    assert not strangers.TABLES
    one, two = call("migrate", *config, "--sql", "--json").objects()
    assert one == {
        "kind": "store",
        "address": "tabled://***@db/one",
        "sql": "create table events (id int);",
    }
    assert two["address"] == "tabled://db/two"
    assert CANARY not in told.out + told.err


def test_where_nothing_is_made_by_sql_that_is_said(call):
    told = call("migrate", "--store", "sqlite:seen.db", "--sql", code=1)
    assert (told.out, told.err) == ("", "oncebridge: there is nothing that SQL can create\n")


def test_files_need_nothing_and_are_not_made(run, tmp_path):
    told = run("migrate", "--store", "sqlite:seen.db", "--sink", "file:out.ndjson")
    assert told.out.splitlines() == [
        "store sqlite:seen.db: nothing to do",
        "sink file:out.ndjson: nothing to do",
        "dead sqlite:oncebridge-dead.db: nothing to do",
    ]
    assert not list(tmp_path.iterdir())


def test_what_was_used_is_closed(call, monkeypatch):
    closed = []

    async def aclose(self):
        closed.append(self.url)

    monkeypatch.setattr(strangers.Ruled, "aclose", aclose)
    call("migrate", "--store", "tabled:a", "--sink", "ruled:b")
    assert closed == ["tabled:a", "ruled:b"]


def test_a_server_that_is_away_is_told_after_what_was_done(call):
    away = f"away://user:{CANARY}@host/"
    told = call("migrate", "--store", "tabled:a", "--sink", away, code=3)
    assert told.out.splitlines()[0] == "store tabled:a: made the table events"
    assert "'away://***@host/' does not answer" in told.err
    assert CANARY not in told.err


def test_a_mistake_in_the_configuration_is_told(call, write):
    write("pipe.toml", 'stor = "sqlite:x.db"')
    assert "did you mean 'store'?" in call("migrate", "-c", "pipe.toml", code=2).err
