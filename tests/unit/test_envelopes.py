import base64
import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fuzz.for_a_while import for_a_while
from tests.fuzz.strategies import PIECES, envelopes, mutated, plain, spelt, values

from oncebridge import Event, Gateway, Limits, Settings, Unreadable
from oncebridge.engine.router import RouteEntry, Router
from oncebridge.events.envelopes import unwrap
from oncebridge.events.event import REASONS, read
from oncebridge.events.rules import RuleSet
from oncebridge.stores.memory import MemoryStore

TRANSPORTS = Path(__file__).parents[1] / "events" / "transports"
EVENT = plain({"id": "e1", "detail-type": "Order", "source": "shop", "detail": {"n": 1}})
OTHER = plain({"id": "e2", "detail-type": "Order", "source": "shop", "detail": {"n": 2}})
DETAIL = plain({"topicName": "v2.users.1.presence", "eventBody": {"a": 1}})


def reading(raw, *, bare=None):
    return read(raw, bare=bool(bare))


def reading_bare(raw, *, bare=None):
    return read(raw, bare=True)


def raws(raw, read=reading):
    found = unwrap(raw, read)
    assert all(isinstance(one, Event) for one in found), found
    return [one.raw for one in found]


def refused(raw, read=reading):
    (found,) = unwrap(raw, read)
    assert isinstance(found, Unreadable)
    assert found.reason in REASONS
    return found


# --- each wrapping --------------------------------------------------------------------------


def text(raw):
    return raw.decode()


def sns(raw):
    return plain(
        {"Type": "Notification", "MessageId": "m", "TopicArn": "arn", "Message": text(raw)}
    )


def sns_record(raw):
    return b'{"EventSource":"aws:sns","EventVersion":"1.0","Sns":%s}' % sns(raw)


def sqs_record(raw):
    record = {"messageId": "m1", "receiptHandle": "r", "body": text(raw), "eventSource": "aws:sqs"}
    return plain(record)


def received(raw):
    return plain({"MessageId": "m1", "ReceiptHandle": "r", "Body": text(raw)})


def kinesis_record(raw):
    data = base64.b64encode(raw).decode()
    record = {"sequenceNumber": "1", "data": data}
    return plain({"eventID": "s:1", "eventSource": "aws:kinesis", "kinesis": record})


def pipes_kinesis(raw):
    data = base64.b64encode(raw).decode()
    record = {"sequenceNumber": "1", "partitionKey": "p", "data": data}
    return plain({"eventID": "s:1", "eventSource": "aws:kinesis", **record})


def shard_record(raw):
    data = base64.b64encode(raw).decode()
    return plain({"kinesisSchemaVersion": "1.0", "partitionKey": "p", "data": data})


def got_records(raw):
    data = base64.b64encode(raw).decode()
    return plain({"SequenceNumber": "1", "PartitionKey": "p", "Data": data})


def destination(raw):
    return b'{"version": "1.0", "requestContext": {"a": ":"}, "requestPayload": %s , "x": 1}' % raw


def looked_up(raw):
    return plain({"MessageId": "m1", "MD5OfBody": "5d", "Body": text(raw)})


def failed_shard(raw):
    return plain({"KinesisBatchInfo": {"shardId": "s"}, "payload": text(raw)})


def on_bus(raw):
    return b'{"Data":%s, "Metadata": {}, "SystemMetadata":{"aws:EventId":"b"}}' % raw


def on_bus_as_text(raw):
    return plain({"Data": text(raw), "SystemMetadata": {"ContentType": "text/plain"}})


def in_list(raw):
    return b"[ %s ]" % raw


def in_records(raw):
    return b'{"Records":\n[%s]}' % raw


def in_messages(raw):
    return b'{"Messages":[%s],"ResponseMetadata":{}}' % raw


def in_records_of_sqs(raw):
    return in_records(sqs_record(raw))


def in_messages_of_the_api(raw):
    return in_messages(received(raw))


RECORDS = [
    *(sns, sns_record, sqs_record, received, looked_up, on_bus, on_bus_as_text),
    *(kinesis_record, pipes_kinesis, shard_record, got_records),
]
WRAPPINGS = [
    *(*RECORDS, destination, failed_shard, in_list),
    *(in_records_of_sqs, in_messages_of_the_api),
]


