"""Overview: health, rates, duplicates by cause, routes, durations, store and workers."""

import asyncio
import shlex
from typing import Any, Final
from weakref import WeakKeyDictionary

from msgspec import Struct

from oncebridge.base.formatting import format_list, printable
from oncebridge.dashboard import charts, health
from oncebridge.dashboard.data import DashboardData
from oncebridge.dashboard.dead_letters import open_dead_letters
from oncebridge.dashboard.health import DeadLetterCount, HealthSummary, Kind
from oncebridge.dashboard.page import PageRequest, PageResponse, PageRoute, TemplatePage
from oncebridge.dashboard.rates import Durations, RateTracker, Totals, durations, totals
from oncebridge.dashboard.rendering import seconds
from oncebridge.dead_letters.api import DeadLetters
from oncebridge.engine.causes import MEANINGS, Cause
from oncebridge.engine.router import UNROUTED
from oncebridge.engine.verdict import Verdict
from oncebridge.errors import OncebridgeError, StoreError
from oncebridge.observe.counts import LAGS, SECONDS, Counts, Histogram, RouteCounts, added
from oncebridge.observe.fleet import FleetView, is_silent, present
from oncebridge.observe.metric_families import CALLS
from oncebridge.observe.report import Report, RouteState, State, StoreHealth
from oncebridge.service.addresses import scheme_of
from oncebridge.service.monitor import mode_of

_MOST_LETTERS: Final = 100
_LETTERS_LAST_S: Final = 4.0
_LETTERS_WITHIN_S: Final = 2.0
_VIEW_WITHIN_S: Final = 5.0
_NOISIEST: Final = 8
_MOST_LOST: Final = 20
_FEW: Final = 50
"""The counts of up to this many workers are added up on the event loop."""
_PIECE: Final = 10
_MOST_BYTES: Final = 8 * 1024 * 1024
"""Dead letters are counted by reading them, up to this many bytes."""
_FIRST_EVENT: Final = (
    '{"version":"0","id":"my-first-event","source":"com.example","detail-type":"Hello",'
    '"detail":{"who":"me"}}'
)


class _OverviewCache:
    """Kept between two requests for the overview."""

    def __init__(self) -> None:
        self.tracker = RateTracker()
        self._letters = DeadLetterCount()
        self._counted: tuple[float, int] | None = None
        """When dead letters were counted, and how many events had died by then."""
        self._counting = asyncio.Lock()

    async def letters(self, data: DashboardData, view: FleetView) -> DeadLetterCount:
        """Count the dead letters, at most every few seconds unless another event has died."""
        counted = [view.past, *(report.counts for report in view.reports)]
        routes = [route for counts in counted for route in counts.routes.values()]
        died = sum(route.books.get(Verdict.DEAD, 0) for route in routes)
        if scheme_of(data.setup.config.dead.url) == "sqs":
            # Listing a queue receives its messages and hides them from other readers.
            return DeadLetterCount(died)
        async with self._counting:
            now_s = asyncio.get_running_loop().time()
            at_s, before = self._counted or (0.0, -1)
            if died != before or now_s - at_s > _LETTERS_LAST_S:
                self._letters = await _count(data)
                self._counted = now_s, died
        return self._letters


_caches: WeakKeyDictionary[DashboardData, _OverviewCache] = WeakKeyDictionary()


async def _count(data: DashboardData) -> DeadLetterCount:
    try:
        async with asyncio.timeout(_LETTERS_WITHIN_S):
            count, more = await _counted(await open_dead_letters(data))
    except OncebridgeError as error:
        return DeadLetterCount(problem=str(error))
    except TimeoutError:
        return DeadLetterCount(problem="no answer in time")
    return DeadLetterCount(min(count, _MOST_LETTERS), more or count > _MOST_LETTERS)


async def _counted(dead: DeadLetters) -> tuple[int, bool]:
    """Return the number of dead letters read, and whether there may be more."""
    count = size = after = 0
    while count <= _MOST_LETTERS and size < _MOST_BYTES:
        piece = await dead.list(after=after, limit=_PIECE)
        count += len(piece)
        if len(piece) < _PIECE:
            return count, False
        after = piece[-1].number
        size += sum([len(letter.raw) for letter in piece])
    return count, True


async def _show(data: DashboardData, _ask: PageRequest) -> PageResponse:
    cache = _caches.setdefault(data, _OverviewCache())
    view, problem = await _read_view(data)
    if view is None:
        values = {"health": health.store_away(problem), "view": None}
        return TemplatePage("overview.html", values)
    cache.tracker.observe(view)
    found = health.of(
        view,
        cache.tracker,
        await cache.letters(data, view),
        history_is_off=mode_of(data.setup.config) == "off",
        store_problem=problem,
    )
    rates, lately = cache.tracker.rates(), cache.tracker.durations()
    if len(view.reports) <= _FEW:
        return TemplatePage("overview.html", _laid_out(view, rates, lately, found))
    # Adding up the counts of many workers takes long enough to delay events.
    return TemplatePage(
        "overview.html", await asyncio.to_thread(_laid_out, view, rates, lately, found)
    )


