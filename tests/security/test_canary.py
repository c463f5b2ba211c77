"""
A canary in every place that can hold a secret, and another in every payload.

The service runs as people run it, and everything goes wrong that can: wrong credentials, sinks
that refuse, fail and raise, records that are no events, settings that are wrong. Then all that
it ever said is searched: standard output and error, its answers, what it keeps on disk. Each
canary has the name of its place in it, so that a failure says where it got out.
"""

import base64
import hashlib
import hmac
import http.client
import json
import logging
import os
import queue
import re
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from oncebridge.cli.app import app

SECRET, PAYLOAD, NAME = "c4n4ry-5ecret", "c4n4ry-p4yl0ad", "c4n4ry-3vent-id"


def secret(place):
    return f"{SECRET}-{place}"


def signing_secret(place):
    return "whsec_" + base64.b64encode(secret(place).ljust(30, "x").encode()).decode()


def disguises(canary):
    """Give a pattern for the canary as it is, in base64, in hex and percent-encoded."""
    text = canary.encode()
    shapes = [re.escape(canary), text.hex(), "".join(f"%{byte:02X}" for byte in text)]
    for shift in range(3):
        encoded = base64.b64encode(b"\0" * shift + text).decode().rstrip("=")
        shapes.append(re.escape(encoded[(shift * 4 + 2) // 3 : -2]))
    return re.compile("|".join(shapes), re.IGNORECASE)


PATTERNS = {canary: disguises(canary) for canary in (SECRET, PAYLOAD, NAME)}


def leaks(text, *canaries):
    """List where one of *canaries* stands, with what is around it."""
    shown = text if isinstance(text, str) else text.decode("latin-1")
    return [
        shown[max(found.start() - 80, 0) : found.end() + 40]
        for canary in canaries
        for found in PATTERNS[canary].finditer(shown)
    ]


def test_the_search_finds_a_canary_in_disguise():
    basic = base64.b64encode(f"user:{secret('x')}".encode())
    for text in (secret("x"), basic, secret("x").encode().hex(), signing_secret("x")):
        assert leaks(text, SECRET)
        assert not leaks(text, PAYLOAD)
    assert not leaks("nothing of the kind", SECRET, PAYLOAD, NAME)


# --- the other side -----------------------------------------------------------------------


@dataclass
class Seen:
    port: int = 0
    heads: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)


@contextmanager
def target():
    """Answer 200 below /ok, and else what the path says, with an echo of the request."""
    seen = Seen()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.heads.append(f"{self.requestline}\n{self.headers}")
            seen.bodies.append(body)
            status = int(self.path[1:4])
            echo = f"{self.requestline} {self.headers}".encode() + body
            self.send_response(status, secret("reason-phrase"))
            self.send_header("Content-Length", str(len(echo)))
            self.send_header("Location", f"http://u:{secret('location')}@127.0.0.1/")
            self.send_header("Retry-After", secret("retry-after"))
            self.end_headers()
            self.wfile.write(echo)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    seen.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


HOOKS = f"""
import asyncio
from oncebridge import SinkRejected

def raises(event):
    raise ValueError(event.raw.decode() + "{secret("sink")}")

def rejects(event):
    raise SinkRejected(event.raw.decode() + "{secret("sink")}")

async def strays(event):
    async def later():
        raise RuntimeError(event.raw.decode() + "{secret("sink")}")
    asyncio.get_running_loop().create_task(later())

async def calls_back(event):
    def later():
        raise RuntimeError(event.raw.decode() + "{secret("sink")}")
    asyncio.get_running_loop().call_soon(later)

def leaves(event):
    raise SystemExit(event.raw.decode() + "{secret("sink")}")
"""


# --- a service to talk to -----------------------------------------------------------------


class Talk:
    """A running service: what it said, on every channel."""

    def __init__(self, process):
        self.process = process
        self.answers = []
        self._ready = queue.Queue()
        self.err, self.out = [], []
        self._pumps = [
            threading.Thread(target=self._pump, args=(process.stderr, self.err)),
            threading.Thread(target=self._pump, args=(process.stdout, self.out)),
        ]
        for pump in self._pumps:
            pump.start()

    def _pump(self, stream, lines):
        with stream:
            for line in stream:
                lines.append(line.decode())
                if found := re.search(r"http://127\.0\.0\.1:(\d+)/events", lines[-1]):
                    self._ready.put(int(found[1]))
        self._ready.put(0)

    def wait(self):
        self.port = self._ready.get(timeout=30)
        assert self.port, self.err

    def ask(self, method, path, body=b"", **headers):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)) as client:
            client.request(method, path, body or None, named)
            answer = client.getresponse()
            text = answer.read().decode("latin-1")
            self.answers.append(f"{answer.status} {answer.reason}\n{answer.headers}\n{text}")
            return answer.status, text

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=30)
        for pump in self._pumps:
            pump.join()
        return code

    @property
    def said(self):
        return "".join([*self.err, *self.out, *self.answers])


