"""
`oncebridge demo`: a simulated Genesys stream through a real service.

    the stream ── HTTP ──▶ source ──▶ gateway, SQLite ──▶ sink ── HTTP ──▶ the CRM

The service is the one of `oncebridge run`, with its dashboard; only the sender and the CRM are
simulated. The sender posts each event, waits for the response, and retries when it is asked to.
The CRM counts the events that it gets, and is down for a moment. The simulation knows which
events are duplicates, so the last lines say whether the service was right.
"""

import asyncio
import json
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from heapq import heappop, heappush
from io import TextIOWrapper
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import Any, Literal

import click
import msgspec
from msgspec import Struct
from rich.console import Console
from rich.text import Text

from oncebridge.base.formatting import format_count
from oncebridge.cli.command import EXIT_INTERRUPTED, EXIT_NEEDS_ATTENTION, report_errors
from oncebridge.cli.event_loop import on_signals, remove_signal_handlers, run_loop
from oncebridge.cli.status_line import STYLES
from oncebridge.dead_letters.api import DeadLetter
from oncebridge.dead_letters.sqlite import SQLiteDeadLetters
from oncebridge.engine.verdict import Verdict
from oncebridge.errors import ConfigError, OncebridgeError
from oncebridge.genesys.simulator import LOOK_ALIKES, START_MS, Label, Simulated, simulate
from oncebridge.http.client import Client, ClientResponse
from oncebridge.http.server import Request, Response, Server
from oncebridge.service import config, logs
from oncebridge.service.service import Service
from oncebridge.sources.http.source import HttpSource

_A_SECOND = 9
"""Arrivals per second that a person can follow."""
_FEWEST = 40
_UNREADABLE = {0.2: b'{"version":"0","id":"cut off in the mid', 0.65: b'{"ping":true}'}
"""Bodies that are not events, by their position in the stream."""
_DOWN_AT, _DOWN_FOR = 0.4, 4
"""When the CRM goes down, as a share of the stream, and how many requests it then refuses."""
_MOST_TRIES = 30
_PORT = 8081
_WIDE = 100

_ABOUT = {
    Label.REDELIVERY: "redelivered",
    Label.RE_EMISSION: "published again",
    Label.SECOND_INTEGRATION: "2nd integration",
    Label.REPLAY: "archive replay",
    Label.REORDERED: "re-serialised",
    Label.OTHER_AGENT: "another agent, same ms",
    Label.ONE_MS_LATER: "one millisecond later",
    Label.ACW_AGAIN: "after-call work again",
    Label.FINAL_TRANSCRIPT: "final text of a partial",
    Label.SECOND_UPDATE: "second update, same ms",
    Label.EQUAL_PRESENCE: "another user, same body",
}
_OVERTAKEN = "overtaken by its copy"
_EXPECTED = (Verdict.DELIVERED, Verdict.DUPLICATE, Verdict.DEAD, Verdict.FAILED, Verdict.BUSY)


@click.command(
    epilog="Examples: oncebridge demo  |  oncebridge demo --seconds 60 --seed 7  |  "
    "oncebridge demo --stay"
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, 3600, min_open=True),
    default=25,
    show_default=True,
    help="How long it runs; a longer one has more events.",
)
@click.option("--seed", default=1, show_default=True, help="The seed of the simulated stream.")
@click.option("--fast", is_flag=True, help="Do not wait between arrivals.")
@click.option("--stay", is_flag=True, help="Keep the dashboard running at the end, until Ctrl-C.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print only the summary, as one JSON object; implies --fast.",
)
@report_errors
def demo(*, seconds: float, seed: int, fast: bool, stay: bool, as_json: bool) -> None:
    """
    Show what oncebridge does, with a simulated stream and a real service.

    A simulated Genesys Cloud stream with every kind of duplicate, with look-alikes that are not
    duplicates, and with two bodies that are not events, is sent by HTTP to a service with a
    SQLite store in a temporary directory, which delivers by HTTP to a CRM that is down for a
    moment. The dashboard is at the address that is printed first: http://127.0.0.1:8081/ if that
    port is free.

    Ends by itself, or with Ctrl-C, and prints a summary that is checked against the simulation.
    The exit code is 0 only if every check passes.
    """
    logs.set_up("error", "auto")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for a terminal without UTF-8
    screen = _Screen(Console(highlight=False, markup=False, emoji=False, quiet=as_json))

    def print_result(found: _DemoResult) -> None:
        if as_json:
            click.echo(json.dumps(found.as_json()))
        else:
            screen.summary(found)

    try:
        options = _DemoOptions(seconds, seed, fast or as_json, stay)
        found = run_loop(_run_demo(options, screen, print_result))
    except asyncio.CancelledError:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(0 if found.right else EXIT_NEEDS_ATTENTION)


