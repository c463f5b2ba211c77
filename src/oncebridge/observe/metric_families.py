"""
All metrics, defined once for Prometheus and OpenTelemetry.

A family is one metric: its name, meaning, and values by label values. Families are made from a
`Report` on each scrape; nothing here runs for each event.

The number of label values is bounded (routes, rules, verdicts, causes, kinds of calls), and of the
rules of a route only so many have their own series. Every series of a route exists from the start
with 0: for Prometheus, a series that first appears as 1 has not increased.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final, Literal

from msgspec import Struct

from oncebridge.engine.causes import Cause
from oncebridge.engine.verdict import Verdict
from oncebridge.observe.counts import ITEMS, LAGS, SECONDS, CallCounts, Histogram, RouteCounts
from oncebridge.observe.report import Report, RouteState, StoreHealth

MOST_RULES: Final = 200
"""The most rules of a route that have their own series; the rest is counted as `OTHER`."""
OTHER: Final = "other"
DEFAULT: Final = "default"
"""The rule label of events that no rule matched; it always has its own series."""
NO_RULE: Final = "none"
"""The rule label if no rule was applied: not an event, or the worker was stopping."""

COUNTED: Final[Mapping[str, str]] = {
    "forwarded": "Events that the sink accepted.",
    "retried": "Claims of events that were tried before: an earlier attempt may have arrived.",
    "ambiguous": "Sends without a clear response: the event may have arrived.",
    "throttled": "Sends that the sink throttled (HTTP 429 or the like).",
    "unwell": "Sends that the sink answered with HTTP 502, 503 or 504.",
    "late_commits": "Deliveries recorded after their lease had ended: possible duplicates.",
    "acked_uncommitted": "Deliveries acknowledged to the source before they could be recorded.",
    "fenced_commits": "Commits refused because the key had been claimed anew, in a later generation.",
    "registers_behind": "Newest states that could not be recorded: an older one may be delivered later.",
    "stale_runs": "Entities with many stale events in a row: their newest version may be wrong.",
    "lease_lost": "Events that two workers held because a lease ended: both may have delivered them.",
    "unprotected": "Events delivered while the store was down or had lost its records: possible duplicates.",
    "store_errors": "Calls that the store did not answer.",
    "forgotten": "Deliveries that were never recorded because too many waited for the store.",
}
"""The counters of `Books` other than arrivals and verdicts."""

CALLS: Final = ("claim", "commit", "release", "extend", "remember")
"""The store calls of event processing."""

_CAUSES: Final = tuple(cause.value for cause in Cause)
_VERDICTS: Final = tuple(verdict.value for verdict in Verdict)

Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal["", "seconds", "bytes"]
Labels = tuple[str, ...]


class Family(Struct, frozen=True):
    """One metric, with its values by label values."""

    name: str
    """Without the suffixes that Prometheus adds for unit and type."""
    kind: Kind
    help: str
    labels: Labels = ()
    unit: Unit = ""
    numbers: Sequence[tuple[Labels, float]] = ()
    """Values of a counter or gauge."""
    histograms: Sequence[tuple[Labels, Histogram]] = ()
    ends: Sequence[float] = ()
    """The upper bounds of the histogram's buckets."""


def cumulative(histogram: Histogram, ends: Sequence[float]) -> list[int]:
    """Return cumulative counts by upper bound; the last is the total."""
    return list(accumulate(histogram.fitted(ends)))


def families(report: Report) -> list[Family]:
    """Return all metrics of a worker's report."""
    states, counts = report.state.routes, report.counts
    routes = list(dict.fromkeys([*states, *counts.routes]))
    by_route = {route: counts.routes.get(route, RouteCounts()) for route in routes}
    return [
        *_flow(by_route, states),
        *_durations(by_route),
        *_calls(counts.store),
        *_states(states),
        *_store(report.state.store),
        *_worker(report),
    ]


# --- counters -------------------------------------------------------------------------------


