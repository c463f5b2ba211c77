"""
Metrics for CloudWatch, as lines on standard output (embedded metric format).

CloudWatch reads a function's log and makes metrics of every line in this format: no call, no
permission, no waiting. One line for each route whose counters have changed; never a payload.
"""

import json
import logging
import re
import sys
from collections.abc import Mapping
from typing import Any, Final, Protocol

from oncebridge.base.clock import Clock
from oncebridge.errors import ConfigError

_log = logging.getLogger("oncebridge")
_NAMESPACE: Final = re.compile(r"[0-9A-Za-z.\-_/#:]{1,255}")
_LONGEST: Final = 1024
_GAUGES: Final = frozenset({"in_flight"})
"""Values that also decrease, so their differences must not be added up."""


class Counted(Protocol):
    """An object with counters, such as those of a route."""

    def counts(self) -> dict[str, int]: ...


class EmfMetrics:
    """Writes the changes of counters, under *namespace*."""

    def __init__(self, namespace: str, clock: Clock) -> None:
        if not _NAMESPACE.fullmatch(namespace) or namespace.startswith("AWS/"):
            raise ConfigError(
                "metrics",
                f"{namespace!r} is not a CloudWatch namespace: use up to 255 letters, digits and "
                "any of . - _ / # :, not beginning with AWS/",
            )
        self._namespace = namespace
        self._clock = clock
        self._written: dict[str, dict[str, int]] = {}

    def write_changes(self, books: Mapping[str, Counted]) -> None:
        """Write a line for each route whose counters have changed."""
        lines = [
            json.dumps(self._line(route, changed)) + "\n"
            for route, changed in self._changes(books).items()
        ]
        if not lines:
            return
        try:
            # In one write: lines of other threads must not come in between.
            sys.stdout.write("".join(lines))
            sys.stdout.flush()
        except (OSError, ValueError) as error:
            # The events are processed; a lost metric must not fail the call.
            _log.warning("oncebridge.metrics_lost", extra={"error": type(error).__name__})

    def _changes(self, books: Mapping[str, Counted]) -> dict[str, dict[str, int]]:
        changes: dict[str, dict[str, int]] = {}
        for route, counted in books.items():
            now = {name: n for name, n in counted.counts().items() if name not in _GAUGES}
            before = self._written.get(route, {})
            changed = {name: n - before.get(name, 0) for name, n in now.items()}
            self._written[route] = now
            if any(changed.values()):
                changes[route] = {name: n for name, n in changed.items() if n}
        return changes

    def _line(self, route: str, changed: Mapping[str, int]) -> dict[str, Any]:
        return {
            "_aws": {
                "Timestamp": self._clock(),
                "CloudWatchMetrics": [
                    {
                        "Namespace": self._namespace,
                        "Dimensions": [["route"]],
                        "Metrics": [{"Name": name, "Unit": "Count"} for name in changed],
                    }
                ],
            },
            "route": _dimension(route),
            **changed,
        }


def _dimension(route: str) -> str:
    """Return a route's name as a dimension: printable ASCII, not empty, not too long."""
    plain = "".join(char if " " <= char <= "~" else "?" for char in route)
    return plain[:_LONGEST].strip() or "?"
