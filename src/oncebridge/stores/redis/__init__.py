"""The Redis store."""

from oncebridge.stores.redis.options import RedisOptions
from oncebridge.stores.redis.store import RedisStore

__all__ = ["RedisOptions", "RedisStore"]
