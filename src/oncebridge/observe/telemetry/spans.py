"""
Events as spans: one for each arrival, and one for each delivery of it.

    oncebridge process   from the arrival to the verdict; child of the event's context
      oncebridge deliver   from the send to the verdict; parent of the receiver's span

A span has the route, the rule, the verdict and the beginning of the key; never a payload. An
unsampled arrival costs only the sampling decision, which is forwarded to the receiver.
"""

from collections.abc import Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from oncebridge.engine import hooks
from oncebridge.engine.verdict import Outcome, Verdict
from oncebridge.events.event import Event, Unreadable
from oncebridge.events.trace_context import NAME, read_traceparent

_NAME_BYTES: Final = NAME.encode()
_WRONG: Final = frozenset({Verdict.FAILED, Verdict.DEAD})
_MOST_ID: Final = 128
_KEY_DIGITS: Final = 16


class Spans:
    """
    Trace events with *tracer*, by default that of the program's tracer provider.

    *reads*: use a `traceparent` in an event; *sends*: send one with it. An arrival without a
    context belongs to the current span, if any.
    """

    def __init__(
        self, tracer: trace.Tracer | None = None, *, reads: bool = True, sends: bool = True
    ) -> None:
        self._tracer = tracer or trace.get_tracer("oncebridge")
        self._reads = reads
        self._sends = sends

    def arrived(
        self, route: str, events: Sequence[Event | Unreadable]
    ) -> "list[hooks.Trace | None]":
        """Begin the spans of arrivals."""
        attributes = _operation("process", "process", route)
        return [self._begin(route, event, attributes) for event in events]

    def _begin(
        self, route: str, event: Event | Unreadable, attributes: "_Attributes"
    ) -> "hooks.Trace | None":
        parent = event.context or (self._reads and _in_event(event))
        span = self._tracer.start_span(
            "oncebridge process",
            context=_context(parent) if parent else None,
            kind=SpanKind.CONSUMER,
            attributes=attributes,
        )
        if not span.is_recording():
            return _UnsampledArrival(_written(span)) if self._sends else None
        return _TracedArrival(self._tracer, span, route, event, sends=self._sends)


class _UnsampledArrival:
    """An unsampled arrival."""

    __slots__ = ("_traceparent",)

    def __init__(self, traceparent: str) -> None:
        self._traceparent = traceparent

    def sending(self) -> str:
        return self._traceparent

    def ended(self, outcome: Outcome) -> None:
        pass


class _TracedArrival:
    """An arrival with its spans."""

    __slots__ = ("_delivery", "_event", "_route", "_sends", "_span", "_tracer")

    def __init__(
        self,
        tracer: trace.Tracer,
        span: Span,
        route: str,
        event: Event | Unreadable,
        *,
        sends: bool,
    ) -> None:
        self._tracer = tracer
        self._span = span
        self._route = route
        self._event = event
        self._sends = sends
        self._delivery: Span | None = None

    def sending(self) -> str:
        if self._delivery is not None:
            self._delivery.end()
        self._delivery = self._tracer.start_span(
            "oncebridge deliver",
            context=set_span_in_context(self._span, Context()),
            kind=SpanKind.PRODUCER,
            attributes=_operation("deliver", "send", self._route),
        )
        return _written(self._delivery) if self._sends else ""

    def ended(self, outcome: Outcome) -> None:
        is_wrong = outcome.verdict in _WRONG
        if self._delivery is not None:
            if is_wrong and not outcome.forwarded:
                self._delivery.set_status(Status(StatusCode.ERROR, outcome.reason or None))
            self._delivery.end()
        self._span.set_attributes(_outcome(self._event, outcome))
        if is_wrong:
            self._span.set_status(Status(StatusCode.ERROR, outcome.reason or None))
        self._span.end()


_Attributes = dict[str, str | int]


def _operation(name: str, kind: str, route: str) -> _Attributes:
    """Return the attributes of an operation, by OpenTelemetry's conventions."""
    return {
        "messaging.system": "eventbridge",
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
        "oncebridge.route": route,
    }


def _outcome(event: Event | Unreadable, outcome: Outcome) -> _Attributes:
    number = event.id if isinstance(event, Event) else None
    attributes: _Attributes = {
        "messaging.message.id": number[:_MOST_ID] if number else "",
        "messaging.message.body.size": len(event.raw),
        "oncebridge.verdict": outcome.verdict.value,
        "oncebridge.rule": outcome.rule,
        "oncebridge.key": outcome.key.hex()[:_KEY_DIGITS],
        "oncebridge.reason": outcome.reason,
        "oncebridge.unprotected": outcome.unprotected,
    }
    return {name: value for name, value in attributes.items() if value}


def _in_event(event: Event | Unreadable) -> str:
    """Return the context in the event: at the top level, or in its detail."""
    if _NAME_BYTES not in event.raw or isinstance(event, Unreadable):
        return ""
    found = read_traceparent(event.envelope.get(NAME))
    return found or read_traceparent(event.detail.get(NAME))


def _context(traceparent: str) -> Context:
    """Return a context with *traceparent* as the parent."""
    _, trace_id, span_id, flags = traceparent.split("-")
    parent = SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16))
    )
    return set_span_in_context(NonRecordingSpan(parent), Context())


def _written(span: Span) -> str:
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    sampled = context.trace_flags & TraceFlags.SAMPLED
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{sampled:02x}"
