"""
The world around the real gateway: a queue, a network, a store, a sink, and their faults.

The gateway, the store and everything between them is the code that ships. What it talks
through is here: requests and answers travel, get lost, come late; the sink refuses, or
takes an event and fails to say so; workers die and stand still; messages become visible
too early. How often each happens is drawn anew for every seed, so that some runs see one
kind of fault only, and some all of them at once.

The oracle knows what a worker cannot: which deliveries landed, and for each of them
whether the protocol had an excuse to deliver once more.
"""

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, Literal

from oncebridge import Gateway, Never, No, Outcome, Rule, Settings, Unknown, Verdict, Yes
from oncebridge.base.options import Rate
from oncebridge.dead_letters.api import DeadLetter
from oncebridge.errors import DeadLetterError, StoreUnavailable
from oncebridge.events.event import parse
from oncebridge.events.rules import RuleSet
from oncebridge.sinks.api import (
    Already,
    Closed,
    Delivery,
    Joint,
    JointAnswer,
    Lost,
    SinkAnswer,
    Unwell,
)
from oncebridge.stores import transitions
from oncebridge.stores.api import (
    Claim,
    ClaimAnswers,
    Commit,
    Commits,
    Mismatch,
    NoAnswer,
    Record,
    Releases,
    Reply,
    Store,
    Wants,
)
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore

from .attempts import Attempts, Content
from .simloop import Node, SimLoop

EPOCH_MS = 1_700_000_000_000


class Violation(AssertionError):
    """A promise was broken."""


@dataclass
class Swarm:
    """What one seed is like."""

    workers: int
    events: int
    copies: int
    phases: int
    batch: int
    lease_s: float
    window_s: float
    rule: str
    store: str
    is_patient: bool
    calm_after_s: float
    crash: float
    freeze: float
    store_error: float
    lost_reply: float
    late_request: float
    part_unanswered: float
    outage_s: float
    commit_outage_s: float
    """Commits fail although claims work."""
    fails_open: bool
    sink_refuses: float
    sink_unclear: float
    sink_unwell: float
    sink_closed: float
    sink_outage_s: float
    sink_outage: type[No | Unwell | Closed]
    """What the sink answers then, to every event."""
    refused: int | None
    """An event that access is refused to for good, while others pass."""
    sink_slow: float
    sink_never: float
    dead_fails: float
    early_return: float
    breaker: int
    per_s: float | None
    is_joint: bool
    """Event and commit are one transaction, as with a Postgres sink on a Postgres store."""
    max_attempts: int
    give_up_s: float
    versions: Literal["number", "instant"]
    wild: Literal["high", "ahead", "type"] | None
    """Newest wins: what is wrong with the version of one event of the first phase."""
    wild_event: int

    @classmethod
    def draw(cls, random: Random) -> "Swarm":
        def rate(most: float) -> float:
            """Off in two runs of five, else anything up to *most*, small more often."""
            return 0.0 if random.random() < 0.4 else most * random.random() ** 2

        events = random.randint(1, 6)
        refused = random.randrange(events) if random.random() < 0.1 else None
        wild: Literal["high", "ahead", "type"] | None
        wild = random.choice([None, "high", "ahead", "ahead", "type"])
        return cls(
            workers=random.randint(1, 4),
            events=events,
            copies=random.randint(1, 4),
            phases=random.choice([1, 2, 3]),
            batch=random.randint(1, 5),
            lease_s=random.choice([2.0, 3.0, 6.0, 12.0]),
            window_s=2000.0,
            rule=random.choice(
                ["content", "tiers", "id", "clash", "clash", "latest", "quiet", "ordered"]
            ),
            store="sqlite" if random.random() < 0.03 else "memory",
            is_patient=random.random() < 0.3,
            calm_after_s=random.choice([10.0, 40.0, 120.0]),
            crash=rate(0.01),
            freeze=rate(0.01),
            store_error=rate(0.4),
            lost_reply=rate(0.4),
            late_request=rate(0.5),
            part_unanswered=rate(0.3),
            outage_s=random.choice([0.0, 0.0, 5.0, 30.0]),
            commit_outage_s=random.choice([0.0, 0.0, 0.0, 10.0, 30.0]),
            fails_open=random.random() < 0.1,
            sink_refuses=rate(0.5),
            sink_unclear=rate(0.4),
            sink_unwell=rate(0.3),
            sink_closed=rate(0.3),
            sink_outage_s=random.choice([0.0, 0.0, 0.0, 5.0, 20.0]),
            sink_outage=random.choice([No, Unwell, Closed]),
            refused=refused,
            sink_slow=rate(0.3),
            sink_never=rate(0.1),
            dead_fails=rate(0.5),
            early_return=rate(0.3),
            breaker=random.choice([1, 5, 1000, 1000, 1000]),
            per_s=random.choice([None] * 8 + [0.5, 5.0]),
            is_joint=random.random() < 0.15,
            max_attempts=random.choice([2, 4, 8, 8, 8]),
            give_up_s=random.choice([60.0, 2000.0, 2000.0]) if refused is None else 20.0,
            versions={"high": "number", "ahead": "instant"}.get(wild or "")
            or random.choice(["number", "instant"]),
            wild=wild,
            wild_event=random.randrange(max(events - 2, 1)),  # so that a true one is newer
        )

    def settings(self) -> Settings:
        return Settings(
            lease=timedelta(seconds=self.lease_s),
            sink_timeout=timedelta(seconds=self.lease_s * 0.4),
            commit_budget=timedelta(seconds=self.lease_s * 0.3),
            margin=timedelta(seconds=self.lease_s * 0.1),
            max_hold=timedelta(seconds=self.lease_s * 10),
            patience=timedelta(seconds=self.lease_s),
            backoff=timedelta(seconds=0.5),
            max_backoff=timedelta(seconds=10),
            max_attempts=self.max_attempts,
            give_up_after=timedelta(seconds=self.give_up_s),
            on_store_outage="deliver" if self.fails_open else "hold",
            breaker=self.breaker,
            rate=Rate(self.per_s) if self.per_s else None,
            order="entity" if self.rule == "ordered" else "none",
        )


