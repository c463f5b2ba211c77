"""The charts that only an audit has; see `oncebridge.observe.charts`."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from oncebridge.audit import text as words
from oncebridge.audit.report import Gaps
from oncebridge.base.formatting import DAY, HOUR, MINUTE, SECOND, elapsed
from oncebridge.observe.charts import LEFT, RIGHT, WIDE, Chart, Frame, LogScale, coord, label, path

_MARKS: Final = (
    (1, "1 ms"),
    (10, "10 ms"),
    (100, "0.1 s"),
    (SECOND, "1 s"),
    (10 * SECOND, "10 s"),
    (MINUTE, "1 min"),
    (10 * MINUTE, "10 min"),
    (HOUR, "1 h"),
    (6 * HOUR, "6 h"),
    (2 * DAY, "2 d"),
    (15 * DAY, "15 d"),
    (150 * DAY, "150 d"),
)


def gaps(found: Gaps, window_ms: int, width: int, chart: Chart, *, height: int = 270) -> str:
    """Draw how long after the first the others came, on a logarithmic scale."""
    bins = [(bound, count) for bound, count in found.histogram if bound > 0]
    first = next((at for at, (_, count) in enumerate(bins) if count), 0)
    lowest = bins[first - 1][0] if first else max(bins[0][0] / 10, 1)
    marks = [*words.WINDOWS]
    if all(window_ms != known for known, _ in marks):
        marks.append((window_ms, elapsed(window_ms)))
    last = max((bound for bound, count in bins if count), default=bins[-1][0])
    highest = max(last, *(mark for mark, _ in marks)) * 1.6
    scale = LogScale(min(lowest, SECOND), highest, LEFT, width - RIGHT)
    top = 20 * len(marks) + 6
    frame = Frame(width, height, max((count for _, count in bins), default=0), top=top)
    bars = ""
    for (lower, _), (bound, count) in pairwise([(lowest, 0), *bins[first:]]):
        if count:
            x, end = scale.at(lower), scale.at(bound)
            bars += frame.bar(x, end - x, 0, count)
    ticks = [(scale.at(at), name) for at, name in _MARKS if scale.holds(at)]
    ticks = ticks[:: 2 if width < WIDE else 1]
    return frame.draw(
        chart,
        [
            *frame.grid(),
            path(bars, "gap"),
            *frame.below(ticks),
            *_windows(sorted(marks), window_ms, scale, frame),
        ],
    )


def _windows(
    marks: Sequence[tuple[int, str]], window_ms: int, scale: LogScale, frame: Frame
) -> Iterator[str]:
    """Mark windows, each with its name on a line of its own: they may be close together."""
    labels = []
    for at, (mark, name) in enumerate(marks):
        x, y = scale.at(mark), 14 + 20 * at
        is_ours = mark == window_ms
        kind = "window ours" if is_ours else "window"
        yield f'<path class="{kind}" d="M{coord(x)} {y - 8}V{coord(frame.bottom)}"/>'
        told = f"{name}, the window of your rules" if is_ours else f"{name} window"
        labels.append(label(x - 6, y, told, "end", "name ours" if is_ours else "name"))
    yield from labels  # last, so that no line runs through them
