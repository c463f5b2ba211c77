"""
The health summary of the overview: one sentence, and the findings behind it.

A finding is bad if events are not delivered, or may be lost or delivered twice; a warning if the
operator should check something; a note otherwise. A counter that last rose long ago is a note, so
that the page does not stay red for ever.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal
from urllib.parse import urlencode

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.base.formatting import (
    HOUR,
    MINUTE,
    SECOND,
    format_count,
    format_elapsed,
    format_instant,
    format_list,
    printable,
)
from oncebridge.dashboard.rates import RateTracker, Totals
from oncebridge.dashboard.rendering import rate
from oncebridge.engine.verdict import Verdict
from oncebridge.observe.agreement import differences
from oncebridge.observe.counts import added
from oncebridge.observe.fleet import FleetView, here_ms, is_silent, present
from oncebridge.observe.report import RouteState, State

Kind = Literal["good", "warn", "bad", "note", "off"]
_Books = Mapping[str, Mapping[str, int]]
"""By route, as in `Books.counts`."""

RUNNING: Final = "Running"
ATTENTION: Final = "Needs attention"
NO_WORKERS: Final = "No workers running"
READY: Final = "Ready"
"""No finding, and no event has arrived yet."""
_CLOCK_MS: Final = 2 * SECOND
_LONGEST: Final = 80


class HealthFinding(Struct, frozen=True):
    """One thing that the operator should know."""

    kind: Kind
    text: str
    help: str = ""
    """What it means, or what to do."""
    href: str = ""
    link: str = ""


class HealthSummary(Struct, frozen=True):
    """The state of all workers in a sentence, with the findings."""

    kind: Kind
    word: str
    """In a word or two: `Running`, `Needs attention`."""
    text: str
    findings: tuple[HealthFinding, ...] = ()


class DeadLetterCount(Struct, frozen=True):
    """How many dead letters there are, if that is known."""

    count: int = 0
    more: bool = False
    problem: str = ""
    """Why the number is not known."""


def of(
    view: FleetView,
    tracker: RateTracker,
    letters: DeadLetterCount,
    *,
    history_is_off: bool = False,
    store_problem: str = "",
) -> HealthSummary:
    """Judge the workers' reports; *store_problem*: why only this process's report is known."""
    books = _books(view)
    found = [
        *([_away(store_problem)] if store_problem else []),
        *_workers(view),
        *_gone(view),
        *_differences(view),
        *_routes(view, tracker, books),
        *_spool(view, tracker),
        *_stores(view, tracker),
        *_dead(letters),
        *_counters(books, tracker),
    ]
    if history_is_off:
        found.append(
            HealthFinding(
                "note",
                "History is off, so Decisions has nothing to show.",
                'Set history = "sample" or "all".',
                "/decisions",
                "Decisions",
            )
        )
    order = {"bad": 0, "warn": 1, "note": 2}
    found.sort(key=lambda one: order.get(one.kind, 3))
    return _sentence(view, books, tracker.rates(), tuple(found))


def _books(view: FleetView) -> dict[str, dict[str, int]]:
    """Add up the books of each route."""
    found: dict[str, dict[str, int]] = {}
    for counts in [view.past, *(report.counts for report in view.reports)]:
        for name, route in counts.routes.items():
            found[name] = added(found.get(name, {}), route.books)
    return found


def store_away(problem: str) -> HealthSummary:
    """Return the summary for a store that does not answer."""
    return HealthSummary("bad", ATTENTION, "The store cannot be reached.", (_away(problem),))


def _away(problem: str) -> HealthFinding:
    return HealthFinding(
        "bad",
        f"The store cannot be reached: {printable(problem, 300).removesuffix('.')}.",
        "Workers return events to their sources while the store is unavailable, unless "
        "on_store_outage says otherwise; no event is lost. Other workers' reports are in the store.",
    )


# --- the sentence -------------------------------------------------------------------------


def _sentence(
    view: FleetView, books: _Books, rates: Totals, findings: tuple[HealthFinding, ...]
) -> HealthSummary:
    bad = [one for one in findings if one.kind == "bad"]
    warned = [one for one in findings if one.kind == "warn"]
    if not view.reports:
        return HealthSummary("off", "No workers yet", "No worker has reported.", findings)
    if all(report.state.ended for report in view.reports):
        last_ms = max(report.state.at_ms - here_ms(report, view.now_ms) for report in view.reports)
        text = f"Last one stopped {_rounded(-last_ms)} ago."
        return HealthSummary("off", NO_WORKERS, text, findings)
    if not present(view):
        return HealthSummary("bad", NO_WORKERS, _joined_texts(bad + warned), findings)
    if bad:
        return HealthSummary("bad", ATTENTION, _joined_texts(bad + warned), findings)
    speed = _speed(view, rates)
    if warned:
        return HealthSummary("warn", RUNNING, f"{_joined_texts(warned)} {speed}", findings)
    if not any(route.get("arrived") for route in books.values()) and not spooled(view):
        return HealthSummary("good", READY, "No events received yet.", findings)
    return HealthSummary("good", RUNNING, speed, findings)


def _joined_texts(findings: Iterable[HealthFinding]) -> str:
    texts = [f"{one.text.removesuffix('.')}." for one in findings]
    more = [f"And {len(texts) - 3} more."] if len(texts) > 3 else []
    return " ".join([*texts[:3], *more])


def _rounded(ms: int) -> str:
    return format_elapsed(round(ms / SECOND) * SECOND) if ms >= SECOND else format_elapsed(ms)


def _speed(view: FleetView, rates: Totals) -> str:
    if not rates.arrived:
        # A spooled event counts as an arrival only when it is read from disk.
        return f"No events {'left the spool' if spooled(view) else 'received'} in the last minute."
    modes = {route.mode for state in present(view) for route in state.routes.values()}
    found = "dropped"
    if "shadow" in modes:
        found = "found and delivered (shadow mode)" if modes == {"shadow"} else "found"
    routes = len(routes_of(view))
    came = f"arrivals/s on {routes:,} routes" if routes > 1 else "events/s received"
    text = (
        f"{rate(rates.arrived)} {came}, {rate(rates.forwarded)}/s delivered, "
        f"{rate(rates.repeats)}/s duplicates {found}"
    )
    return f"{text}, {rate(rates.failing)}/s failed." if rates.failing else f"{text}."


# --- findings -----------------------------------------------------------------------------


def routes_of(view: FleetView) -> dict[str, list[RouteState]]:
    """Return what the running workers report of each route."""
    states: dict[str, list[RouteState]] = {}
    for state in present(view):
        for name, route in state.routes.items():
            states.setdefault(name, []).append(route)
    return states


def spooled(view: FleetView) -> int | None:
    """Return how many arrivals are in the spool; None without a spool."""
    found = [state.spooled for state in present(view) if state.spooled is not None]
    return sum(found) if found else None


def lost(view: FleetView) -> list[State]:
    """Return workers that vanished without reporting that they end; the latest first."""
    found = [report.state for report in view.gone if not report.state.ended]
    return sorted(found, key=lambda state: (-state.at_ms, state.name))


def _workers(view: FleetView) -> Iterator[HealthFinding]:
    silent = [report for report in view.reports if is_silent(report, view.now_ms)]
    working = [one for one in view.reports if not one.state.ended and one not in silent]
    for report in silent:
        elapsed = format_elapsed(here_ms(report, view.now_ms) - report.state.at_ms)
        yield HealthFinding(
            "warn" if working else "bad",
            f"Worker {_named(report.state.name)} has not reported for {elapsed}.",
            "It was killed, hangs, or cannot reach the store. Events it held are redelivered when "
            "their leases end.",
            "#workers",
            "Workers",
        )
    for report in working:
        # These are findings of routes; this one is about the whole worker.
        known = ("paused", "the sink is down", "the store is down")
        reasons = [why for why in report.state.not_ready if why not in known]
        if reasons:
            why = format_list([printable(reason) for reason in reasons])
            yield HealthFinding(
                "warn" if reasons == ["shutting down"] else "bad",
                f"Worker {_named(report.state.name)} is not ready: {why}.",
                "",
                "#workers",
                "Workers",
            )


def _gone(view: FleetView) -> Iterator[HealthFinding]:
    names = [state.name for state in lost(view) if view.now_ms - state.at_ms < HOUR]
    if names:
        yield HealthFinding(
            "warn",
            f"W{_workers_named(names)[1:]} disappeared.",
            "Probably killed, in the last hour. Events it held were redelivered when their leases ended.",
            "#workers",
            "Workers",
        )


def _differences(view: FleetView) -> Iterator[HealthFinding]:
    for found in differences(view):
        text = f"{found.seen[:1].upper()}{found.seen[1:]}."
        yield HealthFinding("warn", text, f"{found.why} {found.fix}", "#workers", "Workers")


def _routes(view: FleetView, tracker: RateTracker, books: _Books) -> Iterator[HealthFinding]:
    states = routes_of(view)
    has_spool = spooled(view) is not None
    all_paused = all(state.paused for here in states.values() for state in here)
    for route, here in sorted(states.items()):
        yield from _down(route, here, tracker, has_spool=has_spool)
        yield from _paused(route, here, all_paused=all_paused, has_spool=has_spool)
        yield from _unbalanced(route, here, books.get(route, {}))
        yield from _owed(route, here)


def _down(
    route: str, states: list[RouteState], tracker: RateTracker, *, has_spool: bool
) -> Iterator[HealthFinding]:
    kept = (
        "Events received by HTTP wait on disk"
        if has_spool
        else "Events are returned to their source"
    )
    for what, meaning in (
        ("the sink", f"{kept}{'' if has_spool else ' and retried'}; no event is lost."),
        ("the store", f"{kept} unless on_store_outage says otherwise."),
    ):
        down = [state for state in states if what in state.down]
        since_ms = tracker.since_ms(f"{what} {route}", lasts=bool(down))
        if not down:
            continue
        told_ms = tracker.now_ms - since_ms
        lasts = f" for at least {format_elapsed(told_ms)}" if told_ms >= 5 * SECOND else ""
        part = f", for {len(down)} of {len(states)} workers" if len(down) < len(states) else ""
        # While a route is paused nothing is tried, so its time means something else.
        again_s = min((state.down_for_s for state in down if not state.paused), default=0.0)
        again = f"Next try in {format_elapsed(round(again_s * 1000))}. " if again_s else ""
        yield HealthFinding(
            "bad",
            f"{what.capitalize()} of route {_named(route)} is down{lasts}{part}.",
            f"{again}{meaning}",
            _search(route=route, verdict=Verdict.FAILED),
            "Failed events",
        )


def _paused(
    route: str, states: list[RouteState], *, all_paused: bool, has_spool: bool
) -> Iterator[HealthFinding]:
    kept = (
        "events received by HTTP wait on disk"
        if has_spool
        else "events are returned to their source"
    )
    if any(state.paused for state in states):
        yield HealthFinding(
            "bad" if all_paused else "warn",
            f"Route {_named(route)} is paused.",
            f"Nothing is delivered until you resume it (oncebridge resume); {kept}.",
            "#routes",
            "Routes",
        )


def _unbalanced(
    route: str, states: list[RouteState], books: Mapping[str, int]
) -> Iterator[HealthFinding]:
    if all(state.balanced for state in states):
        return
    settled = sum(books.get(verdict, 0) for verdict in Verdict)
    in_flight = sum(state.in_flight for state in states)
    yield HealthFinding(
        "bad",
        f"The books of route {_named(route)} do not balance: {books.get('arrived', 0):,} arrived, "
        f"{settled:,} have a verdict, {in_flight:,} are in flight.",
        "This should never happen. Please report it.",
        "#routes",
        "Routes",
    )


def _owed(route: str, states: list[RouteState]) -> Iterator[HealthFinding]:
    if owed := sum(state.owed for state in states):
        yield HealthFinding(
            "warn",
            f"{format_count(owed, 'delivery', 'deliveries')} of route {_named(route)} could not be "
            "recorded in the store yet.",
            "If the worker dies before that, these events may be delivered again.",
            "#routes",
            "Routes",
        )


def _spool(view: FleetView, tracker: RateTracker) -> Iterator[HealthFinding]:
    """Report events in the spool, unless they leave it as fast as they arrive."""
    waiting = spooled(view) or 0
    since_ms = tracker.since_ms("spool", lasts=waiting > 0)
    is_held = any(
        route.paused or route.down
        for state in present(view)
        if state.spooled
        for route in state.routes.values()
    )
    if is_held or (waiting and tracker.now_ms - since_ms >= MINUTE):
        yield HealthFinding(
            "warn" if is_held else "note",
            f"{format_count(waiting, 'event waits', 'events wait')} on disk.",
            "Their senders got a success response. They are delivered as soon as the route is "
            "resumed or the sink and the store are available again."
            if is_held
            else "The spool was not empty for a minute: events arrive at least as fast as they "
            "are delivered, or the sink refuses some of them.",
            "#store",
            "Spool",
        )


def _stores(view: FleetView, tracker: RateTracker) -> Iterator[HealthFinding]:
    here = present(view)
    mute = [state.name for state in here if not state.store.answers]
    if mute:
        yield HealthFinding(
            "bad",
            f"The store did not answer {_workers_named(mute)}.",
            "",
            "#store",
            "Store",
        )
    offset_ms = max((state.store.clock_offset_ms or 0 for state in here), key=abs, default=0)
    if abs(offset_ms) > _CLOCK_MS:
        ahead = "ahead of" if offset_ms > 0 else "behind"
        yield HealthFinding(
            "warn",
            f"The store's clock is {format_elapsed(abs(offset_ms))} {ahead} a worker's.",
            "Deduplication uses the store's clock only and is not affected, but displayed times may be "
            "wrong. Check the time service (NTP) of the hosts.",
            "#store",
            "Store",
        )
    lost_ms = max((state.store.records_lost_ms for state in here), default=0)
    if lost_ms:
        yield HealthFinding(
            "warn",
            f"The store lost its records; noticed at {format_instant(lost_ms)} UTC.",
            "Events that were delivered before may be delivered again. Deliveries count as "
            "unprotected until the windows of their rules have passed.",
            "#store",
            "Store",
        )
    evicted = max((state.store.evicted or 0 for state in here), default=0)
    finding = HealthFinding(
        "bad",
        f"The store's server evicted {format_count(evicted, 'record')} to free memory.",
        "These events may be delivered again. Add memory, or set the policy to noeviction.",
        "#store",
        "Store",
    )
    yield from _counter("evicted", evicted, tracker, finding)


def _dead(letters: DeadLetterCount) -> Iterator[HealthFinding]:
    if letters.problem:
        yield HealthFinding(
            "warn",
            f"The dead letters cannot be read: {printable(letters.problem, 200)}",
            "",
            "/dead",
        )
    elif letters.count:
        many = f"More than {letters.count:,} dead letters" if letters.more else ""
        yield HealthFinding(
            "warn",
            f"{many or format_count(letters.count, 'dead letter')} "
            f"{'needs' if letters.count == 1 and not letters.more else 'need'} attention.",
            "They are kept until you replay or drop them.",
            "/dead",
            "Dead letters",
        )


COUNTERS: Final[Mapping[str, tuple[Kind, str, str, str]]] = {
    "forgotten": (
        "bad",
        "commit was given up: too many were waiting for the store",
        "commits were given up: too many were waiting for the store",
        "These events were delivered, and may be delivered again.",
    ),
    "unprotected": (
        "warn",
        "event was delivered unprotected",
        "events were delivered unprotected",
        'on_store_outage = "deliver", or the store lost its records. They may be delivered twice.',
    ),
    "ambiguous": (
        "warn",
        "send ended without a clear answer",
        "sends ended without a clear answer",
        "A timeout, a broken connection or an error. The event may have arrived, and was retried.",
    ),
    "unwell": (
        "note",
        "send was answered with 502, 503 or 504",
        "sends were answered with 502, 503 or 504",
        "The event may have arrived, and was retried.",
    ),
    "retried": (
        "note",
        "event was claimed again after an earlier attempt",
        "events were claimed again after an earlier attempt",
        "The attempt before failed, or its worker was killed and may have delivered it already.",
    ),
    "acked_uncommitted": (
        "warn",
        "event was acknowledged before its delivery was recorded",
        "events were acknowledged before their delivery was recorded",
        "The store was slow or unavailable. A crash at that moment could have duplicated them.",
    ),
    "late_commits": (
        "warn",
        "delivery was recorded after its lease had ended",
        "deliveries were recorded after their lease had ended",
        "Another worker could have claimed them meanwhile. Use a longer lease.",
    ),
    "registers_behind": (
        "warn",
        "newest state could not be recorded",
        "newest states could not be recorded",
        "An older state of the same entity may be delivered later.",
    ),
    "stale_runs": (
        "warn",
        "entity has had many stale events in a row",
        "entities have had many stale events in a row",
        "Its newest version may be wrong: the log line oncebridge.stale_run names the entity.",
    ),
    "lease_lost": (
        "warn",
        "event was claimed by another worker",
        "events were claimed by another worker",
        "A worker was frozen or disconnected for longer than its lease. Both may have delivered it.",
    ),
}
"""By the name in the books: severity while it rises, singular, plural, and meaning."""


def _counters(books: _Books, tracker: RateTracker) -> Iterator[HealthFinding]:
    for name, (kind, one, several, meaning) in COUNTERS.items():
        value = sum(route.get(name, 0) for route in books.values())
        finding = HealthFinding(
            kind, f"{format_count(value, one, several)}.", meaning, "#routes", "Routes"
        )
        yield from _counter(name, value, tracker, finding)


def _counter(
    name: str, value: int, tracker: RateTracker, finding: HealthFinding
) -> Iterator[HealthFinding]:
    """Yield *finding* while its counter rises, and a note afterwards."""
    rises = tracker.rose_lately(name, value)
    if rises:
        yield replace(finding, help=f"{finding.help} It rose in the last 15 minutes.")
    elif value:
        yield replace(
            finding, kind="note", help=f"{finding.help} None in the last 15 minutes, as seen here."
        )


def _named(name: str) -> str:
    return printable(name, _LONGEST)


def _workers_named(names: list[str]) -> str:
    listed = format_list([_named(name) for name in names], most=3)
    return f"worker {listed}" if len(names) == 1 else f"workers {listed}"


def _search(**values: str) -> str:
    return f"/decisions?{urlencode(values)}"
