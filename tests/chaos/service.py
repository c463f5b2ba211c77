"""
The whole service under kill -9: `oncebridge run`, any source, any store, HTTP out.

The harness plays both ends. As the sender it brings every copy until it is acknowledged, to
any of the services, alone or in arrays (other ways in are in `feeds`); as the sink it writes
down what arrives and from whom (each process sends a header of its own). In between it kills
the services and starts them again on the same port, with the same store, and the same spool
where there is one.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic

from tests.servers.process import free_port

from oncebridge.dead_letters.sqlite import SQLiteDeadLetters
from oncebridge.http.client import Client, NotSent, Unclear
from oncebridge.http.server import Request, Response, Server

from .fleet import python_path
from .oracle import Delivery, History, Judgement, judge
from .stores import StoreHome, home_of
from .stream import Stream

_SENDERS = 48
_ARRAY = 8


@dataclass(frozen=True, kw_only=True)
class ServiceRun:
    """What is to happen."""

    seed: int
    store: str = "sqlite"
    """A kind that `stores.home_of` knows."""
    events: int = 3000
    duplicates: float = 0.3
    services: int = 2
    kills: int = 0
    terms: int = 0
    spool: bool = False
    feed: str = "http"
    """How events come in: `http`, or one of `feeds`."""
    refused: float = 0.01
    """How many sends the sink answers with 503, and does not take."""
    lease_s: float = 4.0
    sink_timeout_s: float = 2.5
    commit_budget_s: float = 1.0
    latency_s: float = 0.003
    limit_s: float = 600.0


@dataclass(frozen=True)
class ServiceReport:
    """What has happened."""

    run: ServiceRun
    judgement: Judgement
    kills: int
    terms: int
    copies: int
    posts: int
    seconds: float

    stops = crashes = cuts = 0

    @property
    def store(self) -> str:
        return self.run.store if self.run.feed == "http" else f"{self.run.store}, {self.run.feed}"

    @property
    def copies_per_s(self) -> float:
        return self.copies / self.seconds

    def told(self) -> str:
        j = self.judgement
        head = (
            f"{self.run}\nlost {j.lost}, extra {j.extra} {dict(j.excuses)}, "
            f"unexplained {j.unexplained}, {self.kills} kills, {self.terms} terms, "
            f"{self.posts} posts of {self.copies} copies, {self.seconds:.1f} s"
        )
        return "\n".join([head, *j.violations[:20]])


def run(plan: ServiceRun) -> ServiceReport:
    """Run to the end, clean up, and judge."""
    return asyncio.run(_run(plan))


async def _run(plan: ServiceRun) -> ServiceReport:
    folder = Path(tempfile.mkdtemp(prefix="oncebridge-service-chaos-"))
    try:
        with home_of(plan.store, folder) as home:
            if plan.feed == "http":
                return await Harness(plan, folder, home).run()
            from .feeds import FEEDS

            with FEEDS[plan.feed](plan, folder, home) as harness:
                return await harness.run()
    finally:
        shutil.rmtree(folder)


class Service:
    """One place in the fleet: a port, and the process that serves it now."""

    def __init__(self, place: int, folder: Path) -> None:
        self.place = place
        self.folder = folder
        self.port = free_port()
        self.incarnation = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.client = Client(f"http://127.0.0.1:{self.port}/events")
        self.is_up = False

    def start(
        self,
        incarnation: int,
        command: list[str],
        env: Mapping[str, str],
        program: str = "oncebridge",
    ) -> None:
        self.incarnation = incarnation
        with (self.folder / f"{incarnation}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", program, "run", *command],
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def until_up(self) -> None:
        assert self.process is not None
        while not self.is_up:
            if (code := self.process.poll()) is not None:
                raise RuntimeError(f"service {self.incarnation} ended with {code}: {self.said()}")
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                self.is_up = True

    def said(self) -> str:
        """Give the end of what it has logged."""
        return (self.folder / f"{self.incarnation}.log").read_text(errors="replace")[-2000:]


def environment_of(home: StoreHome) -> dict[str, str]:
    """Give what a service inherits: nothing that would set an option behind our back."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("ONCEBRIDGE_")}
    return {**inherited, "PYTHONPATH": python_path(), **home.environment}


