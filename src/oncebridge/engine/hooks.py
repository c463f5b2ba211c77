"""
Hooks and tracers: functions of yours that are called when something happens.

A hook takes `Decisions`, the arrivals whose outcomes became known together; a trip hook takes a
`RoundTrip`, one call of a store or a sink. It runs on the gateway's event loop, so it should be
quick; if it raises, the error is logged and the events are processed as usual.

A tracer is called when events arrive, when one is sent and when its outcome is known.
"""

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeVar, overload

from msgspec import Struct

from oncebridge.engine.verdict import Outcome
from oncebridge.events.event import Event, Unreadable

_log = logging.getLogger("oncebridge")
_T = TypeVar("_T")


class Decision(Struct, frozen=True, gc=False):
    """One arrival and its outcome."""

    route: str
    event: Event | Unreadable
    outcome: Outcome
    arrived_ms: int = 0
    """When it arrived, by this host's clock."""
    took_s: float = 0.0
    """From its arrival to the verdict."""
    attempt: int = 1
    """How often it was tried, this time included, as far as the store knows."""


class Decisions(Sequence[Decision]):
    """
    Arrivals whose outcomes became known together: a sequence of `Decision`, held as columns.

    The same position in *events*, *outcomes* and *attempts* is one arrival. All of them arrived
    together and have the same verdict.
    """

    def __init__(  # noqa: PLR0917 - the fields of `Decision`
        self,
        route: str,
        events: Sequence[Event | Unreadable],
        outcomes: Sequence[Outcome],
        arrived_ms: int,
        took_s: float,
        attempts: Sequence[int],
    ) -> None:
        self.route = route
        self.events = events
        self.outcomes = outcomes
        self.arrived_ms = arrived_ms
        self.took_s = took_s
        self.attempts = attempts
        self.verdict = outcomes[0].verdict

    def __len__(self) -> int:
        return len(self.events)

    @overload
    def __getitem__(self, at: int) -> Decision: ...
    @overload
    def __getitem__(self, at: slice) -> list[Decision]: ...
    def __getitem__(self, at: int | slice) -> Decision | list[Decision]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        return Decision(
            self.route,
            self.events[at],
            self.outcomes[at],
            self.arrived_ms,
            self.took_s,
            self.attempts[at],
        )


class RoundTrip(Struct, frozen=True, gc=False):
    """One call of a store or a sink, for one event or many."""

    route: str
    place: Literal["store", "sink"]
    call: str
    """The method: `claim`, `commit`, `release`, `extend`, `remember` or `deliver`."""
    items: int
    """How many events it was for."""
    took_s: float
    ok: bool
    """The store answered; the sink took all of them."""


Hook = Callable[[Decisions], None]
"""Called with the arrivals of a batch that have the same verdict, when it is known."""
TripHook = Callable[[RoundTrip], None]
"""Called after each call of a store or a sink."""


class Trace(Protocol):
    """One arrival, as a tracer follows it."""

    def sending(self) -> str:
        """Record that it is sent now; return the `traceparent` to send with it, or an empty string."""
        ...

    def ended(self, outcome: Outcome) -> None:
        """Record its outcome."""
        ...


class Tracer(Protocol):
    """Follows events from their arrival to their outcome."""

    def arrived(self, route: str, events: Sequence[Event | Unreadable]) -> Sequence[Trace | None]:
        """Start a trace for each of *events*; return None for those that are not to be traced."""
        ...


def call_hooks(hooks: Sequence[Callable[[_T], None]], record: _T) -> None:
    """Call every hook with *record*."""
    for hook in hooks:
        guarded(None, hook, record)


def start_traces(
    tracer: Tracer, route: str, events: Sequence[Event | Unreadable]
) -> Sequence[Trace | None]:
    """Start the traces of *events*; return none at all if the tracer fails."""

    def start() -> Sequence[Trace | None]:
        traces = tracer.arrived(route, tuple(events))
        # Fails here, not later, if there is not one for each event.
        return [trace for _, trace in zip(events, traces, strict=True)]

    return guarded((), start)


def guarded(otherwise: _T, call: Callable[..., _T], *args: object) -> _T:
    """Call a function of a hook or a tracer; that it fails must never cost an event."""
    try:
        return call(*args)
    except Exception as error:  # noqa: BLE001
        _log_failure(error)
        return otherwise


_failed: Counter[str] = Counter()
"""How often hooks have failed, by source line."""


def _log_failure(error: Exception) -> None:
    """
    Log where a hook failed and with which type of error, but not its text, which may quote the event.

    A hook that fails for one event mostly fails for all: only the 1st, 10th, 100th … is logged.
    """
    frame = traceback.extract_tb(error.__traceback__)[-1]
    at = f"{frame.filename}:{frame.lineno}"
    _failed[at] += 1
    times = _failed[at]
    if str(times).strip("0") == "1":
        extra = {"error": type(error).__name__, "at": at, "times": times}
        _log.error("oncebridge.hook_failed", extra=extra)
