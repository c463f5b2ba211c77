"""The context of a trace: read from where events come, sent to where they go."""

import asyncio
import http.client
import json
import re
import subprocess
import sys
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, StatusCode
from tests.aws.aws_sinks import boto, delivery, opened, raw
from tests.aws.queues import TestQueue, Worker
from tests.observe.collector import serving
from tests.servers.aws import fresh
from tests.servers.meddler import meddling

from oncebridge import Gateway, Limits, SinkRejected, Yes, parse
from oncebridge.base.clock import SystemDice, system_clock
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.engine.router import RouteEntry, Router
from oncebridge.events.event import Event, Unreadable, read, set_context
from oncebridge.events.trace_context import BytesWithContext, read_traceparent, read_xray, xray_of
from oncebridge.observe import telemetry
from oncebridge.observe.telemetry import TelemetryOptions
from oncebridge.observe.telemetry.spans import Spans
from oncebridge.sinks.api import Already, Lost
from oncebridge.sinks.events import EventsSink, EventsSinkOptions
from oncebridge.sinks.http import HttpSink, HttpSinkOptions
from oncebridge.sinks.kinesis import _encode, _Record
from oncebridge.sinks.sns import SnsSink, SnsSinkOptions
from oncebridge.sinks.sqs import SqsSink, SqsSinkOptions
from oncebridge.sources.api import Host
from oncebridge.sources.http.source import HttpSource
from oncebridge.sources.pump import PumpInbox
from oncebridge.sources.spool import Spool
from oncebridge.stores.memory import MemoryStore

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
XRAY = f"Root=1-{TRACE[:8]}-{TRACE[8:]};Parent={SPAN};Sampled=1"


# --- what is a context --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (PARENT, PARENT),
        (f"00-{TRACE}-{SPAN}-00", f"00-{TRACE}-{SPAN}-00"),
        (f"00-{TRACE}-{SPAN}-03", PARENT),
        (f"00-{TRACE}-{SPAN}-fe", f"00-{TRACE}-{SPAN}-00"),
        (f"01-{TRACE}-{SPAN}-01-more", PARENT),
        (f"cc-{TRACE}-{SPAN}-01", PARENT),
    ],
)
def test_a_traceparent_is_read(text, found):
    assert read_traceparent(text) == found


@pytest.mark.parametrize(
    "text",
    [
        *("", "-", "00", None, 7, [PARENT], PARENT.encode(), {"a": 1}),
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}0-{SPAN}-01",
        f"00-{TRACE}-{SPAN}0-01",
        f"00-{TRACE}-{SPAN}-1",
        PARENT.upper(),
        f" {PARENT}",
        f"{PARENT} ",
        f"{PARENT}\n",
        f"{PARENT}\r\nX-Injected: 1",
        f"01-{TRACE}-{SPAN}-01-\r\nX-Injected: 1",
        f"01-{TRACE}-{SPAN}-01-{'x' * 500}",
        PARENT.replace("4", "٤"),
    ],
)
def test_what_is_no_traceparent_is_ignored(text):
    assert read_traceparent(text) == ""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (XRAY, PARENT),
        (f"Sampled=0;Parent={SPAN};Root=1-{TRACE[:8]}-{TRACE[8:]}", f"00-{TRACE}-{SPAN}-00"),
        (f"{XRAY.removesuffix(';Sampled=1')}", f"00-{TRACE}-{SPAN}-00"),
        (f"Self=1-x; {XRAY}; Lineage=a:1", PARENT),
    ],
)
def test_the_header_of_xray_is_read(text, found):
    assert read_xray(text) == found


@pytest.mark.parametrize(
    "text",
    [
        *("", None, 7, "Root", ";;;", PARENT),
        f"Root=1-{TRACE[:8]}-{TRACE[8:]}",
        f"Root=1-{TRACE[:8]}-{TRACE[8:]};Parent=;Sampled=1",
        f"Root=2-{TRACE[:8]}-{TRACE[8:]};Parent={SPAN}",
        f"Root=1-{'0' * 8}-{'0' * 24};Parent={SPAN};Sampled=1",
        f"Root=1-{TRACE[:8]}-{TRACE[8:]};Parent={'0' * 16};Sampled=1",
        f"{XRAY};X={'x' * 500}",
        XRAY.replace("Parent=", "Parent=\r\n"),
    ],
)
def test_what_is_no_header_of_xray_is_ignored(text):
    assert read_xray(text) == ""


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_a_context_survives_both_forms(trace, span, is_sampled):
    text = f"00-{trace:032x}-{span:016x}-{'01' if is_sampled else '00'}"
    assert read_traceparent(text) == text
    assert read_xray(xray_of(text)) == text