class _DemoOptions(Struct, frozen=True):
    """The options of the command line."""

    seconds: float
    seed: int
    fast: bool
    stay: bool


async def _run_demo(
    options: _DemoOptions, screen: "_Screen", print_result: "Callable[[_DemoResult], None]"
) -> "_DemoResult":
    """Start the service, send the stream, and return the result."""
    with TemporaryDirectory(prefix="oncebridge-demo-") as directory:
        crm = _Crm()
        await crm.open()
        flags = {
            "source": "http://127.0.0.1:0/events",
            "store": f"sqlite:{directory}/seen.db",
            "sink": crm.url,
            "dead": f"sqlite:{directory}/dead.db",
            "preset": "genesys",
            "route": "crm",
            # The data is invented, so it may all be shown and changed.
            "dashboard_write": "true",
            "dashboard_payloads": "true",
            "history": "all",
        }
        try:
            service = await _opened(flags)
            try:
                screen.show_dashboard_url(service.dashboard_url or "")
                (source,) = service.sources
                assert isinstance(source, HttpSource)  # noqa: S101 - by its address
                sender = _StreamSender(source.url, crm, screen)
                async with _running(service, sender):
                    await sender.send(options.seconds, options.seed, fast=options.fast)
                    letters = await _letters(directory)
                    found = _collect_result(options.seed, service, sender, crm, letters)
                    print_result(found)
                    if options.stay and not sender.ended_early:
                        screen.stay(service.dashboard_url or "")
                        await sender.wait_for_signal()
                return found
            finally:
                await service.close()
        finally:
            await crm.aclose()


async def _opened(flags: dict[str, str]) -> Service:
    """Open the service, with its dashboard at the usual port or, if that is taken, at any."""
    for port in (_PORT, 0):
        dashboard = {"dashboard": f"127.0.0.1:{port}"}
        service = Service(config.load(environment={}, flags=flags | dashboard))
        try:
            await service.open()
            break
        except BaseException as error:
            await service.close()
            if port == 0 or not isinstance(error, ConfigError) or error.where != "dashboard":
                raise
    return service


@asynccontextmanager
async def _running(service: Service, sender: "_StreamSender") -> AsyncIterator[None]:
    running = asyncio.create_task(service.run())
    try:
        yield
    finally:
        await sender.aclose()
        service.stop()
        await running


async def _letters(directory: str) -> list[DeadLetter]:
    dead = SQLiteDeadLetters(Path(directory) / "dead.db")
    try:
        return await dead.list()
    finally:
        await dead.aclose()


class _Crm:
    """The simulated receiver: counts the events that it accepts, and can be down."""

    def __init__(self) -> None:
        self._server = Server(self._take, host="127.0.0.1", port=0)
        self._refusals = 0
        self.truths: dict[bytes, int] = {}
        """The logical event of each body that may arrive here."""
        self.taken: Counter[int | None] = Counter()
        """How often each logical event was accepted; None is for bodies that were never sent."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}/crm"

    @property
    def is_down(self) -> bool:
        return self._refusals > 0

    def go_down(self, refusals: int) -> None:
        self._refusals = refusals

    async def open(self) -> None:
        await self._server.open()

    async def aclose(self) -> None:
        await self._server.aclose()

    def _take(self, request: Request, respond: Callable[[Response], None]) -> None:
        if self._refusals:
            self._refusals -= 1
            respond(Response(503, headers=(("Retry-After", "1"),)))
            return
        self.taken[self.truths.get(request.body)] += 1
        respond(Response(200))


class _Arrival(Struct):
    """One body to send, perhaps more than once."""

    at_ms: int
    """On the stream's own clock."""
    due_s: float
    """On the loop's."""
    body: bytes
    event: Simulated | None = None
    tries: int = 0


