"""
Is the server we test against worth testing against?

A store that decides by conditional writes proves nothing on a server that forgets its
conditions when two ask at once. So the server itself is put on trial first.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.servers.s3 import S3Server
from tests.servers.s3_meddler import Asked, Meddler, Told, error

_RACER = Path(__file__).parents[1] / "servers" / "s3_racer.py"
_PROCESSES = 2
_THREADS = 4
_WRITERS = _PROCESSES * _THREADS


def race(port: int, task: str, paths: list[str], rounds: int = 1) -> list[dict[str, Any]]:
    """Let several processes with several threads each go at *paths* at once."""
    processes = [
        subprocess.Popen(
            [sys.executable, _RACER, str(port), f"p{at}", str(_THREADS), str(rounds), task, *paths],
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
        told = [json.loads(process.communicate("go\n", timeout=60)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [failure for one in told for failure in one["failures"]] == []
    racers = [racer for one in told for racer in one["racers"]]
    assert len(racers) == _WRITERS
    return racers


def wins(racers: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    return Counter((path, before) for racer in racers for path, before in racer["won"])


@pytest.fixture
def paths(s3_server: S3Server) -> list[str]:
    bucket = s3_server.bucket()
    return [f"/{bucket}/object-{at}" for at in range(100)]


def test_every_object_has_exactly_one_creator(s3_server: S3Server, paths: list[str]) -> None:
    racers = race(s3_server.port, "create", paths)

    assert wins(racers) == Counter({(path, ""): 1 for path in paths})
    creators = {path: racer["name"] for racer in racers for path, _ in racer["won"]}
    for path in paths:
        assert s3_server.ask("GET", path) == (200, creators[path].encode())


def test_no_update_is_lost_and_every_version_has_one_successor(
    s3_server: S3Server, paths: list[str]
) -> None:
    paths, rounds = paths[:4], 25
    for path in paths:
        s3_server.ask("PUT", path, b"0")

    racers = race(s3_server.port, "count", paths, rounds)

    total = _WRITERS * rounds
    assert [s3_server.ask("GET", path) for path in paths] == [(200, b"%d" % total)] * len(paths)
    assert wins(racers) == Counter({(path, str(n)): 1 for path in paths for n in range(total)})
    assert [racer["unseen"] for racer in racers] == [0] * _WRITERS


def test_every_object_has_exactly_one_remover(s3_server: S3Server, paths: list[str]) -> None:
    for path in paths:
        s3_server.ask("PUT", path, b"here")

    racers = race(s3_server.port, "remove", paths)

    assert wins(racers) == Counter({(path, "here"): 1 for path in paths})
    assert {s3_server.ask("GET", path)[0] for path in paths} == {404}


def test_what_is_removed_and_made_again_belongs_to_one_at_a_time(
    s3_server: S3Server, paths: list[str]
) -> None:
    paths, rounds = paths[:4], 10

    racers = race(s3_server.port, "churn", paths, rounds)

    assert [racer["unseen"] for racer in racers] == [0] * _WRITERS
    assert wins(racers) == Counter({(path, ""): _WRITERS * rounds for path in paths})


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_a_change_of_what_is_not_there_changes_nothing(
    s3_server: S3Server, paths: list[str], method: str
) -> None:
    etag = {"If-Match": '"d41d8cd98f00b204e9800998ecf8427e"'}

    status, told = s3_server.ask(method, paths[0], headers=etag)

    assert (status, b"<Code>NoSuchKey</Code>" in told) == (404, True)
    assert s3_server.ask("GET", paths[0])[0] == 404


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_a_change_of_another_version_changes_nothing(
    s3_server: S3Server, paths: list[str], method: str
) -> None:
    s3_server.ask("PUT", paths[0], b"old")
    etag = {"If-Match": '"149603e6c03516362a8da23f624db945"'}  # of "old"
    s3_server.ask("PUT", paths[0], b"new")

    status, told = s3_server.ask(method, paths[0], b"", headers=etag)

    assert (status, b"<Code>PreconditionFailed</Code>" in told) == (412, True)
    assert s3_server.ask("GET", paths[0]) == (200, b"new")


def test_a_server_that_looks_before_it_writes_is_convicted(
    s3_server: S3Server, paths: list[str]
) -> None:
    """Were the trial too mild for such a server, it would prove nothing."""
    proxy = Meddler(s3_server.port)

    def look_and_write(asked: Asked) -> Told | None:
        if asked.method != "PUT":
            return None
        there = proxy.pass_on(Asked("GET", asked.path))
        etag = asked.headers.pop("if-match", "")
        is_new = asked.headers.pop("if-none-match", "") == "*"
        if (is_new and there.status == 200) or (etag and there.headers.get("etag") != etag):
            return error(412, "PreconditionFailed")
        time.sleep(0.002)
        return None

    proxy.before = look_and_write
    with proxy.started():
        racers = race(proxy.port, "create", paths)
    assert max(wins(racers).values()) > 1
