"""`oncebridge explain`: show what happened to an event, and why."""

import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from msgspec import UNSET, Struct
from rich.console import Console
from rich.text import Text

from oncebridge.base.formatting import iso_time
from oncebridge.cli.command import (
    EXIT_NEEDS_ATTENTION,
    as_json_option,
    command,
    field,
    note,
    open_file,
    printable,
    screen,
)
from oncebridge.cli.event_selection import (
    EventFinder,
    event_finder,
    in_option,
    not_found,
    progress_text,
    scan_option,
    store_for_reading,
)
from oncebridge.cli.status_line import STYLES
from oncebridge.dead_letters.api import DeadLetter
from oncebridge.engine.causes import MEANINGS, Cause
from oncebridge.events.differences import FieldChange
from oncebridge.events.framing import BadGzip, RawRecord, RecordReader
from oncebridge.operate.explain.explainer import Wanted, explain_key
from oncebridge.operate.explain.explainer import explain as explain_records
from oncebridge.operate.explain.explanation import Explanation, KeyExplanation, dumps, window
from oncebridge.operate.explain.words import moment, state, summary, summary_of_key
from oncebridge.operate.lookup import EventReference
from oncebridge.operate.operator_log import OperatorActions
from oncebridge.service.config import Setup
from oncebridge.stores.api import Store

_WIDTH = 78
_MOST_PATHS = 12
_MOST_VALUE = 60
_GLUE = "\N{NO-BREAK SPACE}"
_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC")


class _ExplainOptions(Struct, frozen=True):
    """The options of the command line."""

    as_json: bool
    canonical: bool
    values: bool
    recording: str | None


@command(
    "oncebridge explain event.json -c oncebridge.toml",
    "oncebridge explain 01d4… -c oncebridge.toml        # a key as it is shown",
    "oncebridge explain 6f5c… --in events.ndjson.gz     # an envelope id",
    "tail -n 1 events.ndjson | oncebridge explain - --preset genesys --canonical",
)
@click.argument("what", metavar="FILE|KEY|ID")
@in_option
@scan_option
@click.option(
    "--values", is_flag=True, help="Show values of details too; they may be personal data."
)
@click.option(
    "--canonical", is_flag=True, help="Show the text that was hashed too; it is part of the event."
)
@as_json_option
async def explain(
    setup: Setup,
    *,
    what: str,
    recording: str | None,
    scan: bool,
    values: bool,
    canonical: bool,
    as_json: bool,
) -> int:
    """
    Show what happened to an event and why, with all operator actions.

    FILE holds one event, an array or one per line, also compressed with gzip, or wrapped by a
    queue, topic or function; - is standard input. KEY is a key in hex. ID is the envelope id of
    a first copy (id:ID if it looks like a file name): it is searched for with --in, in the dead
    letters, and then in the store, where all records have to be read.

    Nothing is claimed and nothing is changed. The verdict needs the store of the service, so
    use the same configuration; without the store, the rule and the keys are still shown.

    Exit code 1: something could not be read as an event, or nothing was found.
    """
    asked = _ExplainOptions(as_json, canonical, values, recording)
    async with event_finder(setup, recording=recording, scan=scan) as finder:
        named = finder.named(what)
        async with store_for_reading(setup, "no verdicts") as store:
            printer = _ExplanationPrinter(setup, finder, store, asked)
            if named.kind == "file":
                return await printer.file(named.text)
            return await printer.named(named)


