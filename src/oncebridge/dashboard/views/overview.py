"""Overview: is it working, what is dropped and why, what needs me."""

import asyncio
import shlex
from typing import Any, Final
from weakref import WeakKeyDictionary

from msgspec import Struct

from oncebridge.base.formatting import format_list, printable
from oncebridge.dashboard import charts, health
from oncebridge.dashboard.data import Desk
from oncebridge.dashboard.dead_letters import opened
from oncebridge.dashboard.health import Health, Kind, Letters
from oncebridge.dashboard.page import Answer, Ask, Route, Shown
from oncebridge.dashboard.rates import Pulse, Sums, Times, sums, times
from oncebridge.dashboard.rendering import seconds
from oncebridge.dead_letters.api import DeadLetters
from oncebridge.engine.causes import MEANINGS, Cause
from oncebridge.engine.router import UNROUTED
from oncebridge.engine.verdict import Verdict
from oncebridge.errors import OncebridgeError, StoreError
from oncebridge.observe.counts import LAGS, SECONDS, Counts, Histogram, RouteCounts, added
from oncebridge.observe.fleet import View, is_silent, present
from oncebridge.observe.report import Report, RouteState, State, Vitals
from oncebridge.service.addresses import scheme_of
from oncebridge.service.monitor import mode_of

_MOST_LETTERS: Final = 100
_LETTERS_LAST_S: Final = 4.0
_LETTERS_WITHIN_S: Final = 2.0
_VIEW_WITHIN_S: Final = 5.0
_NOISIEST: Final = 8
_MOST_LOST: Final = 20
_FEW: Final = 50
"""The counts of so many workers are added up in no time."""
_PIECE: Final = 10
_MOST_BYTES: Final = 8 * 1024 * 1024
"""Letters are counted by reading them, and no more than that is read."""
_CALLS: Final = ("claim", "commit", "release", "extend", "remember")
_FIRST_EVENT: Final = (
    '{"version":"0","id":"my-first-event","source":"com.example","detail-type":"Hello",'
    '"detail":{"who":"me"}}'
)


class _Kept:
    """What is kept between two looks at one desk."""

    def __init__(self) -> None:
        self.pulse = Pulse()
        self._letters = Letters()
        self._counted: tuple[float, int] | None = None
        """When letters were counted, and how many events had died by then."""
        self._counting = asyncio.Lock()

    async def letters(self, desk: Desk, view: View) -> Letters:
        """Count the dead letters: now and then, and when another event has died."""
        counted = [view.past, *(report.counts for report in view.reports)]
        routes = [route for counts in counted for route in counts.routes.values()]
        died = sum(route.books.get(Verdict.DEAD, 0) for route in routes)
        if scheme_of(desk.setup.config.dead.url) == "sqs":
            # To look at a queue is to receive from it, which others would notice.
            return Letters(died)
        async with self._counting:
            now_s = asyncio.get_running_loop().time()
            at_s, before = self._counted or (0.0, -1)
            if died != before or now_s - at_s > _LETTERS_LAST_S:
                self._letters = await _count(desk)
                self._counted = now_s, died
        return self._letters


_kept: WeakKeyDictionary[Desk, _Kept] = WeakKeyDictionary()


async def _count(desk: Desk) -> Letters:
    try:
        async with asyncio.timeout(_LETTERS_WITHIN_S):
            count, more = await _counted(await opened(desk))
    except OncebridgeError as error:
        return Letters(problem=str(error))
    except TimeoutError:
        return Letters(problem="there was no answer in time")
    return Letters(min(count, _MOST_LETTERS), more or count > _MOST_LETTERS)


async def _counted(dead: DeadLetters) -> tuple[int, bool]:
    """Count letters, and tell whether there may be more: no more are read than have to be."""
    count = size = after = 0
    while count <= _MOST_LETTERS and size < _MOST_BYTES:
        piece = await dead.list(after=after, limit=_PIECE)
        count += len(piece)
        if len(piece) < _PIECE:
            return count, False
        after = piece[-1].number
        size += sum([len(letter.raw) for letter in piece])
    return count, True


