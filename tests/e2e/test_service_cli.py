"""Through the real command, in a process of its own, with real HTTP on both sides."""

import gzip
import json
import os
import pty
import re
import signal
import socket
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from urllib.parse import urlsplit

import psutil
import pytest
from tests.e2e.towns import Command, Senders, event, receiving, send
from tests.servers.redis import RedisServer, running

from oncebridge.engine.verdict import Verdict


@pytest.fixture
def receiver():
    with receiving() as there:
        yield there


def http_run(folder, receiver, *more, store="sqlite:seen.db", **environment):
    """Run from HTTP to HTTP, with everything else in *folder*."""
    return Command(
        folder,
        *("run", "--source", "http://127.0.0.1:0/events", "--store", store),
        *("--dead", "sqlite:dead.db", "--sink", receiver.url, "--route", "post"),
        *("--set", "sink.allow_private=true", "--backoff", "50ms"),
        *more,
        **environment,
    )


def file_run(folder, *more, **environment):
    places = ("--store", "sqlite:seen.db", "--dead", "sqlite:dead.db")
    return Command(folder, "run", *places, *more, **environment)


def dead_in(folder):
    with sqlite3.connect(folder / "dead.db") as db:
        rows = db.execute("SELECT raw, reason, message FROM oncebridge_dead").fetchall()
    db.close()
    return rows


# --- HTTP in, HTTP out ----------------------------------------------------------------------


def test_events_come_out_once_and_a_restart_does_not_forget(tmp_path, receiver):
    with http_run(tmp_path, receiver) as command:
        url = command.ready()
        assert send(url, event(1))[1]["verdict"] == "delivered"
        assert send(url, event(1))[1]["verdict"] == "duplicate"
        assert send(url, event(1, id="another"))[1]["verdict"] == "duplicate"
        status, said = send(url, b"[" + event(2) + b"," + event(1) + b", 7]")
        assert status == 200
        verdicts = [result["verdict"] for result in said["results"]]
        assert verdicts == ["delivered", "duplicate", "dead"]
        command.signal(signal.SIGTERM)
        assert command.ended() == 0
    with http_run(tmp_path, receiver) as command:
        url = command.ready()
        assert send(url, event(1))[1]["verdict"] == "duplicate"
        assert send(url, event(3))[1]["verdict"] == "delivered"
        command.signal(signal.SIGINT)
        assert command.ended() == 0
    assert receiver.bodies == [event(1), event(2), event(3)]
    assert len(set(receiver.keys)) == 3
    assert [raw for raw, _, _ in dead_in(tmp_path)] == [b"7"]


@pytest.mark.full
def test_the_end_is_told_as_a_table_or_as_json(tmp_path, receiver):
    for more in ((), ("--json",)):
        with http_run(tmp_path, receiver, *more) as command:
            send(command.ready(), event(1))
            command.signal()
            assert command.ended() == 0
            if more:
                counts = json.loads(command.printed)
                assert (counts["arrived"], counts["duplicate"]) == (1, 1)
            else:
                assert command.printed.split() == [b"arrived", b"1", b"delivered", b"1"]


def wait_for(truth, within=20):
    ends = time.monotonic() + within
    while not truth():
        assert time.monotonic() < ends
        time.sleep(0.005)


@pytest.mark.full
def test_a_graceful_stop_under_load_costs_no_duplicate_and_loses_nothing(tmp_path, receiver):
    receiver.delay = 0.01
    bodies = [event(number) for number in range(400)]
    senders = Senders(bodies)
    for turn in range(4):
        with http_run(tmp_path, receiver) as command:
            senders.url = command.ready()
            if turn == 0:
                senders.start()
            if turn == 3:
                senders.join()
            else:
                wait_for(lambda wanted=70 * (turn + 1): len(receiver.bodies) >= wanted)
            command.signal(signal.SIGTERM)
            assert command.ended() == 0, command.said
    assert sorted(receiver.bodies) == sorted(bodies)
    assert len(senders.verdicts) == 400


def test_a_second_interrupt_leaves_at_once(tmp_path, receiver):
    receiver.open.clear()
    with http_run(tmp_path, receiver) as command, ThreadPoolExecutor(1) as pool:
        url = command.ready()
        answer = pool.submit(_ignoring_the_end, url, event(1))
        wait_for(lambda: receiver.begun)
        command.signal(signal.SIGINT)
        command.until(lambda: b"oncebridge.stopping" in command.said)
        assert command.process.poll() is None
        time.sleep(0.2)  # nobody is quicker; two at once are one stroke that came twice
        began = time.monotonic()
        command.signal(signal.SIGINT)
        assert command.ended() == 130
        assert time.monotonic() - began < 2
        answer.result(10)


