"""The charts that only the dashboard has; see `oncebridge.observe.charts`."""

from collections.abc import Mapping, Sequence
from typing import Final

from markupsafe import Markup
from msgspec import Struct

from oncebridge.base.formatting import MINUTE, format_count, format_instant
from oncebridge.engine.verdict import Verdict
from oncebridge.observe import charts
from oncebridge.observe.charts import Chart
from oncebridge.observe.counts import Histogram

MINUTES: Final = 60
_ON_A_PHONE: Final = 45
_HIGH: Final = 16
_WIDE: Final = 7


class Minute(Struct, frozen=True):
    """The verdicts of one minute."""

    begins_ms: int
    verdicts: dict[Verdict, int]

    @property
    def total(self) -> int:
        return sum(self.verdicts.values())


def last_hour(minutes: Mapping[int, Mapping[str, int]], now_ms: int) -> list[Minute]:
    """Return the last sixty minutes, including empty ones."""
    last = max([now_ms // MINUTE, *minutes])  # a worker's clock may be ahead of the store's
    return [
        Minute(
            minute * MINUTE,
            {v: count for v in Verdict if (count := minutes.get(minute, {}).get(v, 0))},
        )
        for minute in range(last - MINUTES + 1, last + 1)
    ]


def over_time(hour: Sequence[Minute]) -> list[tuple[str, Markup]]:
    """Draw the verdicts by minute: one chart for a wide screen, one for a phone."""
    return [
        ("wide", _drawn(hour, charts.WIDE, 220)),
        ("narrow", _drawn(hour[-_ON_A_PHONE:], charts.NARROW, 200)),
    ]


def _drawn(shown: Sequence[Minute], width: int, height: int) -> Markup:
    total = sum(minute.total for minute in shown)
    busiest = max(shown, key=lambda minute: minute.total)
    text = f"{format_count(total, 'arrival')} in {format_count(len(shown), 'minute')}; the busiest began "
    text += f"at {format_instant(busiest.begins_ms)} UTC: {busiest.total:,}. See the table for all numbers."
    chart = Chart("minutes", "Arrivals per minute, by verdict", text)
    return Markup(charts.arrivals(shown, width, chart, height=height))  # noqa: S704 - ours


def bar(part: int, whole: int, kind: str) -> Markup:
    """Draw a bar for one row of a list."""
    return Markup(charts.share_bar(part, whole, kind))  # noqa: S704 - numbers, and a class of ours


def spread(found: Histogram) -> Markup:
    """Draw a distribution, one small bar for each bucket."""
    most = max(found.counts, default=0)
    if most <= 0:  # empty, or invalid counts
        return Markup("")
    outline = "".join(
        f"M{at * _WIDE} {_HIGH}v-{max(_HIGH * count / most, 1):.1f}h{_WIDE - 1}V{_HIGH}z"
        for at, count in enumerate(found.counts)
        if count > 0
    )
    width = len(found.counts) * _WIDE
    return Markup(  # noqa: S704 - numbers only
        f'<svg class="spread" viewBox="0 0 {width} {_HIGH}" width="{width}" height="{_HIGH}" '
        f'aria-hidden="true" focusable="false"><path class="track" d="M0 {_HIGH - 0.5}h{width}"/>'
        f'<path class="bars" d="{outline}"/></svg>'
    )