def environment(**more):
    inherited = {n: v for n, v in os.environ.items() if not n.startswith("ONCEBRIDGE_")}
    return inherited | more


@contextmanager
def running(directory, toml, *arguments, **env):
    (directory / "canary.toml").write_text(toml)
    (directory / "canary_hooks.py").write_text(HOOKS)
    process = subprocess.Popen(
        [sys.executable, "-m", "oncebridge", "run", "-c", "canary.toml", *arguments],
        cwd=directory,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    talk = Talk(process)
    try:
        talk.wait()
        yield talk
    finally:
        try:
            talk.end()
        finally:
            process.kill()
            process.wait()


def event(number=1, **more):
    envelope = {
        "version": "0",
        "id": f"{NAME}-{number}",
        "detail-type": f"Order {PAYLOAD}-detail-type",
        "source": f"com.example.{PAYLOAD}-source",
        "account": f"{PAYLOAD}-account",
        "time": "2026-03-01T10:00:00Z",
        "region": f"{PAYLOAD}-region",
        "resources": [f"{PAYLOAD}-resource"],
        "detail": {"order": number, f"{PAYLOAD}-name": f"{PAYLOAD}-value"},
    }
    return json.dumps({**envelope, **more}).encode()


NO_EVENTS = [
    f"{PAYLOAD} is not JSON".encode(),
    f'"{PAYLOAD}"'.encode(),
    f'{{"{PAYLOAD}": 1, "{PAYLOAD}": 2, "detail": {{}}}}'.encode(),
    f'{{"detail": "{PAYLOAD}"}}'.encode(),
    f'{{"detail": {{"{PAYLOAD}": 1e999}}}}'.encode(),
    f'{{"detail": {{"{PAYLOAD}": "\\ud800"}}}}'.encode(),
    b"\xff" + PAYLOAD.encode(),
    f'{{"detail": {"[" * 200}"{PAYLOAD}"{"]" * 200}}}'.encode(),
]

COMMON = """
log_level = "debug"
log_format = "{log_format}"
store = "sqlite:seen.db"
dead = "sqlite:dead.db"
max_attempts = 2
backoff = "1ms"
max_backoff = "5ms"
sink_timeout = "2s"
lease = "10s"
grace = "3s"

[source]
url = "http://127.0.0.1:0/events"
answer_within = "2s"
api_keys = ["{api_key}", "env:CANARY_API_KEY", "file:api-key"]
basic = ["user:{basic}"]
bearer = ["file:bearer"]
oauth = ["client:{oauth}"]
hmac = ["env:CANARY_HMAC"]
"""


def common(directory, log_format="json"):
    (directory / "api-key").write_text(secret("api-key-file") + "\n")
    (directory / "bearer").write_text(secret("bearer") + "\n")
    named = {n: secret(n.replace("_", "-")) for n in ("api_key", "basic", "oauth")}
    return COMMON.format(log_format=log_format, **named)


ENVIRONMENT = {
    "CANARY_API_KEY": secret("api-key-env"),
    "CANARY_HMAC": secret("hmac"),
    "CANARY_HEADER": f"Bearer {secret('header')}",
    "CANARY_SIGN": signing_secret("sign"),
}


def route(name, sink):
    return f'\n[[routes]]\nname = "{name}"\nsink = {sink}\n'


def http_sink(port, path, scheme="http"):
    url = (
        f"{scheme}://user:{secret('userinfo')}@127.0.0.1:{port}{path}/{secret('hook')}"
        f"?token={secret('query')}&code={secret('code')}"
    )
    return (
        f'{{ url = "{url}", allow_private = true, sign = ["env:CANARY_SIGN"], cloudevents = true, '
        f'headers = {{ X-Key = "{secret("header-literal")}", X-Bearer = "env:CANARY_HEADER" }} }}'
    )


def send_everything(talk):
    """Send with every credential, right and wrong, and what is no event."""
    right = {"x_api_key": secret("api-key")}
    keys = ("api-key", "api-key-env", "api-key-file")
    for number, key in enumerate(keys):
        assert talk.ask("POST", "/events", event(number), x_api_key=secret(key))[0] in (200, 503)
    basic = base64.b64encode(f"user:{secret('basic')}".encode()).decode()
    assert talk.ask("POST", "/events", event(4), Authorization=f"Basic {basic}")[0] in (200, 503)
    bearer = f"Bearer {secret('bearer')}"
    assert talk.ask("POST", "/events", event(5), Authorization=bearer)[0] in (200, 503)
    form = f"grant_type=client_credentials&client_id=client&client_secret={secret('oauth')}"
    status, token = talk.ask("POST", "/oauth/token", form.encode())
    assert status == 200
    bearer = f"Bearer {json.loads(token)['access_token']}"
    assert talk.ask("POST", "/events", event(6), Authorization=bearer)[0] in (200, 503)
    now = str(int(time.time()))
    digest = hmac.new(secret("hmac").encode(), f"{now}.".encode() + event(7), hashlib.sha256)
    signed = {"X_Oncebridge_Timestamp": now, "X_Oncebridge_Signature": f"v1={digest.hexdigest()}"}
    assert talk.ask("POST", "/events", event(7), **signed)[0] in (200, 503)
    wrong = [
        {},
        {"x_api_key": f"{secret('api-key')}x"},
        {"Authorization": f"Basic {secret('basic')}"},
        {"Authorization": f"Bearer {secret('bearer')}x"},
        {"Authorization": f"Digest {secret('bearer')}"},
        {**signed, "X_Oncebridge_Signature": f"v1={secret('hmac')}"},
        {"Cookie": secret("cookie"), "User_Agent": secret("agent")},
    ]
    for headers in wrong:
        assert talk.ask("POST", "/events", event(8), **headers)[0] == 401
    form = form.replace("client_id=client", f"client_id={secret('client')}")
    assert talk.ask("POST", "/oauth/token", form.encode())[0] == 401
    for body in NO_EVENTS:
        assert talk.ask("POST", "/events", body, **right)[0] in (200, 503)
    assert talk.ask("POST", "/events", b"[%b,%b]" % (event(9), event(9)), **right)[0] in (200, 503)
    assert talk.ask("POST", f"/{secret('path')}?a={secret('query')}", event(9), **right)[0] == 404
    assert talk.ask("PUT", "/events", event(9), **right)[0] == 405
    assert talk.ask("POST", "/events", PAYLOAD.encode() * 300_000, **right)[0] == 413
    odd = {"Content_Encoding": secret("encoding")}
    assert talk.ask("POST", "/events", event(9), **right, **odd)[0] == 415
    bad_gzip = {"Content_Encoding": "gzip"}
    assert talk.ask("POST", "/events", event(9), **right, **bad_gzip)[0] in (200, 503)
    for path in ("/healthz", "/readyz", "/openapi.json"):
        talk.ask("GET", path)


def on_disk(directory):
    """Give what the store and the dead letters keep beside the payload itself."""
    kept = []
    with closing(sqlite3.connect(directory / "seen.db")) as db:
        kept += [str(row) for row in db.execute("SELECT * FROM oncebridge_records")]
    with closing(sqlite3.connect(directory / "dead.db")) as db:
        columns = "reason, message, route, rule, key"
        kept += [str(row) for row in db.execute(f"SELECT {columns} FROM oncebridge_dead")]
    return "\n".join(kept)


_HEARD = {}


@pytest.fixture(params=["json", "text"])
def talk(request, tmp_path_factory):
    """Listen to one service that was sent everything; once for each form of its log."""
    if request.param not in _HEARD:
        _HEARD[request.param] = hear(tmp_path_factory.mktemp("canary"), request.param)
    return _HEARD[request.param]


def hear(directory, log_format):
    """Run a service with every kind of sink there is, to its end."""
    with target() as seen, closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))  # and never listens: whoever comes is refused
        toml = common(directory, log_format)
        for path in ("/200", "/302", "/400", "/401", "/409", "/500"):
            toml += route(f"http {path}", http_sink(seen.port, path))
        toml += route("no TLS", http_sink(seen.port, "/200", "https"))
        toml += route("refused", http_sink(silent.getsockname()[1], "/200"))
        for name in ("raises", "rejects", "strays", "calls_back"):
            toml += route(name, f'"python:canary_hooks:{name}"')
        with running(directory, toml, "--json", **ENVIRONMENT) as talk:
            send_everything(talk)
            code = talk.end()
    return talk, seen, directory, code


