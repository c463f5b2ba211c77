"""
A queue, two workers and a sink around one store, to see what an outage of it costs.

The queue is in the manner of SQS: what is not deleted comes again, and every receive counts.
The store is looked at through `Watched`, which knows for each delivery whether its commit was
recorded while its claim lasted. Where it was not, another delivery is excused; else not.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random
from typing import Any, NamedTuple, Self

from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.engine.gateway import Gateway
from oncebridge.engine.settings import Settings
from oncebridge.sinks.api import Delivery, SinkAnswer, Yes
from oncebridge.stores.api import (
    Claim,
    ClaimAnswers,
    Commits,
    Extensions,
    Reply,
    Wants,
)

LEASE_S = 4.0
SETTINGS = Settings(
    lease=timedelta(seconds=LEASE_S),
    sink_timeout=timedelta(seconds=0.5),
    commit_budget=timedelta(seconds=2),
    margin=timedelta(seconds=0.5),
    backoff=timedelta(milliseconds=50),
    max_backoff=timedelta(milliseconds=500),
    breaker=2,
)
_VISIBILITY_S = 20.0
RECEIVE = 10
_POLLERS = 2


def event(number: int) -> bytes:
    envelope = {
        "version": "0",
        "id": f"3c9e1f70-0000-4000-8000-{number:012d}",
        "detail-type": "Parcel Weighed",
        "source": "com.example.depot",
        "detail": {"parcel": number},
    }
    return json.dumps(envelope).encode()


class Queue:
    """*events* events and some repeats of them; each copy stays until it is deleted."""

    def __init__(self, events: int, *, repeats: float, seed: int) -> None:
        dice = Random(seed)
        numbers = [*range(events), *(dice.randrange(events) for _ in range(int(events * repeats)))]
        dice.shuffle(numbers)
        self.copies = numbers
        self.receives: list[tuple[float, int]] = []
        """When, and which copy."""
        self.deleted = 0
        self._visible_at = dict.fromkeys(range(len(numbers)), 0.0)
        self._moved = asyncio.Condition()

    def receive(self) -> list[int]:
        now = _now()
        due = (copy for copy, at in self._visible_at.items() if at <= now)
        taken = [copy for copy, _ in zip(due, range(RECEIVE), strict=False)]
        for copy in taken:
            self._visible_at[copy] = now + _VISIBILITY_S
            self.receives.append((now, copy))
        return taken

    async def delete(self, copies: Sequence[int]) -> None:
        for copy in copies:
            self._visible_at.pop(copy, None)
        async with self._moved:
            self.deleted = len(self.copies) - len(self._visible_at)
            self._moved.notify_all()

    def bring_later(self, copy: int, seconds: float) -> None:
        if copy in self._visible_at:
            self._visible_at[copy] = _now() + seconds

    async def until(self, share: float) -> None:
        """Wait until so much of it is deleted."""
        async with self._moved:
            await self._moved.wait_for(lambda: self.deleted >= share * len(self.copies))

    @property
    def is_empty(self) -> bool:
        return not self._visible_at


class Delivered(NamedTuple):
    number: int
    key: bytes
    attempt: int
    worker: int


class Notes:
    """What an onlooker knows of all workers' claims and commits."""

    def __init__(self) -> None:
        self._attempts: dict[tuple[int, bytes], int] = {}
        self._ends: dict[tuple[int, bytes, int], float] = {}
        self._committed: dict[bytes, float] = {}

    def claimed(self, worker: int, claim: Claim, began: float) -> None:
        for held in claim.held:
            self._attempts[worker, held.key] = held.attempts
            self._ends[worker, held.key, held.attempts] = began + LEASE_S

    def extended(self, worker: int, key: bytes, began: float) -> None:
        self._ends[worker, key, self._attempts[worker, key]] = began + LEASE_S

    def committed(self, key: bytes) -> None:
        self._committed.setdefault(key, _now())

    def was_late(self, delivered: Delivered) -> bool:
        """Tell whether the commit was not recorded while the claim of this delivery lasted."""
        ends = self._ends[delivered.worker, delivered.key, delivered.attempt]
        return self._committed.get(delivered.key, float("inf")) > ends


class Sink:
    """Takes everything, after a moment."""

    batch = 1
    concurrency = 20

    def __init__(self, worker: int, taken: list[Delivered]) -> None:
        self._worker = worker
        self._taken = taken

    async def open(self) -> None: ...

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        await asyncio.sleep(0.002)
        for delivery in deliveries:
            number = json.loads(delivery.event.raw)["detail"]["parcel"]
            assert delivery.event.raw == event(number)
            self._taken.append(Delivered(number, delivery.key, delivery.attempt, self._worker))
        await asyncio.sleep(0.002)
        return [Yes()] * len(deliveries)

    async def aclose(self) -> None: ...