class _ExplanationPrinter:
    """Prints explanations, one after the other."""

    def __init__(
        self, setup: Setup, finder: EventFinder, store: Store | None, asked: _ExplainOptions
    ) -> None:
        self._setup = setup
        self._finder = finder
        self._store = store
        self._asked = asked
        self._console = screen()
        self._printed = 0

    async def file(self, name: str) -> int:
        """Explain the events of a file, each compared with the earlier ones."""
        with open_file(name) as file:
            unreadable = await self._records(RecordReader(file))
        if not self._printed:
            note("it has no event")
        return EXIT_NEEDS_ATTENTION if unreadable or not self._printed else 0

    async def named(self, named: EventReference) -> int:
        """Explain the event with a key or an id, as far as it can be found."""
        if self._asked.recording is not None:
            with open_file(self._asked.recording) as file:
                await self._records(
                    _counted(RecordReader(file)),
                    wanted=lambda event, ways: (
                        event.id == named.text
                        if named.kind == "id"
                        else any(named.key in way.all_keys() for way in ways)
                    ),
                    in_recording=True,
                )
            if self._printed:
                return 0
            note(f"{self._asked.recording} has no event with that {named.kind}")
        if named.kind == "key":
            return await self._key(named.key)
        for letter in await self._finder.letters.with_id(named.text):
            await self._records([RawRecord(letter.raw, letter.number, 0, 0)], letter=letter)
        return 0 if self._printed else await self._by_scan(named)

    async def _by_scan(self, named: EventReference) -> int:
        records = await self._finder.records(named, self._store) if self._store else []
        for record in records:
            explanation = await explain_key(
                record.key, self._store, self._finder.letters, record=record
            )
            self._print_key(explanation)
        if not records:
            note(not_found(named))
        return 0 if records else EXIT_NEEDS_ATTENTION

    async def _key(self, key: bytes) -> int:
        explanation = await explain_key(key, self._store, self._finder.letters)
        self._print_key(explanation)
        return 0 if explanation.is_known else EXIT_NEEDS_ATTENTION

    async def _records(
        self,
        records: Iterable[RawRecord],
        *,
        wanted: Wanted | None = None,
        letter: DeadLetter | None = None,
        in_recording: bool = False,
    ) -> int:
        """Explain records; return how many are not events."""
        unreadable = 0
        asked = self._asked
        with _recording(None if in_recording or letter else asked.recording) as recording:
            try:
                async for explanation in explain_records(
                    records,
                    self._setup,
                    self._store,
                    letters=self._finder.letters,
                    values=asked.values,
                    recording=recording,
                    recording_name=asked.recording or "",
                    wanted=wanted,
                ):
                    unreadable += explanation.event is None
                    self._print(explanation, letter)
            except BadGzip as error:
                note(str(error))
                unreadable += 1
        return unreadable

    def _print(self, explanation: Explanation, letter: DeadLetter | None) -> None:
        self._printed += 1
        if self._asked.as_json:
            more = {"letter": letter.number} if letter else {}
            text = dumps(
                explanation, canonical=self._asked.canonical, summary=summary(explanation), **more
            )
            click.echo(text)
            return
        if self._printed > 1:
            click.echo()
        several = len(self._setup.routes) > 1
        title = f"dead letter {letter.number}" if letter else f"line {explanation.line}"
        _print_event(
            self._console, title, explanation, several=several, canonical=self._asked.canonical
        )

    def _print_key(self, explanation: KeyExplanation) -> None:
        self._printed += 1
        if self._asked.as_json:
            click.echo(dumps(explanation, summary=summary_of_key(explanation)))
            return
        if self._printed > 1:
            click.echo()
        _print_key(self._console, explanation)


@contextmanager
def _recording(name: str | None) -> Iterator[Iterable[RawRecord]]:
    if name is None:
        yield ()
        return
    with open_file(name) as file:
        yield _counted(RecordReader(file))


def _counted(records: Iterable[RawRecord]) -> Iterator[RawRecord]:
    """Yield *records*, and show progress."""
    with progress_text() as show:
        for number, record in enumerate(records, 1):
            if not number % 1000:
                show(f"{number:,} read")
            yield record


# --- as text ------------------------------------------------------------------------------


def _print_event(
    console: Console, name: str, explanation: Explanation, *, several: bool, canonical: bool
) -> None:
    title = Text()
    title.append(name, style="bold")
    if explanation.event is not None:
        names = (explanation.event.id, explanation.event.source, explanation.event.detail_type)
        title.append("".join(f"  {printable(name)}" for name in names if name))
    console.print(title)
    _print_words(console, summary(explanation))
    if explanation.event is None:
        console.print(field("dead", explanation.reason, "red"))
        return
    if explanation.route is None:
        return
    if several:
        console.print(field("route", explanation.route))
    console.print(field("rule", explanation.rule))
    if explanation.why:
        _field(
            console,
            explanation.action if explanation.action != "deduplicate" else "note",
            explanation.why,
        )
    _print_keys(console, explanation, canonical=canonical)
    for part in ("entity", "version"):
        if by := getattr(explanation, f"{part}_by"):
            value = getattr(explanation, part)
            console.print(field(part, by if value is None else f"{by} = {value}"))
    _print_verdict(console, explanation)
    _print_letter(console, explanation.letter)
    _print_acts(console, explanation.acts)
    _print_acts(console, explanation.entity_acts, " of its entity")


