import json

import pytest
from aws_lambda_powertools.utilities.data_classes import (
    EventBridgeEvent,
    KinesisStreamEvent,
    SNSEvent,
    SQSEvent,
)
from msgspec import UNSET
from tests.aws.payloads import (
    destination,
    event,
    fifo,
    kinesis,
    pipes_fifo,
    pipes_kinesis,
    pipes_sqs,
    sample,
    shard_record,
    sns,
    sqs,
    sqs_record,
    with_metadata,
)

from oncebridge.aws import NotRecognised
from oncebridge.aws.invocation import Trigger, recognise
from oncebridge.errors import OncebridgeError
from oncebridge.events.event import Unreadable, read


def strictly(raw):
    return read(raw)


def barely(raw):
    return read(raw, bare=True)


def seen(given, read=strictly):
    return recognise(given, read)


def names(given):
    return [record.name for record in seen(given).records]


def held(given):
    return [json.loads(record.held) for record in seen(given).records]


# --- who has called -------------------------------------------------------------------------

TRIGGERS = {
    "direct": (event(), Trigger.DIRECT),
    "bare detail": ({"topicName": "t", "eventBody": {}}, Trigger.DIRECT),
    "destination": (destination(event()), Trigger.DIRECT),
    "bus, one": (with_metadata(event()), Trigger.DIRECT),
    "bus, raw": ([event(), event()], Trigger.DIRECT),
    "bus, with metadata": ([with_metadata(event())], Trigger.DIRECT),
    "sns": (sns(event()), Trigger.SNS),
    "sqs": (sqs(event()), Trigger.SQS),
    "fifo": (fifo(("g", event())), Trigger.SQS_FIFO),
    "kinesis": (kinesis(("p", event())), Trigger.KINESIS),
    "pipes, sqs": (pipes_sqs(event()), Trigger.PIPES_SQS),
    "pipes, fifo": (pipes_fifo(("g", event())), Trigger.PIPES_SQS_FIFO),
    "pipes, kinesis": (pipes_kinesis(("p", event())), Trigger.PIPES_KINESIS),
}


@pytest.mark.parametrize(("given", "trigger"), TRIGGERS.values(), ids=TRIGGERS)
def test_the_trigger_is_told_from_the_shape(given, trigger):
    assert seen(given).trigger is trigger


SAMPLES = {
    "eventbridge_input_path_detail": Trigger.DIRECT,
    "eventsv2_custom_bus_lambda_batch_raw": Trigger.DIRECT,
    "eventsv2_custom_bus_lambda_batch_with_metadata": Trigger.DIRECT,
    "lambda_kinesis": Trigger.KINESIS,
    "lambda_kinesis_on_failure_destination": Trigger.DIRECT,
    "lambda_kinesis_on_failure_destination_s3": Trigger.DIRECT,
    "lambda_kinesis_tumbling_window": Trigger.KINESIS,
    "lambda_on_failure_destination": Trigger.DIRECT,
    "lambda_on_failure_destination_of_sns": Trigger.DIRECT,
    "lambda_sns": Trigger.SNS,
    "lambda_sqs_fifo": Trigger.SQS_FIFO,
    "lambda_sqs_standard": Trigger.SQS,
    "lambda_sqs_wrapping_sns": Trigger.SQS,
    "pipes_kinesis_batch_to_lambda": Trigger.PIPES_KINESIS,
    "pipes_sqs_batch_to_lambda": Trigger.PIPES_SQS,
}


@pytest.mark.parametrize(("name", "trigger"), SAMPLES.items())
def test_the_samples_are_recognised(name, trigger):
    invocation = seen(sample(name))
    assert invocation.trigger is trigger
    assert len(invocation.records) == 1


@pytest.mark.parametrize(
    ("data_class", "given"),
    [
        (SQSEvent, sqs(event())),
        (KinesisStreamEvent, kinesis(("p", event()))),
        (SNSEvent, sns(event())),
        (EventBridgeEvent, event()),
    ],
)
def test_the_data_classes_of_powertools_are_what_they_were_made_of(data_class, given):
    assert seen(data_class(given)) == seen(given)


# --- what is in it --------------------------------------------------------------------------


