"""Dead letters: what was given up, why, and what to do about it."""

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
from oncebridge.dashboard.actions import MOST_AT_A_TIME, Order, Verb, carry_out
from oncebridge.dashboard.data import Desk
from oncebridge.dashboard.page import Answer, Ask, Elsewhere, NotFound, Route, Shown
from oncebridge.dashboard.rule_descriptions import anchor
from oncebridge.dashboard.store_lookup import known
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
_DIGITS: Final = 18  # more than any number has, and no more than SQLite takes
_VERBS: Final[tuple[Verb, ...]] = ("replay", "drop")
_SHOWN_BEFORE: Final = 20
_MOST_TICKED: Final = 200
"""Letters that one address names; a page has fewer to tick."""

_counters: WeakKeyDictionary[Desk, letters.Counter] = WeakKeyDictionary()


# --- the list -----------------------------------------------------------------------------


async def _list(desk: Desk, ask: Ask) -> Answer:
    choice = _choice(ask.query)
    before = _number(ask.query.get("before", ""))
    values: dict[str, Any] = {
        "choice": choice,
        "is_filtered": bool(choice.reason or choice.route),
        "before": before,
        "place": str(desk.setup.config.dead),
        "is_queue": scheme_of(desk.setup.config.dead.url) == "sqs",
        "meaning_of": letters.meaning_of,
        "most": MOST_AT_A_TIME,
    }
    try:
        dead = await letters.opened(desk)
        page = await letters.page_of(dead, choice, before, _PAGE)
        tally = await _counter(desk).tally(dead)
    except OncebridgeError as error:
        return Shown("dead.html", values | {"trouble": str(error)}, status=503)
    headlines = letters.Headlines(desk.setup.config)
    return Shown(
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
    # No form could carry what cannot be printed, so nobody can choose it.
    told = {name: text for name, text in given.items() if text.isprintable()}
    return DeadLetterFilter(reason=told.get("reason", ""), route=told.get("route") or None)


def _fitting(choice: DeadLetterFilter, tally: letters.Tally) -> int | None:
    """Return how many letters fit, where the counts tell it."""
    if choice.reason and choice.route:
        return None
    if choice.reason:
        return tally.reasons.get(choice.reason, 0)
    return tally.routes.get(choice.route, 0) if choice.route else tally.count


def _with(counts: Mapping[str, int], chosen: str | None) -> list[str]:
    """List what can be chosen, and what was."""
    names = dict.fromkeys([*counts, chosen or ""])
    return [name for name in names if name and name.isprintable()]


def _address(choice: DeadLetterFilter, *, before: int | None = None) -> str:
    wanted = {"reason": choice.reason, "route": choice.route, "before": before}
    query = urlencode({name: value for name, value in wanted.items() if value})
    return f"/dead?{query}" if query else "/dead"


def _number(text: str) -> int | None:
    is_one = text.isascii() and text.isdigit() and len(text) <= _DIGITS
    return int(text) if is_one and int(text) else None


def _counter(desk: Desk) -> letters.Counter:
    return _counters.setdefault(desk, letters.Counter())


# --- one letter ---------------------------------------------------------------------------


async def _show(desk: Desk, ask: Ask) -> Answer:
    number = _number(ask.names["number"])
    try:
        dead = await letters.opened(desk)
        letter = await letters.find(dead, number) if number else None
    except OncebridgeError as error:
        return Shown("dead_letter.html", {"trouble": str(error), "number": number}, status=503)
    if letter is None:
        raise NotFound("there is no such letter: it was replayed or dropped, or never there")
    config = desk.setup.config
    way = await asyncio.to_thread(_identity, desk, letter)
    in_store, acts, copies, trouble = await _known(desk, letter, way)
    sent_as = way.sent_as_of(letter.key).hex() if way is not None else ""
    # It may be large; here, all of it is read.
    headline = await asyncio.to_thread(letters.Headlines(config).of, letter)
    body = await asyncio.to_thread(mask_of(config).masked_text, letter.raw)
    return Shown(
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
            "is_route": _is_known_route(desk, letter),
            "anchor": anchor(letter.rule),
        },
    )


