"""The SQS source."""

from oncebridge.sources.sqs.source import SqsSource, SqsSourceOptions

__all__ = ["SqsSource", "SqsSourceOptions"]
