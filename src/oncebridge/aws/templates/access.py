"""
The IAM actions that oncebridge needs, by backend. Every policy is made from this list.

If a backend starts to call another action, add it here, and nowhere else.
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
    # Enhanced fan-out: the first on the stream, the others on the consumer.
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
    # A customer managed key that encrypts queues, streams or secrets.
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
