"""
What happened, and whether it was allowed.

A delivery beyond the first needs an excuse, and an excuse belongs to one delivery by one
process, not to a stretch of time:

* killed: its process got SIGKILL with the event still in hand (exception a)
* stopped: its process was frozen between claiming it and letting go of it (exception b)
* unclear: the sink hung up on it, or its answer came too late (exception c)
* late: the store held its commit up until the lease was over (exception d)
* unprotected: it was sent without a claim, where the store was down and the settings allow that

Of all deliveries of one event, one needs no excuse. The one without is not always the
last: a frozen process that wakes up in the middle of a send delivers after its successor.

A store that has lost its memory starts anew, and so does the count: of the deliveries
between two such losses, one needs no excuse. That is allowed only where the store is one
that says so. And where event and commit are one step, there is no excuse at all.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple


class Delivery(NamedTuple):
    """One event that reached the sink. Times are of the one monotonic clock of the host."""

    event: int
    key: str
    incarnation: int
    attempt: int
    claimed_at: float
    at: float
    unprotected: bool = False
    """Sent without a claim, because the store was down."""


@dataclass
class History:
    """Everything the harness saw."""

    events: int
    capacity: int = 0
    """How many messages one process has in hand at most."""
    deliveries: list[Delivery] = field(default_factory=list)
    settled: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """
    By incarnation and event: when it deleted a message of the event, or handed back the
    last one that it had in hand.
    """
    killed: set[int] = field(default_factory=set)
    stops: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    terms: int = 0
    unclear: set[tuple[int, str, int]] = field(default_factory=set)
    """By incarnation, key and attempt."""
    late: set[tuple[int, str, int]] = field(default_factory=set)
    """By incarnation, key and attempt."""
    losses: list[float] = field(default_factory=list)
    """When the store, which may, lost its memory; in order."""
    crashes: int = 0
    """How often the store's server was killed."""
    exactly_once: bool = False
    """Event and commit are one step, and nothing excuses a repeat."""
    faults: list[str] = field(default_factory=list)
    """What went wrong besides: a worker that died by itself, bytes that changed, …"""

    @property
    def stopped(self) -> int:
        return sum(len(stops) for stops in self.stops.values())

    def excuse(self, delivery: Delivery) -> str | None:
        """Find why *delivery* may have been repeated."""
        if self.exactly_once:
            return None
        if delivery.unprotected:
            return "unprotected"
        who = delivery.incarnation
        settled = self.settled.get((who, delivery.event), [])
        after = bisect_left(settled, delivery.at)
        let_go_at = settled[after] if after < len(settled) else inf
        if who in self.killed and let_go_at == inf:
            return "killed"
        stops = self.stops.get(who, [])
        if any(stop < let_go_at and delivery.claimed_at < go_on for stop, go_on in stops):
            return "stopped"
        attempt = (who, delivery.key, delivery.attempt)
        if attempt in self.unclear:
            return "unclear"
        return "late" if attempt in self.late else None

    def memory(self, delivery: Delivery) -> int:
        """Number the memory of the store that knew of *delivery*: one more after each loss."""
        return bisect_left(self.losses, delivery.claimed_at)


@dataclass(frozen=True)
class Judgement:
    """What the oracle says."""

    lost: int
    extra: int
    unexplained: int
    excuses: Counter[str]
    """Why events were delivered more than once: one excuse for each extra delivery."""
    violations: list[str]


def judge(history: History) -> Judgement:
    by_event: dict[int, list[Delivery]] = defaultdict(list)
    for delivery in history.deliveries:
        by_event[delivery.event].append(delivery)
    lost = [event for event in range(history.events) if event not in by_event]
    repeated = [several for several in by_event.values() if len(several) > 1]
    extra = sum(len(several) - 1 for several in repeated)
    excuses: Counter[str] = Counter()
    unexplained: list[list[Delivery]] = []
    for several in repeated:
        bare = [delivery for delivery in several if not history.excuse(delivery)]
        found = [excuse for excuse in map(history.excuse, several) if excuse]
        # One delivery is the rightful one, and needs no excuse even if it has one; and one
        # more for each time that the store has lost its memory.
        memories = {history.memory(delivery) for delivery in bare}
        if len(memories) > 1:
            found += ["forgotten"] * (len(memories) - 1)
        excuses.update(found[: len(several) - 1])
        unexplained += [several] * (len(bare) - len(memories))
    return Judgement(
        len(lost),
        extra,
        len(unexplained),
        excuses,
        [
            *history.faults,
            *(f"event {event} is lost" for event in lost),
            *(f"not explained: {_told(several, history)}" for several in unexplained),
            *_key_faults(history.deliveries),
            *_too_many(history, excuses),
        ],
    )


def judge_shadow(history: History, copies: Counter[int], received: Counter[int]) -> Judgement:
    """
    Judge a run in shadow mode, which delivers every copy that arrives.

    Each of the *copies* of an event has to be delivered, and once for each time that it was
    *received* at most.
    """
    delivered = Counter(delivery.event for delivery in history.deliveries)
    lost = [event for event in copies if delivered[event] < copies[event]]
    unexplained = [event for event in delivered if delivered[event] > received[event]]
    extra = delivered.total() - copies.total() if not lost else 0
    return Judgement(
        len(lost),
        extra,
        len(unexplained),
        Counter({"redelivered": extra}),
        [
            *history.faults,
            *(f"a copy of event {event} is lost" for event in lost),
            *(f"event {event} was delivered more often than received" for event in unexplained),
            *_key_faults(history.deliveries),
        ],
    )


def _key_faults(deliveries: Iterable[Delivery]) -> Iterable[str]:
    """Hold the Idempotency-Key to its promise: one for an event, one event for each."""
    keys: dict[int, set[str]] = defaultdict(set)
    events: dict[str, set[int]] = defaultdict(set)
    for delivery in deliveries:
        keys[delivery.event].add(delivery.key)
        events[delivery.key].add(delivery.event)
    for event, several in keys.items():
        if len(several) > 1:
            yield f"event {event} went out under {len(several)} keys"
    for key, merged in events.items():
        if len(merged) > 1:
            yield f"key {key} stands for {len(merged)} events"


def _too_many(history: History, excuses: Counter[str]) -> Iterable[str]:
    """A fault costs at most what its process had in hand."""
    for excuse, faults in (("killed", len(history.killed)), ("stopped", history.stopped)):
        if excuses[excuse] > faults * history.capacity:
            yield f"{excuses[excuse]} extra deliveries for {faults} processes {excuse}"


def _told(several: list[Delivery], history: History) -> str:
    start = several[0].at
    return f"event {several[0].event}: " + ", ".join(
        f"by {d.incarnation} at {d.at - start:+.3f}s (claimed {d.claimed_at - start:+.3f}s, "
        f"attempt {d.attempt}, {history.excuse(d) or 'no excuse'})"
        for d in several
    )