@given(st.one_of(st.text(), st.none(), st.integers()))
def test_nothing_raises(text):
    assert read_traceparent(text) == ""
    assert read_xray(text) == ""
    assert xray_of(str(text)) == ""


# --- beside an event ----------------------------------------------------------------------


def test_what_is_read_has_the_very_bytes_and_the_context():
    text = raw(1)
    event = read(BytesWithContext.of(text, PARENT))
    assert isinstance(event, Event)
    assert event.raw is text
    assert event.context == PARENT
    assert read(text).context == ""


def test_so_has_what_cannot_be_read():
    text = b"no event"
    found = read(BytesWithContext.of(text, PARENT))
    assert isinstance(found, Unreadable)
    assert found.raw is text
    assert found.context == PARENT
    assert read(BytesWithContext.of(raw(1), PARENT), limits=Limits(max_bytes=2)).context == PARENT


def test_a_context_changes_nothing_else():
    text = raw(1, {"n": 1, "traceparent": PARENT})
    one, other = read(text), read(BytesWithContext.of(text, PARENT))
    assert one.canonical == other.canonical
    assert one.envelope == other.envelope
    # What is sent on has to be plain bytes: msgspec takes no others.
    assert _encode(_Record(other.raw, "key")) == _encode(_Record(text, "key"))
    assert msgspec.msgpack.encode(other.raw) == msgspec.msgpack.encode(text)


# --- spans --------------------------------------------------------------------------------


class Traced:
    """A gateway whose spans are kept."""

    def __init__(self, sink=lambda event: None, *, sampler=None, **options):
        self.kept = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.kept))
        self.otel = provider.get_tracer("test")
        self.sent = []
        self.store = MemoryStore()
        self.gateway = Gateway(
            store=self.store,
            sink=_Noting(sink, self.sent),
            dead=MemoryDeadLetters(),
            route="crm",
            tracer=Spans(self.otel, **options),
        )

    def spans(self, name):
        return [span for span in self.kept.get_finished_spans() if span.name == name]


class _Noting:
    """A sink that notes the traces it is given."""

    batch, concurrency = 10, 10

    def __init__(self, take, sent):
        self._take, self._sent = take, sent

    async def open(self):
        pass

    async def aclose(self):
        pass

    async def deliver(self, deliveries):
        for one in deliveries:
            self._sent.append(one.trace)
            self._take(one.event)
        return [Yes()] * len(deliveries)


def test_an_arrival_is_a_span_and_its_delivery_another():
    async def work():
        traced = Traced()
        text = raw(1)
        for _ in range(2):
            await traced.gateway.process([BytesWithContext.of(text, PARENT)])
        return traced, text

    traced, text = asyncio.run(work())
    first, second = traced.spans("oncebridge process")
    (sent,) = traced.spans("oncebridge deliver")
    for span in (first, second):
        assert span.kind is SpanKind.CONSUMER
        assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
        assert span.parent.is_remote
    assert first.attributes["oncebridge.verdict"] == "delivered"
    assert second.attributes["oncebridge.verdict"] == "duplicate"
    assert second.status.status_code is StatusCode.UNSET
    assert first.attributes == {
        "messaging.system": "eventbridge",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.message.id": "6f1c2c1e-0000-4000-8000-000000000001",
        "messaging.message.body.size": len(text),
        "oncebridge.route": "crm",
        "oncebridge.rule": "default",
        "oncebridge.verdict": "delivered",
        "oncebridge.key": first.attributes["oncebridge.key"],
    }
    assert len(first.attributes["oncebridge.key"]) == 16
    assert sent.kind is SpanKind.PRODUCER
    assert sent.parent.span_id == first.context.span_id
    assert traced.sent == [f"00-{TRACE}-{sent.context.span_id:016x}-01"]
    assert first.start_time <= sent.start_time <= sent.end_time <= first.end_time


@pytest.mark.parametrize(
    "text",
    [raw(1, traceparent=PARENT), raw(1, {"n": 1, "traceparent": PARENT})],
    ids=["top", "detail"],
)
async def test_a_context_in_the_event_counts(text):
    traced = Traced()
    await traced.gateway.process([text])
    (span,) = traced.spans("oncebridge process")
    assert f"{span.context.trace_id:032x}" == TRACE