@contextmanager
def under_way(url, receiver):
    """Leave one event at the receiver, which answers when the block ends."""
    receiver.open.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(send, url, event(1))
        wait_for(lambda: receiver.begun)
        yield
        receiver.open.set()
        assert answer.result(20)[1]["verdict"] == "delivered"


def test_a_hang_up_finishes_what_is_under_way(tmp_path, receiver):
    with http_run(tmp_path, receiver) as command:
        with under_way(command.ready(), receiver):
            command.signal(signal.SIGHUP)
            command.until(lambda: b"oncebridge.stopping" in command.said)
        assert command.ended() == 0
        (line,) = [line for line in command.log if line["event"] == "oncebridge.stopping"]
        assert line["signal"] == "SIGHUP"
    assert receiver.bodies == [event(1)]


def test_a_hang_up_is_ignored_under_nohup(tmp_path, receiver):
    with http_run(tmp_path, receiver, before=("nohup",)) as command:
        url = command.ready()
        command.signal(signal.SIGHUP)
        for number in range(3):
            assert send(url, event(number))[1]["verdict"] == "delivered"
        assert b"oncebridge.stopping" not in command.said
        command.signal(signal.SIGTERM)
        assert command.ended() == 0
        (line,) = [line for line in command.log if line["event"] == "oncebridge.stopping"]
        assert line["signal"] == "SIGTERM"


def test_a_terminal_that_is_closed_lets_it_finish_what_is_under_way(tmp_path, receiver):
    terminal, its_side = pty.openpty()
    with http_run(tmp_path, receiver, stdout=its_side, stderr=its_side) as command:
        os.close(its_side)
        shown = b""
        while not (found := re.search(rb"ready source=(\S+) .*\n", shown)):
            shown += os.read(terminal, 4096)
        with under_way(found[1].decode(), receiver):
            os.close(terminal)  # whatever it shows from now on fails
            command.signal(signal.SIGHUP)
        assert command.ended() == 0
    assert receiver.bodies == [event(1)]
    with http_run(tmp_path, receiver) as command:
        assert send(command.ready(), event(1))[1]["verdict"] == "duplicate"


def _ignoring_the_end(url, body):
    try:
        return send(url, body)
    except OSError:
        return None


@pytest.mark.full
def test_a_sink_that_is_away_makes_it_neither_ready_nor_forgetful(tmp_path, receiver):
    receiver.status = 503
    with http_run(tmp_path, receiver) as command:
        url = command.ready()
        for _ in range(8):
            assert send(url, event(1))[0] == 503
        command.signal()
        assert command.ended() == 0
    receiver.status = 200
    with http_run(tmp_path, receiver) as command:
        url = command.ready()
        wait_for(lambda: send(url, event(1))[0] == 200)
        assert send(url, event(1))[1]["verdict"] == "duplicate"
    assert receiver.bodies == [event(1)]


@pytest.mark.full
def test_it_is_logged_what_goes_down_and_what_is_up_again(tmp_path):
    expected, numbers = [], count(1)

    def told():
        changes = ("oncebridge.down", "oncebridge.up_again")
        lines = [line for line in command.log if line["event"] in changes]
        return [(line["event"], line["route"], line["what"]) for line in lines]

    def send_until(status, *line):
        """Send until that is answered, and until the line is logged."""
        expected.append(line)
        wait_for(lambda: send(url, event(next(numbers)))[0] == status and told() == expected, 60)

    redis = RedisServer(tmp_path)
    with running(redis), ExitStack() as stack:
        receiver = stack.enter_context(receiving())
        more = ("--store", redis.url, "--max-backoff", "100ms")
        with http_run(tmp_path, receiver, *more) as command:
            url = command.ready()
            redis.kill()
            send_until(503, "oncebridge.down", "post", "the store")
            redis.start()
            send_until(200, "oncebridge.up_again", "post", "the store")
            stack.close()
            send_until(503, "oncebridge.down", "post", "the sink")
            with receiving(port=urlsplit(receiver.url).port):
                send_until(200, "oncebridge.up_again", "post", "the sink")
                command.signal(signal.SIGTERM)
                assert command.ended() == 0