@pytest.mark.parametrize("wrap", WRAPPINGS)
def test_each_wrapping_gives_the_bytes_that_were_put_in(wrap):
    odd = b'{"detail" : {"n": 1.0, "t":"\\u00e9 \xc3\xa9 \\/"} ,"source":"shop" , "id":"e1"}'
    assert raws(wrap(EVENT)) == [EVENT]
    assert raws(wrap(odd)) == [odd]


@pytest.mark.parametrize("batch", [in_records, in_messages])
@pytest.mark.parametrize("read", [reading, reading_bare])
@pytest.mark.parametrize(
    ("element", "holds"),
    [
        *[(record(EVENT), EVENT) for record in RECORDS],
        *((EVENT, EVENT), (DETAIL, DETAIL)),
    ],
)
def test_a_batch_is_one_where_a_record_or_an_event_is_in_it(batch, read, element, holds):
    assert raws(batch(element), read) == [holds]
    first, *others = unwrap(batch(b'{"order":1},%s,7' % element), read)
    assert first.raw == b'{"order":1}'
    assert [other.raw for other in others] == [holds, b"7"]


@pytest.mark.parametrize("wrap", WRAPPINGS)
def test_where_bare_details_are_taken_a_wrapping_is_still_a_wrapping(wrap):
    assert raws(wrap(EVENT), reading_bare) == [EVENT]
    bare = b'{"order":1}'
    (found,) = unwrap(wrap(bare), reading_bare)
    assert (found.raw, found.bare) == (bare, True)


@pytest.mark.parametrize("wrap", WRAPPINGS)
def test_a_genesys_detail_is_taken_without_an_envelope_whatever_is_set(wrap):
    (found,) = unwrap(wrap(DETAIL), reading)
    assert (found.raw, found.bare) == (DETAIL, True)
    assert found.detail["topicName"] == "v2.users.1.presence"


@pytest.mark.parametrize("wrap", WRAPPINGS)
def test_what_is_no_event_inside_is_told_as_such(wrap):
    assert refused(wrap(b'{"order":1}')).reason == "no-detail"


def test_any_other_detail_without_an_envelope_is_what_the_reader_says():
    assert refused(b'{"order":1}').reason == "no-detail"
    assert raws(b'{"order":1}', reading_bare) == [b'{"order":1}']


def test_a_plain_event_is_read_once_and_never_looked_into():
    calls = []

    def counting(raw, *, bare=None):
        calls.append(raw)
        return reading(raw, bare=bare)

    # What would be a wrapping, if it were not an event.
    event = b'{"detail":{"a":1},"Records":[%s],"requestPayload":%s}' % (OTHER, OTHER)
    assert raws(event, counting) == [event]
    assert calls == [event]


def test_several_in_one_are_given_in_order():
    batch = b"[%s,%s]" % (EVENT, OTHER)
    assert raws(batch) == [EVENT, OTHER]
    assert raws(sns(batch)) == [EVENT, OTHER]
    assert raws(destination(batch)) == [EVENT, OTHER]
    records = b'{"Records":[%s,%s,%s]}' % (EVENT, sqs_record(sns(EVENT)), kinesis_record(OTHER))
    assert raws(records) == [EVENT, EVENT, OTHER]


def test_one_that_is_none_spoils_no_other():
    first, second, third = unwrap(b'[%s,{"order":1},%s]' % (EVENT, OTHER), reading)
    assert (first.raw, third.raw) == (EVENT, OTHER)
    assert isinstance(second, Unreadable)
    assert second.raw == b'{"order":1}'