class _DemoAnswer(Struct, frozen=True):
    """The response of the service to one arrival."""

    verdict: Verdict
    key: str
    reason: str
    again_s: int
    original: "tuple[str, int] | None" = None
    """For a duplicate: the short id of the arrival that was delivered, and its time."""


class _StreamSender:
    """Post the stream to *url*, one arrival after the other, with retries."""

    def __init__(self, url: str, crm: _Crm, screen: "_Screen") -> None:
        self.url = url
        self._client = Client(url, headers=[("Content-Type", "application/json")])
        self._crm = crm
        self._screen = screen
        self._stop = asyncio.Event()
        self._speedup = 1.0
        self._order = count()
        self._stream: deque[_Arrival] = deque()
        self._again: list[tuple[float, int, _Arrival]] = []
        self._delivered: dict[str, tuple[str, int]] = {}
        self.ended_early = False
        self.retried = 0
        self.causes: Counter[str] = Counter()
        self.look_alikes = 0
        self.merged = 0
        self._truths: dict[str, int] = {}
        """Which logical event was delivered under each key."""
        self.unreadable: list[bytes] = []

    async def send(self, seconds: float, seed: int, *, fast: bool) -> None:
        """Send the whole stream; a signal ends it early, a second one at once."""
        loop = asyncio.get_running_loop()
        self._install_signal_handlers()
        arrivals = _arrivals(seed, max(int(seconds * _A_SECOND), _FEWEST))
        span_s = (arrivals[-1].at_ms + 1) / 1000
        self._speedup = span_s / seconds
        self._stream.extend(arrivals)
        down_at = int(_DOWN_AT * len(arrivals))
        speed = f", shown {self._speedup:.1f} times as fast; Ctrl-C ends it early"
        self._screen.begin(
            f"a simulated Genesys Cloud contact centre, seed {seed}",
            f"stream → {self.url} → SQLite → {self._crm.url}",
            f"{len(arrivals)} arrivals within {span_s:.0f} s{'' if fast else speed}",
        )
        began = loop.time()
        for arrival in arrivals:
            arrival.due_s = began if fast else began + arrival.at_ms / 1000 / self._speedup
        while self._stream or self._again:
            arrival = self._next(loop.time())
            await self._wait_for(arrival)
            if self._stop.is_set() and not arrival.tries:
                continue
            if not arrival.tries and len(arrivals) - len(self._stream) == down_at:
                self._crm.go_down(_DOWN_FOR)
                self._screen.remark("the CRM goes down: it answers 503")
            await self._post(arrival)

    async def wait_for_signal(self) -> None:
        """Wait for a signal."""
        await self._stop.wait()

    async def aclose(self) -> None:
        remove_signal_handlers()
        await self._client.aclose()

    def _install_signal_handlers(self) -> None:
        """Stop at the first signal, after the retries that are due; exit at the second."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in one

        def stop(name: str) -> None:
            if self._stop.is_set() or name == "SIGHUP":  # the terminal is gone
                task.cancel()
            self._stop.set()

        on_signals(stop)

    def _next(self, now_s: float) -> _Arrival:
        """Return the arrival that is due next; a retry that is due goes first."""
        if self._again and not (self._stream and self._again[0][0] > self._next_due(now_s)):
            return heappop(self._again)[2]
        return self._stream.popleft()

    def _next_due(self, now_s: float) -> float:
        return max(self._stream[0].due_s, now_s)

    async def _wait_for(self, arrival: _Arrival) -> None:
        """Wait until *arrival* is due; while stopping, only for a retry."""
        loop = asyncio.get_running_loop()
        if not self._stop.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout_at(arrival.due_s):
                    await self._stop.wait()
        if self._stop.is_set():
            self._end_early(len(self._again) + (arrival.tries > 0))
            if arrival.tries:
                await asyncio.sleep(max(arrival.due_s - loop.time(), 0))

    def _end_early(self, left: int) -> None:
        if not self.ended_early:
            self.ended_early = True
            more = f"; {format_count(left, 'retry', 'retries')} left" if left else ""
            self._screen.remark(f"ended early{more}")
            self._crm.go_down(0)  # so that the end does not wait for it
        self._stream.clear()

    async def _post(self, arrival: _Arrival) -> None:
        """Send one arrival, count the response and show it."""
        event = arrival.event
        if event is not None:
            self._crm.truths[arrival.body] = event.truth
        elif not arrival.tries:
            self.unreadable.append(arrival.body)
        was_down = self._crm.is_down
        arrival.tries += 1
        answer = self._read_answer(await self._client.post(arrival.body))
        heading = _heading(arrival)
        if answer.verdict is Verdict.DELIVERED:
            self._delivered[answer.key] = (heading[2], arrival.at_ms)
        if event is not None:
            self._count(event, answer)
        self._screen.line(arrival, answer, heading)
        if was_down and not self._crm.is_down:
            self._screen.remark("the CRM is up again")
        if answer.again_s:
            self._send_again(arrival, answer.again_s)

    def _read_answer(self, answer: ClientResponse) -> _DemoAnswer:
        if answer.status not in (200, 503):
            raise OncebridgeError(f"the demo's own source answered {answer.status}")
        said = msgspec.json.decode(answer.body)
        # Without a verdict it is still in progress: this machine is slow.
        verdict = Verdict(said.get("verdict", Verdict.BUSY))
        key = said.get("key", "")
        return _DemoAnswer(
            verdict,
            key,
            said.get("reason", ""),
            int(answer.headers.get(b"retry-after", b"0")),
            self._delivered.get(key) if verdict is Verdict.DUPLICATE else None,
        )

    def _count(self, event: Simulated, answer: _DemoAnswer) -> None:
        if event.label in LOOK_ALIKES and not answer.again_s:
            self.look_alikes += 1
        if answer.verdict is Verdict.DUPLICATE:
            is_copy = event.label in _ABOUT and event.label not in LOOK_ALIKES
            self.causes[event.label.value if is_copy else "overtaken"] += 1
            self.merged += self._truths.get(answer.key, event.truth) != event.truth
        elif answer.verdict is Verdict.DELIVERED:
            self._truths[answer.key] = event.truth

    def _send_again(self, arrival: _Arrival, wait_s: int) -> None:
        if arrival.tries >= _MOST_TRIES:
            raise OncebridgeError(f"an arrival was refused {arrival.tries} times")
        self.retried += 1
        arrival.due_s = asyncio.get_running_loop().time() + wait_s
        arrival.at_ms += int(wait_s * 1000 * self._speedup)
        heappush(self._again, (arrival.due_s, next(self._order), arrival))


def _arrivals(seed: int, events: int) -> list[_Arrival]:
    """Return the simulated stream, with the unreadable bodies in it."""
    mixed = [_Arrival(one.at_ms, 0.0, one.raw, one) for one in simulate(seed, events)]
    for share, body in _UNREADABLE.items():
        at = int(share * len(mixed))
        mixed.insert(at, _Arrival(mixed[at].at_ms, 0.0, body))
    return mixed


def _heading(arrival: _Arrival) -> tuple[str, str, str]:
    """Return topic, conversation or user, and event, each shortened."""
    if arrival.event is None:
        return "(not an event)", "", ""
    event = msgspec.json.decode(arrival.body)
    topic = event["detail-type"].rpartition("{id}.")[2].replace("entityid.{id}", "audit")
    *_, entity = (part for part in event["detail"]["topicName"].split(".") if len(part) == 36)
    return topic, entity[:8], event["id"][:8]


# --- the result ------------------------------------------------------------------------------


class _DemoResult(Struct, frozen=True):
    """The counts at the end, and whether they are right."""

    seed: int
    ended_early: bool
    arrived: int
    logical: int
    verdicts: dict[str, int]
    causes: dict[str, int]
    reasons: dict[str, int]
    retried: int
    look_alikes: int
    once: bool
    merged: int
    unreadable: int
    kept: int
    balance: bool

    @property
    def right(self) -> bool:
        is_expected = all(Verdict(v) in _EXPECTED for v, n in self.verdicts.items() if n)
        is_kept = self.kept == self.unreadable
        return self.once and not self.merged and is_kept and self.balance and is_expected

    def as_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "ended_early": self.ended_early,
            "arrived": self.arrived,
            "logical_events": self.logical,
            **self.verdicts,
            "retried": self.retried,
            "look_alikes": self.look_alikes,
            "duplicates_by_cause": self.causes,
            "dead_by_reason": self.reasons,
            "checks": {
                "every_event_delivered_exactly_once": self.once,
                "look_alikes_merged": self.merged,
                "unreadable_kept": self.kept,
                "books_balance": self.balance,
            },
            "right": self.right,
        }


def _collect_result(
    seed: int, service: Service, sender: _StreamSender, crm: _Crm, letters: list[DeadLetter]
) -> _DemoResult:
    (books,) = service.books().values()
    truths = set(crm.truths.values())
    kept = Counter(letter.raw for letter in letters)
    return _DemoResult(
        seed=seed,
        ended_early=sender.ended_early,
        arrived=books.arrived,
        logical=len(truths),
        verdicts={v.value: books.verdicts[v] for v in dict.fromkeys([*_EXPECTED, *Verdict])},
        causes=dict(sender.causes.most_common()),
        reasons=dict(Counter(letter.reason for letter in letters)),
        retried=sender.retried,
        look_alikes=sender.look_alikes,
        once=crm.taken == Counter(dict.fromkeys(truths, 1)),
        merged=sender.merged,
        unreadable=len(sender.unreadable),
        kept=sum(kept[body] == 1 for body in sender.unreadable),
        balance=books.balance and not books.in_flight,
    )


# --- output ----------------------------------------------------------------------------------


class _Screen:
    """Prints to the terminal, with colours and as wide as it is."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._width = console.width if console.is_terminal else _WIDE
        self._is_wide = self._width >= _WIDE

    def show_dashboard_url(self, url: str) -> None:
        """Print the address of the dashboard."""
        is_usual = url.endswith(f":{_PORT}/")
        taken = "" if is_usual else f"  (port {_PORT} is taken)"
        self._print(Text("dashboard: ", "bold").append(url, "bold cyan").append(taken, "dim"))

    def stay(self, url: str) -> None:
        """Print that the dashboard keeps running."""
        self._print(Text())
        self.remark(f"the dashboard keeps running at {url} until Ctrl-C")

    def begin(self, what: str, *more: str) -> None:
        self._print(Text().append("oncebridge demo", "bold").append(f" · {what}"))
        for line in more:
            self._print(Text(line, "dim"))
        self._print(Text())
        time = f"{'time':<12}" if self._is_wide else f"{'time':<8}"
        heads = f"{time} {'topic':<14} {'entity':<8} {'event':<8} verdict"
        self._print(Text(heads, "bold"))

    def line(self, arrival: _Arrival, answer: _DemoAnswer, heading: tuple[str, str, str]) -> None:
        """Print one arrival: time, topic, entity, verdict and reason."""
        topic, entity, name = heading
        note, style = self._note(arrival, answer)
        line = Text().append(_clock(START_MS + arrival.at_ms, with_ms=self._is_wide), "dim")
        line.append(f" {topic:<14} {entity:<8} {name:<8} ")
        line.append(f"{answer.verdict.value:<9}", STYLES.get(answer.verdict, ""))
        line.append("  " if self._is_wide else " ").append(note, style)
        self._print(line)

    def remark(self, text: str) -> None:
        self._print(Text(f"── {text} ──", "bold magenta"))

    def summary(self, found: _DemoResult) -> None:
        """Print the counts and the checks."""
        self._print(Text())
        self._print(Text("Result", "bold"))
        causes = {
            **{label.value: about for label, about in _ABOUT.items()},
            "overtaken": _OVERTAKEN,
        }
        notes = {
            "delivered": f"{found.look_alikes} of them look-alikes",
            "duplicate": _listed({causes[cause]: n for cause, n in found.causes.items()}),
            "dead": _listed(found.reasons),
            "failed": "the CRM was down; retried",
            "busy": "another copy was waiting for its retry; retried",
        }
        self._row("arrived", found.arrived, f"{found.logical} logical events")
        for name, number in found.verdicts.items():
            if number:
                self._row(name, number, notes.get(name, "unexpected"))
        self._row("retried", found.retried, "by the sender, when the service asked for it")
        self._print(Text())
        self._print(Text("Checked against the simulation", "bold"))
        kept = f"{found.kept} of {found.unreadable}"
        checks = [
            ("every logical event delivered exactly once", _yes(found.once), found.once),
            ("look-alikes merged", str(found.merged), not found.merged),
            ("unreadable bodies kept whole", kept, found.kept == found.unreadable),
            ("every arrival accounted for", _yes(found.balance), found.balance),
        ]
        for what, answer, is_right in checks:
            answered = Text(answer, "bold green" if is_right else "bold red")
            self._print(Text(f"  {what}: ").append_text(answered))

    def _row(self, name: str, number: int, note: str) -> None:
        style = {verdict.value: style for verdict, style in STYLES.items()}.get(name, "")
        first, *more = wrap(note, max(min(self._width, _WIDE) - 22, 20)) or [""]
        line = Text("  ").append(f"{name:<11}", style).append(f"{number:>5}   ")
        self._print(line.append(first.replace("\N{NO-BREAK SPACE}", " "), "dim"))
        for rest in more:
            self._print(Text(" " * 21).append(rest.replace("\N{NO-BREAK SPACE}", " "), "dim"))

    def _note(self, arrival: _Arrival, answer: _DemoAnswer) -> tuple[str, str]:
        """Return the note on a verdict, and its style."""
        about = _ABOUT.get(arrival.event.label, "") if arrival.event else ""
        is_alike = arrival.event is not None and arrival.event.label in LOOK_ALIKES
        match answer.verdict:
            case Verdict.DUPLICATE if answer.original is not None:
                name, at_ms = answer.original
                note = f"{about} after {_elapsed(arrival.at_ms - at_ms)}"
                note = _OVERTAKEN if is_alike or not about else note
                return (f"of {name}, {note}" if self._is_wide else note), ""
            case Verdict.DUPLICATE:
                return "delivered in the meantime", ""
            case Verdict.DELIVERED if arrival.tries > 1:
                return f"→ CRM on try {arrival.tries}, key {answer.key[:8]}", "green"
            case Verdict.DELIVERED if is_alike:
                return f"new: {about}", "cyan"
            case Verdict.DELIVERED:
                key = f'  Idempotency-Key: "{answer.key[:16]}…"'
                return f"→ CRM{key if self._is_wide else f', key {answer.key[:8]}'}", "dim"
            case Verdict.DEAD:
                kept = "kept in the dead letters" if self._is_wide else "kept"
                return f"{kept}: {answer.reason.partition(':')[0]}", ""
            case Verdict.BUSY:
                return f"a copy waits; retry in {answer.again_s} s", ""
            case _:
                return f"{answer.reason}: retry in {answer.again_s} s", ""

    def _print(self, text: Text) -> None:
        text.rstrip()
        is_terminal = self._console.is_terminal
        overflow: Literal["ellipsis", "ignore"] = "ellipsis" if is_terminal else "ignore"
        self._console.print(text, no_wrap=True, overflow=overflow, crop=is_terminal)


def _listed(counts: dict[str, int]) -> str:
    # keeps a name and its number on one line
    return ", ".join(f"{name} {n}".replace(" ", "\N{NO-BREAK SPACE}") for name, n in counts.items())


def _clock(at_ms: int, *, with_ms: bool) -> str:
    seconds, rest = divmod(at_ms, 1000)
    minutes, second = divmod(seconds % 86_400, 60)
    text = f"{minutes // 60:02}:{minutes % 60:02}:{second:02}"
    return f"{text}.{rest:03}" if with_ms else text


def _elapsed(ms: int) -> str:
    return f"{max(ms, 0)} ms" if ms < 1000 else f"{ms / 1000:.1f} s"


def _yes(is_so: bool) -> str:  # noqa: FBT001 - it is the question
    return "yes" if is_so else "no"