def test_no_secret_and_no_payload_is_logged(tmp_path, receiver):
    secret, payload = "canary-secret-5d1", "canary-payload-77a"
    with http_run(
        tmp_path,
        receiver,
        *("--log-level", "debug", "--set", "source.api_keys=env:POST_KEY"),
        *("--set", "source.basic=user:canary-secret-5d1"),
        POST_KEY=secret,
    ) as command:
        url = command.ready()
        assert send(url, event(1, detail={"note": payload}))[0] == 401
        command.signal()
        assert command.ended() == 0
        said = command.said + command.printed
        assert secret.encode() not in said
        assert payload.encode() not in said


# --- with a spool ---------------------------------------------------------------------------


QUICK = ("--lease", "2s", "--sink-timeout", "1s", "--commit-budget", "500ms", "--margin", "100ms")


def spooled_in(folder):
    with sqlite3.connect(folder / "spool.db") as db:
        (count,) = db.execute("SELECT count(*) FROM oncebridge_spool").fetchone()
    db.close()
    return count


def test_what_was_spooled_survives_kill_9_and_is_forwarded_once(tmp_path, receiver):
    receiver.status = 503
    for first in (0, 20, 40):
        with http_run(tmp_path, receiver, "--spool", "spool.db", *QUICK) as command:
            url = command.ready()
            for number in range(first, first + 20):
                assert send(url, event(number))[0] == 202
            os.kill(command.process.pid, signal.SIGKILL)
            assert command.ended() == -signal.SIGKILL
    assert spooled_in(tmp_path) == 60
    receiver.status = 200
    with http_run(tmp_path, receiver, "--spool", "spool.db", *QUICK) as command:
        command.ready()
        wait_for(lambda: not spooled_in(tmp_path))
        command.signal()
        assert command.ended() == 0
    assert sorted(receiver.bodies) == sorted(event(number) for number in range(60))


@pytest.mark.full
def test_a_spool_of_another_process_is_refused(tmp_path, receiver):
    with http_run(tmp_path, receiver, "--spool", "spool.db") as command:
        command.ready()
        with http_run(tmp_path, receiver, "--spool", "spool.db") as other:
            assert other.ended() == 3
            assert b"another process uses this spool" in other.said


# --- files ----------------------------------------------------------------------------------


def ndjson(*lines):
    return b"\n".join(lines) + b"\n"


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.full
def test_a_file_goes_to_a_file_and_the_counts_are_told(tmp_path, is_packed):
    lines = [event(1), event(2), event(1, id="again"), b"flour", event(3)]
    body = ndjson(*lines)
    (tmp_path / "in.ndjson").write_bytes(gzip.compress(body) if is_packed else body)
    with file_run(
        tmp_path, "--source", "file:in.ndjson", "--sink", "file:out.ndjson", "--json"
    ) as run:
        assert run.ended() == 0
        counts = json.loads(run.printed)
    assert counts["arrived"] == 5
    assert {v.value: counts[v.value] for v in Verdict if counts[v.value]} == {
        "delivered": 3,
        "duplicate": 1,
        "dead": 1,
    }
    assert (tmp_path / "out.ndjson").read_bytes() == ndjson(event(1), event(2), event(3))
    ((raw, reason, message),) = dead_in(tmp_path)
    assert (raw, reason) == (b"flour", "not-json")
    assert message.startswith("line 4: ")
    with file_run(tmp_path, "--source", "file:in.ndjson", "--sink", "file:out.ndjson") as run:
        assert run.ended() == 0
        assert b"duplicate              5" in run.printed
    assert (tmp_path / "out.ndjson").read_bytes() == ndjson(event(1), event(2), event(3))


@pytest.mark.full
def test_a_file_that_was_stopped_halfway_is_gone_on_with_and_comes_out_once(tmp_path, receiver):
    bodies = [event(number) for number in range(3000)]
    (tmp_path / "in.ndjson").write_bytes(ndjson(*bodies))
    arguments = ("--source", "file:in.ndjson", "--sink", receiver.url, "--batch", "100", "--json")
    arguments += ("--set", "sink.allow_private=true", "--set", "sink.concurrency=8")
    arrived = 0
    for turn in range(3):
        with file_run(tmp_path, *arguments) as run:
            if turn < 2:
                wait_for(lambda wanted=700 * (turn + 1): len(receiver.bodies) > wanted)
                run.signal(signal.SIGTERM)
            assert run.ended() == 0
            arrived += json.loads(run.printed)["arrived"]
            assert (b"oncebridge.resumed_at_line" in run.said) is (turn > 0)
    assert sorted(receiver.bodies) == sorted(bodies)
    assert arrived < 2 * len(bodies)


