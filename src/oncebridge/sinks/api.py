"""
The contract of a sink: the place that events are delivered to.

A sink gets a batch of deliveries and returns one answer for each, in order. It sends the bytes
as they were received (`delivery.event.raw`), and its answer claims no more than it knows. It
never retries by itself: a retry is a new claim after a release, so that the backoff applies to
every worker.

The answers differ in what may have happened:

| answer      | what happened                                   | what follows                    |
| ----------- | ----------------------------------------------- | ------------------------------- |
| `Yes`       | the event was accepted                          | commit, acknowledge             |
| `No`        | nothing was sent (connection refused, DNS, TLS) | release and retry later; the attempt does not count |
| `Unknown`   | sent, then no clear answer                      | release and retry later; maybe delivered |
| `Throttled` | too many events at once                         | release; the sink is sent fewer events; the attempt does not count |
| `Unwell`    | the sink reports a failure of its own           | as `Closed`; maybe delivered    |
| `Closed`    | access was refused                              | release and retry later; the attempt counts only if other events are delivered meanwhile |
| `Never`     | this event will never be accepted               | dead letters                    |

If a sink raises `SinkRejected`, that counts as `Never`; any other exception counts as `Unknown`.
The gateway limits every call to *sink_timeout*; a call that still runs then is cancelled and
counts as `Unknown`.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Protocol, cast

from msgspec import Struct

from oncebridge.events.event import Event
from oncebridge.stores.api import Commit, Release, Store


class Delivery(Struct, frozen=True, gc=False):
    """One event to be sent."""

    event: Event
    key: bytes
    """The same for every attempt at this event; empty if the rule does not deduplicate."""
    generation: bytes = b""
    """The same for all attempts at this event; a new one after the window, or after `forget`."""
    attempt: int = 1
    """The number of this attempt, from 1."""
    route: str = ""
    version: int | float | None = None
    """Newest-wins rules: lets the receiver refuse a write that arrives after a newer one."""
    unprotected: bool = False
    """True if the store was unavailable and the event is sent anyway; it may be a duplicate."""
    entity: bytes = b""
    """Identifies what the event is about, for sinks that keep order; empty if no rule names it."""
    ends: float = inf
    """When the gateway cancels the call, by the time of the running loop."""
    trace: str = ""
    """The `traceparent` to send with it; empty if events are not traced."""
    sent_as: bytes = b""
    """The key to send, if it differs from *key*: a hash of key and content."""

    @property
    def idempotency_key(self) -> str:
        """The key by which a receiver can recognise duplicates: hex, safe in any header."""
        return (self.sent_as or self.key).hex()


class Yes(Struct, frozen=True, gc=False):
    """The event was accepted."""


class No(Struct, frozen=True, gc=False):
    """Nothing was sent; retry later."""

    reason: str
    retry_after_ms: int = 0
    too_early: bool = False
    """True if only this event has to wait: the sink works, and takes other events."""


class Unknown(Struct, frozen=True, gc=False):
    """The event may have been accepted; retry later, with the same key."""

    reason: str
    retry_after_ms: int = 0


class Throttled(Struct, frozen=True, gc=False):
    """The sink works and wants fewer events per second; the event is not the cause."""

    reason: str
    retry_after_ms: int = 0
    """How long to send nothing at all; 0 if the sink does not say."""
    maybe: bool = False
    """True if the event may have been accepted nevertheless."""


class Unwell(Struct, frozen=True, gc=False):
    """The sink, or a proxy in front of it, reports that it does not work (HTTP 502, 503, 504)."""

    reason: str
    retry_after_ms: int = 0


class Closed(Struct, frozen=True, gc=False):
    """Access was refused: to this event, or to all of them."""

    reason: str
    retry_after_ms: int = 0


class Never(Struct, frozen=True, gc=False):
    """The event will never be accepted; do not retry."""

    reason: str
    unsent: bool = False
    """True if it was not sent, so that the answer says nothing about the sink."""


SinkAnswer = Yes | No | Unknown | Throttled | Unwell | Closed | Never
"""The result of one delivery."""


class Sink(Protocol):
    """A place that events are delivered to."""

    @property
    def batch(self) -> int:
        """How many deliveries one call of `deliver` takes at most."""
        ...

    @property
    def concurrency(self) -> int:
        """How many calls of `deliver` may run at once."""
        ...

    async def open(self) -> None:
        """
        Connect; safe to repeat.

        Raise `ConfigError` if an operator has to change something. A sink that is only down
        should not raise: its events wait until it is available again.
        """
        ...

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        """Send each delivery once, and return one answer for each, in order."""
        ...

    async def aclose(self) -> None:
        """Close connections; safe to repeat."""
        ...


def replace_sink(old: Sink, new: Sink | Callable[[Event], Any]) -> Sink | Callable[[Event], Any]:
    """Return *new* to use in place of *old*, wrapped as *old* is (by its method `around`)."""
    around = getattr(old, "around", None)
    return new if around is None else cast(Sink, around(new))


# --- exactly once: the event and its commit in one step ------------------------------


class Joint(Struct, frozen=True, gc=False):
    """A delivery, and the commits and releases to write in the same transaction."""

    delivery: Delivery
    commits: tuple[Commit, ...]
    """One for each key of the event; none if it has none."""
    releases: tuple[Release, ...] = ()
    """Newest-wins rules: releases the entity's record with its new state."""


class Already(Struct, frozen=True, gc=False):
    """Another worker has committed the event before: nothing was written."""


class Lost(Struct, frozen=True, gc=False):
    """Another worker holds the key or the entity now: nothing was written."""


JointAnswer = SinkAnswer | Already | Lost


class JointSink(Sink, Protocol):
    """
    A sink that can write events and a store's commits in one transaction.

    No crash can separate the two, so each event is written exactly once.
    """

    def joins(self, store: Store) -> bool:
        """Return True if *store* keeps its records in this sink's database; called before `open`."""
        ...

    async def deliver_jointly(self, joints: Sequence[Joint]) -> Sequence[JointAnswer]:
        """
        Write each event with its commits and releases, or write nothing of it.

        | the store's answers         | answer    | effect             |
        | --------------------------- | --------- | ------------------ |
        | all committed and released  | `Yes`     | written            |
        | any already committed       | `Already` | nothing is written |
        | any fenced                  | `Lost`    | nothing is written |

        An event that fails does not affect the others of the call.
        """
        ...


def as_joint_sink(sink: Sink, store: Store) -> JointSink | None:
    """Return *sink* if it can write events and commits to *store* in one transaction, or None."""
    if not hasattr(sink, "deliver_jointly"):
        return None
    able = cast(JointSink, sink)
    return able if able.joins(store) else None