@pytest.mark.parametrize(
    "raw",
    [
        *(b"[]", b"[1,2]", b'["a"]', b"", b" ", b"null", b"7", b'"a"', b"{", b"\xff"),
        *(b'{"Records":[]}', b'{"Records":7}', b'{"Messages":[]}', b'{"requestPayload":null}'),
        *(b'{"Sns":7}', b'{"kinesis":[]}', b'{"Type":"Notification"}', b'{"messageId":"m"}'),
        *(b'{"Type":"Notification","Message":7}', b'{"Type":7,"Message":"a"}', b'{"Data":1}'),
        *(b'{"Type":"SubscriptionConfirmation","Message":"a"}', b'{"body":"{}","messageId":"m"}'),
        b'{"Data":7,"SystemMetadata":{}}',
        *(b'{"Data":{},"SystemMetadata":7}', b'{"sequenceNumber":"1","data":"%%%"}'),
        *(b'{"eventSource":"aws:kinesis","kinesis":{"sequenceNumber":"1","data":"%%%"}}',),
        *(b'{"eventSource":"aws:sqs","body":7}', b'{"EventSource":"aws:sns","Sns":7}'),
        *(b'{"eventSource":7,"messageId":"m","receiptHandle":"r","body":"{}"}',),
    ],
)
def test_what_is_nearly_a_wrapping_is_what_the_reader_says(raw):
    found = refused(raw)
    expected = reading(raw)
    assert (found.raw, found.reason, found.message) == (raw, expected.reason, expected.message)


LOOK_LIKE_A_WRAPPING = [
    {"conversationId": "c1", "Messages": [{"text": "hi"}, {"text": "ho"}]},
    {"conversationId": "c1", "Messages": [{"text": "hi", "detail": {"lang": "en"}}]},
    {"conversationId": "c1", "Messages": [{"MessageId": "m", "Body": "hi", "From": "a"}]},
    {"order": 7, "Records": [{"sku": 1}]},
    {"order": 7, "Records": [{"Records": [{"sku": 1}]}]},
    {"order": 7, "Records": {"sku": 1}},
    {"MessageId": "m", "Body": "hello", "From": "+15555550100"},
    {"messageId": "m", "body": "hello", "attributes": {}},
    {"messageId": "m", "body": "{}", "eventSource": "shop"},
    {"messageId": "m", "receiptHandle": "r", "body": "{}", "eventSource": "shop"},
    {"Type": "Notification", "Message": "hello"},
    {"Type": "Alert", "Message": "hello", "MessageId": "m", "TopicArn": "a"},
    {"Sns": {"Type": "Notification", "Message": "{}", "MessageId": "m"}},
    {"kinesis": {"data": "e30=", "sequenceNumber": "1"}, "order": 7},
    {"data": "e30=", "sequenceNumber": "1", "order": 7},
    {"data": "e30=", "sequenceNumber": 1},
    {"data": "hello", "partitionKey": "p"},
    {"data": "e30=", "partitionKey": "p", "eventSource": "shop"},
    {"Data": "e30=", "PartitionKey": "p", "Metadata": {}},
    {"Data": {"order": 7}, "Metadata": {}},
    {"requestPayload": {"order": 7}, "status": "failed"},
]


@pytest.mark.parametrize("given", LOOK_LIKE_A_WRAPPING, ids=plain)
def test_what_only_looks_like_a_wrapping_stays_whole(given):
    raw = plain(given)
    (found,) = unwrap(raw, reading_bare)
    assert isinstance(found, Event)
    assert (found.raw, found.bare) == (raw, True)
    assert refused(raw).raw == raw
    (inside,) = unwrap(sns(raw), reading_bare)
    assert inside.raw == raw


def test_what_only_tells_about_events_says_so():
    stream = refused((TRANSPORTS / "lambda_kinesis_on_failure_destination.json").read_bytes())
    assert "from the stream" in stream.message
    bus = refused((TRANSPORTS / "eventsv2_custom_bus_dead_letter_record.json").read_bytes())
    assert "Custom Event Bus" in bus.message
    table = refused(b'{"requestContext":{},"DDBStreamBatchInfo":{}}')
    assert "from the stream" in table.message
    assert stream.reason == bus.reason == table.reason == "no-detail"


# --- the samples ----------------------------------------------------------------------------