async def _show(desk: Desk, _ask: Ask) -> Answer:
    kept = _kept.setdefault(desk, _Kept())
    view, problem = await _look(desk)
    if view is None:
        values = {"health": health.store_away(problem), "view": None}
        return Shown("overview.html", values)
    kept.pulse.observe(view)
    found = health.of(
        view,
        kept.pulse,
        await kept.letters(desk, view),
        history_is_off=mode_of(desk.setup.config) == "off",
        store_problem=problem,
    )
    rates, lately = kept.pulse.rates(), kept.pulse.times()
    if len(view.reports) <= _FEW:
        return Shown("overview.html", _laid_out(view, rates, lately, found))
    # To add up what very many workers have counted takes its time, and events come first.
    return Shown("overview.html", await asyncio.to_thread(_laid_out, view, rates, lately, found))


async def _look(desk: Desk) -> tuple[View | None, str]:
    """See all workers; where the store is away, the one here, and what is wrong."""
    try:
        async with asyncio.timeout(_VIEW_WITHIN_S):
            return await desk.view(), ""
    except StoreError as error:
        problem = str(error)
    except TimeoutError:
        problem = "it did not answer in time"
    if desk.monitor is None:
        return None, problem
    own = desk.monitor.report()
    offset_ms = own.state.store.clock_offset_ms or 0
    return View([own], Counts(), own.state.at_ms + offset_ms), problem


ROUTES: Final = (Route("GET", "/", _show),)


# --- what the page shows ------------------------------------------------------------------


class Line(Struct, frozen=True):
    """How long something takes."""

    name: str
    meaning: str
    count: int
    p50: str
    p95: str
    p99: str
    spread: str
    failed: int | None
    lately: bool
    """It is of the last minute; otherwise of all time."""


class Way(Struct, frozen=True):
    """One route, on all workers together."""

    name: str
    sinks: tuple[str, ...]
    modes: tuple[str, ...]
    arrived: int
    forwarded: int
    verdicts: tuple[tuple[str, int], ...]
    counters: tuple[tuple[str, int], ...]
    """What else was counted: why events may have been delivered twice, and the like."""
    settled: int
    in_flight: int
    kind: Kind
    state: str
    lost: int
    """Arrivals without a verdict that were with workers that are gone."""
    balance: Kind
    balance_text: str


class Hand(Struct, frozen=True):
    """One worker."""

    state: State
    in_flight: int
    kind: Kind
    told: str


def values_of(view: View, pulse: Pulse, found: Health) -> dict[str, Any]:
    """Lay out all that the template shows."""
    return _laid_out(view, pulse.rates(), pulse.times(), found)