def test_a_pipe_passes_each_event_on_once_and_nothing_else(tmp_path):
    read, write = os.pipe()
    with file_run(tmp_path, "--source", "-", "--sink", "-", "--json", stdin=read) as run:
        os.close(read)
        with os.fdopen(write, "wb") as pipe:
            pipe.write(ndjson(event(1), event(1), b"{", event(2)))
        assert run.ended() == 0
        assert run.printed == ndjson(event(1), event(2))
        counts = json.loads(run.said.splitlines()[-1])
        assert (counts["delivered"], counts["duplicate"], counts["dead"]) == (2, 1, 1)


def test_a_pipe_is_read_as_it_comes(tmp_path):
    read, write = os.pipe()
    with file_run(tmp_path, "--source", "-", "--sink", "-", stdin=read) as run:
        os.close(read)
        with os.fdopen(write, "wb", buffering=0) as pipe:
            for number in range(3):
                pipe.write(event(number) + b"\n")
                pipe.write(event(number + 1000) + b"\n")
                run.until(lambda number=number: run.printed.count(b"\n") >= 2 * number)
        assert run.ended() == 0
    assert run.printed.count(b"\n") == 6


def test_a_pipe_that_stays_open_does_not_keep_a_stop_waiting(tmp_path):
    read, write = os.pipe()
    with file_run(tmp_path, "--source", "-", "--sink", "-", stdin=read) as run:
        os.close(read)
        with os.fdopen(write, "wb", buffering=0) as pipe:
            run.ready()
            pipe.write(ndjson(event(1), event(2)))
            run.until(lambda: run.printed.count(b"\n") >= 1)
            run.signal(signal.SIGTERM)
            assert run.ended(10) == 0


@pytest.mark.full
def test_a_reader_that_has_gone_ends_the_run_and_loses_nothing(tmp_path):
    bodies = [event(number) for number in range(3000)]
    (tmp_path / "in.ndjson").write_bytes(ndjson(*bodies))
    places = ("--source", "file:in.ndjson", "--sink", "-", "--json")
    read, write = os.pipe()
    with file_run(tmp_path, *places, stdout=write) as run:
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            assert pipe.readline() == event(0) + b"\n"
        assert run.ended(15) == 1
        assert b"Traceback" not in run.said
        taken = json.loads(run.said.splitlines()[-1])["delivered"]
    with file_run(tmp_path, *places) as run:
        assert run.ended() == 0
        left = run.printed.splitlines()
    # What the pipe had taken when its reader went is gone with it; the rest comes, once.
    assert len(left) == len(set(left)) == len(bodies) - taken
    assert set(left) < set(bodies)


# --- what cannot start ----------------------------------------------------------------------