_IGNORE = ["detail.sent"]
RULES: dict[str, dict[str, Any]] = {
    "content": {"ignore": _IGNORE},
    "tiers": {"tiers": [{"key": "id"}, {"key": "content", "ignore": _IGNORE}]},
    "id": {"key": "id"},
    "clash": {"key": "id"},
    "latest": {
        "ignore": _IGNORE,
        "latest": {"entity": "detail.entity", "version": "detail.version"},
    },
    "ordered": {"ignore": _IGNORE, "entity": "detail.entity"},
    "quiet": {
        "ignore": _IGNORE,
        "quiet": {"entity": "detail.entity", "state": "detail.version", "for": "1ms"},
    },
}


@dataclass
class Sent:
    """One delivery that reached the sink."""

    event: int
    phase: int
    key: str
    """The Idempotency-Key that it came with."""


@dataclass
class Message:
    """One copy of an event in the queue."""

    event: int
    raw: bytes
    visible_at: float
    receipt: int = 0
    deleted: bool = False


class _AtOnce:
    """In place of a store's thread, which would escape the seed: do it at once."""

    def do(self, loop: asyncio.AbstractEventLoop, work: Callable[[], Any]) -> "asyncio.Future[Any]":
        return loop.run_in_executor(None, work)

    def put(self, job: Callable[[], None]) -> None:
        job()

    def stop(self) -> None:
        pass


def _without_a_thread(store: SQLiteStore) -> SQLiteStore:
    store.file._thread = _AtOnce()  # type: ignore[assignment]
    return store


