"""
What oncebridge does on AWS, by backend: the one list from which every policy is made.

A backend that begins to call something else has to say so here, and nowhere else.
"""

from collections.abc import Mapping
from typing import Final

from oncebridge.aws.templates.s3 import BUCKET_ACTIONS, OBJECT_ACTIONS
from oncebridge.aws.templates.tables import ACTIONS as TABLE_ACTIONS

ACTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "source.sqs": (
        "sqs:ChangeMessageVisibility",
        "sqs:DeleteMessage",
        "sqs:GetQueueAttributes",
        "sqs:GetQueueUrl",
        "sqs:ReceiveMessage",
    ),
    "source.kinesis": (
        "kinesis:DescribeStreamSummary",
        "kinesis:GetRecords",
        "kinesis:GetShardIterator",
        "kinesis:ListShards",
    ),
    # With a consumer of its own (enhanced fan-out): asked of the stream, and of the consumer.
    "source.kinesis.fan_out": ("kinesis:RegisterStreamConsumer",),
    "source.kinesis.consumer": (
        "kinesis:DescribeStreamConsumer",
        "kinesis:SubscribeToShard",
    ),
    "store.dynamodb": TABLE_ACTIONS,
    "store.redis": ("elasticache:Connect",),
    "store.s3": BUCKET_ACTIONS,
    "store.s3.objects": OBJECT_ACTIONS,
    "sink.events": ("events:DescribeEventBus", "events:PutEvents"),
    "sink.kinesis": ("kinesis:DescribeStreamSummary", "kinesis:PutRecords"),
    "sink.sns": ("sns:GetTopicAttributes", "sns:Publish"),
    "sink.sqs": ("sqs:GetQueueAttributes", "sqs:GetQueueUrl", "sqs:SendMessage"),
    "dead.sqs": (
        "sqs:ChangeMessageVisibility",
        "sqs:DeleteMessage",
        "sqs:GetQueueAttributes",
        "sqs:GetQueueUrl",
        "sqs:ReceiveMessage",
        "sqs:SendMessage",
    ),
    "secret.ssm": ("ssm:GetParameter",),
    "secret.secretsmanager": ("secretsmanager:GetSecretValue",),
    # A key of one's own, with which queues, streams or secrets are encrypted.
    "key.kms": ("kms:Decrypt", "kms:GenerateDataKey"),
    # A function: Lambda reads the queue for it, and dead letters are not listed from there.
    "function.sqs": (
        "sqs:ChangeMessageVisibility",
        "sqs:DeleteMessage",
        "sqs:GetQueueAttributes",
        "sqs:ReceiveMessage",
    ),
    "function.dead": ("sqs:GetQueueAttributes", "sqs:GetQueueUrl", "sqs:SendMessage"),
    "function.logs": ("logs:CreateLogStream", "logs:PutLogEvents"),
}
