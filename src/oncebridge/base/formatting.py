"""
Format numbers, times and names for terminals and web pages.

Text from an event is made printable, because control characters could mislead a terminal or a
reader, and is cut if it is too long.
"""

import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

SECOND, MINUTE, HOUR, DAY = 1000, 60_000, 3_600_000, 86_400_000
"""In milliseconds."""
NB: Final = "\N{NO-BREAK SPACE}"
"""Between a number and its unit."""
_LONGEST: Final = 120


def format_count(number: int, what: str, several: str = "") -> str:
    """Return a number with its noun: `1 event`, `2 events`."""
    return f"{number:,} {what if number == 1 else several or f'{what}s'}"


def format_share(part: int, whole: int) -> str:
    """Return a share in percent; `0 %` and `100 %` only where they are exact."""
    if not whole:
        return f"0{NB}%"
    percent = 100 * part / whole
    if 0 < percent < 1:
        return f"<1{NB}%"
    return f">99{NB}%" if 99 < percent < 100 else f"{percent:.0f}{NB}%"


def format_elapsed(ms: int) -> str:
    """Return a length of time in its two largest units."""
    if ms < SECOND:
        return f"{max(ms, 0)}{NB}ms"
    if ms < 10 * SECOND and ms % SECOND:
        return f"{ms / SECOND:.1f}{NB}s"
    units = ((DAY, "d"), (HOUR, "h"), (MINUTE, "min"), (SECOND, "s"))
    at = next(at for at, (length, _) in enumerate(units) if ms >= length)
    length, name = units[at]
    text = f"{ms // length}{NB}{name}"
    if at + 1 < len(units) and ms // length < 10:
        below, smaller = units[at + 1]
        rest = ms % length // below
        text += f" {rest}{NB}{smaller}" if rest else ""
    return text


def format_instant(ms: int, *, with_seconds: bool = True) -> str:
    """Return a point in time, in UTC."""
    try:
        found = datetime.fromtimestamp(ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"  # outside of the range of dates
    return f"{found:%Y-%m-%d %H:%M:%S}" if with_seconds else f"{found:%Y-%m-%d %H:%M}"


def format_size(length: int) -> str:
    """Return a number of bytes, rounded."""
    value, unit = float(length), "bytes"
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "bytes" or value >= 100 else f"{value:.1f} {unit}"


def printable(text: object, longest: int = _LONGEST) -> str:
    """Escape characters that are not printable, and cut the text after *longest* characters."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text)[: longest + 1])
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def shorten(text: object, width: int) -> str:
    """Shorten a name in the middle: names often differ at the end."""
    shown = printable(text, 400)
    if len(shown) <= width:
        return shown
    tail = max((width - 1) // 3, 0)
    return f"{shown[: width - 1 - tail]}…{shown[len(shown) - tail :]}"


def format_list(items: Sequence[str], *, most: int = 5) -> str:
    """Return the first *most* items, and the number of the others."""
    shown = ", ".join(items[:most])
    return f"{shown} and {len(items) - most:,} more" if len(items) > most else shown


def iso_time(at_ms: int) -> str:
    """Return a time in ISO 8601, in UTC, to the millisecond."""
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def raised_at(error: BaseException) -> str:
    """Return the file and line where *error* was raised; its text may quote an event."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"