async def _read_view(data: DashboardData) -> tuple[FleetView | None, str]:
    """Return all workers; if the store is unavailable, only this one, and the problem."""
    try:
        async with asyncio.timeout(_VIEW_WITHIN_S):
            return await data.view(), ""
    except StoreError as error:
        problem = str(error)
    except TimeoutError:
        problem = "it did not answer in time"
    if data.monitor is None:
        return None, problem
    own = data.monitor.report()
    offset_ms = own.state.store.clock_offset_ms or 0
    return FleetView([own], Counts(), own.state.at_ms + offset_ms), problem


ROUTES: Final = (PageRoute("GET", "/", _show),)


# --- content ------------------------------------------------------------------------------


class DurationRow(Struct, frozen=True):
    """Durations of one step."""

    name: str
    meaning: str
    count: int
    p50: str
    p95: str
    p99: str
    spread: str
    failed: int | None
    lately: bool
    """True if measured in the last minute; otherwise since counting began."""


class RouteRow(Struct, frozen=True):
    """One route, on all workers together."""

    name: str
    sinks: tuple[str, ...]
    modes: tuple[str, ...]
    arrived: int
    forwarded: int
    verdicts: tuple[tuple[str, int], ...]
    counters: tuple[tuple[str, int], ...]
    """Other counters, such as reasons for possible double deliveries."""
    settled: int
    in_flight: int
    kind: Kind
    state: str
    lost: int
    """Arrivals without a verdict, held by workers that disappeared."""
    balance: Kind
    balance_text: str


class WorkerRow(Struct, frozen=True):
    """One worker."""

    state: State
    in_flight: int
    kind: Kind
    status: str


def _laid_out(
    view: FleetView, rates: Totals, lately: Durations | None, found: HealthSummary
) -> dict[str, Any]:
    total = view.total
    hour = charts.last_hour(total.minutes, view.now_ms)
    causes = _causes(total)
    return {
        "health": found,
        "view": view,
        "rates": rates,
        "sums": totals(total),
        "hour": hour,
        "shown": [v for v in Verdict if any(v in minute.verdicts for minute in hour)],
        "chart": charts.over_time(hour) if any(minute.total for minute in hour) else [],
        "causes": causes,
        "repeats": sum(count for _, count, _, _ in causes),
        "lines": _lines(lately, durations(total)),
        "now": _now(view),
        "store": _store(view),
        "ways": _ways(view, total),
        "workers": [
            *(_worker_row(report, view.now_ms) for report in view.reports),
            *(WorkerRow(state, 0, "off", "disappeared") for state in health.lost(view)),
        ][: len(view.reports) + _MOST_LOST],
        "several_workers": len(view.reports) + len(view.gone) > 1,
        "routes": len(health.routes_of(view)),
        "topics": _topics(total),
        "entities": sorted(total.entities.items(), key=lambda pair: (-pair[1], pair[0]))[
            :_NOISIEST
        ],
        "first": _first_event(view) if found.word == health.READY else None,
    }


def _causes(total: Counts) -> list[tuple[str, int, str, str]]:
    """Return duplicates by cause (name, count, meaning and a bar), the most frequent first."""
    counted: dict[str, int] = {}
    for route in total.routes.values():
        counted = added(counted, route.causes)
    whole = max(counted.values(), default=0)
    meanings = {cause.value: MEANINGS[cause] for cause in Cause}
    return [
        (name, count, meanings.get(name, ""), charts.bar(count, whole, "v-duplicate"))
        for name, count in sorted(counted.items(), key=lambda pair: (-pair[1], pair[0]))
        if count
    ]


def _lines(lately: Durations | None, ever: Durations) -> list[DurationRow]:
    now = lately or Durations()
    found = [
        _line("Arrival to verdict", "total time in oncebridge", now.took, ever.took),
        _line(
            "Sink",
            "one call",
            now.sends,
            ever.sends,
            failed=(now.failed_sends, ever.failed_sends),
        ),
    ]
    none = Histogram()
    for call in [*CALLS, *sorted(ever.store.keys() - set(CALLS))]:
        if call in ever.store:
            before, after = ever.store[call], now.store.get(call)
            found.append(
                _line(
                    f"Store: {call}",
                    "one call",
                    after.took if after else none,
                    before.took,
                    failed=(after.failed if after else 0, before.failed),
                )
            )
    found.append(
        _line("Lag", "the age of events when they are delivered", now.lag, ever.lag, ends=LAGS)
    )
    return [line for line in found if line.count]


