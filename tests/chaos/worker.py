"""
A worker as anybody would run it: poll the queue, process, delete or bring again later.

The gateway and the store are the real ones. The harness looks on through two thin
wrappers at the seams, which tell it what only the worker can know: when a claim began,
that a send ended without an answer, that a commit did not land within its lease.

Where the sink is real too, there is nobody to tell: what it has taken is looked at in the
end, and nothing of it is excused.
"""

import asyncio
import ctypes
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from math import inf
from time import monotonic
from typing import Any

import msgspec
from msgspec import Struct

from oncebridge.dead_letters.sqlite import SQLiteDeadLetters
from oncebridge.engine.gateway import Gateway
from oncebridge.engine.settings import Settings
from oncebridge.errors import StoreError, StoreUnavailable
from oncebridge.events.rules import Rule
from oncebridge.service.addresses import SinkPlace, StorePlace
from oncebridge.sinks.api import Delivery, No, SinkAnswer, Unknown, Yes
from oncebridge.stores.api import (
    Claim,
    ClaimAnswers,
    Commits,
    Extensions,
    NoAnswer,
    Releases,
    Reply,
    Store,
    Wants,
)

from .wire import GONE, Connection

RULE = Rule.parse(
    {
        "name": "genesys",
        "key": "content",
        "ignore": ["detail.timestamp", "detail.metadata"],
        "scope": "organisation",
    }
)


class Job(Struct, frozen=True, kw_only=True):
    """What the harness tells a worker on its command line."""

    incarnation: int
    socket: str
    store: str
    """An address."""
    options: dict[str, Any]
    """Of the store."""
    dead: str
    sink: str
    """An address; none for the harness itself."""
    sink_options: dict[str, Any]
    apart: bool
    """Do not let the sink know that it could deliver and commit in one step."""
    shadow: bool
    """Deliver everything."""
    fails_open: bool
    """Deliver without a claim while the store is down."""
    lease_s: float
    sink_timeout_s: float
    commit_budget_s: float
    margin_s: float
    latency_s: float
    pollers: int
    receive: int
    sink_batch: int
    sink_concurrency: int

    def settings(self) -> Settings:
        return Settings(
            lease=timedelta(seconds=self.lease_s),
            sink_timeout=timedelta(seconds=self.sink_timeout_s),
            commit_budget=timedelta(seconds=self.commit_budget_s),
            margin=timedelta(seconds=self.margin_s),
            backoff=timedelta(milliseconds=50),
            max_backoff=timedelta(milliseconds=500),
            mode="shadow" if self.shadow else "enforce",
            on_store_outage="deliver" if self.fails_open else "hold",
        )


