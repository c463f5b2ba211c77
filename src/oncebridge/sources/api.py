"""
Where events come from.

A source turns whatever arrives into records, brings them to the inbox or the router, and
acts on the answer: an arrival that is acknowledged may be forgotten at its origin, any other
has to come again. A source that reads (a file, a queue) brings batches to the router; one
that is called (HTTP) puts single records into the inbox, which makes batches of them.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from oncebridge.base.clock import Clock, Dice
from oncebridge.engine.router import Router, RouterAnswer
from oncebridge.stores.api import Store

Done = Callable[[RouterAnswer], None]
TraceparentReader = Callable[[str, str], str]
"""Makes a `traceparent` of one, or else of X-Ray's header; empty where neither is any good."""


class Inbox(Protocol):
    """Takes single records, and answers for each when it can."""

    def put(self, raw: bytes, done: Done) -> None:
        """Take one record; *done* is called once, now or later, on the same loop."""
        ...

    def put_all(self, raws: Sequence[bytes], dones: Sequence[Done]) -> None:
        """Take the records of one request, in order, as `put` does each."""
        ...

    def not_ready(self) -> list[str]:
        """Name what keeps records from being taken right now."""
        ...


def _always() -> bool:
    return True


class Host(Struct, frozen=True):
    """What a source is given to work with."""

    router: Router
    inbox: Inbox
    store: Store
    batch: int
    clock: Clock
    dice: Dice
    is_open: Callable[[], bool] = _always
    """Whether the store is there and has checked itself; it may come later than the source."""
    context: TraceparentReader | None = None
    """Where events are traced: reads what came beside them; see `oncebridge.events.trace_context`."""


class Source(Protocol):
    """What the service needs of a place that events come from."""

    async def open(self, host: Host) -> None:
        """Get ready, or raise: bind the address, find the file."""
        ...

    async def run(self) -> None:
        """Bring events until there are no more, or until `stop`."""
        ...

    def stop(self) -> None:
        """Bring nothing new; what is under way is still answered."""
        ...

    def progress(self) -> tuple[int, int] | None:
        """Return how far it is, and how far it has to go, where that is known."""
        ...

    async def aclose(self) -> None:
        """Let go of sockets and files; safe to repeat."""
        ...
