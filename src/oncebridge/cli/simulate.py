"""`oncebridge simulate`: the stream of the demo, for tests of your own."""

import sys
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import click
import msgspec

from oncebridge.events.framing import as_line
from oncebridge.genesys.simulator import START_MS
from oncebridge.genesys.simulator import simulate as simulated

_encode = msgspec.json.Encoder().encode


def _instant(_: click.Context, option: click.Parameter, text: str | None) -> int:
    """Read a date or time as ISO 8601 writes it; without a zone, in UTC."""
    if text is None:
        return START_MS
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        message = f"{text!r} is no date or time such as 2026-03-01T08:00:00Z"
        raise click.BadParameter(message, param=option) from None
    if not 1970 < instant.year < 9000:
        raise click.BadParameter(f"{text!r}: the year is from 1971 to 8999", param=option)
    return int((instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp() * 1000)


@click.command(
    epilog="Examples: oncebridge simulate > events.ndjson  |  oncebridge simulate --events 50000 "
    "--repeats 0.5 --labels labels.ndjson > events.ndjson  |  in Python: "
    "from oncebridge.genesys.simulator import simulate"
)
@click.option(
    "--events",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="How many arrivals; a few hundred hold every kind of repeat.",
)
@click.option("--seed", default=1, show_default=True, help="Which stream.")
@click.option(
    "--repeats",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.3,
    show_default=True,
    help="The share of repeats among them.",
)
@click.option(
    "--labels",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where to write the truth about each event, one JSON object per line.",
)
@click.option(
    "--start",
    "start_ms",
    metavar="ISO",
    callback=_instant,
    help="When the simulated day begins; 2025-12-12T15:00:00Z unless given.",
)
def simulate(*, events: int, seed: int, repeats: float, labels: Path | None, start_ms: int) -> None:
    """
    Write a simulated Genesys Cloud stream, one event per line, to standard output.

    Whole conversations in the real shape, with the repeats that real streams have and with
    look-alikes that are no repeats. The same seed gives the same bytes, always.

    A line of --labels says about one event: its line; truth, the number of the logical event
    (equal for all its copies and for nothing else); label, what kind of arrival it is; at_ms,
    when it arrives, counted from the start; and for a look-alike resembles, the truth it could
    be mistaken for. A consumer is right if it passes each truth on exactly once.
    """
    with ExitStack() as stack:
        told: BinaryIO | None = None
        if labels is not None:
            try:
                told = stack.enter_context(labels.open("wb"))
            except OSError as error:
                raise click.BadParameter(
                    f"{labels} cannot be written: {error.strerror}", param_hint="--labels"
                ) from None
        out = sys.stdout.buffer
        stream = simulated(seed, events, repeats=repeats, start_ms=start_ms)
        for line, one in enumerate(stream, start=1):
            out.write(as_line(one.raw))
            if told is not None:
                truth = {
                    "line": line,
                    "truth": one.truth,
                    "label": one.label,
                    "at_ms": one.at_ms,
                    "resembles": one.resembles,
                }
                told.write(_encode(truth) + b"\n")
        out.flush()
