"""A collector of our own: takes what OpenTelemetry sends by HTTP, and keeps it."""

import gzip
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    def __init__(self):
        self.url = ""
        self.traces, self.metrics, self.headers = [], [], []

    def take(self, path, headers, body):
        self.headers.append(headers)
        if headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if path == "/v1/traces":
            self.traces.append(ExportTraceServiceRequest.FromString(body))
        elif path == "/v1/metrics":
            self.metrics.append(ExportMetricsServiceRequest.FromString(body))

    @property
    def spans(self):
        return [
            span
            for request in list(self.traces)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def named(self, name):
        return [span for span in self.spans if span.name == name]

    def latest(self):
        """Give the metrics that came last, by their names."""
        return {
            metric.name: metric
            for resource in self.metrics[-1].resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def until(self, truth, within=20.0):
        ends = time.monotonic() + within
        while not truth():
            assert time.monotonic() < ends, "it did not come"
            time.sleep(0.02)


def attributes(holder):
    """Give attributes as a mapping."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in holder.attributes}


@contextmanager
def serving(take):
    """Answer 200 to every POST, after *take* has seen its path, headers and body."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            take(self.path, self.headers, body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def collecting():
    collector = Collector()
    with serving(collector.take) as collector.url:
        yield collector
