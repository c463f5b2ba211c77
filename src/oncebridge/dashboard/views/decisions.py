"""
Decisions: recent arrivals, search, and why each was treated so.

What is asked for stands in the address, so that it can be sent to somebody else. What the history
does not have is looked up where it may still be known; where that costs something, somebody has
to press a button for it, and a button is no address that another page could send people to.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote, urlencode

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.dashboard.arrival_text import is_unreadable
from oncebridge.dashboard.data import Desk
from oncebridge.dashboard.page import Answer, Ask, NotFound, Route, Shown
from oncebridge.dashboard.rule_descriptions import anchor
from oncebridge.dashboard.store_lookup import Beyond, look_beyond
from oncebridge.dashboard.why import explain_arrival, explain_event, shown
from oncebridge.engine.causes import Cause
from oncebridge.engine.router import UNROUTED
from oncebridge.engine.verdict import Verdict
from oncebridge.errors import StoreError
from oncebridge.observe.history import Found, Place, Query, Seen
from oncebridge.observe.report import Report
from oncebridge.operate.explain.words import state, summary_of_key
from oncebridge.operate.lookup import key_in
from oncebridge.service.monitor import mode_of

_PAGE: Final = 50
_LONGEST_TEXT: Final = 400


class Asked(Struct, frozen=True, kw_only=True):
    """What is looked for, as the address says it."""

    q: str = ""
    verdict: str = ""
    route: str = ""
    cause: str = ""
    before: str = ""
    """The arrival at the end of the page before."""

    @classmethod
    def read(cls, given: Mapping[str, str]) -> "Asked":
        """Read what was asked; a choice that there is none is none."""
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
        return bool(self.q or self.is_narrowed)

    @property
    def is_narrowed(self) -> bool:
        """Return whether something was chosen beside the text."""
        return bool(self.verdict or self.route or self.cause)

    def query(self) -> Query:
        """Put it to the history."""
        return Query(
            text=self.q,
            verdict=self.verdict,
            route=self.route,
            cause=self.cause,
            before=_place(self.before),
            limit=_PAGE,
        )

    def address(self) -> str:
        """Write it as an address."""
        named = {name: getattr(self, name) for name in self.__struct_fields__}
        filled = {name: text for name, text in named.items() if text}
        return f"/decisions?{urlencode(filled)}" if filled else "/decisions"


_VERDICTS: Final = tuple(verdict.value for verdict in Verdict)
_CAUSES: Final = tuple(cause.value for cause in Cause)


def _place(text: str) -> Place | None:
    """Read the place of an arrival as an address has it: `MILLISECONDS.WORKER.NUMBER`."""
    at_ms, _, rest = text.partition(".")
    worker, _, number = rest.rpartition(".")
    if not (worker and _is_number(at_ms) and _is_number(number)):
        return None
    return int(at_ms), worker, int(number)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


def _after(seen: Seen) -> str:
    at_ms, worker, number = seen.place
    return f"{at_ms}.{worker}.{number}"


# --- the list -----------------------------------------------------------------------------


async def _list(desk: Desk, ask: Ask) -> Answer:
    asked = Asked.read(ask.query)
    reports, is_whole = await _reports(desk)
    found = await desk.archive.search(asked.query(), reports)
    found = found if is_whole else replace(found, is_whole=False)
    beyond = None
    if asked.q and not (found.rows or asked.before or ask.is_live):
        beyond = await look_beyond(desk, asked.q)
    return _listed(desk, asked, found, reports, beyond)


async def _scan(desk: Desk, ask: Ask) -> Answer:
    """Look for an id in all of the store, as somebody has asked for in so many words."""
    asked = Asked.read({"q": next(iter(ask.form.get("q", ())), "")})
    reports, is_whole = await _reports(desk)
    found = await desk.archive.search(asked.query(), reports)
    found = found if is_whole else replace(found, is_whole=False)
    beyond = await look_beyond(desk, asked.q, thorough=True) if asked.q else None
    return _listed(desk, asked, found, reports, beyond)


def _listed(
    desk: Desk, asked: Asked, found: Found, reports: Sequence[Report], beyond: Beyond | None
) -> Answer:
    routes = [route.name for route in desk.setup.routes]
    if any(route.match is not None for route in desk.setup.routes):
        routes.append(UNROUTED)
    workers = {seen.worker for seen in found.rows} | {report.state.name for report in reports}
    older = replace(asked, before=_after(found.rows[-1])) if found.more and found.rows else None
    return Shown(
        "decisions.html",
        {
            "asked": asked,
            "found": found,
            "beyond": beyond,
            "mode": mode_of(desk.setup.config),
            "keep": desk.setup.config.history_keep,
            "verdicts": _VERDICTS,
            "causes": _CAUSES,
            "routes": [*routes, *({asked.route} - {*routes, ""})],
            "has_routes": len(routes) > 1,
            "has_workers": len(workers) > 1,
            "newest": replace(asked, before="").address() if asked.before else "",
            "older": older.address() if older else "",
            "unnarrowed": Asked(q=asked.q).address() if asked.is_narrowed and asked.q else "",
            **_LINKS,
        },
    )


async def _reports(desk: Desk) -> tuple[list[Report], bool]:
    """
    Return the reports of all workers that may have a history, and tell whether these are all.

    While the store is away, nothing is known of others than this process.
    """
    try:
        view = await desk.view()
    except StoreError:
        if desk.monitor is None:
            raise
        return [desk.monitor.report()], False
    return [*view.reports, *view.gone], True


# --- one of them --------------------------------------------------------------------------


async def _show(desk: Desk, ask: Ask) -> Answer:
    if desk.monitor is not None and desk.setup.config.dashboard_payloads:
        with suppress(StoreError):  # what has just come has no payload before that
            await desk.monitor.record()
    reports, _ = await _reports(desk)
    seen = await desk.archive.named(ask.names["name"], reports)
    if seen is None:
        raise NotFound
    why = await explain_arrival(desk, seen, reports)
    config = desk.setup.config
    values = {
        "why": why,
        "row": seen.row,
        "whole": why.whole,
        "keeps_payloads": config.dashboard_payloads,
        "has_routes": len(desk.setup.routes) > 1,
        "is_unrouted": seen.row.route == UNROUTED,
    }
    return Shown("decision.html", values | _LINKS)


async def _event(desk: Desk, ask: Ask) -> Answer:
    key = key_in(ask.names["key"])
    if key is None:
        raise NotFound
    reports, _ = await _reports(desk)
    whole = await explain_event(desk, key, reports)
    if whole is None:
        raise NotFound
    return Shown("event.html", {"whole": whole, **_LINKS})


# --- addresses ----------------------------------------------------------------------------


def address_of(seen: Seen) -> str:
    """Return the address of an arrival."""
    return f"/decisions/{quote(seen.name, safe='')}"


def _search_for(text: str) -> str:
    return Asked(q=text).address()


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
    Route("GET", "/decisions", _list),
    Route("POST", "/decisions/scan", _scan),
    Route("GET", "/decisions/{name}", _show),
    Route("GET", "/events/{key}", _event),
)