async def test_what_came_beside_the_event_counts_more():
    traced = Traced()
    inside = raw(1, traceparent=f"00-{'1' * 32}-{SPAN}-01")
    await traced.gateway.process([BytesWithContext.of(inside, PARENT)])
    (span,) = traced.spans("oncebridge process")
    assert f"{span.context.trace_id:032x}" == TRACE


@pytest.mark.parametrize(
    "text",
    [
        raw(1),
        raw(1, traceparent="00-nonsense"),
        raw(1, traceparent={"a": 1}),
        raw(1, {"traceparent": [PARENT]}),
        raw(1, {"traceparent": f"00-{'0' * 32}-{SPAN}-01"}),
        raw(1, {"why": f"traceparent {PARENT}"}),
        f"no event, traceparent {PARENT}".encode(),
    ],
)
async def test_what_has_no_context_begins_a_trace(text):
    traced = Traced()
    await traced.gateway.process([text])
    (span,) = traced.spans("oncebridge process")
    assert span.parent is None
    assert f"{span.context.trace_id:032x}" != TRACE


async def test_it_belongs_to_the_span_that_is_the_current_one():
    traced = Traced()
    with traced.otel.start_as_current_span("the caller's") as callers:
        await traced.gateway.process([raw(1)])
    (span,) = traced.spans("oncebridge process")
    assert span.parent.span_id == callers.get_span_context().span_id


async def test_what_is_switched_off_is_neither_read_nor_sent():
    traced = Traced(reads=False, sends=False)
    await traced.gateway.process([raw(1, traceparent=PARENT)])
    assert traced.sent == [""]
    (span,) = traced.spans("oncebridge process")
    assert span.parent is None
    assert len(traced.spans("oncebridge deliver")) == 1
    traced = Traced(sampler=ALWAYS_OFF, reads=False, sends=False)
    await traced.gateway.process([raw(1)])
    assert traced.sent == [""]


async def test_what_is_not_sampled_makes_no_span_and_says_so():
    traced = Traced(sampler=ParentBased(ALWAYS_OFF))
    unsampled = f"00-{TRACE}-{SPAN}-00"
    await traced.gateway.process(
        [BytesWithContext.of(raw(1), unsampled), raw(2), BytesWithContext.of(raw(3), PARENT)]
    )
    one, two, three = sorted(traced.sent, key=lambda text: (text.endswith("01"), TRACE not in text))
    assert one.startswith(f"00-{TRACE}-")
    assert one.endswith("-00")
    assert read_traceparent(two) == two
    assert two.endswith("-00")
    assert three.startswith(f"00-{TRACE}-")
    assert len(traced.kept.get_finished_spans()) == 2


async def test_a_failure_is_told():
    def refuse(event):
        raise SinkRejected("secret words")

    traced = Traced(refuse)
    await traced.gateway.process([raw(1), b"no event"])
    for span in traced.spans("oncebridge process"):
        assert span.attributes["oncebridge.verdict"] == "dead"
        assert span.status.status_code is StatusCode.ERROR
        assert span.attributes["oncebridge.reason"] == span.status.description
    (sent,) = traced.spans("oncebridge deliver")
    assert sent.status.status_code is StatusCode.ERROR
    told = [span.to_json() for span in traced.kept.get_finished_spans()]
    assert not [text for text in told if "secret words" in text]


class _Joint(_Noting):
    """A sink in the store's own database, where somebody else was first."""

    def joins(self, store):
        return True

    async def deliver_jointly(self, joints):
        return [self._take(joint) for joint in joints]


@pytest.mark.parametrize(("answer", "verdict"), [(Already(), "duplicate"), (Lost(), "busy")])
async def test_that_somebody_else_was_first_is_no_error(answer, verdict):
    traced = Traced()
    gateway = Gateway(
        store=traced.store,
        sink=_Joint(lambda _: answer, []),
        dead=MemoryDeadLetters(),
        tracer=Spans(traced.otel),
    )
    (outcome,) = await gateway.process([raw(1)])
    assert (outcome.verdict.value, outcome.forwarded) == (verdict, False)
    (sent,) = traced.spans("oncebridge deliver")
    (span,) = traced.spans("oncebridge process")
    assert sent.status.status_code is StatusCode.UNSET
    assert span.status.status_code is StatusCode.UNSET