def _flow(
    by_route: Mapping[str, RouteCounts], states: Mapping[str, RouteState]
) -> Iterable[Family]:
    yield Family(
        "arrivals",
        "counter",
        "Arrivals of events; each redelivery counts.",
        ("route",),
        numbers=[((route,), one.books.get("arrived", 0)) for route, one in by_route.items()],
    )
    yield Family(
        "verdicts",
        "counter",
        "Arrivals by verdict; summed over rules and verdicts, as many as arrivals.",
        ("route", "rule", "verdict"),
        numbers=[
            ((route, rule, verdict), number)
            for route, one in by_route.items()
            for rule, verdicts in _by_rule(one, states.get(route, RouteState())).items()
            for verdict, number in zip(_VERDICTS, verdicts, strict=True)
        ],
    )
    yield Family(
        "repeats",
        "counter",
        "Arrivals that were not the first of their kind (duplicate, stale, unchanged, reused id), by cause.",
        ("route", "cause"),
        numbers=[
            ((route, cause), number)
            for route, one in by_route.items()
            for cause, number in _by_cause(one.causes).items()
        ],
    )
    for name, meaning in COUNTED.items():
        numbers = [((route,), one.books.get(name, 0)) for route, one in by_route.items()]
        yield Family(name, "counter", meaning, ("route",), numbers=numbers)


def _by_rule(counts: RouteCounts, state: RouteState) -> dict[str, list[int]]:
    """Return the verdicts of each rule, in the order of `Verdict`."""
    names = dict.fromkeys([*state.rules, *filter(None, counts.rules)])
    # By position, not by count: a rule must not lose its series to a busier one.
    own = [name for name in names if name != DEFAULT][:MOST_RULES]
    own += [name for name in names if name == DEFAULT]
    found = {rule: [0] * len(_VERDICTS) for rule in [*own, NO_RULE]}
    known = frozenset(own)
    for rule, verdicts in counts.rules.items():
        name = rule if rule in known else OTHER if rule else NO_RULE
        sums = found.setdefault(name, [0] * len(_VERDICTS))
        for at, verdict in enumerate(_VERDICTS):
            sums[at] += verdicts.get(verdict, 0)
    # Arrivals that were cancelled before a rule was applied are in the books only.
    for at, verdict in enumerate(_VERDICTS):
        counted = sum([sums[at] for sums in found.values()])
        found[NO_RULE][at] += max(counts.books.get(verdict, 0) - counted, 0)
    return found


def _by_cause(causes: Mapping[str, int]) -> dict[str, int]:
    found = dict.fromkeys(_CAUSES, 0)
    for cause, number in causes.items():
        found[cause if cause in found else Cause.UNKNOWN.value] += number
    return found


# --- durations ------------------------------------------------------------------------------


def _durations(by_route: Mapping[str, RouteCounts]) -> Iterable[Family]:
    yield Family(
        "decision",
        "histogram",
        "From an arrival to its verdict, delivery included.",
        ("route",),
        "seconds",
        histograms=[((route,), one.took) for route, one in by_route.items()],
        ends=SECONDS,
    )
    yield Family(
        "event_lag",
        "histogram",
        "From the time in the event to its delivery.",
        ("route",),
        "seconds",
        histograms=[((route,), one.lag) for route, one in by_route.items()],
        ends=LAGS,
    )
    yield Family(
        "sink_call",
        "histogram",
        "Duration of calls to the sink.",
        ("route",),
        "seconds",
        histograms=[((route,), one.sends) for route, one in by_route.items()],
        ends=SECONDS,
    )
    yield Family(
        "sink_call_events",
        "histogram",
        "Events per call to the sink.",
        ("route",),
        histograms=[((route,), one.sent_together) for route, one in by_route.items()],
        ends=ITEMS,
    )
    yield Family(
        "sink_call_failed",
        "counter",
        "Calls to the sink in which not every event was accepted.",
        ("route",),
        numbers=[((route,), one.failed_sends) for route, one in by_route.items()],
    )


