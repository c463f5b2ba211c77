"""The HTTP source."""

from oncebridge.sources.http.source import HttpSource, HttpSourceOptions

__all__ = ["HttpSource", "HttpSourceOptions"]