def test_the_canaries_were_really_there(talk):
    _, seen, directory, code = talk
    heads = "\n".join(seen.heads)
    for place in ("hook", "query", "code", "header-literal"):
        assert secret(place) in heads
    assert f"Bearer {secret('header')}" in heads
    userinfo = base64.b64encode(f"user:{secret('userinfo')}".encode()).decode()
    assert f"Basic {userinfo}" in heads
    assert "webhook-signature: v1," in heads
    assert any(PAYLOAD.encode() in body for body in seen.bodies)
    with closing(sqlite3.connect(directory / "dead.db")) as db:
        raws = [raw for (raw,) in db.execute("SELECT raw FROM oncebridge_dead")]
        reasons = {r for (r,) in db.execute("SELECT reason FROM oncebridge_dead")}
    assert any(PAYLOAD.encode() in raw for raw in raws)
    assert len(reasons) > 3
    assert code in (0, 1)


def test_nothing_that_it_said_has_a_secret_or_a_payload(talk):
    said = talk[0]
    assert "oncebridge.decision" in said.said or " decision " in said.said
    assert len(said.answers) > 30
    assert not leaks("".join(said.err), SECRET, PAYLOAD, NAME)
    assert not leaks("".join(said.out), SECRET, PAYLOAD, NAME)
    assert not leaks("".join(said.answers), SECRET, PAYLOAD, NAME)