def test_every_mistake_is_told_at_once_and_nothing_is_started(tmp_path):
    (tmp_path / "bad.toml").write_text(
        """
        source = "http://0.0.0.0:0/events"
        store = "sqlit:seen.db"
        windwo = "6d"
        lease = "soon"
        [[rules]]
        name = "a"
        key = ["detail["]
        """
    )
    with Command(tmp_path, "run", "-c", "bad.toml") as run:
        assert run.ended() == 2
        said = run.said.decode()
    for part in ("bad.toml", "no auth is configured", "sqlit", "windwo", "window", "lease"):
        assert part in said
    assert "Traceback" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.toml"]


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "gate.example"])
@pytest.mark.full
def test_an_address_that_others_can_reach_is_refused_without_a_secret(tmp_path, host):
    with file_run(tmp_path, "--source", f"http://{host}:0/events", "--sink", "-") as run:
        assert run.ended() == 2
        assert b"no auth is configured" in run.said
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_a_port_in_use_is_told(tmp_path, receiver):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with file_run(
            tmp_path, "--source", f"http://127.0.0.1:{port}/events", "--sink", "-"
        ) as run:
            code = run.ended()
            assert b"another program uses this port already" in run.said
            assert b"Traceback" not in run.said
    assert code == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none/seen.db", b"does not exist"),
        ("folder", b"cannot be opened"),
        ("text", b"not a SQLite"),
    ],
)
@pytest.mark.full
def test_a_store_that_cannot_be_used_is_told(tmp_path, name, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("this is a letter, and no database at all" * 50)
    with Command(
        tmp_path,
        *("run", "--source", "http://127.0.0.1:0/events", "--sink", "-"),
        *("--store", f"sqlite:{name}", "--dead", "sqlite:dead.db"),
    ) as run:
        assert run.ended() == 3
        assert message in run.said
        assert b"Traceback" not in run.said


def test_a_file_that_is_not_there_is_told(tmp_path):
    with file_run(tmp_path, "--source", "file:none.ndjson", "--sink", "-") as run:
        assert run.ended() == 3
        assert b"No such file" in run.said


@pytest.mark.full
def test_a_damaged_file_is_told_after_what_could_be_read(tmp_path):
    packed = gzip.compress(ndjson(*[event(number) for number in range(500)]))
    (tmp_path / "in.gz").write_bytes(packed[:-100])
    with file_run(tmp_path, "--source", "file:in.gz", "--sink", "file:out.ndjson") as run:
        assert run.ended() not in (0, 2)
        assert b"truncated" in run.said
        assert b"Traceback" not in run.said
    assert (tmp_path / "out.ndjson").read_bytes().count(b"\n") > 100


@pytest.mark.full
def test_wrong_usage_is_told(tmp_path):
    for arguments in (("run", "--no-such-flag"), ("walk",), ("run", "--set", "sink.rate")):
        with Command(tmp_path, *arguments) as run:
            assert run.ended() == 2
            assert b"Traceback" not in run.said


def test_nothing_in_is_nothing_out(tmp_path):
    with file_run(tmp_path, "--source", "-", "--sink", "-") as run:
        assert run.ended() == 0
        assert run.printed == b""


# --- what operators are told ---------------------------------------------------------------


def test_a_redis_that_was_wiped_is_noticed(tmp_path, receiver, redis_server):
    with http_run(tmp_path, receiver, "--json", store=redis_server.url) as command:
        url = command.ready()
        send(url, event(1))
        wait_for(lambda: redis_server.ask("DBSIZE"))
        time.sleep(2)  # it has looked at least once
        redis_server.ask("FLUSHALL")
        command.until(lambda: "oncebridge.store_lost_its_records" in command.said.decode())
        assert send(url, event(1))[1]["verdict"] == "delivered"  # nobody can know
        assert send(url, event(1))[1]["verdict"] == "duplicate"
        command.signal()
        assert command.ended() == 0
    counts = json.loads(command.printed)
    assert (counts["delivered"], counts["unprotected"]) == (2, 1)


def freeze(run, store):
    """Stop a process while it does not hold the lock of its store: others would wait for it."""
    with closing(sqlite3.connect(store, timeout=30, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        run.signal(signal.SIGSTOP)
        wait_for(lambda: psutil.Process(run.process.pid).status() == psutil.STATUS_STOPPED)
        db.execute("ROLLBACK")


def test_an_event_that_a_frozen_worker_and_another_delivered_is_counted(tmp_path, receiver):
    short = ("--sink-timeout", "2s", "--commit-budget", "500ms", "--lease", "4s", "--json")
    receiver.open.clear()
    with (
        http_run(tmp_path, receiver, *short) as frozen,
        http_run(tmp_path, receiver, *short) as other,
        ThreadPoolExecutor(1) as threads,
    ):
        url, first_url = other.ready(), frozen.ready()
        first = threads.submit(send, first_url, event(1), timeout=30)
        wait_for(lambda: receiver.begun == 1)
        freeze(frozen, tmp_path / "seen.db")
        receiver.open.set()  # the CRM has it, and nobody listens
        wait_for(lambda: send(url, event(1))[1].get("verdict") == "delivered")
        frozen.signal(signal.SIGCONT)
        assert first.result()[0] in (200, 503)  # its own time for the send may be over, too
        frozen.signal()
        other.signal()
        assert (frozen.ended(), other.ended()) == (0, 0)
    assert len(receiver.bodies) == 2
    assert len(set(receiver.keys)) == 1
    lost = [json.loads(one.printed).get("lease_lost", 0) for one in (frozen, other)]
    assert sum(lost) == 1