def _line(
    name: str,
    meaning: str,
    lately: Histogram,
    ever: Histogram,
    *,
    ends: tuple[float, ...] = SECONDS,
    failed: tuple[int, int] | None = None,
) -> DurationRow:
    is_now = lately.count > 0
    shown = lately if is_now else ever
    p50, p95, p99 = (_quantile(shown, part, ends) for part in (0.5, 0.95, 0.99))
    lost = failed[0 if is_now else 1] if failed else None
    bars = charts.spread(shown)
    return DurationRow(name, meaning, shown.count, p50, p95, p99, bars, lost, is_now)


def _quantile(found: Histogram, part: float, ends: tuple[float, ...]) -> str:
    value = found.quantile(part, ends)
    # Values above the last bucket have no upper bound.
    return f"> {seconds(value)}" if value == ends[-1] else seconds(value)


def _now(view: FleetView) -> dict[str, int | None]:
    here = present(view)
    routes = [route for state in here for route in state.routes.values()]
    return {
        "in_flight": sum(route.in_flight for route in routes),
        "owed": sum(route.owed for route in routes),
        "spooled": health.spooled(view),
        "workers": len(here),
    }


def _store(view: FleetView) -> StoreHealth:
    """Return the worst values that workers report of their shared store."""
    here = [state.store for state in present(view)]
    offsets = [one.clock_offset_ms for one in here if one.clock_offset_ms is not None]
    return StoreHealth(
        next((one.kind for one in here if one.kind), ""),
        all(one.answers for one in here),
        max((one.records for one in here if one.records is not None), default=None),
        max((one.bytes for one in here if one.bytes is not None), default=None),
        max((one.evicted for one in here if one.evicted is not None), default=None),
        max(offsets, key=abs) if offsets else None,
    )


def _ways(view: FleetView, total: Counts) -> list[RouteRow]:
    states = health.routes_of(view)
    names = sorted({*states, *total.routes} - {UNROUTED})
    names += [UNROUTED] if UNROUTED in total.routes else []
    return [
        _way(name, states.get(name, []), total.routes.get(name, RouteCounts())) for name in names
    ]


def _way(name: str, states: list[RouteState], counts: RouteCounts) -> RouteRow:
    books = counts.books
    verdicts = tuple((v.value, count) for v in Verdict if (count := books.get(v, 0)))
    settled = sum(count for _, count in verdicts)
    in_flight = sum(state.in_flight for state in states)
    kind, label = _state_of(name, states)
    is_balanced = all(state.balanced for state in states)
    return RouteRow(
        name,
        tuple(sorted({state.sink for state in states if state.sink})),
        tuple(sorted({state.mode for state in states})),
        books.get("arrived", 0),
        books.get("forwarded", 0),
        verdicts,
        tuple((name.replace("_", " "), books[name]) for name in health.COUNTERS if books.get(name)),
        settled,
        in_flight,
        kind,
        label,
        # A killed worker did not decide the events it held: they arrive again, and are counted again.
        max(books.get("arrived", 0) - settled - in_flight, 0) if is_balanced else 0,
        "good" if is_balanced else "bad",
        "yes" if is_balanced else "no",
    )


def _state_of(name: str, states: list[RouteState]) -> tuple[Kind, str]:
    """Return the state of a route: the worst that its workers report."""
    down = sorted({what for state in states for what in state.down})
    if down:
        return "bad", f"{' and '.join(what.removeprefix('the ') for what in down)} down"
    if any(state.paused for state in states):
        return "warn", "paused"
    if states:
        return "good", "open"
    return ("off", "no route matches") if name == UNROUTED else ("off", "no running worker")


def _worker_row(report: Report, now_ms: int) -> WorkerRow:
    state = report.state
    in_flight = sum(route.in_flight for route in state.routes.values())
    if state.ended:
        return WorkerRow(state, 0, "off", "stopped")
    if is_silent(report, now_ms):
        return WorkerRow(state, in_flight, "bad", "not reporting")
    if state.not_ready:
        return WorkerRow(
            state, in_flight, "warn", format_list([printable(why) for why in state.not_ready])
        )
    return WorkerRow(state, in_flight, "good", "running")


def _topics(total: Counts) -> list[tuple[str, dict[str, int]]]:
    def noise(pair: tuple[str, dict[str, int]]) -> tuple[int, int, str]:
        name, counted = pair
        return -counted.get("repeats", 0), -counted.get("arrived", 0), name

    return sorted(total.topics.items(), key=noise)[:_NOISIEST]


def _first_event(view: FleetView) -> dict[str, Any]:
    """Return how to send a first event: a command, if a source accepts HTTP."""
    sources = sorted({source for state in present(view) for source in state.sources})
    address = next((one for one in sources if one.startswith("http://")), "")
    header = "'Content-Type: application/json'"
    command = f"curl -H {header} -d {shlex.quote(_FIRST_EVENT)} {shlex.quote(address)}"
    return {"sources": sources, "command": command if address else ""}
