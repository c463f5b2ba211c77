"""The Redis store."""

from oncebridge.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
