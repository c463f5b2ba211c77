"""
A whole service in this process, to talk to over real sockets.

`live` runs it in a thread, on a loop of its own, so that a test can be a client that blocks.
Its sink is a `Desk`, which keeps what it is handed and answers as the test says; its store is
SQLite, `Watched`, so that a test can tell whether it was asked at all.
"""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import uvloop
from msgspec.structs import replace

from oncebridge.dead_letters.api import DeadLetter
from oncebridge.engine.verdict import Verdict
from oncebridge.observe.agreement import sink_key
from oncebridge.service import config, epoch
from oncebridge.service.addresses import SinkPlace, StorePlace
from oncebridge.service.service import Service
from oncebridge.sinks.api import Yes
from oncebridge.stores.api import Want

PATH = "/events"


def event(number=1, **more):
    """Make an event of an invented shop; *number* tells one from the other."""
    envelope = {
        "version": "0",
        "id": f"6f1c2a10-0000-4000-8000-{number:012d}",
        "detail-type": "Order Placed",
        "source": "com.example.shop",
        "account": "123456789012",
        "time": "2026-03-01T10:00:00Z",
        "region": "eu-central-1",
        "resources": [],
        "detail": {"order": number, "state": "placed"},
    }
    return json.dumps({**envelope, **more}).encode()


class Desk:
    """A sink that keeps what it gets; it says yes until told otherwise."""

    batch = 1
    concurrency = 100

    def __init__(self, answer=None):
        self.taken = []
        self.begun = 0
        self.answer = answer or Yes()
        self._open = threading.Event()
        self._open.set()

    @property
    def bodies(self):
        return [delivery.event.raw for delivery in self.taken]

    def hold(self):
        """Let what comes wait, until `let_go`."""
        self._open.clear()

    def let_go(self):
        self._open.set()

    async def open(self): ...

    async def deliver(self, deliveries):
        self.begun += len(deliveries)
        while not self._open.is_set():  # noqa: ASYNC110 - the test is in another thread
            await asyncio.sleep(0.01)
        answers = []
        for delivery in deliveries:
            answer = self.answer(delivery) if callable(self.answer) else self.answer
            if isinstance(answer, Yes):
                self.taken.append(delivery)
            answers.append(answer)
        return answers

    async def aclose(self): ...


def _is_housekeeping(item):
    keys = [part.key for part in item.parts] if type(item) is Want else [item.key]
    return not {epoch.KEY, sink_key("desk")}.isdisjoint(keys)


class Watched:
    """A store that counts what it is asked about events."""

    def __init__(self, store):
        self._store = store
        self.asked = Counter()
        self.broken = None

    def __getattr__(self, name):
        found = getattr(self._store, name)
        if name not in ("open", "claim", "commit", "release", "extend", "remember"):
            return found

        async def watched(*asked):
            self.asked[name] += sum(not _is_housekeeping(item) for items in asked for item in items)
            if self.broken is not None:
                raise self.broken
            return await found(*asked)

        return watched


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    took: float = 0.0

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def results(self):
        return self.json.get("results", [self.json])

    @property
    def verdicts(self):
        return [result.get("verdict") for result in self.results]

    @property
    def retry_after(self):
        return int(self.headers["retry-after"])


