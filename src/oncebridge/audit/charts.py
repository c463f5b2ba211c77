"""
The charts of the page, as SVG: drawn here, with nothing to load and nothing that runs.

Colours are classes, so that the page's style decides on them, by light and by dark. Each chart
has a title and a description for those who do not see it, and the page has its numbers in a
table beside it. A chart is drawn for a width: the page has one for a desk and one for a phone,
as a picture that is only scaled down has letters that nobody can read.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from math import floor, log10
from typing import Final

from msgspec import Struct

from oncebridge.audit import words
from oncebridge.audit.report import Gaps, Moment
from oncebridge.verdict import Verdict

WIDE: Final = 860
NARROW: Final = 350
_LEFT: Final = 52
_RIGHT: Final = 12
_TICK: Final = 14
_BELOW: Final = 34
_MOST_MOMENTS: Final = 10_000
_STEPS_MS: Final = (
    *(1000 * n for n in (1, 5, 15, 30)),
    *(words.MINUTE * n for n in (1, 5, 15, 30)),
    *(words.HOUR * n for n in (1, 3, 6, 12)),
    *(words.DAY * n for n in (1, 2, 7, 14, 30, 90, 365, 3650)),
)
_MARKS: Final = (
    (1, "1 ms"),
    (10, "10 ms"),
    (100, "0.1 s"),
    (words.SECOND, "1 s"),
    (10 * words.SECOND, "10 s"),
    (words.MINUTE, "1 min"),
    (10 * words.MINUTE, "10 min"),
    (words.HOUR, "1 h"),
    (6 * words.HOUR, "6 h"),
    (2 * words.DAY, "2 d"),
    (15 * words.DAY, "15 d"),
    (150 * words.DAY, "150 d"),
)


class Chart(Struct, frozen=True):
    """What a chart is called, and says to those who cannot see it."""

    name: str
    """For ids: letters only."""
    title: str
    text: str


def arrivals(moments: Sequence[Moment], width: int, chart: Chart, *, height: int = 240) -> str:
    """Draw what arrived over time, with the verdicts on top of each other."""
    shown = _gathered(_filled(moments), (width - _LEFT - _RIGHT) // 6)
    verdicts = [verdict for verdict in Verdict if any(m.verdicts.get(verdict) for m in shown)]
    most = max((sum(moment.verdicts.values()) for moment in shown), default=0)
    frame = _Frame(width, height, most)
    step = (width - _LEFT - _RIGHT) / max(len(shown), 1)
    bars: dict[Verdict, str] = dict.fromkeys(verdicts, "")
    for at, moment in enumerate(shown):
        total = 0
        for verdict in verdicts:
            count = moment.verdicts.get(verdict, 0)
            if count:
                bars[verdict] += frame.bar(_LEFT + at * step, step, total, total + count)
            total += count
    drawn = [_path(outline, f"v-{verdict.value}") for verdict, outline in bars.items()]
    spacing_ms = shown[1].begins_ms - shown[0].begins_ms if len(shown) > 1 else words.SECOND
    ticks = _time_ticks(shown, spacing_ms, step, narrow=width < WIDE)
    return frame.draw(chart, [*frame.grid(), *drawn, *frame.below(ticks)])


def gaps(found: Gaps, window_ms: int, width: int, chart: Chart, *, height: int = 270) -> str:
    """Draw how long after the first the others came, on a logarithmic scale."""
    bins = [(bound, count) for bound, count in found.histogram if bound > 0]
    first = next((at for at, (_, count) in enumerate(bins) if count), 0)
    lowest = bins[first - 1][0] if first else max(bins[0][0] / 10, 1)
    marks = [*words.WINDOWS]
    if all(window_ms != known for known, _ in marks):
        marks.append((window_ms, words.elapsed(window_ms)))
    last = max((bound for bound, count in bins if count), default=bins[-1][0])
    highest = max(last, *(mark for mark, _ in marks)) * 1.6
    scale = _Log(min(lowest, words.SECOND), highest, _LEFT, width - _RIGHT)
    top = 20 * len(marks) + 6
    frame = _Frame(width, height, max((count for _, count in bins), default=0), top=top)
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
            _path(bars, "gap"),
            *frame.below(ticks),
            *_windows(sorted(marks), window_ms, scale, frame),
        ],
    )


def share_bar(part: int, whole: int, kind: str) -> str:
    """Draw a bar for one row of a list; the number stands beside it as text."""
    width = max(round(1000 * part / whole), 4 if part else 0) if whole else 0
    return (
        '<svg class="share" viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="track" width="1000" height="10"/>'
        f'<rect class="{kind}" width="{width}" height="10"/></svg>'
    )


# --- parts --------------------------------------------------------------------------------


class _Frame:
    """The room of a chart, its vertical scale, and what stands around it."""

    def __init__(self, width: int, height: int, most: int, *, top: int = 10) -> None:
        self.width = width
        self.height = height
        self.top = top
        self.bottom = height - _BELOW
        self.step, self.most = _rounded(most)

    def y(self, number: float) -> float:
        return self.bottom - (self.bottom - self.top) * number / self.most

    def bar(self, x: float, width: float, low: int, high: int) -> str:
        """Give the outline of a bar; what is there at all is seen."""
        top, bottom = self.y(high), self.y(low)
        if bottom - top < 1:
            top = bottom - 1
        gap = 1 if width > 4 else 0
        wide = _n(max(width - gap, 0.8))
        return f"M{_n(x)} {_n(top)}h{wide}v{_n(bottom - top)}h-{wide}z"

    def grid(self) -> Iterator[str]:
        number = 0
        while number <= self.most:
            y = self.y(number)
            kind = "grid" if number else "axis"
            yield f'<path class="{kind}" d="M{_LEFT} {_n(y)}H{self.width - _RIGHT}"/>'
            yield _label(_LEFT - 7, y + 4, f"{number:,}", "end")
            number += self.step

    def below(self, ticks: Iterable[tuple[float, str]]) -> Iterator[str]:
        for x, name in ticks:
            yield f'<path class="axis" d="M{_n(x)} {_n(self.bottom)}v4"/>'
            for at, line in enumerate(name.split("\n")):
                yield _label(x, self.bottom + 4 + _TICK * (at + 1) - 2, line, "middle")

    def draw(self, chart: Chart, parts: Iterable[str]) -> str:
        # The same chart stands there for two widths, and ids are for one element each.
        name = f"{chart.name}{self.width}"
        return (
            f'<svg class="chart" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-labelledby="{name}t {name}d"><title id="{name}t">{escape(chart.title)}</title>'
            f'<desc id="{name}d">{escape(chart.text)}</desc>{"".join(parts)}</svg>'
        )


class _Log:
    """A logarithmic scale from left to right."""

    def __init__(self, low: float, high: float, left: float, right: float) -> None:
        self._low, self._high = log10(low), log10(high)
        self._left, self._right = left, right

    def at(self, value: float) -> float:
        part = (log10(max(value, 0.001)) - self._low) / (self._high - self._low)
        return self._left + (self._right - self._left) * min(max(part, 0), 1)

    def holds(self, value: float) -> bool:
        return self._low <= log10(value) <= self._high


def _windows(
    marks: Sequence[tuple[int, str]], window_ms: int, scale: _Log, frame: _Frame
) -> Iterator[str]:
    """Mark windows, each with its name on a line of its own: they may be close together."""
    labels = []
    for at, (mark, name) in enumerate(marks):
        x, y = scale.at(mark), 14 + 20 * at
        is_ours = mark == window_ms
        kind = "window ours" if is_ours else "window"
        yield f'<path class="{kind}" d="M{_n(x)} {y - 8}V{_n(frame.bottom)}"/>'
        told = f"{name}, the window of your rules" if is_ours else f"{name} window"
        labels.append(_label(x - 6, y, told, "end", "name ours" if is_ours else "name"))
    yield from labels  # last, so that no line runs through them


def _filled(moments: Sequence[Moment]) -> list[Moment]:
    """Put in the spans in which nothing arrived."""
    if len(moments) < 2:
        return list(moments)
    begins = [moment.begins_ms for moment in moments]
    width = min(later - earlier for earlier, later in pairwise(begins))
    if width <= 0 or (begins[-1] - begins[0]) // width > _MOST_MOMENTS:
        return list(moments)
    known = {moment.begins_ms: moment for moment in moments}
    spans = range(begins[0], begins[-1] + 1, width)
    return [known.get(at) or Moment(at, {}) for at in spans]


def _gathered(moments: Sequence[Moment], most: int) -> list[Moment]:
    """Add neighbours up until there are few enough to be drawn."""
    size = -(-len(moments) // max(most, 1)) or 1
    shown = []
    for at in range(0, len(moments), size):
        total: dict[Verdict, int] = {}
        for moment in moments[at : at + size]:
            for verdict, count in moment.verdicts.items():
                total[verdict] = total.get(verdict, 0) + count
        shown.append(Moment(moments[at].begins_ms, total))
    return shown


def _time_ticks(
    shown: Sequence[Moment], spacing_ms: int, step: float, *, narrow: bool
) -> Iterator[tuple[float, str]]:
    """Name some round moments, with the date where it changes."""
    if not shown:
        return
    first_ms = shown[0].begins_ms
    length_ms = spacing_ms * len(shown)
    wanted = 4 if narrow else 8
    every_ms = next((n for n in _STEPS_MS if length_ms / n <= wanted), _STEPS_MS[-1])
    at_ms = -(-first_ms // every_ms) * every_ms
    day = ""
    while at_ms < first_ms + length_ms:
        try:
            moment = datetime.fromtimestamp(at_ms / 1000, UTC)
        except (ValueError, OverflowError, OSError):
            return  # beyond any calendar
        x = _LEFT + (at_ms - first_ms) / spacing_ms * step
        time = f"{moment:%H:%M:%S}" if every_ms < words.MINUTE else f"{moment:%H:%M}"
        date = f"{moment:%Y-%m-%d}"
        if every_ms >= words.DAY:
            yield x, date[5:] if date[:4] == day[:4] else date
        else:
            yield x, time if date == day else f"{time}\n{date}"
        day = date
        at_ms += every_ms


def _rounded(most: int) -> tuple[int, int]:
    """Find round steps for a scale that goes up to *most*."""
    if most <= 5:
        return 1, max(most, 1)
    rough = most / 5
    unit = 10 ** floor(log10(rough))
    step = next(n * unit for n in (1, 2, 2.5, 5, 10) if n * unit >= rough)
    step = max(int(step), 1)
    return step, -(-most // step) * step


def _path(outline: str, kind: str) -> str:
    """Draw all bars of one kind at once: there may be many."""
    return f'<path class="{kind}" d="{outline}"/>' if outline else ""


def _label(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">{escape(text)}</text>'


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
