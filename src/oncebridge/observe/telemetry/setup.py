"""
Exports traces and metrics, and shuts the exporters down.

Waiting for a collector happens in daemon threads, so it delays neither events nor a stop of the
process. Data that cannot be sent within the few seconds of a stop is lost.
"""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, MetricExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

from oncebridge import __version__
from oncebridge.events.trace_context import read_traceparent, read_xray
from oncebridge.observe.report import Report
from oncebridge.observe.telemetry import TelemetryOptions
from oncebridge.observe.telemetry.metrics import metrics_data
from oncebridge.observe.telemetry.spans import Spans

_log = logging.getLogger("oncebridge")

_LEAVE_S: Final = 3.0
_GIVE_UP_S: Final = 0.5
"""Time for a cancelled export to end."""
_INTERVAL_S: Final = 60.0
_LOG_EVERY_S: Final = 60.0


class Exports:
    """Export telemetry by *options*, for the worker *name*."""

    def __init__(self, options: TelemetryOptions, report: Callable[[], Report], name: str) -> None:
        resource = _resource(name)
        self._reads = options.propagators
        self._spans = (
            _Spans(_span_exporter(options.traces), resource) if _is_on(options.traces) else None
        )
        self._metrics: _Metrics | None = None
        if _is_on(options.metrics):
            self._metrics = _Metrics(_metric_exporter(options.metrics), resource, report)
        self.tracer: Spans | None = None
        if self._spans is not None:
            tracer = self._spans.provider.get_tracer("oncebridge", __version__)
            is_known = "tracecontext" in options.propagators
            self.tracer = Spans(tracer, reads=is_known, sends=bool(options.propagators))
        self._trouble = _ExportErrorHandler()
        _hear(self._trouble)

    def context(self, traceparent: str, xray: str, /) -> str:
        """Return the trace context that came with an event; see `oncebridge.sources.api.TraceparentReader`."""
        found = ""
        if traceparent and "tracecontext" in self._reads:
            found = read_traceparent(traceparent)
        return found or (read_xray(xray) if xray and "xray" in self._reads else "")

    def open(self) -> None:
        """Begin to export metrics, on the running event loop."""
        if self._metrics is not None:
            self._metrics.open()

    async def aclose(self) -> None:
        """Export the rest, within a few seconds."""
        ends = [one.aclose() for one in (self._spans, self._metrics) if one is not None]
        await asyncio.gather(*ends)
        logging.getLogger("opentelemetry").removeHandler(self._trouble)


class _Spans:
    """Exports spans to *exporter*, in a thread of OpenTelemetry."""

    def __init__(self, exporter: SpanExporter, resource: Resource) -> None:
        self._exporter = exporter
        self._processor = BatchSpanProcessor(exporter)
        self.provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.provider.add_span_processor(self._processor)

    async def aclose(self) -> None:
        if not await _beside(self._processor.shutdown, _LEAVE_S):
            await _beside(self._exporter.shutdown, _GIVE_UP_S)


class _Metrics:
    """Exports *report* to *exporter* periodically."""

    def __init__(
        self, exporter: MetricExporter, resource: Resource, report: Callable[[], Report]
    ) -> None:
        self._exporter = exporter
        self._resource = resource
        self._report = report
        self._every_s = _interval()
        self._keeper: asyncio.Task[None] | None = None

    def open(self) -> None:
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def aclose(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._send(_LEAVE_S)
        await _beside(self._exporter.shutdown, _GIVE_UP_S)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self._send(self._every_s)

    async def _send(self, within_s: float) -> None:
        try:
            report = self._report()
        except Exception as error:  # noqa: BLE001 - retried at the next interval
            _log.warning("oncebridge.telemetry_failed", extra={"error": type(error).__name__})
            return

        def send() -> None:
            data = metrics_data(report, self._resource)  # about 50 ms with many rules
            self._exporter.export(data, timeout_millis=within_s * 1000)

        await _beside(send, within_s)


async def _beside(work: Callable[[], object], within_s: float) -> bool:
    """Run *work* in a daemon thread; return True if it ended in time."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - an exporter may raise anything
            _log.warning("oncebridge.telemetry_failed", extra={"error": type(error).__name__})
        finally:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=run, name="oncebridge-telemetry", daemon=True).start()
    try:
        async with asyncio.timeout(within_s):
            await ended.wait()
    except TimeoutError:
        return False
    return True


# --- settings --------------------------------------------------------------------------------


def _is_on(exporter: str) -> bool:
    return exporter != "none"


def _span_exporter(kind: str) -> SpanExporter:
    if kind == "console":
        return ConsoleSpanExporter(out=sys.stderr)  # events may go to standard output
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter,
    )

    return OTLPSpanExporter()


def _metric_exporter(kind: str) -> MetricExporter:
    if kind == "console":
        return ConsoleMetricExporter(out=sys.stderr)
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import (  # noqa: PLC0415
        OTLPMetricExporter,
    )

    return OTLPMetricExporter()


def _resource(name: str) -> Resource:
    """Return the resource, with defaults for what the environment does not set."""
    ours = {
        "service.name": "oncebridge",
        "service.version": __version__,
        "service.instance.id": name,
    }
    said = OTELResourceDetector().detect().attributes
    return Resource.create({what: text for what, text in ours.items() if what not in said})


def _interval() -> float:
    try:
        every_s = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")) / 1000
    except ValueError:
        return _INTERVAL_S
    return every_s if every_s > 0 else _INTERVAL_S


# --- errors ----------------------------------------------------------------------------------


class _ExportErrorHandler(logging.Handler):
    """Logs errors of OpenTelemetry in our own log, at most once a minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._logged_at = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if record.created - self._logged_at < _LOG_EVERY_S:
            return
        self._logged_at = record.created
        # Without arguments, which may contain an address; a status is safe.
        filled = record.args if isinstance(record.args, tuple) else ()
        status = next((one for one in filled if isinstance(one, int)), None)
        extra = {"said": str(record.msg), **({} if status is None else {"status": status})}
        _log.warning("oncebridge.telemetry_trouble", extra=extra)


def _hear(trouble: _ExportErrorHandler) -> None:
    """Install the handler, once."""
    theirs = logging.getLogger("opentelemetry")
    if not theirs.hasHandlers():
        theirs.addHandler(trouble)
