"""
Real processes, really killed, and an oracle that knows every excuse.

The harness process holds the queue and the sink, which the workers reach over a unix
socket, starts the store's server, and signals its own children. A `Run` says what is to
happen; its seed decides the events, their order, the faults and after how much progress each of
them strikes.
Which instruction of which process a signal hits is up to the machine: a run with the
same seed is a similar run, not the same.
"""

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

from tests.servers.postgres import ask
from tests.stores.proxy import Fault, Proxy

from oncebridge.dead_letters.sqlite import SQLiteDeadLetters

from .fleet import Fleet
from .oracle import Delivery, History, Judgement, judge, judge_shadow
from .sqs import Queue
from .stores import SinkHome, StoreHome, by_a_wire, home_of
from .stream import Stream
from .wire import GONE, read_frame, write_frame
from .worker import Job

_LONG_POLL_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is to happen."""

    seed: int
    kind: str = "worker"
    """`worker`, or a control: `controls:mark-before`, `controls:mark-after`."""
    store: str = "sqlite"
    """A kind that `stores.home_of` knows."""
    sink: str = ""
    """
    A table in the store's own database instead of the harness: `table`, which is the sink's own,
    or `statement`, which fills one without any index.
    """
    apart: bool = False
    """Deliver and commit in two steps, where the sink would do it in one: a control."""
    shadow: bool = False
    """Deliver every message, and only count what would have been dropped."""
    fails_open: bool = False
    """Deliver without a claim while the store is down."""
    events: int = 5000
    duplicates: float = 0.3
    workers: int = 4
    kills: int = 0
    stops: int = 0
    terms: int = 0
    crashes: int = 0
    """How often the store's server gets SIGKILL, and is started again."""
    cuts: int = 0
    """How often the wire to the store is struck for a while, by any of the proxy's faults."""
    refused: float = 0.01
    """How many sends the sink does not take."""
    unclear: float = 0.0
    """How many sends the sink takes, and hangs up instead of saying so."""
    early: float = 0.01
    """How many messages the queue hands out twice at once."""
    lease_s: float = 2.0
    sink_timeout_s: float = 1.0
    commit_budget_s: float = 0.5
    margin_s: float = 0.1
    visibility_s: float = 2.5
    latency_s: float = 0.002
    """To the sink and back, each."""
    pollers: int = 2
    receive: int = 25
    limit_s: float = 600.0
    """After this the run counts as stuck."""

    @property
    def is_control(self) -> bool:
        """Something is to be found."""
        return self.kind != "worker" or self.apart


@dataclass(frozen=True)
class Report:
    """What has happened."""

    run: Run
    emulator: str
    judgement: Judgement
    kills: int
    stops: int
    terms: int
    crashes: int
    cuts: int
    copies: int
    receives: int
    unprotected: int
    """Deliveries without a claim, because the store was down."""
    seconds: float

    @property
    def store(self) -> str:
        return f"{self.run.store} ({self.emulator})" if self.emulator else self.run.store

    @property
    def copies_per_s(self) -> float:
        return self.copies / self.seconds

    def told(self) -> str:
        """Tell the story of the run, for a failed assertion."""
        j = self.judgement
        head = (
            f"{self.run}\nlost {j.lost}, extra {j.extra} {dict(j.excuses)}, "
            f"unexplained {j.unexplained}, {self.kills} kills, {self.stops} stops, "
            f"{self.terms} terms, {self.crashes} crashes of the store, {self.cuts} cuts, "
            f"{self.receives} receives of {self.copies} copies, {self.seconds:.1f} s"
        )
        return "\n".join([head, *j.violations[:20]])


def run(plan: Run) -> Report:
    """Run to the end, clean up, and judge."""
    return asyncio.run(_run(plan))


async def _run(plan: Run) -> Report:
    folder = Path(tempfile.mkdtemp(prefix="oncebridge-chaos-"))
    try:
        with ExitStack() as stack:
            home, wire = stack.enter_context(home_of(plan.store, folder)), None
            if plan.cuts:
                home, wire = stack.enter_context(by_a_wire(home))
            return await Harness(plan, folder, home, wire).run()
    finally:
        shutil.rmtree(folder)