def test_a_failure_is_named_as_the_trigger_wants_it():
    assert names(sqs(event(1), event(2))) == ["m0", "m1"]
    assert names(fifo(("g", event(1)), ("h", event(2)))) == ["m0", "m1"]
    assert names(pipes_sqs(event(1))) == ["m0"]
    assert names(kinesis(("p", event(1)), first=9)) == ["9"]
    assert names(pipes_kinesis(("p", event(1)), first=9)) == ["shardId-000000000006:9"]


def test_what_stays_in_order_has_a_lane():
    assert [r.lane for r in seen(fifo(("g", event()), ("h", event()))).records] == ["g", "h"]
    for made in (kinesis, pipes_kinesis):
        records = seen(made(("p", event()), ("q", event()), first=9)).records
        assert [(r.lane, r.sequence) for r in records] == [("p", 9), ("q", 10)]


def test_a_group_on_a_queue_without_order_makes_no_order():
    record = sqs_record(event(), "m0")
    record["attributes"]["MessageGroupId"] = "tenant"
    assert seen({"Records": [record]}).trigger is Trigger.SQS


def test_each_shape_gives_what_it_holds():
    assert held(sqs(event(1), event(2))) == [event(1), event(2)]
    assert held(kinesis(("p", event(1)))) == [event(1)]
    assert held(pipes_kinesis(("p", event(1)))) == [event(1)]
    assert held(sns(event(1), event(2))) == [event(1), event(2)]
    assert held(event(1)) == [event(1)]
    assert held(destination(event(1))) == [destination(event(1))]
    assert held([event(1), event(2)]) == [event(1), event(2)]


def test_the_body_of_a_message_keeps_its_bytes():
    body = '{"detail" : {"n": 1.0}, "id":"\\u00e9" }'
    assert [r.held for r in seen(sqs(body)).records] == [body.encode()]
    assert [r.held for r in seen(kinesis(("p", body))).records] == [body.encode()]
    assert [r.held for r in seen(sns(body)).records] == [body.encode()]


def test_half_a_character_is_found_on_reading():
    for given in (event(detail={"a": "\ud800"}), sqs('{"detail":{"a":"\ud800"}}')):
        (record,) = seen(given).records
        assert read(record.held).reason == "lone-surrogate"


def test_a_number_that_is_none_is_found_on_reading():
    (record,) = seen(event(detail={"a": float("nan")})).records
    assert read(record.held).reason == "not-finite"


def test_data_that_is_not_base64_is_one_unreadable_record():
    batch = kinesis(("p", event(1)), ("p", event(2)))
    batch["Records"][0]["kinesis"]["data"] = "{not base64}"
    first, second = seen(batch).records
    assert isinstance(first.held, Unreadable)
    assert json.loads(second.held) == event(2)


def test_a_window_gets_its_state_back():
    assert seen(kinesis(("p", event()))).state is UNSET
    assert seen(kinesis(("p", event()), window={}, state={"a": 1})).state == {"a": 1}
    assert seen(kinesis(("p", event()), window={}, state=None)).state == {}
    assert seen(kinesis(("p", event()), window={})).state == {}
    end = seen({"Records": [], "window": {}, "state": {"a": 1}})
    assert (end.trigger, end.records, end.state) == (Trigger.KINESIS, (), {"a": 1})
    assert seen(sample("lambda_kinesis_tumbling_window")).state == {"1": 282, "2": 715}


def test_a_bare_detail_is_an_event_where_the_settings_say_so():
    order = {"orderId": 7}
    assert seen(order, barely).trigger is Trigger.DIRECT
    assert len(seen([order, order], barely).records) == 2
    for given in (order, [order]):
        with pytest.raises(NotRecognised):
            seen(given)


@pytest.mark.parametrize(
    "one", [event(), with_metadata(event()), {"topicName": "t", "eventBody": {}}]
)
@pytest.mark.parametrize("odd", [{"x": 1}, {}, 7, "hello", None, [], {"Records": []}, {"Data": 1}])
@pytest.mark.parametrize("reading", [strictly, barely])
def test_one_odd_element_fails_no_batch_of_a_bus(one, odd, reading):
    for given in ([one, odd], [odd, one]):
        invocation = seen(given, reading)
        assert invocation.trigger is Trigger.DIRECT
        assert [json.loads(record.held) for record in invocation.records] == given


