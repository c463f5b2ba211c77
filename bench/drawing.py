"""
The charts of the benchmarks as SVG files, drawn with the product's chart parts.

A file brings its own style, for light and for dark pages. Colours are never the only difference,
and the description contains all numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import ceil, floor, log2, log10
from typing import NamedTuple

from oncebridge.observe.charts import LogScale, coord, label, path, rounded_scale

WIDTH = 800
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #24292f }
.title { font-size: 15px; font-weight: 600 }
.faint { fill: #57606a }
.card { fill: #ffffff; stroke: #d0d7de }
.grid { stroke: #d0d7de; fill: none }
.axis { stroke: #57606a; fill: none }
.whisker { stroke: #24292f; fill: none; stroke-width: 1.5 }
.aim { fill: #ffffff; stroke: #24292f; stroke-width: 1.5 }
.c0 { --c: #0969da } .c1 { --c: #bc4c00 } .c2 { --c: #1a7f37 } .c3 { --c: #8250df } .c4 { --c: #6e7781 }
.bar { fill: var(--c) }
.line { stroke: var(--c); fill: none; stroke-width: 2.5; stroke-linejoin: round }
.lead { stroke: var(--c); fill: none }
.dash { stroke-dasharray: 5 4 }
.dot { fill: var(--c) }
.name { fill: var(--c); font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .faint { fill: #9198a1 }
  .card { fill: #0d1117; stroke: #30363d }
  .grid { stroke: #30363d }
  .axis { stroke: #9198a1 }
  .whisker { stroke: #e6edf3 }
  .aim { fill: #0d1117; stroke: #e6edf3 }
  .c0 { --c: #58a6ff } .c1 { --c: #f0883e } .c2 { --c: #3fb950 } .c3 { --c: #bc8cff } .c4 { --c: #9198a1 }
}
"""
X = "\N{MULTIPLICATION SIGN}"
_APART = 16
"""The least distance between names at the end of lines."""


class Bar(NamedTuple):
    """One bar, with the least and the greatest measured value."""

    name: str
    value: float
    least: float
    most: float
    aim: float | None = None


class Curve(NamedTuple):
    """One line, by the labels of the horizontal axis."""

    name: str
    values: Mapping[str, float]
    colour: int
    dashed: bool = False


# --- charts -----------------------------------------------------------------------------


def compared(title: str, note: str, bars: Sequence[Bar]) -> str:
    """Draw ratios on a logarithmic scale, to the left and right of "as good"."""
    row, top, left, right = 30, 74, 312, 124
    low = 2 ** floor(log2(min(0.5, *(min(bar.least, bar.aim or 1) for bar in bars))))
    high = 2 ** ceil(log2(max(2.0, *(max(bar.most, bar.aim or 1) for bar in bars))))
    height = top + row * len(bars) + 44
    scale = LogScale(low, high, left, WIDTH - right)
    x = scale.at

    drawn = []
    for tick in (2.0**n for n in range(-8, 12)):
        if scale.holds(tick):
            kind = "axis" if tick == 1 else "grid"
            drawn.append(_line(x(tick), top - 6, x(tick), height - 38, kind))
            if tick >= 1 or tick == low:
                drawn.append(label(x(tick), height - 20, f"{tick:g}{X}", "middle", "faint"))
    for number, bar in enumerate(bars):
        y = top + row * number + row / 2
        ends = sorted((x(1), x(bar.value)))
        is_met = bar.aim is None or bar.value >= bar.aim
        drawn.append(label(left - 12, y + 4, bar.name, "end"))
        kind = f"{'c0' if is_met else 'c1'} bar"
        drawn.append(_bar(ends[0], y - 9, max(ends[1] - ends[0], 2), 18, kind))
        if bar.most > bar.least:
            drawn.append(_line(x(bar.least), y, x(bar.most), y, "whisker"))
        if bar.aim is not None:
            drawn.append(_diamond(x(bar.aim), y))
        told = f"{_short(bar.value)}{X}" + ("" if is_met else "  missed")
        drawn.append(label(WIDTH - right + 16, y + 4, told, "start"))
    words = [f"{bar.name}: {_short(bar.value)}{X}{_aim(bar.aim)}" for bar in bars]
    return _picture(height, title, note, words, drawn)


