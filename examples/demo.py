"""
A simulated Genesys Cloud stream through a real gateway, to look at.

    python examples/demo.py [--seconds 25] [--seed 1] [--fast]

Store and dead letters are SQLite files in a temporary directory. The stream has repeats
of every kind, look-alikes that are no repeats, and two records that are no events. It
knows its own truth, so the last lines say whether the gateway was right; if it was not,
the exit code is 1.
"""

import argparse
import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from oncebridge import Event, Gateway, Outcome, Rule, Verdict
from oncebridge.dead_letters.sqlite import SQLiteDeadLetters
from oncebridge.genesys.simulator import LOOK_ALIKES, START_MS, Label, Simulated, simulate
from oncebridge.stores.sqlite import SQLiteStore

RULE = Rule.parse(
    {
        "name": "genesys",
        "key": "content",
        "ignore": ["detail.timestamp", "detail.metadata"],
        "scope": "organisation",
    }
)

UNREADABLE = {0.25: b'{"version":"0","id":"cut off in the mid', 0.6: b'["an", "array"]'}
"""Records that are no events, and how far into the stream they come."""

ABOUT = {
    Label.REDELIVERY: "redelivered",
    Label.RE_EMISSION: "published again",
    Label.SECOND_INTEGRATION: "second integration",
    Label.REPLAY: "archive replay",
    Label.REORDERED: "re-serialised",
    Label.OTHER_AGENT: "another agent, same millisecond",
    Label.ONE_MS_LATER: "one millisecond later",
    Label.ACW_AGAIN: "after-call work again, reopened",
    Label.FINAL_TRANSCRIPT: "final text of a partial one",
    Label.SECOND_UPDATE: "second update, same millisecond",
    Label.EQUAL_PRESENCE: "another user, equal body",
}

Arrival = Simulated | bytes
COLOURS = {"delivered": 32, "duplicate": 33, "dead": 31, "dim": 2, "bold": 1, "like": 36}


def paint(text: str, colour: str) -> str:
    """Colour *text*, for people only."""
    if not sys.stdout.isatty() or colour not in COLOURS:
        return text
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"


def stream(seed: int, events: int) -> list[tuple[int, Arrival]]:
    """Simulate arrivals with their times, and put the unreadable records among them."""
    mixed: list[tuple[int, Arrival]] = [(one.at_ms, one) for one in simulate(seed, events)]
    for share, raw in UNREADABLE.items():
        at = int(share * len(mixed))
        mixed.insert(at, (mixed[at][0], raw))
    return mixed


class Demo:
    """The gateway, what went in and what came out."""

    def __init__(self, directory: Path) -> None:
        self.now_ms = START_MS  # the stream has its own time
        clock = lambda: self.now_ms  # noqa: E731
        self.gateway = Gateway(
            store=SQLiteStore(directory / "seen.db", clock=clock),
            dead=SQLiteDeadLetters(directory / "dead.db"),
            sink=self.deliver,
            rules=[RULE],
            clock=clock,
        )
        self.truths: dict[bytes, int] = {}
        self.arrived: dict[str, int] = {}
        self.deliveries: Counter[int] = Counter()
        self.causes: Counter[Label] = Counter()
        self.merged: list[Simulated] = []
        self.looked_alike = 0
        self.reasons: Counter[str] = Counter()

    async def deliver(self, event: Event) -> None:
        """Stand in for the CRM: count what arrives."""
        self.deliveries[self.truths[event.raw]] += 1

    async def take(self, arrivals: Sequence[tuple[int, Arrival]]) -> None:
        """Pass a batch through the gateway and print a line for each arrival."""
        self.now_ms = START_MS + arrivals[-1][0]
        raws = []
        for _, one in arrivals:
            raw = one if isinstance(one, bytes) else one.raw
            if isinstance(one, Simulated):
                self.truths[raw] = one.truth
            raws.append(raw)
        outcomes = await self.gateway.process(raws)
        for (at, one), outcome in zip(arrivals, outcomes, strict=True):
            self.book(one, outcome)
            print(self.line(at, one, outcome), flush=True)

    def book(self, one: Arrival, outcome: Outcome) -> None:
        """Remember what the summary tells."""
        if isinstance(one, bytes):
            self.reasons[outcome.reason.partition(":")[0]] += 1
            return
        if outcome.verdict is Verdict.DUPLICATE:
            self.causes[one.label] += 1
        if one.label in LOOK_ALIKES:
            self.looked_alike += 1
            if outcome.verdict is not Verdict.DELIVERED:
                self.merged.append(one)

    def summarise(self) -> bool:
        """Print the table, and tell whether the gateway agrees with the truth."""
        books = self.gateway.books
        verdicts = books.verdicts
        once = all(self.deliveries[truth] == 1 for truth in self.truths.values())
        others = {v: n for v, n in verdicts.items() if n and v not in EXPECTED}
        causes = [f"{ABOUT[cause]} {n}" for cause, n in self.causes.most_common()]
        rows = [
            ("arrived", books.arrived, f"{len(set(self.truths.values()))} logical events"),
            ("delivered", verdicts[Verdict.DELIVERED], f"{self.looked_alike} of them look-alikes"),
            ("duplicate", verdicts[Verdict.DUPLICATE], ", ".join(causes[:3])),
            *(("", "", ", ".join(causes[at : at + 3])) for at in range(3, len(causes), 3)),
            (
                "dead",
                verdicts[Verdict.DEAD],
                ", ".join(f"{reason} {n}" for reason, n in self.reasons.items()),
            ),
            *((verdict.value, n, "not expected here") for verdict, n in others.items()),
        ]
        print(f"\n{paint('what came of it', 'bold')}")
        for name, number, note in rows:
            print(f"  {paint(f'{name:<11}', name)}{number:>5}   {paint(note, 'dim')}".rstrip())
        print(f"\n{paint('checked against the truth of the simulation', 'bold')}")
        checks = [
            ("every logical event delivered exactly once", yes(once), once),
            ("look-alikes merged", str(len(self.merged)), not self.merged),
            ("the books balance", yes(books.balance), books.balance),
        ]
        for what, answer, right in checks:
            print(f"  {what}: {paint(answer, 'delivered' if right else 'dead')}")
        return not others and all(right for *_, right in checks)

    def line(self, at_ms: int, one: Arrival, outcome: Outcome) -> str:
        """Tell one arrival: when, what, about whom, the verdict and the reason for it."""
        when = datetime.fromtimestamp((START_MS + at_ms) / 1000, UTC).strftime("%H:%M:%S.%f")[:-3]
        topic, about, event_id, note = "(no event)", "", "", outcome.reason.partition(": ")[2]
        if isinstance(one, Simulated):
            topic, about, event_id = heading(one.raw)
            note = ABOUT.get(one.label, "")
        verdict = outcome.verdict.value
        self.arrived.setdefault(event_id, at_ms)
        if outcome.first is not None and outcome.first.id:
            first = outcome.first.id[:8]
            note = f"of {first} {elapsed(at_ms - self.arrived[first]):>6} ago  {note}"
        elif note and verdict == "delivered":
            note = paint(f"no repeat: {note}", "like")
        when, verdict = paint(when, "dim"), paint(f"{verdict:<9}", verdict)
        return f"{when} {topic:<14} {about:<8} {event_id:<8} {verdict}  {note}".rstrip()


