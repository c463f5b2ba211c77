"""The ready-made handler, in a process of its own, called by Lambda's own runtime client."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import pytest
from tests.aws.payloads import event, kinesis, sqs

from oncebridge import ConfigError
from oncebridge.aws.function import make_handler

API = "/2018-06-01/runtime"
SHARED = {"ONCEBRIDGE_STORE": "memory:", "ONCEBRIDGE_DEAD": "memory:"}


class Runtime(ThreadingHTTPServer):
    """Lambda's side: hands out invocations, and takes what the function says."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Requests)
        self.calls = queue.Queue()
        self.said = queue.Queue()

    def call(self, payload, seconds=30):
        self.calls.put((json.dumps(payload).encode(), int((time.time() + seconds) * 1000)))
        return self.said.get(timeout=60)


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        try:
            body, ends_ms = self.server.calls.get(timeout=120)
        except queue.Empty:
            return
        self.send_response(200)
        self.send_header("Lambda-Runtime-Aws-Request-Id", "8476a536-e9f4-11e8-9739-2dfe598c3fcd")
        self.send_header("Lambda-Runtime-Deadline-Ms", str(ends_ms))
        self.send_header(
            "Lambda-Runtime-Invoked-Function-Arn",
            "arn:aws:lambda:us-east-1:123456789012:function:genesys-dedup",
        )
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        kind = self.path.removeprefix(API).rsplit("/", 1)[-1]
        if self.path == f"{API}/init/error":
            kind = "init"
        self.server.said.put((kind, json.loads(body)))
        self.send_response(202)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


_numbers = count()


@contextmanager
def deployed(package, **environment):
    """Run the function whose package is *package*; give Lambda's side, and its log when done."""
    log = package.parent / f"log-{next(_numbers)}"
    with Runtime() as runtime, log.open("wb") as lines:
        threading.Thread(target=runtime.serve_forever, daemon=True).start()
        process = subprocess.Popen(
            [sys.executable, "-m", "awslambdaric", "oncebridge.aws.function.handler"],
            cwd=package.parent,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(package),
                "LAMBDA_TASK_ROOT": str(package),
                "AWS_LAMBDA_RUNTIME_API": f"127.0.0.1:{runtime.server_address[1]}",
                "AWS_LAMBDA_FUNCTION_NAME": "genesys-dedup",
                **environment,
            },
            stdout=lines,
            stderr=lines,
        )
        try:
            yield runtime, log
        finally:
            process.kill()
            process.wait()
            runtime.shutdown()


@pytest.fixture
def package(tmp_path):
    """A function's package, with a sink that is a Python function in it."""
    made = tmp_path / "task"
    made.mkdir()
    (made / "shop.py").write_text(
        "import sys\n"
        "def deliver(event):\n"
        "    if event.detail['n'] == 13:\n"
        "        raise LookupError('no such order')\n"
        "    print('delivered', event.detail['n'], file=sys.stderr, flush=True)\n"
    )
    return made


def test_the_configuration_in_the_package_is_all_it_needs(package):
    (package / "oncebridge.toml").write_text(
        'store = "memory:"\ndead = "memory:"\nsink = "python:shop:deliver"\nroute = "shop"\n'
    )
    with deployed(package) as (runtime, log):
        assert runtime.call(sqs(event(1), event(13))) == (
            "response",
            {"batchItemFailures": [{"itemIdentifier": "m1"}]},
        )
        assert runtime.call(event(1)) == ("response", None)
        assert runtime.call(kinesis(("p", event(2)), state={"a": 1})) == (
            "response",
            {"batchItemFailures": [], "state": {"a": 1}},
        )
        kind, error = runtime.call(event(13), seconds=3)
        assert (kind, error["errorType"]) == ("error", "HandedBack")
        kind, error = runtime.call({"httpMethod": "GET"})
        assert (kind, error["errorType"]) == ("error", "NotRecognised")
        said = log.read_text()
    assert [line for line in said.splitlines() if line.startswith("delivered")] == [
        "delivered 1",
        "delivered 2",
    ]
    metrics = [json.loads(line) for line in said.splitlines() if line.startswith('{"_aws"')]
    assert [line["arrived"] for line in metrics] == [2, 1, 1, 1]
    assert {line["route"] for line in metrics} == {"shop"}
    assert "ends_with_the_container" in said


def test_a_mistake_fails_the_initialisation_and_is_named(package):
    (package / "crm.toml").write_text('store = "dynamo://seen"\nwindow = "soon"\n')
    with deployed(package, ONCEBRIDGE_CONFIG="crm.toml", ONCEBRIDGE_LEASE="1s") as (runtime, _):
        kind, error = runtime.said.get(timeout=60)
    assert (kind, error["errorType"]) == ("init", "ConfigErrors")
    for word in ("crm.toml", "window", "'dynamo'", "dynamodb", "ONCEBRIDGE_LEASE"):
        assert word in error["errorMessage"]