class Harness:
    def __init__(self, plan: Run, folder: Path, home: StoreHome, wire: Proxy | None = None) -> None:
        self._plan = plan
        self._folder = folder
        self._home = home
        self._wire = wire
        self._cuts = 0
        self._stream = Stream(plan.events, plan.duplicates, plan.seed)
        self._copies = self._stream.copies
        self._queue = Queue(
            len(self._copies),
            visibility_s=plan.visibility_s,
            early=plan.early,
            dice=Random(f"{plan.seed}/queue"),
        )
        self._sink = home.sinks[plan.sink] if plan.sink else None
        self._history = History(
            plan.events, capacity=plan.pollers * plan.receive, exactly_once=bool(plan.sink)
        )
        self._sink_dice = Random(f"{plan.seed}/sink")
        self._killer_dice = Random(f"{plan.seed}/killer")
        self._fleet = Fleet(
            size=plan.workers,
            kind=plan.kind,
            job_for=self._job,
            folder=folder,
            environment=home.environment,
            history=self._history,
            dice=self._killer_dice,
        )
        self._received: Counter[int] = Counter()
        """By event: how often a message of it was handed out."""
        self._in_hand: Counter[tuple[int, int]] = Counter()
        """By incarnation and event: messages received and neither deleted nor handed back."""
        self._talks: set[asyncio.Task[Any]] = set()

    async def run(self) -> Report:
        server = await asyncio.start_unix_server(self._talk, self._folder / "socket")
        began = monotonic()
        try:
            if self._sink is not None:
                await ask(self._sink.url, self._sink.prepare)
            self._fleet.start()
            seconds = await self._until_drained(began)
            await self._fleet.finish()
        finally:
            await self._fleet.aclose()
            server.close()
            await self._hang_up()
        await self._look_at_the_dead()
        if self._sink is not None:
            await self._look_at_the_table(self._sink)
        return Report(
            self._plan,
            self._home.emulator,
            self._judged(),
            len(self._history.killed),
            self._history.stopped,
            self._history.terms,
            self._history.crashes,
            self._cuts,
            len(self._copies),
            self._queue.receives,
            sum(delivery.unprotected for delivery in self._history.deliveries),
            seconds,
        )

    def _judged(self) -> Judgement:
        if not self._plan.shadow:
            return judge(self._history)
        return judge_shadow(
            self._history, Counter(copy.event for copy in self._copies), self._received
        )

    async def _until_drained(self, began: float) -> float:
        """Let the faults strike until all messages are gone; tell how long it took."""
        try:
            async with asyncio.timeout(self._plan.limit_s), asyncio.TaskGroup() as group:
                watch = group.create_task(self._fleet.watch())
                await self._strike()
                await self._queue.until_deleted(len(self._copies))
                watch.cancel()
        except TimeoutError:
            self._history.faults.append(f"stuck: {self._queue.left} messages are still there")
        return monotonic() - began

    async def _strike(self) -> None:
        """
        Strike whenever enough of the work is done.

        Progress decides, not time: so all strikes fall while there is work in hand, on a
        fast machine as on a slow one.
        """
        plan, dice = self._plan, self._killer_dice
        strikes: list[Callable[[], Awaitable[None]]] = [
            *[self._fleet.kill] * plan.kills,
            *[lambda: self._fleet.stop(1.7 * plan.lease_s)] * plan.stops,
            *[self._fleet.term] * plan.terms,
            *[self._crash] * plan.crashes,
            *[self._cut] * plan.cuts,
        ]
        dice.shuffle(strikes)
        moments = sorted(dice.uniform(0.01, 0.9) for _ in strikes)
        for moment, strike in zip(moments, strikes, strict=True):
            await self._queue.until_deleted(int(moment * len(self._copies)))
            # Somewhat later: not always just after somebody's delete.
            await asyncio.sleep(dice.uniform(0, 0.02))
            await strike()

    async def _crash(self) -> None:
        """Kill the store's server, and start it again: at once, or when leases have run out."""
        await asyncio.to_thread(self._home.kill)
        self._history.crashes += 1
        if not self._home.remembers:
            self._history.losses.append(monotonic())
        if self._killer_dice.random() < 0.3:
            await asyncio.sleep(self._killer_dice.uniform(0, 1.5 * self._plan.lease_s))
        await asyncio.to_thread(self._home.start)

    async def _cut(self) -> None:
        """Let a fault strike everything on the wire to the store, for up to a lease or so."""
        assert self._wire is not None
        self._wire.strike(self._killer_dice.choice(list(Fault)))
        self._cuts += 1
        await asyncio.sleep(self._killer_dice.uniform(0.1, 1.2) * self._plan.lease_s)
        self._wire.heal()

    def _job(self, incarnation: int) -> Job:
        plan = self._plan
        one_by_one = incarnation % 2
        return Job(
            incarnation=incarnation,
            socket=str(self._folder / "socket"),
            store=self._home.url,
            options=dict(self._home.options),
            dead=str(self._folder / "dead.db"),
            **self._sink_of_job(),
            shadow=plan.shadow,
            fails_open=plan.fails_open,
            lease_s=plan.lease_s,
            sink_timeout_s=plan.sink_timeout_s,
            commit_budget_s=plan.commit_budget_s,
            margin_s=plan.margin_s,
            latency_s=plan.latency_s,
            pollers=plan.pollers,
            receive=plan.receive,
            sink_batch=1 if one_by_one else 4,
            sink_concurrency=8 if one_by_one else 3,
        )

    def _sink_of_job(self) -> dict[str, Any]:
        if self._sink is None:
            return {"sink": "", "sink_options": {}, "apart": False}
        apart = self._plan.apart
        options = {**self._sink.options, "exactly_once": not apart}
        return {"sink": self._sink.url, "sink_options": options, "apart": apart}

    # --- talking with workers ----------------------------------------------------------

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        try:
            await self._answer(reader, writer)
        except (*GONE, asyncio.CancelledError):
            pass  # a worker that was killed takes the connection with it
        except Exception as error:  # noqa: BLE001 - a fault of the harness fails the run too
            self._history.faults.append(f"harness: {error!r}")
        finally:
            writer.close()
            self._talks.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, incarnation = await read_frame(reader)
        while True:
            op, *arguments = await read_frame(reader)
            answer = getattr(self, f"_on_{op}")(incarnation, *arguments)
            if isinstance(answer, Awaitable):
                write_frame(writer, await answer)
                await writer.drain()

    async def _hang_up(self) -> None:
        """End the talks with workers that are gone; what they still said has been heard."""
        if self._talks:
            _, talking = await asyncio.wait(self._talks, timeout=5)
            for task in talking:
                task.cancel()
            await asyncio.gather(*talking, return_exceptions=True)

    async def _on_receive(self, incarnation: int, most: int) -> list[tuple[int, bytes]]:
        self._fleet.mark_ready(incarnation)
        ends = monotonic() + _LONG_POLL_S
        while not (numbers := self._queue.receive(most)) and monotonic() < ends:  # noqa: ASYNC110 - messages become visible by themselves
            await asyncio.sleep(0.01)
        for number in numbers:
            event = self._copies[number].event
            self._in_hand[incarnation, event] += 1
            self._received[event] += 1
        return [(number, self._stream.render(self._copies[number])) for number in numbers]

    async def _on_delete(self, incarnation: int, numbers: list[int]) -> None:
        for number in numbers:
            self._let_go(incarnation, number, acknowledged=True)
        self._queue.delete(numbers)

    async def _on_later(self, incarnation: int, delays: list[tuple[int, float]]) -> None:
        for number, delay_s in delays:
            self._let_go(incarnation, number, acknowledged=False)
            self._queue.change_visibility(number, delay_s)

    def _let_go(self, incarnation: int, number: int, *, acknowledged: bool) -> None:
        event = self._copies[number].event
        self._in_hand[incarnation, event] -= 1
        # Another copy of it may have been found busy while this process was sending the first.
        if acknowledged or not self._in_hand[incarnation, event]:
            self._history.settled[incarnation, event].append(monotonic())

    async def _on_deliver(
        self, incarnation: int, items: list[tuple[str, int, float, bytes, bool]]
    ) -> list[str]:
        """Take most of it, and say so after a while: a kill often falls in between."""
        answers = []
        hangs_up = self._sink_dice.random() < self._plan.unclear
        for key, attempt, claimed_at, raw, unprotected in items:
            if self._sink_dice.random() < self._plan.refused:
                answers.append("no")
                continue
            self._record(incarnation, key, attempt, claimed_at, raw, unprotected=unprotected)
            answers.append("yes")
            if hangs_up:
                self._history.unclear.add((incarnation, key, attempt))
        await asyncio.sleep(self._plan.latency_s)
        if hangs_up:
            raise ConnectionResetError
        return answers

    def _record(
        self,
        incarnation: int,
        key: str,
        attempt: int,
        claimed_at: float,
        raw: bytes,
        *,
        unprotected: bool = False,
    ) -> None:
        event = self._stream.recognise(raw)
        if event is None:
            self._history.faults.append(f"other bytes than were sent, under key {key}")
            return
        self._history.deliveries.append(
            Delivery(event, key, incarnation, attempt, claimed_at, monotonic(), unprotected)
        )

    def _on_unclear(self, incarnation: int, sends: list[tuple[str, int]]) -> None:
        self._history.unclear.update((incarnation, key, attempt) for key, attempt in sends)

    def _on_late(self, incarnation: int, commits: list[tuple[str, int]]) -> None:
        self._history.late.update((incarnation, key, attempt) for key, attempt in commits)

    def _on_in_time(self, incarnation: int, commits: list[tuple[str, int]]) -> None:
        self._history.late.difference_update((incarnation, key, n) for key, n in commits)

    def _on_bye(self, incarnation: int, drained: bool, balanced: bool) -> None:  # noqa: FBT001
        if not drained:
            self._history.faults.append(f"worker {incarnation} left work undone")
        if not balanced:
            self._history.faults.append(f"the books of worker {incarnation} do not balance")

    async def _look_at_the_dead(self) -> None:
        """Nothing here can never succeed, so nothing belongs into the dead letters."""
        path = self._folder / "dead.db"
        if not path.exists():
            return
        dead = SQLiteDeadLetters(path)
        letters = await dead.list(limit=10)
        await dead.aclose()
        self._history.faults += [f"buried: {letter.reason} {letter.message}" for letter in letters]

    async def _look_at_the_table(self, sink: SinkHome) -> None:
        """Take each row for a delivery; nobody has to know when it was, and whose."""
        for key, raw in await ask(sink.url, sink.rows):
            self._record(0, key.hex(), 0, 0.0, raw)