class World:
    """
    One run: everything in it, and everything that was seen.

    The keyword arguments replace a part by a broken one, to see whether it is noticed.
    """

    def __init__(
        self,
        seed: int,
        directory: Path,
        *,
        make_gateway: Callable[..., Gateway] = Gateway,
        make_store: Callable[..., Store] | None = None,
        make_joint_sink: "Callable[[World, Node], JointSinkClient] | None" = None,
        acknowledges: Callable[[Outcome], bool] = lambda outcome: outcome.acknowledge,
    ) -> None:
        self.random = Random(seed)
        self.swarm = Swarm.draw(self.random)
        # A broken store or gateway is looked at with a sink apart, which is the harder case.
        is_whole = make_store is None and make_gateway is Gateway
        self.is_joint = is_whole and (self.swarm.is_joint or make_joint_sink is not None)
        if self.is_joint:
            self.swarm.fails_open = False  # without a claim there is no commit to write with it
        self._make_joint_sink = make_joint_sink or JointSinkClient
        self.loop = SimLoop(Random(self.random.random()))
        self.loop.mishap = self._mishap
        self.clock = lambda: EPOCH_MS + int(self.loop.time() * 1000)
        if make_store is None and self.swarm.store == "sqlite" and not self.is_joint:
            path = directory / f"{seed}.db"
            make_store = lambda clock: _without_a_thread(SQLiteStore(path, clock=clock))  # noqa: E731
        self.store = (make_store or MemoryStore)(clock=self.clock)
        self.rule = Rule.parse(
            {"name": "sim", **RULES[self.swarm.rule]},
            window=timedelta(seconds=self.swarm.window_s),
        )
        self._make_gateway = make_gateway
        self._acknowledges = acknowledges
        self._rules = RuleSet(
            [self.rule], namespace="default", ordered=self.swarm.rule == "ordered"
        )
        self.calm = False
        self.phase = 0
        self.phase_began_ms = 0
        self.outage_until = 0.0
        self.commit_outage_until = 0.0
        self.sink_outage_until = 0.0
        self.messages: list[Message] = []
        self._more = asyncio.Event()
        self.sent: list[Sent] = []
        self.buried: set[Content] = set()
        self.excuses: Counter[Content] = Counter()
        self.attempts = Attempts(self.swarm.max_attempts, shares_keys=self.swarm.rule == "clash")
        self.first_seen: dict[Content, float] = {}
        self.rejected: set[Content] = set()
        self.acknowledged: dict[Node, dict[Content, bytes]] = defaultdict(dict)
        """By worker: what it delivered and acknowledged, and under which key."""
        self.unrecorded: dict[Node, set[Content]] = defaultdict(set)
        """By worker: of what the store said that it is not to be recorded."""
        self.recorded: dict[Node, set[Content]] = defaultdict(set)
        """By worker: what the store knows from it."""
        self.held: dict[Node, set[int]] = defaultdict(set)
        self.sending: dict[Node, set[int]] = defaultdict(set)
        self.events_of: dict[bytes, set[int]] = defaultdict(set)
        self.released: set[bytes] = set()
        """The tokens of claims that were given back."""
        self.seen: Counter[str] = Counter()
        """How often it came to what the rules are for."""
        self.trace: list[str] = []

    def note(self, text: str) -> None:
        self.trace.append(f"{self.loop.time():9.3f} {text}")

    # --- the run -----------------------------------------------------------------------

    def run(self) -> None:
        """Run to the end; raises `Violation` if a promise was broken."""
        try:
            self.loop.run_until_complete(self.loop.spawn(self.loop.root, self._run()))
            if self.loop.errors:
                raise Violation(f"an error that nobody saw: {self.loop.errors[0]}")
        finally:
            self._clear_away()
            self.loop.close()

    async def _run(self) -> None:
        await self.store.open()
        self._workers = [self._start(f"w{number}") for number in range(self.swarm.workers)]
        for phase in range(self.swarm.phases):
            self.phase = phase
            self._send_all()
            await self._drain()
            self._judge()
            await self._let_window_pass()

    async def _let_window_pass(self) -> None:
        """Wait: what comes then is new, whatever is still on its way, or arrived meanwhile."""
        pause_s = (self.swarm.window_s + self.swarm.lease_s) / 4
        for number in range(1, 4):
            await asyncio.sleep(pause_s)
            if self._wild_now:
                self._send_older(number)
        await asyncio.sleep(pause_s)

    @property
    def _wild_now(self) -> bool:
        """An event of this phase has a version that cannot be right."""
        swarm = self.swarm
        return swarm.rule == "latest" and swarm.wild is not None and self.phase == 0

    def _send_older(self, number: int) -> None:
        """Send one more event about the entity with the wrong version, older than all others."""
        event = self.swarm.wild_event % 2 - 2 * number
        self.messages.append(Message(event, self._raw(event, f"{event}"), self.loop.time()))
        self._more.set()
        self.seen["older versions"] += 1

    def _send_all(self) -> None:
        swarm, random = self.swarm, self.random
        self.calm = False
        self.phase_began_ms = self.clock()
        now = self.loop.time()
        self.outage_until = now + swarm.outage_s * random.random()
        self.commit_outage_until = now + swarm.commit_outage_s * random.random()
        self.sink_outage_until = now + swarm.sink_outage_s * random.random()
        self.loop.at_root(swarm.calm_after_s, self._calm_down)
        for event in range(swarm.events):
            first = self._raw(event, f"{event // 2 if swarm.rule == 'clash' else event}")
            copies = [first] * random.randint(1, swarm.copies)
            if "id" not in (RULES[swarm.rule].get("key"), swarm.rule):
                # Re-emissions: the same event under other ids.
                again = range(random.randint(0, swarm.copies - 1))
                copies += [self._raw(event, f"{event}-{number}") for number in again]
            self.messages += [
                Message(event, raw, now + random.random() * swarm.lease_s * 2) for raw in copies
            ]
        self._more.set()

    def _calm_down(self) -> None:
        self.calm = True

    def _raw(self, event: int, event_id: str) -> bytes:
        detail = {"number": event, "entity": event % 2, "version": self._version(event)}
        if self.rule.tiers[0].key.kind != b"id":
            detail["sent"] = self.random.randint(0, 999)
        envelope = {"id": event_id, "source": "sim", "detail-type": "sim", "detail": detail}
        raw = json.dumps(envelope).encode()
        plan = self._rules.plan(parse(raw))
        for part in plan.parts:
            self.events_of[part.key].add(event)
            self.events_of[plan.in_conflict(part.key).key].add(event)
        self.events_of[plan.entity].add(event)
        return raw

    def _version(self, event: int) -> int | str:
        swarm = self.swarm
        number = 100 * self.phase + event
        kind = swarm.versions
        if self._wild_now and event == swarm.wild_event:
            if swarm.wild == "type":
                kind = "instant" if kind == "number" else "number"
            else:
                number = 10**9
        if kind == "number":
            return number
        return datetime.fromtimestamp(EPOCH_MS / 1000 + number, UTC).isoformat()

    async def _drain(self) -> None:
        """Wait until every copy is acknowledged; once the faults are over, that must happen."""
        ends = self.loop.time() + self.swarm.calm_after_s + 1000
        while any(not message.deleted for message in self.messages):
            await asyncio.sleep(1)
            self._raise_errors()
            if self.loop.time() > ends:
                left = {m.event for m in self.messages if not m.deleted}
                raise Violation(f"copies of {left} were never acknowledged")

    def _raise_errors(self) -> None:
        """Nothing in a worker may end in an error, seen or unseen."""
        self.loop.tasks = [task for task in self.loop.tasks if not self._ended_well(task)]

    def _ended_well(self, task: "asyncio.Task[Any]") -> bool:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise Violation(f"a task ended in {error!r}") from error
        return task.done()

    def _start(self, name: str) -> "asyncio.Task[None]":
        node = self.loop.node(name)
        return self.loop.spawn(node, self._work(node))

    async def _work(self, node: Node) -> None:
        """Be one worker: receive, process, acknowledge, until the end of the world."""
        gateway = self._make_gateway(
            store=StoreClient(self, node),
            sink=(self._make_joint_sink if self.is_joint else SinkClient)(self, node),
            rules=[self.rule],
            dead=DeadClient(self),
            settings=self.swarm.settings(),
            clock=self.clock,
            dice=SeededDice(self.random),
        )
        patience = timedelta(seconds=self.swarm.lease_s if self.swarm.is_patient else 0)
        while True:
            got = self._receive()
            if not got:
                await self._wait_for_messages()
                continue
            outcomes = await gateway.process([m.raw for m, _ in got], patience=patience)
            if not gateway.books.balance:
                raise Violation(f"the books do not balance: {gateway.books.counts()}")
            for (message, receipt), outcome in zip(got, outcomes, strict=True):
                await asyncio.sleep(0)
                self.note(f"{node} e{message.event} {outcome.verdict} {outcome.reason}")
                self.seen["copies of what is owed"] += self._is_owed_copy(node, message, outcome)
                if outcome.forwarded:
                    self.acknowledged[node][message.event, self.phase] = outcome.key
                if self._acknowledges(outcome):
                    message.deleted = True
                elif message.receipt == receipt:
                    message.visible_at = self.loop.time() + outcome.retry_after_ms / 1000

    def _is_owed_copy(self, node: Node, message: Message, outcome: Outcome) -> bool:
        content = (message.event, self.phase)
        is_owed = content in self.acknowledged[node] and content not in self.recorded[node]
        return is_owed and outcome.verdict is Verdict.DUPLICATE

    async def _wait_for_messages(self) -> None:
        visible = [m.visible_at for m in self.messages if not m.deleted]
        if visible:
            await asyncio.sleep(max(min(visible) - self.loop.time(), 0) + 0.05)
        else:
            self._more.clear()
            await self._more.wait()

    def _receive(self) -> list[tuple[Message, int]]:
        now = self.loop.time()
        due = [m for m in self.messages if not m.deleted and m.visible_at <= now]
        self.random.shuffle(due)
        got = []
        for message in due[: self.swarm.batch]:
            is_early = not self.calm and self.random.random() < self.swarm.early_return
            message.visible_at = now + self.swarm.lease_s * (0.3 if is_early else 3)
            message.receipt += 1
            self.first_seen.setdefault((message.event, self.phase), now)
            got.append((message, message.receipt))
        return got

    def _clear_away(self) -> None:
        """End all tasks, the dead included, so that nothing is left to complain."""
        self.loop.mishap = lambda node: None
        self.loop.revive_all()
        while tasks := [task for task in self.loop.tasks if not task.done()]:
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(tasks))
        self.loop.run_until_complete(self.store.aclose())

    # --- mishaps and excuses -----------------------------------------------------------

    def _mishap(self, node: Node) -> None:
        """Perhaps kill or stop a worker; asked before each of its callbacks."""
        if self.calm:
            return
        drawn = self.random.random()
        if drawn < self.swarm.crash:
            self.note(f"{node} CRASH while sending {self.sending[node]}")
            self.excuse(self.sending.pop(node, set()), "died between the send and the commit")
            self.loop.crash(node)
            name, _, life = node.name.partition(".")
            successor = f"{name}.{int(life or 0) + 1}"
            self.loop.at_root(self.random.random() * 5, self._start, successor)
        elif drawn < self.swarm.crash + self.swarm.freeze:
            leases = self.random.choice([0.3, 1.2, 1.7, 4.0])
            self.note(f"{node} FREEZE for {leases} leases holding {self.held[node]}")
            # A short stop can still outlast the time there is to hear the sink's answer.
            stalled = self.sending[node] | (self.held[node] if leases > 0.5 else set())
            self.excuse(stalled, "its worker stood still")
            self.attempts.stall(self.contents(self.sending[node] | self.held[node]))
            self.loop.freeze(node, leases * self.swarm.lease_s)

    def excuse(self, events: set[int], reason: str) -> None:
        """Allow one more delivery of each of *events*."""
        for event in events:
            self.excuses[event, self.phase] += 1
            self.note(f"e{event} is excused: {reason}")

    def contents(self, events: set[int]) -> set[Content]:
        return {(event, self.phase) for event in events}

    def happens(self, rate: float) -> bool:
        return not self.calm and self.random.random() < rate

    # --- the verdict -------------------------------------------------------------------

    def _judge(self) -> None:
        sent = [s for s in self.sent if s.phase == self.phase]
        counts = Counter(s.event for s in sent)
        received = self._judge_keys()
        for event in range(self.swarm.events):
            excuses = self.excuses[event, self.phase]
            is_safe = (event, self.phase) in received | self.buried
            if not is_safe and not self._may_be_stale(event):
                raise Violation(f"event {event} of phase {self.phase} was LOST")
            if counts[event] > 1 and self.is_joint:
                raise Violation(f"event {event} of phase {self.phase} was not EXACTLY once there")
            if counts[event] > 1 + excuses:
                raise Violation(
                    f"event {event} of phase {self.phase} was delivered {counts[event]} times "
                    f"with {excuses} excuses"
                )
        if self.swarm.rule == "latest":
            self._judge_order(sent)

    def _judge_keys(self) -> set[Content]:
        """Return what a receiver has that takes one event of each key: one key, one content."""
        received: dict[str, Content] = {}
        keys: dict[Content, str] = {}
        for one in self.sent:
            content = (one.event, one.phase)
            if received.setdefault(one.key, content) != content:
                raise Violation("two events went out under one idempotency key")
            if keys.setdefault(content, one.key) != one.key:
                raise Violation("one event went out under two idempotency keys")
        return set(received.values())

    def _may_be_stale(self, event: int) -> bool:
        swarm = self.swarm
        if swarm.rule != "latest":
            return False
        if self._wild_now and event == swarm.wild_event:
            return False
        is_hidden = self._wild_now and swarm.wild == "high" and event % 2 == swarm.wild_event % 2
        return is_hidden or event + 2 < swarm.events

    def _judge_order(self, sent: list[Sent]) -> None:
        """Nothing older may arrive after something newer, unless a worker stalled."""
        wild = self.swarm.wild_event if self._wild_now else None
        for entity in (0, 1):
            order = [s.event for s in sent if s.event % 2 == entity]
            is_excused = not self.is_joint and any(
                self.excuses[event, self.phase] for event in order
            )
            if wild in order and self.swarm.wild == "high":
                order = [self.swarm.events + 1 if event == wild else event for event in order]
            elif wild in order:
                # It has no order, and if it came first, the others have none beside it.
                first = order.index(wild)
                order = [] if first == 0 and self.swarm.wild == "type" else order
                order = [event for event in order if event != wild]
            if not is_excused and order != sorted(order):
                raise Violation(f"entity {entity} went back in time: {order}")

    def judge_send(self, node: Node, delivery: Delivery) -> None:
        """Hold a send against what its worker knows."""
        content = (delivery.event.detail["number"], self.phase)
        key = self.acknowledged[node].get(content)
        is_owed = key is not None and content not in self.recorded[node]
        # The store knows what is not owed, if it is asked, and by the key that was recorded.
        is_known = is_owed or (key == delivery.key and not delivery.unprotected)
        if is_known and content not in self.unrecorded[node]:
            raise Violation(f"{node} delivered event {content[0]}, and sends it again")
        if not delivery.unprotected and self.attempts.must_be_over(content):
            raise Violation(f"event {content[0]} is sent although its attempts are used up")

    def _was_delivered(self, content: Content) -> bool:
        """Return True if the event was delivered, and the record of its claim shows it."""
        if self.swarm.rule == "clash" or self.swarm.fails_open:
            return False
        if self.attempts.is_disturbed(content):
            return False
        return any((one.event, one.phase) == content for one in self.sent)

    def judge_letter(self, letter: DeadLetter) -> None:
        """Hold a dead letter against what the sink said."""
        event = json.loads(letter.raw)["detail"]["number"]
        content = (event, self.phase)
        age_s = self.loop.time() - self.first_seen[content]
        is_due = {
            "rejected": content in self.rejected,
            "attempts": self.attempts.may_be_over(content),
            "too-old": age_s >= self.swarm.give_up_s - 0.01,
        }
        if not is_due.get(letter.reason, False):
            raise Violation(f"event {event} was given up too early: {letter.reason}")
        if self._was_delivered(content) and not letter.maybe_delivered:
            raise Violation(f"the dead letter of event {event} says it was never delivered")
        self.buried.add(content)
        self.seen[f"dead {letter.reason}"] += 1