def test_two_containers_on_one_table_deliver_once(package, aws_identity, ministack):
    table = ministack.table()
    environment = {
        "ONCEBRIDGE_STORE": f"dynamodb://{table}",
        "ONCEBRIDGE_STORE__TIMEOUT": "20s",
        "ONCEBRIDGE_DEAD": "memory:",
        "ONCEBRIDGE_SINK": "python:shop:deliver",
        "AWS_ENDPOINT_URL": ministack.endpoint,
        **{name: value for name, value in os.environ.items() if name.startswith("AWS_")},
    }
    batch = sqs(*[event(n) for n in range(10)])
    with (
        deployed(package, **environment) as (one, first),
        deployed(package, **environment) as (other, second),
        ThreadPoolExecutor(2) as threads,
    ):
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            said = list(threads.map(lambda runtime: runtime.call(batch, 60), [one, other]))
            assert {kind for kind, _ in said} == {"response"}
            # A busy event is brought again, as a queue would.
            if all(answer == {"batchItemFailures": []} for _, answer in said):
                break
            time.sleep(0.2)
        delivered = [
            line
            for log in (first, second)
            for line in log.read_text().splitlines()
            if line.startswith("delivered")
        ]
    assert sorted(delivered) == [f"delivered {n}" for n in range(10)]


# --- what it is made of, in this process ----------------------------------------------------


def made(**environment):
    return make_handler({"ONCEBRIDGE_LOG_LEVEL": "error", **environment})


@pytest.fixture(autouse=True)
def _log_as_before(monkeypatch):
    import logging

    log = logging.getLogger("oncebridge")
    before = (list(log.handlers), log.level, log.propagate)
    yield
    log.handlers[:], log.propagate = before[0], before[2]
    log.setLevel(before[1])


def test_the_environment_alone_will_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    handler = made(**SHARED, ONCEBRIDGE_SINK="python:builtins:print")
    assert [gateway.route for gateway in handler.router.gateways] == ["default"]


def test_several_routes_are_several_ways_out(tmp_path):
    file = tmp_path / "routes.toml"
    file.write_text(
        '[[routes]]\nname = "crm"\nsink = "python:builtins:print"\n'
        '[[routes]]\nname = "wall"\nsink = "python:builtins:print"\n'
    )
    handler = made(**SHARED, ONCEBRIDGE_CONFIG=str(file))
    assert [gateway.route for gateway in handler.router.gateways] == ["crm", "wall"]


def test_the_file_is_looked_for_in_the_package_and_then_here(tmp_path, monkeypatch):
    package, here = tmp_path / "task", tmp_path / "here"
    for folder in (package, here):
        folder.mkdir()
        sink = 'sink = "python:builtins:print"\n'
        (folder / "own.toml").write_text(f'route = "{folder.name}"\n{sink}')
    monkeypatch.chdir(here)
    own = {**SHARED, "ONCEBRIDGE_CONFIG": "own.toml"}

    def route(**environment):
        return made(**environment).router.gateways[0].route

    assert route(**own) == "here"
    assert route(**own, LAMBDA_TASK_ROOT=str(package)) == "task"
    (package / "own.toml").unlink()
    assert route(**own, LAMBDA_TASK_ROOT=str(package)) == "here"
    (here / "own.toml").rename(package / "oncebridge.toml")
    assert route(**SHARED, LAMBDA_TASK_ROOT=str(package)) == "here"
    with pytest.raises(ConfigError, match="no such file"):
        made(**own)


def test_what_a_server_has_by_default_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        made()
    for word in ("store: ", "dead: ", "sink: ", "dynamodb://TABLE", "sqs://NAME"):
        assert word in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_source_may_be_named_and_is_not_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sink = {"ONCEBRIDGE_SINK": "python:builtins:print"}
    named = made(**SHARED, **sink, ONCEBRIDGE_SOURCE="http://127.0.0.1:1/events")
    assert len(named.router.gateways) == 1
    # That of a worker, whose driver is not in the package.
    (tmp_path / "oncebridge.toml").write_text('[source]\nurl = "gopher://x"\nreceivers = 8\n')
    assert len(made(**SHARED, **sink).router.gateways) == 1


def test_only_the_handler_is_made_when_asked_for():
    from oncebridge import aws
    from oncebridge.aws import function

    for module in (function, aws):
        with pytest.raises(AttributeError, match="nothing"):
            module.nothing  # noqa: B018 - asking is the test