async def _known(
    desk: Desk, letter: DeadLetter, way: RouteIdentity | None
) -> tuple[str, OperatorActions, Copies, str]:
    """Return what the store knows of a letter's event, operator actions, and its copies."""
    copies = Copies()
    try:
        told = await known(desk, letter.key) if letter.key else None
        acts = told.acts if told else OperatorActions()
        if way is not None:
            look = RecordView(desk.store)
            await look.prepare([way])
            acts = look.acts_on(way)
        if letter.key and not letter.is_keyed:
            (copies,) = await copies_of(desk.store, [letter.key])
    except OncebridgeError as error:
        return "", OperatorActions(), copies, str(error)
    return summary_of_key(told) if told else "", acts, copies, ""


def _identity(desk: Desk, letter: DeadLetter) -> RouteIdentity | None:
    identities = Identities(desk.setup)
    event = identities.read(letter.raw)
    return identities.on(letter.route, event) if isinstance(event, Event) and letter.rule else None


def _is_known_route(desk: Desk, letter: DeadLetter) -> bool:
    return letter.route in [route.name for route in desk.setup.routes]


# --- before something is done -------------------------------------------------------------


class _Group(Struct, frozen=True):
    """Letters that go the same way."""

    route: str
    count: int
    sink: str = ""
    why_not: str = ""
    """Why they will stay where they are."""


async def _asked(_desk: Desk, ask: Ask) -> Answer:
    """Lead to the page that asks: one that has an address, so that browsers find back to it."""
    verb = _verb(_first(ask, "do"))
    choice = _choice({name: _first(ask, name) for name in ("reason", "route")})
    back = _address(choice)
    if verb is None:
        return Elsewhere(back, "Nothing was done: it was not said what.")
    numbers = _numbers(ask.form.get("number", ()))
    is_every = bool(_first(ask, "every"))
    if not numbers and not is_every:
        return Elsewhere(back, f"Nothing was done: tick the letters to {verb} first.")
    if len(numbers) > _MOST_TICKED:
        return Elsewhere(back, f"Nothing was done: tick at most {_MOST_TICKED} letters at a time.")
    wanted = {
        "do": verb,
        "numbers": "" if is_every else ",".join(map(str, numbers)),
        "every": "1" if is_every else "",
        "reason": choice.reason,
        "route": choice.route,
    }
    query = urlencode({name: value for name, value in wanted.items() if value})
    return Elsewhere(f"/dead/confirm?{query}")


async def _confirm(desk: Desk, ask: Ask) -> Answer:
    """Say what would be done, and ask; nothing is done yet."""
    verb = _verb(ask.query.get("do", ""))
    numbers = _numbers(ask.query.get("numbers", "").split(",")[:_MOST_TICKED])
    is_every = bool(ask.query.get("every"))
    if not ask.may_write or verb is None or not (numbers or is_every):
        raise NotFound
    choice = _choice(ask.query)
    back = _address(choice)
    try:
        dead = await letters.opened(desk)
        if is_every:
            found, more = await letters.oldest(dead, choice, MOST_AT_A_TIME, whole=_SHOWN_BEFORE)
        else:
            found, more = await _found(dead, numbers), False
        groups = await _groups(desk, found) if verb == "replay" else _counted(found, _route_of)
    except OncebridgeError as error:
        return Elsewhere(back, f"Nothing was done: {error}")
    if not found:
        return Elsewhere(back, f"There is nothing to {verb}: no such letter is there any more.")
    headlines = letters.Headlines(desk.setup.config)
    values = {
        "verb": verb,
        "count": len(found),
        "marked": _written({letter.number: letters.mark_of(letter) for letter in found}),
        "shown": await headlines.all(found[:_SHOWN_BEFORE]),
        "groups": groups,
        "maybe": sum([letter.maybe_delivered for letter in found]),
        "is_every": is_every,
        "choice": choice,
        "more": more,
        "most": MOST_AT_A_TIME,
        "back": back if is_every or len(found) > 1 else f"/dead/{found[0].number}",
        "longest": _LONGEST_BECAUSE,
    }
    return Shown("dead_confirm.html", values)


