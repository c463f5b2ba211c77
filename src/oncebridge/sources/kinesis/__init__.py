"""The Kinesis source."""

from oncebridge.sources.kinesis.source import KinesisOptions, KinesisSource

__all__ = ["KinesisOptions", "KinesisSource"]