BODY = json.loads((TRANSPORTS / "lambda_sqs_standard.json").read_bytes())["Records"][0]["body"]
HOLD_THE_EVENT = {
    *("eventbridge_rule_dlq_sqs_message", "lambda_kinesis", "lambda_kinesis_tumbling_window"),
    *("lambda_kinesis_on_failure_destination_s3", "lambda_on_failure_destination_of_sns"),
    *("lambda_sns", "lambda_sqs_fifo", "lambda_sqs_standard", "lambda_sqs_wrapping_sns"),
    *("pipes_kinesis_batch_to_lambda", "pipes_sqs_batch_to_lambda", "sns_notification"),
}
"""As a string or in base64, so that its bytes are those that were sent."""
HOLD_IT_OTHERWISE = {
    *("eventsv2_custom_bus_lambda_batch_raw", "eventsv2_custom_bus_lambda_batch_with_metadata"),
    *("lambda_on_failure_destination", "eventbridge_input_path_detail"),
}
HOLD_NONE = {
    *("api_destination_http_request", "firehose_transform_records"),
    *("lambda_kinesis_on_failure_destination", "eventsv2_custom_bus_dead_letter_record"),
}


def test_every_sample_is_looked_at():
    names = {path.stem for path in TRANSPORTS.glob("*.json")}
    assert names == HOLD_THE_EVENT | HOLD_IT_OTHERWISE | HOLD_NONE


@pytest.mark.parametrize("name", sorted(HOLD_THE_EVENT))
def test_a_sample_holds_the_event(name):
    assert raws((TRANSPORTS / f"{name}.json").read_bytes()) == [BODY.encode()]


@pytest.mark.parametrize("name", sorted(HOLD_IT_OTHERWISE))
def test_a_sample_holds_the_event_as_an_object(name):
    raw = (TRANSPORTS / f"{name}.json").read_bytes()
    (found,) = unwrap(raw, reading)
    assert found.raw in raw
    assert found.detail == json.loads(BODY)["detail"]


@pytest.mark.parametrize("name", sorted(HOLD_NONE))
def test_a_sample_holds_no_event(name):
    assert refused((TRANSPORTS / f"{name}.json").read_bytes()).reason == "no-detail"


# --- whichever way it came ------------------------------------------------------------------

RULES = RuleSet([], namespace="crm")


def keys(event):
    return [part.key for part in RULES.plan(event).parts]


@given(st.data())
def test_an_event_is_the_same_whichever_way_it_came(data):
    raw = data.draw(envelopes.flatmap(spelt))
    plainly = reading(raw)
    if isinstance(plainly, Unreadable):
        return
    wrapped = raw
    for wrap in data.draw(st.lists(st.sampled_from(WRAPPINGS), max_size=4)):
        wrapped = wrap(wrapped)
    (found,) = unwrap(wrapped, reading)
    # blanks around an event are not the event's
    assert found.raw.strip() == raw.strip()
    assert keys(found) == keys(plainly)
    assert found.detail == plainly.detail


def test_an_event_as_deep_as_allowed_may_be_wrapped_all_the_same():
    deep = b'{"detail":' + b'{"a":' * 98 + b"1" + b"}" * 99
    assert isinstance(reading(deep), Event)
    for wrap in WRAPPINGS:
        assert raws(wrap(wrap(deep))) == [deep]


def test_an_event_as_large_as_allowed_may_be_wrapped_all_the_same():
    large = b'{"detail":{"a":"%s"}}' % (b"x" * 1000)

    def small(raw, *, bare=None):
        return read(raw, limits=Limits(max_bytes=len(large)), bare=bool(bare))

    assert raws(b"[%s,%s]" % (large, large), small) == [large, large]
    assert refused(sns(large + b" "), small).reason == "too-large"


# --- bounds ---------------------------------------------------------------------------------


def nested(wrap, times):
    raw = EVENT
    for _ in range(times):
        raw = wrap(raw)
    return raw


@pytest.mark.parametrize("wrap", [in_list, destination, on_bus, received])
def test_wrappings_end_after_the_eighth(wrap):
    assert raws(nested(wrap, 8)) == [EVENT]
    found = refused(nested(wrap, 9))
    assert (found.raw, found.reason) == (wrap(EVENT).strip(), "too-deep")


def test_a_bomb_of_many_is_one_unreadable_record():
    raw = b"[%s]" % b",".join([b"{}"] * 10_001)
    assert refused(raw).reason == "too-large"
    assert len(unwrap(b"[%s]" % b",".join([b"{}"] * 10_000), reading)) == 10_000
    batch = in_list(b",".join([EVENT, *[b"{}"] * 99]))
    tree = in_records(b",".join([EVENT, *[batch] * 101]))
    assert refused(tree).reason == "too-large"


