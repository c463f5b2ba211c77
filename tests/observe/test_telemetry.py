"""What the environment asks for, and what a collector gets of a real service."""

import asyncio
import http.client
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
from opentelemetry.sdk.resources import Resource
from tests.observe.collector import attributes, collecting, serving

from oncebridge.observe.counts import Counts
from oncebridge.observe.metric_families import families
from oncebridge.observe.report import Report, State
from oncebridge.observe.telemetry import TelemetryOptions, from_environment, read_options
from oncebridge.observe.telemetry.metrics import metrics_data
from oncebridge.observe.telemetry.setup import _Metrics
from oncebridge.service.config import load
from oncebridge.service.service import Service

_REPORT = Report(State("w", "box", 1, "1.0", 5, 6), Counts())
CLIENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
QUICK = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_METRIC_EXPORT_INTERVAL": "200"}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Let nothing of ours be asked for by whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    return monkeypatch


# --- what is asked for --------------------------------------------------------------------

BOTH = TelemetryOptions("otlp", "otlp")


@pytest.mark.parametrize(
    ("told", "wished"),
    [
        ({}, TelemetryOptions()),
        ({"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on"}, TelemetryOptions()),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, BOTH),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, TelemetryOptions()),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, TelemetryOptions("otlp", "none")),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4318/v1/m"}, TelemetryOptions("none", "otlp")),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, TelemetryOptions("otlp", "none")),
        ({"OTEL_METRICS_EXPORTER": "console"}, TelemetryOptions("none", "console")),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_METRICS_EXPORTER": "none"}, TelemetryOptions("otlp")),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": " NONE "}, TelemetryOptions("none", "otlp")),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, TelemetryOptions()),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "false"}, BOTH),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": " TRUE "}, TelemetryOptions()),
    ],
)  # fmt: skip
def test_the_usual_environment_is_understood(told, wished):
    assert read_options(told) == wished
    assert bool(read_options(told)) == (wished != TelemetryOptions())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {"tracecontext"}),
        ("tracecontext,baggage", {"tracecontext"}),
        ("xray", {"xray"}),
        ("tracecontext, xray-lambda", {"tracecontext", "xray"}),
        ("none", set()),
        ("b3", set()),
    ],
)
def test_propagators_are_understood(text, found):
    assert read_options({"OTEL_PROPAGATORS": text}).propagators == found


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "oncebridge.telemetry_exporter_unknown"),
        ({"OTEL_PROPAGATORS": "b3"}, "oncebridge.telemetry_propagator_unknown"),
    ],
)
def test_what_is_not_known_is_told(told, message, caplog):
    assert not read_options(told)
    assert [record.message for record in caplog.records] == [message]


def test_nothing_is_loaded_that_is_not_asked_for():
    code = """
import asyncio, sys
from oncebridge.service.config import load
from oncebridge.service.service import Service

async def work():
    flags = {"source": "-", "store": "memory:", "dead": "memory:", "sink": "python:builtins:repr"}
    service = Service(load(environment={}, flags=flags))
    await service.open()
    await service.run()
    assert await service.close()
    assert service.monitor.tracer is None

asyncio.run(work())
print(sorted(name for name in sys.modules if name.startswith(("opentelemetry", "prometheus", "requests"))))
"""
    assert run(code) == "[]\n"