def _laid_out(view: View, rates: Sums, lately: Times | None, found: Health) -> dict[str, Any]:
    total = view.total
    hour = charts.last_hour(total.minutes, view.now_ms)
    causes = _causes(total)
    return {
        "health": found,
        "view": view,
        "rates": rates,
        "sums": sums(total),
        "hour": hour,
        "shown": [v for v in Verdict if any(v in minute.verdicts for minute in hour)],
        "chart": charts.over_time(hour) if any(minute.total for minute in hour) else [],
        "causes": causes,
        "repeats": sum(count for _, count, _, _ in causes),
        "lines": _lines(lately, times(total)),
        "now": _now(view),
        "store": _store(view),
        "ways": _ways(view, total),
        "hands": [
            *(_hand(report, view.now_ms) for report in view.reports),
            *(Hand(state, 0, "off", "gone without a word") for state in health.lost(view)),
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
    """Count the repeats by cause: name, count, meaning and a bar; the most frequent first."""
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


def _lines(lately: Times | None, ever: Times) -> list[Line]:
    now = lately or Times()
    found = [
        _line("Arrival to verdict", "all of it, in oncebridge", now.took, ever.took),
        _line(
            "Sink",
            "one call",
            now.sends,
            ever.sends,
            failed=(now.failed_sends, ever.failed_sends),
        ),
    ]
    none = Histogram()
    for call in [*_CALLS, *sorted(ever.store.keys() - set(_CALLS))]:
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
        _line("Lag", "how old events are when they are delivered", now.lag, ever.lag, ends=LAGS)
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
) -> Line:
    is_now = lately.count > 0
    shown = lately if is_now else ever
    p50, p95, p99 = (_quantile(shown, part, ends) for part in (0.5, 0.95, 0.99))
    lost = failed[0 if is_now else 1] if failed else None
    bars = charts.spread(shown)
    return Line(name, meaning, shown.count, p50, p95, p99, bars, lost, is_now)


def _quantile(found: Histogram, part: float, ends: tuple[float, ...]) -> str:
    value = found.quantile(part, ends)
    # A histogram does not know how far above its last end something was.
    return f"> {seconds(value)}" if value == ends[-1] else seconds(value)


def _now(view: View) -> dict[str, int | None]:
    here = present(view)
    routes = [route for state in here for route in state.routes.values()]
    return {
        "in_flight": sum(route.in_flight for route in routes),
        "owed": sum(route.owed for route in routes),
        "spooled": health.spooled(view),
        "workers": len(here),
    }


def _store(view: View) -> Vitals:
    """Return the worst of what the workers say of the store that they share."""
    here = [state.store for state in present(view)]
    offsets = [one.clock_offset_ms for one in here if one.clock_offset_ms is not None]
    return Vitals(
        next((one.kind for one in here if one.kind), ""),
        all(one.answers for one in here),
        max((one.records for one in here if one.records is not None), default=None),
        max((one.bytes for one in here if one.bytes is not None), default=None),
        max((one.evicted for one in here if one.evicted is not None), default=None),
        max(offsets, key=abs) if offsets else None,
    )


def _ways(view: View, total: Counts) -> list[Way]:
    states = health.routes_of(view)
    names = sorted({*states, *total.routes} - {UNROUTED})
    names += [UNROUTED] if UNROUTED in total.routes else []
    return [
        _way(name, states.get(name, []), total.routes.get(name, RouteCounts())) for name in names
    ]


def _way(name: str, states: list[RouteState], counts: RouteCounts) -> Way:
    books = counts.books
    verdicts = tuple((v.value, count) for v in Verdict if (count := books.get(v, 0)))
    settled = sum(count for _, count in verdicts)
    in_flight = sum(state.in_flight for state in states)
    kind, told = _state_of(name, states)
    is_balanced = all(state.balanced for state in states)
    return Way(
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
        told,
        # Whoever was killed had no time to settle what it held: that comes again, as new arrivals.
        max(books.get("arrived", 0) - settled - in_flight, 0) if is_balanced else 0,
        "good" if is_balanced else "bad",
        "yes" if is_balanced else "no",
    )


def _state_of(name: str, states: list[RouteState]) -> tuple[Kind, str]:
    """Return how a route is, by the worst of its workers."""
    down = sorted({what for state in states for what in state.down})
    if down:
        return "bad", f"{' and '.join(what.removeprefix('the ') for what in down)} down"
    if any(state.paused for state in states):
        return "warn", "paused"
    if states:
        return "good", "open"
    return ("off", "no route is for it") if name == UNROUTED else ("off", "no worker has it")


def _hand(report: Report, now_ms: int) -> Hand:
    state = report.state
    in_flight = sum(route.in_flight for route in state.routes.values())
    if state.ended:
        return Hand(state, 0, "off", "ended in good order")
    if is_silent(report, now_ms):
        return Hand(state, in_flight, "bad", "not heard of")
    if state.not_ready:
        return Hand(
            state, in_flight, "warn", format_list([printable(why) for why in state.not_ready])
        )
    return Hand(state, in_flight, "good", "working")


def _topics(total: Counts) -> list[tuple[str, dict[str, int]]]:
    def noise(pair: tuple[str, dict[str, int]]) -> tuple[int, int, str]:
        name, counted = pair
        return -counted.get("repeats", 0), -counted.get("arrived", 0), name

    return sorted(total.topics.items(), key=noise)[:_NOISIEST]


def _first_event(view: View) -> dict[str, Any]:
    """Say how to send a first event: by a command, where a source takes them by HTTP."""
    sources = sorted({source for state in present(view) for source in state.sources})
    address = next((one for one in sources if one.startswith("http://")), "")
    header = "'Content-Type: application/json'"
    command = f"curl -H {header} -d {shlex.quote(_FIRST_EVENT)} {shlex.quote(address)}"
    return {"sources": sources, "command": command if address else ""}
