"""
Log lines: text on a terminal, JSON elsewhere.

A line has the name of an event and its fields. None of them is a payload or a secret: library
code logs only names, counts and types of errors.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO

from oncebridge.base.secrets import Address, mask_address

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_COLOURS = {"WARNING": "33", "ERROR": "31", "CRITICAL": "31"}


def set_up(level: str, form: Literal["auto", "json", "text"]) -> logging.Handler:
    """Send the lines of the logger `oncebridge` to standard error."""
    is_text = form == "text" or (form == "auto" and sys.stderr.isatty())
    handler = _Stderr()
    handler.setFormatter(_ForPeople(colour=sys.stderr.isatty()) if is_text else _AsJson())
    log = logging.getLogger("oncebridge")
    for old in list(log.handlers):
        log.removeHandler(old)
    log.addHandler(handler)
    log.setLevel(level.upper())
    log.propagate = False
    return handler


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the current standard error, which a status line may have replaced."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = {
        name: mask_address(value) if isinstance(value, Address) else value
        for name, value in vars(record).items()
        if name not in _STANDARD
    }
    if record.exc_info and record.exc_info[0]:
        # only its type: the text of an exception may quote the event
        fields["error"] = record.exc_info[0].__name__
    return fields


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


class _AsJson(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **_fields(record),
        }
        return json.dumps(line, default=str)


class _ForPeople(logging.Formatter):
    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={_one_line(value)}" for name, value in _fields(record).items())
        what = record.getMessage().removeprefix("oncebridge.").replace("_", " ")
        code = _COLOURS.get(record.levelname)
        if self._colour and code:
            what = f"\x1b[{code}m{what}\x1b[0m"
        return f"{_time(record):%H:%M:%S} {what} {fields}".rstrip()


def _one_line(value: object) -> str:
    """Return *value* with line breaks and control characters escaped."""
    text = str(value)
    return text if text.isprintable() else ascii(text)
