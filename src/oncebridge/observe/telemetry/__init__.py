"""
OpenTelemetry, where the usual `OTEL_…` environment asks for it.

Nothing of OpenTelemetry is loaded before it is asked for. Where it is asked for and not there,
that is said once and events pass all the same: to be watched is no condition for working.

| variable                                      | what it does here                               |
| --------------------------------------------- | ----------------------------------------------- |
| `OTEL_EXPORTER_OTLP_ENDPOINT`                 | turns traces and metrics on                     |
| `OTEL_EXPORTER_OTLP_{TRACES,METRICS}_ENDPOINT`| turns one of them on                            |
| `OTEL_{TRACES,METRICS}_EXPORTER`              | `otlp`, `console` or `none`, for one of them    |
| `OTEL_SDK_DISABLED`                           | `true` turns all off                            |
| `OTEL_PROPAGATORS`                            | `tracecontext`, `xray`, `none`                  |

All others (sampler, limits, headers, timeouts, resource) are read by OpenTelemetry itself.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from msgspec import Struct

from oncebridge.engine.hooks import Tracer
from oncebridge.observe.report import Report

_log = logging.getLogger("oncebridge")

_EXPORTERS: Final = ("otlp", "console", "none")
_PROPAGATORS: Final = {"tracecontext": "tracecontext", "xray": "xray", "xray-lambda": "xray"}
_NOT_OURS: Final = frozenset({"baggage", "none", ""})


class Telemetry(Protocol):
    """What is exported."""

    @property
    def tracer(self) -> Tracer | None:
        """Who follows events, where traces are asked for."""
        ...

    def context(self, traceparent: str, xray: str, /) -> str:
        """Read the context that came beside an event; see `oncebridge.sources.api.Context`."""
        ...

    def open(self) -> None:
        """Begin, on the running loop."""
        ...

    async def aclose(self) -> None:
        """Send what is left, for as long as that is reasonable."""
        ...


class TelemetryOptions(Struct, frozen=True):
    """What the environment asks for."""

    traces: str = "none"
    """`otlp`, `console` or `none`, as the next."""
    metrics: str = "none"
    propagators: frozenset[str] = frozenset({"tracecontext"})
    """Which of `tracecontext` and `xray` are understood."""

    def __bool__(self) -> bool:
        return (self.traces, self.metrics) != ("none", "none")


def from_environment(
    environment: Mapping[str, str], report: Callable[[], Report], name: str
) -> Telemetry | None:
    """Set up what the environment asks for, for the worker *name*; None where it asks for nothing."""
    asked = wish(environment)
    if not asked:
        return None
    try:
        from oncebridge.observe.telemetry.setup import Exports  # noqa: PLC0415 - few want it

        return Exports(asked, report, name)
    except ImportError as error:
        missing = {"missing": error.name or "", "do": "pip install 'oncebridge[otel]'"}
        _log.warning("oncebridge.telemetry_not_installed", extra=missing)
    except Exception as error:  # noqa: BLE001 - OpenTelemetry refuses some settings so
        _log.warning("oncebridge.telemetry_failed", extra={"error": type(error).__name__})
    return None


def wish(environment: Mapping[str, str]) -> TelemetryOptions:
    """Read what the environment asks for."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return TelemetryOptions()
    return TelemetryOptions(
        _exporter(environment, "TRACES"), _exporter(environment, "METRICS"), _read(environment)
    )


def _exporter(environment: Mapping[str, str], signal: str) -> str:
    """Return where *signal* goes; an endpoint alone asks for OTLP."""
    setting = f"OTEL_{signal}_EXPORTER"
    named = environment.get(setting, "").strip().lower()
    if named in _EXPORTERS:
        return named
    if named:
        told = {"setting": setting, "allowed": ", ".join(_EXPORTERS)}
        _log.warning("oncebridge.telemetry_exporter_unknown", extra=told)
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    return "otlp" if any(environment.get(one, "").strip() for one in endpoints) else "none"


def _read(environment: Mapping[str, str]) -> frozenset[str]:
    text = environment.get("OTEL_PROPAGATORS", "").strip()
    if not text:
        return frozenset({"tracecontext"})
    named = [name.strip().lower() for name in text.split(",")]
    if unknown := sorted({name for name in named if name not in _PROPAGATORS} - _NOT_OURS):
        told = {"unknown": ", ".join(unknown), "allowed": ", ".join([*_PROPAGATORS, "none"])}
        _log.warning("oncebridge.telemetry_propagator_unknown", extra=told)
    return frozenset(_PROPAGATORS[name] for name in named if name in _PROPAGATORS)
