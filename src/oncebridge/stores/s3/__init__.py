"""The S3 store."""

from oncebridge.stores.s3.store import S3Store

__all__ = ["S3Store"]