def test_no_traceback_is_printed(talk):
    said = talk[0]
    assert "Traceback" not in said.said
    assert "never retrieved" not in said.said
    assert "unforeseen" in "".join(said.err)  # what the sink left behind is told, by its type


def test_the_last_line_is_the_counts_as_json(talk):
    said = talk[0]
    counts = json.loads("".join(said.out))
    assert counts["dead"] > 0
    assert not leaks(json.dumps(counts), SECRET, PAYLOAD)


def test_what_is_kept_beside_the_payload_has_no_secret_and_no_payload(talk):
    _, _, directory, _ = talk
    kept = on_disk(directory)
    assert "rejected" in kept or "exhausted" in kept
    assert not leaks(kept, SECRET, PAYLOAD)


def test_no_secret_is_written_to_any_file(talk):
    _, _, directory, _ = talk
    ours = {"canary.toml", "canary_hooks.py", "api-key", "bearer", "__pycache__"}
    for path in directory.iterdir():
        if path.name not in ours:
            # the dead letters hold what was sent, and somebody sent secrets
            assert not leaks(path.read_bytes(), SECRET), path


@pytest.mark.parametrize("talk", ["json"], indirect=True)
def test_other_commands_with_the_same_configuration_print_no_secret(talk, monkeypatch):
    _, _, directory, _ = talk
    (directory / "event.json").write_bytes(event(1))
    commands = [
        ["dead", "list"],
        ["dead", "list", "--json"],
        ["dead", "show", "1"],
        ["explain", "event.json"],
        ["explain", "event.json", "--json"],
        ["forget", "event.json"],
        ["pause"],
        ["resume"],
        ["explain", "missing.json"],
    ]
    for arguments in commands:
        done = invoke(directory, monkeypatch, *arguments, "-c", "canary.toml", **ENVIRONMENT)
        assert done.exit_code in (0, 1, 2), done
        assert done.output
        assert not leaks(done.output, SECRET), arguments


# --- alone --------------------------------------------------------------------------------


def run_to_its_end(directory, toml, *arguments, **env):
    (directory / "canary.toml").write_text(toml)
    (directory / "canary_hooks.py").write_text(HOOKS)
    return subprocess.run(
        [sys.executable, "-m", "oncebridge", "run", "-c", "canary.toml", *arguments],
        cwd=directory,
        env=environment(**env),
        capture_output=True,
        timeout=60,
        check=False,
    )