def test_what_is_too_large_is_not_looked_into():
    raw = in_list(b" " * (16 << 20) + EVENT)
    assert refused(raw).reason == "too-large"


def test_a_bomb_of_levels_is_unreadable():
    for raw in (b"[" * 100_000, b'{"requestPayload":' * 100_000, b'{"Records":[' * 100_000):
        assert refused(raw).reason in REASONS
    closed = b'{"requestContext":{},"requestPayload":' * 5000 + b"1" + b"}" * 5000
    assert refused(closed).reason == "too-deep"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"requestContext":{},"requestPayload":%s,"requestPayload":%s}' % (EVENT, OTHER),
        b'{"Records":[%s],"\\u0052ecords":[%s]}' % (EVENT, OTHER),
        b'{"Type":"Notification","MessageId":"m","Message":"a","Message":"b"}',
        b'{"EventSource":"aws:sns","Sns":{"Message":"a","Message":"b"}}',
    ],
)
def test_a_wrapping_that_says_two_things_is_kept_whole(raw):
    found = refused(raw)
    assert (found.raw, found.reason) == (raw, "duplicate-name")


def test_names_with_colons_hide_no_second_member():
    # The name has as many more, written out, as are lost with the first payload.
    name = b"\\u003a" * (EVENT.count(b":") + 1)
    payloads = b'"requestPayload":%s,"requestPayload":%s' % (EVENT, OTHER)
    raw = b'{"requestContext":{},%s,"%s":1}' % (payloads, name)
    assert refused(raw).raw == raw


# --- whatever it is -------------------------------------------------------------------------

NAMES = [
    *("Records", "Messages", "Sns", "kinesis", "Type", "Message", "requestPayload", "payload"),
    *("KinesisBatchInfo", "busArn", "version", "Data", "SystemMetadata", "data", "sequenceNumber"),
    *("messageId", "body", "receiptHandle", "MessageId", "Body", "detail", "topicName"),
    *("eventBody", "PartitionKey", "requestContext", "eventSource", "EventSource", "detail-type"),
]
SAID = [text(EVENT), text(DETAIL), "e30=", "aws:sqs", "aws:sns", "aws:kinesis"]
shapes = st.recursive(
    values | st.just("Notification") | st.sampled_from(SAID),
    lambda inner: (
        st.dictionaries(st.sampled_from(NAMES), inner | inner.map(json.dumps), max_size=5)
        | st.lists(inner, max_size=3)
    ),
    max_leaves=15,
)


def holds(raw, read=reading):
    found = unwrap(raw, read)
    assert isinstance(found, tuple)
    assert found
    for one in found:
        assert isinstance(one, Event) or one.reason in REASONS


@given(shapes.map(plain), st.sampled_from([reading, reading_bare]))
def test_any_shape_gives_events_or_reasons(raw, read):
    holds(raw, read)


@given(st.binary(max_size=60))
@example(b'{"Message":"\\ud800","Type":"Notification"}')
@example(b'{"a":1}{"b":2}')
@example(b"\xef\xbb\xbf{}")
def test_any_bytes_give_events_or_reasons(raw):
    holds(raw)


def test_nearly_wrapped_events_give_events_or_reasons():
    pieces = [*PIECES, *[json.dumps(name).encode() + b":" for name in NAMES]]
    wrapped = st.tuples(st.sampled_from(WRAPPINGS), st.sampled_from(WRAPPINGS)).map(
        lambda two: two[0](two[1](EVENT))
    )
    for_a_while(holds, mutated(wrapped, pieces), share=0.2)


# --- as the router has it -------------------------------------------------------------------


@pytest.mark.parametrize("bare", [False, True])
def test_the_router_reads_as_its_settings_say(bare):
    settings = Settings(bare=bare)
    gateway = Gateway(store=MemoryStore(), sink=print, settings=settings)
    router = Router([RouteEntry(gateway)], settings=settings)
    assert [one.raw for one in router.unwrap(sns(EVENT))] == [EVENT]
    (detail,) = router.unwrap(sns(DETAIL))
    assert isinstance(detail, Event)
    (order,) = router.unwrap(sns(b'{"order":1}'))
    assert isinstance(order, Event) is bare
