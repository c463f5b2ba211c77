"""
One service at a steady rate for a long time: does anything grow, and do the counts add up?

Two processes share a store and the traffic. One of them lives from the start to the end, and is
measured; the other is killed every few minutes. The window is short, so that what comes in and
what ends soon keep the balance, and a store has no reason to grow any more. Every repeat comes
within the window of its event.

What has been acknowledged is judged by the minute, by the oracle of the other runs, and then
forgotten here: a long run takes no more memory than a short one.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

from tests.servers.process import free_port

from oncebridge.dead_letters.sqlite import SQLiteDeadLetters
from oncebridge.http.client import Client, NotSent, Unclear
from oncebridge.http.server import Request, Response, Server

from . import sizes
from .oracle import Delivery, History, judge
from .service import Service, environment_of
from .stores import StoreHome
from .stream import Copy, Stream

_SENDERS = 64
_ANSWER_S = 30.0
_SETTLE_S = 20.0
"""How long after its last acknowledgement an event is looked out for."""
_BEHIND_S = 2.0
_MINUTE_S = 60.0
_BURST = 32
_FULL = 10
"""After so many bursts of which nothing was taken, it is full."""
_VITALS_S = 12.0
"""After so long a service has looked at its store again."""
_LEASE_S, _SINK_TIMEOUT_S, _COMMIT_BUDGET_S = 15.0, 10.0, 4.0


@dataclass(frozen=True, kw_only=True)
class SteadyRun:
    """What is to happen."""

    seed: int
    store: str
    seconds: float
    rate: float = 200.0
    """Arrivals a second, repeats among them."""
    repeats: float = 0.3
    """How many of the arrivals are repeats."""
    window_s: float = 180.0
    kill_every_s: float = 120.0
    """0 for never; then there is one process only."""
    max_keys: int = 0
    """The cap of a store in memory; when the time is over, more than that is sent."""
    sample_s: float = 5.0
    latency_s: float = 0.003
    program: str = "oncebridge"
    """The module to run; a control has its own."""

    @property
    def copies(self) -> int:
        return int(self.seconds * self.rate)

    @property
    def new_per_s(self) -> float:
        return self.rate * (1 - self.repeats)


@dataclass
class SteadyReport:
    """What has happened."""

    run: SteadyRun
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    events: int = 0
    arrivals: int = 0
    lost: int = 0
    extra: int = 0
    unexplained: int = 0
    excuses: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    minutes: int = 0
    """How often the counts were compared."""
    refused_at_cap: int = 0
    kept_at_cap: int = 0
    """How many keys there were when more had come than there was room for."""
    brought: int = 0
    """How many copies were brought in time; fewer than asked, where the machine is too slow."""
    faults: list[str] = field(default_factory=list)

    def note(self, at: float, measured: Mapping[str, float]) -> None:
        for name, value in measured.items():
            self.series.setdefault(name, []).append((at, value))


class Steady:
    """Feed a service for as long as *plan* says, look on, and *tell* of it every minute."""

    def __init__(
        self,
        plan: SteadyRun,
        folder: Path,
        home: StoreHome,
        tell: Callable[[SteadyReport], None] = lambda _: None,
    ) -> None:
        self._plan = plan
        self._tell = tell
        self._home = home
        self._folder = folder
        self._stream = Stream(0, 0, plan.seed)
        self._dice = Random(f"{plan.seed}/{plan.store}/steady")
        self._services = [Service(place, folder) for place in range(2 if plan.kill_every_s else 1)]
        self._doors = [f"http://127.0.0.1:{free_port()}" for _ in self._services]
        """Where each of them tells its numbers."""
        self._asking = Client(self._doors[0], max_answer=1 << 20)
        self._environment = environment_of(home)
        self._incarnations = 0
        self._numbers = count()
        self._waiting: asyncio.Queue[Copy] = asyncio.Queue()
        self._to_repeat: list[tuple[float, Copy]] = []
        self._open: dict[int, int] = {}
        """By event: how many of its copies nobody has acknowledged yet."""
        self._closed: deque[tuple[float, int]] = deque()
        self._history = History(0, capacity=_SENDERS)
        self._seen: dict[int, float] = {}
        """When events first arrived, of those that are not judged yet."""
        self._latest: deque[int] = deque(maxlen=500)
        """What was judged last."""
        self._answered: Counter[int] = Counter()
        """By incarnation."""
        self._under_way: Counter[int] = Counter()
        self.report = SteadyReport(plan)

    async def run(self) -> SteadyReport:
        sink = Server(self._deliver, host="127.0.0.1", port=0)
        await sink.open()
        self._sink_port = sink.port
        try:
            for service in self._services:
                self._start(service)
            async with asyncio.timeout(60):
                for service in self._services:
                    await service.until_up()
            await self._live()
            for service in self._services:
                await self._leave(service)
        except Exception as error:  # noqa: BLE001 - it ends this run, and not those beside it
            self.report.faults.append(f"broken off: {error!r}")
            print(f"{self._plan.store}: broken off: {error!r}", flush=True)
        finally:
            for service in self._services:
                if service.process is not None and service.process.poll() is None:
                    service.process.kill()
                    service.process.wait()
                await service.client.aclose()
            await self._asking.aclose()
            await sink.aclose()
        await self._look_at_the_dead()
        return self.report

    async def _live(self) -> None:
        self._began = monotonic()
        self._ends = self._began + self._plan.seconds
        senders = [asyncio.create_task(self._sender()) for _ in range(_SENDERS)]
        others = [asyncio.create_task(work()) for work in (self._sample, self._balance, self._kill)]
        others.append(asyncio.create_task(self._feed()))
        try:
            await asyncio.gather(*others)
            await self._until_drained()
            if self._plan.max_keys:
                await self._overfill()
        finally:
            for task in (*senders, *others):
                task.cancel()
            await asyncio.gather(*senders, *others, return_exceptions=True)

    def _left(self) -> float:
        return self._ends - monotonic()

    # --- the services ------------------------------------------------------------------

    def _start(self, service: Service) -> None:
        plan = self._plan
        self._incarnations += 1
        service.is_up = False
        window = f"{plan.window_s:g}s"
        options: dict[str, Any] = {**self._home.options}
        if plan.max_keys:
            options["max_keys"] = plan.max_keys
        command = [
            *("--source", f"http://127.0.0.1:{service.port}/events", "--preset", "genesys"),
            *("--store", self._home.url, "--dead", "sqlite:dead.db"),
            *("--sink", f"http://127.0.0.1:{self._sink_port}/sink"),
            *("--set", f"sink.headers.x-worker={self._incarnations}"),
            *("--window", window, "--history", "sample", "--history-keep", window),
            *("--metrics", self._doors[service.place]),
            *("--log-level", "warning", "--lease", f"{_LEASE_S}s"),
            *("--sink-timeout", f"{_SINK_TIMEOUT_S}s", "--commit-budget", f"{_COMMIT_BUDGET_S}s"),
        ]
        for name, value in options.items():
            command += ["--set", f"store.{name}={'true' if value is True else value}"]
        service.start(self._incarnations, command, self._environment, plan.program)

    async def _kill(self) -> None:
        """Kill the last one again and again; the first one is there to be measured."""
        plan, service = self._plan, self._services[-1]
        while plan.kill_every_s and self._left() > plan.kill_every_s:
            await asyncio.sleep(plan.kill_every_s)
            await service.until_up()
            service.process.kill()
            self._history.killed.add(service.incarnation)
            self.report.kills += 1
            await asyncio.to_thread(service.process.wait)
            self._start(service)

    async def _leave(self, service: Service) -> None:
        await service.until_up()
        service.process.terminate()
        if code := await asyncio.to_thread(service.process.wait, 60):
            told = f"service {service.incarnation} ended with {code}: {service.said()}"
            self.report.faults.append(told)

    # --- the sender --------------------------------------------------------------------

    async def _feed(self) -> None:
        """Bring as many as are due, whatever became of those before, but never a long queue."""
        due = 0
        while self._left() > 0:
            now = monotonic()
            before, due = due, int((now - self._began) * self._plan.rate)
            room = int(_BEHIND_S * self._plan.rate) - self._waiting.qsize()
            for _ in range(min(due - before, room)):
                self._waiting.put_nowait(self._next(now))
                self.report.brought += 1
            await asyncio.sleep(0.01)

    def _next(self, now: float) -> Copy:
        """Give a repeat that is due, or else a new event, which may get a repeat."""
        if self._to_repeat and self._to_repeat[0][0] <= now:
            return heappop(self._to_repeat)[1]
        return self._born(now, self._plan.repeats / (1 - self._plan.repeats))

    def _born(self, now: float, repeats: float) -> Copy:
        dice = self._dice
        copy = Copy(next(self._numbers), 0)
        self._open[copy.event] = 1
        self.report.events += 1
        if dice.random() < repeats:
            self._open[copy.event] = 2
            most_s = 0.3 if dice.random() < 0.7 else self._plan.window_s / 3
            again = Copy(copy.event, dice.randrange(6))
            heappush(self._to_repeat, (now + dice.uniform(0, most_s), again))
        return copy

    async def _sender(self) -> None:
        while True:
            copy = await self._waiting.get()
            if self._is_out_of_time(copy.event):
                self._acknowledge(copy.event, 0)
            elif pause_s := await self._post(copy):
                asyncio.get_running_loop().call_later(pause_s, self._waiting.put_nowait, copy)

    def _is_out_of_time(self, event: int) -> bool:
        """Tell whether the window of *event* may soon be over: nobody is to see a repeat then."""
        came = self._seen.get(event)
        return came is not None and monotonic() - came > self._plan.window_s / 2

    async def _post(self, copy: Copy) -> float:
        """Bring it to one of the services; tell how long to wait, if it was not taken."""
        service = self._dice.choice(self._services)
        incarnation = service.incarnation
        self.report.arrivals += 1
        self._under_way[incarnation] += 1
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await service.client.post(self._stream.render(copy))
        except (NotSent, Unclear):
            return 0.1
        except TimeoutError:
            self.report.faults.append(f"no answer within {_ANSWER_S:.0f} s")
            return 0.1
        finally:
            self._under_way[incarnation] -= 1
        self._answered[incarnation] += 1
        if answer.status != 200:
            return self._dice.uniform(0.2, 1.0)
        self._acknowledge(copy.event, incarnation)
        return 0.0

    def _acknowledge(self, event: int, incarnation: int) -> None:
        now = monotonic()
        self._history.settled[incarnation, event].append(now)
        if event not in self._open:
            return  # a repeat of what was judged before
        self._open[event] -= 1
        if self._open[event] == 0:
            self._closed.append((now, event))

    async def _until_drained(self) -> None:
        """Bring what is still to be repeated, and wait until all is acknowledged."""
        for _, copy in self._to_repeat:
            self._waiting.put_nowait(copy)
        self._to_repeat.clear()
        ends = monotonic() + 120
        while any(self._open.values()) and monotonic() < ends:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if left := sum(map(bool, self._open.values())):
            self.report.faults.append(f"{left} events were never acknowledged")
        self._judge(monotonic())

    async def _overfill(self) -> None:
        """Bring more than there is room for: it has to be refused, and nothing be forgotten."""
        plan, report = self._plan, self.report
        known, in_a_row = list(self._latest), 0
        for _ in range(plan.max_keys // _BURST):
            copies = [self._born(monotonic(), 0) for _ in range(_BURST)]
            refused = sum(map(bool, await asyncio.gather(*map(self._post, copies))))
            report.refused_at_cap += refused
            in_a_row = in_a_row + 1 if refused == _BURST else 0
            if in_a_row == _FULL:
                break
        # Whatever is sent on of these has been judged before, and counts as a fault.
        await asyncio.gather(*(self._post(Copy(event, 1)) for event in known))
        await asyncio.sleep(_VITALS_S)
        report.kept_at_cap = (await self._told()).total("store_records")

    # --- the sink ----------------------------------------------------------------------

    def _deliver(self, request: Request, respond: Any) -> None:
        incarnation = int(request.header(b"x-worker") or b"0")
        key = (request.header(b"idempotency-key") or b"").decode().strip('"')
        attempt = int(request.header(b"x-oncebridge-attempt") or b"1")
        event = self._stream.recognise(request.body)
        now = monotonic()
        if event is None:
            self.report.faults.append(f"other bytes than were sent, under key {key}")
        elif event not in self._open:
            self.report.faults.append(f"event {event} came again when all was over")
        else:
            self._seen.setdefault(event, now)
            self._history.deliveries.append(Delivery(event, key, incarnation, attempt, now, now))

        def answer() -> None:
            if monotonic() - now > 0.8 * _SINK_TIMEOUT_S:
                self._history.unclear.add((incarnation, key, attempt))
            respond(Response(200))

        asyncio.get_running_loop().call_later(self._plan.latency_s, answer)

    # --- looking on --------------------------------------------------------------------

    async def _sample(self) -> None:
        plan, service = self._plan, self._services[0]
        while self._left() > 0:
            at = monotonic() - self._began
            self.report.note(at, sizes.of_process(service.process.pid))
            self.report.note(at, await sizes.of_store(plan.store, self._home.url))
            if plan.store == "memory":
                told = await self._told()
                self.report.note(at, {"keys": told.total("store_records")})
            await asyncio.sleep(plan.sample_s)

    async def _balance(self) -> None:
        """Compare counts every minute: theirs with themselves, and with what we have seen."""
        while self._left() > 0:
            await asyncio.sleep(min(_MINUTE_S, max(self._left(), 0)))
            self._judge(monotonic() - _SETTLE_S)
            self.report.minutes += 1
            await self._compare()
            self._tell(self.report)

    async def _compare(self) -> None:
        incarnation = self._services[0].incarnation
        least = self._answered[incarnation]
        told = await self._told()
        most = self._answered[incarnation] + self._under_way[incarnation]
        arrivals, verdicts = told.total("arrivals_total"), told.total("verdicts_total")
        # What was under way when it was asked may have ended before it answered.
        if not (least <= arrivals <= most + _SENDERS):
            self.report.faults.append(f"{arrivals} arrivals counted, {least} to {most} sent")
        if not told.is_balanced or arrivals != verdicts + told.total("in_flight"):
            self.report.faults.append(
                f"{arrivals} arrivals, {verdicts} verdicts, {told.total('in_flight')} in flight"
            )

    async def _told(self) -> sizes.Told:
        """Ask the first one for its numbers, again where a connection had just been closed."""
        for _ in range(5):
            try:
                answer = await self._asking.request("GET", "/metrics")
            except (NotSent, Unclear):
                await asyncio.sleep(0.2)
            else:
                return sizes.Told(answer.body.decode())
        raise RuntimeError("it tells no numbers any more")

    def _judge(self, until: float) -> None:
        """Judge what was closed before *until*, and forget it."""
        over: set[int] = set()
        while self._closed and self._closed[0][0] <= until:
            over.add(self._closed.popleft()[1])
        mine, history = History(0, capacity=_SENDERS), self._history
        mine.killed, mine.unclear = history.killed, history.unclear
        mine.deliveries = [one for one in history.deliveries if one.event in over]
        history.deliveries = [one for one in history.deliveries if one.event not in over]
        for who, event in [pair for pair in history.settled if pair[1] in over]:
            mine.settled[who, event] = history.settled.pop((who, event))
        judged = judge(mine)
        report = self.report
        report.lost += len(over - self._seen.keys())
        report.extra += judged.extra
        report.unexplained += judged.unexplained
        report.excuses += judged.excuses
        report.faults += judged.violations
        self._latest.extend(sorted(over))
        for event in over:
            del self._open[event]
            self._seen.pop(event, None)

    async def _look_at_the_dead(self) -> None:
        path = self._folder / "dead.db"
        if path.exists():
            dead = SQLiteDeadLetters(path)
            letters = await dead.list(limit=10)
            await dead.aclose()
            self.report.faults += [f"buried: {one.reason} {one.message}" for one in letters]
