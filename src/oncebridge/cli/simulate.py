"""`oncebridge simulate`: write the simulated stream, for your own tests."""

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
    """Read a date or time in ISO 8601; without a zone, in UTC."""
    if text is None:
        return START_MS
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        message = f"{text!r} is not a date or time such as 2026-03-01T08:00:00Z"
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
    help="How many arrivals; a few hundred have every kind of duplicate.",
)
@click.option("--seed", default=1, show_default=True, help="The seed of the stream.")
@click.option(
    "--repeats",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.3,
    show_default=True,
    help="The share of duplicates among them.",
)
@click.option(
    "--labels",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the truth about each event to this file, one JSON object per line.",
)
@click.option(
    "--start",
    "start_ms",
    metavar="ISO",
    callback=_instant,
    help="When the simulated day begins. [2025-12-12T15:00:00Z]",
)
def simulate(*, events: int, seed: int, repeats: float, labels: Path | None, start_ms: int) -> None:
    """
    Write a simulated Genesys Cloud stream, one event per line, to standard output.

    Complete conversations in the format of Genesys Cloud, with the duplicates that real streams
    have and with look-alikes that are not duplicates. The same seed gives the same bytes.

    Each line of --labels describes one event: line, its line number; truth, the number of the
    logical event (the same for all its copies); label, the kind of arrival; at_ms, the time of
    arrival since the start; and for a look-alike resembles, the truth that it resembles. A
    consumer is right if it delivers each truth exactly once.
    """
    with ExitStack() as stack:
        labels_file: BinaryIO | None = None
        if labels is not None:
            try:
                labels_file = stack.enter_context(labels.open("wb"))
            except OSError as error:
                raise click.BadParameter(
                    f"{labels} cannot be written: {error.strerror}", param_hint="--labels"
                ) from None
        out = sys.stdout.buffer
        stream = simulated(seed, events, repeats=repeats, start_ms=start_ms)
        for line, one in enumerate(stream, start=1):
            out.write(as_line(one.raw))
            if labels_file is not None:
                truth = {
                    "line": line,
                    "truth": one.truth,
                    "label": one.label,
                    "at_ms": one.at_ms,
                    "resembles": one.resembles,
                }
                labels_file.write(_encode(truth) + b"\n")
        out.flush()