def curves(
    title: str,
    note: str,
    places: Sequence[str],
    lines: Sequence[Curve],
    *,
    unit: str,
    logarithmic: bool = False,
) -> str:
    """Draw lines over *places*, with their names at the end."""
    height, top, left, right = 380, 88, 64, 236
    bottom = height - 50
    values = [value for line in lines for value in line.values.values()]
    ticks = _decades(min(values), max(values)) if logarithmic else _steps(max(values))

    def x(place: str) -> float:
        step = (WIDTH - left - right) / max(len(places) - 1, 1)
        return left + places.index(place) * step

    scale = LogScale(ticks[0], ticks[-1], bottom, top) if logarithmic else None

    def y(value: float) -> float:
        return scale.at(value) if scale else bottom - value / ticks[-1] * (bottom - top)

    drawn = []
    for tick in ticks:
        drawn.append(_line(left, y(tick), WIDTH - right, y(tick), "grid"))
        drawn.append(label(left - 8, y(tick) + 4, f"{tick:,g}", "end", "faint"))
    drawn.append(label(20, top - 16, unit, "start", "faint"))
    drawn += [label(x(place), bottom + 22, place, "middle", "faint") for place in places]
    ends = []
    for line in lines:
        points = [(x(place), y(value)) for place, value in line.values.items()]
        kind = f"c{line.colour} line{' dash' if line.dashed else ''}"
        drawn.append(path("M" + "L".join(f"{coord(x)} {coord(y)}" for x, y in points), kind))
        drawn += [_dot(*point, f"c{line.colour} dot") for point in points]
        ends.append((points[-1][1], line, points[-1][0]))
    ends.sort(key=lambda end: end[0])
    for place, (was, line, end) in zip(_spread([at for at, _, _ in ends]), ends, strict=True):
        told = f"{line.name}, {_short([*line.values.values()][-1])}"
        drawn.append(_line(end + 6, was, end + 18, place, f"c{line.colour} lead"))
        drawn.append(label(end + 24, place + 4, told, "start", f"c{line.colour} name"))
    words = [
        f"{line.name}: " + ", ".join(f"{_short(v)} at {p}" for p, v in line.values.items())
        for line in lines
    ]
    return _picture(height, title, note, words, drawn)


def groups(title: str, note: str, found: Mapping[str, Sequence[Bar]], *, unit: str) -> str:
    """Draw upright bars, group by group."""
    height, top, left, right = 360, 88, 80, 24
    bottom = height - 70
    ticks = _steps(max(bar.most for bars in found.values() for bar in bars))

    def y(value: float) -> float:
        return bottom - value / ticks[-1] * (bottom - top)

    drawn = []
    for tick in ticks:
        drawn.append(_line(left, y(tick), WIDTH - right, y(tick), "grid"))
        drawn.append(label(left - 8, y(tick) + 4, f"{tick:,g}", "end", "faint"))
    drawn.append(label(20, top - 16, unit, "start", "faint"))
    room = (WIDTH - left - right) / len(found)
    for number, (name, bars) in enumerate(found.items()):
        begins = left + number * room
        drawn.append(label(begins + room / 2, bottom + 48, name, "middle", f"c{number} name"))
        step = room / (len(bars) + 1)
        for at, bar in enumerate(bars):
            middle = begins + step * (at + 1)
            wide = min(step * 0.62, 64)
            over = y(bar.value)
            drawn.append(_bar(middle - wide / 2, over, wide, bottom - over, f"c{number} bar"))
            if bar.most > bar.least:
                drawn.append(_line(middle, y(bar.least), middle, y(bar.most), "whisker"))
            over = y(max(bar.most, bar.value)) - 7
            drawn.append(label(middle, over, f"{bar.value:,.0f}", "middle"))
            drawn.append(label(middle, bottom + 22, bar.name, "middle", "faint"))
    words = [
        f"{name}, {bar.name}: {bar.value:,.0f}" for name, bars in found.items() for bar in bars
    ]
    return _picture(height, title, note, words, drawn)


# --- parts ------------------------------------------------------------------------------


def _picture(height: float, title: str, note: str, words: Iterable[str], drawn: list[str]) -> str:
    said = escape(f"{note} {'; '.join(words)}.")
    size = f'viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}"'
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(title)}</title>",
            f"<desc>{said}</desc>",
            f"<style>{STYLE}</style>",
            f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8"/>',
            label(20, 28, title, "start", "title"),
            label(20, 48, note, "start", "faint"),
            *drawn,
            "</svg>\n",
        )
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return path(f"M{coord(x1)} {coord(y1)}L{coord(x2)} {coord(y2)}", kind)


def _bar(x: float, y: float, width: float, height: float, kind: str) -> str:
    wide = coord(width)
    return path(f"M{coord(x)} {coord(y)}h{wide}v{coord(height)}h-{wide}z", kind)


def _diamond(x: float, y: float) -> str:
    return path(f"M{coord(x)} {coord(y - 7)}l5 7l-5 7l-5 -7z", "aim")


def _dot(x: float, y: float, kind: str) -> str:
    return f'<circle class="{kind}" cx="{coord(x)}" cy="{coord(y)}" r="3.5"/>'


def _aim(aim: float | None) -> str:
    return "" if aim is None else f" (target {aim:.2g}{X})"


def _short(number: float) -> str:
    return f"{number:.2f}" if number < 2 else f"{number:.1f}" if number < 100 else f"{number:,.0f}"


def _spread(places: Sequence[float]) -> list[float]:
    """Move sorted *places* apart, as little as possible."""
    kept: list[float] = []
    for place in places:
        kept.append(max(place, kept[-1] + _APART) if kept else place)
    return kept


def _steps(most: float) -> list[float]:
    """Return round steps from 0 to at least *most*."""
    step, _ = rounded_scale(most)
    return [step * n for n in range(ceil(most / step) + 1)]


def _decades(least: float, most: float) -> list[float]:
    return [10.0**n for n in range(floor(log10(least)), ceil(log10(most)) + 1)]
