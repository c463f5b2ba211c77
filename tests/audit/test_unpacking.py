"""What a record of a recording holds, and when that arrived."""

import base64
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncebridge.audit.unpacking import Unpacker
from oncebridge.events.event import Event, Limits, Unreadable
from oncebridge.events.timestamps import parse_instant, parse_timestamp

TRANSPORTS = Path(__file__).parents[1] / "events" / "transports"
EVENT = {"id": "e1", "source": "shop", "detail-type": "Order", "detail": {"n": 1}}
TEXT = json.dumps(EVENT)
AT = "2026-03-19T10:15:07.919Z"
AT_MS = 1_773_915_307_919


def opened(record, **options):
    raw = record if isinstance(record, bytes) else json.dumps(record).encode()
    return list(Unpacker(Limits(), bare=False, **options).unpack(raw))


def ids(record):
    return [(event.id, at_ms) for event, at_ms in opened(record)]


def sqs(body=TEXT, sent=AT_MS):
    attributes = {"SentTimestamp": str(sent)} if sent else {}
    return {"MessageId": "m", "ReceiptHandle": "r", "Body": body, "Attributes": attributes}


@pytest.mark.parametrize(
    ("name", "at_ms"),
    [
        ("lambda_sqs_standard", 1_765_552_508_101),
        ("lambda_sqs_fifo", 1_765_552_508_101),
        ("lambda_sqs_wrapping_sns", 1_765_552_508_101),
        ("pipes_sqs_batch_to_lambda", 1_765_552_508_101),
        ("lambda_kinesis", 1_765_552_508_101),
        ("pipes_kinesis_batch_to_lambda", 1_765_552_508_101),
        ("lambda_sns", 1_765_552_508_101),
        ("sns_notification", 1_765_552_508_101),
        ("lambda_on_failure_destination", 1_765_552_806_021),
        ("eventbridge_rule_dlq_sqs_message", None),
        ("eventsv2_custom_bus_lambda_batch_raw", None),
        ("eventsv2_custom_bus_lambda_batch_with_metadata", None),
        ("eventbridge_input_path_detail", None),
    ],
)
def test_every_transport_gives_the_event_and_its_time(name, at_ms):
    found = opened((TRANSPORTS / f"{name}.json").read_bytes())
    assert found
    for event, its_ms in found:
        assert isinstance(event, Event)
        assert event.detail["topicName"].endswith(".user.end")
        assert its_ms == at_ms


def test_a_dump_of_a_queue_gives_each_message_with_its_own_time():
    dump = {"Messages": [sqs(), sqs(json.dumps(EVENT | {"id": "e2"}), AT_MS + 5), sqs(sent=None)]}
    assert ids(dump) == [("e1", AT_MS), ("e2", AT_MS + 5), ("e1", None)]
    assert ids([sqs(), sqs()]) == [("e1", AT_MS)] * 2


def test_a_stream_record_by_itself_has_a_time():
    record = {"Data": base64.b64encode(TEXT.encode()).decode(), "PartitionKey": "p"}
    record |= {"SequenceNumber": "1", "ApproximateArrivalTimestamp": AT_MS / 1000}
    assert ids(record) == [("e1", AT_MS)]
    assert ids(record | {"ApproximateArrivalTimestamp": AT}) == [("e1", AT_MS)]


@pytest.mark.parametrize(
    "line",
    [
        f"{AT} {TEXT}",
        f"{AT}\t{TEXT}",
        f"2026-03-19T11:15:07.919+01:00 {TEXT}",
        f"{AT} [INFO] {AT} 1-2-3 received: {TEXT}",
        f"  {AT} {TEXT}  ",
    ],
)
def test_a_line_of_an_export_arrived_when_it_says(line):
    assert ids(line.encode()) == [("e1", AT_MS)]


def test_a_line_of_an_export_may_hold_what_a_queue_gave():
    later = "2026-03-19T10:15:09.000Z"
    batch = {"Records": [{"messageId": "m", "receiptHandle": "r", "body": TEXT}] * 2}
    assert ids(f"{later} {json.dumps(batch)}".encode()) == [("e1", parse_instant(later))] * 2
    # it was logged when it was received, which is later than when it was sent
    assert ids(f"{later} {json.dumps(sqs())}".encode()) == [("e1", parse_instant(later))]


