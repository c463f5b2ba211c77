"""
The Jinja environment of all pages, with its filters.

Everything is escaped, except for charts that are drawn here. A variable that a template uses and
a view does not pass is an error.
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from oncebridge import __version__
from oncebridge.base.formatting import (
    format_elapsed,
    format_instant,
    format_share,
    format_size,
    printable,
    shorten,
)
from oncebridge.engine.causes import MEANINGS
from oncebridge.engine.verdict import Verdict

VERDICTS: Final[dict[str, str]] = {
    Verdict.DELIVERED: "first arrival: delivered to the sink",
    Verdict.DUPLICATE: "delivered before, within its window",
    Verdict.STALE: "a newer state of the same entity was delivered",
    Verdict.UNCHANGED: "the same state as the last delivered one, inside the quiet time",
    Verdict.CONFLICT: "the same identity with other content",
    Verdict.BUSY: "another worker is processing it: it will be retried",
    Verdict.FAILED: "the sink or the store did not accept it: it will be retried",
    Verdict.DEAD: "it cannot be delivered, and is kept in the dead letters",
    Verdict.BYPASSED: "its rule does not deduplicate: delivered each time",
    Verdict.DISCARDED: "its rule drops it, or no route matches it",
}
"""What each verdict means, in a few words."""

_OUTLINES: Final[dict[str, str]] = {
    Verdict.DELIVERED: "M2 6.5 5 9.5 10 3",
    Verdict.DUPLICATE: "M2 4.5h5.5v6H2zM4.5 4V1.5H10v6H8",
    Verdict.STALE: "M6 1.5a4.5 4.5 0 1 1 0 9 4.5 4.5 0 0 1 0-9M6 3.5V6l2 1.5",
    Verdict.UNCHANGED: "M2 4.5h8M2 7.5h8",
    Verdict.CONFLICT: "M2 4.5h8M2 7.5h8M8 1.5l-4 9",
    Verdict.BUSY: "M3 1.5h6L6 6 3 1.5M3 10.5h6L6 6z",
    Verdict.FAILED: "M6 1.5 11 10.5H1zM6 5v2.5M6 8.6v.4",
    Verdict.DEAD: "M2.5 2.5l7 7M9.5 2.5l-7 7",
    Verdict.BYPASSED: "M1.5 6h9M7 2.5 10.5 6 7 9.5",
    Verdict.DISCARDED: "M6 1.5a4.5 4.5 0 1 1 0 9 4.5 4.5 0 0 1 0-9M3.5 6h5",
    "good": "M2 6.5 5 9.5 10 3",
    "warn": "M6 1.5 11 10.5H1zM6 5v2.5M6 8.6v.4",
    "bad": "M4 1.5h4L10.5 4v4L8 10.5H4L1.5 8V4zM6 3.5v3M6 8.2v.3",
    "note": "M6 1.5a4.5 4.5 0 1 1 0 9 4.5 4.5 0 0 1 0-9M6 5.5v2.8M6 3.5v.2",
    "off": "M6 1.5a4.5 4.5 0 1 1 0 9 4.5 4.5 0 0 1 0-9M3.5 6h5",
}
_CAUSES: Final[dict[str, str]] = {cause.value: meaning for cause, meaning in MEANINGS.items()}
_NONE: Final = "\N{EN DASH}"
_OTHER: Final = "M6 3a3 3 0 1 1 0 6 3 3 0 0 1 0-6"
_JOINT: Final = re.compile(r"[./:_-](?=[^<&])")
_UNITS: Final = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"))


def iso(ms: float) -> str:
    """Return a time in ISO format, in UTC; empty if it is beyond the calendar."""
    try:
        found = datetime.fromtimestamp(ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return ""
    return f"{found:%Y-%m-%dT%H:%M:%S}.{found.microsecond // 1000:03d}Z"


def short(number: float) -> str:
    """Return a number in at most seven characters: `999,999`, `1.23M`."""
    for unit, name in _UNITS:
        if abs(number) >= unit:
            scaled = number / unit
            return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f}{name}"
    return f"{number:,}"


def rate(per_second: float) -> str:
    """Return a rate per second, rounded to what is significant."""
    if per_second >= 1000:
        return short(round(per_second))
    if per_second >= 100 or not per_second:
        return f"{per_second:.0f}"
    return f"{per_second:.1f}" if per_second >= 0.1 else f"{max(per_second, 0.01):.2f}"


def seconds(value: float | None) -> str:
    """Return a duration; a dash for None."""
    if value is None:
        return _NONE
    if value < 0.01:
        return f"{value * 1000:.1f}\N{NO-BREAK SPACE}ms"
    return format_elapsed(round(value * 1000))


def soft(text: str) -> Markup:
    """Allow line breaks inside a long name, after its punctuation."""
    return Markup(_JOINT.sub("\\g<0><wbr>", str(escape(text))))  # noqa: S704 - it is escaped


def _word(text: str) -> str:
    """Return the CSS class of a verdict; `other` if it is not one."""
    return text if text in VERDICTS else "other"


_FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "iso": iso,
    "instant": format_instant,
    "elapsed": format_elapsed,
    "seconds": seconds,
    "count": lambda number: f"{number:,}",
    "short": short,
    "rate": rate,
    "share": format_share,
    "size": format_size,
    "spelt": printable,
    "clip": shorten,
    "soft": soft,
    "word": _word,
    "meaning": lambda text: VERDICTS.get(text, ""),
    "cause_meaning": lambda text: _CAUSES.get(text, ""),
    "outline": lambda name: _OUTLINES.get(name, _OTHER),
}


@cache
def environment() -> Environment:
    """Return the environment of all pages."""
    made = Environment(
        loader=PackageLoader("oncebridge.dashboard"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters.update(_FILTERS)
    made.globals["version"] = __version__
    return made
