"""Workers that never were, for the pages that show them."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from oncebridge.engine.verdict import Verdict
from oncebridge.observe.counts import (
    ITEMS,
    LAGS,
    SECONDS,
    CallCounts,
    Counts,
    Histogram,
    RouteCounts,
)
from oncebridge.observe.fleet import FleetView
from oncebridge.observe.report import Report, RouteState, State, StoreHealth

NOW_MS = 1_767_225_600_000 + 37 * 60_000 + 21_000
"""Some Thursday, 37 minutes and 21 seconds after midnight, UTC."""
MINUTE = NOW_MS // 60_000


def histogram(values: Sequence[float], ends: Sequence[float]) -> Histogram:
    """Count *values* in."""
    found = Histogram([0] * (len(ends) + 1) if values else [], sum(values))
    for value in values:
        found.counts[bisect_left(ends, value)] += 1
    return found


def route(books: dict[str, int] | None = None, **more: Any) -> RouteCounts:
    """Count one route; it has as many arrivals as verdicts, unless *books* says otherwise."""
    books = {**dict.fromkeys([v.value for v in Verdict], 0), **(books or {})}
    settled = sum(books[verdict] for verdict in Verdict)
    return RouteCounts({"arrived": settled, "forwarded": books["delivered"], **books}, **more)


def state(name: str = "host-1-abc", **more: Any) -> State:
    """Describe one worker that is well."""
    given = {
        "host": "host",
        "pid": 1,
        "version": "0.1.0",
        "started_ms": NOW_MS - 3_600_000,
        "at_ms": NOW_MS - 1_000,
        "sources": ("http://127.0.0.1:8080/events",),
        "routes": {"crm": RouteState("https://crm.example.com/hooks/genesys")},
        "store": StoreHealth("sqlite", True, 1200, 400_000, None, 0),
        "history": 1,
    }
    return State(name=name, **{**given, **more})


def view(*reports: Report, past: Counts | None = None, now_ms: int = NOW_MS) -> FleetView:
    """Show *reports* as a store would."""
    return FleetView([*reports], past or Counts(), now_ms)


def busy() -> FleetView:
    """Two workers with a bit of everything."""
    minutes = {
        MINUTE - at: {
            "delivered": 240 + 40 * (at % 7),
            "duplicate": 90 + 25 * (at % 5),
            "stale": 12 * (at % 3),
            "unchanged": 7 * (at % 4),
            "failed": 60 if 20 <= at < 23 else 0,
            "dead": 2 if at == 31 else 0,
            "busy": at % 2,
        }
        for at in range(55)
    }
    times = [0.0008, 0.0021, 0.0032, 0.0041, 0.0055, 0.0078, 0.012, 0.019, 0.034, 0.21] * 900
    crm = route(
        {"delivered": 21_400, "duplicate": 8_210, "stale": 930, "failed": 180, "dead": 3},
        causes={
            "redelivery": 4_100,
            "re-emission": 2_900,
            "second-integration": 1_150,
            "replay": 60,
        },
        took=histogram(times, SECONDS),
        lag=histogram([t * 300 for t in times], LAGS),
        sends=histogram([t * 3 for t in times], SECONDS),
        sent_together=histogram([1, 4, 9, 30], ITEMS),
        failed_sends=41,
    )
    warehouse = route({"delivered": 9_000, "bypassed": 44, "conflict": 2, "discarded": 310})
    unrouted = route({"dead": 12})
    store = {
        "claim": CallCounts(histogram(times, SECONDS), failed=0),
        "commit": CallCounts(histogram([t * 0.7 for t in times], SECONDS), failed=2),
    }
    counts = Counts(
        {"crm": crm, "warehouse": warehouse, "unrouted": unrouted},
        store,
        minutes,
        {
            "v2.detail.events.conversation.{id}.acw": {"arrived": 9_120, "repeats": 3_800},
            "v2.users.{id}.presence": {"arrived": 14_200, "repeats": 2_610},
            "Order Placed": {"arrived": 4_100, "repeats": 12},
        },
        {f"8f6d{at}c1e-0b7a-4d1c-9a55-{at:012}": 40 - 5 * at for at in range(6)},
    )
    routes = {
        "crm": RouteState("https://crm.example.com/hooks/genesys", in_flight=3),
        "warehouse": RouteState("postgresql://warehouse.example.com/events?table=calls"),
    }
    first = state("worker-a-17-0c4fe1", routes=routes, spooled=12)
    second = state("worker-b-9-77aa01", routes=routes, host="b.example.com", at_ms=NOW_MS - 4_000)
    crm.books["arrived"] += 3
    return view(Report(first, counts), Report(second, Counts()))
