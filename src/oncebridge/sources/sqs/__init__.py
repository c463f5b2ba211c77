"""The SQS source."""

from oncebridge.sources.sqs.source import SqsSource

__all__ = ["SqsSource"]