def test_events_of_the_logs_api_arrived_when_they_say():
    lines = [{"timestamp": AT_MS + n, "message": f"{TEXT}\n", "ingestionTime": 1} for n in (0, 7)]
    for name in ("events", "logEvents"):
        assert ids({name: lines, "nextToken": "t"}) == [("e1", AT_MS), ("e1", AT_MS + 7)]
    wordy = {"timestamp": AT_MS, "message": f"RequestId: 1 got {TEXT}"}
    assert ids({"logEvents": [wordy], "messageType": "DATA_MESSAGE"}) == [("e1", AT_MS)]


def test_an_entry_of_a_log_may_stand_alone():
    assert ids({"timestamp": AT_MS, "message": TEXT, "eventId": "1"}) == [("e1", AT_MS)]
    insight = {"@timestamp": "2026-03-19 10:15:07.919", "@message": TEXT, "@ptr": "x"}
    assert ids([insight, insight | {"@message": EVENT}]) == [("e1", AT_MS)] * 2
    ((found, _),) = opened({"timestamp": AT_MS, "message": TEXT, "level": "mine"})
    assert found.reason == "no-detail"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"", "not-json"),
        (b"START RequestId: 1 Version: $LATEST", "not-json"),
        (f"{AT} START RequestId: 1".encode(), "not-json"),
        (f"{AT} {{".encode(), "not-json"),
        (f"words before {TEXT}".encode(), "not-json"),
        (b'{"a": 1}', "no-detail"),
        (b'{"detail": {"a": 1, "a": 2}}', "duplicate-name"),
        (b"[1, 2]", "not-an-object"),
        (b'{"events": [{"timestamp": 1, "message": "END"}]}', "not-json"),
        (b'{"Records": [{"a": 1}]}', "no-detail"),
        (b"\xff\xfe", "not-json"),
    ],
)
def test_what_holds_no_event_says_why(record, reason):
    ((found, _),) = opened(record)
    assert isinstance(found, Unreadable)
    assert found.reason == reason


def test_what_is_wrapped_without_end_comes_to_an_end():
    record = TEXT
    for _ in range(10):
        record = json.dumps({"events": [{"timestamp": 1, "message": record}]})
    ((found, _),) = opened(record.encode())
    assert isinstance(found, Unreadable)


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_give_something_and_raise_nothing(raw):
    assert opened(raw)
    assert opened(b"2026-03-19T10:15:07Z " + raw)
    assert opened(b'{"events": [' + raw + b"]}")


def test_a_bare_detail_is_an_event_where_it_may_be():
    ((found, _),) = list(Unpacker(Limits(), bare=True).unpack(b'{"events": [1], "n": 2}'))
    assert isinstance(found, Event)
    assert found.bare


# --- instants -------------------------------------------------------------------------------


@given(st.datetimes(datetime(1970, 1, 2), datetime(2999, 1, 1)))  # noqa: DTZ001
def test_instants_are_read_as_python_reads_them(at):
    at = at.replace(tzinfo=UTC, microsecond=at.microsecond // 1000 * 1000)
    for text in (at.isoformat(), at.isoformat(timespec="milliseconds").replace("+00:00", "Z")):
        for _ in range(2):  # what was read before is read in another way
            assert parse_instant(text) == round(at.timestamp() * 1000)
    whole = at.replace(microsecond=0)
    assert parse_instant(whole.strftime("%Y-%m-%dT%H:%M:%SZ")) == whole.timestamp() * 1000


@pytest.mark.parametrize("text", ["", "Z", "today", "2026-03-19T10:15:07.9x9Z", "2026-13-01", "1"])
def test_what_is_no_instant_is_none(text):
    parse_instant(AT)
    assert parse_instant(text) is None
    assert parse_timestamp(text) is None


@pytest.mark.parametrize(
    ("value", "at_ms"),
    [
        (AT, AT_MS),
        (AT_MS, AT_MS),
        (str(AT_MS), AT_MS),
        (AT_MS / 1000, AT_MS),
        (AT_MS // 1000, AT_MS // 1000 * 1000),
        (0, None),
        (-5, None),
        (1e300, None),
        (True, None),
        (None, None),
        ([1], None),
        ("12", None),
    ],
)
def test_moments_are_read_however_they_are_written(value, at_ms):
    assert parse_timestamp(value) == at_ms
