"""
Where events go.

A sink gets a batch of deliveries and answers one result for each, in order. It sends
the bytes that were received (`delivery.event.raw`), says honestly what it knows, and
never tries a second time on its own: the retry is a new claim after a release, so that
every worker sees the back-off.

The answers differ in what may have happened:

| answer      | what happened                               | what follows                          |
| ----------- | ------------------------------------------- | ------------------------------------- |
| `Yes`       | it was taken                                | commit, acknowledge                   |
| `No`        | nothing was sent (refused, no name, no TLS) | release, again later; not counted     |
| `Unknown`   | sent, then no clear answer                  | release, again later; maybe delivered |
| `Throttled` | too many events at once                     | release, the sink is sent fewer; not counted |
| `Unwell`    | the sink says that it is in trouble         | as `Closed`; maybe delivered          |
| `Closed`    | access was refused                          | release, again later; counted only if other events pass meanwhile |
| `Never`     | this event will never be taken              | dead letters                          |

A sink that raises has said nothing: `SinkRejected` counts as `Never`, anything else as
`Unknown`. The gateway bounds every call with its *sink_timeout*; a call that is still
running then counts as `Unknown`.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Protocol, cast

from msgspec import Struct

from oncebridge.events.event import Event
from oncebridge.stores.api import Commit, Release, Store


class Delivery(Struct, frozen=True, gc=False):
    """One event on its way out."""

    event: Event
    key: bytes
    """The same for every attempt at this event; empty if the rule does not deduplicate."""
    generation: bytes = b""
    """Names this life of the key: the same for all attempts, another after the window or `forget`."""
    attempt: int = 1
    """How often the event was tried, this time included."""
    route: str = ""
    version: int | float | None = None
    """Newest-wins rules: lets the sink refuse a write that comes late after a stall."""
    unprotected: bool = False
    """The store was down and this is sent all the same; it may repeat."""
    entity: bytes = b""
    """What the event is about, for sinks that keep that in order; empty where no rule says it."""
    ends: float = inf
    """When the call is broken off, by the time of the running loop."""
    trace: str = ""
    """The `traceparent` to send with it, where events are traced."""
    sent_as: bytes = b""
    """The key that the receiver is sent, where it is not *key* itself: made of key and content."""

    @property
    def idempotency_key(self) -> str:
        """What a receiver can use to recognise a duplicate: hex, safe in any header."""
        return (self.sent_as or self.key).hex()


class Yes(Struct, frozen=True, gc=False):
    """It was taken."""


class No(Struct, frozen=True, gc=False):
    """Nothing was sent; try again later."""

    reason: str
    retry_after_ms: int = 0
    too_early: bool = False
    """It is this event that has to wait: the sink is well, and others may pass."""


class Unknown(Struct, frozen=True, gc=False):
    """It may have been taken; try again later, under the same key."""

    reason: str
    retry_after_ms: int = 0


class Throttled(Struct, frozen=True, gc=False):
    """The sink is well and wants fewer events a second; the event is not at fault."""

    reason: str
    retry_after_ms: int = 0
    """How long to send nothing at all; 0 if the sink does not say."""
    maybe: bool = False
    """The event may have been taken all the same."""


class Unwell(Struct, frozen=True, gc=False):
    """The sink, or a proxy before it, says that it is in trouble (HTTP 502, 503, 504)."""

    reason: str
    retry_after_ms: int = 0


class Closed(Struct, frozen=True, gc=False):
    """Access was refused: to this event, or to all of them."""

    reason: str
    retry_after_ms: int = 0


class Never(Struct, frozen=True, gc=False):
    """The event will never be taken, by any attempt."""

    reason: str
    unsent: bool = False
    """It was not even tried, and nothing is known about the sink."""


SinkAnswer = Yes | No | Unknown | Throttled | Unwell | Closed | Never
"""What a sink says of one delivery."""


class Sink(Protocol):
    """What the gateway needs of a place to deliver to."""

    @property
    def batch(self) -> int:
        """How many deliveries one call takes; 1 where each is a request of its own."""
        ...

    @property
    def concurrency(self) -> int:
        """How many calls may run at once."""
        ...

    async def open(self) -> None:
        """Connect; safe to repeat."""
        ...

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        """Send, once each, and say what happened."""
        ...

    async def aclose(self) -> None:
        """Let go of connections; safe to repeat."""
        ...


def instead(old: Sink, new: Sink | Callable[[Event], Any]) -> Sink | Callable[[Event], Any]:
    """Put *new* in the place of *old*: what stands around that one, stands around it too."""
    around = getattr(old, "around", None)
    return new if around is None else cast(Sink, around(new))


# --- exactly once: the event and its commit in one step ------------------------------


class Joint(Struct, frozen=True, gc=False):
    """A delivery, and what is written down with it or not at all."""

    delivery: Delivery
    commits: tuple[Commit, ...]
    """One for each key of the event; none if it has none."""
    releases: tuple[Release, ...] = ()
    """Newest-wins rules: the entity's register, given back with the new state."""


class Already(Struct, frozen=True, gc=False):
    """Whoever took the event over has committed it: it is not written again."""


class Lost(Struct, frozen=True, gc=False):
    """The key or the entity is not ours any more: nothing was written."""


JointAnswer = SinkAnswer | Already | Lost


class JointSink(Sink, Protocol):
    """
    A sink that can keep events where a store keeps its records.

    There, event and commit are one transaction, and no crash falls in between: each event is
    there exactly once.
    """

    def joins(self, store: Store) -> bool:
        """Return whether *store* keeps its records in this sink's database; asked before use."""
        ...

    async def deliver_jointly(self, joints: Sequence[Joint]) -> Sequence[JointAnswer]:
        """
        Write each event with its commits and releases, or nothing of it.

        | the store says              | answer    | effect             |
        | --------------------------- | --------- | ------------------ |
        | all committed and released  | `Yes`     | written            |
        | any already committed       | `Already` | nothing is written |
        | any fenced                  | `Lost`    | nothing is written |

        One event that fails leaves the others of its call alone.
        """
        ...


def joint(sink: Sink, store: Store) -> JointSink | None:
    """Return *sink* as one that commits in *store* as it writes, if it is one."""
    if not hasattr(sink, "deliver_jointly"):
        return None
    able = cast(JointSink, sink)
    return able if able.joins(store) else None