def test_metadata_alone_is_no_mark_of_a_bus():
    with pytest.raises(NotRecognised):
        seen({"Data": {"order": 1}, "Metadata": {}})


@pytest.mark.parametrize("made", [sqs, pipes_sqs])
def test_a_queue_without_order_may_hand_out_a_message_twice(made):
    batch = made(event(1), event(1), event(2))
    records = batch["Records"] if isinstance(batch, dict) else batch
    records[1]["messageId"] = records[0]["messageId"]
    assert names(batch) == ["m0", "m0", "m2"]
    for name in ("", None):
        records[2]["messageId"] = name
        with pytest.raises(NotRecognised):
            seen(batch)


# --- what is refused ------------------------------------------------------------------------

SECRET = "4111-1111-1111-1111"
UNKNOWN = {
    "nothing": None,
    "a string": SECRET,
    "a number": 7,
    "an empty object": {},
    "an empty array": [],
    "no records": {"Records": []},
    "records that are none": {"Records": SECRET},
    "records of plain values": {"Records": [SECRET]},
    "an array of plain values": [SECRET, 1],
    "an S3 notification": {"Records": [{"eventSource": "aws:s3", "s3": {"object": SECRET}}]},
    "a DynamoDB stream": {"Records": [{"eventSource": "aws:dynamodb", "dynamodb": {"k": SECRET}}]},
    "a DynamoDB stream by a pipe": [{"eventSource": "aws:dynamodb", "dynamodb": {"k": SECRET}}],
    "SES": {"Records": [{"eventSource": "aws:ses", "ses": {"mail": SECRET}}]},
    "CodeCommit": {"Records": [{"eventSource": "aws:codecommit"}]},
    "CloudFront": {"Records": [{"cf": {"request": {"uri": SECRET}}}]},
    "API Gateway": {"httpMethod": "POST", "body": SECRET, "requestContext": {}},
    "a function URL": {"version": "2.0", "rawPath": "/", "requestContext": {}, "body": SECRET},
    "a load balancer": {"requestContext": {"elb": {}}, "body": SECRET},
    "Cognito": {"triggerSource": "PreSignUp_SignUp", "request": {"email": SECRET}},
    "CloudWatch Logs": {"awslogs": {"data": SECRET}},
    "S3 batch": {"invocationSchemaVersion": "1.0", "tasks": [SECRET]},
    "Kafka": {"eventSource": "aws:kafka", "records": {"t-0": [{"value": SECRET}]}},
    "RabbitMQ": {"eventSource": "aws:rmq", "rmqMessagesByQueue": {"q": [SECRET]}},
    "Firehose": sample("firehose_transform_records"),
    "a request of an API destination": sample("api_destination_http_request"),
    "a message as the API gives it": sample("eventbridge_rule_dlq_sqs_message"),
    "a failure record of a bus": sample("eventsv2_custom_bus_dead_letter_record"),
    "two kinds in a batch": {"Records": [*sqs(event())["Records"], *sns(event())["Records"]]},
    "two kinds by a pipe": [*pipes_sqs(event()), *pipes_kinesis(("p", event()))],
    "events and records": [event(), *pipes_sqs(event())],
    "events and records that are odd": [event(), {"EventSource": "aws:sns"}],
    "a record and a plain value": [*pipes_sqs(event()), SECRET],
    "SNS in an array": sns(event())["Records"],
    "flattened records in Records": {"Records": pipes_kinesis(("p", event()))},
}


@pytest.mark.parametrize("given", UNKNOWN.values(), ids=UNKNOWN)
def test_what_cannot_be_answered_is_refused_without_a_word_of_what_is_in_it(given):
    with pytest.raises(NotRecognised) as caught:
        seen(given)
    assert isinstance(caught.value, OncebridgeError)
    assert SECRET not in str(caught.value)
    assert "shop" not in str(caught.value)


MAY_BE_A_DETAIL = {
    *("an empty object", "a request of an API destination"),
    *("a message as the API gives it", "a failure record of a bus"),
}


