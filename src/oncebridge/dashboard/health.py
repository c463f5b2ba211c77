"""
What needs somebody, and one sentence that says how it goes.

A finding is bad where events do not pass or may be lost or repeated, a warning where somebody
should look, and a note where it is good to know. What was only ever counted long ago is a note:
a page that is red for ever is a page that nobody looks at.
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
from oncebridge.dashboard.rates import Pulse, Sums
from oncebridge.dashboard.rendering import rate
from oncebridge.engine.verdict import Verdict
from oncebridge.observe.agreement import differences
from oncebridge.observe.counts import added
from oncebridge.observe.fleet import View, here_ms, is_silent, present
from oncebridge.observe.report import RouteState, State

Kind = Literal["good", "warn", "bad", "note", "off"]
_Books = Mapping[str, Mapping[str, int]]
"""By route, as in `Books.counts`."""

READY: Final = "Ready"
"""Nothing is wrong, and nothing has come yet."""
_CLOCK_MS: Final = 2 * SECOND
_LONGEST: Final = 80


class Finding(Struct, frozen=True):
    """One thing that somebody should know."""

    kind: Kind
    text: str
    help: str = ""
    """What it means, or what to do."""
    href: str = ""
    link: str = ""


class Health(Struct, frozen=True):
    """How it goes."""

    kind: Kind
    word: str
    """In a word: `Working`, `Needs you`."""
    text: str
    findings: tuple[Finding, ...] = ()


class Letters(Struct, frozen=True):
    """How many dead letters there are, as far as is known."""

    count: int = 0
    more: bool = False
    problem: str = ""
    """Why that is not known."""


def of(
    view: View,
    pulse: Pulse,
    letters: Letters,
    *,
    history_is_off: bool = False,
    store_problem: str = "",
) -> Health:
    """Judge what the workers tell; *store_problem* says why only one of them could be asked."""
    books = _books(view)
    found = [
        *([_away(store_problem)] if store_problem else []),
        *_workers(view),
        *_gone(view),
        *_differences(view),
        *_routes(view, pulse, books),
        *_spool(view, pulse),
        *_stores(view, pulse),
        *_dead(letters),
        *_counters(books, pulse),
    ]
    if history_is_off:
        found.append(
            Finding(
                "note",
                "No history is kept, so Decisions has nothing to show.",
                'Set history = "sample" or "all".',
                "/decisions",
                "Decisions",
            )
        )
    order = {"bad": 0, "warn": 1, "note": 2}
    found.sort(key=lambda one: order.get(one.kind, 3))
    return _sentence(view, books, pulse.rates(), tuple(found))


def _books(view: View) -> dict[str, dict[str, int]]:
    """Add up the books of each route, without all the rest that is counted."""
    found: dict[str, dict[str, int]] = {}
    for counts in [view.past, *(report.counts for report in view.reports)]:
        for name, route in counts.routes.items():
            found[name] = added(found.get(name, {}), route.books)
    return found


def store_away(problem: str) -> Health:
    """Say that nothing can be told."""
    return Health("bad", "Needs you", "the store cannot be reached.", (_away(problem),))


def _away(problem: str) -> Finding:
    return Finding(
        "bad",
        f"The store cannot be reached: {printable(problem, 300).removesuffix('.')}.",
        "Workers hand events back while it is away, unless on_store_outage says otherwise; "
        "nothing is lost. What other workers tell is read from the store as well.",
    )


# --- the sentence -------------------------------------------------------------------------


def _sentence(view: View, books: _Books, rates: Sums, findings: tuple[Finding, ...]) -> Health:
    bad = [one for one in findings if one.kind == "bad"]
    warned = [one for one in findings if one.kind == "warn"]
    if not view.reports:
        return Health("off", "Nobody works yet", "no worker has reported.", findings)
    if all(report.state.ended for report in view.reports):
        last_ms = max(report.state.at_ms - here_ms(report, view.now_ms) for report in view.reports)
        text = f"the last worker stopped {format_elapsed(-last_ms)} ago."
        return Health("off", "Nobody works", text, findings)
    if not present(view):
        return Health("bad", "Nobody works", _told(bad + warned), findings)
    if bad:
        return Health("bad", "Needs you", _told(bad + warned), findings)
    told = _speed(view, rates)
    if warned:
        return Health("warn", "Working, but look", f"{_told(warned)} {told}", findings)
    if not any(route.get("arrived") for route in books.values()) and not spooled(view):
        return Health("good", READY, "No event has arrived yet.", findings)
    return Health("good", "Working", told, findings)


def _told(findings: Iterable[Finding]) -> str:
    texts = [one.text.removesuffix(".") for one in findings]
    first = [text[:1].lower() + text[1:] for text in texts[:3]]
    more = f"; and {len(texts) - 3} more" if len(texts) > 3 else ""
    return f"{'; '.join(first)}{more}."


def _speed(view: View, rates: Sums) -> str:
    if not rates.arrived:
        # What is on disk has come, and counts as an arrival when it is taken up.
        return f"Nothing {'left the disk' if spooled(view) else 'arrived'} in the last minute."
    modes = {route.mode for state in present(view) for route in state.routes.values()}
    found = "stopped"
    if "shadow" in modes:
        found = "found, and passed on in shadow mode" if modes == {"shadow"} else "found"
    routes = len(routes_of(view))
    came = f"arrivals/s on {routes:,} routes" if routes > 1 else "events/s in"
    told = (
        f"{rate(rates.arrived)} {came}, {rate(rates.forwarded)}/s passed on, "
        f"{rate(rates.repeats)}/s repeats {found}"
    )
    return f"{told}, {rate(rates.failing)}/s failing." if rates.failing else f"{told}."


# --- what there is to find ----------------------------------------------------------------


def routes_of(view: View) -> dict[str, list[RouteState]]:
    """Tell of each route what the workers that run say of it."""
    states: dict[str, list[RouteState]] = {}
    for state in present(view):
        for name, route in state.routes.items():
            states.setdefault(name, []).append(route)
    return states


def spooled(view: View) -> int | None:
    """Return how many arrivals wait on disk; None where there is no spool."""
    found = [state.spooled for state in present(view) if state.spooled is not None]
    return sum(found) if found else None


def lost(view: View) -> list[State]:
    """Tell of those that went long ago and did not say so; the latest first."""
    found = [report.state for report in view.gone if not report.state.ended]
    return sorted(found, key=lambda state: (-state.at_ms, state.name))


def _workers(view: View) -> Iterator[Finding]:
    silent = [report for report in view.reports if is_silent(report, view.now_ms)]
    working = [one for one in view.reports if not one.state.ended and one not in silent]
    for report in silent:
        told = format_elapsed(here_ms(report, view.now_ms) - report.state.at_ms)
        yield Finding(
            "warn" if working else "bad",
            f"Worker {_named(report.state.name)} has not reported for {told}.",
            "It was killed, hangs, or cannot reach the store. What it held comes again when its "
            "leases end.",
            "#workers",
            "Workers",
        )
    for report in working:
        # What is told of a route is found there; this is about the whole worker.
        known = ("paused", "the sink is down", "the store is down")
        reasons = [why for why in report.state.not_ready if why not in known]
        if reasons:
            why = format_list([printable(reason) for reason in reasons])
            yield Finding(
                "warn" if reasons == ["shutting down"] else "bad",
                f"Worker {_named(report.state.name)} takes no events: {why}.",
                "",
                "#workers",
                "Workers",
            )


def _gone(view: View) -> Iterator[Finding]:
    names = [state.name for state in lost(view) if view.now_ms - state.at_ms < HOUR]
    if names:
        yield Finding(
            "warn",
            f"W{_workers_named(names)[1:]} {'is' if len(names) == 1 else 'are'} gone without a word.",
            "Killed, most likely, in the last hour. What was held came again when its leases ended.",
            "#workers",
            "Workers",
        )


def _differences(view: View) -> Iterator[Finding]:
    for found in differences(view):
        text = f"{found.seen[:1].upper()}{found.seen[1:]}."
        yield Finding("warn", text, f"{found.why} {found.fix}", "#workers", "Workers")


def _routes(view: View, pulse: Pulse, books: _Books) -> Iterator[Finding]:
    states = routes_of(view)
    has_spool = spooled(view) is not None
    all_paused = all(state.paused for here in states.values() for state in here)
    for route, here in sorted(states.items()):
        yield from _down(route, here, pulse, has_spool=has_spool)
        yield from _paused(route, here, all_paused=all_paused, has_spool=has_spool)
        yield from _unbalanced(route, here, books.get(route, {}))
        yield from _owed(route, here)


def _down(
    route: str, states: list[RouteState], pulse: Pulse, *, has_spool: bool
) -> Iterator[Finding]:
    kept = "What comes by HTTP waits on disk" if has_spool else "Events are handed back"
    for what, meaning in (
        ("the sink", f"{kept}{'' if has_spool else ' and come again'}; none is lost."),
        ("the store", f"{kept} unless on_store_outage says otherwise."),
    ):
        down = [state for state in states if what in state.down]
        since_ms = pulse.since_ms(f"{what} {route}", lasts=bool(down))
        if not down:
            continue
        told_ms = pulse.now_ms - since_ms
        lasts = f" for at least {format_elapsed(told_ms)}" if told_ms >= 5 * SECOND else ""
        part = f", for {len(down)} of {len(states)} workers" if len(down) < len(states) else ""
        # While a route is paused nothing is tried, and the time says something else.
        again_s = min((state.down_for_s for state in down if not state.paused), default=0.0)
        again = f"It is tried again in {format_elapsed(round(again_s * 1000))}. " if again_s else ""
        yield Finding(
            "bad",
            f"{what.capitalize()} of route {_named(route)} is down{lasts}{part}.",
            f"{again}{meaning}",
            _search(route=route, verdict=Verdict.FAILED),
            "What failed",
        )


def _paused(
    route: str, states: list[RouteState], *, all_paused: bool, has_spool: bool
) -> Iterator[Finding]:
    kept = "what comes by HTTP waits on disk" if has_spool else "events are handed back"
    if any(state.paused for state in states):
        yield Finding(
            "bad" if all_paused else "warn",
            f"Route {_named(route)} is paused.",
            f"Nothing passes until somebody resumes it (oncebridge resume); {kept}.",
            "#routes",
            "Routes",
        )


def _unbalanced(
    route: str, states: list[RouteState], books: Mapping[str, int]
) -> Iterator[Finding]:
    if all(state.balanced for state in states):
        return
    settled = sum(books.get(verdict, 0) for verdict in Verdict)
    in_flight = sum(state.in_flight for state in states)
    yield Finding(
        "bad",
        f"The books of route {_named(route)} do not balance: {books.get('arrived', 0):,} arrived, "
        f"{settled:,} have a verdict, {in_flight:,} are in flight.",
        "This should never happen. Please report it.",
        "#routes",
        "Routes",
    )


def _owed(route: str, states: list[RouteState]) -> Iterator[Finding]:
    if owed := sum(state.owed for state in states):
        yield Finding(
            "warn",
            f"{format_count(owed, 'delivery', 'deliveries')} of route {_named(route)} could not be "
            "recorded in the store yet.",
            "If the worker dies before that, they may be passed on once more.",
            "#routes",
            "Routes",
        )


def _spool(view: View, pulse: Pulse) -> Iterator[Finding]:
    """Return what waits on disk; what leaves it as fast as it comes is no news."""
    waiting = spooled(view) or 0
    since_ms = pulse.since_ms("spool", lasts=waiting > 0)
    is_held = any(
        route.paused or route.down
        for state in present(view)
        if state.spooled
        for route in state.routes.values()
    )
    if is_held or (waiting and pulse.now_ms - since_ms >= MINUTE):
        yield Finding(
            "warn" if is_held else "note",
            f"{format_count(waiting, 'arrival waits', 'arrivals wait')} on disk.",
            "Their senders have been told that they are kept. They pass on when what holds them "
            "is over."
            if is_held
            else "The disk was not seen empty for a minute: they come as fast as they pass on, "
            "or faster, or the sink does not take some of them.",
            "#store",
            "Spool",
        )


def _stores(view: View, pulse: Pulse) -> Iterator[Finding]:
    here = present(view)
    mute = [state.name for state in here if not state.store.answers]
    if mute:
        yield Finding(
            "bad",
            f"The store did not answer {_workers_named(mute)}.",
            "",
            "#store",
            "Store",
        )
    offset_ms = max((state.store.clock_offset_ms or 0 for state in here), key=abs, default=0)
    if abs(offset_ms) > _CLOCK_MS:
        ahead = "ahead of" if offset_ms > 0 else "behind"
        yield Finding(
            "warn",
            f"The store's clock is {format_elapsed(abs(offset_ms))} {ahead} a worker's.",
            "Windows go by the store's clock, so nothing is let through by it; but times that are "
            "shown may be off. Look at the hosts' time service.",
            "#store",
            "Store",
        )
    lost_ms = max((state.store.records_lost_ms for state in here), default=0)
    if lost_ms:
        yield Finding(
            "warn",
            f"The store lost its records; this was noticed at {format_instant(lost_ms)} UTC.",
            "Events that were delivered before may be delivered once more. Deliveries count as "
            "unprotected until the windows of their rules are over.",
            "#store",
            "Store",
        )
    evicted = max((state.store.evicted or 0 for state in here), default=0)
    finding = Finding(
        "bad",
        f"The store's server has thrown out {format_count(evicted, 'record')} for want of room.",
        'Events whose record is gone may pass again. Give it memory, or "noeviction".',
        "#store",
        "Store",
    )
    yield from _counter("evicted", evicted, pulse, finding)


def _dead(letters: Letters) -> Iterator[Finding]:
    if letters.problem:
        yield Finding(
            "warn",
            f"The dead letters cannot be read: {printable(letters.problem, 200)}",
            "",
            "/dead",
        )
    elif letters.count:
        told = f"More than {letters.count:,} dead letters" if letters.more else ""
        yield Finding(
            "warn",
            f"{told or format_count(letters.count, 'dead letter')} "
            f"{'waits' if letters.count == 1 and not letters.more else 'wait'} for you.",
            "They are kept whole until somebody replays or drops them.",
            "/dead",
            "Dead letters",
        )


COUNTERS: Final[Mapping[str, tuple[Kind, str, str, str]]] = {
    "forgotten": (
        "bad",
        "commit was given up, as too many waited for the store",
        "commits were given up, as too many waited for the store",
        "These events were delivered, and may be delivered once more.",
    ),
    "unprotected": (
        "warn",
        "event was delivered unprotected",
        "events were delivered unprotected",
        'on_store_outage = "deliver", or the store lost its records. They may have gone twice.',
    ),
    "ambiguous": (
        "warn",
        "send ended without a clear answer",
        "sends ended without a clear answer",
        "A timeout, a broken connection or an error. What may have arrived was sent again.",
    ),
    "unwell": (
        "note",
        "send was answered with 502, 503 or 504",
        "sends were answered with 502, 503 or 504",
        "The event may have arrived, and was sent again.",
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
        "The store was slow or away. A crash at that moment could have repeated them.",
    ),
    "late_commits": (
        "warn",
        "delivery was recorded after its lease had ended",
        "deliveries were recorded after their lease had ended",
        "Another worker could have taken them meanwhile. A longer lease helps.",
    ),
    "registers_behind": (
        "warn",
        "newest state could not be written down",
        "newest states could not be written down",
        "An older state of the same entity may pass later.",
    ),
    "stale_runs": (
        "warn",
        "entity has had many stale events in a row",
        "entities have had many stale events in a row",
        "Its newest version may be wrong: the log line oncebridge.stale_run names the entity.",
    ),
    "lease_lost": (
        "warn",
        "event was taken over by another worker",
        "events were taken over by another worker",
        "A worker was frozen or cut off for longer than its lease. Both may have delivered it.",
    ),
}
"""By the name in the books: how bad it is while it rises, one, several, and what it means."""


def _counters(books: _Books, pulse: Pulse) -> Iterator[Finding]:
    for name, (kind, one, several, meaning) in COUNTERS.items():
        value = sum(route.get(name, 0) for route in books.values())
        finding = Finding(
            kind, f"{format_count(value, one, several)}.", meaning, "#routes", "Routes"
        )
        yield from _counter(name, value, pulse, finding)


def _counter(name: str, value: int, pulse: Pulse, finding: Finding) -> Iterator[Finding]:
    """Return what is found as it is while its counter rises, and as a note afterwards."""
    rises = pulse.rose_lately(name, value)
    if rises:
        yield replace(finding, help=f"{finding.help} It rose in the last minutes.")
    elif value:
        yield replace(finding, kind="note", help=f"{finding.help} None lately, as seen here.")


def _named(name: str) -> str:
    return printable(name, _LONGEST)


def _workers_named(names: list[str]) -> str:
    told = format_list([_named(name) for name in names], most=3)
    return f"worker {told}" if len(names) == 1 else f"workers {told}"


def _search(**values: str) -> str:
    return f"/decisions?{urlencode(values)}"