async def test_every_route_has_spans_of_its_own():
    kept = [Traced(), Traced()]
    kept[1].gateway.route = "audit"
    router = Router([RouteEntry(traced.gateway) for traced in kept])
    await router.process([BytesWithContext.of(raw(1), PARENT)])
    for traced, route in zip(kept, ("crm", "audit"), strict=True):
        (span,) = traced.spans("oncebridge process")
        assert span.attributes["oncebridge.route"] == route
        assert f"{span.context.trace_id:032x}" == TRACE


# --- from HTTP ----------------------------------------------------------------------------


class Seen:
    """A tracer that notes what it is told."""

    def __init__(self):
        self.contexts = []

    def arrived(self, route, events):
        self.contexts += [event.context for event in events]
        return [None] * len(events)


def reads(propagators):
    from oncebridge.observe.telemetry.setup import Exports

    exports = Exports.__new__(Exports)
    exports._reads = TelemetryOptions(propagators=frozenset(propagators)).propagators
    return exports.context


@asynccontextmanager
async def listening(context, inbox=None):
    seen = Seen()
    gateway = Gateway(
        store=MemoryStore(), sink=lambda event: None, dead=MemoryDeadLetters(), tracer=seen
    )
    router = Router([RouteEntry(gateway)], dead=MemoryDeadLetters())
    source = HttpSource.from_url("http://127.0.0.1:0/events")
    direct = PumpInbox(router)
    host = Host(
        router, inbox or direct, MemoryStore(), 100, system_clock, SystemDice(), context=context
    )
    await source.open(host)

    def ask(body, headers):
        line = http.client.HTTPConnection("127.0.0.1", source.port, timeout=20)
        try:
            line.putrequest("POST", "/events")
            for name, value in [("Content-Length", str(len(body))), *headers]:
                line.putheader(name, value)
            line.endheaders(body)
            return line.getresponse().status
        finally:
            line.close()

    async def post(body, *headers):
        assert await asyncio.to_thread(ask, body, headers) in (200, 202)
        return seen.contexts[-len(body.splitlines()) :]

    try:
        yield host, post
    finally:
        await source.aclose()
        await direct.aclose(5)
        await gateway.aclose()


async def test_a_request_brings_the_context_of_all_its_events():
    async with listening(reads(["tracecontext"])) as (_, post):
        assert await post(raw(1), ("traceparent", PARENT)) == [PARENT]
        assert await post(raw(2), ("TraceParent", f"  {PARENT}  ")) == [PARENT]
        lines = b"\n".join([raw(3), raw(4)])
        kind = ("Content-Type", "application/x-ndjson")
        assert await post(lines, kind, ("traceparent", PARENT)) == [PARENT, PARENT]


async def test_a_request_may_bring_none_or_a_bad_one():
    async with listening(reads(["tracecontext"])) as (_, post):
        assert await post(raw(1)) == [""]
        assert await post(raw(2), ("traceparent", f"00-{'0' * 32}-{SPAN}-01")) == [""]
        assert await post(raw(3), ("traceparent", PARENT), ("traceparent", PARENT)) == [""]
        assert await post(raw(4), ("X-Amzn-Trace-Id", XRAY)) == [""]


async def test_the_header_of_xray_counts_where_it_is_asked_for():
    async with listening(reads(["tracecontext", "xray"])) as (_, post):
        assert await post(raw(1), ("X-Amzn-Trace-Id", XRAY)) == [PARENT]
        assert await post(raw(2), ("X-Amzn-Trace-Id", f"Root=1-{TRACE[:8]}-{TRACE[8:]}")) == [""]
        other = f"00-{'1' * 32}-{SPAN}-01"
        both = (("X-Amzn-Trace-Id", XRAY), ("traceparent", other))
        assert await post(raw(3), *both) == [other]
    async with listening(reads([])) as (_, post):
        assert await post(raw(4), *both) == [""]


async def test_without_traces_nobody_looks():
    async with listening(None) as (_, post):
        assert await post(raw(1), ("traceparent", PARENT)) == [""]


async def test_a_spool_keeps_the_bytes_as_they_came(tmp_path):
    spool = Spool(tmp_path / "spool.db")
    async with listening(reads(["tracecontext"]), spool) as (host, post):
        await spool.open(host)
        await post(raw(1), ("traceparent", PARENT))
        rows = await spool.file.run(
            lambda db: db.execute("SELECT typeof(raw), raw FROM oncebridge_spool").fetchall()
        )
        await spool.aclose()
    assert rows == [("blob", raw(1))]


