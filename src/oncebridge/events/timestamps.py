"""
Parse the timestamps in events and recordings, as milliseconds since 1970.

Nothing raises; a value that is not a timestamp gives None.
"""

from datetime import UTC, datetime
from typing import Any, Final

_SECONDS: dict[str, int] = {}
"""A cache of recent seconds: most timestamps of a recording are close together."""
_MOST_SECONDS: Final = 10_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECONDS_BELOW: Final = 10**11
"""A number below is in seconds: as milliseconds it would be before 1973."""
_LATEST_MS: Final = 253_402_300_800_000
"""The year 10000, where dates end."""


def parse_instant(text: str) -> int | None:
    """Return an ISO 8601 timestamp in milliseconds; without an offset it is UTC."""
    begins = _SECONDS.get(text[:19])
    if begins is not None:
        # As EventBridge and Genesys write it: 2026-03-19T10:15:07Z, 2026-03-19T10:15:07.919Z.
        if len(text) == 24 and text[19] == "." and text[23] == "Z" and text[20:23].isdecimal():
            return begins + int(text[20:23])
        if text[19:] == "Z":
            return begins
    return _read(text)


def _read(text: str) -> int | None:
    try:
        read = datetime.fromisoformat(text)
    except ValueError:
        return None
    if read.tzinfo is None:
        read = read.replace(tzinfo=UTC)
    since = read - _EPOCH
    at_ms = since.days * 86_400_000 + since.seconds * 1000 + since.microseconds // 1000
    if len(text) in (20, 24) and text[-1] == "Z" and text[10] == "T":
        if len(_SECONDS) >= _MOST_SECONDS:
            _SECONDS.clear()
        _SECONDS[text[:19]] = at_ms - at_ms % 1000
    return at_ms


def parse_timestamp(value: Any) -> int | None:
    """Return a timestamp in ISO 8601, seconds or milliseconds since 1970 in milliseconds."""
    if type(value) is str:
        if value.isascii() and value.isdecimal() and 10 <= len(value) <= 15:
            return parse_timestamp(int(value))
        return parse_instant(value) if value[4:5] == "-" else None
    if type(value) is int or type(value) is float:
        at_ms = int(value * 1000) if 0 <= value < _SECONDS_BELOW else int(value)
        return at_ms if 0 < at_ms < _LATEST_MS else None
    return None
