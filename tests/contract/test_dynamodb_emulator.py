"""
Are the servers we test against worth testing against?

A store that decides by conditional writes proves nothing on a server that forgets its
conditions when two ask at once. So the servers themselves are put on trial first.
"""

import base64
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.servers.aws import DynamoDBServer, emulators

_RACER = Path(__file__).parents[1] / "servers" / "dynamodb_racer.py"
_PROCESSES = 4
_THREADS = 4
_WRITERS = _PROCESSES * _THREADS

Won = list[tuple[str, str, str]]
"""Who won, which item, and what stood there before."""


def race(port: int, table: str, task: str, keys: list[str]) -> Won:
    """Let several processes with several threads each go at *keys* at once."""
    processes = [
        subprocess.Popen(
            [sys.executable, _RACER, str(port), table, f"p{at}", str(_THREADS), task, *keys],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for at in range(_PROCESSES)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        told = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [failure for one in told for failure in one["failures"]] == []
    assert sum(len(one["won"]) for one in told) == _WRITERS
    return [
        (name, key, before)
        for one in told
        for name, won in one["won"].items()
        for key, before in won
    ]


@pytest.fixture(params=["ministack", "dynoxide"])
def server(request: pytest.FixtureRequest) -> DynamoDBServer:
    print(emulators())
    found = request.getfixturevalue(request.param)
    assert isinstance(found, DynamoDBServer)
    return found


@pytest.fixture
def table(server: DynamoDBServer) -> str:
    return server.table()


def _values(server: DynamoDBServer, table: str) -> dict[str, str]:
    items = server.ask("Scan", {"TableName": table, "ConsistentRead": True})["Items"]
    return {
        base64.b64decode(item["k"]["B"]).decode(): base64.b64decode(item["r"]["B"]).decode()
        for item in items
    }


@pytest.mark.parametrize("task", ["insert", "put"])
def test_every_item_has_exactly_one_creator(server: DynamoDBServer, table: str, task: str) -> None:
    keys = [f"key {at}" for at in range(100)]

    won = race(server.port, table, task, keys)

    assert Counter(key for _, key, _ in won) == Counter(keys)
    assert _values(server, table) == {key: name for name, key, _ in won}


def test_a_pair_is_written_whole_and_by_one(server: DynamoDBServer, table: str) -> None:
    keys = [f"key {at}" for at in range(60)]

    won = race(server.port, table, "pair", keys)

    assert Counter(key for _, key, _ in won) == Counter(keys[::2])
    winners = {key: name for name, key, _ in won}
    assert _values(server, table) == {
        key: winners[keys[at - at % 2]] for at, key in enumerate(keys)
    }


def test_no_update_is_lost_and_every_version_has_one_successor(
    server: DynamoDBServer, table: str
) -> None:
    keys = ["one", "two"]
    for key in keys:
        item = {"k": {"B": base64.b64encode(key.encode()).decode()}, "r": {"B": "MA=="}}  # 0
        server.ask("PutItem", {"TableName": table, "Item": item})

    won = race(server.port, table, "count", keys * 5)

    total = 5 * _WRITERS
    assert _values(server, table) == dict.fromkeys(keys, str(total))
    assert Counter((key, before) for _, key, before in won) == Counter(
        {(key, str(number)): 1 for key in keys for number in range(total)}
    )


def test_every_item_has_exactly_one_remover(server: DynamoDBServer, table: str) -> None:
    keys = [f"key {at}" for at in range(50)]
    race(server.port, table, "put", keys)

    won = race(server.port, table, "remove", keys)

    assert Counter(key for _, key, _ in won) == Counter(keys)
    assert _values(server, table) == {}
