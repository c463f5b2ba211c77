"""What Lambda hands over, as AWS writes it, around events of our own."""

import base64
import itertools
import json
from pathlib import Path

TRANSPORTS = Path(__file__).parents[1] / "events" / "transports"


def sample(name):
    return json.loads((TRANSPORTS / f"{name}.json").read_bytes())


def event(n=1, **envelope):
    return {"id": f"e{n}", "detail-type": "Order", "source": "shop", "detail": {"n": n}, **envelope}


def text(value):
    return value if isinstance(value, str) else json.dumps(value)


def sqs_record(body, name, *, group=None):
    attributes = {"ApproximateReceiveCount": "1"}
    arn = "arn:aws:sqs:us-east-1:123456789012:genesys-events"
    if group is not None:
        attributes |= {"MessageGroupId": group, "SequenceNumber": "18849496460467696128"}
        arn += ".fifo"
    return {
        "messageId": name,
        "receiptHandle": "AQEB",
        "body": text(body),
        "attributes": attributes,
        "messageAttributes": {},
        "eventSource": "aws:sqs",
        "eventSourceARN": arn,
    }


def sqs(*bodies):
    """Write a batch of SQS; the records are called m0, m1, …"""
    return {"Records": [sqs_record(body, f"m{at}") for at, body in enumerate(bodies)]}


def fifo(*bodies):
    """Write a batch of an SQS FIFO queue, of pairs of a group and a body."""
    records = [sqs_record(body, f"m{at}", group=group) for at, (group, body) in enumerate(bodies)]
    return {"Records": records}


def shard_record(body, number, key):
    return {
        "kinesisSchemaVersion": "1.0",
        "partitionKey": key,
        "sequenceNumber": str(number),
        "data": base64.b64encode(text(body).encode()).decode(),
        "approximateArrivalTimestamp": 1765552508.101,
    }


def kinesis(*bodies, first=8, **more):
    """Write a batch of Kinesis, of pairs of a partition key and a body, numbered from *first*."""
    records = [
        {
            "kinesis": shard_record(body, number, key),
            "eventSource": "aws:kinesis",
            "eventID": f"shardId-000000000006:{number}",
        }
        for number, (key, body) in zip(itertools.count(first), bodies, strict=False)
    ]
    return {"Records": records, **more}


def pipes_sqs(*bodies):
    return sqs(*bodies)["Records"]


def pipes_fifo(*bodies):
    return fifo(*bodies)["Records"]


def pipes_kinesis(*bodies, first=8):
    records = kinesis(*bodies, first=first)["Records"]
    return [
        {**record["kinesis"], **{k: v for k, v in record.items() if k != "kinesis"}}
        for record in records
    ]


def sns(*bodies):
    return {
        "Records": [
            {"EventSource": "aws:sns", "Sns": {"Type": "Notification", "Message": text(body)}}
            for body in bodies
        ]
    }


def destination(payload):
    return {"version": "1.0", "requestContext": {"condition": "x"}, "requestPayload": payload}


def with_metadata(body):
    return {"Data": body, "Metadata": {}, "SystemMetadata": {"aws:EventId": "b1"}}
