"""Dead letters: list, one dead letter, replay and drop."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final
from urllib.parse import urlencode
from weakref import WeakKeyDictionary

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.dashboard import dead_letters as letters
from oncebridge.dashboard.actions import MOST_AT_A_TIME, ActionRequest, Verb, run_action
from oncebridge.dashboard.data import DashboardData
from oncebridge.dashboard.page import (
    PageNotFound,
    PageRequest,
    PageResponse,
    PageRoute,
    Redirect,
    TemplatePage,
)
from oncebridge.dashboard.rule_descriptions import anchor
from oncebridge.dashboard.store_lookup import explain_stored_key
from oncebridge.dead_letters.api import DeadLetter, DeadLetters
from oncebridge.dead_letters.copies import Copies, copies_of
from oncebridge.engine import pauses
from oncebridge.errors import OncebridgeError
from oncebridge.events.event import Event
from oncebridge.operate.explain.expected_verdict import RecordView
from oncebridge.operate.explain.words import summary_of_key
from oncebridge.operate.identity import Identities, RouteIdentity
from oncebridge.operate.operator_log import OperatorActions
from oncebridge.operate.replay import DeadLetterFilter
from oncebridge.service.addresses import scheme_of
from oncebridge.service.monitor import mask_of

_PAGE: Final = 50
_LONGEST_BECAUSE: Final = 200
_DIGITS: Final = 18  # more than any number has, and within SQLite's range
_VERBS: Final[tuple[Verb, ...]] = ("replay", "drop")
_SHOWN_BEFORE: Final = 20
_MOST_SELECTED: Final = 200
"""The most dead letters that one address names; a page lists fewer."""

_counters: WeakKeyDictionary[DashboardData, letters.TallyCache] = WeakKeyDictionary()


# --- the list -----------------------------------------------------------------------------


async def _list(data: DashboardData, request: PageRequest) -> PageResponse:
    choice = _choice(request.query)
    before = _number(request.query.get("before", ""))
    values: dict[str, Any] = {
        "choice": choice,
        "is_filtered": bool(choice.reason or choice.route),
        "before": before,
        "place": str(data.setup.config.dead),
        "is_queue": scheme_of(data.setup.config.dead.url) == "sqs",
        "meaning_of": letters.meaning_of,
        "most": MOST_AT_A_TIME,
    }
    try:
        dead = await letters.open_dead_letters(data)
        page = await letters.page_of(dead, choice, before, _PAGE)
        tally = await _counter(data).tally(dead)
    except OncebridgeError as error:
        return TemplatePage("dead.html", values | {"trouble": str(error)}, status=503)
    headlines = letters.DeadLetterRows(data.setup.config)
    return TemplatePage(
        "dead.html",
        values
        | {
            "trouble": "",
            "page": page,
            "rows": await headlines.all(page.letters),
            "tally": tally,
            "fitting": _fitting(choice, tally),
            "reasons": _with(tally.reasons, choice.reason),
            "routes": _with(tally.routes, choice.route),
            "newer": _address(choice) if before else "",
            "older": _address(choice, before=page.older) if page.older else "",
        },
    )


def _choice(given: Mapping[str, str]) -> DeadLetterFilter:
    # A form cannot carry unprintable characters.
    valid = {name: text for name, text in given.items() if text.isprintable()}
    return DeadLetterFilter(reason=valid.get("reason", ""), route=valid.get("route") or None)


def _fitting(choice: DeadLetterFilter, tally: letters.DeadLetterTally) -> int | None:
    """Return the number of matching dead letters, if the counts have it."""
    if choice.reason and choice.route:
        return None
    if choice.reason:
        return tally.reasons.get(choice.reason, 0)
    return tally.routes.get(choice.route, 0) if choice.route else tally.count


def _with(counts: Mapping[str, int], chosen: str | None) -> list[str]:
    """Return the options of a choice, including the chosen one."""
    names = dict.fromkeys([*counts, chosen or ""])
    return [name for name in names if name and name.isprintable()]


def _address(choice: DeadLetterFilter, *, before: int | None = None) -> str:
    wanted = {"reason": choice.reason, "route": choice.route, "before": before}
    query = urlencode({name: value for name, value in wanted.items() if value})
    return f"/dead?{query}" if query else "/dead"


def _number(text: str) -> int | None:
    is_one = text.isascii() and text.isdigit() and len(text) <= _DIGITS
    return int(text) if is_one and int(text) else None


def _counter(data: DashboardData) -> letters.TallyCache:
    return _counters.setdefault(data, letters.TallyCache())


# --- one dead letter ----------------------------------------------------------------------


async def _show(data: DashboardData, request: PageRequest) -> PageResponse:
    number = _number(request.names["number"])
    try:
        dead = await letters.open_dead_letters(data)
        letter = await letters.find(dead, number) if number else None
    except OncebridgeError as error:
        return TemplatePage(
            "dead_letter.html", {"trouble": str(error), "number": number}, status=503
        )
    if letter is None:
        raise PageNotFound
    config = data.setup.config
    way = await asyncio.to_thread(_identity, data, letter)
    in_store, acts, copies, trouble = await _known(data, letter, way)
    sent_as = way.sent_as_of(letter.key).hex() if way is not None else ""
    # It may be large; all of it is parsed here.
    headline = await asyncio.to_thread(letters.DeadLetterRows(config).of, letter)
    body = await asyncio.to_thread(mask_of(config).masked_text, letter.raw)
    return TemplatePage(
        "dead_letter.html",
        {
            "trouble": "",
            "number": number,
            "letter": headline,
            "body": body,
            "has_values": config.dashboard_payloads,
            "known": in_store,
            "acts": acts,
            "acts_of_route": not letter.is_keyed,
            "copies": copies,
            "sent_as": sent_as,
            "store_trouble": trouble,
            "is_route": _is_known_route(data, letter),
            "anchor": anchor(letter.rule),
        },
    )


async def _known(
    data: DashboardData, letter: DeadLetter, way: RouteIdentity | None
) -> tuple[str, OperatorActions, Copies, str]:
    """Return the record of a dead letter's event, operator actions, copies, and the problem."""
    copies = Copies()
    try:
        explanation = await explain_stored_key(data, letter.key) if letter.key else None
        acts = explanation.acts if explanation else OperatorActions()
        if way is not None:
            look = RecordView(data.store)
            await look.prepare([way])
            acts = look.acts_on(way)
        if letter.key and not letter.is_keyed:
            (copies,) = await copies_of(data.store, [letter.key])
    except OncebridgeError as error:
        return "", OperatorActions(), copies, str(error)
    return summary_of_key(explanation) if explanation else "", acts, copies, ""


