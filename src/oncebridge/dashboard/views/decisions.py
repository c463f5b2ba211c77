"""
Decisions: recent arrivals, search, and the reason of each verdict.

A search is part of the address, so that it can be shared. If the history has no match, the store
and the dead letters are searched; if that costs money, the user has to press a button (a POST, so
that no link can start it).
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote, urlencode

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.dashboard.arrival_text import is_unreadable
from oncebridge.dashboard.data import DashboardData
from oncebridge.dashboard.page import (
    PageNotFound,
    PageRequest,
    PageResponse,
    PageRoute,
    TemplatePage,
)
from oncebridge.dashboard.rule_descriptions import anchor
from oncebridge.dashboard.store_lookup import StoreLookup, look_up
from oncebridge.dashboard.why import explain_arrival, explain_event, shown
from oncebridge.engine.causes import Cause
from oncebridge.engine.router import UNROUTED
from oncebridge.engine.verdict import Verdict
from oncebridge.errors import StoreError
from oncebridge.observe.history import HistoryPosition, HistoryQuery, RecordedArrival, SearchResult
from oncebridge.observe.report import Report
from oncebridge.operate.explain.words import state, summary_of_key
from oncebridge.operate.lookup import key_in
from oncebridge.service.monitor import mode_of

_PAGE: Final = 50
_LONGEST_TEXT: Final = 400


class DecisionSearch(Struct, frozen=True, kw_only=True):
    """A search, as it is in the address."""

    q: str = ""
    verdict: str = ""
    route: str = ""
    cause: str = ""
    before: str = ""
    """The last arrival of the previous page."""

    @classmethod
    def read(cls, given: Mapping[str, str]) -> "DecisionSearch":
        """Read a search; unknown choices are ignored."""
        text = given.get("q", "").strip()[:_LONGEST_TEXT]
        verdict, cause = given.get("verdict", ""), given.get("cause", "")
        return cls(
            q=text,
            verdict=verdict if verdict in _VERDICTS else "",
            route=given.get("route", "")[:_LONGEST_TEXT],
            cause=cause if cause in _CAUSES else "",
            before=given.get("before", "") if _place(given.get("before", "")) else "",
        )

    @property
    def is_search(self) -> bool:
        return bool(self.q or self.is_filtered)

    @property
    def is_filtered(self) -> bool:
        """True if a verdict, route or cause was chosen."""
        return bool(self.verdict or self.route or self.cause)

    def query(self) -> HistoryQuery:
        """Return the query for the history."""
        return HistoryQuery(
            text=self.q,
            verdict=self.verdict,
            route=self.route,
            cause=self.cause,
            before=_place(self.before),
            limit=_PAGE,
        )

    def address(self) -> str:
        """Return the address of this search."""
        named = {name: getattr(self, name) for name in self.__struct_fields__}
        filled = {name: text for name, text in named.items() if text}
        return f"/decisions?{urlencode(filled)}" if filled else "/decisions"


_VERDICTS: Final = tuple(verdict.value for verdict in Verdict)
_CAUSES: Final = tuple(cause.value for cause in Cause)


def _place(text: str) -> HistoryPosition | None:
    """Return the position of an arrival from an address: `MILLISECONDS.WORKER.NUMBER`."""
    at_ms, _, rest = text.partition(".")
    worker, _, number = rest.rpartition(".")
    if not (worker and _is_number(at_ms) and _is_number(number)):
        return None
    return int(at_ms), worker, int(number)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


def _after(seen: RecordedArrival) -> str:
    at_ms, worker, number = seen.place
    return f"{at_ms}.{worker}.{number}"


# --- the list -----------------------------------------------------------------------------


async def _list(data: DashboardData, request: PageRequest) -> PageResponse:
    search = DecisionSearch.read(request.query)
    reports, is_whole = await _reports(data)
    found = await data.history.search(search.query(), reports)
    found = found if is_whole else replace(found, is_whole=False)
    lookup = None
    if search.q and not (found.rows or search.before or request.is_live):
        lookup = await look_up(data, search.q)
    return _listed(data, search, found, reports, lookup)


async def _scan(data: DashboardData, request: PageRequest) -> PageResponse:
    """Search the whole store for an id, on request."""
    search = DecisionSearch.read({"q": next(iter(request.form.get("q", ())), "")})
    reports, is_whole = await _reports(data)
    found = await data.history.search(search.query(), reports)
    found = found if is_whole else replace(found, is_whole=False)
    lookup = await look_up(data, search.q, thorough=True) if search.q else None
    return _listed(data, search, found, reports, lookup)


def _listed(
    data: DashboardData,
    search: DecisionSearch,
    found: SearchResult,
    reports: Sequence[Report],
    lookup: StoreLookup | None,
) -> PageResponse:
    routes = [route.name for route in data.setup.routes]
    if any(route.match is not None for route in data.setup.routes):
        routes.append(UNROUTED)
    workers = {seen.worker for seen in found.rows} | {report.state.name for report in reports}
    older = replace(search, before=_after(found.rows[-1])) if found.more and found.rows else None
    return TemplatePage(
        "decisions.html",
        {
            "search": search,
            "found": found,
            "lookup": lookup,
            "mode": mode_of(data.setup.config),
            "keep": data.setup.config.history_keep,
            "verdicts": _VERDICTS,
            "causes": _CAUSES,
            "routes": [*routes, *({search.route} - {*routes, ""})],
            "has_routes": len(routes) > 1,
            "has_workers": len(workers) > 1,
            "newest": replace(search, before="").address() if search.before else "",
            "older": older.address() if older else "",
            "unnarrowed": DecisionSearch(q=search.q).address()
            if search.is_filtered and search.q
            else "",
            **_LINKS,
        },
    )


async def _reports(data: DashboardData) -> tuple[list[Report], bool]:
    """
    Return the reports of all workers that may have a history, and whether these are all.

    While the store is unavailable, only this process is known.
    """
    try:
        view = await data.view()
    except StoreError:
        if data.monitor is None:
            raise
        return [data.monitor.report()], False
    return [*view.reports, *view.gone], True


# --- one arrival --------------------------------------------------------------------------


async def _show(data: DashboardData, request: PageRequest) -> PageResponse:
    if data.monitor is not None and data.setup.config.dashboard_payloads:
        with suppress(StoreError):  # payloads of the latest arrivals are written here
            await data.monitor.record()
    reports, _ = await _reports(data)
    seen = await data.history.named(request.names["name"], reports)
    if seen is None:
        raise PageNotFound
    why = await explain_arrival(data, seen, reports)
    config = data.setup.config
    values = {
        "why": why,
        "row": seen.row,
        "whole": why.whole,
        "keeps_payloads": config.dashboard_payloads,
        "has_routes": len(data.setup.routes) > 1,
        "is_unrouted": seen.row.route == UNROUTED,
    }
    return TemplatePage("decision.html", values | _LINKS)


async def _event(data: DashboardData, request: PageRequest) -> PageResponse:
    key = key_in(request.names["key"])
    if key is None:
        raise PageNotFound
    reports, _ = await _reports(data)
    whole = await explain_event(data, key, reports)
    if whole is None:
        raise PageNotFound
    return TemplatePage("event.html", {"whole": whole, **_LINKS})


# --- addresses ----------------------------------------------------------------------------


def address_of(seen: RecordedArrival) -> str:
    """Return the address of an arrival."""
    return f"/decisions/{quote(seen.name, safe='')}"


def _search_for(text: str) -> str:
    return DecisionSearch(q=text).address()


_LINKS: Final[dict[str, Any]] = {
    "address_of": address_of,
    "search_for": _search_for,
    "rule_address": lambda name: f"/rules#{anchor(name)}",
    "in_words": summary_of_key,
    "state_of": state,
    "shown": shown,
    "is_unreadable": is_unreadable,
}

ROUTES: Final = (
    PageRoute("GET", "/decisions", _list),
    PageRoute("POST", "/decisions/scan", _scan),
    PageRoute("GET", "/decisions/{name}", _show),
    PageRoute("GET", "/events/{key}", _event),
)
