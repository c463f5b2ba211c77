"""
How numbers, times and names are told, on a terminal as on a page.

What came out of an event is spelt out, so that neither a terminal nor a reader is led astray by
it, and cut where it is longer than anybody reads.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

SECOND, MINUTE, HOUR, DAY = 1000, 60_000, 3_600_000, 86_400_000
"""In milliseconds."""
NB: Final = "\N{NO-BREAK SPACE}"
"""Between a number and its unit."""
_LONGEST: Final = 120


def many(number: int, what: str, several: str = "") -> str:
    """Count something: `1 event`, `2 events`."""
    return f"{number:,} {what if number == 1 else several or f'{what}s'}"


def share(part: int, whole: int) -> str:
    """Tell a share; none and all are said only where they are so."""
    if not whole:
        return f"0{NB}%"
    percent = 100 * part / whole
    if 0 < percent < 1:
        return f"<1{NB}%"
    return f">99{NB}%" if 99 < percent < 100 else f"{percent:.0f}{NB}%"


def elapsed(ms: int) -> str:
    """Tell a time as people do, in its two largest units."""
    if ms < SECOND:
        return f"{max(ms, 0)}{NB}ms"
    if ms < 10 * SECOND and ms % SECOND:
        return f"{ms / SECOND:.1f}{NB}s"
    units = ((DAY, "d"), (HOUR, "h"), (MINUTE, "min"), (SECOND, "s"))
    at = next(at for at, (length, _) in enumerate(units) if ms >= length)
    length, name = units[at]
    told = f"{ms // length}{NB}{name}"
    if at + 1 < len(units) and ms // length < 10:
        below, smaller = units[at + 1]
        rest = ms % length // below
        told += f" {rest}{NB}{smaller}" if rest else ""
    return told


def instant(ms: int, *, with_seconds: bool = True) -> str:
    """Tell a moment, in UTC."""
    try:
        found = datetime.fromtimestamp(ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"  # beyond any calendar
    return f"{found:%Y-%m-%d %H:%M:%S}" if with_seconds else f"{found:%Y-%m-%d %H:%M}"


def size(length: int) -> str:
    """Return how many bytes, roughly."""
    value, unit = float(length), "bytes"
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "bytes" or value >= 100 else f"{value:.1f} {unit}"


def spelt(text: object, longest: int = _LONGEST) -> str:
    """Spell out what is not printable, and cut what is too long to be read."""
    told = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text)[: longest + 1])
    return told if len(told) <= longest else f"{told[: longest - 1]}…"


def clipped(text: object, width: int) -> str:
    """Cut a name in the middle: its end often tells it from others."""
    told = spelt(text, 400)
    if len(told) <= width:
        return told
    tail = max((width - 1) // 3, 0)
    return f"{told[: width - 1 - tail]}…{told[len(told) - tail :]}"


def listed(items: Sequence[str], *, most: int = 5) -> str:
    """List some, and how many more there are."""
    shown = ", ".join(items[:most])
    return f"{shown} and {len(items) - most:,} more" if len(items) > most else shown


def iso_time(at_ms: int) -> str:
    """Return a time in ISO 8601, in UTC, to the millisecond."""
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
