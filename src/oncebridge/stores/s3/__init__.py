"""The S3 store."""

from oncebridge.stores.s3.store import S3Options, S3Store

__all__ = ["S3Options", "S3Store"]
