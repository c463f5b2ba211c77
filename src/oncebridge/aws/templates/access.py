"""
The IAM actions that oncebridge needs, by backend. Every policy is made from this list.

If a backend starts to call another action, add it here, and nowhere else.
"""

from collections.abc import Mapping
from typing import Final

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
    # What a worker does; `oncebridge migrate` also creates the table, or the bucket and its rule.
    "store.dynamodb": (
        "dynamodb:BatchGetItem",
        "dynamodb:DeleteItem",
        "dynamodb:DescribeTable",
        "dynamodb:DescribeTimeToLive",
        "dynamodb:PartiQLInsert",
        "dynamodb:PartiQLUpdate",
        "dynamodb:PutItem",
        "dynamodb:Scan",
    ),
    "store.redis": ("elasticache:Connect",),
    "store.s3": ("s3:GetBucketVersioning", "s3:GetLifecycleConfiguration", "s3:ListBucket"),
    "store.s3.objects": ("s3:DeleteObject", "s3:GetObject", "s3:PutObject"),
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
