"""Durations as people write them: `500ms`, `30s`, `5m`, `36h`, `6d`."""

import re
from datetime import timedelta

from oncebridge.errors import ConfigError

_UNITS = {
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
}
_FORM = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", re.ASCII)
_LONGEST = timedelta(days=3650)


def parse_duration(text: object, where: str) -> timedelta:
    """Return *text*, such as `30s`, as a duration; *where* is the setting, for the error."""
    if isinstance(text, timedelta):
        found = text
    elif isinstance(text, str) and (form := _FORM.fullmatch(text.strip())):
        try:
            found = float(form[1]) * _UNITS[form[2]]
        except OverflowError:
            found = timedelta.max
    else:
        raise ConfigError(
            where, f"{text!r} is not a duration; write a number and a unit: 500ms, 30s, 5m, 36h, 6d"
        )
    if not timedelta(milliseconds=1) <= found <= _LONGEST:
        raise ConfigError(where, f"{text!r} must be at least 1ms and at most 3650d")
    return found


def format_duration(duration: timedelta) -> str:
    """Return a duration as text, in the largest unit that divides it."""
    for unit, length in reversed(_UNITS.items()):
        if duration >= length and not duration % length:
            return f"{duration // length}{unit}"
    return f"{duration / _UNITS['ms']:.3f}".rstrip("0").rstrip(".") + "ms"