class Watched:
    """A store, and somebody who takes notes."""

    def __init__(self, store: Any, worker: int, notes: Notes) -> None:
        self._store = store
        self._worker = worker
        self._notes = notes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def claim(self, wants: Wants) -> ClaimAnswers:
        began = _now()
        answers = await self._store.claim(wants)
        for answer in answers:
            if isinstance(answer, Claim):
                self._notes.claimed(self._worker, answer, began)
        return answers

    async def extend(self, extensions: Extensions) -> Any:
        began = _now()
        answers = await self._store.extend(extensions)
        for asked, answer in zip(extensions, answers, strict=True):
            if answer is Reply.EXTENDED:
                self._notes.extended(self._worker, asked.key, began)
        return answers

    async def commit(self, commits: Commits) -> Any:
        answers = await self._store.commit(commits)
        for asked, answer in zip(commits, answers, strict=True):
            if answer in (Reply.COMMITTED, Reply.ALREADY):
                self._notes.committed(asked.key)
        return answers


class Worker:
    """A gateway with a handle of its own on the store, and those who poll the queue for it."""

    def __init__(self, store: Any, sink: Sink, queue: Queue) -> None:
        self.dead = MemoryDeadLetters()
        self._queue = queue
        self.gateway = Gateway(store=store, sink=sink, dead=self.dead, settings=SETTINGS)

    async def run(self) -> None:
        await asyncio.gather(*(self._poll() for _ in range(_POLLERS)))

    async def take(self, arrival: bytes) -> None:
        """Bring one more, until it is taken: the others may have left nothing for this one."""
        while True:
            (outcome,) = await self.gateway.process([arrival])
            if outcome.acknowledge:
                return
            await asyncio.sleep(max(outcome.retry_after_ms, 10) / 1000)

    async def _poll(self) -> None:
        while not self._queue.is_empty:
            unavailable_s = self.gateway.unavailable_s()
            copies = [] if unavailable_s else self._queue.receive()
            if not copies:
                await asyncio.sleep(min(max(unavailable_s, 0.01), 0.1))
                continue
            arrivals = [event(self._queue.copies[copy]) for copy in copies]
            outcomes = await self.gateway.process(arrivals)
            for copy, outcome in zip(copies, outcomes, strict=True):
                if not outcome.acknowledge:
                    self._queue.bring_later(copy, outcome.retry_after_ms / 1000)
            done = [c for c, o in zip(copies, outcomes, strict=True) if o.acknowledge]
            await self._queue.delete(done)


@dataclass
class Town:
    """All of it; *opened* gives a handle on the store."""

    opened: Callable[[], Any]
    events: int = 1500
    queue: Queue = field(init=False)
    workers: list[Worker] = field(init=False, default_factory=list)
    taken: list[Delivered] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.queue = Queue(self.events, repeats=0.2, seed=4)
        self._notes = Notes()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for number in range(2):
            store = Watched(self.opened(), number, self._notes)
            worker = Worker(store, Sink(number, self.taken), self.queue)
            self._stack.push_async_callback(worker.gateway.aclose)
            await worker.gateway.open()
            self.workers.append(worker)
        self._work = asyncio.gather(*(worker.run() for worker in self.workers))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)
        await self._stack.aclose()

    async def until_down(self) -> None:
        """Wait until all workers have noticed that the store is away."""
        async with asyncio.timeout(30):
            while not all(worker.gateway.down() for worker in self.workers):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def finish(self, within_s: float = 60) -> None:
        """Wait until the queue is empty, and all commits are recorded."""
        async with asyncio.timeout(within_s):
            await self._work
            for number, worker in enumerate(self.workers):
                await worker.take(event(self.events + number))
            for worker in self.workers:
                assert await worker.gateway.drain()

    @property
    def lost(self) -> set[int]:
        return set(range(self.events)) - {delivered.number for delivered in self.taken}

    @property
    def repeated(self) -> dict[int, list[Delivered]]:
        times = Counter(delivered.number for delivered in self.taken)
        return {
            number: [one for one in self.taken if one.number == number]
            for number, count in times.items()
            if count > 1
        }

    @property
    def unexcused(self) -> list[int]:
        """List the events of whose deliveries more than one have no excuse."""
        return [
            number
            for number, deliveries in self.repeated.items()
            if sum(not self._notes.was_late(delivered) for delivered in deliveries) > 1
        ]

    def receives_between(self, began: float, ended: float) -> int:
        return sum(began <= at < ended for at, _ in self.queue.receives)

    async def check(self) -> None:
        """See that nothing is lost, buried, left over, or repeated without an excuse."""
        assert not self.lost
        assert not self.unexcused
        for worker in self.workers:
            books = worker.gateway.books
            assert books.balance
            assert not books.in_flight
            assert not books.forgotten
            assert worker.gateway.down() == []
            assert await worker.dead.list() == []

    def told(self) -> str:
        books = [worker.gateway.books for worker in self.workers]
        return (
            f"{self.events} events, {len(self.queue.copies)} copies, "
            f"{len(self.queue.receives)} receives, {len(self.taken)} deliveries, "
            f"{len(self.repeated)} repeated, "
            f"{sum(one.acked_uncommitted for one in books)} acknowledged uncommitted, "
            f"{sum(one.store_errors for one in books)} store errors"
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