def _calls(by_call: Mapping[str, CallCounts]) -> Iterable[Family]:
    calls = {call: by_call.get(call, CallCounts()) for call in CALLS}
    for call in by_call.keys() - calls.keys():
        calls[OTHER] = calls.get(OTHER, CallCounts()) + by_call[call]
    yield Family(
        "store_call",
        "histogram",
        "Duration of calls to the store.",
        ("call",),
        "seconds",
        histograms=[((call,), one.took) for call, one in calls.items()],
        ends=SECONDS,
    )
    yield Family(
        "store_call_items",
        "histogram",
        "Events or keys per call to the store.",
        ("call",),
        histograms=[((call,), one.together) for call, one in calls.items()],
        ends=ITEMS,
    )
    yield Family(
        "store_call_failed",
        "counter",
        "Calls to the store without a response.",
        ("call",),
        numbers=[((call,), one.failed) for call, one in calls.items()],
    )


# --- gauges ---------------------------------------------------------------------------------


def _states(states: Mapping[str, RouteState]) -> Iterable[Family]:
    def gauge(name: str, meaning: str, numbers: Iterable[float]) -> Family:
        labelled = [((route,), number) for route, number in zip(states, numbers, strict=True)]
        return Family(name, "gauge", meaning, ("route",), numbers=labelled)

    now = states.values()
    yield gauge("in_flight", "Events in flight.", [one.in_flight for one in now])
    meaning = "Deliveries that could not be recorded in the store yet."
    yield gauge("owed_commits", meaning, [one.owed for one in now])
    meaning = "1: the sink accepted events at the last try; 0: it is down."
    yield gauge("sink_up", meaning, ["the sink" not in one.down for one in now])
    meaning = "1: the store answered at the last try; 0: it is down."
    yield gauge("store_up", meaning, ["the store" not in one.down for one in now])
    meaning = "1: an operator has paused the route."
    yield gauge("paused", meaning, [one.paused for one in now])
    meaning = "1: every arrival has a verdict or is in flight; 0: a bug, please report it."
    yield gauge("books_balanced", meaning, [one.balanced for one in now])


def _store(store_health: StoreHealth) -> Iterable[Family]:
    meaning = "1: the store answered the last health check."
    yield Family("store_answers", "gauge", meaning, numbers=[((), store_health.answers)])
    meaning = "1: the store lost its records within the longest window: possible duplicates."
    yield Family(
        "store_records_lost", "gauge", meaning, numbers=[((), store_health.records_lost_ms > 0)]
    )
    if store_health.records is not None:
        meaning = "Records in the store, possibly estimated."
        yield Family("store_records", "gauge", meaning, numbers=[((), store_health.records)])
    if store_health.bytes is not None:
        meaning = "Size of the store."
        yield Family("store", "gauge", meaning, unit="bytes", numbers=[((), store_health.bytes)])
    if store_health.evicted is not None:
        meaning = "Records that the store's server evicted to free memory."
        yield Family("store_evicted", "counter", meaning, numbers=[((), store_health.evicted)])
    if store_health.clock_offset_ms is not None:
        offset = store_health.clock_offset_ms / 1000
        yield Family(
            "store_clock_offset",
            "gauge",
            "The store's clock minus this host's clock.",
            unit="seconds",
            numbers=[((), offset)],
        )


def _worker(report: Report) -> Iterable[Family]:
    state = report.state
    if state.spooled is not None:
        meaning = "Events in the spool, waiting to be delivered."
        yield Family("spool_records", "gauge", meaning, numbers=[((), state.spooled)])
    meaning = "1: ready to receive events; 0: not ready, as at /readyz."
    yield Family("ready", "gauge", meaning, numbers=[((), not state.not_ready)])
    yield Family(
        "start_time",
        "gauge",
        "Start time of this worker, in seconds since 1970.",
        unit="seconds",
        numbers=[((), state.started_ms / 1000)],
    )
    meaning = "Always 1; the label is the version of oncebridge."
    numbers = [((state.version,), 1)]
    yield Family("build_info", "gauge", meaning, ("version",), numbers=numbers)