async def _found(dead: DeadLetters, numbers: Sequence[int]) -> list[DeadLetter]:
    found: list[DeadLetter] = []
    for number in numbers:
        letter = await letters.find(dead, number)
        if letter is not None:
            is_shown = len(found) < _SHOWN_BEFORE
            found.append(letter if is_shown else replace(letter, raw=b""))
    return found


async def _groups(desk: Desk, found: Sequence[DeadLetter]) -> list[_Group]:
    """Return where letters would go, and which could not."""
    sinks = {route.name: str(route.sink) for route in desk.setup.routes}
    states = await pauses.paused(desk.store, list(sinks))
    paused = {name for name, is_paused in zip(sinks, states, strict=True) if is_paused}
    groups = []
    for group in _counted(found, _way_of):
        why_not = ""
        if group.route and group.route not in sinks:
            why_not = "there is no such route any more, so these stay"
        elif group.route in paused or (not group.route and paused):
            why_not = "it is paused, so these stay until `oncebridge resume`"
        groups.append(_Group(group.route, group.count, sinks.get(group.route, ""), why_not))
    return groups


def _counted(found: Sequence[DeadLetter], way: Callable[[DeadLetter], str]) -> list[_Group]:
    counts = Counter(map(way, found))
    return [_Group(route, count) for route, count in sorted(counts.items())]


_route_of: Final[Callable[[DeadLetter], str]] = attrgetter("route")


def _way_of(letter: DeadLetter) -> str:
    """Name the route that a replay takes; none where every route is asked anew."""
    return letter.route if letter.rule else ""


# --- doing it -----------------------------------------------------------------------------


async def _replay(desk: Desk, ask: Ask) -> Answer:
    return await _act(desk, ask, "replay")


async def _drop(desk: Desk, ask: Ask) -> Answer:
    return await _act(desk, ask, "drop")


async def _act(desk: Desk, ask: Ask, verb: Verb) -> Answer:
    marked = _marked(_first(ask, "letters"))
    if not marked:
        return Elsewhere("/dead", "Nothing was done: no letter was named.")
    because = _first(ask, "because").strip()[:_LONGEST_BECAUSE]
    try:
        dead = await letters.opened(desk)
    except OncebridgeError as error:
        return Elsewhere("/dead", f"Nothing was done: {error}")
    done = await carry_out(desk, dead, Order(verb, marked, because, ask.user))
    _counter(desk).forget()
    values = {
        "verb": verb,
        "done": done,
        "because": because,
        "left": _written({number: marked[number] for number in done.left}),
    }
    return Shown("dead_done.html", values)


def _first(ask: Ask, name: str) -> str:
    return next(iter(ask.form.get(name, ())), "")


def _verb(text: str) -> Verb | None:
    return next((verb for verb in _VERBS if verb == text), None)


def _numbers(texts: Sequence[str]) -> list[int]:
    found = [_number(text.strip()) for text in texts]
    return sorted({number for number in found if number is not None})


def _written(marked: Mapping[int, str]) -> str:
    return ",".join(f"{number}.{mark}" for number, mark in marked.items())


def _marked(text: str) -> dict[int, str]:
    """Read letters as a form names them; one without its mark is not named."""
    pairs = [one.strip().partition(".") for one in text.split(",")]
    found = [(_number(number), mark) for number, _, mark in pairs]
    return {number: mark for number, mark in found if number is not None and mark}


ROUTES: Final = (
    Route("GET", "/dead", _list),
    Route("GET", "/dead/{number}", _show),
    Route("POST", "/dead/confirm", _asked, writes=True),
    Route("GET", "/dead/confirm", _confirm),
    Route("POST", "/dead/replay", _replay, writes=True),
    Route("POST", "/dead/drop", _drop, writes=True),
)