def invoke(directory, monkeypatch, *arguments, **env):
    """Run a command in this process, which is quicker where it adds nothing not to."""
    log = logging.getLogger("oncebridge")
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", log.propagate)
    level = log.level
    try:
        return CliRunner().invoke(app, arguments, env=env)
    finally:
        log.setLevel(level)


def test_nothing_shows_the_path_of_a_webhook_that_is_the_only_sink(tmp_path, monkeypatch):
    with target() as seen:
        url = f"http://user:{secret('userinfo')}@127.0.0.1:{seen.port}/500/{secret('hook')}?a=b"
        toml = f'sink = "{url}"\nbreaker = 1\ndashboard = "127.0.0.1:0"\n{common(tmp_path)}'
        with running(tmp_path, toml, **ENVIRONMENT) as talk:
            for number in (1, 2):  # while one event alone has failed, it may be its own fault
                talk.ask("POST", "/events", event(number), x_api_key=secret("api-key"))
            status, text = talk.ask("GET", "/readyz")
            assert status == 503
            assert json.loads(text)["reasons"] == ["default: the sink is down"]
            ready = json.loads(next(line for line in talk.err if "oncebridge.ready" in line))
            shown = f"http://***@127.0.0.1:{seen.port}/***"
            assert re.fullmatch(re.escape(shown) + "[0-9a-f]{8}", ready["sink"])
            assert ready["source"] == f"http://127.0.0.1:{talk.port}/events"
            talk.port = int(ready["dashboard"].rpartition(":")[2].strip("/"))
            assert 'route="default"' in talk.ask("GET", "/metrics")[1]
            pages = [talk.ask("GET", page)[1] for page in ("/", "/rules", "/dead", "/decisions")]
            assert ready["sink"] in pages[1]
            talk.end()
        assert not leaks(talk.said, SECRET)
        assert not leaks("".join(talk.err), PAYLOAD, NAME)
        assert not leaks(on_disk(tmp_path), SECRET, PAYLOAD)
        for command in (["check"], ["check", "--json"], ["pause"], ["dead", "list"]):
            done = invoke(tmp_path, monkeypatch, *command, "-c", "canary.toml", **ENVIRONMENT)
            assert done.output
            assert not leaks(done.output, SECRET), command


def test_a_spool_tells_as_little(tmp_path):
    with target() as seen:
        toml = f'spool = "spool.db"\n{common(tmp_path)}' + route(
            "http", http_sink(seen.port, "/500")
        )
        with running(tmp_path, toml, **ENVIRONMENT) as talk:
            status, _ = talk.ask("POST", "/events", event(1), x_api_key=secret("api-key"))
            assert status == 202
            talk.ask("POST", "/events", NO_EVENTS[0], x_api_key=secret("api-key"))
            talk.end()
        assert not leaks(talk.said, SECRET, PAYLOAD, NAME)
        assert not leaks((tmp_path / "spool.db").read_bytes(), SECRET)


FILE = 'log_level = "debug"\nstore = "sqlite:seen.db"\ndead = "sqlite:dead.db"\n'


@pytest.mark.parametrize("hook", ["rejects", "strays", "calls_back"])
def test_a_file_with_lines_that_are_no_events_tells_their_numbers_only(tmp_path, hook):
    lines = [event(1), NO_EVENTS[0], event(2), NO_EVENTS[1], event(1)]
    (tmp_path / "in.ndjson").write_bytes(b"\n".join(lines))
    toml = f'source = "file:in.ndjson"\nsink = "python:canary_hooks:{hook}"\n{FILE}'
    done = run_to_its_end(tmp_path, toml, "--json")
    assert done.returncode == 0, done
    assert json.loads(done.stdout)["arrived"] == 5
    assert not leaks(done.stdout + done.stderr, SECRET, PAYLOAD, NAME)
    assert not leaks(on_disk(tmp_path), SECRET, PAYLOAD)
    assert b"Traceback" not in done.stderr


def test_a_function_that_wants_to_leave_takes_nobody_with_it(tmp_path):
    (tmp_path / "in.ndjson").write_bytes(event(1))
    toml = (
        f'max_attempts = 1\nsource = "file:in.ndjson"\nsink = "python:canary_hooks:leaves"\n{FILE}'
    )
    done = run_to_its_end(tmp_path, toml, "--json")
    assert not leaks(done.stdout + done.stderr, SECRET, PAYLOAD, NAME)
    assert done.returncode == 0
    assert json.loads(done.stdout)["dead"] == 1