@pytest.mark.parametrize("name", sorted(UNKNOWN.keys() - MAY_BE_A_DETAIL))
def test_nor_is_it_taken_for_a_bare_detail(name):
    with pytest.raises(NotRecognised):
        seen(UNKNOWN[name], barely)


def test_the_names_that_were_seen_are_told():
    with pytest.raises(NotRecognised, match="'httpMethod', 'body', 'requestContext'"):
        seen(UNKNOWN["API Gateway"])
    with pytest.raises(NotRecognised, match="an empty object"):
        seen({})
    with pytest.raises(NotRecognised, match=r"'n0'.* and 8 more") as caught:
        seen({f"n{at}": 1 for at in range(20)})
    assert "n12" not in str(caught.value)
    with pytest.raises(NotRecognised) as caught:
        seen({"\n\x1b[31m" + "x" * 1000: 1})
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def test_firehose_is_refused_with_the_reason():
    with pytest.raises(NotRecognised, match=r"Firehose transformation.*lost"):
        seen(sample("firehose_transform_records"))


def broken(made, change):
    batch = made()
    change(batch["Records"] if isinstance(batch, dict) else batch)
    return batch


def two_of(made, *, pair=False):
    body = ("g", event()) if pair else event()
    return lambda: made(body, body)


MAKERS = {
    "sqs": two_of(sqs),
    "fifo": two_of(fifo, pair=True),
    "pipes": two_of(pipes_sqs),
    "pipes fifo": two_of(pipes_fifo, pair=True),
}


@pytest.mark.parametrize("made", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize(
    "change",
    [
        lambda records: records[0].pop("messageId"),
        lambda records: records[0].update(messageId=""),
        lambda records: records[0].update(messageId=None),
        lambda records: records[0].update(messageId=7),
        lambda records: records[0].pop("body"),
        lambda records: records[0].update(body={"detail": {}}),
        lambda records: records[0].pop("eventSource"),
    ],
)
def test_a_record_without_a_name_of_its_own_fails_the_batch(made, change):
    with pytest.raises(NotRecognised):
        seen(broken(made, change))


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.pop("sequenceNumber"),
        lambda record: record.update(sequenceNumber="9"),
        lambda record: record.update(sequenceNumber=9),
        lambda record: record.update(sequenceNumber="-1"),
        lambda record: record.update(sequenceNumber="٣"),
        lambda record: record.update(sequenceNumber=""),
        lambda record: record.pop("data"),
        lambda record: record.pop("partitionKey"),
        lambda record: record.update(data=7),
    ],
)
def test_a_record_of_a_shard_without_its_place_fails_the_batch(change):
    batch = kinesis(("p", event(1)), ("p", event(2)))
    change(batch["Records"][0]["kinesis"])
    with pytest.raises(NotRecognised):
        seen(batch)


def test_a_record_of_a_pipe_without_its_name_fails_the_batch():
    for change in ({"eventID": None}, {"eventID": "shardId-000000000006:9"}):
        batch = pipes_kinesis(("p", event(1)), ("p", event(2)))
        batch[0] |= change
        with pytest.raises(NotRecognised):
            seen(batch)
    assert "eventID" not in shard_record(event(), 1, "p")
    with pytest.raises(NotRecognised):
        seen([{**shard_record(event(), 1, "p"), "eventSource": "aws:kinesis"}])


@pytest.mark.parametrize("made", [fifo, pipes_fifo])
def test_a_queue_with_order_hands_out_no_message_twice(made):
    batch = made(("g", event(1)), ("g", event(2)))
    records = batch["Records"] if isinstance(batch, dict) else batch
    records[1]["messageId"] = records[0]["messageId"]
    with pytest.raises(NotRecognised, match="same name"):
        seen(batch)


def test_a_fifo_record_without_its_group_fails_the_batch():
    batch = fifo(("g", event()))
    del batch["Records"][0]["attributes"]["MessageGroupId"]
    with pytest.raises(NotRecognised):
        seen(batch)


def test_what_is_not_made_of_json_is_refused():
    circle = event()
    circle["detail"] = circle
    for given in (event(detail={"a": {1, 2}}), circle):
        with pytest.raises(NotRecognised, match="not made of JSON"):
            seen(given)
