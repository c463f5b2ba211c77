"""
Who did what by hand: the audit trail in a file.

One line of JSON for each act of an operator, on disk before the act begins. It holds names,
keys, numbers and the reason that was given, and never a payload. What cannot be written down
is not done. `oncebridge.operate.operator_log` has the same in the store, beside the events.
"""

import fcntl
import json
import logging
import os
import platform
import pwd
from datetime import UTC, datetime
from pathlib import Path

from oncebridge.base.clock import Clock, system_clock
from oncebridge.base.private_files import open_private, sync_directory
from oncebridge.errors import ConfigError

_log = logging.getLogger("oncebridge")


class AuditTrail:
    """Append to the file at *path*; without one, the log alone has it."""

    def __init__(self, path: str | None, *, clock: Clock = system_clock) -> None:
        self._path = path
        self._clock = clock

    def write(self, verb: str, **facts: object) -> None:
        """Write down that *verb* is about to be done; durable when this returns."""
        told = {"user": _user(), "host": platform.node(), "verb": verb, **facts}
        if self._path is not None:
            self._append(self._path, {"time": instant(self._clock()), **told})
        _log.warning("oncebridge.audit", extra=told)

    def _append(self, path: str, line: dict[str, object]) -> None:
        text = json.dumps(line).encode() + b"\n"
        try:
            file, _ = open_private(Path(path), os.O_RDWR | os.O_APPEND, mode=0o640)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)  # or we might see half of another's line
                size = os.fstat(file).st_size
                if size and os.pread(file, 1, size - 1) != b"\n":
                    text = b"\n" + text  # a line was cut short; it stays on its own
                _write_all(file, text)
                os.fsync(file)
            finally:
                os.close(file)
            if not size:
                sync_directory(Path(path).parent)
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise ConfigError(
                "audit", f"{path}: cannot be written ({why}), so nothing was done"
            ) from None


def instant(at_ms: int) -> str:
    """Write a time as people and programs read it: ISO 8601, in UTC."""
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def who() -> str:
    """Name whoever runs this process, and where."""
    return f"{_user()}@{platform.node()}"


def _user() -> str:
    # By the number of the process's owner: the environment says whatever it was told.
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


def _write_all(file: int, text: bytes) -> None:
    while text:
        text = text[os.write(file, text) :]
