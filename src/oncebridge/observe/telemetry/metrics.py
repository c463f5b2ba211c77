"""
Metrics in the format of OpenTelemetry.

The names are those of Prometheus with a dot after the prefix, and without unit and `_total`, which
a Prometheus server that receives OTLP adds again: `oncebridge.decision` in `s` is its
`oncebridge_decision_seconds`. Sums count from the start of the worker (cumulative).
"""

from typing import Final

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from oncebridge import __version__
from oncebridge.observe.metric_families import Family, Labels, families
from oncebridge.observe.report import Report

_UNITS: Final = {"": "1", "seconds": "s", "bytes": "By"}
_CUMULATIVE: Final = AggregationTemporality.CUMULATIVE


def name_of(family: Family) -> str:
    """Return the name of *family*."""
    return f"oncebridge.{family.name}"


def metrics_data(report: Report, resource: Resource) -> MetricsData:
    """Return *report* as OpenTelemetry metrics."""
    state = report.state
    times = _Times(state.started_ms * 1_000_000, state.at_ms * 1_000_000)
    metrics = [
        Metric(name_of(family), family.help, _UNITS[family.unit], times.data(family))
        for family in families(report)
    ]
    scope = ScopeMetrics(InstrumentationScope("oncebridge", __version__), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


class _Times:
    """Makes data points for counts between two times, in nanoseconds."""

    def __init__(self, start: int, now: int) -> None:
        self._start = start
        self._now = now

    def data(self, family: Family) -> Sum | Gauge | Histogram:
        match family.kind:
            case "counter":
                return Sum(self._numbers(family), _CUMULATIVE, is_monotonic=True)
            case "gauge":
                return Gauge(self._numbers(family))
            case "histogram":
                return Histogram(self._histograms(family), _CUMULATIVE)

    def _numbers(self, family: Family) -> list[NumberDataPoint]:
        return [
            NumberDataPoint(_labelled(family, values), self._start, self._now, _plain(number))
            for values, number in family.numbers
        ]

    def _histograms(self, family: Family) -> list[HistogramDataPoint]:
        return [
            HistogramDataPoint(
                _labelled(family, values),
                self._start,
                self._now,
                histogram.count,
                histogram.sum,
                histogram.fitted(family.ends),
                family.ends,
                min=None,  # type: ignore[arg-type]
                max=None,  # type: ignore[arg-type]
            )
            for values, histogram in family.histograms
        ]


def _labelled(family: Family, values: Labels) -> dict[str, str]:
    return {
        name: value.encode(errors="replace").decode()
        for name, value in zip(family.labels, values, strict=True)
    }


def _plain(number: float) -> float:
    """Return a boolean as a number."""
    return int(number) if isinstance(number, bool) else number
