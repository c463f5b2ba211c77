"""
The contract of sources: where events come from.

A source turns what it receives into records, passes them to a pump or to the inbox, and acts on
the answer that each record gets: an arrival that is acknowledged may be deleted at its origin, any
other has to be delivered again. A source that reads (a file, a queue) has a pump of its own, see
`oncebridge.sources.pump`; one that is called (HTTP) puts the records of each request into the
inbox, which makes batches of them.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

from msgspec import Struct

from oncebridge.base.clock import Clock, Dice
from oncebridge.base.durations import format_duration
from oncebridge.engine.router import OnAnswer, Router
from oncebridge.stores.api import Store

TraceparentReader = Callable[[str, str], str]
"""Return a `traceparent` from one, or else from X-Ray's header; empty if neither is valid."""


class Inbox(Protocol):
    """Accepts the records of requests, and answers each record when its outcome is known."""

    def put(self, raws: Sequence[bytes], answered: OnAnswer) -> None:
        """
        Accept the records of one request.

        *answered* is called once for each, now or later, with its index and its answer.
        """
        ...

    def not_ready(self) -> list[str]:
        """Return the reasons why records are not accepted right now."""
        ...


def backoff_s(failures: int, dice: Dice) -> float:
    """Return a random pause after so many *failures* before this one: up to 0.5 s, 1 s … 30 s."""
    longest: float = min(0.5 * 2.0 ** min(failures, 10), 30.0)
    return longest * (1 + dice.fraction()) / 2


class Host(Struct, frozen=True):
    """What the service provides to a source."""

    router: Router
    inbox: Inbox
    store: Store
    batch: int
    clock: Clock
    dice: Dice
    is_open: Callable[[], bool] = lambda: True
    """True once the store is open; it may become available later than the source."""
    context: TraceparentReader | None = None
    """If events are traced: reads their trace headers; see `oncebridge.events.trace_context`."""

    def outlasted_window(self, retention: timedelta) -> dict[str, str]:
        """Return the shortest window and *retention*, if that is longer; otherwise nothing."""
        gateways = self.router.gateways
        windows = [gateway.settings.window for gateway in gateways]
        for gateway in gateways:
            windows += [tier.window for rule in gateway.rules.rules for tier in rule.tiers]
        window = min(windows)
        times = {"retention": retention, "window": window} if retention > window else {}
        return {name: format_duration(time) for name, time in times.items()}


class Source(Protocol):
    """A source of events, as the service uses it."""

    async def open(self, host: Host) -> None:
        """Get ready, or raise: bind the address, open the file."""
        ...

    async def run(self) -> None:
        """Read events until there are no more, or until `stop`."""
        ...

    def stop(self) -> None:
        """Read nothing more; events in progress are still answered."""
        ...

    def progress(self) -> tuple[int, int] | None:
        """Return the position and the total, if they are known."""
        return None

    async def aclose(self) -> None:
        """Close sockets and files; safe to repeat."""
        ...