def _print_keys(console: Console, explanation: Explanation, *, canonical: bool) -> None:
    for known in explanation.keys:
        console.print(field("key", f"{known.kind}, remembered for {window(known)}"))
        console.print(field("", known.key.hex()))
        standing = explanation.standing_of(known.key)
        if standing is not None and standing.record is not None:
            _field(console, "", state(standing))
        if canonical:
            console.print(field("", known.canonical, "dim"))
    if explanation.keys and explanation.sent_as != explanation.keys[-1].key:
        console.print(field("header", "Idempotency-Key, made of key and content"))
        console.print(field("", explanation.sent_as.hex()))


def _print_verdict(console: Console, explanation: Explanation) -> None:
    judged = explanation.judged
    if judged is not None:
        text = f"{judged.verdict.value}: {judged.why}" if judged.why else judged.verdict.value
        if judged.is_shadow:
            text += " (forwarded anyway: shadow mode)"
        if explanation.paused:
            text += " (after the route is resumed: it is paused)"
        _field(console, "verdict", text, STYLES.get(judged.verdict, ""))
        if judged.first is not None:
            who = f" as {judged.first.id}" if judged.first.id else ""
            console.print(field("first", f"arrived {iso_time(judged.first.arrived_ms)}{who}"))
    if explanation.cause is not None:
        likely = (
            " (likely)" if explanation.is_guess and explanation.cause is not Cause.UNKNOWN else ""
        )
        _field(console, "cause", f"{explanation.cause}{likely}: {MEANINGS[explanation.cause]}")
    if explanation.changes is not None:
        _print_changes(console, explanation)


def _print_changes(console: Console, explanation: Explanation) -> None:
    assert explanation.changes is not None  # noqa: S101 - the caller checked
    where = f"line {explanation.same_as}" + (
        f" of {explanation.same_in}" if explanation.same_in else ""
    )
    if not explanation.changes:
        console.print(field("differs", f"in nothing from {where}"))
        return
    console.print(field("differs", f"from {where}:"))
    for change in explanation.changes[:_MOST_PATHS]:
        console.print(field("", f"  {_change(change)}"))
    more = len(explanation.changes) - _MOST_PATHS
    if more > 0:
        console.print(field("", f"  and {more} more"))


def _change(change: FieldChange) -> str:
    if not change.shown:
        return change.path
    return f"{change.path}: {_value(change.was)} → {_value(change.is_)}"


def _value(value: Any) -> str:
    if value is UNSET:
        return "(missing)"
    if isinstance(value, str):
        text = value
    elif isinstance(value, float):
        text = repr(value)  # json would round an ExactFloat
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MOST_VALUE else f"{text[: _MOST_VALUE - 1]}…"


def _print_letter(console: Console, letter: DeadLetter | None) -> None:
    if letter is None:
        return
    died = moment(letter.buried_ms)
    text = f"dead letter {letter.number}, died {died}, {letter.reason}"
    _field(console, "dead", f"{text}: {letter.message}" if letter.message else text, "red")


def _print_acts(console: Console, acts: OperatorActions, what: str = "") -> None:
    label = "operator"
    if acts.before:
        _field(console, label, f"{acts.before} earlier actions are not kept any more")
        label = ""
    for act in acts.acts:
        on = f" on {act.route}" if act.route else ""
        why = f": {act.reason}" if act.reason else ""
        _field(console, label, f"{moment(act.at_ms)} {act.verb}{what}{on}, by {act.who}{why}")
        label = ""


def _print_key(console: Console, explanation: KeyExplanation) -> None:
    console.print(Text(f"key {explanation.key.hex()}", style="bold"))
    _print_words(console, summary_of_key(explanation))
    if explanation.route:
        console.print(field("route", explanation.route))
    if explanation.letter is not None and explanation.letter.rule:
        console.print(field("rule", explanation.letter.rule))
    if explanation.standing is not None and explanation.standing.record is not None:
        _field(console, "record", state(explanation.standing))
    if explanation.first is not None:
        who = f" as {explanation.first.id}" if explanation.first.id else ""
        console.print(field("first", f"arrived {iso_time(explanation.first.arrived_ms)}{who}"))
    _print_letter(console, explanation.letter)
    _print_acts(console, explanation.acts)


def _print_words(console: Console, text: str) -> None:
    for line in _wrapped(printable(text), _WIDTH - 2):
        console.print(f"  {line}", markup=False)
    console.print()


def _field(console: Console, name: str, text: str, style: str = "") -> None:
    console.print(field(name, "\n".join(_wrapped(printable(text), _WIDTH - 11)), style))


def _wrapped(text: str, width: int) -> list[str]:
    """Wrap between words, and never inside a time."""
    glued = _TIME.sub(lambda found: found[0].replace(" ", _GLUE), text)
    lines = textwrap.wrap(glued, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace(_GLUE, " ") for line in lines] or [""]