# A mistake of our own, in the middle of the service: its text quotes what it had in hand.
BROKEN = f"""
from oncebridge.engine.router import Router

def read(self, raw):
    raise RuntimeError(raw.decode() + "{secret("router")}")

Router.read = read

def sink(event):
    pass
"""


def test_an_error_that_nobody_foresaw_is_told_without_its_text(tmp_path):
    (tmp_path / "in.ndjson").write_bytes(event(1))
    (tmp_path / "canary_broken.py").write_text(BROKEN)
    toml = f'source = "file:in.ndjson"\nsink = "python:canary_broken:sink"\n{FILE}'
    (tmp_path / "canary.toml").write_text(toml)
    with subprocess.Popen(
        [sys.executable, "-m", "oncebridge", "run", "-c", "canary.toml", "--json"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:  # it tries the event again, and again
        assert process.stderr is not None
        heard = b""
        while b"oncebridge.batch_failed" not in heard:
            line = process.stderr.readline()
            assert line, heard
            heard += line
        process.terminate()
        out, rest = process.communicate(timeout=30)
    heard += rest
    assert b"RuntimeError" in heard
    assert b"canary_broken.py" in heard
    assert not leaks(out + heard, SECRET, PAYLOAD, NAME)


def test_a_module_that_fails_on_import_does_not_tell_what_it_knew(tmp_path):
    (tmp_path / "canary_import.py").write_text(f'raise ValueError("{secret("import")}")')
    done = run_to_its_end(tmp_path, f'sink = "python:canary_import:x"\n{FILE}')
    assert done.returncode == 2
    assert b"ValueError" in done.stderr
    assert not leaks(done.stdout + done.stderr, SECRET)


URLS = [
    secret("url"),
    f"crm.example.com/?token={secret('url')}",
    f"http://u:{secret('url')}@127.0.0.1/",
    f"http://u:{secret('url')}@0.0.0.0:80/",
    f"x://u:{secret('url')}@h",
]
SOURCES = "\n".join(f'[[source]]\nurl = "env:CANARY_URL_{at}"' for at in range(len(URLS)))
MISTAKES = f"""
store = "redis://:{secret("store")}@127.0.0.1:6379/0"
dead = "sqs://user:{secret("dead")}@queue?token={secret("dead-query")}"
lease = "1s"

[[source]]
url = "http://user:{secret("source")}@127.0.0.1/events"

[[source]]
url = "http://127.0.0.1:1/events"
api_keys = "{secret("api-keys")}"
basic = ["{secret("basic")}"]
oauth = {{ client = "{secret("oauth")}" }}
bearer = [["{secret("bearer")}"]]
hmac = ["env:NO_SUCH_CANARY", "file:/no/such/canary"]
nonsense = "{secret("nonsense")}"

{SOURCES}

[[routes]]
name = "a"
sink = {{ url = "https://u:{secret("sink")}@crm.example.com:x/", headers = {{ A = "b" }} }}

[[routes]]
name = "b"
sink = {{ url = "https://crm.example.com/", headers = "{secret("headers")}", sign = ["x"] }}

[[routes]]
name = "c"
sink = {{ url = "https://crm.example.com/", headers = {{ A = "{secret("header")}\\u0007" }} }}

[[routes]]
name = "d"
sink = {{ url = "https://crm.example.com/", sign = ["whsec_{secret("sign")}"] }}

[[routes]]
name = "e"
sink = "ftp://u:{secret("ftp")}@crm.example.com/"
"""


def test_a_configuration_full_of_mistakes_is_told_without_its_secrets(tmp_path):
    variables = {
        **{f"CANARY_URL_{at}": url for at, url in enumerate(URLS)},
        "ONCEBRIDGE_SOURCE__API_KEYS": secret("variable"),
        "ONCEBRIDGE_NONSENSE": secret("unknown-variable"),
        "ONCEBRIDGE_LIMITS": secret("limits")[len(SECRET) :],
    }
    flags = ["--set", f"sink.headers.Authorization={secret('flag')}"]
    done = run_to_its_end(tmp_path, MISTAKES, *flags, **variables)
    assert done.returncode == 2
    assert done.stdout == b""
    lines = done.stderr.decode().splitlines()
    assert len(lines) > 20, lines
    assert not leaks(done.stderr, SECRET), lines
    assert not {path.name for path in tmp_path.iterdir()} - {"canary.toml", "canary_hooks.py"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", secret("flag")],
        ["--set", f"sink.headers.Authorization: {secret('flag')}"],
        ["--set", f"source.api_keys={secret('flag')}", "--set", "nonsense=1"],
        ["--sink", f"https://u:{secret('flag')}@crm.example.com:x/"],
        ["--sink", f"https://u:{secret('flag')}@crm.example.com/", "--lease", "1s"],
        ["--store", f"etcd://u:{secret('flag')}@h"],
        ["--store", f"redis://u:{secret('flag')}@h:port"],
        ["--store", f"postgresql://u:{secret('flag')}@h:port/db"],
        ["--store", f"s3://u:{secret('flag')}@bucket/x"],
        ["--store", f"dynamodb://u:{secret('flag')}@table"],
        ["--spurce", f"http://u:{secret('flag')}@h"],
        [f"--spurce=http://u:{secret('flag')}@h"],
    ],
)
def test_wrong_flags_are_told_without_their_secrets(tmp_path, monkeypatch, arguments):
    (tmp_path / "canary.toml").write_text(FILE)
    done = invoke(tmp_path, monkeypatch, "run", "-c", "canary.toml", *arguments)
    assert done.exit_code == 2, done
    assert done.output
    assert not leaks(done.output, SECRET)


@pytest.mark.parametrize(
    "toml",
    [
        'store = "sqlite:/no/such/directory/seen.db"',
        'store = "sqlite:canary.toml"',
        'store = "redis://user:SECRET@127.0.0.1:1/0"',
        'store = "rediss://:SECRET@127.0.0.1:1/0"',
        'store = "redis+sentinel://user:SECRET@127.0.0.1:1/main"',
        'store = "redis+cluster://user:SECRET@127.0.0.1:1"',
        'store = "postgresql://user:SECRET@127.0.0.1:1/events"',
        'sink = "postgresql://user:SECRET@127.0.0.1:1/events"',
        'dead = "sqlite:/no/such/directory/dead.db"',
        'source = { url = "https://127.0.0.1:0/events", tls_cert = "canary.toml" }',
        'source = "file:/no/such/file"',
        'sink = { url = "https://user:SECRET@h.example.com/?token=SECRET", ca_file = "canary.toml" }',
        'spool = "/no/such/directory/spool.db"',
    ],
)
def test_what_cannot_be_opened_is_told_without_secrets(tmp_path, toml):
    places = {
        "source": f'"http://127.0.0.1:0/{secret("path")[len(SECRET) :]}"',
        "store": '"sqlite:seen.db"',
        "dead": '"sqlite:dead.db"',
        "sink": f'"http://user:{secret("sink")}@127.0.0.1:9/?token={secret("query")}"',
    }
    given = toml.partition(" ")[0]
    rest = "\n".join(f"{name} = {url}" for name, url in places.items() if name != given)
    toml = toml.replace("SECRET", secret("sink"))
    # A store that is only away for now is waited for, so the end may have to be asked for.
    (tmp_path / "canary.toml").write_text(f"{toml}\n{rest}")
    process = subprocess.Popen(
        [sys.executable, "-m", "oncebridge", "run", "-c", "canary.toml", "--grace", "1s"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        select.select([process.stderr], [], [], 20)  # it says something sooner or later
        try:
            out, err = process.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            process.terminate()
            out, err = process.communicate(timeout=20)
    assert err
    assert not leaks(out + err, SECRET), err
    assert b"Traceback" not in err


@pytest.mark.parametrize("command", ["migrate", "copy"])
@pytest.mark.parametrize(
    "url",
    ["redis://user:SECRET@127.0.0.1:1", "postgresql://user:SECRET@127.0.0.1:1/events"],
)
def test_commands_about_stores_that_are_away_print_no_secret(tmp_path, monkeypatch, command, url):
    monkeypatch.setattr("oncebridge.stores.copying._PAUSES_S", (0.1,))
    url = url.replace("SECRET", secret("store"))
    stores = ["--store", url] if command == "migrate" else ["--from", url, "--to", "sqlite:x.db"]
    done = invoke(tmp_path, monkeypatch, command, *stores)
    assert done.output
    assert not leaks(done.output, SECRET)
    if command == "copy" or url.startswith("postgresql"):
        assert done.exit_code == 3, done.output
