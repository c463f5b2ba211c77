"""
OpenTelemetry, if the usual `OTEL_…` environment variables configure it.

OpenTelemetry is imported only if it is configured. If it is configured but not installed, that is
logged once, and events are processed without telemetry.

| variable                                      | effect                                          |
| --------------------------------------------- | ----------------------------------------------- |
| `OTEL_EXPORTER_OTLP_ENDPOINT`                 | enables traces and metrics                      |
| `OTEL_EXPORTER_OTLP_{TRACES,METRICS}_ENDPOINT`| enables one of them                             |
| `OTEL_{TRACES,METRICS}_EXPORTER`              | `otlp`, `console` or `none`, for one of them    |
| `OTEL_SDK_DISABLED`                           | `true` disables everything                      |
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
        """The tracer, if traces are enabled."""
        ...

    def context(self, traceparent: str, xray: str, /) -> str:
        """Return the trace context that came with an event; see `oncebridge.sources.api.TraceparentReader`."""
        ...

    def open(self) -> None:
        """Begin to export, on the running event loop."""
        ...

    async def aclose(self) -> None:
        """Export the rest, within a few seconds."""
        ...


class TelemetryOptions(Struct, frozen=True):
    """The configuration from the environment."""

    traces: str = "none"
    """`otlp`, `console` or `none`; so is `metrics`."""
    metrics: str = "none"
    propagators: frozenset[str] = frozenset({"tracecontext"})
    """Which of `tracecontext` and `xray` are enabled."""

    def __bool__(self) -> bool:
        return (self.traces, self.metrics) != ("none", "none")


def from_environment(
    environment: Mapping[str, str], report: Callable[[], Report], name: str
) -> Telemetry | None:
    """Set up telemetry for the worker *name*; None if the environment does not enable it."""
    asked = read_options(environment)
    if not asked:
        return None
    try:
        from oncebridge.observe.telemetry.setup import Exports  # noqa: PLC0415 - few want it

        return Exports(asked, report, name)
    except ImportError as error:
        missing = {"missing": error.name or "", "do": "pip install 'oncebridge[otel]'"}
        _log.warning("oncebridge.telemetry_not_installed", extra=missing)
    except Exception as error:  # noqa: BLE001 - OpenTelemetry raises this for some settings
        _log.warning("oncebridge.telemetry_failed", extra={"error": type(error).__name__})
    return None


def read_options(environment: Mapping[str, str]) -> TelemetryOptions:
    """Read the configuration from the environment."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return TelemetryOptions()
    return TelemetryOptions(
        _exporter(environment, "TRACES"), _exporter(environment, "METRICS"), _read(environment)
    )


def _exporter(environment: Mapping[str, str], signal: str) -> str:
    """Return the exporter of *signal*; an endpoint alone means OTLP."""
    setting = f"OTEL_{signal}_EXPORTER"
    named = environment.get(setting, "").strip().lower()
    if named in _EXPORTERS:
        return named
    if named:
        extra = {"setting": setting, "allowed": ", ".join(_EXPORTERS)}
        _log.warning("oncebridge.telemetry_exporter_unknown", extra=extra)
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    return "otlp" if any(environment.get(one, "").strip() for one in endpoints) else "none"


def _read(environment: Mapping[str, str]) -> frozenset[str]:
    text = environment.get("OTEL_PROPAGATORS", "").strip()
    if not text:
        return frozenset({"tracecontext"})
    named = [name.strip().lower() for name in text.split(",")]
    if unknown := sorted({name for name in named if name not in _PROPAGATORS} - _NOT_OURS):
        extra = {"unknown": ", ".join(unknown), "allowed": ", ".join([*_PROPAGATORS, "none"])}
        _log.warning("oncebridge.telemetry_propagator_unknown", extra=extra)
    return frozenset(_PROPAGATORS[name] for name in named if name in _PROPAGATORS)
