"""The dashboard by itself, by `run` and by `demo`, as a person starts and ends it."""

import http.client
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from queue import Queue

import pytest

URL = re.compile(r"http://(127\.0\.0\.1:\d+)/")


@contextmanager
def started(directory, *args):
    """Start a command that goes on, and give its process with what it says, line by line."""
    inherited = {n: v for n, v in os.environ.items() if not n.startswith("ONCEBRIDGE_")}
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-u", "-m", "oncebridge", *args],
        cwd=directory,
        env=inherited,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said: Queue[str] = Queue()

    def read(stream):
        for line in stream:
            said.put(line)

    readers = [threading.Thread(target=read, args=(s,)) for s in (process.stdout, process.stderr)]
    for reader in readers:
        reader.start()
    try:
        yield process, said
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for reader in readers:
            reader.join()
        process.stdout.close()
        process.stderr.close()


def address_in(said, mark):
    """Wait for the line with *mark*, and give the address of the dashboard in it."""
    while True:
        line = said.get(timeout=40)
        assert "Traceback" not in line
        if mark in line:
            return URL.search(line)[1]


def get(address, path="/"):
    with closing(http.client.HTTPConnection(address, timeout=20)) as line:
        line.request("GET", path)
        answer = line.getresponse()
        return answer.status, answer.read().decode()


def end(process, number=signal.SIGINT):
    process.send_signal(number)
    return process.wait(40)


@pytest.fixture
def seen(call, write, tmp_path):
    """A store that a worker has written to, and gone."""
    one = {"id": "e-1", "source": "com.example", "detail-type": "Order", "detail": {"n": 1}}
    write("in.ndjson", one, one, "no event")
    write(
        "pipe.toml",
        'source = "file:in.ndjson"',
        'store = "sqlite:seen.db"',
        'sink = "file:out.ndjson"',
        'dead = "sqlite:dead.db"',
        'history = "all"',
        'dashboard = "127.0.0.1:0"',
    )
    call("run", "-c", "pipe.toml")
    return tmp_path


def test_beside_workers_elsewhere_it_shows_what_they_told(seen):
    with started(seen, "dashboard", "-c", "pipe.toml") as (process, said):
        address = address_in(said, "dashboard: ")
        for path in ("/", "/decisions", "/dead", "/rules"):
            status, text = get(address, path)
            assert (status, "<main" in text) == (200, True), path
        assert "e-1" in get(address, "/decisions")[1]
        status, text = get(address, "/metrics")
        assert (status, "Prometheus" in text) == (404, True)
        assert end(process) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_supervisor_or_a_closed_terminal_ends_it_as_well(seen, number):
    with started(seen, "dashboard", "-c", "pipe.toml") as (process, said):
        address_in(said, "dashboard: ")
        assert end(process, number) == 0
        line = json.loads(said.get(timeout=40))
        assert (line["event"], line["signal"]) == ("oncebridge.stopping", number.name)


@pytest.mark.full
def test_it_changes_nothing_in_the_store(seen):
    def content():
        with closing(sqlite3.connect(seen / "seen.db")) as db:
            return list(db.iterdump())

    before = content()
    with started(seen, "dashboard", "-c", "pipe.toml") as (process, said):
        address = address_in(said, "dashboard: ")
        for path in ("/", "/decisions", "/dead", "/rules"):
            get(address, path)
        assert end(process) == 0
    assert content() == before


def test_a_store_in_memory_has_nothing_to_show(call):
    ran = call("dashboard", "--store", "memory:", code=2)
    assert "store: memory: is inside the memory of the running service" in ran.err


def test_a_store_that_nobody_has_written_to_is_not_made(call, tmp_path):
    ran = call("dashboard", "--store", "sqlite:new.db", code=3)
    assert "no worker has used this store yet" in ran.err
    with closing(sqlite3.connect(tmp_path / "other.db")) as db, db:
        db.execute("CREATE TABLE theirs (x)")
    ran = call("dashboard", "--store", "sqlite:other.db", code=3)
    assert "no worker has used this store yet" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["other.db"]


@pytest.mark.full
def test_what_workers_do_not_tell_is_said(seen):
    args = ("--set", "share_counts=false", "--set", "history=off")
    with started(seen, "dashboard", "-c", "pipe.toml", *args) as (process, said):
        lines = []
        while not any("dashboard: " in line for line in lines):
            lines.append(said.get(timeout=40))
        while not said.empty():
            lines.append(said.get())
        assert end(process) == 0
        lines += [said.get() for _ in range(said.qsize())]
    text = "".join(lines)
    assert 'set history = "sample"' in text
    assert "set share_counts = true" in text


def test_a_port_that_is_taken_is_told(seen, call):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ran = call("dashboard", "-c", "pipe.toml", "--dashboard", address, code=3)
        assert f"dashboard: {address}: another program uses this port already" in ran.err
        ran = call("run", "-c", "pipe.toml", "--dashboard", address, code=3)
        assert f"dashboard: {address}: another program uses this port already" in ran.err


def test_beyond_this_machine_nothing_is_started_without_a_log_in(seen, call):
    for command in ("dashboard", "run"):
        ran = call(command, "-c", "pipe.toml", "--dashboard", "0.0.0.0:0", code=2)
        assert "set dashboard_token" in ran.err


@pytest.mark.full
def test_run_says_where_to_look_when_it_is_ready(tmp_path):
    args = ("--source", "http://127.0.0.1:0/events", "--dashboard", "127.0.0.1:0")
    with started(tmp_path, "run", *args, "--log-format", "json") as (process, said):
        line = said.get(timeout=40)
        told = json.loads(line)
        assert told["event"] == "oncebridge.ready"
        assert get(URL.search(told["dashboard"])[1])[0] == 200
        assert end(process) == 0


@pytest.mark.full
def test_the_demo_says_first_where_to_look_and_stays_if_it_is_told_to(tmp_path):
    with started(tmp_path, "demo", "--fast", "--stay") as (process, said):
        first = said.get(timeout=40)
        assert first.startswith("dashboard: http://127.0.0.1:")
        address = URL.search(first)[1]
        assert address_in(said, "the dashboard keeps running at ") == address
        for path in ("/", "/decisions", "/dead", "/rules"):
            assert get(address, path)[0] == 200
        assert "not-json" in get(address, "/dead")[1]
        assert end(process) == 0


@pytest.mark.full
def test_the_demo_finds_another_port_where_the_usual_one_is_taken(tmp_path):
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with closing(taken):
        try:
            taken.bind(("127.0.0.1", 8081))
            taken.listen()
        except OSError:
            pass  # somebody else has it, which does as well
        with started(tmp_path, "demo", "--fast") as (process, said):
            first = said.get(timeout=40)
            assert "port 8081 is taken" in first
            assert "127.0.0.1:8081" not in first
            assert process.wait(60) == 0