# --- from SQS -----------------------------------------------------------------------------


async def until(truth):
    async with asyncio.timeout(30):
        while not truth():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)


async def contexts_from(queue, endpoint, propagators, *, count):
    seen = Seen()
    worker = Worker(queue.address, endpoint)
    worker.gateway._tracer = seen
    worker.host = msgspec.structs.replace(worker.host, context=reads(propagators))
    await worker.start()
    try:
        await until(lambda: len(seen.contexts) >= count)
    finally:
        await worker.aclose()
    return seen.contexts


def send(queue, number, *, attributes=None, xray=None, wrapped=False):
    body = raw(number).decode()
    if wrapped:
        told = {"Type": "Notification", "MessageId": "m", "TopicArn": "arn:t", "Message": body}
        body = json.dumps(told)
    system = {"AWSTraceHeader": {"DataType": "String", "StringValue": xray}} if xray else {}
    queue.sqs.send_message(
        QueueUrl=queue.url,
        MessageBody=body,
        MessageAttributes=attributes or {},
        MessageSystemAttributes=system,
    )


@pytest.mark.usefixtures("aws_identity")
async def test_a_message_brings_a_context(ministack):
    queue = TestQueue(ministack.endpoint)
    text = {"traceparent": {"DataType": "String", "StringValue": PARENT}}
    send(queue, 1, attributes=text)
    send(queue, 2, attributes=text, wrapped=True)
    found = await contexts_from(queue, ministack.endpoint, ["tracecontext"], count=2)
    assert found == [PARENT, PARENT]
    send(queue, 3)
    send(queue, 4, attributes={"traceparent": {"DataType": "Binary", "BinaryValue": b"x"}})
    found = await contexts_from(queue, ministack.endpoint, ["tracecontext"], count=2)
    assert found == ["", ""]


@pytest.mark.usefixtures("aws_identity")
async def test_a_message_brings_the_header_of_xray(ministack):
    queue = TestQueue(ministack.endpoint)
    send(queue, 1, xray=XRAY)
    found = await contexts_from(queue, ministack.endpoint, ["xray"], count=1)
    assert found == [PARENT]


@pytest.mark.usefixtures("aws_identity")
@pytest.mark.full
async def test_nothing_more_is_asked_of_a_queue_without_traces(ministack):
    async with meddling(ministack) as between:
        queue = TestQueue(ministack.endpoint)
        queue.send(raw(1))
        worker = Worker(queue.address, between.endpoint)
        await worker.start()
        try:
            await until(lambda: worker.counts.get("delivered"))
        finally:
            await worker.aclose()
        asked = [call for operation, call in between.calls if operation == "ReceiveMessage"]
        assert asked
        for call in asked:
            assert not {"MessageAttributeNames", "MessageSystemAttributeNames"} & call.keys()


# --- to the sinks -------------------------------------------------------------------------


async def headers_of(*deliveries, **options):
    heads = []
    with serving(lambda path, headers, body: heads.append((headers, body))) as url:
        sink = HttpSink(url, HttpSinkOptions(allow_private=True, **options))
        async with opened(sink):
            assert await sink.deliver(deliveries) == [Yes()] * len(deliveries)
    return heads


async def test_an_http_target_is_told():
    text = raw(1)
    ((traced, body), (plain, _)) = await headers_of(delivery(text, trace=PARENT), delivery(raw(2)))
    assert traced.get_all("traceparent") == [PARENT]
    assert body == text
    assert plain["traceparent"] is None


async def test_a_header_of_the_users_own_stays():
    from oncebridge.base.secrets import Secret

    headers = {"Traceparent": Secret("mine")}
    ((told, _),) = await headers_of(delivery(trace=PARENT), headers=headers)
    assert told.get_all("traceparent") == ["mine"]


@pytest.mark.usefixtures("aws_identity")
async def test_a_queue_is_told(ministack):
    queue = TestQueue(ministack.endpoint)
    options = SqsSinkOptions(endpoint=ministack.endpoint)
    async with opened(SqsSink.from_url(queue.address, options)) as sink:
        assert await sink.deliver([delivery(raw(1), trace=PARENT)]) == [Yes()]
        assert await sink.deliver([delivery(raw(2))]) == [Yes()]
    traced, plain = sorted(queue.receive(), key=lambda message: message["Body"])
    assert traced["MessageAttributes"]["traceparent"]["StringValue"] == PARENT
    assert traced["Body"].encode() == raw(1)
    assert "traceparent" not in plain["MessageAttributes"]


