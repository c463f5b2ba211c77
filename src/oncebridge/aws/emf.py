"""
Counts for CloudWatch, as lines on standard output.

Lambda's log is read by CloudWatch, which makes metrics of every line in its embedded metric
format: no call, no permission, no waiting. One line for each route in which something has
changed since the last; never a payload.
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
"""Counts that go down too, and so have no difference worth adding up."""


class Counted(Protocol):
    """Whatever has counts, such as the books of a route."""

    def counts(self) -> dict[str, int]: ...


class EmfMetrics:
    """Tell what has changed in the books, under *namespace*."""

    def __init__(self, namespace: str, clock: Clock) -> None:
        if not _NAMESPACE.fullmatch(namespace) or namespace.startswith("AWS/"):
            raise ConfigError(
                "metrics",
                f"{namespace!r} is no namespace of CloudWatch: up to 255 letters, digits and "
                "any of . - _ / # :, not beginning with AWS/",
            )
        self._namespace = namespace
        self._clock = clock
        self._told: dict[str, dict[str, int]] = {}

    def tell(self, books: Mapping[str, Counted]) -> None:
        """Write a line for each route in which something has changed."""
        lines = [
            json.dumps(self._line(route, changed)) + "\n"
            for route, changed in self._changes(books).items()
        ]
        if not lines:
            return
        try:
            # In one piece: lines of other threads must not come in between.
            sys.stdout.write("".join(lines))
            sys.stdout.flush()
        except (OSError, ValueError) as error:
            # What was done is done, and a metric less is no reason to do it again.
            _log.warning("oncebridge.metrics_lost", extra={"error": type(error).__name__})

    def _changes(self, books: Mapping[str, Counted]) -> dict[str, dict[str, int]]:
        changes: dict[str, dict[str, int]] = {}
        for route, counted in books.items():
            now = {name: n for name, n in counted.counts().items() if name not in _GAUGES}
            before = self._told.get(route, {})
            changed = {name: n - before.get(name, 0) for name, n in now.items()}
            self._told[route] = now
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
    """Make a dimension's value of a route's name: printable ASCII, not empty, not too long."""
    plain = "".join(char if " " <= char <= "~" else "?" for char in route)
    return plain[:_LONGEST].strip() or "?"