class SeededDice:
    """The gateway's dice, from the seed."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def tokens(self, count: int) -> list[bytes]:
        return [self._random.randbytes(16) for _ in range(count)]

    def fraction(self) -> float:
        return self._random.random()


class StoreClient:
    """The store as one worker reaches it: through a network that loses and delays."""

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node

    async def open(self) -> None: ...

    async def aclose(self) -> None: ...

    async def claim(self, wants: Wants) -> ClaimAnswers:
        keys = [want.parts[-1].key for want in wants]
        return ClaimAnswers.of(wants, await self._call("claim", wants, keys))

    async def commit(self, commits: Sequence[Any]) -> Any:
        return await self._call("commit", commits, [c.key for c in commits])

    async def release(self, releases: Sequence[Any]) -> Any:
        return await self._call("release", releases, [r.key for r in releases])

    async def extend(self, extensions: Sequence[Any]) -> Any:
        return await self._call("extend", extensions, [e.key for e in extensions])

    async def remember(self, memories: Sequence[Any]) -> Any:
        return await self._call("remember", memories, [m.key for m in memories])

    async def _call(self, name: str, items: Any, keys: list[bytes]) -> Any:
        world, swarm = self._world, self._world.swarm
        assert len(set(keys)) == len(keys), "the keys of one call must be distinct"
        timeout = swarm.lease_s * 0.2
        await asyncio.sleep(world.random.random() * 0.02)
        down_until = world.outage_until
        if name == "commit":
            down_until = max(down_until, world.commit_outage_until)
        if world.loop.time() < down_until or world.happens(swarm.store_error):
            self._excuse(name, keys, "did not reach the store")
            await asyncio.sleep(timeout * world.random.random())
            raise StoreUnavailable("sim: refused")
        if world.happens(swarm.late_request):
            self._excuse(name, keys, "reached the store late")
            # Sometimes so late that the next event of the same key is already there.
            next_phase_s = swarm.window_s + swarm.lease_s
            least, longest = world.random.choice(
                [(0, swarm.lease_s), (0, 4 * swarm.lease_s)]
                + [(next_phase_s, swarm.calm_after_s)] * 2
            )
            delay = least + longest * world.random.random()
            world.loop.at_root(delay, self._apply, name, items, keys, None)
            await asyncio.sleep(timeout)
            raise StoreUnavailable("sim: timed out")
        answer: asyncio.Future[Any] = world.loop.create_future()
        world.loop.at_root(0, self._apply, name, items, keys, answer)
        answers = await answer
        if world.happens(swarm.lost_reply):
            await asyncio.sleep(timeout)
            raise StoreUnavailable("sim: the reply was lost")
        if world.happens(swarm.part_unanswered):
            # Applied, but not said so for some.
            each = answers.each if name == "claim" else answers
            each = [NoAnswer("sim") if world.random.random() < 0.5 else a for a in each]
            answers = ClaimAnswers(items, each, answers.now_ms) if name == "claim" else each
        await asyncio.sleep(world.random.random() * 0.02)
        return answers

    def _excuse(self, name: str, keys: list[bytes], what: str) -> None:
        # A commit that is not recorded, or a hold that cannot be prolonged, before the lease ends.
        if name in ("commit", "extend"):
            events = set().union(*(self._world.events_of[key] for key in keys))
            self._world.excuse(events, f"a {name} {what}")

    def _apply(
        self,
        name: str,
        items: Sequence[Any],
        keys: list[bytes],
        answer: "asyncio.Future[Any] | None",
    ) -> None:
        async def apply() -> None:
            before = await self._world.store.peek(keys)
            answers = await getattr(self._world.store, name)(items)
            self._check(name, before, await self._world.store.peek(keys))
            self._follow(name, keys, answers, before)
            if answer is not None and not answer.done():
                answer.set_result(answers)

        self._world.loop.spawn(self._world.loop.root, apply())

    def _check(
        self, name: str, before: Sequence[Record | None], after: Sequence[Record | None]
    ) -> None:
        """What is done stays done while its window lasts."""
        now = self._world.clock()
        for old, new in zip(before, after, strict=True):
            if old is None or old.fate is None or old.until_ms <= now:
                continue
            if new is None or new.fate is None or new.until_ms < old.until_ms:
                raise Violation(f"{name} erased what was done")

    def _follow(
        self,
        name: str,
        keys: list[bytes],
        answers: Sequence[Any],
        before: Sequence[Record | None],
    ) -> None:
        """Keep book of who holds what, for the excuses, and of what was recorded."""
        world = self._world
        held, sending = world.held[self._node], world.sending[self._node]
        for key, answer, old in zip(keys, answers, before, strict=True):
            events = world.events_of[key]
            self._follow_attempts(events, answer, old)
            if isinstance(answer, Claim):
                held |= events
            elif answer is Reply.RELEASED:
                held -= events
            elif answer in (Reply.COMMITTED, Reply.ALREADY):
                held -= events
                sending -= events
            if answer in (Reply.COMMITTED, Reply.ALREADY, Reply.REMEMBERED):
                world.recorded[self._node] |= world.contents(events)
            elif name in ("commit", "remember"):
                world.unrecorded[self._node] |= world.contents(events)

    def _follow_attempts(self, events: set[int], answer: Any, old: Record | None) -> None:
        """Keep book of the attempts that no answer of the sink accounts for."""
        world = self._world
        if old is None:
            return
        if isinstance(answer, Claim):
            if old.fate is None and old.generation != answer.held[-1].generation:
                world.attempts.begin_anew(world.contents(events))
            elif old.fate is None and old.token not in (b"", answer.token):
                world.attempts.lapse(world.contents(events))
        elif answer is Reply.RELEASED:
            # A claim that lands twice may be released twice, and counts twice then.
            if old.token in world.released:
                world.attempts.lapse(world.contents(events))
            world.released.add(old.token)
        elif isinstance(answer, Mismatch):
            done_ms = old.until_ms - int(world.swarm.window_s * 1000)
            if done_ms < world.phase_began_ms:
                world.excuse(events, "its key is known with other content, for less time")


class SinkClient:
    """The sink as one worker reaches it."""

    concurrency = 3

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node
        self.batch = world.random.choice([1, 1, 3])

    async def open(self) -> None: ...

    async def aclose(self) -> None: ...

    async def deliver(self, deliveries: Sequence[Delivery]) -> list[SinkAnswer]:
        began = self._world.loop.time()
        for one in deliveries:
            self._world.judge_send(self._node, one)
        # One slow delivery leaves the answers of the whole call open.
        is_slow = self._world.happens(self._world.swarm.sink_slow)
        answers = list(
            await asyncio.gather(*[self._deliver(one, is_slow=is_slow) for one in deliveries])
        )
        self._hear(began, deliveries, answers)
        return answers

    def _hear(
        self, began: float, deliveries: Sequence[Delivery], answers: Sequence[JointAnswer]
    ) -> None:
        world = self._world
        contents = [(one.event.detail["number"], world.phase) for one in deliveries]
        pairs = zip(contents, answers, strict=True)
        world.rejected |= {content for content, answer in pairs if isinstance(answer, Never)}
        world.attempts.hear(
            self._node,
            began,
            world.loop.time(),
            [
                (content, answer, not one.unprotected)
                for content, answer, one in zip(contents, answers, deliveries, strict=True)
            ],
        )

    async def _deliver(self, delivery: Delivery, *, is_slow: bool) -> SinkAnswer:
        world, swarm = self._world, self._world.swarm
        event = delivery.event.detail["number"]
        mine = {event}
        world.sending[self._node] |= mine
        if delivery.unprotected:
            world.excuse(mine, "it was sent without the store")
            world.seen["unprotected"] += 1
        if is_slow:
            world.excuse(mine, "the sink answered too late")
            world.attempts.time_out((event, world.phase))
            slow = swarm.lease_s * 0.4 * (1 + world.random.random())
            self._land(delivery, event, slow * world.random.random())
            await asyncio.sleep(slow)
            return Yes()
        await asyncio.sleep(world.random.random() * 0.05)
        refusal = self._refusal(event)
        if refusal is not None:
            world.sending[self._node] -= mine
            # It may have been taken all the same.
            world.seen[type(refusal).__name__] += 1
            if isinstance(refusal, Unknown | Unwell) and world.random.random() < 0.5:
                world.excuse(mine, "the sink took it, and did not say so")
                self._land(delivery, event, 0.0)
            return refusal
        landed = self._land(delivery, event, world.random.random() * 0.05)
        await landed
        await asyncio.sleep(world.random.random() * 0.05)
        return Yes()

    def _refusal(self, event: int) -> SinkAnswer | None:
        """Return what the sink says instead of yes, if so."""
        world, swarm = self._world, self._world.swarm
        if event == swarm.refused:
            return Closed("sim")
        if world.loop.time() < world.sink_outage_until:
            return swarm.sink_outage("sim")
        rates: list[tuple[float, type[Never | No | Closed | Unwell | Unknown]]] = [
            (swarm.sink_never, Never),
            (swarm.sink_refuses, No),
            (swarm.sink_closed, Closed),
            (swarm.sink_unwell, Unwell),
            (swarm.sink_unclear, Unknown),
        ]
        return next((kind("sim") for rate, kind in rates if world.happens(rate)), None)

    def _land(self, delivery: Delivery, event: int, delay: float) -> "asyncio.Future[None]":
        """Reach the sink, whatever happens to the worker on the way."""
        done: asyncio.Future[None] = self._world.loop.create_future()

        def land() -> None:
            self._world.note(f"{self._node} e{event} reached the sink")
            self._world.sent.append(Sent(event, self._world.phase, delivery.idempotency_key))
            if not done.done():
                done.set_result(None)

        self._world.loop.at_root(delay, land)
        return done


class JointSinkClient(SinkClient):
    """A sink in the store's own database: event and commit are one step there."""

    def joins(self, store: object) -> bool:
        return True

    async def deliver_jointly(self, joints: Sequence[Joint]) -> Sequence[JointAnswer]:
        began = self._world.loop.time()
        deliveries = [one.delivery for one in joints]
        for one in deliveries:
            self._world.judge_send(self._node, one)
        answers = await self._answers(joints)
        self._hear(began, deliveries, answers)
        return answers

    async def _answers(self, joints: Sequence[Joint]) -> Sequence[JointAnswer]:
        world, swarm = self._world, self._world.swarm
        timeout = swarm.lease_s * 0.2
        await asyncio.sleep(world.random.random() * 0.02)
        if world.loop.time() < world.outage_until or world.happens(swarm.sink_refuses):
            return [No("sim")] * len(joints)
        if world.loop.time() < world.sink_outage_until:
            return [swarm.sink_outage("sim")] * len(joints)
        if world.happens(swarm.late_request):
            delay = world.random.choice([1, 4, 40]) * swarm.lease_s * world.random.random()
            world.loop.at_root(delay, self._transact, joints, None)
            await asyncio.sleep(timeout)
            return [Unknown("sim: timed out")] * len(joints)
        answer: asyncio.Future[Sequence[JointAnswer]] = world.loop.create_future()
        world.loop.at_root(0, self._transact, joints, answer)
        answers = await answer
        if world.happens(swarm.lost_reply) or world.happens(swarm.sink_unclear):
            await asyncio.sleep(timeout)
            return [Unknown("sim: the reply was lost")] * len(joints)
        if world.happens(swarm.sink_unwell):
            return [Unwell("sim: the reply was lost")] * len(joints)
        await asyncio.sleep(world.random.random() * 0.02)
        return answers

    def _transact(
        self,
        joints: Sequence[Joint],
        answer: "asyncio.Future[Sequence[JointAnswer]] | None",
    ) -> None:
        async def transact() -> None:
            answers = [await self.write(joint) for joint in joints]
            if answer is not None and not answer.done():
                answer.set_result(answers)

        self._world.loop.spawn(self._world.loop.root, transact())

    async def write(self, joint: Joint) -> JointAnswer:
        """Write event, commits and releases, or nothing; the memory store never waits."""
        world = self._world
        event = joint.delivery.event.detail["number"]
        if event == world.swarm.refused or world.happens(world.swarm.sink_closed):
            return Closed("sim")
        if world.happens(world.swarm.sink_never):
            return Never("sim")
        now = world.clock()
        asked = [*joint.commits, *joint.releases]
        records = await world.store.peek([one.key for one in asked])
        replies = [
            (transitions.commit if isinstance(one, Commit) else transitions.release)(
                record, one, now
            )[0]
            for one, record in zip(asked, records, strict=True)
        ]
        if Reply.FENCED in replies:
            return Lost()
        if Reply.ALREADY in replies:
            return Already()
        await world.store.commit(Commits.of(joint.commits))
        await world.store.release(Releases.of(joint.releases))
        world.note(f"{self._node} e{event} was written with its commit")
        world.sent.append(Sent(event, world.phase, joint.delivery.idempotency_key))
        return Yes()


class DeadClient:
    """Dead letters that sometimes cannot be written."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def open(self) -> None: ...

    async def aclose(self) -> None: ...

    async def put(self, letters: Sequence[DeadLetter]) -> None:
        await asyncio.sleep(0.01)
        if self._world.happens(self._world.swarm.dead_fails):
            raise DeadLetterError("sim")
        for letter in letters:
            self._world.judge_letter(letter)