def _identity(data: DashboardData, letter: DeadLetter) -> RouteIdentity | None:
    identities = Identities(data.setup)
    event = identities.read(letter.raw)
    return identities.on(letter.route, event) if isinstance(event, Event) and letter.rule else None


def _is_known_route(data: DashboardData, letter: DeadLetter) -> bool:
    return letter.route in [route.name for route in data.setup.routes]


# --- confirmation -------------------------------------------------------------------------


class _Group(Struct, frozen=True):
    """Dead letters of the same route."""

    route: str
    count: int
    sink: str = ""
    why_not: str = ""
    """Why they cannot be replayed."""


async def _asked(_data: DashboardData, request: PageRequest) -> PageResponse:
    """Redirect to the confirmation page, which has an address that browsers can go back to."""
    verb = _verb(_first(request, "do"))
    choice = _choice({name: _first(request, name) for name in ("reason", "route")})
    back = _address(choice)
    if verb is None:
        return Redirect(back, "Nothing was done: choose replay or drop.")
    numbers = _numbers(request.form.get("number", ()))
    is_every = bool(_first(request, "every"))
    if not numbers and not is_every:
        return Redirect(back, f"Nothing was done: select the dead letters to {verb} first.")
    if len(numbers) > _MOST_SELECTED:
        return Redirect(
            back, f"Nothing was done: select at most {_MOST_SELECTED} dead letters at a time."
        )
    wanted = {
        "do": verb,
        "numbers": "" if is_every else ",".join(map(str, numbers)),
        "every": "1" if is_every else "",
        "reason": choice.reason,
        "route": choice.route,
    }
    query = urlencode({name: value for name, value in wanted.items() if value})
    return Redirect(f"/dead/confirm?{query}")


async def _confirm(data: DashboardData, request: PageRequest) -> PageResponse:
    """Show what would be done, and ask for confirmation."""
    verb = _verb(request.query.get("do", ""))
    numbers = _numbers(request.query.get("numbers", "").split(",")[:_MOST_SELECTED])
    is_every = bool(request.query.get("every"))
    if not request.may_write or verb is None or not (numbers or is_every):
        raise PageNotFound
    choice = _choice(request.query)
    back = _address(choice)
    try:
        dead = await letters.open_dead_letters(data)
        if is_every:
            found, more = await letters.oldest(dead, choice, MOST_AT_A_TIME, whole=_SHOWN_BEFORE)
        else:
            found, more = await _found(dead, numbers), False
        groups = await _groups(data, found) if verb == "replay" else _counted(found, _route_of)
    except OncebridgeError as error:
        return Redirect(back, f"Nothing was done: {error}")
    if not found:
        return Redirect(
            back, f"Nothing to {verb}: these dead letters were already replayed or dropped."
        )
    headlines = letters.DeadLetterRows(data.setup.config)
    values = {
        "verb": verb,
        "count": len(found),
        "marked": _written({letter.number: letters.fingerprint(letter) for letter in found}),
        "shown": await headlines.all(found[:_SHOWN_BEFORE]),
        "groups": groups,
        "maybe": sum([letter.maybe_delivered for letter in found]),
        "choice": choice,
        "more": more,
        "most": MOST_AT_A_TIME,
        "back": back if is_every or len(found) > 1 else f"/dead/{found[0].number}",
        "longest": _LONGEST_BECAUSE,
    }
    return TemplatePage("dead_confirm.html", values)