def filled(size_of, most, trace):
    """Make a delivery that has room for everything but its trace."""
    left = most - size_of(delivery(raw(1, {"fill": ""}), trace=""))
    return delivery(raw(1, {"fill": "x" * left}), trace=trace)


@pytest.mark.usefixtures("aws_identity")
async def test_a_message_without_room_goes_without_its_trace(ministack):
    queue = TestQueue(ministack.endpoint, MaximumMessageSize=4096)
    options = SqsSinkOptions(endpoint=ministack.endpoint)
    async with opened(SqsSink.from_url(queue.address, options)) as sink:
        full = filled(lambda one: sink._entry("0", one).size, 4096, PARENT)
        assert await sink.deliver([full]) == [Yes()]
    (message,) = queue.receive()
    assert message["Body"].encode() == full.event.raw
    assert set(message["MessageAttributes"]) == {"Idempotency-Key", "oncebridge-route"}


@pytest.mark.usefixtures("aws_identity")
async def test_a_topic_is_told_unless_there_is_no_room(ministack):
    topic, queue = boto("sns", ministack), TestQueue(ministack.endpoint)
    arn = topic.create_topic(Name=fresh("topic"))["TopicArn"]
    topic.subscribe(
        TopicArn=arn,
        Protocol="sqs",
        Endpoint=queue.arn,
        Attributes={"RawMessageDelivery": "true"},
    )
    async with opened(SnsSink(f"sns:{arn}", SnsSinkOptions(endpoint=ministack.endpoint))) as sink:
        full = filled(lambda one: sink._message(one).size, 256 << 10, PARENT)
        assert sink._message(full).size == 256 << 10
        assert await sink.deliver([delivery(raw(1), trace=PARENT)]) == [Yes()]
        assert await sink.deliver([full]) == [Yes()]
    small, large = sorted(queue.receive(), key=lambda message: len(message["Body"]))
    assert small["MessageAttributes"]["traceparent"]["StringValue"] == PARENT
    assert "traceparent" not in large["MessageAttributes"]
    assert large["Body"].encode() == full.event.raw


@pytest.mark.usefixtures("aws_identity")
async def test_a_bus_is_told_in_its_own_form(ministack):
    name = fresh("bus")
    boto("events", ministack).create_event_bus(Name=name)
    async with meddling(ministack) as between:
        options = EventsSinkOptions(endpoint=between.endpoint)
        async with opened(EventsSink(f"events://{name}", options)) as sink:
            plain, traced = delivery(raw(1)), delivery(raw(2), trace=PARENT)
            assert await sink.deliver([plain, traced]) == [Yes(), Yes()]
        (asked,) = [call for operation, call in between.calls if operation == "PutEvents"]
    plain, traced = asked["Entries"]
    assert "TraceHeader" not in plain
    assert traced["TraceHeader"] == XRAY
    assert plain.keys() <= traced.keys()


# --- for those who use the library --------------------------------------------------------


async def test_a_gateway_from_a_file_takes_hooks_and_a_tracer(tmp_path):
    file = tmp_path / "oncebridge.toml"
    file.write_text('store = "memory:"\ndead = "memory:"\nroute = "crm"\n')
    decided, trips, seen = [], [], Seen()
    gateway = Gateway.from_config(
        file,
        sink=lambda event: None,
        hooks=[decided.extend],
        trip_hooks=[trips.append],
        tracer=seen,
    )
    async with gateway:
        event = parse(raw(1))
        set_context(event, PARENT)
        await gateway.process([event], within=timedelta(seconds=20))
    assert [decision.outcome.verdict for decision in decided] == ["delivered"]
    assert {(trip.place, trip.call) for trip in trips} >= {("store", "claim"), ("sink", "deliver")}
    assert seen.contexts == [PARENT]


def test_the_example_of_the_page_about_hooks_does_what_it_says():
    page = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text(encoding="utf-8")
    (code,), (shown,) = (
        re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "text")
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == shown


def test_the_page_about_traces_names_what_there_is():
    page = (Path(__file__).parents[2] / "docs" / "tracing.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "tracer=Spans()" in code
    assert Spans()
    source = Path(telemetry.__file__).parent
    logged = "".join(file.read_text(encoding="utf-8") for file in source.glob("*.py"))
    for name in re.findall(r"`(oncebridge\.telemetry_\w+)`", page):
        assert f'"{name}"' in logged
