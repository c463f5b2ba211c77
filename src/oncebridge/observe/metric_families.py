"""
All that is measured, named once, for whoever writes it down.

A family is one measure: its name, what it means, and its numbers, each under the values of its
labels. They are made from a `Report` when somebody asks; nothing here is done while events pass.

Labels are few by nature (routes, rules, verdicts, causes, kinds of calls), and of the rules of
one route only so many have a number of their own. What belongs to a route is there from the
start, as a nought: a number that first appears as 1 has never risen, for Prometheus.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final, Literal

from msgspec import Struct

from oncebridge.engine.causes import Cause
from oncebridge.engine.verdict import Verdict
from oncebridge.observe.counts import ITEMS, LAGS, SECONDS, CallCounts, Histogram, RouteCounts
from oncebridge.observe.report import Report, RouteState, Vitals

MOST_RULES: Final = 200
"""So many rules of a route have numbers of their own; the rest is counted as `OTHER`."""
OTHER: Final = "other"
DEFAULT: Final = "default"
"""What stands for a rule where none matched; it has a number of its own in any case."""
NO_RULE: Final = "none"
"""What stands for a rule where there was none: no event, or no verdict of a rule."""

COUNTED: Final[Mapping[str, str]] = {
    "forwarded": "Events that the sink said yes to.",
    "retried": "Claims of events that were tried before: an earlier attempt may have arrived.",
    "ambiguous": "Sends without a clear answer: the event may have been taken.",
    "throttled": "Sends that the sink refused because there were too many.",
    "unwell": "Sends that the sink answered with its own trouble (HTTP 502, 503, 504).",
    "late_commits": "Deliveries recorded after their lease had ended: they may have repeated.",
    "acked_uncommitted": "Deliveries acknowledged to the source before they could be recorded.",
    "fenced_commits": "Records refused because somebody else had started the event anew.",
    "registers_behind": "Newest states that could not be recorded: an older one may pass later.",
    "stale_runs": "Entities with many stale events in a row: their newest version may be wrong.",
    "lease_lost": "Events that two workers held, as a lease ended too early: both may have sent them.",
    "unprotected": "Events sent while the store was down or after it lost its records: may repeat.",
    "store_errors": "Calls that the store did not answer.",
    "forgotten": "Deliveries whose record was given up, as too many waited for the store.",
}
"""What `Books` counts besides arrivals and verdicts, by its names there."""

CALLS: Final = ("claim", "commit", "release", "extend", "remember")
"""What the store is asked while events pass."""

_CAUSES: Final = tuple(cause.value for cause in Cause)
_VERDICTS: Final = tuple(verdict.value for verdict in Verdict)

Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal["", "seconds", "bytes"]
Labels = tuple[str, ...]


class Family(Struct, frozen=True):
    """One measure, and its numbers by the values of its labels."""

    name: str
    """Without what Prometheus adds for unit and kind."""
    kind: Kind
    help: str
    labels: Labels = ()
    unit: Unit = ""
    numbers: Sequence[tuple[Labels, float]] = ()
    """Of a counter or a gauge."""
    histograms: Sequence[tuple[Labels, Histogram]] = ()
    ends: Sequence[float] = ()
    """Of histograms: the upper ends of their buckets."""


def cumulative(histogram: Histogram, ends: Sequence[float]) -> list[int]:
    """Count for each end how many values are not above it; the last place is for all."""
    return list(accumulate(histogram.fitted(ends)))


def families(report: Report) -> list[Family]:
    """Tell all that a worker has measured."""
    states, counts = report.state.routes, report.counts
    routes = list(dict.fromkeys([*states, *counts.routes]))
    told = {route: counts.routes.get(route, RouteCounts()) for route in routes}
    return [
        *_flow(told, states),
        *_durations(told),
        *_calls(counts.store),
        *_states(states),
        *_store(report.state.store),
        *_worker(report),
    ]


# --- what passed ----------------------------------------------------------------------------


def _flow(told: Mapping[str, RouteCounts], states: Mapping[str, RouteState]) -> Iterable[Family]:
    yield Family(
        "arrivals",
        "counter",
        "Events that came, each time they came.",
        ("route",),
        numbers=[((route,), one.books.get("arrived", 0)) for route, one in told.items()],
    )
    yield Family(
        "verdicts",
        "counter",
        "What became of arrivals; of all routes and rules together, as many as there were.",
        ("route", "rule", "verdict"),
        numbers=[
            ((route, rule, verdict), number)
            for route, one in told.items()
            for rule, verdicts in _by_rule(one, states.get(route, RouteState())).items()
            for verdict, number in zip(_VERDICTS, verdicts, strict=True)
        ],
    )
    yield Family(
        "repeats",
        "counter",
        "Arrivals that were not the first of their kind, by why they came again.",
        ("route", "cause"),
        numbers=[
            ((route, cause), number)
            for route, one in told.items()
            for cause, number in _by_cause(one.causes).items()
        ],
    )
    for name, meaning in COUNTED.items():
        numbers = [((route,), one.books.get(name, 0)) for route, one in told.items()]
        yield Family(name, "counter", meaning, ("route",), numbers=numbers)


def _by_rule(counts: RouteCounts, state: RouteState) -> dict[str, list[int]]:
    """Return the verdicts of each rule, in the order of `Verdict`."""
    names = dict.fromkeys([*state.rules, *filter(None, counts.rules)])
    # By place, not by number: a rule must not lose its series to a busier one.
    own = [name for name in names if name != DEFAULT][:MOST_RULES]
    own += [name for name in names if name == DEFAULT]
    found = {rule: [0] * len(_VERDICTS) for rule in [*own, NO_RULE]}
    known = frozenset(own)
    for rule, verdicts in counts.rules.items():
        name = rule if rule in known else OTHER if rule else NO_RULE
        sums = found.setdefault(name, [0] * len(_VERDICTS))
        for at, verdict in enumerate(_VERDICTS):
            sums[at] += verdicts.get(verdict, 0)
    # What was broken off before any rule was asked is in the books only.
    for at, verdict in enumerate(_VERDICTS):
        told = sum([sums[at] for sums in found.values()])
        found[NO_RULE][at] += max(counts.books.get(verdict, 0) - told, 0)
    return found


def _by_cause(causes: Mapping[str, int]) -> dict[str, int]:
    found = dict.fromkeys(_CAUSES, 0)
    for cause, number in causes.items():
        found[cause if cause in found else Cause.UNKNOWN.value] += number
    return found


# --- how long it took -----------------------------------------------------------------------


def _durations(told: Mapping[str, RouteCounts]) -> Iterable[Family]:
    yield Family(
        "decision",
        "histogram",
        "From an arrival to its verdict, delivery included.",
        ("route",),
        "seconds",
        histograms=[((route,), one.took) for route, one in told.items()],
        ends=SECONDS,
    )
    yield Family(
        "event_lag",
        "histogram",
        "From the time that an event bears to its delivery.",
        ("route",),
        "seconds",
        histograms=[((route,), one.lag) for route, one in told.items()],
        ends=LAGS,
    )
    yield Family(
        "sink_call",
        "histogram",
        "How long calls of the sink took.",
        ("route",),
        "seconds",
        histograms=[((route,), one.sends) for route, one in told.items()],
        ends=SECONDS,
    )
    yield Family(
        "sink_call_events",
        "histogram",
        "How many events a call of the sink was for.",
        ("route",),
        histograms=[((route,), one.sent_together) for route, one in told.items()],
        ends=ITEMS,
    )
    yield Family(
        "sink_call_failed",
        "counter",
        "Calls of the sink after which not every event was taken.",
        ("route",),
        numbers=[((route,), one.failed_sends) for route, one in told.items()],
    )


def _calls(told: Mapping[str, CallCounts]) -> Iterable[Family]:
    calls = {call: told.get(call, CallCounts()) for call in CALLS}
    for call in told.keys() - calls.keys():
        calls[OTHER] = calls.get(OTHER, CallCounts()) + told[call]
    yield Family(
        "store_call",
        "histogram",
        "How long calls of the store took.",
        ("call",),
        "seconds",
        histograms=[((call,), one.took) for call, one in calls.items()],
        ends=SECONDS,
    )
    yield Family(
        "store_call_items",
        "histogram",
        "For how many events or keys a call of the store was.",
        ("call",),
        histograms=[((call,), one.together) for call, one in calls.items()],
        ends=ITEMS,
    )
    yield Family(
        "store_call_failed",
        "counter",
        "Calls of the store without an answer.",
        ("call",),
        numbers=[((call,), one.failed) for call, one in calls.items()],
    )


# --- how it is right now --------------------------------------------------------------------


def _states(states: Mapping[str, RouteState]) -> Iterable[Family]:
    def gauge(name: str, meaning: str, numbers: Iterable[float]) -> Family:
        labelled = [((route,), number) for route, number in zip(states, numbers, strict=True)]
        return Family(name, "gauge", meaning, ("route",), numbers=labelled)

    now = states.values()
    yield gauge("in_flight", "Events that are under way.", [one.in_flight for one in now])
    meaning = "Deliveries that could not be recorded in the store yet."
    yield gauge("owed_commits", meaning, [one.owed for one in now])
    meaning = "1: the sink took events when it was last tried; 0: it is down."
    yield gauge("sink_up", meaning, ["the sink" not in one.down for one in now])
    meaning = "1: the store answered when it was last tried; 0: it is down."
    yield gauge("store_up", meaning, ["the store" not in one.down for one in now])
    meaning = "1: an operator has paused the route."
    yield gauge("paused", meaning, [one.paused for one in now])
    meaning = "1: every arrival has a verdict or is under way; 0: a bug, please report it."
    yield gauge("books_balanced", meaning, [one.balanced for one in now])


def _store(vitals: Vitals) -> Iterable[Family]:
    meaning = "1: the store answered when it was last asked how it is."
    yield Family("store_answers", "gauge", meaning, numbers=[((), vitals.answers)])
    meaning = "1: the store lost its records within the longest window, so events may repeat."
    yield Family("store_records_lost", "gauge", meaning, numbers=[((), vitals.records_lost_ms > 0)])
    if vitals.records is not None:
        meaning = "Records in the store, or about how many."
        yield Family("store_records", "gauge", meaning, numbers=[((), vitals.records)])
    if vitals.bytes is not None:
        meaning = "How large the store is."
        yield Family("store", "gauge", meaning, unit="bytes", numbers=[((), vitals.bytes)])
    if vitals.evicted is not None:
        meaning = "Records that the store's server threw out for want of room."
        yield Family("store_evicted", "counter", meaning, numbers=[((), vitals.evicted)])
    if vitals.clock_offset_ms is not None:
        offset = vitals.clock_offset_ms / 1000
        yield Family(
            "store_clock_offset",
            "gauge",
            "The store's clock less this host's.",
            unit="seconds",
            numbers=[((), offset)],
        )


def _worker(report: Report) -> Iterable[Family]:
    state = report.state
    if state.spooled is not None:
        meaning = "Arrivals that wait on disk to be forwarded."
        yield Family("spool_records", "gauge", meaning, numbers=[((), state.spooled)])
    meaning = "1: events are taken; 0: they are not, as at /readyz."
    yield Family("ready", "gauge", meaning, numbers=[((), not state.not_ready)])
    yield Family(
        "start_time",
        "gauge",
        "When this worker was started, since 1970.",
        unit="seconds",
        numbers=[((), state.started_ms / 1000)],
    )
    meaning = "Always 1; the label tells the version of oncebridge."
    numbers = [((state.version,), 1)]
    yield Family("build_info", "gauge", meaning, ("version",), numbers=numbers)
