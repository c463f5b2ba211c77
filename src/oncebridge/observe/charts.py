"""
Charts as static SVG, without scripts.

Colours are classes, so that the page's style sets them for light and dark mode. Each chart has a
title and a description for screen readers, and the page has the numbers in a table. A chart is
drawn for a given width: a page contains one for wide screens and one for phones, as text in a chart
that is scaled down is too small to read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from math import floor, log10
from typing import Final, Protocol

from msgspec import Struct

from oncebridge.base.formatting import DAY, HOUR, MINUTE, SECOND
from oncebridge.engine.verdict import Verdict

WIDE: Final = 860
NARROW: Final = 350
LEFT: Final = 52
RIGHT: Final = 12
"""Margins left and right of the bars."""
_TICK: Final = 14
_BELOW: Final = 34
_MOST_SLOTS: Final = 10_000
_STEPS_MS: Final = (
    *(1000 * n for n in (1, 5, 15, 30)),
    *(MINUTE * n for n in (1, 5, 15, 30)),
    *(HOUR * n for n in (1, 3, 6, 12)),
    *(DAY * n for n in (1, 2, 7, 14, 30, 90, 365, 3650)),
)


class Chart(Struct, frozen=True):
    """The name, title and description of a chart."""

    name: str
    """Used in element ids: letters only."""
    title: str
    text: str


class TimeSlot(Protocol):
    """The verdicts of one period."""

    @property
    def begins_ms(self) -> int: ...

    @property
    def verdicts(self) -> Mapping[Verdict, int]: ...


class _Span(Struct, frozen=True):
    begins_ms: int
    verdicts: dict[Verdict, int]


def arrivals(slots: Sequence[TimeSlot], width: int, chart: Chart, *, height: int = 240) -> str:
    """Draw arrivals over time, as bars stacked by verdict."""
    shown = _gathered(_filled(slots), (width - LEFT - RIGHT) // 6)
    verdicts = [verdict for verdict in Verdict if any(m.verdicts.get(verdict) for m in shown)]
    most = max((sum(slot.verdicts.values()) for slot in shown), default=0)
    frame = Frame(width, height, most)
    step = (width - LEFT - RIGHT) / max(len(shown), 1)
    bars: dict[Verdict, str] = dict.fromkeys(verdicts, "")
    for at, slot in enumerate(shown):
        total = 0
        for verdict in verdicts:
            count = slot.verdicts.get(verdict, 0)
            if count:
                bars[verdict] += frame.bar(LEFT + at * step, step, total, total + count)
            total += count
    drawn = [path(outline, f"v-{verdict.value}") for verdict, outline in bars.items()]
    spacing_ms = shown[1].begins_ms - shown[0].begins_ms if len(shown) > 1 else SECOND
    ticks = _time_ticks(shown, spacing_ms, step, narrow=width < WIDE)
    return frame.draw(chart, [*frame.grid(), *drawn, *frame.below(ticks)])


def share_bar(part: int, whole: int, kind: str) -> str:
    """Draw a bar for one row of a list, without its number."""
    width = max(round(1000 * part / whole), 4 if part else 0) if whole else 0
    return (
        '<svg class="share" viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="track" width="1000" height="10"/>'
        f'<rect class="{kind}" width="{width}" height="10"/></svg>'
    )


# --- parts --------------------------------------------------------------------------------


class Frame:
    """The area of a chart, with its vertical scale, grid and labels."""

    def __init__(self, width: int, height: int, most: int, *, top: int = 10) -> None:
        self.width = width
        self.height = height
        self.top = top
        self.bottom = height - _BELOW
        self.step, self.most = rounded_scale(most)

    def y(self, number: float) -> float:
        return self.bottom - (self.bottom - self.top) * number / self.most

    def bar(self, x: float, width: float, low: int, high: int) -> str:
        """Return the outline of a bar, at least one pixel high."""
        top, bottom = self.y(high), self.y(low)
        if bottom - top < 1:
            top = bottom - 1
        gap = 1 if width > 4 else 0
        wide = coord(max(width - gap, 0.8))
        return f"M{coord(x)} {coord(top)}h{wide}v{coord(bottom - top)}h-{wide}z"

    def grid(self) -> Iterator[str]:
        number = 0
        while number <= self.most:
            y = self.y(number)
            kind = "grid" if number else "axis"
            yield f'<path class="{kind}" d="M{LEFT} {coord(y)}H{self.width - RIGHT}"/>'
            yield label(LEFT - 7, y + 4, f"{number:,}", "end")
            number += self.step

    def below(self, ticks: Iterable[tuple[float, str]]) -> Iterator[str]:
        for x, name in ticks:
            yield f'<path class="axis" d="M{coord(x)} {coord(self.bottom)}v4"/>'
            for at, line in enumerate(name.split("\n")):
                yield label(x, self.bottom + 4 + _TICK * (at + 1) - 2, line, "middle")

    def draw(self, chart: Chart, parts: Iterable[str]) -> str:
        # A page has the same chart in two widths, and ids must be unique.
        name = f"{chart.name}{self.width}"
        return (
            f'<svg class="chart" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-labelledby="{name}t {name}d"><title id="{name}t">{escape(chart.title)}</title>'
            f'<desc id="{name}d">{escape(chart.text)}</desc>{"".join(parts)}</svg>'
        )


class LogScale:
    """A logarithmic scale between two coordinates."""

    def __init__(self, low: float, high: float, left: float, right: float) -> None:
        self._low, self._high = log10(low), log10(high)
        self._left, self._right = left, right

    def at(self, value: float) -> float:
        part = (log10(max(value, 0.001)) - self._low) / (self._high - self._low)
        return self._left + (self._right - self._left) * min(max(part, 0), 1)

    def holds(self, value: float) -> bool:
        return self._low <= log10(value) <= self._high


def _filled(slots: Sequence[TimeSlot]) -> Sequence[TimeSlot]:
    """Add the periods without arrivals."""
    if len(slots) < 2:
        return slots
    begins = [slot.begins_ms for slot in slots]
    width = min(later - earlier for earlier, later in pairwise(begins))
    if width <= 0 or (begins[-1] - begins[0]) // width > _MOST_SLOTS:
        return slots
    known = {slot.begins_ms: slot for slot in slots}
    spans = range(begins[0], begins[-1] + 1, width)
    return [known.get(at) or _Span(at, {}) for at in spans]


def _gathered(slots: Sequence[TimeSlot], most: int) -> Sequence[TimeSlot]:
    """Merge neighbouring periods until at most *most* are left."""
    size = -(-len(slots) // max(most, 1)) or 1
    shown: list[TimeSlot] = []
    for at in range(0, len(slots), size):
        total: dict[Verdict, int] = {}
        for slot in slots[at : at + size]:
            for verdict, count in slot.verdicts.items():
                total[verdict] = total.get(verdict, 0) + count
        shown.append(_Span(slots[at].begins_ms, total))
    return shown


def _time_ticks(
    shown: Sequence[TimeSlot], spacing_ms: int, step: float, *, narrow: bool
) -> Iterator[tuple[float, str]]:
    """Yield labels for some round times, with the date if it changes."""
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
        x = LEFT + (at_ms - first_ms) / spacing_ms * step
        time = f"{moment:%H:%M:%S}" if every_ms < MINUTE else f"{moment:%H:%M}"
        date = f"{moment:%Y-%m-%d}"
        if every_ms >= DAY:
            yield x, date[5:] if date[:4] == day[:4] else date
        else:
            yield x, time if date == day else f"{time}\n{date}"
        day = date
        at_ms += every_ms


def rounded_scale(most: float) -> tuple[int, float]:
    """Return a round step, and the end of a scale that includes *most*."""
    if most <= 5:
        return 1, max(most, 1)
    rough = most / 5
    unit = 10 ** floor(log10(rough))
    step = next(n * unit for n in (1, 2, 2.5, 5, 10) if n * unit >= rough)
    step = max(int(step), 1)
    return step, -(-most // step) * step


def path(outline: str, kind: str) -> str:
    """Return a path element; empty without an outline."""
    return f'<path class="{kind}" d="{outline}"/>' if outline else ""


def label(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return (
        f'<text{named} x="{coord(x)}" y="{coord(y)}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def coord(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
