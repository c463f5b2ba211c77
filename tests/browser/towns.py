"""
What the pages are about: a service in a process of its own, and the one at its other end.

`Site` is `oncebridge run` with a dashboard; its `sink` takes what it gets, unless the test says
what it refuses. `stocked` is a service in this process with an hour of a simulated contact centre
behind it, and nothing in it is older than it says.
"""

import json
import threading
import time
import uuid
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from zlib import crc32

from msgspec.structs import replace
from tests.e2e.towns import Command, send
from tests.http.live import Live

from oncebridge.genesys.simulator import simulate
from oncebridge.service import config
from oncebridge.service.addresses import SinkPlace, StorePlace
from oncebridge.sinks.api import Never, Yes
from oncebridge.stores.sqlite.store import SQLiteStore

CONFIG = """
source = "http://127.0.0.1:0/events"
store = "sqlite:seen.db"
dead = "sqlite:dead.db"
dashboard = "127.0.0.1:0"
dashboard_write = true
dashboard_payloads = true
history = "all"
sink = {{ url = "{sink}", allow_private = true }}
route = "crm"
backoff = "50ms"
{more}

[[rules]]
name = "order status"
match = {{ source = ["com.example.shop"], detail-type = ["Order Status"] }}
key = ["detail.order", "detail.status"]
"""


def order(**more):
    """Make an event of an invented shop that nobody else in the tests has."""
    number = str(uuid.uuid4())
    envelope = {
        "version": "0",
        "id": str(uuid.uuid4()),
        "detail-type": "Order Placed",
        "source": "com.example.shop",
        "account": "123456789012",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "region": "eu-central-1",
        "resources": [],
        "detail": {"order": number, "conversationId": str(uuid.uuid4()), "total": 42},
    }
    return {**envelope, **more}


class Sink:
    """Takes everything, but for bodies that hold a word it refuses."""

    def __init__(self):
        self.bodies = []
        self.refused = set()
        self.url = ""

    def takes(self, body):
        text = body.decode()
        if any(word in text for word in list(self.refused)):
            return False
        self.bodies.append(text)
        return True

    def has(self, word):
        return sum(word in body for body in list(self.bodies))


@contextmanager
def sinking():
    """Serve a `Sink` by HTTP."""
    sink = Sink()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200 if sink.takes(body) else 422)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args): ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *args): ...  # whoever sends may be stopped

    with Server(("127.0.0.1", 0), Handler) as server:
        sink.url = f"http://127.0.0.1:{server.server_port}/hook"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield sink
        finally:
            server.shutdown()
            thread.join()


class Site:
    """A running service, where it is sent to and where it is looked at."""

    def __init__(self, command, sink):
        self.sink = sink
        self.command = command
        self.source = command.ready()
        (ready,) = [line for line in command.log if line["event"] == "oncebridge.ready"]
        self.url = ready["dashboard"].rstrip("/")

    def send(self, event):
        """Send an event, and tell its verdict."""
        body = event if isinstance(event, bytes) else json.dumps(event).encode()
        status, answer = send(self.source, body, timeout=30)
        assert status in (200, 400), answer
        return (
            answer["verdict"] if "verdict" in answer else [r["verdict"] for r in answer["results"]]
        )

    def kill_letter(self, **more):
        """Send an event that its sink refuses for good; give it, and the word that is refused."""
        event = order(**more)
        word = event["detail"]["order"]
        self.sink.refused.add(word)
        assert self.send(event) == "dead"
        return event, word


@contextmanager
def site(folder, *, more="", rules="", arguments=()):
    """Run `oncebridge run` with a dashboard, with all its files in *folder*."""
    with sinking() as sink:
        text = CONFIG.format(sink=sink.url, more=more) + rules
        (folder / "oncebridge.toml").write_text(text)
        with Command(folder, "run", "-c", "oncebridge.toml", *arguments) as command:
            yield Site(command, sink)


# --- a busy hour ----------------------------------------------------------------------------


class Past:
    """A clock that is set to a moment ago, and then to moments less long ago."""

    def __init__(self):
        self.ago_ms = 0

    def __call__(self):
        return time.time_ns() // 1_000_000 - self.ago_ms


class _Crm:
    """A sink that takes nearly everything."""

    batch = 50
    concurrency = 8

    def __init__(self, refuses):
        self._refuses = refuses
        self.taken = 0

    async def open(self): ...

    async def deliver(self, deliveries):
        answers = []
        for delivery in deliveries:
            if self._refuses(delivery.event.raw):
                answers.append(Never("answered 422: the conversation is closed"))
            else:
                self.taken += 1
                answers.append(Yes())
        return answers

    async def aclose(self): ...


@contextmanager
def stocked(folder, *, minutes=10, refuses_one_in=20, seed=11):
    """Run a service that has been at work for some minutes, as far as it can tell."""
    clock = Past()
    flags = {
        "source": "http://127.0.0.1:0/events",
        "store": f"sqlite:{folder}/seen.db",
        "dead": f"sqlite:{folder}/dead.db",
        "preset": "genesys",
        "route": "crm",
        "dashboard": "127.0.0.1:0",
        "dashboard_write": "true",
        "dashboard_payloads": "true",
        "history": "all",
    }
    setup = config.load(None, environment={}, flags=flags)
    store = StorePlace(f"sqlite:{folder}/seen.db", SQLiteStore(folder / "seen.db", clock=clock))
    setup = replace(setup, config=replace(setup.config, store=store))
    crm = _Crm(lambda raw: b"will call back" in raw and not crc32(raw) % refuses_one_in)
    setup = config.with_sink(setup, SinkPlace("https://crm.example.com/hooks/genesys", crm))
    clock.ago_ms = minutes * 60_000
    begins_ms = clock()
    service = Live(setup, crm, clock)
    service.start()
    try:
        _play(service, clock, seed, begins_ms, minutes)
        clock.ago_ms = 0
        service.url = service.service.dashboard_url.rstrip("/")
        yield service
    finally:
        service.stop()


def _play(service, clock, seed, begins_ms, minutes):
    """Let *minutes* of events arrive, a few seconds of them at a time."""
    step_ms, ends_ms = 15_000, minutes * 60_000
    waiting, at_ms = [], step_ms
    for arrival in simulate(seed, 1_000_000, start_ms=begins_ms):
        if arrival.at_ms > at_ms:
            now_ms = time.time_ns() // 1_000_000
            clock.ago_ms = max(now_ms - (begins_ms + at_ms), 0)
            service.do(lambda batch=waiting: service.service.router.process(batch))
            service.do(service.service.monitor.record)
            waiting, at_ms = [], at_ms + step_ms
            if at_ms > ends_ms:
                return
        waiting.append(arrival.raw)