EXPECTED = {Verdict.DELIVERED, Verdict.DUPLICATE, Verdict.DEAD}


def heading(raw: bytes) -> tuple[str, str, str]:
    """Name the topic, the conversation or user, and the event, in short."""
    event = msgspec.json.decode(raw)
    topic = event["detail-type"].rpartition("{id}.")[2].replace("entityid.{id}", "audit")
    *_, entity = (part for part in event["detail"]["topicName"].split(".") if len(part) == 36)
    return topic, entity[:8], event["id"][:8]


def elapsed(ms: int) -> str:
    return f"{ms} ms" if ms < 1000 else f"{ms / 1000:.1f} s"


def yes(true: bool) -> str:  # noqa: FBT001 - it is the question
    return "yes" if true else "no"


async def run(seconds: float, seed: int, *, fast: bool) -> bool:
    arrivals = stream(seed, max(int(seconds * 9), 40))
    span_ms = arrivals[-1][0] + 1
    pace = span_ms / 1000 / seconds
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, stop.set)  # a batch under way is finished first
    title = paint("oncebridge demo", "bold")
    print(f"{title} · a simulated Genesys Cloud contact centre, seed {seed}")
    speed = "" if fast else f", shown {pace:.1f} times as fast; Ctrl-C ends it early"
    print(paint(f"{len(arrivals)} arrivals within {span_ms / 1000:.0f} s{speed}\n", "dim"))
    print(paint(f"{'time':<12} {'topic':<14} {'entity':<8} {'event':<8} verdict", "bold"))
    began = loop.time()
    with TemporaryDirectory(prefix="oncebridge-demo-") as directory:
        demo = Demo(Path(directory))
        async with demo.gateway:
            # what arrives within a fifth of a second on the screen is one batch
            for tick, batch in groupby(arrivals, lambda one: int(one[0] / pace / 200)):
                with suppress(TimeoutError):
                    pause = 0 if fast else began + tick / 5 - loop.time()
                    await asyncio.wait_for(stop.wait(), max(pause, 0))
                if stop.is_set():
                    print(paint("\nended early", "dim"))
                    break
                await demo.take(list(batch))
            return demo.summarise()


def main() -> int:
    parser = argparse.ArgumentParser(description="A simulated stream through a real gateway.")
    parser.add_argument("--seconds", type=float, default=25, help="how long it takes (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which stream (%(default)s)")
    parser.add_argument("--fast", action="store_true", help="do not pause between batches")
    given = parser.parse_args()
    if given.seconds <= 0:
        parser.error("--seconds must be more than 0")
    return 0 if asyncio.run(run(given.seconds, given.seed, fast=given.fast)) else 1


if __name__ == "__main__":
    sys.exit(main())