class Harness:
    def __init__(self, plan: ServiceRun, folder: Path, home: StoreHome) -> None:
        self._plan = plan
        self._folder = folder
        self._home = home
        self._environment = environment_of(home)
        self._stream = Stream(plan.events, plan.duplicates, plan.seed)
        self._queue = deque(self._stream.copies)
        self._dice = Random(f"{plan.seed}/sender")
        self._sink_dice = Random(f"{plan.seed}/sink")
        self._killer_dice = Random(f"{plan.seed}/killer")
        self._history = History(plan.events, capacity=_SENDERS * _ARRAY)
        self._services = [Service(place, folder) for place in range(plan.services)]
        self._incarnations = 0
        self._acknowledged = 0
        self._posts = 0
        self._progress = asyncio.Condition()
        self._busy = 0

    async def run(self) -> ServiceReport:
        sink = Server(self._deliver, host="127.0.0.1", port=0)
        await sink.open()
        self._sink_port = sink.port
        began = monotonic()
        try:
            for service in self._services:
                self._start(service)
            try:
                async with asyncio.timeout(self._plan.limit_s):
                    await self._send_all()
                    if self._plan.spool:
                        await self._until_all_arrived()
            except TimeoutError:
                self._history.faults.append("stuck: not all copies were acknowledged in time")
            seconds = monotonic() - began
            for service in self._services:
                await self._leave(service)
        finally:
            for service in self._services:
                if service.process is not None and service.process.poll() is None:
                    service.process.kill()
                    service.process.wait()
                await service.client.aclose()
            await sink.aclose()
        await self._look_at_the_dead()
        history = self._history
        return ServiceReport(
            self._plan,
            judge(history),
            len(history.killed),
            history.terms,
            len(self._stream.copies),
            self._posts,
            seconds,
        )

    # --- the services ------------------------------------------------------------------

    def _start(self, service: Service) -> None:
        plan = self._plan
        self._incarnations += 1
        service.is_up = False
        command = [
            *self._source(service),
            *("--store", self._home.url, "--dead", "sqlite:dead.db"),
            *("--sink", f"http://127.0.0.1:{self._sink_port}/sink", "--log-level", "warning"),
            *("--set", f"sink.headers.x-worker={self._incarnations}"),
            *("--lease", f"{plan.lease_s}s", "--sink-timeout", f"{plan.sink_timeout_s}s"),
            *("--commit-budget", f"{plan.commit_budget_s}s", "--margin", "100ms"),
            *("--backoff", "50ms", "--max-backoff", "500ms"),
        ]
        for name, value in self._home.options.items():
            written = "true" if value is True else value
            command += ["--set", f"store.{name}={written}"]
        if plan.spool:
            command += ["--spool", f"spool-{service.place}.db"]
        service.start(self._incarnations, command, self._environment)

    def _source(self, service: Service) -> list[str]:
        """Say where events come from, and what is the same; it listens on its port."""
        return ["--source", f"http://127.0.0.1:{service.port}/events", "--preset", "genesys"]

    def _share(self) -> float:
        """Tell how much of the work is done."""
        return self._acknowledged / len(self._stream.copies)

    async def _strike(self) -> None:
        """Strike whenever enough of the work is done: progress decides, not time."""
        plan, dice = self._plan, self._killer_dice
        strikes = [*[self._kill] * plan.kills, *[self._term] * plan.terms]
        dice.shuffle(strikes)
        for moment in sorted(dice.uniform(0.02, 0.9) for _ in strikes):
            async with self._progress:
                await self._progress.wait_for(lambda moment=moment: self._share() >= moment)
            await asyncio.sleep(dice.uniform(0, 0.02))
            service = dice.choice(self._services)
            await service.until_up()
            await strikes.pop()(service)

    async def _kill(self, service: Service) -> None:
        service.process.kill()
        self._history.killed.add(service.incarnation)
        await asyncio.to_thread(service.process.wait)
        self._start(service)

    async def _term(self, service: Service) -> None:
        self._history.terms += 1
        await self._leave(service)
        self._start(service)

    async def _leave(self, service: Service) -> None:
        await service.until_up()
        service.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(service.process.wait, 60)
        if code:
            self._history.faults.append(
                f"service {service.incarnation} ended with {code}: {service.said()}"
            )

    # --- the sender --------------------------------------------------------------------

    async def _send_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            strikes = group.create_task(self._strike())
            senders = [group.create_task(self._sender()) for _ in range(_SENDERS)]
            await asyncio.wait(senders)
            await strikes  # on a slow machine some are still to come

    async def _sender(self) -> None:
        while self._queue or self._busy:
            if not self._queue:
                await asyncio.sleep(0.01)
                continue
            size = _ARRAY if self._dice.random() < 0.2 else 1
            copies = [self._queue.popleft() for _ in range(min(size, len(self._queue)))]
            self._busy += 1
            try:
                again, pause = await self._post(copies)
                if again:
                    await asyncio.sleep(pause)
                    self._queue.extend(again)
            finally:
                self._busy -= 1

    async def _post(self, copies):
        """Post, and give back what was not acknowledged."""
        service = self._dice.choice(self._services)
        incarnation = service.incarnation
        bodies = [self._stream.render(copy) for copy in copies]
        body = bodies[0] if len(bodies) == 1 else b"[" + b",".join(bodies) + b"]"
        self._posts += 1
        try:
            async with asyncio.timeout(6):
                answer = await service.client.post(body)
        except NotSent:
            return copies, 0.05
        except Unclear:
            return copies, 0.01
        except TimeoutError:
            self._history.faults.append("no answer within 6 s")
            return copies, 0.01
        told = json.loads(answer.body)
        results = told.get("results", [told])
        if len(results) != len(copies):
            self._history.faults.append(f"{len(results)} results for {len(copies)} events")
            return copies, 0.01
        if answer.status == 503 and int(answer.headers[b"retry-after"]) < 1:
            self._history.faults.append("a Retry-After that is not positive")
        again = []
        for copy, result in zip(copies, results, strict=True):
            if result["status"] in (200, 202):
                self._acknowledged += 1
                if result["status"] == 200:
                    self._history.settled[incarnation, copy.event].append(monotonic())
            else:
                again.append(copy)
        async with self._progress:
            self._progress.notify_all()
        return again, self._dice.uniform(0.05, 0.3)

    async def _until_all_arrived(self) -> None:
        """With a spool the acknowledgement comes first; the events follow."""
        seen: set[int] = set()
        at = 0
        while len(seen) < self._plan.events:
            seen.update(d.event for d in self._history.deliveries[at:])
            at = len(self._history.deliveries)
            await asyncio.sleep(0.05)

    # --- the sink ----------------------------------------------------------------------

    def _deliver(self, request: Request, respond) -> None:
        if self._sink_dice.random() < self._plan.refused:
            respond(Response(503))
            return
        incarnation = int(request.header(b"x-worker") or b"0")
        key = (request.header(b"idempotency-key") or b"").decode().strip('"')
        attempt = int(request.header(b"x-oncebridge-attempt") or b"1")
        event = self._recognise(request.body)
        if event is None:
            self._history.faults.append(f"other bytes than were sent, under key {key}")
            respond(Response(200))
            return
        now = monotonic()
        self._history.deliveries.append(Delivery(event, key, incarnation, attempt, now, now))

        def answer() -> None:
            if monotonic() - now > 0.8 * self._plan.sink_timeout_s:
                self._history.unclear.add((incarnation, key, attempt))
            respond(Response(200))

        asyncio.get_running_loop().call_later(self._plan.latency_s, answer)

    def _recognise(self, raw: bytes) -> int | None:
        return self._stream.recognise(raw)

    async def _look_at_the_dead(self) -> None:
        path = self._folder / "dead.db"
        if path.exists():
            dead = SQLiteDeadLetters(path)
            letters = await dead.list(limit=10)
            await dead.aclose()
            self._history.faults += [f"buried: {one.reason} {one.message}" for one in letters]