def run(code, **env):
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(("OTEL_", "ONCEBRIDGE_"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        input="",
        env={**inherited, **env},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_the_packages_it_is_told_and_events_pass():
    code = """
import asyncio, logging, sys
sys.modules["opentelemetry"] = None
logging.basicConfig(stream=sys.stdout, format="%(message)s %(missing)s %(do)s")
from oncebridge.service.config import load
from oncebridge.service.service import Service

async def work():
    flags = {"source": "-", "store": "memory:", "dead": "memory:", "sink": "python:builtins:repr"}
    service = Service(load(environment={}, flags=flags))
    await service.open()
    await service.run()
    assert await service.close()

asyncio.run(work())
"""
    told = run(code, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    words = "oncebridge.telemetry_not_installed opentelemetry.sdk pip install 'oncebridge[otel]'\n"
    assert told == words


def test_a_setting_that_opentelemetry_refuses_is_told_and_no_reason_to_stop(environment, caplog):
    environment.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    assert from_environment({"OTEL_TRACES_EXPORTER": "console"}, list, "w") is None
    assert "oncebridge.telemetry_failed" in [record.message for record in caplog.records]


# --- a service, watched -------------------------------------------------------------------


def event(number, **more):
    envelope = {
        "id": f"e-{number}",
        "detail-type": "Order",
        "source": "shop",
        "time": "2026-01-01T00:00:00Z",
        "detail": {"order": number},
        **more,
    }
    return json.dumps(envelope).encode()


def post(port, body, **headers):
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        line.request("POST", "/events", body, headers)
        answer = line.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        line.close()


@asynccontextmanager
async def running(sink, **flags):
    flags = {
        "source": "http://127.0.0.1:0/events",
        "store": "memory:",
        "dead": "memory:",
        "sink": sink,
        "sink.allow_private": "true",
        "route": "crm",
        **flags,
    }
    service = Service(load(environment={}, flags=flags))
    await service.open()
    run = asyncio.create_task(service.run())

    async def send(body, **headers):
        return await asyncio.to_thread(post, service.sources[0].port, body, **headers)

    try:
        yield service, send
    finally:
        service.stop()
        await run
        assert await service.close()


class Target:
    """What events are sent to."""

    def __init__(self):
        self.heads, self.bodies = [], []

    def take(self, path, headers, body):
        self.heads.append(headers)
        self.bodies.append(body)


async def test_a_collector_gets_the_whole_way_of_an_event(environment):
    target = Target()
    with collecting() as collector, serving(target.take) as url:
        settings = {
            **QUICK,
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_EXPORTER_OTLP_HEADERS": "x-who=me",
            "OTEL_SERVICE_NAME": "calls",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test,service.version=mine",
        }
        for name, value in settings.items():
            environment.setenv(name, value)
        async with running(url) as (service, send):
            assert (await send(event(1), traceparent=CLIENT))[1]["verdict"] == "delivered"
            assert (await send(event(1), traceparent=CLIENT))[1]["verdict"] == "duplicate"
            name = service.monitor.name
            await asyncio.to_thread(
                collector.until, lambda: len(collector.named("oncebridge process")) == 2
            )
            await asyncio.to_thread(collector.until, lambda: len(collector.metrics) >= 2)
        first, second = sorted(
            collector.named("oncebridge process"), key=lambda span: span.start_time_unix_nano
        )
        (sent,) = collector.named("oncebridge deliver")
        _, trace, client, _ = CLIENT.split("-")
        for span in (first, second):
            assert span.trace_id.hex() == trace
            assert span.parent_span_id.hex() == client
        assert (sent.trace_id, sent.parent_span_id) == (first.trace_id, first.span_id)
        (head,) = target.heads
        assert head["traceparent"] == f"00-{trace}-{sent.span_id.hex()}-01"
        assert target.bodies == [event(1)]
        assert attributes(first)["oncebridge.verdict"] == "delivered"
        assert attributes(second)["oncebridge.verdict"] == "duplicate"
        told = attributes(collector.traces[0].resource_spans[0].resource)
        assert told["service.name"] == "calls"
        assert told["service.version"] == "mine"
        assert told["deployment.environment.name"] == "test"
        assert told["service.instance.id"] == name
        assert all(headers["x-who"] == "me" for headers in collector.headers)
        check_metrics(collector, service)


def check_metrics(collector, service):
    found = collector.latest()
    assert set(found) == {f"oncebridge.{one.name}" for one in families(service.monitor.report())}

    def points(name, **labels):
        metric = found[f"oncebridge.{name}"]
        data = getattr(metric, metric.WhichOneof("data"))
        return [point for point in data.data_points if labels.items() <= attributes(point).items()]

    (arrivals,) = points("arrivals", route="crm")
    assert arrivals.as_int == 2
    assert arrivals.start_time_unix_nano == service.monitor.started_ms * 1_000_000
    assert arrivals.time_unix_nano > arrivals.start_time_unix_nano
    (repeats,) = points("repeats", route="crm", cause="redelivery")
    assert repeats.as_int == 1
    (took,) = points("decision", route="crm")
    assert (took.count, sum(took.bucket_counts)) == (2, 2)
    assert len(took.bucket_counts) == len(took.explicit_bounds) + 1
    assert 0 < took.sum < 20
    assert not took.HasField("min")
    assert found["oncebridge.decision"].unit == "s"
    assert found["oncebridge.verdicts"].sum.is_monotonic
    assert found["oncebridge.verdicts"].sum.aggregation_temporality == 2  # cumulative
    (version,) = points("build_info")
    assert version.as_int == 1
    (up,) = points("sink_up", route="crm")
    assert up.as_int == 1


async def test_what_a_sampler_does_not_want_is_not_sent_but_passed_on(environment):
    target = Target()
    with collecting() as collector, serving(target.take) as url:
        environment.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
        environment.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        async with running(url) as (_, send):
            await send(event(1))
            await send(event(2), traceparent=CLIENT)
            await send(event(3), traceparent=CLIENT.removesuffix("01") + "00")
        assert len(collector.named("oncebridge process")) == 1
        assert not collector.metrics
        assert [head["traceparent"][-2:] for head in target.heads] == ["00", "01", "00"]
        assert [CLIENT[3:35] in head["traceparent"] for head in target.heads] == [False, True, True]


async def test_metrics_alone_trace_nothing(environment):
    target = Target()
    with collecting() as collector, serving(target.take) as url:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        environment.setenv("OTEL_TRACES_EXPORTER", "none")
        environment.setenv("OTEL_METRIC_EXPORT_INTERVAL", "nonsense")
        async with running(url) as (service, send):
            assert service.monitor.tracer is None
            assert service.monitor.context is None
            await send(event(1), traceparent=CLIENT)
        assert not collector.traces
        assert len(collector.metrics) == 1, "the last one, at the end"
        assert target.heads[0]["traceparent"] is None


async def test_propagators_none_send_nothing_along(environment):
    target = Target()
    with collecting() as collector, serving(target.take) as url:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        environment.setenv("OTEL_PROPAGATORS", "none")
        async with running(url) as (_, send):
            await send(event(1, traceparent=CLIENT), traceparent=CLIENT)
        (span,) = collector.named("oncebridge process")
        assert not span.parent_span_id
        assert span.trace_id.hex() not in CLIENT
        assert target.heads[0]["traceparent"] is None


async def test_the_console_is_standard_error(environment, capsys):
    environment.setenv("OTEL_TRACES_EXPORTER", "console")
    environment.setenv("OTEL_METRICS_EXPORTER", "console")
    target = Target()
    with serving(target.take) as url:
        async with running(url) as (_, send):
            await send(event(1))
    told = capsys.readouterr()
    assert told.out == ""
    assert '"name": "oncebridge deliver"' in told.err
    assert "oncebridge.arrivals" in told.err


# --- a collector that is not there --------------------------------------------------------


@pytest.fixture
def nobody():
    """Take connections, and never answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def closed():
    """Give an address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("which", ["nobody", "closed"])
async def test_without_a_collector_events_pass_and_a_stop_takes_its_time(
    environment, request, which
):
    url = request.getfixturevalue(which)
    for name, value in {**QUICK, "OTEL_EXPORTER_OTLP_ENDPOINT": url}.items():
        environment.setenv(name, value)
    target = Target()
    with serving(target.take) as sink:
        async with running(sink) as (service, send):
            for number in range(20):
                assert (await send(event(number)))[1]["verdict"] == "delivered"
            await asyncio.sleep(0.5)  # an export is under way
            began = time.monotonic()
        assert time.monotonic() - began < 10
    assert len(target.bodies) == 20
    assert service.counts()["delivered"] == 20


def test_the_process_ends_without_a_collector_and_tells_of_it_once(nobody, closed):
    script = """
import asyncio, logging, sys
out = logging.StreamHandler(sys.stdout)
out.setFormatter(logging.Formatter("%(message)s"))
logging.getLogger("oncebridge").addHandler(out)
logging.getLogger("oncebridge").propagate = False
import oncebridge
from oncebridge.observe.telemetry import from_environment
import os

async def work():
    telemetry = from_environment(os.environ, None, "w")
    arrival = oncebridge.Unreadable(b"x", "y", "z")
    outcome = oncebridge.Outcome(oncebridge.Verdict.DEAD, acknowledge=True)
    for _ in range(3):
        (trace,) = telemetry.tracer.arrived("crm", [arrival])
        trace.ended(outcome)
        await asyncio.sleep(0.3)
    await telemetry.aclose()

asyncio.run(work())
"""
    began = time.monotonic()
    with ThreadPoolExecutor() as pool:
        silent, refused = pool.map(
            lambda url: run(script, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=f"{url}/secret", **QUICK),
            [nobody, closed],
        )
    assert time.monotonic() - began < 30
    assert silent.splitlines() in ([], ["oncebridge.telemetry_trouble"])
    assert refused.splitlines() == ["oncebridge.telemetry_trouble"]


async def test_the_loop_looks_and_a_thread_writes_it_down(environment, monkeypatch):
    threads = {}

    def looked():
        threads["looked"] = threading.current_thread()
        return Report(State("w", "box", 1, "1.0", 5, 6), Counts())

    def written(*given):
        threads["written"] = threading.current_thread()
        return metrics_data(*given)

    monkeypatch.setattr("oncebridge.observe.telemetry.setup.metrics_data", written)
    with collecting() as collector:
        environment.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"{collector.url}/v1/metrics")
        telemetry = from_environment(os.environ, looked, "w")
        await telemetry.aclose()
        assert "oncebridge.arrivals" in collector.latest()
    assert threads["looked"] is threading.current_thread()
    assert threads["written"] is not threading.current_thread()


async def test_a_report_that_fails_stops_nothing(environment, caplog):
    with collecting() as collector:
        environment.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"{collector.url}/v1/metrics")

        def broken():
            raise RuntimeError("secret")

        telemetry = from_environment(os.environ, broken, "w")
        telemetry.open()
        with caplog.at_level(logging.WARNING):
            await telemetry.aclose()
        told = [(record.message, getattr(record, "error", "")) for record in caplog.records]
        assert told == [("oncebridge.telemetry_failed", "RuntimeError")]
        assert not collector.metrics


# Was a bug: asyncio.wait_for of Python 3.11 swallows a cancellation that comes as its task ends.
async def test_a_stop_at_the_very_moment_an_export_ends_is_not_lost(environment):
    environment.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
    loop = asyncio.get_running_loop()
    for turns in range(10):
        exporter = _Stopper(loop, turns)
        metrics = _Metrics(exporter, Resource.create(), lambda: _REPORT)
        metrics.open()
        exporter.keeper = keeper = metrics._keeper
        await asyncio.wait([keeper], timeout=10)
        assert keeper.cancelled(), f"it goes on, though it was cancelled {turns} turns later"


class _Stopper:
    """Cancels its keeper once, *turns* of the loop after an export."""

    def __init__(self, loop, turns):
        self._loop = loop
        self._left = turns
        self.keeper = None

    def export(self, data, timeout_millis):
        self._loop.call_soon_threadsafe(self._begin, threading.current_thread())

    def _begin(self, exporting):
        exporting.join()  # so that its end is the very next thing that the loop hears of
        self._turn()

    def _turn(self):
        self._left -= 1
        if self._left == -1:
            self.keeper.cancel()
        elif self._left >= 0:
            self._loop.call_soon(self._turn)
