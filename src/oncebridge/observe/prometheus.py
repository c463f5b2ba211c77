"""
Metrics in the format of Prometheus.

Names follow its conventions: the prefix `oncebridge_`, base units, `_total` for counters. The
metrics are defined in `oncebridge.observe.metric_families`.
"""

from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from oncebridge.observe.metric_families import Family, Labels, cumulative, families
from oncebridge.observe.report import Report

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def name_of(family: Family) -> str:
    """Return the name of *family*, without the `_total` of a counter."""
    return f"oncebridge_{family.name}_{family.unit}" if family.unit else f"oncebridge_{family.name}"


def exposition(report: Report) -> bytes:
    """Return the body of `/metrics` for *report*."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Reported(report))
    return generate_latest(registry)


class _Reported(Collector):
    """A report as a collector of the client library."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def collect(self) -> Iterable[Metric]:
        return map(_metric, families(self._report))

    def describe(self) -> Iterable[Metric]:
        return ()


def _metric(family: Family) -> Metric:
    name, labels = name_of(family), family.labels
    match family.kind:
        case "counter":
            counter = CounterMetricFamily(name, family.help, labels=labels)
            for values, number in family.numbers:
                counter.add_metric(_written(values), number)
            return counter
        case "gauge":
            gauge = GaugeMetricFamily(name, family.help, labels=labels)
            for values, number in family.numbers:
                gauge.add_metric(_written(values), number)
            return gauge
        case "histogram":
            return _histogram(name, family)


def _histogram(name: str, family: Family) -> Metric:
    ends = [*map(floatToGoString, family.ends), "+Inf"]
    metric = HistogramMetricFamily(name, family.help, labels=family.labels)
    for values, histogram in family.histograms:
        buckets = list(zip(ends, cumulative(histogram, family.ends), strict=True))
        metric.add_metric(_written(values), buckets, histogram.sum)
    return metric


def _written(values: Labels) -> Labels:
    """Replace characters that UTF-8 cannot encode: a name may come from the environment."""
    return tuple([value.encode(errors="replace").decode() for value in values])