@dataclass
class Live:
    setup: config.Setup
    sink: object
    clock: object = None
    grace: timedelta = timedelta(seconds=10)
    service: Service = None
    loop: asyncio.AbstractEventLoop = None
    port: int = 0
    failure: BaseException = None
    drained: bool | None = None
    unhandled: list = field(default_factory=list)
    """What was raised on the loop, and caught by nobody."""
    _up: threading.Event = field(default_factory=threading.Event)

    @property
    def store(self):
        return self.setup.config.store.opened

    # --- its life ----------------------------------------------------------------------

    def start(self):
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._up.wait(10)
        if self.failure is not None:
            raise self.failure

    def stop(self):
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.service.stop)
        self._thread.join(20)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure
        assert not self.unhandled

    def _run(self):
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as failure:  # noqa: BLE001 - raised again by the test's thread
            self.failure = failure
        finally:
            self._up.set()

    async def _serve(self):
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(lambda _, context: self.unhandled.append(context))
        clocks = {} if self.clock is None else {"clock": self.clock}
        self.service = Service(self.setup, **clocks)
        try:
            await self.service.open()
            self.port = getattr(self.service.sources[0], "port", 0)
            self._up.set()
            await self.service.run()
        finally:
            self.drained = await self.service.close(self.grace)

    def do(self, work):
        """Call *work* on the service's loop, and give what it gives."""

        async def call():
            found = work()
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(10)

    # --- what became of it -------------------------------------------------------------

    @property
    def counts(self):
        return self.do(self.service.counts)

    def buried(self) -> list[DeadLetter]:
        return self.do(lambda: self.setup.config.dead.opened.list(limit=10_000))

    def balance(self):
        """Check that each arrival has exactly one verdict; give the counts."""
        counts = self.counts
        assert counts["arrived"] == sum(counts[v.value] for v in Verdict) + counts["in_flight"]
        return counts

    # --- talking to it -----------------------------------------------------------------

    def ask(self, method, path=PATH, body=None, headers=(), *, timeout=10):
        began = time.monotonic()
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)) as line:
            line.putrequest(method, path, skip_accept_encoding=True)
            for name, value in dict(headers).items() if isinstance(headers, dict) else headers:
                line.putheader(name, value)
            if body is not None:
                line.putheader("Content-Length", str(len(body)))
            line.endheaders()
            with suppress(BrokenPipeError, ConnectionResetError):  # it may have heard enough
                line.send(body or b"")
            return _answer(line.getresponse(), began)

    def post(self, body, *, kind="application/json", **headers):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.ask("POST", body=body, headers={"Content-Type": kind, **named})

    def get(self, path):
        return self.ask("GET", path)

    def line(self, timeout=10):
        """Open a connection, for a client that does not speak as one should."""
        return closing(socket.create_connection(("127.0.0.1", self.port), timeout))

    def passes(self, number):
        """Tell whether a good event still gets through."""
        return self.post(event(number)).verdicts == ["delivered"]

    def until(self, truth, within=10.0):
        """Wait until *truth* holds."""
        ends = time.monotonic() + within
        while not truth():
            assert time.monotonic() < ends, "it did not come true"
            time.sleep(0.01)


def _answer(response, began):
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, headers, response.read(), time.monotonic() - began)


def read_answer(line):
    """Read one answer from a connection."""
    began = time.monotonic()
    response = http.client.HTTPResponse(line)
    try:
        response.begin()
        return _answer(response, began)
    finally:
        response.close()


def prepare(folder, sink=None, *, clock=None, **flags):
    """Make a service that is not started; *flags* are settings (`source__api_keys`)."""
    settings = {
        "source": f"http://127.0.0.1:0{PATH}",
        "store": f"sqlite:{folder}/seen.db",
        "dead": f"sqlite:{folder}/dead.db",
        "route": "desk",
        "share_counts": "false",  # some look at what the store is asked
        **{name.replace("__", "."): value for name, value in flags.items()},
    }
    sink = Desk() if sink is None else sink
    setup = config.load(None, environment={}, flags=settings)
    place = setup.config.store
    store = StorePlace(place.url, Watched(place.opened))
    setup = replace(setup, config=replace(setup.config, store=store))
    if isinstance(sink, Desk):
        setup = config.with_sink(setup, SinkPlace("python:desk:take", sink))
    return Live(setup, sink, clock)


@contextmanager
def live(folder, sink=None, **flags):
    """Run a service, and stop it as SIGTERM would."""
    running = prepare(folder, sink, **flags)
    running.start()
    try:
        yield running
    finally:
        if isinstance(running.sink, Desk):
            running.sink.let_go()
        running.stop()
