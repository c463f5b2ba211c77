"""`oncebridge resend`: send an event again, although it was delivered."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import click
from msgspec import Struct
from rich.console import Console

from oncebridge.cli.command import (
    EXIT_NEEDS_ATTENTION,
    as_json_option,
    chosen_routes,
    command,
    field,
    is_to_stdout,
    note,
    open_audit_file,
    opened,
    printable,
)
from oncebridge.cli.dead import replayed_as_json
from oncebridge.cli.event_selection import (
    EventFinder,
    FoundEvent,
    event_finder,
    in_option,
    progress_text,
    reason_option,
    require_confirmation,
    route_option,
    yes_option,
)
from oncebridge.cli.status_line import STYLES
from oncebridge.dead_letters.api import DeadLetter
from oncebridge.engine.router import Router
from oncebridge.events.event import Event
from oncebridge.operate.identity import RouteIdentity
from oncebridge.operate.lookup import EventReference
from oncebridge.operate.operator_log import OperatorLog
from oncebridge.operate.replay import Replayed, Replayer, write_replay
from oncebridge.operate.resend import Resender, ResendPlan, Resent, plan_resends
from oncebridge.service.addresses import refuse_memory
from oncebridge.service.config import Setup
from oncebridge.service.routes import make_router
from oncebridge.stores.api import Store

_LOOKED_AT = 200
_AT_ONCE = 10_000
_MOST_BYTES = 32 * 1024 * 1024
"""How much of a file is kept in memory and confirmed at a time."""
_NO_BODY = "not in the dead letters, and the store has no payloads: name a file, or use --in FILE"
_WARNING = (
    "the receiver gets it once more, with the same Idempotency-Key, and may drop it as a duplicate."
)


@command(
    "oncebridge resend event.json -c oncebridge.toml",
    "oncebridge resend event.json --route crm --dry-run -c oncebridge.toml",
    "oncebridge resend 6f5c… --in events.ndjson --yes -c oncebridge.toml",
)
@click.argument("what", nargs=-1, required=True, metavar="FILE|KEY|ID...")
@route_option
@in_option
@reason_option
@click.option("--dry-run", is_flag=True, help="Send nothing; show what would be done.")
@yes_option
@as_json_option
async def resend(
    setup: Setup,
    *,
    what: tuple[str, ...],
    routes: tuple[str, ...],
    recording: str | None,
    reason: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """
    Send events again, although they were delivered.

    Each event of a file is sent to the sinks of the routes that it takes, or of --route. Its
    records are removed from the store first, and written again when the sink has accepted it.
    It is refused while a worker holds the event, while the route is paused, and if a newer state
    of its entity was delivered.

    A key or an id (id:ID if it looks like a file name) works if the event itself can be found:
    in the dead letters, where it is the same as `oncebridge dead replay`, or in a file with
    --in. For a large file, it asks for confirmation every 10,000 events.

    Exit code 1: something was not sent, not found or not readable, or you answered no.
    """
    refuse_memory(setup.config.store, "store")
    chosen_routes(setup, routes)  # raises for unknown names
    if not dry_run:
        require_confirmation("events that were delivered are sent again", yes=yes)
    audit = open_audit_file(setup)
    printer = _ResultPrinter(setup, as_json=as_json)
    is_resolved = True
    async with event_finder(setup, recording=recording) as finder, AsyncExitStack() as stack:
        gathering = _BatchReader(finder, routes, printer)
        sender: _BatchSender | None = None
        async for batch in gathering.batches(what):
            if sender is None:
                # A new store is empty; the event can be sent all the same.
                store = await stack.enter_async_context(opened(setup.config.store.opened))
                sender = _BatchSender(setup, OperatorLog(audit, store, reason=reason), printer)
                stack.push_async_callback(sender.aclose)
            ready = await _ready(setup.config.store.opened, batch, printer, dry_run=dry_run)
            is_resolved = is_resolved and len(ready.sends) == len(batch.sends)
            if dry_run or not (ready.sends or ready.letters):
                continue
            if not yes and not _confirmed(ready.routes):
                return EXIT_NEEDS_ATTENTION
            is_resolved = await sender.send(ready) and is_resolved
    return 0 if is_resolved and gathering.is_whole and sender is not None else EXIT_NEEDS_ATTENTION


class _Batch(Struct):
    """Events on their routes, and dead letters, that are processed together."""

    sends: list[tuple[FoundEvent, RouteIdentity]]
    letters: list[DeadLetter]

    @property
    def routes(self) -> list[str]:
        """The routes, one for each event."""
        names = [way.route.name for _, way in self.sends]
        return names + [letter.route for letter in self.letters]


class _BatchReader:
    """Finds the events that were named, in batches that fit into memory."""

    def __init__(
        self, finder: EventFinder, routes: Sequence[str], printer: "_ResultPrinter"
    ) -> None:
        self.is_whole = True
        """Everything that was named was found and can be sent."""
        self._finder = finder
        self._routes = routes
        self._printer = printer
        self._seen: set[tuple[bytes, bytes]] = set()
        self._numbers: set[int] = set()

    async def batches(self, texts: Sequence[str]) -> AsyncIterator[_Batch]:
        """Yield the events in batches; an event that a file has several times is sent once."""
        batch, size = _Batch([], []), 0
        for named in [self._finder.named(text) for text in texts]:
            async for one in self._found(named):
                self._add(one, batch)
                size += len(one.event.raw)
                if len(batch.sends) >= _AT_ONCE or size >= _MOST_BYTES:
                    yield batch
                    batch, size = _Batch([], []), 0
        if batch.sends or batch.letters:
            yield batch

    async def _found(self, named: EventReference) -> AsyncIterator[FoundEvent]:
        is_file = named.kind == "file"
        found = self._finder.in_file(named.text) if is_file else await self._finder.events(named)
        is_empty = True
        for one in found:
            is_empty = False
            yield one
        if is_empty:
            why = "it has no event" if is_file else f"{_NO_BODY}{named.hint}"
            self._miss(str(named), why)

    def _add(self, one: FoundEvent, batch: _Batch) -> None:
        if one.letter is None:
            self._add_event(one, batch)
        elif one.letter.number not in self._numbers:
            self._numbers.add(one.letter.number)
            why_not = self._other_route(one.letter)
            if why_not:
                self._miss(one.label, why_not)
            else:
                batch.letters.append(one.letter)

    def _other_route(self, letter: DeadLetter) -> str:
        """Return why a dead letter is not sent: a replay goes to the route where it died."""
        if not self._routes or (letter.rule and letter.route in self._routes):
            return ""
        died = f"it died on route {letter.route}" if letter.rule else "it died on no route"
        return f"{died}; `oncebridge dead show {letter.number} --raw` prints the event"

    def _add_event(self, one: FoundEvent, batch: _Batch) -> None:
        ways = self._finder.ways(one, self._routes)
        if not ways:
            self._miss(
                one.label, f"not an event: {one.problem}" if one.problem else "no route matches it"
            )
        for way in ways:
            name = [(known.key, known.part.hash) for known in way.keys[-1:]]
            if self._seen.issuperset(name) and name:
                self._printer.skip(one.label, way.route.name)
                continue
            self._seen.update(name)
            batch.sends.append((one, way))

    def _miss(self, what: str, why: str) -> None:
        self._printer.refuse(what, "", why)
        self.is_whole = False


async def _ready(
    store: Store, batch: _Batch, printer: "_ResultPrinter", *, dry_run: bool
) -> _Batch:
    """Return the events that can be sent; print why the others cannot."""
    ready = _Batch([], batch.letters)
    for at in range(0, len(batch.sends), _LOOKED_AT):
        pairs = batch.sends[at : at + _LOOKED_AT]
        plans = await plan_resends(store, [way for _, way in pairs])
        for (one, way), intent in zip(pairs, plans, strict=True):
            if intent.why_not:
                printer.refuse(one.label, way.route.name, intent.why_not)
                continue
            ready.sends.append((one, way))
            if dry_run:
                printer.print_line(one.label, way.route.name, "would be sent", intent.before)
    for letter in batch.letters:
        note(f"found in the dead letters: this is `oncebridge dead replay {letter.number}`")
        if dry_run:
            printer.print_line(
                f"dead letter {letter.number}", letter.route, "would be replayed", letter.reason
            )
    return ready


def _confirmed(routes: Sequence[str]) -> bool:
    """Ask for confirmation; *routes* has one name for each event."""
    note(_WARNING)
    what = "1 event" if len(routes) == 1 else f"{len(routes):,} events"
    names = printable(", ".join(sorted(set(routes))))
    return click.confirm(f"Send {what} again, on {names}?", err=True)


class _BatchSender:
    """Sends batches through gateways, which are opened when they are first needed."""

    def __init__(self, setup: Setup, operator_log: OperatorLog, printer: "_ResultPrinter") -> None:
        self._setup = setup
        self._operator_log = operator_log
        self._printer = printer
        self._router: Router | None = None
        self._open: set[str] = set()

    async def send(self, ready: _Batch) -> bool:
        """Send a batch; return whether all of it was sent."""
        router = self._router = self._router or make_router(self._setup)
        names = {way.route.name for _, way in ready.sends}
        for gateway in router.gateways:
            if gateway.route not in self._open and (ready.letters or gateway.route in names):
                self._open.add(gateway.route)
                await gateway.open()
        is_resolved = await self._send(router, ready.sends)
        if ready.letters:
            redrive = Replayer(self._setup, router, before=self._before_replay)
            for done in await redrive.replay(ready.letters):
                self._printer.replayed(done)
                is_resolved = is_resolved and done.is_resolved
        return is_resolved

    async def _send(
        self, router: Router, sends: Sequence[tuple[FoundEvent, RouteIdentity]]
    ) -> bool:
        store: Store = self._setup.config.store.opened
        gateways = {one.route: one for one in router.gateways}
        again = Resender(store, gateways, before=self._before_send)
        is_resolved = True
        with progress_text(quiet=len(sends) < _LOOKED_AT) as show:
            for count, (one, way) in enumerate(sends, 1):
                assert isinstance(one.event, Event)  # noqa: S101 - or it would have no way
                done = await again.send(one.event, way)
                self._printer.resent(one.label, done)
                is_resolved = is_resolved and done.is_sent
                show(f"{count:,} sent")
        return is_resolved

    async def _before_send(self, intent: ResendPlan) -> None:
        await self._operator_log.write("resend", routes=[intent.route], keys=intent.keys)

    async def _before_replay(self, letters: Sequence[DeadLetter]) -> None:
        await write_replay(self._setup, self._operator_log, letters)

    async def aclose(self) -> None:
        if self._router is not None:
            try:
                await self._router.drain(self._setup.config.grace)
            finally:
                await self._router.aclose()


class _ResultPrinter:
    """Prints the result for each event; to standard error if events go to standard output."""

    def __init__(self, setup: Setup, *, as_json: bool) -> None:
        self._as_json = as_json
        self._is_err = is_to_stdout(setup)
        self._several = len(setup.routes) > 1
        self._console = Console(stderr=self._is_err, highlight=False, soft_wrap=True)

    def print_line(
        self, what: str, route: str, result: str, why: str = "", style: str = ""
    ) -> None:
        if self._as_json:
            fields = {"what": what, "route": route or None, "result": result, "why": why}
            self._print(fields)
            return
        where = f" on {route}" if route and self._several else ""
        text = f"{result}: {why}" if why else result
        click.echo(printable(f"{what}{where}"), err=self._is_err)
        self._console.print(field("", text, style, wide=0))

    def refuse(self, what: str, route: str, why: str) -> None:
        self.print_line(what, route, "not sent", why, "red")

    def skip(self, what: str, route: str) -> None:
        if not self._as_json:
            self.print_line(what, route, "the same event as one above")

    def resent(self, what: str, done: Resent) -> None:
        outcome = done.outcome
        if outcome is None:
            self.refuse(what, done.intent.route, done.why_not)
            return
        if self._as_json:
            fields: dict[str, Any] = {
                "what": what,
                "route": done.intent.route,
                "result": "sent" if done.is_sent else "not sent",
                "verdict": outcome.verdict.value,
                "why": done.why_not,
                "retry_after_ms": outcome.retry_after_ms,
                "before": done.intent.before,
                "key": outcome.key.hex() or None,
            }
            self._print(fields)
            return
        if done.is_sent:
            known = f"once more; {done.intent.before} before"
            text = known if done.intent.was else done.intent.before
        else:
            text = done.why_not or "it was not delivered"
            if not outcome.acknowledge:
                text += f"; its records are removed: run it again in {outcome.retry_after_ms / 1000:.1f} s"
        style = STYLES.get(outcome.verdict, "")
        self.print_line(what, done.intent.route, outcome.verdict.value, text, style)

    def replayed(self, one: Replayed) -> None:
        if self._as_json:
            self._print({"what": f"dead letter {one.number}"} | replayed_as_json(one))
            return
        verdict = one.verdict.value if one.verdict else "kept"
        style = STYLES.get(one.verdict, "") if one.verdict else "red"
        self.print_line(f"dead letter {one.number}", "", verdict, one.reason, style)

    def _print(self, fields: dict[str, Any]) -> None:
        click.echo(json.dumps(fields), err=self._is_err)
