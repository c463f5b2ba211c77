"""The Postgres store, and what the Postgres sink shares with it."""

from oncebridge.stores.postgres.store import PostgresOptions, PostgresStore

__all__ = ["PostgresOptions", "PostgresStore"]
