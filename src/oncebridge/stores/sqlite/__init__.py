"""The SQLite store."""

from oncebridge.stores.sqlite.store import SQLiteStore

__all__ = ["SQLiteStore"]
