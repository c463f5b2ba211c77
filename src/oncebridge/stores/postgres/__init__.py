"""The Postgres store, and what the Postgres sink shares with it."""

from oncebridge.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
