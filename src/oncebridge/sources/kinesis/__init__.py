"""The Kinesis source."""

from oncebridge.sources.kinesis.source import KinesisSource

__all__ = ["KinesisSource"]