async def _found(dead: DeadLetters, numbers: Sequence[int]) -> list[DeadLetter]:
    found: list[DeadLetter] = []
    for number in numbers:
        letter = await letters.find(dead, number)
        if letter is not None:
            is_shown = len(found) < _SHOWN_BEFORE
            found.append(letter if is_shown else replace(letter, raw=b""))
    return found


async def _groups(data: DashboardData, found: Sequence[DeadLetter]) -> list[_Group]:
    """Return the routes of dead letters, and which cannot be replayed."""
    sinks = {route.name: str(route.sink) for route in data.setup.routes}
    states = await pauses.paused(data.store, list(sinks))
    paused = {name for name, is_paused in zip(sinks, states, strict=True) if is_paused}
    groups = []
    for group in _counted(found, _way_of):
        why_not = ""
        if group.route and group.route not in sinks:
            why_not = "the route is no longer configured"
        elif group.route in paused or (not group.route and paused):
            why_not = "the route is paused; run `oncebridge resume` first"
        groups.append(_Group(group.route, group.count, sinks.get(group.route, ""), why_not))
    return groups


def _counted(found: Sequence[DeadLetter], way: Callable[[DeadLetter], str]) -> list[_Group]:
    counts = Counter(map(way, found))
    return [_Group(route, count) for route, count in sorted(counts.items())]


_route_of: Final[Callable[[DeadLetter], str]] = attrgetter("route")


def _way_of(letter: DeadLetter) -> str:
    """Return the route of a replay; empty if every route is tried again."""
    return letter.route if letter.rule else ""


# --- actions ------------------------------------------------------------------------------


async def _replay(data: DashboardData, request: PageRequest) -> PageResponse:
    return await _act(data, request, "replay")


async def _drop(data: DashboardData, request: PageRequest) -> PageResponse:
    return await _act(data, request, "drop")


async def _act(data: DashboardData, request: PageRequest, verb: Verb) -> PageResponse:
    marked = _marked(_first(request, "letters"))
    if not marked:
        return Redirect("/dead", "Nothing was done: no dead letter was selected.")
    because = _first(request, "because").strip()[:_LONGEST_BECAUSE]
    try:
        dead = await letters.open_dead_letters(data)
    except OncebridgeError as error:
        return Redirect("/dead", f"Nothing was done: {error}")
    done = await run_action(data, dead, ActionRequest(verb, marked, because, request.user))
    _counter(data).forget()
    values = {
        "verb": verb,
        "done": done,
        "because": because,
        "left": _written({number: marked[number] for number in done.left}),
    }
    return TemplatePage("dead_done.html", values)


def _first(request: PageRequest, name: str) -> str:
    return next(iter(request.form.get(name, ())), "")


def _verb(text: str) -> Verb | None:
    return next((verb for verb in _VERBS if verb == text), None)


def _numbers(texts: Sequence[str]) -> list[int]:
    found = [_number(text.strip()) for text in texts]
    return sorted({number for number in found if number is not None})


def _written(marked: Mapping[int, str]) -> str:
    return ",".join(f"{number}.{mark}" for number, mark in marked.items())


def _marked(text: str) -> dict[int, str]:
    """Return the numbers and fingerprints that a form sends; both are needed."""
    pairs = [one.strip().partition(".") for one in text.split(",")]
    found = [(_number(number), mark) for number, _, mark in pairs]
    return {number: mark for number, mark in found if number is not None and mark}


ROUTES: Final = (
    PageRoute("GET", "/dead", _list),
    PageRoute("GET", "/dead/{number}", _show),
    PageRoute("POST", "/dead/confirm", _asked, writes=True),
    PageRoute("GET", "/dead/confirm", _confirm),
    PageRoute("POST", "/dead/replay", _replay, writes=True),
    PageRoute("POST", "/dead/drop", _drop, writes=True),
)
