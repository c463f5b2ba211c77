"""The SQLite store."""

from oncebridge.stores.sqlite.store import SQLiteOptions, SQLiteStore

__all__ = ["SQLiteOptions", "SQLiteStore"]
