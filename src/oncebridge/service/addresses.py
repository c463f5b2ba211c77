"""
Addresses of the configuration, and the backends that they name.

Stores, sinks, sources and dead letters are found by the scheme of their address, through entry
points, so that third parties can add their own. A backend is a class with `from_url(url)`; its
options, if any, are a record `Options`, declared as in `oncebridge.base.options`, and the method
is `from_url(url, options)`. A backend that needs a table or the like implements `Migrates`.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from msgspec import Struct

from oncebridge.base.line_files import file_path
from oncebridge.base.options import (
    Problems,
    Text,
    did_you_mean,
    origin,
    read,
    schema,
    settings_of,
)
from oncebridge.base.secrets import Address, mask_address, resolve_address
from oncebridge.errors import ConfigError

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,30}")


class NoOptions(Struct, frozen=True, kw_only=True):
    """A backend without options."""


@cache
def _schemes(group: str) -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def backend(group: str, url: str, where: str, *, written: str) -> Any:
    """
    Return the class for *url*, or raise `ConfigError`.

    *written* is the text in the configuration, which may be a reference.
    """
    scheme = scheme_of(url)
    point = _schemes(group).get(scheme)
    if point is None:
        allowed = sorted(_schemes(group))
        if url != written:  # a resolved address may be secret
            raise ConfigError(
                where, f"{written!r} does not hold an address; allowed: {', '.join(allowed)}"
            )
        if not _SCHEME.fullmatch(scheme):
            message = f"is not an address; an address starts with one of {', '.join(allowed)}"
            raise ConfigError(where, message)
        raise ConfigError(
            where, f"{scheme!r} is not supported here; {did_you_mean(scheme, allowed)}"
        )
    return _load(point, where, f"{scheme}: ")


def extension(group: str, name: str, where: str) -> Any:
    """Load the entry point *name* of *group*; *where* is the setting that needs it."""
    point = _schemes(group).get(name)
    if point is None:
        raise ConfigError(where, f"{name!r} is not registered; reinstall oncebridge")
    return _load(point, where)


def _load(point: EntryPoint, where: str, named: str = "") -> Any:
    try:
        return point.load()
    except ImportError as error:
        raise ConfigError(
            where,
            f"{named}needs a package that is not installed ({error.name or error}); "
            f"pip install '{_package(point)}'",
        ) from error


def _package(point: EntryPoint) -> str:
    name = point.dist.name if point.dist else "oncebridge"
    if name == "oncebridge" and not point.extras:
        return "oncebridge[service]"
    return f"{name}[{','.join(point.extras)}]" if point.extras else name


class BackendAddress(Struct, frozen=True):
    """One address of the configuration, with its options and its backend."""

    url: Address
    opened: Any
    """The backend, made and not yet connected."""
    reference: str = ""
    """The reference that was resolved, if any: then the whole address may be secret, and change."""
    options: Any = None
    """The options of the backend, if it has any."""

    group: ClassVar[str]

    @classmethod
    def of(cls, url: str, **options: Any) -> Self:
        """Return an address given in code, read as in the configuration."""
        problems = Problems()
        place = cls.read_option({"url": url, **options}, "", problems)
        problems.check()
        assert place is not None  # noqa: S101 - or it was raised
        return place

    @classmethod
    def read_option(cls, value: Any, where: str, problems: Problems) -> Self | None:
        table = as_table(value)
        if not isinstance(table, Mapping) or not isinstance(table.get("url"), str):
            items = table.values() if isinstance(table, Mapping) and "url" not in table else ()
            place = next((item.origin for item in items if isinstance(item, Text)), where)
            raise ConfigError(place, "must be an address, or a table with url and options")
        given = Address(table["url"])
        place = origin(table["url"], where)
        url = Address(resolve_address(given, place))
        if "\0" in url:
            raise ConfigError(place, "an address cannot have the character NUL")
        found = backend(cls.group, url, place, written=given)
        kind = getattr(found, "Options", None)
        rest = {name: item for name, item in table.items() if name != "url"}
        options = read(kind or NoOptions, rest, where, problems)
        if options is None:
            return None
        try:
            opened = found.from_url(url, options) if kind else found.from_url(url)
        except ConfigError as error:
            message = error.message.replace(repr(url), repr(given))  # as it was written
            if not error.where:
                raise ConfigError(place, message) from None
            under = f"{where}.{error.where}" if where else error.where
            raise ConfigError(origin(rest.get(error.where), under), message) from None
        return cls(url, opened, "" if url == given else given, options if kind else None)

    @classmethod
    def option_schema(cls) -> dict[str, Any]:
        properties: dict[str, Any] = {"url": {"type": "string", "minLength": 1}}
        for kind in cls.option_kinds().values():
            properties |= schema(kind)["properties"]
        table = {"type": "object", "properties": properties, "required": ["url"]}
        return {"anyOf": [{"type": "string", "minLength": 1}, table]}

    @classmethod
    def option_form(cls) -> str:
        return "address, or table with url and options"

    @classmethod
    def option_kinds(cls) -> dict[str, type[Struct]]:
        """Return the options of every installed backend, by scheme."""
        kinds = {}
        for name, point in sorted(_schemes(cls.group).items()):
            try:
                kind = getattr(point.load(), "Options", None)
            except ImportError:
                continue
            if kind is not None and settings_of(kind):
                kinds[name] = kind
        return kinds

    def __str__(self) -> str:
        # An address that is kept elsewhere may have a secret in its path.
        return self.reference or mask_address(self.url)


class SourcePlace(BackendAddress, frozen=True):
    """Where events come from."""

    group: ClassVar[str] = "oncebridge.sources"

    def __str__(self) -> str:
        # A listening source shows its actual port, and its path: senders need it, and it is not a
        # secret, as senders authenticate with api_keys and the like.
        return self.reference or getattr(self.opened, "url", "") or mask_address(self.url)


class StorePlace(BackendAddress, frozen=True):
    """Where delivered events are remembered."""

    group: ClassVar[str] = "oncebridge.stores"


class SinkPlace(BackendAddress, frozen=True):
    """Where events go."""

    group: ClassVar[str] = "oncebridge.sinks"


class DeadPlace(BackendAddress, frozen=True):
    """Where events go that cannot be delivered."""

    group: ClassVar[str] = "oncebridge.dead_letters"


# --- migration ------------------------------------------------------------------------------


@runtime_checkable
class Migrates(Protocol):
    """A store, a sink or dead letters that need a table or the like before use."""

    async def migrate(self) -> list[str]:
        """
        Create what is missing; return a line for each change.

        It is called instead of `open`, on a new backend; `aclose` follows. Safe to run again,
        also while workers run.
        """
        ...


@runtime_checkable
class MigratesBySQL(Migrates, Protocol):
    """A backend that can be prepared with SQL."""

    def migration_sql(self) -> str:
        """Return the SQL that `migrate` runs on an empty database; safe to run again."""
        ...


def as_table(value: Any) -> Any:
    """Return a bare address as a table with only a url."""
    return {"url": value} if isinstance(value, str) else value


def scheme_of(url: str) -> str:
    """Return the scheme of an address; `-` is standard input or output."""
    return "-" if url == "-" else url.partition(":")[0].lower()


# --- whether a command can reach what the service uses --------------------------------------


def is_missing(place: BackendAddress) -> bool:
    """Return whether *place* is a file that does not exist yet, or is still empty."""
    match scheme_of(place.url):
        case "sqlite":
            path = Path(place.url.partition(":")[2])
        case "file":
            path = Path(file_path(place.url))
        case _:
            return False
    return not path.exists() or (path.is_file() and not path.stat().st_size)


def is_out_of_reach(place: BackendAddress) -> bool:
    """Return whether *place* is in the memory of the running service."""
    return scheme_of(place.url) == "memory"


def refuse_memory(place: BackendAddress, what: str) -> None:
    """Raise `ConfigError` if *place* is in memory; *what* is the name of its setting."""
    if is_out_of_reach(place):
        raise ConfigError(
            what,
            f"{place} is inside the memory of the running service, and no other process can read it; "
            "use one on disk, such as sqlite:PATH",
        )