class Notes:
    """Tell the harness, and do not wait for an answer."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def unclear(self, sends: Sequence[tuple[str, int]]) -> None:
        self._connection.tell("unclear", sends)

    def late(self, commits: Sequence[tuple[str, int]]) -> None:
        self._connection.tell("late", commits)

    def in_time(self, commits: Sequence[tuple[str, int]]) -> None:
        """Take back that *commits* were late."""
        self._connection.tell("in_time", commits)

    async def bye(self, *, drained: bool, balanced: bool) -> None:
        self._connection.tell("bye", drained, balanced)
        await self._connection.flush()
        self._connection.close()


Life = tuple[bytes, bytes]
"""A key and its generation: a store that has lost its memory starts another one."""


class WatchedStore:
    """Look on while *store* works."""

    def __init__(self, store: Store, lease_s: float, notes: Notes) -> None:
        self._store = store
        self._lease_s = lease_s
        self._notes = notes
        self._lives: dict[bytes, Life] = {}
        """The newest of each key."""
        self._ends: dict[Life, float] = {}
        self._attempts: dict[Life, int] = {}
        self._owed: set[Life] = set()
        self._claimed_at: dict[tuple[Life, int], float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def claimed_at(self, delivery: Delivery) -> float:
        """Return when the claim of *delivery* began, or the time now if it has none."""
        life = (delivery.key, delivery.generation)
        return self._claimed_at.get((life, delivery.attempt), monotonic())

    async def claim(self, wants: Wants) -> ClaimAnswers:
        began = monotonic()
        answers = await self._store.claim(wants)
        for answer in answers:
            if isinstance(answer, Claim):
                for held in answer.held:
                    life = (held.key, held.generation)
                    if held.attempts > self._attempts.get(life, held.attempts):
                        self._overtaken(life)
                    self._lives[held.key] = life
                    self._ends[life] = began + self._lease_s
                    self._attempts[life] = held.attempts
                    self._claimed_at[life, held.attempts] = began
                    # What was owed for an earlier attempt cannot be in time any more.
                    self._owed.discard(life)
        return answers

    def _overtaken(self, life: Life) -> None:
        """
        Count an attempt of this worker as late that ends with another claim of its own.

        Nothing has ended it but its lease: whatever it commits now is too late.
        """
        if monotonic() > self._ends.pop(life, inf):
            self._notes.late(self._named([life]))

    async def release(self, releases: Releases) -> Any:
        answers = await self._store.release(releases)
        for asked, answer in zip(releases, answers, strict=True):
            if answer is Reply.RELEASED and (life := self._lives.get(asked.key)):
                self._ends.pop(life, None)
        return answers

    async def extend(self, extensions: Extensions) -> Any:
        began = monotonic()
        answers = await self._store.extend(extensions)
        for asked, answer in zip(extensions, answers, strict=True):
            if answer is Reply.EXTENDED:
                self._ends[self._lives[asked.key]] = began + self._lease_s
        return answers

    async def commit(self, commits: Commits) -> Any:
        lives = [(commit.key, commit.generation) for commit in commits]
        try:
            answers = await self._store.commit(commits)
        except StoreError:
            self._owe(lives)
            raise
        asked = list(zip(lives, answers, strict=True))
        self._owe([life for life, answer in asked if isinstance(answer, NoAnswer)])
        self._landed([life for life, answer in asked if not isinstance(answer, NoAnswer)])
        return answers

    def _owe(self, lives: Sequence[Life]) -> None:
        """Count commits without an answer as late until they land in time, which they may."""
        if lives:
            self._owed.update(lives)
            self._notes.late(self._named(lives))

    def _landed(self, lives: Sequence[Life]) -> None:
        now = monotonic()
        late = [life for life in lives if now > self._ends.get(life, now)]
        paid = self._owed.intersection(lives)
        self._owed -= paid
        if late:
            self._notes.late(self._named(late))
        if in_time := paid.difference(late):
            self._notes.in_time(self._named(in_time))
        for life in lives:
            self._ends.pop(life, None)

    def _named(self, lives: Iterable[Life]) -> list[tuple[str, int]]:
        return [(life[0].hex(), self._attempts.get(life, 0)) for life in lives]


class Apart:
    """Hide which store this is, and commit after a while: a kill often falls in between."""

    def __init__(self, store: Store, latency_s: float) -> None:
        self._store = store
        self._latency_s = latency_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def commit(self, commits: Commits) -> Any:
        await asyncio.sleep(self._latency_s)
        return await self._store.commit(commits)


class SocketSink:
    """Deliver to the harness, which records; a connection for each call under way."""

    def __init__(self, job: Job, store: WatchedStore, notes: Notes) -> None:
        self.batch = job.sink_batch
        self.concurrency = job.sink_concurrency
        self._job = job
        self._store = store
        self._notes = notes
        self._idle: list[Connection] = []

    async def open(self) -> None:
        """Connect when needed."""

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        # The way to the sink takes its time: a kill often falls between claim and arrival.
        await asyncio.sleep(self._job.latency_s)
        connection = self._idle.pop() if self._idle else await self._connect()
        try:
            answers = await connection.ask(
                "deliver",
                [
                    (
                        d.idempotency_key,
                        d.attempt,
                        self._store.claimed_at(d),
                        d.event.raw,
                        d.unprotected,
                    )
                    for d in deliveries
                ],
            )
        except BaseException as error:
            # Given up while waiting, or hung up on: whatever comes now is not for us.
            connection.close()
            self._notes.unclear([(d.idempotency_key, d.attempt) for d in deliveries])
            if not isinstance(error, GONE):
                raise
            return [Unknown("hung up")] * len(deliveries)
        self._idle.append(connection)
        return [Yes() if answer == "yes" else No("refused") for answer in answers]

    async def aclose(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> Connection:
        return await Connection.open(self._job.socket, self._job.incarnation)


async def poll(job: Job, gateway: Gateway, stopping: asyncio.Event) -> None:
    queue = await Connection.open(job.socket, job.incarnation)
    while not stopping.is_set():
        if unavailable_s := gateway.unavailable_s():
            # As a source should: while store or sink are down, take nothing from the queue.
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), unavailable_s)
            continue
        messages = await queue.ask("receive", job.receive)
        if not messages:
            continue
        outcomes = await gateway.process([body for _, body in messages])
        settled = list(zip([number for number, _ in messages], outcomes, strict=True))
        gone = [number for number, outcome in settled if outcome.acknowledge]
        later = [(n, o.retry_after_ms / 1000) for n, o in settled if not o.acknowledge]
        if gone:
            await queue.ask("delete", gone)
        if later:
            await queue.ask("later", later)
    queue.close()


async def work(job: Job) -> int:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    notes = Notes(await Connection.open(job.socket, job.incarnation))
    gateway = Gateway(
        **_store_and_sink(job, notes),
        rules=[RULE],
        dead=SQLiteDeadLetters(job.dead),
        settings=job.settings(),
    )
    with suppress(StoreUnavailable):  # then it is an outage like any other
        await gateway.open()
    async with asyncio.TaskGroup() as pollers:
        for _ in range(job.pollers):
            pollers.create_task(poll(job, gateway, stopping))
        await stopping.wait()
        drained = await gateway.drain()
    await gateway.aclose()
    await notes.bye(drained=drained, balanced=gateway.books.balance and not gateway.books.in_flight)
    return 0


def _store_and_sink(job: Job, notes: Notes) -> dict[str, Any]:
    store = StorePlace.of(job.store, **job.options).opened
    if job.sink:
        sink = SinkPlace.of(job.sink, **job.sink_options).opened
        return {"store": Apart(store, job.latency_s) if job.apart else store, "sink": sink}
    watched = WatchedStore(store, job.lease_s, notes)
    return {"store": watched, "sink": SocketSink(job, watched, notes)}


def die_with_parent() -> None:
    """Ask the kernel to kill us when the harness is no more, frozen or not."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def main() -> int:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the harness's to answer
    return asyncio.run(work(msgspec.json.decode(sys.argv[1], type=Job)))


if __name__ == "__main__":
    sys.exit(main())
