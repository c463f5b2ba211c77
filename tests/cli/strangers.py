"""Backends as third parties bring them, found by addresses of their own."""

import sys
from importlib.metadata import EntryPoint
from types import ModuleType

from oncebridge.base.secrets import Address
from oncebridge.errors import StoreUnavailable
from oncebridge.service import addresses as backends
from oncebridge.sinks.api import Yes
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore

CANARY = "c4n4ry-9xw"

TABLES: set[str] = set()
"""What was made, by address."""


class Fixed(MemoryStore):
    """A store that cannot be carried anywhere."""

    @classmethod
    def from_url(cls, url, options=None):
        return cls()


class Away(SQLiteStore):
    """A store whose server does not answer."""

    @classmethod
    def from_url(cls, url, options=None):
        store = cls("never-made.db")
        store.url = Address(url)
        return store

    async def open(self):
        raise StoreUnavailable(f"{self.url!r} does not answer")

    async def migrate(self):
        await self.open()


class Ruled:
    """Needs something made, though not by SQL."""

    batch = concurrency = 1

    def __init__(self, url):
        self.url = url
        self.is_closed = False

    @classmethod
    def from_url(cls, url, options=None):
        return cls(url)

    async def open(self):
        assert self.url in TABLES

    async def deliver(self, deliveries):
        return [Yes()] * len(deliveries)

    async def migrate(self):
        if self.url in TABLES:
            return []
        TABLES.add(self.url)
        return ["made the table events", "made its\x1b[31m index"]

    async def aclose(self):
        self.is_closed = True


class Tabled(Ruled):
    """Needs a table."""

    def migration_sql(self):
        return "create table events (id int);\n"


KINDS = {"fixed": Fixed, "away": Away, "ruled": Ruled, "tabled": Tabled}


def installed(monkeypatch) -> None:
    """Install them beside what is there, as stores and as sinks."""
    module = ModuleType("strangers_installed")
    for name, kind in KINDS.items():
        setattr(module, name, kind)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    known = backends._schemes

    def schemes(group):
        ours = {name: EntryPoint(name, f"{module.__name__}:{name}", group) for name in KINDS}
        return {**known(group), **ours}

    monkeypatch.setattr(backends, "_schemes", schemes)
    monkeypatch.setattr(sys.modules[__name__], "TABLES", set())
